"""Drafts that grow where they are likely (EAGLE-2, 2406.16858), for heads that guess from a state and a token.

Every step puts the `width` best candidates behind each node of the last, and goes on from those that are among the
`num_speculative_tokens` likeliest of all; a node's likelihood is the product of its path's. `width` 1 is a chain.
Candidates are ranked by logits as the request's parameters shape them, with the noise of their place if it samples.

And `LastState`, the memory of heads that need no more of a text than the state that chose its last token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from outrider.config import option
from outrider.draft import Draft, Verdict
from outrider.errors import ConfigError
from outrider.runner import Output
from outrider.sampling import Row, guess
from outrider.sequence import Sequence
from outrider.speculate import Drafter

Root = tuple[Tensor, Tensor]  # the state (1, hidden) behind a text, and its logits (1, draft vocabulary)


class LastState(Drafter):
    """A drafter that goes on from the target's final hidden state which chose a sequence's last token."""

    @cached_property  # the __init__ of dataclasses calls no other
    def seen(self) -> dict[int, tuple[int, int, Tensor, int]]:
        """By sequence its length, its last token, states (rows, hidden), and the row that chose that token."""
        return {}

    def last(self, seq: Sequence) -> tuple[Tensor, int] | None:
        """That state (hidden,), and the token; None where it was not seen."""
        seen = self.seen.get(seq.id)
        if seen is None or seen[:2] != (len(seq.tokens), seq.tokens[-1]):
            return None
        return seen[2][seen[3]], seen[1]

    def known(self, seqs: list[Sequence]) -> dict[int, tuple[Tensor, int]]:
        """By id what `last` says of each, where it was seen."""
        return {seq.id: last for seq in seqs if (last := self.last(seq))}

    def observe(self, seqs: list[Sequence], verdicts: list[Verdict], output: Output) -> None:
        """Keep the states."""
        for seq, verdict, first in zip(seqs, verdicts, output.starts, strict=True):
            row = first + (1 + verdict.path[-1] if verdict.path else 0)
            self.seen[seq.id] = len(seq.tokens), seq.tokens[-1], output.states, row

    def forget(self, seq: Sequence) -> None:
        """Drop the sequence's."""
        self.seen.pop(seq.id, None)


@dataclass
class Tree:
    """A draft that grows. Node i is `tokens[i]` behind node `parents[i]`, as likely as exp(`scores[i]`)."""

    seq: Sequence
    root: Tensor
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    paths: list[list[int]] = field(default_factory=list)
    states: dict[int, Tensor] = field(default_factory=dict)  # of the nodes that were gone on from, after them
    border: list[int] = field(default_factory=lambda: [-1])  # nodes to go on from
    laid: list[int] = field(default_factory=list)  # nodes whose keys lie behind the text's

    def path(self, node: int) -> list[int]:
        """Nodes down to this one."""
        return self.paths[node] if node >= 0 else []

    def state(self, node: int) -> Tensor:
        """(1, hidden) of what goes on behind a node."""
        return self.states[node] if node >= 0 else self.root

    def best(self, k: int) -> list[int]:
        """The k likeliest nodes; a node is no likelier than its parent, which stands before it."""
        return sorted(range(len(self.tokens)), key=lambda i: (-self.scores[i], i))[:k]

    def draft(self, k: int) -> Draft:
        """Of the k likeliest; the likeliest child first, so that tokens accepted there lie as in plain decoding."""
        ranks = {node: rank for rank, node in enumerate(self.best(k))}
        order = sorted(ranks, key=lambda node: [ranks[above] for above in self.path(node)])
        at = {node: i for i, node in enumerate(order)} | {-1: -1}
        above = [self.scores[self.parents[i]] if self.parents[i] >= 0 else 0.0 for i in order]
        trust = [min(1.0, math.exp(self.scores[i] - before)) for i, before in zip(order, above, strict=True)]
        return Draft([self.tokens[i] for i in order], [at[self.parents[i]] for i in order], trust=trust)


@dataclass
class Growing(Drafter):
    """A drafter whose trees grow. It gives the roots, goes on from a border, and has the target's ids of its words."""

    num_speculative_tokens: int = option(8, "nodes of the tree")
    model: str = option("", "required: the head; a folder, hub id or embedded name")
    width: int = option(4, "candidates behind each node; 1: a chain")
    depth: int = option(4, "of the tree, at most; the head runs once for each")
    p_min: float = option(0.0, "no guess that is less likely, by the head's own account")

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError(f"method {self.name} needs a 'model', its head, such as {{..., 'model': 'folder'}}")
        if self.width < 1 or self.depth < 1 or not 0 <= self.p_min < 1:
            raise ConfigError(
                f"method {self.name}: width and depth are at least 1, p_min is from 0 to below 1; "
                f"not {self.width}, {self.depth}, {self.p_min}"
            )
        self.least = math.log(self.p_min) if self.p_min else -math.inf
        self.words = torch.empty(0, dtype=torch.long)  # of the draft vocabulary, the target's ids
        self.vocab = 0  # of the target

    def roots(self, seqs: list[Sequence]) -> dict[int, Root]:
        """By sequence what it draws on behind its last token; none of those whose states were not seen."""
        raise NotImplementedError

    def go_on(self, trees: list[Tree]) -> tuple[list[tuple[Tree, int]], Tensor]:
        """Read the trees' border, whose states they get: its nodes, and their logits (nodes, draft vocabulary)."""
        raise NotImplementedError

    def propose(self, seqs: list[Sequence], k: int) -> list[Draft]:
        """A tree of at most k nodes per sequence; none if the target's hidden states are not there yet."""
        if k < 1:
            return [Draft() for _ in seqs]
        with torch.inference_mode():
            roots = self.roots(seqs)
            trees = {seq.id: Tree(seq, roots[seq.id][0]) for seq in seqs if seq.id in roots}
            growing = list(trees.values())
            for depth in range(1, min(k, self.depth) + 1):
                growing = [tree for tree in growing if tree.border and tree.seq.room > depth]
                if not growing:
                    break
                if depth > 1:
                    places, logits = self.go_on(growing)
                else:
                    places, logits = [(tree, -1) for tree in growing], torch.cat([roots[t.seq.id][1] for t in growing])
                self._branch(places, logits, k)
        return [trees[seq.id].draft(k) if seq.id in trees else Draft() for seq in seqs]

    def _branch(self, places: list[tuple[Tree, int]], logits: Tensor, k: int) -> None:
        """Put candidates behind nodes of trees, by their logits; those among a tree's k likeliest are its border."""
        rows = [Row(tree.seq, [tree.tokens[above] for above in tree.path(node)]) for tree, node in places]
        found = guess(logits, rows, self.words, self.vocab, self.width)
        fresh = {id(tree): (tree, len(tree.tokens)) for tree, _ in places}
        for (tree, node), (ids, chance) in zip(places, found, strict=True):
            for token, own in zip(ids, chance, strict=True):
                score = own + (tree.scores[node] if node >= 0 else 0.0)
                if score > self.least and math.isfinite(score):
                    tree.tokens.append(token)
                    tree.parents.append(node)
                    tree.scores.append(score)
                    tree.paths.append([*tree.path(node), len(tree.paths)])
        for tree, first in fresh.values():
            tree.border = [node for node in tree.best(k) if node >= first]
