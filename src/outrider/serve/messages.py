"""`/v1/messages`: a conversation in Anthropic's words, answered as a chat is."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field
from pydantic_core import from_json

from outrider.errors import brief
from outrider.outputs import StepEvent
from outrider.serve.answers import Chat, Job
from outrider.serve.http import Refusal, dumps, frame, parse, refusal
from outrider.serve.protocol import SAME, Common, Translated
from outrider.serve.reasoning import Reading

CHOICES = {"auto": "auto", "any": "required", "none": "none"}
BILLED = "x-anthropic-billing-header:"  # how a block of Claude Code's begins
Block = dict[str, Any]


class MessagesBody(Common):
    """`/v1/messages`, and what of it counts for `/v1/messages/count_tokens`."""

    pointless: ClassVar[dict[str, Any]] = Common.pointless | {"mcp_servers": [], "container": {}, "best_of": 1}
    here: ClassVar[dict[str, str]] = {
        "stop": "stop_sequences", "response_format": "output_config", "reasoning_effort": "output_config",
        "max_completion_tokens": "max_tokens",
    }  # fmt: skip

    messages: list[dict[str, Any]]
    max_tokens: int | None = None  # must be given, where something is to be written
    system: Annotated[str | list[dict[str, Any]] | None, Field(description="text, or a list of text blocks")] = None
    stop_sequences: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    thread: Any = None  # refused
    # ignored
    cache_control: Any = None
    context_management: Any = None
    betas: Any = None
    inference_geo: Any = None
    speed: Any = None
    diagnostics: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None

    def as_chat(self) -> Translated:
        """The same, asked of `/v1/chat/completions`. Raises Refusal."""
        if self.thread is not None:  # by this code Anthropic's tool runners know to send each turn's whole conversation
            details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
            raise Refusal(400, "thread: this server keeps no conversations; send all messages", "thread", details)
        messages = [each for message in self.messages for each in _messages(message)]
        if system := _unbilled(self.system):  # an empty one, as some clients send, is none: the template's own stands
            messages.insert(0, {"role": "system", "content": _text(system, "system", "")})
        given = {name: getattr(self, name) for name in SAME}
        given |= {"messages": messages, "max_completion_tokens": self.max_tokens, "tools": self.functions}
        if self.stop_sequences is not None:
            if self.stop is not None:
                raise Refusal(400, "stop_sequences and stop cannot both be given", "stop_sequences")
            given["stop"] = self.stop_sequences
        if messages and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
            given["continue_final_message"] = True
        if self.tool_choice is not None:
            given |= _chosen(self.tool_choice)
            if self.tool_choice["type"] in ("any", "tool") and not self.functions:
                left = "; those of Anthropic's own types are left out" if self.tools else ""
                raise Refusal(400, f"tool_choice needs tools that a model can call{left}", "tool_choice")
        if self.thinking is not None:
            if (how := self.thinking.get("type")) not in ("enabled", "adaptive", "disabled"):
                what = "type must be enabled, adaptive or disabled"
                raise Refusal(400, f"thinking: {what}, not {brief(how)}", "thinking")
            given["chat_template_kwargs"] = {"enable_thinking": how != "disabled"} | (self.chat_template_kwargs or {})
        config = self.output_config or {}
        if unknown := config.keys() - {"effort", "format"}:
            raise Refusal(400, f"output_config has no field {brief(min(unknown))}", "output_config")
        given["reasoning_effort"] = config.get("effort")
        if (form := config.get("format")) is not None:
            if not isinstance(form, dict) or form.get("type") != "json_schema":
                raise Refusal(400, "output_config: format is {'type': 'json_schema', 'schema': ...}", "output_config")
            about = {key: value for key, value in form.items() if key != "type"}
            given["response_format"] = {"type": "json_schema", "json_schema": {"name": "output", **about}}
        return parse(Translated, given)

    @property
    def functions(self) -> list[dict[str, Any]]:
        """The tools that a model can call, as chats have them. Those that only Anthropic's know are left out."""
        found = []
        for tool in self.tools or []:
            if tool.get("type") not in (None, "custom"):
                continue
            if not isinstance(tool.get("name"), str) or not isinstance(tool.get("input_schema"), dict):
                raise Refusal(400, f"tools: a tool has a name and an input_schema, not {brief(tool)}", "tools")
            about = {"description": tool["description"]} if tool.get("description") is not None else {}
            function = {"name": tool["name"], **about, "parameters": tool["input_schema"]}
            found.append({"type": "function", "function": function})
        return found


def _chosen(choice: Mapping[str, Any]) -> dict[str, Any]:
    """A `tool_choice` as chats have it."""
    kind, name, alone = (choice.get(key) for key in ("type", "name", "disable_parallel_tool_use"))
    if kind == "tool" and isinstance(name, str):
        chosen: Any = {"type": "function", "function": {"name": name}}
    elif isinstance(kind, str) and kind in CHOICES:
        chosen = CHOICES[kind]
    else:
        raise Refusal(400, "tool_choice: type must be auto, any, none, or tool with a name", "tool_choice")
    if not (alone is None or isinstance(alone, bool)):
        what = "disable_parallel_tool_use must be true or false"
        raise Refusal(400, f"tool_choice: {what}, not {brief(alone)}", "tool_choice")
    return {"tool_choice": chosen, "parallel_tool_calls": not alone}


def _messages(given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A message as chats have it: results of tools are messages of their own, before what is said beside them."""
    role, content = given.get("role"), given.get("content")
    if role not in ("user", "assistant", "system"):
        raise Refusal(400, f"messages: role must be user or assistant, not {brief(role)}", "messages")
    if not isinstance(content, list):
        yield {"role": role, "content": content}
        return
    if role == "system" and content and not (content := _unbilled(content)):
        return
    said, calls, thoughts, results = list[Any](), list[Any](), list[str](), 0
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            said.append(block)
        elif kind == "tool_result" and role == "user" and isinstance(block.get("tool_use_id"), str):
            results += 1
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": _text(block.get("content"))}
        elif kind == "tool_use" and role == "assistant" and _called(block):
            try:
                arguments = json.dumps(block["input"], ensure_ascii=False)
            except RecursionError:
                raise Refusal(400, "messages: an input is nested too deeply", "messages") from None
            function = {"name": block.get("name"), "arguments": arguments}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "thinking" and role == "assistant" and isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
        elif not (kind == "redacted_thinking" and role == "assistant"):
            what = {"user": "text, tool_result", "assistant": "text, thinking, tool_use"}.get(str(role), "text")
            raise Refusal(400, f"messages: blocks of {role} are {what}, not {brief(block)}", "messages")
    if said or calls or not results:
        message = {"role": role, "content": _text(said) if said else None if calls else ""}
        message |= {"tool_calls": calls} if calls else {}
        yield message | ({"reasoning": "\n".join(thoughts)} if thoughts else {})


def _unbilled(given: Any) -> Any:
    """Without what Claude Code tells Anthropic's accounts: no conversation would begin as another, and be cached."""
    if not isinstance(given, list):
        return given
    texts = [block.get("text") if isinstance(block, dict) else None for block in given]
    return [b for b, said in zip(given, texts, strict=True) if not (isinstance(said, str) and said.startswith(BILLED))]


def _called(block: Block) -> bool:
    """Whether a call has what belongs to one."""
    return isinstance(block.get("input"), dict) and all(isinstance(block.get(key), str) for key in ("id", "name"))


def _text(given: Any, field: str = "messages", between: str = "\n") -> str:
    """The text of blocks: joined as a chat's parts are; those of `system` are one text, as vLLM reads them."""
    if given is None or isinstance(given, str):
        return given or ""
    blocks = given if isinstance(given, list) else [given]
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind != "text" or not isinstance(block.get("text"), str):
            raise Refusal(400, f"{field}: this model reads text, not {brief(block)}", field)
    return between.join(block["text"] for block in blocks)


def _understood(text: str) -> dict[str, Any] | None:
    """What Anthropic's SDKs make of an object's JSON that may go on; None if it is none, or a number is not finite."""
    try:
        given = from_json(text, allow_inf_nan=False, allow_partial=True)
        json.dumps(given, allow_nan=False)  # 1e400
    except ValueError:
        return None
    return given if isinstance(given, dict) else None


class Say(Chat):
    """The answer as blocks: thinking, text, calls of tools; or as events that write them."""

    def __init__(self, job: Job, how: Reading) -> None:
        super().__init__(job, how)
        self.blocks: list[Block] = []  # the last may still be written
        self.input, self.read, self.sent = "", 0, 0  # ... if it is a call: its JSON so far, read up to, sent up to
        self.message: dict[str, Any] = {}  # once something has come

    async def whole(self) -> bytes:
        """The message."""
        async for _ in self._told():
            pass
        return dumps({**self.message, **self._metrics()})

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events, each under its name."""
        try:
            async for event in self._told():
                yield frame(event, event["type"])
        except Exception as error:
            yield frame(refusal(error).anthropics, "error")

    async def _told(self) -> AsyncGenerator[dict[str, Any], None]:
        async for event in self._events():
            if not self.message:  # by now it is known how much of the prompt was cached
                self.message = self._message()
                yield {"type": "message_start", "message": {**self.message, "usage": self._used(0)}}
            for delta in self._shown(event):
                for made in self._heard(delta):
                    yield made
            if event.finish_reason is not None:
                self.message |= self._ended(event)
        for made in self._end_block():
            yield made
        self.message |= {"content": self.blocks, "usage": self._used(self.count)}
        end = {key: self.message[key] for key in ("stop_reason", "stop_sequence")}
        yield {"type": "message_delta", "delta": end, "usage": self.message["usage"], **self._metrics()}
        yield {"type": "message_stop"}

    def _heard(self, delta: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if thought := delta.get("reasoning"):
            yield from self._go_on({"type": "thinking", "thinking": "", "signature": ""}, thought)
        if text := delta.get("content"):
            yield from self._go_on({"type": "text", "text": ""}, text)
        for call in delta.get("tool_calls", ()):
            block = {"type": "tool_use", "input": {}}
            if "id" in call:
                block |= {"id": call["id"], "name": call["function"]["name"]}
            yield from self._go_on(block, call["function"]["arguments"], "id" in call)

    def _go_on(self, block: Block, text: str, new: bool = False) -> Iterator[dict[str, Any]]:
        """More of a block, which begins if the last is of another type."""
        kind = block["type"]
        if new or not self.blocks or self.blocks[-1]["type"] != kind:
            yield from self._end_block()
            text = self.own(text, kind, self.blocks)
            self.blocks.append(block)
            self.input, self.read, self.sent = "", 0, 0
            yield {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": dict(block)}
        if kind == "tool_use":
            self.input += text
            text = self._more() if len(self.input) - self.read > self.read // 8 else ""  # all of it is read each time
            delta = {"type": "input_json_delta", "partial_json": text}
        else:
            self.blocks[-1][kind] += text
            delta = {"type": f"{kind}_delta", kind: text}
        if text:
            yield {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}

    def _end_block(self) -> Iterator[dict[str, Any]]:
        if not self.blocks:
            return
        at = {"index": len(self.blocks) - 1}
        if self.blocks[-1]["type"] == "tool_use":
            if text := self._more():
                yield {"type": "content_block_delta", **at, "delta": {"type": "input_json_delta", "partial_json": text}}
            self.blocks[-1]["input"] = _understood(self.input[: self.sent]) or {}
        elif self.blocks[-1]["type"] == "thinking":  # some clients send only what was signed back
            yield {"type": "content_block_delta", **at, "delta": {"type": "signature_delta", "signature": ""}}
        yield {"type": "content_block_stop", **at}

    def _more(self) -> str:
        """What is not sent yet of a call's JSON, up to where it is none: SDKs raise for that."""
        size = len(self.input)
        if _understood(self.input) is None:
            size = bisect_left(range(size), True, self.sent, key=lambda n: _understood(self.input[: n + 1]) is None)
        text, self.sent, self.read = self.input[self.sent : size], size, len(self.input)
        return text

    def _ended(self, event: StepEvent) -> dict[str, Any]:
        end = self._end(event)
        reason = {"length": "max_tokens", "tool_calls": "tool_use"}.get(end["finish_reason"], "end_turn")
        if reason == "end_turn" and isinstance(end["stop_reason"], str):
            return {"stop_reason": "stop_sequence", "stop_sequence": end["stop_reason"]}
        return {"stop_reason": reason, "stop_sequence": None}

    def _message(self) -> dict[str, Any]:
        about = {"id": self.job.head["id"], "type": "message", "role": "assistant", "model": self.job.head["model"]}
        return {**about, "content": [], "stop_reason": None, "stop_sequence": None}

    def _used(self, count: int) -> dict[str, Any]:
        usage = self.usage(count)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        read = {"input_tokens": usage["prompt_tokens"] - cached, "cache_read_input_tokens": cached}
        return {**read, "cache_creation_input_tokens": 0, "output_tokens": count}
