"""Plain decoding: draft nothing. The baseline of every comparison, through the same step."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.draft import Draft
from outrider.errors import ConfigError
from outrider.sequence import Sequence
from outrider.speculate import Drafter


@dataclass
class NoDraft(Drafter):
    """Proposes nothing."""

    num_speculative_tokens: int = 0

    def __post_init__(self) -> None:
        if self.num_speculative_tokens:
            raise ConfigError(
                f"method none drafts nothing; leave out num_speculative_tokens={self.num_speculative_tokens}"
            )

    def propose(self, seqs: list[Sequence], k: int) -> list[Draft]:
        """Empty drafts."""
        return [Draft() for _ in seqs]
