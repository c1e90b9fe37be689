"""What an output must be (`SamplingParams.structured_outputs`): the tokens that may follow each prefix, by llguidance.

A `Constraint` belongs to one sequence, its forks and its mirror, and holds a matcher that catches up (Law 3): asked
about a place, it rolls back to what it has read in common with that prefix and reads the rest. What it says depends on
the tokens alone, so the masks of a draft's nodes are those that plain decoding would meet there. They are kept until
the sequence grows: a draft model that guessed under them has paid for the target, too. A drafter may do to its forks
what it likes: they are not taken for the sequence, whose tokens are compared, and what is kept is handed to nobody who
could write on it.

Where the grammar forces text, llguidance allows one token at a time, the one that its tokenizer would write: those are
drafted for free (`fit`), whoever drafts beside them.
"""

from __future__ import annotations

import importlib
import json
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, takewhile
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.config import MOST_NODES, StructuredOutputsParams
from outrider.draft import Draft
from outrider.errors import ConfigError, ConstraintError, told
from outrider.grammar import MOST_TEXT, behind, pieces, written
from outrider.outputs import common

MOST_FORCED = 64  # tokens that are drafted behind one node
LONGEST_FORCED = 4096  # tokens that a grammar may force in a row: some would go on for ever
KEPT = 64  # grammars for which a tokenizer keeps what was read
STACK = 2**28  # bytes, while a grammar is read: its rules may follow one another deeply (address space, mostly)
LIMITS = {"initial_lexer_fuel": 300_000, "max_lexer_states": 50_000, "verbose_errors": False}
END = "<|end of the structured output|>"
NO_TEXT = "no text can satisfy it"
SAID = {  # for what llguidance says, if this is in it
    "NoExtension": NO_TEXT,
    "Too many items": "too many rules are open at once: lists belong in `*`, not in rules that end with themselves",
    "coerce_one_of": "oneOf is read where no value fits two of its schemas, as far as can be seen; anyOf is always",
}
Bits = NDArray[np.uint8]  # one a token, eight in a byte, the lowest first
T = TypeVar("T")


class Text(Protocol):
    """A sequence, as far as a constraint looks at it."""

    tokens: list[int]
    prompt_len: int

    @property
    def settled(self) -> int:
        """How many tokens will never change."""


@dataclass
class Grammar:
    """What was read of a request's constraint, for a tokenizer."""

    matcher: Any  # at the beginning; copied for each sequence
    make: Callable[[], Any]  # another one, which shares nothing with it
    end: int  # the token that stands for the end of the output
    guess: int | None  # the token that the tokenizer ends texts with
    vocab: int  # the model's logits
    own: frozenset[int]  # tokens that stand in no text: where one may follow, the grammar names it


@dataclass
class Place:
    """What is known of the place behind a prefix; None where nobody has asked."""

    mask: Bits | None = None
    forced: list[int] | None = None
    complete: bool = False  # with the mask: only the end may follow


@dataclass(eq=False)
class Constraint:
    """A grammar, followed along one sequence. `ends` are the tokens that end it, wherever the grammar lets it end.

    `silent`: none of them is the model's own end of text, so the sequence ends by itself where nothing may follow.
    """

    grammar: Grammar
    ends: frozenset[int]
    silent: bool
    read: list[int] = field(default_factory=list)  # output tokens that the matcher stands behind
    known: int = 0  # so many of these are settled
    places: dict[tuple[int, ...], Place] = field(default_factory=dict)  # by what stands behind the settled output, ...
    settled: list[int] = field(default_factory=list)  # ... which is this

    def __post_init__(self) -> None:
        self.matcher = self.grammar.matcher.deep_copy()

    def mask(self, seq: Text, path: list[int]) -> Bits | None:
        """Which tokens may follow the sequence and then `path`; None where nothing is asked of them.

        So it is behind what ends the output, and behind what it cannot be. Raises ConstraintError if no token may
        follow, or the grammar grows too complex to tell.
        """
        place = self._place(seq, path)
        if place.mask is None:
            found = self._ask(seq, path, lambda: self.matcher.compute_bitmask())
            if found is None:
                return None
            bits = np.frombuffer(found, np.uint8).copy()
            at, bit = divmod(self.grammar.end, 8)
            ends = bool(bits[at] >> bit & 1)
            bits[at] &= ~np.uint8(1 << bit)
            whole, rest = divmod(self.grammar.vocab, 8)  # the model's own
            bits[whole + 1 :] = 0
            bits[whole : whole + 1] &= np.uint8((1 << rest) - 1)
            place.complete = not bits.any()
            if np.count_nonzero(bits) == 1:  # it may be forced, and without end
                self._forced(seq, path)
            for token in self.ends:
                if token not in self.grammar.own:  # of a text's own, such as a quote: it ends what is complete alone
                    bits[token // 8] &= ~np.uint8(1 << token % 8)
                bits[token // 8] |= np.uint8(ends << token % 8)
            if not ends and not bits.any():
                raise ConstraintError("structured_outputs: nothing may follow what the output has come to")
            place.mask = np.frombuffer(bits.tobytes(), np.uint8)  # read-only for good
        return None if place.complete and self.silent else place.mask

    def done(self, seq: Text) -> bool:
        """Whether the output is complete and no token will say so. Raises ConstraintError as `mask` does."""
        return self.silent and (self.mask(seq, []) is None)

    def forced(self, seq: Text, path: list[int]) -> list[int]:
        """The tokens that must follow the sequence and `path`, and a guess at the one that ends it."""
        place = self._place(seq, path)
        if place.forced is None:
            place.forced = []
            try:
                known = takewhile(self.grammar.vocab.__gt__, self._forced(seq, path))
                found = list(islice(known, MOST_FORCED))
                if not self.silent and self._ask(seq, path + found, lambda: self.matcher.is_stopped()):
                    guess = self.grammar.guess
                    found.append(guess if guess in self.ends else min(self.ends))
                place.forced = found
            except ConstraintError:
                pass  # `mask` says so where it matters
        return place.forced.copy()

    def fit(
        self, seq: Text, draft: Draft, depth: int, coins: bool, most: int = MOST_NODES, k: int = MOST_NODES
    ) -> Draft:
        """A draft without what cannot be, and with what is forced behind its leaves; `depth` tokens deep at most.

        Of its own nodes the first `k` count; what is forced, the drafter's too, makes it no larger than `most` nodes.
        Where coins are flipped, the law of each node that is left is the one it had, given that it is there.
        """
        kept, leaves = {-1: -1}, {-1: list[int]()}
        tokens, parents, laws, forced = list[int](), list[int](), list[Tensor](), set[int]()
        for node in range(draft.verifiable):  # parents come first
            parent, token = draft.parents[node], draft.tokens[node]
            path = list(draft.words(parent)) if parent in kept else None
            # who drafts may call others forced
            must = path is not None and node in draft.forced and self.forced(seq, path)[:1] == [token]
            k -= not must
            if k < 0 or len(tokens) == most:
                break
            if path is not None and self._allows(seq, path, token):
                kept[node] = len(tokens)
                forced.update([len(tokens)] if must else [])
                leaves.pop(kept[parent], None)
                leaves[kept[node]] = [*path, token]
                tokens.append(token)
                parents.append(kept[parent])
                if draft.q is not None:
                    laws.append(self._given(seq, path, draft.q[node]) if coins else draft.q[node])
        for leaf, path in leaves.items():
            for token in self.forced(seq, path)[: min(depth - len(path), max(0, most - len(tokens)))]:
                forced.add(len(tokens))
                tokens.append(token)
                parents.append(leaf)
                leaf = len(tokens) - 1
        riders = range(draft.verifiable, len(draft))  # nobody verifies them; all of them, or none
        if not all(draft.parents[node] in kept or draft.parents[node] in riders for node in riders):
            riders = range(0)
        if draft.q is not None:
            laws += [draft.q.new_zeros(draft.q.shape[1])] * (len(tokens) + len(riders) - len(laws))
        for node in riders:
            kept[node] = len(tokens)
            tokens.append(draft.tokens[node])
            parents.append(kept[draft.parents[node]])
        by: list[str] | None = None
        if draft.by is not None:
            of = {at: draft.by[node] for node, at in kept.items() if node >= 0}
            by = [of.get(at, "") for at in range(len(tokens))]
        q = torch.stack(laws) if laws else None
        return Draft(tokens, parents, q, len(riders), frozenset(forced), by=by)

    def _allows(self, seq: Text, path: list[int], token: int) -> bool:
        try:
            if token in self.ends:
                mask = self.mask(seq, path)
                return mask is not None and bool(mask[token // 8] >> token % 8 & 1)
            if forced := self.forced(seq, path):
                return token == forced[0]
            return self._ask(seq, path, lambda: self.matcher.validate_tokens([token])) == 1
        except ConstraintError:
            return False

    def _given(self, seq: Text, path: list[int], law: Tensor) -> Tensor:
        """A distribution (vocab,), given that the token may stand here."""
        try:
            mask = self.mask(seq, path)
        except ConstraintError:  # which is the target's to meet
            return law
        law = law * unpacked(mask, len(law)).to(law.device) if mask is not None else law
        return law / law.sum().clamp(min=torch.finfo(law.dtype).tiny)

    def _place(self, seq: Text, path: list[int]) -> Place:
        settled = seq.tokens[seq.prompt_len : seq.settled]  # of a fork that was rewritten it is another one
        if settled != self.settled:
            self.places.clear()
            self.settled = settled
            if settled[: self.known] != self.read[: self.known]:
                self.known = 0
        key = (*seq.tokens[seq.settled :], *path)
        return self.places.setdefault(key, Place())

    def _ask(self, seq: Text, path: list[int], ask: Callable[[], T]) -> T | None:
        """What the matcher says behind the output and `path`; None if the output cannot go on like this.

        Matchers of a grammar share a lexer, which grows with all that is asked of it and has an end. What is beyond
        that is asked once more of one that has read nothing else: an answer depends on the tokens alone.
        """
        for fresh in (False, True):
            if self.matcher.is_error():
                self._begin()
            found = ask() if self._go(seq, path) else None
            if not self.matcher.is_error():
                return found
            if not fresh:
                self.grammar.matcher = self.grammar.make()
        raise ConstraintError(f"structured_outputs: the output cannot go on: {_line(self.matcher.get_error())}")

    def _begin(self) -> None:
        self.matcher, self.known = self.grammar.matcher.deep_copy(), 0
        self.read.clear()

    def _go(self, seq: Text, path: list[int]) -> bool:
        """Bring the matcher behind the output and `path`.

        False, where it was, if the output cannot go on like this; and if something went wrong with the matcher.
        """
        wanted = self.settled[self.known :] + seq.tokens[seq.settled :] + path
        read = self.read[self.known :]
        same = common(read, wanted)
        if any(token in self.ends for token in wanted[same:]):
            return False
        if back := len(read) - same:
            self.matcher.rollback(back)
            del self.read[self.known + same :]
        fresh = wanted[same:]
        if fresh:
            if (valid := self.matcher.validate_tokens(fresh)) < len(fresh):
                self.matcher.consume_tokens(fresh[:valid])
                self.matcher.compute_bitmask()  # a lexer that is full says so here alone
                self.matcher.rollback(valid)
                if self.matcher.is_error():
                    return False
                if self.known + same + valid < len(self.settled):  # chosen by the masks
                    raise ConstraintError("structured_outputs: the output cannot go on: it is not what it must be")
                return False
            self.matcher.consume_tokens(fresh)
            self.read += fresh
        self.known = len(self.settled)
        return not self.matcher.is_error()

    def _forced(self, seq: Text, path: list[int]) -> list[int]:
        found: list[int] = self._ask(seq, path, lambda: self.matcher.compute_ff_tokens()) or []
        if len(found) > LONGEST_FORCED:
            raise ConstraintError(f"structured_outputs: more than {LONGEST_FORCED} tokens in a row can only be these")
        return found


def unpacked(mask: Bits, vocab: int) -> Tensor:
    """A mask as (vocab,) bool."""
    return torch.from_numpy(np.unpackbits(mask, count=vocab, bitorder="little").view(np.bool_))


# --- reading constraints ----------------------------------------------------------------------------------------------


@dataclass
class Binding:
    """A tokenizer as llguidance sees it, and the grammars that were read for it, the last ones."""

    tokenizer: Any
    end: int
    own: frozenset[int]  # see Grammar
    grammars: dict[str, Grammar] = field(default_factory=dict)


_bindings: WeakKeyDictionary[Any, dict[int, Binding]] = WeakKeyDictionary()  # by tokenizer, then by vocabulary
_binding = threading.Lock()
_stacking = threading.Lock()


def read(given: StructuredOutputsParams, tokenizer: Any, vocab: int) -> Grammar:
    """A request's constraint, for a model with `vocab` logits.

    Raises ConfigError for what is no schema, regex or grammar, asks too much, or that no text satisfies; without a
    tokenizer; and without llguidance.
    """
    if tokenizer is None:
        raise ConfigError("structured_outputs need a tokenizer, and this model has none")
    library = _library()
    with _binding:
        own = _bindings.setdefault(tokenizer, {})
        if vocab not in own:
            own[vocab] = _bind(library, tokenizer, vocab)
        binding = own[vocab]
    key = repr((given, [type(value) for value in given.asked.values()]))  # of what is forced a text of ours says more
    if (grammar := binding.grammars.pop(key, None)) is None:
        text = _text(given)
        if len(text) > MOST_TEXT:
            raise ConfigError(f"structured_outputs has {len(text)} characters; at most {MOST_TEXT}")
        eos, added = getattr(tokenizer, "eos_token_id", None), tokenizer.get_added_vocab()
        for piece in [piece for mark in given.marks for piece in pieces(mark, added)]:
            if piece in added and added[piece] in (eos, binding.end):
                raise ConfigError(f"structured_outputs: after {piece!r} nothing comes: it ends a text")
        make = partial(_deeply, partial(_compile, library, binding, given, text, added))
        guess = eos if isinstance(eos, int) else None
        grammar = Grammar(make(), make, binding.end, guess, vocab, binding.own)
    with _binding:
        binding.grammars[key] = grammar
        while len(binding.grammars) > KEPT:
            del binding.grammars[next(iter(binding.grammars))]
    return grammar


def _library() -> Any:
    try:
        return importlib.import_module("llguidance")
    except ImportError:
        raise ConfigError("structured_outputs need llguidance: pip install 'outrider[grammar]'") from None


def _bind(library: Any, tokenizer: Any, vocab: int) -> Binding:
    """The end of the output is a token of its own, which nobody writes: which tokens end a text is the request's.

    So are all special tokens: where a text that looks like one is forced, it is written by others.
    """
    try:
        backend = type(tokenizer.backend_tokenizer).from_str(tokenizer.backend_tokenizer.to_str())
        backend.no_padding()
        backend.no_truncation()
        backend.add_special_tokens([END])
        end, known = backend.token_to_id(END), tokenizer.get_vocab().values()
        if end in known:
            raise ValueError("its ids are not consecutive")
        size = max(vocab, end + 1, *known)
        about = json.loads(backend.to_str())
        text = _nameless(about)
        own = frozenset(token["id"] for token in about["added_tokens"] if token["special"])
        return Binding(library.LLTokenizer(text, n_vocab=size, eos_token=end), end, own)
    except Exception as error:  # whatever a tokenizer lacks
        raise ConfigError(f"structured_outputs cannot be used with this model's tokenizer: {told(error)}") from None


def _nameless(tokenizer: dict[str, Any]) -> str:
    """A tokenizer (as `tokenizers` keeps it) that finds its special tokens in no text: their names are drawn.

    Those that llguidance takes for special are marked so.
    """
    names = dict[str, str]()
    for token in tokenizer["added_tokens"]:
        name = token["content"]
        if token["special"] or (name.startswith("<") and name.endswith(">")):  # which llguidance takes for special
            token["special"], token["content"] = True, names.setdefault(name, secrets.token_hex(16))
    model = tokenizer["model"]
    if isinstance(vocab := model["vocab"], dict):
        model["vocab"] = {names.get(piece, piece): number for piece, number in vocab.items()}
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    if "merges" in model:  # none may make what is not there
        pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
        model["merges"] = [pair for pair in pairs if not {*pair, "".join(pair)} & names.keys()]
    if "unk_token" in model:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    return json.dumps(tokenizer)


def _text(given: StructuredOutputsParams) -> str:
    """What has to be read, as text."""
    (value,) = given.asked.values()
    if isinstance(value, str):
        return value
    try:
        return json.dumps({"type": "object"} if value is True else value, ensure_ascii=False, default=dict)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"structured_outputs: no JSON can be made of it: {told(error)}") from None


def _compile(
    library: Any, binding: Binding, given: StructuredOutputsParams, text: str, added: Mapping[str, int]
) -> Any:
    (kind,) = given.asked
    try:
        text.encode()  # no surrogates
        source = written(library, given, text, added)
        limits = library.LLParserLimits(**LIMITS)
        matcher = whole = library.LLMatcher(binding.tokenizer, source, log_level=0, limits=limits)
        if given.after:
            source = behind(given.marks, source, added)
            whole = library.LLMatcher(binding.tokenizer, source, log_level=0, limits=limits)
    except RecursionError:
        raise ConfigError(f"structured_outputs: {kind} is nested too deeply") from None
    except Exception as error:  # its conversions raise what they like
        raise ConfigError(f"structured_outputs: {kind} cannot be used: {_line(str(error))}") from None
    probe = matcher.deep_copy()  # what goes wrong at the beginning is told before anything runs
    for _ in range(3):
        bits = np.frombuffer(b"" if probe.is_error() else probe.compute_bitmask(), np.uint8)
        some = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        if probe.is_error() or not len(some):
            why = _line(probe.get_error()) if probe.is_error() else NO_TEXT
            raise ConfigError(f"structured_outputs: {kind} cannot be used: {why}")
        if some[0] != binding.end:  # what drafts need
            other = probe.deep_copy()
            other.consume_tokens([int(some[0])])
            other.rollback(1)
            if not other.is_error():
                other.consume_tokens([int(some[0])])
                other.compute_bitmask()  # for which some regexes take more than there is
            if other.is_error() and "NoExtension" not in other.get_error():
                raise ConfigError(f"structured_outputs: {kind} cannot be used: {_line(other.get_error())}")
        forced = probe.compute_ff_tokens()
        if len(forced) > LONGEST_FORCED:
            raise ConfigError(f"structured_outputs: {kind} forces more than {LONGEST_FORCED} tokens in a row")
        probe.consume_tokens(forced[:1])
    if whole.is_error():
        raise ConfigError(f"structured_outputs: {kind} cannot be used: {_line(whole.get_error())}")
    return whole


def _line(message: str) -> str:
    line = " ".join(message.replace("<non-verbose/>", "").split())[:200]
    return next((words for sign, words in SAID.items() if sign in message), line)


def _deeply(work: Callable[[], T]) -> T:
    """What `work()` gives, on a thread with a large stack."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((work(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    with _stacking:
        before = threading.stack_size(STACK)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    result, error = outcome[0]
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]
