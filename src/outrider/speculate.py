"""The Drafter protocol and `step`, the one decoding loop body, at every level."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from outrider.runner import Output, Runner
from outrider.types import Draft, Sequence, Verdict
from outrider.verify import verify


@dataclass
class Drafter:
    """Base of all drafters. A drafter only guesses (Law 5): it never touches masks, positions, rollback or sampling.

    Subclasses are dataclasses; their fields are the options of `speculative_config`. Whatever a drafter proposes, the
    output stays the target's; a good guess only makes it come sooner.
    """

    num_speculative_tokens: int = 4
    name: ClassVar[str] = ""  # set when it is found by its name
    acceptance_method: str = field(default="coupled", init=False, repr=False)  # the rule `step` verifies its drafts by

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
    k = min(k, max(seq.room for seq in seqs) - 1)  # deeper guesses have no room
    guesses, vocab = drafter.propose(seqs, k), runner.model.config.vocab_size
    drafts = [draft.clip(seq.room - 1, vocab) for seq, draft in zip(seqs, guesses, strict=True)]
    drafted = time.perf_counter()
    output = runner.extend(seqs, drafts)
    verdicts = verify(seqs, drafts, output.logits, drafter.acceptance_method)
    runner.commit(seqs, output, verdicts)
    verified = time.perf_counter()
    for seq, verdict in zip(seqs, verdicts, strict=True):
        seq.branched = seq.branched or verdict.path != list(range(len(verdict.path)))
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
