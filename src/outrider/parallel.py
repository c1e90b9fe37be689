"""A model cut over ranks: processes that torchrun has started, each with a part of every matrix.

Rank 0 decides, the others replay (follow.py). What it decides goes to them over a socket, a few numbers a forward;
tensors go through torch.distributed, gloo on CPUs and NCCL on CUDA, of which this file is the only user. The sockets
are lifelines, too: a process that ends closes them, whatever the others wait for, and then all end.

Heads are cut by groups that share a key-value head, which ranks hold twice where there are fewer than ranks. Queries,
keys, values, gate and up are cut by outputs, and so is the head. Of the two products that end a branch, in three modes:

- `gather`: they are cut by outputs, too. Nothing is ever summed across ranks, so the bits are those of one rank's run.
- `ordered`: they are cut by inputs (Shoeybi et al. 1909.08053); all ranks get all partial sums and add them in the
  order of the ranks. A row's bits depend on how many ranks there are, and on nothing else.
- `reduce`: the same sums by an all-reduce, whose order depends on how much is summed at once: exactness is `law`.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import queue
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NoReturn
from weakref import finalize

import torch
import torch.distributed as dist
from torch import Tensor

from outrider.config import ModelConfig
from outrider.errors import ConfigError, EngineError, told
from outrider.model import Attends, Model, Wanted
from outrider.ops import MLP, Experts, Linear, Quantized, rms_norm

MODES = {
    "gather": "the bits of one rank's run",
    "ordered": "sums in the order of the ranks: bits that depend on their number",
    "reduce": "sums in the library's order",
}
JOINING = timedelta(seconds=120)  # for all ranks to come together
COLLECTIVE = timedelta(minutes=10)  # between ranks that are alive: one may still be loading
HELLO = 10.0  # seconds in which who connects says who it is
LAST_WORDS = 1.5  # seconds in which rank 0 may report, in its own words, what the others have reported, too
GRAIN = 32  # outputs that kernels compute together: cuts lie between them where there are enough
SUPER = 256  # inputs that share a factor in some quantised formats

Op = list[Any]


# --- who holds what --------------------------------------------------------------------------------------------------


def split(count: int, size: int, grain: int = 1) -> list[range]:
    """`count` things in `size` runs, as even as can be in whole grains, which shrink until there is one for each."""
    while grain > 1 and count // grain < size:
        grain //= 2
    grains, rest = divmod(count // grain, size)
    ends = [min(count, grain * (grains * i + min(i, rest))) for i in range(size)] + [count]
    return [range(a, b) for a, b in itertools.pairwise(ends)]


def split_heads(heads: int, kv_heads: int, size: int) -> list[tuple[range, range]]:
    """For each rank its query heads and the key-value heads that they look at."""
    group = heads // kv_heads
    if size <= kv_heads:
        return [(range(kv.start * group, kv.stop * group), kv) for kv in split(kv_heads, size)]
    found = []
    for kv, ranks in enumerate(split(size, kv_heads)):
        for own in split(group, len(ranks)):
            found.append((range(kv * group + own.start, kv * group + own.stop), range(kv, kv + 1)))
    return found


@dataclass
class Cut:
    """What each rank of a group holds of a model. Raises ConfigError if there is not something for each."""

    whole: ModelConfig
    group: Group

    def __post_init__(self) -> None:
        c, n = self.whole, self.group.size
        if n > c.num_heads:
            raise ConfigError(f"a model of {c.num_heads} query heads is cut over at most {c.num_heads} ranks, not {n}")
        self.heads = split_heads(c.num_heads, c.num_kv_heads, n)
        self.inner = self.wide(c.intermediate_size)
        self.hidden = split(c.hidden_size, n, GRAIN)
        self.vocab = split(c.vocab_size, n, GRAIN)

    def wide(self, width: int) -> list[range]:
        """Columns of an MLP's inner numbers, for each rank."""
        return split(width, self.group.size, SUPER)

    @property
    def config(self) -> ModelConfig:
        """The model as this rank sees it: with the heads it holds."""
        q, kv = self.heads[self.group.rank]
        norm = None if self.whole.qk_norm == "full" else self.whole.qk_norm  # Normed does it
        return replace(self.whole, num_heads=len(q), num_kv_heads=len(kv), qk_norm=norm)

    def mine(self, parts: list[range]) -> range:
        """This rank's of them."""
        return parts[self.group.rank]

    def queries(self) -> list[range]:
        """Columns of all heads' outputs, for each rank."""
        dim = self.whole.head_dim
        return [range(q.start * dim, q.stop * dim) for q, _ in self.heads]

    def qkv_rows(self) -> list[range]:
        """Rows of queries, keys and values, counted through all three, that this rank holds."""
        c, (q, kv) = self.whole, self.heads[self.group.rank]
        firsts = 0, c.num_heads, c.num_heads + c.num_kv_heads
        return [
            range((first + own.start) * c.head_dim, (first + own.stop) * c.head_dim)
            for first, own in zip(firsts, (q, kv, kv), strict=True)
        ]

    @property
    def sums(self) -> bool:
        """Whether what ends a branch is cut by inputs."""
        return self.group.mode != "gather"


def within(rows: list[range], sizes: list[int]) -> list[list[range]]:
    """Of rows that are counted through parts of these sizes, those of each part, counted in it."""
    found, first = [], 0
    for size in sizes:
        own = [range(max(r.start, first) - first, min(r.stop, first + size) - first) for r in rows]
        found.append([r for r in own if len(r)])
        first += size
    return found


def cut(x: Tensor, rows: list[range], columns: range | None = None) -> Tensor:
    """Some rows, and of these some columns."""
    some = [x[r.start : r.stop] for r in rows]
    found = some[0] if len(some) == 1 else torch.cat(some) if some else x[:0]
    return found if columns is None else found[:, columns.start : columns.stop]


def cut_quantized(q: Quantized, rows: list[range], columns: range | None = None) -> Quantized:
    """The same of quantised weights. Raises ConfigError where columns that share a factor would be parted."""
    coarse = any(isinstance(factors, tuple) for factors in (q.scales, q.offsets))
    share = SUPER if coarse else q.group
    if columns is not None and (q.order is not None or columns.start % share):
        why = "their inputs stand in an order of their own" if q.order is not None else f"{share} inputs share a factor"
        raise ConfigError(f"these weights cannot be cut by inputs: {why}; use tensor_parallel_mode gather")

    def factors(x: Any, group: int = q.group) -> Any:
        if x is None:
            return None
        if isinstance(x, tuple):
            return factors(x[0]), factors(x[1], SUPER)
        groups = None if columns is None else range(columns.start // group, -(-columns.stop // group))
        return cut(x, rows, groups).contiguous()

    values = cut(q.values.view(torch.int8), rows, columns).contiguous().view(q.values.dtype)
    return replace(q, values=values, scales=factors(q.scales), offsets=factors(q.offsets), zeros=factors(q.zeros))


# --- tensors across ranks --------------------------------------------------------------------------------------------


@dataclass
class Group:
    """The first `size` ranks, among which a model is cut, and how its sums are made."""

    ranks: Any  # Ranks; None where only sizes are asked for
    size: int
    mode: str
    process_group: Any
    calls: int = 0  # collectives so far, and the bytes that this rank has received in them
    received: int = 0

    @property
    def rank(self) -> int:
        """This process's."""
        return int(self.ranks.rank)

    def announce(self, *op: Any) -> int:
        """On rank 0, let all ranks make what it makes now: `op`, a new number, and this group; returns the number."""
        if self.rank:
            return 0
        number: int = self.ranks.number()
        self.ranks.tell(*op, number, self.size, self.mode)
        self.ranks.flush()
        return number

    def gather(self, x: Tensor, parts: list[range]) -> Tensor:
        """All columns, of which each rank has some: x (n, own) gives (n, all), on every rank."""
        return self._joined(self._all(x, max(map(len, parts))), parts) if len(x) else x.new_empty(0, parts[-1].stop)

    def gather_first(self, x: Tensor, parts: list[range]) -> Tensor:
        """The same on rank 0; others have their own back."""
        if not len(x):
            return x.new_empty(0, parts[-1].stop)
        widest = max(map(len, parts))
        mine = _padded(x, widest)
        into = [torch.empty_like(mine) for _ in parts] if self.rank == 0 else None
        dist.gather(mine, into, dst=0, group=self.process_group)
        self._count(0 if into is None else mine.nbytes * (self.size - 1))
        return x if into is None else self._joined(torch.stack(into), parts)

    def sum(self, x: Tensor) -> Tensor:
        """Each rank's x, added: in their order, or in the library's if the mode is `reduce`."""
        if not len(x):
            return x
        if self.mode == "reduce":
            dist.all_reduce(x, group=self.process_group)
            self._count(2 * x.nbytes * (self.size - 1) // self.size)
            return x
        total, *others = self._all(x, x.shape[1])
        added: Tensor = total
        for part in others:
            added = added + part
        return added

    def first_says(self, x: Tensor) -> Tensor:
        """Rank 0's x, on every rank."""
        dist.broadcast(x, 0, group=self.process_group)
        self._count(x.nbytes if self.rank else 0)
        return x

    def _all(self, x: Tensor, width: int) -> Tensor:
        """(ranks, n, width)."""
        mine = _padded(x, width)
        into = mine.new_empty(self.size * len(mine), width)
        (getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)(into, mine, group=self.process_group)
        self._count(mine.nbytes * (self.size - 1))
        return into.view(self.size, *mine.shape)

    def _joined(self, every: Tensor, parts: list[range]) -> Tensor:
        if len({len(part) for part in parts}) == 1:
            return every.transpose(0, 1).reshape(every.shape[1], -1)
        return torch.cat([own[:, : len(part)] for own, part in zip(every, parts, strict=True)], 1)

    def _count(self, received: int) -> None:
        self.calls += 1
        self.received += received


def _padded(x: Tensor, width: int) -> Tensor:
    return x.contiguous() if x.shape[1] == width else torch.nn.functional.pad(x, (0, width - x.shape[1]))


class _Across(Linear):
    """A product of which this rank has a part, `own`."""

    def __init__(self, own: Linear, group: Group, inputs: int, outputs: int) -> None:
        self.own, self.group, self.in_features, self.out_features = own, group, inputs, outputs
        self.dtype, self.kernel, self.nbytes = own.dtype, own.kernel, own.nbytes
        self.bias, self.gated, self.native = own.bias, False, False  # the walk does not stop for others

    @property
    def rounded(self) -> bool:
        """As Linear's."""
        return self.own.rounded


class Gathered(_Across):
    """Cut by outputs, of which all come together; inputs that are cut come together before. `first`: on rank 0 only."""

    def __init__(
        self, own: Linear, group: Group, outputs: list[range], inputs: list[range] | None = None, first: bool = False
    ) -> None:
        super().__init__(own, group, inputs[-1].stop if inputs else own.in_features, outputs[-1].stop)
        self.inputs, self.outputs, self.first = inputs, outputs, first

    def __call__(
        self,
        x: Tensor,
        norm: Tensor | None = None,
        eps: float = 0.0,
        residual: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """As Linear's, for x (rows, this rank's inputs)."""
        x = self.group.gather(x, self.inputs) if self.inputs else x
        mine = self.outputs[self.group.rank]
        added = None if residual is None else residual[:, mine.start : mine.stop].contiguous()
        y = self.own(x, norm, eps, added, dtype)
        return (self.group.gather_first if self.first else self.group.gather)(y, self.outputs)


class Summed(_Across):
    """Cut by inputs: partial sums in float32, added up, and rounded once. Of the biases all but rank 0's are zero."""

    def __call__(
        self,
        x: Tensor,
        norm: Tensor | None = None,
        eps: float = 0.0,
        residual: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """As Linear's, for x (rows, this rank's inputs), which are not normed."""
        assert norm is None
        y = self.group.sum(self.own(x, dtype=torch.float32))
        return (y if residual is None else y + residual.float()).to(dtype or x.dtype)


class Normed(_Across):
    """Queries, keys and values whose norm is over all heads: those of queries, and of keys, come together for it."""

    def __init__(self, own: Linear, cut: Cut, norms: tuple[Tensor, Tensor]) -> None:
        super().__init__(own, cut.group, own.in_features, own.out_features)
        c, kv = cut.whole, [kv for _, kv in cut.heads]
        firsts = [i for i, each in enumerate(kv) if i == 0 or each != kv[i - 1]]  # who holds them first
        self.norms, self.dim, self.eps, self.kv = norms, c.head_dim, c.rms_norm_eps, kv
        self.keys = [range(kv[i].start * self.dim, kv[i].stop * self.dim) for i in firsts]
        self.queries, self.firsts = cut.queries(), firsts

    def __call__(
        self,
        x: Tensor,
        norm: Tensor | None = None,
        eps: float = 0.0,
        residual: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """As Linear's, normed."""
        y, group = self.own(x, norm, eps, residual, dtype), self.group
        mine, own = self.queries[group.rank], self.kv[group.rank]
        q, k = y[:, : len(mine)], y[:, len(mine) : len(mine) + len(own) * self.dim]
        every_q = rms_norm(group.gather(q, self.queries), self.norms[0], self.eps)
        every = [range(each.start * self.dim, each.stop * self.dim) for each in self.kv]
        held, at = [], 0
        for part in every:  # with those that several ranks hold, several times
            held.append(range(at, at + len(part)))
            at += len(part)
        together = group.gather(k, held)
        every_k = rms_norm(cut(together.T, [held[i] for i in self.firsts]).T.contiguous(), self.norms[1], self.eps)
        q.copy_(every_q[:, mine.start : mine.stop])
        k.copy_(every_k[:, every[group.rank].start : every[group.rank].stop])
        return y


class CutExperts(Experts):
    """Experts that are cut alike: what all of a row's give comes together at once. Each rank has the whole router."""

    native: Any = None  # the kernels do not stop for others

    def __init__(
        self, router: Linear, experts: list[MLP], chosen: int, normalised: bool, shared: bool, cut: Cut
    ) -> None:
        super().__init__(router, experts, chosen, normalised, shared)
        self.cut = cut

    def _fit(self, e: MLP) -> None:
        """Only the whole fits."""

    def _whole(self, inner: list[Tensor]) -> list[Tensor]:
        if self.cut.sums:
            return inner
        m, own = self.cut.whole.mixture, len(inner) - self.shared  # the one that is shared is another width
        assert m is not None
        found = list[Tensor]()
        for parts, width in ((inner[:own], m.width), (inner[own:], m.shared)):
            if parts:
                every = self.cut.group.gather(torch.cat(parts), self.cut.wide(width))
                found += torch.split(every, [len(x) for x in parts])
        return found

    def _each(self, x: Tensor) -> Tensor:
        own, group = super()._each(x), self.cut.group
        return group.sum(own) if self.cut.sums else group.gather(own, self.cut.hidden)


@dataclass
class CutModel(Model):
    """A model of which this rank has a part. On rank 0, its forwards are told to the others, who run them, too."""

    cut: Any = None  # a Cut
    number: int = 0  # by which the ranks know it

    def __post_init__(self) -> None:
        super().__post_init__()
        self._inside = False

    @property
    def group(self) -> Group:
        """The ranks that have a part."""
        group: Group = self.cut.group
        return group

    def thin(self, layers: Sequence[int]) -> Model:
        """As Model's, on all ranks."""
        model, ranks = super().thin(layers), self.group.ranks
        if self.group.rank == 0 and isinstance(model, CutModel):
            model.number = ranks.number()
            ranks.tell("thin", self.number, list(layers), model.number)
            finalize(model, ranks.tell, "drop", model.number)
        return model

    def forward(
        self,
        tokens: list[int],
        positions: list[int],
        lengths: list[int],
        kv: Attends,
        plan: Any,
        states: dict[int, Tensor] | None = None,
        wanted: Wanted | None = None,
    ) -> Tensor:
        """As Model's. What fails here ends all ranks: they would no longer be at the same place."""
        rows, number = None if wanted is None else wanted.rows, self.group.ranks.numbers.get(id(kv))
        with self._together("forward", self.number, number, tokens, positions, lengths, rows):
            return super().forward(tokens, positions, lengths, kv, plan, states, wanted)

    def logits(self, hidden: Tensor) -> Tensor:
        """As Model's, on rank 0; a drafter may ask for them between forwards."""
        if self._inside:
            return super().logits(hidden)
        with self._together("logits", self.number, len(hidden)):
            return super().logits(self.group.first_says(hidden.contiguous()))

    @contextmanager
    def _together(self, *op: Any) -> Iterator[None]:
        ranks = self.group.ranks
        if self.group.rank:
            yield from self._within()
            return
        with ranks.level():
            ranks.tell(*op)
            ranks.flush()
            try:
                yield from self._within()
            except Exception as error:
                ranks.fail(f"a forward of {self.group.size} ranks failed: {told(error)}")

    def _within(self) -> Iterator[None]:
        self._inside = True
        try:
            yield
        finally:
            self._inside = False


def columns_alone(model: CutModel) -> bool:
    """Whether outputs have the same bits when their matrix is cut between them, as this model's are."""
    cut: Cut = model.cut
    generator = torch.Generator().manual_seed(1)
    experts = cut.whole.mixture
    for inputs in (cut.whole.hidden_size, experts.width if experts else cut.whole.intermediate_size):
        weight = torch.randn(cut.whole.hidden_size, inputs, generator=generator).to(model.device, model.dtype)
        x = torch.randn(3, inputs, generator=generator).to(model.device, model.dtype)
        parts = [Linear(weight[own.start : own.stop].clone())(x) for own in cut.hidden]
        if not torch.equal(torch.cat(parts, 1), Linear(weight.clone())(x)):
            return False
    return True


# --- the processes ---------------------------------------------------------------------------------------------------


def launched() -> tuple[int, int]:
    """This process's rank and how many there are, as torchrun (or who sets the same variables) says; (0, 1) if none."""
    try:
        return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    except ValueError:
        raise ConfigError("RANK and WORLD_SIZE are whole numbers that torchrun sets; unset them") from None


def ranks_for(size: int | None, device: str) -> Ranks | None:
    """The ranks for tensor_parallel_size, joined on the first call; None for one. Raises ConfigError, EngineError.

    `size` None means all that were started.
    """
    _, there = launched()
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
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
    rank, size = launched()
    local = int(os.environ.get("LOCAL_RANK", rank))
    cuda = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    if cuda and local >= torch.cuda.device_count():
        raise ConfigError(f"rank {rank} wants CUDA device {local}, and there are {torch.cuda.device_count()}")
    where = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(where)
    store = rendezvous()
    if rank == 0:
        store.set(LEADS, "1")
    elif store.get(LEADS) != b"1":  # waits; rank 0 may have much to do before, or nothing for us
        sys.exit(0)
    try:
        dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=rank, world_size=size, timeout=COLLECTIVE)
        ranks = Ranks(rank, size, where, store)
    except (RuntimeError, OSError) as error:
        raise EngineError(f"rank {rank} of {size} cannot join the others: {told(error)}") from None
    _started.append(ranks)
    return ranks


LEADS = "outrider/leads"


def rendezvous() -> Any:
    """The store where the ranks meet. Raises EngineError, naming the address, if another program listens there."""
    from torch.distributed.rendezvous import rendezvous as meet

    at = f"{os.environ.get('MASTER_ADDR', '?')}, port {os.environ.get('MASTER_PORT', '?')}"
    try:
        store, _, _ = next(iter(meet("env://", timeout=JOINING)))
    except Exception as error:
        if "EADDRINUSE" in str(error) or "in use" in str(error):
            raise EngineError(f"another program listens at {at}; choose another MASTER_PORT (--master-port)") from None
        raise EngineError(f"the ranks do not meet at {at} within {JOINING.seconds} s: {told(error)}") from None
    store.set_timeout(timedelta(days=30))
    return store


def dismiss() -> None:
    """Rank 0 ends without having needed the others: they may go."""
    if launched()[0] == 0 and launched()[1] > 1 and not _started and os.environ.get("TORCHELASTIC_USE_AGENT_STORE"):
        with suppress(Exception):
            rendezvous().set(LEADS, "0")


class Ranks:
    """This process's place among the others, and its lines to them: rank 0 has one to each, they have one to it."""

    def __init__(self, rank: int, size: int, device: torch.device, store: Any) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        self.numbers: dict[int, int] = {}  # of caches, by their ids
        self._count, self._waiting, self._closing = 0, list[Op](), False
        self._groups: dict[tuple[int, str], Group] = {}
        self._ours: dict[int, Any] = {}
        self._level = 0
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
            own = dist.group.WORLD if size == self.size else dist.new_group(list(range(size)))
            self._groups[size, mode] = Group(self, size, mode, own)
        return self._groups[size, mode]

    @contextmanager
    def level(self) -> Iterator[None]:
        """Ctrl-C waits until the ranks are at one place again."""
        if self._level or threading.current_thread() is not threading.main_thread():
            yield
            return
        late: list[Any] = []
        before = signal.signal(signal.SIGINT, lambda *about: late.append(about))
        self._level = 1
        try:
            yield
        finally:
            self._level = 0
            signal.signal(signal.SIGINT, before)
            if late and callable(before):
                before(*late[0])

    # --- of all ---

    def hear(self) -> Any:
        """The next ops from rank 0; None when it has ended."""
        return self._heard.get()

    def answer(self, value: Any) -> None:
        """To rank 0."""
        self._lines[0].sendall(_packed(["answer", value]))

    def report(self, error: BaseException) -> NoReturn:
        """Tell rank 0 why this one cannot go on, and end."""
        self._closing = True
        with suppress(OSError):
            self._lines[0].sendall(_packed(["error", told(error)]))
        time.sleep(2 * LAST_WORDS)
        os._exit(1)

    def fail(self, what: str) -> NoReturn:
        """End this process, and by that the others, with one line. Where another's end is the cause, that is told."""
        time.sleep(LAST_WORDS)
        self._die(what)

    def _die(self, what: str) -> NoReturn:
        with suppress(Exception):
            sys.stdout.flush()
        with suppress(OSError):
            os.write(2, f"outrider: {what}; all ranks end\n".encode())
        if self.rank == 0:  # the others need not say it, too
            for line in self._lines:
                with suppress(OSError):
                    line.sendall(_packed([["end"]]))
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
        elif self.rank == 0:
            self._die(f"rank {other} has ended (killed, or out of memory?)")
        elif self.rank == 1:
            self._die("rank 0 has ended (killed, or out of memory?)")
        else:
            os._exit(1)

    def close(self) -> None:
        """Let the others go."""
        if self._closing:
            return
        self._closing = True
        if self.rank == 0:
            self._waiting.append(["end"])
            for line in self._lines:
                with suppress(OSError):
                    line.sendall(_packed(self._waiting))
        with suppress(Exception):
            dist.destroy_process_group()


def _packed(data: Any) -> bytes:
    return json.dumps(data, separators=(",", ":")).encode() + b"\n"


def _heard(line: socket.socket, buffering: int = -1) -> Iterator[Any]:
    """The messages of a line, to its end."""
    with suppress(OSError, ValueError), line.makefile("rb", buffering) as messages:
        yield from map(json.loads, messages)
