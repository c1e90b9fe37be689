"""What a step costs and what a guess is worth, as measured: rows are given to the guesses that pay for them.

A step over n sequences emits n tokens and those of its drafts that are accepted, in the time to draft and the time T of
a forward over so many rows and so long texts. A node of a draft adds a row to the forward, and to the tokens the
probability that it and all before it are accepted. `pick` takes the likeliest nodes of all sequences, as many as make
tokens per second the most. (Goodput as in TurboSpec, 2406.14066, greedily over survival probabilities as in DSpark;
Law 1 lets the choice look at everything.)

Both sides are measured while serving. `Costs` are T; they outlive the process in a file of the cache folder. `Beliefs`
are how often guesses come true, by who guessed, how sure and how deep, of all requests and of each one. Whatever they
say, drafting may lose little: every sequence has an `Account` of what drafts brought and cost it, in plain steps, and
while it is overdrawn it is not drafted for; sources that run a model have another one.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from bisect import bisect
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from outrider.config import real
from outrider.errors import OutriderError
from outrider.files import write_text

Array = np.ndarray[Any, np.dtype[np.float64]]
log = logging.getLogger(__name__)

UNSEEN = 0.03  # of the least forward known: what a row may cost while no two counts were measured
FRESH = 8  # forwards after which what they taught is looked at again
MARGIN = 1.01  # a draft is worth it if it promises this much more than none
ALLOWANCE, START = 0.01, 2.0  # plain steps: for each token that may come, at most
TOP_UP, CREDIT, DEBT = 0.005, 32.0, 6.0  # for each step; at most; owed at most
DOUBT = 0.5  # of a guess's worth, while the account is overdrawn by no more than it began with
TRUSTS = (0.05, 0.12, 0.25, 0.4, 0.55, 0.7, 0.8, 0.88, 0.94, 0.97)  # between the levels of trust
DEPTHS = (2,)
MEMORY, OWN_MEMORY = 0.995, 0.97  # weight of the past, of all requests and of one, per guess of a kind
PRIOR_WEIGHT, OWN_WEIGHT = 2.0, 8.0  # guesses that the prior, and all requests against one, count for
KEPT = 64  # machines and models whose costs are kept in the file


class Curve(dict[int, float]):
    """Seconds over a count, as measured: a moving average per count that was seen, and lines between them."""

    def add(self, count: int, seconds: float) -> None:
        """One measurement. A hiccup is not the cost; what is fewer costs no more; what slows one slows all."""
        old = self.get(count) or (min(seconds, 4 * self.at(count)) if self else seconds)
        change = min(seconds, 2 * old) / old - 1
        drift, own = 1 + 0.1 * change, old * (1 + 0.2 * change)
        for other, known in self.items():
            self[other] = known * drift if other > count else min(known * drift, own)
        self[count] = own

    def at(self, count: int) -> float:
        """Seconds of one count."""
        return float(self.over(np.array([count]))[0])

    def over(self, counts: np.ndarray[Any, Any]) -> Array:
        """Seconds of many; beyond the last that was measured with the slope at its end."""
        known = sorted(self)
        seconds = [*accumulate((self[n] for n in known), max)]
        slope = UNSEEN * seconds[0] / known[0]
        if len(known) > 1:
            slope = (seconds[-1] - seconds[-2]) / (known[-1] - known[-2])
        if len(counts) == 1:  # the case of a step's own costs
            i = bisect(known, at := counts[0])
            if i == len(known):
                return np.array([seconds[-1] + slope * (at - known[-1])])
            share = (at - known[i - 1]) / (known[i] - known[i - 1]) if i else 0.0
            return np.array([seconds[max(0, i - 1)] + share * (seconds[i] - seconds[max(0, i - 1)])])
        found: Array = np.interp(counts, known, seconds)
        found += slope * np.maximum(0, counts - known[-1])
        return found


class Costs:
    """Seconds of a forward over rows and keys (the lengths of its sequences, added up); `file` keeps them."""

    def __init__(self, file: Path | None = None, name: str = "") -> None:
        self.file, self.name, self.saved = file, name, -math.inf
        self.curves = _read(file).get(name, {}) if file else {}  # by octave of the keys
        self.ratios: list[float] | None = [] if self.curves else None  # of now to then
        self.squares, self.products, self.mixed = np.zeros((3, 3)), np.zeros(3), 0
        self.ladders, self.added = dict[tuple[int, int, int], list[float]](), 0  # what `ladder` said, for a while

    def __bool__(self) -> bool:
        return (bool(self.curves) and self.ratios is None) or self.mixed >= 8

    def add(self, rows: int, keys: int, seconds: float, read: int = 0) -> None:
        """One forward, in which prompts may have been read as well.

        What the file says is another day's: the first three tell how much faster or slower this is. With prompts the
        rows' own share is what least squares make of it, which serves until a forward without any was measured.
        """
        self.added += 1
        if self.added < 4 * FRESH or self.added % FRESH == 0:
            self.ladders.clear()
        if read:
            x = np.array([1.0, rows, read])
            self.squares, self.products = MEMORY * self.squares + np.outer(x, x), MEMORY * self.products + x * seconds
            self.mixed += 1
            return
        if self.ratios is not None:
            self.ratios.append(seconds / self.at(rows, keys))
            if len(self.ratios) < 3:
                return
            factor, self.ratios = sorted(self.ratios)[1], None
            self.curves = {o: Curve({n: s * factor for n, s in c.items()}) for o, c in self.curves.items()}
        self.curves.setdefault(_octave(keys), Curve()).add(_knot(rows), seconds)

    def over(self, first: int, last: int, keys: int) -> Array:
        """Seconds of `first` rows to `last`; infinite where far more rows than were ever measured.

        Lengths that were not met yet have the nearest ones' curve, moved to what is known.
        """
        counts, octave = np.arange(first, last + 1), _octave(keys)
        if not self.curves:
            base, row, _ = np.linalg.lstsq(self.squares, self.products, rcond=1e-9)[0]
            least = self.products[0] / self.squares[0, 0] / 100
            return np.asarray(np.maximum(least, base) + max(0.0, row) * counts)
        own, curve, factor = self.curves.get(octave), self._nearest(octave), 1.0
        if own and own is not curve:
            ((rows, spent),) = own.items()
            factor = spent / curve.at(rows)
        known = max(max(curve), *(own or [0]))
        return np.where(counts <= 2 * known + 2, factor * curve.over(counts), np.inf)

    def _nearest(self, octave: int) -> Curve:
        """The curve of these lengths, or of the nearest ones, if it has more than one point."""
        better = [o for o in self.curves if len(self.curves[o]) > 1] or [*self.curves]
        return self.curves[min(better, key=lambda o: abs(o - octave))]

    def ladder(self, rows: int, more: int, keys: int) -> list[float]:
        """Seconds of so many rows, of one more and so on to `more`, as far as they pay if every guess is right.

        Empty if so few rows were never measured: what more of them cost cannot be said then.
        """
        asked = rows, more, _octave(keys)
        if asked not in self.ladders:
            seconds, known = np.empty(0), not self.curves or min(self._nearest(asked[2])) <= _knot(rows)
            if self and known:
                seconds = self.over(rows, rows + more, keys)
                rates = (rows + np.arange(len(seconds))) / seconds
                seconds = seconds[: int(np.flatnonzero(rates >= rates[0])[-1]) + 1]
            self.ladders[asked] = seconds.tolist()
        return self.ladders[asked]

    def at(self, rows: int, keys: int) -> float:
        """Seconds of one forward."""
        return float(self.over(rows, rows, keys)[0])

    def save(self) -> None:
        """Keep them, now and then. A file that cannot be written is no error: the next run measures anew."""
        if self.file is None or not self or time.monotonic() - self.saved < 10:
            return
        self.saved = time.monotonic()
        with suppress(OutriderError, OSError, ValueError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            kept = _read(self.file)
            kept.pop(self.name, None)
            kept = dict([*kept.items()][1 - KEPT :]) | {self.name: self.curves}
            write_text(self.file, json.dumps(kept))


def cache_file() -> Path | None:
    """Where costs are kept: `OUTRIDER_CACHE`, or the user's cache folder; None if `OUTRIDER_CACHE` is empty."""
    folder = os.environ.get("OUTRIDER_CACHE")
    if folder == "":
        return None
    with suppress(RuntimeError):  # no home
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider"
        return (Path(folder) if folder else home) / "costs.json"
    return None


def _read(file: Path) -> dict[str, dict[int, Curve]]:
    """What a file of costs holds; nothing if it is not there, and without what is damaged."""
    try:
        data = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    found: dict[str, dict[int, Curve]] = {}
    for name, curves in data.items() if isinstance(data, Mapping) else ():
        with suppress(ValueError, TypeError, AttributeError):
            made = {int(o): Curve({int(n): s for n, s in points.items()}) for o, points in curves.items()}
            sound = all(n > 0 and real(s, 1e-9, 1e6) for points in made.values() for n, s in points.items())
            if made and sound and all(made.values()):
                found[name] = made
    return found


def _octave(keys: int) -> int:
    return max(0, (keys - 1) // 512).bit_length()


def _knot(rows: int) -> int:
    """Large counts stand for those near them."""
    return rows if rows <= 16 else round(2 ** (round(4 * math.log2(rows)) / 4))


Kind = tuple[int, int, int, int]  # who guessed it (bits), who guessed otherwise, how sure, how deep


def kind(who: int, otherwise: int, trust: float | None, depth: int) -> Kind:
    """What a guess is counted as. `trust` None: whatever they guessed at this depth."""
    return who, otherwise, -1 if trust is None else bisect(TRUSTS, trust), bisect(DEPTHS, depth)


class Beliefs:
    """How often guesses of a kind come true once those before them have: of all requests, and of each sequence."""

    def __init__(self) -> None:
        self.all: dict[Kind, tuple[float, float]] = {}  # right, made
        self.own: dict[int, dict[Kind, tuple[float, float]]] = {}

    def learn(self, seq: int, what: Kind, right: bool) -> None:
        """One guess was judged."""
        for counts, memory in ((self.all, MEMORY), (self.own.setdefault(seq, {}), OWN_MEMORY)):
            hits, made = counts.get(what, (0.0, 0.0))
            counts[what] = memory * hits + right, memory * made + 1

    def of(self, seq: int, what: Kind, prior: float) -> float:
        """The probability that such a guess for this sequence is right; `prior` while nothing is known."""
        hits, made = self.all.get(what, (0.0, 0.0))
        general = (hits + PRIOR_WEIGHT * prior) / (made + PRIOR_WEIGHT)
        hits, made = self.own.get(seq, {}).get(what, (0.0, 0.0))
        return (hits + OWN_WEIGHT * general) / (made + OWN_WEIGHT)


@dataclass
class Account:
    """What drafts brought a sequence less what they cost it, in plain steps, with a small allowance."""

    room: int  # tokens that the sequence may yet have
    credit: float = 0.0

    def __post_init__(self) -> None:
        self.credit = self.start = min(START, ALLOWANCE * self.room)

    @property
    def covers(self) -> float:
        """What share of a guess's worth may be spent on it: all, or less if it is overdrawn, or nothing."""
        return 1.0 if self.credit >= 0 else DOUBT if self.credit >= -self.start else 0.0

    def enter(self, brought: float, cost: float) -> None:
        """One step. What is owed beyond DEBT is let off: it was bad luck, or the machine did something else."""
        self.credit = min(CREDIT, max(-DEBT, self.credit + brought - cost))


@dataclass
class Bush:
    """All guesses for one sequence in one trie; parents come before their children."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)  # 1 = directly behind the sequence
    who: list[int] = field(default_factory=list)  # the sources that guess it: bits
    trust: list[float] = field(default_factory=list)  # of the first of them
    index: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, source: int, parent: int, token: int, trust: float) -> int:
        """Enter one guess of a source (a bit) behind a node (-1: the sequence); returns its node."""
        node = self.index.setdefault((parent, token), len(self.tokens))
        if node == len(self.tokens):
            self.tokens.append(token)
            self.parents.append(parent)
            self.depths.append(1 + self.depths[parent] if parent >= 0 else 1)
            self.who.append(source)
            self.trust.append(trust)
        else:
            self.who[node] |= source
        return node

    def kinds(self) -> list[Kind]:
        """What each node is counted as: a guess that a source shares is worth more, one that it contradicts less."""
        guessing: dict[int, int] = {}
        for parent, who in zip(self.parents, self.who, strict=True):
            guessing[parent] = guessing.get(parent, 0) | who
        return [
            kind(who, guessing[parent] & ~who, trust, depth)
            for parent, who, trust, depth in zip(self.parents, self.who, self.trust, self.depths, strict=True)
        ]


def pick(
    chances: list[list[float]], bushes: list[Bush], seconds: Seq[float], drafted: float, k: int, chains: bool = False
) -> tuple[list[list[int]], float]:
    """Per sequence the nodes to verify, at most k, the likeliest first; and tokens per second expected with them.

    chances: per sequence and node, of surviving.  seconds: of the forward with no node, one, and so on.  drafted:
    seconds spent.  chains: one child behind each node at most.
    """
    n, room, chosen = len(bushes), [k] * len(bushes), list[tuple[int, int]]()
    taken: list[set[int]] = [{-1} for _ in bushes]
    parents: list[set[int]] = [set() for _ in bushes]
    expected, best, many = float(n), n / (seconds[0] + drafted) * MARGIN, 0
    for negative, i, node in sorted([(-p, i, node) for i, own in enumerate(chances) for node, p in enumerate(own)]):
        if len(chosen) + 1 >= len(seconds):
            break
        parent = bushes[i].parents[node]
        if not room[i] or parent not in taken[i] or (chains and parent in parents[i]):
            continue
        room[i] -= 1
        parents[i].add(parent)
        taken[i].add(node)
        chosen.append((i, node))
        expected -= negative
        if (rate := expected / (seconds[len(chosen)] + drafted)) > best:
            best, many = rate, len(chosen)
    nodes: list[list[int]] = [[] for _ in bushes]
    for i, node in chosen[:many]:
        nodes[i].append(node)
    return nodes, best if many else n / (seconds[0] + drafted)
