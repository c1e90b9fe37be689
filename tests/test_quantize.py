"""Weight-only quantisation: how far weights and texts move, exactness of the quantised model, and what is refused."""

from __future__ import annotations

import pytest
import torch

from outrider import LLM
from outrider.errors import ConfigError
from outrider.ops import native
from outrider.quantize import HEAD, SCHEMES, quantize

needs_kernels = pytest.mark.skipif(native.active == native.REFERENCE, reason="the kernels are not built")
PROMPT = "Once upon a time, there was a little"


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("inputs", [1, 64, 100, 384])
def test_round_trip(scheme, inputs):
    """No weight is farther from its original than half a step, up to the bfloat16 rounding of scale and offset."""
    bits, group, _ = SCHEMES[scheme]
    weight = torch.randn(50, inputs, generator=torch.Generator().manual_seed(inputs)).bfloat16()
    weight[3], weight[4], weight[5] = 0, 0.5, -2.0  # groups of one value
    q = quantize(weight, scheme)
    assert (
        q.values.dtype == torch.int8
        and int(q.values.min()) >= -(2 ** (bits - 1))
        and int(q.values.max()) < 2 ** (bits - 1)
    )
    error = (q.dense() - weight.float()).abs()
    step = q.scales.float().repeat_interleave(group, 1)[:, :inputs]
    slack = weight.float().abs().max() / 128
    assert (error <= step / 2 + slack).all()
    assert (error[3:6] <= weight[3:6].float().abs() / 128).all()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_representable_weights_survive(scheme):
    """Weights that are a scale times small integers come back exactly."""
    bits, group, _ = SCHEMES[scheme]
    half = 2 ** (bits - 1)
    whole = torch.randint(1 - half, half, (8, 2 * group), generator=torch.Generator().manual_seed(0)).float()
    whole[:, ::group], whole[:, 1::group] = half - 1, 1 - half
    if SCHEMES[scheme][2]:
        whole[:, 2::group] = -half  # the whole range, which an offset makes use of
    assert torch.equal(quantize(whole / 16, scheme).dense(), whole / 16)


@needs_kernels
@pytest.mark.parametrize("scheme", SCHEMES)
def test_exact_and_smaller(scheme):
    """The promise holds on the quantised model: the same tokens with speculation, bit for bit, greedy and sampled."""
    llm, full = LLM("tiny", device="cpu", quantization=scheme), LLM("tiny", device="cpu", dtype="bfloat16")
    assert llm.exactness == "bitwise"
    assert llm.runner.model.nbytes < {"int8": 0.52, "int4": 0.36}[scheme] * full.runner.model.nbytes
    for params in ({"temperature": 0}, {"temperature": 0.8, "seed": 5}):
        llm.speculative_config = None
        plain = llm.generate([PROMPT, "The dog"], max_tokens=40, ignore_eos=True, **params)
        for config in (
            {"method": "ngram"},
            {"method": "draft_model", "model": "tiny-draft", "num_speculative_tokens": 5},
        ):
            llm.speculative_config = config
            outputs = llm.generate([PROMPT, "The dog"], max_tokens=40, ignore_eos=True, **params)
            assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    llm.speculative_config = None
    ours, theirs = (m.generate("One day, a boy named Tim", max_tokens=8, temperature=0)[0] for m in (llm, full))
    assert ours.token_ids == theirs.token_ids  # a clear-cut beginning


@needs_kernels
def test_head_and_layers(make_checkpoint):
    llm = LLM(make_checkpoint(dtype=torch.bfloat16), device="cpu", quantization="int4")
    model = llm.runner.model
    assert model.layers[0].down.packed.format == native.INT4
    assert model.head.packed.format == getattr(native, HEAD.upper())


def test_refusals(random_llm, make_checkpoint, monkeypatch):
    with pytest.raises(ConfigError, match="'fp3' is unknown; valid: int8, int4"):
        LLM("tiny", quantization="fp3")
    with pytest.raises(ConfigError, match="give dtype='bfloat16'"):
        LLM("tiny", dtype="float32", quantization="int8")
    with pytest.raises(ConfigError, match="while a model is loaded"):
        LLM(random_llm.checkpoint, quantization="int8")
    monkeypatch.setattr(native, "active", native.REFERENCE)
    with pytest.raises(ConfigError, match="needs the compiled CPU kernels"):
        LLM("tiny", device="cpu", quantization="int8")
