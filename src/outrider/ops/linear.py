"""x W^T + b for few rows and many weights, which is all that decoding does, with what stands before and after it.

On a CPU the weights are packed once for the kernels of csrc/linear.cpp and the original is freed: each product reads
them from end to end, and for each output the sum over the inputs runs in one order with one instruction, so that a
row's bits do not depend on the other rows. Without the kernels, oneDNN's packed layout does the same, except that a
single row takes another path there; it is therefore computed as two. Elsewhere it is `F.linear`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.ops import native
from outrider.ops.elementwise import rms_norm, swiglu
from outrider.ops.triton import launch

CPU = torch.device("cpu")
shelf = native.Shelf()  # of packed weights: experts are many and small


Factors: TypeAlias = Tensor | tuple[Tensor, Tensor]
"""A number for each output and group of inputs: (out, groups) bfloat16, float16 or float32; or (out, groups) int8, and
coarse ones (out, supers) float16 by which these are multiplied, one for 256 inputs."""


@dataclass
class Quantized:
    """Weights (out, in) as numbers of few bits times a scale, plus an offset, for each group of inputs.

    values (out, in) int8, of so many bits: 8, 6 or 4 with a sign, or 5 or 4 without one (`signed` false). With `floats`
    they are E4M3 of 8 bits, as float8_e4m3fn, or E2M1 of 4, as int8 that hold twice the number. offsets are None if
    they are all zero; in their place there may be zeros (out, groups) int8, taken away before values are scaled. A
    group is 32, 64 or 128 inputs, of which the last may be short; or 16, if there are a multiple of 32 inputs. With
    `order` (in,) int32, column i is the weight of input order[i]: those of a group are neighbours.
    """

    bits: int
    group: int
    values: Tensor
    scales: Factors
    offsets: Factors | None = None
    signed: bool = True
    zeros: Tensor | None = None
    order: Tensor | None = None
    floats: bool = False

    @property
    def fits(self) -> bool:
        """Whether the kernels take groups of this size."""
        return self.group in (32, 64, 128) or (self.group == 16 and self.values.shape[1] % 32 == 0)

    @property
    def whole(self) -> bool:
        """Whether the numbers are integers, which the kernels multiply with rounded rows."""
        return not self.floats

    def dense(self) -> Tensor:
        """The weights that these stand for, (out, in) float32."""
        values = self.values.float()
        if self.zeros is not None:
            values = values - self._spread(self.zeros)
        dense = values * self._spread(self.scales)
        dense = dense if self.offsets is None else dense + self._spread(self.offsets)
        return dense if self.order is None else dense[:, self.order.argsort()]

    def take(self, rows: Tensor) -> Quantized:
        """Those of some outputs, by their indices (n,)."""

        def own(factors: Any) -> Any:
            return tuple(x[rows] for x in factors) if isinstance(factors, tuple) else factors[rows]

        values = self.values.view(torch.int8)[rows].view(self.values.dtype)
        given = {"scales": self.scales, "offsets": self.offsets, "zeros": self.zeros}
        return replace(self, values=values, **{k: own(x) for k, x in given.items() if x is not None})

    def _spread(self, factors: Factors) -> Tensor:
        """(out, in) float32."""
        inputs = self.values.shape[1]
        if isinstance(factors, Tensor):
            return factors.float().repeat_interleave(self.group, 1)[:, :inputs]
        fine, coarse = (
            x.float().repeat_interleave(n, 1) for x, n in zip(factors, (self.group, native.SUPER), strict=True)
        )
        return fine[:, :inputs] * coarse[:, :inputs]

    def like(self, other: object) -> bool:
        """Whether the rows of the other one can lie below these."""
        if not isinstance(other, Quantized) or self._kind() != other._kind():
            return False
        if self.order is None or other.order is None:
            return self.order is other.order
        return torch.equal(self.order, other.order)

    def _kind(self) -> tuple[object, ...]:
        factors = [[y.dtype for y in (x if isinstance(x, tuple) else (x,)) if y is not None] for x in self._factors()]
        return self.bits, self.group, self.signed, self.floats, self.values.dtype, self.values.shape[1], factors

    def _factors(self) -> list[Factors | None]:
        return [self.scales, self.offsets, self.zeros]


def join(parts: list[Tensor | Quantized]) -> list[Tensor | Quantized]:
    """Parts of a weight that lie one below the other, with neighbours that are alike in one piece."""
    runs: list[list[Tensor | Quantized]] = []
    for part in parts:
        first = runs[-1][0] if runs else None
        alike = isinstance(part, Tensor) if isinstance(first, Tensor) else first is not None and first.like(part)
        runs[-1].append(part) if alike else runs.append([part])
    return [run[0] if len(run) == 1 else _stack(run) for run in runs]


def _stack(parts: list[Any]) -> Tensor | Quantized:
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)
    first: Quantized = parts[0]

    def all_of(name: str) -> Any:
        some = [getattr(part, name) for part in parts]
        if isinstance(some[0], tuple):
            return tuple(torch.cat(each) for each in zip(*some, strict=True))
        return None if some[0] is None else torch.cat(some)

    values = torch.cat([part.values.view(torch.int8) for part in parts]).view(first.values.dtype)
    return replace(first, values=values, scales=all_of("scales"), offsets=all_of("offsets"), zeros=all_of("zeros"))


CODES = {  # of Quantized's bits and sign
    (8, True): native.INT8,
    (6, True): native.INT6,
    (5, False): native.UINT5,
    (4, True): native.INT4,
    (4, False): native.UINT4,
}
FLOATS = {8: native.FP8, 4: native.FP4}  # of Quantized's bits, if these are floats
KINDS = {
    torch.bfloat16: native.BFLOAT,
    torch.float16: native.HALF,
    torch.float32: native.FLOAT,
    torch.int8: native.COARSE,
}


def quantises(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether quantised weights run on this device."""
    return native.runs(dtype, device) or launch.runs(dtype, device)


def packs(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether weights are packed on this device, in which case a Linear keeps a copy of its own."""
    return not launch.runs(dtype, device) and (native.runs(dtype, device) or _onednn(dtype, device))


def _onednn(dtype: torch.dtype, device: torch.device) -> bool:
    return (
        device.type == "cpu"
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and (dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()))
    )


class Linear:
    """`y = x @ weight.T + bias` for x (rows, in) and weight (out, in), any number of rows.

    `gated`: the weight is a gate and an up, one below the other, and y = silu(gate) * up (rows, out / 2). With `pack`
    false the weight given is used as it is, shared with whoever holds it. Quantised weights take bfloat16 activations
    and need the kernels; a list, of which some may be plain, lies one below the other, each part as it is stored (not
    if `gated`). With `rounded`, quantised weights that are `whole` take rows rounded to 8 bits, each group by itself.
    `kernel` says what computes the products; `device` is where, if not where the weight lies.
    """

    def __init__(
        self,
        weight: Tensor | Quantized | list[Tensor | Quantized],
        bias: Tensor | None = None,
        pack: bool = True,
        gated: bool = False,
        rounded: bool = False,
        device: torch.device | None = None,
    ) -> None:
        parts: list[Tensor | Quantized] = [*weight] if isinstance(weight, list) else [weight]
        plain = [part.values if isinstance(part, Quantized) else part for part in parts]
        if len({x.shape[1] for x in plain}) > 1 or (gated and len(parts) > 1):
            raise ValueError("parts of a weight must have the same inputs, and a gated weight has one part")
        device = device or plain[0].device
        self.dtype = plain[0].dtype if isinstance(weight, Tensor) else torch.bfloat16
        rows, self.in_features = sum(len(x) for x in plain), plain[0].shape[1]
        self.out_features = rows // 2 if gated else rows
        if bias is not None:
            bias = native.fitting("bias", bias, (rows,), self.dtype, device)
        self.bias, self.gated = bias, gated
        self.triton = pack and launch.runs(self.dtype, device)
        if self.triton:
            self.native, self.kernel, self.architecture = False, "Triton", launch.architecture(device)
            self.packed: list[Any] = [launch.pack(part, device, rounded) for part in parts]
            self.nbytes: int = sum(w.nbytes for w in self.packed) + (0 if bias is None else bias.nbytes)
            return
        self.native = pack and native.runs(self.dtype, device)
        self.kernel = native.active
        if self.native:
            self._kept = [] if bias is None else [bias]  # what the kernels read
            self.packed, first = [], 0
            for part, values in zip(parts, plain, strict=True):
                self.packed.append(self._pack(values, part if isinstance(part, Quantized) else None, rounded))
                if bias is not None:
                    self.packed[-1].set_bias(bias[first:].data_ptr())
                first += len(values)
            self.nbytes = sum(t.nbytes for t in self._kept)
            return
        assert isinstance(weight, Tensor), "quantised weights need the kernels"
        self.fixed = _onednn(weight.dtype, weight.device)  # a fixed order of sums, packed or not
        self.kernel = "oneDNN" if self.fixed else "torch"
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight) if pack and self.fixed else weight
        self.nbytes = weight.nbytes + (bias.nbytes if bias is not None else 0)

    @property
    def rounded(self) -> bool:
        """Whether some of the products take rounded rows."""
        return (self.native or self.triton) and any(w.rounded for w in self.packed)

    def _pack(self, plain: Tensor, quantized: Quantized | None, rounded: bool) -> Any:
        group, code = 32, native.FORMATS[self.dtype]
        if quantized:
            floats, bits = quantized.floats, quantized.bits
            group, code = quantized.group, FLOATS[bits] if floats else CODES[bits, quantized.signed]
        if quantized and not quantized.fits:
            raise ValueError(
                f"groups of {group} of {plain.shape[1]} inputs: a group is 32, 64 or 128, or 16 of whole 32"
            )
        rounded = rounded and quantized is not None and quantized.whole
        w = native.kernels.Weights(code, *plain.shape, group, self.gated, rounded)
        data, plain = shelf.take(w.nbytes), plain.contiguous()
        w.pack(plain.data_ptr(), data.data_ptr(), torch.get_num_threads())
        self._kept.append(data)
        if quantized:
            self._pack_factors(w, "scales", quantized.scales, plain, group)
            if quantized.offsets is not None:
                self._pack_factors(w, "offsets", quantized.offsets, plain, group)
            if quantized.zeros is not None:
                self._pack_each(w, "offsets", quantized.zeros, (len(plain), -(-plain.shape[1] // group)), native.ZEROS)
            if quantized.order is not None:
                place = native.fitting("order", quantized.order.argsort().int(), (plain.shape[1],), torch.int32, CPU)
                w.set_place(place.data_ptr())
                self._kept.append(place)
        return w

    def _pack_each(self, w: Any, name: str, each: Tensor, shape: tuple[int, int], kind: int) -> None:
        each = native.fitting(name, each, shape, each.dtype, CPU)
        packed = torch.empty(w.room(shape[1]), dtype=each.dtype)
        threads = torch.get_num_threads()
        w.pack_scales(name == "offsets", kind, each.data_ptr(), shape[1], each.itemsize, packed.data_ptr(), threads)
        self._kept.append(packed)

    def _pack_factors(self, w: Any, name: str, factors: Factors, plain: Tensor, group: int) -> None:
        each, coarse = (factors, None) if isinstance(factors, Tensor) else factors
        if each.dtype not in KINDS or (each.dtype == torch.int8) != (coarse is not None):
            raise ValueError(f"{name} of {each.dtype}: bfloat16, float16, float32, or int8 with coarse ones")
        rows, inputs = plain.shape
        self._pack_each(w, name, each, (rows, -(-inputs // group)), KINDS[each.dtype])
        if coarse is not None:
            coarse = native.fitting(f"coarse {name}", coarse, (rows, -(-inputs // native.SUPER)), torch.float16, CPU)
            packed = torch.empty(w.room(coarse.shape[1]), dtype=torch.float16)
            threads = torch.get_num_threads()
            w.pack_coarse(name == "offsets", coarse.data_ptr(), coarse.shape[1], packed.data_ptr(), threads)
            self._kept.append(packed)

    def __call__(
        self,
        x: Tensor,
        norm: Tensor | None = None,
        eps: float = 0.0,
        residual: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """linear(rms_norm(x) * norm) + residual, in `dtype` (float32, or that of x, which is the default).

        x (rows, in); norm (in,), None for no norm; residual (rows, out), both of x's dtype. Raises ValueError if one of
        them does not fit.
        """
        rows, inputs = x.shape
        if inputs != self.in_features or x.dtype != self.dtype or (self.native and not x.is_cpu):
            raise ValueError(
                f"x is {tuple(x.shape)} {x.dtype} on {x.device}; "
                f"these weights take (rows, {self.in_features}) {self.dtype}"
            )
        if dtype is not None and dtype not in (x.dtype, torch.float32):
            raise ValueError(f"a product of {x.dtype} comes as {x.dtype} or torch.float32, not {dtype}")
        if norm is not None:
            norm = native.fitting("norm", norm, (inputs,), x.dtype, x.device)
        if residual is not None:
            residual = native.fitting("residual", residual, (rows, self.out_features), x.dtype, x.device)
        if self.triton:
            x = x if norm is None else rms_norm(x, norm, eps)
            y, at = torch.empty(rows, self.out_features, dtype=dtype or x.dtype, device=x.device), 0
            for w in self.packed:  # each its columns
                to = at + (w.outs // 2 if self.gated else w.outs)
                bias = None if self.bias is None else self.bias[at : at + w.outs]
                own = None if residual is None else residual[:, at:to]
                launch.product(x, w, y[:, at:to], bias, own, self.gated, self.architecture)
                at = to
            return y
        if not self.native:
            y = self._multiply(x if norm is None else F.rms_norm(x, norm.shape, norm, eps))
            y = swiglu(y) if self.gated else y
            y = y if residual is None else residual + y
            return y if dtype is None else y.to(dtype)
        x, y = x.contiguous(), torch.empty(rows, self.out_features, dtype=dtype or x.dtype)
        floats, threads = y.dtype == torch.float32, torch.get_num_threads()
        x_at, y_at, norm_at, added = x.data_ptr(), y.data_ptr(), native.address(norm), native.address(residual)
        for w in self.packed:  # each its columns
            w.multiply(x_at, rows, y_at, self.out_features, floats, added, norm_at, eps, threads)
            y_at += w.width * y.itemsize
            added += w.width * x.itemsize if added else 0
        return y

    def rows(self, at: Tensor) -> Tensor:
        """The weights (n, in) of some outputs, by their indices (n,), of a packed linear of one part, in its dtype.

        A quantised one's are rounded. Raises IndexError for an output that is none.
        """
        if not (self.native or self.triton) or len(self.packed) > 1 or self.gated:
            raise ValueError("rows are read from packed weights of one part that are not gated")
        if self.triton:
            return launch.rows(self.packed[0], at).to(self.dtype)
        out = torch.empty(len(at), self.in_features, dtype=self.dtype)
        self.packed[0].rows(at.tolist(), out.data_ptr())
        return out

    def _multiply(self, x: Tensor) -> Tensor:
        if not self.fixed:
            return F.linear(x, self.weight, self.bias)
        single = x.shape[0] == 1
        x = x.expand(2, -1).contiguous() if single else x
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return y[:1] if single else y
