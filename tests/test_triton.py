"""The GPU kernels in Triton's interpreter: indices, masks, paging, trees and orders, on small shapes.

It computes sums in other orders than a GPU, and one program after another: bits, races and sizes are for
test_triton_compile.py and for `outrider bench gpu`. With TRITON_INTERPRET=0 all of it runs on a GPU.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from itertools import chain

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from outrider.ops import Linear, Quantized, native
from outrider.ops.elementwise import pick
from outrider.ops.triton import launch, plan
from outrider.ops.triton.graph import bucket
from outrider.quantize import quantize, rounded
from outrider.sampling import gumbel, noise_key

HERE = torch.device("cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda")
# its interpreter multiplies and adds with two roundings there, as no GPU does
TWICE = os.environ["TRITON_INTERPRET"] == "1" and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
ROWS = (1, 2, 7, 16, 64)
EPSILON = {torch.bfloat16: 2**-8, torch.float16: 2**-11}


def rand(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(HERE, dtype)


def close(y, exact, dtype):
    """Whether y is the exact result but for one rounding and a little for the order of sums."""
    return bool(((y.double() - exact).abs() <= EPSILON[dtype] * exact.abs() * 1.01 + 2e-5 * exact.abs().max()).all())


def guarded(x):
    """x between rows of NaN: whoever reads beyond its ends finds them."""
    whole = torch.full((len(x) + 4, *x.shape[1:]), torch.nan, dtype=x.dtype, device=HERE)
    whole[2:-2] = x
    return whole[2:-2]


# --- products ---------------------------------------------------------------------------------------------------------


def product(x, weights, bias=None, residual=None, gated=False, dtype=None):
    y = torch.full((len(x) + 2, weights.outs // (1 + gated)), torch.nan, dtype=dtype or x.dtype, device=HERE)
    launch.product(x, weights, y[1:-1], bias, residual, gated)
    assert y[0].isnan().all(), "rows before the first are written"
    assert y[-1].isnan().all(), "rows behind the last are written"
    return y[1:-1]


def same_in_company(x, compute):
    """Whether rows have the bits of all rows together in every company; computes these."""
    full = compute(x)
    for n in (n for n in ROWS if n < len(x)):
        at = min(3, len(x) - n)
        assert torch.equal(compute(guarded(x[at : at + n])), full[at : at + n]), n
    return full


beginnings, pieces = launch.load().beginnings, launch.load().pieces


@triton.jit
def began(offsets, outs, K, per, BK: tl.constexpr):
    own = beginnings(tl.program_id(0) * 64, outs, K, tl.program_id(1) * per, 64, BK)
    at = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * 256 + tl.arange(0, 256)
    tl.store(offsets + at, own)


@pytest.mark.parametrize(("n", "k"), [(8, 64), (33, 128), (96, 256), (70, 1280)])
def test_what_is_fetched_early_is_of_the_weights(n, k):
    """The beginning of each output's share, 1 KB of it or as much as there is; nothing before or behind the weights."""
    depth = 128 if k >= 128 else 64
    shares, tiles = max(1, k // 640), -(-n // 64)
    offsets = torch.empty(tiles, shares, 64, 4, dtype=torch.int64, device=HERE)
    began[tiles, shares](offsets, n, k, 5, depth)
    for share in range(shares):
        column = torch.arange(4, device=HERE) * 128 + share * 5 * depth
        column = column.clamp(max=k - depth)
        wanted = torch.arange(tiles * 64, device=HERE).clamp(max=n - 1)[:, None] * k + column
        assert torch.equal(offsets[:, share].flatten(0, 1), wanted)
        assert (wanted >= 0).all()
        assert (wanted + depth <= n * k).all()


@triton.jit
def began_in_pieces(offsets, outs, last, per, WIDTH: tl.constexpr, WIDE: tl.constexpr):
    first = tl.program_id(1) * per
    own = pieces(tl.program_id(0) * 64, outs, first, tl.minimum(first + per, last), WIDTH, WIDE, 64)
    tl.store(offsets + (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * 128 + tl.arange(0, 128), own)


@pytest.mark.parametrize(("n", "groups", "width"), [(8, 2, 16), (33, 3, 8), (130, 48, 128), (4096, 20, 64)])
def test_what_is_fetched_early_of_few_bits(n, groups, width):
    """The first 32 KB of a share, line after line of a tile's outputs, or as much as there is; nothing else."""
    wide, shares, tiles = min(width, 16), 2, -(-n // 64)
    per, line = -(-groups // shares), max(1, 64 * wide // 256)
    offsets = torch.empty(tiles, shares, 128, dtype=torch.int64, device=HERE)
    began_in_pieces[tiles, shares](offsets, n, groups, per, width, wide)
    for tile in range(tiles):
        for share in range(shares):
            j, at = torch.arange(128), min(per, groups - share * per) * width // wide
            piece = share * per * width // wide + (j // line).clamp(max=at - 1)
            wanted = piece * n * wide + (tile * 64 * wide + j % line * 256).clamp(max=n * wide - 4)
            assert torch.equal(offsets[tile, share].cpu(), wanted)
            assert (wanted + 4 <= n * groups * width).all()


@pytest.mark.parametrize("kind", ["plain", "int4"])
def test_shares_in_one_program(kind, monkeypatch):
    """Where rows give programs to all processors, each takes all shares: the bits of those that are gathered, and but
    for float32's last ones what float64 gives, offsets and all."""
    monkeypatch.setattr(launch, "LEAST", 64)
    launch.order.cache_clear()
    x, w, bias = rand(20, 640, dtype=torch.bfloat16), rand(40, 640, dtype=torch.bfloat16), rand(40)
    weight = w if kind == "plain" else quantised(kind, 40, 640)
    weights = launch.pack(weight, HERE)
    found = []
    for processors, wider in ((132, 1), (1, 132)):
        monkeypatch.setitem(launch.TABLE, 90, replace(launch.TABLE[90], processors=processors))
        monkeypatch.setattr(launch, "AT_WORK", tuple(wider * n for n in launch.AT_WORK))
        launch.order.cache_clear()
        assert launch.order(40, 640, weights.group, 90, weights.halves).shares > 3
        found.append(product(x, weights, bias, dtype=torch.float32))
    launch.order.cache_clear()
    assert torch.equal(*found)
    exact = x.double() @ (w if kind == "plain" else weight.dense()).double().T + bias.double()
    off = 1e-5 if HERE.type == "cpu" else 1e-3  # a GPU's matrix units drop what falls below their sums
    assert torch.allclose(found[0].double(), exact, rtol=off, atol=off)


@pytest.mark.parametrize("least", [10**6, 64], ids=["whole", "shares"])
@pytest.mark.parametrize(("n", "k", "dtype"), [(96, 256, torch.bfloat16), (33, 100, torch.float16)])
def test_product(dtype, n, k, least, monkeypatch):
    """Of all rows at once what float64 gives, and of some rows the same bits."""
    monkeypatch.setattr(launch, "LEAST", least)
    launch.order.cache_clear()
    x, w, bias = rand(70, k, dtype=dtype), rand(n, k, dtype=dtype), rand(n, dtype=dtype)
    weights = launch.Weights(guarded(w), n, k)
    assert (launch.order(n, k, None, 90).shares > 1) == (least == 64 and k > 128)
    full = same_in_company(x, lambda x: product(x, weights, bias))
    launch.order.cache_clear()
    assert close(full, x.double() @ w.double().T + bias.double(), dtype)


@HALVES
@pytest.mark.parametrize("least", [10**6, 64], ids=["whole", "shares"])
def test_gate_bias_and_residual(dtype, least, monkeypatch):
    monkeypatch.setattr(launch, "LEAST", least)
    launch.order.cache_clear()
    x, w, bias, residual = (rand(*s, dtype=dtype) for s in ((9, 256), (2 * 80, 256), (2 * 80,), (9, 80)))
    weights = launch.Weights(w * 0.1, 160, 256)
    y = product(x, weights, bias, residual, gated=True)
    gate, up = (x.double() @ (w * 0.1).double().T + bias.double()).chunk(2, 1)
    assert close(y, F.silu(gate) * up + residual.double(), dtype)
    floats = product(x, weights, bias, gated=True, dtype=torch.float32)
    assert torch.allclose(floats.double(), F.silu(gate) * up, rtol=1e-4, atol=1e-4)
    launch.order.cache_clear()


def some(low, high, *shape):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(1)).to(HERE, torch.int8)


def moved(part, device):
    """A Quantized on another device."""
    if isinstance(part, Quantized):
        return replace(part, **{name: moved(own, device) for name, own in vars(part).items()})
    if isinstance(part, tuple):
        return tuple(moved(own, device) for own in part)
    return part.to(device) if isinstance(part, torch.Tensor) else part


def quantised(name, n, k, seed=0):
    """Weights of each kind that checkpoints bring."""
    w, factors = rand(n, k, seed=seed), (lambda group, dtype: (rand(n, -(-k // group), seed=5) * 0.01).to(dtype))
    match name:
        case "int8" | "int4":
            return moved(quantize(w, name), HERE)
        case "symmetric":
            own = rounded(w[:, : k // 32 * 32].cpu(), 4, 32, True, torch.float16)
            return moved(Quantized(4, 32, own.values, own.scales), HERE)
        case "zeros":
            zeros = some(0, 16, n, -(-k // 128))
            return Quantized(4, 128, some(0, 16, n, k), factors(128, torch.float16), signed=False, zeros=zeros)
        case "zeros8":
            zeros = some(-8, 8, n, -(-k // 64))
            return Quantized(8, 64, some(-100, 100, n, k), factors(64, torch.float32), zeros=zeros)
        case "order":
            order = torch.randperm(k, generator=torch.Generator().manual_seed(2)).int().to(HERE)
            return replace(moved(quantize(w, "int8"), HERE), order=order)
        case "q5_k":
            fine, coarse = some(0, 64, n, -(-k // 32)), (rand(n, -(-k // 256)) * 0.001).half()
            return Quantized(5, 32, some(0, 32, n, k), (fine, coarse), (fine.flip(1), -coarse), signed=False)
        case "q6_k":
            return Quantized(
                6, 16, some(-32, 32, n, k), (some(-99, 99, n, -(-k // 16)), (rand(n, -(-k // 256)) * 0.001).half())
            )
        case "fine":
            return Quantized(4, 16, some(-8, 8, n, k), factors(16, torch.bfloat16))
        case "fp8":
            return Quantized(8, 128, w.to(torch.float8_e4m3fn), factors(128, torch.float32), floats=True)
        case "fp4":
            levels = torch.tensor(
                [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8, device=HERE
            )
            return Quantized(4, 32, levels[some(0, 16, n, k).long()], factors(32, torch.float32), floats=True)
    raise AssertionError(name)


KINDS = ["int8", "int4", "symmetric", "zeros", "zeros8", "order", "q5_k", "q6_k", "fp8", "fp4"]
WHOLE = [*KINDS[:-2], "fine"]  # integers, which rounded rows are multiplied with


@pytest.mark.parametrize("kind", KINDS)
def test_quantised(kind):
    """Of every format what its dense weights give in float64, and of some rows the same bits; groups may be short."""
    n, k = 33, 64 if kind == "q6_k" else 96
    q = quantised(kind, n, k)
    x, weights = rand(17, k, dtype=torch.bfloat16), launch.pack(q, HERE)
    full = same_in_company(x, lambda x: product(x, weights))
    assert close(full, x.double() @ q.dense().double().T, torch.bfloat16)


def integers(x, group):
    """Rows as csrc/integers.h rounds them: integers (rows, groups, group), and the steps (rows, groups, 1) float32."""
    x = F.pad(x.float(), (0, -x.shape[1] % group)).view(len(x), -1, group)
    most = x.abs().amax(-1, keepdim=True)
    top = torch.full_like(most, 127)  # a tensor: by a number, PyTorch multiplies with its inverse
    by = torch.where(most < 2.0**-100, torch.zeros_like(most), top / most)
    return (x * by).round(), most / top


@pytest.mark.skipif(TWICE, reason="needs Triton 3.9")
@pytest.mark.parametrize("kind", WHOLE)
def test_rounded_rows(kind):
    """Integers, steps and sums are those of the definition, the product of float64 follows, whatever the company; and
    where K is not cut, what the CPU's kernels give, bit for bit."""
    n, k = 33, 64 if kind == "q6_k" else 96
    q = quantised(kind, n, k)
    x, weights = rand(17, k, dtype=torch.bfloat16), launch.pack(q, HERE, rounded=True)
    assert weights.rounded
    x[2], x[3, :32] = 1e-35, 0
    own = x if q.order is None else x[:, q.order.long()]
    whole, steps = integers(own, q.group)
    y, sums, _ = launch.entered(own.contiguous(), weights)
    if weights.code != launch.BYTES:  # halves of a group take turns
        y[..., : q.group] = torch.cat([y[..., : q.group : 2], y[..., 1 : q.group : 2]], -1)
    assert torch.equal(y[..., : q.group].float(), whole)
    assert not y[..., q.group :].any()
    assert torch.equal(sums[..., :1], steps)
    assert torch.equal(sums[..., 1:], steps * whole.sum(-1, keepdim=True))
    full = same_in_company(x, lambda x: product(x, weights, dtype=torch.float32))
    plain = replace(q, order=None).dense().double()
    assert torch.allclose(full.double(), (whole * steps.double()).flatten(1)[:, :k] @ plain.T, rtol=1e-4, atol=1e-5)
    if native.active != native.REFERENCE:
        assert torch.equal(full.cpu(), Linear(moved(q, "cpu"), rounded=True)(x.cpu(), dtype=torch.float32))
    x[1, 5], x[4, k - 1] = torch.inf, torch.nan
    odd = product(x, weights, dtype=torch.float32)
    assert not odd[[1, 4]].isfinite().any()
    assert torch.equal(odd[5:], full[5:])


def test_rounded_rows_of_shares(monkeypatch):
    """Gated, with bias, K cut in shares: near the CPU's, which has one order over all of K."""
    monkeypatch.setattr(launch, "LEAST", 64)
    launch.order.cache_clear()
    q, bias = quantised("int4", 160, 256), rand(160, dtype=torch.bfloat16)
    x, weights = rand(5, 256, dtype=torch.bfloat16), launch.pack(q, HERE, rounded=True)
    y = product(x, weights, bias, gated=True, dtype=torch.float32)
    assert launch.order(160, 256, 32, 90).shares > 1
    launch.order.cache_clear()
    whole, steps = integers(x, 32)
    gate, up = ((whole * steps.double()).flatten(1) @ q.dense().double().T + bias.double()).chunk(2, 1)
    assert torch.allclose(y.double(), F.silu(gate) * up, rtol=1e-4, atol=1e-4)


def test_floats_are_not_rounded():
    """Nor what has no groups."""
    for kind in ("fp8", "fp4"):
        assert not launch.pack(quantised(kind, 33, 96), HERE, rounded=True).rounded
    assert not launch.pack(rand(33, 96), HERE, rounded=True).rounded


def test_numbers_of_eight_bits_are_exact():
    """All finite E4M3 numbers, subnormal ones too, and all E2M1 numbers; each times one."""
    every = torch.arange(256, dtype=torch.uint8, device=HERE)
    every = every[(every & 127) < 127].view(torch.float8_e4m3fn)
    eight = Quantized(
        8, 32, every[:, None].repeat(1, 32).contiguous(), torch.ones(len(every), 1, device=HERE), floats=True
    )
    x = torch.zeros(1, 32, dtype=torch.bfloat16, device=HERE)
    x[0, 3] = 1
    assert torch.equal(product(x, launch.pack(eight, HERE), dtype=torch.float32)[0], every.float())


def assembled(text, registers, dtype):
    """What inline assembly leaves in its registers (32 bits each, of many lanes), by the rules of PTX."""
    held, whole = dict(registers), 0xFFFFFFFF

    def value(name):
        return held[name] if name in held else torch.tensor(int(name, 0))

    def pair(x):
        return torch.stack([x & 0xFFFF, x >> 16], -1).to(torch.uint16).view(dtype).double()

    for line in text.strip("{} \n").split(";")[:-1]:
        name, *rest = line.replace(",", " ").split()
        if name == ".reg":
            continue
        to, a, b, c = rest[0], *(value(x) for x in rest[1:4]), *[torch.tensor(0)] * (4 - len(rest))
        match name:
            case "mov.b32":
                held[to] = a
            case "and.b32":
                held[to] = a & b
            case "xor.b32":
                held[to] = a ^ b
            case "shr.u32":
                held[to] = a >> b
            case "lop3.b32":
                table, on = int(rest[4], 0), 0
                for i in range(8):
                    if table >> i & 1:
                        on |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
                held[to] = on & whole
            case "prmt.b32":
                eight, on = a | b << 32, 0  # none of ours has a byte above the seventh's sign
                for i in range(4):
                    on = on | (eight >> 8 * (int(c) >> 4 * i & 7) & 255) << 8 * i
                held[to] = on
            case "fma.rn.bf16x2" | "add.rn.f16x2":
                exact = pair(a) * pair(b) + pair(c) if name[0] == "f" else pair(a) + pair(b)
                assert torch.equal(exact.to(dtype).double(), exact), "no operation of these rounds"
                low, high = exact.to(dtype).view(torch.int16).long().unbind(-1)
                held[to] = low & 0xFFFF | (high & 0xFFFF) << 16
            case _:
                raise AssertionError(line)
    return held, pair


@HALVES
def test_assembly(dtype):
    """Of every byte, at each place of a register, the exact number: which the interpreter does not run."""
    kernels = launch.load()
    every = torch.arange(256)
    codes = torch.stack([every, every.flip(0), every.roll(77), every ^ 0x5A], -1)
    word = (codes << torch.tensor([0, 8, 16, 24])).sum(-1)
    tail = "" if dtype == torch.bfloat16 else "16"
    held, pair = assembled(getattr(kernels, "WHOLE" + tail).value, {"$2": word}, dtype)
    assert torch.equal(torch.cat([pair(held["$0"]), pair(held["$1"])], -1), codes.to(torch.int8).double())
    base = 128 if dtype == torch.bfloat16 else 1024
    for name, signed in (("HALVES", False), ("SIGNED_HALVES", True)):
        for zero in (0, 1, 15, 16):
            less = torch.tensor([-base - 8 * signed - zero, -base - 8 * signed], dtype=dtype)
            less = (less.view(torch.int16).long() & 0xFFFF) * 0x10001  # the first two bytes have a zero
            given = {"$4": word, "$5": less[0].expand(256), "$6": less[1].expand(256)}
            held, pair = assembled(getattr(kernels, name + tail).value, given, dtype)
            zeros = torch.tensor([zero, zero, 0, 0])
            for at, half in (("$0", codes & 15), ("$2", codes >> 4)):
                own = (half ^ 8) - 8 if signed else half
                found = torch.cat([pair(held[at]), pair(held["$" + str(int(at[1]) + 1)])], -1)
                assert torch.equal(found, (own - zeros).double()), (name, zero, at)


def test_bfloat16_is_rounded_to_nearest():
    """The interpreter truncates; ours must not: halves go to even, NaN stays NaN, what is too large is infinite."""
    bits = torch.arange(0, 2**32, 65537 * 3, dtype=torch.int64, device=HERE)
    x = torch.cat([bits, bits | 0x8000, bits & ~0x7FFF]).to(torch.int32).view(torch.float32)[None]
    kernels = launch.load()
    triton, tl = kernels.triton, kernels.tl

    @triton.jit
    def copy(x, y, N: tl.constexpr):
        at = tl.program_id(0) * N + tl.arange(0, N)
        tl.store(y + at, round_it(tl.load(x + at), y.dtype.element_ty, True))  # noqa: F821

    copy.fn.__globals__.update(round_it=kernels.rounded, tl=tl)
    n = x.numel() // 1024 * 1024
    y = torch.empty(n, dtype=torch.bfloat16, device=HERE)
    copy[n // 1024,](x, y, 1024)
    want = x[0, :n].bfloat16()
    assert torch.equal(y.isnan(), want.isnan())
    assert torch.equal(y.nan_to_num(0), want.nan_to_num(0))


def test_columns_of_the_table():
    capabilities = [80, 86, 89, 90, 100, 103, 110, 120, 121]
    assert [launch.column(c) for c in capabilities] == [80, 80, 80, 90, 100, 100, 80, 80, 80]


def test_order_of_sums_knows_no_rows():
    """What fixes a row's bits follows from the weight; tiles of rows only from their number."""
    for arch, machine in launch.TABLE.items():
        for n, k in [(4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (128256, 4096), (1024, 1024)]:
            for group in (None, 32, 64, 128):
                o = launch.order(n, k, group, arch)
                assert o.shares * o.per >= -(-k // o.depth) > (o.shares - 1) * o.per
        assert [launch.rows_tile(r, machine) for r in (1, 16, 17, 64, 65, 4096)] == [16, 16, 32, 64, 128, 128]


# --- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "dtype"), [(100, torch.float16), (3000, torch.bfloat16)])
def test_rms_norm(dtype, width):
    x, weight = rand(17, width, dtype=dtype), rand(width, dtype=dtype)
    full = same_in_company(x, lambda x: launch.rms_norm(x, weight, 1e-5))
    assert close(full, F.rms_norm(x.double(), (width,), weight.double(), 1e-5), dtype)


@pytest.mark.parametrize("norms", [False, True])
def test_rope(norms):
    dtype, dim, heads, kv_heads, n = torch.bfloat16, 80, 2, 1, 5
    angles = rand(n, dim // 2).repeat(1, 2)
    cos, sin = (
        angles.cos().to(dtype),
        (angles.sin() * torch.tensor([-1.0, 1.0], device=HERE).repeat_interleave(dim // 2)).to(dtype),
    )
    qkv, both = rand(n, (heads + 2 * kv_heads) * dim, dtype=dtype), (rand(dim, dtype=dtype), rand(dim, dtype=dtype))

    def turned(rows):
        out = qkv[rows].clone()
        launch.rope(out, heads, kv_heads, cos[rows], sin[rows], both if norms else None, 1e-6)
        return out

    full, x = turned(slice(None)), qkv.view(n, -1, dim).double()
    for rows in (slice(0, 1), slice(2, 5)):
        assert torch.equal(turned(rows), full[rows])
    if norms:
        x = torch.cat([
            F.rms_norm(x[:, :heads], (dim,), both[0].double(), 1e-6),
            F.rms_norm(x[:, heads : heads + kv_heads], (dim,), both[1].double(), 1e-6), x[:, heads + kv_heads :],
        ], 1)  # fmt: skip
    exact = x.clone()
    own = x[:, : heads + kv_heads]
    exact[:, : heads + kv_heads] = own * cos.double()[:, None] + own.roll(dim // 2, -1) * sin.double()[:, None]
    assert torch.allclose(full.view(n, -1, dim).double(), exact, rtol=0.02, atol=0.02)
    assert torch.equal(full.view(n, -1, dim)[:, heads + kv_heads :], qkv.view(n, -1, dim)[:, heads + kv_heads :])


# --- attention --------------------------------------------------------------------------------------------------------

HEADS, KV_HEADS, DIM, SLAB = 8, 2, 16, 128
STEP = plan.queries_tile(HEADS // KV_HEADS, DIM) // (HEADS // KV_HEADS)


@dataclass
class Rows:
    row: int
    n: int
    start: int
    parents: list[int] | None = None


class Keys:
    """Sequences in pages of a pool, filled with NaN but for what is stored; `seed` deals the pages."""

    def __init__(self, lengths, dtype, seed=0, capacity=512):
        self.dtype, pages = dtype, -(-capacity // 32)
        order = torch.randperm(pages * len(lengths), generator=torch.Generator().manual_seed(seed)).int()
        self.tables = list(order.view(len(lengths), pages))
        self.slabs = torch.full((-(-len(order) * 32 // SLAB), 2, KV_HEADS, SLAB, DIM), torch.nan).to(HERE, dtype)
        for seq, length in enumerate(lengths):
            for slot in range(length):
                self.at(seq, slot).copy_(rand(2, KV_HEADS, DIM, seed=1000 * seq + slot))

    def at(self, seq, slot):
        page = int(self.tables[seq][slot // 32])
        return self.slabs[page * 32 // SLAB][:, :, page * 32 % SLAB + slot % 32]

    def attend(self, q, k, v, rows, window=None, sinks=None, softcap=None):
        """rows: (sequence, Rows)."""
        addresses = torch.tensor([slab.data_ptr() for slab in self.slabs], device=HERE)
        tables = [self.tables[seq][: -(-(r.start + r.n) // 32)] for seq, r in rows]
        made = plan.make([r for _, r in rows], tables, [(0, SLAB)] * len(rows), STEP, HERE)
        return launch.attend(q, k, v, addresses, made, window, DIM**-0.5, sinks, softcap)

    def exact(self, q, seq, slots, sinks=None, softcap=None):
        """Of one row (heads, dim), by float64."""
        keys, values = torch.stack([self.at(seq, slot) for slot in slots]).double().unbind(1)
        group = HEADS // KV_HEADS
        keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
        scores = torch.einsum("hd,shd->hs", q.double(), keys) * DIM**-0.5
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        if sinks is not None:  # a key without a value
            scores, values = torch.cat([sinks.double()[:, None], scores], 1), F.pad(values, (0, 0, 0, 0, 1, 0))
        weights = scores.softmax(-1)
        return torch.einsum("hs,shd->hd", weights, values).flatten()


def new(n, dtype, seed=0):
    return [rand(n, heads, DIM, dtype=dtype, seed=seed) for heads in (HEADS, KV_HEADS, KV_HEADS)]


@pytest.fixture(params=[(512, 32, 512), (64, 1, 128)], ids=["span", "spans"])
def span(request, monkeypatch):
    """Contexts of one span and of many, of which some are combined at a time."""
    monkeypatch.setattr(plan, "SPANS", plan.Spans(*request.param))
    monkeypatch.setattr(launch, "FOLDED", 2)
    monkeypatch.setattr(launch, "MERGED", 2)


TREE = [-1, 0, 0, 1, 3, 2]
PATHS = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 3, 4], [0, 2, 5]]


@pytest.mark.parametrize(
    ("dtype", "window", "start"),
    [(torch.bfloat16, None, 0), (torch.bfloat16, None, 190), (torch.bfloat16, 40, 95), (torch.float16, None, 31)],
)
def test_attention(dtype, window, start, span):
    """Chains and trees against float64, and each branch against the same tokens as a chain, bit for bit."""
    q, k, v = new(len(TREE), dtype)
    keys = Keys([start], dtype)
    y = keys.attend(q, k, v, [(0, Rows(0, len(TREE), start, TREE))], window)
    for i, path in enumerate(PATHS):
        slots = ([*range(start)] + [start + j for j in path])[-(window or 10**6) :]
        assert torch.allclose(y[i].double(), keys.exact(q[i], 0, slots), rtol=0.02, atol=0.01), i
    for path in ([0, 1, 3, 4], [0, 2, 5]):
        other = Keys([start], dtype, seed=7)  # pages dealt anew
        chain = other.attend(q[path], k[path], v[path], [(0, Rows(0, len(path), start))], window)
        assert torch.equal(chain, y[path])
        alone = Keys([start], dtype, seed=9)
        for at, i in enumerate(path):  # plain decoding: one by one
            own = slice(i, i + 1)
            assert torch.equal(alone.attend(q[own], k[own], v[own], [(0, Rows(0, 1, start + at))], window)[0], y[i])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("odd", [torch.inf, -torch.inf, torch.nan])
def test_values_that_are_not_finite_reach_only_who_sees_them(dtype, odd):
    """A later row's, and a branch's, which share tiles with rows that do not see them."""
    q, k, v = new(len(TREE), dtype)
    clean = Keys([70], dtype).attend(q, k, v, [(0, Rows(0, len(TREE), 70, TREE))])
    v[1, 0, 3] = odd
    y = Keys([70], dtype).attend(q, k, v, [(0, Rows(0, len(TREE), 70, TREE))])
    for i, path in enumerate(PATHS):
        heads = y[i].view(KV_HEADS, -1)
        assert not (1 in path and heads[0].isfinite().any()), i
        assert torch.equal(heads[1:], clean[i].view(KV_HEADS, -1)[1:]), "the other head"
        assert 1 in path or torch.equal(y[i], clean[i])
    chain = Keys([70], dtype).attend(q, k, v, [(0, Rows(0, len(TREE), 70))])
    assert chain[0].isfinite().all()
    assert not chain[1:].view(len(TREE) - 1, KV_HEADS, -1)[:, 0].isfinite().any()


def test_spans():
    """Each position is in one span, they follow each other, and a tree's paths touch no more of them than it says."""
    spans = plan.Spans(64, 3, 256)
    found = [spans.of(position) for position in range(1000)]
    assert found == [*(i // 64 for i in range(192)), *(3 + i // 256 for i in range(808))]
    rows = Rows(0, 3, plan.SPANS.near - 2, [-1, 0, 0])
    made = plan.make([rows], [torch.zeros(9).int()], [(0, SLAB)], STEP, HERE)
    assert (made.reach, made.spans) == (2, 1)
    assert made.tiles.tolist() == [[0, 0, SLAB, 0, 3, rows.start, rows.start + 2, rows.start]]


def test_more_room_for_spans_changes_no_bit(monkeypatch):
    """What a graph rounds up: rows, tiles, spans, pages and paths."""
    monkeypatch.setattr(plan, "SPANS", plan.Spans(64, 1, 128))
    monkeypatch.setattr(launch, "FOLDED", 2)
    monkeypatch.setattr(launch, "MERGED", 2)
    dtype, make = torch.bfloat16, plan.make
    for parents in (None, TREE, [-1, 0, 1, 2, 3, 4]):
        q, k, v = (torch.cat([x, rand(2, *x.shape[1:], dtype=dtype)]) for x in new(6, dtype))
        rows = [(0, Rows(0, 6, 190, parents))]
        plain = Keys([190], dtype).attend(q[:6], k[:6], v[:6], rows)
        with monkeypatch.context() as patch:
            patch.setattr(plan, "make", lambda *given: make(*given, rows=8))
            padded = Keys([190], dtype, seed=4).attend(q, k, v, rows)
        assert torch.equal(padded[:6], plain)
        assert not padded[6:].any()


@pytest.mark.parametrize("window", [None, 100])
def test_spans_of_one_program(window, span, monkeypatch):
    """Each program takes one span, or some, which it adds itself: the same bits."""
    q, k, v = new(12, torch.bfloat16)
    rows, sinks = [(0, Rows(0, 9, 500)), (1, Rows(9, 3, 40))], rand(HEADS)
    found = []
    for processors in (10**6, 1):
        monkeypatch.setitem(launch.TABLE, 90, replace(launch.TABLE[90], processors=processors))
        found.append(Keys([500, 40], torch.bfloat16, capacity=544).attend(q, k, v, rows, window, sinks))
    assert torch.equal(*found)


def test_sinks_and_softcap(span):
    """Of gpt-oss and Gemma: a key that all see and nobody reads, and scores that do not grow."""
    q, k, v = (3 * x for x in new(2, torch.bfloat16))
    sinks, keys = rand(HEADS), Keys([70], torch.bfloat16)
    y = keys.attend(q, k, v, [(0, Rows(0, 2, 70))], None, sinks, 2.0)
    for i in range(2):
        exact = keys.exact(q[i], 0, range(71 + i), sinks, 2.0)
        assert torch.allclose(y[i].double(), exact, rtol=0.02, atol=0.02)


def test_rows_in_company():
    """A sequence's rows beside others, and more of them than one tile takes."""
    dtype, lengths = torch.bfloat16, [100, 3, 64]
    q, k, v = new(25, dtype)
    rows = [(0, Rows(0, 16, 100)), (1, Rows(16, 6, 3, TREE)), (2, Rows(22, 3, 64))]
    whole = Keys(lengths, dtype).attend(q, k, v, rows)
    for seq, r in rows:
        for n in {1, 7, r.n} if r.n > 7 else {r.n}:
            own = slice(r.row, r.row + n)
            alone = Keys(lengths, dtype, seed=3).attend(q[own], k[own], v[own], [(seq, replace(r, row=0, n=n))])
            assert torch.equal(alone, whole[own])


def test_long_prompts_are_read_in_pieces(monkeypatch):
    """What spans put aside is bounded; a row's bits do not know."""
    dtype = torch.bfloat16
    q, k, v = new(18, dtype)
    rows = [(0, Rows(0, 12, 10)), (1, Rows(12, 6, 40))]
    whole = Keys([10, 40], dtype).attend(q, k, v, rows)
    monkeypatch.setattr(launch, "PARTS", 1)
    made = plan.make([r for _, r in rows], [torch.zeros(2).int()] * 2, [(0, SLAB)] * 2, STEP, HERE)
    assert [(a, b) for a, b, _ in made.pieces(9)] == [(0, 8), (8, 12), (12, 18)]
    assert torch.equal(Keys([10, 40], dtype).attend(q, k, v, rows), whole)


def test_graphs_are_few():
    """Of one text of up to 1000 tokens, with chains and trees of up to 15 nodes: as each size takes a graph."""
    sizes, tree = set(), [-1, 0, 0, 1, 1]
    for start in range(1, 1000, 45):
        table = torch.zeros(-(-(start + 16) // plan.PAGE), dtype=torch.int32)
        for own in [*(Rows(0, n, start) for n in range(1, 17)), Rows(0, 5, start, tree)]:
            made = plan.make([own], [table], [(0, SLAB)], STEP, HERE, bucket(own.n))
            sizes.add((made.sizes, made.spans))
    assert len(sizes) <= 7


def test_nothing_is_written_elsewhere():
    """New keys go to their slots; all others, and rows of padding, stay as they are."""
    keys, dtype = Keys([40, 10], torch.bfloat16), torch.bfloat16
    before = keys.slabs.clone()
    q, k, v = new(5, dtype)
    keys.attend(q, k, v, [(0, Rows(0, 3, 40)), (1, Rows(3, 2, 10))])
    for seq, slot, row in [(0, 40, 0), (0, 42, 2), (1, 10, 3), (1, 11, 4)]:
        assert torch.equal(keys.at(seq, slot), torch.stack([k[row], v[row]]))
    changed = (keys.slabs.view(torch.int16) != before.view(torch.int16)).any(-1).sum()
    assert changed == 5 * 2 * KV_HEADS


# --- the choice -------------------------------------------------------------------------------------------------------


def test_tokens_of_a_view():
    """Keys and values of some slots go where they belong, in all layers, and nothing else is touched."""
    layers, dtype = 3, torch.bfloat16
    source = [[rand(2, KV_HEADS, SLAB, DIM, seed=10 * i + j).to(dtype) for j in range(4)] for i in range(layers)]
    target = [[rand(2, KV_HEADS, 64 + 32 * j, DIM, seed=99).to(dtype) for j in range(2)] for _ in range(layers)]
    runs = [(1, 3, 5, SLAB, 1, 70, 96), (3, 0, 125, SLAB, 0, 0, 64), (2, 2, 0, SLAB, 1, 71, 96)]
    expected = [[own.clone() for own in layer] for layer in target]
    for n, slab, slot, _, own, to, _ in runs:
        for i in range(layers):
            expected[i][own][:, :, to : to + n] = source[i][slab][:, :, slot : slot + n]
    lies = [torch.tensor([[x.data_ptr() for x in layer] for layer in side], device=HERE) for side in (source, target)]
    launch.take(*lies, runs, KV_HEADS, DIM)
    assert all(map(torch.equal, chain(*target), chain(*expected)))


def test_choice_is_law_one():
    """Greedy and sampled tokens are the reference's, the first of equals; what is not finite chooses nothing."""
    vocab, seed = 9001, 12345678901234567890
    logits = rand(9, vocab) * 4
    logits[6, 5000], logits[7, 17] = torch.nan, torch.inf
    logits[8] = -torch.inf
    logits[0, [4200, 100, 8999]] = 50.0
    temperatures = torch.tensor([0, 0, 1, 0.7, 5, 1e-30, 0, 1, 1], device=HERE)
    keys = torch.tensor([noise_key(seed, 40 + i) for i in range(9)], device=HERE)
    chosen, sure = (x.tolist() for x in launch.choose(logits, keys, temperatures))
    want, scores = [100, int(logits[1].argmax())], [logits[0], logits[1]]
    for i in range(2, 6):
        shifted = (logits[i] - logits[i].max()) / temperatures[i].clamp(min=torch.finfo(torch.float32).tiny)
        scores.append(shifted + gumbel(seed, 40 + i, vocab, HERE))
        want.append(int(scores[-1].argmax()))
    assert chosen == [*want, -1, -1, -1]
    assert sure[:6] == pytest.approx([float(own.softmax(-1).max()) for own in scores], rel=1e-5)
    assert pick(logits[2:3], [noise_key(seed, 42)], [1])[0].tolist() == chosen[2:3]  # a whole number
    alone = launch.choose(logits[4:5], keys[4:5], temperatures[4:5])
    assert [x.tolist() for x in alone] == [chosen[4:5], sure[4:5]]
