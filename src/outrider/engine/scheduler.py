"""Who gets how much of the next forward.

A forward has room for so many tokens. Sequences that wait for their next token come first, with one each. Prompts get
what reading them may take: beside running sequences, as many tokens as lengthen the step by no more than a promised
delay, nor by more than 1.5 times its own length, as measured, which is taken the more times, the more prompts wait for
each that runs; else all there is room for. Draft nodes get what is left, and a quarter of that room where some prompt
has to wait. So speculation shrinks first, and no prompt stops those that run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

GRAIN = 16  # tokens of prompts: reading fewer takes about as long
ABREAST = 8  # prompts that are read together: more of them have their first tokens later, and smaller pieces cost more
LEAST = 4  # tokens of one prompt
LENGTHENED = 1.5  # by so many times its length may reading lengthen a step: the next tokens come 2.5 times as late


@dataclass
class Pace:
    """Seconds of a forward by its rows, as measured: a line."""

    delay: float  # seconds by which reading may lengthen a step
    fixed: float = 0.0
    row: float = 0.0

    def learn(self, rows: int, read: int, seconds: float) -> None:
        """One forward of so many rows, `read` of them a prompt's. Hiccups count as twice what was expected."""
        if not read:
            seconds = min(seconds, 2 * (self.fixed + self.row * rows) or seconds)
            self.fixed += 0.2 * (max(0.0, seconds - self.row * rows) - self.fixed)
        else:
            row = max(seconds - self.fixed, seconds / 4) / rows
            self.row += 0.3 * (min(row, 2 * self.row) - self.row) if self.row else row

    def beside(self, rows: int, prompts: int) -> int:
        """Tokens of so many prompts that may be read in a forward beside so many rows."""
        if not self.row:
            return GRAIN
        # beyond one prompt, who waits for a first token counts twice as much as who waits for the next: were a burst
        # read in many small steps, the first to arrive would go ahead alone, in steps that nobody shares
        bound = LENGTHENED * (self.fixed + self.row * rows) * (1 + 2 * (prompts - 1) / rows)
        return max(GRAIN, int(min(self.delay, bound) / self.row))


def shares(lacking: Iterable[tuple[Any, int]], room: int) -> list[int]:
    """How many tokens each prompt may read, given its urgency and the tokens it lacks, the most urgent ones first.

    These are served first. Of one urgency the first one is always read, and beside it those that lack the least:
    ABREAST together, or as many as get LEAST. They get equal shares, and what some do not need goes to the others.
    """
    found: list[int] = []
    for _, group in groupby(lacking, lambda prompt: prompt[0]):
        needs = [lacks for _, lacks in group]
        given, beside = [0] * len(needs), max(1, min(ABREAST, room // LEAST)) - 1
        others = sorted(range(1, len(needs)), key=needs.__getitem__)
        served = sorted([0, *others[:beside]], key=needs.__getitem__)
        for rivals, i in zip(reversed(range(len(served))), served, strict=True):
            given[i] = min(needs[i], room // (1 + rivals))
            room -= given[i]
        for i in others[beside:]:
            given[i] = min(needs[i], room)
            room -= given[i]
        found += given
    return found
