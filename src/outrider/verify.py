"""Walking a draft with the tokens the target chose.

By Law 1 the target's token after any prefix is determined, so verification needs no bookkeeping about how a draft was
made: from the sequence's last token, step to a child that carries the chosen token while there is one; then emit the
chosen token where the walk ends. Exact for chains and trees, greedy and sampled, whatever the drafter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.sampling import Row, choose, logprob
from outrider.types import Draft, Sequence, Verdict


def verify(seqs: list[Sequence], drafts: list[Draft], logits: list[Tensor]) -> list[Verdict]:
    """One verdict per sequence.

    logits[i] (1 + nodes, vocab) float32: row 0 follows the sequence's last token, row 1 + j follows node j.
    """
    rows, flat = [], []
    for seq, draft, own in zip(seqs, drafts, logits, strict=True):
        rows.append(Row(seq))
        rows += [Row(seq, [draft.tokens[n] for n in draft.path_to(i)]) for i in range(draft.verifiable)]
        flat.append(own[: 1 + draft.verifiable])
    chosen = choose(flat[0] if len(flat) == 1 else torch.cat(flat), rows)
    verdicts, at = [], 0
    for seq, draft, own in zip(seqs, drafts, logits, strict=True):
        verdict = walk(draft, chosen[at : at + 1 + draft.verifiable])
        at += 1 + draft.verifiable
        if (top := seq.params.logprobs) is not None:
            nodes = [-1, *verdict.path]
            verdict.logprobs = [logprob(own[n + 1], t, top) for n, t in zip(nodes, verdict.tokens, strict=True)]
        verdicts.append(verdict)
    return verdicts


def walk(draft: Draft, chosen: list[int]) -> Verdict:
    """Follow the chosen tokens down a draft: chosen[0] follows the sequence, chosen[1 + i] follows node i."""
    path: list[int] = []
    node = -1
    while True:
        token = chosen[node + 1]
        below = range(node + 1, draft.verifiable)
        child = next((i for i in below if draft.parents[i] == node and draft.tokens[i] == token), None)
        if child is None:
            return Verdict(path, [draft.tokens[i] for i in path] + [token], draft.verifiable)
        path.append(child)
        node = child
