"""Attention: right against float64 on every instruction set, and the same bits in any company (Law 2)."""

from __future__ import annotations

import random

import pytest
import torch

from outrider import families
from outrider.kv import DenseKV, Entry, Plan
from outrider.ops import KEY_BLOCK, attend, native

ISAS = native.available()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
# Key counts around the borders of the kernels' blocks (32) and spans (1024), and of the reference's blocks (512).
STARTS = [0, 1, 31, 32, 33, 505, 1000, 1023, 1024, 2050]


@pytest.fixture(params=ISAS)
def isa(request):
    before, threads = native.active, torch.get_num_threads()
    native.use(request.param)
    yield request.param
    native.use(before)
    torch.set_num_threads(threads)


def make(n, heads, kv_heads, dim, start, dtype, seed=0):
    """Queries, and a store in which no row may see anything behind its own keys."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(n, heads, dim, generator=g).mul(2).to(dtype)
    store = torch.zeros(2, kv_heads, -(-(start + n) // KEY_BLOCK) * KEY_BLOCK, dim, dtype=dtype)
    store[:, :, : start + n] = torch.randn(2, kv_heads, start + n, dim, generator=g)
    if native.active != native.REFERENCE:
        store[:, :, start + n :] = torch.nan
    return q, store


def path_of(row, parents):
    path = []
    while row >= 0:
        path.append(row)
        row = row - 1 if parents is None else parents[row]
    return path[::-1]


def exact(q, store, start, parents, window):
    """In float64."""
    n, heads, dim = q.shape
    seen = torch.zeros(n, start + n, dtype=torch.bool)
    for i in range(n):
        path = path_of(i, parents)
        seen[i, [start + j for j in path]] = True
        seen[i, :start] = True
        if window:
            seen[i, : max(0, start + len(path) - window)] = False
            seen[i, [start + j for j in path[:-window]]] = False
    k, v = (t[:, : start + n].double().repeat_interleave(heads // store.shape[1], 0) for t in store)
    scores = torch.einsum("nhd,hsd->hns", q.double(), k) * dim**-0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hns,hsd->nhd", weights, v).reshape(n, -1)


def run(q, store, start, parents=None, window=None, threads=1, **options):
    torch.set_num_threads(threads)
    return attend(q, store, start, parents, window, q.shape[2] ** -0.5, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_that_are_no_numbers_are_seen(isa, dtype):
    """In any lane, and where a whole span has no other: a sound output would hide what is wrong with the model."""
    q, store = make(2, 6, 2, 64, 1500, dtype)
    for keys in (slice(0, 1), slice(30, 31), slice(63, 64), slice(1499, 1500), slice(0, 1024)):
        bad = store.clone()
        bad[0, :, keys] = torch.nan
        for threads in (1, 2):
            assert run(q, bad, 1500, threads=threads).isnan().all()
            assert run(q[:1], bad, 1500, threads=threads).isnan().all()


def test_no_rows(isa):
    q, store = make(0, 4, 2, 64, 5, torch.float32)
    assert run(q, store, 5).shape == (0, 256)


def some_tree(n, seed):
    rng = random.Random(seed)
    return [rng.randrange(max(-1, i - 5), i) for i in range(n)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(6, 2, 64), (7, 1, 80), (3, 3, 96), (8, 2, 128), (1, 1, 256), (2, 1, 8), (12, 4, 24)]
)
def test_truth(isa, dtype, heads, kv_heads, dim):
    torch.set_num_threads(1)
    for i, start in enumerate(STARTS):
        for n, parents in ((7, some_tree(7, i)), ((1, None), (7, None), (45, some_tree(45, i)))[i // 3 % 3]):
            window = (None, 5, 70)[i % 3]
            q, store = make(n, heads, kv_heads, dim, start, dtype, i)
            out = run(q, store, start, parents, window, threads=1 + i % 2)
            assert (out.double() - exact(q, store, start, parents, window)).abs().max() < TOLERANCE[dtype], (start, n)


def test_adversarial_scores(isa):
    """Scores that overflow exp, keys that all weigh the same, a maximum in the last key: no NaN, and the right mean."""
    for dtype in DTYPES:
        for kind in ("huge", "rising", "equal", "tiny"):
            q, store = make(3, 4, 2, 64, 1100, dtype)
            keys = store[0, :, :1103]
            if kind == "huge":
                keys *= 200
            elif kind == "rising":
                keys[:] = q[0, 0] * torch.linspace(-9, 9, 1103)[:, None].to(dtype)
            elif kind == "equal":
                keys[:] = 1
            else:
                keys *= 1e-30
            expected = exact(q, store, 1100, None, None)
            assert (run(q, store, 1100).double() - expected).abs().max() < TOLERANCE[dtype] * 4, kind


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 64), (5, 1, 40), (16, 1, 128)])
def test_a_row_is_the_same_in_any_company(isa, dtype, heads, kv_heads, dim):
    """Alone and as one of 2 ... 64 rows, at every position of a block, with any number of threads."""
    if isa == native.REFERENCE and dim != 64:
        pytest.skip("the reference promises it for few shapes only")
    for start in (0, 30, 1000, 2040):
        for window in (None, 50):
            q, store = make(64, heads, kv_heads, dim, start, dtype)
            full = run(q, store, start, None, window, threads=2)
            for i in range(64):
                assert torch.equal(run(q[i : i + 1], store, start + i, None, window)[0], full[i]), (start, i)
            for first, n in ((0, 2), (3, 3), (17, 8), (31, 33), (40, 16)):
                part = run(q[first : first + n], store, start + first, None, window, threads=1 + n % 3)
                assert torch.equal(part, full[first : first + n]), (start, first, n)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_branch_is_plain_decoding(isa, dtype):
    """A tree's row has the bits that its path has when it lies in the cache in order."""
    if isa == native.REFERENCE:
        pytest.skip("the reference takes a tree's keys in the order of their slots")
    for start in (0, 20, 1010):
        for window in (None, 40):
            q, store = make(60, 6, 2, 64, start, dtype)
            for parents in (some_tree(60, start), [*range(-1, 29), *range(10, 40)], [-1] * 60):
                tree = run(q, store, start, parents, window, threads=2)
                for i in range(0, 60, 4):
                    path = path_of(i, parents)
                    plain = torch.full_like(store, torch.nan)
                    plain[:, :, :start] = store[:, :, :start]
                    plain[:, :, start : start + len(path)] = store[:, :, [start + j for j in path]]
                    alone = run(q[i : i + 1], plain, start + len(path) - 1, None, window)[0]
                    assert torch.equal(tree[i], alone), (start, window, i)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("window", [None, 3, 40])
@pytest.mark.parametrize(("heads", "dim"), [(4, 64), (6, 40)])
def test_what_a_row_does_not_see_cannot_hurt_it(isa, dtype, bad, window, heads, dim):
    """A drafted token whose key and value are not finite leaves earlier rows, and those of other branches, alone."""
    for start in (0, 20, 31, 500, 1020):
        for parents in (None, [-1, 0, 1, 2, 3, 1, 5, 0, -1]):
            q, store = make(9, heads, 2, dim, start, dtype)
            sound = run(q, store, start, parents, window)
            store[:, :, start + 3] = bad
            spoilt = run(q, store, start, parents, window)
            assert not bool(spoilt[3].isfinite().any())
            for i in range(9):
                if 3 not in path_of(i, parents)[-(window or 9) :]:
                    assert torch.equal(spoilt[i], sound[i]), (start, parents, i)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_no_row_sees_any_more_cannot_hurt(isa, dtype):
    """A key before all windows, in the same block: a row has the same bits alone and behind rows that see it."""
    q, store = make(40, 4, 2, 64, 100, dtype)
    store[:, :, 90] = torch.nan
    many = run(q, store, 100, None, 16)
    assert many[:6].isnan().all() and many[6:].isfinite().all()
    for i in (6, 20, 39):
        assert torch.equal(run(q[i:], store, 100 + i, None, 16), many[i:])


def test_long_prefill_is_many_short_ones(isa):
    """A chunk of 300 rows equals its rows in small chunks: shares of rows and of spans give the same bits."""
    q, store = make(300, 8, 2, 64, 2500, torch.bfloat16)
    full = run(q, store, 2500, threads=2)
    assert (full[::50].double() - exact(q, store, 2500, None, None)[::50]).abs().max() < 2e-2
    for first in range(0, 300, 60):
        part = run(q[first : first + 60], store, 2500 + first, threads=2)
        assert torch.equal(part, full[first : first + 60])


def test_sequences_side_by_side(isa):
    """What the cache gives for several sequences at once, trees among them, is what each gets alone."""
    shape = {
        "architectures": ["LlamaForCausalLM"], "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64,
        "num_hidden_layers": 1, "vocab_size": 8, "hidden_size": 80, "intermediate_size": 8,
    }  # fmt: skip
    config = families.read(shape)
    g = torch.Generator().manual_seed(0)
    sizes = [(1300, 1, None), (0, 9, None), (40, 9, some_tree(9, 3)), (700, 20, None)]

    def alone_and_together(group):
        kv = DenseKV(config, torch.bfloat16, torch.device("cpu"))
        for seq, (start, _, _) in enumerate(sizes):
            if start:
                past = Plan([Entry(seq, 0, start, 0)])
                kv.reserve(past)
                x = torch.randn(start, 10, 64, generator=torch.Generator().manual_seed(seq)).bfloat16()
                kv.attend(0, x[:, :6], x[:, 6:8], x[:, 8:], past)
        outs = []
        for members in group:
            row, entries = 0, []
            for seq in members:
                start, n, parents = sizes[seq]
                entries.append(Entry(seq, row, n, start, parents))
                row += n
            plan = Plan(entries)
            kv.reserve(plan)
            rows = torch.cat([new[seq] for seq in members])
            outs.append(kv.attend(0, rows[:, :6], rows[:, 6:8], rows[:, 8:], plan))
        return torch.cat(outs), kv

    new = [torch.randn(n, 10, 64, generator=g).bfloat16() for _, n, _ in sizes]
    together, kv = alone_and_together([range(4)])
    alone, _ = alone_and_together([[0], [1], [2], [3]])
    assert torch.equal(together, alone)
    start, n, _ = sizes[2]  # and the new keys and values lie where they belong
    assert torch.equal(
        kv.store[2][0][:, :, start : start + n].transpose(1, 2), new[2][:, 6:].unflatten(1, (2, 2)).transpose(0, 1)
    )


def test_wrong_stores_are_refused():
    if native.active == native.REFERENCE:
        pytest.skip("the kernels read addresses; the reference fails by itself")
    q, store = make(2, 4, 2, 64, 5, torch.bfloat16)
    for bad in (store.float(), store[..., :56], store[:, :, ::2], store.to(torch.int8)):
        with pytest.raises(ValueError, match="store"):
            run(q, bad, 5)
    for start in (KEY_BLOCK - 1, -1):
        with pytest.raises(ValueError, match="rows"):
            run(q, store, start)
    with pytest.raises(ValueError, match="evenly"):
        run(q[:, :3], store, 5)
    for parents in ([0, 0], [-1], [-1, 1], [-2, 0]):
        with pytest.raises(ValueError, match="parents"):
            run(q, store, 5, parents)
