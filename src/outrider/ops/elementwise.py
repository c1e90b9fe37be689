"""RMSNorm, the rotary turn and the gated activation: by the compiled kernels, else in blocks of whole rows.

PyTorch splits large elementwise work among threads at arbitrary elements, and the ends of a share take scalar code
whose exp has other last bits than the vector code's: a row's result would depend on how many rows there are. Blocks
below the size at which it splits are computed by one thread, row by row (and stay in the cache).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.ops import native
from outrider.ops.triton import launch
from outrider.ops.triton.graph import upload

GRAIN = 32768  # elements; at::internal::GRAIN_SIZE
GATES = {"silu": 0, "gelu_tanh": 1, "clamped": 2}  # activations that the kernels have
PIECE = 8192  # elements; GELU is split sooner than others


def _blocks(rows: int, width: int, device: torch.device) -> list[slice]:
    step = rows if device.type != "cpu" else max(1, GRAIN // width)
    return [slice(at, at + step) for at in range(0, rows, step)]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (n, heads, dim) turned by cos and sin (n, 1, dim), sin signed for the half-split layout."""
    half, out = x.shape[-1] // 2, torch.empty_like(x, memory_format=torch.contiguous_format)
    for b in _blocks(x.shape[0], x.shape[1] * x.shape[2], x.device):
        torch.addcmul(x[b] * cos[b], x[b].roll(half, -1), sin[b], out=out[b])
    return out


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up (n, width) for the fused product gate_up (n, 2 * width)."""
    n, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(n, width)
    for b in _blocks(n, width, gate_up.device):
        torch.mul(F.silu(gate_up[b, :width]), gate_up[b, width:], out=out[b])
    return out


def gated(gate_up: Tensor, activation: str, clamp: tuple[float, float] | None = None) -> Tensor:
    """act(gate) * up (n, width) for the fused product gate_up (n, 2 * width).

    `activation`: silu, gelu, gelu_tanh; or clamped, which with `clamp` (alpha, limit) is gate * sigmoid(alpha * gate) *
    (up + 1), the gate at most the limit and the up within it.
    """
    n, width = gate_up.shape[0], gate_up.shape[1] // 2
    if activation in GATES and native.runs(gate_up.dtype, gate_up.device):
        x, y = gate_up.contiguous(), gate_up.new_empty(n, width)
        gate = GATES[activation], *(clamp or (0.0, 0.0))
        kind = native.TYPES[x.dtype]
        native.kernels.gate(x.data_ptr(), n, width, *gate, y.data_ptr(), kind, torch.get_num_threads())
        return y

    def act(gate: Tensor, up: Tensor) -> Tensor:
        if activation == "clamped" and clamp:
            alpha, limit = clamp
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            return gate * torch.sigmoid(alpha * gate) * (up + 1)
        if activation == "silu":
            return F.silu(gate) * up
        return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up

    return _pieces(act, gate_up[:, :width], gate_up[:, width:])


def add(x: Tensor, y: Tensor, factor: float) -> Tensor:
    """x + factor * y, both (n, width), rounded once by the kernels."""
    if not native.runs(x.dtype, x.device):
        return x + (y if factor == 1 else y * factor)
    x, y = x.clone(memory_format=torch.contiguous_format), native.fitting("y", y, tuple(x.shape), x.dtype, x.device)
    native.kernels.add(x.data_ptr(), y.data_ptr(), x.numel(), factor, native.TYPES[x.dtype], torch.get_num_threads())
    return x


def softcap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap) of x (n, width)."""
    return _pieces(lambda own: torch.tanh(own / cap) * cap, x)


def _pieces(make: Callable[..., Tensor], *given: Tensor) -> Tensor:
    """make(...) of tensors (n, width), elementwise, in pieces of one row that one thread computes: where a piece ends,
    and with it where scalar code takes over from the vector code, depends on nothing but the width."""
    if given[0].device.type != "cpu":
        return make(*given)
    out = torch.empty(given[0].shape, dtype=given[0].dtype)
    for row in range(out.shape[0]):
        for at in range(0, out.shape[1], PIECE):
            out[row, at : at + PIECE] = make(*(x[row, at : at + PIECE] for x in given))
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x (..., width) / sqrt(mean(x^2) + eps) * weight (width,)."""
    if launch.runs(x.dtype, x.device) and x.dtype == weight.dtype:
        return launch.rms_norm(x, weight, eps)
    if not (native.runs(x.dtype, x.device) and x.dtype == weight.dtype):
        return F.rms_norm(x, weight.shape, weight, eps)
    width, kind = x.shape[-1], native.TYPES[x.dtype]
    x, weight = x.contiguous(), native.fitting("norm", weight, (width,), x.dtype, x.device)
    y, rows = torch.empty_like(x), x.numel() // max(1, width)
    native.kernels.rms_norm(
        x.data_ptr(), rows, width, weight.data_ptr(), eps, y.data_ptr(), kind, torch.get_num_threads()
    )
    return y


def rope(
    qkv: Tensor, heads: int, kv_heads: int, cos: Tensor, sin: Tensor, norms: tuple[Tensor, Tensor] | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (n, heads, dim), keys and values (n, kv_heads, dim) of qkv (n, (heads + 2 * kv_heads) * dim).

    Queries and keys are first normed by `norms` (q, k), each (dim,), if there are any, then turned as in `rotate`.
    cos and sin (n, 1, dim) as in `rotate`. qkv may be overwritten.
    """
    n, both = qkv.shape[0], heads + kv_heads
    dim, rest = divmod(qkv.shape[1], both + kv_heads)
    if rest:
        raise ValueError(f"rows of {qkv.shape[1]} numbers are no {heads} + 2 x {kv_heads} heads")
    qkv = qkv if qkv.stride(1) == 1 else qkv.contiguous()
    split = qkv.view(n, -1, dim)
    qk, v = split[:, :both], split[:, both:]
    if launch.runs(qkv.dtype, qkv.device) and cos.dtype == qkv.dtype:
        launch.rope(qkv, heads, kv_heads, cos.contiguous(), sin.contiguous(), norms, eps)
    elif native.runs(qkv.dtype, qkv.device) and cos.dtype == qkv.dtype:
        kind = qkv.dtype, qkv.device
        cos, sin = (native.fitting(name, x, (n, 1, dim), *kind) for name, x in (("cos", cos), ("sin", sin)))
        q_norm, k_norm = (native.fitting("norm", x, (dim,), *kind) for x in norms) if norms else (None, None)
        native.kernels.rope(
            qkv.data_ptr(), n, qkv.stride(0), both, heads, dim, cos.data_ptr(), sin.data_ptr(),
            native.address(q_norm), native.address(k_norm), eps, native.TYPES[qkv.dtype], torch.get_num_threads(),
        )  # fmt: skip
    else:
        if norms:
            qk = torch.cat([rms_norm(qk[:, :heads], norms[0], eps), rms_norm(qk[:, heads:], norms[1], eps)], 1)
        qk = rotate(qk, cos, sin)
    return qk[:, :heads], qk[:, heads:], v


def picks(logits: Tensor) -> bool:
    """Whether `pick` takes these logits (rows, vocab) float32."""
    return launch.runs(torch.bfloat16, logits.device)


def pick(logits: Tensor, keys: list[int], temperatures: list[float]) -> tuple[Tensor, Tensor]:
    """By Law 1 the token of each row of (rows, vocab) float32, -1 where there is none, and its share of the softmax.

    Both (rows,), where the logits lie. keys as sampling.noise_key gives them; a temperature of 0 is greedy.
    """
    if not len(logits):
        return logits.new_empty(0, dtype=torch.int32), logits.new_empty(0)
    by = upload(torch.tensor(temperatures, dtype=torch.float32), logits.device)  # which may all be whole numbers
    where = upload(keys, logits.device)
    return launch.choose(logits.contiguous(), where, by)


def argmax(x: Tensor) -> list[int]:
    """Per row of x (rows, width) where it is largest, the first of equals; -1 if that is not finite. NaN is largest."""
    best: list[int]
    if native.runs(x.dtype, x.device) and x.dtype == torch.float32:
        x = x.contiguous()
        best = native.kernels.argmax(x.data_ptr(), *x.shape, torch.get_num_threads())
        return best
    best = greatest(x).tolist()
    return best


def greatest(x: Tensor) -> Tensor:
    """As `argmax`, left where x lies: (rows,) int64."""
    most, at = x.max(-1)
    return at.masked_fill(~most.isfinite(), -1)
