"""The offline front door: `LLM("tiny").generate("Once upon a time")`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from outrider import drafters
from outrider.config import EngineConfig, SamplingParams, SpeculativeConfig, promised
from outrider.engine import Engine, Request, free_memory
from outrider.errors import ConfigError, EmptyPrompt, RequestError
from outrider.kv import DenseKV, OffloadKV
from outrider.load import Checkpoint, Progress, check_vocabulary, load
from outrider.outputs import GenerationOutput, TokenEvent
from outrider.runner import Runner, check_exactness

Prompt = str | list[int]


class LLM:
    """A model, ready to generate, plainly or speculatively, with the same tokens.

    model: a folder, a hub id, an embedded model (`tiny`), or a Checkpoint that is already in memory.
    speculative_config: vLLM-style, such as {"method": "ngram", "num_speculative_tokens": 8}; assign to the attribute
        of that name to change it later without loading the target again.
    dtype: auto (the checkpoint's), float32, bfloat16, float16.  device: auto, cpu, cuda, cuda:N.
    quantization: None, int8 or int4: the model's weights are rounded as they are loaded; draft models stay as they are.
    progress: called as (what, done, total) while loading and reading long prompts.
    Further keywords are those of EngineConfig. Raises OutriderError's kinds: ModelNotFound, CheckpointError, ...
    """

    def __init__(
        self,
        model: str | Path | Checkpoint,
        *,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None,
        dtype: str = "auto",
        device: str = "auto",
        progress: Progress | None = None,
        quantization: str | None = None,
        **engine: Any,
    ) -> None:
        self.engine_config = _make(EngineConfig, engine)
        config = SpeculativeConfig.of(speculative_config)
        drafters.create(config)  # a wrong option is known before anything is loaded
        if quantization is not None and isinstance(model, Checkpoint):
            raise ConfigError("quantization happens while a model is loaded; this one is in memory: give its folder")
        self._dtype, self._device, self._progress = dtype, device, progress
        self.checkpoint = model if isinstance(model, Checkpoint) else load(model, dtype, device, progress, quantization)
        self.tokenizer = self.checkpoint.tokenizer
        self.runner = self._runner(self.checkpoint, self.engine_config.kv_offload)
        self._measured = check_exactness(self.runner.model, self.runner.kv)
        if self.engine_config.kv_memory is None:  # measured once, so that every method gets the same
            home = torch.device("cpu") if self.engine_config.kv_offload else self.runner.model.device
            memory = int(0.9 * free_memory(home))
            self.engine_config = replace(self.engine_config, kv_memory=max(1, memory))
        self._drafts: dict[str, Runner] = {}
        self._idle: dict[str, Runner] = {}  # draft models that the next drafter may want again
        self.speculative_config = config

    def _runner(self, checkpoint: Checkpoint, offload: bool = False) -> Runner:
        model, config = checkpoint.model, self.engine_config
        kv, chunk = DenseKV(model.config, model.dtype, model.device), config.max_num_batched_tokens
        if offload:  # every forward copies all that came before: few large ones
            kv, chunk = OffloadKV(model.config, model.dtype, model.device, config.on_chip_layers), max(chunk, 4096)
        runner = Runner(model, kv, chunk=chunk)
        runner.tokenizer = checkpoint.tokenizer
        if self._progress is not None:
            report = self._progress
            runner.progress = lambda done, total: report("reading the prompt", done, total)
        return runner

    def _load_draft(self, name: str) -> Runner:
        if name in self._idle:
            self._drafts[name] = self._idle.pop(name)
        elif name not in self._drafts:
            self._idle.clear()  # gives the memory back before more is taken
            draft = load(name, self._dtype, str(self.runner.model.device), self._progress)
            check_vocabulary(self.checkpoint, draft)
            self._drafts[name] = self._runner(draft)
            self._drafts[name].progress = None
        return self._drafts[name]

    @property
    def exactness(self) -> str:
        """What is promised now: `bitwise`, `law` (see docs/architecture.md), or `lossy` under acceptance `typical`."""
        return promised(self._speculative.acceptance_method, self._measured)

    @property
    def speculative_config(self) -> SpeculativeConfig:
        """How drafts are made. Assigning keeps the target and loads at most a draft model."""
        return self._speculative

    @speculative_config.setter
    def speculative_config(self, config: SpeculativeConfig | Mapping[str, Any] | None) -> None:
        config = SpeculativeConfig.of(config)
        drafter = drafters.create(config)
        self._idle, self._drafts = {**self._idle, **self._drafts}, {}
        drafter.attach(self.runner, self._load_draft)
        k = None if config.num_speculative_tokens == "auto" else drafter.num_speculative_tokens
        self.engine = Engine(self.runner, drafter, k, self.engine_config, self.tokenizer, self._measured, config.rule)
        self._speculative = config

    def generate(
        self,
        prompts: Prompt | list[str] | list[list[int]],
        sampling_params: SamplingParams | None = None,
        **sampling: Any,
    ) -> list[GenerationOutput]:
        """Continue one prompt or many: text or token ids, run together.

        Sampling is given as SamplingParams or as its fields (`max_tokens=64, temperature=0`). Returns the outputs in
        the order of the prompts, n for each. Raises RequestError's kinds before anything runs.
        """
        params = self._params(sampling_params, sampling)
        if not isinstance(prompts, (str, list, tuple)):
            raise ConfigError(f"a prompt is text or a list of token ids, not {type(prompts).__name__}")
        many = [prompts] if isinstance(prompts, str) or _is_ids(prompts) else list(prompts)
        encoded = [self.encode(prompt) for prompt in many]  # type: ignore[arg-type]
        requests = []
        try:
            for ids in encoded:
                requests += self.engine.add(ids, params)
            for _ in self.engine.run():
                pass
        finally:
            for request in requests:
                self.engine.abort(request)  # a no-op unless something went wrong or was interrupted
        outputs = [self.engine.output(request) for request in requests]
        for i, output in enumerate(outputs):
            prompt = many[i // params.n]
            output.prompt = prompt if isinstance(prompt, str) else None
        return outputs

    def chat(
        self, messages: list[dict[str, str]], sampling_params: SamplingParams | None = None, **sampling: Any
    ) -> GenerationOutput:
        """The model's answer to a conversation of {"role": ..., "content": ...}; n must be 1."""
        params = self._params(sampling_params, sampling)
        if params.n != 1:
            raise ConfigError(f"chat gives one output; n must be 1, not {params.n}")
        return self.generate(self.render(messages), params)[0]

    def stream(
        self, prompt: Prompt | list[dict[str, str]], sampling_params: SamplingParams | None = None, **sampling: Any
    ) -> Iterator[TokenEvent]:
        """Tokens as they come, each with the drafter that guessed it; the last one carries the whole output.

        `prompt` is text, token ids or a conversation. Closing the iterator stops the request.
        """
        params = self._params(sampling_params, sampling)
        if params.n != 1:
            raise ConfigError(f"stream gives one output; n must be 1, not {params.n}")
        chat = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)
        ids = self.render(prompt) if chat else self.encode(prompt)  # type: ignore[arg-type]
        (request,) = self.engine.add(ids, params)
        events = self._events(self.engine, request)
        next(events)  # enters its `try`: closing the iterator stops the request even if nothing was read from it
        return events

    def _events(self, engine: Engine, request: Request) -> Iterator[Any]:
        stream, at = request.stream, 0
        try:
            yield None
            while at < len(request.seq.output) or not request.finished:
                if at == len(request.seq.output):  # else another stream's steps have brought tokens for this one, too
                    engine.step()
                for token in request.seq.output[at:]:
                    by = request.drafted_by[at] if at < len(request.drafted_by) else None  # a step was interrupted
                    at += 1
                    if request.finished and at == len(request.seq.output):
                        output = engine.output(request)
                        yield TokenEvent(token, stream.take(final=True), by, output.finish_reason, output)
                        return
                    if len(stream.tokens) < at:
                        stream.feed([token])
                    yield TokenEvent(token, stream.take(), by)
        finally:
            engine.abort(request)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt. Raises EmptyPrompt, and ConfigError for text without a tokenizer."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ConfigError("this model has no tokenizer; give token ids instead of text")
            ids = self._tokenize(prompt)
            if not prompt or not ids:
                raise EmptyPrompt("the prompt is empty; give at least one token")
            return ids
        if not _is_ids(prompt):
            raise ConfigError(f"a prompt is text or a list of token ids, not {type(prompt).__name__}")
        return list(prompt)

    def render(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a conversation under the model's chat template, ready for the answer."""
        if self.tokenizer is None or not getattr(self.tokenizer, "chat_template", None):
            raise ConfigError("this model has no chat template; use generate")
        if not isinstance(messages, list):
            raise ConfigError(f"a conversation is a list of messages, not {messages!r}")
        if not messages:
            raise EmptyPrompt("the conversation is empty; give at least one message")
        parts = ("role", "content")
        if bad := [m for m in messages if not isinstance(m, dict) or any(not isinstance(m.get(p), str) for p in parts)]:
            raise ConfigError(f"a message is {{'role': ..., 'content': ...}}, not {bad[0]!r}")
        try:
            text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # templates raise what they like for conversations they refuse
            raise ConfigError(f"the chat template refuses this conversation: {error}") from None
        return self._tokenize(text, add_special_tokens=False)

    def _tokenize(self, text: str, **options: Any) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"the prompt is not UTF-8 text ({error.reason} at {error.start})") from None
        ids: list[int] = self.tokenizer(text, **options)["input_ids"]
        return ids

    @staticmethod
    def _params(given: SamplingParams | None, sampling: dict[str, Any]) -> SamplingParams:
        if given is not None and sampling:
            raise ConfigError("give sampling_params or its fields, not both")
        if given is not None and not isinstance(given, SamplingParams):
            raise ConfigError(f"sampling_params must be SamplingParams, not {given!r}; or give its fields as keywords")
        return given if given is not None else _make(SamplingParams, sampling)


def _is_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(isinstance(t, int) for t in prompt)


def _make(kind: Any, given: dict[str, Any]) -> Any:
    names = [f.name for f in fields(kind)]
    if unknown := [name for name in given if name not in names]:
        raise ConfigError(f"unknown option {unknown[0]!r}; valid: {', '.join(names)}")
    return kind(**given)
