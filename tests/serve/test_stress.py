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

import httpx
import pytest

from outrider import LLM, drafters
from tests.helpers import assert_released
from tests.serve.conftest import frames_of
from tests.serve.test_api import regrouped
from tests.test_exactness import config_of

COUNT = int(os.environ.get("OUTRIDER_STRESS", 24))  # requests for each method
LONGEST, MOST = 300, 130  # tokens of a prompt, and of an output
GRAMMARS: list[dict[str, Any]] = [
    {"regex": "[a-z]{2,9}(, [a-z]{2,9}){1,4}[.]"},
    {"choice": ["yes, of course", "yes, perhaps", "no"]},
    {"json": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}, "old": {"type": "boolean"}},
              "required": ["name", "old"], "additionalProperties": False}},
]  # fmt: skip
FIELDS: list[dict[str, Any]] = [
    {"temperature": 0}, {"temperature": 0.7}, {"top_p": 0.8}, {"top_k": 7}, {"min_p": 0.1}, {"n": 3}, {"n": 2},
    {"repetition_penalty": 1.3}, {"presence_penalty": 1.5, "frequency_penalty": -0.5}, {"stop": [" the", "."]},
    {"logit_bias": {"300": 5.0, "301": -100}}, {"stop_token_ids": [262, 263]}, {"min_tokens": 5},
    {"logprobs": 2}, {"ignore_eos": True}, {"temperature": 0, "repetition_penalty": 1.1}, {"cache_salt": "mine"},
    {"priority": -1}, {"priority": 3}, {"speculative_config": False}, {"speculative_config": {"method": "none"}},
    {"skip_special_tokens": False}, *({"structured_outputs": grammar} for grammar in GRAMMARS),
]  # fmt: skip
NOT_SAMPLED = {"cache_salt", "priority", "speculative_config"}


def mixed(llm: LLM, count: int) -> list[dict[str, Any]]:
    """Bodies: prompts of 1 to LONGEST tokens, of which many begin alike."""
    some, vocab = random.Random(1), llm.runner.model.config.vocab_size
    text = llm.encode("Once upon a time there was a little girl named Lily. She had a red ball. " * 30)
    roots = [text[: some.randint(33, LONGEST // 2)] for _ in range(3)]
    bodies = []
    for i in range(count):
        prompt = some.choice([[], *roots]) + some.choice([text, [some.randrange(vocab) for _ in range(LONGEST)]])
        length = some.choice([1, 2, 31, 32, 33, 64, LONGEST, some.randint(1, LONGEST)])
        given = {
            "prompt": prompt[:length],
            "seed": i,
            "max_tokens": some.choice([1, 9, 40, MOST, MOST]),
            "return_token_ids": True,
        }
        for more in [FIELDS[i % len(FIELDS)], *some.sample(FIELDS, some.randrange(2))]:
            if not ("structured_outputs" in more and given.keys() & {"min_tokens", "stop", "ignore_eos"}):
                given |= more
        if given.get("temperature") == 0:
            given.pop("n", None)
        given["max_tokens"] = max(given["max_tokens"], given.get("min_tokens", 0))
        bodies.append(given)
    return bodies


def alone(llm: LLM, body: dict[str, Any]) -> list[Any]:
    """Plain decoding of a body, by itself."""
    given = {k: v for k, v in body.items() if k not in NOT_SAMPLED | {"prompt", "return_token_ids"}}
    if "logit_bias" in given:
        given["logit_bias"] = {int(token): bias for token, bias in given["logit_bias"].items()}
    return llm.generate(body["prompt"], **given)


_expected: dict[int, list[list[Any]]] = {}


def expected_of(llm: LLM, bodies: list[dict[str, Any]]) -> list[list[Any]]:
    if id(llm) not in _expected:
        llm.runner.prefixes = False
        _expected[id(llm)] = [alone(llm, body) for body in bodies]
        llm.runner.prefixes = True
    return _expected[id(llm)]


async def storm(url: str, bodies: list[dict[str, Any]], seed: int) -> list[list[dict[str, Any]] | None]:
    """The choices of each body that was answered; None for those that were cancelled."""
    some = random.Random(seed)
    plans = [
        (some.uniform(0, 1), some.random() < 0.5, some.uniform(0, 1) if some.random() < 0.2 else None) for _ in bodies
    ]

    async with httpx.AsyncClient(base_url=url, timeout=300, limits=httpx.Limits(max_connections=None)) as client:

        async def one(body: dict[str, Any], plan: Any) -> list[dict[str, Any]] | None:
            after, stream, patience = plan
            await asyncio.sleep(after)
            try:
                async with asyncio.timeout(patience):
                    answer = await client.post("/v1/completions", json={**body, "stream": stream})
            except TimeoutError:
                return None
            assert answer.status_code == 200, answer.text
            return regrouped(frames_of(answer.text)) if stream else answer.json()["choices"]

        async def bad() -> None:
            for wrong in (
                {"temperature": -1},
                {"prompt": []},
                {"prompt": [10**9]},
                {"stop": [""]},
                {"max_tokens": 0},
            ):
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
        for output, choice in zip(outputs, choices, strict=True):
            assert choice["token_ids"] == output.token_ids, about
            assert (choice["text"], choice["finish_reason"]) == (output.text, output.finish_reason), about
            assert choice["stop_reason"] == output.stop_reason, about
            if "logprobs" in body:
                assert choice["logprobs"]["token_logprobs"] == [p.logprob for p in output.logprobs], about
    assert answered > COUNT / 2
    if method == "ngram":  # with others it depends on time, or the room for the longest one's drafts may be all others'
        assert engine.preemptions > before[0], "the pool was never full"
    assert engine.prefix_hits > before[1], "no prefix was found"
    assert engine.leaked == 0
    assert_released(tiny_llm)
