"""`outrider train`: make the reference models again, or better ones."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from outrider.cli.options import Device, Dtype, Model, Reporter
from outrider.train.settings import Settings as Heads

train_app = typer.Typer(no_args_is_help=True, help="Train the reference models, and heads for any model.")

Data = Annotated[Path, typer.Option(envvar="OUTRIDER_DATA", help="Folder with the texts.")]
Corpus = Annotated[Path, typer.Option(help="Folder of the tokenised texts; made if it is not there.")]


@train_app.command()
def reference(
    recipe: Annotated[str, typer.Argument(help="tiny, tiny-draft, toy, or a JSON file.")],
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
    """Train a model by a recipe. The learning rate falls in the last part of the tokens or of the minutes.

    SIGTERM or Ctrl-C stops with a checkpoint; the same command goes on from there.
    """
    from outrider.load import find, read_tokenizer
    from outrider.train import data as texts
    from outrider.train.reference import Recipe, Trainer

    console = Console(highlight=False, soft_wrap=True)
    settings = Recipe.read(recipe)
    with Reporter() as reporter:
        speaks = (
            texts.train_tokenizer(t.text for t in texts.texts(data))
            if tokenizer == "new"
            else read_tokenizer(find(tokenizer))
        )
        texts.prepare(corpus, data, speaks, reporter)
        trainer = Trainer(
            settings, output, corpus, speaks, init=init, teacher=teacher, device=device, progress=reporter
        )  # fmt: skip
    for line in trainer.run(minutes):
        speed = f"{line.rate:.0f} tokens/s  {line.left / 60:.0f} min left"
        held = "".join(f"  {name} {loss:.3f}" for name, loss in (line.held or {}).items())
        console.print(f"step {line.step}  {line.tokens / 1e6:.2f}M tokens  loss {line.loss:.3f}  {speed}{held}")
    console.print("held out: " + "  ".join(f"{name} {loss:.3f}" for name, loss in trainer.check().items()))
    if export is not None:
        trainer.export(export)
        console.print(f"written to {export}")


@train_app.command()
def medusa(
    output: Annotated[Path, typer.Argument(help="Folder of the heads.")],
    texts: Annotated[
        list[Path] | None, typer.Argument(help="Texts, JSON lines (.jsonl), .gz or .xz of them, or folders.")
    ] = None,
    model: Model = "tiny",
    heads: Annotated[int, typer.Option(help="Each guesses one token further ahead.")] = Heads.heads,
    layers: Annotated[int, typer.Option(help="Residual blocks of a head.")] = Heads.layers,
    sees_token: Annotated[bool, typer.Option(help="They see the last token; Medusa's own do not.")] = Heads.sees_token,
    own_projection: Annotated[bool, typer.Option(help="One per head; default: the model's own, shared.")] = False,
    windows: Annotated[int, typer.Option(help="Texts read, evenly spread over all.")] = Heads.windows,
    length: Annotated[int, typer.Option(help="Their tokens, at most.")] = Heads.length,
    generated: Annotated[float, typer.Option(help="Share of them that the model continues itself.")] = Heads.generated,
    steps: Annotated[int, typer.Option(help="Of the optimiser.")] = Heads.steps,
    batch: Annotated[int, typer.Option(help="Windows per step.")] = Heads.batch,
    lr: Annotated[float, typer.Option(help="Highest learning rate.")] = Heads.lr,
    seed: Annotated[int, typer.Option(help="Of all that is drawn.")] = Heads.seed,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the folder's checkpoint.")] = False,
    every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints and reports.")] = 50,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Train Medusa heads for a frozen model: --speculate medusa:model=OUTPUT uses them."""
    from outrider.train.medusa import train

    settings = Heads(
        model=model, heads=heads, layers=layers, sees_token=sees_token, own_projection=own_projection,
        windows=windows, length=length,
        generated=generated, steps=steps, batch=batch, lr=lr, seed=seed, dtype=dtype, device=device,
    )  # fmt: skip
    console = Console(highlight=False, soft_wrap=True)
    with Reporter() as reporter:

        def report(step: int, loss: float, accuracies: list[float]) -> None:
            reporter("training", step, steps)
            right = " ".join(f"{share:.1%}" for share in accuracies)
            console.print(f"step {step} of {steps}: loss {loss:.3f}, right on held-out text: {right}")

        train(texts or [], output, settings, resume=resume, every=every, report=report, progress=reporter)
    console.print(f"written to {output}; use it with --speculate medusa:model={output}")


@train_app.command()
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
    from outrider.load import find, read_tokenizer
    from outrider.train import data as texts
    from outrider.train import evaluate as tables

    with Reporter() as reporter:
        texts.prepare(corpus, data, read_tokenizer(find(models[0])), reporter)
        held = texts.read_corpus(corpus, "held")
        text = tables.report(models, draft or [], held, farthest, books, reporter)
    if page is not None:
        tables.write(page, text)
    else:
        print(text)
