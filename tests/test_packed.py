"""Quantised checkpoints in safetensors, written by hand from their formats' descriptions."""

from __future__ import annotations

import json
import logging
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from helpers import logits_after, run
from safetensors.torch import load_file, save_file

from outrider import LLM, SamplingParams
from outrider.cli import main
from outrider.errors import CheckpointError, ConfigError, UnsupportedArchitecture
from outrider.export import export, quantize
from outrider.load import load, open_source
from outrider.ops import Linear, native
from outrider.packed import Reader, from_mxfp4

needs_kernels = pytest.mark.skipif(native.active == native.REFERENCE, reason="the kernels are not built")
SIZES = {"hidden_size": 128, "intermediate_size": 192}
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows of codes as int32, the first in the lowest bits."""
    each = 32 // bits
    codes = torch.nn.functional.pad(codes.long(), (0, -codes.shape[1] % each)).view(len(codes), -1, each)
    packed = (codes << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def spread(factors: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """Factors (out, groups) for each input, by the group that it is in."""
    return factors.float()[:, of]


class Case:
    """Random quantised weights of one linear: `tensors` as a file has them, `dense` what they stand for."""

    def __init__(self, out: int, inputs: int, seed: int, group: int = 32, bits: int = 4, **options) -> None:
        self.out, self.inputs, self.group, self.bits, self.options = out, inputs, group, bits, options
        self.noise = torch.Generator().manual_seed(seed)
        self.groups = inputs // group if group > 0 else 1
        self.tensors: dict[str, torch.Tensor] = {}

    def codes(self, *shape: int, low: int = 0, high: int | None = None) -> torch.Tensor:
        return torch.randint(low, 2**self.bits if high is None else high, shape, generator=self.noise)

    def scales(self, *shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        return ((torch.rand(shape, generator=self.noise) + 0.5) / 2**self.bits).to(dtype)

    def of(self) -> torch.Tensor:
        return torch.arange(self.inputs) // (self.inputs // self.groups)


def gptq(case: Case, v2: bool = False, desc_act: bool = False, symmetric: bool = False) -> dict:
    half = 2 ** (case.bits - 1)
    q = case.codes(case.out, case.inputs)
    z = case.codes(case.out, case.groups, low=1, high=2 * half - 1)  # a stored maximum has two meanings in v1
    z = torch.full_like(z, half) if symmetric else z
    s, of = case.scales(case.out, case.groups), case.of()
    if desc_act:
        of = of[torch.randperm(case.inputs, generator=torch.Generator().manual_seed(case.inputs))]
        case.tensors["g_idx"] = of.int()
    case.dense = spread(s, of) * (q - spread(z, of))
    case.tensors |= {
        "qweight": words(q, case.bits).T.contiguous(),
        "qzeros": words((z - (0 if v2 else 1)).T, case.bits),
        "scales": s.T.contiguous(),
    }
    return {
        "quant_method": "gptq", "bits": case.bits, "group_size": case.group, "desc_act": desc_act, "sym": symmetric,
        "checkpoint_format": "gptq_v2" if v2 else "gptq", "lm_head": False,
    }  # fmt: skip


def awq(case: Case) -> dict:
    q, z, s = case.codes(case.inputs, case.out), case.codes(case.groups, case.out), case.scales(case.groups, case.out)
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # nibble i of a word holds this column
    nibbles = lambda x: words(x.view(len(x), -1, 8)[..., order].reshape(len(x), -1), 4)  # noqa: E731
    case.dense = (s.float()[case.of()] * (q - z[case.of()])).T
    case.tensors = {"qweight": nibbles(q), "qzeros": nibbles(z), "scales": s}
    return {"quant_method": "awq", "bits": 4, "group_size": case.group, "zero_point": True, "version": "gemm"}


def compressed(case: Case, symmetric: bool = True, packed: bool = True, strategy: str = "group", **more) -> dict:
    half = 2 ** (case.bits - 1)
    q = case.codes(case.out, case.inputs, low=-half, high=half)
    s = case.scales(1, 1) if strategy == "tensor" else case.scales(case.out, case.groups)
    s = s.bfloat16() if packed else s.float()
    z = case.codes(*s.shape, low=-half, high=half)
    z = torch.zeros_like(z) if symmetric else z
    case.dense = spread(s.expand(case.out, -1), case.of()) * (q - spread(z.expand(case.out, -1), case.of()))
    if packed:
        shape = torch.tensor([case.out, case.inputs])
        case.tensors = {"weight_packed": words(q + half, case.bits), "weight_shape": shape, "weight_scale": s}
        if not symmetric:
            case.tensors["weight_zero_point"] = words((z + half).T, case.bits).T.contiguous()
    else:
        case.tensors = {"weight": q.char(), "weight_scale": s[0] if strategy == "tensor" else s}
        case.tensors |= {} if symmetric else {"weight_zero_point": (z[0] if strategy == "tensor" else z).char()}
    weights = {
        "num_bits": case.bits, "type": "int", "symmetric": symmetric, "strategy": strategy,
        "group_size": case.group if strategy == "group" else None,
    }  # fmt: skip
    return ct_config(weights, "pack-quantized" if packed else "int-quantized", **more)


def ct_config(weights: dict, form: str, **more) -> dict:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None} | more
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "quantization_status": "compressed", "kv_cache_scheme": None,
    }  # fmt: skip


def fp8_codes(case: Case) -> torch.Tensor:
    codes = case.codes(case.out, case.inputs, high=256).to(torch.uint8)
    codes[codes & 0x7F == 0x7F] = 3
    codes[codes & 0x7F > 0x60] &= 0x9F  # of a sane size
    return codes.view(torch.float8_e4m3fn)


def fp8(case: Case, block: bool = False, strategy: str = "channel", ours: bool = False) -> dict:
    q = fp8_codes(case)
    if block:
        s = case.scales(-(-case.out // 128), -(-case.inputs // 128), dtype=torch.float32)
        full = s.repeat_interleave(128, 0)[: case.out].repeat_interleave(128, 1)[:, : case.inputs]
        strategy = "block"
    else:
        s = case.scales(*((case.out, 1) if strategy == "channel" else ()), dtype=torch.float32)
        full = s
    case.dense = q.float() * full
    case.tensors = {"weight": q, "weight_scale" if ours or not block else "weight_scale_inv": s}
    if ours:
        case.tensors["input_scale"] = torch.tensor(0.5)
        return ct_config(
            {"num_bits": 8, "type": "float", "strategy": strategy, "block_structure": [128, 128] if block else None},
            "float-quantized", input_activations={"num_bits": 8, "type": "float", "dynamic": False},
        )  # fmt: skip
    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    return config | ({"weight_block_size": [128, 128]} if block else {})


def mxfp4(case: Case) -> dict:
    q, e = case.codes(case.out, case.inputs), case.codes(case.out, case.inputs // 32, low=118, high=125)
    case.dense = E2M1[q] * torch.exp2(e.float() - 127).repeat_interleave(32, 1)
    packed = (q[:, ::2] | q[:, 1::2] << 4).to(torch.uint8)
    case.tensors = {"weight_packed": packed, "weight_scale": e.to(torch.uint8)}
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    return ct_config(weights, "mxfp4-pack-quantized")


def mxfp8(case: Case) -> dict:
    q, e = fp8_codes(case), case.codes(case.out, case.inputs // 32, low=115, high=120)
    case.dense = q.float() * torch.exp2(e.float() - 127).repeat_interleave(32, 1)
    case.tensors = {"weight": q, "weight_scale": e.to(torch.uint8)}
    return ct_config({"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32}, "mxfp8-quantized")


W8A8 = {"input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}}
# name: maker, its options, options of the case
LAYOUTS = {
    "gptq": (gptq, {}, {}),
    "gptq symmetric": (gptq, {"symmetric": True}, {"group": 64}),
    "gptq v2": (gptq, {"v2": True}, {"group": 64}),
    "gptq 8 bits": (gptq, {}, {"bits": 8}),
    "gptq column": (gptq, {"v2": True}, {"group": -1}),
    "gptq desc_act": (gptq, {"desc_act": True}, {}),
    "gptq desc_act symmetric": (gptq, {"desc_act": True, "symmetric": True, "v2": True}, {}),
    "awq": (awq, {}, {"group": 64}),
    "awq column": (awq, {}, {"group": -1}),
    "w4a16": (compressed, {}, {}),
    "w4a16 asymmetric": (compressed, {"symmetric": False}, {"group": 64}),
    "w4a16 channel": (compressed, {"strategy": "channel"}, {"group": -1}),
    "w4a16 channel asymmetric": (compressed, {"strategy": "channel", "symmetric": False}, {"group": -1}),
    "w8a16 channel": (compressed, {"strategy": "channel"}, {"group": -1, "bits": 8}),
    "w8a16 group asymmetric": (compressed, {"symmetric": False}, {"bits": 8}),
    "w8a8": (compressed, {"packed": False, "strategy": "channel", **W8A8}, {"group": -1, "bits": 8}),
    "w8a8 asymmetric": (
        compressed, {"packed": False, "strategy": "channel", "symmetric": False}, {"group": -1, "bits": 8}),
    "w8a8 tensor": (compressed, {"packed": False, "strategy": "tensor", **W8A8}, {"group": -1, "bits": 8}),
    "w8a8 tensor asymmetric": (
        compressed, {"packed": False, "strategy": "tensor", "symmetric": False}, {"group": -1, "bits": 8}),
    "fp8 block": (fp8, {"block": True}, {}),
    "fp8 tensor": (fp8, {"strategy": "tensor"}, {}),
    "fp8 channel": (fp8, {"strategy": "channel"}, {}),
    "compressed fp8 block": (fp8, {"block": True, "ours": True}, {}),
    "compressed fp8 channel": (fp8, {"ours": True}, {}),
    "mxfp4": (mxfp4, {}, {}),
    "mxfp8": (mxfp8, {}, {}),
}  # fmt: skip


@pytest.fixture(scope="module")
def write(make_checkpoint, tmp_path_factory):
    """`write(layout)`: a random model whose layers' linears are quantised so; its folder and the dense weights."""
    made: dict[str, tuple[Path, dict[str, torch.Tensor]]] = {}

    def write(layout: str, arch: str = "llama", **more) -> tuple[Path, dict[str, torch.Tensor]]:
        if (key := f"{layout} {arch}") not in made:
            maker, options, shape = LAYOUTS[layout]
            plain = make_checkpoint(arch, **SIZES, **more, dtype=torch.float16)
            folder = tmp_path_factory.mktemp("packed")
            tensors, dense, about = {}, {}, {}
            for i, (name, value) in enumerate(sorted(load_file(plain / "model.safetensors").items())):
                if not name.endswith("_proj.weight"):
                    tensors[name] = value
                    continue
                case = Case(*value.shape, seed=i, **shape)
                about = maker(case, **options)
                dense[name] = case.dense
                tensors |= {f"{name[: -len('weight')]}{own}": tensor for own, tensor in case.tensors.items()}
            save_file(tensors, folder / "model.safetensors")
            config = json.loads((plain / "config.json").read_text()) | {"quantization_config": about}
            (folder / "config.json").write_text(json.dumps(config))
            made[key] = folder, dense
        return made[key]

    return write


@pytest.mark.parametrize("layout", LAYOUTS)
def test_read_as_stored(write, layout):
    """Every weight is, to the last bit of float32, what the format's description says; the kernels take all of it."""
    folder, dense = write(layout)
    source = open_source(folder)
    assert source.config.dtype == "bfloat16"
    for name, exact in dense.items():
        found = source.weights.mapped(name, *exact.shape)
        assert torch.equal(found, exact), name
        assert source.weights.stored(name, *exact.shape).quantized() is not None
    assert source.weights.stored("lm_head.weight", 128, SIZES["hidden_size"]) is None


@needs_kernels
@pytest.mark.parametrize("layout", LAYOUTS)
def test_products_and_promise(write, layout, caplog):
    """Products are those of the dequantised weights to 2e-6 of the largest; tokens are the same with speculation."""
    folder, dense = write(layout)
    with caplog.at_level(logging.WARNING):
        llm = LLM(folder, device="cpu")
    assert "held as" not in caplog.text  # nothing became dense
    rounds = layout in ("w8a8", "w8a8 tensor") or (layout != "mxfp8" and "fp8" in layout)
    assert ("activations stay bfloat16" in caplog.text) == rounds
    assert llm.exactness == "bitwise" and llm.runner.model.dtype == torch.bfloat16
    layer, at = llm.runner.model.layers[1], "model.layers.1."
    x = torch.randn(40, SIZES["hidden_size"], generator=torch.Generator().manual_seed(2)).bfloat16()
    wide = torch.randn(40, SIZES["intermediate_size"], generator=torch.Generator().manual_seed(3)).bfloat16()
    qkv = torch.cat([dense[f"{at}self_attn.{p}_proj.weight"] for p in "qkv"])
    for linear, given, weight in ((layer.qkv, x, qkv), (layer.mlp.down, wide, dense[f"{at}mlp.down_proj.weight"])):
        exact = given.double() @ weight.double().T
        full = linear(given, dtype=torch.float32)
        assert (full.double() - exact).abs().max() < 2e-6 * exact.abs().max() + 1e-12
        assert all(torch.equal(linear(given[:n], dtype=torch.float32), full[:n]) for n in range(1, 40))
    gate, up = (x.double() @ dense[f"{at}mlp.{p}_proj.weight"].double().T for p in ("gate", "up"))
    exact = torch.nn.functional.silu(gate) * up
    assert (layer.mlp.gate_up(x, dtype=torch.float32).double() - exact).abs().max() < 1e-5 * exact.abs().max()
    speculates_exactly(llm)


def speculates_exactly(llm: LLM) -> None:
    """Greedy and sampled, with prompt lookup on and off: the same tokens."""
    assert llm.exactness == "bitwise" and llm.runner.model.native_seconds is not None
    for params in (SamplingParams(temperature=0, max_tokens=24), SamplingParams(seed=4, max_tokens=24)):
        batch = [([5, 9, 5, 9, 5, 9, 5], params), ([3], params), (list(range(20)), params)]
        llm.speculative_config = None
        plain = [run(llm, [request])[0].token_ids for request in batch]
        llm.speculative_config = {"method": "ngram", "prompt_lookup_min": 1}
        assert [o.token_ids for o in run(llm, batch)] == plain


@needs_kernels
@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_in_every_layout(write, layout, caplog):
    """Each expert is what its numbers stand for, runs as it is stored, and speculation changes nothing."""
    folder, dense = write(layout, "qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=192)
    with caplog.at_level(logging.WARNING):
        llm = LLM(folder, device="cpu")
    assert "held as" not in caplog.text
    speculates_exactly(llm)
    x = torch.randn(9, SIZES["hidden_size"], generator=torch.Generator().manual_seed(2)).bfloat16()
    experts, at = llm.runner.model.layers[1].mlp, "model.layers.1.mlp.experts."
    chosen, weights = experts.route(experts.router(x, dtype=torch.float32))
    exact = torch.zeros(9, SIZES["hidden_size"], dtype=torch.float64)
    for row in range(9):
        for e, weight in zip(chosen[row].tolist(), weights[row].double(), strict=True):
            gate, up, down = (dense[f"{at}{e}.{part}_proj.weight"].double() for part in ("gate", "up", "down"))
            inner = torch.nn.functional.silu(gate @ x[row].double()) * (up @ x[row].double())
            exact[row] += weight * (down @ inner)
    assert (experts(x, None, 0.0).double() - exact).abs().max() < 2e-2 * exact.abs().max()


@needs_kernels
def test_gpt_oss_in_mxfp4(make_checkpoint, tmp_path, caplog):
    """As OpenAI has stored it: logits are transformers' of the weights that the blocks stand for."""
    from transformers import AutoModelForCausalLM

    plain = make_checkpoint("gpt_oss", **SIZES, num_local_experts=5, num_experts_per_tok=2, sliding_window=8)
    tensors, model = load_file(plain / "model.safetensors"), AutoModelForCausalLM.from_pretrained(plain).eval()
    for i, name in enumerate(
        [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    ):
        count, inputs, outputs = tensors.pop(name).shape
        cases = [Case(outputs, inputs, seed=10 * i + e) for e in range(count)]
        for case in cases:
            mxfp4(case)
        blocks = torch.stack([case.tensors["weight_packed"] for case in cases])
        tensors[f"{name}_blocks"] = blocks.view(count, outputs, inputs // 32, 16)
        tensors[f"{name}_scales"] = torch.stack([case.tensors["weight_scale"] for case in cases])
        model.get_parameter(name).data = torch.stack([case.dense for case in cases]).transpose(1, 2)
    save_file(tensors, tmp_path / "model.safetensors")
    about = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    config = json.loads((plain / "config.json").read_text()) | about
    (tmp_path / "config.json").write_text(json.dumps(config))
    prompt = list(range(3, 40))
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0, -1]
    exact = LLM(tmp_path, device="cpu", dtype="float32")
    torch.testing.assert_close(logits_after(exact, prompt), logits, rtol=1e-4, atol=1e-4)
    with caplog.at_level(logging.WARNING):
        caplog.clear()
        llm = LLM(tmp_path, device="cpu")
    assert "held as" not in caplog.text
    speculates_exactly(llm)
    expert = llm.runner.model.layers[0].mlp.experts[0]
    assert {w.format for w in expert.gate_up.packed + expert.down.packed} == {native.FP4}
    for name, bad, words in (
        ("gate_up_proj_scales", lambda x: x[:, :-1], "scales has shape"),
        ("down_proj_blocks", lambda x: x[..., :8], "blocks has shape"),
        ("down_proj_scales", lambda x: torch.full_like(x, 255), "not finite"),
    ):
        damaged = {n: bad(t).contiguous() if n.endswith(name) else t for n, t in tensors.items()}
        save_file(damaged, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=words):
            LLM(tmp_path, device="cpu")


@needs_kernels
def test_memory_is_the_files(write):
    """Packed weights take no more than the file's, up to panels of 32 outputs and zeros that become bytes."""
    for layout, most in (
        ("gptq", 1.1),
        ("awq", 1.05),
        ("w4a16", 1.02),
        ("w8a8", 1.05),
        ("fp8 block", 1.05),
        ("mxfp4", 1.07),
    ):
        folder, _ = write(layout)
        stored = sum(
            t.nbytes
            for name, t in load_file(folder / "model.safetensors").items()
            if "_proj." in name and "g_idx" not in name
        )
        model = LLM(folder, device="cpu").runner.model
        assert model.nbytes - model.head.nbytes < most * stored, layout


def test_dense_where_no_kernel_fits(write, caplog):
    """In float32 the same weights are held dense, which one line says; they are the very ones."""
    folder, dense = write("gptq desc_act")
    with caplog.at_level(logging.WARNING):
        model = load(folder, dtype="float32", device="cpu").model
    assert (
        "no kernel here reads GPTQ 4-bit as stored; such weights are held as torch.float32, all weights in"
        in caplog.text
    )
    x = torch.randn(3, SIZES["hidden_size"])
    weight = torch.cat([dense[f"model.layers.0.self_attn.{p}_proj.weight"] for p in "qkv"])
    assert torch.allclose(model.layers[0].qkv(x), x @ weight.T, rtol=1e-4, atol=1e-4)


def edited(write, layout: str, tmp_path: Path, change) -> Path:
    """The layout's checkpoint after `change(tensors, quantization_config)`."""
    folder, _ = write(layout)
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    change(tensors, config["quantization_config"])
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


Q = "model.layers.0.self_attn.q_proj."


@pytest.mark.parametrize("bits", [4, 8])
def test_quantize_round_trip(make_checkpoint, tmp_path, bits):
    """What `quantize` writes is what we read: no weight farther than a step, the rest untouched, and exact decoding."""
    plain = make_checkpoint(**SIZES, dtype=torch.bfloat16)
    folder = quantize(plain, tmp_path / "q", bits, calibration="none")
    before, source = open_source(plain), open_source(folder)
    stored = load_file(folder / "model.safetensors")
    assert stored[Q + "weight_packed"].shape == (64, 128 * bits // 32)
    assert stored[Q + "weight_scale"].shape == ((64, 4) if bits == 4 else (64, 1))
    assert (Q + "weight_zero_point" in stored) == (bits == 4)
    for name, shape in before.weights.shapes.items():
        old, new = before.weights.mapped(name, *shape), source.weights.mapped(name, *shape)
        if not name.endswith("_proj.weight"):
            assert torch.equal(old, new), name
            continue
        scales = stored[name + "_scale"].float().repeat_interleave(32 if bits == 4 else shape[1], 1)
        off = (new - old.float()).abs()
        assert (off <= scales * 0.5001).float().mean() > 0.97 and off.mean() < old.float().abs().mean() / (
            8 if bits == 4 else 90
        )
    if native.active != native.REFERENCE:
        assert LLM(folder, device="cpu").exactness == "bitwise"


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, -1), (8, 32), (8, 64)])
def test_groups_of_quantize(make_checkpoint, tmp_path, bits, group):
    """So many inputs share a scale as are asked for, here and as the config says it to others."""
    plain = make_checkpoint(**SIZES, dtype=torch.bfloat16)
    folder = quantize(plain, tmp_path / "q", bits, group=group, calibration="none")
    said = json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"][
        "weights"
    ]
    assert (said["num_bits"], said["strategy"]) == (bits, "channel" if group < 0 else "group")
    assert said["group_size"] == (None if group < 0 else group)
    before, source = open_source(plain), open_source(folder)
    for name, shape in before.weights.shapes.items():
        if name.endswith("_proj.weight"):
            width = shape[1] if group < 0 else group
            old, new = (s.weights.mapped(name, *shape).float().view(shape[0], -1, width) for s in (before, source))
            step = old.abs().amax(-1, keepdim=True) / 2 ** (bits - 1)
            assert (old - new).abs().mean() < 0.4 * step.mean(), (
                "the largest may be cut off where that helps the others"
            )
            assert all(len(own.unique()) <= 2**bits for own in new.flatten(0, 1))
    assert logits_after(LLM(folder, device="cpu"), [5, 9, 3]).isfinite().all()


def test_what_quantize_refuses(make_checkpoint, tmp_path, monkeypatch, capsys):
    plain = make_checkpoint(**SIZES, dtype=torch.bfloat16)
    for options, says in (
        ({"group": 16}, "group must be 32, 64, 128 or -1, not 16"),
        ({"group": 128}, "groups of 128 inputs do not divide those of all linears"),
        ({"bits": 5}, "bits must be 4 or 8, not 5"),
        ({"bits": True}, "bits must be 4 or 8"),
        ({"bits": 8, "calibration": "text.txt"}, "8 bits are rounded to nearest"),
        ({"calibration": str(plain / "nothing.txt")}, "no tokenizer"),
    ):
        with pytest.raises(ConfigError, match=says):
            quantize(plain, tmp_path / "q", **options)
    with pytest.raises(ConfigError, match="new or empty folder"):
        quantize(plain, plain)
    phi = make_checkpoint("granitemoe", num_local_experts=4, num_experts_per_tok=2)
    with pytest.raises(UnsupportedArchitecture, match="in other pieces than Hugging Face has"):
        quantize(phi, tmp_path / "q")
    assert not (tmp_path / "q").exists()
    monkeypatch.setattr("sys.argv", ["outrider", "quantize", str(plain), str(tmp_path / "q"), "--calibration", "none"])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr()
    assert ended.value.code in (0, None) and told.out == "" and "MB of weights" in told.err
    assert load_file(tmp_path / "q" / "model.safetensors")[Q + "weight_scale"].shape == (64, 4)
    twice = ["--calibration", "none"] * 2
    monkeypatch.setattr("sys.argv", ["outrider", "quantize", str(plain), str(tmp_path / "r"), *twice])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and "--calibration none stands alone" in capsys.readouterr().err


@pytest.mark.parametrize("bits", [4, 8])
def test_quantize_is_read_by_transformers(make_checkpoint, tmp_path, bits):
    """compressed-tensors unpacks the very weights that we run on (with zeros, rounded to their scales' bfloat16)."""
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    folder = quantize(make_checkpoint(**SIZES, dtype=torch.bfloat16), tmp_path / "q", bits, calibration="none")
    model, source = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), open_source(folder)
    with torch.no_grad():
        logits = model(torch.tensor([[5, 9, 3]])).logits[0, -1]
    for name, parameter in model.named_parameters():
        if name.endswith("_proj.weight"):
            ours = source.weights.mapped(name, *parameter.shape)
            assert torch.equal(parameter, ours.bfloat16().float() if bits == 4 else ours), name
    off = (logits_after(LLM(folder, device="cpu", dtype="float32"), [5, 9, 3]) - logits).abs().max()
    assert off < (0.02 if bits == 4 else 1e-4) * logits.abs().max()


MIXTURES = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
}


@pytest.mark.parametrize("arch", MIXTURES)
def test_quantised_experts_are_read_by_transformers(make_checkpoint, tmp_path, arch):
    """Which has them in one tensor, dequantises them as it loads, and knows no zeros of theirs."""
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    plain = make_checkpoint(arch, **SIZES, **MIXTURES[arch], dtype=torch.bfloat16)
    folder = quantize(plain, tmp_path / "q", calibration="none")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([[5, 9, 3]])).logits[0, -1]
    assert sum(stored.endswith("weight_packed") for stored in load_file(folder / "model.safetensors")) == 2 * (4 + 12)
    off = (logits_after(LLM(folder, device="cpu", dtype="float32"), [5, 9, 3]) - logits).abs().max()
    assert off < 0.02 * logits.abs().max()  # there, weights are rounded to bfloat16


SCHEMES = [("W4A16", 32), ("W4A16", 64), ("W4A16_ASYM", 64), ("W8A16", None), ("W8A8", None), ("FP8_DYNAMIC", None),
           ("FP8_BLOCK", None)]  # fmt: skip


@pytest.mark.parametrize(("preset", "group"), SCHEMES)
def test_compressed_tensors_own_writer(preset, group):
    """What compressed-tensors compresses by its presets we read to the bit as it decompresses it."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme = preset_name_to_scheme(preset, ["Linear"])
    args = scheme.weights
    if group:
        args.group_size = group
    form = {"int": "pack-quantized", "float": "float-quantized"}[args.type]
    form = "int-quantized" if preset == "W8A8" else form
    weight = torch.randn(128, 256, generator=torch.Generator().manual_seed(1))
    cut = (
        weight.view(1, 128, 2, 128).transpose(1, 2).reshape(1, 2, -1)
        if args.strategy == "block"
        else (weight.view(128, -1, args.group_size or 256))
    )
    scale, zero = calculate_qparams(cut.amin(-1), cut.amax(-1), args)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    stored = BaseCompressor.get_value_from_registry(form).compress(state, scheme)
    back = BaseCompressor.get_value_from_registry(form).decompress(dict(stored), scheme)["weight"]
    config = {
        "quant_method": "compressed-tensors", "format": form, "ignore": [],
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
    }  # fmt: skip
    names = {
        torch.int32: "I32",
        torch.int64: "I64",
        torch.int8: "I8",
        torch.float8_e4m3fn: "F8_E4M3",
        torch.float32: "F32",
    }
    tensors = {f"a.{name}": tensor for name, tensor in stored.items() if tensor is not None}
    about = {name: (tuple(tensor.shape), names[tensor.dtype]) for name, tensor in tensors.items()}
    found = Reader(config, about, tensors.__getitem__, "here").packed["a.weight"]
    assert found.shape == (128, 256) and torch.equal(found.dense(), back)


def test_quantize_refuses(tmp_path):
    with pytest.raises(ConfigError, match="bits must be 4 or 8, not 5"):
        quantize("tiny", tmp_path / "q", 5)
    assert not (tmp_path / "q").exists()


def test_quantised_checkpoints_are_exported_dense(write, tmp_path):
    folder, dense = write("gptq desc_act")
    source = open_source(export(folder, tmp_path / "dense", "float32"))
    assert "quantization_config" not in source.hf
    for name, exact in dense.items():
        assert torch.equal(source.weights.mapped(name, *exact.shape), exact)


@needs_kernels
def test_ignored_and_mixed_linears_stay(write, make_checkpoint, tmp_path, caplog):
    """A linear that is not quantised stays as it is, also beside quantised ones in one product."""
    plain = load_file(make_checkpoint(**SIZES, dtype=torch.float16) / "model.safetensors")

    def change(tensors, config):
        for own in ("weight_packed", "weight_scale", "weight_shape"):
            del tensors[Q + own]
        tensors[Q + "weight"] = plain[Q + "weight"]
        config["ignore"] += [Q[:-1]]

    folder = edited(write, "w4a16", tmp_path, change)
    with caplog.at_level(logging.WARNING):
        model = LLM(folder, device="cpu").runner.model
    assert "held as" not in caplog.text and [w.format for w in model.layers[0].qkv.packed] == [native.BF16, native.INT4]
    x = torch.eye(SIZES["hidden_size"]).bfloat16()
    assert torch.equal(model.layers[0].qkv(x)[:, :64].T.float(), plain[Q + "weight"].bfloat16().float())


def test_a_quantised_head_is_meant_though_the_config_ties_it(write, tmp_path):
    case = Case(128, SIZES["hidden_size"], seed=1)
    gptq(case)

    def change(tensors, _):
        del tensors["lm_head.weight"]
        tensors |= {f"lm_head.{own}": tensor for own, tensor in case.tensors.items()}

    folder = edited(write, "gptq", tmp_path, change)
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    model, x = load(folder, dtype="float32", device="cpu").model, torch.eye(SIZES["hidden_size"])
    assert torch.equal(model.head(x), case.dense.T)


@pytest.mark.parametrize("name", ["kv_scale", "k_scale", "attn.k_scale"])
def test_scales_of_caches_are_not_used(write, tmp_path, name):
    """By whatever name they lie beside the linears: keys stay as they are."""

    def change(tensors, config):
        tensors[f"model.layers.0.self_attn.{name}"] = torch.tensor(0.5)

    load(edited(write, "fp8 tensor", tmp_path, change), device="cpu")


def test_static_scales_of_transformers_fp8(write, tmp_path):
    """They are of activations, which stay as they are, by transformers' name."""

    def change(tensors, config):
        config["activation_scheme"] = "static"
        for name in [name for name in tensors if name.endswith(".weight_scale")]:
            tensors[f"{name}_inv"] = tensors.pop(name).bfloat16()
            tensors[name.replace("weight_scale", "activation_scale")] = torch.tensor(0.5)

    load(edited(write, "fp8 tensor", tmp_path, change), device="cpu")


def test_zero_biases_of_gptq_are_none(write, tmp_path):
    def zeros(tensors, _):
        tensors[Q + "bias"] = torch.zeros(64, dtype=torch.float16)

    folder = edited(write, "gptq", tmp_path, zeros)
    load(folder, device="cpu")
    load(export(folder, tmp_path / "dense"), device="cpu")

    def ones(tensors, _):
        tensors[Q + "bias"] = torch.ones(64, dtype=torch.float16)

    with pytest.raises(CheckpointError, match=r"no place for 1 tensors, such as .*q_proj\.bias"):
        load(edited(write, "gptq", tmp_path, ones), device="cpu")


def drop(name):
    return lambda tensors, _: tensors.pop(Q + name)


def put(name, make):
    def change(tensors, _):
        tensors[Q + name] = make(tensors[Q + name])

    return change


def also(**tensors):
    return lambda held, _: held.update({Q + name: tensor for name, tensor in tensors.items()})


def say(**keys):
    return lambda _, config: config.update(keys)


def weights(**keys):
    return lambda _, config: config["config_groups"]["group_0"]["weights"].update(keys)


WRONG = [
    ("gptq", drop("scales"), CheckpointError, r"tensor .*q_proj\.scales is missing"),
    ("gptq", drop("qweight"), CheckpointError, r"q_proj\.weight is missing"),
    ("gptq", drop("qzeros"), CheckpointError, r"q_proj\.qzeros is missing"),
    ("gptq", put("scales", lambda s: s[:-1]), CheckpointError, r"scales has shape \(3, 64\), not \(4, 64\)"),
    ("gptq", put("scales", lambda s: s * float("nan")), CheckpointError, "not finite"),
    ("gptq", put("qweight", lambda q: q[:-1]), CheckpointError, "groups of 32 do not divide the 120 inputs"),
    ("gptq", put("qweight", lambda q: q[:12]), CheckpointError, r"scales has shape \(4, 64\), not \(3, 64\)"),
    ("gptq", put("qweight", lambda q: q.float()), CheckpointError, "qweight is f32, not i32"),
    ("gptq", put("qweight", lambda q: q[0]), CheckpointError, "no matrix"),
    ("gptq", put("qzeros", lambda z: z | 15), CheckpointError, "may mean 0 or 16: convert it to gptq_v2"),
    ("gptq", say(group_size=48), CheckpointError, "scales has shape .6, 128., not .4, 128."),
    ("gptq", say(group_size=0), CheckpointError, "group_size must be a whole number above 0, or -1, not 0"),
    ("gptq", say(bits=3), UnsupportedArchitecture, "gptq with bits 3 is not supported; supported: 4, 8"),
    ("gptq", say(bits=[4]), UnsupportedArchitecture, "bits"),
    ("gptq", say(format="marlin"), CheckpointError, "checkpoint_format and format are gptq and marlin: leave one"),
    ("gptq", say(format="gptq_v2"), CheckpointError, "checkpoint_format and format are gptq and gptq_v2: leave one"),
    ("gptq", also(weight=torch.ones(3)), CheckpointError, "no place for .*q_proj.weight beside .*q_proj.qweight"),
    ("gptq", also(weight_scale=torch.ones(3)), CheckpointError, r"q_proj.weight_scale beside"),
    ("gptq", lambda t, _: t.update({"foo.bar.input_scale": torch.ones(1)}), CheckpointError, "foo.bar.input_scale"),
    ("gptq", say(quant_method="mxfp4"), CheckpointError, "q_proj.weight is missing"),
    ("awq", also(g_idx=torch.zeros(128).int()), CheckpointError, "q_proj.g_idx beside"),
    ("w4a16", also(weight=torch.ones(64, 128).char()), CheckpointError, "q_proj.weight_packed beside"),
    ("w4a16", say(quant_method="mxfp4"), CheckpointError, "q_proj.weight is missing"),
    ("w8a8", also(weight_shape=torch.tensor([3, 5])), CheckpointError, "q_proj.weight_shape beside"),
    ("fp8 block", also(weight_scale=torch.ones(1, 1)), CheckpointError, "q_proj.weight_scale beside"),
    ("fp8 block", say(weight_block_size=[10**12, 10**12]), CheckpointError, r"has shape \(1, \d+\), not \(1, 1\)"),
    ("fp8 tensor", also(weight_zero_point=torch.zeros(5)), CheckpointError, "weight_zero_point has shape"),
    ("gptq", say(checkpoint_format="marlin"), UnsupportedArchitecture, "'marlin' is not supported; supported: gptq, "),
    ("gptq", say(checkpoint_format=["gptq"]), UnsupportedArchitecture, r"\['gptq'\] is not supported"),
    ("gptq", say(dynamic={"(": {}}), CheckpointError, "is no regex"),
    ("gptq", say(dynamic=[1]), CheckpointError, "dynamic should be an object"),
    ("gptq", say(desc_act=True), CheckpointError, r"g_idx is missing"),
    ("gptq", say(quant_method="bitsandbytes"), UnsupportedArchitecture, "'bitsandbytes', which is not"),
    ("gptq", lambda t, _: t.update({"model.layers.0.mlp.extra": torch.ones(2)}), CheckpointError, "no place for 1"),
    ("gptq desc_act", put("g_idx", lambda g: g + 1), CheckpointError, "names a group that is none of the 4"),
    ("gptq desc_act", put("g_idx", lambda g: g * 0), CheckpointError, "groups of another size than group_size 32"),
    ("gptq desc_act", put("g_idx", lambda g: g[:-1]), CheckpointError, r"g_idx has shape \(127,\), not \(128,\)"),
    ("awq", say(bits=8), UnsupportedArchitecture, "awq with bits 8"),
    ("awq", say(version="gemv"), UnsupportedArchitecture, "supported: gemm"),
    ("awq", say(zero_point=False), UnsupportedArchitecture, "zero_point False"),
    ("awq", put("qweight", lambda q: q[:, :-1]), CheckpointError, r"scales has shape \(2, 64\), not \(2, 56\)"),
    ("w4a16", drop("weight_scale"), CheckpointError, "weight_scale is missing"),
    ("w4a16", drop("weight_shape"), CheckpointError, "weight_shape is missing"),
    ("w4a16", put("weight_shape", lambda s: s * 2), CheckpointError, r"weight_shape says \[128, 256\]"),
    ("w4a16", put("weight_shape", lambda s: -s), CheckpointError, "weight_shape says"),
    ("w4a16", weights(symmetric=False), CheckpointError, "weight_zero_point is missing"),
    ("w4a16", weights(num_bits=3), UnsupportedArchitecture, "weights of 'int 3' is not supported"),
    ("w4a16", weights(strategy="token"), UnsupportedArchitecture, "strategy 'token'"),
    ("w4a16", weights(group_size=48), CheckpointError, r"weight_scale has shape \(128, 6\), not \(128, 4\)"),
    ("w4a16", weights(group_size=64), CheckpointError, r"weight_scale has shape \(128, 6\), not \(128, 3\)"),
    ("w4a16", say(format="marlin-24"), UnsupportedArchitecture, "format 'marlin-24' is not supported"),
    ("w4a16", say(ignore=["re:.*q_proj"]), CheckpointError, "is quantised, and the config's ignore names it"),
    ("w4a16", say(ignore=["re:("]), CheckpointError, "is no regex"),
    ("w4a16", say(config_groups={}), CheckpointError, "no group of the config has it as a target"),
    ("w4a16", say(config_groups=[1]), CheckpointError, "config_groups should be an object of objects"),
    ("w4a16", say(sparsity_config={"format": "sparse-24-bitmask"}), UnsupportedArchitecture, "sparsity_config"),
    ("w4a16", say(transform_config={"config_groups": {"a": {}}}), UnsupportedArchitecture, "transform_config"),
    ("w8a8", drop("weight_scale"), CheckpointError, "int8"),
    ("w8a8", put("weight_scale", lambda s: s[:-1]), CheckpointError, r"has shape \(63, 1\), not \(64, 1\)"),
    ("fp8 block", drop("weight_scale_inv"), CheckpointError, "is of f8_e4m3 and has no scale beside it"),
    ("fp8 block", put("weight_scale_inv", lambda s: s[:, :0]), CheckpointError, r"has shape \(1, 0\), not \(1, 1\)"),
    ("fp8 block", say(weight_block_size=[128, 0]), CheckpointError, "two whole numbers above 0"),
    ("fp8 block", put("weight", lambda w: (w.view(torch.uint8) | 0x7F).view(w.dtype)), CheckpointError, "not finite"),
    ("fp8 block", put("weight", lambda w: w.float()), CheckpointError, "weight is f32, not f8_e4m3"),
    ("fp8 tensor", put("weight_scale", lambda s: s * float("inf")), CheckpointError, "not finite"),
    ("mxfp4", put("weight_scale", lambda s: s | 255), CheckpointError, "not finite"),
    ("mxfp4", put("weight_packed", lambda w: w[:, :-1]), CheckpointError, "groups of 32 do not divide the 126 inputs"),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "change", "error", "message"), WRONG)
def test_refused_with_the_reason(write, tmp_path, layout, change, error, message):
    folder = edited(write, layout, tmp_path, change)
    with pytest.raises(error, match=message) as raised:
        load(folder, device="cpu")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("layout", ["gptq", "awq", "w4a16", "w8a8", "fp8 block", "fp8 tensor"])
def test_quantised_weights_of_a_config_that_does_not_say_so(write, tmp_path, layout):
    """It lies in another file, as `quantize_config.json`: what is missing is that, and no tensor."""
    folder = edited(write, layout, tmp_path, lambda *_: None)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    del config["quantization_config"]
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"of quantised weights, and config\.json has no quantization_config"):
        load(folder, device="cpu")


@pytest.mark.parametrize("layout", ["gptq", "gptq v2"])
def test_the_two_names_of_gptqs_format(write, tmp_path, layout):
    """`format`, which new writers have, says what `checkpoint_format` said, in any case."""

    def rename(_, config):
        config["format"] = (config.pop("checkpoint_format", None) or "gptq").upper()

    _, dense = write(layout)
    weights = open_source(edited(write, layout, tmp_path, rename)).weights
    for name, exact in dense.items():
        assert torch.equal(weights.mapped(name, *exact.shape), exact)


def test_which_group_a_linear_belongs_to(write, tmp_path):
    """Of regexes the first in the alphabet, whichever group comes first; before them the name, behind them all linears;
    names are also those of the files. compressed-tensors' order (`match_targets`)."""
    folder, _ = write("w4a16")
    source = open_source(folder)
    about = {name: (shape, source.weights.plain.kinds[name]) for name, shape in source.weights.plain.shapes.items()}
    inside = {name: f"language_model.{name}" for name in about}
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    right = config["config_groups"]["group_0"]
    wrong = right | {"weights": right["weights"] | {"group_size": 64}}
    for targets, others in [
        (["re:.*"], ["re:model.*"]), (["re:.*"], ["Linear"]), (["re:.*"], ["re:x", "re:.*_proj"]),
        ([name.removesuffix(".weight") for name in source.weights.reader.packed], ["re:.*", "Linear"]),
        (["re:language_model\\.model\\..*"], ["Linear"]), (["Linear"], []),
    ]:  # fmt: skip
        groups = [right | {"targets": targets}, wrong | {"targets": others}]
        for order in (groups, groups[::-1]):
            said = config | {"config_groups": {str(i): group for i, group in enumerate(order)}}
            reader = Reader(said, about, source.weights.plain.tensor, folder, inside)
            assert reader.packed.keys() == source.weights.reader.packed.keys()
    for ours, error in ((right, None), (wrong, "has shape")):  # of one target in two groups the last counts
        groups = {
            "0": (wrong if ours is right else right) | {"targets": ["Linear"]},
            "1": ours | {"targets": ["Linear"]},
        }
        with pytest.raises(CheckpointError, match=error) if error else nullcontext():
            Reader(config | {"config_groups": groups}, about, source.weights.plain.tensor, folder, inside)
    ignored = config | {"ignore": ["re:language_model.*q_proj"]}
    with pytest.raises(CheckpointError, match="ignore names it"):
        Reader(ignored, about, source.weights.plain.tensor, folder, inside)
    with pytest.raises(CheckpointError, match="no group"):
        Reader(config | {"config_groups": {}}, {"weight_scale": ((1,), "F32")}, source.weights.plain.tensor, folder)


def test_mxfp4_to_the_ends_of_its_range():
    """All numbers at all exponents, exactly, down to what is subnormal."""
    exponents = torch.arange(250, dtype=torch.uint8)[:, None]  # beyond, 6 is infinite in float32
    blocks = torch.arange(16, dtype=torch.uint8).repeat(250, 1)
    blocks = (blocks | blocks.flip(1) << 4).contiguous()
    q = from_mxfp4(blocks, exponents)
    values = E2M1.double()[torch.stack([blocks & 15, blocks >> 4], -1).view(250, 32).long()]
    assert torch.equal(q.dense().double(), values * torch.exp2(exponents.double() - 127))


@needs_kernels
def test_every_number_of_fp8_on_every_instruction_set():
    """A product with one input that is 1 gives the weight itself."""
    from outrider.ops import Quantized

    codes = torch.tensor([n for n in range(256) if n & 0x7F != 0x7F], dtype=torch.uint8)
    values = codes.repeat(32, 1).T.contiguous().view(torch.float8_e4m3fn)
    before = native.active
    try:
        for isa in native.available()[:-1]:
            native.use(isa)
            linear = Linear(Quantized(8, 32, values, torch.ones(254, 1), floats=True))
            for rows in (1, 40):
                products = linear(torch.eye(32)[:1].repeat(rows, 1).bfloat16(), dtype=torch.float32)
                assert torch.equal(products, values[:, 0].float().repeat(rows, 1)), isa
    finally:
        native.use(before)


def test_a_config_that_quantises_nothing_is_said(make_checkpoint, tmp_path, caplog):
    """And then it is the config's dtype that counts."""
    folder = shutil.copytree(make_checkpoint(), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    about = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}}
    (folder / "config.json").write_text(json.dumps(config | about))
    assert LLM(folder, device="cpu").runner.model.dtype == torch.float32
    assert "no tensor is quantised" in caplog.text
