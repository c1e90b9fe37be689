"""Many callers, one engine: each gets what it would get alone, and what goes wrong with one ends that one."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import ScriptedDrafter, assert_released, oracle, run, use

from outrider import LLM, Draft, SamplingParams, speculate
from outrider.config import Rule
from outrider.drafters.cascade import Cascade
from outrider.drafters.ngram import Ngram
from outrider.engine import Engine, Request, engine
from outrider.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineError,
    OutOfMemory,
    OutriderError,
    PoolFull,
    RequestError,
    interrupts_wait,
)
from outrider.kv import OffloadKV
from outrider.kv.paged import Table
from outrider.sampling import Row, choose, few_threads
from outrider.sequence import Sequence
from outrider.verify import COUPLED

METHODS = {
    "none": None,
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
    "lookahead": {"method": "lookahead", "window_size": 3, "ngram_size": 3},
    "self": {"method": "self", "view": "streaming:budget=64"},
    "cascade": {"method": "cascade", "view": "streaming:budget=64"},
    "merge": {"method": "merge", "drafters": [{"method": "ngram"}, {"method": "self", "view": "streaming:budget=64"}]},
}
PROMPTS = [[1, 2, 1, 2, 1], [3], [4, 5, 6, 4, 5], [7, 7, 7], [8, 9] * 9, [10]]
SAMPLED = SamplingParams(max_tokens=24, seed=3)
GREEDY = SamplingParams(max_tokens=24, temperature=0)


def alone(llm: LLM, params: SamplingParams = SAMPLED) -> list[list[int]]:
    """What each of PROMPTS gives by itself, decoded plainly."""
    llm.speculative_config = None
    return [llm.generate(prompt, params)[0].token_ids for prompt in PROMPTS]


def together(calls: list[Callable[[], object]]) -> list:
    """The results of calls that start at once, each in a thread; an exception is a result, too."""
    start = threading.Barrier(len(calls))

    def call(one):
        start.wait(60)
        try:
            return one()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(call, calls, timeout=300))


# --- threads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_threads_share_one_llm(random_llm, method):
    expected = alone(random_llm)
    random_llm.speculative_config = METHODS[method]

    def stream(prompt):
        return [event.token_id for event in random_llm.stream(prompt, SAMPLED)]

    def generate(prompt):
        return [[o.token_ids for o in random_llm.generate([prompt, PROMPTS[0]], SAMPLED)] for _ in range(3)]

    calls = [lambda p=p: generate(p) for p in PROMPTS] + [lambda p=p: stream(p) for p in PROMPTS]
    results = together(calls)
    assert results == [[[e, expected[0]]] * 3 for e in expected] + expected
    assert_released(random_llm)


def test_threads_with_texts_and_a_change_of_method(tiny_llm):
    """Chats and streams with stop strings; and an assignment in their midst is refused or waits, but harms nobody."""
    params = SamplingParams(max_tokens=20, temperature=0, stop=["never there"])
    talk = [{"role": "user", "content": "Tell me a story."}]
    texts = ["Once upon a time", "The little girl", "def add(a, b):\n    return"]
    expected = [tiny_llm.chat(talk, params).text] + [tiny_llm.generate(t, params)[0].text for t in texts]

    def assign():
        for _ in range(20):
            try:
                tiny_llm.speculative_config = {"method": "ngram"}
            except ConfigError as error:
                assert "requests are running" in str(error)

    calls = [lambda: tiny_llm.chat(talk, params).text]
    calls += [lambda t=t: "".join(event.text for event in tiny_llm.stream(t, params)) for t in texts]
    assert together([*calls, assign]) == [*expected, None]
    assert_released(tiny_llm)


def test_a_stream_waits_until_its_end_is_known(tiny_llm, monkeypatch):
    """Another thread steps: between the last tokens and the end of a request, its reader must not go on."""
    params, end, ending = (
        SamplingParams(max_tokens=20, temperature=0, stop=["never there"]),
        Engine._end,
        threading.Event(),
    )

    def slowly(*given):
        ending.set()
        time.sleep(0.2)
        end(*given)

    (expected,) = tiny_llm.generate("Once upon a time", params)
    stream = tiny_llm.stream("Once upon a time", params)
    monkeypatch.setattr(Engine, "_end", slowly)
    thread = threading.Thread(target=lambda: tiny_llm.generate("The little girl", max_tokens=40, ignore_eos=True))
    thread.start()
    assert ending.wait(60)
    events = list(stream)
    thread.join()
    assert "".join(event.text for event in events) == expected.text and events[-1].output.text == expected.text


def test_a_stream_that_nobody_reads_stops_nobody(make_llm):
    llm = make_llm(engine={"max_num_seqs": 1})
    expected = alone(llm)
    stream = llm.stream(PROMPTS[0], SAMPLED)
    first = next(stream).token_id
    assert llm.generate(PROMPTS[1], SAMPLED)[0].token_ids == expected[1]  # in the same thread
    (other,) = together([lambda: llm.generate(PROMPTS[2], SAMPLED)[0].token_ids])
    assert other == expected[2]
    assert [first, *(event.token_id for event in stream)] == expected[0]
    assert_released(llm)


def test_a_short_request_does_not_wait_for_a_long_one(random_llm):
    """Who steps for both goes on; who has its tokens leaves."""
    started, left = threading.Event(), threading.Event()

    def waits(tokens, logits):
        started.set()
        while len(tokens) == 1 and not random_llm.engine.waiting:  # the short one comes now
            time.sleep(0.001)
        assert len(tokens) < 300 or left.wait(60)
        return logits

    def short():
        assert started.wait(60)
        random_llm.generate([3], max_tokens=4, temperature=0)
        left.set()

    results = together(
        [lambda: random_llm.generate([1], max_tokens=400, temperature=0, logits_processors=[waits]), short]
    )
    assert len(results[0][0].token_ids) == 400 and results[1] is None


def test_what_a_step_calls_cannot_step(random_llm):
    expected = alone(random_llm)

    def greedy_for_more(tokens, logits):
        random_llm.generate([1], max_tokens=1)
        return logits

    with pytest.raises(OutriderError, match="in a step"):
        random_llm.generate([1], logits_processors=[greedy_for_more])
    stream = random_llm.stream([5], max_tokens=50)
    next(stream)

    def close(tokens, logits):
        stream.close()  # another request's, amid a step that both share
        return logits

    output = random_llm.generate(PROMPTS[0], replace(SAMPLED, logits_processors=[close]))[0]
    assert output.token_ids == expected[0]
    assert_released(random_llm)


# --- a request's own bounds -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_request_bounds_its_own_drafts(random_llm, method):
    expected = alone(random_llm)
    random_llm.speculative_config = METHODS[method]
    engine, bounds = random_llm.engine, [None, 0, 1, 2, 0, 99]
    requests = [engine.add(prompt, SAMPLED, k=k)[0] for prompt, k in zip(PROMPTS, bounds, strict=True)]
    for _ in engine.run():
        pass
    outputs = [engine.output(request) for request in requests]
    assert [output.token_ids for output in outputs] == expected
    for output, k in zip(outputs, bounds, strict=True):
        spec = output.metrics["speculative_decoding"]
        assert max(spec["per_step_drafted"]) <= (engine.k if k is None else min(k, engine.k)) >= spec["num_spec_tokens"]
        assert output.metrics["method"] == ("none" if k == 0 else method)
    assert_released(random_llm)


def test_a_drafter_never_hears_of_plain_requests(random_llm):
    expected = alone(random_llm)
    drafter = ScriptedDrafter(oracle(dict(zip(map(tuple, PROMPTS), expected, strict=True))))
    use(random_llm, drafter, 6)
    heard, propose = [], drafter.propose
    drafter.propose = lambda seqs, k: heard.extend((seq.id, k) for seq in seqs) or propose(seqs, k)

    def observe(seqs, verdicts, output):
        for seq, draft, verdict, logits, hidden in zip(
            seqs, output.drafts, verdicts, output.logits, output.hidden, strict=True
        ):
            heard.append((seq.id, len(draft)))
            place = Row(Sequence(seq.tokens[: len(seq.tokens) - len(verdict.tokens)], SAMPLED, seq.seed))
            assert choose(logits[:1], [place]) == verdict.tokens[:1]  # its own rows, whoever is before it
            assert len(logits) == len(hidden) == 1 + len(draft)
            assert torch.equal(random_llm.runner.model.logits(hidden), logits)

    drafter.observe = observe
    engine = random_llm.engine
    plain, few, other = [engine.add(p, SAMPLED, k=k)[0] for p, k in zip(PROMPTS[:3], (0, 3, 2), strict=True)]
    for _ in engine.run():
        pass
    assert [engine.output(r).token_ids for r in (plain, few, other)] == expected[:3]
    assert plain.seq.id not in dict(heard) and max(k for _, k in heard) == 3
    metrics = [engine.output(r).metrics["speculative_decoding"] for r in (few, other)]
    assert [m["mean_acceptance_length"] for m in metrics] == [4, 3]


@pytest.mark.parametrize("method", ["none", "ngram", "merge"])
def test_what_is_not_done_in_time_ends(make_llm, monkeypatch, method):
    """Waiting or running; the others go on, and what it held is given back."""
    llm, now = make_llm(engine={"max_num_seqs": 2}), [0.0]
    expected = [llm.generate(prompt, SAMPLED)[0].token_ids for prompt in PROMPTS[:3]]
    llm.speculative_config = METHODS[method]
    long, waits = replace(SAMPLED, max_tokens=1000), replace(SAMPLED, max_tokens=1000)
    monkeypatch.setattr(engine, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    (late,) = llm.engine.add(PROMPTS[3], long, deadline=10, priority=-1)
    kept = [llm.engine.add(prompt, SAMPLED)[0] for prompt in PROMPTS[:3]]
    (never,) = llm.engine.add(PROMPTS[4], waits, deadline=10, priority=9)
    llm.engine.step()
    now[0] = 11
    llm.engine.drive(lambda: all(r.finished for r in [late, never, *kept]))
    assert [r.seq.output for r in kept] == expected
    assert 0 < late.ready < 1000 and never.ready == 0
    for request in (late, never):
        assert isinstance(request.error, DeadlineExceeded) and "deadline" in str(request.error)
    with pytest.raises(DeadlineExceeded):
        llm.engine.finish([late])
    assert_released(llm)
    for wrong in (0, -1, "1", True, float("nan"), 10**400):
        with pytest.raises(ConfigError, match="deadline"):
            llm.engine.add([1], SAMPLED, deadline=wrong)


def test_every_deadline_counts(random_llm, monkeypatch):
    """The next one, too, once an earlier one has passed."""
    now, params = [0.0], replace(SAMPLED, max_tokens=1000)
    monkeypatch.setattr(engine, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    requests = [random_llm.engine.add([i], params, deadline=due)[0] for i, due in enumerate((10, 30, 20))]
    for left, now[0] in (({0, 1, 2}, 9), ({1, 2}, 11), ({1}, 21), (set(), 31)):
        random_llm.engine.step()
        assert {i for i, request in enumerate(requests) if not request.finished} == left
    assert all(isinstance(request.error, DeadlineExceeded) for request in requests)
    assert_released(random_llm)


def test_earlier_deadlines_go_first(make_llm):
    llm = make_llm(engine={"max_num_seqs": 1})
    deadlines = [None, 900, 800, None, 700]
    requests = [llm.engine.add([i + 1], SAMPLED, deadline=due)[0] for i, due in enumerate(deadlines)]
    requests += llm.engine.add([9], SAMPLED, priority=-1)
    ended = []
    while len(ended) < 6:
        llm.engine.step()
        ended += [i for i, request in enumerate(requests) if request.finished and i not in ended]
    assert ended == [5, 4, 2, 1, 0, 3]


def test_lower_priorities_go_first(make_llm):
    llm = make_llm(engine={"max_num_seqs": 1})
    engine, order = llm.engine, []
    requests = [engine.add([1 + i], GREEDY, priority=p)[0] for i, p in enumerate([5, 0, -1, 0])]
    for request, _ in engine.run():
        order += [requests.index(request)] if requests.index(request) not in order else []
    assert order == [2, 1, 3, 0]
    for bad in ({"priority": 1.5}, {"k": -1}, {"k": True}, {"cache_salt": 3}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            engine.add([1], GREEDY, **bad)
    assert_released(llm)


# --- one request's failure is its own ---------------------------------------------------------------------------------


def failing(error: Exception, after: int) -> Callable:
    """A processor that raises where the output would have more than so many tokens."""

    def process(tokens, logits):
        if len(tokens) - 1 >= after:
            raise error
        return logits

    return process


@pytest.mark.parametrize("method", METHODS)
def test_a_failing_processor_ends_its_request(random_llm, method):
    expected = alone(random_llm)
    random_llm.speculative_config = METHODS[method]
    bad = replace(SAMPLED, logits_processors=[failing(RuntimeError("boom"), 5)])
    engine = random_llm.engine
    (culprit,) = engine.add(PROMPTS[1], bad)
    others = [engine.add(prompt, SAMPLED)[0] for prompt in PROMPTS]
    for _ in engine.run():
        pass
    assert [engine.output(request).token_ids for request in others] == expected
    output = engine.output(culprit)
    assert output.finish_reason == "error" and output.token_ids == expected[1][:5] and "boom" in str(culprit.error)
    assert engine.guard.failure is None  # it was not the drafter's fault
    assert_released(random_llm)
    results = together([lambda: random_llm.generate([PROMPTS[0], PROMPTS[1]], bad)] +
                       [lambda p=p: random_llm.generate(p, SAMPLED)[0].token_ids for p in PROMPTS])  # fmt: skip
    assert isinstance(results[0], Exception) and "boom" in str(results[0]) and results[1:] == expected
    assert_released(random_llm)


def test_a_processor_that_exits_ends_no_other_request(random_llm):
    """Nor the thread that happens to step, which may be another caller's."""
    expected = alone(random_llm)
    bad = replace(SAMPLED, logits_processors=[failing(SystemExit(3), 5)])
    results = together([lambda: random_llm.generate(PROMPTS[0], bad)] +
                       [lambda p=p: random_llm.generate(p, SAMPLED)[0].token_ids for p in PROMPTS])  # fmt: skip
    assert isinstance(results[0], RequestError) and "SystemExit: 3" in str(results[0]) and results[1:] == expected
    assert_released(random_llm)


@pytest.mark.parametrize("error", [SystemExit(3), type("PanicException", (BaseException,), {})("out of bounds")])
def test_a_criterion_that_exits_ends_no_other_request(random_llm, error):
    """Others have their tokens of that step already."""
    expected = alone(random_llm)

    def ends(tokens):
        if len(tokens) > 8:
            raise error
        return False

    engine = random_llm.engine
    requests = [engine.add(prompt, SAMPLED, ends if i == 1 else None)[0] for i, prompt in enumerate(PROMPTS)]
    for _ in engine.run():
        pass
    assert isinstance(requests[1].error, EngineError) and str(error) in str(requests[1].error)
    found = [engine.output(request).token_ids for request in requests]
    assert found[:1] + found[2:] == expected[:1] + expected[2:]
    assert_released(random_llm)


def test_a_draft_that_fails_later_switches_its_drafter_off(random_llm):
    """One that looks like a Draft until it is cut to what a request may take."""
    expected = alone(random_llm)

    class Own(Draft):
        def clip(self, *given):
            raise ValueError("a subclass of somebody else's")

    shape = 9, random_llm.runner.model.config.vocab_size
    sparse = torch.sparse_coo_tensor(torch.tensor([[0], [1]]), torch.ones(1), shape)
    for draft in (Own.chain([1] * 9), Own([1], [-1]), Draft([1] * 9, list(range(-1, 8)), q=sparse)):
        use(random_llm, ScriptedDrafter(lambda seq, k, draft=draft: draft), 9)
        outputs = random_llm.generate(PROMPTS, replace(SAMPLED, max_tokens=4))
        assert [o.token_ids for o in outputs] == [tokens[:4] for tokens in expected]
        assert (random_llm.engine.guard.failure is None) == (type(draft) is Draft and draft.q is None)
    assert_released(random_llm)


def test_a_drafter_that_gives_too_much_is_cut(random_llm, monkeypatch):
    """To what it was asked for, however much others may give: rows of a forward are everybody's."""
    expected, rows = alone(random_llm), list[int]()
    use(random_llm, ScriptedDrafter(lambda seq, k: Draft.chain([5] * 200)), 3)
    model = random_llm.runner.model
    real = model.forward
    monkeypatch.setattr(model, "forward", lambda tokens, *more: rows.append(len(tokens)) or real(tokens, *more))
    assert [o.token_ids for o in random_llm.generate(PROMPTS, SAMPLED)] == expected
    assert max(rows) <= sum(map(len, PROMPTS)) + 4 * len(PROMPTS)


def test_what_is_begun_is_looked_at(random_llm):
    """Tokens that another engine has written: fewer than are asked for, and none behind the end."""
    (expected,) = (output.token_ids for output in random_llm.generate(PROMPTS[1], GREEDY))
    engine, params = random_llm.engine, replace(GREEDY, stop_token_ids=[expected[6]])
    for begun, words in (
        ([expected], "lists of less than 24 tokens"), ([], "1 lists"), ([[1], [2]], "1 lists"),
        ([[1, 999]], "token 999"), ([[True]], "token True"),
    ):  # fmt: skip
        with pytest.raises(RequestError, match=words):
            engine.add(PROMPTS[1], GREEDY, begun=begun)
    (request,) = engine.add(PROMPTS[1], params, begun=[expected[:9]])
    engine.finish([request])
    first = expected.index(expected[6])
    assert engine.output(request).token_ids == expected[: first + 1]
    use(random_llm, ScriptedDrafter(oracle({tuple(PROMPTS[1]): expected})))
    (request,) = random_llm.engine.add(PROMPTS[1], GREEDY, begun=[expected[:9]])
    random_llm.engine.finish([request])
    output = random_llm.engine.output(request)
    assert output.token_ids == expected and output.drafted_by == [None] * 9 + (["scripted"] * 4 + [None]) * 3
    assert_released(random_llm)


def test_an_end_within_a_draft_cuts_what_is_said_of_it(random_llm):
    """Who drafted each token, and how many were accepted: of the draft that is cut those before the cut."""
    (expected,) = (output.token_ids for output in random_llm.generate(PROMPTS[1], GREEDY))
    use(random_llm, ScriptedDrafter(oracle({tuple(PROMPTS[1]): expected})))
    for stop in dict.fromkeys(expected[:10]):
        end = expected.index(stop) + 1
        (output,) = random_llm.generate(PROMPTS[1], replace(GREEDY, stop_token_ids=[stop], logprobs=0))
        assert output.token_ids == expected[:end] == [known.token_id for known in output.logprobs]
        assert output.drafted_by == ((["scripted"] * 4 + [None]) * 2)[:end]
        accepted = output.metrics["speculative_decoding"]["num_accepted_draft_tokens"]
        assert accepted == output.drafted_by.count("scripted")


def test_the_default_device_of_a_drafter_is_its_own(random_llm):
    """It may set one in a step: the next forward, and others' requests, go on where the model lies."""
    expected = alone(random_llm)

    def script(seq, k):
        torch.set_default_device("meta")
        return Draft()

    use(random_llm, ScriptedDrafter(script))
    try:
        assert random_llm.generate(PROMPTS[1], SAMPLED)[0].token_ids == expected[1]
    finally:
        torch.set_default_device(None)
    assert_released(random_llm)


def test_a_preempted_prompt_is_not_cached_by_itself(make_llm):
    """What a request finds of its own when it comes back, nobody else had read."""
    llm = make_llm()
    memory = llm.runner.kv.nbytes(12 * 32)
    llm = make_llm(engine={"max_num_batched_tokens": 3, "kv_memory": memory})
    assert llm.runner.prefixes
    first, late = [5] * 20, [i % 128 for i in range(230)]
    requests = [llm.engine.add(p, replace(GREEDY, max_tokens=n))[0] for p, n in ((first, 125), (late, 2))]
    for _ in llm.engine.run():
        pass
    assert llm.engine.preemptions and [request.cached for request in requests] == [0, 0]
    assert (llm.engine.prefix_queries, llm.engine.prefix_hits) == (250, 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_at_the_seam_leaves_the_handlers_as_they_were(monkeypatch, number):
    """It is heard, and no other signal is deaf from then on."""
    heard, real, left = list[int](), signal.signal, []
    handlers = {n: (lambda n, _: heard.append(n)) for n in (signal.SIGINT, signal.SIGTERM)}

    def pressed(n, handler):
        before = real(n, handler)
        if left == [n]:
            left.clear()
            raise KeyboardInterrupt
        return before

    before = {n: real(n, handler) for n, handler in handlers.items()}
    monkeypatch.setattr("outrider.errors.signal.signal", pressed)
    try:
        left.append(number)
        with pytest.raises(KeyboardInterrupt), interrupts_wait():
            pytest.fail("it came before")
        assert all(signal.getsignal(n) is handler for n, handler in handlers.items())
        with pytest.raises(KeyboardInterrupt), interrupts_wait():
            signal.raise_signal(signal.SIGTERM)
            left.append(number)
        assert all(signal.getsignal(n) is handler for n, handler in handlers.items()) and heard == [signal.SIGTERM]
        with interrupts_wait() as late:
            assert not late
    finally:
        for n, handler in before.items():
            real(n, handler)


def test_a_stream_gives_what_it_has_and_then_its_error(random_llm):
    expected = alone(random_llm)[1]
    bad = replace(SAMPLED, logits_processors=[failing(RuntimeError("boom"), 5)])
    seen = []
    with pytest.raises(Exception, match="boom"):
        for event in random_llm.stream(PROMPTS[1], bad):
            seen.append(event.token_id)
            assert event.finish_reason is None
    assert seen == expected[:5]
    assert_released(random_llm)


def test_a_failing_criterion_ends_its_request(random_llm):
    def ends(tokens):
        if len(tokens) > 8:
            raise RequestError("boom")
        return False

    expected, engine = alone(random_llm), random_llm.engine
    use(random_llm, ScriptedDrafter(oracle(dict(zip(map(tuple, PROMPTS), expected, strict=True)))), 7)
    engine = random_llm.engine
    (culprit,) = engine.add(PROMPTS[0], SAMPLED, ends)
    others = [engine.add(prompt, SAMPLED)[0] for prompt in PROMPTS]
    for _ in engine.run():
        pass
    assert [engine.output(request).token_ids for request in others] == expected
    assert engine.output(culprit).token_ids == expected[0][:4] and engine.output(culprit).finish_reason == "error"
    assert_released(random_llm)


@pytest.mark.parametrize("raised", [OutOfMemory, MemoryError, RuntimeError])
def test_memory_that_runs_out_for_one(random_llm, monkeypatch, raised):
    expected, engine = alone(random_llm), random_llm.engine
    requests = [engine.add(prompt, SAMPLED)[0] for prompt in PROMPTS]
    reserve, doomed = random_llm.runner.kv.reserve, requests[2].seq.id

    def scarce(plan):
        if any(e.seq == doomed and e.start > 9 for e in plan.entries):
            raise raised("can't allocate memory")
        reserve(plan)

    monkeypatch.setattr(random_llm.runner.kv, "reserve", scarce)
    for _ in engine.run():
        pass
    tokens = [engine.output(request).token_ids for request in requests]
    assert isinstance(requests[2].error, OutOfMemory) and tokens[2] == expected[2][: len(tokens[2])] != []
    assert tokens[:2] + tokens[3:] == expected[:2] + expected[3:]
    assert_released(random_llm)


def test_a_verdict_without_tokens_ends_its_request(random_llm, monkeypatch):
    expected, verify = alone(random_llm), speculate.verify

    def judge(seqs, *args):
        verdicts = verify(seqs, *args)
        for seq, verdict in zip(seqs, verdicts, strict=True):
            if seq.tokens[0] == 4 and len(seq.output) == 6:
                verdict.path, verdict.tokens, verdict.error = [], [], RequestError("nothing to choose")
        return verdicts

    monkeypatch.setattr(speculate, "verify", judge)
    with pytest.raises(RequestError, match="nothing to choose"):
        random_llm.generate(PROMPTS, SAMPLED)
    assert_released(random_llm)
    requests = [random_llm.engine.add(prompt, SAMPLED)[0] for prompt in PROMPTS]
    for _ in random_llm.engine.run():
        pass
    assert [random_llm.engine.output(r).token_ids for r in requests] == [*expected[:2], expected[2][:6], *expected[3:]]


def test_a_progress_bar_that_is_interrupted_costs_no_logprobs(make_llm):
    llm = make_llm(engine={"max_num_batched_tokens": 16})
    params = replace(SAMPLED, logprobs=1)
    expected = llm.generate(PROMPTS[0], params)[0]
    (request,) = llm.engine.add(PROMPTS[0], params)
    llm.engine.step()

    def closed(done, total):
        raise KeyboardInterrupt

    llm.runner.progress = closed
    (other,) = llm.engine.add([1, 2, 3] * 40, SAMPLED)
    with pytest.raises(KeyboardInterrupt):
        llm.engine.step()
    llm.runner.progress = None
    llm.engine.finish([request, other])
    output = llm.engine.output(request)
    assert output.logprobs == expected.logprobs
    assert output.metrics["speculative_decoding"] == expected.metrics["speculative_decoding"]


# --- a drafter's failure is nobody's ----------------------------------------------------------------------------------


class Broken(ScriptedDrafter):
    """Fails in one of its methods, at the third call."""

    def __init__(self, where: str, error: BaseException, script) -> None:
        super().__init__(script)
        self.where, self.error, self.left = where, error, 2

    def _fail(self, where):
        if where == self.where:
            self.left -= 1
            if self.left < 0:
                raise self.error

    def rests(self, seqs):
        self._fail("rests")
        return super().rests(seqs)

    def propose(self, seqs, k):
        self._fail("propose")
        return super().propose(seqs, k)

    def observe(self, seqs, verdicts, output):
        self._fail("observe")
        super().observe(seqs, verdicts, output)

    def forget(self, seq):
        super().forget(seq)
        self._fail("forget")

    def kv_bytes(self, tokens):
        self._fail("kv_bytes")
        return 0


@pytest.mark.parametrize("where", ["rests", "propose", "observe", "forget", "kv_bytes"])
def test_a_failing_drafter_is_switched_off(random_llm, caplog, where):
    expected = alone(random_llm)
    drafter = Broken(where, RuntimeError("out of ideas"), oracle(dict(zip(map(tuple, PROMPTS), expected, strict=True))))
    use(random_llm, drafter, 3)
    for _ in range(2):
        with caplog.at_level(logging.WARNING):
            outputs = random_llm.generate(PROMPTS, SAMPLED)
        assert [o.token_ids for o in outputs] == expected
        assert_released(random_llm)
    assert [o.metrics["drafter_error"] for o in outputs] == ["RuntimeError: out of ideas"] * len(PROMPTS)
    assert [o.metrics["speculative_decoding"]["num_draft_tokens"] for o in outputs] == [0] * len(PROMPTS)
    (record,) = caplog.records
    assert "scripted" in record.getMessage() and "out of ideas" in record.getMessage()
    random_llm.speculative_config = {"method": "ngram"}
    assert random_llm.generate(PROMPTS[0], SAMPLED)[0].metrics["drafter_error"] is None


def test_a_request_names_its_drafter_behind_a_preemption(random_llm):
    """As its neighbours do, though by then the drafter is switched off."""
    use(random_llm, Broken("propose", RuntimeError("out of ideas"), lambda seq, k: Draft()))
    engine = random_llm.engine
    requests = [engine.add(prompt, SAMPLED)[0] for prompt in PROMPTS[:2]]
    for _ in range(5):
        engine.step()
    assert engine.guard.failure
    engine._preempt(requests[-1])
    engine.finish(requests)
    assert [engine.output(r).metrics["method"] for r in requests] == ["scripted"] * 2
    assert {engine.output(r).metrics["speculative_decoding"]["num_spec_tokens"] for r in requests} == {4}


def test_an_output_is_of_its_time(random_llm):
    engine = random_llm.engine
    (request,) = engine.add(PROMPTS[0], SAMPLED)
    engine.step()
    metrics = engine.output(request).metrics["speculative_decoding"]
    engine.finish([request])
    assert len(metrics["per_step_accepted"]) == len(metrics["per_step_drafted"]) == metrics["num_spec_steps"] == 1


@pytest.mark.parametrize("where", ["propose", "observe", "wrong drafts"])
def test_a_failing_drafter_inside_another_is_switched_off(random_llm, caplog, where):
    expected = alone(random_llm)
    cascade = Cascade(view="streaming:budget=64")
    error, wrong = RuntimeError("out of ideas"), where == "wrong drafts"
    cascade.inner = Broken(where, error, lambda seq, k: Draft([1, 1], [-1, 0], trust=[0.5] * (1 if wrong else 2)))
    cascade.attach(random_llm.runner, pytest.fail)
    use(random_llm, cascade)
    with caplog.at_level(logging.WARNING):
        outputs = random_llm.generate(PROMPTS, SAMPLED)
    assert [o.token_ids for o in outputs] == expected
    assert_released(random_llm)
    for said in [caplog.text, *(o.metrics["drafter_error"] for o in outputs)]:
        assert "drafter scripted" in said and ("trust is a list" if wrong else "RuntimeError: out of ideas") in said


def test_memory_that_runs_out_inside_another_drafter_switches_nothing_off(random_llm):
    expected = alone(random_llm)
    cascade = Cascade(view="streaming:budget=64")
    cascade.inner = Broken("propose", OutOfMemory("no keys left"), lambda seq, k: Draft.chain([1]))
    cascade.attach(random_llm.runner, pytest.fail)
    use(random_llm, cascade)
    outputs = random_llm.generate(PROMPTS, SAMPLED)
    assert [o.token_ids for o in outputs] == expected
    assert [o.metrics["drafter_error"] for o in outputs] == [None] * len(PROMPTS)


@pytest.mark.parametrize("where", ["propose", "observe", "forget"])
def test_what_is_no_exception_is_the_drafter_s_own_affair(random_llm, where):
    """As a cancelled task is: it costs nobody else a token."""
    expected, error = alone(random_llm), asyncio.CancelledError("no time")
    use(random_llm, Broken(where, error, oracle(dict(zip(map(tuple, PROMPTS), expected, strict=True)))), 3)
    outputs = random_llm.generate(PROMPTS, SAMPLED)
    assert [o.token_ids for o in outputs] == expected
    assert random_llm.engine.guard.failure == "CancelledError: no time"
    assert_released(random_llm)


class Vandal(ScriptedDrafter):
    """Changes all that it has given away or is shown."""

    def propose(self, seqs, k):
        self.drafts = super().propose(seqs, k)
        for draft in self.drafts:
            draft.by = ["me"] * len(draft)
        for seq in seqs:
            seq.metrics.inner = 5
        return self.drafts

    def observe(self, seqs, verdicts, output):
        for verdict in verdicts:
            verdict.path.clear()
            verdict.tokens.append(5)
        for draft in self.drafts:
            for own in (draft.tokens, draft.parents, draft.by):
                own[:] = own[:1]
            draft.tokens = None


def test_a_drafter_may_change_its_drafts_behind_a_step(random_llm):
    expected = alone(random_llm)
    use(random_llm, Vandal(oracle(dict(zip(map(tuple, PROMPTS), expected, strict=True)))))
    outputs = random_llm.generate(PROMPTS, SAMPLED)
    assert [o.token_ids for o in outputs] == expected
    assert {by for o in outputs for by in o.drafted_by} == {"me", None}
    assert {o.metrics["drafter_error"] for o in outputs} == {None}


class Strict(ScriptedDrafter):
    """Keeps books of what it is shown, and may forget nothing else."""

    def __init__(self, write: bool = False) -> None:
        super().__init__(lambda seq, k: Draft.chain([5]))
        self.books, self.write = {}, write

    def propose(self, seqs, k):
        self.books |= {seq.id: len(seq.output) for seq in seqs}
        return super().propose(seqs, k)

    def forget(self, seq):
        if self.write:
            seq.tokens.append(5)
        assert len(seq.output) > self.books.pop(seq.id)


def test_a_drafter_forgets_what_it_was_shown_and_nothing_else(random_llm):
    expected = alone(random_llm)
    use(random_llm, drafter := Strict())
    engine = random_llm.engine
    (plain,), (other,), (gone,) = (engine.add(PROMPTS[i], SAMPLED, k=k) for i, k in ((0, 0), (1, None), (2, None)))
    for _ in range(3):
        engine.step()
    for request in (other, gone):
        engine._preempt(request)
    assert not drafter.books
    engine.abort(gone)
    engine.finish([plain, other])
    assert [r.seq.output for r in (plain, other)] == expected[:2]
    assert engine.guard.failure is None and not drafter.books
    assert_released(random_llm)


def test_a_drafter_that_writes_as_it_forgets_changes_nothing(random_llm):
    expected = alone(random_llm)
    use(random_llm, Strict(write=True))
    engine = random_llm.engine
    requests = [engine.add(prompt, SAMPLED)[0] for prompt in PROMPTS]
    for _ in range(3):
        engine.step()
    engine._preempt(requests[-1])
    engine.finish(requests)
    assert [r.seq.output for r in requests] == expected
    assert engine.guard.failure == "TypeError: a drafter cannot change a sequence; it may extend a fork() of one"


NO_DRAFT = torch.full((1, 128), 1 / 128)
WRONG = {
    "propose": [lambda seqs, k: [], lambda seqs, k: None, lambda seqs, k: ["x" for _ in seqs], lambda seqs, k: exit(1),
                lambda seqs, k: [Draft([5], [-1], q=NO_DRAFT.to_sparse()) for _ in seqs],
                lambda seqs, k: [Draft([5], [-1], q=NO_DRAFT.to("meta")) for _ in seqs]],
    "rests": [lambda seqs: torch.zeros(2), lambda seqs: exit(1)],
    "kv_bytes": [lambda tokens: None, lambda tokens: "many", lambda tokens: float("nan")],
    "observe": [lambda *_: exit(1)],
}  # fmt: skip


@pytest.mark.parametrize(("method", "wrong"), [(method, i) for method in WRONG for i in range(len(WRONG[method]))])
def test_what_is_no_draft_switches_a_drafter_off(random_llm, caplog, method, wrong):
    rule = Rule("rejection") if (method, wrong) in (("propose", 4), ("propose", 5)) else COUPLED
    use(random_llm, ScriptedDrafter(lambda seq, k: Draft()), rule=rule)
    expected = [o.token_ids for o in random_llm.generate(PROMPTS, SAMPLED)]
    drafter = ScriptedDrafter(lambda seq, k: Draft.chain([5]))
    setattr(drafter, method, WRONG[method][wrong])
    use(random_llm, drafter, rule=rule)
    for _ in range(2):
        outputs = random_llm.generate(PROMPTS, SAMPLED)
        assert [o.token_ids for o in outputs] == expected
        assert all(o.metrics["drafter_error"] for o in outputs)
    assert caplog.text.count("drafter 'scripted' is switched off") == 1
    assert_released(random_llm)


def test_a_drafter_without_memory_is_asked_again(random_llm):
    expected = alone(random_llm)
    script = oracle(dict(zip(map(tuple, PROMPTS), expected, strict=True)))
    drafter = Broken("propose", OutOfMemory("no keys left"), script)
    use(random_llm, drafter, 3)
    outputs = [random_llm.generate(PROMPTS[0], SAMPLED)[0]]
    drafter.left = 99
    outputs.append(random_llm.generate(PROMPTS[0], SAMPLED)[0])
    drafted = [sum(map(bool, o.metrics["speculative_decoding"]["per_step_drafted"])) for o in outputs]
    assert [o.token_ids for o in outputs] == [expected[0]] * 2 and drafted == [2, 6]


def test_outputs_of_one_prompt_come_back_together(make_llm):
    """All were preempted: what the others would share of the first one's keys is not there yet."""
    llm, params = make_llm(engine={"enable_prefix_caching": False}), SamplingParams(max_tokens=9, seed=3, n=3)
    expected = [output.token_ids for output in llm.generate(PROMPTS[4], params)]
    requests = llm.engine.add(PROMPTS[4], params)
    for _ in range(3):
        llm.engine.step()
    for request in reversed(requests):
        llm.engine._preempt(request)
    llm.engine.finish(requests)
    assert [llm.engine.output(request).token_ids for request in requests] == expected
    assert_released(llm)


def test_a_step_by_oneself_is_taken_once(random_llm, monkeypatch):
    """Where one of those that are stepped alone finds no room, the others have had their step, and it waits."""
    params = SamplingParams(max_tokens=5, logprobs=1, ignore_eos=True, seed=3)
    prompts = [[1, 2, 3], [4, 5], [6]]
    plain = [random_llm.generate(prompt, params)[0] for prompt in prompts]
    requests = [random_llm.engine.add(prompt, params)[0] for prompt in prompts]
    step, calls = engine.step, list[int]()

    def failing(runner, drafter, seqs, *more):
        calls.append(len(seqs))
        if len(seqs) == 3 and len(calls) % 2:
            raise RuntimeError("a library fails in company")
        if len(seqs) == 1 and seqs[0] is requests[1].seq and len(calls) < 9:
            raise PoolFull("no room")
        return step(runner, drafter, seqs, *more)

    monkeypatch.setattr(engine, "step", failing)
    random_llm.engine.finish(requests)
    assert calls.count(1) > 5
    for request, expected in zip(requests, plain, strict=True):
        output = random_llm.engine.output(request)
        assert (output.token_ids, output.logprobs) == (expected.token_ids, expected.logprobs)
        assert output.metrics["speculative_decoding"] == expected.metrics["speculative_decoding"]


# --- interrupts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["propose", "observe", "criterion"])
def test_an_interrupt_is_its_callers_alone(random_llm, where):
    """Ctrl-C in the thread that steps: its requests are aborted, another's go on to the same tokens."""
    expected, left = alone(random_llm), [9]

    def ends(tokens):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return False

    script = oracle(dict(zip(map(tuple, PROMPTS), expected, strict=True)))
    use(random_llm, Broken(where, KeyboardInterrupt(), script), 5)
    engine = random_llm.engine
    (other,) = engine.add(PROMPTS[1], replace(SAMPLED, logprobs=0), ends if where == "criterion" else None)
    with pytest.raises(KeyboardInterrupt):
        random_llm.generate([PROMPTS[0], PROMPTS[2]], SAMPLED)
    assert engine.running == [other] and list(random_llm.runner.slots) == [other.seq.id]
    engine.drafter.where = ""
    engine.finish([other])
    output = engine.output(other)
    assert output.token_ids == expected[1] and len(output.drafted_by) == len(expected[1])
    assert [known.token_id for known in output.logprobs] == expected[1]
    assert_released(random_llm)


def test_an_interrupt_behind_the_last_token_is_the_end(random_llm):
    """What it falls into has not looked whether the request ends there; nothing is written beyond."""
    expected, pressed = alone(random_llm)[1], []

    def ends(tokens):
        if len(tokens) == 25 and not pressed:
            pressed.append(True)
            raise KeyboardInterrupt
        return False

    (request,) = random_llm.engine.add(PROMPTS[1], SAMPLED, ends)
    with pytest.raises(KeyboardInterrupt):
        random_llm.engine.finish([request, *random_llm.engine.add(PROMPTS[0], SAMPLED)])
    assert (request.finished, request.seq.finish_reason, request.seq.output) == (True, "length", expected)
    assert_released(random_llm)


@pytest.mark.parametrize("where", [(OffloadKV, "write"), (Table, "put"), (Engine, "_account")])
def test_ctrl_c_waits_until_a_step_is_whole(make_llm, monkeypatch, where):
    """Wherever it falls. What it left half done would be wrong for those who go on: keys, blocks, logprobs."""
    llm, params = make_llm(engine={"kv_offload": True}), SamplingParams(max_tokens=60, seed=3, logprobs=2)
    expected = llm.generate(PROMPTS[1], params)[0]
    (kept,) = llm.engine.add(PROMPTS[1], params)
    llm.engine.step()
    real, left = getattr(*where), [1]

    def pressed(*args):
        if left:
            left.pop()
            signal.raise_signal(signal.SIGINT)
        return real(*args)

    monkeypatch.setattr(*where, pressed)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in a shell's background it is ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS[2], params)
    finally:
        signal.signal(signal.SIGINT, before)
    assert llm.engine.running == [kept]
    llm.engine.finish([kept])
    output = llm.engine.output(kept)
    assert (output.token_ids, output.logprobs) == (expected.token_ids, expected.logprobs)
    assert_released(llm)


def test_who_waits_is_changed_by_one_thread_at_a_time(random_llm, monkeypatch):
    """The place of a new request is looked for in Python: another thread may take somebody out meanwhile."""
    real, llm = engine._rank, random_llm.engine
    others = [llm.add(PROMPTS[1], SamplingParams(max_tokens=2))[0] for _ in range(4)]
    stepping = threading.Thread(target=llm.step)

    def slow(request):
        if request in others and not stepping.ident:
            stepping.start()
            stepping.join(0.5)  # it waits for us, or else the list is empty now
        return real(request)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_rank", slow)
        last = llm.add(PROMPTS[1], SamplingParams(max_tokens=2))[0]
    stepping.join()
    llm.finish([*others, last])
    assert_released(random_llm)


def test_a_stream_is_dropped_while_another_request_is_queued(random_llm, monkeypatch):
    """As by a destructor, which comes between any two instructions: nobody waits for himself."""
    real, llm, streams = engine._rank, random_llm.engine, [random_llm.stream(PROMPTS[1], max_tokens=9)]

    def dropping(request):
        streams.clear()
        return real(request)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_rank", dropping)
        request = llm.add(PROMPTS[1], SamplingParams(max_tokens=2))[0]
    assert llm.waiting == [request]
    llm.finish([request])
    assert_released(random_llm)


def test_a_stream_is_dropped_while_another_engine_queues_a_request(make_llm, random_llm, monkeypatch):
    """Nobody steps the stream's engine again: what it held is given back all the same."""
    real, stream = engine._rank, random_llm.stream(PROMPTS[1], max_tokens=9)

    def dropping(request):
        if not stream.gi_running:  # its own request is looked for as well
            stream.close()
        return real(request)

    other = make_llm()
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_rank", dropping)
        request = other.engine.add(PROMPTS[1], SamplingParams(max_tokens=2))[0]
    assert_released(random_llm)
    other.engine.finish([request])


def test_a_process_forked_during_a_step_is_told(random_llm):
    """It has a step half done, and not the thread that would end it: it would wait for ever."""
    stepping, forked = threading.Event(), threading.Event()

    def processor(tokens, logits):
        stepping.set()
        forked.wait(60)
        return logits

    params = SamplingParams(max_tokens=2, logits_processors=[processor])
    thread = threading.Thread(target=random_llm.generate, args=(PROMPTS[0], params))
    thread.start()
    stepping.wait(60)
    if not (child := os.fork()):
        signal.alarm(30)
        for call in (
            lambda: random_llm.generate(PROMPTS[0], max_tokens=2),
            lambda: setattr(random_llm, "speculative_config", {"method": "ngram"}),
        ):
            try:
                call()
                os._exit(1)
            except EngineError as error:
                assert "forked" in str(error)
            except BaseException:
                os._exit(2)
        os._exit(0)
    forked.set()
    thread.join(60)
    assert os.waitpid(child, 0)[1] == 0
    assert_released(random_llm)


@pytest.mark.slow
def test_a_process_ends_cleanly_while_daemon_threads_generate():
    """As those of web servers do: Python would end them in a kernel, and C++ the process by abort()."""
    code = """
import atexit, threading

@atexit.register  # first: called last
def still_served():
    print(len(llm.generate("Once", max_tokens=5, ignore_eos=True)[0].token_ids))

from outrider import LLM

llm, running = LLM("tiny", speculative_config="auto"), threading.Barrier(4)

def generate():
    running.wait()
    llm.generate("Once upon a time", max_tokens=100_000, ignore_eos=True)

for _ in range(3):
    threading.Thread(target=generate, daemon=True).start()
running.wait()
for event in llm.stream("Once upon a time", max_tokens=5):
    pass
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "5\n", "")


def test_a_request_that_is_refused_by_its_cache_leaves_nothing(random_llm, monkeypatch):
    def refused():
        raise ConfigError("another engine runs requests on this cache")

    monkeypatch.setattr(random_llm.engine, "_claim", refused)
    with pytest.raises(ConfigError, match="another engine"):
        random_llm.engine.add(PROMPTS[1], SamplingParams(max_tokens=2, prompt_logprobs=1))
    assert_released(random_llm)


@pytest.mark.parametrize("call", ["generate", "stream"])
def test_ctrl_c_while_a_request_is_queued(random_llm, monkeypatch, call):
    """It is aborted, too, though its caller never held it."""
    real = engine.insort

    def pressed(*args, **more):
        real(*args, **more)
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(engine, "insort", pressed)
            getattr(random_llm, call)(PROMPTS[1], max_tokens=20)
    finally:
        signal.signal(signal.SIGINT, before)
    assert_released(random_llm)


def test_asyncio_hears_of_a_signal_once(random_llm, monkeypatch):
    """Though it has been told by its own means already when a step ends."""
    real, heard, pressed = Engine._account, list[int](), list[int]()

    def account(*args):
        if not pressed:
            pressed.append(1)
            signal.raise_signal(signal.SIGINT)
        return real(*args)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, heard.append, 1)
        random_llm.generate(PROMPTS[1], max_tokens=5)
        await asyncio.sleep(0.05)
        loop.remove_signal_handler(signal.SIGINT)

    monkeypatch.setattr(Engine, "_account", account)
    asyncio.run(main())
    assert heard == [1]


def test_two_signals_in_one_step_are_both_told(random_llm, monkeypatch):
    """Also where the first one's handler raises."""
    real, heard = Engine._account, list[int]()

    def account(*args):
        if not heard:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
        return real(*args)

    monkeypatch.setattr(Engine, "_account", account)
    numbers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: lambda number, _: heard.append(number)}
    before = {number: signal.signal(number, handler) for number, handler in numbers.items()}
    try:
        with pytest.raises(KeyboardInterrupt):
            random_llm.generate(PROMPTS[1], max_tokens=5)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert heard == [signal.SIGTERM]
    assert_released(random_llm)


@pytest.mark.parametrize("place", [(Engine, "_account"), (speculate, "verify"), (Ngram, "propose")])
@pytest.mark.parametrize("number", [signal.SIGALRM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_what_a_signal_raises_is_its_callers(random_llm, monkeypatch, number, place):
    """As programs bound their time: the error is neither one of the step, tried again for each of two requests alone,
    nor one of the drafter."""
    random_llm.speculative_config = {"method": "ngram"}
    real, left = getattr(*place), [number]

    def ring(*_):
        raise TimeoutError("too late")

    def rung(*args):
        if left:
            signal.raise_signal(left.pop())
        return real(*args)

    monkeypatch.setattr(*place, rung)
    before = signal.signal(number, ring)
    try:
        with pytest.raises(TimeoutError, match="too late"):
            random_llm.generate(PROMPTS[:2], max_tokens=20)
    finally:
        signal.signal(number, before)
    assert not left and random_llm.engine.guard.failure is None
    assert_released(random_llm)


def test_a_signal_that_ends_nothing_ends_no_request(random_llm, monkeypatch):
    expected = random_llm.generate(PROMPTS[1], SamplingParams(max_tokens=20, temperature=0))[0].token_ids
    real, heard = Engine._account, []

    def pressed(*args):
        if not heard:
            signal.raise_signal(signal.SIGINT)
            assert not heard, "the handler waits for the end of the step"
        return real(*args)

    before = signal.signal(signal.SIGINT, lambda *_: heard.append(True))
    monkeypatch.setattr(Engine, "_account", pressed)
    try:
        output = random_llm.generate(PROMPTS[1], SamplingParams(max_tokens=20, temperature=0))[0]
    finally:
        signal.signal(signal.SIGINT, before)
    assert output.token_ids == expected and heard
    assert_released(random_llm)


# --- what cannot be changed while requests run ------------------------------------------------------------------------


def test_speculative_config_is_not_changed_under_requests(random_llm):
    before, expected = random_llm.speculative_config, alone(random_llm)
    stream = random_llm.stream(PROMPTS[0], SAMPLED)
    first = next(stream)
    with pytest.raises(ConfigError, match=r"1 requests are running.*close streams"):
        random_llm.speculative_config = {"method": "ngram"}
    assert random_llm.speculative_config == before
    assert [e.token_id for e in (first, *stream)] == expected[0]
    random_llm.speculative_config = {"method": "ngram"}
    held = [random_llm.stream(PROMPTS[0], SAMPLED)]
    held.append(held)  # in a cycle: only the garbage collector finds it
    next(held[0])
    with pytest.raises(ConfigError, match="running"):
        random_llm.speculative_config = None
    del held
    gc.collect()
    random_llm.speculative_config = None
    stream = random_llm.stream(PROMPTS[0], SAMPLED)
    with pytest.raises(ConfigError, match="running"):
        random_llm.speculative_config = {"method": "ngram"}
    del stream  # never read from
    random_llm.speculative_config = {"method": "ngram"}
    assert_released(random_llm)


def test_one_cache_serves_one_engine(random_llm):
    llm, expected = random_llm, alone(random_llm)
    other = Engine(llm.runner, ScriptedDrafter(lambda seq, k: Draft()), 2, llm.engine_config)
    (request,) = llm.engine.add(PROMPTS[0], SAMPLED)
    with pytest.raises(ConfigError, match="another engine"):
        other.add(PROMPTS[1], SAMPLED)
    llm.engine.finish([request])
    (second,) = other.add(PROMPTS[1], SAMPLED)
    with pytest.raises(ConfigError, match="another engine"):
        llm.generate(PROMPTS[0], SAMPLED)
    other.finish([second])
    assert [llm.engine.output(request).token_ids, other.output(second).token_ids] == expected[:2]
    assert llm.generate(PROMPTS[2], SAMPLED)[0].token_ids == expected[2]
    assert_released(llm)


# --- results on the way ----------------------------------------------------------------------------------------------


def test_output_of_a_running_request(tiny_llm):
    """It may be asked for at any time, and changes nothing. Random tokens: most characters come in pieces."""
    params = SamplingParams(max_tokens=60, temperature=4.0, seed=1, stop=["never there"], logprobs=1)
    (expected,) = run(tiny_llm, [(tiny_llm.encode("Once"), params)])
    assert "\ufffd" in expected.text
    for stop in (params.stop, None):
        (request,) = tiny_llm.engine.add(tiny_llm.encode("Once"), replace(params, stop=stop))
        lengths = []
        while not request.finished:
            output = tiny_llm.engine.output(request)
            assert output.finish_reason == "running" and expected.text.startswith(output.text)
            assert output.token_ids == expected.token_ids[: len(output.token_ids)]
            lengths.append((len(output.drafted_by), len(output.logprobs), len(output.token_ids)))
            tiny_llm.engine.step()
        assert lengths == [(n, n, n) for n in range(60)]
        assert tiny_llm.engine.output(request).text == expected.text
    stream = tiny_llm.stream("Once", params)
    (request,) = tiny_llm.engine.waiting
    texts = [tiny_llm.engine.output(request) and event.text for event in stream]
    assert "".join(texts) == expected.text


def test_streams_copy_no_output(random_llm, monkeypatch):
    """A token's cost does not grow with how many came before it."""
    expected = alone(random_llm)[0]
    monkeypatch.setattr(Sequence, "output", property(lambda self: pytest.fail("copied")))
    assert [event.token_id for event in random_llm.stream(PROMPTS[0], SAMPLED)] == expected


def test_who_leaves_the_line_passes_nobody(random_llm):
    """Thousands may be aborted together, or end with their deadline."""
    engine = random_llm.engine
    waiting = [engine.add(PROMPTS[i % 6], GREEDY, priority=i % 3)[0] for i in range(12)]

    class Line(list):
        __iter__ = __reversed__ = lambda self: pytest.fail("all were looked at")

    engine.waiting = Line(engine.waiting)
    for i in (5, 0, 11, 6):
        engine.abort(waiting[i])
    engine.waiting = list.copy(engine.waiting)
    assert {*engine.waiting} == {request for i, request in enumerate(waiting) if i not in (5, 0, 11, 6)}
    engine.finish(waiting)
    assert_released(random_llm)


def test_a_step_costs_no_more_for_those_who_wait(make_llm, monkeypatch):
    """Of a call of many prompts most have yet to begin, or have ended."""
    llm, asked = make_llm(engine={"max_num_seqs": 4}), []
    error = Request.error.fget
    monkeypatch.setattr(Request, "error", property(lambda self: asked.append(self) or error(self)))
    llm.generate([PROMPTS[0]] * 80, GREEDY)
    assert llm.engine.turns > 400 and len(asked) < 4 * 80
    assert_released(llm)


def test_who_begins_while_another_samples_has_all_threads():
    """torch.set_num_threads(1) would last for as long as they do: a server's, or those of a program's own tensors."""
    before, seen = torch.get_num_threads(), list[int]()
    torch.set_num_threads(3)
    try:
        with few_threads(torch.zeros(1, 8)):
            other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
            other.start()
            other.join()
            assert torch.get_num_threads() == 1
        assert (seen, torch.get_num_threads()) == ([3], 3)
    finally:
        torch.set_num_threads(before)


def test_sampled_company_is_harmless_to_threads_of_torch(random_llm):
    """In another thread torch may use another number of threads; the tokens are the same."""
    expected = [random_llm.generate([i], max_tokens=8, seed=i)[0].token_ids for i in range(8)]
    threads = torch.get_num_threads()
    calls = [lambda i=i: random_llm.generate([i], max_tokens=8, seed=i)[0].token_ids for i in range(8)]
    assert together(calls) == expected and torch.get_num_threads() == threads
