"""REST: copy what followed the present suffix in a store of other texts (He et al. 2311.08252).

The longest suffix of the sequence that the store knows, of at most `max_token_span` tokens, is looked up in a
memory-mapped suffix array; what followed its occurrences makes a trie whose nodes count how often they were passed.
By default the most frequent path is proposed; with `tree`, the most frequent nodes. Pays where the text resembles the
store and not itself: code of a known house or library, set phrases, answers like earlier ones. Costs no forward and no
memory; a look-up takes about as long as a few dozen random page reads. Unlike the original it maps the file instead of
reading it, reads 32-bit ids, stays within documents and guesses nothing where it knows nothing. What stands here is the
reference of csrc/lookups.cpp.
Build stores with `outrider datastore build`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from outrider.config import MOST_NODES, option
from outrider.datastore import Store
from outrider.draft import Draft
from outrider.drafters import check
from outrider.errors import ConfigError
from outrider.ops import native
from outrider.runner import Runner
from outrider.sequence import Sequence
from outrider.speculate import Drafter

HITS, LEAST = 128, 2  # occurrences that are looked at, evenly spread over all; the shortest suffix
UNMET = 2  # ways on that may be besides: what came once of one is no certainty


@dataclass
class Rest(Drafter):
    """`datastore`: path of a store, built with the target's tokenizer. `num_speculative_tokens`: nodes of a draft."""

    cheap: ClassVar[bool] = True
    num_speculative_tokens: int = option(16, "nodes of a draft")
    datastore: str = option("", "required: a file made by `outrider datastore build`")
    max_token_span: int = option(16, "longest suffix to match, in tokens; the shortest is 2")
    max_continuation: int = option(10, "tokens copied of an occurrence")
    tree: bool = option(False, "guess branches, too; without the kernels, taking another than the first costs bitwise")

    def __post_init__(self) -> None:
        if not self.datastore:
            raise ConfigError("method rest needs a 'datastore', a file made by `outrider datastore build`")
        check(self, max_token_span=(2, MOST_NODES), max_continuation=(1, MOST_NODES))
        self.store, self.vocab = Store(self.datastore), 2**32
        self.shards = None if native.active == native.REFERENCE else self.store.compiled()

    def look(self, bit: int) -> tuple[Any, ...] | None:
        """How `auto` asks without a Draft between (control.Look)."""
        if self.shards is None:
            return None
        return bit, self.shards, self.max_token_span, LEAST, self.max_continuation, HITS, self.vocab, self.tree

    def attach(self, target: Runner, load: Callable[[str], Runner]) -> None:
        """Refuse a store of other tokens."""
        self.vocab = target.model.config.vocab_size
        self.store.check(target.tokenizer, self.vocab)

    def propose(self, seqs: list[Sequence], k: int) -> list[Draft]:
        """One draft per sequence, empty where the store does not know its last two tokens."""
        return [self._guess(seq.tokens[-self.max_token_span :], k) if k > 0 else Draft() for seq in seqs]

    def _guess(self, context: list[int], k: int) -> Draft:
        length = min(k, self.max_continuation)
        if self.shards is None:
            return guess(*self.store.match(context, self.max_token_span, LEAST, length, HITS), k, self.tree)
        tokens, parents, trust = self.shards.guess(context, LEAST, length, HITS, k, self.tree)
        return Draft(tokens, parents, trust=trust)


def guess(match: int, rows: list[list[int]], k: int, tree: bool) -> Draft:
    """What follows most often. The trust in a node is its share of all ways on, less the fewer tokens match before."""
    draft = (grow if tree else follow)(rows, k)
    draft.trust = [own * (1 - 1 / (match + d)) for own, d in zip(draft.trust or [], draft.depths(), strict=True)]
    return draft


def follow(rows: list[list[int]], k: int) -> Draft:
    """The chain of the most frequent next token, each time among the rows that agree so far."""
    chain, trust = list[int](), list[float]()
    while len(chain) < k and (rows := [row for row in rows if len(row) > len(chain)]):
        token, count = Counter(row[len(chain)] for row in rows).most_common(1)[0]
        trust.append(count / (len(rows) + UNMET))
        rows = [row for row in rows if row[len(chain)] == token]
        chain.append(token)
    return Draft.chain(chain, trust)


def grow(rows: list[list[int]], k: int) -> Draft:
    """The tree of the k most frequent beginnings, short ones first. A parent counts no less than its children."""
    counts = Counter(tuple(row[:n]) for row in rows for n in range(1, len(row) + 1))
    paths = sorted(counts, key=lambda path: (-counts[path], len(path)))
    draft = Draft.of_paths(paths, k)
    words = [draft.words(node) for node in range(len(draft))]
    draft.trust = [counts[path] / (counts.get(path[:-1], len(rows)) + UNMET) for path in words]
    return draft
