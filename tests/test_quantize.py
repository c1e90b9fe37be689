"""Weight-only quantisation: how far weights and texts move, exactness of the quantised model, and what is refused."""

from __future__ import annotations

import shutil
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider import LLM
from outrider.config import HEAD, SCHEMES
from outrider.errors import CheckpointError, ConfigError
from outrider.export import quantize as quantize_to
from outrider.load import load, sound
from outrider.ops import Linear, Quantized, native
from outrider.quantize import GGUF, from_gguf, quantize

needs_kernels = pytest.mark.skipif(native.active == native.REFERENCE, reason="the kernels are not built")
PROMPT = "Once upon a time, there was a little"


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("inputs", [1, 64, 100, 384])
def test_round_trip(scheme, inputs):
    """No weight is farther from its original than half a step, up to the bfloat16 rounding of scale and offset; where
    scales are searched, weights at the ends may be, so that all are nearer together."""
    bits, group, offset = SCHEMES[scheme]
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
    assert (error <= (1.5 if offset else 0.5) * step + slack).all()
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


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_scales_are_searched(size):
    """Rounding with searched scale and offset is off by a quarter less, squared, than over the group's own range."""
    weight = size * torch.randn(64, 384, generator=torch.Generator().manual_seed(1))
    groups = weight.view(64, -1, 32) / size
    low, high = (x[..., None] for x in groups.aminmax(dim=-1))
    step = (high - low) / 15
    plain = ((groups - low) / step).round() * step + low - groups
    error = (quantize(weight, "int4").dense() - weight) / size
    assert error.square().sum() < 0.85 * plain.square().sum()


def test_a_coarser_file_is_found_again():
    """Weights that somebody has rounded to 4 bits in these groups are not moved by more than their scale's rounding."""
    rng = np.random.default_rng(3)
    rounded = gguf.quantize(rng.standard_normal((16, 256), np.float32), gguf.GGMLQuantizationType.Q4_1)
    weight = from_gguf(torch.from_numpy(rounded), "Q4_1").dense()
    found = quantize(weight, "int4")
    assert (found.dense() - weight).abs().max() < weight.abs().max() / 256


@needs_kernels
@pytest.mark.parametrize("activations", [None, "int8"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_exact_and_smaller(scheme, activations):
    """The promise holds on the quantised model: the same tokens with speculation, bit for bit, greedy and sampled."""
    llm = LLM("tiny", device="cpu", quantization=scheme, activations=activations)
    full = LLM("tiny", device="cpu", dtype="bfloat16")
    assert llm.exactness == "bitwise" and llm.runner.model.rounded == (activations is not None)
    group = 32 if activations else 128  # rows are rounded in the groups of the head's weights
    assert llm.runner.model.head.packed[0].group == group
    assert all(linear.rounded == (activations is not None) for linear in llm.runner.model.linears)
    assert llm.runner.model.nbytes < {"int8": 0.54, "int4": 0.37}[scheme] * full.runner.model.nbytes
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
    assert model.layers[0].mlp.down.packed[0].format == native.INT4
    assert model.head.packed[0].format == getattr(native, HEAD.upper())


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_left_to_itself_it_computes_in_bfloat16(make_checkpoint, dtype):
    folder = make_checkpoint(dtype=dtype)
    assert load(folder, device="cpu").model.dtype == dtype
    assert load(folder, device="cpu", quantization="int8").model.dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="computes in bfloat16"):
        load(folder, str(dtype).removeprefix("torch."), "cpu", quantization="int8")


@needs_kernels
def test_weights_that_bfloat16_does_not_hold(make_checkpoint, tmp_path):
    """Once they are rounded, or multiplied by their scales."""
    folder = shutil.copytree(make_checkpoint(dtype=torch.bfloat16), tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj.weight"
    for value, scheme in ((1.8e38, "int4"), (torch.finfo(torch.bfloat16).max, "int8")):
        weights[name][0, :2] = torch.tensor([value, -value])
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        load(folder, device="cpu")
        with pytest.raises(CheckpointError, match=r"o_proj\.weight is not finite"):
            load(folder, device="cpu", quantization=scheme)
    weights[name][0, :2] = torch.tensor([3e38, -3e38])
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    load(folder, device="cpu", quantization="int8")
    codes = torch.full((32, 64), 448.0).to(torch.float8_e4m3fn)
    large = Quantized(8, 64, codes, torch.full((32, 1), 1e36), floats=True)
    with pytest.raises(CheckpointError, match="w is not finite"):
        sound(large, folder, "w")
    assert sound(replace(large, scales=large.scales / 10), folder, "w")


def test_refusals(random_llm, make_checkpoint, monkeypatch):
    with pytest.raises(ConfigError, match="'fp3' is unknown; valid: int8, int4"):
        LLM("tiny", quantization="fp3")
    with pytest.raises(ConfigError, match="give dtype='bfloat16'"):
        LLM("tiny", dtype="float32", quantization="int8")
    for name in ("quantization", "activations"):
        with pytest.raises(ConfigError, match="while a model is loaded"):
            LLM(random_llm.checkpoint, **{name: "int8"})
    with pytest.raises(ConfigError, match="'int4' are unknown; valid: int8"):
        LLM("tiny", quantization="int8", activations="int4")
    monkeypatch.setattr(native, "active", native.REFERENCE)
    with pytest.raises(ConfigError, match="needs the compiled CPU kernels"):
        LLM("tiny", device="cpu", quantization="int8")
    with pytest.raises(ConfigError, match="need the compiled CPU kernels"):
        LLM("tiny", device="cpu", dtype="bfloat16", activations="int8")


@needs_kernels
def test_activations_need_integers(make_checkpoint):
    """Rounded activations are for weights that are integers; others are refused."""
    folder = make_checkpoint(dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="give quantization='int8', or a checkpoint"):
        LLM(folder, device="cpu", activations="int8")
    with pytest.raises(ConfigError, match="from bfloat16; give dtype='bfloat16'"):
        LLM(folder, device="cpu", dtype="float32", activations="int8")
    packed = LLM(quantize_to(folder, folder.parent / "w8"), device="cpu", activations="int8")
    assert packed.exactness == "bitwise" and packed.runner.model.layers[0].o.rounded
    assert not packed.runner.model.head.rounded  # which that checkpoint leaves as it is


HALVES = {
    "Q8_0": [0],
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "MXFP4": [],
}  # where blocks have them


def gguf_blocks(kind, rows, inputs, seed=0):
    """Random blocks of a GGUF type, (rows, bytes): any bits, but scales of a sane size."""
    size, weights = GGUF[kind]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows, inputs // weights, size), dtype=np.uint8)
    if kind == "MXFP4":  # an exponent
        blocks[..., 0] = rng.integers(116, 124, blocks.shape[:2])
    for at in HALVES[kind]:
        scale = (rng.standard_normal(blocks.shape[:2]) / 64).astype(np.float16)
        blocks[..., at : at + 2] = scale[..., None].view(np.uint8)
    return torch.from_numpy(blocks.reshape(rows, -1))


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("kind", GGUF)
def test_gguf_blocks_are_what_gguf_says(kind, compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(native, "kernels", None)
    blocks = gguf_blocks(kind, 40, 768)
    exact = torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind]))
    assert torch.equal(from_gguf(blocks, kind).dense(), exact)
    some = torch.tensor([7, 0, 39, 7])  # an embedding's rows
    assert torch.equal(from_gguf(blocks[some], kind).dense(), exact[some])


@needs_kernels
@pytest.mark.parametrize("kind", GGUF)
def test_gguf_blocks_run_as_stored(kind):
    """Products of blocks are those of the dequantised weights, from memory little larger than the blocks."""
    for rows, inputs, gated in ((192, 768, False), (96, 256, True)):
        blocks = gguf_blocks(kind, rows, inputs, seed=rows)
        linear = Linear(from_gguf(blocks, kind), gated=gated)
        wider = 1.06 if kind == "MXFP4" else 1.03  # whose scales have one byte there, and two here
        assert blocks.numel() <= linear.nbytes <= wider * blocks.numel()
        weight = torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind])).double()
        x = torch.randn(64, inputs, generator=torch.Generator().manual_seed(1)).bfloat16()
        exact = x.double() @ weight.T
        if gated:
            gate, up = exact.chunk(2, -1)
            exact = torch.nn.functional.silu(gate) * up
        full = linear(x, dtype=torch.float32)
        assert (full.double() - exact).abs().max() < 2e-6 * exact.abs().max()
        assert all(torch.equal(linear(x[:n], dtype=torch.float32), full[:n]) for n in range(1, 65))
