"""Attention of few queries over many keys, each key read once for all of them.

On a CPU the kernels of csrc/attention.cpp take each row's keys in the order of their positions, along its path through
a tree, in fixed blocks: a row has the same bits in any company, and a branch has those of plain decoding. They make no
masks, and never look at slots that no row sees.

The reference, for all else, is PyTorch's flash kernel. The query heads that share a key-value head are folded into
rows, so grouped-query attention reads each key and value once. Keys come in whole blocks of `KEY_BLOCK` from a fixed
origin and rows in multiples of `ROW_BLOCK`: the kernel walks keys in blocks of that size, and then, on a CPU, a row's
sums do not depend on how many rows or later keys ride along. Masked keys weigh exactly zero; they must hold finite
numbers. A tree's keys are taken in the order of their slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.ops import native
from outrider.ops.native import PAGE
from outrider.ops.triton import launch
from outrider.ops.triton.plan import DevicePlan, Rows, make, queries_tile

KEY_BLOCK = 512
ROW_BLOCK = 8


@dataclass
class Pages:
    """Keys and values of one layer in pages of PAGE slots, for the kernels; `scratch` as `attend` has it."""

    slabs: Tensor  # (slabs,) int64: addresses of (2, kv_heads, capacity, dim) each, which live as long as this
    capacity: int  # slots of a slab
    tables: list[Tensor]  # for each sequence, where its pages are: (pages,) int32, counted through the slabs
    scratch: dict[Any, Any] = field(default_factory=dict)


def follows_paths(dtype: torch.dtype, device: torch.device, dim: int) -> bool:
    """Whether the kernels run: no masks are made, and rows of a tree have the bits of plain decoding."""
    return dim % 8 == 0 and (native.runs(dtype, device) or launch.runs(dtype, device))


def attend(
    q: Tensor,
    store: Tensor,
    start: int,
    parents: list[int] | None,
    window: int | None,
    scale: float,
    scratch: dict[Any, Any] | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """What the queries of one sequence's new rows see: q (n, heads, dim) gives (n, heads * dim).

    `store` (2, kv_heads, capacity, dim), capacity a multiple of KEY_BLOCK, holds keys and values: slots [0, start) are
    the prefix, in order, and [start, start + n) are the new rows', written before the call. Row i sees the prefix,
    itself and the rows before it: all earlier ones if `parents` is None, else those on its path through the tree, where
    parents[i] is the index of the row before row i and -1 the prefix. No row sees farther back than `window` positions.
    `scratch`, a dict that lives as long as one forward, keeps what its layers share. `sinks` (heads,) float32 are, for
    each head, the score of a key without a value that all rows see; by `softcap` c scores become c * tanh(score / c).
    """
    n, heads, dim = q.shape
    if dim % 8 == 0 and native.runs(q.dtype, q.device):
        out = torch.empty(n, heads * dim, dtype=q.dtype)
        _run(q, out, [(0, 0, 0, store, start, n, parents)], 0, 0, window, scale, sinks, softcap)
        return out
    group = heads // store.shape[1]
    key = (n, start, parents and tuple(parents), window, group)
    first, last = 0, -(-(start + n) // KEY_BLOCK) * KEY_BLOCK
    if window is not None:
        first = max(0, (start - window + 1) // KEY_BLOCK * KEY_BLOCK)
    scratch = {} if scratch is None else scratch
    if key not in scratch:
        scratch[key] = attention_mask(visible(n, start, parents, window, first, last, q.device), group, q.dtype)
    keys, mask = store[:, :, first:last], scratch[key]
    if sinks is not None:  # a block of its own, before all others
        own = mask.new_full((len(mask), KEY_BLOCK), float("-inf"))
        folded = sinks.view(-1, 1, group).expand(-1, n, -1).reshape(-1, n * group)
        mask, keys = mask.expand(len(folded), -1, -1), F.pad(keys, (0, 0, KEY_BLOCK, 0))
        own = own.expand(len(folded), -1, -1).clone()
        own[:, : n * group, 0] = folded.to(own.dtype)
        own[:, n * group :, 0] = 0
        mask = torch.cat([own, mask], 2)
    read = store[:, :, first if window else start : last]  # beyond a window, keys may lie that no row sees
    if q.is_cpu and not bool(read.isfinite().all()):
        seen = mask.view(-1, *mask.shape[-2:])[0, : n * group : group].isfinite()
        # 0 times infinity is NaN, also for who is not to see it: for each row a store without what it does not see
        apart = [keys.masked_fill(~row[:, None], 0) for row in seen]
        return torch.stack([attention(q, own[0], own[1], mask, scale, softcap)[i] for i, own in enumerate(apart)])
    return attention(q, keys[0], keys[1], mask, scale, softcap)


def attend_all(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Sequence[Rows],
    stores: Sequence[Tensor],
    window: int | None,
    scale: float,
    scratch: dict[Any, Any],
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Write the new keys and values of several sequences to their stores, and `attend` for each: (tokens, heads * dim).

    q (tokens, heads, dim); k and v (tokens, kv_heads, dim).
    """
    if q.shape[2] % 8 == 0 and launch.runs(q.dtype, q.device):
        key: Any = "stores", *(store.shape[2] for store in stores)
        if key not in scratch:
            scratch[key] = dense_plan(rows, key[1:], (q.shape[1], q.shape[2], k.shape[1]), q.device)
        at = _addresses(tuple(store.data_ptr() for store in stores), q.device)
        return launch.attend(q, k, v, at, scratch[key], window, scale, sinks, softcap)
    if follows_paths(q.dtype, q.device, q.shape[2]):
        return _attend_all(q, k, v, rows, stores, None, window, scale, sinks, softcap)
    outs = []
    for r, store in zip(rows, stores, strict=True):
        own = slice(r.row, r.row + r.n)
        write(store, r.start, k[own], v[own])
        outs.append(attend(q[own], store, r.start, r.parents, window, scale, scratch, sinks, softcap))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def attend_pages(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Sequence[Rows],
    pages: Pages,
    window: int | None,
    scale: float,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """`attend_all` for keys in pages; only where the kernels run (`follows_paths`)."""
    if launch.runs(q.dtype, q.device):
        if "pages" not in pages.scratch:
            pages.scratch["pages"] = device_plan(rows, pages, (q.shape[1], q.shape[2], k.shape[1]), q.device)
        return launch.attend(q, k, v, pages.slabs, pages.scratch["pages"], window, scale, sinks, softcap)
    return _attend_all(q, k, v, rows, pages.tables, pages, window, scale, sinks, softcap)


def device_plan(
    rows: Sequence[Rows], pages: Pages, heads: tuple[int, int, int], device: torch.device, size: int | None = None
) -> DevicePlan:
    """What the GPU kernels read of a forward; heads: of queries, their size, of keys; `size`: rows of a graph."""
    return make(rows, pages.tables, [(0, pages.capacity)] * len(rows), _step(*heads), device, size)


def dense_plan(
    rows: Sequence[Rows],
    capacities: Sequence[int],
    heads: tuple[int, int, int],
    device: torch.device,
    size: int | None = None,
) -> DevicePlan:
    """`device_plan` for stores of so many slots, one for each sequence, that lie in order."""
    order = torch.arange(max([-(-(r.start + r.n) // PAGE) for r in rows]), dtype=torch.int32)
    return make(rows, [order] * len(rows), list(enumerate(capacities)), _step(*heads), device, size)


def _step(heads: int, dim: int, kv_heads: int) -> int:
    """Rows of a tile."""
    return queries_tile(heads // kv_heads, dim) // (heads // kv_heads)


@lru_cache(maxsize=4096)
def _addresses(stores: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(stores, device=device)


def _attend_all(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Sequence[Rows],
    stores: Sequence[Tensor],
    pages: Pages | None,
    window: int | None,
    scale: float,
    sinks: Tensor | None,
    softcap: float | None,
) -> Tensor:
    shape = (q.shape[0], k.shape[1] if pages else stores[0].shape[1], q.shape[2])
    for name, new in (("keys", k), ("values", v)):
        if new.shape != shape or new.dtype != q.dtype or new.device != q.device:
            raise ValueError(f"{name} {tuple(new.shape)} {new.dtype} on {new.device}, not {shape} {q.dtype} on cpu")
    out = torch.empty(q.shape[0], q.shape[1] * q.shape[2], dtype=q.dtype)
    k, v = _dense_rows(k), _dense_rows(v)
    keys, values, k_row, v_row = k.data_ptr(), v.data_ptr(), _row_bytes(k), _row_bytes(v)
    jobs = [
        (r.row, keys + r.row * k_row, values + r.row * v_row, store, r.start, r.n, r.parents)
        for r, store in zip(rows, stores, strict=True)
    ]
    _run(q, out, jobs, k.stride(0), v.stride(0), window, scale, sinks, softcap, pages, k.shape[1])
    return out


def write(store: Tensor, start: int, k: Tensor, v: Tensor) -> None:
    """Put keys and values (n, kv_heads, dim) at [start, start + n) of a store (2, kv_heads, capacity, dim)."""
    for own, new in zip(store, (k, v), strict=True):
        own[:, start : start + len(new)] = new.transpose(0, 1)


def _dense_rows(x: Tensor) -> Tensor:
    """x (n, heads, dim) with each row's heads in one piece."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _row_bytes(x: Tensor) -> int:
    return x.stride(0) * x.dtype.itemsize


def _run(
    q: Tensor,
    out: Tensor,
    jobs: list[tuple[Any, ...]],
    k_stride: int,
    v_stride: int,
    window: int | None,
    scale: float,
    sinks: Tensor | None,
    softcap: float | None,
    pages: Pages | None = None,
    kv_heads: int = 0,
) -> None:
    """Jobs are (row, address of new keys or 0, of new values or 0, store, start, n, parents).

    If there are pages, a table takes the place of each store.
    """
    q = _dense_rows(q)
    rows, heads, dim = q.shape
    at, to, q_row, out_row = q.data_ptr(), out.data_ptr(), _row_bytes(q), _row_bytes(out)
    kind = q.dtype if pages else jobs[0][3].dtype
    kv_heads = kv_heads or jobs[0][3].shape[1]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads do not share {kv_heads} key-value heads evenly")
    known = []
    for row, new_keys, new_values, store, start, n, parents in jobs:
        if pages:
            capacity = room = len(store) * PAGE
        else:
            capacity = room = store.shape[2]
            if store.shape != (2, kv_heads, capacity, dim) or store.dtype != kind or not store.is_contiguous():
                want = f"(2, {kv_heads}, capacity, {dim}) {kind}"
                raise ValueError(f"store {tuple(store.shape)} {store.dtype}, want {want}")
        if not 0 <= start <= room - n or kind != q.dtype:
            raise ValueError(f"a store of {room} x {kind} takes no rows {start} ... {start + n - 1} of {q.dtype}")
        if not 0 <= row <= rows - n:
            raise ValueError(f"{rows} rows of queries hold no rows {row} ... {row + n - 1}")
        rows_at = (at + row * q_row, new_keys, new_values, to + row * out_row)
        own, table = (0, store.data_ptr()) if pages else (store.data_ptr(), 0)
        capacity = pages.capacity if pages else capacity
        known.append((*rows_at, own, capacity, start, n, parents, table))
    strides, kind = (q.stride(0), k_stride, v_stride), native.TYPES[q.dtype]
    slabs, threads = pages.slabs.data_ptr() if pages else 0, torch.get_num_threads()
    sinks = None if sinks is None else native.fitting("sinks", sinks, (heads,), torch.float32, q.device)
    native.kernels.attend(
        known, slabs, heads, kv_heads, dim, strides, window or 0, scale, softcap or 0.0, native.address(sinks), kind,
        threads,
    )  # fmt: skip


def visible(
    n: int, start: int, parents: list[int] | None, window: int | None, first: int, last: int, device: torch.device
) -> Tensor:
    """(n, last - first) bool: which of the keys in slots [first, last) each row attends to; see `attend`."""
    slots = torch.arange(first, last, device=device)
    at = torch.arange(start, start + n, device=device)[:, None]
    if parents is None:
        seen = slots <= at
        return seen if window is None else seen & (slots > at - window)
    tree = torch.zeros(n, n, dtype=torch.bool)
    for i, parent in enumerate(parents):
        if parent >= 0:
            tree[i] = tree[parent]
        tree[i, i] = True
    at = start - 1 + tree.sum(1, keepdim=True).to(device)
    seen = slots.expand(n, -1) < start
    position = slots.clone()
    seen[:, start - first : start - first + n] = tree.to(device)
    position[start - first : start - first + n] = at[:, 0]
    return seen if window is None else seen & (position > at - window)


def attention_mask(visible: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """Additive mask (rows, keys) from visible (n, keys) bool: each row repeated `group` times, rows padded."""
    n, keys = visible.shape
    rows = -(-n * group // ROW_BLOCK) * ROW_BLOCK
    mask = torch.zeros(rows, keys, dtype=dtype, device=visible.device)  # rows of padding see every key: no 0/0
    hidden = ~visible if group == 1 else (~visible)[:, None].expand(n, group, keys).reshape(n * group, keys)
    mask[: n * group].masked_fill_(hidden, float("-inf"))
    return mask


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float | None = None) -> Tensor:
    """softmax(q k^T * scale + mask) v for one sequence; with `softcap` c, of c * tanh(q k^T * scale / c) + mask.

    q (n, heads, dim); k and v (kv_heads, keys, dim), keys a multiple of KEY_BLOCK; mask from `attention_mask`, for all
    heads or (kv_heads, rows, keys). Returns (n, heads * dim).
    """
    n, heads, dim = q.shape
    kv_heads = k.shape[0]
    group = heads // kv_heads
    folded = q.new_zeros(kv_heads, mask.shape[-2], dim)
    folded[:, : n * group] = q.view(n, kv_heads, group, dim).transpose(0, 1).reshape(kv_heads, n * group, dim)
    if softcap is not None:
        scores = torch.tanh(folded @ k.transpose(1, 2) * (scale / softcap)) * softcap + mask
        out = scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v
    else:
        mask = mask if mask.ndim == 2 else mask[None]
        out = F.scaled_dot_product_attention(folded[None], k[None], v[None], attn_mask=mask, scale=scale)[0]
    return out[:, : n * group].view(kv_heads, n, group, dim).transpose(0, 1).reshape(n, heads * dim)
