"""Tiny random checkpoints of every architecture, and models loaded once for all tests. CPU, offline."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TRITON_INTERPRET", "1")  # the GPU kernels run here, too; 0 on a GPU: see docs/gpu.md
os.environ["OUTRIDER_CACHE"] = ""  # no test depends on what an earlier run measured
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from outrider import LLM
from outrider.cli import main

torch.set_num_threads(1)  # steadier and, for models this small, faster
settings.register_profile(
    "outrider", deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), max_examples=50
)
settings.load_profile("outrider")

if os.environ["TRITON_INTERPRET"] == "1" and find_spec("triton"):
    from tests import interpreter

    interpreter.use()

SHAPE = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory) -> Callable[..., Path]:
    """`make(arch, **config)`: a folder with a random model, made once per set of arguments.

    Weights are large, biases and norms random too: the argmax is decisive, texts vary and nothing is a no-op. `noise`
    perturbs them: the same seed with a little noise is a draft model that is right now and then.
    """
    made: dict[str, Path] = {}

    def make(
        arch: str = "llama",
        *,
        seed: int = 0,
        noise: float = 0.0,
        dtype: torch.dtype = torch.float32,
        max_shard_size: str = "1GB",
        **config,
    ) -> Path:
        key = repr((arch, seed, noise, dtype, max_shard_size, sorted(config.items())))
        if key not in made:
            from transformers import AutoConfig, AutoModelForCausalLM

            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(arch, **(SHAPE | config)))
            own, other = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed + 1)
            with torch.no_grad():
                for name, weight in model.named_parameters():
                    value = torch.randn(weight.shape, generator=own) * 0.3 + ("norm" in name)
                    weight.copy_(value + torch.randn(weight.shape, generator=other) * noise)
            made[key] = tmp_path_factory.mktemp(arch)
            model.to(dtype).save_pretrained(made[key], max_shard_size=max_shard_size)
        return made[key]

    return make


@pytest.fixture(scope="session")
def make_llm(make_checkpoint) -> Callable[..., LLM]:
    """`make(arch, engine={...}, **checkpoint)`: an LLM around a random checkpoint, in float32."""

    def make(arch: str = "llama", *, engine: dict | None = None, **checkpoint) -> LLM:
        return LLM(make_checkpoint(arch, **checkpoint), device="cpu", dtype="float32", **(engine or {}))

    return make


@pytest.fixture
def run(monkeypatch, capsys) -> Callable[..., tuple[int, str, str]]:
    """`run("generate", ...)` -> (exit code, stdout, stderr), in this process."""

    def call(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["outrider", *args])
        with pytest.raises(SystemExit) as ended:
            main()
        out = capsys.readouterr()
        return int(ended.value.code or 0), out.out, out.err

    return call


@pytest.fixture(scope="session")
def _shared(make_llm) -> dict[str, LLM]:
    return {"random": make_llm(), "tiny": LLM("tiny", device="cpu", dtype="float32")}


@pytest.fixture
def random_llm(_shared) -> LLM:
    """A random Llama of 128 tokens, without a tokenizer, decoding plainly."""
    _shared["random"].speculative_config = None
    return _shared["random"]


@pytest.fixture
def tiny_llm(_shared) -> LLM:
    """The embedded model in float32, decoding plainly."""
    _shared["tiny"].speculative_config = None
    return _shared["tiny"]
