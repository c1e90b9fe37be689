"""What comes out: generated text, streamed tokens, and the metrics of a request."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any


def common(some: Sequence[Any], others: Sequence[Any]) -> int:
    """With how many of the same tokens two outputs (texts, prompts) begin."""
    return next((i for i, (a, b) in enumerate(zip(some, others, strict=False)) if a != b), min(len(some), len(others)))


@dataclass(frozen=True)
class Logprob:
    """Log-probabilities (natural, of the raw logits) of a chosen token and of the likeliest ones."""

    token_id: int
    logprob: float
    top: dict[int, float] = field(default_factory=dict)
    rank: int = 0  # of the token: 1 if none is likelier


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
            "per_step_accepted": self.accepted.copy(),
            "per_step_drafted": self.drafted.copy(),
            **({"inner": self.inner.as_dict()} if self.inner else {}),
        }


@dataclass
class Timing:
    """Seconds of one request. `draft`, `target` and the rest of `total` after the first token add up to it."""

    started: float = field(default_factory=time.perf_counter)
    queued: float = 0.0  # from the start, until the engine began with it
    first_token: float = 0.0  # from the start, queueing and prefill included
    first_tokens: int = 0  # how many came with it: a draft may have been accepted right behind the prompt
    total: float = 0.0
    draft: float = 0.0  # share of the steps after the first token spent proposing
    target: float = 0.0  # ... and in the target's forwards and verification
    decode: float = 0.0  # all of the steps after the first token

    def as_dict(self, tokens: int) -> dict[str, float]:
        """As reported: seconds, and tokens per second after the first forward."""
        return {
            "queued_seconds": self.queued,
            "time_to_first_token": self.first_token,
            "first_tokens": self.first_tokens,
            "total_seconds": self.total,
            "decode_seconds": self.decode,
            "draft_seconds": self.draft,
            "target_seconds": self.target,
            "tokens_per_second": (tokens - self.first_tokens) / self.decode if self.decode else 0.0,
        }


@dataclass
class GenerationOutput:
    """One generated continuation."""

    text: str
    token_ids: list[int]
    finish_reason: str  # "stop", "length"; "abort" if it was cancelled, "error" if it failed, "running" if it goes on
    seed: int  # give it again to get the same tokens
    prompt_token_ids: list[int]
    drafted_by: list[str | None]  # per token, the drafter that guessed it; None = the target's own
    # method, acceptance_method, exactness, lossless, drafter_error, timing, speculative_decoding
    metrics: dict[str, Any]
    logprobs: list[Logprob] | None = None
    prompt_logprobs: list[Logprob | None] | None = None  # per token of the prompt; None for the first
    index: int = 0  # which of the request's n outputs
    prompt: str | None = None
    stop_reason: int | str | None = None  # the stop token or stop string that ended it; None for end of sequence


def behind_first(outputs: Sequence[GenerationOutput]) -> tuple[int, float]:
    """How many tokens of requests that ran together came behind the first forward, and in how many seconds."""
    times = [output.metrics["timing"] for output in outputs]
    tokens = sum(len(o.token_ids) - int(t["first_tokens"]) for o, t in zip(outputs, times, strict=True))
    return tokens, max(t["total_seconds"] for t in times) - min(t["time_to_first_token"] for t in times)


@dataclass(frozen=True)
class StepEvent:
    """What a step brought to one output; several steps, if its reader was slow."""

    index: int  # which output of the request
    token_ids: list[int]
    texts: list[str]  # per token; empty while a character or a stop string is incomplete
    drafted_by: list[str | None]  # per token
    logprobs: list[Logprob] | None = None  # per token, if asked for
    finish_reason: str | None = None
    output: GenerationOutput | None = None  # with the last
    rest: str = ""  # text that was held back, where an output ends without another token

    @property
    def text(self) -> str:
        """What is new of the output's text."""
        return "".join(self.texts) + self.rest

    def part(self, some: slice) -> StepEvent:
        """The same of some of its tokens."""
        logprobs = self.logprobs and self.logprobs[some]
        tokens, texts, by = self.token_ids[some], self.texts[some], self.drafted_by[some]
        return replace(self, token_ids=tokens, texts=texts, drafted_by=by, logprobs=logprobs)


@dataclass(frozen=True)
class TokenEvent:
    """One token of a stream. `text` may be empty while a character or a stop string is incomplete."""

    token_id: int
    text: str
    drafted_by: str | None
    finish_reason: str | None = None
    output: GenerationOutput | None = None  # with the last token
