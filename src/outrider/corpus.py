"""Texts on disk: plain ones and code are documents, JSON lines hold one each; .gz and .xz of them are read as well.

What a model said (`outrider train data`) is on disk as token ids.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import itertools
import json
import lzma
import os
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError, reason_of
from outrider.files import expand
from outrider.load import Progress

PIECE = 2**20  # characters: a longer text is read as several documents
SUFFIXES = [
    ".txt", ".md", ".rst", ".jsonl", ".html", ".css", ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".java",
    ".kt", ".js", ".jsx", ".ts", ".tsx", ".go", ".rs", ".rb", ".php", ".swift", ".scala", ".cs", ".sh", ".sql", ".lua",
]  # fmt: skip
FIELDS = [["text"], ["content"], ["prompt", "completion"], ["prompt", "canonical_solution"]]  # of JSON lines, by turns
SAID, LEAD = b'{"p": [', 4  # how its lines begin; tokens of a prompt that lead to the answer
OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
UNREADABLE = OSError, EOFError, lzma.LZMAError, zlib.error


def files(paths: Iterable[str | Path], suffixes: Iterable[str] | None = None) -> list[Path]:
    """The files named, and those in the folders named that end with one of `suffixes` and are not hidden."""
    named = tuple(suffixes or SUFFIXES)
    endings = tuple(suffix + packed for suffix in named for packed in ("", *OPENERS))
    found: list[Path] = []
    for path in map(expand, paths):
        if os.path.isdir(path):  # unlike Path's, not startled by names that are too long
            inside = sorted(p for p in path.rglob("*") if p.is_file() and p.name.endswith(endings))
            inside = [p for p in inside if not any(part.startswith(".") for part in p.relative_to(path).parts)]
            if not inside:
                ends = ", ".join(named)
                raise ConfigError(f"no file in {path} ends with {ends}; name files or, for a datastore, a --suffix")
            found += inside
        elif os.path.isfile(path):
            found.append(path)
        else:
            there = os.path.exists(path)
            raise ConfigError(f"{path} is neither a file nor a folder" if there else f"no file or folder at {path}")
    return found


def texts(found: list[Path], field: str | None = None, progress: Progress | None = None) -> Iterator[str]:
    """The documents in these files, one after the other. Raises ConfigError for what cannot be read."""
    report = progress or (lambda what, done, total: None)
    total, done = max(1, sum(path.stat().st_size for path in found)), 0
    for path in found:
        try:
            with open(path, "rb") as raw:
                unpack = OPENERS.get(path.suffix)
                lines = ".jsonl" in path.suffixes
                with io.TextIOWrapper(unpack(raw) if unpack else raw, "utf-8-sig", errors="replace") as stream:
                    for number in itertools.count(1):
                        if not (text := stream.readline() if lines else stream.read(PIECE)):
                            break
                        report("reading", done + raw.tell(), total + 1)
                        if not lines and "\0" in text:
                            raise ConfigError(f"{path} is no text: it has zero bytes")
                        if not lines:
                            yield text
                        elif not text.isspace():
                            yield _field(text, field, f"{path}:{number}")
        except UNREADABLE as error:
            raise _unreadable(path, error) from None
        done += path.stat().st_size
    report("sorting", total, total + 1)


def is_said(path: Path) -> bool:
    """Whether a file holds what a model said."""
    with suppress(*UNREADABLE), _opened(path) as file:  # `texts` says of a file what keeps it from being read
        return bool(file.read(len(SAID)) == SAID)
    return False


def speller(tokenizer: Any) -> str:
    """What tells the tokenizer in such a file: the beginning of its fingerprint."""
    return fingerprint(tokenizer)[:16]


def fingerprint(tokenizer: Any) -> str:
    """SHA-256 over the vocabulary, sorted by id."""
    entries = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()


def said(path: Path, tokenizer: Any) -> Iterator[list[int]]:
    """The answers in such a file, each behind the end of its prompt. Raises ConfigError for another tokenizer's."""
    vocab, own = 1 + max(tokenizer.get_vocab().values()), speller(tokenizer)
    for number, line in enumerate(_lines(path), 1):
        try:
            entry = json.loads(line)
            ids = [*entry["p"][-LEAD:], *entry["o"]]
            if not all(type(i) is int and 0 <= i < vocab for i in ids) or entry.get("by", own) != own:
                raise ValueError
        except (ValueError, TypeError, KeyError, RecursionError):
            if line.endswith(b"\n"):  # else it is being written
                raise ConfigError(f"{path}:{number} is not what `outrider train data` writes for this model") from None
        else:
            yield ids


def _opened(path: Path) -> Any:
    return OPENERS.get(path.suffix, open)(path, "rb")


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with _opened(path) as file:
            yield from file
    except UNREADABLE as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: BaseException) -> ConfigError:
    return ConfigError(f"{path} cannot be read: {reason_of(error)}")


def archived(path: Path) -> Iterator[str]:
    """The texts in a tar archive, by name."""
    with tarfile.open(path) as archive:
        for member in sorted(archive.getmembers(), key=lambda member: member.name):
            if (file := archive.extractfile(member)) is not None:
                yield file.read().decode()


def mended(text: str) -> str:
    """The text with U+FFFD for halves of characters, which JSON can say and no tokenizer reads."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _field(line: str, field: str | None, where: str) -> str:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}") from None
    for names in [[field]] if field else FIELDS:
        if isinstance(entry, dict) and all(isinstance(entry.get(name), str) for name in names):
            return mended("".join(entry[name] for name in names))
    has = f"has {', '.join(entry)}" if isinstance(entry, dict) else "is no object"
    wanted = repr(field) if field else "'text' or 'content', or strings 'prompt' and 'completion'"
    raise ConfigError(f"{where} {has}, and no text as a string {wanted}; datastore build has --field")
