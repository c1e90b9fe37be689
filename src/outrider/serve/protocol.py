"""What requests may say: OpenAI's fields and vLLM's. Unknown ones are refused, those that are ignored stand here."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler

from outrider.config import SamplingParams
from outrider.errors import brief
from outrider.llm import LLM
from outrider.serve.http import Refusal
from outrider.serve.settings import SAMPLED_BY, Settings

SALT = re.compile(r"[^@/\\]{1,128}")
TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,17}")  # each spelt in one way: no key can stand for another


Choice = Annotated[str | dict[str, Any] | None, Field(description="none, auto, required, or an object that names one")]


def _adjust(schema: Any) -> None:
    """Lists and objects are read up to what is wrong in them; 5.0 is a whole number, as in JSON's schemas."""
    if isinstance(schema, dict):
        if schema.get("type") in ("list", "dict"):
            schema["fail_fast"] = True
        if schema.get("type") == "int":
            own = dict(schema)
            schema.clear()
            schema |= {"type": "function-before", "function": {"type": "no-info", "function": whole}, "schema": own}
            return
        schema = schema.values()
    elif not isinstance(schema, (list, tuple)):
        return
    for part in schema:
        _adjust(part)


def whole(given: Any) -> Any:
    """5 for 5.0; all else as it is."""
    return int(given) if isinstance(given, float) and given.is_integer() else given


class Body(BaseModel):
    """Strict: a number is no text, a text no number; null is as good as nothing said.

    A field that may be of several kinds is described by what they are, which is what a wrong one is answered with.
    """

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())
    pointless: ClassVar[dict[str, Any]] = {}
    here: ClassVar[dict[str, str]] = {}  # what fields of a chat are called, in a body that is answered as one

    def in_its_words(self, error: Refusal) -> Refusal:
        """A chat's refusal, with the names that fields have here; one that was given under the chat's keeps it."""
        name, given = error.param or "", getattr(self, error.param or "", None)
        if name == "min_tokens":  # which is held against another
            return Refusal(
                error.status, str(error).replace("max_tokens", self.here.get("max_tokens", "max_tokens")), name
            )
        return error.under(self.here[name]) if name in self.here and given is None else error

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> Any:
        """To tell of each of a million wrong items takes gigabytes."""
        schema = handler(source)
        _adjust(schema)
        return schema


class StreamOptions(Body):
    """`include_usage`: a last frame with usage and metrics; with `continuous_usage_stats`, too, usage in every frame.

    OpenAI's `include_obfuscation` would pad frames; it is ignored.
    """

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class TextPart(Body):
    """A part of a content."""

    type: Literal["text"]
    text: str


class Prediction(Body):
    """OpenAI's predicted output."""

    type: Literal["content"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        """All of it."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class Ignored(Body):
    """Fields that change no token and are taken without a word."""

    pointless: ClassVar[dict[str, Any]] = {  # what others serve and we do not, as it asks for nothing
        "use_beam_search": False, "early_stopping": False, "length_penalty": 1.0, "watermarking": False,
        "logprob_token_ids": [], "prompt_embeds": [], "thinking_token_budget": -1, "repetition_detection": {},
        "vllm_xargs": {}, "kv_transfer_params": {}, "ec_transfer_params": {}, "return_token_offsets": False,
        "return_mm_kwargs": False, "routed_experts_prompt_start": 0,
    }  # fmt: skip

    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    request_id: Any = None
    session_id: Any = None
    stream_interval: Any = None
    spaces_between_special_tokens: bool | None = None


class Common(Ignored):
    """What all that generate have in common."""

    model: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    min_tokens: int | None = None
    stop: Annotated[str | list[str] | None, Field(description="text, or a list of texts")] = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    priority: int | None = None
    deadline: float | None = None
    cache_salt: str | None = None
    speculative_config: Annotated[dict[str, Any] | bool | None, Field(description="an object, or false")] = None
    structured_outputs: dict[str, Any] | None = None


# what a body that is answered as a chat hands to it as it is
SAME = (*(Common.model_fields.keys() - Ignored.model_fields.keys()), "chat_template_kwargs", "include_reasoning")


class Sampled(Common):
    """What completions and chats have in common."""

    n: int | None = None
    max_tokens: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: dict[str, Any] | None = None
    prediction: Annotated[
        str | Prediction | None, Field(description="a text, or {'type': 'content', 'content': text or text parts}")
    ] = None

    @property
    def outputs(self) -> int:
        """How many are asked for."""
        return self.n or 1

    def check(self, settings: Settings) -> None:
        """Refuse what the server's limits or the fields' relations do not allow."""
        if self.stream_options is not None and not self.stream:
            raise Refusal(400, "stream_options belongs to a stream; set stream to true", "stream_options")
        if self.n is not None and not 1 <= self.n <= settings.max_n:
            raise Refusal(400, f"n must be 1 to {settings.max_n}, not {brief(self.n)}", "n")
        if self.outputs > settings.max_prompts:
            asked = ("prompt and n ask", "prompt") if "prompt" in type(self).model_fields else ("n asks", "n")
            raise Refusal(400, f"{asked[0]} for more than {settings.max_prompts} outputs", asked[1])
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > settings.max_stop_strings:
            raise Refusal(400, f"stop has {len(stops)} strings; at most {settings.max_stop_strings}", "stop")
        if any(len(stop) > 1000 for stop in stops):
            raise Refusal(400, "stop has a string of more than 1000 characters", "stop")
        if self.cache_salt is not None and not SALT.fullmatch(self.cache_salt):
            raise Refusal(400, "cache_salt must be 1 to 128 characters without @, / and \\", "cache_salt")
        self.constraint()

    def sampling(
        self, settings: Settings, most: int, logprobs: int | None, after: str | list[str] | None = None, **more: Any
    ) -> SamplingParams:
        """For at most `most` tokens; `more` goes before what is said. A constraint without `after` gets this one.

        Raises ConfigError, naming what is wrong.
        """
        own = "logprobs" if isinstance(self, CompletionBody) else "top_logprobs"
        for name, count in ((own, logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None and not 0 <= count <= settings.max_logprobs:
                raise Refusal(400, f"{name} must be 0 to {settings.max_logprobs}, not {brief(count)}", name)
        given = {name: getattr(self, name) for name in (*SAMPLED_BY, *PLAIN) if getattr(self, name) is not None}
        if given.get("seed") == -1:  # as in vLLM: none
            del given["seed"]
        if self.logit_bias is not None:
            given["logit_bias"] = _bias(self.logit_bias)
        defaults = {name: value for name, value in settings.defaults.items() if name not in ("max_tokens", *given)}
        given["structured_outputs"] = self.constraint()
        given["prompt_logprobs"] = self.logprobs_of_prompt(logprobs)
        given["prediction"] = getattr(self.prediction, "text", self.prediction)
        params = SamplingParams(**defaults, **(given | more), max_tokens=most, logprobs=logprobs)
        if after and (asked := params.structured_outputs) and asked.after is None:
            params = replace(params, structured_outputs=replace(asked, after=after))
        return params

    def logprobs_of_prompt(self, logprobs: int | None) -> int | None:
        """How many of the likeliest tokens are asked for beside each of the prompt; None for no numbers at all."""
        return self.prompt_logprobs

    def constraint(self) -> dict[str, Any] | None:
        """What the output must be, as `structured_outputs`, which `response_format` is another way to say."""
        asked = _constraint_of(self.response_format)
        if asked is not None and self.structured_outputs is not None:
            raise Refusal(400, "response_format and structured_outputs cannot both be given", "response_format")
        return self.structured_outputs if asked is None else asked

    def most(self, default: int | None) -> int | None:
        """Tokens asked for; None for as many as there is room."""
        raise NotImplementedError


PLAIN = (
    "n", "presence_penalty", "frequency_penalty", "seed", "min_tokens", "stop", "stop_token_ids", "ignore_eos",
    "include_stop_str_in_output", "skip_special_tokens", "bad_words", "allowed_token_ids",
)  # fmt: skip


def _constraint_of(given: dict[str, Any] | None) -> dict[str, Any] | None:
    """A `response_format`, OpenAI's or llama.cpp's (the schema beside the type), as `structured_outputs`."""
    if given is None:
        return None
    given = {key: value for key, value in given.items() if value is not None}
    if (kind := given.get("type")) == "structural_tag":
        return {"structural_tag": given}
    if kind not in ("text", "json_object", "json_schema"):
        valid = "text, json_object, json_schema or structural_tag"
        raise Refusal(400, f"response_format: type must be {valid}, not {brief(kind)}", "response_format")
    inner = given.get("json_schema")
    said = {*given} | ({*inner} if isinstance(inner, dict) else set())
    known = {"type"} if kind == "text" else {"type", "json_schema", "schema", "name", "description", "strict"}
    if unknown := said - known:
        raise Refusal(400, f"response_format has no field {brief(min(unknown))}", "response_format")
    if kind == "text":
        return None
    if "schema" in given and inner is not None:
        raise Refusal(400, "response_format: schema and json_schema cannot both be given", "response_format")
    schema = inner.get("schema") if isinstance(inner, dict) else given.get("schema")
    if kind == "json_object" and schema is None:
        return {"json_object": True}
    if not isinstance(schema, dict):
        told = f"response_format: json_schema must be an object whose 'schema' is one, not {brief(schema)}"
        raise Refusal(400, told, "response_format")
    return {"json": schema}


def _bias(given: dict[str, float]) -> dict[int, float]:
    for key in given:
        if not TOKEN_ID.fullmatch(key):
            raise Refusal(400, f"logit_bias maps token ids to numbers; {key[:40]!r} is no token id", "logit_bias")
    return {int(key): max(min(bias, 100.0), -100.0) for key, bias in given.items()}


class CompletionBody(Sampled):
    """`/v1/completions`."""

    prompt: Annotated[
        str | list[int] | list[str] | list[list[int]],
        Field(description="text, a list of token ids, or a list of either"),
    ]
    logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    def logprobs_of_prompt(self, logprobs: int | None) -> int | None:
        """An echo has them as well."""
        asked = (self.prompt_logprobs, logprobs if self.echo else None)
        return max((count for count in asked if count is not None), default=None)

    def check(self, settings: Settings) -> None:
        """Also what is OpenAI's and not ours."""
        super().check(settings)
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise Refusal(400, "best_of was removed; ask for n outputs and choose", "best_of")
        if self.suffix:
            raise Refusal(400, "suffix is not supported: the model does not fill in the middle", "suffix")
        if self.max_tokens is not None and self.max_tokens < (0 if self.echo else 1):
            raise Refusal(400, f"max_tokens must be at least 1, not {brief(self.max_tokens)}", "max_tokens")
        if self.max_tokens == 0 < (self.min_tokens or 0):  # the engine writes one, which nobody sees
            raise Refusal(400, f"min_tokens ({brief(self.min_tokens)}) must not exceed max_tokens (0)", "min_tokens")

    @property
    def outputs(self) -> int:
        """Of all prompts."""
        return len(self.prompts) * (self.n or 1)

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One or many, as a list."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise Refusal(400, "the prompt is empty; give at least one token", "prompt")
        return [self.prompt] if isinstance(self.prompt[0], int) else self.prompt

    def most(self, default: int | None) -> int | None:
        """16 where nobody says."""
        return self.max_tokens if self.max_tokens is not None else default or 16


class ChatBody(Sampled):
    """`/v1/chat/completions`."""

    pointless: ClassVar[dict[str, Any]] = Sampled.pointless | {
        "functions": [], "function_call": "none", "audio": {}, "web_search_options": None, "moderation": {},
        "documents": [], "echo": False, "response_role": "assistant", "add_special_tokens": False,
        "mm_processor_kwargs": {}, "media_io_kwargs": {}, "reasoning": {}, "best_of": 1, "suffix": None,
    }  # fmt: skip

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Choice = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    verbosity: Any = None  # ignored
    modalities: list[str] | None = None

    def check(self, settings: Settings) -> None:
        """Also what belongs to conversations."""
        super().check(settings)
        if self.top_logprobs and not self.logprobs:
            raise Refusal(400, "top_logprobs needs logprobs to be true", "top_logprobs")
        if self.chat_template is not None and not settings.trust_chat_template:
            raise Refusal(400, "chat_template is not taken from requests by this server", "chat_template")
        if self.modalities not in (None, ["text"]):
            raise Refusal(400, 'modalities: the model writes text; give ["text"] or leave it out', "modalities")
        if (most := self.most(None)) is not None and most < 1:
            name = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
            raise Refusal(400, f"{name} must be at least 1, not {brief(most)}", name)

    @property
    def alternatives(self) -> int | None:
        """How many of the likeliest tokens are asked for beside each of the output; None for no logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def most(self, default: int | None) -> int | None:
        """max_completion_tokens goes before max_tokens."""
        said = (self.max_completion_tokens, self.max_tokens, default)
        return next((most for most in said if most is not None), None)


class Translated(ChatBody):
    """One asked for in other words: where the template refuses it, its system messages become one, at the beginning."""


class TokenizeBody(Body):
    """`/tokenize`: a prompt, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """`/detokenize`."""

    model: str | None = None
    tokens: list[int]


def bound_of_drafts(given: dict[str, Any] | bool | None, llm: LLM) -> int | None:
    """A request's `speculative_config` as a bound on its drafts: 0 for none, None for the server's own."""
    name = "speculative_config"
    if given is None or given is True:
        return None
    if given is False:
        return 0
    if unknown := sorted(given.keys() - {"method", "num_speculative_tokens"}):
        raise Refusal(400, f"{name} of a request has method and num_speculative_tokens, not {unknown[0][:40]!r}", name)
    method, k = given.get("method"), whole(given.get("num_speculative_tokens"))
    if method == "none":
        return 0
    own = llm.speculative_config.method
    if method not in (None, own):
        raise Refusal(400, f"{name}: method must be {own!r}, which this server was started with, or 'none'", name)
    if k is None:
        return None
    most = llm.engine.k
    if isinstance(k, bool) or not isinstance(k, int) or not 0 <= k <= most:
        raise Refusal(400, f"{name}: num_speculative_tokens must be 0 to {most}, as this server was started", name)
    return k
