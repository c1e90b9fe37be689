"""A recurrent head for a frozen target: a small gated layer, which is its own next layer (drafters/recurrent.py).

From the target's last state at place i and the embedding of token i + 1 it makes a state which, through the target's
own projection, is moved towards the law that the target has at i + 1; from that state and token i + 2 the next, and so
on. It needs neither keys nor what stands before, and learns and drafts at a fraction of what an EAGLE-3 head takes. All
else is in train/heads.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from outrider.llm import LLM
from outrider.train import heads
from outrider.train.heads import MLP, Batch, Norm
from outrider.train.settings import RecurrentSettings


class Head(heads.Head):
    """What is trained, by the names that the drafter reads."""

    def __init__(self, llm: LLM, settings: RecurrentSettings) -> None:
        super().__init__(llm, settings)
        hidden, self.wide = self.config.hidden_size, settings.wide
        self.norm = Norm(hidden, self.config.rms_norm_eps)
        self.mlp = MLP(2 * hidden, self.wide, hidden)

    def forward(self, state: Tensor, token: Tensor) -> Tensor:
        """The next states (n, hidden) from those before and the embeddings of the tokens chosen from them."""
        out: Tensor = state + self.mlp(torch.cat([self.norm(token), state], -1))
        return out

    def unroll(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        """The states."""
        n = len(batch.ids)
        rows = batch.learnt().to(batch.ids.device)
        state, ends = batch.last[rows].float(), batch.ends()[rows]
        for s in range(self.depth):
            state = self(state, self.embed(batch.ids[(rows + 1 + s).clamp(max=n - 1)].long()).float())
            inside = (rows + 1 + s < ends).nonzero().squeeze(1)
            yield state.index_select(0, inside), (rows + 1 + s)[inside]

    @torch.no_grad()
    def begin(self, llm: LLM, wanted: list[int]) -> None:
        """At first a state stays what it was."""
        super().begin(llm, wanted)
        self.mlp.down_proj.weight.zero_()

    def about(self) -> dict[str, Any]:
        """Its shape."""
        return {"architectures": ["RecurrentHead"], "intermediate_size": self.wide}

    def tensors(self) -> dict[str, Tensor]:
        """Without a projection that is the target's embedding."""
        shared = ["t2d", "lm_head.weight"][: 2 if self.config.tied and not self.lm_head.weight.requires_grad else 1]
        return {name: tensor for name, tensor in self.state_dict().items() if name not in shared}


class Trainer(heads.Trainer):
    """Learns a `Head`."""

    kind, method = Head, "recurrent"
