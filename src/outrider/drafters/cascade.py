"""Any drafter inside a view of the target: cheap guesses are verified through few keys before the target sees them.

`{"method": "cascade", "view": "retrieval:budget=4096", "drafter": {"method": "ngram"}}`. The inner drafter guesses
`num_speculative_tokens` of its own config at a time; the view verifies them, until there are as many tokens as the
outer `num_speculative_tokens`; the target verifies those. May be nested. (TriForce 2404.11912 is one such cascade.)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from outrider.config import option
from outrider.drafters import inner
from outrider.kv import parse
from outrider.speculate import Nested


@dataclass
class Cascade(Nested):
    """`drafter`: what would be a `speculative_config`; `view`: which keys verify its guesses (kv/views.py)."""

    num_speculative_tokens: int = 8
    view: str = option("retrieval:budget=4096", "which keys verify its guesses")
    drafter: Any = field(
        default_factory=lambda: {"method": "ngram"},
        metadata={"help": "who guesses inside: a speculative_config, in JSON"},
    )

    def __post_init__(self) -> None:
        parse(self.view)
        self.inner = inner("cascade", self.drafter)
