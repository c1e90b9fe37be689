"""What commands show: text on standard output, all else on standard error, and nothing that steers a terminal."""

from __future__ import annotations

import json
import re
import sys
from contextlib import suppress
from typing import Any

from rich.console import Console
from rich.text import Text

TINT = "cyan underline"  # tokens that a draft guessed: a colour alone is not seen by all
LEGEND = Text.assemble((" ", ""), ("like this", TINT), (": a draft guessed it", "dim"))

# What acts on a terminal instead of standing in it: control characters but newline and tab, line separators, overrides
# of the writing direction; and halves of characters, which cannot be written at all.
STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: object) -> str:
    r"""The text with what steers a terminal spelt out, as in \x1b[31m."""
    return STEERING.sub(lambda found: ascii(found[0])[1:-1], str(text))


def as_line(text: object) -> str:
    """The text as one visible line, its middle left out if it is long."""
    line = " ".join(visible(text).split())
    return line if len(line) <= 1000 else f"{line[:500]} ... {line[-500:]}"


def new_console(soft_wrap: bool = True, **options: Any) -> Console:
    """A console that prints strings as they are, cells of tables too: paths and messages are no markup."""
    return Console(highlight=False, markup=False, emoji=False, soft_wrap=soft_wrap, **options)


def to_terminal() -> bool:
    """Whether standard output is a terminal, for people, and not a file or a program, for which text is data."""
    return Console().is_terminal


def put(text: str, style: str = "", end: str = "") -> None:
    """Text on standard output: visible and styled on a terminal; elsewhere as it is, to the byte."""
    console = new_console()
    if console.is_terminal:
        console.print(Text(visible(text), style), end=end)
    else:
        sys.stdout.write(text + end)
        sys.stdout.flush()


def put_json(data: Any) -> None:
    """One JSON object on a line of standard output. What steers a terminal is escaped as JSON escapes it."""
    encodes_all = (sys.stdout.encoding or "utf-8").lower().startswith("utf")  # others write \xe9, which is no JSON
    text = json.dumps(data, ensure_ascii=not encodes_all, default=str)
    print(STEERING.sub(lambda found: f"\\u{ord(found[0]):04x}", text), flush=True)


def tell(text: object) -> None:
    """One line on standard error, dim; lost where nothing can be written there."""
    with suppress(OSError):
        new_console(stderr=True).print(Text(as_line(text), "dim"))
