"""A drafter only guesses (Law 5): what goes wrong in it may cost its guesses, and nothing else."""

from __future__ import annotations

import logging

from outrider.draft import Draft, Verdict
from outrider.errors import DrafterError, OutriderError, ends_one, told
from outrider.runner import Output
from outrider.sequence import Sequence
from outrider.speculate import Drafter

log = logging.getLogger(__name__)


class Guard(Drafter):
    """A drafter that is switched off for good, with one warning, by what it raises and by drafts that are none: its
    requests go on plainly.

    Not held against it, but paid with one step's drafts, is what the requests bring about: memory that runs out or
    another OutriderError, and anything raised where a sequence has custom processors, which a draft model asks, too.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.name, self.idle = drafter, drafter.name, drafter.idle  # type: ignore[misc]
        self.failure: str | None = None  # what switched it off
        self.quiet = False  # nothing is to be drafted for now

    def rests(self, seqs: list[int]) -> bool:
        """Whether it rests."""
        if not self.quiet and self.failure is None:
            try:
                return bool(self.drafter.rests(seqs))
            except BaseException as error:
                self._blame(error, [])
        return False

    def propose(self, seqs: list[Sequence], k: int) -> list[Draft]:
        """Its drafts; empty ones once it is switched off."""
        if not self.quiet and self.failure is None:
            try:
                return self.drafter.propose(seqs, k)
            except BaseException as error:
                self._blame(error, seqs)
        return [Draft() for _ in seqs]

    def observe(self, seqs: list[Sequence], verdicts: list[Verdict], output: Output) -> None:
        """Let it see what became of them."""
        if self.failure is None:
            try:
                self.drafter.observe(seqs, verdicts, output)
            except BaseException as error:
                self._blame(error, seqs)

    def remember(self, text: list[int]) -> None:
        """Let it remember a text."""
        if self.failure is None:
            try:
                self.drafter.remember(text)
            except BaseException as error:
                self._blame(error, [])

    def forget(self, seq: Sequence) -> None:
        """Let it give back what it held; it is asked even when switched off."""
        try:
            self.drafter.forget(seq)
        except BaseException as error:
            if not ends_one(error):
                raise
            self.switch_off(error)

    def kv_bytes(self, tokens: int) -> int:
        """What it says it will hold."""
        if self.failure is None:
            try:
                return max(0, int(self.drafter.kv_bytes(tokens)))
            except BaseException as error:
                self._blame(error, [])
        return 0

    def _blame(self, error: BaseException, seqs: list[Sequence]) -> None:
        """Switch it off, if what it raised is its own fault; an interrupt goes on."""
        if not ends_one(error):
            raise error
        cause: BaseException = error
        while isinstance(cause, DrafterError) and cause.__cause__:  # of one inside another: what went wrong there
            cause = cause.__cause__
        own = isinstance(cause, DrafterError) or not isinstance(cause, OutriderError)
        if own and not any(seq.params.logits_processors for seq in seqs):
            self.switch_off(error)
            for seq in seqs:
                self.forget(seq)  # it has failed; its memory may go all the same

    def switch_off(self, error: BaseException) -> None:
        """It drafts no more."""
        if self.failure is None:
            self.failure, self.idle = told(error), True  # type: ignore[misc]
            log.warning("drafter %r is switched off, decoding goes on without drafts: %s", self.name, self.failure)
            log.debug("where drafter %r failed", self.name, exc_info=error)
