"""Who holds what of a model: heads, rows and columns of matrices, plain or quantised, for each rank."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from outrider.config import ModelConfig
from outrider.errors import ConfigError
from outrider.ops import Quantized
from outrider.parallel.group import Group

GRAIN = 32  # outputs that kernels compute together: cuts lie between them where there are enough
SUPER = 256  # inputs that share a factor in some quantised formats


def split(count: int, size: int, grain: int = 1) -> list[range]:
    """`count` things in `size` runs, as even as can be in whole grains, which shrink until there is one for each."""
    while grain > 1 and count // grain < size:
        grain //= 2
    grains, rest = divmod(count // grain, size)
    ends = [min(count, grain * (grains * i + min(i, rest))) for i in range(size)] + [count]
    return [range(a, b) for a, b in itertools.pairwise(ends)]


def split_heads(heads: int, kv_heads: int, size: int) -> list[tuple[range, range]]:
    """For each rank its query heads and the key-value heads that they look at."""
    group = heads // kv_heads
    if size <= kv_heads:
        return [(range(kv.start * group, kv.stop * group), kv) for kv in split(kv_heads, size)]
    found = []
    for kv, ranks in enumerate(split(size, kv_heads)):
        for own in split(group, len(ranks)):
            found.append((range(kv * group + own.start, kv * group + own.stop), range(kv, kv + 1)))
    return found


@dataclass
class Cut:
    """What each rank of a group holds of a model. Raises ConfigError if there is not something for each."""

    whole: ModelConfig
    group: Group

    def __post_init__(self) -> None:
        c, n = self.whole, self.group.size
        parts = {"query heads": c.num_heads, "hidden columns": c.hidden_size, "tokens": c.vocab_size}
        if c.mixture is None or len(c.mixture.layers) < c.num_layers:
            parts["columns in its MLPs"] = c.intermediate_size
        if c.mixture is not None:
            parts["columns in its experts"] = min(c.mixture.width, c.mixture.shared or c.mixture.width)
        what = min(parts, key=lambda name: parts[name])
        if n > (most := parts[what]):
            raise ConfigError(f"a model of {most} {what} is cut over at most {most} ranks, not {n}")
        self.heads = split_heads(c.num_heads, c.num_kv_heads, n)
        self.inner = self.wide(c.intermediate_size)
        self.hidden = split(c.hidden_size, n, GRAIN)
        self.vocab = split(c.vocab_size, n, GRAIN)

    def wide(self, width: int) -> list[range]:
        """Columns of an MLP's inner numbers, for each rank."""
        return split(width, self.group.size, SUPER)

    @property
    def config(self) -> ModelConfig:
        """The model as this rank sees it: with the heads it holds."""
        q, kv = self.heads[self.group.rank]
        norm = None if self.whole.qk_norm == "full" else self.whole.qk_norm  # Normed does it
        return replace(self.whole, num_heads=len(q), num_kv_heads=len(kv), qk_norm=norm)

    def mine(self, parts: list[range]) -> range:
        """This rank's of them."""
        return parts[self.group.rank]

    def queries(self) -> list[range]:
        """Columns of all heads' outputs, for each rank."""
        dim = self.whole.head_dim
        return [range(q.start * dim, q.stop * dim) for q, _ in self.heads]

    def qkv_rows(self) -> list[range]:
        """Rows of queries, keys and values, counted through all three, that this rank holds."""
        c, (q, kv) = self.whole, self.heads[self.group.rank]
        firsts = 0, c.num_heads, c.num_heads + c.num_kv_heads
        return [
            range((first + own.start) * c.head_dim, (first + own.stop) * c.head_dim)
            for first, own in zip(firsts, (q, kv, kv), strict=True)
        ]

    @property
    def sums(self) -> bool:
        """Whether what ends a branch is cut by inputs."""
        return self.group.mode != "gather"


def within(rows: list[range], sizes: list[int]) -> list[list[range]]:
    """Of rows that are counted through parts of these sizes, those of each part, counted in it."""
    found, first = [], 0
    for size in sizes:
        own = [range(max(r.start, first) - first, min(r.stop, first + size) - first) for r in rows]
        found.append([r for r in own if len(r)])
        first += size
    return found


def cut(x: Tensor, rows: list[range], columns: range | None = None) -> Tensor:
    """Some rows, and of these some columns."""
    some = [x[r.start : r.stop] for r in rows]
    found = some[0] if len(some) == 1 else torch.cat(some) if some else x[:0]
    return found if columns is None else found[:, columns.start : columns.stop]


def cut_quantized(q: Quantized, rows: list[range], columns: range | None = None) -> Quantized:
    """The same of quantised weights. Raises ConfigError where columns that share a factor would be parted."""
    coarse = any(isinstance(factors, tuple) for factors in (q.scales, q.offsets))
    share = SUPER if coarse else q.group
    if columns is not None and (q.order is not None or columns.start % share):
        why = "their inputs stand in an order of their own" if q.order is not None else f"{share} inputs share a factor"
        raise ConfigError(f"these weights cannot be cut by inputs: {why}; use tensor_parallel_mode gather")

    def factors(x: Any, group: int = q.group) -> Any:
        if x is None:
            return None
        if isinstance(x, tuple):
            return factors(x[0]), factors(x[1], SUPER)
        groups = None if columns is None else range(columns.start // group, -(-columns.stop // group))
        return cut(x, rows, groups).contiguous()

    values = cut(q.values.view(torch.int8), rows, columns).contiguous().view(q.values.dtype)
    return replace(q, values=values, scales=factors(q.scales), offsets=factors(q.offsets), zeros=factors(q.zeros))
