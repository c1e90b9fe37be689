"""What several test files share: a scripted drafter, and ways to run requests through an engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from outrider import LLM, Draft, Drafter, GenerationOutput, SamplingParams
from outrider.config import Rule
from outrider.costs import Costs
from outrider.draft import Verdict
from outrider.drafters.auto import ROWS, Auto
from outrider.engine import Engine
from outrider.find import find
from outrider.kv import PagedKV
from outrider.runner import Output
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


TREES = [Draft([5, 6, 7, 8], [-1, -1, 0, 1]), Draft.chain([2, 3, 4])]


def drive(llm: LLM, long: Sequence, short: Sequence, rounds: int = 1) -> list[torch.Tensor]:
    """Grow two sequences by trees of which paths of all kinds are accepted; the logits of all rows, then all keys."""
    seen = []
    for i, path in enumerate(([1, 3], [0], [], [0, 2]) * rounds):
        group = [long, short][: 2 - i % 2]
        output = llm.runner.extend(group, TREES[: len(group)])
        seen += output.logits
        paths = [path, [0]][: len(group)]
        llm.runner.commit(group, output, [Verdict(taken, []) for taken in paths])
        for seq, draft, taken in zip(group, TREES, paths, strict=False):
            seq.tokens += [draft.tokens[node] for node in taken] + [3]
    layers = range(llm.runner.model.config.num_layers)
    return seen + [llm.runner.kv.span(long.id, layer, 0, len(long.tokens) - 1) for layer in layers]


def converse(llm: LLM, path: Path) -> Path:
    """Write conversations of a random model, as `outrider train data` does."""
    noise = torch.Generator().manual_seed(1)
    prompts = [torch.randint(128, (5,), generator=noise).tolist() for _ in range(40)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.5, seed=3, max_tokens=30))
    lines = [json.dumps({"p": p, "o": o.token_ids, "t": 0.5}) for p, o in zip(prompts, outputs, strict=True)]
    path.write_text("\n".join(lines) + "\n")
    return path


def run(llm: LLM, requests: list[tuple[list[int], SamplingParams]]) -> list[GenerationOutput]:
    """Requests, each with its own parameters, in one batch. Nothing of them may stay behind."""
    added = [r for prompt, params in requests for r in llm.engine.add(prompt, params)]
    for _ in llm.engine.run():
        pass
    assert_released(llm)
    return [llm.engine.output(r) for r in added]


def count_forwards(llm: LLM, monkeypatch: Any) -> None:
    """Let a drafter of method auto count forwards as its time, so that chance has no part in what it decides."""
    if not isinstance(auto := llm.engine.drafter, Auto):
        return
    extend, now = llm.runner.extend, [0.0]

    def pass_by(seconds: float) -> float:
        now[0] += seconds
        return now[0]

    def counted(*args: Any, **named: Any) -> Output:
        pass_by(1.0)
        return extend(*args, **named)

    monkeypatch.setattr(llm.runner, "extend", counted)
    auto.clock, auto.costs = lambda: pass_by(1e-6), Costs()
    auto.costs.begin({n: 1 + n / 64 for n in ROWS})


def assert_released(llm: LLM) -> None:
    """No request, cached token or key is left in the engine, the target, a drafter or a draft model."""
    assert not llm.engine.running and not llm.engine.waiting
    runners, drafters = [llm.runner], [llm.engine.drafter]
    for drafter in drafters:
        runners += [drafter.runner] if hasattr(drafter, "runner") else []
        drafters += [drafter.inner] if hasattr(drafter, "inner") else getattr(drafter, "parts", [])
        own = vars(drafter) if type(drafter).__module__.startswith("outrider.") else {}  # others keep what they like
        by_sequence = {name: d for name, d in own.items() if isinstance(d, dict) and any(map(_is_id, d))}
        assert not by_sequence, f"{drafter.name} still holds {by_sequence}"
    for runner in runners:
        kv = runner.kv
        assert not runner.slots and not runner.scores and not getattr(kv, "held", None)
        if isinstance(kv, PagedKV):
            assert not kv.tables and not kv.pool.used and kv.pool.free + len(kv.pool.cached) == len(kv.pool.holders)
        else:
            assert not kv.slab.store
        assert not getattr(kv, "log", llm.runner.kv.log).held and not any(getattr(kv, "stages", ()))
        assert not any(rows.held or rows.synced for rows in runner.taps)


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


def repeating_eagle3(model: str, where: Path) -> Path:
    """An EAGLE-3 head of an embedded model that goes on with what the target said last: its state, passed through."""
    source, folder = find(model), where / f"{model}-repeating"
    if not folder.exists():
        shape = json.loads((source / "config.json").read_text())
        hidden, vocab, layers = shape["hidden_size"], shape["vocab_size"], shape["num_hidden_layers"]
        made = random_eagle3(
            source, "speculators", draft_vocab=vocab, scale=0.0, where=where, head_dim=64, intermediate_size=32,
            eagle_aux_hidden_state_layer_ids=[layers],
        )  # fmt: skip
        tensors = load_file(made / "model.safetensors")
        llm = LLM(model, device="cpu", dtype="float32")
        tensors["fc.weight"] = torch.eye(hidden)
        tensors["norm.weight"] = llm.runner.model.norm.clone()
        tensors["lm_head.weight"] = llm.runner.model.head(torch.eye(hidden)).T.contiguous()
        save_file(tensors, made / "model.safetensors")
        made.rename(folder)
    return folder


def random_eagle3(
    model: Path,
    layout: str = "original",
    *,
    draft_vocab: int = 48,
    scale: float = 0.3,
    where: Path | None = None,
    **config: Any,
) -> Path:
    """A random EAGLE-3 head for a checkpoint, in a folder beside it, in the `original` layout or that of `speculators`,
    or as NeMo's Automodel writes it.

    `config`: further keys of config.json, or other values for those of the layer.
    """
    folder = (where or model.parent) / f"{model.name}-eagle3-{abs(hash((layout, draft_vocab, scale, repr(config))))}"
    shape, noise = json.loads((model / "config.json").read_text()), torch.Generator().manual_seed(8)
    hidden, vocab, dim = shape["hidden_size"], shape["vocab_size"], config.pop("head_dim", 16)
    layer = {
        "model_type": "llama", "hidden_size": hidden, "vocab_size": vocab, "head_dim": dim, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_hidden_layers": 1, "intermediate_size": 96, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
    }  # fmt: skip
    more = "attention_bias", "rope_scaling", "rope_theta", "hidden_act", "sliding_window", "layer_types"
    layer |= {key: config.pop(key) for key in [*layer, *more] if key in config}
    q, kv, wide = layer["num_attention_heads"] * dim, layer["num_key_value_heads"] * dim, layer["intermediate_size"]
    shapes = {
        "input_layernorm.weight": (hidden,), "hidden_norm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,), "self_attn.q_proj.weight": (q, 2 * hidden),
        "self_attn.k_proj.weight": (kv, 2 * hidden), "self_attn.v_proj.weight": (kv, 2 * hidden),
        "self_attn.o_proj.weight": (hidden, q), "mlp.gate_proj.weight": (wide, hidden),
        "mlp.up_proj.weight": (wide, hidden), "mlp.down_proj.weight": (hidden, wide),
    }  # fmt: skip
    if layer.get("attention_bias"):
        shapes |= {f"self_attn.{x}_proj.bias": (n,) for x, n in {"q": q, "k": kv, "v": kv, "o": hidden}.items()}
    if layer["model_type"] == "qwen3" and layout != "automodel":  # there, that is what the target is
        shapes |= {f"self_attn.{x}_norm.weight": (dim,) for x in "qk"}
    at = "midlayer." if layout == "original" else "layers.0."
    points, said = len(config.get("eagle_aux_hidden_state_layer_ids", (0, 0, 0))), config.get("eagle_config", config)
    shapes = {at + name: size for name, size in shapes.items()}
    shapes |= {"fc.weight": (hidden, points * hidden), "norm.weight": (hidden,)}
    shapes |= {"lm_head.weight": (draft_vocab, hidden)}
    if said.get("norm_before_fc"):
        shapes["input_norm.weight"] = (points * hidden,)
    if said.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (hidden,) for i in range(points)}
    tensors = {
        name: torch.randn(size, generator=noise) * scale + (1 if "norm" in name else 0) for name, size in shapes.items()
    }
    if layout == "automodel":
        tensors = {name if name == "lm_head.weight" else f"model.{name}": tensor for name, tensor in tensors.items()}
    ids = torch.randperm(vocab, generator=noise)[:draft_vocab].sort().values
    tensors["d2t"] = ids - torch.arange(draft_vocab)
    tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)
    about: dict[str, Any] = {"draft_vocab_size": draft_vocab}
    if layout != "speculators":
        about |= {"architectures": ["LlamaForCausalLMEagle3"], **layer}
    else:
        about |= {
            "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3",
            "transformer_layer_config": layer,
            "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": str(model)}},
        }  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(about | config))
    if layout == "original":
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder


def random_recurrent(
    model: Path, where: Path | None = None, *, draft_vocab: int = 48, scale: float = 0.3, own: bool = True
) -> Path:
    """A random recurrent head for a checkpoint, in a folder beside it; `scale` 0 passes the state on as it is."""
    folder = (where or model.parent) / f"{model.name}-recurrent-{draft_vocab}-{scale}-{own}"
    shape, noise = json.loads((model / "config.json").read_text()), torch.Generator().manual_seed(9)
    hidden, vocab, wide = shape["hidden_size"], shape["vocab_size"], 40
    shapes = {
        "mlp.gate_proj.weight": (wide, 2 * hidden), "mlp.up_proj.weight": (wide, 2 * hidden),
        "mlp.down_proj.weight": (hidden, wide), "norm.weight": (hidden,),
    }  # fmt: skip
    shapes |= {"lm_head.weight": (draft_vocab, hidden)} if own else {}
    tensors = {
        name: torch.randn(size, generator=noise) * scale + (1 if "norm" in name else 0) for name, size in shapes.items()
    }
    tensors["d2t"] = torch.randperm(vocab, generator=noise)[:draft_vocab].sort().values - torch.arange(draft_vocab)
    about = {
        "architectures": ["RecurrentHead"], "hidden_size": hidden, "vocab_size": vocab,
        "draft_vocab_size": draft_vocab, "intermediate_size": wide,
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(about))
    save_file(tensors, folder / "model.safetensors")
    return folder


def watched(drafter: Any) -> list[torch.Tensor]:
    """All logits that the head of an `eagle3` or `recurrent` drafter gives from now on."""
    seen, read = [], drafter.head.read

    def watch(*args: object) -> tuple[torch.Tensor, torch.Tensor]:
        states, logits = read(*args)
        seen.append(logits)
        return states, logits

    drafter.head.read = watch
    return seen
