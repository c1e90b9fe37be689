"""A server with the dialect of vLLM and ours, small enough to misbehave on demand.

`script(body)` says what a request gets: a number of seconds to wait, a dict or a string as one frame (`data: ...`),
bytes as they are, an int as the status of a refusal (first; with the dict behind it as its body), `CUT` to break the
connection. After its end comes the end of the response, cleanly.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

CUT = object()


class Fake(ThreadingHTTPServer):
    """Use it as a context; `url` is its address, `bodies` what it was asked, `gone` how many clients left early."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, script: Callable[[dict[str, Any]], Iterable[Any]], pages: dict[str, Any] | None = None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script = script
        self.pages = {"/v1/models": {"data": [{"id": "fake", "max_model_len": 4096}]}, **(pages or {})}
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.gone = 0
        self.key: str | None = None
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> Fake:
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, *where: object) -> None:
        """A client that leaves is no error here."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Fake

    def log_message(self, *words: object) -> None:
        """Nothing: tests are quiet."""

    def refused(self) -> bool:
        if (key := self.server.key) is None or self.headers.get("Authorization") == f"Bearer {key}":
            return False
        self.reply({"error": {"message": "no or wrong API key", "type": "authentication_error"}}, 401)
        return True

    def reply(self, what: Any, status: int = 200) -> None:
        body, headers = (
            what if isinstance(what, tuple) else (json.dumps(what).encode(), {"Content-Type": "application/json"})
        )
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.path.startswith("/v1") and self.refused():
            return
        found = self.server.pages.get(self.path)
        self.reply(found or {"error": {"message": "no such route"}}, 200 if found else 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.refused():
            return
        self.server.bodies.append({**body, "path": self.path})
        self.server.headers.append(dict(self.headers))
        actions = iter(self.server.script(body))
        begun = False
        for action in actions:
            if isinstance(action, int) and not isinstance(action, bool):
                self.reply(next(actions), action)
                return
            if not begun:
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                begun = True
            try:
                self.act(action)
            except (BrokenPipeError, ConnectionResetError):
                self.server.gone += 1
                self.close_connection = True
                return
            if action is CUT:
                return
        self.wfile.write(b"0\r\n\r\n")

    def act(self, action: Any) -> None:
        if action is CUT:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
        elif isinstance(action, float):
            time.sleep(action)
        else:
            text = json.dumps(action) if isinstance(action, dict) else action
            data = text if isinstance(text, bytes) else f"data: {text}\n\n".encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            self.wfile.flush()
