"""What is generated: suites of prompts, each chosen evenly and deterministically from one data file.

The files come from a folder that the user names (`--data`); without it a suite takes its few built-in prompts, if it
has any. Messages go through the model's chat template, and their answers end where the model ends them.
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
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import outrider
from outrider.errors import ConfigError, brief

PASSAGE_WORDS, PASSAGES_PER_BOOK = 300, 40
DAMAGED = (OSError, EOFError, lzma.LZMAError, zlib.error, tarfile.TarError, LookupError, TypeError, ValueError,
           RecursionError)  # fmt: skip
MT_BENCH = ("writing", "roleplay", "reasoning", "extraction", "stem", "humanities")  # less its code and maths
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
QUESTIONS = [
    "What causes the seasons on Earth? Explain it to a child of ten.",
    "I have a job interview on Monday. Give me seven tips, each with one sentence that says why.",
    "Write a short travel report about a weekend in Lisbon, with the places one should see.",
    "Compare a bicycle and a car for going to work in a city. What speaks for each?",
    "What is the difference between a virus and a bacterium, and why do antibiotics help against only one of them?",
    "Write an email to my landlord: the heating has not worked for three days.",
    "Tell me a story about a lighthouse keeper who finds a message in a bottle.",
    "How does a bill become a law in the United States? List the steps.",
]
FUNCTIONS = [
    'def is_palindrome(text: str) -> bool:\n    """Whether text reads the same backwards but for case and spaces."""\n',
    'def word_counts(path: str) -> dict[str, int]:\n    """How often each word stands in a text file."""\n',
    'def merge(a: list[int], b: list[int]) -> list[int]:\n    """Merge two sorted lists into one sorted list."""\n',
    'def primes(n: int) -> list[int]:\n    """All primes below n, by the sieve of Eratosthenes."""\n',
    'class Stack:\n    """A stack with push, pop, peek and a length."""\n',
    'def roman(number: int) -> str:\n    """An integer between 1 and 3999 as a Roman numeral."""\n',
]
SUMS = [
    "A baker makes 12 trays of 18 rolls each. He sells 150 rolls in the morning and half of the rest in the "
    "afternoon. How many rolls are left?",
    "A train travels 240 km in 3 hours. How far does it travel in 7 hours at the same speed?",
    "Mia has 3 times as many stamps as Ben. Together they have 96 stamps. How many does each of them have?",
    "A shirt costs 40 dollars. It is first made 25% cheaper and then 10% dearer. What does it cost now?",
    "A tank holds 600 litres. One pipe fills 20 litres a minute, another empties 5 litres a minute. How long "
    "until it is full?",
    "In a class of 30, two fifths play football and a third of the others play chess. How many play neither?",
]
PASSAGES = [  # the beginnings of Alice in Wonderland, A Tale of Two Cities, Walden and The Time Machine
    "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: "
    "once or twice she had peeped into the book her sister was reading, but it had no pictures or conversations "
    "in it, and what is the use of a book, thought Alice, without pictures or conversations? So she was "
    "considering in her own mind, as well as she could, for the hot day made her feel very sleepy and stupid, "
    "whether the pleasure of making a daisy-chain would be worth the trouble of getting up and picking the "
    "daisies, when suddenly a White Rabbit with pink eyes ran close by her.",
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of "
    "foolishness, it was the epoch of belief, it was the epoch of incredulity, it was the season of Light, it was"
    " the season of Darkness, it was the spring of hope, it was the winter of despair, we had everything before "
    "us, we had nothing before us, we were all going direct to Heaven, we were all going direct the other way.",
    "When I wrote the following pages, or rather the bulk of them, I lived alone, in the woods, a mile from any "
    "neighbor, in a house which I had built myself, on the shore of Walden Pond, in Concord, Massachusetts, and "
    "earned my living by the labor of my hands only. I lived there two years and two months. At present I am a "
    "sojourner in civilized life again.",
    "The Time Traveller (for so it will be convenient to speak of him) was expounding a recondite matter to us. "
    "His grey eyes shone and twinkled, and his usually pale face was flushed and animated. The fire burned "
    "brightly, and the soft radiance of the incandescent lights in the lilies of silver caught the bubbles that "
    "flashed and passed in our glasses. Our chairs, being his patents, embraced and caressed us rather than "
    "submitted to be sat upon.",
]
CHARACTERS = [
    "Invent a ranger who lives in a northern forest, for a story.",
    "Invent the captain of a ship that trades in spices, for a story.",
    "Invent a clockmaker who keeps a secret, for a story.",
    "Invent the youngest teacher of a village school, for a story.",
]
WORDS = {"type": "string", "maxLength": 60}
SHEET = {
    "type": "object",
    "properties": {
        "full_name": WORDS,
        "age_in_years": {"type": "integer", "minimum": 1, "maximum": 120},
        "occupation": WORDS,
        "home": {
            "type": "object",
            "properties": {"country": WORDS, "settlement_type": {"enum": ["village", "town", "city", "wilderness"]}},
            "required": ["country", "settlement_type"],
            "additionalProperties": False,
        },
        "strengths_and_weaknesses": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"description": WORDS, "is_strength": {"type": "boolean"}},
                "required": ["description", "is_strength"],
                "additionalProperties": False,
            },
            "minItems": 2,
            "maxItems": 3,
        },
    },
    "required": ["full_name", "age_in_years", "occupation", "home", "strengths_and_weaknesses"],
    "additionalProperties": False,
}
FORM = "{} Answer with a character sheet as JSON: full name, age, occupation, home, strengths and weaknesses."
FUNCTION = "Complete this Python code and show all of it.\n\n```python\n{}```"
SUMMARY = "Summarise this text in two or three sentences.\n\n{}"
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
    structured: dict[str, Any] | None = None  # what the outputs must be

    @property
    def stream(self) -> bool:
        """Whether each request begins as another ends; else so many run together, and the next when all have ended."""
        return self.name == "mixed"

    def answered(self, llm: outrider.LLM) -> bool:
        """Whether these are messages that the model answers, and ends by itself."""
        return self.chat and bool(getattr(llm.tokenizer, "chat_template", None))

    def ends(self, llm: outrider.LLM) -> bool:
        """Whether outputs end by themselves: as answers, or when all is said that must be."""
        return self.structured is not None or self.answered(llm)

    def encode(self, llm: outrider.LLM) -> list[list[int]]:
        """Token ids: messages through the model's chat template, or as plain text if it has none."""
        if self.answered(llm):
            return [llm.render([{"role": "user", "content": text}]) for text in self.prompts]
        return [llm.encode(text + "\n\nAnswer:\n" * self.chat) for text in self.prompts]


def load_suite(name: str, count: int | None, data: Path | None = None, file: Path | None = None) -> Suite:
    """`count` prompts (None: all), spread evenly over the suite's file in the folder `data`; `file` is for spec-bench.

    Raises ConfigError for an unknown suite, a file that is missing or unreadable, and more prompts than there are.
    """
    return _mixed(count, data) if name == "mixed" else _chosen(name, count, *_texts(name, data, file))


def _texts(name: str, data: Path | None, file: Path | None = None) -> tuple[str, list[str]]:
    """Where a suite's texts come from, and all of them. Raises as `load_suite` does."""
    if name not in SUITES:
        raise ConfigError(f"suite {name!r} is unknown; valid: {', '.join((*SUITES, 'mixed'))}")
    if data and not data.is_dir():
        raise ConfigError(f"{data} is not a folder; pass the one with the data files with --data or OUTRIDER_DATA")
    kind = SUITES[name]
    path = file if file and name == "spec-bench" else data / kind.file if data else None
    if path and path.is_file():
        try:
            source, texts = path.name, kind.read(path)
        except DAMAGED as error:
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError(f"{path} is damaged or not what suite {name} reads ({reason})") from None
    elif kind.own and not data:
        source, texts = "built-in", kind.own
    else:
        missing = f"{path} is {'no file' if path.exists() else 'not there'}" if path else "no data folder is given"
        also = ", or the file itself with --file" if name == "spec-bench" else ""
        raise ConfigError(
            f"suite {name} needs {kind.file}, but {missing}; pass its folder with --data or OUTRIDER_DATA{also}"
        )
    if not texts:
        raise ConfigError(f"suite {name}: {source} has no prompts")
    return source, texts


def _chosen(name: str, count: int | None, source: str, texts: list[str]) -> Suite:
    """So many prompts of these texts, spread evenly. Raises ConfigError for more than there are."""
    kind = SUITES[name]
    count = len(texts) if count is None else count
    if not 1 <= count <= len(texts):
        raise ConfigError(f"suite {name} has {len(texts)} prompts ({source}); prompts must be 1 to that, not {count}")
    chosen = [texts[i * len(texts) // count] for i in range(count)]
    prompts = [kind.forms[i % len(kind.forms)].format(text) for i, text in enumerate(chosen)]
    return Suite(name, source, prompts, kind.chat, kind.structured)


def _mixed(count: int | None, data: Path | None) -> Suite:
    """A stream of requests that changes its kind with each: a message of every suite of KINDS, then the first again."""
    turn = len(KINDS) + 1
    read = {name: _texts(name, data) for name in KINDS}
    most = turn * min(len(texts) for _, texts in read.values())
    if count is not None and not 1 <= count <= most:
        raise ConfigError(f"suite mixed has {most} prompts; prompts must be 1 to that, not {count}")
    suites = [_chosen(name, None if count is None else -(-count // turn), *own) for name, own in read.items()]
    turns = zip(*(suite.prompts for suite in suites), strict=False)  # the shortest ends it
    prompts = [prompt for turn in turns for prompt in (*turn, turn[0])][:count]
    return Suite("mixed", "+".join(dict.fromkeys(suite.source for suite in suites)), prompts, chat=True)


def _text(path: Path) -> str:
    data = path.read_bytes()
    unpack = {".gz": gzip.decompress, ".xz": lzma.decompress}.get(path.suffix)
    return (unpack(data) if unpack else data).decode("utf-8-sig")


def _lines(path: Path) -> list[str]:
    return _text(path).splitlines()


def _stories(path: Path) -> list[str]:
    stories = _text(path).split("<|endoftext|>")
    late = stories[len(stories) * 9 // 10 :]  # models are trained on the beginning of such files, if on any of it
    return [opening[0] for story in late if (opening := OPENING.match(story.strip()))]


def _entries(path: Path) -> list[Any]:
    """Of JSON lines, in whose strings others of Unicode's line ends may stand."""
    return [json.loads(line) for line in _text(path).split("\n") if line.strip()]


def _field(path: Path, name: str) -> list[str]:
    return [str(entry[name]) for entry in _entries(path)]


def _passages(path: Path) -> list[str]:
    from outrider.corpus import archived  # loads torch, and --help lists the suites

    passages = []
    for words in map(str.split, archived(path)):
        starts = [len(words) * i // (PASSAGES_PER_BOOK + 1) for i in range(1, PASSAGES_PER_BOOK + 1)]
        passages += [" ".join(words[at : at + PASSAGE_WORDS]) for at in starts]
    return passages


def _questions(path: Path, kinds: tuple[str, ...] = ()) -> list[str]:
    """First turns of Spec-Bench's questions, of some categories or of all."""
    asked = [entry["turns"] for entry in _entries(path) if not kinds or entry["category"] in kinds]
    if bad := [turns for turns in asked if not isinstance(turns, list) or not turns or not isinstance(turns[0], str)]:
        raise ValueError(f"`turns` must be a list of texts, not {brief(bad[0])}")
    return [turns[0] for turns in asked]


KINDS = ("chat", "code", "edit", "summarise")  # of `mixed`


class _Kind(NamedTuple):
    file: str
    read: Callable[[Path], list[str]]
    chat: bool
    forms: tuple[str, ...] = ("{}",)  # taken in turn
    own: list[str] | None = None  # built-in prompts
    structured: dict[str, Any] | None = None


SUITES = {
    "chat": _Kind("spec_bench_half.jsonl", partial(_questions, kinds=MT_BENCH), True, own=QUESTIONS),
    "code": _Kind("HumanEval.jsonl.gz", partial(_field, name="prompt"), True, (FUNCTION,), FUNCTIONS),
    "maths": _Kind("gsm8k_test200.jsonl", partial(_field, name="question"), True, own=SUMS),
    "summarise": _Kind(
        "spec_bench_half.jsonl", partial(_questions, kinds=("summarization",)), True,
        own=[SUMMARY.format(text) for text in PASSAGES],
    ),
    "edit": _Kind("books_eval.tar.xz", _passages, True, EDITS, PASSAGES),
    "json": _Kind("characters.txt", _lines, True, (FORM,), CHARACTERS, {"json": SHEET, "disable_any_whitespace": True}),
    "spec-bench": _Kind("spec_bench_half.jsonl", _questions, True),
    "stories": _Kind("tinystories.txt.xz", _stories, False, own=OPENINGS),
    "functions": _Kind("HumanEval.jsonl.gz", partial(_field, name="prompt"), False, own=FUNCTIONS),
}  # fmt: skip
