"""Several drafters guess together: their trees are laid over each other, and equal prefixes share a node.

`{"method": "merge", "drafters": [{"method": "ngram"}, {"method": "draft_model", "model": ...}]}`. The budget of
`num_speculative_tokens` nodes is spent depth by depth, at each depth on the earlier drafters first (`Draft.merge`);
each drafter guesses at most its own `num_speculative_tokens`. Where drafters agree the result is a chain, otherwise a
tree. The idea is as old as SpecInfer (2305.09781), whose trees come from several small models. Pays where drafters are
right at different times, such as a cheap look-up beside a draft model, and extra rows of a forward are nearly free; the
time to draft is the sum of theirs.

What a drafter may rely on in `observe`: `output.drafts` holds its own nodes first, as it proposed them (less those that
the request's room or the budget cut away), then the other drafters' nodes, then its own riders as the trailing ones.
Rows of `output` and nodes of `verdict.path` are numbered accordingly, and the path may go on through others' nodes.
Riders, which no verification pays for, are not counted in the budget.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from outrider.draft import Draft, Verdict
from outrider.drafters import inner
from outrider.errors import ConfigError
from outrider.runner import Output, Runner
from outrider.sequence import Sequence
from outrider.speculate import Drafter


@dataclass
class Merge(Drafter):
    """`drafters`: what would be a `speculative_config` each, at least one, the most trusted first."""

    num_speculative_tokens: int = 8
    drafters: list[Any] = field(
        default_factory=list, metadata={"help": "required: a speculative_config each, the most trusted first, in JSON"}
    )

    def __post_init__(self) -> None:
        if not isinstance(self.drafters, (list, tuple)) or not self.drafters:
            raise ConfigError("method merge needs 'drafters', a list such as [{'method': 'ngram'}, {'model': ...}]")
        self.parts = [inner("merge", given) for given in self.drafters]
        self.vocab = 2**63
        self.merged: dict[int, tuple[Draft, list[list[int]]]] = {}  # by sequence: the last draft and who sent what

    def attach(self, target: Runner, load: Callable[[str], Runner]) -> None:
        """Attach each drafter."""
        self.vocab = target.model.config.vocab_size
        for part in self.parts:
            part.attach(target, load)

    def propose(self, seqs: list[Sequence], k: int) -> list[Draft]:
        """All drafters' guesses in one tree per sequence, of at most k nodes and the riders."""
        guesses = [part.propose(seqs, min(k, part.num_speculative_tokens)) for part in self.parts]
        for guess in itertools.chain(*guesses):
            guess.__post_init__()  # it may have been changed since it was made: parents in a ring lead nowhere
        for i, seq in enumerate(seqs):
            draft, where = Draft.merge([own[i].clip(seq.room - 1, self.vocab) for own in guesses], k)
            parts = reversed([*zip(self.parts, where, strict=True)])  # what several guessed is the first one's
            by = {node: part.name for part, own in parts for node in own}
            self.merged[seq.id] = replace(draft, by=[by[node] for node in range(len(draft))]), where
        return [self.merged[seq.id][0] for seq in seqs]

    def observe(self, seqs: list[Sequence], verdicts: list[Verdict], output: Output) -> None:
        """Show each drafter what became of its draft, in its own numbering."""
        for i, part in enumerate(self.parts):
            if type(part).observe is not Drafter.observe:
                part.observe(seqs, *self._seen_by(i, seqs, verdicts, output))

    def remember(self, text: list[int]) -> None:
        """Let all who can remember it."""
        for part in self.parts:
            part.remember(text)

    def forget(self, seq: Sequence) -> None:
        """Let each drafter forget it."""
        self.merged.pop(seq.id, None)
        for part in self.parts:
            part.forget(seq)

    def kv_bytes(self, tokens: int) -> int:
        """What they hold together."""
        return sum(part.kv_bytes(tokens) for part in self.parts)

    def _seen_by(
        self, i: int, seqs: list[Sequence], verdicts: list[Verdict], output: Output
    ) -> tuple[list[Verdict], Output]:
        own_verdicts, drafts, rows = list[Verdict](), list[Draft](), list[int]()
        for seq, verdict, draft, start in zip(seqs, verdicts, output.drafts, output.starts, strict=True):
            merged, where = self.merged.get(seq.id, (draft, []))
            order = list(range(len(draft)))
            if where and merged is draft:  # else something between us changed the draft: show it as it is
                mine = dict.fromkeys(node for node in where[i] if node >= 0)
                first = [node for node in mine if node < draft.verifiable]
                riders = [node for node in mine if node >= draft.verifiable]
                order = first + [node for node in order[: draft.verifiable] if node not in mine] + riders
            number = {node: n for n, node in enumerate(order)} | {-1: -1}
            parents = [number[draft.parents[node]] for node in order]
            riding = sum(node >= draft.verifiable for node in order)
            q = None if draft.q is None else draft.q[order]
            own_verdicts.append(replace(verdict, path=[number[node] for node in verdict.path]))
            drafts.append(Draft([draft.tokens[node] for node in order], parents, q, riding))
            rows += [start, *(start + 1 + node for node in order)]
        return own_verdicts, output.of_rows(drafts, rows)
