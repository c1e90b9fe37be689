"""Texts to token files, and token files to batches.

`prepare` tokenises each domain once: token ids in one flat uint16 file, and where its documents start.
"""

from __future__ import annotations

import json
import lzma
import re
import sysconfig
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.corpus import archived, fingerprint
from outrider.errors import ConfigError
from outrider.files import make_folder, replacing, write_text
from outrider.load import Progress

SPECIAL = BOS, EOS, PAD, USER, ASSISTANT, END = "<|bos|>", "<|eos|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' or m['role'] == 'system' %}"
    "<|user|>{{ m['content'] }}<|end|>{% else %}<|assistant|>{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NO_CODE = {"site-packages", "test", "tests", "testing", "_testing", "idlelib", "encodings", "pydoc_data"}
PACKAGES = ("numpy", "torch", "sympy", "networkx")  # beside the standard library: what torch brings; all BSD
BENCHMARKS = ("spec_bench_half.jsonl", "gsm8k_test200.jsonl")  # their questions stay out of training
RUN = 13  # words that a benchmark's question and a training pair may not have in common

Ids = NDArray[np.uint16]


@dataclass(frozen=True)
class Text:
    """One document, for training or held out."""

    domain: str
    text: str
    held: bool


def texts(data: Path) -> Iterator[Text]:
    """All documents of the data folder: stories, books, code (of Python and of torch), pairs and maths (as a chat).

    Held out are the last tenth of the stories (benchmarks take theirs from it), the books of `books_eval`, and every
    20th module, pair and question. Raises ConfigError for a folder without the files.
    """
    try:
        stories = _xz(data / "tinystories.txt.xz").split("<|endoftext|>")
        for i, story in enumerate(stories):
            yield Text("stories", story.strip(), i >= len(stories) * 9 // 10)
        for name in ("books_train.tar.xz", "books_eval.tar.xz"):
            for book in archived(data / name):
                yield Text("books", book, name == "books_eval.tar.xz")
        yield from modules()
        known = set[str]().union(*(_runs(text) for name in BENCHMARKS for text in _strings(data / name)))
        for pair in map(json.loads, _xz(data / "t0_sample.jsonl.xz").strip().split("\n")):
            if not known & _runs(pair["prompt"]):
                answer = pair["completion"].replace("<|endoftext|>", "").strip()
                yield Text("pairs", chat(pair["prompt"].strip(), answer), _twentieth(pair["prompt"]))
        for pair in map(json.loads, _xz(data / "gsm8k_train.jsonl.xz").strip().split("\n")):
            if not known & _runs(pair["question"]):
                answer = re.sub(r"<<.*?>>", "", pair["answer"])  # calls of a calculator
                yield Text("maths", chat(pair["question"], answer), _twentieth(pair["question"]))
    except (OSError, EOFError, lzma.LZMAError, tarfile.TarError, ValueError, KeyError) as error:
        raise ConfigError(f"{data} is not the folder with the training texts: {error}") from None


def modules() -> Iterator[Text]:
    """The domain `code`, which needs no folder: Python's own modules, and torch's with those that it brings."""
    packages = Path(sysconfig.get_path("purelib"))
    for root in (Path(sysconfig.get_path("stdlib")), *(packages / name for name in PACKAGES)):
        for path in sorted(root.rglob("*.py")):
            within = path.relative_to(root)
            if not NO_CODE & set(within.parts):
                yield Text("code", path.read_text("utf-8", errors="replace"), _twentieth(within.as_posix()))


def chat(question: str, answer: str) -> str:
    """One exchange as the chat template writes it, without the beginning-of-sequence token."""
    return f"{USER}{question}{END}{ASSISTANT}{answer}{END}"


def _xz(path: Path) -> str:
    return lzma.decompress(path.read_bytes()).decode()


def _twentieth(name: str) -> bool:
    return zlib.crc32(name.encode()) % 20 == 0


def _strings(path: Path) -> Iterator[str]:
    """Every string in a file of JSON lines."""
    for line in path.read_text("utf-8").splitlines():
        yield from re.findall(r'"((?:[^"\\]|\\.)*)"', line)


def _runs(text: str) -> set[str]:
    words = re.findall(r"\w+", text.lower())
    return {" ".join(words[i : i + RUN]) for i in range(len(words) - RUN + 1)}


def train_tokenizer(documents: Iterable[str], size: int = 8192) -> Any:
    """A byte-level BPE with this vocabulary and the chat template, as transformers' fast tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD, chat_template=CHAT_TEMPLATE,
        model_max_length=131072, clean_up_tokenization_spaces=False,
    )  # fmt: skip


@dataclass(frozen=True)
class Tokens:
    """The documents of one domain, one behind the other, and where each starts."""

    ids: Ids
    starts: NDArray[np.int64]

    def window(self, rng: np.random.Generator, length: int) -> Ids:
        """`length` ids from a random place, or from the start of the document there if that is within reach."""
        if len(self.ids) < length:
            raise ConfigError(f"a domain of {len(self.ids)} tokens has no window of {length}; train on shorter ones")
        at = int(rng.integers(len(self.ids) - length + 1))
        start = int(self.starts[np.searchsorted(self.starts, at, "right") - 1])
        at = start if at - start < length else at
        return self.ids[at : at + length]

    def document(self, i: int) -> Ids:
        """The ids of document i."""
        end = self.starts[i + 1] if i + 1 < len(self.starts) else len(self.ids)
        return self.ids[self.starts[i] : end]


Corpus = dict[str, Tokens]


def prepare(folder: Path, data: Path, tokenizer: Any, progress: Progress | None = None) -> None:
    """Tokenise all domains into `folder`, unless they are there. Documents are `bos ... eos`, in random order."""
    mark = folder / "corpus.json"
    made_by = {"tokenizer": fingerprint(tokenizer)}
    if mark.is_file() and json.loads(mark.read_text("utf-8")) == made_by:
        return
    documents: dict[tuple[str, str], list[str]] = {}
    for item in texts(data):
        documents.setdefault((item.domain, "held" if item.held else "train"), []).append(item.text)
    mark.unlink(missing_ok=True)  # what was there is whole no longer
    for done, ((domain, split), found) in enumerate(documents.items()):
        if progress:
            progress("tokenising", done, len(documents))
        order = np.random.default_rng(0).permutation(len(found))
        write_tokens(folder, domain, split, encode(tokenizer, [found[i] for i in order]))
    write_text(mark, json.dumps(made_by))


def encode(tokenizer: Any, documents: list[str]) -> list[list[int]]:
    """Token ids of whole documents, `bos ... eos`."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    encoded = tokenizer.backend_tokenizer.encode_batch_fast(documents, add_special_tokens=False)
    return [[bos, *item.ids, eos] for item in encoded]


def write_tokens(folder: Path, domain: str, split: str, documents: list[list[int]]) -> None:
    """Write one domain's files, that of the ids last: with it the domain is there."""
    make_folder(folder, "corpus")
    starts = np.cumsum([0, *(len(ids) for ids in documents[:-1])])
    ids = np.concatenate([np.array(ids, np.uint16) for ids in documents])
    for name, values in ((f"{domain}.{split}.starts.npy", starts), (f"{domain}.{split}.npy", ids)):
        with replacing(folder / name) as partial, open(partial, "wb") as file:
            np.save(file, values)


def read_corpus(folder: Path, split: str) -> Corpus:
    """The domains in a folder, by name; `split` is train or held. The ids stay on disk."""
    return {
        path.name.split(".")[0]: Tokens(np.load(path, mmap_mode="r"), np.load(path.with_suffix(".starts.npy")))
        for path in sorted(folder.glob(f"*.{split}.npy"))
    }
