"""`/v1/responses`: the answers are those of chats, in items and under the names of its events."""

from __future__ import annotations

import json
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from outrider.serve.responses import Respond
from tests.serve.conftest import begins, fail
from tests.serve.test_tools import TOOLS
from tests.serve.test_tools_served import CITY, hermes  # noqa: F401

ROUTE = "/v1/responses"
FLAT: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
EVENT: Any = pydantic.TypeAdapter(ResponseStreamEvent)
TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tell me of the sea."}]


def events_of(client, body: dict[str, Any]) -> list[dict[str, Any]]:
    """A stream's events, each checked; their numbers and names, to the letter."""
    answer = client.post(ROUTE, {**body, "stream": True})
    assert answer.status_code == 200, answer.text
    blocks, events = answer.text.removesuffix("\n\n").split("\n\n"), []
    for i, block in enumerate(blocks):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        EVENT.validate_python(event)
        assert name == f"event: {event['type']}" and event["sequence_number"] == i
        events.append(event)
    assert [e["type"] for e in events[:2]] == ["response.created", "response.in_progress"]
    return events


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    items = [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in response["output"]]
    return {**response, "id": "", "created_at": 0, "completed_at": None, "metrics": None, "output": items}


@pytest.mark.parametrize(
    "given",
    [
        {"input": "Tell me of the sea.", "instructions": "Be brief."},
        {"input": TALK},
        {"input": [{"type": None, "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
                   {"type": "message", "role": "user", "content": [{"type": "input_text", "text": TALK[1]["content"]}]},
                   {"type": "reasoning", "id": "r", "summary": []}]},
    ],
)  # fmt: skip
def test_text(client, tiny_llm, given):
    body = {**given, "max_output_tokens": 12, "seed": 3, "temperature": 0.8, "top_p": 0.9, "store": False}
    answer = client.post(ROUTE, body).json()
    Response.model_validate(answer)
    expected = tiny_llm.chat(TALK, max_tokens=12, seed=3, temperature=0.8, top_p=0.9)
    (item,) = answer["output"]
    assert item["content"][0]["text"] == expected.text and item["role"] == "assistant"
    ended = "completed" if expected.finish_reason == "stop" else "incomplete"
    assert answer["status"] == item["status"] == ended and answer["id"].startswith("resp_")
    assert answer["usage"]["output_tokens"] == len(expected.token_ids)
    assert (answer["temperature"], answer["top_p"], answer["max_output_tokens"]) == (0.8, 0.9, 12)
    events = events_of(client, body)
    assert "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta") == expected.text
    last = events[-1]["response"]
    assert events[-1]["type"] == f"response.{ended}"
    about = {"input_tokens_details": None}  # the second found the prompt in the cache
    assert without_ids(last) | {"usage": last["usage"] | about} == without_ids(answer) | {
        "usage": answer["usage"] | about
    }


def test_all_that_open_responses_asks_for(client):
    """The fields that its schema of a response requires, also while it is written."""
    labels = {"user": "me", "safety_identifier": "s", "prompt_cache_key": "k"}
    body = {"input": "Hello", "max_output_tokens": 4, "stop": "\x00", "presence_penalty": 0.5, **labels}
    events = events_of(client, {**body, "reasoning": {"effort": "low"}, "max_tool_calls": 3})
    for event in (events[0], events[-1]):
        required = """
            id object created_at completed_at status incomplete_details model previous_response_id instructions
            output error tools tool_choice truncation parallel_tool_calls text top_p presence_penalty
            frequency_penalty top_logprobs temperature reasoning user usage max_output_tokens max_tool_calls
            store background service_tier metadata safety_identifier prompt_cache_key
        """
        response = event["response"]
        assert set(required.split()) <= response.keys() and labels.items() <= response.items()
        assert response["presence_penalty"] == 0.5 and response["reasoning"] == {"effort": "low", "summary": None}
    answer = client.post(ROUTE, {"input": "Hello", "max_output_tokens": 4, "ignore_eos": True, "user": 7}).json()
    assert answer["user"] is None and answer["reasoning"]["effort"] is None
    assert answer["status"] == "incomplete" and answer["completed_at"] is None
    answer = client.post(ROUTE, {"input": "Hello", "structured_outputs": {"choice": ["Hi"]}}).json()
    assert answer["status"] == "completed" and 0 <= answer["completed_at"] - answer["created_at"] < 600


def test_an_answer_that_was_cut_off_goes_on(client, tiny_llm):
    """If it is sent back as the last item, as a last message of the assistant's does in Anthropic's words."""
    body = {"input": TALK, "max_output_tokens": 6, "seed": 3, "ignore_eos": True}
    (cut,) = client.post(ROUTE, body).json()["output"]
    assert cut["status"] == "incomplete"

    def prompt(item: Any) -> int:
        return client.post(ROUTE, {**body, "input": [*TALK, item]}).json()["usage"]["input_tokens"]

    talk = [*TALK, {"role": "assistant", "content": cut["content"][0]["text"]}]
    ids = tiny_llm.render(talk, continue_final_message=True, add_generation_prompt=False)
    (more,) = tiny_llm.generate([ids], max_tokens=6, seed=3, ignore_eos=True)
    said = {**body, "input": [*TALK, cut]}
    assert client.post(ROUTE, said).json()["output"][0]["content"][0]["text"] == more.text
    streamed = [e["delta"] for e in events_of(client, said) if e["type"] == "response.output_text.delta"]
    assert "".join(streamed) == more.text
    bare = {"role": "assistant", "content": cut["content"], "status": "in_progress"}
    assert prompt(cut) == prompt(bare) == len(ids)
    for status in ("completed", None):
        assert prompt({**cut, "status": status}) == len(tiny_llm.render(talk)) > len(ids)


def test_what_was_refused_is_text(client):
    """An answer's items may come back as they were, a refusal among them."""

    def answer(part: dict[str, Any]) -> str:
        said = {"type": "message", "role": "assistant", "content": [part]}
        items = [TALK[1], said, {"role": "user", "content": "Why?"}]
        body = {"input": items, "max_output_tokens": 8, "temperature": 0}
        return client.post(ROUTE, body).json()["output"][0]["content"][0]["text"]

    assert answer({"type": "refusal", "refusal": "I can't"}) == answer({"type": "output_text", "text": "I can't"})


def test_json(client):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}, "verbosity": "low"}
    answer = client.post(ROUTE, {"input": "x", "text": form, "seed": 1, "max_output_tokens": 60}).json()
    assert json.loads(answer["output"][0]["content"][0]["text"])["a"] in (1, 2)
    assert answer["text"] == {"format": form["format"]} and answer["incomplete_details"] is None


def test_logprobs_are_the_chats(client):
    body = {"max_output_tokens": 12, "seed": 3, "store": True, "include": ["message.output_text.logprobs"]}
    body |= {"input": TALK, "top_logprobs": 2}
    answer = client.post(ROUTE, body).json()
    Response.model_validate(answer)
    assert answer["store"] is False and answer["top_logprobs"] == 2
    (part,) = answer["output"][0]["content"]
    asked = {"messages": TALK, "max_tokens": 12, "seed": 3, "logprobs": True, "top_logprobs": 2}
    assert part["logprobs"] == client.chat(asked)[0]["choices"][0]["logprobs"]["content"]
    events = events_of(client, {**body, "speculative_config": False})
    spelt = [each for e in events if e["type"] == "response.output_text.delta" for each in e["logprobs"]]
    (done,) = [e for e in events if e["type"] == "response.output_text.done"]
    assert done["logprobs"] == part["logprobs"] and spelt == part["logprobs"][: len(spelt)] and spelt
    bare = client.post(ROUTE, {**body, "top_logprobs": None}).json()["output"][0]["content"][0]
    assert [each["logprob"] for each in bare["logprobs"]] == [each["logprob"] for each in part["logprobs"]]
    assert bare["logprobs"][0]["top_logprobs"] == []


@pytest.mark.usefixtures("hermes")
def test_calls(client):
    body = {
        "input": "x", "tools": [*FLAT, {"type": "web_search"}], "structured_outputs": {"choice": [f"See. {CITY}"]},
        "max_output_tokens": 100,
    }  # fmt: skip
    answer = client.post(ROUTE, body).json()
    Response.model_validate(answer)
    message, call = answer["output"]
    assert message["content"][0]["text"] == "See. " and call["name"] == "get_weather"
    assert json.loads(call["arguments"]) == {"city": "Oslo"} and call["call_id"] and answer["status"] == "completed"
    assert [tool["name"] for tool in answer["tools"]] == ["get_weather", "grow", "now"]
    events = events_of(client, {**body, "speculative_config": False})
    deltas = [e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call["arguments"] and len(deltas) > 2
    assert without_ids(events[-1]["response"])["output"] == without_ids(answer)["output"]
    talk = [{"role": "user", "content": "x"}, *answer["output"]]
    talk.append({"type": "function_call_output", "call_id": call["call_id"], "output": "rain"})
    named = {"type": "function", "name": "now"}
    again = client.post(ROUTE, {"input": talk, "tools": FLAT, "tool_choice": named, "seed": 1, "max_output_tokens": 99})
    assert [item["name"] for item in again.json()["output"]] == ["now"], again.text
    some = {"type": "allowed_tools", "mode": "required", "tools": [named]}
    body = {"input": "x", "tools": FLAT, "tool_choice": some, "parallel_tool_calls": False, "max_output_tokens": 99}
    assert [item["name"] for item in client.post(ROUTE, body).json()["output"]] == ["now"]


@pytest.mark.usefixtures("hermes")
def test_a_call_that_is_cut_off(client):
    """It says so, and one that was whole before the end does not."""
    forced = {"input": "x", "tools": FLAT, "structured_outputs": {"choice": [CITY]}, "max_output_tokens": 100}
    for more, item, whole in (
        ({}, "completed", "completed"),
        ({"stop": ["slo"]}, "incomplete", "incomplete"),
        ({"stop": ["</tool"]}, "completed", "completed"),
    ):
        answer = client.post(ROUTE, {**forced, **more}).json()
        assert (answer["output"][0]["status"], answer["status"]) == (item, whole), answer["output"]
        assert answer["incomplete_details"] is None
        last = events_of(client, {**forced, **more})[-1]
        assert last["type"] == f"response.{whole}"
        assert without_ids(last["response"])["output"] == without_ids(answer)["output"]
    for most in range(1, 100):
        answer = client.post(ROUTE, {**forced, "max_output_tokens": most}).json()
        call = answer["output"][0]
        if call["type"] == "function_call" and call["status"] == "completed":
            break
        assert answer["status"] == "incomplete"
    assert json.loads(call["arguments"]) == {"city": "Oslo"} and answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}


@pytest.mark.usefixtures("hermes")
def test_logprobs_beside_calls(client):
    """Each token's are its message's, whoever guessed it and whatever came together with it."""
    said = f"See. {CITY} So be it."
    body = {
        "input": "x", "tools": FLAT, "structured_outputs": {"choice": [said]}, "top_logprobs": 0,
        "max_output_tokens": 100, "temperature": 0, "include": ["message.output_text.logprobs"],
    }  # fmt: skip
    answer = client.post(ROUTE, body).json()
    first, call, second = answer["output"]
    assert call["type"] == "function_call"
    for message in (first, second):
        part = message["content"][0]
        spelt = "".join(each["token"] for each in part["logprobs"]).removesuffix("<|end|>")
        spelt = spelt.removesuffix("<")  # one token with the space before
        assert spelt == part["text"], (spelt, part["text"])
    for more in ({"speculative_config": False}, {"speculative_config": {"num_speculative_tokens": 1}}):
        events = events_of(client, {**body, **more})
        assert without_ids(events[-1]["response"])["output"] == without_ids(answer)["output"]
        told = [each for e in events if e["type"] == "response.output_text.delta" for each in e["logprobs"]]
        assert told == first["content"][0]["logprobs"] + second["content"][0]["logprobs"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": None}]}, "input"),
        ({"input": [{"type": "function_call", "name": "now", "arguments": "{}"}]}, "input"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "now", "arguments": {}}]}, "input"),
        ({"tools": [{**FLAT[0], "type": "functon"}]}, "tools"), ({"tools": [{"name": "now"}]}, "tools"),
        ({"top_logprobs": 99}, "top_logprobs"), ({"include": "all"}, "include"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"), ({"conversation": "c"}, "conversation"), ({"n": 2}, "n"),
        ({"prompt": {"id": "p"}}, "prompt"), ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "xml"}}}, "text"), ({"text": {"fromat": {"type": "json_object"}}}, "text"),
        ({"text": {"format": {"type": "json_object", "schemas": {}}}}, "text"), ({"temperature": -1}, "temperature"),
        ({"input": [{"type": "item_reference", "id": "m"}]}, "input"), ({"input": 3}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"tools": FLAT}, "tools"), ({"tool_choice": "required"}, "tool_choice"), ({"model": "other"}, "model"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"tools": FLAT, "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": FLAT, "tool_choice": {"type": "function", "function": {"name": "now"}}}, "tool_choice"),
        ({"tools": FLAT, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [5]}}, "tool_choice"),
        ({"tools": FLAT, "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice"),
    ],
)  # fmt: skip
def test_what_cannot_be(client, fields, param):
    answer = client.post(ROUTE, {"input": "x", **fields})
    assert answer.status_code == (404 if param == "model" else 400), answer.text
    assert answer.json()["error"]["param"] == param


def test_a_bound_is_told_by_its_name_here(client):
    answer = client.post(ROUTE, {"input": "x", "max_output_tokens": 1, "min_tokens": 4})
    assert answer.json()["error"]["message"] == "min_tokens (4) must not exceed max_output_tokens (1)"


def test_an_error_on_the_way(client, monkeypatch, tiny_llm):
    with monkeypatch.context() as patch:
        patch.setattr(Respond, "deltas", begins)
        broken = events_of(client, {"input": "x", "max_output_tokens": 4})[-1]
    form = {"type": "json_schema", "name": "x", "schema": {"enum": ["one"]}}
    own = {"input": "x", "min_tokens": 40, "max_output_tokens": 60, "text": {"format": form}}
    told = events_of(client, own)[-1]["response"]["error"]
    assert told["code"] == "invalid_prompt" and told["message"].startswith("every token that structured_outputs allow")
    refused = client.post(ROUTE, own)
    assert refused.status_code == 400 and refused.json()["error"]["param"] is None
    (item,) = broken["response"]["output"]
    assert broken["type"] == "response.failed" and item["status"] == "incomplete" and item["content"][0]["text"] == "a"
    monkeypatch.setattr(tiny_llm.runner.model, "forward", fail)
    events = events_of(client, {"input": "x", "max_output_tokens": 4})
    assert events[-1]["type"] == "response.failed" and events[-1]["response"]["error"]["code"] == "server_error"
    assert client.post(ROUTE, {"input": "x", "max_output_tokens": 4}).status_code == 500


@pytest.mark.usefixtures("hermes")
def test_openais_client(live, tiny_llm):
    made = openai.OpenAI(base_url=f"{live()}/v1", api_key="none", max_retries=0)
    asked: Any = {"model": "tiny", "input": "Tell me of the sea.", "max_output_tokens": 12, "extra_body": {"seed": 3}}
    expected = tiny_llm.chat([{"role": "user", "content": "Tell me of the sea."}], max_tokens=12, seed=3).text
    assert made.responses.create(**asked).output_text == expected
    parts = [e.delta for e in made.responses.create(**asked, stream=True) if e.type == "response.output_text.delta"]
    assert "".join(parts) == expected
    asked |= {"max_output_tokens": 100, "tools": FLAT, "tool_choice": {"type": "function", "name": "get_weather"}}
    with made.responses.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        assert "response.function_call_arguments.done" in kinds
        assert stream.get_final_response().output[0].type == "function_call"

    class Sea(pydantic.BaseModel):
        deep: bool

    parsed = made.responses.parse(
        model="tiny", input="The sea?", text_format=Sea, max_output_tokens=60, extra_body={"seed": 3}
    )
    assert isinstance(parsed.output_parsed, Sea)
