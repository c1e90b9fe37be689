"""`python -m tools`: what makes our tables, enlarged models and reference models. Run it in the root of a clone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from outrider import cli
from outrider.bench.run import set_threads
from outrider.cli.bench import Output, bar, bench, exact
from outrider.cli.options import Device, Reporter, Threads, read_ints
from outrider.errors import ConfigError
from outrider.find import find
from outrider.load import open_source
from tools import docs as pages
from tools import kernels as speed
from tools import mixture as experts
from tools import peers  # noqa: F401  # adds its peers to those of `bench`
from tools.inflate import inflate as enlarge

app = typer.Typer(
    name="python -m tools", help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)
app.command(help="As `outrider bench`, with all peers.")(bench)
app.command(help="As `outrider bench exact`, with all peers.")(exact)

Data = Annotated[Path, typer.Option(envvar="OUTRIDER_DATA", help="Folder with the texts.")]
Corpus = Annotated[Path, typer.Option(help="Folder of the tokenised texts; made if it is not there.")]


@app.command()
def docs(
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 1 if a page is not current.")] = False,
) -> None:
    """Make the tables between the marks of README.md and docs/ again, from bench/results and the code."""
    changed = [page for page in pages.PAGES if pages.render(page) != page.read_text("utf-8")]
    for page in changed:
        print(page.relative_to(pages.ROOT))
        if not check:
            pages.write(page)
    if check and changed:
        raise typer.Exit(1)


@app.command()
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
    with bar() as show:
        enlarge(
            find(source), target, hidden_size=hidden_size, num_layers=layers, intermediate_size=intermediate_size,
            num_heads=heads, num_kv_heads=kv_heads, seed=seed,
            progress=lambda done, total: show("writing parameters", done, total),
        )  # fmt: skip
    size = sum(path.stat().st_size for path in target.glob("*.safetensors"))
    Console(highlight=False).print(f"{target}: {size / 1e9:.3g} GB of weights, the logits of {source}", soft_wrap=True)


@app.command()
def w8a8(
    source: Annotated[Path, typer.Argument(help="A folder that `outrider export` has written.")],
    target: Annotated[Path, typer.Argument(help="New or empty folder.")],
) -> None:
    """Round a checkpoint to int8, activations too, as vLLM runs it fastest on a CPU."""
    from tools.w8a8 import w8a8 as write

    write(source, target)


@app.command()
def permute(
    source: Annotated[str, typer.Argument(help="Llama checkpoint: folder, hub id or embedded model.")],
    target: Annotated[Path, typer.Argument(help="New or empty folder.")],
    seed: Annotated[int, typer.Option(help="Of the order.")] = 0,
) -> None:
    """Write a Llama with its channels in another order: the same function, other groups for whoever rounds it."""
    from tools.permute import permute as reorder

    reorder(find(source), target, seed)


@app.command()
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
    settings = speed.Settings(read_ints(rows, "--rows"), read_ints(keys, "--keys"), repeats=repeats)
    set_threads(threads)
    results = Output(output, speed.write, speed.plot, "kernels.png")
    with bar() as show:
        figures = speed.run(settings, show)
    print(speed.markdown(figures))
    results.write(figures)
    results.close(figures)


@app.command()
def soak(
    model: Annotated[str, typer.Argument(help="Any model with a tokenizer.")] = "tiny",
    minutes: Annotated[float, typer.Option(min=0.05, help="How long.")] = 30,
    speculate: Annotated[str, typer.Option(help="Method of the server, or its configuration in JSON.")] = "auto",
    users: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 8,
    requests: Annotated[int, typer.Option(min=1, help="Different requests.")] = 96,
    seed: Annotated[int, typer.Option(help="Of what is asked when, and cancelled.")] = 0,
) -> None:
    """Serve under mixed load, with cancels and bad requests; exit 1 for a wrong token, growing memory, or what is left.

    On Linux; needs the extras serve and grammar, and httpx.
    """
    from tools import soak as tool

    report = tool.soak(model, speculate, minutes, users, requests, seed, lambda line: print(line, flush=True))
    print(report)
    for fault in report.faults[:20]:
        print(fault)
    if report.faults:
        raise typer.Exit(1)


@app.command()
def mixture(
    layers: Annotated[int, typer.Option(help="Of 1.2 GB of bfloat16 weights each.")] = 2,
    rows: Annotated[str, typer.Option(help="Rows of a forward, with commas.")] = "1,2,4,8",
    repeats: Annotated[int, typer.Option(help="Rounds over all candidates; figures are medians.")] = 5,
    threads: Threads = None,
) -> None:
    """Measure experts of Qwen3-30B-A3B's shape in GB/s of those chosen, beside a streaming read and transformers."""
    set_threads(threads)
    print(experts.run(layers, read_ints(rows, "--rows"), repeats, ["bfloat16", "int8", "int4"]))


@app.command()
def reference(
    recipe: Annotated[str, typer.Argument(help="tiny, tiny-cpu, tiny-draft, toy, or a JSON file.")],
    output: Annotated[Path, typer.Argument(help="Folder of the run: checkpoint and log. A run that is there goes on.")],
    data: Data,
    corpus: Corpus = Path("models/train/data"),
    init: Annotated[str | None, typer.Option(help="Start from this model's weights.")] = None,
    teacher: Annotated[str | None, typer.Option(help="Learn this model's distribution, not the text.")] = None,
    tokenizer: Annotated[str, typer.Option(help="A model whose tokenizer to use, or `new` to train one.")] = "tiny",
    minutes: Annotated[
        float | None, typer.Option(min=0.01, help="End after so long; default: the recipe's tokens.")
    ] = None,
    export: Annotated[Path | None, typer.Option(help="At the end, write a Hugging Face folder here.")] = None,
    device: Device = "auto",
) -> None:
    """Train a reference model by a recipe. The learning rate falls in the last part of the tokens or of the minutes.

    SIGTERM or Ctrl-C stops with a checkpoint; the same command goes on from there.
    """
    from tools import data as texts
    from tools.reference import Recipe, Trainer

    console = Console(highlight=False, soft_wrap=True)
    settings = Recipe.read(recipe)
    with Reporter() as reporter:
        speaks = (
            texts.train_tokenizer(t.text for t in texts.texts(data)) if tokenizer == "new" else _tokenizer(tokenizer)
        )
        texts.prepare(corpus, data, speaks, reporter)
        trainer = Trainer(
            settings, output, corpus, speaks, init=init, teacher=teacher, device=device, progress=reporter
        )  # fmt: skip
    for line in trainer.run(minutes):
        speed = f"{line.rate:.0f} tokens/s  {line.left / 60:.0f} min left"
        held = "".join(f"  {name} {loss:.3f}" for name, loss in (line.held or {}).items())
        console.print(f"step {line.step}  {line.tokens / 1e6:.2f}M tokens  loss {line.loss:.3f}  {speed}{held}")
    if trainer.stopped:  # what is not whole is not exported
        console.print(f"stopped behind step {trainer.step}; the same command goes on from there")
        raise typer.Exit(130)
    console.print("held out: " + "  ".join(f"{name} {loss:.3f}" for name, loss in trainer.check().items()))
    if export is not None:
        trainer.export(export)
        console.print(f"written to {export}")


@app.command()
def perplexity(
    models: Annotated[list[str], typer.Argument(help="What `--model` takes. Of several each as it is stored.")],
    data: Data,
    windows: Annotated[int, typer.Option(min=2, help="Pieces of text in each domain.")] = 16,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a piece.")] = 512,
    threads: Threads = None,
) -> None:
    """Perplexity on held-out text, as Markdown: of one model as it may be rounded, or of several beside the first."""
    from tools import perplexity as reading

    set_threads(threads)
    with bar() as show:
        for row in reading.markdown(reading.measure(models, data, windows, length, show)):
            print(row, flush=True)


@app.command()
def evaluate(
    models: Annotated[list[str], typer.Argument(help="Targets to compare, the one of interest last.")],
    data: Data,
    draft: Annotated[list[str] | None, typer.Option(help="A target's draft model; repeatable, in their order.")] = None,
    corpus: Corpus = Path("models/train/data"),
    farthest: Annotated[int, typer.Option(min=1024, help="Longest context to look at, in tokens.")] = 128000,
    books: Annotated[int, typer.Option(min=1, max=5, help="Held-out books to read for the loss by position.")] = 2,
    page: Annotated[Path | None, typer.Option(help="Write the tables between this page's marks.")] = None,
) -> None:
    """Tables of what models can do: held-out loss, loss by position, recall, agreement with a draft model, samples."""
    from tools import data as texts
    from tools import evaluate as tables

    with Reporter() as reporter:
        texts.prepare(corpus, data, _tokenizer(models[0]), reporter)
        held = texts.read_corpus(corpus, "held")
        text = tables.report(models, draft or [], held, farthest, books, reporter)
    if page is not None:
        tables.write(page, text)
    else:
        print(text)


def _tokenizer(model: str) -> Any:
    if (found := open_source(model).tokenizer()) is None:
        raise ConfigError(f"{model} has no tokenizer; name a model that has one")
    return found


if __name__ == "__main__":
    cli.main(app)
