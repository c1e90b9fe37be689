"""Plain decoding: draft nothing. The baseline of every comparison, through the same step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from outrider.draft import Draft
from outrider.sequence import Sequence
from outrider.speculate import Drafter


@dataclass
class NoDraft(Drafter):
    """Proposes nothing."""

    num_speculative_tokens: int = 0
    idle: ClassVar[bool] = True

    def propose(self, seqs: list[Sequence], k: int) -> list[Draft]:
        """Empty drafts."""
        return [Draft() for _ in seqs]
