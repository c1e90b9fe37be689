"""Decoding replayed from recorded texts on a made-up machine: what would be drafted, and how long it would take.

A trace is a request to SmolLM2-135M-Instruct (bfloat16) as it was answered, and for each place of the answer how many
of the next five tokens the same model with int4 weights guesses right. The cheap sources need no record: they read the
text. Time is counted, not measured.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from outrider import Draft, Drafter, SamplingParams, drafters
from outrider.config import SpeculativeConfig
from outrider.draft import Verdict
from outrider.runner import Output
from outrider.sequence import Sequence


@dataclass(frozen=True)
class Trace:
    suite: str
    temperature: float
    prompt: list[int]
    output: list[int]
    draft: str  # digits, one for each place of the output


TRACES = [Trace(**own) for own in json.loads(Path(__file__).with_name("traces.json").read_text())]


class Machine(NamedTuple):
    """Seconds of a forward are 1, and `row` for each row beyond the first `free`, and `read` for a prompt's tokens."""

    row: float
    free: int = 1
    draft: float = 0.3  # of the recorded model: a token, for one sequence ...
    more: float = 0.05  # ... and each further one
    read: float = 0.01

    def forward(self, rows: int, read: int = 0) -> float:
        return 1 + self.row * max(0, rows - self.free) + self.read * read


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Recorded(Drafter):
    """The recorded model: as many right tokens as the trace says, and then a wrong one."""

    name = "recorded"

    def __init__(self, traces: dict[int, Trace], machine: Machine, clock: Clock, k: int = 5) -> None:
        super().__init__(k)
        self.traces, self.machine, self.clock, self.have = traces, machine, clock, dict[int, int]()

    def propose(self, seqs: list[Sequence], k: int) -> list[Draft]:
        if k:
            self.clock.now += k * (self.machine.draft + self.machine.more * (len(seqs) - 1))
        drafts = []
        for seq in seqs:
            lag, self.have[seq.id] = len(seq.tokens) - self.have.get(seq.id, 0), len(seq.tokens)
            self.clock.now += 0.3 * self.machine.read * lag if lag > 64 else 0.0
            trace, at = self.traces[seq.id], len(seq.output)
            right = int(trace.draft[at]) if at < len(trace.draft) else 0
            drafts.append(Draft.chain((trace.output[at : at + right] + [0] * k)[: min(k, 5)]))
        return drafts


Make = Callable[[dict[int, Trace], Machine, Clock], Drafter]


def fixed(text: str) -> Make:
    """A drafter by its short form; `recorded:k=3` is the recorded model."""

    def make(traces: dict[int, Trace], machine: Machine, clock: Clock) -> Drafter:
        config = SpeculativeConfig.parse(text)
        if config.method == "recorded":
            return Recorded(traces, machine, clock, int(config.num_speculative_tokens or 5))
        return drafters.create(config)

    return make


def auto(traces: dict[int, Trace], machine: Machine, clock: Clock) -> Drafter:
    """All of them compete."""
    made: Any = drafters.create(SpeculativeConfig.of({"method": "auto", "drafters": [{"method": "ngram"}]}))
    wide = {"method": "suffix", "tree": True, "suffix_decoding_max_spec_factor": 2.0}
    made.parts = [drafters.inner("auto", wide), Recorded(traces, machine, clock)]
    made._start()
    made.clock = clock
    return made


class Replayed(NamedTuple):
    """Per request its seconds and steps: (when it ended, tokens emitted) of each."""

    seconds: float
    tokens: int
    steps: list[tuple[float, int]]
    drafter: Drafter

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def replay(
    make: Make, traces: list[Trace], machine: Machine, batch: int = 1, hiccup: Callable[[], float] = lambda: 1.0
) -> Replayed:
    """Answer the traces in their order, `batch` at a time, each new one as another ends.

    `hiccup` says how many times longer a forward seems to take than it does: time that is seen, and not counted.
    """
    clock, at, unreal = Clock(), dict[int, Trace](), 0.0
    drafter = make(at, machine, clock)
    waiting, running, seen, steps = list(traces), list[Sequence](), set[int](), []
    while waiting or running:
        while waiting and len(running) < batch:
            trace = waiting.pop(0)
            params = SamplingParams(temperature=trace.temperature, max_tokens=len(trace.output))
            running.append(Sequence(trace.prompt, params, 1))
            at[running[-1].id] = trace
        asked = not drafter.rests([seq.id for seq in running])
        drafts = drafter.propose(running, drafter.num_speculative_tokens) if asked else [Draft()] * len(running)
        drafts = [draft.clip(seq.room - 1, 2**62) for seq, draft in zip(running, drafts, strict=True)]
        read = sum(len(seq.tokens) - 1 for seq in running if seq.id not in seen)
        seen |= {seq.id for seq in running}
        rows = sum(1 + len(draft) for draft in drafts)
        seconds, longer = machine.forward(rows, read), hiccup()
        clock.now += seconds * longer
        unreal += seconds * (longer - 1)
        verdicts = [
            _walk(draft, at[seq.id].output[len(seq.output) :]) for seq, draft in zip(running, drafts, strict=True)
        ]
        for seq, verdict in zip(running, verdicts, strict=True):
            seq.tokens += verdict.tokens
        none = torch.zeros(rows, 1)
        output = Output(drafts, none, none, read)
        if asked:
            drafter.observe(running, verdicts, output)
        steps.append((clock.now - unreal, sum(len(verdict.tokens) for verdict in verdicts)))
        for seq in [seq for seq in running if not seq.room]:
            drafter.forget(seq)
            running.remove(seq)
    return Replayed(clock.now - unreal, sum(n for _, n in steps), steps, drafter)


def _walk(draft: Draft, truth: list[int]) -> Verdict:
    path, node = list[int](), -1
    while len(path) < len(truth) - 1:
        here = [i for i in range(draft.verifiable) if draft.parents[i] == node and draft.tokens[i] == truth[len(path)]]
        if not here:
            break
        path.append(node := here[0])
    return Verdict(path, truth[: len(path) + 1], draft.verifiable, draft.is_chain)
