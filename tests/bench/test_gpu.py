"""`outrider bench gpu` without a GPU: it says so; and each part on a small model, in Triton's interpreter."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from triton.runtime.errors import OutOfResources

from outrider import families
from outrider.bench import gpu
from outrider.bench.report import markdown_table
from outrider.config import STORED
from outrider.errors import ConfigError
from outrider.ops.triton import launch
from outrider.plan import DEVICES, Shape

SMALL = families.read({
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 32,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "hidden_act": "silu", "rope_theta": 1e4,
})  # fmt: skip


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """A part computes the same, however often it is timed."""
    monkeypatch.setattr(gpu, "TRIES", 2)


def settings(tmp_path, *parts, scheme=None, longest=96):
    return gpu.Settings(
        tmp_path, "cpu", [*parts], {"Llama-3.1-8B": SMALL}, rows=(1, 2), contexts=(longest,), formats=(scheme,),
        seeds=("Llama-3.1-8B", "Llama-3.1-8B"), views=("retrieval:budget=176,chunk=8", "streaming:budget=64"), batch=2,
        mixture=(32, 32, 4, 2), cache=1, decoded=3, smallest=SMALL,
    )  # fmt: skip


def test_without_cuda(tmp_path):
    """One error, before anything is written; a wrong part is another."""
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="here is no CUDA device"):
            gpu.run(gpu.Settings(tmp_path / "new"))
        assert not (tmp_path / "new").exists()
    with pytest.raises(ConfigError, match="part 'speed' is unknown; valid: bits, "):
        gpu.Settings(tmp_path, parts=["speed"])


def test_a_device_that_is_none(tmp_path, monkeypatch):
    """As for all commands."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name, said in {"gpu0": "'gpu0' is unknown; valid: auto, ", "cuda:1": "this machine has 1 CUDA devices"}.items():
        with pytest.raises(ConfigError, match=said):
            gpu.run(gpu.Settings(tmp_path / "new", name))
    assert not (tmp_path / "new").exists()


def test_parts(tmp_path):
    """Parts are kept as they are done, a failed one is told of and tried again, and a second run does what is left."""
    (tmp_path / "gpu.json").write_text("[]")
    with launch.emulated(), pytest.raises(ConfigError, match="no result of bench gpu"):
        gpu.run(settings(tmp_path, "linear"))
    (tmp_path / "gpu.json").unlink()
    with launch.emulated():
        gpu.run(settings(tmp_path, "bits", "linear", "experts", scheme="int4"))
        found = gpu.run(settings(tmp_path, "decode", "offload"))
        assert not found["failed"], found["failed"]
        assert all(line["same bits"] for line in found["parts"]["bits"]["lines"])
        assert all(line["off"] < 0.02 for line in found["parts"]["bits"]["lines"] if "off" in line)
        assert "int4, int8 rows" in {line["format"] for line in found["parts"]["bits"]["lines"]}
        assert all(line["same bits"] and line["GB/s"] > 0 for line in found["parts"]["experts"]["lines"])
        assert [line["rows"] for line in found["parts"]["linear"]["lines"][:2]] == [1, 2]
        assert {line["layers on chip"] for line in found["parts"]["offload"]["lines"]} == {"all", 0}
    assert json.loads((tmp_path / "gpu.json").read_text()) == found
    assert "## linear" in (tmp_path / "gpu.md").read_text()


def test_orders_are_measured_and_not_kept(tmp_path):
    """Each product's shares are tried; the table is as it was. What stands in it decides."""
    own = replace(settings(tmp_path), models={"small": replace(SMALL, intermediate_size=1024)}, rows=(1,))
    with launch.emulated(), torch.inference_mode():
        lines = {line["product"]: line for line in gpu.orders(own)}
    assert lines["32 x 1024"]["shares now"] == 2
    assert lines["32 x 1024"]["entry"].startswith("(90, 32, 1024, None, False): ")
    assert launch.SHARES == {}
    launch.SHARES[90, 32, 1024, None, False] = 1
    launch.order.cache_clear()
    try:
        assert launch.order(32, 1024, None, 90).shares == 1
    finally:
        launch.SHARES.clear()
        launch.order.cache_clear()
    assert launch.order(32, 1024, None, 90).shares == 2


def test_what_is_done_is_not_done_again(tmp_path, monkeypatch):
    calls = []

    def part(name, fails=False):
        def measure(s):
            calls.append(name)
            if fails and calls.count(name) == 1:
                raise OutOfResources(300, 200, "shared memory")
            yield {"n": 1}

        return measure

    monkeypatch.setattr(gpu, "PARTS", {"a": part("a"), "b": part("b", fails=True), "c": part("c")})
    about = gpu.provenance(torch.device("cpu"))
    monkeypatch.setattr(gpu, "provenance", lambda _: about | {"commit": f"commit {len(calls)}"})
    with launch.emulated():
        first = gpu.run(settings(tmp_path))
        assert first["failed"]["b"]["error"].startswith("OutOfResources: out of resource: shared memory")
        second = gpu.run(settings(tmp_path))
        assert calls == ["a", "b", "c", "b"]
        commits = {"a": "commit 1", "b": "commit 4", "c": "commit 3"}
        assert {name: part["commit"] for name, part in second["parts"].items()} == commits, "each part's own"
        assert all(f"outrider {commit}, " in (tmp_path / "gpu.md").read_text() for commit in commits.values())
        assert not second["failed"]
        other = replace(settings(tmp_path), models={"another": SMALL})
        gpu.run(other)
        found = gpu.run(other)
        assert calls[4:] == ["a", "b", "c"], "of other models, once"
        assert {part["models"][0] for part in found["parts"].values()} == {"another"}
        del found["parts"]["a"]["models"]  # results from before this was written
        (tmp_path / "gpu.json").write_text(json.dumps(found))
        gpu.run(other)
        assert calls[7:] == ["a"]
        monkeypatch.setattr(gpu, "MINUTES", -1)
        assert gpu.run(replace(settings(tmp_path / "late"), parts=[]))["parts"] == {}


def test_seeds(tmp_path):
    """The settings of TriForce and MagicDec, through views of a cache that holds random keys."""
    with launch.emulated():
        found = gpu.run(settings(tmp_path, "seeds", "attention", longest=256))
    assert not found["failed"], found["failed"]
    assert [line["setting"] for line in found["parts"]["seeds"]["lines"]] == [
        "TriForce on chip", "TriForce offloaded", "MagicDec",
    ]  # fmt: skip
    lines = found["parts"]["seeds"]["lines"]
    assert all(line["same tokens"] for line in lines)
    assert ["speedup of three" in line for line in lines] == [True, True, False]


def test_predictions():
    """The page shows what the planner's roofline expects of plain decoding behind 1024 tokens: a larger model is
    slower, a newer machine faster, and so are few bits."""
    machines, rows = ("a100", "h100", "h200", "b200"), []
    for name, config in gpu.shapes().items():
        for label in ("bf16", *STORED):
            shape = Shape.of(config) if label == "bf16" else Shape.of(config).quantized(label)
            seconds = [shape.forward(DEVICES[kind], batch=1, rows=1, context=1024) for kind in machines]
            rows.append([name, label, *(f"{1 / each:.0f}" for each in seconds)])
    table = markdown_table(["model", "weights", *(kind.upper() for kind in machines)], rows)
    assert table in (Path(__file__).parents[2] / "docs/gpu.md").read_text()
    speeds = [[float(x) for x in row[2:]] for row in rows]
    assert all(row == sorted(row) for row in speeds)
    assert all(speeds[i] > speeds[i // 3 * 3] for i in range(len(speeds)) if i % 3)
