"""Weights of few bits whose errors make up for each other (GPTQ, Frantar et al. 2210.17323).

Of a linear's inputs on some text it is enough to know H, the sum of x x^T: a row of weights that is off by e gives
outputs that are off by e H e^T in all, squared. Inputs are rounded one after the other, the largest first, and the
weights of those that are still free take over what can be made good of the error: with H^-1 = U^T U, U upper
triangular, they become w[j+1:] - (w[j] - q[j]) / U[j, j] * U[j, j+1:]. Layers go one by one, and each linear sees its
inputs as those rounded before it make them.

The text is what the model says itself, or the user's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider import corpus, quantize
from outrider.errors import CheckpointError, ConfigError
from outrider.kv import DenseKV, Entry, Plan
from outrider.llm import LLM
from outrider.load import Builder, Progress, Source
from outrider.model import Model
from outrider.ops import Linear
from outrider.quantize import Rounded
from outrider.train.conversations import HINTS, Template

logger = logging.getLogger(__name__)
LENGTH = 512  # tokens of a text, at most
TOKENS = 16384  # of all texts
LEAST, MOST = 1024, 2**20  # of a user's texts, of which more are not read
BATCH, ROUNDS = 64, 16  # texts that the model writes at a time, and how often at most
FEW = 32  # rows with which nothing is compensated: those of an expert that is hardly ever chosen
DAMPING = 0.1  # added to H's diagonal, of its mean: what a text says of inputs is not what the next one says
COLUMNS = 128  # inputs after which the rest is brought up to date
ROWS = 4096  # multiplied at a time
CPU = torch.device("cpu")


def factor(h: Tensor) -> Tensor:
    """U (in, in) float32, upper triangular, with U^T U = (h + damping)^-1, for h (in, in). Inputs that are never there
    have a diagonal of zero in h and get one."""
    h = h.double()
    diagonal = h.diagonal()
    diagonal[diagonal == 0] = 1
    diagonal += DAMPING * diagonal.mean()
    upper = torch.linalg.cholesky(h.flip(0, 1)).flip(0, 1)  # h = upper upper^T
    u: Tensor = torch.linalg.solve_triangular(upper, torch.eye(len(h), dtype=h.dtype), upper=True)
    return u.float()


def compensated(
    weight: Tensor, h: Tensor, bits: int, group: int, symmetric: bool, dtype: torch.dtype
) -> quantize.Rounded:
    """Weights (out, in) rounded for inputs whose sum of squares is h (in, in).

    As `quantize.rounded`, but a weight counts by its input in the search for its group's range. The largest inputs have
    the first turns, while most others are free to make up for them; groups stay those of neighbours.
    """
    turns = h.diagonal().argsort(descending=True, stable=True)
    u, half = factor(h[turns][:, turns]), 2 ** (bits - 1)
    w = weight.float().T.contiguous()  # (in, out): an input's weights lie together
    inputs, outputs = w.shape
    importance = torch.empty(inputs, dtype=torch.float32)  # of an input's error, those before it being settled
    importance[turns] = u.diagonal().square().reciprocal()
    parts = [slice(at, at + group) for at in range(0, inputs, group)]
    found = [quantize.ranges(w[own].T, bits, symmetric, dtype, importance[own]) for own in parts]
    scales, zeros = (torch.stack(own) for own in zip(*found, strict=True))
    w, values = w[turns], torch.empty(inputs, outputs, dtype=torch.int8)
    places = turns.tolist()
    for first in range(0, inputs, COLUMNS):
        last = min(first + COLUMNS, inputs)
        errors = torch.empty(last - first, outputs, dtype=torch.float32)
        for j in range(first, last):
            scale, zero = scales[places[j] // group], zeros[places[j] // group]
            q = (w[j] / scale).round_().add_(zero).clamp_(-half, half - 1)
            values[places[j]] = q.char()
            errors[j - first] = (w[j] - (q - zero) * scale) / u[j, j]
            w[j + 1 : last].addr_(u[j, j + 1 : last], errors[j - first], alpha=-1)
        w[last:].addmm_(u[first:last, last:].T, errors, alpha=-1)
    zeros = zeros.char().T.contiguous()
    return quantize.Rounded(values.T.contiguous(), scales.to(dtype).T.contiguous(), None if symmetric else zeros)


class _Rounding(Linear):
    """A linear that is rounded for the first rows that it multiplies, and multiplies by what it has become."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, gated: bool, how: tuple[int, int, bool, torch.dtype]
    ) -> None:
        super().__init__(weight, bias, pack=False, gated=gated)
        bits, group, symmetric, dtype = how
        self.how = bits, weight.shape[1] if group == -1 else group, symmetric, dtype
        self.found: Rounded | None = None
        self.seen = 0  # rows

    def round(self, h: Tensor | None = None) -> Rounded:
        """What the weights become, for inputs whose sum of squares is h (in, in), if there were any."""
        if self.found is None:
            self.found = (
                quantize.rounded(self.weight, *self.how) if h is None else compensated(self.weight, h, *self.how)
            )
            self.weight = self.found.dense()
        return self.found

    def __call__(
        self,
        x: Tensor,
        norm: Tensor | None = None,
        eps: float = 0.0,
        residual: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        parts = [slice(at, at + ROWS) for at in range(0, len(x), ROWS)]
        if self.found is None:
            h = torch.zeros(self.in_features, self.in_features, dtype=torch.float32)
            for part in parts:
                own = x[part] if norm is None else F.rms_norm(x[part], norm.shape, norm, eps)
                h.addmm_(own.T, own)
            if not h.isfinite().all():
                raise CheckpointError("on the calibration text this model computes NaN or infinite numbers")
            self.seen = len(x)
            self.round(h if self.seen > FEW else None)
        product = super().__call__
        return torch.cat([product(x[own], norm, eps, None if residual is None else residual[own]) for own in parts])


class _Builder(Builder):
    """Layers in float32 whose linears round themselves."""

    def __init__(self, source: Source, bits: int, group: int, symmetric: bool, dtype: torch.dtype) -> None:
        super().__init__(source.config, source.weights, torch.float32, CPU)
        self.how = bits, group, symmetric, dtype
        self.made: list[tuple[dict[str, int], Tensor | None, _Rounding]] = []

    def linear(
        self,
        prefix: str,
        parts: dict[str, int],
        inputs: int,
        bias: bool,
        gated: bool = False,
        scheme: str | None = "",
        orders: Callable[[], Tensor | None] | None = None,
        rows: list[range] | None = None,
        columns: range | None = None,
    ) -> Linear:
        names = {f"{prefix}{name}.weight": n for name, n in parts.items()}
        weight = torch.cat([self.tensor(name, n, inputs) for name, n in names.items()])
        added = torch.cat([self.tensor(f"{prefix}{name}.bias", n) for name, n in parts.items()]) if bias else None
        if scheme is None:  # a router
            return Linear(weight, added, pack=False, gated=gated)
        if (order := orders() if orders else None) is not None:
            weight, added = weight[order], None if added is None else added[order]
        self.made.append((names, order, _Rounding(weight, added, gated, self.how)))
        return self.made[-1][2]

    def take(self) -> tuple[dict[str, Rounded], int]:
        """The weights of the layer last made by their names, and how many linears saw too little."""
        found, few = dict[str, Rounded](), 0
        for names, order, linear in self.made:
            own, few, at = linear.round(), few + (linear.seen <= FEW), 0
            for name, n in names.items():
                rows = torch.arange(at, at + n) if order is None else order.argsort()[at : at + n]
                zeros = None if own.zeros is None else own.zeros[rows]
                found[name] = Rounded(own.values[rows], own.scales[rows], zeros)
                at += n
        self.made = []
        return found, few


def layers(
    source: Source,
    texts: list[list[int]],
    bits: int,
    group: int,
    symmetric: bool,
    dtype: torch.dtype,
    progress: Progress | None = None,
) -> Iterator[dict[str, Rounded]]:
    """Layer by layer its linears' weights, by their names in the checkpoint, in groups that divide their inputs (-1:
    all of them), scales in dtype, rounded for the inputs that these texts (token ids) give them.

    What saw at most FEW rows is rounded to nearest. Raises CheckpointError for a model that computes NaN.
    """
    c, builder = source.config, _Builder(source, bits, group, symmetric, dtype)
    ids = torch.tensor([token for text in texts for token in text])
    table = source.weights.mapped("model.embed_tokens.weight", c.vocab_size, c.hidden_size)
    x = table[ids].float() * c.embedding_multiplier
    positions = [at for text in texts for at in range(len(text))]
    lengths = [len(text) for text in texts for _ in text]
    starts = [0, *torch.tensor([len(text) for text in texts]).cumsum(0).tolist()]
    entries = [Entry(i, starts[i], len(text), 0) for i, text in enumerate(texts)]
    zeros = torch.zeros(1, c.hidden_size, dtype=torch.float32)
    nothing = Linear(zeros, pack=False)  # the head, of which nobody asks anything
    plain = replace(c, embedding_multiplier=1.0)
    few = 0
    for i in range(c.num_layers):
        if progress:
            progress("rounding layers", i, c.num_layers)
        with torch.no_grad():
            held: list[Any] = [None] * c.num_layers
            held[i] = builder.layer(i)
            rows = partial(torch.index_select, x, 0)  # the states so far are this layer's embedding
            whole = Model(
                plain, rows, held, torch.ones(c.hidden_size, dtype=torch.float32), nothing, torch.float32, CPU
            )
            model, states = whole.thin([i]), {1: x}
            kv, plan = DenseKV(model.config, torch.float32, CPU), Plan(entries)
            kv.reserve(plan)
            model.forward(list(range(len(x))), positions, lengths, kv, plan, states)
            x = states[1]
            found, more = builder.take()
        few += more
        yield found
    if few:
        logger.warning(
            "%s: %d linears of experts saw %d rows or fewer of the calibration text, and are rounded to nearest",
            source.path.name, few, FEW,
        )  # fmt: skip


def said(name: str | Path, progress: Progress | None = None) -> list[list[int]]:
    """Texts (token ids) of TOKENS tokens in all that a model writes: turns of users and its answers, where it has a
    chat template for them, else whatever follows the token that begins a text.

    The same each time. Raises what LLM does.
    """
    llm = LLM(name, device="cpu", max_num_seqs=BATCH, progress=progress)
    length, texts, total = min(LENGTH, llm.engine.max_len // 2), list[list[int]](), 0

    def more(prompts: list[list[int]], seed: int, most: int, n: int = 1) -> list[tuple[list[int], bool]]:
        outputs = llm.generate(prompts, temperature=1.0, seed=seed, max_tokens=most, n=n) if prompts else []
        return [(o.prompt_token_ids + o.token_ids, o.finish_reason == "stop") for o in outputs]

    try:
        template: Template | None = Template(llm.tokenizer)
    except ConfigError:  # a base model, or one for other conversations
        template = None
    for seed in range(0, ROUNDS * BATCH, BATCH):
        if progress:
            progress("writing calibration text", min(total, TOKENS), TOKENS)
        if template is None:
            begin = getattr(llm.tokenizer, "bos_token_id", None)
            ends = llm.runner.model.config.eos
            new = [text for text, _ in more([[ends[0] if begin is None and ends else begin or 0]], seed, length, BATCH)]
        else:
            turns = more([template.ids(template.before + hint) for hint in HINTS], seed, length // 4, BATCH // 16)
            asked = [text[:-1] + template.ids(template.answer) for text, ended in turns if ended]
            new = [text for text, ended in turns if not ended] + [text for text, _ in more(asked, seed, length)]
        texts += [text[:length] for text in new]
        total = sum(map(len, texts))
        if total >= TOKENS:
            return _even(texts)
    raise ConfigError(f"{name} writes {total} tokens where {TOKENS} would calibrate it; give texts to calibrate it by")


def read(paths: list[str | Path], source: Source) -> list[list[int]]:
    """Texts (token ids) of about TOKENS tokens in all, of files that `corpus` reads. Raises ConfigError."""
    if (tokenizer := source.tokenizer()) is None:
        raise ConfigError("this model has no tokenizer, and calibration texts are read by it")
    start, found, total = tokenizer.bos_token_id, list[list[int]](), 0
    begin = [] if start is None else [start]
    for text in corpus.texts(corpus.files(paths)):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = ids[1:] if ids[:1] == begin else ids
        size = LENGTH - len(begin)
        found += [begin + ids[at : at + size] for at in range(0, len(ids), size)]
        total += len(ids)
        if total > MOST:
            break
    if total < LEAST:
        raise ConfigError(f"the calibration texts have {total} tokens; give at least {LEAST}, {TOKENS} are better")
    return _even(found)


def _even(texts: list[list[int]]) -> list[list[int]]:
    """Some of the texts, spread over all of them, of about TOKENS tokens."""
    share = min(1.0, TOKENS / sum(map(len, texts)))
    return [text for i, text in enumerate(texts) if int((i + 1) * share) > int(i * share)]
