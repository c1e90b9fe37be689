"""A model of which each rank has a part: rank 0 tells the others of its forwards, and all run them together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from outrider.errors import interrupts_wait, told
from outrider.model import Attends, Model, Wanted
from outrider.ops import Linear, launches
from outrider.parallel.cuts import Cut
from outrider.parallel.group import Group


@dataclass
class CutModel(Model):
    """A model of which this rank has a part. On rank 0, its forwards are told to the others, who run them, too."""

    cut: Any = None  # a Cut
    number: int = 0  # by which the ranks know it

    def __post_init__(self) -> None:
        super().__post_init__()
        # none: a first run calls collectives twice, when the others may have had theirs; and these are told the tokens
        self.graphs = None
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
        tokens: list[int] | Tensor,
        positions: list[int],
        lengths: list[int],
        kv: Attends,
        plan: Any,
        states: dict[int, Tensor] | None = None,
        wanted: Wanted | None = None,
    ) -> Tensor:
        """As Model's. What fails here ends all ranks: they would no longer be at the same place."""
        rows, number = None if wanted is None else wanted.rows, self.group.ranks.numbers.get(id(kv))
        points = list(states or ())  # these, too, decide which rows leave the last layer
        with self._together("forward", self.number, number, tokens, positions, lengths, rows, points):
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
        with interrupts_wait():
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
    if launches(model.dtype, model.device):  # there the shares of a sum follow from how many outputs there are
        return False
    cut: Cut = model.cut
    generator = torch.Generator().manual_seed(1)
    experts = cut.whole.mixture
    for inputs in (cut.whole.hidden_size, experts.width if experts else cut.whole.intermediate_size):
        weight = torch.randn(cut.whole.hidden_size, inputs, generator=generator, dtype=torch.float32).to(
            model.device, model.dtype
        )
        x = torch.randn(3, inputs, generator=generator, dtype=torch.float32).to(model.device, model.dtype)
        parts = [Linear(weight[own.start : own.stop].clone())(x) for own in cut.hidden]
        if not torch.equal(torch.cat(parts, 1), Linear(weight.clone())(x)):
            return False
    return True
