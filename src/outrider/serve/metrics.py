"""Prometheus metrics under vLLM's names and labels; times of a step in finer buckets, for models on CPUs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from outrider.async_llm import AsyncLLM, Progress
from outrider.engine import Request

FIRST = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
BETWEEN = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
WHOLE = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
COUNTING = 0.5  # seconds
FORWARD = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def counts(most: int) -> list[int]:
    """1, 2, 5, 10, 20, 50, ... up to `most`."""
    found = [m * 10**e for e in range(len(str(most))) for m in (1, 2, 5)]
    return [n for n in found if n <= most]


class Counted(Collector):
    """What the engine counts itself."""

    def __init__(self, llm: AsyncLLM, labels: dict[str, str]) -> None:
        self._llm, self._labels = llm, labels

    def collect(self) -> Iterator[CounterMetricFamily]:
        """As it stands."""
        engine = self._llm.llm.engine
        for name, what, value in (
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", engine.prefix_queries),
            ("prefix_cache_hits", "Prompt tokens found there.", engine.prefix_hits),
            ("num_preemptions", "Times that an output gave its memory back, to go on later.", engine.preemptions),
        ):
            family = CounterMetricFamily(f"vllm:{name}", what, labels=list(self._labels))
            family.add_metric(list(self._labels.values()), value)
            yield family


class Metrics:
    """Of one server. `progress` is told what each step brought, `done` about each HTTP request."""

    def __init__(self, model_name: str, llm: AsyncLLM) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": "0"}
        self._llm = llm
        self._news: list[Progress] = []  # that is not counted yet
        self._counted = 0.0  # when it was last
        self._seen: WeakKeyDictionary[Request, tuple[float, int]] = WeakKeyDictionary()  # last news, steps counted
        if isinstance(llm, AsyncLLM):  # not where engines are elsewhere (ray.py)
            self._engine_metrics(llm.llm.engine.max_len)
        self._http = Counter("http_requests", "HTTP requests.", ("method", "handler", "status"), registry=self.registry)
        self._http_seconds = Histogram(
            "http_request_duration_seconds", "Seconds from request to the answer's end.", ("method", "handler"),
            buckets=FIRST, registry=self.registry,
        )  # fmt: skip

    def _engine_metrics(self, most: int) -> None:
        llm = self._llm.llm
        self._gauge("num_requests_running", "Outputs that share forwards.", lambda: len(llm.engine.running))
        self._gauge("num_requests_waiting", "Outputs that wait.", lambda: len(llm.engine.waiting))
        self._gauge(
            "kv_cache_usage_perc", "Share (0 to 1) of the memory for keys and values.", lambda: llm.engine.kv_usage
        )
        self.registry.register(Counted(self._llm, self._labels))
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens read.")
        self._cached = self._counter("prompt_tokens_cached", "Prompt tokens found in the prefix cache.")
        self._generated = self._counter("generation_tokens", "Tokens generated.")
        self._drafts = self._counter("spec_decode_num_drafts", "Steps with a draft, per output.")
        self._drafted = self._counter("spec_decode_num_draft_tokens", "Tokens drafted.")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "Drafted tokens accepted.")
        self._success = Counter(
            "vllm:request_success",
            "Outputs that have ended.",
            (*self._labels, "finished_reason"),
            registry=self.registry,
        )
        for reason in ("stop", "length", "abort", "error"):  # from the start: of what was not there no rise is seen
            self._success.labels(**self._labels, finished_reason=reason)
        self._position = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Drafted tokens accepted, by depth in the draft.",
            (*self._labels, "position"), registry=self.registry,
        )  # fmt: skip
        self._first = self._histogram("time_to_first_token_seconds", "Until the first token.", FIRST)
        self._between = self._histogram("inter_token_latency_seconds", "Between steps that bring tokens.", BETWEEN)
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "Per token after the first, mean of a request.", BETWEEN
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "From arrival to end.", WHOLE)
        self._queue = self._histogram("request_queue_time_seconds", "Until the engine began with it.", WHOLE)
        self._prefill = self._histogram("request_prefill_time_seconds", "From there to the first token.", WHOLE)
        self._inference = self._histogram("request_inference_time_seconds", "From there to the end.", WHOLE)
        self._decode = self._histogram("request_decode_time_seconds", "From the first token to the end.", WHOLE)
        sizes = counts(most)
        self._prompt_size = self._histogram("request_prompt_tokens", "Tokens of a prompt.", sizes)
        self._output_size = self._histogram("request_generation_tokens", "Tokens of an output.", sizes)
        self._asked_size = self._histogram("request_params_max_tokens", "max_tokens of a request.", sizes)
        self._asked_n = self._histogram("request_params_n", "n of a request.", (1, 2, 5, 10, 20))
        self._forward = self._histogram(
            "iteration_tokens_total",
            "Tokens of a step: of answers, and of prompts that it was the last to read.",
            FORWARD,
        )

    def _gauge(self, name: str, what: str, value: Callable[[], float]) -> None:
        gauge = Gauge(f"vllm:{name}", what, list(self._labels), registry=self.registry).labels(**self._labels)
        gauge.set_function(value)

    def _counter(self, name: str, what: str) -> Counter:
        return Counter(f"vllm:{name}", what, list(self._labels), registry=self.registry).labels(**self._labels)

    def _histogram(self, name: str, what: str, buckets: Any) -> Histogram:
        made = Histogram(f"vllm:{name}", what, list(self._labels), buckets=buckets, registry=self.registry)
        return made.labels(**self._labels)

    def progress(self, news: list[Progress]) -> None:
        """What steps brought. It is counted now and then: counting much at once takes half the time."""
        self._news += news
        if (now := time.monotonic()) >= self._counted + COUNTING:
            self._counted = now
            self._count()

    def _count(self) -> None:
        news, self._news = self._news, []
        for _, step in groupby(news, lambda each: each.at):
            written = read = 0
            for each in step:
                request, timing = each.request, each.request.timing
                before, steps = self._seen.get(request, (0.0, 0))
                written += each.tokens
                if each.tokens and not before:
                    read += request.seq.prompt_len
                    self._first.observe(timing.first_token)
                    self._cached.inc(request.cached)
                elif each.tokens:
                    self._between.observe(each.at - before)
                self._seen[request] = each.at, self._count_drafts(request, steps)
                if each.finished:
                    self._ended(request)
            if written:
                self._forward.observe(read + written)
                self._prompt_tokens.inc(read)
                self._generated.inc(written)

    def _count_drafts(self, request: Request, steps: int) -> int:
        spec = request.seq.metrics
        until = len(spec.accepted)
        for drafted, accepted in zip(spec.drafted[steps:until], spec.accepted[steps:until], strict=True):
            if drafted:
                self._drafts.inc()
                self._drafted.inc(drafted)
                self._accepted.inc(accepted)
                for position in range(accepted):
                    self._position.labels(**self._labels, position=str(position)).inc()
        return until

    def _ended(self, request: Request) -> None:
        seq, timing = request.seq, request.timing
        self._success.labels(**self._labels, finished_reason=seq.finish_reason or "error").inc()
        self._e2e.observe(timing.total)
        self._prompt_size.observe(seq.prompt_len)
        self._output_size.observe(request.ready)
        self._asked_size.observe(seq.params.max_tokens)
        if request.index == 0:
            self._asked_n.observe(seq.params.n)
        self._queue.observe(timing.queued or timing.total)
        if timing.queued:
            self._inference.observe(timing.total - timing.queued)
        if timing.first_token:
            self._prefill.observe(timing.first_token - timing.queued)
            self._decode.observe(rest := timing.total - timing.first_token)
            if request.ready > 1:
                self._per_token.observe(rest / (request.ready - 1))

    def done(self, method: str, route: str, status: int, seconds: float) -> None:
        """An HTTP request is over."""
        self._http.labels(method, route, str(status)).inc()
        self._http_seconds.labels(method, route).observe(seconds)

    def text(self) -> bytes:
        """What /metrics answers."""
        self._count()
        return generate_latest(self.registry)
