"""The plan of a forward as tensors on the device, made once and read by all layers; kernels.py says what they hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from outrider.ops.triton.graph import upload

PAGE = 32  # slots, as in kv/blocks.py: keys that are looked at together
SPAN = 512  # positions that one program reads; a context's spans are combined in order


class Rows(Protocol):
    """One sequence's rows [row, row + n) of a batch: the tokens in slots [start, start + n) of its store."""

    row: int
    n: int
    start: int
    parents: list[int] | None


def queries_tile(group: int, dim: int) -> int:
    """Queries of a tile, of which `group` share a key, for heads of a size: the same for any number of rows."""
    return max(32 if dim <= 128 else 16, 1 << (group - 1).bit_length())


@dataclass
class DevicePlan:
    """Parts of one int32 tensor, `whole`. Rows whose run is -1 are padding: nothing is written, and they see nothing.

    `sizes`: runs, rows, tiles, rows of tails and their width, pages. A graph's are rounded up, and it has no `cuts`.
    """

    whole: Tensor
    sizes: tuple[int, int, int, int, int, int]
    spans: int  # that the longest row sees
    cuts: list[tuple[int, int]]  # first row and rows of each tile

    def __post_init__(self) -> None:
        runs, rows, tiles, tails, width, pages = self.sizes
        parts = torch.split(self.whole, [3 * runs, rows, rows, rows, 5 * tiles, tails * width, pages])
        self.runs = parts[0].view(runs, 3)  # where in tables, first slab, slots of a slab
        self.row_runs, self.slots, self.positions = parts[
            1:4
        ]  # (rows,); slots: where new keys go; position -1: padding
        self.tiles = parts[4].view(tiles, 5)  # run, first row, rows, start, whether a tree
        self.tails = parts[5].view(tails, width)  # of each row of a tree, its path's slots
        self.tables = parts[6]  # pages of all runs

    def pieces(self, room: int) -> Iterator[tuple[int, int, Tensor]]:
        """Rows [first, last) and the tiles that hold them, no more than `room` rows at a time but at least a tile's."""
        if not self.cuts:
            yield 0, len(self.positions), self.tiles
        at = 0
        while at < len(self.cuts):
            begin, first, last = at, self.cuts[at][0], 0
            while at < len(self.cuts) and (at == begin or sum(self.cuts[at]) - first <= room):
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
    step: int,
    device: torch.device,
    rows: int | None = None,
) -> DevicePlan:
    """For each sequence its rows, of which `step` are a tile, its pages (pages,) int32 on the host, and its place.

    A place is the first slab and the slots of a slab. One copy to the device. With `rows` it is a graph's of so many:
    all sizes are rounded up to few.
    """
    runs: list[list[int]] = []
    lines: list[list[int]] = []  # run, slot, position of each row
    tiles: list[list[int]] = []
    trees: dict[int, list[int]] = {}  # of a row, its path's slots
    at = 0
    for run, (e, table, (slab, capacity)) in enumerate(zip(entries, tables, places, strict=True)):
        runs.append([at, slab, capacity])
        at += len(table)
        own = None if e.parents is None else paths(e.parents)
        for i in range(e.n):
            lines.append([run, e.start + i, e.start + (len(own[i]) - 1 if own else i)])
            if own:
                trees[e.row + i] = [e.start + j for j in own[i]]
        tiles += [[run, e.row + i, min(step, e.n - i), e.start, int(own is not None)] for i in range(0, e.n, step)]
    width = max((len(path) for path in trees.values()), default=1)
    spans = -(-(max(line[2] for line in lines) + 1) // SPAN)
    sizes = len(runs), len(lines), len(tiles), len(lines) if trees else 1, width, at
    cuts = [(first, n) for _, first, n, _, _ in tiles]
    if rows is not None:
        width, pages, spans = (1 << (n - 1).bit_length() for n in (width, at, spans))
        sizes, cuts = (rows, rows, rows, rows if trees else 1, width, pages), []
    tails = torch.zeros(sizes[3], width, dtype=torch.int32)
    for row, path in trees.items():
        tails[row, : len(path)] = torch.tensor(path, dtype=torch.int32)
    parts = [_fill(runs, sizes[0], 3)]
    parts += [_fill([[line[i]] for line in lines], sizes[1], 1, -1) for i in range(3)]
    parts += [_fill(tiles, sizes[2], 5), tails.flatten(), *tables, torch.zeros(sizes[5] - at, dtype=torch.int32)]
    return DevicePlan(upload(torch.cat(parts), device), sizes, spans, cuts)


def _fill(lines: list[list[int]], count: int, width: int, rest: int = 0) -> Tensor:
    """Lines one after another, and then the rest, (count * width,) int32."""
    whole = torch.full((count, width), rest, dtype=torch.int32)
    whole[: len(lines)] = torch.tensor(lines, dtype=torch.int32)
    return whole.flatten()
