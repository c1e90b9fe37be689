"""Hidden rows of a target, kept like keys: what drafters that read hidden states catch up by.

A drafter declares the points it wants (`Runner.tap`), and gets a store of its own. Whenever the target reads tokens, be
it a prompt, a chunk of one, a draft or what preemption has to compute again, their rows are added at the tokens'
places; rejected branches are dropped and accepted ones moved, as the cache does with keys. So the drafter asks for the
rows that it has not consumed yet, and need not know why they are there.
"""

from __future__ import annotations

import torch
from torch import Tensor

NORMED = -1  # the point behind the final norm: what logits are computed from


class Rows:
    """Per sequence, the rows of the tokens in places [first, end): (end - first, len(points) * hidden).

    A point i is what enters layer i, which is what leaves layer i - 1; the number of layers is what leaves the last;
    NORMED is behind the final norm. A row is these states one behind the other, in the order of `points`. `base` has
    the rows of tokens that a view takes over from its base and does not read itself.
    """

    def __init__(self, points: tuple[int, ...], width: int, itemsize: int, base: Rows | None = None) -> None:
        self.points, self.base = points, base
        self.row_bytes = len(points) * width * itemsize
        self.held: dict[int, tuple[int, Tensor]] = {}
        self.synced: dict[int, int] = {}  # of a view: places whose rows are the base's

    def add(self, seq: int, start: int, states: dict[int, Tensor], own: slice) -> None:
        """Rows `own` of a forward's states by point, of the tokens in places from `start` on."""
        self._append(seq, start, torch.cat([states[point][own] for point in self.points], -1))

    def _append(self, seq: int, start: int, new: Tensor) -> None:
        first, rows = self.held.get(seq, (start, new[:0]))
        if first + len(rows) != start:  # tokens between were never read here, such as a prefix from elsewhere
            first, rows = start, rows[:0]
        self.held[seq] = first, torch.cat([rows, new]) if len(rows) else new

    def read(self, seq: int, start: int, end: int) -> tuple[int, Tensor] | None:
        """The rows of places [start, end) that are there, and the first of these places. None if there are none."""
        if seq not in self.held:
            return None
        first, rows = self.held[seq]
        begin = max(start, first)
        found = rows[begin - first : max(0, end - first)]
        return (begin, found) if len(found) else None

    def drop(self, seq: int, before: int) -> None:
        """Forget the rows of places before `before`: they were consumed."""
        if seq in self.held:
            first, rows = self.held[seq]
            if before > first:
                self.held[seq] = min(before, first + len(rows)), rows[before - first :].clone()
        if self.base:
            self.base.drop(seq, before)

    def keep(self, seq: int, start: int, path: list[int]) -> None:
        """As KVCache.keep: of the nodes stored from place `start`, those of `path`, and nothing behind them."""
        if seq in self.held:
            first, rows = self.held[seq]
            at = start - first
            self.held[seq] = first, torch.cat([rows[:at], rows[[at + node for node in path]]])

    def catch_up(self, seq: int, length: int, taken: int) -> None:
        """Forget all but the first `length` tokens' rows; a view's of the first `taken` become its base's."""
        tail = self.read(seq, taken, length)
        synced = self.synced.get(seq, 0) if self.base else length
        self._truncate(seq, min(length, synced))
        if self.base:
            if found := self.base.read(seq, synced, taken):
                self._append(seq, *found)
            if tail:
                self._append(seq, *tail)
            self.synced[seq] = max(synced, taken)

    def _truncate(self, seq: int, length: int) -> None:
        if seq in self.held:
            first, rows = self.held[seq]
            self.held[seq] = min(first, length), rows[: max(0, length - first)]

    def free(self, seq: int) -> None:
        """Forget a sequence."""
        self.held.pop(seq, None)
        self.synced.pop(seq, None)
