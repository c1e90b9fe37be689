"""Lookahead decoding: the target itself guesses n-grams ahead of the text, in the same forward that verifies old ones.

Fu et al., "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding" (arXiv 2402.02057). A window of
`window_size` columns and `ngram_size` - 1 levels of supposed tokens rides along. The token at level l, column i stands
l + i places after the sequence's last token (itself level 0, column 0) and sees columns 0 ... i of level 0 and its own
column above: level 0 is a chain, the parent of (l, i) is (l - 1, i). What the target says after the top level becomes
the top, the others move down (a diagonal Jacobi iteration), and each column read downwards is an n-gram. They are
pooled by first token, the `guess_set_size` most recently seen of each; those that begin with the sequence's last token
are its guesses, merged by prefix. Output, and with `pool_from_prompt` the prompt, feed the pool too; `shared_pool`
keeps one for all sequences. The window's tokens are chosen as the request chooses its own, with the noise of their
places (acceptance length at temperature 0.8 on code: 1.28, with the argmax 1.13). `num_speculative_tokens` bounds the
guessed nodes (-1: all, guess_set_size * (ngram_size - 1)). The window's nodes, window_size * (ngram_size - 1) - 1 and
at first a few more or less, come on top, unless no guess is allowed or the request has too little room left. Pays where
more rows of a forward are nearly free (the paper takes W 15, N 5, G 15 on a GPU) and text is predictable, such as code.
The defaults are for a CPU: of settings with about 20 rows, few columns and long n-grams accepted most (code, greedy).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from outrider.config import MOST_NODES, option
from outrider.draft import Draft, Verdict
from outrider.drafters import check
from outrider.errors import ConfigError
from outrider.ops import argmax
from outrider.runner import Output
from outrider.sampling import Row, choose, few_threads
from outrider.sequence import Sequence
from outrider.speculate import Drafter


@dataclass
class Pool:
    """N-grams by their first token: for each at most `size` tails, the one seen last at the end."""

    size: int
    tails: dict[int, dict[tuple[int, ...], None]] = field(default_factory=dict)

    def add(self, ngram: tuple[int, ...]) -> None:
        """Enter an n-gram, or renew it; the first token's least recently seen one may have to go."""
        tails, tail = self.tails.setdefault(ngram[0], {}), ngram[1:]
        tails.pop(tail, None)
        tails[tail] = None
        if len(tails) > self.size:
            del tails[next(iter(tails))]

    def tree(self, token: int, k: int) -> Draft:
        """The tails of a token merged by prefix, at most k nodes, the most recently seen first."""
        return Draft.of_paths(reversed(self.tails.get(token, {})), k)


@dataclass
class Memory:
    """What is kept for one sequence. levels[l][i] is the window's token at level l, column i."""

    pool: Pool
    levels: list[list[int]]
    upto: int  # n-grams ending before this index are in the pool

    @property
    def window(self) -> list[int]:
        """Its nodes, level by level; (0, 0) is the sequence's last token and no node."""
        return [token for level in self.levels for token in level][1:]


@dataclass
class Lookahead(Drafter):
    """Guesses n-grams that the target found likely, and lets it look for more on the way."""

    num_speculative_tokens: int = option(-1, "guessed nodes; -1: guess_set_size * (ngram_size - 1)")
    window_size: int = option(3, "W: columns of the window")
    ngram_size: int = option(5, "N: tokens of an n-gram (lade's LEVEL)")
    guess_set_size: int = option(3, "G: n-grams kept for each first token")
    pool_from_prompt: bool = option(True, "take n-grams from the prompt, too")
    shared_pool: bool = option(False, "one pool for all sequences")

    def __post_init__(self) -> None:
        check(self, window_size=(1, MOST_NODES), ngram_size=(2, 16), guess_set_size=(1, MOST_NODES))
        if (nodes := self.window_size * (self.ngram_size - 1)) > MOST_NODES:
            raise ConfigError(f"window_size * (ngram_size - 1) must be at most {MOST_NODES}, not {nodes}")
        if self.num_speculative_tokens < 0:
            self.num_speculative_tokens = self.guess_set_size * (self.ngram_size - 1)
        self.pool = Pool(self.guess_set_size)
        self.memories: dict[int, Memory] = {}

    def propose(self, seqs: list[Sequence], k: int) -> list[Draft]:
        """Per sequence up to k guessed nodes, and behind them the window as riders."""
        return [self._draft(seq, k) for seq in seqs]

    def observe(self, seqs: list[Sequence], verdicts: list[Verdict], output: Output) -> None:
        """Move each window that took part by one step; a full one gives an n-gram for every column."""
        for seq, verdict, draft, logits in zip(seqs, verdicts, output.drafts, output.logits, strict=True):
            memory = self.memories.get(seq.id)
            if memory is None or draft.tokens[draft.verifiable :] != memory.window:
                continue  # it stayed at home, or was clipped: it is offered again as it was
            width = len(memory.levels[0])
            rows = [0, *range(draft.verifiable + 1, len(draft) + 1)][-width:]  # those of the top level
            before = seq.fork()  # as it was when the window was offered
            del before.tokens[len(before.tokens) - len(verdict.tokens) :]
            before.memory = {}
            first, *others = memory.levels
            places = [Row(before, first[1 : i + 1] + [level[i] for level in others]) for i in range(width)]
            # Custom processors and grammars are not asked: they may refuse the prefixes that a window supposes.
            plain = bool(seq.params.logits_processors or seq.constraint)
            with few_threads(logits):
                top = logits[rows]
            levels = [*memory.levels, argmax(top) if plain else choose(top, places)]
            full = len(levels) == self.ngram_size
            for ngram in zip(*levels, strict=True) if full else ():
                memory.pool.add(ngram)
            memory.levels = levels[1:] if full else [level[1:] for level in levels]  # while filling a column leaves

    def forget(self, seq: Sequence) -> None:
        """Drop the sequence's window and its own pool."""
        self.memories.pop(seq.id, None)

    def _draft(self, seq: Sequence, k: int) -> Draft:
        n, tokens = self.ngram_size, seq.tokens
        memory = self.memories.get(seq.id)
        if memory is None:
            pool = self.pool if self.shared_pool else Pool(self.guess_set_size)
            start = random.Random(0).choices(tokens, k=self.window_size + n - 2)  # the levels fill one by one
            memory = self.memories[seq.id] = Memory(pool, [start], 0 if self.pool_from_prompt else seq.prompt_len)
        for end in range(max(n - 1, memory.upto), seq.settled):
            memory.pool.add(tuple(tokens[end + 1 - n : end + 1]))
        memory.upto = max(memory.upto, seq.settled)
        guesses, width = memory.pool.tree(tokens[-1], k), len(memory.levels[0])
        if k < 1 or len(memory.levels) + width - 2 >= seq.room:
            return guesses
        memory.levels[0][0] = tokens[-1]
        window = memory.window
        parents = [at - 1 if at < width - 1 else at - width for at in range(len(window))]
        parents = guesses.parents + [len(guesses) + parent if parent >= 0 else -1 for parent in parents]
        return Draft(guesses.tokens + window, parents, riders=len(window))
