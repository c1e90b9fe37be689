"""x W^T + b for few rows and many weights, which is all that decoding does.

On a CPU the weights are packed once into oneDNN's blocked layout and the original is freed. That reads about twice as
fast as `F.linear` on the plain layout (docs/LOG.md has the figures), and its sums over K run in one fixed order, so a
row's bits do not depend on the row count, except that a single row takes another kernel. A single row is
therefore computed as two.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def packs(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether weights are packed on this device, in which case a Linear keeps a copy of its own."""
    return (
        device.type == "cpu"
        and dtype in (torch.float32, torch.bfloat16)
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


class Linear:
    """`y = x @ weight.T + bias` for x (rows, in) and weight (out, in), any number of rows.

    With `pack` false the weight given is used as it is, shared with whoever holds it: the same bits, slower on a CPU.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, pack: bool = True) -> None:
        self.out_features, self.in_features = weight.shape
        self.nbytes = weight.nbytes + (bias.nbytes if bias is not None else 0)
        self.bias = bias
        self.fixed = packs(weight.dtype, weight.device)  # oneDNN: a fixed order of sums, packed or not
        self.packed = pack and self.fixed
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self.packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        if not self.fixed:
            return F.linear(x, self.weight, self.bias)
        if x.shape[0] == 1:
            return self._multiply(x.expand(2, -1).contiguous())[:1]
        return self._multiply(x)

    def _multiply(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return y
