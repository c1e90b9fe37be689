"""Facts lie scattered through 32k tokens; a model made by hand looks them up. Which views still see them?

Its one layer asks for the fact that a question names: keys and queries lie in dimensions that rotary embeddings hardly
turn. Question k follows from answer k - 1 by the head alone, so half of the text needs the look-up and half does not.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider import LLM

FACTS, FILLER, HIDDEN, DIM = 9, 64, 128, 64
LENGTH = 32_768
FACT, QUESTION, ANSWER = (FILLER + FACTS * i for i in range(3))  # first token ids of each
NAME, ASKED, PAYLOAD, FOUND, SAID, SHARED = 0, 16, 32, 48, 64, 80  # first hidden dimensions of each kind
VALUES = [(5 * k + 3) % FACTS for k in range(FACTS)]  # fact k says that its answer is VALUES[k]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    config = LlamaConfig(
        vocab_size=128, hidden_size=HIDDEN, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=DIM, max_position_embeddings=2 * LENGTH, rope_theta=1e30,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    weights = dict(model.named_parameters())
    attention = "model.layers.0.self_attn.{}_proj.weight".format
    with torch.no_grad():
        for name, weight in weights.items():
            weight.fill_(1.0 if "norm" in name else 0.0)
        embed, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
        embed[:FILLER, SHARED + 1] = 1.0
        for k, value in enumerate(VALUES):
            embed[FACT + k, [NAME + k, PAYLOAD + value, SHARED]] = 1.0
            embed[QUESTION + k, [ASKED + k, SHARED + 2]] = 1.0
            embed[ANSWER + value, [SAID + k, SHARED + 2]] = 1.0
            head[ANSWER + k, FOUND + k] = 10.0
            head[QUESTION + (k + 1) % FACTS, SAID + k] = 10.0
            for row, source in ((16 + k, ASKED + k), (16 + k, NAME + k)):
                weights[attention("q" if source >= ASKED else "k")][row, source] = 4.0
            weights[attention("v")][k, PAYLOAD + k] = 1.0
            weights[attention("o")][FOUND + k, k] = 1.0
        # All tokens are a little interested in every fact: a view chosen for one question serves the next, too.
        weights[attention("q")][30, [SHARED + 1, SHARED + 2]] = 2.0
        weights[attention("k")][30, SHARED] = 2.0
    folder: Path = tmp_path_factory.mktemp("needle")
    model.save_pretrained(folder)
    return LLM(folder, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    """Filler, a fact at each of 10 % ... 90 % of its length, and the first question."""
    tokens = torch.randint(FILLER, (LENGTH,), generator=torch.Generator().manual_seed(0)).tolist()
    for k in range(FACTS):
        tokens[LENGTH * (k + 1) // 10] = FACT + k
    return [*tokens[:-1], QUESTION]


def test_the_needle_is_found(llm: LLM, prompt: list[int]) -> None:
    kept = {}
    for view in (None, "streaming:budget=512", "retrieval:budget=512", "snapkv:budget=512,window=8"):
        llm.speculative_config = {"method": "self", "view": view} if view else None
        (output,) = llm.generate(prompt, max_tokens=2 * FACTS, temperature=0)
        answers = [token - ANSWER for token in output.token_ids[::2]]
        assert answers == VALUES  # of the plain target, and then of every method
        kept[view] = output.metrics["speculative_decoding"]["draft_acceptance_rate"]
    assert kept["streaming:budget=512"] < 0.4
    assert kept["retrieval:budget=512"] > 0.9 and kept["snapkv:budget=512,window=8"] > 0.9
