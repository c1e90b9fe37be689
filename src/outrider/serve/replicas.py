"""Several engines behind one door: whose a request is, and an answer that outlives the engine that writes it.

Tokens are a function of (model, request, seed) (Law 6): where an engine is lost, any other goes on with the very next
one. Nothing here knows how engines are reached (ray.py does).
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any

from outrider.errors import EngineError
from outrider.outputs import StepEvent

MOST = 8  # engines that may be lost under one answer
BEGINNING = 64  # tokens by which requests are told apart: those that share them share an engine, and what it has read


def beginning(prompt: Sequence[int], salt: str | None = None) -> str:
    """What requests that begin alike have in common."""
    return hashlib.sha256(repr((list(prompt[:BEGINNING]), salt)).encode()).hexdigest()


def ranked(key: str, loads: Mapping[str, int], slack: int) -> list[str]:
    """Engines, by their names, in the order in which a request of this beginning should try them.

    By rendezvous hashing: when an engine comes or goes, only its own requests move. One that has over `slack` requests
    more than the idlest is tried after the others.
    """
    least = min(loads.values(), default=0)

    def order(name: str) -> tuple[bool, str]:
        return loads[name] > least + slack, hashlib.sha256(f"{key} {name}".encode()).hexdigest()

    return sorted(loads, key=order)


class Lost(Exception):
    """The engine has gone, or cannot be reached: nothing is wrong with the request."""


async def resumed(begin: Callable[[list[list[int]]], Any], outputs: int) -> AsyncGenerator[StepEvent, None]:
    """The events of an answer of so many outputs, each token once, whoever writes it.

    `begin(begun)` gives the events of an engine, as an async generator, from the first token on; `begun` are tokens of
    each output that are known already, which that engine may read instead of writing them. Where it raises Lost, or
    ends before all outputs have, another is begun. Raises EngineError if that happens too often, and whatever else an
    engine raises.
    """
    known: list[list[int]] = [[] for _ in range(outputs)]
    ended: set[int] = set()
    for _ in range(MOST):
        passed = [0] * outputs  # tokens of this engine's
        with suppress(Lost):
            async with aclosing(begin([tokens[:-1] for tokens in known])) as events:
                async for event in events:
                    at, new = event.index, len(event.token_ids)
                    first = passed[at]
                    skip = min(new, max(0, len(known[at]) - first))
                    passed[at] += new
                    if event.token_ids[:skip] != known[at][first : first + skip]:
                        raise EngineError("an answer cannot be resumed: another engine gives other tokens")
                    if at in ended or (skip and skip == new and event.output is None):
                        continue
                    known[at] += event.token_ids[skip:]
                    if event.output is not None:
                        ended.add(at)
                    yield event.part(slice(skip, None))
                    if len(ended) == outputs:
                        return
    raise EngineError(f"{MOST} engines have gone while they wrote this answer")
