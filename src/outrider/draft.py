"""Token trees: a guess at what follows a sequence, and what verification made of it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from operator import lt

from torch import Tensor

from outrider.config import MOST_NODES
from outrider.errors import OutriderError
from outrider.outputs import Logprob


@dataclass
class Draft:
    """A guess at what follows a sequence: a token tree in topological order (parents before children).

    `q` (nodes, vocab) is the distribution each node was drawn from, given its ancestors and its earlier siblings
    (independent siblings carry the same one), by noise that no earlier step used; only the rules `rejection` and
    `block` look at it, and they are exact without it, too. A row of zeros is a node without one. Raises ValueError for
    parents that do not come before their children, and counts that do not agree.
    """

    tokens: list[int] = field(default_factory=list)  # per node
    parents: list[int] = field(default_factory=list)  # per node, the index of the one before it; -1: the text's end
    q: Tensor | None = None
    riders: int = 0  # so many nodes, the last ones, share the forward but are never verified
    forced: frozenset[int] = frozenset()  # nodes that a request's grammar put there
    trust: list[float] | None = None  # per node, from 0 to 1: the drafter's, once its parent stands; only `auto` asks
    by: list[str] | None = None  # per node, who guessed it, where a drafter asks others

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents) or not 0 <= self.riders <= len(self.tokens):
            raise ValueError(f"draft of {len(self.tokens)} tokens, {len(self.parents)} parents, {self.riders} riders")
        if self.parents and not (min(self.parents) >= -1 and all(map(lt, self.parents, range(len(self.parents))))):
            raise ValueError(f"draft parents must come before their children: {self.parents}")

    @staticmethod
    def chain(tokens: Iterable[int], trust: list[float] | None = None) -> Draft:
        """A tree without branches."""
        tokens = list(tokens)
        return Draft(tokens, list(range(-1, len(tokens) - 1)), trust=trust)

    @staticmethod
    def of_paths(paths: Iterable[Seq[int]], budget: int = 2**63) -> Draft:
        """A tree of token sequences, where the same prefix is the same node: the first `budget` nodes that are met."""
        tokens, parents, index = list[int](), list[int](), dict[tuple[int, int], int]()
        for path in paths:
            node = -1
            for token in path:
                parent, node = node, index.setdefault((node, token), len(tokens))
                if node == len(tokens):
                    if node >= budget:
                        return Draft(tokens, parents)
                    tokens.append(token)
                    parents.append(parent)
        return Draft(tokens, parents)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def verifiable(self) -> int:
        """How many nodes verification may accept."""
        return len(self.tokens) - self.riders

    @property
    def is_chain(self) -> bool:
        """Whether every node follows the one before it."""
        return [*self.parents] == [*range(-1, len(self.parents) - 1)]

    def depths(self) -> list[int]:
        """Per node, how many tokens after the sequence's last one it stands (1 = directly after)."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
        return depths

    def path_to(self, node: int) -> list[int]:
        """Nodes from the root's child down to `node`; empty for -1."""
        path: list[int] = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def words(self, node: int) -> tuple[int, ...]:
        """Tokens from the root's child down to `node`; empty for -1."""
        return tuple(self.tokens[i] for i in self.path_to(node))

    @staticmethod
    def merge(drafts: list[Draft], budget: int) -> tuple[Draft, list[list[int]]]:
        """One tree of several, where the same prefix is the same node; and per draft where its nodes went, -1 = cut.

        Depth by depth, at each depth the earlier drafts' nodes first, until there are `budget` that can be accepted.
        Riders come last, neither shared nor counted, each if its parent is there; those of a draft with which there
        would be more than MOST_NODES stay behind. A `q` outlives the merge only if the other drafts are empty: which
        nodes are shared depends on what was drawn. Without it all is exact.
        """
        alone = [draft for draft in drafts if draft.tokens]
        if len(alone) == 1 and alone[0].verifiable <= budget:
            return alone[0], [list(range(len(draft))) for draft in drafts]
        paths = [[draft.words(node) for node in range(draft.verifiable)] for draft in drafts]
        merged = Draft.of_paths(sorted(itertools.chain(*paths), key=len), budget)
        index = {merged.words(node): node for node in range(len(merged))}
        where = [[index.get(p, -1) for p in own] + [-1] * d.riders for own, d in zip(paths, drafts, strict=True)]
        riders, room = list[tuple[int, int, int]](), MOST_NODES
        for i, d in enumerate(drafts):
            if d.riders <= room:
                room -= d.riders
                riders += [(at, i, n) for n, at in enumerate(d.depths()) if n >= d.verifiable]
        for _, i, n in sorted(riders):
            parent = drafts[i].parents[n]
            root = where[i][parent] if parent >= 0 else -1
            if parent < 0 or root >= 0:
                where[i][n] = len(merged)
                merged.tokens.append(drafts[i].tokens[n])
                merged.parents.append(root)
                merged.riders += 1
        return merged, where

    def clip(self, depth: int, vocab: int = 2**63, nodes: int | None = None) -> Draft:
        """Without nodes deeper than `depth` tokens after the sequence, with a token that is not below `vocab`, or
        verifiable beyond the first `nodes`; and without what hangs on them. If a rider goes, all do."""
        tokens, most = self.tokens, self.verifiable if nodes is None else min(nodes, self.verifiable)
        whole = most == self.verifiable and len(tokens) <= depth
        if whole and (not tokens or 0 <= min(tokens) <= max(tokens) < vocab):
            return self
        depths: list[float] = []
        for i, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            below = depths[parent] if parent >= 0 else 0
            depths.append(1 + below if 0 <= token < vocab and not most <= i < self.verifiable else math.inf)
        if max(depths, default=0) <= depth:
            return self
        riders = self.riders if max(depths[self.verifiable :], default=0) <= depth else 0
        kept = [i for i, d in enumerate(depths[: self.verifiable + riders]) if d <= depth]
        index = {node: i for i, node in enumerate(kept)} | {-1: -1}
        return Draft(
            [self.tokens[i] for i in kept],
            [index[self.parents[i]] for i in kept],
            None if self.q is None else self.q[kept],
            riders,
            frozenset(index[i] for i in self.forced & index.keys()),
            None if self.trust is None else [self.trust[i] for i in kept],
            None if self.by is None else [self.by[i] for i in kept],
        )

    def without_riders(self) -> Draft:
        """The nodes that verification may accept."""
        n, q = self.verifiable, None if self.q is None else self.q[: self.verifiable]
        trust, by = self.trust and self.trust[:n], self.by and self.by[:n]
        return Draft(self.tokens[:n], self.parents[:n], q, forced=self.forced, trust=trust, by=by)


@dataclass
class Verdict:
    """What verification made of one draft: the accepted nodes, and the tokens to emit (theirs and one more).

    With an `error` there are none, and never will be: no token can be chosen, and that sequence ends here.
    """

    path: list[int]
    tokens: list[int]
    drafted: int = 0  # nodes that could have been accepted
    forced: frozenset[int] = frozenset()  # nodes that the request's grammar put into the draft
    by: tuple[str, ...] | None = None  # per node, who guessed it, where the drafter asked others
    logprobs: list[Logprob] = field(default_factory=list)  # per emitted token, if the request asks
    error: OutriderError | None = None

    def copy(self) -> Verdict:
        """One of its own lists."""
        path, tokens, logprobs = self.path.copy(), self.tokens.copy(), self.logprobs.copy()
        return Verdict(path, tokens, self.drafted, self.forced, self.by, logprobs, self.error)
