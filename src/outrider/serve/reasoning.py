"""Reasoning: whether and how a model writes it before its answer, and a reader that tells the two apart.

The ways are known by the chat template's marks; where an answer begins, in its reasoning or not, by the end of each
rendered prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from outrider.serve.parser import PIECE, Delta, Harmony, Parser, until

TRIALS = 32  # times in an answer's reasoning that calls are looked for: each may read all that is left
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

    The white space around the marks is nobody's. Some models forget the second before they call: whole calls with
    which an answer ends in its reasoning are calls.
    """

    def __init__(self, way: Way, opened: bool | None, parser: Parser | None = None) -> None:
        self.way, self.parser = way, parser
        self.thinking = bool(opened)  # whether what comes next is reasoning
        self._place = "behind" if opened is False else "before"  # then: inside, between, behind
        self.marked = False  # whether a mark has come
        self._held = ""  # white space, and what may become a mark
        self._said = False  # whether there was any reasoning
        self._marks = parser.family.marks if parser and not parser.forced else ()
        self._trial: Parser | None = None  # of what may be calls, from the first of their marks that is held
        self._trials = 0
        self._tried = 0  # characters that it has read
        self._made = list[Delta]()  # of them

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
            if not mark and (at := self._calls(said + behind)) < len(said):
                said, behind = said[:at], said[at:] + behind
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
            at = self._calls(held, closed)
            if self._trial:
                held, self.parser = held[:at], self._trial
            deltas = [{"reasoning": held.rstrip()}] if held.strip() else []
            if self._trial:
                return deltas + self._made
        elif self._place == "before":
            deltas = self._answer(held)
        return deltas + (self.parser.finish(closed) if self.parser else [])

    def _calls(self, text: str, closed: bool | None = None) -> int:
        """Where in reasoning calls begin that may be all that is left of the answer.

        closed: it has ended so (`Parser.finish`), and they are.
        """
        at = 0
        while self.parser and self._marks and (self._trial or self._trials < TRIALS):
            before, mark, _ = until(text[at:], self._marks)
            at += len(before)
            if not mark:
                return at
            if self._trial is None:
                self._trial, self._trials, self._tried, self._made = copy(self.parser), self._trials + 1, 0, []
            possible, begin = True, at + self._tried
            while possible and (piece := text[begin : begin + PIECE]):
                possible, begin = self._hear(self._trial.feed(piece)), begin + len(piece)
            self._tried = begin - at
            if possible and closed is not None:
                possible = self._hear(self._trial.finish(closed)) and self._trial.calls > 0 and not self._trial.broken
            if possible:
                return at
            self._trial = None
            at += len(mark)
        return len(text)

    def _hear(self, deltas: list[Delta]) -> bool:
        """What is made of what may be calls; whether it still may."""
        self._made += deltas
        return not any(delta.get("content", "").strip() for delta in deltas)

    def _answer(self, text: str) -> list[Delta]:
        if self.parser:
            return self.parser.feed(text)
        return [{"content": text}] if text else []
