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
PATIENCE = 8  # calls until a request that is not seen counts as ended
Ids = np.ndarray[Any, Any]


class Known:
    """A request, by what it has said so far."""

    def __init__(self, prompt: list[int], longest: int) -> None:
        self.copy = np.empty(longest, np.int32)
        self.seq = Sequence(prompt, SamplingParams(temperature=0, max_tokens=2**31), seed=0)
        self.copy[: len(prompt)] = prompt
        self.seen = 0  # the call in which it was last there

    def begins(self, tokens: Ids) -> bool:
        """Whether these tokens go on from what it has said."""
        n = len(self.seq.tokens)
        same = n <= len(tokens) and self.copy[n - 1] == tokens[n - 1]  # which most others are told apart by
        return bool(same and (self.copy[:n] == tokens[:n]).all())

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
        text = os.environ.get(VARIABLE, "suffix")
        if text.lstrip().startswith("{"):
            try:
                config = SpeculativeConfig.of(json.loads(text))
            except ValueError as error:
                raise ConfigError(f"{VARIABLE} is not JSON: {error}") from None
        else:
            config = SpeculativeConfig.parse(text)
        self.drafter = drafters.create(config)
        if config.method == "auto":  # it chooses by what a step costs, which is vLLM's affair: its sources remain
            one, *more = given = vars(self.drafter)["given"]
            merge = {"method": "merge", "drafters": given}
            self.drafter = drafters.create(SpeculativeConfig.of(merge if more else one))
        check(self.drafter)
        shape = SimpleNamespace(vocab_size=self.vocab)
        target: Any = SimpleNamespace(model=SimpleNamespace(config=shape), tokenizer=None, follows_paths=True)
        self.drafter.attach(target, _no_model)
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
        for i, own in enumerate(sampled if tokens.dtype.kind in "iu" else ()):
            if 0 < len(own) < lengths[i] and (known := self._find(i, tokens[i, : int(lengths[i])], len(own))):
                rows[i] = known
        there = list(rows.values())
        absent = [known for known in self.known if known.seen != self.calls]
        self.known = there + [known for known in absent if self.calls - known.seen <= PATIENCE]
        for known in absent:
            if self.calls - known.seen > PATIENCE:
                self.drafter.forget(known.seq)
        for i, draft in zip(rows, self.drafter.propose([known.seq for known in there], self.k), strict=True):
            drafts[i] = self._chain(draft, self.longest - int(lengths[i]) - 1)

    def _find(self, row: int, tokens: Ids, fresh: int) -> Known | None:
        """The request that these tokens are of; most often it stands where it stood in the last call.

        None if they can be no request's: ids that are none (beyond the vocabulary there are those of images), too many.
        """
        there = self.known[row : row + 1] + self.known
        known = next((k for k in there if k.seen != self.calls and k.begins(tokens)), None)
        new = tokens[len(known.seq.tokens) if known else 0 :].tolist()
        if len(tokens) > self.longest or (new and (min(new) < 0 or max(new) >= 2**31)):
            return None
        if known is None:
            known, new = Known(new[:-fresh], self.longest), new[-fresh:]
        known.seen = self.calls
        known.grow(new)
        return known

    def _chain(self, draft: Draft, room: int) -> list[int]:
        """The path of a draft from which most is expected: vLLM takes chains only."""
        path: Seq[int] = draft.tokens[: draft.verifiable]
        if not draft.is_chain:
            sure: list[tuple[float, float]] = []  # of each node: that it is reached, and the tokens down to it
            for i, parent in enumerate(draft.parents[: draft.verifiable]):
                reached, worth = sure[parent] if parent >= 0 else (1.0, 0.0)
                reached *= draft.trust[i] if draft.trust else 1.0
                sure.append((reached, worth + reached))
            path = draft.words(max(range(len(sure)), key=lambda i: sure[i][1], default=-1))
        path = list(map(int, path[: max(0, min(self.k, room))]))
        if path and (min(path) < 0 or max(path) >= self.vocab):
            path = list(itertools.takewhile(lambda token: 0 <= token < self.vocab, path))
        return path


def check(drafter: Drafter) -> None:
    """Raises ConfigError for what learns from logits or hidden states, or runs a model."""
    if (parts := getattr(drafter, "parts", None)) is not None:
        for part in parts:
            check(part)
    elif not drafter.cheap or type(drafter).observe is not Drafter.observe:
        raise ConfigError(f"method {drafter.name!r} needs more than tokens; inside vLLM: ngram, suffix, rest, merge")


def _no_model(name: str) -> Any:
    raise ConfigError(f"no draft model is loaded inside vLLM, not {name!r}; it has its own method for these")
