"""Paged storage: a pool of blocks on one device, and for each sequence a table of those it holds.

The pool grows by slabs, whose blocks lie as in one long sequence: a text that gets neighbouring blocks is read in one
piece. Growing copies nothing. A block that somebody else holds, too, or that is published, is copied before it is
written to.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from outrider.config import ModelConfig
from outrider.errors import OutOfMemory, PoolFull
from outrider.kv.base import Fixed, Plan, QueryLog, allocate, allocating, roomy
from outrider.kv.blocks import BLOCK, WORTH, Pool
from outrider.ops import KEY_BLOCK, Pages, Stores, attend, attend_pages, device_plan, follows_paths, launches, write

SLAB = 1024  # slots that the pool grows by
MODEST = 2**29  # bytes


@dataclass
class Table:
    """What a sequence holds: block i has slots [i * BLOCK, (i + 1) * BLOCK)."""

    blocks: list[int] = field(default_factory=list)
    published: int = 0  # of the blocks
    before: Hashable = None  # by what the next one to be published is known, if some are
    ids: Tensor = field(default_factory=lambda: torch.empty(16, dtype=torch.int32))  # the blocks, for kernels

    def __post_init__(self) -> None:
        self.lies = self.ids.data_ptr()

    def put(self, at: int, block: int) -> None:
        """Another block in a place, or behind the last."""
        if at == len(self.blocks):
            self.blocks.append(block)
        self.blocks[at] = block
        if at >= len(self.ids):
            self.ids = torch.cat([self.ids, torch.empty_like(self.ids)])
            self.lies = self.ids.data_ptr()
        self.ids[at] = block

    def cut(self, at: int) -> None:
        """Block `at` is no more what it was: if it is published, publishing begins anew, as `before` is behind it."""
        if at < self.published:
            self.published = 0

    def pieces(self, begin: int, end: int, blocks: int) -> Iterator[tuple[int, int, int]]:
        """Slots [begin, end) as (slab, first slot there, how many), where `blocks` are a slab's."""
        while begin < end:
            first, n = self.blocks[begin // BLOCK], BLOCK - begin % BLOCK
            for block in self.blocks[begin // BLOCK + 1 : -(-end // BLOCK)]:
                if block != first + (n + begin % BLOCK) // BLOCK or block % blocks == 0:
                    break
                n += BLOCK
            n = min(n, end - begin)
            yield first // blocks, first % blocks * BLOCK + begin % BLOCK, n
            begin += n


class PagedKV:
    """Keys and values of every token of every sequence, in blocks, in the model's dtype on its device.

    `most` is how many blocks there may be at most; None: as many as there is memory.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, most: int | None = None) -> None:
        self.config, self.dtype, self.device, self.most = config, dtype, device, most
        self._there, self._why = 2**62, ""  # blocks, once memory has given out for more, and how that was said
        self.modest = MODEST  # bytes that the pool may grow to before what is cached must go
        self.log = QueryLog(config.num_layers)
        self.scale, self.softcap = config.attention_scale, config.attention_softcap
        self.pool = Pool()
        self.tables: dict[int, Table] = {}
        self.slabs: list[Any] = []  # each has, per layer, (2, kv_heads, SLAB, dim)
        self._point(torch.empty(config.num_layers, 0, dtype=torch.int64, device=device))

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all layers."""
        c = self.config
        return 2 * c.num_layers * c.num_kv_heads * c.head_dim * self.dtype.itemsize * BLOCK

    def nbytes(self, tokens: int) -> int:
        """Bytes that a sequence of so many tokens takes."""
        return -(-tokens // BLOCK) * self.block_bytes

    @property
    def room(self) -> int:
        """Blocks that can be had: free, cached or not made yet."""
        return self._limit - self.pool.used

    @property
    def _limit(self) -> int:
        return self._there if self.most is None else min(self.most, self._there)

    # --- who holds what -----------------------------------------------------------------------------------------------

    def catch_up(self, seq: int, length: int, settled: int) -> int:
        """All that was stored right is there; blocks behind it are given back."""
        self.log.truncate(seq, length)  # keys and values are overwritten before they are seen
        table, needed = self.tables.get(seq), -(-length // BLOCK)
        if table and needed < len(table.blocks):
            self.pool.release(table.blocks[needed:])
            del table.blocks[needed:]
            table.cut(needed)
        return length

    def adopt(self, seq: int, tokens: list[int], root: Hashable) -> int:
        """Give a new sequence the published blocks that begin as it does; returns how many tokens, the last never."""
        table = self.tables[seq] = Table()
        found, n, table.before = self.pool.find(root, tokens, len(tokens) - 1)
        for block in found:
            self.pool.hold(block)
            table.put(len(table.blocks), block)
        table.published = n // BLOCK
        return n

    def publish(self, seq: int, tokens: list[int], length: int, root: Hashable, last: bool = False) -> None:
        """Let others of the same root find what is full of the first `length` tokens, which are verified.

        `last`: no more will come, so that the block with the rest may be found, too.
        """
        table = self.tables.get(seq)
        while table and (begin := table.published * BLOCK) + (WORTH if last else BLOCK) <= length:
            block, own = table.blocks[table.published], tokens[begin : min(begin + BLOCK, length)]
            if len(own) < BLOCK and block in self.pool.names:  # another's, to which nothing was added
                return
            table.before = self.pool.publish(block, table.before if table.published else root, own)
            table.published += 1

    def share(self, seq: int, other: int, length: int) -> None:
        """Give a new sequence the blocks of another's first `length` tokens."""
        table = self.tables[other] = Table()
        for block in self.tables[seq].blocks[: -(-length // BLOCK)]:
            self.pool.hold(block)
            table.put(len(table.blocks), block)

    def reserve(self, plan: Plan) -> None:
        """Give each sequence blocks of its own for the tokens of this forward. Raises PoolFull, OutOfMemory."""
        for e in plan.entries:
            table = self.tables.get(e.seq) or self.tables.setdefault(e.seq, Table())
            for at in range(e.start // BLOCK, -(-(e.start + e.n) // BLOCK)):
                if at >= len(table.blocks):
                    table.put(at, self._take())
                elif not self.pool.writable(old := table.blocks[at]):
                    table.cut(at)
                    if self.pool.holders[old] == 1 and self.room < 1:
                        self.pool.hide(old)
                        continue
                    new = self._take()
                    self._copy(new * BLOCK, old * BLOCK, BLOCK)
                    table.put(at, new)
                    self.pool.release([old])

    def _take(self) -> int:
        pool = self.pool
        whole = pool.used + len(pool.cached) >= self._limit
        if whole and not pool.cached:
            full = f"all {self.most} blocks of keys and values are in use; lower the load or raise kv_memory"
            raise PoolFull(full if self._limit == self.most else self._why)
        small = len(pool.holders) * self.block_bytes < self.modest
        if not whole and not pool.free and (small or not pool.cached):
            try:
                self._grow()
            except OutOfMemory as error:
                if not pool.cached:
                    if not pool.holders:
                        raise
                    self._there, self._why = len(pool.holders), str(error)  # some may end with them, while others wait
                    raise PoolFull(self._why) from error
        return pool.take(again=whole or not pool.free)

    def _grow(self) -> None:
        c = self.config
        with allocating(SLAB // BLOCK * self.block_bytes):
            slab = self._slab((c.num_layers, 2, c.num_kv_heads, SLAB, c.head_dim))
            lies = torch.tensor([[layer.data_ptr()] for layer in slab], dtype=torch.int64, device=self.device)
            self._point(torch.cat([self._pointers, lies], 1))
        self.slabs.append(slab)
        self.pool.grow(SLAB // BLOCK)

    def _point(self, pointers: Tensor) -> None:
        """Note where the slabs lie (layers, slabs), for kernels."""
        self._pointers, self._slabs_at, self._roomy = pointers, pointers.data_ptr(), roomy(pointers)

    def _slab(self, size: tuple[int, ...]) -> Any:
        return allocate(size, self.dtype, self.device)

    def free(self, seq: int) -> None:
        """Give a sequence's blocks back: what is published of them can still be found."""
        if table := self.tables.pop(seq, None):
            self.pool.release(table.blocks)
            if (left := self.pool.shrink(SLAB // BLOCK)) < len(self.slabs):
                del self.slabs[left:]
                self._point(self._pointers[:, :left].contiguous())
            if not self.pool.used:
                self._there = 2**62
        self.log.held.pop(seq, None)

    # --- what lies there ----------------------------------------------------------------------------------------------

    def pieces(self, seq: int, layer: int, begin: int, end: int) -> list[Tensor]:
        """Keys and values (2, kv_heads, n, dim) of slots [begin, end), where they are stored, piece by piece."""
        slabs: list[list[Tensor]] = self.slabs
        found = self.tables[seq].pieces(begin, end, SLAB // BLOCK) if begin < end else ()
        return [slabs[slab][layer][:, :, at : at + n] for slab, at, n in found]

    def lies(self, layers: list[int]) -> Tensor | None:
        """Where the slabs of these layers lie, (layers, slabs) int64 on the device; None if no kernel goes by it."""
        if not launches(self.dtype, self.device):
            return None
        return self._pointers if len(layers) == len(self._pointers) else self._pointers[layers]

    def runs(self, seq: int, begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """Slots [begin, end) as they lie: how many, in which slab, from which slot there on, and how many that has."""
        return ((n, slab, first, SLAB) for slab, first, n in self.tables[seq].pieces(begin, end, SLAB // BLOCK))

    def span(self, seq: int, layer: int, begin: int, end: int, side: slice = slice(None)) -> Tensor:
        """Keys and values (2, kv_heads, end - begin, dim) of slots [begin, end), to be read; or one `side` of them."""
        parts: list[Tensor] = [piece[side] for piece in self.pieces(seq, layer, begin, end)]
        if not parts:
            c = self.config
            return torch.empty(2, c.num_kv_heads, 0, c.head_dim, dtype=self.dtype, device=self.device)[side]
        return torch.cat(parts, 2) if len(parts) > 1 else parts[0]

    def chosen(self, seq: int, layer: int, index: Tensor) -> Tensor:
        """Keys and values (2, kv_heads, n, dim) of slots index (kv_heads, n)."""
        slots = self.tables[seq].ids[index.cpu() // BLOCK].long() * BLOCK + index.cpu() % BLOCK  # of the pool
        slabs = [slab[layer] for slab in self.slabs]
        heads = []
        for head, own in enumerate(slots.to(slabs[0].device)):
            numbers, counts = (own // SLAB).unique_consecutive(return_counts=True)
            parts = zip(numbers.tolist(), (own % SLAB).split(counts.tolist()), strict=True)
            heads.append(torch.cat([slabs[number][:, head].index_select(1, part) for number, part in parts], 1))
        return torch.stack(heads, 1)

    def write(self, seq: int, layer: int, start: int, k: Tensor, v: Tensor) -> None:
        """Put keys and values (n, kv_heads, dim) at slots [start, start + n)."""
        at = 0
        for piece in self.pieces(seq, layer, start, start + len(k)):
            n = piece.shape[2]
            write(piece, 0, k[at : at + n], v[at : at + n])
            at += n

    def keep(self, seq: int, start: int, path: list[int]) -> None:
        """Compact an accepted branch: nodes of `path`, stored from slot `start`, move behind the prefix in order."""
        if path == list(range(len(path))):
            self.log.truncate(seq, start + len(path))
            return
        self.log.keep(seq, start, path)
        blocks = self.tables[seq].blocks
        slots = [blocks[at // BLOCK] * BLOCK + at % BLOCK for at in range(start, start + path[-1] + 1)]
        for to, node in enumerate(path):  # none goes where a later one lies
            if to != node:
                self._copy(slots[to], slots[node], 1)

    def _copy(self, to: int, begin: int, n: int) -> None:
        """Keys and values of slots of the pool that lie together, in all layers."""
        for place, own in zip(self._slots(to, n), self._slots(begin, n), strict=True):
            place.copy_(own)

    def _slots(self, begin: int, n: int) -> list[Tensor]:
        number, at = divmod(begin, SLAB)
        slab = self.slabs[number]
        return [slab[:, :, :, at : at + n]] if isinstance(slab, Tensor) else [own[:, :, at : at + n] for own in slab]

    # --- attention ----------------------------------------------------------------------------------------------------

    def stores(self, plan: Plan) -> Stores | None:
        """Where the keys of a forward lie; None if only `attend` knows."""
        runs: list[Any] = []
        for e in plan.entries:
            table = self.tables[e.seq]
            runs.append((e.row, e.n, e.start, SLAB, e.parents, [], table.lies, len(table.blocks)))
        return Stores(runs, self.dtype, self.log.asking(plan), self._slabs_at, len(self.slabs))

    def fixed(self, plan: Plan, rows: int) -> Fixed | None:
        """What a forward reads of this cache, in tensors of few sizes, for a graph; None if only `attend` knows."""
        if not launches(self.dtype, self.device):
            return None
        tables = [self.tables[e.seq] for e in plan.entries]
        pages = Pages(self._pointers, SLAB, [table.ids[: len(table.blocks)] for table in tables])
        heads = self.config.num_heads, self.config.head_dim, self.config.num_kv_heads
        made = device_plan(plan.entries, pages, heads, self.device, rows)
        return Fixed.of(made, self._roomy, self.log, plan, heads)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, plan: Plan, sinks: Tensor | None = None) -> Tensor:
        """Store k and v (tokens, kv_heads, dim), let q (tokens, heads, dim) look; returns (tokens, heads * dim)."""
        window = self.config.windows[layer]
        self.log.note(layer, q, plan)
        if follows_paths(q.dtype, q.device, q.shape[2]):
            tables = [self.tables[e.seq] for e in plan.entries]
            ids = [table.ids[: len(table.blocks)] for table in tables]
            pages = Pages(plan.scratch.get("slabs", self._pointers)[layer], SLAB, ids, plan.scratch)
            return attend_pages(q, k, v, plan.entries, pages, window, self.scale, sinks, self.softcap)
        outs = []
        for e in plan.entries:
            rows = slice(e.row, e.row + e.n)
            self.write(e.seq, layer, e.start, k[rows], v[rows])
            whole = q.new_zeros(2, k.shape[1], -(-(e.start + e.n) // KEY_BLOCK) * KEY_BLOCK, k.shape[2])
            whole[:, :, : e.start + e.n] = self.span(e.seq, layer, 0, e.start + e.n)
            how = window, self.scale, plan.scratch, sinks, self.softcap
            outs.append(attend(q[rows], whole, e.start, e.parents, *how))
        return outs[0] if len(outs) == 1 else torch.cat(outs)
