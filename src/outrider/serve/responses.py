"""`/v1/responses`, without a memory: a conversation in OpenAI's newer words, answered as a chat is."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar

from pydantic import Field

from outrider.errors import brief
from outrider.outputs import StepEvent
from outrider.serve.answers import Chat, Job
from outrider.serve.http import Refusal, dumps, frame, parse, refusal
from outrider.serve.protocol import SAME, Choice, Common, Translated
from outrider.serve.reasoning import Reading

STATELESS = "this server keeps nothing of an answer; send the whole conversation as input"
LOGPROBS = "message.output_text.logprobs"  # what `include` calls them
OWN = (  # how types of tools begin that are OpenAI's own
    "web_search", "file_search", "mcp", "code_interpreter", "image_generation", "local_shell", "shell", "computer",
    "custom", "apply_patch", "namespace", "tool_search",
)  # fmt: skip
Item = dict[str, Any]


class ResponsesBody(Common):
    """`/v1/responses`."""

    pointless: ClassVar[dict[str, Any]] = Common.pointless | {
        "moderation": {}, "access_programs": [], "background_options": {}, "context_management": [],
        "image": {}, "mm_processor_kwargs": {}, "media_io_kwargs": {}, "enable_response_messages": False,
        "previous_input_messages": [], "best_of": 1, "suffix": None,
    }  # fmt: skip
    here: ClassVar[dict[str, str]] = {
        "max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens", "response_format": "text",
        "messages": "input", "reasoning_effort": "reasoning",
    }  # fmt: skip

    input: Annotated[str | list[dict[str, Any]], Field(description="text, or a list of items")]
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Choice = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include: list[str] | None = None  # of what it may name, logprobs are here
    top_logprobs: int | None = None
    reasoning: dict[str, Any] | None = None  # its effort; the rest is ignored
    include_reasoning: bool | None = None
    # refused, unless they say nothing
    background: bool | None = None
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None
    # ignored; most who ask to store only repeat OpenAI's default, and the answer says that it is not
    store: bool | None = None
    truncation: Any = None
    stream_options: Any = None
    max_tool_calls: Any = None
    client_metadata: Any = None

    def as_chat(self) -> Translated:
        """The same, asked of `/v1/chat/completions`. Raises Refusal."""
        for name in ("background", "previous_response_id", "conversation", "prompt"):
            if getattr(self, name):
                raise Refusal(400, f"{name} is not supported: {STATELESS}", name)
        given = {name: getattr(self, name) for name in (*SAME, "parallel_tool_calls")}
        messages = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else _messages(self.input)
        if self.instructions:  # empty ones are none, and the template's own stand
            messages.insert(0, {"role": "system", "content": self.instructions})
        choice: Any = self.tool_choice
        if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
            allowed = choice.get("tools")
            tools = [_function(t, "tool_choice") for t in allowed] if isinstance(allowed, list) else None
            choice = {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
        elif isinstance(choice, dict):
            choice = _function(choice, "tool_choice")
        functions = [_function(tool, "tools") for tool in self.functions]
        said: dict[str, Any] = {"messages": messages, "tools": functions, "tool_choice": choice}
        if isinstance(self.input, list) and self.input and _goes_on(self.input[-1]):
            said["continue_final_message"] = True
        if self.top_logprobs or LOGPROBS in (self.include or ()):
            said |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        if unknown := (self.text or {}).keys() - {"format", "verbosity"}:
            raise Refusal(400, f"text has no field {brief(min(unknown))}", "text")
        form = (self.text or {}).get("format")
        said["reasoning_effort"] = (self.reasoning or {}).get("effort")
        return parse(
            Translated, given | said | {"max_completion_tokens": self.max_output_tokens, "response_format": form}
        )

    @property
    def functions(self) -> list[dict[str, Any]]:
        """The tools that a model can call. What OpenAI's own server would do by itself is left out."""
        for tool in self.tools or []:
            if (kind := tool.get("type")) != "function" and not str(kind).startswith(OWN):
                raise Refusal(400, f"tools: type must be function, or one of OpenAI's own, not {brief(kind)}", "tools")
        return [tool for tool in self.tools or [] if tool.get("type") == "function"]


def _goes_on(item: Item) -> bool:
    """Whether an item is an answer that was cut off, or is still written."""
    said = (item.get("type") or "message") == "message" and item.get("role") == "assistant"
    return said and item.get("status") in ("incomplete", "in_progress")


def _function(given: Any, field: str) -> dict[str, Any]:
    """A function's fields one level further down, as chats have them."""
    if not isinstance(given, Mapping) or given.get("type") != "function" or not isinstance(given.get("name"), str):
        raise Refusal(400, f"{field}: a function is {{'type': 'function', 'name': ...}}, not {brief(given)}", field)
    return {"type": given.get("type"), "function": {key: value for key, value in given.items() if key != "type"}}


def _messages(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items as messages; the calls of one turn are one message's, and so is the reasoning before."""
    messages: list[dict[str, Any]] = []
    reasoning: list[str] = []  # that waits for its message
    for item in items:
        kind = item.get("type") or "message"
        if kind == "reasoning":
            reasoning += _reasoned(item)
            continue
        if kind == "message":
            messages.append({"role": item.get("role"), "content": _content(item.get("content"))})
        elif kind == "function_call":
            if not all(isinstance(item.get(name), str) for name in ("call_id", "name", "arguments")):
                raise Refusal(400, "input: a function_call has call_id, name and arguments, strings", "input")
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            if not isinstance(item.get("call_id"), str) or not isinstance(item.get("output"), (str, list)):
                raise Refusal(400, "input: a function_call_output has call_id, a string, and output, text", "input")
            output = {"role": "tool", "tool_call_id": item.get("call_id"), "content": _content(item.get("output"))}
            messages.append(output)
        else:
            valid = "message, function_call, function_call_output or reasoning"
            raise Refusal(400, f"input: an item's type must be {valid}, not {brief(kind)}", "input")
        if reasoning and messages[-1]["role"] == "assistant":
            before = [messages[-1]["reasoning"]] if "reasoning" in messages[-1] else []
            messages[-1]["reasoning"] = "\n".join(before + reasoning)
        reasoning = []
    return messages


def _reasoned(item: Item) -> list[str]:
    """The text of a reasoning item, or else its summary; what has neither, as an encrypted one, is not read."""
    for parts in (item.get("content"), item.get("summary")):
        texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
        if found := [text for text in texts if isinstance(text, str) and text]:
            return found
    return []


def _content(given: Any) -> Any:
    if not isinstance(given, list):
        return given
    parts = []
    for part in given:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("input_text", "output_text", "text", "refusal"):
            raise Refusal(400, f"input: the parts of a content must be text, not {brief(part)}", "input")
        parts.append(part if kind == "refusal" else {"type": "text", "text": part.get("text")})
    return parts


class Respond(Chat):
    """The answer as items: reasoning, a message, calls; as events under their names, the last has all of it."""

    depth = 7  # of an event: in an entry of logprobs of a part of a content of an item of the output of the response

    def __init__(self, job: Job, how: Reading, asked: ResponsesBody) -> None:
        super().__init__(job, how)
        self.asked = asked
        self.items: list[Item] = []  # the last may still be written
        self.spelt: list[tuple[int, dict[str, Any]]] = []  # letters and logprobs of tokens that are still to be said
        self.made = {"id": job.head["id"], "object": "response", "created_at": job.head["created"]}

    async def whole(self) -> bytes:
        """What the last event says."""
        response: dict[str, Any] = {}
        async for event in self._told():
            response = event.get("response", response)
        return await self._written(partial(dumps, response), self.count)

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events, each under its name."""
        count = 0
        try:
            async for event in self._told():
                tokens = len(event.get("logprobs", ())) if "delta" in event else self.count  # the ends have all of them
                numbered = {**event, "sequence_number": count}
                yield await self._written(partial(frame, numbered, event["type"]), tokens)
                count += 1
        except Exception as error:
            told = refusal(error)
            said = {"code": "server_error" if told.status >= 500 else "invalid_prompt", "message": str(told)}
            if self.items:
                self.items[-1]["status"] = "incomplete"
            event = {"type": "response.failed", "response": self._response("failed", error=said)}
            yield frame({**event, "sequence_number": count}, event["type"])

    async def _told(self) -> AsyncGenerator[dict[str, Any], None]:
        last: StepEvent | None = None
        for kind in ("created", "in_progress"):
            yield {"type": f"response.{kind}", "response": self._response("in_progress")}
        async for last in self._events():
            for part in self._apart(last):
                for event in self._heard(part):
                    yield event
        if not self.items:
            for event in self._begin(self._message()):
                yield event
        cut, torn = last is not None and last.finish_reason == "length", self.torn(0)
        whole = not torn if self.items[-1]["type"] == "function_call" else not cut
        for event in self._end_item("completed" if whole else "incomplete"):
            yield event
        status = "incomplete" if cut or torn else "completed"
        more = {"incomplete_details": {"reason": "max_output_tokens"}} if cut else {}
        response = self._response(status, usage=self._used(), **more, **self._metrics())
        yield {"type": f"response.{status}", "response": response}

    # --- items --------------------------------------------------------------------------------------------------------

    def _apart(self, event: StepEvent) -> list[StepEvent]:
        """Token by token, if not all are content's: which logprobs are whose is not to depend on what came together."""
        if (self.how.way is None and self.how.parser is None) or event.logprobs is None or len(event.token_ids) < 2:
            return [event]
        each = zip(event.token_ids, event.texts, event.drafted_by, event.logprobs, strict=True)
        parts = [StepEvent(event.index, [token], [text], [by], [known]) for token, text, by, known in each]
        parts[-1] = replace(parts[-1], finish_reason=event.finish_reason, output=event.output, rest=event.rest)
        return parts

    def _heard(self, part: StepEvent) -> Iterator[dict[str, Any]]:
        self.spelt += [(len(part.text), each) for each in (self._logprobs(part) or {"content": []})["content"]]
        for delta in self.deltas(part):
            if text := delta.get("reasoning"):
                yield from self._think(text)
            if text := delta.get("content"):
                yield from self._say(text)
            for call in delta.get("tool_calls", ()):
                yield from self._call(call)

    def _say(self, text: str) -> Iterator[dict[str, Any]]:
        if not self.items or self.items[-1]["type"] != "message":
            behind, text = bool(self.items) or self._marked(), self.own(text, "message", self.items)
            yield from self._begin(self._message())
            if behind:  # reasoning, a call or a header, with tokens that are no text
                self.spelt = _last(self.spelt, len(text))
        part, spelt, self.spelt = self.items[-1]["content"][0], [each for _, each in self.spelt], []
        part["text"] += text
        part["logprobs"] += spelt
        yield {"type": "response.output_text.delta", **self._place(), "delta": text, "logprobs": spelt}

    def _think(self, text: str) -> Iterator[dict[str, Any]]:
        self.spelt = []
        if self.body.include_reasoning is False:
            return
        if not self.items or self.items[-1]["type"] != "reasoning":
            about = {"type": "reasoning", "summary": [], "status": "in_progress"}
            part, text = {"type": "reasoning_text", "text": ""}, self.own(text, "reasoning", self.items)
            yield from self._begin({"id": f"rs_{uuid.uuid4().hex}", **about, "content": [part]})
        self.items[-1]["content"][0]["text"] += text
        yield {"type": "response.reasoning_text.delta", **self._place(), "delta": text}

    def _marked(self) -> bool:
        """Whether tokens came before that are no content's."""
        reader = self._readers.get(0)
        return reader is not None and reader.marked

    def _call(self, part: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self.spelt = []
        if "id" in part:
            call = {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "status": "in_progress"}
            yield from self._begin({**call, "call_id": part["id"], **part["function"]})
        if arguments := part["function"]["arguments"]:
            self.items[-1]["arguments"] += arguments if "id" not in part else ""
            yield {"type": "response.function_call_arguments.delta", **self._place(), "delta": arguments}

    @staticmethod
    def _message() -> Item:
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        about = {"type": "message", "role": "assistant", "status": "in_progress"}
        return {"id": f"msg_{uuid.uuid4().hex}", **about, "content": [part]}

    def _begin(self, item: Item) -> Iterator[dict[str, Any]]:
        yield from self._end_item("completed")
        self.items.append(item)
        at, shown = {"output_index": len(self.items) - 1}, _copy(item)
        if "content" in item:
            yield {"type": "response.output_item.added", **at, "item": {**shown, "content": []}}
            yield {"type": "response.content_part.added", **self._place(), "part": shown["content"][0]}
        else:
            yield {"type": "response.output_item.added", **at, "item": shown}

    def _end_item(self, status: str) -> Iterator[dict[str, Any]]:
        if not self.items:
            return
        item = self.items[-1]
        if item["type"] == "message" and self.spelt:  # of tokens without text
            yield from self._say("")
        item["status"] = status
        if "content" in item:
            part = dict(item["content"][0])
            said = {key: part[key] for key in ("text", "logprobs") if key in part}
            yield {"type": f"response.{part['type']}.done", **self._place(), **said}
            yield {"type": "response.content_part.done", **self._place(), "part": part}
        else:
            said = {"name": item["name"], "arguments": item["arguments"]}
            yield {"type": "response.function_call_arguments.done", **self._place(), **said}
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": _copy(item)}

    def _place(self) -> dict[str, Any]:
        inside = {"content_index": 0} if "content" in self.items[-1] else {}
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **inside}

    # --- the whole ----------------------------------------------------------------------------------------------------

    def _used(self) -> dict[str, Any]:
        usage = self.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self.reasoned or 0},
            "total_tokens": usage["total_tokens"],
        }

    def _response(self, status: str, **more: Any) -> dict[str, Any]:
        asked, params = self.asked, self.job.answer.requests[0].seq.params
        functions = [{"strict": None, "parameters": None, "description": None, **tool} for tool in asked.functions]
        said = {name: getattr(asked, name) for name in ("user", "safety_identifier", "prompt_cache_key")}
        return {
            **self.made,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "model": self.job.head["model"],
            "output": [_copy(item) for item in self.items],
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "background": False,
            "service_tier": "default",
            **{name: own if isinstance(own, str) else None for name, own in said.items()},
            "reasoning": {"effort": (asked.reasoning or {}).get("effort"), "summary": None},
            "max_output_tokens": asked.max_output_tokens,
            "max_tool_calls": None,
            "metadata": asked.metadata or {},
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "text": {"format": (asked.text or {}).get("format") or {"type": "text"}},
            "tool_choice": asked.tool_choice or "auto",
            "tools": functions,
            "top_logprobs": asked.top_logprobs or 0,
            "truncation": "disabled",
            "usage": None,
            **more,
        }


def _last(spelt: list[tuple[int, dict[str, Any]]], letters: int) -> list[tuple[int, dict[str, Any]]]:
    """The last ones, as many as have so many letters, and those without any before them."""
    start = len(spelt)
    while start and (letters > 0 or not spelt[start - 1][0]):
        start -= 1
        letters -= spelt[start][0]
    return spelt[start:]


def _copy(item: Item) -> Item:
    """As it is now; it may grow."""
    return {**item, "content": [dict(part) for part in item["content"]]} if "content" in item else dict(item)
