"""Models on a GPU that is none (claims.py): no operation has tensors of two devices, tokens are as plainly decoded."""

from __future__ import annotations

import claims
import pytest
import torch
from test_exactness import alike, config_of

from outrider import LLM, SamplingParams, drafters

PROMPT = [5, 6, 7, 5, 6]


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr("outrider.llm.check_exactness", lambda *_: "bitwise")  # takes minutes here
    monkeypatch.setattr("outrider.drafters.auto.MEASURING", 0)
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


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: bool(x[0] > 0), lambda x: x.tolist(), lambda x: x.cpu(), lambda x: x.to("cpu", torch.int8),
        lambda x: x[x > 0], lambda x: x[[0, 1]], lambda x: x[torch.tensor([0, 1])], lambda x: x.nonzero(),
        lambda x: x.copy_(torch.ones(3)), lambda x: torch.tensor([1], device=x.device),
        lambda x: torch.ones(3).to(x.device), lambda x: x.__setitem__(slice(2), torch.ones(2)) or x,
    ],
)  # fmt: skip
def test_a_graph_holds_nothing_of_the_host(gpu, wrong):
    """Neither does the host wait for what it computes; all of which is allowed before it is captured."""
    x = torch.ones(3, device="cuda")
    wrong(x)
    with pytest.raises(claims.Waits):
        claims.captured(lambda: [wrong(x)])
    replay, results = claims.captured(lambda: [2 * x[1:], x[torch.zeros(2, dtype=torch.int64, device="cuda")]])
    x.zero_()
    replay()
    assert [own.tolist() for own in results] == [[0, 0], [0, 0]]


@pytest.mark.parametrize("options", [{"quantization": "int8", "activations": "int8"}, {"kv_offload": True}], ids=str)
def test_formats_and_caches(gpu, make_checkpoint, options):
    """With sinks, windows, experts and biases; requests that edit their logits, alone and together."""
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8, "hidden_size": 64, "head_dim": 32}
    llm = LLM(str(make_checkpoint("gpt_oss", dtype=torch.bfloat16, **sizes)), device="cuda", **options)
    each = [
        SamplingParams(
            max_tokens=4, seed=1, temperature=1.0, top_p=0.9, min_p=0.01, repetition_penalty=1.2, logprobs=2
        ),
        SamplingParams(max_tokens=4, temperature=0, logit_bias={3: 5.0}, prompt_logprobs=1),
    ]
    alone = [llm.generate([PROMPT], params)[0] for params in each]
    llm.speculative_config = {"method": "recycle", "num_speculative_tokens": 4}
    together = llm.generate([PROMPT, PROMPT], each)
    assert all(alike(one, other) for one, other in zip(alone, together, strict=True))


@pytest.mark.parametrize("method", drafters.methods())
def test_tokens(gpu, make_checkpoint, method):
    """Every method, on a model with biases."""
    llm = LLM(str(make_checkpoint("qwen2", dtype=torch.bfloat16)), device="cuda")
    assert llm.runner.model.head.kernel == "Triton"
    plain = llm.generate(PROMPT, max_tokens=5, temperature=0.8, seed=1)[0].token_ids
    llm.speculative_config = config_of(method, "random", make_checkpoint, k=4)
    (output,) = llm.generate(PROMPT, max_tokens=5, temperature=0.8, seed=1)
    assert output.token_ids == plain and output.metrics["drafter_error"] is None
