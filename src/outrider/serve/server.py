"""A uvicorn server that lets its requests end: for a bounded time, and the others with an error that they can read."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.h11_impl import H11Protocol

from outrider.async_llm import AsyncLLM

log = logging.getLogger(__name__)
KEEP = 75  # seconds that an idle connection stays open: longer than clients keep theirs, 5 as a rule
HEAD = 20  # seconds for the head of a request to come whole; of its body something comes every KEEP seconds
HEAD_BYTES = 2**16  # as load balancers let through; h11's 2**14 hold or not as a head happens to come in pieces
AGAIN = 60  # seconds until it is said again that connections cannot be taken
READ = 2**14  # bytes at once; as chunks of one byte they take h11 some 0.07 seconds, in which all others wait
LAST_WORDS = 5  # seconds for answers to end once their requests have been aborted, ...
AT_ONCE = 2  # ... and once somebody is in a hurry


class Protocol(H11Protocol):
    """Waits for no request for ever, and notices that a client left also where a next request came behind this one.

    Uvicorn counts seconds only between an answer and what comes next, and stops reading at a next request.
    """

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Also one that will say nothing."""
        super().connection_made(transport)
        if hasattr(transport, "max_size"):  # a socket of asyncio's own; in TLS, or with uvloop, it is 2**18
            transport.max_size = READ
        self._close_in(HEAD)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        self._close_in(None)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """What came is looked at; then it depends on what is still to come."""
        super().handle_events()
        theirs = self.conn.their_state
        if theirs is h11.SEND_BODY:
            self._close_in(KEEP)
        elif theirs is not h11.IDLE:
            self._close_in(None)
        elif self._timer is None and self.timeout_keep_alive_task is None:  # a head has begun; each part is no new time
            self._close_in(HEAD)
        if theirs is h11.DONE and len(self.conn.trailing_data[0]) < HIGH_WATER_LIMIT:
            self.flow.resume_reading()

    def send_400_response(self, msg: str) -> None:
        """What comes is no HTTP, which is the end: an answer that it still waits for has no reader any more, and one
        that it has already (to a head whose body breaks) cannot be followed by another.
        """
        if len(self.conn.trailing_data[0]) > HEAD_BYTES:
            msg = f"The head of a request is over the limit of {HEAD_BYTES} bytes."
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def _should_upgrade(self) -> bool:
        """Nothing is upgraded to. Uvicorn would say so twice for each request of a client that asks, as Java's does."""
        return False

    def _close_in(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self.transport.close)


class Uvicorn(uvicorn.Server):
    """Stops taking requests at SIGTERM and Ctrl-C, waits `drain` seconds for those there are, then ends them."""

    def __init__(self, config: uvicorn.Config, llm: AsyncLLM, drain: float) -> None:
        super().__init__(config)
        self.llm, self.drain, self._told = llm, drain, -math.inf

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        asyncio.get_running_loop().set_exception_handler(self._failed)
        await super().startup(sockets)

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Tell of an error in the loop. For want of files asyncio fails thousands of times a second, to say it once."""
        if context["message"] != "socket.accept() out of system resource":
            loop.default_exception_handler(context)
        elif loop.time() >= self._told + AGAIN:
            self._told = loop.time()
            log.error("connections have to wait, as too many are open (ulimit -n): %s", context["exception"])

    async def on_tick(self, counter: int) -> bool:
        """Whether it shall end."""
        return await super().on_tick(counter) or self.llm.lost

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End. A Unix socket goes while it is listened at: from then on another server may come to stand there."""
        if self.config.uds is not None:
            Path(self.config.uds).unlink(missing_ok=True)
        closing = asyncio.ensure_future(self.llm.aclose(self.drain))
        for listening in self.servers:
            listening.close()
        self.servers = []  # from Python 3.12 on uvicorn would wait with them for who stopped in a TLS handshake, too
        await super().shutdown(sockets)
        if self.force_exit:  # a second Ctrl-C: what is left ends now
            await self.llm.aclose()
            if self.server_state.tasks:  # their last frames
                await asyncio.wait(self.server_state.tasks, timeout=AT_ONCE)
            await self.lifespan.shutdown()
        await closing


def server(app: ASGIApp, llm: AsyncLLM, drain: float, **options: Any) -> Uvicorn:
    """A server, ready to `run()`; `options` as uvicorn.Config's."""
    config = uvicorn.Config(
        app, log_config=None, access_log=False, server_header=False, ws="none",
        http=Protocol,  # whatever else is installed: h11 bounds a request's head, which httptools does not
        h11_max_incomplete_event_size=HEAD_BYTES, timeout_keep_alive=KEEP,
        timeout_graceful_shutdown=int(drain) + LAST_WORDS, **options,
    )  # fmt: skip
    return Uvicorn(config, llm, drain)


def open_more_files() -> None:
    """Let this process have as many files open as it may: each connection is one."""
    with suppress(ImportError, OSError, ValueError):  # elsewhere than on Unix; where the system has a lower limit
        import resource

        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class JsonLines(logging.Formatter):
    """One JSON object a line, with the fields that our own records carry."""

    def format(self, record: logging.LogRecord) -> str:
        """A record."""
        about = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            about["exception"] = self.formatException(record.exc_info)
        return json.dumps(about, default=str)


class Lines(logging.Formatter):
    """For people; what another sends cannot begin a line of its own."""

    def format(self, record: logging.LogRecord) -> str:
        """A record."""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        about = " ".join(f"{k}={v}" for k, v in getattr(record, "fields", {}).items() if k not in SHOWN)
        line = " ".join(f"{clock} {record.levelname.lower()} {record.getMessage()} {about}".split())
        line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
        return line + (f"\n{self.formatException(record.exc_info)}" if record.exc_info else "")


SHOWN = ("method", "path", "status")  # in the message


def log_to_stderr(form: str, level: str) -> None:
    """Send the log of this process there, as `text` or `json` lines."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if form == "json" else Lines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for noisy in ("httpx", "asyncio"):
        logging.getLogger(noisy).setLevel("WARNING")
