"""A sequence's tokens are the truth; everything else catches up with them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from copy import copy
from typing import Any, NoReturn

from outrider.config import Rule, SamplingParams
from outrider.constraint import Constraint
from outrider.errors import ends_one, typed
from outrider.outputs import SpecMetrics

_ids = itertools.count()
Banned = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
"""`bad_words`, as tokens: behind these none of those may follow."""


def _refuse(*_: Any) -> NoReturn:
    raise TypeError("a drafter cannot change a sequence; it may extend a fork() of one")


class Tokens(list[int]):
    """Token ids that may only be read."""

    append = extend = insert = pop = remove = clear = sort = reverse = _refuse  # type: ignore[assignment]
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse


class Sequence:
    """A sequence's tokens are the truth; caches catch up with them. Tokens are appended and never rewritten.

    `fork()` gives a hypothetical copy that a drafter may extend; caches know both by the same `id`.
    """

    def __init__(
        self,
        tokens: Iterable[int],
        params: SamplingParams,
        seed: int,
        *,
        eos: Iterable[int] = (),
        max_len: int | None = None,
    ) -> None:
        self.id = next(_ids)
        self.tokens = list(tokens)
        self.prompt_len = len(self.tokens)
        self.params = params
        self._edits, self._greedy = params.edits, params.greedy  # asked at each step
        self.seed = seed
        stops = frozenset(params.stop_token_ids or ())
        self.barred = stops | frozenset(eos)  # not to be written among the first min_tokens
        self.eos = stops if params.ignore_eos else self.barred  # what ends it
        self.max_len = min(self.prompt_len + params.max_tokens, max_len or 2**62)
        self.finish_reason: str | None = None
        self.error: Exception | None = None  # what ended it, if its finish_reason is "error"
        self.stop_check: Callable[[], bool] | None = None  # asked behind each appended token; True = it ends here
        self.constraint: Constraint | None = None  # what the output must be; forks ask the same one
        self.banned: Banned = ()
        self.parent: Sequence | None = None
        self.branched = False  # whether a branch was accepted whose keys lay, and were summed, in another order
        self.metrics = SpecMetrics()
        self.memory: dict[str, Any] = {}  # what the sampler keeps about the settled tokens
        self.k: int | None = None  # most draft nodes of a step that can be accepted; None: as many as the engine drafts
        self.cache_salt: str | None = None  # prefixes are shared only between sequences of the same
        self.rule = Rule()  # by which its drafts will be verified, as drafters see it
        self.mirror: Mirror | None = None  # what drafters see of it

    @property
    def settled(self) -> int:
        """How many of the tokens will never change: all of them, but for a fork's own."""
        return len(self.parent.tokens) if self.parent else len(self.tokens)

    @property
    def room(self) -> int:
        """How many tokens may still be appended."""
        return self.max_len - len(self.tokens)

    @property
    def edited(self) -> bool:
        """Whether its requests, its grammar or its banned words change the logits before a token is chosen."""
        return self._edits or self.constraint is not None or bool(self.banned)

    @property
    def greedy(self) -> bool:
        """Whether its next token is the argmax of the raw logits."""
        return self._greedy and self.constraint is None and not self.banned

    @property
    def output(self) -> list[int]:
        """Tokens after the prompt."""
        return self.tokens[self.prompt_len :]

    def fork(self, earlier: Sequence | None = None) -> Sequence:
        """A copy that may be extended hypothetically.

        It takes over the lists of an `earlier` one that was rewound: to copy a long text takes milliseconds.
        """
        fork = object.__new__(Sequence)
        fork.__dict__.update(self.__dict__)
        fork.parent, fork.stop_check, fork.mirror = self.parent or self, None, None
        if earlier is None:
            fork.tokens = self.tokens.copy()
        else:
            fork.tokens, fork.mirror = earlier.tokens, earlier.mirror
            fork.tokens += self.tokens[len(fork.tokens) :]
        return fork

    def rewind(self) -> Sequence:
        """Leave nothing but the settled tokens, for a later fork."""
        del self.tokens[self.settled :]
        if self.mirror is not None:
            list.__delitem__(self.mirror.tokens, slice(self.settled, None))
        return self

    def shown(self, rule: Rule) -> Sequence:
        """This sequence as drafters see it: up to date, with the rule that will verify their drafts, and read-only.

        Whatever a drafter does to it, the sequence itself stays what it is (Law 5).
        """
        mirror, n = self.mirror, len(self.tokens)
        if mirror is None or len(mirror.tokens) > n:
            mirror = self.mirror = object.__new__(Mirror)
            lists: dict[str, Any] = {k: copy(v) for k, v in vars(self.params).items() if isinstance(v, (list, dict))}
            own = {"tokens": Tokens(), "params": self.params.having(**lists), "memory": {}, "stop_check": None}
            own |= {"metrics": SpecMetrics(inner=self.metrics.inner), "mirror": None}
            vars(mirror).update(vars(self) | own)
        if (known := len(mirror.tokens)) < n:
            list.extend(mirror.tokens, self.tokens[known:])
        state = mirror.__dict__
        state["rule"], state["finish_reason"] = rule, self.finish_reason
        return mirror

    def accept(self, tokens: list[int]) -> int:
        """Append tokens until one of them ends the sequence; returns how many were taken."""
        for taken, token in enumerate(tokens, start=1):
            self.tokens.append(token)
            self.look_for_end()
            if self.finish_reason:
                return taken
        return len(tokens)

    def look_for_end(self) -> None:
        """Set `finish_reason` if the last token ends the sequence; a failing `stop_check` ends it, too."""
        try:
            done = self.constraint is not None and self.constraint.done(self)
            if self.tokens[-1] in self.eos or done or (self.stop_check and self.stop_check()):
                self.finish_reason = "stop"
            elif len(self.tokens) >= self.max_len:
                self.finish_reason = "length"
        except BaseException as error:  # a caller's criterion, say: it raises what it likes, and ends its own request
            if not ends_one(error):
                raise
            self.fail(typed(error))

    def fail(self, error: Exception) -> None:
        """End the sequence with an error."""
        self.finish_reason, self.error = "error", error


class Mirror(Sequence):
    """A sequence that may only be read."""

    __setattr__ = __delattr__ = _refuse
