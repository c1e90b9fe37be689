"""Tool calls: what a request's `tools` ask of prompt and output, and which family's way of writing them a model has."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby, product
from typing import Any

from outrider.config import StructuredOutputsParams
from outrider.errors import ConfigError, OutriderError, brief
from outrider.grammar import MOST_TEXT, Ours, literal, understood
from outrider.outputs import common
from outrider.serve.calls import (
    CODER,
    FUNCTION,
    GRANITE,
    HARMONY,
    HERMES,
    LLAMA,
    LONGEST_NAME,
    MARKED,
    MINISTRAL,
    MISTRAL,
    NAMES,
    PHI,
    PYTHONIC,
    XLAM,
    Family,
    value_of,
)
from outrider.serve.parser import parse

NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
MOST_TOOLS = 256
OURS = re.compile(r"\w+: grammar cannot be used: (?:at (\d+)\(\d+\): )?(.*?)(?: \d+ \| .*)?", re.S)  # of calls
BEGUN = re.compile(r"[<\[]\|?\w*\Z")  # a mark, as far as another may begin alike
Render = Callable[[list[Any], dict[str, Any]], str]


LOOK_UP: dict[str, Any] = {"name": "look_up", "arguments": {"city": "Oslo"}}
TALK: list[Any] = [{"role": "user", "content": "Where?"}]
TOOL: dict[str, Any] = {"type": "function", "function": {"name": LOOK_UP["name"]}}


def family_of(template: Any, render: Render | None = None) -> Family | None:
    """The way of a chat template; None if it has no tools, or writes their calls in another way.

    Its marks are those of several families. So if it can be rendered (`LLM.render_text`), it is made to write a call,
    which has to be found; a template that writes none is believed, if it has marks and shows the tools.
    """
    if not isinstance(template, str) or "tools" not in template:
        return None
    likely, unmarked = list[Family](), [XLAM, PYTHONIC]
    if "<tool_call>" in template:
        likely = [CODER, HERMES] if FUNCTION in template else [HERMES]
        likely = [] if "<arg_key>" in template else likely  # GLM's
    elif MISTRAL.marks[0] in template:
        likely = [MINISTRAL, MISTRAL] if "[ARGS]" in template else [MISTRAL, MINISTRAL]
    elif GRANITE.marks[0] in template:
        likely = [PHI] if PHI.closing in template else [GRANITE]
    elif "<|channel|>" in template and "functions." in template:
        likely = [HARMONY]
    elif marked := [family for family in MARKED if family.marks[0] in template]:
        likely = marked
    elif "parameters" in template and ("python_tag" in template or "ipython" in template):
        likely = [LLAMA]
    written = list[str]()
    if render and (likely or "tool_calls" in template):
        if not _shows(template, render):
            return None
        written = _written(template, render)
    schema = {"properties": {"city": {"type": "string"}}}
    for family, text in product([*likely, *unmarked], written):
        calls = [call["function"] for call in parse(text, family, {LOOK_UP["name"]: schema})[1]]
        with suppress(ValueError):  # arguments that are half ones
            if [call | {"arguments": json.loads(call["arguments"])} for call in calls] == [LOOK_UP]:
                return family
    return None if any(LOOK_UP["name"] in text for text in written) else next(iter(likely), None)


def _shows(template: str, render: Render) -> bool:
    """Whether a chat template has tools in its prompts, if only behind a system message; one that refuses may have."""
    for talk in (TALK, [{"role": "system", "content": "Answer."}, *TALK]):
        try:
            prompt = render(talk, {"chat_template": template, "add_generation_prompt": True, **as_variables([TOOL])})
        except OutriderError:
            return True
        if LOOK_UP["name"] in prompt:
            return True
    return False


def _written(template: str, render: Render) -> list[str]:
    """What a chat template makes of a call, from where its text parts from a prompt for an answer, and from where it
    parts from another answer; a mark is not parted. Nothing if it refuses one."""
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "abcdefghi", "type": "function", "function": LOOK_UP}],
    }
    texts = list[str]()
    try:
        for answer in ([], [{"role": "assistant", "content": "\0"}], [call]):
            options = {"chat_template": template, "add_generation_prompt": not answer, **as_variables([TOOL])}
            texts.append(render(TALK + answer, options))
    except OutriderError:
        return []
    whole = texts.pop()
    return [whole[len(BEGUN.sub("", whole[: common(text, whole)])) :] for text in texts]


@dataclass(frozen=True)
class Tools:
    """A request's tools, checked: functions by name, which of them must be called, and whether several may be."""

    functions: dict[str, Mapping[str, Any]]
    choice: str  # none, auto, required, or the name of a function behind "="
    parallel: bool

    @property
    def callable(self) -> dict[str, Mapping[str, Any]]:
        """The functions that may be called: names and schemas."""
        named = self.choice[1:]
        return {named: self.functions[named]} if self.choice.startswith("=") else self.functions

    @property
    def forced(self) -> bool:
        """Whether the output can be nothing but calls."""
        return self.choice not in ("none", "auto")

    def written(self, family: Family) -> Family:
        """How calls are written that this asks for: those whose values are no JSON are forced as Hermes's."""
        return HERMES if self.forced and family.shape in ("tagged", "python", "escaped") else family


def check(tools: Any, tool_choice: Any = None, parallel_tool_calls: Any = None) -> Tools | None:
    """A request's three fields; None if it has no tools. Raises ConfigError, naming the field."""
    if tools is None or (isinstance(tools, (list, tuple)) and not tools):  # an empty list is what some clients send
        if tool_choice not in (None, "none") and not (tools is not None and tool_choice == "auto"):
            raise ConfigError(f"tool_choice {brief(tool_choice)} needs tools")
        return None
    if not isinstance(tools, (list, tuple)) or len(tools) > MOST_TOOLS:
        raise ConfigError(f"tools must be a list of at most {MOST_TOOLS} functions, not {brief(tools)}")
    functions = dict[str, Mapping[str, Any]]()
    for tool in tools:
        function = _function(tool)
        name = function.get("name")
        if not isinstance(name, str) or tool.get("type") != "function":
            raise ConfigError(
                f"tools: {{'type': 'function', 'function': {{'name': ..., 'parameters': ...}}}}, not {brief(tool)}"
            )
        if not 1 <= len(name) <= LONGEST_NAME or not set(name) <= NAMES:
            signs = "letters, digits, _, - and ."
            raise ConfigError(f"tools: a function's name has 1 to {LONGEST_NAME} {signs}, not {brief(name)}")
        if name in functions:
            raise ConfigError(f"tools: function {name!r} is there twice")
        schema = function.get("parameters")
        if not (schema is None or isinstance(schema, Mapping)):
            raise ConfigError(f"tools: parameters of {name!r} must be a JSON schema, not {brief(schema)}")
        if schema and "object" not in (kinds if isinstance(kinds := schema.get("type", "object"), list) else [kinds]):
            raise ConfigError(f"tools: parameters of {name!r} must be an object's schema, not one of {brief(kinds)}")
        functions[name] = schema or NO_PARAMETERS
    if not (parallel_tool_calls is None or isinstance(parallel_tool_calls, bool)):
        raise ConfigError(f"parallel_tool_calls must be true or false, not {brief(parallel_tool_calls)}")
    choice = "auto" if tool_choice is None else tool_choice
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        choice, functions = _allowed(choice.get("allowed_tools"), functions)
    elif isinstance(choice, Mapping):
        named = _function(choice).get("name") if choice.get("type") == "function" else None
        if not isinstance(named, str) or named not in functions:
            raise ConfigError(f"tool_choice names {brief(named)}; there are {', '.join(functions)}")
        choice = f"={named}"
    elif choice not in ("none", "auto", "required"):
        raise ConfigError(f"tool_choice must be none, auto, required or a function, not {brief(choice)}")
    return Tools(functions, choice, parallel_tool_calls is not False)


def as_variables(tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A request's tools under the names that templates have for them (SmolLM3's: `xml_tools`), with what OpenAI lets be
    left out, since some templates read it."""
    left = {"description": "", "parameters": {"type": "object", "properties": {}}}
    shown = []
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, dict):
            tool = tool | {"function": function | {key: left[key] for key in left if function.get(key) is None}}
        shown.append(tool)
    return {"tools": shown, "xml_tools": shown}


def _allowed(given: Any, functions: dict[str, Mapping[str, Any]]) -> tuple[str, dict[str, Mapping[str, Any]]]:
    """The mode of OpenAI's `allowed_tools`, and those of the functions that it lets be called."""
    mode, tools = (given.get("mode"), given.get("tools")) if isinstance(given, Mapping) else (None, None)
    if mode not in ("auto", "required") or not isinstance(tools, (list, tuple)) or not tools:
        raise ConfigError(f"tool_choice: allowed_tools has a mode, auto or required, and tools, not {brief(given)}")
    found = dict[str, Mapping[str, Any]]()
    for tool in tools:
        name = _function(tool).get("name")
        if not isinstance(name, str) or name not in functions:
            raise ConfigError(f"tool_choice allows {brief(tool)}; there are {', '.join(functions)}")
        found[name] = functions[name]
    return mode, found


def for_templates(message: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI's message as templates take it: text everywhere, the arguments of earlier calls as objects, reasoning
    under each of the names that templates have for it, and nothing that is null.

    Arguments that are none, as of a call that was cut off, count as no arguments: the conversation is to go on. Raises
    ConfigError for calls that are none.
    """
    own = {key: value for key, value in message.items() if value is not None}
    if calls := own.get("tool_calls"):
        own["tool_calls"] = [_shown(call) for call in (calls if isinstance(calls, (list, tuple)) else [calls])]
    else:
        own.pop("tool_calls", None)  # some templates take an empty list for calls
    if own.get("content") in (None, []):
        own["content"] = ""
    said = own.get("reasoning") or own.get("reasoning_content")
    if not (said is None or isinstance(said, str)):
        raise ConfigError(f"messages: reasoning is text, not {brief(said)}")
    if said:
        both = own["content"] and own.get("tool_calls")  # gpt-oss's template then refuses the reasoning
        own |= {"reasoning": said, "reasoning_content": said, "thinking": "" if both else said}
    return own


def in_order(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A conversation for templates whose results stand in the order of the calls before them and have their functions'
    names, as far as ids tell it.

    Most templates show no ids, so that the model takes the first result for the first call's; some show names, which
    OpenAI's results lack.
    """
    ordered = list[dict[str, Any]]()
    for of_tools, each in groupby(messages, lambda message: message.get("role") == "tool"):
        run = list(each)
        before = ordered[-1] if of_tools and ordered else {}
        calls = before.get("tool_calls", ()) if before.get("role") == "assistant" else ()
        names = {call["id"]: call["function"]["name"] for call in calls if isinstance(call.get("id"), str)}
        if len(names) == len(calls):
            of = [one if isinstance(one := message.get("tool_call_id"), str) else None for message in run]
            run = [{"name": names[i], **one} if i in names else one for i, one in zip(of, run, strict=True)]
            if names.keys() >= set(of):
                places = {one: place for place, one in enumerate(names)}
                run.sort(key=lambda message: places[message["tool_call_id"]])
        ordered += run
    return ordered


def _shown(call: Any) -> dict[str, Any]:
    function = _function(call)
    if not isinstance(function.get("name"), str):
        raise ConfigError(f"messages: tool_calls hold {{'id', 'type', 'function': {{...}}}}, not {brief(call)}")
    given = function.get("arguments")
    arguments = value_of(given) if isinstance(given, str) else given
    if not isinstance(arguments, Mapping):
        arguments = {}
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _function(given: Any) -> Mapping[str, Any]:
    """That of a tool, a call or a choice; empty where there is none."""
    function = given.get("function") if isinstance(given, Mapping) else None
    return function if isinstance(function, Mapping) else {}


def constraint(tools: Tools, family: Family, tokenizer: Any) -> StructuredOutputsParams | None:
    """What the output must be for `tool_choice` required or a named function; None where it is free.

    The grammar writes calls as the family's models do, spaces included, so all but the arguments is forced. (Mistral's
    have `[ARGS]` since 2025, and had an id between or nothing before.)
    """
    if not tools.forced:
        return None
    added = tokenizer.get_added_vocab()
    several = tools.parallel and not tools.choice.startswith("=")
    try:
        if (size := len(json.dumps([*tools.callable.values()]))) > MOST_TEXT:
            raise ConfigError(f"tools: their parameters have {size} characters; at most {MOST_TEXT} can be asked for")
        calls = list[str]()
        for name, schema in tools.callable.items():
            try:
                calls.append(_call(name, understood(schema), family, added))
            except ValueError as error:
                raise ConfigError(f"tools: parameters of {name!r} cannot be used: {error}") from None
    except RecursionError:
        raise ConfigError("tools: parameters are nested too deeply") from None
    begin, end, between = (literal(text, added) for text in (family.begin, family.end, family.between))
    more = f"({between} call)*" if several else ""
    rules = [f"call_{i}: {call}" for i, call in enumerate(calls)]
    choice = " | ".join(f"call_{i}" for i in range(len(calls)))
    text = "\n".join([f"start: {begin} call {more} {end}", f"call: {choice}", *rules])
    return StructuredOutputsParams(grammar=Ours(text))


def unusable(error: str, functions: Iterable[str]) -> str:
    """What is wrong with a grammar of calls (`constraint`), without excerpts of it, for its client did not write it.
    The functions' rules are its lines from the third on."""
    if (found := OURS.fullmatch(error)) is None:
        return error
    name = dict(enumerate(functions, 3)).get(int(found[1] or 0))
    whose = "these parameters" if name is None else f"parameters of {name!r}"
    return f"tools: {whose} cannot be used: {found[2]}"


def _call(name: str, schema: Mapping[str, Any], family: Family, added: Mapping[str, int]) -> str:
    """A call of a function as a grammar has it."""
    style = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    before, behind = json.dumps(f'{{"name": "{name}", "{family.arguments}": '), '"}"'
    if family.head:
        before, behind = literal(name + family.head, added), ""
    return f"{before} %json {json.dumps({**schema, 'type': 'object', 'x-guidance': style})} {behind}"
