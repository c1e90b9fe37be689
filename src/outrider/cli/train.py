"""`outrider train`: heads for a model of your own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli.options import Device, Dtype, Model, Reporter
from outrider.cli.output import new_console
from outrider.errors import ConfigError
from outrider.files import make_folder
from outrider.train.settings import ConversationSettings as Said
from outrider.train.settings import Eagle3Settings as Eagle
from outrider.train.settings import RecurrentSettings as Recurrent
from outrider.train.settings import Settings as Heads

LearningRate = Annotated[float, typer.Option(help="Highest learning rate.")]
Seed = Annotated[int, typer.Option(help="Of all that is drawn.")]

# of heads that learn from conversations
Run = Annotated[Path, typer.Argument(help="Folder of the run. One that is there goes on.")]
Conversations = Annotated[list[Path], typer.Argument(help="Files that `outrider train data` writes, or is writing.")]
Minutes = Annotated[float, typer.Option(min=0.01, help="In all; the learning rate falls in their last part.")]
Vocab = Annotated[int, typer.Option(help="Tokens that it can guess: the most frequent ones.")]
Depth = Annotated[int, typer.Option(help="Guesses in a row that are trained.")]
Length = Annotated[int, typer.Option(help="Tokens of a conversation, its last ones.")]
Batch = Annotated[int, typer.Option(help="Tokens per step, about.")]
Replay = Annotated[int, typer.Option(help="Times a batch is used before the next new one.")]
Start = Annotated[str, typer.Option(help="A head to begin from: folder or hub id.")]
Every = Annotated[float, typer.Option(min=0.01, help="Minutes between checkpoints and reports.")]
Export = Annotated[Path | None, typer.Option(help="Where the head goes. Default: OUTPUT/head.")]

train_app = typer.Typer(no_args_is_help=True, help="Train what drafts for a model of your own.")


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
    lr: LearningRate = Heads.lr,
    seed: Seed = Heads.seed,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the folder's checkpoint, which has the texts.")
    ] = False,
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
    console = new_console()
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
    seed: Seed = Said.seed,
) -> None:
    """Let a chat model write conversations, for heads and drafts that learn from what it says (Magpie)."""
    from outrider.train.conversations import read_prompts, write

    settings = Said(
        model=model, own=own, temperatures=tuple(temperature or Said.temperatures), max_tokens=max_tokens,
        turns=turns, batch=batch, seed=seed,
    )  # fmt: skip
    given = read_prompts(prompts or [])
    with Reporter() as reporter:
        count = write(output, tokens, settings, given, lambda done, _: reporter("writing", min(done, tokens), tokens))
    new_console().print(f"{count} conversations in {output}")


@train_app.command()
def eagle3(
    output: Run,
    conversations: Conversations,
    minutes: Minutes,
    model: Model = Eagle.model,
    vocab: Vocab = Eagle.vocab,
    taps: Annotated[
        list[int] | None, typer.Option(help="Layers whose inputs it sees. Default: 2, half way, behind the last.")
    ] = None,
    heads: Annotated[int, typer.Option(help="Of its attention; 0: as many as the model's.")] = Eagle.heads,
    depth: Depth = Eagle.depth,
    length: Length = Eagle.length,
    batch: Batch = Eagle.batch,
    train_head: Annotated[bool, typer.Option("--train-head", help="Its projection learns, too.")] = False,
    replay: Replay = Eagle.replay,
    lr: LearningRate = Eagle.lr,
    start: Start = "",
    seed: Seed = Eagle.seed,
    every: Every = 3.0,
    export: Export = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Train an EAGLE-3 head for a frozen model: --speculate eagle3:model=OUTPUT/head uses it."""
    from outrider.train.eagle3 import Trainer

    settings = Eagle(
        model=model, vocab=vocab, taps=tuple(taps or ()), heads=heads, depth=depth, length=length, batch=batch,
        train_head=train_head, replay=replay, lr=lr, start=start, seed=seed, dtype=dtype, device=device,
    )  # fmt: skip
    _run(Trainer, conversations, output, settings, minutes, every, export or output / "head")


@train_app.command()
def recurrent(
    output: Run,
    conversations: Conversations,
    minutes: Minutes,
    model: Model = Recurrent.model,
    vocab: Vocab = Recurrent.vocab,
    wide: Annotated[int, typer.Option(help="Width of its layer.")] = Recurrent.wide,
    depth: Depth = Recurrent.depth,
    length: Length = Recurrent.length,
    batch: Batch = Recurrent.batch,
    train_head: Annotated[
        bool, typer.Option("--train-head", help="It has a projection of its own; default: the model's.")
    ] = False,
    replay: Replay = Recurrent.replay,
    lr: LearningRate = Recurrent.lr,
    start: Start = "",
    seed: Seed = Recurrent.seed,
    every: Every = 3.0,
    export: Export = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Train a recurrent head for a frozen model: --speculate recurrent:model=OUTPUT/head uses it."""
    from outrider.train.recurrent import Trainer

    settings = Recurrent(
        model=model, vocab=vocab, wide=wide, depth=depth, length=length, batch=batch, train_head=train_head,
        replay=replay, lr=lr, start=start, seed=seed, dtype=dtype, device=device,
    )  # fmt: skip
    _run(Trainer, conversations, output, settings, minutes, every, export or output / "head")


def _run(
    kind: Any, conversations: list[Path], output: Path, settings: Any, minutes: float, every: float, folder: Path
) -> None:
    """Learn, and say at each checkpoint what was reached."""
    kind.check_export(folder)
    if folder.resolve() in (output.resolve(), (output / "states").resolve()):
        raise ConfigError(f"--export {folder} is where the run keeps what it needs; give another folder")
    with Reporter() as reporter:
        trainer = kind(conversations, output, settings, reporter)
    make_folder(folder, "the head's folder")  # where it cannot be, that is told before anything is learnt
    console, line = new_console(), None
    for line in trainer.run(minutes, every):
        if line["loss"] is None:
            console.print(f"{line['minutes']} min: it guesses much worse; back to the last state, at half the rate")
            continue
        right = " ".join(f"{share:.1%}" for share in line["right"])
        console.print(
            f"{line['minutes']} min, {line['tokens']:,} tokens, {line['read']:,} new: loss {line['loss']:.3f}, "
            f"right on held-out text: {right}, {line['tokens_a_forward']:.2f} tokens a forward"
        )
        trainer.export(folder)
    if line is None or line["loss"] is None:  # no time was left, or the last ones were given up
        trainer.export(folder)
    console.print(f"written to {folder}; use it with --speculate {trainer.method}:model={folder}")
