"""An EAGLE-3 head for a frozen target: one decoder layer that guesses from the target's hidden states (2503.01840).

At place i the layer sees the embedding of token i + 1 and `fc` of three of the target's hidden states at i, and is
moved towards the law that the target has at i + 1. As when it drafts, it then goes on from its own output instead of
the target's states: at step s the row of place i holds token i + 1 + s, sees the keys of step 0 up to place i, and its
own of the steps since.

The head begins as the rows of the target's, the layer as the linear map that best leads from a token and the target's
last state to the next, which a few thousand tokens fix in closed form. All else is in train/heads.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider import drafters
from outrider.errors import ConfigError
from outrider.llm import LLM
from outrider.model import Rotary, turned
from outrider.train import heads
from outrider.train.heads import MLP, Batch, Norm
from outrider.train.settings import Eagle3Settings

RIDGE = 0.01  # of the least squares
OWN, FASTEST = 24.0, 6  # by how much a row's own score is above those far away, and the rotations that tell
Keys = list[list[tuple[Tensor, Tensor]]]  # of each step, of each group (conversations, heads, longest, dim)
Turns = tuple[Tensor, Tensor]  # cos and sin of the rows


class Lines:
    """A batch's conversations side by side, each on a line that is padded to the longest of those beside it.

    Beside each other stand neighbours of like lengths: the shortest has at least half the longest one's.
    """

    def __init__(self, batch: Batch, steps: int) -> None:
        counts = [rows.stop - rows.start for rows in batch.rows()]
        self.learnt = batch.learnt().to(batch.ids.device)
        self.groups, at = list[_Group](), 0
        while at < len(counts):
            end = at + 1
            while end < len(counts) and 2 * min(batch.lengths[at : end + 1]) >= max(batch.lengths[at : end + 1]):
                end += 1
            own = slice(at, end)
            self.groups.append(_Group(batch.lengths[own], counts[own], batch.starts[own], steps, batch.ids.device))
            at = end

    def attend(self, q: Tensor, k: Tensor, v: Tensor, before: Keys) -> Tensor:
        """(rows, heads * dim) from q of the rows that are learnt from, and k and v, of all rows if none are `before`.

        A row sees the first step's keys up to its place, and of the later steps its own.
        """
        some = [len(group.some.where) for group in self.groups]
        every = some if before else [len(group.whole.where) for group in self.groups]
        before.append([])
        found = []
        parts = zip(self.groups, torch.split(q, some), torch.split(k, every), torch.split(v, every), strict=True)
        for i, (group, own, keys, values) in enumerate(parts):
            line = group.whole if len(before) == 1 else group.some
            before[-1].append((line.spread(keys), line.spread(values)))
            keys, values = (torch.cat(steps, 2) for steps in zip(*(step[i] for step in before), strict=True))
            seen = group.seen[..., : keys.shape[2]]
            y = F.scaled_dot_product_attention(group.some.spread(own), keys, values, attn_mask=seen)
            found.append(group.some.gather(y))
        return torch.cat(found)


class _Group:
    """Where rows of some conversations lie, and what they may see."""

    def __init__(
        self, lengths: list[int], counts: list[int], starts: list[int], steps: int, device: torch.device
    ) -> None:
        self.whole, self.some = (_Line.of(numbers, device) for numbers in (lengths, counts))
        before = torch.arange(max(counts), device=device).view(1, -1, 1) + torch.tensor(starts, device=device).view(
            -1, 1, 1
        )
        own = torch.eye(max(counts), dtype=torch.bool, device=device).expand(len(counts), -1, -1)
        past = torch.arange(max(lengths), device=device) <= before
        self.seen = torch.cat([past, *[own] * (steps - 1)], -1).unsqueeze(1)


@dataclass
class _Line:
    """Where rows lie in (conversations, longest)."""

    shape: tuple[int, int]
    where: Tensor  # (rows,)

    @staticmethod
    def of(counts: list[int], device: torch.device) -> _Line:
        longest = max(counts)
        where = torch.cat([torch.arange(n) + i * longest for i, n in enumerate(counts)])
        return _Line((len(counts), longest), where.to(device))

    def spread(self, x: Tensor) -> Tensor:
        """(rows, heads, dim) to (conversations, heads, longest, dim)."""
        wide = x.new_zeros(self.shape[0] * self.shape[1], *x.shape[1:]).index_copy(0, self.where, x)
        return wide.view(*self.shape, *x.shape[1:]).transpose(1, 2)

    def gather(self, y: Tensor) -> Tensor:
        """Back, to (rows, heads * dim)."""
        return y.transpose(1, 2).flatten(2).flatten(0, 1).index_select(0, self.where)


class Attention(nn.Module):
    """Causal attention over the rows of step 0, and over each row's own later steps; conversations apart."""

    def __init__(self, hidden: int, heads: int, dim: int) -> None:
        super().__init__()
        self.heads, self.dim = heads, dim
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(2 * hidden, heads * dim, bias=False) for _ in range(3))
        self.o_proj = nn.Linear(heads * dim, hidden, bias=False)

    def forward(self, x: Tensor, turns: Turns, lines: Lines, before: Keys) -> Tensor:
        """What the rows that are learnt from see, (rows, hidden): all rows of step 0, and their own later ones.

        x (n, 2 * hidden), of all rows at step 0 and later of those that are learnt from. `before` holds each earlier
        step's keys and values, and gets this one's.
        """
        q, k, v = (p(x).view(len(x), self.heads, self.dim) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = turn(q, *turns), turn(k, *turns)
        q = q if before else q.index_select(0, lines.learnt)
        out: Tensor = self.o_proj(lines.attend(q, k, v, before))
        return out


class Layer(nn.Module):
    """The one decoder layer, which sees an embedding beside the state."""

    def __init__(self, hidden: int, heads: int, dim: int, wide: int, eps: float) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(hidden, heads, dim), MLP(hidden, wide, hidden)
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (Norm(hidden, eps) for _ in range(3))

    def forward(self, token: Tensor, state: Tensor, turns: Turns, lines: Lines, before: Keys) -> Tensor:
        """The next state of the rows that are learnt from, from the tokens' embeddings and the state before."""
        x = torch.cat([self.input_layernorm(token), self.hidden_norm(state)], -1)
        state = state if before else state.index_select(0, lines.learnt)
        state = state + self.self_attn(x, turns, lines, before)
        out: Tensor = state + self.mlp(self.post_attention_layernorm(state))
        return out


class Head(heads.Head):
    """What is trained, by the names of the published format."""

    def __init__(self, llm: LLM, settings: Eagle3Settings) -> None:
        super().__init__(llm, settings)
        c, s = self.config, settings
        self.heads, model = s.heads or c.num_heads, llm.runner.model
        # a layer as published heads are turns all of a head
        self.rope = c.rope if turned(c) == c.head_dim else {"rope_type": "default", "rope_theta": c.rope["rope_theta"]}
        self.rotary = Rotary(replace(c, rope=self.rope), model.dtype, model.device)
        self.taps = tuple(s.taps or (min(2, c.num_layers), c.num_layers // 2, c.num_layers))
        self.fc = nn.Linear(len(self.taps) * c.hidden_size, c.hidden_size, bias=False)
        self.midlayer = Layer(c.hidden_size, self.heads, c.head_dim, c.intermediate_size, c.rms_norm_eps)
        self.norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.drafter = cast(Any, drafters.find("eagle3"))
        self.drafter.layer(Path("a head for this target"), self.described())  # what nobody could load is not trained

    def unroll(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        """The normed states."""
        n, device = len(batch.ids), batch.ids.device
        rows, ends = torch.arange(n, device=device), batch.ends()
        place = torch.cat([torch.arange(k) for k in batch.lengths])  # on the host, as the rotation wants it
        lines = Lines(batch, self.depth)
        state, before = self.fc(batch.taps.float()), Keys()
        for s in range(self.depth):
            token = self.embed(batch.ids[(rows + 1 + s).clamp(max=len(batch.ids) - 1)].long())
            cos, sin = (t.float() for t in self.rotary((place + s).tolist(), [1] * n))
            state = self.midlayer(token, state, (cos, sin), lines, before)
            if s == 0:
                rows = lines.learnt
                place, n, ends = place[rows.cpu()], len(rows), ends[rows]
            inside = (rows + 1 + s < ends).nonzero().squeeze(1)
            yield self.norm(state.index_select(0, inside)), (rows + 1 + s)[inside]

    @torch.no_grad()
    def begin(self, llm: LLM, wanted: list[int]) -> None:
        """Also what can be had of the target for the layer, without the map that `fit` finds."""
        super().begin(llm, wanted)
        model, hidden = llm.runner.model, self.config.hidden_size
        self.norm.weight.copy_(model.norm)
        self.midlayer.hidden_norm.weight.copy_(model.norm)
        self.fc.weight.zero_()[:, -hidden:].fill_diagonal_(1)
        self.midlayer.mlp.down_proj.weight.zero_()

    def adopt(self, llm: LLM, path: Path, about: dict[str, Any], given: dict[str, Tensor]) -> None:
        """Also a published one, if each of its attention heads has its own keys."""
        if said := self.drafter.norms(about):
            raise ConfigError(f"{path}: {min(said)} is nothing that heads are trained with here")
        if (seen := self.drafter.points(path, about, self.config.num_layers)) != self.taps:
            raise ConfigError(f"{path} sees layers {list(seen)}, not {list(self.taps)}; give them as taps")
        theirs, ours = (self.drafter.layer(path, each) for each in (about, self.described()))
        for name in ("rope", "rms_norm_eps", "num_heads", "head_dim", "windows"):
            if (there := getattr(theirs, name)) != (here := getattr(ours, name)):
                raise ConfigError(f"{path} has {name} {there}, and what is trained here {here}")
        super().adopt(llm, path, about, given)

    def about(self) -> dict[str, Any]:
        """A Llama of one layer, as published heads are."""
        c = self.config
        return {
            "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_act": "silu",
            "intermediate_size": c.intermediate_size, "num_hidden_layers": 1, "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads, "head_dim": c.head_dim, "max_position_embeddings": c.max_positions,
            "rope_parameters": dict(self.rope), "eagle_aux_hidden_state_layer_ids": list(self.taps),
            "tie_word_embeddings": False,
        }  # fmt: skip

    @torch.no_grad()
    def fit(self, batches: list[Batch]) -> None:
        """Set the attention to the linear map that best leads from token and state to the next state.

        All heads look at their own row: queries and keys are the same vector, of the fastest rotations, times what all
        states have in common.
        """
        hidden, layer, attn = self.config.hidden_size, self.midlayer, self.midlayer.self_attn
        products, wanted = (self.fc.weight.new_zeros(2 * hidden, n) for n in (2 * hidden, hidden))
        mean = products.new_zeros(hidden)
        for batch in batches:
            state = batch.taps[:, -hidden:].float()
            rows = torch.arange(len(state), device=state.device)
            rows = rows[rows + 1 < batch.ends()]
            token = self.embed(batch.ids[rows + 1].long())
            x = torch.cat([layer.input_layernorm(token), layer.hidden_norm(state[rows])], -1)
            products += x.T @ x
            wanted += x.T @ (state[rows + 1] - state[rows])
            mean += x[:, hidden:].mean(0) / len(batches)
        products.diagonal().add_(RIDGE * products.diagonal().mean())
        u, s, v = torch.linalg.svd(torch.linalg.solve(products, wanted).T, full_matrices=False)
        rank = min(len(s), attn.heads * attn.dim)
        root = s[:rank].sqrt()
        for weight in (attn.o_proj.weight, attn.v_proj.weight, attn.q_proj.weight, attn.k_proj.weight):
            weight.zero_()
        attn.o_proj.weight[:, :rank] = u[:, :rank] * root
        attn.v_proj.weight[:rank] = root[:, None] * v[:rank]
        common = mean / mean.square().sum() * (OWN * math.sqrt(attn.dim) / FASTEST) ** 0.5
        for proj in (attn.q_proj, attn.k_proj):
            proj.weight.view(attn.heads, attn.dim, -1)[:, : min(FASTEST, attn.dim // 2), hidden:] = common


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate (n, heads, dim) by cos and sin (n, 1, dim)."""
    return (x * cos + x.roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)


class Trainer(heads.Trainer):
    """Learns a `Head`, which begins with a fit."""

    kind, method = Head, "eagle3"
    head: Head
    settings: Eagle3Settings

    def _begin(self) -> None:
        super()._begin()
        if self.settings.start:
            return
        found = [self._load(path) for path in self._batches()]
        while sum(len(batch.ids) for batch in found) < self.settings.first and (path := self.fresh()):
            found.append(self._load(path))
        self.head.fit(found)
