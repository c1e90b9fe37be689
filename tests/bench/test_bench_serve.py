"""`bench serve` against a small server that also misbehaves. What is measured is not judged here, only counted."""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from http.client import BadStatusLine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.request import urlopen

import pytest
from fake_openai import CUT, Fake
from typer.testing import CliRunner

from outrider.bench import report, serve, server
from outrider.bench.serve import Level, Settings
from outrider.cli import app
from outrider.errors import ConfigError

aiohttp = pytest.importorskip("aiohttp", reason="bench serve needs aiohttp")


def text(body: dict[str, Any], piece: str, finish: str | None = None) -> dict[str, Any]:
    """One frame in the dialect of the endpoint that was asked."""
    said = {"delta": {"content": piece}} if "messages" in body else {"text": piece}
    return {"choices": [{"index": 0, **said, "finish_reason": finish}]}


def good(body: dict[str, Any]) -> Iterator[Any]:
    """Four frames, ten tokens, three forwards with five drafted and four kept."""
    yield b": keep-alive\n\n"
    if "messages" in body:
        yield {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
    yield 0.02
    for piece in ("a", "é b", "c"):
        yield text(body, piece)
        yield 0.005
    yield text(body, "d", "stop")
    spec = {
        "num_spec_steps": 3,
        "mean_acceptance_length": 10 / 3,
        "num_draft_tokens": 5,
        "num_accepted_draft_tokens": 4,
        "per_step_drafted": [1] * 9000,
    }
    usage = {"prompt_tokens": 7, "completion_tokens": 10, "total_tokens": 17}
    yield {"choices": [], "usage": usage, "metrics": {"speculative_decoding": spec}}
    yield "[DONE]"


def measured(fake: Fake, **settings: Any) -> list[serve.Row]:
    return list(serve.run(Settings(fake.url, **{"levels": [Level(2)], "requests": 6, "warmup": 0, **settings})))


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("level", [Level(1), Level(4), Level(rate=100.0)], ids=str)
def test_counts_and_times(endpoint: str, level: Level) -> None:
    with Fake(good) as fake:
        (row,) = measured(fake, endpoint=endpoint, levels=[level])
    assert (row.requests, row.completed, row.errors, row.uncounted) == (6, 6, {}, 0)
    assert (row.new_tokens, row.prompt_tokens, row.model, row.finish) == (60, 42, "fake", {"stop": 6})
    assert row.acceptance_length == pytest.approx(10 / 3) and row.draft_acceptance_rate == pytest.approx(0.8)
    assert row.tokens_per_second == pytest.approx(60 / row.seconds)
    first, gap, each, whole = (
        row.time_to_first_token, row.time_between_frames, row.time_per_output_token, row.end_to_end
    )  # fmt: skip
    assert first and gap and each and whole
    assert 0.02 <= first["p50"] <= first["p95"] <= first["p99"] <= whole["p99"]
    assert gap["mean"] == pytest.approx(3 * each["mean"], rel=1e-6)  # 3 gaps of 10 tokens: each is over 9
    assert {body["path"] for body in fake.bodies} == {f"/v1{serve.ENDPOINTS[endpoint]}"}
    body = fake.bodies[0]
    assert body["stream"] is True and body["stream_options"] == {"include_usage": True}
    assert ("messages" in body) == (endpoint == "chat") and "ignore_eos" not in body
    assert sorted(body["seed"] for body in fake.bodies) == list(range(6))


def test_closed_loop_holds_its_concurrency_and_open_loop_does_not() -> None:
    at_once, most, lock, together = 0, 0, threading.Lock(), threading.Barrier(3)

    def script(body: dict[str, Any]) -> Iterator[Any]:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        together.wait(60)  # so many are under way at once
        with lock:
            at_once -= 1
        yield from good(body)

    with Fake(script) as fake:
        measured(fake, levels=[Level(3)], requests=9)
        assert most == 3
        most, together = 0, threading.Barrier(9)
        (row,) = measured(fake, levels=[Level(rate=1000.0)], requests=9)
        assert most == 9 == row.completed


def test_no_answer_is_read_while_others_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long ones take the client tenths of a second, which others' first tokens would wait for."""
    asked, hear = set(), serve.hear

    def heard(*args: Any) -> bool:
        asked.add(len(fake.bodies))
        return hear(*args)

    monkeypatch.setattr(serve, "hear", heard)
    with Fake(good) as fake:
        (row,) = measured(fake, levels=[Level(1)], requests=3)
    assert row.completed == 3 and asked == {3}


def test_arrivals_and_prompts_follow_from_the_seed() -> None:
    due = serve.arrivals(5.0, 2000, 3)
    assert due == serve.arrivals(5.0, 2000, 3) != serve.arrivals(5.0, 2000, 4)
    assert due[0] == 0 and due == sorted(due) and due[-1] / 1999 == pytest.approx(1 / 5, rel=0.1)
    with Fake(good) as fake:
        for _ in range(2):
            measured(fake, levels=[Level(1)], requests=11, seed=40, body={"speculative_config": {"method": "none"}})
    assert fake.bodies[:11] == fake.bodies[11:] and fake.bodies[0]["seed"] == 40
    assert fake.bodies[0]["messages"] == fake.bodies[8]["messages"] != fake.bodies[1]["messages"]  # 8 built-in prompts
    assert fake.bodies[5]["speculative_config"] == {"method": "none"}


def test_no_prompt_is_asked_twice_while_there_are_others(tmp_path: Path) -> None:
    """What a server has seen, it may remember; and the levels are the same with any warm-up."""
    file = tmp_path / "asked.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"prompt {i}"}) + "\n" for i in range(9)))
    for warmup, repeats in ((0, 0), (1, 1)):
        with Fake(good) as fake:
            rows = measured(fake, file=file, levels=[Level(1), Level(2), Level(rate=500.0)], requests=3, warmup=warmup)
        asked = [body["messages"][0]["content"] for body in fake.bodies]
        assert sorted(asked[warmup:]) == [f"prompt {i}" for i in range(9)] and len(asked) - len(set(asked)) == repeats
        assert sorted(body["seed"] for body in fake.bodies[warmup:]) == list(range(9))
        assert ("9 different prompts for 10 requests" in "".join(serve.remarks(rows))) == bool(repeats)


def hostile(body: dict[str, Any]) -> Iterator[Any]:
    """A server whose behaviour goes by the seed."""
    what = ["good", "refused", "html", "failing", "cut", "ended", "empty", "nonsense", "list", "deep", "silent"]
    kind = what[body["seed"] % len(what)]
    if kind == "refused":
        yield 429
        yield {"error": {"message": "the queue is full", "code": 429}}
    elif kind == "html":
        yield 502
        yield b"<h1>\nbad gateway</h1>", {"Content-Type": "text/html; charset=no-such"}
    elif kind == "good":
        yield from good(body)
    else:
        yield text(body, "begun")
        if kind == "failing":
            yield {"error": {"message": "memory ran out", "type": "server_error"}}
        elif kind == "cut":
            yield 0.05
            yield CUT
        elif kind == "nonsense":
            yield "{not json"
        elif kind == "list":
            yield "[1, 2]"
        elif kind == "deep":
            yield "[" * 100_000
        elif kind == "silent":
            yield 6.0
        elif kind == "empty":
            yield b"data:\n\nevent: what\n\n"


def test_whatever_a_server_does_is_counted_as_an_error_of_its_kind() -> None:
    with Fake(hostile) as fake:
        (row,) = measured(fake, levels=[Level(11)], requests=22, timeout=3.0)
        (opened,) = measured(fake, levels=[Level(rate=200.0)], requests=11, timeout=3.0)
    assert row.completed == 2 and opened.completed == 1 and row.new_tokens == 20
    assert row.errors == {
        "status 429": 2, "status 502": 2, "error frame": 2, "disconnected": 6, "not the protocol": 6, "timeout": 2,
    }  # fmt: skip
    assert sum(opened.errors.values()) == 10
    assert row.said["status 429"] == "the queue is full" and row.said["error frame"] == "memory ran out"
    assert "\n" not in "".join(row.said.values())
    assert row.end_to_end is not None and row.end_to_end["p99"] < 3.0  # of those that were answered
    assert any("2 x status 429: the queue is full" in line for line in serve.remarks([row]))


def test_missing_fields_are_no_errors() -> None:
    """llama-server's frames (content null at first, timings), vLLM's without metrics, and no usage at all."""

    def script(body: dict[str, Any]) -> Iterator[Any]:
        yield {"choices": [{"index": 0, "delta": {"role": "assistant", "content": None}, "finish_reason": None}]}
        for piece in "abc":
            yield {"choices": [{"index": 0, "delta": {"content": piece}, "logprobs": None}], "usage": None}
        yield {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}], "metrics": None}
        if body["seed"] == 0:
            timings = {"draft_n": 8, "draft_n_accepted": 6}
            yield {"choices": [], "usage": {"completion_tokens": 5, "prompt_tokens": None}, "timings": timings}
        if body["seed"] < 2:
            yield "[DONE]"

    with Fake(script) as fake:
        (row,) = measured(fake, levels=[Level(1)], requests=3)
    assert (row.completed, row.errors, row.uncounted) == (3, {}, 2) and row.new_tokens == 5 + 3 + 3
    assert row.acceptance_length is None and row.draft_acceptance_rate == 0.75 and row.prompt_tokens is None
    assert any("2 answers came without usage" in line for line in serve.remarks([row]))
    assert serve.cells(row)[-2:] == ["-", "75%"]


def test_tokens_a_forward_are_the_servers() -> None:
    """vLLM counts only forwards with a draft: what its answers have more of tokens came without."""

    def script(body: dict[str, Any]) -> Iterator[Any]:
        yield text(body, "a", "length")
        steps = body["seed"]
        spec = {"num_spec_steps": steps, "mean_acceptance_length": 1.0 + steps, "num_draft_tokens": 4 * steps}
        usage = {"completion_tokens": 48, "prompt_tokens": 3}
        yield {"choices": [], "usage": usage, "metrics": {"speculative_decoding": spec}}
        yield "[DONE]"

    with Fake(script) as fake:
        (row,) = measured(fake, requests=4)
    assert row.acceptance_length == pytest.approx((1 * 2 + 2 * 3 + 3 * 4) / 6) and row.draft_acceptance_rate == 0


def test_answers_without_text_have_no_first_token() -> None:
    def script(body: dict[str, Any]) -> Iterator[Any]:
        yield text(body, "", "stop")
        yield {"choices": [], "usage": {"completion_tokens": 1, "prompt_tokens": 3}}
        yield "[DONE]"

    with Fake(script) as fake:
        (row,) = measured(fake)
    assert row.completed == 6 and row.time_to_first_token is None and row.time_per_output_token is None
    assert row.end_to_end is not None and "-" in serve.cells(row)


def test_prompts_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "asked.jsonl"
    lines = [{"prompt": "one\u2028"}, {"turns": ["two", "more"]}, {"messages": [{"role": "user", "content": "three"}]}]
    file.write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n\n", "utf-8-sig")
    with Fake(good) as fake:
        (row,) = measured(fake, file=file, levels=[Level(1)], requests=4)
        assert [b["messages"][-1]["content"] for b in fake.bodies] == ["one\u2028", "two", "three", "one\u2028"]
        assert row.source == "asked.jsonl" and row.prompts == 3
        with pytest.raises(ConfigError, match="has messages, which are for --endpoint chat"):
            measured(fake, file=file, endpoint="completions")
        file.write_text('{"prompt": [1, 2, 3]}\n')
        measured(fake, file=file, endpoint="completions")
        assert fake.bodies[-1]["prompt"] == [1, 2, 3]
        with pytest.raises(ConfigError, match="has token ids, which are for --endpoint completions"):
            measured(fake, file=file)
        for wrong in ("[]", '{"prompt": 3}', '{"prompt": ""}', '{"turns": []}', '{"prompt": [1, "a"]}', '"text"'):
            file.write_text('{"prompt": "one"}\n\n' + wrong)
            with pytest.raises(ConfigError, match="line 3 has no `prompt`"):
                measured(fake, file=file)
        for wrong in ("", "{", "[" * 10**5):
            file.write_text(wrong)
            with pytest.raises(ConfigError, match=r"asked.jsonl (has no prompts|is not readable as JSON lines)"):
                measured(fake, file=file)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"base_url": "localhost:8000"}, "must begin with http"),
        ({"endpoint": "responses"}, "endpoint 'responses' is unknown; valid: chat, completions"),
        ({"requests": 0}, "requests must be at least 1, not 0"),
        ({"levels": []}, "there must be one"),
        ({"levels": [Level(2), Level(2)]}, "each load runs once"),
        ({"levels": [Level(0)]}, "concurrency must be at least 1, not 0"),
        ({"levels": [Level(rate=0.0)]}, "rate must be over 0"),
        ({"levels": [Level(rate=float("nan"))]}, "rate must be over 0"),
        ({"timeout": 0.0}, "timeout must be over 0"),
        ({"timeout": math.inf}, "timeout must be over 0 seconds and finite"),
        ({"body": {"stream": False, "top_p": 1}}, "--body must not set stream"),
        ({"body": {"seed": 1, "max_tokens": 5}}, "--body must not set max_tokens, seed"),
        ({"suite": "json"}, "json is constrained"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Settings(**{"base_url": "http://127.0.0.1:1", **settings})


def test_a_server_that_is_not_there_or_answers_nothing_ends_the_run() -> None:
    with pytest.raises(ConfigError, match=r"no server answers at http://127.0.0.1:9/v1"):
        list(serve.run(Settings("http://127.0.0.1:9", timeout=5)))
    with Fake(good) as fake:
        fake.key = "secret"
        with pytest.raises(ConfigError, match="/v1/models answered 401: no or wrong API key"):
            measured(fake)
        with pytest.raises(ConfigError, match="answered no request of the warm-up: status 401: no or wrong"):
            measured(fake, model="fake", warmup=2)
        with pytest.raises(ConfigError, match="answered no request; the first: status 401: no or wrong"):
            measured(fake, model="fake")
        assert measured(fake, api_key="secret")[0].completed == 6
    with Fake(good, {"/v1/models": {"data": []}}) as fake, pytest.raises(ConfigError, match="lists no model"):
        measured(fake)


def test_the_command_writes_lines_a_table_and_a_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "results"
    with Fake(good) as fake:
        fake.key = "a secret's"
        words = [
            "bench",
            "serve",
            "--base-url",
            fake.url + "/v1/",
            "--concurrency",
            "1,2",
            "--rate",
            "50",
            "--requests",
        ]
        words += [
            "3",
            "--api-key",
            "a secret's",
            "--output",
            str(out),
            "--max-tokens",
            "5",
            "--ignore-eos",
            "--temperature",
            "0.5",
        ]
        monkeypatch.setattr(sys, "argv", ["outrider", *words])
        result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0 and "2 at a time" in result.stdout and "50/s" in result.stdout
    rows = [serve.Row(**json.loads(line)) for line in (out / "results.jsonl").read_text().splitlines()]
    assert [row.load for row in rows] == ["1 at a time", "2 at a time", "50/s"]
    assert all(row.completed == 3 and row.ignore_eos for row in rows)
    table = (out / "table.md").read_text()
    assert table.count("\n| ") == 5 and "| 50/s | 3 | - |" in table and "temperature 0.5" in table
    assert "temperature null" in serve.remarks([replace(rows[0], temperature=cast(Any, None))])[0], (
        "as --body may ask for"
    )
    assert os.path.getsize(out / "serve.png") > 5000
    assert all("secret" not in (out / name).read_text() for name in ("results.jsonl", "table.md"))
    assert fake.bodies[-1]["max_tokens"] == 5 and fake.bodies[-1]["ignore_eos"] is True


def test_bad_options_are_one_line() -> None:
    for words in (
        ["--concurrency", "1,x"],
        ["--rate", "fast"],
        ["--body", "[1]"],
        ["--rate", "-1"],
        ["--suite", "poems"],
    ):
        with pytest.raises(ConfigError) as caught:
            CliRunner().invoke(app, ["bench", "serve", "--model", "m", *words], catch_exceptions=False)
        assert "\n" not in str(caught.value)


def test_frames_that_come_in_one_chunk_have_a_gap(monkeypatch):
    """A busy machine's client reads all of a short answer at once: a ratio to nothing would be an error."""
    monkeypatch.setattr(server, "_ask", lambda *_, **__: ([serve.Answer(gaps=[0.0] * 3)] * 4, 0.0))
    assert server._gap(server.Settings("tiny"), "", [[1]] * 4) == 1e-3


@pytest.mark.slow
def test_our_server_against_the_engine_and_another_server(tmp_path):
    other = f"again={shlex.quote(sys.executable)} -m outrider serve tiny --port {{port}} --speculate none"
    s = server.Settings("tiny", streams=(1, 2), max_tokens=4, long=80, shared=64, repeats=1, against=(other,))
    rows = list(server.run(s))
    assert [row.against for row in rows[:6]] == ["the engine called directly", "again"] * 3
    assert [row.unit for row in rows] == ["tokens/s"] * 6 + ["ms"] * 2
    assert rows[4].what == "16 streams, 64 tokens in common"
    assert all(row.server > 0 and row.other > 0 and row.ratio == row.server / row.other for row in rows)
    report.save(rows, tmp_path, server)
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 8
    table = (tmp_path / "table.md").read_text()
    assert "| 2 streams |" in table and "| again |" in table and "suite chat, greedy, 4 tokens each" in table
    assert "8 different prompts for 14 requests: a prefix cache need not read them again." in table
    few = [replace(row, settings={**row.settings, "prompts": 14}) for row in rows]
    assert "different prompts" not in "".join(server.remarks(few))


def test_what_a_server_says_is_heard_whole_and_its_errors_are_told():
    late_came = threading.Event()

    def script(body: dict[str, Any]) -> Iterator[Any]:
        if len(body["prompt"]) == 5:
            late_came.set()
        if len(body["prompt"]) == 2:
            yield from (429, {"error": {"message": "the queue is full"}})
        yield b'data: {"choices": [{"text": "a"'  # a frame in two chunks, then two in one
        assert late_came.wait(60)  # the others are under way until then
        yield 0.02
        yield b"}]}\n\n"
        if len(body["prompt"]) == 3:
            yield CUT
        frames = (text(body, "b"), {**text(body, "", "length"), "usage": {"completion_tokens": 3}})
        yield b"".join(b"data: %b\n\n" % json.dumps(frame).encode() for frame in frames)
        yield "{" if len(body["prompt"]) == 4 else "[DONE]"

    with Fake(script) as fake:
        s = server.Settings("fake", max_tokens=3)
        (first, second, late), took = server._ask(s, fake.url, [1], [1], late=[1] * 5)
        for answer in (first, second, late):
            assert answer.first and len(answer.gaps) == 1 and (answer.tokens, answer.finish) == (3, "length")
            assert 0.02 <= answer.first <= answer.last <= answer.total < 5
        assert took > 0 and sorted(len(body["prompt"]) for body in fake.bodies) == [1, 1, 5]
        for n, said in (
            (2, "status 429: the queue is full"),
            (3, "disconnected: the stream"),
            (4, "protocol: JSONDecode"),
        ):
            with pytest.raises(ConfigError, match=f"the server of fake failed: .*{said}"):
                server._ask(s, fake.url, [1], [1] * n)
    with pytest.raises(ConfigError, match=r"the server of fake failed: .*refused"):
        server._ask(s, fake.url, [1])


def test_a_prompt_comes_beside_answers_that_have_begun():
    """However long they take to begin, and however soon they end."""
    order = []

    def script(body: dict[str, Any]) -> Iterator[Any]:
        if body["prompt"] == [1]:
            yield 0.3
        order.append(len(body["prompt"]))
        yield {**text(body, "a", "length"), "usage": {"completion_tokens": 1}}
        yield "[DONE]"

    with Fake(script) as fake:
        answers, _ = server._ask(server.Settings("fake"), fake.url, [1], [1], late=[1, 1])
    assert order == [1, 1, 2] and all(answer.tokens == 1 for answer in answers)


def test_answers_in_one_frame_have_the_least_gap():
    """As on a busy machine, where a short answer is there before its first frame goes out."""

    def script(body: dict[str, Any]) -> Iterator[Any]:
        frame = {**text(body, "abc", "length"), "usage": {"completion_tokens": 3}}
        yield b"data: %b\n\n" % json.dumps(frame).encode()
        yield "[DONE]"

    with Fake(script) as fake:
        assert server._gap(server.Settings("fake", max_tokens=3), fake.url, [[1], [1]]) == 0.001


HEALTHY = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, file=open(sys.argv[2], "w"), flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_server_that_was_started_ends_with_all_that_it_started(tmp_path):
    with server._serving("other", [sys.executable, "-c", HEALTHY, "{port}", str(tmp_path / "pid")]) as (url, _):
        assert urlopen(f"{url}/health", timeout=5).status == 200
        child = int((tmp_path / "pid").read_text())
        os.kill(child, 0)
    for _ in range(200):
        with suppress(FileNotFoundError):
            if Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.02)
                continue
        break
    else:
        pytest.fail("its child lives on")


def test_a_server_that_does_not_start_says_why():
    with (
        pytest.raises(ConfigError, match="other ended with 3: no such model"),
        server._serving("other", [sys.executable, "-c", "import sys; print('no such model'); sys.exit(3)"]),
    ):
        pass
    with (
        pytest.raises(ConfigError, match="other: /no/such/program cannot be started: No such file"),
        server._serving("other", ["/no/such/program", "{port}"]),
    ):
        pass


@pytest.mark.parametrize(
    "wrong",
    [{"max_tokens": 1}, {"long": 0}, {"shared": 1}, {"repeats": 0}, {"against": ("vllm",)}, {"against": ("v=serve",)},
     {"against": ("v='serve {port}",)}, {"suite": "json"}],
)  # fmt: skip
def test_what_cannot_be_measured_of_a_server(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        server.Settings("tiny", **wrong)


@pytest.mark.parametrize("error", [TimeoutError(), BadStatusLine("no HTTP")])
def test_a_server_that_never_answers_is_not_waited_for(error, monkeypatch):
    """One that takes connections and says nothing, or not what it should: for so long as a start may take."""
    clock = [0.0]

    def wait(seconds: float) -> None:
        clock[0] += seconds

    def ask(url: str, timeout: float) -> None:
        wait(timeout)
        raise error

    monkeypatch.setattr(server, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=wait))
    monkeypatch.setattr(server, "urlopen", ask)
    with (
        pytest.raises(ConfigError, match=f"other did not answer at .*/health within {server.READY} seconds"),
        server._serving("other", [sys.executable, "-c", "import time; time.sleep(600)", "{port}"]),
    ):
        pass
    assert server.READY <= clock[0] < server.READY + 10


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_servers_too(number, monkeypatch, tmp_path):
    """SIGHUP is what a terminal says that is closed."""

    def run(*_: Any) -> None:
        signal.raise_signal(number)
        pytest.fail("the signal was not heard")

    monkeypatch.setattr(server, "run", run)
    handlers = {each: signal.signal(each, lambda *_: None) for each in (signal.SIGTERM, signal.SIGHUP)}
    try:
        outcome = CliRunner().invoke(app, ["bench", "server", "--output", str(tmp_path)])
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
    assert outcome.exit_code == 128 + number
