"""How many nodes to draft, from what a forward costs and what has been accepted; none is always an answer.

A step with k draft nodes per sequence emits E(k) = 1 + p * G(k) tokens in T(k) = D(k) + F(rows) seconds. Here p is how
often the drafter finds anything, G what is then accepted, D the time to draft and F the time of the target's forward
over so many rows. Of a chain, G(k) = sum_j a_1 ... a_j, a_j being how often its j-th token is accepted once the ones
before were; of a tree, G is the mean of what k nodes gave, and for sizes not tried yet lies on a curve through those.
All are measured while serving, discounted so that they follow the text and the context's length. The controller takes
the k with the highest E(k) / T(k). (Goodput control as in TurboSpec, 2406.14066, with the context's cost in F because F
is measured.)

However wrong that estimate is, drafting may lose little: what steps with a draft lost against plain ones is kept as an
account, which every step tops up by a small share of its cost, and while it is overdrawn nothing is drafted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from outrider.draft import Verdict

CHOICES = (1, 2, 3, 4, 6, 8, 12, 16)
WARM_UP = (3, 0, 1, 0)  # first steps: two points of every curve, before any is judged
PROBES = (3, 1)  # nodes to look again with, where nothing seems to pay
SHARE = 0.005  # of the time may go into drafts that do not pay
CREDIT = 32.0  # plain steps that the account holds at most: bad luck after good need not end the drafting
DEBT = 1.0  # plain steps that it owes at most
MEMORY = 0.97  # weight of the past, per step
PRIOR, PRIOR_WEIGHT = 0.6, 1.0  # a drafter is believed in until it disappoints
BUSH = 0.35  # k nodes of a tree give about k ** BUSH times what one gives


class Curve(dict[int, float]):
    """Seconds over a count, as measured: a moving average per count that was seen, and lines between them."""

    def add(self, count: int, seconds: float) -> None:
        """One measurement. A hiccup is not the cost; nor does one last: what is fewer costs no more."""
        old = self.get(count, min(seconds, 1.5 * self.at(count)) if self else seconds)
        self[count] = old + 0.2 * (min(seconds, 2 * old) - old)
        for fewer in self:
            if fewer < count:
                self[fewer] = min(self[fewer], self[count])

    def at(self, count: int) -> float:
        """Measured, or on the line through the nearest that were, with the slope at the end of it beyond.

        Where only one was measured, more costs in proportion: many are not drafted on the word of a few.
        """
        if count in self:
            return self[count]
        known = sorted(self)
        below, above = (
            ([n for n in known if n < count] or known[:1])[-1],
            ([n for n in known if n > count] or known[-1:])[0],
        )
        if below == above and len(known) > 1:
            below, above = (known[-2], known[-1]) if count > known[-1] else (known[0], known[1])
        if below == above:
            return self[below] * max(1.0, count / below)
        slope = max(0.0, (self[above] - self[below]) / (above - below))
        return max(1e-9, self[below] + slope * (count - below))


@dataclass
class Controller:
    """Chooses k for each step; `learn` tells it how the step went. One per engine: one drafter on one target."""

    limit: int = CHOICES[-1]
    forward: Curve = field(default_factory=Curve)  # over rows
    draft: Curve = field(default_factory=Curve)  # per sequence, over k
    beyond: float = 0.0  # rows per drafted sequence beyond 1 + k: riders, or less where a drafter knows fewer
    found: list[float] = field(default_factory=lambda: [PRIOR_WEIGHT, PRIOR_WEIGHT])  # [with a draft, asked]
    tried: list[float] = field(default_factory=list)  # per depth of a chain
    taken: list[float] = field(default_factory=list)
    sizes: dict[int, tuple[float, float]] = field(default_factory=dict)  # k -> drafts, tokens accepted of them
    trees: bool = False  # whether any draft had branches
    steps: int = 0
    credit: float = 3.0  # plain steps

    def plan(self, seqs: int) -> int:
        """Nodes per sequence for the next step of so many sequences."""
        if self.steps < len(WARM_UP):
            return min(WARM_UP[self.steps], self.limit)
        return 0 if self.credit < 0 else self._best(seqs) or min(PROBES[self.steps % len(PROBES)], self.limit)

    def learn(self, k: int, verdicts: list[Verdict], rows: int, draft_seconds: float, target_seconds: float) -> None:
        """One step: what was planned, what became of each sequence's draft, the forward's rows, the seconds."""
        self.steps += 1
        n, drafted, accepted = len(verdicts), [v.drafted for v in verdicts], [len(v.path) for v in verdicts]
        self.forward.add(rows, target_seconds)
        if not k:
            self.credit = min(CREDIT, self.credit + SHARE)
            return
        if self.steps == 1:  # in which the drafter read the prompt
            return
        self.draft.add(k, draft_seconds / n)
        cost = (self.forward[rows] + self.draft[k] * n) / self.forward.at(n)  # in plain steps
        self.credit += SHARE * cost + 1 + sum(accepted) / n - cost
        self.credit = min(CREDIT, max(-DEBT, self.credit))
        some = sum(d > 0 for d in drafted) / n
        self.found = [MEMORY * self.found[0] + some, MEMORY * self.found[1] + 1]
        if all(drafted):
            beyond = rows / n - 1 - k
            self.beyond = 0.8 * self.beyond + 0.2 * beyond if self.steps > 1 else beyond
        self.trees = self.trees or not all(v.chain for v in verdicts)
        self.sizes.setdefault(k, (0.0, 0.0))
        for size, (drafts, taken) in self.sizes.items():
            now = (some, sum(accepted) / n) if size == k else (0.0, 0.0)
            self.sizes[size] = MEMORY * drafts + now[0], MEMORY * taken + now[1]
        while len(self.tried) < max(drafted):
            self.tried.append(0.0)
            self.taken.append(0.0)
        for depth in range(min(max(drafted), 1 + max(accepted))):  # deeper ones were not reached
            reached = sum(d > depth and a >= depth for d, a in zip(drafted, accepted, strict=True))
            if reached:
                passed = sum(a > depth for a in accepted)
                self.tried[depth] = MEMORY * self.tried[depth] + reached / n
                self.taken[depth] = MEMORY * self.taken[depth] + passed / n

    def _best(self, seqs: int) -> int:
        """The k that promises most tokens per second; 0 if none promises more than plain decoding."""
        often, plain = self.found[0] / self.found[1], self.forward.at(seqs)
        best, most = 0, 1 / plain
        for k in CHOICES:
            if k <= self.limit:
                gain = self._tree_gain(k) if self.trees else self._chain_gain(k)
                full = self.forward.at(round(seqs * max(1.0, 1 + k + self.beyond)))
                rate = (1 + often * gain) / (plain + often * (full - plain) + self.draft.at(k) * seqs)
                if rate > most:
                    best, most = k, rate
        return best

    def _chain_gain(self, k: int) -> float:
        """Tokens accepted of k, if anything is drafted."""
        gain, chance, accepted = 0.0, 1.0, PRIOR
        for depth in range(k):
            tried, taken = (self.tried[depth], self.taken[depth]) if depth < len(self.tried) else (0.0, 0.0)
            accepted = (taken + PRIOR_WEIGHT * accepted) / (tried + PRIOR_WEIGHT)  # deeper is believed to be alike
            chance *= accepted
            gain += chance
        return gain

    def _tree_gain(self, k: int) -> float:
        """The same, of a tree with k nodes."""
        shape = {size: math.pow(size, BUSH) for size in (*self.sizes, k)}
        single = sum(taken * shape[size] for size, (_, taken) in self.sizes.items())
        single /= sum(drafts * shape[size] ** 2 for size, (drafts, _) in self.sizes.items()) or 1.0
        drafts, taken = self.sizes.get(k, (0.0, 0.0))
        return (taken + PRIOR_WEIGHT * single * shape[k]) / (drafts + PRIOR_WEIGHT)
