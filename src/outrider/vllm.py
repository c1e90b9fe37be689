"""Our look-ups as the drafter inside vLLM: `outrider.vllm.Proposer`.

    vllm.LLM(model, speculative_config={
        "method": "custom_class", "model": "outrider.vllm.Proposer", "num_speculative_tokens": 8})

vLLM hands no options through; the environment variable OUTRIDER_VLLM says how drafts are made, in the short form of our
command line (`suffix`, the default; `ngram:prompt_lookup_max=8`; `rest:datastore=FILE`) or as JSON
(`{"method": "merge", "drafters": [{"method": "suffix"}, {"method": "ngram"}]}`). Verification, and so the promise, is
vLLM's: the distribution stays, a seed's tokens may not.

Read from vLLM 0.30 to 0.33: it calls `propose` after every step, without request ids; rows of its batch move, and one
draft too long ends its engine. So a row is known by its tokens, and whatever goes wrong here costs its drafts only.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections.abc import Sequence as Seq
from operator import itemgetter, mul
from types import SimpleNamespace
from typing import Any

import numpy as np

from outrider import drafters
from outrider.config import SamplingParams, SpeculativeConfig
from outrider.draft import Draft
from outrider.errors import ConfigError, told
from outrider.sequence import Sequence
from outrider.speculate import Drafter

log = logging.getLogger(__name__)
VARIABLE = "OUTRIDER_VLLM"
DEFAULT = "suffix"
PATIENCE = 8  # calls until a request that is not seen counts as ended
EDGE = 512  # last tokens by which requests are told apart
Ids = np.ndarray[Any, Any]


class Known:
    """A request, by what it has said so far."""

    def __init__(self, prompt: list[int], copy: Ids) -> None:
        self.copy = copy  # a row as long as they get
        self.seq = Sequence(prompt, SamplingParams(temperature=0, max_tokens=2**31), seed=0)
        self.copy[: len(prompt)] = prompt
        self.seen = 0  # the call in which it was last there

    def begins(self, tokens: Ids) -> bool:
        """Whether these tokens go on from what it has said last; to take one request for another costs drafts only."""
        n = len(self.seq.tokens)
        if n > len(tokens) or self.seq.tokens[-1] != tokens[n - 1]:
            return False
        last = slice(max(0, n - EDGE), n)
        return self.copy[last].tobytes() == tokens[last].tobytes()

    def grow(self, new: list[int]) -> None:
        """Take over what has come since."""
        n = len(self.seq.tokens)
        self.copy[n : n + len(new)] = new
        self.seq.tokens += new


class Proposer:
    """What vLLM makes of `custom_class`. Raises ConfigError for a method that needs more than the tokens."""

    def __init__(self, vllm_config: Any, *_: Any, **__: Any) -> None:
        self.k = int(vllm_config.speculative_config.num_speculative_tokens)
        model = vllm_config.model_config
        self.vocab, self.longest = int(model.get_vocab_size()), int(model.max_model_len)
        drafter = drafters.create(chosen(os.environ.get(VARIABLE) or DEFAULT))
        self.parts = look_ups(drafter)
        tokenizer = _tokenizer(model) if any(getattr(part, "datastore", "") for part in self.parts) else None
        shaped = SimpleNamespace(config=SimpleNamespace(vocab_size=self.vocab))
        target: Any = SimpleNamespace(model=shaped, tokenizer=tokenizer, follows_paths=True)
        for part in self.parts:
            part.attach(target, _no_model)
            if hasattr(part, "tree"):
                part.tree = False  # of which vLLM would take one path
            if hasattr(part, "full"):
                part.full = True  # vLLM has no use for what is known about guesses
        self.budgets = [self.k if part is drafter else min(self.k, part.num_speculative_tokens) for part in self.parts]
        self.learning: list[Any] = [part for part in self.parts if hasattr(part, "follow")]
        self.known: list[Known] = []  # those at the places of the last call's rows first
        self.calls = 0
        self.level = logging.WARNING

    def load_model(self, *_: Any, **__: Any) -> None:
        """Called when the target is loaded; there is nothing to load here."""

    def propose(self, sampled: Any, lengths: Any, tokens: Any, *_: Any, **__: Any) -> list[list[int]]:
        """Drafts of at most k tokens, a list for each row of the batch.

        sampled: per row the tokens that the step gave, none if it still reads its prompt. lengths: per row how many of
        its `tokens` (rows, max_model_len) count. Never raises; what cannot be a request's row gets no draft.
        """
        drafts: list[list[int]] = []
        try:
            drafts += [[] for _ in sampled]
            self._fill(drafts, sampled, lengths, tokens)
        except Exception as error:  # it would end the engine, and with it every request
            log.log(self.level, "no drafts in this step: %s", told(error))
            log.debug("where drafting failed", exc_info=error)
            self.level = logging.DEBUG  # it may be so in every step
        return drafts

    def _fill(self, drafts: list[list[int]], sampled: Any, lengths: Any, tokens: Any) -> None:
        self.calls += 1
        rows: dict[int, Known] = {}
        own_rows = zip(sampled if tokens.dtype.kind in "iu" else (), map(int, lengths), strict=False)
        for i, (own, length) in enumerate(own_rows):
            if 0 < len(own) < length and (known := self._find(i, tokens[i, :length], len(own))):
                rows[i] = known
        there = list(rows.values())
        absent = [known for known in self.known if known.seen != self.calls]
        self.known = there + [known for known in absent if self.calls - known.seen <= PATIENCE]
        for known in absent:
            if self.calls - known.seen > PATIENCE:
                for part in self.parts:
                    part.forget(known.seq)
        seqs = [known.seq for known in there]
        guesses = [part.propose(seqs, k) for part, k in zip(self.parts, self.budgets, strict=True)]
        for i, *own in zip(rows, *guesses, strict=True):
            drafts[i] = self._chain(own, self.longest - int(lengths[i]) - 1)

    def _find(self, row: int, tokens: Ids, fresh: int) -> Known | None:
        """The request that these tokens are of; most often it stands where it stood in the last call.

        None if they can be no request's: ids that are none (beyond the vocabulary there are those of images), too many.
        """
        there = self.known[row : row + 1] + self.known
        known = next((k for k in there if k.seen != self.calls and k.begins(tokens)), None)
        new = tokens[len(known.seq.tokens) if known else 0 :].tolist()
        if len(tokens) > self.longest or (new and (min(new) < 0 or max(new) >= 2**31)):
            return None
        start = -1
        if known is None:
            known, start = Known(new[:-fresh], np.empty(self.longest, tokens.dtype)), 0
            new = new[-fresh:]
        for part in self.learning:
            part.follow([*known.seq.tokens[start:], *new])
        known.seen = self.calls
        known.grow(new)
        return known

    def _chain(self, guesses: list[Draft], room: int) -> list[int]:
        """The path of these guesses from which most is expected: vLLM takes chains only."""
        _, path = max(map(expected, guesses), key=itemgetter(0))
        tokens = map(int, path[: max(0, min(self.k, room))])
        return list(itertools.takewhile(lambda token: 0 <= token < self.vocab, tokens))


def chosen(text: str) -> SpeculativeConfig:
    """How drafts are made. Raises ConfigError for what cannot be, and for what is vLLM's to say."""
    if text.lstrip().startswith("{"):
        try:
            given = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{VARIABLE} is not JSON: {error}") from None
        config = SpeculativeConfig.of(given)
    else:
        config = SpeculativeConfig.parse(text)
    if config != SpeculativeConfig(config.method, options=config.options):
        raise ConfigError(
            f"{VARIABLE} says what drafts are made of; how many tokens, and how they are verified, is vLLM's"
        )
    return config


def expected(draft: Draft) -> tuple[float, Seq[int]]:
    """How many tokens of its best path are expected to be right, and the path."""
    trust = draft.trust or [1.0] * len(draft.tokens)
    if draft.is_chain and not draft.riders:
        return sum(itertools.accumulate(trust, mul)), draft.tokens
    sure: list[tuple[float, float]] = []  # of each node: that it is reached, and the tokens down to it
    for parent, own in zip(draft.parents[: draft.verifiable], trust, strict=False):
        reached, worth = sure[parent] if parent >= 0 else (1.0, 0.0)
        sure.append((reached * own, worth + reached * own))
    best = max(range(len(sure)), key=lambda i: sure[i][1], default=-1)
    return (sure[best][1], draft.words(best)) if sure else (0.0, [])


def look_ups(drafter: Drafter) -> list[Drafter]:
    """What it is made of: vLLM says what a step takes, so there is nothing for `auto` to choose by.

    Raises ConfigError for what learns from logits or hidden states alone, or runs a model.
    """
    if (parts := getattr(drafter, "parts", None)) is not None:
        return [one for part in parts for one in look_ups(part)]
    if not drafter.cheap or (type(drafter).observe is not Drafter.observe and not hasattr(drafter, "follow")):
        valid = "ngram, suffix, recycle, rest, merge, auto"
        raise ConfigError(f"method {drafter.name!r} needs more than tokens; inside vLLM: {valid}")
    return [drafter]


def _tokenizer(model: Any) -> Any:
    """The one that vLLM reads for a model, by which a datastore knows whether it fits; None if it cannot be had."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model.tokenizer)
    except Exception as error:  # it raises many kinds, and a model may have none
        log.debug("no tokenizer: %s", error)
        return None


def _no_model(name: str) -> Any:
    raise ConfigError(f"no draft model is loaded inside vLLM, not {name!r}; it has its own method for these")
