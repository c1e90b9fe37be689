"""Blocks of a cache, counted: which sequences hold them, which hold a known prefix, which may go.

A block that is full of verified tokens is published: known by the block before it and its own tokens, so that what
leads to it is a prefix, compared token by token. Nobody writes to it any more. When nobody holds it either, it stays
until its room is wanted; the least recently used go first, and of a sequence the last ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable
from heapq import heappop, heappush

from outrider.ops.native import PAGE

BLOCK = PAGE  # slots

Name = tuple[Hashable, tuple[int, ...]]  # what stands before: another block's number, or a root; and the tokens


class Pool:
    """The books of a pool: blocks are numbers from 0 on."""

    def __init__(self) -> None:
        self.holders: list[int] = []  # per block
        self.named: dict[Name, tuple[int, int]] = {}  # published: block, and the number by which others stand behind it
        self.names: dict[int, Name] = {}
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

    def shrink(self, count: int) -> bool:
        """Take away the last blocks, if they are free."""
        first = len(self.holders) - count
        if any(self.holders[first:]) or any(block in self.names for block in range(first, len(self.holders))):
            return False
        del self.holders[first:]
        self._free = sorted(block for block in self._free if block < first)
        return True

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
        """Make a full block known, unless one like it is; returns the number by which others stand behind it."""
        name = before, tuple(tokens)
        if name not in self.named:
            if block in self.names:  # it stood behind another, which has gone
                del self.named[self.names[block]]
            self.named[name] = block, next(self._numbers)
            self.names[block] = name
        return self.named[name][1]

    def find(self, root: Hashable, tokens: list[int], most: int) -> tuple[list[int], Hashable]:
        """Published blocks that hold up to `most` of the first tokens, and by what others stand behind the last."""
        found: list[int] = []
        for end in range(BLOCK, most + 1, BLOCK):
            known = self.named.get((root, tuple(tokens[end - BLOCK : end])))
            if known is None:
                break
            found.append(known[0])
            root = known[1]
        return found, root

    def _forget(self, block: int) -> None:
        del self.named[self.names.pop(block)]
        if block in self.cached:
            del self.cached[block]
            heappush(self._free, block)
