"""`/v1/messages`: the answers are those of chats, in blocks and under the names of Anthropic's events."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pydantic
import pytest
from anthropic.types import Message, RawMessageStreamEvent, message_count_tokens_params, message_create_params

from outrider.serve.messages import MessagesBody, Say
from tests.serve.conftest import Client, begins, fail
from tests.serve.test_reasoning import THINKS
from tests.serve.test_tools import TOOLS
from tests.serve.test_tools_served import CITY, hermes  # noqa: F401

ROUTE = "/v1/messages"
FLAT: Any = [
    {"name": f["name"], "description": f.get("description"), "input_schema": f.get("parameters") or {"type": "object"}}
    for f in (tool["function"] for tool in TOOLS)
]
EVENT: Any = pydantic.TypeAdapter(RawMessageStreamEvent)
TALK = [{"role": "user", "content": "Tell me of the sea."}]
BODY = {"messages": TALK, "max_tokens": 12, "seed": 3}


def said(block: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [block]}]}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def events_of(client, body: dict[str, Any]) -> list[dict[str, Any]]:
    """A stream's events, each checked, under their names."""
    answer = client.post(ROUTE, {**body, "stream": True})
    assert answer.status_code == 200, answer.text
    events = []
    for block in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
        if events[-1]["type"] != "error":
            EVENT.validate_python(events[-1])
    return events


def put_together(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that events write."""
    (message, *_), blocks = [e["message"] for e in events if e["type"] == "message_start"], list[Any]()
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            assert event["index"] == len(blocks) - 1
            key = delta["type"].removesuffix("_delta").replace("input", "partial")
            blocks[-1]["json" if key == "partial_json" else key] += delta[key]
    (end,) = [e for e in events if e["type"] == "message_delta"]
    for block in blocks:
        if said := block.pop("json"):
            block["input"] = json.loads(said)
    return {**message, **end["delta"], "content": blocks, "usage": end["usage"], "metrics": end["metrics"]}


def alike(a: dict[str, Any], b: dict[str, Any]) -> bool:
    def bare(message: dict[str, Any]) -> Any:
        blocks = [{k: v for k, v in block.items() if k != "id"} for block in message["content"]]
        about = {k: message[k] for k in ("role", "model", "type", "stop_reason", "stop_sequence")}
        return about, blocks, message["usage"]["output_tokens"]

    return bare(a) == bare(b)


@pytest.mark.parametrize("given", [
    {"messages": TALK, "system": "Be brief."},
    {"messages": [{"role": "user", "content": [text("Tell me "), text("of it.")]}],
     "system": [{**text("Be "), "cache_control": {"type": "ephemeral"}}, text("brief.")]},
    {"messages": [*TALK, {"role": "assistant", "content": "The sea is"}]},
])  # fmt: skip
def test_text(client, tiny_llm, given):
    chat = [{"role": "system", "content": "Be brief."}] if "system" in given else []
    said = given["messages"]  # a chat's parts are joined as blocks are
    more = len(said) > 1
    prompt = tiny_llm.render([*chat, *said], continue_final_message=more, add_generation_prompt=not more)
    (expected,) = tiny_llm.generate([prompt], max_tokens=12, seed=3, temperature=0.8, top_k=50)
    body = {**given, "max_tokens": 12, "seed": 3, "temperature": 0.8, "top_k": 50}
    answer = client.post(ROUTE, body).json()
    Message.model_validate(answer)
    assert answer["content"] == [{"type": "text", "text": expected.text}] and answer["id"].startswith("msg_")
    assert answer["stop_reason"] == ("end_turn" if expected.finish_reason == "stop" else "max_tokens")
    assert answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"] == len(prompt)
    assert answer["usage"]["output_tokens"] == len(expected.token_ids)
    assert client.post(f"{ROUTE}/count_tokens", given).json() == {"input_tokens": len(prompt)}
    long = {"messages": [{"role": "user", "content": "word " * 140_000}]}
    assert client.post(f"{ROUTE}/count_tokens", long).json()["input_tokens"] > tiny_llm.engine.max_len
    events = events_of(client, {**body, "speculative_config": False})
    assert alike(put_together(events), answer) and events[-1] == {"type": "message_stop"}
    assert [events[0]["type"], events[1]["type"]] == ["message_start", "content_block_start"]


def test_an_empty_system_prompt_is_none(client, monkeypatch, tiny_llm):
    """Clients that fill in all fields keep the one that the template has."""
    own = "{% if messages[0].role != 'system' %}I am a model.{% endif %}"
    own += "{% for m in messages %}{{ m.content }}{% endfor %}"
    monkeypatch.setattr(tiny_llm.tokenizer, "chat_template", own)
    said = {"messages": [{"role": "user", "content": "Hello."}]}
    counts = [
        client.post(f"{ROUTE}/count_tokens", {**said, **more}).json()["input_tokens"]
        for more in ({}, {"system": ""}, {"system": []}, {"system": "x"})
    ]
    assert counts[0] == counts[1] == counts[2] > counts[3]
    asked = [{"input": "Hello.", "max_output_tokens": 1, **more} for more in ({}, {"instructions": ""})]
    used = [client.post("/v1/responses", body).json()["usage"]["input_tokens"] for body in asked]
    assert used == counts[:2]


def test_what_is_for_anthropics_accounts_is_left_out():
    """Claude Code begins with a block that is another in each conversation, behind which nothing would be cached."""
    system = [text("You are brief."), text(" Be kind.")]
    later = {"role": "system", "content": [text("More.")]}
    bill = text("x-anthropic-billing-header: cc_version=2.1.197.abc; cch=00f1;")
    own = {"system": [bill, *system], "messages": [*TALK, {"role": "system", "content": [bill, *later["content"]]}]}
    own["messages"].append({"role": "system", "content": [bill]})
    as_chat = MessagesBody(**own).as_chat()
    assert as_chat == MessagesBody(system=system, messages=[*TALK, later]).as_chat()
    assert MessagesBody(system=[bill], messages=TALK).as_chat().messages == TALK
    said = MessagesBody(messages=[{"role": "user", "content": [bill]}]).as_chat()
    assert said.messages == [{"role": "user", "content": bill["text"]}]  # who asks about it may


FIRST = """{%- for message in messages %}
{%- if message.role == 'system' and not loop.first %}{{ raise_exception('System message must be first.') }}{% endif %}
{%- if message.role == 'developer' %}{{ raise_exception('Unexpected role.') }}{% endif %}
<|{{ message.role }}|>{{ message.content }}
{%- endfor %}<|assistant|>"""
ANYWHERE = FIRST.replace("and not loop.first", "and false")


def test_a_template_that_wants_the_system_message_first_gets_it_so(client, monkeypatch, tiny_llm):
    """Claude Code writes one behind the user's, Codex several developer's; where they may stand, they stay."""
    monkeypatch.setattr(tiny_llm.tokenizer, "chat_template", FIRST)
    wants = [{"role": "system", "content": "You.\n\nMore."}, {"role": "user", "content": "Help?"}]
    expected = tiny_llm.chat(wants, max_tokens=6, seed=3)
    more = {"role": "system", "content": [text("More.")]}
    asked = {"system": "You.", "messages": [wants[1], more]}
    answer = client.post(ROUTE, {**asked, "max_tokens": 6, "seed": 3}).json()
    assert answer["content"] == [text(expected.text)]
    assert alike(put_together(events_of(client, {**asked, "max_tokens": 6, "seed": 3})), answer)
    count = client.post(f"{ROUTE}/count_tokens", asked).json()
    assert count == {"input_tokens": len(tiny_llm.render(wants))}
    part = {"type": "input_text", "text": "More."}
    developers = [{"role": "developer", "content": "You."}, {"role": "developer", "content": [part]}]
    for own in ({"input": [*developers, wants[1]]}, {"instructions": "You.", "input": [developers[1], wants[1]]}):
        answer = client.post("/v1/responses", {**own, "max_output_tokens": 6, "seed": 3}).json()
        assert answer["output"][0]["content"][0]["text"] == expected.text
    chat = client.post("/v1/chat/completions", {"messages": [wants[1], more]})  # which is taken at its word
    assert chat.status_code == 400 and "System message must be first." in chat.json()["error"]["message"]
    monkeypatch.setattr(tiny_llm.tokenizer, "chat_template", ANYWHERE)
    stay = [{"role": "system", "content": "You."}, wants[1], {"role": "system", "content": "More."}]
    count = client.post(f"{ROUTE}/count_tokens", asked).json()
    assert count == {"input_tokens": len(tiny_llm.render(stay))} != {"input_tokens": len(tiny_llm.render(wants))}


def test_where_it_stops(client):
    answer = client.post(
        ROUTE, {**BODY, "structured_outputs": {"choice": ["one two three"]}, "stop_sequences": ["two"]}
    )
    answer = answer.json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "two")
    assert answer["content"] == [{"type": "text", "text": "one "}]
    answer = client.post(ROUTE, {**BODY, "structured_outputs": {"choice": ["one"]}, "max_tokens": 20}).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    nothing = client.post(ROUTE, {**BODY, "logit_bias": {"1": 100}}).json()
    assert nothing["content"] == [] and nothing["stop_reason"] == "end_turn"


def test_json(client):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form = {"format": {"type": "json_schema", "schema": schema}, "effort": "low"}
    answer = client.post(ROUTE, {**BODY, "output_config": form, "max_tokens": 60}).json()
    assert json.loads(answer["content"][0]["text"])["a"] in (1, 2)


def test_thinking(client, tiny_llm, monkeypatch):
    monkeypatch.setattr(tiny_llm.tokenizer, "chat_template", THINKS)
    said = {"choice": ["<think>\nHm. So.\n</think>\n\nIt is deep."], "after": []}
    body = {**BODY, "structured_outputs": said, "max_tokens": 60}
    answer = client.post(ROUTE, body).json()
    Message.model_validate(answer)
    assert answer["content"] == [
        {"type": "thinking", "thinking": "Hm. So.", "signature": ""}, {"type": "text", "text": "It is deep."},
    ]  # fmt: skip
    events = events_of(client, body)
    assert alike(put_together(events), answer)
    (end,) = [i for i, e in enumerate(events) if e["type"] == "content_block_stop" and e["index"] == 0]
    signed = [i for i, e in enumerate(events) if e.get("delta", {}).get("type") == "signature_delta"]
    assert signed == [end - 1] and events[end - 1]["index"] == 0  # without one @ai-sdk/anthropic forgets the block
    talk = [*TALK, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": "Why?"}]
    as_chat = MessagesBody(messages=talk, thinking={"type": "disabled"}, max_tokens=3).as_chat()
    assert as_chat.messages[1] == {"role": "assistant", "content": "It is deep.", "reasoning": "Hm. So."}
    assert as_chat.chat_template_kwargs == {"enable_thinking": False}
    assert client.post(ROUTE, {"messages": talk, "max_tokens": 3}).status_code == 200
    hidden = client.post(ROUTE, {**body, "include_reasoning": False}).json()
    assert hidden["content"] == answer["content"][1:]


@pytest.mark.usefixtures("hermes")
def test_calls(client):
    body = {
        **BODY, "tools": [*FLAT, {"type": "web_search_20250305", "name": "web_search"}], "max_tokens": 100,
        "structured_outputs": {"choice": [f"See. {CITY}"]},
    }  # fmt: skip
    answer = client.post(ROUTE, body).json()
    Message.model_validate(answer)
    before, call = answer["content"]
    assert before["text"] == "See. " and call["name"] == "get_weather" and call["input"] == {"city": "Oslo"}
    assert answer["stop_reason"] == "tool_use"
    events = events_of(client, {**body, "speculative_config": False})
    assert alike(put_together(events), answer)
    assert sum(e["type"] == "content_block_delta" and "partial_json" in e["delta"] for e in events) > 2
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [text("rain"), text("wind")]}
    back = [*TALK, {"role": "assistant", "content": answer["content"]}]
    back.append({"role": "user", "content": [result, {"type": "text", "text": "And now?"}]})
    as_chat = MessagesBody(messages=back, max_tokens=3).as_chat()
    assert [m["role"] for m in as_chat.messages] == ["user", "assistant", "tool", "user"]
    assert as_chat.messages[2] == {"role": "tool", "tool_call_id": call["id"], "content": "rain\nwind"}
    assert json.loads(as_chat.messages[1]["tool_calls"][0]["function"]["arguments"]) == {"city": "Oslo"}
    odd = CITY.replace('"Oslo"', "NaN")
    odd = client.post(ROUTE, {**body, "structured_outputs": {"choice": [odd]}}).json()["content"]
    assert all(block["type"] == "text" or block["input"] == {} for block in odd)
    choice = {"type": "tool", "name": "now", "disable_parallel_tool_use": True}
    again = client.post(
        ROUTE, {**BODY, "messages": back, "tools": FLAT, "tool_choice": choice, "max_tokens": 99}
    ).json()
    assert [block["name"] for block in again["content"]] == ["now"] and again["stop_reason"] == "tool_use"
    some = client.post(ROUTE, {**BODY, "tools": FLAT, "tool_choice": {"type": "any"}, "max_tokens": 200}).json()
    assert some["content"][0]["type"] == "tool_use"
    cut = client.post(ROUTE, {**BODY, "tools": FLAT, "tool_choice": {"type": "tool", "name": "grow"}, "max_tokens": 12})
    assert cut.json()["stop_reason"] == "max_tokens"
    alone = {"type": "tool_result", "tool_use_id": "a", "content": text("rain")}
    as_chat = MessagesBody(messages=[{"role": "user", "content": [alone]}]).as_chat()
    assert as_chat.messages == [{"role": "tool", "tool_call_id": "a", "content": "rain"}]
    without = client.post(f"{ROUTE}/count_tokens", {"messages": TALK}).json()["input_tokens"]
    assert client.post(f"{ROUTE}/count_tokens", {"messages": TALK, "tools": FLAT}).json()["input_tokens"] > without


def test_all_that_anthropics_client_may_send_is_known():
    """As a field, or among those that are refused if they ask for something."""
    creates, counts = (
        message_create_params.MessageCreateParamsBase,
        message_count_tokens_params.MessageCountTokensParams,
    )
    known = MessagesBody.model_fields.keys() | MessagesBody.pointless
    assert (creates.__annotations__.keys() | counts.__annotations__) - known == set()


def test_threads_are_refused_as_tool_runners_understand(client):
    """Anthropic's SDKs ask for one by default, and by these details go on without."""
    assert client.post(ROUTE, {**BODY, "thread": None}).status_code == 200
    answer = client.post(ROUTE, {**BODY, "thread": {"type": "create"}})
    assert answer.status_code == 400 and answer.json()["error"] == {
        "type": "invalid_request_error",
        "message": "thread: this server keeps no conversations; send all messages",
        "details": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]},
    }


OTHERS = [{"type": "bash_20250124", "name": "bash"}]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_tokens": None}, "max_tokens is missing"), ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"model": "other"}, "does not exist"), ({"temperature": -1}, "temperature"), ({"n": 2}, "'n'"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role must be user or assistant"),
        (said({"type": "image", "source": {}}), "blocks of user"),
        (said({"type": "tool_use", "id": "a", "name": "now", "input": {}}), "user"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"), ({"messages": []}, "messages"),
        (said({"type": "tool_result", "tool_use_id": "a", "content": [5]}), "reads text"),
        ({"system": [{"type": "image"}]}, "system: this model reads text"), ({"system": 5}, "system must be text"),
        ({"tools": FLAT}, "tools"), ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice: type must"), ({"tool_choice": {"type": []}}, "type must"),
        ({"tools": [{"name": "now"}]}, "input_schema"),
        ({"thinking": {"type": "on"}}, "thinking: type must be"), ({"output_config": {"x": 1}}, "no field 'x'"),
        ({"output_config": {"format": {"type": "xml"}}}, "json_schema"), ({"stop_sequences": [5]}, "stop_sequences"),
        ({"output_config": {"format": {"type": "json_schema", "schema": 3}}}, "output_config"),
        ({"stop_sequences": ["a" * 1001]}, "stop_sequences has"), ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"max_token": 3}, "unknown field"), ({"output_config": {"effort": "huge"}}, "output_config"),
        (said({"type": "thinking", "thinking": "a"}, role="system"), "system are text, not"),
        (said({"type": "tool_result", "content": "x"}), "blocks of user"),
        (said({"type": "tool_use", "name": "now", "input": {}}, role="assistant"), "blocks of"),
        ({"stop_sequences": ["a"], "stop": "b"}, "both"), ({"stop": 5}, "stop must be"),
        ({"max_completion_tokens": 5}, "unknown field 'max_completion_tokens'; did you mean 'max_tokens'"),
        ({"reasoning_effort": "low"}, "unknown field 'reasoning_effort'; did you mean 'output_config'"),
        ({"stop": ["a"] * 99}, "stop has"),
        ({"response_format": {"type": "json_object"}}, "unknown field 'response_format'"),
        ({"tools": OTHERS, "tool_choice": {"type": "any"}}, "Anthropic's own types are left out"),
        ({"tools": OTHERS, "tool_choice": {"type": "tool", "name": "bash"}}, "Anthropic's own types are left out"),
        ({"chat_template_kwargs": {"messages": 1}}, "template_kwargs"),
        ({"tool_choice": {"type": "any", "disable_parallel_tool_use": "no"}}, "must be true or false"),
    ],
)  # fmt: skip
def test_what_cannot_be(client, fields, says):
    answer = client.post(ROUTE, {**BODY, **fields})
    assert answer.status_code == (404 if "model" in fields else 400), answer.text
    error = answer.json()["error"]
    assert error["type"] == ("not_found_error" if "model" in fields else "invalid_request_error")
    assert says in error["message"]


def test_an_error_on_the_way(client, monkeypatch, tiny_llm):
    with monkeypatch.context() as patch:
        patch.setattr(Say, "deltas", begins)
        events = events_of(client, BODY)
    assert [e["type"] for e in events] == ["message_start", "error"]
    assert events[-1]["error"]["type"] == "api_error" and "inside" not in events[-1]["error"]["message"]
    monkeypatch.setattr(tiny_llm.runner.model, "forward", fail)
    assert events_of(client, BODY)[-1]["type"] == "error"
    assert client.post(ROUTE, BODY).status_code == 500


@pytest.mark.usefixtures("hermes")
def test_anthropics_client(live, tiny_llm):
    made = anthropic.Anthropic(base_url=live(api_keys=("key",)), api_key="key", max_retries=0)
    asked: Any = {"model": "tiny", "messages": TALK, "max_tokens": 12, "extra_body": {"seed": 3}}
    expected = tiny_llm.chat(TALK, max_tokens=12, seed=3).text
    assert made.messages.create(**asked).content[0].text == expected
    with made.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == expected
        assert stream.get_final_message().stop_reason in ("end_turn", "max_tokens")
    assert made.messages.count_tokens(model="tiny", messages=TALK).input_tokens > 3
    asked |= {"max_tokens": 100, "tools": FLAT, "tool_choice": {"type": "tool", "name": "get_weather"}}
    with made.messages.stream(**asked) as stream:
        (call,) = stream.get_final_message().content
        assert call.type == "tool_use" and "city" in call.input
    with pytest.raises(anthropic.BadRequestError, match="top_p"):
        made.messages.create(**{**asked, "extra_body": {"top_p": 7}})
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=str(made.base_url), api_key="other", max_retries=0).messages.create(**asked)


INPUTS = {  # arguments as they are written, and what a client reads
    "[1]": {}, "{'city': 1}": {}, '{"city": [1,}': {"city": [1]}, '{"city": 1, "city": 2}': {"city": 2},
    '{"days": 1, "city": NaN}': {"days": 1}, '{"days": 1, "city": 1e400}': {"days": 1, "city": 1e40},
    f'{{"city": {[*range(500)]}}}': {"city": [*range(500)]},
}  # fmt: skip


@pytest.mark.usefixtures("hermes")
@pytest.mark.parametrize("said", INPUTS)
def test_inputs_are_what_anthropics_client_can_read(live, said):
    """It raises for pieces that are no JSON; and a whole answer says what a stream does."""
    made = anthropic.Anthropic(base_url=live(), api_key="key", max_retries=0)
    text = CITY.replace('{"city": "Oslo"}', said)
    asked: Any = {"model": "tiny", "messages": TALK, "max_tokens": 2000, "tools": FLAT}
    asked["extra_body"] = {"structured_outputs": {"choice": [text]}}
    with made.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    for message in (streamed, made.messages.create(**asked)):
        assert [block.input for block in message.content] == [INPUTS[said]] and message.stop_reason == "tool_use"


def test_the_gate_speaks_as_the_route_does(tiny_llm):
    client = Client(tiny_llm, api_keys=("key",), max_body=99)
    known = {"headers": {"x-api-key": "key"}}
    for answer, kind in (
        (client.post(ROUTE, BODY), "authentication_error"), (client.get(ROUTE, **known), "invalid_request_error"),
        (client.post(ROUTE, {**BODY, "system": "a" * 99}, **known), "request_too_large"),
    ):  # fmt: skip
        assert answer.json().keys() == {"type", "error"} and answer.json()["error"]["type"] == kind
    client.llm.close()
