"""Dense storage: per sequence and layer one tensor that grows in whole key blocks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from outrider.config import ModelConfig
from outrider.errors import OutOfMemory
from outrider.kv.base import Entry, Plan
from outrider.ops import KEY_BLOCK, attention, attention_mask


class DenseKV:
    """Keys and values of every token of every sequence, contiguous, in the model's dtype on its device."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        self.scale = config.head_dim**-0.5
        self.group = config.num_heads // config.num_kv_heads
        self.store: dict[int, list[Tensor]] = {}  # per sequence, per layer (2, kv_heads, capacity, dim)

    def _capacity(self, tokens: int) -> int:
        spare = tokens // 16  # growing by a share keeps the copying linear in the length
        return -(-(tokens + spare) // KEY_BLOCK) * KEY_BLOCK

    def nbytes(self, tokens: int) -> int:
        """Bytes that a sequence of so many tokens takes, spare room included."""
        c = self.config
        return 2 * c.num_layers * c.num_kv_heads * c.head_dim * self.dtype.itemsize * self._capacity(tokens)

    def reserve(self, plan: Plan) -> None:
        """Grow each sequence's tensors to hold the tokens of this forward."""
        c = self.config
        for e in plan.entries:
            layers, needed = self.store.get(e.seq), e.start + e.n
            if layers and layers[-1].shape[2] >= needed:  # the last one grows last
                continue
            size = (2, c.num_kv_heads, self._capacity(needed), c.head_dim)
            if layers is None:
                self.store[e.seq] = [self._zeros(size) for _ in range(c.num_layers)]
                continue
            for i, old in enumerate(layers):  # layer by layer: never two whole copies at once
                new = self._zeros(size)
                new[:, :, : e.start] = old[:, :, : e.start]
                layers[i] = new

    def _zeros(self, size: tuple[int, ...]) -> Tensor:
        try:  # zeros, not empty: masked keys weigh 0, but 0 * nan would be nan
            return torch.zeros(size, dtype=self.dtype, device=self.device)
        except RuntimeError as error:  # torch's OutOfMemoryError is one, and so is what the CPU allocator raises
            size_mb = math.prod(size) * self.dtype.itemsize / 2**20
            raise OutOfMemory(
                f"no {size_mb:.0f} MiB left for keys and values; lower max_tokens or kv_memory"
            ) from error

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> Tensor:
        """Store k and v (tokens, kv_heads, dim), let q (tokens, heads, dim) look; returns (tokens, heads * dim)."""
        window = self.config.windows[layer]
        outs = []
        for e in plan.entries:
            rows = slice(e.row, e.row + e.n)
            store = self.store[e.seq][layer]
            store[0, :, e.start : e.start + e.n] = k[rows].transpose(0, 1)
            store[1, :, e.start : e.start + e.n] = v[rows].transpose(0, 1)
            first, last, mask = self._mask(e, window, plan)
            keys = store[:, :, first:last]
            outs.append(attention(q[rows], keys[0], keys[1], mask, self.scale))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _mask(self, e: Entry, window: int | None, plan: Plan) -> tuple[int, int, Tensor]:
        key = (e.seq, window)
        if key not in plan.scratch:
            last = -(-(e.start + e.n) // KEY_BLOCK) * KEY_BLOCK
            first = 0 if window is None else max(0, (e.start - window + 1) // KEY_BLOCK * KEY_BLOCK)
            visible = e.visible(first, last - first, window, self.device)
            plan.scratch[key] = first, last, attention_mask(visible, self.group, self.dtype)
        found: tuple[int, int, Tensor] = plan.scratch[key]
        return found

    def keep(self, seq: int, start: int, path: list[int]) -> None:
        """Compact an accepted branch: nodes of `path`, stored from slot `start`, move behind the prefix in order."""
        if path == list(range(len(path))):
            return
        index = torch.tensor(path, device=self.device) + start
        for store in self.store[seq]:
            store[:, :, start : start + len(path)] = store[:, :, index]

    def truncate(self, seq: int, length: int) -> None:
        """Nothing to do: what lies beyond a sequence's length is overwritten before it is seen."""

    def free(self, seq: int) -> None:
        """Give a sequence's memory back."""
        self.store.pop(seq, None)
