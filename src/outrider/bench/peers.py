"""The same prompts through transformers' own generation: plain, prompt lookup and assisted, on the same weights.

Its tokens are our plain ones up to near-ties, and its times are taken as ours are: from when the first forward's tokens
come to when the last ones do. Greedy and one prompt at a time, which is all that its assisted generation does.
"""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from typing import Any

import torch

from outrider import drafters
from outrider.bench.report import Sample
from outrider.config import SpeculativeConfig
from outrider.llm import LLM
from outrider.load import find

NAME = "transformers"
NOTE = "transformers ran after ours in the same process, in rounds with our plain again, the weights in memory twice."


class Clock:
    """A streamer that notes when tokens come, and how many. The first thing it is given is the prompt."""

    def __init__(self) -> None:
        self.times, self.counts = [time.perf_counter()], [0]

    def put(self, tokens: torch.Tensor) -> None:
        """Called by generate: with the prompt, then with the tokens of each forward."""
        self.times.append(time.perf_counter())
        self.counts.append(tokens.numel())

    def end(self) -> None:
        """Called by generate."""


class Transformers:
    """transformers' counterparts of the given methods. `methods` maps their names to their settings."""

    def __init__(self, llm: LLM, configs: list[SpeculativeConfig]) -> None:
        self.dtype, self.device = llm.runner.model.dtype, llm.runner.model.device
        self.model = self._load(llm.checkpoint.path)
        self.assistants: dict[str, Any] = {}
        self.methods: dict[str, dict[str, Any]] = {f"{NAME} plain": {}}
        lookups = {drafters.create(c).num_speculative_tokens for c in configs if c.method == "ngram"} or {8}
        for k in sorted(lookups):
            self.methods[f"{NAME} prompt lookup k={k}"] = {"prompt_lookup_num_tokens": k}
        for config in configs:
            if config.method == "draft_model":
                k, name = drafters.create(config).num_speculative_tokens, str(config.options["model"])
                if name not in self.assistants:
                    self.assistants[name] = self._load(find(name))
                self.methods[f"{NAME} assisted by {name.rsplit('/', 1)[-1]} k={k}"] = {
                    "assistant_model": name, "num_assistant_tokens": k, "num_assistant_tokens_schedule": "constant",
                }  # fmt: skip

    def _load(self, path: Path) -> Any:
        transformers: Any = importlib.import_module("transformers")
        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()  # its assisted generation warns of its own deprecated calls
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=self.dtype).to(self.device).eval()
        # The checkpoint's own may end at eos, penalise or sample; without an eos every run has max_tokens new tokens.
        model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)
        return model

    def measure(self, method: str, prompts: list[list[int]], max_tokens: int) -> Sample:
        """Generate exactly `max_tokens` after each prompt."""
        options = dict(self.methods[method])
        if "assistant_model" in options:
            assistant = self.assistants[options.pop("assistant_model")]
            assistant.generation_config.update(**options)  # generate reads the draft length from there
            options = {"assistant_model": assistant}
        sample = Sample()
        for prompt in prompts:
            ids, clock = torch.tensor([prompt], device=self.device), Clock()
            output = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, streamer=clock, **options
            )
            sample.tokens.append(output[0, len(prompt) :].tolist())
            sample.first.append(clock.times[2] - clock.times[0])
            sample.seconds += clock.times[-1] - clock.times[2]
            sample.timed += sum(clock.counts[3:])
            sample.emitted += max_tokens
            sample.steps += len(clock.counts) - 2
        return sample
