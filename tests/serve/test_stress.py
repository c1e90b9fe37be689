"""Everything at once, through a real server: each answer that ends is that of plain decoding, alone, on a cold cache.

Requests of all kinds arrive at random, some are cancelled at random moments, some cannot be; the pool is so small that
requests are preempted. Every method that `drafters.methods()` finds is put through it.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from typing import Any
from weakref import WeakKeyDictionary

import anyio
import httpx
import pytest

from outrider import LLM, drafters
from tests.helpers import assert_released
from tests.serve.conftest import frames_of
from tests.serve.test_api import regrouped
from tests.test_exactness import config_of
from tools.soak import LONGEST, MOST, alone, difference, mixed

COUNT = int(os.environ.get("OUTRIDER_STRESS", 24))  # requests for each method


_expected: WeakKeyDictionary[LLM, list[list[Any]]] = WeakKeyDictionary()


def expected_of(llm: LLM, bodies: list[dict[str, Any]]) -> list[list[Any]]:
    if llm not in _expected:
        llm.runner.prefixes = False
        _expected[llm] = [alone(llm, body) for body in bodies]
        llm.runner.prefixes = True
    return _expected[llm]


async def storm(url: str, bodies: list[dict[str, Any]], seed: int) -> list[list[dict[str, Any]] | None]:
    """The choices of each body that was answered; None for those that were cancelled."""
    some = random.Random(seed)
    plans = [
        (some.uniform(0, 1), some.random() < 0.5, some.uniform(0, 1) if some.random() < 0.2 else None) for _ in bodies
    ]

    async with httpx.AsyncClient(base_url=url, timeout=1800, limits=httpx.Limits(max_connections=None)) as client:

        async def one(body: dict[str, Any], plan: Any) -> list[dict[str, Any]] | None:
            after, stream, patience = plan
            await asyncio.sleep(after)
            try:
                with anyio.fail_after(patience):
                    answer = await client.post("/v1/completions", json={**body, "stream": stream})
            except TimeoutError:
                return None
            assert answer.status_code == 200, answer.text
            return regrouped(frames_of(answer.text)) if stream else answer.json()["choices"]

        async def bad() -> None:
            for wrong in ({"temperature": -1}, {"prompt": []}, {"prompt": [10**9]}, {"stop": [""]}, {"max_tokens": 0}):
                await asyncio.sleep(some.uniform(0, 0.3))
                answer = await client.post("/v1/completions", json={"prompt": [1], "max_tokens": 1, **wrong})
                assert answer.status_code == 400, answer.text

        found, _ = await asyncio.gather(asyncio.gather(*map(one, bodies, plans)), bad())
    return found


METHODS = [name if name == "ngram" else pytest.param(name, marks=pytest.mark.slow) for name in drafters.methods()]


@pytest.mark.parametrize("method", METHODS)
def test_every_answer_is_plain_decoding(tiny_llm, live, make_checkpoint, monkeypatch, method):
    pytest.importorskip("llguidance")
    bodies = mixed(tiny_llm, COUNT)
    expected = expected_of(tiny_llm, bodies)
    tiny_llm.speculative_config = config_of(method, "tiny", make_checkpoint, 4)
    engine = tiny_llm.engine
    monkeypatch.setattr(engine, "kv_memory", int(1.1 * engine._kv_bytes(LONGEST + MOST)))
    before = engine.preemptions, engine.prefix_hits
    found = asyncio.run(storm(live(), bodies, seed=len(method)))
    answered = 0
    for body, outputs, choices in zip(bodies, expected, found, strict=True):
        if choices is None:
            continue
        answered += 1
        about = json.dumps({k: v for k, v in body.items() if k != "prompt"}) + f" after {len(body['prompt'])} tokens"
        assert difference(outputs, choices) is None, about
    assert answered > COUNT / 2
    if method == "ngram":  # with others it depends on time, or the room for the longest one's drafts may be all others'
        assert engine.preemptions > before[0], "the pool was never full"
    assert engine.prefix_hits > before[1], "no prefix was found"
    assert engine.leaked == 0
    assert_released(tiny_llm)
