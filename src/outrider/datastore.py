"""A memory-mapped suffix array over token ids: what followed these tokens elsewhere? Made for the `rest` drafter.

The file is a header of 64 KiB (JSON, padded with blanks) and shards. A shard holds token ids (u32, big-endian, so that
bytes sort as ids do), in which SEPARATOR, an id of no vocabulary, ends every document, and its suffix array (u32,
little-endian positions in the shard, sorted by what stands there). Shards bound the memory of building and keep
positions in 32 bits. Reading maps the file and touches O(log n) pages a look-up: it may be larger than memory.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.config import whole
from outrider.corpus import PIECE, files, fingerprint, is_said, said, texts
from outrider.errors import ConfigError
from outrider.files import expand, make_folder, replacing
from outrider.load import Progress
from outrider.ops import native

SEPARATOR = 2**32 - 1
VERSION = 1
HEADER = 2**16  # bytes
SMALL = 2**26  # bytes that are worth having in memory: then pages come in dozens, not one by one in the middle of steps
BEGIN = b'{"outrider_datastore"'  # of a store, even of one that is damaged
KEYS = "documents", "tokens", "vocab", "fingerprint", "model", "shards"  # of the header, beside the version

Ids = NDArray[np.uint32]


class Store:
    """An opened store. `header` has KEYS: `shards` are their lengths, separators included.

    Raises ConfigError if the file is no store, of another version, truncated or damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = expand(path)
        again = "build it again with `outrider datastore build`"
        try:
            if self.path.exists() and not self.path.is_file():  # to open a pipe would wait for who writes to it
                raise ConfigError(f"datastore {self.path} cannot be read: it is no file; {again}")
            with open(self.path, "rb") as file:
                raw, self.nbytes = file.read(HEADER), os.fstat(file.fileno()).st_size
                if (header := _header(raw)) is None:
                    raise ConfigError(f"{self.path} is no datastore, or its header is damaged; {again}")
                if (version := header["outrider_datastore"]) != VERSION:
                    raise ConfigError(f"{self.path} is a datastore of version {version}, not {VERSION}; {again}")
                if self.nbytes != (expected := HEADER + 8 * sum(header["shards"])):
                    raise ConfigError(f"{self.path} has {self.nbytes} bytes, not {expected}: damaged; {again}")
                self.header, self.data = header, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ConfigError(f"datastore {self.path} cannot be read: {error.strerror}; {again}") from None
        if hasattr(mmap, "MADV_RANDOM") and self.nbytes > SMALL:
            self.data.madvise(mmap.MADV_RANDOM)  # look-ups jump: reading ahead would be waste
        self.shards, at = [], HEADER  # offset of the token ids, token ids, suffix array
        for n in header["shards"]:
            ids, order = np.frombuffer(self.data, ">u4", n, at), np.frombuffer(self.data, "<u4", n, at + 4 * n)
            self.shards.append((at, ids, order))
            at += 8 * n

    def check(self, tokenizer: Any, vocab: int) -> None:
        """Raise ConfigError unless the ids mean the same text to a model of `vocab` ids with this tokenizer (or None).

        As for draft models, without a tokenizer on either side the sizes of the vocabularies must agree.
        """
        own, built = self.header["fingerprint"], f"{self.path} was built for {self.header['model'] or 'another model'}"
        if tokenizer is None or own is None:
            if self.header["vocab"] != vocab:
                raise ConfigError(f"{built} with {self.header['vocab']} token ids, and this model has {vocab}")
        elif own != (theirs := fingerprint(tokenizer)):
            sizes = f"{self.header['vocab']} tokens, {own[:12]}; this model's: {len(tokenizer)}, {theirs[:12]}"
            raise ConfigError(f"{built} with another tokenizer ({sizes}); build a store with this model's")

    def match(
        self, context: list[int], longest: int, shortest: int, length: int, hits: int
    ) -> tuple[int, list[list[int]]]:
        """The longest suffix of `context` that occurs before something, of `shortest..longest` tokens: how many it has,
        and what followed it.

        Up to `length` tokens of each occurrence, within its document; of at most `hits` occurrences, evenly spread
        over the sorted ones, which makes them a fair sample of the continuations.
        """
        found: list[tuple[int, int]] = []
        low, high = shortest - 1, min(longest, len(context))
        while low < high:  # if a suffix stands before something, so do the shorter ones
            n = (low + high + 1) // 2
            spans = self._spans(context[-n:])
            low, high, found = (n, high, spans) if any(a < b for a, b in spans) else (low, n - 1, found)
        return low, list(self._after(found, low, length, hits)) if found else []

    def compiled(self) -> Any:
        """The shards for csrc/lookups.cpp, as long as this store is there."""
        shards = [(ids.ctypes.data, order.ctypes.data, len(ids)) for _, ids, order in self.shards]
        return native.kernels.Shards(shards, self.nbytes <= SMALL)

    def _spans(self, wanted: list[int]) -> list[tuple[int, int]]:
        """Per shard, the part of its suffix array where `wanted` stands and the document goes on."""
        key, spans = np.array(wanted, ">u4").tobytes(), []
        for at, _, order in self.shards:

            def there(position: Any, at: int = at) -> bytes:  # past the shard's end: behind its last separator
                start = at + 4 * int(position)
                return self.data[start : start + len(key) + 4]

            first = bisect_left(order, key, key=there)
            spans.append((first, bisect_left(order, key + b"\xff" * 4, first, key=there)))  # separators sort last
        return spans

    def _after(self, spans: list[tuple[int, int]], n: int, length: int, hits: int) -> Iterator[list[int]]:
        total, before = sum(b - a for a, b in spans), 0
        picked = np.arange(min(total, hits), dtype=np.int64) * total // max(1, min(total, hits))
        for (a, b), (_, ids, order) in zip(spans, self.shards, strict=True):
            own = picked[(picked >= before) & (picked < before + b - a)] - before + a
            at = order[own].astype(np.int64)[:, None] + np.arange(n, n + length)
            for row in ids[np.minimum(at, len(ids) - 1)].tolist():
                yield row[: row.index(SEPARATOR)] if SEPARATOR in row else row
            before += b - a


def _header(raw: bytes) -> dict[str, Any] | None:
    """The header, if it is one: of another version, or with all KEYS, of their types and in keeping with each other."""
    try:
        header: dict[str, Any] = json.loads(raw)
        if not whole(version := header["outrider_datastore"], 1):
            return None
        if version != VERSION:
            return header
        documents, tokens, vocab, fingerprint, model, shards = (header[key] for key in KEYS)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    named = (fingerprint is None or isinstance(fingerprint, str)) and isinstance(model, str)
    counted = whole(documents, 1) and whole(tokens, 1) and whole(vocab, 1, SEPARATOR)
    if not (named and counted and isinstance(shards, list) and all(whole(n, 1, SEPARATOR) for n in shards)):
        return None
    # What shards hold beside tokens are separators, one for a document.
    return header if 0 <= sum(shards) - tokens <= documents <= sum(shards) else None


def build(
    paths: Iterable[str | Path], tokenizer: Any, output: str | Path, *, model: str = "", field: str | None = None,
    suffixes: Iterable[str] | None = None, shard_tokens: int = 2**26, progress: Progress | None = None,
) -> Store:  # fmt: skip
    """Build a store from what `corpus` reads: texts, JSON lines (`field`) and folders (`suffixes`); .gz and .xz too.

    And from what the model itself said (`outrider train data`), whose ids are taken as they are.

    `shard_tokens` bounds memory at about 30 bytes a token. `model` names whose tokenizer it is. Raises ConfigError.
    """
    _check_replaceable(expand(output))
    found = files(paths, suffixes)
    vocab = 1 + max(tokenizer.get_vocab().values())
    answers = [path for path in found if is_said(path)]
    others = [path for path in found if path not in answers]
    if field and not any(".jsonl" in path.suffixes for path in others):
        raise ConfigError(f"--field {field} is for JSON lines of texts, and none are read; leave it out")
    documents = itertools.chain(
        *(said(path, tokenizer) for path in answers), _encode(texts(others, field, progress), tokenizer)
    )
    return write(documents, output, vocab, fingerprint(tokenizer), model, shard_tokens)


def write(
    documents: Iterable[list[int]], output: str | Path, vocab: int, fingerprint: str | None = None, model: str = "",
    shard_tokens: int = 2**26,
) -> Store:  # fmt: skip
    """Write a store of token ids below `vocab`. `output` appears when it is complete. Raises ConfigError."""
    output, waiting, shards = expand(output), list[Ids](), list[int]()
    count = size = 0
    make_folder(output.parent, "the folder of a datastore,")
    with replacing(output) as partial, open(partial, "wb") as file:
        file.write(b" " * HEADER)
        for ids in itertools.chain(documents, [None]):
            if ids:
                waiting.append(np.array([*ids, SEPARATOR], np.uint32))
                count, size = count + 1, size + len(waiting[-1])
            if size and (size >= shard_tokens or ids is None):
                tokens = np.concatenate(waiting)
                shards.append(size)
                waiting, size = [], 0
                file.write(tokens.astype(">u4").data)
                file.write(suffix_array(tokens).astype("<u4").data)
        if not count:
            raise ConfigError("there is no text to put into the datastore")
        header = {"outrider_datastore": VERSION, "documents": count, "tokens": sum(shards) - count, "vocab": vocab}
        raw = json.dumps(header | {"fingerprint": fingerprint, "model": model, "shards": shards}).encode()
        if len(raw) > HEADER:
            raise ConfigError(f"{len(shards)} shards are too many for a header; raise shard_tokens")
        file.seek(0)
        file.write(raw)
    return Store(output)


def _check_replaceable(output: Path) -> None:
    """Raise ConfigError for a file with something else in it: it may be a text that was to be read."""
    if os.path.isfile(output):
        with open(output, "rb") as file:
            if (begin := file.read(len(BEGIN))) and begin != BEGIN:
                raise ConfigError(f"{output} is there and is no datastore: it would be lost; give another name")


def suffix_array(tokens: Ids) -> Ids:
    """The start of every suffix, sorted by the suffixes' ids; a suffix that ends sorts before those that go on.

    Uses libdivsufsort if `pydivsufsort` is there (the extra `rest`), else numpy, some six times slower.
    """
    ranks = np.unique(tokens, return_inverse=True)[1].astype(np.int64)
    try:
        from pydivsufsort import divsufsort
    except ImportError:
        return _doubling(ranks).astype(np.uint32)
    width = (int(ranks.max()).bit_length() + 7) // 8 or 1  # it sorts bytes: big-endian ones sort as the ids do
    data = ranks.astype(">u4").view(np.uint8).reshape(-1, 4)[:, 4 - width :].reshape(-1)
    order = divsufsort(data)
    return np.asarray(order[order % width == 0] // width).astype(np.uint32)


def _doubling(ranks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sort by 1, 2, 4, ... ids, each time by the ranks of the two halves (Manber and Myers)."""
    n, step = len(ranks), 1
    order = np.argsort(ranks, kind="stable")
    while ranks[order[-1]] < n - 1:
        behind = np.zeros(n, np.int64)
        behind[: max(0, n - step)] = ranks[step:] + 1
        keys = ranks * (n + 1) + behind
        order = np.argsort(keys, kind="stable")
        new = np.concatenate([[0], np.cumsum(np.diff(keys[order]) > 0)])
        ranks = np.empty(n, np.int64)
        ranks[order] = new
        step *= 2
    return order


def _encode(documents: Iterator[str], tokenizer: Any) -> Iterator[list[int]]:
    batch, size = list[str](), 0
    for text in itertools.chain(documents, [None]):
        if text:
            batch.append(text)
            size += len(text)
        if batch and (size >= PIECE or text is None):
            yield from tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]
            batch, size = [], 0
