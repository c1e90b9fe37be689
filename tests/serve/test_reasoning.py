"""Reasoning: told apart from the answer in any pieces, whole as streamed, and no token is another."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion
from openai.types.responses import Response
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from outrider import SamplingParams
from outrider.grammar import literal
from outrider.serve import app
from outrider.serve.calls import HARMONY, HERMES, TO
from outrider.serve.parser import Harmony, Parser, parse, regrouped
from outrider.serve.reasoning import BRACKETS, CHANNELS, SEED, THINK, Reader, Way, opened, way_of
from outrider.serve.tools import check, constraint, family_of
from tests.serve.conftest import Client
from tests.serve.test_responses import FLAT, events_of, without_ids
from tests.serve.test_tools import TOOLS
from tests.serve.test_tools_served import CITY, message_of, named

ROUTE = "/v1/chat/completions"
TALK: Any = [{"role": "user", "content": "What now?"}]
THINKS = (  # as Qwen3's: free to think, made to by `opens`, kept from it by `enable_thinking`
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{{ reasoning_effort }}"
    "{% for m in messages %}<|{{ 'assistant' if m.role == 'assistant' else 'user' }}|>"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{\"name\": \"{{ c.function.name }}\", \"arguments\": "
    "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}{% if not loop.last or add_generation_prompt %}"
    "<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% elif opens %}<think>\n{% endif %}{% endif %}"
)  # fmt: skip
OPENS = {"chat_template_kwargs": {"opens": True}}


def heard(reader: Any, pieces: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    """Deltas put together as a client does: reasoning, content, calls."""
    reasoning, content, calls = "", "", list[list[str]]()
    for delta in [d for piece in pieces for d in reader.feed(piece)] + reader.finish():
        assert len(delta) == 1 and next(iter(delta.values()))
        reasoning += delta.get("reasoning", "")
        content += delta.get("content", "")
        for part in delta.get("tool_calls", ()):
            if part["index"] == len(calls):
                assert part["id"] and part["type"] == "function"
                calls.append([part["function"]["name"], ""])
            calls[part["index"]][1] += part["function"]["arguments"]
    return reasoning, content, [(name, arguments) for name, arguments in calls]


def test_ways_are_told_by_the_template():
    marks = {"<think>": THINK, "split('</think>')": THINK, "[THINK]": BRACKETS, "think": None, "<|channel|>": None,
             "<seed:think>": SEED, "<|channel|>analysis<|message|> <think>": CHANNELS}  # fmt: skip
    assert [way_of(mark) for mark in marks] == [*marks.values()]
    assert way_of(None) is None and way_of({"default": "<think>"}) is None


@pytest.mark.parametrize(
    ("prompt", "said", "expected"),
    [
        ("<|assistant|>", "", None), ("<|assistant|><think>\n", "", True), ("<|assistant|><think>", "", True),
        ("<|assistant|><think>\n\n</think>\n\n", "", False), ("<|assistant|></think>", "", False),
        ("<|user|>Why <think>?<|end|><|assistant|>", "", None), ("<|user|>Why <think><|end|>\n", "", None),
        ("<|assistant|>The sea", "The sea", False), ("<|assistant|><think>\nThe sea", "The sea ", True),
        ("<|assistant|><think> The", "<think> The", True), ("<think>a</think>b", "<think>a</think>b", False),
        ("<|assistant|><think>\n\n</think>\n\nThe", "The", False), ("a <think> b", "a <think> b", False),
        ("", "", None),
    ],
)  # fmt: skip
def test_where_an_answer_begins(prompt, said, expected):
    assert opened(THINK, prompt, said) is expected


READ = [  # opened, text, reasoning, content
    (None, "<think>\nHm.\n</think>\n\nHello.", "Hm.", "Hello."), (None, " \n<think>a</think>b", "a", "b"),
    (None, "Hello <think>a</think>", "", "Hello <think>a</think>"), (None, "", "", ""), (None, " \n", "", " \n"),
    (None, " <b>x</b>", "", " <b>x</b>"), (None, "<thi", "", "<thi"), (None, "<think>", "", ""),
    (None, "<think>\n\n</think>\n\n", "", ""), (None, "<think></think> x </think>", "", "x </think>"),
    (None, "<think>a < b </th <think> c", "a < b </th <think> c", ""),
    (None, "<think>a\n\nb \n</th", "a\n\nb \n</th", ""),
    (True, "Hm.\n</think>\n\nHello.", "Hm.", "Hello."), (True, "<think>\nHm.</think>Hello.", "Hm.", "Hello."),
    (True, "Hm", "Hm", ""), (True, "", "", ""), (True, "\n</think>\n", "", ""), (True, "<th", "<th", ""),
    (True, "a</think>\n<think>b</think>", "a", "<think>b</think>"), (True, "  a  \n", "a", ""),
    (False, "<think>\na</think>", "", "<think>\na</think>"), (False, "\n Hello", "", "\n Hello"),
]  # fmt: skip


@pytest.mark.parametrize(("begun", "text", "reasoning", "content"), READ)
@pytest.mark.parametrize("way", [THINK, BRACKETS, SEED])
def test_reasoning_is_told_apart_in_any_pieces(way, begun, text, reasoning, content):
    def own(said: str) -> str:
        for mark in (THINK.begin, THINK.end, "<thi", "</th"):
            its = way.end if "/" in mark else way.begin
            said = said.replace(mark, its if mark.endswith(">") else its[: len(mark)])
        return said

    text = own(text)
    expected = own(reasoning), own(content), []
    for size in range(1, len(text) + 2):
        assert heard(Reader(way, begun), [text[i : i + size] for i in range(0, len(text), size)]) == expected
    for at in range(len(text)):
        for to in range(at, len(text)):
            assert heard(Reader(way, begun), [text[:at], text[at:to], text[to:]]) == expected


PARTS = ["<think>", "</think>", "<tool_call>", CITY, "\n", " ", "a", "<", "</", "think>", "Well. "]


@settings(max_examples=200)
@given(
    st.sampled_from([True, False, None]),
    st.lists(st.sampled_from(PARTS), max_size=9),
    st.lists(st.integers(1, 9), min_size=1),
)
def test_pieces_make_no_difference(begun, parts, sizes):
    """With calls as without; nothing but white space and the two marks is lost."""
    text, pieces = "".join(parts), list[str]()
    while rest := text[sum(map(len, pieces)) :]:
        pieces.append(rest[: sizes[len(pieces) % len(sizes)]])
    for functions in (None, {"get_weather": {}}):

        def found(cut: list[str], functions: Any = functions) -> Any:
            return heard(Reader(THINK, begun, Parser(HERMES, functions) if functions else None), cut)

        assert found(pieces) == found(list(text)) == found([text])
    reasoning, content, _ = heard(Reader(THINK, begun), pieces)
    lost = len("".join(text.split())) - len("".join((reasoning + content).split()))
    assert lost in (0, len(THINK.begin), len(THINK.end), len(THINK.begin + THINK.end))


def test_calls_are_looked_for_behind_reasoning():
    text = f"<think>I write {CITY}.</think>\n\nSo: {CITY}"
    reasoning, content, calls = heard(Reader(THINK, None, Parser(HERMES, {"get_weather": {}})), list(text))
    assert reasoning == f"I write {CITY}." and content == "So: " and [name for name, _ in calls] == ["get_weather"]


FENCED = f"```\n{CITY}\n```"


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "count"),
    [
        (CITY, "", "", 1), (f"I look.\n\n{CITY}\n{CITY}\n", "I look.", "", 2), (CITY[:-29], CITY[:-29], "", 0),
        (f"Call <tool_call> so: {CITY} or {CITY}", f"Call <tool_call> so: {CITY} or", "", 1),
        (f"As in {FENCED}, so:\n{CITY}", f"As in {FENCED}, so:", "", 1), (FENCED, FENCED, "", 0),
        (f"Hm. {CITY} No.", f"Hm. {CITY} No.", "", 0), (f"{CITY}\n</think>\n\nHello.", CITY, "Hello.", 0),
        (f"{CITY} No.</think>{CITY}", f"{CITY} No.", "", 1), (f"{CITY}</thi", f"{CITY}</thi", "", 0),
        ("Hm. <tool_call>", "Hm. <tool_call>", "", 0), ("Hm. <tool", "Hm. <tool", "", 0),
        (f"{'<tool_call>' * 31}{CITY}", "<tool_call>" * 31, "", 1), (f"{'<tool_call>' * 32}{CITY}",) * 2 + ("", 0),
        (CITY.replace("get", "forget"), CITY.replace("get", "forget"), "", 0),
    ],
)  # fmt: skip
def test_calls_in_reasoning_that_was_not_closed(text, reasoning, content, count):
    """They are calls if an answer ends with them, and were thought of otherwise."""
    for size in (1, 2, 3, 7, 40, len(text)):
        reader = Reader(THINK, True, Parser(HERMES, {"get_weather": {}}))
        found = heard(reader, [text[at : at + size] for at in range(0, len(text), size)])
        assert found[:2] == (reasoning, content) and len(found[2]) == reader.calls == count and not reader.broken
    forced = Reader(THINK, True, Parser(HERMES, {"get_weather": {}}, forced=True))
    assert "</think>" in text or not heard(forced, [text])[2]


def test_reasoning_that_mentions_calls_does_not_wait():
    reader = Reader(THINK, True, Parser(HERMES, {"get_weather": {}}))
    assert regrouped(reader.feed(f"I {CITY}"))[0] == "" and reader.feed(" or <tool_call> or")
    assert [delta["reasoning"] for c in " not" for delta in reader.feed(c)] == [" n", "o", "t"]


# --- gpt-oss's channels -----------------------------------------------------------------------------------------------

THOUGHT, FINAL = "<|channel|>analysis<|message|>", "<|start|>assistant<|channel|>final<|message|>"
HEAD = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>"
NEXT = "<|end|><|start|>assistant"
MESSAGES = [  # text, reasoning, content, calls
    (f"{THOUGHT}Hm.<|end|>{FINAL}Hello.", "Hm.", "Hello.", []),
    (f"{THOUGHT}Hm.<|end|>{FINAL}Hello.<|return|>", "Hm.", "Hello.", []),
    (f"{THOUGHT}Hm. <", "Hm. <", "", []), (f"{THOUGHT}Hm.<|end|><|start|>assis", "Hm.", "", []), ("", "", "", []),
    ("<|channel|>final<|message|> a <|b ", "", " a <|b ", []), ("<|channel|>fin", "", "", []),
    (f"{THOUGHT}Hm.{FINAL}Hello.", "Hm.", "Hello.", []),
    (f"{THOUGHT}Hm.<|channel|>final<|message|>Hello.", "Hm.", "Hello.", []),
    (f"{THOUGHT}a{NEXT}{THOUGHT}b{NEXT}{HEAD}{{}}", "a\nb", "", [("now", "{}")]),
    (f'{THOUGHT}a{NEXT}{HEAD}{{"a": 1}}<|call|>', "a", "", [("now", '{"a": 1}')]),
    (' to=functions.now<|channel|>commentary json<|message|>{"a": 1}<|call|>', "", "", [("now", '{"a": 1}')]),
    (f"<|channel|>commentary<|message|>I look.{NEXT}{HEAD}{{}}<|call|>", "", "I look.", [("now", "{}")]),
    (f"<|channel|>commentary<|message|>First.<|end|>{FINAL}Then.", "", "First.\nThen.", []),
    (f"{HEAD}{{}}{NEXT}{HEAD}<|call|>", "", "", [("now", "{}"), ("now", "{}")]), (HEAD[:40], "", "", []),
    (HEAD, "", "", [("now", "")]), ('{"a": 1}', "", '{"a": 1}', []), ("to be", "", "to be", []),
    (" <|x|> ", "", " <|x|> ", []),
    ("<|channel|>commentary to=functions.then <|constrain|>json<|message|>{}", "", "{}", []),
    ("<|channel|>commentary to=python<|message|>1+1", "", "1+1", []),
    ("<|channel|>commentary to=now <|constrain|>json<|message|>{}", "", "", [("now", "{}")]),
    ("<|channel|>analysis to=functions.now<|message|>{}", "", "", [("now", "{}")]),
    ("<|channel|>" + "a" * 999, "", "<|channel|>" + "a" * 999, []),
    # headers without their end
    (f'{THOUGHT}Hm.{NEXT}<|channel|>final {{"a": 1}}', "Hm.", '{"a": 1}', []),
    (f"<|channel|>analysis He asks.{NEXT}<|channel|>final So to=5 <|end|>", "He asks.", "So to=5 ", []),
    (f"<|channel|>analysis<|end|>{FINAL}Hello.", "", "Hello.", []), ("<|channel|>final<|return|>", "", "", []),
    (f"<|channel|>commentary to=functions.now {{}}{NEXT}<|channel|>final<|message|>Hello.", "", "Hello.", []),
    (f"<|start|>assistant<|end|>{FINAL}Hello.", "", "Hello.", []), ("<|channel|>commentary t", "", "", []),
    ("<|channel|>analysis a <|start|>assistant<|channel|>final b", "a ", "b", []),
    ("<|channel|>final <|constrain|>json {}<|end|>", "", "{}", []),
    ("<|channel|>final " + "a" * 999 + NEXT + HEAD, "", "a" * 999, [("now", "")]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "reasoning", "content", "calls"), MESSAGES)
def test_messages_are_told_apart_in_any_pieces(text, reasoning, content, calls):
    cuts = [[text[i : i + size] for i in range(0, len(text), size)] for size in range(1, min(60, len(text) + 2))]
    cuts += [[text[:at], text[at:]] for at in range(len(text))]
    for cut in cuts:
        assert heard(Harmony({"now": {}}), cut) == (reasoning, content, calls)


WORDS = [
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "assistant",
    "analysis",
    "final",
    "commentary",
]
WORDS += [" to=functions.now", "<|constrain|>", " t", " ", "<", "<|st", "|>", "{}", "text", "a" * 300, "b" * 211]


@settings(max_examples=300)
@given(st.lists(st.sampled_from(WORDS), max_size=12), st.lists(st.integers(1, 99), min_size=1))
def test_pieces_of_messages_make_no_difference(words, sizes):
    text, pieces = "".join(words), list[str]()
    while rest := text[sum(map(len, pieces)) :]:
        pieces.append(rest[: sizes[len(pieces) % len(sizes)]])
    whole = heard(Harmony({"now": {}}), [text])
    assert heard(Harmony({"now": {}}), pieces) == heard(Harmony({"now": {}}), list(text)) == whole


def test_whether_a_message_that_calls_was_cut_off():
    for said, broken in (('{"a": 1}', False), ('{"a": ', True), ("", True), ('{"a": 1}<|call|>', False)):
        reader = Harmony({"now": {}})
        heard(reader, [HEAD + said])
        assert reader.calls == 1 and reader.broken is broken
    for said, broken in (("", False), ("[1]", False), ('{"a": ', True)):  # by a token, which is no text
        reader = Harmony({"now": {}})
        deltas = [*reader.feed(HEAD + said), *reader.finish(closed=True)]
        assert regrouped(deltas)[1][0]["function"]["arguments"] == (said if broken else "{}")
        assert reader.broken is broken
    reader = Harmony({"now": {}})
    reader.feed(THOUGHT)
    assert reader.thinking
    reader.feed("Hm.<|end|>")
    assert not reader.thinking


CHANNELLED = (  # in the manner of gpt-oss's
    "<|start|>system<|message|># Valid channels: analysis, commentary, final.<|end|>{% if tools %}<|start|>developer"
    "<|message|>{% for t in tools %}functions.{{ t.function.name }}\n{% endfor %}<|end|>{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.thinking %}"
    "{% if m.content and m.tool_calls %}{{ raise_exception('one of the two') }}{% endif %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "{% if m.tool_calls %}{% set c = m.tool_calls[0].function %}"
    "<|start|>assistant to=functions.{{ c.name }}<|channel|>commentary json<|message|>"
    "{{ c.arguments | tojson }}<|call|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{% if not loop.last or add_generation_prompt %}<|end|>{% endif %}{% endif %}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
SPECIAL = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "[THINK]", "[/THINK]"


def test_the_family_is_told_by_the_template(tiny_llm):
    assert family_of(CHANNELLED, tiny_llm.render_text) is HARMONY and way_of(CHANNELLED) is CHANNELS
    assert family_of(CHANNELLED.replace(" to=", " for="), tiny_llm.render_text) is None
    content, calls = parse(f"{HEAD}{{}}", HARMONY, {"now": {}})
    assert content is None and [call["function"]["name"] for call in calls] == ["now"]


@pytest.fixture
def special(tiny_llm, monkeypatch):
    """The embedded model with special tokens in place of words; `<|return|>` and `<|call|>` end its texts."""
    made = json.loads(tiny_llm.tokenizer.backend_tokenizer.to_str())
    vocab, merges = made["model"]["vocab"], made["model"]["merges"]
    names = {name: 8191 - i for i, name in enumerate(SPECIAL)} | {"<|call|>": 1, "<|return|>": 5}
    words = {token: word for word, token in vocab.items()}
    for token in names.values():
        merges[:] = [merge for merge in merges if "".join(merge) != words[token]]
        vocab.pop(words[token])
    vocab.update(names)
    made["added_tokens"] = [each for each in made["added_tokens"] if each["id"] not in names.values()]
    tokenizer = Tokenizer.from_str(json.dumps(made))
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in names])
    own = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|return|>", bos_token="<|bos|>")
    assert {name: own.convert_tokens_to_ids(name) for name in names} == names and len(own) == 8192
    own.chat_template = CHANNELLED
    monkeypatch.setattr(tiny_llm, "tokenizer", own)
    monkeypatch.setattr(tiny_llm.engine, "tokenizer", own)
    return own


def says(tokenizer: Any, text: str, **more: Any) -> dict[str, Any]:
    """A body under which the model says this, special tokens and all."""
    grammar = "start: " + literal(text, tokenizer.get_added_vocab())
    return {
        "messages": TALK,
        "structured_outputs": {"grammar": grammar, "after": []},
        "max_tokens": 200,
        "seed": 1,
        **more,
    }


def both(client: Client, body: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A whole answer's choice and usage; a stream says the same."""
    answer = client.chat(body)[0]
    ChatCompletion.model_validate(answer)
    frames = client.frames({**body, "stream_options": {"include_usage": True}, "speculative_config": False}, ROUTE)
    usage = frames.pop()["usage"]
    for choice in answer["choices"]:
        content, calls, reason = message_of(frames, choice["index"])
        deltas = [c["delta"] for f in frames for c in f["choices"] if c["index"] == choice["index"]]
        message = choice["message"]
        assert "".join(d.get("reasoning", "") for d in deltas) == message.get("reasoning", "")
        assert content == (message["content"] or "") and reason == choice["finish_reason"]
        assert [c["function"] for c in calls] == [c["function"] for c in message.get("tool_calls", [])]
        kinds = [key for d in deltas for key in ("reasoning", "content", "tool_calls") if d.get(key)]
        assert "analysis" in str(body) or kinds == sorted(kinds, key=["reasoning", "content", "tool_calls"].index)
    for each in (usage, answer["usage"]):
        each["reasoning"] = each.get("completion_tokens_details", {}).get("reasoning_tokens")
    assert all(usage[key] == answer["usage"][key] for key in ("completion_tokens", "reasoning"))
    return answer["choices"][0], answer["usage"]


def test_gpt_oss_served(special, client):
    text = f"{THOUGHT}I think.<|end|>{FINAL}Hello there."
    choice, usage = both(client, says(special, text, return_token_ids=True, logprobs=True))
    assert choice["message"] == {
        "role": "assistant",
        "refusal": None,
        "content": "Hello there.",
        "reasoning": "I think.",
    }
    assert choice["finish_reason"] == "stop" and len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    assert special.decode(choice["token_ids"][:-1]) == text
    inside = len(special("I think.", add_special_tokens=False)["input_ids"])
    assert usage["completion_tokens_details"] == {"reasoning_tokens": inside}
    (plain,) = Client(client.llm.llm, reasoning=False).chat(says(special, text, return_token_ids=True))
    assert plain["choices"][0]["token_ids"] == choice["token_ids"]
    assert plain["choices"][0]["message"]["content"] == "analysisI think.assistantfinalHello there."
    cut, usage = both(client, says(special, text, max_tokens=8))
    assert cut["message"]["content"] is None and "I think.".startswith(cut["message"]["reasoning"])
    assert cut["finish_reason"] == "length" and usage["completion_tokens_details"]["reasoning_tokens"] > 0
    for before in ("Hello", "Is a <"):  # which may begin a mark, and is the prompt's
        gone_on = [*TALK, {"role": "assistant", "content": before}]
        body = says(special, " there.", messages=gone_on, continue_final_message=True)
        assert both(client, body)[0]["message"] == {"role": "assistant", "refusal": None, "content": " there."}


def test_gpt_oss_in_items(special, client):
    texts = ["commentary<|message|>I look.", "analysis<|message|>Hm.", "final<|message|>Hello."]
    body = says(special, f"{NEXT}".join(f"<|channel|>{text}" for text in texts), input="x", messages=None)
    body |= {"max_output_tokens": body.pop("max_tokens"), "include": ["message.output_text.logprobs"]}
    del body["messages"]
    answer = respond(client, body)
    said = [(item["type"], item["content"][0]["text"]) for item in answer["output"]]
    assert said == [("message", "I look."), ("reasoning", "Hm."), ("message", "Hello.")]
    for item in answer["output"][::2]:
        spelt = "".join(each["token"] for each in item["content"][0]["logprobs"])
        assert spelt.removesuffix("<|return|>").removesuffix("<|call|>") == item["content"][0]["text"]
    choice, _ = both(client, says(special, f"{NEXT}".join(f"<|channel|>{text}" for text in texts)))
    assert choice["message"] == {"role": "assistant", "refusal": None, "content": "I look.\nHello.", "reasoning": "Hm."}


def test_gpt_oss_calls(special, client, tiny_llm):
    body = says(special, f'{THOUGHT}Rain?{NEXT}{HEAD.replace("now", "get_weather")}{{"city": "Oslo"}}', tools=TOOLS)
    choice, _ = both(client, body)
    (call,) = choice["message"]["tool_calls"]
    assert choice["message"]["reasoning"] == "Rain?" and choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls" and call["function"]["name"] == "get_weather"
    empty, _ = both(client, says(special, HEAD.replace("now", "get_weather"), tools=TOOLS))
    assert empty["finish_reason"] == "tool_calls" and empty["message"]["tool_calls"][0]["function"]["arguments"] == "{}"
    text = f"{FINAL}\n\n{NEXT} to=functions.get_weather<|channel|>analysis code<|message|>{{}}"
    other, usage = both(client, says(special, text, tools=TOOLS))  # both compares with the stream
    assert (
        other["message"]["content"] is None and other["message"]["tool_calls"] and "reasoning" not in other["message"]
    )
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 0
    talk = [*TALK, choice["message"], {"role": "tool", "tool_call_id": call["id"], "content": "rain"}]
    shown = special.decode(client.post("/tokenize", {"messages": talk, "tools": TOOLS}).json()["tokens"])
    assert f"{THOUGHT}Rain?{NEXT} to=functions.get_weather<|channel|>commentary json<|message|>" in shown
    talk[1] |= {"content": "I look."}  # which the template does not take beside reasoning
    assert client.post("/tokenize", {"messages": talk, "tools": TOOLS}).status_code == 200
    for asked in ("required", named("get_weather")):
        tools = check(TOOLS, asked)
        assert tools
        grammar = replace(constraint(tools, HARMONY, special), after=[THOUGHT, NEXT])
        forced = {"messages": TALK, "tools": TOOLS, "tool_choice": asked, "seed": 3, "max_tokens": 200}
        choice, _ = both(client, {**forced, "return_token_ids": True})
        tiny_llm.speculative_config = None
        (plain,) = tiny_llm.generate(
            [tiny_llm.render(TALK, chat_template_kwargs={"tools": TOOLS})],
            SamplingParams(structured_outputs=grammar, seed=3, max_tokens=200),
        )
        assert plain.token_ids == choice["token_ids"]


@pytest.mark.parametrize("asked", ["form", "required"])
def test_gpt_oss_may_think_first(special, client, asked):
    """And may not; then comes what must."""
    likely = special("<|end|>final", add_special_tokens=False)["input_ids"]
    bias, seen = {str(likely[0]): 12, str(likely[1]): 4}, set[bool]()
    bare = {"messages": TALK, "max_tokens": 400, "return_token_ids": True, "logit_bias": bias}
    bare |= {"response_format": FORMAT} if asked == "form" else {"tools": TOOLS, "tool_choice": asked}
    for seed in range(40):
        choice, _ = both(client, {**bare, "seed": seed})
        message, text = choice["message"], special.decode(choice["token_ids"])
        thinks = text.startswith(THOUGHT)
        seen.add(thinks)
        thought, _, rest = text.removeprefix(THOUGHT).partition(NEXT) if thinks else ("", "", text)
        assert message.get("reasoning", "") == thought.rstrip() or not thought.strip()
        if asked == "form":
            assert rest.startswith(FINAL.removeprefix("<|start|>assistant")) and choice["finish_reason"] == "stop"
            assert json.loads(message["content"])["a"] in (1, 2)
        else:
            assert rest.lstrip().startswith(TO) and " <|constrain|>json<|message|>{" in rest
            assert message["tool_calls"] and message["content"] is None
        if len(seen) == 2:
            break
    assert seen == {True, False}


def test_marks_that_are_special_tokens(special, client):
    special.chat_template = "[THINK]" + THINKS.replace("<|end|>", "<|return|>").replace("<think>", "-")
    special.chat_template = special.chat_template.replace("</think>", "-").replace("reasoning_content", "nothing")
    choice, usage = both(client, says(special, "[THINK]I think.[/THINK]Hello."))
    assert choice["message"] == {"role": "assistant", "refusal": None, "content": "Hello.", "reasoning": "I think."}
    inside = len(special("I think.", add_special_tokens=False)["input_ids"])
    assert usage["completion_tokens_details"] == {"reasoning_tokens": inside}
    special.chat_template = special.chat_template.replace("reasoning_effort", "nothing")
    talk = [*TALK, choice["message"], *TALK]
    shown = special.decode(client.post("/tokenize", {"messages": talk}).json()["tokens"])
    assert "[THINK]I think.[/THINK]Hello." in shown


# --- between marks of text --------------------------------------------------------------------------------------------


@pytest.fixture
def thinks(tiny_llm, monkeypatch):
    """The embedded model with a template of a model that reasons."""
    monkeypatch.setattr(tiny_llm.tokenizer, "chat_template", THINKS)


def said(text: str, **more: Any) -> dict[str, Any]:
    """A body under which the model says this, marks and all."""
    asked = {"choice": [text], "after": []}
    return {"messages": TALK, "structured_outputs": asked, "max_tokens": 200, "seed": 1, **more}


CASES = {
    "of itself": ("<think>\nHm.\n</think>\n\nHello.", {}, "Hm.", "Hello."), "not at all": ("Hello.", {}, "", "Hello."),
    "opened": ("Hm.\n</think>\n\nHello.", OPENS, "Hm.", "Hello."), "never ended": ("Hm.", OPENS, "Hm.", None),
    "only that": ("Hm.</think>", OPENS, "Hm.", None), "nothing": ("\n</think>\nHello.", OPENS, "", "Hello."),
    "switched off": ("<think>Hm", {"chat_template_kwargs": {"enable_thinking": False}}, "", "<think>Hm"),
    "no effort": ("<think>Hm", {"reasoning_effort": "none"}, "", "<think>Hm"),
    "effort": ("<think>Hm", {"reasoning_effort": "low"}, "Hm", None),
    "stopped": ("Hm. So what</think>Hello.", {**OPENS, "stop": ["So"]}, "Hm.", None),
    "in the middle": ("Hello <think>x</think>", {}, "", "Hello <think>x</think>"),
    "stopped behind": ("Hm.</think>Hello you.", {**OPENS, "stop": ["you", "none of this ever"]}, "Hm.", "Hello "),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_served(client, thinks, name):
    text, more, reasoning, content = CASES[name]
    body = said(text, **more, return_token_ids=True, logprobs=True)
    choice, usage = both(client, body)
    message = {"role": "assistant", "refusal": None, "content": content} | (
        {"reasoning": reasoning} if reasoning else {}
    )
    assert choice["message"] == message and len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    (plain,) = Client(client.llm.llm, reasoning=False).chat(body)
    for key in ("token_ids", "logprobs", "finish_reason", "stop_reason"):
        assert plain["choices"][0][key] == choice[key]
    assert "reasoning" not in plain["choices"][0]["message"]
    assert "completion_tokens_details" not in plain["usage"]
    (hidden,) = client.chat({**body, "include_reasoning": False})
    assert hidden["choices"][0]["message"] == {"role": "assistant", "refusal": None, "content": content or ""}
    assert hidden["usage"]["completion_tokens_details"] == usage["completion_tokens_details"]
    assert bool(reasoning) == bool(usage["completion_tokens_details"]["reasoning_tokens"])


def test_reasoning_is_counted_by_its_own_tokens(client, tiny_llm, thinks):
    """Whatever a stop string holds back, and for all outputs."""
    text = "I think so.</think>Hello."
    ids = tiny_llm.tokenizer(text, add_special_tokens=False)["input_ids"]
    inside = next(i for i in range(len(ids)) if tiny_llm.tokenizer.decode(ids[:i]).startswith("I think so."))
    for more in ({}, {"stop": ["x" * 99]}, {"n": 3}, {"prediction": "I think so"}):
        usage = both(client, said(text, **OPENS, **more))[1]
        assert usage["completion_tokens_details"]["reasoning_tokens"] == inside * more.get("n", 1)
    frames = client.frames(
        said(text, **OPENS, stream_options={"include_usage": True, "continuous_usage_stats": True}), ROUTE
    )
    counts = [f["usage"]["completion_tokens_details"]["reasoning_tokens"] for f in frames]
    assert counts == sorted(counts) and counts[-1] == inside
    said_so = "I <</ think\n\nso."  # white space, and what might have become a mark
    ids = tiny_llm.tokenizer(f"{said_so}</think>Hello.", add_special_tokens=False)["input_ids"]
    inside = next(i for i in range(len(ids)) if tiny_llm.tokenizer.decode(ids[:i]).startswith(said_so))
    usage = both(client, said(f"{said_so}</think>Hello.", **OPENS, return_token_ids=True))[1]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == inside


def test_calls_served(client, thinks):
    body = said(f"I write {CITY}.</think>\n\nSo: {CITY}", **OPENS, tools=TOOLS)
    choice, _ = both(client, body)
    assert choice["message"]["reasoning"] == f"I write {CITY}." and choice["message"]["content"] == "So: "
    assert len(choice["message"]["tool_calls"]) == 1 and choice["finish_reason"] == "tool_calls"
    choice, _ = both(client, said(f"I look.\n\n{CITY}", **OPENS, tools=TOOLS))
    message = choice["message"]
    assert (message["reasoning"], message["content"], len(message["tool_calls"])) == ("I look.", None, 1)
    assert choice["finish_reason"] == "tool_calls"
    choice, _ = both(client, said(f"I write {CITY}.", **OPENS, tools=TOOLS))
    assert "tool_calls" not in choice["message"] and choice["finish_reason"] == "stop"


def test_history(client, tiny_llm, thinks):
    def shown(message: dict[str, Any], **more: Any) -> str:
        asked = {"messages": [*TALK, {"role": "assistant", **message}, *TALK], **more}
        return tiny_llm.tokenizer.decode(client.post("/tokenize", asked).json()["tokens"])

    for key in ("reasoning", "reasoning_content"):
        assert "<think>\nHm.\n</think>\n\nHello." in shown({"content": "Hello.", key: "Hm."})
    assert "<think>" not in shown({"content": "Hello.", "reasoning": None})
    call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    assert "<think>\nHm.\n</think>\n\n<tool_call>" in shown({"content": None, "reasoning": "Hm.", "tool_calls": [call]})
    wrong = client.post(ROUTE, {"messages": [{"role": "assistant", "content": "a", "reasoning": ["b"]}]})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "messages"
    wrong = client.post(ROUTE, {"messages": TALK, "reasoning_effort": "much"})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "reasoning_effort"


def test_a_message_that_is_gone_on_with(client, thinks):
    for before, text, reasoning, content in (
        ("<think>I", " see.</think>Hello.", "see.", "Hello."), ("<think>I see.</think>", "<think>", "", "<think>"),
        ("Hello", " <think>", "", " <think>"),
    ):  # fmt: skip
        talk = [*TALK, {"role": "assistant", "content": before}]
        for content_of in (before, [{"type": "text", "text": before}]):
            talk[-1] = {"role": "assistant", "content": content_of}
            message = both(client, said(text, messages=talk, continue_final_message=True))[0]["message"]
            assert (message.get("reasoning", ""), message["content"]) == (reasoning, content)


def test_the_template_for_tools_counts_where_there_are_tools(client, tiny_llm, thinks, monkeypatch):
    template = tiny_llm.tokenizer.chat_template
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    monkeypatch.setattr(tiny_llm.tokenizer, "chat_template", {"default": plain, "tool_use": template})
    text = "<think>Hm.</think>Hello."
    assert both(client, said(text, tools=TOOLS))[0]["message"]["reasoning"] == "Hm."
    assert both(client, said(text))[0]["message"] == {"role": "assistant", "refusal": None, "content": text}


SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
FORMS = {0: {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, 0.9: {"response_format": FORMAT}}


@pytest.mark.parametrize("temperature", FORMS)
def test_constraints_begin_behind_reasoning(client, thinks, temperature, monkeypatch, tiny_llm):
    monkeypatch.setattr(app, "way_of", lambda _: Way("<think>", "."))  # which the small model writes
    bare = {"messages": [{"role": "user", "content": "Tell me of the sea."}], "seed": 5, "max_tokens": 150}
    bare |= {**OPENS, "temperature": temperature, "return_token_ids": True}
    body = bare | FORMS[temperature]
    choice, _ = both(client, body)
    assert json.loads(choice["message"]["content"])["a"] in (1, 2) and choice["message"]["reasoning"]
    assert choice["finish_reason"] == "stop"
    (plain,) = client.chat({**body, "speculative_config": False})
    assert plain["choices"][0]["token_ids"] == choice["token_ids"]
    seen = set[bool]()
    for seed in range(40) if temperature else ():  # where the prompt leaves it open, it may begin with the mark
        choice, _ = both(client, {**body, "chat_template_kwargs": {}, "seed": seed})
        text = tiny_llm.tokenizer.decode(choice["token_ids"])
        assert ("reasoning" in choice["message"]) == text.startswith("<think>"), text
        if choice["finish_reason"] == "stop":
            assert json.loads(choice["message"]["content"])["a"] in (1, 2)
            seen.add("reasoning" in choice["message"])
        if len(seen) == 2:
            break
    assert len(seen) == 2 * bool(temperature)
    for asked in ("required", named("get_weather")) if temperature else ():  # greedily it says no point before
        forced = {**bare, "tools": TOOLS, "tool_choice": asked}
        choice, _ = both(client, forced)
        assert choice["message"]["reasoning"] and choice["message"]["content"] is None
        assert choice["message"]["tool_calls"][0]["function"]["name"] in ("get_weather", "grow", "now")
        (plain,) = client.chat({**forced, "speculative_config": False})
        assert plain["choices"][0]["token_ids"] == choice["token_ids"]


# --- /v1/responses ----------------------------------------------------------------------------------------------------


def respond(client: Client, body: dict[str, Any]) -> dict[str, Any]:
    """A whole response; the stream's last event has the same."""
    body = {"seed": 1, **body}  # which of two tokens ends a text is the seed's
    answer = client.post("/v1/responses", body).json()
    Response.model_validate(answer)
    events = events_of(client, {**body, "speculative_config": False})
    assert without_ids(events[-1]["response"])["output"] == without_ids(answer)["output"]
    return answer


def test_responses(client, thinks):
    asked = {"choice": [f"Hm. So.</think>See. {CITY}"], "after": []}
    body = {"input": "x", "structured_outputs": asked, "tools": FLAT, **OPENS}
    body |= {"max_output_tokens": 100, "include": ["message.output_text.logprobs"], "top_logprobs": 0}
    answer = respond(client, body)
    reasoning, message, call = answer["output"]
    assert reasoning["type"] == "reasoning" and reasoning["summary"] == [] and reasoning["status"] == "completed"
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm. So."}] and call["name"] == "get_weather"
    (part,) = message["content"]
    assert part["text"] == "See. " and "".join(each["token"] for each in part["logprobs"]).startswith("See.")
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 2
    events = events_of(client, body)
    kinds = [e["type"] for e in events if e.get("output_index") == 0]
    assert [k.removeprefix("response.") for k in kinds if "delta" not in k] == [
        "output_item.added", "content_part.added", "reasoning_text.done", "content_part.done", "output_item.done",
    ]  # fmt: skip
    assert "".join(e["delta"] for e in events if e["type"] == "response.reasoning_text.delta") == "Hm. So."
    places = [e["output_index"] for e in events if "output_index" in e]
    assert places == sorted(places) and set(places) == {0, 1, 2}
    hidden = respond(client, {**body, "include_reasoning": False})
    assert [item["type"] for item in hidden["output"]] == ["message", "function_call"]
    assert hidden["output"][0]["content"] == message["content"]
    assert hidden["usage"]["output_tokens_details"] == answer["usage"]["output_tokens_details"]
    empty = {**body, "structured_outputs": {"choice": ["\n</think>\n\nHello."], "after": []}}
    (message,) = respond(client, empty)["output"]
    assert "".join(each["token"] for each in message["content"][0]["logprobs"]).startswith("Hello.")
    cut = respond(client, {**body, "max_output_tokens": 3})
    assert [(item["type"], item["status"]) for item in cut["output"]] == [("reasoning", "incomplete")]
    assert cut["status"] == "incomplete"


def test_reasoning_items_are_taken(client, tiny_llm, thinks, monkeypatch):
    seen = list[str]()

    def render(*given: Any, **more: Any) -> list[int]:
        ids = type(tiny_llm).render(tiny_llm, *given, **more)
        seen.append(tiny_llm.tokenizer.decode(ids))
        return ids

    monkeypatch.setattr(tiny_llm, "render", render)
    thought = {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    told = {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "Short."}]}
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello."}]}
    call = {"type": "function_call", "call_id": "c", "name": "now", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "noon"}
    user = {"role": "user", "content": "And?"}
    for items, expected in (
        ([user, thought, message, user], "<think>\nHm.\n</think>\n\nHello."),
        ([user, told, message, user], "<think>\nShort.\n</think>\n\nHello."),
        ([user, thought, call, result], "<think>\nHm.\n</think>\n\n<tool_call>"),
        ([user, thought, message, told, call, result], "<think>\nHm.\nShort.\n</think>\n\nHello.<tool_call>"),
        ([user, thought, user], ""), ([user, {"type": "reasoning", "encrypted_content": "x"}, message, user], ""),
    ):  # fmt: skip
        answer = client.post("/v1/responses", {"input": items, "max_output_tokens": 1})
        assert answer.status_code == 200 and expected in seen[-1] and (expected or "<think>" not in seen[-1]), seen[-1]
    client.post(
        "/v1/responses", {"input": "x", "reasoning": {"effort": "none", "summary": "auto"}, "max_output_tokens": 1}
    )
    assert "</think>" in seen[-1] and "none" in seen[-1]
    wrong = client.post("/v1/responses", {"input": "x", "reasoning": {"effort": "much"}})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "reasoning"


def test_openais_client(live, tiny_llm, thinks):
    made = openai.OpenAI(base_url=f"{live()}/v1", api_key="none", max_retries=0)
    more = {"structured_outputs": {"choice": ["Hm. So.</think>Hello."], "after": []}, **OPENS}
    asked: Any = {"model": "tiny", "messages": TALK, "max_tokens": 100, "extra_body": more}
    whole = made.chat.completions.create(**asked)
    message: Any = whole.choices[0].message
    assert message.reasoning == "Hm. So." and message.content == "Hello." and whole.usage
    assert whole.usage.completion_tokens_details and whole.usage.completion_tokens_details.reasoning_tokens
    deltas: list[Any] = [chunk.choices[0].delta for chunk in made.chat.completions.create(**asked, stream=True)]
    assert "".join(getattr(delta, "reasoning", "") for delta in deltas) == "Hm. So."
    asked = {"model": "tiny", "input": "x", "max_output_tokens": 100, "extra_body": more}
    with made.responses.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    assert "response.reasoning_text.delta" in kinds and final.output_text == "Hello."
    assert final.output[0].type == "reasoning" and final.output[0].content
    assert final.output[0].content[0].text == "Hm. So."
    again: Any = [{"role": "user", "content": "x"}, *(item.model_dump() for item in final.output)]
    again.append({"role": "user", "content": "y"})
    assert made.responses.create(model="tiny", input=again, max_output_tokens=2).output
