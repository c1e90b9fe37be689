"""A small layer, which is its own next layer, guesses token after token from the target's last state.

From the final state that chose the sequence's last token and that token's embedding it makes the next state, in which
the target's own projection, over a vocabulary of frequent tokens, finds candidates; from that state and a candidate the
one after it, and so on. It is the recurrence of ReDrafter (2403.09919) as one gated layer,

    state + down(silu(gate x) * up x),  x = [norm(token), state],

which sees what Hydra's heads (2402.05109) see, with one set of weights for all depths. It keeps nothing but the last
state: a prompt costs it nothing, and a step a fraction of a decoder layer's (`eagle3`). The draft is a tree that grows
where it is likely (trees.py).

`model` is a folder, hub id or embedded name, as `outrider train recurrent` writes it: config.json with
`draft_vocab_size` and `intermediate_size`, and model.safetensors with mlp.{gate,up,down}_proj.weight, norm.weight, d2t,
and lm_head.weight if its projection is its own; else it is the target's embedding, and the target's head must be that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.config import option, whole
from outrider.draft import Draft
from outrider.errors import CheckpointError
from outrider.find import find
from outrider.heads import check_head, draft_tokens, guessing, read_head, take_out
from outrider.ops import Recurrence, native, rms_norm
from outrider.runner import Runner
from outrider.sampling import ahead
from outrider.sequence import Sequence
from outrider.trees import Growing, LastState, Root, Tree


class Head:
    """The layer and its projection. Raises CheckpointError and VocabularyMismatch for what does not fit."""

    def __init__(self, path: Path, target: Runner) -> None:
        model, (about, tensors) = target.model, Recurrent.read(path)
        c, self.device, self.embed, self.finish = model.config, model.device, model.embed, model.finish
        hidden, self.eps = c.hidden_size, c.rms_norm_eps
        vocab, wide = whole(about.get("draft_vocab_size"), 1, c.vocab_size), whole(about.get("intermediate_size"), 1)
        check_head(path, about.get("hidden_size"), about.get("vocab_size"), c)
        if vocab is None or wide is None:
            raise CheckpointError(
                f"{path}: config.json should have intermediate_size, and draft_vocab_size of at most {c.vocab_size}"
            )

        def take(name: str, *shape: int) -> Tensor:
            return take_out(tensors, name, shape, path).to(self.device, model.dtype)

        gates = [take(f"mlp.{name}_proj.weight", wide, 2 * hidden) for name in ("gate", "up")]
        self.gate_up = guessing(torch.cat(gates), gated=True)
        self.down = guessing(take("mlp.down_proj.weight", hidden, wide))
        self.norm = take("norm.weight", hidden)
        self.words = draft_tokens(tensors, vocab, c.vocab_size, path).to(self.device)
        if (shared := "lm_head.weight" not in tensors) and not c.tied:
            raise CheckpointError(f"{path}: no lm_head.weight, and this target's own projection is not its embedding")
        self.projection = guessing(
            self.embed(self.words) / model.multiplier if shared else take("lm_head.weight", vocab, hidden)
        )
        if tensors:
            raise CheckpointError(f"{path}: tensor {min(tensors)} has no place in a recurrent head")
        self.recurrence: Recurrence | None = None
        finished = c.logit_scale != 1 or c.logit_softcap is not None  # which the native call is not
        if (table := model.embeddings) is not None and self.projection.native and not finished:
            linears = self.gate_up, self.down, self.projection
            self.recurrence = Recurrence(*linears, self.norm, self.eps, c.vocab_size, table, self.words)

    def read(self, ids: list[int], states: Tensor) -> tuple[Tensor, Tensor]:
        """The states (n, hidden) behind tokens that were chosen from others, and their logits (n, draft vocabulary)."""
        token = rms_norm(self.embed(torch.tensor(ids, device=self.device)), self.norm, self.eps)
        out = self.down(self.gate_up(torch.cat([token, states], -1)), residual=states)
        return out, self.finish(self.projection(out, dtype=torch.float32))


@dataclass
class Recurrent(Growing, LastState):
    """Guesses with a recurrent head that was trained for the target."""

    depth: int = option(2, "of the tree, at most; the head runs once for each")

    @staticmethod
    def read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """config.json, and the tensors."""
        about, tensors = read_head(path, "model.safetensors")
        if "mlp.gate_proj.weight" not in tensors:
            raise CheckpointError(f"{path} holds no recurrent head: no tensor mlp.gate_proj.weight")
        return about, tensors

    def attach(self, target: Runner, load: Callable[[str], Runner]) -> None:
        """Load the head. Raises CheckpointError and VocabularyMismatch for one of another kind of target."""
        self.head = Head(find(self.model), target)
        self.words, self.vocab = self.head.words, target.model.config.vocab_size

    def propose(self, seqs: list[Sequence], k: int) -> list[Draft]:
        """All levels in one native call, where there are kernels for it."""
        compiled = self.head.recurrence if native.active != native.REFERENCE and k > 0 else None
        known = self.known(seqs) if compiled else {}
        wishes = [ahead(seq, min(k, self.depth, seq.room - 1), len(self.words)) for seq in seqs if seq.id in known]
        if compiled is None or None in wishes:
            return super().propose(seqs, k)
        roots = [
            (state.data_ptr(), token, *wish)
            for (state, token), wish in zip(known.values(), wishes, strict=True)
            if wish is not None
        ]
        grown = dict(zip(known, compiled.grow(roots, k, self.width, self.least), strict=True))
        drafts = (grown.get(seq.id, ([], [], [])) for seq in seqs)
        return [Draft(tokens, parents, trust=trust) for tokens, parents, trust in drafts]

    def roots(self, seqs: list[Sequence]) -> dict[int, Root]:
        """All in one product."""
        if not (known := self.known(seqs)):
            return {}
        before = torch.stack([state for state, _ in known.values()])
        states, logits = self.head.read([token for _, token in known.values()], before)
        return {own: (states[i : i + 1], logits[i : i + 1]) for i, own in enumerate(known)}

    def go_on(self, trees: list[Tree]) -> tuple[list[tuple[Tree, int]], Tensor]:
        """A step for each node of the border."""
        places = [(tree, node) for tree in trees for node in tree.border]
        before = torch.cat([tree.state(tree.parents[node]) for tree, node in places])
        states, logits = self.head.read([tree.tokens[node] for tree, node in places], before)
        for i, (tree, node) in enumerate(places):
            tree.states[node] = states[i : i + 1]
        return places, logits
