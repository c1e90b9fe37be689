"""Our server against the engine called directly and against others', and what users see while a long prompt is read.

Each server runs in a process of its own, the engine, with our server's weights and options, in this one. They take
turns, with the same prompts: token ids of a suite's texts. Whose turn it is not is stopped (SIGSTOP): some servers'
processes spin while they wait, on the cores of the others. The client computes there, too: it does as little as it can,
and its share is told.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import selectors
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import h11
import numpy as np
import torch

from outrider.bench import serve as load
from outrider.bench.run import provenance
from outrider.bench.suites import load_suite
from outrider.config import SamplingParams, SpeculativeConfig, at_least
from outrider.errors import ConfigError, brief, reason_of
from outrider.llm import LLM

READY = 600  # seconds that a server may take to load
END = 60  # seconds that it may take to end
SETTLE = 0.3  # seconds after which the threads of whoever had the turn before sleep
BESIDE = 4  # streams that run while a long prompt is read
ALIKE = 16  # streams whose prompts begin alike


@dataclass(frozen=True)
class Settings:
    """One run. Raises ConfigError for what cannot be."""

    model: str
    speculate: str = "none"
    streams: tuple[int, ...] = (1, 4, 16, 32)
    max_tokens: int = 64
    long: int = 4000  # tokens of the prompt that is read beside others
    shared: int = 1000  # tokens of the beginning that requests have in common
    repeats: int = 3
    suite: str = "chat"
    data: Path | None = None
    temperature: float = 0.0
    against: tuple[str, ...] = ()  # other servers: NAME=COMMAND, with {port} where the command wants it
    quantization: str | None = None
    activations: str | None = None

    def __post_init__(self) -> None:
        at_least(self, {"max_tokens": 2, "long": 2, "shared": 33, "repeats": 1})
        if self.suite == "json":
            raise ConfigError("--suite json is constrained, which requests here are not; name another")
        for each in self.against:
            name, _, command = each.partition("=")
            if not name.strip() or "{port}" not in command:
                raise ConfigError(f"against must be NAME=COMMAND with {{port}} in the command, not {brief(each)}")
            try:
                shlex.split(command)
            except ValueError as error:
                raise ConfigError(f"against: {brief(command)} is no command: {error}") from None


@dataclass(frozen=True)
class Row:
    """One JSON line: a figure of the server's and what it is compared with."""

    what: str
    unit: str
    server: float
    other: float
    against: str
    ratio: float  # server / other, the median of the rounds'
    rounds: list[tuple[float, float]]  # (server, other) each
    client: float | None  # cores that the server's client took, where streams are compared
    settings: dict[str, Any]
    hardware: dict[str, Any]
    versions: dict[str, str]
    commit: str
    command: str
    date: str


def run(s: Settings, show: load.Show = lambda *_: None) -> Iterator[Row]:
    """Measure; a row for each figure. Raises ConfigError if the server does not come up or refuses what is asked."""
    rounded: dict[str, Any] = {"quantization": s.quantization, "activations": s.activations}
    many, method = max(32, *s.streams), SpeculativeConfig.parse(s.speculate)
    llm = LLM(s.model, speculative_config=method, max_num_seqs=many, **rounded)
    room = llm.engine.max_len - s.max_tokens
    if max(s.long, s.shared + 16) > room:
        raise ConfigError(f"the context of {llm.engine.max_len} has no room for prompts of {s.long} and {s.shared}")
    some, vocab = random.Random(0), llm.runner.model.config.vocab_size

    suite = load_suite(s.suite, None, s.data)
    prompts = [ids for ids in suite.encode(llm) if len(ids) <= room]
    if not prompts:
        raise ConfigError(f"suite {s.suite} has no prompt that leaves room for {s.max_tokens} tokens")
    asked = itertools.cycle(prompts)

    def text(n: int) -> list[int]:
        return [some.randrange(vocab // 2) for _ in range(n)]

    def row(what: str, unit: str, against: str, rounds: list[tuple[float, float]], client: float | None = None) -> Row:
        server, other = (statistics.median(side) for side in zip(*rounds, strict=True))
        ratio = statistics.median(a / b for a, b in rounds)  # of neighbours in time: a machine has slow hours
        about = provenance(torch.device("cpu"))
        given = {**asdict(s), "data": str(s.data) if s.data else None, "prompts": len(prompts)}
        return Row(what, unit, server, other, against, ratio, rounds, client, given, **about)

    with ExitStack() as running:
        ours = [sys.executable, "-m", "outrider", "serve", s.model, "--port", "{port}", "--speculate", s.speculate]
        ours += ["--max-num-seqs", str(many), "--log-level", "error"]
        ours += [word for name, value in rounded.items() if value for word in (f"--{name}", value)]
        show("starting", 0, 1 + len(s.against))
        url, own = running.enter_context(_serving("our server", ours))
        sides: dict[str, tuple[int, Callable[[list[list[int]]], float]]] = {
            "the engine called directly": (0, partial(_direct, s, llm))
        }
        for i, each in enumerate(s.against, 1):
            show("starting", i, 1 + len(s.against))
            name, _, command = each.partition("=")
            other, group = running.enter_context(_serving(name, shlex.split(command)))
            there = replace(s, model=asyncio.run(load.first_model(load.Settings(other))))
            sides[name] = group, lambda ids, s=there, url=other: _over_http(s, url, ids)[0]  # type: ignore[misc]
        groups = [own, *(group for group, _ in sides.values() if group)]

        def compared(what: str, prompts: Callable[[], list[list[int]]]) -> Iterator[Row]:
            rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
            clients = []
            for i in range(s.repeats + 1):  # the first warms up
                show(what, i, s.repeats + 1)
                together = prompts()
                _turn(groups, own)
                server, client = _over_http(s, url, together)
                clients.append(client)
                for name, (group, side) in sides.items():
                    _turn(groups, group)
                    rounds[name].append((server, side(together)))
            for name in sides:
                yield row(what, "tokens/s", name, rounds[name][1:], statistics.median(clients[1:]))

        for n in s.streams:
            yield from compared(f"{n} streams", lambda n=n: [next(asked) for _ in range(n)])  # type: ignore[misc]

        def alike() -> list[list[int]]:
            begin = text(s.shared)
            return [begin + text(16) for _ in range(ALIKE)]

        yield from compared(f"{ALIKE} streams, {s.shared:,} tokens in common", alike)
        _turn(groups, own)
        gaps = []
        for i in range(s.repeats):
            show("a long prompt", i, s.repeats)
            beside = [[next(asked) for _ in range(BESIDE)] for _ in range(2)]
            gaps.append((_gap(s, url, beside[0], text(s.long)), _gap(s, url, beside[1])))
        title = f"p99 between frames of {BESIDE} streams, a prompt of {s.long} tokens being read"
        yield row(title, "ms", "without that prompt", gaps)
        firsts = []
        for i in range(s.repeats):
            show("a shared beginning", i, s.repeats)
            begin = text(s.shared)
            cold, warm = ([_ask(s, url, begin + text(16))[0][0].first or 0.0] for _ in range(2))
            firsts.append((1000 * warm[0], 1000 * cold[0]))
        yield row(f"first token behind {s.shared} tokens that were read before", "ms", "the first time", firsts)


def _turn(groups: list[int], running: int) -> None:
    """Let one of the groups of processes run, and stop the others."""
    for group in groups:
        os.killpg(group, signal.SIGCONT if group == running else signal.SIGSTOP)


@contextmanager
def _serving(name: str, command: list[str]) -> Iterator[tuple[str, int]]:
    """Start a server and wait until it is healthy: its URL, and its group of processes, which end at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [word.replace("{port}", str(port)) for word in command]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        try:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        except OSError as error:
            raise ConfigError(f"{name}: {command[0]} cannot be started: {reason_of(error)}") from None
        try:
            until = time.monotonic() + READY
            while time.monotonic() < until:
                if process.poll() is not None:
                    log.seek(0)
                    said = log.read().decode("utf-8", "replace").strip().splitlines()[-3:]
                    raise ConfigError(f"{name} ended with {process.returncode}: {' | '.join(said)}")
                with suppress(OSError, HTTPException), urlopen(f"{url}/health", timeout=5):
                    break
                time.sleep(0.1)
            else:
                raise ConfigError(f"{name} did not answer at {url}/health within {READY} seconds")
            yield url, process.pid
        finally:
            with suppress(ProcessLookupError):
                _turn([process.pid], process.pid)
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(END)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _ask(s: Settings, url: str, *prompts: list[int], late: list[int] | None = None) -> tuple[list[load.Answer], float]:
    """Answers to prompts that are asked at once, and to one that comes when all have begun; seconds of CPU it took.

    The servers' cores are ours: what comes is kept with its time, and read when all of it is there.
    """
    settings = load.Settings(
        url, model=s.model, endpoint="completions", max_tokens=s.max_tokens, temperature=s.temperature, ignore_eos=True
    )
    asked = [*prompts, late] if late else prompts
    bodies = [load.request(settings, s.model, prompt, i) for i, prompt in enumerate(asked)]
    began = time.thread_time()
    try:
        heard = _hear(url, bodies, len(prompts), settings.timeout)
    except OSError as error:
        raise ConfigError(f"the server of {s.model} failed: {error}") from None
    took = time.thread_time() - began
    answers = [_answer(chunks) for chunks in heard]
    if bad := [answer for answer in answers if answer.error]:
        raise ConfigError(f"the server of {s.model} failed: {bad[0].error}: {bad[0].said}")
    return answers, took


def _hear(url: str, bodies: list[dict[str, Any]], first: int, timeout: float) -> list[list[tuple[float, bytes]]]:
    """The bytes of answers: chunks, each with the seconds after which it came.

    So many are asked for at once, the others when each of these has a frame, or all have ended.
    """
    address = url.removeprefix("http://")
    host, _, port = address.partition(":")
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n"
    heard: list[list[tuple[float, bytes]]] = []
    began = time.perf_counter()
    with ExitStack() as connections, selectors.DefaultSelector() as waiting:
        while len(heard) < len(bodies) or waiting.get_map():
            while len(heard) < len(bodies) and (
                len(heard) < first or not waiting.get_map() or all(map(_speaks, heard[:first]))
            ):
                now, data = time.perf_counter() - began, json.dumps(bodies[len(heard)]).encode()
                about = f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
                connection = connections.enter_context(socket.create_connection((host, int(port)), timeout))
                connection.sendall((head + about).encode() + data)
                heard.append([])
                waiting.register(connection, selectors.EVENT_READ, (connection, now, heard[-1]))
            if not (ready := waiting.select(timeout)):
                raise TimeoutError(f"no byte for {timeout:g} s")
            for key, _ in ready:
                connection, since, chunks = key.data
                if chunk := connection.recv(2**16):
                    chunks.append((time.perf_counter() - began - since, chunk))
                else:
                    waiting.unregister(connection)
    return heard


def _speaks(heard: list[tuple[float, bytes]]) -> bool:
    """Whether an answer has a frame yet."""
    return any(b"data:" in chunk for _, chunk in heard)


def _answer(heard: list[tuple[float, bytes]]) -> load.Answer:
    """What was heard, read."""
    answer, rest, status = load.Answer(), b"", 0
    reader = h11.Connection(h11.CLIENT)
    reader.send(h11.Request(method="POST", target="/", headers=[("host", "there"), ("connection", "close")]))
    reader.send(h11.EndOfMessage())
    try:
        for now, chunk in heard:
            reader.receive_data(chunk)
            while not isinstance(event := reader.next_event(), type):  # NEED_DATA and PAUSED are types
                if isinstance(event, h11.Response):
                    status = event.status_code
                elif isinstance(event, h11.Data):
                    *lines, rest = (rest + event.data).split(b"\n")
                    for line in lines:
                        if line.startswith(b"data:"):
                            load.hear(answer, line[5:].strip().decode(), now)
                            answer.total = now
    except (h11.RemoteProtocolError, *load.STRANGE) as error:
        load.fail(answer, "not the protocol", f"{type(error).__name__}: {error}")
        return answer
    if status != 200:
        load.fail(answer, f"status {status}", load.message_in(rest.decode("utf-8", "replace")))
    elif answer.finish is None and answer.error is None:
        load.fail(answer, "disconnected", "the stream ended before the answer did")
    return answer


def _over_http(s: Settings, url: str, prompts: list[list[int]]) -> tuple[float, float]:
    """Tokens per second, and the client's share of the time: seconds of CPU per second."""
    time.sleep(SETTLE)
    answers, took = _ask(s, url, *prompts)
    seconds = max(answer.total for answer in answers)
    return sum(answer.tokens for answer in answers) / seconds, took / seconds


def _direct(s: Settings, llm: LLM, prompts: list[list[int]]) -> float:
    time.sleep(SETTLE)
    began = time.perf_counter()
    requests = [
        llm.engine.add(
            prompt, SamplingParams(max_tokens=s.max_tokens, temperature=s.temperature, seed=i, ignore_eos=True)
        )[0]
        for i, prompt in enumerate(prompts)
    ]
    llm.engine.finish(requests)
    return sum(request.ready for request in requests) / (time.perf_counter() - began)


def _gap(s: Settings, url: str, prompts: list[list[int]], late: list[int] | None = None) -> float:
    answers = _ask(s, url, *prompts, late=late)[0][: len(prompts)]
    gaps = [gap for answer in answers for gap in answer.gaps] or [0.0]  # all in one frame, or chunk:
    return 1000 * max(1e-6, float(np.percentile(gaps, 99)))  # less than can be told


HEADER = ("what", "server", "against", "", "ratio")


def cells(r: Row) -> list[str]:
    """A figure under HEADER."""
    return [r.what, f"{r.server:,.1f} {r.unit}", r.against, f"{r.other:,.1f} {r.unit}", f"{r.ratio:.2f}"]


def remarks(rows: list[Row]) -> list[str]:
    """What stands below the table."""
    s, about = rows[0].settings, rows[0].hardware
    law = "greedy" if s["temperature"] == 0 else f"temperature {s['temperature']:g}"
    rounded = [f"{name} {s[name]}" for name in ("quantization", "activations") if s.get(name)]
    own = [s["model"], *rounded, s["speculate"]]
    asked = (s["repeats"] + 1) * sum(s["streams"]) + 2 * BESIDE * s["repeats"]
    again = f"{s.get('prompts')} different prompts for {asked} requests: a prefix cache need not read them again."
    lines = [
        f"{', '.join(own)}; prompts of suite {s['suite']}, {law}, {s['max_tokens']} tokens each; "
        f"medians of {s['repeats']}; {about['cpu']}, {about['cores']} cores, load {about['load']:.1f}."
    ]
    return lines + [again] * (s.get("prompts", asked) < asked)
