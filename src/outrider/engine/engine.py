"""Requests in, tokens out: admits what fits, steps all running sequences together, takes each away as it ends."""

from __future__ import annotations

import os
import secrets
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from outrider.config import EngineConfig, Rule, SamplingParams, promised
from outrider.control import Controller
from outrider.engine.text import TextStream
from outrider.errors import ConfigError, EmptyPrompt, RequestError, RequestTooLong
from outrider.outputs import GenerationOutput, Logprob, Timing
from outrider.runner import Runner
from outrider.sequence import Sequence
from outrider.speculate import Drafter, StepTimes, step
from outrider.verify import COUPLED


@dataclass
class Request:
    """One sequence on its way through the engine, and what is known of it so far."""

    seq: Sequence
    stream: TextStream
    method: str
    index: int = 0
    drafted_by: list[str | None] = field(default_factory=list)  # per output token
    logprobs: list[Logprob] = field(default_factory=list)
    timing: Timing = field(default_factory=Timing)

    @property
    def finished(self) -> bool:
        """Whether no more tokens will come."""
        return self.seq.finish_reason is not None


class Engine:
    """Runs requests on one target runner with one drafter. Not thread-safe: one thread steps it."""

    def __init__(
        self,
        runner: Runner,
        drafter: Drafter,
        k: int | None,
        config: EngineConfig,
        tokenizer: Any = None,
        exactness: str = "law",
        rule: Rule = COUPLED,
    ) -> None:
        self.runner, self.drafter, self.k = runner, drafter, k
        self.controller = Controller()  # asked if k is None
        self.config, self.tokenizer, self.exactness, self.rule = config, tokenizer, exactness, rule
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.max_len = config.max_model_len or runner.max_len
        if self.max_len > runner.max_len:
            raise ConfigError(f"max_model_len {self.max_len} is over the model's context of {runner.max_len}; lower it")
        self.kv_memory = config.kv_memory or int(0.9 * free_memory(runner.model.device))

    def add(self, prompt: list[int], params: SamplingParams) -> list[Request]:
        """Queue a prompt; one request for each of the n outputs asked for.

        Raises EmptyPrompt, RequestError for impossible token ids, and RequestTooLong, before anything runs, if the
        context or the memory cannot hold prompt and output.
        """
        self._check(prompt, params)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        requests = []
        for i in range(params.n):
            seq = Sequence(prompt, params, (seed + i) % 2**64, eos=self.runner.model.config.eos, max_len=self.max_len)
            request = Request(seq, TextStream(self.tokenizer, params), self.drafter.name, i)
            request.seq.metrics.num_spec_tokens = self.controller.limit if self.k is None else self.k
            if params.stops:
                seq.stop_check = lambda token, stream=request.stream: stream.feed([token])
            requests.append(request)
        self.waiting.extend(requests)
        return requests

    def _check(self, prompt: list[int], params: SamplingParams) -> None:
        vocab, need = self.runner.model.config.vocab_size, len(prompt) + params.max_tokens
        if not prompt:
            raise EmptyPrompt("the prompt is empty; give at least one token")
        if bad := [t for t in prompt if isinstance(t, bool) or not isinstance(t, int) or not 0 <= t < vocab]:
            raise RequestError(f"prompt token {bad[0]!r} is not a token id below {vocab}")
        if bad := [t for t in (*(params.logit_bias or ()), *(params.stop_token_ids or ())) if t >= vocab]:
            raise ConfigError(f"logit_bias and stop_token_ids: {bad[0]} is not a token id below {vocab}")
        if params.stops and self.tokenizer is None:
            raise ConfigError("stop strings need a tokenizer, and this model has none; use stop_token_ids")
        if need > self.max_len:
            rest = self.max_len - len(prompt)
            cure = f"lower max_tokens to {rest} or shorten the prompt" if rest > 0 else "shorten the prompt"
            raise RequestTooLong(
                f"the prompt has {len(prompt)} tokens and max_tokens asks for {params.max_tokens} more: "
                f"together {need}, over the context of {self.max_len}; {cure}"
            )
        if (size := self._kv_bytes(need)) > self.kv_memory:
            raise RequestTooLong(
                f"{need} tokens of prompt and output need {size / 2**20:.0f} MiB for keys and values, over the "
                f"{self.kv_memory / 2**20:.0f} MiB there are; lower max_tokens, shorten the prompt or raise kv_memory"
            )

    def _kv_bytes(self, tokens: int) -> int:
        return self.runner.kv.nbytes(tokens) + self.drafter.kv_bytes(tokens)

    def _admit(self) -> None:
        held = sum(self._kv_bytes(r.seq.max_len) for r in self.running)
        while self.waiting and len(self.running) < self.config.max_num_seqs:
            held += self._kv_bytes(self.waiting[0].seq.max_len)
            if self.running and held > self.kv_memory:
                break
            self.running.append(self.waiting.popleft())

    def step(self) -> list[tuple[Request, list[int]]]:
        """One forward for all running requests; returns each with its new tokens. Nothing to do: an empty list."""
        self._admit()
        if not self.running:
            return []
        times, running = StepTimes(), self.running
        k = self.controller.plan(len(running)) if self.k is None else self.k
        with torch.inference_mode():
            verdicts = step(self.runner, self.drafter, [r.seq for r in running], k, times, self.rule)
        for verdict in verdicts:
            if verdict.error:
                raise verdict.error
        if all(r.timing.first_token for r in running):  # a step that reads prompts says nothing about the next
            self.controller.learn(k, verdicts, times.rows, times.draft, times.target)
        news = []
        now = time.perf_counter()
        for request, verdict in zip(running, verdicts, strict=True):
            accepted, t = len(verdict.path), request.timing
            request.seq.metrics.add(verdict.drafted, accepted, len(verdict.tokens))
            by = [self.drafter.name] * accepted + [None] * (len(verdict.tokens) - accepted)
            request.drafted_by += by
            request.logprobs += verdict.logprobs
            if t.first_token:  # the first step is prefill: reported as time to first token
                t.decode, t.draft, t.target = t.decode + times.total, t.draft + times.draft, t.target + times.target
            else:
                t.first_token, t.first_tokens = now - t.started, len(verdict.tokens)
            news.append((request, verdict.tokens))
        for request in running:
            if request.finished:
                request.timing.total = now - request.timing.started
                self._release(request)
        self.running = [r for r in running if not r.finished]
        return news

    def abort(self, request: Request) -> None:
        """Stop a request and give its memory back; what it has stays readable."""
        if not any(r is request for r in (*self.running, *self.waiting)):
            return  # it has ended by itself
        request.seq.finish_reason = request.seq.finish_reason or "abort"
        request.timing.total = time.perf_counter() - request.timing.started
        self.running = [r for r in self.running if r is not request]
        self.waiting = deque(r for r in self.waiting if r is not request)
        self._release(request)

    def run(self) -> Iterator[tuple[Request, list[int]]]:
        """Step until nothing is left."""
        while self.waiting or self.running:
            yield from self.step()

    def _release(self, request: Request) -> None:
        self.runner.free(request.seq)
        self.drafter.forget(request.seq)
        request.seq.memory.clear()

    def output(self, request: Request) -> GenerationOutput:
        """A request's result so far."""
        seq, stream = request.seq, request.stream
        tokens = seq.output
        ended_by_token = seq.finish_reason == "stop" and not stream.stopped  # eos or a stop token: not part of the text
        stream.feed(tokens[len(stream.tokens) : len(tokens) - ended_by_token], final=True)
        return GenerationOutput(
            text=stream.text,
            token_ids=tokens,
            finish_reason=seq.finish_reason or "running",
            seed=seq.seed,
            prompt_token_ids=seq.tokens[: seq.prompt_len],
            drafted_by=request.drafted_by,
            metrics={
                "method": request.method,
                "acceptance_method": (rule := self.rule.method),
                "exactness": (exactness := promised(rule, "law" if seq.branched else self.exactness)),
                "lossless": exactness != "lossy",
                "speculative_decoding": request.seq.metrics.as_dict(),
                "timing": request.timing.as_dict(len(tokens)),
            },
            logprobs=request.logprobs if seq.params.logprobs is not None else None,
            index=request.index,
        )


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on a device: CUDA's own count, or the machine's, or its control group's."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:  # a control group's limit; the page cache it counts as used can be had
        group = Path("/sys/fs/cgroup")
        used = int((group / "memory.current").read_text("ascii"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text("ascii").splitlines())
        used -= int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
        free = min(free, int((group / "memory.max").read_text("ascii")) - used)
    except (OSError, ValueError):
        pass  # no limit
    return max(0, free)
