"""What arrives at a socket and is no proper request, clients that die, and a server that does."""

from __future__ import annotations

import ctypes
import errno
import http.client
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest

from outrider.serve.server import READ, Protocol, open_more_files
from tests.serve.test_live import wait_until

PROMPT = "Once upon a time there was a little girl who"
LONG = {"prompt": PROMPT, "max_tokens": 100_000, "ignore_eos": True, "stream": True}


def connect(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def post(body: bytes, *headers: str, length: int | None = None) -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json", *headers]
    if length is None or length >= 0:
        lines.append(f"Content-Length: {len(body) if length is None else length}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def answered(url: str, data: bytes, seconds: float = 60) -> bytes:
    """All that comes back for some bytes, until the server closes, or has said nothing for so long."""
    with connect(url) as peer:
        peer.settimeout(seconds)
        peer.sendall(data)
        found = b""
        try:
            while part := peer.recv(65536):
                found += part
        except (TimeoutError, ConnectionResetError):
            pass
        return found


def still_right(url: str, expected: str) -> None:
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": PROMPT, "max_tokens": 4, "seed": 1}, timeout=120)
    assert answer.json()["choices"][0]["text"] == expected


BODY = json.dumps({"prompt": PROMPT, "max_tokens": 1}).encode()
LAST = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
TRICKS: dict[str, bytes] = {
    "no http": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 9 + b"\r\n\r\n",
    "no method": b"/v1/models HTTP/1.1\r\n\r\n",
    "http/0.9": b"GET /\r\n\r\n",
    "two lengths": post(BODY, "Content-Length: 5"),
    "length and chunks": post(BODY, "Transfer-Encoding: chunked"),
    "negative length": post(BODY, "Content-Length: -1", length=-1),
    "no number": post(BODY, "Content-Length: many", length=-1),
    "huge length": post(BODY, f"Content-Length: {10**30}", length=-1),
    "a broken chunk": post(b"zz\r\n{}\r\n0\r\n\r\n", "Transfer-Encoding: chunked", length=-1),
    "a broken chunk, not read": b"POST /v1/other HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "a folded header": post(BODY, "X-A: b\r\n  c"),
    "nul in a header": post(BODY, "X-Request-Id: a\x00b"),
    "a line in a header": post(BODY, "X-Request-Id: a\rSet-Cookie: b"),
    "a huge header": post(BODY, "X-A: " + "b" * 200_000),
    "many headers": post(BODY, *(f"X-{i}: b" for i in range(5000))),
    "no host": b"GET /version HTTP/1.1\r\n\r\n",
    "a space before the colon": post(BODY, "X-A : b"),
    "nul in the path": b"GET /v1/models/%00 HTTP/1.1\r\nHost: x\r\n\r\n",
    "up and up": b"GET /v1/models/../../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
    "another's url": b"GET http://elsewhere/version HTTP/1.1\r\nHost: x\r\n\r\n",
    "connect": b"CONNECT elsewhere:443 HTTP/1.1\r\nHost: elsewhere\r\n\r\n",
    "an upgrade": b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    "expects": post(BODY, "Expect: something"),
}


def test_no_proper_request(live, tiny_llm, caplog):
    """None of them is our failure, or makes one of the next."""
    expected = tiny_llm.generate(PROMPT, max_tokens=4, seed=1)[0].text
    url = live()
    with ThreadPoolExecutor(len(TRICKS)) as pool:
        answers = [*pool.map(partial(answered, url, seconds=2), TRICKS.values())]  # some are waited for, or kept
    for name, answer in zip(TRICKS, answers, strict=True):
        status = answer[9:12]
        assert not answer or (answer.startswith(b"HTTP/1.") and not status.startswith(b"5")), (name, answer[:200])
        assert b"Traceback" not in answer and b"Set-Cookie" not in answer, name
    still_right(url, expected)
    assert "a request failed" not in caplog.text


def test_a_body_that_breaks_is_not_our_failure(live, caplog):
    """Together with its head, and behind an answer to that: strangers without a key write no traces into the log."""
    url, broken = live(api_keys=("k",)), b"zz\r\n"
    head = post(b"", "Transfer-Encoding: chunked", length=-1)
    known = post(b"", "Transfer-Encoding: chunked", "X-Api-Key: k", length=-1)
    for told in (head + broken, known + broken):
        assert answered(url, told).startswith(b"HTTP/1.1 400 ")
    with connect(url) as peer:
        peer.sendall(head)
        assert peer.recv(65536).startswith(b"HTTP/1.1 401 ")
        peer.sendall(broken)
        while peer.recv(65536):
            pass
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_who_offers_an_upgrade_is_answered_as_ever(live, caplog):
    """Java's client offers HTTP/2 with each request; that the log advises to install something would help nobody."""
    asked = "Upgrade: h2c", "Connection: Upgrade, HTTP2-Settings", "HTTP2-Settings: AAEAAEAA"
    assert answered(live(), post(BODY, *asked) * 2 + LAST).count(b"HTTP/1.1 200") == 3
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_a_length_and_chunks_end_the_connection(live):
    """What a proxy took for the end of this request may be another; nothing behind it is read."""
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    answer = answered(live(), post(chunks, "Transfer-Encoding: chunked", length=4) + post(BODY))
    assert answer.startswith(b"HTTP/1.1 400") and answer.count(b"HTTP/1.1") == 1
    assert b"connection: close" in answer.lower() and b"Transfer-Encoding, one of them" in answer


def test_a_head_is_as_long_as_proxies_pass_on_however_it_comes(live):
    url, whole = live(), post(BODY, "Cookie: " + "b" * 60_000)
    with connect(url) as peer:
        for at in range(0, len(whole), 5000):
            peer.sendall(whole[at : at + 5000])
        assert peer.recv(65536).startswith(b"HTTP/1.1 200 ")
    longer = post(BODY, "Cookie: " + "b" * 70_000)[: 2**16 + 1]
    assert answered(url, longer).endswith(b"The head of a request is over the limit of 65536 bytes.")


def test_a_head_that_does_not_end_is_not_kept(live):
    with connect(live()) as peer:
        peer.sendall(post(BODY)[:60] + b"X-A: ")
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            for _ in range(200):
                peer.sendall(b"b" * 65536)
                time.sleep(0.002)


def test_bodies_in_chunks_and_old_clients(live, tiny_llm):
    """Chunks of any size, one that stalls and goes, HTTP/1.0 and its streams, a client that asks first."""
    url = live()
    with connect(url) as peer:
        peer.sendall(post(b"", "Transfer-Encoding: chunked", "Connection: close", length=-1))
        for at in range(0, len(BODY), 7):
            piece = BODY[at : at + 7]
            peer.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))
        peer.sendall(b"0\r\nX-Trailer: 1\r\n\r\n")
        assert peer.recv(65536).startswith(b"HTTP/1.1 200")
    with connect(url) as peer:
        peer.sendall(post(b"10\r\nabc", "Transfer-Encoding: chunked", length=-1))
        time.sleep(0.05)
    old = answered(url, post(BODY).replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert b" 200 " in old[:20] and b"text_completion" in old and b"chunked" not in old.lower()
    stream = json.dumps({"prompt": PROMPT, "max_tokens": 2, "stream": True}).encode()
    old = answered(url, post(stream).replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert old.endswith(b"data: [DONE]\n\n") and b"chunked" not in old.lower()
    assert answered(url, post(BODY, "Expect: 100-continue", "Connection: close")).startswith(b"HTTP/1.1 100 ")
    wait_until(lambda: not tiny_llm.engine.running and not tiny_llm.engine.waiting)
    assert tiny_llm.engine.leaked == 0


def test_others_get_their_turn_between_two_pieces_of_a_body(live, monkeypatch):
    """One in chunks of a byte, as a stranger may send it, kept all others waiting for seconds at each read."""
    sizes, read = list[int](), Protocol.data_received
    monkeypatch.setattr(Protocol, "data_received", lambda self, data: (sizes.append(len(data)), read(self, data))[1])
    body = b"1\r\n \r\n" * 20_000 + b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    url = live(options={"loop": "asyncio"})
    answer = answered(url, post(body, "Transfer-Encoding: chunked", "Connection: close", length=-1))
    assert answer.startswith(b"HTTP/1.1 200 ") and max(sizes) <= READ < sum(sizes)


def test_two_requests_at_once_on_one_connection(live):
    answer = answered(live(), post(BODY) + post(BODY) + LAST)
    assert answer.count(b"HTTP/1.1 200") == 3


def test_slow_and_silent_clients(live, tiny_llm):
    """Hundreds that send nothing, or a little; one that does not read; one that says it will send no more."""
    expected = tiny_llm.generate(PROMPT, max_tokens=4, seed=1)[0].text
    url = live()
    most = min(1000, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 3)
    peers = [connect(url) for _ in range(most)]
    try:
        for i, peer in enumerate(peers):
            peer.sendall(post(BODY)[: i % 150])
        deaf = connect(url)
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.sendall(post(json.dumps(LONG).encode()))
        still_right(url, expected)
        deaf.close()
        half = connect(url)
        half.sendall(post(json.dumps(LONG).encode()))
        half.shutdown(socket.SHUT_WR)
        still_right(url, expected)
        half.close()
    finally:
        for peer in peers:
            peer.close()
    wait_until(lambda: not tiny_llm.engine.running and not tiny_llm.engine.waiting)
    assert tiny_llm.engine.leaked == 0


def test_a_request_that_does_not_come_whole_is_not_waited_for(live, monkeypatch):
    """Nothing, a head byte by byte, a body that stops; but between two requests there is time."""
    monkeypatch.setattr("outrider.serve.server.HEAD", 0.3)
    url = live()
    monkeypatch.setattr("outrider.serve.server.KEEP", 0.3)  # of bodies; the server has the other
    idle = http.client.HTTPConnection(url.removeprefix("http://"))
    for _ in range(2):
        idle.request("GET", "/health")
        assert idle.getresponse().read() == b""
        silent, begun, stopped = connect(url), connect(url), connect(url)
        stopped.sendall(post(BODY)[:-1])
        with begun, silent, stopped:
            with pytest.raises((ConnectionResetError, BrokenPipeError)):
                for byte in b"GET /health HTTP/1.1\r\nX-A: " + b"b" * 5000:
                    begun.sendall(bytes([byte]))
                    time.sleep(0.01)
            assert silent.recv(1) == stopped.recv(1) == b""
    idle.close()


@pytest.mark.parametrize("stream", [False, True])
def test_who_goes_behind_a_next_request_is_not_written_for(live, tiny_llm, stream):
    url = live()
    with connect(url) as peer:
        peer.sendall(post(json.dumps({**LONG, "stream": stream}).encode()))
        wait_until(lambda: tiny_llm.engine.running)
        peer.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        peer.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    wait_until(lambda: not tiny_llm.engine.running)


def test_what_cannot_be_accepted_is_said_once(live, monkeypatch, caplog):
    """While there are too many files; then all goes on."""
    accept, failed = socket.socket.accept, []

    def fails(self: socket.socket) -> Any:
        if len(failed) < 3000:  # more than the backlog, so that asyncio has begun again
            failed.append(self)
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(self)

    monkeypatch.setattr("asyncio.constants.ACCEPT_RETRY_DELAY", 0.01)
    monkeypatch.setattr(socket.socket, "accept", fails)
    assert httpx.get(f"{live()}/health").status_code == 200
    assert len(failed) == 3000 and [r.message for r in caplog.records if "open" in r.message] == [
        "connections have to wait, as too many are open (ulimit -n): [Errno 24] Too many open files"
    ]


def test_as_many_files_as_there_may_be():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1000), hard))
        open_more_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


ARENAS = """
import ctypes, sys, threading
from outrider.cli.serve import keep_one_arena
keep_one_arena()
libc, barrier = ctypes.CDLL(None), threading.Barrier(4)
def allocate():
    barrier.wait()
    libc.malloc(10_000)
    barrier.wait()
threads = [threading.Thread(target=allocate) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
libc.fopen.restype = ctypes.c_void_p
file = ctypes.c_void_p(libc.fopen(sys.argv[1].encode(), b"w"))
libc.malloc_info(0, file), libc.fclose(file)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="another C library")
def test_threads_share_what_was_freed(tmp_path):
    subprocess.run([sys.executable, "-c", ARENAS, str(tmp_path / "arenas")], check=True, timeout=100)
    assert (tmp_path / "arenas").read_text().count("<heap ") == 1


READER = """
import sys, httpx
with httpx.stream("POST", sys.argv[1] + "/v1/completions", content=sys.argv[2], timeout=60,
                  headers={"content-type": "application/json"}) as answer:
    for line in answer.iter_lines():
        print(line, flush=True)
"""


def test_a_client_that_is_killed(live, tiny_llm):
    expected = tiny_llm.generate(PROMPT, max_tokens=4, seed=1)[0].text
    url = live()
    client = subprocess.Popen([sys.executable, "-c", READER, url, json.dumps(LONG)], stdout=subprocess.PIPE, text=True)
    assert client.stdout is not None and client.stdout.readline().startswith("data: ")
    client.kill()
    wait_until(lambda: not tiny_llm.engine.running)
    client.wait()
    assert tiny_llm.engine.leaked == 0
    still_right(url, expected)


@pytest.mark.slow
def test_a_server_that_is_killed(tmp_path, tiny_llm):
    """Under load; another one at the same socket gives what the first one gave, and its clients see that it went."""
    at, environment = tmp_path / "socket", {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "outrider", "serve", "tiny", "--dtype", "float32", "--uds", str(at)]
    body = {"prompt": PROMPT, "max_tokens": 30, "seed": 7, "return_token_ids": True}
    expected = tiny_llm.generate(PROMPT, max_tokens=30, seed=7)[0].token_ids

    def ready(client: httpx.Client) -> bool:
        try:
            return client.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def ask(client: httpx.Client, **more: Any) -> Any:
        return client.post("/v1/completions", json={**body, **more}).json()["choices"][0]["token_ids"]

    for killed in (True, False):
        server = subprocess.Popen([*command, "--speculate", "ngram"], env=environment, stderr=subprocess.DEVNULL)
        try:
            with httpx.Client(transport=httpx.HTTPTransport(uds=str(at)), base_url="http://x", timeout=120) as client:
                wait_until(lambda client=client: ready(client))
                assert ask(client) == expected
                if killed:
                    with (
                        pytest.raises(httpx.TransportError),
                        client.stream("POST", "/v1/completions", json=LONG) as answer,
                    ):
                        for count, _ in enumerate(answer.iter_lines()):
                            if count == 5:
                                server.send_signal(signal.SIGKILL)
                        time.sleep(0)
        finally:
            server.kill()
            server.wait()
