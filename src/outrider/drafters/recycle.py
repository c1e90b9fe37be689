"""Token recycling: what the target found likely after each token, here or elsewhere, is its guess after it again.

Every row of a forward, of rejected guesses, too, tells which tokens the target expects behind the row's token. The
`recycled` likeliest of the last time are kept for every token of the vocabulary, for all requests; the draft is the
likeliest paths through that table from the sequence's last token on. Source: Token Recycling (2408.08696), whose tree
has a fixed shape; here it grows where the table's probabilities are high, and without `tree` it is one path. Pays where
rows are nearly free, on any text. Costs a look at each row's logits.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from outrider.config import MOST_NODES, option
from outrider.draft import Draft, Verdict
from outrider.drafters import check
from outrider.runner import Output
from outrider.sampling import few_threads
from outrider.sequence import Sequence
from outrider.speculate import Drafter


@dataclass
class Recycle(Drafter):
    """Guesses what the target expected after the same tokens."""

    cheap: ClassVar[bool] = True
    num_speculative_tokens: int = option(8, "nodes of a draft")
    recycled: int = option(8, "tokens kept for each token of the vocabulary")
    tree: bool = option(True, "guess branches, too; without the kernels, taking another than the first costs bitwise")

    def __post_init__(self) -> None:
        check(self, recycled=(1, MOST_NODES))
        self.table: dict[str, tuple[list[int], list[float]]] = {}  # by token, in decimals: next ones, probabilities

    def propose(self, seqs: list[Sequence], k: int) -> list[Draft]:
        """The k likeliest nodes through the table; none behind a token that was never read."""
        guess = self._grow if self.tree else self._line
        return [guess(seq.tokens[-1], k) for seq in seqs]

    def observe(self, seqs: list[Sequence], verdicts: list[Verdict], output: Output) -> None:
        """Renew what follows each token that this forward read."""
        tokens = list[int]()
        for seq, verdict, draft in zip(seqs, verdicts, output.drafts, strict=True):
            tokens += [seq.tokens[len(seq.tokens) - len(verdict.tokens) - 1], *draft.tokens]
        flat = output.flat
        with few_threads(flat):
            best = flat.topk(min(self.recycled, flat.shape[-1]))
            chances = (best.values - best.values[:, :1]).float().softmax(-1)
        for token, ids, own in zip(tokens, best.indices.tolist(), chances.tolist(), strict=True):
            self.table[str(token)] = ids, own

    def follow(self, tokens: list[int]) -> None:
        """Where nobody shows logits (vllm.py): what followed each token is expected after it again, the last first."""
        fresh: dict[int, list[int]] = {}
        for after, token in pairwise(reversed(tokens)):
            own = fresh.setdefault(token, [])
            if len(own) < self.recycled and after not in own:
                own.append(after)
        for token, own in fresh.items():
            known = self.table.get(str(token), ([], []))[0]
            ids = [*own, *(after for after in known if after not in own)][: self.recycled]
            self.table[str(token)] = ids, [0.5**n for n in range(1, 1 + len(ids))]

    def _line(self, token: int, k: int) -> Draft:
        tokens, trust = list[int](), list[float]()
        while len(tokens) < k and (known := self.table.get(str(token))):
            token = known[0][0]
            tokens.append(token)
            trust.append(known[1][0])
        return Draft.chain(tokens, trust)

    def _grow(self, token: int, k: int) -> Draft:
        tokens, parents, trust = list[int](), list[int](), list[float]()
        heap: list[tuple[float, int, int, int, float]] = [(-1.0, 0, -1, token, 1.0)]  # likeliest, first met, above, ...
        met = 0
        while heap and len(tokens) <= k:
            cost, _, parent, token, own = heapq.heappop(heap)
            tokens.append(token)
            parents.append(parent)
            trust.append(own)
            ids, chances = self.table.get(str(token), ((), ()))
            for follower, chance in zip(ids, chances, strict=True):
                met += 1
                heapq.heappush(heap, (cost * chance, met, len(tokens) - 1, follower, chance))
        return Draft(tokens[1:], [parent - 1 for parent in parents[1:]], trust=trust[1:])
