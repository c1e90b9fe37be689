"""`outrider train`: heads for a model of your own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from outrider.cli.options import Device, Dtype, Model, Reporter
from outrider.train.settings import Settings as Heads

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
