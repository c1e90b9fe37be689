"""From tokens to text as they come: whole characters only, stop strings found across token borders."""

from __future__ import annotations

from typing import Any

from outrider.config import SamplingParams


class TextStream:
    """Text of a growing output.

    `feed` takes tokens and says whether a stop string appeared; `text` is all that is decoded, cut at the stop string;
    `take` hands out what is new and cannot become part of a stop string any more.
    """

    def __init__(self, tokenizer: Any, params: SamplingParams) -> None:
        self.tokenizer, self.stops = tokenizer, params.stops
        self.include, self.skip_special = params.include_stop_str_in_output, params.skip_special_tokens
        self.hold = max((len(s) for s in self.stops), default=1) - 1
        self.min_tokens = params.min_tokens  # stop strings count only behind these
        self.text = ""
        self.tokens: list[int] = []
        self.stopped = False
        self._prefix = self._read = self._taken = self._search = 0

    def feed(self, tokens: list[int], final: bool = False) -> bool:
        """Decode more tokens; with `final`, incomplete characters too. True if a stop string has ended the text."""
        if self.tokenizer is None or self.stopped:
            return self.stopped
        self.tokens += tokens
        whole = self._decode(self._prefix, len(self.tokens))
        if whole.endswith("\ufffd") and not final:  # a character's bytes are still coming
            return False
        # Decoding from a few tokens back keeps the spaces that some tokenizers drop at the start.
        fresh = whole[len(self._decode(self._prefix, self._read)) :]
        self._prefix, self._read = self._read, len(self.tokens)
        if len(self.tokens) <= self.min_tokens:
            self._search = len(self.text) + len(fresh)
        search_from = max(self._search, len(self.text) - self.hold)
        self.text += fresh
        found = [(at, s) for s in self.stops if (at := self.text.find(s, search_from)) >= 0]
        if found:
            at, stop = min(found)
            self.text = self.text[: at + len(stop)] if self.include else self.text[:at]
            self.stopped = True
        return self.stopped

    def take(self, final: bool = False) -> str:
        """New text since the last call, without what a stop string may still swallow unless `final`."""
        end = len(self.text) if final or self.stopped else max(self._taken, len(self.text) - self.hold)
        taken, self._taken = self.text[self._taken : end], end
        return taken

    def _decode(self, start: int, end: int) -> str:
        text: str = self.tokenizer.decode(self.tokens[start:end], skip_special_tokens=self.skip_special)
        return text
