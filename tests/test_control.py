"""What a step costs, what guesses are worth, and which of them get rows."""

from __future__ import annotations

import json

import numpy as np
import pytest

from outrider.control import CREDIT, KEPT, START, Account, Beliefs, Bush, Costs, Curve, cache_file, kind, pick


def test_a_curve_lies_on_what_was_measured():
    curve = Curve()
    for count, seconds in ((1, 1.0), (9, 1.8), (5, 1.4)):
        curve.add(count, seconds)
    assert curve.at(5) < curve.at(7) < curve.at(9) < curve.at(20)
    assert curve.at(20) == pytest.approx(curve.at(9) + 11 * (curve.at(9) - curve.at(5)) / 4)
    assert Curve({4: 2.0}).at(1) == 2.0, "fewer cost no more than what was seen"


def test_a_hiccup_is_not_the_cost_and_load_is_everybodys():
    curve = Curve({1: 1.0, 8: 1.2})
    curve.add(8, 100.0)
    assert curve.at(8) < 1.5
    curve = Curve({1: 1.0, 8: 1.2})
    for _ in range(30):  # the machine has become half as fast, and only single rows are measured
        curve.add(1, 2.0)
    assert curve.at(1) == pytest.approx(2.0, rel=0.1) and curve.at(8) > 1.6


def test_costs_grow_no_further_than_was_looked():
    costs = Costs()
    costs.add(1, 100, 1.0)
    assert np.isfinite(costs.over(1, 9, 100)).tolist() == [True] * 4 + [False] * 5
    costs.add(4, 100, 1.1)
    assert np.isfinite(costs.at(10, 100)) and not np.isfinite(costs.at(11, 100))


def test_long_texts_have_their_own_costs():
    costs = Costs()
    for rows, seconds in ((1, 1.0), (9, 3.0)):
        costs.add(rows, 100, seconds)
    costs.add(1, 50_000, 10.0)
    assert costs.at(9, 50_000) == pytest.approx(30.0), "the shape of the nearest, moved to what is known"
    costs.add(9, 50_000, 12.0)
    assert costs.at(9, 50_000) < 30 and costs.at(9, 100) == pytest.approx(3.0)


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
    assert not again, "another day's figures: how fast the machine is now is not known yet"
    for _ in range(3):
        again.add(1, 100, 0.3)
    assert again and again.at(8, 100) == pytest.approx(0.6, rel=0.1), "three times as slow today"
    assert not Costs(file, "another model").curves


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"model": 3}', '{"model": {}}', '{"model": {"0": {}}}', '{"model": {"0": {"1": -1}}}',
     '{"model": {"0": {"x": 1}}}', '{"model": {"0": {"1": "1"}}}', '{"model": {"0": {"1": NaN}}}', "\x00", "[" * 9999],
)  # fmt: skip
def test_a_damaged_file_is_no_error(tmp_path, text):
    file = tmp_path / "costs.json"
    file.write_text(text)
    costs = Costs(file, "model")
    assert not costs.curves
    costs.add(1, 100, 1.0)
    costs.save()
    assert Costs(file, "model").curves == {0: {1: 1.0}}


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


def test_beliefs_begin_with_the_drafters_own_and_follow_the_text():
    beliefs, what = Beliefs(), kind(1, 0, 0.9, 1)
    assert beliefs.of(1, what, 0.9) == pytest.approx(0.9)
    for _ in range(30):
        beliefs.learn(1, what, False)
    assert beliefs.of(1, what, 0.9) < 0.05 and 0.05 < beliefs.of(2, what, 0.9) < 0.2, "another request may differ"
    for _ in range(8):
        beliefs.learn(2, what, True)
    assert beliefs.of(2, what, 0.9) > 0.6 and beliefs.of(1, what, 0.9) < 0.2


def test_what_sources_agree_on_and_what_they_do_not_are_of_different_kinds():
    bush = Bush()
    shared = bush.add(1, -1, 7, 0.8)
    below = bush.add(1, shared, 5, 0.5)
    assert bush.add(2, -1, 7, 0.3) == shared and (other := bush.add(2, -1, 8, 0.8)) > below
    assert bush.depths == [1, 2, 1] and bush.trust[shared] == 0.8, "the first one's"
    assert bush.kinds() == [kind(3, 0, 0.8, 1), kind(1, 0, 0.5, 2), kind(2, 1, 0.8, 1)]
    assert len({*bush.kinds()}) == 3 and bush.kinds()[other] != kind(2, 0, 0.8, 1), "contradicted"


def bush_of(*chances: float) -> tuple[Bush, list[float]]:
    """A chain with these chances to survive."""
    bush = Bush()
    for i in range(len(chances)):
        bush.add(1, i - 1, i, 0.5)
    return bush, list(chances)


@pytest.mark.parametrize(("row", "taken"), [(0.01, 4), (0.2, 3), (0.45, 2), (2.0, 0)])
def test_as_many_rows_as_pay(row, taken):
    bush, chances = bush_of(0.9, 0.7, 0.4, 0.05)
    chosen, rate = pick([chances], [bush], [1 + row * i for i in range(9)], 0.0, 8)
    assert chosen == [list(range(taken))] and rate >= 1


def test_sequences_compete_for_rows():
    (good, sure), (bad, unsure) = bush_of(0.95, 0.9, 0.85), bush_of(0.3, 0.1)
    chosen, _ = pick([sure, unsure], [good, bad], [1, 1.1, 1.2, 1.3, 9, 9], 0.0, 8)
    assert chosen == [[0, 1, 2], []]
    assert pick([sure, unsure], [good, bad], [1 + 0.01 * i for i in range(9)], 0.0, 2)[0] == [[0, 1], [0, 1]], (
        "at most k each"
    )


def test_chains_have_no_branches():
    bush = Bush()
    first, second = bush.add(1, -1, 1, 0.6), bush.add(1, -1, 2, 0.4)
    bush.add(1, second, 3, 0.9)
    chances, seconds = [0.6, 0.4, 0.36], [1 + 0.001 * i for i in range(9)]
    assert pick([chances], [bush], seconds, 0.0, 8)[0] == [[first, second, 2]]
    assert pick([chances], [bush], seconds, 0.0, 8, chains=True)[0] == [[first]]


def test_an_account_bounds_what_is_lost():
    account, steps = Account(256), 0
    while account.covers:
        account.enter(0.0, 0.5)
        steps += 1
    assert steps * 0.5 < 0.03 * 256 and account.credit < -START
    for _ in range(100):
        account.enter(3.0, 0.5)
    assert account.credit == CREDIT and Account(10).credit < 0.2, "a short answer has little to lose"
