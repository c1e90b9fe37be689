"""Tensors across ranks: what comes together, and in which order it is summed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

MODES = {
    "gather": "the bits of one rank's run",
    "ordered": "sums in the order of the ranks: bits that depend on their number",
    "reduce": "sums in the library's order",
}


@dataclass
class Group:
    """The first `size` ranks, among which a model is cut, and how its sums are made."""

    ranks: Any  # Ranks; None where only sizes are asked for
    size: int
    mode: str
    process_group: Any
    calls: int = 0  # collectives so far, and the bytes that this rank has received in them
    received: int = 0

    @property
    def rank(self) -> int:
        """This process's."""
        return int(self.ranks.rank)

    def announce(self, *op: Any) -> int:
        """On rank 0, let all ranks make what it makes now: `op`, a new number, and this group; returns the number."""
        if self.rank:
            return 0
        number: int = self.ranks.number()
        self.ranks.tell(*op, number, self.size, self.mode)
        self.ranks.flush()
        return number

    def gather(self, x: Tensor, parts: list[range]) -> Tensor:
        """All columns, of which each rank has some: x (n, own) gives (n, all), on every rank."""
        return self._joined(self._all(x, max(map(len, parts))), parts) if len(x) else x.new_empty(0, parts[-1].stop)

    def gather_first(self, x: Tensor, parts: list[range]) -> Tensor:
        """The same on rank 0; others have their own back."""
        if not len(x):
            return x.new_empty(0, parts[-1].stop)
        widest = max(map(len, parts))
        mine = _padded(x, widest)
        into = [torch.empty_like(mine) for _ in parts] if self.rank == 0 else None
        dist.gather(mine, into, dst=0, group=self.process_group)
        self._count(0 if into is None else mine.nbytes * (self.size - 1))
        return x if into is None else self._joined(torch.stack(into), parts)

    def sum(self, x: Tensor) -> Tensor:
        """Each rank's x, added: in their order, or in the library's if the mode is `reduce`."""
        if not len(x):
            return x
        if self.mode == "reduce":
            dist.all_reduce(x, group=self.process_group)
            self._count(2 * x.nbytes * (self.size - 1) // self.size)
            return x
        total, *others = self._all(x, x.shape[1])
        added: Tensor = total
        for part in others:
            added = added + part
        return added

    def first_says(self, x: Tensor) -> Tensor:
        """Rank 0's x, on every rank."""
        dist.broadcast(x, 0, group=self.process_group)
        self._count(x.nbytes if self.rank else 0)
        return x

    def _all(self, x: Tensor, width: int) -> Tensor:
        """(ranks, n, width)."""
        mine = _padded(x, width)
        into = mine.new_empty(self.size * len(mine), width)
        (getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)(into, mine, group=self.process_group)
        self._count(mine.nbytes * (self.size - 1))
        return into.view(self.size, *mine.shape)

    def _joined(self, every: Tensor, parts: list[range]) -> Tensor:
        if len({len(part) for part in parts}) == 1:
            return every.transpose(0, 1).reshape(every.shape[1], -1)
        return torch.cat([own[:, : len(part)] for own, part in zip(every, parts, strict=True)], 1)

    def _count(self, received: int) -> None:
        self.calls += 1
        self.received += received


def _padded(x: Tensor, width: int) -> Tensor:
    return x.contiguous() if x.shape[1] == width else torch.nn.functional.pad(x, (0, width - x.shape[1]))
