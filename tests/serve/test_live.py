"""A real server, a real socket, OpenAI's own client."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from itertools import islice
from typing import Any

import httpx
import openai
import pytest

import outrider
from outrider import LLM, AsyncLLM
from outrider.cli import main
from outrider.cli.serve import _listen, _listen_at
from outrider.errors import ConfigError
from outrider.serve.app import create_app
from outrider.serve.settings import Settings
from tests.serve.conftest import frames_of

PROMPT = "Once upon a time there was a little girl who"
TALK: Any = [{"role": "user", "content": "Tell me of the sea."}]


def test_openais_client(live, tiny_llm):
    url = live(api_keys=("key",))
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0)
    assert [model.id for model in client.models.list()] == ["tiny"] == [client.models.retrieve("tiny").id]
    expected = tiny_llm.chat(TALK, max_tokens=12, seed=3)
    answer = client.chat.completions.create(model="tiny", messages=TALK, max_completion_tokens=12, seed=3)
    assert answer.choices[0].message.content == expected.text
    stream = client.chat.completions.create(
        model="tiny", messages=TALK, max_tokens=12, seed=3, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected.text
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == len(expected.token_ids)
    completion = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=8, temperature=0, extra_body={"min_p": 0.1}
    )
    assert completion.choices[0].text == tiny_llm.generate(PROMPT, max_tokens=8, temperature=0)[0].text
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="tiny", prompt=PROMPT, temperature=-1)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt=PROMPT)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{url}/v1", api_key="wrong").models.list()


def wait_until(true: Any) -> None:
    deadline = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
def test_who_goes_is_not_written_for(live, tiny_llm, stream):
    url = live()
    connection = http.client.HTTPConnection(url.removeprefix("http://"))
    body = {"prompt": PROMPT, "max_tokens": 100_000, "ignore_eos": True, "stream": stream}
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    wait_until(lambda: tiny_llm.engine.running)
    connection.sock.close()
    connection.close()
    wait_until(lambda: not tiny_llm.engine.running)


def test_silence_is_filled(live, monkeypatch, tiny_llm):
    real = tiny_llm.engine.step_within

    def slow(*args: Any, **options: Any) -> Any:
        time.sleep(0.15)
        return real(*args, **options)

    monkeypatch.setattr(tiny_llm.engine, "step_within", slow)
    url = live(keep_alive=0.1)
    body = {"prompt": PROMPT, "max_tokens": 3, "ignore_eos": True, "stream": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=30)
    assert ": keep-alive\n\n" in answer.text and len(frames_of(answer.text)) >= 3


def test_keys_under_the_path_of_a_proxy(live):
    """What is open to all stays so, and a browser is asked for the key at the page."""
    url = live(api_keys=("secret",), options={"root_path": "/llm"})
    for whole in (url, f"{url}/llm"):  # the proxy takes its path away, or leaves it
        answers = {path: httpx.get(whole + path) for path in ("/health", "/metrics", "/v1/models", "/", "/v2")}
        assert {path: answer.status_code for path, answer in answers.items()} == {
            "/health": 200, "/metrics": 200, "/v1/models": 401, "/": 401, "/v2": 401,
        }  # fmt: skip
        assert answers["/"].headers["www-authenticate"].startswith("Basic")
        assert answers["/v1/models"].headers["www-authenticate"] == "Bearer"
        key = {"authorization": "Bearer secret"}
        codes = [httpx.get(whole + path, headers=key).status_code for path in ("/v1/models", "/", "/v2", "/llm/health")]
        assert codes == [200, 200, 404, 404 if whole != url else 200]
    bare = httpx.get(f"{url}/llm", headers=key)  # the page there would look for the API beside the proxy's path
    assert bare.status_code == 307 and bare.headers["location"] == "/llm/"
    assert httpx.get(f"{url}/llms").status_code == 401
    for path in ("/health", "/llm/health"):  # by which scheme and name the proxy was asked nobody says
        slash = httpx.get(f"{url}{path}/?a=b", headers={"host": "proxy.example"})
        assert slash.status_code == 307 and slash.headers["location"] == "/llm/health?a=b"


def test_a_shutdown_lets_requests_end(live, tiny_llm):
    url, found = live(drain=20.0), []
    body = {"prompt": PROMPT, "max_tokens": 60, "seed": 1, "ignore_eos": True}
    thread = threading.Thread(target=lambda: found.append(httpx.post(f"{url}/v1/completions", json=body, timeout=60)))
    thread.start()
    wait_until(lambda: tiny_llm.engine.running)
    live.end()
    thread.join()
    assert found[0].json()["usage"]["completion_tokens"] == 60


def test_a_shutdown_does_not_wait_for_ever(live, tiny_llm):
    url, found = live(drain=0.0), []
    body = {"prompt": PROMPT, "max_tokens": 100_000, "seed": 1, "ignore_eos": True, "stream": True}
    thread = threading.Thread(target=lambda: found.append(httpx.post(f"{url}/v1/completions", json=body, timeout=60)))
    thread.start()
    wait_until(lambda: tiny_llm.engine.running)
    live.end()
    thread.join()
    frames = frames_of(found[0].text)
    assert frames[-1]["error"]["code"] == 503 and "closed" in frames[-1]["error"]["message"]


def test_a_shutdown_does_not_wait_for_a_body(live, caplog):
    url, body = live(drain=0.0), b'{"prompt": '
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 60) as slow:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        slow.sendall(f"{head}content-length: 100\r\n\r\n".encode() + body)
        wait_until(lambda: httpx.get(f"{url}/health").status_code == 200)  # so that has come, too
        live.end()
        answer = slow.makefile("rb").read()
    head, _, said = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ") and json.loads(said)["error"]["code"] == 503
    assert "Exception in ASGI application" not in caplog.text


def test_a_shutdown_does_not_wait_for_handshakes(live, monkeypatch):
    """From Python 3.12 on `wait_closed` ends only with all connections, those that stopped in TLS's beginning too."""
    url = live(drain=60.0)
    monkeypatch.setattr(asyncio.base_events.Server, "wait_closed", lambda _: asyncio.sleep(60))
    live.end()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGINT])
def test_the_command(tmp_path, by):
    """`outrider serve`, at a Unix socket, with a key from the environment and JSON logs; it ends when it is told to."""
    at = tmp_path / "socket"
    command = [sys.executable, "-m", "outrider", "serve", "tiny", "--uds", str(at), "--log-format", "json"]
    command += [
        "--speculate",
        "ngram",
        "--served-model-name",
        "mine",
        "--override-generation-config",
        '{"temperature": 0}',
    ]
    environment = {**os.environ, "OUTRIDER_API_KEY": "secret", "OMP_NUM_THREADS": "1"}
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # what a shell starts in the background ignores it
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, preexec_fn=heard)
    try:
        wait_until(at.exists)
        transport = httpx.HTTPTransport(uds=str(at), retries=10)
        with httpx.Client(
            transport=transport, base_url="http://x", headers={"authorization": "Bearer secret"}, timeout=60
        ) as client:
            one, two = (
                client.post("/v1/completions", json={"prompt": PROMPT, "model": "mine"}).json()["choices"]
                for _ in range(2)
            )
            assert one == two and one[0]["text"]  # greedy, as overridden
        process.send_signal(by)
        errors = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    lines = [json.loads(line) for line in errors.splitlines() if line.startswith("{")]
    assert [line["status"] for line in lines if "status" in line] == [200, 200]
    assert "Traceback" not in errors and "leaked" not in errors
    assert not at.exists()
    assert process.returncode == (-by if by == signal.SIGTERM else 130)  # an end by SIGTERM itself is clean to systemd


def test_as_pid_1_it_ends_with_a_code(monkeypatch):
    """A container's first process hears those signals alone that it handles: from the start, while it loads, too."""

    def load(*_: Any, **__: Any) -> None:
        signal.raise_signal(signal.SIGTERM)
        pytest.fail("the signal was not heard")

    monkeypatch.setattr(os, "getpid", lambda: 1)
    monkeypatch.setattr(outrider, "LLM", load)
    monkeypatch.setattr(sys, "argv", ["outrider", "serve", "tiny", "--port", "0"])
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 143


def test_a_second_interrupt_ends_at_once(tmp_path):
    """Whatever is left of the time for draining; the answers under way end with an error that says why."""
    at, heard = tmp_path / "socket", list[str]()
    command = [sys.executable, "-m", "outrider", "serve", "tiny", "--uds", str(at), "--drain", "3600"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        wait_until(at.exists)
        transport = httpx.HTTPTransport(uds=str(at), retries=10)
        body = {"prompt": PROMPT, "max_tokens": 8000, "stream": True, "ignore_eos": True, "n": 8}
        with (
            httpx.Client(transport=transport, base_url="http://x", timeout=60) as client,
            client.stream("POST", "/v1/completions", json=body) as answer,
        ):
            lines = answer.iter_lines()
            heard.append(next(lines))
            process.send_signal(signal.SIGINT)
            wait_until(lambda: not at.exists())
            another = _listen_at(at)  # as the next one may, while this one drains
            while process.poll() is None and not heard[-1].startswith("data: [DONE]"):
                process.send_signal(signal.SIGINT)
                heard += [line for line in islice(lines, 20) if line] or ["data: [DONE]"]
        errors = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    assert "the engine was closed before the answer was complete" in heard[-2]
    assert at.is_socket()
    another.close()
    assert process.returncode == 130 and "Traceback" not in errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--port", "70000"], "--port"), (["--log-format", "xml"], "--log-format"), (["--api-key", ""], "--api-key"),
        (["--ssl-keyfile", "x"], "--ssl-certfile"), (["--override-generation-config", '{"top_q": 1}'], "top_q"),
        (["--override-generation-config", '{"top_p": 7}'], "top_p"), (["--generation-config", "/nowhere"], "/nowhere"),
        (["--host", "no.such.host.invalid"], "cannot listen"), (["--speculate", "magic"], "magic"),
        (["--log-level", "loud"], "--log-level"), (["--ssl-ca-certs", "/nowhere"], "--ssl-ca-certs"),
        (["--drain", "inf"], "--drain"), (["--keep-alive", "inf"], "--keep-alive"), (["--host", ""], "cannot listen"),
        (["--max-logprobs", "5000"], "1024"), (["--served-model-name", " "], "--served-model-name is empty"),
        (["--cors-origin", ""], "--cors-origin is empty"),
        (["--uds", "/nowhere/at"], "--uds /nowhere/at cannot be a socket"),
        (["--uds", __file__], "is no socket, and is left as it is"), (["--uds", "x" * 200], "too long"),
        (["--ssl-keyfile", __file__, "--ssl-certfile", __file__], "PEM"),
        (["--ssl-ca-certs", __file__], "--ssl-ca-certs needs --ssl-keyfile"),  # nobody would be asked for one
        (["--api-key", " "], "--api-key is empty"), (["--api-key", "\udcff"], "--api-key is not UTF-8"),
        (["--served-model-name", "\udcff"], "--served-model-name is not UTF-8"), (["--cors-origin", "/"], "empty"),
        (["--chat-template", "/nowhere"], "--chat-template /nowhere cannot be read"),
        (["--chat-template", os.devnull], "is empty"),
    ],
)  # fmt: skip
def test_options_that_cannot_be(options, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["outrider", "serve", "tiny", *options])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err.strip()
    assert ended.value.code == 2 and message in said and "\n" not in said


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_the_host_of_all_addresses():
    """`::`, as clusters with both protocols have it, takes those who come by IPv4, too."""
    try:
        listening = _listen("::", 0)
    except ConfigError as error:
        pytest.skip(str(error))
    with listening:
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, listening.getsockname()[1]), 10).close()


def test_options_as_they_are_meant(monkeypatch, tmp_path):
    """A mounted secret ends with a line, an origin has no slash at its end, and a root path one before it."""
    found: dict[str, Any] = {}

    def made(engine, settings):
        found["settings"] = settings
        return "app"

    class Ended(Exception):
        """Instead of serving."""

    def never(app, engine, drain, **options):
        found.update(options)
        raise Ended

    monkeypatch.setattr("outrider.serve.app.create_app", made)
    monkeypatch.setattr("outrider.serve.server.server", never)
    monkeypatch.setenv("OUTRIDER_API_KEY", " secret\n")
    template = tmp_path / "mine.jinja"
    template.write_text("{{ messages }}")
    options = ["--port", "0", "--cors-origin", " http://a.example/", "--root-path", " that/", "--device", "cpu"]
    options += ["--chat-template", str(template)]
    monkeypatch.setattr(sys, "argv", ["outrider", "serve", "tiny", *options])
    with pytest.raises(Ended):
        main()
    assert found["settings"].api_keys == ("secret",) and found["root_path"] == "/that"
    assert found["settings"].cors_origins == ("http://a.example",)
    assert found["settings"].chat_template == "{{ messages }}"


def test_the_name_of_a_file_that_is_no_utf_8(monkeypatch):
    """Neither JSON nor what /metrics writes has halves of characters."""

    class Ended(Exception):
        """Instead of serving."""

    def made(**about: Any) -> None:
        raise Ended(*about["names"])

    monkeypatch.setattr("outrider.serve.settings.Settings", made)
    monkeypatch.setattr(sys, "argv", ["outrider", "serve", "caf\udce9.gguf"])
    with pytest.raises(Ended) as ended:
        main()
    assert ended.value.args == ("caf?.gguf",)


def test_another_chat_template():
    """It is the tokenizer's from then on; one that cannot be is refused at the start."""
    llm = LLM("tiny", device="cpu")
    engine = AsyncLLM(llm)
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    create_app(engine, Settings(("tiny",), chat_template=template))
    assert llm.tokenizer.decode(llm.render([{"role": "user", "content": "Yes."}])) == "<user>Yes."
    for wrong in ("{% if %}", "{{ raise_exception('no') }}"):
        with pytest.raises(ConfigError, match="chat template"):
            create_app(engine, Settings(("tiny",), chat_template=wrong))
    engine.close()


def test_a_unix_socket_is_taken_only_from_the_dead(tmp_path, monkeypatch, capsys):
    at = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as another:
        another.bind(str(at))
        another.listen()
        monkeypatch.setattr(sys, "argv", ["outrider", "serve", "tiny", "--uds", str(at)])
        with pytest.raises(SystemExit):
            main()
        assert "another server listens" in capsys.readouterr().err and at.is_socket()
    with _listen_at(at):  # what is left of it is no hindrance
        assert at.is_socket()
        with pytest.raises(ConfigError, match="another server listens"):  # that one is still loading its model
            _listen_at(at)


def test_a_unix_socket_with_a_full_queue(tmp_path):
    at = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as another, socket.socket(socket.AF_UNIX) as waits:
        another.bind(str(at))
        another.listen(0)
        waits.connect(str(at))
        with pytest.raises(ConfigError, match="another server listens"):
            _listen_at(at)


def test_without_the_extra(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["outrider", "serve", "tiny"])
    monkeypatch.setattr(outrider, "serve", outrider.serve)  # which another is imported in place of
    for name in [name for name in sys.modules if name.startswith("outrider.serve")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    with pytest.raises(SystemExit):
        main()
    assert "pip install 'outrider[serve]'" in capsys.readouterr().err
