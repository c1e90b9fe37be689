"""Whatever is sent, the answer is an error in OpenAI's shape or a right one: never 500, and the next request works."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import math
import pkgutil
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from outrider.engine import LONG
from outrider.errors import ConfigError, QueueFull
from outrider.serve.app import Server
from outrider.serve.http import read
from outrider.serve.protocol import ChatBody, CompletionBody, DetokenizeBody
from outrider.serve.responses import ResponsesBody
from outrider.serve.server import JsonLines, Lines
from outrider.serve.settings import Settings
from tests.serve.conftest import Client, fail

PROMPT = "Once upon a time"
TALK = [{"role": "user", "content": "hi"}]


def refused(answer: Any, status: int = 400, param: str | None = None) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    error = body["error"]
    assert error["message"] and "\n" not in error["message"] and len(error["message"]) < 1000
    assert "Traceback" not in answer.text and error["code"] == status
    if param is not None:
        assert error["param"] == param and param in error["message"]
    return error


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1), ("temperature", "1"), ("temperature", [1]), ("temperature", 1e300), ("temperature", True),
        ("top_p", 0), ("top_p", 2), ("top_k", -2), ("top_k", 1.5), ("min_p", -0.1), ("n", 0), ("n", 10**9), ("n",
        "two"),
        ("n", 10**400), ("seed", 2**64), ("seed", "x"), ("seed", 1.5), ("max_tokens", 0), ("max_tokens", -5),
        ("max_tokens", "many"), ("min_tokens", -1), ("min_tokens", 17), ("stop", 3), ("stop", ["a"] * 17),
        ("stop", [""]),
        ("stop", "x" * 1001), ("stop_token_ids", "5"), ("stop_token_ids", [-1]), ("stop_token_ids", [10**9]),
        ("stop_token_ids", [10**400]), ("logit_bias", {"x": 1}), ("logit_bias", {"5": "a"}), ("logit_bias", {"-3": 1}),
        ("logit_bias", {"99999999": 1}), ("logit_bias", {"9" * 5000: 1}), ("logit_bias", [1]), ("logprobs", -1),
        ("logprobs", 21), ("logprobs", True), ("repetition_penalty", 0), ("presence_penalty", 3), ("ignore_eos", "yes"),
        ("frequency_penalty", -3), ("stream", "true"), ("stream_options", {"include_usage": True}), ("priority",
        "high"),
        ("cache_salt", ""), ("cache_salt", "a/b"), ("cache_salt", "x" * 129), ("priority", 2**70), ("best_of", 3),
        ("suffix", "x"), ("truncate_prompt_tokens", 0), ("truncate_prompt_tokens", -2), ("truncation_side", "middle"),
        ("prompt", None), ("prompt", ""), ("prompt", []), ("prompt", [""]), ("prompt", [[]]), ("prompt", {}),
        ("prompt", 5),
        ("prompt", [1.5]), ("prompt", [[1], "a"]), ("prompt", [-1]), ("prompt", [10**9]), ("prompt", [True]),
        ("prompt", ["a"] * 1025), ("prompt", "\ud800"), ("echo", "yes"), ("guided_json", {}), ("use_beam_search", True),
        ("bad_words", "x"), ("bad_words", [""]), ("bad_words", ["\ud800"]), ("bad_words", [3]),
        ("bad_words", ["x"] * 1025), ("bad_words", ["x" * 1001]),
        ("allowed_token_ids", []), ("allowed_token_ids", [10**9]), ("allowed_token_ids", [-1]),
        ("allowed_token_ids", "5"), ("allowed_token_ids", [True]), ("prompt_logprobs", -1), ("prompt_logprobs", 21),
        ("prompt_logprobs", True), ("prompt_logprobs", 1.5), ("deadline", 0), ("deadline", -1), ("deadline", "soon"),
        ("deadline", True), ("length_penalty", 2), ("logprob_token_ids", [5]), ("prompt_embeds", "x"),
        ("thinking_token_budget", 5), ("vllm_xargs", {"a": 1}), ("repetition_detection", {"max": 3}),
        ("\ud800", 1), ("__class__", {}), ("add_special_tokens", 1), ("return_token_ids", "yes"),
        ("prediction", 5), ("prediction", {"type": "content"}), ("prediction", {"type": "x", "content": "a"}),
        ("prediction", {"type": "content", "content": [{"type": "text"}]}), ("prediction", "\ud800"),
        ("prediction", "x" * (2**20 + 1)),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named(client, field, value):
    body = json.dumps({"prompt": PROMPT, field: value}).encode()
    answer = client.send(
        ("POST", "/v1/completions", {"content": body, "headers": {"content-type": "application/json"}})
    )
    error = refused(answer[0])
    if field != "\ud800":
        assert field in error["message"], error


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("v1/completions", {"prompt": [10**4000]}), ("v1/completions", {"stop_token_ids": [10**4000]}),
        ("v1/completions", {"max_tokens": -(10**4000)}), ("v1/completions", {"logprobs": 10**4000}),
        ("v1/completions", {"prompt_logprobs": 10**4000}), ("v1/completions", {"n": 10**4000}),
        ("v1/completions", {"truncate_prompt_tokens": -(10**4000)}), ("v1/completions", {"min_tokens": 10**4000}),
        ("v1/chat/completions", {"max_completion_tokens": -(10**4000)}), ("detokenize", {"tokens": [10**4000]}),
    ],
)  # fmt: skip
def test_a_long_number_is_told_in_brief(client, path, more):
    start = {"v1/completions": {"prompt": PROMPT}, "v1/chat/completions": {"messages": TALK}}
    assert len(refused(client.post(f"/{path}", {**start.get(path, {}), **more}))["message"]) < 300


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", None), ("messages", []), ("messages", "hi"), ("messages", [1]), ("messages", [{}]),
        ("messages", [{"role": "user"}]), ("messages", [{"role": 3, "content": "x"}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]),
        ("messages", [{"role": "user", "content": "\udfff"}]), ("top_logprobs", 2), ("logprobs", 1),
        ("max_completion_tokens", 0), ("chat_template", "{{ 1 }}"), ("chat_template_kwargs", 3),
        ("modalities", ["audio"]),
        ("functions", [{}]), ("function_call", "auto"), ("audio", {"voice": "x"}), ("documents", [{"a": 1}]),
        ("web_search_options", {"a": 1}), ("echo", True), ("response_role", "user"), ("logprob_token_ids", [1]),
        ("continue_final_message", "x"), ("n", -1), ("prompt", "x"),
    ],
)  # fmt: skip
def test_a_wrong_field_of_a_chat(client, field, value):
    body = json.dumps({"messages": TALK, field: value}).encode()
    kind = {"content-type": "application/json"}
    refused(client.send(("POST", "/v1/chat/completions", {"content": body, "headers": kind}))[0])


@pytest.mark.parametrize(
    ("path", "field", "value", "told"),
    [
        ("completions", "prompt", [1.5], "text, a list of token ids, or a list of either, not [1.5]"),
        ("completions", "prompt", [5, -1], "token -1 is not a token id below 8192"),
        ("completions", "prompt", ["a", [1]], "a list of either"), ("completions", "stop", 5, "a list of texts, not 5"),
        ("completions", "speculative_config", "ngram", "an object, or false"),
        ("chat/completions", "tool_choice", 5, "none, auto, required, or an object"),
        ("responses", "input", 5, "text, or a list of items"), ("responses", "tool_choice", [], "none, auto, required"),
        ("completions", "temperature", 1e300, "between 0 (greedy) and 1000000"), ("completions", "n", 0, "1 to 128"),
        ("completions", "logit_bias", {"5": 1, "05": 2}, "'05' is no token id"),
        ("completions", "logit_bias", {"\u0663": 1}, "is no token id"),
        ("completions", "prompt", "", "the prompt is empty"), ("completions", "prompt", ["a", ""], "is empty"),
        ("completions", "prompt", [5] * 2**18, "context length"),
        ("completions", "response_format", {"type": "text", "zz": 1}, "no field 'zz'"),
        ("completions", "response_format", {"type": "text", "json_schema": {}}, "no field 'json_schema'"),
        ("completions", "response_format", {"type": "json_schema", "schema": {}, "json_schema": {}}, "both"),
        ("chat/completions", "web_search_options", {}, "not served here"),
        ("chat/completions", "suffix", "x", "not served here"), ("responses", "best_of", 2, "not served here"),
        ("chat/completions", "chat_template_kwargs", {"messages": 1}, "messages"),
        ("chat/completions", "messages", [{"role": "user", "content": "x " * 2**18}], "context length"),
        ("responses", "input", "x " * 2**18, "context length"),
        ("responses", "tools", [{"type": "function", "function": {"name": "f"}}], "{'type': 'function', 'name': ...}"),
        ("chat/completions", "messages", [], "give at least one"),
        ("chat/completions", "messages", [{"role": "user", "content": 5}], "{'role': ..., 'content': ...}"),
        ("chat/completions", "messages", [{"role": "user", "content": [{"type": "image_url"}]}], "{'type': 'text'"),
        ("responses", "input", [{"role": "user", "content": 5}], "'content': ..."),
        ("responses", "input", [], "give at least one"),
        ("chat/completions", "prediction", {"type": "content", "content": 5}, "text or text parts"),
    ],
)  # fmt: skip
def test_what_a_field_may_be_is_told(client, path, field, value, told):
    """All that it may be, not the first of it, and under its own name."""
    start = {"completions": {"prompt": PROMPT}, "chat/completions": {"messages": TALK}, "responses": {"input": "x"}}
    body = start[path]
    error = refused(client.post(f"/v1/{path}", {**body, field: value}), param=field)
    assert told in error["message"]


def test_what_is_no_text_is_named(client):
    lone, headers = "a\udfff", {"content-type": "application/json"}
    said = [{"role": "user", "content": lone}]
    for path, field, value in (
        ("/v1/completions", "prompt", lone), ("/v1/completions", "prompt", ["a", lone]), ("/tokenize", "prompt", lone),
        ("/v1/chat/completions", "messages", said), ("/tokenize", "messages", said), ("/v1/responses", "input", lone),
    ):  # fmt: skip
        body = json.dumps({field: value}).encode()
        error = refused(client.send(("POST", path, {"content": body, "headers": headers}))[0], param=field)
        assert "no UTF-8 text" in error["message"]


def test_a_missing_field_a_near_miss_and_a_removed_one(client):
    assert refused(client.post("/v1/completions", {}), param="prompt")["message"] == "the field prompt is missing"
    assert "max_tokens" in refused(client.post("/v1/completions", {"prompt": "x", "max_token": 3}))["message"]
    removed = refused(client.post("/v1/completions", {"prompt": "x", "guided_choice": ["a"]}), param="guided_choice")
    assert "structured_outputs" in removed["message"]
    assert refused(client.post("/v1/completions", {"prompt": "x", "model": "gpt-9"}), 404)["param"] == "model"


def test_fields_that_are_ignored(client):
    quiet = {"user": "me", "metadata": {"a": [1]}, "store": False, "service_tier": "auto", "safety_identifier": "x"}
    quiet |= {"prompt_cache_key": "k", "prompt_cache_retention": "24h"}
    chat = {"parallel_tool_calls": True, "reasoning_effort": "low", "verbosity": "low", "prediction": None}
    chat |= {
        "top_logprobs": 0,
        "functions": None,
        "function_call": "none",
        "audio": None,
        "web_search_options": None,
        "echo": False,
        "suffix": None,
    }
    assert client.complete({"prompt": PROMPT, "max_tokens": 1, **quiet})
    none = {"suffix": None, "best_of": None, "spaces_between_special_tokens": True}
    assert client.post("/v1/responses", {"input": "x", "max_output_tokens": 1, **none}).status_code == 200
    assert client.chat(
        {"messages": TALK, "max_tokens": 1, **quiet, **chat, "tools": None, "response_format": {"type": "text"}}
    )


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"3", b"null", b'"x"', b"\xff\xfe", b'{"prompt": "\xff"}', b'{"prompt": NaN}',
        b"[" * 100_000, b'{"prompt": ' + b"[" * 100_000,
        b'{"prompt": "x", "metadata": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001,
        b'{"prompt": "x", "temperature": ' + b"9" * 5000 + b"}", b'{"prompt": "x", "temperature": Infinity}',
        '{"prompt": "x"}'.encode("utf-16"), b"\x00", b'{"prompt": "x",}', b"prompt=x",
        b'{"prompt": "x", "prompt": "y"}', b'{"prompt": "x", "logit_bias": {"5": 1, "5": 2}}',
        b'{"prompt": "x", "temperature": 1e999}', b'{"prompt": "x", "\\ud800": 1, "\\ud800": 2}',
    ],
    ids=range(22),
)  # fmt: skip
def test_bodies_that_are_no_json(client, body):
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        headers = {"content-type": "application/json; charset=utf-8"}
        refused(client.send(("POST", path, {"content": body, "headers": headers}))[0])


def test_a_byte_order_mark_says_nothing(client):
    body = b'\xef\xbb\xbf{"prompt": "\xc3\xa9"}'  # as Windows writes files
    answer = client.send(("POST", "/tokenize", {"content": body, "headers": {"content-type": "application/json"}}))[0]
    assert answer.json() == client.post("/tokenize", {"prompt": "é"}).json() and answer.status_code == 200


def test_a_key_that_stands_twice_among_many(client):
    """It is found in one pass: one that compares each with all others would take minutes for these."""
    many = {f"key{i}": 0 for i in range(200_000)}
    body = json.dumps({"prompt": PROMPT, "metadata": many})[:-2] + ', "key77": 1}}'
    kind = {"content-type": "application/json"}
    error = refused(client.send(("POST", "/v1/completions", {"content": body.encode(), "headers": kind}))[0])
    assert "'key77' stands twice" in error["message"]
    more = {"prompt": PROMPT, "metadata": {str(i): 0 for i in range(2**18 + 1)}}
    assert "at most 262144" in refused(client.post("/v1/completions", more))["message"]
    for many in (f'{{"prompt": [{"[5]," * 2**21}[5], 5]}}', f'{{"prompt": "{"," * (2**21 + 1)}"}}'):
        content = {"content": many.encode(), "headers": {"content-type": "application/json"}}
        said = refused(client.send(("POST", "/v1/completions", content))[0])["message"]
        assert said == "the body has 2097153 commas; at most 2097152"
    nested = {"content": b'{"messages": [' + b'{"":[]},' * 2**18 + b"{}]}", "headers": kind}
    said = refused(client.send(("POST", "/v1/chat/completions", nested))[0])["message"]
    assert said == "the body has 524291 opening brackets; at most 524288"


def test_a_bias_that_is_no_number_is_refused():
    """Cut to what a bias may be, it became 100. JSON has no such number; who calls the server's classes may have it."""
    body = CompletionBody.model_validate({"prompt": "x", "logit_bias": {"5": math.nan}})
    with pytest.raises(ConfigError, match="logit_bias maps token ids to numbers, not 5 to nan"):
        body.sampling(Settings(("x",)), 1, 0)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionBody, {"prompt": [1.5] * 1000}), (CompletionBody, {"prompt": [[1.5] * 1000] * 3}),
        (CompletionBody, {"prompt": "x", "stop_token_ids": ["a"] * 1000}), (ChatBody, {"messages": [1] * 1000}),
        (ChatBody, {"messages": TALK, "prediction": {"type": "content", "content": [1] * 1000}}),
        (ResponsesBody, {"input": [1] * 1000}), (DetokenizeBody, {"tokens": ["a"] * 1000}),
        (CompletionBody, {"prompt": "x", "logit_bias": {str(i): [] for i in range(1000)}}),
        (ResponsesBody, {"input": "x", "metadata": {str(i): i for i in range(1000)}}),
    ],
)  # fmt: skip
def test_of_a_million_wrong_items_one_is_told(kind, body):
    """A body of 16 MB would else be answered with gigabytes of memory."""
    with pytest.raises(ValidationError) as found:
        kind.model_validate(body)
    assert found.value.error_count() < 9


@pytest.mark.parametrize("kind", ["text/plain", "", "application/x-www-form-urlencoded", "application/jsonx", "\x00"])
def test_content_types(client, kind):
    answer = client.send(
        ("POST", "/v1/completions", {"content": b'{"prompt": "x"}', "headers": {"content-type": kind}})
    )
    assert "content type" in refused(answer[0])["message"]


def test_bodies_that_are_packed(client):
    packed = gzip.compress(json.dumps({"prompt": PROMPT, "max_tokens": 1}).encode())
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    sent = client.send(("POST", "/v1/completions", {"content": packed, "headers": headers}))[0]
    assert "content-encoding 'gzip'" in refused(sent)["message"]
    plain = {"prompt": PROMPT, "max_tokens": 1}
    assert client.post("/v1/completions", plain, headers={"content-encoding": "identity"}).status_code == 200


def test_a_field_of_a_field_is_named(client):
    body = {"prompt": PROMPT, "stream": True, "stream_options": {"include_usages": True}}
    assert "'include_usages'" in refused(client.post("/v1/completions", body), param="stream_options")["message"]


def test_a_prompt_over_the_context_is_said_as_clients_look_for_it(client):
    """litellm tells by these words that a shorter conversation would do."""
    most = client.llm.llm.engine.max_len
    for prompt in ([5] * most, "a " * (most + 5000)):
        error = refused(client.post("/v1/completions", {"prompt": prompt}))
        assert "this model's maximum context length is" in error["message"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
FIELDS = [
    "n", "temperature", "top_p", "top_k", "min_p", "logit_bias", "seed", "max_tokens", "min_tokens", "stop", "logprobs",
    "stop_token_ids", "stream", "stream_options", "speculative_config", "truncate_prompt_tokens", "cache_salt",
    "priority",
    "echo", "messages", "prompt", "model", "chat_template_kwargs", "top_logprobs", "tools", "response_format",
]  # fmt: skip


@settings(max_examples=30)
@given(
    more=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3),
    path=st.sampled_from(["completions", "chat/completions"]),
)
def test_junk_is_never_our_failure(client, more, path):
    start = {"prompt": PROMPT} if path == "completions" else {"messages": TALK}
    body = json.dumps({**start, "max_tokens": 2, **more}).encode()
    answer = client.send(("POST", f"/v1/{path}", {"content": body, "headers": {"content-type": "application/json"}}))[0]
    if answer.status_code != 200:
        refused(answer, answer.status_code)
        assert answer.status_code in (400, 404, 501)


SURROGATE = "\udc80"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "description": SURROGATE}}}]


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("completions", {"structured_outputs": {"regex": SURROGATE}}),
        ("completions", {"structured_outputs": {"choice": [SURROGATE]}}),
        ("completions", {"structured_outputs": {"grammar": f'start: "{SURROGATE}"'}}),
        ("completions", {"structured_outputs": {"json": {"enum": [SURROGATE]}}}),
        ("completions", {"structured_outputs": {"json": {"$ref": "#"}}}),
        ("completions", {"structured_outputs": {"json": {"type": "object", "properties": {SURROGATE: {}}}}}),
        ("completions", {"structured_outputs": {"regex": "(a{1000}){1000}"}}),
        ("completions", {"stop": SURROGATE}), ("completions", {"cache_salt": SURROGATE}),
        ("completions", {"model": SURROGATE}), ("completions", {"user": SURROGATE, "metadata": {SURROGATE: SURROGATE}}),
        ("chat/completions", {"messages": [{"role": SURROGATE, "content": "x"}]}),
        ("chat/completions", {"messages": [{"role": "user", "content": ""}]}),
        ("chat/completions", {"messages": [{"role": "wizard", "content": "x"}]}),
        ("chat/completions", {"messages": [{"role": "user", "content": None}]}),
        ("chat/completions", {"messages": [{"role": "assistant", "tool_calls": [{}]}]}),
        ("chat/completions", {"messages": [{"role": "tool", "content": [{"type": "image"}]}]}),
        ("chat/completions", {"messages": TALK, "tools": TOOLS}),
        ("chat/completions", {"messages": TALK, "tools": TOOLS, "tool_choice": "required"}),
        ("chat/completions", {"messages": TALK, "chat_template_kwargs": {SURROGATE: 1}}),
        ("chat/completions", {"messages": TALK, "chat_template_kwargs": {"messages": [], "tokenize": True}}),
        ("responses", {"input": SURROGATE}), ("responses", {"input": [{"type": SURROGATE}]}),
        ("responses", {"input": "x", "instructions": SURROGATE}), ("responses", {"input": "x", "tools": [{}]}),
        ("responses", {"input": "x", "tools": [{"type": "function"}]}), ("responses", {"input": [[]]}),
        ("responses", {"input": [{"content": [{"type": "input_image", "image_url": "x"}]}]}),
        ("responses", {"input": "x", "metadata": {"a": SURROGATE}}),
        ("responses", {"input": "x", "text": {"format": 3}}),
    ],
)  # fmt: skip
def test_strange_texts(client, path, more):
    """Half of a character, or nothing, in every place where there is text: an answer, or a refusal."""
    pytest.importorskip("llguidance")
    limit = "max_output_tokens" if path == "responses" else "max_tokens"
    body = json.dumps({**({"prompt": PROMPT} if path == "completions" else {}), limit: 2, **more}).encode()
    answer = client.send(("POST", f"/v1/{path}", {"content": body, "headers": {"content-type": "application/json"}}))[0]
    if answer.status_code != 200:
        refused(answer, answer.status_code)
        assert answer.status_code in (400, 404), answer.text


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given_",
    [
        {"api_keys": "secret"}, {"api_keys": [""]}, {"api_keys": [5]}, {"names": "tiny"}, {"names": []},
        {"cors_origins": "http://x"}, {"max_n": "5"}, {"max_body": -1}, {"max_n": True}, {"drain": "x"},
        {"drain": math.nan}, {"reasoning": 1}, {"chat_template": None}, {"defaults": {"temperature": -5}},
        {"defaults": {"nonsense": 5}}, {"defaults": None}, {"cors_origins": ["http://x", " / "]},
        {"keep_alive": 0}, {"event_interval": 7200}, {"drain": math.inf}, {"stall": math.inf},
        *({"cors_origins": [no]} for no in ("a.example", "http://a.example/b", "http://A.example", "http://*.example")),
    ],
)  # fmt: skip
def test_settings_of_a_file_are_checked(given_):
    """A text where a list belongs would make each of its characters a key; an empty one would let everybody in."""
    with pytest.raises(ConfigError, match=next(iter(given_))) as caught:
        Settings(**{"names": ["tiny"], **given_})
    assert "secret" not in str(caught.value)
    good = Settings(["tiny"], [" a "], cors_origins=["http://good.example/", "*"])
    assert good.api_keys == ("a",) and good.cors_origins == ("http://good.example", "*")


def test_limits(tiny_llm):
    client = Client(
        tiny_llm, max_body=2000, max_n=2, max_stop_strings=1, max_logprobs=1, max_prompts=3, max_prompt_tokens=8
    )
    refused(client.post("/v1/completions", {"prompt": "x" * 3000}), 413)
    refused(client.post("/v1/completions", {"prompt": "x", "n": 3}), param="n")
    refused(client.post("/v1/completions", {"prompt": "x", "stop": ["a", "b"]}), param="stop")
    refused(client.post("/v1/completions", {"prompt": "x", "logprobs": 2}), param="logprobs")
    refused(client.post("/v1/completions", {"prompt": ["x", "y"], "n": 2}))
    many = Client(tiny_llm, max_n=2000)
    refused(many.post("/v1/chat/completions", {"messages": TALK, "n": 1100}), param="n")
    ids = [[5, 6, 7], [8, 9]]
    assert client.post("/v1/completions", {"prompt": ids, "max_tokens": 1}).status_code == 200
    told = refused(client.post("/v1/completions", {"prompt": [*ids, [5] * 4]}), param="prompt")["message"]
    assert "9 tokens" in told and "the 8 of a request" in told
    refused(client.post("/v1/completions", {"prompt": [5] * 5, "n": 2}), param="n")

    async def endless():
        for _ in range(100):
            yield b" " * 100

    kind = {"content-type": "application/json"}
    refused(client.send(("POST", "/v1/completions", {"content": endless(), "headers": kind}))[0], 413)
    client.llm.close()


def test_a_full_queue_says_when_to_come_again(tiny_llm):
    client = Client(tiny_llm, max_queued_requests=0)
    room = tiny_llm.engine_config.max_num_seqs
    body = {"prompt": PROMPT, "max_tokens": 8, "seed": 1}
    answers = client.send(*(("POST", "/v1/completions", {"json": body}) for _ in range(room + 4)))
    full = [answer for answer in answers if answer.status_code != 200]
    assert len(full) == 4
    for answer in full:
        assert refused(answer, 503)["type"] == "ServiceUnavailableError" and int(answer.headers["retry-after"]) > 0
    client.llm.close()


def test_what_a_full_queue_refuses_is_not_even_read(client, monkeypatch, tiny_llm):
    def full(weight: int) -> None:
        raise QueueFull(f"no room for {weight}")

    monkeypatch.setattr(client.llm, "reading", full)
    monkeypatch.setattr(tiny_llm, "encode", fail)
    answer = client.post("/v1/completions", {"prompt": [PROMPT, PROMPT], "n": 2, "truncate_prompt_tokens": 5})
    assert refused(answer, 503)["message"] == "no room for 4"


def test_keys(tiny_llm):
    client = Client(tiny_llm, api_keys=("first", "sécond"))
    body = {"prompt": PROMPT, "max_tokens": 1}
    for path in ("/v1/models", "/v1/models/tiny", "/version", "/ping", "/", "/openapi.json", "/nothing"):
        answer = client.get(path)
        refused(answer, 401)
        assert answer.headers["www-authenticate"].startswith("Basic" if path == "/" else "Bearer")
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        refused(client.post(path, body), 401)
    for path in ("/health", "/metrics", "/health/", "/metrics/"):  # the last two lead to the others
        assert client.get(path, follow_redirects=True).status_code == 200
    for path in ("//health", "/health/x", "/v1/models/", "/v1/models/health"):
        refused(client.get(path, follow_redirects=True), 401)
    for value in ("Bearer first", "bearer  first", "Bearer sécond", "Basic dTpmaXJzdA=="):
        assert client.post("/v1/completions", body, headers={"authorization": value.encode()}).status_code == 200
    assert client.get("/v1/models", headers={"x-api-key": "first"}).status_code == 200
    for value in ("Basic dTpw", "Bearer none"):  # of a proxy before the server, which passes its own on
        both = {"authorization": value, "x-api-key": "first"}
        assert client.get("/v1/models", headers=both).status_code == 200
    for value in (
        "first",
        "Bearer",
        "Bearer second",
        "Bearer firstt",
        "Bearer FIRST",
        "Basic first",
        "Basic Zmlyc3Q=",
        "Token first",
    ):
        refused(client.post("/v1/completions", body, headers={"authorization": value}), 401)
    told = client.get("/openapi.json", headers={"x-api-key": "first"}).json()
    assert {*told["components"]["securitySchemes"]} == {name for each in told["security"] for name in each}
    free = {path for path, verbs in told["paths"].items() for verb in verbs.values() if "security" in verb}
    assert free == {"/health", "/metrics"}
    client.llm.close()


def test_no_origin_unless_told(tiny_llm):
    asked = {"origin": "http://evil.example", "access-control-request-method": "POST"}
    client = Client(tiny_llm)
    answer = client.send(("OPTIONS", "/v1/completions", {"headers": asked}))[0]
    assert answer.status_code == 405 and "access-control-allow-origin" not in answer.headers
    client.llm.close()
    client = Client(tiny_llm, cors_origins=("http://good.example",), api_keys=("k",))
    good = client.send(("OPTIONS", "/v1/completions", {"headers": {**asked, "origin": "http://good.example"}}))[0]
    assert good.status_code == 200 and good.headers["access-control-allow-origin"] == "http://good.example"
    evil = client.send(("OPTIONS", "/v1/completions", {"headers": asked}))[0]
    assert "access-control-allow-origin" not in evil.headers
    client.llm.close()


def test_request_ids(client):
    answer = client.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, headers={"x-request-id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1" and answer.json()["id"] == "cmpl-mine-1"
    for bad in ("a b", "x" * 200, "", "\xe9"):
        answer = client.send(("GET", "/version", {"headers": {"x-request-id": bad.encode("latin-1")}}))[0]
        assert len(answer.headers["x-request-id"]) == 32
    same = [
        (
            "POST",
            "/v1/completions",
            {"json": {"prompt": PROMPT, "seed": i, "max_tokens": 4}, "headers": {"x-request-id": "one"}},
        )
        for i in range(3)
    ]
    assert [answer.status_code for answer in client.send(*same)] == [200] * 3


def test_what_is_nobodys_fault_but_ours(client, monkeypatch, caplog):
    """A bug is 500 without a word of the inside; its trace is in the log."""
    monkeypatch.setattr(client.llm.llm, "encode", lambda *_, **__: 1 / 0)
    error = refused(client.post("/v1/completions", {"prompt": PROMPT}), 500)
    assert "division" not in error["message"] and "ZeroDivisionError" in caplog.text


def test_errors_in_the_stream(client, tiny_llm, monkeypatch):
    """HTTP has said 200: the error is a frame, and [DONE] comes behind it."""

    def fails(seq: Any) -> None:
        raise RuntimeError("secret")

    real = tiny_llm.engine.step_within

    def step(*args: Any, **options: Any) -> Any:
        if any(request.ready > 5 for request in tiny_llm.engine.running):
            fails(None)
        return real(*args, **options)

    monkeypatch.setattr(tiny_llm.engine, "step_within", step)
    frames = client.frames({"prompt": PROMPT, "max_tokens": 50, "ignore_eos": True})
    assert set(frames[-1]) == {"error"} and frames[-1]["error"]["code"] == 503
    assert len(frames) > 1 and all("choices" in frame for frame in frames[:-1])


# --- logs -------------------------------------------------------------------------------------------------------------


def test_log_lines(client, caplog):
    caplog.set_level(logging.INFO, "outrider.serve")
    client.post(
        "/v1/completions",
        {"prompt": "a secret prompt", "max_tokens": 2, "ignore_eos": True},
        headers={"x-request-id": "r1"},
    )
    client.get("/evil%0Ainjected")
    one, two = (record for record in caplog.records if hasattr(record, "fields"))
    about = json.loads(JsonLines().format(one))
    assert about["request_id"] == "r1" and about["status"] == 200 and about["completion_tokens"] == 2
    assert about["prompt_tokens"] > 0 and about["path"] == "/v1/completions" and about["level"] == "info"
    assert "secret" not in json.dumps(about)
    assert "\n" not in Lines().format(two) and "\n" not in JsonLines().format(two)


async def asked(client: Any, gone: asyncio.Event, **more: Any) -> list[Any]:
    """What is sent to a client that goes sooner or later."""
    body = {"prompt": PROMPT, "max_tokens": 5000, "ignore_eos": True, **more}
    return await posted(client, gone, "/v1/completions", body)


async def posted(client: Any, gone: asyncio.Event, path: str, body: Any) -> list[Any]:
    messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    sent = list[Any]()

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode()}
    scope |= {"headers": headers, "query_string": b"", "asgi": {"version": "3.0"}, "http_version": "1.1"}
    scope |= {"scheme": "http", "server": ("test", 80), "client": ("test", 1), "root_path": ""}
    await client.app(scope, receive, send)
    return sent


def test_clients_that_go_are_not_waited_for(client):
    """A handler that awaits is cancelled when its client disconnects, whole answer or stream."""

    async def leave(stream: bool) -> list[Any]:
        gone = asyncio.Event()
        call = asyncio.ensure_future(asked(client, gone, stream=stream))
        while not client.llm.llm.engine.running:
            await asyncio.sleep(0.001)
        gone.set()
        sent = await asyncio.wait_for(call, 5)
        while client.llm.llm.engine.running:
            await asyncio.sleep(0.001)
        return sent

    assert asyncio.run(leave(False)) == []
    stream = asyncio.run(leave(True))
    assert not any(b"[DONE]" in message.get("body", b"") for message in stream)
    assert 'status="499"' in client.get("/metrics").text


def ended(client: Any, monkeypatch: Any, turns: int | None, stream: bool) -> str | None:
    """How the request ends whose client goes so many turns of the loop before it is known to be queued, or never."""
    engine, add, off_loop, requests = client.llm.llm.engine, client.llm.llm.engine.add, client.llm.off_loop, list[Any]()

    def noted(*args: Any, **options: Any) -> Any:
        requests.extend(made := add(*args, **options))
        return made

    async def call() -> None:
        gone = asyncio.Event()

        async def slowly(*args: Any) -> Any:
            found = await off_loop(*args)
            if requests and turns is not None:
                gone.set()
                for _ in range(turns):
                    await asyncio.sleep(0)
            return found

        with monkeypatch.context() as patch:
            patch.setattr(engine, "add", noted)
            patch.setattr(client.llm, "off_loop", slowly)
            await asked(client, gone, stream=stream, deadline=60)
        while engine.running or engine.waiting:  # in this loop, with which all would end
            await asyncio.sleep(0.001)

    asyncio.run(call())
    (request,) = requests
    return request.seq.finish_reason


@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_go_just_when_they_are_queued(client, monkeypatch, stream):
    """`wait_for` of older Pythons gave the answer to nobody."""
    for turns in range(6):
        assert ended(client, monkeypatch, turns, stream) == "abort"


@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_written_is_not_gone_on_with(client, monkeypatch, stream):
    monkeypatch.setattr("outrider.serve.app.Completion", fail)
    assert ended(client, monkeypatch, None, stream) == "abort"


def test_the_echo_of_a_long_body_is_decoded_off_the_loop(client, monkeypatch):
    decode, threads = Server._decode, list[threading.Thread]()

    def noted(*args: Any) -> Any:
        threads.append(threading.current_thread())
        return decode(*args)

    monkeypatch.setattr(Server, "_decode", noted)
    body = {"prompt": [300, 301], "echo": True, "max_tokens": 1, "user": "x" * LONG}
    for stream in (False, True):
        assert client.post("/v1/completions", {**body, "stream": stream}).status_code == 200
    assert len(threads) == 2 and threading.main_thread() not in threads


MUCH = "a " * LONG
MANY = [{"role": "user", "content": MUCH}]
LENGTHY = {
    "/v1/completions": {"prompt": MUCH, "truncate_prompt_tokens": 5, "max_tokens": 1},
    "/v1/chat/completions": {"messages": MANY, "truncate_prompt_tokens": 5, "max_tokens": 1},
    "/v1/responses": {"input": [{"role": "user", "content": "x"}], "max_output_tokens": 1, "user": MUCH},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "user": MUCH},
    "/v1/messages/count_tokens": {"messages": MANY},
    "/tokenize": {"prompt": MUCH},
    "/detokenize": {"tokens": [300] * LONG},
}
WORK = (  # what takes long of a long body
    "app.read", "app.Server._rendered", "app.Server._decode", "messages.MessagesBody.as_chat",
    "responses.ResponsesBody.as_chat",
)  # fmt: skip


@pytest.mark.parametrize("path", LENGTHY)
def test_a_long_body_is_read_off_the_loop_and_a_short_one_at_once(client, monkeypatch, path):
    threads = list[threading.Thread]()

    def noted(work: Any) -> Any:
        return lambda *args, **options: (threads.append(threading.current_thread()), work(*args, **options))[1]

    for name in WORK:
        monkeypatch.setattr(f"outrider.serve.{name}", noted(pkgutil.resolve_name(f"outrider.serve.{name}")))
    assert client.post(path, LENGTHY[path]).status_code == 200
    assert threads and threading.main_thread() not in threads
    client.post(path, {})
    assert threads[-1] is threading.main_thread()


@pytest.mark.parametrize("read_first", [False, True])
@pytest.mark.parametrize("path", LENGTHY)
def test_who_leaves_while_a_long_body_waits_is_not_worked_for(client, monkeypatch, path, read_first):
    """Before it is read, or behind that: then what blocks the lane comes before the next thing that is to be done."""
    real, done = read, list[str]()

    async def leave() -> list[Any]:
        loop, gone, free, busy = asyncio.get_running_loop(), asyncio.Event(), threading.Event(), list[Any]()

        def block() -> None:
            busy.append(asyncio.ensure_future(client.llm.off_loop(free.wait, "text")))

        def noted(*args: Any) -> Any:
            if not read_first:
                done.append("read")
            loop.call_soon_threadsafe(block)
            return real(*args)

        monkeypatch.setattr("outrider.serve.app.read", noted)
        if not read_first:
            block()
        call = asyncio.ensure_future(posted(client, gone, path, LENGTHY[path]))
        while not (busy and client.llm._reading):
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        gone.set()
        try:
            return await asyncio.wait_for(call, 10)
        finally:
            free.set()
            await asyncio.gather(*busy, client.llm.off_loop(lambda: None, "text"))

    for name in WORK[1:]:
        monkeypatch.setattr(f"outrider.serve.{name}", lambda *_, name=name, **__: done.append(name))
    monkeypatch.setattr(client.llm.llm, "encode", lambda *_, **__: done.append("encode"))
    assert asyncio.run(leave()) == [] and done == []


@pytest.mark.parametrize("path", LENGTHY)
def test_long_bodies_wait_for_room(client, monkeypatch, path):
    monkeypatch.setattr("outrider.serve.app.read", fail)

    def full(weight: int) -> None:
        raise QueueFull(f"no room for {weight}")

    monkeypatch.setattr(client.llm, "reading", full)
    answer = client.post(path, LENGTHY[path])
    assert answer.status_code == 503 and answer.json()["error"]["message"] == "no room for 1"
