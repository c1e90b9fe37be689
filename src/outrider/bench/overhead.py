"""What a drafter costs beside the forwards: seconds a step in `propose` and `observe`, by the length of the history.

The history is a text, which is continued by itself, token by token, as if the target had refused every draft. The
forward's outputs, which some drafters look at, are noise: no forward is needed but the one to compare with, of one
token of the target behind a short history (it only grows with the history, so the shares are upper bounds).

And what a plain step costs outside the kernels, all that the engine does included; and what drafting costs between
forwards that are real, which leave nothing of it in the caches.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from outrider import corpus
from outrider.bench.run import label
from outrider.config import SamplingParams, SpeculativeConfig
from outrider.draft import Verdict
from outrider.errors import ConfigError, interrupts_wait
from outrider.llm import LLM
from outrider.ops import untouched
from outrider.runner import Output
from outrider.sequence import Sequence

STEPS = 64  # timed at each length; figures are medians


@dataclass(frozen=True)
class Cost:
    """Of one method at one length of history. Seconds."""

    method: str
    history: int
    first: float  # the first step, which reads the history
    step: float
    forward: float  # of one token of the target

    @property
    def share(self) -> float:
        """Of a forward that a step costs."""
        return self.step / self.forward


@dataclass(frozen=True)
class Plain:
    """A step of so many sequences. Seconds; `outside` of the kernels, None where these run layer by layer.

    `drafting` is what the drafter took, checks of what it says included, on average.
    """

    batch: int
    step: float
    outside: float | None
    drafting: float


def plain(llm: LLM, prompt: list[int], batches: list[int], **sampling: Any) -> Iterator[Plain]:
    """Measure plain steps behind a prompt, with so many sequences at once, greedy unless `sampling` says otherwise."""
    llm.speculative_config = None
    yield from steps(llm, prompt, batches, **sampling)


def steps(llm: LLM, prompt: list[int], batches: list[int], **sampling: Any) -> Iterator[Plain]:
    """Measure steps with the drafter that is in place."""
    model = llm.runner.model
    params = SamplingParams(**{"temperature": 0, "max_tokens": STEPS + 2, "ignore_eos": True, **sampling})
    for batch in batches:
        requests = [request for _ in range(batch) for request in llm.engine.add(prompt, params)]
        steps, outside, drafting = list[float](), list[float](), list[float]()
        with untouched(model.device), torch.inference_mode(), interrupts_wait() as late:  # as in `generate`: once
            while not (late or all(request.finished for request in requests)):
                native, drafted, began = model.native_seconds or 0.0, requests[0].timing.draft, time.perf_counter()
                llm.engine.step_within()
                steps.append(time.perf_counter() - began)
                outside.append(steps[-1] - ((model.native_seconds or 0.0) - native))
                drafting += [requests[0].timing.draft - drafted] if len(steps) > 1 else []
        walked = model.native_seconds is not None
        kernels = median(outside[1:]) if walked else None  # the first step reads the prompts
        yield Plain(batch, median(steps[1:]), kernels, fmean(drafting))  # a drafter may rest in most steps


def run(llm: LLM, methods: list[SpeculativeConfig], text: Path, histories: list[int]) -> Iterator[Cost]:
    """Measure each method at each length. Raises ConfigError for too short a text, no history, or no tokenizer."""
    if min(histories) < 1:
        raise ConfigError(f"a history must be at least 1 token, not {min(histories)}")
    if llm.tokenizer is None:
        raise ConfigError("this model has no tokenizer, and the text is read by it; give one that has")
    tokens: list[int] = []
    for document in corpus.texts(corpus.files([text])):
        tokens += llm.tokenizer(document, verbose=False)["input_ids"]
        if len(tokens) > max(histories) + STEPS:
            break
    if len(tokens) <= (needed := max(histories) + STEPS):
        raise ConfigError(f"{text} has {len(tokens)} tokens, {needed + 1} are needed; give a longer text")
    forward = _forward(llm, tokens[:16])
    for history in histories:
        for config in methods:
            with nothing_kept():  # what passes for forwards here must not be taken for their costs
                llm.speculative_config = config
            with untouched(llm.runner.model.device):
                times = _steps(llm, tokens[: history + STEPS + 1], history)
            yield Cost(label(config), history, times[0], median(times[1:]), forward)


@contextmanager
def nothing_kept() -> Iterator[None]:
    """Drafters that are made here know no costs of earlier runs, and leave none."""
    before = os.environ.get("OUTRIDER_CACHE")
    os.environ["OUTRIDER_CACHE"] = ""
    try:
        yield
    finally:
        del os.environ["OUTRIDER_CACHE"]
        os.environ |= {} if before is None else {"OUTRIDER_CACHE": before}


def _forward(llm: LLM, tokens: list[int]) -> float:
    seq, times = Sequence(tokens, SamplingParams(), 0), []
    llm.runner.extend([seq])
    for _ in range(9):
        seq.tokens.append(tokens[0])
        began = time.perf_counter()
        llm.runner.extend([seq])
        times.append(time.perf_counter() - began)
    llm.runner.free(seq)
    return median(times)


def _steps(llm: LLM, tokens: list[int], history: int) -> list[float]:
    """Seconds of each step of the drafter in place, on the tokens behind `history`."""
    drafter, config, noise = llm.engine.drafter, llm.runner.model.config, torch.Generator().manual_seed(0)
    seq, times = Sequence(tokens[:history], SamplingParams(temperature=0, max_tokens=2 * len(tokens)), 0), []
    for token in tokens[history:]:
        began = time.perf_counter()
        (draft,) = drafter.propose([seq], drafter.num_speculative_tokens)
        spent = time.perf_counter() - began
        rows = 1 + len(draft)
        logits = torch.randn(rows, config.vocab_size, generator=noise).to(llm.runner.model.device)
        hidden = torch.randn(rows, config.hidden_size, generator=noise).to(llm.runner.model.device)
        output = Output([draft], logits, hidden.to(llm.runner.model.dtype))
        seq.accept([token])
        began = time.perf_counter()
        drafter.observe([seq], [Verdict([], [token], draft.verifiable)], output)
        times.append(spent + time.perf_counter() - began)
    drafter.forget(seq)
    return times
