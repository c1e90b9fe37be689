"""The offline front door: `LLM("tiny").generate("Once upon a time")`."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from dataclasses import fields, replace
from functools import cache
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, overload

import numpy as np
import torch
from torch import Tensor

from outrider import drafters
from outrider.config import EngineConfig, SamplingParams, SpeculativeConfig, promised
from outrider.engine import Engine, Request, TextStream, free_memory
from outrider.engine.text import tokenizing
from outrider.errors import (
    ConfigError,
    EmptyPrompt,
    OutriderError,
    RequestError,
    RequestTooLong,
    brief,
    interrupts_wait,
    message_of,
    told,
)
from outrider.follow import LeadingRunner, follow, guarantee
from outrider.kv import OffloadKV, PagedKV
from outrider.kv.paged import MODEST
from outrider.load import Checkpoint, Progress, check_vocabulary, load, open_source
from outrider.ops import native, untouched
from outrider.outputs import GenerationOutput, TokenEvent
from outrider.parallel import MODES, CutModel, Group, ranks_for
from outrider.plan import fastest_mode
from outrider.runner import Runner, Watched, check_exactness
from outrider.speculate import Drafter

Ids = Sequence[int] | np.ndarray[Any, Any] | Tensor  # arrays and tensors: integers, in one dimension
Prompt = str | Ids
Message = Mapping[str, Any]
"""`{"role": ..., "content": ...}`, the content being text or a list of parts `{"type": "text", "text": ...}`."""

PIECE, SEAM = 2**14, 16  # characters of a long prompt counted at a time; tokens that cutting it there may have made
PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}  # where one has its text
TO_CUT = 2**20  # characters of a prompt of any length
RENDERED = "chat_template", "tokenize", "conversation", "messages", "self"  # what rendering itself calls so
RENDERING = 5.0  # seconds that a chat template may take
T = TypeVar("T")
log = logging.getLogger(__name__)


class Drafting(NamedTuple):
    """A drafter that is attached, how it was asked for, and what the target keeps for it."""

    drafter: Drafter
    config: SpeculativeConfig
    watched: Watched


class LLM:
    """A model, ready to generate, plainly or speculatively, with the same tokens.

    model: a folder, a GGUF file, a hub id, `smollm2`, an embedded model (`tiny`), or a Checkpoint already in memory.
    speculative_config: None (plain decoding), "auto" (chosen at each step), or vLLM-style, such as {"method": "ngram",
        "num_speculative_tokens": 8}; assign to the attribute of that name to change it later, with the target loaded.
    dtype: auto (the checkpoint's; bfloat16 for quantised weights), float32, bfloat16, float16.
    device: auto, cpu, cuda, cuda:N.
    quantization: None, int8 or int4: the model's weights are rounded as they are loaded; draft models stay as they are.
    activations: None, or int8: beside weights of 4 to 8 bits the activations are rounded, too; drafts are as above.
    tensor_parallel_size: ranks over which the model is cut, as torchrun has started them; None: all of them.
    tensor_parallel_mode: gather, ordered, reduce (parallel/ has what they promise), or auto, the faster by prediction
        of the first two. On ranks other than 0 this constructor serves rank 0, and ends the process when that ends.
    progress: called as (what, done, total) while loading and reading long prompts; if it raises as one is read, never
        again.
    Further keywords are those of EngineConfig. Raises OutriderError's kinds: ModelNotFound, CheckpointError, ...

    Any number of threads may use one LLM. Requests that are under way at once share its forwards, whoever made them,
    and give what they would give alone; a request that fails raises in its own call and touches no other. A stream
    goes on while others wait for theirs, read or not. Assigning speculative_config needs all requests to have ended.
    """

    @untouched()
    def __init__(
        self,
        model: str | Path | Checkpoint,
        *,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | str | None = None,
        dtype: str = "auto",
        device: str = "auto",
        progress: Progress | None = None,
        quantization: str | None = None,
        activations: str | None = None,
        tensor_parallel_size: int | None = None,
        tensor_parallel_mode: str = "gather",
        **engine: Any,
    ) -> None:
        own = [p.name for p in signature(LLM).parameters.values() if p.kind is p.KEYWORD_ONLY]
        self.engine_config = _make(EngineConfig, engine, own)
        config = SpeculativeConfig.of(speculative_config)
        if progress is not None and not callable(progress):
            raise ConfigError(f"progress is called as progress(what, done, total), and {brief(progress)} cannot be")
        drafters.create(config)  # a wrong option is known before anything is loaded
        for name, given in (("quantization", quantization), ("activations", activations)):
            if given is not None and isinstance(model, Checkpoint):
                raise ConfigError(f"{name}: chosen while a model is loaded; this one is in memory: give its folder")
        if tensor_parallel_mode not in (*MODES, "auto"):
            raise ConfigError(
                f"tensor_parallel_mode {brief(tensor_parallel_mode)} is unknown; valid: {', '.join(MODES)}, auto"
            )
        self._dtype, self._device, self._progress = dtype, device, progress
        self.ranks, self._mode = ranks_for(tensor_parallel_size, device), tensor_parallel_mode
        if self.ranks and self.ranks.rank:
            follow(self.ranks)
        if isinstance(model, Checkpoint):
            if self.ranks:
                raise ConfigError("weights are cut while they are loaded; this model is in memory: give its folder")
            self.checkpoint = model
        else:
            group = self._group(self.ranks.size, model) if self.ranks else None
            self.checkpoint = load(model, dtype, device, progress, quantization, activations, group)
        if self.checkpoint.model.device.type == "cpu" and (reason := native.lacking()):
            _say_once(f"slower than it could be: {reason}")
        self.tokenizer = self.checkpoint.tokenizer
        self.runner = self._runner(self.checkpoint, self.engine_config.kv_offload)
        with untouched(self.runner.model.device):
            self._measured, self.parallelism = guarantee(self.runner.model)  # in words; empty on one rank
            if self._measured == "bitwise":
                self._measured = check_exactness(self.runner.model, self.runner.kv)
        self.runner.prefixes = self.engine_config.enable_prefix_caching
        if self.engine_config.kv_memory is None:  # measured once, so that every method gets the same
            home = torch.device("cpu") if self.engine_config.kv_offload else self.runner.model.device
            memory = int(0.9 * free_memory(home))
            if self.ranks:
                memory = int(0.9 * min(free_memory(home), *self.ranks.ask("memory", home.type)))
                memory //= self.ranks.local_size if home.type == "cpu" else 1
            self.engine_config = replace(self.engine_config, kv_memory=max(1, memory))
        self._drafts: dict[str, Runner] = {}
        self._draft_size = 1  # ranks that share a draft model
        self._idle: dict[str, Runner] = {}  # draft models that the next drafter may want again
        plain = drafters.create(SpeculativeConfig())
        self.engine = Engine(self.runner, plain, 0, self.engine_config, self.tokenizer, self._measured)
        self.speculative_config = config

    def _group(self, size: int, model: str | Path) -> Group | None:
        """The first ranks, of which so many share a model; None for one alone, which needs no others."""
        if self.ranks is None or size == 1:
            return None
        mode = self._mode
        if mode == "auto":
            mode = fastest_mode(open_source(model).config, size, self.ranks.device.type)
        return self.ranks.group(size, mode)

    def _runner(self, checkpoint: Checkpoint, offload: bool = False) -> Runner:
        model, config = checkpoint.model, self.engine_config
        chunk = config.max_num_batched_tokens
        kv = PagedKV(model.config, model.dtype, model.device)
        if offload:  # every forward copies all that came before: few large ones
            kv, chunk = OffloadKV(model.config, model.dtype, model.device, config.on_chip_layers), max(chunk, 4096)
        runner = (LeadingRunner if isinstance(model, CutModel) else Runner)(model, kv, chunk=chunk)
        runner.tokenizer, runner.path = checkpoint.tokenizer, checkpoint.path
        if self._progress is not None:
            report = self._progress
            runner.progress = lambda done, total: report("reading the prompt", done, total)
        return runner

    def _load_draft(self, name: str) -> Runner:
        if name in self._idle:
            self._drafts[name] = self._idle.pop(name)
        elif name not in self._drafts:
            self._idle.clear()  # gives the memory back before more is taken
            group = self._group(self._draft_size, name)
            draft = load(name, self._dtype, str(self.runner.model.device), self._progress, group=group)
            check_vocabulary(self.checkpoint, draft)
            self._drafts[name] = self._runner(draft)
            self._drafts[name].progress = None
            self._drafts[name].prefixes = self.engine_config.enable_prefix_caching
            if isinstance(kv := self._drafts[name].kv, PagedKV):
                kv.modest = min(MODEST, (self.engine_config.kv_memory or 0) // 16)
        return self._drafts[name]

    @property
    def exactness(self) -> str:
        """What is promised now: `bitwise`, `law` (see docs/architecture.md), or `lossy` under acceptance `typical`."""
        return promised(self._speculative.acceptance_method, self._measured)

    @property
    def speculative_config(self) -> SpeculativeConfig:
        """How drafts are made. Assigning keeps the target and loads at most a draft model.

        Raises ConfigError while requests run (an open stream is one until its last token is written, or it is closed),
        and what loading a draft model or heads raises: ModelError's kinds. Then all stays as it was.
        """
        return self._speculative

    @speculative_config.setter
    def speculative_config(self, config: SpeculativeConfig | Mapping[str, Any] | str | None) -> None:
        config = SpeculativeConfig.of(config)
        drafter, size = drafters.create(config), config.draft_tensor_parallel_size or 1
        if size > (most := self.ranks.size if self.ranks else 1):
            raise ConfigError(f"draft_tensor_parallel_size is {size}, and there are {most} ranks")
        with self.engine.idle(), untouched(self.runner.model.device):
            if size != self._draft_size:
                self._idle, self._drafts, self._draft_size = {}, {}, size
            self._idle, self._drafts = {**self._idle, **self._drafts}, {}
            before, self.runner.watched = self.runner.watched, Watched()
            try:
                drafter.attach(self.runner, self._load_draft)
                self._draft_with(drafter, config)
            except BaseException as error:  # the drafter that was there stays
                self.runner.watched = before
                if isinstance(error, Exception) and not isinstance(error, OutriderError):  # of another package's code
                    raise ConfigError(f"method {config.method!r} cannot be attached: {told(error)}") from error
                raise

    def _draft_with(self, drafter: Drafter, config: SpeculativeConfig) -> None:
        self.engine.draft_with(drafter, drafter.num_speculative_tokens, config.rule)
        self._speculative = config

    @property
    def drafting(self) -> Drafting:
        """The drafter with all that it has learnt; assign it to go on with that drafter after others had their turn."""
        return Drafting(self.engine.drafter, self._speculative, self.runner.watched)

    @drafting.setter
    def drafting(self, drafting: Drafting) -> None:
        with self.engine.idle():
            self.runner.watched = drafting.watched
            self._draft_with(drafting.drafter, drafting.config)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **sampling: Any,
    ) -> list[GenerationOutput]:
        """Continue one prompt or many: text or token ids, run together.

        Sampling is given as SamplingParams, as a list of them, one for each prompt, or as its fields (`max_tokens=64,
        temperature=0`). Returns the outputs in the order of the prompts, n for each. Raises ConfigError and
        RequestError's kinds before anything runs, and later, with no output, the error of this call's first request
        that fails.
        """
        alone = isinstance(prompts, str) or _ids(prompts) is not None
        if not alone and not is_list(prompts):
            raise _no_prompt(prompts)
        many: list[Any] = [prompts] if alone else list(prompts)
        each = _for_each(sampling_params, sampling, len(many))
        requests: list[Request] = []
        try:
            for ids, params in zip([self.encode(prompt) for prompt in many], each, strict=True):
                with interrupts_wait():  # between the two nobody could abort them
                    requests += self.engine.add(ids, params)
            self.engine.finish(requests)
        finally:
            for request in requests:
                self.engine.abort(request)  # a no-op unless one was refused, or something went wrong or was interrupted
        outputs = [self.engine.output(request) for request in requests]
        given = [prompt for prompt, params in zip(many, each, strict=True) for _ in range(params.n)]
        for prompt, output in zip(given, outputs, strict=True):
            output.prompt = prompt if isinstance(prompt, str) else None
        return outputs

    @overload
    def chat(self, messages: Sequence[Message], *options: Any, **more: Any) -> GenerationOutput: ...
    @overload
    def chat(self, messages: Sequence[Sequence[Message]], *options: Any, **more: Any) -> list[GenerationOutput]: ...
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **sampling: Any,
    ) -> GenerationOutput | list[GenerationOutput]:
        """The model's answer to a conversation, or a list of them to a list of conversations; n must be 1.

        The other keywords are those of `render`. Raises what `render` and `generate` raise, and ConfigError for n > 1.
        """
        many = is_list(messages) and bool(messages) and all(map(is_list, messages))
        conversations: Any = messages if many else [messages]
        each = _for_each(sampling_params, sampling, len(conversations))
        if wrong := next((params.n for params in each if params.n != 1), 0):
            raise ConfigError(f"chat gives one output; n must be 1, not {wrong}")
        prompts = [
            self.render(
                conversation, chat_template=chat_template, chat_template_kwargs=chat_template_kwargs,
                add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message,
            )
            for conversation in conversations
        ]  # fmt: skip
        outputs = self.generate(prompts, each)
        return outputs if many else outputs[0]

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> Iterator[TokenEvent]:
        """Tokens as they come, each with the drafter that guessed it; the last one carries the whole output.

        `prompt` is text, token ids or a conversation, for which `render` explains the keywords. Closing the iterator,
        or dropping it, stops the request. Its error, if it fails, is raised behind the tokens it had. Raises at once
        what `read` raises, RequestError's kinds for a request that cannot be served, and ConfigError for n > 1.
        """
        params = sampling_params_of(sampling_params, sampling)
        if params.n != 1:
            raise ConfigError(f"stream gives one output; n must be 1, not {params.n}")
        ids = self.read(prompt, chat_template=chat_template, chat_template_kwargs=chat_template_kwargs)
        with interrupts_wait():
            (request,) = self.engine.add(ids, params)
            events = self._events(request)
            next(events)  # enters its `try`: closing the iterator stops the request even if nothing was read from it
        return events

    def _events(self, request: Request) -> Iterator[Any]:
        text, at = TextStream(self.tokenizer, request.seq.params, request.seq.tokens[: request.seq.prompt_len]), 0
        try:
            yield None
            for tokens in self.engine.follow(request):
                for token in tokens:
                    by, at = request.drafted_by[at], at + 1
                    last = request.finished and not request.error and at == request.ready
                    text.feed([token] if at <= request.spoken else [], final=last)
                    output = self.engine.output(request, text) if last else None
                    reason = output.finish_reason if output else None
                    yield TokenEvent(token, text.take(final=last), by, reason, output)
        finally:
            self.engine.abort(request)

    def read(self, prompt: Prompt | Sequence[Message], **template: Any) -> list[int]:
        """Token ids of text, token ids or a conversation, for which `render` explains the keywords.

        Raises what `encode` and `render` raise, and ConfigError for keywords without a conversation.
        """
        if is_list(prompt) and len(prompt) and isinstance(prompt[0], Mapping):
            return self.render(prompt, **template)  # type: ignore[arg-type]
        if any(value is not None for value in template.values()):
            raise ConfigError(f"{' and '.join(template)} belong to a conversation, a list of messages")
        return self.encode(prompt)  # type: ignore[arg-type]

    def encode(self, prompt: Prompt, *, add_special_tokens: bool = True, any_length: bool = False) -> list[int]:
        """Token ids of a prompt; of text with the special tokens that the tokenizer adds, unless told not to.

        Raises EmptyPrompt, ConfigError for text without a tokenizer, and RequestTooLong for text that is far over the
        context, which is found out without tokenizing all of it; if `any_length`, only of more than 2^20 characters.
        """
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ConfigError("this model has no tokenizer; put its tokenizer.json beside it, or give token ids")
            ids = self._tokenize(prompt, "prompt", any_length, add_special_tokens=add_special_tokens)
            if not prompt or not ids:
                raise EmptyPrompt("the prompt is empty; give at least one token")
            return ids
        if (given := _ids(prompt)) is None:
            raise _no_prompt(prompt)
        return given

    def render(
        self,
        messages: Sequence[Message],
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        any_length: bool = False,
    ) -> list[int]:
        """Token ids of a conversation under the model's chat template, ready for the answer.

        chat_template: another template than the model's.  chat_template_kwargs: variables it knows, such as
        {"enable_thinking": False}.  continue_final_message: the last message is gone on with, instead of answered;
        needs add_generation_prompt=False.  any_length: as in `encode`. Raises EmptyPrompt, RequestTooLong and
        ConfigError.
        """
        if self.tokenizer is None or not (chat_template or getattr(self.tokenizer, "chat_template", None)):
            raise ConfigError("this model has no chat template; use generate")
        if not (chat_template is None or isinstance(chat_template, str)):
            raise ConfigError(f"chat_template is the text of a template, not {brief(chat_template)}")
        if not (chat_template_kwargs is None or isinstance(chat_template_kwargs, Mapping)):
            raise ConfigError(f"chat_template_kwargs maps names to values, not {brief(chat_template_kwargs)}")
        if own := [name for name in RENDERED if name in (chat_template_kwargs or ())]:
            raise ConfigError(f"chat_template_kwargs are variables of the template, and {own[0]!r} is none")
        if not is_list(messages):
            raise ConfigError(f"a conversation is a list of messages, not {brief(messages)}")
        if not messages:
            raise EmptyPrompt("messages: the conversation is empty; give at least one")
        conversation = [as_text(given) for given in messages]
        options = {
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            **(chat_template_kwargs or {}),
        }
        text = self.render_text(conversation, options)
        return self._tokenize(text, "messages", any_length, add_special_tokens=False)

    def render_text(self, conversation: list[Any], options: Mapping[str, Any]) -> str:
        """What the chat template makes of messages, with transformers' options. Raises ConfigError."""
        try:
            text: str = _within(
                RENDERING, lambda: self.tokenizer.apply_chat_template(conversation, tokenize=False, **options)
            )
            return text
        except Late:
            raise ConfigError(f"the chat template does not come to an end within {RENDERING:g} seconds") from None
        except Exception as error:  # templates raise what they like for conversations they refuse
            raise ConfigError(f"messages: the chat template refuses this conversation: {message_of(error)}") from None

    def _tokenize(self, text: str, what: str, any_length: bool, **options: Any) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"{what}: this is no UTF-8 text ({error.reason} at {error.start})") from None
        with tokenizing(text, self.tokenizer):
            if len(text) > (TO_CUT if any_length else PIECE):
                self._refuse_too_long(text)
            ids: list[int] = self.tokenizer(text, **options)["input_ids"]
        return ids

    def _refuse_too_long(self, text: str) -> None:
        """Count piece by piece, and no further than the context."""
        least = 0
        for at in range(0, len(text), PIECE):
            piece = self.tokenizer(text[at : at + PIECE], add_special_tokens=False, verbose=False)["input_ids"]
            least += max(0, len(piece) - SEAM)
            if least > self.engine.max_len:
                first = min(at + PIECE, len(text))
                raise RequestTooLong(
                    f"this model's maximum context length is {self.engine.max_len} tokens, and there are more than "
                    f"{least} in the first {first} of {len(text)} characters; shorten the prompt"
                )


def sampling_params_of(given: SamplingParams | None, sampling: dict[str, Any]) -> SamplingParams:
    """Parameters that are given as such, or as fields; not both. Raises ConfigError."""
    if given is not None and sampling:
        raise ConfigError("give sampling_params or its fields, not both")
    if given is not None and not isinstance(given, SamplingParams):
        raise ConfigError(f"sampling_params must be SamplingParams, not {brief(given)}; or give its fields as keywords")
    return given if given is not None else _make(SamplingParams, sampling)


def _for_each(given: Any, sampling: dict[str, Any], count: int) -> list[SamplingParams]:
    """Of so many prompts the parameters, which are given once, or for each. Raises ConfigError."""
    if not is_list(given):
        return [sampling_params_of(given, sampling)] * count
    if len(given) != count:
        raise ConfigError(f"there are {len(given)} sampling_params for {count} prompts; give one, or one for each")
    return [sampling_params_of(one, sampling) for one in given]


def is_list(given: Any) -> bool:
    """Whether it is a sequence of things: a list, a tuple, a column of a dataset; text and bytes are one thing."""
    return isinstance(given, Sequence) and not isinstance(given, (str, bytes, bytearray, memoryview))


def _ids(prompt: Any) -> list[int] | None:
    """The token ids that a prompt is given as; None if it is something else. Which ids exist is checked later."""
    if isinstance(prompt, (Tensor, np.ndarray)):
        return prompt.tolist() if prompt.ndim == 1 and _integral(prompt) else None
    if not is_list(prompt) or not all(isinstance(t, int) or (_integral(t) and t.ndim == 0) for t in prompt):
        return None
    return [t if isinstance(t, bool) else int(t) for t in prompt]


def _integral(array: Any) -> bool:
    """Whether a tensor, an array or a number of numpy's holds integers."""
    if isinstance(array, Tensor):
        there = array.layout == torch.strided and not array.is_meta
        return there and not (array.is_floating_point() or array.is_complex() or array.dtype == torch.bool)
    return isinstance(array, (np.ndarray, np.generic)) and np.issubdtype(array.dtype, np.integer)


def _no_prompt(given: Any) -> ConfigError:
    kind = type(given).__name__
    if is_list(given) and (odd := [each for each in given if not isinstance(each, int)]):
        kind = f"one with {brief(odd[0])}"
    if isinstance(given, (Tensor, np.ndarray)):
        kind = f"{kind} of {given.ndim} dimensions and {given.dtype}"
    return ConfigError(f"a prompt is text or a list (or a one-dimensional tensor) of token ids, not {kind}")


def as_text(given: Any) -> dict[str, Any]:
    """The same message, whose content is one text. Raises ConfigError."""
    content = given.get("content") if isinstance(given, Mapping) and isinstance(given.get("role"), str) else None
    if is_list(content) and content:
        content = "\n".join(map(_text_of, content))  # as vLLM does
    if not isinstance(content, str):
        raise ConfigError(f"messages: each is {{'role': ..., 'content': ...}}, not {brief(given)}")
    return {**given, "content": content}


def _text_of(part: Any) -> str:
    """Of a part of a message, by any of its names; what a model refused to say is text as well."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get(PARTS[kind]) if isinstance(kind, str) and kind in PARTS else part
    if not isinstance(text, str):
        raise ConfigError(f"messages: a part of one is {{'type': 'text', 'text': ...}}, not {brief(part)}")
    return text


def _within(seconds: float, work: Callable[[], T]) -> T:
    """What `work()` gives, in a thread of its own that is stopped if it takes longer; then TimeoutError is raised.

    It is stopped between two Python instructions: the templates of others may loop for ever.
    """
    outcome: Future[T] = Future()
    stopping = threading.Lock()  # the thread does not end meanwhile: another might have its number by then

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)
        with stopping:
            pass

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        return outcome.result(seconds)
    finally:
        with stopping:
            if not outcome.done():
                number = ctypes.c_ulong(thread.ident or 0)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(number, ctypes.py_object(SystemExit))


@cache
def _say_once(line: str) -> None:
    log.warning(line)


def _make(kind: Any, given: dict[str, Any], others: Sequence[str] = ()) -> Any:
    """Of these fields; `others` are valid beside them, and read elsewhere. Raises ConfigError."""
    names = [f.name for f in fields(kind)]
    if unknown := [name for name in given if name not in names]:
        raise ConfigError(f"unknown option {unknown[0]!r}; valid: {', '.join((*others, *names))}")
    return kind(**given)
