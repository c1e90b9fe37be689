"""Methods x suites on one model: what is measured, in which order, against what.

Plain decoding is always the first method of every round, and the methods take turns at each batch of prompts, so that a
machine that drifts hits all alike. In each round a method begins anew and is warmed up before it is timed; what it
learns from a prompt serves the next. Speeds are medians over the rounds.
"""

from __future__ import annotations

import json
import math
import os
import platform
import resource
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import cache
from importlib.metadata import version
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import torch

import outrider
from outrider import drafters
from outrider.bench import peers
from outrider.bench.report import Difference, Result, Sample, complain, differs, repeated
from outrider.bench.suites import SUITES, Suite, load_suite
from outrider.config import MOST_LOGPROBS, SamplingParams, SpeculativeConfig, at_least
from outrider.errors import ConfigError, message_of
from outrider.files import processor
from outrider.llm import LLM, Drafting
from outrider.load import Progress
from outrider.model import Model
from outrider.outputs import behind_first

PLAIN = SpeculativeConfig()
WARM_UP_TOKENS = 8
MOST_THREADS = 1024


def check_threads(threads: int | None) -> None:
    """Raises ConfigError for a number of threads that no machine has."""
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise ConfigError(f"threads must be at least 1 and at most {MOST_THREADS}, not {threads}")


def set_threads(threads: int | None) -> None:
    """Compute with so many; None: as torch does. Raises as `check_threads`."""
    check_threads(threads)
    if threads is not None:
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class Conditions:
    """What every kind of run has. Raises ConfigError for what cannot be."""

    model: str = "tiny"
    dtype: str = "auto"
    quantization: str | None = None
    activations: str | None = None
    device: str = "auto"
    methods: list[SpeculativeConfig] = field(default_factory=list)  # beside plain
    max_tokens: int = 256
    repeats: int = 3
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    data: Path | None = None
    file: Path | None = None
    threads: int | None = None

    LEAST: ClassVar[dict[str, int]] = {"max_tokens": 2, "repeats": 1}

    def __post_init__(self) -> None:
        at_least(self, self.LEAST)
        check_threads(self.threads)
        assert named([PLAIN, *self.methods]) and self.params  # what they refuse, they refuse now

    @property
    def params(self) -> SamplingParams:
        """End of sequence is ignored: every run has exactly max_tokens new tokens (but for what `Suite.answered`)."""
        return SamplingParams(
            temperature=self.temperature, top_p=self.top_p, seed=self.seed, max_tokens=self.max_tokens, ignore_eos=True
        )


def load_llm(settings: Any, progress: Progress, **engine: Any) -> LLM:
    """The model of settings that have model, dtype, quantization, activations, device and threads."""
    s = settings
    set_threads(s.threads)
    own = {"dtype": s.dtype, "quantization": s.quantization, "activations": s.activations, "device": s.device}
    own["progress"] = progress
    own["enable_prefix_caching"] = False  # what one method has read is not to speed up the next
    return LLM(s.model, **own, **engine)


@dataclass(frozen=True)
class Settings(Conditions):
    """One benchmark run."""

    suites: list[str] = field(default_factory=lambda: ["stories"])
    prompts: int = 4  # per suite
    batch: int = 1
    peer: str | None = None  # NAME or NAME:WEIGHTS

    LEAST: ClassVar[dict[str, int]] = Conditions.LEAST | {"prompts": 1, "batch": 1}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.peer is not None:
            peers.check(self.peer, self.suites)
            if self.temperature > 0 or self.batch > 1:
                raise ConfigError("--peer compares greedy decoding of one prompt: use --temperature 0 and --batch 1")
            if "mixed" in self.suites:
                what = "a stream, whose time holds the reading of later prompts, and peers' does not"
                raise ConfigError(f"--suite mixed is {what}; leave out --peer")
        if self.file and "spec-bench" not in self.suites:
            raise ConfigError("--file is for --suite spec-bench; pass both")
        if not self.suites or not all(self.suites):
            raise ConfigError(f"a suite without a name, or a comma too many; valid: {', '.join(SUITES)}, mixed")
        unique("suite", self.suites)


def unique(what: str, names: list[str]) -> None:
    """Raises ConfigError if one is given twice."""
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"{what} {twice[0]} is given twice; each runs once, and plain always does")


def named(configs: list[SpeculativeConfig]) -> dict[str, SpeculativeConfig]:
    """Methods by their labels, in which paths are as long as tells them apart.

    Raises ConfigError for a wrong option, and for one that is given twice.
    """
    unique("method", [label(config, 0) for config in configs])
    found = {}
    for config in configs:
        alike = [other for other in configs if other is not config and label(other) == label(config)]
        labels = ((label(config, n), [label(other, n) for other in alike]) for n in count(1))
        found[next(own for own, others in labels if own not in others)] = config
    return found


def label(config: SpeculativeConfig, parts: int = 1) -> str:
    """A method's name in a table, such as `ngram k=8`: of paths so many parts, the last ones. 0: all that it says.

    Raises ConfigError for a wrong option.
    """
    if config.method == PLAIN.method:
        return "plain"
    options = {**config.options, "k": _k(config), **_rule(config)}
    if parts == 1 and isinstance(merged := options.get("drafters"), list):
        options["drafters"] = "+".join(str(each.get("method")) for each in merged)
    short = {key: "/".join(str(value).split("/")[-parts:]) for key, value in options.items()}
    return " ".join([config.method, *(f"{key}={value}" for key, value in short.items())])


def spoken(config: SpeculativeConfig) -> dict[str, Any]:
    """What a line says of a method: its options, its rule and its draft length, whether given or not."""
    own = {"method": config.method, "acceptance_method": config.acceptance_method, **config.options, **_rule(config)}
    return own | {"num_speculative_tokens": _k(config)}


def _rule(config: SpeculativeConfig) -> dict[str, Any]:
    """What the acceptance rule is, where that is not the default."""
    plain = SpeculativeConfig()
    names = ("acceptance_method", "posterior_threshold", "posterior_alpha")
    return {name: given for name in names if (given := getattr(config, name)) != getattr(plain, name)}


def _k(config: SpeculativeConfig) -> int | str:
    k, default = config.num_speculative_tokens, drafters.create(config).num_speculative_tokens
    return default if k is None else k


class PeerFailed(Exception):
    """Of one method: the others go on."""


def run(
    settings: Settings, progress: Progress | None = None, warn: Callable[[str], None] = complain
) -> Iterator[Result]:
    """Measure; results come as each suite is done, the peer's after all of ours.

    `progress(what, done, total)` hears what runs now, `warn` what a peer cannot do. Raises OutriderError's kinds before
    anything is measured.
    """
    report = progress or (lambda *_: None)
    suites = [load_suite(name, settings.prompts, settings.data, settings.file) for name in settings.suites]
    llm = load_llm(settings, report, max_num_seqs=settings.batch)
    llm.runner.progress = None  # a bar that moves while a long prompt is read would be part of its time
    methods = named([PLAIN, *settings.methods])
    prompts = {suite.name: suite.encode(llm) for suite in suites}
    params = {suite.name: _asked(settings.params, suite, llm) for suite in suites}
    for config in methods.values():  # what cannot run is known before the first hour is spent
        llm.speculative_config = config
        for suite in suites:
            for request in [r for ids in prompts[suite.name] for r in llm.engine.add(ids, params[suite.name])]:
                llm.engine.abort(request)
    context = max(len(each) for ids in prompts.values() for each in ids) + settings.max_tokens
    peer = peers.make(settings.peer, llm, settings.methods, context) if settings.peer else None
    kv_bytes: dict[str, int] = {}

    def parts(suite: Suite) -> list[list[list[int]]]:
        """What is asked at a time. Of a stream that is all: the engine takes as many as it may."""
        ids = prompts[suite.name]
        size = len(ids) if suite.stream else settings.batch
        return [ids[at : at + size] for at in range(0, len(ids), size)]

    drafting: dict[str, Drafting] = {}  # of this round, between a method's turns

    def measure(suite: Suite, method: str, ids: list[list[int]], first: bool) -> Sample:
        own = params[suite.name]
        if first:
            llm.speculative_config = methods[method]
            llm.generate(ids[: settings.batch], replace(own, max_tokens=min(WARM_UP_TOKENS, settings.max_tokens)))
            llm.speculative_config = methods[method]  # anew: of what it is to write it has just seen the beginning
            longest = max(map(len, prompts[suite.name])) + settings.max_tokens
            each = llm.runner.kv.nbytes(longest) + llm.engine.drafter.kv_bytes(longest)
            kv_bytes[method] = each * min(settings.batch, len(prompts[suite.name]))
        else:
            llm.drafting = drafting[method]
        found = sample(llm, ids, own)
        drafting[method] = llm.drafting
        return found

    for suite in suites:
        samples, _ = rounds(suite, list(methods), settings.repeats, parts(suite), measure, report)
        for name, passes in samples.items():
            yield result(
                settings, llm, suite, prompts[suite.name], passes, samples["plain"], method=name, engine="outrider",
                speculative_config=spoken(methods[name]),
                exactness=max(e for s in passes for e in s.exactness), kv_bytes=kv_bytes[name], notes=[],
                weight_bytes=_read(llm.runner.model, passes), new_tokens=written(samples, suite.ends(llm)),
            )  # fmt: skip
    if peer is None:
        return
    with closing(peer):
        lengths: list[int] = []  # of plain decoding's outputs, which a peer's are to have

        def measure_peer(suite: Suite, method: str, ids: list[list[int]], first: bool) -> Sample:
            if method == "plain":  # ours again, so that ratios compare what ran side by side
                ours = measure(suite, method, ids, first)
                lengths[:] = map(len, ours.tokens)
                return ours
            try:
                if first:
                    peer.begin(method)
                    peer.measure(method, [ids[0][::-1]], [WARM_UP_TOKENS])  # not what it is timed on
                return peer.measure(method, ids, lengths)
            except Exception as error:  # another's code: it raises what it likes
                raise PeerFailed(f"{method}: {message_of(error, 300)}") from error

        for suite in suites:
            names = ["plain", *peer.methods]
            samples, failed = rounds(suite, names, settings.repeats, parts(suite), measure_peer, report)
            left_out = [f"Left out, for it failed: {reason}" for reason in failed]
            for line in left_out:
                warn(f"{suite.name}: {line}")
            for name in list(samples)[1:]:
                yield result(
                    settings, llm, suite, prompts[suite.name], samples[name], samples["plain"], method=name,
                    engine=peer.name, speculative_config=peer.methods[name], exactness=None, kv_bytes=None,
                    notes=[peer.note, *left_out], weight_bytes=peer.weight_bytes,
                    new_tokens=written(samples, suite.ends(llm)),
                )  # fmt: skip


def _asked(params: SamplingParams, suite: Suite, llm: LLM) -> SamplingParams:
    """With what a suite asks for."""
    return replace(params, ignore_eos=not suite.ends(llm), structured_outputs=suite.structured)  # type: ignore[arg-type]


def _read(model: Model, passes: list[Sample]) -> int:
    """Bytes of weights that a forward of these passes has read."""
    chosen, forwards = sum(s.expert_bytes for s in passes), sum(s.forwards for s in passes)
    return model.expected_bytes(0) + round(chosen / max(1, forwards))


def written(samples: dict[str, list[Sample]], ends: bool) -> int | None:
    """How many tokens plain decoding wrote in a pass, if the model ends its answers."""
    return sum(map(len, samples["plain"][0].tokens)) if ends else None


def rounds(
    suite: Suite,
    methods: list[str],
    repeats: int,
    parts: list[list[list[int]]],
    measure: Callable[[Suite, str, list[list[int]], bool], Sample],
    report: Progress,
) -> tuple[dict[str, list[Sample]], list[str]]:
    """`repeats` times the methods in turn at each part: per method a sample of each time; why those left out failed."""
    samples: dict[str, list[Sample]] = {method: [] for method in methods}
    failed: list[str] = []
    for i in range(repeats):
        for all_of in samples.values():
            all_of.append(Sample())
        for at, part in enumerate(parts):
            for method in list(samples):
                if failed and len(samples) == 1:
                    continue  # plain is alone, to be compared with nothing
                what = f"{suite.name}, repeat {i + 1} of {repeats}: {method}"
                report(what, i * len(parts) + at, repeats * len(parts))
                try:
                    samples[method][-1] += measure(suite, method, part, at == 0)
                except PeerFailed as error:
                    del samples[method]
                    failed.append(str(error))
    report(suite.name, 1, 1)
    return samples, failed


def sample(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> Sample:
    """One pass over the prompts, together."""
    s, model = Sample(), llm.runner.model
    s.forwards, s.expert_bytes = -model.forwards, -model.expert_bytes
    outputs = llm.generate(prompts, params)
    times = [o.metrics["timing"] for o in outputs]
    s.first = [t["time_to_first_token"] for t in times]
    s.timed, s.seconds = behind_first(outputs)
    s.rates = [s.rate]
    if decode := sum(t["decode_seconds"] for t in times):  # requests share their steps, in a stream only some
        s.draft = s.seconds * sum(t["draft_seconds"] for t in times) / decode
        s.target = s.seconds * sum(t["target_seconds"] for t in times) / decode
    for output in outputs:
        spec = output.metrics["speculative_decoding"]
        s.tokens.append(output.token_ids)
        s.emitted += len(output.token_ids)
        s.steps += spec["num_spec_steps"]
        s.drafted += spec["num_draft_tokens"]
        s.lengths += Counter(spec["per_step_drafted"])
        s.accepted += spec["num_accepted_draft_tokens"]
        s.exactness.add(output.metrics["exactness"])
    s.forwards += model.forwards
    s.expert_bytes += model.expert_bytes
    return s


def compare(llm: LLM, prompts: list[list[int]], plain: list[list[int]], samples: list[Sample]) -> list[Difference]:
    """For each prompt that some sample continues differently, the first place, and plain decoding's odds there."""
    differences = []
    for i, (prompt, expected) in enumerate(zip(prompts, plain, strict=True)):
        got = next((s.tokens[i] for s in samples if s.tokens[i] != expected), None)
        if got is None:
            continue
        at = differs(expected, got)
        assert at is not None
        ours, theirs = (answer[at] if at < len(answer) else None for answer in (expected, got))
        if ours is None or theirs is None:
            differences.append(Difference(i, at, ours, theirs, None))
            continue
        llm.speculative_config = PLAIN
        (output,) = llm.generate(
            prompt + expected[:at], max_tokens=1, temperature=0, logprobs=MOST_LOGPROBS, ignore_eos=True
        )
        assert output.logprobs is not None
        odds = output.logprobs[0].top
        least = min(odds.values())  # of those that were asked for
        gap = odds.get(ours, least) - odds.get(theirs, -math.inf)  # a peer may have tokens of its own
        differences.append(Difference(i, at, ours, theirs, gap if math.isfinite(gap) else None))  # JSON has no infinity
    return differences


def result(
    settings: Settings,
    llm: LLM,
    suite: Suite,
    prompts: list[list[int]],
    samples: list[Sample],
    plain: list[Sample],
    **own: Any,
) -> Result:
    """The line of one method on one suite; `own` are the fields that only its runner knows."""
    s, model = settings, llm.runner.model
    rates, base = [x.rate for x in samples], [x.rate for x in plain]
    if not all(rates + base):  # the first forward is not timed
        raise ConfigError(f"suite {suite.name}: every answer ended in its first forward; give more tokens, or prompts")
    ratios = [rate / of for rate, of in zip(rates, base, strict=True)]
    pairs = [zip(x.rates, y.rates, strict=False) for x, y in zip(samples, plain, strict=True)]
    each = [[rate / of if rate and of else None for rate, of in pair] for pair in pairs]
    batches = [[ratio for ratio in batch if ratio] for batch in zip(*each, strict=True)]  # None: no time, that round
    drafted, seconds = sum(x.drafted for x in samples), sum(x.seconds for x in samples)
    lengths = sum((x.lengths for x in samples), Counter())
    shares: list[float | None] = [None] * 3
    if seconds and own["exactness"] is not None:  # a peer says nothing of that
        draft, target = sum(x.draft for x in samples) / seconds, sum(x.target for x in samples) / seconds
        shares = [draft, target, 1 - draft - target]
    differences = compare(llm, prompts, plain[0].tokens, samples)
    tie = 32 * torch.finfo(model.dtype).eps  # two roundings of a logit between 16 and 32, as the likeliest often are
    ties = sum(d.gap is not None and abs(d.gap) <= tie for d in differences)
    config = llm.checkpoint.path / "config.json"
    source = json.loads(config.read_text("utf-8")).get("outrider_inflated_from") if config.is_file() else None
    return Result(
        suite=suite.name, source=suite.source, model=s.model, inflated_from=source,
        dtype=str(model.dtype).removeprefix("torch."), quantization=s.quantization,
        activations=s.activations, device=str(model.device),
        temperature=s.temperature, top_p=s.top_p, seed=s.seed, batch=min(s.batch, len(prompts)), prompts=len(prompts),
        max_tokens=s.max_tokens,
        tokens_per_second=median(rates), repeats=rates, speedup=median(ratios),
        speedup_min=min(ratios), speedup_max=max(ratios),
        by_batch=[median(batch) for batch in batches if batch] or None,
        acceptance_length=sum(x.emitted for x in samples) / sum(x.steps for x in samples),
        draft_acceptance_rate=sum(x.accepted for x in samples) / drafted if drafted else None,
        draft_lengths=[lengths[n] for n in range(max(lengths) + 1)] if drafted else None,
        draft_share=shares[0], target_share=shares[1], rest_share=shares[2],
        time_to_first_token=median(t for x in samples for t in x.first),
        identical=not differences, differences=differences, near_ties=ties if s.temperature == 0 else None,
        repeated=repeated(samples[0].tokens), peak_rss_bytes=_peak_rss(), **provenance(model.device), **own,
    )  # fmt: skip


def _peak_rss() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def provenance(device: torch.device) -> dict[str, Any]:
    """Where, when and how a result came to be: the last fields of each JSON line."""
    return {
        "hardware": hardware(device), "versions": versions(), "commit": commit(),
        "command": shlex.join([*program(), *sys.argv[1:]]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }  # fmt: skip


def program() -> list[str]:
    """How this process was called: `outrider`, or a package's name behind `python -m`."""
    called = Path(sys.argv[0])
    return ["python", "-m", called.parent.name] if called.name == "__main__.py" else [called.name]


def versions() -> dict[str, str]:
    """Of what computed a result."""
    ours = {"outrider": outrider.__version__, "torch": torch.__version__, "transformers": version("transformers")}
    return ours | {"python": platform.python_version()}


def hardware(device: torch.device) -> dict[str, Any]:
    """What a result was measured on."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    load = os.getloadavg()[0]  # of the last minute, our own threads included: shows a machine that others use
    return {"cpu": processor(), "cores": os.cpu_count(), "threads": torch.get_num_threads(), "load": load, "gpu": gpu}


@cache
def commit() -> str:
    """Of the checkout this file is in, with `-dirty` if sources changed (not results, say); `unknown` without one.

    As this module is loaded: in a run of hours the checkout may move on, and what runs does not.
    """
    here = Path(__file__).resolve()

    def git(*ask: str) -> str:
        told = subprocess.run(["git", "-C", str(here.parent), *ask], check=True, capture_output=True, text=True)
        return told.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/src", ":/csrc", ":/tools")
        return git("rev-parse", "--short", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"  # installed, possibly into somebody else's checkout


commit()
