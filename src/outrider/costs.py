"""What a step costs, as measured while serving: seconds of forwards over their rows and the lengths of their texts.

They outlive the process in a file of the cache folder, and begin with forwards that are timed when a model is loaded.
"""

from __future__ import annotations

import json
import math
import os
import time
from bisect import bisect
from collections.abc import Mapping
from contextlib import suppress
from itertools import accumulate, pairwise
from operator import itemgetter
from pathlib import Path

import numpy as np

from outrider.config import real
from outrider.errors import OutriderError
from outrider.files import write_text

UNSEEN = 0.03  # of the least forward known: what a row may cost while no two counts were measured
PACE, NEAR, FAR = 0.5, 0.3, 0.4  # of a measurement that is all counts' affair; how far off it may be for that; its own
FADING, MOST_WEIGHT = 0.99, 32.0  # of a measurement with each that follows; of all of one count
BEGUN = 16.0  # measurements that a count is worth where a curve begins as another's copy
OWN_KEYS = 0.2  # of what a row and its keys take: what a further row takes (0.25 of one long text, 0 of many)
DOUBTED, SLOPE = 2.0, 0.2  # measurements that a promise counts for; promised, in forwards, beside one known count
EAGER, TOGETHER = 16, 32  # the first forwards teach one by one; later so many are looked at together
LOTS = 64  # more than there are octaves of keys
KEPT = 64  # machines and models whose costs are kept in the file
MEMORY = 0.995  # weight of the past, per forward with prompts


class Curve(dict[int, float]):
    """Seconds over a count, and lines between the counts that are known."""

    def at(self, count: int) -> float:
        """Seconds of one count."""
        return self.over(count, count)[0]

    def over(self, first: int, last: int) -> list[float]:
        """Seconds of `first` to `last`; beyond the last that is known with the slope at its end."""
        known, seconds = self._points()
        if len(known) > 1:
            slopes = [(b - a) / (n - m) for (m, n), (a, b) in zip(pairwise(known), pairwise(seconds), strict=True)]
        else:
            slopes = [UNSEEN * seconds[0] / known[0]]
        found, i = [seconds[0]] * (min(known[0], last + 1) - first), bisect(known, first) - 1
        for n in range(first + len(found), last + 1):  # without numpy: of few numbers, whose caches are cold
            while i + 1 < len(known) and known[i + 1] <= n:
                i += 1
            found.append(seconds[i] + slopes[min(i, len(slopes) - 1)] * (n - known[i]))
        return found

    def _points(self) -> tuple[list[int], list[float]]:
        """The counts that are known, and what they cost: none less than a smaller one."""
        known = sorted(self)
        return known, [*accumulate((self[n] for n in known), max)]


class Learnt(Curve):
    """A curve measured while others use the machine: a pace, and its shape.

    A machine that slows down slows all counts, so a measurement moves all of them at once, quickly, and its own count
    by what is left, slowly: a slow minute is not to make the counts that were used in it dear. Some measurements are
    several times too long, and a count that was once thought too dear is not measured again, so one moves little, and
    what was measured seldom, or long ago, counts less than what the counts beside it promise.
    """

    def __init__(self, known: Mapping[int, float] | None = None, weight: float = 1.0) -> None:
        super().__init__(known or {})
        self.weights = dict.fromkeys(self, weight)  # measurements, fading

    def add(self, count: int, seconds: float) -> None:
        """One measurement. What is fewer costs no more."""
        believed = self.get(count) or (self.at(count) if self else seconds)  # a doubt is no measurement
        for other in self.weights:
            self.weights[other] *= FADING
        weight = self.weights[count] = min(MOST_WEIGHT, self.weights.get(count, 0.0) + 1)
        off, most, share = math.log(seconds / believed), FAR if weight > 1 else 1.0, PACE * (1 - 1 / weight)
        pace = math.exp(share * max(-NEAR, min(NEAR, off)))
        own = believed * pace * math.exp((1 - share) * max(-most, min(most, off)) / weight)
        for other, known in self.items():
            self[other] = known * pace if other > count else min(known * pace, own)
        self[count] = own

    def times(self, factor: float) -> Learnt:
        """A copy, so much slower."""
        return Learnt({n: seconds * factor for n, seconds in self.items()}, BEGUN)

    def with_keys(self, seconds: float, rows: int, texts: int) -> Learnt:
        """A copy of longer texts, or of so many, whose keys add so many seconds where there are so many rows.

        Most of that is reading the keys, which further rows of a text share.
        """

        def share(rows: int) -> float:
            return 1 + OWN_KEYS * (rows / texts - 1)

        return Learnt({n: known + seconds * share(n) / share(rows) for n, known in self.items()}, BEGUN)

    def _points(self) -> tuple[list[int], list[float]]:
        known = sorted(self)
        seconds = [self[known[0]]]
        for i, n in enumerate(known[1:], 1):
            own, below = self[n], known[i - 1]
            a, b = (below, known[i + 1]) if i + 1 < len(known) else (known[0], below)
            slope = (self[b] - self[a]) / (b - a) if a < b else SLOPE * self[a] / a
            promised = self[below] + slope * (n - below)
            if i + 1 == len(known):  # of which a line knows little
                promised = min(own, promised)
            weight = self.weights[n]
            seconds.append(max(seconds[-1], (weight * own + DOUBTED * promised) / (weight + DOUBTED)))
        return known, seconds


class Costs:
    """Seconds of a forward over rows, keys (the lengths of its texts, added up) and texts; `file` keeps them."""

    def __init__(self, file: Path | None = None, name: str = "") -> None:
        self.file, self.name, self.saved = file, name, -math.inf
        self.curves = _read(file).get(name, {}) if file else {}  # by `_lot`
        # lots: after whose curve, whether their own of another day, and of the first: how much slower, rows, seconds
        self.begun = dict[int, tuple[Learnt | None, bool, list[tuple[float, int, float]]]]()
        self.squares, self.products, self.mixed = np.zeros((3, 3)), np.zeros(3), 0
        self.ladders, self.added = dict[tuple[int, int, int], list[float]](), 0  # what `ladder` said, for a while
        self.heard: list[tuple[int, int, float, int]] = []  # rows, lots, seconds, read; looked at when somebody asks

    def begin(self, seconds: Mapping[int, float]) -> None:
        """What forwards of so many rows, of one short text, took just now: the file may be of a slow day, or of other
        kernels. Of more rows, which were not measured, it gives the proportion."""
        old, new, last = self.curves.get(0), Learnt(seconds, BEGUN), max(seconds)
        if old:
            new |= {n: known * new[last] / old.at(last) for n, known in old.items() if n > last}
            new.weights = dict.fromkeys(new, BEGUN)
        self.curves[0] = new

    def __bool__(self) -> bool:
        self._learn()
        return bool(self.curves) or self.mixed >= 8

    def add(self, rows: int, keys: int, seconds: float, read: int = 0, texts: int = 1) -> None:
        """One forward, in which prompts may have been read as well.

        What the file says is another day's: the first three tell how much faster or slower this is. Lengths and numbers
        of texts that were not met yet have a short text's curve, and the first three tell what their keys add. With
        prompts the rows' own share is what least squares make of it, which serves until a forward without any was
        measured.
        """
        self.added += 1
        self.heard.append((rows, _lot(keys, texts), seconds, read))
        if self.added < EAGER or self.added % TOGETHER == 0:
            self.ladders.clear()
            self._learn()

    def _learn(self) -> None:
        heard, self.heard = self.heard, []
        alike: dict[tuple[int, int], list[tuple[int, int, float, int]]] = {}
        for one in heard:
            if one[3]:
                self._enter(*one)
            else:
                alike.setdefault((one[1], _knot(one[0])), []).append(one)
        for each in alike.values():  # one measurement, their median: to learn takes time, too
            self._enter(*sorted(each, key=itemgetter(2))[(len(each) - 1) // 2])

    def _enter(self, rows: int, lot: int, seconds: float, read: int) -> None:
        if read:
            x = np.array([1.0, rows, read])
            self.squares, self.products = MEMORY * self.squares + np.outer(x, x), MEMORY * self.products + x * seconds
            self.mixed += 1
            return
        count = _knot(rows)
        if lot not in self.begun:
            like = self.curves.get(lot) or (self._nearest(0) if self.curves else None)
            self.begun[lot] = like, lot in self.curves, []
        like, own, first = self.begun[lot]
        if like and len(first) < 3:
            first.append((seconds / like.at(count), count, seconds))
            slower, rows, usual = sorted(first)[(len(first) - 1) // 2]
            if own or slower < 1:
                begun = like.times(slower)
            else:
                begun = like.with_keys(usual - like.at(rows), rows, 1 << lot // LOTS)
            if rows not in begun:
                begun[rows], begun.weights[rows] = usual, 1.0
            self.curves[lot] = begun
        else:
            self.curves.setdefault(lot, Learnt()).add(count, seconds)

    def over(self, first: int, last: int, keys: int, texts: int = 1) -> list[float]:
        """Seconds of `first` rows to `last`; infinite where far more rows than were ever measured."""
        self._learn()
        if not self.curves:
            base, row, _ = np.linalg.lstsq(self.squares, self.products, rcond=1e-9)[0].tolist()
            least = float(self.products[0] / self.squares[0, 0] / 100)
            return [max(least, base) + max(0.0, row) * n for n in range(first, last + 1)]
        curve = self._nearest(_lot(keys, texts))
        most = 2 * max(curve) + 2
        return [s if n <= most else math.inf for n, s in enumerate(curve.over(first, last), first)]

    def _nearest(self, lot: int) -> Learnt:
        """The curve of such texts, or of those most like them, if it has more than one point."""
        better = [known for known in self.curves if len(self.curves[known]) > 1] or [*self.curves]
        texts, keys = divmod(lot, LOTS)
        return self.curves[min(better, key=lambda known: abs(known // LOTS - texts) + abs(known % LOTS - keys))]

    def ladder(self, rows: int, more: int, keys: int) -> list[float]:
        """Seconds of a row for each of so many texts, of one more and so on to `more`, as far as they pay if every
        guess is right.

        Empty if so few rows were never measured: what more of them cost cannot be said then.
        """
        asked = rows, more, _lot(keys, rows)
        seconds = self.ladders.get(asked)
        if seconds is None:
            seconds = self.ladders[asked] = []
            if self and (not self.curves or min(self._nearest(asked[2])) <= _knot(rows)):
                seconds += self.over(rows, rows + more, keys, rows)
                while seconds and (
                    math.isinf(seconds[-1]) or (rows + len(seconds) - 1) / seconds[-1] < rows / seconds[0]
                ):
                    del seconds[-1]
        return seconds

    def at(self, rows: int, keys: int, texts: int = 1) -> float:
        """Seconds of one forward."""
        return self.over(rows, rows, keys, texts)[0]

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
            own = self.file.with_name(f"{self.file.name}.{os.getpid()}")  # others may be writing theirs
            write_text(own, json.dumps(kept))
            own.replace(self.file)


def cache_file() -> Path | None:
    """Where costs are kept: `OUTRIDER_CACHE`, or the user's cache folder; None if `OUTRIDER_CACHE` is empty."""
    folder = os.environ.get("OUTRIDER_CACHE")
    if folder == "":
        return None
    with suppress(RuntimeError):  # no home
        caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
        if not caches.is_absolute():  # which is none, by the XDG's specification
            caches = Path.home() / ".cache"
        return (Path(folder) if folder else caches / "outrider") / "costs.json"
    return None


def _read(file: Path) -> dict[str, dict[int, Learnt]]:
    """What a file of costs holds; nothing if it is not there, and without what is damaged."""
    try:
        data = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    found: dict[str, dict[int, Learnt]] = {}
    for name, curves in data.items() if isinstance(data, Mapping) else ():
        with suppress(ValueError, TypeError, AttributeError):
            made = {int(o): Learnt({int(n): s for n, s in points.items()}) for o, points in curves.items()}
            sound = all(0 < n < 2**31 and real(s, 1e-9, 1e6) for points in made.values() for n, s in points.items())
            if made and sound and all(made.values()):
                found[name] = made
    return found


def _lot(keys: int, texts: int) -> int:
    """Batches that cost alike: by octaves of their keys, and of their texts, whose rows share their keys."""
    return max(0, (keys - 1) // 512).bit_length() + LOTS * (texts.bit_length() - 1)


def _knot(rows: int) -> int:
    """Large counts stand for those near them. Up to 64 none does: a tile of 16 rows more may be a jump."""
    return rows if rows <= 64 else round(2 ** (round(4 * math.log2(rows)) / 4))
