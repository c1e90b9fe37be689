"""What runs on the GPU. Each row's sums have one order, whatever shares the launch (Law 2).

A product reads K in blocks of a size, and in shares, that follow from the weight alone; tiles over rows are free.
Weights are the left operand of the matrix instruction and rows its columns, so that one and sixty-four rows run the
same one. Weights of few bits become bfloat16 in their registers, as inline assembly. Attention reads keys some at a
time in the order of positions, in spans that begin at fixed positions; shares and spans are put aside and added in
order. There are no atomics, and sums over a tile are only taken where its layout does not follow the number of rows.

EMULATE is for Triton's interpreter, whose bfloat16 is wrong in all but loads: there it is widened before arithmetic,
and rounded by hand.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

PLAIN, BYTES, SIGNED, UNSIGNED, FLOAT8, FLOAT4 = (tl.constexpr(code) for code in range(6))  # formats of weights
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def as_operand(x, EMULATE: tl.constexpr):
    """What the matrix instruction takes."""
    return x.to(tl.float32) if EMULATE else x


@triton.jit
def rounded(x, dtype: tl.constexpr, EMULATE: tl.constexpr):
    """float32 in another dtype, to nearest even."""
    if EMULATE and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        near = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        near = tl.where(x == x, near, (bits >> 16) | 0x40)
        return near.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def operand(x, dtype: tl.constexpr, EMULATE: tl.constexpr):
    """float32 rounded to what the matrix instruction takes."""
    return as_operand(rounded(x, dtype, EMULATE), EMULATE)


@triton.jit
def let_next(EARLY: tl.constexpr):
    """Let the next kernel be launched. If EARLY, that is up to kernels, and so is to wait."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait(EARLY: tl.constexpr):
    """Wait for what the kernels before have written; what the host has sent can be read sooner.

    Every program must: who waits for the last kernel only, relies on its having waited for those before.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()


@triton.jit
def await_turn(EARLY: tl.constexpr):
    """Both."""
    let_next(EARLY)
    wait(EARLY)


# --- products ---------------------------------------------------------------------------------------------------------


@triton.jit
def decoded(bits, FORMAT: tl.constexpr, dtype: tl.constexpr, EMULATE: tl.constexpr):
    """Weights of few bits, each in an int32 of its own, as the numbers that they are: exact in any dtype."""
    if FORMAT == SIGNED:
        bits = (bits ^ 8) - 8
    elif FORMAT == FLOAT4:  # twice the number: 0 1 2 3 4 6 8 12
        power, odd = (bits >> 1) & 3, bits & 1
        size = tl.where(power == 0, odd, (2 + odd) << tl.maximum(power - 1, 0))
        bits = tl.where(bits & 8 != 0, -size, size)
    if FORMAT == FLOAT8:  # e4m3: the exponent is 120 short of float32's
        sign, size = (bits & 0x80) << 24, (bits & 0x7F) << 20
        number = (sign | size).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2 ^ 120
    else:
        number = bits.to(tl.float32)
    return operand(number, dtype, EMULATE)


# Four bytes become bfloat16, or float16, in their register. Beside an upper byte of 0x43 (0x64) a byte is the number
# 128 (1024) plus its bits, from which an exact instruction takes what is too much. $0, $1 (and $2, $3) are pairs of
# numbers, the bytes follow, and then, of each pair, what is added. fma is not sub: sm_80 has no other.


def _halves(flip: int, upper: int, add: str) -> tl.constexpr:
    """Of the lower and of the upper four bits of each byte; 0x6a is (a & b) ^ c."""
    lines = [f"prmt.b32 {to}, {of}, {upper:#x}, {at};" for to, of, at in [
        ("a", "low", "0x4140"), ("b", "low", "0x4342"), ("c", "high", "0x4140"), ("d", "high", "0x4342"),
    ]]  # fmt: skip
    lines += [add.format(i, "abcd"[i], 5 + i % 2) for i in range(4)]
    return tl.constexpr(f"""{{
        .reg .b32 low, high, a, b, c, d, one;
        mov.b32 one, 0x3f803f80;
        shr.u32 high, $4, 4;
        lop3.b32 low, $4, 0x0f0f0f0f, {flip:#x}, 0x6a;
        lop3.b32 high, high, 0x0f0f0f0f, {flip:#x}, 0x6a;
        {" ".join(lines)}
    }}""")


ADD, ADD16 = "fma.rn.bf16x2 ${0}, {1}, one, ${2};", "add.rn.f16x2 ${0}, {1}, ${2};"
HALVES, HALVES16 = _halves(0, 0x43434343, ADD), _halves(0, 0x64646464, ADD16)
SIGNED_HALVES, SIGNED_HALVES16 = _halves(0x08080808, 0x43434343, ADD), _halves(0x08080808, 0x64646464, ADD16)
# Of eight bits bfloat16 has room for seven: 128 + these, less 128, or 256 of a negative one.
WHOLE = tl.constexpr("""{
        .reg .b32 low, sign, a, b, c, d, minus;
        mov.b32 minus, 0xbf80bf80;
        and.b32 low, $2, 0x7f7f7f7f;
        and.b32 sign, $2, 0x80808080;
        prmt.b32 a, low, 0x43434343, 0x4140;
        prmt.b32 b, low, 0x43434343, 0x4342;
        prmt.b32 c, sign, 0x43434343, 0x4140;
        prmt.b32 d, sign, 0x43434343, 0x4342;
        fma.rn.bf16x2 $0, c, minus, a;
        fma.rn.bf16x2 $1, d, minus, b;
    }""")
WHOLE16 = tl.constexpr("""{
        .reg .b32 bits, a, b, less;
        mov.b32 less, 0xe480e480;
        xor.b32 bits, $2, 0x80808080;
        prmt.b32 a, bits, 0x64646464, 0x4140;
        prmt.b32 b, bits, 0x64646464, 0x4342;
        add.rn.f16x2 $0, a, less;
        add.rn.f16x2 $1, b, less;
    }""")  # less 1024 + 128


@triton.jit
def halves(bits, zero, FORMAT: tl.constexpr, ZEROS: tl.constexpr, dtype: tl.constexpr):
    """Both numbers of each byte, less zeros: exact."""
    BASE: tl.constexpr = (128 if dtype == tl.bfloat16 else 1024) + (8 if FORMAT == SIGNED else 0)
    less = (-BASE - zero).to(tl.float32) if ZEROS else tl.full((1, 1, 1), -BASE, tl.float32)
    less = tl.broadcast_to(less.to(dtype), bits.shape)
    if dtype == tl.bfloat16:
        TEXT: tl.constexpr = SIGNED_HALVES if FORMAT == SIGNED else HALVES
        both = tl.inline_asm_elementwise(
            TEXT, "=r,=r,=r,=r,r,r,r", [bits, less], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        TEXT: tl.constexpr = SIGNED_HALVES16 if FORMAT == SIGNED else HALVES16
        both = tl.inline_asm_elementwise(
            TEXT, "=r,=r,=r,=r,r,r,r", [bits, less], (tl.float16, tl.float16), is_pure=True, pack=4
        )
    return both


@triton.jit
def numbers(bits, zero, FORMAT: tl.constexpr, ZEROS: tl.constexpr, dtype: tl.constexpr, EMULATE: tl.constexpr):
    """Bytes (pieces, BN, 16) of one group as an operand (BN, weights): the numbers that they are, less zeros (BN,).

    Of sixteen bytes, four that lie together are of the columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9, which one thread has.
    """
    PAIRS: tl.constexpr = (FORMAT == SIGNED) | (FORMAT == UNSIGNED) | (FORMAT == FLOAT4)
    PIECES: tl.constexpr = bits.shape[0]
    BN: tl.constexpr = bits.shape[1]
    WIDE: tl.constexpr = bits.shape[2]
    zero = zero[None, :, None] if ZEROS else zero
    if PAIRS:
        if FORMAT == FLOAT4 or EMULATE:
            bits = bits.to(tl.int32)
            low, high = bits & 15, (bits >> 4) & 15
            if ZEROS:
                low = decoded(decoded(low, FORMAT, tl.float32, False).to(tl.int32) - zero, BYTES, dtype, EMULATE)
                high = decoded(decoded(high, FORMAT, tl.float32, False).to(tl.int32) - zero, BYTES, dtype, EMULATE)
            else:
                low, high = decoded(low, FORMAT, dtype, EMULATE), decoded(high, FORMAT, dtype, EMULATE)
        else:
            low, high = halves(bits, zero, FORMAT, ZEROS, dtype)
        own = tl.join(low, high)  # a pair's upper bits are of the upper half of a group
    elif FORMAT == FLOAT8 or ZEROS or EMULATE:
        bits = bits.to(tl.int32)
        own = decoded(bits - zero if ZEROS else bits, FORMAT, dtype, EMULATE)
    elif dtype == tl.bfloat16:
        own = tl.inline_asm_elementwise(WHOLE, "=r,=r,r", [bits], tl.bfloat16, is_pure=True, pack=4)
    else:
        own = tl.inline_asm_elementwise(WHOLE16, "=r,=r,r", [bits], tl.float16, is_pure=True, pack=4)
    if WIDE == 16 and PAIRS:
        own = tl.permute(tl.reshape(own, (PIECES, BN, 4, 2, 2, 2)), (1, 5, 0, 3, 2, 4))
    elif WIDE == 16:
        own = tl.permute(tl.reshape(own, (PIECES, BN, 4, 2, 2)), (1, 0, 3, 2, 4))
    elif PAIRS:
        own = tl.permute(own, (1, 3, 0, 2))
    else:
        own = tl.permute(own, (1, 0, 2))
    own = tl.reshape(own, (BN, PIECES * WIDE * 2 if PAIRS else PIECES * WIDE))
    if not EMULATE:  # a copy that costs nothing; but for sm_100 Triton would lay out the pieces as the matrix, and fail
        if dtype == tl.bfloat16:
            own = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [own], tl.bfloat16, is_pure=True, pack=2)
        else:
            own = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [own], tl.float16, is_pure=True, pack=2)
    return own


@triton.jit
def words(factors, step, OUTS, n, TOGETHER: tl.constexpr):
    """The factors of a step's groups, of outputs n (BN,): one integer for each output."""
    BITS: tl.constexpr = TOGETHER * factors.dtype.element_ty.primitive_bitwidth
    if BITS == 8:
        kind: tl.constexpr = tl.int8
    elif BITS == 16:
        kind: tl.constexpr = tl.int16
    elif BITS == 32:
        kind: tl.constexpr = tl.int32
    else:
        kind: tl.constexpr = tl.int64
    return tl.load(factors.to(tl.pointer_type(kind), bitcast=True) + step * OUTS + n)


@triton.jit
def factor(word, AT: tl.constexpr, dtype: tl.constexpr):
    """One group's, as float32."""
    BITS: tl.constexpr = dtype.primitive_bitwidth
    own = word >> (AT * BITS) if AT else word
    if dtype == tl.float32:
        return own.to(tl.int32).to(tl.float32, bitcast=True)
    if dtype == tl.bfloat16:
        return (own.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    if dtype == tl.float16:
        return own.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return own.to(dtype).to(tl.float32)


@triton.jit
def integers(
    total, x, w, scales, offsets, zeros, sums, n, r, OUTS, GROUPS, block,
    FORMAT: tl.constexpr, OFFSETS: tl.constexpr, ZEROS: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """total, and the products of one group with rounded rows: a sum of integers, and the roundings of the CPU's."""
    PAIRS: tl.constexpr = (FORMAT == SIGNED) | (FORMAT == UNSIGNED)
    ROOM: tl.constexpr = BK if BK > 32 else 32  # what the matrix instruction takes at least
    WIDTH: tl.constexpr = BK // 2 if PAIRS else BK
    k, own = tl.arange(0, ROOM), tl.arange(0, ROOM // 2 if PAIRS else ROOM)
    far = tl.cast(block, tl.int64) * OUTS + n
    at = w + far[:, None] * WIDTH + own[None, :]
    if BK < ROOM:
        codes = tl.load(at, (own < WIDTH)[None, :], 0, eviction_policy="evict_first")
    else:
        codes = tl.load(at, eviction_policy="evict_first")
    if PAIRS:
        low, high = (codes & 15).to(tl.int8), (codes >> 4).to(tl.int8)
        codes = tl.interleave(low, high)
        if FORMAT == SIGNED:
            codes = (codes ^ 8) - 8
    whole = tl.dot(codes.to(tl.int8), tl.load(x + r[None, :] * (GROUPS * ROOM) + block * ROOM + k[:, None]))
    at = sums + (r * GROUPS + block) * 2
    scale = tl.load(scales + far).to(tl.float32)
    total = tl.fma(tl.broadcast_to(scale[:, None], (BN, BR)), whole.to(tl.float32) * tl.load(at)[None, :], total)
    if OFFSETS or ZEROS:
        offset = tl.load(offsets + far).to(tl.float32) if OFFSETS else -(scale * tl.load(zeros + far).to(tl.float32))
        own_sums = tl.broadcast_to(tl.load(at + 1)[None, :], (BN, BR))
        total = tl.fma(tl.broadcast_to(offset[:, None], (BN, BR)), own_sums, total)
    return total


@triton.jit
def shifts(
    total, offsets, sums, step, n, r, live, OUTS, STEPS, TOGETHER: tl.constexpr, EMULATE: tl.constexpr
):  # fmt: skip
    """total, and bfloat16 offsets of a step's groups times their sums, of which bfloat16 takes three parts: sixteen
    columns more (group_sums)."""
    c = tl.arange(0, 16)
    inside = c < 3 * TOGETHER
    a = tl.load(offsets + ((step * OUTS + n) * TOGETHER)[:, None] + (c % TOGETHER)[None, :], inside[None, :], 0.0)
    b = tl.load(sums + ((r * STEPS + step) * 16)[None, :] + c[:, None], inside[:, None] & live[None, :], 0.0)
    return tl.dot(as_operand(a, EMULATE), as_operand(b, EMULATE), total)


# A load that has 256 bytes brought into the second-level cache. What it reads decides nothing, but has to be used.
TOUCH = tl.constexpr("""{
        .reg .b32 number;
        .reg .pred same;
        ld.global.L2::256B.b32 number, [$1];
        setp.eq.u32 same, number, 0x7fc1dead;
        @same prefetch.global.L2 [$1];
        mov.b32 $0, number;
    }""")


@triton.jit
def beginnings(at_n, outs, K, first, BN: tl.constexpr, BK: tl.constexpr):
    """Where every 256 bytes begin in the first KB of this share of each output's plain weights, from at_n on."""
    j = tl.arange(0, BN * 4)
    k = tl.minimum(first * BK + j % 4 * 128, K - BK)
    return tl.minimum(at_n + j // 4, outs - 1).to(tl.int64) * K + k


@triton.jit
def pieces(at_n, outs, first, last, WIDTH: tl.constexpr, WIDE: tl.constexpr, BN: tl.constexpr):
    """The same of the first 32 KB of a share's weights of few bits: WIDTH bytes of a group, in pieces (outs, WIDE)."""
    PER: tl.constexpr = BN * WIDE // 256 if BN * WIDE > 256 else 1
    j = tl.arange(0, 128)
    piece = tl.minimum(first * (WIDTH // WIDE) + j // PER, last * (WIDTH // WIDE) - 1)
    return piece.to(tl.int64) * (outs * WIDE) + tl.minimum(at_n * WIDE + j % PER * 256, outs * WIDE - 4)


@triton.jit
def touch(at):
    """Fetch what is at, and behind, these places, while a program waits for its turn.

    Prefetches alone changed nothing: it seems that those whose pages are not known yet are dropped.
    """
    tl.inline_asm_elementwise(TOUCH, "=r,l", [at.to(tl.int64)], tl.int32, is_pure=False, pack=1)


@triton.jit
def share(
    x, w, scales, offsets, zeros, sums, at_n, outs, beyond, r, live, K, OUTS, GROUPS, first, last,
    FORMAT: tl.constexpr, OFFSETS: tl.constexpr, ZEROS: tl.constexpr, EVEN: tl.constexpr, BN: tl.constexpr,
    BR: tl.constexpr, BK: tl.constexpr, TOGETHER: tl.constexpr, STAGES: tl.constexpr, EMULATE: tl.constexpr,
):  # fmt: skip
    """Products (BN, BR) of weights from at_n on, below outs, of those `beyond`, with rows r, which may be rounded, over
    blocks [first, last) of K.

    Groups that lie together are taken in one step of the loop. Rows that are not `live` are of any value; unless they
    are rounded, they are not read: a row that sixteen lanes repeat is read sixteen times, from one place.
    """
    total = tl.zeros((BN, BR), tl.float32)
    n = tl.minimum(at_n + tl.arange(0, BN), outs - 1).to(tl.int64) + beyond
    if FORMAT == PLAIN:
        for block in tl.range(first, last, num_stages=STAGES):
            k = block * BK + tl.arange(0, BK)
            at_w, at_x = w + n[:, None] * K + k[None, :], x + r[None, :] * K + k[:, None]
            if EVEN:
                a, b = tl.load(at_w, eviction_policy="evict_first"), tl.load(at_x, live[None, :], 0.0)
            else:
                inside = (k < K)[:, None] & live[None, :]
                a, b = tl.load(at_w, k[None, :] < K, 0.0), tl.load(at_x, inside, 0.0)
            total = tl.dot(as_operand(a, EMULATE), as_operand(b, EMULATE), total)
    elif x.dtype.element_ty == tl.int8:
        for block in tl.range(first, last, num_stages=STAGES):
            total = integers(
                total, x, w, scales, offsets, zeros, sums, n, r, OUTS, GROUPS, block, FORMAT, OFFSETS, ZEROS, BN, BR,
                BK,
            )  # fmt: skip
    else:
        dtype: tl.constexpr = x.dtype.element_ty
        WIDTH: tl.constexpr = BK // 2 if (FORMAT == SIGNED) | (FORMAT == UNSIGNED) | (FORMAT == FLOAT4) else BK
        WIDE: tl.constexpr = WIDTH if WIDTH < 16 else 16
        PIECES: tl.constexpr = WIDTH // WIDE
        k, piece, j = tl.arange(0, BK), tl.arange(0, PIECES), tl.arange(0, BN * WIDE)  # two axes: Triton has no three
        own = (tl.minimum(at_n + j // WIDE, outs - 1).to(tl.int64) + beyond) * WIDE + j % WIDE
        at_w, at_x = piece[:, None] * (OUTS * WIDE) + own[None, :], r[None, :] * K + k[:, None]
        MATRIX: tl.constexpr = OFFSETS and offsets.dtype.element_ty == tl.bfloat16
        ADDED: tl.constexpr = OFFSETS and not MATRIX
        at_sums = r.to(tl.int32) * (GROUPS if TOGETHER == 1 else GROUPS // 2)  # which are loaded by twos
        pair = tl.zeros((BR,), tl.int64)
        begin, end = tl.cast(first // TOGETHER, tl.int64), tl.cast(tl.cdiv(last, TOGETHER), tl.int64)
        for step in tl.range(begin, end, num_stages=STAGES):
            if MATRIX:
                total = shifts(total, offsets, sums, step, n, r, live, OUTS, GROUPS // TOGETHER, TOGETHER, EMULATE)
            scale = words(scales, step, OUTS, n, TOGETHER)
            offset = words(offsets, step, OUTS, n, TOGETHER) if ADDED else scale
            zero = words(zeros, step, OUTS, n, TOGETHER) if ZEROS else scale
            for i in tl.static_range(TOGETHER):
                block = step * TOGETHER + i
                bits = tl.load(w + block * OUTS * WIDTH + at_w, eviction_policy="evict_first")
                bits = tl.reshape(bits, (PIECES, BN, WIDE))
                there = live[None, :] if EVEN else live[None, :] & (block * BK + k < K)[:, None]
                b = tl.load(x + block * BK + at_x, there, 0.0)
                less = factor(zero, i, zeros.dtype.element_ty).to(tl.int32) if ZEROS else 0
                part = tl.dot(numbers(bits, less, FORMAT, ZEROS, dtype, EMULATE), as_operand(b, EMULATE))
                by = factor(scale, i, scales.dtype.element_ty)
                total = tl.fma(part, tl.broadcast_to(by[:, None], (BN, BR)), total)
                if ADDED:
                    by = factor(offset, i, offsets.dtype.element_ty)
                    if TOGETHER == 1:
                        inputs = tl.load(sums + block + at_sums)
                    elif i % 2 == 0:
                        pair = tl.load((sums + block).to(tl.pointer_type(tl.int64), bitcast=True) + at_sums)
                        inputs = factor(pair, 0, tl.float32)
                    else:
                        inputs = factor(pair, 1, tl.float32)
                    total = tl.fma(
                        tl.broadcast_to(by[:, None], (BN, BR)), tl.broadcast_to(inputs[None, :], (BN, BR)), total
                    )
    return total


@triton.jit
def finished(gate, up, bias, residual, n, at, outs, inside, GATED: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr):
    """What stands behind a product: bias, gate and residual, whose numbers are `at`."""
    if BIAS:
        gate += tl.load(bias + n, inside, 0.0).to(tl.float32)
    if GATED:
        if BIAS:
            up += tl.load(bias + outs + n, inside, 0.0).to(tl.float32)
        gate = gate / (1.0 + tl.exp2(-gate * LOG2E)) * up
    if ADD:
        gate += tl.load(residual + at, inside, 0.0).to(tl.float32)
    return gate


@triton.jit(do_not_specialize=["rows", "per"])
def product(
    x, w, scales, offsets, zeros, sums, bias, residual, y, parts, rows, outs, stride, K, GROUPS, per,
    FORMAT: tl.constexpr, OFFSETS: tl.constexpr, ZEROS: tl.constexpr, EVEN: tl.constexpr, GATED: tl.constexpr,
    BIAS: tl.constexpr, ADD: tl.constexpr, APART: tl.constexpr, SHARES: tl.constexpr,
    BN: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, TOGETHER: tl.constexpr, STAGES: tl.constexpr,
    EMULATE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y (rows, outs) of x (rows, K) and weights (outs, K), or twice as many if GATED; or, APART, this share of K.

    A share is `per` blocks of K, and goes to parts (shares, rows, outs), gates and ups alike; else a program takes all
    SHARES, and adds them in the order in which they are gathered.

    Rows of y and residual are `stride` apart. Grid: tiles of rows, tiles of outputs, shares. Lanes beyond either end
    repeat the last one.
    """
    r, n = tl.program_id(0) * BR + tl.arange(0, BR), tl.program_id(1) * BN + tl.arange(0, BN)
    live, wide = r < rows, outs * 2 if GATED else outs
    inside = (n < outs)[:, None] & live[None, :]
    n, r = tl.minimum(n, outs - 1), tl.minimum(r, rows - 1)
    first = tl.program_id(2) * per
    last = tl.minimum(first + per, tl.cdiv(K, BK))
    far = r.to(tl.int64)
    let_next(EARLY)
    if EARLY and FORMAT != PLAIN:
        WIDTH: tl.constexpr = BK // 2 if (FORMAT == SIGNED) | (FORMAT == UNSIGNED) | (FORMAT == FLOAT4) else BK
        WIDE: tl.constexpr = WIDTH if WIDTH < 16 or x.dtype.element_ty == tl.int8 else 16
        touch(w + pieces(tl.program_id(1) * BN, wide, first, last, WIDTH, WIDE, BN))
    elif EARLY and EVEN:
        touch(w + beginnings(tl.program_id(1) * BN, outs, K, first, BN, BK))
    wait(EARLY)
    gate = share(
        x, w, scales, offsets, zeros, sums, tl.program_id(1) * BN, outs, 0, far, live, K, wide, GROUPS, first, last,
        FORMAT, OFFSETS, ZEROS, EVEN, BN, BR, BK, TOGETHER, STAGES, EMULATE,
    )  # fmt: skip
    for other in range(1, SHARES):
        gate += share(
            x, w, scales, offsets, zeros, sums, tl.program_id(1) * BN, outs, 0, far, live, K, wide, GROUPS, other * per,
            tl.minimum(other * per + per, tl.cdiv(K, BK)), FORMAT, OFFSETS, ZEROS, EVEN, BN, BR, BK, TOGETHER, STAGES,
            EMULATE,
        )  # fmt: skip
    up = gate
    if GATED:
        up = share(
            x, w, scales, offsets, zeros, sums, tl.program_id(1) * BN, outs, outs, far, live, K, wide, GROUPS,
            first, last, FORMAT, OFFSETS, ZEROS, EVEN, BN, BR, BK, TOGETHER, STAGES, EMULATE,
        )  # fmt: skip
    if APART:
        tl.store(parts + (tl.program_id(2).to(tl.int64) * rows + far[None, :]) * outs + n[:, None], gate, inside)
    else:
        at = far[None, :] * stride + n[:, None]
        value = finished(gate, up, bias, residual, n[:, None], at, outs, inside, GATED, BIAS, ADD)
        tl.store(y + at, rounded(value, y.dtype.element_ty, EMULATE), inside)


@triton.jit(do_not_specialize=["rows"])
def gather(
    parts, bias, residual, y, rows, outs, stride,
    GATED: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, SHARES: tl.constexpr, BN: tl.constexpr,
    EMULATE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The shares of a product, added in order, and what stands behind it. Grid: rows, tiles of outputs.

    Rows come first, here and below: of the second there are at most 65,535.
    """
    await_turn(EARLY)
    n, r = tl.program_id(1) * BN + tl.arange(0, BN), tl.program_id(0).to(tl.int64)
    inside, wide = n < outs, outs * 2 if GATED else outs
    gate = tl.load(parts + r * wide + n, inside, 0.0)
    up = tl.load(parts + r * wide + outs + n, inside, 0.0) if GATED else gate
    for other in range(1, SHARES):
        gate += tl.load(parts + (other * rows + r) * wide + n, inside, 0.0)
        if GATED:
            up += tl.load(parts + (other * rows + r) * wide + outs + n, inside, 0.0)
    value = finished(gate, up, bias, residual, n, r * stride + n, outs, inside, GATED, BIAS, ADD)
    tl.store(y + r * stride + n, rounded(value, y.dtype.element_ty, EMULATE), inside)


@triton.jit(do_not_specialize_on_alignment=["x", "y"])
def group_sums(
    x, y, K, COUNT: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, TOGETHER: tl.constexpr,
    PARTS: tl.constexpr, EMULATE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Sums (rows, COUNT) float32 of each group of inputs, which offsets are multiplied by. Grid: rows, blocks.

    With PARTS they are three bfloat16, whose sum they are: (rows, steps, 16), of a step's groups the first parts, then
    the second and the third ones, then nothing.
    """
    await_turn(EARLY)
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    k = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    rest = tl.sum(tl.load(x + row * K + k, k < K, 0.0).to(tl.float32), 1)
    if PARTS:
        at = y + (row * (COUNT // TOGETHER) + group // TOGETHER) * 16 + group % TOGETHER
        for i in tl.static_range(3):
            part = rounded(rest, tl.bfloat16, EMULATE)
            tl.store(at + i * TOGETHER, part, group < COUNT)
            rest -= part.to(tl.float32)
    else:
        tl.store(y + row * COUNT + group, rest, group < COUNT)


@triton.jit
def round_rows(
    x, y, sums, K, COUNT: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, ROOM: tl.constexpr,
    PAIRS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Each group of inputs in 255 steps across its largest, y (rows, COUNT, ROOM) int8, as csrc/integers.h rounds it.

    sums (rows, COUNT, 2): the step, and the sum of the integers times it. With PAIRS, halves of a group take turns, as
    weights come out of their bytes. What is not finite makes the step so. Grid: rows, blocks.
    """
    await_turn(EARLY)
    row, group, j = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, ROOM)
    k = group[:, None] * GROUP + j[None, :]
    own = tl.load(x + row * K + k, (j < GROUP)[None, :] & (k < K), 0.0).to(tl.float32)
    top = tl.max(own.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)  # ordered like the numbers, NaN last
    largest, finite = top.to(tl.float32, bitcast=True), top < 0x7F800000
    step = tl.where(finite, tl.div_rn(largest, 127.0), largest)
    inverse = tl.where(largest < 7.888609052210118e-31, 0.0, tl.div_rn(127.0, largest))  # 2 ^ -100
    whole = (own * inverse[:, None] + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000  # 1.5 * 2 ^ 23: to nearest
    whole = tl.where(finite[:, None], whole, 0)
    place = tl.where(j < GROUP, 2 * (j % (GROUP // 2)) + j // (GROUP // 2), j) if PAIRS else j
    at, there = row * COUNT + group, group < COUNT
    tl.store(y + at[:, None] * ROOM + place[None, :], whole.to(tl.int8), there[:, None])
    tl.store(sums + at * 2, step, there)
    tl.store(sums + at * 2 + 1, step * tl.sum(whole, 1).to(tl.float32), there)


# --- experts ----------------------------------------------------------------------------------------------------------
# A row takes CHOSEN experts, ascending: entry `row * CHOSEN + j`. Entries are lined up by expert, and dealt to tiles:
# [expert, where its entries begin in the line, how many]. Nothing of it is known to the host.


@triton.jit(do_not_specialize_on_alignment=["scores"])
def route(
    scores, experts, weights, real, COUNT: tl.constexpr, SCORES: tl.constexpr, CHOSEN: tl.constexpr,
    NORMALISED: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The best of COUNT experts by one row's scores, the first of equals, and their weights. Grid: rows.

    Weights are a softmax over the chosen ones, or over all. If there are more SCORES, the last is of an expert that all
    rows take, whose weight, the sigmoid of it, comes last. If PADDED, rows from the number `real` on choose none: -1.
    """
    await_turn(EARLY)
    row, e = tl.program_id(0), tl.arange(0, BLOCK)
    score = tl.load(scores + row.to(tl.int64) * SCORES + e, e < COUNT, float("-inf"))
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    order = tl.where(score == score, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)  # as numbers are, NaN the largest
    rank = tl.where(e < COUNT, (order.to(tl.int64) << 32) | (BLOCK - 1 - e), -0x7FFFFFFFFFFFFFFF)
    taken = e < 0
    for _ in range(CHOSEN):
        taken = taken | (rank == tl.max(tl.where(taken, -0x7FFFFFFFFFFFFFFF, rank)))
    power = tl.exp2((score - tl.max(score)) * LOG2E)
    total = tl.sum(tl.where(taken, power, 0.0) if NORMALISED else power)
    place = tl.cumsum(taken.to(tl.int32)) - 1
    there = row < tl.load(real) if PADDED else row >= 0
    EACH: tl.constexpr = CHOSEN + 1 if SCORES > COUNT else CHOSEN
    tl.store(experts + row * CHOSEN + place, tl.where(there, e, -1), taken)
    tl.store(weights + row * EACH + place, power / total, taken)
    if SCORES > COUNT:
        own = tl.load(scores + row.to(tl.int64) * SCORES + COUNT)
        tl.store(weights + row * EACH + CHOSEN, 1.0 / (1.0 + tl.exp2(-own * LOG2E)))


@triton.jit(do_not_specialize=["count"])
def line_up(experts, line, ends, count, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """Entries of one expert, in order, to its place in the line, and where they end. Grid: experts."""
    await_turn(EARLY)
    own, begin = tl.program_id(0), tl.program_id(0) * 0
    for at in range(0, count, BLOCK):
        i = at + tl.arange(0, BLOCK)
        e = tl.load(experts + i, i < count, -1)
        begin += tl.sum(((e >= 0) & (e < own)).to(tl.int32))
    for at in range(0, count, BLOCK):
        i = at + tl.arange(0, BLOCK)
        mine = (tl.load(experts + i, i < count, -1) == own).to(tl.int32)
        tl.store(line + begin + tl.cumsum(mine) - 1, i, mine != 0)
        begin += tl.sum(mine)
    tl.store(ends + own, begin)


@triton.jit
def deal(ends, tiles, read, COUNT: tl.constexpr, BLOCK: tl.constexpr, BR: tl.constexpr, EARLY: tl.constexpr):
    """One tile; of those beyond the last, no entries. `read` counts experts and calls. Grid: tiles."""
    await_turn(EARLY)
    tile, e = tl.program_id(0), tl.arange(0, BLOCK)
    end = tl.load(ends + e, e < COUNT, 0)
    begin = tl.load(ends + e - 1, (e > 0) & (e < COUNT), 0)
    size = tl.where(e < COUNT, end - begin, 0)
    last = tl.cumsum(tl.cdiv(size, BR))
    expert = tl.sum(((last <= tile) & (e < COUNT)).to(tl.int32))
    first = tl.sum(tl.where(e == expert, begin + (tile - last + tl.cdiv(size, BR)) * BR, 0))
    stop = tl.sum(tl.where(e == expert, end, 0))
    tl.store(tiles + tile * 3, tl.minimum(expert, COUNT - 1))
    tl.store(tiles + tile * 3 + 1, first)
    tl.store(tiles + tile * 3 + 2, tl.minimum(stop - first, BR))
    if tile == 0:
        tl.store(read, tl.load(read) + tl.sum((size > 0).to(tl.int64)))
        tl.store(read + 1, tl.load(read + 1) + 1)


@triton.jit
def of(first, places, expert, WHICH: tl.constexpr):
    """One of an expert's tensors: places (experts, 5) say how many numbers behind the first one's it begins."""
    behind = tl.load(places + expert * 5 + WHICH)
    return first + (tl.multiple_of(behind, 16) if WHICH == 0 else behind)


@triton.jit(do_not_specialize=["count", "per"])
def products(
    x, w, scales, offsets, zeros, sums, places, tiles, line, parts, count, outs, K, GROUPS, per,
    EACH: tl.constexpr, FORMAT: tl.constexpr, OFFSETS: tl.constexpr, ZEROS: tl.constexpr, EVEN: tl.constexpr,
    BN: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, TOGETHER: tl.constexpr,
    STAGES: tl.constexpr, EMULATE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """This share of K of an expert's product with its entries, to parts (shares, count, outs).

    Of `x`, EACH entries have a row. Grid: tiles of entries, tiles of outputs, shares. w, scales, offsets and zeros are
    the first expert's.
    """
    await_turn(EARLY)
    tile, n = tiles + tl.program_id(0) * 3, tl.program_id(1) * BN + tl.arange(0, BN)
    expert, begin, some, i = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.arange(0, BR)
    if some > 0:
        entry = tl.load(line + begin + tl.minimum(i, some - 1)).to(tl.int64)
        first = tl.program_id(2) * per
        own = share(
            x, of(w, places, expert, 0), of(scales, places, expert, 1), of(offsets, places, expert, 2),
            of(zeros, places, expert, 3), sums, tl.program_id(1) * BN, outs, 0, entry // EACH, i < some, K, outs,
            GROUPS, first, tl.minimum(first + per, tl.cdiv(K, BK)), FORMAT, OFFSETS, ZEROS, EVEN, BN, BR, BK,
            TOGETHER, STAGES, EMULATE,
        )  # fmt: skip
        at = parts + (tl.program_id(2).to(tl.int64) * count + entry[None, :]) * outs + n[:, None]
        tl.store(at, own, (n < outs)[:, None] & (i < some)[None, :])


@triton.jit
def added(
    parts, places, bias, expert, entry, n, count, outs, inside, SHARES: tl.constexpr, BIAS: tl.constexpr
):  # fmt: skip
    """The shares of some outputs n of one entry, in order, and their bias."""
    own = tl.load(parts + entry * outs + n, inside, 0.0)
    for other in range(1, SHARES):
        own += tl.load(parts + (other * count + entry) * outs + n, inside, 0.0)
    if BIAS:
        own += tl.load(of(bias, places, expert, 4) + n, inside, 0.0).to(tl.float32)
    return own


@triton.jit(do_not_specialize=["count"])
def activate(
    parts, places, bias, experts, y, count, width, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    SHARES: tl.constexpr, BIAS: tl.constexpr, BN: tl.constexpr, EMULATE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y (count, width) of gates and ups, as ops.gated has it: silu, GELU by the tanh formula, clamped. Grid: entries,
    tiles of outputs."""
    await_turn(EARLY)
    n, entry = tl.program_id(1) * BN + tl.arange(0, BN), tl.program_id(0).to(tl.int64)
    inside, expert = n < width, tl.load(experts + entry)
    if expert >= 0:
        gate = added(parts, places, bias, expert, entry, n, count, 2 * width, inside, SHARES, BIAS)
        up = added(parts, places, bias, expert, entry, width + n, count, 2 * width, inside, SHARES, BIAS)
        steep = gate
        if KIND == 1:  # of which the sigmoid is half of 1 + tanh
            steep = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        if KIND == 2:  # NaN stays
            gate = tl.where(gate > LIMIT, LIMIT, gate)
            up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up)) + 1.0
            steep = ALPHA * gate
        value = gate / (1.0 + tl.exp2(-steep * LOG2E)) * up
        tl.store(y + entry * width + n, rounded(value, y.dtype.element_ty, EMULATE), inside)


@triton.jit(do_not_specialize=["count"])
def mix(
    parts, places, bias, experts, weights, shared, residual, y, count, outs, CHOSEN: tl.constexpr,
    SHARED: tl.constexpr, ADD: tl.constexpr, SHARES: tl.constexpr, BIAS: tl.constexpr, BN: tl.constexpr,
    EMULATE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y = what a row's experts give, times their weights, summed in their order, + residual. Grid: rows,
    tiles of outputs."""
    await_turn(EARLY)
    n, row = tl.program_id(1) * BN + tl.arange(0, BN), tl.program_id(0).to(tl.int64)
    inside, total = n < outs, tl.zeros((BN,), tl.float32)
    EACH: tl.constexpr = CHOSEN + 1 if SHARED else CHOSEN
    for j in range(CHOSEN):
        entry = row * CHOSEN + j
        expert = tl.load(experts + entry)
        if expert >= 0:
            own = added(parts, places, bias, expert, entry, n, count, outs, inside, SHARES, BIAS)
            total += tl.load(weights + row * EACH + j) * own
    if SHARED:
        total += tl.load(weights + row * EACH + CHOSEN) * tl.load(shared + row * outs + n, inside, 0.0)
    if ADD:
        total = tl.load(residual + row * outs + n, inside, 0.0).to(tl.float32) + total
    tl.store(y + row * outs + n, rounded(total, y.dtype.element_ty, EMULATE), inside)


# --- rows -------------------------------------------------------------------------------------------------------------


@triton.jit
def normed(x, weight, eps, WIDTH: tl.constexpr):
    """x / sqrt(mean of x^2 + eps) * weight; zero beyond WIDTH."""
    return x * tl.rsqrt(tl.sum(x * x) / WIDTH + eps) * weight


@triton.jit(do_not_specialize_on_alignment=["x", "weight", "y"])
def rms_norm(x, weight, y, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EMULATE: tl.constexpr, EARLY: tl.constexpr):
    """One row of WIDTH numbers. Grid: rows. No pointer's alignment is looked at: a sum's order would follow it."""
    await_turn(EARLY)
    k = tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * WIDTH + k
    own = tl.load(x + at, k < WIDTH, 0.0).to(tl.float32)
    own = normed(own, tl.load(weight + k, k < WIDTH, 0.0).to(tl.float32), eps, WIDTH)
    tl.store(y + at, rounded(own, y.dtype.element_ty, EMULATE), k < WIDTH)


@triton.jit(do_not_specialize=["stride"], do_not_specialize_on_alignment=["qkv", "cos", "sin", "q_norm", "k_norm"])
def rope(
    qkv, stride, cos, sin, q_norm, k_norm, eps,
    HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, NORMS: tl.constexpr, EMULATE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Norm, then turn, one head of queries or keys where it lies. HALF >= DIM / 2, a power of 2. Grid: rows, heads."""
    await_turn(EARLY)
    row, head, j = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, HALF)
    inside, half = j < DIM // 2, DIM // 2
    at = qkv + row * stride + head * DIM + j
    a, b = tl.load(at, inside, 0.0).to(tl.float32), tl.load(at + half, inside, 0.0).to(tl.float32)
    dtype: tl.constexpr = qkv.dtype.element_ty
    if NORMS:
        norm = q_norm if head < HEADS else k_norm
        size = tl.rsqrt((tl.sum(a * a) + tl.sum(b * b)) / DIM + eps)
        a = a * size * tl.load(norm + j, inside, 0.0).to(tl.float32)
        b = b * size * tl.load(norm + half + j, inside, 0.0).to(tl.float32)
        a, b = rounded(a, dtype, EMULATE).to(tl.float32), rounded(b, dtype, EMULATE).to(tl.float32)
    turn = row * DIM + j
    low = a * tl.load(cos + turn, inside, 0.0).to(tl.float32) + b * tl.load(sin + turn, inside, 0.0).to(tl.float32)
    high = b * tl.load(cos + turn + half, inside, 0.0).to(tl.float32)
    high += a * tl.load(sin + turn + half, inside, 0.0).to(tl.float32)
    tl.store(at, rounded(low, dtype, EMULATE), inside)
    tl.store(at + half, rounded(high, dtype, EMULATE), inside)


# --- attention --------------------------------------------------------------------------------------------------------
# A tile is some rows of one sequence: [its first entry in tables, its first slab, slots of a slab, first row, rows,
# their lowest position, behind their highest, where a tree's paths begin or, of a chain, 2 ^ 31 - 1]. Each read that
# waits for another one costs a third of a microsecond, so tiles and places say all that a program can be told.
# Positions are cut into FEW spans of NEAR positions, and spans of FAR behind them. Every FOLDED of them are added up,
# then these sums. Of many sequences, each program takes FOLDED spans; of few, one, and `combine` adds all.


@triton.jit(do_not_specialize=["k_stride", "v_stride"], do_not_specialize_on_alignment=["slabs", "places"])
def write(
    k, v, k_stride, v_stride, slabs, places, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """New keys and values of one row and head to its place: [slab or, of padding, -1, slot there, slots of the slab].

    Values that are not finite become 0, and their key NaN: who sees it gets NaN, and who does not is spared a zero
    times infinity. Grid: rows, heads.
    """
    let_next(EARLY)
    row, head, d = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK)
    slab, slot, capacity = tl.load(places + row * 3), tl.load(places + row * 3 + 1), tl.load(places + row * 3 + 2)
    base = tl.load(slabs + tl.maximum(slab, 0))
    wait(EARLY)
    if slab >= 0:
        far, inside, side = row.to(tl.int64), d < DIM, capacity.to(tl.int64) * DIM
        keys = tl.load(k + far * k_stride + head * DIM + d, inside, 0.0).to(tl.int16, bitcast=True)
        values = tl.load(v + far * v_stride + head * DIM + d, inside, 0.0).to(tl.int16, bitcast=True)
        EXPONENT: tl.constexpr = 0x7C00 if k.dtype.element_ty == tl.float16 else 0x7F80
        wrong = (values & EXPONENT) == EXPONENT
        lost = tl.max(wrong.to(tl.int32)) > 0
        to = base.to(tl.pointer_type(tl.int16)) + head * side + slot.to(tl.int64) * DIM + d
        tl.store(to, tl.where(lost, 0x7FFF, keys).to(tl.int16), inside)
        tl.store(to + KV_HEADS * side, tl.where(wrong, 0, values).to(tl.int16), inside)


@triton.jit(
    do_not_specialize=["source_stride", "target_stride"], do_not_specialize_on_alignment=["source", "target", "places"]
)
def take(
    source, source_stride, target, target_stride, places,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A token's key and value of one layer and head to another cache: places (rows, 6) [slab, slot there, slots of the
    slab, and the same of the other]. Where slabs are: source and target (layers, slabs).

    Grid: rows, heads, layers.
    """
    await_turn(EARLY)
    place, head, layer = places + tl.program_id(0) * 6, tl.program_id(1), tl.program_id(2)
    slot, capacity = tl.load(place + 1), tl.load(place + 2).to(tl.int64)
    to, room = tl.load(place + 4), tl.load(place + 5).to(tl.int64)
    d = tl.arange(0, BLOCK)
    mine = tl.load(source + layer * source_stride + tl.load(place)).to(tl.pointer_type(tl.int16))
    its = tl.load(target + layer * target_stride + tl.load(place + 3)).to(tl.pointer_type(tl.int16))
    for side in tl.static_range(2):
        x = tl.load(mine + ((side * KV_HEADS + head) * capacity + slot) * DIM + d, d < DIM, 0)
        tl.store(its + ((side * KV_HEADS + head) * room + to) * DIM + d, x, d < DIM)


@triton.jit
def span_of(position, NEAR: tl.constexpr, FEW: tl.constexpr, FAR: tl.constexpr):
    """In which span a position is."""
    return tl.where(position < FEW * NEAR, position // NEAR, FEW + (position - FEW * NEAR) // FAR)


@triton.jit
def span_begin(span, NEAR: tl.constexpr, FEW: tl.constexpr, FAR: tl.constexpr):
    """The first position of a span."""
    return tl.where(span < FEW, span * NEAR, FEW * NEAR + (span - FEW) * FAR)


@triton.jit
def block(
    q, at_keys, at_values, there, seen, most, weight, total, scale,
    DIM: tl.constexpr, D: tl.constexpr, SOFTCAP: tl.constexpr, dtype: tl.constexpr, EMULATE: tl.constexpr,
):  # fmt: skip
    """KEYS keys more: queries (BM, D), pointers (KEYS, 1) to keys and values, which of them are `there`, and for whom.

    weight (BM, KEYS) is summed when all is done: a sum in the loop would make all warps wait for each other.
    """
    d, loaded = tl.arange(0, D)[None, :], there[:, None]
    if DIM < D:
        loaded = loaded & (d < DIM)
    keys, values = tl.load(at_keys + d, loaded, 0.0), tl.load(at_values + d, loaded, 0.0)
    score = tl.dot(q, as_operand(tl.trans(keys), EMULATE)) * scale
    if SOFTCAP != 0.0:  # of the score in base e: cap * tanh(score / cap)
        score = (1.0 - 2.0 / (tl.exp2(score * (2.0 / SOFTCAP)) + 1.0)) * (SOFTCAP * LOG2E)
    score = tl.where(seen, score, float("-inf"))
    now = tl.maximum(most, tl.max(score, 1))
    base = tl.where(now == float("-inf"), 0.0, now)
    shrink, p = tl.exp2(most - base), tl.exp2(score - base[:, None])
    weight = weight * shrink[:, None] + p
    total = tl.dot(operand(p, dtype, EMULATE), as_operand(values, EMULATE), total * shrink[:, None])
    return now, weight, total


@triton.jit
def pages_of(
    tables, slabs, first, capacity, begin, end, far, DIM: tl.constexpr, PAGES: tl.constexpr, PAGE: tl.constexpr
):
    """The addresses of a head's keys, which lie `far` slots of DIM numbers behind their page's beginning, in each page
    from position `begin` on, below `end`."""
    page, per = begin // PAGE + tl.arange(0, PAGES), capacity // PAGE
    page = tl.load(tables + page, page * PAGE < end, 0)
    return tl.load(slabs + first + page // per) + ((page % per * PAGE).to(tl.int64) + far) * (DIM * 2)


@triton.jit
def look(
    queries, at, lies, origin, begin, end, oldest, side, scale, dtype: tl.constexpr,
    DIM: tl.constexpr, D: tl.constexpr, KV_HEADS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    KEYS: tl.constexpr, PAGES: tl.constexpr, PAGE: tl.constexpr, STAGES: tl.constexpr, EMULATE: tl.constexpr,
):  # fmt: skip
    """What queries (BM, D) at positions (BM,) see of [begin, end), whose pages lie at `lies` from `origin` on."""
    BM: tl.constexpr = queries.shape[0]
    c = tl.arange(0, KEYS)
    most = tl.full((BM,), float("-inf"), tl.float32)
    weight, total = tl.zeros((BM, KEYS), tl.float32), tl.zeros((BM, D), tl.float32)
    for some in tl.range(begin, end, KEYS, num_stages=STAGES):
        column, keys = some + c, tl.zeros((KEYS,), tl.int64)
        for j in tl.static_range(KEYS // PAGE):  # looked up in registers: these loads are to wait for nothing
            other = tl.sum(tl.where(tl.arange(0, PAGES) == (some - origin) // PAGE + j, lies, 0))
            keys = tl.where(c // PAGE == j, other, keys)
        keys = tl.multiple_of((keys.to(tl.pointer_type(dtype)) + c % PAGE * DIM)[:, None], [16, 16])
        seen = column[None, :] <= at[:, None]
        if WINDOW:
            seen = seen & (column[None, :] > at[:, None] - WINDOW)
        there = (column < end) & (column >= oldest)
        most, weight, total = block(
            queries, keys, keys + KV_HEADS * side, there, seen, most, weight, total, scale, DIM, D, SOFTCAP, dtype,
            EMULATE,
        )  # fmt: skip
    return most, weight, total


@triton.jit
def folded(most, weight, total, other, size, part):
    """Largest scores (N,), sums of weights (N,) and of weighted values (N, D): those of two spans in one."""
    now = tl.maximum(most, other)
    base = tl.where(now == float("-inf"), 0.0, now)
    shrink, grow = tl.exp2(most - base), tl.exp2(other - base)
    return now, weight * shrink + size * grow, total * shrink[:, None] + part * grow[:, None]


@triton.jit(
    do_not_specialize=["stride", "tail_width", "base_row", "spans", "reach", "lone"],
    do_not_specialize_on_alignment=["slabs", "tables", "tiles", "positions", "tails"],
)
def attend(
    q, stride, slabs, tables, tiles, positions, tails, tail_width, parts, sizes, scale, base_row, spans, reach, lone,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, BM: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, NEAR: tl.constexpr, FEW: tl.constexpr, FAR: tl.constexpr,
    FOLD: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr, STAGES: tl.constexpr, EMULATE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """What a tile's rows see in FOLD spans of positions, folded in order, to parts (rows, heads, spans / FOLD, D) and
    sizes (..., 2).

    Parts begin with `base_row`. Keys are read KEYS at a time, from multiples of KEYS on.
    Grid: tiles, key-value heads, and `lone` programs before one for every FOLD spans. Of a tree, for which FOLD is 1,
    all rows of a tile read the spans before its paths together; from the span on where these begin, each row has
    programs of its own, one for each of the `reach` spans that they may touch, and its path's keys are gathered into
    the columns where plain decoding has them. tails (rows, tail_width): the slots of the path of each row of a tree,
    from where they begin.
    """
    let_next(EARLY)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    PAGES: tl.constexpr = (FAR if FAR > NEAR else NEAR) // PAGE
    tile, head, z = tiles + tl.program_id(0) * 8, tl.program_id(1), tl.program_id(2)
    table, slab, capacity = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    first, count, start = tl.load(tile + 3), tl.load(tile + 4), tl.load(tile + 7)
    low, end = tl.load(tile + 5), tl.load(tile + 6)
    entries = tl.cdiv(spans, FOLD)
    entry, shared = entries - 1 - (z - lone), end  # far spans are long: first
    if z < lone:
        if (start < end) & (z // reach < count):
            first, count, entry = first + z // reach, 1, span_of(start, NEAR, FEW, FAR) + z % reach
            low = tl.load(positions + first)
            end, shared = low + 1, start // KEYS * KEYS
        else:
            end = 0
    elif start < end:
        end = span_begin(span_of(start, NEAR, FEW, FAR), NEAR, FEW, FAR)
    span = entry * FOLD
    origin = span_begin(span, NEAR, FEW, FAR)
    oldest = tl.maximum(low - WINDOW + 1, 0) if WINDOW else 0
    begin = tl.maximum(origin, oldest // KEYS * KEYS)
    end = tl.minimum(end, span_begin(span + FOLD, NEAR, FEW, FAR))
    if begin < end:
        dtype: tl.constexpr = q.dtype.element_ty
        m, d, c, per = tl.arange(0, BM), tl.arange(0, D), tl.arange(0, KEYS), capacity // PAGE
        row, mine = first + tl.minimum(m // GROUP, count - 1), m < count * GROUP
        at = tl.load(positions + row, mine, -1)
        far = tl.multiple_of(row.to(tl.int64) * stride + (head * GROUP + m % GROUP) * DIM, 8)
        side = capacity.to(tl.int64) * DIM
        span_end = tl.minimum(end, span_begin(span + 1, NEAR, FEW, FAR))
        lies = pages_of(tables + table, slabs, slab, capacity, origin, span_end, head * capacity, DIM, PAGES, PAGE)
        wait(EARLY)
        queries = as_operand(tl.load(q + far[:, None] + d[None, :], mine[:, None] & (d < DIM)[None, :], 0.0), EMULATE)
        most, weight, total = look(
            queries, at, lies, origin, begin, tl.minimum(shared, span_end), oldest, side, scale, dtype, DIM, D,
            KV_HEADS, WINDOW, SOFTCAP, KEYS, PAGES, PAGE, STAGES, EMULATE,
        )  # fmt: skip
        if FOLD == 1:
            for some in tl.range(tl.maximum(begin, shared), end, KEYS, num_stages=1):  # of one row of a tree
                column = some + c
                there = (column < end) & (column >= oldest)
                path = tails + first.to(tl.int64) * tail_width + column - start
                slot = tl.where(column < start, column, tl.load(path, there & (column >= start), 0))
                slot = tl.where(there, slot, 0)
                own = tl.load(tables + table + slot // PAGE)
                keys = tl.load(slabs + slab + own // per).to(tl.pointer_type(dtype))
                keys = keys + head * side + (own % per * PAGE + slot % PAGE).to(tl.int64) * DIM
                keys = tl.multiple_of(keys[:, None], [16, 16])
                seen = column[None, :] <= at[:, None]
                if WINDOW:
                    seen = seen & (column[None, :] > at[:, None] - WINDOW)
                most, weight, total = block(
                    queries, keys, keys + KV_HEADS * side, there, seen, most, weight, total, scale, DIM, D, SOFTCAP,
                    dtype, EMULATE,
                )  # fmt: skip
        size = tl.sum(weight, 1)
        if FOLD > 1:
            for other in tl.range(span + 1, span_of(end - 1, NEAR, FEW, FAR) + 1):
                origin = span_begin(other, NEAR, FEW, FAR)
                span_end = tl.minimum(end, span_begin(other + 1, NEAR, FEW, FAR))
                lies = pages_of(
                    tables + table, slabs, slab, capacity, origin, span_end, head * capacity, DIM, PAGES, PAGE
                )
                its_most, weight, part = look(
                    queries, at, lies, origin, tl.maximum(begin, origin), span_end, oldest, side, scale, dtype, DIM, D,
                    KV_HEADS, WINDOW, SOFTCAP, KEYS, PAGES, PAGE, STAGES, EMULATE,
                )  # fmt: skip
                most, size, total = folded(most, size, total, its_most, tl.sum(weight, 1), part)
        to = ((row - base_row).to(tl.int64) * HEADS + head * GROUP + m % GROUP) * entries + entry
        tl.store(parts + to[:, None] * D + d[None, :], total, mine[:, None])
        tl.store(sizes + to * 2, most, mine)
        tl.store(sizes + to * 2 + 1, size, mine)
    else:
        wait(EARLY)


@triton.jit
def entry_of(parts, sizes, at, d, there, D: tl.constexpr):
    """Of entries (N,) that are `there`, the largest scores, the sums of weights, and some columns of the sums."""
    most, size = tl.load(sizes + at * 2, there, float("-inf")), tl.load(sizes + at * 2 + 1, there, 0.0)
    return most, size, tl.load(parts + at[:, None] * D + d[None, :], there[:, None], 0.0)


@triton.jit(do_not_specialize=["base_row", "spans"], do_not_specialize_on_alignment=["positions", "sinks"])
def combine(
    parts, sizes, positions, sinks, y, base_row, spans,
    HEADS: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
    NEAR: tl.constexpr, FEW: tl.constexpr, FAR: tl.constexpr, FOLD: tl.constexpr, FOLDED: tl.constexpr,
    MERGED: tl.constexpr, BD: tl.constexpr, EMULATE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y (rows, HEADS * DIM): the spans that a row sees, in order: FOLDED at a time, unless FOLD says that `attend` has
    done so, then these. MERGED of them are looked at together. Rows at -1 are padding: zeros.

    sinks (HEADS,): the score of a key without a value, before all others. Grid: rows, heads, BD numbers of a head each.
    """
    let_next(EARLY)
    own, head, d = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BD + tl.arange(0, BD)
    row = base_row + own
    at = tl.load(positions + row)
    wait(EARLY)
    first = span_of(tl.maximum(at - WINDOW + 1, 0), NEAR, FEW, FAR) if WINDOW else 0
    last = tl.where(at < 0, 0, span_of(at, NEAR, FEW, FAR) + 1)
    begin, end = first // FOLDED, tl.cdiv(last, FOLDED)
    most, weight = tl.full((1,), float("-inf"), tl.float32), tl.zeros((1,), tl.float32)
    total = tl.zeros((1, BD), tl.float32)
    if SINKS:
        most, weight = tl.load(sinks + head + tl.arange(0, 1)) * LOG2E, tl.full((1,), 1.0, tl.float32)
    far = (own.to(tl.int64) * HEADS + head) * tl.cdiv(spans, FOLD)
    i = tl.arange(0, MERGED)
    for some in range(begin // MERGED * MERGED, end, MERGED):
        if FOLD > 1:
            for j in tl.static_range(MERGED):
                entry = some + j + tl.arange(0, 1)
                other, size, part = entry_of(parts, sizes, far + entry, d, (entry >= begin) & (entry < end), D)
                most, weight, total = folded(most, weight, total, other, size, part)
        else:
            span = (some + i) * FOLDED
            other, size, part = entry_of(parts, sizes, far + span, d, (span >= first) & (span < last), D)
            for j in tl.static_range(1, FOLDED):
                there = (span + j >= first) & (span + j < last)
                its, its_size, its_part = entry_of(parts, sizes, far + span + j, d, there, D)
                other, size, part = folded(other, size, part, its, its_size, its_part)
            for j in range(tl.minimum(MERGED, end - some)):
                one = tl.sum(tl.where(i == j, other, 0.0), 0, keep_dims=True)
                one_size = tl.sum(tl.where(i == j, size, 0.0), 0, keep_dims=True)
                one_part = tl.sum(tl.where((i == j)[:, None], part, 0.0), 0, keep_dims=True)
                most, weight, total = folded(most, weight, total, one, one_size, one_part)
    total = tl.where(weight > 0, total / weight, total)
    to = y + (row.to(tl.int64) * HEADS + head) * DIM + d
    tl.store(to[None, :], rounded(total, y.dtype.element_ty, EMULATE), (d < DIM)[None, :])


# --- the choice -------------------------------------------------------------------------------------------------------


@triton.jit
def shifted(z, BITS: tl.constexpr):
    """Logical right shift of int64."""
    return (z >> BITS) & ((1 << (64 - BITS)) - 1)


@triton.jit
def gumbel(key, index):
    """sampling.gumbel: SplitMix64 over ids from 0 on, both logarithms in float64."""
    z = (index.to(tl.int64) + 1) * -7046029254386353131 + key
    z = (z ^ shifted(z, 30)) * -4658895280553007687
    z = (z ^ shifted(z, 27)) * -7723592293110705685
    z = z ^ shifted(z, 31)
    u = (shifted(z, 12).to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2 ^ -52
    return (-tl.log(-tl.log(u))).to(tl.float32)


@triton.jit
def largest(logits, most, vocab, TILES: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """Of each tile of a row (rows, TILES) the largest logit; NaN if there is one. Grid: rows, tiles."""
    await_turn(EARLY)
    row, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(logits + row * vocab + n, n < vocab, float("-inf"))
    top = tl.where(tl.max((own != own).to(tl.int32)) > 0, float("nan"), tl.max(own))
    tl.store(most + row * TILES + tl.program_id(1), top)


@triton.jit
def draw(
    logits, most, keys, temperatures, values, indices, shares, vocab,
    TILES: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Of each tile the first largest score and its place, by Law 1, and what all weigh beside it. Grid: rows, tiles."""
    await_turn(EARLY)
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n, t = tile * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDE)
    score = tl.load(logits + row * vocab + n, n < vocab, float("-inf"))
    temperature = tl.load(temperatures + row)
    if temperature > 0:
        top = tl.max(tl.load(most + row * TILES + t, t < TILES, float("-inf")))
        score = tl.math.div_rn(score - top, temperature) + gumbel(tl.load(keys + row), n)
    score = tl.where(n < vocab, score, float("-inf"))
    best = tl.max(score)
    tl.store(values + row * TILES + tile, best)
    tl.store(indices + row * TILES + tile, tl.min(tl.where(score == best, n, 2147483647)))
    tl.store(shares + row * TILES + tile, tl.sum(tl.where(score > float("-inf"), tl.exp(score - best), 0.0)))


@triton.jit
def choose(
    most, values, indices, shares, chosen, sure, TILES: tl.constexpr, WIDE: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """The first largest of all tiles, -1 if it, or any logit, is no finite number; and its share of the softmax.

    Grid: rows.
    """
    await_turn(EARLY)
    row, t = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    inside = t < TILES
    top = tl.load(most + row * TILES + t, inside, 0.0)
    wrong = tl.max(((top != top) | (top == float("inf"))).to(tl.int32)) > 0
    value = tl.load(values + row * TILES + t, inside, float("-inf"))
    best = tl.max(value)
    at = tl.min(tl.where(value == best, tl.load(indices + row * TILES + t, inside, 2147483647), 2147483647))
    tl.store(chosen + row, tl.where(wrong | (best == float("-inf")), -1, at))
    weight = tl.load(shares + row * TILES + t, inside, 0.0) * tl.exp(value - best)
    tl.store(sure + row, 1.0 / tl.sum(tl.where(value > float("-inf"), weight, 0.0)))
