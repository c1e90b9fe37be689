"""The target drafts for itself, through a view of its own cache: same weights, few keys.

Pays where reading the keys, not the weights, is what a forward waits for: long contexts, large batches. `streaming` and
`snapkv` views are MagicDec's (2408.11049), `quantized` is QuantSpec's (2502.10424).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from outrider.config import option
from outrider.kv import parse
from outrider.runner import Runner
from outrider.speculate import Autoregressive


@dataclass
class SelfDraft(Autoregressive):
    """`view`: which keys it sees, such as `retrieval:budget=4096,chunk=8` (kv/views.py)."""

    num_speculative_tokens: int = 4
    view: str = option("streaming:budget=512", "which keys it sees")

    def __post_init__(self) -> None:
        parse(self.view)

    def attach(self, target: Runner, load: Callable[[str], Runner]) -> None:
        """Look through the view."""
        self.runner, self.vocab = target.view(self.view), target.model.config.vocab_size
