"""Trees of a recurrent head's guesses in one native call (csrc/grow.cpp); drafters/recurrent.py has the formula."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.ops import native
from outrider.ops.linear import CPU, Linear

Root = tuple[int, int, native.Wish, list[int]]
"""Address of a state (hidden,), the token chosen from it, how guesses are shaped, and the noise's key of each level."""


class Recurrence:
    """A recurrent head whose linears are all packed. Raises ValueError for weights that do not fit each other.

    norm (hidden,); `embedding`, as Model.embeddings has it, is a table (vocab, hidden), or the packed linear whose rows
    it has; `ids` (words,) int64 are the target's ids of the draft vocabulary.
    """

    def __init__(
        self, gate_up: Linear, down: Linear, projection: Linear, norm: Tensor, eps: float, vocab: int,
        embedding: Tensor | Linear, ids: Tensor,
    ) -> None:  # fmt: skip
        hidden, dtype = projection.in_features, projection.dtype
        norm = native.fitting("norm", norm, (hidden,), dtype, CPU)
        ids = native.fitting("ids", ids, (projection.out_features,), torch.int64, CPU)
        table, packed = 0, None
        self._kept: list[Any] = [gate_up, down, projection, norm, embedding, ids]  # whose addresses the kernels hold
        if isinstance(embedding, Linear):
            packed = embedding.packed[0]
        else:
            self._kept.append(rows := native.fitting("embedding", embedding, (vocab, hidden), dtype, CPU))
            table = rows.data_ptr()
        self._native = native.kernels.Recurrence(
            hidden, len(ids), vocab, eps, native.TYPES[dtype], table, packed, norm.data_ptr(), gate_up.packed[0],
            down.packed[0], projection.packed[0], ids.data_ptr(),
        )  # fmt: skip

    def grow(
        self, roots: list[Root], k: int, width: int, least: float
    ) -> list[tuple[list[int], list[int], list[float]]]:
        """Per root the tokens, parents and trust of a tree of at most k nodes, as trees.py grows it."""
        return self._native.grow(roots, k, width, least, torch.get_num_threads())  # type: ignore[no-any-return]
