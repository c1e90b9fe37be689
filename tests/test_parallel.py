"""A model cut over ranks gives the tokens of one (gather), and speculation changes none of them (all modes).

Ranks are processes, which take seconds to start: all cases of a number of ranks run in one launch.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import torch
from ranks import run_case
from test_exactness import batch_of, config_of

from outrider import LLM, drafters
from outrider.config import Mixture
from outrider.errors import ConfigError
from outrider.load import open_source
from outrider.ops import Quantized
from outrider.ops.triton.launch import emulated, order
from outrider.parallel import Cut, Group, columns_alone, cut_quantized, ranks_for, within
from outrider.parallel.cuts import split, split_heads
from outrider.plan import fastest_mode, traffic

HERE = Path(__file__).parent
PLAIN = {"none": None}
SIZES = [2, 3]
FAMILIES = {
    "olmo2": {}, "phi3": {"pad_token_id": 0}, "gemma3_text": {}, "glm4": {"pad_token_id": 0}, "qwen2": {}, "qwen3": {},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 3},
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 8},
}  # fmt: skip
TWO_ONLY = {*FAMILIES, "bfloat16", "int8", "offload", "in parts", "experts in bfloat16"}


def free_port() -> int:
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        return some.getsockname()[1]


def launch(size: int, *args: str, port: int | None = None, **more) -> list[subprocess.Popen]:
    """As torchrun would: the same program `size` times, told apart by its environment."""
    port = port or free_port()
    env = {**os.environ, "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    env |= {"MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "OUTRIDER_CACHE": ""}
    return [
        subprocess.Popen(
            [sys.executable, *args], env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}, text=True, cwd=HERE,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more,
        )
        for rank in range(size)
    ]  # fmt: skip


def end(processes: list[subprocess.Popen], seconds: float = 300) -> tuple[list[int], str]:
    """Their exit codes, once all have ended, and all they wrote to standard error."""
    try:
        said = [process.communicate(timeout=seconds)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], "".join(said)


@pytest.fixture(scope="session")
def cases(make_checkpoint) -> dict:
    """What all ranks run. Expectations come from one rank."""
    make, own = make_checkpoint, {"dtype": "float32"}
    methods = {"none": None} | {
        method: vars(config_of(method, "random", make)) for method in drafters.methods() if method != "none"
    }
    for method, config in methods.items():
        if config:
            options = config.pop("options")
            methods[method] = {k: v for k, v in {**config, **options}.items() if v is not None}
    llm = LLM(make(), device="cpu", dtype="float32")

    def requests(sampling: str, size: int, most: int) -> list:
        found = []
        for ids, params in batch_of(llm, sampling, size):
            params = replace(params, max_tokens=most, min_tokens=min(3, params.min_tokens))
            given = {k: v for k, v in vars(params).items() if k not in ("logits_processors", "structured_outputs")}
            found.append([ids, given])
        return found

    def path(*args, **config) -> str:
        return str(make(*args, **config))

    some, both = requests("everything", 2, 10), requests("greedy", 2, 14) + requests("sampled", 3, 14)
    draft = {"method": "draft_model", "model": path(noise=0.01)}
    few = {name: methods[name] for name in ("none", "ngram", "triforce")}
    random = {"model": path(), "options": own}
    exact = ["gather", "ordered"]

    def case(
        methods: dict, requests: list, modes: tuple = ("gather",), model: str = random["model"], **options
    ) -> dict:
        return {"model": model, "options": own | options, "methods": methods, "requests": requests, "modes": modes}

    return {
        "drafters": case(methods, both, exact),
        "reduce": case(few, both, ["reduce"]),
        "again": case(PLAIN, both, exact) | {"traffic": True},
        "bfloat16": case(few, some, dtype="bfloat16"),
        "int8": case(
            {"none": None, "self": {"method": "self", "weights": "int4"}}, some, exact, path(dtype=torch.bfloat16),
            dtype="bfloat16", quantization="int8",
        ),
        "offload": case(few, some, kv_offload=True, on_chip_layers=1),
        "small pool": case(PLAIN, requests("sampled", 4, 60), kv_memory=2**15),
        "in parts": case(few, some, max_num_batched_tokens=16),
        "draft on two": case({"none": None, "two": {**draft, "draft_tensor_parallel_size": 2}, "one": draft}, some),
        "nine heads": case(
            PLAIN | {"ngram": methods["ngram"]}, some, exact,
            path(num_attention_heads=9, num_key_value_heads=3, hidden_size=144),
        ),
        "experts": case(
            {"none": None, "ngram": methods["ngram"]}, both, exact,
            path("qwen2_moe", num_hidden_layers=3, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32,
                 shared_expert_intermediate_size=48, mlp_only_layers=[1]),
        ) | {"traffic": True},
        "experts in bfloat16": case(
            PLAIN, some, model=path("qwen3_moe", num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32),
            dtype="bfloat16",
        ),
        **{arch: case(PLAIN, some[:1], exact, path(arch, **more)) for arch, more in FAMILIES.items()},
        "too many": case(PLAIN, some, model=path(num_attention_heads=1, num_key_value_heads=1)),
        "no mode": case(PLAIN, some, ["sideways"]),
        "draft on many": case({"many": {**draft, "draft_tensor_parallel_size": 9}}, some),
    }  # fmt: skip


@pytest.fixture(scope="session")
def alone(cases) -> dict:
    """What one rank gives, by plain decoding."""
    found = {}
    for name, case in cases.items():
        if name not in ("too many", "no mode", "draft on many"):
            options = {key: value for key, value in case["options"].items() if key != "kv_memory"}
            found[name] = run_case({**case, "methods": PLAIN, "options": options})
    return found


@pytest.fixture(scope="session", params=SIZES)
def ranks(request, cases, tmp_path_factory) -> tuple[int, dict]:
    """What so many ranks give."""
    folder = tmp_path_factory.mktemp("ranks")
    if request.param == 3:  # what differs with a third rank is the order of sums, not the family or the format
        cases = {name: case for name, case in cases.items() if name not in TWO_ONLY}
    (folder / "cases.json").write_text(json.dumps(cases))
    codes, said = end(launch(request.param, "ranks.py", str(folder / "cases.json"), str(folder / "results.json")))
    assert codes == [0] * request.param, said[-3000:]
    return request.param, json.loads((folder / "results.json").read_text())


def test_tokens(ranks, cases, alone):
    """Gather-only: one rank's. In all modes: the same with speculation as without, for every drafter."""
    size, results = ranks
    for name, expected in alone.items():
        if size == 3 and name in TWO_ONLY:
            continue
        for mode in cases[name].get("modes", ["gather"]):
            assert "error" not in results[name], (name, results[name])
            found = results[name][mode]
            assert found["leaked"] == 0
            assert found["exactness"] == ("law" if mode == "reduce" else "bitwise"), (name, mode)
            assert found["parallelism"].startswith(f"{size} ranks, {mode}: ")
            for method, tokens in found["tokens"].items():
                assert tokens == found["tokens"]["none"], f"{name}, {mode}: {method} changes tokens"
            if mode == "gather" or name in FAMILIES:  # float32, whose last bits no token here hangs on
                assert found["tokens"]["none"] == expected["tokens"]["none"], f"{name}: not what one rank gives"
            assert mode != "gather" or found["bits"] == expected["bits"], f"{name}: other bits than one rank's"
            held = found["weights"] / expected["weights"]
            uneven = name in ("nine heads", "experts", "experts in bfloat16")  # and each has the routers
            assert held <= (0.67 if size == 2 or uneven else 0.51), f"{name}: rank 0 holds {held:.2f}"


def test_each_method_ran(ranks):
    _, results = ranks
    assert set(results["drafters"]["gather"]["tokens"]) == set(drafters.methods())


def test_the_pool_was_small(ranks):
    _, results = ranks
    assert results["small pool"]["gather"]["preemptions"] > 0


def test_traffic_is_as_planned(ranks):
    """The planner's formula counts every collective and every byte."""
    _, results = ranks
    for name in ("again", "experts"):
        for mode, (measured, predicted) in results[name]["traffic"].items():
            assert measured == predicted and measured[1] > 0, (name, mode)


def test_errors(ranks):
    size, results = ranks
    assert results["too many"]["error"] == (
        f"ConfigError: a model of 1 query heads is cut over at most 1 ranks, not {size}"
    )
    assert results["no mode"]["error"].startswith("ConfigError: tensor_parallel_mode 'sideways' is unknown; valid: ga")
    assert results["draft on many"]["error"].endswith(f"draft_tensor_parallel_size is 9, and there are {size} ranks")


def test_closing_ends_the_threads_of_groups():
    """One that still let go of a tensor while Python ends would abort the process."""
    ranks = launch(2, "-c", THREADS)
    said = [rank.stdout.read() for rank in ranks]
    assert end(ranks) == ([0, 0], "")
    for line in said:
        idle, busy, closed = json.loads(line)
        assert busy > idle > 0 and closed == idle


THREADS = """
import json, time, torch
import torch.distributed as dist
from pathlib import Path
from outrider.parallel.ranks import ranks_for

def threads():
    last = None
    while True:  # a thread has its name some time after it was begun
        names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
        if last == names:
            return names.count("pt_gloo_runloop")
        last = names
        time.sleep(0.5)

ranks = ranks_for(None, "cpu")
idle, others = threads(), dist.group.WORLD  # which modules hold that are imported late, as defaults
for group in ranks.group(2, "gather"), ranks.group(2, "ordered"):
    group.gather(torch.ones(4, 8), [range(8), range(8, 16)])
del group
busy = threads()
while ranks.rank and not ranks._closing:  # it has heard of the end
    time.sleep(0.01)
ranks.close()
print(json.dumps([idle, busy, threads()]))
"""


# --- what ends it ----------------------------------------------------------------------------------------------------

SCRIPT = """
import sys, time
from outrider import LLM
llm = LLM("tiny", device="cpu", dtype="float32", tensor_parallel_size=2)
print("ready", llm.parallelism, flush=True)
for text in sys.stdin:
    print(llm.generate(text, max_tokens=8, temperature=0)[0].token_ids, flush=True)
"""


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_ends_all(victim):
    """Within seconds, with one line that says which; also while nothing is asked of them."""
    ranks = launch(2, "-c", SCRIPT, stdin=subprocess.PIPE)
    assert ranks[0].stdout.readline().startswith("ready 2 ranks, gather: the bits of one rank's run")
    ranks[0].stdin.write("One day\n")
    ranks[0].stdin.flush()
    tokens = json.loads(ranks[0].stdout.readline())
    assert (
        tokens
        == LLM("tiny", device="cpu", dtype="float32").generate("One day\n", max_tokens=8, temperature=0)[0].token_ids
    )
    ranks[victim].send_signal(signal.SIGKILL)
    other = ranks[1 - victim]
    assert other.wait(10) == 1
    (line,) = other.stderr.read().splitlines()
    assert line == f"outrider: rank {victim} has ended (killed, or out of memory?); all ranks end"
    end(ranks)


def stream(url: str, i: int, most: int, leave: int | None = None, begun: threading.Event | None = None) -> list[int]:
    """Tokens that a server streams; a client may leave after so many. RuntimeError: an error, and then only [DONE]."""
    asked = {"prompt": "One day", "temperature": 0.9, "seed": i, "max_tokens": most, "ignore_eos": True}
    asked |= {"stream": True, "return_token_ids": True}
    tokens: list[int] = []
    with httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=120) as response:
        lines = filter(None, response.iter_lines())
        for line in lines:
            if line.startswith("data: {"):
                frame = json.loads(line[6:])
                if "error" in frame:
                    assert list(lines) == ["data: [DONE]"]
                    raise RuntimeError(frame["error"])
                tokens += frame["choices"][0]["token_ids"]
                if begun:
                    begun.set()
                if leave and len(tokens) >= leave:
                    break
    return tokens


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_on_ranks(how):
    """Streams side by side have one rank's tokens, whoever leaves. It ends when it is told to, and if a rank dies."""
    options = ["--dtype", "float32", "--device", "cpu", "--port", "0", "--drain", "0"]
    ranks = launch(2, "-m", "outrider", "serve", "tiny", *options)
    try:
        url = re.search("tiny at (http://[^ ]*) .*2 ranks, gather", ranks[0].stderr.readline())[1]
        llm = LLM("tiny", device="cpu", dtype="float32")
        with ThreadPoolExecutor() as pool:
            leaves = [None, 5, None, 9, None]
            found = list(pool.map(lambda i: stream(url, i, 40, leaves[i]), range(len(leaves))))
            for i, (tokens, leave) in enumerate(zip(found, leaves, strict=True)):
                one = llm.generate("One day", temperature=0.9, seed=i, max_tokens=40, ignore_eos=True)[0].token_ids
                assert tokens == (one if leave is None else one[: len(tokens)]) and len(tokens) >= (leave or 40)
            begun = [threading.Event() for _ in range(4)]
            endless = [pool.submit(stream, url, i, 8000, None, event) for i, event in enumerate(begun)]
            asked = {"prompt": "One day", "max_tokens": 8000, "ignore_eos": True}
            whole = pool.submit(httpx.post, f"{url}/v1/completions", json=asked, timeout=120)
            assert all(event.wait(60) for event in begun)
            while not re.search("num_requests_running.* 5", httpx.get(f"{url}/metrics").text):  # whole, too, has come
                assert not whole.done()
            for rank in ranks if how == signal.SIGTERM else ranks[1:]:
                rank.send_signal(how)  # torchrun sends it to all
            why = "the engine was closed" if how == signal.SIGTERM else "rank 1 has ended (killed, or out of memory?)"
            errors = [each.exception(30).args[0] for each in endless] + [whole.result(30).json()["error"]]
            assert whole.result().status_code == 503 and all(error["message"].startswith(why) for error in errors)
            assert all((error["type"], error["code"]) == ("ServiceUnavailableError", 503) for error in errors)
            with suppress(httpx.TransportError):  # nobody listens any more
                assert httpx.get(f"{url}/health").status_code == 503
    finally:
        codes, said = end(ranks, 30)
    lost = [line for line in said.splitlines() if "has ended" in line]
    if how == signal.SIGTERM:
        assert codes == [128 + how, 0] and not lost
    else:
        assert codes == [1, -how] and len(lost) == 1 and lost[0].startswith("outrider: rank 1 has ended")
    assert "Traceback" not in said


COMMANDS = {
    "generate": ["--max-tokens", "8", "--temperature", "0", "--json", "One day"],
    "bench": ["--prompts", "1", "--max-tokens", "8", "--repeats", "1"],
    "plan": ["--ranks", "2", "--json"],
}


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_torchrun(command):
    """The real one, and what only its first rank does."""
    args = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "outrider", command]
    done = subprocess.run(
        [sys.executable, "-m", *args, "--model", "tiny", *COMMANDS[command]],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr  # whole: torchrun writes much behind what a rank has said
    assert "has ended" not in done.stderr
    if command == "bench":
        assert "ngram" in done.stdout and "identical" in done.stdout, done.stdout
        return
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    if command == "generate":
        (line,), llm = lines, LLM("tiny")
        assert line["token_ids"] == llm.generate("One day", max_tokens=8, temperature=0)[0].token_ids
    else:
        assert len(lines) == 4 and all(line["counted_bytes"] == line["bytes"] > 0 for line in lines)
        assert all(line["counted_collectives"] == line["collectives"] for line in lines)


def test_port_clash_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        first, second = launch(2, "-c", SCRIPT, port=port)
        try:
            _, said = first.communicate(timeout=60)
        finally:
            second.kill()
            second.communicate()
    assert first.returncode
    assert f"another program, or another rank 0, listens at 127.0.0.1, port {port}; choose another MASTER_PORT" in said


RANK = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512"}


@pytest.mark.parametrize("name, value, told", [
    ("WORLD_SIZE", "0", "is '0'; torchrun sets it, to a whole number of at least 1"),
    ("WORLD_SIZE", "two", "is 'two'"),
    ("RANK", "2", "is '2'; torchrun sets it, to a whole number from 0 to 1"), ("RANK", "-1", "is '-1'"),
    ("RANK", None, "is not set"), ("LOCAL_RANK", "x", "is 'x'"), ("MASTER_ADDR", None, "is not set"),
    ("MASTER_PORT", None, "is not set"), ("MASTER_PORT", "99999", "is '99999'"),
])  # fmt: skip
def test_variables_that_cannot_be(monkeypatch, name, value, told):
    for key, given in {**RANK, name: value}.items():
        monkeypatch.delenv(key, raising=False) if given is None else monkeypatch.setenv(key, given)
    with pytest.raises(ConfigError, match=f"{name} {told}"):
        ranks_for(None, "cpu")


JOINS = """
import os, sys
from datetime import timedelta
from outrider.parallel import ranks
meet = ranks.rendezvous
def met():
    store = meet()
    ranks.JOINING = timedelta(seconds=3)
    return store
ranks.rendezvous = met
if os.environ["RANK"] == "1":
    ranks.rendezvous().get(ranks.LEADS)
    os._exit(9)
try:
    ranks.ranks_for(None, "cpu")
except ranks.EngineError as error:
    sys.exit(str(error))
"""


def test_one_that_ends_while_it_joins():
    codes, said = end(launch(2, "-c", JOINS), 120)
    assert codes == [1, 9] and "rank 0 of 2 cannot join the others" in said


WAITS = """
import os, signal, sys
from outrider.parallel import ranks_for
if os.environ["RANK"] == "0":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    print("waits", flush=True)
    ranks_for(None, "cpu")
"""


def test_signals_are_heard_while_it_waits_for_others():
    waits, gone = launch(2, "-c", WAITS)
    assert waits.stdout.readline() == "waits\n"
    waits.send_signal(signal.SIGTERM)
    assert end([waits, gone], 60) == ([3, 0], "")


def test_sizes(monkeypatch):
    assert ranks_for(None, "cpu") is None and ranks_for(1, "cpu") is None
    with pytest.raises(ConfigError, match="needs 2 processes: torchrun --standalone --nproc-per-node 2"):
        ranks_for(2, "cpu")
    for wrong in (0, True, "2"):
        with pytest.raises(ConfigError, match="tensor_parallel_size must be a whole number"):
            ranks_for(wrong, "cpu")
    monkeypatch.setenv("RANK", "5")  # as some clusters say of their jobs
    assert ranks_for(None, "cpu") is None
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="tensor_parallel_size=2, but 3 processes were started"):
        ranks_for(2, "cpu")
    with pytest.raises(ConfigError, match="draft_tensor_parallel_size must be a whole number"):
        LLM("tiny", speculative_config={"method": "ngram", "draft_tensor_parallel_size": 0}, tensor_parallel_size=1)


# --- who holds what --------------------------------------------------------------------------------------------------


def test_split():
    assert split(10, 3) == [range(4), range(4, 7), range(7, 10)]
    assert split(100, 2, 32) == [range(64), range(64, 100)]
    assert [len(r) for r in split(64, 3, 32)] == [32, 16, 16]
    for count, size, grain in [(64, 3, 32), (9, 8, 32), (1000, 7, 256), (3, 3, 256)]:
        parts = split(count, size, grain)
        assert [i for part in parts for i in part] == list(range(count)) and all(parts)


def test_split_heads():
    assert split_heads(9, 3, 2) == [(range(6), range(2)), (range(6, 9), range(2, 3))]
    assert split_heads(4, 2, 3) == [(range(1), range(1)), (range(1, 2), range(1)), (range(2, 4), range(1, 2))]
    for heads, kv_heads, size in [(9, 3, 9), (32, 8, 5), (32, 8, 16), (8, 1, 8), (14, 2, 4)]:
        parts = split_heads(heads, kv_heads, size)
        assert [i for q, _ in parts for i in q] == list(range(heads))
        for q, kv in parts:
            assert {i * kv_heads // heads for i in q} == set(kv) and len(q) % len(kv) == 0


def test_within():
    assert within([range(2, 5), range(6, 8)], [4, 4]) == [[range(2, 4)], [range(1), range(2, 4)]]


def test_quantised_weights_are_cut_with_their_factors():
    g = torch.Generator().manual_seed(0)
    q = Quantized(
        8, 32, torch.randint(-9, 9, (12, 96), generator=g, dtype=torch.int8), torch.rand(12, 3, generator=g),
        torch.rand(12, 3, generator=g),
    )  # fmt: skip
    rows = [range(1, 3), range(8, 12)]
    index = [1, 2, 8, 9, 10, 11]
    assert torch.equal(cut_quantized(q, rows).dense(), q.dense()[index])
    assert torch.equal(cut_quantized(q, rows, range(32, 96)).dense(), q.dense()[index, 32:])
    with pytest.raises(ConfigError, match="cannot be cut by inputs: 32 inputs share a factor; use"):
        cut_quantized(q, rows, range(16, 96))
    coarse = replace(
        q, scales=(torch.ones(12, 3, dtype=torch.int8), torch.rand(12, 1, generator=g).half()), offsets=None
    )
    assert torch.equal(cut_quantized(coarse, rows).dense(), coarse.dense()[index])


def test_a_gpu_does_not_promise_the_bits_of_one_rank():
    """How its kernels share out a sum follows from how many outputs a product has."""
    assert order(16384, 2048, None, 90) != order(8192, 2048, None, 90)
    with emulated():
        assert not columns_alone(SimpleNamespace(dtype=torch.bfloat16, device=torch.device("cpu")))  # type: ignore[arg-type]


def test_prediction():
    """More ranks, less for each; one has no traffic; the choice depends on nothing but shape and machine."""
    config = open_source("tiny").config
    assert traffic(config, 1, "gather", 5, 5) == (0, 0)
    calls, size = traffic(config, 2, "gather", 1, 1)
    assert calls == 4 * config.num_layers + 1
    assert traffic(config, 2, "gather", 3, 3) == (calls, 3 * size)
    assert traffic(config, 2, "ordered", 1, 1)[0] == 2 * config.num_layers + 1
    assert fastest_mode(config, 2, "cpu") in ("gather", "ordered")
    with pytest.raises(ConfigError, match="at most"):
        traffic(config, config.num_heads + 1, "gather", 1, 1)
    whole = Cut(config, Group(None, 2, "gather", None))
    assert sum(map(len, whole.vocab)) == config.vocab_size


def test_what_is_too_narrow():
    """There must be something for each rank; the error says how many there may be."""
    config = open_source("tiny").config
    mixture = Mixture(count=8, chosen=2, width=6, layers=tuple(range(config.num_layers)))
    for narrow, what in (
        ({"mixture": mixture}, "6 columns in its experts"), ({"mixture": replace(mixture, shared=5)}, "5 columns in"),
        ({"intermediate_size": 3}, "3 columns in its MLPs"), ({"vocab_size": 6}, "6 tokens"),
        ({"num_heads": 8, "hidden_size": 4}, "4 hidden columns"),
    ):  # fmt: skip
        wide = replace(config, **{"num_heads": 8, **narrow})
        with pytest.raises(ConfigError, match=f"a model of {what}.* over at most {what[0]} ranks, not 7"):
            Cut(wide, Group(None, 7, "gather", None))
