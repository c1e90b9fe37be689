"""A small model guesses, token by token, with its own cache (Leviathan et al. 2211.17192, Chen et al. 2302.01318).

With `kv`, such as `streaming:budget=256`, its cache keeps only the first few tokens and the recent ones. Positions then
stay within the cache, so a draft trained on short texts guesses at any length, and it reads only the end of a long
prompt. (MagicDec 2408.11049, TriForce 2404.11912.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from outrider.config import option
from outrider.drafters import check
from outrider.errors import ConfigError
from outrider.kv import parse
from outrider.runner import Runner
from outrider.speculate import Autoregressive


@dataclass
class DraftModel(Autoregressive):
    """`model`: folder, hub id or embedded name. Its vocabulary must be the target's, up to padding rows."""

    num_speculative_tokens: int = 4
    model: str = option("", "required: folder, hub id or embedded name of the draft model")
    kv: str = option("", "which keys its cache keeps, such as streaming:budget=256; empty: all")
    min_token_prob: float = option(0.0, "no guess below this estimated probability, of all of its path; 0: k guesses")

    def __post_init__(self) -> None:
        check(self, min_token_prob=(0, 1))
        if not self.model:
            raise ConfigError("method draft_model needs a 'model', such as {'method': ..., 'model': 'tiny-draft'}")
        if self.kv and (name := parse(self.kv).name) != "streaming":
            raise ConfigError(f"kv of a draft model can only be streaming, not {name}, which looks at all keys")

    def attach(self, target: Runner, load: Callable[[str], Runner]) -> None:
        """Load the draft model, or take the one already loaded."""
        loaded = load(self.model)
        self.runner = loaded.view(self.kv, alone=True) if self.kv else loaded
        self.vocab = target.model.config.vocab_size
