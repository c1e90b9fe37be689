"""All layers of a decoder in one native call (csrc/walk.cpp): between two products lies no Python.

It computes, bit for bit, what the operations beside it do when they are called one by one, as model.py does for what
the kernels do not take and for caches that attend in ways of their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.ops import native
from outrider.ops.attention import CODES
from outrider.ops.linear import CPU, Linear

Run = tuple[int, int, int, int, list[int] | None, list[int], int, int]


@dataclass
class Stores:
    """Where a cache wants the keys of one forward, for kernels that attend to all layers by themselves.

    Each run is one sequence's rows [row, row + n): row, n, start, capacity, parents, and for each layer the address of
    its store (2, kv_heads, capacity, dim) in `dtype`, as `attend` takes them, and 0 and 0. Where keys lie in pages, the
    run has no stores, but the address of a table and how many pages it has (see `Pages`); capacity is that of `slabs`,
    whose addresses (layers, slabs) are given once. All live until the forward has ended. `queries`, if not None, is
    then called with all queries (layers, tokens, heads, dim).
    """

    runs: list[Run]
    dtype: torch.dtype
    queries: Callable[[Tensor], None] | None = None
    slabs: Tensor | None = None


@dataclass
class Block:
    """What the walk of one layer reads: norms, products and the window of its attention."""

    input_norm: Tensor | None
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Linear
    post_norm: Tensor | None
    gate_up: Linear
    down: Linear
    window: int | None


class Walk:
    """A decoder whose linears are all packed, ready to be walked.

    heads, kv_heads, dim and eps as in `rope`; `embedding` is a table (vocab, hidden), or the packed linear whose rows
    it has, or None: then rows come embedded. Raises ValueError for weights that do not fit each other.
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        dim: int,
        eps: float,
        blocks: list[Block],
        norm: Tensor,
        head: Linear,
        embedding: Tensor | Linear | None,
    ) -> None:
        self.seconds = 0.0  # spent in the native call so far
        self.hidden, self.vocab, self.dtype = head.in_features, head.out_features, head.dtype
        self.heads, self.dim, self.layers = heads, dim, len(blocks)
        self._kept: list[Any] = [blocks, head, embedding]  # whose addresses the kernels hold
        shape = heads, kv_heads, dim, self.hidden, self.vocab
        self._native = native.kernels.Walk(*shape, eps, dim**-0.5, CODES[self.dtype])
        for b in blocks:
            inner = b.down.in_features
            fits = {(b.qkv, (heads + 2 * kv_heads) * dim, self.hidden), (b.o, self.hidden, heads * dim)}
            fits |= {(b.gate_up, inner, self.hidden), (b.down, self.hidden, inner)}
            if bad := [x for x, *size in fits if size != [x.out_features, x.in_features] or x.dtype != self.dtype]:
                raise ValueError(
                    f"a product of {bad[0].in_features} inputs and {bad[0].out_features} outputs does not fit"
                )
            norms = [self._norm(x, n) for x, n in ((b.input_norm, self.hidden), (b.q_norm, dim), (b.k_norm, dim))]
            self._native.add(
                norms[0], b.qkv.packed, *norms[1:], b.o.packed, self._norm(b.post_norm, self.hidden),
                b.gate_up.packed, b.down.packed, b.window or 0,
            )  # fmt: skip
        self._native.end(self._norm(norm, self.hidden), head.packed)
        self.embeds = embedding is not None
        if isinstance(embedding, Linear):
            self._native.embedding(0, embedding.packed[0])
        elif embedding is not None:
            table = native.fitting("embedding", embedding, (self.vocab, self.hidden), self.dtype, CPU)
            self._kept.append(table)
            self._native.embedding(table.data_ptr(), None)

    def _norm(self, x: Tensor | None, width: int) -> int:
        if x is not None:
            x = native.fitting("norm", x, (width,), self.dtype, CPU)
            self._kept.append(x)
        return native.address(x)

    def __call__(
        self,
        tokens: list[int] | Tensor,
        turns: list[int],
        sines: int,
        stores: Stores,
        wanted: list[int],
        states: dict[int, Tensor],
        head: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Normed states (wanted, hidden) and, with `head`, logits (wanted, vocab) float32 of the rows `wanted`.

        tokens: ids, or rows embedded (n, hidden). turns: for each row the address of its cosines (dim,), its sines
        `sines` bytes behind. Each key of `states`, a point as kv/rows.py has them, gets the states (n, hidden) there.
        Raises IndexError for a token beyond the vocabulary.
        """
        rows, embedded = len(turns), None
        if isinstance(tokens, Tensor):
            embedded, tokens = native.fitting("rows", tokens, (rows, self.hidden), self.dtype, CPU), []
        if stores.dtype != self.dtype:
            raise ValueError(f"keys are stored in {stores.dtype}, and computed in {self.dtype}")
        for point in states:
            states[point] = torch.empty(rows, self.hidden, dtype=self.dtype)
        queries = torch.empty(self.layers, rows, self.heads, self.dim, dtype=self.dtype) if stores.queries else None
        out = torch.empty(len(wanted), self.hidden, dtype=self.dtype)
        logits = torch.empty(len(wanted) if head else 0, self.vocab)
        began = time.perf_counter()
        self._native.forward(
            tokens, native.address(embedded), turns, sines, stores.runs, native.address(stores.slabs),
            0 if stores.slabs is None else stores.slabs.shape[1], wanted,
            [(point, x.data_ptr()) for point, x in states.items()], native.address(queries), out.data_ptr(),
            logits.data_ptr() if head else 0, torch.get_num_threads(),
        )  # fmt: skip
        self.seconds += time.perf_counter() - began
        if stores.queries and queries is not None:
            stores.queries(queries)
        return out, logits
