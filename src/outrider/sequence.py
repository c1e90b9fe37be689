"""A sequence's tokens are the truth; everything else catches up with them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

from outrider.config import SamplingParams
from outrider.outputs import SpecMetrics

_ids = itertools.count()


class Sequence:
    """A sequence's tokens are the truth; caches catch up with them. Tokens are appended and never rewritten.

    `fork()` gives a hypothetical copy that a drafter may extend; caches know both by the same `id`.
    """

    def __init__(
        self,
        tokens: Iterable[int],
        params: SamplingParams,
        seed: int,
        *,
        eos: Iterable[int] = (),
        max_len: int | None = None,
    ) -> None:
        self.id = next(_ids)
        self.tokens = list(tokens)
        self.prompt_len = len(self.tokens)
        self.params = params
        self.seed = seed
        self.eos = frozenset(eos if not params.ignore_eos else ()) | frozenset(params.stop_token_ids or ())
        self.max_len = min(self.prompt_len + params.max_tokens, max_len or 2**62)
        self.finish_reason: str | None = None
        self.stop_check: Callable[[int], bool] | None = None  # sees each appended token; True = a stop string ended
        self.parent: Sequence | None = None
        self.branched = False  # whether a branch was accepted whose keys lay, and were summed, in another order
        self.spec = SpecMetrics()
        self.memory: dict[str, Any] = {}  # what the sampler keeps about the settled tokens

    @property
    def settled(self) -> int:
        """How many of the tokens will never change: all of them, but for a fork's own."""
        return len(self.parent.tokens) if self.parent else len(self.tokens)

    @property
    def room(self) -> int:
        """How many tokens may still be appended."""
        return self.max_len - len(self.tokens)

    @property
    def output(self) -> list[int]:
        """Tokens after the prompt."""
        return self.tokens[self.prompt_len :]

    def fork(self) -> Sequence:
        """A copy that may be extended hypothetically."""
        fork = object.__new__(Sequence)
        fork.__dict__.update(self.__dict__)
        fork.tokens, fork.parent, fork.stop_check = self.tokens.copy(), self.parent or self, None
        return fork

    def accept(self, tokens: list[int]) -> int:
        """Append tokens until one of them ends the sequence; returns how many were taken."""
        for taken, token in enumerate(tokens, start=1):
            self.tokens.append(token)
            if token in self.eos or (self.stop_check and self.stop_check(token)):
                self.finish_reason = "stop"
            elif self.room <= 0:
                self.finish_reason = "length"
            if self.finish_reason:
                return taken
        return len(tokens)
