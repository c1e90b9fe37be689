"""GB/s of the linears and of attention by rows, beside a streaming read and what PyTorch has, in one run.

Linears are the layers of a 1.1B Llama (hidden 2048, MLP 5632), enough of them that no cache holds them; attention is of
its 32 query and 4 key-value heads of 64. Bytes are those of the weights, or of the keys and values, that a call must
read. All candidates take turns, repeat by repeat; figures are medians.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.bench.report import markdown_table, require_matplotlib
from outrider.bench.run import commit, hardware, versions
from outrider.config import SCHEMES, at_least
from outrider.errors import ConfigError
from outrider.files import write_text
from outrider.load import Progress
from outrider.ops import KEY_BLOCK, Linear, attend, native
from outrider.quantize import quantize

SHAPES = ((2560, 2048), (2048, 2048), (11264, 2048), (2048, 5632))  # (outputs, inputs) of one layer
HEADS, KV_HEADS, DIM = 32, 4, 64
STREAM = 2**28  # bytes of the streaming read
MOST_ROWS, MOST_KEYS = 2**14, 2**22
REST = 0.02  # seconds: PyTorch's threads, whose turn comes last, wait for more on a core of their own for some
Call = Callable[[int], Any]  # with a row count


@dataclass(frozen=True)
class Settings:
    """`layers` of linears; row counts; numbers of keys; `repeats` of every figure."""

    rows: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32, 64])
    keys: list[int] = field(default_factory=lambda: [1024, 4096, 16384, 65536, 131072])
    key_rows: list[int] = field(default_factory=lambda: [1, 8, 16])
    layers: int = 3
    repeats: int = 9

    def __post_init__(self) -> None:
        at_least(self, {"rows": 1, "keys": 1, "key_rows": 1, "layers": 1, "repeats": 1})
        for name, most in (("rows", MOST_ROWS), ("keys", MOST_KEYS)):
            if (value := max(getattr(self, name))) > most:
                raise ConfigError(f"{name} must be at most {most}, not {value}")


@dataclass(frozen=True)
class Figure:
    """`what` (linear, attention, stream) by `name` at so many rows and keys: bytes that must be read, and seconds."""

    what: str
    name: str
    rows: int
    keys: int
    nbytes: int
    seconds: float

    @property
    def rate(self) -> float:
        """GB/s."""
        return self.nbytes / self.seconds / 1e9


def run(settings: Settings, progress: Progress) -> list[Figure]:
    """All figures: the streaming read is measured along with every other."""
    figures = []
    with torch.inference_mode():
        calls, sizes = _linears(settings)
        for i, rows in enumerate(settings.rows):
            progress("linear", i, len(settings.rows))
            figures += _measure("linear", calls, sizes, rows, 0, settings.repeats)
        del calls
        for i, keys in enumerate(settings.keys):
            progress("attention", i, len(settings.keys))
            attention, nbytes = _attention(keys, max(settings.key_rows))
            for rows in settings.key_rows:
                figures += _measure("attention", attention, nbytes, rows, keys, settings.repeats)
    return figures


def _measure(
    what: str, calls: dict[str, Call], sizes: dict[str, int], rows: int, keys: int, repeats: int
) -> list[Figure]:
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 1):  # the first one warms up
        time.sleep(REST)
        for name, call in calls.items():
            began = time.perf_counter()
            call(rows)
            if repeat:
                seconds[name].append(time.perf_counter() - began)
    return [Figure(what, name, rows, keys, sizes[name], median(times)) for name, times in seconds.items()]


def _stream() -> tuple[dict[str, Call], dict[str, int]]:
    if native.kernels is None:
        memory = torch.zeros(STREAM // 8, dtype=torch.int64)
        return {"stream": lambda rows: memory.sum()}, {"stream": STREAM}
    block = native.memory(STREAM).zero_()
    threads = torch.get_num_threads()
    return {"stream": lambda rows: native.kernels.stream(block.data_ptr(), STREAM, threads)}, {"stream": STREAM}


def _linears(settings: Settings) -> tuple[dict[str, Call], dict[str, int]]:
    calls, sizes = _stream()
    shapes = SHAPES * settings.layers
    inputs = {k: torch.randn(max(settings.rows), k).bfloat16() for k in (2048, 5632)}

    def each(functions: list[tuple[int, Callable[[Tensor], Any]]]) -> Call:
        return lambda rows: [function(inputs[k][:rows]) for k, function in functions]

    def weight(n: int, k: int) -> Tensor:
        return torch.randn(n, k, dtype=torch.bfloat16)

    def packed(w: Tensor) -> Callable[[Tensor], Any]:
        reordered = torch.ops.mkldnn._reorder_linear_weight(w)
        return lambda x: torch.ops.mkldnn._linear_pointwise(x, reordered, None, "none", [], "")

    plain = [weight(n, k) for n, k in shapes]
    if native.runs(torch.bfloat16, torch.device("cpu")):
        halves = [Linear(w.half()) for w in plain]
        calls["float16"] = lambda rows: [linear(inputs[linear.in_features][:rows].half()) for linear in halves]
        sizes["float16"] = sum(linear.nbytes for linear in halves)
        for scheme, rounded in (("bfloat16", False), *((s, rounded) for s in SCHEMES for rounded in (False, True))):
            linears = [
                Linear(w if scheme == "bfloat16" else quantize(w, scheme, rounded), rounded=rounded) for w in plain
            ]
            name = f"{scheme} x int8" if rounded else scheme
            calls[name] = each([(linear.in_features, linear) for linear in linears])
            sizes[name] = sum(linear.nbytes for linear in linears)
    theirs = {"F.linear": each([(w.shape[1], partial(F.linear, weight=w)) for w in plain])}
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        theirs["oneDNN packed"] = each([(w.shape[1], packed(w)) for w in plain])
    return calls | theirs, sizes | dict.fromkeys(theirs, sum(w.nbytes for w in plain))


def _attention(keys: int, most: int) -> tuple[dict[str, Call], dict[str, int]]:
    calls, sizes = _stream()
    capacity = -(-(keys + most) // KEY_BLOCK) * KEY_BLOCK
    store = torch.randn(2, KV_HEADS, capacity, DIM).bfloat16()
    q = torch.randn(most, HEADS, DIM).bfloat16()

    def sdpa(rows: int) -> Tensor:
        visible = torch.arange(keys + rows) <= torch.arange(keys, keys + rows)[:, None]
        k, v = store[None, 0, :, : keys + rows], store[None, 1, :, : keys + rows]
        return F.scaled_dot_product_attention(q[:rows].transpose(0, 1)[None], k, v, visible, enable_gqa=True)

    calls["attend"] = lambda rows: attend(q[:rows], store, keys, None, None, DIM**-0.5)
    calls["SDPA"] = sdpa
    return calls, sizes | dict.fromkeys(("attend", "SDPA"), 2 * KV_HEADS * keys * DIM * 2)


def markdown(figures: list[Figure]) -> str:
    """A table per operation: GB/s by rows (and keys), and the time against that of the fewest rows."""
    out = []
    for what in ("linear", "attention"):
        found = [f for f in figures if f.what == what]
        names = list(dict.fromkeys(f.name for f in found))
        least = min(f.rows for f in found)
        first = {(f.name, f.keys): f.seconds for f in found if f.rows == least}
        head = (["keys"] if what == "attention" else []) + ["rows", *(f"{name} GB/s (time)" for name in names)]
        lines = []
        for keys, rows in dict.fromkeys((f.keys, f.rows) for f in found):
            by_name = {f.name: f for f in found if (f.keys, f.rows) == (keys, rows)}
            times = [f"{by_name[n].rate:.1f} ({by_name[n].seconds / first[n, keys]:.2f}x)" for n in names]
            start = [str(keys)] if what == "attention" else []
            lines.append([*start, str(rows), *times])
        against = f"Times are against {least} row{'s' * (least > 1)} of the same kernel and size."
        out += [f"### {what}", "", markdown_table(head, lines), "", against, ""]
    return "\n".join(out)


def write(figures: list[Figure], folder: Path) -> None:
    """results.jsonl and table.md, replacing earlier ones. Raises ConfigError if they cannot be written."""
    where = {"commit": commit(), "isa": native.active, **versions(), **hardware(torch.device("cpu"))}
    lines = [json.dumps(asdict(f) | {"gb_per_second": round(f.rate, 2)} | where) for f in figures]
    write_text(folder / "results.jsonl", "\n".join(lines) + "\n")
    cpu = f"{where['cpu']}, {where['threads']} threads, {where['isa']}, torch {where['torch']}"
    write_text(folder / "table.md", f"{markdown(figures)}\n{cpu}\n")


def plot(figures: list[Figure], path: Path) -> None:
    """GB/s by rows for the linears, by keys for attention, as PNG. Needs matplotlib."""
    require_matplotlib()
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(11, 4.2), layout="constrained")
    left, right = canvas.subplots(1, 2)
    for axes, what, label in ((left, "linear", "rows"), (right, "attention", "keys")):
        found = [f for f in figures if f.what == what]
        for key in dict.fromkeys((f.name, f.rows if what == "attention" else 0) for f in found):
            name, rows = key
            line = [f for f in found if f.name == name and (what == "linear" or f.rows == rows)]
            axes.plot(
                [getattr(f, label) for f in line], [f.rate for f in line], marker=".",
                label=f"{name}, {rows} rows" if rows else name,
            )  # fmt: skip
        axes.set(title=what, xlabel=label, ylabel="GB/s", ylim=(0, None))
        axes.set_xscale("log", base=2)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize="small")
    canvas.savefig(path, dpi=150, format="png")
