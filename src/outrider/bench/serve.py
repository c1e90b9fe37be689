"""Load on any OpenAI-compatible server, and what its users see of it.

Closed loop: so many users, each of whom asks again once answered. Open loop: requests arrive at random (Poisson) at a
rate, whether or not earlier ones are answered, and their times count from when they were due. Prompts, arrivals and
seeds follow from one seed. Times are taken at the client, over streams.
"""

from __future__ import annotations

import asyncio
import json
import random
import shlex
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from outrider.bench.report import require_matplotlib
from outrider.bench.run import provenance
from outrider.bench.suites import load_suite
from outrider.config import at_least, whole
from outrider.errors import ConfigError, brief

ENDPOINTS = {"chat": "/chat/completions", "completions": "/completions"}
TEXTS = ("content", "reasoning_content", "reasoning", "tool_calls")  # of a delta, what a reader sees
PERCENTILES = (50, 95, 99)
STRANGE = (ValueError, TypeError, AttributeError, LookupError, RecursionError)  # what reading no frame of ours raises
Show = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Level:
    """One load: `concurrency` users at a time (closed), or `rate` requests per second (open)."""

    concurrency: int | None = None
    rate: float | None = None

    def __str__(self) -> str:
        return f"{self.rate:g}/s" if self.rate else f"{self.concurrency} at a time"


OWN = {
    "model", "messages", "prompt", "stream", "stream_options", "max_tokens", "max_completion_tokens", "seed",
    "ignore_eos",
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """One run: levels one after the other. Raises ConfigError for what cannot be."""

    base_url: str
    model: str | None = None  # None: the first that the server lists
    api_key: str | None = None
    endpoint: str = "chat"
    suite: str = "chat"
    prompts: int | None = None  # different ones; None: as many as there are and are needed
    data: Path | None = None
    file: Path | None = None  # JSON lines with `prompt`, `messages` or `turns`, in place of a suite
    levels: list[Level] = field(default_factory=lambda: [Level(n) for n in (1, 4, 16)])
    requests: int = 32  # per level
    warmup: int = 2  # requests before the first level, not counted
    max_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    body: dict[str, Any] = field(default_factory=dict)  # further fields of each request
    timeout: float = 600.0  # seconds without a byte

    def __post_init__(self) -> None:
        at_least(self, {"requests": 1, "warmup": 0, "max_tokens": 1, "prompts": 1})
        if not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(f"--base-url must begin with http:// or https://, not {brief(self.base_url)}")
        if self.endpoint not in ENDPOINTS:
            raise ConfigError(f"endpoint {self.endpoint!r} is unknown; valid: {', '.join(ENDPOINTS)}")
        if not 0 < self.timeout < float("inf"):
            raise ConfigError(f"timeout must be over 0 seconds and finite, not {self.timeout:g}")
        for level in self.levels:
            if level.rate is None and (level.concurrency or 0) < 1:
                raise ConfigError(f"concurrency must be at least 1, not {level.concurrency}")
            if level.rate is not None and not 0 < level.rate < float("inf"):
                raise ConfigError(f"rate must be over 0 requests per second and finite, not {level.rate:g}")
        if not self.levels or len(set(self.levels)) < len(self.levels):
            raise ConfigError(f"each load runs once, and there must be one; given: {', '.join(map(str, self.levels))}")
        if own := sorted(set(self.body) & OWN):
            raise ConfigError(f"--body must not set {', '.join(own)}: the benchmark does")
        if (
            self.suite == "json"
            and self.file is None
            and not {"structured_outputs", "response_format"} & set(self.body)
        ):
            raise ConfigError("--suite json is constrained; say by what, in --body as structured_outputs")
        if find_spec("aiohttp") is None:
            raise ConfigError("`bench serve` needs aiohttp, which is missing; pip install 'outrider[bench]'")

    @property
    def asks(self) -> int:
        """Requests of the whole run, the warm-up's last."""
        return len(self.levels) * self.requests + self.warmup

    @property
    def root(self) -> str:
        """The API's address, with /v1."""
        return self.base_url.rstrip("/").removesuffix("/v1") + "/v1"


@dataclass
class Answer:
    """What became of one request. Seconds, from when it was due."""

    late: float = 0.0  # sent so long after it was due: the client's own delay
    frames: list[tuple[str, float]] = field(default_factory=list)  # what came, and when, until it is read
    first: float | None = None  # to the first text
    gaps: list[float] = field(default_factory=list)  # between the frames that brought text
    last: float = 0.0  # to the last text
    total: float = 0.0  # to the end of the stream
    tokens: int = 0
    prompt_tokens: int | None = None
    counted: bool = False  # by the server's usage; else `tokens` are frames
    finish: str | None = None
    error: str | None = None  # its kind
    said: str = ""  # an error's own words
    steps: int = 0  # forwards that the server counts, the tokens that each brought, and their drafts
    length: float = 0.0
    drafted: int | None = None
    accepted: int = 0


@dataclass(frozen=True)
class Row:
    """One JSON line: one level. Seconds; spreads are {"mean", "p50", "p95", "p99"}, None where nothing was measured."""

    load: str
    concurrency: int | None
    rate: float | None  # asked for, requests per second
    requests: int
    completed: int
    errors: dict[str, int]  # by kind
    said: dict[str, str]  # the first of each kind
    seconds: float  # from the first request to the last answer's end
    requests_per_second: float  # completed
    tokens_per_second: float  # of completed answers
    prompt_tokens: int | None
    new_tokens: int
    uncounted: int  # answers without the server's count: their tokens are frames, a lower bound
    time_to_first_token: dict[str, float] | None
    time_between_frames: dict[str, float] | None  # all gaps of all answers
    time_per_output_token: dict[str, float] | None  # (last text - first text) / (tokens - 1), one per answer
    end_to_end: dict[str, float] | None
    acceptance_length: float | None  # tokens a forward, where the server tells, and of the forwards that it counts
    draft_acceptance_rate: float | None
    finish: dict[str, int]
    late: float  # the most that the client sent a request after it was due
    base_url: str
    model: str
    endpoint: str
    source: str
    prompts: int  # different ones, asked in turn
    asks: int  # requests of the whole run, the warm-up included
    max_tokens: int
    temperature: float
    seed: int
    ignore_eos: bool
    body: dict[str, Any]
    hardware: dict[str, Any]  # the client's
    versions: dict[str, str]
    commit: str
    command: str
    date: str


# --- prompts --------------------------------------------------------------------------------------------------------


def prompts(s: Settings) -> tuple[str, list[Any]]:
    """Where they are from, and what each request asks: text, messages or token ids. Raises ConfigError."""
    if s.file is None:
        suite = load_suite(s.suite, s.prompts, s.data)
        need = min(s.asks, len(suite.prompts))
        chosen = [suite.prompts[i * len(suite.prompts) // need] for i in range(need)]
        return f"{s.suite} ({suite.source})", list(chosen)
    try:
        numbered = enumerate(s.file.read_text("utf-8-sig").split("\n"), 1)
        lines = [(i, json.loads(line)) for i, line in numbered if line.strip()]
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{s.file} is not readable as JSON lines: {error}") from None
    found = [_asked(line, f"{s.file}, line {i}") for i, line in lines][: s.prompts or s.asks]
    if not found:
        raise ConfigError(f"{s.file} has no prompts; each line is an object with `prompt`, `messages` or `turns`")
    if s.endpoint == "completions" and any(_is_chat(asked) for asked in found):
        raise ConfigError(f"{s.file} has messages, which are for --endpoint chat")
    if s.endpoint == "chat" and any(isinstance(asked, list) and not _is_chat(asked) for asked in found):
        raise ConfigError(f"{s.file} has token ids, which are for --endpoint completions")
    return s.file.name, found


def _is_chat(asked: Any) -> bool:
    return isinstance(asked, list) and isinstance(asked[0], dict)


def _asked(line: Any, where: str) -> Any:
    if isinstance(line, dict):
        turns = line.get("turns")
        found = line.get("messages") or line.get("prompt") or (turns[0] if isinstance(turns, list) and turns else None)
        if isinstance(found, str) or (isinstance(found, list) and {type(x) for x in found} in ({dict}, {int})):
            return found
    raise ConfigError(f"{where} has no `prompt` (text or token ids), `messages` or `turns`")


def request(s: Settings, model: str, asked: Any, number: int) -> dict[str, Any]:
    """The body of request `number` of the run. Each has a seed of its own, the same in every run."""
    what = {"prompt": asked}
    if s.endpoint == "chat":
        what = {"messages": asked if _is_chat(asked) else [{"role": "user", "content": asked}]}
    return {
        "model": model,
        **what,
        "max_tokens": s.max_tokens,
        "temperature": s.temperature,
        "seed": s.seed + number,
        **({"ignore_eos": True} if s.ignore_eos else {}),
        **s.body,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def arrivals(rate: float, count: int, seed: int) -> list[float]:
    """When requests are due, in seconds: a Poisson process, the first at 0."""
    law, due = random.Random(f"arrivals {seed}"), [0.0]
    while len(due) < count:
        due.append(due[-1] + law.expovariate(rate))
    return due


# --- one request ----------------------------------------------------------------------------------------------------


async def ask(session: Any, s: Settings, body: dict[str, Any], due: float) -> Answer:
    """Send it and hear the stream. Whatever goes wrong is in the answer; nothing is raised but cancellation."""
    import aiohttp

    answer = Answer(late=max(0.0, time.perf_counter() - due))
    try:
        async with session.post(s.root + ENDPOINTS[s.endpoint], json=body) as response:
            if response.status != 200:
                fail(answer, f"status {response.status}", message_in(await response.text()))
            else:
                async for data in _events(response):
                    answer.frames.append((data, time.perf_counter() - due))
                    if data == "[DONE]" or data.startswith('{"error"'):
                        break
    except (TimeoutError, asyncio.TimeoutError):
        fail(answer, "timeout", f"no byte for {s.timeout:g} s")
    except aiohttp.ClientConnectorError as error:
        fail(answer, "no connection", str(error))
    except (aiohttp.ClientError, OSError) as error:
        fail(answer, "disconnected", str(error) or type(error).__name__)
    except STRANGE as error:
        fail(answer, "not the protocol", f"{type(error).__name__}: {error}")
    answer.total = time.perf_counter() - due
    return answer


def understand(answer: Answer) -> None:
    """Make of the frames of an answer what they say."""
    frames, answer.frames = answer.frames, []
    try:
        if answer.error is None and not any([hear(answer, *frame) for frame in frames]) and answer.finish is None:
            fail(answer, "disconnected", "the stream ended before the answer did")
    except STRANGE as error:
        fail(answer, "not the protocol", f"{type(error).__name__}: {error}")


def fail(answer: Answer, kind: str, said: str) -> None:
    """Say of an answer why it failed."""
    answer.error, answer.said = kind, " ".join(said.split())[:300]


def message_in(text: str) -> str:
    """Of the text of an error, what it tells people."""
    try:
        error = json.loads(text)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return text


async def _events(response: Any) -> AsyncIterator[str]:
    """The data of server-sent events, of any length; comments and other fields are passed over."""
    rest = b""
    async for chunk in response.content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip().decode()


def hear(answer: Answer, data: str, now: float) -> bool:
    """One frame, which came `now`. True at the end."""
    if data == "[DONE]" or not data:
        return bool(data)
    frame = json.loads(data)
    if error := frame.get("error"):
        fail(answer, "error frame", str(error.get("message", error) if isinstance(error, dict) else error))
        return True
    for choice in frame.get("choices") or ():
        delta = choice.get("delta") or {}
        if choice.get("text") or any(delta.get(key) for key in TEXTS):
            if answer.first is None:
                answer.first = now
            else:
                answer.gaps.append(now - answer.last)
            answer.last = now
            answer.tokens += not answer.counted
        answer.finish = choice.get("finish_reason") or answer.finish
    usage = frame.get("usage") or {}
    if (count := whole(usage.get("completion_tokens"), 0)) is not None:
        answer.tokens, answer.counted, answer.prompt_tokens = count, True, whole(usage.get("prompt_tokens"), 0)
    spec = (frame.get("metrics") or {}).get("speculative_decoding") or {}
    if isinstance(steps := spec.get("num_spec_steps"), int):
        answer.steps, answer.length = steps, float(spec.get("mean_acceptance_length") or 0)
        answer.drafted = int(spec.get("num_draft_tokens") or 0)
        answer.accepted = int(spec.get("num_accepted_draft_tokens") or 0)
    elif isinstance(drafted := (frame.get("timings") or {}).get("draft_n"), int):  # llama-server
        answer.drafted, answer.accepted = drafted, int(frame["timings"].get("draft_n_accepted") or 0)
    return False


# --- levels ---------------------------------------------------------------------------------------------------------


def _session(s: Settings) -> Any:
    """A client with as many connections as there are requests. Only silence times out."""
    import aiohttp

    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=s.timeout, sock_read=s.timeout),
        headers={"Authorization": f"Bearer {s.api_key}"} if s.api_key else {},
    )


async def _level(
    s: Settings, level: Level, bodies: list[dict[str, Any]], done: Callable[[], None]
) -> tuple[float, list[Answer]]:
    """The seconds that one level took, and its answers."""
    answers: list[Answer] = []
    async with _session(s) as session:
        began = time.perf_counter()

        async def one(body: dict[str, Any], due: float) -> None:
            answers.append(await ask(session, s, body, due))
            done()

        if level.rate is not None:

            async def later(body: dict[str, Any], due: float) -> None:
                await asyncio.sleep(due - time.perf_counter())
                await one(body, due)

            due = [began + at for at in arrivals(level.rate, len(bodies), s.seed)]
            await asyncio.gather(*map(later, bodies, due))
        else:
            left = iter(bodies)

            async def user() -> None:
                for body in left:
                    await one(body, time.perf_counter())

            await asyncio.gather(*(user() for _ in range(level.concurrency or 1)))
        took = time.perf_counter() - began
    for answer in answers:  # not before: others' frames would wait for it, and a server's cores may be ours
        understand(answer)
    return took, answers


async def first_model(s: Settings) -> str:
    """The first that the server lists. Raises ConfigError."""
    import aiohttp

    try:
        async with _session(s) as session, session.get(s.root + "/models") as response:
            text = await response.text()
            if response.status != 200:
                said = " ".join(message_in(text).split())[:200]
                raise ConfigError(f"{s.root}/models answered {response.status}: {said}")
            return str(json.loads(text)["data"][0]["id"])
    except ConfigError:
        raise
    except (aiohttp.ClientError, TimeoutError, asyncio.TimeoutError, OSError) as error:
        raise ConfigError(f"no server answers at {s.root}: {str(error) or type(error).__name__}") from None
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{s.root}/models lists no model ({type(error).__name__}); name it with --model") from None


def run(s: Settings, show: Show = lambda *_: None) -> Iterator[Row]:
    """Warm up, then measure level after level.

    Raises ConfigError if the server answers none of the warm-up; at the end, if it has answered nothing.
    """
    source, asked = prompts(s)
    model = s.model or asyncio.run(first_model(s))

    def measure(level: Level, begin: int, count: int, what: str) -> tuple[float, list[Answer]]:
        finished = 0

        def done() -> None:
            nonlocal finished
            finished += 1
            show(what, finished, count)

        show(what, 0, count)
        bodies = [request(s, model, asked[i % len(asked)], i) for i in range(begin, begin + count)]
        return asyncio.run(_level(s, level, bodies, done))

    if s.warmup:
        _, answers = measure(Level(concurrency=s.warmup), s.asks - s.warmup, s.warmup, "warm-up")
        if all(answer.error for answer in answers):
            why = f"{answers[0].error}: {answers[0].said}"
            raise ConfigError(f"the server at {s.root} answered no request of the warm-up: {why}")
    rows = []
    for i, level in enumerate(s.levels):
        seconds, answers = measure(level, i * s.requests, s.requests, str(level))
        rows.append(row(s, level, model, source, len(asked), seconds, answers))
        yield rows[-1]
    if not any(each.completed for each in rows):
        kind = next(iter(rows[0].errors))
        raise ConfigError(f"the server at {s.root} answered no request; the first: {kind}: {rows[0].said[kind]}")


def spread(values: list[float]) -> dict[str, float] | None:
    """Mean and percentiles (interpolated) of seconds, or None of nothing."""
    if not values:
        return None
    found = np.percentile(values, PERCENTILES)
    return {"mean": float(np.mean(values))} | {f"p{p}": float(v) for p, v in zip(PERCENTILES, found, strict=True)}


def row(
    s: Settings, level: Level, model: str, source: str, different: int, seconds: float, answers: list[Answer]
) -> Row:
    """One level's figures. Answers that failed count as errors and nowhere else."""
    import torch

    good = [a for a in answers if a.error is None]
    bad = [a for a in answers if a.error is not None]
    told = [a for a in good if a.steps and a.length]
    drafted = sum(a.drafted or 0 for a in good)
    read = [a.prompt_tokens for a in good if a.prompt_tokens is not None]
    about = provenance(torch.device("cpu"))
    if s.api_key:  # nothing that is kept or shown has it
        about["command"] = about["command"].replace(shlex.quote(s.api_key), "***").replace(s.api_key, "***")
    per_token = [(a.last - a.first) / (a.tokens - 1) for a in good if a.first is not None and a.tokens > 1]
    return Row(
        load=str(level), concurrency=level.concurrency, rate=level.rate, requests=len(answers), completed=len(good),
        errors=dict(Counter(a.error for a in bad if a.error)), said={a.error: a.said for a in reversed(bad) if a.error},
        seconds=seconds, requests_per_second=len(good) / seconds,
        tokens_per_second=sum(a.tokens for a in good) / seconds,
        prompt_tokens=sum(read) if read else None, new_tokens=sum(a.tokens for a in good),
        uncounted=sum(not a.counted for a in good),
        time_to_first_token=spread([a.first for a in good if a.first is not None]),
        time_between_frames=spread([gap for a in good for gap in a.gaps]),
        time_per_output_token=spread(per_token),
        end_to_end=spread([a.total for a in good]),
        acceptance_length=sum(a.length * a.steps for a in told) / sum(a.steps for a in told) if told else None,
        draft_acceptance_rate=sum(a.accepted for a in good) / drafted if drafted else None,
        finish=dict(Counter(str(a.finish) for a in good)), late=max((a.late for a in answers), default=0.0),
        base_url=s.base_url, model=model, endpoint=s.endpoint, source=source, prompts=different, asks=s.asks,
        max_tokens=s.max_tokens, temperature=s.body.get("temperature", s.temperature), seed=s.seed,
        ignore_eos=s.ignore_eos, body=s.body, **about,
    )  # fmt: skip


# --- what is shown --------------------------------------------------------------------------------------------------

HEADER = ("load", "answers", "errors", "requests/s", "tokens/s", "first token ms", "between frames ms", "per token ms",
          "end to end s", "tokens a forward", "drafts kept")  # fmt: skip

PANELS = {
    "time_to_first_token": "first token, ms",
    "time_between_frames": "between frames, ms",
    "end_to_end": "end to end, ms",
}


def _three(found: dict[str, float] | None, scale: float = 1000, digits: int = 0) -> str:
    return "-" if found is None else " / ".join(f"{scale * found[f'p{p}']:,.{digits}f}" for p in PERCENTILES)


def cells(r: Row) -> list[str]:
    """A level under HEADER; three figures are p50 / p95 / p99."""
    return [
        r.load,
        str(r.completed),
        str(sum(r.errors.values()) or "-"),
        f"{r.requests_per_second:,.2f}",
        f"{r.tokens_per_second:,.1f}",
        _three(r.time_to_first_token),
        _three(r.time_between_frames, digits=1),
        _three(r.time_per_output_token, digits=1),
        _three(r.end_to_end, 1, 2),
        "-" if r.acceptance_length is None else f"{r.acceptance_length:.2f}",
        "-" if r.draft_acceptance_rate is None else f"{r.draft_acceptance_rate:.0%}",
    ]


def remarks(rows: list[Row]) -> list[str]:
    """What stands below the table."""
    r, h = rows[-1], rows[-1].hardware
    law = "greedy" if r.temperature == 0 else f"temperature {json.dumps(r.temperature)}"  # whatever --body says
    more = f", {json.dumps(r.body)}" if r.body else ""
    ends = f"exactly {r.max_tokens} tokens" if r.ignore_eos else f"at most {r.max_tokens} tokens"
    lines = [
        f"{r.model} at {r.base_url}, {r.endpoint}, {r.source}; {law}, seeds from {r.seed}, {ends} an answer{more}.",
        f"Three figures are p50 / p95 / p99. Client: {h['cpu']}, {h['cores']} cores, load {h['load']:.1f}; outrider "
        f"{r.versions['outrider']} ({r.commit}), {r.date[:10]}.",
    ]
    if r.asks > r.prompts:
        lines.append(
            f"{r.prompts} different prompts for {r.asks} requests: a server that remembers what it has read or written "
            "(a prefix cache, suffix drafts) is faster from the second time on."
        )
    for x in rows:
        lines += [f"{x.load}: {n} x {kind}: {x.said[kind]}" for kind, n in x.errors.items()]
        if x.uncounted:
            lines.append(f"{x.load}: {x.uncounted} answers came without usage; their tokens are frames, a lower bound.")
        if x.late > 0.05:
            lines.append(f"{x.load}: the client sent requests up to {1000 * x.late:.0f} ms late: it is at its limit.")
    return lines


def plot(rows: list[Row], path: Path) -> None:
    """Throughput and the percentiles over the load, as PNG: panels in a line for each kind of loop."""
    require_matplotlib()
    from matplotlib.figure import Figure

    kinds = [k for k in ("concurrency", "rate") if any(getattr(r, k) is not None for r in rows)]
    figure = Figure(figsize=(15, 3.6 * len(kinds)), layout="constrained")
    for line, kind in zip(figure.subplots(len(kinds), 4, squeeze=False), kinds, strict=True):
        found = sorted((r for r in rows if getattr(r, kind) is not None), key=lambda r: getattr(r, kind))
        at = [getattr(r, kind) for r in found]
        line[0].plot(at, [r.tokens_per_second for r in found], marker="o")
        line[0].set_ylabel("tokens/s")
        for panel, (name, title) in zip(line[1:], PANELS.items(), strict=True):
            for p in PERCENTILES:
                spreads = [(x, getattr(r, name)) for x, r in zip(at, found, strict=True)]
                points = [(x, 1000 * spread[f"p{p}"]) for x, spread in spreads if spread]
                if points:
                    panel.plot(*zip(*points, strict=True), marker="o", label=f"p{p}")
            panel.set_ylabel(title)
            if panel.lines:
                panel.legend(fontsize="x-small", frameon=False)
        for panel in line:
            panel.set_xlabel("requests at a time" if kind == "concurrency" else "requests per second")
            panel.set_ylim(bottom=0)
            panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{rows[0].model}, {rows[0].source}", fontsize="medium")
    figure.savefig(path, dpi=150, format="png")
