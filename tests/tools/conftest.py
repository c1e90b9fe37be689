"""A data folder like the real one, of a few pages, and what `prepare` makes of it."""

from __future__ import annotations

import io
import json
import lzma
import sysconfig
import tarfile

import numpy as np
import pytest

from outrider.find import find
from outrider.load import read_tokenizer
from tools import data

ASKED = "How many lanterns does the keeper of the old tower light when every ship of the harbour is out at sea?"


def sentences(rng, count: int) -> str:
    """English of a kind; a story of two people and what they do."""
    who, does, what = (
        ["Anna", "Ben", "the dog", "a bird"],
        ["found", "lost", "saw", "took"],
        ["a key", "the boat", "tea"],
    )
    made = (f"{rng.choice(who)} {rng.choice(does)} {rng.choice(what)} near {rng.choice(who)}." for _ in range(count))
    return " ".join(made)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """The data folder."""
    root, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)

    def lines(name: str, items: list[dict]) -> None:
        text = "\n".join(map(json.dumps, items)).encode()
        (root / name).write_bytes(lzma.compress(text) if name.endswith("xz") else text)

    stories = "<|endoftext|>".join(f"Story {i}. {sentences(rng, 20)}\n" for i in range(100))
    (root / "tinystories.txt.xz").write_bytes(lzma.compress(stories.encode()))
    for name, count in (("books_train", 3), ("books_eval", 2)):
        with tarfile.open(root / f"{name}.tar.xz", "w:xz") as archive:
            for i in range(count):
                text = f"{name} {i}. {sentences(rng, 400)}".encode()
                member = tarfile.TarInfo(f"{name}/{i}.txt")
                member.size = len(text)
                archive.addfile(member, io.BytesIO(text))
    pair = lambda i: {"prompt": f"Pair {i}: {sentences(rng, 3)}", "completion": f"{sentences(rng, 1)}<|endoftext|>"}  # noqa: E731
    lines("t0_sample.jsonl.xz", [pair(i) for i in range(60)] + [{"prompt": f"Say: {ASKED}", "completion": "two"}])
    sums = [{"question": f"Sum {i}: {i} + 1?", "answer": f"It is <<{i}+1={i + 1}>>{i + 1}."} for i in range(60)]
    lines("gsm8k_train.jsonl.xz", sums)
    lines("gsm8k_test200.jsonl", [{"question": "Another?", "answer": f"It is {i}."} for i in range(9)])
    (root / "wikitext2_valid.txt.xz").write_bytes(lzma.compress(sentences(rng, 200).encode()))
    lines("spec_bench_half.jsonl", [{"turns": [ASKED]}])
    return root


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """Where Python's modules are, as far as the tests go."""
    root = tmp_path_factory.mktemp("library")
    for i in range(40):
        (root / f"m{i}.py").write_text(
            "\n".join(f"def function_{j}(value):\n    return value + {i + j}\n" for j in range(9))
        )
    return root


@pytest.fixture(scope="session")
def tokenizer():
    return read_tokenizer(find("tiny"))


@pytest.fixture(scope="session")
def corpus(folder, library, tokenizer, tmp_path_factory):
    """The folder of tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sysconfig, "get_path", lambda name: str(library))
        data.prepare(made := tmp_path_factory.mktemp("corpus"), folder, tokenizer)
    return made
