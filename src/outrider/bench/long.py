"""Long contexts: methods x contexts x batches on the text of whole books, against plain decoding in the same run.

Each prompt is read once; then every method continues it in turn, repeat by repeat, from the target's cache as the
prompt left it (a cache that catches up forgets what the method before wrote). Decoding is `step`, the engine's own loop
body. Times are of the steps after each method's first, which also reads the prompt into the method's own caches, up to
the one in which a sequence ends: behind it the batch is another one, and an engine would let the next request in.
"""

from __future__ import annotations

import copy
import json
import math
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

from outrider.bench.report import circles, repeated
from outrider.bench.run import PLAIN, Conditions, load_llm, named, provenance, spoken
from outrider.bench.suites import DAMAGED
from outrider.config import SpeculativeConfig
from outrider.corpus import archived
from outrider.draft import Draft
from outrider.errors import ConfigError, OutOfMemory
from outrider.llm import LLM
from outrider.load import Progress
from outrider.ops import untouched
from outrider.outputs import SpecMetrics
from outrider.plan import expected
from outrider.sequence import Sequence
from outrider.speculate import StepTimes, step

BOOKS = "books_eval.tar.xz"
REREAD = 128  # last tokens of the prompt that every method's first step reads again: a view may watch their queries
PIECE = 100_000  # characters that are tokenised at once
CURVE = (1, 2, 4, 8, 16)  # tokens of one verification
LISTS = ("tokens", "inner")


@dataclass(frozen=True)
class Settings(Conditions):
    """One run; `file` is a text instead of the evaluation books."""

    contexts: list[int] = field(default_factory=lambda: [4096, 32768])  # tokens of prompt
    batches: list[int] = field(default_factory=lambda: [1])
    engine: dict[str, Any] = field(default_factory=dict)  # options of the engine, such as offloading

    LEAST: ClassVar[dict[str, int]] = Conditions.LEAST | {"contexts": 2, "batches": 1, "max_tokens": 16}

    def __post_init__(self) -> None:
        super().__post_init__()
        for method in self.methods:
            if method.num_speculative_tokens == "auto":
                raise ConfigError("bench long measures fixed draft lengths; give k a number instead of 'auto'")


@dataclass
class Pass:
    """One method's continuation of one batch. Seconds and counts: after the first step, while no sequence has ended."""

    tokens: list[list[int]]
    first: float  # seconds of the first step: the method's own caches read the prompt
    seconds: float = 0.0
    draft: float = 0.0
    target: float = 0.0
    steps: int = 0
    emitted: int = 0
    forwards: int = 0  # of sequences: one for each in each step
    drafted: int = 0
    accepted: int = 0
    rejected: int = 0  # drafts that were not accepted whole
    inner: list[float] = field(default_factory=list)  # of a hierarchy, level by level inwards: drafts accepted there

    @property
    def rate(self) -> float:
        """Tokens a second; 0 where some sequence ended in the first step, of which nothing can be said."""
        return self.emitted / self.seconds if self.seconds else 0.0

    def __add__(self, other: Pass) -> Pass:
        """Seconds and counts of both, with the lists of the first."""
        added = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self) if f.name not in LISTS}
        return replace(self, **added)


@dataclass
class Row:
    """One JSON line: one method at one context and batch. Seconds and bytes; None = not applicable."""

    method: str
    speculative_config: dict[str, Any]
    model: str
    dtype: str
    quantization: str | None
    device: str
    context: int
    batch: int
    max_tokens: int
    temperature: float
    top_p: float
    seed: int
    tokens_per_second: float  # over all sequences, median of the repeats; 0 if none could be timed (Pass.rate)
    repeats: list[float]
    speedup: float  # ratio of medians against plain in the same rounds
    predicted: float | None  # by MagicDec's formula from measured times and acceptance
    acceptance_length: float
    draft_acceptance_rate: float | None
    inner_rates: list[float]  # the same within a hierarchy, level by level inwards
    draft_share: float
    target_share: float
    kv_bytes_context: int  # keys and values one forward of the target reads
    kv_bytes_drafter: int  # that the drafter holds
    prefill_seconds: float  # the target's, once for all methods
    first_step_seconds: float  # the method's own reading of the prompt, views built included
    curve: dict[int, float]  # tokens verified at once -> seconds of a forward
    identical: bool
    repeated: float  # see report.repeated
    exactness: str
    source: str
    hardware: dict[str, Any]
    versions: dict[str, str]
    commit: str
    command: str
    date: str

    @property
    def budget(self) -> int | None:
        """Kept keys of the method's (outermost) view."""
        found = re.search(r"budget['\"]?[=:]\s*(\d+)", json.dumps(self.speculative_config))
        return int(found[1]) if found else None


def run(settings: Settings, progress: Progress | None = None) -> Iterator[Row]:
    """Measure, context by context and batch by batch. Raises OutriderError's kinds before a measurement begins."""
    report = progress or (lambda *_: None)
    llm = load_llm(settings, report, **settings.engine)
    methods = named([PLAIN, *settings.methods])
    source, text = _text(settings, llm, max(settings.contexts) * max(settings.batches))
    drafters = {}
    for name, config in methods.items():  # what cannot run is known before the first prompt is read
        llm.speculative_config = config
        drafters[name] = llm.engine.drafter
    for context in settings.contexts:
        for batch in settings.batches:
            _check_memory(llm, drafters.values(), context, batch, settings.max_tokens)
    for context in settings.contexts:
        for batch in settings.batches:
            yield from _measure(settings, llm, methods, text, source, context, batch, report)


def _measure(
    s: Settings, llm: LLM, methods: dict[str, SpeculativeConfig], text: list[int], source: str,
    context: int, batch: int, report: Progress,
) -> Iterator[Row]:  # fmt: skip
    stride = (len(text) - context) // batch if batch > 1 else 0
    seqs = [Sequence(text[i * stride : i * stride + context], s.params, s.seed + i) for i in range(batch)]
    what = f"context {context:,}, batch {batch}"
    report(f"{what}: reading", 0, 1)
    began = time.perf_counter()
    llm.runner.extend(seqs)
    prefill = time.perf_counter() - began
    passes: dict[str, list[Pass]] = {name: [] for name in methods}
    try:
        curve = {n: _verification(llm, seqs, n) for n in CURVE}
        for i in range(s.repeats):
            for j, (name, config) in enumerate(methods.items()):
                report(f"{what}: {name}", i * len(methods) + j, s.repeats * len(methods))
                llm.speculative_config = config
                with untouched(llm.runner.model.device):
                    passes[name].append(_decode(llm, seqs))
    finally:
        for seq in seqs:
            llm.runner.free(seq)
    for name, config in methods.items():
        llm.speculative_config = config
        yield _row(s, llm, name, config, passes[name], passes["plain"], context, batch, prefill, curve, source)


def _decode(llm: LLM, prompts: list[Sequence]) -> Pass:
    """Continue each prompt to its end with the drafter that is set."""
    drafter, runner = llm.engine.drafter, llm.runner
    if longer := [_again(p, p.tokens[:-REREAD]) for p in prompts if len(p.tokens) > REREAD]:
        runner.extend(longer)
    seqs = [_again(p, p.tokens) for p in prompts]
    done: Pass | None = None
    try:
        while alive := [seq for seq in seqs if not seq.finish_reason]:
            times, before = StepTimes(), sum(len(seq.tokens) for seq in seqs)
            verdicts = step(runner, drafter, alive, drafter.num_speculative_tokens, times, llm.engine.rule)
            if done is None:
                done = Pass([], times.total)
                continue
            if len(alive) < len(seqs):
                continue
            done.seconds += times.total
            done.draft += times.draft
            done.target += times.target
            done.steps += 1
            done.forwards += len(alive)
            done.emitted += sum(len(seq.tokens) for seq in seqs) - before
            for verdict in verdicts:
                done.drafted += verdict.drafted
                done.accepted += len(verdict.path)
                done.rejected += len(verdict.path) < verdict.drafted
        assert done is not None
        done.tokens = [seq.output for seq in seqs]
        level = [seq.metrics.inner for seq in seqs if seq.metrics.inner]
        while level:
            done.inner.append(sum(sum(m.accepted) for m in level) / max(1, sum(sum(m.drafted) for m in level)))
            level = [m.inner for m in level if m.inner]
        return done
    finally:
        for seq in seqs:
            drafter.forget(seq)


def _verification(llm: LLM, prompts: list[Sequence], tokens: int) -> float:
    """Seconds of one forward that checks so many tokens of each sequence, its last one included; median of five."""
    seqs = [_again(p, p.tokens) for p in prompts]
    drafts = [Draft.chain(p.tokens[: tokens - 1]) for p in prompts]
    llm.runner.extend(seqs)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        llm.runner.extend(seqs, drafts)
        seconds.append(time.perf_counter() - began)
    return median(seconds)


def _again(seq: Sequence, tokens: list[int]) -> Sequence:
    """The sequence as if it had only these tokens: caches know it by its id and catch up."""
    again = copy.copy(seq)
    again.tokens, again.memory, again.metrics, again.mirror = tokens.copy(), {}, SpecMetrics(), None
    return again


def predict(plain: float, steps: float, draft: float, target: float, k: int, alpha: float) -> float:
    """Speedup by MagicDec's formula (2408.11049): omega / (k T_D / T_T + T_V / T_T), omega = tokens a step.

    plain = T_T, seconds of a plain step; draft = k T_D and target = T_V over `steps` steps; alpha = chance that a draft
    token is accepted once those before it were.
    """
    return expected(alpha, k) * plain * steps / (draft + target)


def _row(
    s: Settings, llm: LLM, name: str, config: SpeculativeConfig, passes: list[Pass], plain: list[Pass],
    context: int, batch: int, prefill: float, curve: dict[int, float], source: str,
) -> Row:  # fmt: skip
    rates, base = [p.rate for p in passes], [p.rate for p in plain]
    rate = median(list(filter(None, rates)) or [0.0])
    total = sum(passes[1:], passes[0])
    seconds = total.seconds or math.inf
    predicted = None
    if total.drafted:
        plain_step = sum(p.seconds for p in plain) / sum(p.steps for p in plain)
        alpha = total.accepted / max(1, total.accepted + total.rejected)
        k = round(total.drafted / total.forwards)
        predicted = predict(plain_step, total.steps, total.draft, total.target, k, alpha)
    model, kv = llm.runner.model, llm.runner.kv
    length = context + s.max_tokens
    return Row(
        method=name, speculative_config=spoken(config), model=s.model,
        dtype=str(model.dtype).removeprefix("torch."), quantization=s.quantization, device=str(model.device),
        context=context, batch=batch,
        max_tokens=s.max_tokens, temperature=s.temperature, top_p=s.top_p, seed=s.seed,
        tokens_per_second=rate, repeats=rates, speedup=rate / median(base), predicted=predicted,
        acceptance_length=total.emitted / max(1, total.forwards),
        draft_acceptance_rate=total.accepted / total.drafted if total.drafted else None,
        inner_rates=[median(rates) for rates in zip(*(p.inner for p in passes), strict=True)],
        draft_share=total.draft / seconds, target_share=total.target / seconds,
        kv_bytes_context=batch * kv.nbytes(length), kv_bytes_drafter=batch * llm.engine.drafter.kv_bytes(length),
        prefill_seconds=prefill, first_step_seconds=median(p.first for p in passes), curve=curve,
        identical=all(p.tokens == plain[0].tokens for p in passes), repeated=repeated(plain[0].tokens),
        exactness=llm.exactness, source=source,
        **provenance(model.device),
    )  # fmt: skip


def _check_memory(llm: LLM, drafters: Any, context: int, batch: int, max_tokens: int) -> None:
    length, limit = context + max_tokens, llm.engine_config.kv_memory or 0
    if length > llm.runner.max_len:
        raise ConfigError(f"{context} tokens and {max_tokens} new ones exceed the context of {llm.runner.max_len}")
    needed = batch * (llm.runner.kv.nbytes(length) + max(d.kv_bytes(length) for d in drafters))
    if needed > limit:
        raise OutOfMemory(
            f"context {context} x batch {batch} needs {needed / 2**20:,.0f} MiB for keys and values, but there are "
            f"{limit / 2**20:,.0f}; measure shorter contexts or smaller batches"
        )


def _text(s: Settings, llm: LLM, tokens: int) -> tuple[str, list[int]]:
    """The books' names and their text, joined, as at least so many tokens (or all there are, repeated for a batch)."""
    path = s.file or (s.data / BOOKS if s.data else None)
    if path is None or not path.is_file():
        raise ConfigError(
            f"{path or BOOKS} is not there; pass its folder with --data or OUTRIDER_DATA, or a text with --file"
        )
    try:
        books = archived(path) if path.name.endswith(".tar.xz") else [path.read_text("utf-8-sig")]
    except DAMAGED as error:
        raise ConfigError(f"{path} is damaged or not text ({type(error).__name__}: {error})") from None
    ids: list[int] = []
    for book in books:
        for at in range(0, len(book), PIECE):
            ids += llm.encode(book[at : at + PIECE])
        if len(ids) >= tokens:
            break
    if len(ids) < max(s.contexts):
        raise ConfigError(f"{path} has {len(ids)} tokens, fewer than the context of {max(s.contexts)}")
    return path.name, ids


HEADER = ("context", "batch", "method", "tokens/s", "speedup", "predicted", "tokens a forward", "drafts kept",
          "draft %", "KV of the target MB", "KV of the drafter MB", "first step s", "identical")  # fmt: skip


def cells(r: Row) -> list[str]:
    """One line of the table."""
    kept = "" if r.draft_acceptance_rate is None else f"{r.draft_acceptance_rate:.0%}"
    kept += "".join(f", inner {rate:.0%}" for rate in r.inner_rates)
    timed = [f"{r.tokens_per_second:,.1f}", f"{r.speedup:.2f}", f"{r.acceptance_length:.2f}", f"{r.draft_share:.0%}"]
    rate, speedup, length, share = timed if r.tokens_per_second else ["-"] * 4
    return [
        f"{r.context:,}", str(r.batch), r.method, rate, speedup, "" if r.predicted is None else f"{r.predicted:.2f}",
        length, kept, share, f"{r.kv_bytes_context / 1e6:,.0f}", f"{r.kv_bytes_drafter / 1e6:,.1f}",
        f"{r.first_step_seconds:.2f}", f"yes ({r.exactness})" if r.identical else f"no ({r.exactness})",
    ]  # fmt: skip


def remarks(rows: list[Row]) -> list[str]:
    """What the table does not say."""
    r, h = rows[-1], rows[-1].hardware
    lines = [
        f"{r.model}, {r.quantization or r.dtype}, {r.source}, {r.max_tokens} new tokens, temperature {r.temperature}, "
        f"top-p {r.top_p}; {h['gpu'] or h['cpu']}, {h['threads']} threads on {h['cores']} cores; "
        f"outrider {r.versions['outrider']} ({r.commit}), torch {r.versions['torch']}.",
        f"Median over repeats ({len(r.repeats)}), the methods taking turns; speedup against plain in the same run; "
        "predicted: MagicDec's formula from measured times and acceptance.",
    ]
    for context, batch in dict.fromkeys((x.context, x.batch) for x in rows):
        x = next(x for x in rows if (x.context, x.batch) == (context, batch))
        one = x.curve[CURVE[0]]
        curve = ", ".join(f"{n}: {seconds / one:.2f}" for n, seconds in x.curve.items())
        lines.append(
            f"Context {context:,}, batch {batch}: prompts read in {x.prefill_seconds:.1f} s; a forward of one "
            f"token takes {1000 * one:.1f} ms; of n tokens, times that: {curve}. {circles(x.repeated)}"
        )
    if not all([x.tokens_per_second for x in rows]):
        lines.append("-: an answer ended in the first step, which is not timed; give more --max-tokens.")
    return lines


def read(path: Path) -> list[Row]:
    """Rows from JSON lines, whose keys are text."""
    found = map(json.loads, path.read_text("utf-8").splitlines())
    return [Row(**row | {"curve": {int(n): seconds for n, seconds in row["curve"].items()}}) for row in found]


def plot(rows: list[Row], path: Path) -> None:
    """Speedup over context, batch and budget, and predicted against measured; what has one value gets no panel."""
    from matplotlib.figure import Figure

    drafted = [r for r in rows if r.predicted is not None]
    names = [n for n in ("context", "batch", "budget") if len({getattr(r, n) for r in drafted} - {None}) > 1]
    figure = Figure(figsize=(4.6 * (len(names) + 1), 4.4), layout="constrained")
    *panels, last = figure.subplots(1, len(names) + 1, squeeze=False)[0]
    for panel, name in zip(panels, names, strict=True):
        lines: dict[str, list[tuple[int, float]]] = {}
        for r in drafted:
            if getattr(r, name) is not None:
                method = re.sub(r"budget=\d+", "budget", r.method) if name == "budget" else r.method
                fixed = [f"{n} {getattr(r, n)}" for n in names if n not in (name, "budget")]
                lines.setdefault(", ".join([method, *fixed]), []).append((getattr(r, name), r.speedup))
        for line, points in lines.items():
            panel.plot(*zip(*sorted(points), strict=True), marker="o", label=line)
        panel.set_xscale("log", base=2)
        panel.set_xlabel(name)
        panel.set_ylabel("tokens/s against plain decoding")
        panel.axhline(1, color="black", linewidth=0.8, linestyle="--")
        panel.legend(fontsize="xx-small", frameon=False)
    limit = 1.05 * max([1.0, *(max(r.speedup, r.predicted or 0) for r in drafted)])
    last.scatter([r.predicted for r in drafted], [r.speedup for r in drafted])
    last.plot([0, limit], [0, limit], color="black", linewidth=0.8, linestyle="--")
    last.set_xlabel("predicted speedup")
    last.set_ylabel("measured speedup")
    figure.savefig(path, dpi=150, format="png")
