"""One decoder layer over the target's hidden states guesses token after token (EAGLE-3, 2503.01840).

At place i the layer sees the embedding of token i + 1 and `fc` of the target's hidden states at i, taken where three of
its layers begin; what it makes of them says, through a head over its own vocabulary of frequent tokens, which token
stands at i + 2. Further ones it guesses from its own output in the states' stead. Its keys are its own, and it catches
up like any cache: with the rows of hidden states (kv/rows.py) that it has not seen yet.

The draft is a tree that grows where it is likely (trees.py).

`model` is a folder, hub id or embedded name in one of two layouts: the original's (config.json of a Llama of one layer,
with draft_vocab_size; pytorch_model.bin or model.safetensors with midlayer.*, fc, norm, lm_head, d2t, t2d), or vLLM's
speculators (speculators_model_type eagle3, transformer_layer_config; layers.0.*). Either may have NORMS, norms of
queries and keys, a window, and `model.` before its names. Without lm_head it is the target's embedding, which the
target's head must be, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider import families
from outrider.config import ModelConfig, whole
from outrider.errors import CheckpointError, brief
from outrider.find import find
from outrider.heads import check_head, draft_tokens, guessing, read_head, take_out
from outrider.kv import DenseKV, Entry, Plan
from outrider.model import Rotary
from outrider.ops import MLP, Block, Linear, Switches, Walk, native, rms_norm, rope
from outrider.outputs import common
from outrider.runner import Runner
from outrider.sequence import Sequence
from outrider.trees import Growing, Root, Tree

# Norms that not all heads have: of the state that attention adds to, of all states before `fc` or each by itself, and,
# before the next guess, of what the layer makes (the last two are EAGLE-3.1's).
NORMS = "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"


class Head:
    """The layer, its vocabulary and its keys. Raises CheckpointError and VocabularyMismatch for what does not fit."""

    def __init__(self, path: Path, target: Runner) -> None:
        model = target.model
        about, tensors = Eagle3.read(path)
        self.dtype, self.device, self.embed, self.finish = model.dtype, model.device, model.embed, model.finish
        c = self.config = Eagle3.layer(path, about)
        hidden = c.hidden_size
        check_head(path, hidden, c.vocab_size, model.config)
        self.points = Eagle3.points(path, about, model.config.num_layers)
        said = Eagle3.norms(about)
        self.norm_before_residual, self.norm_output = "norm_before_residual" in said, "norm_output" in said

        def take(name: str, *shape: int) -> Tensor:
            return take_out(tensors, name, shape, path).to(self.device, self.dtype)

        def linear(names: list[str], sizes: list[int], inputs: int, bias: bool = False, gated: bool = False) -> Linear:
            weight = torch.cat([take(f"{n}.weight", size, inputs) for n, size in zip(names, sizes, strict=True)])
            added = torch.cat([take(f"{n}.bias", size) for n, size in zip(names, sizes, strict=True)]) if bias else None
            return guessing(weight, added, gated)

        q, kv, wide = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.intermediate_size
        attn, mlp = "midlayer.self_attn", "midlayer.mlp"
        if (vocab := whole(about.get("draft_vocab_size") or c.vocab_size, 1, c.vocab_size)) is None:
            given = brief(about["draft_vocab_size"])
            raise CheckpointError(f"{path}: draft_vocab_size should be a number of 1 to {c.vocab_size}, not {given}")
        self.input_norm = take("midlayer.input_layernorm.weight", hidden)
        self.hidden_norm = take("midlayer.hidden_norm.weight", hidden)
        self.qkv = linear([f"{attn}.{x}_proj" for x in "qkv"], [q, kv, kv], 2 * hidden, c.qkv_bias)
        self.qk_norms = None
        if f"{attn}.q_norm.weight" in tensors:  # what config.json calls the layer may be what it calls the target
            self.qk_norms = take(f"{attn}.q_norm.weight", c.head_dim), take(f"{attn}.k_norm.weight", c.head_dim)
        self.o = linear([f"{attn}.o_proj"], [hidden], q, c.o_bias)
        self.post_norm = take("midlayer.post_attention_layernorm.weight", hidden)
        self.gate_up = linear([f"{mlp}.gate_proj", f"{mlp}.up_proj"], [wide, wide], hidden, c.mlp_bias, gated=True)
        self.down = linear([f"{mlp}.down_proj"], [hidden], wide, c.mlp_bias)
        seen = len(self.points) * hidden
        each = [f"fc_norm.{i}" for i in range(len(self.points))] if "fc_norm" in said else []
        before_fc = each or ["input_norm"] * ("norm_before_fc" in said)
        self.fc_norms = [take(f"{name}.weight", seen // len(before_fc)) for name in before_fc]
        self.fc = linear(["fc"], [hidden], seen)
        self.norm = take("norm.weight", hidden)
        if vocab == c.vocab_size:
            tensors.setdefault("d2t", torch.zeros(vocab, dtype=torch.long))
        tensors.pop("t2d", None)  # says no more than d2t
        self.tokens = draft_tokens(tensors, vocab, c.vocab_size, path).to(self.device)
        if "lm_head.weight" not in tensors:
            if not model.config.tied:
                raise CheckpointError(f"{path}: no lm_head.weight, and this target's own is not its embedding")
            tensors["lm_head.weight"] = model.embed(self.tokens) / model.multiplier
        self.head = linear(["lm_head"], [vocab], hidden)
        if (own := tensors.get("embed_tokens.weight")) is not None:
            own = take("embed_tokens.weight", c.vocab_size, hidden)
            if not torch.equal(own, model.embed(torch.arange(c.vocab_size, device=self.device))):
                self.embed = lambda tokens: F.embedding(tokens, own)
        if tensors:
            raise CheckpointError(f"{path}: tensor {min(tensors)} has no place in an EAGLE-3 head of one layer")
        self.rotary = Rotary(c, self.dtype, self.device)
        self.kv = DenseKV(c, self.dtype, self.device)
        self.walk: Walk | None = None
        if self.head.native and c.head_dim % 8 == 0:
            gates, norms = MLP(self.gate_up, self.down), self.qk_norms or (None, None)
            block = Block(self.hidden_norm, self.qkv, norms[0], norms[1], self.o, self.post_norm, gates, c.windows[0])
            shape = c.num_heads, c.num_kv_heads, c.head_dim, c.rms_norm_eps
            beside = self.input_norm, self.norm_before_residual
            self.walk = Walk(*shape, [block], self.norm, self.head, None, Switches(c.attention_scale), beside)

    def fuse(self, rows: Tensor) -> Tensor:
        """The states (n, hidden) that the layer begins with, from rows (n, points * hidden) of the target's."""
        if self.fc_norms:
            parts = rows.chunk(len(self.fc_norms), -1)
            pairs = zip(parts, self.fc_norms, strict=True)
            rows = torch.cat([rms_norm(part, norm, self.config.rms_norm_eps) for part, norm in pairs], -1)
        return self.fc(rows)

    def read(
        self, ids: list[int], states: Tensor, positions: list[int], plan: Plan, wanted: list[int]
    ) -> tuple[Tensor, Tensor]:
        """The next states (n, hidden) from tokens and the states before them; keys go where the plan says.

        And the logits (wanted, draft vocabulary) float32 of some of the rows.
        """
        c, eps = self.config, self.config.rms_norm_eps
        token = self.embed(torch.tensor(ids, device=self.device))
        if self.walk and native.active != native.REFERENCE:
            self.kv.reserve(plan)
            turns, sines, _held = self.rotary.addresses(positions, positions)
            after = {1: states}
            stores = self.kv.stores(plan)
            assert stores is not None
            _, logits, _ = self.walk(states, turns, sines, stores, wanted, after, beside=token)
            out = after[1]
        else:
            normed = rms_norm(states, self.hidden_norm, eps)
            qkv = self.qkv(torch.cat([rms_norm(token, self.input_norm, eps), normed], -1))
            cos, sin = self.rotary(positions, positions)
            q, k, v = rope(qkv, c.num_heads, c.num_kv_heads, cos, sin, self.qk_norms, eps)
            self.kv.reserve(plan)
            residual = normed if self.norm_before_residual else states
            x = self.o(self.kv.attend(0, q, k, v, plan), residual=residual)
            out = self.down(self.gate_up(x, self.post_norm, eps), residual=x)
            logits = self.head(out[wanted], self.norm, eps, dtype=torch.float32)
        return rms_norm(out, self.norm, eps) if self.norm_output else out, self.finish(logits)


@dataclass
class Seen:
    """What the head has read of a sequence: of the rows from place `first` on, the tokens that came behind each."""

    first: int = 0
    tokens: list[int] = field(default_factory=list)
    settled: int = 0  # of these, how many will never change
    after: Root | None = None  # behind the last of them


@dataclass
class Eagle3(Growing):
    """Guesses with an EAGLE-3 head that was trained for the target."""

    @staticmethod
    def read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """config.json, and the tensors by the original's names."""
        about, tensors = read_head(path, "model.safetensors", "pytorch_model.bin")
        tensors = {
            name.removeprefix("model.").replace("layers.0.", "midlayer.", 1): tensor for name, tensor in tensors.items()
        }
        for name in ("fc.weight", "midlayer.hidden_norm.weight"):
            if name not in tensors:
                others = "those of EAGLE-1 and -2 are not read"
                raise CheckpointError(f"{path} holds no EAGLE-3 head: no tensor {name}; {others}")
        return about, tensors

    @staticmethod
    def layer(path: Path, about: dict[str, Any]) -> ModelConfig:
        """The shape of the layer that config.json speaks of. Raises CheckpointError."""
        shape = about.get("transformer_layer_config") or about
        if not isinstance(shape, dict) or shape.get("num_hidden_layers", 1) != 1:
            raise CheckpointError(f"{path}: an EAGLE-3 head has one layer, config.json says otherwise")
        read = families.read({**shape, "architectures": ["LlamaForCausalLM"], "quantization_config": None})
        if read.activation != "silu":
            raise CheckpointError(
                f"{path}: an EAGLE-3 head has silu, config.json says hidden_act {shape['hidden_act']}"
            )
        return replace(read, windows=families.qwen_windows(shape))

    @staticmethod
    def norms(about: dict[str, Any]) -> set[str]:
        """Which of NORMS config.json says, at its top or, as NVIDIA's heads do, in eagle_config."""
        nested = about.get("eagle_config")
        said = about | nested if isinstance(nested, dict) else about
        return {name for name in NORMS if said.get(name)}

    @staticmethod
    def points(path: Path, about: dict[str, Any], layers: int) -> tuple[int, ...]:
        """The layers whose inputs the head reads."""
        name = "eagle_aux_hidden_state_layer_ids"
        nested = about.get("eagle_config")
        outputs = nested.get(name) if isinstance(nested, dict) else None  # there, layers whose outputs are read
        given = about.get(name) or outputs or [min(2, layers), layers // 2, max(0, layers - 3)]
        if not isinstance(given, list) or not all(type(i) is int for i in given):
            raise CheckpointError(f"{path}: {name} should be a list of layers, not {str(given)[:80]}")
        return tuple(i + 1 if given is outputs else i for i in given)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.seen: dict[int, Seen] = {}

    def attach(self, target: Runner, load: Callable[[str], Runner]) -> None:
        """Load the head. Raises CheckpointError and VocabularyMismatch for one of another kind of target."""
        self.head, self.chunk = Head(find(self.model), target), target.chunk
        self.words, self.vocab = self.head.tokens, target.model.config.vocab_size
        self.rows = target.tap(self.head.points)

    def roots(self, seqs: list[Sequence]) -> dict[int, Root]:
        """What the head makes of each sequence, once it has read the rows that came since."""
        return {seq.id: after for seq in seqs if (after := self._catch_up(seq))}

    def go_on(self, trees: list[Tree]) -> tuple[list[tuple[Tree, int]], Tensor]:
        """Read the trees' border.

        Where that is one node, behind nodes whose keys lie in order, only this one; else the border's paths from the
        root, which are few and cost no more than the weights do.
        """
        entries, ids, states, positions, wanted = list[Entry](), list[int](), list[Tensor](), list[int](), list[Any]()
        for tree in trees:
            start = len(tree.seq.tokens) - 1 - self.seen[tree.seq.id].first
            fed = sorted({node for border in tree.border for node in tree.path(border)})
            skip = len(fed) - 1 if len(tree.border) == 1 and fed[:-1] == tree.laid else 0
            tree.laid = fed
            at = {node: i for i, node in enumerate(fed)} | {-1: -1}
            new = fed[skip:]
            parents = None if skip else [at[tree.parents[node]] for node in new]
            entries.append(Entry(tree.seq.id, len(ids), len(new), start + skip, parents))
            for node in new:
                if node in tree.border:
                    wanted.append((tree, node, len(ids)))
                ids.append(tree.tokens[node])
                states.append(tree.state(tree.parents[node]))
                positions.append(len(tree.seq.tokens) - 2 + len(tree.path(node)))
        out, logits = self.head.read(ids, torch.cat(states), positions, Plan(entries), [row for *_, row in wanted])
        for tree, node, row in wanted:
            tree.states[node] = out[row : row + 1]
        return [(tree, node) for tree, node, _ in wanted], logits

    def forget(self, seq: Sequence) -> None:
        """Drop the sequence's keys and states."""
        self.seen.pop(seq.id, None)
        self.head.kv.free(seq.id)

    def kv_bytes(self, tokens: int) -> int:
        """The head's keys, and the target's hidden states until they are read."""
        return self.head.kv.nbytes(tokens) + self.rows.row_bytes * tokens

    def _catch_up(self, seq: Sequence) -> tuple[Tensor, Tensor] | None:
        """Read the rows that came since; what `Seen.after` is then, None if it is not to be had."""
        seen, end = self.seen.setdefault(seq.id, Seen()), len(seq.tokens) - 1
        known, sure = seen.tokens, seen.settled
        rest, truth = known[sure:], seq.tokens[seen.first + 1 + sure :]
        if rest != truth[: len(rest)]:
            del known[sure + common(rest, truth) :]
            seen.after = None
        at = seen.first + len(known)
        found = self.rows.read(seq.id, at, end)
        if found and found[0] > at:  # tokens between were read elsewhere
            self.head.kv.free(seq.id)
            at, known[:] = found[0], []
            seen.first = at
        if found:
            rows = found[1]
            for begin in range(0, len(rows), self.chunk):
                some = rows[begin : begin + self.chunk]
                place, n = at + begin, len(some)
                plan = Plan([Entry(seq.id, 0, n, place - seen.first)])
                ids, positions = seq.tokens[place + 1 : place + 1 + n], list(range(place, place + n))
                wanted = [n - 1] if begin + n == len(rows) else []
                states, logits = self.head.read(ids, self.head.fuse(some), positions, plan, wanted)
                seen.after = states[-1:], logits
            known += seq.tokens[at + 1 : at + 1 + len(rows)]
            self.rows.drop(seq.id, at + len(rows))
        seen.settled = max(0, min(len(known), seq.settled - seen.first - 1))
        return seen.after if seen.first + len(known) == end else None
