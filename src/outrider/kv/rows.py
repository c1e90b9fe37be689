"""Hidden rows of a target, kept like keys: what drafters that read hidden states catch up by.

A drafter declares the points it wants (`Runner.tap`), and gets a store of its own. Whenever the target reads tokens, be
it a prompt, a chunk of one, a draft or what preemption has to compute again, their rows are added at the tokens'
places; rejected branches are dropped and accepted ones moved, as the cache does with keys. So the drafter asks for the
rows that it has not consumed yet, and need not know why they are there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NORMED = -1  # the point behind the final norm: what logits are computed from


@dataclass
class Kept:
    """Of one sequence the rows of places [first, first + n): the first n of `rows`, which has room for more."""

    first: int
    rows: Tensor
    n: int

    @property
    def end(self) -> int:
        return self.first + self.n

    def append(self, new: Tensor) -> None:
        """More of them, behind these."""
        end = self.n + len(new)
        if end > len(self.rows):
            room = self.rows.new_empty(max(end, 2 * self.n), self.rows.shape[1])
            room[: self.n] = self.rows[: self.n]
            self.rows = room
        self.rows[self.n : end] = new
        self.n = end


class Rows:
    """Per sequence, the rows of the tokens in places [first, end): (end - first, len(points) * hidden).

    A point i is what enters layer i, which is what leaves layer i - 1; the number of layers is what leaves the last;
    NORMED is behind the final norm. A row is these states one behind the other, in the order of `points`. `base` has
    the rows of tokens that a view takes over from its base and does not read itself.
    """

    def __init__(self, points: tuple[int, ...], width: int, itemsize: int, base: Rows | None = None) -> None:
        self.points, self.base = points, base
        self.row_bytes = len(points) * width * itemsize
        self.held: dict[int, Kept] = {}
        self.synced: dict[int, int] = {}  # of a view: places whose rows are the base's

    def add(self, seq: int, start: int, states: dict[int, Tensor], own: slice) -> None:
        """Rows `own` of a forward's states by point, of the tokens in places from `start` on."""
        self._append(seq, start, torch.cat([states[point][own] for point in self.points], -1))

    def _append(self, seq: int, start: int, new: Tensor) -> None:
        kept = self.held.get(seq)
        if kept is None or kept.end != start:  # tokens between were never read here, such as a prefix from elsewhere
            self.held[seq] = Kept(start, new, len(new))
        else:
            kept.append(new)

    def read(self, seq: int, start: int, end: int) -> tuple[int, Tensor] | None:
        """The rows of places [start, end) that are there, and the first of these places. None if there are none.

        They are good until the next forward.
        """
        if (kept := self.held.get(seq)) is None:
            return None
        begin = max(start, kept.first)
        found = kept.rows[begin - kept.first : max(0, min(end, kept.end) - kept.first)]
        return (begin, found) if len(found) else None

    def drop(self, seq: int, before: int) -> None:
        """Forget the rows of places before `before`: they were consumed."""
        if (kept := self.held.get(seq)) and before > kept.first:
            gone = min(before - kept.first, kept.n)
            self.held[seq] = Kept(kept.first + gone, kept.rows[gone : kept.n].clone(), kept.n - gone)
        if self.base:
            self.base.drop(seq, before)

    def keep(self, seq: int, start: int, path: list[int]) -> None:
        """As KVCache.keep: of the nodes stored from place `start`, those of `path`, and nothing behind them."""
        if kept := self.held.get(seq):
            at = start - kept.first
            kept.rows[at : at + len(path)] = kept.rows[[at + node for node in path]]
            kept.n = at + len(path)

    def catch_up(self, seq: int, length: int, taken: int) -> None:
        """Forget all but the first `length` tokens' rows; a view's of the first `taken` become its base's."""
        tail = self.read(seq, taken, length) if self.base else None
        tail = tail and (tail[0], tail[1].clone())  # what comes before it is written where it lies
        synced = self.synced.get(seq, 0) if self.base else length
        if kept := self.held.get(seq):
            end = min(kept.end, length, synced)
            kept.first = min(kept.first, end)
            kept.n = end - kept.first
        if self.base:
            if found := self.base.read(seq, synced, taken):
                self._append(seq, found[0], found[1].clone())
            if tail:
                self._append(seq, *tail)
            self.synced[seq] = max(synced, taken)

    def free(self, seq: int) -> None:
        """Forget a sequence."""
        self.held.pop(seq, None)
        self.synced.pop(seq, None)
