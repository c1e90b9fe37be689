"""Answers of the two endpoints, whole or as frames, from the same events: a stream's frames regrouped are the whole."""

from __future__ import annotations

import itertools
from codecs import getincrementaldecoder
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from outrider.async_llm import Answer
from outrider.errors import EngineError
from outrider.outputs import GenerationOutput, Logprob, StepEvent
from outrider.serve.http import DONE, dumps, frame, refusal
from outrider.serve.parser import Harmony, Parser, regrouped
from outrider.serve.protocol import ChatBody, CompletionBody, Sampled
from outrider.serve.reasoning import Counter, Reader, Reading
from outrider.serve.vocabulary import Vocabulary

FLOOR = -9999.0  # JSON has no -inf
MANY = 2048  # numbers: to write more log-probabilities takes ten milliseconds and longer


@dataclass
class Job:
    """A request under way."""

    body: Sampled
    answer: Answer
    head: dict[str, Any]  # id, created, model, fingerprint
    vocabulary: Vocabulary
    prompts: list[list[int]]
    log: dict[str, Any]  # what the log line of the request will say
    aside: Callable[[Callable[[], bytes]], Awaitable[bytes]]  # runs what takes long beside the event loop


class Reply:
    """How one endpoint writes. Subclasses say what a choice looks like."""

    kinds: tuple[str, str]  # of the whole answer, of a frame
    depth = 5  # at which the tokens' log-probabilities lie: in an entry of a list of logprobs of a choice of choices

    def __init__(self, job: Job) -> None:
        self.job, self.body = job, job.body
        self.n = job.body.n or 1
        self.outputs: list[GenerationOutput] = []
        self.count = 0  # tokens of all outputs
        self.reasoned: int | None = None  # ... of these, reasoning's; None where it is not told apart

    # --- what subclasses write ---

    def choice(self, event: StepEvent) -> dict[str, Any]:
        """A whole choice, from all of an output as one event."""
        raise NotImplementedError

    def choices(self, event: StepEvent, first: bool) -> list[dict[str, Any]]:
        """Choices, each for a frame of its own, of an event, which is the output's `first` or not."""
        raise NotImplementedError

    # --- whole ---

    async def whole(self) -> bytes:
        """The answer in JSON, when all outputs have ended."""
        events: dict[int, list[StepEvent]] = {}
        async for event in self._events():
            events.setdefault(event.index, []).append(event)
        read = self.n * sum(map(len, self.job.prompts))
        return await self._written(lambda depth: dumps(self._made(events), depth), self.count, read)

    def _made(self, events: dict[int, list[StepEvent]]) -> dict[str, Any]:
        choices = [self.choice(_joined(events[i])) for i in sorted(events)]
        return {**self._head(self.kinds[0]), "choices": choices, "usage": self.usage(), **self._metrics()}

    async def _written(self, write: Callable[[int], bytes], tokens: int, read: int = 0) -> bytes:
        """What `write(depth)` gives of so many tokens, and so many of prompts: beside the event loop, if it is long."""
        params = self.job.answer.requests[0].seq.params
        told = ((tokens, params.logprobs), (read, params.prompt_logprobs))
        numbers = sum(count * (1 + top) for count, top in told if top is not None)
        numbers += tokens + read if self.body.return_token_ids else 0
        return write(0) if numbers < MANY else await self.job.aside(partial(write, self.depth))

    # --- as a stream ---

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events, to [DONE], those together that come together: each write wakes the reader.

        What goes wrong on the way is a frame as well.
        """
        head, options = self._head(self.kinds[1]), self.body.stream_options
        wanted = bool(options and options.include_usage)
        always = wanted and bool(options and options.continuous_usage_stats)
        seen: set[int] = set()
        some = b""

        def framed(event: StepEvent, depth: int) -> bytes:
            made = b""
            for choice in self.choices(event, event.index not in seen):
                shown = self.count - len(event.token_ids) if "role" in choice.get("delta", ()) else self.count
                usage = {"usage": self.usage(shown) if always else None} if wanted else {}
                made += frame({**head, "choices": [choice], **usage, **self._lead(not seen)}, depth=depth)
                seen.add(event.index)
            return made

        try:
            async for event in self._events():
                read = 0 if event.index in seen else len(self.job.prompts[event.index // self.n])
                some += await self._written(partial(framed, event), len(event.token_ids), read)
                if some and len(self.outputs) < len(self.job.answer.requests):
                    yield some
                    some = b""
            if wanted:
                some += frame({**head, "choices": [], "usage": self.usage(), **self._metrics()})
        except Exception as error:
            some += frame(refusal(error).body)
        yield some + DONE

    async def _events(self) -> AsyncGenerator[StepEvent, None]:
        async for event in self.job.answer.events():
            self.count += len(event.token_ids)
            self.job.log["completion_tokens"] = self.count
            if event.output is not None:
                self.outputs.append(event.output)
                if event.finish_reason == "abort":
                    raise EngineError("the request was aborted")
            yield event

    # --- parts ---

    def _head(self, kind: str) -> dict[str, Any]:
        return {"object": kind, **self.job.head}

    def _lead(self, first: bool) -> dict[str, Any]:
        """What only the first frame carries beside its choice."""
        return {}

    def usage(self, count: int | None = None) -> dict[str, Any]:
        """Tokens so far, or `count`; a prompt counts once, whatever n."""
        count = self.count if count is None else count
        read = sum(map(len, self.job.prompts))
        requests = self.job.answer.requests
        cached = sum(request.cached for request in requests[:: self.n])
        usage = {
            "prompt_tokens": read,
            "completion_tokens": count,
            "total_tokens": read + count,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        details = {} if self.reasoned is None else {"reasoning_tokens": min(self.reasoned, count)}
        if self.body.prediction is not None and len(self.outputs) == len(requests):
            # of all that was drafted: nobody asks whether the prediction said it; by outputs: engines may be elsewhere
            specs = [output.metrics["speculative_decoding"] for output in self.outputs]
            drafted = sum(spec["num_draft_tokens"] for spec in specs)
            accepted = sum(spec["num_accepted_draft_tokens"] for spec in specs)
            details["accepted_prediction_tokens"] = accepted
            details["rejected_prediction_tokens"] = drafted - accepted
        return {**usage, **({"completion_tokens_details": details} if details else {})}

    def _metrics(self) -> dict[str, Any]:
        return {"metrics": metrics_of(self.outputs[0])} if len(self.job.answer.requests) == 1 else {}

    def _extras(self, event: StepEvent) -> dict[str, Any]:
        if not self.body.return_token_ids:
            return {}
        return {"token_ids": event.token_ids, "drafted_by": event.drafted_by, "token_texts": event.texts}

    def _text(self, token: int) -> str:
        return self.job.vocabulary.text(token, bool(self.body.return_tokens_as_token_ids))

    def of_prompt(self, index: int) -> dict[str, Any]:
        """`prompt_logprobs` in vLLM's shape, if asked for."""
        most, known = self.body.prompt_logprobs, self.job.answer.requests[index].prompt_logprobs
        if most is None or known is None:
            return {}

        def shown(each: Logprob) -> dict[int, dict[str, Any]]:
            ranks = {token: (rank, value) for rank, (token, value) in enumerate([*each.top.items()][:most], 1)}
            ranks[each.token_id] = (each.rank, each.logprob)
            return {
                token: {"logprob": max(value, FLOOR), "rank": rank, "decoded_token": self._text(token)}
                for token, (rank, value) in ranks.items()
            }

        return {"prompt_logprobs": [each and shown(each) for each in known]}

    def _end(self, event: StepEvent) -> dict[str, Any]:
        output = event.output
        return {"finish_reason": event.finish_reason, "stop_reason": output.stop_reason if output else None}


class Completion(Reply):
    """`/v1/completions`."""

    kinds = ("text_completion", "text_completion")
    body: CompletionBody

    def __init__(self, job: Job, echoes: list[str] | None) -> None:
        super().__init__(job)
        self.echoes = echoes  # per prompt, if asked for
        self.offsets: dict[int, int] = {}

    async def _events(self) -> AsyncGenerator[StepEvent, None]:
        async for event in super()._events():
            if self.body.max_tokens == 0:  # with echo; the engine has read the prompt and written one token
                self.count, reason = 0, event.finish_reason and "length"
                event = StepEvent(event.index, [], [], [], event.logprobs and [], reason)
            yield event

    def choice(self, event: StepEvent) -> dict[str, Any]:
        return {"prompt_logprobs": None, "prompt_token_ids": None, "token_ids": None, **self._choice(event, True)}

    def choices(self, event: StepEvent, first: bool) -> list[dict[str, Any]]:
        nothing = not event.text and event.finish_reason is None and not first
        if nothing and not self.body.return_token_ids and event.logprobs is None:
            return []
        return [self._choice(event, first)]

    def _choice(self, event: StepEvent, first: bool) -> dict[str, Any]:
        echo = self.echoes[event.index // self.n] if first and self.echoes is not None else ""
        lead: dict[str, Any] = {}
        if first and self.body.return_token_ids:
            lead = {"prompt_token_ids": self.job.prompts[event.index // self.n]}
        lead |= self.of_prompt(event.index) if first else {}
        logprobs = None if event.logprobs is None else self._logprobs(event, event.logprobs, echo)
        return {
            "index": event.index,
            "text": echo + event.text,
            "logprobs": logprobs,
            **self._end(event),
            **lead,
            **self._extras(event),
        }

    def _logprobs(self, event: StepEvent, given: list[Logprob], echo: str) -> dict[str, Any]:
        index = event.index
        found: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

        def add(token: int, known: Logprob | None, at: int) -> None:
            found["tokens"].append(self._text(token))
            found["token_logprobs"].append(None if known is None else max(known.logprob, FLOOR))
            found["top_logprobs"].append(None if known is None else self._top(known))
            found["text_offset"].append(at)

        if echo and (before := self.job.answer.requests[index].prompt_logprobs) is not None:
            at, read = 0, getincrementaldecoder("utf-8")("replace").decode
            for token, known in zip(self.job.prompts[index // self.n], before, strict=True):
                add(token, known, at)
                text = read(self.job.vocabulary.bytes(token))  # a character's where its last byte is
                if not echo.startswith(text, at):  # SentencePiece puts a space before a text and behind special tokens
                    text = text.removeprefix(" ")
                if token not in self.job.vocabulary.added or echo.startswith(text, at):  # else the text is without it
                    at += len(text)
        at = self.offsets.get(index, len(echo))
        for each, text in zip(given, event.texts, strict=True):
            add(each.token_id, each, at)
            at += len(text)
        self.offsets[index] = at
        return found

    def _top(self, given: Logprob) -> dict[str, float]:
        every = {given.token_id: given.logprob} | dict([*given.top.items()][: self.body.logprobs])  # itself first
        shown: dict[str, float] = {}
        for token, value in every.items():  # two may read alike, as parts of characters do: the likelier one counts
            text = self._text(token)
            shown[text] = max(value, shown.get(text, FLOOR))
        return shown


class Chat(Reply):
    """`/v1/chat/completions`. `how` its answers are read: for reasoning, and for calls of tools."""

    kinds = ("chat.completion", "chat.completion.chunk")
    body: ChatBody

    def __init__(self, job: Job, how: Reading) -> None:
        super().__init__(job)
        self.how, self._end_of_prompt = how, how.end(job.prompts[0])
        self._readers: dict[int, Parser | Reader | None] = {}  # per output
        self._counters: dict[int, Counter | None] = {}
        if how.way is not None:
            self.reasoned = 0

    async def _events(self) -> AsyncGenerator[StepEvent, None]:
        async for event in super()._events():
            self._count(event)
            yield event

    def _count(self, event: StepEvent) -> None:
        """Count reasoning's tokens. A stop string holds text back, so they are not counted by what is shown."""
        if event.index not in self._counters:
            self._counters[event.index] = self.how.counter(self._end_of_prompt)
        if counter := self._counters[event.index]:
            texts = (self.job.vocabulary.bytes(token).decode("utf-8", "replace") for token in event.token_ids)
            self.reasoned = (self.reasoned or 0) + sum(map(counter.count, texts))

    def deltas(self, event: StepEvent) -> list[dict[str, Any]]:
        """What an event brings to the message: its reasoning, its content, and its calls."""
        if event.index not in self._readers:
            self._readers[event.index] = self.how.reader(self._end_of_prompt)
        if (parser := self._readers[event.index]) is None:
            return [{"content": event.text}] if event.text else []
        found = parser.feed(event.text)
        if event.finish_reason is not None:
            by_string = event.output is not None and isinstance(event.output.stop_reason, str)
            found += parser.finish(closed=event.finish_reason == "stop" and not by_string)
        if self.body.parallel_tool_calls is False:
            found = [delta for delta in found if not any(call["index"] for call in delta.get("tool_calls", ()))]
        return found

    def own(self, text: str, kind: str, made: list[dict[str, Any]]) -> str:
        """The beginning of one of the parts that are `made` of an answer, without the line break that stands between
        two messages of gpt-oss's in a chat."""
        joined = isinstance(self._readers.get(0), Harmony) and any(part["type"] == kind for part in made)
        return text.removeprefix("\n") if joined else text

    def _shown(self, event: StepEvent) -> list[dict[str, Any]]:
        hidden = self.body.include_reasoning is False
        return [delta for delta in self.deltas(event) if not (hidden and "reasoning" in delta)]

    def choice(self, event: StepEvent) -> dict[str, Any]:
        deltas = self._shown(event)
        content, calls = regrouped(deltas)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        message |= {"tool_calls": calls} if calls else {}
        if reasoning := "".join(delta.get("reasoning", "") for delta in deltas):
            message |= {"content": content or None, "reasoning": reasoning}
        return {
            "index": event.index,
            "message": message,
            "logprobs": self._logprobs(event),
            **self._end(event),
            "token_ids": None,
            **self._extras(event),
        }

    def choices(self, event: StepEvent, first: bool) -> list[dict[str, Any]]:
        def of(delta: dict[str, Any], **more: Any) -> dict[str, Any]:
            return {"index": event.index, "delta": delta, "logprobs": None, "finish_reason": None, **more}

        found, deltas = [of({"role": "assistant", "content": ""})] if first else [], self._shown(event)
        behind, end = event, dict[str, Any]()
        if event.token_ids and event.finish_reason == "stop" and not event.texts[-1]:  # what ended it is no content
            behind, last = event.part(slice(-1)), event.part(slice(-1, None))
            end = self._about(last)
        if not deltas and behind.token_ids and (self.body.return_token_ids or event.logprobs is not None):
            deltas = [{"content": ""}]
        about = self._about(behind)
        for delta in deltas:
            found.append(of(delta, **about))
            about = {}
        if event.finish_reason is not None:
            found.append(of({}, **self._end(event), **end))
        return found

    def _about(self, event: StepEvent) -> dict[str, Any]:
        return {"logprobs": self._logprobs(event), **self._extras(event)}

    def _end(self, event: StepEvent) -> dict[str, Any]:
        end, parser = super()._end(event), self._readers.get(event.index)
        if parser and parser.calls and not self.torn(event.index) and event.finish_reason == "stop":
            end["finish_reason"] = "tool_calls"
        return end

    def torn(self, index: int) -> bool:
        """Whether the last call of an output that was handed out was cut off in the middle."""
        parser = self._readers.get(index)
        return bool(parser and parser.broken and (parser.calls == 1 or self.body.parallel_tool_calls is not False))

    def _lead(self, first: bool) -> dict[str, Any]:
        ids = {"prompt_token_ids": self.job.prompts[0]} if self.body.return_token_ids else {}
        return {**ids, **self.of_prompt(0)} if first else {}

    def _made(self, events: dict[int, list[StepEvent]]) -> dict[str, Any]:
        return {**super()._made(events), "prompt_logprobs": None, "prompt_token_ids": None, **self._lead(True)}

    def _logprobs(self, event: StepEvent) -> dict[str, Any] | None:
        if event.logprobs is None:
            return None
        content = []
        for each in event.logprobs:
            top = [self._token(token, value) for token, value in each.top.items()]
            content.append({**self._token(each.token_id, each.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _token(self, token: int, value: float) -> dict[str, Any]:
        spelt = list(self.job.vocabulary.bytes(token))
        return {"token": self._text(token), "logprob": max(value, FLOOR), "bytes": spelt}


def _joined(events: list[StepEvent]) -> StepEvent:
    last = events[-1]
    return StepEvent(
        last.index,
        [token for event in events for token in event.token_ids],
        [text for event in events for text in event.texts],
        [by for event in events for by in event.drafted_by],
        None if last.logprobs is None else [*itertools.chain.from_iterable(e.logprobs or () for e in events)],
        last.finish_reason,
        last.output,
        last.rest,
    )


def metrics_of(output: GenerationOutput) -> dict[str, Any]:
    """Root `metrics` of an answer: vLLM's `speculative_decoding` in its detailed form, its times, and our promise."""
    about, timing, tokens = output.metrics, output.metrics["timing"], len(output.token_ids)
    spec = dict(about["speculative_decoding"])
    lacking = spec["num_spec_tokens"] + 1 - len(spec["acceptance_histogram"])
    spec["acceptance_histogram"] = spec["acceptance_histogram"] + [0] * lacking
    rest = timing["total_seconds"] - timing["time_to_first_token"]
    return {
        "speculative_decoding": spec,
        "queue_time_ms": 1000 * timing["queued_seconds"],
        "time_to_first_token_ms": 1000 * timing["time_to_first_token"],
        "generation_time_ms": 1000 * rest,
        **({"mean_itl_ms": 1000 * rest / (tokens - 1)} if tokens > 1 else {}),
        "tokens_per_second": timing["tokens_per_second"],
        **{key: about[key] for key in ("method", "exactness", "acceptance_method", "drafter_error")},
        "seed": output.seed,
    }
