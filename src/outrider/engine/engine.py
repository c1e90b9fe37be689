"""Requests in, tokens out: admits what fits, steps all running sequences together, takes each away as it ends."""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch

from outrider.config import EngineConfig, Rule, SamplingParams, drawn_seed, promised, real, whole
from outrider.constraint import Constraint, read
from outrider.draft import Verdict
from outrider.engine.guard import Guard
from outrider.engine.scheduler import Pace, shares
from outrider.engine.text import TextStream, spelt, tokens_of
from outrider.engine.turn import Turn
from outrider.errors import (
    ConfigError,
    DeadlineExceeded,
    DrafterError,
    EmptyPrompt,
    PoolFull,
    RequestError,
    RequestTooLong,
    brief,
    ends_one,
    interrupts_wait,
    typed,
)
from outrider.kv import PagedKV
from outrider.kv.blocks import BLOCK
from outrider.ops import native, untouched
from outrider.outputs import GenerationOutput, Logprob, Timing
from outrider.runner import Runner
from outrider.sequence import Banned, Sequence
from outrider.speculate import Drafter, StepTimes, step
from outrider.verify import COUPLED

TOGETHER = 2 * BLOCK  # tokens that are worth waiting for, while another request reads them
SEAM = 32  # tokens of a prompt by which the beginning of what is expected behind it is found
GRAMMAR = "grammar"  # who drafted what a request's structured_outputs force

# By their place in a prompt, and by what tells them from others, the blocks that are about to be read: how urgently.
Reading = defaultdict[int, dict[Hashable, tuple[int, float]]]


@dataclass(eq=False)
class Request:
    """One sequence on its way through the engine, and what is known of it so far.

    A step may be under way in another thread: of `seq`'s output, the first `ready` tokens may be read.
    """

    seq: Sequence
    method: str = "none"
    index: int = 0
    ready: int = 0
    priority: int = 0  # the lower is first
    due: float = math.inf  # time.perf_counter() by which it must have ended; of one priority, the earlier is first
    number: int = field(default_factory=itertools.count().__next__)  # in the order of their arrival
    cached: int = 0  # prompt tokens that another request had read
    first: Request | None = None  # of the n outputs of a prompt: the others wait until it has read that
    marks: list[int] = field(default_factory=list)  # by which its first blocks are known
    drafter_error: str | None = None  # what the drafter was switched off by, if it was before the end
    finished: bool = False  # no more tokens will come, and what it held is given back
    drafted_by: list[str | None] = field(default_factory=list)  # per output token
    logprobs: list[Logprob] = field(default_factory=list)
    expected: list[int] = field(default_factory=list)  # a text that its own may resemble, until the drafter has it
    scores: dict[int, Logprob] | None = None  # of the prompt's tokens, by place, if asked for; n outputs share them
    timing: Timing = field(default_factory=Timing)
    tell: Callable[[], object] | None = None  # called, in whatever thread steps, behind each of its steps and its end

    @property
    def error(self) -> Exception | None:
        """What ended it, if it failed."""
        return self.seq.error if self.finished else None

    @property
    def prompt_logprobs(self) -> list[Logprob | None] | None:
        """Of each token of the prompt, if asked for; None where there is none, or not yet."""
        return None if self.scores is None else [self.scores.get(at) for at in range(self.seq.prompt_len)]

    def readable(self, before: int) -> tuple[int, bool]:
        """How many tokens may be read, of which `before` could already, and whether they are all.

        A step may be under way. What ends a sequence is noted before its last tokens are shown, and `finished` comes
        after: between the two nobody could tell that these are the last, nor that the very last has no text.
        """
        finished, ready = self.finished, self.ready
        return (before, False) if not finished and self.seq.finish_reason is not None else (ready, finished)

    @property
    def spoken(self) -> int:
        """How many of the ready tokens have a text: the one that ends a sequence has none, unless it is asked for."""
        seq = self.seq
        ended = self.finished and seq.finish_reason == "stop" and seq.tokens[-1] in seq.eos
        return self.ready - (ended and not seq.params.include_stop_str_in_output)


class Engine:
    """Runs requests on one target runner with one drafter.

    Any thread may call anything here. One thread steps at a time, for all: callers whose requests run at once share its
    forwards, and each has its tokens as soon as they are there. What goes wrong with one request ends that one
    (`finish_reason` "error") and no other; what goes wrong in the drafter ends the drafting.
    """

    def __init__(
        self,
        runner: Runner,
        drafter: Drafter,
        k: int,
        config: EngineConfig,
        tokenizer: Any = None,
        exactness: str = "law",
        rule: Rule = COUPLED,
    ) -> None:
        self.runner, self.config, self.tokenizer, self.exactness = runner, config, tokenizer, exactness
        self.waiting: list[Request] = []  # by priority, then by deadline, then in the order of their arrival
        self.running: list[Request] = []  # the same; those that read their prompt, too
        self.pace = Pace(config.max_prefill_delay)
        self._next_due = math.inf  # when the first of them must have ended
        self._read = 0  # tokens of prompts, since there were none left to read
        self.max_len = config.max_model_len or runner.max_len
        if self.max_len > runner.max_len:
            raise ConfigError(f"max_model_len {self.max_len} is over the model's context of {runner.max_len}; lower it")
        self.kv_memory = config.kv_memory or int(0.9 * free_memory(runner.model.device))
        if not isinstance(runner.kv, PagedKV):
            raise ConfigError(f"an engine needs a runner with a paged cache, not {type(runner.kv).__name__}")
        self.kv, self._device = runner.kv, runner.model.device
        self._block_bytes = self.kv.nbytes(BLOCK)
        self.preemptions = 0  # so far; and tokens of prompts, and those of them that others had read
        self.prefix_queries = self.prefix_hits = 0
        self._turn = Turn()
        self._refused = -1, 0  # who was first and had no room, by number, and how many blocks there were to spare
        self._spelt: tuple[tuple[str, ...], Banned] = (), ()  # the last bad_words, and their tokens
        self._doomed: deque[Request] = deque()  # aborted; taken away between two steps
        self._failures = 0  # requests that have ended with an error
        self._queue = threading.Lock()  # held while the list of who waits changes
        self.draft_with(drafter, k, rule)

    def draft_with(self, drafter: Drafter, k: int, rule: Rule = COUPLED) -> None:
        """Use another drafter, attached to the runner; at most k nodes a step for each sequence.

        Raises ConfigError if no request at all would fit into the memory with it; then the one that was there stays.
        """
        guard = Guard(drafter)
        if (least := self.kv.nbytes(1) + guard.kv_bytes(1)) > self.kv_memory:
            raise ConfigError(
                f"kv_memory is {self.kv_memory} bytes, and {BLOCK} tokens' keys and values take {least}, the drafter's "
                "included; raise it"
            )
        self.drafter, self.guard, self.k, self.rule = drafter, guard, k, rule

    @contextmanager
    def idle(self) -> Iterator[None]:
        """The engine to oneself, where no request runs or starts. Raises ConfigError if there are any."""
        self._turn.refuse_nested()
        try:
            self._turn.take()
            self._sweep()
            if self.running or self.waiting:
                raise ConfigError(
                    f"{len(self.running) + len(self.waiting)} requests are running; change how drafts are made when "
                    "they have ended, and close streams that are not read to their end"
                )
            yield
        finally:
            self._turn.give()
            self._bury()

    def add(
        self,
        prompt: list[int],
        params: SamplingParams,
        ends: Callable[[list[int]], bool] | None = None,
        *,
        k: int | None = None,
        priority: int = 0,
        deadline: float | None = None,
        cache_salt: str | None = None,
        begun: list[list[int]] | None = None,
    ) -> list[Request]:
        """Queue a prompt; one request for each of the n outputs asked for.

        `ends(tokens)`, in place of stop strings, is asked behind each new token whether the sequence ends there. `k`
        bounds its drafts: nodes per step that can be accepted, 0 for plain decoding, None for the engine's own number.
        Of those that wait, the lower `priority` is first, and of one priority the earlier `deadline`: seconds from now,
        at which a request that has not ended fails with DeadlineExceeded. Only requests of one `cache_salt` share
        prefixes. `begun`, for each output the tokens it is known to begin with, are read instead of written (not where
        logprobs are asked for): another engine has written them.

        Raises EmptyPrompt, RequestError for impossible token ids, and RequestTooLong, before anything runs, if the
        context or the memory cannot hold prompt and output; ConfigError if another engine runs requests on this cache;
        EngineError in a process that was forked while another thread was in a step.
        """
        self._turn.refuse_lost()
        self._check(prompt, params)
        if k is not None and whole(k, 0) is None:
            raise ConfigError(f"k must be a whole number of draft nodes, at least 0, or None, not {brief(k)}")
        if whole(priority, -(2**62)) is None:
            raise ConfigError(
                f"priority must be a whole number within 2**62 of 0 (lower is first), not {brief(priority)}"
            )
        if deadline is not None and not real(deadline, 0, math.inf):
            raise ConfigError(f"deadline must be a number of seconds above 0, or None, not {brief(deadline)}")
        due = math.inf if deadline is None else time.perf_counter() + deadline
        if not (cache_salt is None or isinstance(cache_salt, str)):
            raise ConfigError(f"cache_salt must be a string or None, not {brief(cache_salt)}")
        asked, config = params.structured_outputs, self.runner.model.config
        grammar = None if asked is None else read(asked, self.tokenizer, config.vocab_size)
        banned = self._banned(tuple(params.bad_words)) if params.bad_words else ()
        text = "" if k == 0 or self.guard.idle else params.prediction
        expected = tokens_of(text, self.tokenizer) if text else []
        scores: dict[int, Logprob] | None = None if params.prompt_logprobs is None else {}
        seed = drawn_seed() if params.seed is None else params.seed
        if begun is not None:
            self._check_begun(begun, params)
        requests: list[Request] = []
        for i in range(params.n):
            seq = Sequence(prompt, params, (seed + i) % 2**64, eos=config.eos, max_len=self.max_len)
            seq.constraint = Constraint(grammar, seq.eos, not seq.eos & set(config.eos)) if grammar else None
            seq.stop_check, seq.k, seq.cache_salt = self._stop_check(seq, ends), k, cache_salt
            seq.banned = banned
            first = requests[0] if requests else None
            requests.append(Request(seq, index=i, priority=priority, due=due, first=first, scores=scores))
            self._name(requests[-1])
            if begun is not None and params.logprobs is None and params.prompt_logprobs is None:
                seq.tokens += begun[i][: next((at for at, token in enumerate(begun[i]) if token in seq.eos), None)]
                requests[-1].drafted_by += [None] * (len(seq.tokens) - len(prompt))
        if expected:
            requests[0].expected = prompt[-SEAM:] + expected
        with _claiming, self._queue:
            self._claim()
            self._next_due = min(self._next_due, due)
            for request in requests:
                if scores is not None:
                    self.runner.scores[request.seq.id] = scores
                insort(self.waiting, request, key=_rank)
        if self._doomed:
            self._bury()
        return requests

    def _banned(self, words: tuple[str, ...]) -> Banned:
        """The tokens of `bad_words`; of the last ones they are kept, since many requests have the same."""
        known, banned = self._spelt
        if words != known:
            last: dict[tuple[int, ...], list[int]] = defaultdict(list)
            for ids in spelt(words, self.tokenizer):
                if max(ids) < self.runner.model.config.vocab_size:
                    last[tuple(ids[:-1])].append(ids[-1])
            banned = tuple([(before, tuple(tokens)) for before, tokens in last.items()])
            self._spelt = words, banned
        return banned

    def _name(self, request: Request) -> None:
        """Note what will draft for a request, and how much at most."""
        k, own = self.k, request.seq.k
        request.method = "none" if own == 0 else self.drafter.name
        request.seq.metrics.num_spec_tokens = k if own is None else min(k, own)

    def _claim(self) -> None:
        """Become the cache's engine: two that both count on all of its memory cannot run at once."""
        owner = _owners.get(key := id(self.runner.kv))
        if owner is not self:
            if owner is not None and (owner.running or owner.waiting):
                raise ConfigError("another engine runs requests on this cache; let them end, or use that engine")
            _owners[key] = self

    def _stop_check(self, seq: Sequence, ends: Callable[[list[int]], bool] | None) -> Callable[[], bool] | None:
        if ends is not None:
            return lambda: ends(seq.tokens)
        if not seq.params.stops:
            return None
        text = TextStream(self.tokenizer, seq.params, seq.tokens)
        return lambda: text.feed(seq.tokens[seq.prompt_len + text.count :])

    def _check(self, prompt: list[int], params: SamplingParams) -> None:
        vocab, need = self.runner.model.config.vocab_size, len(prompt) + params.max_tokens
        if not prompt:
            raise EmptyPrompt("the prompt is empty; give at least one token")
        if bad := [t for t in prompt if isinstance(t, bool) or not isinstance(t, int) or not 0 <= t < vocab]:
            raise RequestError(f"prompt token {brief(bad[0])} is not a token id below {vocab}")
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            if bad := [t for t in getattr(params, name) or () if t >= vocab]:
                raise ConfigError(f"{name}: {brief(bad[0])} is not a token id below {vocab}")
        if params.stops and self.tokenizer is None:
            raise ConfigError("stop strings need a tokenizer, and this model has none; use stop_token_ids")
        if params.bad_words and self.tokenizer is None:
            raise ConfigError("bad_words need a tokenizer, and this model has none; use logit_bias")
        if params.prediction and self.tokenizer is None:
            raise ConfigError("a prediction needs a tokenizer, and this model has none; leave it out")
        if need > self.max_len:
            rest = self.max_len - len(prompt)
            cure = f"lower max_tokens to {rest} or shorten the prompt" if rest > 0 else "shorten the prompt"
            raise RequestTooLong(
                f"the prompt has {len(prompt)} tokens and max_tokens asks for {params.max_tokens} more: "
                f"together {need}, over the context of {self.max_len}; {cure}"
            )
        if error := self._too_large(need):
            raise error

    def _too_large(self, tokens: int) -> RequestTooLong | None:
        """What is wrong with a request of so many tokens, if the memory cannot hold it beside the drafter's."""
        if (size := self._kv_bytes(tokens)) <= self.kv_memory:
            return None
        return RequestTooLong(
            f"{tokens} tokens of prompt and output need {size / 2**10:,.0f} KiB for keys and values, the drafter's "
            f"included, over the {self.kv_memory / 2**10:,.0f} KiB there are; lower max_tokens, shorten the prompt "
            "or raise kv_memory"
        )

    def _check_begun(self, begun: list[list[int]], params: SamplingParams) -> None:
        vocab = self.runner.model.config.vocab_size
        if len(begun) != params.n or any(len(own) >= params.max_tokens for own in begun):
            raise RequestError(f"begun holds {params.n} lists of less than {params.max_tokens} tokens, one an output")
        if bad := [t for own in begun for t in own if type(t) is not int or not 0 <= t < vocab]:
            raise RequestError(f"begun token {brief(bad[0])} is not a token id below {vocab}")

    @property
    def longest(self) -> int:
        """The most tokens of prompt and output of a request: those of the context, if there is memory for them."""
        if self._kv_bytes(self.max_len) <= self.kv_memory:
            return self.max_len
        return bisect_right(range(self.max_len), self.kv_memory, key=self._kv_bytes) - 1

    def _kv_bytes(self, tokens: int) -> int:
        return self.kv.nbytes(tokens) + self.guard.kv_bytes(tokens)

    def _admit(self) -> None:
        """Let those in, in their order, whose tokens so far there is room for, and for everybody to grow a little.

        Who waits for what another is reading, the same prompt or as long a beginning of it, keeps its place and room.
        """
        places = free = self.config.max_num_seqs - len(self.running)
        needed, reading = sum(self._lacks(r) for r in self.running), Reading(dict)
        spare = self.kv.room - needed - 2 * len(self.running)
        refused, then = self._refused  # to look what is there of its tokens takes as long as it has some
        if self.running and self.waiting[0].number == refused and spare <= then:
            return
        for request in self.running:
            self._note(request, reading)
        for request in filter(_ready, self.waiting.copy()):
            if not places:
                break
            if self._follows(request, reading):
                needed += self._lacks(request)
                places -= 1
                continue
            if not request.timing.queued and (error := self._too_large(request.seq.max_len)):
                self._fail(request, error)  # the drafter has changed since it was added
                continue
            first = request.first.seq if request.first else None
            found = self.runner.begin(request.seq, first)
            self._bound([*self.running, request])
            needed += self._lacks(request)
            if self.running and self.kv.room < needed + 2 * len(self.running):
                self.runner.free(request.seq)
                if places == free:  # nobody before it follows another, or was let in
                    self._refused = request.number, spare
                break
            if request.expected:
                self.guard.remember(request.expected)
                request.expected = []
            with self._queue:
                self.waiting.remove(request)
                insort(self.running, request, key=_rank)
            places -= 1
            self._note(request, reading)
            timing = request.timing
            if not timing.queued:  # else it was preempted, and what is found may be its own
                self._name(request)
                timing.queued = time.perf_counter() - timing.started
                request.cached = min(found, request.seq.prompt_len)
                self.prefix_queries += request.seq.prompt_len
                self.prefix_hits += request.cached

    def _note(self, request: Request, reading: Reading) -> None:
        """Let others find what a running request has read of its prompt, and wait for the block that comes next."""
        root, blocks = self.runner.may_find(request.seq), request.seq.prompt_len // BLOCK
        if root is not None and self._published(request) < blocks:
            self.runner.publish(request.seq)
            if (at := max(self._published(request), TOGETHER // BLOCK - 1)) < blocks:
                block, urgency = (root, _mark(request, at)), _urgency(request)
                reading[at][block] = min(urgency, reading[at].get(block, urgency))

    def _follows(self, request: Request, reading: Reading) -> bool:
        """Whether one that is as urgent is about to read a block of this one's, which it will find then."""
        root, blocks = self.runner.may_find(request.seq), (len(request.seq.tokens) - 1) // BLOCK
        return any(
            (urgency := known.get((root, _mark(request, at)))) is not None and urgency <= _urgency(request)
            for at, known in reading.items()
            if at < blocks
        )

    def _published(self, request: Request) -> int:
        """How many of a request's blocks others can find."""
        held = self.kv.tables.get(request.seq.id)
        return held.published if held else 0

    def _lacks(self, request: Request) -> int:
        """Blocks that a request still needs for its tokens so far and one more."""
        held, tokens = self.kv.tables.get(request.seq.id), len(request.seq.tokens) + 1
        return max(0, -(-tokens // BLOCK) - (len(held.blocks) if held else 0))

    def _bound(self, requests: list[Request]) -> None:
        """Let the cache have what the drafter's do not take of the memory."""
        told_of = [] if self.guard.idle else [r.seq for r in requests if r.seq.k != 0]
        drafts = sum([self.guard.kv_bytes(len(seq.tokens)) for seq in told_of])
        self.kv.most = max(0, self.kv_memory - drafts) // self._block_bytes

    def _preempt(self, request: Request) -> None:
        """Take what a request holds; it waits, and then reads its tokens again, which brings the same bits."""
        with self._queue:
            self.running.remove(request)
            insort(self.waiting, request, key=_rank)
        self.runner.free(request.seq)
        self._forget(request)
        self.preemptions += 1

    def _forget(self, request: Request) -> None:
        """Let the drafter forget a sequence, if it has been shown it; it hears no more of it, or begins anew."""
        seq = request.seq
        if seq.mirror is not None:
            shown, seq.mirror = seq.shown(self.rule), None
            self.guard.forget(shown)

    @property
    def kv_usage(self) -> float:
        """The share of the memory for keys and values that running requests hold."""
        return self.kv.pool.used * self._block_bytes / self.kv_memory

    @property
    def leaked(self) -> int:
        """Blocks of the cache that are neither free nor cached though nothing runs: 0, or something is broken."""
        return 0 if self.running else self.kv.pool.used

    @property
    def turns(self) -> int:
        """How many have ended, of whatever thread: where it is as it was, nobody has stepped meanwhile."""
        return self._turn.given

    # --- stepping -----------------------------------------------------------------------------------------------------

    def step(self) -> list[tuple[Request, list[int]]]:
        """One forward for all running requests; returns those that have new tokens, with these.

        While another thread steps, waits for that. Nothing to do: an empty list. Raises RequestError if called by what
        a step calls, EngineError in a fork of the engine's process.
        """
        with untouched(self._device), torch.inference_mode(), interrupts_wait() as late:
            return self.step_within(lambda: bool(late))

    def step_within(self, unless: Callable[[], bool] = lambda: False) -> list[tuple[Request, list[int]]]:
        """As `step`, for who has entered its blocks once for many steps; interrupts wait in the main thread alone.

        If `unless()` holds once no other thread steps, does nothing.
        """
        self._turn.refuse_nested()
        try:
            return self._advance() if self._turn.take(unless) else []
        finally:
            self._turn.give()
            if self._doomed:
                self._bury()

    def drive(self, done: Callable[[], bool]) -> None:
        """Step until `done()`, by turns with other threads that do. Raises what `step` raises."""
        # entered once: it costs as much as a tenth of what a step does around its forward
        with untouched(self._device), torch.inference_mode():
            while not done():
                with interrupts_wait() as late:  # entered for each step it would cost some 12 microseconds
                    while not (done() or late):
                        self.step_within(lambda: done() or bool(late))

    def run(self) -> Iterator[tuple[Request, list[int]]]:
        """Step until nothing is left. Raises what `step` raises."""
        while self.waiting or self.running:
            yield from self.step()

    def finish(self, requests: list[Request]) -> None:
        """Step until these requests have ended. Raises the error of one that failed, as soon as it has.

        Then, or if it is interrupted, the others of them are aborted.
        """
        left, failures = requests.copy(), -1

        def done() -> bool:
            nonlocal failures
            while left and left[-1].finished:
                left.pop()
            if failures != (now := self._failures):  # asked at each step: looks at all of them only where one may have
                if any(r.error for r in requests):
                    return True
                failures = now
            return not left

        try:
            self.drive(done)
            for request in requests:
                if request.error:
                    raise request.error
        finally:
            for request in requests:
                self.abort(request)

    def follow(self, request: Request) -> Iterator[list[int]]:
        """The output tokens of a request, in the blocks they come in, to the end; then its error is raised, if any."""
        seq, read, ready, finished = request.seq, 0, 0, False

        def news() -> bool:
            nonlocal ready, finished
            ready, finished = request.readable(ready)
            return finished or ready > read

        while not finished:
            self.drive(news)
            begin, read = read, ready
            yield seq.tokens[seq.prompt_len + begin : seq.prompt_len + read]
        if request.error:
            raise request.error

    def _advance(self) -> list[tuple[Request, list[int]]]:
        self._sweep()
        self._expire()
        if not self.running:
            self._read = 0
        if self.waiting and len(self.running) < self.config.max_num_seqs:
            self._admit()
        if not self.running:
            return []
        running, news = self.running, None
        try:
            while news is None and self.running:
                times, lacking = StepTimes(), {r: self.runner.pending(r.seq) for r in self.running}
                through, reading, k = self._plan(lacking)
                news = self._try(through, reading, k, times)
            if news is None:
                return []
            read = sum(reading.values()) + sum([lacking[r] for r in through]) - len(through)
            if times.rows or (not through and times.target):  # not a step that failed
                self.pace.learn(times.rows + read, read, times.target)
            now = time.perf_counter()
            for request, verdict in news:
                self._account(request, verdict, times, now)
            if read or self._read:  # last: what is called there may be interrupted
                self._report(sum(reading.values()) + sum([n for r in through if (n := lacking[r]) > 1]))
            return [(request, verdict.tokens) for request, verdict in news]
        finally:  # what a step calls may interrupt it; that is the caller's affair, the requests need not be
            for request in running:
                self._publish(request)
            self._sweep()

    def _try(
        self, through: list[Request], reading: dict[Request, int], k: int, times: StepTimes
    ) -> list[tuple[Request, Verdict]] | None:
        """One step, without drafts if there is no room for them; None if it has to be another one for want of room."""
        self._bound(self.running)
        if self.guard.failure:
            for request in self.running:  # nothing is to be kept for it any more
                request.seq.k = 0
        try:
            return self._forward(through, reading, k, times)
        except PoolFull:
            self.guard.quiet = True
            try:
                return self._forward(through, reading, 0, times)
            except PoolFull as error:
                last = self.running[-1]
                if len(self.running) > 1:
                    self._preempt(last)
                else:
                    self._fail(last, error)
                return None
            finally:
                self.guard.quiet = False

    def _plan(self, lacking: dict[Request, int]) -> tuple[list[Request], dict[Request, int], int]:
        """Which of the running requests get a new token, how much the others read of their prompts, and k."""
        prompts = {r: lacks for r, lacks in lacking.items() if lacks > 1}
        plain = len(lacking) - len(prompts)
        left = max(1, self.runner.chunk - plain)
        k = 0 if self.guard.failure else self.k
        if not prompts:
            if k * plain > left:
                k = min(k, left // max(1, _drafting(lacking)))
            return list(lacking), {}, k
        drafting = _drafting(r for r in lacking if r not in prompts)
        room = min(left, self.pace.beside(plain, len(prompts))) if plain else left
        if drafting and sum(prompts.values()) > room:  # some prompt has to wait: drafts shrink to a part of the room
            k = min(k, room // 4 // drafting)
            room -= k * drafting
        granted = dict(zip(prompts, shares([(_urgency(r), n) for r, n in prompts.items()], room), strict=True))
        through = [r for r in lacking if r not in granted or granted[r] == prompts[r]]
        reading = {r: n for r, n in granted.items() if 0 < n < prompts[r]}
        return through, reading, min(k, (left - sum(granted.values())) // max(1, _drafting(through)))

    def _report(self, read: int) -> None:
        """Tell who wants to know how much of the prompts is read, if it is more than one forward's."""
        left = sum(lacks for r in self.running if (lacks := self.runner.pending(r.seq)) > 1)
        done = self._read + read
        self._read = done if left else 0
        if done + left > self.runner.chunk:
            self.runner.report(done, done + left)

    def _forward(
        self, requests: list[Request], reading: dict[Request, int], k: int, times: StepTimes | None
    ) -> list[tuple[Request, Verdict]]:
        """One step for all of them; if that fails, one for each alone, and whose own fails ends with the error.

        By Laws 1 and 2 the others' tokens are the same in any company. Raises PoolFull if nothing has come of it.
        """
        everyone, seqs = [*requests, *reading], [r.seq for r in requests]
        lengths = [len(r.seq.tokens) for r in everyone]
        try:
            parts = [(r.seq, n) for r, n in reading.items()]
            verdicts = step(self.runner, self.guard, seqs, k, times, self.rule, parts)
        except PoolFull:
            raise
        except BaseException as error:
            if not ends_one(error):
                raise
            if isinstance(error, DrafterError) and self.guard.failure is None:  # before anything was read
                self.guard.switch_off(error)
                for request in requests:
                    self._forget(request)
                return self._forward(requests, reading, k, times)
            news, full = [], list[PoolFull]()
            for request, length in zip(everyone, lengths, strict=True):
                alone = ([], {request: reading[request]}) if request in reading else ([request], {})
                if len(everyone) == 1 or len(request.seq.tokens) != length:
                    self._fail(request, error)
                    continue
                try:
                    news += self._forward(*alone, k, None)
                except PoolFull as lacking:  # it waits for a step that has room
                    full.append(lacking)
            if len(full) == len(everyone):
                raise full[0] from None
            return news
        for request, verdict in zip(requests, verdicts, strict=True):
            if verdict.error:
                self._fail(request, verdict.error)
        return [(r, verdict) for r, verdict in zip(requests, verdicts, strict=True) if not verdict.error]

    def _account(self, request: Request, verdict: Verdict, times: StepTimes, now: float) -> None:
        accepted, t = len(verdict.path), request.timing
        request.seq.metrics.add(verdict.drafted, accepted, len(verdict.tokens))
        if accepted:
            request.drafted_by += [
                GRAMMAR if node in verdict.forced else verdict.by[node] if verdict.by else self.drafter.name
                for node in verdict.path
            ]
        request.drafted_by += [None] * (len(verdict.tokens) - accepted)
        request.logprobs += verdict.logprobs
        if t.first_token:  # the first step is prefill: reported as time to first token
            t.decode, t.draft, t.target = t.decode + times.total, t.draft + times.draft, t.target + times.target
        else:
            t.first_token, t.first_tokens = now - t.started, len(request.drafted_by)

    def _publish(self, request: Request) -> None:
        """Show what a step has brought, and take the request away if it has ended."""
        if request.finished:
            return
        seq = request.seq
        ready = len(seq.tokens) - seq.prompt_len
        if unaccounted := ready - len(request.drafted_by):  # the step was interrupted behind these
            request.drafted_by += [None] * unaccounted
            if seq.params.logprobs is not None:
                request.logprobs += [Logprob(token, math.nan) for token in seq.tokens[-unaccounted:]]
            if not seq.finish_reason:
                seq.look_for_end()
        request.ready = ready
        if seq.finish_reason:
            self._end(request, seq.finish_reason)
        elif request.tell:
            request.tell()

    # --- endings ------------------------------------------------------------------------------------------------------

    def abort(self, request: Request) -> None:
        """Stop a request and give its memory back, at once or when the step under way has ended.

        What it has stays readable. Never waits, so destructors may call it; a request that has ended is left as it is.
        """
        if not request.finished:
            self._doomed.append(request)
            self._bury()

    @interrupts_wait()
    def _bury(self) -> None:
        """Take away what is aborted, unless a thread has the turn: that one looks again when it has given it back.

        Nor while somebody is queued, perhaps by this very thread, into which a destructor has come: then `add` looks.
        """
        while self._doomed and not self._queue.locked() and self._turn.take_at_once():
            try:
                self._sweep()
            finally:
                self._turn.give()

    def _sweep(self) -> None:
        while self._doomed:
            if not (request := self._doomed.popleft()).finished:
                self._end(request, "abort")

    def _expire(self) -> None:
        """End what was to have ended by now."""
        now = time.perf_counter()
        if now < self._next_due:
            return
        for request in [r for r in (*self.waiting, *self.running) if r.due <= now]:
            self._fail(request, DeadlineExceeded("the request has not ended within its deadline"))
        with self._queue:  # what is added in the meantime comes after
            self._next_due = min([r.due for r in (*self.waiting, *self.running)], default=math.inf)

    def _fail(self, request: Request, error: BaseException) -> None:
        request.seq.fail(typed(error))
        self._publish(request)

    def _end(self, request: Request, reason: str) -> None:
        request.seq.finish_reason, request.drafter_error = reason, self.guard.failure
        request.timing.total = time.perf_counter() - request.timing.started
        if request in self.running:
            self.running = [r for r in self.running if r is not request]
        else:
            with self._queue:
                at = bisect_left(self.waiting, _rank(request), key=_rank)  # not one by one: thousands may end together
                if self.waiting[at : at + 1] == [request]:
                    del self.waiting[at]
        try:
            self.runner.free(request.seq)
            self._forget(request)
        finally:
            request.seq.memory.clear()
            request.seq.stop_check = request.seq.constraint = None
            self.runner.scores.pop(request.seq.id, None)
            request.finished = True
            self._failures += request.error is not None
            if request.tell:
                request.tell()

    # --- results ------------------------------------------------------------------------------------------------------

    def output(self, request: Request, text: TextStream | None = None) -> GenerationOutput:
        """A request's result so far; it may go on. `text`: what it is decoded by, if someone has done so already."""
        seq, ready, rule = request.seq, request.ready, self.rule.method
        tokens = seq.tokens[seq.prompt_len : seq.prompt_len + ready]
        if text is None:
            text = TextStream(self.tokenizer, seq.params, seq.tokens[: seq.prompt_len])
            text.feed(tokens[: request.spoken], final=request.finished)
        last = tokens[-1] if tokens and request.finished and seq.finish_reason == "stop" else None
        exactness = promised(rule, "law" if seq.branched else self.exactness)
        return GenerationOutput(
            text=text.text,
            token_ids=tokens,
            finish_reason=seq.finish_reason if seq.finish_reason and request.finished else "running",
            seed=seq.seed,
            prompt_token_ids=seq.tokens[: seq.prompt_len],
            drafted_by=request.drafted_by[:ready],
            metrics={
                "method": request.method,
                "drafter_error": request.drafter_error,
                "acceptance_method": rule,
                "exactness": exactness,
                "lossless": exactness != "lossy",
                "speculative_decoding": seq.metrics.as_dict(),
                "timing": request.timing.as_dict(ready),
            },
            logprobs=request.logprobs[:ready] if seq.params.logprobs is not None else None,
            prompt_logprobs=request.prompt_logprobs,
            index=request.index,
            stop_reason=last if last in (seq.params.stop_token_ids or ()) else text.stop_reason,
        )


def _drafting(requests: Iterable[Request]) -> int:
    """How many have drafts at all."""
    return sum([request.seq.k != 0 for request in requests])


def _urgency(request: Request) -> tuple[int, float]:
    return request.priority, request.due


def _rank(request: Request) -> tuple[int, float, int]:
    return *_urgency(request), request.number


def _mark(request: Request, at: int) -> int:
    """By which a request's whole blocks up to this one are told from others', without comparing them."""
    for begin in range(len(request.marks) * BLOCK, (at + 1) * BLOCK, BLOCK):
        request.marks.append(hash((*request.marks[-1:], *request.seq.tokens[begin : begin + BLOCK])))
    return request.marks[at]


def _ready(request: Request) -> bool:
    """Whether nobody else is about to read the same prompt."""
    first = request.first
    return first is None or first.finished or bool(first.timing.first_token)


_owners: WeakValueDictionary[int, Engine] = WeakValueDictionary()  # by id of the cache, which outlives its engine
_claiming = threading.Lock()  # held while a cache changes its engine


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on a device: CUDA's own count, or what its machine and control groups leave."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(0, int(min(free, native.share_of_memory())))
