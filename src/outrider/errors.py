"""Everything a user can do wrong, as a tree:

OutriderError
├── ConfigError (ValueError)       an option, key, method or parameter that cannot be
├── ModelError                     a checkpoint that cannot be used
│   ├── ModelNotFound                  no such folder, asset or hub id
│   ├── UnsupportedArchitecture        a model family this decoder does not know
│   ├── CheckpointError                damaged, incomplete or mismatched weights
│   └── VocabularyMismatch             a draft model that does not speak the target's tokens
├── DrafterError                   a drafter that raised, or proposed what is no draft
├── EngineError                    the engine failed, or is closed
└── RequestError (ValueError)      a request that cannot be served
    ├── EmptyPrompt                    nothing to continue
    ├── RequestTooLong                 longer than the context, or than memory allows
    ├── ConstraintError                structured_outputs that lead nowhere
    ├── QueueFull                      too much is waiting already; later it may be served
    ├── DeadlineExceeded               not done by the time it was wanted
    └── OutOfMemory                    memory ran out under a running request
        └── PoolFull                       and what was allowed for keys and values is all in use

Each message is one line that says what was wrong and what would be right.
"""

from __future__ import annotations

import reprlib
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 160
_repr.maxdict = _repr.maxlist = _repr.maxtuple = 12


def brief(value: object) -> str:
    """A value as a message shows it: its repr, cut where it is long or deep."""
    return _repr.repr(value)


def told(error: BaseException) -> str:
    """What another's code raised, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def message_of(error: BaseException, most: int = 200) -> str:
    """Its message on one line; of an error without one, its kind."""
    return " ".join(str(error).split())[:most] or type(error).__name__


def reason_of(error: BaseException) -> str:
    """Why the system refused, without the number and the path; of any other error, its message."""
    return str(getattr(error, "strerror", None) or error)


def ends_one(error: BaseException) -> bool:
    """Whether what another's code raised is the affair of the one request it was called for: all but an interrupt is.

    So are a cancelled task, an exit, and the panic of a library in Rust, none of which is an Exception.
    """
    return not isinstance(error, KeyboardInterrupt)


def typed(error: BaseException) -> Exception:
    """Memory that ran out by whatever name, and a library's panic, as our error; all else as it is."""
    words = ("can't allocate memory", "not enough memory", "out of memory", "Cannot allocate memory")
    if not isinstance(error, Exception):
        ours: Exception = EngineError(f"what the request calls ended in {told(error)}")
    elif isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(w in str(error) for w in words)):
        ours = OutOfMemory("memory ran out under this request; lower max_num_batched_tokens, max_num_seqs or the load")
    else:
        return error
    ours.__cause__ = error
    return ours


class OutriderError(Exception):
    """Base of all errors that a user can cause."""


class ConfigError(OutriderError, ValueError):
    """An option, key, method or parameter that cannot be."""


class ModelError(OutriderError):
    """A checkpoint that cannot be used."""


class ModelNotFound(ModelError):
    """No such folder, embedded model or hub id."""


class UnsupportedArchitecture(ModelError):
    """A model family this decoder does not know."""


class CheckpointError(ModelError):
    """Damaged, incomplete or mismatched weights."""


class VocabularyMismatch(ModelError):
    """A draft model that does not speak the target's tokens."""


class DrafterError(OutriderError):
    """A drafter that raised, or proposed what is no draft. The sequences and their caches are whole.

    If it was `observe` that raised, `verdicts` are those of the step: the sequences have grown by them.
    """

    def __init__(self, message: str, verdicts: list[Any] | None = None) -> None:
        super().__init__(message)
        self.verdicts = verdicts


class EngineError(OutriderError):
    """The engine failed, or is closed: nothing is wrong with the request."""


class RequestError(OutriderError, ValueError):
    """A request that cannot be served."""


class EmptyPrompt(RequestError):
    """Nothing to continue."""


class RequestTooLong(RequestError):
    """Longer than the context, or than memory allows."""


class ConstraintError(RequestError):
    """structured_outputs that lead nowhere, or grow too complex, in the middle of an output."""


class QueueFull(RequestError):
    """Too much is waiting already; the same request may be served later."""


class DeadlineExceeded(RequestError):
    """Not done by the time it was wanted."""


class OutOfMemory(RequestError):
    """Memory ran out under a running request: somebody else took what was free at the start."""


class PoolFull(OutOfMemory):
    """All memory for keys and values that was allowed is in use."""


# Signals by whose handlers programs end, or end what runs. Not those of profilers, which look at where they fall.
ENDING = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2
_late: list[int] | None = None  # what came while the main thread is in such a block; None outside


def _restore(handlers: list[tuple[int, Any]]) -> None:
    """Give signals their handlers back, also behind one that was heard at once and raised."""
    if handlers:
        (number, handler), *others = handlers
        try:
            signal.signal(number, handler)
        finally:
            _restore(others)


def _tell(waiting: list[tuple[Any, int]]) -> None:
    """Call handlers with their signals, also behind one that raises; not raised again, as asyncio has heard of them."""
    if waiting:
        (handler, number), *others = waiting
        try:
            handler(number, None)
        finally:
            _tell(others)


@contextmanager
def interrupts_wait() -> Iterator[list[int]]:
    """Ctrl-C, and what else a program handles in Python to end something, waits until the (outermost) block is left.

    It would fall between any two instructions: what it leaves half done would be wrong for everybody else, and what it
    raises (an alarm's TimeoutError) be taken for an error of the step. Yields the signals that wait.
    """
    global _late
    if threading.current_thread() is not threading.main_thread():  # Python handles signals in the main thread alone
        yield []
        return
    if _late is not None:
        yield _late
        return
    late: list[int] = []
    handlers = {n: handler for n in ENDING if callable(handler := signal.getsignal(n))}
    try:  # a signal may come between any two of these lines, too
        _late = late
        for number in handlers:
            signal.signal(number, lambda number, _: late.append(number))
        yield late
    finally:
        _late = None
        try:
            _restore([*handlers.items()])
        finally:
            _tell([(handlers[signal.Signals(waited)], waited) for waited in dict.fromkeys(late)])
