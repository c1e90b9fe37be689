"""One decoder for all families (families.py): they differ in the switches of `ModelConfig`.

A forward is *flat*: the tokens of all sequences one after another, with their positions; nothing is padded. The model
knows neither caches nor masks, it calls `kv.attend` (Law 4).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.config import ModelConfig
from outrider.ops import (
    MLP,
    Block,
    Experts,
    Graphs,
    Linear,
    Switches,
    Walk,
    add,
    bucket,
    launches,
    native,
    pinned,
    rms_norm,
    rope,
    softcap,
    upload,
)

STILL = {"rope_type": "none", "rope_theta": 1.0}  # that turns nothing
BLOCK = 512  # positions whose rotations are computed together
STAGED = ("dynamic", "longrope")  # that turn by lengths, too


@dataclass
class Layer:
    """One decoder layer. qkv is fused: one product."""

    input_norm: Tensor | None  # (hidden,), before attention
    qkv: Linear  # hidden -> (heads + 2 * kv_heads) * dim
    o: Linear
    post_norm: Tensor | None  # before the MLP
    mlp: MLP | Experts
    q_norm: Tensor | None = None  # (dim,), or of all heads (heads * dim,)
    k_norm: Tensor | None = None
    attention_norm: Tensor | None = None  # (hidden,), after attention
    mlp_norm: Tensor | None = None  # after the MLP
    sinks: Tensor | None = None  # (heads,) float32

    @property
    def linears(self) -> list[Linear]:
        """All products."""
        return [self.qkv, self.o, *self.mlp.linears]


class Attends(Protocol):
    """All that the model knows of a cache; one that also has `stores` (see KVCache) is not asked layer by layer."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, plan: Any, sinks: Tensor | None = None) -> Tensor:
        """Store k and v (tokens, kv_heads, dim), let q (tokens, heads, dim) look; returns (tokens, heads * dim)."""


@dataclass
class Wanted:
    """Rows of a forward that are asked for, ascending; the forward puts their logits (rows, vocab) float32 here.

    And where it knows them, the token of each: the likeliest, as `argmax` says it, or by its own of the `draws`, if
    there are some; -1 is for the caller to find out. If there is `room`, it may write there.
    """

    rows: list[int]
    logits: Tensor | None = None
    best: list[int] | None = None
    room: tuple[Tensor, Tensor] | None = None  # where states and logits may go
    draws: list[native.Draw] | None = None


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
        c, kind = self.config, (self.dtype, self.device)
        self.rotary = Rotary(c, *kind)
        local = Rotary(replace(c, rope=c.local_rope), *kind) if c.local_rope else self.rotary
        still = Rotary(replace(c, rope=STILL), *kind) if c.unrotated else self.rotary
        self.rotaries = [
            still if i in c.unrotated else local if window else self.rotary for i, window in enumerate(c.windows)
        ]
        self._turns = list(dict.fromkeys(self.rotaries))
        self.finishes = c.logit_scale != 1 or c.logit_softcap is not None  # logits are more than the head's products
        self.stretches = any(rotary.kind in STAGED for rotary in self._turns)  # rope asks for lengths
        self.forwards = 0  # so far
        graphs = (
            launches(*kind)
            and self.device.type == "cuda"
            and c.head_dim % 8 == 0
            and not any(isinstance(layer.mlp, Experts) and layer.mlp.triton is None for layer in self.layers)
        )  # those that ask the host which experts were chosen
        self.graphs: Graphs | None = Graphs() if graphs else None  # None: kernels are called one by one
        self._logits = torch.empty(0, c.vocab_size, dtype=torch.float32, device=self.device)  # where they leave them
        self._largest = 2**62  # rows of a graph, until memory gives out
        self.multiplier = float(torch.tensor(c.embedding_multiplier, dtype=self.dtype))  # rounded, as others have it

    @property
    def linears(self) -> list[Linear]:
        """All that a forward multiplies with, the head last."""
        return [*(m for layer in self.layers for m in layer.linears), self.head]

    @property
    def nbytes(self) -> int:
        """Bytes of the weights that a forward of one row reads."""
        return self.expected_bytes(1)

    def expected_bytes(self, rows: int) -> int:
        """Bytes of the weights that a forward reads; of experts, if which a row takes were a matter of chance."""
        fixed = self.head.nbytes + sum(layer.qkv.nbytes + layer.o.nbytes for layer in self.layers)
        return round(fixed + sum(layer.mlp.expected(rows) for layer in self.layers))

    @property
    def expert_bytes(self) -> int:
        """Bytes of experts that all forwards so far have read."""
        return sum(layer.mlp.read for layer in self.layers if isinstance(layer.mlp, Experts))

    @property
    def chains(self) -> bool:
        """Whether a forward runs without the host, and so can be fed tokens that only the device knows."""
        return self.graphs is not None

    @property
    def rounded(self) -> bool:
        """Whether some linears round their rows to 8 bits."""
        return any(m.rounded for m in self.linears)

    def thin(self, layers: Seq[int]) -> Model:
        """This model with some of its layers only, in their order; weights are shared."""
        windows = tuple(self.config.windows[i] for i in layers)
        unrotated = tuple(at for at, i in enumerate(layers) if i in self.config.unrotated)
        mixture = self.config.mixture
        if mixture:
            mixture = replace(mixture, layers=tuple(at for at, i in enumerate(layers) if i in mixture.layers))
        config = replace(self.config, num_layers=len(layers), windows=windows, unrotated=unrotated, mixture=mixture)
        return replace(self, config=config, layers=[self.layers[i] for i in layers])

    @property
    def draws(self) -> bool:
        """Whether a forward draws the tokens of its rows (`Wanted.draws`), if the kernels take the cache, too."""
        return self._walks() and not self.finishes

    @property
    def native_seconds(self) -> float | None:
        """Seconds that forwards have spent in the kernels' walk so far; None where layers are called one by one."""
        return self._walk.seconds if self._walks() and self._walk else None

    def forward(
        self,
        tokens: list[int] | Tensor,
        positions: list[int],
        lengths: list[int],
        kv: Attends,
        plan: Any,
        states: dict[int, Tensor] | None = None,
        wanted: Wanted | None = None,
    ) -> Tensor:
        """Final hidden states (n, hidden), normed, for n tokens at their positions; or of the rows `wanted` only.

        Tokens that only the device knows are (n,) integers there (see `chains`).
        `lengths`: per token the sequence length by which `dynamic` rope scales it; `kv` is a KVCache and `plan` the
        plan it understands. In `states` each key, a point as kv/rows.py has them, gets the states (n, hidden) there,
        and `wanted` gets its logits. Where the kernels take the model and the cache, this is one call of theirs.
        """
        self.forwards += 1
        grown = self.config.query_growth is not None and max(positions, default=0) >= self.config.query_growth[1]
        stores = getattr(kv, "stores", None) if not grown and self._walks() else None
        if stores is None or (at := stores(plan)) is None:
            if (replayed := self._replayed(tokens, positions, lengths, kv, plan, states, wanted)) is not None:
                return replayed
            ids = upload(tokens, self.device) if isinstance(tokens, list) else tokens
            inputs = ids, self._turned(positions, lengths), self._growth(positions), kv, plan, states
            if wanted is None:
                return self._run(*inputs)
            asked = self._at(wanted.rows, len(ids))
            # the states behind the last layer are of all rows
            whole = states is not None and not {self.config.num_layers, -1}.isdisjoint(states)
            hidden = self._run(*inputs)[asked] if whole else self._run(*inputs, rows=asked)
            wanted.logits = self.logits(hidden)
            return hidden
        assert self._walk is not None and isinstance(tokens, list)
        turns, sines, kept = self._turns[0].addresses(positions, lengths)
        for rotary in self._turns[1:]:
            own, _, more = rotary.addresses(positions, lengths)
            turns, kept = turns + own, kept + more
        given = tokens if self._walk.embeds else self.embed(torch.tensor(tokens))
        rows = list(range(len(tokens))) if wanted is None else wanted.rows
        states = {} if states is None else states
        if wanted is None:
            return self._walk(given, turns, sines, at, rows, states, False)[0]
        hidden, logits, best = self._walk(given, turns, sines, at, rows, states, True, wanted.room, None, wanted.draws)
        wanted.logits, wanted.best = logits, best
        if self.finishes:
            wanted.logits, wanted.best = self.finish(logits), None
        return hidden

    def _replayed(
        self,
        tokens: list[int] | Tensor,
        positions: list[int],
        lengths: list[int],
        kv: Attends,
        plan: Any,
        states: dict[int, Tensor] | None,
        wanted: Wanted | None,
    ) -> Tensor | None:
        """`forward` of few rows by a graph of their sizes; None where there are no graphs, or the cache has no part."""
        n, size = len(tokens), bucket(len(tokens))
        on_device = isinstance(self.embedding, Tensor) or (self._tied and self.head.triton)
        if self.graphs is None or size is None or size > self._largest or wanted is None or not on_device:
            return None
        fixed = kv.fixed(plan, size) if hasattr(kv, "fixed") else None
        if fixed is None:
            return None
        rest, points = [0] * (size - n), sorted(states or ())
        ids = pinned(tokens + rest, self.device) if isinstance(tokens, list) else F.pad(tokens, (0, size - n))
        inputs = fixed.inputs | {"tokens": ids}
        for i, turn in enumerate(self._turned(positions + rest, lengths + [1] * len(rest)).values()):
            inputs[f"cos {i}"], inputs[f"sin {i}"] = turn
        if (growth := self._growth(positions + rest)) is not None:
            inputs["growth"] = growth
        if self.config.mixture:
            inputs["real"] = pinned([n], self.device)
        every, room = len(wanted.rows) == n, list[Tensor]()  # else, as of a prompt, the head is not for the graph

        def compute(held: dict[str, Tensor]) -> list[Tensor]:
            turns = {rotary: (held[f"cos {i}"], held[f"sin {i}"]) for i, rotary in enumerate(self._turns)}
            given = fixed.plan(held)
            own: dict[int, Tensor] = dict.fromkeys(points, self.norm)
            hidden = self._run(held["tokens"], turns, held.get("growth"), kv, given, own, held.get("real"))
            for logits in room:
                logits.copy_(self.logits(hidden))
            queries = [torch.stack(given.scratch["queries"])] if fixed.note else []
            return [hidden, *own.values(), *room, *queries]

        try:
            if every and len(self._logits) < size:  # of all graphs: those that have a smaller one keep that
                self._logits = self._logits.new_empty(size, self.config.vocab_size)
            room += [self._logits[:size]] if every else []
            hidden, *others = self.graphs((fixed.key, every, *points), inputs, compute, self.device)
        except torch.OutOfMemoryError:  # they are the first that can go, and the large ones stay away
            self.graphs.clear()
            self._largest = size // 2
            return None
        if fixed.note:
            fixed.note(others.pop())
        if states is not None:
            states.update({point: x[:n].clone() for point, x in zip(points, others, strict=False)})
        hidden = hidden[self._at(wanted.rows, n)].clone()
        wanted.logits = others[-1][:n].clone() if every else self.logits(hidden)
        return hidden

    def _at(self, rows: list[int], n: int) -> slice | Tensor:
        """Where these rows, of n, lie on the device."""
        return slice(n) if len(rows) == n else upload(torch.tensor(rows, dtype=torch.int64), self.device)

    def _turned(self, positions: list[int], lengths: list[int]) -> dict[Any, tuple[Tensor, Tensor]]:
        """cos and sin (n, 1, dim) of each kind of rotation."""
        return {rotary: rotary(positions, lengths) for rotary in self._turns}

    def _run(
        self,
        ids: Tensor,
        turns: dict[Any, tuple[Tensor, Tensor]],
        growth: Tensor | None,
        kv: Attends,
        plan: Any,
        states: dict[int, Tensor] | None,
        real: Tensor | None = None,
        rows: slice | Tensor | None = None,
    ) -> Tensor:
        """All layers, from what is on the device; rows from the number `real` (1,) on are padding.

        Where only some `rows` are asked for, the others leave the last layer nothing but their keys and values.
        """
        c, x = self.config, self.embed(ids)
        eps = c.rms_norm_eps
        for i, layer in enumerate(self.layers):
            if states is not None and i in states:
                states[i] = x
            qkv = layer.qkv(x, layer.input_norm, eps)
            norms = (layer.q_norm, layer.k_norm) if layer.q_norm is not None and layer.k_norm is not None else None
            if norms and c.qk_norm == "full":
                at = 0
                for norm in norms:
                    own = qkv[:, at : at + len(norm)]
                    own.copy_(rms_norm(own, norm, eps))
                    at += len(norm)
                norms = None
            q, k, v = rope(qkv, c.num_heads, c.num_kv_heads, *turns[self.rotaries[i]], norms, eps)
            q = q if growth is None else q * growth
            sinks = {} if layer.sinks is None else {"sinks": layer.sinks}
            seen = kv.attend(i, q, k, v, plan, **sinks)
            if rows is not None and i == c.num_layers - 1:
                seen, x = seen[rows], x[rows]
                if not len(x):
                    return x
            x = self._add(x, partial(layer.o, seen), layer.attention_norm)
            branch = partial(layer.mlp, x, layer.post_norm, eps)
            branch = partial(branch, real=real) if isinstance(layer.mlp, Experts) else branch
            x = self._add(x, branch, layer.mlp_norm)
        normed = rms_norm(x, self.norm, eps)
        if states is not None:
            states.update({point: y for point, y in ((c.num_layers, x), (-1, normed)) if point in states})
        return normed

    def _add(self, x: Tensor, branch: Callable[..., Tensor], norm: Tensor | None) -> Tensor:
        """x (n, hidden) and what a branch adds, normed if there is a norm behind it."""
        c = self.config
        if norm is None and c.residual_multiplier == 1:
            return branch(residual=x)
        y = branch()
        return add(x, y if norm is None else rms_norm(y, norm, c.rms_norm_eps), c.residual_multiplier)

    def _growth(self, positions: list[int]) -> Tensor | None:
        """What queries are multiplied by, (n, 1, 1); None if that is 1."""
        if self.config.query_growth is None:
            return None
        beta, step = self.config.query_growth  # by math.log: torch's last bits depend on how many numbers there are
        factors = [1 + beta * math.log(1 + p // step) for p in positions]
        return upload(torch.tensor(factors, dtype=self.dtype), self.device)[:, None, None]

    def turn(self, layer: int, keys: Tensor, by: int) -> Tensor:
        """Rotated keys (heads, n, dim) of a layer as they would be `by` positions farther on."""
        return self.rotaries[layer].turn(keys, by)

    def _walks(self) -> bool:
        """Whether the kernels take this model whole, now."""
        return native.active != native.REFERENCE and self._walk is not None

    @cached_property
    def _walk(self) -> Walk | None:
        """The layers as the kernels walk them; None if some weights are not packed, or the family has other layers."""
        c = self.config
        packed = [layer.qkv.native and layer.o.native and layer.mlp.native for layer in self.layers]
        if not (all(packed) and self.head.native) or c.head_dim % 8:
            return None
        blocks = [
            Block(
                layer.input_norm, layer.qkv, layer.q_norm, layer.k_norm, layer.o, layer.post_norm, layer.mlp, window,
                layer.attention_norm, layer.mlp_norm, layer.sinks, self._turns.index(rotary),
            )
            for layer, window, rotary in zip(self.layers, c.windows, self.rotaries, strict=True)
        ]  # fmt: skip
        shape = c.num_heads, c.num_kv_heads, c.head_dim, c.rms_norm_eps
        switches = Switches(
            c.attention_scale, c.attention_softcap, c.qk_norm == "full", c.activation, c.clamp, c.residual_multiplier
        )
        return Walk(*shape, blocks, self.norm, self.head, self.embeddings, switches)

    @property
    def embeddings(self) -> Tensor | Linear | None:
        """What kernels take embeddings from: a table (vocab, hidden), or the linear whose rows they are; or nothing."""
        table = self.embedding
        if self.multiplier == 1 and isinstance(table, Tensor):
            return table if table.dtype == self.dtype else None
        return self.head if self.multiplier == 1 and self._tied else None

    @property
    def _tied(self) -> bool:
        """Whether embeddings are read from the head's packed rows."""
        return getattr(self.embedding, "__self__", None) is self.head

    def embed(self, tokens: Tensor) -> Tensor:
        """(n, hidden) in the model's dtype, for ids (n,)."""
        table = self.embedding
        rows = (F.embedding(tokens, table) if isinstance(table, Tensor) else table(tokens)).to(self.dtype)
        return rows if self.multiplier == 1 else rows * self.multiplier

    def logits(self, hidden: Tensor) -> Tensor:
        """(n, vocab) float32 from final hidden states (n, hidden)."""
        return self.finish(self.head(hidden, dtype=torch.float32))

    def finish(self, logits: Tensor) -> Tensor:
        """The logits of the head's products (n, vocab) float32, or of those with another projection."""
        c = self.config
        logits = logits if c.logit_scale == 1 else logits * c.logit_scale
        return logits if c.logit_softcap is None else softcap(logits, c.logit_softcap)


def turned(config: ModelConfig) -> int:
    """How many dimensions of a head rope turns."""
    return int(config.head_dim * (config.rope.get("partial_rotary_factor") or 1.0))


def head_order(config: ModelConfig) -> list[int]:
    """The dimensions of a head in the order in which the model has them: what turns together, half a head apart."""
    dim, count = config.head_dim, turned(config)
    pairs = list(range(count))
    first, second = (pairs[::2], pairs[1::2]) if config.interleaved else (pairs[: count // 2], pairs[count // 2 :])
    middle = (count + dim) // 2
    return [*first, *range(count, middle), *second, *range(middle, dim)]


class Rotary:
    """Rotary embeddings (Su et al. 2104.09864) in the half-split layout, with the scalings that families have.

    Heads whose checkpoint turns neighbours, or part of the dimensions, are laid out anew as they load (`head_order`):
    those that turn together lie half a head apart, and the others turn by nothing.

    `dynamic` NTK scaling makes the base grow with the sequence's length. So that a token's rotation depends on nothing
    but its own sequence (Law 2), a token is rotated by the length the sequence had when it was written: the
    prompt's for prompt tokens, its own position + 1 after. That is what transformers' generate does, too. Of `longrope`
    (LongRoPE, 2402.13753) all tokens turn by one of two sets of factors, by the length that the sequence has now: the
    runner reads it anew when it grows beyond `ModelConfig.border`.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        rope, self.dim, self.dtype, self.device = config.rope, config.head_dim, dtype, device
        self.kind, self.theta = rope["rope_type"], rope["rope_theta"]
        self.factor = float(rope.get("factor") or 1.0)
        self.original = int(rope.get("original_max_position_embeddings") or config.max_positions)
        self.turned = turned(config)
        exponents = torch.arange(0, self.turned, 2, dtype=torch.float32) / self.turned
        inv = 1.0 / self.theta**exponents
        self.attention_factor = 1.0
        if self.kind == "none":
            inv = torch.zeros_like(inv)
        elif self.kind == "linear":
            inv = inv / self.factor
        elif self.kind == "llama3":
            inv = self._llama3(inv, float(rope["low_freq_factor"]), float(rope["high_freq_factor"]))
        elif self.kind == "yarn":
            inv = self._yarn(inv, config)
        elif self.kind == "longrope":
            self.inv_long = inv / torch.tensor(rope["long_factor"], dtype=torch.float32)
            inv = inv / torch.tensor(rope["short_factor"], dtype=torch.float32)
            self.attention_factor = float(rope.get("attention_factor") or self._longrope_factor())
        if factors := rope.get("freq_factors"):  # as GGUF files hold Llama 3's scaling
            inv = inv / torch.tensor(factors, dtype=torch.float32)
        self.exponents, self.inv = exponents, inv
        self._block = lru_cache(maxsize=256)(self._make_block)

    def _llama3(self, inv: Tensor, low: float, high: float) -> Tensor:
        """Llama 3.1: long wavelengths are divided by the factor, short ones kept, those between interpolated."""
        turns = self.original * inv / (2 * math.pi)
        smooth = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 - smooth) * inv / self.factor + smooth * inv

    def _longrope_factor(self) -> float:
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original)) if self.factor > 1 else 1.0

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
            return self.turned * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = dim_of(float(rope.get("beta_fast") or 32)), dim_of(float(rope.get("beta_slow") or 1))
        if rope.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.turned - 1)
        ramp = ((torch.arange(self.turned // 2, dtype=torch.float32) - low) / (high - low or 0.001)).clamp(0, 1)
        return ramp * inv / self.factor + (1 - ramp) * inv

    def __call__(self, positions: list[int], lengths: list[int]) -> tuple[Tensor, Tensor]:
        """cos and sin (n, 1, dim) for n positions; sin carries the sign of the rotated half.

        Taken from blocks of positions that are always made whole: the vector and the scalar cosine differ in their last
        bits, so a table whose size depended on n would make a row depend on its neighbours.
        """
        keys = [(p // BLOCK, self._stage(n)) for p, n in zip(positions, lengths, strict=True)]
        blocks = {key: i for i, key in enumerate(dict.fromkeys(keys))}
        table = [self._block(*key) for key in blocks]
        joined = table[0] if len(table) == 1 else torch.cat(table, 1)
        at = [blocks[key] * BLOCK + p % BLOCK for key, p in zip(keys, positions, strict=True)]
        cos, sin = joined[:, upload(at, self.device)].unsqueeze(2)
        return cos, sin

    def addresses(self, positions: list[int], lengths: list[int]) -> tuple[list[int], int, list[Tensor]]:
        """For each of n positions where its cosines lie, how many bytes behind them its sines, and what to hold on to.

        Only on a CPU.
        """
        blocks: dict[tuple[int, int], int] = {}
        kept: list[Tensor] = []
        found: list[int] = []
        row, staged = self.dim * self.dtype.itemsize, self.kind in STAGED
        for p, n in zip(positions, lengths, strict=True):
            key = p // BLOCK, self._stage(n) if staged else 0
            if (at := blocks.get(key)) is None:
                kept.append(self._block(*key))
                at = blocks[key] = kept[-1].data_ptr()
            found.append(at + p % BLOCK * row)
        return found, BLOCK * row, kept

    def turn(self, keys: Tensor, by: int) -> Tensor:
        """Rotated keys (heads, n, dim) as they would be `by` positions farther on: rotations add up."""
        angles, x = by * self._whole(self.inv, 0.0).to(self.device), keys.float()
        cos, sin = torch.cat([angles.cos()] * 2), torch.cat([-angles.sin(), angles.sin()])
        return (x * cos + x.roll(self.dim // 2, -1) * sin).to(keys.dtype)

    def _whole(self, x: Tensor, rest: float) -> Tensor:
        """x (..., turned / 2) for all pairs of a head, (..., dim / 2)."""
        return F.pad(x, (0, (self.dim - self.turned) // 2), value=rest)

    def _stage(self, length: int) -> int:
        """By which a sequence of that length turns otherwise than others do."""
        return length if self.kind == "dynamic" else int(self.kind == "longrope" and length > self.original)

    def _make_block(self, block: int, stage: int) -> Tensor:
        """cos and sin (2, BLOCK, dim) of the positions from block * BLOCK on, for sequences of that stage."""
        inv = self.inv
        if self.kind == "dynamic":
            stretch = self.factor * max(stage, self.original) / self.original - (self.factor - 1)
            inv = 1.0 / (self.theta * stretch ** (self.turned / (self.turned - 2))) ** self.exponents
        elif stage:
            inv = self.inv_long
        angles = torch.arange(block * BLOCK, (block + 1) * BLOCK).float()[:, None] * inv
        cos = self._whole(angles.cos() * self.attention_factor, 1.0)
        sin = self._whole(angles.sin() * self.attention_factor, 0.0)
        both = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)])
        return both.to(device=self.device, dtype=self.dtype)
