"""From tokens to text as they come: whole characters only, stop strings found across token borders."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from outrider.config import SamplingParams

BROKEN = "\ufffd"  # stands where bytes make no character, or not yet
WINDOW = 16  # tokens that are decoded together: some decoders let the first one's space go, others join neighbours
PATIENCE = 64  # tokens without a whole character; more are not waited for
FAR = 200  # tokens at a prompt's end, among which some text is looked for

LONG = 2**16  # characters: to tokenize more takes a tenth of a second and longer
_one, _long = threading.Lock(), threading.Lock()


def tokenizing(text: str, tokenizer: Any) -> threading.Lock:
    """Held while a text is tokenized, since tokenizers are not made for several threads at once.

    Those in Rust are, as long as nothing is set: with them nobody waits for a long text but other long ones.
    """
    return _long if len(text) > LONG and getattr(tokenizer, "is_fast", False) else _one


def spelt(words: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """Token ids of words at the beginning of a text, and behind a space."""
    found = []
    for word in words:
        found += [tokens_of(before + word.lstrip(), tokenizer) for before in ("", " ")]
    return [ids for ids in found if ids]


def tokens_of(text: str, tokenizer: Any) -> list[int]:
    """Token ids of a text by itself."""
    with tokenizing(text, tokenizer):
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


class TextStream:
    """Text of a growing output, told apart from its prompt's: what decoding both adds behind decoding the prompt.

    `feed` takes tokens, in whatever blocks, and says whether a stop string has ended the text. `text` is all that is
    decoded, cut there; `take` hands out what is new and cannot become part of a stop string any more.
    """

    def __init__(self, tokenizer: Any, params: SamplingParams, prompt: Sequence[int] = ()) -> None:
        self.tokenizer, self.stops = tokenizer, params.stops
        self.include, self.skip_special = params.include_stop_str_in_output, params.skip_special_tokens
        self.min_tokens = params.min_tokens  # stop strings count only if they end behind these
        self.count = 0  # tokens fed
        self.stop_reason: str | None = None  # the stop string that has ended it
        self._window = self._context(prompt)
        self._base = self._decode(self._window) if self._window else ""  # text of the window that is out
        self._chunk, self._known = 0, len(self._window)  # where the window's last whole piece begins, ends
        self._grown = False  # whether text has come since
        self._torn = False  # ... and the whole piece before it, a prompt's end, ends amid a character
        self._parts: list[str] = []
        self._taken = 0  # parts handed out
        self._tail = ""  # text behind them, in which a stop string may have begun
        self._early = 0  # characters of it that are of the first min_tokens

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self._parts) + self._tail

    def feed(self, tokens: Sequence[int], final: bool = False) -> bool:
        """Decode more tokens; with `final`, incomplete characters too. True if a stop string has ended the text."""
        if self.tokenizer is None:
            return False
        for token in tokens:
            if self.stopped:
                break
            self.count += 1
            self._window.append(token)
            self._read()
        if final and not self.stopped and len(self._window) > self._known:
            self._read(final=True)
        return self.stopped

    def take(self, final: bool = False) -> str:
        """New text since the last call, without what a stop string may still swallow unless `final`."""
        if final:
            self._parts, self._tail = [*self._parts, self._tail], ""
        taken = "".join(self._parts[self._taken :])
        self._taken = len(self._parts)
        return taken

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self.stop_reason is not None

    def _read(self, final: bool = False) -> None:
        """Bring the text up to the window, short of the bytes of a character that are still coming."""
        late = len(self._window) - self._known > PATIENCE
        whole = self._decode(self._window)
        now = whole if final or late else whole.rstrip(BROKEN)
        torn = not now.startswith(self._base)  # a prompt may end amid one
        base = self._base.rstrip(BROKEN) if torn else self._base
        if fresh := now[len(base) :]:
            self._base, self._grown, self._torn = now, True, self._torn or torn
            self._add(fresh)
        if now == whole and self._grown:
            self._chunk = 0 if self._torn else self._known
            self._known, self._grown, self._torn = len(self._window), False, False
            # A window begins with tokens that have text: what a decoder does to the first one is done to known text.
            if self._known > WINDOW and self._chunk:
                del self._window[: self._chunk]
                self._base, self._chunk, self._known = self._decode(self._window), 0, len(self._window)
        elif now == whole and len(self._window) - self._known > WINDOW:
            del self._window[self._known :]  # special tokens, or the like: no part of a character

    def _add(self, fresh: str) -> None:
        if not self.stops:
            self._parts.append(fresh)
            return
        self._tail += fresh
        if self.count <= self.min_tokens:
            self._early = len(self._tail)
        if found := [(at, stop) for stop in self.stops if (at := self._find(stop)) >= 0]:
            at, stop = min(found, key=lambda one: one[0] + len(one[1]))  # the first to end, however tokens are cut
            safe, self.stop_reason = at + len(stop) * self.include, stop
        else:
            safe = next((at for at in range(len(self._tail)) if self._begins(self._tail[at:])), len(self._tail))
        self._parts.append(self._tail[:safe])
        self._tail, self._early = "" if self.stopped else self._tail[safe:], max(0, self._early - safe)

    def _find(self, stop: str) -> int:
        """Where in the tail a stop string begins that ends behind the first tokens; -1 if none does."""
        return self._tail.find(stop, max(0, self._early + 1 - len(stop)))

    def _begins(self, text: str) -> bool:
        return any(stop.startswith(text) for stop in self.stops)

    def _context(self, prompt: Sequence[int]) -> list[int]:
        """The end of the prompt, from a character's beginning and with some text, unless that is too far back."""
        if self.tokenizer is None:
            return []
        n = 6
        while n < min(len(prompt), FAR):
            text = self._decode(context := list(prompt[-n:]))
            if text.strip(BROKEN) and not text.startswith(BROKEN):
                return context
            n *= 2
        return list(prompt[-FAR:])

    def _decode(self, tokens: list[int]) -> str:
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=self.skip_special)
        return text
