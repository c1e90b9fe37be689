"""A transformers model that generates through Outrider behind its own `generate`.

    import outrider.hf
    outrider.hf.accelerate(model, tokenizer, {"method": "ngram"})
    model.generate(**inputs, max_new_tokens=100, do_sample=False)

The three lines are those of lookahead decoding's `lade` (Fu et al. 2402.02057), for every method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StopStringCriteria,
)

from outrider import families
from outrider.config import SamplingParams, SpeculativeConfig, whole
from outrider.engine import Request
from outrider.errors import ConfigError, RequestError, UnsupportedArchitecture, brief, ends_one, interrupts_wait, told
from outrider.llm import LLM
from outrider.load import Checkpoint, adopt
from outrider.ops import untouched

DEFAULTS: dict[str, Any] = {  # of transformers' generate, where neither the call nor a generation config says otherwise
    "max_new_tokens": None, "max_length": None, "min_new_tokens": None, "min_length": 0, "do_sample": False,
    "temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": None, "repetition_penalty": 1.0, "eos_token_id": None,
    "pad_token_id": None, "num_return_sequences": 1, "stop_strings": None,
}  # fmt: skip
ARGUMENTS = ["inputs", "input_ids", "attention_mask", "generation_config", "logits_processor", "stopping_criteria",
             "streamer", "tokenizer", "seed"]  # fmt: skip
# Other options ask for nothing when they are None, 0 or False; these when they are 1 or True; and some change no token.
ONES = {"num_beams", "num_beam_groups", "use_cache", "typical_p", "length_penalty", "encoder_repetition_penalty",
        "guidance_scale"}  # fmt: skip
IDLE = {"bos_token_id", "decoder_start_token_id", "transformers_version", "_from_model_config", "disable_compile",
        "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
        "assistant_lookbehind", "target_lookbehind", "cache_implementation"}  # fmt: skip
NEVER_IDLE = {"forced_bos_token_id", "forced_eos_token_id", "max_time"}  # in which 0 asks for something, too
# What generate makes of an option, in whose place the caller's own of that type is taken.
INSTEAD: dict[type, str] = {
    RepetitionPenaltyLogitsProcessor: "repetition_penalty", MinLengthLogitsProcessor: "min_length",
    StopStringCriteria: "stop_strings",
}  # fmt: skip

INTEGERS = {torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8}

Config = SpeculativeConfig | Mapping[str, Any] | str | None
Processor = Callable[[Tensor, Tensor], Tensor]  # (1, n) ids, (1, vocab) scores -> scores
Criterion = Callable[..., Any]  # (1, n) ids, None -> (1,) bool


@untouched()
def accelerate(
    model: Any, tokenizer: Any = None, speculative_config: Config = None, *, share: bool = True, **engine: Any
) -> Accelerated:
    """Let `model.generate` run through Outrider: plain decoding's tokens, drafted ahead.

    In float32, greedy ones are those of transformers, too; in 16 bits its products round otherwise, so that near-ties
    may fall the other way. Sampled ones are drawn by Outrider's noise.

    model: a loaded causal LM of a supported architecture (docs/models.md), on one device in one dtype.
    tokenizer: needed for stop strings and to check a draft model's vocabulary.
    speculative_config: as for LLM.  engine: the fields of EngineConfig.
    share: the weights are held once: query, key and value, and gate and up, are fused layer by layer, and the model's
        parameters become views into the fused tensors; it stays a working, trainable transformers model. On a CPU
        such weights cannot be packed: plain decoding took 1.5 to 2.9 times as long as with
        `share=False`, which packs a copy, for twice the memory and blind to later changes of the model's weights.
        The guarantee is the same; `handle.llm.exactness` says which one the self-check found. Training may change the
        weights between two calls, so `enable_prefix_caching` is off unless it is given: keys of old weights would stay.

    What is read is the config and the parameters, no module's code. Hooks, parametrizations and submodules with a
    `forward` of their own are refused, here and by `generate`; other changes are not seen, such as of a buffer or an
    activation, or of a class. Hooks of transformers itself and accelerate's are left alone.

    A second call replaces the first. Raises UnsupportedArchitecture, CheckpointError and ConfigError, before anything
    is changed except the layout of the weights.
    """
    if not hasattr(model, "generation_config") or not hasattr(model, "named_parameters"):
        raise ConfigError(f"accelerate takes a loaded transformers causal LM, not {type(model).__name__}")
    if getattr(model.config, "quantization_config", None):
        raise UnsupportedArchitecture(
            "a quantised transformers model cannot be shared; give its folder to outrider.LLM"
        )
    held = dict(model.named_parameters())
    kinds = {(p.dtype, p.device) for p in held.values()}
    tied = "lm_head.weight" not in held  # tied parameters are listed once
    says = {"architectures": [type(model).__name__], "dtype": str(next(iter(kinds))[0]), "tie_word_embeddings": tied}
    config = families.read(model.config.to_dict() | says, tuple(_eos(model.generation_config.eos_token_id)))
    if len(kinds) != 1 or next(iter(kinds))[1].type not in ("cpu", "cuda"):
        found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise ConfigError(f"accelerate needs all weights in one dtype on one CPU or CUDA device, not {found}")
    if share:
        engine.setdefault("enable_prefix_caching", False)
    _check_code(model)
    path = Path(str(getattr(model.config, "_name_or_path", "") or type(model).__name__))
    adopted = Checkpoint(adopt(config, held, path, share), tokenizer, path)
    llm = LLM(adopted, speculative_config=speculative_config, **engine)
    if isinstance(before := getattr(vars(model).get("generate"), "__self__", None), Accelerated):
        before.undo()
    return Accelerated(model, llm, share)


class Accelerated:
    """What `accelerate` returns. As a context manager, it undoes at the end.

    llm: the LLM behind `generate`; assign to `llm.speculative_config` to change the method.
    last_metrics: of the call that ended last, for each returned row what GenerationOutput.metrics holds.
    """

    def __init__(self, model: Any, llm: LLM, share: bool) -> None:
        self.model, self.llm, self.last_metrics = model, llm, list[dict[str, Any]]()
        self._before = {key: value for key, value in vars(model).items() if key == "generate"}
        self._weights = [p.data_ptr() for p in model.parameters()] if share else None
        model.generate = self.generate

    def undo(self) -> None:
        """Give the model its own `generate` back; without effect if something has replaced ours. The weights stay."""
        if vars(self.model).get("generate") == self.generate:
            del self.model.generate
            vars(self.model).update(self._before)

    def __enter__(self) -> Accelerated:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def __reduce__(self) -> Any:
        raise ConfigError("an accelerated model can be copied or pickled only after undo()")

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: Iterable[Processor] | None = None,
        stopping_criteria: Iterable[Criterion] | None = None,
        *,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        streamer: Any = None,
        tokenizer: Any = None,
        seed: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """As transformers' generate: prompts (batch, n), left-padded where the mask (batch, n) is 0, and their
        continuations, (batch * num_return_sequences, n + new) of int64; rows that ended are padded on the right.

        Options come from kwargs, `generation_config` and the model's own, in this order. Row i is sampled with
        seed + i; without `seed` it is drawn from torch's generator, so `transformers.set_seed` holds. Processors and
        criteria see one row at a time, its padding included; a processor is also asked about rows that a draft only
        supposes. A row that a criterion or stop string has ended is padded even where no eos token is set.
        Several threads may call it. Raises ConfigError for what is not supported, by name, and RequestError's kinds.
        """
        _check_code(self.model)
        if self._weights not in (None, [p.data_ptr() for p in self.model.parameters()]):
            raise ConfigError("the model's weights were moved, cast or replaced; call outrider.hf.accelerate again")
        if not (generation_config is None or isinstance(generation_config, GenerationConfig)):
            raise ConfigError(f"generation_config must be a GenerationConfig, not {brief(generation_config)}")
        if seed is not None and whole(seed, -(2**63), 2**64 - 1) is None:
            raise ConfigError(f"seed must be a 64-bit whole number or None, not {brief(seed)}")
        config = self.llm.runner.model.config
        ids = _prompts(inputs, input_ids)
        asked = _options(kwargs, generation_config, self.model.generation_config)
        eos = [token for token in _eos(asked["eos_token_id"]) if 0 <= token < config.vocab_size]
        pad = asked["pad_token_id"]
        processors, criteria = list(logits_processor or ()), list(stopping_criteria or ())
        for own in (*processors, *criteria):
            if name := INSTEAD.get(type(own)):
                asked[name] = DEFAULTS[name]
            elif type(own) is MaxLengthCriteria:
                asked |= {"max_new_tokens": None, "max_length": max(own.max_length, ids.shape[1] + 1)}
        ends = [] if any(type(own) is EosTokenCriteria for own in criteria) else eos
        params = _sampling(asked, ids.shape[1], ends, config.max_positions)
        if params.min_tokens and set(eos) != set(config.eos):  # the engine would bar the model's own, generate these
            if eos:
                own = MinNewTokensLengthLogitsProcessor(ids.shape[1], params.min_tokens, eos, device=str(ids.device))
                processors.insert(0, own)
            params = params.having(min_tokens=0)
        starts = _starts(ids, attention_mask, pad if pad not in eos else None)
        criteria += self._stop_strings(asked["stop_strings"], tokenizer)
        copies = asked["num_return_sequences"] or 1
        ids, starts = ids.long().repeat_interleave(copies, 0), [start for start in starts for _ in range(copies)]
        pad = pad if pad is not None else next(iter(eos), None)
        if len(ids) > 1 and (streamer is not None or (criteria and pad is None)):
            cure = "a streamer takes one row at a time" if streamer is not None else "set pad_token_id"
            raise ConfigError(f"{len(ids)} rows: {cure}")
        seed = int(torch.randint(2**62, ())) if seed is None else seed
        requests = self._run(ids, starts, params, seed, processors, criteria, streamer)
        self.last_metrics = [self.llm.engine.output(request).metrics for request in requests]
        outputs = [request.seq.output for request in requests]
        longest = max(map(len, outputs))
        fresh = torch.tensor([output + [pad] * (longest - len(output)) for output in outputs], device=ids.device)
        return torch.cat([ids, fresh], 1)

    def _stop_strings(self, strings: Any, tokenizer: Any) -> list[Criterion]:
        if not strings:
            return []
        if (tokenizer := self.llm.tokenizer if tokenizer is None else tokenizer) is None:
            raise ConfigError("stop_strings need a tokenizer: give it to accelerate or to generate")
        return [StopStringCriteria(tokenizer=tokenizer, stop_strings=strings)]

    def _run(
        self,
        ids: Tensor,
        starts: list[int],
        params: SamplingParams,
        seed: int,
        processors: list[Processor],
        criteria: list[Criterion],
        streamer: Any,
    ) -> list[Request]:
        """One request for each row of ids (rows, n), whose padding ends at its start; all have ended."""
        engine, device, requests = self.llm.engine, self.llm.runner.model.device, list[Request]()
        try:
            for i, (row, start) in enumerate(zip(ids.tolist(), starts, strict=True)):
                edits = [_edit(process, row[:start], device) for process in processors]
                ends = _ends(criteria, row[:start], device) if criteria else None
                own = replace(params, seed=(seed + i) % 2**64, logits_processors=edits)
                with interrupts_wait():  # between the two nobody could abort them
                    requests += engine.add(row[start:], own, ends)
            if streamer is not None:
                streamer.put(ids.cpu())
                for tokens in engine.follow(requests[0]):
                    for token in tokens:
                        streamer.put(torch.tensor([token]))
                streamer.end()
            engine.finish(requests)
        finally:
            for request in requests:
                engine.abort(request)  # a no-op unless something went wrong or was interrupted
        return requests


def _check_code(model: torch.nn.Module) -> None:
    """Raises ConfigError for a module with code beside its class's, which no forward of ours would run."""
    modules = [model]
    for module in modules:  # it grows; model.modules() takes twice as long
        own = vars(module)
        before, after = own["_forward_pre_hooks"], own["_forward_hooks"]
        hooked = (before or after) and not all(map(_harmless, (*before.values(), *after.values())))
        replaced = "forward" in own and "_hf_hook" not in own and module is not model
        if hooked or replaced or "parametrizations" in own["_modules"]:
            name = next(name for name, each in model.named_modules() if each is module) or type(model).__name__
            raise ConfigError(
                f"{name} has a forward hook, a parametrization or a forward of its own, and Outrider reads parameters "
                "alone; remove that, or generate without Outrider"
            )
        modules += filter(None, own["_modules"].values())


def _harmless(hook: Any) -> bool:
    """Whether it is of transformers itself, whose hooks record outputs or ask for gradients."""
    return str(getattr(hook, "__module__", "")).startswith("transformers.")


def _prompts(inputs: Tensor | None, input_ids: Tensor | None) -> Tensor:
    """The one that is given, (batch, length)."""
    ids = inputs if input_ids is None else input_ids
    shaped = isinstance(ids, Tensor) and ids.ndim == 2 and len(ids) and ids.dtype in INTEGERS
    if ids is None or not shaped or (inputs is not None and input_ids is not None):
        raise ConfigError("give inputs or input_ids: one tensor (batch, length) of token ids")
    return ids


def _options(kwargs: dict[str, Any], *configs: Any) -> dict[str, Any]:
    """The value of each name in DEFAULTS. Raises ConfigError for anything else that asks for something."""
    known = {*vars(GenerationConfig()), "synced_gpus", "trust_remote_code"}  # type: ignore[no-untyped-call]
    asked: dict[str, Any] = {}
    for name in sorted(known | kwargs.keys() | DEFAULTS.keys()):
        given = [value for config in configs if (value := getattr(config, name, None)) is not None]
        value = kwargs[name] if name in kwargs else next(iter(given), DEFAULTS.get(name))
        number = isinstance(value, (bool, int, float))
        if name in DEFAULTS:
            asked[name] = value
        elif value is not None and not (
            (name in IDLE and value != "quantized")  # such a cache changes tokens, as no other does
            or (number and name in known - NEVER_IDLE and value == (name in ONES))
        ):
            shown = f"{name}={value!r}" if number or isinstance(value, str) else name
            supported = ", ".join([*ARGUMENTS, *DEFAULTS])
            raise ConfigError(f"generate through Outrider does not support {shown}; supported: {supported}")
    return asked


def _eos(given: Any) -> list[int]:
    values = given.tolist() if hasattr(given, "tolist") else given  # a tensor, or an array
    ids = [] if values is None else values if isinstance(values, (list, tuple)) else [values]
    if any(whole(token, -(2**62)) is None for token in ids):  # -1 stands for none
        raise ConfigError(f"eos_token_id must be a token id, a list or a tensor of them, or None, not {brief(given)}")
    return [int(token) for token in ids]


def _starts(ids: Tensor, mask: Tensor | None, pad: int | None) -> list[int]:
    """Where each row's prompt begins. Without a mask, a padding token that does not end texts shows it, as there."""
    if mask is None:
        mask = ids != pad if pad is not None else torch.ones_like(ids)
    if not isinstance(mask, Tensor) or mask.shape != ids.shape:
        raise ConfigError(f"attention_mask must have the shape of input_ids, {tuple(ids.shape)}")
    starts = (mask == 0).sum(1).to(ids.device)
    if not torch.equal(mask.to(ids.device) != 0, torch.arange(ids.shape[1], device=ids.device) >= starts[:, None]):
        raise ConfigError("attention_mask may only hide padding on the left: set tokenizer.padding_side = 'left'")
    return [int(start) for start in starts]


def _sampling(asked: dict[str, Any], width: int, eos: list[int], context: int) -> SamplingParams:
    """One row's parameters; `width` is the prompts' length with padding, by which transformers counts lengths."""
    for name in ("max_new_tokens", "max_length", "min_new_tokens", "min_length", "num_return_sequences"):
        value, least = asked[name], int(name.startswith("num"))
        if value is not None and whole(value, least) is None:
            raise ConfigError(f"{name} must be a whole number of at least {least}, not {value!r}")
    most, longest = asked["max_new_tokens"], asked["max_length"]
    if most is None:
        most = min(20, context - width) if longest is None else longest - width
    if most < 1:
        raise ConfigError(f"no room for a new token behind {width} prompt tokens; raise max_new_tokens or max_length")
    least = asked["min_new_tokens"] if asked["min_new_tokens"] is not None else (asked["min_length"] or 0) - width
    chosen = {name: asked[name] for name in ("temperature", "top_k", "top_p", "min_p") if asked[name] is not None}
    if not asked["do_sample"]:
        if asked["num_return_sequences"] not in (None, 1):
            raise ConfigError("num_return_sequences above 1 needs do_sample=True: greedy rows would all be the same")
        chosen = {"temperature": 0}
    elif chosen.get("temperature") == 0:
        raise ConfigError("temperature must be above 0, not 0; for greedy decoding set do_sample=False")
    penalty = 1.0 if asked["repetition_penalty"] is None else asked["repetition_penalty"]
    return SamplingParams(
        **chosen, repetition_penalty=penalty, max_tokens=most, min_tokens=min(max(least, 0), most),
        ignore_eos=True, stop_token_ids=eos,
    )  # fmt: skip


def _edit(process: Processor, padding: list[int], device: torch.device) -> Callable[[list[int], Tensor], Tensor]:
    """A transformers processor as one of ours, which takes ids as a list and scores (vocab,)."""
    return lambda tokens, logits: process(torch.tensor([padding + tokens], device=device), logits[None])[0]


def _ends(criteria: list[Criterion], padding: list[int], device: torch.device) -> Callable[[list[int]], bool]:
    """Whether a transformers criterion ends the row behind these tokens."""

    def ends(tokens: list[int]) -> bool:
        ids = torch.tensor([padding + tokens], device=device)
        try:
            return any(bool(torch.as_tensor(criterion(ids, None)).all()) for criterion in criteria)
        except BaseException as error:  # the caller's code: it raises what it likes
            if not ends_one(error):
                raise
            raise RequestError(f"a stopping criterion raised {told(error)}") from error

    return ends
