"""Several engines behind one door: answers outlive their engine, requests that begin alike meet. Ray: test_ray.py."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest
from test_exactness import SAMPLINGS

from outrider import AsyncLLM, SamplingParams
from outrider.errors import EngineError, RequestError
from outrider.outputs import StepEvent
from outrider.serve.replicas import MOST, Lost, beginning, ranked, resumed

PROMPT = "Once upon a time there was a fox. Once upon a time"
ASKED = {
    "sampled": SamplingParams(temperature=0.9, seed=5, max_tokens=40),
    "greedy": SamplingParams(temperature=0, max_tokens=40),
    "two": SamplingParams(temperature=1.0, seed=6, max_tokens=30, n=2),
    "logprobs": SamplingParams(temperature=0.8, seed=7, max_tokens=24, logprobs=2),
    "stop": SamplingParams(temperature=0.7, seed=8, max_tokens=60, stop=[" the", "a l"]),
    "everything": replace(SAMPLINGS["everything"], logits_processors=None, max_tokens=30, stop_token_ids=None),
}


class Dying:
    """Engines that are lost after a few events, all but the last of them."""

    def __init__(self, llm: AsyncLLM, params: SamplingParams, lives: list[int]) -> None:
        self.llm, self.params, self.lives = llm, params, lives
        self.read: list[int] = []  # tokens that each engine was spared

    async def begin(self, begun: list[list[int]]):
        self.read.append(sum(map(len, begun)))
        answer = await self.llm.start([(self.llm.llm.encode(PROMPT), self.params)], begun=begun)
        events, life = 0, self.lives.pop(0) if self.lives else 10**6
        try:
            async for event in answer.events():
                if events >= life:
                    raise Lost
                events += 1
                yield event
        finally:
            answer.close()


async def whole(events) -> list[tuple]:
    """Per output: tokens, text, logprobs, how it ended, and the text of the whole output."""
    found: dict[int, list] = {}
    async for event in events:
        own = found.setdefault(event.index, [[], "", [], None, None])
        assert own[3] is None, "an event behind the last"
        own[0] += event.token_ids
        own[1] += event.text
        own[2] += event.logprobs or []
        if event.output is not None:
            own[3], own[4] = event.finish_reason, event.output.text
            assert event.output.token_ids == own[0] and event.output.text == own[1]
    return [tuple(found[i]) for i in sorted(found)]


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("lives", [[0], [1], [2, 0, 3], [7, 1]])
def test_an_answer_goes_on_at_another_engine(tiny_llm, asked, lives):
    """Whatever is asked for, and wherever engines are lost, each token comes once, and they are the very same."""

    async def main() -> None:
        async with AsyncLLM(tiny_llm) as llm:
            params = ASKED[asked]
            undisturbed = await whole(resumed(Dying(llm, params, []).begin, params.n))
            dying = Dying(llm, params, list(lives))
            assert await whole(resumed(dying.begin, params.n)) == undisturbed
            assert dying.read == sorted(dying.read)  # a slow reader gets many tokens in an event
            assert lives[0] or len(dying.read) > 1
            assert tiny_llm.engine.leaked == 0

    asyncio.run(main())


@pytest.mark.parametrize("method", [{"method": "ngram"}, "auto"])
def test_with_speculation(tiny_llm, method):
    """The engines may draft as they like."""

    async def main() -> None:
        async with AsyncLLM(tiny_llm) as llm:
            params = ASKED["sampled"]
            undisturbed = await whole(resumed(Dying(llm, params, []).begin, 1))
            await asyncio.sleep(0)
            llm.llm.speculative_config = method
            assert await whole(resumed(Dying(llm, params, [2, 2]).begin, 1)) == undisturbed

    asyncio.run(main())


def test_not_for_ever(tiny_llm):
    async def main() -> None:
        async with AsyncLLM(tiny_llm) as llm:
            with pytest.raises(EngineError, match=f"{MOST} engines have gone"):
                await whole(resumed(Dying(llm, ASKED["greedy"], [0] * 99).begin, 1))

    asyncio.run(main())


def test_own_errors_are_not_tried_again():
    begun = []

    async def begin(known):
        begun.append(known)
        raise RequestError("no")
        yield

    with pytest.raises(RequestError, match="no"):
        asyncio.run(whole(resumed(begin, 1)))
    assert len(begun) == 1


def test_an_engine_that_ends_early_is_lost():
    """Also where it says nothing of it: an answer never ends in the middle without a word."""
    begun = []

    async def begin(known):
        begun.append(known)
        yield StepEvent(0, [1, 2], ["x", "x"], [None, None])

    async def main() -> None:
        events = resumed(begin, 1)
        assert (await anext(events)).token_ids == [1, 2]
        with pytest.raises(EngineError, match=f"{MOST} engines have gone"):
            await anext(events)

    asyncio.run(main())
    assert begun == [[[]], *[[[1]]] * (MOST - 1)]


def test_another_model_is_found_out():
    """An engine that gives other tokens is none of ours: the answer ends with an error, not with a mixture."""
    lives = iter([[1, 2, 3], [1, 7, 3, 4]])

    async def begin(known):
        for token in next(lives):
            yield StepEvent(0, [token], ["x"], [None])
        raise Lost

    with pytest.raises(EngineError, match="cannot be resumed"):
        asyncio.run(whole(resumed(begin, 1)))


def test_same_beginning_same_engine():
    names = {f"engine {i}": 0 for i in range(4)}
    rng = random.Random(0)
    prompts = [[rng.randrange(1000) for _ in range(80)] for _ in range(64)]
    firsts = [ranked(beginning(prompt), names, 4)[0] for prompt in prompts]
    pairs = list(zip(prompts, firsts, strict=True))
    assert set(firsts) == set(names)  # spread
    assert all(ranked(beginning([*prompt[:70], 5]), names, 4)[0] == first for prompt, first in pairs)
    fewer = {name: 0 for name in names if name != "engine 2"}
    moved = [first for prompt, first in pairs if ranked(beginning(prompt), fewer, 4)[0] != first]
    assert set(moved) == {"engine 2"}  # only those of the one that has gone
    assert beginning([1, 2], "salt") != beginning([1, 2])


def test_imbalance_is_bounded():
    key = beginning([1, 2, 3])
    first, second, *_ = ranked(key, {"a": 0, "b": 0, "c": 0}, 2)
    assert ranked(key, {"a": 0, "b": 0, "c": 0, first: 2}, 2)[0] == first
    assert ranked(key, {"a": 0, "b": 0, "c": 0, first: 3}, 2)[0] == second
    assert ranked(key, {"a": 0, "b": 0, "c": 0, first: 3}, 2)[-1] == first  # still the last resort
    assert ranked(key, {}, 2) == []
