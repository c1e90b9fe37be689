"""Options that several commands share. Sampling flags are generated from SamplingParams, so they cannot drift apart."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from outrider.cli.output import new_console
from outrider.config import SamplingParams, SpeculativeConfig, StructuredOutputsParams
from outrider.errors import ConfigError, brief

HELP = {
    "n": "Outputs per prompt; output i uses seed + i.",
    "temperature": "0 = greedy.",
    "top_k": "Keep the k likeliest tokens; 0 = all.",
    "top_p": "Keep the smallest set of tokens with this mass.",
    "min_p": "Drop tokens less likely than this share of the likeliest.",
    "repetition_penalty": "Over prompt and output; 1 = none.",
    "presence_penalty": "Over the output.",
    "frequency_penalty": "Over the output, per occurrence.",
    "logit_bias": "JSON, token id to bias: '{\"42\": -5}'.",
    "seed": "Same request, same seed, same tokens. Default: random, reported.",
    "max_tokens": "Most new tokens.",
    "min_tokens": "No end of sequence before this many.",
    "stop": "Stop string; may be repeated.",
    "stop_token_ids": "Stop token id; may be repeated.",
    "ignore_eos": "Go on after the end-of-sequence token.",
    "include_stop_str_in_output": "Keep the stop string in the text.",
    "logprobs": "Report this many likeliest tokens per position (with --json).",
    "prompt_logprobs": "The same for the prompt's tokens (with --json).",
    "bad_words": "Word that is not written; may be repeated.",
    "allowed_token_ids": "Token id that may be chosen, may be repeated. Default: all.",
    "skip_special_tokens": "Leave special tokens out of the text.",
    "prediction": "A text the output may resemble: drafted from, it changes no token.",
}
STRUCTURED = {  # a field of StructuredOutputsParams: its flag, and what it means
    "json": ("--json-schema", "The output is JSON of this schema: its text, or a file."),
    "json_object": ("--json-object", "The output is a JSON object."),
    "regex": ("--regex", "The output matches this."),
    "choice": ("--choice", "The output is one of these; repeat it."),
    "grammar": ("--grammar", "The output follows this grammar (Lark or GBNF): its text, or a file."),
    "structural_tag": ("--structural-tag", "JSON between tags, as vLLM describes it: its text, or a file."),
    "disable_any_whitespace": ("--compact", "JSON without spaces between its parts."),
    "disable_additional_properties": ("--no-additional-properties", "Where a schema names properties, no others."),
    "whitespace_pattern": ("--whitespace-pattern", "A regex for the space between JSON's parts."),
    "after": (
        "--after",
        "All this begins behind this text, such as </think>; given twice, text between both may come first.",
    ),
}


def check_model(model: str | None) -> str | None:
    """Refuse an empty name, which would mean the current folder."""
    if model is not None and not model.strip():
        raise ConfigError("--model is empty; give a folder, a hub id or an embedded model, such as tiny")
    return model


Model = Annotated[
    str, typer.Option(callback=check_model, help="Folder, GGUF file, hub id, smollm2, or embedded: tiny, tiny-draft.")
]
Dtype = Annotated[
    str, typer.Option(help="auto (the checkpoint's; bfloat16 if quantised), float32, bfloat16 or float16.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Quantization = Annotated[
    str | None, typer.Option(help="int8 or int4: round the weights while loading; see `outrider quantize`.")
]
Activations = Annotated[str | None, typer.Option(help="int8: round activations, too, for weights of 4 to 8 bits.")]
MaxModelLen = Annotated[int | None, typer.Option(help="Context limit in tokens; default: the model's.")]
KvOffload = Annotated[bool, typer.Option("--kv-offload", help="Keep keys and values in host memory, stream them.")]
OnChipLayers = Annotated[int, typer.Option(help="With --kv-offload: so many layers' keys stay on the device.")]
TensorParallelMode = Annotated[
    str, typer.Option(help="Under torchrun, how a model is cut: gather, ordered, reduce or auto; see docs/deploy.md.")
]
Speculate = Annotated[str | None, typer.Option(help="Method: none, ngram:k=8, self:weights=int8; default: auto.")]
SpeculativeJsons = Annotated[
    list[str] | None, typer.Option("--speculative-config", help="The same as JSON, repeatable.")
]
NewTokens = Annotated[int, typer.Option("--max-tokens", help="New tokens per prompt; end of sequence is ignored.")]
Repeats = Annotated[int, typer.Option(help="Rounds over all methods; speeds are medians.")]
Temperature = Annotated[float, typer.Option(help=HELP["temperature"])]
TopP = Annotated[float, typer.Option(help=HELP["top_p"])]
Seed = Annotated[int, typer.Option(help="Of the sampling.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads; default: torch's choice.")]
SpeculativeJson = Annotated[
    str | None,
    typer.Option(
        "--speculative-config",
        help='The same as JSON, with vLLM\'s keys: \'{"method": "ngram"}\'. "acceptance_method": coupled (default, the '
        "very tokens of plain decoding), rejection or block (exact in law), typical (LOSSY).",
    ),
]

TYPES: dict[str, Any] = {
    "logit_bias": str | None,
    "stop": list[str] | None,
    "stop_token_ids": list[int] | None,
    "seed": int | None,
    "logprobs": int | None,
    "prompt_logprobs": int | None,
    "bad_words": list[str] | None,
    "allowed_token_ids": list[int] | None,
    "prediction": str | None,
}
NAMES = {
    "stop_token_ids": "--stop-token-id", "bad_words": "--bad-word", "allowed_token_ids": "--allowed-token-id",
}  # fmt: skip


def sampling_flags(*without: str, **defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command, which takes `sampling: dict`, a flag for each field of SamplingParams but those it does without.

    `defaults` override. What cannot be is refused before the command runs.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        extra = []
        for item in fields(SamplingParams):
            if item.name not in HELP or item.name in without:
                continue
            default = defaults.get(item.name, item.default)
            kind = TYPES.get(item.name, type(default))
            name = NAMES.get(item.name, "--" + item.name.replace("_", "-"))
            names = [name, f"--no-{name[2:]}"] if default is True else [name]
            option = typer.Option("/".join(names), help=HELP[item.name])
            extra.append(
                inspect.Parameter(
                    item.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
                )
            )
        for item in fields(StructuredOutputsParams):
            flag, meaning = STRUCTURED[item.name]
            switch = item.default is False or item.name == "json_object"
            kind = bool if switch else list[str] | None if item.name in ("choice", "after") else str | None
            extra.append(
                inspect.Parameter(
                    item.name, inspect.Parameter.KEYWORD_ONLY, default=False if switch else None,
                    annotation=Annotated[kind, typer.Option(flag, help=meaning)],
                )
            )  # fmt: skip
        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.name != "sampling"]

        @functools.wraps(command)
        def run(**given: Any) -> None:
            sampling = {item.name: given.pop(item.name) for item in extra}
            sampling["structured_outputs"] = structured({name: sampling.pop(name) for name in STRUCTURED})
            SamplingParams(**clean(sampling))
            command(sampling=sampling, **given)

        run.__signature__ = signature.replace(parameters=own + extra)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in own + extra}
        return run

    return decorate


def structured(given: dict[str, Any]) -> StructuredOutputsParams | None:
    """The constraint that flags ask for. Raises ConfigError."""
    given = {name: value for name, value in given.items() if value not in (None, False, [])}
    if not given:
        return None
    for name in ("json", "grammar", "structural_tag"):
        text = given.get(name)
        if text and (name == "grammar" or not text.lstrip().startswith("{")) and "\n" not in text:
            try:
                if Path(text).is_file():
                    given[name] = Path(text).read_text("utf-8-sig")
            except (OSError, UnicodeDecodeError, ValueError) as error:
                raise ConfigError(f"{STRUCTURED[name][0]} {brief(text)} cannot be read: {error}") from None
        if text and name != "grammar":
            flag = STRUCTURED[name][0]
            if given[name] is text and not text.lstrip().startswith("{"):
                raise ConfigError(f"{flag} {brief(text)} is neither a file nor a JSON object")
            given[name] = read_json(
                given[name], flag if given[name] is text else f"{flag} {brief(text)}", '{"type": "object"}'
            )
    return StructuredOutputsParams(**given)


def clean(sampling: dict[str, Any], flag: str = "--logit-bias") -> dict[str, Any]:
    """The bias comes as JSON, whose keys are text."""
    if isinstance(bias := sampling["logit_bias"], str):
        data = read_json(bias, flag, '{"42": -5}')
        try:
            sampling["logit_bias"] = {int(token): value for token, value in data.items()}
        except ValueError:
            raise ConfigError(f"{flag} maps token ids to numbers, as in '{{\"42\": -5}}', not {bias}") from None
        if len(sampling["logit_bias"]) < len(data):
            raise ConfigError(f"{flag} {bias} names a token twice; give each one number")
    return sampling


def read_ints(text: str, option: str) -> list[int]:
    """Numbers from 1 to 2**40, with commas between them, each once. Raises ConfigError, naming the option."""
    try:
        found = list(dict.fromkeys(int(part) for part in text.replace("_", "").split(",")))
    except ValueError:
        raise ConfigError(f"{option} must be whole numbers and commas, as 4096,32768, not {brief(text)}") from None
    if not 1 <= min(found) <= max(found) <= 2**40:  # beyond lies what no machine holds, and no float counts
        raise ConfigError(f"{option} must be whole numbers of at least 1 and at most {2**40}, not {brief(text)}")
    return found


def read_floats(text: str, option: str) -> list[float]:
    """Numbers, with commas between them, each once. Raises ConfigError, naming the option."""
    try:
        return list(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        raise ConfigError(f"{option} must be numbers with commas, such as 0,0.8, not {text!r}") from None


def given_options(context: typer.Context) -> list[str]:
    """The names of the options that stand on the command line."""
    sources: dict[str, Any] = {name: context.get_parameter_source(name) for name in context.params}
    return [name for name, source in sources.items() if source.name == "COMMANDLINE"]


def read_json(text: str, flag: str, example: str = '{"method": "ngram"}') -> dict[str, Any]:
    """A JSON object given on the command line. Raises ConfigError, also for a key that stands twice, and for NaN."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            raise ConfigError(f"{flag} has the key {max(keys, key=keys.count)!r} twice; give it once")
        return found

    def infinite(name: str) -> float:
        if name == "NaN":
            raise ConfigError(f"{flag} holds NaN, which is no number")
        return float(name)

    try:
        data = json.loads(text, object_pairs_hook=once, parse_constant=infinite)
    except RecursionError:
        raise ConfigError(f"{flag} is nested too deeply") from None
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{flag} is not JSON ({error}); quote it as in '{example}'") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{flag} should be a JSON object such as {example}, not {text}")
    return data


def speculative(short: str | None, long: str | None) -> SpeculativeConfig:
    """The speculative config of --speculate or --speculative-config; without either, `auto`."""
    if short is not None and long is not None:
        raise ConfigError("give --speculate or --speculative-config, not both")
    if long is not None:
        return SpeculativeConfig.of(read_json(long, "--speculative-config"))
    return SpeculativeConfig.parse("auto" if short is None else short)


class Reporter:
    """A progress bar on standard error while models load and long prompts are read. Silent where nobody looks."""

    def __init__(self) -> None:
        self.bar: Progress | None = None
        self.console = new_console(stderr=True)

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self, what: str, done: int, total: int) -> None:
        if not self.console.is_terminal:
            return
        if self.bar is None:
            what_runs = TextColumn("{task.description}", markup=False)
            columns = what_runs, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
            self.bar = Progress(*columns, console=self.console, transient=True)
            self.bar.start()
            self.bar.add_task(what, total=total)
        self.bar.update(self.bar.task_ids[0], description=what, completed=done, total=total)
        if done >= total:
            self.close()

    def close(self) -> None:
        """Take the bar away."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


def summary(metrics: dict[str, Any], tokens: int, seed: int | None = None, width: int | None = None) -> str:
    """How a generation went, on one line, what matters most first; with a width in characters, only what fits.

    Without a seed it was greedy.
    """
    spec, timing = metrics["speculative_decoding"], metrics["timing"]
    parts = [f"{tokens} token{'s' * (tokens != 1)}"]
    parts += [f"{timing['tokens_per_second']:.0f} tokens/s"] if timing["tokens_per_second"] else []  # one forward
    parts += ["any seed" if seed is None else f"seed {seed}", metrics["exactness"]]
    if spec["num_draft_tokens"]:
        parts.append(f"{spec['mean_acceptance_length']:.2f} per forward")
        parts.append(f"{spec['draft_acceptance_rate']:.0%} of {metrics['method']}'s drafts kept")
    parts.append(f"first after {timing['time_to_first_token'] * 1000:.0f} ms")
    while width is not None and len(" · ".join(parts)) > width and len(parts) > 1:
        parts.pop()
    return " · ".join(parts)
