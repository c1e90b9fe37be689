"""A small model guesses, token by token, with its own cache (Leviathan et al. 2211.17192, Chen et al. 2302.01318).

It samples with the request's parameters and the very noise the target will use (Gumbel coupling, 2408.07978), so that
where the two models agree on the distribution they agree on the token, at any temperature. For the acceptance rules
`rejection` and `block` it draws with other noise, independent of the target's, and reports the law it drew from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from outrider.errors import ConfigError
from outrider.runner import Runner
from outrider.sampling import Row, choose, law
from outrider.speculate import Drafter
from outrider.types import Draft, Sequence


@dataclass
class DraftModel(Drafter):
    """`model`: folder, hub id or embedded name. Its vocabulary must be the target's, up to padding rows."""

    num_speculative_tokens: int = 4
    model: str = ""

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("method draft_model needs a 'model', such as {'method': ..., 'model': 'tiny-draft'}")

    def attach(self, target: Runner, load: Callable[[str], Runner]) -> None:
        """Load the draft model, or take the one already loaded."""
        self.runner = load(self.model)
        self.vocab = target.model.config.vocab_size

    def propose(self, seqs: list[Sequence], k: int) -> list[Draft]:
        """One chain per sequence, up to k long; a fork that ends, or reaches the draft's context, stops early."""
        forks = [seq.fork() for seq in seqs]
        independent = self.acceptance_method in ("rejection", "block")
        laws: dict[int, list[torch.Tensor]] = {seq.id: [] for seq in seqs}
        context, readable = self.runner.max_len, self.runner.model.config.vocab_size
        for _ in range(k):
            alive = [f for f in forks if not f.finish_reason and f.room > 1 and len(f.tokens) < context]
            if readable < self.vocab:  # the target may have padding rows that this model cannot read
                alive = [f for f in alive if max(f.tokens) < readable]
            if not alive:
                break
            logits = torch.cat([own[-1:] for own in self.runner.extend(alive).logits])
            missing = self.vocab - logits.shape[1]  # padding rows one model has and the other has not
            logits = torch.nn.functional.pad(logits, (0, max(0, missing)), value=float("-inf"))[:, : self.vocab]
            rows = [Row(f) for f in alive]
            if independent:  # before the forks grow: penalties count their tokens
                for fork, q in zip(alive, law(logits, rows), strict=True):
                    laws[fork.id].append(q)
            for fork, token in zip(alive, choose(logits, rows, "draft" if independent else ""), strict=True):
                fork.accept([token])
        drafts = [Draft.chain(f.tokens[len(s.tokens) :]) for f, s in zip(forks, seqs, strict=True)]
        for seq, draft in zip(seqs, drafts, strict=True):
            draft.q = torch.stack(laws[seq.id]) if laws[seq.id] else None
        return drafts

    def forget(self, seq: Sequence) -> None:
        """Free the sequence's cache."""
        self.runner.free(seq)

    def kv_bytes(self, tokens: int) -> int:
        """Its own cache of the whole sequence."""
        return self.runner.kv.nbytes(tokens)
