"""Constraints as llguidance reads them: what `structured_outputs` ask for, written as a grammar in its Lark.

JSON, regexes and others' grammars it translates itself. Free text that ends at marks (`after`), and structural tags,
which put formats into formats as XGrammar describes them, are ours.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import partial
from itertools import pairwise
from typing import Any
from urllib.parse import unquote

from outrider.config import StructuredOutputsParams
from outrider.errors import brief

MOST_TEXT = 2**16  # characters of a schema or grammar: by these the time to read it is bounded
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"  # between the parts of JSON: without a bound some models write nothing else
SPECIAL = r"\.+*?()|[]{}^$#&-~"  # what a regex reads as more than itself
# of a schema's texts, those that llguidance keeps to
FORMATS = "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"
NAMES = re.compile(r"\^(?:\((?:\?:)?([\w|-]+)\)|([\w-]+))\$")  # a pattern of one name, or of some
PARTS = "properties", "patternProperties", "dependentSchemas", "$defs", "definitions"  # of a schema: schemas by name
NEEDS = {"then": "if", "else": "if", "minContains": "contains", "maxContains": "contains"}  # say nothing without
COUNTS = {f"{bound}{of}" for bound in ("min", "max") for of in ("Length", "Items", "Properties")}
DATA = "const", "enum", "default", "examples"  # and what is none, whatever it looks like
ESCAPED = re.compile(r"(\\[^uU])|\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8}))")  # in GBNF; the first are left
# of Lark: texts, regexes and comments; and tokens of their own by their names. What has no end is not looked at twice.
LARK = re.compile(r'"(?:\\.|[^"\\\n])*"?|/(?!/)(?:\\.|[^/\\])+/?|//.*|#.*|(<(?!\[)[^<>\s]+>)|(&)')
SHORT = re.compile(r"/(?:\[[\w-]+\](?:\{\d+(?:,\d+)?\})?|[\w ])+/")  # regexes of bounded length, as plain as can be
# of GBNF: what a rule begins with, texts, classes of characters, names, comments, and whatever else there is
GBNF = re.compile(r'([\w-]+)\s*::=|("(?:\\.|[^"\\])*"?|\[(?:\\.|[^\]\\])*\]?|[\w-]+)|#.*|(\S)')
NOTHING, ANY = '""', r"[\x00-\U0010FFFF]"  # in GBNF; its `.` is any character, line breaks, too
CLASS = re.compile(r"\\.|(\[\^?)(\]?(?:\\.|\[:\^?\w+:\]|[^\]\\])*)", re.S)  # in a regex, up to its last bracket
PART = re.compile(r"\[:\^?\w+:\]|(\\.|.)(?:-(\\.|.))?", re.S)  # of a class: a name, a character or a range
PLAIN = {c: rf"\x{ord(c):x}" for c in "-[]&~"}  # of which Rust makes more
MOST_AT_ONCE = 12  # regexes that a text fits at the same time: each doubles what is to be looked at
TOO_MANY = f"a text can be asked to fit at most {MOST_AT_ONCE} regexes at once"
MOST_COPIED = 300  # characters of a schema that is written for several names: copies of copies would be too many
MOST_TIMES = 4096  # repetitions in a regex
FARTHEST = 2**63 - 1024  # the last bound that llguidance has a regex for, but for the largest integer
MOST_MULTIPLE = 20_000  # a regex of multiples has as many states
# Where somebody's regex goes on as what stands behind it begins (`/a*/ "ab"`), all that may come is more of it, without
# end; llguidance would look for that end. So nothing is forced there.
UNFORCED = '%llguidance {"no_forcing": true}'
# A structural tag's formats with their fields, those with a question mark may be left out, and what these hold.
TAGS = {
    "any_text": "excludes?", "const_string": "value", "grammar": "grammar syntax?", "json_schema": "json_schema style?",
    "optional": "content", "or": "elements", "plus": "content", "regex": "pattern", "repeat": "min max content",
    "sequence": "elements", "star": "content", "tag": "begin content end",
    "tags_with_separator": "tags separator at_least_one? stop_after_first?", "token": "token",
    "triggered_tags": "triggers tags at_least_one? stop_after_first? excludes?",
}  # fmt: skip
HELD: dict[str, tuple[str, tuple[type, ...]]] = {
    **dict.fromkeys(("value", "pattern", "grammar", "separator", "style", "syntax"), ("a text", (str,))),
    **dict.fromkeys(("excludes", "triggers"), ("a list of texts", (list,))),
    **dict.fromkeys(("elements", "tags", "structures"), ("a list of objects", (list,))),
    **dict.fromkeys(("at_least_one", "stop_after_first"), ("true or false", (bool,))),
    **dict.fromkeys(("min", "max"), ("a whole number", (int,))),
    **dict.fromkeys(("content", "format"), ("a format", (dict,))),
    "json_schema": ("a schema", (dict, bool)), "schema": ("a schema", (dict, str)), "token": ("a token", (int, str)),
    "begin": ("a text or a token", (str, dict)), "end": ("a text, a list of texts or a token", (str, list, dict)),
}  # fmt: skip
NUMBERS = {"integer": "-?(0|[1-9][0-9]*)", "number": r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?"}
MOST_RULES = 2**17  # characters of a tag's rules: texts that stand in many of them add up
Mark = str | int  # what ends free text, or begins what follows it: a text, or a token's id


def written(library: Any, given: StructuredOutputsParams, text: str, added: Mapping[str, int]) -> str:
    """A constraint for llguidance: `text` is what it asks for, `added` the vocabulary's tokens of their own.

    Raises ValueError, and what the library's conversions raise.
    """
    (kind,) = given.asked
    if kind in ("json", "json_object"):
        schema = json.loads(text)
        schema = {} if schema is True else schema  # which says as much
        if not isinstance(schema, dict):
            raise ValueError(f"a schema is an object, not {brief(schema)}")
        schema = understood(schema, bool(given.disable_additional_properties))
        spaces: dict[str, Any] = {"whitespace_pattern": given.whitespace_pattern or WHITESPACE}
        if given.disable_any_whitespace:
            spaces = {"whitespace_flexible": False}
        asked = given.disable_any_whitespace or given.whitespace_pattern
        spaces = {"overrides" if asked else "defaults": spaces}
        source = str(library.LLMatcher.grammar_from_json_schema(json.dumps(schema), **spaces))
        return _unforced(source) if given.whitespace_pattern else source
    if kind == "choice":
        words = ("".join("\\" * (c in SPECIAL) + c for c in word) for word in given.choice or ())
        return str(library.LLMatcher.grammar_from_regex("|".join(words)))
    if kind == "regex":
        _countable(text)
        return str(library.LLMatcher.grammar_from_regex(_classes(text)))
    if kind == "grammar":
        if text.lstrip().startswith("{"):  # llguidance's own, which no limit here knows
            raise ValueError("a grammar is Lark or GBNF, not JSON")
        if re.search(r"(?m)^[^\S\n]*[\w-]+\s*::=", text):
            source = str(library.grammar_from("gbnf", ESCAPED.sub(_character, _gbnf(text))))
            return source if _forces(source) else _unforced(source)
        ours = isinstance(text, Ours)
        if not ours:
            _checked_lark(text)
        source = str(library.grammar_from("lark", LARK.sub(partial(_numbered, added), text)))
        return source if ours or _forces(text) else _unforced(source)
    return Tag(library, given, added).written(json.loads(text))


class Ours(str):
    """A grammar in Lark that we have written, without regexes: what it forces comes to an end."""


def understood(schema: Any, close: bool = False) -> Any:
    """A schema without what only tells of values, and llguidance takes for demands: formats that it does not know,
    `uniqueItems`, `propertyNames` (Zod's of a record) and `unevaluated...` that ask for nothing, keywords that are null
    (Go's), or lack the one they belong to. Bounds that are farther away than llguidance's farthest are these.

    close: without properties that it does not name, wherever it says nothing about them. Raises ValueError for what
    would take llguidance too long, and for what only llguidance knows.
    """
    _bounded(schema)
    return _understood(schema, close)


def _understood(schema: Any, close: bool) -> Any:
    if isinstance(schema, (list, tuple)):
        return [_understood(part, close) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    schema = {key: value for key, value in schema.items() if value is not None or key in ("const", "default")}
    if isinstance(schema.get("properties"), Mapping) and isinstance(schema.get("patternProperties"), Mapping):
        schema = _apart(schema)
    found = dict[str, Any]()
    if close and "properties" in schema and not {"additionalProperties", "patternProperties"} & schema.keys():
        found["additionalProperties"] = False
    kinds = schema.get("type")
    whole = "integer" in (kinds if isinstance(kinds, (list, tuple)) else [kinds])  # whose bounds go further
    for key, value in schema.items():
        if key == "x-guidance":
            raise ValueError("x-guidance is not taken; whitespace_pattern says what lies between the parts of JSON")
        if key in PARTS and isinstance(value, Mapping):
            parts = {name: _understood(part, close) for name, part in value.items()}
            found[key] = {_classes(name): parts[name] for name in parts} if key == "patternProperties" else parts
        elif key == "pattern" and isinstance(value, str):
            found[key] = _classes(value)
        elif key in DATA:
            found[key] = value
        elif key in COUNTS and isinstance(value, float) and value.is_integer():
            found[key] = int(value)
        elif key in ("minimum", "exclusiveMinimum") and type(value) in (int, float):
            found[key] = max(value, -FARTHEST)
        elif key in ("maximum", "exclusiveMaximum") and type(value) in (int, float) and not whole:
            found[key] = min(value, FARTHEST)
        elif not (
            (key == "uniqueItems" and value is False)
            or (key == "propertyNames" and value in ({"type": "string"}, {}, True))
            or (key == "format" and isinstance(value, str) and value not in FORMATS)
            or (key in ("unevaluatedProperties", "unevaluatedItems") and value is True)
            or (key in NEEDS and NEEDS[key] not in schema)
        ):
            found[key] = _understood(value, close)
    return found


def _apart(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Without patterns for names alone that stand among the properties: llguidance waits for one more of that kind."""
    named, left = dict(schema["properties"]), dict(schema["patternProperties"])
    for pattern, part in schema["patternProperties"].items():
        words = (found[1] or found[2]).split("|") if (found := NAMES.fullmatch(pattern)) else []
        deep = isinstance(part, Mapping) and any(isinstance(value, (Mapping, list)) for value in part.values())
        if words and named.keys() >= {*words} and not deep and len(repr(part)) <= MOST_COPIED:
            named |= {word: {"allOf": [named[word], part]} for word in words}
            del left[pattern]
    return {**schema, "properties": named, "patternProperties": left}


def _numbered(added: Mapping[str, int], found: re.Match[str]) -> str:
    """A token of its own by its number: its name is one that no text holds (constraint.py)."""
    if found[1] and found[1] not in added:
        raise ValueError(f"{brief(found[1])} is no token of its own in the vocabulary")
    return f"<[{added[found[1]]}]>" if found[1] else found[0]


def _character(found: re.Match[str]) -> str:
    """What an escape of GBNF stands for, in a way that llguidance's translation reads: it loses leading zeros."""
    if found[1]:
        return found[1]
    number = int(found[2] or found[3], 16)
    if number < 0x80:
        return f"\\x{number:02x}"
    return chr(number) if number < 0x110000 and not 0xD800 <= number < 0xE000 else found[0]


def _digits(value: Any) -> int:
    """A number's, as a whole number without zeros at its end; 1 for what is none."""
    number = Decimal(str(value)).normalize() if type(value) in (int, float) else Decimal(1)
    return int("".join(map(str, number.as_tuple().digits))) or 1 if number.is_finite() else 1


def _bounded(schema: Any) -> None:
    """Raise ValueError for a schema that would take llguidance too long to read, wherever its references lead."""
    known, seen = dict[str, int](), dict[int, int]()
    everywhere = json.dumps(schema).count('"pattern"')

    def at_once(part: Any) -> int:  # patterns that one text may have to fit
        if not isinstance(part, Mapping):
            return 0
        if id(part) not in seen:
            seen[id(part)] = counted(part)
        return seen[id(part)]

    def counted(part: Mapping[str, Any]) -> int:
        every, some = ([p for key in keys for p in listed(part.get(key))] for keys in (("allOf",), ("anyOf", "oneOf")))
        ref = part.get("$ref")
        if isinstance(ref, str) and ref not in known:
            known[ref] = 0  # while it is looked at: it may lead back here
            target = referred(schema, ref)  # whatever cannot be followed here may lead to all of them
            known[ref] = everywhere if target is None else at_once(target)
        own = ("pattern" in part) + (known[ref] if isinstance(ref, str) else 0)
        return own + sum(map(at_once, every)) + max(map(at_once, some), default=0)

    multiple, parts = 1, [(schema, False)]  # and whether they are data
    while parts:
        part, data = parts.pop()
        if data:
            _writable(part, True)
        if isinstance(part, Mapping):
            multiple = math.lcm(multiple, _digits(part.get("multipleOf")))
            if multiple > MOST_MULTIPLE:
                raise ValueError(f"multipleOf is at most {MOST_MULTIPLE}, all of them together, zeros at the end aside")
            if at_once(part) > MOST_AT_ONCE:
                raise ValueError(TOO_MANY)
            for own in (part.get("pattern"), *_named_by(part)):
                _countable(own if isinstance(own, str) else "")
            for bound in ("maximum", "exclusiveMaximum"):
                _writable(part.get(bound), False)
            parts += [(value, data or name in ("const", "enum")) for name, value in part.items()]
        parts += [(value, data) for value in listed(part)]


def _writable(value: Any, data: bool) -> None:
    """Raise ValueError for a number, of data or a bound, that llguidance, which takes it for a double, would write as
    another; or int64's lowest, of which alone it makes a range by calling itself until the process is killed."""
    if type(value) in (int, float) and value < -FARTHEST:
        raise ValueError(f"const, enum and maximum are at least -(2^63 - 1024), not {brief(value)}")
    if data and type(value) is int and (value >= 2**63 or min(int(float(value)), 2**63 - 1) != value):
        raise ValueError(f"const and enum have numbers that doubles can hold, not {brief(value)}; a text can be any")


def _named_by(part: Mapping[str, Any]) -> list[Any]:
    return [*names] if isinstance(names := part.get("patternProperties"), Mapping) else []


def listed(value: Any) -> list[Any]:
    """What is in a list, or nothing."""
    return list(value) if isinstance(value, (list, tuple)) else []


def referred(schema: Any, ref: str) -> Any:
    """What a reference by places within a schema leads to; None if it is another kind, or nothing is there."""
    if ref != "#" and not ref.startswith("#/"):
        return None
    for name in ref.split("/")[1:]:
        name = unquote(name).replace("~1", "/").replace("~0", "~")
        if isinstance(schema, Mapping):
            schema = schema.get(name)
        else:
            schema = {str(i): part for i, part in enumerate(listed(schema))}.get(name)
    return schema


def _countable(regex: str) -> None:
    """Raise ValueError for a regex that repeats too often: the time to read it grows with the square of that."""
    if (times := len(re.findall(r"[*+?{]", regex))) > MOST_TIMES:
        raise ValueError(f"a regex may repeat something at most {MOST_TIMES} times, not {times}")


def _checked_lark(text: str) -> None:
    """Raise ValueError for what llguidance would read too long."""
    for found in LARK.finditer(text):
        _countable(found[0] if found[0][0] == "/" else "")
    if sum(bool(found[2]) for found in LARK.finditer(text)) > MOST_AT_ONCE:
        raise ValueError(TOO_MANY)
    for found in re.finditer(r"%json\s*", text):
        with suppress(json.JSONDecodeError):  # llguidance says what is wrong
            _bounded(json.JSONDecoder().raw_decode(text, found.end())[0])


def _forces(text: str) -> bool:
    """Whether what a grammar in Lark forces comes to an end: it has nothing but texts, rules and short regexes."""
    for found in LARK.finditer(text):
        if re.match("/[^/]", found[0]) and not (SHORT.fullmatch(found[0]) and not text[found.end() :][:1].isalpha()):
            return False
    rest = re.sub(r"%llguidance \{\}|<\[[\d,^* -]*\]>", "", LARK.sub(" ", text))  # of tokens by number each is a word
    return not re.search(r"[%\[{~A-Z]|\b_", rest)  # what is left are rules, which have small letters


def _unforced(source: str) -> str:
    """A grammar without forcing, whatever it says of that itself: the last directive counts."""
    first, *more = _named("answer", source)
    text = first.get("lark_grammar") or f"start: %json {json.dumps(first['json_schema'])}"
    return json.dumps({"grammars": [{"name": "answer", "lark_grammar": f"{text}\n{UNFORCED}"}, *more]})


def _gbnf(text: str) -> str:
    """GBNF as llguidance's translation reads it, without comments."""
    rules = list[tuple[str, list[str]]]()
    for head, part, sign in GBNF.findall(text):
        if head:
            rules.append((head, []))
        elif rules and (part or sign):
            piece = f"[{_plain(part[1:-1])}{part[-1]}" if part.startswith("[") else part or sign
            rules[-1][1].append(ANY if piece == "." else piece)
        elif part or sign:
            raise ValueError(f"a rule begins with its name and ::=, not {brief(part or sign)}")
    names, taken = {"root": "root"}, {"root", "start"}

    def fresh(name: str) -> str:
        """One that it does not take for another: hyphens and capitals it replaces, and `start` is its own."""
        while (folded := re.sub("[-_]", "", name).lower()) in taken:
            name = f"{name}{len(taken)}"
        taken.add(folded)
        return name

    for name, _ in rules:
        names[name] = names.get(name) or fresh(name)
    lines = list[str]()
    for name, parts in ((names[head], [names.get(part, part) for part in found]) for head, found in rules):
        # it drops the brackets of ([0-9]+)?
        parts = [f'{a} ""' if a in "*+?}" and b == ")" else a for a, b in pairwise([*parts, ""])]
        # each level of x ::= a x | b would be looked at for each token, so: x ::= more b, more ::= "" | more a
        again, rest = _recursive(name, parts)
        if again:
            more = fresh(f"{name}-more")
            lines.append(f'{more} ::= "" | {more} ({" | ".join(again)})')
            parts = [more, "(", " | ".join(rest), ")"]
        lines.append(f"{name} ::= {' '.join(parts) or NOTHING}")
    return "\n".join(lines)


def _recursive(name: str, parts: list[str]) -> tuple[list[str], list[str]]:
    """What stands before the rule in alternatives that end with it, and the others; nothing if it is elsewhere, too."""
    found, depth = [list[str]()], 0
    for part in parts:
        depth += (part == "(") - (part == ")")
        if part == "|" and not depth:
            found.append([])
        else:
            found[-1].append(part)
    again = [" ".join(one[:-1]) for one in found if one[-1:] == [name]]
    rest = [" ".join(one) or NOTHING for one in found if one[-1:] != [name]]
    return (again, rest) if rest and all(again) and parts.count(name) == len(again) else ([], [])


def _classes(regex: str) -> str:
    """A regex whose classes of characters are Python's and ECMAScript's."""
    return CLASS.sub(lambda found: found[1] + _plain(found[2]) if found[1] else found[0], regex)


def _plain(characters: str) -> str:
    """What stands in a class, without what Rust's regexes take for a class in it or operations on sets."""
    return PART.sub(lambda found: "-".join([PLAIN.get(c, c) for c in found.groups() if c]) or found[0], characters)


def literal(text: str, added: Mapping[str, int]) -> str:
    """Text as a grammar has it; what is a token of its own in the vocabulary (`added`), as that token."""
    return " ".join(f"<[{added[piece]}]>" if piece in added else json.dumps(piece) for piece in pieces(text, added))


def pieces(text: str, added: Mapping[str, int]) -> list[str]:
    """Text cut around what are tokens of their own, the longest ones first."""
    marks = sorted((mark for mark in added if mark and mark in text), key=len, reverse=True)
    if not marks:
        return [text] if text else []
    return [part for part in re.split(f"({'|'.join(map(re.escape, marks))})", text) if part]


@dataclass
class Rules:
    """Rules of a grammar of ours as they are written, each once, and free text up to what may end it."""

    added: Mapping[str, int]
    rules: list[str] = field(default_factory=list)
    known: dict[Any, str] = field(default_factory=dict)  # their names, by what they say or are for
    size: int = 0

    def text(self, excludes: tuple[str, ...], ends: tuple[Mark, ...]) -> str:
        """Free text up to the first of `ends`, and with it; no special tokens in it, nor marks by other tokens."""
        if (known := self.known.get((excludes, ends))) is not None:
            return known
        without = [*excludes, *(end for end in ends if isinstance(end, str) and end in self.added)]
        banned = " | ".join(json.dumps(text) for text in without)
        free = r"/(.|\n)*/" + (rf" & ~(/(.|\n)*/ ({banned}) /(.|\n)*/)" if banned else "")
        text, found = self.rule("TEXT", free), list[str]()
        for end in ends:
            first, rest = (end, "") if isinstance(end, int) else _first(end, self.added)
            if isinstance(first, int) or first in self.added:
                begun = f"{text} {self.mark(first)}"
            else:
                begun = f"{text} {json.dumps(first)}"  # behind which a token comes, or else up to the first of them
                begun = self.rule("TEXT", begun) if rest else self.rule("text", begun, "[lazy]")
            found.append(f"{begun} {self.mark(rest)}")
        self.known[excludes, ends] = name = self.rule("until", _either(found)) if ends else text
        return name

    def mark(self, mark: Mark) -> str:
        """A text or a token, as a grammar has it."""
        return literal(mark, self.added) if isinstance(mark, str) else f"<[{mark}]>"

    def one(self, ends: tuple[Mark, ...]) -> str:
        """One of some marks, if there are any."""
        if ends and ends not in self.known:
            self.known[ends] = self.rule("end", _either(map(self.mark, ends)))
        return self.known[ends] if ends else ""

    def rule(self, name: str, text: str, how: str = "") -> str:
        """The name of a rule that says so. Raises ValueError if all together are too long."""
        if (known := self.known.get(f"{name}{how}: {text}")) is not None:
            return known
        self.grow(len(text))
        own = self.known[f"{name}{how}: {text}"] = f"{name}_{len(self.rules)}"
        self.rules.append(f"{own}{how}: {text}")
        return own

    def grow(self, size: int) -> None:
        """Raises ValueError if all rules together are too long with one of this size."""
        self.size += size
        if self.size > MOST_RULES:
            raise ValueError(f"its rules have more than {MOST_RULES} characters")


def behind(marks: tuple[str, str, str], source: str, added: Mapping[str, int]) -> str:
    """A grammar behind what `after` means: no end before it, and of special tokens none but the marks'."""
    begin, end, lead = marks
    rules = Rules(added)
    whole = f"{literal(begin, added)} {rules.text((), (end,))} {'' if lead else 'SPACE?'}"
    start = f"start: {f'({whole})?' if begin else whole} {literal(lead, added)} @answer"
    before = "\n".join([start, *rules.rules, r"SPACE: /[ \n\r\t]{1,8}/"])
    return json.dumps({"grammars": [{"lark_grammar": before}, *_named("answer", source)]})


def _named(name: str, source: str) -> list[dict[str, Any]]:
    """A source's grammars, the first under a name, by which another refers to it."""
    first, *more = json.loads(source)["grammars"] if source.startswith("{") else [{"lark_grammar": source}]
    return [{**first, "name": name}, *more]


# --- structural tags --------------------------------------------------------------------------------------------------


class Tag:
    """A structural tag, format by format.

    Free text has no end of its own: the lexer reads it up to the marks that may follow. So a format is written
    together with what ends it (`ends`; nothing, where the output ends), and after free text the next gives its
    beginning away. So it does after a regex, if it is text: the lexer would read it as more of the regex.
    """

    def __init__(self, library: Any, given: StructuredOutputsParams, added: Mapping[str, int]) -> None:
        self.library, self.added = library, added
        self.given = given  # whose other options hold for the JSON in it
        self.own = Rules(added)
        self.plain: dict[tuple[Mark, ...], bool] = {}  # whether marks are text
        self.grammars: list[dict[str, Any]] = []  # those of the library, by name

    def written(self, tag: Any) -> str:
        """A whole one: a `format`, or `structures` and `triggers`, as vLLM had it first."""
        if not isinstance(tag, dict):
            raise ValueError("it is an object with a format")
        tag = {key: value for key, value in tag.items() if key != "type"}
        if tag.keys() & {"structures", "triggers"}:
            old = _checked("structural_tag", "triggers structures", tag)
            tags = [_checked("a structure", "begin schema end", part) for part in old["structures"]]
            for part in tags:
                schema = part.pop("schema")
                schema = json.loads(schema) if isinstance(schema, str) else schema
                part["content"] = {"type": "json_schema", "json_schema": schema}
            whole = {"type": "triggered_tags", "triggers": old["triggers"], "tags": tags}
        else:
            whole = _checked("structural_tag", "format", tag)["format"]
        start = f"start: {self._format(whole, (), True)}"
        return json.dumps({"grammars": [{"lark_grammar": "\n".join([start, *self.own.rules])}, *self.grammars]})

    def _format(self, given: Any, ends: tuple[Mark, ...], last: bool = False) -> str:
        """A format, and then one of `ends`; `last`: behind which the output ends."""
        kind, has = _read(given)
        if kind == "any_text":
            return self.own.text(tuple(has["excludes"] or ()), ends)
        if kind == "or":
            return _either(self._format(part, ends, last) for part in has["elements"])
        if kind == "sequence":
            return self._sequence(has["elements"], ends, last)
        if kind == "tag":
            return self._tag(has, ends, last)
        if kind == "regex":
            return self._regex(has["pattern"], ends, last)
        if kind == "triggered_tags":
            return self._triggered(has, ends)
        if kind == "optional" and (ends or _open(given)):
            return _either([self._format(has["content"], ends), self.own.one(ends)])
        return f"{self._closed(kind, has)} {self.own.one(ends)}"

    def _closed(self, kind: str, has: dict[str, Any]) -> str:
        """A format that ends by itself."""
        if kind == "const_string":
            return self.own.mark(has["value"])
        if kind == "token":
            return self.own.mark(self._id({"type": kind, **has}))
        if kind == "tags_with_separator":
            tags = _tags(has)
            _end_by_themselves(kind, tags)
            one = self.own.rule("tag", _either(self._tag(tag, ()) for tag in tags))  # which stands twice
            more = "" if has["stop_after_first"] else f"({self.own.mark(has['separator'])} {one})*"
            return f"({one} {more}){'' if has['at_least_one'] else '?'}"
        if kind in ("optional", "plus", "star", "repeat"):
            if _open(has["content"]):
                raise ValueError(f"{kind}: free text has no end, so it cannot come again")
            least, most = has.get("min", 0), has.get("max", 0)
            if least < 0 or not (most == -1 or most >= least):
                raise ValueError(f"repeat: max must be at least min, or -1 for no bound, not {most}")
            times = {"optional": "?", "plus": "+", "star": "*"}.get(kind) or f"{{{least},{'' if most < 0 else most}}}"
            return f"({self._format(has['content'], ())}){times}"
        if kind == "json_schema":
            if has["style"] not in (None, "json"):
                raise ValueError(f"json_schema: style must be json, not {brief(has['style'])}")
            return self._part("json", json.dumps(has[kind]))
        if has["syntax"] not in (None, "ebnf", "lark"):
            raise ValueError(f"grammar: syntax must be ebnf or lark, not {brief(has['syntax'])}")
        return self._part(kind, has[kind])

    def _regex(self, pattern: str, ends: tuple[Mark, ...], last: bool) -> str:
        """A regex, and then one of `ends`: where something follows, the first that makes it whole."""
        name = self._part("regex", pattern)
        if not ends or not self._plain(ends):
            return f"{name} {self.own.one(ends)}"
        texts, part = _either(json.dumps(end) for end in ends), self.grammars[-1]
        self.own.grow(len(texts))
        own = part["lark_grammar"].partition("\n")[0].removeprefix("start: ")
        start = "start: WHOLE\nWHOLE" if last else "start[lazy]"
        part["lark_grammar"] = f"{start}: {own} {texts}\n{UNFORCED}"
        return name

    def _plain(self, marks: tuple[Mark, ...]) -> bool:
        """Whether they are text without tokens of their own."""
        if marks not in self.plain:  # many may stand behind many regexes
            self.plain[marks] = all(isinstance(m, str) and not self.added.keys() & pieces(m, self.added) for m in marks)
        return self.plain[marks]

    def _part(self, kind: str, text: str) -> str:
        """What the library writes, as a grammar of its own."""
        asked: dict[str, Any] = {kind: text}
        name, given = f"part_{len(self.grammars)}", replace(self.given, structural_tag=None, after=None, **asked)
        source = written(self.library, given, text, self.added)
        self.grammars += _named(name, _unforced(source) if kind == "regex" else source)
        return f"@{name}"

    def _sequence(self, parts: Sequence[Any], ends: tuple[Mark, ...], last: bool) -> str:
        found, parts = list[str](), [*_elements(parts)]
        for i in range(1, len(parts)):
            part, (kind, has) = parts[i - 1], _read(parts[i])
            key = {"const_string": "value", "tag": "begin"}.get(kind)
            given = has[key] if key else ""
            if not _open(part) and not (given and _last(part, "regex") and self._plain((self._id(given),))):
                found.append(self._format(part, ()))
                continue
            if key is None or not given:
                raise ValueError(f"sequence: free text ends where a const_string or a tag begins, not before {kind}")
            all_of_it = last and not ends and kind == "const_string" and i == len(parts) - 1
            found.append(self._format(part, (self._id(given),), all_of_it))
            parts[i] = {**parts[i], key: ""}
        return " ".join([*found, self._format(parts[-1], ends, last)])

    def _tag(self, has: Mapping[str, Any], ends: tuple[Mark, ...], last: bool = False) -> str:
        begin = self.own.mark(self._id(has["begin"]))
        if own := tuple(map(self._id, _ends(has))):
            return f"{begin} {self._format(has['content'], own, last and not ends)} {self.own.one(ends)}"
        return f"{begin} {self._format(has['content'], ends, last)}"

    def _triggered(self, has: Mapping[str, Any], ends: tuple[Mark, ...]) -> str:
        """Free text; where a trigger begins in it, one of the tags, and so on."""
        at_once, later, tags = list[str](), list[str](), _tags(has)
        excludes = tuple(has["excludes"] or ())
        if ends:
            _end_by_themselves("triggered_tags", tags)
        for tag in tags:
            begin = tag["begin"]
            trigger = next((t for t in has["triggers"] if isinstance(begin, str) and t and begin.startswith(t)), None)
            if trigger is None:
                raise ValueError(f"no trigger begins {brief(begin)}")
            first, _ = _first(begin, self.added)
            head = first if first in self.added else trigger
            body = self.own.rule("tag", self._tag({**tag, "begin": begin[len(head) :]}, ()))
            at_once.append(f"{self.own.mark(head)} {body}")
            later.append(f"{self.own.text(excludes, (head,))} {body}")
        end, text = self.own.one(ends), self.own.text(excludes, ends)
        if has["stop_after_first"]:
            return f"{_either(at_once)} {end}" if has["at_least_one"] else _either([f"{_either(later)} {end}", text])
        return f"{_either(at_once) if has['at_least_one'] else ''} {_either(later)}* {text}"

    def _id(self, given: Any) -> Mark:
        """A text, or a token by its id."""
        if isinstance(given, str):
            return given
        kind, has = _read(given)
        if kind != "token":
            raise ValueError(f"a tag begins and ends with a text or a token, not {kind}")
        token = has["token"]
        number = self.added.get(token) if isinstance(token, str) else token
        if number is None or number not in self.added.values():
            raise ValueError(f"token: {brief(token)} is no token of its own in this vocabulary")
        return int(number)


def _read(given: Any) -> tuple[str, dict[str, Any]]:
    """A format's type and its fields, those that may be left out None; any number is a regex, which text ends."""
    kind = given.get("type") if isinstance(given, dict) else None
    if not isinstance(kind, str) or kind not in TAGS:
        raise ValueError(f"a format has a type: {', '.join(TAGS)}; not {brief(kind)}")
    has = _checked(kind, TAGS[kind], {key: value for key, value in given.items() if key != "type"})
    if kind == "json_schema" and has["style"] in (None, "json"):
        for number, pattern in NUMBERS.items():
            if has[kind] == {"type": number}:
                return "regex", {"pattern": pattern}
    return kind, has


def _checked(kind: str, fields: str, given: Any) -> dict[str, Any]:
    """What was given, if these are its fields. Raises ValueError."""
    known = {name.rstrip("?"): name.endswith("?") for name in fields.split()}
    if not isinstance(given, dict):
        raise ValueError(f"{kind} is an object with {' and '.join(known)}, not {brief(given)}")
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name not in known:
            if not (value is None or value is False or value == []):  # as XGrammar's own classes write nothing
                raise ValueError(f"{kind} has {' and '.join(known)}, not {brief(name)}")
            continue
        what, types = HELD[name]
        right = type(value) in types and not (value == [] and name != "excludes")
        if right and isinstance(value, list):
            right = all(isinstance(x, str if name in ("excludes", "triggers", "end") else dict) for x in value)
        if right:
            found[name] = value
        elif not (value is None and known[name]):
            raise ValueError(f"{kind}: {name} must be {what}, not {brief(value)}")
    if missing := [name for name, optional in known.items() if name not in found and not optional]:
        raise ValueError(f"{kind} lacks {' and '.join(missing)}")
    return {**dict.fromkeys(known), **found}


def _tags(has: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = []
    for tag in has["tags"]:
        kind, fields = _read({"type": "tag", **tag} if isinstance(tag, dict) else tag)
        if kind != "tag":
            raise ValueError(f"tags are of type tag, not {kind}")
        found.append(fields)
    return found


def _ends(has: Mapping[str, Any]) -> list[Any]:
    """What a tag may end with; nothing, if it has no end of its own."""
    ends = has["end"] if isinstance(has["end"], list) else [has["end"]]
    if "" in ends and any(ends):
        raise ValueError('tag: end must be "" or other texts, not both: a tag that may end without one is in an or')
    return [end for end in ends if end != ""]


def _end_by_themselves(kind: str, tags: Iterable[Mapping[str, Any]]) -> None:
    """Raise ValueError for tags of free text without an end, behind which something must come."""
    if any(not _ends(tag) and _open(tag["content"]) for tag in tags):
        raise ValueError(f"{kind}: a tag of free text needs an end")


def _elements(parts: Sequence[Any]) -> Iterator[Any]:
    """Those of a sequence, and of the sequences in it."""
    for part in parts:
        kind, has = _read(part)
        yield from _elements(has["elements"]) if kind == "sequence" else [part]


def _open(given: Any) -> bool:
    """Whether a format may end with free text."""
    return _last(given, "any_text", "triggered_tags")


def _last(given: Any, *kinds: str) -> bool:
    """Whether a format may end with one of these."""
    kind, has = _read(given)
    if kind == "sequence":
        return _last(has["elements"][-1], *kinds)
    if kind == "tag":
        return not _ends(has) and _last(has["content"], *kinds)
    if kind == "or":
        return any(_last(part, *kinds) for part in has["elements"])
    return kind in kinds or (kind == "optional" and _last(has["content"], *kinds))


def _first(text: str, added: Mapping[str, int]) -> tuple[str, str]:
    first = pieces(text, added)[0]
    return first, text[len(first) :]


def _either(choices: Iterable[str]) -> str:
    return f"({' | '.join(choices)})"
