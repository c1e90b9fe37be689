"""The processes: how they find each other, what rank 0 tells the others, and how all end with any of them."""

from __future__ import annotations

import atexit
import json
import os
import queue
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from outrider.config import whole
from outrider.errors import ConfigError, EngineError, told
from outrider.parallel.group import Group

JOINING = timedelta(seconds=120)  # for all ranks to come together
LONG = timedelta(days=30)  # for what rank 0 may do before it needs the others
COLLECTIVE = timedelta(minutes=10)  # between ranks that are alive: one may still be loading
HELLO = 10.0  # seconds in which who connects says who it is
LAST_WORDS = 1.5  # seconds in which rank 0 may report, in its own words, what the others have reported, too
PARTING = 5.0  # seconds in which those whom rank 0 has told of the end may pass it on

Op = list[Any]


def launched() -> tuple[int, int]:
    """This process's rank and how many there are, as torchrun (or who sets the same variables) says; (0, 1) if none."""
    size = _size()
    return (_variable("RANK", None, 0, size - 1) if size > 1 else 0), size


def _size() -> int:
    return _variable("WORLD_SIZE", 1, 1)


def _variable(name: str, default: int | None, least: int, most: int = 2**31) -> int:
    """One that torchrun sets. Raises ConfigError."""
    found = os.environ.get(name, default)
    with suppress(TypeError, ValueError):
        if least <= int(found) <= most:  # type: ignore[arg-type]
            return int(found)  # type: ignore[arg-type]
    bounds = f"from {least} to {most}" if most < 2**31 else f"of at least {least}"
    lacks = "is not set" if found is None else f"is {found!r}"
    raise ConfigError(f"{name} {lacks}; torchrun sets it, to a whole number {bounds}")


def ranks_for(size: int | None, device: str) -> Ranks | None:
    """The ranks for tensor_parallel_size, joined on the first call; None for one. Raises ConfigError, EngineError.

    `size` None means all that were started.
    """
    there = _size()
    if size is not None and not whole(size, 1):
        raise ConfigError(f"tensor_parallel_size must be a whole number of at least 1, not {size!r}")
    if size == 1 or (size is None and there == 1):
        return None
    if there == 1:
        raise ConfigError(
            f"tensor_parallel_size={size} needs {size} processes: torchrun --standalone --nproc-per-node {size} ..."
        )
    if size not in (None, there):
        raise ConfigError(f"tensor_parallel_size={size}, but {there} processes were started; give both the same number")
    return _started[0] if _started else _start(device)


_started: list[Ranks] = []  # the one of this process


def _start(device: str) -> Ranks:
    rank, _ = launched()
    local = _variable("LOCAL_RANK", rank, 0)
    cuda = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    if cuda and local >= torch.cuda.device_count():
        raise ConfigError(f"rank {rank} wants CUDA device {local}, and there are {torch.cuda.device_count()}")
    where = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(where)
    found: list[Ranks | BaseException] = []

    def join() -> None:
        try:
            found.append(_join(where))
        except BaseException as error:
            found.append(error)

    joining = threading.Thread(target=join, daemon=True)
    joining.start()
    joining.join()  # torch waits where no signal is heard; here it is
    if isinstance(found[0], BaseException):
        raise found[0]
    _started.append(found[0])
    return found[0]


def _join(where: torch.device) -> Ranks:
    rank, size = launched()
    if where.type == "cuda":
        torch.cuda.set_device(where)  # which is a thread's
    store = rendezvous()
    try:
        if rank == 0:
            store.set(LEADS, "1")
        elif store.get(LEADS) != b"1":  # waits; rank 0 may have much to do before, or nothing for us
            sys.exit(0)
        store.set_timeout(JOINING)  # one may have ended meanwhile
        kind = "nccl" if where.type == "cuda" else "gloo"
        dist.init_process_group(kind, store=store, rank=rank, world_size=size, timeout=JOINING)
        ranks = Ranks(rank, size, where, store)
    except (RuntimeError, OSError) as error:
        raise EngineError(f"rank {rank} of {size} cannot join the others: {told(error)}") from None
    store.set_timeout(LONG)
    return ranks


LEADS = "outrider/leads"


def rendezvous() -> Any:
    """The store where the ranks meet. Raises EngineError, naming the address, if another program listens there."""
    from torch.distributed.rendezvous import rendezvous as meet

    (rank, size), began = launched(), time.monotonic()
    if not os.environ.get("MASTER_ADDR"):
        raise ConfigError("MASTER_ADDR is not set; torchrun sets it, to the address of rank 0's machine")
    at = f"{os.environ['MASTER_ADDR']}, port {_variable('MASTER_PORT', None, 1, 65535)}"
    try:
        store, _, _ = next(iter(meet("env://", timeout=JOINING)))
    except Exception as error:
        if "EADDRINUSE" in str(error) or "in use" in str(error):
            raise EngineError(
                f"another program, or another rank 0, listens at {at}; choose another MASTER_PORT (--master-port)"
            ) from None
        raise EngineError(
            f"rank {rank} of {size} has not met the others at {at} in {time.monotonic() - began:.0f} s: {told(error)}"
        ) from None
    store.set_timeout(LONG)
    return store


def dismiss() -> None:
    """Rank 0 ends without having needed the others: they may go."""
    if launched()[0] == 0 and launched()[1] > 1 and not _started and os.environ.get("TORCHELASTIC_USE_AGENT_STORE"):
        with suppress(Exception):
            rendezvous().set(LEADS, "0")


class Ranks:
    """This process's place among the others, and its lines to them: rank 0 has one to each, they have one to it.

    `on_end` is called on rank 0, in any thread, with why all ranks end; the process does PARTING seconds later, or when
    its main thread comes to its own end. Without it, it ends at once.
    """

    def __init__(self, rank: int, size: int, device: torch.device, store: Any) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.local_size = _variable("LOCAL_WORLD_SIZE", size, 1, size)
        self.numbers: dict[int, int] = {}  # of caches, by their ids
        self._count, self._waiting, self._closing = 0, list[Op](), False
        self._groups: dict[tuple[int, str], Group] = {}
        self.on_end: Callable[[str], None] | None = None
        self._dying, self._parted = threading.Lock(), threading.Event()
        self._lines: list[socket.socket] = []
        self._heard: queue.Queue[Any] = queue.Queue()  # from rank 0: ops; from the others: answers
        address = f"outrider/{size}"
        if rank == 0:
            alone = self.local_size == size
            server = socket.create_server(("127.0.0.1" if alone else "", 0), backlog=size)
            host = "127.0.0.1" if alone else os.environ["MASTER_ADDR"]
            token = secrets.token_hex(16)
            store.set(address, json.dumps([host, server.getsockname()[1], token]))
            server.settimeout(JOINING.total_seconds())
            found: dict[int, socket.socket] = {}
            while len(found) < size - 1:
                line, _ = server.accept()
                line.settimeout(HELLO)
                hello = next(_heard(line, 0), None)  # unbuffered: what follows is for who listens later
                if isinstance(hello, list) and hello[:1] == [token]:
                    found[hello[1]] = line
            server.close()
            self._lines = [found[i] for i in range(1, size)]
        else:
            host, port, token = json.loads(store.get(address))
            self._lines = [socket.create_connection((host, port), JOINING.total_seconds())]
            self._lines[0].sendall(_packed([token, rank]))
        for i, line in enumerate(self._lines):
            line.settimeout(None)
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for option, value in (("SO_KEEPALIVE", 1), ("TCP_KEEPIDLE", 2), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3)):
                level = socket.SOL_SOCKET if option.startswith("SO") else socket.IPPROTO_TCP
                if hasattr(socket, option):
                    line.setsockopt(level, getattr(socket, option), value)
            threading.Thread(target=self._listen, args=(line, i + 1 if rank == 0 else 0), daemon=True).start()
        atexit.register(self.close)

    # --- of rank 0 ---

    def number(self) -> int:
        """A new one, for what all ranks have."""
        self._count += 1
        return self._count

    def tell(self, *op: Any) -> None:
        """Something for the others to do, in this order; sent with the next `flush`."""
        self._waiting.append(list(op))

    def flush(self) -> None:
        """Send what waits."""
        ops, self._waiting = self._waiting, []
        if ops:
            data = _packed(ops)
            for line in self._lines:
                try:
                    line.sendall(data)
                except OSError:  # it has ended; who listens there will say so
                    time.sleep(2 * LAST_WORDS)
                    self.fail("a rank cannot be reached")

    def ask(self, *op: Any) -> list[Any]:
        """What the others answer."""
        self.tell(*op)
        self.flush()
        return [self._heard.get() for _ in self._lines]

    def group(self, size: int, mode: str) -> Group:
        """The first `size` ranks, with sums in this mode, one of MODES. Raises ConfigError."""
        if not 1 <= size <= self.size:
            raise ConfigError(f"a group of {size} ranks: there are {self.size}")
        if (size, mode) not in self._groups:
            if self.rank == 0:
                self.tell("group", size, mode)
                self.flush()
            own = dist.new_group(list(range(size)), timeout=COLLECTIVE)  # never the world's, which modules of torch's
            self._groups[size, mode] = Group(self, size, mode, own)  # own hold, too: see close
        return self._groups[size, mode]

    # --- of all ---

    def hear(self) -> Any:
        """The next ops from rank 0; None when it has ended."""
        return self._heard.get()

    def answer(self, value: Any) -> None:
        """To rank 0."""
        self._lines[0].sendall(_packed(["answer", value]))

    def report(self, error: BaseException) -> NoReturn:
        """Tell rank 0 why this one cannot go on, and end. If it has ended itself, who listens to it says so."""
        with suppress(OSError):
            self._lines[0].sendall(_packed(["error", told(error)]))
        time.sleep(2 * LAST_WORDS)
        os._exit(1)

    def fail(self, what: str) -> NoReturn:
        """End this process, and by that the others, with one line. Where another's end is the cause, that is told."""
        time.sleep(LAST_WORDS)
        self._die(what)

    def _die(self, what: str) -> NoReturn:
        if not self._dying.acquire(blocking=False):
            _wait_for_death()
        with suppress(Exception):
            sys.stdout.flush()
        with suppress(OSError):
            os.write(2, f"outrider: {what}; all ranks end\n".encode())
        if self.rank == 0:  # the others need not say it, too
            for line in self._lines:
                with suppress(OSError):
                    line.sendall(_packed([["end"]]))
            if self.on_end is not None:
                self.on_end(what)
                self._parted.wait(PARTING)
        os._exit(1)

    def _listen(self, line: socket.socket, other: int) -> None:
        for heard in _heard(line):
            if self.rank:
                self._heard.put(heard)
                self._closing = self._closing or ["end"] in heard
            elif heard[0] == "answer":
                self._heard.put(heard[1])
            else:  # by then rank 0 may have met the same
                time.sleep(LAST_WORDS)
                if not self._closing:
                    self._die(f"rank {other} failed: {heard[1]}")
        if self._closing:
            self._heard.put(None)
            if self.rank:  # it may wait for a collective that nobody comes to
                time.sleep(2 * PARTING)
                os._exit(1)
        elif self.rank == 0:
            self._die(f"rank {other} has ended (killed, or out of memory?)")
        elif self.rank == 1:
            self._die("rank 0 has ended (killed, or out of memory?)")
        else:
            os._exit(1)

    def close(self) -> None:
        """Let the others go."""
        if self._dying.locked():
            self._parted.set()
            _wait_for_death()
        closing, self._closing = self._closing, True
        if self.rank == 0 and not closing:
            for i, line in enumerate(self._lines):  # before torchrun has told us to end because of that
                with suppress(OSError):
                    if line.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b"":
                        self._die(f"rank {i + 1} has ended (killed, or out of memory?)")
            self._waiting.append(["end"])
            for line in self._lines:
                with suppress(OSError):
                    line.sendall(_packed(self._waiting))
        for group in self._groups.values():  # with its last holder its threads end: one that still let go of a tensor
            group.process_group = None  # while Python ends would abort the process
        with suppress(Exception):
            dist.destroy_process_group()


def _wait_for_death() -> NoReturn:
    """Another thread has said why this process ends, and is about to end it."""
    while True:
        time.sleep(PARTING)


def _packed(data: Any) -> bytes:
    return json.dumps(data, separators=(",", ":")).encode() + b"\n"


def _heard(line: socket.socket, buffering: int = -1) -> Iterator[Any]:
    """The messages of a line, to its end."""
    with suppress(OSError, ValueError), line.makefile("rb", buffering) as messages:
        yield from map(json.loads, messages)
