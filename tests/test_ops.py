"""The operations against plain references, and Law 2 on each of them, with as many threads as make trouble."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from outrider import families
from outrider.model import Rotary
from outrider.ops import Linear, argmax
from outrider.ops.elementwise import gated, rotate, swiglu

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@pytest.fixture(autouse=True, params=[1, 4])
def threads(request):
    """More threads than cores: PyTorch splits its work at other places."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    with torch.inference_mode():
        yield
    torch.set_num_threads(before)


def rand(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@DTYPES
@pytest.mark.parametrize(("n", "k"), [(64, 48), (33, 100), (1536, 384)])
def test_linear(dtype, n, k):
    weight, bias, x = rand(n, k, dtype=dtype), rand(n, dtype=dtype), rand(40, k, dtype=dtype)
    linear = Linear(weight.clone(), bias)
    full, exact = linear(x), x.double() @ weight.double().T + bias.double()
    assert torch.allclose(full.double(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * 10)
    for rows in (1, 2, 3, 8, 17, 33):
        assert torch.equal(linear(x[3 : 3 + rows]), full[3 : 3 + rows])


@DTYPES
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_a_gate_far_below_zero_is_shut(dtype, activation):
    gates = torch.tensor([-89.0, -1e4, -1e30, -1e38, -torch.inf], dtype=dtype).repeat(20)
    out = gated(torch.cat([gates, torch.ones_like(gates)])[None], activation)[0].float()
    shut = gates.isfinite()
    assert out[shut].abs().max() < 1e-35 and out[~shut].isnan().all()


@DTYPES
@pytest.mark.parametrize("width", [96, 100, 4864, 8960])
def test_swiglu(dtype, width):
    x = rand(70, 2 * width, dtype=dtype)
    full = swiglu(x)
    assert torch.allclose(full.double(), (F.silu(x[:, :width].double()) * x[:, width:].double()), rtol=2e-2, atol=2e-2)
    for rows in (*range(1, 34), 64):
        assert torch.equal(swiglu(x[5 : 5 + rows]), full[5 : 5 + rows])


@DTYPES
@pytest.mark.parametrize(("heads", "dim"), [(8, 64), (28, 64), (40, 80)])
def test_rotate(dtype, heads, dim):
    x, cos, sin = rand(70, heads, dim, dtype=dtype), rand(70, 1, dim, dtype=dtype), rand(70, 1, dim, dtype=dtype)
    full = rotate(x, cos, sin)
    low, high = x.double().chunk(2, -1)
    exact = x.double() * cos.double() + torch.cat([high, low], -1) * sin.double()
    assert torch.allclose(full.double(), exact, rtol=2e-2, atol=2e-2)
    for rows in (1, 2, 7, 16, 18, 19, 33):
        part = slice(4, 4 + rows)
        assert torch.equal(rotate(x[part], cos[part], sin[part]), full[part])


@DTYPES
@pytest.mark.parametrize("kind", ["default", "dynamic"])
def test_rotary_tables(dtype, kind):
    """A position's rotation does not depend on which others are asked for, past the original length included."""
    shape = {
        "architectures": ["LlamaForCausalLM"], "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 8,
        "hidden_size": 80, "intermediate_size": 8, "max_position_embeddings": 600,
        "rope_scaling": {"rope_type": kind, "factor": 3.0},
    }  # fmt: skip
    rotary = Rotary(families.read(shape), dtype, torch.device("cpu"))
    positions = list(range(480, 680))
    cos, sin = rotary(positions, [p + 1 for p in positions])
    for i in (0, 31, 32, 33, 119, 121, 199):
        one = rotary(positions[i : i + 1], [positions[i] + 1])
        assert torch.equal(one[0][0], cos[i]) and torch.equal(one[1][0], sin[i])
    angle = torch.tensor(480.0) * rotary.inv
    assert torch.allclose(cos[0, 0, :20].double(), angle.cos().double(), atol=1e-2)


@pytest.mark.parametrize("width", [1, 3, 16, 100, 4097])
def test_argmax(width):
    """As torch's, the first of several; -1 for what cannot be compared or is infinite, wherever it lies."""
    x = torch.randn(9, width, generator=torch.Generator().manual_seed(width)).round(decimals=1)
    assert argmax(x) == x.argmax(-1).tolist()
    assert argmax(x[:, : max(1, width - 1)]) == x[:, : max(1, width - 1)].argmax(-1).tolist()
    for odd in (torch.nan, torch.inf):
        for at in {0, width // 2, width - 1}:
            y = x.clone()
            y[3, at] = odd
            assert argmax(y) == [*argmax(x)[:3], -1, *argmax(x)[4:]]
    x[5] = -torch.inf
    assert argmax(x)[5] == -1
    x[5, width - 1] = -3.0
    assert argmax(x)[5] == width - 1
    assert argmax(x[:0]) == []
