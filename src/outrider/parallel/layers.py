"""Products of which each rank has a part, and the experts made of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.ops import MLP, Experts, Linear, rms_norm
from outrider.parallel.cuts import Cut, cut
from outrider.parallel.group import Group


class _Across(Linear):
    """A product of which this rank has a part, `own`."""

    def __init__(self, own: Linear, group: Group, inputs: int, outputs: int) -> None:
        self.own, self.group, self.in_features, self.out_features = own, group, inputs, outputs
        self.dtype, self.kernel, self.nbytes = own.dtype, own.kernel, own.nbytes
        self.bias, self.gated, self.native = own.bias, False, False  # the walk does not stop for others

    @property
    def rounded(self) -> bool:
        """As Linear's."""
        return self.own.rounded


class Gathered(_Across):
    """Cut by outputs, of which all come together; inputs that are cut come together before. `first`: on rank 0 only."""

    def __init__(
        self, own: Linear, group: Group, outputs: list[range], inputs: list[range] | None = None, first: bool = False
    ) -> None:
        super().__init__(own, group, inputs[-1].stop if inputs else own.in_features, outputs[-1].stop)
        self.inputs, self.outputs, self.first = inputs, outputs, first

    def __call__(
        self,
        x: Tensor,
        norm: Tensor | None = None,
        eps: float = 0.0,
        residual: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """As Linear's, for x (rows, this rank's inputs)."""
        x = self.group.gather(x, self.inputs) if self.inputs else x
        mine = self.outputs[self.group.rank]
        added = None if residual is None else residual[:, mine.start : mine.stop].contiguous()
        y = self.own(x, norm, eps, added, dtype)
        return (self.group.gather_first if self.first else self.group.gather)(y, self.outputs)


class Summed(_Across):
    """Cut by inputs: partial sums in float32, added up, and rounded once. Of the biases all but rank 0's are zero."""

    def __call__(
        self,
        x: Tensor,
        norm: Tensor | None = None,
        eps: float = 0.0,
        residual: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """As Linear's, for x (rows, this rank's inputs), which are not normed."""
        assert norm is None
        y = self.group.sum(self.own(x, dtype=torch.float32))
        return (y if residual is None else y + residual.float()).to(dtype or x.dtype)


class Normed(_Across):
    """Queries, keys and values whose norm is over all heads: those of queries, and of keys, come together for it."""

    def __init__(self, own: Linear, cut: Cut, norms: tuple[Tensor, Tensor]) -> None:
        super().__init__(own, cut.group, own.in_features, own.out_features)
        c, kv = cut.whole, [kv for _, kv in cut.heads]
        firsts = [i for i, each in enumerate(kv) if i == 0 or each != kv[i - 1]]  # who holds them first
        self.norms, self.dim, self.eps, self.kv = norms, c.head_dim, c.rms_norm_eps, kv
        self.keys = [range(kv[i].start * self.dim, kv[i].stop * self.dim) for i in firsts]
        self.queries, self.firsts = cut.queries(), firsts

    def __call__(
        self,
        x: Tensor,
        norm: Tensor | None = None,
        eps: float = 0.0,
        residual: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """As Linear's, normed."""
        y, group = self.own(x, norm, eps, residual, dtype), self.group
        mine, own = self.queries[group.rank], self.kv[group.rank]
        q, k = y[:, : len(mine)], y[:, len(mine) : len(mine) + len(own) * self.dim]
        every_q = rms_norm(group.gather(q, self.queries), self.norms[0], self.eps)
        every = [range(each.start * self.dim, each.stop * self.dim) for each in self.kv]
        held, at = [], 0
        for part in every:  # with those that several ranks hold, several times
            held.append(range(at, at + len(part)))
            at += len(part)
        together = group.gather(k, held)
        every_k = rms_norm(cut(together.T, [held[i] for i in self.firsts]).T.contiguous(), self.norms[1], self.eps)
        q.copy_(every_q[:, mine.start : mine.stop])
        k.copy_(every_k[:, every[group.rank].start : every[group.rank].stop])
        return y


class CutExperts(Experts):
    """Experts that are cut alike: what all of a row's give comes together at once. Each rank has the whole router."""

    native: Any = None  # the kernels do not stop for others
    triton: Any = None

    def __init__(
        self, router: Linear, experts: list[MLP], chosen: int, normalised: bool, shared: bool, cut: Cut
    ) -> None:
        super().__init__(router, experts, chosen, normalised, shared)
        self.cut = cut

    def _fit(self, e: MLP) -> None:
        """Only the whole fits."""

    def _whole(self, inner: list[Tensor]) -> list[Tensor]:
        if self.cut.sums:
            return inner
        m, own = self.cut.whole.mixture, len(inner) - self.shared  # the one that is shared is another width
        assert m is not None
        found = list[Tensor]()
        for parts, width in ((inner[:own], m.width), (inner[own:], m.shared)):
            if parts:
                every = self.cut.group.gather(torch.cat(parts), self.cut.wide(width))
                found += torch.split(every, [len(x) for x in parts])
        return found

    def _each(self, x: Tensor) -> Tensor:
        own, group = super()._each(x), self.cut.group
        return group.sum(own) if self.cut.sums else group.gather(own, self.cut.hidden)
