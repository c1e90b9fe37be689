"""What can be configured: how far positions reach, bounds, numbers of numpy, keys of other engines."""

from __future__ import annotations

import math
from pathlib import Path

import numpy
import pytest

from outrider import SamplingParams, drafters, families
from outrider.config import FOREIGN, MOST_LOGPROBS, EngineConfig, SpeculativeConfig
from outrider.errors import CheckpointError, ConfigError

SHAPE = {
    "architectures": ["Qwen2ForCausalLM"],
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "max_position_embeddings": 32768,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("rope", "positions", "context"),
    [
        ({}, 32768, 32768),
        (YARN, 32768, 131072),  # Qwen's recipe: the stretch is not in max_position_embeddings
        (YARN, 131072, 131072),  # here it is
        ({"rope_type": "linear", "factor": 2.0}, 4096, 8192),
        ({"type": "dynamic", "factor": 2.0}, 4096, 8192),
    ],
)
def test_context(rope, positions, context):
    config = families.read({**SHAPE, "max_position_embeddings": positions, "rope_scaling": rope})
    assert config.context == context


def test_the_original_context_beside_the_rope_goes_first():
    """As in transformers, which fills the rope's own with max_position_embeddings as it reads a config."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    for rope in (YARN, {"rope_type": "longrope", "original_max_position_embeddings": 32768, **factors}):
        config = families.read({**SHAPE, "rope_parameters": rope, "original_max_position_embeddings": 4096})
        assert config.rope["original_max_position_embeddings"] == 4096


@pytest.mark.parametrize("change", [
    {"rope_scaling": {**YARN, "factor": math.inf}}, {"rope_scaling": {**YARN, "factor": math.nan}},
    {"rope_scaling": {**YARN, "beta_fast": math.inf}}, {"rope_scaling": {**YARN, "beta_slow": "x"}},
    {"rope_scaling": {**YARN, "attention_factor": math.inf}}, {"rope_scaling": {**YARN, "mscale": [1]}},
    {"rope_scaling": {**YARN, "factor": 1e300}},
    {"rope_scaling": {**YARN, "original_max_position_embeddings": math.inf}},
    {"rope_scaling": {**YARN, "rope_theta": 1.0}}, {"rope_theta": math.inf}, {"rope_theta": 10**400},
    {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "head_dim": 2},
    {"rope_scaling": {"type": "dynamic", "factor": math.inf}}, {"rope_scaling": {"type": "linear", "factor": -1}},
    {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4,
                      "original_max_position_embeddings": 8192}},
    {"rope_scaling": {**YARN, "original_max_position_embeddings": 0.5}},
    {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 8, "factor": 4.0,
                      "original_max_position_embeddings": 1}},
    {"rms_norm_eps": math.inf}, {"num_hidden_layers": 10**9}, {"vocab_size": 10**30}, {"hidden_size": math.inf},
])  # fmt: skip
def test_numbers_of_a_checkpoint_are_bounded(change):
    with pytest.raises(CheckpointError, match=r"config\.json: .*(number|below|above|at least|more than)"):
        families.read({**SHAPE, **change})


def test_numpy_numbers():
    params = SamplingParams(
        n=numpy.int32(2), max_tokens=numpy.int64(5), min_tokens=numpy.uint8(1), top_k=numpy.int16(4),
        temperature=numpy.float32(0.5), top_p=numpy.float64(0.9), seed=numpy.uint64(2**63), logprobs=numpy.int64(0),
        stop_token_ids=list(numpy.array([3, 4])), logit_bias={numpy.int64(3): numpy.float32(1)},
    )  # fmt: skip
    same = SamplingParams(
        n=2, max_tokens=5, min_tokens=1, top_k=4, temperature=0.5, top_p=0.9, seed=2**63, logprobs=0,
        stop_token_ids=[3, 4], logit_bias={3: 1.0},
    )  # fmt: skip
    assert params == same and all(type(v) in (int, float) for v in (params.n, params.seed, params.temperature))
    assert (params.seed + 1) % 2**64 == 2**63 + 1
    config = SpeculativeConfig.of({"method": "ngram", "num_speculative_tokens": numpy.int64(3),
                                   "prompt_lookup_max": numpy.int32(3)})  # fmt: skip
    drafter = drafters.create(config)
    assert (type(config.num_speculative_tokens), type(drafter.prompt_lookup_max)) == (int, int)
    assert type(EngineConfig(max_num_seqs=numpy.int64(4)).max_num_seqs) is int
    for wrong in (numpy.bool_(True), numpy.float64(2), numpy.array([1])):
        with pytest.raises(ConfigError, match="max_tokens"):
            SamplingParams(max_tokens=wrong)


def test_paths_name_models():
    assert drafters.create(SpeculativeConfig.of({"model": Path("a") / "b"})).model == str(Path("a/b"))


@pytest.mark.parametrize("options", [{"n": 10**9}, {"n": 16385}, {"logprobs": 10**9}, {"logprobs": MOST_LOGPROBS + 1}])
def test_sampling_has_bounds(options):
    with pytest.raises(ConfigError, match=f"{next(iter(options))} must be .* at most"):
        SamplingParams(**options)


NESTED: dict = {"method": "ngram"}
for _ in range(900):
    NESTED = {"method": "cascade", "drafter": NESTED}
MERGED: dict = {"method": "ngram"}
for _ in range(900):
    MERGED = {"method": "merge", "drafters": [MERGED, {"method": "ngram"}]}
BUSHY: dict = {"method": "ngram"}
for _ in range(7):
    BUSHY = {"method": "merge", "drafters": [BUSHY] * 30}
ITSELF: dict = {"method": "cascade"}
ITSELF["drafter"] = ITSELF
DEEP: list = []
for _ in range(5000):
    DEEP = [DEEP]
TRIFORCE = {"method": "triforce", "model": "no-such-model"}


@pytest.mark.parametrize("config, words", [
    ({"method": "ngram", "prompt_lookup_max": 10**12}, "prompt_lookup_max must be .* at most 32"),
    ({"method": "ngram", "prompt_lookup_min": 10**12, "prompt_lookup_max": 10**12}, "prompt_lookup_max"),
    ({"method": "lookahead", "window_size": 10**8}, "window_size must be .* at most 256"),
    ({"method": "lookahead", "ngram_size": 10**8}, "ngram_size must be .* at most 16"),
    ({"method": "lookahead", "guess_set_size": 10**8}, "guess_set_size must be .* at most 256"),
    ({"method": "lookahead", "window_size": 256, "ngram_size": 16}, "window_size \\* .* at most 256"),
    ({"method": "suffix", "suffix_decoding_max_tree_depth": 10**8}, "max_tree_depth must be .* at most 256"),
    ({"method": "suffix", "suffix_decoding_max_spec_factor": math.inf}, "max_spec_factor must be"),
    ({"method": "suffix", "suffix_decoding_min_token_prob": math.nan}, "min_token_prob.* must be"),
    ({"method": "rest", "datastore": "x", "max_token_span": 10**12}, "max_token_span must be"),
    ({"method": "rest", "datastore": "x", "max_continuation": 10**12}, "max_continuation must be"),
    ({"method": "medusa", "model": "x", "choices": [[i] for i in range(10**5)]}, "choices are at most 256"),
    ({"method": "medusa", "model": "x", "choices": [[10**9]]}, "choices are"),
    ({"method": "medusa", "model": "x", "choices": [[0.5]]}, "choices are"),
    ({"method": "self", "view": "streaming:budget=2000000000"}, "budget must be .* at most"),
    ({"method": "self", "view": "streaming:budget=-5"}, "budget must be a whole number of at least 1 .* not -5"),
    ({"method": "self", "view": "streaming:rebuild=-5"}, "rebuild must be"),
    ({"method": "self", "view": "streaming:budget=9,budget=20"}, "budget is given twice"),
    ({"method": "self", "view": "snapkv:window=1000000"}, "window must be .* at most 256"),
    ({"method": "self", "view": "snapkv:kernel=100001"}, "kernel must be .* at most 255"),
    ({"method": "self", "view": "retrieval:chunk=" + "9" * 30}, "chunk must be"),
    ({"method": "self", "view": "quantized:recent=" + "9" * 30}, "recent must be"),
    ({"method": "self", "view": "x" * 10**6}, "view 'xxx.*unknown"),
    ({"method": "draft_model", "model": "no-such-model", "kv": "retrieval"}, "can only be streaming"),
    ({**TRIFORCE, "inner_speculative_tokens": -1}, "^inner_speculative_tokens must be at least 1"),
    ({**TRIFORCE, "retrieval_budget": -5}, "^retrieval_budget must be at least"),
    ({**TRIFORCE, "retrieval_budget": 10**12}, "^retrieval_budget must be at least"),
    ({**TRIFORCE, "draft_cache_budget": -5}, "^draft_cache_budget must be at least"),
    ({**TRIFORCE, "chunk_size": 0}, "^chunk_size must be at least"),
    (NESTED, "drafters in drafters"), (MERGED, "drafters in drafters"), (BUSHY, "drafters in drafters"),
    (ITSELF, "drafters in drafters"), ({"method": "merge", "drafters": [{"method": "ngram"}] * 10**6}, "drafters in"),
    ({"method": "ngram", "prompt_lookup_max": DEEP}, "prompt_lookup_max.*must be int"),
    ({"method": "cascade", "drafter": DEEP}, "must be a mapping"),
    ({"method": "cascade", "drafter": {"method": "ngram", "num_speculative_tokens": "auto"}}, "'auto' belongs"),
    ({"method": "cascade", "drafter": SpeculativeConfig("ngram", acceptance_method="block")}, "belongs to the cascade"),
    ({"method": "none", "num_speculative_tokens": 3}, "none drafts nothing"),
    ({"method": "ngram", "whatever": 3}, "valid: method, num_speculative_tokens.*acceptance_method, posterior_thr"),
    ({"method": "ngram", "num_speculative_tokens": True}, "num_speculative_tokens"),
])  # fmt: skip
def test_every_option_has_bounds(config, words):
    with pytest.raises(ConfigError, match=words) as caught:
        drafters.create(SpeculativeConfig.of(config))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 800


@pytest.mark.parametrize("name", [*FOREIGN, "qwen3_next_mtp"])
def test_keys_of_other_engines_are_answered(name):
    """As a key, as a method and as a rule: what we do instead."""
    for config in ({"method": "ngram", name: 1}, {"method": name}, {"method": "ngram", "acceptance_method": name}):
        with pytest.raises(ConfigError, match="here ") as caught:
            drafters.create(SpeculativeConfig.of(config))
        assert FOREIGN.get(name, FOREIGN["mtp"]) in str(caught.value)


@pytest.mark.parametrize("text, words", [
    ("ngram:k=3,k=4", "num_speculative_tokens is given twice"), ("ngram:k=3,num_speculative_tokens=4", "given twice"),
    ("ngram:prompt_lookup_max=3,prompt_lookup_max=3", "given twice"), ("ngram:k=3,,", "should be key=value"),
    ("ngram:method=suffix", "method is given twice"), ("none:k=3", "none drafts nothing"),
])  # fmt: skip
def test_short_forms_that_say_two_things(text, words):
    with pytest.raises(ConfigError, match=words):
        drafters.create(SpeculativeConfig.parse(text))
