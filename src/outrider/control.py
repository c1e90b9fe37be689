"""How many nodes to draft, from what a forward costs and what has been accepted; none is always an answer.

A step with k draft nodes per sequence emits E(k) = 1 + p * sum_j a_1 ... a_j tokens in T(k) = D(k) + F(rows) seconds.
Here p is how often the drafter finds anything, a_j how often its j-th token is accepted once the ones before were, D
the time to draft and F the time of the target's forward over so many rows. All are measured while serving, discounted
so that they follow the text and the context's length. The controller takes the k with the highest E(k) / T(k). (Goodput
control as in TurboSpec, 2406.14066, with the context's cost in F because F is measured.)
"""

from __future__ import annotations

from dataclasses import dataclass, field

CHOICES = (0, 1, 2, 3, 4, 6, 8, 12, 16)
WARM_UP = (4, 0, 8, 0)  # first steps: two points of every curve, before any is judged
PROBE_EVERY, PROBE = 48, 3  # while nothing pays, look again now and then, ever more rarely, for as long as it goes well
RAREST = 16 * PROBE_EVERY
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
    idle: int = 0  # steps since anything was drafted
    patience: int = PROBE_EVERY
    promising: bool = False  # the last step's draft paid

    def plan(self, seqs: int) -> int:
        """Nodes per sequence for the next step of so many sequences."""
        if self.steps < len(WARM_UP):
            return min(WARM_UP[self.steps], self.limit)
        choices = [k for k in CHOICES if k <= self.limit]
        best = max(choices, key=lambda k: self._rate(k, seqs))
        if best:
            self.patience = PROBE_EVERY
        elif self.promising or self.idle >= self.patience:
            self.patience = min(2 * self.patience, RAREST)
            return min(PROBE, self.limit)
        return best

    def learn(
        self, k: int, rows: int, drafted: list[int], accepted: list[int], draft_seconds: float, target_seconds: float
    ) -> None:
        """One step: what was planned, the forward's rows, per sequence drafted and accepted tokens, the seconds."""
        self.steps += 1
        self.idle = 0 if k else self.idle + 1
        n, old = len(drafted), self.forward.get(rows)
        self.forward[rows] = target_seconds if old is None else 0.8 * old + 0.2 * target_seconds
        self.promising = k > 0 and (n + sum(accepted)) * self._forward(n) > n * (draft_seconds + target_seconds)
        if not k:
            return
        if all(drafted):
            self.beyond = 0.8 * self.beyond + 0.2 * (rows / n - 1 - k) if self.steps > 1 else rows / n - 1 - k
        each = draft_seconds / (k * n)
        self.draft = each if self.draft == 0 else 0.9 * self.draft + 0.1 * each
        self.found = [MEMORY * x for x in self.found]
        self.found[0] += sum(d > 0 for d in drafted) / n
        self.found[1] += 1
        while len(self.tried) < max(drafted):
            self.tried.append(0.0)
            self.taken.append(0.0)
        for depth in range(max(drafted, default=0)):
            reached = sum(d > depth and a >= depth for d, a in zip(drafted, accepted, strict=True))
            if reached:
                passed = sum(a > depth for a in accepted)
                self.tried[depth] = MEMORY * self.tried[depth] + reached / n
                self.taken[depth] = MEMORY * self.taken[depth] + passed / n

    def _rate(self, k: int, seqs: int) -> float:
        """Tokens per second and sequence that k nodes promise."""
        often = self.found[0] / self.found[1]
        plain, full = self._forward(seqs), self._forward(round(seqs * max(1.0, 1 + k + self.beyond)) if k else seqs)
        gain, chance = 0.0, 1.0
        for depth in range(k):
            known = depth < len(self.tried)
            tried, taken = (self.tried[depth], self.taken[depth]) if known else (0.0, 0.0)
            below = self._acceptance(depth - 1) if depth else PRIOR  # deeper is believed to be like what is above
            chance *= (taken + PRIOR_WEIGHT * below) / (tried + PRIOR_WEIGHT)
            gain += chance
        seconds = plain + often * (full - plain) + self.draft * k * seqs
        return (1 + often * gain) / seconds

    def _acceptance(self, depth: int) -> float:
        if depth >= len(self.tried) or not self.tried[depth]:
            return self._acceptance(depth - 1) if depth > 0 else PRIOR
        return self.taken[depth] / self.tried[depth]

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
