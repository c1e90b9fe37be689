"""What a step costs, what guesses are worth, and which of them get rows."""

from __future__ import annotations

import json
import math
import os
import random
from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.control import CREDIT, START, Account, Beliefs, Bush, Guess, kind
from outrider.costs import KEPT, OWN_KEYS, Costs, Curve, Learnt, cache_file
from outrider.drafters.auto import ROWS
from outrider.ops import native

KINDS = [Beliefs, *([native.kernels.Beliefs] if native.kernels else [])]  # the reference, and the compiled one


def test_a_curve_lies_on_what_was_measured():
    curve = Learnt()
    for count, seconds in ((1, 1.0), (9, 1.8), (5, 1.4)):
        curve.add(count, seconds)
    assert curve.at(5) < curve.at(7) < curve.at(9) < curve.at(20)
    assert curve.at(20) == pytest.approx(curve.at(9) + 11 * (curve.at(9) - curve.at(5)) / 4)
    assert Curve({4: 2.0}).at(1) == 2.0, "fewer cost no more than what was seen"
    assert Curve({1: 1.0, 4: 9.0, 8: 3.0}).over(1, 8)[3:] == [9.0] * 5, "what is known is not doubted"


def test_a_hiccup_is_not_the_cost_and_load_is_everybodys():
    curve = Learnt({1: 1.0, 8: 1.2})
    curve.add(8, 100.0)
    assert curve.at(8) < 1.6, "of a hundred seconds"
    curve = Learnt({1: 1.0, 8: 1.2})
    for _ in range(30):  # the machine has become half as fast, and only single rows are measured
        curve.add(1, 2.0)
    assert curve.at(1) == pytest.approx(2.0, rel=0.1) and curve.at(8) > 1.6


def test_what_was_thought_too_dear_is_believed_less_and_less():
    """One wrong measurement of a count that nobody would ask for again, on a machine that is good otherwise."""
    curve = Learnt()
    for _ in range(9):
        for count in (1, 2, 4):
            curve.add(count, 1 + 0.1 * (count - 1))
    curve.add(8, 50.0)
    first = curve.at(8)
    for _ in range(300):
        curve.add(2, 1.1)
    assert 1.6 < curve.at(8) < first < 3.0


def test_costs_grow_no_further_than_was_looked():
    costs = Costs()
    costs.add(1, 100, 1.0)
    assert np.isfinite(costs.over(1, 9, 100)).tolist() == [True] * 4 + [False] * 5
    costs.add(4, 100, 1.1)
    assert np.isfinite(costs.at(10, 100)) and not np.isfinite(costs.at(11, 100))


def test_a_row_that_takes_another_tile_is_no_other_s_cost():
    costs = Costs()
    costs.begin({1: 0.9, 4: 1.0, 16: 1.2, 17: 1.8, 24: 1.85, 32: 1.9, 33: 2.6})
    for _ in range(100):
        for rows, seconds in ((4, 1.0), (17, 1.8), (18, 1.8)):
            costs.add(rows, 100, seconds)
    assert costs.at(16, 100) < 1.35 * costs.at(4, 100)
    assert costs.at(18, 100) > 1.25 * costs.at(16, 100)


def test_a_bend_stays_where_it_is():
    """What is measured again and again is believed, however far from the line between its neighbours."""
    seconds = {1: 1.0, 2: 1.06, 3: 1.1, 4: 1.31, 5: 1.48, 8: 2.05, 9: 2.4}
    costs, dice = Costs(), random.Random(0)
    costs.begin(seconds)
    for rows in dice.choices([*seconds], (57, 20, 18, 3, 1, 1, 1), k=4000):
        costs.add(rows, 100, seconds[rows])
    for rows in (2, 3, 4):
        assert costs.at(rows, 100) == pytest.approx(seconds[rows] * costs.at(1, 100), rel=0.015)


def test_long_texts_have_their_own_costs():
    costs = Costs()
    for rows, seconds in ((1, 1.0), (9, 2.5)):
        costs.add(rows, 100, seconds)
    costs.add(1, 50_000, 10.0)
    own = OWN_KEYS * 9.0  # of what the keys add to one row: what they add to each further row
    assert costs.at(9, 50_000) == pytest.approx(2.5 + 9.0 + 8 * own), "the rows of short texts, and the keys of these"
    assert costs.at(1, 30_000, texts=2) == 10.0, "of two that were not met yet, and nearly as long"
    drafted = Costs()
    drafted.begin({1: 1.0, 9: 2.5})
    drafted.add(9, 50_000, 2.5 + 9.0 + 8 * own)
    assert drafted.at(1, 50_000) == pytest.approx(10.0), "and the other way round"
    costs.add(9, 50_000, 12.0)
    assert costs.at(9, 50_000) < 15 and costs.at(9, 100) == pytest.approx(2.5, rel=0.05)


def test_rows_are_told_from_prompts():
    """Where every forward reads some prompt, too, least squares tell what its rows cost."""
    costs, dice = Costs(), np.random.default_rng(0)
    for _ in range(60):
        rows, read = int(dice.integers(1, 12)), int(dice.integers(1, 400))
        costs.add(rows, 100, 1.0 + 0.1 * rows + 0.02 * read, read)
    assert costs and costs.at(6, 100) - costs.at(1, 100) == pytest.approx(0.5, rel=0.05)
    costs.add(1, 100, 1.1)
    assert costs.at(1, 100) == pytest.approx(1.1), "a forward without a prompt says it better"


def test_costs_are_kept(tmp_path):
    file = tmp_path / "folder" / "costs.json"
    first = Costs(file, "model")
    for rows, seconds in ((1, 0.1), (8, 0.2)):
        first.add(rows, 100, seconds)
    first.save()
    again = Costs(file, "model")
    assert again and again.at(8, 100) == pytest.approx(2 * again.at(1, 100), rel=0.1)
    for _ in range(3):
        again.add(1, 100, 0.3)
    assert again.at(8, 100) == pytest.approx(0.6, rel=0.1), "three times as slow today"
    assert not Costs(file, "another model").curves


def test_costs_are_kept_while_others_keep_theirs(tmp_path):
    """Whoever is in the middle of writing the file is not disturbed, and does not disturb."""
    file, others = tmp_path / "costs.json", tmp_path / "costs.json.partial"
    others.mkdir()
    (others / "half").touch()
    costs = Costs(file, "model")
    costs.add(1, 100, 0.1)
    costs.save()
    assert Costs(file, "model").curves
    assert {path.name for path in tmp_path.iterdir()} == {file.name, others.name}


def test_days_that_begin_slowly_leave_the_shape(tmp_path):
    """Rows that are never tried keep their place beside those that are, however often a process begins with them."""
    file, dice = tmp_path / "costs.json", random.Random(0)
    first = Costs(file, "model")
    first.begin({n: 0.9 + 0.1 * n for n in (1, 2, 4, 8, 16, 32)})
    first.save()
    for _ in range(30):
        costs = Costs(file, "model")
        for step in range(40):
            rows = dice.choice((1, 1, 1, 2, 3, 4, 5))
            costs.add(rows, 100, (0.9 + 0.1 * rows) * dice.uniform(0.95, 1.05) * (1.3 if step < 3 else 1))
        costs.save()
    assert costs.at(32, 100) / costs.at(1, 100) == pytest.approx(4.1, rel=0.2)


def test_what_is_measured_anew_is_believed(tmp_path):
    """Of counts that were dear once, and so never tried again, the file says for ever what they cost then."""
    file = tmp_path / "costs.json"
    first = Costs(file, "model")
    first.begin({n: 1 + 0.2 * n for n in ROWS})
    for keys in (100, 5000):
        for n in ROWS:
            for _ in range(50):
                first.add(n, keys, (1 + 0.2 * n) * (1 if keys == 100 else 2))
    first.save()
    again = Costs(file, "model")
    again.begin({n: 1 + 0.05 * n for n in ROWS})
    for n in ROWS:
        assert again.at(n, 100) == pytest.approx(1 + 0.05 * n, rel=0.02)
        assert again.at(n, 5000) == pytest.approx(2 * (1 + 0.2 * n), rel=0.1)  # longer texts: another matter
    again.add(8, 5000, 3.0, texts=8)  # so are eight texts: their keys add 1.6, in which further rows hardly take part
    assert again.at(32, 5000, 8) == pytest.approx(2.6 + 1.6 * (1 + OWN_KEYS * 3), rel=0.02)
    assert again.at(32, 5000) == pytest.approx(2 * (1 + 0.2 * 32), rel=0.1)


def test_counts_that_were_not_measured_anew_keep_their_proportion(tmp_path):
    """Of a large model few forwards can be measured when it is loaded."""
    file = tmp_path / "costs.json"
    first = Costs(file, "model")
    first.begin({n: 1 + 0.2 * n for n in ROWS})
    first.save()
    again = Costs(file, "model")
    again.begin({1: 2.4, 2: 2.8})
    assert again.at(32, 100) == pytest.approx(2 * (1 + 0.2 * 32), rel=0.02)


def test_what_many_texts_cost_is_foretold():
    """SmolLM2's Q4_1 weights on two Zen 5 cores, milliseconds, medians: (texts, their length): by rows."""
    short = {1: 2.1, 2: 2.18, 3: 2.25, 4: 2.53, 8: 3.57, 12: 5.1, 16: 6.55, 24: 9.6, 32: 12.7, 48: 19.0}
    measured = {
        (4, 300): {4: 3.15, 8: 4.08, 12: 5.59, 19: 8.48}, (8, 300): {8: 4.68, 12: 6.11, 16: 7.68, 24: 10.51},
        (16, 150): {16: 7.65, 24: 10.64, 32: 13.42, 48: 19.32}, (16, 300): {16: 9.6, 24: 12.45, 32: 15.33, 48: 21.21},
        (16, 600): {16: 12.39, 24: 15.26, 32: 18.11, 48: 23.67}, (4, 1200): {4: 5.05, 8: 6.48, 12: 8.49, 19: 12.4},
        (1, 2400): {1: 3.04, 4: 4.54, 8: 6.83, 16: 12.29}, (1, 4800): {1: 4.01, 4: 5.77, 8: 9.02, 16: 16.24},
    }  # fmt: skip
    for (n, length), seconds in measured.items():
        for first in ([n], *permutations([*seconds][:3])):
            costs = Costs()
            costs.begin(short)
            for rows in first:
                costs.add(rows, n * length, seconds[rows], texts=n)
            for rows, known in seconds.items():
                assert costs.at(rows, n * length, n) == pytest.approx(known, rel=0.18), (n, length, rows, first)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"model": 3}', '{"model": {}}', '{"model": {"0": {}}}', '{"model": {"0": {"1": -1}}}',
     '{"model": {"0": {"x": 1}}}', '{"model": {"0": {"1": "1"}}}', '{"model": {"0": {"1": NaN}}}', "\x00", "[" * 9999,
     '{"model": {"0": {"1' + "0" * 400 + '": 1.0}}}'],
)  # fmt: skip
def test_a_damaged_file_is_no_error(tmp_path, text):
    file = tmp_path / "costs.json"
    file.write_text(text)
    costs = Costs(file, "model")
    assert not costs.curves
    costs.add(1, 100, 1.0)
    costs.save()
    assert Costs(file, "model").curves == {0: {1: 1.0}}


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(file := tmp_path / "costs.json")
    assert not Costs(file, "model").curves


def test_a_file_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").touch()
    costs = Costs(tmp_path / "file" / "costs.json", "model")
    costs.add(1, 100, 1.0)
    costs.save()


def test_old_machines_are_forgotten(tmp_path):
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({f"old {i}": {"0": {"1": 1.0}} for i in range(2 * KEPT)}))
    costs = Costs(file, "model")
    costs.add(1, 100, 1.0)
    costs.save()
    kept = json.loads(file.read_text())
    assert len(kept) == KEPT and "model" in kept and f"old {2 * KEPT - 1}" in kept and "old 0" not in kept


def test_where_costs_are_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("OUTRIDER_CACHE", "")
    assert cache_file() is None
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    assert cache_file() == tmp_path / "costs.json"
    monkeypatch.delenv("OUTRIDER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_file() == tmp_path / "outrider" / "costs.json"
    monkeypatch.setenv("HOME", str(tmp_path))
    for unset in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert cache_file() == tmp_path / ".cache" / "outrider" / "costs.json"


@pytest.fixture(params=KINDS)
def beliefs(request):
    """None of source 4 alone, all others together."""
    return request.param(4)


def choose(beliefs, texts: dict[int, int], guesses: list[list[Guess]], seconds: list[float], k=8, chains=False, **more):
    """Of a step with sequences of such lengths that have a thousand tokens to come."""
    beliefs.price(seconds)
    given = [(seq, [0] * length, length, 1000) for seq, length in texts.items()]
    return beliefs.choose(given, [], dict(enumerate(guesses)), 0.0, k, chains, **more)


def came(beliefs, seq: int, text: list[int], accepted: int = 0) -> None:
    """A step that cost nothing."""
    beliefs.settle([(seq, text, accepted)], 1, 0.0, 0.0)


def chance(beliefs, seq: int, trust: float) -> float:
    """Of one guess by source 1 for a sequence whose text has no token yet."""
    ((*_, worth),), _ = choose(beliefs, {seq: 0}, [[(1, [5], [-1], [trust])]], [1.0, 1e-9])
    return worth


def test_beliefs_begin_with_the_drafters_own_and_follow_the_text(beliefs):
    assert chance(beliefs, 1, 0.9) == pytest.approx(0.9)
    for _ in range(30):
        chance(beliefs, 1, 0.9)
        came(beliefs, 1, [6])
    assert chance(beliefs, 1, 0.9) < 0.05 and 0.05 < chance(beliefs, 2, 0.9) < 0.2, "another request may differ"
    for _ in range(8):
        chance(beliefs, 2, 0.9)
        came(beliefs, 2, [5, 0], 1)  # behind which nothing was guessed
    assert chance(beliefs, 2, 0.9) > 0.6 and chance(beliefs, 1, 0.9) < 0.2
    assert chance(beliefs, 1, 0.4) / 0.4 == pytest.approx(chance(beliefs, 3, 0.6) / 0.6), "of kinds that are not known"
    beliefs.forget(3)
    beliefs.forget(1)
    assert chance(beliefs, 1, 0.9) > 0.05 and len(beliefs) == 2


def test_promises_are_taken_for_what_came_of_them(beliefs):
    """Chosen are the guesses that are thought too much of. With no drafts, that is forgotten."""
    for _ in range(100):
        chance(beliefs, 1, 0.9)
        came(beliefs, 1, [])  # of which no kind learns
    assert chance(beliefs, 1, 0.9) == pytest.approx(0.75 * 0.9), "and no less"
    for _ in range(200):
        hoped = chance(beliefs, 1, 0.9)
        came(beliefs, 1, [], 1)
    assert 0.85 < hoped / 0.9 < 1
    for _ in range(1000):
        choose(beliefs, {1: 0}, [[]], [1.0, 1e-9])
        came(beliefs, 1, [])
    assert chance(beliefs, 1, 0.9) == pytest.approx(0.9, 0.01)


def test_a_source_apart_is_judged_by_depth(beliefs):
    """Whether any of its guesses was right, whatever its trust, drafted or not; and across steps."""
    assert beliefs.hopes(1, 4, 3, 0.6) == pytest.approx([0.6] * 3)
    for length in range(0, 40, 2):
        draft = (4, [7, 8, 9], [-1, -1, 1], [0.1, 0.1, 0.1])
        choose(beliefs, {1: length}, [[draft]], [1.0, 99.0])
        for end in (1, 2):
            came(beliefs, 1, [8, 3] * (length // 2) + [8, 3][:end])
    first, second, third = beliefs.hopes(1, 4, 3, 0.6)
    assert first > 0.9 and second == third < 0.1


def test_a_guess_is_watched_until_it_fails(beliefs):
    """A longer one is compared in later steps, too; theirs wait for it."""
    choose(beliefs, {1: 0}, [[(1, [5, 6, 7], [-1, 0, 1], [0.9] * 3)]], [1.0, 99.0])
    came(beliefs, 1, [5])
    choose(beliefs, {1: 1}, [[(2, [9], [-1], [0.9])]], [1.0, 99.0])
    came(beliefs, 1, [5, 6, 8])
    assert chance(beliefs, 2, 0.9) > 0.9, "the first of the chain came true"
    ((*_, worth),), _ = choose(beliefs, {2: 0}, [[(2, [9], [-1], [0.9])]], [1, 1e-9])
    assert worth == pytest.approx(0.9), "what was guessed meanwhile was not compared"
    ((*_, worth),), _ = choose(beliefs, {3: 0}, [[(1, [5, 6], [-1, 0], [0.9] * 2)]], [1, 0.1, 0.01])
    first = chance(beliefs, 3, 0.9)
    assert 0.4 < worth / first - 1 < 0.85, "of two deep ones one was right"


def test_what_sources_agree_on_and_what_they_do_not_are_of_different_kinds():
    bush = Bush()
    bush.add(1, [7, 5], [-1, 0], [0.8, 0.5])
    bush.add(2, [7, 8], [-1, -1], [0.3, 0.8])
    assert bush.tokens == [7, 5, 8] and bush.parents == [-1, 0, -1]
    assert bush.depths == [1, 2, 1] and bush.trust[0] == 0.8, "of who trusts it more"
    kinds, chances = zip(*bush.judged(), strict=True)
    assert chances == pytest.approx([0.8, 0.5, 0.4]), "of two that are as sure, each has half the say"
    assert kinds == (kind(3, 0, 0.8, 1), kind(1, 0, 0.5, 2), kind(2, 1, 0.4, 1))


def test_who_is_surer_is_believed_more(beliefs):
    """Of two guesses that cannot both be right; who guesses alone is believed as far as it trusts itself."""

    def worth(*guesses: Guess) -> float:
        ((*_, found),), _ = choose(beliefs, {len(beliefs): 0}, [[*guesses]], [1, 1e-9])
        return found

    sure, unsure = (1, [5], [-1], [0.8]), (2, [6], [-1], [0.2])
    assert worth(sure) == pytest.approx(0.8) and worth(unsure) == pytest.approx(0.2)
    assert worth(sure, unsure) == pytest.approx(0.8 * 0.8)
    assert worth(sure, (2, [5], [-1], [0.2])) == pytest.approx(0.8)
    assert worth((1, [5], [-1], [0.0]), (2, [6], [-1], [0.0])) == 0.0


def test_a_slow_minute_is_no_property_of_its_rows():
    """Plain steps of eight sequences in a slow minute, drafted ones before and after it: a row costs what it did."""
    costs, dice = Costs(), random.Random(0)
    costs.begin({n: 1 + 0.1 * n for n in (1, 4, 8, 12, 16)})
    for slow, rows in ((1.0, (8, 10, 12)), (1.8, (8,)), (1.0, (8, 10, 12))) * 5:
        for _ in range(40):
            n = dice.choice(rows)
            costs.add(n, 3000, slow * (1 + 0.1 * n) * dice.uniform(0.95, 1.05))
            plain, *_, four = costs.ladder(8, 4, 3000)
            assert 1.1 < four / plain < 1.35


def test_a_batch_that_begins_slowly_is_not_believed():
    """The first forwards at lengths that were not met yet have hiccups: the shape stays that of the nearest ones."""
    costs = Costs()
    costs.begin({n: 1 + 0.1 * n for n in (1, 4, 8, 12, 16)})
    for rows, seconds in ((8, 9.0), (8, 4.0), (11, 2.1), (8, 2.5)):
        costs.add(rows, 3000, seconds)
        assert costs.at(12, 3000) / costs.at(8, 3000) == pytest.approx(2.2 / 1.8, rel=0.1)


def test_of_far_more_sequences_than_were_measured_nothing_is_said():
    costs = Costs()
    costs.begin({n: 1 + 0.1 * n for n in (1, 4, 8, 16)})
    assert costs.ladder(34, 4, 3000)[1:] == [] and costs.ladder(35, 4, 3000) == []


def picked(beliefs, *guesses: Guess, seconds: list[float], k: int = 8, chains: bool = False):
    """Tokens for each of new sequences with one guess each."""
    trees, _ = choose(beliefs, dict.fromkeys(range(len(guesses)), 9), [[g] for g in guesses], seconds, k, chains)
    return [tokens for tokens, *_ in trees]


def chain(*survives: float) -> Guess:
    """Whose nodes survive with these chances."""
    trust = [a / b for b, a in pairwise([1.0, *survives])]
    return 1, [*range(len(trust))], [*range(-1, len(trust) - 1)], trust


@pytest.mark.parametrize(("row", "taken"), [(0.01, 4), (0.15, 3), (0.3, 2), (0.6, 1), (2.0, 0)])
def test_as_many_rows_as_pay(beliefs, row, taken):
    chosen = picked(beliefs, chain(0.9, 0.7, 0.4, 0.05), seconds=[1 + row * i for i in range(9)])
    assert chosen == [list(range(taken))]


def test_sequences_compete_for_rows(beliefs):
    good, bad = chain(0.95, 0.9, 0.85), chain(0.3, 0.1)
    assert picked(beliefs, good, bad, seconds=[1, 1.1, 1.2, 1.3, 9, 9]) == [[0, 1, 2], []]
    most = picked(beliefs, good, bad, seconds=[1 + 0.01 * i for i in range(9)], k=2)
    assert most == [[0, 1], [0, 1]], "at most k each"


def test_chains_have_no_branches(beliefs):
    tree, seconds = (1, [1, 2, 3], [-1, -1, 1], [0.6, 0.4, 0.9]), [1 + 0.001 * i for i in range(9)]
    assert picked(beliefs, tree, seconds=seconds) == [[1, 2, 3]]
    assert picked(beliefs, tree, seconds=seconds, chains=True) == [[1]]


def test_the_likelier_child_follows_its_parent(beliefs):
    """So that it lies as in plain decoding."""
    tree = (2, [1, 2, 3, 4], [-1, -1, 1, 1], [0.3, 0.7, 0.2, 0.8])
    ((tokens, parents, who, _),), _ = choose(beliefs, {1: 0}, [[tree]], [1, *[0.1] * 4])
    assert (tokens, parents, who) == ([2, 4, 3, 1], [-1, 0, 0, -1], [1] * 4)


@pytest.mark.skipif(len(KINDS) < 2, reason="there are no kernels here")
@given(st.integers(0, 10**9))
def test_both_choose_the_same(seed):
    """Sequences come and go, several sources guess trees of few tokens, with equal and impossible trust."""
    dice, both, texts = random.Random(seed), [own(0b1100) for own in KINDS], dict[int, list[int]]()
    trusts = (0.0, 0.05, 0.3, 0.5, 0.5, 0.97, 1, 1.5, -1.0, math.nan, dice.random())

    def guess(source: int) -> Guess:
        n = dice.randint(0, 8)
        parents = [dice.randint(-1, i - 1) if dice.random() < 0.3 else i - 1 for i in range(n)]
        return source, dice.choices(range(3), k=n), parents, dice.choices(trusts, k=n)

    index = native.kernels.SuffixIndex
    looks = [[(2, {}, index, index(), 8, 2.0, 0.1, tree)] for tree in 2 * [dice.random() < 0.5]]  # one for each

    for _ in range(dice.randint(1, 30)):
        if dice.random() < 0.1 and texts:
            gone, _ = texts.popitem()
            for own, ((_, indexes, *_),) in zip(both, looks, strict=True):
                own.forget(gone)
                indexes.pop(gone, None)
        while len(texts) < 1 or dice.random() < 0.3:
            texts[dice.randrange(10**6)] = dice.choices(range(3), k=dice.choice((1, 5, 9, 80, 300)))
        some = [
            (seq, texts[seq], len(texts[seq]), dice.choice((1, 3, 400))) for seq in dice.sample([*texts], len(texts))
        ]
        step, drafted, chains = dice.choice((0.0, 0.01, 0.1, 0.5)), dice.choice((0.0, 0.3)), dice.random() < 0.2
        seconds, k = [1 + step * i for i in range(dice.randint(0, 20))], dice.randint(0, 9)
        for own in both:
            own.price(seconds)
        cheap = {i: [guess(1)] for i in range(len(some)) if dice.random() < 0.7}
        models = []
        for source in (4, 8):
            how = dice.choice((-1, 0, 2, 9)), dice.choice((0, 0, 5)), dice.random() < 0.6, dice.choice((0.0, 1e-3))
            rounds = [0.1 * dice.random() * (1 + j) for j in range(len(some))]
            models.append((source, *how, dice.choice((0.0, 2.0)), dice.random() < 0.3, rounds))
        one, other = (
            own.choose(some, [*look], cheap, 0.0, k, chains, False, 1, models)
            for own, look in zip(both, looks, strict=True)
        )
        assert one == other
        if dice.random() < 0.5:  # a model is asked for some
            model = dice.choice((4, 8))
            dear = {i: [*cheap.get(i, ()), guess(model)] for i in range(len(some)) if dice.random() < 0.5}
            for i in dear:
                one, other = (own.ran(some[i][0], model, i % 2, len(some[i][1])) for own in both)
                assert one == other >= 0
            one, other = (
                own.choose(some, look, dear, drafted, k, chains, True) for own, look in zip(both, looks, strict=True)
            )
            assert one == other
        came = []
        for seq in texts:
            texts[seq] += dice.choices(range(3), k=dice.randint(0, 3))
            came += [(seq, texts[seq], dice.randint(0, 3))] if dice.random() < 0.9 else []
        rest = len(came) + dice.randint(0, 9), dice.choice((0.5, 1.2, 9.0, math.inf))
        rest = *rest, dice.choice((0.0, 0.2))
        for own in both:
            own.settle(came, *rest)
        asked = some[0][0], dice.choice((1, 4)), 4, 0.65
        one, other = (own.hopes(*asked) for own in both)
        assert one == other and len(both[0]) == len(both[1])
        one, other = ([(own.standing(seq), own.ask(seq, 9)) for seq, *_ in some] for own in both)
        assert one == other


@pytest.mark.parametrize("parent", [0, 1, 9])
def test_parents_come_first(beliefs, parent):
    with pytest.raises(IndexError):
        choose(beliefs, {1: 0}, [[(1, [5], [parent], [0.5])]], [1.0, 1.1])


def test_an_account_bounds_what_is_lost():
    account, steps = Account(256), 0
    while account.covers:
        account.enter(0.0, 0.5)
        steps += 1
    assert steps * 0.5 < 0.03 * 256 and account.credit < -START
    for _ in range(100):
        account.enter(3.0, 0.5)
    assert account.credit == CREDIT and Account(10).credit < 0.2, "a short answer has little to lose"


def test_who_loses_is_not_drafted_for(beliefs):
    """Until it is allowed some again; whom nothing was drafted for pays nothing."""
    right, steps = (1, [5], [-1], [0.9]), 0
    while beliefs.ask(1, 1000):
        ((tokens, *_), (none, *_)), _ = choose(beliefs, {1: 0, 2: 0}, [[right], []], [1.0, 1.15])
        beliefs.settle([(1, [5], 0), (2, [5], 0)], 3, 1.3, 0.0)
        steps += 1
        assert tokens and not none and beliefs.ask(2, 1000) and not beliefs.ask(2, 1), "nothing is to come"
    assert 3 <= steps < 6 and beliefs.standing(1)[0] == steps and beliefs.standing(1)[1] > START
    for _ in range(200):
        came(beliefs, 1, [5])
    assert beliefs.ask(1, 9)


def test_a_model_is_paid_from_another_account(beliefs):
    """A run and its riders count like rows: three of the four that the step is paid for are the first one's, as is all
    that the model took."""
    guesses = [[(1, [5], [-1], [0.9])]] * 2
    choose(beliefs, {1: 0, 2: 0}, guesses, [1.0, 1.05, 1.1, 1.2])
    assert beliefs.ran(1, 4, 1, 7) == 7
    choose(beliefs, {1: 0, 2: 0}, guesses, [1.0, 1.05, 1.1, 1.2], again=True)
    beliefs.settle([(1, [6], 0), (2, [6], 0)], 5, math.inf, 0.3)
    assert beliefs.standing(1) == (1, pytest.approx(START - 2 * (0.2 * 3 / 4 + 0.3) + 0.005)) and beliefs.ask(1, 9)
    assert beliefs.standing(2) == (1, pytest.approx(START + 0.005)), "rows are paid from the other one"


def test_nothing_is_guessed_beyond_the_end(beliefs):
    """The last token that may come is the target's own."""
    beliefs.price([1.0, *[1.001] * 8])
    chain_of_4 = {0: [(1, [1, 2, 3, 4], [-1, 0, 1, 2], [0.9] * 4)]}
    for room in (1, 2, 4, 9):
        ((tokens, *_),), *_ = beliefs.choose([(room, [0], 1, room)], [], chain_of_4, 0.0, 8, False)
        assert tokens == [1, 2, 3, 4][: room - 1]
