"""GGUF, llama.cpp's container: one file, or several splits, of weights, tokenizer and chat template.

The header is read here and not by `gguf.GGUFReader`, which makes an array of every token of the vocabulary (seconds)
and trusts what it reads. Block types, their sizes and what they stand for are the `gguf` package's.
"""

from __future__ import annotations

import importlib
import math
import mmap
import re
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf import dequantize as expand
from torch import Tensor

from outrider import families, quantize
from outrider.config import ModelConfig, Names, whole
from outrider.errors import CheckpointError, UnsupportedArchitecture, brief, message_of, reason_of
from outrider.files import check_regular
from outrider.ops import Quantized

MAGIC, VERSIONS = b"GGUF", (2, 3)
SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # by type
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
LENGTH = struct.Struct("<Q")  # before each string
LONGEST = 2**30  # of a string, in bytes
LONGEST_NAME = 256  # of a tensor; llama.cpp takes 63 characters
DEEPEST = 8  # dimensions of a tensor, arrays in arrays

ARCHITECTURES = {
    "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM", "gemma3": "Gemma3ForCausalLM", "phi3": "Phi3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM", "olmo2": "Olmo2ForCausalLM", "granite": "GraniteForCausalLM",
    "glm4": "Glm4ForCausalLM", "qwen2moe": "Qwen2MoeForCausalLM", "qwen3moe": "Qwen3MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM", "granitemoe": "GraniteMoeForCausalLM", "gpt-oss": "GptOssForCausalLM",
    "mistral3": "Ministral3ForCausalLM", "exaone4": "Exaone4ForCausalLM", "ernie4_5": "Ernie4_5ForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
}  # fmt: skip
PAIRED = ("llama", "granite", "granitemoe", "smollm3", "mistral3")  # queries and keys as llama.cpp turns Llama's
PARTIAL = ("phi3", "glm4")  # whose rope may turn part of a head
WIDE = ("gemma2", "gemma3", "glm4")  # whose hidden states grow beyond what float16 holds
ENDS = {
    "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>",
    "<|eot_id|>", "<|eom_id|>", "<EOT>", "_<EOT>", "<end_of_utterance>", "<eos>",
}  # fmt: skip
"""Tokens that end a text wherever a vocabulary has them, as llama.cpp has it: files name one or two of theirs."""
OTHERS = {  # what a file may hold, by its `general.type`, that is no model
    "adapter": "an adapter for one; give the model's file, into which it was merged",
    "mmproj": "the part of one that reads pictures; give the file of the language model, which is read without it",
    "imatrix": "what llama-quantize weighs a model's inputs by; give the model's file",
}
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
INSIDE = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj", "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj", "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj", "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}  # fmt: skip
SANDWICH = {
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
OWN = {  # of one architecture
    "gemma2": SANDWICH, "gemma3": SANDWICH, "olmo2": SANDWICH, "exaone4": SANDWICH,
    "seed_oss": {"post_attention_norm": "post_attention_layernorm"},
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "glm4": {
        "ffn_up": "mlp.gate_up_proj", "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
    },
    "gpt-oss": {"post_attention_norm": "post_attention_layernorm", "attn_sinks": "self_attn.sinks"},
}  # fmt: skip
# Byte-level pre-tokenizers beside those in transformers' table, by the names of llama.cpp's src/llama-vocab.cpp: by
# GPT-2's rule, by that after digits stand alone, by the rule of another in that table, and by one of their own.
GPT2 = ("gpt-2", "gpt2", "olmo", "phi-2", "jais", "mpt", "exaone4", "roberta-bpe", "trillion", "granite-docling",
        "a.x-4.0", "mellum", "gigachat")  # fmt: skip
DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2")
LIKE: dict[Any, str] = {"glm4": "llama3", "chatglm-bpe": "llama3"}
SPLITS = {
    "seed-coder": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
}
BEGUN = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "tekken")  # with a token
WHOLE_WORDS = (*BEGUN, "glm4")  # words that are tokens come before merges
COMPOSED = ("qwen2", "deepseek-r1-qwen", "qwen35")  # NFC first
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # token types
SPACE = "\u2581"  # SentencePiece's
UNTRIMMED = ("<unk>", "<s>", "<|endoftext|>")  # tokens of Phi-3's that leave spaces behind them; no file says so


@dataclass(frozen=True)
class Stored:
    """A tensor as the file holds it: `blocks` (rows, bytes) uint8, of a type that `gguf` names, for `shape` numbers."""

    kind: str
    shape: tuple[int, ...]
    blocks: Tensor

    def dense(self) -> Tensor:
        """The numbers: as stored if they are floats, else float32."""
        if (plain := PLAIN.get(self.kind)) is not None:
            return self.blocks.view(plain).view(self.shape)
        try:
            return torch.from_numpy(expand(self.blocks.numpy(), GGMLQuantizationType[self.kind])).view(self.shape)
        except NotImplementedError:
            raise UnsupportedArchitecture(
                f"tensors of type {self.kind} cannot be expanded by the gguf package"
            ) from None

    def quantized(self) -> Quantized | None:
        """For the kernels, nothing rounded; None if they do not know such blocks."""
        return quantize.from_gguf(self.blocks, self.kind) if self.kind in quantize.GGUF else None

    def part(self, at: int) -> Stored:
        """One of the matrices, or vectors, that lie one behind the other."""
        inner = self.shape[1:]
        return Stored(self.kind, inner, self.blocks[at].view(inner[0], -1))

    def rows(self, at: Tensor) -> Tensor:
        """The numbers (n, inputs) of some rows of a matrix, by their indices (n,)."""
        return Stored(self.kind, (len(at), self.shape[1]), self.blocks[at]).dense()


class File:
    """An opened GGUF: `metadata` by key, and `stored(name)` by the names that Hugging Face gives the tensors.

    `path` is the file, or any of its splits. Raises CheckpointError for what is no GGUF, truncated or damaged, and
    UnsupportedArchitecture for a family or tensor type that cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, Stored] = {}
        for part in parts(path):
            check_regular(part)
            try:
                reader = _Reader(part)
                metadata, tensors = reader.read()
            except UnsupportedArchitecture as error:
                raise UnsupportedArchitecture(f"{part}: {error}") from None
            except OSError as error:
                raise CheckpointError(f"{part} cannot be read: {reason_of(error)}") from None
            except (ValueError, IndexError, OverflowError, struct.error) as error:
                raise CheckpointError(f"{part} is no GGUF file, truncated or damaged: {reason_of(error)}") from None
            own, first = (each.get("general.alignment", 32) for each in (metadata, self.metadata or metadata))
            if own != first:  # some writers tell the first file alone, and pad all by it
                raise CheckpointError(
                    f"{part}: its alignment is {own}, the first split's {first}; they must be the same"
                )
            self.metadata = metadata | self.metadata
            if twice := tensors.keys() & self.tensors.keys():
                raise CheckpointError(f"{part}: tensor {min(twice)} stands in another split, too")
            self.tensors |= tensors
        if (count := self.metadata.get("split.tensors.count", len(self.tensors))) != len(self.tensors):
            raise CheckpointError(f"{path}: {len(self.tensors)} tensors, not the {count} of all splits")
        if (kind := str(self.metadata.get("general.type"))) in OTHERS:
            raise UnsupportedArchitecture(f"{path} holds no model but {OTHERS[kind]}")
        if not self.tensors:
            raise CheckpointError(f"{path} holds no weights (a vocabulary alone, say); give the model's file")
        self.family = str(self.metadata.get("general.architecture", "?"))
        if self.family not in ARCHITECTURES:
            raise UnsupportedArchitecture(
                f"{path}: GGUF architecture {brief(self.family)} is not supported; "
                f"supported: {', '.join(ARCHITECTURES)}"
            )
        self.factors = self.tensors.pop("rope_freqs.weight", None)  # Llama 3's scaling, as divisors of frequencies
        self.long = [self.tensors.pop(f"rope_factors_{kind}.weight", None) for kind in ("short", "long")]  # LongRoPE's
        if self.family != "phi3":
            self._unfuse()
        for name, tensor in self.tensors.items():
            if name.endswith("ffn_gate_inp_shexp.weight") and len(tensor.shape) == 1:
                self.tensors[name] = Stored(tensor.kind, (1, *tensor.shape), tensor.blocks.view(1, -1))
        self.names = {hf: name for name in self.tensors if (hf := _hf_name(name, self.family)) is not None}

    def config(self) -> dict[str, Any]:
        """What would be its `config.json`. Raises CheckpointError and UnsupportedArchitecture."""
        heads, dim = self._number("attention.head_count"), self._number("embedding_length")
        size = self._number("attention.key_length", dim // heads)
        for key in ("attention.value_length", *["rope.dimension_count"] * (self.family not in PARTIAL)):
            if self._number(key, size) != size:
                raise UnsupportedArchitecture(f"{self.path}: {key} other than a head's {size} is not supported")
        embedding = self.tensors.get("token_embd.weight")
        vocab = embedding.shape[0] if embedding and embedding.shape else 0
        special = self.metadata
        layers, first = self._number("block_count"), f"blk.0.attn_{'qkv' if self.family == 'phi3' else 'q'}.weight"
        kind = self.tensors[first].kind if first in self.tensors else "BF16"
        half = "bfloat16" if self.family in WIDE else "float16"
        if (epsilon := self._get("attention.layer_norm_rms_epsilon")) is None:
            raise CheckpointError(f"{self.path}: {self.family}.attention.layer_norm_rms_epsilon is missing")
        ends = [special.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
        if odd := [end for end in ends if end is not None and type(end) is not int]:
            raise CheckpointError(f"{self.path}: tokens that end a text are numbers, not {brief(odd[0])}")
        texts = special.get("tokenizer.ggml.tokens")
        named = {text: i for i, text in enumerate(texts) if text in ENDS} if isinstance(texts, list) else {}
        if "<|return|>" in named and "<|call|>" in named:  # gpt-oss's, whose <|end|> is a message's alone
            named.pop("<|end|>", None)
        ends += named.values()
        return {
            "architectures": [self.architecture],
            "vocab_size": vocab,
            "hidden_size": dim,
            "intermediate_size": self._number("feed_forward_length"),
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": self._number("attention.head_count_kv", heads),
            "head_dim": size,
            "max_position_embeddings": self._number("context_length"),
            "rms_norm_eps": epsilon,
            "is_causal": self._get("attention.causal", True),
            "rope_parameters": self._rope(),
            "attention_bias": "blk.0.attn_q.bias" in self.tensors,
            "attention_out_bias": "blk.0.attn_output.bias" in self.tensors,
            "use_bias": "blk.0.attn_q.bias" in self.tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in self.tensors,
            "tie_word_embeddings": "output.weight" not in self.tensors,
            "dtype": {"F32": "float32", "F16": half}.get(kind, "bfloat16"),
            "eos_token_id": sorted({end for end in ends if end is not None}),
            **self._switches(dim // heads, size, layers),
        }

    def _unfuse(self) -> None:
        """Give queries, keys and values that the converter was told to put into one tensor each their own."""
        for name in [name for name in self.tensors if re.fullmatch(r"blk\.\d+\.attn_qkv\.(weight|bias)", name)]:
            found, heads = self.tensors.pop(name), self._number("attention.head_count")
            size = self._number("attention.key_length", self._number("embedding_length") // heads)
            kv = self._number("attention.head_count_kv", heads) * size
            rows = [heads * size, kv, kv]
            if len(found.blocks) != sum(rows):
                raise CheckpointError(f"{self.path}: {name} of shape {found.shape} should have {sum(rows)} rows")
            for part, blocks in zip("qkv", torch.split(found.blocks, rows), strict=True):
                own = Stored(found.kind, (len(blocks), *found.shape[1:]), blocks)
                self.tensors[name.replace("attn_qkv", f"attn_{part}")] = own

    @property
    def architecture(self) -> str:
        """What Hugging Face calls the family."""
        if self.family == "llama" and self._number("expert_count", 0, least=0):
            return "MixtralForCausalLM"
        if self.family == "olmo2" and self._get("attention.sliding_window"):
            return "Olmo3ForCausalLM"
        return ARCHITECTURES[self.family]

    def adapted(self, config: ModelConfig) -> ModelConfig:
        """A config for the tensors as they lie here: Gemma's norms with 1 added, experts under one set of names."""
        plain, mixture = Names(), config.mixture
        of_experts = {key: getattr(plain, key) for key in ("router", "experts", "expert_gate_up", "expert_down")}
        names = replace(config.names, **of_experts, transposed=False)
        mixture = None if mixture is None else replace(mixture, interleaved=False)
        return replace(config, names=names, mixture=mixture, norm_offset=0.0)

    def _switches(self, share: int, size: int, layers: int) -> dict[str, Any]:
        """Keys of a config.json that only some families have; `share`: of a head in the hidden size."""
        unsaid = (4096, 50.0, 30.0) if self.family == "gemma2" else (None, None, None)  # as files of its first days
        said: dict[str, Any] = {
            "sliding_window": self._get("attention.sliding_window", unsaid[0]),
            "attn_logit_softcapping": self._get("attn_logit_softcapping", unsaid[1]),
            "final_logit_softcapping": self._get("final_logit_softcapping", unsaid[2]),
            "embedding_multiplier": self._get("embedding_scale"),
            "residual_multiplier": self._get("residual_scale"),
            "attention_multiplier": self._get("attention.scale", size**-0.5 if "granite" in self.family else None),
            "logits_scaling": self._get("logit_scale"),
        }
        if self.family in ("gemma2", "gemma3"):  # the 27B models divide by another root; llama.cpp knows them so, too
            large = layers == {"gemma2": 46, "gemma3": 62}[self.family]
            said |= {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": share if large else size}
            said["rope_local_base_freq"] = self._get("rope.freq_base_swa")
        if self.family == "gpt-oss" and said["sliding_window"] is None:
            raise CheckpointError(f"{self.path}: gpt-oss.attention.sliding_window is missing")
        if (slides := self._get(key := "attention.sliding_window_pattern")) is not None:
            if not isinstance(slides, list):  # a period, of which the last has none; 0: all have
                period = self._number(key, least=0)
                slides = [not period or i % period < period - 1 for i in range(layers)]
            said["layer_types"] = [families.SLIDING if each else families.FULL for each in slides]
        if self.family == "phi3":  # transformers looks for it here, and has 4,096 where it is missing
            said["original_max_position_embeddings"] = self._get("rope.scaling.original_context_length")
        if self._number("expert_count", 0, least=0):
            width = self._number("expert_feed_forward_length", self._number("feed_forward_length"))
            if self._get("expert_gating_func") not in (None, 1, 4):  # softmax, before or behind the choice
                raise UnsupportedArchitecture(
                    f"{self.path}: experts that are not weighed by a softmax are not supported"
                )
            said |= {
                "num_local_experts": self._number("expert_count"),
                "num_experts_per_tok": self._number("expert_used_count"), "moe_intermediate_size": width,
                "norm_topk_prob": self.family == "qwen3moe",
                "shared_expert_intermediate_size": self._get("expert_shared_feed_forward_length"),
                **({} if self.family in ("qwen2moe", "qwen3moe") else {"intermediate_size": width}),
            }  # fmt: skip
        return {key: value for key, value in said.items() if value is not None}

    def _get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"{self.family}.{key}", default)

    def _number(self, key: str, default: int | None = None, least: int = 1) -> int:
        """A whole number, the same for all layers."""
        value = self._get(key)
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]
        number = whole(default if value is None else value, least)
        if number is None:
            raise CheckpointError(f"{self.path}: {self.family}.{key} should be one whole number, not {str(value)[:80]}")
        return number

    def _rope(self) -> dict[str, Any]:
        factor = self._get("rope.scaling.factor", self._get("rope.scale_linear"))  # the name that old files have
        stretched = factor and factor != 1 and self.factors is None and self.long == [None, None]
        kind = self._get("rope.scaling.type") or ("linear" if stretched else "default")
        if kind not in ("default", "none", "linear", "yarn"):
            known = "none, linear, yarn"
            raise UnsupportedArchitecture(f"{self.path}: rope type {kind!r} is not supported; supported: {known}")
        rope = {"rope_theta": self._get("rope.freq_base"), "rope_type": "default" if kind == "none" else kind}
        if kind in ("linear", "yarn"):
            given = {
                "original_context_length": "original_max_position_embeddings", "yarn_attn_factor": "attention_factor",
                "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow",
            }  # fmt: skip
            rope |= {"factor": factor} | {hf: self._get(f"rope.scaling.{key}") for key, hf in given.items()}
            for key in ("rope.scaling.attn_factor", "rope.scaling.yarn_ext_factor"):  # of which no checkpoint knows
                if (own := self._get(key, 1)) not in (1, -1):  # -1: unsaid, in llama.cpp
                    raise UnsupportedArchitecture(f"{self.path}: {key} is {own}; only 1 is supported")
        if self.family in PARTIAL:
            size = self._number(
                "attention.key_length", self._number("embedding_length") // self._number("attention.head_count")
            )
            rope["partial_rotary_factor"] = self._number("rope.dimension_count", size) / size
        if self.family == "gpt-oss":
            rope["truncate"] = False
        if self.family == "mistral3":
            rope["llama_4_scaling_beta"] = self._get("attention.temperature_scale")
            if all_dim := self._get("rope.scaling.yarn_log_multiplier"):
                rope |= {"mscale": 1.0, "mscale_all_dim": all_dim}
        short, long = self.long
        if (short is None) != (long is None):
            raise CheckpointError(f"{self.path}: of rope_factors_short and rope_factors_long only one is there")
        if short is not None and long is not None:
            rope |= {
                "rope_type": "longrope", "short_factor": short.dense().float().flatten().tolist(),
                "long_factor": long.dense().float().flatten().tolist(),
                "original_max_position_embeddings": self._get("rope.scaling.original_context_length"),
                "attention_factor": self._get("rope.scaling.attn_factor"),
            }  # fmt: skip
        if self.factors is not None:
            rope["freq_factors"] = self.factors.dense().float().flatten().tolist()
        rope = {key: value for key, value in rope.items() if value is not None}
        if self.architecture == "Olmo3ForCausalLM":  # whose layers with windows are not stretched
            theta = {"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}
            return {families.FULL: rope, families.SLIDING: {"rope_type": "default", **theta}}
        return rope

    def stored(self, name: str) -> Stored:
        """A tensor by its Hugging Face name, its rows in the order that Hugging Face has them."""
        found = self.tensors[self.names[name]]
        if self.family in PAIRED and (match := re.search(r"self_attn\.([qk])_proj\.", name)):
            heads = self._number("attention.head_count")
            heads = heads if match[1] == "q" else self._number("attention.head_count_kv", heads)
            return _unpaired(found, heads)
        return found

    def tokenizer(self) -> Any:
        """The file's tokenizer with its chat template; None if the file has none.

        Raises CheckpointError for one of a kind, or with a rule, that is not known: it is not guessed.
        """
        if self.metadata.get("tokenizer.ggml.model", "none") in ("none", "no_vocab"):  # as llama.cpp's converter says
            return None
        from transformers import PreTrainedTokenizerFast

        own = "tokenizer.ggml."
        given = {key.removeprefix(own): value for key, value in self.metadata.items() if key.startswith(own)}
        try:
            backend = self._backend(given)
            special = {
                f"{role}_token": token
                for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
                if (token := _special(given, key)) is not None
            }
            adds = {name: bool(said) for name in ("bos", "eos") if (said := given.get(f"add_{name}_token")) is not None}
            if given["model"] == "llama" or given.get("pre") in BEGUN:
                adds.setdefault("bos", True)  # as llama.cpp has it for files that do not say
            return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
                tokenizer_object=backend, chat_template=self._templates(), clean_up_tokenization_spaces=False,
                add_bos_token=adds.get("bos", False), add_eos_token=adds.get("eos", False), **special,
            )  # fmt: skip
        except CheckpointError:
            raise
        except Exception as error:  # whatever a damaged vocabulary makes the libraries raise
            raise CheckpointError(f"{self.path}: the tokenizer cannot be read: {message_of(error)}") from None

    def _templates(self) -> Any:
        """The chat template; of several, such as one for tools, each by its name, as transformers has them."""
        prefix = "tokenizer.chat_template"
        named = {key[len(prefix) + 1 :]: text for key, text in self.metadata.items() if key.startswith(f"{prefix}.")}
        default = self.metadata.get(prefix)
        return named | ({} if default is None else {"default": default}) if named else default

    def _backend(self, given: dict[str, Any]) -> Any:
        """The `tokenizers` tokenizer of the metadata."""
        pre = given.get("pre")
        if given["model"] == "llama":
            return _sentencepiece(given, self.family)
        if (kind := given["model"]) != "gpt2":
            raise CheckpointError(
                f"{self.path}: tokenizer {kind!r} is not known; put the model's tokenizer.json beside the file"
            )
        if pre in (*GPT2, *DIGITS):
            return _byte_level(given, pre, None)
        theirs = importlib.import_module("transformers.integrations.gguf.gguf_tokenizer_mapping")  # a second
        splits = SPLITS | theirs.GGUF_PRE_TOKENIZER_SPLITS
        if (split := splits.get(LIKE.get(pre, pre))) is None:
            raise CheckpointError(
                f"{self.path}: pre-tokenizer {pre!r} is not known; put the model's tokenizer.json beside the file"
            )
        return _byte_level(given, pre, split)


def _sentencepiece(given: dict[str, Any], family: str) -> Any:
    """SentencePiece's BPE (`given`: tokens, scores, token_type) as llama.cpp has it.

    Not by transformers' conversion, which puts no space before a text that begins with one, nor behind a special token,
    and adds tokens to vocabularies that have other special ones than Llama's.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens, gemma = given["tokens"], family.startswith("gemma")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if "merges" in given:
        merges = _merges(given, vocabulary)
    else:  # any two tokens that are one together, the best first: in Gemma by place, else by score
        # and place, runs of spaces last: converters that have no scores write one for all, and lose that these are low
        scored = zip(given["scores"], tokens, strict=True)
        ordered = sorted(scored, key=lambda each: (-each[0], not each[1].strip(SPACE)))
        best = tokens if gemma else [token for _, token in ordered]
        merges = [
            (token[:at], token[at:])
            for token in best
            for at in range(len(token) - 1, 0, -1)
            if token[:at] in vocabulary and token[at:] in vocabulary
        ]
    unknown = _special(given, "unknown")
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = given.get("add_space_prefix", True) and not gemma
    before, behind = ([normalizers.Prepend(SPACE)], [decoders.Strip(" ", 1, 0)]) if prefix else ([], [])
    backend.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", SPACE)])
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *behind]
    backend.decoder = decoders.Sequence(steps)
    return _with_added(backend, given, trims=family == "phi3")


def _byte_level(given: dict[str, Any], pre: str | None, split: str | None) -> Any:
    """Byte-level BPE (`given`: tokens, merges, token_type) that cuts text at `split` first, else by GPT-2's rule.

    Not by transformers' conversion, which adds a token to vocabularies without <|endoftext|>, does not know SmolLM's
    rule, and leaves out Qwen's normalisation and that Llama 3 takes whole words before merges.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocabulary = {token: i for i, token in enumerate(given["tokens"])}
    merges = _merges(given, vocabulary)
    backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre in WHOLE_WORDS))
    rules: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)]
    if split is not None:
        rules.insert(0, pre_tokenizers.Split(Regex(split), "isolated"))
    if pre in DIGITS:
        rules.insert(0, pre_tokenizers.Digits(individual_digits=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(rules)
    backend.decoder = decoders.ByteLevel()
    if pre in COMPOSED:
        backend.normalizer = normalizers.NFC()
    return _with_added(backend, given)


def _merges(given: dict[str, Any], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """The merges that a file lists. Raises ValueError for what is none, of which the library may panic."""
    merges = []
    for merge in given["merges"]:
        left, space, right = merge.partition(" ")
        if not space:
            raise ValueError(f"merge {brief(merge)} is not two tokens with a space between them")
        if unknown := [token for token in (left, right, left + right) if token not in vocabulary]:
            raise ValueError(f"merge {brief(merge)} is of tokens that there are not, such as {brief(unknown[0])}")
        merges.append((left, right))
    return merges


def _with_added(backend: Any, given: dict[str, Any], trims: bool = False) -> Any:
    """The tokenizer, with the tokens that are found in any text as such; `trims`: without spaces behind them."""
    from tokenizers import AddedToken

    kinds = given.get("token_type") or []
    for kind, special in ((UNKNOWN, True), (CONTROL, True), (USER_DEFINED, False)):
        own = [token for token, own_kind in zip(given["tokens"], kinds, strict=False) if own_kind == kind]
        backend.add_tokens([
            AddedToken(token, special=special, normalized=False, rstrip=trims and token not in UNTRIMMED)
            for token in own
        ])  # fmt: skip
    return backend


def _special(given: dict[str, Any], role: str) -> str | None:
    """A special token, if there is one: as llama.cpp has it, none is any number that is no token's, such as -1."""
    at, tokens = given.get(f"{role}_token_id"), given["tokens"]
    return tokens[at] if at is not None and 0 <= at < len(tokens) else None


def parts(path: Path) -> list[Path]:
    """All splits of a model, of which `path` is one. Raises CheckpointError if some are missing."""
    match = SPLIT.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match[3])
    found = [path.with_name(f"{match[1]}-{i:05}-of-{match[3]}.gguf") for i in range(1, count + 1)]
    if missing := [part.name for part in found if not part.is_file()]:
        raise CheckpointError(f"{path}: {len(missing)} of {count} splits are missing beside it, such as {missing[0]}")
    return found


def _hf_name(name: str, family: str = "llama") -> str | None:
    place, _, what = name.rpartition(".")
    if (match := re.fullmatch(r"blk\.(\d+)\.(\w+)", place)) and (
        found := OWN.get(family, {}).get(match[2]) or INSIDE.get(match[2])
    ):
        if match[2].endswith("_exps") and what == "bias":
            return f"model.layers.{match[1]}.{found}_bias"
        what = "" if found.endswith("sinks") and what == "weight" else f".{what}"
        return f"model.layers.{match[1]}.{found}{what}"
    return f"{OUTSIDE[place]}.{what}" if place in OUTSIDE else name


def _unpaired(found: Stored, heads: int) -> Stored:
    """llama.cpp turns neighbouring rows of a head together, Hugging Face those half a head apart: the latter."""
    rows = found.shape[0]
    if rows % (2 * heads):
        raise CheckpointError(f"{rows} rows of queries or keys are not divisible into {heads} heads")
    order = torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()
    blocks = found.blocks.view(rows, -1)[order]
    return Stored(found.kind, found.shape, blocks)


class _Reader:
    """A cursor over one file's header. Every length is checked against what is left of the file."""

    def __init__(self, path: Path) -> None:
        with open(path, "rb") as file:
            if file.read(4) != MAGIC:
                raise ValueError("it does not begin with GGUF")
            self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # private pages: PyTorch wants to write
        self.at = 4

    def read(self) -> tuple[dict[str, Any], dict[str, Stored]]:
        """Metadata, and the tensors as views of the file."""
        (version,) = self._take("I")
        if version not in VERSIONS:
            raise ValueError(f"version {version}; versions {VERSIONS} can be read, little-endian")
        tensors, keys = self._take("QQ")
        if (tensors + keys) * 12 > len(self.data):
            raise ValueError(f"{tensors} tensors and {keys} keys do not fit into it")
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            if (key := self._string()) in metadata:
                raise ValueError(f"the key {brief(key)} stands in it twice")
            metadata[key] = self._value(self._take("I")[0])
        infos = [self._info() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 2**20 or alignment & (alignment - 1):
            raise ValueError(f"alignment {alignment!r}")
        start = -(-self.at // alignment) * alignment
        whole = np.frombuffer(self.data, np.uint8)
        found: dict[str, Stored] = {}
        due = 0  # where a tensor begins: one behind the other
        for name, shape, kind, offset in infos:
            if name in found:
                raise ValueError(f"tensor {name} stands in it twice")
            if offset != due:
                raise ValueError(f"tensor {name} begins at byte {offset} of the weights, not at {due}")
            items, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
            count = math.prod(shape)
            if items > 1 and (len(shape) < 2 or name.endswith(".bias")):
                raise ValueError(f"tensor {name} is a vector of {kind} blocks; vectors are of floats")
            if count % items or (shape and shape[-1] % items):
                raise ValueError(f"tensor {name} of shape {shape} is no whole number of {kind} blocks")
            length = count // items * size
            due += -(-length // alignment) * alignment
            begin, end = start + offset, start + offset + length
            if end > len(whole):
                raise ValueError(f"tensor {name} ends at byte {end} of {len(whole)}")
            blocks = (
                torch.frombuffer(whole[begin:end].data, dtype=torch.uint8)
                if end > begin
                else torch.empty(0, dtype=torch.uint8)
            )
            found[name] = Stored(kind, shape, blocks.view(shape[0] if shape else 1, -1) if count else blocks)
        return metadata, found

    def _take(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{form}", self.data, self.at)
        self.at += struct.calcsize(f"<{form}")
        return values

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        found, data, at, size = list[str](), self.data, self.at, len(self.data)
        for _ in range(count):
            (length,) = LENGTH.unpack_from(data, at)
            at += LENGTH.size
            if length > min(LONGEST, size - at):
                raise ValueError(f"a string of {length} bytes at {at} goes beyond the file's end")
            found.append(data[at : at + length].decode("utf-8", errors="replace"))
            at += length
        self.at = at
        return found

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind in SCALARS:
            return self._take(SCALARS[kind])[0]
        if kind == STRING:
            return self._string()
        if kind != ARRAY or depth > DEEPEST:
            raise ValueError(f"a value of unknown type {kind} at {self.at}")
        inside, count = self._take("IQ")
        if count > len(self.data) - self.at:
            raise ValueError(f"an array of {count} values at {self.at} goes beyond the file's end")
        if inside in SCALARS:
            return list(self._take(f"{count}{SCALARS[inside]}"))
        if inside == STRING:
            return self._strings(count)
        return [self._value(inside, depth + 1) for _ in range(count)]

    def _info(self) -> tuple[str, tuple[int, ...], str, int]:
        name = self._string()
        if len(name) > LONGEST_NAME or not name.isprintable():
            raise ValueError(f"no tensor can be called {brief(name)}")
        (dims,) = self._take("I")
        if dims > DEEPEST:
            raise ValueError(f"tensor {name} of {dims} dimensions")
        shape = self._take(f"{dims}Q")[::-1]
        kind, offset = self._take("IQ")
        try:
            return name, shape, GGMLQuantizationType(kind).name, offset
        except ValueError:
            raise UnsupportedArchitecture(
                f"tensor {name} is of type {kind}, which the gguf package does not know"
            ) from None
