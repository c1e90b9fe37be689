"""What several test files share: a scripted drafter, and ways to run requests through an engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from outrider import LLM, Draft, Drafter, GenerationOutput, SamplingParams
from outrider.config import Rule
from outrider.engine import Engine
from outrider.sequence import Sequence
from outrider.verify import COUPLED

Script = Callable[[Sequence, int], Draft]


class ScriptedDrafter(Drafter):
    """Proposes what `script(seq, k)` says, right or wrong, and remembers what it was shown."""

    name = "scripted"

    def __init__(self, script: Script) -> None:
        super().__init__()
        self.script = script
        self.verdicts: list[Any] = []
        self.forgotten: set[int] = set()

    def propose(self, seqs: list[Sequence], k: int) -> list[Draft]:
        return [self.script(seq, k) for seq in seqs]

    def observe(self, seqs: list[Sequence], verdicts: list[Any], output: Any) -> None:
        self.verdicts.append(verdicts)

    def forget(self, seq: Sequence) -> None:
        self.forgotten.add(seq.id)


def oracle(plain: dict[tuple[int, ...], list[int]]) -> Script:
    """A script that knows, per prompt, what plain decoding gives: a chain of k right tokens."""
    return lambda seq, k: Draft.chain(rest(plain, seq)[:k])


def rest(plain: dict[tuple[int, ...], list[int]], seq: Sequence) -> list[int]:
    """What plain decoding gives after the sequence's present tokens."""
    return plain[tuple(seq.tokens[: seq.prompt_len])][len(seq.output) :]


def use(llm: LLM, drafter: Drafter, k: int = 4, rule: Rule = COUPLED) -> None:
    """Let an LLM draft with a drafter that has no name. Assigning `speculative_config` ends it."""
    llm.engine = Engine(llm.runner, drafter, k, llm.engine_config, llm.tokenizer, llm.exactness, rule)


def run(llm: LLM, requests: list[tuple[list[int], SamplingParams]]) -> list[GenerationOutput]:
    """Requests, each with its own parameters, in one batch. Nothing of them may stay behind."""
    added = [r for prompt, params in requests for r in llm.engine.add(prompt, params)]
    for _ in llm.engine.run():
        pass
    assert_released(llm)
    return [llm.engine.output(r) for r in added]


def assert_released(llm: LLM) -> None:
    """No request, cached token or key is left in the engine, the target, a drafter or a draft model."""
    assert not llm.engine.running and not llm.engine.waiting
    runners, drafters = [llm.runner], [llm.engine.drafter]
    for drafter in drafters:
        runners += [drafter.runner] if hasattr(drafter, "runner") else []
        drafters += [drafter.inner] if hasattr(drafter, "inner") else getattr(drafter, "parts", [])
        by_sequence = {name: d for name, d in vars(drafter).items() if isinstance(d, dict) and any(map(_is_id, d))}
        assert not by_sequence, f"{drafter.name} still holds {by_sequence}"
    for runner in runners:
        kv = runner.kv
        assert not runner.slots and not kv.store and not getattr(kv, "held", None) and not getattr(kv, "slab", kv).store
        assert not getattr(kv, "log", llm.runner.kv.log).held and not any(getattr(kv, "stages", ()))


def _is_id(key: Any) -> bool:
    return isinstance(key, int)


def logits_after(llm: LLM, tokens: list[int], prompt_len: int | None = None) -> torch.Tensor:
    """(vocab,) raw logits that the target gives after these tokens, computed afresh."""
    seq = Sequence(tokens, SamplingParams(), 0)
    seq.prompt_len = prompt_len or len(tokens)
    try:
        return llm.runner.extend([seq]).logits[0][0]
    finally:
        llm.runner.free(seq)


def random_heads(model: Path, *, tied: bool = True, count: int = 3, blocks: int = 2, **config: Any) -> Path:
    """Random Medusa heads for a checkpoint, in a folder beside it. `config`: further keys, such as accuracies."""
    folder = model.parent / f"{model.name}-heads-{abs(hash((tied, count, blocks, repr(config))))}"
    shape, noise = json.loads((model / "config.json").read_text()), torch.Generator().manual_seed(6)
    hidden, vocab = shape["hidden_size"], shape["vocab_size"]
    tensors = {}
    for i in range(count):
        for j in range(blocks):
            tensors[f"{i}.{j}.linear.weight"] = torch.randn(hidden, hidden, generator=noise) * 0.1
            tensors[f"{i}.{j}.linear.bias"] = torch.randn(hidden, generator=noise) * 0.1
        tensors |= {} if tied else {f"{i}.{blocks}.weight": torch.randn(vocab, hidden, generator=noise) * 0.3}
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    about = {"architectures": ["MedusaHeads"], "hidden_size": hidden, "vocab_size": vocab, "medusa_num_heads": count}
    (folder / "config.json").write_text(json.dumps(about | {"medusa_num_layers": blocks} | config))
    return folder
