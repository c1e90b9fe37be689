"""The routes, field by field: what comes back is what the engine alone gives, in OpenAI's shapes."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from outrider import LLM
from outrider.errors import ConfigError, EngineError
from outrider.outputs import Logprob, StepEvent
from outrider.serve import answers, responses
from outrider.serve.http import dumps
from outrider.serve.protocol import CompletionBody
from outrider.serve.settings import generation_defaults
from outrider.serve.vocabulary import Vocabulary
from tests.serve.conftest import Client, fail

PROMPT = "Once upon a time there was a little girl who"
TALK = [{"role": "user", "content": "Tell me of the sea, the sea."}]

# What a body says, and what that means to LLM.generate: every field of sampling at least once.
MIXED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0}, {}),
    ({"temperature": 0, "max_tokens": 1}, {}),
    ({"temperature": 0.7, "seed": 1}, {}),
    ({"seed": 2, "top_p": 0.8}, {}),
    ({"seed": 3, "top_k": 5}, {}),
    ({"seed": 4, "min_p": 0.1}, {}),
    ({"seed": 5, "repetition_penalty": 1.3}, {}),
    ({"seed": 6, "presence_penalty": 1.5, "frequency_penalty": -0.5}, {}),
    ({"seed": 7, "logit_bias": {"300": 5.0, "301": -100, "302": 1000}}, {"logit_bias": {300: 5, 301: -100, 302: 100}}),
    ({"seed": 8, "n": 3}, {}),
    ({"seed": 9, "stop": "a"}, {}),
    ({"seed": 10, "stop": ["the", "e "], "include_stop_str_in_output": True}, {}),
    ({"seed": 11, "stop_token_ids": list(range(300, 2000))}, {}),
    ({"seed": 12, "ignore_eos": True, "max_tokens": 60}, {}),
    ({"seed": 13, "min_tokens": 20, "max_tokens": 30, "stop": "e"}, {}),
    ({"seed": 14, "logprobs": 3}, {}),
    ({"seed": 15, "logprobs": 0, "temperature": 0.5}, {}),
    ({"seed": 16, "skip_special_tokens": False, "ignore_eos": True}, {}),
    ({"seed": -5}, {}),
    ({"seed": 17, "bad_words": ["the", "girl", "named Lily"]}, {}),
    ({"seed": 18, "allowed_token_ids": list(range(200, 700)), "n": 2}, {}),
    ({"seed": 19, "prompt_logprobs": 2, "logprobs": 1, "session_id": "s"}, {}),
    ({"seed": 20, "use_beam_search": False, "early_stopping": False, "length_penalty": 1, "vllm_xargs": {}}, {}),
    ({"temperature": 0, "repetition_penalty": 1.2, "top_k": -1, "n": None, "stop": None, "user": "me"}, {}),
]
OPTIONS = {"n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"}
OPTIONS |= {"logit_bias", "seed", "max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "logprobs"}
OPTIONS |= {"include_stop_str_in_output", "skip_special_tokens", "bad_words", "allowed_token_ids", "prompt_logprobs"}


def plainly(llm: LLM, body: dict[str, Any], other: dict[str, Any]) -> Any:
    given = {key: value for key, value in body.items() if key in OPTIONS and value is not None}
    return llm.generate(PROMPT, **({"max_tokens": 16} | given | other))


@pytest.mark.parametrize("stream", [False, True])
def test_all_fields_at_once_are_plain_decoding_alone(tiny_llm, stream):
    expected = [plainly(tiny_llm, body, other) for body, other in MIXED]
    tiny_llm.speculative_config = {"method": "ngram", "num_speculative_tokens": 4}
    client = Client(tiny_llm)
    bodies = [{"prompt": PROMPT, "return_token_ids": True, **body} for body, _ in MIXED]
    if stream:
        from tests.serve.conftest import frames_of

        answers = client.send(*(("POST", "/v1/completions", {"json": {**b, "stream": True}}) for b in bodies))
        found = [regrouped(frames_of(answer.text)) for answer in answers]
    else:
        found = [answer["choices"] for answer in client.complete(*bodies)]
    for (body, _), outputs, choices in zip(MIXED, expected, found, strict=True):
        assert [c["index"] for c in choices] == list(range(len(outputs))), body
        for output, choice in zip(outputs, choices, strict=True):
            assert choice["token_ids"] == output.token_ids, body
            assert choice["text"] == output.text, body
            assert choice["finish_reason"] == output.finish_reason, body
            assert choice["stop_reason"] == output.stop_reason, body
            assert len(choice["drafted_by"]) == len(choice["token_texts"]) == len(output.token_ids)
            assert "".join(choice["token_texts"]) == output.text
            if "prompt_logprobs" in body and not stream:
                assert choice["prompt_logprobs"] == shown(tiny_llm, output.prompt_logprobs)
            if "logprobs" in body:
                assert choice["logprobs"]["token_logprobs"] == [p.logprob for p in output.logprobs]
            else:
                assert choice["logprobs"] is None
    assert any(by == "ngram" for choices in found for c in choices for by in c["drafted_by"])
    client.llm.close()


def shown(llm: LLM, given: Any) -> list[Any]:
    """vLLM's shape of prompt_logprobs."""

    def one(each: Any) -> dict[str, Any]:
        ranks = {token: rank for rank, token in enumerate(each.top, 1)} | {each.token_id: each.rank}
        values = each.top | {each.token_id: each.logprob}
        return {
            str(token): {"logprob": values[token], "rank": ranks[token], "decoded_token": llm.tokenizer.decode([token])}
            for token in values
        }

    first, *rest = given
    assert first is None
    return [None, *map(one, rest)]


def regrouped(frames: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Choices of a completion's frames, put together."""
    found: dict[int, dict[str, Any]] = {}
    for frame in frames:
        assert "error" not in frame, frame
        for choice in frame["choices"]:
            whole = found.setdefault(choice["index"], {"index": choice["index"], "text": "", "logprobs": None})
            assert "finish_reason" not in whole or whole["finish_reason"] is None
            whole["text"] += choice["text"]
            for key in ("token_ids", "drafted_by", "token_texts"):
                whole[key] = whole.get(key, []) + choice.get(key, [])
            if choice["logprobs"] is not None:
                mine = whole["logprobs"] = whole["logprobs"] or {key: [] for key in choice["logprobs"]}
                for key, values in choice["logprobs"].items():
                    mine[key] += values
            whole |= {key: choice[key] for key in ("finish_reason", "stop_reason")}
    return [found[i] for i in sorted(found)]


def test_shape_of_a_completion(client):
    answer = client.complete({"model": "alias", "prompt": PROMPT, "max_tokens": 5, "temperature": 0, "logprobs": 2})[0]
    Completion.model_validate(answer, strict=True)
    assert answer["object"] == "text_completion" and answer["id"].startswith("cmpl-") and answer["model"] == "tiny"
    usage = answer["usage"]
    assert usage["completion_tokens"] == 5 and usage["total_tokens"] == usage["prompt_tokens"] + 5
    logprobs = answer["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == answer["choices"][0]["text"]
    assert logprobs["text_offset"] == [len("".join(logprobs["tokens"][:i])) for i in range(5)]
    assert all(
        len(top) in (2, 3) and token in top
        for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True)
    )


def test_shape_of_a_chat(client, tiny_llm):
    body = {"messages": TALK, "max_tokens": 6, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    answer = client.chat(body)[0]
    ChatCompletion.model_validate(answer, strict=True)
    expected = tiny_llm.chat(TALK, max_tokens=6, temperature=0)
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "refusal": None, "content": expected.text}
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    content = choice["logprobs"]["content"]
    spelt = [token for token in content if not token["token"].startswith("<|")]
    assert b"".join(bytes(token["bytes"]) for token in spelt).decode() == expected.text
    assert all(len(token["top_logprobs"]) == 2 for token in content)
    assert (
        client.chat({"messages": TALK, "max_tokens": 6, "logprobs": True})[0]["choices"][0]["logprobs"]["content"][0][
            "top_logprobs"
        ]
        == []
    )


def test_a_predicted_output(tiny_llm):
    """OpenAI's field: the same answer in fewer steps, of which the usage tells."""
    tiny_llm.speculative_config = {"method": "suffix"}
    client = Client(tiny_llm)
    body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    plain = client.complete({**body, "speculative_config": False})[0]
    text = plain["choices"][0]["text"]
    halves = [{"type": "text", "text": text[:40]}, {"type": "text", "text": text[40:]}]
    for prediction in ("Something else.", {"type": "content", "content": text}, {"type": "content", "content": halves}):
        answer = client.complete({**body, "prediction": prediction})[0]
        Completion.model_validate(answer, strict=True)
        assert answer["choices"][0]["text"] == text
        details, spec = answer["usage"]["completion_tokens_details"], answer["metrics"]["speculative_decoding"]
        assert details["accepted_prediction_tokens"] == spec["num_accepted_draft_tokens"]
        assert sum(details.values()) == spec["num_draft_tokens"]
    assert details["accepted_prediction_tokens"] > 30 and "completion_tokens_details" not in plain["usage"]
    assert client.chat({"messages": TALK, "prediction": {"type": "content", "content": "take"}})[0]["choices"]
    client.llm.close()


def test_what_became_of_a_prediction_is_in_the_output(tiny_llm):
    """Behind --replicas the engine's own requests are in another process."""
    tiny_llm.speculative_config = {"method": "suffix"}
    text = tiny_llm.generate(PROMPT, max_tokens=40, temperature=0)[0].text
    output = tiny_llm.generate(PROMPT, max_tokens=40, temperature=0, prediction=text)[0]
    far = SimpleNamespace(requests=[SimpleNamespace(cached=0, prompt_logprobs=None)])  # as FarAnswer's
    body = CompletionBody(prompt=PROMPT, prediction=text)
    reply = answers.Completion(answers.Job(body, far, {}, None, [output.prompt_token_ids], {}, fail), None)
    reply.outputs = [output]
    details, spec = reply.usage(40)["completion_tokens_details"], output.metrics["speculative_decoding"]
    assert details["accepted_prediction_tokens"] == spec["num_accepted_draft_tokens"] > 30
    assert sum(details.values()) == spec["num_draft_tokens"]


def test_frames_of_a_chat(client):
    body = {"messages": TALK, "max_tokens": 12, "seed": 4, "n": 2, "return_token_ids": True, "logprobs": True}
    whole = client.chat(body)[0]
    frames = client.frames({**body, "stream_options": {"include_usage": True}}, "/v1/chat/completions")
    for frame in frames:
        ChatCompletionChunk.model_validate(frame, strict=True)
    assert len({frame["id"] for frame in frames}) == len({frame["created"] for frame in frames}) == 1
    *frames, last = frames
    assert last["choices"] == [] and last["usage"] == whole["usage"] and all(f["usage"] is None for f in frames)
    assert frames[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert not any("prompt_token_ids" in frame for frame in frames[1:])
    for choice in whole["choices"]:
        mine = [f["choices"][0] for f in frames if f["choices"][0]["index"] == choice["index"]]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""} and mine[-1]["delta"] == {}
        assert all(set(c["delta"]) == {"content"} and c["finish_reason"] is None for c in mine[1:-1])
        assert (mine[-1]["finish_reason"], mine[-1]["stop_reason"]) == (choice["finish_reason"], choice["stop_reason"])
        assert "".join(c["delta"]["content"] for c in mine[:-1]) == choice["message"]["content"]
        assert [t for c in mine[1:] for t in c.get("token_ids", ())] == choice["token_ids"]
        logprobs = [t for c in mine[1:] if c["logprobs"] for t in c["logprobs"]["content"]]
        assert logprobs == choice["logprobs"]["content"]


def test_the_end_of_a_text_is_no_content(client):
    """Clients that put a stream's text together from its logprobs would show it (guidance does)."""
    body = {"messages": TALK, "structured_outputs": {"choice": ["alpha beta"]}, "logprobs": True, "stream": True}
    for more in ({}, {"return_token_ids": True}, {"speculative_config": False}):
        frames = [f["choices"][0] for f in client.frames({**body, **more}, "/v1/chat/completions")]
        shown = [c["logprobs"]["content"] for c in frames if c["delta"].get("content") and c["logprobs"]]
        assert "".join(each["token"] for some in shown for each in some) == "alpha beta"
        *_, end = frames
        (last,) = end["logprobs"]["content"]
        assert end["finish_reason"] == "stop" and end["delta"] == {} and last["token"] in ("<|eos|>", "<|end|>")


def test_whole_numbers_as_json_has_them(client):
    body = {"prompt": PROMPT, "max_tokens": 5, "seed": 7, "n": 2, "stop_token_ids": [4], "logprobs": 1}
    floats = {**body, "max_tokens": 5.0, "seed": 7e0, "n": 2.0, "stop_token_ids": [4.0], "logprobs": 1.0}
    assert client.complete(floats)[0]["choices"] == client.complete(body)[0]["choices"]
    for name, value in (("max_tokens", 5.5), ("seed", 1e300), ("n", "2"), ("n", True), ("stop_token_ids", [4.5])):
        wrong = client.post("/v1/completions", {**body, name: value})
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == name


def test_continuous_usage(client):
    body = {"prompt": PROMPT, "max_tokens": 9, "temperature": 0, "ignore_eos": True}
    frames = client.frames({**body, "stream_options": {"continuous_usage_stats": True, "include_usage": True}})
    counts = [frame["usage"]["completion_tokens"] for frame in frames]
    assert counts == sorted(counts) and counts[-1] == 9 and frames[-1]["choices"] == []
    assert "usage" not in client.frames(body)[0]
    assert "usage" not in client.frames({**body, "stream_options": {"continuous_usage_stats": True}})[0]  # as in vLLM
    options = {"continuous_usage_stats": True, "include_usage": True}
    chat = {"messages": TALK, "max_tokens": 9, "stream_options": options}
    role, *_, last = client.frames(chat, "/v1/chat/completions")
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert role["usage"]["completion_tokens"] == 0 < last["usage"]["completion_tokens"]  # the role says nothing yet


def test_what_was_not_asked_for_is_null(client):
    """As in vLLM, whose clients look at it."""
    said, chat = client.complete({"prompt": PROMPT, "max_tokens": 2}), {"messages": TALK, "max_tokens": 2}
    choice = said[0]["choices"][0]
    assert choice["prompt_logprobs"] is choice["prompt_token_ids"] is choice["token_ids"] is None
    answer = client.post("/v1/chat/completions", chat).json()
    assert answer["prompt_logprobs"] is answer["prompt_token_ids"] is answer["choices"][0]["token_ids"] is None


def test_the_token_itself_stands_first(client):
    """Before those that were likelier."""
    body = {"prompt": PROMPT, "max_tokens": 9, "temperature": 1.5, "seed": 8, "logprobs": 3, "echo": True}
    found = client.complete(body)[0]["choices"][0]["logprobs"]
    assert [next(iter(top)) for top in found["top_logprobs"][1:]] == found["tokens"][1:]
    assert any(max(top.values()) > next(iter(top.values())) for top in found["top_logprobs"][1:])


def test_tokens_that_read_alike(client, tiny_llm):
    """As parts of characters do: the likelier one's number stands, else what was likeliest would not be seen to be."""
    text = "日本語のテキストです。🙂🙃 Привет, как дела?"
    body = {"prompt": text, "max_tokens": 0, "logprobs": 20, "echo": True}
    found = client.complete(body)[0]["choices"][0]["logprobs"]["top_logprobs"]
    expected = tiny_llm.generate(text, max_tokens=1, prompt_logprobs=20)[0].prompt_logprobs
    assert [max(top.values()) for top in found[1:]] == [max(each.top.values()) for each in expected[1:]]
    assert any(len(top) < 20 for top in found[1:])


@pytest.mark.parametrize("echo", [False, True])
def test_prompts_of_all_kinds_in_order(client, tiny_llm, echo):
    texts = [PROMPT, "The dog and the cat and"]
    ids = [tiny_llm.encode(text) for text in texts]
    body = {"max_tokens": 4, "seed": 5, "n": 2, "echo": echo}
    prompts: list[Any] = [texts[0], texts, ids[0], ids]
    answers = client.complete(*({**body, "prompt": prompt} for prompt in prompts))
    one, two = ([c["text"] for c in answer["choices"]] for answer in answers[:2])
    assert [c["index"] for c in answers[1]["choices"]] == [0, 1, 2, 3]
    expected = [o.text for text in texts for o in tiny_llm.generate(text, max_tokens=4, seed=5, n=2)]
    assert two == [(texts[i // 2] if echo else "") + text for i, text in enumerate(expected)] and one == two[:2]
    for answer, strings in zip(answers[2:], (one, two), strict=True):
        found = [c["text"] for c in answer["choices"]]
        assert found == [
            tiny_llm.tokenizer.decode(ids[i // 2]) + expected[i] if echo else s for i, s in enumerate(strings)
        ]
    assert answers[1]["usage"]["prompt_tokens"] == sum(map(len, ids)) and answers[1]["usage"]["completion_tokens"] == 16
    assert "metrics" not in answers[1]


@pytest.mark.parametrize("most", [0, 3])
@pytest.mark.parametrize("logprobs", [0, 2])
def test_echo_with_logprobs(client, tiny_llm, logprobs, most):
    """The prompt's tokens come first, and are measured as every other; in streams, too."""
    ids = tiny_llm.encode(PROMPT)
    prompts = [PROMPT, ids, [PROMPT, "The dog"]]
    body = {"max_tokens": most, "echo": True, "logprobs": logprobs, "seed": 3, "n": 2}
    expected = [
        tiny_llm.generate(p, max_tokens=max(1, most), logprobs=logprobs, prompt_logprobs=logprobs, seed=3, n=2)
        for p in (PROMPT, "The dog")
    ]
    answers = client.complete(*({**body, "prompt": prompt} for prompt in prompts))
    for answer, prompt in zip(answers, prompts, strict=True):
        outputs = expected[0] if prompt is not prompts[2] else [*expected[0], *expected[1]]
        streamed = regrouped(client.frames({**body, "prompt": prompt}))
        for choice, output, twin in zip(answer["choices"], outputs, streamed, strict=True):
            found = choice["logprobs"]
            known = [*output.prompt_logprobs[1:], *output.logprobs[: most and None]]
            assert found["token_logprobs"] == [None, *(p.logprob for p in known)]
            assert found["top_logprobs"][0] is None
            for top, each in zip(found["top_logprobs"][1:], known, strict=True):
                values = [*dict.fromkeys([*each.top.values(), each.logprob])]
                assert sorted(top.values()) == sorted(values)
            text = "".join(found["tokens"])
            assert text in (choice["text"], "<|bos|>" + choice["text"])
            left_out = len(text) - len(choice["text"])  # a special token is not in the text that is given back
            starts = [max(0, len("".join(found["tokens"][:i])) - left_out) for i in range(len(found["tokens"]))]
            assert found["text_offset"] == starts
            assert (twin["logprobs"], twin["text"]) == (found, choice["text"])


@pytest.mark.parametrize(("side", "kept"), [("left", " time there"), ("right", "Once")])
def test_an_echo_of_what_was_read(client, tiny_llm, side, kept):
    """Not of what truncation took away: the tokens are those of the text."""
    ids = tiny_llm.encode(text := "Once upon a time there")
    body = {"truncate_prompt_tokens": 2, "truncation_side": side, "echo": True, "logprobs": 0, "max_tokens": 0}
    for answer in client.complete({**body, "prompt": text}, {**body, "prompt": ids}):
        choice = answer["choices"][0]
        assert choice["text"].removeprefix("<|bos|>") == kept and answer["usage"]["prompt_tokens"] == 2
        assert "".join(choice["logprobs"]["tokens"]).removeprefix("<|bos|>") == kept
    whole = client.complete({**body, "prompt": text, "truncate_prompt_tokens": 100})
    assert whole[0]["choices"][0]["text"] == text


def test_logprobs_of_prompts(client, tiny_llm):
    """In a chat at the root, in a stream with the first frame; more than are asked for by an echo are not shown."""
    body = {"messages": TALK, "max_tokens": 2, "seed": 4, "prompt_logprobs": 1, "n": 2}
    expected = tiny_llm.generate(tiny_llm.render(TALK), max_tokens=1, prompt_logprobs=1)[0].prompt_logprobs
    chat = client.chat(body)[0]
    values = [at and {int(token): each["logprob"] for token, each in at.items()} for at in chat["prompt_logprobs"]]
    assert values == [at and at.top | {at.token_id: at.logprob} for at in expected]
    frames = client.frames(body, "/v1/chat/completions")
    assert frames[0]["prompt_logprobs"] == chat["prompt_logprobs"]
    assert not any("prompt_logprobs" in frame for frame in frames[1:])
    both = {"prompt": PROMPT, "max_tokens": 1, "echo": True, "logprobs": 0, "prompt_logprobs": 3}
    choice = client.complete(both)[0]["choices"][0]
    assert {len(top) for top in choice["logprobs"]["top_logprobs"][1:]} == {1}
    assert max(len(at) for at in choice["prompt_logprobs"][1:]) >= 3
    cached = client.complete(*[{"prompt": PROMPT * 8, "max_tokens": 1, "prompt_logprobs": 0}] * 2)
    assert cached[0]["choices"][0]["prompt_logprobs"] == cached[1]["choices"][0]["prompt_logprobs"]


def test_a_deadline(client, tiny_llm, monkeypatch):
    real, ahead = tiny_llm.engine.step_within, [0.0]

    def slow(*args: Any, **options: Any) -> Any:
        ahead[0] += 100
        return real(*args, **options)

    monkeypatch.setattr(tiny_llm.engine, "step_within", slow)
    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + ahead[0])
    monkeypatch.setattr("outrider.engine.engine.time", clock)
    late = {"prompt": PROMPT, "max_tokens": 4000, "ignore_eos": True, "deadline": 600}
    other = {"prompt": PROMPT, "max_tokens": 3, "seed": 1, "deadline": 6000}
    answers = client.send(*(("POST", "/v1/completions", {"json": body}) for body in (late, other)))
    error = answers[0].json()["error"]
    assert answers[0].status_code == 504 == error["code"] and error["param"] == "deadline"
    assert answers[0].headers["x-should-retry"] == "false"
    assert answers[1].json()["choices"][0]["text"] == tiny_llm.generate(PROMPT, max_tokens=3, seed=1)[0].text
    frames = client.frames(late)
    assert frames[-1]["error"]["code"] == 504 and len(frames) > 1


def test_a_deadline_counts_from_the_arrival(client, tiny_llm, monkeypatch):
    """Also what is spent before the request is queued: reading its prompt, say."""
    read = tiny_llm.encode

    def slow(prompt: str, **options: Any) -> list[int]:
        time.sleep(0.5)
        return read(prompt, **options)

    monkeypatch.setattr(tiny_llm, "encode", slow)
    answer = client.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 1, "deadline": 0.1})
    error = answer.json()["error"]
    assert answer.status_code == 504 == error["code"] and error["param"] == "deadline"


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_long_text_is_cut_where_that_is_asked_for(client, tiny_llm, side):
    text = "w and " * 150_000  # twice as many tokens as the context has
    ids = tiny_llm.tokenizer(text)["input_ids"]
    cut = {"max_tokens": 2, "truncate_prompt_tokens": 40, "truncation_side": side, "return_token_ids": True}
    whole, whole_chat = (
        client.complete({"prompt": text, **cut}),
        client.chat({"messages": [{"role": "user", "content": text}], **cut}),
    )
    assert whole[0]["choices"][0]["prompt_token_ids"] == (ids[:40] if side == "right" else ids[-40:])
    assert len(whole_chat[0]["prompt_token_ids"]) == 40
    refused = client.post("/v1/completions", {"prompt": text, "max_tokens": 2})
    assert refused.status_code == 400 and "maximum context length" in refused.text
    over = client.post("/v1/completions", {"prompt": "word " * 2**18, **cut})
    assert over.status_code == 400 and "maximum context length" in over.text


def test_offsets_are_places_in_the_text(client):
    """A character that is spelt by several tokens stands in one place."""
    body = {"prompt": "na\u00efve \U0001f642", "max_tokens": 40, "logprobs": 0, "echo": True, "prompt_logprobs": 0}
    body["structured_outputs"] = {"regex": "\U0001f642\U0001f642\u00e9\u65e5x y"}
    choice = client.complete(body)[0]["choices"][0]
    text, found = choice["text"], choice["logprobs"]
    assert text.endswith("\U0001f642\U0001f642\u00e9\u65e5x y") and text.startswith("na\u00efve")
    seen = 0
    for token, at, after in zip(
        found["tokens"], found["text_offset"], [*found["text_offset"][1:], len(text)], strict=True
    ):
        if "\ufffd" not in token and token != "<|bos|>" and at < len(text):
            assert text[at:].startswith(token) and after == at + len(token), (token, at)
            seen += 1
    assert seen > 5


@pytest.mark.parametrize(
    ("echo", "prompt", "starts"),
    [
        ("Hello world", [1, 2], [0, 5]), (" Hello world", [1, 2], [0, 6]), (" Hello world", [3, 1, 2], [0, 1, 6]),
        (" world", [4, 5], [0, 1]), ("Hello</s>world", [1, 6, 2], [0, 5, 9]),
    ],
)  # fmt: skip
def test_offsets_in_an_echo_of_sentencepiece(echo, prompt, starts):
    """Its tokenizers put a space before the text and behind special tokens, which is not in what is given back."""
    words = ("<unk>", "\u2581Hello", "\u2581world", "\u2581", "\u2581\u2581", "world")
    backend = Tokenizer(models.Unigram([(piece, -1.0) for piece in words], 0))
    backend.decoder = decoders.Metaspace()
    backend.add_tokens([AddedToken("</s>", special=True)])
    vocabulary, known = Vocabulary(PreTrainedTokenizerFast(tokenizer_object=backend)), Logprob(2, -1.0, {}, 1)
    answer = SimpleNamespace(requests=[SimpleNamespace(prompt_logprobs=[None, *[known] * (len(prompt) - 1)])])
    body = CompletionBody(prompt=echo, echo=True, logprobs=0)
    reply = answers.Completion(answers.Job(body, answer, {}, vocabulary, [prompt], {}, fail), [echo])
    found = reply.choice(StepEvent(0, [2], [" world"], [None], [known]))["logprobs"]
    assert found["text_offset"] == [*starts, len(echo)]
    assert found["tokens"] == [vocabulary.text(token) for token in [*prompt, 2]]


def test_runs_of_spaces_that_are_added_tokens():
    """As Gemma's are: text like any other, though no part of the vocabulary of its pieces."""
    backend = Tokenizer(models.BPE({"\u2581a": 0, "<0x0A>": 1}, []))
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_tokens([AddedToken("\u2581\u2581", normalized=False), AddedToken("<end>", special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    spelt = [Vocabulary(tokenizer).bytes(token) for token in range(4)]
    assert spelt == [b" a", b"\n", b"  ", b"<end>"] and b"".join(spelt).decode() == tokenizer.decode(range(4))


def test_words_among_pieces_of_bytes():
    """As in vocabularies that were extended by hand: what bytes are not spelt with is text, to the decoder, too."""
    backend = Tokenizer(models.BPE({"\u0120a": 0, "\u00e6": 1, "\u65e5\u672c": 2, "\u2581b": 3}, []))
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    spelt = [Vocabulary(tokenizer).bytes(token) for token in range(4)]
    assert spelt == [b" a", b"\xe6", "\u65e5\u672c".encode(), "\u2581b".encode()]
    assert [piece.decode("utf-8", "replace") for piece in spelt] == [tokenizer.decode(token) for token in range(4)]


def test_echo_of_the_prompt_alone(client):
    body = {"prompt": PROMPT, "max_tokens": 0, "echo": True}
    answer = client.complete(body)[0]
    choice = answer["choices"][0]
    assert choice["text"] == PROMPT and choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    assert regrouped(client.frames(body))[0]["text"] == PROMPT
    refused = client.post("/v1/completions", {**body, "min_tokens": 1}).json()["error"]
    assert refused["param"] == "min_tokens" and "must not exceed max_tokens (0)" in refused["message"]


def test_how_many_tokens_by_default(client, tiny_llm):
    assert client.complete({"prompt": PROMPT, "ignore_eos": True})[0]["usage"]["completion_tokens"] == 16
    assert (
        client.complete({"prompt": PROMPT, "ignore_eos": True, "max_tokens": None})[0]["usage"]["completion_tokens"]
        == 16
    )
    small = Client(LLM("tiny", device="cpu", dtype="float32", max_model_len=64))
    chat = {"messages": TALK, "ignore_eos": True}
    for body in (chat, {**chat, "max_tokens": 1000}, {**chat, "max_completion_tokens": 1000, "max_tokens": 2}):
        assert small.chat(body)[0]["usage"]["total_tokens"] == 64
    assert small.chat({**chat, "max_completion_tokens": 3, "max_tokens": 9})[0]["usage"]["completion_tokens"] == 3
    refused = small.post("/v1/completions", {"prompt": [5] * 64})
    assert refused.status_code == 400 and "64" in refused.json()["error"]["message"]
    assert small.complete({"prompt": [5] * 63})[0]["usage"]["completion_tokens"] == 1
    cut = small.complete(
        {"prompt": list(range(5, 105)), "truncate_prompt_tokens": 3, "return_token_ids": True},
        {
            "prompt": list(range(5, 105)),
            "truncate_prompt_tokens": 3,
            "truncation_side": "right",
            "return_token_ids": True,
        },
        {"prompt": list(range(5, 105)), "truncate_prompt_tokens": -1, "max_tokens": 4, "return_token_ids": True},
    )
    prompts = [answer["choices"][0]["prompt_token_ids"] for answer in cut]
    assert prompts == [[102, 103, 104], [5, 6, 7], list(range(45, 105))]
    small.llm.close()
    lossy = {"method": "ngram", "acceptance_method": "typical"}
    small = Client(LLM("tiny", device="cpu", max_model_len=64, speculative_config=lossy), defaults={"max_tokens": 9})
    (cut,) = small.complete({"prompt": list(range(5, 105)), "truncate_prompt_tokens": -1, "ignore_eos": True})
    assert cut["usage"]["prompt_tokens"] == 55 and cut["usage"]["completion_tokens"] == 9
    assert cut["metrics"]["exactness"] == "lossy"
    small.llm.close()


def test_what_is_asked_is_read_once_and_off_the_loop(client, monkeypatch):
    """A bias of each token for a thousand prompts would else hold all streams up for minutes."""
    read, threads = CompletionBody.sampling, list[threading.Thread]()

    def noted(*args: Any, **options: Any) -> Any:
        threads.append(threading.current_thread())
        return read(*args, **options)

    monkeypatch.setattr(CompletionBody, "sampling", noted)
    body = {"prompt": [[5, 6], [7, 8], [9], [6, 5]], "max_tokens": 2, "seed": 1, "logit_bias": {"300": 5}}
    choices = client.complete(body)[0]["choices"]
    expected = [
        client.llm.llm.generate(ids, max_tokens=2, seed=1, logit_bias={300: 5})[0].text for ids in body["prompt"]
    ]
    assert [choice["text"] for choice in choices] == expected
    assert len(threads) == 1 and threading.main_thread() not in threads


@pytest.mark.parametrize("method", ["none", "draft_model"])
def test_as_many_tokens_as_there_is_memory_for(tiny_llm, monkeypatch, method):
    """A chat that says no number is not refused because the whole context would not fit."""
    tiny_llm.speculative_config = None if method == "none" else {"method": method, "model": "tiny-draft"}
    client, engine = Client(tiny_llm), tiny_llm.engine
    monkeypatch.setattr(engine, "kv_memory", engine._kv_bytes(96))
    chat: Any = {"messages": TALK, "ignore_eos": True, "seed": 1}
    assert engine.longest == 96 and client.chat(chat)[0]["usage"]["total_tokens"] == 96
    said = client.post("/v1/chat/completions", {**chat, "max_tokens": 96})
    assert said.status_code == 400 and "kv_memory" in said.json()["error"]["message"]
    over = client.post("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT * 20}]})
    assert over.status_code == 400 and "kv_memory" in over.json()["error"]["message"]
    client.llm.close()


def test_defaults_of_the_model(tiny_llm):
    given = {"temperature": 0.5, "top_k": 3, "max_tokens": 7}
    client = Client(tiny_llm, defaults=given)
    answer = client.complete({"prompt": PROMPT, "seed": 6, "return_token_ids": True})[0]
    assert answer["choices"][0]["token_ids"] == tiny_llm.generate(PROMPT, seed=6, **given)[0].token_ids
    said = {"temperature": 1.0, "top_k": 0, "max_tokens": 9}
    answer = client.complete({"prompt": PROMPT, "seed": 6, "return_token_ids": True, **said})[0]
    assert answer["choices"][0]["token_ids"] == tiny_llm.generate(PROMPT, seed=6, **said)[0].token_ids
    client.llm.close()


def test_defaults_of_nobody_s_folder():
    with pytest.raises(ConfigError, match="there is no such user"):
        generation_defaults("~nobody.such/model", Path())


# --- speculation ----------------------------------------------------------------------------------------------------


def test_a_request_chooses_its_drafts(client):
    body = {"prompt": "the cat and the dog and the cat and the dog and", "temperature": 0, "max_tokens": 40}
    body["ignore_eos"] = True
    chosen: list[Any] = [
        None,
        {"method": "ngram", "num_speculative_tokens": 2},
        {"num_speculative_tokens": 0},
        {"method": "none"},
        False,
        True,
    ]
    answers = client.complete(*({**body, "speculative_config": each} for each in chosen))
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1
    specs = [answer["metrics"]["speculative_decoding"] for answer in answers]
    assert [spec["num_spec_tokens"] for spec in specs] == [4, 2, 0, 0, 0, 4]
    assert [bool(spec["num_draft_tokens"]) for spec in specs] == [True, True, False, False, False, True]
    for spec in specs:
        histogram = spec["acceptance_histogram"]
        assert len(histogram) == spec["num_spec_tokens"] + 1 and sum(histogram) == spec["num_spec_steps"]
        assert (
            sum(i * n for i, n in enumerate(histogram))
            == spec["num_accepted_draft_tokens"]
            == sum(spec["per_step_accepted"])
        )
        assert sum(spec["per_step_drafted"]) == spec["num_draft_tokens"]
        assert spec["num_accepted_draft_tokens"] + spec["num_spec_steps"] == 40
    frames = client.frames({**body, "stream_options": {"include_usage": True}})
    last = frames[-1]["metrics"]["speculative_decoding"]  # what is drafted may depend on company, tokens do not
    assert last.keys() == specs[0].keys() and last["num_accepted_draft_tokens"] + last["num_spec_steps"] == 40
    assert not any("metrics" in frame for frame in frames[:-1])


@pytest.mark.parametrize(
    "given",
    [
        {"method": "suffix"}, {"num_speculative_tokens": 5}, {"num_speculative_tokens": -1},
        {"num_speculative_tokens": "2"}, {"num_speculative_tokens": True}, {"model": "/etc/passwd"},
        {"method": "ngram", "prompt_lookup_max": 3}, {"method": 3}, "ngram", [],
    ],
)  # fmt: skip
def test_drafts_that_the_server_was_not_started_with(client, given):
    answer = client.post("/v1/completions", {"prompt": "x", "speculative_config": given})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "speculative_config"


# --- the other routes -----------------------------------------------------------------------------------------------


def test_models(client):
    models = client.get("/v1/models").json()
    assert models["object"] == "list" and [model["id"] for model in models["data"]] == ["tiny", "alias"]
    assert client.get("/v1/models/alias").json() == models["data"][1]
    assert models["data"][0]["max_model_len"] == client.llm.llm.engine.max_len
    assert client.get("/v1/models/").json() == models
    missing = client.get("/v1/models/some/other")
    assert missing.status_code == 404 and missing.json()["error"]["param"] == "model"


def test_what_is_no_route_is_named_and_the_one_that_was_meant(client):
    for path, meant in {
        "/v1/embeddings": "", "/v2": "", "/chat/completions": "/v1/chat/completions", "/models": "/v1/models",
        "/v1/v1/messages": "/v1/messages", "/v1/chat/completions/responses": "", "/v1/tokenize": "/tokenize",
    }.items():  # fmt: skip
        answer = client.post(path, {})
        told = f"no such route: '{path}'" + (f"; did you mean '{meant}'?" if meant else "")
        assert answer.status_code == 404
        assert answer.json()["error"] == {"message": told, "type": "NotFoundError", "param": None, "code": 404}


def test_tokens_there_and_back(client, tiny_llm):
    text = "Once upon a time, é and 日本 🙂."
    answer = client.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert answer["tokens"] == tiny_llm.encode(text) and answer["count"] == len(answer["tokens"])
    assert answer["token_strs"] == tiny_llm.tokenizer.convert_ids_to_tokens(answer["tokens"])
    bare = client.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()
    assert client.post("/detokenize", {"tokens": bare["tokens"]}).json() == {"prompt": text}
    chat = client.post("/tokenize", {"messages": TALK}).json()
    assert chat["tokens"] == tiny_llm.render(TALK) and chat["token_strs"] is None
    for body in ({}, {"prompt": "x", "messages": TALK}, {"prompt": 3}):
        assert client.post("/tokenize", body).status_code == 400
    for tokens in ([-1], [10**12], ["a"], None, [True]):
        assert client.post("/detokenize", {"tokens": tokens}).status_code == 400
    assert client.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}
    assert client.post("/tokenize", {"prompt": "", "return_token_strs": True}).json()["token_strs"] == []


def test_what_is_told_of_the_tokenizer(client, tiny_llm, monkeypatch):
    """lm-eval splits its prompts by it: what clients need that have no tokenizer."""
    about = client.get("/tokenizer_info").json()
    assert about["eos_token"] == tiny_llm.tokenizer.eos_token and about["bos_token"] == tiny_llm.tokenizer.bos_token
    assert about["tokenizer_class"] and about["chat_template"] == tiny_llm.tokenizer.chat_template
    tokens = client.post("/tokenize", {"prompt": about["eos_token"], "add_special_tokens": False}).json()["tokens"]
    assert tokens == [tiny_llm.tokenizer.eos_token_id]
    monkeypatch.setattr(tiny_llm.tokenizer, "chat_template", {"default": "a", "tool_use": "b"})
    assert client.get("/tokenizer_info").json()["chat_template"] == "a"


def test_a_model_without_a_tokenizer(random_llm):
    client = Client(random_llm)
    answer = client.post("/tokenize", {"prompt": "", "return_token_strs": True})
    assert answer.status_code == 200 and answer.json()["token_strs"] == []
    assert client.post("/tokenize", {"prompt": "x", "return_token_strs": True}).status_code == 400
    assert client.post("/detokenize", {"tokens": [5]}).json() == {"prompt": ""}
    assert client.get("/tokenizer_info").status_code == 404
    assert client.complete({"prompt": [5], "max_tokens": 2, "logprobs": 1, "echo": True})
    client.llm.close()


def test_what_can_be_got_has_a_head(client):
    for path in ("/health", "/v1/models", "/v1/models/tiny", "/version", "/metrics", "/"):
        answer = client.send(("HEAD", path, {}))[0]
        got = client.get(path)
        assert answer.status_code == 200 and answer.headers.get("content-type") == got.headers.get("content-type")
    assert client.send(("HEAD", "/v1/models/none", {}))[0].status_code == 404
    assert client.send(("HEAD", "/v1/completions", {}))[0].status_code == 405


def test_what_an_answer_and_a_stream_may_carry_of_openais(client):
    """Messages as its client gives them back, a refusal among them; a stream that is not to be padded."""
    talk = [{"role": "user", "content": "hi"}, {"role": "user", "content": [{"type": "text", "text": "bye"}]}]
    said = {"refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None}
    for content in ("no", [{"type": "refusal", "refusal": "no"}], [{"type": "text", "text": "no"}]):
        asked = [talk[0], {"role": "assistant", "content": content, **said}, talk[1]]
        options = {"include_usage": True, "include_obfuscation": False}
        body = {"messages": asked, "max_tokens": 3, "seed": 1, "stream_options": options}
        usage = client.frames(body, "/v1/chat/completions")[-1]["usage"]
        plain = [talk[0], {"role": "assistant", "content": "no"}, {"role": "user", "content": "bye"}]
        assert usage["prompt_tokens"] == len(client.llm.llm.render(plain))


def test_health_and_version(client, monkeypatch):
    import outrider

    assert (
        client.get("/health").status_code
        == client.get("/ping").status_code
        == client.post("/ping", None).status_code
        == 200
    )
    assert client.get("/health").content == b""
    assert client.get("/version").json() == {"version": outrider.__version__}
    with monkeypatch.context() as patch:
        patch.setattr(type(client.llm), "stalled", 61.0)
        assert client.get("/health").status_code == 503
    client.llm.close()
    assert client.get("/health").status_code == 503
    refused = client.post("/v1/completions", {"prompt": "x"})
    assert refused.status_code == 503 and refused.headers["retry-after"]


def test_methods_that_nobody_knows_share_a_counter(client):
    """A client that makes names up must not make the server grow."""
    for i in range(3):
        client.send((f"MADE{i}", "/version", {}))
    text = client.get("/metrics").text
    assert 'method="other"' in text and "MADE" not in text


def test_metrics(client):
    def value(name: str, labels: str = "") -> float:
        found = re.findall(rf"^{re.escape(name)}{{([^}}]*)}} (\S+)$", client.get("/metrics").text, re.M)
        mine = [float(number) for given, number in found if labels in given]
        assert mine, name
        assert all('model_name="tiny"' in given and 'engine="0"' in given for given, _ in found)
        return sum(mine)

    for reason in ("stop", "length", "abort", "error"):
        assert value("vllm:request_success_total", f'finished_reason="{reason}"') == 0
    body = {"prompt": "the cat and the dog and the cat and the dog and", "temperature": 0, "max_tokens": 40}
    answer = client.complete({**body, "ignore_eos": True}, {"prompt": PROMPT, "n": 2, "max_tokens": 3, "seed": 1})[0]
    spec = answer["metrics"]["speculative_decoding"]
    generated = value("vllm:generation_tokens_total")
    assert 41 < generated <= 46
    assert value("vllm:prompt_tokens_total") == answer["usage"]["prompt_tokens"] + 2 * len(
        client.llm.llm.encode(PROMPT)
    )
    steps = value("vllm:iteration_tokens_total_sum")
    assert steps == value("vllm:prompt_tokens_total") + generated
    assert value("vllm:spec_decode_num_accepted_tokens_total") >= spec["num_accepted_draft_tokens"] > 0
    assert value("vllm:spec_decode_num_draft_tokens_total") >= spec["num_draft_tokens"]
    assert value("vllm:spec_decode_num_drafts_total") >= sum(n > 0 for n in spec["per_step_drafted"])
    per_position = value("vllm:spec_decode_num_accepted_tokens_per_pos_total")
    assert per_position == value("vllm:spec_decode_num_accepted_tokens_total")
    assert value("vllm:spec_decode_num_accepted_tokens_per_pos_total", 'position="0"') > 0
    assert value("vllm:request_success_total") == 3
    assert value("vllm:num_requests_running") == value("vllm:num_requests_waiting") == 0
    times = ("queue", "prefill", "inference", "decode")
    named = ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_generation_tokens")
    for histogram in (*named, *(f"request_{name}_time_seconds" for name in times)):
        assert value(f"vllm:{histogram}_count") == 3
    assert value("vllm:request_generation_tokens_sum") == generated
    assert value("vllm:inter_token_latency_seconds_bucket", 'le="0.0025"') >= 0
    parts = {name: value(f"vllm:request_{name}_time_seconds_sum") for name in times}
    whole = value("vllm:e2e_request_latency_seconds_sum")
    assert parts["queue"] + parts["inference"] == pytest.approx(whole)
    assert parts["prefill"] + parts["decode"] == pytest.approx(parts["inference"])
    engine = client.llm.llm.engine
    assert value("vllm:kv_cache_usage_perc") == 0 and value("vllm:num_preemptions_total") == engine.preemptions
    assert value("vllm:prefix_cache_queries_total") == engine.prefix_queries > 0
    assert value("vllm:prefix_cache_hits_total") == engine.prefix_hits
    text = client.get("/metrics").text
    assert 'http_requests_total{handler="/v1/completions",method="POST",status="200"} 2.0' in text


def test_the_page(client):
    answer = client.get("/")
    assert answer.status_code == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in answer.headers["content-security-policy"] and "<html" in answer.text


def test_what_the_schema_says(client):
    schema = client.get("/openapi.json").json()
    body = schema["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"prompt", "min_p", "speculative_config"} <= at(schema, body["$ref"])["properties"].keys()
    assert json.dumps(schema).count('"$ref"') > 9
    for part in parts(schema):  # each is found from the root of the document, as in vLLM's
        assert "$ref" not in part or at(schema, part["$ref"])


def at(schema: dict[str, Any], ref: str) -> Any:
    """What a reference is to."""
    for name in ref.removeprefix("#/").split("/"):
        schema = schema[name]
    return schema


def parts(schema: Any) -> Iterator[dict[str, Any]]:
    """All objects in it."""
    if isinstance(schema, dict):
        yield schema
    for part in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from parts(part)


def test_answers_are_as_the_schema_says(client):
    """Their kinds, and what an error is."""
    schema = client.get("/openapi.json").json()
    asked: list[Any] = [("GET", path, {}) for path in ("/", "/health", "/ping", "/version", "/metrics", "/v1/models")]
    asked += [("GET", "/v1/models/tiny", {}), ("GET", "/v1/models/none", {}), ("POST", "/ping", {})]
    asked += [("POST", "/tokenize", {"json": {"prompt": "x"}}), ("POST", "/detokenize", {"json": {"tokens": [1.5]}})]
    bodies: list[Any] = [{"max_tokens": 1, "stream": stream} for stream in (True, False)] + [{"temperature": -1}]
    asked += [("POST", "/v1/completions", {"json": {"prompt": "x", **body}}) for body in bodies]
    for (verb, path, _), answer in zip(asked, client.send(*asked), strict=True):
        told = schema["paths"]["/v1/models/{model}" if "models/" in path else path][verb.lower()]["responses"]
        assert set(told) == {"200", "4XX", "5XX"}
        kinds = told["200" if answer.status_code == 200 else "4XX"].get("content", {None: {}})
        assert answer.headers.get("content-type") in {*kinds, *(f"{kind}; charset=utf-8" for kind in kinds)}, path
        if answer.status_code >= 400:
            jsonschema.validate(answer.json(), {**schema, **kinds["application/json"]["schema"]})


def test_methods_that_are_allowed(client):
    """All of the path's are named, whichever route refuses."""
    for path, verbs in (("/ping", "GET, HEAD, POST"), ("/health", "GET, HEAD"), ("/tokenize", "POST")):
        answer = client.send(("DELETE", path, {}))[0]
        assert answer.status_code == 405 and answer.headers["allow"] == verbs


# --- constrained output ----------------------------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


TAG = {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "."}


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, {"choice": ["yes", "no"]}),
        ({"structured_outputs": {"regex": "[0-9]{3}-[a-f]{2}"}}, {"regex": "[0-9]{3}-[a-f]{2}"}),
        ({"structured_outputs": {"json": SCHEMA}}, {"json": SCHEMA}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            {"json": SCHEMA},
        ),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"json": SCHEMA}),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": {"type": "structural_tag", "format": TAG}}, {"structural_tag": {"format": TAG}}),
        ({"response_format": {"type": "text"}}, None),
    ],
)  # fmt: skip
def test_constrained_output(tiny_llm, said, meant):
    prompt = tiny_llm.render(TALK)
    expected = tiny_llm.generate(prompt, max_tokens=60, seed=5, structured_outputs=meant)[0]
    tiny_llm.speculative_config = {"method": "ngram", "num_speculative_tokens": 4}
    client = Client(tiny_llm)
    body = {"messages": TALK, "max_tokens": 60, "seed": 5, "return_token_ids": True, **said}
    choice = client.chat(body)[0]["choices"][0]
    assert choice["token_ids"] == expected.token_ids and choice["message"]["content"] == expected.text
    if meant is not None and "json" in meant:
        assert "grammar" in choice["drafted_by"]
        assert choice["finish_reason"] == "length" or set(json.loads(choice["message"]["content"])) == {"name", "age"}
    frames = client.frames(body, "/v1/chat/completions")
    assert "".join(f["choices"][0]["delta"].get("content", "") for f in frames) == expected.text
    client.llm.close()


@pytest.mark.parametrize(
    "said",
    [
        {"structured_outputs": {}}, {"structured_outputs": {"choice": []}}, {"structured_outputs": {"regex": "("}},
        {"structured_outputs": {"json": {"type": "thing"}}}, {"structured_outputs": {"magic": 1}},
        {"structured_outputs": []},
        {"structured_outputs": {"choice": ["a"], "regex": "a"}}, {"structured_outputs": {"grammar": "start: nowhere"}},
        {"response_format": {}}, {"response_format": {"type": "xml"}}, {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}}, {"response_format": "json"},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "thing"}}}},
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        {"response_format": {"type": "json_object", "shema": {"type": "integer"}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "stricter": True}}},
    ],
)  # fmt: skip
def test_constraints_that_cannot_be(client, said):
    answer = client.post("/v1/chat/completions", {"messages": TALK, "max_tokens": 4, **said})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] in said and "Traceback" not in answer.text


def test_there_is_no_time_between_one_token(client):
    """As in vLLM, which leaves out what it cannot say."""
    one, two = client.chat(*({"messages": TALK, "max_tokens": n, "min_tokens": n} for n in (1, 2)))
    assert "mean_itl_ms" not in one["metrics"] and two["metrics"]["mean_itl_ms"] >= 0


MUCH = [
    ("/v1/completions", {"prompt": [5] * 90, "prompt_logprobs": 20, "max_tokens": 1}),
    ("/v1/completions", {"prompt": [[5] * 40, [6] * 40], "logprobs": 20, "echo": True, "max_tokens": 0}),
    ("/v1/chat/completions", {"messages": TALK, "logprobs": True, "top_logprobs": 20, "n": 2, "max_tokens": 20}),
    ("/v1/chat/completions", {"messages": TALK * 4, "prompt_logprobs": 20, "max_tokens": 1}),
    ("/v1/completions", {"prompt": [[5] * 120, [6] * 120], "return_token_ids": True, "max_tokens": 20}),
    ("/v1/responses", {"input": "x", "top_logprobs": 20, "max_output_tokens": 40}),
]


@pytest.mark.parametrize(("path", "body"), MUCH)
def test_many_numbers_are_written_off_the_loop(client, monkeypatch, path, body):
    """As they are on it, where those of an engine that was closed meanwhile still are."""
    wrote = list[tuple[bool, int]]()  # whether on the loop, and how many bytes

    def noted(write: Any) -> Any:
        def writes(*args: Any, **options: Any) -> bytes:
            made = write(*args, **options)
            wrote.append((threading.current_thread() is threading.main_thread(), len(made)))
            return made

        return writes

    def asked(on_loop: bool) -> str:
        wrote.clear()
        answer = client.complete({**body, "ignore_eos": True, "seed": 1}, path=path)[0]
        assert [on for on, _ in wrote] == [on_loop]
        return re.sub('"msg_[0-9a-f]+"', "", json.dumps(answer.get("choices") or answer["output"]))

    for where in (answers, responses):
        for name in ("dumps", "frame"):
            monkeypatch.setattr(where, name, noted(getattr(where, name)))
    expected = asked(on_loop=True)
    monkeypatch.setattr(answers, "MANY", 100)
    assert asked(on_loop=False) == expected
    wrote.clear()
    assert client.post(path, {**body, "ignore_eos": True, "stream": True}).status_code == 200
    assert max([size for on, size in wrote if on], default=0) < 20_000
    assert not all(on for on, _ in wrote) or "n" in body  # whose frames are all short
    off_loop = client.llm.off_loop

    async def closed(work: Any, lane: str = "") -> Any:
        if lane == "answer":
            raise EngineError("closed")
        return await off_loop(work, lane)

    monkeypatch.setattr(client.llm, "off_loop", closed)
    assert asked(on_loop=True) == expected


def test_what_is_written_piece_by_piece():
    data = {"a": [1.5, {"b": [{"c": [None, "\u2028"]}, {5: True}]}], "": {}, "d": [], "\u00fc": {7: [{}], 8: []}}
    assert {dumps(data, depth) for depth in range(9)} == {dumps(data)} and json.loads(dumps(data, 9))["d"] == []


def test_logprobs_of_prompts_have_a_bound(client, monkeypatch, tiny_llm):
    """For all prompts of a request and each of their outputs; one prompt of the whole context is within it."""
    monkeypatch.setattr("outrider.serve.app.PROMPT_LOGPROBS", 40)
    monkeypatch.setattr(tiny_llm.engine, "max_len", 20)
    one = [5] * 19
    right = {"prompt": [one], "prompt_logprobs": 3, "max_tokens": 1}
    for more in ({}, {"prompt": [one] * 2, "prompt_logprobs": 1}, {"prompt": [one] * 9, "prompt_logprobs": None}):
        client.complete({**right, **more})
    for more, field in (
        ({"prompt": [one] * 3, "prompt_logprobs": 0}, "prompt_logprobs"), ({"n": 4}, "prompt_logprobs"),
        ({"prompt_logprobs": None, "logprobs": 3, "echo": True, "n": 4}, "logprobs"),
    ):  # fmt: skip
        error = client.post("/v1/completions", {**right, **more}).json()["error"]
        assert error["param"] == field and error["message"].startswith(f"{field}: "), error
        assert "ask for them in several" in error["message"]
