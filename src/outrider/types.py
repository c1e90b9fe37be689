"""What flows through the house: sequences, drafts, verdicts, outputs and their metrics."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from outrider.config import SamplingParams

_ids = itertools.count()


@dataclass
class Draft:
    """A guess at what follows a sequence: a token tree in topological order (parents before children).

    Node i holds `tokens[i]`; `parents[i]` is the index of the node before it, or -1 for the sequence's last token.
    `q` (nodes, vocab) is the law each node was drawn from, given its ancestors and its earlier siblings (independent
    siblings carry the same one), by noise that no earlier step used; only the rules `rejection` and `block` look at it,
    and they are exact without it, too. A row of zeros is a node without a law. The last `riders` nodes share the
    forward but are never verified.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    q: Tensor | None = None
    riders: int = 0

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents) or not 0 <= self.riders <= len(self.tokens):
            raise ValueError(f"draft of {len(self.tokens)} tokens, {len(self.parents)} parents, {self.riders} riders")
        if any(not -1 <= parent < i for i, parent in enumerate(self.parents)):
            raise ValueError(f"draft parents must come before their children: {self.parents}")

    @staticmethod
    def chain(tokens: Iterable[int]) -> Draft:
        """A tree without branches."""
        tokens = list(tokens)
        return Draft(tokens, list(range(-1, len(tokens) - 1)))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def verifiable(self) -> int:
        """How many nodes verification may accept."""
        return len(self.tokens) - self.riders

    @property
    def is_chain(self) -> bool:
        """Whether every node follows the one before it."""
        return all(parent == i - 1 for i, parent in enumerate(self.parents))

    def depths(self) -> list[int]:
        """Per node, how many tokens after the sequence's last one it stands (1 = directly after)."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
        return depths

    def path_to(self, node: int) -> list[int]:
        """Nodes from the root's child down to `node`; empty for -1."""
        path: list[int] = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    @staticmethod
    def merge(drafts: list[Draft], budget: int) -> tuple[Draft, list[list[int]]]:
        """One tree of several, where the same prefix is the same node; and per draft where its nodes went, -1 = cut.

        Depth by depth, at each depth the earlier drafts' nodes first, until there are `budget` that can be accepted.
        Riders come last, are neither shared nor counted, and go only with their parent. A law `q` outlives the merge
        only if the other drafts are empty: which nodes are shared depends on what was drawn. Without it all is exact.
        """
        alone = [draft for draft in drafts if draft.tokens]
        if len(alone) == 1 and alone[0].verifiable <= budget:
            return alone[0], [list(range(len(draft))) for draft in drafts]
        merged, index = Draft(), dict[tuple[int, int], int]()
        where = [[-1] * len(draft) for draft in drafts]
        each = [(i, n, depth) for i, draft in enumerate(drafts) for n, depth in enumerate(draft.depths())]
        for i, n, _ in sorted(each, key=lambda node: (node[1] >= drafts[node[0]].verifiable, node[2], node[0])):
            draft, parent = drafts[i], drafts[i].parents[n]
            root, rides = where[i][parent] if parent >= 0 else -1, n >= draft.verifiable
            if parent >= 0 > root:
                continue
            at = -1 if rides else index.get((root, draft.tokens[n]), -1)
            if at < 0 and (rides or len(merged) < budget):
                at = len(merged)
                merged.tokens.append(draft.tokens[n])
                merged.parents.append(root)
                merged.riders += rides
                index[root, draft.tokens[n]] = at
            where[i][n] = at
        return merged, where

    def clip(self, depth: int, vocab: int = 2**63) -> Draft:
        """Without nodes deeper than `depth` tokens after the sequence, or that are, or hang on, no token of `vocab`."""
        depths: list[float] = []
        for token, parent in zip(self.tokens, self.parents, strict=True):
            below = depths[parent] if parent >= 0 else 0
            depths.append(1 + below if 0 <= token < vocab else math.inf)
        if max(depths, default=0) <= depth:
            return self
        kept = [i for i, d in enumerate(depths) if d <= depth]
        index = {node: i for i, node in enumerate(kept)} | {-1: -1}
        return Draft(
            [self.tokens[i] for i in kept],
            [index[self.parents[i]] for i in kept],
            None if self.q is None else self.q[kept],
            sum(i >= self.verifiable for i in kept),
        )


@dataclass
class Verdict:
    """What verification made of one draft: the accepted nodes, and the tokens to emit (theirs and one more)."""

    path: list[int]
    tokens: list[int]
    drafted: int = 0  # nodes that could have been accepted
    chain: bool = True  # whether each followed the one before it
    logprobs: list[Logprob] = field(default_factory=list)  # per emitted token, if the request asks


@dataclass(frozen=True)
class Logprob:
    """Log-probabilities (natural, of the raw logits) of a chosen token and of the likeliest ones."""

    token_id: int
    logprob: float
    top: dict[int, float] = field(default_factory=dict)


@dataclass
class SpecMetrics:
    """Per-request speculation metrics under vLLM's names.

    A step is one forward of the target that emits tokens; steps without a draft count too. Acceptance length is
    tokens emitted per step, the target's own token included.
    """

    drafted: list[int] = field(default_factory=list)  # per step, nodes that could be accepted
    accepted: list[int] = field(default_factory=list)  # per step, draft tokens that were emitted
    emitted: int = 0
    num_spec_tokens: int = 0
    inner: SpecMetrics | None = None  # a cascade's next level: there, a step is a forward through the view

    def add(self, drafted: int, accepted: int, emitted: int) -> None:
        """Count one step."""
        self.drafted.append(drafted)
        self.accepted.append(accepted)
        self.emitted += emitted

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted per target forward."""
        return self.emitted / max(1, len(self.drafted))

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted draft tokens / drafted tokens."""
        return sum(self.accepted) / max(1, sum(self.drafted))

    def as_dict(self) -> dict[str, Any]:
        """The object that vLLM returns as `metrics.speculative_decoding` in its detailed form."""
        by_length: dict[int, Counter[int]] = {}
        for drafted, accepted in zip(self.drafted, self.accepted, strict=True):
            by_length.setdefault(drafted, Counter())[accepted] += 1

        def histogram(counts: Counter[int]) -> list[int]:
            return [counts[i] for i in range(max(counts, default=-1) + 1)]

        return {
            "mean_acceptance_length": self.mean_acceptance_length,
            "draft_acceptance_rate": self.draft_acceptance_rate,
            "acceptance_histogram": histogram(Counter(self.accepted)),
            "acceptance_histogram_by_draft_length": {n: histogram(c) for n, c in sorted(by_length.items())},
            "num_spec_steps": len(self.drafted),
            "num_accepted_draft_tokens": sum(self.accepted),
            "num_draft_tokens": sum(self.drafted),
            "num_spec_tokens": self.num_spec_tokens,
            "per_step_accepted": self.accepted,
            "per_step_drafted": self.drafted,
            **({"inner": self.inner.as_dict()} if self.inner else {}),
        }


@dataclass
class Timing:
    """Seconds of one request. `draft`, `target` and the rest of `total` after the first token add up to it."""

    started: float = field(default_factory=time.perf_counter)
    first_token: float = 0.0  # from the start, queueing and prefill included
    first_tokens: int = 0  # how many came with it: a draft may have been accepted right behind the prompt
    total: float = 0.0
    draft: float = 0.0  # share of the steps after the first token spent proposing
    target: float = 0.0  # ... and in the target's forwards and verification
    decode: float = 0.0  # all of the steps after the first token

    def as_dict(self, tokens: int) -> dict[str, float]:
        """As reported: seconds, and tokens per second after the first forward."""
        return {
            "time_to_first_token": self.first_token,
            "first_tokens": self.first_tokens,
            "total_seconds": self.total,
            "decode_seconds": self.decode,
            "draft_seconds": self.draft,
            "target_seconds": self.target,
            "tokens_per_second": (tokens - self.first_tokens) / self.decode if self.decode else 0.0,
        }


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


@dataclass
class GenerationOutput:
    """One generated continuation."""

    text: str
    token_ids: list[int]
    finish_reason: str  # "stop" or "length"; "abort" if it was cancelled, "running" if it goes on
    seed: int  # give it again to get the same tokens
    prompt_token_ids: list[int]
    drafted_by: list[str | None]  # per token, the drafter that guessed it; None = the target's own
    metrics: dict[str, Any]  # speculative_decoding, timing, exactness, method
    logprobs: list[Logprob] | None = None
    index: int = 0  # which of the request's n outputs
    prompt: str | None = None


@dataclass(frozen=True)
class TokenEvent:
    """One token of a stream. `text` may be empty while a character or a stop string is incomplete."""

    token_id: int
    text: str
    drafted_by: str | None
    finish_reason: str | None = None
    output: GenerationOutput | None = None  # with the last token
