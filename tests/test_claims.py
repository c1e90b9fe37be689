"""Models on a GPU that is none (claims.py): no operation has tensors of two devices, tokens are as plainly decoded."""

from __future__ import annotations

import claims
import pytest
import torch
from test_exactness import config_of

from outrider import LLM, drafters

PROMPT = [5, 6, 7, 5, 6]
SIZES = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 32,
         "intermediate_size": 32, "vocab_size": 64}  # fmt: skip


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr("outrider.llm.check_exactness", lambda *_: "bitwise")  # takes minutes here
    with claims.use(monkeypatch):
        yield


def test_two_devices_are_not_mixed(gpu):
    """As PyTorch has it; a number may lie anywhere."""
    x, y = torch.ones(3, device="cuda"), torch.ones(3)
    assert x.is_cuda and str((2 * x).device) == "cuda:0" and x.cpu().device.type == "cpu"
    assert (x + torch.tensor(1.0)).tolist() == [2, 2, 2] and x[torch.tensor([0, 1])].is_cuda
    with pytest.raises(claims.Mixed):
        x + y
    with pytest.raises(claims.Mixed):
        y[x.long()]


@pytest.mark.parametrize("method", drafters.methods())
def test_tokens(gpu, make_checkpoint, method):
    """Every method, on a model with biases."""
    llm = LLM(str(make_checkpoint("qwen2", dtype=torch.bfloat16)), device="cuda")
    assert llm.runner.model.head.kernel == "Triton"
    plain = llm.generate(PROMPT, max_tokens=5, temperature=0.8, seed=1)[0].token_ids
    llm.speculative_config = config_of(method, "random", make_checkpoint, k=4)
    (output,) = llm.generate(PROMPT, max_tokens=5, temperature=0.8, seed=1)
    assert output.token_ids == plain and output.metrics["drafter_error"] is None
