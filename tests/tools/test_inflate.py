"""An inflated checkpoint is larger, made of real numbers, and computes the source's logits."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from outrider.bench.run import Settings, run
from outrider.config import SpeculativeConfig
from outrider.errors import ConfigError
from outrider.files import OURS
from tools import inflate as module
from tools.__main__ import app
from tools.inflate import inflate

BIG = {"hidden_size": 256, "num_layers": 4, "intermediate_size": 512, "num_heads": 16, "num_kv_heads": 4}
SAME = {"hidden_size": 64, "num_layers": 2, "intermediate_size": 96, "num_heads": 4, "num_kv_heads": 2}
UNTIED = {"tie_word_embeddings": False}
BIASED = {"attention_bias": True, "mlp_bias": True}


def save_llama(folder: Path, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Path:
    """Save a random Llama whose norms, biases and eps are far from neutral, so that no mistake in them can hide."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True,
    }  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**shape | {"rms_norm_eps": 1e-2, "initializer_range": 0.2} | changes))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.uniform_(0.5, 2.0) if "norm" in name else weight.normal_()
    model.to(dtype).save_pretrained(folder)
    return folder


def logits(folder: Path, dtype: torch.dtype) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    ids = torch.randint(128, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        ({}, BIG),
        ({}, {}),
        ({}, SAME),
        ({}, {"hidden_size": 1024, "num_heads": 64, "num_kv_heads": 2}),
        (UNTIED, BIG),
        (BIASED, BIG),
        (BIASED | UNTIED | {"hidden_act": "sigmoid"}, BIG),
        ({"num_key_value_heads": 4}, BIG),
        ({"head_dim": 32}, SAME | {"num_layers": 3}),
    ],
)
def test_same_logits(tmp_path: Path, changes: dict[str, Any], sizes: dict[str, int], dtype: torch.dtype) -> None:
    source = save_llama(tmp_path / "source", **changes)
    expected, got = (logits(folder, dtype) for folder in (source, inflate(source, tmp_path / "target", **sizes)))
    assert expected.abs().max() > 3
    # Kernels choose the order of a sum by its length. Often nothing differs; bfloat16 allows for two roundings.
    torch.testing.assert_close(got, expected, rtol=0, atol=5e-5 if dtype == torch.float32 else 2**-3)
    assert dtype == torch.bfloat16 or torch.equal(got.argmax(-1), expected.argmax(-1))


def test_config_and_files(tmp_path: Path) -> None:
    source = save_llama(tmp_path / "source")
    (source / "tokenizer.json").write_text("{}")
    seen: list[tuple[int, int]] = []
    target = inflate(source, tmp_path / "new" / "target", progress=lambda *at: seen.append(at), **BIG)

    config = AutoConfig.from_pretrained(target)
    fields = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    assert [getattr(config, field) for field in fields] == list(BIG.values())
    assert config.head_dim == 16 and config.tie_word_embeddings and config.rms_norm_eps == 1e-2 / 4
    assert config.outrider_inflated_from == dict(zip(fields, SAME.values(), strict=True))
    assert (target / "tokenizer.json").read_text() == "{}" and (target / "generation_config.json").is_file()

    tensors = load_file(target / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert seen == sorted(seen) and seen[-1] == (sum(tensor.numel() for tensor in tensors.values()),) * 2


def test_defaults(tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(inflate(save_llama(tmp_path / "source"), tmp_path / "target"))
    assert (config.hidden_size, config.num_hidden_layers, config.intermediate_size) == (256, 2, 384)
    assert (config.num_attention_heads, config.num_key_value_heads) == (16, 2)


def test_what_cannot_matter_is_random(tmp_path: Path) -> None:
    source = save_llama(tmp_path / "source", **UNTIED)
    first, again, other = (
        load_file(inflate(source, tmp_path / str(i), seed=seed, **BIG) / "model.safetensors")
        for i, seed in enumerate((0, 0, 1))
    )
    for name, weight in first.items():
        assert weight.isfinite().all() and weight.equal(again[name]), name
        added, writes = name.startswith(("model.layers.2", "model.layers.3")), "o_proj" in name or "down_proj" in name
        if added and writes:
            assert not weight.any(), name
        elif weight.dim() == 2 and "embed" not in name:
            # Columns that read exact zeros: the heads of extra groups, the extra MLP rows, the extra residual.
            quiet = weight[:, 8 * 16 if "o_proj" in name else 96 if "down_proj" in name else 64 :].float()
            assert ((quiet.std(0) > 0.01) & (quiet.std(0) < 0.03)).all(), name
            assert not quiet.equal(other[name][:, -quiet.shape[1] :].float()), name


def test_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_llama(tmp_path / "source", torch.float32)
    monkeypatch.setattr(module, "SHARD_PARAMETERS", 200_000)
    once = inflate(source, tmp_path / "once", **BIG)
    twice = inflate(once, tmp_path / "twice", hidden_size=1024, num_heads=16)  # reads shards, too
    for folder in (once, twice):
        names = set(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values())
        assert {path.name for path in folder.glob("*.safetensors")} == names and len(names) > 2
        assert {t.dtype for name in names for t in load_file(folder / name).values()} == {torch.float32}
        expected, got = (logits(each, torch.float32) for each in (source, folder))
        torch.testing.assert_close(got, expected, rtol=0, atol=5e-5)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden_size": 128}, r"hidden_size 128 must be .* \[64, 256, 1024\]"),
        ({"hidden_size": 0}, "hidden_size 0 must be"),
        ({"num_layers": 1}, "num_layers 1 must be at least the source's 2"),
        ({"intermediate_size": 95}, "intermediate_size 95 must be at least the source's 96"),
        ({"num_kv_heads": 1}, "num_kv_heads 1 must be at least the source's 2"),
        ({"num_heads": 16, "num_kv_heads": 3}, "num_heads 16 must be a multiple of num_kv_heads 3"),
        ({"num_heads": 8, "num_kv_heads": 8}, "num_heads 8 must be .* at least 16"),
        ({"num_heads": 12}, "num_heads 12 must divide hidden_size 256"),
    ],
)
def test_sizes_that_do_not_fit(tmp_path: Path, sizes: dict[str, int], message: str) -> None:
    source = save_llama(tmp_path / "source")
    with pytest.raises(ConfigError, match=message):
        inflate(source, tmp_path / "target", **sizes)
    assert not (tmp_path / "target").exists()


def test_folders_that_do_not_fit(tmp_path: Path) -> None:
    source = save_llama(tmp_path / "source")
    with pytest.raises(ConfigError, match="target is the source folder"):
        inflate(source, tmp_path / "else" / ".." / "source")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note").touch()
    with pytest.raises(ConfigError, match="already holds something"):
        inflate(source, tmp_path / "full")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        inflate(tmp_path / "full", tmp_path / "target")

    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"mlp_bias": True}))
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.mlp\.down_proj\.bias is missing"):
        inflate(source, tmp_path / "target")
    (source / "config.json").write_text(json.dumps(config | {"architectures": ["MistralForCausalLM"]}))
    with pytest.raises(ConfigError, match="MistralForCausalLM"):
        inflate(source, tmp_path / "target")
    (source / "config.json").write_text(json.dumps(config))
    (source / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no model\.safetensors"):
        inflate(source, tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_the_command(tmp_path: Path) -> None:
    target = tmp_path / "big"
    outcome = CliRunner().invoke(app, ["inflate", "tiny-draft", str(target), "--hidden-size", "128", "--layers", "3"])
    assert outcome.exit_code == 0 and "GB of weights" in outcome.output
    (r, _) = run(Settings(model=str(target), methods=[SpeculativeConfig("ngram")], prompts=1, max_tokens=4, repeats=1))
    assert r.inflated_from and r.inflated_from["num_hidden_layers"] == 2
    for seed in (2**64, 2**70, -(2**64)):
        wrong = CliRunner().invoke(app, ["inflate", "tiny-draft", str(tmp_path / "other"), "--seed", str(seed)])
        assert isinstance(wrong.exception, ConfigError) and "64 bits" in str(wrong.exception)
    for sizes in (["--layers", str(10**12)], ["--intermediate-size", str(10**12)], ["--kv-heads", str(10**9)]):
        wrong = CliRunner().invoke(app, ["inflate", "tiny-draft", str(tmp_path / "other"), *sizes])
        assert isinstance(wrong.exception, ConfigError) and "must be at most" in str(wrong.exception)


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    """Files may have 100 kB: the weights do not fit. Afterwards the target is as new as it was."""
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000,) * 2); from pathlib import Path\n"
        "from tools.inflate import inflate; from outrider.errors import ConfigError\n"
        "try: inflate(Path(sys.argv[1]), Path(sys.argv[2]))\nexcept ConfigError as error: print(error)"
    )
    source, target = save_llama(tmp_path / "source"), tmp_path / "target"
    args = [sys.executable, "-c", code, str(source), str(target)]
    ended = subprocess.run(args, capture_output=True, text=True, check=True)
    assert "cannot be written" in ended.stdout and "too large" in ended.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    assert inflate(source, target) == target
    assert len({path.stat().st_mode for path in target.iterdir()}) == 1, "some files are for their owner only"


def test_a_killed_run_is_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / "target.partial").mkdir()
    (tmp_path / "target.partial" / "model.safetensors").write_bytes(b"half")
    (tmp_path / "target.partial" / OURS).touch()
    target = inflate(save_llama(tmp_path / "source"), tmp_path / "target")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source", "target"] and (target / "config.json").is_file()


def test_weights_that_are_no_real_numbers(tmp_path: Path) -> None:
    source = save_llama(tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    save_file(tensors | {"model.norm.weight": tensors["model.norm.weight"].int()}, source / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model\.norm\.weight is I32"):
        inflate(source, tmp_path / "target")
