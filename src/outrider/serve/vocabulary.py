"""The bytes of single tokens, which decoding them one by one would not give."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@lru_cache(1)
def _byte_of() -> dict[str, int]:
    """GPT-2's characters for bytes: printable ones stand for themselves, the others for those from 256 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    other = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(other)}


class Vocabulary:
    """Tokens as bytes and as text, as a part of a sequence: with the space before a word, without special rules."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = json.dumps(json.loads(backend.to_str()).get("decoder")) if backend is not None else ""
        self._byte_level = "ByteLevel" in decoder
        self._pieces = not self._byte_level and "\\u2581" in decoder
        added = getattr(tokenizer, "added_tokens_decoder", None) or {}
        self.added = set(added)
        self.special = {str(token) for token in added.values() if token.special}  # which are no text
        self.bytes = lru_cache(2**16)(self._bytes)

    def _bytes(self, token: int) -> bytes:
        if self.tokenizer is None:
            return b""
        piece = self.tokenizer.convert_ids_to_tokens(token)
        if piece is None:  # a row of the model's that pads its matrix
            return b""
        if token not in self.added:
            if self._byte_level and _byte_of().keys() >= set(piece):  # as the decoder has it, any other is text
                return bytes(_byte_of()[c] for c in piece)
            if found := BYTE.fullmatch(piece):
                return bytes([int(found[1], 16)])
        text = str(piece).replace("\u2581", " ") if self._pieces else str(piece)  # of added ones, too: Gemma's spaces
        return text.encode()

    def text(self, token: int, as_id: bool = False) -> str:
        """As logprobs show it: `token_id:N` if asked to, or if there is no tokenizer."""
        if as_id or self.tokenizer is None:
            return f"token_id:{token}"
        return self.bytes(token).decode("utf-8", "replace")
