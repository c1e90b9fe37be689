"""`outrider datastore`: build and inspect the stores that the method `rest` copies from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from outrider.cli.options import Model, Reporter
from outrider.cli.output import new_console
from outrider.errors import ConfigError

datastore_app = typer.Typer(no_args_is_help=True, help="Build and inspect the stores that method rest copies from.")


@datastore_app.command()
def build(
    output: Annotated[Path, typer.Argument(help="The store: one file, replaced if it exists.")],
    paths: Annotated[
        list[Path],
        typer.Argument(help="Texts, JSON lines (also of `outrider train data`), .gz or .xz of them, folders."),
    ],
    model: Model = "tiny",
    field: Annotated[
        str | None, typer.Option(help="Of JSON lines. Default: text, content, or prompt with completion.")
    ] = None,
    suffix: Annotated[
        list[str] | None, typer.Option(help="Take such files from folders; repeatable. Default: texts and code.")
    ] = None,
    shard_tokens: Annotated[int, typer.Option(min=1, help="Sorted at once: about 30 bytes of memory each.")] = 2**26,
) -> None:
    """Build a store from texts, with the tokenizer of the model that will use it."""
    from outrider import datastore
    from outrider.load import open_source

    if (tokenizer := open_source(model).tokenizer()) is None:
        raise ConfigError(f"{model} has no tokenizer; name a model that has one with --model")
    with Reporter() as reporter:
        store = datastore.build(
            paths, tokenizer, output, model=model, field=field, suffixes=suffix, shard_tokens=shard_tokens,
            progress=reporter,
        )  # fmt: skip
    header = store.header
    size = f"{header['documents']} documents, {header['tokens']} tokens, {store.nbytes / 2**20:.1f} MiB"
    new_console().print(f"{output}: {size}; use it with --speculate rest:datastore={output}")


@datastore_app.command()
def info(
    store: Annotated[Path, typer.Argument(help="A file that `outrider datastore build` made.")],
    model: Annotated[str | None, typer.Option(help="Say whether the store fits this model.")] = None,
) -> None:
    """What a store holds, whose tokenizer made it, and whether it fits a model."""
    from outrider import datastore
    from outrider.load import open_source

    opened = datastore.Store(store)
    header, table = opened.header, Table(show_header=False, box=None)
    table.add_row("documents", str(header["documents"]))
    table.add_row("tokens", str(header["tokens"]))
    table.add_row("bytes", f"{opened.nbytes} in {len(header['shards'])} shards")
    made_by = (header["fingerprint"] or "unknown")[:12]
    table.add_row("tokenizer", f"{header['model'] or '?'}: {header['vocab']} token ids, fingerprint {made_by}")
    if model is not None:
        source = open_source(model)
        opened.check(source.tokenizer(), source.config.vocab_size)
        table.add_row("fits", model)
    new_console().print(table)
