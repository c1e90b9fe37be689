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
from outrider.ops.elementwise import GATES
from outrider.ops.experts import MLP, Experts
from outrider.ops.linear import CPU, Linear

Run = tuple[int, int, int, int, list[int] | None, list[int], int, int]


@dataclass
class Stores:
    """Where a cache wants the keys of one forward, for kernels that attend to all layers by themselves.

    Each run is one sequence's rows [row, row + n): row, n, start, capacity, parents, and for each layer the address of
    its store (2, kv_heads, capacity, dim) in `dtype`, as `attend` takes them, and 0 and 0. Where keys lie in pages, the
    run has no stores, but the address of a table and how many pages it has (see `Pages`); capacity is that of `slabs`,
    whose addresses (layers, slab_count) lie at `slabs`. All live until the forward has ended. `queries`, if not None,
    is then called with all queries (layers, tokens, heads, dim).
    """

    runs: list[Run]
    dtype: torch.dtype
    queries: Callable[[Tensor], None] | None = None
    slabs: int = 0
    slab_count: int = 0


@dataclass
class Block:
    """What the walk of one layer reads, as model.py's Layer has it; `turn` is which of the rotations it takes."""

    input_norm: Tensor | None
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Linear
    post_norm: Tensor | None
    mlp: MLP | Experts
    window: int | None
    attention_norm: Tensor | None = None
    mlp_norm: Tensor | None = None
    sinks: Tensor | None = None
    turn: int = 0


@dataclass(frozen=True)
class Switches:
    """In what families differ that holds for all layers; as ModelConfig has them."""

    scale: float
    softcap: float | None = None
    full_norms: bool = False
    activation: str = "silu"
    clamp: tuple[float, float] | None = None
    residual: float = 1.0


class Walk:
    """A decoder whose linears are all packed, ready to be walked.

    heads, kv_heads, dim and eps as in `rope`; `embedding` is a table (vocab, hidden), or the packed linear whose rows
    it has, or None: then rows come embedded. `beside`, for rows that have something beside them (an EAGLE-3 head): its
    norm (hidden,), and whether what attention adds to is the normed row; qkv then sees both, (2 * hidden), normed.
    Raises ValueError for weights that do not fit each other.
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
        switches: Switches | None = None,
        beside: tuple[Tensor, bool] | None = None,
    ) -> None:
        self.seconds = 0.0  # spent in the native call so far
        self.hidden, self.vocab, self.dtype = head.in_features, head.out_features, head.dtype
        self.heads, self.dim, self.layers = heads, dim, len(blocks)
        self._kept: list[Any] = [blocks, head, embedding]  # whose addresses the kernels hold
        shape = heads, kv_heads, dim, self.hidden, self.vocab
        s, self.turns = switches or Switches(dim**-0.5), 1 + max((b.turn for b in blocks), default=0)
        gate = GATES[s.activation], *(s.clamp or (0.0, 0.0))
        self._native = native.kernels.Walk(
            *shape, eps, s.scale, s.softcap or 0.0, s.full_norms, *gate, s.residual, native.TYPES[self.dtype]
        )
        widths = (heads * dim, kv_heads * dim) if s.full_norms else (dim, dim)
        for b in blocks:
            seen = self.hidden * (2 if beside else 1)
            fits = {(b.qkv, (heads + 2 * kv_heads) * dim, seen), (b.o, self.hidden, heads * dim)}
            mlp, experts = (b.mlp, None) if isinstance(b.mlp, MLP) else (None, b.mlp.native)
            if mlp:
                inner = mlp.down.in_features * (1 if mlp.gate_up.gated else 2)
                fits |= {(mlp.gate_up, inner, self.hidden), (mlp.down, self.hidden, mlp.down.in_features)}
            if bad := [x for x, *size in fits if size != [x.out_features, x.in_features] or x.dtype != self.dtype]:
                raise ValueError(
                    f"a product of {bad[0].in_features} inputs and {bad[0].out_features} outputs does not fit"
                )
            norms = [b.input_norm, b.post_norm, b.q_norm, b.k_norm, b.attention_norm, b.mlp_norm]
            sizes = [self.hidden] * 2 + [*widths] + [self.hidden] * 2
            products = (mlp.gate_up.packed, mlp.down.packed) if mlp else ([], [])
            self._native.add(
                [self._norm(x, n) for x, n in zip(norms, sizes, strict=True)], b.qkv.packed, b.o.packed, *products,
                experts, b.window or 0, self._norm(b.sinks, heads, torch.float32), b.turn,
            )  # fmt: skip
        self._native.end(self._norm(norm, self.hidden), head.packed)
        if beside:
            self._native.beside(self._norm(beside[0], self.hidden), beside[1])
        self.embeds = embedding is not None
        if isinstance(embedding, Linear):
            self._native.embedding(0, embedding.packed[0])
        elif embedding is not None:
            table = native.fitting("embedding", embedding, (self.vocab, self.hidden), self.dtype, CPU)
            self._kept.append(table)
            self._native.embedding(table.data_ptr(), None)

    def _norm(self, x: Tensor | None, width: int, dtype: torch.dtype | None = None) -> int:
        if x is not None:
            x = native.fitting("norm", x, (width,), dtype or self.dtype, CPU)
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
        room: tuple[Tensor, Tensor] | None = None,
        beside: Tensor | None = None,
        draws: list[native.Draw] | None = None,
    ) -> tuple[Tensor, Tensor, list[int]]:
        """Normed states (wanted, hidden) of the rows `wanted`; with `head` their logits (wanted, vocab) float32, and of
        each the likeliest token, as `argmax` says it; or what its own of `draws` draws, -1 where that is in doubt.

        tokens: ids, or rows embedded (n, hidden). turns: for each row the address of its cosines (dim,), its sines
        `sines` bytes behind; of all rows for each rotation that the blocks name, one after another. Each key of
        `states`, a point as kv/rows.py has them, gets the states (n, hidden) there.
        `room`: an earlier result of this, of as many rows, to be written over. `beside` (n, hidden): what stands beside
        rows embedded, if this walk has a norm for that.
        Raises IndexError for a token beyond the vocabulary.
        """
        rows, embedded = len(turns) // self.turns, None
        if isinstance(tokens, Tensor):
            embedded, tokens = native.fitting("rows", tokens, (rows, self.hidden), self.dtype, CPU), []
        if beside is not None:
            beside = native.fitting("rows beside", beside, (rows, self.hidden), self.dtype, CPU)
        if stores.dtype != self.dtype:
            raise ValueError(f"keys are stored in {stores.dtype}, and computed in {self.dtype}")
        for point in states:
            states[point] = torch.empty(rows, self.hidden, dtype=self.dtype, device=CPU)
        queries = (
            torch.empty(self.layers, rows, self.heads, self.dim, dtype=self.dtype, device=CPU)
            if stores.queries
            else None
        )
        if room is None:
            out = torch.empty(len(wanted), self.hidden, dtype=self.dtype, device=CPU)
            logits = torch.empty(len(wanted) if head else 0, self.vocab, dtype=torch.float32, device=CPU)
        else:
            out, logits = room
        began = time.perf_counter()
        best: list[int] = self._native.forward(
            tokens, native.address(embedded), native.address(beside), turns, sines, stores.runs, stores.slabs,
            stores.slab_count, wanted, [(point, x.data_ptr()) for point, x in states.items()] if states else [],
            0 if queries is None else queries.data_ptr(), out.data_ptr(),
            logits.data_ptr() if head else 0, draws or [], torch.get_num_threads(),
        )  # fmt: skip
        self.seconds += time.perf_counter() - began
        if stores.queries and queries is not None:
            stores.queries(queries)
        return out, logits, best
