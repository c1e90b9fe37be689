"""The plan of a forward as tensors on the device, made once and read by all layers; kernels.py says what they hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

PAGE = 32  # slots, as in kv/blocks.py: keys that are looked at together
SPAN = 512  # positions that one program reads; a context's spans are combined in order


class Rows(Protocol):
    """One sequence's rows [row, row + n) of a batch: the tokens in slots [start, start + n) of its store."""

    row: int
    n: int
    start: int
    parents: list[int] | None


def queries_tile(group: int) -> int:
    """Rows of a tile of queries, of which `group` share a key: the same for any number of rows."""
    return max(32, 1 << (group - 1).bit_length())


@dataclass
class DevicePlan:
    """All int32. Rows whose run is -1 are padding: nothing is written for them, and they see nothing."""

    tables: Tensor  # (pages of all runs,)
    runs: Tensor  # (runs, 3): where in tables, first slab, slots of a slab
    row_runs: Tensor  # (rows,)
    slots: Tensor  # (rows,) where new keys go
    positions: Tensor  # (rows,); -1: padding
    tiles: Tensor  # (tiles, 5): run, first row, rows, start, whether a tree
    tails: Tensor  # (rows, longest path of a tree) slots
    spans: int  # that the longest row sees
    cuts: list[tuple[int, int]]  # first row and rows of each tile; those of a graph have none

    def pieces(self, room: int) -> Iterator[tuple[int, int, Tensor]]:
        """Rows [first, last) and the tiles that hold them, no more than `room` rows at a time but at least a tile's."""
        if not self.cuts:
            yield 0, len(self.positions), self.tiles
        at = 0
        while at < len(self.cuts):
            first = last = self.cuts[at][0]
            begin = at
            while at < len(self.cuts) and (at == begin or self.cuts[at][0] + self.cuts[at][1] - first <= room):
                last = sum(self.cuts[at])
                at += 1
            yield first, last, self.tiles[begin:at]


def paths(parents: list[int]) -> list[list[int]]:
    """For each row of a tree the rows from the prefix to itself."""
    found: list[list[int]] = []
    for i, parent in enumerate(parents):
        found.append([*(found[parent] if parent >= 0 else []), i])
    return found


def make(
    entries: Sequence[Rows],
    tables: Sequence[Tensor],
    places: Sequence[tuple[int, int]],
    group: int,
    device: torch.device,
) -> DevicePlan:
    """For each sequence its rows, its pages (pages,) int32 on the host, and its first slab and slots of a slab.

    One copy to the device.
    """
    step = queries_tile(group) // group
    runs: list[int] = []
    row_runs: list[int] = []
    slots: list[int] = []
    positions: list[int] = []
    tiles: list[int] = []
    cuts: list[tuple[int, int]] = []
    trees: list[tuple[int, list[int]]] = []  # row, slots
    at = 0
    for run, (e, table, (slab, capacity)) in enumerate(zip(entries, tables, places, strict=True)):
        runs += [at, slab, capacity]
        at += len(table)
        row_runs += [run] * e.n
        slots += range(e.start, e.start + e.n)
        if e.parents is None:
            positions += range(e.start, e.start + e.n)
        else:
            own = paths(e.parents)
            positions += [e.start + len(path) - 1 for path in own]
            trees += [(e.row + i, [e.start + j for j in path]) for i, path in enumerate(own)]
        for i in range(0, e.n, step):
            cuts.append((e.row + i, min(step, e.n - i)))
            tiles += [run, *cuts[-1], e.start, int(e.parents is not None)]
    width = max((len(path) for _, path in trees), default=1)
    tails = torch.zeros(len(slots) if trees else 1, width, dtype=torch.int32)
    for row, path in trees:
        tails[row, : len(path)] = torch.tensor(path, dtype=torch.int32)
    lists = [torch.tensor(x, dtype=torch.int32) for x in (runs, row_runs, slots, positions, tiles)]
    parts = [*lists, tails.flatten(), *tables]
    whole = torch.cat(parts)
    if device.type == "cuda":
        whole = whole.pin_memory().to(device, non_blocking=True)
    cut = list(torch.split(whole, [*(len(x) for x in parts[:6]), at]))
    return DevicePlan(
        cut[6], cut[0].view(-1, 3), cut[1], cut[2], cut[3], cut[4].view(-1, 5), cut[5].view(tails.shape),
        -(-(max(positions) + 1) // SPAN), cuts,
    )  # fmt: skip
