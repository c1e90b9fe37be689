"""Tool calls: what a request's `tools` ask of prompt and output, and the calls that are found in what a model writes.

Three ways of writing them are known, told apart by the chat template: Hermes's and Qwen's `<tool_call>` tags around
`{"name": ..., "arguments": ...}`, Llama 3's bare `{"name": ..., "parameters": ...}`, and Mistral's list behind
`[TOOL_CALLS]`. `Parser` reads text as it comes, in whatever pieces, and hands out OpenAI's deltas; a whole answer is
read by the same. What begins like a call and is none, is content.
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from outrider.config import StructuredOutputsParams
from outrider.errors import ConfigError, OutriderError, brief

NAMES = set(string.ascii_letters + string.digits + "_-.")  # in names of functions; OpenAI's, and the dot
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
LONGEST_NAME, MOST_TOOLS = 128, 256
PARTS = "properties", "patternProperties", "dependentSchemas", "$defs", "definitions"  # of a schema: schemas by name
DATA = "const", "enum", "default", "examples"  # and what is none, whatever it looks like
Delta = dict[str, Any]
Render = Callable[[list[Any], dict[str, Any]], str]


@dataclass(frozen=True)
class Family:
    """How some models write calls: `begin`, one after another with `between` between them, `end`."""

    name: str
    begin: str
    end: str
    between: str
    arguments: str = "arguments"
    id_length: int = 24  # of a call's id; Mistral's templates insist on theirs

    def new_id(self) -> str:
        """An id for a call."""
        letters = "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(self.id_length))
        return letters if self.id_length == 9 else f"call_{letters}"


HERMES = Family("hermes", "<tool_call>\n", "\n</tool_call>", "\n</tool_call>\n<tool_call>\n")
LLAMA = Family("llama3_json", "", "", "; ", "parameters")
MISTRAL = Family("mistral", "[TOOL_CALLS] [", "]", ", ", id_length=9)
LOOK_UP: dict[str, Any] = {"name": "look_up", "arguments": {"city": "Oslo"}}
MARKS = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama3_json": "<|python_tag|>"}  # before a call, in text


def family_of(template: Any, render: Render | None = None) -> Family | None:
    """The way of a chat template; None if it has no tools, or writes their calls in another way.

    Its marks are those of several families. So if it can be rendered (`LLM.render_text`), it is made to write a call,
    which has to be found; a template that writes none is believed.
    """
    found = None
    if isinstance(template, str) and "tools" in template:
        if "<tool_call>" in template:
            found = None if "<arg_key>" in template or "<function=" in template else HERMES  # GLM's, Qwen3-Coder's
        elif "[TOOL_CALLS]" in template:
            found = MISTRAL
        elif "parameters" in template and ("python_tag" in template or "ipython" in template):
            found = LLAMA
    if found is None or render is None:
        return found
    written = _written(template, render)
    for text in written:
        calls = [call["function"] for call in parse(text, found, [LOOK_UP["name"]])[1]]
        with suppress(ValueError):  # arguments that are half ones
            if [call | {"arguments": json.loads(call["arguments"])} for call in calls] == [LOOK_UP]:
                return found
    return None if any(LOOK_UP["name"] in text for text in written) else found


def _written(template: str, render: Render) -> list[str]:
    """What a chat template makes of a call, from where its text parts from a prompt for an answer, and from where it
    parts from another answer. Nothing if it refuses one."""
    tools = spelt_out([{"type": "function", "function": {"name": LOOK_UP["name"]}}])
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "abcdefghi", "type": "function", "function": LOOK_UP}],
    }
    talk, texts = [{"role": "user", "content": "Where?"}], list[str]()
    try:
        for answer in ([], [{"role": "assistant", "content": "\0"}], [call]):
            options = {"chat_template": template, "tools": tools, "add_generation_prompt": not answer}
            texts.append(render(talk + answer, options))
    except OutriderError:
        return []
    whole = texts.pop()
    parts = [next((i for i, (a, b) in enumerate(zip(x, whole, strict=False)) if a != b), len(x)) for x in texts]
    return [whole[at:] for at in parts]


@dataclass(frozen=True)
class Tools:
    """A request's tools, checked: functions by name, which of them must be called, and whether several may be."""

    functions: dict[str, Mapping[str, Any]]
    choice: str  # none, auto, required, or the name of a function behind "="
    parallel: bool

    @property
    def callable(self) -> list[str]:
        """The names that a call may have."""
        return [self.choice[1:]] if self.choice.startswith("=") else list(self.functions)


def check(tools: Any, tool_choice: Any = None, parallel_tool_calls: Any = None) -> Tools | None:
    """A request's three fields; None if it has no tools. Raises ConfigError, naming the field."""
    if tools is None:
        if tool_choice not in (None, "none"):
            raise ConfigError(f"tool_choice {brief(tool_choice)} needs tools")
        return None
    if not isinstance(tools, (list, tuple)) or not 1 <= len(tools) <= MOST_TOOLS:
        raise ConfigError(f"tools must be a list of 1 to {MOST_TOOLS} functions, not {brief(tools)}")
    functions = dict[str, Mapping[str, Any]]()
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not 1 <= len(name) <= LONGEST_NAME or not set(name) <= NAMES:
            raise ConfigError(
                f"tools: {{'type': 'function', 'function': {{'name': ..., 'parameters': ...}}}}, not {brief(tool)}"
            )
        if name in functions:
            raise ConfigError(f"tools: function {name!r} is there twice")
        assert isinstance(function, Mapping)
        schema = function.get("parameters")
        if not (schema is None or isinstance(schema, Mapping)):
            raise ConfigError(f"tools: parameters of {name!r} must be a JSON schema, not {brief(schema)}")
        functions[name] = schema or NO_PARAMETERS
    if not (parallel_tool_calls is None or isinstance(parallel_tool_calls, bool)):
        raise ConfigError(f"parallel_tool_calls must be true or false, not {brief(parallel_tool_calls)}")
    choice = "auto" if tool_choice is None else tool_choice
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        choice, functions = _allowed(choice.get("allowed_tools"), functions)
    elif isinstance(choice, Mapping):
        function = choice.get("function") if choice.get("type") == "function" else None
        named = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(named, str) or named not in functions:
            raise ConfigError(f"tool_choice names {brief(named)}; there are {', '.join(functions)}")
        choice = f"={named}"
    elif choice not in ("none", "auto", "required"):
        raise ConfigError(f"tool_choice must be none, auto, required or a function, not {brief(choice)}")
    return Tools(functions, choice, parallel_tool_calls is not False)


def spelt_out(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A request's tools with what OpenAI lets be left out, since some templates read it."""
    left = {"description": "", "parameters": {"type": "object", "properties": {}}}
    shown = []
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, dict):
            tool = tool | {"function": function | {key: left[key] for key in left if function.get(key) is None}}
        shown.append(tool)
    return shown


def _allowed(given: Any, functions: dict[str, Mapping[str, Any]]) -> tuple[str, dict[str, Mapping[str, Any]]]:
    """The mode of OpenAI's `allowed_tools`, and those of the functions that it lets be called."""
    mode, tools = (given.get("mode"), given.get("tools")) if isinstance(given, Mapping) else (None, None)
    if mode not in ("auto", "required") or not isinstance(tools, (list, tuple)) or not tools:
        raise ConfigError(f"tool_choice: allowed_tools has a mode, auto or required, and tools, not {brief(given)}")
    found = dict[str, Mapping[str, Any]]()
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or name not in functions:
            raise ConfigError(f"tool_choice allows {brief(tool)}; there are {', '.join(functions)}")
        found[name] = functions[name]
    return mode, found


def conversation(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """OpenAI's messages as templates take them: text everywhere, and the arguments of earlier calls as objects.

    Raises ConfigError for calls that are none.
    """
    shown = []
    for message in messages:
        own = dict(message)
        if calls := own.get("tool_calls"):
            own["tool_calls"] = (
                [_shown(call) for call in calls] if isinstance(calls, (list, tuple)) else [_shown(calls)]
            )
        if own.get("content") is None:
            own["content"] = ""
        shown.append(own)
    return shown


def _shown(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    given = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConfigError(f"messages: tool_calls hold {{'id', 'type', 'function': {{...}}}}, not {brief(call)}")
    try:
        arguments = json.loads(given) if isinstance(given, str) and given.strip() else given or {}
    except (ValueError, RecursionError):
        raise ConfigError(f"messages: the arguments of a tool call must be JSON, not {brief(given)}") from None
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def constraint(tools: Tools, family: Family, tokenizer: Any) -> StructuredOutputsParams | None:
    """What the output must be for `tool_choice` required or a named function; None where it is free.

    The grammar writes calls as the family's models do, spaces included, so all but the arguments is forced.
    """
    if tools.choice in ("none", "auto"):
        return None
    added = tokenizer.get_added_vocab()
    style = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    several = tools.parallel and not tools.choice.startswith("=")
    rules = []
    for i, name in enumerate(tools.callable):
        schema = {
            "x-guidance": style, "type": "object", "additionalProperties": False,
            "properties": {"name": {"const": name}, family.arguments: _rooted(tools.functions[name], family.arguments)},
            "required": ["name", family.arguments],
        }  # fmt: skip
        rules.append(f"call_{i}: %json {json.dumps(schema)}")
    begin, end, between = (_literal(text, added) for text in (family.begin, family.end, family.between))
    more = f"({between} call)*" if several else ""
    calls = " | ".join(f"call_{i}" for i in range(len(rules)))
    return StructuredOutputsParams(grammar="\n".join([f"start: {begin} call {more} {end}", f"call: {calls}", *rules]))


def _rooted(schema: Mapping[str, Any], key: str) -> Any:
    """A schema below `properties/<key>` of another: its references to itself are longer there."""

    def walk(part: Any) -> Any:
        if isinstance(part, (list, tuple)):
            return [walk(item) for item in part]
        if not isinstance(part, Mapping) or isinstance(part.get("$id"), str):  # whose references are to that
            return part
        return {k: inside(k, v) for k, v in part.items()}

    def inside(k: str, v: Any) -> Any:
        if k == "$ref" and isinstance(v, str):
            return f"#/properties/{key}{v[1:]}" if v == "#" or v.startswith("#/") else v
        if k in PARTS and isinstance(v, Mapping):
            return {name: walk(part) for name, part in v.items()}
        return v if k in DATA else walk(v)

    try:
        return walk(schema)
    except RecursionError:
        raise ConfigError("tools: parameters are nested too deeply") from None


def _literal(text: str, added: Mapping[str, int]) -> str:
    """Text as a grammar has it; what is a token of its own in the vocabulary, as that token."""
    parts = []
    while text:
        mark = next((m for m in sorted(added, key=len, reverse=True) if m and text.startswith(m)), None)
        size = next((i for i in range(1, len(text)) if any(m and text.startswith(m, i) for m in added)), len(text))
        parts.append(f"<[{added[mark]}]>" if mark else json.dumps(text[:size]))
        text = text[len(mark) if mark else size :]
    return " ".join(parts)


# --- reading what a model writes --------------------------------------------------------------------------------------


@dataclass
class Call:
    """A JSON object, read as it comes: the values of its members as text, and where the one under way begins."""

    raw: str = ""
    at: int = 0
    depth: int = 0
    quoted: bool = False
    escaped: bool = False
    begin: int = 0  # of the key or value under way
    key: str = ""
    expects: str = "key"  # key, colon, value, or the end of one
    values: dict[str, str] = field(default_factory=dict)
    done: bool = False
    index: int = -1  # among the calls handed out; -1: not yet
    sent: int = 0  # characters of the arguments handed out

    def feed(self, text: str) -> str:
        """Read on; what stands behind the object is given back."""
        self.raw += text
        while self.at < len(self.raw) and not self.done:
            self._step(self.raw[self.at])
            self.at += 1
        rest, self.raw = self.raw[self.at :], self.raw[: self.at]
        return rest

    def _step(self, c: str) -> None:
        top = self.depth == 1
        if self.quoted:
            if self.escaped or c == "\\":
                self.escaped = not self.escaped
            elif c == '"':
                self.quoted = False
                if top and self.expects == "key":
                    key = _text(self.raw[self.begin : self.at + 1])
                    self.key, self.expects = "arguments" if key == "parameters" else key, "colon"  # models mix them up
            return
        if top and self.expects == "end" and c in ",}":
            self.values.setdefault(self.key, self.raw[self.begin : self.at].strip())  # what was said stands
            self.expects = "key"
        elif top and c == ":" and self.expects == "colon":
            self.expects = "value"
        elif top and not c.isspace() and self.expects in ("key", "value") and c not in ",}":
            self.begin = self.at
            self.expects = "end" if self.expects == "value" else "key"
        if c == '"':
            self.quoted = True
        elif c in "{[":
            self.depth += 1
        elif c in "}]":
            self.depth -= 1
            self.done = self.depth <= 0

    def so_far(self, key: str) -> str:
        """What has come of a member's value; empty before it."""
        if key in self.values or self.key != key or self.expects != "end":
            return self.values.get(key, "")
        return (
            self.raw[self.begin : self.at] if self.depth > 1 or self.quoted else self.raw[self.begin : self.at].strip()
        )


def _value(text: str) -> Any:
    """What JSON says; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _text(literal: str) -> str:
    value = _value(literal)
    return value if isinstance(value, str) else ""


class Parser:
    """Reads an answer in pieces and hands out OpenAI's deltas: content, and calls of the functions in `names`."""

    def __init__(self, family: Family, names: Sequence[str], new_id: Callable[[], str] | None = None) -> None:
        self.family, self.names, self.new_id = family, set(names), new_id or family.new_id
        self.mark = MARKS[family.name]
        self.calls = 0  # handed out
        self.broken = False  # whether the last of them was cut off
        self._held = ""  # text that may yet be a mark, or belongs to a call
        self._call: Call | None = None
        self._inside = False  # behind a mark: between calls
        self._lead = ""  # what stood between the mark and the call: content, if it is none
        self._fresh = True  # nothing but space has come since the beginning, or the last call

    def feed(self, text: str) -> list[Delta]:
        """More of the answer."""
        self._held += text
        deltas = list[Delta]()
        while self._held:
            before = len(self._held), self._inside, self._call
            if self._call is not None:
                self._held = self._call.feed(self._held)
                deltas += self._heard(self._call)
            elif self._inside:
                deltas += self._between()
            else:
                deltas += self._outside()
            if (len(self._held), self._inside, self._call) == before:
                break
        return deltas

    def finish(self) -> list[Delta]:
        """The answer has ended: what was held back, and is no call, is content."""
        deltas = self.feed("")
        held = ""
        if self._call is not None and self._call.index < 0:
            held = "" if self.calls else self._lead + self._call.raw  # behind calls: another, which was cut off
        elif self._call is not None:
            self.broken = True
        elif not (self._inside and self.calls):
            held = self._lead + self._held
            if self.calls and self.mark.startswith(held.strip()):  # of another call, which was cut off
                held = ""
        self._held, self._lead, self._call = "", "", None
        return deltas + ([{"content": held}] if held else [])

    def _outside(self) -> list[Delta]:
        """Content, up to a mark or what may become one."""
        if self.family is LLAMA and self._fresh and self._held.lstrip()[:1] == "{":
            self._inside = True
            return []
        at = self._held.find(self.mark)
        if at >= 0:
            content, self._held = self._held[:at], self._held[at + len(self.mark) :]
            self._inside, self._lead = True, self.mark
        else:
            size = len(self._held)
            hold = next(
                (n for n in range(min(size, len(self.mark) - 1), 0, -1) if self.mark.startswith(self._held[-n:])), 0
            )
            content, self._held = self._held[: size - hold], self._held[size - hold :]
        if self._fresh and not content.strip():  # space before a call says nothing: it waits for what comes
            if self._inside:
                self._lead = content + self._lead
            else:
                self._held = content + self._held
            return []
        self._fresh = False
        return [{"content": content}] if content else []

    def _between(self) -> list[Delta]:
        """Behind a mark: up to the next call, or the end of them."""
        text = self._held
        for i, c in enumerate(text):
            if c == "{":
                self._lead += text[:i]
                self._held, self._call = text[i:], Call()
                return []
            if self.family is HERMES and c == "<":
                closing = "</tool_call>"
                if text.startswith(closing, i):
                    lead = self._lead + text[: i + len(closing)]
                    empty = lead if self.mark in lead else ""  # behind a call it is only its end
                    self._held, self._inside, self._lead = text[i + len(closing) :], False, ""
                    self._fresh = self._fresh and not empty
                    return [{"content": empty}] if empty else []
                if closing.startswith(text[i:]):
                    self._lead, self._held = self._lead + text[:i], text[i:]
                    return []
            if not c.isspace() and not (c in "[],;" and self.family is not HERMES):
                content, self._held, self._lead, self._inside = self._lead + text[:i], text[i:], "", False
                self._fresh = self._fresh and not content.strip()
                return [{"content": content}] if content else []
        self._lead, self._held = self._lead + text, ""
        return []

    def _heard(self, call: Call) -> list[Delta]:
        """What a call's text so far has to say."""
        deltas = list[Delta]()
        if call.index < 0 and (name := _text(call.values.get("name", ""))) in self.names:
            call.index, self.calls, self._lead, self._fresh = self.calls, self.calls + 1, "", True
            function = {"name": name, "arguments": ""}
            deltas.append(_delta(call.index, {"id": self.new_id(), "type": "function", "function": function}))
        if call.index >= 0:
            known = call.so_far("arguments")
            if call.done and not known:
                known = "{}"
            if call.done and known.startswith('"'):  # some write the object as text
                inside = _text(known)
                known = inside if isinstance(_value(inside), dict) else known
            if known[:1] == "{" or call.done:
                fresh, call.sent = known[call.sent :], max(call.sent, len(known))
                if fresh:
                    deltas.append(_delta(call.index, {"function": {"arguments": fresh}}))
        if call.done:
            if call.index < 0:
                deltas.append({"content": self._lead + call.raw})
                self._inside, self._fresh = False, False
            self._lead, self._call = "", None
        return deltas


def _delta(index: int, what: dict[str, Any]) -> Delta:
    return {"tool_calls": [{"index": index, **what}]}


def regrouped(deltas: Sequence[Delta]) -> tuple[str | None, list[dict[str, Any]]]:
    """Deltas put together: the content (None if there is nothing but calls), and the calls as OpenAI has them."""
    content, calls = "", list[dict[str, Any]]()
    for delta in deltas:
        content += delta.get("content", "")
        for part in delta.get("tool_calls", ()):
            if part["index"] == len(calls):
                calls.append({"id": part["id"], "type": "function", "function": dict(part["function"])})
            else:
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    return content if content.strip() or not calls else None, calls


def parse(text: str, family: Family, names: Sequence[str]) -> tuple[str | None, list[dict[str, Any]]]:
    """A whole answer, as `regrouped` gives it."""
    parser = Parser(family, names)
    return regrouped([*parser.feed(text), *parser.finish()])
