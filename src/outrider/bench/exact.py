"""How many answers change when speculation is switched on, or when others are answered beside? Counted, per engine.

Each request is answered alone and plainly, then again with drafts, and again in company, with the same seed. An answer
that has another token anywhere up to its end counts as changed. Other engines are compared with themselves, never with
ours: their plain answers are theirs to choose.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from outrider.bench import peers, report
from outrider.bench.report import complain, differs
from outrider.bench.run import PLAIN, check_threads, load_llm, named, provenance, unique
from outrider.bench.suites import load_suite
from outrider.config import SamplingParams, SpeculativeConfig, at_least
from outrider.errors import ConfigError, message_of
from outrider.load import Progress

Answers = tuple[list[list[int]], int | None]  # tokens per prompt, and how many of them were drafted, if that is known


@dataclass(frozen=True)
class Settings:
    """One count. Raises ConfigError for what cannot be."""

    model: str = "smollm2"
    dtype: str = "auto"
    quantization: str | None = None
    activations: str | None = None
    device: str = "auto"
    methods: list[SpeculativeConfig] = field(default_factory=list)
    suite: str = "chat"
    prompts: int = 8
    max_tokens: int = 128
    temperatures: list[float] = field(default_factory=lambda: [0.0, 0.8])
    together: int = 16  # requests that run together
    seed: int = 0
    peers: list[str] = field(default_factory=list)
    data: Path | None = None
    file: Path | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        at_least(self, {"prompts": 1, "max_tokens": 2, "together": 2})
        check_threads(self.threads)
        assert named([PLAIN, *self.methods])  # what it refuses, it refuses now
        unique("peer", self.peers)
        if not self.temperatures:
            raise ConfigError("temperatures: give at least one, such as 0")
        if self.file and self.suite != "spec-bench":
            raise ConfigError("--file is for --suite spec-bench; pass both")
        for temperature in self.temperatures:
            assert self.params(temperature)  # what it refuses, it refuses now
        for peer in self.peers:
            peers.check(peer, [self.suite])

    def params(self, temperature: float) -> SamplingParams:
        """Of every request: the seed is the same for all, on and off."""
        return SamplingParams(temperature=temperature, seed=self.seed, max_tokens=self.max_tokens)


@dataclass(frozen=True)
class Row:
    """One JSON line: what an engine's answers are compared with its own plain ones, each given alone."""

    engine: str
    drafts: str  # the method, or `none`
    together: int  # requests that ran together
    temperature: float
    prompts: int
    changed: list[int] | None  # first token that differs, of each answer that changed; None: the engine failed
    accepted: int | None  # draft tokens in all answers; None = not known
    tokens: int  # of all these answers
    failed: str | None
    suite: str
    source: str
    max_tokens: int
    seed: int
    model: str
    dtype: str
    exactness: str | None  # as the engine states it
    notes: list[str]
    hardware: dict[str, Any]
    versions: dict[str, str]
    commit: str
    command: str
    date: str


def run(settings: Settings, progress: Progress | None = None, warn: Callable[[str], None] = complain) -> Iterator[Row]:
    """Count; rows come as they are known, ours first. `warn` hears of an engine that failed, whose row says why."""
    s, tell = settings, progress or (lambda *_: None)
    suite = load_suite(s.suite, s.prompts, s.data, s.file)
    llm = load_llm(s, tell, max_num_seqs=s.together)
    prompts, ends = suite.encode(llm), set(llm.runner.model.config.eos)
    methods = named(s.methods)
    for config in methods.values():  # what cannot run is known before anything is measured
        llm.speculative_config = config

    def cut(tokens: list[int]) -> list[int]:
        return tokens[: next((i + 1 for i, token in enumerate(tokens) if token in ends), None)]

    def ours(method: str, together: int, temperature: float) -> Answers:
        llm.speculative_config = methods.get(method, PLAIN)
        groups = [prompts[at : at + together] for at in range(0, len(prompts), together)]
        params = replace(s.params(temperature), structured_outputs=suite.structured)  # type: ignore[arg-type]
        outputs = [output for group in groups for output in llm.generate(group, params)]
        accepted = sum(output.metrics["speculative_decoding"]["num_accepted_draft_tokens"] for output in outputs)
        return [output.token_ids for output in outputs], accepted

    def rows(
        engine: str,
        ways: list[tuple[str, int]],
        answer: Callable[[str, int, float], Answers],
        exactness: Callable[[], str | None],
        notes: Callable[[], list[str]],
    ) -> Iterator[Row]:
        for i, temperature in enumerate(s.temperatures):
            base: list[list[int]] | None = None
            for done, (drafts, together) in enumerate([("none", 1), *ways]):
                tell(f"{engine}, {drafts}, {together} at a time, T = {temperature:g}",
                     i * (1 + len(ways)) + done, len(s.temperatures) * (1 + len(ways)))  # fmt: skip
                changed, accepted, found, failed = None, None, list[list[int]](), None
                try:
                    tokens, accepted = answer(drafts, together, temperature)
                    found = [cut(each) for each in tokens]
                    base = found if base is None else base
                    changed = [at for at in map(differs, base, found) if at is not None]
                except Exception as error:
                    if engine == "outrider":
                        raise
                    failed = message_of(error, 300)
                    warn(f"{engine}, {drafts}, {together} at a time, T = {temperature:g}: {failed}")
                if together > 1 or drafts != "none" or failed:
                    yield Row(
                        engine=engine, drafts=drafts, together=together, temperature=temperature, prompts=len(prompts),
                        changed=changed, accepted=accepted, tokens=sum(map(len, found)), failed=failed,
                        suite=suite.name, source=suite.source, max_tokens=s.max_tokens, seed=s.seed, model=s.model,
                        dtype=str(llm.runner.model.dtype).removeprefix("torch."), exactness=exactness(), notes=notes(),
                        **provenance(llm.runner.model.device),
                    )  # fmt: skip
                if base is None:  # nothing to compare with
                    break

    together = min(s.together, len(prompts))  # more are not there
    company = [(name, together) for name in ("none", *methods)] if together > 1 else []
    own = [*((name, 1) for name in methods), *company]
    context = max(map(len, prompts)) + s.max_tokens
    made = [peers.make(spec, llm, s.methods, context) for spec in s.peers]  # what it needs it loads when it is asked
    each = [[*((name, 1) for name in [*peer.methods][1:]), *company[:1] * peer.batches] for peer in made]
    if idle := [spec for spec, ways in zip(["outrider", *s.peers], [own, *each], strict=True) if not ways]:
        raise ConfigError(
            f"nothing would be compared with the plain answers of {idle[0]}: give a method that it has, such as"
            " --speculate ngram, or, where it runs requests together, more --prompts; or leave it out"
        )
    yield from rows("outrider", own, ours, lambda: llm.exactness, list)
    for spec, ways in zip(s.peers, each, strict=True):
        with closing(made.pop(0)) as peer:
            plain = next(iter(peer.methods))

            def theirs(
                method: str, together: int, temperature: float, peer: peers.Peer = peer, plain: str = plain
            ) -> Answers:
                name = plain if method == "none" else method
                return peer.answers(name, prompts, together, s.max_tokens, temperature, s.seed)

            def notes(peer: peers.Peer = peer) -> list[str]:
                return [note] if (note := getattr(peer, "note", "")) else []

            yield from rows(spec, ways, theirs, lambda: None, notes)


# --- how it is shown --------------------------------------------------------------------------------------------------

HEADER = ("engine", "drafts", "together", "T", "answers that change", "first at token", "tokens that were drafted")


def cells(row: Row) -> list[str]:
    """A row under HEADER."""
    share, first = "failed", "-"
    if row.changed is not None:
        share = f"{len(row.changed)} of {row.prompts}"
        first = f"{min(row.changed)}, median {median(row.changed):.0f}" if row.changed else "-"
    drafts = row.drafts.removeprefix(f"{row.engine} ")
    kept = "-" if row.accepted is None or row.drafts == "none" else f"{row.accepted:,} of {row.tokens:,}"
    return [row.engine, drafts, str(row.together), f"{row.temperature:g}", share, first, kept]


def remarks(rows: list[Row]) -> list[str]:
    """What stands below the table."""
    r, h = rows[0], rows[0].hardware
    others = dict.fromkeys((x.commit, x.date[:10]) for x in rows if x.commit != r.commit)  # of lines put together
    more = "".join(f"; ({commit}), {date}" for commit, date in others)
    stated = ", ".join(dict.fromkeys(x.exactness for x in rows if x.exactness))
    lines = [
        f"{r.model}, {r.dtype}; {r.prompts} requests of suite {r.suite} ({r.source}), answers of at most "
        f"{r.max_tokens} tokens, seed {r.seed}. Each engine is compared with its own plain answers, given alone.",
        f"{h['gpu'] or h['cpu']}, {h['threads']} threads; outrider {r.versions['outrider']} ({r.commit})"
        f"{f', exactness {stated}' if stated else ''}, {r.date[:10]}{more}.",
    ]
    failures = [f"{x.engine}, {x.drafts}, T = {x.temperature:g} failed: {x.failed}" for x in rows if x.failed]
    return lines + list(dict.fromkeys([*failures, *(note for x in rows for note in x.notes)]))


def read(path: Path) -> list[Row]:
    """Rows from JSON lines."""
    return [Row(**json.loads(line)) for line in path.read_text("utf-8").splitlines()]


def plot(rows: list[Row], path: Path) -> None:
    """A bar per row, the share of answers that change, as PNG. Needs matplotlib."""
    report.require_matplotlib()
    from matplotlib.figure import Figure

    shown = [row for row in rows if row.changed is not None]
    figure = Figure(figsize=(8.0, 1.0 + 0.3 * len(shown)), layout="constrained")
    axes = figure.subplots()
    names = [", ".join([*dict.fromkeys(cells(row)[:2]), f"{row.together} together", f"T = {row.temperature:g}"])
             for row in shown]  # fmt: skip
    bars = axes.barh(range(len(shown)), [len(row.changed or ()) / row.prompts for row in shown])
    axes.bar_label(bars, [cells(row)[4] for row in shown], padding=3)
    axes.set_yticks(range(len(shown)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15)
    axes.set_xlabel("share of answers that change")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150, format="png")
