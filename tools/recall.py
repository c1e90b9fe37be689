"""Tasks that only a model which looks back can do: quote, correct, look up, repeat.

Language alone teaches a small model to guess from the last few words. Here the answer stands in the context, word for
word, `distance` tokens above, and nothing else helps.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tools.data import ASSISTANT, END, USER, Corpus

Rng = np.random.Generator
Pieces = list[tuple[str, bool]]  # text, and whether it is an answer

QUOTE = (
    "Quote this passage word for word.", "Repeat the following text exactly.", "Copy this text.",
    "Write this passage again without changing anything.", "Say this back to me, word for word.",
)  # fmt: skip
CORRECT = (
    "Rewrite this passage. Correct its spelling and punctuation and change nothing else.", "Correct the typing errors.",
    "Fix the spelling mistakes in this text.", "There are typing errors here. Write the text without them.",
)  # fmt: skip
SUMMARISE = (
    "Summarise this passage in the author's own words, quoting its sentences wherever you can.",
    "Shorten this text. Keep some of its sentences as they are.",
    "Give a summary that consists of sentences of this text.",
)  # fmt: skip
THINGS = ["code", "number", "name", "colour", "age", "price", "size", "weight", "key", "password", "place", "date"]
SHARES: dict[str, float] = {  # of examples: the answers of some are a few words, and teach little each
    "quote": 1, "correct": 1, "summarise": 1, "rename": 1, "sentence": 2, "lookup": 8, "repeat": 1, "noise": 1,
}  # fmt: skip


class Recall:
    """Makes examples of each task from a corpus' texts."""

    def __init__(
        self, corpus: Corpus, tokenizer: Any, domains: tuple[str, ...] = ("books", "stories", "pairs")
    ) -> None:
        self.corpus, self.tokenizer = corpus, tokenizer
        self.domains = [name for name in domains if name in corpus]
        self.tasks: dict[str, Callable[[Rng, int], Pieces]] = {
            "quote": self.quote, "correct": self.correct, "summarise": self.summarise, "rename": self.rename,
            "sentence": self.sentence, "lookup": self.lookup, "repeat": self.repeat, "noise": self.noise,
        }  # fmt: skip

    def example(self, rng: Rng, task: str, distance: int) -> tuple[list[int], list[bool]]:
        """Token ids, and which of them are answers. The answers stand about `distance` tokens above."""
        ids, answers = [self.tokenizer.bos_token_id], [False]
        for text, answer in self.tasks[task](rng, distance):
            piece = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
            ids += piece
            answers += [answer] * len(piece)
        return ids, answers

    def words(self, rng: Rng, tokens: int) -> list[str]:
        """The words of a passage of about this many tokens."""
        if tokens <= 0:
            return []
        source = self.corpus[self.domains[int(rng.integers(len(self.domains)))]]
        ids = source.window(rng, min(tokens, len(source.ids) - 2) + 2)
        return re.sub(r"<\|\w+\|>", " ", self.tokenizer.decode(ids.tolist())).split()[1:-1]

    def passage(self, rng: Rng, tokens: int) -> str:
        """Prose of about this many tokens, on one line."""
        return " ".join(self.words(rng, tokens))

    def word(self, rng: Rng) -> str:
        """A word of the corpus; of small letters, and not a short one."""
        while True:
            found = [word for word in self.words(rng, 40) if re.fullmatch("[a-z]{4,}", word)]
            if found:
                return found[int(rng.integers(len(found)))]

    def quote(self, rng: Rng, distance: int) -> Pieces:
        """Write a passage again that is as long as the distance."""
        text = self.passage(rng, distance)
        return [(_ask(rng, QUOTE, text), False), (text + END, True)]

    def correct(self, rng: Rng, distance: int) -> Pieces:
        """Write a passage without the typing errors it has."""
        words = self.words(rng, distance)
        rate = float(rng.choice([0.0, 0.05, 0.15]))
        damaged = " ".join(_damage(rng, word) if rng.random() < rate else word for word in words)
        return [(_ask(rng, CORRECT, damaged), False), (" ".join(words) + END, True)]

    def summarise(self, rng: Rng, distance: int) -> Pieces:
        """Quote the first sentence and some of the others."""
        text = self.passage(rng, distance)
        sentences = re.split(r"(?<=[.!?]) ", text)
        kept = [s for i, s in enumerate(sentences) if i == 0 or rng.random() < 0.4]
        return [(_ask(rng, SUMMARISE, text), False), (" ".join(kept) + END, True)]

    def rename(self, rng: Rng, distance: int) -> Pieces:
        """Write code again with another name for one of its variables."""
        if "code" not in self.corpus:
            return self.correct(rng, distance)
        ids = self.corpus["code"].window(rng, max(distance, 32))
        code = "\n".join(self.tokenizer.decode(ids.tolist(), skip_special_tokens=True).split("\n")[1:-1])
        names = re.findall(r"\b[a-z_]{3,}\b", code)
        if not names:
            return self.correct(rng, distance)
        old, new = names[int(rng.integers(len(names)))], self.word(rng)
        answer = re.sub(rf"\b{old}\b", new, code)
        return [(_ask(rng, (f"Rename `{old}` to `{new}` in this code.",), code), False), (answer + END, True)]

    def sentence(self, rng: Rng, distance: int) -> Pieces:
        """Complete a sentence from far above, given its first words."""
        text, filler = self.passage(rng, 100), self.passage(rng, distance - 100)
        sentences = [s for s in re.split(r"(?<=[.!?]) ", text)[:-1] if len(s.split()) > 6] or [text]
        wanted = sentences[int(rng.integers(len(sentences)))]
        start = " ".join(wanted.split()[:4])
        question = f'Quote the sentence that begins with "{start}".'
        return [(f"{USER}{text} {filler}\n\n{question}{END}{ASSISTANT}", False), (wanted + END, True)]

    def lookup(self, rng: Rng, distance: int) -> Pieces:
        """Say what was said about several things: numbers and words that nobody can guess."""
        facts: dict[str, str] = {}
        for _ in range(int(rng.integers(2, 7))):
            key = f"{THINGS[int(rng.integers(len(THINGS)))]} of the {self.word(rng)}"
            value = str(rng.integers(10**3, 10**6)) if rng.random() < 0.5 else f"{self.word(rng)} {self.word(rng)}"
            facts[key] = value
        told = " ".join(f"The {key} is {value}." for key, value in facts.items())
        pieces: Pieces = [(f"{USER}{told} {self.passage(rng, distance - 60)}", False)]
        for i, key in enumerate(rng.permutation(list(facts))[:4]):
            lead = "\n\n" if i == 0 else USER
            pieces += [(f"{lead}What is the {key}?{END}{ASSISTANT}", False), (facts[key] + END, True)]
        return pieces

    def repeat(self, rng: Rng, distance: int) -> Pieces:
        """A passage that comes again, without any question; its first words are the cue."""
        words, filler = self.words(rng, min(distance, 128)), self.passage(rng, distance - 128)
        cue = min(6, len(words) // 2)
        text = f"{' '.join(words)} {filler} {' '.join(words[:cue])}"
        return [(text, False), (f" {' '.join(words[cue:])}", True)]

    def noise(self, rng: Rng, distance: int) -> Pieces:
        """Words in no order, twice."""
        words = self.words(rng, min(distance, 400))
        rng.shuffle(words)
        return [(" ".join(words), False), (f" {words[0]}" if words else "", False), (f" {' '.join(words[1:])}", True)]


def _ask(rng: Rng, instructions: tuple[str, ...], text: str) -> str:
    """A user's message with one of these instructions before the text, or after it, and the assistant's turn."""
    ask = instructions[int(rng.integers(len(instructions)))]
    first, second = (ask, text) if rng.random() < 0.8 else (text, ask)
    return f"{USER}{first}\n\n{second}{END}{ASSISTANT}"


def _damage(rng: Rng, word: str) -> str:
    """A word as a hurried hand types it."""
    i = int(rng.integers(len(word)))
    kinds = (
        word[:i] + word[i + 1 :],
        word[:i] + word[i] + word[i:],
        word[:i] + word[i + 1 : i + 2] + word[i] + word[i + 2 :],
        re.sub(r"\W", "", word),
        word.lower(),
    )
    return kinds[int(rng.integers(len(kinds)))]
