"""The families of models: how each one's config and tensor names become a ModelConfig.

There is one decoder (model.py). A family is a function from `config.json`, as transformers >= 5 normalises it, to what
differs from a Llama: fields of ModelConfig, `names` among them. Its docstring is its line in docs/models.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from outrider.config import ACTIVATIONS, DTYPES, Mixture, ModelConfig, Names, real, whole
from outrider.errors import CheckpointError, UnsupportedArchitecture, brief

Hf = Mapping[str, Any]
Read = Callable[[Hf], dict[str, Any]]
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
ROPE_NUMBERS = (  # of any type, where they are given
    "factor", "original_max_position_embeddings", "attention_factor", "mscale", "mscale_all_dim", "beta_fast",
    "beta_slow", "low_freq_factor", "high_freq_factor", "partial_rotary_factor",
)  # fmt: skip
ROPE_NEEDS = {  # parameters of a rope type
    "default": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("original_max_position_embeddings",),
}
FULL, SLIDING = "full_attention", "sliding_attention"  # kinds of layers
OUTER = {  # models of text and pictures whose text part is read: what its model_type is called alone
    "Gemma3ForConditionalGeneration": {"gemma3_text": "Gemma3ForCausalLM"},
    "Mistral3ForConditionalGeneration": {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"},
}
PICTURES = ("vision_tower.", "multi_modal_projector.")  # where their other tensors lie
SANDWICH = Names(  # norms before and after
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
UNSUPPORTED = {  # architectures that are known and not supported: what they would need
    "Glm4MoeForCausalLM": "experts that are chosen by sigmoids",
    "PhimoeForCausalLM": "LayerNorm and experts that are chosen one by one",
    "MiniMaxM2ForCausalLM": "experts that are chosen by sigmoids",
    "Gemma4ForConditionalGeneration": "layers of different head sizes that share keys",
    "Gemma4ForCausalLM": "layers of different head sizes that share keys",
    "Gemma3nForConditionalGeneration": "per-layer embeddings and alternating updates",
    "Qwen3NextForCausalLM": "gated DeltaNet layers and experts",
    "Qwen3_5ForConditionalGeneration": "gated DeltaNet layers",
    "Qwen3_5MoeForConditionalGeneration": "gated DeltaNet layers and experts",
    "DeepseekV2ForCausalLM": "latent attention and experts",
    "DeepseekV3ForCausalLM": "latent attention and experts",
    "Llama4ForConditionalGeneration": "experts and chunked attention",
    "MambaForCausalLM": "state-space layers",
    "Lfm2ForCausalLM": "short convolutions",
    "GPT2LMHeadModel": "learned positions and LayerNorm",
    "PhiForCausalLM": "LayerNorm and parallel branches",
    "CohereForCausalLM": "LayerNorm and parallel branches",
    "FalconForCausalLM": "LayerNorm and parallel branches",
}


@dataclass(frozen=True)
class Family:
    """A registered family: its model_type in transformers, the checkpoints meant, and what reads its config."""

    model_type: str
    title: str
    read: Read

    @property
    def differs(self) -> str:
        """In what from a Llama, in one line."""
        return " ".join((self.read.__doc__ or "").split())


FAMILIES: dict[str, Family] = {}
"""By architecture, as config.json names it."""


def family(architecture: str, model_type: str, title: str) -> Callable[[Read], Read]:
    """Register a function as the one that reads this architecture."""

    def enter(function: Read) -> Read:
        FAMILIES[architecture] = Family(model_type, title, function)
        return function

    return enter


@family("InternLM3ForCausalLM", "internlm3", "InternLM3")
@family("LlamaForCausalLM", "llama", "Llama 2 and 3, SmolLM2, TinyLlama, Yi")
def llama(hf: Hf) -> dict[str, Any]:
    """The plain decoder: norms before, rope, gated SiLU."""
    return {"o_bias": bool(hf.get("attention_bias"))}


@family("SeedOssForCausalLM", "seed_oss", "Seed-OSS 36B")
def seed_oss(hf: Hf) -> dict[str, Any]:
    """Biases of queries, keys and values."""
    return {"qkv_bias": bool(hf.get("attention_bias", True)), "o_bias": bool(hf.get("attention_out_bias"))}


@family("Ernie4_5ForCausalLM", "ernie4_5", "ERNIE 4.5 dense (0.3B)")
def ernie4_5(hf: Hf) -> dict[str, Any]:
    """Rope that turns neighbours."""
    return {"interleaved": True, **dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), bool(hf.get("use_bias")))}


@family("MistralForCausalLM", "mistral", "Mistral 7B, Nemo, Small; Mistral Small 3's text part")
def mistral(hf: Hf) -> dict[str, Any]:
    """A window, in early ones."""
    return {"windows": _windows(hf, lambda i: SLIDING)}


@family("MinistralForCausalLM", "ministral", "Ministral 8B")
def ministral(hf: Hf) -> dict[str, Any]:
    """Windows in some layers or all, if given."""
    return {"qkv_bias": False, "windows": _windows(hf, lambda i: SLIDING)}


@family("Ministral3ForCausalLM", "ministral3", "Ministral 3 (text part)")
def ministral3(hf: Hf) -> dict[str, Any]:
    """A window if given, YaRN, queries that grow with their position."""
    rope = _rope(hf)
    beta, original = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
    growth = None
    if beta:
        growth = _number(rope, "llama_4_scaling_beta"), _whole(rope, "original_max_position_embeddings", original)
    return {"windows": _everywhere(hf), "query_growth": growth}


@family("Qwen2ForCausalLM", "qwen2", "Qwen2, Qwen2.5")
def qwen2(hf: Hf) -> dict[str, Any]:
    """Biases of queries, keys and values; windows in some layers, if asked for."""
    return {"qkv_bias": True, "windows": qwen_windows(hf)}


@family("Qwen3ForCausalLM", "qwen3", "Qwen3 dense")
def qwen3(hf: Hf) -> dict[str, Any]:
    """Norms of each query and key; windows in some layers, if asked for."""
    return {"o_bias": bool(hf.get("attention_bias")), "qk_norm": "head", "windows": qwen_windows(hf)}


@family("MixtralForCausalLM", "mixtral", "Mixtral 8x7B and 8x22B")
def mixtral(hf: Hf) -> dict[str, Any]:
    """As Mistral, with experts."""
    names = Names(
        router="block_sparse_moe.gate",
        experts="block_sparse_moe.experts",
        expert_gate_up=("w1", "w3"),
        expert_down="w2",
    )
    return {"windows": _everywhere(hf), "mixture": _mixture(hf, "intermediate_size"), "names": names}


@family("Qwen2MoeForCausalLM", "qwen2_moe", "Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B")
def qwen2_moe(hf: Hf) -> dict[str, Any]:
    """As Qwen2, with experts in all layers or some, and one beside them that all tokens take."""
    shared, normalised = _whole(hf, "shared_expert_intermediate_size"), bool(hf.get("norm_topk_prob"))
    mixture = _mixture(hf, "moe_intermediate_size", _sparse(hf), normalised=normalised, shared=shared)
    return {**qwen2(hf), "qkv_bias": bool(hf.get("qkv_bias", True)), "mixture": mixture}


@family("Qwen3MoeForCausalLM", "qwen3_moe", "Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder")
def qwen3_moe(hf: Hf) -> dict[str, Any]:
    """As Qwen3, with experts in all layers or some."""
    normalised = bool(hf.get("norm_topk_prob"))
    windows = _everywhere(hf) if hf.get("use_sliding_window") else (None,) * _layers(hf)
    mixture = _mixture(hf, "moe_intermediate_size", _sparse(hf), normalised=normalised)
    return {**qwen3(hf), "windows": windows, "mixture": mixture}


@family("OlmoeForCausalLM", "olmoe", "OLMoE 1B-7B")
def olmoe(hf: Hf) -> dict[str, Any]:
    """Experts; norms of all queries and of all keys in one."""
    if hf.get("clip_qkv") is not None:
        raise UnsupportedArchitecture("clip_qkv is not supported: queries, keys and values are not clipped here")
    mixture = _mixture(hf, "intermediate_size", normalised=bool(hf.get("norm_topk_prob")))
    return {"o_bias": bool(hf.get("attention_bias")), "qk_norm": "full", "mixture": mixture}


@family("GptOssForCausalLM", "gpt_oss", "gpt-oss-20b and -120b")
def gpt_oss(hf: Hf) -> dict[str, Any]:
    """Experts with biases and a clamped gate, in MXFP4; sinks of attention; windows in every other layer; biases."""
    return {
        "windows": _windows(hf, lambda i: FULL if i % 2 else SLIDING),
        "qkv_bias": bool(hf.get("attention_bias", True)),
        "o_bias": bool(hf.get("attention_bias", True)),
        "sinks": True,
        "activation": "clamped",
        "clamp": (_number(hf, "swiglu_alpha", 1.702), _number(hf, "swiglu_limit", 7.0)),
        "mixture": _mixture(hf, "intermediate_size", bias=True, interleaved=True),
        "names": Names(router="mlp.router", expert_gate_up=("gate_up_proj",), transposed=True),
    }


@family("Gemma2ForCausalLM", "gemma2", "Gemma 2")
def gemma2(hf: Hf) -> dict[str, Any]:
    """Norms before and after, of weight 1 + w; gated GELU; scaled embedding; windows in every other layer; soft-caps on
    attention scores and logits."""
    caps = {key: hf.get(f"{key}_logit_softcapping") for key in ("attn", "final")}
    return {
        "windows": _windows(hf, lambda i: FULL if i % 2 else SLIDING),
        "o_bias": bool(hf.get("attention_bias")),
        "activation": _activation(hf, "hidden_activation", "gelu_pytorch_tanh"),  # whatever `hidden_act` says
        "norm_offset": 1.0,
        "embedding_multiplier": _whole(hf, "hidden_size") ** 0.5,
        "attention_scale": _number(hf, "query_pre_attn_scalar", 256) ** -0.5,
        "attention_softcap": _number(hf, "attn_logit_softcapping") if caps["attn"] else None,
        "logit_softcap": _number(hf, "final_logit_softcapping") if caps["final"] else None,
        "names": SANDWICH,
    }


@family("Gemma3ForCausalLM", "gemma3_text", "Gemma 3 (text part)")
def gemma3(hf: Hf) -> dict[str, Any]:
    """Norms before and after, of weight 1 + w, and of each query and key; gated GELU; scaled embedding; windows in five
    of six layers, which have a rope of their own."""
    pattern = _whole(hf, "sliding_window_pattern", 6)
    return {
        **gemma2(hf),
        **_local_rope(hf, _number(hf, "rope_local_base_freq", 10000.0)),
        "windows": _windows(hf, lambda i: SLIDING if (i + 1) % pattern else FULL),
        "attention_softcap": None,  # whatever the config says: transformers keeps it and does not use it
        "qk_norm": "head",
    }


@family("Phi3ForCausalLM", "phi3", "Phi-3, Phi-3.5 mini, Phi-4, Phi-4-mini")
def phi3(hf: Hf) -> dict[str, Any]:
    """Fused weights in the checkpoint; a window in all layers, if given; LongRoPE, of part of a head."""
    return {
        "rope": _rope(hf, partial=True),
        "windows": _everywhere(hf),
        "names": Names(qkv=("qkv_proj",), gate_up=("gate_up_proj",)),
    }


@family("SmolLM3ForCausalLM", "smollm3", "SmolLM3")
def smollm3(hf: Hf) -> dict[str, Any]:
    """No rope in every fourth layer."""
    layers, every = _layers(hf), _whole(hf, "no_rope_layer_interval", 4)
    turned = hf.get("no_rope_layers")
    turned = [(i + 1) % every for i in range(layers)] if turned is None else turned
    if not isinstance(turned, list) or len(turned) != layers:
        raise CheckpointError(f"config.json: no_rope_layers should be {layers} numbers, 1 where there is rope")
    unrotated = tuple(i for i, does in enumerate(turned) if not does)
    slides = bool(hf.get("use_sliding_window"))
    return {
        "o_bias": bool(hf.get("attention_bias")),
        "unrotated": unrotated,
        "windows": _windows(hf, lambda i: SLIDING if slides and i in unrotated else FULL),  # layer_types stand above it
    }


@family("Olmo2ForCausalLM", "olmo2", "OLMo 2")
def olmo2(hf: Hf) -> dict[str, Any]:
    """Norms after attention and MLP only; norms of all queries and of all keys in one."""
    return {
        "o_bias": bool(hf.get("attention_bias")),
        "qk_norm": "full",
        "names": Names(
            before_attention=None,
            after_attention="post_attention_layernorm",
            before_mlp=None,
            after_mlp="post_feedforward_layernorm",
        ),
    }


@family("Olmo3ForCausalLM", "olmo3", "OLMo 3")
def olmo3(hf: Hf) -> dict[str, Any]:
    """As OLMo 2, with windows in three of four layers, whose rope is not stretched."""
    windows = _windows(hf, lambda i: SLIDING if (i + 1) % 4 else FULL)
    return {**olmo2(hf), **_local_rope(hf, _number(hf, "rope_theta", 500000.0)), "windows": windows}


@family("Exaone4ForCausalLM", "exaone4", "EXAONE 4.0, 1.2B and 32B")
def exaone4(hf: Hf) -> dict[str, Any]:
    """Norms after attention and MLP only, and of each query and key; in the 32B, windows in three of four layers and no
    rope in the others."""
    windows = _windows(hf, lambda i: SLIDING if (i + 1) % _whole(hf, "sliding_window_pattern", 4) else FULL)
    full = tuple(i for i, window in enumerate(windows) if window is None)
    biases = dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), False)
    turned = hf.get("sliding_window") is None
    return {**olmo2(hf), **biases, "qk_norm": "head", "windows": windows, "unrotated": () if turned else full}


@family("GraniteForCausalLM", "granite", "Granite 3 dense")
def granite(hf: Hf) -> dict[str, Any]:
    """Multipliers of embedding, branches, attention and logits."""
    return {
        "o_bias": bool(hf.get("attention_bias")),
        "embedding_multiplier": _number(hf, "embedding_multiplier", 1.0),
        "residual_multiplier": _number(hf, "residual_multiplier", 1.0),
        "attention_scale": _number(hf, "attention_multiplier", 1.0),
        "logit_scale": 1 / _number(hf, "logits_scaling", 1.0),
    }


@family("GraniteMoeForCausalLM", "granitemoe", "Granite 3 with experts (1B-A400M, 3B-A800M)")
def granite_moe(hf: Hf) -> dict[str, Any]:
    """As Granite 3, with experts that lie in one tensor."""
    names = Names(
        router="block_sparse_moe.router.layer",
        experts="block_sparse_moe",
        expert_gate_up=("input_linear",),
        expert_down="output_linear",
    )
    return {**granite(hf), "mixture": _mixture(hf, "intermediate_size"), "names": names}


@family("GraniteMoeHybridForCausalLM", "granitemoehybrid", "Granite 4 dense (micro, 350M, 1B)")
def granite4(hf: Hf) -> dict[str, Any]:
    """As Granite 3, with a fused gate and up in the checkpoint, and rope if asked for; no experts, no Mamba layers."""
    layers, kinds = _layers(hf), hf.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (FULL, "attention") for kind in kinds):
        raise UnsupportedArchitecture("GraniteMoeHybridForCausalLM with Mamba-2 layers is not supported; without is")
    if hf.get("num_local_experts", 8):
        raise UnsupportedArchitecture("GraniteMoeHybridForCausalLM with experts is not supported; without is")
    return {
        **granite(hf),
        "intermediate_size": _whole(hf, "shared_intermediate_size"),
        "mlp_bias": False,
        "unrotated": () if hf.get("position_embedding_type") == "rope" else tuple(range(layers)),
        "names": Names(mlp="shared_mlp", gate_up=("input_linear",), down="output_linear"),
    }


@family("GlmForCausalLM", "glm", "GLM-4 9B (-hf), GLM-Edge")
def glm(hf: Hf) -> dict[str, Any]:
    """Rope that turns neighbours, of half a head; biases of queries, keys and values."""
    return {"rope": _rope(hf, partial=True), "interleaved": True, "names": Names(gate_up=("gate_up_proj",))}


@family("Glm4ForCausalLM", "glm4", "GLM-4-0414, 9B and 32B")
def glm4(hf: Hf) -> dict[str, Any]:
    """As GLM, with norms before and after."""
    names = Names(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm", gate_up=("gate_up_proj",))
    return {**glm(hf), "names": names}


def text_part(hf: Hf) -> Hf:
    """The config of the language model within one of text and pictures; any other as it is."""
    name = _architecture(hf)
    if name not in OUTER:
        return hf
    if not isinstance(inner := hf.get("text_config"), Mapping):
        raise CheckpointError(f"config.json: {name} needs a text_config, an object: what the language model in it is")
    kind = str(inner.get("model_type", next(iter(OUTER[name]))))
    if kind not in OUTER[name]:
        raise UnsupportedArchitecture(
            f"{name} around a text part {brief(kind)} is not supported; supported: {', '.join(OUTER[name])}"
        )
    above = {key: hf[key] for key in ("quantization_config", "tie_word_embeddings", "eos_token_id") if key in hf}
    kept = {key: value for key, value in above.items() if key == "tie_word_embeddings" or inner.get(key) is None}
    return {
        **inner,
        **kept,
        "dtype": said_dtype(inner) or said_dtype(hf),
        "model_type": kind,
        "architectures": [OUTER[name][kind]],
    }


def said_dtype(hf: Hf) -> Any:
    """What a config says of the weights' dtype, under its name of today or of before; None if nothing."""
    return hf.get("dtype") or hf.get("torch_dtype")


def text_name(name: str) -> str | None:
    """A tensor's name in the text part alone; None if it is of the rest."""
    name = name.removeprefix("model.") if name.startswith(tuple(f"model.{x}" for x in PICTURES)) else name
    if name.startswith(PICTURES):
        return None
    name = name.replace("model.language_model.", "model.", 1) if name.startswith("model.language_model.") else name
    return name.removeprefix("language_model.")


def check(hf: Hf) -> Family:
    """The family of a config. Raises UnsupportedArchitecture for another one."""
    if (name := _architecture(hf)) == "?":
        given = brief(hf.get("architectures"))
        raise CheckpointError(f"config.json: architectures should be a list such as ['LlamaForCausalLM'], not {given}")
    if (found := FAMILIES.get(name)) is None:
        needs = f": it needs {UNSUPPORTED[name]}" if name in UNSUPPORTED else ""
        known = ", ".join(known.removesuffix("ForCausalLM") for known in FAMILIES)
        raise UnsupportedArchitecture(f"architecture {name[:200]} is not supported{needs}; supported: {known}")
    return found


def _architecture(hf: Hf) -> str:
    names = hf.get("architectures")
    return "".join(str(names[0]).split()) if isinstance(names, list) and names else "?"


def read(hf: Hf, eos: tuple[int, ...] = ()) -> ModelConfig:
    """Read a `config.json` as transformers >= 5 normalises it (`PretrainedConfig.to_dict()`).

    Raises UnsupportedArchitecture for another family and CheckpointError for a config that contradicts itself.
    """
    hf = text_part(hf)
    found = check(hf)
    if not (causal := hf.get("is_causal", True)) or hf.get("use_bidirectional_attention"):
        odd = "use_bidirectional_attention" if causal else "is_causal false"
        raise UnsupportedArchitecture(f"{odd} is not supported: tokens see what is before them")
    heads, layers = _whole(hf, "num_attention_heads"), _layers(hf)
    sizes = {key: _whole(hf, key) for key in ("vocab_size", "hidden_size", "intermediate_size")}
    kv_heads, dim = _whole(hf, "num_key_value_heads", heads), _whole(hf, "head_dim", sizes["hidden_size"] // heads)
    if heads % kv_heads:
        raise CheckpointError(f"config.json: {heads} query heads cannot share {kv_heads} key-value heads evenly")
    dtype = str(said_dtype(hf) or "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise CheckpointError(f"config.json: dtype {brief(dtype)} is not supported; supported: {', '.join(DTYPES)}")
    fields: dict[str, Any] = {
        "architecture": _architecture(hf),
        **sizes,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": dim,
        "max_positions": _whole(hf, "max_position_embeddings", 2048),
        "rms_norm_eps": _number(hf, "rms_norm_eps", 1e-6),
        "windows": (None,) * layers,
        "qkv_bias": bool(hf.get("attention_bias")),
        "mlp_bias": bool(hf.get("mlp_bias")),
        "attention_scale": dim**-0.5,
        "tied": bool(hf.get("tie_word_embeddings", False)),
        "dtype": dtype,
        "eos": tuple(token for token in eos if 0 <= token < sizes["vocab_size"]),  # -1 stands for none, too
    }
    fields |= found.read(hf)
    if "activation" not in fields:
        fields["activation"] = _activation(hf, "hidden_act", "silu")
    if "rope" not in fields:
        fields["rope"] = _rope(hf)
    for rope in (fields["rope"], fields.get("local_rope")):
        turned = int(dim * (rope or {}).get("partial_rotary_factor", 1.0))
        if not 2 <= turned <= dim or turned % 2 or dim % 2:
            raise CheckpointError(f"config.json: rope turns pairs of a head's {dim} dimensions, not {turned} of them")
        if turned == 2 and rope and rope["rope_type"] == "dynamic":
            raise CheckpointError("config.json: rope type 'dynamic' needs more than 2 dimensions of a head, not 2")
        for key in ("short_factor", "long_factor", "freq_factors"):
            _factors(rope or {}, key, turned // 2)
    config = ModelConfig(**fields)
    if config.context < 1:
        raise CheckpointError(
            f"config.json: rope's factor {config.rope['factor']} leaves no position; give one above 1"
        )
    return config


def _activation(hf: Hf, key: str, default: str) -> str:
    act = str(hf.get(key) or default)
    if act not in ACTIVATIONS:
        raise UnsupportedArchitecture(f"{key} {brief(act)} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[act]


def _listed(hf: Hf, key: str) -> list[Any]:
    if not isinstance(given := hf.get(key) or [], list):
        raise CheckpointError(f"config.json: {key} must be a list, not {brief(given)}")
    return given


def _whole(hf: Hf, key: str, default: int | None = None) -> int:
    value = default if hf.get(key) is None else hf[key]
    most = {"num_hidden_layers": 2**12, "head_dim": 2**16}.get(key, 2**31)  # of these, lists are made
    if (n := whole(value, 1, most)) is None:
        raise CheckpointError(f"config.json: {key} must be a whole number of 1 to {most}, not {brief(value)}")
    return n


def _number(hf: Hf, key: str, default: float | None = None) -> float:
    value = default if hf.get(key) is None else hf[key]
    if not (n := real(value, 0, 1e38)):
        raise CheckpointError(f"config.json: {key} must be a number above 0 and at most 1e38, not {brief(value)}")
    return float(n)


def _layers(hf: Hf) -> int:
    return _whole(hf, "num_hidden_layers")


def _sparse(hf: Hf) -> tuple[int, ...]:
    """The layers that have experts, as Qwen's configs say it."""
    dense, step = hf.get("mlp_only_layers") or [], _whole(hf, "decoder_sparse_step", 1)
    if not isinstance(dense, list) or any(whole(i, 0, _layers(hf) - 1) is None for i in dense):
        raise CheckpointError(f"config.json: mlp_only_layers should be a list of layers, not {brief(dense)}")
    return tuple(i for i in range(_layers(hf)) if i not in dense and (i + 1) % step == 0)


def _mixture(hf: Hf, width: str, layers: tuple[int, ...] | None = None, **more: Any) -> Mixture:
    """Of all layers, or these; `width`: what the config calls an expert's."""
    key = "num_local_experts" if hf.get("num_local_experts") is not None else "num_experts"
    count, chosen = _whole(hf, key), _whole(hf, "num_experts_per_tok")
    if chosen > count:
        raise CheckpointError(f"config.json: num_experts_per_tok {chosen} of {count} experts cannot be chosen")
    return Mixture(count, chosen, _whole(hf, width), tuple(range(_layers(hf))) if layers is None else layers, **more)


def _factors(rope: Hf, key: str, count: int) -> None:
    if (given := rope.get(key)) is None:
        return
    if not isinstance(given, list) or len(given) != count or any(not real(x, 0, 1e38) for x in given):
        raise CheckpointError(f"config.json: the rope's {key} should be {count} numbers above 0")


def _rope(hf: Hf, partial: bool = False) -> dict[str, Any]:
    """The rope of a config, or of its layers without windows if they differ; `partial`: it may turn part of a head."""
    rope: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        given = hf.get(key) or {}
        own = given.get(FULL, given) or {} if isinstance(given, Mapping) else given
        if not isinstance(own, Mapping):
            raise CheckpointError(f"config.json: {key} must be an object, not {brief(own)}")
        rope |= own
    rope = _checked_rope(rope, hf)
    if not partial and "partial_rotary_factor" in rope:
        raise UnsupportedArchitecture("partial_rotary_factor other than 1 is not supported in this architecture")
    return rope


def _local_rope(hf: Hf, theta: float) -> dict[str, Any]:
    """`rope` and `local_rope` where layers with windows have a rope of their own, unstretched, of base `theta`."""
    given = hf.get("rope_parameters")
    own = given.get(SLIDING) if isinstance(given, Mapping) else None
    local = _checked_rope(dict(own) if isinstance(own, Mapping) else {"rope_theta": theta}, {})
    rope = _rope({key: value for key, value in hf.items() if key != "original_max_position_embeddings"})  # each its own
    if "dynamic" in (local["rope_type"], rope["rope_type"]) or local["rope_type"] == "longrope":
        raise UnsupportedArchitecture(
            f"ropes of type {rope['rope_type']!r} and, in layers with windows, {local['rope_type']!r} are not supported"
        )
    return {"rope": rope, "local_rope": None if local == rope else local}


def _checked_rope(rope: dict[str, Any], hf: Hf) -> dict[str, Any]:
    rope = {key: value for key, value in rope.items() if value is not None}
    given = rope.pop("type", None)
    kind = str(rope.get("rope_type") or given or "default")
    rope["rope_type"] = kind = "longrope" if kind == "su" else kind
    rope["rope_theta"] = _number(rope, "rope_theta", _number(hf, "rope_theta", 10000.0))
    if hf.get("partial_rotary_factor") is not None:
        rope.setdefault("partial_rotary_factor", hf["partial_rotary_factor"])
    original = "original_max_position_embeddings"
    if kind == "dynamic":  # stretches max_position_embeddings, in transformers and vLLM, whatever stands here
        rope.pop(original, None)
    elif kind in ("llama3", "yarn", "longrope") and hf.get(original) is not None:
        rope[original] = hf[original]  # as transformers has it: the rope's own may be what it filled in
    if kind not in ROPE_TYPES:
        raise UnsupportedArchitecture(f"rope type {brief(kind)} is not supported; supported: {', '.join(ROPE_TYPES)}")
    for key in ROPE_NEEDS.get(kind, ("factor",)):
        if key not in rope:
            raise CheckpointError(f"config.json: rope type {kind!r} needs {key!r}")
        _number(rope, key)
    for key in ("mscale", "mscale_all_dim"):
        if rope.get(key) == 0:  # as good as none, in transformers
            del rope[key]
    for key in ROPE_NUMBERS:
        if rope.get(key) is not None:
            _number(rope, key)
    if rope.get(original) is not None and rope[original] < 2:
        raise CheckpointError(f"config.json: {original} must be at least 2, not {rope[original]}")
    if kind == "longrope":
        for key in ("short_factor", "long_factor"):
            if not isinstance(rope.get(key), list):
                raise CheckpointError(f"config.json: rope type 'longrope' needs {key!r}, a list of numbers")
        if "factor" not in rope:
            most = _whole(hf, "max_position_embeddings", 2048)
            rope["factor"] = most / _number(rope, "original_max_position_embeddings")
    if kind == "llama3" and not rope["low_freq_factor"] < rope["high_freq_factor"]:
        raise CheckpointError("config.json: rope's low_freq_factor must be below its high_freq_factor")
    if kind in ("yarn", "longrope") and rope["rope_theta"] <= 1:
        raise CheckpointError(f"config.json: rope type {kind!r} needs a rope_theta above 1, not {rope['rope_theta']}")
    if math.isclose(rope.get("partial_rotary_factor") or 1.0, 1.0):
        rope.pop("partial_rotary_factor", None)
    return rope


def _windows(hf: Hf, kind: Callable[[int], str]) -> tuple[int | None, ...]:
    """Per layer; `kind(layer)` where the config does not name the layers' kinds."""
    layers = _layers(hf)
    if not hf.get("sliding_window"):
        return (None,) * layers
    window, kinds = _whole(hf, "sliding_window"), _listed(hf, "layer_types") or [kind(i) for i in range(layers)]
    if len(kinds) != layers or any(k not in (FULL, SLIDING) for k in kinds):
        raise UnsupportedArchitecture(f"layer_types {brief(kinds)} for {layers} layers are not supported")
    return tuple(window if k == SLIDING else None for k in kinds)


def _everywhere(hf: Hf) -> tuple[int | None, ...]:
    """A window in all layers if it is given, whatever kind the config names: as transformers has it."""
    if not hf.get("sliding_window"):
        return (None,) * _layers(hf)
    if len(set(map(str, _listed(hf, "layer_types")))) > 1:  # its caches fail, too
        raise UnsupportedArchitecture(
            "layer_types of two kinds: this architecture has a window in all layers or in none"
        )
    return (_whole(hf, "sliding_window"),) * _layers(hf)


def qwen_windows(hf: Hf) -> tuple[int | None, ...]:
    """From max_window_layers on, if windows are used at all."""
    use, given = bool(hf.get("use_sliding_window")), hf.get("max_window_layers")
    if (first := whole(given or 0, 0)) is None:
        raise CheckpointError(f"config.json: max_window_layers must be a whole number, not {brief(given)}")
    return _windows(hf, lambda i: SLIDING if use and i >= first else FULL)
