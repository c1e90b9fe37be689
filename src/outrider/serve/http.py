"""HTTP's own: JSON bodies within limits, errors in OpenAI's and Anthropic's shape, server-sent events, the gate."""

from __future__ import annotations

import asyncio
import base64
import gc
import hashlib
import hmac
import json
import logging
import math
import re
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import fields
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.config import SamplingParams
from outrider.engine import LONG
from outrider.errors import ConfigError, DeadlineExceeded, EngineError, OutOfMemory, QueueFull, RequestError, brief

log = logging.getLogger(__name__)
T = TypeVar("T")
B = TypeVar("B", bound=BaseModel)

KINDS = {  # vLLM's names
    400: "BadRequestError", 401: "AuthenticationError", 404: "NotFoundError", 405: "MethodNotAllowedError",
    413: "RequestTooLargeError", 500: "InternalServerError", 501: "NotImplementedError", 503: "ServiceUnavailableError",
    504: "DeadlineExceededError",
}  # fmt: skip
MESSAGES = "/v1/messages"  # whose errors are in Anthropic's shape, under these names
ANTHROPICS = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 405: "invalid_request_error",
    413: "request_too_large", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")  # others share a counter: each costs memory
OPEN = ("/health", "/metrics")  # to those without a key, too
MOST_ITEMS = 2**21  # of a body, by its commas, those of its texts included
MOST_OBJECTS = 2**19  # ... and lists, by their brackets: Python looks at each again and again for what is garbage
MOST_MEMBERS = 2**18  # of a JSON object: as many as large vocabularies have tokens, for a logit_bias of each
DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"
PARAMETERS = {item.name for item in fields(SamplingParams)} | {
    "prompt",
    "messages",
    "chat_template",
    "chat_template_kwargs",
    "tools",
    "tool_choice",
    "deadline",
    "priority",
}
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
ORIGIN = re.compile(rb"^https?://[^/]*")


class Refusal(Exception):
    """A request that is not served, as its client will read it; `details` are for Anthropic's clients alone."""

    def __init__(
        self, status: int, message: str, param: str | None = None, details: Any = None, **headers: str
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.details = status, param, details
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    @property
    def body(self) -> dict[str, Any]:
        """In OpenAI's shape."""
        kind = KINDS.get(self.status, "InternalServerError" if self.status >= 500 else "BadRequestError")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.status}}

    @property
    def anthropics(self) -> dict[str, Any]:
        """In Anthropic's."""
        more = {"details": self.details} if self.details else {}
        kind = ANTHROPICS.get(self.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": str(self), **more}}

    def under(self, name: str) -> Refusal:
        """The same, of a field that its client knows by another name."""
        return Refusal(self.status, str(self).replace(str(self.param), name), name)

    def response(self, scope: Scope) -> Response:
        """As an answer of its own, in the shape of the API that was asked."""
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        return json_response(self.anthropics if path.startswith(MESSAGES) else self.body, self.status, self.headers)


def refusal(error: BaseException) -> Refusal:
    """How any error reads outside. What is nobody's fault but ours is logged, and says nothing of the inside."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, (QueueFull, OutOfMemory)):
        return Refusal(503, str(error), retry_after="1")
    if isinstance(error, DeadlineExceeded):
        return Refusal(504, str(error), "deadline", x_should_retry="false")
    if isinstance(error, EngineError):
        return Refusal(503, str(error), retry_after="5")
    if isinstance(error, (ConfigError, RequestError)):
        name = str(error).partition(" ")[0].rstrip(":,").partition("=")[0]
        return Refusal(400, str(error), name if name in PARAMETERS else None)
    if isinstance(error, HTTPException):
        what = "this route has no such method" if error.status_code == 405 else str(error.detail)
        return Refusal(error.status_code, what, **dict(error.headers or {}))
    log.error("a request failed", exc_info=error)
    return Refusal(500, "the server failed on this request; its log says why")


# --- JSON -----------------------------------------------------------------------------------------------------------


_written = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def dumps(data: Any, depth: int = 0) -> bytes:
    """JSON in ASCII: no line separator of Unicode's in it can end a client's line, no lone surrogate our encoder.

    What is nested so deeply is encoded piece by piece: within a piece no other thread gets its turn.
    """
    return _pieces(data, depth).encode("ascii")


def _pieces(data: Any, depth: int) -> str:
    if depth and isinstance(data, list):
        return f"[{','.join([_pieces(each, depth - 1) for each in data])}]"
    if depth and isinstance(data, dict) and all(isinstance(key, str) for key in data):
        return f"{{{','.join([f'{_written(key)}:{_pieces(each, depth - 1)}' for key, each in data.items()])}}}"
    return str(data) if type(data) is int else _written(data)  # an encoder for each token id takes five times as long


def json_response(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """An answer in JSON."""
    return Response(dumps(data), status, headers, "application/json")


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    if math.isinf(number := float(text)):
        raise ValueError(f"{text[:40]} is out of range")
    return number


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys are each there once: what of two was meant nobody can tell."""
    if len(pairs) > MOST_MEMBERS:
        raise ValueError(f"an object has {len(pairs)} members; at most {MOST_MEMBERS}")
    found = dict[str, Any]()
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {brief(key)} stands twice in one object")
        found[key] = value
    return found


def loads(text: str) -> Any:
    """JSON to the letter. Raises ValueError, and RecursionError for what is nested too deeply."""
    return json.loads(text, parse_constant=_no_number, parse_float=_finite, object_pairs_hook=_once)


@contextmanager
def no_garbage() -> Iterator[None]:
    """Without looking for any, which for a body of many objects takes five times as long as to read it."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:  # of two threads the first one ends it, which harms nobody
            gc.enable()


async def body_of(request: Request) -> bytes:
    """The body of a request, which may be JSON. Raises Refusal 400."""
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json":
        raise Refusal(400, f"the content type must be application/json, not {brief(media) if media else 'missing'}")
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        raise Refusal(400, f"the body must come as it is, not with content-encoding {brief(coding)}")
    body = await request.body()
    request.state.long, request.state.arrived = len(body) > LONG, time.perf_counter()
    return body


def read(body: bytes, kind: type[B]) -> B:
    """What a body says. Raises Refusal 400, naming the field that is wrong."""
    try:
        text = body.decode("utf-8-sig")  # files that Windows wrote begin with a byte-order mark
        if (items := text.count(",")) > MOST_ITEMS:  # before they are made
            raise Refusal(400, f"the body has {items} commas; at most {MOST_ITEMS}")
        if (objects := text.count("{") + text.count("[")) > MOST_OBJECTS:
            raise Refusal(400, f"the body has {objects} opening brackets; at most {MOST_OBJECTS}")
        data = loads(text)
    except RecursionError:
        raise Refusal(400, "the body is nested too deeply") from None
    except ValueError as error:
        reason = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(error)[:200])
        raise Refusal(400, f"the body is not JSON: {reason}") from None
    if not isinstance(data, dict):
        raise Refusal(400, f"the body must be a JSON object, not {brief(data)}")
    return parse(kind, data)


def parse(kind: type[B], data: dict[str, Any]) -> B:
    """A request's fields, checked. Raises Refusal 400."""
    pointless = getattr(kind, "pointless", {})
    for key in data.keys() & pointless.keys():
        if data[key] not in (None, pointless[key]):
            raise Refusal(400, f"{key} is not served here; leave it out", key)
    data = {key: value for key, value in data.items() if key not in pointless}
    for key in data:
        if key not in kind.model_fields:
            raise Refusal(400, f"unknown field {brief(key)}{_instead(key, kind)}", key)
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        name = str(first["loc"][0]) if first["loc"] else None
        reason = str(first["msg"])[:200]
        if first["type"] == "extra_forbidden":  # inside a field
            raise Refusal(400, f"{name} has no field {brief(first['loc'][-1])}", name) from None
        if first["type"] == "missing":
            raise Refusal(400, f"the field {name} is missing", name) from None
        if name and (told := kind.model_fields[name].description):
            raise Refusal(400, f"{name} must be {told}, not {brief(data[name])}", name) from None
        raise Refusal(400, f"{name}: {reason}, not {brief(first['input'])}" if name else reason, name) from None
    except RecursionError:
        raise Refusal(400, "the body is nested too deeply") from None


def _instead(key: str, kind: type[BaseModel]) -> str:
    import difflib

    if key.startswith("guided_"):
        return "; it was removed, use 'structured_outputs'"
    here = getattr(kind, "here", {})  # by names that fields have elsewhere
    near = [here[key]] if key in here else difflib.get_close_matches(key[:64], kind.model_fields, 1)
    return f"; did you mean {near[0]!r}?" if near else ""


# --- answers that end with their readers -----------------------------------------------------------------------------


class Gone(Exception):
    """The client has gone, and nobody is left to answer."""


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What the work gives; it is cancelled when the client goes, which raises Gone. The body must have been read."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Gone
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class EventStream(Response):
    """Server-sent events. Frames stop when the client goes; where there are none for a while, comments say we live.

    `close` is called when it is over, however, and even if it never began.
    """

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncGenerator[bytes, None], keep_alive: float, close: Callable[[], None]) -> None:
        self.frames, self.keep_alive, self.close = frames, keep_alive, close
        self.status_code, self.background = 200, None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The answer."""
        try:
            async with aclosing(self.frames):
                await while_connected(receive, self._write(send))
        finally:
            self.close()

    async def _write(self, send: Send) -> None:
        wrote = time.monotonic()

        async def put(chunk: bytes, more: bool = True) -> None:
            nonlocal wrote
            wrote = time.monotonic()
            await send({"type": "http.response.body", "body": chunk, "more_body": more})

        async def comment() -> None:
            while True:
                await asyncio.sleep(max(0.01, wrote + self.keep_alive - time.monotonic()))
                if time.monotonic() >= wrote + self.keep_alive:
                    await put(COMMENT)

        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        comments = asyncio.ensure_future(comment())
        try:
            async for chunk in self.frames:
                await put(chunk)
        finally:
            comments.cancel()
            with suppress(asyncio.CancelledError, OSError):
                await comments
        await put(b"", more=False)


def frame(data: Any, event: str | None = None, depth: int = 0) -> bytes:
    """One server-sent event; `depth` as dumps explains it."""
    return (b"event: %b\n" % event.encode() if event else b"") + b"data: %b\n\n" % dumps(data, depth)


# --- the gate --------------------------------------------------------------------------------------------------------


class Gate:
    """Before all routes: request ids, API keys, the limit on bodies; errors answered, each request logged and counted.

    seen(method, route, status, seconds): told about each request once it is over; 499 for clients that went.
    """

    def __init__(
        self, app: ASGIApp, api_keys: tuple[str, ...], max_body: int, seen: Callable[[str, str, int, float], None]
    ) -> None:
        self.app, self.max_body, self.seen = app, max_body, seen
        self.keys = [hashlib.sha256(key.encode()).digest() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1003})
                return
            await self.app(scope, receive, send)
            return
        began, status = time.perf_counter(), 0
        root = scope.get("root_path", "")
        if root and f"{scope['path']}/".startswith(f"{root}{root}/"):  # a proxy has left it there; uvicorn adds it
            scope["path"] = f"{root}/{scope['path'][2 * len(root) + 1 :]}"
        headers = {name.lower(): value for name, value in scope["headers"]}
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state |= {"request_id": request_id, "log": {}}

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                # a redirect leads to a path: by which scheme and name it was asked only a proxy knows
                headers = [(k, ORIGIN.sub(b"", v) if k == b"location" else v) for k, v in message["headers"]]
                message["headers"] = [*headers, (b"x-request-id", request_id.encode("ascii"))]
            await send(message)

        try:
            self._admit(scope, headers)
            await self.app(scope, self._limited(receive), answer)
        except (Gone, ClientDisconnect):
            status = 499
        except Exception as error:
            failed = refusal(error)
            if status:  # an answer has begun: it can only break off
                log.error("an answer broke off: %s", failed)
                status = 500
                raise
            with suppress(OSError):
                await failed.response(scope)(scope, receive, answer)
        except asyncio.CancelledError:  # the server ends, and has waited long enough
            if status:
                raise
            ending = Refusal(503, "the server is shutting down", retry_after="5", Connection="close")
            with suppress(OSError):
                await ending.response(scope)(scope, receive, answer)
        finally:
            seconds, route = time.perf_counter() - began, getattr(scope.get("route"), "path", "none")
            method = scope["method"]
            self.seen(method if method in METHODS else "other", route, status, seconds)
            about = {"request_id": request_id, "method": scope["method"], "path": scope["path"], "status": status}
            about |= {"seconds": round(seconds, 4), **state["log"]}
            level = logging.DEBUG if route in (*OPEN, "/ping") else logging.INFO
            log.log(level, "%s %s %s", scope["method"], scope["path"], status, extra={"fields": about})

    def _admit(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if self.keys and path.rstrip("/") not in OPEN and not self._knows(headers):
            # a browser asks for name and password at the page; elsewhere its prompt would be in a program's way
            challenge = 'Basic realm="outrider: the API key is the password"' if path == "/" else "Bearer"
            raise Refusal(
                401, "a valid API key is missing; send it as 'Authorization: Bearer KEY'", WWW_Authenticate=challenge
            )
        if b"content-length" in headers and b"transfer-encoding" in headers:
            # a proxy may have read another end of this request than we do, and take what follows for the next one
            raise Refusal(400, "give Content-Length or Transfer-Encoding, one of them", Connection="close")
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length[:20]) > self.max_body:
            raise self._too_large()

    def _too_large(self) -> Refusal:
        return Refusal(413, f"the body is over the limit of {self.max_body} bytes")

    def _knows(self, headers: dict[bytes, bytes]) -> bool:
        kind, _, given = headers.get(b"authorization", b"").partition(b" ")
        found = [headers.get(b"x-api-key", b"")]  # also beside a name and password that are a proxy's
        if kind.lower() == b"bearer":
            found.append(given.strip())
        if kind.lower() == b"basic":
            with suppress(ValueError):
                found.append(base64.b64decode(given.strip(), validate=True).partition(b":")[2])
        digests = [hashlib.sha256(key).digest() for key in found]
        known = [hmac.compare_digest(digest, each) for digest in digests for each in self.keys]
        return any(known)  # all of them were compared, in constant time

    def _limited(self, receive: Receive) -> Receive:
        size = 0

        async def limited() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self.max_body:
                raise self._too_large()
            return message

        return limited
