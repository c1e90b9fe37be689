"""A drafter only guesses (Law 5): what goes wrong in it may cost its guesses, and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from outrider.draft import Draft, Verdict
from outrider.errors import OutriderError, told
from outrider.runner import Output
from outrider.sequence import Sequence
from outrider.speculate import Drafter

log = logging.getLogger(__name__)
T = TypeVar("T")


class Guard(Drafter):
    """A drafter that what it raises switches off for good, with one warning; its requests go on plainly.

    Not held against it, but paid with one step's drafts, is what the requests bring about: memory that runs out or
    another OutriderError, and anything raised where a sequence has custom processors, which a draft model asks, too.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.name = drafter, drafter.name  # type: ignore[misc]
        self.failure: str | None = None  # what switched it off
        self.quiet = False  # nothing is to be drafted for now

    def propose(self, seqs: list[Sequence], k: int) -> list[Draft]:
        """Its drafts; empty ones once it is switched off."""
        if self.quiet:
            return [Draft() for _ in seqs]
        return self._ask(seqs, self.drafter.propose, seqs, k, otherwise=lambda: [Draft() for _ in seqs])

    def observe(self, seqs: list[Sequence], verdicts: list[Verdict], output: Output) -> None:
        """Let it see what became of them."""
        self._ask(seqs, self.drafter.observe, seqs, verdicts, output, otherwise=lambda: None)

    def forget(self, seq: Sequence) -> None:
        """Let it give back what it held; it is asked even when switched off."""
        try:
            self.drafter.forget(seq)
        except Exception as error:
            self._switch_off(error, [])

    def kv_bytes(self, tokens: int) -> int:
        """What it says it will hold."""
        return self._ask([], self.drafter.kv_bytes, tokens, otherwise=lambda: 0)

    def _ask(self, seqs: list[Sequence], call: Callable[..., T], *args: Any, otherwise: Callable[[], T]) -> T:
        if self.failure is not None:
            return otherwise()
        try:
            return call(*args)
        except OutriderError:
            return otherwise()
        except Exception as error:
            if not any(seq.params.logits_processors for seq in seqs):
                self._switch_off(error, seqs)
            return otherwise()

    def _switch_off(self, error: Exception, seqs: list[Sequence]) -> None:
        if self.failure is None:
            self.failure = told(error)
            log.warning("drafter %r is switched off, decoding goes on without drafts: %s", self.name, self.failure)
            log.debug("where drafter %r failed", self.name, exc_info=error)
        for seq in seqs:
            with suppress(Exception):  # it has failed; its memory may go all the same
                self.drafter.forget(seq)
