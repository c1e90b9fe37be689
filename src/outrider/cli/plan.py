"""`outrider plan`: what each method would give on a machine, before anything is downloaded."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from outrider.cli.options import Model, Quantization, given_options, read_ints
from outrider.cli.output import as_line, new_console, put_json, tell
from outrider.config import STORED
from outrider.errors import ConfigError
from outrider.plan import (
    ACCEPTANCE,
    DEVICES,
    LINKS,
    NEVER,
    SUITES,
    Device,
    Miss,
    Planner,
    Prediction,
    Shape,
    Timed,
    numbered,
    seen_in,
    share_within,
    traffic,
)
from outrider.plan import against as compared
from outrider.plan import published as seeds

COUNTED = "counted_collectives", "counted_bytes"
NO_LINE = "no line has a method with a plan and a fixed draft length"


def plan(
    asked: typer.Context,
    model: Model = "smollm2",
    *,
    device: Annotated[str, typer.Option(help="`here`: measured now; or one of a table, such as h100 or epyc-9654.")] = (
        "here"
    ),
    context: Annotated[str, typer.Option(help="Tokens of text, with commas.")] = "1024,32768",
    batch: Annotated[str, typer.Option(help="Sequences at a time, with commas.")] = "1,8",
    suite: Annotated[
        str, typer.Option(help="Traffic, with commas: chat, code, maths, summarise, edit, stories.")
    ] = "chat",
    acceptance: Annotated[
        Path | None, typer.Option(help="A results.jsonl of bench, of your own prompts, say, in place of --suite.")
    ] = None,
    draft: Annotated[str | None, typer.Option(help="The draft model; default: one of a tenth of the target.")] = None,
    quantization: Quantization = None,
    ranks: Annotated[
        str | None,
        typer.Option(
            help="Numbers of ranks, with commas: what one receives, a step. Under torchrun it is counted, too."
        ),
    ] = None,
    against: Annotated[Path | None, typer.Option(help="A results.jsonl of bench: how far off would this be?")] = None,
    published: Annotated[
        bool, typer.Option("--published", help="MagicDec's and TriForce's figures, predicted.")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="Plot the best speed-up over contexts and batches here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line, nothing else.")] = False,
) -> None:
    """Predict tokens a second of plain decoding and of the methods it knows: best draft length, memory, and who wins.

    It needs the model's config alone; its forwards are measured where `--device` is here and its weights are, too.
    Acceptance figures say whether they were measured, and on what, or assumed; `82% in 27%`: of drafted tokens, in the
    steps that draft at all.
    """
    if draft is not None and not draft.strip():
        raise ConfigError("--draft is empty; give a folder, a hub id or an embedded model, or leave it out")
    if published:
        _alone(asked, "published")
        theirs = [
            Miss(f"{p.where}, {p.context} tokens, {p.batch} at a time, k = {p.k}", p.speedup, p.predicted())
            for p in seeds()
        ]
        _compare(theirs, as_json, _console())
        return
    if ranks is not None:
        _alone(asked, "ranks", "model")
        _traffic(model, read_ints(ranks, "--ranks"), as_json)
        return
    if against is not None:
        _alone(asked, "against", "model", "device", "context", "draft", "quantization")
        list(numbered(against))  # what cannot be read is told before anything is measured
    contexts, batches = read_ints(context, "--context"), read_ints(batch, "--batch")
    if against is not None and len(contexts) > 1 and "context" in given_options(asked):
        raise ConfigError(f"--against takes one --context, for lines that do not say theirs; {context} are several")
    suites, rates = list(dict.fromkeys(name.strip() for name in suite.split(","))), None
    if acceptance is not None:
        if "suite" in given_options(asked):
            raise ConfigError("--acceptance has suites of its own; leave --suite out")
        if not (rates := seen_in(acceptance)):
            raise ConfigError(f"--acceptance {acceptance}: {NO_LINE}")
        suites = list(dict.fromkeys(name for _, name in rates))
    elif bad := [name for name in suites if name not in SUITES]:
        raise ConfigError(f"--suite {bad[0]!r} is unknown; valid: {', '.join(SUITES)}")
    if device != "here" and device not in DEVICES:
        raise ConfigError(f"--device {device!r} is unknown; valid: here, {', '.join(DEVICES)}")
    if quantization not in (None, *STORED):
        raise ConfigError(f"quantization {quantization!r} is unknown; valid: {', '.join(STORED)}")
    drawn = "" if output is None else _plottable(output)
    planner, limits = _planner(model, draft, quantization, device)
    console = _console()
    if against is not None:
        _compare(list(compared(against, planner, contexts[0])), as_json, console)
        return
    found = planner.table(list(ACCEPTANCE), suites, contexts, batches, rates)
    for name, limit in limits.items():
        if max(contexts) > limit:
            tell(f"{name} reads {limit} tokens: lines of more say what it would give if it read them")
    if as_json:
        for prediction in found:
            put_json(dataclasses.asdict(prediction) | {"within_context": prediction.context <= limits[model]})
    else:
        machine, about = planner.device, f"{planner.shape.weight_bytes / 1e9:.2f} GB of weights"
        console.print(
            f"{as_line(model)}: {about}; {device}: {machine.bandwidth / 1e9:.0f} GB/s, "
            f"{machine.arithmetic / 1e12:.2f} TFLOP/s as reached"
        )
        for name in suites:
            console.print(_table(name, [p for p in found if p.suite == name], planner))
        if not all(p.fits for p in found):
            console.print(f"!: more than the {machine.memory / 1e9:.1f} GB there are")
    if output is not None:
        _plot(found, output, drawn)


def _alone(asked: typer.Context, flag: str, *besides: str) -> None:
    """Raises ConfigError if options are given that are not read with this one."""
    if extra := [f"--{name}" for name in given_options(asked) if name not in (flag, "as_json", *besides)]:
        beside = f" but for {', '.join(f'--{name}' for name in besides)}" if besides else ""
        raise ConfigError(f"--{flag} stands alone{beside}: leave {', '.join(extra)} out")


def _planner(model: str, draft: str | None, quantization: str | None, device: str) -> tuple[Planner, dict[str, int]]:
    """What predicts, of shapes and, where it is `here`, a machine that are looked at now; each model's context."""
    from outrider.load import sizes

    asked = [(name, how) for name, how in ((model, quantization), (draft, None)) if name]  # drafts stay as they are
    known = [sizes(name) for name, _ in asked]
    shapes = [
        Shape.of(own.config).quantized(how) if how
        else Shape.of(own.config).stored(own.bits, own.experts) if own.bits else Shape.of(own.config, own.held)
        for (_, how), own in zip(asked, known, strict=True)
    ]  # fmt: skip
    machine = _measured() if device == "here" else DEVICES[device]
    timed = [_timed(name, how, machine) for name, how in asked] if device == "here" else []
    planner = Planner(shapes[0], machine, shapes[1] if draft else None, *timed)
    return planner, {name: own.config.context for (name, _), own in zip(asked, known, strict=True)}


def _traffic(model: str, ranks: list[int], as_json: bool) -> None:
    from outrider.load import sizes
    from outrider.parallel import launched

    config, started, found = sizes(model)[0], launched()[1], list[dict[str, Any]]()
    if started > 1 and ranks != [started]:
        raise ConfigError(
            f"--ranks {','.join(map(str, ranks))}, but torchrun has started {started}; give --ranks {started}"
        )
    for size in ranks:
        for mode in ("gather", "ordered"):
            llm, itemsize = None, config.itemsize
            if started > 1:
                from outrider.bench.ranks import counted
                from outrider.llm import LLM

                llm = LLM(model, tensor_parallel_mode=mode)
                itemsize = llm.runner.model.dtype.itemsize
            for rows in (1, 9):
                calls, received = traffic(config, size, mode, rows, rows, itemsize)
                seconds = {name: calls * link.start + received / link.bandwidth for name, link in LINKS.items()}
                found.append({"ranks": size, "mode": mode, "rows": rows, "collectives": calls, "bytes": received})
                found[-1] |= {f"{name}_seconds": seconds[name] for name in ("nvlink", "pcie")}
                if llm is not None:
                    found[-1] |= dict(zip(COUNTED, counted(llm, rows), strict=True))
    if as_json:
        for line in found:
            put_json(line)
        return
    also = ("collectives, counted", "bytes, counted") if started > 1 else ()
    table = Table("ranks", "mode", "rows", "collectives", "received", "NVLink", "PCIe", *also, box=SIMPLE)
    for line in found:
        times = [f"{1000 * line[f'{name}_seconds']:.2f} ms" for name in ("nvlink", "pcie")]
        about = [str(line[key]) for key in ("ranks", "mode", "rows", "collectives")]
        size_of = f"{line['bytes'] / 1e6:.2f} MB" if started == 1 else str(line["bytes"])
        table.add_row(*about, size_of, *times, *(str(line[key]) for key in COUNTED if key in line))
    _console().print(table)


def _console() -> Console:
    console = new_console()
    console.width = max(console.width, 120)  # piped, it would be 80
    return console


def _measured() -> Device:
    """This machine: the time of a product with one row, and with many, of more weights than caches hold."""
    import time

    import torch

    from outrider.engine import free_memory
    from outrider.ops import Linear

    n = 8192
    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    linear = Linear(torch.zeros(n, n, dtype=torch.bfloat16, device=where))

    def seconds(rows: int) -> float:
        x, times = torch.zeros(rows, n, dtype=torch.bfloat16, device=where), []
        for _ in range(4):
            began = time.perf_counter()
            linear(x)[0, 0].item()
            times.append(time.perf_counter() - began)
        return min(times)

    with torch.inference_mode():
        one, many = seconds(1), seconds(256)
    return Device(2 * n * n / one, 2 * n * n * 256 / many, float(free_memory(where)), 5e-6)


def _timed(name: str, quantization: str | None, machine: Device) -> Timed | None:
    """The model's forwards on this machine; None without its weights, or if they take more than half of its memory."""
    from outrider.bench.forwards import measure
    from outrider.find import find, stored_bytes
    from outrider.llm import LLM

    if not 0 < stored_bytes(find(name, weights=False)) <= machine.memory / 2:
        return None
    return measure(LLM(name, quantization=quantization, enable_prefix_caching=False))


def _table(suite: str, found: list[Prediction], planner: Planner) -> Table:
    table = Table(
        "context", "batch", "method", "k", "tokens/s", "speed-up", "memory", "right", box=SIMPLE, title=as_line(suite)
    )
    for column in table.columns:
        column.no_wrap = True
    cells: dict[tuple[int, int], list[Prediction]] = {}
    for p in found:
        cells.setdefault((p.context, p.batch), []).append(p)
    for (context, batch), own in cells.items():
        plain, held = planner.step("none", batch, context, NEVER, 0)
        memory = f"{held / 1e9:.1f} GB" + ("" if held <= planner.device.memory else "!")
        table.add_row(str(context), str(batch), "none", "", f"{plain:.0f}", "1.00", memory, "")
        best = max((p for p in own if p.fits), key=lambda p: p.speedup, default=None)
        for p in sorted(own, key=lambda p: -p.speedup):
            memory = f"{p.memory / 1e9:.1f} GB" + ("" if p.fits else "!")
            row = [p.method, str(p.k), f"{p.tokens_per_second:.0f}", f"{p.speedup:.2f}", memory]
            right = f"{p.chance:.0%}" + (f" in {p.found:.0%}" if p.found < 1 else "")
            table.add_row("", "", *row, f"{right}, {as_line(p.source)}", style="bold" if p is best else "")
    return table


def _compare(known: list[Miss], as_json: bool, console: Console) -> None:
    if not known:
        raise ConfigError(NO_LINE)
    if as_json:
        for miss in known:
            put_json(dataclasses.asdict(miss) | {"off": miss.off})
        return
    table = Table("measured on", "speed-up", "predicted", "off", box=SIMPLE)
    for miss in known:
        table.add_row(as_line(miss.name), f"{miss.measured:.2f}", f"{miss.predicted:.2f}", f"{miss.off:+.0%}")
    console.print(table)
    near, nearer = share_within(known, 0.2), share_within(known)
    console.print(f"within 15 %: {nearer:.0%} of {len(known)}; within 20 %: {near:.0%}")


def _plottable(path: Path) -> str:
    """The format of a plot by its name's end; png without one. Raises ConfigError for one that cannot be drawn."""
    from outrider.bench import report

    report.require_matplotlib()
    from matplotlib.backend_bases import FigureCanvasBase

    kind, valid = path.suffix.lstrip(".").lower() or "png", sorted(FigureCanvasBase.filetypes)
    if kind not in valid:
        raise ConfigError(f"--output {path}: plots are drawn as {', '.join(valid)}, not as {kind!r}")
    if (path.exists() and not path.is_file()) or not os.access(path.absolute().parent, os.W_OK | os.X_OK):
        raise ConfigError(f"--output {path} cannot be written; give the name of a file in a folder that can be")
    return kind


def _plot(found: list[Prediction], path: Path, kind: str) -> None:
    import matplotlib

    from outrider.files import replacing

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    contexts, batches = (sorted({getattr(p, name) for p in found}) for name in ("context", "batch"))
    best = [
        [
            max((p.speedup for p in found if (p.context, p.batch) == (context, batch) and p.fits), default=math.nan)
            for batch in batches
        ]
        for context in contexts
    ]
    figure, axes = plt.subplots()
    image = axes.imshow(best, origin="lower", aspect="auto")
    axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
    axes.set_yticks(range(len(contexts)), [str(context) for context in contexts])
    axes.set_xlabel("sequences at a time")
    axes.set_ylabel("tokens of text")
    figure.colorbar(image, label="best speed-up")
    with replacing(path) as partial:
        figure.savefig(partial, format=kind)
    plt.close(figure)
