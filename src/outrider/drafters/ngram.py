"""Prompt lookup: repeat what followed the last occurrence of the present n-gram, in prompt and output.

Longest n-gram first, most recent occurrence first. A copy may run into itself, so a loop is continued for ever.
Source: Saxena's prompt lookup decoding (2023); the option names are vLLM's. Pays where output repeats input: editing,
summaries, code. Costs a few look-ups a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from outrider.config import option
from outrider.draft import Draft
from outrider.drafters import check
from outrider.errors import ConfigError
from outrider.ops import native
from outrider.sequence import Sequence
from outrider.speculate import Drafter

LONGEST = 32  # tokens of an n-gram: each length has an entry per token, of some 0.1 kB


class Index:
    """Where each n-gram of a sequence last ended with something after it: the reference of csrc/lookups.cpp."""

    def __init__(self, least: int, most: int) -> None:
        self.sizes = range(most, least - 1, -1)
        self.ends: dict[int, int] = {}  # by hash: a collision makes a bad guess, no more
        self.upto = 1  # ends below this are entered

    def guess(self, tokens: list[int], settled: int, k: int) -> tuple[list[int], list[float]]:
        """A copy, and the trust in it, which grows with the tokens that match. The first `settled` never change."""
        for end in range(self.upto, settled):  # tokens[end] exists: the n-gram has a continuation
            for n in self.sizes:
                if n <= end:
                    self.ends[hash(tuple(tokens[end - n : end]))] = end
        self.upto = max(self.upto, settled)
        for n in self.sizes:
            at = self.ends.get(hash(tuple(tokens[-n:]))) if n < len(tokens) else None
            if at is not None:
                copied: list[int] = []
                for i in range(at, at + k):
                    copied.append(tokens[i] if i < len(tokens) else copied[i - len(tokens)])
                return copied, [1 - 1 / (1 + n + i) for i in range(len(copied))]
        return [], []


@dataclass
class Ngram(Drafter):
    """Copies from the sequence itself."""

    cheap: ClassVar[bool] = True
    num_speculative_tokens: int = 8
    prompt_lookup_max: int = option(4, "longest n-gram to match, in tokens")
    prompt_lookup_min: int = option(2, "shortest n-gram to match")

    def __post_init__(self) -> None:
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise ConfigError(
                "prompt_lookup_min must be at least 1 and at most prompt_lookup_max, "
                f"not {self.prompt_lookup_min} and {self.prompt_lookup_max}"
            )
        check(self, prompt_lookup_max=(1, LONGEST))
        self.index: type[Index] = Index if native.active == native.REFERENCE else native.kernels.NgramIndex
        self.indexes: dict[int, Index] = {}

    def propose(self, seqs: list[Sequence], k: int) -> list[Draft]:
        """One chain per sequence, empty without a match."""
        return [Draft.chain(*self._continue(seq, min(k, seq.room - 1))) for seq in seqs]

    def forget(self, seq: Sequence) -> None:
        """Drop the sequence's index."""
        self.indexes.pop(seq.id, None)

    def _continue(self, seq: Sequence, k: int) -> tuple[list[int], list[float]]:
        index = self.indexes.get(seq.id)
        if index is None:
            index = self.indexes[seq.id] = self.index(self.prompt_lookup_min, self.prompt_lookup_max)
        return index.guess(seq.tokens, seq.settled, k)
