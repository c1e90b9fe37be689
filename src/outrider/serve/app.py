"""The routes of the server, over one AsyncLLM."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from functools import cache, partial
from typing import Any, TypeVar

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

import outrider
from outrider.async_llm import Answer, AsyncLLM, left
from outrider.config import SamplingParams, real
from outrider.errors import (
    ConfigError,
    DeadlineExceeded,
    EmptyPrompt,
    EngineError,
    OutriderError,
    RequestTooLong,
    brief,
)
from outrider.llm import as_text
from outrider.serve.answers import Chat, Completion, Job, Reply
from outrider.serve.calls import Family
from outrider.serve.http import (
    MESSAGES,
    OPEN,
    EventStream,
    Gate,
    Refusal,
    body_of,
    json_response,
    no_garbage,
    read,
    refusal,
    while_connected,
)
from outrider.serve.messages import MessagesBody, Say
from outrider.serve.metrics import Metrics
from outrider.serve.page import page
from outrider.serve.parser import Parser, parser_of
from outrider.serve.protocol import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    Sampled,
    TokenizeBody,
    Translated,
    bound_of_drafts,
)
from outrider.serve.reasoning import BRACKETS, Reading, way_of
from outrider.serve.replies import REF, REPLIES
from outrider.serve.responses import Respond, ResponsesBody
from outrider.serve.settings import Settings
from outrider.serve.tools import as_variables, check, constraint, family_of, for_templates, in_order, unusable
from outrider.serve.vocabulary import Vocabulary

B = TypeVar("B", bound=Body)
T = TypeVar("T")
JSON, PROMETHEUS = "application/json", "text/plain; version=0.0.4; charset=utf-8"
BODIES = (ChatBody, CompletionBody, ResponsesBody, MessagesBody, TokenizeBody, DetokenizeBody)
KEYS = {  # how an API key is given
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
    "basic": {"type": "http", "scheme": "basic", "description": "The key is the password."},
}
PROMPT_LOGPROBS = 2**20  # of a request, for one prompt of the whole context as many as that takes: 100 bytes each
READS = re.compile(r"""[.'"]reasoning(_content)?\b""")  # in a template that has its own place for it


def create_app(llm: AsyncLLM, settings: Settings) -> FastAPI:
    """An ASGI application that serves one model. It closes `llm` when it is shut down."""
    server = Server(llm, settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await llm.aclose()

    # the pages of FastAPI's documentation would load scripts from elsewhere
    app = FastAPI(title="Outrider", version=outrider.__version__, docs_url=None, redoc_url=None, lifespan=lifespan)

    def route(
        path: str, handler: Callable[..., Any], body: type[Body] | None, *gives: str, reply: str = "", method: str = "",
        refused: str = "Refusal",
    ) -> None:  # fmt: skip
        schema = None
        if body is not None:
            schema = {"requestBody": {"content": {JSON: {"schema": {"$ref": REF + body.__name__}}}, "required": True}}
        verb = method or ("GET" if body is None else "POST")
        no = {"description": "Refused", "content": {JSON: {"schema": {"$ref": REF + refused}}}}
        told: dict[int | str, Any] = {"4XX": no, "5XX": no}
        if gives:
            named = {"schema": {"$ref": REF + reply}}
            told[200] = {"content": {kind: named if kind == JSON else {} for kind in gives}}
        app.add_api_route(
            path, handler, methods=[verb], response_class=Response, responses=told, openapi_extra=schema,
        )  # fmt: skip
        if verb == "GET":  # whatever can be got has a head, which monitors and proxies ask for
            app.add_api_route(path, handler, methods=["HEAD"], response_class=Response, include_in_schema=False)

    route("/v1/chat/completions", server.chat, ChatBody, JSON, EventStream.media_type, reply="ChatReply")
    route("/v1/completions", server.complete, CompletionBody, JSON, EventStream.media_type, reply="CompletionReply")
    route("/v1/responses", server.respond, ResponsesBody, JSON, EventStream.media_type, reply="ResponsesReply")
    route(
        MESSAGES, server.messages, MessagesBody, JSON, EventStream.media_type, reply="MessagesReply",
        refused="MessagesRefusal",
    )  # fmt: skip
    route(
        f"{MESSAGES}/count_tokens", server.count, MessagesBody, JSON, reply="Counted", refused="MessagesRefusal"
    )  # fmt: skip
    route("/v1/models", server.models, None, JSON, reply="Models")
    route("/v1/models/{model:path}", server.model, None, JSON, reply="Model")
    route("/tokenize", server.tokenize, TokenizeBody, JSON, reply="Tokenized")
    route("/detokenize", server.detokenize, DetokenizeBody, JSON, reply="Detokenized")
    route("/tokenizer_info", server.tokenizer_info, None, JSON, reply="TokenizerInfo")
    route("/health", server.health, None)
    route("/ping", server.health, None)
    route("/ping", server.health, None, method="POST")
    route("/version", server.version, None, JSON, reply="Version")
    route("/metrics", server.metrics_text, None, PROMETHEUS)
    route("/", server.page, None, "text/html")

    @cache
    def described() -> dict[str, Any]:
        known = get_openapi(title=app.title, version=app.version, routes=app.routes)
        known["components"] = {"schemas": _schemas()}
        if settings.api_keys:
            known["components"]["securitySchemes"] = KEYS
            known["security"] = [{name: []} for name in KEYS]
            for path in OPEN:
                for about in known["paths"][path].values():
                    about["security"] = []
        return known

    app.openapi = described  # type: ignore[method-assign]

    async def refuse(request: Request, error: Exception) -> Response:
        told = refusal(error)
        if told.status == 404 and isinstance(error, HTTPException):
            path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
            known = [each.path for each in app.routes if isinstance(each, Route) and each.path != "/"]
            near = [each for each in known if each.endswith(path) or path.endswith(each)]  # a base URL that is not ours
            told = Refusal(404, f"no such route: {brief(path)}" + (f"; did you mean {near[0]!r}?" if near else ""))
        if told.status == 405:  # of all routes with this path; what raised it knows the first
            fit = [each for each in app.routes if each.matches(request.scope)[0] is not Match.NONE]
            told.headers["Allow"] = ", ".join(sorted({verb for each in fit for verb in getattr(each, "methods", ())}))
        return told.response(request.scope)

    for kind in (HTTPException, Refusal, OutriderError):
        app.add_exception_handler(kind, refuse)
    app.add_middleware(Gate, api_keys=settings.api_keys, max_body=settings.max_body, seen=server.metrics.done)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.cors_origins), allow_methods=["*"], allow_headers=["*"],
            expose_headers=["x-request-id"],
        )  # fmt: skip
    return app


class Server:
    """What the routes do."""

    def __init__(self, llm: AsyncLLM, settings: Settings) -> None:
        self.llm, self.settings, self.started = llm, settings, int(time.time())
        if settings.chat_template:
            if llm.llm.tokenizer is None:
                raise ConfigError("a chat template needs a tokenizer, and this checkpoint has none")
            llm.llm.tokenizer.chat_template = settings.chat_template
            try:
                llm.llm.render_text([{"role": "user", "content": "Hello."}], {})
            except ConfigError as error:
                raise ConfigError(f"--chat-template: {str(error).removeprefix('messages: ')}") from None
        self.vocabulary = Vocabulary(llm.llm.tokenizer)
        self.families: dict[str | None, Family | None] = {}  # of chat templates that were tried
        self.metrics = Metrics(settings.names[0], llm)
        llm.watch = self.metrics.progress

    # --- the two that generate ---

    async def complete(self, request: Request) -> Response:
        """`/v1/completions`."""
        body = await self._read(request, CompletionBody)
        self._check(body)
        prompts: list[Any] = list(body.prompts)
        options = {"add_special_tokens": body.add_special_tokens is not False, "any_length": _cut(body)}

        def ids() -> list[list[int]]:
            return [self.llm.llm.encode(prompt, **options) for prompt in prompts]

        def reply(job: Job) -> Reply:
            echoes = None
            if body.echo:
                uncut = body.truncate_prompt_tokens is None  # else the text is more than what was read
                echoes = [
                    given if isinstance(given, str) and uncut else self._decode(read, isinstance(given, str))
                    for given, read in zip(prompts, job.prompts, strict=True)
                ]
            return Completion(job, echoes)

        return await self._generate(request, body, "cmpl-", ids, body.logprobs, reply)

    async def chat(self, request: Request) -> Response:
        """`/v1/chat/completions`."""
        body = await self._read(request, ChatBody)
        return await self._converse(request, body, "chatcmpl-", Chat)

    async def respond(self, request: Request) -> Response:
        """`/v1/responses`."""
        asked = await self._read(request, ResponsesBody)
        async with self._as_chat(request, asked) as body:
            return await self._converse(request, body, "resp_", lambda job, how: Respond(job, how, asked))

    async def messages(self, request: Request) -> Response:
        """`/v1/messages`."""
        asked = await self._read(request, MessagesBody)
        if asked.max_tokens is None:
            raise Refusal(400, "the field max_tokens is missing", "max_tokens")
        async with self._as_chat(request, asked) as body:
            return await self._converse(request, body, "msg_", Say)

    async def count(self, request: Request) -> Response:
        """`/v1/messages/count_tokens`."""
        asked = await self._read(request, MessagesBody)
        async with self._as_chat(request, asked) as body:
            self._check(body)
            await self._tools(body)
            ids = await self._aside(request, lambda: self._rendered(body, any_length=True))
            return json_response({"input_tokens": len(ids)})

    @asynccontextmanager
    async def _as_chat(self, request: Request, asked: ResponsesBody | MessagesBody) -> AsyncIterator[Translated]:
        """The chat that a body asks for; what is refused meanwhile is told with the names that its fields have."""
        try:
            yield await self._taken(request, asked.as_chat)
        except (Refusal, OutriderError) as error:
            raise asked.in_its_words(refusal(error)) from None

    async def _read(self, request: Request, kind: type[B]) -> B:
        """What a request says."""
        body = await body_of(request)
        return await self._taken(request, lambda: read(body, kind))

    async def _taken(self, request: Request, work: Callable[[], T]) -> T:
        """What `work()` makes of a body, which takes long only of a long one."""
        return await self._aside(request, no_garbage()(work)) if request.state.long else work()

    async def _aside(self, request: Request, work: Callable[[], T]) -> T:
        """What `work()` gives, off the loop, while its client is there. Of a long body it waits, if there is room."""
        with self.llm.reading(1) if request.state.long else nullcontext():
            lane = "text" if request.state.long else ""
            return await while_connected(request.receive, self.llm.off_loop(work, lane))

    async def _converse(
        self, request: Request, body: ChatBody, kind: str, reply: Callable[[Job, Reading], Reply]
    ) -> Response:
        """A chat, however it is asked and told."""
        self._check(body)
        how, more = await self._reading(body)
        return await self._generate(
            request, body, kind, lambda: [self._rendered(body)], body.alternatives,
            lambda job: reply(job, how), how, **more,
        )  # fmt: skip

    async def _generate(
        self,
        request: Request,
        body: Sampled,
        kind: str,
        read_prompts: Callable[[], list[list[int]]],
        logprobs: int | None,
        reply: Callable[[Job], Reply],
        how: Reading | None = None,
        **more: Any,
    ) -> Response:
        k, arrived = bound_of_drafts(body.speculative_config, self.llm.llm), request.state.arrived
        begun: list[Answer] = []  # closed if this ends early, also where nobody holds it yet
        lane = _lane(body, request.state.long)

        def asked() -> list[tuple[list[int], SamplingParams]]:
            """In a thread, and once for all prompts that may get as much: a bias of each token takes a while."""
            prompts = [self._truncated(ids, body) for ids in read_prompts()]
            most = [self._most(ids, body) for ids in prompts]
            n, limit = body.n or 1, self.settings.max_prompt_tokens
            if (tokens := n * sum(map(len, prompts))) > limit:
                told = (
                    f"prompts of {tokens} tokens, counted for each of n outputs, are more than the {limit} of a request"
                )
                raise Refusal(400, f"{told}; ask for them in several", "n" if n > 1 else "prompt")
            if (top := body.logprobs_of_prompt(logprobs)) is not None:
                numbers, limit = tokens * max(1, top), max(PROMPT_LOGPROBS, self.llm.llm.engine.max_len * top)
                if numbers > limit:
                    name = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
                    told = f"{name}: {top} for each of {tokens} tokens of prompts, counted for each of n outputs, are"
                    raise Refusal(400, f"{told} more than the {limit} of a request; ask for them in several", name)
            after = how.after(how.end(prompts[0])) if how else None
            known = {m: body.sampling(self.settings, m, logprobs, after, **more) for m in dict.fromkeys(most)}
            return [(ids, known[m]) for ids, m in zip(prompts, most, strict=True)]

        async def queue() -> Job:
            try:
                with self.llm.reading(body.outputs):
                    made = await self.llm.off_loop(asked, lane)
                answer = await self.llm.start(
                    made, k=k, priority=body.priority or 0, deadline=left(body.deadline, arrived),
                    cache_salt=body.cache_salt,
                )  # fmt: skip
                begun.append(answer)
            except (EmptyPrompt, RequestTooLong) as error:
                told = str(error)
                field = "max_tokens" if "max_tokens" in told else "messages" if isinstance(body, ChatBody) else "prompt"
                raise Refusal(400, told if field in told else f"{field}: {told}", field) from None
            except ConfigError as error:
                wrong = refusal(error)
                if wrong.param == "structured_outputs" and wrong.param in more:
                    functions = how.parser().functions if how and how.parser else ()
                    raise Refusal(400, unusable(str(wrong), functions), wrong.param).under("tools") from None
                if wrong.param == "structured_outputs" and body.structured_outputs is None:
                    raise wrong.under("response_format") from None
                raise
            state, prompts = request.scope["state"], [ids for ids, _ in made]
            state["log"]["prompt_tokens"] = sum(map(len, prompts))
            head = {
                "id": f"{kind}{state['request_id']}",
                "created": int(time.time()),
                "model": self.settings.names[0],
                "system_fingerprint": f"outrider-{outrider.__version__}",
            }
            return Job(body, answer, head, self.vocabulary, prompts, state["log"], self._written)

        async def begin() -> Reply:
            queued = asyncio.ensure_future(queue())
            try:  # before Python 3.12, `wait_for` may give what has come instead of being cancelled
                await asyncio.wait({queued}, timeout=real(left(body.deadline, arrived), 0, math.inf) or None)
                if not queued.done():
                    raise DeadlineExceeded("the request could not even be queued within its deadline")
            finally:
                queued.cancel()
                await asyncio.gather(queued, return_exceptions=True)
            job = queued.result()  # of which an echo may have to be decoded
            return await self.llm.off_loop(lambda: reply(job), lane) if request.state.long else reply(job)

        async def whole() -> bytes:
            return await (await begin()).whole()

        try:
            if not body.stream:
                return Response(await while_connected(request.receive, whole()), media_type=JSON)
            found = await while_connected(request.receive, begin())
            return EventStream(found.frames(), self.settings.keep_alive, found.job.answer.close)
        except BaseException:
            for answer in begun:
                answer.close()
            raise

    async def _written(self, write: Callable[[], bytes]) -> bytes:
        """What `write()` gives, of an answer that takes long to write."""
        try:
            written: bytes = await self.llm.off_loop(no_garbage()(write), "answer")
            return written
        except EngineError:  # it has been closed, with its lanes: this is one of the last answers
            return write()

    def _check(self, body: Sampled) -> None:
        self._known(body.model)
        body.check(self.settings)

    def _known(self, model: str | None) -> None:
        if model and model not in self.settings.names:
            own = ", ".join(map(repr, self.settings.names))
            raise Refusal(404, f"the model {brief(model)} does not exist; this server has {own}", "model")

    def _most(self, ids: list[int], body: Sampled) -> int:
        """Tokens behind a prompt: those asked for, or as many as there is room for."""
        most = self.llm.llm.engine.max_len
        if (room := most - len(ids)) < 1:
            raise RequestTooLong(
                f"this model's maximum context length is {most} tokens, and the prompt has {len(ids)}; "
                "leave room for one token"
            )
        if (asked := self._asked(body)) is None:  # as many as there is memory for
            asked = self.llm.llm.engine.longest - len(ids)
        return min(room, max(1, asked))

    def _asked(self, body: Sampled) -> int | None:
        return body.most(self.settings.defaults.get("max_tokens"))

    def _truncated(self, ids: list[int], body: Sampled) -> list[int]:
        if (keep := body.truncate_prompt_tokens) is None:
            return ids
        if keep < -1 or keep == 0:
            name = "truncate_prompt_tokens"
            raise Refusal(400, f"{name} must be -1 or at least 1, not {brief(keep)}", name)
        if keep == -1:  # as many as leave room for what is asked for
            keep = max(1, self.llm.llm.engine.max_len - (self._asked(body) or 1))
        return ids[:keep] if body.truncation_side == "right" else ids[-keep:]

    def _rendered(self, body: ChatBody | TokenizeBody, any_length: bool = False) -> list[int]:
        generate = body.add_generation_prompt
        if generate is None:
            generate = not body.continue_final_message
        variables = (body.chat_template_kwargs or {}) | (as_variables(body.tools) if body.tools else {})
        if isinstance(body, ChatBody) and (effort := body.reasoning_effort):
            variables = {"reasoning_effort": effort, "enable_thinking": effort != "none"} | variables
        template = self._template(body)
        messages = in_order([_as_known(message, template) for message in body.messages or []])
        render = partial(
            self.llm.llm.render,
            chat_template=getattr(body, "chat_template", None),
            chat_template_kwargs=variables,
            add_generation_prompt=generate,
            continue_final_message=bool(body.continue_final_message),
            any_length=any_length or (isinstance(body, ChatBody) and _cut(body)),
        )
        try:
            return render(messages)
        except ConfigError:
            if not isinstance(body, Translated) or all(message.get("role") != "system" for message in messages[1:]):
                raise
        return render(_gathered(messages))

    def _template(self, body: ChatBody | TokenizeBody) -> Any:
        """The template that a request brings, or else the model's, of several the one for tools if there are any."""
        own = getattr(self.llm.llm.tokenizer, "chat_template", None)
        if isinstance(own, dict):
            own = own.get("tool_use" if body.tools else "default", own.get("default"))
        return getattr(body, "chat_template", None) or own

    async def _reading(self, body: ChatBody) -> tuple[Reading, dict[str, Any]]:
        """How the answers are read, and what that asks of sampling."""
        parser, more = await self._tools(body)
        template, said = self._template(body), ""
        way = way_of(template) if self.settings.reasoning else None
        if way and body.messages and body.continue_final_message:
            said = as_text(_as_known(body.messages[-1], template))["content"]
        how = Reading(self.llm.llm.tokenizer, way, parser, said, "structured_outputs" in more)
        if way and way.end in self.vocabulary.special:
            more = {"skip_special_tokens": False, **more}
        return how, more

    async def _family(self, template: Any, lane: str) -> Family | None:
        """How calls are written by models of a template."""
        if template not in self.families:
            found = await self.llm.off_loop(lambda: family_of(template, self.llm.llm.render_text), lane)
            if len(self.families) >= 64:
                self.families.clear()
            self.families[template] = found
        return self.families[template]

    async def _tools(self, body: ChatBody) -> tuple[Callable[[], Parser] | None, dict[str, Any]]:
        """What finds calls in an output, if they are looked for, and what that asks of sampling."""
        asked = check(body.tools, body.tool_choice, body.parallel_tool_calls)
        if asked is None:
            return None, {}
        family = await self._family(self._template(body), _lane(body))
        if family is None:
            raise Refusal(
                400, "tools: the chat template has none, or its models write calls in an unknown way", "tools"
            )
        whole = (body.response_format or {}).get("type") in ("json_object", "json_schema")
        if asked.choice == "none" or (asked.choice == "auto" and whole):
            return None, {}
        written = asked.written(family)
        more: dict[str, Any] = {"skip_special_tokens": False}  # in some vocabularies, what marks a call is special
        tokenizer = self.llm.llm.tokenizer
        if asked.forced and (
            forced := await self.llm.off_loop(lambda: constraint(asked, written, tokenizer), "grammar")
        ):
            if body.structured_outputs is not None:
                said = "tool_choice and structured_outputs cannot both say what the output is"
                raise Refusal(400, said, "tool_choice")
            more["structured_outputs"] = forced
        return lambda: parser_of(written, asked.callable, forced=asked.forced), more

    def _decode(self, ids: list[int], skip_special: bool = False) -> str:
        tokenizer = self.llm.llm.tokenizer
        return "" if tokenizer is None else str(tokenizer.decode(ids, skip_special_tokens=skip_special))

    # --- tokens ---

    async def tokenize(self, request: Request) -> Response:
        """`/tokenize`."""
        body = await self._read(request, TokenizeBody)
        self._known(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise Refusal(400, "give prompt or messages, one of them", "prompt")
        special = body.add_special_tokens is not False

        def work() -> Response:
            if body.prompt is None:
                tokens = self._rendered(body)
            else:
                tokens = self.llm.llm.encode(body.prompt, add_special_tokens=special) if body.prompt else []
            strings: list[str] | None = [] if body.return_token_strs else None
            if body.return_token_strs and tokens:  # without a tokenizer there are none
                strings = self.llm.llm.tokenizer.convert_ids_to_tokens(tokens)
            most = self.llm.llm.engine.max_len
            return json_response({"count": len(tokens), "max_model_len": most, "tokens": tokens, "token_strs": strings})

        return await self._aside(request, work)

    async def detokenize(self, request: Request) -> Response:
        """`/detokenize`."""
        body = await self._read(request, DetokenizeBody)
        self._known(body.model)
        vocab = self.llm.llm.runner.model.config.vocab_size

        def work() -> Response:
            if bad := next((token for token in body.tokens if not 0 <= token < vocab), None):
                raise Refusal(400, f"tokens: {brief(bad)} is not a token id below {vocab}", "tokens")
            return json_response({"prompt": self._decode(body.tokens)})

        return await self._aside(request, work)

    async def tokenizer_info(self) -> Response:
        """`/tokenizer_info`, as vLLM's: by it clients write and split prompts that have no tokenizer of their own."""
        tokenizer = self.llm.llm.tokenizer
        if tokenizer is None:
            raise Refusal(404, "this model has no tokenizer")
        template = getattr(tokenizer, "chat_template", None)
        template = template.get("default") if isinstance(template, dict) else template
        about = {"tokenizer_class": type(tokenizer).__name__, "chat_template": template}
        return json_response({**about, **tokenizer.special_tokens_map})

    # --- about the server ---

    async def models(self) -> Response:
        """`/v1/models`."""
        return json_response({"object": "list", "data": [self._about(name) for name in self.settings.names]})

    async def model(self, model: str) -> Response:
        """`/v1/models/{model}`; without a name, the list."""
        if not model:
            return await self.models()
        self._known(model)
        return json_response(self._about(model))

    def _about(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self.started,
            "owned_by": "outrider",
            "root": str(self.llm.llm.checkpoint.path).encode(errors="replace").decode(),
            "parent": None,
            "max_model_len": self.llm.llm.engine.max_len,
        }

    async def health(self) -> Response:
        """`/health` and `/ping`: 503 when the engine's loop has not come round, or is closed."""
        if self.llm.closed:
            raise Refusal(503, "the server is shutting down", retry_after="5")
        if (stalled := self.llm.stalled) > self.settings.stall:
            raise Refusal(503, f"the engine has not come to the end of a step for {stalled:.0f} seconds")
        return Response(status_code=200)

    async def version(self) -> Response:
        """`/version`."""
        return json_response({"version": outrider.__version__})

    async def metrics_text(self) -> Response:
        """`/metrics`."""
        return Response(self.metrics.text(), media_type=PROMETHEUS)

    async def page(self, request: Request) -> Response:
        """The chat page, whose own addresses begin behind a slash that a proxy's path may lack."""
        root = request.scope.get("root_path", "")
        if root and request.scope.get("raw_path") == 2 * root.encode():  # uvicorn puts it before what has come
            return Response(status_code=307, headers={"location": f"{root}/"})
        body, headers = page()
        return Response(body, headers=headers)


def _lane(body: BaseModel, long: bool = False) -> str:
    """Where a body is read, so that others do not wait for a template that it brings, or a long text."""
    return "template" if getattr(body, "chat_template", None) else "text" if long else ""


def _cut(body: Sampled) -> bool:
    """Whether of its prompts only a part is to be read."""
    return body.truncate_prompt_tokens is not None


def _schemas() -> dict[str, Any]:
    """Of the bodies and of the answers; for /openapi.json."""
    bodies = models_json_schema([(kind, "validation") for kind in BODIES], ref_template=REF + "{model}")[1]["$defs"]
    return {**bodies, **REPLIES}


def _gathered(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With one system message, at the beginning, as many templates want it: agents write some further on."""
    said = [as_text(message)["content"] for message in messages if message.get("role") == "system"]
    others = [message for message in messages if message.get("role") != "system"]
    return [{"role": "system", "content": "\n\n".join(said)}, *others]


def _as_known(message: dict[str, Any], template: Any) -> dict[str, Any]:
    """As templates know it: no developer, OpenAI's newer name for who writes the system message; calls as objects."""
    if message.get("role") in ("assistant", "tool"):
        known = for_templates(message)
        said = known.get("reasoning")
        if said and way_of(template) is BRACKETS and isinstance(known["content"], str) and not READS.search(template):
            known["content"] = f"{BRACKETS.begin}{said}{BRACKETS.end}{known['content']}"  # as Mistral's have parts
        return known
    return {**message, "role": "system"} if message.get("role") == "developer" else message
