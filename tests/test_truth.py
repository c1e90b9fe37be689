"""Logits and greedy text are those of transformers, for every architecture and everything a config can say."""

from __future__ import annotations

import json
from copy import deepcopy
from shutil import copytree

import pytest
import torch
from helpers import logits_after, run
from torch.testing import assert_close

from outrider import LLM, SamplingParams
from outrider.find import embedded


def rope(kind: str, **parameters) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
MIXED = ["full_attention", "sliding_attention", "full_attention"]
VARIANTS = {
    "llama": ("llama", {}),
    "llama-3-layers-mha": ("llama", {"num_hidden_layers": 3, "num_key_value_heads": 4}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": ("llama", {"head_dim": 24}),
    "llama-eps-theta": ("llama", {"rms_norm_eps": 0.1} | rope("default", rope_theta=500.0)),
    "llama-linear": ("llama", rope("linear", factor=4.0)),
    "llama-dynamic": ("llama", {"max_position_embeddings": 32} | rope("dynamic", factor=4.0)),
    "llama-dynamic-original": ("llama", {"max_position_embeddings": 32} | rope(
        "dynamic", factor=4.0, original_max_position_embeddings=16)),
    "llama-yarn-beyond-all": ("llama", rope("yarn", factor=4.0, original_max_position_embeddings=2**40)),
    "llama-llama3": ("llama", rope("llama3", **LLAMA3)),
    "llama-yarn": ("llama", rope("yarn", **YARN)),
    "llama-yarn-mscale": ("llama", rope("yarn", mscale=0.7, mscale_all_dim=1.3, **YARN)),
    "llama-yarn-mscale-0": ("llama", rope("yarn", mscale=0.7, mscale_all_dim=0.0, **YARN)),
    "llama-yarn-attention-factor": ("llama", rope("yarn", attention_factor=0.6, **YARN)),
    "llama-yarn-betas": ("llama", rope("yarn", beta_fast=4.0, beta_slow=0.5, truncate=False, **YARN)),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-long-window": ("mistral", {"sliding_window": 1024}),
    "mistral-short-window": ("mistral", {"sliding_window": 8}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-mixed-window": ("qwen2", {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 8,
                                     "layer_types": MIXED}),
    "qwen2-max-window-layers": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3-biases": ("qwen3", {"attention_bias": True}),
    "qwen3-mixed-window": ("qwen3", {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 8,
                                     "layer_types": MIXED}),
}  # fmt: skip


def reference(path, dtype: torch.dtype = torch.float32):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


def prompt_of(length: int) -> list[int]:
    return torch.randint(128, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def theirs(model, prompt: list[int], n: int) -> tuple[torch.Tensor, list[int]]:
    """Logits after the prompt and n greedy tokens, by transformers."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        logits = deepcopy(model)(ids).logits[0, -1].float()  # dynamic rope keeps state in the model: use each once
        text = deepcopy(model).generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, do_sample=False)
    return logits, text[0, len(prompt) :].tolist()


def check(llm: LLM, model, prompts: list[list[int]], n: int, **tolerance) -> None:
    outputs = run(llm, [(p, SamplingParams(temperature=0, max_tokens=n)) for p in prompts])
    for prompt, output in zip(prompts, outputs, strict=True):
        logits, text = theirs(model, prompt, n)
        assert_close(logits_after(llm, prompt), logits, **tolerance)
        assert output.token_ids == text


@pytest.mark.parametrize("name", VARIANTS)
def test_architecture(make_checkpoint, name):
    arch, config = VARIANTS[name]
    path = make_checkpoint(arch, **config)
    llm = LLM(path, device="cpu", dtype="float32")
    check(llm, reference(path), [prompt_of(n) for n in (1, 20, 40)], 24, rtol=1e-4, atol=1e-4)


def test_window_beyond_the_first_key_block(make_checkpoint):
    path = make_checkpoint("mistral", sliding_window=20)
    check(LLM(path, device="cpu"), reference(path), [prompt_of(530), prompt_of(1060)], 8, rtol=1e-4, atol=1e-4)


def test_shards(make_checkpoint):
    path = make_checkpoint(max_shard_size="40KB")
    assert len(list(path.glob("*.safetensors"))) > 3
    check(LLM(path, device="cpu"), reference(path), [prompt_of(20)], 24, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("tied", [False, True])
def test_half_precision(make_checkpoint, dtype, tied):
    path = make_checkpoint(dtype=getattr(torch, dtype), tie_word_embeddings=tied)
    llm = LLM(path, device="cpu")
    assert llm.runner.model.dtype == getattr(torch, dtype)
    exact = reference(path, torch.float32)
    for n in (1, 20, 40):
        logits, _ = theirs(exact, prompt_of(n), 1)
        error = (logits_after(llm, prompt_of(n)) - logits).abs().max() / logits.std()
        half, _ = theirs(reference(path, getattr(torch, dtype)), prompt_of(n), 1)
        assert error < 0.02 + 2 * (half - logits).abs().max() / logits.std()  # no worse than transformers itself


@pytest.mark.parametrize("name", ["tiny", "tiny-draft"])
def test_embedded(name):
    llm, model = LLM(name, device="cpu", dtype="float32"), reference(embedded()[name])
    prompts = [llm.encode(p) for p in ("Once upon a time", "def f(x):\n    return", "It was the best of times, " * 8)]
    check(llm, model, prompts, 48, rtol=1e-3, atol=1e-3)


def test_chunked_prefill(make_checkpoint):
    path, prompt = make_checkpoint(), prompt_of(100)
    whole, chunked = LLM(path, device="cpu"), LLM(path, device="cpu", max_num_batched_tokens=16)
    seen = []
    chunked.runner.progress = lambda done, total: seen.append((done, total))
    assert_close(logits_after(chunked, prompt), logits_after(whole, prompt), rtol=1e-4, atol=1e-4)
    assert [done for done, _ in seen] == [16, 32, 48, 64, 80, 96, 100] and {total for _, total in seen} == {100}
    params = SamplingParams(temperature=0, max_tokens=8)
    batch = [(prompt_of(n), params) for n in (3, 50, 17, 90)]  # several long prompts share the chunks
    assert [o.token_ids for o in run(chunked, batch)] == [o.token_ids for o in run(whole, batch)]


def test_a_head_that_is_there_is_used(make_checkpoint, tmp_path):
    """Whatever the config says: so does transformers."""
    folder = copytree(make_checkpoint(), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    check(LLM(folder, device="cpu", dtype="float32"), reference(folder), [prompt_of(9)], 8, rtol=1e-4, atol=1e-4)
