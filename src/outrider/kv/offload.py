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
from outrider.kv.dense import DenseKV
from outrider.ops import write


class OffloadKV(DenseKV):
    """A DenseKV whose layers from `on_chip_layers` on live in host memory. Raises ConfigError for too many layers."""

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

    def reserve(self, plan: Plan) -> None:
        """Write back the last forward's keys, make room, and send for the first layer."""
        self._write_back()
        super().reserve(plan)
        for e in plan.entries:
            needed = self.store[e.seq][-1].shape
            for stage in self.stages:
                if e.seq not in stage or stage[e.seq].shape != needed:
                    stage[e.seq] = torch.zeros(needed, dtype=self.dtype, device=self.device)
        self._fetch(self.on_chip, plan)

    def _empty(self, size: tuple[int, ...], layer: int) -> Tensor:
        if layer < self.on_chip:
            return super()._empty(size, layer)
        return torch.zeros(size, dtype=self.dtype, pin_memory=self.side is not None)

    def _fetch(self, layer: int, plan: Plan) -> None:
        """Start copying a layer's cached keys; the stage it goes to was read two layers ago."""
        if self.side:
            self.side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.side) if self.side else nullcontext():
            for e in plan.entries:
                stage, home = self.stages[layer % 2][e.seq].flatten(0, 1), self.store[e.seq][layer].flatten(0, 1)
                for to, keys in zip(stage, home, strict=True):  # each of them contiguous
                    to[: e.start].copy_(keys[: e.start], non_blocking=True)

    def _layer(self, layer: int, plan: Plan) -> dict[int, Tensor]:
        if layer < self.on_chip:
            return super()._layer(layer, plan)
        if self.side:
            torch.cuda.current_stream(self.device).wait_stream(self.side)
        if layer + 1 < self.config.num_layers:
            self._fetch(layer + 1, plan)
        return self.stages[layer % 2]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> Tensor:
        """As DenseKV's; what is new goes home later."""
        if layer >= self.on_chip:
            new = torch.stack([k, v])
            home = torch.empty(new.shape, dtype=self.dtype, pin_memory=self.side is not None)
            self.fresh.append((layer, plan, home.copy_(new, non_blocking=True)))
        return super().attend(layer, q, k, v, plan)

    def stores(self, plan: Plan) -> None:
        """Layers come and go: only `attend` knows where they are."""

    def _write_back(self) -> None:
        if self.side and self.fresh:
            torch.cuda.current_stream(self.device).synchronize()
        for layer, plan, new in self.fresh:
            for e in plan.entries:
                if e.seq in self.store:
                    write(self.store[e.seq][layer], e.start, *new[:, e.row : e.row + e.n])
        self.fresh = []

    def keys(self, seq: int, layer: int) -> Tensor:
        """Keys and values (2, kv_heads, capacity, dim) of a sequence, in host memory but for the layers on chip."""
        self._write_back()
        return super().keys(seq, layer)

    def keep(self, seq: int, start: int, path: list[int]) -> None:
        """Compact an accepted branch."""
        self._write_back()
        super().keep(seq, start, path)

    def free(self, seq: int) -> None:
        """Give a sequence's memory back, on both sides."""
        super().free(seq)
        for stage in self.stages:
            stage.pop(seq, None)
