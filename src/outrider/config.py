"""What can be configured: the model's shape, one request's sampling, speculation, the engine."""

from __future__ import annotations

import math
import numbers
import secrets
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field, fields
from typing import Any

from outrider.errors import ConfigError, brief

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}  # as configs say
DTYPES = ("float32", "bfloat16", "float16")  # names only: this file needs no torch, for `--help` reads it
ACCEPTANCE_METHODS = {  # what decides which drafted tokens stay (verify.py), and what it promises
    "coupled": "plain decoding's very tokens, whatever the drafter",
    "rejection": "exact in law: distributed as plain decoding's tokens, which ones depends on the drafter",
    "block": "exact in law; never accepts less than rejection; trees fall back to it",
    "typical": "LOSSY: keeps what the target finds typical (Medusa), so the text is not the target's own",
}
# `quantization`: bits, inputs per group, whether a group has an offset beside its scale
SCHEMES = {"int8": (8, 128, False), "int4": (4, 32, True)}
# bits that a weight takes, its share of scale and offset included
STORED = {scheme: bits + 16 * (1 + offset) / group for scheme, (bits, group, offset) in SCHEMES.items()}
HEAD = "int8"  # the scheme of the head under either, as it decides between near-equal tokens
MOST_OUTPUTS, MOST_LOGPROBS, MOST_WORDS = 16384, 1024, 1024  # of one request: more would end in want of memory ...
MOST_LETTERS, MOST_PREDICTED = 1000, 2**20  # ... and of these
MOST_NODES = 256  # of a draft that can be accepted, and as many that only ride: beyond these no forward is cheap
MOST_DRAFTERS, DEEPEST = 32, 8  # in one speculative_config: in all, and one within another
FOREIGN = {  # keys and methods of vLLM and transformers that are not ours, and what is
    "disable_by_batch_size": "num_speculative_tokens='auto' measures at each step whether drafting pays",
    "speculative_disable_by_batch_size": "num_speculative_tokens='auto' measures at each step whether drafting pays",
    "tensor_parallel_size": "it is the target's: LLM(..., tensor_parallel_size=N); a draft model's is "
    "'draft_tensor_parallel_size'",
    "draft_sample_method": "drafts are sampled as the request is; acceptance_method chooses the rule",
    "rejection_sample_method": "acceptance_method chooses the rule: coupled, rejection, block or typical",
    "max_model_len": "it is the engine's: LLM(..., max_model_len=...); a draft model stops guessing at its own context",
    "quantization": "it is the target's: LLM(..., quantization=...); draft models stay as they are",
    "activations": "they are the target's: LLM(..., activations=...); draft models stay as they are",
    "revision": "give 'model' as a folder that holds that revision",
    "code_revision": "no checkpoint's code is run; leave it out",
    "draft_load_config": "a draft model loads as the target does; leave it out",
    "enforce_eager": "there are no graphs to switch off; leave it out",
    "disable_logprobs": "logprobs are a request's: SamplingParams(logprobs=...)",
    "disable_padded_drafter_batch": "nothing is padded here; leave it out",
    "parallel_drafting": "heads that guess in parallel are method 'medusa'",
    "speculative_token_tree": "a tree's shape is 'choices' of method 'medusa'",
    "speculative_model": "the key is 'model'",
    "num_lookahead_slots": "the key is 'num_speculative_tokens'",
    "ngram_prompt_lookup_max": "the key is 'prompt_lookup_max' of method 'ngram'",
    "ngram_prompt_lookup_min": "the key is 'prompt_lookup_min' of method 'ngram'",
    "prompt_lookup_num_tokens": "the key is 'num_speculative_tokens' of method 'ngram'",
    "max_matching_ngram_size": "the key is 'prompt_lookup_max' of method 'ngram'",
    "assistant_model": "the key is 'model' of method 'draft_model'",
    "num_assistant_tokens": "the key is 'num_speculative_tokens'",
    **dict.fromkeys(
        ("eagle", "mtp", "dflash", "mlp_speculator", "hydra"),
        "what reads the target's hidden states is 'medusa', 'recurrent' or 'eagle3'; a small model is a 'draft_model'",
    ),
    **dict.fromkeys(("[ngram]", "ngram_gpu"), "the method is 'ngram'"),
    "prompt_lookup": "the method is 'ngram'",
    "assisted_generation": "the method is 'draft_model'",
    "rejection_sampler": "the rule is 'rejection'",
    "typical_acceptance_sampler": "the rule is 'typical'",
}


def instead(name: object) -> str:
    """What to use in place of a foreign key, method or rule, as the end of a message; nothing if it is unknown."""
    name = "mtp" if isinstance(name, str) and name.endswith("_mtp") else name  # vLLM has one for each kind of model
    return f"; here {FOREIGN[name]}" if isinstance(name, str) and name in FOREIGN else ""


def whole(value: Any, low: float, high: float = 2**62) -> int | None:
    """The whole number that a value is, numpy's too, if it lies between the bounds; else None."""
    fits = type(value) is int or (isinstance(value, numbers.Integral) and not isinstance(value, bool))
    return number if fits and low <= (number := int(value)) <= high else None


def real(value: Any, low: float, high: float) -> float | None:
    """The number that a value is, numpy's too, if it lies between the bounds; else None."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        number = float(value)
    except OverflowError:  # of a whole number, or a fraction
        return None
    return (value if isinstance(value, (int, float)) else number) if low <= number <= high else None


def at_least(settings: Any, least: dict[str, int]) -> None:
    """Raises ConfigError if a field, or a number in a list that it holds, is less than it must be."""
    for name, low in least.items():
        value = getattr(settings, name)
        if value is not None and min(value if isinstance(value, list) else [value], default=low - 1) < low:
            raise ConfigError(f"{name} must be at least {low}, not {value}")


def promised(acceptance_method: str, measured: str) -> str:
    """What a result's `exactness` says: `bitwise` or `law` (as measured) if coupled, `law`, or `lossy`."""
    return {"coupled": measured, "typical": "lossy"}.get(acceptance_method, "law")


@dataclass(frozen=True)
class Rule:
    """By which rule a step verifies its drafts: one of ACCEPTANCE_METHODS; `typical` has an epsilon and an alpha."""

    method: str = "coupled"
    epsilon: float = 0.09
    alpha: float = 0.3

    @property
    def flips_coins(self) -> bool:
        """Whether it is a game of chance between target and drafter: drafts must then be drawn by noise of their own.

        A drafter that draws says from which distribution (`Draft.q`), and one that ranks leaves Law 1's noise out.
        """
        return self.method in ("rejection", "block")


@dataclass(frozen=True)
class Names:
    """What a checkpoint calls the tensors of a layer, below `model.layers.N.`; a norm that is None is not there.

    Parts of qkv are the products of queries, keys and values, each its own or all in one; of gate_up, gate and up.
    """

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    mlp: str = "mlp"  # below which are
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    router: str = "mlp.gate"
    experts: str = "mlp.experts"  # below which each has its number, or the tensors of all lie in one
    expert_gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    expert_down: str = "down_proj"
    transposed: bool = False  # whether the experts that lie in one tensor are (in, out) each


@dataclass(frozen=True)
class Mixture:
    """The experts of some layers, of which each token takes `chosen`."""

    count: int
    chosen: int
    width: int  # their intermediate size
    layers: tuple[int, ...]  # that have them
    normalised: bool = True  # whether the weights of the chosen ones are a softmax over these, or over all
    shared: int = 0  # intermediate size of an expert that all tokens take
    bias: bool = False  # of router and experts
    interleaved: bool = False  # whether gate and up rows take turns


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder, as its family's function in families.py reads it. All sizes are in elements."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float
    rope: Mapping[str, Any]  # rope_type, rope_theta and the parameters of that type
    windows: tuple[int | None, ...]  # per layer: how many keys a query sees, itself included; None = all
    tied: bool
    dtype: str  # of the checkpoint, one of DTYPES
    eos: tuple[int, ...]
    attention_scale: float  # of a query's product with a key
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: str | None = None  # of queries and keys: "head", each by itself, or "full", all heads in one
    norm_offset: float = 0.0  # added to the weight of every norm
    activation: str = "silu"  # of the gate, one of ACTIVATIONS' values, or clamped (ops' `gated`)
    clamp: tuple[float, float] | None = None  # alpha and limit of the clamped one
    mixture: Mixture | None = None
    sinks: bool = False  # whether each head has a score of a key without a value, which all tokens see
    attention_softcap: float | None = None  # c: scores become c * tanh(score / c)
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0  # of what attention and MLP add
    logit_scale: float = 1.0
    logit_softcap: float | None = None  # c: logits become c * tanh(logits / c)
    local_rope: Mapping[str, Any] | None = None  # of the layers with windows, if it is another one
    unrotated: tuple[int, ...] = ()  # layers without rope
    interleaved: bool = False  # whether rope turns neighbours, and not dimensions half a head apart
    query_growth: tuple[float, int] | None = None  # (b, n): queries at p are multiplied by 1 + b * ln(1 + p // n)
    names: Names = Names()

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return 4 if self.dtype == "float32" else 2

    @property
    def context(self) -> int:
        """Longest sequence, in tokens, that the positions serve. As in vLLM, a rope factor stretches them."""
        kind, factor = self.rope["rope_type"], float(self.rope.get("factor") or 1.0)
        if kind == "yarn":  # may be written into max_position_embeddings already, or not
            return max(self.max_positions, int(self.rope.get("original_max_position_embeddings", 0) * factor))
        stretched = kind in ("linear", "dynamic") and self.local_rope is None  # Gemma 3's factor is written in
        return int(self.max_positions * factor) if stretched else self.max_positions

    @property
    def border(self) -> int | None:
        """The length, in tokens, beyond which all of a sequence is rotated otherwise (LongRoPE), if there is one."""
        return int(self.rope["original_max_position_embeddings"]) if self.rope["rope_type"] == "longrope" else None


def drawn_seed() -> int:
    """A seed for who gives none, of 53 bits: answers tell it, and not all readers of JSON keep more."""
    return secrets.randbits(53)


LogitsProcessor = Callable[[list[int], Any], Any]
"""`processor(token_ids, logits) -> logits`: the whole prefix (prompt and output) and the (vocab,) float32 logits of the
next token, as a tensor. It must depend on its arguments alone: it is also asked about prefixes that a draft only
supposes."""


STRUCTURES = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass(frozen=True)
class StructuredOutputsParams:
    """What an output must be, from its first token to its last: exactly one of the first six. Names follow vLLM.

    The whitespace options are for JSON. Raises ConfigError for values that cannot be; whether a schema or grammar can
    be used is found when a request is made.
    """

    json: str | Mapping[str, Any] | None = None  # JSON that satisfies this schema, given as an object or as text
    regex: str | None = None  # in Rust's syntax: Python's without look-around and back references
    choice: list[str] | None = None  # one of these
    grammar: str | None = None  # in Lark's syntax as llguidance has it, or llama.cpp's GBNF
    json_object: bool | None = None  # any JSON object
    structural_tag: str | Mapping[str, Any] | None = None  # formats within formats; docs/structured.md
    disable_any_whitespace: bool = False  # JSON on one line, without a space between its parts: all the more is forced
    disable_additional_properties: bool = False  # where the schema names properties, no others
    whitespace_pattern: str | None = None  # a regex for the space between JSON's parts; None: up to 32 characters
    after: str | list[str] | None = None  # ours: marks of the free text that comes before all this; see `marks`

    def __post_init__(self) -> None:
        if len(self.asked) != 1:
            given = f", not {' and '.join(self.asked)}" if self.asked else ""
            raise ConfigError(f"structured_outputs take exactly one of {', '.join(STRUCTURES)}{given}")
        ((name, value),) = self.asked.items()
        if name == "choice":
            words = list(value) if isinstance(value, (list, tuple)) else []
            if not words or not all(isinstance(word, str) for word in words):
                raise ConfigError(f"structured_outputs: choice is a list of texts, at least one, not {brief(value)}")
            object.__setattr__(self, "choice", words)
        elif name == "json_object":
            if value is not True:
                raise ConfigError(f"structured_outputs: json_object must be True or left out, not {brief(value)}")
        elif name in ("regex", "grammar") and not isinstance(value, str):
            raise ConfigError(f"structured_outputs: {name} must be text, not {brief(value)}")
        elif name in ("json", "structural_tag") and not isinstance(value, (str, Mapping)):
            raise ConfigError(f"structured_outputs: {name} must be an object or its text, not {brief(value)}")
        if isinstance(value, str) and not value:
            raise ConfigError(f"structured_outputs: {name} is empty")
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"structured_outputs: {name} must be True or False, not {brief(getattr(self, name))}")
        if not (self.whitespace_pattern is None or isinstance(self.whitespace_pattern, str)):
            raise ConfigError(
                f"structured_outputs: whitespace_pattern must be text, not {brief(self.whitespace_pattern)}"
            )
        texts = [self.after] if isinstance(self.after, str) else self.after
        if texts is not None and not (
            isinstance(texts, (list, tuple)) and len(texts) <= 3 and all(isinstance(x, str) for x in texts)
            and all(1 <= len(x) <= 1000 for x in texts)
        ):  # fmt: skip
            what = "a text of 1 to 1000 characters, or a list of up to three"
            raise ConfigError(f"structured_outputs: after is {what}, not {brief(self.after)}")
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise ConfigError("structured_outputs: give disable_any_whitespace or whitespace_pattern, not both")

    @property
    def marks(self) -> tuple[str, str, str]:
        """Of `after`: where free text begins, where it ends, and what follows before the constraint begins.

        One text is where it ends, and it must. Of two or three, the first begins it, if it comes at all. Without any
        there is no such text.
        """
        texts = [self.after] if isinstance(self.after, str) else list(self.after or ())
        begin, end, lead = [*([""] if len(texts) == 1 else []), *texts, "", "", ""][:3]
        return begin, end, lead

    @property
    def asked(self) -> dict[str, Any]:
        """What was given of the six."""
        return {name: value for name in STRUCTURES if (value := getattr(self, name)) is not None}


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it stops. Names and defaults follow vLLM, `max_tokens` excepted.

    Raises ConfigError, naming the parameter, for values that cannot be.
    """

    n: int = 1  # outputs for the prompt; output i uses seed + i
    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 or -1 = all tokens
    top_p: float = 1.0
    min_p: float = 0.0  # relative to the likeliest token
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over the output
    frequency_penalty: float = 0.0  # over the output
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None  # None = random, reported with the output
    max_tokens: int = 256  # counts as asked for, given or not: RequestTooLong if the context has no room for it
    min_tokens: int = 0  # no end-of-sequence or stop token before this many
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None  # this many likeliest tokens beside the chosen one, from the raw logits
    prompt_logprobs: int | None = None  # likewise of the prompt's tokens, all of which are then read
    bad_words: list[str] | None = None  # never completed, as tokenised at a text's beginning and behind a space
    allowed_token_ids: list[int] | None = None  # no others are chosen
    logits_processors: list[LogitsProcessor] | None = None
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None  # or a mapping of its fields
    prediction: str | None = None  # what the output may resemble: it is drafted from, and changes no token

    def __post_init__(self) -> None:
        def check(name: str, value: float | None, what: str) -> None:
            if value is None:
                raise ConfigError(f"{name} must be {what}, not {brief(getattr(self, name))}")
            object.__setattr__(self, name, value)

        def count(name: str, low: int, high: int, what: str) -> None:
            check(name, whole(getattr(self, name), low, high), what)

        def number(name: str, low: float, high: float, what: str) -> None:
            check(name, real(getattr(self, name), low, high), what)

        count("n", 1, MOST_OUTPUTS, f"a whole number of at least 1 and at most {MOST_OUTPUTS}")
        count("max_tokens", 1, 2**62, "a whole number of at least 1 and at most 2**62")
        count("min_tokens", 0, 2**62, "a whole number of at least 0 and at most 2**62")
        count("top_k", -1, 2**62, "a whole number: 0 or -1 for all tokens, else how many to keep")
        number("temperature", 0, 1e6, "between 0 (greedy) and 1000000")
        number("top_p", 0, 1, "above 0 and at most 1")
        number("min_p", 0, 1, "between 0 and 1")
        number("presence_penalty", -2, 2, "between -2 and 2")
        number("frequency_penalty", -2, 2, "between -2 and 2")
        number("repetition_penalty", 0, 1e6, "above 0 (1 = none) and at most 1000000")
        if self.top_p == 0:
            raise ConfigError("top_p must be above 0 and at most 1, not 0; for greedy decoding set temperature=0")
        if self.repetition_penalty == 0:
            raise ConfigError("repetition_penalty must be above 0 (1 = none) and at most 1000000, not 0")
        if self.min_tokens > self.max_tokens:
            raise ConfigError(f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})")
        if self.seed is not None:
            count("seed", -(2**63), 2**64 - 1, "a 64-bit whole number or None")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                count(name, 0, MOST_LOGPROBS, f"a whole number of at least 0 and at most {MOST_LOGPROBS}, or None")
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, not {brief(getattr(self, name))}")
        for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids", "logits_processors"):
            value = getattr(self, name)
            if not (value is None or isinstance(value, (list, tuple)) or (name == "stop" and isinstance(value, str))):
                raise ConfigError(f"{name} must be a list, not {brief(value)}")
        if any(not isinstance(s, str) or not s or not is_unicode(s) for s in self.stops):
            raise ConfigError("stop must be a non-empty string of Unicode or a list of them")
        if any(not isinstance(word, str) or not word.strip() or not is_unicode(word) for word in self.bad_words or ()):
            raise ConfigError(f"bad_words must be words, not {brief(self.bad_words)}")
        if len(self.bad_words or ()) > MOST_WORDS:
            raise ConfigError(f"bad_words must be at most {MOST_WORDS}, not {len(self.bad_words or ())}")
        if (longest := max(map(len, self.bad_words or ()), default=0)) > MOST_LETTERS:
            raise ConfigError(f"bad_words has one of {longest} characters; at most {MOST_LETTERS}")
        if (text := self.prediction) is not None:
            if not isinstance(text, str) or not is_unicode(text):
                raise ConfigError(f"prediction must be a text or None, not {brief(text)}")
            if len(text) > MOST_PREDICTED:
                raise ConfigError(f"prediction has {len(text)} characters; at most {MOST_PREDICTED}")
        for name in ("stop_token_ids", "allowed_token_ids"):
            if (given := getattr(self, name)) is not None:
                ids = [whole(token, 0) for token in given]
                if None in ids:
                    raise ConfigError(f"{name} must be token ids, not {brief(given)}")
                object.__setattr__(self, name, ids)
        if self.allowed_token_ids == []:
            raise ConfigError("allowed_token_ids allow no token; name at least one, or leave them out")
        if isinstance(asked := self.structured_outputs, Mapping):
            if unknown := [key for key in asked if key not in {f.name for f in fields(StructuredOutputsParams)}]:
                valid = ", ".join(f.name for f in fields(StructuredOutputsParams))
                raise ConfigError(f"structured_outputs: unknown key {brief(unknown[0])}; valid: {valid}")
            object.__setattr__(self, "structured_outputs", StructuredOutputsParams(**asked))
        elif not (asked is None or isinstance(asked, StructuredOutputsParams)):
            raise ConfigError(f"structured_outputs must be StructuredOutputsParams or None, not {brief(asked)}")
        if any(not callable(processor) for processor in self.logits_processors or ()):
            raise ConfigError("logits_processors must be functions of (token_ids, logits)")
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise ConfigError(f"logit_bias maps token ids to numbers, not {brief(self.logit_bias)}")
            biases = dict[int, float]()
            for token, bias in self.logit_bias.items():
                index, by = whole(token, 0), real(bias, -math.inf, math.inf)
                if index is None or by is None:
                    raise ConfigError(f"logit_bias maps token ids to numbers, not {brief(token)} to {brief(bias)}")
                biases[index] = float(by)  # no tensor takes a whole number of more than 64 bits
            object.__setattr__(self, "logit_bias", biases)

    def having(self, **changes: Any) -> SamplingParams:
        """A copy with what is known to fit. Not checked once more: that takes long where each token has a bias."""
        params = copy(self)
        vars(params).update(changes)
        return params

    @property
    def stops(self) -> list[str]:
        """Stop strings as a list."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def edits(self) -> bool:
        """Whether it changes the model's logits; a grammar and bad words are a sequence's."""
        edits = self.logits_processors or self.logit_bias or self.min_tokens or self.allowed_token_ids
        return bool(edits or self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1

    @property
    def greedy(self) -> bool:
        """Whether it asks for the likeliest token of unchanged logits."""
        return self.temperature == 0 and not self.edits


def is_unicode(text: str) -> bool:
    """Whether it can be written: without halves of characters, which JSON and command lines can say."""
    return not any("\ud800" <= c <= "\udfff" for c in text)


def option(default: Any, help: str) -> Any:
    """A drafter's field with what it means, for `outrider info`."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class SpeculativeConfig:
    """Which drafter, its draft length, and its options: `{"method": "ngram", "num_speculative_tokens": 8, ...}`.

    `options` holds the keys that the method itself defines; `drafters.create` refuses those it does not know.
    `acceptance_method` is one of ACCEPTANCE_METHODS: `coupled` gives plain decoding's tokens; `rejection` and `block`
    give tokens of the same distribution, and the same ones again for the same seed and drafts; `typical` is LOSSY. At
    temperature 0 all of them give the greedy tokens. The two `posterior` keys (Medusa's and vLLM's names) are epsilon
    and alpha of `typical`, and of no other rule. Raises ConfigError, as `of` and `parse` do, for what cannot be.
    """

    method: str = "none"
    num_speculative_tokens: int | str | None = None  # None = the method's own default; "auto" = chosen at each step
    acceptance_method: str = "coupled"  # or rejection, block, typical (lossy)
    posterior_threshold: float | None = None  # a token this likely is typical; None = 0.09
    posterior_alpha: float | None = None  # ... and one above alpha * exp(-entropy); None = 0.3
    draft_tensor_parallel_size: int | None = None  # ranks that share a draft model; None = the one that decides, alone
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        k = self.num_speculative_tokens
        if k is not None and k != "auto":
            if (n := whole(k, 0)) is None:
                raise ConfigError(
                    f"num_speculative_tokens must be 'auto' or a whole number of at least 0, not {brief(k)}"
                )
            object.__setattr__(self, "num_speculative_tokens", n)
        if self.draft_tensor_parallel_size is not None and whole(self.draft_tensor_parallel_size, 1) is None:
            size = brief(self.draft_tensor_parallel_size)
            raise ConfigError(f"draft_tensor_parallel_size must be a whole number of at least 1, not {size}")
        if not isinstance(rule := self.acceptance_method, str) or rule not in ACCEPTANCE_METHODS:
            valid = ", ".join(ACCEPTANCE_METHODS)
            raise ConfigError(f"acceptance_method {brief(rule)} is unknown; valid: {valid}{instead(rule)}")
        for name in ("posterior_threshold", "posterior_alpha"):
            if (value := getattr(self, name)) is None:
                continue
            if self.acceptance_method != "typical":
                raise ConfigError(f"{name} belongs to acceptance_method 'typical', not to {self.acceptance_method!r}")
            if not real(value, 0, 1):
                raise ConfigError(f"{name} must be above 0 and at most 1, not {brief(value)}")

    @property
    def rule(self) -> Rule:
        """What verifies the drafts."""
        return Rule(
            self.acceptance_method, self.posterior_threshold or Rule.epsilon, self.posterior_alpha or Rule.alpha
        )

    @staticmethod
    def of(config: SpeculativeConfig | Mapping[str, Any] | str | None) -> SpeculativeConfig:
        """From a vLLM-style mapping, or "auto". `{"model": ...}` without a method means `draft_model`."""
        if config is None:
            return SpeculativeConfig()
        if isinstance(config, str) and config == "auto":
            return SpeculativeConfig("auto")
        if isinstance(config, SpeculativeConfig):
            return config
        if not isinstance(config, Mapping):
            raise ConfigError(
                f"speculative_config must be a mapping such as {{'method': 'ngram'}}, or 'auto', not {brief(config)}"
            )
        options = dict(config)
        method = options.pop("method", "draft_model" if "model" in options else None)
        if method is None:
            raise ConfigError("speculative_config needs a 'method', such as {'method': 'ngram'}")
        if method == "none" and (k := options.get("num_speculative_tokens")):
            raise ConfigError(f"method none drafts nothing; leave out num_speculative_tokens={brief(k)}")
        own = {f.name for f in fields(SpeculativeConfig)} - {"method", "options"}
        return SpeculativeConfig(
            method=method, **{key: options.pop(key) for key in own & options.keys()}, options=options
        )

    @staticmethod
    def parse(text: str) -> SpeculativeConfig:
        """From the short form `method:key=value,key=value`; `k` stands for num_speculative_tokens."""
        method, _, rest = text.partition(":")
        options: dict[str, Any] = {"method": method}
        for item in rest.split(",") if rest else ():
            key, equals, value = item.partition("=")
            key = "num_speculative_tokens" if key == "k" else key
            if not equals:
                raise ConfigError(f"{brief(text)}: {brief(item)} should be key=value, as in ngram:k=8")
            if key in options:
                raise ConfigError(f"{brief(text)}: {key} is given twice; give it once")
            options[key] = _literal(value)
        return SpeculativeConfig.of(options)


def _literal(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return {"true": True, "false": False, "none": None}.get(text.lower(), text)


@dataclass(frozen=True)
class EngineConfig:
    """Limits of one engine. Raises ConfigError for one that cannot be."""

    max_model_len: int | None = None  # tokens of prompt and output together; None = the model's context
    max_num_seqs: int = 32  # sequences that share a forward
    max_num_batched_tokens: int = 512  # in one forward: of prompts, of drafts, and one of each running sequence
    max_prefill_delay: float = 0.05  # seconds by which reading prompts may lengthen a step of running ones
    kv_memory: int | None = None  # bytes for keys and values; None = 90 % of what is free at the start
    enable_prefix_caching: bool = True  # keep what ended requests have read, as long as there is room, for others
    kv_offload: bool = False  # keys and values live in host memory; 4,096 tokens or more share a forward, as all stream
    on_chip_layers: int = 0  # ... but for those of so many layers

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if value is None and item.default is None:
                continue
            if isinstance(item.default, bool):
                if not isinstance(value, bool):
                    raise ConfigError(f"{item.name} must be True or False, not {brief(value)}")
                continue
            if item.name == "max_prefill_delay":
                if real(value, 0, 1e6) is None:
                    raise ConfigError(f"max_prefill_delay must be a number of seconds, at least 0, not {brief(value)}")
                continue
            least, most = int(item.name != "on_chip_layers"), 2**16 if item.name == "max_num_batched_tokens" else 2**62
            if (n := whole(value, least, most)) is None:
                bounds = f"at least {least}" + (f" and at most {most}" if most < 2**62 else "")
                raise ConfigError(f"{item.name} must be a whole number of {bounds}, not {brief(value)}")
            object.__setattr__(self, item.name, n)
        if self.on_chip_layers and not self.kv_offload:
            raise ConfigError("on_chip_layers needs kv_offload: without it all layers are on the device")
