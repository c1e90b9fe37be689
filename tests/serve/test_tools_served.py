"""Tools through the routes: what is asked of the prompt and the output, and what clients see of calls."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from outrider import SamplingParams
from outrider.serve.calls import HERMES, LLAMA, MISTRAL, XLAM
from outrider.serve.tools import check, constraint
from tests.serve.test_tools import TOOLS

TEMPLATE = """{%% if tools %%}<|python_tag|>{%% for t in tools %%}{{ t.function.name }}{%% endfor %%}{%% endif %%}
{%%- for m in messages %%}<|{{ m.role }}|>{{ m.content }}{%% for c in m.tool_calls or [] %%}
{{- %(begin)r }}{"name": "{{ c.function.name }}", "%(arguments)s": {{ c.function.arguments | tojson }}}{{- %(end)r }}
{%%- endfor %%}<|end|>{%% endfor %%}{%% if add_generation_prompt %%}<|assistant|>{%% endif %%}"""
TALK: Any = [{"role": "user", "content": "What now?"}]
ROUTE = "/v1/chat/completions"
CITY = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@pytest.fixture(params=[HERMES, LLAMA, MISTRAL, XLAM], ids=lambda family: family.name)
def family(request, tiny_llm, monkeypatch):
    """The embedded model with a template of each family."""
    monkeypatch.setattr(tiny_llm.tokenizer, "chat_template", TEMPLATE % vars(request.param))
    return request.param


@pytest.fixture
def hermes(tiny_llm, monkeypatch):
    monkeypatch.setattr(tiny_llm.tokenizer, "chat_template", TEMPLATE % vars(HERMES))


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def message_of(frames: list[dict[str, Any]], index: int = 0) -> tuple[str, list[dict[str, Any]], str | None]:
    """Content, calls and end of a stream's choice, put together as clients do."""
    content, calls, reasons = "", list[dict[str, Any]](), list[str]()
    for frame in frames:
        ChatCompletionChunk.model_validate(frame, strict=True)
        for choice in frame["choices"]:
            if choice["index"] != index:
                continue
            content += choice["delta"].get("content") or ""
            for part in choice["delta"].get("tool_calls", ()):
                if part["index"] == len(calls):
                    calls.append({"id": part["id"], "type": part["type"], "function": {**part["function"]}})
                else:
                    calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
            if choice["finish_reason"]:
                reasons.append(choice["finish_reason"])
    assert len(reasons) == 1
    return content, calls, reasons[0]


@pytest.mark.parametrize("choice", ["required", "get_weather"])
def test_forced_calls(client, tiny_llm, family, choice):
    asked = choice if choice == "required" else named(choice)
    body = {"messages": TALK, "tools": TOOLS, "tool_choice": asked, "max_tokens": 200, "seed": 3, "n": 2}
    body |= {"return_token_ids": True}
    answer = client.chat(body)[0]
    ChatCompletion.model_validate(answer, strict=True)
    tools = check(TOOLS, asked)
    tiny_llm.speculative_config = None
    expected = tiny_llm.generate(
        tiny_llm.render(TALK, chat_template_kwargs={"tools": TOOLS}),
        SamplingParams(
            structured_outputs=constraint(tools, family, tiny_llm.tokenizer),
            skip_special_tokens=False, seed=3, max_tokens=200, n=2,
        ),
    )  # fmt: skip
    tiny_llm.speculative_config = {"method": "ngram", "num_speculative_tokens": 4}
    frames = client.frames(body, ROUTE)
    for output, given in zip(expected, answer["choices"], strict=True):
        assert given["token_ids"] == output.token_ids
        message = given["message"]
        ended = "tool_calls" if output.finish_reason == "stop" else "length"
        assert message["content"] is None and given["finish_reason"] == ended
        calls = [call["function"] for call in message["tool_calls"]]
        assert all(call["name"] in tools.callable for call in calls)
        assert json.loads(calls[0]["arguments"]) is not None
        assert all(call["id"] and call["type"] == "function" for call in message["tool_calls"])
        content, streamed, reason = message_of(frames, given["index"])
        assert not content and reason == given["finish_reason"]
        assert [call["function"] for call in streamed] == calls
    assert len({c["id"] for f in answer["choices"] for c in f["message"]["tool_calls"]}) >= 2


def said(text: str, **more: Any) -> dict[str, Any]:
    """A body under which the model says this, of itself as far as tools are concerned."""
    return {
        "messages": TALK,
        "tools": TOOLS,
        "structured_outputs": {"choice": [text]},
        "max_tokens": 200,
        "seed": 1,
        **more,
    }


@pytest.mark.parametrize("more", [{}, {"tool_choice": "auto"}, {"return_token_ids": True, "logprobs": True}])
def test_free_calls_are_found(client, hermes, more):
    text = f"Let me see. {CITY}\n{CITY.replace('Oslo', 'Paris')}"
    answer = client.chat(said(text, **more))[0]["choices"][0]
    assert answer["finish_reason"] == "tool_calls" and answer["message"]["content"] == "Let me see. "
    cities = [json.loads(call["function"]["arguments"])["city"] for call in answer["message"]["tool_calls"]]
    assert cities == ["Oslo", "Paris"]
    frames = client.frames(said(text, **more, speculative_config=False), ROUTE)
    content, calls, reason = message_of(frames)
    assert content == "Let me see. " and reason == "tool_calls"
    assert [call["function"] for call in calls] == [c["function"] for c in answer["message"]["tool_calls"]]
    assert len([f for f in frames if "tool_calls" in f["choices"][0]["delta"]]) > 4  # as they are written
    if "logprobs" in more:
        tokens = [t for f in frames for t in f["choices"][0].get("token_ids", [])]
        assert tokens == answer["token_ids"]
        spelt = [t for f in frames for t in (f["choices"][0]["logprobs"] or {"content": []})["content"]]
        assert spelt == answer["logprobs"]["content"]


def test_one_call_or_none(client, hermes):
    single = client.chat(said(CITY + "\n" + CITY, parallel_tool_calls=False))[0]["choices"][0]
    assert len(single["message"]["tool_calls"]) == 1
    for more in ({"tool_choice": "none"}, {"tools": None}):
        answer = client.chat(said(CITY, **more))[0]["choices"][0]
        assert (
            answer["message"] == {"role": "assistant", "refusal": None, "content": CITY}
            and answer["finish_reason"] == "stop"
        )
    answer = client.chat(said("It is noon."))[0]["choices"][0]
    assert (
        answer["message"] == {"role": "assistant", "refusal": None, "content": "It is noon."}
        and answer["finish_reason"] == "stop"
    )
    other = client.chat(said(CITY, tool_choice="auto", tools=TOOLS[1:]))[0]["choices"][0]
    assert "tool_calls" not in other["message"] and "get_weather" in other["message"]["content"]


def test_pythons_notation(client, tiny_llm, monkeypatch):
    """Calls come whole; of what is cut off nothing is a call; what must be is written in Hermes's way."""
    template = (
        "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% for m in messages %}<|{{ m.role }}|>"
        "{{ m.content }}{% if m.tool_calls %}[{% for c in m.tool_calls %}{{ c.function.name }}({% for k, v in "
        "c.function.arguments.items() %}{{ ', ' if not loop.first }}{{ k }}={{ v | tojson }}{% endfor %}){% endfor %}]"
        "{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    monkeypatch.setattr(tiny_llm.tokenizer, "chat_template", template)
    text = "[get_weather(city='Oslo', days=3), now()]"
    body = said(text, logprobs=True, return_token_ids=True)
    choice = client.chat(body)[0]["choices"][0]
    calls = [call["function"] for call in choice["message"]["tool_calls"]]
    assert calls == [
        {"name": "get_weather", "arguments": '{"city": "Oslo", "days": 3}'}, {"name": "now", "arguments": "{}"}
    ]  # fmt: skip
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    content, streamed, reason = message_of(client.frames({**body, "speculative_config": False}, ROUTE))
    assert not content and reason == "tool_calls" and [call["function"] for call in streamed] == calls
    cut = client.chat({**body, "max_tokens": 6})[0]["choices"][0]
    assert "tool_calls" not in cut["message"] and text.startswith(cut["message"]["content"])
    talk = [*TALK, choice["message"], {"role": "tool", "tool_call_id": "x", "content": "rain"}]
    shown = tiny_llm.tokenizer.decode(client.post("/tokenize", {"messages": talk, "tools": TOOLS}).json()["tokens"])
    assert '[get_weather(city="Oslo", days=3)now()]' in shown
    must = client.chat({"messages": TALK, "tools": TOOLS, "tool_choice": "required", "max_tokens": 200, "seed": 3})[0]
    assert must["choices"][0]["message"]["tool_calls"] and must["choices"][0]["message"]["content"] is None


@pytest.mark.parametrize("stop", ["O", "city", "}", "\n<"])
def test_a_call_that_a_stop_string_cuts_off_is_not_complete(client, hermes, stop):
    body = said(CITY, stop=[stop])
    answer = client.chat(body)[0]["choices"][0]
    _, calls, reason = message_of(client.frames(body, ROUTE))
    assert [call["function"] for call in calls] == [call["function"] for call in answer["message"]["tool_calls"]]
    whole = stop == "\n<"  # between the call and its mark
    assert answer["finish_reason"] == reason == ("tool_calls" if whole else "stop") and answer["stop_reason"] == stop
    if whole:
        assert json.loads(calls[0]["function"]["arguments"]) == {"city": "Oslo"}


def test_calls_that_must_be_go_before_the_form_of_content(client, hermes):
    """As at OpenAI: `response_format` is about the text, and there is none."""
    body = {"messages": TALK, "tools": TOOLS, "tool_choice": named("get_weather"), "seed": 3, "max_tokens": 200}
    plain, formed = client.chat(body, {**body, "response_format": {"type": "json_object"}})
    calls = [each["choices"][0]["message"]["tool_calls"][0]["function"] for each in (plain, formed)]
    assert calls[0] == calls[1] and calls[0]["name"] == "get_weather"


def test_a_form_beside_auto_calls_nothing(client, family, tiny_llm):
    """It is about the whole answer, also where that reads like a call."""
    said = {"name": "now", family.arguments: {}}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": said}}}
    blank = {i: -100 for text, i in tiny_llm.tokenizer.get_vocab().items() if not text.strip("\u0120\u010a\u0109")}
    body = {"messages": TALK, "tools": TOOLS, "response_format": form, "logit_bias": blank}
    (answer,) = client.chat({**body, "max_tokens": 60, "seed": 1})
    message = answer["choices"][0]["message"]
    assert json.loads(message["content"]) == said and not message.get("tool_calls")


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools(client, hermes, mode):
    """All functions are in the prompt, and only those that are allowed are called."""
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named("now")]}}
    body = said(CITY) if mode == "auto" else {"messages": TALK, "tools": TOOLS, "max_tokens": 60, "seed": 1}
    whole, some = client.chat({**body, "max_tokens": 1}, {**body, "tool_choice": allowed, "parallel_tool_calls": False})
    assert whole["usage"]["prompt_tokens"] == some["usage"]["prompt_tokens"]
    calls = [call["function"]["name"] for call in some["choices"][0]["message"].get("tool_calls", ())]
    assert calls == (["now"] if mode == "required" else [])


def test_the_conversation_goes_on(client, tiny_llm, hermes):
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
    talk = [
        *TALK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    answer = client.post("/tokenize", {"messages": talk, "tools": TOOLS}).json()
    text = tiny_llm.tokenizer.decode(answer["tokens"])
    assert CITY in text and "rain" in text and "now" in text.split("What")[0]
    done = client.chat({"messages": talk, "tools": TOOLS, "max_tokens": 1})[0]
    assert done["usage"]["prompt_tokens"] == answer["count"]
    talk[1] = {"role": "assistant", "tool_calls": [call]}  # as some clients write it
    assert client.post("/tokenize", {"messages": talk, "tools": TOOLS}).json()["tokens"] == answer["tokens"]


def test_results_in_another_order_than_their_calls(client, hermes):
    """Templates without ids tell which result is whose by its place: the prompt is that of results in order."""
    calls = [{"id": name, "type": "function", "function": {"name": name}} for name in ("now", "grow")]
    results = [
        {"role": "tool", "tool_call_id": of, "content": said} for of, said in (("now", "noon"), ("grow", "tall"))
    ]
    talk = [*TALK, {"role": "assistant", "content": None, "tool_calls": calls}]
    plain, turned = (client.post("/tokenize", {"messages": [*talk, *r]}).json() for r in (results, results[::-1]))
    assert plain == turned and "tokens" in plain


def test_results_have_the_names_of_their_functions(client, tiny_llm, monkeypatch):
    """FunctionGemma's template refuses those without; OpenAI's have none, and null, as some clients write, is none."""
    must = "{% if 'name' not in m %}{{ raise_exception('a name must be provided') }}{% endif %}of {{ m.name }}: "
    result = "{% if m.role == 'tool' %}" + must + "{% endif %}{{ m.content }}"
    monkeypatch.setattr(tiny_llm.tokenizer, "chat_template", "{% for m in messages %}" + result + "{% endfor %}")
    call = {"id": "c1", "type": "function", "function": {"name": "grow", "arguments": "{}"}}
    talk = [*TALK, {"role": "assistant", "content": None, "tool_calls": [call]}]
    for more in ({}, {"name": None}, {"name": "grow"}):
        back = [*talk, {"role": "tool", "tool_call_id": "c1", "content": "tall", **more}]
        tokens = client.post("/tokenize", {"messages": back}).json()["tokens"]
        assert "of grow: tall" in tiny_llm.tokenizer.decode(tokens)
    used = {"type": "tool_use", "id": "c1", "name": "grow", "input": {}}
    back = [{"role": "assistant", "content": [used]}]
    back.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "tall"}]})
    count = client.post("/v1/messages/count_tokens", {"messages": [*TALK, *back]}).json()
    assert count == {"input_tokens": len(tokens)}


def test_an_empty_list_is_none(client):
    """Whatever the template: some clients always send one."""
    body = {"messages": [{"role": "user", "content": "Where?"}], "max_tokens": 9, "seed": 1, "return_token_ids": True}
    plain, *others = (client.chat({**body, **more})[0]["choices"][0] for more in (
        {}, {"tools": []}, {"tools": [], "tool_choice": "auto"}, {"tools": [], "tool_choice": "none"}
    ))  # fmt: skip
    assert all(choice == plain for choice in others)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools"), ({"tools": "x"}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"), ({"tools": TOOLS, "tool_choice": "some"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": named("nobody")}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "structured_outputs": {"regex": "a"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [5]}]}, "messages"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "thing"}}}],
          "tool_choice": "required"}, "tools"),
    ],
)  # fmt: skip
def test_what_cannot_be(client, hermes, fields, param):
    answer = client.post(ROUTE, {"messages": TALK, "max_tokens": 1, **fields})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_parameters_that_cannot_be_forced(client, hermes):
    """Nobody is shown the grammar that is made of them, but whose they are."""
    odd = {"type": "thing"}, {"$ref": "#/$defs/x"}, {"pattern": "(?=a)b"}, {"multipleOf": 20001}
    words = "thing", "'/$defs/x' does not exist", "look-around", "multipleOf"
    for (own, word), before in product(zip(odd, words, strict=True), (0, 1, len(TOOLS))):
        schema = {"type": "object", "properties": {"x": own}}
        tools = [*TOOLS[:before], {"type": "function", "function": {"name": "odd", "parameters": schema}}]
        answer = client.post(ROUTE, {"messages": TALK, "max_tokens": 1, "tools": tools, "tool_choice": "required"})
        told = answer.json()["error"]["message"]
        assert told.startswith("tools: parameters of 'odd' cannot be used: ") and word in told and " | " not in told


def test_parameters_may_be_named_as_keywords_are(client, hermes):
    parameters = {"type": "object", "properties": {"pattern": {"const": "a"}}, "required": ["pattern"]}
    tools = [{"type": "function", "function": {"name": f"grep{i}", "parameters": parameters}} for i in range(20)]
    answer = client.post(ROUTE, {"messages": TALK, "max_tokens": 1, "tools": tools, "tool_choice": "required"})
    assert answer.status_code == 200, answer.text


def test_a_template_without_tools_says_so(client):
    answer = client.post(ROUTE, {"messages": TALK, "tools": TOOLS, "max_tokens": 1})
    assert answer.status_code == 400 and "template" in answer.json()["error"]["message"]


def test_a_template_that_has_tools_under_another_name(client, tiny_llm, monkeypatch):
    """SmolLM3's, which writes no calls either: its prompts had none of the tools."""
    template = (
        "{% for t in xml_tools or [] %}<tools>{{ t }}</tools><tool_call>{% endfor %}"
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"
    )
    monkeypatch.setattr(tiny_llm.tokenizer, "chat_template", template)
    tokens = client.complete({"messages": TALK, "tools": TOOLS}, path="/tokenize")[0]["tokens"]
    assert "get_weather" in tiny_llm.tokenizer.decode(tokens)
    monkeypatch.setattr(tiny_llm.tokenizer, "chat_template", template.replace("xml_tools", "no_tools"))
    refused = client.post(ROUTE, {"messages": TALK, "tools": TOOLS, "max_tokens": 1})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "tools"


def test_openais_helpers(live, tiny_llm, hermes):
    url = live()
    tools = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    asked: Any = {"messages": TALK, "tools": TOOLS, "model": "tiny", "max_tokens": 200, "seed": 3}
    asked |= {"tool_choice": named("get_weather")}
    whole = tools.chat.completions.create(**asked).choices[0]
    assert whole.finish_reason == "tool_calls" and whole.message.tool_calls
    with tools.chat.completions.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in kinds and "tool_calls.function.arguments.done" in kinds
    assert final.message.tool_calls is not None
    assert final.message.tool_calls[0].function.arguments == whole.message.tool_calls[0].function.arguments


def test_a_template_of_another_way_is_refused(client, tiny_llm, hermes, monkeypatch):
    """Calls in Qwen3-Coder's way would have come as content."""
    other = tiny_llm.tokenizer.chat_template.replace('{"name": "', "<function=")
    assert client.chat({"messages": TALK, "tools": TOOLS, "max_tokens": 2})[0]["choices"]
    monkeypatch.setattr(tiny_llm.tokenizer, "chat_template", other)
    refused = client.post(ROUTE, {"messages": TALK, "tools": TOOLS, "max_tokens": 2})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "tools"
