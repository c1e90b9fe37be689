"""Perplexity on held-out text of weights and activations as they may be rounded: the table of docs/kernels.md.

All candidates read the same windows of text, so that what is compared is pairs: the ratio's error is that of the mean
difference of a window's loss.
"""

from __future__ import annotations

import json
import lzma
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.bench.report import markdown_row, markdown_table
from outrider.config import SCHEMES
from outrider.corpus import archived
from outrider.errors import ConfigError
from outrider.llm import LLM
from outrider.load import Progress
from tools import data as corpora
from tools.evaluate import Reader

KINDS = (
    ("bfloat16", None, None), ("bfloat16", None, "int8"),
    *(("bfloat16", scheme, activations) for scheme in SCHEMES for activations in (None, "int8")),
)  # fmt: skip
"""dtype, quantization and activations of a model's candidates, of which the first has its weights as stored."""


@dataclass(frozen=True)
class Line:
    """Nats per token by domain (windows, ...) of one candidate."""

    name: str
    losses: dict[str, Tensor]


def windows(tokenizer: Any, data: Path, count: int, length: int) -> dict[str, list[list[int]]]:
    """For each domain `count` pieces of `length` tokens, the first of them `bos` where the tokenizer has one.

    Wikipedia, the held-out books and modules of `tools.data`, and answers within the model's own chat template, if it
    has one. Raises ConfigError for a folder without the texts.
    """
    found: dict[str, list[list[int]]] = {}
    rng = np.random.default_rng(0)
    for domain, documents in _documents(tokenizer, data).items():
        order = rng.permutation(len(documents))
        start = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None and domain != "chat" else []
        ids: list[int] = []
        pieces: list[list[int]] = []
        enough = length * (64 if domain == "code" else 16 * count)  # characters of one of them
        for i in order:
            ids += tokenizer(documents[i][:enough], add_special_tokens=False)["input_ids"]
            most = 1 if domain == "code" else len(ids)  # of one module
            while len(ids) >= length and len(pieces) < count and most:
                pieces.append([*start, *ids[: length - len(start)]])
                ids, most = ids[length:], most - 1
            ids = [] if domain == "code" else ids
        if len(pieces) < count:
            raise ConfigError(
                f"{domain}: {len(pieces)} pieces of {length} tokens, not {count}; ask for fewer or shorter ones"
            )
        found[domain] = pieces
    return found


def _documents(tokenizer: Any, data: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    try:
        wikipedia = lzma.decompress((data / "wikitext2_valid.txt.xz").read_bytes()).decode()
        found["encyclopedia"] = [wikipedia]
        found["books"] = [book[len(book) // 2 :] for book in archived(data / "books_eval.tar.xz")]
        pairs = [json.loads(line) for line in (data / "gsm8k_test200.jsonl").read_text("utf-8").splitlines()]
    except (OSError, ValueError, lzma.LZMAError) as error:
        raise ConfigError(f"{data} is not the folder with the held-out texts: {error}") from None
    found["code"] = [module.text for module in corpora.modules() if module.held]
    if tokenizer.chat_template:
        talks = [[("user", p["question"]), ("assistant", p["answer"])] for p in pairs]
        found["chat"] = [
            tokenizer.apply_chat_template([{"role": r, "content": c} for r, c in talk], tokenize=False)
            for talk in talks
        ]
    return found


def measure(models: list[str], data: Path, count: int, length: int, progress: Progress) -> Iterator[Line]:
    """A line for each candidate that a model has, or for each of several models as they are stored.

    These have one tokenizer, the first one's.
    """
    texts: dict[str, list[list[int]]] = {}
    several = len(models) > 1
    candidates = [(model, *kind) for model in models for kind in (KINDS[:1] if several else KINDS)]
    for i, (model, dtype, scheme, activations) in enumerate(candidates):
        name = f"{scheme or 'as stored'}, {activations or dtype}"
        name = Path(model).name if several else name
        progress(name, i, len(candidates))
        try:
            llm = LLM(model, dtype=dtype, quantization=scheme, activations=activations, device="cpu")
        except ConfigError:
            if activations is None or scheme is not None:
                raise
            continue  # a checkpoint without integers has none to multiply with
        texts = texts or windows(llm.tokenizer, data, count, length)
        reader = Reader(llm)
        losses = {domain: torch.stack([reader.losses(ids).mean() for ids in some]) for domain, some in texts.items()}
        yield Line(name, losses)
        del llm, reader
    progress("done", len(candidates), len(candidates))


def markdown(lines: Iterable[Line]) -> Iterator[str]:
    """Perplexity by domain, and all in all how much more it is than the first line's, in percent with its error.

    Rows of a table, as the lines come.
    """
    first = None
    for line in lines:
        if first is None:
            first = line
            yield markdown_table(["weights, activations", *first.losses, "perplexity"], [])
        more = torch.cat([line.losses[d] - first.losses[d] for d in first.losses]).double()
        error = float(more.std() / math.sqrt(len(more)))
        change = f"{100 * math.expm1(float(more.mean())):+.2f} ± {100 * error:.2f} %" if line is not first else ""
        each = (f"{math.exp(float(x.mean())):.3f}" for x in line.losses.values())
        yield markdown_row([line.name, *each, change])
