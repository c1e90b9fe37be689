"""`outrider chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

import outrider
from outrider.cli.options import (
    Activations,
    Device,
    Dtype,
    MaxModelLen,
    Quantization,
    Reporter,
    Speculate,
    SpeculativeJson,
    check_model,
    clean,
    sampling_flags,
    speculative,
    summary,
)
from outrider.cli.output import LEGEND, TINT, as_line, new_console, put, visible
from outrider.config import SamplingParams, SpeculativeConfig
from outrider.errors import ConfigError, OutriderError, RequestTooLong

COMMANDS = {
    "/reset": ("", "forget the conversation, but for the system message"),
    "/retry": ("", "drop the last answer and ask again"),
    "/set": ("NAME VALUE", "a sampling parameter, such as /set temperature 0.7; alone, what is set"),
    "/set speculate": ("X", "another method, such as /set speculate ngram:k=8"),
    "/system": ("TEXT", "start anew with a system message"),
    "/help": ("", "this list"),
    "/quit": ("", "leave (also Ctrl-D)"),
}
MORE = "Ctrl-C stops an answer. End a line with \\ to go on in the next."


@sampling_flags("n", "logprobs", "prompt_logprobs", temperature=0.7, max_tokens=512)
def chat(
    *,
    model: Annotated[
        str | None,
        typer.Option(
            callback=check_model, help="Folder, GGUF file, hub id or embedded model. [default: smollm2, or tiny]"
        ),
    ] = None,
    speculate: Speculate = None,
    speculative_config: SpeculativeJson = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    quantization: Quantization = None,
    activations: Activations = None,
    max_model_len: MaxModelLen = None,
    system: Annotated[str | None, typer.Option(help="A system message to start with.")] = None,
    sampling: dict[str, Any],
) -> None:
    """Talk with a model. Ctrl-C stops an answer, not the program; /help lists the commands."""
    config = speculative(speculate, speculative_config)
    with Reporter() as reporter:
        llm = outrider.LLM(
            model or _default(), speculative_config=config, dtype=dtype, device=device, progress=reporter,
            max_model_len=max_model_len, quantization=quantization, activations=activations,
        )  # fmt: skip
        llm.render([{"role": "user", "content": "?"}])  # no chat template: say so before the first question
        Conversation(llm, sampling, system, reporter).loop()


def _default() -> str:
    """The model that talks best of those that are there without a download."""
    from outrider.find import PACKAGED, packaged

    return PACKAGED if packaged() else "tiny"


class Conversation:
    """Messages so far and what the commands change."""

    def __init__(self, llm: outrider.LLM, sampling: dict[str, Any], system: str | None, reporter: Reporter) -> None:
        self.llm, self.sampling, self.reporter = llm, sampling, reporter
        self.console = new_console()
        self.messages: list[dict[str, str]] = []
        self.reset(system)

    def reset(self, system: str | None = None) -> None:
        """Start anew."""
        self.messages = [{"role": "system", "content": system}] if system else []

    def loop(self) -> None:
        """Read, answer, repeat."""
        read = _reader([*COMMANDS, *(f"/set {name}" for name in self.sampling)])
        self._say("/help lists the commands")
        self._legend()
        while True:
            try:
                line = read("> ")
                while line.endswith("\\"):
                    line = line[:-1]
                    with contextlib.suppress(EOFError):  # which the next read meets again
                        line += "\n" + read(". ")
            except EOFError:
                self.console.print()
                return
            except KeyboardInterrupt:
                self._say("/quit or Ctrl-D leaves")
                continue
            if (command := line.strip()) in ("/quit", "/exit"):
                return
            try:
                if command.startswith("/"):
                    self.command(command)
                elif command:
                    self.messages.append({"role": "user", "content": line})
                    self.answer()
            except OutriderError as error:
                self._say(error, "red")
            except KeyboardInterrupt:  # while a model was loading, say
                self._say("(stopped)")
            finally:
                self.reporter.close()

    def _say(self, line: object, style: str = "dim") -> None:
        self.console.print(Text(as_line(line), style))

    def _legend(self) -> None:
        if self.console.is_terminal and self.llm.speculative_config.method != "none":
            self.console.print(LEGEND)

    def answer(self) -> None:
        """Stream an answer to the last message. Stopped by Ctrl-C or an error, what was said so far stays."""
        text, output, by = "", None, list[str | None]()
        try:
            events = self.llm.stream(self.messages, **self.sampling)
        except BaseException as error:
            self.messages.pop()  # the question was not asked
            if isinstance(error, RequestTooLong):
                raise RequestTooLong(f"{error}; or /reset the conversation") from None
            raise
        began = time.perf_counter()
        try:
            for event in events:
                put(event.text, TINT if event.drafted_by else "")
                text += event.text
                by.append(event.drafted_by)
                output = event.output
        except KeyboardInterrupt:
            events.close()  # type: ignore[attr-defined]
            put(" (stopped)", "dim")
        finally:
            put("\n")
            self.messages.append({"role": "assistant", "content": text})
        if output is not None:
            width = self.console.width if self.console.is_terminal else None
            seed = output.seed if self.sampling["temperature"] else None
            self._say(summary(output.metrics, len(by), seed, width))
        elif by:
            rate, guessed = len(by) / (time.perf_counter() - began), sum(map(bool, by)) / len(by)
            count = f"{len(by)} token{'s' * (len(by) != 1)}"
            self._say(f"{count} · {rate:.0f} tokens/s · {guessed:.0%} guessed by drafts · stopped")

    def command(self, line: str) -> None:
        """Run one slash command. Raises ConfigError for one that does not exist or cannot be."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name == "/help":
            table = Table(show_header=False, box=None)
            for each, (what, meaning) in COMMANDS.items():
                table.add_row(Text(f"{each} {what}"), Text(meaning))
            self.console.print(table)
            self._say(MORE)
        elif name == "/reset":
            self.messages = [message for message in self.messages if message["role"] == "system"]
            self._say("the conversation is forgotten" + ", but for the system message" * bool(self.messages))
        elif name == "/system":
            self.reset(rest)
            self._say(f"a new conversation; system message: {rest or 'none'}")
        elif name == "/retry":
            before = list(self.messages)
            while self.messages and self.messages[-1]["role"] == "assistant":
                self.messages.pop()
            if not self.messages or self.messages[-1]["role"] != "user":
                raise ConfigError("nothing to ask again")
            try:
                self.answer()
            finally:
                if len(self.messages) < len(before):  # it was refused
                    self.messages = before
        elif name == "/set":
            self._set(*re.split(r"[\s=]+", rest, maxsplit=1))
        else:
            raise ConfigError(f"unknown command {name}; /help lists them")

    def _set(self, name: str = "", value: str = "") -> None:
        if not name:
            table = Table(show_header=False, box=None)
            for key, set_to in {"speculate": _spoken(self.llm.speculative_config), **self.sampling}.items():
                table.add_row(key, Text("-" if set_to is None else visible(set_to)))
            self.console.print(table)
            return
        name = name.replace("-", "_")
        if name == "speculate":
            self.llm.speculative_config = SpeculativeConfig.parse(value or "none")
            self._say(f"speculate = {_spoken(self.llm.speculative_config)}")
            self._legend()
            return
        if name not in self.sampling:
            raise ConfigError(f"/set knows speculate, {', '.join(self.sampling)}; not {name!r}")
        parsed: Any = value or None
        literal = name in ("logit_bias", "prediction") or (name == "stop" and value[:1] not in ("[", '"'))
        if value and not literal:
            with contextlib.suppress(ValueError, RecursionError):  # SamplingParams says what it should be
                parsed = json.loads(value)
        changed = clean(self.sampling | {name: parsed}, "/set logit_bias")
        SamplingParams(**changed)  # refused before it is kept
        self.sampling = changed
        self._say(f"{name} = {changed[name]}")


def _spoken(config: SpeculativeConfig) -> str:
    """A method as --speculate takes it."""
    given = {"k": config.num_speculative_tokens, **config.options}
    options = ",".join(f"{key}={value}" for key, value in given.items() if value is not None)
    return f"{config.method}:{options}" if options else config.method


def _read_plainly(mark: str) -> str:
    try:
        return input()
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input is not text: {error}") from None


def _reader(commands: list[str]) -> Callable[[str], str]:
    """What reads a line behind a mark: with history and completion at a terminal, else plainly and without the mark."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return _read_plainly
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.keys import Keys
    from prompt_toolkit.shortcuts import CompleteStyle

    class Remembered(FileHistory):
        """Lines kept for the next run; that they cannot be is no reason to stop."""

        def store_string(self, string: str) -> None:
            with contextlib.suppress(OSError):
                super().store_string(string)

    history: History = InMemoryHistory()
    with contextlib.suppress(OSError, RuntimeError):  # no home, no room, no permission
        home = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
        path = home / "outrider" / "history"
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # what is said here is nobody else's business
        path.chmod(0o600)
        history = Remembered(path)
    keys = KeyBindings()
    keys.add(Keys.Vt100MouseEvent)(lambda event: None)  # a pasted colour, ESC[31m, would be taken for a mouse's
    session: PromptSession[str] = PromptSession(
        history=history,
        key_bindings=keys,
        completer=WordCompleter(commands, sentence=True),
        complete_while_typing=False,
        complete_style=CompleteStyle.READLINE_LIKE,
    )
    return session.prompt
