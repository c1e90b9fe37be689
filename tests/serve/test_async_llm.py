"""AsyncLLM: the tokens of LLM, from event loops; whoever leaves gives back what was held."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import signal
import threading
import time
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from outrider import LLM, AsyncLLM, SamplingParams
from outrider.async_llm import Answer, Progress
from outrider.engine import LONG, engine
from outrider.errors import ConfigError, EmptyPrompt, EngineError, QueueFull, RequestError, RequestTooLong
from outrider.outputs import StepEvent
from tests.helpers import assert_released

PROMPT = "Once upon a time there was a little girl who"


async def collect(llm: AsyncLLM, prompt: Any, **options: Any) -> dict[int, list[StepEvent]]:
    found: dict[int, list[StepEvent]] = {}
    async for event in llm.generate(prompt, **options):
        found.setdefault(event.index, []).append(event)
    return found


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def released(llm: LLM) -> None:
    """What was cancelled is taken away at the next step."""
    deadline = time.monotonic() + 10
    while llm.engine.running or llm.engine.waiting:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert_released(llm)


def test_events_are_the_output(tiny_llm):
    requests = [
        (PROMPT, {"max_tokens": 20, "temperature": 0}),
        (PROMPT, {"max_tokens": 30, "seed": 7, "stop": ["e", "th"]}),
        ([5, 9, 70, 80], {"max_tokens": 12, "seed": 3, "n": 3, "logprobs": 2}),
        (PROMPT, {"max_tokens": 12, "seed": 1, "stop_token_ids": list(range(300, 3000))}),
        (PROMPT, {"max_tokens": 12, "seed": 2, "stop": "a", "include_stop_str_in_output": True}),
    ]
    plain = [tiny_llm.generate(prompt, **options) for prompt, options in requests]
    tiny_llm.speculative_config = {"method": "ngram", "num_speculative_tokens": 3}
    llm = AsyncLLM(tiny_llm)

    async def all_at_once() -> list[dict[int, list[StepEvent]]]:
        return await asyncio.gather(*(collect(llm, prompt, **options) for prompt, options in requests))

    for outputs, events, (_, options) in zip(plain, run(all_at_once()), requests, strict=True):
        assert sorted(events) == list(range(len(outputs)))
        for i, output in enumerate(outputs):
            mine = events[i]
            assert [t for e in mine for t in e.token_ids] == output.token_ids == mine[-1].output.token_ids
            assert "".join(e.text for e in mine) == output.text == mine[-1].output.text
            assert len([by for e in mine for by in e.drafted_by]) == len(output.token_ids)
            assert len([text for e in mine for text in e.texts]) == len(output.token_ids)
            assert mine[-1].finish_reason == output.finish_reason and mine[-1].output.index == i
            assert mine[-1].output.stop_reason == output.stop_reason
            assert all(e.finish_reason is None and e.output is None for e in mine[:-1])
            if "logprobs" in options:
                assert [p for e in mine for p in e.logprobs or ()] == output.logprobs
            else:
                assert all(e.logprobs is None for e in mine)
    assert plain[1][0].stop_reason in ("e", "th") and plain[3][0].stop_reason == plain[3][0].token_ids[-1]
    assert plain[0][0].stop_reason is None
    llm.close()
    assert_released(tiny_llm)


def test_an_interval_joins_events(tiny_llm):
    """First tokens and ends come at once, all else waits; every step is told to who watches."""
    news: list[Progress] = []
    llm = AsyncLLM(tiny_llm, event_interval=3600, watch=news.extend)
    options = {"max_tokens": 40, "temperature": 0.7, "seed": 4, "ignore_eos": True}
    plain = tiny_llm.generate(PROMPT, n=3, **options)

    async def both() -> Any:
        return await asyncio.gather(collect(llm, PROMPT, n=3, **options), collect(llm, PROMPT, **options))

    many, one = run(both())
    for output, events in zip(plain, many.values(), strict=True):
        assert [t for e in events for t in e.token_ids] == output.token_ids == events[-1].output.token_ids
        assert "".join(e.text for e in events) == output.text
    assert len(one[0]) == 2 and len(one[0][0].token_ids) < 40
    assert sum(len(events) for events in many.values()) < 3 * 6
    assert sum(each.tokens for each in news) == 4 * 40
    assert [each.at for each in news] == sorted(each.at for each in news)
    assert 40 <= len({each.at for each in news}) < 160  # those of a step stand together, and all steps are told
    with pytest.raises(ConfigError, match="event_interval must be seconds from 0 to 3600, not -1"):
        AsyncLLM(tiny_llm, event_interval=-1)


def test_an_interval_grows_with_company(make_llm, monkeypatch):
    """Beside many others an answer's events come more seldom, by a clock that only the engine's thread turns."""
    ticks, shown, show = itertools.count(), [], Answer.show
    clock = SimpleNamespace(monotonic=time.monotonic, perf_counter=lambda: float(next(ticks)))  # twice a step
    monkeypatch.setattr("outrider.async_llm.time", clock)

    def counted(self: Answer, now: float) -> None:
        shown.append(self)
        show(self, now)

    monkeypatch.setattr(Answer, "show", counted)
    llm = AsyncLLM(make_llm(engine={"max_num_seqs": 32}), event_interval=6.0)

    def events(answers: int) -> float:
        shown.clear()
        options: dict[str, Any] = {"max_tokens": 48, "temperature": 0, "ignore_eos": True}

        async def together() -> Any:
            return await asyncio.gather(*(collect(llm, [5, 6, 7 + i], **options) for i in range(answers)))

        run(together())
        return len(shown) / answers

    few, many = events(1), events(32)
    assert 10 < few < 30
    assert many < 0.6 * few
    llm.close()


def test_events_of_many_come_together(make_llm, monkeypatch):
    """Whoever's turn comes soon is told along with who is due, and so from then on, wherever they began."""
    ticks, shown, show = itertools.count(), list[tuple[Answer, float]](), Answer.show
    clock = SimpleNamespace(monotonic=time.monotonic, perf_counter=lambda: float(next(ticks)))  # twice a step
    monkeypatch.setattr("outrider.async_llm.time", clock)
    monkeypatch.setattr(Answer, "show", lambda self, now: (shown.append((self, now)), show(self, now)))
    inner = make_llm()
    llm, step, steps = AsyncLLM(inner, event_interval=16.0), inner.engine.step_within, itertools.count()

    def waiting(*options: Any) -> Any:
        if (at := next(steps)) % 11 == 0 and at < 44:
            while len(inner.engine.running) + len(inner.engine.waiting) < 1 + at // 11:  # the next one comes now
                time.sleep(0.001)
        return step(*options)

    monkeypatch.setattr(inner.engine, "step_within", waiting)

    async def one_after_the_other() -> Any:
        answers = list[Any]()
        for i in range(4):
            answers.append(asyncio.ensure_future(collect(llm, [5, 6, 7 + i], max_tokens=200, ignore_eos=True)))
            while len({answer for answer, _ in shown}) <= i:
                await asyncio.sleep(0.001)
        return await asyncio.gather(*answers)

    run(one_after_the_other())
    own = [[now for who, now in shown if who is answer] for answer in {answer for answer, _ in shown}]
    all_there, one_ends = max(min(times) for times in own), min(max(times) for times in own)
    first, *then = [sorted(now for now in times if all_there < now < one_ends) for times in own]
    assert len(first) > 12 and all([times[-9:] == first[-9:] for times in then])
    llm.close()


def test_an_idle_engine_waits_for_who_is_on_the_way(make_llm, monkeypatch):
    """Requests that come together are begun together, though their prompts are added one after the other."""
    monkeypatch.setattr("outrider.async_llm.GATHER", 60)
    inner, add, began = make_llm(), AsyncLLM._add, threading.Event()
    step, seen = inner.engine.step_within, []

    def watched(*options: Any) -> Any:
        began.set()
        seen.append(len(inner.engine.waiting) + len(inner.engine.running))
        return step(*options)

    def slow(self: AsyncLLM, answer: Answer, prompts: Any, *more: Any) -> None:
        while len(self._answers) < 2:  # both are on their way
            time.sleep(0.001)
        if prompts[0][0] == [8, 9]:
            began.wait(0.2)  # for a step that must not come
        add(self, answer, prompts, *more)

    monkeypatch.setattr(inner.engine, "step_within", watched)
    monkeypatch.setattr(AsyncLLM, "_add", slow)
    llm = AsyncLLM(inner)

    async def both() -> None:
        params = SamplingParams(max_tokens=4, temperature=0)
        for answer in await asyncio.gather(*(llm.start([(p, params)]) for p in ([5, 6], [8, 9]))):
            assert [event async for event in answer.events()]

    run(both())
    assert seen[0] == 2
    llm.close()


def test_conversations_and_k(tiny_llm):
    tiny_llm.speculative_config = {"method": "ngram", "num_speculative_tokens": 3}
    llm = AsyncLLM(tiny_llm)
    messages = [{"role": "user", "content": "Tell me about the sea, the sea and the sea."}]
    expected = tiny_llm.chat(messages, max_tokens=24, temperature=0)
    events = run(collect(llm, messages, max_tokens=24, temperature=0, k=0))[0]
    assert events[-1].output.token_ids == expected.token_ids
    assert events[-1].output.metrics["speculative_decoding"]["num_draft_tokens"] == 0
    llm.close()


def test_errors_come_before_anything_runs(tiny_llm):
    llm = AsyncLLM(tiny_llm)
    for prompt, options, kind in [
        ("", {}, EmptyPrompt),
        ([], {}, EmptyPrompt),
        ([10**9], {}, RequestError),
        ("x", {"max_tokens": 10**9}, RequestTooLong),
        ("x", {"temprature": 1}, ConfigError),
        ("x", {"temperature": -1}, ConfigError),
        ("x", {"k": -1}, ConfigError),
        ("x", {"chat_template": "{{ 1 }}"}, ConfigError),
        ("x", {"sampling_params": SamplingParams(), "n": 2}, ConfigError),
        (3.5, {}, ConfigError),
    ]:
        with pytest.raises(kind):
            run(collect(llm, prompt, **options))
    with pytest.raises(ConfigError, match="belongs to the LLM"):
        AsyncLLM(tiny_llm, dtype="float32")
    assert_released(tiny_llm)
    llm.close()


def test_an_error_under_way_ends_that_one(tiny_llm):
    llm = AsyncLLM(tiny_llm)

    def fails(tokens, logits):
        if len(tokens) > 20:
            raise ValueError("no more")
        return logits

    async def both() -> list[Any]:
        bad = collect(llm, PROMPT, max_tokens=40, ignore_eos=True, logits_processors=[fails])
        return await asyncio.gather(bad, collect(llm, PROMPT, max_tokens=40, seed=4), return_exceptions=True)

    error, good = run(both())
    assert isinstance(error, RequestError) and "no more" in str(error)
    assert good[0][-1].output.token_ids == tiny_llm.generate(PROMPT, max_tokens=40, seed=4)[0].token_ids
    llm.close()


def test_tokens_come_before_the_error_that_ends_them(tiny_llm):
    """Also those that are handed over along with it."""
    llm = AsyncLLM(tiny_llm, event_interval=3600)
    found: list[int] = []

    def fails(tokens, logits):
        if len(tokens) == 21:
            raise ValueError("no more")
        return logits

    async def read(**sampling: Any) -> None:
        async for event in llm.generate(PROMPT, max_tokens=40, seed=1, **sampling):
            assert event.finish_reason is None and event.output is None
            found.extend(event.token_ids)

    with pytest.raises(RequestError, match="no more"):
        run(read(logits_processors=[fails]))
    whole = tiny_llm.generate(PROMPT, max_tokens=40, seed=1)[0]
    assert found == whole.token_ids[: len(found)] and len(found) == 21 - len(whole.prompt_token_ids)
    llm.close()


def test_several_prompts_are_one_answer(tiny_llm):
    """Outputs are counted through, and each goes on with what was begun of its own; if one is refused, all are."""
    prompts = [([5, 6], SamplingParams(max_tokens=9, seed=1, n=2, ignore_eos=True, logprobs=0))]
    prompts.append(([8, 9], SamplingParams(max_tokens=9, seed=3, ignore_eos=True)))
    plain = [output.token_ids for prompt, params in prompts for output in tiny_llm.generate(prompt, params)]
    llm = AsyncLLM(tiny_llm)

    async def outputs(begun: list[list[int]] | None) -> dict[int, list[int]]:
        answer = await llm.start(prompts, begun=begun)
        return {event.output.index: event.output.token_ids async for event in answer.events() if event.output}

    for begun in (None, [tokens[:4] for tokens in plain]):
        assert run(outputs(begun)) == dict(enumerate(plain))
    with pytest.raises(EmptyPrompt):
        run(llm.start([*prompts, ([], SamplingParams())]))
    released(tiny_llm)
    llm.close()


def test_who_is_cancelled_while_it_is_queued_runs_not(tiny_llm, monkeypatch):
    """The thread that queues it cannot be stopped: what it has queued is taken back."""
    real, queued, left = tiny_llm.engine.add, [], threading.Event()

    def add(*args: Any, **options: Any) -> list[Any]:
        queued.extend(real(*args, **options))
        assert left.wait(10)
        return queued

    async def cancel() -> None:
        monkeypatch.setattr(tiny_llm.engine, "add", add)
        task = asyncio.ensure_future(llm.start([([5, 6], SamplingParams(max_tokens=2000, ignore_eos=True))]))
        while not queued:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        left.set()
        while not queued[0].finished:
            await asyncio.sleep(0.001)

    llm = AsyncLLM(tiny_llm)
    run(cancel())
    assert queued[0].seq.finish_reason == "abort"
    released(tiny_llm)
    llm.close()


def test_leaving_and_cancelling_give_all_back(tiny_llm):
    llm = AsyncLLM(tiny_llm)

    async def leave() -> None:
        async for _ in llm.generate(PROMPT, max_tokens=2000, n=3, seed=1, ignore_eos=True):
            break

    async def cancel() -> None:
        tasks = [
            asyncio.ensure_future(collect(llm, PROMPT, max_tokens=2000, seed=i, ignore_eos=True)) for i in range(6)
        ]
        for i, task in enumerate(tasks):
            await asyncio.sleep(0.004 * i)  # in the tokenizer, in the queue, under way
            task.cancel()
        assert all(isinstance(e, asyncio.CancelledError) for e in await asyncio.gather(*tasks, return_exceptions=True))

    run(leave())
    released(tiny_llm)
    run(cancel())
    released(tiny_llm)
    deadline = time.monotonic() + 10
    while llm.stalled:  # the engine's thread tells after the step that nobody is left
        assert time.monotonic() < deadline
        time.sleep(0.01)
    llm.close()


def test_who_leaves_between_two_steps_is_counted(tiny_llm, monkeypatch):
    """`watch` is told of that end, too: by it /metrics counts what was aborted."""
    told: list[Progress] = []
    llm = AsyncLLM(tiny_llm, watch=told.extend)
    hand_over = llm._hand_over

    async def leave() -> None:
        answer = await llm.start([(tiny_llm.encode(PROMPT), SamplingParams(max_tokens=2000, ignore_eos=True))])

        def leaving(answers: list[Answer], began: float) -> None:
            hand_over(answers, began)
            answer.close()

        monkeypatch.setattr(llm, "_hand_over", leaving)
        deadline = time.monotonic() + 10
        while not any(news.finished for news in told):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)

    run(leave())
    released(tiny_llm)
    llm.close()


@pytest.mark.parametrize("name", ["max_queued_requests", "max_queued_tokens"])
@pytest.mark.parametrize("bound", [-1, "x", 1.5, True])
def test_bounds_of_the_queue_that_cannot_be(tiny_llm, name, bound):
    with pytest.raises(ConfigError, match=f"{name} must be a whole number of at least 0, or None"):
        AsyncLLM(tiny_llm, **{name: bound})


def test_a_thread_that_is_gone_is_replaced(random_llm):
    """As in a forked process, which has the object and none of the threads."""
    llm = AsyncLLM(random_llm)
    llm._thread = threading.Thread(target=int)
    llm._thread.start()
    llm._thread.join()
    assert run(collect(llm, [1, 2], max_tokens=2))[0]
    llm.close()


def test_a_loop_that_is_left_before_its_news_are_told_is_not_kept(random_llm):
    llm, loop = AsyncLLM(random_llm), asyncio.new_event_loop()
    answer, kept = Answer(llm, loop), weakref.ref(loop)
    answer.take(random_llm.engine.add([1, 2], SamplingParams(max_tokens=9)))
    llm._hand_over([answer], time.perf_counter())
    answer.close()
    loop.close()
    del answer, loop
    gc.collect()
    assert kept() is None
    llm.close()
    released(random_llm)


def test_a_full_queue_refuses(tiny_llm):
    llm = AsyncLLM(tiny_llm, max_queued_requests=2)
    room = tiny_llm.engine_config.max_num_seqs + 2

    async def flood() -> list[Any]:
        calls = (collect(llm, PROMPT, max_tokens=8, seed=i) for i in range(room + 5))
        return await asyncio.gather(*calls, return_exceptions=True)

    answers = run(flood())
    refused = [a for a in answers if isinstance(a, QueueFull)]
    assert len(refused) == 5 and all("try again" in str(a) for a in refused)
    assert run(collect(llm, PROMPT, max_tokens=4))[0]

    async def beside() -> list[Any]:
        calls = (collect(llm, PROMPT, max_tokens=8, seed=1, n=n) for n in (1, room, 1))
        return await asyncio.gather(*calls, return_exceptions=True)

    first, large, late = run(beside())
    assert first and {*large} == {*range(room)}, "not all are taken: it is not to starve"
    assert isinstance(late, QueueFull) and f"{room + 1} outputs are running or waiting" in str(late)
    llm.close()

    tight = AsyncLLM(tiny_llm, max_queued_tokens=30)
    assert len(run(collect(tight, "word " * 100, max_tokens=2))) == 1  # a queue that is empty takes anything
    tight.close()


def test_prompts_that_are_being_read_have_a_place_in_the_queue(tiny_llm, monkeypatch):
    read, until = tiny_llm.read, threading.Event()

    def slow(*args: Any, **how: Any) -> Any:
        assert until.wait(60)
        return read(*args, **how)

    monkeypatch.setattr(tiny_llm, "read", slow)
    llm, room = AsyncLLM(tiny_llm, max_queued_requests=2), tiny_llm.engine_config.max_num_seqs + 2

    async def flood() -> list[Any]:
        calls = [asyncio.ensure_future(collect(llm, PROMPT, max_tokens=4, seed=i)) for i in range(room + 5)]
        done, _ = await asyncio.wait(calls, timeout=60, return_when=asyncio.FIRST_EXCEPTION)
        assert 0 < len(done) <= 5 and not until.is_set()
        until.set()
        return await asyncio.gather(*calls, return_exceptions=True)

    assert sum(isinstance(answer, QueueFull) for answer in run(flood())) == 5
    assert run(collect(llm, PROMPT, max_tokens=4, n=room))[0], "all have given their places back"
    llm.close()


def test_grammars_that_take_long_hold_nobody_up(tiny_llm, monkeypatch):
    """More of them than there are threads to tokenize in."""
    make, until = engine.read, threading.Event()

    def slow(*args: Any) -> Any:
        assert until.wait(60)
        return make(*args)

    monkeypatch.setattr(engine, "read", slow)
    llm = AsyncLLM(tiny_llm)

    async def scenario() -> list[Any]:
        asked = {"structured_outputs": {"regex": "[a-z]{9}"}, "max_tokens": 2}
        hard = [asyncio.ensure_future(collect(llm, PROMPT, **asked)) for _ in range(40)]
        await asyncio.sleep(0)
        try:
            return await asyncio.wait_for(collect(llm, PROMPT, max_tokens=2), 50)
        finally:
            until.set()
            await asyncio.gather(*hard)

    assert run(scenario())
    llm.close()


def test_a_forked_process_makes_grammars_of_its_own(tiny_llm):
    llm, asked = AsyncLLM(tiny_llm), {"structured_outputs": {"regex": "[a-z]{3}"}, "temperature": 0, "max_tokens": 8}
    (events,) = run(collect(llm, PROMPT, **asked)).values()
    released(tiny_llm)
    if not (child := os.fork()):
        same = False
        try:
            signal.alarm(30)
            (again,) = run(collect(llm, PROMPT, **asked)).values()
            same = again[-1].output.token_ids == events[-1].output.token_ids
        finally:
            os._exit(not same)
    assert os.waitpid(child, 0)[1] == 0
    llm.close()


def test_nobody_waits_for_a_long_text_of_another(tiny_llm, monkeypatch):
    """However many there are, wherever in a request they stand, and whoever else waits for them."""
    real, may = tiny_llm.tokenizer, threading.Event()

    class Slow:
        def __call__(self, text: str, **options: Any) -> Any:
            if len(text) > LONG:
                may.wait(30)
            return real(text[:40] if len(text) > LONG else text, **options)

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    short, long = {"max_tokens": 3, "temperature": 0}, "word " * (LONG // 5 + 1)

    async def main() -> None:
        async with AsyncLLM(tiny_llm) as llm:
            expected = await collect(llm, PROMPT, **short)
            monkeypatch.setattr(tiny_llm, "tokenizer", Slow())
            monkeypatch.setattr(tiny_llm.engine, "tokenizer", tiny_llm.tokenizer)
            said = [[{"role": "user", "content": long}], long]
            others = [asyncio.ensure_future(collect(llm, prompt, **short)) for prompt in said * 4]
            others += [asyncio.ensure_future(collect(llm, PROMPT, prediction=long, **short)) for _ in range(4)]
            again = await asyncio.wait_for(collect(llm, PROMPT, **short), 20)
            assert again[0][-1].output.token_ids == expected[0][-1].output.token_ids
            grammar = {"structured_outputs": {"regex": "[a-z]{3}"}}
            assert await asyncio.wait_for(collect(llm, PROMPT, **short, **grammar), 20)
            may.set()
            assert all([one[0][-1].output.finish_reason == "length" for one in await asyncio.gather(*others)])

    tiny_llm.speculative_config = {"method": "ngram"}  # who drafts nothing does not read what is expected
    run(main())


def test_what_another_thread_brings_is_told_before_the_next_step(make_llm, monkeypatch):
    """An LLM's own caller may step for all: nobody's tokens wait for one step more."""
    inner, log = make_llm(), list[str]()
    advance, note = inner.engine._advance, Answer.note

    def stepped() -> Any:
        own = threading.current_thread().name == "outrider-engine"
        log.extend(["ours"] * own)
        try:
            return advance()
        finally:
            log.extend(["another's"] * (not own))

    monkeypatch.setattr(inner.engine, "_advance", stepped)
    monkeypatch.setattr(Answer, "note", lambda self, now: (log.append("note"), note(self, now))[1])
    llm = AsyncLLM(inner)

    async def main() -> None:
        asked = asyncio.ensure_future(collect(llm, [5, 6, 7], max_tokens=150, ignore_eos=True))
        while "ours" not in log:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(lambda: [inner.engine.step() for _ in range(40)])
        await asked

    run(main())
    assert log.count("another's") == 40 and "note" in log[: len(log) // 2]
    assert ("another's", "ours") not in itertools.pairwise(log)
    llm.close()


def test_closing_leaves_no_threads(tiny_llm, monkeypatch):
    """Nor those that make grammars; who comes meanwhile hears that it is closed."""
    asked = {"structured_outputs": {"regex": "[a-z]{3}"}, "temperature": 0, "max_tokens": 8}
    before = set(threading.enumerate())

    async def main() -> None:
        async with AsyncLLM(tiny_llm) as llm:
            assert [event async for event in llm.generate(PROMPT, **asked)]
        monkeypatch.setattr(llm, "_check_room", lambda weight: None)  # it had passed before the end
        with pytest.raises(EngineError, match="closed"):
            await collect(llm, PROMPT, **asked)
        deadline = time.monotonic() + 10
        while left := [t for t in set(threading.enumerate()) - before if not t.name.startswith("asyncio_")]:
            assert time.monotonic() < deadline, left
            await asyncio.sleep(0.01)

    run(main())


@pytest.mark.parametrize("name", ["asyncio_", "outrider-engine"])
def test_threads_that_cannot_be_started(tiny_llm, monkeypatch, name):
    """For want of processes (`ulimit -u`): who asks hears so, and later ones are answered."""
    start = threading.Thread.start

    def fail(thread: threading.Thread) -> None:
        if thread.name.startswith(name):
            raise RuntimeError("can't start new thread")
        start(thread)

    async def main() -> None:
        async with AsyncLLM(tiny_llm) as llm:
            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", fail)
                with pytest.raises(EngineError, match="no request can be taken now: can't start new thread"):
                    await collect(llm, PROMPT)
            assert (await collect(llm, PROMPT, max_tokens=4))[0][-1].output is not None

    run(main())
    released(tiny_llm)


def test_closing_drains_or_ends(tiny_llm):
    async def scenario(drain: float) -> Any:
        llm = AsyncLLM(tiny_llm)
        tokens = 20 if drain else 3000
        call = asyncio.ensure_future(collect(llm, PROMPT, max_tokens=tokens, seed=1, ignore_eos=True))
        while not tiny_llm.engine.running and not call.done():  # it may be over before this thread looks again
            await asyncio.sleep(0.001)
        await llm.aclose(drain)
        with pytest.raises(EngineError, match="closed"):
            await collect(llm, PROMPT)
        return (await asyncio.gather(call, return_exceptions=True))[0]

    assert len(run(scenario(30.0))[0][-1].output.token_ids) == 20
    ended = run(scenario(0.0))
    assert isinstance(ended, EngineError) and "before the answer was complete" in str(ended)
    released(tiny_llm)


def test_beside_the_callers_of_the_llm(tiny_llm):
    """Both step the one engine; each has its own tokens."""
    llm = AsyncLLM(tiny_llm)
    expected = [tiny_llm.generate(PROMPT, max_tokens=30, seed=i)[0].token_ids for i in range(6)]
    found: dict[int, list[int]] = {}

    def caller(i: int) -> None:
        found[i] = tiny_llm.generate(PROMPT, max_tokens=30, seed=i)[0].token_ids

    threads = [threading.Thread(target=caller, args=(i,)) for i in range(3)]

    async def asynchronous() -> None:
        for thread in threads:
            thread.start()
        answers = await asyncio.gather(*(collect(llm, PROMPT, max_tokens=30, seed=i) for i in range(3, 6)))
        found.update({i: a[0][-1].output.token_ids for i, a in enumerate(answers, 3)})

    run(asynchronous())
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(6)] == expected
    llm.close()


def test_an_end_between_two_looks_is_handed_over(tiny_llm, monkeypatch):
    """Others may step at any moment, and end what was just noted as running."""
    due = Answer.due

    def others_step(self: Answer, before: float) -> bool:
        waits = due(self, before)
        tiny_llm.engine.drive(lambda: all(request.finished for request in self.requests))
        return waits

    monkeypatch.setattr(Answer, "due", others_step)
    llm = AsyncLLM(tiny_llm)
    events = run(collect(llm, PROMPT, max_tokens=30, seed=1))
    assert events[0][-1].output.token_ids == tiny_llm.generate(PROMPT, max_tokens=30, seed=1)[0].token_ids
    llm.close()


def test_who_waits_is_not_looked_at_each_step(make_llm, monkeypatch):
    inner, noted, note = make_llm(engine={"max_num_seqs": 2}), list[Answer](), Answer.note
    monkeypatch.setattr(Answer, "note", lambda self, now: noted.append(self) or note(self, now))
    llm = AsyncLLM(inner)

    async def many() -> None:
        await asyncio.gather(*(collect(llm, [i, 1, 2], max_tokens=50, ignore_eos=True) for i in range(40)))

    run(many())
    assert inner.engine.turns > 20 * 50 and len(noted) < 3 * 40 * 50  # a look for each token, and few more
    llm.close()
    assert_released(inner)


def test_a_slow_reader_holds_nobody_up(tiny_llm, monkeypatch):
    """What it missed comes in one event; news are told once a step, whatever is read."""
    seen: list[Progress] = []
    llm, step, events = AsyncLLM(tiny_llm, watch=seen.extend), tiny_llm.engine.step_within, list[StepEvent]()

    def waiting(*options: Any) -> Any:
        while any(request.ready for request in tiny_llm.engine.running) and not events:  # the first token is being read
            time.sleep(0.001)
        return step(*options)

    monkeypatch.setattr(tiny_llm.engine, "step_within", waiting)

    async def slow() -> None:
        async for event in llm.generate(PROMPT, max_tokens=60, seed=1, ignore_eos=True):
            events.append(event)
            if len(events) == 1:
                while not seen or not seen[-1].finished:
                    await asyncio.sleep(0.01)

    run(slow())
    assert len(events) == 2 and len(events[1].token_ids) >= 58
    assert sum(p.tokens for p in seen) == 60 and sum(p.finished for p in seen) == 1
    assert len(seen) > 50  # plainly decoded: a token a step
    llm.close()


def test_a_broken_engine_lets_nobody_wait(tiny_llm, monkeypatch):
    llm = AsyncLLM(tiny_llm)

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(tiny_llm.engine, "step_within", broken)
        with pytest.raises(EngineError, match="a bug"):
            run(collect(llm, PROMPT, max_tokens=5))
    assert len(run(collect(llm, PROMPT, max_tokens=5))) == 1
    released(tiny_llm)
    llm.close()


class PanicException(BaseException):
    """As those of `tokenizers` and llguidance, which are written in Rust."""


@pytest.mark.parametrize(
    "panic",
    [PanicException("index out of bounds"), SystemExit(3), GeneratorExit("early"), asyncio.CancelledError("another's"),
     KeyboardInterrupt("the thread")],
)  # fmt: skip
def test_what_is_no_exception_lets_nobody_wait(tiny_llm, panic):
    """It ends its own request, an interrupt, which would end the thread, all of them; the next are served."""
    llm = AsyncLLM(tiny_llm)

    def panics(tokens, logits):
        while len([answer for answer in llm._answers if answer.requests]) < 2:  # the other one is on its way
            time.sleep(0.001)
        if len(tokens) > 12:
            raise panic
        return logits

    async def both() -> list[Any]:
        bad = collect(llm, PROMPT, max_tokens=40, seed=4, logits_processors=[panics])
        other = collect(llm, PROMPT, max_tokens=40, seed=4)
        return await asyncio.wait_for(asyncio.gather(bad, other, return_exceptions=True), 60)

    error, other = run(both())
    interrupt = isinstance(panic, KeyboardInterrupt)
    assert isinstance(error, EngineError if interrupt else RequestError) and str(panic) in str(error)
    if not interrupt:
        assert other[0][-1].output.token_ids == tiny_llm.generate(PROMPT, max_tokens=40, seed=4)[0].token_ids
    else:
        assert isinstance(other, EngineError)
    assert len(run(collect(llm, PROMPT, max_tokens=5))) == 1
    released(tiny_llm)
    llm.close()


def test_several_loops(tiny_llm):
    llm = AsyncLLM(tiny_llm)
    expected = [tiny_llm.generate(PROMPT, max_tokens=20, seed=i)[0].token_ids for i in range(4)]
    found: dict[int, list[int]] = {}

    def loop(i: int) -> None:
        found[i] = run(collect(llm, PROMPT, max_tokens=20, seed=i))[0][-1].output.token_ids

    threads = [threading.Thread(target=loop, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(4)] == expected
    llm.close()
