"""`outrider train`: make the reference models again, or better ones."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from outrider.cli.options import Device, Dtype, Model, Reporter
from outrider.load import find, read_tokenizer
from outrider.train.conversations import Settings as Said
from outrider.train.conversations import read_prompts, write
from outrider.train.eagle3 import Settings as Eagle
from outrider.train.eagle3 import Trainer as EagleTrainer
from outrider.train.medusa import Settings as Heads
from outrider.train.medusa import train

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
def data(
    output: Annotated[Path, typer.Argument(help="File of conversations, JSON lines. One that is there goes on.")],
    prompts: Annotated[
        list[Path] | None, typer.Argument(help="JSON lines with a prompt, question, instruction, turns or text.")
    ] = None,
    model: Model = Said.model,
    tokens: Annotated[int, typer.Option(min=1, help="Of answers, in all.")] = 1_000_000,
    own: Annotated[float, typer.Option(help="Share whose question the model writes, too.")] = Said.own,
    temperature: Annotated[
        list[float] | None, typer.Option(help="Of answers, drawn from those given. Default: 0, 0, 0.7, 1.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Of an answer; some get half of it.")] = Said.max_tokens,
    turns: Annotated[float, typer.Option(help="How often a conversation goes on.")] = Said.turns,
    batch: Annotated[int, typer.Option(help="Conversations at a time.")] = Said.batch,
    seed: Annotated[int, typer.Option(help="Of all that is drawn.")] = Said.seed,
) -> None:
    """Let a chat model write conversations, for heads and drafts that learn from what it says (Magpie)."""
    settings = Said(
        model=model, own=own, temperatures=tuple(temperature or Said.temperatures), max_tokens=max_tokens,
        turns=turns, batch=batch, seed=seed,
    )  # fmt: skip
    given = read_prompts(prompts or [])
    with Reporter() as reporter:
        count = write(output, tokens, settings, given, lambda done, _: reporter("writing", min(done, tokens), tokens))
    Console(highlight=False).print(f"{count} conversations in {output}")


@train_app.command()
def eagle3(
    output: Annotated[Path, typer.Argument(help="Folder of the run. One that is there goes on.")],
    conversations: Annotated[
        list[Path], typer.Argument(help="Files that `outrider train data` writes, or is writing.")
    ],
    minutes: Annotated[float, typer.Option(min=0.01, help="In all; the learning rate falls in their last part.")],
    model: Model = Eagle.model,
    vocab: Annotated[int, typer.Option(help="Tokens that it can guess: the most frequent ones.")] = Eagle.vocab,
    taps: Annotated[
        list[int] | None, typer.Option(help="Layers whose inputs it sees. Default: 2, half way, behind the last.")
    ] = None,
    heads: Annotated[int, typer.Option(help="Of its attention; 0: as many as the model's.")] = Eagle.heads,
    depth: Annotated[int, typer.Option(help="Guesses in a row that are trained.")] = Eagle.depth,
    length: Annotated[int, typer.Option(help="Tokens of a conversation, its last ones.")] = Eagle.length,
    batch: Annotated[int, typer.Option(help="Tokens per step, about.")] = Eagle.batch,
    train_head: Annotated[bool, typer.Option("--train-head", help="Its projection learns, too.")] = False,
    replay: Annotated[int, typer.Option(help="Times a batch is used before the next new one.")] = Eagle.replay,
    lr: Annotated[float, typer.Option(help="Highest learning rate.")] = Eagle.lr,
    seed: Annotated[int, typer.Option(help="Of all that is drawn.")] = Eagle.seed,
    every: Annotated[float, typer.Option(min=0.01, help="Minutes between checkpoints and reports.")] = 3.0,
    export: Annotated[Path | None, typer.Option(help="Where the head goes. Default: OUTPUT/head.")] = None,
    dtype: Dtype = "auto",
) -> None:
    """Train an EAGLE-3 head for a frozen model: --speculate eagle3:model=OUTPUT/head uses it."""
    settings = Eagle(
        model=model, vocab=vocab, taps=tuple(taps or ()), heads=heads, depth=depth, length=length, batch=batch,
        train_head=train_head, replay=replay, lr=lr, seed=seed, dtype=dtype,
    )  # fmt: skip
    console, folder = Console(highlight=False, soft_wrap=True), export or output / "head"
    with Reporter() as reporter:
        trainer = EagleTrainer(conversations, output, settings, reporter)
    for line in trainer.run(minutes, every):
        right = " ".join(f"{share:.1%}" for share in line["right"])
        console.print(
            f"{line['minutes']} min, {line['tokens']:,} tokens, {line['read']:,} new: loss {line['loss']:.3f}, "
            f"right on held-out text: {right}, {line['tokens_a_forward']:.2f} tokens a forward"
        )
        trainer.export(folder)
    console.print(f"written to {folder}; use it with --speculate eagle3:model={folder}")


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
