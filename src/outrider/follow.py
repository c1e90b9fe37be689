"""One rank decides, the others replay: what changes rank 0's caches, and its forwards, happens on all (parallel/).

Rank 0 runs the engine, the drafters and the sampling alone. What it does to a cache that lies cut over ranks is noted
as it happens, and sent along with the next forward: numbers and token ids, in one order for all. The others hold the
same models and caches, by number, and do the same; they know no requests, no clock and no drafts.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import astuple
from functools import partial
from typing import Any, NoReturn
from weakref import finalize

import torch

from outrider.engine import free_memory
from outrider.errors import OutOfMemory, OutriderError, PoolFull, interrupts_wait
from outrider.kv import Entry, OffloadKV, PagedKV, Plan
from outrider.kv.blocks import BLOCK
from outrider.load import load
from outrider.model import Model, Wanted
from outrider.parallel import MODES, CutModel, Ranks, columns_alone, ranks_for
from outrider.runner import Runner, rows_alone

CHANGES = ("catch_up", "adopt", "publish", "share", "reserve", "keep", "free")


class LeadingRunner(Runner):
    """A runner on rank 0 whose model and cache lie cut over ranks."""

    def __init__(
        self, model: Model, kv: Any, max_len: int | None = None, chunk: int = 512, base: Runner | None = None
    ) -> None:
        super().__init__(model, kv, max_len, chunk, base)
        if isinstance(kv, PagedKV):  # views are told of by `view`
            on_chip = kv.on_chip if isinstance(kv, OffloadKV) else None
            self._lead(kv, "cache", on_chip)

    @property
    def ranks(self) -> Ranks:
        """Those that share the model."""
        assert isinstance(self.model, CutModel)
        ranks: Ranks = self.model.group.ranks
        return ranks

    def view(self, text: str, alone: bool = False, layers: list[int] | None = None) -> Runner:
        """As Runner's, on all ranks."""
        runner, home = super().view(text, alone, layers), (self.base or self).kv
        self._lead(runner.kv, "view", self.ranks.numbers[id(home)], text, alone, layers)
        return runner

    def _lead(self, kv: Any, *op: Any) -> None:
        """Let the others make the cache that has been made here, by `op`, and do with theirs what is done with it."""
        assert isinstance(self.model, CutModel)
        ranks, number = self.ranks, self.ranks.number()
        ranks.numbers[id(kv)] = number
        ranks.tell(*op, number, self.model.number)
        for name in CHANGES:
            if (plain := getattr(kv, name, None)) is not None:
                setattr(kv, name, partial(_change, ranks, kv, number, name, plain))
        finalize(kv, ranks.tell, "drop", number)


def _change(ranks: Ranks, kv: Any, number: int, name: str, plain: Callable[..., Any], *given: Any) -> Any:
    with interrupts_wait():
        if name == "reserve":
            limits = (kv.most, -(-kv.modest // kv.block_bytes)) if isinstance(kv, PagedKV) else None
            told: list[Any] = [[astuple(e) for e in given[0].entries], limits]
        elif name == "publish":  # only what is new
            seq, tokens, length, root, last = given
            begin = kv.tables[seq].published * BLOCK if seq in kv.tables else length
            told = [seq, begin, tokens[begin : length if last else length // BLOCK * BLOCK], root, last]
            if not told[2]:
                return None
        else:
            told = list(given)
        try:
            found = plain(*given)
        except PoolFull:
            ranks.tell(name, number, told, "full")
            raise
        except OutOfMemory as error:  # real memory, which the others may still have: the caches differ now
            ranks.fail(str(error))
        ranks.tell(name, number, told, found)
        return found


def join() -> NoReturn:
    """What all ranks but 0 do on the command line: whatever rank 0 has been told to."""
    try:
        ranks = ranks_for(None, "auto")
        assert ranks is not None, "asked of one of several"
    except OutriderError as error:
        sys.exit(f"outrider: {error}")
    follow(ranks)


def follow(ranks: Ranks) -> NoReturn:
    """Do what rank 0 says, until it ends; then this process ends, too. Signals are for rank 0 to hear."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    logging.getLogger("outrider").setLevel(logging.ERROR)  # of the same model, rank 0 says the same
    try:
        Follower(ranks).run()
    except Exception as error:
        ranks.report(error)
    ranks.close()
    sys.exit(0)


class Follower:
    """What a rank that replays holds: models, caches and, of each, the plan of the forward that comes, by number."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.held: dict[int, Any] = {}
        self.plans: dict[int, Plan] = {}

    def run(self) -> None:
        """To the end."""
        while (ops := self.ranks.hear()) is not None:
            for name, *given in ops:
                if name == "end":
                    return
                if name in CHANGES:
                    self.change(name, *given)
                else:
                    getattr(self, name)(*given)

    def group(self, size: int, mode: str) -> None:
        """Another group of ranks."""
        self.ranks.group(size, mode)

    def load(
        self,
        name: str,
        dtype: str,
        quantization: str | None,
        activations: str | None,
        number: int,
        size: int,
        mode: str,
    ) -> None:
        """This rank's part of a model, if it is in the group."""
        group = self.ranks.group(size, mode)
        if self.ranks.rank < size:
            self.held[number] = load(name, dtype, "auto", None, quantization, activations, group).model

    def cache(self, on_chip: int | None, number: int, model: int) -> None:
        """A cache for a model."""
        if (own := self.held.get(model)) is not None:
            shape = own.config, own.dtype, own.device
            self.held[number] = PagedKV(*shape) if on_chip is None else OffloadKV(*shape, on_chip)

    def thin(self, model: int, layers: list[int], number: int) -> None:
        """Some of a model's layers."""
        if (own := self.held.get(model)) is not None:
            self.held[number] = own.thin(layers)

    def view(self, base: int, text: str, alone: bool, layers: list[int] | None, number: int, model: int) -> None:
        """A view of a cache."""
        if (own := self.held.get(model)) is not None:
            self.held[number] = Runner(own, self.held[base]).view(text, alone, layers).kv

    def drop(self, number: int) -> None:
        """Rank 0 has no use for it any more."""
        self.held.pop(number, None)
        self.plans.pop(number, None)

    def change(self, name: str, number: int, given: list[Any], found: Any) -> None:
        """Do with a cache what rank 0 has done with its own; it must come to the same."""
        if (kv := self.held.get(number)) is None:
            return
        with torch.inference_mode():
            if name == "reserve":
                entries, limits = given
                self.plans[number] = plan = Plan([Entry(*entry) for entry in entries])
                if limits is not None:
                    kv.most, kv.modest = limits[0], limits[1] * kv.block_bytes
                given = [plan]
            elif name == "publish":
                seq, begin, tokens, root, last = given
                given = [seq, [0] * begin + tokens, begin + len(tokens), tuple(root), last]
            elif name == "adopt":
                given = [*given[:2], tuple(given[2])]
            try:
                same = getattr(kv, name)(*given) == found
            except PoolFull:
                same = found == "full"
        if not same:
            raise RuntimeError(f"rank {self.ranks.rank} comes to another {name} than rank 0")

    def forward(
        self,
        model: int,
        kv: int,
        tokens: list[int],
        positions: list[int],
        lengths: list[int],
        rows: list[int] | None,
        points: list[int],
    ) -> None:
        """A forward, in which this rank's part is waited for; the states at `points` are wanted on rank 0."""
        if (own := self.held.get(model)) is not None:
            wanted, states = None if rows is None else Wanted(rows), dict.fromkeys(points)
            with torch.inference_mode():
                own.forward(tokens, positions, lengths, self.held[kv], self.plans[kv], states, wanted)

    def logits(self, model: int, rows: int) -> None:
        """The head alone."""
        if (own := self.held.get(model)) is not None:
            with torch.inference_mode():
                own.logits(torch.empty(rows, own.config.hidden_size, dtype=own.dtype, device=own.device))

    def check(self, model: int) -> None:
        """Whether rows, and columns, have the same bits in any company."""
        self.ranks.answer(check(self.held[model]) if model in self.held else [True, True])

    def memory(self, kind: str) -> None:
        """What is free of the device's, or of the host's."""
        self.ranks.answer(free_memory(self.ranks.device if kind != "cpu" else torch.device("cpu")))


def guarantee(model: Model) -> tuple[str, str]:
    """What the ranks' own checks leave of a guarantee, `bitwise` or `law`, and what is promised, in words."""
    if not isinstance(model, CutModel):
        return "bitwise", ""
    group = model.cut.group
    rows, columns = (all(each) for each in zip(check(model), *group.ranks.ask("check", model.number), strict=True))
    exactness = "bitwise" if rows and group.mode != "reduce" else "law"
    words = MODES[group.mode]
    if exactness == "bitwise" and group.mode == "gather" and not columns:
        words = (
            f"bits that depend on their number: {model.cut.whole.dtype} products here depend on how matrices are cut"
        )
    return exactness, f"{group.size} ranks, {group.mode}: {words}"


def check(model: CutModel) -> list[bool]:
    """Whether this rank's linears give a row the same bits in any company, and an output wherever its matrix is cut."""
    return [rows_alone(model), columns_alone(model)]
