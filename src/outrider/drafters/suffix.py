"""Suffix decoding: what followed the longest matching suffix, weighed by how often, here and in earlier outputs.

All places where the sequence's last n tokens stand are followed together: a token's estimated probability is its share
of the ways on, times that of the path so far. A longer match is trusted further. Of all n, in the sequence itself and
in earlier outputs, the guess with most expected tokens (the sum of its path probabilities) is taken. Source:
SuffixDecoding (2411.04975) and its Arctic Inference; names and defaults are vLLM's. Pays where texts repeat themselves
or each other: agents, editing, code, a question asked again.

In place of a suffix tree stand hash chains, as in deflate: for n-grams of SIZES tokens the last place where one ended,
and from each place the distance to the one before; the last FOLLOWED are compared with the tail. Counts are exact up to
so many places, and of the most recent ones beyond. Memory: up to 0.4 kB a token, of running sequences until they end
and of the last `suffix_decoding_max_cached_requests` outputs, but of no more than CACHED_TOKENS of those.
"""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from dataclasses import dataclass
from typing import Any, ClassVar

from outrider.config import MOST_NODES, option
from outrider.draft import Draft
from outrider.drafters import check
from outrider.ops import native
from outrider.sequence import Sequence
from outrider.speculate import Drafter

SIZES = (8, 4, 2, 1)  # of the n-grams looked up; matches between them are found by comparing
FOLLOWED = 64  # places per n-gram
CACHED_TOKENS = 2**20
END = -1  # stands behind each earlier output


class Index:
    """A text in which its own end is looked for: the reference of csrc/suffix.cpp. Token i stands at place base + i."""

    def __init__(self) -> None:
        self.text, self.base = array("i"), 0
        self.last: list[dict[int, int]] = [{} for _ in SIZES]  # hash of an n-gram -> place after its last occurrence
        self.back = [array("i") for _ in SIZES]  # per place, how far back the one before it is; 0 = none

    def __len__(self) -> int:
        return len(self.text)

    def enter(self, tokens: list[int], apart: bool) -> None:
        """Append tokens. N-grams reach back into what stands before them unless they are `apart`."""
        start = len(self.text) if apart else 0
        self.text.extend(tokens)
        for size, last, back in zip(SIZES, self.last, self.back, strict=True):
            for at in range(len(back), len(self.text)):
                place, distance = self.base + at, 0
                if at - start >= size:
                    key = hash(tuple(self.text[at - size : at]))
                    distance = place - last.get(key, place)
                    last[key] = place
                back.append(distance)

    def drop(self, length: int) -> None:
        """Take the first tokens out."""
        for size, last, back in zip(SIZES, self.last, self.back, strict=True):
            for at in range(size, length):
                key = hash(tuple(self.text[at - size : at]))
                if last.get(key) == self.base + at:
                    del last[key]
            del back[:length]
        del self.text[:length]
        self.base += length

    def guess(
        self, past: Index, tokens: list[int], settled: int, depth: int, k: int, factor: float, least: float, width: int
    ) -> tuple[list[int], list[int], list[float]]:
        """What is expected behind `tokens`, by them or by `past`: tokens, parents, trust.

        They begin with this text. The first `settled` never change, and are entered.
        """
        self.enter(tokens[len(self) : settled], False)
        known, best, guess = len(self), 0.0, (list[int](), list[int](), list[float]())
        self.text.extend(tokens[settled:])
        tail = self.text[-depth:].tolist()
        for where in (self, past):
            found = where._search(tail)
            for n in sorted(set(found.values()) - {0}, reverse=True):
                size = min(k, int(factor * n + 1e-6))
                if size <= best:  # not even a sure guess of this length would be worth more
                    break
                places = sorted((at for at, match in found.items() if match >= n), reverse=True)
                worth, own = where._follow(places, n, size, least, width)
                if worth > best:
                    best, guess = worth, own
        del self.text[known:]
        return guess

    def chain(self, past: Index, tokens: list[int], settled: int, k: int) -> tuple[list[int], list[float]]:
        """k tokens, each what followed the longest n-gram before it the last time, here or else in `past`; trust.

        `tokens` and `settled` as in `guess`.
        """
        self.enter(tokens[len(self) : settled], False)
        known, copied, trust = len(self), list[int](), list[float]()
        self.text.extend(tokens[settled:])
        while len(copied) < k:
            tail = [*self.text[-SIZES[0] :], *copied]
            each = ((where._next(tail, i), size) for i, size in enumerate(SIZES) for where in (self, past))
            token, size = next((found for found in each if found[0] != END), (END, 0))
            if token == END:
                break
            copied.append(token)
            trust.append(1 - 1 / (1 + size))
        del self.text[known:]
        return copied, trust

    def _next(self, tail: list[int], i: int) -> int:
        """What followed the last n-gram of this size the last time; END if nothing did."""
        at = self.last[i].get(hash(tuple(tail[-SIZES[i] :]))) if SIZES[i] <= len(tail) else None
        return END if at is None else self.text[at - self.base]

    def _search(self, tail: list[int]) -> dict[int, int]:
        """Places behind occurrences of the end of `tail`, and how many tokens match there."""
        found: dict[int, int] = {}
        reverse = [*tail[::-1], END - 1]  # which is no token: comparing ends there
        for size, last, back in zip(SIZES, self.last, self.back, strict=True):
            at = last.get(hash(tuple(tail[-size:])), -1) - self.base if size <= len(tail) else -1
            for _ in range(FOLLOWED):
                if at < 0:
                    break
                if at not in found:
                    n = 0
                    while n < at and self.text[at - 1 - n] == reverse[n]:
                        n += 1
                    found[at] = n
                at = at - back[at] if back[at] else -1
        return found

    def _follow(
        self, places: list[int], match: int, size: int, least: float, width: int
    ) -> tuple[float, tuple[list[int], list[int], list[float]]]:
        """What follows `places` (most recent first), at most `size` nodes, `width` children each, and what it is worth.

        The likeliest paths come first, none below `least`. A copy that reaches the end of the text goes on into itself.
        The trust in a node is its share of the ways on, less the more tokens matched before them.
        """
        tokens, parents, trust, worth, order, end = list[int](), list[int](), list[float](), 0.0, 0, len(self.text)
        # minus the path's probability, first met, depth, token, the node above, trust, places behind it
        heap: list[tuple[float, int, int, int, int, float, list[int]]] = [(-1.0, 0, 0, END, -1, 0.0, places)]
        while heap:
            cost, _, depth, token, node, own, places = heapq.heappop(heap)
            if depth:
                worth -= cost
                tokens.append(token)
                parents.append(node)
                trust.append(own)
                node = len(tokens) - 1
            if len(tokens) == size:
                break
            after: dict[int, list[int]] = {}
            for at in places:
                token = self.text[at] if at < end else tokens[Draft(tokens, parents).path_to(node)[at - end]]
                if token != END:
                    after.setdefault(token, []).append(at + 1)
            total, sure = sum(map(len, after.values())), 1 - 1 / (1 + match + depth)
            for token, going in heapq.nsmallest(width, after.items(), key=lambda item: -len(item[1])):
                if -cost * (share := len(going) / total) >= least:
                    order += 1
                    heapq.heappush(heap, (cost * share, order, depth + 1, token, node, share * sure, going))
        return worth, (tokens, parents, trust)


@dataclass
class Suffix(Drafter):
    """Goes on as the sequence, and outputs before it, did after the same tokens."""

    cheap: ClassVar[bool] = True
    num_speculative_tokens: int = 16
    suffix_decoding_max_tree_depth: int = option(24, "longest match, in tokens")
    suffix_decoding_max_cached_requests: int = option(10000, "earlier outputs remembered; 0: none")
    suffix_decoding_max_spec_factor: float = option(1.0, "guesses per matched token")
    suffix_decoding_min_token_prob: float = option(0.1, "no guess below this estimated probability")
    tree: bool = option(False, "guess branches, too; without the kernels, taking another than the first costs bitwise")

    def __post_init__(self) -> None:
        check(
            self,
            suffix_decoding_max_tree_depth=(1, MOST_NODES),
            suffix_decoding_max_cached_requests=(0, 1e9),
            suffix_decoding_max_spec_factor=(0, 1e9),
            suffix_decoding_min_token_prob=(0, 1),
        )
        self.index: type[Index] = Index if native.active == native.REFERENCE else native.kernels.SuffixIndex
        self.indexes: dict[int, Index] = {}
        self.past, self.lengths = self.index(), deque[int]()
        self.full = False  # k tokens each time, looked up one by one: for who judges no guess by its trust

    def propose(self, seqs: list[Sequence], k: int) -> list[Draft]:
        """One chain (or tree) of at most k nodes per sequence; empty without a match."""
        return [self._guess(seq, k) for seq in seqs]

    def look(self, bit: int) -> tuple[Any, ...]:
        """How `auto` asks without a Draft between (control.Look)."""
        return (
            bit, self.indexes, self.index, self.past, self.suffix_decoding_max_tree_depth,
            self.suffix_decoding_max_spec_factor, self.suffix_decoding_min_token_prob, self.tree,
        )  # fmt: skip

    def forget(self, seq: Sequence) -> None:
        """Drop the sequence's index; remember its output, and the end of the prompt, which an answer starts from."""
        self.indexes.pop(seq.id, None)
        if seq.settled > seq.prompt_len and self.suffix_decoding_max_cached_requests:
            first = max(0, seq.prompt_len - self.suffix_decoding_max_tree_depth)
            self.remember(seq.tokens[first : seq.settled])

    def remember(self, text: list[int]) -> None:
        """Take a text for an earlier output."""
        tokens = [*text[1 - CACHED_TOKENS :], END]
        self.past.enter(tokens, True)
        self.lengths.append(len(tokens))
        while len(self.lengths) > self.suffix_decoding_max_cached_requests or len(self.past) > CACHED_TOKENS:
            self.past.drop(self.lengths.popleft())

    def _guess(self, seq: Sequence, k: int) -> Draft:
        index = self.indexes.get(seq.id)
        if index is None:
            index = self.indexes[seq.id] = self.index()
        if self.full:
            return Draft.chain(*index.chain(self.past, seq.tokens, seq.settled, k))
        tokens, parents, trust = index.guess(
            self.past, seq.tokens, seq.settled, self.suffix_decoding_max_tree_depth, k,
            self.suffix_decoding_max_spec_factor, self.suffix_decoding_min_token_prob, k if self.tree else 1,
        )  # fmt: skip
        return Draft(tokens, parents, trust=trust)
