"""How many nodes to draft, from what a forward costs and what has been accepted; none is always an answer.

A step with k draft nodes per sequence emits E(k) = 1 + p * sum_j a_1 ... a_j tokens in T(k) = D(k) + F(rows) seconds.
Here p is how often the drafter finds anything, a_j how often its j-th token is accepted once the ones before were, D
the time to draft and F the time of the target's forward over so many rows. All are measured while serving, discounted
so that they follow the text and the context's length. The controller takes the k with the highest E(k) / T(k). (Goodput
control as in TurboSpec, 2406.14066, with the context's cost in F because F is measured.)

However wrong that estimate is, drafting may lose little: what steps with a draft lost against plain ones is kept as an
account, which every step tops up by a small share of its cost, and while it is overdrawn nothing is drafted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

CHOICES = (1, 2, 3, 4, 6, 8, 12, 16)
WARM_UP = (4, 0, 8, 0)  # first steps: two points of every curve, before any is judged
PROBE = 3  # nodes to look again with, where nothing seems to pay
SHARE = 0.005  # of the time may go into drafts that do not pay
CREDIT = 4.0  # plain steps that the account holds, or owes, at most: bad luck after good need not end the drafting
MEMORY = 0.97  # weight of the past, per step
PRIOR, PRIOR_WEIGHT = 0.6, 1.0  # a drafter is believed in until it disappoints


@dataclass
class Controller:
    """Chooses k for each step; `learn` tells it how the step went. One per engine: one drafter on one target."""

    limit: int = CHOICES[-1]
    forward: dict[int, float] = field(default_factory=dict)  # rows -> seconds, moving average
    beyond: float = 0.0  # rows per drafted sequence beyond 1 + k: riders, or less where a drafter knows fewer
    draft: float = 0.0  # seconds per node asked for
    found: list[float] = field(default_factory=lambda: [PRIOR_WEIGHT, PRIOR_WEIGHT])  # [with a draft, asked]
    tried: list[float] = field(default_factory=list)  # per depth
    taken: list[float] = field(default_factory=list)
    steps: int = 0
    credit: float = 1.0  # plain steps

    def plan(self, seqs: int) -> int:
        """Nodes per sequence for the next step of so many sequences."""
        if self.steps < len(WARM_UP):
            return min(WARM_UP[self.steps], self.limit)
        return 0 if self.credit < 0 else self._best(seqs) or min(PROBE, self.limit)

    def learn(
        self, k: int, rows: int, drafted: list[int], accepted: list[int], draft_seconds: float, target_seconds: float
    ) -> None:
        """One step: what was planned, the forward's rows, per sequence drafted and accepted tokens, the seconds."""
        self.steps += 1
        n, likely = len(drafted), self._forward(rows) if self.forward else target_seconds
        old = self.forward.get(rows, min(target_seconds, 1.5 * likely))
        self.forward[rows] = old + 0.2 * (min(target_seconds, 2 * old) - old)  # a hiccup is not the forward's cost
        for fewer in self.forward:  # nor may one last: fewer rows cost no more
            if fewer < rows:
                self.forward[fewer] = min(self.forward[fewer], self.forward[rows])
        if not k:
            self.credit = min(CREDIT, self.credit + SHARE)
            return
        if all(drafted):
            self.beyond = 0.8 * self.beyond + 0.2 * (rows / n - 1 - k) if self.steps > 1 else rows / n - 1 - k
        each = draft_seconds / (k * n)
        self.draft = each if self.draft == 0 else 0.9 * self.draft + 0.1 * min(each, 2 * self.draft)
        cost = (self.forward[rows] + self.draft * k * n) / self._forward(n)  # in plain steps
        self.credit += SHARE * cost + 1 + sum(accepted) / n - cost
        self.credit = min(CREDIT, max(-CREDIT, self.credit))
        self.found = [MEMORY * x for x in self.found]
        self.found[0] += sum(d > 0 for d in drafted) / n
        self.found[1] += 1
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
        often, plain = self.found[0] / self.found[1], self._forward(seqs)
        best, most = 0, 1 / plain
        gain, chance, accepted, depth = 0.0, 1.0, PRIOR, 0
        for k in CHOICES:
            if k > self.limit:
                break
            for at in range(depth, k):
                tried, taken = (self.tried[at], self.taken[at]) if at < len(self.tried) else (0.0, 0.0)
                accepted = (taken + PRIOR_WEIGHT * accepted) / (tried + PRIOR_WEIGHT)  # deeper is believed to be alike
                chance *= accepted
                gain += chance
            depth = k
            full = self._forward(round(seqs * max(1.0, 1 + k + self.beyond)))
            rate = (1 + often * gain) / (plain + often * (full - plain) + self.draft * k * seqs)
            if rate > most:
                best, most = k, rate
        return best

    def _forward(self, rows: int) -> float:
        """Seconds of a forward over so many rows: measured, or on the line through the nearest that were."""
        if rows in self.forward:
            return self.forward[rows]
        known = sorted(self.forward)
        below, above = (
            ([n for n in known if n < rows] or known[:1])[-1],
            ([n for n in known if n > rows] or known[-1:])[0],
        )
        if below == above and len(known) > 1:  # outside of what is known: the slope at the end of it
            below, above = (known[-2], known[-1]) if rows > known[-1] else (known[0], known[1])
        if below == above:
            return self.forward[below]
        slope = max(0.0, (self.forward[above] - self.forward[below]) / (above - below))
        return max(1e-9, self.forward[below] + slope * (rows - below))
