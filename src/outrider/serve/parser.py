"""The calls and the content of an answer, told apart in what a model writes, in whatever pieces it comes.

What begins like a call and is none, is content.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.serve.calls import HARMONY, LONGEST_NAME, NAMES, SHAPES, Call, Family, text_of, value_of

Delta = dict[str, Any]
PIECE = 4096  # characters read at a time, since what is behind each call is copied
HEADERS = "<|start|>", "<|channel|>", "to=functions."  # what a message of gpt-oss's begins with
HEADER = re.compile(rf"\s*({'|'.join(map(re.escape, HEADERS))})")
ENDINGS = "<|end|>", "<|call|>", "<|return|>"
CLOSINGS = *ENDINGS, *HEADERS[:2]
BROKEN = re.compile(  # a header without `<|message|>`, up to its text; none of a call
    r"\s*(<\|start\|>\s*assistant\s*)?<\|channel\|>\s*(analysis|commentary|final)\b(?!\s*to?(=|$))"
    r"(\s*<\|constrain\|>\s*\w*)?\s*"
)
RECIPIENT, ANALYSIS = re.compile(r"\bto=(?:functions\.)?([\w.-]+)"), re.compile(r"<\|channel\|>\s*analysis\b")
LONGEST_HEADER = 4 * LONGEST_NAME


class Parser:
    """Reads an answer in pieces and hands out OpenAI's deltas: content, and calls of `functions`."""

    def __init__(self, family: Family, functions: Mapping[str, Mapping[str, Any]], forced: bool = False) -> None:
        self.family, self.functions = family, functions
        self.forced = forced  # the text can be nothing but calls
        self.calls = 0  # handed out
        self.broken = False  # whether the last of them was cut off
        self.marked = False  # whether a message's header has come
        self._held = ""  # text that may yet be a mark, or belongs to a call
        self._call: Call | None = None
        self._inside = False  # behind a mark: between calls
        self._behind = False  # and behind one of them
        self._bare = False  # there was no mark
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

    def finish(self, closed: bool = False) -> list[Delta]:
        """The answer has ended (closed: by a token of its own, which may have closed a message): what was held back,
        and is no call, is content."""
        deltas = self._read("")
        held = ""
        if self._call is not None and self._call.index < 0:
            held = "" if self.calls else self._lead + self._call.text  # behind calls: another, which was cut off
        elif self._call is not None:
            self.broken = True
        elif not (self._inside and self.calls):
            held = self._lead + self._held
            if self.calls and self._fresh and any(mark.startswith(held.strip()) for mark in self.family.marks):
                held = ""  # of another one
        self._held, self._lead, self._call = "", "", None
        return deltas + ([{"content": held}] if held and not self.forced else [])

    def _outside(self) -> list[Delta]:
        """Content, up to a mark or what may become one."""
        if self.family.bare and self._fresh and self._held.lstrip()[:1] == self.family.bare:
            self._inside, self._behind, self._bare = True, False, True
            return []
        content, mark, self._held = until(self._held, self.family.marks)
        if mark:
            lead = "" if mark == self.family.opening else mark  # else it is the call's own
            self._held = (mark if not lead else "") + self._held
            self._inside, self._behind, self._bare, self._lead = True, False, False, lead
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
            stray = c in "]}" and self._behind and bool(closing)  # one bracket too many, before the mark
            if c == "]":  # the list's end, unless it has just begun, or a mark ends it
                over = not closing and (self._behind or not ("[" in self._lead or "[" in text[:i]))
            else:
                over = c == "[" and self._behind
            if over or not (c.isspace() or c in self.family.listed or stray):
                content, self._lead, self._inside = self._lead + text[:i], "", False
                if self._behind:  # of a list nothing is left but space
                    self._held = "".join(filter(str.isspace, content)) + text[i + (c == "]") :]
                    return []
                self._held = text[i:]
                self._fresh = self._fresh and not content.strip()
                return [{"content": content}] if content else []
        self._lead, self._held = self._lead + text, ""
        return []

    def _heard(self, call: Call) -> list[Delta]:
        """What a call's text so far has to say."""
        deltas = list[Delta]()
        says = call.arguments or not self._bare or self.calls  # without a mark, an object with a name may be anything
        if call.index < 0 and says and (name := call.name) in self.functions:
            call.index, self.calls, self._lead, self._fresh = self.calls, self.calls + 1, "", True
            self._behind = True
            function = {"name": name, "arguments": ""}
            deltas.append(_delta(call.index, {"id": self.family.new_id(), "type": "function", "function": function}))
        if call.index >= 0:
            known = call.arguments
            if call.done and known[:1] != "{":  # some write the object as text; what is none says nothing
                inside = text_of(known).strip()
                known = inside if isinstance(value_of(inside), dict) else "{}"
            if known[:1] == "{":
                fresh, call.sent = known[call.sent :], max(call.sent, len(known))
                if fresh:
                    deltas.append(_delta(call.index, {"function": {"arguments": fresh}}))
        if call.done:
            if call.index < 0:
                deltas.append({"content": self._lead + call.text})
                whole = not call.depth and call.text.endswith(("}", ")"))  # then others may stand behind it
                self._inside, self._fresh = whole and self.family.shape != "named", False
            elif self.family.shape == "named":  # each has its own mark
                self._inside = False
            self._lead, self._call = "", None
        return deltas


class Harmony(Parser):
    """Reads gpt-oss's messages, whose headers say what they are: reasoning, content, or a call.

    Text without a header is content, such as what a grammar wrote.
    """

    def __init__(self, functions: Mapping[str, Mapping[str, Any]], forced: bool = False) -> None:
        super().__init__(HARMONY, functions, forced)
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

    def finish(self, closed: bool = False) -> list[Delta]:
        """The answer has ended: a header that was cut off is nobody's."""
        deltas = self._read("")
        while not self._kind and self._breaks():
            deltas += self._read("")
        if not self._kind and not HEADER.match(self._held):
            self._kind = "content"
        if self._kind:
            deltas += self._say(self._held)
        if closed:
            deltas += self._closed()
        self.broken = self._kind == "arguments" and not isinstance(value_of(self._said), dict)
        deltas += [{"content": self._blank}] if self._blank and not self.calls else []
        self._held = self._blank = ""
        return [delta for delta in deltas if not (self.forced and "content" in delta)]

    def go_on(self, said: str) -> None:
        """Begin behind what was said before, at a prompt's end."""
        self.feed(said)
        if self._kind:
            self._held = self._blank = ""

    def _header(self) -> list[Delta]:
        begun = HEADER.match(self._held)
        header, mark, behind = until(self._held, ("<|message|>", *(ENDINGS if begun else ())))
        short = len(header) < LONGEST_HEADER
        if not mark and short and (begun or any(each.startswith(header.lstrip()) for each in HEADERS)):
            return []
        self._said = ""
        if not (mark == "<|message|>" and short and begun):
            if self._breaks():
                return []
            if begun and short:  # ended without a text
                self._held = behind
                return []
            self._kind, end = "content", begun.end() if begun else 0
            text, self._held = self._held[:end], self._held[end:]
            return self._say(text)
        self._held, self.marked, name = behind, True, RECIPIENT.search(header)
        if name and name[1] in self.functions:
            self._kind, self.calls = "arguments", self.calls + 1
            function = {"name": name[1], "arguments": ""}
            return [_delta(self.calls - 1, {"id": self.family.new_id(), "type": "function", "function": function})]
        self._kind = "reasoning" if ANALYSIS.search(header) else "content"
        return []

    def _breaks(self) -> bool:
        """Whether what is held is a header without its end, whose message then begins behind the channel."""
        if broken := BROKEN.match(self._held):
            self._kind, self._held = "reasoning" if broken[2] == "analysis" else "content", self._held[broken.end() :]
            self.marked = True
        return bool(broken)

    def _body(self) -> list[Delta]:
        text, mark, self._held = until(self._held, CLOSINGS)
        deltas = self._say(text)
        if mark:
            deltas += self._closed()
            self._held = (mark if mark in HEADERS else "") + self._held
            self._kind = ""
        return deltas

    def _closed(self) -> list[Delta]:
        """What a message's end adds: arguments that are no object say nothing."""
        if self._kind != "arguments" or self._said.lstrip()[:1] == "{":
            return []
        self._said = ""
        return self._say("{}")

    def _say(self, text: str) -> list[Delta]:
        if not text:
            return []
        if self._kind == "arguments":
            begun = self._said.lstrip()
            self._said += text
            text = text if begun else self._said.lstrip()
            return [_delta(self.calls - 1, {"function": {"arguments": text}})] if (begun or text)[:1] == "{" else []
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


def parser_of(family: Family, functions: Mapping[str, Mapping[str, Any]], forced: bool = False) -> Parser:
    """What reads a family's answers."""
    return Harmony(functions, forced) if family is HARMONY else Parser(family, functions, forced)


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
