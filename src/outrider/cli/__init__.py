"""The command line: one module per command. What a user did wrong is one line and exit code 2, never a traceback.

Nothing here imports torch before a command runs: help, completion and mistakes in options answer at once.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import outrider
from outrider.cli.bench import bench_app
from outrider.cli.chat import chat
from outrider.cli.datastore import datastore_app
from outrider.cli.export import export, quantize
from outrider.cli.generate import generate
from outrider.cli.info import info
from outrider.cli.output import as_line
from outrider.cli.plan import plan
from outrider.cli.serve import serve
from outrider.cli.train import train_app
from outrider.errors import ConfigError, OutOfMemory, OutriderError, reason_of, typed

UsageError: Any = typer.BadParameter.__mro__[1]  # typer has its own copy of click, and does not show this class


class Group(TyperGroup):
    """Commands, none of which takes an option of one value twice: which of them was meant?"""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None and not ctx.resilient_parsing:
            parser = command.make_parser(typer.Context(command, info_name=name, parent=ctx))
            given = [p for p in parser.parse_args(list(rest))[2] if p.param_type_name == "option" and not p.multiple]
            if twice := [option for option in given if given.count(option) > 1]:
                raise ConfigError(f"{twice[0].opts[0]} is given twice; give it once")
        return name, command, rest


app = typer.Typer(
    name="outrider",
    cls=Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich cuts long names off where a terminal is narrow
    context_settings={"max_content_width": 120},
)


def _version(asked: bool) -> None:
    if asked:
        print(f"outrider {outrider.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it and exit.")] = (
        False
    ),
) -> None:
    """Exact speculative decoding: language models decode faster without changing a single token."""


app.command()(generate)
app.command()(chat)
app.command()(serve)
app.add_typer(bench_app, name="bench", cls=Group)
app.add_typer(datastore_app, name="datastore", cls=Group)
app.add_typer(train_app, name="train", cls=Group)
app.command()(export)
app.command()(quantize)
app.command()(info)
app.command()(plan)


def main(command: typer.Typer = app) -> None:
    """Entry point of `outrider`, and of other commands that end as it does."""
    code = 2
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, as by >&-
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115
    several = os.environ.get("WORLD_SIZE", "1") != "1"  # processes, which torchrun has started
    if several and os.environ.get("RANK", "0") != "0":
        from outrider.follow import join

        join()
    if several or os.getpid() == 1:  # the others are told, too; a container's first process hears only what it handles
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if isinstance(sys.stdin, io.TextIOWrapper):
        with contextlib.suppress(ValueError):  # somebody has read from it
            sys.stdin.reconfigure(encoding="utf-8")  # as files are read, wherever one is
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # not every terminal has every character
    try:
        code = command(standalone_mode=False) or 0
        sys.stdout.flush()  # here, where it can be told that it fails
    except UsageError as error:
        message = error.format_message()
        asks = f"; see {error.ctx.command_path} --help" if error.ctx else ""
        _say(message) if "\n" in message else _say(f"outrider: {as_line(message).rstrip('.')}{asks}")
    except OutriderError as error:
        _say(f"outrider: {as_line(error)}")
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except (MemoryError, RuntimeError) as error:
        if not isinstance(typed(error), OutOfMemory):
            raise
        _say("outrider: memory ran out; try a smaller model, context or batch")
    except BrokenPipeError:  # the reader of our output has gone
        code = 1
    except OSError as error:  # a full disk, no permission, a name too long: what the machine refuses is no bug of ours
        _say(f"outrider: {as_line(error.filename or 'the output')}: {reason_of(error)}")
    if several:
        with contextlib.suppress(Exception):  # a WORLD_SIZE that is none, which has been told, or torch half imported
            from outrider.parallel import dismiss

            dismiss()
    try:
        sys.stdout.flush()
    except OSError:  # what cannot be written need not be tried again at exit
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _say(line: str) -> None:
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)
