"""Weight-only quantisation: linears whose weights are 8 or 4 bits, for a third to a half of the memory traffic.

Weights are rounded to the nearest integer times the scale of their group of inputs; activations stay bfloat16 and sums
float, group by group. Plain and speculative decoding of a quantised model are as exactly equal as of any other: it is
another model, not another promise. The head gets 8 bits under either scheme, for it decides between near-equal tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.errors import ConfigError
from outrider.ops import Quantized, native

# bits, inputs per group, whether a group has an offset beside its scale
SCHEMES = {"int8": (8, 128, False), "int4": (4, 64, True)}
HEAD = "int8"
BLOCK = 2**22  # weights rounded at a time: bounds the float copies


def check(scheme: str, dtype: torch.dtype, device: torch.device) -> None:
    """Raises ConfigError if this scheme is unknown or cannot run on this dtype and device."""
    if scheme not in SCHEMES:
        raise ConfigError(f"quantization {scheme!r} is unknown; valid: {', '.join(SCHEMES)}")
    if dtype != torch.bfloat16:
        raise ConfigError(f"quantization {scheme} computes in bfloat16; give dtype='bfloat16', not {dtype}")
    if not native.runs(dtype, device):
        raise ConfigError(f"quantization {scheme} needs the compiled CPU kernels; `outrider info` says what is there")


def quantize(weight: Tensor, scheme: str) -> Quantized:
    """The weights (out, in) of a linear under a scheme, rounded to nearest in groups along `in`.

    Without offsets a group spans -amax .. amax in 2^bits - 1 levels, with them min .. max in 2^bits. The scale is
    rounded to bfloat16 first, so that values are rounded for the scale that they get.
    """
    bits, group, offset = SCHEMES[scheme]
    rows, inputs = weight.shape
    groups = -(-inputs // group)
    values = torch.empty(rows, inputs, dtype=torch.int8)
    scales = torch.empty(rows, groups, dtype=torch.bfloat16)
    offsets = torch.empty_like(scales) if offset else None
    half = 2 ** (bits - 1)
    step = max(1, BLOCK // inputs)
    for at in range(0, rows, step):
        block = slice(at, at + step)
        w = weight[block].float()
        w = F.pad(w, (0, groups * group - inputs), mode="replicate").view(-1, groups, group)
        if offsets is None:
            scale = (w.abs().amax(-1) / (half - 1)).bfloat16()
            shift = torch.zeros_like(scale)
        else:
            low, high = w.aminmax(dim=-1)
            scale = ((high - low) / (2 * half - 1)).bfloat16()
            offsets[block] = shift = (low + half * scale.float()).bfloat16()
        scales[block] = scale
        divisor = torch.where(scale == 0, 1.0, scale.float())[..., None]  # a group of equal weights is all offset
        q = ((w - shift.float()[..., None]) / divisor).round_().clamp_(-half, half - 1)
        values[block] = q.view(len(q), -1)[:, :inputs]
    return Quantized(bits, group, values, scales, offsets)
