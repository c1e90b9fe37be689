"""Which drafted tokens stay: four rules, each one walk down a draft tree.

Below, p(v) is the target's distribution after node v (v = -1: after the sequence) with all that the request asks for,
penalties to top-p, on the prefix the node supposes; q(x) is the one that node x was drawn from (`Draft.q`), or
certainty of its token where the drafter gives none. A node's q holds given its ancestors and its earlier siblings:
siblings drawn independently carry the same q, siblings drawn without replacement the renormalised one.

`coupled` (default; arXiv 2408.07978). By Law 1 the target's token after any prefix is determined: step to a child that
    carries it while there is one, then emit it. The tokens are plain decoding's, whatever the drafter. Ignores q.

`rejection` (Leviathan et al. 2211.17192, Chen et al. 2302.01318; siblings: SpecInfer 2305.09781, 2402.14160).
    At v with p = p(v), for its children x in order: accept x with probability min(1, p(x) / q(x)) and go on from there;
    otherwise p <- norm((p - q)+). When no child is left, emit a draw from p.

`block` (Sun et al. 2403.10444, algorithm 2), for a chain x_1 ... x_n; never accepts fewer than `rejection` on average.
    r_0 = 1,  r_i = min(1, r_(i-1) p(x_i) / q(x_i)): the joint ratio, so a likely token makes up for an unlikely one.
    R_i = (r_i p_i - q_(i+1))+ over the vocabulary,  h_i = sum R_i / (sum R_i + 1 - r_i),  h_n = r_n.
    Accept up to the last i whose coin of probability h_i falls right; emit a draw from norm(R_i), or from p if i = n.
    A draft that branches is verified by `rejection`.

`typical` (Medusa, 2401.10774). LOSSY: accept x if p(x) > min(epsilon, alpha exp(-entropy of p)); keep the longest
    accepted path, the likeliest of several, and emit Law 1's token behind it.

`rejection` and `block` are exact in distribution: what they emit is distributed as plain decoding's tokens, but which
ones come out depends on the drafter. Their coins and draws are counter-based, keyed by (seed, length of the settled
text): a seed repeats its tokens, in any batch. They are independent of Law 1's noise, which makes both rules exact for
every drafter that gives no q, however it guesses. A drafter that gives q must draw with noise that no earlier step has
used (`choose` with a stream: `block` may reject a token because of those behind it), and whether a node exists must not
depend on its own token nor on those drawn after it. A step inside a step (a cascade's draft) stays `coupled` and gives
no q: its coins would be those of the outer one.
"""

from __future__ import annotations

from collections.abc import Callable, Container

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from outrider.config import Rule
from outrider.draft import Draft, Verdict
from outrider.errors import OutriderError
from outrider.ops import argmax
from outrider.sampling import Row, choose, coins, distribution, draw, logprob, refusal
from outrider.sequence import Sequence

COUPLED = Rule()
LARGE = 2**15  # a vocabulary of which a draw costs more than the calls that make it

Coin = Callable[[int, float], bool]
"""`coin(node, probability)`: whether it falls right. Asked at most once per node; tests enumerate both answers."""


def verify(
    seqs: list[Sequence], drafts: list[Draft], logits: Tensor, rule: Rule = COUPLED, best: list[int] | None = None
) -> list[Verdict]:
    """One verdict per sequence. If no token can be chosen for one (NaN, all banned, ...), its verdict says so.

    logits (rows, vocab) float32: of each sequence in turn, a row that follows its last token and one for each node.
    `best`: if known, each row's token for requests that edit no logits: the `argmax`, or by `draws`; -1: unknown.
    """
    verdicts = _coupled(seqs, drafts, logits, best) if rule.method == "coupled" else _judged(seqs, drafts, logits, rule)
    if any([seq.params.logprobs is not None for seq in seqs]):
        first = 0
        for seq, draft, verdict in zip(seqs, drafts, verdicts, strict=True):
            if (top := seq.params.logprobs) is not None and not verdict.error:
                rows = [first + 1 + node for node in (-1, *verdict.path)]
                verdict.logprobs = [logprob(logits[at], t, top) for at, t in zip(rows, verdict.tokens, strict=True)]
            first += 1 + len(draft.tokens)
    return verdicts


def _coupled(seqs: list[Sequence], drafts: list[Draft], logits: Tensor, best: list[int] | None) -> list[Verdict]:
    """Verdicts by Law 1. Tokens that the forward has chosen are taken; else greedy rows are chosen in one call, and the
    others in one, but for those that `_chosen` leaves to the walk."""
    if best is not None:  # `known`: the sequences whose tokens are in it
        known = [not seq.edited for seq in seqs]
    else:
        known = [seq.greedy and logits.is_cpu for seq in seqs]
        best = argmax(logits) if any(known) else []
    chosen = _chosen(seqs, drafts, logits, known) if not all(known) else {}
    verdicts: list[Verdict] = []
    first = 0
    for seq, draft, easy in zip(seqs, drafts, known, strict=True):
        if easy and not draft.tokens and best[first] >= 0:
            verdicts.append(Verdict([], [best[first]]))
        else:

            def token(at: int, seq: Sequence = seq, draft: Draft = draft, first: int = first, easy: bool = easy) -> int:
                if easy and best[first + at] >= 0:
                    return best[first + at]
                if first + at in chosen:
                    row, found = chosen[first + at]
                else:
                    row = Row(seq, list(draft.words(at - 1)))
                    found = choose(logits, [row], at=[first + at])[0]
                if found < 0:
                    raise refusal(logits[first + at], row)
                return found

            ends = seq.eos if seq.params.logits_processors or seq.constraint else ()
            verdicts.append(walk(draft, token, ends))
        first += 1 + len(draft.tokens)
    return verdicts


def _chosen(seqs: list[Sequence], drafts: list[Draft], logits: Tensor, known: list[bool]) -> dict[int, tuple[Row, int]]:
    """Rows of sequences that are not `known`, by number, and their tokens, which are chosen before the walk.

    Of some sequences that is the first row alone, and the walk chooses the others as it comes by: with custom
    processors, which hear only of prefixes that the target itself has written, with grammars, for whose masks most
    nodes of a draft need not pay, and on a CPU for draws from a large vocabulary, which take up to a millisecond each.
    """
    large = logits.is_cpu and logits.shape[1] >= LARGE
    rows: list[Row] = []
    places: list[int] = []
    first = 0
    for seq, draft, easy in zip(seqs, drafts, known, strict=True):
        if not easy:
            p = seq.params
            along = bool(p.logits_processors) or (large and p.temperature > 0) or seq.constraint is not None
            count = 0 if along else draft.verifiable
            rows += [Row(seq), *(Row(seq, list(draft.words(node))) for node in range(count))]
            places += range(first, first + 1 + count)
        first += 1 + len(draft.tokens)
    return dict(zip(places, zip(rows, choose(logits, rows, at=places), strict=True), strict=True))


def _judged(seqs: list[Sequence], drafts: list[Draft], logits: Tensor, rule: Rule) -> list[Verdict]:
    """Verdicts by the rules that look at distributions: all but `coupled`."""
    rows: list[Row] = []
    places: list[int] = []
    first = 0
    for seq, draft in zip(seqs, drafts, strict=True):
        rows += [Row(seq), *(Row(seq, list(draft.words(node))) for node in range(draft.verifiable))]
        places += range(first, first + 1 + draft.verifiable)
        first += 1 + len(draft.tokens)
    logits = logits if len(places) == len(logits) else logits[places]
    probs = distribution(logits, rows)
    verdicts: list[Verdict] = []
    first = 0
    for draft in drafts:
        own = slice(first, first + 1 + draft.verifiable)
        verdicts.append(_judge(draft, logits[own], rows[own], probs[own], rule))
        first = own.stop
    return verdicts


def _judge(draft: Draft, logits: Tensor, rows: list[Row], p: Tensor, rule: Rule) -> Verdict:
    if bool(p[0, 0].isnan()):
        return Verdict([], [], error=refusal(logits[0], rows[0]))
    if bool(p[:, 0].isnan().any()):  # somewhere in the draft there is nothing to choose: it may be there no more
        draft, p = Draft(), p[:1]
    seq = rows[0].seq
    if rule.method == "typical":
        path = typical(draft, p, rule)
        last = path[-1] + 1 if path else 0
        token = choose(logits, [rows[last]], at=[last])[0]
    else:
        flips = coins(seq, draft.verifiable, "accept")
        chain = draft.parents[: draft.verifiable] == list(range(-1, draft.verifiable - 1))
        judge = block if rule.method == "block" and chain else rejection
        path, left = judge(draft, p, lambda node, probability: flips[node] < probability)
        token = draw(left, seq, "emit")
    return Verdict(path, [draft.tokens[i] for i in path] + [token], draft.verifiable)


def walk(draft: Draft, chosen: Callable[[int], int], ends: Container[int] = ()) -> Verdict:
    """Follow the chosen tokens down a draft: chosen(0) follows the sequence, chosen(1 + i) follows node i.

    A token of `ends` ends the sequence, and the walk. So does an OutriderError of `chosen`: what stands before it is
    emitted, as plain decoding would have done, and the next step will meet it again.
    """
    path: list[int] = []
    tokens: list[int] = []
    node = -1
    while True:
        try:
            token = chosen(node + 1)
        except OutriderError as error:
            return Verdict(path[:-1], tokens, draft.verifiable, error=None if tokens else error)
        tokens.append(token)
        for child in range(node + 1, draft.verifiable):
            if draft.parents[child] == node and draft.tokens[child] == token:
                break
        else:
            child = -1
        if child < 0 or token in ends:
            return Verdict(path, tokens, draft.verifiable)
        path.append(child)
        node = child


def rejection(draft: Draft, p: Tensor, coin: Coin) -> tuple[list[int], Tensor]:
    """The accepted path and the distribution (vocab,) of the token behind it.

    p (1 + nodes, vocab): row 1 + i follows node i.
    """
    path: list[int] = []
    node, left = -1, p[0]
    for i in range(draft.verifiable):  # parents come first: one pass meets the children of every accepted node
        if draft.parents[i] == node:
            token, q = draft.tokens[i], _drawn_from(draft, i, p)
            if coin(i, min(1.0, float(left[token] / q[token]))):
                path.append(i)
                node, left = i, p[i + 1]
            else:
                left = _normal((left - q).clamp(min=0), left)
    return path, left


def block(draft: Draft, p: Tensor, coin: Coin) -> tuple[list[int], Tensor]:
    """As `rejection`, for a chain, which is judged as a whole."""
    n, ratio, accepted = draft.verifiable, 1.0, 0
    left = _normal((p[0] - _drawn_from(draft, 0, p)).clamp(min=0), p[0]) if n else p[0]
    for i in range(n):
        token, after = draft.tokens[i], p[i + 1]
        ratio = min(1.0, ratio * float(p[i, token] / _drawn_from(draft, i, p)[token]))
        if i + 1 < n:
            rest = (ratio * after - _drawn_from(draft, i + 1, p)).clamp(min=0)
            mass = float(rest.sum())
            chance = mass / (mass + (1 - ratio)) if mass + (1 - ratio) > 0 else 1.0
        else:
            rest, chance = after, ratio
        if coin(i, chance):
            accepted, left = i + 1, _normal(rest, after)
    return list(range(accepted)), left


def typical(draft: Draft, p: Tensor, rule: Rule) -> list[int]:
    """The longest path whose every token is typical of the target, the likeliest among equals. Lossy."""
    floor = (rule.alpha * torch.special.entr(p).sum(-1).neg().exp()).clamp(max=rule.epsilon).tolist()
    scores: dict[int, tuple[int, float]] = {-1: (0, 1.0)}  # accepted nodes: their depth and likelihood
    for i in range(draft.verifiable):
        parent = draft.parents[i]
        likely = float(p[parent + 1, draft.tokens[i]])
        if parent in scores and likely > floor[parent + 1]:
            depth, so_far = scores[parent]
            scores[i] = depth + 1, so_far * likely
    return draft.path_to(max(scores, key=scores.__getitem__))


def _drawn_from(draft: Draft, node: int, p: Tensor) -> Tensor:
    """What a node was drawn from (vocab,); certainty if that is not known (no q, or a row that lacks its token)."""
    token = draft.tokens[node]
    if draft.q is not None and draft.q[node, token] > 0:
        q = draft.q[node].to(p)
        return q / q.sum()  # which is 1 but for rounding: in half precision by up to a hundredth
    return one_hot(torch.tensor(token, device=p.device), p.shape[-1]).to(p)


def _normal(weights: Tensor, otherwise: Tensor) -> Tensor:
    """weights / their sum; `otherwise` if that is nothing, which only rounding can bring about."""
    total = weights.sum()
    return weights / total if total > 0 else otherwise
