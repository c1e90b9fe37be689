"""The Drafter protocol and `step`, the one decoding loop body, at every level."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from outrider.draft import Draft, Verdict
from outrider.outputs import SpecMetrics
from outrider.runner import Output, Runner
from outrider.sampling import Row, choose, law
from outrider.sequence import Sequence
from outrider.verify import verify


@dataclass
class Drafter:
    """Base of all drafters. A drafter only guesses (Law 5): it never touches masks, positions, rollback or sampling.

    Subclasses are dataclasses; their fields are the options of `speculative_config`. Whatever a drafter proposes, the
    output stays the target's; a good guess only makes it come sooner.
    """

    num_speculative_tokens: int = 4  # k: most tokens of a draft, over all its branches
    name: ClassVar[str] = ""  # set when it is found by its name
    acceptance_method: str = field(default="coupled", init=False, repr=False)  # the rule `step` verifies its drafts by
    posterior: tuple[float, float] = field(default=(0.09, 0.3), init=False, repr=False)  # epsilon, alpha of `typical`

    def attach(self, target: Runner, load: Callable[[str], Runner]) -> None:
        """Called once before use. `load(name)` gives a runner of another model on the target's device."""

    def propose(self, seqs: list[Sequence], k: int) -> list[Draft]:
        """Guess what follows each sequence, at most k nodes each; an empty Draft is always right."""
        raise NotImplementedError

    def observe(self, seqs: list[Sequence], verdicts: list[Verdict], output: Output) -> None:
        """See what became of the drafts. The sequences have grown by the verdicts' tokens."""

    def forget(self, seq: Sequence) -> None:
        """A sequence is done: give back what it held."""

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of keys and values this drafter will hold for a sequence of so many tokens."""
        return 0


@dataclass
class StepTimes:
    """Seconds that one step took, in all and by part."""

    total: float = 0.0
    draft: float = 0.0
    target: float = 0.0  # the forward and its verification
    rows: int = 0  # of the forward, prompts that were read with it not counted


def step(
    runner: Runner, drafter: Drafter, seqs: list[Sequence], k: int, times: StepTimes | None = None
) -> list[Verdict]:
    """Grow each sequence by at least one token, with one forward over all of them (and chunks of long prompts first).

    Each verdict's tokens are those really appended: a token that ends its sequence cuts what lies behind it.
    """
    began = time.perf_counter()
    k = k if any(seq.room > 1 for seq in seqs) else 0  # k counts nodes, not depth: what is too deep is clipped
    guesses, vocab = drafter.propose(seqs, k), runner.model.config.vocab_size
    drafts = [draft.clip(seq.room - 1, vocab) for seq, draft in zip(seqs, guesses, strict=True)]
    drafted = time.perf_counter()
    output = runner.extend(seqs, drafts)
    verdicts = verify(seqs, drafts, output.logits, drafter.acceptance_method, drafter.posterior)
    runner.commit(seqs, output, verdicts)
    verified = time.perf_counter()
    for seq, verdict in zip(seqs, verdicts, strict=True):
        moved = not runner.follows_paths and verdict.path != list(range(len(verdict.path)))
        seq.branched = seq.branched or moved
        taken = seq.accept(verdict.tokens)
        del verdict.tokens[taken:], verdict.path[taken:], verdict.logprobs[taken:]
    observing = time.perf_counter()
    drafter.observe(seqs, verdicts, output)
    ended = time.perf_counter()
    if times is not None:
        times.total, times.target = ended - began, verified - drafted
        times.rows = sum(1 + len(draft) for draft in drafts)
        times.draft = drafted - began + ended - observing
    return verdicts


class Autoregressive(Drafter):
    """A drafter that lets a runner write token by token: another model's, or the target's through a view.

    It samples with the request's parameters and the very noise the target will use (Gumbel coupling, 2408.07978), so
    that where both agree on the distribution they agree on the token, at any temperature. For the acceptance rules
    `rejection` and `block` it draws with other noise, independent of the target's, and reports the law it drew from.
    """

    runner: Runner  # whose guesses these are
    vocab: int  # the target's

    def propose(self, seqs: list[Sequence], k: int) -> list[Draft]:
        """One chain per sequence, up to k long; a fork that ends, or reaches the runner's context, stops early."""
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
            logits = logits[:, : self.vocab]
            if missing := self.vocab - logits.shape[1]:  # padding rows one model has and the other has not
                logits = torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
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
        """The runner's cache."""
        return self.runner.kv.nbytes(tokens)


class Nested(Drafter):
    """Any drafter inside a view of the target: `step` with the view as the target, until there are enough tokens.

    By Law 1 the view's tokens are the target's wherever the two agree, so this needs no rule of acceptance of its own.
    """

    inner: Drafter
    spec: str  # the view

    def attach(self, target: Runner, load: Callable[[str], Runner]) -> None:
        """The inner drafter's target is the view."""
        self.runner = target.view(self.spec)
        self.inner.attach(self.runner, load)

    def propose(self, seqs: list[Sequence], k: int) -> list[Draft]:
        """Chains of k tokens, each verified through the view."""
        forks = [seq.fork() for seq in seqs]
        for seq, fork in zip(seqs, forks, strict=True):
            fork.spec = seq.spec.inner = seq.spec.inner or SpecMetrics()
        lacking = {seq.id: k for seq in seqs}
        while alive := [f for f in forks if lacking[f.id] > 0 and not f.finish_reason and f.room > 1]:
            inner_k = min(self.inner.num_speculative_tokens, max(lacking[f.id] for f in alive) - 1)
            for fork, verdict in zip(alive, step(self.runner, self.inner, alive, inner_k), strict=True):
                lacking[fork.id] -= len(verdict.tokens)
                fork.spec.add(verdict.drafted, len(verdict.path), len(verdict.tokens))
        return [Draft.chain(f.tokens[len(s.tokens) : len(s.tokens) + k]) for f, s in zip(forks, seqs, strict=True)]

    def forget(self, seq: Sequence) -> None:
        """Free what both hold of it."""
        self.runner.free(seq)
        self.inner.forget(seq)

    def kv_bytes(self, tokens: int) -> int:
        """The view's and the inner drafter's."""
        return self.runner.kv.nbytes(tokens) + self.inner.kv_bytes(tokens)
