"""The plan of a forward as tensors on the device, made once and read by all layers; kernels.py says what they hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from outrider.ops.native import PAGE
from outrider.ops.triton.graph import pinned, upload

CHAIN = 2**31 - 1  # where paths of no tree begin


@dataclass(frozen=True)
class Spans:
    """What one program reads: `few` spans of `near` positions each, and of `far` each behind these.

    Of a short context, many programs read little each; of a long one, less is put aside. All three are powers of two.
    """

    near: int
    few: int
    far: int

    def of(self, position: int) -> int:
        """In which span a position is."""
        beyond = position - self.few * self.near
        return position // self.near if beyond < 0 else self.few + beyond // self.far


SPANS = Spans(128, 32, 512)


class Rows(Protocol):
    """One sequence's rows [row, row + n) of a batch: the tokens in slots [start, start + n) of its store."""

    row: int
    n: int
    start: int
    parents: list[int] | None


def queries_tile(group: int, dim: int) -> int:
    """Queries of a tile, of which `group` share a key, for heads of a size: the same for any number of rows."""
    return max(32 if dim <= 128 and group > 2 else 16, _power(group))


@dataclass
class DevicePlan:
    """Parts of one int32 tensor, `whole`. Rows of slab -1 are padding: nothing is written, and they see nothing.

    `sizes`: tiles, rows, rows of tails and their width, pages. A graph's are rounded up, and it has no `cuts`.
    """

    whole: Tensor
    sizes: tuple[int, int, int, int, int]
    spans: int  # that the longest row sees
    cuts: list[tuple[int, int]]  # first row and rows of each tile

    def __post_init__(self) -> None:
        tiles, rows, tails, width, pages = self.sizes
        parts = torch.split(self.whole, [8 * tiles, 3 * rows, rows, tails * width, pages])
        self.tiles = parts[0].view(tiles, 8)  # a sequence's three, first row, rows, positions from and to, paths' begin
        self.places = parts[1].view(rows, 3)  # where new keys go: slab, slot there, slots of a slab
        self.positions = parts[2]  # (rows,); -1: padding
        self.tails = parts[3].view(tails, width)  # of each row of a tree, its path's slots
        self.tables = parts[4]  # pages of all sequences

    @property
    def reach(self) -> int:
        """Spans that the paths of a tree touch at most; 0: there is no tree."""
        _, _, trees, width, _ = self.sizes
        return 1 + -(-(width - 1) // SPANS.near) if trees > 1 else 0

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

    A place is the first slab and the slots of a slab. Sequences may share a table. One copy to the device. With `rows`
    it is a graph's of so many: all sizes are rounded up to few, as a graph is captured for each, and it stays on the
    host, for the graph to fetch.
    """
    tiles: list[list[int]] = []
    where: list[int] = []  # of each row: slab, slot there, slots of a slab
    positions: list[int] = []
    trees: dict[int, list[int]] = {}  # of a row, its path's slots
    distinct = list({id(table): table for table in tables}.values())
    begins: dict[int, int] = {}  # of each in the one that is made of all
    at = 0
    for table in distinct:
        begins[id(table)], at = at, at + len(table)
    for e, table, (slab, capacity) in zip(entries, tables, places, strict=True):
        own = paths(e.parents) if e.parents and e.parents != list(range(-1, e.n - 1)) else None  # if it branches
        depths = [len(path) - 1 for path in own] if own else list(range(e.n))
        first, per = e.start // PAGE, capacity // PAGE
        pages = table[first : (e.start + e.n - 1) // PAGE + 1].tolist()
        for i, depth in enumerate(depths):
            page, slot = pages[(e.start + i) // PAGE - first], (e.start + i) % PAGE
            where += [slab + page // per, page % per * PAGE + slot, capacity]
            positions.append(e.start + depth)
            if own:
                trees[e.row + i] = [e.start + j for j in own[i]]
        for i in range(0, e.n, step):
            some = depths[i : i + step]
            seen = [e.start + min(some), e.start + max(some) + 1, e.start if own else CHAIN]
            tiles.append([begins[id(table)], slab, capacity, e.row + i, len(some), *seen])
    width = max((len(path) for path in trees.values()), default=1)
    spans, count = SPANS.of(max(positions)) + 1, len(positions)
    sizes = len(tiles), count, count if trees else 1, width, at
    cuts = [(tile[3], tile[4]) for tile in tiles]
    if rows is not None:
        # Each size takes a graph of its own, and its time to be captured.
        width, room, spans = max(64, _power(width)) if trees else 1, max(256, _power(at)), max(8, _power(spans))
        some_tiles = next(n for n in (1, rows // 4, rows) if n >= len(tiles))
        sizes, cuts = (some_tiles, rows, rows if trees else 1, width, room), []
    flat = [x for tile in tiles for x in tile] + [0] * (8 * (sizes[0] - len(tiles)))
    flat += where + [-1] * (3 * (sizes[1] - count)) + positions + [-1] * (sizes[1] - count)
    tails = torch.zeros(sizes[2], width, dtype=torch.int32)
    if trees:
        longest = max(map(len, trees.values()))
        padded = [path + [0] * (longest - len(path)) for path in trees.values()]
        tails[[*trees], :longest] = torch.tensor(padded, dtype=torch.int32)
    rest = torch.zeros(sizes[4] - at, dtype=torch.int32)
    whole = torch.cat([torch.tensor(flat, dtype=torch.int32), tails.view(-1), *distinct, rest])
    return DevicePlan(upload(whole, device) if rows is None else pinned(whole, device), sizes, spans, cuts)


def _power(n: int) -> int:
    """The least power of two that is no less."""
    return 1 << (n - 1).bit_length()
