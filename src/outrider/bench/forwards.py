"""What a model's forwards take on this machine: over their rows, and over the keys that they look at."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch

from outrider.bench import overhead
from outrider.config import SamplingParams
from outrider.costs import Curve
from outrider.draft import Draft
from outrider.kv import Entry, PagedKV, Plan
from outrider.llm import LLM
from outrider.plan import Timed
from outrider.runner import Runner, Slot
from outrider.sequence import Sequence
from outrider.speculate import Drafter

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 15, 17, 24, 32, 64, 128, 256)
EACH = (1, 2, 4, 6, 9, 17)  # rows of a sequence, with keys
SHORT, KEYS = 32, (4096, 32768)  # tokens of texts
TIMES = 9
WRONG = 8  # nodes of the drafts by which the rest of a step, and of a drafted token, is measured


def measure(llm: LLM) -> Timed:
    """Time forwards of random tokens behind random keys, in seconds; keys no further than the model's context."""
    model = llm.runner.model
    runner = Runner(model, PagedKV(model.config, model.dtype, model.device), llm.runner.max_len)
    rows = Curve(_seconds(runner, SHORT, ROWS))
    keys = {n: Curve() for n in EACH}
    for length in dict.fromkeys(max(1, min(n, runner.max_len - max(EACH) - 1)) for n in KEYS):
        for n, seconds in _seconds(runner, length, EACH).items():
            keys[n][length] = max(1e-9, seconds - rows[n])
            keys[n].setdefault(1, keys[n][length] / length)
    prompt = torch.randint(model.config.vocab_size, (min(SHORT, runner.max_len // 2),)).tolist()
    most = min(overhead.STEPS + 2, runner.max_len - len(prompt))  # tokens
    (plain,) = overhead.plain(llm, prompt, [1], max_tokens=most)
    llm.engine.draft_with(_Wrong(), WRONG)
    (drafted,) = overhead.steps(llm, prompt, [1], max_tokens=most)
    llm.speculative_config = {"method": "self", "num_speculative_tokens": WRONG}
    (itself,) = overhead.steps(llm, prompt, [1], max_tokens=most)
    llm.speculative_config = None
    rest = [
        step.outside if step.outside is not None else max(0.0, step.step - passes * rows[1] - rows[n])
        for step, passes, n in ((plain, 0, 1), (drafted, 0, 1 + WRONG), (itself, WRONG, 1 + WRONG))
    ]
    rest[2] = max(0.0, rest[2] - rest[1]) / WRONG
    return Timed(rows, keys, *rest)


class _Wrong(Drafter):
    """Drafts what is hardly ever right, in no time."""

    def propose(self, seqs: list[Sequence], k: int) -> list[Draft]:
        return [Draft.chain([0] * k) for _ in seqs]


def filled(runner: Runner, length: int, seed: int = 0, host: bool = False) -> Sequence:
    """A sequence of random tokens of which the cache holds all but the last: random keys, on the host only if `host`.

    Pages of the host that nobody wrote are one and the same, and read in no time.
    """
    vocab = runner.model.config.vocab_size
    tokens = torch.randint(vocab, (length + 1,), generator=torch.Generator().manual_seed(seed)).tolist()
    seq = Sequence(tokens, SamplingParams(max_tokens=64), seed)
    kv: Any = runner.kv
    before = len(kv.slabs)
    kv.reserve(Plan([Entry(seq.id, 0, length, 0)]))
    for slab in kv.slabs[before:]:
        for layer in slab:
            if host or layer.is_cuda:
                layer.normal_()
    runner.slots[seq.id] = Slot(tokens[:length], length)
    return seq


def _seconds(runner: Runner, length: int, counts: tuple[int, ...]) -> dict[int, float]:
    """Of a forward of so many rows behind `length` tokens, the kernels' own where they compute all of it.

    Medians of rounds over all counts: what slows the machine for a while slows all.
    """
    model, seq = runner.model, filled(runner, length, host=True)
    spent: dict[int, list[float]] = {n: [] for n in counts}
    for _ in range(TIMES):
        for n in counts:
            began, native = time.perf_counter(), model.native_seconds
            runner.extend([seq], [Draft.chain([1] * (n - 1))]).flat[0, 0].item()
            whole, now = time.perf_counter() - began, model.native_seconds
            spent[n].append(whole if native is None or now is None else now - native)
    runner.free(seq)
    return {n: median(times[1:]) for n, times in spent.items()}
