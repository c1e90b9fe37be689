"""The command line: one module per command. What a user did wrong is one line and exit code 2, never a traceback."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable

import typer

from outrider.cli.bench import bench_app
from outrider.cli.chat import chat
from outrider.cli.datastore import datastore_app
from outrider.cli.generate import generate
from outrider.cli.info import info
from outrider.cli.train import train_app
from outrider.errors import OutriderError

FULL = errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO

app = typer.Typer(
    name="outrider",
    help="Exact speculative decoding: language models decode faster without changing a single token.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command()(generate)
app.command()(chat)
app.add_typer(bench_app, name="bench")
app.add_typer(datastore_app, name="datastore")
app.add_typer(train_app, name="train")
app.command()(info)


def main(command: Callable[[], object] = app) -> None:
    """Entry point of `outrider`, and of other commands that end as it does."""
    try:
        try:
            command()
        except SystemExit:
            sys.stdout.flush()  # here, where it can be told that it fails
            raise
    except OutriderError as error:
        print(f"outrider: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        if error.errno not in FULL:
            raise
        print(f"outrider: {error.filename or 'the output'} cannot be written: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is left of it
        sys.exit(2)
