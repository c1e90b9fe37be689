"""What is generated: four suites of prompts, each chosen evenly and deterministically from one data file.

The files come from a folder that the user names (`--data`); the package ships none. Only `stories` has openings of its
own, for machines without data.
"""

from __future__ import annotations

import gzip
import json
import lzma
import re
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import outrider
from outrider.errors import ConfigError

PASSAGE_WORDS, PASSAGES_PER_BOOK = 300, 40
DAMAGED = (OSError, EOFError, lzma.LZMAError, zlib.error, tarfile.TarError, LookupError, TypeError, ValueError)
OPENING = re.compile(r"(\S+\s+){39}\S+")  # 40 words
OPENINGS = [
    "Once upon a time there was a small grey donkey who lived behind the mill. Every morning she carried",
    "Tom and his sister Mia built a boat out of an old door. They pushed it into the pond and",
    "It was the first snow of the year. Anna ran outside without her boots, because she wanted to",
    "The old clock in the kitchen had stopped. Grandpa opened its little door and found",
    "There was a dragon who was afraid of fire. When the other dragons laughed at him, he",
    "Ben had one red balloon. He held it very tight, but the wind was strong and",
    "Deep in the forest stood a house with a blue roof. Nobody knew who lived there until one day",
    "Lucy wanted to bake a cake for her mother. She took the flour, the eggs and the sugar, and then",
    "A mouse found a key under the stairs. It was bigger than the mouse itself. She thought",
    "Sam did not want to go to bed. He said he had heard something under the window, and it sounded like",
    "The baker's cat could count to three. One evening, when the shop was closed, the cat",
    "On the last day of summer, the children buried a box in the garden. In the box they put",
    "A little cloud had lost its mother. It floated over the hills and asked a bird,",
    "Every night the lighthouse keeper read a story to the fish. One night the fish",
    "Max and his dog Pepper walked to the river. Pepper barked at a big stone, and the stone",
    "The queen had a garden where nothing would grow. She called all the gardeners of the land and said,",
]
EDITS = (
    "Rewrite this passage. Correct its spelling and punctuation and change nothing else.\n\n{}",
    "Summarise this passage in the author's own words, quoting its sentences wherever you can.\n\n{}",
    "Quote this passage word for word.\n\n{}",
)


@dataclass(frozen=True)
class Suite:
    """Prompts and where they are from: the name of a data file, or `built-in`."""

    name: str
    source: str
    prompts: list[str]
    chat: bool  # they are a user's messages

    def encode(self, llm: outrider.LLM) -> list[list[int]]:
        """Token ids: messages through the model's chat template, or as plain text if it has none."""
        if self.chat and getattr(llm.tokenizer, "chat_template", None):
            return [llm.render([{"role": "user", "content": text}]) for text in self.prompts]
        return [llm.encode(text + "\n\nAnswer:\n" * self.chat) for text in self.prompts]


def load_suite(name: str, count: int, data: Path | None = None, file: Path | None = None) -> Suite:
    """`count` prompts, spread evenly over the suite's file in the folder `data`; `file` replaces spec-bench's.

    Raises ConfigError for an unknown suite, a file that is missing or unreadable, and more prompts than there are.
    """
    if name not in SUITES:
        raise ConfigError(f"suite {name!r} is unknown; valid: {', '.join(SUITES)}")
    if data and not data.is_dir():
        raise ConfigError(f"--data {data} is not a folder; pass the one with the data files")
    kind = SUITES[name]
    path = file if file and name == "spec-bench" else data / kind.file if data else None
    if path and path.is_file():
        try:
            source, texts = path.name, kind.read(path)
        except DAMAGED as error:
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError(f"{path} is damaged or not what suite {name} reads ({reason})") from None
    elif name == "stories":
        source, texts = "built-in", OPENINGS
    else:
        missing = f"{path} is not there" if path else "no data folder is given"
        also = ", or the file itself with --file" if name == "spec-bench" else ""
        raise ConfigError(
            f"suite {name} needs {kind.file}, but {missing}; pass its folder with --data or OUTRIDER_DATA{also}"
        )
    if not 1 <= count <= len(texts):
        raise ConfigError(f"suite {name} has {len(texts)} prompts ({source}); prompts must be 1 to that, not {count}")
    chosen = [texts[i * len(texts) // count] for i in range(count)]
    return Suite(name, source, [kind.forms[i % len(kind.forms)].format(t) for i, t in enumerate(chosen)], kind.chat)


def _text(path: Path) -> str:
    data = path.read_bytes()
    unpack = {".gz": gzip.decompress, ".xz": lzma.decompress}.get(path.suffix)
    return (unpack(data) if unpack else data).decode()


def _stories(path: Path) -> list[str]:
    stories = _text(path).split("<|endoftext|>")
    late = stories[len(stories) * 9 // 10 :]  # models are trained on the beginning of such files, if on any of it
    return [opening[0] for story in late if (opening := OPENING.match(story.strip()))]


def _code(path: Path) -> list[str]:
    return [str(json.loads(line)["prompt"]) for line in _text(path).splitlines()]


def _passages(path: Path) -> list[str]:
    from outrider.corpus import archived  # loads torch, and --help lists the suites

    passages = []
    for words in map(str.split, archived(path)):
        starts = [len(words) * i // (PASSAGES_PER_BOOK + 1) for i in range(1, PASSAGES_PER_BOOK + 1)]
        passages += [" ".join(words[at : at + PASSAGE_WORDS]) for at in starts]
    return passages


def _questions(path: Path) -> list[str]:
    return [str(json.loads(line)["turns"][0]) for line in _text(path).splitlines()]


class _Kind(NamedTuple):
    file: str
    read: Callable[[Path], list[str]]
    chat: bool
    forms: tuple[str, ...] = ("{}",)  # taken in turn


SUITES = {
    "stories": _Kind("tinystories.txt.xz", _stories, chat=False),
    "code": _Kind("HumanEval.jsonl.gz", _code, chat=False),
    "edit": _Kind("books_eval.tar.xz", _passages, True, EDITS),
    "spec-bench": _Kind("spec_bench_half.jsonl", _questions, chat=True),
}
