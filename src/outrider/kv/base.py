"""What every cache of keys and values can do, and the plan of one flat forward over several sequences."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.config import MOST_NODES
from outrider.errors import OutOfMemory
from outrider.ops import DevicePlan, Stores, at_once, native


@dataclass
class Entry:
    """One sequence's share of a flat forward: rows [row, row + n) of the batch.

    The cache holds `start` tokens of the sequence already; these n follow. `parents` is None for a plain run of tokens,
    else per row the index among these rows of the row before it, -1 for the cached prefix: a token tree. `final` is how
    many tokens the sequence is known to have, if that is more: room for all of them is made at once.
    """

    seq: int
    row: int
    n: int
    start: int
    parents: list[int] | None = None
    final: int = 0

    def positions(self) -> list[int]:
        """Position of each row in its sequence: branches of a tree share positions."""
        if self.parents is None:
            return list(range(self.start, self.start + self.n))
        depths: list[int] = []
        for parent in self.parents:
            depths.append(self.start if parent < 0 else depths[parent] + 1)
        return depths


@dataclass
class Plan:
    """The attention plan of one flat forward. `scratch` is where a cache keeps what its layers share (masks)."""

    entries: list[Entry]
    scratch: dict[Any, Any] = field(default_factory=dict)


@dataclass
class Fixed:
    """What a graph reads of a cache: tensors whose sizes are few, whatever the forward."""

    made: DevicePlan
    slabs: Tensor  # (layers, slabs) int64
    note: Callable[[Tensor], None] | None = None  # who asks for the queries of all layers (layers, rows, heads, dim)

    @classmethod
    def of(
        cls, made: DevicePlan, slabs: Tensor, log: QueryLog, plan: Plan, heads: tuple[int, int, int]
    ) -> Fixed | None:
        """For whoever asks for queries; slabs are `roomy`, heads as device_plan's. None if a graph kept too much."""
        if not at_once(made, *heads, slabs.device):
            return None
        return cls(made, slabs, log.asking(plan))

    @property
    def key(self) -> Hashable:
        """All sizes."""
        return self.made.sizes, self.made.spans, self.slabs.shape, self.note is None

    @property
    def inputs(self) -> dict[str, Tensor]:
        """What differs from forward to forward."""
        return {"plan": self.made.whole, "slabs": self.slabs}

    def plan(self, held: dict[str, Tensor]) -> Plan:
        """The plan of a forward whose inputs lie there; its scratch collects the `queries` of layers, if one asks."""
        made = DevicePlan(held["plan"], self.made.sizes, self.made.spans, [])
        return Plan([], {"pages": made, "slabs": held["slabs"]} | ({} if self.note is None else {"queries": []}))


def roomy(slabs: Tensor) -> Tensor:
    """Slabs (layers, slabs), with room for as many as the next power of two."""
    return F.pad(slabs, (0, (1 << (slabs.shape[1] - 1).bit_length()) - slabs.shape[1]))


@contextmanager
def allocating(nbytes: int) -> Iterator[None]:
    """Raises OutOfMemory where so many bytes are not to be had."""
    try:
        yield
    except RuntimeError as error:  # torch's OutOfMemoryError is one, and so is what the CPU allocator raises
        size_mb = nbytes / 2**20
        raise OutOfMemory(f"no {size_mb:.0f} MiB left for keys and values; lower max_tokens or kv_memory") from error


def allocate(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor for keys and values. Raises OutOfMemory."""
    nbytes = math.prod(size) * dtype.itemsize
    with allocating(nbytes):
        if native.runs(dtype, device):
            return native.memory(nbytes).view(dtype).view(size)
        return torch.zeros(size, dtype=dtype, device=device)  # masked keys weigh 0, but 0 * nan would be nan


class KVCache(Protocol):
    """Storage of keys and values for several sequences of different lengths, known by their ids."""

    def catch_up(self, seq: int, length: int, settled: int) -> int:
        """Forget all but the first `length` tokens, which are right; returns how many need not be fed.

        A view may take over more from its base, which holds `settled` of them, or skip tokens, or ask for lost ones.
        """

    def reserve(self, plan: Plan) -> None:
        """Make room for the tokens of a forward. Raises OutOfMemory if there is none; what is stored stays."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, plan: Plan, sinks: Tensor | None = None) -> Tensor:
        """Store k and v (tokens, kv_heads, dim), let q (tokens, heads, dim) look; returns (tokens, heads * dim).

        `sinks` (heads,) float32 as ops' `attend` has them.
        """

    def stores(self, plan: Plan) -> Stores | None:
        """Where the keys of a forward lie, for kernels that attend to all layers; None if only `attend` knows."""

    def keep(self, seq: int, start: int, path: list[int]) -> None:
        """Of the tree stored from slot `start`, keep the nodes of `path`, in order, right behind the prefix."""

    def free(self, seq: int) -> None:
        """Give a sequence's memory back; freeing an unknown one does nothing."""

    def nbytes(self, tokens: int) -> int:
        """Bytes that a sequence of so many tokens takes."""


class QueryLog:
    """The last `size` queries of each sequence in each of `layers`: a view of a cache chooses its keys by them."""

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.size = 0  # 0 = nobody asks
        self.held: dict[int, Log] = {}

    def note(self, layer: int | slice, q: Tensor, plan: Plan) -> None:
        """The queries (tokens, heads, dim) of a forward, or of all layers behind each other, if anybody asks."""
        if "queries" in plan.scratch:
            plan.scratch["queries"].append(q)
        elif self.size:
            for e in plan.entries:
                self.add(e.seq, layer, e.start, q[..., e.row : e.row + e.n, :, :])

    def asking(self, plan: Plan) -> Callable[[Tensor], None] | None:
        """What takes the queries of all layers (layers, tokens, heads, dim) at once; None if nobody asks."""
        return partial(self.note, slice(None), plan=plan) if self.size else None

    def add(self, seq: int, layer: int | slice, start: int, q: Tensor) -> None:
        """Queries (n, heads, dim) of the tokens in slots [start, start + n); of all layers, (layers, n, heads, dim)."""
        if (spare := q.shape[-3] - self.size - 2 * MOST_NODES) > 0:  # of a prompt, the last: no draft takes more back
            start, q = start + spare, q[..., spare:, :, :]
        n, log = q.shape[-3], self.held.get(seq)
        if log is None or not log.first <= start <= log.end or start + n - log.first > log.rows.shape[1]:
            before = log.last(start, self.size) if log and log.first <= start <= log.end else q.new_empty(1, 0, 1, 1)
            kept = before.shape[1]
            rows = q.new_empty(self.layers, 2 * self.size + n, *q.shape[-2:])
            rows[:, :kept] = before
            log = self.held[seq] = Log(rows, start - kept, start)
        log.rows[layer, start - log.first : start - log.first + n] = q
        log.end = start + n

    def last(self, seq: int, layer: int) -> Tensor:
        """The last ones of a sequence, (up to size, heads, dim)."""
        log = self.held.get(seq)
        return log.last(log.end, self.size)[layer] if log else torch.empty(0, 1, 1)

    def keep(self, seq: int, start: int, path: list[int]) -> None:
        """As KVCache.keep."""
        if log := self.held.get(seq):
            at = start - log.first
            log.rows[:, at : at + len(path)] = log.rows[:, [at + node for node in path]]
            log.end = start + len(path)

    def truncate(self, seq: int, length: int) -> None:
        """Forget what lies behind the first `length` tokens."""
        if log := self.held.get(seq):
            log.first, log.end = min(log.first, length), min(log.end, length)


@dataclass
class Log:
    """Queries of a sequence's slots [first, end): `rows` is (layers, room, heads, dim), and begins with `first`."""

    rows: Tensor
    first: int
    end: int

    def last(self, end: int, n: int) -> Tensor:
        """The last n before `end`, of all layers."""
        return self.rows[:, max(0, end - n - self.first) : end - self.first]


class Storage(KVCache, Protocol):
    """A cache that holds all keys of its sequences, which views read."""

    log: QueryLog

    def lies(self, layers: list[int]) -> Tensor | None:
        """Where the slabs of these layers lie, (layers, slabs) int64 on the device; None if no kernel goes by it."""

    def runs(self, seq: int, begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """Slots [begin, end) as they lie: how many, in which slab, from which slot there on, and how many that has."""

    def span(self, seq: int, layer: int, begin: int, end: int, side: slice = slice(None)) -> Tensor:
        """Keys and values (2, kv_heads, end - begin, dim) of slots [begin, end), to be read; or one `side` of them."""

    def chosen(self, seq: int, layer: int, index: Tensor) -> Tensor:
        """Keys and values (2, kv_heads, n, dim) of slots index (kv_heads, n)."""
