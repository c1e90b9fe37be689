"""The async front door: `async for event in AsyncLLM("tiny").generate("Once upon a time")`.

One thread steps the engine while there is work. After each step it tells every event loop once, for all requests that
have news, or, with an `event_interval`, for those whose readers are due some; a request's tokens stay where they are
until somebody reads them, so a slow reader costs nothing.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import math
import threading
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import aclosing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary, WeakSet, ref

import torch

from outrider.config import SamplingParams, real, whole
from outrider.engine import LONG, Request, TextStream
from outrider.engine.turn import LAST_STEP
from outrider.errors import ConfigError, EngineError, QueueFull, brief, told
from outrider.llm import LLM, Message, Prompt, is_list, sampling_params_of
from outrider.load import Checkpoint
from outrider.ops import untouched
from outrider.outputs import StepEvent

log = logging.getLogger(__name__)
CLOSED = "the engine is closed; no further requests are taken"
LINGER = 5.0  # seconds that the engine's thread waits for work before it ends; the next request starts another
GATHER = 0.02  # seconds that an idle engine waits at most for requests on their way, whose prompts are read together
OFTEN, SLOWEST = 8, 4  # answers whose events come as often as is asked; how many times as seldom those of many may come


_open: WeakSet[AsyncLLM] = WeakSet()


@atexit.register
def _close_all() -> None:
    """A thread that steps must not outlive what it steps with."""
    for llm in list(_open):
        llm.close()


def _lose_all(what: str) -> None:
    """A rank has ended, and with it the model."""
    for llm in list(_open):
        if llm.llm.ranks is not None:
            llm.lose(what)


class Progress(NamedTuple):
    """What a step brought to a request, as `AsyncLLM.watch` is told."""

    request: Request
    tokens: int
    finished: bool
    at: float  # time.perf_counter()


class AsyncLLM:
    """An LLM for asyncio, with the same tokens: any number of requests at once, from any number of event loops.

    model: what LLM takes, with LLM's keywords; or an LLM, which goes on working beside this.
    max_queued_requests, max_queued_tokens: outputs, and tokens of their prompts, that may wait beyond those that run;
        more are refused with QueueFull, though a larger request is taken while fewer run than can. None: any number.
    event_interval: seconds between two events of an output, unless a step takes longer: what comes meanwhile joins the
        next one. First tokens and ends do not wait, and whose turn comes within half an interval is told along with
        others. Readers that run on the engine's own cores slow it down: each event costs some tenths of a
        millisecond, whatever it holds. So beside more than 8 answers the interval grows as they do, to 4 times at most.
    watch: called in the event loop with the Progress of its requests, as they are told.
    Raises ConfigError for what cannot be, and what LLM raises. Close it when done: `async with`, `aclose` or `close`.
    """

    def __init__(
        self,
        model: str | Path | Checkpoint | LLM,
        *,
        max_queued_requests: int | None = None,
        max_queued_tokens: int | None = None,
        event_interval: float = 0.0,
        watch: Callable[[list[Progress]], None] | None = None,
        **options: Any,
    ) -> None:
        if isinstance(model, LLM) and options:
            raise ConfigError(f"{next(iter(options))} belongs to the LLM that is given")
        if real(event_interval, 0, 3600) is None:
            raise ConfigError(f"event_interval must be seconds from 0 to 3600, not {brief(event_interval)}")
        for name, bound in (("max_queued_requests", max_queued_requests), ("max_queued_tokens", max_queued_tokens)):
            if bound is not None and whole(bound, 0) is None:
                raise ConfigError(f"{name} must be a whole number of at least 0, or None, not {brief(bound)}")
        if watch is not None and not callable(watch):
            raise ConfigError(f"watch is called with what is told, and {brief(watch)} cannot be")
        self.llm = model if isinstance(model, LLM) else LLM(model, **options)
        self.max_queued_requests, self.max_queued_tokens, self.watch = max_queued_requests, max_queued_tokens, watch
        self.event_interval = event_interval
        self._news = WeakKeyDictionary[asyncio.AbstractEventLoop, list[Progress]]()  # that was not told yet
        self.closed, self.lost = False, False  # lost: with a rank, and this process is about to end
        self._changed = threading.Condition()  # guards what follows
        self._answers: set[Answer] = set()  # all that have not ended, also those whose prompts are still being read
        self._stirred: set[ref[Answer]] = set()  # there may be news of these: who waits is not looked at each step
        self._reading = 0  # outputs whose prompts are being read for `start`
        self._thread: threading.Thread | None = None
        self._turned = 0.0  # when the thread's loop came round last
        self._lanes = Lanes()
        self.off_loop = self._lanes.run
        _open.add(self)
        if self.llm.ranks is not None:
            self.llm.ranks.on_end = _lose_all

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def generate(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        k: int | None = None,
        priority: int = 0,
        deadline: float | None = None,
        cache_salt: str | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> AsyncGenerator[StepEvent, None]:
        """Tokens of the n outputs as they come; the last event of each carries the whole output.

        `prompt` is text, token ids or a conversation, for which LLM.render explains the keywords; `k`, `priority`,
        `deadline` and `cache_salt` are explained by Engine.add. Leaving the loop, or cancelling the task, stops
        the request at the next step. Raises, before anything runs, what LLM.generate raises, QueueFull and EngineError;
        later the error of the first output that fails.
        """
        params, began = sampling_params_of(sampling_params, sampling), time.perf_counter()
        template = {"chat_template": chat_template, "chat_template_kwargs": chat_template_kwargs}
        with self.reading(params.n):
            ids = await self.off_loop(lambda: self.llm.read(prompt, **template), "text" if _is_long(prompt) else "")
        options: dict[str, Any] = {"k": k, "priority": priority, "cache_salt": cache_salt}
        answer = await self.start([(ids, params)], **options, deadline=left(deadline, began))
        async with aclosing(answer.events()) as events:
            async for event in events:
                yield event

    async def start(
        self,
        prompts: list[tuple[list[int], SamplingParams]],
        *,
        k: int | None = None,
        priority: int = 0,
        deadline: float | None = None,
        cache_salt: str | None = None,
        begun: list[list[int]] | None = None,
    ) -> Answer:
        """Queue prompts; their outputs are one Answer's, in the order of the prompts, n for each.

        `begun`: for each output, tokens that another engine has written (Engine.add).

        Close the answer, unless its events are read to their end. Raises as `generate` does before anything runs.
        """
        loop, began = asyncio.get_running_loop(), time.perf_counter()
        answer = Answer(self, loop)
        weight = sum(params.n for _, params in prompts)
        with self._changed:
            self._check_room(weight)
            answer.weight = weight
            self._answers.add(answer)
        lane = "text" if any(_is_long(params.prediction) for _, params in prompts) else ""
        if any(params.structured_outputs is not None for _, params in prompts):
            lane = "grammar"
        try:
            options: dict[str, Any] = {"k": k, "priority": priority, "cache_salt": cache_salt}
            await self.off_loop(
                lambda: self._add(answer, prompts, {**options, "deadline": left(deadline, began)}, begun), lane
            )
        except BaseException:  # cancelled, too: then the thread may not have come to it yet
            answer.close()
            raise
        return answer

    @contextmanager
    def reading(self, weight: int) -> Iterator[None]:
        """While the prompts of so many outputs are read for `start`: they count as waiting.

        Raises QueueFull if there is no room for them, EngineError if this is closed, before anything is read.
        """
        with self._changed:
            self._check_room(weight)
            self._reading += weight
        try:
            yield
        finally:
            with self._changed:
                self._reading -= weight

    def _check_room(self, weight: int) -> None:
        if self.closed:
            raise EngineError(CLOSED)
        if (limit := self.max_queued_requests) is None:
            return
        there = self._reading + sum(answer.weight for answer in self._answers)
        most = self.llm.engine_config.max_num_seqs  # of a larger request some run at once while there are fewer
        if there >= most and there + weight > limit + most:
            told = f"{there} outputs are running or waiting, and with {weight} more they would be more than"
            raise QueueFull(f"{told} the {limit + most} that are taken; try again later")

    def _add(
        self,
        answer: Answer,
        prompts: list[tuple[list[int], SamplingParams]],
        options: dict[str, Any],
        begun: list[list[int]] | None,
    ) -> None:
        engine = self.llm.engine
        requests: list[Request] = []
        try:
            if (limit := self.max_queued_tokens) is not None:
                there = sum(request.seq.prompt_len for request in list(engine.waiting))
                if there and there + sum(len(ids) * params.n for ids, params in prompts) > limit:
                    raise QueueFull(f"prompts of {there} tokens are waiting, as many as are taken; try again later")
            for ids, params in prompts:
                known = None if begun is None else begun[len(requests) : len(requests) + params.n]
                requests += engine.add(ids, params, **options, begun=known)
        except BaseException:
            for request in requests:
                engine.abort(request)
            raise
        with self._changed:
            answer.take(requests)
            if self._thread is None or not self._thread.is_alive():  # a forked process has none
                self._turned = time.monotonic()
                thread = threading.Thread(target=self._drive, name="outrider-engine", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    raise _untaken(error) from None
                self._thread = thread
            self._changed.notify_all()

    # --- the engine's thread ------------------------------------------------------------------------------------------

    def _drive(self) -> None:
        with untouched(self.llm.runner.model.device), torch.inference_mode():  # entered once for all steps
            self._steps()

    def _steps(self) -> None:
        engine, seen = self.llm.engine, self.llm.engine.turns
        while True:
            with self._changed:
                if not engine.running or not self._busy:
                    self._changed.wait_for(lambda: self.closed or self._busy, LINGER)
                    if not self._busy:
                        self._thread = None
                        return
                    if not engine.running:
                        self._changed.wait_for(lambda: self.closed or all(a.requests for a in self._answers), GATHER)
            self._turned, began = time.monotonic(), time.perf_counter()
            try:
                # another thread may step, for an LLM's own caller; what it brings to ours is news, too
                engine.step_within(lambda seen=seen: engine.turns != seen)  # type: ignore[misc]
            except BaseException as error:  # a bug, or what a request calls would end this thread: nobody shall wait
                log.exception("a step of the engine failed")
                for answer in [answer for answer in self._answers.copy() if answer.requests]:
                    answer.fail(EngineError(f"a step of the engine failed: {told(error)}"))
            seen = engine.turns  # before it is looked what they have brought
            stirred = [self._stirred.pop()() for _ in range(len(self._stirred))]
            self._hand_over([answer for answer in stirred if answer], began)

    def _hand_over(self, answers: list[Answer], began: float) -> None:
        now = time.perf_counter()
        interval = self.event_interval * min(max(1.0, len(self._answers) / OFTEN), SLOWEST)
        late, due = now + (now - began) - interval, False  # the next step may take as long
        for answer in answers:
            self._news.setdefault(answer.loop, []).extend(answer.note(now))
            due = due or answer.due(late)
        if not due:  # nor has one ended
            self._stirred.update(ref(answer) for answer in answers if answer.untold)
            return
        late += interval / 2  # whose turn comes soon is told along, and from then on: a wake-up serves all
        readers: dict[asyncio.AbstractEventLoop, list[Answer]] = defaultdict(list)
        for answer in answers:
            if answer.due(late):
                answer.show(now)
                readers[answer.loop].append(answer)
        for loop, own in readers.items():
            try:
                loop.call_soon_threadsafe(self._deliver, own, self._news.pop(loop))
            except RuntimeError:  # the loop is closed, and with it all that read there
                for answer in own:
                    answer.close()
        for answer in answers:
            if answer.ended:
                self._forget(answer)
            elif answer.untold:
                self._stirred.add(ref(answer))

    def _deliver(self, answers: list[Answer], news: list[Progress]) -> None:
        for answer in answers:
            answer.wake.set()
        if self.watch is not None:
            self.watch(news)

    def _forget(self, answer: Answer) -> None:
        with self._changed:
            self._answers.discard(answer)
            self._changed.notify_all()

    # --- its state ----------------------------------------------------------------------------------------------------

    @property
    def _busy(self) -> bool:
        """Whether some request has yet to end; asked with the lock."""
        return any(answer.requests for answer in self._answers)

    @property
    def stalled(self) -> float:
        """Seconds since the engine's loop came round, if it has work; else 0."""
        with self._changed:
            return time.monotonic() - self._turned if self._busy else 0.0

    def close(self, drain: float = 0.0) -> None:
        """Take no more requests, let those there are go on for `drain` seconds, then end the others: EngineError."""
        with self._changed:
            self.closed = True
            self._changed.wait_for(lambda: not self._answers, drain)
            rest, thread = list(self._answers), self._thread
            self._changed.notify_all()
        for answer in rest:
            answer.fail(EngineError("the engine was closed before the answer was complete"))
        if thread is not None and thread is not threading.current_thread() and not self.lost:
            thread.join(LAST_STEP)
        self._lanes.close()

    def lose(self, what: str) -> None:
        """End all requests without waiting for the engine, which will not come back: EngineError, that says `what`."""
        with self._changed:
            self.closed = self.lost = True
            rest, self._answers = list(self._answers), set()
            self._changed.notify_all()
        for answer in rest:
            answer.fail(EngineError(what))

    async def aclose(self, drain: float = 0.0) -> None:
        """`close`, while the event loop goes on."""
        await self.off_loop(lambda: self.close(drain))


class Lanes:
    """Threads for what would hold an event loop up. What may take seconds has a lane, where it waits for its like."""

    THREADS: ClassVar[dict[str, int]] = {"text": 1, "template": 2, "grammar": 2, "answer": 1}

    def __init__(self) -> None:
        # a loop's own, since in a forked process the threads of its parent's are not there
        self._executors = WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Executor]]()

    async def run(self, work: Callable[[], Any], lane: str = "") -> Any:
        """What `work()` gives. Raises EngineError in a lane that is closed."""
        loop = asyncio.get_running_loop()
        known, executor = self._executors.setdefault(loop, {}), None
        if lane:
            executor = known.get(lane) or known.setdefault(lane, ThreadPoolExecutor(self.THREADS[lane]))
        try:
            done = loop.run_in_executor(executor, work)
        except RuntimeError as error:
            raise _untaken(error) from None
        return await done

    def close(self) -> None:
        """Let the threads of lanes end, once what they were given is done."""
        for known in list(self._executors.values()):
            for executor in known.values():
                executor.shutdown(wait=False)


def _untaken(error: RuntimeError) -> EngineError:
    """For a thread that cannot be had: at the end, or where the system starts no more of them."""
    return EngineError(CLOSED if "shutdown" in str(error) else f"no request can be taken now: {error}")


def _is_long(prompt: Any) -> bool:
    """Whether to tokenize a text, or the messages of a conversation, may take long."""
    if isinstance(prompt, str):
        return len(prompt) > LONG
    if not is_list(prompt) or not prompt or not isinstance(prompt[0], Mapping):
        return False
    return sum(len(str(part.get("content"))) for part in prompt if isinstance(part, Mapping)) > LONG


def left(deadline: Any, began: float) -> Any:
    """What is left of seconds from `began` (time.perf_counter()) on, next to nothing if none is; else as it is."""
    return max(0.001, deadline - (time.perf_counter() - began)) if real(deadline, 0, math.inf) else deadline


class Answer:
    """The outputs of one call. Belongs to the event loop in which it was started."""

    def __init__(self, llm: AsyncLLM, loop: asyncio.AbstractEventLoop) -> None:
        self._llm, self.loop = llm, loop
        self.requests: list[Request] = []
        self.weight = 0  # outputs
        self.wake = asyncio.Event()
        self.failure: Exception | None = None
        self._closed = False
        self._noted: list[tuple[int, bool]] = []  # per request, the state after the last step, ...
        self._shown: list[tuple[int, bool]] = []  # ... and the one that was handed over last
        self._shown_at = -math.inf

    def take(self, requests: list[Request]) -> None:
        """The requests are there, in a thread; the answer may have been closed meanwhile."""
        self._noted, self._shown = ([(0, False)] * len(requests) for _ in range(2))
        self.requests = requests
        for request in requests:
            request.tell = partial(self._llm._stirred.add, ref(self))
        self._llm._stirred.add(ref(self))  # they may have begun
        if self._closed:
            self.close()

    def note(self, now: float) -> list[Progress]:
        """What has come since this was last asked."""
        found, noted = [], self._noted
        for i, request in enumerate(self.requests):
            known = noted[i]
            noted[i] = state = request.readable(known[0])
            if state != known:
                found.append(Progress(request, state[0] - known[0], state[1], now))
        return found

    @property
    def ended(self) -> bool:
        """Whether all ends were noted. Another thread may step: what has ended since was not handed over yet."""
        return all(finished for _, finished in self._noted)

    @property
    def untold(self) -> bool:
        """Whether something was noted that was not shown."""
        return self._noted != self._shown

    def due(self, before: float) -> bool:
        """Whether there are news that cannot wait: ends, first tokens, or the last ones were shown `before`."""
        for now, then in zip(self._noted, self._shown, strict=True):
            if now != then and (self._shown_at <= before or now[1] or not then[0]):
                return True
        return False

    def show(self, now: float) -> None:
        """Let the reader have what was noted."""
        self._shown_at, self._shown[:] = now, self._noted

    async def events(self) -> AsyncGenerator[StepEvent, None]:
        """What comes, to the end of all outputs, or to an error. Closes the answer when it is left, however."""
        llm, outputs = self._llm.llm, range(len(self.requests))
        texts = [TextStream(llm.tokenizer, r.seq.params, r.seq.tokens[: r.seq.prompt_len]) for r in self.requests]
        read, alive = [0 for _ in outputs], set(outputs)
        try:
            while alive:
                await self.wake.wait()
                self.wake.clear()
                failure: Exception | None = None
                for i in sorted(alive):
                    request = self.requests[i]
                    (ready, finished), begin, offset = self._shown[i], read[i], request.seq.prompt_len
                    failure = failure or self.failure  # after what was shown: an abort may be its doing
                    if finished and (request.error or (failure and request.seq.finish_reason == "abort")):
                        failure, finished = failure or request.error, False  # its last tokens come before that
                    if ready == begin and not finished:
                        continue
                    read[i] = ready
                    tokens = request.seq.tokens[offset + begin : offset + ready]
                    spoken = request.spoken if finished else ready
                    pieces = []
                    for at, token in enumerate(tokens, begin):
                        texts[i].feed([token] if at < spoken else [], final=finished and at == ready - 1)
                        pieces.append(texts[i].take(final=finished and at == ready - 1))
                    if finished and not tokens:
                        texts[i].feed([], final=True)
                    output = llm.engine.output(request, texts[i]) if finished else None
                    if output is not None:
                        output.index = i
                        alive.discard(i)
                    yield StepEvent(
                        i,
                        tokens,
                        pieces,
                        request.drafted_by[begin:ready],
                        request.logprobs[begin:ready] if request.seq.params.logprobs is not None else None,
                        output.finish_reason if output else None,
                        output,
                        texts[i].take(final=True) if finished else "",
                    )
                if failure and alive:
                    raise failure
        finally:
            self.close()

    def fail(self, error: Exception) -> None:
        """End it with an error, from any thread."""
        self.failure = self.failure or error
        with suppress(RuntimeError):  # its loop is closed
            self.loop.call_soon_threadsafe(self.wake.set)
        self.close()

    def close(self) -> None:
        """Stop what still runs, at the next step; from any thread. Closing twice does nothing."""
        self._closed = True
        for request in self.requests:
            self._llm.llm.engine.abort(request)
        if self.ended:  # else the engine's thread forgets it, once it has told of the end
            self._llm._forget(self)
