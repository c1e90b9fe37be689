"""The controller on a simulated target, and `auto` end to end."""

from __future__ import annotations

import random

import pytest

from outrider import LLM
from outrider.control import WARM_UP, Controller
from outrider.draft import Verdict
from outrider.drafters.medusa import grow


def verdict(drafted, accepted, chain=True):
    return Verdict(list(range(accepted)), [], drafted, chain)


def simulate(acceptance, row=0.03, draft=0.0, found=1.0, riders=0, steps=400, seqs=1, hiccups=0.0, first=0.0, seed=0):
    """Planned k per step, and tokens per second over plain's, where a forward of n rows costs 1 + row * (n - 1).

    The share `hiccups` of the forwards seems to take ten times as long: the machine did something else. The first
    draft takes `first` longer: the drafter has the prompt to read.
    """
    dice, controller = random.Random(seed), Controller()
    plans, tokens, seconds = [], 0, 0.0
    for _ in range(steps):
        k = controller.plan(seqs)
        drafted = [k if dice.random() < found else 0 for _ in range(seqs)]
        accepted = [next((i for i in range(n) if dice.random() > acceptance), n) for n in drafted]
        rows = sum(1 + n + (riders if k else 0) for n in drafted)
        cost = (1 + row * (rows - 1), draft * k * seqs + (first if k else 0))
        first = 0.0 if k else first
        verdicts = [verdict(n, a) for n, a in zip(drafted, accepted, strict=True)]
        controller.learn(k, verdicts, rows, cost[1], cost[0] * (10 if dice.random() < hiccups else 1))
        plans.append(k)
        tokens += sum(accepted) + seqs
        seconds += sum(cost)
    plain = seqs / (1 + row * (seqs - 1))
    return plans, tokens / seconds / plain


def test_good_drafts_are_drafted_long():
    plans, speedup = simulate(0.95)
    assert sorted(plans)[len(plans) // 2] >= 8 and speedup > 4


def test_hopeless_drafts_are_not_drafted():
    plans, speedup = simulate(0.02, row=0.1)
    late = plans[100:]
    assert late.count(0) > 0.9 * len(late) and speedup > 0.97
    assert any(late), "looks again now and then"


def test_costly_drafts_are_drafted_short_or_not():
    assert simulate(0.6, draft=0.5)[1] > 0.95  # half a forward for a token that is kept in 6 of 10 cases
    cheap, dear = (sorted(simulate(0.8, draft=d)[0])[200] for d in (0.02, 0.25))
    assert cheap > dear


def test_a_large_batch_pays_for_its_rows():
    few, many = (sorted(simulate(0.6, row=0.15, seqs=n)[0])[200] for n in (1, 16))
    assert few >= many


def test_riders_count():
    """Riders cost rows whatever k is: where they eat the gain, nothing is drafted."""
    assert simulate(0.5, row=0.1, riders=40)[1] > 0.97


@pytest.mark.parametrize("hiccups", [0.0, 0.02])
@pytest.mark.parametrize(
    "shape",
    [
        {"acceptance": 0.05, "row": 0.3}, {"acceptance": 0.3, "row": 0.05, "riders": 15},
        {"acceptance": 0.0, "row": 1.0}, {"acceptance": 0.3, "row": 0.02, "draft": 0.5},
        {"acceptance": 0.1, "row": 0.1, "found": 0.3},
    ],
    ids=str,
)  # fmt: skip
def test_little_is_lost(shape, hiccups):
    """Whatever the drafter, its probes and misjudgements cost at most a few hundredths."""
    assert simulate(**shape, steps=800, hiccups=hiccups)[1] > 0.97


ACCURACIES = tuple(tuple(0.53 * 0.55**head * 0.3**rank for rank in range(8)) for head in range(4))


def simulate_tree(row, k=None, scale=1.0, steps=1000):
    """Tokens per second over plain's with trees as Medusa grows them, drafted at one price whatever their size."""
    dice, controller = random.Random(0), Controller()
    tokens, seconds = 0, 0.0
    for _ in range(steps):
        nodes = controller.plan(1) if k is None else k
        tree, path, more = set(grow(ACCURACIES, nodes)), (), True
        while more and len(path) < len(ACCURACIES):
            shares = [scale * share for share in ACCURACIES[len(path)]]
            rank = dice.choices(range(len(shares) + 1), [*shares, 1 - sum(shares)])[0]
            if more := (*path, rank) in tree:
                path = (*path, rank)
        cost = 0.04 * (nodes > 0), 1 + row * nodes
        controller.learn(nodes, [verdict(nodes, len(path), nodes < 2)], 1 + nodes, *cost)
        tokens += 1 + len(path)
        seconds += sum(cost)
    return tokens / seconds


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("row", [0.01, 0.03, 0.1, 0.3])
def test_trees(row, scale):
    """A tree's nodes are worth less and less, but not as a chain's are: nearly the best size is found."""
    assert simulate_tree(row, scale=scale) > 0.95 * max(simulate_tree(row, k, scale) for k in (0, 1, 2, 4, 8, 16))


@pytest.mark.parametrize("found", [1.0, 0.3])
def test_hiccups_do_not_end_good_drafting(found):
    calm, shaken = (simulate(0.9, row=0.1, found=found, steps=800, hiccups=h)[1] for h in (0.0, 0.05))
    assert calm > 1.5 and shaken > 0.85 * calm


def test_bad_luck_at_the_start_is_made_good():
    """Neither the prompt that the first draft reads nor drafts that failed at first end what pays in the long run."""
    runs = [simulate(0.74, row=0.09, draft=0.25, first=0.8, seed=seed)[1] for seed in range(20)]
    assert min(runs) > 1.2


def test_the_account_stops_what_the_estimate_believes_in():
    """Drafts that would pay by the estimate, and do not, end when what they lost is not covered."""
    controller, drafted = Controller(), 0
    for _ in range(500):
        k = controller.plan(1)
        controller.learn(k, [verdict(k, 0)], 1 + k, 0.0, 1.0 + 0.5 * (k > 0))
        controller.tried, controller.taken = [1.0] * 16, [1.0] * 16  # it goes on believing
        drafted += k > 0
    assert drafted < 15


def test_bad_luck_after_good_is_covered():
    """What good drafts have earned pays for some that fail in a row."""
    controller = Controller()
    for accepted in [0] + [3] * 60 + [0] * 15:
        controller.learn(3, [verdict(3, accepted)], 4, 0.5, 1.5)
        controller.learn(0, [verdict(0, 0)], 1, 0.0, 1.0)
    assert controller.credit > 0


def test_the_text_changes():
    controller = Controller()
    for step in range(600):
        k = controller.plan(1)
        good = step > 300
        controller.learn(k, [verdict(k, k if good else 0)], 1 + k, 0.0, 1 + 0.05 * k)
        last = k
    assert last >= 8  # it gave up on drafts, looked again, and found that they pay


def test_the_first_steps_measure():
    controller = Controller(limit=6)
    plans = []
    for _ in WARM_UP:
        plans.append(controller.plan(1))
        controller.learn(plans[-1], [verdict(plans[-1], 0)], 1 + plans[-1], 0.0, 1.0)
    assert plans == [min(k, 6) for k in WARM_UP]


@pytest.mark.parametrize("method", ["ngram", "draft_model", "suffix", "lookahead"])
def test_auto_is_exact(method):
    llm = LLM("tiny", dtype="float32")
    config = {"method": method, "num_speculative_tokens": "auto"}
    prompts = ["Once upon a time", "a b a b a b", "The dog"]
    for sampling in ({"temperature": 0}, {"temperature": 0.8, "seed": 2}):
        llm.speculative_config = None
        plain = [o.token_ids for o in llm.generate(prompts, max_tokens=40, **sampling)]
        llm.speculative_config = config | ({"model": "tiny-draft"} if method == "draft_model" else {})
        outputs = llm.generate(prompts, max_tokens=40, **sampling)
        assert [o.token_ids for o in outputs] == plain
        drafted = [n for o in outputs for n in o.metrics["speculative_decoding"]["per_step_drafted"]]
        assert 0 in drafted and any(drafted)
