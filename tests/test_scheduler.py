"""One budget for each forward: who waits for a token first, prompts side by side, drafts from what is left."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from helpers import ScriptedDrafter, assert_released, oracle, use

from outrider import Draft, SamplingParams
from outrider.engine.scheduler import ABREAST, GRAIN, LEAST, LENGTHENED, Pace, shares

GREEDY = SamplingParams(max_tokens=12, temperature=0)


def text(n, seed=0):
    return random.Random(seed).choices(range(128), k=n)


def watch(llm):
    """The rows of each forward from now on, per sequence, as the runner is asked for them."""
    forwards, forward = [], llm.runner._forward

    def seen(seqs, tokens, entries, *more):
        forwards.append({e.seq: e.n for e in entries})
        return forward(seqs, tokens, entries, *more)

    llm.runner._forward = seen
    return forwards


@pytest.mark.parametrize(
    "lacking, room, expected",
    [
        ([(0, 100), (0, 100)], 100, [50, 50]),
        ([(0, 300), (0, 20), (0, 300)], 120, [50, 20, 50]),
        ([(0, 10), (0, 10)], 100, [10, 10]),
        ([(0, 100)] * 5, 2 * LEAST, [LEAST, LEAST, 0, 0, 0]),
        ([(0, 1)] * 5, LEAST, [1, 1, 1, 1, 0]),
        ([(0, 9), (0, 3), (0, 2)], LEAST - 1, [LEAST - 1, 0, 0]),
        ([(-1, 70), (0, 100), (0, 100)], 100, [70, 15, 15]),
        ([(0, 900), (0, 800), *[(0, 70)] * 4], 3 * LEAST, [LEAST, 0, LEAST, LEAST, 0, 0]),
        ([(0, 900)] * (ABREAST + 2), 16 * ABREAST, [16] * ABREAST + [0, 0]),
        ([*[(0, 900)] * 20, (0, 5)], 16 * ABREAST + 5 - 16, [16] * (ABREAST - 1) + [0] * (21 - ABREAST) + [5]),
        ([(0, 9)], 0, [0]),
        ([], 50, []),
    ],
)
def test_shares(lacking, room, expected):
    assert shares(lacking, room) == expected


def test_shares_waste_nothing():
    rng = random.Random(1)
    for _ in range(500):
        lacking = sorted((rng.randrange(3), rng.randrange(1, 200)) for _ in range(rng.randrange(8)))
        room = rng.randrange(400)
        given = shares(lacking, room)
        assert sum(given) == min(room, sum(n for _, n in lacking))
        assert all(0 <= share <= n for share, (_, n) in zip(given, lacking, strict=True))


@pytest.mark.parametrize("fixed, row", [(0.010, 0.001), (0.002, 0.0001), (0.5, 0.01)])
@pytest.mark.parametrize("delay", [0.0, 0.05])
@pytest.mark.parametrize("prompts", [1, 4, 12])
def test_the_pace_follows_what_steps_take(fixed, row, delay, prompts):
    """Neither a delay over the promise, but for a grain, nor a crawl; and one hiccup is soon forgotten."""
    pace, taken = Pace(delay), []
    pace.learn(512, 512, fixed + 512 * row)  # the first prompt, alone
    for i in range(120):
        read = min(pace.beside(4, prompts), 2000) if i % 3 else 0
        seconds = fixed + (4 + read) * row
        pace.learn(4 + read, read, 20 * seconds if i == 70 else seconds)
        taken.append(read)
    allowed = max(GRAIN, min(2000, min(delay, LENGTHENED * (fixed + 4 * row) * (1 + (prompts - 1) / 2)) / row))
    assert all(0.7 * allowed - 1 < read <= 1.3 * allowed + 1 for i, read in enumerate(taken[100:], 100) if i % 3)


def test_a_step_that_is_off_leads_the_pace_nowhere():
    unknown, quick, slow, short = Pace(0.05), Pace(0.05), Pace(0.05, 0.010, 0.001), Pace(0.05, 0.0, 0.001)
    assert unknown.beside(4, 1) == GRAIN
    unknown.learn(4, 0, 0.010)  # the first of all: there is nothing yet to tell a hiccup by
    assert unknown.fixed > 0
    quick.fixed = 0.010
    quick.learn(100, 100, 0.004)  # faster than a forward of no rows
    assert quick.row > 0
    slow.learn(100, 100, 90.0)
    assert slow.row == pytest.approx(0.0013)
    short.learn(100, 0, 0.010)  # faster than its rows
    assert short.fixed == 0


def test_long_prompts_stop_nobody_and_short_ones_do_not_wait(make_llm):
    llm = make_llm(engine={"max_num_batched_tokens": 64, "enable_prefix_caching": False})
    alone = [llm.generate(p, GREEDY)[0].token_ids for p in (text(900), text(30, 2))]
    (first,) = llm.engine.add([5, 6], replace(GREEDY, max_tokens=30))
    llm.engine.step()
    forwards = watch(llm)
    (long,), (short,) = llm.engine.add(text(900), GREEDY), llm.engine.add(text(30, 2), GREEDY)
    ended, steps = [], 0
    while not long.finished:
        news = dict(llm.engine.step())
        steps += 1
        assert first.finished or first in news, "a running sequence has a token from every step"
        ended += [(r, steps) for r in (first, short, long) if r.finished and r not in dict(ended)]
    assert [r for r, _ in ended] == [short, first, long]
    assert max(sum(rows.values()) for rows in forwards) <= 64
    assert any(len(rows) == 3 for rows in forwards)
    assert [r.seq.output for r in (long, short)] == alone
    assert_released(llm)


def test_of_many_prompts_the_short_ones_come_first_and_the_oldest_goes_on(make_llm):
    """So most have their first token long before all are read, and none waits forever."""
    llm = make_llm(engine={"max_num_batched_tokens": 64, "enable_prefix_caching": False})
    params, long = replace(GREEDY, max_tokens=1), 900
    (oldest,) = llm.engine.add(text(long), params)
    forwards = watch(llm)
    for i in range(2 * ABREAST):
        llm.engine.add(text(long, i), params)
    (short,) = llm.engine.add(text(6, 99), params)
    assert short in dict(llm.engine.step())
    while not oldest.finished:
        llm.engine.add(text(20, len(forwards)), params)
        llm.engine.step()
    assert all(oldest.seq.id in rows for rows in forwards)
    for request in [*llm.engine.running, *llm.engine.waiting]:
        llm.engine.abort(request)
    llm.engine.step()
    assert_released(llm)


def test_priorities_and_arrivals_share_prompts(make_llm):
    llm = make_llm(engine={"max_num_batched_tokens": 32, "enable_prefix_caching": False})
    forwards = watch(llm)
    low, early, late = (
        llm.engine.add(text(64, i), SamplingParams(max_tokens=1), priority=p)[0] for i, p in enumerate((1, 0, 0))
    )
    order = []
    while llm.engine.waiting or llm.engine.running:
        order += [r for r, _ in llm.engine.step()]
    assert order == [early, late, low]
    assert forwards[0] == {early.seq.id: 16, late.seq.id: 16}
    assert_released(llm)


def test_drafts_shrink_before_prompts_wait(make_llm):
    llm = make_llm(engine={"max_num_batched_tokens": 40, "enable_prefix_caching": False})
    prompts, params = [[1, 2, 3], [4, 5, 6], text(300)], replace(GREEDY, max_tokens=100)
    expected = [llm.generate(p, params)[0].token_ids for p in prompts]
    use(llm, ScriptedDrafter(oracle(dict(zip(map(tuple, prompts), expected, strict=True)))), 30)
    running = [llm.engine.add(p, params)[0] for p in prompts[:2]]
    llm.engine.step()
    (long,) = llm.engine.add(prompts[2], params)
    forwards = watch(llm)
    llm.engine.step()
    drafted = [forwards[0][r.seq.id] - 1 for r in running]
    assert 0 < drafted[0] == drafted[1] and 3 * sum(drafted) <= forwards[0][long.seq.id]
    for _ in llm.engine.run():
        pass
    assert max(sum(rows.values()) for rows in forwards) <= 40
    assert [r.seq.output for r in (*running, long)] == expected
    assert any(r.seq.metrics.accepted for r in running)
    assert_released(llm)


@pytest.mark.parametrize("many", [2, 8])
def test_riders_come_where_there_is_room(make_llm, many):
    llm = make_llm(engine={"max_num_batched_tokens": 32, "enable_prefix_caching": False})
    use(llm, ScriptedDrafter(lambda seq, k: Draft([5] * 9, [*range(-1, 8)], riders=6)), 3)
    forwards = watch(llm)
    llm.generate([text(20, i) for i in range(many)], GREEDY)
    rows = [max(rows.values()) for rows in forwards if len(rows) == many]
    assert max(sum(rows.values()) for rows in forwards) <= 32
    assert rows and set(rows[1:]) & {10} == ({10} if many == 2 else set())
    llm.engine.k = 0
    forwards.clear()
    llm.generate([5, 6], GREEDY)
    assert {n for rows in forwards[1:] for n in rows.values()} == {1}


@pytest.mark.parametrize("why", ["switched off", "k=0"])
def test_room_is_kept_for_no_drafts_that_nobody_makes(make_llm, why):
    """A prompt reads as much beside requests without drafts as it does where there is no drafter."""

    def fail(seq, k):
        raise ValueError("no ideas")

    read = []
    for k in (0, 16):
        llm = make_llm(engine={"max_num_batched_tokens": 64, "enable_prefix_caching": False})
        use(llm, ScriptedDrafter(fail), k)
        for i in range(4):
            llm.engine.add([5, i], replace(GREEDY, max_tokens=30), k=0 if why == "k=0" else None)
        for _ in range(3):
            llm.engine.step()
        (long,) = llm.engine.add(text(900), GREEDY)
        forwards = watch(llm)
        llm.engine.pace.fixed, llm.engine.pace.row = 1.0, 1e-9
        llm.engine.step()
        read.append(forwards[0][long.seq.id])
        assert (llm.engine.guard.failure is not None) == (why == "switched off")
    assert read == [60, 60]


def test_progress_over_steps(make_llm):
    llm, seen = make_llm(engine={"max_num_batched_tokens": 32, "enable_prefix_caching": False}), []
    llm.runner.progress = lambda done, total: seen.append((done, total))
    llm.generate(text(100), GREEDY)
    assert seen == [(32, 100), (64, 100), (96, 100), (100, 100)]
    seen.clear()
    llm.generate([text(20), text(8)], GREEDY)
    assert not seen
    (running,) = llm.engine.add([5], replace(GREEDY, max_tokens=30))
    for beside in (False, True):  # what was aborted is part of nothing, nor of what is read beside it
        requests = [llm.engine.add(prompt, GREEDY)[0] for prompt in [text(500), text(100)][: 1 + beside]]
        llm.engine.step()
        llm.engine.abort(requests[0])
        seen.clear()
        llm.engine.finish(requests[1:] or [running])
        assert bool(seen) is beside and all(done <= total <= 132 for done, total in seen)
    llm.generate(text(100), GREEDY)
    assert seen[-4:] == [(32, 100), (64, 100), (96, 100), (100, 100)]


def test_a_progress_bar_that_raises_ends_nothing(make_llm, caplog):
    llm, calls = make_llm(engine={"max_num_batched_tokens": 32, "enable_prefix_caching": False}), []

    def gone(done, total):
        calls.append(done)
        raise BrokenPipeError("the terminal has gone")

    expected = llm.generate([text(100), [5]], GREEDY)
    llm.runner.progress = gone
    for _ in range(2):
        assert [o.token_ids for o in llm.generate([text(100), [5]], GREEDY)] == [o.token_ids for o in expected]
    assert len(calls) == 1 and "BrokenPipeError: the terminal has gone" in caplog.text


def test_a_draft_model_reads_a_long_prompt_beside(make_llm, make_checkpoint):
    """It does not stop a running sequence for a whole prompt, and drafts for it once it has read it."""
    llm = make_llm(engine={"enable_prefix_caching": False})
    params = SamplingParams(max_tokens=400, temperature=0)
    expected = [llm.generate(p, params)[0].token_ids for p in ([3], text(400))]
    llm.speculative_config = {"method": "draft_model", "model": str(make_checkpoint(noise=0.002))}
    (running,) = llm.engine.add([3], params)
    llm.engine.step()
    draft = llm.engine.drafter.runner
    rows, forward = [], draft._forward
    draft._forward = lambda seqs, tokens, *more: rows.append(len(tokens)) or forward(seqs, tokens, *more)
    (long,) = llm.engine.add(text(400), params)
    llm.engine.finish([running, long])
    assert [r.seq.output for r in (running, long)] == expected
    assert max(rows) <= 200 and long.seq.metrics.drafted[0] == 0 < sum(long.seq.metrics.drafted)
    assert_released(llm)
