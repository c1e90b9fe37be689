"""Chooses how to draft, per sequence and step: every guess competes for rows, and who costs time to ask must earn it.

`{"method": "auto"}` draws on `suffix` (which finds what `ngram` would); on `rest` with the `datastore` given, or else
with those of the target's tokenizer that are embedded or lie in its folder; on the heads and draft models that come
with it, lie there or are given as `model`, and, on a CPU, an embedded recurrent head that fits; on `recycle` for
targets so large that its look at each row's logits is nothing; on long texts on the target itself through few keys.
`drafters` names others instead.

The guesses of cheap sources (`Drafter.cheap`) make one trie per sequence. Each node has a probability to survive,
learnt for those who guess it and those who contradict, how sure they are together and the depth, over all requests and
in this one, and the nodes that bring most tokens per second get rows (control.py). Sources that run a model are asked
where what they add to that is expected to pay for their time, for the sequences where it does.

What cheap sources would have guessed is compared with the text whether it was drafted or not, so that learning about
them costs no row; the others are asked again now and then, out of each sequence's account.
"""

from __future__ import annotations

import hashlib
import logging
import math
import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from outrider import drafters
from outrider.config import MOST_NODES, SamplingParams, option
from outrider.control import Asked, Beliefs, Guess, Look, Model, Picked, Text
from outrider.costs import Costs, Learnt, cache_file
from outrider.draft import Draft, Verdict
from outrider.errors import ConfigError, OutriderError
from outrider.files import processor
from outrider.find import ASSETS, companions, find, heads, kind_of, stores
from outrider.ops import Graphs, native
from outrider.runner import Output, Runner
from outrider.sequence import Sequence
from outrider.speculate import Drafter

log = logging.getLogger(__name__)
SUFFIX = {"method": "suffix", "tree": True, "suffix_decoding_max_spec_factor": 2.0}  # how far to go is ours to say
STORE = {"method": "rest", "tree": True}
UNLIKELY = 0.05  # guesses of heads below it are worth no row anywhere, and none is gone on from
HEAVY = 2**30  # bytes of weights from which recycling, some 0.2 ms a step, costs nothing to speak of
EVERY = 8  # steps of which one is looked at, at least, however long that was in vain
IN_VAIN = 2  # steps looked at in vain, at least, for each that is rested after the next
WORTH_IT = 2.0  # times its own time must a look promise to save: it takes more than that, of caches and of Python
LAST = 0.1  # share of the last look in what looks take and bring as a rule
LONG = 4096  # tokens of a text from which the target is asked to guess through few keys
ALL_ROWS = 512  # nodes of all sequences together
# whose forwards are measured first, the most telling ones, for so many seconds, behind so many tokens
ROWS = (1, 8, 2, 16, 4, 32, 17, 6, 12, 33, 3, 24, 5, 9, 48)
MEASURING, READ = 1.0, 32


@dataclass
class Source:
    """One drafter to choose from, and, if it runs a model, what asking it takes."""

    name: str
    drafter: Drafter
    bit: int
    rounds: Learnt = field(default_factory=Learnt)  # over sequences: seconds a token of a chain, or of a whole tree
    reading: float = 0.0  # seconds a token of text that it has not read
    tree: bool = False  # whether its drafts have branches: then their size is its own affair
    largest: int = 0  # tree that was asked for
    beyond: float = 0.0  # riders
    least: int = 0  # length of the texts that it is for
    told: Model | None = None  # what `model` said, until something is measured

    def model(self, most: int) -> Model:
        """What asking it for up to so many sequences takes."""
        if self.told is None or len(self.told[-1]) < most:
            own = min(self.drafter.num_speculative_tokens, MOST_NODES)
            rounds = self.rounds.over(1, most) if self.rounds else [0.0] * most
            self.told = self.bit, own, self.least, bool(self.rounds), self.reading, self.beyond, self.tree, rounds
        return self.told


@dataclass
class Auto(Drafter):
    """Lets all sources compete."""

    num_speculative_tokens: int = option(32, "most nodes of a draft")
    model: str = option("", "a draft model or heads to choose from, beside those that come with the target")
    datastore: str = option(
        "", "a file made by `outrider datastore build`, for method rest, in place of those that fit"
    )
    drafters: list[Any] = field(
        default_factory=list, metadata={"help": "what to choose from instead: a speculative_config each, in JSON"}
    )

    def __post_init__(self) -> None:
        if not isinstance(self.drafters, (list, tuple)):
            raise ConfigError("method auto: drafters is a list such as [{'method': 'ngram'}, {'model': ...}]")
        self.given = [*self.drafters] or [SUFFIX]
        self.given += [{**STORE, "datastore": self.datastore}] if self.datastore else []
        self.parts = [drafters.inner("auto", own) for own in self.given]
        asked = [*self.parts]
        for part in asked:  # a merge asks its own
            if isinstance(part, Auto):  # it would time steps in which nobody asked it
                raise ConfigError("method auto: none of its drafters can be auto, which chooses by itself: name others")
            asked += getattr(part, "parts", [])
        self.clock: Callable[[], float] = time.perf_counter
        self._start()

    def _start(self) -> None:
        names = [part.name for part in self.parts]
        self.sources = [
            Source(part.name if names.count(part.name) == 1 else f"{part.name} {i}", part, 1 << i)
            for i, part in enumerate(self.parts)
        ]
        self.dear = [source for source in self.sources if not source.drafter.cheap]
        self.watching = [part for part in self.parts if type(part).observe is not Drafter.observe]
        self.holding = [part for part in self.parts if type(part).kv_bytes is not Drafter.kv_bytes]
        self.awake = any([part.cheap for part in self.watching])  # someone learns from every step
        compiled = native.active != native.REFERENCE and len(self.parts) < 64  # bits of a number
        self.beliefs: Beliefs = (native.kernels.Beliefs if compiled else Beliefs)(sum(own.bit for own in self.dear))
        looks: list[Any] = [source.drafter.look(source.bit) for source in self.sources]
        self.looks: list[Look] = [look for look in looks if look]
        self.others = [own for own, look in zip(self.sources, looks, strict=True) if own.drafter.cheap and not look]
        self.costs, self.threads = Costs(), torch.get_num_threads()
        self.chains, self.vocab, self.chunk = False, 2**63, 2**63
        self.sent = self.spent = 0.0  # when the step's drafts were ready, and the seconds that they took, ...
        self.asking = self.charged = 0.0  # ... those of a model among them, and what is charged for it
        self.own = 0.0  # seconds that a look takes without a model, as a rule
        self.made = 0  # graphs, when a step's forward began
        self.vain = 0  # looks in vain, in a row
        self.left = self.rested = 0  # steps to rest, and rested since the last look
        self.later = False  # whether a model is to be asked in the next step
        self.resting: list[int] = []  # the sequences of that
        self.gain = 0.0  # seconds that the step's drafts promised to save, ...
        self.each = self.paid = 0.0  # ... of a token, and those that they took
        self.brought = 0.0  # seconds that drafts saved, as a rule, where they promised more than a look takes
        self.seconds = list[float]()

    def attach(self, target: Runner, load: Callable[[str], Runner]) -> None:
        """Attach every source; of those that were not asked for, the ones that fit."""
        for part in self.parts:
            part.attach(target, load)
        if not self.drafters and target.model.nbytes >= HEAVY:
            self.parts.append(drafters.inner("auto", {"method": "recycle"}))
        names, model = [self.model] if self.model else [], target.model
        if not self.drafters and target.path is not None and target.base is None:
            offered = companions(target.path) + ([] if self.datastore else stores(target.path))
            own = _place(self.model) if self.model else None  # which may be one of them, by another name
            names += [name for name in offered if Path(name).resolve() != own]
            if native.runs(model.dtype, model.device):  # a GPU takes as long for a small head as that saves
                known = {Path(name).name for name in names}
                found = heads(model.config.hidden_size, model.config.vocab_size)
                names += [name for name in found if Path(name).name not in known]
        for name in names:
            try:
                kind = kind_of(name)
                given: dict[str, Any] = {"method": kind, "model": name}
                if kind == "rest":
                    given = {**STORE, "datastore": name}
                elif kind in ("eagle3", "recurrent"):
                    given["p_min"] = UNLIKELY
                part = drafters.inner("auto", given)
                part.attach(target, load)
                self.parts.append(part)
            except OutriderError as error:
                if name == self.model:
                    raise
                level = logging.DEBUG if Path(name).is_relative_to(ASSETS) else logging.INFO  # where it is for others
                log.log(level, "%s is no drafter for this target: %s", name, error)
        if not self.drafters and target.base is None and target.max_len >= 2 * LONG:
            part = drafters.inner("auto", {"method": "self"})
            with suppress(OutriderError):  # a cache that has no views
                part.attach(target, load)
                self.parts.append(part)
        self._start()
        for source in self.sources:
            source.least = LONG if source.name == "self" and not self.drafters else 0
        self.chains = not target.follows_paths  # another branch than the first would cost `bitwise`
        self.chunk, self.vocab = target.chunk, target.model.config.vocab_size
        if target.base is None:
            self.costs = Costs(cache_file(), _machine(target))
            if seconds := _forwards(target):
                self.costs.begin(seconds)

    def rests(self, seqs: list[int]) -> bool:
        """The longer looks were in vain, the more steps rest between them, as long as the same sequences run."""
        if not self.left or seqs != self.resting:
            self.left = 0
            return False
        self.left, self.rested = self.left - 1, self.rested + 1
        return True

    def propose(self, seqs: list[Sequence], k: int) -> list[Draft]:
        """One tree per sequence of at most k nodes, and the riders of who has some."""
        began, n, self.asking, self.charged, self.gain = self.clock(), len(seqs), 0.0, 0.0, 0.0
        lengths = [len(seq.tokens) for seq in seqs]
        seconds = self.costs.ladder(n, min(n * k, ALL_ROWS), sum(lengths))
        if seconds is not self.seconds:
            self.seconds = seconds
            self.beliefs.price(seconds)
        texts = [(seq.id, seq.tokens, seq.settled, seq.room) for seq in seqs]
        guesses, riders = self._cheap(seqs, min(k, len(seconds) - 1)) if self.others else ({}, {})
        models = [source.model(n) for source in self.dear]
        picked, asked = self.beliefs.choose(
            texts, self.looks, guesses, 0.0, k, self.chains, False, self.threads, models
        )
        self.later = asked is not None and self.rested > 0  # behind a rest heads have not seen what they go on from
        if asked is not None and not self.later:
            picked = self._dear(seqs, texts, asked, k, guesses, riders)
        if nodes := sum([len(own[0]) for own in picked]):
            self.each, self.paid = seconds[0] / n, seconds[nodes] - seconds[0] + self.asking
            self.gain = sum([own[3] for own in picked]) * self.each - self.paid
        drafts = [self._draft(own, riders.get(i)) for i, own in enumerate(picked)]
        self.sent, self.made = self.clock(), Graphs.made
        self.spent = self.sent - began
        return drafts

    def _cheap(self, seqs: list[Sequence], k: int) -> tuple[dict[int, list[Guess]], dict[int, Draft]]:
        """What those guess whom `Beliefs` does not ask itself."""
        guesses: dict[int, list[Guess]] = {}
        riders: dict[int, Draft] = {}
        for source in self.others if k > 0 else ():
            most = source.drafter.num_speculative_tokens
            who = [i for i, seq in enumerate(seqs) if self.beliefs.ask(seq.id, seq.room)]
            self._ask(source, seqs, who, min(k, most) if most > 0 else k, guesses, riders)
        return guesses, riders

    def _dear(
        self, seqs: list[Sequence], texts: list[Text], asked: Asked, k: int,
        guesses: dict[int, list[Guess]], riders: dict[int, Draft],
    ) -> list[Picked]:  # fmt: skip
        """What to verify, once a source that runs a model was asked."""
        number, who, length = asked
        source, made, drafted = self.dear[number], Graphs.made, -self.clock()
        self._ask(source, seqs, who, length, guesses, riders)
        drafted += self.clock()
        self.asking = drafted
        self._time(source, seqs, who, length, None if Graphs.made > made else drafted, riders)
        return self.beliefs.choose(texts, [], guesses, drafted, k, self.chains, True)[0]

    def _ask(
        self, source: Source, seqs: list[Sequence], who: list[int], k: int, guesses: dict[int, list[Guess]],
        riders: dict[int, Draft],
    ) -> None:  # fmt: skip
        """Enter a source's guesses."""
        if not who:
            return
        for i, guess in zip(who, source.drafter.propose([seqs[i] for i in who], k), strict=True):
            draft = guess.clip(seqs[i].room - 1, self.vocab)
            if draft.riders:
                riders[i], source.beyond = draft, float(draft.riders)
            source.tree = source.tree or (not source.drafter.cheap and not draft.is_chain)
            if n := len(draft.tokens) - draft.riders:
                guess_of = source.bit, draft.tokens[:n], draft.parents[:n], draft.trust or [0.5] * n
                guesses.setdefault(i, []).append(guess_of)

    def _draft(self, picked: Picked, riding: Draft | None) -> Draft:
        """What was picked, and the riders of who has some."""
        tokens, parents, who, _ = picked
        by = [self.sources[number].name for number in who]
        if riding is None:
            return Draft(tokens, parents, by=by) if tokens else Draft()
        first, start = riding.verifiable, len(tokens)
        parents += [parent - first + start if parent >= first else -1 for parent in riding.parents[first:]]
        return Draft(tokens + riding.tokens[first:], parents, riders=riding.riders, by=by + [""] * riding.riders)

    def _time(
        self, source: Source, seqs: list[Sequence], who: list[int], k: int, seconds: float | None,
        riders: dict[int, Draft],
    ) -> None:  # fmt: skip
        """What asking took: for what the source had to read, or for its guesses; None: nothing to learn from.

        That is charged, but no more than twice what it takes as a rule; and not where it read a text for the first
        time, which many tokens pay for.
        """
        lag, new, source.told = 0, False, None
        for i in who:
            beyond, length = riders[i].riders if i in riders else 0, len(seqs[i].tokens)
            lag += (own := self.beliefs.ran(seqs[i].id, source.bit, beyond, length))
            new = new or own == length
        if seconds is None:
            return
        size = 1 if source.tree else k
        if source.tree and k > source.largest:  # what was timed before was less
            source.rounds, source.largest = Learnt(), k
        usual = source.rounds.at(len(who)) * size if source.rounds else 0.0
        if lag > MOST_NODES // 4 * len(who):
            usual, each = usual + source.reading * lag, seconds / lag
            source.reading = 0.8 * source.reading + 0.2 * each if source.reading else each
        else:
            source.rounds.add(len(who), seconds / size)
        self.charged = 0.0 if new else min(seconds, 2 * usual or seconds)

    def observe(self, seqs: list[Sequence], verdicts: list[Verdict], output: Output) -> None:
        """Learn what the step cost and brought, and which guesses were right, drafted or not."""
        began, captured, came, rows, keys = self.clock(), Graphs.made > self.made, [], 0, 0
        took = began - self.sent
        for seq, verdict, draft in zip(seqs, verdicts, output.drafts, strict=True):
            rows, keys = rows + 1 + len(draft.tokens), keys + len(seq.tokens) - len(verdict.tokens)
            forced = len(draft.forced.intersection(verdict.path)) if draft.forced else 0
            came.append((seq.id, seq.tokens, len(verdict.path) - forced))
        if output.read <= self.chunk and not captured:  # else it was more than one forward
            self.costs.add(rows, keys, took, output.read, len(seqs))
        took, steps, self.rested = math.inf if output.read or captured else took, 1 + self.rested, 0
        self.beliefs.settle(came, rows, took, self.charged, steps)
        if self.gain > WORTH_IT * self.own:
            saved = sum([accepted for _, _, accepted in came]) * self.each - self.paid
            self.vain, self.brought = 0, self.brought + LAST * (saved - self.brought)
        else:
            self.vain += 1
        enough = max(IN_VAIN * self.own, self.brought)  # looks in vain take as long as one that is not saves
        stays = self.awake or self.later or not enough
        self.left = 0 if stays else min(EVERY - 1, int(self.vain * self.own / enough))
        self.resting = [seq.id for seq in seqs] if self.left else []
        for part in self.watching:
            part.observe(seqs, verdicts, output)
        own = max(0.0, self.spent - self.asking + self.clock() - began)
        self.own += LAST * (min(own, 2 * self.own or own) - self.own)  # a hiccup does not move it far

    def remember(self, text: list[int]) -> None:
        """Let all who can remember it."""
        for part in self.parts:
            part.remember(text)

    def forget(self, seq: Sequence) -> None:
        """Drop what is known of this sequence alone; keep the costs for the next run."""
        self.beliefs.forget(seq.id)
        for part in self.parts:
            part.forget(seq)
        self.costs.save()

    def kv_bytes(self, tokens: int) -> int:
        """What all sources hold together."""
        return sum([part.kv_bytes(tokens) for part in self.holding])


def _place(name: str) -> Path:
    """Where a model, a head or a store lies."""
    return (Path(name) if Path(name).suffix == ".store" else find(name)).resolve()


def _forwards(target: Runner) -> dict[int, float]:
    """Seconds of forwards by their rows, medians of five; of fewer rows, or once, where that would take long."""
    runner = Runner(target.model, target.kv)  # not the target itself, which would let others find these tokens
    read = max(1, min(READ, target.max_len - max(ROWS)))
    tokens = random.Random(0).choices(range(target.model.config.vocab_size), k=read + max(ROWS))
    seq = Sequence(tokens[:read], SamplingParams(max_tokens=max(ROWS)), seed=0)
    spent: dict[int, list[float]] = {}
    try:
        runner.extend([seq])
        until = time.perf_counter() + MEASURING
        for n in [n for n in 5 * ROWS if read + n <= target.max_len]:
            if (began := time.perf_counter()) < until:
                made = Graphs.made
                runner.extend([seq], [Draft.chain(tokens[read : read + n - 1])]).flat[0, 0].item()
                took = time.perf_counter() - began
                if Graphs.made > made:
                    until += took
                else:
                    spent.setdefault(n, []).append(took)
    except OutriderError as error:  # a cache of next to nothing
        log.info("forwards were not measured: %s", error)
    finally:
        runner.free(seq)
    return {n: median(times) for n, times in spent.items()}


def _machine(target: Runner) -> str:
    """What the costs depend on: the machine, the model's shape and the bytes of its weights, in a few characters."""
    model = target.model
    where = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else processor()
    what = repr(
        ("by texts", where, torch.get_num_threads(), torch.__version__, model.config, model.dtype, model.nbytes)
    )
    return hashlib.sha256(what.encode()).hexdigest()[:16]
