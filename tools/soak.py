"""A server under mixed load for a long time: no wrong token, no growth of memory, everything given back at the end.

Requests of all kinds arrive in any order, stream or not, some are cancelled at random moments, some cannot be. Each
answer that ends is compared with plain decoding, alone, in another process.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import httpx

from outrider import LLM

LONGEST, MOST = 300, 130  # tokens of a prompt, and of an output
FIRST = 300  # seconds, or half of all: until then caches fill
GROWTH = 0.03  # of the server's memory, from then on, that is noise
GRAMMARS: list[dict[str, Any]] = [
    {"regex": "[a-z]{2,9}(, [a-z]{2,9}){1,4}[.]"},
    {"choice": ["yes, of course", "yes, perhaps", "no"]},
    {"json": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}, "old": {"type": "boolean"}},
              "required": ["name", "old"], "additionalProperties": False}},
]  # fmt: skip
FIELDS: list[dict[str, Any]] = [
    {"temperature": 0}, {"temperature": 0.7}, {"top_p": 0.8}, {"top_k": 7}, {"min_p": 0.1}, {"n": 3}, {"n": 2},
    {"repetition_penalty": 1.3}, {"presence_penalty": 1.5, "frequency_penalty": -0.5}, {"stop": [" the", "."]},
    {"logit_bias": {"300": 5.0, "301": -100}}, {"stop_token_ids": [262, 263]}, {"min_tokens": 5},
    {"logprobs": 2}, {"ignore_eos": True}, {"temperature": 0, "repetition_penalty": 1.1}, {"cache_salt": "mine"},
    {"priority": -1}, {"priority": 3}, {"speculative_config": False}, {"speculative_config": {"method": "none"}},
    {"skip_special_tokens": False}, {"bad_words": ["the", "little girl"]}, {"prompt_logprobs": 1},
    {"allowed_token_ids": [*range(3, 2000)]}, {"deadline": 3600}, *({"structured_outputs": each} for each in GRAMMARS),
]  # fmt: skip
NOT_SAMPLED = {"prompt", "return_token_ids", "cache_salt", "priority", "deadline", "speculative_config"}
CANNOT_BE: list[dict[str, Any]] = [
    {"temperature": -1}, {"prompt": []}, {"prompt": [10**9]}, {"stop": [""]}, {"max_tokens": 0}, {"n": 10**9},
    {"nonsense": 1}, {"structured_outputs": {"regex": "("}}, {"logit_bias": {"x": 1}}, {"prompt": [1] * 100_000},
]  # fmt: skip


def mixed(llm: LLM, count: int) -> list[dict[str, Any]]:
    """Bodies of completions: prompts of 1 to LONGEST tokens, of which many begin alike, and all fields of sampling."""
    some, vocab = random.Random(1), llm.runner.model.config.vocab_size
    text = llm.encode("Once upon a time there was a little girl named Lily. She had a red ball. " * 30)
    roots = [text[: some.randint(33, LONGEST // 2)] for _ in range(3)]
    bodies = []
    for i in range(count):
        prompt = some.choice([[], *roots]) + some.choice([text, [some.randrange(vocab) for _ in range(LONGEST)]])
        length = some.choice([1, 2, 31, 32, 33, 64, LONGEST, some.randint(1, LONGEST)])
        given: dict[str, Any] = {
            "prompt": prompt[:length],
            "seed": i,
            "max_tokens": some.choice([1, 9, 40, MOST, MOST]),
            "return_token_ids": True,
        }
        for more in [FIELDS[i % len(FIELDS)], *some.sample(FIELDS, some.randrange(2))]:
            clash = {"min_tokens", "stop", "ignore_eos", "allowed_token_ids"}
            if not ("structured_outputs" in more and given.keys() & clash) and not (
                "structured_outputs" in given and more.keys() & clash
            ):
                given |= more
        if given.get("temperature") == 0:
            given.pop("n", None)
        given["max_tokens"] = max(given["max_tokens"], given.get("min_tokens", 0))
        bodies.append(given)
    return bodies


def alone(llm: LLM, body: dict[str, Any]) -> list[Any]:
    """Outputs of a body by itself, decoded as the LLM does."""
    given = {key: value for key, value in body.items() if key not in NOT_SAMPLED}
    if "logit_bias" in given:
        given["logit_bias"] = {int(token): bias for token, bias in given["logit_bias"].items()}
    return llm.generate(body["prompt"], **given)


def difference(outputs: list[Any], choices: list[dict[str, Any]]) -> str | None:
    """What of an answer is not what plain decoding gave; None if nothing is."""
    if len(outputs) != len(choices):
        return f"{len(choices)} choices instead of {len(outputs)}"
    for output, choice in zip(outputs, choices, strict=True):
        for name in ("token_ids", "text", "finish_reason", "stop_reason"):
            if choice[name] != getattr(output, name):
                return f"{name} {choice[name]} instead of {getattr(output, name)}"
        if output.logprobs is not None and choice["logprobs"]["token_logprobs"] != [p.logprob for p in output.logprobs]:
            return "other logprobs"
    return None


def regrouped(text: str) -> list[dict[str, Any]]:
    """The choices of a completion's stream."""
    found: dict[int, dict[str, Any]] = {}
    *frames, end = [block.removeprefix("data: ") for block in text.split("\n\n") if block.startswith("data: ")]
    if end != "[DONE]":
        raise ValueError("the stream has no end")
    for frame in map(json.loads, frames):
        if "error" in frame:
            raise ValueError(frame["error"]["message"])
        for choice in frame["choices"]:
            whole = found.setdefault(choice["index"], {"token_ids": [], "text": "", "logprobs": None})
            whole["text"] += choice["text"]
            whole["token_ids"] += choice.get("token_ids", [])
            if choice["logprobs"] is not None:
                mine = whole["logprobs"] = whole["logprobs"] or {"token_logprobs": []}
                mine["token_logprobs"] += choice["logprobs"]["token_logprobs"]
            whole |= {key: choice[key] for key in ("finish_reason", "stop_reason")}
    return [found[i] for i in sorted(found)]


@dataclass
class Report:
    """What became of it all."""

    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)  # seconds since the start, bytes
    left: dict[str, float] = field(default_factory=dict)  # what the server still held at the end

    @property
    def growth(self) -> float:
        """Of the server's memory: the median of the last sixth over that of the sixth behind the first part, less 1."""
        first, part = min(FIRST, self.seconds / 2), self.seconds / 6
        parts = [
            [size for at, size in self.memory if begin <= at <= begin + part] for begin in (first, self.seconds - part)
        ]
        return statistics.median(parts[1]) / statistics.median(parts[0]) - 1 if all(parts) else 0.0

    @property
    def faults(self) -> list[str]:
        """What should not have been."""
        held = [f"the server holds {name} {value:g} at the end" for name, value in self.left.items() if value]
        grown = [f"memory grew by {self.growth:.1%}"] if self.growth > GROWTH else []
        return self.wrong + held + grown

    def __str__(self) -> str:
        sizes = [size / 2**20 for _, size in self.memory] or [0]
        kinds = ", ".join(f"{n} {what}" for what, n in sorted(self.counts.items()))
        return (
            f"{self.seconds / 60:.1f} minutes: {kinds}; memory of the server {sizes[0]:.0f} MiB at first, "
            f"{max(sizes):.0f} at most, {sizes[-1]:.0f} at last ({self.growth:+.1%} behind the first part)"
        )


def soak(
    model: str,
    speculate: str,
    minutes: float,
    users: int = 8,
    requests: int = 96,
    seed: int = 0,
    say: Callable[[str], None] = lambda _: None,
) -> Report:
    """Serve a model in another process, from little memory, and let so many users ask `requests` different things."""
    llm = LLM(model, device="cpu", enable_prefix_caching=False)
    bodies = mixed(llm, requests)
    say(f"plain decoding of {requests} requests")
    expected = [alone(llm, body) for body in bodies]
    memory = 3 * llm.engine._kv_bytes(LONGEST + MOST)
    del llm
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder) / "socket"
        command = [sys.executable, "-m", "outrider", "serve", model, "--uds", str(at)]
        command += ["--speculative-config" if speculate.startswith("{") else "--speculate", speculate]
        command += ["--device", "cpu", "--kv-memory", str(memory), "--log-level", "error"]
        server = subprocess.Popen(command, env={**os.environ, "OUTRIDER_API_KEY": ""})
        try:
            return asyncio.run(_load(str(at), server, bodies, expected, 60 * minutes, users, seed, say))
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                server.kill()


async def _load(
    at: str,
    server: subprocess.Popen[bytes],
    bodies: list[dict[str, Any]],
    expected: list[list[Any]],
    seconds: float,
    users: int,
    seed: int,
    say: Callable[[str], None],
) -> Report:
    report, some = Report(), random.Random(seed)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=users)
    transport = httpx.AsyncHTTPTransport(uds=at, limits=limits)
    async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=600) as client:
        while not await _answers(client):
            if server.poll() is not None:
                raise RuntimeError(f"the server ended with {server.returncode}")
            await asyncio.sleep(0.2)
        began = time.monotonic()

        def passed() -> float:
            return time.monotonic() - began

        async def one() -> str:
            if some.random() < 0.1:
                body = {"prompt": [1], "max_tokens": 1, **some.choice(CANNOT_BE)}
                answer = await client.post("/v1/completions", json=body)
                if answer.status_code != 400:
                    report.wrong.append(f"{json.dumps(body)[:200]} was answered {answer.status_code}")
                return "refused"
            i, stream = some.randrange(len(bodies)), some.random() < 0.5
            try:
                with anyio.fail_after(some.uniform(0, 1) if some.random() < 0.2 else None):
                    answer = await client.post("/v1/completions", json={**bodies[i], "stream": stream})
            except TimeoutError:
                return "cancelled"
            if answer.status_code != 200:
                report.wrong.append(f"request {i} was answered {answer.status_code}: {answer.text[:200]}")
                return "failed"
            choices = regrouped(answer.text) if stream else answer.json()["choices"]
            if what := difference(expected[i], choices):
                report.wrong.append(f"request {i} ({'stream' if stream else 'whole'}): {what[:300]}")
            return "answered"

        async def user() -> None:
            while passed() < seconds:
                try:
                    report.counts[await one()] += 1
                except (httpx.HTTPError, ValueError) as error:
                    report.wrong.append(f"{type(error).__name__}: {error}")

        async def watch() -> None:
            while True:
                report.memory.append((passed(), _resident(server.pid)))
                if len(report.memory) % 60 == 0:
                    size = report.memory[-1][1] / 2**20
                    say(
                        f"{passed() / 60:.0f} minutes, {size:.0f} MiB, {dict(report.counts)}, {len(report.wrong)} wrong"
                    )
                await asyncio.sleep(1)

        watching = asyncio.ensure_future(watch())
        await asyncio.gather(*(user() for _ in range(users)))
        report.seconds = passed()
        watching.cancel()
        for _ in range(100):  # what was cancelled ends at the next step
            report.left = _held((await client.get("/metrics")).text)
            if not any(report.left.values()):
                break
            await asyncio.sleep(0.1)
    return report


async def _answers(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/health")).status_code == 200
    except httpx.TransportError:
        return False


def _resident(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text("ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def _held(metrics: str) -> dict[str, float]:
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    lines = [line for line in metrics.splitlines() if line.startswith(tuple(f"vllm:{name}{{" for name in names))]
    return {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines}
