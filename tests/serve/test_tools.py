"""Tool calls: what models write is found in any pieces, and what is forced is what they would write."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from outrider import LLM, SamplingParams
from outrider.constraint import read
from outrider.errors import ConfigError
from outrider.find import find
from outrider.load import read_tokenizer
from outrider.serve.calls import (
    CODER,
    FAMILIES,
    GEMMA,
    GRANITE,
    HARMONY,
    HERMES,
    LLAMA,
    MINISTRAL,
    MISTRAL,
    NEMOTRON,
    OLMO,
    PHI,
    PYTHONIC,
    SEED,
    SHAPES,
    VALUE_ENDS,
    XLAM,
    value_of,
)
from outrider.serve.parser import PIECE, Parser, parse, parser_of
from outrider.serve.tools import as_variables, check, constraint, family_of, for_templates, in_order

CITY, DAYS = {"enum": ["Paris", "Oslo"]}, {"type": "integer", "maximum": 9}
WEATHER = {"type": "object", "properties": {"city": CITY, "days": DAYS},
           "required": ["city"], "additionalProperties": False}  # fmt: skip
TREE = {"type": "object", "properties": {"left": {"$ref": "#/$defs/leaf"}}, "required": ["left"],
        "additionalProperties": False, "$defs": {"leaf": {"type": "boolean"}}}  # fmt: skip


def tool(name: str, schema: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **({"parameters": schema} if schema is not None else {})}}


TOOLS = [tool("get_weather", WEATHER), tool("grow", TREE), tool("now")]


def written(family, calls: list[tuple[str, Any]]) -> str:
    """Calls as a family's models write them."""

    def one(name: str, args: Any) -> str:
        if family.head:
            return f"{name}{family.head}{json.dumps(args, ensure_ascii=False)}"
        if family.shape == "tagged":
            values = [(key, v if isinstance(v, str) else json.dumps(v, ensure_ascii=False)) for key, v in args.items()]
            parameters = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values]
            return f"<function={name}>\n{''.join(parameters)}</function>"
        if family.shape == "python":
            return f"{name}({', '.join(f'{key}={value!r}' for key, value in args.items())})"
        if family.shape == "escaped":
            return f"call:{name}{escaped(args)}"
        return json.dumps({"name": name, family.arguments: args}, ensure_ascii=False)

    def escaped(value: Any, top: bool = True) -> str:
        if isinstance(value, dict):
            keys = {key: key if top else f"<escape>{key}<escape>" for key in value}
            return "{" + ",".join(f"{keys[key]}:{escaped(own, False)}" for key, own in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ",".join(escaped(own, False) for own in value) + "]"
        return f"<escape>{value}<escape>" if isinstance(value, str) else json.dumps(value)

    return family.begin + family.between.join(one(*call) for call in calls) + family.end


def functions(family, *calls: tuple[str, Any]) -> dict[str, Any]:
    """Functions that take what these calls give: only tagged values need to be told apart."""
    found = {name: {"properties": {}} for name in ("get_weather", "now")}
    for name, args in calls if family.shape == "tagged" else ():
        for key, value in args.items():
            found[name]["properties"][key] = {"type": "string" if isinstance(value, str) else ["null", "object"]}
    return found


def heard(parser: Parser, pieces: list[str]) -> tuple[str, list[dict[str, Any]]]:
    """Deltas put together as a client does, each of them checked."""
    content, calls = "", list[dict[str, Any]]()
    for delta in [d for piece in pieces for d in parser.feed(piece)] + parser.finish():
        assert len(delta) == 1 and next(iter(delta.values()))
        content += delta.get("content", "")
        for part in delta.get("tool_calls", ()):
            if part["index"] == len(calls):
                assert part["type"] == "function" and part["id"] and part["function"]["arguments"] == ""
                calls.append({"name": part["function"]["name"], "arguments": "", "id": part["id"]})
            else:
                assert part["index"] == len(calls) - 1 and set(part) == {"index", "function"}
                calls[-1]["arguments"] += part["function"]["arguments"]
    return content, calls


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('ab"\\{}[]<>,:é\n', max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('x"{', max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.sampled_from(FAMILIES),
    st.lists(
        st.tuples(st.sampled_from(["get_weather", "now"]), st.dictionaries(st.text("ab", max_size=2), values)),
        min_size=1, max_size=3,
    ),
    st.sampled_from(["", "Let me see. ", "a < b, [x] "]),
    st.lists(st.integers(1, 9), min_size=1, max_size=9),
)  # fmt: skip
@settings(max_examples=150)
def test_calls_are_found_in_any_pieces(family, calls, before, sizes):
    before = "" if family.bare else before
    known = functions(family, *calls)
    if family.shape in ("tagged", "python", "escaped"):  # whose keys are not empty
        assume(all(args.keys() - {""} == args.keys() for _, args in calls))
    if family in (CODER, SEED):  # whose values are told apart by the schema
        assume(
            all(
                functions(family, call)[call[0]]["properties"].items() <= known[call[0]]["properties"].items()
                for call in calls
            )
        )
    text, pieces, at = before + written(family, calls), [], 0
    while at < len(text):
        pieces.append(text[at : at + sizes[len(pieces) % len(sizes)]])
        at += len(pieces[-1])
    for cut in (pieces, [text], list(text)):
        content, found = heard(parser_of(family, known), cut)
        assert content == before
        assert [(c["name"], json.loads(c["arguments"])) for c in found] == calls
    whole, found = parse(text, family, known)
    assert whole == (before or None) and [json.loads(c["function"]["arguments"]) for c in found] == [
        a for _, a in calls
    ]
    assert len({c["id"] for c in found}) == len(calls)


def test_a_value_that_is_long_is_not_searched_again_with_each_piece(monkeypatch):
    searched = []

    class Noted:
        def search(self, text: str, at: int = 0) -> Any:
            searched.append(len(text) - at)
            return ends.search(text, at)

    ends = VALUE_ENDS
    monkeypatch.setattr("outrider.serve.calls.VALUE_ENDS", Noted())
    call = "get_weather", {"days": 10**3000 - 1}
    text = written(CODER, [call])
    _, (found,) = heard(parser_of(CODER, functions(CODER, call)), [text[at : at + 4] for at in range(0, len(text), 4)])
    assert json.loads(found["arguments"]) == call[1]
    assert len(searched) > 700 and max(searched) < 20


@pytest.mark.parametrize("family", [HERMES, LLAMA, CODER, OLMO, MINISTRAL], ids=lambda f: f.name)
def test_what_is_behind_a_call_is_not_read_with_each(family, monkeypatch):
    """A whole answer of many calls took time as the square of their number."""
    kind, given = SHAPES[family.shape], []

    class Noted(kind):
        def feed(self, text: str) -> str:
            given.append(len(text))
            return super().feed(text)

    monkeypatch.setitem(SHAPES, family.shape, Noted)
    calls = [("now", {"a": str(i)}) for i in range(500)]
    _, found = parse(written(family, calls), family, functions(family, calls[0]))
    assert [json.loads(call["function"]["arguments"]) for call in found] == [args for _, args in calls]
    assert len(given) >= 500 and max(given) <= PIECE


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.shape not in ("python", "escaped")], ids=lambda f: f.name)
def test_arguments_come_as_they_are_written(family):
    """The name first, then the arguments piece by piece: nobody waits for the end of a call."""
    call = "get_weather", {"city": "Paris", "note": "a" * 50}
    text = written(family, [call])
    parser, seen = parser_of(family, functions(family, call)), []
    for c in text:
        seen.append(len(parser.feed(c)))
    assert sum(seen) > 50 and sum(seen[: text.index("Paris")]) > (2 if family.shape == "tagged" else 3)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
@given(st.text('<>tool_cal/[]TOLS {}":,nameb1|=\\\n', max_size=40), st.integers(1, 5))
@settings(max_examples=80)
def test_what_is_no_call_is_content(family, text, size):
    """Nothing is lost, invented or raised, whatever comes."""
    content, calls = heard(
        parser_of(family, functions(family)), [text[i : i + size] for i in range(0, len(text), size)]
    )
    assert not calls and content == text


CALL = '{"name": "now", "arguments": {"a": 1}}'
OTHER = CALL.replace("now", "then")
WORDS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS] ", "<|python_tag|>", "<tool", "[", "]", "; ", " ", "\n\n", "done"]
WORDS += [CALL, CALL[:-2] + '}, "parameters": {"b": 22}}', '{"parameters": {}, "name": "now"}', '{"a": "}"}', CALL[:16]]
WORDS += [
    '"arguments": {"b": 22}',
    "{",
    "}",
    '"',
    "now",
    "[ARGS]",
    "[CALL_ID]",
    "a1",
    "<|tool_call|>",
    "<|/tool_call|>",
]
WORDS += [OTHER, "then()", "[now(a=1", "now(b='2\\'')", ")", ", ", "a=[True, null]"]
WORDS += ["<|channel|>commentary to=functions.now", " <|constrain|>json", "<|message|>", "<|end|>", "<|call|>"]
WORDS += ["<|start|>assistant", "<|channel|>analysis", "<|channel|>final", "<|channel|>commentary"]
WORDS += [
    "<function=now>",
    "<function=",
    "<parameter=a>",
    "<parameter=b>\n",
    "\n</parameter>",
    "</parameter>",
    "</function>",
]


@settings(max_examples=300)
@given(st.sampled_from(FAMILIES), st.lists(st.sampled_from(WORDS), max_size=9), st.lists(st.integers(1, 9), min_size=1))
def test_pieces_make_no_difference(family, words, sizes):
    """A stream comes in pieces, a whole answer in one: content and calls are the same."""
    text, pieces = "".join(words), list[str]()
    while rest := text[sum(map(len, pieces)) :]:
        pieces.append(rest[: sizes[len(pieces) % len(sizes)]])

    def found(cut: list[str]) -> Any:
        content, calls = heard(parser_of(family, {"now": {"properties": {"b": {"type": "integer"}}}}), cut)
        return content, [(call["name"], call["arguments"]) for call in calls]

    assert found(pieces) == found(list(text)) == found([text])


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('<tool_call>{"name": "now"}</tool_call>\nWell:\n\n- one\n', "\nWell:\n\n- one\n", 1),
        ('\n<tool_call>{"name": "now"}</tool_call>\n', "", 1),
        ('<tool_call>{"name": "now"}{"name": "now"}</tool_call>', "", 2),
        (' <tool_call>{"name": "now", "arguments": {"a": 1}, "arguments": {}}', "", 1),
    ],
)
def test_space_around_calls(text, content, calls):
    """Space before a call says nothing; a text's own lines stay."""
    for cut in ([text], list(text)):
        got, found = heard(Parser(HERMES, {"now": {}}), cut)
        assert got == content and len(found) == calls


@pytest.mark.parametrize(
    ("family", "text", "content", "calls"),
    [
        (HERMES, '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>', None, 0),
        (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "now"}</tool_call> done', " done", 1),
        (HERMES, '<tool_call>\n{"name": "now"}\n</tool_call>', "", 1),
        (HERMES, '<tool_call>\n{"name": "now", "arguments": {"a": ', "", 1),
        (HERMES, "a <tool_cal", "a <tool_cal", 0),
        (HERMES, "Use <tool_call>\n</tool_call> tags.", "Use <tool_call>\n</tool_call> tags.", 0),
        (HERMES, "<tool_call></tool_call>", "<tool_call></tool_call>", 0),
        (HERMES, '<tool_call>{"name": "now", "arguments": {}}</tool_call>\n<tool', "", 1),
        (LLAMA, '{"a": 1} <|python_tag|>{"name": "now"}', '{"a": 1} ', 1),
        (LLAMA, '<|python_tag|>{"name": "now", "parameters": {}}; {"name": "now", "parameters": {"x": "{"}}', "", 2),
        (LLAMA, '{"name": "now", "arguments": {}}', "", 1),
        (LLAMA, '{"answer": 42}', '{"answer": 42}', 0),
        (LLAMA, '{"name": "now", "born": 1970}', '{"name": "now", "born": 1970}', 0),
        (XLAM, '[{"name": "now"}]', '[{"name": "now"}]', 0),
        (XLAM, '[{"name": "now", "arguments": {}}, {"name": "now"}]', "", 2),
        (LLAMA, '<|python_tag|>{"name": "now"}', "", 1),
        (HERMES, '<tool_call>{"name": "now", "arguments": {}}</tool_call>\nNote: 3 <', "\nNote: 3 <", 1),
        (MISTRAL, '[TOOL_CALLS][{"name":"now","arguments":{}}] see [', "see [", 1),
        (LLAMA, 'Well: {"name": "now", "parameters": {}}', 'Well: {"name": "now", "parameters": {}}', 0),
        (MISTRAL, '[TOOL_CALLS][{"name":"now","arguments":"{\\"a\\": 1}"}]', "", 1),
        (MISTRAL, '[TOOL_CALLS][{"name":"now","arguments":"text"}]', "", 1),
        (MISTRAL, '[TOOL_CALLS][{"name":"now","arguments":"{"}]', "", 1),
        (MISTRAL, "see [TOOL_CALLS] nothing", "see [TOOL_CALLS] nothing", 0),
        (MINISTRAL, '[TOOL_CALLS]now[CALL_ID]a1b2c3d4e[ARGS]{"a": 1}[TOOL_CALLS]now{"b": {}}', "", 2),
        (MINISTRAL, '[TOOL_CALLS]then[ARGS]{"a": 1}', '[TOOL_CALLS]then[ARGS]{"a": 1}', 0),
        (MINISTRAL, "[TOOL_CALLS] is a mark", "[TOOL_CALLS] is a mark", 0),
        (MINISTRAL, '[TOOL_CALLS]now[ARGS]{"a": ', "", 1),
        (GRANITE, '<|tool_call|>[{"arguments": {}, "name": "now"}, {"name": "now", "arguments": {}}]', "", 2),
        (PHI, 'So: <|tool_call|>{"name": "now", "arguments": {}}<|/tool_call|> done', "So:  done", 1),
        (PHI, '<|tool_call|>[{"name": "now", "arguments": {}}]<|/tool_call|>', "", 1),
        (
            CODER,
            "<tool_call>\n<function=then>\n</function>\n</tool_call>",
            "<tool_call>\n<function=then>\n</function>\n</tool_call>",
            0,
        ),
        (CODER, "So:\n\n<function=now>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>", "So:", 1),
        (
            CODER,
            "<tool_call>\n<function=now>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
            "",
            2,
        ),
        (SEED, "<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>", "", 1),
        (CODER, "<function=" + "a" * 999, "<function=" + "a" * 999, 0),
        (CODER, "a <function of> b", "a <function of> b", 0),
        (MINISTRAL, "[TOOL_CALLS]" + "a" * 999, "[TOOL_CALLS]" + "a" * 999, 0),
        (GRANITE, '<tool_call>[{"name": "now", "arguments": {}}]\nDone', "Done", 1),
        (GRANITE, '<|tool_call|>[{"name": "now"}]<|tool_call|>[{"name": "now"}]', "", 2),
        (MISTRAL, '[TOOL_CALLS][{"name": "now"}]\nDone', "Done", 1),
        (HERMES, '<tool_call>\n{"name": "now"}\n<tool_call>\n{"name": "now"}\n</tool_call>', "", 2),
        (CODER, "<tool_call>\n<function=now>\n</tool_call>\n", "", 1),
        (CODER, "Use <tool_call>\n<function=no w>", "Use <tool_call>\n<function=no w>", 0),
        (HERMES, '<tool_call>\n{"name": "now", "arguments": {}\n</tool_call>\n<tool_call>\n' + CALL, "", 2),
        (HERMES, '<tool_call>{"name": "now"</tool_call><tool_call>{"name": "now", "arguments": </tool_call>', "", 2),
        (PHI, '<|tool_call|>[{"name": "now", "arguments": {"a": "<"}<|/tool_call|> done', " done", 1),
        (MISTRAL, '[TOOL_CALLS][{"name" <b', '[TOOL_CALLS][{"name" <b', 0),
        (CODER, "Use `<function=now>` so: 1 < 2.\nDone.", "Use `<function=now>` so: 1 < 2.\nDone.", 0),
        (SEED, "<function=now></par and more", "<function=now></par and more", 0),
        (PYTHONIC, "[now()] Done.", " Done.", 1),
        (PYTHONIC, "[now()].", ".", 1),
        (PYTHONIC, "[now(), now()]\nI did it.", "\nI did it.", 2),
        (XLAM, f"[{CALL}]\n[{CALL}]", "", 2),
        (HERMES, f"<tool_call>\n[{CALL}, {CALL}]\n</tool_call>\n[1] is it", "\n[1] is it", 2),
        (HERMES, f"<tool_call>\n{CALL},\n{CALL}\n</tool_call>", "", 2),
        (HERMES, "<tool_call> [1], [2]", "<tool_call> [1], [2]", 0),
        (MISTRAL, f"[TOOL_CALLS] [{OTHER}, {CALL}]", f"[TOOL_CALLS] [{OTHER}", 1),
        (GRANITE, f"<|tool_call|>[{CALL}, {OTHER}, {CALL}]", f", {OTHER}", 2),
        (LLAMA, f"<|python_tag|>{OTHER}; {CALL}", f"<|python_tag|>{OTHER}", 1),
        (PYTHONIC, "[now(), then(a=1), now(a=now()), now(a=2)] Done.", ", then(a=1), now(a=now()) Done.", 2),
        (HERMES, f"<tool_call>\n{OTHER}\n{CALL}\n</tool_call>", f"<tool_call>\n{OTHER}", 1),
        (MINISTRAL, '[TOOL_CALLS]then{"a": 1}[TOOL_CALLS]now{}', '[TOOL_CALLS]then{"a": 1}', 1),
        (MISTRAL, f"[TOOL_CALLS] [{OTHER}] Done", f"[TOOL_CALLS] [{OTHER}] Done", 0),
        (PYTHONIC, "[then()] now()", "[then()] now()", 0),
        (MISTRAL, f"[TOOL_CALLS] [{CALL}][TOOL_CALLS] [{CALL}]\n[1](http://x)", "\n[1](http://x)", 2),
        (MISTRAL, f"[TOOL_CALLS] {CALL}[TOOL_CALLS] {CALL}", "", 2),
        (LLAMA, f"{CALL}\n\n[Note: done]", "\n\n[Note: done]", 1),
    ],
)
def test_how_models_write_otherwise(family, text, content, calls):
    for cut in ([text], list(text)):
        got, found = heard(parser_of(family, {"now": {}}), cut)
        assert len(found) == calls and (content is None or got.strip() == content.strip())
        if content is None:
            assert got.replace("</tool_call>", "") in text
        for call in found:
            if text.endswith(": "):
                assert call["arguments"] == '{"a": '  # cut by max_tokens
            else:
                json.loads(call["arguments"])


@pytest.mark.parametrize("said", ["", ', "arguments": null ', ', "arguments": ""', ', "arguments": {}'])
def test_no_arguments_are_an_empty_object(said):
    for cut in ([text := f'<tool_call>{{"name": "now"{said}}}'], list(text)):
        _, (call,) = heard(Parser(HERMES, {"now": {}}), cut)
        assert call["arguments"] == "{}"


@pytest.mark.parametrize(
    ("said", "means"),
    [
        ('{"a": {"b": [1]}', '{"a": {"b": [1]}}'), ('{"a": {"b": ["]\\"<{"', '{"a": {"b": ["]\\"<{"]}}'),
        ('{"a": {"b": [1}', '{"a": {"b": [1}'), ('{"a": {"b": 1,', '{"a": {"b": 1,'),
        ('{"a": 1}}', '{"a": 1}'), ('{"a": 1}}}\n]}', '{"a": 1}'),
    ],
)  # fmt: skip
def test_brackets_that_are_too_few_or_too_many(said, means):
    """Of several that are missing half an object was left; of one too many the rest of the call was content."""
    for cut in ([text := f'<tool_call>{{"name": "now", "arguments": {said}</tool_call> }} done'], list(text)):
        content, (call,) = heard(Parser(HERMES, {"now": {}}), cut)
        assert (call["arguments"], content) == (means, " } done")


@pytest.mark.parametrize("family", [HERMES, LLAMA, MISTRAL, MINISTRAL], ids=lambda f: f.name)
def test_line_breaks_in_texts_become_json(family):
    """Some models write code as it stands; what is no call stays as it was written."""
    text = written(family, [("now", {"a": "X", "b": {}})])
    text = text.replace("X", 'if x:\n\ty(\\"a\\")\r\0\\\n').replace(", ", ",\n ")
    for cut in ([text], list(text)):
        content, (call,) = heard(parser_of(family, {"now": {}}), cut)
        assert not content and json.loads(call["arguments"]) == {"a": 'if x:\n\ty("a")\r\0\\n', "b": {}}
        assert heard(parser_of(family, {"then": {}}), cut) == (text, [])


@pytest.mark.parametrize("family", [HERMES, MINISTRAL], ids=lambda f: f.name)
def test_each_line_break_becomes_json_once(family, monkeypatch):
    """Not once more with each piece that follows: a file of some thousand lines took a minute."""
    dumps, made = json.dumps, []
    text = written(family, [("now", {"a": "X"})]).replace("X", "pass\n" * 300)
    monkeypatch.setattr("outrider.serve.calls.json.dumps", lambda *given: made.append(given) or dumps(*given))
    _, (call,) = heard(parser_of(family, {"now": {}}), list(text))
    assert json.loads(call["arguments"]) == {"a": "pass\n" * 300} and len(made) <= 300


@pytest.mark.parametrize("said", ["[1]", "5", '"text"', '"[1]"', "true", " null"])
def test_arguments_that_are_no_object_are_none(said):
    """Nor do they come before it is known."""
    text = f'<tool_call>{{"name": "now", "arguments": {said}}}</tool_call>'
    message = f"<|channel|>commentary to=functions.now<|message|>{said}<|call|>"
    for family, own in ((HERMES, text), (HARMONY, message), (HARMONY, message.replace(said, ' {"a": 1}'))):
        for cut in ([own], list(own)):
            content, (call,) = heard(parser_of(family, {"now": {}}), cut)
            assert not content and call["arguments"] == ("{}" if said in own else '{"a": 1}')


TEXTS = {  # texts as Python has them, and what they say
    "'''it's'''": "it's", "''''it\\'s'''": "'it's", '"two\nlines"': "two\nlines", "'''a\nb'''": "a\nb",
    r"'\ud83d\ude00 \\ud83d'": "😀 \\ud83d", r"'' 'a' '\'' ''": "a'", '"""a "b" c"""': 'a "b" c', "''": "",
    "'a\\\nb'": "ab", "''''''": "", "'\"\"\"'": '"""', "'\\\\'": "\\",
}  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_texts_in_calls_of_pythons(text):
    for cut in ([said := f"[now(a={text}, b=1), now()]"], list(said)):
        content, (call, _) = heard(parser_of(PYTHONIC, {"now": {}}), cut)
        assert not content and json.loads(call["arguments"]) == {"a": TEXTS[text], "b": 1}


@pytest.mark.parametrize("text", [r"'\ud83d'", "'''a'", "'a'b"])
def test_what_is_no_text_of_pythons(text):
    content, calls = heard(parser_of(PYTHONIC, {"now": {}}), [said := f"[now(a={text})]"])
    assert not calls and content == said


def test_tagged_values_are_what_their_schemas_say():
    """Text as it is, the rest as JSON, or as Python writes it; and none of it waits longer than it must."""
    kinds = {"text": "string", "n": "integer", "yes": "boolean", "all": ["array", "null"], "x": ["string", "number"]}
    schema = {"properties": {key: {"type": kind} for key, kind in kinds.items()} | {"of": {"enum": ["1", "2"]}}}
    optional = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    schema["properties"] |= {"either": optional, "or": {"oneOf": [{"type": "boolean"}, {"type": "string"}]}}
    schema["properties"] |= {"zip": {"type": ["string", "null"]}, "none": {"type": ["string", "null"]}}
    kinds |= {"zip": ["string", "null"], "none": ["string", "null"]}
    said = {
        "text": "1\n</par \\ \"", "n": "-3", "yes": "True", "all": '[1, {"a": "</"}]', "x": "1e999", "of": "2",
        "zip": "10115", "none": "None", "either": "12", "or": "true", "unknown": "5",
    }  # fmt: skip
    means = {**said, "none": None, "or": True, "n": -3, "yes": True, "all": [1, {"a": "</"}], "x": float("inf")}
    text = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in said.items())
    text = f"<parameter=>\n?\n</parameter>{text}<parameter=n>\n9\n</parameter></function>"
    text = f"<tool_call>\n<function=now>\n{text}\n</tool_call>"
    for cut in ([text], list(text)):
        content, (call,) = heard(Parser(CODER, {"now": schema}), cut)
        assert content == "" and json.loads(call["arguments"]) == means
    for way in ("</function>\n</tool_call>", "<parameter=n>\n5\n</parameter>\n</function>"):  # the end is missing
        text = "<tool_call>\n<function=now>\n<parameter=text>\nabc\n" + way
        for cut in ([text], list(text)):
            content, (call,) = heard(Parser(CODER, {"now": schema}), cut)
            assert content == "" and json.loads(call["arguments"])["text"] == "abc"
    _, (call,) = heard(
        Parser(CODER, {"now": schema}),
        ["<function=now>\n<parameter=>?</parameter><<parameter=n>\n5</parameter></function>"],
    )
    assert call["arguments"] == '{"n": 5}'
    for word, value in {"None": None, "NaN": "NaN", "[1": "[1", " 7 ": 7}.items():
        _, (call,) = heard(
            Parser(CODER, {"now": schema}), [f"<tool_call><function=now><parameter=n>{word}</parameter>"]
        )
        assert call["arguments"] == '{"n": ' + json.dumps(value)
    python = {"all": "['a', 1, None, true]", "either": "{'a': 1}", "n": "(1,)", "none": "['a']"}
    means = {**python, "all": ["a", 1, None, True]}
    text = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in python.items())
    _, (call,) = heard(Parser(CODER, {"now": schema}), [f"<tool_call>\n<function=now>\n{text}</function>"])
    assert json.loads(call["arguments"]) == means
    for word in ('"[1]"', '" 5"', '"5', '"NaN"', '"[1"', '"{}"'):  # JSON in JSON, if it is of the type
        text = f"<tool_call><function=now><parameter=all>{word}</parameter><parameter=n>{word}</parameter></function>"
        _, (call,) = heard(Parser(CODER, {"now": schema}), [text])
        means = json.loads(call["arguments"])
        assert means["all"] == ([1] if word == '"[1]"' else value_of(word) or word)
        assert means["n"] == (5 if word == '" 5"' else value_of(word) or word)
    for word, value in {'"5"': 5, '"1.5"': 1.5, '"null"': None, '"x"': "x"}.items():
        maybe = {"now": {"properties": {"n": {"type": ["number", "null"]}}}}
        _, (call,) = heard(Parser(CODER, maybe), [f"<tool_call><function=now><parameter=n>{word}</parameter>"])
        assert call["arguments"] == '{"n": ' + json.dumps(value)
    for word in ("[b'a']", "['a', 1e999]", "['\\ud800']", "[f(1)]", "[" * 5000, "'a'"):
        text = f"<tool_call><function=now><parameter=all>{word}</parameter>"
        _, (call,) = heard(Parser(CODER, {"now": schema}), [text])
        assert call["arguments"] == '{"all": ' + json.dumps(word)
    parser = Parser(CODER, {"now": schema})
    parser.feed("<tool_call>\n<function=now>\n<parameter=text>\n")
    deltas = [delta["tool_calls"][0]["function"]["arguments"] for c in "abc\n</pa" for delta in parser.feed(c)]
    assert deltas == ["a", "b", "c"]
    assert parser.finish() == [] and parser.broken


@pytest.mark.parametrize("kind", ["string", "object"])
def test_a_tag_of_what_was_given_already_is_part_of_a_value(kind):
    """Such as a text about such calls."""
    value = 'x = """\n<parameter=a>\n<parameter=b>\n<parameter=' + "c" * 200 + '>\n<parameter=a\n"""'
    text = f"<function=now>\n<parameter=a>\n1\n</parameter><parameter=b>\n{value}\n<parameter=c>\n2\n</function>"
    schema = {"properties": {"b": {"type": kind}}}
    for cut in ([text], list(text), [text[at : at + 7] for at in range(0, len(text), 7)]):
        content, (call,) = heard(Parser(CODER, {"now": schema}), cut)
        assert not content and json.loads(call["arguments"]) == {"a": "1", "b": value, "c": "2"}


def test_types_of_tagged_values_are_found_behind_references():
    loop = {"anyOf": [{"$ref": "#/$defs/loop"}, {"$ref": "#/$defs/word"}]}
    own = {"a": {"$ref": "#/$defs/word"}, "b": {"allOf": [{"$ref": "#/$defs/word"}]}, "c": {"$ref": "#/$defs/loop"},
           "d": {"$ref": "#/properties/a"}, "e": {"$ref": "#/$defs/many"}, "f": {"$ref": "#/nowhere/0"}}  # fmt: skip
    defs = {"word": {"enum": ["1", "2"]}, "loop": loop, "many": {"type": "array"}}
    text = "".join(f"<parameter={key}>\n1\n</parameter>\n" for key in own)
    _, (call,) = heard(Parser(CODER, {"now": {"properties": own, "$defs": defs}}), [f"<function=now>{text}</function>"])
    assert json.loads(call["arguments"]) == {**dict.fromkeys("abcd", "1"), **dict.fromkeys("ef", 1)}


@pytest.mark.parametrize("whole", [
    {"$ref": "#/$defs/node", "$defs": {"node": {"properties": {"a": {"type": "integer"}}}}},
    {"allOf": [{"properties": {"a": {"type": "string"}}}, {"properties": {"a": {"$ref": "#/x"}}}], "x": {"const": 5}},
    {"properties": {"b": {}}, "additionalProperties": {"type": "integer"}},
])  # fmt: skip
def test_properties_of_tagged_values_are_found_wherever_they_stand(whole):
    """Pydantic's recursive models have nothing but a reference at their root."""
    said = "<function=now><parameter=a>\n5\n</parameter></function>"
    _, (call,) = heard(Parser(CODER, {"now": whole}), [said])
    assert call["arguments"] == '{"a": 5}'


@pytest.mark.parametrize("odd", [
    5, [], {"type": 5}, {"type": [{}, 1]}, {"anyOf": 5}, {"oneOf": [1, {"anyOf": "x"}]}, {"enum": 7},
    {"enum": [[], {}]}, {"$ref": 5}, {"$ref": "#/properties/a/$ref"}, {"allOf": {}},
    {"$ref": "#/properties/a/anyOf/" + "9" * 5000, "anyOf": [{}]}, {"$ref": "#", "additionalProperties": 5},
])  # fmt: skip
def test_tagged_values_of_schemas_that_make_no_sense(odd):
    """Nobody looks at them before: they are the template's affair."""
    for schema in (odd, {"properties": odd}, {"properties": {"a": odd}}):
        said = "<tool_call>\n<function=now>\n<parameter=a>\n[1]\n</parameter>\n</function>\n</tool_call>"
        known = schema if isinstance(schema, dict) else {}
        content, (call,) = heard(Parser(CODER, {"now": known}), list(said))
        assert content == "" and json.loads(call["arguments"])["a"] in ("[1]", [1])
    deep: dict = {"type": "string"}
    for _ in range(5000):
        deep = {"anyOf": [deep]}
    _, (call,) = heard(Parser(CODER, {"now": {"properties": {"a": deep}}}), [said])
    assert call["arguments"] == '{"a": "[1]"}'


def test_families_are_told_by_the_template():
    marks = {
        "<tool_call>": HERMES, "<tool_call><function=": CODER, "[TOOL_CALLS]": MISTRAL, "[TOOL_CALLS][ARGS]": MINISTRAL,
        '<|python_tag|> "parameters"': LLAMA, "<|tool_call|>": GRANITE, "<|tool_call|><|/tool_call|>": PHI,
        "<seed:tool_call>": SEED, "<TOOLCALL>": NEMOTRON, "<function_calls>": OLMO, "<start_function_call>": GEMMA,
    }  # fmt: skip
    assert [family_of("{% if tools %}" + mark) for mark in marks] == [*marks.values()]
    assert family_of("{{ messages }}") is None and family_of(None) is None and family_of("tools") is None


NAMED = "%s({%% for k, v in c.function.arguments.items() %%}{{ k }}={{ v | tojson }}{%% endfor %%}%.0s)"
WAYS = {
    "hermes": ('<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>', HERMES),
    "mistral": ('[TOOL_CALLS] [{"name": "%s", "arguments": %s, "id": "abcdefghi"}]', MISTRAL),
    "llama": ('{"name": "%s", "parameters": %s}', LLAMA),
    "hermes, almost": ('<tool_call>\n{"name": "%s", "input": %s}\n</tool_call>', None),
    "qwen3-coder": (
        "<tool_call>\n<function=%s>\n{%% for k, v in c.function.arguments.items() %%}<parameter={{ k }}>\n{{ v }}\n"
        "</parameter>\n{%% endfor %%}%.0s</function>\n</tool_call>",
        CODER,
    ),
    "seed": (
        "<seed:tool_call>\n<function=%s>\n{%% for k, v in c.function.arguments.items() %%}<parameter={{ k }}>{{ v }}"
        "</parameter>\n{%% endfor %%}%.0s</function>\n</seed:tool_call>",
        SEED,
    ),
    "qwen3-coder, almost": ("<tool_call>\n<function=%s>\n%s\n</function>\n</tool_call>", None),
    "another xml": ("<tool_call>\n<call name=%s>\n%s\n</call>\n</tool_call>", None),
    "glm": ("<tool_call>%s\n<arg_key>%s</arg_key>\n</tool_call>", None),
    "newer mistral": ("[TOOL_CALLS]%s[ARGS]%s", MINISTRAL),
    "mistral between": ("[TOOL_CALLS]%s%s", MINISTRAL),
    "granite": ('<|tool_call|>[{"name": "%s", "arguments": %s}]', GRANITE),
    "phi": ('<|tool_call|>{"name": "%s", "arguments": %s}<|/tool_call|>', PHI),
    "pythonic": (f"[{NAMED}]", PYTHONIC),
    "pythonic, almost": ("[%s(%s)]", None),
    "nemotron": ('<TOOLCALL>[{"name": "%s", "arguments": %s}]</TOOLCALL>', NEMOTRON),
    "olmo": (f"<function_calls>{NAMED}</function_calls>", OLMO),
    "olmo, almost": ("<function_calls>%s(%s)</function_calls>", None),
    "functiongemma": (
        "<start_function_call>call:%s{%% for k, v in c.function.arguments.items() %%}{{ '{' }}{{ k }}:<escape>{{ v }}"
        "<escape>}%.0s{%% endfor %%}<end_function_call><start_function_response>",
        GEMMA,
    ),
    "functiongemma, almost": ("<start_function_call>call:%s(%s)<end_function_call>", None),
    "a list": ('[{"name": "%s", "arguments": %s}]', XLAM),
    "not at all": ("%.0s%.0s", LLAMA),
}


@pytest.mark.parametrize("begin", ["<|assistant|>", "<|assistant|><think>\n"])
@pytest.mark.parametrize("way", WAYS)
def test_a_template_that_writes_calls_in_another_way_has_no_tools(tiny_llm, way, begin):
    text, family = WAYS[way]
    call = text % ("{{ c.function.name }}", "{{ c.function.arguments | tojson }}")
    template = (
        "{% if tools %}<|python_tag|>{% for t in tools %}{{ t.function.parameters.properties.keys() | list }}"
        "{{ t.function.name }}{{ t.function.description }}{% endfor %}{% endif %}"
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
        "{% for c in m.tool_calls or [] %}" + call + "{% endfor %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}" + begin + "{% endif %}"
    )
    assert family_of(template, tiny_llm.render_text) is family
    refusing = template + "{{ raise_exception('no') }}"
    assert family_of(refusing, tiny_llm.render_text) is family_of(refusing)
    deaf = template.replace("if tools", "if false").replace(
        "t in tools", "t in []"
    )  # it writes calls and shows no tools
    assert family_of(deaf, tiny_llm.render_text) is None
    assert family_of("{% set tools = none %}" + template, tiny_llm.render_text) is None
    behind = "{% if messages[0].role != 'system' %}{% set tools = none %}{% endif %}" + template  # FunctionGemma's
    assert family_of(behind, tiny_llm.render_text) is family


@pytest.mark.parametrize(
    ("call", "answer", "family"),
    [
        ('<TOOLCALL>[{"name": "%s", "arguments": %s}]</TOOLCALL>', "<think>\n", NEMOTRON),
        ('<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>', "<think>\n", HERMES),
        ('<|tool_call|>[{"name": "%s", "arguments": %s}]', "<|think|>", GRANITE),
        ("[TOOL_CALLS]%s[ARGS]%s", "[THINK]", MINISTRAL),
    ],
)
def test_a_mark_that_begins_like_another_is_whole(tiny_llm, call, answer, family):
    """Nemotron Nano's template writes one or the other behind a prompt."""
    template = (
        "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% for m in messages %}<|{{ m.role }}|>"
        "{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}"
        + call % ("{{ f.name }}", "{{ f.arguments | tojson }}")
        + "{% else %}{{ '" + answer + "' if m.role == 'assistant' }}{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>" + answer + "{% endif %}"
    )  # fmt: skip
    assert family_of(template, tiny_llm.render_text) is family


def test_what_a_tool_may_leave_out():
    tools: list = [{"type": "function", "function": {"name": "now"}}, {"type": "other"}]
    function = {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}}
    shown = [{"type": "function", "function": function}, {"type": "other"}]
    assert as_variables(tools) == {"tools": shown, "xml_tools": shown}
    whole: list = [
        {"type": "function", "function": {"parameters": None, "name": "a", "strict": True, "description": "d"}}
    ]
    assert [*as_variables(whole)["tools"][0]["function"]] == [*whole[0]["function"]]
    asked = check(tools[:1])
    assert asked and asked.functions["now"]["additionalProperties"] is False


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_what_is_forced_is_never_content(family):
    """Wherever the length cuts it off."""
    call = "now", {"a": "b"}
    text = written(family, [call, call])
    for size in range(len(text)):
        content, calls = heard(parser_of(family, functions(family, call), forced=True), [text[:size]])
        assert not content and len(calls) <= 2


PYTHON: dict[str, list[Any] | None] = {
    "[now()]": [{}], "[now(a='it\\'s', b=\"(\")]": [{"a": "it's", "b": "("}],
    " [now(a=-1.5), now(a=None)]\n": [{"a": -1.5}, {"a": None}], "[now(\n  a = (1, 2),\n)]": [{"a": [1, 2]}],
    "[now(from='a', to=\"b, from=3\", class=1)]": [{"from": "a", "to": "b, from=3", "class": 1}],
    "[now(a=true, b=[null, {'c': false}])]": [{"a": True, "b": [None, {"c": False}]}],
    "[now(a=1, a=2)]": [{"a": 1}], "[now(1)]": None, "[now(**{})]": None, "[now(a=b)]": None, "[now(a=now())]": None,
    "[now(a={1})]": None, "[other(a=1)]": None, "[now(a=b'x')]": None, "[now(a=1": None, "[see](http://x)": None,
    "[1] now(a=1)": None, "now(a=1)": None, "[now(a=1e999)]": None, "[now(a=" + "-" * 9999 + "1)]": None,
    "[now(a=" + "[" * 300 + "]" * 300 + ")]": None, "[now(a='\\ud800')]": None, "[now(a=1" + "+1" * 20000 + ")]": None,
}  # fmt: skip


@pytest.mark.parametrize("text", PYTHON, ids=lambda text: text[:24])
def test_calls_of_python(text):
    for cut in ([text], list(text)):
        content, calls = heard(parser_of(PYTHONIC, {"now": {}}), cut)
        expected = PYTHON[text]
        assert [json.loads(call["arguments"]) for call in calls] == (expected or [])
        assert content.strip() == ("" if expected else text)


ESCAPED: dict[str, list[Any] | None] = {
    "call:now{}": [{}], "call:now{a:<escape>Oslo, {<escape>}": [{"a": "Oslo, {"}],
    "call:now{a:1,b:-0.5e3,c:true,d:null}": [{"a": 1, "b": -500.0, "c": True, "d": None}],
    "call:now{a:[<escape>x<escape>, 2],b:{c:<escape><escape>}}": [{"a": ["x", 2], "b": {"c": ""}}],
    'call:now{"a": "b"}': [{"a": "b"}], "call:now{a:Oslo, b: None}": [{"a": "Oslo", "b": None}],
    "call:now{a:NaN}": [{"a": "NaN"}], 'call:now{a:"b"}': None, 'call:now{"a": NaN}': None,
    'call:now{"a": "\\ud800"}': None,
    "call:now{a:<escape>1<escape>2}": None, "call:now{a:1": None, "call:now[1]": None, "call:{}": None, "now{}": None,
    "call:other{a:1}": None, "call:now{" + "a:{" * 9999 + "}" * 10000: None, "call:now{a}": None,
}  # fmt: skip


@pytest.mark.parametrize("text", ESCAPED, ids=lambda text: text[:24])
def test_calls_of_functiongemma(text):
    expected = ESCAPED[text]
    whole = f"<start_function_call>{text}<end_function_call>"
    for cut in ([whole], list(whole)):
        content, calls = heard(parser_of(GEMMA, {"now": {}}), cut)
        assert [json.loads(call["arguments"]) for call in calls] == (expected or [])
        assert expected or content == whole


BAD = [
    ({"tools": "x"}, "tools"), ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tools": [tool("a/b")]}, "name has .* not 'a/b'"), ({"tools": [tool("a"), tool("a")]}, "twice"),
    ({"tools": [tool("a", [1])]}, "parameters"), ({"tools": [tool("a", {"type": "array"})]}, "parameters"),
    ({"tools": [tool("a")], "tool_choice": "some"}, "tool_choice"),
    ({"tools": [tool("a")], "tool_choice": {"type": "function", "function": {"name": "b"}}}, "tool_choice"),
    ({"tools": [tool("a")], "tool_choice": {"type": "function", "function": {"name": ["a"]}}}, "tool_choice"),
    ({"tools": None, "tool_choice": "required"}, "tool_choice"),
    ({"tools": [tool("a")], "parallel_tool_calls": 1}, "parallel_tool_calls"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "word"), BAD)
def test_fields_that_cannot_be(fields, word):
    with pytest.raises(ConfigError, match=word) as caught:
        check(**fields)
    assert "\n" not in str(caught.value)


def test_conversations_for_templates():
    call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": '{"a": 1}'}}
    said = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "5"},
    ]
    shown = [for_templates(message) for message in said]
    assert shown[0]["content"] == "" and shown[0]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert call["function"]["arguments"] == '{"a": 1}' and shown[1] == said[1]
    for broken in ("{", "", " ", "[]", "null", '"Oslo"', "42", "[" * 10**5, None, [1]):  # we may have handed it out
        message = {"role": "assistant", "tool_calls": [{"function": {"name": "now", "arguments": broken}}]}
        assert for_templates(message)["tool_calls"][0]["function"]["arguments"] == {}
    empty = {"role": "assistant", "content": ""}
    assert for_templates(empty | dict.fromkeys(("name", "refusal", "function_call"))) == empty
    assert for_templates(empty | {"tool_calls": []}) == for_templates(empty | {"content": []}) == empty
    for wrong in ({"function": 1}, 5):
        with pytest.raises(ConfigError, match="messages"):
            for_templates({"role": "assistant", "tool_calls": [wrong]})


def test_results_stand_in_the_order_of_their_calls_and_have_their_names():
    """Where ids tell it: nothing is moved on a guess, nor past another message."""

    def call(*ids: Any) -> dict[str, Any]:
        return {"role": "assistant", "tool_calls": [{"id": i, "function": {"name": f"f{i}"}} for i in ids]}

    def result(of: Any, content: str = "") -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": of, "content": content}

    def known(*results: dict[str, Any]) -> list[dict[str, Any]]:
        return [{**result, "name": f"f{result['tool_call_id']}"} for result in results]

    user = {"role": "user", "content": "And?", "tool_calls": 5}
    a, b, c = result("a"), result("b"), result("c")
    assert in_order([user, call("a", "b", "c"), c, a, b, user, call("b", "a"), a, b]) == [
        user, call("a", "b", "c"), *known(a, b, c), user, call("b", "a"), *known(b, a)
    ]  # fmt: skip
    again = [result("b", "1"), a, result("b", "2")]
    assert in_order([call("a", "b"), *again]) == [call("a", "b"), *known(a, again[0], again[2])]
    nameless = {"role": "tool", "content": ""}
    for other in (c, nameless, result(["a"])):
        assert in_order([call("a", "b"), other, b, a]) == [call("a", "b"), other, *known(b, a)]
    assert in_order([call("a", "b"), b, user, a]) == [call("a", "b"), *known(b), user, a]
    named = [a | {"name": "other"}]
    for talk in (
        [], [b, a], [user, b, a], [call("a", "b", "a"), b, a], [call("a", None), a, nameless],
        [call(["a"], "b"), b, result(["a"])], [{"role": "assistant", "content": ""}, b, a], [call("a"), *named],
    ):  # fmt: skip
        assert in_order(talk) == talk


@pytest.fixture(scope="module")
def tagged() -> LLM:
    """The embedded model, whose tokenizer has the marks as tokens of their own."""
    llm = LLM("tiny", device="cpu", dtype="float32")
    tokenizer = read_tokenizer(find("tiny"))
    spare = [i for i in range(llm.runner.model.config.vocab_size) if i >= len(tokenizer)]
    if len(spare) < 2:
        return llm
    marks = [AddedToken(mark, normalized=False) for mark in ("<tool_call>", "</tool_call>")]
    tokenizer.add_tokens(marks)
    llm.tokenizer = llm.engine.tokenizer = tokenizer
    return llm


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
@pytest.mark.parametrize("choice", ["required", "get_weather", "grow"])
def test_forced_calls_are_calls(tagged, family, choice):
    """Whatever the model would say: calls of these functions, arguments of their schemas; the same when drafted."""
    named = {"type": "function", "function": {"name": choice}}
    tools = check(TOOLS, choice if choice == "required" else named)
    family = tools.written(family)
    asked = constraint(tools, family, tagged.tokenizer)
    params = SamplingParams(
        structured_outputs=asked, temperature=1.0, seed=3, max_tokens=160, skip_special_tokens=False
    )
    tagged.speculative_config = None
    (plain,) = tagged.generate("What now?", params)
    tagged.speculative_config = {"method": "ngram"}
    (fast,) = tagged.generate("What now?", params)
    share = 8 if family is MINISTRAL else 4  # whose calls have less to be forced, and repeat themselves
    assert fast.token_ids == plain.token_ids and fast.drafted_by.count("grammar") > len(fast.token_ids) / share
    content, calls = parse(plain.text, family, tools.callable)
    assert content is None and calls and (choice == "required" or [c["function"]["name"] for c in calls] == [choice])
    for call in calls if plain.finish_reason == "stop" else calls[:-1]:
        function = call["function"]
        jsonschema.validate(json.loads(function["arguments"]), tools.functions[function["name"]])


DRAFT = "http://json-schema.org/draft-%s/schema#"
LEAF = {"type": "object", "properties": {"b": {"const": 1}}, "required": ["b"], "additionalProperties": False}


def only(value: Any, **more: Any) -> dict[str, Any]:
    """A schema of objects that must have a member `a`."""
    closed = {"type": "object", "properties": {"a": value}, "required": ["a"], "additionalProperties": False}
    return {**closed, **more}


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (only({"const": {"$ref": "#/a"}}), {"$ref": "#/a"}),
        (only({"enum": [{"$ref": "#"}]}), {"$ref": "#"}),
        (only(0, properties={"a": {"$ref": "#/properties/const"}, "const": LEAF}), {"b": 1}),
        (only({"$ref": "#/$defs/enum"}, **{"$defs": {"enum": {"$ref": "#/$defs/x"}, "x": LEAF}}), {"b": 1}),
        (only({"$ref": "#q"}, **{"$defs": {"x": {**LEAF, "$anchor": "q"}}}), {"b": 1}),
        (only({"$ref": "#/$defs/x"}, **{"$id": "http://here/tool", "$defs": {"x": LEAF}}), {"b": 1}),
        (only({"$ref": "#/$defs/x"}, **{"$id": "#it", "$schema": DRAFT % "07", "$defs": {"x": LEAF}}), {"b": 1}),
        (only({"$ref": "#/x"}, **{"id": "http://a/b", "$schema": DRAFT % "04", "x": {"enum": [{"b": 1}]}}), {"b": 1}),
    ],
)  # fmt: skip
def test_references_of_a_forced_calls_schema(tagged, schema, value):
    """They are to that schema, wherever it says it lies; what only looks like one is left alone."""
    tools = check([tool("now", schema)], "required", False)
    asked = constraint(tools, HERMES, tagged.tokenizer)
    tagged.speculative_config = None
    (output,) = tagged.generate(
        "What?", structured_outputs=asked, temperature=0, max_tokens=90, skip_special_tokens=False
    )
    assert json.loads(parse(output.text, HERMES, ["now"])[1][0]["function"]["arguments"])["a"] == value


def test_free_choices_ask_nothing_of_the_output(tagged):
    for choice in ("auto", "none", None):
        assert constraint(check(TOOLS, choice), HERMES, tagged.tokenizer) is None
    single = constraint(check(TOOLS, "required", False), HERMES, tagged.tokenizer)
    assert single is not None and "*" not in str(single.grammar).splitlines()[0]


def test_marks_that_are_tokens_are_forced_as_such():
    tokenizer = read_tokenizer(find("tiny"))
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False)])
    asked = constraint(check([tool("now")], "required"), HERMES, tokenizer)
    assert asked is not None and f"<[{len(tokenizer) - 1}]>" in str(asked.grammar)


@pytest.mark.parametrize("kind", [{}, {"type": ["object", "null"]}])
@pytest.mark.parametrize("family", [HERMES, LLAMA, MINISTRAL], ids=lambda family: family.name)
def test_forced_arguments_are_an_object(family, kind):
    """Also where a function's parameters do not say so: no client could read others."""
    tokenizer = read_tokenizer(find("tiny"))
    known = {"name": "f", "parameters": {"properties": {"city": {"type": "string"}}, "required": ["city"], **kind}}
    asked = constraint(check([{"type": "function", "function": known}], "required"), family, tokenizer)
    matcher = read(asked, tokenizer, len(tokenizer)).matcher.deep_copy()
    for arguments, fits in (("5", False), ("null", False), ("[{}]", False), ("{}", False), ('{"city": "Oslo"}', True)):
        call = f'{{"name": "f", "{family.arguments}": {arguments}}}'
        call = f"f{family.head}{arguments}" if family.head else call
        ids = tokenizer(family.begin + call, add_special_tokens=False)["input_ids"]
        assert (matcher.validate_tokens(ids) == len(ids)) == fits, arguments
