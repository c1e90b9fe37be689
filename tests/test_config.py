"""How far a model's positions reach."""

from __future__ import annotations

import pytest

from outrider.config import ModelConfig

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
    config = ModelConfig.from_hf({**SHAPE, "max_position_embeddings": positions, "rope_scaling": rope})
    assert config.context == context
