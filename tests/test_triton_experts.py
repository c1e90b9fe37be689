"""Mixtures of experts on the GPU kernels, in Triton's interpreter: the choice, the line, and what the experts give."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from outrider.ops import MLP, Experts, Linear
from outrider.ops.triton import launch
from tests.test_triton import HERE, KINDS, guarded, quantised, rand, same_in_company

BF16 = torch.bfloat16
HIDDEN, WIDTH, COUNT, CHOSEN = 96, 64, 5, 2


@pytest.fixture(autouse=True)
def emulated():
    with launch.emulated():
        yield


def dense(weight):
    return weight.double() if isinstance(weight, torch.Tensor) else weight.dense().double()


def make(
    weigh, bias=False, gated=True, shared=False, normalised=True, act="silu", clamp=None, chosen=CHOSEN, rounded=False
):
    """A mixture of random weights, and by float64 what it gives for x, a residual and no norm."""

    def linear(outputs, inputs, seed, gated=False):
        weight, added = weigh(outputs, inputs, seed), rand(outputs, dtype=BF16, seed=seed) if bias else None
        return (
            Linear(weight, added, gated=gated, rounded=rounded),
            dense(weight),
            0 if added is None else added.double(),
        )

    widths = [*[WIDTH] * COUNT, *([32] if shared else [])]
    ups = [linear(2 * wide, HIDDEN, 10 + i, gated) for i, wide in enumerate(widths)]
    downs = [linear(HIDDEN, wide, 50 + i) for i, wide in enumerate(widths)]
    mlps = [MLP(up[0], down[0], act, clamp) for up, down in zip(ups, downs, strict=True)]
    scored = rand(len(mlps), HIDDEN, dtype=BF16, seed=3) * 0.2
    ours = Experts(Linear(scored), mlps, chosen, normalised, shared)

    def inner(gate, up):
        if act == "clamped":
            gate, up = gate.clamp(max=clamp[1]), up.clamp(-clamp[1], clamp[1])
            return gate * torch.sigmoid(clamp[0] * gate) * (up + 1)
        return (F.silu(gate) if act == "silu" else F.gelu(gate, approximate="tanh")) * up

    def exact(x, residual):
        y = residual.double().clone()
        at, weights = ours.route((x.double() @ scored.double().T).float())
        for row, (own, by) in enumerate(zip(at.tolist(), weights.double().tolist(), strict=True)):
            for e, weight in zip(own, by, strict=True):
                given = inner(*(x[row].double() @ ups[e][1].T + ups[e][2]).chunk(2)).to(BF16).double()
                y[row] += weight * (given @ downs[e][1].T + downs[e][2])
        return y

    return ours, exact


def plain(outputs, inputs, seed):
    return rand(outputs, inputs, dtype=BF16, seed=seed) * 0.1


def of(kind):
    return lambda outputs, inputs, seed: quantised(kind, outputs, inputs, seed)


def near(y, exact):
    """But for a rounding of what is between the products, which may fall to the other side, and one at the end."""
    return bool(((y.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-3 * exact.abs().max()).all())


CASES = {
    "plain": {},
    "shared": {"shared": True, "normalised": False},
    "biased and clamped": {"bias": True, "gated": False, "act": "clamped", "clamp": (1.7, 0.5)},
    "gelu, all chosen": {"gated": False, "act": "gelu_tanh", "chosen": COUNT},
}


@pytest.mark.parametrize("case", CASES)
def test_mixture(case):
    """As float64 has it, and of some rows the same bits, with whatever company: other rows choose other experts."""
    ours, exact = make(plain, **CASES[case])
    assert ours.triton is not None
    x, residual = rand(20, HIDDEN, dtype=BF16), rand(20, HIDDEN, dtype=BF16, seed=9)
    full = ours(x, None, 0.0, residual)
    assert near(full, exact(x, residual))
    for own in (slice(0, 1), slice(7, 8), slice(3, 10)):
        assert torch.equal(ours(guarded(x[own]), None, 0.0, guarded(residual[own])), full[own])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "order"])
def test_formats(kind):
    ours, exact = make(of(kind))
    x = rand(7, HIDDEN, dtype=BF16)
    full = same_in_company(x, lambda x: ours(x, None, 0.0))
    assert near(full, exact(x, torch.zeros(7, HIDDEN, device=HERE)))


@pytest.mark.parametrize("kind", ["int8", "zeros"])
def test_rounded(kind):
    """Experts with rows of 8 bits, near those with bfloat16 rows, and of some rows the same bits."""
    ours, _ = make(of(kind), rounded=True)
    assert ours.triton is not None
    assert ours.triton.down.weights.rounded
    x = rand(7, HIDDEN, dtype=BF16)
    full = same_in_company(x, lambda x: ours(x, None, 0.0))
    plain = make(of(kind))[0](x, None, 0.0)
    assert not torch.equal(full, plain)
    assert (full - plain).abs().max() < 0.05 * plain.abs().max()


def test_route_is_the_references():
    """The same experts as Experts.route, of equal scores the first, NaN the largest; weights but for last bits."""
    scores = torch.randint(0, 4, (12, COUNT + 1), generator=torch.Generator().manual_seed(1)).float().to(HERE)
    scores[1, 3], scores[2] = -torch.inf, 0.0
    scores[2, 1] = -0.0
    for normalised in (True, False):
        ours, _ = make(plain, shared=True, normalised=normalised)
        at, weights = ours.route(scores)
        experts, own = torch.empty(12, CHOSEN, dtype=torch.int32, device=HERE), torch.empty(12, CHOSEN + 1, device=HERE)
        real = torch.tensor([11], dtype=torch.int32, device=HERE)
        launch.load().route[12,](scores, experts, own, real, COUNT, COUNT + 1, CHOSEN, normalised, True, 16, False)
        assert experts[:11].tolist() == at[:11, :CHOSEN].tolist()
        assert experts[11].tolist() == [-1, -1]
        assert torch.allclose(own, weights, rtol=1e-6)
    scores[0, 4], scores[0, 2] = torch.nan, torch.inf
    launch.load().route[1,](scores, experts, own, real, COUNT, COUNT + 1, CHOSEN, True, False, 16, False)
    assert experts[0].tolist() == [2, 4]


def test_many_rows_of_few_experts(monkeypatch):
    """More rows of one expert than a tile takes, shares of K, and rows in pieces change no bit of the sums' order."""
    monkeypatch.setattr(launch, "LEAST", 32)
    launch.order.cache_clear()
    ours, exact = make(plain)
    assert ours.triton is not None
    assert ours.triton._order(ours.triton.gate_up).shares > 1
    x = rand(2, HIDDEN, dtype=BF16)[[0] * 19 + [1] * 2]
    few = ours(x[-3:], None, 0.0)
    full = ours(x, None, 0.0)
    assert near(full, exact(x, torch.zeros(len(x), HIDDEN, device=HERE)))
    assert (full[:19] == few[0]).all()
    assert (full[19:] == few[1:]).all()
    monkeypatch.setattr(launch, "PARTS", 4 * CHOSEN * 2 * WIDTH * 8)  # rows enough for a few at a time
    assert torch.equal(ours(x, None, 0.0), full)
    launch.order.cache_clear()


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("kinds", [("int4", "int8"), ("int8", "int4"), (None, "int4")], ids=str)
def test_products_of_two_formats(kinds, architecture):
    """Tiles of rows are such as both formats have, however many rows there are: Q4_K_M's experts, say."""

    def weigh(outputs, inputs, seed):
        kind = kinds[outputs == HIDDEN]
        return quantised(kind, outputs, inputs, seed) if kind else plain(outputs, inputs, seed)

    ours, exact = make(weigh)
    ours.triton.architecture = architecture
    x = rand(2, HIDDEN, dtype=BF16)
    want = exact(x, torch.zeros(2, HIDDEN, device=HERE))
    for rows in (2, 24, 80):  # of which one expert has most
        many = x[[0] * (rows - 1) + [1]]
        assert near(ours(many, None, 0.0)[[0, -1]], want), rows


def test_padding_chooses_nothing():
    """What is beyond the real rows, NaN even, is read by no expert and changes no other row; `read` counts."""
    ours, _ = make(plain, shared=True)
    x = rand(6, HIDDEN, dtype=BF16)
    alone, before = ours(x[:3], None, 0.0), ours.read
    x[3:] = torch.nan
    assert torch.equal(ours(x, None, 0.0, real=torch.tensor([3], dtype=torch.int32, device=HERE))[:3], alone)
    assert ours.read == 2 * before
    at, _ = ours.route(ours.router(x[:3], dtype=torch.float32))
    assert before == sum(ours.experts[e].nbytes for e in set(at.flatten().tolist()))


def test_experts_that_are_not_alike_are_taken_one_by_one():
    """Formats that differ, and inputs in orders of their own."""
    kinds = iter([*["int8"] * COUNT, *["int4", "int8"] * COUNT])
    for weigh in (lambda n, k, seed: quantised(next(kinds), n, k, seed), of("order")):
        ours, exact = make(weigh)
        assert ours.triton is None
        x = rand(3, HIDDEN, dtype=BF16)
        assert near(ours(x, None, 0.0), exact(x, torch.zeros(3, HIDDEN, device=HERE)))


def test_more_entries_than_a_grid_is_high(monkeypatch):
    """A device takes 65,535 programs in any direction but the first."""
    ours, _ = make(plain)
    assert ours.triton is not None
    grids = dict[str, tuple[int, ...]]()

    class Recorded:
        def __getattr__(self, name):
            return Kernel(name)

    class Kernel(str):
        def __getitem__(self, grid):
            grids[self] = grid
            return lambda *_, **__: None

    monkeypatch.setattr(launch, "load", Recorded)
    rows = 70_000
    ours.triton(torch.zeros(rows, HIDDEN, dtype=BF16, device=HERE), torch.zeros(rows, COUNT, device=HERE))
    assert grids["mix"][0] == rows and grids["activate"][0] == CHOSEN * rows
    assert max(size for grid in grids.values() for size in grid[1:]) < 2**16
