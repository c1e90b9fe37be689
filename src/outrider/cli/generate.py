"""`outrider generate`: continue prompts, plainly, speculatively, or both to compare."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

import outrider
from outrider.cli.options import (
    Activations,
    Device,
    Dtype,
    KvOffload,
    MaxModelLen,
    Model,
    OnChipLayers,
    Quantization,
    Reporter,
    Speculate,
    SpeculativeJson,
    TensorParallelMode,
    sampling_flags,
    speculative,
    summary,
)
from outrider.cli.output import LEGEND, TINT, as_line, new_console, put, put_json, tell, to_terminal
from outrider.config import SpeculativeConfig, drawn_seed
from outrider.errors import ConfigError, EmptyPrompt
from outrider.outputs import GenerationOutput, behind_first


@sampling_flags(temperature=0.0)
def generate(
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts; none = standard input.")] = None,
    *,
    model: Model = "tiny",
    speculate: Speculate = None,
    speculative_config: SpeculativeJson = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    quantization: Quantization = None,
    activations: Activations = None,
    max_model_len: MaxModelLen = None,
    kv_offload: KvOffload = False,
    on_chip_layers: OnChipLayers = 0,
    tensor_parallel_mode: TensorParallelMode = "gather",
    prompt_file: Annotated[Path | None, typer.Option(help="Read one prompt from this file.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Treat each prompt as a user's message.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per output, nothing else.")] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Run plainly and speculatively; show the ratio and whether they agree.")
    ] = False,
    sampling: dict[str, Any],
) -> None:
    """Continue prompts. Text goes to standard output, all else to standard error.

    On a terminal, tokens that a draft guessed are underlined and tinted.
    """
    config = speculative(speculate, speculative_config)
    if compare and config.method == "none":
        raise ConfigError("--compare needs a method to compare with plain decoding, such as --speculate ngram")
    for name in ("logprobs", "prompt_logprobs"):
        if sampling[name] is not None and not as_json:
            raise ConfigError(f"--{name.replace('_', '-')} needs --json, which is where they are shown")
    texts = _prompts(prompts, prompt_file)
    with Reporter() as reporter:
        llm = outrider.LLM(
            model, speculative_config=config, dtype=dtype, device=device, progress=reporter,
            max_model_len=max_model_len, kv_offload=kv_offload, on_chip_layers=on_chip_layers,
            quantization=quantization, activations=activations, tensor_parallel_mode=tensor_parallel_mode,
        )  # fmt: skip
        if llm.parallelism and not as_json:
            tell(llm.parallelism)
        ids = [llm.render([{"role": "user", "content": t}]) if chat else llm.encode(t) for t in texts]
        leads = [f"{text}\n" if chat else text for text in texts for _ in range(sampling["n"])]  # before each output
        if compare:
            _compare(llm, config, ids, leads, sampling, as_json)
        elif as_json:
            for output in llm.generate(ids, **sampling):
                put_json(as_object(output))
        elif len(leads) > 1:
            for lead, output in zip(leads, llm.generate(ids, **sampling), strict=True):
                _show(lead, output)
                _tell_summary(output, sampling)
        else:
            _stream(llm, ids[0], "" if chat else texts[0], sampling)


def _prompts(prompts: list[str] | None, file: Path | None) -> list[str]:
    if prompts and file:
        raise ConfigError("give prompts or --prompt-file, not both")
    if file:
        try:
            prompts = [file.read_bytes().decode("utf-8-sig")]  # with its own ends of lines, without a byte-order mark
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--prompt-file {file} cannot be read: {error}") from None
    if not prompts and sys.stdin.isatty():
        raise ConfigError('no prompt; give one, as in: outrider generate "Once upon a time"')
    try:
        texts = prompts or [sys.stdin.read().removeprefix("\ufeff")]
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input is not text: {error}") from None
    if not all(texts):
        raise EmptyPrompt("the prompt is empty; give at least one character")
    return texts


def as_object(output: GenerationOutput) -> dict[str, Any]:
    """What --json prints."""
    data = {key: getattr(output, key) for key in ("text", "token_ids", "finish_reason", "seed", "metrics")}
    if output.logprobs is not None:
        data["logprobs"] = [dataclasses.asdict(p) for p in output.logprobs]
    if output.prompt_logprobs is not None:
        data["prompt_logprobs"] = [p and dataclasses.asdict(p) for p in output.prompt_logprobs]
    return data


def _stream(llm: outrider.LLM, ids: list[int], prompt: str, sampling: dict[str, Any]) -> None:
    events, output = llm.stream(ids, **sampling), None  # a bad request is refused before anything is printed
    put(prompt, "bold")
    for event in events:
        put(event.text, TINT if event.drafted_by else "")
        output = event.output
    put("\n")
    assert output is not None  # the last event carries it
    _tell_summary(output, sampling, legend=to_terminal() and any(output.drafted_by))


def _show(lead: str, output: GenerationOutput) -> None:
    put(lead, "bold")
    put(output.text, end="\n")


def _tell_summary(output: GenerationOutput, sampling: dict[str, Any], legend: bool = False) -> None:
    console = new_console(stderr=True)
    seed = output.seed if sampling["temperature"] else None
    tell(summary(output.metrics, len(output.token_ids), seed, console.width if console.is_terminal else None))
    if legend:
        console.print(LEGEND)


def _compare(
    llm: outrider.LLM,
    config: SpeculativeConfig,
    ids: list[list[int]],
    leads: list[str],
    sampling: dict[str, Any],
    as_json: bool,
) -> None:
    if sampling["seed"] is None:
        sampling = {**sampling, "seed": drawn_seed()}  # both runs need the same
    runs: list[list[GenerationOutput]] = []
    for each in (SpeculativeConfig(), config):
        llm.speculative_config = each
        llm.generate(ids, **{**sampling, "max_tokens": min(4, sampling["max_tokens"]), "min_tokens": 0})  # warm up
        runs.append(llm.generate(ids, **sampling))
    plain, fast = runs
    rates = [_rate(run) for run in runs]
    identical = [o.token_ids for o in plain] == [o.token_ids for o in fast]
    ratio = rates[1] / rates[0] if rates[0] and rates[1] else None
    if as_json:
        both = {"plain": [as_object(o) for o in plain], "speculative": [as_object(o) for o in fast]}
        put_json({"ratio": ratio, "identical": identical, "seed": plain[0].seed, **both})
        return
    table = Table("method", "tokens/s", "tokens per forward", "drafts accepted", "first token")
    for name, run, rate in zip(("plain", as_line(config.method)), runs, rates, strict=True):
        spec = [o.metrics["speculative_decoding"] for o in run]
        emitted, steps = sum(len(o.token_ids) for o in run), sum(s["num_spec_steps"] for s in spec)
        drafted, accepted = (sum(s[f"num_{key}_tokens"] for s in spec) for key in ("draft", "accepted_draft"))
        first = max(o.metrics["timing"]["time_to_first_token"] for o in run)
        share = f"{accepted / drafted:.0%}" if drafted else "-"
        table.add_row(
            name, f"{rate:.0f}" if rate else "-", f"{emitted / max(1, steps):.2f}", share, f"{first * 1000:.0f} ms"
        )
    for lead, output in zip(leads, plain, strict=True):
        _show(lead, output)
    console = new_console()
    console.print(table)
    agree, seed = "yes" if identical else "no", plain[0].seed if sampling["temperature"] else "any"
    console.print(
        f"ratio: {f'{ratio:.2f}x' if ratio else '-'}   identical: {agree}   exactness: {llm.exactness}   seed: {seed}"
    )


def _rate(outputs: list[GenerationOutput]) -> float | None:
    """Tokens per second after the first forward, of requests that ran together; None if all came with it."""
    tokens, seconds = behind_first(outputs)
    return tokens / seconds if tokens else None
