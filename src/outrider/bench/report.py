"""What one measurement says, and how it is shown: JSON lines, a Markdown table, a terminal table, a plot.

The lines are the truth; `read` and `markdown` make the table again from them.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import quantiles
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from outrider.errors import ConfigError
from outrider.files import write_text
from outrider.outputs import common

MANY = 8  # batches from which on their spread is told
UNSTEADY = 1.5  # repeats that differ by more than this ratio were not alone on the machine
RUN = 8  # tokens that make a repetition


@dataclass
class Sample:
    """One pass of one method over a suite's prompts. Seconds and counts are summed over its batches.

    `seconds` is wall-clock time from the end of a batch's first forward to the end of its last, and `timed` are the
    tokens that came in it. The first forward, prefill, is the time to first token; what it emits is not in `timed`.
    """

    tokens: list[list[int]] = field(default_factory=list)  # per prompt
    first: list[float] = field(default_factory=list)  # per prompt: seconds to the first token
    seconds: float = 0.0
    timed: int = 0
    draft: float = 0.0  # share of `seconds` spent drafting
    target: float = 0.0  # ... and in the target's forwards and verification
    emitted: int = 0
    steps: int = 0  # forwards of the target, counted for each sequence
    drafted: int = 0
    accepted: int = 0
    lengths: Counter[int] = field(default_factory=Counter)  # steps by the nodes that they drafted
    exactness: set[str] = field(default_factory=set)  # of the outputs
    forwards: int = 0  # of the target, prefill included
    expert_bytes: int = 0  # that these read
    rates: list[float] = field(default_factory=list)  # tokens/s of each batch; 0 if its first forward emitted all

    def __iadd__(self, other: Sample) -> Sample:
        """The prompts of another pass behind these."""
        for name, value in vars(other).items():
            own = getattr(self, name)
            setattr(self, name, own | value if isinstance(own, set) else own + value)
        return self

    @property
    def rate(self) -> float:
        """Tokens per second after the first forward; 0 if that forward emitted them all."""
        return self.timed / self.seconds if self.timed else 0.0


def differs(a: list[int], b: list[int]) -> int | None:
    """The first place where two answers have different tokens, or one of them none; None if they are the same."""
    return None if a == b else common(a, b)


@dataclass(frozen=True)
class Difference:
    """The first place where a prompt's tokens are not those of plain decoding."""

    prompt: int
    position: int  # in the output
    plain_token: int | None  # None: there the answer has ended
    token: int | None
    # log p(plain_token) - log p(token) in nats, of plain decoding's raw logits at temperature 1; None: not comparable
    gap: float | None


@dataclass(frozen=True)
class Result:
    """One JSON line: one method on one suite. Times are in seconds, sizes in bytes; None = not known."""

    suite: str
    source: str  # data file of the prompts
    method: str
    engine: str  # outrider, or the peer's name
    speculative_config: dict[str, Any]
    model: str
    inflated_from: dict[str, int] | None  # sizes of the checkpoint that the target enlarges
    dtype: str
    device: str
    exactness: str | None
    temperature: float
    top_p: float
    seed: int
    batch: int  # prompts that run together
    prompts: int
    max_tokens: int  # new tokens per prompt; fewer where `new_tokens` says so
    tokens_per_second: float  # after the first forward, over all sequences; median of the repeats
    repeats: list[float]  # tokens per second of each
    speedup: float  # against our plain decoding beside it; median over the rounds
    speedup_min: float  # over the rounds, each against its own plain pass
    speedup_max: float
    acceptance_length: float  # tokens emitted / forwards of the target
    draft_acceptance_rate: float | None  # accepted / drafted tokens; None = nothing drafted or not known
    draft_share: float | None  # of the time after the first forward
    target_share: float | None
    rest_share: float | None
    time_to_first_token: float  # median over prompts and repeats
    identical: bool  # every prompt in every repeat has plain decoding's tokens
    differences: list[Difference]
    near_ties: int | None  # differences whose gap a rounding or two explains; None unless greedy
    weight_bytes: int  # read by one forward of the target, the experts counted that were chosen
    kv_bytes: int | None  # keys and values of one batch at full length
    peak_rss_bytes: int  # of the process until now
    hardware: dict[str, Any]
    versions: dict[str, str]
    commit: str
    command: str
    date: str
    notes: list[str]
    quantization: str | None = None
    activations: str | None = None
    repeated: float | None = None  # see `repeated`
    new_tokens: int | None = None  # of all prompts together, once, if answers end where the model ends them
    by_batch: list[float] | None = None  # speedup of each batch, median over the rounds
    draft_lengths: list[int] | None = None  # steps that drafted no node, one, and so on, of all rounds

    @property
    def numbers(self) -> str:
        """What weights and activations are."""
        return (self.quantization or self.dtype) + (f", {self.activations} activations" if self.activations else "")

    @property
    def length(self) -> str:
        """How much was written after each prompt."""
        if self.new_tokens is None:
            return f"{self.max_tokens} new tokens"
        return f"{self.new_tokens} new tokens in all (answers, {self.max_tokens} at most)"

    def line(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))


def read(path: Path) -> list[Result]:
    """Results from JSON lines."""
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    return [Result(**{**row, "differences": [Difference(**d) for d in row["differences"]]}) for row in rows]


def write(results: list[Result], folder: Path) -> None:
    """results.jsonl and table.md, replacing those of an earlier run. Raises ConfigError if they cannot be written."""
    write_text(folder / "results.jsonl", "".join(r.line() + "\n" for r in results))
    write_text(folder / "table.md", markdown(results))


def save(rows: list[Any], folder: Path, kind: Any) -> None:
    """The same for rows of another `kind` of run, in one table: with its HEADER, cells and remarks."""
    write_text(folder / "results.jsonl", "".join(json.dumps(asdict(row)) + "\n" for row in rows))
    table = markdown_table(kind.HEADER, map(kind.cells, rows))
    write_text(folder / "table.md", "\n\n".join([f"`{rows[0].command}`", table, *kind.remarks(rows)]) + "\n")


def repeated(outputs: Iterable[list[int]]) -> float:
    """The share of runs of 8 tokens that their own output had before: what goes in circles is easy to look up."""
    again = total = 0
    for tokens in outputs:
        runs = [tuple(tokens[i : i + RUN]) for i in range(len(tokens) - RUN + 1)]
        again += len(runs) - len(set(runs))
        total += len(runs)
    return again / total if total else 0.0


def circles(share: float) -> str:
    """The same, said."""
    return f"{share:.0%} of all runs of {RUN} tokens had stood in the same output before."


def may_differ(r: Result) -> str:
    """What an acceptance rule promises of sampled tokens that is less than plain decoding's very ones; else empty."""
    rule = r.speculative_config.get("acceptance_method") if r.temperature > 0 else None
    return {"rejection": "the same law", "block": "the same law", "typical": "LOSSY"}.get(rule or "", "")


HEADER = ("method", "tokens/s", "speedup\n(min-max)", "tokens a\nforward", "drafts\nkept", "draft,\ntarget,\nrest %",
          "first\ntoken", "identical", "exactness")  # fmt: skip


def cells(r: Result) -> list[str]:
    """A result under HEADER."""
    shares = (r.draft_share, r.target_share, r.rest_share)
    first = f"first at token {min((d.position for d in r.differences), default=0)}"
    return [
        r.method,
        f"{r.tokens_per_second:,.1f}",
        f"{r.speedup:.2f} ({r.speedup_min:.2f}-{r.speedup_max:.2f})",
        f"{r.acceptance_length:.2f}",
        "-" if r.draft_acceptance_rate is None else f"{r.draft_acceptance_rate:.0%}",
        "-" if None in shares else "/".join(f"{100 * share:.0f}" for share in shares if share is not None),
        f"{1000 * r.time_to_first_token:.0f} ms",
        "yes" if r.identical else f"no: {may_differ(r) or f'{len(r.differences)} of {r.prompts} prompts, {first}'}",
        r.exactness or "-",
    ]


def remarks(group: list[Result]) -> list[str]:
    """What stands below one suite's table: conditions, differences, notes."""
    r, h = group[0], group[0].hardware
    law = "greedy" if r.temperature == 0 else f"temperature {r.temperature:g}, top-p {r.top_p:g}, seed {r.seed}"
    kv = max(x.kv_bytes or 0 for x in group)
    lines = [
        f"{r.model}, {r.numbers}, {law}, exactness {r.exactness}; prompts: {r.prompts} ({r.source}), "
        f"batch {r.batch}, {r.length}; "
        f"weights {r.weight_bytes / 1e6:,.1f} MB, keys and values {kv / 1e6:,.1f} MB.",
        f"{h['gpu'] or h['cpu']}, {h['threads']} threads on {h['cores']} cores, load {h['load']:.1f}; outrider "
        f"{r.versions['outrider']} ({r.commit}), torch {r.versions['torch']}, {r.date[:10]}.",
        f"Median over repeats ({len(r.repeats)}), the methods taking turns at each "
        f"{'batch' if r.batch > 1 else 'prompt'}; tokens/s after the first forward; speedup against plain beside it.",
    ]
    if r.repeated is not None:
        lines.append(circles(r.repeated))
    if r.inflated_from:
        sizes = ", ".join(f"{key} {value}" for key, value in r.inflated_from.items())
        lines.append(f"The target is a function-preserving enlargement; its source, with the same tokens: {sizes}.")
    for x in group:
        gaps = ["" if d.gap is None else f", gap {d.gap:.2g}" for d in x.differences]
        where = ", ".join(
            f"prompt {d.prompt} at token {d.position}{gap}" for d, gap in zip(x.differences, gaps, strict=True)
        )
        ties = "" if x.near_ties is None else f"; near-ties: {x.near_ties} of {len(x.differences)}"
        lines += [f"{x.method} differs from plain: {where}{ties}."] * bool(where and not may_differ(x))
        if x.method != "plain" and len(each := sorted(x.by_batch or [])) >= MANY:
            low, middle, high = quantiles(each, n=4)
            which = "batch" if x.batch > 1 else "prompt"
            lines.append(
                f"{x.method}, by {which}: {each[0]:.2f} at least, quartiles {low:.2f}, {middle:.2f}, {high:.2f}, "
                f"{each[-1]:.2f} at most."
            )
        slow, fast = min(x.repeats), max(x.repeats)
        if fast > UNSTEADY * slow or x.speedup_max > UNSTEADY * x.speedup_min:
            speeds, ratios = f"{slow:,.1f} to {fast:,.1f}", f"{x.speedup_min:.2f} to {x.speedup_max:.2f}"
            lines.append(f"Not to be trusted: {x.method} runs at {speeds} tokens/s, {ratios} times plain.")
    return lines + list(dict.fromkeys(note for x in group for note in x.notes))


def markdown_table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """As Markdown writes it."""
    header = list(header)
    return "\n".join(map(markdown_row, [header, ["---"] * len(header), *rows]))


def markdown_row(cells: Iterable[str]) -> str:
    """A row of such a table."""
    return f"| {' | '.join(cells)} |"


def _by_suite(results: list[Result]) -> dict[str, list[Result]]:
    return {name: [r for r in results if r.suite == name] for name in dict.fromkeys(r.suite for r in results)}


def markdown(results: list[Result]) -> str:
    """Per suite the command, a table and its remarks."""
    parts = []
    for name, group in _by_suite(results).items():
        table = markdown_table([title.replace("\n", " ") for title in HEADER], map(cells, group))
        parts += [f"## {name}", f"`{group[0].command}`", table, *remarks(group)]
    return "\n\n".join(parts) + "\n"


def tables(results: list[Result]) -> Iterator[Table | str]:
    """The same for a terminal; what the remarks say has no column there."""
    for name, group in _by_suite(results).items():
        table = Table(title=name, title_style="bold", box=SIMPLE, padding=0)
        for title in HEADER[:-1]:
            table.add_column(title, no_wrap=title not in ("method", "identical"))
        for r in group:
            table.add_row(*(cell.replace(" (", "\n(") for cell in cells(r)[:-1]), style="" if r.identical else "yellow")
        yield table
        yield "\n".join(remarks(group)) + "\n"


def complain(line: str) -> None:
    """A line on standard error."""
    print(f"outrider: {line}", file=sys.stderr)


def require_matplotlib() -> None:
    """Raises ConfigError if plots cannot be drawn."""
    if find_spec("matplotlib") is None:
        raise ConfigError("--output draws a plot with matplotlib, which is missing; pip install 'outrider[bench]'")


def plot(results: list[Result], path: Path) -> None:
    """A bar of speedup per suite and method, with the range over the repeats, as PNG. Needs matplotlib."""
    require_matplotlib()
    from matplotlib.figure import Figure

    suites = _by_suite(results)
    methods = list(dict.fromkeys(r.method for r in results if r.method != "plain"))
    width = 0.8 / max(1, len(methods))
    figure = Figure(figsize=(max(6.0, 1.5 + 0.7 * len(suites) * (len(methods) + 1)), 4.2), layout="constrained")
    axes = figure.subplots()
    for i, method in enumerate(methods):
        found = [(x, r) for x, group in enumerate(suites.values()) for r in group if r.method == method]
        at = [x + (i - (len(methods) - 1) / 2) * width for x, _ in found]
        low, high = ([getattr(r, key) for _, r in found] for key in ("speedup_min", "speedup_max"))
        axes.bar(at, [r.speedup for _, r in found], 0.9 * width, label=method)
        axes.vlines(at, low, high, colors="black", linewidth=1)
        for x, top, (_, r) in zip(at, high, found, strict=True):
            axes.annotate(f"{r.speedup:.2f}", (x, max(top, r.speedup)), (0, 3), textcoords="offset points", ha="center")
    axes.axhline(1, color="black", linewidth=0.8, linestyle="--")
    axes.set_xticks(range(len(suites)), list(suites))
    axes.set_ylabel("tokens/s against plain decoding")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(y=0.12)
    r = results[0]
    most = "at most " * any(each.new_tokens is not None for each in results)
    axes.set_title(f"{r.model}, {r.numbers}, batch {r.batch}, {most}{r.max_tokens} new tokens", fontsize="medium")
    if methods:
        figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize="small")
    figure.savefig(path, dpi=150, format="png")
