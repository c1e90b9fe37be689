"""What a model's forwards take on this machine: over their rows, and over the keys that they look at."""

from __future__ import annotations

import time
from statistics import median

import torch

from outrider.bench import overhead
from outrider.config import SamplingParams
from outrider.control import Curve
from outrider.draft import Draft
from outrider.kv import Entry, PagedKV, Plan
from outrider.llm import LLM
from outrider.plan import Timed
from outrider.runner import Runner, Slot
from outrider.sequence import Sequence

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 15, 17, 24, 32, 64, 128, 256)
EACH = (1, 2, 4, 6, 9, 17)  # rows of a sequence, with keys
SHORT, KEYS = 32, (4096, 32768)  # tokens of texts
TIMES = 5


def measure(llm: LLM) -> Timed:
    """Time forwards of random tokens behind random keys, in seconds; keys no further than the model's context."""
    runner = _bare(llm.runner)
    lengths = [min(n, runner.max_len - max(ROWS)) for n in KEYS]
    rows = Curve({n: _seconds(runner, SHORT, n) for n in ROWS})
    keys = {n: Curve() for n in EACH}
    for length in dict.fromkeys(lengths):
        for n in EACH:
            keys[n][length] = max(1e-9, _seconds(runner, length, n) - rows[n])
        for n in EACH:
            keys[n].setdefault(1, keys[n][length] / length)
    prompt = torch.randint(llm.runner.model.config.vocab_size, (SHORT,)).tolist()
    (plain,) = overhead.plain(llm, prompt, [1])
    return Timed(rows, keys, max(0.0, plain.step - rows[1]))


def _bare(runner: Runner) -> Runner:
    """The model with a cache of its own, to be filled without reading anything."""
    model = runner.model
    return Runner(model, PagedKV(model.config, model.dtype, model.device), runner.max_len)


def _seconds(runner: Runner, length: int, rows: int) -> float:
    """Of a forward of so many rows behind `length` tokens: median."""
    tokens = torch.randint(runner.model.config.vocab_size, (length + rows,)).tolist()
    seq, spent, kv = Sequence(tokens[: length + 1], SamplingParams(), 0), list[float](), runner.kv
    assert isinstance(kv, PagedKV)
    before = len(kv.slabs)
    kv.reserve(Plan([Entry(seq.id, 0, length, 0)]))
    for slab in kv.slabs[before:]:
        for layer in slab:  # pages that nobody wrote are one and the same
            layer.normal_()
    runner.slots[seq.id] = Slot(tokens[:length], length)
    for _ in range(TIMES):
        began = time.perf_counter()
        runner.extend([seq], [Draft.chain(tokens[length + 1 :])]).flat[0, 0].item()
        spent.append(time.perf_counter() - began)
    runner.free(seq)
    return median(spent[1:])
