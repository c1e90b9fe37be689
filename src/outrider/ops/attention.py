"""Attention of few queries over many keys, each key read once for all of them.

The query heads that share a key-value head are folded into rows, so grouped-query attention reads each key and value
once. Keys come in whole blocks of `KEY_BLOCK` from a fixed origin and rows in multiples of `ROW_BLOCK`: the flash
kernel beneath walks keys in blocks of that size, and then a row's sums do not depend on how many rows or later keys
ride along. Masked keys weigh exactly zero; they must hold finite numbers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

KEY_BLOCK = 512
ROW_BLOCK = 8


def attention_mask(visible: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """Additive mask (rows, keys) from visible (n, keys) bool: each row repeated `group` times, rows padded."""
    n, keys = visible.shape
    rows = -(-n * group // ROW_BLOCK) * ROW_BLOCK
    mask = torch.zeros(rows, keys, dtype=dtype, device=visible.device)  # rows of padding see every key: no 0/0
    hidden = ~visible if group == 1 else (~visible)[:, None].expand(n, group, keys).reshape(n * group, keys)
    mask[: n * group].masked_fill_(hidden, float("-inf"))
    return mask


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """softmax(q k^T * scale + mask) v for one sequence.

    q (n, heads, dim); k and v (kv_heads, keys, dim), keys a multiple of KEY_BLOCK; mask from `attention_mask`.
    Returns (n, heads * dim).
    """
    n, heads, dim = q.shape
    kv_heads = k.shape[0]
    group = heads // kv_heads
    folded = q.new_zeros(kv_heads, mask.shape[0], dim)
    folded[:, : n * group] = q.view(n, kv_heads, group, dim).transpose(0, 1).reshape(kv_heads, n * group, dim)
    out = F.scaled_dot_product_attention(folded[None], k[None], v[None], attn_mask=mask, scale=scale)[0]
    return out[:, : n * group].view(kv_heads, n, group, dim).transpose(0, 1).reshape(n, heads * dim)
