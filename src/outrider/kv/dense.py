"""Dense storage for what stays short: per sequence and layer one tensor that grows in whole key blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.config import ModelConfig
from outrider.kv.base import Fixed, Plan, QueryLog, allocate, roomy
from outrider.ops import KEY_BLOCK, Pages, Stores, attend_all, attend_pages, dense_plan, launches, upload


class DenseKV:
    """Keys and values of every token of every sequence, contiguous, in the model's dtype on its device."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, limit: int | None = None) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        self.limit = limit  # tokens beyond which there is no spare room
        self.log = QueryLog(config.num_layers)
        self.scale, self.softcap = config.attention_scale, config.attention_softcap
        self.store: dict[int, list[Tensor]] = {}  # per sequence, per layer (2, kv_heads, capacity, dim)
        self._lies: dict[int, Tensor] = {}  # ... and where these lie, (layers,) int64 on the device, where asked for

    def _capacity(self, tokens: int) -> int:
        spare = tokens // 16  # growing by a share keeps the copying linear in the length
        wanted = max(tokens, min(tokens + spare, self.limit or tokens + spare))
        return -(-wanted // KEY_BLOCK) * KEY_BLOCK

    def nbytes(self, tokens: int) -> int:
        """Bytes that a sequence of so many tokens takes, spare room included."""
        c = self.config
        return 2 * c.num_layers * c.num_kv_heads * c.head_dim * self.dtype.itemsize * self._capacity(tokens)

    def catch_up(self, seq: int, length: int, settled: int) -> int:
        """All that was stored right is there."""
        self.log.truncate(seq, length)  # keys and values are overwritten before they are seen
        return length

    def reserve(self, plan: Plan) -> None:
        """Grow each sequence's tensors to hold the tokens of this forward."""
        c = self.config
        for e in plan.entries:
            layers, needed = self.store.get(e.seq), e.start + e.n
            if layers and layers[-1].shape[2] >= needed:  # the last one grows last
                continue
            self._lies.pop(e.seq, None)
            size = (2, c.num_kv_heads, self._capacity(max(needed, e.final)), c.head_dim)
            if layers is None:
                self.store[e.seq] = [allocate(size, self.dtype, self.device) for _ in range(c.num_layers)]
                continue
            for i, old in enumerate(layers):  # layer by layer: never two whole copies at once
                new = allocate(size, self.dtype, self.device)
                new[:, :, : e.start] = old[:, :, : e.start]
                layers[i] = new

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, plan: Plan, sinks: Tensor | None = None) -> Tensor:
        """Store k and v (tokens, kv_heads, dim), let q (tokens, heads, dim) look; returns (tokens, heads * dim)."""
        self.log.note(layer, q, plan)
        window = self.config.windows[layer]
        if "slabs" in plan.scratch:
            pages = Pages(plan.scratch["slabs"][layer], 0, [], plan.scratch)
            return attend_pages(q, k, v, plan.entries, pages, window, self.scale, sinks, self.softcap)
        own = [self.store[e.seq][layer] for e in plan.entries]
        return attend_all(q, k, v, plan.entries, own, window, self.scale, plan.scratch, sinks, self.softcap)

    def _uneven(self, seqs: list[int]) -> bool:
        """Whether memory gave out while some sequence's layers grew: the first are larger than the last."""
        return any([self.store[seq][0].shape != self.store[seq][-1].shape for seq in seqs])

    def lies(self, seqs: list[int]) -> Tensor | None:
        """Where the sequences' tensors lie, (layers, sequences) int64 on the device; None if no kernel goes by it."""
        if not launches(self.dtype, self.device) or self._uneven(seqs):
            return None
        for seq in seqs:
            if seq not in self._lies:
                self._lies[seq] = upload([own.data_ptr() for own in self.store[seq]], self.device)
        return torch.stack([self._lies[seq] for seq in seqs], 1)

    def stores(self, plan: Plan) -> Stores | None:
        """Where the keys of a forward lie; None if only `attend` knows."""
        if self._uneven([e.seq for e in plan.entries]):
            return None
        runs = []
        for e in plan.entries:
            layers = self.store[e.seq]
            runs.append((e.row, e.n, e.start, layers[-1].shape[2], e.parents, [own.data_ptr() for own in layers], 0, 0))
        return Stores(runs, self.dtype, self.log.asking(plan))

    def fixed(self, plan: Plan, rows: int) -> Fixed | None:
        """What a forward reads of this cache, in tensors of few sizes, for a graph; None if only `attend` knows."""
        lies = self.lies([e.seq for e in plan.entries])
        if lies is None:
            return None
        heads = self.config.num_heads, self.config.head_dim, self.config.num_kv_heads
        capacities = [self.store[e.seq][-1].shape[2] for e in plan.entries]
        made = dense_plan(plan.entries, capacities, heads, self.device, rows)
        return Fixed.of(made, roomy(lies), self.log, plan, heads)

    def keep(self, seq: int, start: int, path: list[int]) -> None:
        """Compact an accepted branch: nodes of `path`, stored from slot `start`, move behind the prefix in order."""
        if path == list(range(len(path))):
            self.log.truncate(seq, start + len(path))
            return
        self.log.keep(seq, start, path)
        index = torch.tensor(path, device=self.device) + start
        for store in self.store[seq]:
            store[:, :, start : start + len(path)] = store[:, :, index]

    def free(self, seq: int) -> None:
        """Give a sequence's memory back."""
        self.store.pop(seq, None)
        self._lies.pop(seq, None)
        self.log.held.pop(seq, None)
