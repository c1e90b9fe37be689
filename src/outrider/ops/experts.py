"""An MLP of experts, of which each row takes a few: every expert that some row chose is read once, for all of its rows.

A row's result depends on the row alone (Law 2): products are row-invariant, whichever rows share an expert, and what a
row's experts give is summed in their order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from outrider.ops import native
from outrider.ops.elementwise import GATES, gated, rms_norm
from outrider.ops.linear import Linear
from outrider.ops.triton import launch


@dataclass
class MLP:
    """A gate and an up in one product, and down: hidden -> inner, if gate_up is gated, else 2 * inner -> hidden.

    `activation` and `clamp` as in `gated`, unless gate_up is gated.
    """

    gate_up: Linear
    down: Linear
    activation: str = "silu"
    clamp: tuple[float, float] | None = None

    @property
    def linears(self) -> list[Linear]:
        """All products."""
        return [self.gate_up, self.down]

    @property
    def nbytes(self) -> int:
        """Bytes of its weights."""
        return self.gate_up.nbytes + self.down.nbytes

    def expected(self, rows: int) -> float:
        """Bytes of weights that a forward reads."""
        return self.nbytes

    @property
    def native(self) -> bool:
        """Whether the kernels compute all of it."""
        known = self.gate_up.gated or self.activation in GATES
        return known and self.gate_up.native and self.down.native

    def __call__(
        self,
        x: Tensor,
        norm: Tensor | None,
        eps: float,
        residual: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """What it gives for rms_norm(x) * norm, plus residual: (rows, hidden), as all three tensors are, or `dtype`."""
        return self.down(self.inner(x, norm, eps), residual=residual, dtype=dtype)

    def inner(self, x: Tensor, norm: Tensor | None = None, eps: float = 0.0) -> Tensor:
        """(rows, inner), as x is, of which `down` makes the rest."""
        inner = self.gate_up(x, norm, eps)
        return inner if self.gate_up.gated else gated(inner, self.activation, self.clamp)


class Experts:
    """A router (hidden -> a score for each), the experts, and how a row's `chosen` best of them are weighed.

    Their weights are a softmax over the chosen ones if `normalised`, else over all. With `shared` the last expert is
    every row's, beside the chosen ones, and weighs the sigmoid of its score. Raises ValueError for products that do not
    fit each other.
    """

    def __init__(self, router: Linear, experts: list[MLP], chosen: int, normalised: bool, shared: bool = False) -> None:
        self.router, self.experts, self.chosen = router, experts, chosen
        self.normalised, self.shared = normalised, shared
        self.hidden, self.dtype, self._read = router.in_features, router.dtype, 0
        for e in experts:
            self._fit(e)
        if router.out_features != len(experts) or not 0 < chosen <= len(experts) - shared:
            raise ValueError(f"{chosen} of {len(experts)} experts cannot be chosen by {router.out_features} scores")

    def _fit(self, e: MLP) -> None:
        inner, up = e.down.in_features, e.gate_up
        sizes, wide = (up.in_features, e.down.out_features), inner if up.gated else 2 * inner
        if sizes != (self.hidden, self.hidden) or up.out_features != wide or self.dtype != e.down.dtype:
            raise ValueError(f"an expert of {sizes[0]} -> {up.out_features}, {inner} -> {sizes[1]} does not fit")
        if up.gated and up.bias is not None:  # of which a part would have another's
            raise ValueError("experts' gate and up can have a bias only where they are clamped")

    @property
    def linears(self) -> list[Linear]:
        """All products."""
        return [self.router, *(linear for e in self.experts for linear in e.linears)]

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(linear.nbytes for linear in self.linears)

    def expected(self, rows: int) -> float:
        """Bytes of weights that a forward reads, if each row's choice were a matter of chance."""
        own = self.experts[: len(self.experts) - self.shared]
        missed = (1 - self.chosen / len(own)) ** rows
        fixed = self.router.nbytes + (self.experts[-1].nbytes if self.shared and rows else 0)
        return (1 - missed) * sum(e.nbytes for e in own) + fixed

    @property
    def read(self) -> int:
        """Bytes of experts that forwards have read so far."""
        if self.triton is not None:
            chosen, calls = self.triton.read.tolist()
            return int(chosen * self.experts[0].nbytes + calls * self.shared * self.experts[-1].nbytes)
        return int(self._read if self.native is None else self.native.read)

    @cached_property
    def native(self) -> Any:
        """The kernels' view of it; None if some weights are not packed or the activation is not theirs."""
        if not self.router.native or not all(e.native for e in self.experts):
            return None
        first = self.experts[0]
        width = max(e.down.in_features for e in self.experts)
        found = native.kernels.Experts(
            self.hidden, width, native.TYPES[self.dtype], self.router.packed, self.chosen, self.normalised, self.shared,
            GATES[first.activation], *(first.clamp or (0.0, 0.0)),
        )  # fmt: skip
        for e in self.experts:
            found.add(e.gate_up.packed, e.down.packed, e.nbytes)
        return found

    @cached_property
    def triton(self) -> launch.Experts | None:
        """The GPU kernels' view of those that rows choose; None if they are not alike, or the activation not theirs."""
        own = self.experts[: len(self.experts) - self.shared]
        linears, first = [linear for e in own for linear in e.linears], own[0]
        known = first.gate_up.gated or first.activation in GATES
        if not known or not all(m.triton and len(m.packed) == 1 for m in [self.router, *linears]):
            return None
        gate_up, down = (launch.Each.of([(m.packed[0], m.bias) for m in linears[i::2]]) for i in range(2))
        if gate_up is None or down is None:
            return None
        kind = GATES["silu" if first.gate_up.gated else first.activation]
        return launch.Experts(
            gate_up, down, self.chosen, self.normalised, self.shared, kind, first.clamp or (0.0, 0.0),
            self.router.architecture,
        )  # fmt: skip

    def __call__(
        self, x: Tensor, norm: Tensor | None, eps: float, residual: Tensor | None = None, real: Tensor | None = None
    ) -> Tensor:
        """What the experts give for rms_norm(x) * norm, plus residual: (rows, hidden), as all three tensors are.

        real (1,) int32, on the device: rows from that number on are padding, for which no expert need be read.
        """
        kind = x.dtype, x.device
        if self.triton is not None:
            x = x if norm is None else rms_norm(x, norm, eps)
            last = self.experts[-1]
            shared = last.down(last.inner(x), dtype=torch.float32) if self.shared else None
            return self.triton(x, self.router(x, dtype=torch.float32), shared, residual, real)
        if self.native is None:
            y = self._each(x if norm is None else rms_norm(x, norm, eps))
            return (y if residual is None else residual.float() + y).to(x.dtype)
        x = native.fitting("x", x, (len(x), self.hidden), self.dtype, x.device)
        norm = None if norm is None else native.fitting("norm", norm, (self.hidden,), *kind)
        residual = None if residual is None else native.fitting("residual", residual, tuple(x.shape), *kind)
        y, at = torch.empty_like(x), native.address
        self.native.mix(x.data_ptr(), len(x), at(norm), eps, at(residual), y.data_ptr(), torch.get_num_threads())
        return y

    def route(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Which experts (rows, n) each row takes, ascending, and their weights: float32 of scores (rows, all) float32.

        Of equal scores the first wins.
        """
        if native.runs(scores.dtype, scores.device):
            n, scores = self.chosen + self.shared, scores.contiguous()
            at = torch.empty(len(scores), n, dtype=torch.int32)
            weights, how = torch.empty(len(scores), n), (self.chosen, self.normalised, self.shared)
            native.kernels.route(scores.data_ptr(), *scores.shape, *how, at.data_ptr(), weights.data_ptr())
            return at.long(), weights
        own = scores[:, : len(self.experts) - self.shared]
        at = own.sort(dim=-1, descending=True, stable=True).indices[:, : self.chosen].sort(-1).values
        weights = own.gather(1, at).softmax(-1) if self.normalised else own.softmax(-1).gather(1, at)
        if self.shared:
            last = torch.full_like(at[:, :1], len(self.experts) - 1)
            at, weights = torch.cat([at, last], 1), torch.cat([weights, scores[:, -1:].sigmoid()], 1)
        return at, weights

    def _each(self, x: Tensor) -> Tensor:
        """What the experts give for x, normed: (rows, hidden) float32."""
        at, weights = self.route(self.router(x, dtype=torch.float32))
        parts = x.new_empty(*at.shape, self.experts[0].down.out_features, dtype=torch.float32)
        chosen = sorted(set(at.flatten().tolist()))
        places = [(at == i).nonzero(as_tuple=True) for i in chosen]
        inner = self._whole([self.experts[i].inner(x[rows]) for i, (rows, _) in zip(chosen, places, strict=True)])
        for i, place, own in zip(chosen, places, inner, strict=True):
            parts[place] = self.experts[i].down(own, dtype=torch.float32)
            self._read += self.experts[i].nbytes
        total = torch.zeros_like(parts[:, 0])
        if native.runs(parts.dtype, parts.device):
            order = torch.arange(at.numel(), dtype=torch.int32)
            native.kernels.combine(
                parts.data_ptr(), order.data_ptr(), weights.data_ptr(), *parts.shape, total.data_ptr(),
                torch.get_num_threads(),
            )  # fmt: skip
            return total
        for j in range(at.shape[1]):
            total = total + weights[:, j, None] * parts[:, j]
        return total

    def _whole(self, inner: list[Tensor]) -> list[Tensor]:
        """What `down` takes: of each expert that some row chose (rows, inner), in the order of the experts."""
        return inner
