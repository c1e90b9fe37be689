"""Every family: logits and greedy tokens are transformers', and the same with speculation on or off, bit for bit."""

from __future__ import annotations

import json
from copy import deepcopy
from shutil import copytree

import pytest
import torch
from helpers import ScriptedDrafter, logits_after, run, use
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from outrider import LLM, Draft, SamplingParams, families
from outrider.errors import CheckpointError, ConfigError, OutriderError, UnsupportedArchitecture
from outrider.export import export
from outrider.find import find
from outrider.hf import accelerate
from outrider.load import ends_of, read_tokenizer
from outrider.ops import native
from outrider.sampling import Row, process
from outrider.sequence import Sequence

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
SLIDES, FULL = "sliding_attention", "full_attention"
DEEP = {"num_hidden_layers": 4}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
WIDE = {"num_hidden_layers": 1, "hidden_size": 16, "tie_word_embeddings": True}  # few weights but the vocabulary's
LOCAL = {"layer_types": [SLIDES, SLIDES, FULL, SLIDES], "sliding_window": 8}
GROWING = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}
FACTORS = {"short_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 2.5], "long_factor": [1.0, 1.5, 2.5, 4.0, 7.0, 9.0]}
LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75, **FACTORS}
VARIANTS = {
    "gemma3": ("gemma3_text", DEEP | LOCAL | {"query_pre_attn_scalar": 24, "tie_word_embeddings": True,
               "rope_parameters": {SLIDES: {"rope_type": "default", "rope_theta": 100.0},
                                   FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0}}}),
    "gemma3-softcap": ("gemma3_text", {"final_logit_softcapping": 3.0, "attention_bias": True}),
    "gemma3-unused": ("gemma3_text", {"attn_logit_softcapping": 0.5, "hidden_act": "silu"}),
    "gemma2-unused": ("gemma2", {"hidden_act": "silu"}),
    "phi3": ("phi3", {}),
    "phi3-window": ("phi3", {"sliding_window": 8}),
    "phi4-mini": ("phi3", {"tie_word_embeddings": True, "rope_parameters": LONG,
                           "original_max_position_embeddings": 30}),
    "smollm3": ("smollm3", DEEP | {"no_rope_layer_interval": 2}),
    "smollm3-biases": ("smollm3", {"no_rope_layers": [0, 1], "attention_bias": True, "mlp_bias": True,
                                   "use_sliding_window": True, "sliding_window": 8}),
    "smollm3-named-windows": ("smollm3", {"sliding_window": 8, "layer_types": [FULL, SLIDES]}),
    "olmo2": ("olmo2", {}),
    "olmo2-biases": ("olmo2", {"attention_bias": True}),
    "olmo3": ("olmo3", DEEP | LOCAL),
    "olmo3-yarn": ("olmo3", DEEP | LOCAL | {"rope_parameters": {
        SLIDES: {"rope_type": "default", "rope_theta": 10000.0}, FULL: YARN}}),
    "granite": ("granite", {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1,
                            "logits_scaling": 8.0, "tie_word_embeddings": True}),
    "granite-biases": ("granite", {"attention_bias": True, "mlp_bias": True, "attention_multiplier": 0.2}),
    "granite4": ("granitemoehybrid", {
        "layer_types": ["full_attention"] * 2, "num_local_experts": 0, "num_experts_per_tok": 0,
        "shared_intermediate_size": 80, "position_embedding_type": "rope", "attention_multiplier": 0.1,
        "residual_multiplier": 0.22}),
    "granite4-no-rope": ("granitemoehybrid", {
        "layer_types": ["full_attention"] * 2, "num_local_experts": 0, "num_experts_per_tok": 0,
        "attention_multiplier": 0.1, "logits_scaling": 3.0}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "mixtral-window": ("mixtral", {"num_local_experts": 4, "sliding_window": 8}),
    "qwen2-moe": ("qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 48, "norm_topk_prob": True}),
    "qwen2-moe-some": ("qwen2_moe", DEEP | EXPERTS | {"shared_expert_intermediate_size": 80, "mlp_only_layers": [1]}),
    "qwen3-moe": ("qwen3_moe", EXPERTS | {"norm_topk_prob": True}),
    "qwen3-moe-some": ("qwen3_moe", DEEP | EXPERTS | {
        "decoder_sparse_step": 2, "attention_bias": True, "use_sliding_window": True, "sliding_window": 8}),
    "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 3}),
    "granite-moe": ("granitemoe", {"num_local_experts": 6, "num_experts_per_tok": 2, "attention_multiplier": 0.1,
                                   "residual_multiplier": 0.22}),
    "gpt-oss": ("gpt_oss", DEEP | {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 8,
                                   "rope_parameters": YARN | {"truncate": False}}),
    "gpt-oss-limits": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 4, "swiglu_limit": 0.5,
                                   "swiglu_alpha": 1.1, "attention_bias": False}),
    "gemma2": ("gemma2", {"sliding_window": 8, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0,
                          "tie_word_embeddings": True}),
    "gemma2-no-caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "exaone4": ("exaone4", DEEP | {"sliding_window": 8}),
    "exaone4-named-windows": ("exaone4", DEEP | LOCAL | {"sliding_window_pattern": "LLGL"}),
    "exaone4-no-windows": ("exaone4", {"sliding_window": None, "layer_types": [FULL, FULL]}),
    "exaone4-full": ("exaone4", {"sliding_window": 8, "layer_types": [FULL, FULL]}),
    "ernie4_5": ("ernie4_5", {"tie_word_embeddings": True}),
    "ernie4_5-biases": ("ernie4_5", {"use_bias": True}),
    "internlm3": ("internlm3", {}),
    "internlm3-biases": ("internlm3", {"attention_bias": True, "mlp_bias": True}),
    "seed-oss": ("seed_oss", {}),
    "seed-oss-biases": ("seed_oss", {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True}),
    "ministral": ("ministral", {"sliding_window": 8}),
    "ministral-some": ("ministral", DEEP | LOCAL),
    "glm": ("glm", {}),
    "glm-no-bias": ("glm", {"attention_bias": False}),
    "glm4": ("glm4", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                                          "partial_rotary_factor": 0.5}}),
    "glm4-dynamic": ("glm4", {"max_position_embeddings": 32, "rope_parameters": {
        "rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}),
    "glm4-no-bias": ("glm4", {"attention_bias": False}),
    "ministral3": ("ministral3", {"rope_parameters": GROWING}),
    "ministral3-window": ("ministral3", {"sliding_window": 8, "rope_parameters": GROWING}),
    "heads-80": ("llama", {"head_dim": 80, "intermediate_size": 97}),
    "heads-96": ("llama", {"head_dim": 96, "intermediate_size": 111, "hidden_size": 72}),
    "heads-128": ("llama", {"head_dim": 128, "intermediate_size": 65}),
    "heads-256": ("qwen3", {"head_dim": 256, "intermediate_size": 33, "num_key_value_heads": 1}),
    "vocabulary-151936": ("qwen3", WIDE | {"vocab_size": 151936}),
    "vocabulary-262144": ("gemma3_text", WIDE | {"vocab_size": 262144, "query_pre_attn_scalar": 16}),
}  # fmt: skip
PROMPTS = [torch.randint(128, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (1, 20, 45)]


@pytest.mark.parametrize("name", VARIANTS)
def test_as_transformers(make_checkpoint, name):
    arch, config = VARIANTS[name]
    path = make_checkpoint(arch, **config)
    llm, model = LLM(path, device="cpu", dtype="float32"), AutoModelForCausalLM.from_pretrained(path).eval()
    outputs = run(llm, [(p, SamplingParams(temperature=0, max_tokens=24)) for p in PROMPTS])
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            logits = deepcopy(model)(ids).logits[0, -1].float()
            text = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
        assert_close(logits_after(llm, prompt), logits, rtol=1e-4, atol=1e-4)
        assert output.token_ids == text[0, len(prompt) :].tolist()


HEADS = ["num_attention_heads", "num_key_value_heads"]


@pytest.mark.parametrize(
    ("arch", "made", "left", "more"),
    [
        ("llama", dict.fromkeys(HEADS, 32), HEADS, {}),
        ("gemma3_text", {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}},
         ["query_pre_attn_scalar", "rms_norm_eps", "hidden_activation"], {}),
        ("phi3", {"rope_parameters": {**LONG, "original_max_position_embeddings": 4096}},
         ["original_max_position_embeddings"], {}),
        ("olmo3", VARIANTS["olmo3-yarn"][1], [], {"original_max_position_embeddings": 512}),  # each rope has its own
    ],
)  # fmt: skip
def test_what_a_config_leaves_out_is_what_transformers_has(make_checkpoint, tmp_path, arch, made, left, more):
    folder = copytree(make_checkpoint(arch, **made), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    rope = {key: value for key, value in config["rope_parameters"].items() if key not in left}
    kept = {key: value for key, value in config.items() if key not in left} | {"rope_parameters": rope}
    kept |= more
    (folder / "config.json").write_text(json.dumps(kept))
    llm, model = LLM(folder, device="cpu", dtype="float32"), AutoModelForCausalLM.from_pretrained(folder).eval()
    for prompt in PROMPTS:
        with torch.no_grad():
            logits = model(torch.tensor([prompt])).logits[0, -1]
        assert_close(logits_after(llm, prompt), logits, rtol=1e-4, atol=1e-4)


def test_a_dtype_that_nobody_says_is_the_weights_own(make_checkpoint, tmp_path):
    folder = copytree(make_checkpoint(dtype=torch.bfloat16), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "dtype"}))
    assert LLM(folder, device="cpu").runner.model.dtype == torch.bfloat16


@pytest.mark.parametrize(("arch", "kind"), [("LlamaForCausalLM", "mistral"), ("Olmo2ForCausalLM", "olmo3")])
def test_a_config_that_contradicts_itself(make_checkpoint, tmp_path, arch, kind):
    """One would be loaded here, and the other in transformers: the tensors have the same names."""
    folder = copytree(make_checkpoint(kind), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [arch]}))
    with pytest.raises(OutriderError, match=f"contradicts itself.*model_type is {kind}"):
        LLM(folder, device="cpu")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_caps_without_kernels(make_checkpoint, dtype):
    """Both soft-caps of Gemma 2 as PyTorch computes them."""
    path, before = make_checkpoint("gemma2", attn_logit_softcapping=2.0, final_logit_softcapping=3.0), native.active
    native.use(native.REFERENCE)
    try:
        llm = LLM(path, device="cpu", dtype=dtype)
        assert llm.runner.model.native_seconds is None
        ours = [logits_after(llm, prompt) for prompt in PROMPTS]
    finally:
        native.use(before)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
    close = {"rtol": 1e-4, "atol": 1e-4} if dtype == "float32" else {"rtol": 0, "atol": 0.2}
    for prompt, mine in zip(PROMPTS, ours, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt])).logits[0, -1].float()
        assert 2.5 < logits.abs().max() <= 3 and mine.abs().max() <= 3
        assert_close(mine, logits, **close)


def bush(seq: Sequence, k: int) -> Draft:
    """Wrong and right guesses in a tree: what was said last at two places of the text, and a token of no meaning."""
    rows = [seq.tokens[-3:], seq.tokens[:2], [(7 * len(seq.tokens)) % 128]]
    return Draft.merge([Draft.chain(row) for row in rows], k)[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", VARIANTS)
def test_exactness(make_checkpoint, name, dtype):
    arch, config = VARIANTS[name]
    llm = LLM(make_checkpoint(arch, **config), device="cpu", dtype=dtype)
    assert llm.exactness == "bitwise"
    for params in (SamplingParams(temperature=0, max_tokens=20), SamplingParams(seed=3, max_tokens=20)):
        requests = [(prompt, params) for prompt in PROMPTS]
        llm.speculative_config = None
        plain = [run(llm, [request])[0].token_ids for request in requests]
        assert [o.token_ids for o in run(llm, requests)] == plain
        known = {tuple(prompt): tokens for prompt, tokens in zip(PROMPTS, plain, strict=True)}

        def oracle(seq: Sequence, k: int, known=known) -> Draft:
            return Draft.chain(known[tuple(seq.tokens[: seq.prompt_len])][len(seq.output) :][:k])

        for script in (oracle, bush, lambda seq, k: Draft.merge([oracle(seq, k), bush(seq, k)][::-1], k)[0]):
            use(llm, ScriptedDrafter(script), 6)
            assert [o.token_ids for o in run(llm, requests)] == plain


def test_every_family_is_tested():
    tested = {arch for arch, _ in VARIANTS.values()} | {"llama", "mistral", "qwen2", "qwen3"}
    assert tested == {found.model_type for found in families.FAMILIES.values()}


PICTURES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1,
            "image_size": 28, "patch_size": 14}  # fmt: skip
TEXT = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


@pytest.mark.parametrize("new_names", [False, True])
@pytest.mark.parametrize(
    ("outer", "inner", "tied"),
    [("gemma3", "gemma3_text", True), ("mistral3", "mistral", False), ("mistral3", "ministral3", False)],
)
def test_text_part_of_a_model_of_pictures(tmp_path, outer, inner, tied, new_names):
    from transformers import AutoConfig, AutoModelForImageTextToText

    torch.manual_seed(0)
    text = {"model_type": inner, "tie_word_embeddings": tied, "eos_token_id": 5, **TEXT}
    vision = {"model_type": "siglip_vision_model" if outer == "gemma3" else "pixtral", **PICTURES}
    config = AutoConfig.for_model(outer, text_config=text, vision_config=vision, tie_word_embeddings=tied)
    model = AutoModelForImageTextToText.from_config(config).eval()
    for name, weight in model.named_parameters():
        weight.data = torch.randn(weight.shape) * 0.3 + ("norm" in name)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert "language_model.model.norm.weight" in tensors
    if new_names:  # as the modules are called since transformers 4.52
        names = {name: f"model.{name}".replace("language_model.model.", "language_model.") for name in tensors}
        names["language_model.lm_head.weight"] = "lm_head.weight"
        save_file({names[name]: tensor for name, tensor in tensors.items()}, file, metadata={"format": "pt"})
    (tmp_path / "generation_config.json").unlink(missing_ok=True)  # the end of text is the text part's
    llm, prompt = LLM(tmp_path, device="cpu", dtype="float32"), PROMPTS[1]
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0, -1]
    assert_close(logits_after(llm, prompt), logits, rtol=1e-4, atol=1e-4)
    assert llm.runner.model.config.eos == (5,)


@pytest.mark.parametrize(
    ("arch", "changes", "words"),
    [
        ("gemma2", {"attn_logit_softcapping": -50.0}, "attn_logit_softcapping"),
        ("qwen3_moe", {"num_experts_per_tok": 7}, "num_experts_per_tok 7 of 6"),
        ("qwen3_moe", {"num_local_experts": 7}, "experts.6.*missing"),
        ("qwen3_moe", {"num_local_experts": 5}, "gate.weight has shape"),
        ("qwen3_moe", {"num_experts_per_tok": 0}, "num_experts_per_tok"),
        ("qwen3_moe", {"mlp_only_layers": [2]}, "mlp_only_layers"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "layers.0.mlp.gate_proj.weight is missing"),
        ("qwen3_moe", {"moe_intermediate_size": 48}, "has shape"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size"),
        ("qwen2_moe", {"max_window_layers": "x"}, "max_window_layers must be a whole number, not 'x'"),
        ("llama", {"head_dim": 2**17}, "head_dim must be a whole number of 1 to 65536"),
        ("gpt_oss", {"intermediate_size": 2**31}, "gate_up_proj.*has shape"),
        ("gpt_oss", {"swiglu_limit": 0}, "swiglu_limit"),
        ("gpt_oss", {"num_local_experts": 5}, "router.bias has shape"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3_text", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        (
            "olmo3",
            {
                "rope_parameters": {
                    FULL: {"rope_type": "default", "rope_theta": 1e4},
                    SLIDES: LONG | {"original_max_position_embeddings": 30},
                }
            },
            "'longrope'",
        ),
        ("phi3", {"rope_parameters": LONG | {"short_factor": [1.0] * 5}}, "6 numbers"),
        ("phi3", {"rope_parameters": LONG | {"long_factor": [1.0] * 5 + [0.0]}}, "6 numbers"),
        ("phi3", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "longrope"),
        ("glm4", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.01}}, "pairs"),
        ("glm4", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 2.0}}, "32"),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("granite", {"logits_scaling": -1.0}, "logits_scaling"),
        ("granitemoehybrid", {"layer_types": ["full_attention", "linear_attention"]}, "Mamba-2"),
        ("granitemoehybrid", {"layer_types": ["attention"] * 2, "num_local_experts": 4}, "experts"),
        ("phi3", {"sliding_window": 8, "layer_types": [FULL, SLIDES]}, "a window in all layers or in none"),
        ("mixtral", {"sliding_window": 8, "layer_types": [SLIDES, FULL]}, "a window in all layers or in none"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers"),
        ("phi3", {"sliding_window": 8, "layer_types": "sliding_attention"}, "layer_types must be a list"),
        (
            "gpt_oss",
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "rope_theta": 1e4,
                    "original_max_position_embeddings": None,
                }
            },
            "validate_rope",
        ),
        ("smollm3", {"hidden_act": "relu"}, "relu"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 1e-30, "rope_theta": 1e4}}, "no position"),
    ],
)
def test_what_cannot_be_is_named(make_checkpoint, tmp_path, arch, changes, words):
    made = next((made for kind, made in VARIANTS.values() if kind == arch), {})
    folder = copytree(make_checkpoint(arch, **made), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(OutriderError, match=words):
        LLM(folder, device="cpu")


def test_logprobs_of_a_prompt_are_those_before_the_border(make_llm):
    """However much is known of the answer: read at once with it, LongRoPE would turn the prompt as a longer text."""
    llm = make_llm("phi3", rope_parameters=LONG, original_max_position_embeddings=30)
    params = SamplingParams(temperature=0, max_tokens=30, prompt_logprobs=2)
    expected = llm.generate(PROMPTS[1], params)[0]
    (request,) = llm.engine.add(PROMPTS[1], params, begun=[expected.token_ids[:20]])
    llm.engine.finish([request])
    output = llm.engine.output(request)
    assert (output.token_ids, output.prompt_logprobs) == (expected.token_ids, expected.prompt_logprobs)


def test_the_tokenizers_end_of_text_ends_a_text(tmp_path):
    """Whatever the generation config says: a fine-tuned model's is often its base model's. One beyond the vocabulary
    is none."""
    folder = copytree(find("tiny"), tmp_path / "model")
    (folder / "generation_config.json").write_text('{"eos_token_id": 5}')
    llm = LLM(folder, device="cpu")
    end = llm.tokenizer.eos_token_id
    assert end != 5 and llm.runner.model.config.eos == (5, end)
    (output,) = llm.generate("One", temperature=0, max_tokens=4, logit_bias={end: 100})
    assert (output.token_ids, output.finish_reason) == ([end], "stop")
    llm.tokenizer.add_tokens("<|beyond|>")
    llm.tokenizer.eos_token = "<|beyond|>"
    assert ends_of(llm.runner.model.config, llm.tokenizer) == (5, end)


def test_weights_are_fetched_once(make_checkpoint, monkeypatch):
    """gpt-oss's and Mistral's repositories hold them once more, in their makers' layout."""
    there, fetched = make_checkpoint(), set()
    own = {"config.json", "model.safetensors", "tokenizer.json", "additional_chat_templates/tool_use.jinja"}

    def download(_: str, **patterns: object) -> str:
        others = {"original/config.json", "original/model.safetensors", "consolidated.safetensors", "metal/model.bin"}
        fetched.update(filter_repo_objects(own | others, **patterns))
        return str(there)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert find("owner/name") == there and fetched == own


def test_a_chat_template_may_lie_in_a_file_of_its_own(tmp_path):
    """As that of Mistral Small 3.1 does; the tokenizer's own goes first."""
    folder = copytree(find("tiny"), tmp_path / "model")
    (folder / "chat_template.json").write_text('{"chat_template": "another"}')
    own = read_tokenizer(find("tiny")).chat_template
    assert read_tokenizer(folder).chat_template == own
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert read_tokenizer(folder).chat_template == "another"
    (folder / "chat_template.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"chat_template\.json cannot be read"):
        read_tokenizer(folder)


def test_a_config_that_names_no_end_of_text_has_none(make_checkpoint, tmp_path):
    """Llama's default in transformers, 2, is any token of another vocabulary."""
    folder = copytree(make_checkpoint(), tmp_path / "model")
    (folder / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((folder / "config.json").read_text())
    del config["eos_token_id"]
    (folder / "config.json").write_text(json.dumps(config))
    llm = LLM(folder, device="cpu")
    assert llm.runner.model.config.eos == ()
    (output,) = llm.generate([3, 5], temperature=0, max_tokens=4, logit_bias={2: 100})
    assert (output.token_ids, output.finish_reason) == ([2] * 4, "length")


def test_ends_of_text_outside_the_vocabulary_are_none(make_checkpoint, tmp_path):
    """Some configs say -1 for none, others name tokens that the model lacks: nothing may be banned for these."""
    folder = copytree(make_checkpoint(), tmp_path / "model")
    (folder / "generation_config.json").write_text('{"eos_token_id": [-1, 5, 128]}')
    llm = LLM(folder, device="cpu")
    assert llm.runner.model.config.eos == (5,)
    logits = process(
        torch.zeros(128), Row(Sequence([3], SamplingParams(min_tokens=2), 0, eos=llm.runner.model.config.eos))
    )
    assert logits.isinf().nonzero().flatten().tolist() == [5]


def test_a_border_is_not_checked_across(make_llm):
    """No draft crosses it: sequences beyond are turned anew."""
    for context, original in ((64, 30), (600, 520)):
        rope = {"rope_parameters": LONG, "original_max_position_embeddings": original}
        llm = make_llm("phi3", **rope, max_position_embeddings=context)
        assert (llm.runner.model.config.border, llm.exactness) == (original, "bitwise")


def test_names_of_any_length_are_told_in_one_line():
    """A config may hold anything."""
    sizes = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"), 32)
    good = {"architectures": ["Phi3ForCausalLM"], "num_attention_heads": 2, **sizes, "sliding_window": 8}
    name = "x" * 100_000
    for wrong in ({"architectures": [name]}, {"dtype": name}, {"hidden_act": name}, {"rope_parameters": name},
                  {"rope_parameters": {"rope_type": name}},
                  {"architectures": ["MistralForCausalLM"], "layer_types": [name] * 32}):  # fmt: skip
        with pytest.raises(OutriderError) as raised:
            families.read(good | wrong)
        assert len(str(raised.value)) < 3000


@pytest.mark.parametrize("name", families.UNSUPPORTED)
def test_known_and_not_supported(name):
    with pytest.raises(UnsupportedArchitecture, match=f"{name} is not supported: it needs .*; supported: Llama"):
        families.read({"architectures": [name]})


def test_an_architecture_of_two_lines_is_named_in_one():
    with pytest.raises(UnsupportedArchitecture, match=r"^architecture ab is not supported.*$"):
        families.read({"architectures": ["a\nb"]})


@pytest.mark.parametrize("name", ["gemma3", "glm4"])
def test_weights_that_change_are_not_shared(make_checkpoint, name):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(make_checkpoint(VARIANTS[name][0], **VARIANTS[name][1]))
    with pytest.raises(ConfigError, match="share=False"):
        accelerate(model)
    ids = torch.tensor([PROMPTS[1]])
    plain = model.generate(ids, max_new_tokens=8, do_sample=False, attention_mask=torch.ones_like(ids))
    with accelerate(model, share=False):
        assert model.generate(ids, max_new_tokens=8, do_sample=False).tolist() == plain.tolist()


def test_an_export_reads_as_its_source(make_checkpoint, tmp_path):
    arch, config = VARIANTS["glm4"]
    path = make_checkpoint(arch, **config)
    copy = export(path, tmp_path / "copy")
    ours, again = (LLM(p, device="cpu", dtype="float32") for p in (path, copy))
    assert torch.equal(logits_after(ours, PROMPTS[1]), logits_after(again, PROMPTS[1]))
