"""A model with its cache: `extend` brings the cache up to date with the sequences and asks for what follows.

Caches catch up, nobody patches up (Law 3). The runner remembers which tokens its cache holds for each sequence;
`extend` keeps the common prefix and feeds the rest. Prefill, chunked prefill, decoding, verification, a drafter's
resync after a rejection and recomputation are this one operation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from outrider.config import SamplingParams
from outrider.draft import Draft, Verdict
from outrider.errors import CheckpointError, ConfigError, told
from outrider.kv import DenseKV, Entry, KVCache, PagedKV, Plan, QuantizedView, View, parse
from outrider.kv.base import QueryLog
from outrider.kv.rows import NORMED, Rows
from outrider.model import Model, Wanted
from outrider.ops import KEY_BLOCK, Linear, follows_paths, native, untouched
from outrider.outputs import Logprob
from outrider.sampling import logprob
from outrider.sequence import Sequence

log = logging.getLogger(__name__)

MASK_ELEMENTS = 2**25  # bounds the mask of a prefill chunk, where there are masks: long contexts in smaller chunks
FEW = 16  # rows of a sequence that any forward takes, if its chunk does
UNKNOWN = -1  # in a sequence's tokens, for one that only the device knows yet
SCORED = 2**24  # logits of a prompt's tokens that are there at a time, where they are asked for


@dataclass
class Output:
    """What one forward gave for each sequence: row 0 follows its last token, row 1 + i follows draft node i."""

    drafts: list[Draft]
    flat: Tensor  # (rows, vocab) float32, the raw logits of all sequences
    states: Tensor  # (rows, hidden), likewise, final and normed
    read: int = 0  # tokens that were fed beside these rows: of prompts, or what the cache had given back
    best: list[int] | None = None  # of each of these rows, if known, the likeliest token, or by `draws`; -1: unknown

    @cached_property
    def logits(self) -> list[Tensor]:
        """Per sequence (1 + nodes, vocab): parts of `flat`."""
        return self._parts(self.flat)

    @cached_property
    def hidden(self) -> list[Tensor]:
        """Per sequence (1 + nodes, hidden): parts of `states`."""
        return self._parts(self.states)

    def _parts(self, rows: Tensor) -> list[Tensor]:
        if len(self.drafts) == 1:  # what calls into torch costs is cold between two forwards
            return [rows]
        return list(torch.split(rows, [1 + len(draft.tokens) for draft in self.drafts]))

    @property
    def starts(self) -> list[int]:
        """Per sequence the row of `flat` and `states` that is its row 0."""
        return [*accumulate((1 + len(draft.tokens) for draft in self.drafts[:-1]), initial=0)]

    def of(self, which: list[int]) -> Output:
        """Of some of the sequences only."""
        if len(which) == len(self.drafts):
            return self
        drafts, starts = [self.drafts[i] for i in which], self.starts
        rows = [starts[i] + row for i, draft in zip(which, drafts, strict=True) for row in range(1 + len(draft.tokens))]
        return self.of_rows(drafts, rows)

    def of_rows(self, drafts: list[Draft], rows: list[int]) -> Output:
        """As if it had been of these drafts, whose rows were these; the others were fed beside them."""
        read = self.read + len(self.flat) - len(rows)
        return Output(drafts, self.flat[rows], self.states[rows], read)


@dataclass
class Slot:
    """What the cache holds of one sequence: `tokens`, of which the first `settled` are known to be the sequence's."""

    tokens: list[int] = field(default_factory=list)
    settled: int = 0
    pure: int = 2**62  # of these, what lies as plain decoding would have put it
    beyond: bool = False  # whether they were read as of a sequence beyond the model's border


class Watched(NamedTuple):
    """What a runner keeps of each forward: the hidden states of taps, and how many of the last queries."""

    taps: frozenset[Rows] = frozenset()
    queries: int = 0


class Runner:
    """A model and a cache.

    `max_len` is the context it can serve, in tokens. `chunk` bounds the tokens of one prefill forward;
    `progress(done, total)` hears of more tokens to read than that.
    """

    def __init__(
        self, model: Model, kv: KVCache, max_len: int | None = None, chunk: int = 512, base: Runner | None = None
    ) -> None:
        self.model, self.kv, self.chunk = model, kv, chunk
        self.base = base  # whose verified keys this one's view shares
        self.max_len = max_len or model.config.context
        self._dynamic, self._border = model.config.rope["rope_type"] == "dynamic", model.config.border
        self.progress: Callable[[int, int], None] | None = None
        self.tokenizer: Any = None  # the model's, set by who loads it: what holds token ids can check that it fits
        self.path: Path | None = None  # the model's, likewise: what comes with it lies there
        self.prefixes = False  # whether to look for, and to leave, blocks that begin other sequences of the same tokens
        self.slots: dict[int, Slot] = {}
        self.scores: dict[int, dict[int, Logprob]] = {}  # by id, of prompts to be measured: each place's token
        self.taps = WeakSet[Rows]()  # kept up as long as a drafter holds them
        self._spare: Output | None = None  # that a forward may write over (`reuse`)
        self._tapped = False  # whether there ever were any: asking a WeakSet takes as long as a step's whole plan

    def tap(self, points: tuple[int, ...]) -> Rows:
        """From now on keep the hidden states at these points (see `Rows`) of all tokens read, while the result lives.

        A view's are its own for what is read through it, and its base's for the tokens that it takes over. Raises
        ConfigError for a point that the model does not have.
        """
        layers = self.model.config.num_layers
        if bad := [point for point in points if point != NORMED and not 0 <= point <= layers]:
            raise ConfigError(f"hidden states of layer {bad[0]} are asked for, and the model has {layers} layers")
        base = self.base.tap(points) if self.base else None
        rows = Rows(points, self.model.config.hidden_size, self.model.dtype.itemsize, base)
        self.taps.add(rows)
        self._tapped = True
        return rows

    @property
    def watched(self) -> Watched:
        """What is kept of each forward for drafters. Assign it where no sequence is held: nothing else is kept then."""
        return Watched(frozenset(self.taps), self._log.size)

    @watched.setter
    def watched(self, watched: Watched) -> None:
        self.taps, self._log.size = WeakSet(watched.taps), watched.queries
        self._tapped = bool(watched.taps)

    @property
    def _log(self) -> QueryLog:
        return getattr(self.kv, "log", None) or QueryLog(0)  # a cache that has no views has none

    @property
    def follows_paths(self) -> bool:
        """Whether a tree's branch is computed bit for bit as plain decoding would (see ops.follows_paths)."""
        return follows_paths(self.model.dtype, self.model.device, self.model.config.head_dim)

    def pending(self, seq: Sequence) -> int:
        """How many of a sequence's tokens the next forward has to read; the last one always."""
        slot = self.slots.get(seq.id)
        return max(1, len(seq.tokens) - (len(slot.tokens) if slot else 0))

    def begin(self, seq: Sequence, like: Sequence | None = None) -> int:
        """Take over what is there of a new sequence's tokens; returns how many need not be fed.

        That is what other sequences have left, if `prefixes`, or all that the sequence `like` shares.
        """
        if seq.id in self.slots:
            return 0
        slot, n = self.slots.setdefault(seq.id, Slot(beyond=self._beyond(seq))), 0
        if isinstance(self.kv, PagedKV) and not self._unscored(seq):
            unread = self._log.size  # tokens by whose queries a view chooses its keys
            begin = max(0, min(seq.settled, len(seq.tokens) - unread))
            if like is not None and like.id in self.slots:  # it may have nothing: what was preempted begins again
                known = self.slots[like.id]
                most = min(max(0, begin - 1), known.settled, known.pure)
                if known.beyond == slot.beyond:
                    n = self._common(Slot(known.tokens), seq.tokens, most)  # none of which is known to be this one's
                if n:
                    self.kv.share(like.id, seq.id, n)
            if not n and self.prefixes:
                n = self.kv.adopt(seq.id, seq.tokens[:begin], self._root(seq, slot))
            slot.tokens, slot.settled = seq.tokens[:n], n
        return n

    def may_find(self, seq: Sequence) -> Hashable:
        """What sequences have in common that may find each other's tokens in the cache; None if this one looks not."""
        if not self.prefixes or not isinstance(self.kv, PagedKV) or self._unscored(seq):
            return None
        return self._root(seq, self.slots.get(seq.id) or Slot(beyond=self._beyond(seq)))

    def publish(self, seq: Sequence) -> None:
        """Let others find what is there of a sequence's tokens now, and not with its next forward."""
        if slot := self.slots.get(seq.id):
            self._publish(seq, slot, self._common(slot, seq.tokens, len(seq.tokens) - 1))

    def extend(
        self,
        seqs: list[Sequence],
        drafts: list[Draft] | None = None,
        reading: Iterable[tuple[Sequence, int]] = (),
        fed: Tensor | None = None,
        draws: list[native.Draw] | None = None,
    ) -> Output:
        """One forward over all sequences' pending and draft tokens (after chunks of what a long prompt leaves).

        Of the sequences in `reading` it reads no more than so many of their pending tokens, and never the last; there
        is no output for these. `fed` (seqs,), integers on the device: the last token of each, which is UNKNOWN in it,
        and all that is pending (see `chains`). `draws`: how each row's token is drawn, see sampling.py.
        """
        if not torch.is_inference_mode_enabled():  # the caller is no engine, which enters both for all its steps
            with untouched(self.model.device), torch.inference_mode():
                return self.extend(seqs, drafts, reading, fed, draws)
        drafts = drafts or [Draft() for _ in seqs]
        if self.base:
            self.base.read([seq.parent or seq for seq in seqs])
        starts = [self._catch_up(seq) for seq in seqs]
        read = sum([len(seq.tokens) - 1 for seq in seqs]) - sum(starts)
        starts = self._prefill(seqs, starts)
        entries: list[Entry] = []
        tokens: list[int] = []
        wanted = Wanted([], draws=draws)
        for seq, draft, start in zip(seqs, drafts, starts, strict=True):
            first, pending = len(tokens), len(seq.tokens) - start
            tokens += seq.tokens[start:]
            tokens += draft.tokens
            parents = None
            if draft.tokens and not draft.is_chain:
                root = pending - 1
                parents = [*range(-1, root), *(root if p < 0 else root + 1 + p for p in draft.parents)]
            entries.append(Entry(seq.id, first, len(tokens) - first, start, parents))
            wanted.rows += range(first + pending - 1, len(tokens))
        if reading:
            reading = list(reading)
            read += sum(min(n, self.pending(seq) - 1) for seq, n in reading)
            parts = [self._part(seq, self._catch_up(seq), n, tokens, entries) for seq, n in reading]
            hidden = self._forward([*seqs, *(seq for seq, _ in reading)], tokens, entries, wanted)
            for (seq, _), part in zip(reading, parts, strict=True):
                self._has_read(seq, part)
        else:
            if (spare := self._spare) and spare.best and len(spare.best) == len(wanted.rows):
                wanted.room, self._spare = (spare.states, spare.flat), None
            hidden = self._forward(seqs, tokens, entries, wanted, fed)
        for seq, entry in zip(seqs, entries, strict=False):  # those that only read come last
            slot = self.slots[seq.id]
            slot.tokens += seq.tokens[entry.start :] if entry.parents else tokens[entry.row : entry.row + entry.n]
            slot.settled = seq.settled
        assert wanted.logits is not None
        return Output(drafts, wanted.logits, hidden, read, wanted.best)

    @property
    def chains(self) -> bool:
        """Whether a forward can be fed what only the device knows; beyond a border all tokens are read again."""
        return self.model.chains and self._border is None

    def learn(self, seq: Sequence, tokens: list[int]) -> None:
        """Which tokens the last ones of a sequence are, of which the cache holds some as UNKNOWN."""
        known, at = self.slots[seq.id].tokens, len(seq.tokens) - len(tokens)
        known[at : at + len(tokens)] = tokens[: len(known) - at]

    def reuse(self, output: Output) -> None:
        """Nobody has been shown this output, nor ever will be: a forward of as many rows may write where it lies."""
        if output.best is not None and len(output.best) <= FEW:
            self._spare = output

    def read(self, seqs: list[Sequence]) -> None:
        """Bring the cache up to all tokens of the sequences but the last, which every `extend` feeds."""
        with torch.inference_mode():
            self._prefill(seqs, [self._catch_up(seq) for seq in seqs], leave=len(seqs))

    def view(self, text: str, alone: bool = False, layers: list[int] | None = None) -> Runner:
        """A runner of the same model that sees few keys: `streaming:budget=512`, ... (kv/views.py).

        It shares the keys that this one has verified; `alone`, it has a cache of its own, and reads texts of any length
        through that. With `layers` only these compute. Raises ConfigError for one that cannot be.
        """
        model, base, policy = self.model if layers is None else self.model.thin(layers), self.base or self, parse(text)
        slab = DenseKV(model.config, model.dtype, model.device, policy.budget)
        if not alone:
            kind = QuantizedView if policy.name == "quantized" else View
            home: Any = base.kv
            view = type(self)(model, kind(slab, policy, home, layers=layers), self.max_len, self.chunk, base)
            view.tokenizer, view.path = self.tokenizer, self.path
            return view
        if policy.name != "streaming":
            raise ConfigError(f"a cache of its own can only be streaming, not {policy.name}, which looks at all keys")
        chunk = min(self.chunk, max(1, policy.budget // 4))
        return type(self)(model, View(slab, policy, turn=model.turn), 2**62, chunk)

    def commit(self, seqs: list[Sequence], output: Output, verdicts: list[Verdict]) -> None:
        """Keep the accepted path of each draft in the cache, drop the rest. Call before the sequences grow."""
        if not torch.is_inference_mode_enabled():  # to enter it once more takes some 25 us between two forwards
            with torch.inference_mode():
                self.commit(seqs, output, verdicts)
            return
        for seq, draft, verdict in zip(seqs, output.drafts, verdicts, strict=True):
            if draft.tokens:
                self._keep(seq, draft, verdict.path)

    def _keep(self, seq: Sequence, draft: Draft, path: list[int]) -> None:
        slot, length = self.slots[seq.id], len(seq.tokens)
        self.kv.keep(seq.id, length, path)
        for rows in self.taps if self._tapped else ():
            rows.keep(seq.id, length, path)
        if path != list(range(len(path))) and not self.follows_paths:
            slot.pure, seq.branched = min(slot.pure, length), True
        slot.tokens[length:] = [draft.tokens[i] for i in path]

    def free(self, seq: Sequence) -> None:
        """Give back what a sequence holds."""
        if slot := self.slots.pop(seq.id, None):
            self._publish(seq, slot, self._common(slot, seq.tokens, len(seq.tokens)), last=True)
        self.kv.free(seq.id)
        for rows in self.taps:
            rows.free(seq.id)

    def _catch_up(self, seq: Sequence) -> int:
        """Truncate the cache to what it shares with the sequence; at least the last token is fed again."""
        slot = self.slots.get(seq.id) or self.slots.setdefault(seq.id, Slot())
        known, truth, settled = slot.tokens, seq.tokens, seq.settled
        n = self._common(slot, truth, len(truth) - 1)
        if self.prefixes:
            self._publish(seq, slot, n)
        if self._border is not None and slot.beyond != self._beyond(seq):
            n, slot.settled, slot.beyond = 0, 0, not slot.beyond
            known.clear()  # all its keys are rotated otherwise now
        m = self.kv.catch_up(seq.id, n, settled - 1)
        for rows in self.taps if self._tapped else ():
            rows.catch_up(seq.id, n, min(m, settled - 1))
        if len(known) != m:
            known[min(m, n) :] = truth[n:m]
            slot.settled = min(slot.settled, m)
        return m

    def _common(self, slot: Slot, truth: list[int], most: int) -> int:
        """How many of the first of these tokens the cache holds, at most `most`."""
        known = slot.tokens
        n, limit = min(slot.settled, most), min(len(known), most)
        while n < limit and known[n] == truth[n]:
            n += 1
        return n

    def _beyond(self, seq: Sequence) -> bool:
        """Whether a sequence is longer than the model's border."""
        return self._border is not None and len(seq.tokens) > self._border

    def _root(self, seq: Sequence, slot: Slot) -> Hashable:
        """What sequences of the same tokens must share to have the same keys: `dynamic` rope knows the prompt's end."""
        return seq.cache_salt, self._dynamic and seq.prompt_len, slot.beyond

    def _publish(self, seq: Sequence, slot: Slot, n: int, last: bool = False) -> None:
        """Let others find the first n tokens, of which the settled ones are verified; `last`: no more will come."""
        if self.prefixes and isinstance(self.kv, PagedKV):
            n = min(n, seq.settled, slot.pure)
            n = min(n, seq.prompt_len) if self._dynamic else n
            self.kv.publish(seq.id, seq.tokens, n, self._root(seq, slot), last)

    def _prefill(self, seqs: list[Sequence], starts: list[int], leave: int = 0) -> list[int]:
        """Feed pending tokens in chunks until what is left of each sequence, and of all together, fits one forward.

        Or until no more than `leave` are left, if that is given.
        """
        left = [len(seq.tokens) - start for seq, start in zip(seqs, starts, strict=True)]
        if not leave and max(left, default=0) <= FEW and sum(left) <= self.chunk:
            return starts
        fits = [self._fits(seq) for seq in seqs]
        by_id = {seq.id: seq for seq in seqs}
        total, long = sum(left), False
        while sum(left) > (leave or self.chunk) or any(n > fit for n, fit in zip(left, fits, strict=True)):
            entries: list[Entry] = []
            tokens: list[int] = []
            for i, seq in enumerate(seqs):
                part = self._part(seq, len(seq.tokens) - left[i], self.chunk - len(tokens), tokens, entries)
                left[i] -= part
            if not entries:  # more sequences than the chunk has rows: one token each is as little as there is
                break
            self._forward(seqs, tokens, entries, Wanted([]))
            for entry in entries:
                self._has_read(by_id[entry.seq], entry.n)
            long = True
            self.report(total - sum(left), total)
        if long:
            self.report(total, total)
        return [len(seq.tokens) - n for seq, n in zip(seqs, left, strict=True)]

    def report(self, done: int, total: int) -> None:
        """Tell `progress`, if it is there; never again if it raises, which is not the affair of who is read for."""
        if self.progress is not None:
            try:
                self.progress(done, total)
            except Exception as error:
                self.progress = None
                log.warning("progress is no longer called: it raised %s", told(error))

    def _fits(self, seq: Sequence) -> int:
        """Rows of a sequence that one forward takes at most."""
        if self.follows_paths:
            return self.chunk
        group = self.model.config.num_heads // self.model.config.num_kv_heads
        return min(self.chunk, max(FEW, MASK_ELEMENTS // (group * len(seq.tokens))))

    def _part(self, seq: Sequence, start: int, most: int, tokens: list[int], entries: list[Entry]) -> int:
        """Put tokens of a sequence from place `start` on into a forward, but not the last; returns how many."""
        n = max(0, min(len(seq.tokens) - 1 - start, most, self._fits(seq)))
        if n:
            entries.append(Entry(seq.id, len(tokens), n, start, final=len(seq.tokens)))
            tokens += seq.tokens[start : start + n]
        return n

    def _has_read(self, seq: Sequence, n: int) -> None:
        """Note that the cache holds n more of the sequence's tokens."""
        slot = self.slots[seq.id]
        slot.tokens += seq.tokens[len(slot.tokens) : len(slot.tokens) + n]
        slot.settled = min(len(slot.tokens), seq.settled)

    def _forward(
        self, seqs: list[Sequence], tokens: list[int], entries: list[Entry], wanted: Wanted, fed: Tensor | None = None
    ) -> Tensor:
        plan = Plan(entries)
        self.kv.reserve(plan)
        positions: list[int] = []
        for e in entries:
            positions += range(e.start, e.start + e.n) if e.parents is None else e.positions()
        states: dict[int, Any] = {}
        if self._tapped:
            states = dict.fromkeys(point for rows in self.taps for point in rows.points)
        scored = list(self._to_score(seqs, entries)) if self.scores else []
        if scored:
            states[NORMED] = None
        lengths = self._lengths(seqs, entries) if self.model.stretches else positions
        given = tokens if fed is None else fed
        hidden = self.model.forward(given, positions, lengths, self.kv, plan, states or None, wanted)
        if scored:
            self._score(scored, states[NORMED])
        if self._tapped:
            unheard = {seq.id for seq in seqs if seq.k == 0}  # of which no drafter hears
            for rows in self.taps:
                for e in entries:
                    if e.seq not in unheard:
                        rows.add(e.seq, e.start, states, slice(e.row, e.row + e.n))
        return hidden

    def _lengths(self, seqs: list[Sequence], entries: list[Entry]) -> list[int]:
        """Per row the length by which rope turns it: the prompt's for a prompt's tokens, or the whole sequence's."""
        by_id = {seq.id: seq for seq in seqs}
        lengths: list[int] = []
        for e in entries:
            seq = by_id[e.seq]
            lengths += [max(p + 1, seq.prompt_len) if self._border is None else len(seq.tokens) for p in e.positions()]
        return lengths

    def _score(self, scored: list[tuple[Sequence, int, int]], states: Tensor) -> None:
        """Keep what a forward's normed states say of a prompt's tokens."""
        size = max(FEW, SCORED // self.model.config.vocab_size)
        for piece in (scored[i : i + size] for i in range(0, len(scored), size)):
            logits = self.model.logits(states[[row for _, row, _ in piece]])
            for own, (seq, _, at) in zip(logits, piece, strict=True):
                self.scores[seq.id][at] = logprob(own, seq.tokens[at], seq.params.prompt_logprobs or 0)

    def _unscored(self, seq: Sequence) -> bool:
        """Whether some of a prompt's tokens have yet to be measured."""
        return seq.id in self.scores and len(self.scores[seq.id]) < seq.prompt_len - 1

    def _to_score(self, seqs: list[Sequence], entries: list[Entry]) -> Iterator[tuple[Sequence, int, int]]:
        """Sequence, row, and the place behind it, of whose token the row's logits are to be kept."""
        waiting = {seq.id: seq for seq in seqs if self._unscored(seq)}
        for entry in entries:
            if seq := waiting.get(entry.seq):
                for i in range(min(entry.n, seq.prompt_len - 1 - entry.start)):
                    if entry.start + i + 1 not in self.scores[seq.id]:
                        yield seq, entry.row + i, entry.start + i + 1


def check_exactness(model: Model, kv: KVCache) -> str:
    """`bitwise` if this model's logits do not depend on what shares a forward (Law 2), else `law`.

    The loaded linears are run on random rows, alone and in company. The whole model reads a few tokens; then it, on a
    CPU its first layer and the last of each kind, reads them up to and across a key-block border: one at a time, as
    chains of many lengths, as the second branch of a tree if the attention promises that, and beside another sequence.
    All bit for bit, with as many threads as there are now. Where it does not promise it, a sequence that accepted
    another branch than the first counts as `law`: its keys lay in other slots. Raises CheckpointError if what comes out
    is not finite.
    """
    runner = Runner(model, kv, chunk=64)  # small chunks: the check should not set the peak of memory
    generator = torch.Generator().manual_seed(0)
    if not rows_alone(model):
        return "law"
    longest, alone = 50, 6
    length = max(1, min(KEY_BLOCK - 4, model.config.context - longest - 1))
    if (border := model.config.border) is not None and length <= border <= length + longest:
        length = max(1, border - longest - 1)  # no draft crosses it
    text = torch.randint(model.config.vocab_size, (length + longest,), generator=generator).tolist()
    params = SamplingParams(max_tokens=longest + 2)
    seq, other = Sequence(text[:length], params, seed=0), Sequence(text[: max(1, length // 3)], params, seed=0)
    most = border if border is not None and length < border else model.config.context - 1
    draft = Draft.chain(text[length : min(len(text), most)])
    if model.device.type == "cpu" and type(model) is Model and type(kv) is PagedKV:  # a GPU needs the graphs of all
        few = Sequence(text[: min(length, 8)], params, seed=0)
        _finite(runner.extend([few]).logits[0])
        runner.free(few)
        kinds = {_kind(model, i): i for i in range(model.config.num_layers)}
        if len(telling := sorted({*kinds.values(), 0})) < model.config.num_layers:
            model = model.thin(telling)
            runner = Runner(model, PagedKV(model.config, model.dtype, model.device), chunk=64)
    try:
        plain = []
        for token in draft.tokens[:alone]:
            plain.append(runner.extend([seq]).logits[0][0])
            _finite(plain[-1])
            seq.tokens.append(token)
        del seq.tokens[length:]
        rows = runner.extend([seq], [draft]).logits[0]
        same = all(torch.equal(a, b) for a, b in zip(plain, rows, strict=False))
        for k in (1, 3, 7, 15, 16, 20, 31, 32):
            chain = draft.clip(k)
            same = same and torch.equal(runner.extend([seq], [chain]).logits[0], rows[: len(chain) + 1])
            beside = runner.extend([other, seq], [Draft.chain(text[:3]), chain]).logits[1] if k in (3, 16) else rows
            same = same and all(torch.equal(a, b) for a, b in zip(beside, rows[: len(chain) + 1], strict=False))
        if runner.follows_paths:
            tree, (_, nodes) = Draft.merge([Draft.chain([(text[length] + 1) % model.config.vocab_size]), draft], 64)
            branch = runner.extend([seq], [tree]).logits[0][[0, *(1 + node for node in nodes)]]
            same = same and torch.equal(branch, rows)
        return "bitwise" if same else "law"
    finally:
        runner.free(seq)
        runner.free(other)


def _kind(model: Model, i: int) -> Hashable:
    """What decides which kernels a layer runs on, and how; its sizes are all layers'."""
    layer = model.layers[i]
    held = [[(w.format, w.group, w.rounded) for w in m.packed] if m.native else [m.nbytes] for m in layer.linears]
    return type(layer.mlp), model.rotaries[i], model.config.windows[i], *(tuple(own) for own in held)


def rows_alone(model: Model) -> bool:
    """Whether the linears that this process holds give each row the same bits alone and in company."""
    layer, generator = model.layers[0], torch.Generator().manual_seed(0)
    with torch.inference_mode():
        for linear in (layer.qkv, layer.o, *layer.mlp.linears[:3], model.head):
            own: Linear = getattr(linear, "own", linear)  # of a product that is cut over ranks, the part
            x = torch.randn(65, own.in_features, generator=generator, dtype=torch.float32).to(model.device, model.dtype)
            full = own(x)
            _finite(full)
            parts = [slice(i, i + n) for n in (1, 2, 3, 8, 17, 33) for i in (0, 9)]
            if not all(torch.equal(own(x[part]), full[part]) for part in parts):
                return False
    return True


def _finite(results: Tensor) -> None:
    if not bool(results.isfinite().all()):
        why = "its weights hold NaN or infinite numbers, or are too large for this dtype; try dtype='float32'"
        raise CheckpointError(f"the model computes numbers that are not finite: {why}")
