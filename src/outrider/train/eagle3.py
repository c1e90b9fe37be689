"""An EAGLE-3 head for a frozen target: one decoder layer that guesses from the target's hidden states (2503.01840).

At place i the layer sees the embedding of token i + 1 and `fc` of three of the target's hidden states at i, and is
moved towards the law that the target has at i + 1, over a draft vocabulary of the target's most frequent tokens. As
when it drafts, it then goes on from its own output instead of the target's states, `depth` times (training-time test):
at step s the row of place i holds token i + 1 + s, sees the keys of step 0 up to place i, and its own of the steps
since.

What it learns from are conversations of the target's own (`outrider train data`): JSON lines with a prompt `p` and the
output `o`, as token ids. The target reads each once; its states are kept in the folder `states` of the run, batch by
batch, and learnt from again while no new lines have come. One conversation in `HELD_OUT` is never learnt from. The head
begins as the rows of the target's, the layer as the linear map that best leads from a token and the target's last state
to the next, which a few thousand tokens fix in closed form.
"""

from __future__ import annotations

import json
import math
import random
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from outrider.errors import ConfigError
from outrider.llm import LLM
from outrider.load import Progress

HELD_OUT = 24  # one conversation in so many
DECAY = 0.8  # of the loss, per step of the training-time test
WARM_UP = 10  # steps
COOL_DOWN = 0.3  # the share of the time in which the learning rate falls to nothing
RIDGE = 0.01  # of the least squares
OWN, FASTEST = 24.0, 6  # how much a row's own score is above those far away, and the rotations that tell
ROWS = 512  # whose logits are held at a time


@dataclass(frozen=True)
class Settings:
    """One training run. Raises ConfigError for what cannot be."""

    model: str = "smollm2"
    vocab: int = 8192  # draft tokens
    taps: tuple[int, ...] = ()  # the layers whose inputs are seen; default 2, half way, and behind the last
    heads: int = 0  # of the attention, each with its own keys; default: as many as the target's
    depth: int = 4  # steps of the training-time test
    length: int = 512  # tokens of a conversation, its last ones
    prompt: int = 128  # of these, at most, before the output
    batch: int = 2048  # tokens a step, about
    train_head: bool = False  # the projection to the draft vocabulary, which begins as the target's, learns as well
    first: int = 16384  # tokens that the first weights are fitted to
    replay: int = 2  # how often a batch is learnt from before the next new one, where there is one
    lr: float = 1e-3
    seed: int = 0
    dtype: str = "auto"

    def __post_init__(self) -> None:
        least = {"vocab": 1, "depth": 1, "length": self.depth + 3, "prompt": 1, "batch": 1, "replay": 1}
        for name, low in least.items():
            if (value := getattr(self, name)) < low:
                raise ConfigError(f"{name} must be at least {low}, not {value}")
        if not 0 < self.lr < 1:
            raise ConfigError(f"lr must be above 0 and below 1, not {self.lr}")


@dataclass
class Batch:
    """Conversations that the target has read, one after the other."""

    ids: Tensor  # (n,)
    lengths: list[int]  # of the conversations
    taps: Tensor  # (n, taps * hidden)
    last: Tensor  # (n, hidden), normed: what the target chooses from
    outputs: Tensor  # (n,) bool: written by the target

    def save(self, path: Path) -> None:
        """Write it, whole or not at all."""
        new = path.with_suffix(".new")
        named = {"ids": self.ids, "taps": self.taps, "last": self.last, "outputs": self.outputs}
        save_file({**named, "lengths": torch.tensor(self.lengths)}, new)
        new.replace(path)

    @staticmethod
    def load(path: Path) -> Batch:
        """Read what `save` wrote."""
        named = load_file(path)
        return Batch(**{**named, "lengths": named["lengths"].tolist()})  # type: ignore[arg-type]


class Attention(nn.Module):
    """Causal attention over the rows of step 0, and over each row's own later steps."""

    def __init__(self, hidden: int, heads: int, dim: int) -> None:
        super().__init__()
        self.heads, self.dim = heads, dim
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(self, name, nn.Linear(2 * hidden, heads * dim, bias=False))
        self.o_proj = nn.Linear(heads * dim, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, lengths: list[int], before: list[tuple[Tensor, Tensor]]) -> Tensor:
        """x (n, 2 * hidden) of step len(before); `before` holds each earlier step's keys and values, and gets this one's."""
        q, k, v = (p(x).view(len(x), self.heads, self.dim) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = turn(q, cos, sin), turn(k, cos, sin)
        before.append((k, v))
        (keys, values), own = before[0], before[1:]
        parts = []
        at = 0
        for n in lengths:
            rows = slice(at, at + n)
            at += n
            scores = (q[rows].transpose(0, 1) @ keys[rows].permute(1, 2, 0)).float()  # (heads, n, n)
            future = torch.ones(n, n, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(future, -math.inf)
            beside = [(q[rows] * k[rows]).float().sum(-1).T.unsqueeze(-1) for k, _ in own]
            weights = (torch.cat([scores, *beside], -1) / math.sqrt(self.dim)).softmax(-1).to(v.dtype)
            y = (weights[..., :n] @ values[rows].transpose(0, 1)).transpose(0, 1)
            for i, (_, v_i) in enumerate(own):
                y = y + weights[..., n + i].T.unsqueeze(-1) * v_i[rows]
            parts.append(y.reshape(n, -1))
        return self.o_proj(torch.cat(parts))


class MLP(nn.Module):
    """Llama's."""

    def __init__(self, hidden: int, wide: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden, wide, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(wide, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(n, hidden) to the same."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Norm(nn.Module):
    """RMS norm, in float32."""

    def __init__(self, hidden: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(hidden)), eps

    def forward(self, x: Tensor) -> Tensor:
        """(n, hidden) to the same."""
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Layer(nn.Module):
    """The one decoder layer, which sees an embedding beside the state."""

    def __init__(self, hidden: int, heads: int, dim: int, wide: int, eps: float) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(hidden, heads, dim), MLP(hidden, wide)
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (Norm(hidden, eps) for _ in range(3))


class Head(nn.Module):
    """What is trained, in float32, by the names of the published format."""

    def __init__(self, llm: LLM, settings: Settings) -> None:
        super().__init__()
        c, s = llm.runner.model.config, settings
        self.config, self.settings = c, s
        self.heads = s.heads or c.num_heads
        self.taps = tuple(s.taps or (2, c.num_layers // 2, c.num_layers))
        self.fc = nn.Linear(len(self.taps) * c.hidden_size, c.hidden_size, bias=False)
        self.midlayer = Layer(c.hidden_size, self.heads, c.head_dim, c.intermediate_size, c.rms_norm_eps)
        self.norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = nn.Linear(c.hidden_size, s.vocab, bias=False)
        self.register_buffer("d2t", torch.zeros(s.vocab, dtype=torch.long))
        self.register_buffer("t2d", torch.zeros(c.vocab_size, dtype=torch.bool))
        self.embedding, self.rotary = llm.runner.model.embedding, llm.runner.model.rotary
        self.own: Tensor = torch.empty(0)  # the target's head at the draft vocabulary

    @property
    def tokens(self) -> Tensor:
        """The target's ids of the draft vocabulary."""
        return self.d2t + torch.arange(len(self.d2t))

    def step(self, ids: Tensor, state: Tensor, cos: Tensor, sin: Tensor, lengths: list[int], before: list[Any]) -> Tensor:
        """The next state (n, hidden) from tokens (n,) and the state before."""
        layer = self.midlayer
        token = layer.input_layernorm(F.embedding(ids, self.embedding))
        x = torch.cat([token, layer.hidden_norm(state)], -1)
        state = state + layer.self_attn(x, cos, sin, lengths, before)
        return state + layer.mlp(layer.post_attention_layernorm(state))

    def unroll(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        """Per step of the training-time test: the normed states, and which place's law each is about.

        States are those of the rows for which the conversation has such a place, (rows, hidden) and (rows,).
        """
        n = len(batch.ids)
        ends = torch.repeat_interleave(torch.tensor(batch.lengths).cumsum(0), torch.tensor(batch.lengths))
        place = torch.cat([torch.arange(k) for k in batch.lengths])
        state, before, rows = self.fc(batch.taps.float()), [], torch.arange(n)
        for s in range(self.settings.depth):
            ids = batch.ids[(rows + 1 + s).clamp(max=n - 1)].long()
            cos, sin = (t.float() for t in self.rotary((place + s).tolist(), [1] * n))
            state = self.step(ids, state, cos, sin, batch.lengths, before)
            inside = rows + 1 + s < ends
            yield self.norm(state[inside]), (rows + 1 + s)[inside]


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate (n, heads, dim) by cos and sin (n, 1, dim)."""
    return (x * cos + x.roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)


class CrossEntropy(torch.autograd.Function):
    """Summed cross-entropy of x @ weight.T against laws given as target logits: rows by rows, gradients on the way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, wanted: Tensor) -> Tensor:  # type: ignore[override]
        x, w = x.bfloat16(), weight.bfloat16()
        dx, dw, loss = torch.empty_like(x), torch.zeros_like(weight) if ctx.needs_input_grad[1] else None, 0.0
        for at in range(0, len(x), ROWS):
            rows = slice(at, at + ROWS)
            logits, law = F.linear(x[rows], w).float(), wanted[rows].float()
            whole = logits.logsumexp(-1, keepdim=True)
            loss += (whole.sum() - (law * logits).sum()).item()
            slope = (logits.sub_(whole).exp_() - law).bfloat16()
            dx[rows] = slope @ w
            if dw is not None:
                dw += slope.T @ x[rows]
        ctx.save_for_backward(dx, dw)
        return torch.tensor(loss)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        dx, dw = ctx.saved_tensors
        return dx.float() * grad, None if dw is None else dw * grad, None


@torch.no_grad()
def fit(head: Head, batches: list[Batch]) -> None:
    """Set the attention to the linear map that best leads from token and state to the next state, by least squares.

    All heads look at their own row: queries and keys are the same vector, of the fastest rotations, times what all
    states have in common.
    """
    hidden, layer, attn = head.config.hidden_size, head.midlayer, head.midlayer.self_attn
    products, wanted = torch.zeros(2 * hidden, 2 * hidden), torch.zeros(2 * hidden, hidden)
    mean = torch.zeros(hidden)
    for batch in batches:
        state = batch.taps[:, -hidden:].float()
        inside = torch.ones(len(state), dtype=torch.bool)
        inside[torch.tensor(batch.lengths).cumsum(0) - 1] = False
        rows = inside.nonzero()[:, 0]
        token = F.embedding(batch.ids[rows + 1].long(), head.embedding)
        x = torch.cat([layer.input_layernorm(token), layer.hidden_norm(state[rows])], -1)
        products += x.T @ x
        wanted += x.T @ (state[rows + 1] - state[rows])
        mean += x[:, hidden:].mean(0) / len(batches)
    products += RIDGE * products.diagonal().mean() * torch.eye(2 * hidden)
    u, s, v = torch.linalg.svd(torch.linalg.solve(products, wanted).T, full_matrices=False)
    rank = attn.heads * attn.dim
    s = s[:rank].sqrt()
    for weight in (attn.o_proj.weight, attn.v_proj.weight, attn.q_proj.weight, attn.k_proj.weight):
        weight.zero_()
    attn.o_proj.weight[:, : len(s)] = u[:, :rank] * s
    attn.v_proj.weight[: len(s)] = s[:, None] * v[:rank]
    common = mean / mean.square().sum() * (OWN * math.sqrt(attn.dim) / FASTEST) ** 0.5
    for proj in (attn.q_proj, attn.k_proj):
        proj.weight.view(attn.heads, attn.dim, -1)[:, :FASTEST, hidden:] = common


class Trainer:
    """A run in a folder: `state.pt`, the batches that were read, `log.jsonl`, and the head as it is published."""

    def __init__(self, data: list[Path], output: Path, settings: Settings, progress: Progress | None = None) -> None:
        self.data, self.output, self.settings = data, output, settings
        self.llm = LLM(settings.model, dtype=settings.dtype, device="cpu", max_num_seqs=32, progress=progress)
        self.llm.runner.progress = None
        self.states = output / "states"
        self.states.mkdir(parents=True, exist_ok=True)
        self.head = Head(self.llm, settings)
        self.head.lm_head.weight.requires_grad_(settings.train_head)
        matrices = [p for n, p in self.head.named_parameters() if p.ndim == 2 and not n.startswith("lm_head")]
        self.muon = torch.optim.Muon(matrices, lr=2 * settings.lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
        rest = [p for p in self.head.parameters() if p.ndim < 2]
        self.adam = torch.optim.AdamW(
            [{"params": rest, "lr": settings.lr}, {"params": [self.head.lm_head.weight], "lr": settings.lr / 10}],
            betas=(0.9, 0.95), weight_decay=0.0,
        )  # fmt: skip
        for group in [*self.muon.param_groups, *self.adam.param_groups]:
            group["highest"] = group["lr"]
        self.counts = {"steps": 0, "tokens": 0, "read": 0}  # tokens learnt from, and of these for the first time
        self.seconds = 0.0
        self.visits: dict[str, int] = {}
        self.taken: dict[str, int] = {}  # lines of each file that were read
        if (output / "state.pt").is_file():
            self._resume()
        else:
            self._begin()
        with torch.inference_mode():
            eye = torch.eye(self.head.config.hidden_size, dtype=self.llm.runner.model.dtype)
            self.head.own = self.llm.runner.model.head(eye)[:, self.head.tokens].T.float().clone()

    def _begin(self) -> None:
        """The draft vocabulary, and weights from the target's."""
        head, model, s = self.head, self.llm.runner.model, self.settings
        counts: Counter[int] = Counter()
        for _, p, o in self._lines({}):
            counts.update(p)
            counts.update(o * 4)
        if not counts:
            raise ConfigError(f"no conversations in {', '.join(map(str, self.data))}")
        counts.update(range(len(head.t2d)))  # byte-pair tokens stand in the order of their merges, frequent ones first
        wanted = sorted(sorted(counts, key=lambda t: (-counts[t], t))[: s.vocab])
        head.d2t = torch.tensor(wanted) - torch.arange(s.vocab)
        head.t2d[wanted] = True
        projection = torch.eye(head.config.hidden_size, dtype=model.dtype)
        with torch.no_grad():
            head.lm_head.weight.copy_(model.head(projection).T[wanted])
            head.norm.weight.copy_(model.norm)
            head.midlayer.hidden_norm.weight.copy_(model.norm)
            head.fc.weight.zero_()[:, -len(projection) :] = torch.eye(len(projection))
            head.midlayer.mlp.down_proj.weight.zero_()
        found = []
        while sum(len(batch.ids) for batch in found) < s.first and (path := self.fresh()):
            found.append(Batch.load(path))
        if found:
            fit(head, found)

    def _lines(self, taken: dict[str, int]) -> Iterator[tuple[bool, list[int], list[int]]]:
        """Conversations (held out, prompt, output) after the lines `taken` of each file, which counts them."""
        for path in self.data:
            with open(path, encoding="utf-8") as file:
                for i, line in enumerate(file):
                    if i < taken.get(str(path), 0) or not line.endswith("\n"):
                        continue
                    entry = json.loads(line)
                    p, o = entry["p"], entry["o"]
                    taken[str(path)] = i + 1
                    if len(o) > self.settings.depth + 1:
                        yield zlib.crc32(bytes(str(p[:64]), "ascii")) % HELD_OUT == 0, p, o

    def fresh(self) -> Path | None:
        """Let the target read the next batch, and keep it. None if there is too little that is new."""
        s, taken, size = self.settings, dict(self.taken), 0
        groups: dict[bool, list[tuple[list[int], int]]] = {False: [], True: []}
        for held, p, o in self._lines(taken):
            ids = (p + o)[:]
            skip = max(0, len(p) - s.prompt, len(ids) - s.length)
            groups[held].append((ids, skip))
            size += len(ids) - skip
            if size >= s.batch:
                break
        if size < s.batch:
            return None
        name = f"{len(list(self.states.glob('*.safetensors'))):05d}"
        for held, found in groups.items():
            if found:
                batch = self.read(found, {i: len(ids) for i, (ids, _) in enumerate(found)})
                batch.save(self.states / f"{'held' if held else 'batch'}-{name}.safetensors")
        self.taken = taken
        return self.states / f"batch-{name}.safetensors" if groups[False] else None

    def read(self, found: list[tuple[list[int], int]], _: Any = None) -> Batch:
        """What the target makes of conversations, from the place `skip` of each on."""
        from outrider.kv import Entry, Plan

        model, kv, taps = self.llm.runner.model, self.llm.runner.kv, []
        parts: list[Any] = []
        with torch.inference_mode():
            for n, (ids, skip) in enumerate(found):
                sid = 10**9 + n
                plan = Plan([Entry(sid, 0, len(ids), 0)])
                kv.reserve(plan)
                taps = dict.fromkeys(self.head.taps)
                hidden = model.forward(ids, list(range(len(ids))), [len(ids)] * len(ids), kv, plan, taps)
                kv.free(sid)
                parts.append((torch.tensor(ids[skip:]), torch.cat([t[skip:] for t in taps.values()], -1), hidden[skip:]))
        ids, states, last = (torch.cat(p) for p in zip(*parts, strict=True))
        return Batch(ids.int(), [len(p[0]) for p in parts], states, last, torch.ones(len(ids), dtype=torch.bool))

    def learn(self, batch: Batch) -> float:
        """One step; returns the mean loss of the first guess, in nats."""
        head, first = self.head, 0.0
        law = F.linear(batch.last.bfloat16(), head.own.bfloat16()).float().softmax(-1).bfloat16()
        total = torch.zeros(())
        with torch.autocast("cpu", torch.bfloat16):
            for s, (states, about) in enumerate(head.unroll(batch)):
                loss = CrossEntropy.apply(states, head.lm_head.weight, law[about]) / len(about)
                first = loss.item() if s == 0 else first
                total = total + DECAY**s * loss
        total.backward()
        nn.utils.clip_grad_norm_([p for p in head.parameters() if p.ndim < 2], 1.0)
        for optimizer in (self.muon, self.adam):
            optimizer.step()
            optimizer.zero_grad()
        return first

    @torch.no_grad()
    def measure(self, most: int = 24) -> tuple[list[float], float]:
        """On held-out batches: how often the guess at each depth is the target's likeliest token, and of a chain the
        tokens a forward when decoding greedily, as far as the training's depth."""
        right, count = torch.zeros(self.settings.depth), torch.zeros(self.settings.depth)
        whole, places = 0.0, 0
        for path in sorted(self.states.glob("held-*"))[:most]:
            batch = Batch.load(path)
            wanted = self.llm.runner.model.logits(batch.last).argmax(-1)
            sure = None
            with torch.autocast("cpu", torch.bfloat16):
                for s, (states, about) in enumerate(self.head.unroll(batch)):
                    guess = self.head.tokens[F.linear(states, self.head.lm_head.weight).argmax(-1)]
                    hit = guess == wanted[about]
                    right[s] += hit.sum()
                    count[s] += len(hit)
                    told = batch.ids.long()[about] == wanted[about - 1]  # the text is what greedy decoding would say
                    start = about - 1 - s
                    if sure is None:
                        sure = torch.zeros(len(batch.ids))
                        sure[start] = 1.0
                        places += len(start)
                    now = torch.zeros(len(batch.ids))
                    now[start] = sure[start] * hit
                    sure = now
                    whole += sure.sum().item()
                    del told
        return (right / count.clamp(min=1)).tolist(), 1 + whole / max(1, places)

    def run(self, minutes: float, every: float = 3.0) -> Iterator[dict[str, Any]]:
        """Learn for so many minutes in all; yields, and logs, what was reached every so many minutes, and keeps it."""
        began, last, losses = time.time() - self.seconds, time.time(), list[float]()
        dice = random.Random(f"{self.settings.seed}/{self.counts['steps']}")
        while True:
            self.seconds = time.time() - began
            share = min(1.0, self.seconds / (60 * minutes))
            if share >= 1:
                break
            stale = [p for p in sorted(self.states.glob("batch-*")) if self.visits.get(p.name, 0) < self.settings.replay]
            path = None if len(stale) > 2 else self.fresh()
            path = path or dice.choice(stale or sorted(self.states.glob("batch-*")) or [None])
            if path is None:
                time.sleep(5)
                continue
            batch = Batch.load(path)
            rate = min(1.0, (1 + self.counts["steps"]) / WARM_UP, (1 - share) / COOL_DOWN)
            for group in [*self.muon.param_groups, *self.adam.param_groups]:
                group["lr"] = group["highest"] * rate
            losses.append(self.learn(batch))
            self.counts["steps"] += 1
            self.counts["tokens"] += len(batch.ids)
            self.counts["read"] += len(batch.ids) if not self.visits.get(path.name) else 0
            self.visits[path.name] = self.visits.get(path.name, 0) + 1
            if time.time() - last > 60 * every:
                self.seconds, last = time.time() - began, time.time()
                yield self._report(losses)
                losses.clear()
        yield self._report(losses)

    def _report(self, losses: list[float]) -> dict[str, Any]:
        right, tokens = self.measure()
        line = {
            **self.counts, "minutes": round(self.seconds / 60, 1), "loss": round(sum(losses) / max(1, len(losses)), 4),
            "right": [round(r, 4) for r in right], "tokens_a_forward": round(tokens, 3),
        }  # fmt: skip
        self.keep()
        with open(self.output / "log.jsonl", "a", encoding="utf-8") as log:
            log.write(json.dumps(line) + "\n")
        return line

    def keep(self) -> None:
        """Write the state, whole or not at all, and the head as it is published."""
        state = {
            "settings": asdict(self.settings), "head": self.head.state_dict(), "muon": self.muon.state_dict(),
            "adam": self.adam.state_dict(), "counts": self.counts, "seconds": self.seconds, "visits": self.visits,
            "taken": self.taken,
        }  # fmt: skip
        torch.save(state, self.output / "state.new")
        (self.output / "state.new").replace(self.output / "state.pt")

    def _resume(self) -> None:
        state = torch.load(self.output / "state.pt", weights_only=True)
        self.head.load_state_dict(state["head"])
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])
        self.counts, self.seconds = state["counts"], state["seconds"]
        self.visits, self.taken = state["visits"], state["taken"]
