"""Tool calls: what a request's `tools` ask of prompt and output, and the calls that are found in what a model writes.

The ways of writing them that are known (`FAMILIES`) are told apart by the chat template. `Parser` reads text as it
comes, in whatever pieces, and hands out OpenAI's deltas; a whole answer is read by the same. What begins like a call
and is none, is content.
"""

from __future__ import annotations

import ast
import json
import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from io import StringIO
from itertools import pairwise, product
from token import NAME
from tokenize import TokenError, generate_tokens, untokenize
from typing import Any, ClassVar

from outrider.config import StructuredOutputsParams
from outrider.errors import ConfigError, OutriderError, brief
from outrider.grammar import DATA, MOST_TEXT, PARTS, Ours, literal, understood

NAMES = set(string.ascii_letters + string.digits + "_-.")  # in names of functions; OpenAI's, and the dot
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
LONGEST_NAME, MOST_TOOLS = 128, 256
PIECE = 4096  # characters read at a time, since what is behind each call is copied
Delta = dict[str, Any]
Render = Callable[[list[Any], dict[str, Any]], str]


@dataclass(frozen=True)
class Family:
    """How some models write calls: `begin`, one after another with `between` between them, `end`."""

    name: str
    marks: tuple[str, ...]  # before calls, in text: any of them
    begin: str
    end: str
    between: str
    shape: str = "json"  # of a call: an object that names the function; or another of SHAPES
    opening: str = "{"  # of a call; empty: a name
    bare: str = ""  # what calls without a mark begin with, at an answer's beginning
    closing: str = ""  # a mark behind calls
    listed: str = "[],;"  # what may stand between a mark and calls
    arguments: str = "arguments"
    head: str = ""  # between a call's name and its arguments
    id_length: int = 24  # of a call's id; Mistral's templates insist on theirs

    def new_id(self) -> str:
        """An id for a call."""
        letters = "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(self.id_length))
        return letters if self.id_length == 9 else f"call_{letters}"


HERMES = Family(  # and Qwen's, SmolLM3's, Granite 4's
    "hermes", ("<tool_call>",), "<tool_call>\n", "\n</tool_call>", "\n</tool_call>\n<tool_call>\n",
    closing="</tool_call>", listed="",
)  # fmt: skip
FUNCTION = "<function="
CODER = replace(  # whose models leave out the first mark now and then
    HERMES, name="qwen3_coder", marks=("<tool_call>", FUNCTION), shape="tagged", opening=FUNCTION
)
SEED = replace(
    CODER, name="seed_oss", marks=("<seed:tool_call>", FUNCTION), begin="<seed:tool_call>\n",
    end="\n</seed:tool_call>", between="\n</seed:tool_call>\n<seed:tool_call>\n", closing="</seed:tool_call>",
)  # fmt: skip
LLAMA = Family("llama3_json", ("<|python_tag|>",), "", "", "; ", bare="{", arguments="parameters")
XLAM = replace(LLAMA, name="xlam", begin="[", end="]", between=", ", bare="[", arguments="arguments")
PYTHONIC = replace(XLAM, name="pythonic", shape="python", opening="")  # Llama 4's, ToolACE's
MISTRAL = Family("mistral", ("[TOOL_CALLS]",), "[TOOL_CALLS] [", "]", ", ", id_length=9)
MINISTRAL = Family(
    "ministral", ("[TOOL_CALLS]",), "[TOOL_CALLS]", "", "[TOOL_CALLS]", "named", opening="", head="[ARGS]", id_length=9
)
GRANITE = Family("granite", ("<|tool_call|>", "<tool_call>"), "<|tool_call|>[", "]", ", ")  # the second: 3.1
PHI = replace(GRANITE, name="phi4_mini", end="]<|/tool_call|>", closing="<|/tool_call|>")
NEMOTRON = Family(
    "nemotron", ("<TOOLCALL>",), "<TOOLCALL>[", "]</TOOLCALL>", ", ", closing="</TOOLCALL>"
)  # Llama-Nemotron's
OLMO = Family(
    "olmo3", ("<function_calls>",), "<function_calls>", "</function_calls>", "\n", "python", opening="",
    closing="</function_calls>", listed="",
)  # fmt: skip
GEMMA = Family(
    "functiongemma", ("<start_function_call>",), "<start_function_call>", "<end_function_call>",
    "<end_function_call><start_function_call>", "escaped", opening="call:", closing="<end_function_call>", listed="",
)  # fmt: skip
TO = "<|channel|>commentary to=functions."
HARMONY = Family(  # gpt-oss's, whose calls are messages (`Harmony`)
    "harmony", (TO,), TO, "", f"<|end|><|start|>assistant{TO}", "message", opening="",
    head=" <|constrain|>json<|message|>",
)  # fmt: skip
MARKED = NEMOTRON, OLMO, GEMMA, SEED  # whose marks no other family's templates have
FAMILIES = HERMES, CODER, LLAMA, XLAM, PYTHONIC, MISTRAL, MINISTRAL, GRANITE, PHI, HARMONY, *MARKED
LOOK_UP: dict[str, Any] = {"name": "look_up", "arguments": {"city": "Oslo"}}


def family_of(template: Any, render: Render | None = None) -> Family | None:
    """The way of a chat template; None if it has no tools, or writes their calls in another way.

    Its marks are those of several families. So if it can be rendered (`LLM.render_text`), it is made to write a call,
    which has to be found; a template that writes none is believed, if it has marks.
    """
    if not isinstance(template, str) or "tools" not in template:
        return None
    likely, unmarked = list[Family](), [XLAM, PYTHONIC]
    if "<tool_call>" in template:
        likely = [CODER, HERMES] if FUNCTION in template else [HERMES]
        likely = [] if "<arg_key>" in template else likely  # GLM's
    elif MISTRAL.marks[0] in template:
        likely = [MINISTRAL, MISTRAL] if "[ARGS]" in template else [MISTRAL, MINISTRAL]
    elif GRANITE.marks[0] in template:
        likely = [PHI] if PHI.closing in template else [GRANITE]
    elif "<|channel|>" in template and "functions." in template:
        likely = [HARMONY]
    elif marked := [family for family in MARKED if family.marks[0] in template]:
        likely = marked
    elif "parameters" in template and ("python_tag" in template or "ipython" in template):
        likely = [LLAMA]
    written = _written(template, render) if render and (likely or "tool_calls" in template) else []
    schema = {"properties": {"city": {"type": "string"}}}
    for family, text in product([*likely, *unmarked], written):
        calls = [call["function"] for call in parse(text, family, {LOOK_UP["name"]: schema})[1]]
        with suppress(ValueError):  # arguments that are half ones
            if [call | {"arguments": json.loads(call["arguments"])} for call in calls] == [LOOK_UP]:
                return family
    return None if any(LOOK_UP["name"] in text for text in written) else next(iter(likely), None)


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
    def callable(self) -> dict[str, Mapping[str, Any]]:
        """The functions that may be called: names and schemas."""
        named = self.choice[1:]
        return {named: self.functions[named]} if self.choice.startswith("=") else self.functions

    @property
    def forced(self) -> bool:
        """Whether the output can be nothing but calls."""
        return self.choice not in ("none", "auto")

    def written(self, family: Family) -> Family:
        """How calls are written that this asks for: those whose values are no JSON are forced as Hermes's."""
        return HERMES if self.forced and family.shape in ("tagged", "python", "escaped") else family


def check(tools: Any, tool_choice: Any = None, parallel_tool_calls: Any = None) -> Tools | None:
    """A request's three fields; None if it has no tools. Raises ConfigError, naming the field."""
    if tools is None or (isinstance(tools, (list, tuple)) and not tools):  # an empty list is what some clients send
        if tool_choice not in (None, "none") and not (tools is not None and tool_choice == "auto"):
            raise ConfigError(f"tool_choice {brief(tool_choice)} needs tools")
        return None
    if not isinstance(tools, (list, tuple)) or len(tools) > MOST_TOOLS:
        raise ConfigError(f"tools must be a list of at most {MOST_TOOLS} functions, not {brief(tools)}")
    functions = dict[str, Mapping[str, Any]]()
    for tool in tools:
        function = _function(tool)
        name = function.get("name")
        if not isinstance(name, str) or tool.get("type") != "function":
            raise ConfigError(
                f"tools: {{'type': 'function', 'function': {{'name': ..., 'parameters': ...}}}}, not {brief(tool)}"
            )
        if not 1 <= len(name) <= LONGEST_NAME or not set(name) <= NAMES:
            signs = "letters, digits, _, - and ."
            raise ConfigError(f"tools: a function's name has 1 to {LONGEST_NAME} {signs}, not {brief(name)}")
        if name in functions:
            raise ConfigError(f"tools: function {name!r} is there twice")
        schema = function.get("parameters")
        if not (schema is None or isinstance(schema, Mapping)):
            raise ConfigError(f"tools: parameters of {name!r} must be a JSON schema, not {brief(schema)}")
        if schema and "object" not in (kinds if isinstance(kinds := schema.get("type", "object"), list) else [kinds]):
            raise ConfigError(f"tools: parameters of {name!r} must be an object's schema, not one of {brief(kinds)}")
        functions[name] = schema or NO_PARAMETERS
    if not (parallel_tool_calls is None or isinstance(parallel_tool_calls, bool)):
        raise ConfigError(f"parallel_tool_calls must be true or false, not {brief(parallel_tool_calls)}")
    choice = "auto" if tool_choice is None else tool_choice
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        choice, functions = _allowed(choice.get("allowed_tools"), functions)
    elif isinstance(choice, Mapping):
        named = _function(choice).get("name") if choice.get("type") == "function" else None
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
        name = _function(tool).get("name")
        if not isinstance(name, str) or name not in functions:
            raise ConfigError(f"tool_choice allows {brief(tool)}; there are {', '.join(functions)}")
        found[name] = functions[name]
    return mode, found


def for_templates(message: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI's message as templates take it: text everywhere, the arguments of earlier calls as objects, and reasoning
    under each of the names that templates have for it.

    Arguments that are none, as of a call that was cut off, count as no arguments: the conversation is to go on. Raises
    ConfigError for calls that are none.
    """
    own = dict(message)
    if calls := own.get("tool_calls"):
        own["tool_calls"] = [_shown(call) for call in (calls if isinstance(calls, (list, tuple)) else [calls])]
    else:
        own.pop("tool_calls", None)  # some templates take an empty list for calls
    if own.get("content") is None:
        own["content"] = ""
    said = own.get("reasoning") or own.get("reasoning_content")
    if not (said is None or isinstance(said, str)):
        raise ConfigError(f"messages: reasoning is text, not {brief(said)}")
    if said:
        both = own["content"] and own.get("tool_calls")  # gpt-oss's template then refuses the reasoning
        own |= {"reasoning": said, "reasoning_content": said, "thinking": "" if both else said}
    return own


def _shown(call: Any) -> dict[str, Any]:
    function = _function(call)
    if not isinstance(function.get("name"), str):
        raise ConfigError(f"messages: tool_calls hold {{'id', 'type', 'function': {{...}}}}, not {brief(call)}")
    given = function.get("arguments")
    arguments = _value(given) if isinstance(given, str) else given
    if not isinstance(arguments, Mapping):
        arguments = {}
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _function(given: Any) -> Mapping[str, Any]:
    """That of a tool, a call or a choice; empty where there is none."""
    function = given.get("function") if isinstance(given, Mapping) else None
    return function if isinstance(function, Mapping) else {}


def constraint(tools: Tools, family: Family, tokenizer: Any) -> StructuredOutputsParams | None:
    """What the output must be for `tool_choice` required or a named function; None where it is free.

    The grammar writes calls as the family's models do, spaces included, so all but the arguments is forced. (Mistral's
    have `[ARGS]` since 2025, and had an id between or nothing before.)
    """
    if not tools.forced:
        return None
    added = tokenizer.get_added_vocab()
    several = tools.parallel and not tools.choice.startswith("=")
    try:
        if (size := len(json.dumps([*tools.callable.values()]))) > MOST_TEXT:
            raise ConfigError(f"tools: their parameters have {size} characters; at most {MOST_TEXT} can be asked for")
        calls = [_call(name, understood(schema), family, added) for name, schema in tools.callable.items()]
    except RecursionError:
        raise ConfigError("tools: parameters are nested too deeply") from None
    except ValueError as error:
        raise ConfigError(f"tools: these parameters cannot be used: {error}") from None
    begin, end, between = (literal(text, added) for text in (family.begin, family.end, family.between))
    more = f"({between} call)*" if several else ""
    rules = [f"call_{i}: {call}" for i, call in enumerate(calls)]
    choice = " | ".join(f"call_{i}" for i in range(len(calls)))
    text = "\n".join([f"start: {begin} call {more} {end}", f"call: {choice}", *rules])
    return StructuredOutputsParams(grammar=Ours(text))


def _call(name: str, schema: Mapping[str, Any], family: Family, added: Mapping[str, int]) -> str:
    """A call of a function as a grammar has it."""
    style = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    if family.head:
        call = {**schema, "type": "object", "x-guidance": style}
        return f"{literal(name + family.head, added)} %json {json.dumps(call)}"
    own = {"name": {"const": name}, family.arguments: _rooted(schema, family.arguments)}
    call = {
        "x-guidance": style, "type": "object", "properties": own, "required": [*own], "additionalProperties": False,
    }  # fmt: skip
    return f"%json {json.dumps(call)}"


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

    return walk(schema)


# --- reading what a model writes --------------------------------------------------------------------------------------


PARAMETER, END, ENDS = "<parameter=", "</parameter>", ("</function>", "</tool_call>")
VALUE_ENDS = re.compile(rf"\n?{END}|\n(?={PARAMETER}|{ENDS[0]})")  # the second: its own is missing
TEXT = {"string"}  # the types of a value that is taken as it stands
ESCAPE, BARE = "<escape>", re.compile(r'([^\s{}\[\],:"]+)(\s*:)?')
HEAD = re.compile(r"[A-Za-z0-9_.-]+(\[CALL_ID\][A-Za-z0-9_-]*)?(\[ARGS\])?\s*")
HALF_A_HEAD = re.compile(r"[A-Za-z0-9_.-]*(\[[A-Z_]*|(\[CALL_ID\][A-Za-z0-9_-]*)?(\[[A-Z_]*|\[ARGS\])?\s*)")


@dataclass
class Call:
    """A JSON object, read as it comes: the values of its members as text, and where the one under way begins."""

    functions: Mapping[str, Mapping[str, Any]]  # names and schemas
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

    @property
    def name(self) -> str:
        """The function's; empty while it is not known."""
        return _text(self.values.get("name", ""))

    @property
    def arguments(self) -> str:
        """What has come of them, as JSON."""
        return self.so_far("arguments")

    @property
    def text(self) -> str:
        """All of it, as it was written."""
        return self.raw

    def so_far(self, key: str) -> str:
        """What has come of a member's value; empty before it."""
        if key in self.values or self.key != key or self.expects != "end":
            return self.values.get(key, "")
        return (
            self.raw[self.begin : self.at] if self.depth > 1 or self.quoted else self.raw[self.begin : self.at].strip()
        )


@dataclass
class Named(Call):
    """A function's name and the object of its arguments: Mistral's `name[ARGS]{...}`, or with an id, or no mark."""

    head: str = ""

    def feed(self, text: str) -> str:
        for i, c in enumerate(text if not self.raw else ""):
            if c == "{" and HEAD.fullmatch(self.head):
                return super().feed(text[i:])
            if len(self.head) > 2 * LONGEST_NAME or not HALF_A_HEAD.fullmatch(self.head + c):
                self.done = True
                return text[i:]
            self.head += c
        return super().feed(text) if self.raw else ""

    @property
    def name(self) -> str:
        return self.head.partition("[")[0].strip() if self.raw else ""

    @property
    def arguments(self) -> str:
        return self.raw

    @property
    def text(self) -> str:
        return self.head + self.raw


@dataclass
class Tagged(Call):
    """Qwen3-Coder's `<function=name>`, with a `<parameter=key>` for each argument, whose values the schema tells apart:
    text as it is, or JSON."""

    function: str = ""
    part: str = ""  # of `raw`: the tag or value under way
    said: str = ""  # the arguments so far, as JSON
    keys: set[str] = field(default_factory=set)
    in_value: bool = False
    begun: bool = False  # the value
    types: set[str] = field(default_factory=set)  # that it may be of

    @property
    def name(self) -> str:
        return self.function

    @property
    def arguments(self) -> str:
        return self.said

    def feed(self, text: str) -> str:
        self.raw, at = self.raw + text, 0
        while at < len(text) and not self.done:
            if self.in_value:
                text, at = self._more(text[at:]), 0
            else:
                self.part, at = self.part + text[at], at + 1
                (self._tag if self.said else self._head)()
        self.raw = self.raw[: len(self.raw) - len(text) + at]
        return text[at:]

    def _head(self) -> None:
        if self.part.endswith(">"):
            self.function, self.part, self.said = self.part[len(FUNCTION) : -1], "", "{"
        elif len(self.part) > len(FUNCTION):  # no name of a function
            self.done = self.part[-1] not in NAMES or len(self.part) > len(FUNCTION) + LONGEST_NAME

    def _tag(self) -> None:
        self.part = self.part.lstrip()
        if self.part in ENDS:
            self.said, self.done = self.said + "}", True
        elif self.part.startswith(PARAMETER) and self.part.endswith(">"):
            self.key, self.part, self.in_value, self.begun = self.part[len(PARAMETER) : -1], "", True, False
            if self.key in self.keys:  # what was said stands
                self.key = ""
            elif self.key:
                known = self.functions.get(self.function, {}).get("properties")
                schema = known.get(self.key) if isinstance(known, Mapping) else None
                self.types = TEXT if schema is None else _types(schema)
                comma = ", " if self.keys else ""
                self.said += f"{comma}{json.dumps(self.key, ensure_ascii=False)}: " + '"' * (self.types == TEXT)
                self.keys.add(self.key)
        elif not any(tag.startswith(self.part[: len(tag)]) for tag in (PARAMETER, *ENDS)):
            self.part = "<" if self.part.endswith("<") else ""

    def _more(self, text: str) -> str:
        """More of a value, which lies between line breaks; what stands behind it is given back."""
        known = len(self.part)
        self.part += text
        end = VALUE_ENDS.search(self.part, max(0, known - len(END)))  # which may have begun before
        if end:
            value, behind, self.part = self.part[: end.start()], self.part[end.end() :], ""
        else:  # what may be its end waits, and what is no text
            marks = (f"\n{END}", END, f"\n{PARAMETER}", f"\n{ENDS[0]}")
            waits = (n for n in range(len(END), 0, -1) if self.part.endswith(tuple(mark[:n] for mark in marks)))
            keep = len(self.part) - next(waits, 0) if self.types == TEXT else 0
            value, behind, self.part = self.part[:keep], "", self.part[keep:]
        if value and not self.begun:
            self.begun, value = True, value.removeprefix("\n")
        if self.key and self.types == TEXT:
            self.said += json.dumps(value, ensure_ascii=False)[1:-1] + '"' * bool(end)
        elif self.key and end:
            self.said += _literally(value, self.types)
        self.in_value = not end
        return behind


@dataclass
class Python(Call):
    """A call as Python has it, with named arguments: literals, or JSON's words. It is known when it is whole."""

    head: str = ""  # the name
    quote: str = ""  # under way
    said: str = ""  # the arguments, as JSON

    @property
    def name(self) -> str:
        return self.head if self.said else ""

    @property
    def arguments(self) -> str:
        return self.said

    def _step(self, c: str) -> None:
        if not self.depth:
            self.depth = int(c == "(" and bool(self.head))
            self.head += c if c in NAMES else ""
            self.done = not self.depth and (c not in NAMES or len(self.head) > LONGEST_NAME)
        elif self.quote:
            self.quote = "" if c == self.quote and not self.escaped else self.quote
            self.escaped = c == "\\" and not self.escaped
        elif c in "'\"":
            self.quote = c
        else:
            self.depth += (c in "([{") - (c in ")]}")
            self.done = not self.depth
            self.said = _arguments(self.raw[self.raw.index("(") : self.at + 1]) if self.done else ""


@dataclass
class Escaped(Call):
    """FunctionGemma's `call:name{key:value}`, with bare keys and text between marks. It is known when it is whole."""

    said: str = ""  # the arguments, as JSON

    @property
    def name(self) -> str:
        return self.raw[len(GEMMA.opening) : self.raw.index("{")] if self.said else ""

    @property
    def arguments(self) -> str:
        return self.said

    def _step(self, c: str) -> None:
        behind = self.at - len(GEMMA.opening)
        if not self.depth:
            self.depth = int(c == "{" and behind > 0)
            self.done = not self.depth and behind >= 0 and (c not in NAMES or behind >= LONGEST_NAME)
        elif c == ">" and self.raw.endswith(ESCAPE, 0, self.at + 1):
            self.quoted = not self.quoted
        elif not self.quoted:
            self.depth += (c in "{[") - (c in "}]")
            self.done = not self.depth
            self.said = _unescaped(self.raw[self.raw.index("{") : self.at + 1]) if self.done else ""


def _unescaped(text: str) -> str:
    """An object of FunctionGemma's as JSON; empty if it is none. A word that is no JSON is text."""

    def word(found: re.Match[str]) -> str:
        return json.dumps(found[1]) + found[2] if found[2] else _literally(found[1], set())

    value = _value(text)  # some write JSON
    if value is None:
        parts = text.split(ESCAPE)
        parts[::2] = [BARE.sub(word, part) for part in parts[::2]]
        parts[1::2] = [json.dumps(part) for part in parts[1::2]]
        value = _value("".join(parts))
    return _object(value)


class _Words(ast.NodeTransformer):
    """JSON's words for Python's."""

    words: ClassVar[dict[str, Any]] = {"true": True, "false": False, "null": None}

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(self.words[node.id]) if node.id in self.words else node


def _arguments(text: str) -> str:
    """Named arguments in brackets as a JSON object; empty if they are none. Names may be words of Python's: `from`."""
    with suppress(SyntaxError, TokenError, ValueError, TypeError, MemoryError, RecursionError):
        words = [(kind, word) for kind, word, *_ in generate_tokens(StringIO(f"f{text}").readline)]
        named = [(kind, f"_{word}" if (kind, then) == (NAME, "=") else word)
                 for (kind, word), (_, then) in pairwise([*words, (0, "")])]  # fmt: skip
        call = ast.parse(untokenize(named), mode="eval").body
        if isinstance(call, ast.Call) and not call.args and all(part.arg for part in call.keywords):
            found = dict[str, Any]()
            for part in call.keywords:  # what was said stands
                found.setdefault(str(part.arg)[1:], ast.literal_eval(_Words().visit(part.value)))
            return _object(found)
    return ""


def _object(value: Any) -> str:
    """A call's arguments as JSON; empty if they are no object, or one that JSON has no words for."""
    with suppress(ValueError, TypeError, RecursionError):
        said = json.dumps(value, ensure_ascii=False, allow_nan=False) if isinstance(value, dict) else ""
        said.encode()  # no surrogates
        return said
    return ""


def _types(schema: Any) -> set[str]:
    """The types that a schema names; none: any. Whatever makes no sense in it names none."""
    found, parts = set[str](), [schema]
    while parts:
        part = parts.pop()
        if not isinstance(part, Mapping):
            continue
        given, values = part.get("type"), [part["const"]] if "const" in part else _listed(part.get("enum"))
        found |= {str(kind) for kind in _listed([given] if isinstance(given, str) else given)}
        found |= {_type(value) for value in values if given is None}
        parts += [*_listed(part.get("anyOf")), *_listed(part.get("oneOf"))]
    return found


def _listed(given: Any) -> Sequence[Any]:
    return given if isinstance(given, (list, tuple)) else ()


def _type(value: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null", list: "array"}
    return kinds.get(type(value), "object")


def _literally(text: str, types: set[str]) -> str:
    """A value as JSON: as it is if it is some, or Python's word for it, and may be such; else text."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    words = {"True": "true", "False": "false", "None": "null"}
    said = words.get(text.strip(), text.strip())
    with suppress(ValueError, RecursionError):
        kind = _type(json.loads(said, parse_constant=refuse))
        if "string" not in types or kind in types or (kind == "integer" and "number" in types):
            return said
    return json.dumps(text, ensure_ascii=False)


HEADERS = "<|start|>", "<|channel|>", "to=functions."  # what a message of gpt-oss's begins with
HEADER = re.compile(rf"\s*({'|'.join(map(re.escape, HEADERS))})")
CLOSINGS = "<|end|>", "<|call|>", "<|return|>", *HEADERS[:2]
RECIPIENT, ANALYSIS = re.compile(r"\bto=functions\.([\w.-]+)"), re.compile(r"<\|channel\|>\s*analysis\b")
LONGEST_HEADER = 4 * LONGEST_NAME
SHAPES: dict[str, type[Call]] = {
    "json": Call, "named": Named, "tagged": Tagged, "python": Python, "escaped": Escaped,
}  # fmt: skip


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
    """Reads an answer in pieces and hands out OpenAI's deltas: content, and calls of `functions`."""

    def __init__(
        self, family: Family, functions: Mapping[str, Mapping[str, Any]], new_id: Callable[[], str] | None = None,
        forced: bool = False,
    ) -> None:  # fmt: skip
        self.family, self.functions, self.new_id = family, functions, new_id or family.new_id
        self.forced = forced  # the text can be nothing but calls
        self.calls = 0  # handed out
        self.broken = False  # whether the last of them was cut off
        self.marked = False  # whether a message's header has come
        self._held = ""  # text that may yet be a mark, or belongs to a call
        self._call: Call | None = None
        self._inside = False  # behind a mark: between calls
        self._behind = False  # and behind one of them
        self._lead = ""  # what stood between the mark and the call: content, if it is none
        self._fresh = True  # nothing but space has come since the beginning, or the last call

    @property
    def thinking(self) -> bool:
        """Whether what comes next is reasoning."""
        return False

    def feed(self, text: str) -> list[Delta]:
        """More of the answer."""
        pieces = (text[at : at + PIECE] for at in range(0, len(text), PIECE))
        return [delta for piece in pieces for delta in self._read(piece)]

    def _read(self, text: str) -> list[Delta]:
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
        deltas = self._read("")
        held = ""
        if self._call is not None and self._call.index < 0:
            held = "" if self.calls else self._lead + self._call.text  # behind calls: another, which was cut off
        elif self._call is not None:
            self.broken = True
        elif not (self._inside and self.calls):
            held = self._lead + self._held
            if self.calls and any(mark.startswith(held.strip()) for mark in self.family.marks):  # of another one
                held = ""
        self._held, self._lead, self._call = "", "", None
        return deltas + ([{"content": held}] if held and not self.forced else [])

    def _outside(self) -> list[Delta]:
        """Content, up to a mark or what may become one."""
        if self.family.bare and self._fresh and self._held.lstrip()[:1] == self.family.bare:
            self._inside, self._behind = True, False
            return []
        content, mark, self._held = until(self._held, self.family.marks)
        if mark:
            lead = "" if mark == self.family.opening else mark  # else it is the call's own
            self._held = (mark if not lead else "") + self._held
            self._inside, self._behind, self._lead = True, False, lead
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
        text, opening, closing = self._held, self.family.opening, self.family.closing
        for i, c in enumerate(text):
            if text.startswith(opening, i) if opening else c in NAMES:
                self._lead += text[:i]
                self._held, self._call = text[i:], SHAPES[self.family.shape](self.functions)
                return []
            if closing and text.startswith(closing, i):
                # behind a call it is only its end
                empty = "" if self._behind else self._lead + text[: i + len(closing)]
                self._held, self._inside, self._lead = text[i + len(closing) :], False, ""
                self._fresh = self._fresh and not empty
                return [{"content": empty}] if empty else []
            if any(len(text) - i < len(mark) and mark.startswith(text[i:]) for mark in (opening, closing)):
                self._lead, self._held = self._lead + text[:i], text[i:]
                return []
            if not c.isspace() and c not in self.family.listed:
                content, self._lead, self._inside = self._lead + text[:i], "", False
                if self._behind:  # of a list nothing is left but space
                    self._held = "".join(filter(str.isspace, content)) + text[i:]
                    return []
                self._held = text[i:]
                self._fresh = self._fresh and not content.strip()
                return [{"content": content}] if content else []
        self._lead, self._held = self._lead + text, ""
        return []

    def _heard(self, call: Call) -> list[Delta]:
        """What a call's text so far has to say."""
        deltas = list[Delta]()
        if call.index < 0 and (name := call.name) in self.functions:
            call.index, self.calls, self._lead, self._fresh = self.calls, self.calls + 1, "", True
            self._behind = True
            function = {"name": name, "arguments": ""}
            deltas.append(_delta(call.index, {"id": self.new_id(), "type": "function", "function": function}))
        if call.index >= 0:
            known = call.arguments
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
                deltas.append({"content": self._lead + call.text})
                self._inside, self._fresh = False, False
            elif self.family.shape == "named":  # each has its own mark
                self._inside = False
            self._lead, self._call = "", None
        return deltas


class Harmony(Parser):
    """Reads gpt-oss's messages, whose headers say what they are: reasoning, content, or a call.

    Text without a header is content, such as what a grammar wrote.
    """

    def __init__(
        self, functions: Mapping[str, Mapping[str, Any]], new_id: Callable[[], str] | None = None, forced: bool = False
    ) -> None:
        super().__init__(HARMONY, functions, new_id, forced)
        self._kind = ""  # of the message under way: reasoning, content or arguments; empty in a header
        self._said = ""  # of the message, so far
        self._known = set[str]()  # kinds that have come
        self._blank = ""  # content that says nothing, unless more comes

    @property
    def thinking(self) -> bool:
        return self._kind == "reasoning"

    def _read(self, text: str) -> list[Delta]:
        self._held += text
        deltas = list[Delta]()
        while self._held:
            before = len(self._held), self._kind
            deltas += self._body() if self._kind else self._header()
            if (len(self._held), self._kind) == before:
                break
        return [delta for delta in deltas if not (self.forced and "content" in delta)]

    def finish(self) -> list[Delta]:
        """The answer has ended: a header that was cut off is nobody's."""
        deltas = self._read("")
        if not self._kind and not HEADER.match(self._held):
            self._kind = "content"
        if self._kind:
            deltas += self._say(self._held)
        self.broken = self._kind == "arguments" and not isinstance(_value(self._said), dict)
        deltas += [{"content": self._blank}] if self._blank and not self.calls else []
        self._held = self._blank = ""
        return [delta for delta in deltas if not (self.forced and "content" in delta)]

    def go_on(self, said: str) -> None:
        """Begin behind what was said before, at a prompt's end."""
        self.feed(said)
        if self._kind:
            self._held = self._blank = ""

    def _header(self) -> list[Delta]:
        header, mark, behind = until(self._held, ("<|message|>",))
        begun, short = HEADER.match(header), len(header) < LONGEST_HEADER
        if not mark and short and (begun or any(each.startswith(header.lstrip()) for each in HEADERS)):
            return []
        self._said = ""
        if not (mark and short and begun):
            self._kind, end = "content", begun.end() if begun else 0
            text, self._held = self._held[:end], self._held[end:]
            return self._say(text)
        self._held, self.marked, name = behind, True, RECIPIENT.search(header)
        if name and name[1] in self.functions:
            self._kind, self.calls = "arguments", self.calls + 1
            function = {"name": name[1], "arguments": ""}
            return [_delta(self.calls - 1, {"id": self.new_id(), "type": "function", "function": function})]
        self._kind = "reasoning" if ANALYSIS.search(header) else "content"
        return []

    def _body(self) -> list[Delta]:
        text, mark, self._held = until(self._held, CLOSINGS)
        deltas = self._say(text)
        if mark:
            if self._kind == "arguments" and not self._said.strip():
                deltas += self._say("{}")
            self._held = (mark if mark in HEADERS else "") + self._held
            self._kind = ""
        return deltas

    def _say(self, text: str) -> list[Delta]:
        if not text:
            return []
        if self._kind == "arguments":
            self._said += text
            return [_delta(self.calls - 1, {"function": {"arguments": text}})]
        if self._kind == "content":
            text, self._blank = self._blank + text, ""
            if not self._said and not text.strip():
                self._blank = text
                return []
        lead = "\n" if not self._said and self._kind in self._known else ""  # between two messages
        self._said = self._said or text
        self._known.add(self._kind)
        return [{self._kind: lead + text}]


def until(text: str, marks: Sequence[str]) -> tuple[str, str, str]:
    """Text up to the first mark, the mark, and what is behind it; without one, what may yet become one is behind."""
    if found := [(at, mark) for mark in marks if (at := text.find(mark)) >= 0]:
        at, mark = min(found)
        return text[:at], mark, text[at + len(mark) :]
    most = min(len(text), max(map(len, marks)) - 1)
    at = next((len(text) - n for n in range(most, 0, -1) if any(m.startswith(text[-n:]) for m in marks)), len(text))
    return text[:at], "", text[at:]


def parser_of(
    family: Family, functions: Mapping[str, Mapping[str, Any]], new_id: Callable[[], str] | None = None,
    forced: bool = False,
) -> Parser:  # fmt: skip
    """What reads a family's answers."""
    return Harmony(functions, new_id, forced) if family is HARMONY else Parser(family, functions, new_id, forced)


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


def parse(
    text: str, family: Family, functions: Mapping[str, Mapping[str, Any]]
) -> tuple[str | None, list[dict[str, Any]]]:
    """A whole answer, as `regrouped` gives it."""
    parser = parser_of(family, functions)
    return regrouped([*parser.feed(text), *parser.finish()])
