"""TriForce (2404.11912): a small model with a short cache, verified through retrieved keys, verified by the target.

A named `cascade`, and unlike the original exact at every level: `draft_model` with a streaming cache of
`draft_cache_budget` tokens guesses `inner_speculative_tokens`; the target, seeing `retrieval_budget` keys in chunks of
`chunk_size`, verifies them until there are `num_speculative_tokens`; then the target verifies with all keys.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.config import MOST_NODES, SpeculativeConfig, option
from outrider.drafters import check, create
from outrider.errors import ConfigError
from outrider.kv import parse
from outrider.speculate import Nested


@dataclass
class TriForce(Nested):
    """`model`: the draft model, as for `draft_model`."""

    num_speculative_tokens: int = 6
    model: str = option("", "required: folder, hub id or embedded name of the draft model")
    retrieval_budget: int = option(4096, "keys that the target sees when it verifies inside")
    chunk_size: int = option(8, "keys that are retrieved together")
    draft_cache_budget: int = option(256, "keys that the draft model keeps")
    inner_speculative_tokens: int = option(2, "tokens that the draft model guesses at a time")

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("method triforce needs a 'model', such as {'method': ..., 'model': 'tiny-draft'}")
        check(self, inner_speculative_tokens=(1, MOST_NODES), draft_cache_budget=(6, 2**30), chunk_size=(1, 2**20))
        self.view = f"retrieval:budget={self.retrieval_budget},chunk={self.chunk_size}"
        least = parse(f"retrieval:budget={2**30},chunk={self.chunk_size}").least
        check(self, retrieval_budget=(least, 2**30))
        options = {"model": self.model, "kv": f"streaming:budget={self.draft_cache_budget}"}
        self.inner = create(SpeculativeConfig("draft_model", self.inner_speculative_tokens, options=options))
