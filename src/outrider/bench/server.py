"""Our server against the engine called directly, and what its users see while a long prompt is read, or read again.

The server runs in a process of its own; the engine, with the same weights and options, in this one. Both take turns.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import numpy as np
import torch

from outrider.bench import serve as load
from outrider.bench.report import markdown_table
from outrider.bench.run import at_least, provenance
from outrider.config import SamplingParams, SpeculativeConfig
from outrider.errors import ConfigError
from outrider.files import write_text
from outrider.llm import LLM

READY = 600  # seconds that the server may take to load
BESIDE = 4  # streams that run while a long prompt is read


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

    def __post_init__(self) -> None:
        at_least(self, {"max_tokens": 2, "long": 2, "shared": 33, "repeats": 1})


@dataclass(frozen=True)
class Row:
    """One JSON line: a figure of the server's and what it is compared with."""

    what: str
    unit: str
    server: float
    other: float
    against: str
    ratio: float  # server / other
    rounds: list[tuple[float, float]]  # (server, other) each
    settings: dict[str, Any]
    hardware: dict[str, Any]
    versions: dict[str, str]
    commit: str
    command: str
    date: str


def run(s: Settings, show: load.Show = lambda *_: None) -> Iterator[Row]:
    """Measure; a row for each figure. Raises ConfigError if the server does not come up or refuses what is asked."""
    llm = LLM(s.model, speculative_config=SpeculativeConfig.parse(s.speculate), max_num_seqs=max(32, *s.streams))
    room = llm.engine.max_len - s.max_tokens
    if max(s.long, s.shared + 16) > room:
        raise ConfigError(f"the context of {llm.engine.max_len} has no room for prompts of {s.long} and {s.shared}")
    some, vocab = random.Random(0), llm.runner.model.config.vocab_size

    def text(n: int) -> list[int]:
        return [some.randrange(vocab // 2) for _ in range(n)]

    def row(what: str, unit: str, against: str, rounds: list[tuple[float, float]]) -> Row:
        server, other = (statistics.median(side) for side in zip(*rounds, strict=True))
        about = provenance(torch.device("cpu"))
        return Row(what, unit, server, other, against, server / other, rounds, asdict(s), **about)

    with _serving(s) as url:
        for n in s.streams:
            rounds = []
            for i in range(s.repeats + 1):  # the first warms up
                show(f"{n} streams", i, s.repeats + 1)
                prompts = [text(32) for _ in range(n)]
                rounds.append((_over_http(s, url, prompts), _direct(s, llm, prompts)))
            yield row(f"{n} streams", "tokens/s", "the engine called directly", rounds[1:])
        rounds = []
        for i in range(s.repeats):
            show("a long prompt", i, s.repeats)
            rounds.append((_gap(s, url, text, long=True), _gap(s, url, text, long=False)))
        title = f"p99 between frames of {BESIDE} streams, a prompt of {s.long} tokens being read"
        yield row(title, "ms", "without that prompt", rounds)
        rounds = []
        for i in range(s.repeats):
            show("a shared beginning", i, s.repeats)
            begin = text(s.shared)
            cold, warm = ([_ask(s, url, begin + text(16))[0].first or 0.0] for _ in range(2))
            rounds.append((1000 * warm[0], 1000 * cold[0]))
        yield row(f"first token behind {s.shared} tokens that were read before", "ms", "the first time", rounds)


@contextmanager
def _serving(s: Settings) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "outrider", "serve", s.model, "--port", str(port), "--speculate", s.speculate]
    command += ["--max-num-seqs", str(max(32, *s.streams)), "--log-level", "error"]
    process, url = subprocess.Popen(command), f"http://127.0.0.1:{port}"
    try:
        for _ in range(10 * READY):
            if process.poll() is not None:
                raise ConfigError(f"the server ended with {process.returncode}")
            try:
                with urlopen(f"{url}/health", timeout=5):
                    break
            except (URLError, OSError):
                time.sleep(0.1)
        else:
            raise ConfigError(f"the server did not answer within {READY} seconds")
        yield url
    finally:
        process.terminate()
        process.wait()


def _ask(s: Settings, url: str, *prompts: list[int], late: list[int] | None = None) -> list[load.Answer]:
    """Answers to prompts that are asked at once, and to one that comes when they are under way."""
    settings = load.Settings(
        url, model=s.model, endpoint="completions", max_tokens=s.max_tokens, temperature=1.0, ignore_eos=True
    )

    async def every() -> list[load.Answer]:
        async with load._session(settings) as session:

            async def one(i: int, prompt: list[int], after: float = 0.0) -> load.Answer:
                await asyncio.sleep(after)
                return await load.ask(
                    session, settings, load.request(settings, s.model, prompt, i), time.perf_counter()
                )

            asked = [one(i, prompt) for i, prompt in enumerate(prompts)]
            return await asyncio.gather(*asked, *([one(len(prompts), late, 0.2)] if late else []))

    answers = asyncio.run(every())
    if bad := [answer for answer in answers if answer.error]:
        raise ConfigError(f"the server failed: {bad[0].error}: {bad[0].said}")
    return answers


def _over_http(s: Settings, url: str, prompts: list[list[int]]) -> float:
    began = time.perf_counter()
    answers = _ask(s, url, *prompts)
    return sum(answer.tokens for answer in answers) / (time.perf_counter() - began)


def _direct(s: Settings, llm: LLM, prompts: list[list[int]]) -> float:
    began = time.perf_counter()
    requests = [
        llm.engine.add(prompt, SamplingParams(max_tokens=s.max_tokens, seed=i, ignore_eos=True))[0]
        for i, prompt in enumerate(prompts)
    ]
    llm.engine.finish(requests)
    return sum(request.ready for request in requests) / (time.perf_counter() - began)


def _gap(s: Settings, url: str, text: Any, long: bool) -> float:
    prompts = [text(32) for _ in range(BESIDE)]
    answers = _ask(s, url, *prompts, late=text(s.long) if long else None)[:BESIDE]
    return 1000 * float(np.percentile([gap for answer in answers for gap in answer.gaps], 99))


HEADER = ("what", "server", "against", "", "ratio")


def cells(r: Row) -> list[str]:
    """A figure under HEADER."""
    return [r.what, f"{r.server:,.1f} {r.unit}", r.against, f"{r.other:,.1f} {r.unit}", f"{r.ratio:.2f}"]


def write(rows: list[Row], folder: Path) -> None:
    """results.jsonl and table.md, replacing those of an earlier run. Raises ConfigError if they cannot be written."""
    write_text(folder / "results.jsonl", "".join(json.dumps(asdict(r), ensure_ascii=False) + "\n" for r in rows))
    given, about = rows[0].settings, rows[0].hardware
    remark = (
        f"{given['model']}, {given['speculate']}; {about['cpu']}, {about['cores']} cores, load {about['load']:.1f}."
    )
    table = markdown_table(HEADER, map(cells, rows))
    write_text(folder / "table.md", "\n\n".join([f"`{rows[0].command}`", table, remark]) + "\n")
