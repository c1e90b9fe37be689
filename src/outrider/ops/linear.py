"""x W^T + b for few rows and many weights, which is all that decoding does, with what stands before and after it.

On a CPU the weights are packed once for the kernels of csrc/linear.cpp and the original is freed: each product reads
them from end to end, and for each output the sum over the inputs runs in one order with one instruction, so that a
row's bits do not depend on the other rows. Without the kernels, oneDNN's packed layout does the same, except that a
single row takes another path there; it is therefore computed as two. Elsewhere it is `F.linear`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.ops import native
from outrider.ops.elementwise import swiglu

CPU = torch.device("cpu")


@dataclass
class Quantized:
    """Weights (out, in) as integers times a scale, plus an offset, for each group of inputs.

    values (out, in) int8, within -8 .. 7 if bits is 4; scales and offsets (out, groups) bfloat16, offsets None if they
    are all zero. A group is 32, 64 or 128 inputs; the last may be short.
    """

    bits: int
    group: int
    values: Tensor
    scales: Tensor
    offsets: Tensor | None = None

    def dense(self) -> Tensor:
        """The weights that these stand for, (out, in) float32."""

        def spread(x: Tensor) -> Tensor:
            return x.float().repeat_interleave(self.group, 1)[:, : self.values.shape[1]]

        return self.values * spread(self.scales) + (0 if self.offsets is None else spread(self.offsets))


def packs(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether weights are packed on this device, in which case a Linear keeps a copy of its own."""
    return native.runs(dtype, device) or _onednn(dtype, device)


def _onednn(dtype: torch.dtype, device: torch.device) -> bool:
    return (
        device.type == "cpu"
        and dtype in (torch.float32, torch.bfloat16)
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


class Linear:
    """`y = x @ weight.T + bias` for x (rows, in) and weight (out, in), any number of rows.

    `gated`: the weight is a gate and an up, one below the other, and y = silu(gate) * up (rows, out / 2). With `pack`
    false the weight given is used as it is, shared with whoever holds it. Quantised weights take bfloat16 activations
    and need the kernels. `kernel` says what computes the products.
    """

    def __init__(
        self, weight: Tensor | Quantized, bias: Tensor | None = None, pack: bool = True, gated: bool = False
    ) -> None:
        plain = weight.values if isinstance(weight, Quantized) else weight
        self.dtype = torch.bfloat16 if isinstance(weight, Quantized) else weight.dtype
        rows, self.in_features = plain.shape
        self.out_features = rows // 2 if gated else rows
        if bias is not None:
            bias = native.fitting("bias", bias, (rows,), self.dtype, plain.device)
        self.bias, self.gated = bias, gated
        self.native = pack and native.runs(self.dtype, plain.device)
        self.kernel = native.active
        if self.native:
            self._pack(plain, weight if isinstance(weight, Quantized) else None)
            return
        assert isinstance(weight, Tensor), "quantised weights need the kernels"
        self.fixed = _onednn(weight.dtype, weight.device)  # a fixed order of sums, packed or not
        self.kernel = "oneDNN" if self.fixed else "torch"
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight) if pack and self.fixed else weight
        self.nbytes = weight.nbytes + (bias.nbytes if bias is not None else 0)

    def _pack(self, plain: Tensor, quantized: Quantized | None) -> None:
        code = native.FORMATS[self.dtype] if quantized is None else {8: native.INT8, 4: native.INT4}[quantized.bits]
        group = quantized.group if quantized else 32
        w = self.packed = native.kernels.Weights(code, *plain.shape, group, self.gated)
        data, plain = native.memory(w.nbytes), plain.contiguous()
        w.pack(plain.data_ptr(), data.data_ptr(), torch.get_num_threads())
        self._kept = [data]  # what the kernels read
        if quantized:
            shape = (plain.shape[0], -(-plain.shape[1] // group))
            for name, numbers in (("scales", quantized.scales), ("offsets", quantized.offsets)):
                if numbers is not None:
                    numbers = native.fitting(name, numbers, shape, torch.bfloat16, plain.device)
                    packed = torch.empty(w.group_values, dtype=torch.bfloat16)
                    w.pack_groups(numbers.data_ptr(), packed.data_ptr(), name == "offsets")
                    self._kept.append(packed)
        if self.bias is not None:
            w.set_bias(self.bias.data_ptr())
            self._kept.append(self.bias)
        self.nbytes = sum(t.nbytes for t in self._kept)

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
        if inputs != self.in_features or x.dtype != self.dtype:
            raise ValueError(
                f"x is {tuple(x.shape)} {x.dtype}; these weights take (rows, {self.in_features}) {self.dtype}"
            )
        if dtype not in (None, x.dtype, torch.float32):
            raise ValueError(f"a product of {x.dtype} comes as {x.dtype} or torch.float32, not {dtype}")
        if norm is not None:
            norm = native.fitting("norm", norm, (inputs,), x.dtype, x.device)
        if residual is not None:
            residual = native.fitting("residual", residual, (rows, self.out_features), x.dtype, x.device)
        if not self.native:
            y = self._multiply(x if norm is None else F.rms_norm(x, norm.shape, norm, eps))
            y = swiglu(y) if self.gated else y
            y = y if residual is None else residual + y
            return y if dtype is None else y.to(dtype)
        x = native.fitting("x", x, (rows, inputs), self.dtype, CPU)
        y = torch.empty(rows, self.out_features, dtype=dtype or x.dtype)
        self.packed.multiply(
            x.data_ptr(),
            rows,
            y.data_ptr(),
            y.dtype == torch.float32,
            native.address(residual),
            native.address(norm),
            eps,
            torch.get_num_threads(),
        )
        return y

    def _multiply(self, x: Tensor) -> Tensor:
        if not self.fixed:
            return F.linear(x, self.weight, self.bias)
        single = x.shape[0] == 1
        x = x.expand(2, -1).contiguous() if single else x
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return y[:1] if single else y
