"""How models write calls of functions: the ways that are known (`FAMILIES`), and one call, read as it comes."""

from __future__ import annotations

import ast
import json
import re
import secrets
import string
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from io import StringIO
from itertools import pairwise
from token import NAME
from tokenize import TokenError, generate_tokens, untokenize
from typing import Any, ClassVar

from outrider.grammar import listed, referred

NAMES = set(string.ascii_letters + string.digits + "_-.")  # in names of functions; OpenAI's, and the dot
LONGEST_NAME = 128
FUNCTION = "<function="
PARAMETER, END, ENDS = "<parameter=", "</parameter>", ("</function>", "</tool_call>")
VALUE_ENDS = re.compile(rf"\n?{END}|\n(?={PARAMETER}|{ENDS[0]})")  # the second: its own is missing
NEXT = re.compile(rf"{PARAMETER}([^<>\n]{{0,{LONGEST_NAME}}})(>?)")
TEXT = {"string"}  # the types of a value that is taken as it stands
ESCAPE, BARE = "<escape>", re.compile(r'([^\s{}\[\],:"]+)(\s*:)?')
LITERAL = re.compile(r'"(?:\\.|[^"\\])*"')  # a text in JSON
STRING = re.compile(r"""('{3}|"{3}|['"])((?:\\.|(?!\1)[^\\])*)\1""", re.DOTALL)  # of Python's
HEAD = re.compile(r"[A-Za-z0-9_.-]+(\[CALL_ID\][A-Za-z0-9_-]*)?(\[ARGS\])?\s*")
HALF_A_HEAD = re.compile(r"[A-Za-z0-9_.-]*(\[[A-Z_]*|(\[CALL_ID\][A-Za-z0-9_-]*)?(\[[A-Z_]*|\[ARGS\])?\s*)")


@dataclass
class Call:
    """A JSON object, read as it comes: the values of its members as text, and where the one under way begins."""

    functions: Mapping[str, Mapping[str, Any]]  # names and schemas
    text: str = ""  # all of it, as it was written
    raw: str = ""  # with escapes for control characters in texts, which are no JSON
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
        self.text += text[: len(text) - len(rest)]
        return rest

    def _step(self, c: str) -> None:
        top = self.depth == 1
        if self.quoted:
            if c < " ":
                escape = json.dumps(c)[1:-1]
                self.raw = self.raw[: self.at] + escape + self.raw[self.at + 1 :]
                self.at, self.escaped = self.at + len(escape) - 1, False
            elif self.escaped or c == "\\":
                self.escaped = not self.escaped
            elif c == '"':
                self.quoted = False
                if top and self.expects == "key":
                    key = text_of(self.raw[self.begin : self.at + 1])
                    self.key, self.expects = "arguments" if key == "parameters" else key, "colon"  # models mix them up
            return
        if top and self.expects == "end" and c in ",}<":
            self.values.setdefault(self.key, self.raw[self.begin : self.at].strip())  # what was said stands
            self.expects = "key"
        elif top and c == ":" and self.expects == "colon":
            self.expects = "value"
        elif top and not c.isspace() and self.expects in ("key", "value") and c not in ",}<":
            self.begin = self.at
            self.expects = "end" if self.expects == "value" else "key"
        if c == '"':
            self.quoted = True
        elif c in "{[":
            self.depth += 1
        elif c in "}]":
            self.depth -= 1
            self.done = self.depth <= 0
        elif c == "<":  # no JSON: brackets were left out, and this begins what is behind the call
            if self.key == "arguments" and self.expects == "end":
                self.values.setdefault(self.key, _whole(self.raw[self.begin : self.at]))
            self.done, self.at = True, self.at - 1

    @property
    def name(self) -> str:
        """The function's; empty while it is not known."""
        return text_of(self.values.get("name", ""))

    @property
    def arguments(self) -> str:
        """What has come of them, as JSON; empty before it."""
        if "arguments" in self.values or self.key != "arguments" or self.expects != "end":
            return self.values.get("arguments", "")
        so_far = self.raw[self.begin : self.at]
        return so_far if self.depth > 1 or self.quoted else so_far.strip()


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
            self.head, self.text = self.head + c, self.text + c
        return super().feed(text) if self.raw else ""

    @property
    def name(self) -> str:
        return self.head.partition("[")[0].strip() if self.raw else ""

    @property
    def arguments(self) -> str:
        return self.raw


@dataclass
class Tagged(Call):
    """Qwen3-Coder's `<function=name>`, with a `<parameter=key>` for each argument, whose values the schema tells apart:
    text as it is, or JSON."""

    function: str = ""
    part: str = ""  # of `text`: the tag or value under way
    said: str = ""  # the arguments so far, as JSON
    keys: set[str] = field(default_factory=set)
    in_value: bool = False
    begun: bool = False  # the value
    searched: int = 0  # how far no end of the value was found
    sure: bool = False  # whether it is a call: text may mention its first tag
    types: set[str] = field(default_factory=set)  # that it may be of

    @property
    def name(self) -> str:
        return self.function if self.sure else ""

    @property
    def arguments(self) -> str:
        return self.said

    def feed(self, text: str) -> str:
        self.text, at = self.text + text, 0
        while at < len(text) and not self.done:
            if self.in_value:
                text, at = self._more(text[at:]), 0
            else:
                self.part, at = self.part + text[at], at + 1
                (self._tag if self.said else self._head)()
        self.text = self.text[: len(self.text) - len(text) + at]
        return text[at:]

    def _head(self) -> None:
        if self.part.endswith(">"):
            self.function, self.part, self.said = self.part[len(FUNCTION) : -1], "", "{"
        elif len(self.part) > len(FUNCTION):  # no name of a function
            self.done = self.part[-1] not in NAMES or len(self.part) > len(FUNCTION) + LONGEST_NAME

    def _tag(self) -> None:
        self.part = self.part.lstrip()
        self.sure = self.sure or self.part in ENDS or self.part.startswith(PARAMETER)
        if self.part in ENDS:
            self.said, self.done = self.said + "}", True
        elif self.part.startswith(PARAMETER) and self.part.endswith(">"):
            self.key, self.part, self.in_value, self.begun = self.part[len(PARAMETER) : -1], "", True, False
            if self.key in self.keys:  # what was said stands
                self.key = ""
            elif self.key:
                whole = self.functions.get(self.function, {})
                known = _said_of(self.key, whole)
                self.types = _types({"anyOf": known}, whole) if known else TEXT
                comma = ", " if self.keys else ""
                self.said += f"{comma}{json.dumps(self.key, ensure_ascii=False)}: " + '"' * (self.types == TEXT)
                self.keys.add(self.key)
        elif not any(tag.startswith(self.part[: len(tag)]) for tag in (PARAMETER, *ENDS)):
            self.part, self.done = "<" if self.part.endswith("<") else "", not self.sure

    def _more(self, text: str) -> str:
        """More of a value, which lies between line breaks; what stands behind it is given back."""
        self.part += text
        end, keep = self._end()
        if end:
            value, behind, self.part, self.searched = self.part[: end.start()], self.part[end.end() :], "", 0
        else:  # what may be its end waits, and what is no text
            keep = keep if self.types == TEXT else 0
            value, behind, self.part = self.part[:keep], "", self.part[keep:]
            self.searched = max(0, self.searched - keep)
        if value and not self.begun:
            self.begun, value = True, value.removeprefix("\n")
        if self.key and self.types == TEXT:
            self.said += json.dumps(value, ensure_ascii=False)[1:-1] + '"' * bool(end)
        elif self.key and end:
            self.said += _literally(value, self.types)
        self.in_value = not end
        return behind

    def _end(self) -> tuple[re.Match[str] | None, int]:
        """The end of the value under way, or how much of it is certain."""
        while end := VALUE_ENDS.search(self.part, self.searched):
            then = NEXT.match(self.part, end.end()) if end[0] == "\n" else None
            if then is None or (then[2] and then[1] not in self.keys):
                return end, end.start()
            if not then[2] and then.end() == len(self.part):
                self.searched = end.start()
                return None, end.start()
            self.searched = end.end()  # a tag of what was given already is text
        marks = (f"\n{END}", END, f"\n{PARAMETER}", f"\n{ENDS[0]}")
        waits = (n for n in range(len(END), 0, -1) if self.part.endswith(tuple(mark[:n] for mark in marks)))
        self.searched = max(self.searched, len(self.part) - len(END))
        return None, len(self.part) - next(waits, 0)


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
            if not self.escaped and self.raw.endswith(self.quote, self.begin + 1, self.at + 1):
                self.quote = ""
            self.escaped = c == "\\" and not self.escaped
        elif c in "'\"":
            self.quote = c * 3 if self.raw[self.begin : self.at] == c * 2 else c
            self.begin = self.at
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

    value = value_of(text)  # some write JSON
    if value is None:
        parts = text.split(ESCAPE)
        parts[::2] = [BARE.sub(word, part) for part in parts[::2]]
        parts[1::2] = [json.dumps(part) for part in parts[1::2]]
        value = value_of("".join(parts))
    return _object(value)


class _Words(ast.NodeTransformer):
    """JSON's words for Python's."""

    words: ClassVar[dict[str, Any]] = {"true": True, "false": False, "null": None}

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(self.words[node.id]) if node.id in self.words else node


def _arguments(text: str) -> str:
    """Named arguments in brackets as a JSON object; empty if they are none. Names may be words of Python's: `from`."""
    text = STRING.sub(lambda found: f"{found[1][0] * 3}{found[2]}{found[1][0] * 3}", text)  # which take line breaks
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


def _object(value: Any, kinds: tuple[type, ...] = (dict,)) -> str:
    """A call's arguments as JSON; empty if they are no object, or one that JSON has no words for."""
    with suppress(ValueError, TypeError, RecursionError):
        said = json.dumps(value, ensure_ascii=False, allow_nan=False) if isinstance(value, kinds) else ""
        return said.encode("utf-16", "surrogatepass").decode("utf-16")  # no surrogates but pairs, which become one
    return ""


def _whole(text: str) -> str:
    """An object whose last brackets were left out, with them; any other text as it is."""
    missing = list[str]()
    for c in LITERAL.sub("", text):
        if c in "{[":
            missing.append("}" if c == "{" else "]")
        elif c in "}]" and missing:
            missing.pop()
    whole = text + "".join(reversed(missing))
    return whole if isinstance(value_of(whole), dict) else text


def _parts(schema: Any, whole: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """A schema in a whole one, and those that it is made of."""
    parts, refs = [schema], set[str]()
    while parts:
        part = parts.pop()
        if not isinstance(part, Mapping):
            continue
        yield part
        if isinstance(ref := part.get("$ref"), str) and ref not in refs:  # which may lead back here
            refs.add(ref)
            parts.append(referred(whole, ref))
        parts += [inner for key in ("allOf", "anyOf", "oneOf") for inner in listed(part.get(key))]


def _said_of(key: str, whole: Mapping[str, Any]) -> list[Any]:
    """The schemas that a whole one has for a property."""
    named, other = list[Any](), list[Any]()
    for part in _parts(whole, whole):
        own, rest = part.get("properties"), part.get("additionalProperties")
        named += [own[key]] if isinstance(own, Mapping) and key in own else []
        other += [rest] if isinstance(rest, Mapping) else []
    return named or other


def _types(schema: Any, whole: Mapping[str, Any]) -> set[str]:
    """The types that a schema in a whole one names; none: any. Whatever makes no sense in it names none."""
    found = set[str]()
    for part in _parts(schema, whole):
        given, values = part.get("type"), [part["const"]] if "const" in part else listed(part.get("enum"))
        found |= {str(kind) for kind in listed([given] if isinstance(given, str) else given)}
        found |= {_type(value) for value in values if given is None}
    return found | {"integer"} if "number" in found else found


def _type(value: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null", list: "array"}
    return kinds.get(type(value), "object")


def _literally(text: str, types: set[str]) -> str:
    """A value as JSON: as it is if it is some, or Python's for it, and may be such; else text."""
    words = {"True": "true", "False": "false", "None": "null"}
    said = words.get(text.strip(), text.strip())
    inner = text_of(said).strip()  # of JSON in JSON
    if "string" not in types and _kind(inner) in types:
        said = inner
    if types & {"array", "object"} and not _kind(said):
        with suppress(SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
            value = ast.literal_eval(_Words().visit(ast.parse(said, mode="eval")))
            said = _object(value, (list, tuple, dict)) or said
    kind = _kind(said)
    return said if kind and ("string" not in types or kind in types) else json.dumps(text, ensure_ascii=False)


def _kind(text: str) -> str:
    """The type of JSON; empty if it is none."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    with suppress(ValueError, RecursionError):
        return _type(json.loads(text, parse_constant=refuse))
    return ""


def value_of(text: str) -> Any:
    """What JSON says; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def text_of(literal: str) -> str:
    value = value_of(literal)
    return value if isinstance(value, str) else ""


SHAPES: dict[str, type[Call]] = {
    "json": Call, "named": Named, "tagged": Tagged, "python": Python, "escaped": Escaped,
}  # fmt: skip


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
    closing="</tool_call>", listed="[],",
)  # fmt: skip
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
# Llama-Nemotron's
NEMOTRON = Family("nemotron", ("<TOOLCALL>",), "<TOOLCALL>[", "]</TOOLCALL>", ", ", closing="</TOOLCALL>")
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
