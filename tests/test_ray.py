"""Replicas on a local Ray: no token is lost or changed when engines are killed, or come and go."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import yaml

from outrider import LLM, SamplingParams
from outrider.errors import ConfigError, EngineError, RequestError
from outrider.outputs import GenerationOutput, StepEvent

ray = pytest.importorskip("ray", reason="the extra 'ray' is not installed")
from ray import serve  # noqa: E402

import outrider.ray  # noqa: E402
from outrider.ray import ENGINE, Engine, FarAnswer, Replicas, app  # noqa: E402

pytestmark = pytest.mark.slow
PORT, MARK = 18431, secrets.token_hex(8)
URL = f"http://127.0.0.1:{PORT}"
SMALL = {"num_cpus": 0.1, "ingress_cpus": 0.1, "llm": {"dtype": "float32", "device": "cpu"}}
PROMPTS = ["Once upon a time", "One day, a little girl named Lily", "The dog and the cat", "Tom had a red ball."]
TEMPERATURES = [0.9, 0.0]


@pytest.fixture(scope="module")
def cluster():
    """A Ray on this machine."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1", "OUTRIDER_TEST": MARK}
    for attempt in range(3):  # Ray gives itself 30 seconds to start, which a busy machine may take
        try:
            ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
            break
        except Exception:
            ray.shutdown()
            if attempt == 2:
                raise
    serve.start(http_options={"port": PORT})
    yield
    serve.shutdown()
    ray.shutdown()


def body(i: int, most: int = 200) -> dict:
    return {
        "prompt": PROMPTS[i % len(PROMPTS)], "temperature": TEMPERATURES[i % 2], "seed": i,
        "max_tokens": most, "ignore_eos": True, "stream": True, "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip


async def answer(
    client: httpx.AsyncClient, asked: dict, seen: dict | None = None, url: str = URL
) -> tuple[list[int], str, int]:
    """Tokens, text and usage of a stream; `seen` counts frames as they come."""
    tokens, text, usage = [], "", 0
    async with client.stream("POST", f"{url}/v1/completions", json=asked) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            data = json.loads(line[6:])
            assert "error" not in data, data
            for choice in data["choices"]:
                tokens += choice["token_ids"]
                text += choice["text"]
            usage = (data.get("usage") or {}).get("completion_tokens", usage)
            if seen is not None:
                seen["frames"] = seen.get("frames", 0) + 1
    return tokens, text, usage


async def come(seen: dict, frames: int, streams: list[asyncio.Future]) -> None:
    """Wait until so many frames have come, of streams that go on."""
    while seen.get("frames", 0) < frames:
        assert not all(stream.done() for stream in streams), f"all have ended, with {seen}"
        await asyncio.sleep(0.02)


def expected(count: int, most: int) -> list[tuple[list[int], str, int]]:
    """What one undisturbed engine gives."""
    llm, found = LLM("tiny", dtype="float32", device="cpu"), []
    for i in range(count):
        params = SamplingParams(temperature=TEMPERATURES[i % 2], seed=i, max_tokens=most, ignore_eos=True)
        (output,) = llm.generate(PROMPTS[i % len(PROMPTS)], params)
        found.append((output.token_ids, output.text, most))
    return found


def replicas() -> list[int]:
    """Processes of the engines that run."""
    found = []
    for about in ray.util.list_named_actors(all_namespaces=True):
        if f"#{ENGINE}#" in about["name"]:
            with suppress(Exception):  # it has just gone
                actor = ray.get_actor(about["name"], about["namespace"])
                found.append(ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=20))
    return found


def wait_for(count: int, seconds: float = 300) -> list[int]:
    """Until so many engines run, and no other starts or ends."""
    until = time.monotonic() + seconds
    while True:
        states = serve.status().applications["outrider"].deployments[ENGINE].replica_states
        if states == {"RUNNING": count} and len(found := replicas()) == count:
            return found
        assert time.monotonic() < until, f"engines are {states}, not {count}"
        time.sleep(0.5)


def client() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=100))


def test_killed_engines(cluster):
    """Under load, one engine after the other is killed: every stream ends with the tokens of an undisturbed run."""
    serve.run(app({"model": "tiny", "replicas": 2, **SMALL}), name="outrider")
    count, most = 8, 1200  # which quick machines write in hundreds of frames, too
    wanted = expected(count, most)

    async def main() -> list:
        seen: dict = {}
        async with client() as http:
            streams = [asyncio.ensure_future(answer(http, body(i, most), seen)) for i in range(count)]
            for kills in (40, 120):
                await come(seen, kills, streams)
                victim = (await asyncio.to_thread(wait_for, 2))[0]
                os.kill(victim, signal.SIGKILL)
            return await asyncio.gather(*streams)

    found = asyncio.run(main())
    assert [tokens for tokens, _, _ in found] == [tokens for tokens, _, _ in wanted]
    assert found == wanted
    wait_for(2)  # and Serve has replaced them


def test_up_and_down(cluster):
    """From one engine to two under load, and back; nothing is lost, no token is wrong."""
    scaling = {"max_replicas": 2, "target_ongoing_requests": 1.0, "upscale_delay": 1.0, "downscale_delay": 3.0}
    serve.run(app({"model": "tiny", **scaling, **SMALL, "server": {"drain": 60.0}}), name="outrider")
    wait_for(1)
    wanted = expected(8, 120)

    async def main() -> None:
        grown = asyncio.Event()

        async def ask(i: int) -> None:  # all the time: an engine that still starts is ended when there is less to do
            while not grown.is_set():
                assert await answer(http, body(i, 120)) == wanted[i]

        async def watch() -> None:
            await asyncio.to_thread(wait_for, 2)
            grown.set()

        async with client() as http:
            await asyncio.gather(watch(), *(ask(i) for i in range(8)))

    asyncio.run(main())
    wait_for(1)


def test_the_whole_server(cluster):
    """The ingress is the server that there is without Ray, with its routes and errors."""
    serve.run(app({"model": "tiny", **SMALL}), name="outrider")
    asyncio.run(_routes())


async def _routes() -> None:
    async with client() as http:
        assert await answer(http, body(0, 20)) == expected(1, 20)[0]
        for path in ("/health", "/v1/models", "/version", "/metrics"):
            assert (await http.get(URL + path)).status_code == 200, path
        refused = await http.post(f"{URL}/v1/completions", json={"prompt": "x", "temperature": -1})
        assert refused.status_code == 400 and "temperature" in refused.json()["error"]["message"]
        chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        assert (await http.post(f"{URL}/v1/chat/completions", json=chat)).status_code in (200, 400)


def test_engines_of_two_ranks(cluster):
    """Each engine is a group of two, beside each other; a rank that is killed takes its engine with it, no answer."""
    serve.run(app({"model": "tiny", "tensor_parallel_size": 2, **SMALL}), name="outrider")
    wanted = expected(3, 200)

    async def main() -> list:
        seen: dict = {}
        async with client() as http:
            streams = [asyncio.ensure_future(answer(http, body(i), seen)) for i in range(3)]
            await come(seen, 30, streams)
            (rank,) = (pid for pid, name in marked(MARK).items() if name.startswith("ray::_Rank"))
            assert not any(s.done() for s in streams)
            os.kill(rank, signal.SIGKILL)
            return await asyncio.gather(*streams)

    assert asyncio.run(main()) == wanted
    wait_for(1)


def marked(mark: str) -> dict[int, str]:
    """Processes that have this in their environment, and what they are called."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just gone, or is another's
            if mark.encode() in (process / "environ").read_bytes():
                found[int(process.name)] = (process / "cmdline").read_text()
    return found


class Command:
    """`outrider serve --replicas 2`, and what it says; at the end no process of its own is left."""

    def __init__(self, path: Path, *args: str, group: bool = False) -> None:
        self.code = 0
        with socket.socket() as some:
            some.bind(("127.0.0.1", 0))
            self.port = some.getsockname()[1]
        self.mark, self.url, self.said = secrets.token_hex(8), f"http://127.0.0.1:{self.port}", path / "said"
        env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        command = [sys.executable, "-m", "outrider", "serve", "tiny", "--replicas", "2", "--port", str(self.port)]
        with self.said.open("wb") as said:
            self.process = subprocess.Popen(
                [*command, "--dtype", "float32", "--device", "cpu", *args],
                env=env | {"OUTRIDER_TEST": self.mark}, stdout=subprocess.DEVNULL, stderr=said,
                start_new_session=group,
            )  # fmt: skip

    def engines(self, seconds: float = 300) -> list[int]:
        """As soon as there are two processes of them."""
        until = time.monotonic() + seconds
        while True:
            found = [pid for pid, name in marked(self.mark).items() if name.startswith("ray::ServeReplica:outrider:E")]
            if len(found) == 2:
                return found
            assert time.monotonic() < until and self.process.poll() is None, self.said.read_text()[-3000:]
            time.sleep(0.1)

    def wait_for(self, words: str, seconds: float = 300) -> None:
        """Until it has said so."""
        until = time.monotonic() + seconds
        while words not in self.said.read_text():
            assert time.monotonic() < until and self.process.poll() is None, self.said.read_text()[-3000:]
            time.sleep(0.1)

    def __enter__(self) -> Command:
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        try:
            if failed is None:
                code, said = self.process.wait(120), self.said.read_text()
                assert code == self.code and "\nTraceback" not in said, (
                    said
                )  # Serve's own lines begin with who says them
                until = time.monotonic() + 60
                while rest := marked(self.mark):
                    assert time.monotonic() < until, rest
                    time.sleep(0.5)
        finally:
            for pid in marked(self.mark):
                os.kill(pid, signal.SIGKILL)


def test_the_command(tmp_path):
    """Streams outlive an engine, and may end after SIGTERM."""
    wanted = expected(4, 1200)

    async def main() -> None:
        async with client() as http:
            for act in (lambda: os.kill(engines[0], signal.SIGKILL), command.process.terminate):
                seen: dict = {}
                streams = [asyncio.ensure_future(answer(http, body(i, 1200), seen, command.url)) for i in range(4)]
                await come(seen, 40, streams)
                act()
                assert await asyncio.gather(*streams) == wanted

    with Command(tmp_path, "--drain", "120") as command:
        command.wait_for("is ready at")
        engines = command.engines()
        asyncio.run(main())


def test_ended_while_it_starts(tmp_path):
    """What an engine already answers is drained, though another has not started; and so does nothing at all end."""
    (wanted,) = expected(1, 400)

    async def main() -> None:
        async with client() as http:
            until = time.monotonic() + 300
            while True:  # the ingress is there, and one engine or two
                with suppress(httpx.HTTPError):
                    if (await http.get(f"{command.url}/health")).status_code == 200:
                        break
                assert time.monotonic() < until, command.said.read_text()[-3000:]
                await asyncio.sleep(0.1)
            seen: dict = {}
            stream = asyncio.ensure_future(answer(http, body(0, 400), seen, command.url))
            while not seen:
                if "is ready at" not in command.said.read_text():  # one that still starts goes, and starts again
                    for pid in sorted(command.engines())[1:]:
                        os.kill(pid, signal.SIGKILL)
                await asyncio.sleep(0.1)
            command.process.terminate()
            assert await stream == wanted

    with Command(tmp_path, "--drain", "120") as command:
        asyncio.run(main())
    with Command(tmp_path) as command:
        command.engines()
        command.process.terminate()


def test_an_engine_that_goes_before_its_first_token():
    """The one that writes the answer instead says what there is to say of the prompt."""

    class Engines:
        """A handle: the first engine accepts, and is gone; the second writes a token of each output."""

        calls = 0

        @property
        def generate(self) -> Engines:
            return self

        def options(self, **_) -> Engines:
            return self

        def remote(self, *_):
            self.calls += 1
            return Stream(self.calls)

    class Stream:
        def __init__(self, call: int) -> None:
            self.items = iter([None, *(() if call == 1 else ((token(0), (3, ["a"])), (token(1), (4, ["b"]))))])

        async def __anext__(self):
            with suppress(StopIteration):
                return next(self.items)
            raise ray.exceptions.ActorDiedError()

        def cancel(self) -> None:
            pass

    def token(index: int) -> StepEvent:
        output = GenerationOutput("x", [5], "length", 0, [1, 2], [None], {})
        return StepEvent(index, [5], ["x"], [None], None, "length", output)

    async def main() -> None:
        answer = FarAnswer(Engines(), [([1, 2], SamplingParams(n=2))], {})
        await answer.open()
        assert [event.index async for event in answer.events()] == [0, 1]
        assert [(own.cached, own.prompt_logprobs) for own in answer.requests] == [(3, ["a"]), (4, ["b"])]

    asyncio.run(main())


def test_too_busy_to_say(monkeypatch):
    """A proxy that does not say how many answers it passes on passes on some; one that has gone passes on none."""
    monkeypatch.setattr(ray.util, "list_named_actors", lambda **_: [{"name": "SERVE_PROXY_ACTOR-1", "namespace": ""}])
    for error, relaying in ((ray.exceptions.GetTimeoutError(), True), (ValueError("no actor"), False)):

        def fail(*_, error=error):
            raise error

        monkeypatch.setattr(ray, "get_actor", fail)
        assert outrider.ray._relaying() is relaying


def test_a_stuck_engine_is_not_well(monkeypatch):
    """What Serve asks: an engine whose step does not end is replaced."""
    engine = Engine(Replicas.of({"model": "tiny", "llm": SMALL["llm"], "server": {"stall": 0.2}}))
    engine.check_health()
    go = threading.Event()
    monkeypatch.setattr(engine.llm.llm.engine, "step_within", lambda _: go.wait())

    async def main() -> None:
        asked = engine.generate("", [([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))], {}, [[]])
        assert await anext(asked) is None  # accepted
        with pytest.raises(EngineError, match="has not come to the end of a step for"):
            for _ in range(1000):
                engine.check_health()
                await asyncio.sleep(0.02)
        monkeypatch.undo()
        monkeypatch.delattr(Engine, "__del__")  # which only Serve awaits
        go.set()
        assert sum([len(event.token_ids) async for event, _ in asked]) == 4
        engine.check_health()
        await engine.llm.aclose()

    asyncio.run(main())


def test_a_fault_of_the_request_is_handed_over_and_not_raised(monkeypatch):
    """Serve would log it with its trace, and what the request says with it."""
    engine = Engine(Replicas.of({"model": "tiny", "llm": SMALL["llm"]}))
    monkeypatch.delattr(Engine, "__del__")  # which only Serve awaits

    async def main() -> None:
        (found,) = [item async for item in engine.generate("", [([99999], SamplingParams(max_tokens=4))], {}, [[]])]
        assert isinstance(found, RequestError) and "99999" in str(found)

        async def replies():
            yield found

        with pytest.raises(RequestError, match="99999"):
            await anext(outrider.ray._typed(replies()))
        await engine.llm.aclose()

    asyncio.run(main())


def test_an_engine_that_could_not_be_loaded_ends_in_silence():
    asyncio.run(Engine.__del__(object.__new__(type("Half", (), {}))))


def test_ended_with_its_whole_group(tmp_path):
    """As by `timeout` or a service manager: Ray goes, too, and nobody waits a minute for it."""
    with Command(tmp_path, group=True) as command:
        command.wait_for("Ctrl-C ends it")
        os.killpg(command.process.pid, signal.SIGTERM)
        assert command.process.wait(30) == 143
        assert "Ray was ended, too, and with it all answers" in command.said.read_text()
        command.code = 143


def test_options():
    with pytest.raises(ConfigError, match="unknown key 'modell'; valid: model, replicas"):
        app({"modell": "tiny"})
    with pytest.raises(ConfigError, match="args need a 'model'"):
        app({})
    with pytest.raises(ConfigError, match="replicas must be a whole number of at least 1, not 0"):
        app({"model": "tiny", "replicas": 0})
    with pytest.raises(ConfigError, match="max_replicas \\(1\\) is below replicas \\(2\\)"):
        app({"model": "tiny", "replicas": 2, "max_replicas": 1})
    with pytest.raises(ConfigError, match="llm: unknown key 'temperature'"):
        app({"model": "tiny", "llm": {"temperature": 0}})
    with pytest.raises(ConfigError, match="max_model_len must be a whole number of at least 1, not -4"):
        app({"model": "tiny", "llm": {"max_model_len": -4}})
    with pytest.raises(ConfigError, match="server: unknown key 'port'"):
        app({"model": "tiny", "server": {"port": 1}})
    for says, wrong in {
        "llm: unknown key 1": {"llm": {1: 2, "foo": 3}}, "server: unknown key 1": {"server": {1: 2, "foo": 3}},
        "model must be a text": {"model": 5}, "num_cpus must be a finite": {"num_cpus": float("inf")},
        "defaults must be an object": {"server": {"defaults": None}},
    }.items():  # fmt: skip
        with pytest.raises(ConfigError, match=says):
            app({"model": "tiny", **wrong})
    assert Replicas.of({"model": "tiny", "server": {"names": ["a", "b"]}}).settings.names == ("a", "b")


def test_the_file_of_the_docs():
    """docs/deploy.yaml is what `serve deploy` takes, and its args are ours."""
    from ray.serve.schema import ServeDeploySchema

    about = yaml.safe_load((Path(__file__).parents[1] / "docs" / "deploy.yaml").read_text())
    (one,) = ServeDeploySchema(**about).applications
    assert one.import_path == "outrider.ray:app" and Replicas.of(one.args).max_replicas == 4
