"""One decoder for Llama, Mistral, Qwen2 and Qwen3: they differ in a few flags of `ModelConfig`.

A forward is *flat*: the tokens of all sequences one after another, with their positions; nothing is padded. The model
knows neither caches nor masks, it calls `kv.attend` (Law 4).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.config import ModelConfig
from outrider.ops import Block, Linear, Walk, follows_paths, rms_norm, rope

BLOCK = 512  # positions whose rotations are computed together


@dataclass
class Layer:
    """One decoder layer. qkv and gate_up are fused: one product each."""

    input_norm: Tensor  # (hidden,)
    qkv: Linear  # hidden -> (heads + 2 * kv_heads) * dim
    o: Linear
    post_norm: Tensor
    gate_up: Linear  # hidden -> intermediate, gated
    down: Linear
    q_norm: Tensor | None = None  # (dim,), Qwen3
    k_norm: Tensor | None = None


class Attends(Protocol):
    """All that the model knows of a cache; one that also has `stores` (see KVCache) is not asked layer by layer."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, plan: Any) -> Tensor:
        """Store k and v (tokens, kv_heads, dim), let q (tokens, heads, dim) look; returns (tokens, heads * dim)."""


@dataclass
class Wanted:
    """Rows of a forward that are asked for, ascending; the forward puts their logits (rows, vocab) float32 here."""

    rows: list[int]
    logits: Tensor | None = None


@dataclass
class Model:
    """Weights and the forward.

    `embedding` (vocab, hidden) may be a mapped file in the checkpoint's own dtype, or what gives its rows by their ids.
    """

    config: ModelConfig
    embedding: Tensor | Callable[[Tensor], Tensor]
    layers: list[Layer]
    norm: Tensor
    head: Linear  # hidden -> vocab
    dtype: torch.dtype
    device: torch.device

    def __post_init__(self) -> None:
        self.rotary = Rotary(self.config, self.dtype, self.device)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights that a forward reads."""
        linears = [m for layer in self.layers for m in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        return sum(m.nbytes for m in [*linears, self.head])

    @property
    def native_seconds(self) -> float | None:
        """Seconds that forwards have spent in the kernels' walk so far; None where layers are called one by one."""
        return self._walk.seconds if self._walks() and self._walk else None

    def forward(
        self,
        tokens: list[int],
        positions: list[int],
        lengths: list[int],
        kv: Attends,
        plan: Any,
        states: dict[int, Tensor] | None = None,
        wanted: Wanted | None = None,
    ) -> Tensor:
        """Final hidden states (n, hidden), normed, for n tokens at their positions; or of the rows `wanted` only.

        `lengths`: per token the sequence length by which `dynamic` rope scales it; `kv` is a KVCache and `plan` the
        plan it understands. In `states` each key, a point as kv/rows.py has them, gets the states (n, hidden) there,
        and `wanted` gets its logits. Where the kernels take the model and the cache, this is one call of theirs.
        """
        stores = getattr(kv, "stores", None) if self._walks() else None
        if stores is None or (at := stores(plan)) is None:
            hidden = self._layers(tokens, positions, lengths, kv, plan, states)
            if wanted is not None:
                hidden = hidden if len(wanted.rows) == len(hidden) else hidden[wanted.rows]
                wanted.logits = self.logits(hidden)
            return hidden
        assert self._walk is not None
        turns, sines, _kept = self.rotary.addresses(positions, lengths)
        given = tokens if self._walk.embeds else self.embed(torch.tensor(tokens))
        rows = list(range(len(tokens))) if wanted is None else wanted.rows
        hidden, logits = self._walk(given, turns, sines, at, rows, {} if states is None else states, wanted is not None)
        if wanted is not None:
            wanted.logits = logits
        return hidden

    def _layers(
        self,
        tokens: list[int],
        positions: list[int],
        lengths: list[int],
        kv: Attends,
        plan: Any,
        states: dict[int, Tensor] | None,
    ) -> Tensor:
        c = self.config
        x = self.embed(torch.tensor(tokens, device=self.device))
        cos, sin = self.rotary(positions, lengths)
        eps = c.rms_norm_eps
        for i, layer in enumerate(self.layers):
            if states is not None and i in states:
                states[i] = x
            norms = (layer.q_norm, layer.k_norm) if layer.q_norm is not None and layer.k_norm is not None else None
            qkv = layer.qkv(x, layer.input_norm, eps)
            q, k, v = rope(qkv, c.num_heads, c.num_kv_heads, cos, sin, norms, eps)
            x = layer.o(kv.attend(i, q, k, v, plan), residual=x)
            x = layer.down(layer.gate_up(x, layer.post_norm, eps), residual=x)
        normed = rms_norm(x, self.norm, eps)
        if states is not None:
            states.update({point: y for point, y in ((c.num_layers, x), (-1, normed)) if point in states})
        return normed

    def _walks(self) -> bool:
        """Whether the kernels take this model whole, now."""
        return follows_paths(self.dtype, self.device, self.config.head_dim) and self._walk is not None

    @cached_property
    def _walk(self) -> Walk | None:
        """The layers as the kernels walk them; None if some weights are not packed."""
        c, table = self.config, self.embedding
        linears = [m for layer in self.layers for m in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        if not all(linear.native for linear in [*linears, self.head]):
            return None
        blocks = [
            Block(
                layer.input_norm, layer.qkv, layer.q_norm, layer.k_norm, layer.o, layer.post_norm, layer.gate_up,
                layer.down, window,
            )
            for layer, window in zip(self.layers, c.windows, strict=True)
        ]  # fmt: skip
        embedding: Tensor | Linear | None = None
        if isinstance(table, Tensor):
            embedding = table if table.dtype == self.dtype else None
        elif getattr(table, "__self__", None) is self.head:
            embedding = self.head
        shape = c.num_heads, c.num_kv_heads, c.head_dim, c.rms_norm_eps
        return Walk(*shape, blocks, self.norm, self.head, embedding)

    def embed(self, tokens: Tensor) -> Tensor:
        """(n, hidden) in the model's dtype, for ids (n,)."""
        table = self.embedding
        return (F.embedding(tokens, table) if isinstance(table, Tensor) else table(tokens)).to(self.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """(n, vocab) float32 from final hidden states (n, hidden)."""
        return self.head(hidden, dtype=torch.float32)


class Rotary:
    """Rotary embeddings (Su et al. 2104.09864) in the half-split layout, with the scalings of Llama and Qwen.

    `dynamic` NTK scaling makes the base grow with the sequence's length. So that a token's rotation depends on nothing
    but its own sequence (Law 2), a token is rotated by the length the sequence had when it was written: the
    prompt's for prompt tokens, its own position + 1 after. That is what transformers' generate does, too.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        rope, self.dim, self.dtype, self.device = config.rope, config.head_dim, dtype, device
        self.kind, self.theta = rope["rope_type"], rope["rope_theta"]
        self.factor = float(rope.get("factor") or 1.0)
        self.original = int(rope.get("original_max_position_embeddings") or config.max_positions)
        exponents = torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim
        inv = 1.0 / self.theta**exponents
        self.attention_factor = 1.0
        if self.kind == "linear":
            inv = inv / self.factor
        elif self.kind == "llama3":
            inv = self._llama3(inv, float(rope["low_freq_factor"]), float(rope["high_freq_factor"]))
        elif self.kind == "yarn":
            inv = self._yarn(inv, config)
        if factors := rope.get("freq_factors"):  # as GGUF files hold Llama 3's scaling
            inv = inv / torch.tensor(factors)
        self.exponents, self.inv = exponents, inv
        self._block = lru_cache(maxsize=256)(self._make_block)

    def _llama3(self, inv: Tensor, low: float, high: float) -> Tensor:
        """Llama 3.1: long wavelengths are divided by the factor, short ones kept, those between interpolated."""
        turns = self.original * inv / (2 * math.pi)
        smooth = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 - smooth) * inv / self.factor + smooth * inv

    def _yarn(self, inv: Tensor, config: ModelConfig) -> Tensor:
        """YaRN (Peng et al. 2309.00071): interpolate slow dimensions, keep fast ones, temper the attention."""
        rope = config.rope

        def mscale(factor: float, scale: float = 1.0) -> float:
            return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

        if rope.get("attention_factor") is not None:
            self.attention_factor = float(rope["attention_factor"])
        elif rope.get("mscale") and rope.get("mscale_all_dim"):
            both = mscale(self.factor, rope["mscale"]), mscale(self.factor, rope["mscale_all_dim"])
            self.attention_factor = both[0] / both[1]
        else:
            self.attention_factor = mscale(self.factor)

        def dim_of(turns: float) -> float:
            return self.dim * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = dim_of(float(rope.get("beta_fast") or 32)), dim_of(float(rope.get("beta_slow") or 1))
        if rope.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        ramp = ((torch.arange(self.dim // 2) - low) / max(high - low, 0.001)).clamp(0, 1)
        return ramp * inv / self.factor + (1 - ramp) * inv

    def __call__(self, positions: list[int], lengths: list[int]) -> tuple[Tensor, Tensor]:
        """cos and sin (n, 1, dim) for n positions; sin carries the sign of the rotated half.

        Taken from blocks of positions that are always made whole: the vector and the scalar cosine differ in their last
        bits, so a table whose size depended on n would make a row depend on its neighbours.
        """
        keys = [(p // BLOCK, n if self.kind == "dynamic" else 0) for p, n in zip(positions, lengths, strict=True)]
        blocks = {key: i for i, key in enumerate(dict.fromkeys(keys))}
        table = [self._block(*key) for key in blocks]
        joined = table[0] if len(table) == 1 else torch.cat(table, 1)
        at = [blocks[key] * BLOCK + p % BLOCK for key, p in zip(keys, positions, strict=True)]
        cos, sin = joined[:, torch.tensor(at, device=self.device)].unsqueeze(2)
        return cos, sin

    def addresses(self, positions: list[int], lengths: list[int]) -> tuple[list[int], int, list[Tensor]]:
        """For each of n positions where its cosines lie, how many bytes behind them its sines, and what to hold on to.

        Only on a CPU.
        """
        blocks: dict[tuple[int, int], int] = {}
        kept, found, row = list[Tensor](), list[int](), self.dim * self.dtype.itemsize
        for p, n in zip(positions, lengths, strict=True):
            key = p // BLOCK, n if self.kind == "dynamic" else 0
            if (at := blocks.get(key)) is None:
                kept.append(self._block(*key))
                at = blocks[key] = kept[-1].data_ptr()
            found.append(at + p % BLOCK * row)
        return found, BLOCK * row, kept

    def turn(self, keys: Tensor, by: int) -> Tensor:
        """Rotated keys (heads, n, dim) as they would be `by` positions farther on: rotations add up."""
        angles, x = by * self.inv.to(self.device), keys.float()
        cos, sin = torch.cat([angles.cos()] * 2), torch.cat([-angles.sin(), angles.sin()])
        return (x * cos + x.roll(self.dim // 2, -1) * sin).to(keys.dtype)

    def _make_block(self, block: int, length: int) -> Tensor:
        """cos and sin (2, BLOCK, dim) of the positions from block * BLOCK on, for a sequence of that length."""
        inv = self.inv
        if self.kind == "dynamic":
            stretch = self.factor * max(length, self.original) / self.original - (self.factor - 1)
            inv = 1.0 / (self.theta * stretch ** (self.dim / (self.dim - 2))) ** self.exponents
        angles = torch.arange(block * BLOCK, (block + 1) * BLOCK).float()[:, None] * inv
        cos, sin = angles.cos() * self.attention_factor, angles.sin() * self.attention_factor
        both = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)])
        return both.to(device=self.device, dtype=self.dtype)
