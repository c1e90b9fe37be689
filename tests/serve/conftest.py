"""A server in this process, spoken to through ASGI; and one behind a real socket."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import jsonschema
import pytest

from outrider import LLM, AsyncLLM
from outrider.serve.app import create_app
from outrider.serve.server import server
from outrider.serve.settings import Settings


class Client:
    """Sends requests to an app, all given ones at once, each call in an event loop of its own."""

    def __init__(self, llm: LLM, max_queued_requests: int | None = None, **settings: Any) -> None:
        self.llm = AsyncLLM(llm, max_queued_requests=max_queued_requests)
        self.settings = Settings(names=("tiny", "alias"), **settings)
        self.app = create_app(self.llm, self.settings)
        self.schema = self.app.openapi()

    def send(self, *requests: tuple[str, str, dict[str, Any]]) -> list[httpx.Response]:
        """(method, path, httpx's options) each."""

        async def all_of_them() -> list[httpx.Response]:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
                return await asyncio.gather(*(client.request(m, p, **options) for m, p, options in requests))

        answers = asyncio.run(all_of_them())
        for (verb, path, _), answer in zip(requests, answers, strict=True):
            if verb != "HEAD":
                self.described(path, answer)
        return answers

    def described(self, path: str, answer: httpx.Response) -> None:
        """Any JSON is as /openapi.json says."""
        path = re.sub("(?<=^/v1/models/).+", "{model}", path.partition("?")[0])
        if answer.headers.get("content-type") != "application/json" or path not in self.schema["paths"]:
            return
        (about,) = {json.dumps(told["responses"]) for told in self.schema["paths"][path].values()}
        told = json.loads(about)["200" if answer.status_code == 200 else "4XX"]["content"]["application/json"]["schema"]
        jsonschema.validate(answer.json(), {**self.schema, **told})

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.send(("GET", path, options))[0]

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.send(("POST", path, {"json": body, **options}))[0]

    def complete(self, *bodies: dict[str, Any], path: str = "/v1/completions") -> list[dict[str, Any]]:
        """The answers to bodies that are all right, sent at once."""
        answers = self.send(*(("POST", path, {"json": body}) for body in bodies))
        for answer in answers:
            assert answer.status_code == 200, answer.text
        return [answer.json() for answer in answers]

    def chat(self, *bodies: dict[str, Any]) -> list[dict[str, Any]]:
        return self.complete(*bodies, path="/v1/chat/completions")

    def frames(self, body: dict[str, Any], path: str = "/v1/completions") -> list[dict[str, Any]]:
        """The frames of a stream but for [DONE], which must be the last."""
        answer = self.post(path, {**body, "stream": True})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        return frames_of(answer.text)


def fail(*_: Any, **__: Any) -> None:
    raise RuntimeError("inside")


def begins(*_: Any) -> Any:
    """A part of an answer, and then no more."""
    yield {"content": "a"}
    fail()


def frames_of(text: str) -> list[dict[str, Any]]:
    """Server-sent events, to the letter; [DONE] ends them."""
    assert text.endswith("\n\n")
    blocks = [block for block in text[:-2].split("\n\n") if not block.startswith(":")]
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    *frames, done = [block.removeprefix("data: ") for block in blocks]
    assert done == "[DONE]" and "[DONE]" not in frames
    return [json.loads(frame) for frame in frames]


@pytest.fixture
def client(tiny_llm: LLM) -> Iterator[Client]:
    """The embedded model, drafting by n-grams; nothing may be left in its engine."""
    tiny_llm.speculative_config = {"method": "ngram", "num_speculative_tokens": 4}
    made = Client(tiny_llm)
    yield made
    made.llm.close()
    assert not tiny_llm.engine.running and not tiny_llm.engine.waiting and not tiny_llm.runner.slots


@pytest.fixture
def live(tiny_llm: LLM) -> Iterator[Callable[..., str]]:
    """`live(**settings)`: the URL of a server behind a real socket, with uvicorn's own loop in a thread."""
    ends: list[Callable[[], None]] = []

    def start(drain: float = 5.0, options: dict[str, Any] | None = None, **settings: Any) -> str:
        given = Settings(names=("tiny",), **settings)
        llm = AsyncLLM(tiny_llm, event_interval=given.event_interval)
        running = server(create_app(llm, given), llm, drain, **(options or {}))
        listening = socket.create_server(("127.0.0.1", 0))
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()

        def end() -> None:
            running.should_exit = True
            thread.join(30)
            assert not thread.is_alive()

        ends.append(end)
        start.end = end  # type: ignore[attr-defined]
        start.llm = llm  # type: ignore[attr-defined]
        return f"http://127.0.0.1:{listening.getsockname()[1]}"

    yield start
    for end in ends:
        end()
    assert not tiny_llm.engine.running and not tiny_llm.engine.waiting and not tiny_llm.runner.slots
