"""What plain decoding and each method would give on a machine: a roofline times an acceptance.

A forward of b sequences with r rows each behind c tokens takes the longer of two times for its weights (their bytes, or
two operations a weight and row) and for its keys (their bytes, or four operations a query's number and key), and a
fixed time a layer for starting it. A step drafts k tokens, verifies k + 1 rows, and emits
1 + a + a^2 + ... + a^k tokens, a being the chance that a drafted token is right (Leviathan et al., 2211.17192; with the
keys, MagicDec, 2408.11049). Nothing is loaded: the model's config is enough.

The machine is measured here or one of `DEVICES`, by its makers' figures times what kernels reach of them. Where the
model's weights are at hand, its forwards are measured instead (`Timed`, bench/forwards.py). Acceptance is from
`ACCEPTANCE`: where it was measured it says on what; else it is assumed, and says so. Or it is from lines of
`outrider bench` (`seen_in`).
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from outrider.config import HEAD, STORED, ModelConfig, real, whole
from outrider.costs import Curve
from outrider.errors import ConfigError, brief, reason_of


@dataclass(frozen=True)
class Device:
    """Bytes and operations a second as reached, bytes of memory, and seconds that a layer takes to start, and a row."""

    bandwidth: float
    arithmetic: float  # in bfloat16
    memory: float
    start: float = 0.0
    row: float = 0.0
    decoded: float = math.inf  # weights of few bits a second


def _made(bandwidth: float, arithmetic: float, memory: float, start: float, decoded: float = math.inf) -> Device:
    """From GB/s, TFLOP/s and GB on paper: 80 % of the bandwidth, and 60 % of the arithmetic; 10^12 weights a second."""
    return Device(0.8e9 * bandwidth, 0.6e12 * arithmetic, 1e9 * memory, start, decoded=1e12 * decoded)


GPU, CPU = 8e-6, 4e-6  # seconds a layer
DEVICES = {  # GB/s, dense bfloat16 TFLOP/s and GB as published; CPUs: one socket, their vector or matrix units
    # weights decoded: from an H200 (bench/results/gpu-h200-late); of others by their processors and clocks beside it
    "b200": _made(8000, 2250, 180, GPU, 3.3), "h200": _made(4800, 989, 141, GPU, 2.9),
    "h100": _made(3350, 989, 80, GPU, 2.9), "a100": _made(2039, 312, 80, GPU, 1.7),
    "a100-40gb": _made(1555, 312, 40, GPU, 1.7), "l40s": _made(864, 362, 48, GPU, 4.0),
    "l40": _made(864, 181, 48, GPU, 4.0), "l4": _made(300, 121, 24, GPU, 1.3), "a10": _made(600, 125, 24, GPU, 1.3),
    "rtx5090": _made(1792, 210, 32, GPU, 4.6), "rtx4090": _made(1008, 165, 24, GPU, 3.6),
    "rtx3090": _made(936, 71, 24, GPU, 1.6),
    "mi300x": _made(5300, 1307, 192, GPU), "epyc-9654": _made(460, 14, 768, CPU), "epyc-9755": _made(614, 25, 768, CPU),
    "xeon-8480": _made(307, 115, 512, CPU), "xeon-6980p": _made(844, 260, 768, CPU),
    "ryzen-7950x": _made(83, 4.6, 64, CPU), "ryzen-9950x": _made(89, 9, 64, CPU),
}  # fmt: skip
SUITES = ("chat", "code", "maths", "summarise", "edit", "stories")


class Rate(NamedTuple):
    """The chance that a drafted token is right, where that is from (`assumed` if from nowhere), and in which share of
    the steps anything is drafted at all."""

    chance: float
    source: str
    found: float = 1.0

    def tokens(self, k: int) -> float:
        """That a step emits on average with drafts of k."""
        return 1 + self.found * (expected(self.chance, k) - 1)


def _measured(source: str, **suites: float | tuple[float, float]) -> dict[str, Rate]:
    pairs = {suite: rate if isinstance(rate, tuple) else (rate, 1.0) for suite, rate in suites.items()}
    return {suite: Rate(chance, source, found) for suite, (chance, found) in pairs.items()}


ACCEPTANCE: dict[str, dict[str, Rate]] = {  # of chains; look-ups: and how many steps found any
    "ngram": _measured(
        "smollm2, k=8", chat=(0.82, 0.27), code=(0.77, 0.31), maths=(0.69, 0.34), summarise=(0.71, 0.41),
        edit=(0.87, 0.42),
    ) | _measured("tiny-1.5b, k=8", stories=0.18),
    "suffix": _measured(
        "smollm2, k=8", chat=(0.60, 0.72), code=(0.61, 0.86), maths=(0.52, 0.91), summarise=(0.53, 0.88),
        edit=(0.72, 0.86),
    ) | _measured("tiny-1.5b, k=16", stories=0.31),
    "draft_model": _measured("tiny-1.5b with tiny-draft, k=8", code=0.79, edit=0.25, stories=0.75),
    "self:weights=int4": _measured("smollm2, 5 ahead", chat=0.85, code=0.93, edit=0.93, summarise=0.70),
    "self:weights=int8": {}, "self:view=streaming:budget=512": {}, "medusa": _measured(
        "tiny-1.5b, tree of 5", code=0.26, edit=0.16, stories=0.45
    ), "recurrent": _measured("smollm2, tree of 6", chat=0.43, code=0.42, maths=0.52),
    "eagle3": _measured("smollm2, tree of 6", chat=0.42, code=0.45, maths=0.54),
}  # fmt: skip
ASSUMED = {
    "ngram": 0.3, "suffix": 0.35, "draft_model": 0.7, "self:weights=int4": 0.85, "self:weights=int8": 0.95,
    "self:view=streaming:budget=512": 0.8, "medusa": 0.4, "recurrent": 0.4, "eagle3": 0.7,
}  # fmt: skip
NEVER = Rate(0.0, "a step whose tokens are all wrong")
LONGEST = 16  # tokens ahead
WINDOW = 512  # keys that `self` sees through its view
WORDS = 8192  # of a draft vocabulary
SMALLER = 0.1  # of the target, a draft model that is not named


def acceptance(method: str, suite: str) -> Rate:
    """What is known of a method on a suite. Raises ConfigError for one of which nothing is."""
    if method not in ACCEPTANCE:
        raise ConfigError(f"method {brief(method)} has no plan; valid: {', '.join(ACCEPTANCE)}")
    return ACCEPTANCE[method].get(suite) or Rate(ASSUMED[method], "assumed")


@dataclass(frozen=True)
class Shape:
    """A model's sizes. `weights` are those that every forward multiplies by, `bits` what one of them takes.

    `expert` are those of one of `experts` in all layers, of which each row takes `chosen`. `windows`: how many keys
    each layer sees at most, None for all. `itemsize`: bytes of a number of keys and values, and of the `embedding`,
    which counts the numbers of one that is not the head: it takes memory, and a forward reads a row of it.
    """

    weights: float
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab: int
    bits: float = 16.0
    expert: int = 0
    experts: int = 0
    chosen: int = 0
    windows: tuple[int | None, ...] = (None,)
    itemsize: int = 2
    embedding: int = 0

    @staticmethod
    def of(config: ModelConfig, held: int = 0) -> Shape:
        """From a config; `held`: bytes that all weights take, if that is known, or else by its dtype."""
        c = config
        attention = c.hidden_size * c.head_dim * 2 * (c.num_heads + c.num_kv_heads)
        m, sizes = c.mixture, (c.num_layers, c.num_heads, c.num_kv_heads, c.head_dim, c.hidden_size, c.vocab_size)
        sparse = len(m.layers) if m else 0
        wide = (c.num_layers - sparse) * c.intermediate_size + (sparse * m.shared if m else 0)
        weights = c.num_layers * attention + 3 * c.hidden_size * wide + c.hidden_size * c.vocab_size
        experts = (3 * c.hidden_size * m.width * sparse, m.count, m.chosen) if m else (0, 0, 0)
        embedding = 0 if c.tied else c.hidden_size * c.vocab_size
        shape = Shape(weights, *sizes, 8.0 * c.itemsize, *experts, c.windows, c.itemsize, embedding)
        return replace(shape, bits=shape.bits * held / shape.weight_bytes) if held else shape

    def quantized(self, scheme: str) -> Shape:
        """The same under a scheme, which leaves the head more bits than the rest, and rounds no embedding."""
        return replace(self.stored(STORED[scheme], False, STORED[HEAD]), embedding=self.hidden * self.vocab)

    def stored(self, bits: float, experts: bool, head: float = 16.0) -> Shape:
        """The same in so many bits a weight, but for the head; `experts`: all but theirs are as the head is.

        Such weights are multiplied by in bfloat16, whatever was said of others.
        """
        every = self.weights + self.experts * self.expert
        rest = self.weights if experts else self.hidden * self.vocab
        return replace(self, bits=bits + (head - bits) * rest / every, itemsize=2)

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights that are multiplied by."""
        return (self.weights + self.experts * self.expert) * self.bits / 8

    @property
    def nbytes(self) -> float:
        """Bytes that it takes in memory."""
        return self.weight_bytes + self.embedding * self.itemsize

    def read(self, rows: int) -> float:
        """Bytes of weights that a forward reads, if which experts a row takes were a matter of chance."""
        touched = self.experts * (1 - (1 - self.chosen / self.experts) ** rows) if self.experts else 0.0
        return (self.weights + touched * self.expert) * self.bits / 8

    def kv_bytes(self, tokens: float) -> float:
        """Bytes of keys and values."""
        return 2.0 * self.itemsize * self.layers * self.kv_heads * self.head_dim * tokens

    def seen(self, context: float) -> float:
        """Keys that a row behind so many tokens sees, on the average of the layers."""
        return statistics.fmean(context if window is None else min(context, window) for window in self.windows)

    def forward(self, device: Device, batch: int, rows: int, context: float) -> float:
        """Seconds of a forward: `batch` sequences of so many rows, behind `context` tokens each."""
        context = self.seen(context)  # all keys are held, and these are read
        each, read = self.weights + self.chosen * self.expert, self.read(batch * rows)
        decoding = 8 * read / self.bits / device.decoded if self.bits < 16 else 0.0
        weights = max(read / device.bandwidth, 2.0 * each * batch * rows / device.arithmetic, decoding)
        work = 4.0 * self.layers * self.heads * self.head_dim * context * batch * rows
        keys = max(batch * self.kv_bytes(context) / device.bandwidth, work / device.arithmetic)
        return weights + keys + self.layers * device.start + batch * rows * device.row


@dataclass(frozen=True)
class Timed:
    """Forwards of a model as measured on a machine, in seconds.

    `rows`: of so many rows, behind little text. `keys`: what keys add to it, by the rows of each sequence, over the
    keys of all sequences together. `outside`, `drafted`: what a plain step, and one with drafts, take beside them;
    `itself`: what each token takes that a model drafts.
    """

    rows: Curve
    keys: dict[int, Curve]
    outside: float
    drafted: float
    itself: float

    def forward(self, batch: int, rows: int, context: float) -> float:
        """Seconds of a forward: `batch` sequences of so many rows, behind `context` tokens each."""
        each = Curve({n: curve.at(round(batch * context)) for n, curve in self.keys.items()})
        return self.rows.at(batch * rows) + each.at(rows)


@dataclass(frozen=True)
class Link:
    """What lies between ranks: bytes a second that one receives as reached, and seconds that a collective takes."""

    bandwidth: float
    start: float


LINKS = {  # per direction on paper: NVLink 4 450 GB/s, PCIe 4 x16 32 GB/s; gloo as measured between two busy cores
    "nvlink": Link(0.7 * 450e9, 10e-6), "pcie": Link(0.7 * 32e9, 20e-6), "gloo": Link(1e9, 300e-6),
}  # fmt: skip


def traffic(config: ModelConfig, ranks: int, mode: str, rows: int, wanted: int, itemsize: int = 2) -> tuple[int, int]:
    """Collectives of a forward of so many rows, cut over ranks (parallel/), and the bytes that rank 0 receives.

    `wanted`: rows whose logits are asked for; `itemsize` of the model's numbers. Partial sums and logits have four.
    Raises ConfigError for what cannot be cut so.
    """
    from outrider.parallel import Cut, Group  # which needs torch

    cut = Cut(config, Group(None, ranks, mode, None))
    if ranks == 1:
        return 0, 0

    def widest(parts: list[range]) -> int:
        return (ranks - 1) * max(map(len, parts))

    hidden, m = config.hidden_size, config.mixture
    if mode == "gather":
        dense = [itemsize * widest(p) for p in (cut.queries(), cut.hidden, cut.inner, cut.hidden)]
        sparse = [*dense[:2], *([itemsize * m.chosen * widest(cut.wide(m.width))] if m else [])]
        sparse += [itemsize * widest(cut.wide(m.shared))] if m and m.shared else []
        sparse.append(4 * widest(cut.hidden))  # experts are summed before they are rounded
    elif mode == "ordered":
        dense = sparse = [4 * (ranks - 1) * hidden] * 2
    else:  # a ring: each part goes around twice
        dense = sparse = [8 * hidden * (ranks - 1) // ranks] * 2
    also, mixed = list[int](), len(m.layers) if m else 0
    if config.qk_norm == "full":
        keys = [range(kv.start * config.head_dim, kv.stop * config.head_dim) for _, kv in cut.heads]
        also = [itemsize * widest(cut.queries()), itemsize * widest(keys)]
    sizes = (config.num_layers - mixed) * dense + mixed * sparse + config.num_layers * also
    return len(sizes) + (wanted > 0), rows * sum(sizes) + 4 * wanted * widest(cut.vocab)


def fastest_mode(config: ModelConfig, ranks: int, device: str) -> str:
    """Of the two modes that are exact, the faster one for a single row, by prediction."""
    link = LINKS["gloo" if device == "cpu" else "nvlink"]

    def seconds(mode: str) -> float:
        calls, size = traffic(config, ranks, mode, 1, 1)
        return calls * link.start + size / link.bandwidth

    return min(("gather", "ordered"), key=seconds)


def expected(chance: float, k: int) -> float:
    """Tokens that a step emits with a chain of k, each right with this chance once those before are."""
    return k + 1.0 if chance >= 1 else (1 - chance ** (k + 1)) / (1 - chance)


@dataclass(frozen=True)
class Prediction:
    """Of one method in one cell. k = 0: plain decoding is best."""

    method: str
    suite: str
    context: int
    batch: int
    k: int
    tokens_per_second: float  # of all sequences together
    speedup: float
    tokens_per_forward: float
    memory: float  # bytes: weights, and keys and values of the batch
    fits: bool
    chance: float
    found: float  # the share of steps that draft
    source: str  # of both


@dataclass(frozen=True)
class Planner:
    """A model on a machine; `draft` is the draft model's shape, None: a tenth of the target."""

    shape: Shape
    device: Device
    draft: Shape | None = None
    timed: Timed | None = None  # the model's forwards ...
    timed_draft: Timed | None = None  # ... and the draft model's, if they were measured

    def forward(self, batch: int, rows: int, context: float) -> float:
        """Seconds of a forward of the model."""
        if self.timed:
            return self.timed.forward(batch, rows, context)
        return self.shape.forward(self.device, batch, rows, context)

    def drafting(self, method: str, batch: int, k: int, context: float, seen: int | None = None) -> tuple[float, float]:
        """Seconds to draft k tokens for each sequence, and the bytes that drafting holds. `seen`: keys at most."""
        s, d = self.shape, self.device
        if seen is None and method.startswith("self:view"):
            seen = WINDOW
        context, beside = context if seen is None else min(context, seen), self.timed.itself if self.timed else 0.0
        if method in ("ngram", "suffix"):
            return 1e-4 * batch, 0.0
        if method == "draft_model":
            small = self.draft or replace(
                s, weights=int(s.weights * SMALLER), expert=int(s.expert * SMALLER), layers=max(1, s.layers // 4),
                embedding=int(s.embedding * SMALLER),
            )  # fmt: skip
            one = replace(self, shape=small, timed=self.timed_draft).forward(batch, 1, context)
            return k * (one + beside), small.nbytes + batch * small.kv_bytes(context)
        if method.startswith("self:weights="):
            coarse = s.quantized(method.partition("=")[2])
            share = coarse.forward(d, batch, 1, context) / s.forward(d, batch, 1, context)
            one = share * self.forward(batch, 1, context)
            return k * (one + beside), coarse.nbytes + batch * s.kv_bytes(context)
        if method.startswith("self:"):
            return k * (self.forward(batch, 1, context) + beside), batch * s.kv_bytes(context)
        squares = {"medusa": k, "recurrent": 5, "eagle3": 16}[method]  # heads side by side, or a layer again and again
        own = squares * s.hidden**2 + s.hidden * (min(s.vocab, WORDS) if method == "recurrent" else s.vocab)
        head = replace(s, weights=own, layers=1, expert=0, experts=0, chosen=0)
        return (1 if method == "medusa" else k) * head.forward(d, batch, 1, 0), head.weight_bytes

    def step(
        self, method: str, batch: int, context: float, rate: Rate, k: int, seen: int | None = None
    ) -> tuple[float, float]:
        """Tokens a second of all sequences, and bytes."""
        held = self.shape.nbytes + batch * self.shape.kv_bytes(context)
        outside, drafted = (self.timed.outside, self.timed.drafted) if self.timed else (0.0, 0.0)
        plain = self.forward(batch, 1, context) + outside
        if not k:
            return batch / plain, held
        spent, own = self.drafting(method, batch, k, context, seen)
        with_draft = self.forward(batch, 1 + k, context) + drafted
        seconds = spent + rate.found * with_draft + (1 - rate.found) * plain
        return batch * rate.tokens(k) / seconds, held + own

    def predict(self, method: str, suite: str, context: int, batch: int, rate: Rate | None = None) -> Prediction:
        """The best k, and what it gives. `rate`: in place of what is known of the method on the suite."""
        rate = rate or acceptance(method, suite)
        made = {k: self.step(method, batch, context, rate, k) for k in range(LONGEST + 1)}
        k = max(made, key=lambda k: made[k][0])
        (plain, _), (speed, memory) = made[0], made[k]
        at = suite, context, batch, k, speed, speed / plain, rate.tokens(k), memory
        return Prediction(method, *at, memory <= self.device.memory, rate.chance, rate.found, rate.source)

    def table(
        self,
        methods: list[str],
        suites: list[str],
        contexts: list[int],
        batches: list[int],
        rates: Mapping[tuple[str, str], Rate] | None = None,
    ) -> list[Prediction]:
        """Every method in every cell; with `rates`, by method and suite, those alone of which they say something."""
        cells = [(s, c, b) for s in suites for c in contexts for b in batches]
        return [
            self.predict(method, *cell, None if rates is None else rates[method, cell[0]])
            for cell in cells
            for method in methods
            if rates is None or (method, cell[0]) in rates
        ]


@dataclass(frozen=True)
class Miss:
    """A measured line, and what would have been predicted from its acceptance."""

    name: str
    measured: float  # speed-up
    predicted: float

    @property
    def off(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.measured - 1


class Published(NamedTuple):
    """A speed-up that others have measured, and what it takes to predict it."""

    where: str
    device: Device
    shape: Shape
    context: int
    batch: int
    k: int
    chance: float
    speedup: float
    draft: Shape | None = None  # None: the target itself
    seen: int = WINDOW  # keys that the draft sees
    inner: float | None = None  # of TriForce: the chance that the smallest model's guess passes the target's view
    plain: float | None = None  # seconds of a token as measured, where keys come from the host

    def predicted(self) -> float:
        """The same by the roofline."""
        plain = self.plain or self.shape.forward(self.device, self.batch, 1, self.context)
        full = self.plain or self.shape.forward(self.device, self.batch, self.k + 1, self.context)
        if self.inner is None:
            drafting = self.k * (self.draft or self.shape).forward(self.device, self.batch, 1, self.seen)
        else:  # each pass of the view takes k + 1 rows, and brings 1 token or 2
            view = self.shape.forward(self.device, 1, self.k + 1, self.seen)
            drafting = self.k / (1 + self.inner) * (view + LLAMA_68M.forward(self.device, 1, 1, 256))
        return expected(self.chance, self.k) * plain / (drafting + full)


LLAMA_68M, TINY_LLAMA = Shape(43e6, 2, 12, 12, 64, 768, 32000), Shape(1.03e9, 22, 32, 4, 64, 2048, 32000)
LLAMA_7B, LLAMA_13B = Shape(6.61e9, 32, 32, 32, 128, 4096, 32000), Shape(12.85e9, 40, 40, 40, 128, 5120, 32000)
LLAMA_8B = Shape(7.5e9, 32, 32, 8, 128, 4096, 128256)


def _several(count: int, name: str, start: float, row: float) -> Device:
    d = DEVICES[name]
    return Device(count * d.bandwidth, count * d.arithmetic, count * d.memory, start, row, count * d.decoded)


def published() -> list[Published]:
    """MagicDec's tables (its project page) and TriForce's (README and project page).

    Acceptance is theirs: StreamingLLM's on PG-19 by length; TriForce's "above 0.9", its inner 0.35. That of TinyLlama
    is not told, and taken as 0.8. A layer that lies cut over eight GPUs takes 250 us beside its bytes (two all-reduces
    and launches without graphs) and a row 10 us: both fitted to MagicDec's 19 figures. TriForce on two GPUs, which has
    no graphs either, takes over the first.
    """
    eight = {name: _several(8, name, 250e-6, 10e-6) for name in ("a100", "h100")}
    found = [
        Published(f"MagicDec, 8 {name}", eight[name], shape, context, batch, k, chance, speedup, draft)
        for name, shape, draft, context, chance, figures in (
            ("a100", LLAMA_8B, None, 32000, 0.81, ((32, 3, 1.22), (64, 3, 1.38), (128, 4, 1.47))),
            ("a100", LLAMA_7B, None, 8000, 0.84, ((32, 3, 1.18), (64, 3, 1.48), (128, 4, 1.63))),
            ("a100", LLAMA_7B, None, 32000, 0.81, ((32, 4, 2.0),)),
            ("a100", LLAMA_7B, TINY_LLAMA, 8000, 0.8, ((32, 3, 1.29), (64, 3, 1.57), (128, 4, 1.66))),
            ("a100", LLAMA_7B, TINY_LLAMA, 32000, 0.8, ((32, 4, 1.91),)),
            ("h100", LLAMA_8B, None, 32000, 0.81, ((32, 3, 1.23), (64, 3, 1.43))),
            ("h100", LLAMA_7B, None, 8000, 0.84, ((32, 3, 1.19), (64, 4, 1.42), (128, 4, 1.65))),
            ("h100", LLAMA_7B, TINY_LLAMA, 8000, 0.8, ((32, 2, 1.32), (64, 3, 1.48), (128, 3, 1.64))),
        )
        for batch, k, speedup in figures
    ]
    two = _several(2, "rtx4090", 250e-6, 0.0)
    offloaded = ((LLAMA_7B, 0.84, 7.78), (LLAMA_13B, 1.794, 7.94))
    found.append(Published("TriForce, a100", DEVICES["a100"], LLAMA_7B, 124928, 1, 6, 0.9, 2.31, seen=4096, inner=0.35))
    return found + [
        Published("TriForce, 2 rtx4090", two, s, 130048, 1, 16, 0.9, speedup, seen=12288, inner=0.35, plain=seconds)
        for s, seconds, speedup in offloaded
    ]


def against(path: Path, planner: Planner, context: int) -> Iterator[Miss]:
    """Compare the lines of `outrider bench`, or of `bench long`, with the plan, given their tokens a forward.

    Lines of methods that have no plan, and of drafts without a fixed length, are left out. Raises ConfigError.
    """
    for line in _lines(path):
        at = whole(line.data.get("context"), 1) or context
        steps = line.steps or {line.k: 1}
        seconds = {n: line.batch / planner.step(line.kind, line.batch, at, NEVER, n, line.seen)[0] for n in {0, *steps}}
        drafted = sum(count * seconds[n] for n, count in steps.items()) / sum(steps.values())
        name = f"{line.suite}, {at} tokens, {line.batch} at a time: {line.data['method']}"
        yield Miss(name, line.speedup, line.length * seconds[0] / drafted)


def seen_in(path: Path) -> dict[tuple[str, str], Rate]:
    """By method and suite the chance that the lines of `outrider bench` show, of your own prompts, say.

    It is that of a chain, where steps drafted anything: the lines of one at a time say in how many, and of others it is
    taken for all. Of several lines, that of the most tokens a forward. Lines are left out as in `against`. Raises
    ConfigError.
    """
    best: dict[tuple[str, str], _Line] = {}
    for line in _lines(path):
        best[line.kind, line.suite] = max(line, best.get((line.kind, line.suite), line), key=lambda each: each.length)
    source, rates = f"{path.parent.name}/{path.name}", dict[tuple[str, str], Rate]()
    for at, line in best.items():
        found = 1 - line.steps.get(0, 0) / sum(line.steps.values()) if line.steps else 1.0
        rates[at] = Rate(_chance(1 + (line.length - 1) / found, line.most) if found else 0.0, source, found)
    return rates


def _chance(length: float, k: int) -> float:
    """With which a chain of k gives so many tokens a step: `expected`, the other way round."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if expected(middle, k) < length else (low, middle)
    return high


class _Line(NamedTuple):
    """What a line says of a method that has a plan; `seen`: keys that a draft sees at most."""

    suite: str
    kind: str
    batch: int
    most: int  # nodes of a draft
    k: int  # of a step's draft, on average
    steps: dict[int, int]  # how many drafted so many nodes, by nodes; nothing if that is not said, or of many at once
    length: float
    speedup: float
    seen: int | None
    data: dict[str, Any]


def _lines(path: Path) -> Iterator[_Line]:
    for number, data in numbered(path):
        config, method = data.get("speculative_config"), data.get("method")
        config = config if isinstance(config, dict) else {}
        length, speedup = real(data.get("acceptance_length"), 1, 1e3), real(data.get("speedup"), 1e-6, 1e6)
        batch = whole(data.get("batch"), 1, 2**20)
        if length is None or speedup is None or batch is None or not isinstance(method, str):
            raise ConfigError(f"{path}, line {number}: no result of outrider bench")
        named = re.search(r" k=(\d+)$", method)
        most = whole(config.get("num_speculative_tokens") or (int(named[1]) if named else None), 1, 256)
        kind = config.get("method")
        kind = "self:view=streaming:budget=512" if kind == "self" and "view" in config else kind
        if most is None or kind not in ACCEPTANCE:
            continue
        rate = real(data.get("draft_acceptance_rate"), 0, 1)  # where nothing is found, fewer are drafted
        k = min(most, max(1, round((length - 1) / rate))) if rate else most
        budget = re.search(r"budget=(\d+)", str(config.get("view") or config.get("kv")))
        seen = int(budget[1]) if budget else None
        steps = _counts(data.get("draft_lengths")) if batch == 1 else {}
        yield _Line(str(data.get("suite", "text")), kind, batch, most, k, steps, length, speedup, seen, data)


def _counts(value: object) -> dict[int, int]:
    """How many steps drafted so many nodes, by nodes; nothing if that is not what it says."""
    counts = dict(enumerate(value)) if isinstance(value, list) else {}
    return {n: count for n, count in counts.items() if count} if all(whole(c, 0) for c in counts.values() if c) else {}


def numbered(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The lines of a results.jsonl, from 1 on. Raises ConfigError for what is none."""
    try:
        texts = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {reason_of(error)}") from None
    for number, text in enumerate(texts, start=1):
        try:
            data = json.loads(text)
        except (ValueError, RecursionError):
            data = None
        if not isinstance(data, dict):
            raise ConfigError(f"{path}, line {number}: no JSON object; give a results.jsonl of outrider bench")
        yield number, data


def share_within(misses: list[Miss], share: float = 0.15) -> float:
    """The share of predictions that are off by no more."""
    return statistics.fmean(abs(miss.off) <= share for miss in misses) if misses else 0.0
