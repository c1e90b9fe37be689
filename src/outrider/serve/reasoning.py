"""Reasoning: whether and how a model writes it before its answer, and a reader that tells the two apart.

The ways are known by the chat template's marks; where an answer begins, in its reasoning or not, by the end of each
rendered prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from outrider.serve.parser import Delta, Harmony, Parser, until

TAIL = 32  # tokens at a prompt's end that can hold a mark


@dataclass(frozen=True)
class Way:
    """Marks before and behind reasoning."""

    begin: str
    end: str


THINK, BRACKETS = Way("<think>", "</think>"), Way("[THINK]", "[/THINK]")
SEED = Way("<seed:think>", "</seed:think>")
CHANNELS = Way("<|channel|>analysis<|message|>", "<|end|>")  # gpt-oss's, among other messages (`Harmony`)
START, FINAL = "<|start|>assistant", "<|channel|>final<|message|>"


def way_of(template: Any) -> Way | None:
    """The way of a chat template; None if it knows of no reasoning."""
    if not isinstance(template, str):
        return None
    if all(mark in template for mark in ("<|channel|>", "<|message|>", "analysis")):
        return CHANNELS
    return next((way for way in (THINK, BRACKETS, SEED) if way.begin in template or way.end in template), None)


def opened(way: Way, prompt: str, said: str = "") -> bool | None:
    """Whether an answer to a prompt begins in its reasoning; None if its first word will tell.

    said: what was already written of the answer, at the prompt's end.
    """
    prompt = prompt.rstrip().removesuffix(said.strip()).rstrip()
    if way.end in said:
        return False
    if said.lstrip().startswith(way.begin) or prompt.endswith(way.begin):
        return True
    return False if said.strip() or prompt.endswith(way.end) else None


@dataclass(frozen=True)
class Reading:
    """How the answers of one request are read."""

    tokenizer: Any
    way: Way | None = None  # of reasoning; None: it is not told apart
    parser: Callable[[], Parser] | None = None  # makes what finds calls, if they are looked for
    said: str = ""  # of the answer, in the prompt
    forced: bool = False  # whether it has to be calls

    def end(self, prompt: list[int]) -> str:
        """Of a prompt's tokens the text that says where an answer begins."""
        if self.way is None:
            return ""
        return str(self.tokenizer.decode(prompt[-TAIL - len(self.said) :], skip_special_tokens=False))

    def after(self, end: str) -> str | list[str] | None:
        """What may stand before a constraint of an answer to a prompt that ends so: `StructuredOutputsParams.after`."""
        if self.way is None:
            return None
        if self.way is CHANNELS:
            lead = [] if self.forced else [FINAL]
            return [self.way.begin, self.way.end + START, *lead] if end.endswith(START) else None
        begun = opened(self.way, end, self.said)
        return [self.way.begin, self.way.end] if begun is None else self.way.end if begun else None

    def reader(self, end: str) -> Parser | Reader | None:
        """What reads an answer to a prompt that ends so; None if all of it is content."""
        parser = self.parser() if self.parser else None
        if self.way is CHANNELS:
            parser = parser if isinstance(parser, Harmony) else Harmony({})
            begun = end.rpartition(START)
            if begun[1] and "to=" not in begun[2]:
                parser.go_on(begun[2])
            return parser
        return parser if self.way is None else Reader(self.way, opened(self.way, end, self.said), parser)

    def counter(self, end: str) -> Counter | None:
        """What counts the tokens of its reasoning; None if that is not told apart."""
        plain = self if self.way is CHANNELS else replace(self, parser=None)  # whose calls are messages, too
        return None if self.way is None or (reader := plain.reader(end)) is None else Counter(reader)


class Counter:
    """Counts the tokens of an answer that are reasoning, each by its own text."""

    def __init__(self, reader: Parser | Reader) -> None:
        self.reader = reader
        self.doubtful = 0  # tokens that may be reasoning's, or of the mark behind it

    def count(self, text: str) -> int:
        """How many are certain with this one."""
        before = self.reader.thinking
        if any("reasoning" in delta for delta in self.reader.feed(text)):
            found, self.doubtful = self.doubtful + 1, 0
            return found
        self.doubtful = self.doubtful + 1 if before and self.reader.thinking else 0
        return 0


class Reader:
    """Reads an answer in pieces: reasoning between two marks, and what is behind it by a parser, or as content.

    The white space around the marks is nobody's.
    """

    def __init__(self, way: Way, opened: bool | None, parser: Parser | None = None) -> None:
        self.way, self.parser = way, parser
        self.thinking = bool(opened)  # whether what comes next is reasoning
        self._place = "behind" if opened is False else "before"  # then: inside, between, behind
        self.marked = False  # whether a mark has come
        self._held = ""  # white space, and what may become a mark
        self._said = False  # whether there was any reasoning

    @property
    def calls(self) -> int:
        """How many were handed out."""
        return self.parser.calls if self.parser else 0

    @property
    def broken(self) -> bool:
        """Whether the last of them was cut off."""
        return bool(self.parser and self.parser.broken)

    def feed(self, text: str) -> list[Delta]:
        """More of the answer."""
        self._held += text
        deltas = list[Delta]()
        if self._place == "before":
            begun = self._held.lstrip()
            if len(begun) < len(self.way.begin) and self.way.begin.startswith(begun):
                return []
            if begun.startswith(self.way.begin):  # some write it once more
                self._held, self.thinking, self.marked = begun.removeprefix(self.way.begin), True, True
            self._place = "inside" if self.thinking else "behind"
        if self._place == "inside":
            said, mark, behind = until(self._held if self._said else self._held.lstrip(), (self.way.end,))
            held = said[len(said.rstrip()) :]
            self._held, self._said = behind if mark else held + behind, self._said or bool(said.strip())
            if said.rstrip():
                deltas.append({"reasoning": said.rstrip()})
            if mark:
                self._place, self.thinking, self.marked = "between", False, True
        if self._place == "between":
            self._held = self._held.lstrip()
            self._place = "behind" if self._held else "between"
        if self._place == "behind":
            deltas += self._answer(self._held)
            self._held = ""
        return deltas

    def finish(self, closed: bool = False) -> list[Delta]:
        """The answer has ended (as `Parser.finish` takes it): what was held back belongs to what it came in."""
        held, self._held = self._held, ""
        deltas = list[Delta]()
        if self.thinking:
            deltas = [{"reasoning": held.rstrip()}] if held.strip() else []
        elif self._place == "before":
            deltas = self._answer(held)
        return deltas + (self.parser.finish(closed) if self.parser else [])

    def _answer(self, text: str) -> list[Delta]:
        if self.parser:
            return self.parser.feed(text)
        return [{"content": text}] if text else []
