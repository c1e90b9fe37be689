"""The same prompts through another engine's own generation, on the same weights; or through ours, with quantised ones.

Their tokens are our plain ones up to near-ties, and their times are taken as ours are: from when the first forward's
tokens come to when the last ones do, greedy and one prompt at a time. `answers` also samples, and runs some together.
"""

from __future__ import annotations

import importlib
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outrider import drafters
from outrider.bench.report import Sample
from outrider.config import SpeculativeConfig
from outrider.errors import ConfigError
from outrider.export import export
from outrider.find import find
from outrider.llm import LLM


class Peer(ABC):
    """`methods` maps its counterparts of the given methods to their settings.

    What a method needs is loaded when it first generates; from then on `weight_bytes` is the size of the weights, and
    `note` says how they were run. `batches`: whether it can run plain requests together.
    """

    name: str
    methods: dict[str, dict[str, Any]]
    weight_bytes: int
    note: str
    batches = False
    dense: tempfile.TemporaryDirectory[str] | None = None  # weights made for it, while it lives

    @abstractmethod
    def generate(
        self, method: str, ids: list[int], max_tokens: int, temperature: float = 0.0, seed: int = 0
    ) -> tuple[list[int], list[float], list[int]]:
        """Tokens; the time of the start and of each forward's tokens, in seconds; the tokens of each forward."""

    def together(
        self, method: str, prompts: list[list[int]], max_tokens: int, temperature: float, seed: int
    ) -> list[list[int]]:
        """The tokens after each of several prompts that run at once."""
        raise ConfigError(f"peer {self.name} runs one prompt at a time")

    def answers(
        self, method: str, prompts: list[list[int]], size: int, max_tokens: int, temperature: float, seed: int
    ) -> tuple[list[list[int]], int | None]:
        """Tokens per prompt, `size` of them at a time, and how many of them were drafted: None where nobody tells."""
        if size > 1:
            groups = [prompts[at : at + size] for at in range(0, len(prompts), size)]
            return [ids for g in groups for ids in self.together(method, g, max_tokens, temperature, seed)], None
        found = [self.generate(method, ids, max_tokens, temperature, seed) for ids in prompts]
        return [tokens for tokens, _, _ in found], sum(len(tokens) - len(counts) for tokens, _, counts in found)

    def begin(self, method: str) -> None:  # noqa: B027
        """A repeat begins: a method that remembers answers forgets them."""

    def close(self) -> None:  # noqa: B027
        """End what runs apart, if anything does."""

    def measure(self, method: str, prompts: list[list[int]], lengths: list[int]) -> Sample:
        """Generate exactly so many tokens after each prompt, whatever they are."""
        sample = Sample()
        for ids, length in zip(prompts, lengths, strict=True):
            tokens, (start, first, *rest), counts = self.generate(method, ids, length)
            if len(tokens) != length:
                raise RuntimeError(f"{len(tokens)} tokens, not {length}")
            sample.tokens.append(tokens)
            sample.first.append(first - start)
            sample.seconds += rest[-1] - first if rest else 0.0
            sample.timed += sum(counts[1:])
            sample.emitted += length
            sample.steps += len(counts)
        sample.rates = [sample.rate]
        return sample


def lookups(configs: list[SpeculativeConfig]) -> list[int]:
    """Draft lengths of prompt lookup, the counterpart of `ngram`."""
    return sorted({drafters.create(c).num_speculative_tokens for c in configs if c.method == "ngram"})


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


class Transformers(Peer):
    """In this process: plain, prompt lookup and assisted."""

    name = "transformers"
    batches = True
    note = (
        "transformers ran after ours in the same process, in rounds with our plain again, the weights in memory twice"
        " (those of a quantised file dense)."
    )

    def __init__(self, path: Path, weights: str, llm: LLM, configs: list[SpeculativeConfig], context: int) -> None:
        self.path, self.dtype, self.device = path, llm.runner.model.dtype, llm.runner.model.device
        self.weight_bytes = llm.runner.model.nbytes
        self.models: dict[str, Any] = {}
        self.methods = {"transformers plain": {}}
        for k in lookups(configs):
            self.methods[f"transformers prompt lookup k={k}"] = {"prompt_lookup_num_tokens": k}
        for config in configs:
            if config.method == "draft_model":
                k, name = drafters.create(config).num_speculative_tokens, str(config.options["model"])
                own = {"assistant_model": name, "num_assistant_tokens": k, "num_assistant_tokens_schedule": "constant"}
                told = f"transformers assisted by {name.rsplit('/', 1)[-1]} k={k}"
                self.methods[told if told not in self.methods else f"transformers assisted by {name} k={k}"] = own

    def _model(self, name: str | Path) -> Any:
        if (model := self.models.get(str(name))) is not None:
            return model
        transformers: Any = importlib.import_module("transformers")
        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()  # its assisted generation warns of its own deprecated calls
        model = transformers.AutoModelForCausalLM.from_pretrained(find(name), dtype=self.dtype).to(self.device).eval()
        # The checkpoint's own may end at eos, penalise or sample; without an eos every run has max_tokens new tokens.
        model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)
        self.models[str(name)] = model
        return model

    def generate(
        self, method: str, ids: list[int], max_tokens: int, temperature: float = 0.0, seed: int = 0
    ) -> tuple[list[int], list[float], list[int]]:
        """By its `generate`, the streamer taking the times. Its noise is torch's, seeded before each call."""
        options = dict(self.methods[method])
        if temperature > 0:
            torch.manual_seed(seed)
            options |= {"do_sample": True, "temperature": temperature, "top_k": 0}
        if "assistant_model" in options:
            assistant = self._model(options.pop("assistant_model"))
            assistant.generation_config.update(**options)  # generate reads the draft length from there
            options = {"assistant_model": assistant}
        prompt, clock = torch.tensor([ids], device=self.device), Clock()
        output = self._model(self.path).generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=max_tokens, streamer=clock, **options
        )
        return output[0, len(ids) :].tolist(), [clock.times[0], *clock.times[2:]], clock.counts[2:]

    def together(
        self, method: str, prompts: list[list[int]], max_tokens: int, temperature: float, seed: int
    ) -> list[list[int]]:
        """Padded on the left, as its documentation has it. One seed is all that it knows, so greedy alone compares."""
        if temperature > 0:
            raise ConfigError("it has no seed for each request, so that sampling in company is another draw by design")
        longest = max(map(len, prompts))
        padded = torch.tensor([[0] * (longest - len(ids)) + ids for ids in prompts], device=self.device)
        mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts], device=self.device)
        output = self._model(self.path).generate(padded, attention_mask=mask, max_new_tokens=max_tokens)
        return [row.tolist() for row in output[:, longest:]]


class Ourselves(Peer):
    """Outrider's plain decoding with other weights, in this process."""

    name = "outrider"
    llm: LLM | None

    def __init__(self, path: Path, weights: str, llm: LLM, configs: list[SpeculativeConfig], context: int) -> None:
        self.weights, self.target, self.llm = weights, llm, None
        self.dtype = str(llm.runner.model.dtype).removeprefix("torch.")
        self.methods = {f"outrider {weights or self.dtype} plain": {}}

    def generate(
        self, method: str, ids: list[int], max_tokens: int, temperature: float = 0.0, seed: int = 0
    ) -> tuple[list[int], list[float], list[int]]:
        """By our own generate, whose metrics have the times of the first and of the last token."""
        if self.llm is None:
            self.llm = LLM(
                self.target.checkpoint.path, dtype=self.dtype, device=str(self.target.runner.model.device),
                quantization=self.weights or None, max_model_len=self.target.engine_config.max_model_len,
                enable_prefix_caching=False,
            )  # fmt: skip
            self.weight_bytes = self.llm.runner.model.nbytes
            size = f"{self.weight_bytes / 1e6:,.1f} MB"
            self.note = f"Outrider's {self.weights or self.dtype} weights, {size}, took turns with ours."
        (output,) = self.llm.generate([ids], max_tokens=max_tokens, ignore_eos=True, temperature=temperature, seed=seed)
        timing = output.metrics["timing"]
        times = [0.0, timing["time_to_first_token"], *[timing["total_seconds"]] * (max_tokens - 1)]
        return output.token_ids, times, [1] * max_tokens


@dataclass(frozen=True)
class Kind:
    """How a peer is made: `load(path, weights, llm, configs, context)`; the quantised `weights` it has beside the
    target's; `check` raises ConfigError if it cannot run here."""

    load: Callable[[Path, str, LLM, list[SpeculativeConfig], int], Peer]
    weights: tuple[str, ...] = ()
    check: Callable[[], None] = lambda: None
    files: bool = False  # it reads a GGUF file as it is


PEERS = {"transformers": Kind(Transformers), "outrider": Kind(Ourselves, ("int8", "int4"), files=True)}
"""By name. tools/peers.py, in a clone, has more."""


def check(spec: str, suites: list[str]) -> None:
    """Raises ConfigError if `NAME` or `NAME:WEIGHTS` cannot run, or not on these suites."""
    if "json" in suites:
        raise ConfigError("--suite json is constrained, which peers are not asked to be; leave out --peer")
    name, _, weights = spec.partition(":")
    if (kind := PEERS.get(name)) is None:
        more = "; a clone has more, with `python -m tools bench`" * (len(PEERS) == 2)
        raise ConfigError(f"peer {name!r} is unknown; valid: {', '.join(PEERS)}{more}")
    if ":" in spec and weights not in kind.weights:
        valid = ", ".join(kind.weights) or "none, only its name"
        raise ConfigError(f"peer {name} has no weights {weights!r}; valid: {valid}")
    kind.check()


def make(spec: str, llm: LLM, configs: list[SpeculativeConfig], context: int) -> Peer:
    """A peer with the model of `llm`, for `context` tokens. Raises ConfigError if that cannot be.

    One that reads checkpoints only gets what a quantised file's weights are worth, dense, in a temporary folder.
    """
    name, _, weights = spec.partition(":")
    path, dense = llm.checkpoint.path, None
    if path.is_file() and not PEERS[name].files:
        dense = tempfile.TemporaryDirectory(prefix="outrider-")
        path = export(path, Path(dense.name) / path.stem, str(llm.runner.model.dtype).removeprefix("torch."))
    peer = PEERS[name].load(path, weights, llm, configs, context)
    peer.dense = dense
    return peer
