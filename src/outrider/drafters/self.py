"""The target drafts for itself, through a view of its own cache: same weights, coarser ones or fewer, few keys or all.

Few keys pay where reading the keys, not the weights, is what a forward waits for: long contexts, large batches.
`streaming` and `snapkv` views are MagicDec's (2408.11049), `quantized` is QuantSpec's (2502.10424). The other half of
QuantSpec is `weights`: the same weights once more, rounded to 8 or 4 bits, over the keys that the target has verified,
for any model and without training. It pays where weights are what a forward waits for, short contexts at small
batches, as far as products with rounded weights take less time; it costs their memory.

`layers` leaves out all but so many of the layers, the first and the last always among them. Which, is chosen while
decoding (after SWIFT, 2410.06916, which judges sets of layers by forwards of their own): one layer is exchanged for
another for a while, and for good if more guesses come true so. Pays for deep models, whose layers do little each.

With `weights` or `layers` and no `view` all keys are seen, and held twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from outrider.config import MOST_NODES, SCHEMES, option
from outrider.draft import Draft, Verdict
from outrider.drafters import check
from outrider.errors import ConfigError
from outrider.kv import parse
from outrider.load import load as load_checkpoint
from outrider.runner import Output, Runner
from outrider.sequence import Sequence
from outrider.speculate import Autoregressive

JUDGED, TRIES = 48, 64  # guesses that judge a choice of layers, exchanges in all


@dataclass
class SelfDraft(Autoregressive):
    """`view`: which keys it sees, such as `retrieval:budget=4096,chunk=8` (kv/views.py)."""

    num_speculative_tokens: int = 4
    view: str = option("", "which keys it sees; empty: streaming:budget=512, or with weights or layers all")
    weights: str = option("", "int8 or int4: round the weights it drafts with; empty: the target's own")
    layers: int = option(0, "draft with so many of the layers, chosen while decoding; 0: all")
    min_token_prob: float = option(0.0, "no guess below this estimated probability, of all of its path; 0: k guesses")

    def __post_init__(self) -> None:
        check(self, min_token_prob=(0, 1))
        if self.view:
            parse(self.view)
        if self.weights and self.weights not in SCHEMES:
            raise ConfigError(f"weights of method self are rounded to {' or '.join(SCHEMES)}, not {self.weights!r}")

    def attach(self, target: Runner, load: Callable[[str], Runner]) -> None:
        """Look through the view, round weights, leave out layers. Raises ConfigError for what cannot be."""
        everything = f"streaming:budget={min(2**30, target.max_len + 2 * MOST_NODES)}"
        self.text = self.view or (everything if self.weights or self.layers else "streaming:budget=512")
        self.target, self.model = target, target.model
        self.vocab, depth = target.model.config.vocab_size, target.model.config.num_layers
        if self.weights:
            if target.path is None:
                raise ConfigError("weights of method self are read from the target's folder, and it has none")
            dtype, device = str(self.model.dtype).removeprefix("torch."), str(self.model.device)
            group = getattr(self.model, "group", None)  # of ranks, if it lies cut over some
            self.model = load_checkpoint(target.path, dtype, device, quantization=self.weights, group=group).model
        if self.layers and not 2 <= self.layers < depth:
            raise ConfigError(
                f"layers of method self must be at least 2 and fewer than this model's {depth}, not {self.layers}"
            )
        gaps = self.layers - 1
        self.kept = [(i * (depth - 1) + gaps // 2) // gaps for i in range(self.layers)] if self.layers else None
        self.runner, self.dice, self.tries = self._runner(self.kept), Random(0), 0
        self.trial: list[int] | None = None  # in place of `kept`
        self.rate, self.right, self.made = 0.0, 0, 0  # how often `kept` was right; of guesses since the last exchange
        self.guesses: dict[int, tuple[int, list[int]]] = {}  # of each sequence, the last ones, and where they stand

    def _runner(self, layers: list[int] | None) -> Runner:
        runner = self.target.view(self.text, layers=layers)
        runner.model = self.model if layers is None else self.model.thin(layers)
        return runner

    def propose(self, seqs: list[Sequence], k: int) -> list[Draft]:
        """Chains; which they were is what judges the layers: of a draft, others may have guessed a part."""
        drafts = super().propose(seqs, k)
        if self.kept is not None:
            self.guesses |= {s.id: (len(s.tokens), d.tokens) for s, d in zip(seqs, drafts, strict=True)}
        return drafts

    def observe(self, seqs: list[Sequence], verdicts: list[Verdict], output: Output) -> None:
        """Judge the layers, and now and then try others."""
        done = self.trial is None and self.tries == TRIES  # the last exchange is judged, as all are
        if self.kept is None or done or not self.kept[1:-1]:
            return
        for seq in seqs:
            start, guesses = self.guesses.pop(seq.id, (len(seq.tokens), []))
            for guess, token in zip(guesses, seq.tokens[start:], strict=False):
                self.made += 1
                if guess != token:
                    break
                self.right += 1
        if self.made < JUDGED:
            return
        rate, before = self.right / self.made, self.trial or self.kept
        if self.trial is None:
            self.rate, self.tries = rate, self.tries + 1
            left = [i for i in range(self.kept[-1]) if i not in self.kept]
            self.trial = sorted({*self.kept, self.dice.choice(left)} - {self.dice.choice(self.kept[1:-1])})
        elif rate > self.rate:
            self.kept, self.rate, self.trial = self.trial, rate, None
        else:
            self.trial = None
        self.right = self.made = 0
        if (after := self.trial or self.kept) != before:
            self.runner = self._runner(after)

    def forget(self, seq: Sequence) -> None:
        """And its guesses."""
        super().forget(seq)
        self.guesses.pop(seq.id, None)
