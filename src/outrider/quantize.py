"""Quantisation: linears whose weights are 4 to 8 bits, for a third to a half of the memory traffic.

Weights are rounded to the nearest integer times the scale of their group of inputs; activations stay bfloat16 and sums
float, group by group. Or activations are rounded, too, to 8 bits, and a group's sum is one of integers. Plain and
speculative decoding of a quantised model are as exactly equal as of any other: it is another model, not another
promise. The head gets 8 bits under either scheme.
Blocks of a GGUF file are such weights already and run as they are stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.config import SCHEMES
from outrider.errors import ConfigError
from outrider.ops import Quantized, native, quantises

FINE = 32  # rows rounded in groups of 128 cost five times as much perplexity
ACTIVATIONS = ("int8",)  # to which the rows of products with such weights may be rounded, group by group
GGUF = {  # bytes of a block, weights in it
    "Q8_0": (34, 32), "Q4_0": (18, 32), "Q4_1": (20, 32), "Q4_K": (144, 256), "Q5_K": (176, 256), "Q6_K": (210, 256),
    "MXFP4": (17, 32),
}  # fmt: skip
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # by code of MXFP4: twice its number
BLOCK = 2**22  # weights rounded at a time: bounds the float copies
FITTED = 2**18  # those whose scales are searched, again and again: they stay in the cache
FITS = [-1 + 0.5 * i for i in range(7)]  # steps more than a group's range has, tried for its scale


def check(scheme: str, dtype: torch.dtype, device: torch.device) -> None:
    """Raises ConfigError if this scheme is unknown or cannot run on this dtype and device."""
    if scheme not in [*SCHEMES]:  # a list is not hashed
        raise ConfigError(f"quantization {scheme!r} is unknown; valid: {', '.join(SCHEMES)}")
    _check_kernels(f"quantization {scheme} computes in", f"quantization {scheme} needs", dtype, device)


def check_activations(activations: str, dtype: torch.dtype, device: torch.device) -> None:
    """Raises ConfigError if rows cannot be rounded so on this dtype and device."""
    if activations not in ACTIVATIONS:
        raise ConfigError(f"activations {activations!r} are unknown; valid: {', '.join(ACTIVATIONS)}")
    _check_kernels(f"activations {activations} are rounded from", f"activations {activations} need", dtype, device)


def _check_kernels(computes: str, needs: str, dtype: torch.dtype, device: torch.device) -> None:
    if dtype != torch.bfloat16:
        raise ConfigError(f"{computes} bfloat16; give dtype='bfloat16', not {dtype}")
    if not quantises(dtype, device):
        kernels = "Triton" if device.type == "cuda" else "the compiled CPU kernels"
        raise ConfigError(f"{needs} {kernels}; `outrider info` says what is there")


def quantize(weight: Tensor, scheme: str, rounded: bool = False) -> Quantized:
    """The weights (out, in) of a linear under a scheme, rounded to nearest in groups along `in`.

    Without offsets a group spans -amax .. amax in 2^bits - 1 levels, with them what `fitted` finds. Factors are rounded
    to bfloat16 first, so that values are rounded for those that they get. With `rounded`, for rows that are rounded in
    the same groups, these are of at most FINE inputs under int8.
    """
    bits, group, offset = SCHEMES[scheme]
    group = min(group, FINE) if rounded and bits == 8 else group
    rows, inputs = weight.shape
    groups = -(-inputs // group)
    values = torch.empty(rows, inputs, dtype=torch.int8)
    scales = torch.empty(rows, groups, dtype=torch.bfloat16)
    offsets = torch.empty_like(scales) if offset else None
    half = 2 ** (bits - 1)
    step = max(1, (FITTED if offset else BLOCK) // inputs)
    for at in range(0, rows, step):
        block = slice(at, at + step)
        w = weight[block].float()
        w = F.pad(w, (0, groups * group - inputs), mode="replicate").view(-1, groups, group)
        if offsets is None:
            scale = (w.abs().amax(-1) / (half - 1)).bfloat16()
            shift = torch.zeros_like(scale)
        else:
            scale, low = fitted(w, 2 * half - 1)
            scale = scale.bfloat16()
            offsets[block] = shift = (low + half * scale.float()).bfloat16()
        scales[block] = scale
        divisor = torch.where(scale == 0, 1.0, scale.float())[..., None]  # a group of equal weights is all offset
        q = ((w - shift.float()[..., None]) / divisor).round_().clamp_(-half, half - 1)
        values[block] = q.view(len(q), -1)[:, :inputs]
    return Quantized(bits, group, values, scales, offsets)


def fitted(w: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """A scale and an offset (...) for each group of weights w (..., group), which become q * scale + offset with q from
    0 to `top`.

    Those of the range, or of a few that are wider or narrower: the integers that such a range gives, and for these the
    least squares. A weight counts by its size beside the group's (llama.cpp's make_qkx2_quants searches so).
    """
    low, high = w.aminmax(dim=-1)
    span, dot = high - low, torch.linalg.vecdot
    part = w / torch.maximum(-low, high).clamp(min=torch.finfo().tiny)[..., None]  # of the largest
    count = part.abs() + part.square().mean(-1, keepdim=True).sqrt()
    x = (w - low[..., None]) / torch.where(span == 0, 1.0, span)[..., None]
    cx = count * x
    total, sum_x, square = count.sum(-1), cx.sum(-1), dot(cx, x)
    scale, offset = torch.full_like(low, 1 / top), torch.zeros_like(low)
    least = dot(count, (x - (x * top).round_().mul_(scale[..., None])).square_())
    for more in FITS:
        q = (x * (top + more)).round_().clamp_(max=top)
        cq = count * q
        sum_q, qq, qx = cq.sum(-1), dot(cq, q), dot(cx, q)
        spread = total * qq - sum_q * sum_q
        own = (total * qx - sum_q * sum_x) / spread
        base = (sum_x - own * sum_q) / total
        error = (square - own * qx - base * sum_x).clamp(min=1e-6)  # less is float32's own
        better = error < least  # not if all q are one, and own no number
        least = torch.where(better, error, least)
        scale, offset = torch.where(better, own, scale), torch.where(better, base, offset)
    return scale * span, low + offset * span


CLIPS = [1 - 0.025 * i for i in range(13)]  # of a group's range, tried as what its integers span


@dataclass
class Rounded:
    """Weights (out, in) as integers with a sign, values (out, in) int8, less the zeros (out, groups) int8 of their
    groups, if there are any, times the scales (out, groups) of these."""

    values: Tensor
    scales: Tensor
    zeros: Tensor | None = None

    def dense(self) -> Tensor:
        """The weights that these stand for, (out, in) float32."""
        rows, groups = self.scales.shape
        values = self.values.float().view(rows, groups, -1)
        values = values if self.zeros is None else values - self.zeros[..., None]
        return (values * self.scales.float()[..., None]).view(rows, -1)


def ranges(
    w: Tensor, bits: int, symmetric: bool, dtype: torch.dtype, importance: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """A scale of dtype and a zero for each group of weights w (..., group), both (...) float32.

    Of some ranges up to that of the weights the one of the least squared error, in which a weight may count by its
    `importance` (group,). A scale is never 0; zeros are whole, and 0 if `symmetric`.
    """
    half, zero = 2 ** (bits - 1), w.new_zeros(w.shape[:-1])
    low, high = w.amin(-1).clamp(max=0), w.amax(-1).clamp(min=0)
    span = torch.maximum(-low, high) / (half - 0.5) if symmetric else (high - low) / (2 * half - 1)
    best, least = (torch.ones_like(span), zero), torch.full_like(span, torch.inf)
    for clip in CLIPS:
        scale = (span * clip).to(dtype).float()
        scale = torch.where(scale == 0, 1.0, scale)
        if not symmetric:
            zero = (-half - clip * low / scale).round_().clamp_(-half, half - 1)
        q = (w / scale[..., None]).round_().add_(zero[..., None]).clamp_(-half, half - 1)
        error = (q.sub_(zero[..., None]).mul_(scale[..., None]).sub_(w)).square_()
        error = (error if importance is None else error.mul_(importance)).sum(-1)
        better = error < least
        least = torch.where(better, error, least)
        best = torch.where(better, scale, best[0]), torch.where(better, zero, best[1])
    return best


def rounded(weight: Tensor, bits: int, group: int, symmetric: bool, dtype: torch.dtype) -> Rounded:
    """Weights (out, in) to the nearest in groups that divide the inputs; scales are rounded to dtype before weights."""
    rows, inputs = weight.shape
    half, groups = 2 ** (bits - 1), inputs // group
    found = Rounded(
        torch.empty(rows, inputs, dtype=torch.int8),
        torch.empty(rows, groups, dtype=dtype),
        None if symmetric else torch.empty(rows, groups, dtype=torch.int8),
    )
    step = max(1, BLOCK // inputs)
    for at in range(0, rows, step):
        own = slice(at, at + step)
        w = weight[own].float().reshape(-1, groups, group)
        scale, zero = ranges(w, bits, symmetric, dtype)
        q = (w / scale[..., None]).round_().add_(zero[..., None]).clamp_(-half, half - 1)
        found.values[own], found.scales[own] = q.view(len(w), -1).char(), scale.to(dtype)
        if found.zeros is not None:
            found.zeros[own] = zero.char()
    return found


def powers(exponents: Tensor, bias: int) -> Tensor:
    """2 ^ (exponent - bias) in bfloat16, exactly: from 2 ^ -128 on, of which the first two are subnormal."""
    biased = exponents.int() - bias + 127
    bits = torch.where(biased > 0, biased << 7, 64 >> -biased.clamp(max=0))
    return bits.short().view(torch.bfloat16)


def from_gguf(blocks: Tensor, kind: str) -> Quantized:
    """Rows of weights as a GGUF file stores them, (out, bytes) uint8, with nothing lost; `kind` is one of GGUF.

    Rows are whole: those of several matrices may lie one below the other, and some rows may be taken of one, such as an
    embedding's: `from_gguf(blocks[tokens], kind).dense()`.
    """
    size, _ = GGUF[kind]
    b = blocks.contiguous().view(len(blocks), blocks.shape[1] // size, size)
    values, fine, minima = (_apart if native.kernels is None or not b.is_cpu else _compiled)(b, kind)

    def halves(at: int) -> Tensor:
        """The float16 numbers (rows, blocks) at byte `at` of each block."""
        return b[..., at : at + 2].contiguous().view(torch.float16)[..., 0]

    match kind:
        case "MXFP4":  # twice the numbers, and half the scales
            return Quantized(4, 32, values, powers(b[..., 0], 128), floats=True)
        case "Q8_0":
            return Quantized(8, 32, values, halves(0))
        case "Q4_0":
            return Quantized(4, 32, values, halves(0))
        case "Q4_1":
            return Quantized(4, 32, values, halves(0), halves(2), signed=False)
        case "Q6_K":
            return Quantized(6, 16, values, (fine, halves(208)))
    return Quantized(5 if kind == "Q5_K" else 4, 32, values, (fine, halves(0)), (minima, -halves(2)), signed=False)


def _compiled(b: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """What `_apart` gives, by csrc/blocks.cpp."""
    rows, count, size = b.shape
    many = {"Q4_K": (8, 8), "Q5_K": (8, 8), "Q6_K": (16, 0)}.get(kind, (0, 0))
    widths = GGUF[kind][1], *many
    values, fine, minima = (torch.empty(rows, count * width, dtype=torch.int8) for width in widths)
    native.kernels.take_apart(
        size, b.data_ptr(), rows * count, values.data_ptr(), fine.data_ptr(), minima.data_ptr(), torch.get_num_threads()
    )
    return values, fine, minima


def _apart(b: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Of blocks (rows, blocks, bytes) their numbers (rows, inputs), and K-quants' scales and minima (rows, groups)."""
    rows, count, _ = b.shape
    none = b.new_empty(rows, 0, dtype=torch.int8)

    def bits(part: Tensor, width: int, stride: int) -> Tensor:
        """(rows, all) of `width` bits: the lowest ones of `stride` bytes, then the next ones of these, and so on."""
        shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=b.device)[:, None]
        return (part.reshape(rows, -1, 1, stride) >> shifts & (1 << width) - 1).view(rows, -1)

    match kind:
        case "MXFP4":
            codes = torch.tensor(E2M1, dtype=torch.int8, device=b.device)
            return codes[bits(b[..., 1:], 4, 16).int()], none, none
        case "Q8_0":
            return b[..., 2:].contiguous().view(torch.int8).view(rows, -1), none, none
        case "Q4_0":
            return bits(b[..., 2:], 4, 16).char() - 8, none, none
        case "Q4_1":
            return bits(b[..., 4:], 4, 16).char(), none, none
        case "Q6_K":
            values = bits(b[..., :128], 4, 64) | bits(b[..., 128:192], 2, 32) << 4
            return values.char() - 32, b[..., 192:208].contiguous().view(torch.int8).view(rows, -1), none
    # 8 scales and 8 minima of 6 bits: the first 4 of either, in whose bytes lie 2 upper bits of the others, then the
    # others' lower bits.
    first, lower = b[..., 4:12].reshape(rows, count, 2, 4), torch.stack([b[..., 12:16] & 15, b[..., 12:16] >> 4], 2)
    scales, minima = torch.cat([first & 63, lower | first >> 2 & 48], 3).char().unbind(2)
    values = bits(b[..., -128:], 4, 32)
    if kind == "Q5_K":
        values |= bits(b[..., 16:48], 1, 32) << 4
    return values.char(), scales.reshape(rows, -1), minima.reshape(rows, -1)
