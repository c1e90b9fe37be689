"""Views: caches that hold some keys of a longer text, so that attention costs their budget and not the context.

A view of a `base` cache shares its verified keys. Per sequence and layer it holds a short buffer of its own:

    [ kept: chosen keys, other ones per key-value head | recent: all keys from position `first` on | private tail ]

The tail are tokens drafted through the view; whatever becomes of them, the base never hears of it. When the base has
verified tokens, their exact keys are copied over what the view had made of them. All that lies in the buffer is
visible, so attention is the ordinary one, over a short cache. Keys keep their true positions. When the buffer is full,
or most of a draft was rejected, it is rebuilt: a `Policy` chooses the keys to keep from the base.

A view without a base is a model's only cache. It drops the oldest of the recent tokens but the first few it has read
(StreamingLLM, 2309.17453), and turns the keys of those forward, so that they stand right before the recent ones:
rotary attention sees differences of positions only, and these stay below the budget at any length of the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.config import ModelConfig, whole
from outrider.errors import ConfigError, brief
from outrider.kv.base import Entry, Fixed, Plan, Storage
from outrider.kv.dense import DenseKV
from outrider.ops import KEY_BLOCK, Stores, attend, native, take, write

MOST = {"window": 256, "kernel": 255, "chunk": 2**20}  # the last queries are kept, which is memory; the rest 2**30


@dataclass
class Policy:
    """What a view keeps. All are counts of tokens; `budget` is all that a query sees.

    Of the budget, a rebuild leaves `rebuild` free for new tokens and keeps the last `recent` ones; the rest is chosen.
    """

    budget: int  # keys that a query sees, all told
    sinks: int = 4  # first tokens, always kept
    recent: int = 0  # last tokens, always kept
    rebuild: int = 128  # at least every so many tokens
    queries = 0  # how many of the last queries `choose` looks at
    grain = 1  # keys are chosen in aligned runs of so many

    def __post_init__(self) -> None:
        name = self.name
        for item in fields(self):
            low, high = int(item.name not in ("sinks", "recent")), MOST.get(item.name, 2**30)
            if (value := whole(getattr(self, item.name), low, high)) is None:
                what = f"a whole number of at least {low} and at most {high}, not {brief(getattr(self, item.name))}"
                raise ConfigError(f"view {name}: {item.name} must be {what}")
            setattr(self, item.name, value)
        if self.budget < self.least:
            parts = f"{self.sinks} sinks, {self.recent} recent, {self.rebuild} until the next rebuild"
            raise ConfigError(f"view {name}: budget must be at least {self.least} ({parts}), not {self.budget}")

    @property
    def least(self) -> int:
        """The smallest budget that goes with the rest."""
        return max(1, self.sinks) + self.grain + self.recent + self.rebuild

    @property
    def name(self) -> str:
        """As `parse` knows it."""
        return next(name for name, kind in POLICIES.items() if kind is type(self))

    def choose(self, queries: Tensor, keys: Tensor, n: int, scale: float) -> Tensor:
        """(kv_heads, n) indices, ascending, into keys (kv_heads, length, dim), for queries (rows, heads, dim).

        Of policies that look at queries; the others keep the first tokens and the last.
        """
        raise NotImplementedError


@dataclass
class Streaming(Policy):
    """The first few tokens and the recent ones (StreamingLLM, 2309.17453; MagicDec, 2408.11049)."""

    budget: int = 512
    recent: int = field(default=0, init=False)  # all but the sinks is recent
    rebuild: int = 0  # at least every so many tokens; 0 = an eighth of the budget

    def __post_init__(self) -> None:
        self.rebuild = self.rebuild or max(1, self.budget // 8)
        super().__post_init__()


@dataclass
class SnapKV(Policy):
    """The keys that the last `window` queries attend to (SnapKV, 2404.14469; MagicDec).

    Attention weights, summed over the window and pooled over `kernel` neighbours, averaged over the query heads of each
    key-value head.
    """

    budget: int = 4096
    sinks: int = 0
    recent: int = 32
    window: int = 32  # last queries that choose
    kernel: int = 5  # neighbours that weights are pooled over

    @property
    def queries(self) -> int:  # type: ignore[override]
        """The observation window."""
        return self.window

    def __post_init__(self) -> None:
        if self.kernel % 2 == 0:
            raise ConfigError(f"view snapkv: kernel must be odd, not {self.kernel}")
        super().__post_init__()

    def choose(self, queries: Tensor, keys: Tensor, n: int, scale: float) -> Tensor:
        """See Policy; one query head at a time, which bounds the memory."""
        found, dtype = [], native.product_dtype(keys.dtype, keys.device)
        heads = queries[-self.window :].transpose(0, 1)
        for group, own in zip(heads.chunk(len(keys)), keys, strict=True):
            total = torch.zeros(1, len(own), dtype=torch.float32, device=keys.device)
            own = own.to(dtype)
            for q in group:
                weights = torch.softmax(q.to(dtype) * scale @ own.T, -1)
                total += weights.new_ones(1, len(weights)) @ weights  # their sum, many times faster in bfloat16
            pooled = F.avg_pool1d(total, self.kernel, 1, self.kernel // 2)[0]
            pooled[: self.sinks] = torch.inf
            found.append(pooled.topk(n).indices.sort().values)
        return torch.stack(found)


@dataclass
class Retrieval(Policy):
    """The chunks of `chunk` tokens whose mean key the latest query likes best (TriForce, 2404.11912).

    The query heads of a key-value head look together: their mean query is asked. (A softmax per head, so that each has
    an equal say, costs three times as much and drafts no better.)
    """

    budget: int = 4096
    chunk: int = 8  # neighbours chosen together
    recent: int = 32
    queries = 1

    @property
    def grain(self) -> int:  # type: ignore[override]
        """Whole chunks."""
        return self.chunk

    def choose(self, queries: Tensor, keys: Tensor, n: int, scale: float) -> Tensor:
        """See Policy. A query's product with a mean key is the mean of its products: each key is read once."""
        wanted = queries[-1].view(len(keys), -1, keys.shape[2]).mean(1)
        dtype = native.product_dtype(keys.dtype, keys.device)
        scores = torch.stack([own.to(dtype) @ q.to(dtype) for own, q in zip(keys, wanted, strict=True)]).float()
        liked = scores.view(len(keys), -1, self.chunk).mean(2)
        liked[:, : -(-self.sinks // self.chunk)] = torch.inf
        best = liked.topk(n // self.chunk).indices.sort().values * self.chunk
        return (best[:, :, None] + torch.arange(self.chunk, device=keys.device)).flatten(1)


@dataclass
class FewBits(Policy):
    """All keys and values in `bits` bits (8 or 4), the recent ones exact (QuantSpec, 2502.10424)."""

    bits: int = 8  # of a stored number: 8 or 4
    recent: int = 64
    budget: int = field(default=0, init=False)
    sinks: int = field(default=0, init=False)
    grain = 64  # tokens that share a scale per channel of their keys; values have one per token

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ConfigError(f"view quantized: bits must be 8 or 4, not {brief(self.bits)}")
        self.budget = 2**30
        super().__post_init__()
        self.budget = self.recent + self.rebuild + 2 * self.grain  # exact tokens


POLICIES: dict[str, type[Policy]] = {
    "streaming": Streaming,
    "snapkv": SnapKV,
    "retrieval": Retrieval,
    "quantized": FewBits,
}


def parse(text: str) -> Policy:
    """A policy from `name:option=value,option=value` (colons separate, too). Raises ConfigError."""
    name, *items = re.split("[:,]", text)
    if name not in POLICIES:
        raise ConfigError(f"view {brief(name)} is unknown; valid: {', '.join(POLICIES)}")
    kind, options = POLICIES[name], dict[str, int]()
    valid = [item.name for item in fields(kind) if item.init]
    for item in items:
        key, _, value = item.partition("=")
        if key not in valid or not re.fullmatch(r"-?[0-9]{1,30}", value):
            what = f"{brief(item)} should be option=number"
            raise ConfigError(f"view {name}: {what}; valid options: {', '.join(valid)}")
        if key in options:
            raise ConfigError(f"view {name}: {key} is given twice; give it once")
        options[key] = int(value)
    return kind(**options)


@dataclass
class Codes:
    """A piece of one layer's keys and values, quantised: x = low + step * code."""

    code: Tensor  # (2, kv_heads, n, dim) uint8, or two 4-bit codes in one along dim
    low: list[Tensor]  # of the keys (kv_heads, n / grain, 1, dim), of the values (kv_heads, n, 1)
    step: list[Tensor]

    @staticmethod
    def of(x: Tensor, bits: int, grain: int) -> Codes:
        """x (2, kv_heads, n, dim), n a multiple of grain: keys per channel and `grain` tokens, values per token."""
        keys, values = x[0].float().view(x.shape[1], -1, grain, x.shape[3]), x[1].float()
        codes, lows, steps = [], [], []
        for part, axis in ((keys, 2), (values, 2)):
            low, high = part.amin(axis, keepdim=True), part.amax(axis, keepdim=True)
            step = ((high - low) / (2**bits - 1)).clamp(min=1e-12)
            codes.append(((part - low) / step).round().to(torch.uint8).view(x.shape[1:]))
            lows.append(low)
            steps.append(step)
        code = torch.stack(codes)
        return Codes(code if bits == 8 else code[..., ::2] | code[..., 1::2] << 4, lows, steps)

    def exact(self, out: Tensor) -> None:
        """Write what they stand for to out (2, kv_heads, n, dim)."""
        code, dim = self.code, out.shape[3]
        if code.shape[3] != dim:
            code = torch.stack([code & 15, code >> 4], -1).flatten(3)
        groups = self.low[0].shape[1]
        out[0] = (code[0].view(len(out[0]), groups, -1, dim) * self.step[0] + self.low[0]).flatten(1, 2)
        out[1] = code[1] * self.step[1] + self.low[1]


@dataclass
class Held:
    """One sequence in a view: what lies in its buffer."""

    kept: int = 0  # slots of chosen keys
    first: int = 0  # position of the token behind them
    length: int = 0  # tokens of the sequence that the view knows, kept or not
    synced: int = 0  # of these, the ones whose keys are the base's
    built: int = 0  # `length` at the last rebuild
    due: list[tuple[int, int, int]] = field(default_factory=list)  # the base's [begin, end) to be copied to slot ...
    origin: int = 0  # without a base: the first position that was read
    sinks: list[Tensor] = field(default_factory=list)  # ... and per layer the keys of the first tokens there
    codes: list[list[Codes]] = field(default_factory=list)  # quantised: per layer, the pieces before `first`

    def slot(self, position: int) -> int:
        """Where in the buffer a position from `first` on lies."""
        return self.kept + position - self.first


class View:
    """A KVCache of some keys of `base`, or of a model of its own if there is no base.

    `slab` stores the buffers; `turn(layer, keys, by)` moves rotated keys by positions (only needed without a base).
    `layers` are the base's layers whose keys these are, if not all.
    """

    def __init__(
        self,
        slab: DenseKV,
        policy: Policy,
        base: Storage | None = None,
        turn: Callable[[int, Tensor, int], Tensor] | None = None,
        layers: list[int] | None = None,
    ) -> None:
        self.slab, self.policy, self.turn = slab, policy, turn
        self.layers = layers or list(range(slab.config.num_layers))
        self.base: Any = base
        self.config: ModelConfig = slab.config
        self.reach = self.config.num_layers * policy.budget  # no farther back does a token feel what it never saw
        self.held: dict[int, Held] = {}
        if base is not None:
            base.log.size = max(base.log.size, policy.queries)

    def nbytes(self, tokens: int) -> int:
        """Bytes that a sequence of so many tokens takes: never more than the budget's."""
        return self.slab.nbytes(min(tokens, self.policy.budget))

    def catch_up(self, seq: int, length: int, settled: int) -> int:
        """Take over from the base what it has verified, or, without one, begin where it still matters."""
        h = self.held.setdefault(seq, Held())
        if length < h.first:  # the recent tokens do not reach back so far: begin again
            h, length = Held(), 0
        if self.base is None:
            if settled - length > self.reach:
                length = settled - self.reach
                h = Held(first=length, origin=length)
            h.length = length
        else:
            drafted, right = h.length - h.synced, length - h.synced
            missed = 2 * right < drafted and 4 * (settled - h.built) >= self.policy.rebuild
            h.synced, h.length = min(h.synced, length), max(length, settled)
            if settled > h.synced:
                self._sync(seq, h, settled, missed and self.policy.queries > 0)
        self.held[seq] = h
        return h.length

    def _sync(self, seq: int, h: Held, settled: int, rebuild: bool) -> None:
        old, h.synced = h.synced, settled
        if rebuild or h.slot(h.length) > self.policy.budget:
            self._rebuild(seq, h, 0)
            return
        self._room(seq, h.slot(old), h.slot(settled))
        h.due.append((old, settled, h.slot(old)))

    def _take_over(self, seqs: list[int]) -> None:
        """Copy what is due of these sequences from the base: of all, and all layers, at once where a kernel can."""
        due = {seq: self.held[seq].due for seq in seqs if self.held[seq].due}
        source, target = (self.base.lies(self.layers), self.slab.lies(list(due))) if due else (None, None)
        if source is not None and target is not None:
            runs: list[tuple[int, ...]] = []
            for number, (seq, spans) in enumerate(due.items()):
                room = self.slab.store[seq][-1].shape[2]
                for begin, end, to in spans:
                    for n, *place in self.base.runs(seq, begin, end):
                        runs.append((n, *place, number, to, room))
                        to += n
            take(source, target, runs, self.config.num_kv_heads, self.config.head_dim)
        else:
            for seq, spans in due.items():
                self._copy(seq, [spans] * len(self.layers))
        for seq in due:
            self.held[seq].due = []

    def _copy(self, seq: int, spans: list[list[tuple[int, int, int]]]) -> None:
        """Layer by layer what is due there."""
        for layer, store, its in zip(self.layers, self.slab.store[seq], spans, strict=True):
            for begin, end, to in its:
                store[:, :, to : to + end - begin] = self.base.span(seq, layer, begin, end)

    def _room(self, seq: int, filled: int, needed: int) -> None:
        self.slab.reserve(Plan([Entry(seq, 0, needed - filled, filled)]))

    def reserve(self, plan: Plan) -> None:
        """Make room for the tokens of a forward, by choosing anew what to keep where the buffer is full."""
        entries = []
        for e in plan.entries:
            h = self.held[e.seq]
            if h.slot(e.start + e.n) > self.policy.budget:
                (self._evict if self.base is None else self._rebuild)(e.seq, h, e.n)
            h.length = e.start + e.n
            entries.append(Entry(e.seq, e.row, e.n, h.slot(e.start), e.parents))
        plan.scratch["slots"] = slots = Plan(entries)
        self.slab.reserve(slots)
        self._take_over([e.seq for e in plan.entries])

    def _rebuild(self, seq: int, h: Held, n: int) -> None:
        """Choose keys from the base, such that n more tokens have room. Too long a tail makes the buffer grow."""
        p, tails = self.policy, self._tails(seq, h)
        first = max(0, min(h.length - p.recent, h.synced))
        first -= first % p.grain
        kept = min(first, max(0, p.budget - max(p.rebuild, n) - (h.length - first)))
        kept -= kept % p.grain
        self._room(seq, 0, kept + h.length - first)
        h.kept, h.first, h.built = kept, first, h.length
        wanted = []
        for at, (layer, own) in enumerate(zip(self.layers, self.slab.store[seq], strict=True)):
            windowed = self.config.windows[at] is not None  # slots must tell distances
            queries = self.base.log.last(seq, layer) if p.queries and kept and not windowed else None
            if queries is not None and len(queries):
                keys = self.base.span(seq, layer, 0, first, slice(1))[0]
                index = p.choose(queries.to(keys.device), keys, kept, self.slab.scale)
                own[:, :, :kept] = self.base.chosen(seq, layer, index)
                wanted.append([(first, h.synced, kept)])
            else:
                begin = 0 if windowed else min(p.sinks, kept)
                wanted.append([(0, begin, 0), (first - kept + begin, h.synced, begin)])
            if tails:
                own[:, :, h.slot(h.synced) : h.slot(h.length)] = tails[at]
        h.due = []
        if all(spans == wanted[0] for spans in wanted):
            h.due = [(begin, end, to) for begin, end, to in wanted[0] if begin < end]
        else:
            self._copy(seq, wanted)

    def _tails(self, seq: int, h: Held) -> list[Tensor]:
        if h.length <= h.synced:
            return []
        return [own[:, :, h.slot(h.synced) : h.slot(h.length)].clone() for own in self.slab.store[seq]]

    def _evict(self, seq: int, h: Held, n: int) -> None:
        """Without a base: drop the oldest recent tokens, such that n more have room."""
        p, stores = self.policy, self.slab.store.get(seq, [])
        if not h.sinks:
            h.sinks = [own[0, :, : p.sinks].clone() for own in stores]
        first = h.length - max(0, p.budget - p.sinks - max(p.rebuild, n))
        for layer, (own, sinks) in enumerate(zip(stores, h.sinks, strict=True)):
            own[:, :, p.sinks : p.sinks + h.length - first] = own[:, :, h.slot(first) : h.slot(h.length)].clone()
            assert self.turn is not None
            own[0, :, : p.sinks] = self.turn(layer, sinks, first - p.sinks - h.origin)
        h.kept, h.first = p.sinks, first

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, plan: Plan, sinks: Tensor | None = None) -> Tensor:
        """Attention over the buffers."""
        return self.slab.attend(layer, q, k, v, plan.scratch.get("slots", plan), sinks)

    def fixed(self, plan: Plan, rows: int) -> Fixed | None:
        """What a forward reads of the buffers, for a graph."""
        return self.slab.fixed(plan.scratch["slots"], rows)

    def stores(self, plan: Plan) -> Stores | None:
        """Where the buffers lie."""
        return self.slab.stores(plan.scratch["slots"])

    def keep(self, seq: int, start: int, path: list[int]) -> None:
        """Compact an accepted branch of the private tail, and forget what lies behind."""
        h = self.held[seq]
        self.slab.keep(seq, h.slot(start), path)
        h.length = start + len(path)

    def free(self, seq: int) -> None:
        """Give the buffers back."""
        self.held.pop(seq, None)
        self.slab.free(seq)


class QuantizedView(View):
    """A view of all keys, in few bits before the recent ones. This is the reference: it decodes a layer to read it."""

    policy: FewBits

    def nbytes(self, tokens: int) -> int:
        """The exact recent tokens, the codes, and one layer decoded."""
        c, p = self.config, self.policy
        rows = 2 * c.num_kv_heads * tokens
        codes = rows * (c.head_dim * p.bits // 8 + 4 * c.head_dim // p.grain + 4)  # with float32 lows and steps
        return super().nbytes(tokens) + c.num_layers * codes + self.slab.nbytes(tokens) // c.num_layers

    def _rebuild(self, seq: int, h: Held, n: int) -> None:
        """Quantise all but the recent tokens."""
        p, tails = self.policy, self._tails(seq, h)
        first = max(h.first, min(h.length - p.recent, h.synced))
        first -= (first - h.first) % p.grain
        self._room(seq, 0, h.length - first)
        h.due = []
        h.codes = h.codes or [[] for _ in range(self.config.num_layers)]
        for at, (layer, own) in enumerate(zip(self.layers, self.slab.store[seq], strict=True)):
            if first > h.first:
                exact = self.base.span(seq, layer, h.first, first).to(own.device)
                h.codes[at].append(Codes.of(exact, p.bits, p.grain))
            own[:, :, : h.synced - first] = self.base.span(seq, layer, first, h.synced)
            if tails:
                own[:, :, h.synced - first : h.length - first] = tails[at]
        h.first, h.built = first, h.length

    def stores(self, plan: Plan) -> None:
        """Keys are decoded layer by layer: only `attend` has them."""

    def fixed(self, plan: Plan, rows: int) -> None:
        """As `stores`."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, plan: Plan, sinks: Tensor | None = None) -> Tensor:
        """Attention over the decoded keys and the buffers."""
        outs = []
        for e in plan.entries:
            h, rows, end = self.held[e.seq], slice(e.row, e.row + e.n), e.start + e.n
            own = self.slab.store[e.seq][layer]
            write(own, e.start - h.first, k[rows], v[rows])
            whole = own.new_zeros(2, own.shape[1], -(-end // KEY_BLOCK) * KEY_BLOCK, own.shape[3])
            at = 0
            for piece in h.codes[layer] if h.codes else ():
                piece.exact(whole[:, :, at : at + piece.code.shape[2]])
                at += piece.code.shape[2]
            whole[:, :, at:end] = own[:, :, : end - at]
            window = self.config.windows[layer]
            how = window, self.slab.scale, plan.scratch, sinks, self.slab.softcap
            outs.append(attend(q[rows], whole, e.start, e.parents, *how))
        return torch.cat(outs)
