"""Blocks of a cache, counted: which sequences hold them, which hold a known prefix, which may go.

A block that is full of verified tokens, or the last of a sequence that has ended, is published: known by the block
before it and its own tokens, so that what leads to it is a prefix, compared token by token. Nobody writes to it any
more. When nobody holds it either, it stays until its room is wanted; the least recently used go first, and of a
sequence the last ones.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable
from heapq import heappop, heappush

from outrider.ops.native import PAGE
from outrider.outputs import common

BLOCK = PAGE  # slots
WORTH = 8  # tokens that a block must share to be worth the copy that is made before others follow them

Known = tuple[tuple[int, ...], int, int]  # a published block: its tokens, itself, and its number for what is behind it


class Pool:
    """The books of a pool: blocks are numbers from 0 on."""

    def __init__(self) -> None:
        self.holders: list[int] = []  # per block
        self.behind: dict[Hashable, list[Known]] = {}  # by a root, or a block's number: sorted, those right behind it
        self.names: dict[int, tuple[Hashable, Known]] = {}  # of published blocks: what they are behind, and their entry
        self.cached: dict[int, None] = {}  # published and held by nobody, the least recently used first
        self._free: list[int] = []  # a heap: low numbers first, so that neighbours lie together
        self._numbers = itertools.count()

    @property
    def free(self) -> int:
        """Blocks with nothing in them."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Blocks that somebody holds."""
        return len(self.holders) - len(self._free) - len(self.cached)

    def grow(self, count: int) -> None:
        """Add free blocks."""
        for block in range(len(self.holders), len(self.holders) + count):
            heappush(self._free, block)
        self.holders += [0] * count

    def shrink(self, count: int) -> int:
        """Take away the last blocks that are free, in lots of `count`, but never the first lot; how many remain."""
        left = len(self.holders)
        while left > count and not self.holders[left - 1] and left - 1 not in self.names:
            left -= 1
        lots = -(-left // count)
        if (left := lots * count) < len(self.holders):
            del self.holders[left:]
            self._free = sorted(block for block in self._free if block < left)
        return lots

    def take(self, again: bool) -> int:
        """Hold a free block; `again`: let go the cached one that was used least recently, to be taken in its place."""
        if again:
            self._forget(next(iter(self.cached)))
        block = heappop(self._free)
        self.holders[block] = 1
        return block

    def hold(self, block: int) -> None:
        """One more holder."""
        self.cached.pop(block, None)
        self.holders[block] += 1

    def release(self, blocks: list[int]) -> None:
        """One holder less, of each of a sequence's blocks."""
        for block in reversed(blocks):
            self.holders[block] -= 1
            if not self.holders[block]:
                if block in self.names:
                    self.cached[block] = None
                else:
                    heappush(self._free, block)

    def writable(self, block: int) -> bool:
        """Whether its one holder may change it."""
        return self.holders[block] == 1 and block not in self.names

    def publish(self, block: int, before: Hashable, tokens: Iterable[int]) -> int:
        """Make a block known, unless one like it is; returns the number by which others stand behind it."""
        own = tuple(tokens)
        siblings = self.behind.get(before, [])
        at = bisect_left(siblings, (own,))
        if at < len(siblings) and siblings[at][0] == own:
            return siblings[at][2]
        if block in self.names:  # it stood behind another, which has gone
            self.hide(block)
        known = own, block, next(self._numbers)
        insort(self.behind.setdefault(before, []), known)
        self.names[block] = before, known
        return known[2]

    def find(self, root: Hashable, tokens: list[int], most: int) -> tuple[list[int], int, Hashable]:
        """Published blocks that begin with the first of these tokens, and with how many, which are at most `most`.

        And by what others stand behind the last of the blocks that are taken whole: only the last is perhaps not.
        """
        found, n = list[int](), 0
        while n < most and (siblings := self.behind.get(root)):
            rest = tuple(tokens[n : min(n + BLOCK, most)])
            at = bisect_left(siblings, (rest,))  # whoever shares most with it stands right before it or behind
            near = siblings[max(0, at - 1) : at + 1]
            same, block, number = max((common(rest, own), block, number) for own, block, number in near)
            if same < WORTH:
                break
            found.append(block)
            n += same
            if same < BLOCK:
                break
            root = number
        return found, n, root

    def hide(self, block: int) -> None:
        """Let a published block be found no more."""
        before, known = self.names.pop(block)
        siblings = self.behind[before]
        del siblings[bisect_left(siblings, known)]
        if not siblings:
            del self.behind[before]

    def _forget(self, block: int) -> None:
        self.hide(block)
        if block in self.cached:
            del self.cached[block]
            heappush(self._free, block)
