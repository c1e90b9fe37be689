"""The rotary turn and the gated activation, in blocks of whole rows.

PyTorch splits large elementwise work among threads at arbitrary elements, and the ends of a share take scalar code
whose exp has other last bits than the vector code's: a row's result would depend on how many rows there are. Blocks
below the size at which it splits are computed by one thread, row by row (and stay in the cache).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

GRAIN = 32768  # elements; at::internal::GRAIN_SIZE


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
