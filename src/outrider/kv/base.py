"""What every cache of keys and values can do, and the plan of one flat forward over several sequences."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass
class Entry:
    """One sequence's share of a flat forward: rows [row, row + n) of the batch.

    The cache holds `start` tokens of the sequence already; these n follow. `parents` is None for a plain run of tokens,
    else per row the index among these rows of the row before it, -1 for the cached prefix: a token tree.
    """

    seq: int
    row: int
    n: int
    start: int
    parents: list[int] | None = None

    def positions(self) -> list[int]:
        """Position of each row in its sequence: branches of a tree share positions."""
        if self.parents is None:
            return list(range(self.start, self.start + self.n))
        depths: list[int] = []
        for parent in self.parents:
            depths.append(self.start if parent < 0 else depths[parent] + 1)
        return depths

    def visible(self, first: int, keys: int, window: int | None, device: torch.device) -> Tensor:
        """(n, keys) bool: which of the keys in slots first ... first + keys - 1 each row attends to.

        A row sees the cached prefix and its own ancestors, itself included, no farther back than the window.
        """
        slots = torch.arange(first, first + keys, device=device)
        if self.parents is None:
            at = torch.arange(self.start, self.start + self.n, device=device)[:, None]
            seen = slots <= at
            return seen if window is None else seen & (slots > at - window)
        at = torch.tensor(self.positions(), device=device)[:, None]
        tree = torch.zeros(self.n, self.n, dtype=torch.bool)
        for i, parent in enumerate(self.parents):
            if parent >= 0:
                tree[i] = tree[parent]
            tree[i, i] = True
        seen = slots.expand(self.n, keys) < self.start
        position = slots.clone()
        low, high = self.start - first, self.start - first + self.n
        seen[:, low:high] = tree.to(device)
        position[low:high] = at[:, 0]
        return seen if window is None else seen & (position > at - window)


@dataclass
class Plan:
    """The attention plan of one flat forward. `scratch` is where a cache keeps what its layers share (masks)."""

    entries: list[Entry]
    scratch: dict[Any, Any] = field(default_factory=dict)


class KVCache(Protocol):
    """Storage of keys and values for several sequences of different lengths, known by their ids."""

    def reserve(self, plan: Plan) -> None:
        """Make room for the tokens of a forward. Raises OutOfMemory if there is none; what is stored stays."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> Tensor:
        """Store k and v (tokens, kv_heads, dim), let q (tokens, heads, dim) look; returns (tokens, heads * dim)."""

    def keep(self, seq: int, start: int, path: list[int]) -> None:
        """Of the tree stored from slot `start`, keep the nodes of `path`, in order, right behind the prefix."""

    def truncate(self, seq: int, length: int) -> None:
        """Forget all but the first `length` tokens of a sequence."""

    def free(self, seq: int) -> None:
        """Give a sequence's memory back; freeing an unknown one does nothing."""

    def nbytes(self, tokens: int) -> int:
        """Bytes that a sequence of so many tokens takes."""
