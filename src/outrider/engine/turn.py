"""Whose turn it is to run the engine: one thread's at a time, and no other waits for more than its next step."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable
from weakref import WeakSet

from outrider.errors import EngineError, RequestError

BLINK = 0.1  # seconds until a waiting thread looks again, should an interrupt have swallowed the news
LAST_STEP = 10.0  # seconds that the end of a process, or of an engine, waits for a step that is under way

_turns: WeakSet[Turn] = WeakSet()


@atexit.register
def _close_all() -> None:
    """Daemon threads step no more: Python ends them where they come back from a kernel, and C++ then aborts."""
    for turn in list(_turns):
        turn.close()


class Turn:
    """Held by the thread that steps. The others wait for the news that a step has ended, not for a lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the holder's name; taken for a few instructions only
        self._news = threading.Condition(self._lock)
        self._holder: int | None = None
        self._process = 0  # the holder's: a forked process has no other thread than the one that forked
        self._waiting = 0
        self.given = 0  # how many have ended
        self._last: int | None = None  # the only thread that may have it from now on
        _turns.add(self)

    def refuse_nested(self) -> None:
        """Raise RequestError if this thread has the turn already."""
        if self._holder == threading.get_ident():
            raise RequestError("the engine is in a step: what it calls there (a processor, a drafter) cannot run it")

    def refuse_lost(self) -> None:
        """Raise EngineError if who has the turn is in another process, and a step half done here for good."""
        if self._holder is not None and self._process != os.getpid():
            raise EngineError("this process was forked while another thread was in a step; fork where no request runs")

    def take(self, unless: Callable[[], bool] = lambda: False) -> bool:
        """Wait for the turn; False, without it, as soon as `unless()` holds. Whatever comes of it, `give` then."""
        with self._lock:
            while not unless():
                if self._is_free():
                    self._process, self._holder = os.getpid(), threading.get_ident()
                    return True
                self.refuse_lost()
                self._waiting += 1
                try:
                    self._news.wait(BLINK)
                finally:
                    self._waiting -= 1
        return False

    def take_at_once(self) -> bool:
        """Take the turn if nothing at all needs waiting for. Destructors ask so: they run anywhere, in a step, too."""
        if self._is_free() and self._lock.acquire(blocking=False):
            try:
                if self._is_free():
                    self._process, self._holder = os.getpid(), threading.get_ident()
                    return True
            finally:
                self._lock.release()
        return False

    def _is_free(self) -> bool:
        return self._holder is None and self._last in (None, threading.get_ident())

    def close(self) -> None:
        """Leave the turn to this thread for good: the others wait for ever, once the step under way has ended."""
        self._last, until = threading.get_ident(), time.monotonic() + LAST_STEP
        while self._holder not in (None, self._last) and self._process == os.getpid() and time.monotonic() < until:
            time.sleep(0.001)  # no lock: in a forked process another thread may have had it

    def give(self) -> None:
        """Give the turn back, if this thread has it, and tell the others."""
        if self._holder == threading.get_ident():
            self.given += 1
            self._holder = None
            with self._lock:
                if self._waiting:
                    self._news.notify_all()
