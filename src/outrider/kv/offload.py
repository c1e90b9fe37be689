"""Offloaded storage: all keys and values in host memory, streamed through the device layer by layer.

`on_chip_layers` stay on the device. Of the others, two are there at a time: while attention reads one, a side stream
copies the next (TriForce 2404.11912, FlexGen 2303.06865). Only what is new is written back, once per forward. Host
memory is pinned where there is CUDA; without it the same code copies from host to host.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from outrider.config import ModelConfig
from outrider.errors import ConfigError
from outrider.kv.base import Plan
from outrider.kv.paged import PagedKV
from outrider.ops import KEY_BLOCK, attend_all


class OffloadKV(PagedKV):
    """A PagedKV whose layers from `on_chip_layers` on live in host memory. Raises ConfigError for too many layers."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, on_chip_layers: int = 0) -> None:
        super().__init__(config, dtype, device)
        if on_chip_layers >= config.num_layers:
            raise ConfigError(f"on_chip_layers must be below the model's {config.num_layers}, not {on_chip_layers}")
        self.on_chip = on_chip_layers
        self.side: Any = torch.Stream(device) if device.type == "cuda" else None
        self.stages: tuple[dict[int, Tensor], ...] = ({}, {})  # the layer that is read and the one that comes
        self.fresh: list[tuple[int, Plan, Tensor]] = []  # layer, and its new keys and values (2, tokens, kv_heads, dim)

    def nbytes(self, tokens: int) -> int:
        """Bytes that a sequence of so many tokens takes: all layers, and the two on their way."""
        return super().nbytes(tokens) * (self.config.num_layers + 2) // self.config.num_layers

    def _slab(self, size: tuple[int, ...]) -> list[Tensor]:
        pinned = self.side is not None
        host = [torch.zeros(size[1:], dtype=self.dtype, pin_memory=pinned) for _ in range(size[0] - self.on_chip)]
        return [*super()._slab((self.on_chip, *size[1:])), *host] if self.on_chip else host

    def catch_up(self, seq: int, length: int, settled: int) -> int:
        """As PagedKV's."""
        self._write_back()
        return super().catch_up(seq, length, settled)

    def reserve(self, plan: Plan) -> None:
        """Write back the last forward's keys, make room, and send for the first layer."""
        self._write_back()
        super().reserve(plan)
        for e in plan.entries:
            needed = -(-max(e.start + e.n, e.final) // KEY_BLOCK) * KEY_BLOCK
            for stage in self.stages:
                if e.seq not in stage or stage[e.seq].shape[2] < needed:
                    size = 2, self.config.num_kv_heads, needed + needed // 16 // KEY_BLOCK * KEY_BLOCK
                    stage[e.seq] = torch.zeros(*size, self.config.head_dim, dtype=self.dtype, device=self.device)
        self._fetch(self.on_chip, plan)

    def _fetch(self, layer: int, plan: Plan) -> None:
        """Start copying a layer's cached keys; the stage it goes to was read two layers ago."""
        if self.side:
            self.side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.side) if self.side else nullcontext():
            for e in plan.entries:
                stage, at = self.stages[layer % 2][e.seq].flatten(0, 1), 0
                for piece in super().pieces(e.seq, layer, 0, e.start):
                    n = piece.shape[2]
                    for to, keys in zip(stage, piece.flatten(0, 1), strict=True):  # each of them contiguous
                        to[at : at + n].copy_(keys, non_blocking=True)
                    at += n

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, plan: Plan, sinks: Tensor | None = None) -> Tensor:
        """As PagedKV's; what is new goes home later."""
        if layer < self.on_chip:
            return super().attend(layer, q, k, v, plan, sinks)
        self.log.note(layer, q, plan)
        new = torch.stack([k, v])
        home = torch.empty(new.shape, dtype=self.dtype, pin_memory=self.side is not None)
        self.fresh.append((layer, plan, home.copy_(new, non_blocking=True)))
        if self.side:
            torch.cuda.current_stream(self.device).wait_stream(self.side)
        if layer + 1 < self.config.num_layers:
            self._fetch(layer + 1, plan)
        own = [self.stages[layer % 2][e.seq] for e in plan.entries]
        how = self.config.windows[layer], self.scale, plan.scratch, sinks, self.softcap
        return attend_all(q, k, v, plan.entries, own, *how)

    def fixed(self, plan: Plan, rows: int) -> None:
        """As `stores`."""

    def lies(self, layers: list[int]) -> None:
        """As `stores`."""

    def stores(self, plan: Plan) -> None:
        """Layers come and go: only `attend` knows where they are."""

    @torch.inference_mode()
    def _write_back(self) -> None:
        if self.side and self.fresh:
            torch.cuda.current_stream(self.device).synchronize()
        fresh, self.fresh = self.fresh, []
        for layer, plan, new in fresh:
            for e in plan.entries:
                self.write(e.seq, layer, e.start, *new[:, e.row : e.row + e.n])

    def pieces(self, seq: int, layer: int, begin: int, end: int) -> list[Tensor]:
        """As PagedKV's, in host memory but for the layers on chip."""
        self._write_back()
        return super().pieces(seq, layer, begin, end)

    def keep(self, seq: int, start: int, path: list[int]) -> None:
        """As PagedKV's."""
        self._write_back()
        super().keep(seq, start, path)

    def chosen(self, seq: int, layer: int, index: Tensor) -> Tensor:
        """As PagedKV's."""
        self._write_back()
        return super().chosen(seq, layer, index)

    def free(self, seq: int) -> None:
        """Give a sequence's blocks back, on both sides."""
        self._write_back()
        super().free(seq)
        for stage in self.stages:
            stage.pop(seq, None)
