"""`outrider chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import re
from dataclasses import fields
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

import outrider
from outrider.cli.generate import TINT
from outrider.cli.options import (
    Device,
    Dtype,
    MaxModelLen,
    Model,
    Quantization,
    Reporter,
    Speculate,
    SpeculativeJson,
    clean,
    load_llm,
    read_json,
    sampling_flags,
    speculative,
    summary,
)
from outrider.config import SamplingParams, SpeculativeConfig
from outrider.errors import ConfigError, OutriderError, RequestTooLong

COMMANDS = """\
/reset              forget the conversation
/retry              drop the last answer and ask again
/set NAME VALUE     a sampling parameter, such as /set temperature 0.7
/set speculate X    another method, such as /set speculate ngram:k=8
/set                show what is set
/system TEXT        start anew with a system message
/help               this list
/quit               leave (also Ctrl-D)
Ctrl-C stops an answer. End a line with \\ to go on in the next."""


@sampling_flags(temperature=0.7, max_tokens=512)
def chat(
    *,
    model: Model = "tiny",
    speculate: Speculate = None,
    speculative_config: SpeculativeJson = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    quantization: Quantization = None,
    max_model_len: MaxModelLen = None,
    system: Annotated[str | None, typer.Option(help="A system message to start with.")] = None,
    sampling: dict[str, Any],
) -> None:
    """Talk with a model. Ctrl-C stops an answer, not the program; /help lists the commands."""
    config = speculative(speculate, speculative_config)
    if sampling["n"] != 1:
        raise ConfigError(f"chat gives one answer; n must be 1, not {sampling['n']}")
    SamplingParams(**sampling)
    with Reporter() as reporter:
        llm = load_llm(model, config, dtype, device, reporter, max_model_len=max_model_len, quantization=quantization)
        llm.render([{"role": "user", "content": "?"}])  # no chat template: say so before the first question
        Conversation(llm, sampling, system, reporter).loop()


class Conversation:
    """Messages so far and what the commands change."""

    def __init__(self, llm: outrider.LLM, sampling: dict[str, Any], system: str | None, reporter: Reporter) -> None:
        self.llm, self.sampling, self.reporter = llm, sampling, reporter
        self.console = Console(highlight=False, soft_wrap=True)
        self.messages: list[dict[str, str]] = []
        self.reset(system)

    def reset(self, system: str | None = None) -> None:
        """Start anew."""
        self.messages = [{"role": "system", "content": system}] if system else []

    def loop(self) -> None:
        """Read, answer, repeat."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives input() line editing and a history
        self.console.print(Text("/help lists the commands", "dim"))
        while True:
            try:
                line = self._read()
            except EOFError:
                self.console.print()
                return
            except KeyboardInterrupt:
                self.console.print(Text("\n/quit or Ctrl-D leaves", "dim"))
                continue
            if line in ("/quit", "/exit"):
                return
            try:
                if line.startswith("/"):
                    self.command(line)
                elif line.strip():
                    self.messages.append({"role": "user", "content": line})
                    self.answer()
            except OutriderError as error:
                self.console.print(Text(str(error), "red"))
            except KeyboardInterrupt:  # while a model was loading, say
                self.console.print(Text(" (stopped)", "dim"))
            finally:
                self.reporter.close()

    def _read(self) -> str:
        line = input("> ")
        while line.endswith("\\"):
            line = line[:-1] + "\n" + input(". ")
        return line

    def answer(self) -> None:
        """Stream an answer to the last message. Stopped by Ctrl-C, what was said so far stays."""
        text, output = "", None
        try:
            events = self.llm.stream(self.messages, **self.sampling)
        except BaseException as error:
            self.messages.pop()  # the question was not asked
            if isinstance(error, RequestTooLong):
                raise RequestTooLong(f"{error}; or /reset the conversation") from None
            raise
        try:
            for event in events:
                self.console.print(Text(event.text, TINT if event.drafted_by else ""), end="")
                text += event.text
                output = event.output
        except KeyboardInterrupt:
            events.close()  # type: ignore[attr-defined]
            self.console.print(Text(" (stopped)", "dim"), end="")
        self.console.print()
        if output is not None:
            self.console.print(Text(summary(output.metrics, len(output.token_ids), output.seed), "dim"))
        self.messages.append({"role": "assistant", "content": text})

    def command(self, line: str) -> None:
        """Run one slash command. Raises ConfigError for one that does not exist or cannot be."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name == "/help":
            self.console.print(COMMANDS, markup=False)
        elif name == "/reset":
            self.reset()
        elif name == "/system":
            self.reset(rest)
        elif name == "/retry":
            while self.messages and self.messages[-1]["role"] == "assistant":
                self.messages.pop()
            if not self.messages or self.messages[-1]["role"] != "user":
                raise ConfigError("nothing to ask again")
            self.answer()
        elif name == "/set":
            self._set(*re.split(r"[\s=]+", rest, maxsplit=1))
        else:
            raise ConfigError(f"unknown command {name}; /help lists them")

    def _set(self, name: str = "", value: str = "") -> None:
        if not name:
            shown = {k: v for k, v in self.sampling.items() if v is not None}
            self.console.print(f"speculate {self.llm.speculative_config.method}  {shown}", markup=False)
            return
        name = name.replace("-", "_")
        if name == "speculate":
            self.llm.speculative_config = SpeculativeConfig.parse(value or "none")
            return
        if name not in {f.name for f in fields(SamplingParams)} - {"n", "logits_processors"}:
            raise ConfigError(f"/set knows speculate and the sampling parameters, not {name!r}")
        parsed: Any = value or None
        if value and name not in ("stop", "logit_bias"):
            parsed = read_json(f'{{"v": {value}}}', f"/set {name}")["v"]
        changed = clean(self.sampling | {name: parsed})
        SamplingParams(**changed)  # refused before it is kept
        self.sampling = changed
