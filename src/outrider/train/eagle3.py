"""An EAGLE-3 head for a frozen target: one decoder layer that guesses from the target's hidden states (2503.01840).

At place i the layer sees the embedding of token i + 1 and `fc` of three of the target's hidden states at i, and is
moved towards the law that the target has at i + 1, over a draft vocabulary of the target's most frequent tokens. As
when it drafts, it then goes on from its own output instead of the target's states, `depth` times (training-time test):
at step s the row of place i holds token i + 1 + s, sees the keys of step 0 up to place i, and its own of the steps
since.

What it learns from are conversations of the target's own (`outrider train data`): JSON lines with a prompt `p` and the
output `o`, as token ids. The target reads each once; its states are kept in the folder `states` of the run, batch by
batch, and learnt from again, at least `replay` times, before the next new ones. Lines that come meanwhile are taken up.
One conversation in `HELD_OUT` is never learnt from. The head begins as the rows of the target's, the layer as the
linear map that best leads from a token and the target's last state to the next, which a few thousand tokens fix in
closed form; matrices then learn by Muon, which needs fewer tokens than AdamW.

`state.pt` is written every few minutes, whole or not at all, and a run that is there goes on. `log.jsonl` is the curve.
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

from outrider.config import SamplingParams
from outrider.errors import CheckpointError, ConfigError, told
from outrider.files import check_zip, make_folder, replacing, write_text
from outrider.kv.rows import NORMED
from outrider.llm import LLM
from outrider.load import Progress
from outrider.sequence import Sequence
from outrider.train.settings import Eagle3Settings as Settings

HELD_OUT = 24  # one conversation in so many
MEASURED = 24  # conversations held out that guesses are counted on
DECAY = 0.8  # of the loss, per step of the training-time test
WARM_UP = 10  # steps
COOL_DOWN = 0.3  # the share of the time in which the learning rate falls to nothing
RIDGE = 0.01  # of the least squares
OWN, FASTEST = 24.0, 6  # by how much a row's own score is above those far away, and the rotations that tell
ROWS = 512  # whose logits are held at a time
Keys = list[tuple[Tensor, Tensor]]  # of each step
Turns = tuple[Tensor, Tensor]  # cos and sin of the rows


@dataclass
class Batch:
    """Conversations that the target has read, one after the other."""

    ids: Tensor  # (n,)
    lengths: list[int]  # of the conversations
    starts: list[int]  # the first row of each that is learnt from: the last before the output
    taps: Tensor  # (n, taps * hidden)
    last: Tensor  # (n, hidden), normed: what the target chooses from

    def save(self, path: Path) -> None:
        """Write it, whole or not at all."""
        new = path.with_suffix(".new")
        named = {"ids": self.ids, "taps": self.taps, "last": self.last}
        save_file({**named, "lengths": torch.tensor(self.lengths), "starts": torch.tensor(self.starts)}, new)
        new.replace(path)

    @staticmethod
    def load(path: Path) -> Batch:
        """Read what `save` wrote."""
        named = load_file(path)
        lengths, starts = named["lengths"].tolist(), named["starts"].tolist()
        return Batch(named["ids"], lengths, starts, named["taps"], named["last"])

    def rows(self) -> list[slice]:
        """Per conversation the rows that are learnt from."""
        ends = [sum(self.lengths[: i + 1]) for i in range(len(self.lengths))]
        return [slice(end - n + start, end) for end, n, start in zip(ends, self.lengths, self.starts, strict=True)]


class Attention(nn.Module):
    """Causal attention over the rows of step 0, and over each row's own later steps; conversations apart."""

    def __init__(self, hidden: int, heads: int, dim: int) -> None:
        super().__init__()
        self.heads, self.dim = heads, dim
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(2 * hidden, heads * dim, bias=False) for _ in range(3))
        self.o_proj = nn.Linear(heads * dim, hidden, bias=False)

    def forward(self, x: Tensor, turns: Turns, batch: Batch, before: Keys) -> Tensor:
        """What the rows that are learnt from see, (rows, hidden): all rows of step 0, and their own later ones.

        x (n, 2 * hidden), of all rows at step 0 and later of those that are learnt from. `before` holds each earlier
        step's keys and values, and gets this one's.
        """
        learnt = batch.rows()
        q, k, v = (p(x).view(len(x), self.heads, self.dim) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = turn(q, *turns), turn(k, *turns)
        if not before:
            q = torch.cat([q[rows] for rows in learnt])
        before.append((k, v))
        (keys, values), own = before[0], before[1:]
        parts, at, end = [], 0, 0
        for n, start in zip(batch.lengths, batch.starts, strict=True):
            rows, whole = slice(at, at + n - start), slice(end, end + n)
            at, end = rows.stop, whole.stop
            future = torch.ones(n, n, dtype=torch.bool).triu(1)[start:]
            scores = (q[rows].transpose(0, 1) @ keys[whole].permute(1, 2, 0)).float().masked_fill(future, -math.inf)
            beside = [(q[rows] * k[rows]).float().sum(-1).T.unsqueeze(-1) for k, _ in own]  # (heads, rows, 1) each
            weights = (torch.cat([scores, *beside], -1) / math.sqrt(self.dim)).softmax(-1).to(v.dtype)
            y = (weights[..., :n] @ values[whole].transpose(0, 1)).transpose(0, 1)
            for i, (_, later) in enumerate(own):
                y = y + weights[..., n + i].T.unsqueeze(-1) * later[rows]
            parts.append(y.reshape(n - start, -1))
        out: Tensor = self.o_proj(torch.cat(parts))
        return out


class MLP(nn.Module):
    """Llama's."""

    def __init__(self, hidden: int, wide: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden, wide, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(wide, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(n, hidden) to the same."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


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

    def forward(self, token: Tensor, state: Tensor, turns: Turns, batch: Batch, before: Keys) -> Tensor:
        """The next state of the rows that are learnt from, from the tokens' embeddings and the state before."""
        x = torch.cat([self.input_layernorm(token), self.hidden_norm(state)], -1)
        state = state if before else torch.cat([state[rows] for rows in batch.rows()])
        state = state + self.self_attn(x, turns, batch, before)
        out: Tensor = state + self.mlp(self.post_attention_layernorm(state))
        return out


class Head(nn.Module):
    """What is trained, in float32, by the names of the published format. Raises ConfigError for taps there are not."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, llm: LLM, settings: Settings) -> None:
        super().__init__()
        model, s = llm.runner.model, settings
        c = self.config = model.config
        self.depth, self.heads = s.depth, s.heads or c.num_heads
        self.taps = tuple(s.taps or (min(2, c.num_layers), c.num_layers // 2, c.num_layers))
        if s.vocab > c.vocab_size:
            raise ConfigError(f"vocab {s.vocab} is over the target's {c.vocab_size}")
        self.fc = nn.Linear(len(self.taps) * c.hidden_size, c.hidden_size, bias=False)
        self.midlayer = Layer(c.hidden_size, self.heads, c.head_dim, c.intermediate_size, c.rms_norm_eps)
        self.norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = nn.Linear(c.hidden_size, s.vocab, bias=False).requires_grad_(s.train_head)
        self.register_buffer("d2t", torch.zeros(s.vocab, dtype=torch.long))
        self.register_buffer("t2d", torch.zeros(c.vocab_size, dtype=torch.bool))
        self.embed, self.rotary = model.embed, model.rotary

    @property
    def tokens(self) -> Tensor:
        """The target's ids of the draft vocabulary."""
        return self.d2t + torch.arange(len(self.d2t))

    def unroll(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        """Per step of the training-time test: the normed states, and which place's law each is about.

        States are those of the rows for which the conversation has such a place, (rows, hidden) and (rows,).
        """
        n, lengths = len(batch.ids), torch.tensor(batch.lengths)
        rows, ends = torch.arange(n), torch.repeat_interleave(lengths.cumsum(0), lengths)
        place = torch.cat([torch.arange(k) for k in batch.lengths])
        learnt = torch.cat([rows[own] for own in batch.rows()])
        state, before = self.fc(batch.taps.float()), list[tuple[Tensor, Tensor]]()
        for s in range(self.depth):
            token = self.embed(batch.ids[(rows + 1 + s).clamp(max=len(batch.ids) - 1)].long())
            cos, sin = (t.float() for t in self.rotary((place + s).tolist(), [1] * n))
            state = self.midlayer(token, state, (cos, sin), batch, before)
            if s == 0:
                rows, ends, place, n = learnt, ends[learnt], place[learnt], len(learnt)
            inside = rows + 1 + s < ends
            yield self.norm(state[inside]), (rows + 1 + s)[inside]

    def begin(self, llm: LLM, wanted: list[int]) -> None:
        """The draft vocabulary, and what can be had of the target; without the map that `fit` finds."""
        self.d2t.copy_(torch.tensor(wanted) - torch.arange(len(wanted)))
        self.t2d[wanted] = True
        model, hidden = llm.runner.model, self.config.hidden_size
        with torch.no_grad():
            self.lm_head.weight.copy_(own_head(llm)[wanted])
            self.norm.weight.copy_(model.norm)
            self.midlayer.hidden_norm.weight.copy_(model.norm)
            self.fc.weight.zero_()[:, -hidden:] = torch.eye(hidden)
            self.midlayer.mlp.down_proj.weight.zero_()

    @torch.no_grad()
    def fit(self, batches: list[Batch]) -> None:
        """Set the attention to the linear map that best leads from token and state to the next state.

        All heads look at their own row: queries and keys are the same vector, of the fastest rotations, times what all
        states have in common.
        """
        hidden, layer, attn = self.config.hidden_size, self.midlayer, self.midlayer.self_attn
        products, wanted = torch.zeros(2 * hidden, 2 * hidden), torch.zeros(2 * hidden, hidden)
        mean = torch.zeros(hidden)
        for batch in batches:
            state = batch.taps[:, -hidden:].float()
            inside = torch.ones(len(state), dtype=torch.bool)
            inside[torch.tensor(batch.lengths).cumsum(0) - 1] = False
            rows = inside.nonzero()[:, 0]
            token = self.embed(batch.ids[rows + 1].long())
            x = torch.cat([layer.input_layernorm(token), layer.hidden_norm(state[rows])], -1)
            products += x.T @ x
            wanted += x.T @ (state[rows + 1] - state[rows])
            mean += x[:, hidden:].mean(0) / len(batches)
        products += RIDGE * products.diagonal().mean() * torch.eye(2 * hidden)
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


def own_head(llm: LLM) -> Tensor:
    """The target's projection (vocab, hidden) float32; it may be packed, but its products with unit vectors are it."""
    model = llm.runner.model
    with torch.inference_mode():
        rows = model.head(torch.eye(model.config.hidden_size, dtype=model.dtype)).T
    return rows.float().clone(memory_format=torch.contiguous_format)


class CrossEntropy(torch.autograd.Function):
    """Summed cross-entropy of x @ weight.T against laws, some rows at a time; the gradients are made on the way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, wanted: Tensor) -> Tensor:
        """x (n, hidden), weight (vocab, hidden), wanted (n, vocab) bfloat16."""
        x, w, loss = x.bfloat16(), weight.bfloat16(), 0.0
        dx, dw = torch.empty_like(x), torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
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
    def backward(ctx: Any, grad: Tensor) -> Any:
        """What `forward` made."""
        dx, dw = ctx.saved_tensors
        return dx.float() * grad, None if dw is None else dw * grad, None


class Trainer:
    """A run in a folder, new or to be gone on with. Raises ConfigError for other settings than it was begun with."""

    def __init__(
        self,
        data: list[Path],
        output: Path,
        settings: Settings,
        progress: Progress | None = None,
        llm: LLM | None = None,
    ) -> None:
        self.data, self.output, self.settings, s = data, output, settings, settings
        if missing := [path for path in data if not path.is_file()]:
            raise ConfigError(f"no file of conversations at {missing[0]}; `outrider train data` writes one")
        self.llm = llm or LLM(s.model, dtype=s.dtype, device="cpu", max_num_seqs=32, progress=progress)
        self.llm.runner.progress, self.llm.runner.prefixes = None, False
        self.head = Head(self.llm, s)
        self.rows = self.llm.runner.tap((*self.head.taps, NORMED))
        self.states = output / "states"
        self.states.mkdir(parents=True, exist_ok=True)
        named = [(name, p) for name, p in self.head.named_parameters() if name != "lm_head.weight"]
        self.muon = torch.optim.Muon(
            [p for _, p in named if p.ndim == 2], lr=2 * s.lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
        )
        vectors = {"params": [p for _, p in named if p.ndim < 2], "lr": s.lr}
        self.adam = torch.optim.AdamW(
            [vectors, {"params": [self.head.lm_head.weight], "lr": s.lr / 10}], betas=(0.9, 0.95), weight_decay=0.0
        )
        self.groups = [(group, group["lr"]) for o in (self.muon, self.adam) for group in o.param_groups]
        self.counts = {"steps": 0, "tokens": 0, "read": 0}  # tokens learnt from, and of these for the first time
        self.seconds = 0.0
        self.visits: dict[str, int] = {}  # of each batch
        self.taken: dict[str, int] = {}  # lines of each file that were read
        self.held = self._hold_out()
        if (output / "state.pt").is_file():
            self._resume()
        else:
            self._begin()
        self.own = own_head(self.llm)[self.head.tokens].bfloat16()

    def run(self, minutes: float, every: float = 3.0) -> Iterator[dict[str, Any]]:
        """Learn until it was so many minutes in all; yields, logs and keeps what was reached every so many minutes."""
        began, last, losses = time.time() - self.seconds, time.time(), list[float]()
        dice = random.Random(f"{self.settings.seed}/{self.counts['steps']}")
        while (share := (time.time() - began) / (60 * minutes)) < 1:
            batches = sorted(self.states.glob("batch-*.safetensors"))
            due = [path for path in batches if self.visits.get(path.name, 0) < self.settings.replay]
            path = self.fresh() if len(due) < 3 else None
            batch = Batch.load(path := path or dice.choice(due or batches))
            rate = min(1.0, (1 + self.counts["steps"]) / WARM_UP, (1 - share) / COOL_DOWN)
            for group, highest in self.groups:
                group["lr"] = highest * rate
            losses.append(self.learn(batch))
            self.counts["steps"] += 1
            self.counts["tokens"] += len(batch.ids)
            self.counts["read"] += 0 if path.name in self.visits else len(batch.ids)
            self.visits[path.name] = self.visits.get(path.name, 0) + 1
            if time.time() - last > 60 * every:
                self.seconds, last = time.time() - began, time.time()
                yield self._report(losses)
                losses.clear()
        self.seconds = time.time() - began
        yield self._report(losses)

    def learn(self, batch: Batch) -> float:
        """One step; returns the mean loss of the first guess, in nats."""
        law = F.linear(batch.last.bfloat16(), self.own).float().softmax(-1).bfloat16()
        total, first = torch.zeros(()), 0.0
        with torch.autocast("cpu", torch.bfloat16):
            for s, (states, about) in enumerate(self.head.unroll(batch)):
                loss = CrossEntropy.apply(states, self.head.lm_head.weight, law[about]) / max(1, len(about))  # type: ignore[no-untyped-call]
                first = first if s else loss.item()
                total = total + DECAY**s * loss
        total.backward()  # type: ignore[no-untyped-call]
        for optimizer in (self.muon, self.adam):
            optimizer.step()  # type: ignore[no-untyped-call]
            optimizer.zero_grad()
        return first

    @torch.no_grad()
    def measure(self) -> tuple[list[float], float]:
        """On what is held out: how often the guess at each depth is the target's likeliest token.

        And the tokens a forward that chains as long as the training's depth would give, if the texts went on greedily.
        """
        batch, right, kept = self.held, list[float](), 0.0
        wanted = self.llm.runner.model.logits(batch.last).argmax(-1)
        alive = torch.ones(len(batch.ids))
        places = 0
        with torch.autocast("cpu", torch.bfloat16):
            for s, (states, about) in enumerate(self.head.unroll(batch)):
                guess = self.head.tokens[F.linear(states, self.head.lm_head.weight).argmax(-1)]
                hit = (guess == wanted[about]).float()
                right.append(float(hit.mean()))
                places = places or len(hit)
                still = torch.zeros(len(batch.ids))
                still[about - 1 - s] = alive[about - 1 - s] * hit
                alive = still
                kept += float(alive.sum())
        return right, 1 + kept / max(1, places)

    def fresh(self) -> Path | None:
        """Let the target read the next batch, and keep it. None if there is too little that is new."""
        s, taken, size = self.settings, dict(self.taken), 0
        found = []
        for held, p, o in self._lines(taken):
            if not held:
                found.append(self._cut(p, o))
                size += len(o)
            if size >= s.batch:
                break
        if size < s.batch:
            return None
        path = self.states / f"batch-{len(list(self.states.glob('batch-*.safetensors'))):05d}.safetensors"
        self.read(found).save(path)
        self.taken = taken
        return path

    def _cut(self, p: list[int], o: list[int]) -> tuple[list[int], int, int]:
        """A conversation as `read` wants it."""
        ids = p + o
        skip = max(0, len(p) - self.settings.prompt, len(ids) - self.settings.length)
        return ids, skip, max(0, len(p) - 1 - skip)

    def _hold_out(self) -> Batch:
        """The first conversations that are never learnt from, always the same ones."""
        path = self.states / "held.safetensors"
        if not path.exists():
            found = [self._cut(p, o) for held, p, o in self._lines({}) if held][:MEASURED]
            if not found:
                raise ConfigError("too few conversations to hold one out; write more")
            self.read(found).save(path)
        return Batch.load(path)

    def read(self, found: list[tuple[list[int], int, int]]) -> Batch:
        """What the target makes of conversations: their ids, the place to begin at, and the first row to learn from."""
        runner, parts = self.llm.runner, list[Tensor]()
        for ids, skip, _ in found:
            seq = Sequence(ids, SamplingParams(), 0)
            runner.extend([seq])
            rows = self.rows.read(seq.id, skip, len(ids))
            assert rows is not None, "the target has read all of it"
            parts.append(rows[1].clone())
            runner.free(seq)
        states, hidden = torch.cat(parts), self.head.config.hidden_size
        taps, last = states[:, :-hidden].clone(), states[:, -hidden:].clone()
        tokens = torch.tensor([token for ids, skip, _ in found for token in ids[skip:]], dtype=torch.int32)
        return Batch(tokens, [len(ids) - skip for ids, skip, _ in found], [start for *_, start in found], taps, last)

    def _lines(self, taken: dict[str, int]) -> Iterator[tuple[bool, list[int], list[int]]]:
        """Conversations (held out, prompt, output) after the lines `taken` of each file, which counts them."""
        vocab = self.head.config.vocab_size
        for path in self.data:
            with open(path, encoding="utf-8", errors="replace") as file:
                for number, line in enumerate(file, 1):
                    if number <= taken.get(str(path), 0) or not line.endswith("\n"):  # it may be written just now
                        continue
                    try:
                        entry = json.loads(line)
                        p, o = entry["p"], entry["o"]
                        fits = p and all(0 <= token < vocab for token in p + o)
                    except (ValueError, TypeError, KeyError, RecursionError):
                        fits = False
                    if not fits:
                        raise ConfigError(f"{path}:{number} is no conversation in this model's tokens")
                    taken[str(path)] = number
                    if len(o) > self.settings.depth + 1:
                        yield zlib.crc32(str(p[:64]).encode()) % HELD_OUT == 0, p, o

    def _begin(self) -> None:
        counts: Counter[int] = Counter()
        for _, p, o in self._lines({}):
            counts.update(p)
            counts.update(o * 4)
        counts.update(range(self.head.config.vocab_size))  # merges stand in the order in which they were found useful
        likeliest = sorted(counts, key=lambda token: (-counts[token], token))
        self.head.begin(self.llm, sorted(likeliest[: self.settings.vocab]))
        found: list[Batch] = []
        while sum(len(batch.ids) for batch in found) < self.settings.first and (path := self.fresh()):
            found.append(Batch.load(path))
        if not found:
            raise ConfigError(f"too few conversations for one batch of {self.settings.batch} tokens; write more")
        self.head.fit(found)

    def _report(self, losses: list[float]) -> dict[str, Any]:
        right, tokens = self.measure()
        line = {
            **self.counts, "minutes": round(self.seconds / 60, 1), "loss": round(sum(losses) / max(1, len(losses)), 4),
            "right": [round(r, 4) for r in right], "tokens_a_forward": round(tokens, 3),
        }  # fmt: skip
        state = {
            "settings": asdict(self.settings), "head": self.head.state_dict(), "muon": self.muon.state_dict(),
            "adam": self.adam.state_dict(), "counts": self.counts, "seconds": self.seconds, "visits": self.visits,
            "taken": self.taken,
        }  # fmt: skip
        with replacing(self.output / "state.pt") as partial:
            torch.save(state, partial)
        with open(self.output / "log.jsonl", "a", encoding="utf-8") as log:
            log.write(json.dumps(line) + "\n")
        return line

    def _resume(self) -> None:
        path, now = self.output / "state.pt", asdict(self.settings)
        try:
            check_zip(path)
            state = torch.load(path, weights_only=True)
            begun = dict(state["settings"])
            if not (differs := [key for key in now if tuple_less(now[key]) != tuple_less(begun.get(key))]):
                self.head.load_state_dict(state["head"])
                self.muon.load_state_dict(state["muon"])
                self.adam.load_state_dict(state["adam"])
                self.counts, self.seconds = state["counts"], state["seconds"]
                self.visits, self.taken = state["visits"], state["taken"]
        except Exception as error:  # a damaged file is unpacked, unpickled and applied by others
            raise CheckpointError(
                f"{path} is damaged ({told(error)}); remove it and train from the beginning"
            ) from None
        if differs:
            raise ConfigError(f"{self.output} was begun with {differs[0]} {begun.get(differs[0])}; go on with the same")

    def export(self, folder: Path) -> None:
        """Write the head in the published layout, in bfloat16, with a card that has the curve."""
        s, c = self.settings, self.head.config
        make_folder(folder, "the head's folder")
        kept = {name: t.bfloat16() if t.is_floating_point() else t for name, t in self.head.state_dict().items()}
        with replacing(folder / "model.safetensors") as partial:
            save_file({name: t.contiguous() for name, t in kept.items()}, partial)
        config = {
            "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_act": "silu",
            "base_model_name_or_path": s.model, "hidden_size": c.hidden_size, "intermediate_size": c.intermediate_size,
            "num_hidden_layers": 1, "num_attention_heads": self.head.heads, "num_key_value_heads": self.head.heads,
            "head_dim": c.head_dim, "vocab_size": c.vocab_size, "draft_vocab_size": s.vocab,
            "max_position_embeddings": c.max_positions, "rms_norm_eps": c.rms_norm_eps, "rope_parameters": dict(c.rope),
            "eagle_aux_hidden_state_layer_ids": list(self.head.taps), "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        }  # fmt: skip
        write_text(folder / "config.json", json.dumps(config, indent=1) + "\n")
        log = self.output / "log.jsonl"
        lines = [json.loads(line) for line in log.read_text("utf-8").splitlines()] if log.exists() else []
        rows = "".join(
            f"| {line['tokens']:,} | {line['read']:,} | {line['loss']:.2f} | "
            f"{', '.join(f'{share:.1%}' for share in line['right'])} | {line['tokens_a_forward']:.2f} |\n"
            for line in lines
        )
        card = CARD.format(model=s.model, settings=json.dumps(asdict(s)), rows=rows)
        write_text(folder / "README.md", card)


def tuple_less(value: Any) -> Any:
    """A setting as it is after it was saved."""
    return list(value) if isinstance(value, tuple) else value


CARD = """# An EAGLE-3 head for {model}

Made by `outrider train eagle3`, from conversations that the target wrote itself (`outrider train data`). Its loss, and
its guesses on conversations held out, by tokens learnt from (those read for the first time beside them): how often the
guess at each depth is the target's likeliest token, and the tokens a forward that chains of that depth would give.

| tokens | new | loss | right, by depth | tokens a forward |
|---|---|---|---|---|
{rows}
Settings: `{settings}`. Use it with `--speculate eagle3:model=FOLDER`.
"""
