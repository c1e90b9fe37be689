"""The Drafter protocol and `step`, the one decoding loop body, at every level."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import Tensor

from outrider.config import MOST_NODES, Rule, real
from outrider.draft import Draft, Verdict
from outrider.errors import DrafterError, brief, told
from outrider.kv import View
from outrider.outputs import SpecMetrics
from outrider.runner import UNKNOWN, Output, Runner
from outrider.sampling import Row, distribution, draws, surely, surest
from outrider.sequence import Sequence
from outrider.verify import COUPLED, verify

Guess = tuple[int, float, Tensor | None]  # a token, how sure its drafter is of it, the law it was drawn from
NOTHING = Draft()  # most guesses of a drafter that rarely has one: they need no closer look
LATE = 64  # tokens that a draft model lacks of a text, before others stop waiting for it to read them


@dataclass
class Drafter:
    """Base of all drafters. A drafter only guesses (Law 5): it never touches masks, positions, rollback or sampling.

    Subclasses are dataclasses; their fields are the options of `speculative_config`. Whatever a drafter proposes, the
    output stays the target's; a good guess only makes it come sooner.
    """

    num_speculative_tokens: int = 4  # k: most tokens of a draft, over all its branches
    name: ClassVar[str] = ""  # set when it is found by its name
    cheap: ClassVar[bool] = False  # whether its guesses run no model, and take microseconds
    idle: ClassVar[bool] = False  # whether it never guesses nor looks: where nothing is to be drafted, no step asks it

    def attach(self, target: Runner, load: Callable[[str], Runner]) -> None:
        """Called once before use. `load(name)` gives a runner of another model on the target's device."""

    def rests(self, seqs: list[int]) -> bool:
        """Whether a step of these sequences, told by their ids, is not worth a look: then it is a plain one.

        Neither propose nor observe is called in it.
        """
        return False

    def propose(self, seqs: list[Sequence], k: int) -> list[Draft]:
        """Guess what follows each sequence, at most k nodes each; an empty Draft is always right.

        The sequences may only be read; a `fork()` of one may be extended. `seq.rule` is what will verify the draft.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define propose")

    def observe(self, seqs: list[Sequence], verdicts: list[Verdict], output: Output) -> None:
        """See what became of the drafts. The sequences have grown by the verdicts' tokens.

        Of sequence i `output.logits[i]` are (1 + nodes, vocab), `output.hidden[i]` (1 + nodes, hidden): row 0 follows
        the token that was its last, row 1 + j node j.
        """

    def look(self, bit: int) -> tuple[Any, ...] | None:
        """How `auto` asks an index of every sequence, without a Draft between (control.Look); None: it does not."""
        return None

    def remember(self, text: list[int]) -> None:
        """A text to come may resemble this one: the end of a prompt, and what its caller expects behind it."""

    def forget(self, seq: Sequence) -> None:
        """A sequence that was shown is done, or begins anew later: give back what it held. It may only be read."""

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of keys and values this drafter will hold for a sequence of so many tokens."""
        return 0


@dataclass
class StepTimes:
    """Seconds that one step took, in all and by part."""

    total: float = 0.0
    draft: float = 0.0
    target: float = 0.0  # the forward and its verification
    rows: int = 0  # of the forward, prompts that were read with it not counted


def step(
    runner: Runner,
    drafter: Drafter,
    seqs: list[Sequence],
    k: int,
    times: StepTimes | None = None,
    rule: Rule = COUPLED,
    reading: list[tuple[Sequence, int]] | None = None,
) -> list[Verdict]:
    """Grow each sequence by at least one token, with one forward over all of them (and chunks of long prompts first).

    Of the sequences in `reading`, of which the drafter does not hear, so many more tokens are read along.

    Drafts have at most `k` nodes that can be accepted, and at most the sequence's own `k`; of one whose k is 0 the
    drafter never hears.
    Each verdict's tokens are those really appended: a token that ends its sequence cuts what lies behind it. A sequence
    whose verdict has an error did not grow. Raises DrafterError, before anything has changed, if `propose` raises or
    gives what is no draft; and if `observe` raises, with the verdicts.
    """
    began = time.perf_counter()
    if k:  # it counts nodes, not depth: a short room clips drafts, and makes k no smaller
        k = min(k, MOST_NODES) if any([seq.room > 1 for seq in seqs]) else 0
    # numbers of the sequences of which the drafter hears
    told_of = [i for i, seq in enumerate(seqs) if seq.k != 0] if k or not drafter.idle else []
    constrained = any([seqs[i].constraint for i in told_of])  # what a grammar forces is drafted in any case
    if told_of and not constrained and drafter.rests([seqs[i].id for i in told_of]):
        told_of = []
    drafts = [Draft()] * len(seqs)  # one object for all: nobody is shown it, nor changes it
    if told_of:
        for i, draft in zip(told_of, _drafts(runner, drafter, seqs, told_of, k, rule, reading or ()), strict=True):
            drafts[i] = draft
    drafted = time.perf_counter()
    drawn = None
    if runner.model.draws and rule.method == "coupled":
        drawn = draws(seqs, drafts, runner.model.config.vocab_size)
    output = runner.extend(seqs, drafts, reading or (), draws=drawn)
    verdicts = verify(seqs, drafts, output.flat, rule, output.best) if seqs else []
    runner.commit(seqs, output, verdicts)
    verified = time.perf_counter()
    for seq, draft, verdict in zip(seqs, drafts, verdicts, strict=True):
        verdict.forced = draft.forced
        verdict.by = None if draft.by is None else tuple(draft.by)  # the list is the drafter's, who may change it
        if (taken := seq.accept(verdict.tokens)) < len(verdict.tokens):
            del verdict.tokens[taken:], verdict.path[taken:], verdict.logprobs[taken:]
    observing = time.perf_counter()
    if times is not None:  # who observes may change its drafts
        times.rows = sum([1 + len(draft.tokens) for draft in drafts])
    try:
        if told_of:
            shown = [seqs[i].shown(rule) for i in told_of]
            drafter.observe(shown, [verdicts[i].copy() for i in told_of], output.of(told_of))
        else:
            runner.reuse(output)
    except Exception as error:  # a drafter may be anybody's: it raises what it likes
        raise DrafterError(f"drafter {_name(drafter)}: observe raised {told(error)}", verdicts) from error
    ended = time.perf_counter()
    if times is not None:
        times.total, times.target = ended - began, verified - drafted
        times.draft = drafted - began + ended - observing
    return verdicts


def _drafts(
    runner: Runner,
    drafter: Drafter,
    seqs: list[Sequence],
    told_of: list[int],
    k: int,
    rule: Rule,
    reading: Iterable[tuple[Sequence, int]],
) -> list[Draft]:
    """What the drafter proposes for those it is told of, checked, and clipped to what each may take.

    Raises DrafterError.
    """
    asked, config = [seqs[i] for i in told_of], runner.model.config
    k = min(k, max([k if seq.k is None else seq.k for seq in asked]))
    shown = [seq.shown(rule) for seq in asked]
    try:
        guesses = drafter.propose(shown, k)
    except Exception as error:
        raise DrafterError(f"drafter {_name(drafter)}: propose raised {told(error)}") from error
    if not isinstance(guesses, (list, tuple)) or len(guesses) != len(asked):
        what = f"{len(guesses)}" if isinstance(guesses, (list, tuple)) else brief(guesses)
        raise DrafterError(f"drafter {_name(drafter)}: propose must return {len(asked)} drafts in a list, not {what}")
    drafts: list[Draft] = []
    limits: list[tuple[int, int]] = []
    border = config.border
    for seq, seen, guess in zip(asked, shown, guesses, strict=True):
        deepest, nodes = seq.room - 1, k if seq.k is None else min(k, seq.k)
        if border is not None and len(seq.tokens) <= border:
            deepest = min(deepest, border - len(seq.tokens))  # what lies beyond sees all keys rotated otherwise
        try:
            if (fault := _fault(guess, config.vocab_size, rule)) is None:
                fitted = k and seq.constraint is not None  # below by `fit`, which knows which nodes count
                draft = guess.clip(deepest, config.vocab_size, None if fitted else nodes)
        except Exception as error:  # a tensor that cannot be looked at
            fault = told(error)
        if fault:
            raise DrafterError(f"drafter {_name(drafter)}: propose must return Drafts; {fault}")
        if isinstance(seen.metrics.inner, SpecMetrics):  # what a cascade counts within itself, on the mirror
            seq.metrics.inner = seen.metrics.inner
        drafts.append(draft)
        limits.append((deepest, nodes))
    more = [i for i, draft in enumerate(drafts) if draft.riders or asked[i].constraint is not None]
    if more:  # riders and what a grammar forces come on top of k, where a forward has room for them
        room = runner.chunk - sum([n for _, n in reading]) - sum(map(runner.pending, seqs)) - k * len(asked)
        most = k + max(0, room // len(more)) if k else 0
        for i in more:
            seq, draft, (deepest, nodes) = asked[i], drafts[i], limits[i]
            if seq.constraint is not None and k:  # if anything is drafted at all
                draft = seq.constraint.fit(seq, draft, deepest, rule.flips_coins, min(most, MOST_NODES), nodes)
            drafts[i] = draft.without_riders() if len(draft.tokens) > most else draft
    return drafts


def _name(drafter: Drafter) -> str:
    return drafter.name or type(drafter).__name__


def _fault(guess: Any, vocab: int, rule: Rule) -> str | None:
    """What is wrong with what should be a Draft; None if nothing is."""
    if type(guess) is not Draft:
        return f"{brief(guess)} is none"
    tokens, parents, trust, by, q = guess.tokens, guess.parents, guess.trust, guess.by, guess.q
    lists = isinstance(tokens, list) and isinstance(parents, list)
    if lists and not tokens and guess == NOTHING:
        return None
    if not lists or {*map(type, tokens), *map(type, parents), type(guess.riders)} != {int}:
        return "tokens and parents are lists of int, riders is one"
    try:
        guess.__post_init__()
    except ValueError as error:  # it may have been changed since it was made
        return str(error)
    n, riders = len(tokens), guess.riders
    if trust is not None and (
        not isinstance(trust, list) or len(trust) != n or not all([real(own, 0, 1) is not None for own in trust])
    ):
        return f"trust is a list of {n} numbers from 0 to 1"
    if by is not None and (not isinstance(by, list) or len(by) != n or not all([isinstance(name, str) for name in by])):
        return f"by is a list of {n} names"
    if not isinstance(guess.forced, frozenset):
        return "forced is a frozenset of nodes"
    if n - riders > MOST_NODES or riders > MOST_NODES:
        return f"it has {n - riders} nodes and {riders} riders; at most {MOST_NODES} of each are of use"
    if q is not None:
        if not isinstance(q, Tensor) or q.shape != (n, vocab) or not q.is_floating_point():
            what = f"{tuple(q.shape)} of {q.dtype}" if isinstance(q, Tensor) else type(q).__name__
            return f"q is a float tensor of shape {(n, vocab)}, not {what}"
        if rule.flips_coins:  # else nobody looks at it
            sums = q.sum(-1, dtype=torch.float64)
            if bool((q < 0).any()) or not bool((((sums - 1).abs() < 0.01) | (sums == 0)).all()):
                return "each row of q is a distribution, or zeros"
    return None


class Forking(Drafter):
    """A drafter whose runner writes on in forks of the sequences."""

    runner: Runner

    @cached_property  # the __init__ of dataclasses calls no other
    def _forks(self) -> dict[int, Sequence]:
        """The last fork of each sequence, rewound."""
        return {}

    def forget(self, seq: Sequence) -> None:
        """Free what the runner's cache holds of the sequence."""
        self.runner.free(seq)
        self._forks.pop(seq.id, None)

    def kv_bytes(self, tokens: int) -> int:
        """The runner's cache."""
        return self.runner.kv.nbytes(tokens)


class Autoregressive(Forking):
    """A drafter that lets a runner write token by token: another model's, or the target's through a view.

    It samples with the request's parameters and the very noise the target will use (Gumbel coupling, 2408.07978), so
    that where both agree on the distribution they agree on the token, at any temperature. For a rule that flips coins
    it draws with other noise, independent of the target's, and reports the distribution it drew from.

    How sure it is of a token is the softmax of what the choice looked at, noise included: where the best two are close
    a slightly other distribution would have chosen otherwise. A path less sure than `min_token_prob` ends before the
    token; behind it for a rule that flips coins, whose law must not be asked which token was drawn.
    """

    vocab: int  # the target's
    min_token_prob: float = 0.0

    def propose(self, seqs: list[Sequence], k: int) -> list[Draft]:
        """One chain per sequence, up to k long; a fork that ends, or reaches the runner's context, stops early."""
        forks = [seq.fork(self._forks.pop(seq.id, None)) for seq in seqs]
        drawn: dict[int, list[Tensor]] = {seq.id: [] for seq in seqs}
        forced: dict[int, set[int]] = {seq.id: set() for seq in seqs}
        trust: dict[int, list[float]] = {seq.id: [] for seq in seqs}
        readable = self.runner.model.config.vocab_size
        for fork in forks:
            self.runner.begin(fork)
        alive, late = self._late(forks)
        if readable < self.vocab:  # what the target's vocabulary pads it with cannot be read
            alive = [f for f in alive if k and max(f.tokens) < readable]
        chained = self.runner.chains and not any(fork.edited for fork in forks)
        n = max(1, k) if chained else 1  # tokens that are written before the host reads which they are
        for _ in range(0, k, n):
            for fork in alive:
                if fork.constraint and not fork.finish_reason:  # what must come takes no forward
                    most = max(0, min(MOST_NODES - k - len(forced[fork.id]), fork.room - 1))
                    taken = fork.accept(fork.constraint.forced(fork, [])[:most])
                    forced[fork.id].update(range(len(trust[fork.id]), len(trust[fork.id]) + taken))
                    if fork.rule.flips_coins:  # they were drawn from nothing
                        drawn[fork.id] += [torch.zeros(self.vocab, dtype=torch.float32)] * taken
                    trust[fork.id] += [1.0] * taken
            alive = [fork for fork in alive if not fork.finish_reason]
            going = []
            for fork, guesses in zip(alive, self._ahead(alive, n, late), strict=True):
                for token, sure, law in guesses:
                    likely = math.prod(trust[fork.id]) * sure >= self.min_token_prob
                    if token >= 0 and (likely or law is not None):
                        fork.accept([token])
                        drawn[fork.id] += [] if law is None else [law]
                        trust[fork.id].append(min(1.0, sure))
                    if token < 0 or not likely or fork.finish_reason:
                        break
                else:
                    going += [fork] if len(guesses) == n else []
            alive, late = going, []
        drafts = [Draft.chain(f.tokens[len(s.tokens) :]) for f, s in zip(forks, seqs, strict=True)]
        for seq, draft in zip(seqs, drafts, strict=True):
            draft.q = torch.stack([law.to(drawn[seq.id][-1]) for law in drawn[seq.id]]) if drawn[seq.id] else None
            draft.forced = frozenset(forced[seq.id])
            draft.trust = trust[seq.id]
        self._forks |= {fork.id: fork.rewind() for fork in forks}
        return drafts

    def _ahead(self, seqs: list[Sequence], n: int, late: list[tuple[Sequence, int]]) -> list[list[Guess]]:
        """The next n tokens of each, or as many as there is room for; beside the first, some of `late` are read.

        What a forward chooses is fed to the next one where it lies. The host reads all of them at the end, once.
        """
        alive, starts = seqs, [len(seq.tokens) for seq in seqs]
        chosen: dict[int, list[Any]] = {seq.id: [] for seq in seqs}
        choose: Any = surely if n == 1 else surest  # which leaves what it finds on the device
        for i in range(n):
            alive = [seq for seq in alive if seq.room > 1 and len(seq.tokens) < self.runner.max_len]
            if not alive:
                break
            fed = torch.stack([chosen[seq.id][-1][0] for seq in alive]).clamp(min=0) if i else None
            output = self.runner.extend(alive, reading=late, fed=fed)
            logits, late = output.flat[:, : self.vocab], []
            if missing := self.vocab - logits.shape[1]:  # padding rows one model has and the other has not
                logits = torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
            rows, own_noise = [Row(seq) for seq in alive], alive[0].rule.flips_coins
            laws = distribution(logits, rows) if own_noise else [None] * len(rows)  # before they grow: penalties count
            found = zip(*choose(logits, rows, "draft" if own_noise else ""), laws, strict=True)
            self.runner.reuse(output)
            for seq, guess in zip(alive, found, strict=True):
                chosen[seq.id].append(guess)
                seq.tokens.append(UNKNOWN)
        guesses = list(chosen.values())
        if n > 1 and any(guesses):
            tokens, sure = (torch.stack([guess[i] for own in guesses for guess in own]).tolist() for i in range(2))
            known = zip(tokens, sure, [law for own in guesses for _, _, law in own], strict=True)
            guesses = [list(islice(known, len(own))) for own in guesses]
            for seq, own in zip(seqs, guesses, strict=True):
                self.runner.learn(seq, [token for token, _, _ in own])
        for seq, start in zip(seqs, starts, strict=True):
            del seq.tokens[start:]
        return guesses

    def _late(self, forks: list[Sequence]) -> tuple[list[Sequence], list[tuple[Sequence, int]]]:
        """The forks to draft for; and of the late ones, whose texts are long and unread, how much to read beside.

        If all are late, all are drafted for: nobody waits for them.
        """
        if not isinstance(self.runner.kv, View):  # which takes over, or skips, most of a text
            forks = [fork for fork in forks if fork.room > 1 and len(fork.tokens) < self.runner.max_len]
            ready = [fork for fork in forks if self.runner.pending(fork) <= LATE]
            if ready and (late := [fork for fork in forks if fork not in ready]):
                readable = self.runner.model.config.vocab_size
                late = [fork for fork in late if max(fork.tokens) < readable]
                return ready, [(fork, max(1, self.runner.chunk // 4 // len(late))) for fork in late]
        return forks, []


class Nested(Forking):
    """Any drafter inside a view of the target: `step` with the view as the target, until there are enough tokens.

    By Law 1 the view's tokens are the target's wherever the two agree, so this needs no rule of acceptance of its own.
    """

    inner: Drafter
    view: str  # such as `retrieval:budget=4096`

    def attach(self, target: Runner, load: Callable[[str], Runner]) -> None:
        """The inner drafter's target is the view."""
        self.runner = target.view(self.view)
        self.inner.attach(self.runner, load)

    def propose(self, seqs: list[Sequence], k: int) -> list[Draft]:
        """Chains of k tokens, each verified through the view."""
        forks = [seq.fork(self._forks.pop(seq.id, None)) for seq in seqs]
        for seq, fork in zip(seqs, forks, strict=True):
            fork.metrics = seq.metrics.inner = seq.metrics.inner or SpecMetrics()
        lacking = {seq.id: k for seq in seqs}
        while alive := [f for f in forks if lacking[f.id] > 0 and not f.finish_reason and f.room > 1]:
            inner_k = min(self.inner.num_speculative_tokens, max(lacking[f.id] for f in alive) - 1)
            for fork, verdict in zip(alive, step(self.runner, self.inner, alive, inner_k), strict=True):
                lacking[fork.id] -= len(verdict.tokens) if verdict.error is None else k
                fork.metrics.add(verdict.drafted, len(verdict.path), len(verdict.tokens))
        drafts = [Draft.chain(f.tokens[len(s.tokens) : len(s.tokens) + k]) for f, s in zip(forks, seqs, strict=True)]
        self._forks |= {fork.id: fork.rewind() for fork in forks}
        return drafts

    def remember(self, text: list[int]) -> None:
        """Let the inner drafter remember it."""
        self.inner.remember(text)

    def forget(self, seq: Sequence) -> None:
        """Free what both hold of it."""
        super().forget(seq)
        self.inner.forget(seq)

    def kv_bytes(self, tokens: int) -> int:
        """The view's and the inner drafter's."""
        return super().kv_bytes(tokens) + self.inner.kv_bytes(tokens)
