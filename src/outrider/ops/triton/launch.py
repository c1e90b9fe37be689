"""Calls of the kernels, with the sizes of their tiles: a frozen table, of which the order of sums knows no rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.ops import native
from outrider.ops.native import PAGE
from outrider.ops.triton import plan as plans
from outrider.ops.triton.graph import upload
from outrider.ops.triton.plan import DevicePlan, queries_tile

DTYPES = (torch.bfloat16, torch.float16)
OLDEST = 80  # compute capability times ten: bfloat16 in the matrix units

VOCABULARY = 4096  # logits that one program looks at
PLAIN, BYTES, SIGNED, UNSIGNED, FLOAT8, FLOAT4 = range(6)  # as in kernels.py
NO_FUSION = {"enable_fp_fusion": False}  # Triton's default changes from version to version, and bits with it

_emulated = False


@cache
def load() -> Any:
    """The kernels; None where Triton is not installed."""
    try:
        return import_module("outrider.ops.triton.kernels")
    except ImportError:
        return None


@contextmanager
def emulated() -> Iterator[None]:
    """Let Triton's interpreter compute what is on the CPU; needs TRITON_INTERPRET=1 from the start. For tests."""
    global _emulated
    before, _emulated = _emulated, True
    try:
        yield
    finally:
        _emulated = before


@cache
def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def runs(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether these kernels take tensors of this kind."""
    if dtype not in DTYPES:
        return False
    if device.type == "cpu":
        return _emulated and load() is not None  # Triton takes a third of a second to import
    nvidia = device.type == "cuda" and torch.version.hip is None  # weights are decoded in PTX
    return nvidia and _capability(device) >= OLDEST and load() is not None


def architecture(device: torch.device) -> int:
    """Which column of the table is read."""
    return 90 if device.type == "cpu" else column(_capability(device))


def column(capability: int) -> int:
    """sm_80, 90 or 100. GPUs of workstations, sm_86, 89 and 120, have little shared memory: theirs is the first."""
    return 90 if capability == 90 else 100 if 100 <= capability < 110 else OLDEST


@cache
def _how(device: torch.device, early: bool = True) -> dict[str, bool]:
    """How kernels are launched: on Hopper and later, before those in front of them have ended (kernels.await_turn)."""
    early = early and device.type == "cuda" and column(_capability(device)) > OLDEST
    return {"EARLY": early, "launch_pdl": early, **NO_FUSION}


# --- the table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    """How a program computes: its outputs, how many steps of K are on their way, its warps. Sums do not know it."""

    outputs: int
    stages: int
    warps: int = 4


@dataclass(frozen=True)
class Machine:
    """What sizes follow from: tiles by their rows, ascending, for plain weights, those of a byte, and of half a byte.

    Weights of few bits are decoded in registers, which leave room for 64 rows.
    """

    processors: int
    plain: dict[int, Tile]
    bytes: dict[int, Tile]
    halves: dict[int, Tile]

    def tiles(self, code: int) -> dict[int, Tile]:
        """Those for weights of a format."""
        return self.plain if code == PLAIN else self.bytes if code in (BYTES, FLOAT8) else self.halves


TABLE = {
    80: Machine(
        108,
        {16: Tile(64, 4), 32: Tile(64, 4), 64: Tile(64, 3), 128: Tile(64, 2)},
        {16: Tile(64, 3), 64: Tile(64, 2)},
        {16: Tile(64, 6), 32: Tile(64, 4), 64: Tile(64, 3)},
    ),
    90: Machine(
        132,
        {16: Tile(128, 4, 8), 32: Tile(128, 4, 8), 64: Tile(128, 4, 8), 128: Tile(128, 3, 8)},
        {16: Tile(64, 3), 32: Tile(64, 3), 64: Tile(64, 3)},
        {16: Tile(128, 3), 32: Tile(64, 4), 64: Tile(128, 3, 8)},
    ),
    100: Machine(
        148,
        {16: Tile(64, 5), 32: Tile(64, 5), 64: Tile(64, 4), 128: Tile(64, 3)},
        {16: Tile(64, 3), 32: Tile(64, 3), 64: Tile(64, 3)},
        {16: Tile(64, 4), 32: Tile(64, 4), 64: Tile(64, 4)},
    ),
}  # fmt: skip
CUT = 64  # outputs of a program, as shares of K are cut for
AT_WORK = 2, 8, 16  # of these, how many for a processor: of plain weights, of those of a byte, of half a byte
LEAST = 512  # inputs of a share; of a byte each, twice as many
STEP = 256  # inputs of groups that lie, and are taken, together; of no more than their factors fit into 64 bits
SHARES: dict[tuple[int, int, int, int | None, bool], int] = {}
"""By architecture, outputs, inputs, group, and whether of half a byte: `bench gpu --part orders` prints such lines."""
PARTS = 2**28  # bytes of what spans put aside at a time
LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Order:
    """In which a product's sums run: blocks of `depth` inputs, in `shares` of `per` blocks each, whole steps."""

    depth: int
    shares: int
    per: int


def groups_together(group: int) -> int:
    """Of so many inputs each, the most that are one step."""
    return min(4, max(1, STEP // group))


@cache
def order(outputs: int, inputs: int, group: int | None, architecture: int, halves: bool = False) -> Order:
    """Of a weight (outputs, inputs) in groups, or none, and if so of half a byte or more. Knows nothing of rows."""
    machine = TABLE[architecture]
    depth = group or (128 if inputs >= 128 else 64)
    blocks = -(-inputs // depth)
    kind = 0 if group is None else 1 + halves
    least = 2 * LEAST if kind == 1 else LEAST
    most = min(AT_WORK[kind] * machine.processors * CUT // outputs, inputs // least, 8)
    shares = SHARES.get((architecture, outputs, inputs, group, halves)) or max(1, most)
    per = -(-blocks // shares)
    step = groups_together(group) if group else 1
    per = -(-per // step) * step
    return Order(depth, -(-blocks // per), per)


def rows_tile(rows: int, machine: Machine, *codes: int) -> int:
    """Rows of a tile that weights of these formats have: as many as there are, or the most."""
    tiles = [tile for tile in machine.plain if all(tile in machine.tiles(code) for code in codes)]
    return next((tile for tile in tiles if tile >= rows), tiles[-1])


def queries_shape(wide: int) -> tuple[int, int, int]:
    """Warps of an attention program, blocks of keys on their way, and keys of a block, by the size of a head.

    A tile's sums follow its layout, so nothing else decides.
    """
    return (8, 2, 64) if wide > 128 else (4, 3, 64)


FOLDED = 8  # spans whose sums are added to each other before all others
MERGED, PART = 8, 32  # of these sums, how many are looked at together, and numbers of a head in one program


# --- products ---------------------------------------------------------------------------------------------------------


@dataclass
class Weights:
    """Weights as `product` reads them: (outs, inputs), or (groups, pieces, outs, bytes) and factors (steps, outs,
    together).

    So what a tile reads of a group lies together. Groups are filled up with zeros to whole steps. Of two 4-bit weights
    in a byte, half a group apart, the first has the lower bits. Those of 5 and 6 bits take bytes. The bytes of a group
    lie in one piece in their order, if rows are rounded; or else in pieces of sixteen, as `turned` has them.
    """

    data: Tensor
    outs: int
    inputs: int
    code: int = PLAIN
    group: int | None = None
    together: int = 1  # groups of a step, whose factors one number of at most 64 bits holds
    scales: Tensor | None = None
    offsets: Tensor | None = None
    zeros: Tensor | None = None
    order: Tensor | None = None  # (inputs,) int64: column i is of input order[i]
    rounded: bool = False  # whether rows are rounded to 8 bits, each group by itself

    @property
    def halves(self) -> bool:
        """Whether two weights are in a byte."""
        return self.code in (SIGNED, UNSIGNED, FLOAT4)

    @property
    def nbytes(self) -> int:
        """Of all that a product reads."""
        return sum(t.nbytes for t in (self.data, self.scales, self.offsets, self.zeros) if t is not None)


def pack(q: Any, device: torch.device, rounded: bool = False) -> Weights:
    """A weight (outs, inputs), which stays where it is if it is there, or a Quantized, as the kernels read it.

    With `rounded`, one that is `whole` takes rounded rows.
    """
    if isinstance(q, Tensor):
        return Weights(q.to(device).contiguous(), *q.shape)
    rows, inputs = q.values.shape
    groups, pairs = -(-inputs // q.group), q.bits == 4
    code = (FLOAT4 if pairs else FLOAT8) if q.floats else ((SIGNED if q.signed else UNSIGNED) if pairs else BYTES)
    values = q.values.to(device)
    values = values.view(torch.uint8) if code == FLOAT8 else values.to(torch.int8)
    if code == FLOAT4:  # numbers come doubled
        size = values.abs().long()
        index = torch.zeros(13, dtype=torch.int8, device=device)
        index[torch.tensor([0, 1, 2, 3, 4, 6, 8, 12], device=device)] = torch.arange(8, dtype=torch.int8, device=device)
        values = index[size] | ((values < 0).to(torch.int8) << 3)
    width = max(4 if isinstance(t, tuple) else t.itemsize for t in (q.scales, q.offsets, q.zeros) if t is not None)
    rounded = rounded and q.whole
    together = 1 if rounded else min(groups_together(q.group), 8 // width)
    steps = -(-groups // together)
    padded = torch.zeros(rows, steps * together * q.group, dtype=values.dtype, device=device)
    padded[:, :inputs] = values
    data = padded.view(rows, -1, q.group).transpose(0, 1).contiguous()
    if pairs:
        low, high = (half.to(torch.uint8) & 15 for half in data.chunk(2, -1))
        data = low | high << 4
    data = data[:, None] if rounded else turned(data)

    def factors(x: Any) -> Any:
        if isinstance(x, tuple):  # small ones times coarse ones: exact in float32
            fine, coarse = (part.to(device).float() for part in x)
            x = fine * coarse.repeat_interleave(native.SUPER // q.group, 1)[:, :groups]
        if x is None:
            return None
        x = F.pad(x.to(device), (0, steps * together - groups))
        return x.view(rows, steps, together).transpose(0, 1).contiguous()

    place = None if q.order is None else q.order.to(device).long()
    return Weights(
        data, rows, inputs, code, q.group, together, factors(q.scales), factors(q.offsets),
        factors(q.zeros), place, rounded,
    )  # fmt: skip


def turned(data: Tensor) -> Tensor:
    """Bytes (groups, outs, bytes) in pieces of sixteen (groups, pieces, outs, 16), of which four that one thread takes
    lie together: 0 1 8 9, 2 3 10 11, ... Fewer than sixteen stay in their order."""
    groups, outs, width = data.shape
    if width < 16:
        return data[:, None].contiguous()
    data = data.view(groups, outs, width // 16, 2, 4, 2).permute(0, 2, 1, 4, 3, 5)
    return data.reshape(groups, width // 16, outs, 16)


def straight(data: Tensor) -> Tensor:
    """Bytes (outs, groups, bytes) in their order, of pieces (groups, pieces, outs, bytes), which may be `turned`."""
    groups, pieces, outs, width = data.shape
    if width == 16:
        data = data.view(groups, pieces, outs, 4, 2, 2).transpose(3, 4)
    return data.reshape(groups, pieces, outs, width).permute(2, 0, 1, 3).flatten(2)


def rows(weights: Weights, at: Tensor) -> Tensor:
    """The weights (n, inputs) float32 of some outputs (n,)."""
    w = weights
    if w.group is None:
        return w.data[at].float()
    bits = w.data[:, :, at].permute(2, 0, 1, 3).flatten(2) if w.rounded else straight(w.data[:, :, at])
    if w.halves:
        bits = torch.cat([bits & 15, bits >> 4], -1).to(torch.int8)
    if w.code == SIGNED:
        bits = (bits ^ 8) - 8
    if w.code == FLOAT4:
        power, odd = (bits >> 1) & 3, bits & 1  # as kernels.decoded has it
        size = torch.where(power == 0, odd, (2 + odd) << (power - 1).clamp(min=0))
        bits = torch.where(bits & 8 != 0, -size, size)
    number = (bits.view(torch.float8_e4m3fn) if w.code == FLOAT8 else bits).float()
    scales, offsets, zeros = (
        None if x is None else x[:, at].transpose(0, 1).flatten(1).float()[..., None]
        for x in (w.scales, w.offsets, w.zeros)
    )
    number = number if zeros is None else number - zeros
    assert scales is not None
    number = number * scales
    number = number if offsets is None else number + offsets
    number = number.flatten(1)[:, : w.inputs]
    return number if w.order is None else number[:, w.order.argsort()]


def product(
    x: Tensor,
    weights: Weights,
    y: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    architecture: int = 90,
) -> None:
    """y = x W^T + bias, gated if it is, + residual; x (rows, inputs), y and residual rows of one stride."""
    kernels, machine, w = load(), TABLE[architecture], weights
    rows, o = len(x), order(w.outs, w.inputs, w.group, architecture, w.halves)
    x = x.contiguous() if w.order is None else x.index_select(1, w.order)
    x, sums, groups = entered(x, w)
    tile = rows_tile(rows, machine, w.code)
    own, high = machine.tiles(w.code)[tile], -(-rows // tile)
    # Many rows have programs for all processors as they are; both gate and up in shares would take too many registers.
    apart = o.shares > 1 and (gated or high * -(-w.outs // own.outputs) < machine.processors)
    parts = x.new_empty(o.shares, rows, w.outs, dtype=torch.float32) if apart else x
    behind = gated, bias is not None, residual is not None
    outs = w.outs // 2 if gated else w.outs
    wide, shares, inside = (w.outs, o.shares, 1) if apart else (outs, 1, o.shares)
    kernels.product[high, -(-wide // own.outputs), shares](
        x, w.data, _or(w.scales, x), _or(w.offsets, x), _or(w.zeros, x), sums, _or(bias, x), _or(residual, x), y, parts,
        rows, wide, y.stride(0), w.inputs, groups, o.per, w.code, w.offsets is not None, w.zeros is not None,
        w.inputs % (o.depth * w.together) == 0, *((False, False, False) if apart else behind), apart,
        inside, own.outputs, tile, o.depth, w.together, own.stages, _emulates(x), num_warps=own.warps,
        **_how(x.device, not w.halves),  # few large programs: those that come early share a processor with others
    )  # fmt: skip
    if apart:
        kernels.gather[rows, -(-outs // 1024)](
            parts, _or(bias, x), _or(residual, x), y, rows, outs, y.stride(0), *behind, o.shares, 1024, _emulates(x),
            num_warps=4, **_how(x.device),
        )  # fmt: skip


def entered(x: Tensor, w: Weights) -> tuple[Tensor, Tensor, int]:
    """x (rows, inputs) as a product takes it, what it needs to know of each group of it, and how many groups there are.

    Rounded rows are (rows, groups, at least 32) int8, with steps and sums (rows, groups, 2); else sums (rows, groups),
    if offsets want them, of which bfloat16 ones take parts (rows, steps, 16).
    """
    if w.group is None:
        return x, x, 1
    rows, groups, some, kernels = len(x), len(w.data), max(1, 1024 // w.group), load()
    grid, sizes = (rows, -(-groups // some)), (w.inputs, groups, some, w.group)
    if w.rounded:
        room = max(w.group, 32)
        y = x.new_empty(rows, groups, room, dtype=torch.int8)
        sums = x.new_empty(rows, groups, 2, dtype=torch.float32)
        kernels.round_rows[grid](x, y, sums, *sizes, room, w.code != BYTES, num_warps=4, **_how(x.device))
        return y, sums, groups
    if w.offsets is None:
        return x, x, groups
    matrix = w.offsets.dtype == torch.bfloat16
    shape = (rows, groups // w.together, 16) if matrix else (rows, groups)
    sums = x.new_empty(shape, dtype=torch.bfloat16 if matrix else torch.float32)
    kernels.group_sums[grid](x, sums, *sizes, w.together, matrix, _emulates(x), num_warps=4, **_how(x.device))
    return x, sums, groups


def _or(x: Tensor | None, other: Tensor) -> Tensor:
    """x; or, since a kernel wants some pointer, another one that is not read."""
    return other if x is None else x


def _emulates(x: Tensor) -> bool:
    return not x.is_cuda


# --- experts ----------------------------------------------------------------------------------------------------------


@dataclass
class Each:
    """One product of every expert: the first one's weights and bias, and where the tensors of all lie.

    places (experts, 5) int64, on the device: how many numbers behind the first one's data, scales, offsets, zeros and
    bias; 0 if there are none.
    """

    weights: Weights
    bias: Tensor | None
    places: Tensor

    @classmethod
    def of(cls, all_of: list[tuple[Weights, Tensor | None]]) -> Each | None:
        """None if they are of different kinds, or take their inputs in orders of their own."""
        kinds, places, first = set(), list[list[int]](), list[Tensor | None]()
        for w, bias in all_of:
            tensors = [w.data, w.scales, w.offsets, w.zeros, bias]
            kinds.add(
                (w.outs, w.inputs, w.code, w.group, w.rounded, *(None if t is None else t.dtype for t in tensors))
            )
            first = first or tensors
            places.append([
                0 if t is None or one is None else (t.data_ptr() - one.data_ptr()) // t.itemsize
                for one, t in zip(first, tensors, strict=True)
            ])  # fmt: skip
        ordered = any(w.order is not None for w, _ in all_of)
        if len(kinds) > 1 or ordered or any(row[0] % 16 for row in places):  # weights are read 16 at a time
            return None
        return cls(*all_of[0], torch.tensor(places, device=all_of[0][0].data.device))


@dataclass
class Experts:
    """Those that rows choose: hidden -> gate and up -> width -> hidden; kernels.py says what `kind` does."""

    gate_up: Each
    down: Each
    chosen: int
    normalised: bool
    shared: bool  # whether the last score is of an expert that all rows take
    kind: int
    clamp: tuple[float, float]
    architecture: int

    def __post_init__(self) -> None:
        self.count = len(self.gate_up.places)
        self.read = torch.zeros(2, dtype=torch.int64, device=self.gate_up.places.device)  # experts and calls, so far

    def __call__(
        self,
        x: Tensor,
        scores: Tensor,
        shared: Tensor | None = None,
        residual: Tensor | None = None,
        real: Tensor | None = None,
    ) -> Tensor:
        """What the experts give for x (rows, hidden), chosen by scores (rows, all) float32, plus residual.

        shared (rows, hidden) float32: what the shared one gives. real (1,) int32: rows from there on choose none.
        """
        wide = max(self._order(each).shares * each.weights.outs for each in (self.gate_up, self.down))
        room = max(1, PARTS // (4 * self.chosen * wide))  # rows at a time
        y = torch.empty_like(x)
        for at in range(0, len(x), room):
            own = slice(at, at + room)
            rest = real - at if real is not None and at else real
            given = (None if shared is None else shared[own]), (None if residual is None else residual[own])
            self._mix(x[own], scores[own], *given, rest, y[own])
        return y

    def _order(self, each: Each) -> Order:
        """As many shares as one row's experts need together."""
        w = each.weights
        return order(self.chosen * w.outs, w.inputs, w.group, self.architecture, w.halves)

    def _mix(
        self, x: Tensor, scores: Tensor, shared: Tensor | None, residual: Tensor | None, real: Tensor | None, y: Tensor
    ) -> None:
        kernels, rows, emulates = load(), len(x), _emulates(x)
        count, machine, block = rows * self.chosen, TABLE[self.architecture], power(self.count)
        experts, line = (torch.empty(count, dtype=torch.int32, device=x.device) for _ in range(2))
        weights = torch.empty(rows, self.chosen + self.shared, dtype=torch.float32, device=x.device)
        kernels.route[rows,](
            scores, experts, weights, _or(real, scores), self.count, scores.shape[1], self.chosen, self.normalised,
            real is not None, block, num_warps=1, **_how(x.device),
        )  # fmt: skip
        ends = torch.empty(self.count, dtype=torch.int32, device=x.device)
        kernels.line_up[self.count,](experts, line, ends, count, min(1024, power(count)), num_warps=1, **_how(x.device))
        fair = -(-count // self.count)
        tile = rows_tile(2 * fair, machine, self.gate_up.weights.code, self.down.weights.code)
        tiles = torch.empty(min(self.count, count) + count // tile, 3, dtype=torch.int32, device=x.device)
        kernels.deal[len(tiles),](ends, tiles, self.read, self.count, block, tile, num_warps=1, **_how(x.device))
        inner = x.new_empty(count, self.down.weights.inputs)
        parts, behind = self._products(self.gate_up, x, self.chosen, tiles, line, tile, count)
        bias = self.gate_up.bias
        kernels.activate[count, -(-inner.shape[1] // 1024)](
            parts, self.gate_up.places, _or(bias, x), experts, inner, count, inner.shape[1], self.kind, *self.clamp,
            *behind, 1024, emulates, num_warps=4, **_how(x.device),
        )  # fmt: skip
        parts, behind = self._products(self.down, inner, 1, tiles, line, tile, count)
        kernels.mix[rows, -(-x.shape[1] // 1024)](
            parts, self.down.places, _or(self.down.bias, x), experts, weights, _or(shared, parts), _or(residual, x), y,
            count, x.shape[1], self.chosen, shared is not None, residual is not None, *behind, 1024, emulates,
            num_warps=4, **_how(x.device),
        )  # fmt: skip

    def _products(
        self, each: Each, x: Tensor, entries: int, tiles: Tensor, line: Tensor, tile: int, count: int
    ) -> tuple[Tensor, tuple[int, bool]]:
        """Parts (shares, count, outs) of x, whose rows have so many entries each; shares; whether a bias follows."""
        w, o = each.weights, self._order(each)
        own = TABLE[self.architecture].tiles(w.code)[tile]
        parts = torch.empty(o.shares, count, w.outs, dtype=torch.float32, device=x.device)
        x, sums, groups = entered(x, w)
        load().products[len(tiles), -(-w.outs // own.outputs), o.shares](
            x, w.data, _or(w.scales, x), _or(w.offsets, x), _or(w.zeros, x), sums, each.places, tiles, line, parts,
            count, w.outs, w.inputs, groups, o.per, entries, w.code, w.offsets is not None, w.zeros is not None,
            w.inputs % (o.depth * w.together) == 0, own.outputs, tile, o.depth, w.together, own.stages,
            _emulates(x), num_warps=own.warps, **_how(x.device, not w.halves),
        )  # fmt: skip
        return parts, (o.shares, each.bias is not None)


# --- rows -------------------------------------------------------------------------------------------------------------


def power(n: int) -> int:
    """The least power of 2 that is no less than n, and 16."""
    return max(16, 1 << (n - 1).bit_length())


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x (..., width) / sqrt(mean(x^2) + eps) * weight (width,)."""
    x, width = x.contiguous(), x.shape[-1]
    y, block = torch.empty_like(x), power(width)
    rows = x.numel() // max(1, width)
    if rows:
        load().rms_norm[rows,](x, weight, y, eps, width, block, _emulates(x), num_warps=_warps(block), **_how(x.device))
    return y


def _warps(block: int) -> int:
    return max(1, min(8, block // 512))


def rope(
    qkv: Tensor, heads: int, kv_heads: int, cos: Tensor, sin: Tensor, norms: tuple[Tensor, Tensor] | None, eps: float
) -> None:
    """Norm and turn the queries and keys of qkv (n, (heads + 2 * kv_heads) * dim) where they lie; as ops.rope."""
    dim = qkv.shape[1] // (heads + 2 * kv_heads)
    q_norm, k_norm = norms or (cos, cos)
    half = power(dim // 2)
    load().rope[len(qkv), heads + kv_heads](
        qkv, qkv.stride(0), cos, sin, q_norm, k_norm, eps, heads, dim, half, norms is not None, _emulates(qkv),
        num_warps=1, **_how(qkv.device),
    )  # fmt: skip


# --- attention --------------------------------------------------------------------------------------------------------


def folds(plan: DevicePlan, kv_heads: int, dim: int, processors: int) -> int:
    """How many spans one program takes: FOLDED where rows alone give programs to most processors, which have two each,
    unless heads leave no registers for it or a tree branches."""
    many = len(plan.tiles) * kv_heads >= processors * 3 // 2
    return FOLDED if many and dim <= 128 and not plan.reach else 1


def parts_of(entries: int, heads: int, dim: int) -> int:
    """Bytes that so many sums of one row take."""
    return 4 * heads * entries * (power(dim) + 2)


def at_once(plan: DevicePlan, heads: int, dim: int, kv_heads: int, device: torch.device) -> bool:
    """Whether all rows of a plan are attended to in one piece, as in a graph, which keeps what they put aside."""
    entries = -(-plan.spans // folds(plan, kv_heads, dim, TABLE[architecture(device)].processors))
    return len(plan.positions) * parts_of(entries, heads, dim) <= PARTS


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slabs: Tensor,
    plan: DevicePlan,
    window: int | None,
    scale: float,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Write new keys and values (rows, kv_heads, dim) and let q (rows, heads, dim) look: (rows, heads * dim).

    slabs: the addresses (slabs,) int64, on the device, of this layer's (2, kv_heads, capacity, dim) each. sinks and
    softcap as ops.attend has them.
    """
    kernels, (rows, heads, dim), kv_heads = load(), q.shape, k.shape[1]
    q, k, v = (x if x.stride(2) == 1 and x.stride(1) == dim else x.contiguous() for x in (q, k, v))
    emulates, wide, bm = _emulates(q), power(dim), queries_tile(heads // kv_heads, dim)
    warps, stages, keys = queries_shape(wide)
    spans = plans.SPANS.near, plans.SPANS.few, plans.SPANS.far
    lone = plan.reach * min(bm // (heads // kv_heads), rows)
    kernels.write[rows, kv_heads](
        k, v, k.stride(0), v.stride(0), slabs, plan.places, kv_heads, dim, wide, num_warps=1, **_how(q.device)
    )
    y = torch.empty(rows, heads * dim, dtype=q.dtype, device=q.device)
    fold = folds(plan, kv_heads, dim, TABLE[architecture(q.device)].processors)
    entries = -(-plan.spans // fold)
    part = wide if fold > 1 else min(wide, PART)  # numbers of a head in a program
    room = max(1, PARTS // parts_of(entries, heads, dim))  # rows at a time
    for first, last, tiles in plan.pieces(room):
        parts = torch.empty(last - first, heads, entries, wide, dtype=torch.float32, device=q.device)
        sizes = torch.empty(last - first, heads, entries, 2, dtype=torch.float32, device=q.device)
        kernels.attend[len(tiles), kv_heads, lone + entries](
            q, q.stride(0), slabs, plan.tables, tiles, plan.positions, plan.tails, plan.tails.shape[1], parts, sizes,
            scale * LOG2E, first, plan.spans, plan.reach, lone, heads, kv_heads, dim, wide, bm, window or 0,
            softcap or 0.0, *spans, fold, keys, PAGE, stages, emulates, num_warps=warps, **_how(q.device),
        )  # fmt: skip
        kernels.combine[last - first, heads, wide // part](
            parts, sizes, plan.positions, _or(sinks, parts), y, first, plan.spans, heads, dim, wide, window or 0,
            sinks is not None, *spans, fold, FOLDED, MERGED, part, emulates, num_warps=1, **_how(q.device),
        )  # fmt: skip
    return y


def take(source: Tensor, target: Tensor, runs: list[tuple[int, ...]], kv_heads: int, dim: int) -> None:
    """Copy keys and values between caches, in all layers, whose slabs lie at source and target (layers, slabs).

    A run: how many tokens, slab, first slot there and slots of a slab, and the same of where they go.
    """
    table = torch.tensor(runs, dtype=torch.int32)
    counts = table[:, 0]
    places = table[:, 1:].repeat_interleave(counts, 0)
    begins = (counts.cumsum(0) - counts).repeat_interleave(counts)
    places[:, [1, 4]] += (torch.arange(len(places)) - begins)[:, None].int()
    places = upload(places, source.device)
    load().take[len(places), kv_heads, len(source)](
        source, source.stride(0), target, target.stride(0), places, kv_heads, dim, power(dim), num_warps=1,
        **_how(source.device),
    )  # fmt: skip


# --- the choice -------------------------------------------------------------------------------------------------------


def choose(logits: Tensor, keys: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """By Law 1 the token of each row of (rows, vocab) float32, on its device: (rows,) int32; -1 where there is none.

    And (rows,) float32 what share it has of the softmax of all scores, noise included. keys (rows,) int64 as
    sampling.noise_key gives them; temperatures (rows,) float32, of which 0 is greedy. The logits lie in the cache of
    the device still: Law 1 shifts them by a row's largest, which the last may be.
    """
    rows, vocab = logits.shape
    kernels, tiles = load(), -(-vocab // VOCABULARY)
    wide = power(tiles)
    most, values, shares = logits.new_empty(3, rows, tiles)
    indices = torch.empty(rows, tiles, dtype=torch.int32, device=logits.device)
    chosen, sure = torch.empty(rows, dtype=torch.int32, device=logits.device), logits.new_empty(rows)
    kernels.largest[rows, tiles](logits, most, vocab, tiles, VOCABULARY, num_warps=4, **_how(logits.device))
    kernels.draw[rows, tiles](
        logits, most, keys, temperatures, values, indices, shares, vocab, tiles, wide, VOCABULARY, num_warps=4,
        **_how(logits.device),
    )  # fmt: skip
    kernels.choose[rows,](
        most, values, indices, shares, chosen, sure, tiles, wide, num_warps=1, **_how(logits.device)
    )  # fmt: skip
    return chosen, sure
