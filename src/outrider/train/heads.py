"""Learning heads for a frozen target from what it says: its states kept on disk, one schedule, one curve, one card.

What a head learns from are conversations of the target's own (`outrider train data`): JSON lines with a prompt `p` and
the output `o`, as token ids. The target reads each once; its states are kept in the folder `states` of the run, batch
by batch, and learnt from again, at least `replay` times, before the next new ones. Lines that come meanwhile are taken
up. One conversation in `HELD_OUT`, with all its turns, is never learnt from. A head guesses over a draft vocabulary of
the target's most frequent tokens, `depth` of them in a row, going on from its own output as when it drafts (the
training-time test of 2503.01840), and is moved towards the target's law at each place. Matrices learn by Muon, which
needs fewer tokens than AdamW.

`state.pt` is written every few minutes, whole or not at all, and a run that is there goes on. `log.jsonl` is the curve.
Weights that guess much worse than before go back to the state, and learn at half the rate from then on.
"""

from __future__ import annotations

import json
import math
import random
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from outrider import drafters
from outrider.config import ModelConfig, SamplingParams, whole
from outrider.corpus import speller
from outrider.errors import CheckpointError, ConfigError, told
from outrider.files import append, check_zip, locked, make_folder, replacing, write_text
from outrider.find import find, kind_of
from outrider.heads import take_out
from outrider.kv.rows import NORMED
from outrider.llm import LLM
from outrider.load import Progress
from outrider.ops import native, untouched
from outrider.sequence import Sequence
from outrider.train.conversations import Template
from outrider.train.settings import HeadSettings

HELD_OUT = 24  # one conversation in so many
MEASURED = 24  # conversations held out that guesses are counted on
DECAY = 0.8  # of the loss, per step of the training-time test
WARM_UP = 10  # steps
COOL_DOWN = 0.3  # the share of the time in which the learning rate falls to nothing
WORSE = 0.15  # fewer guesses kept a forward than the most so far: it learns too fast, and goes back, at half the rate
ROWS = 512  # whose logits are held at a time
CHUNK = 4096  # tokens that a GPU reads at a time: calling its kernels takes the host longer than they take


class Taken(NamedTuple):
    """What was read of a file: so many lines, so many bytes, with this CRC-32, by which it is known elsewhere."""

    lines: int = 0
    size: int = 0
    crc: int = 0

    def begins(self, path: Path) -> bool:
        """Whether a file begins with it."""
        with open(path, "rb") as file:
            begin = file.read(self.size)
        return len(begin) == self.size and zlib.crc32(begin) == self.crc


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
        named = {"ids": self.ids, "taps": self.taps, "last": self.last}
        with replacing(path) as partial:
            save_file({**named, "lengths": torch.tensor(self.lengths), "starts": torch.tensor(self.starts)}, partial)

    @staticmethod
    def load(path: Path, device: torch.device | str = "cpu") -> Batch:
        """Read what `save` wrote. Raises CheckpointError for a damaged file."""
        try:
            named = load_file(path, str(device))
            lengths, starts = named["lengths"].tolist(), named["starts"].tolist()
            batch = Batch(named["ids"], lengths, starts, named["taps"], named["last"])
            fit = len({sum(lengths), len(batch.ids), len(batch.taps), len(batch.last)}) == 1
            if not fit or not all(0 <= start < length for start, length in zip(starts, lengths, strict=True)):
                raise ValueError("its conversations have other rows")
            return batch
        except Exception as error:  # whatever is damaged
            raise damaged(path, told(error)) from None

    def ends(self) -> Tensor:
        """For each row where its conversation ends, (n,)."""
        lengths = torch.tensor(self.lengths)
        return torch.repeat_interleave(lengths.cumsum(0), lengths).to(self.ids.device)

    def rows(self) -> list[slice]:
        """Per conversation the rows that are learnt from."""
        ends = [sum(self.lengths[: i + 1]) for i in range(len(self.lengths))]
        return [slice(end - n + start, end) for end, n, start in zip(ends, self.lengths, self.starts, strict=True)]

    def learnt(self) -> Tensor:
        """The numbers of all these rows, on the host."""
        return torch.cat([torch.arange(rows.start, rows.stop) for rows in self.rows()])


class Head(nn.Module):
    """What is trained, in float32: a projection to a draft vocabulary, and what its kind puts before it.

    Raises ConfigError for a vocabulary larger than the target's.
    """

    d2t: Tensor
    t2d: Tensor
    taps: tuple[int, ...] = ()  # the layers whose inputs are seen, beside the target's last state

    def __init__(self, llm: LLM, settings: HeadSettings) -> None:
        super().__init__()
        model, s = llm.runner.model, settings
        c = self.config = model.config
        if s.vocab > c.vocab_size:
            raise ConfigError(f"vocab {s.vocab} is over the target's {c.vocab_size}")
        self.depth, self.embed = s.depth, untouched(model.device)(model.embed)
        self.lm_head = nn.Linear(c.hidden_size, s.vocab, bias=False).requires_grad_(s.train_head)
        self.register_buffer("d2t", torch.zeros(s.vocab, dtype=torch.long))
        self.register_buffer("t2d", torch.zeros(c.vocab_size, dtype=torch.bool))

    @property
    def tokens(self) -> Tensor:
        """The target's ids of the draft vocabulary."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @torch.no_grad()
    def begin(self, llm: LLM, wanted: list[int]) -> None:
        """The draft vocabulary, and what can be had of the target."""
        self.d2t.copy_(torch.tensor(wanted) - torch.arange(len(wanted)))
        self.t2d[wanted] = True
        self.lm_head.weight.copy_(own_head(llm)[wanted])

    @torch.no_grad()
    def adopt(self, llm: LLM, path: Path, about: dict[str, Any], given: dict[str, Tensor]) -> None:
        """Begin as the head in a folder, from its config.json and tensors.

        Raises ConfigError for another shape, CheckpointError for what no head can hold.
        """
        given.pop("t2d", None)  # says no more than d2t
        own = {name: tensor for name, tensor in self.state_dict().items() if name != "t2d"}
        if odd := sorted((given.keys() ^ own.keys()) - {"lm_head.weight"}):
            raise ConfigError(
                f"{path} has {'no' if odd[0] in own else 'a'} {odd[0]}; no head that is trained here is so"
            )
        for name, tensor in given.items():
            if tensor.shape != own[name].shape:
                there, here = (" x ".join(map(str, t.shape)) for t in (tensor, own[name]))
                raise ConfigError(f"{path}: {name} is {there}, these settings make {here}; give those it was made with")
            if own[name].is_floating_point():
                take_out({name: tensor}, name, tuple(tensor.shape), path)
        words = given["d2t"].long() + torch.arange(len(given["d2t"]))
        vocab = whole(about.get("vocab_size") or 1, 1, self.config.vocab_size)
        if vocab is None or int(words.min()) < 0 or int(words.max()) >= self.config.vocab_size:
            raise ConfigError(f"{path} is for another vocabulary than the target's {self.config.vocab_size} tokens")
        self.begin(llm, words.tolist())
        self.load_state_dict(given, strict=False)

    def unroll(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        """Per step of the training-time test: what the projection sees, and which place's law each row is about.

        Of the rows for which the conversation has such a place, (rows, hidden) and (rows,).
        """
        raise NotImplementedError

    def about(self) -> dict[str, Any]:
        """What its kind writes into config.json."""
        raise NotImplementedError

    def described(self) -> dict[str, Any]:
        """What is in config.json."""
        c = self.config
        return {
            **self.about(), "hidden_size": c.hidden_size, "vocab_size": c.vocab_size,
            "draft_vocab_size": len(self.d2t), "rms_norm_eps": c.rms_norm_eps, "torch_dtype": "bfloat16",
        }  # fmt: skip

    def tensors(self) -> dict[str, Tensor]:
        """What is written beside it."""
        return self.state_dict()


class MLP(nn.Module):
    """Llama's; its output may be narrower than what it sees."""

    def __init__(self, seen: int, wide: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(seen, wide, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(wide, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(n, seen) to (n, hidden)."""
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


def own_head(llm: LLM) -> Tensor:
    """The target's projection (vocab, hidden) float32; it may be packed, but its products with unit vectors are it."""
    model = llm.runner.model
    with untouched(model.device), torch.inference_mode():
        rows = model.head(torch.eye(model.config.hidden_size, dtype=model.dtype, device=model.device)).T
    return rows.float().clone(memory_format=torch.contiguous_format)


def autocast(device: torch.device) -> torch.autocast:
    """Products in bfloat16, where they are fast."""
    fast = native.product_dtype(torch.bfloat16, device) == torch.bfloat16
    return torch.autocast(device.type, torch.bfloat16, enabled=fast)


def finished(products: Tensor, c: ModelConfig) -> Tensor:
    """The logits of products (n, vocab) with a projection, as `Model.finish` has them, for gradients, too."""
    logits = products if c.logit_scale == 1 else products * c.logit_scale
    return logits if c.logit_softcap is None else torch.tanh(logits / c.logit_softcap) * c.logit_softcap


class CrossEntropy(torch.autograd.Function):
    """Summed cross-entropy of finished x @ weight.T against laws, some rows at a time, and its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, wanted: Tensor, c: ModelConfig) -> Tensor:
        """x (n, hidden), weight (vocab, hidden), wanted (n, vocab), in whose dtype it multiplies."""
        x, w, loss = x.to(wanted.dtype), weight.to(wanted.dtype), weight.new_zeros(())
        dx, dw = torch.empty_like(x), torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for at in range(0, len(x), ROWS):
            rows = slice(at, at + ROWS)
            logits, law = finished(F.linear(x[rows], w).float(), c), wanted[rows].float()
            whole = logits.logsumexp(-1, keepdim=True)
            loss += whole.sum() - (law * logits).sum()
            bent = c.logit_scale * (1 if c.logit_softcap is None else 1 - (logits / c.logit_softcap).square())
            slope = logits.sub_(whole).exp_().sub_(law).mul_(bent).to(wanted.dtype)
            dx[rows] = slope @ w
            if dw is not None:
                dw += slope.T @ x[rows]
        ctx.save_for_backward(dx, dw)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """What `forward` made."""
        dx, dw = ctx.saved_tensors
        return dx.float() * grad, None if dw is None else dw * grad, None, None


class Trainer:
    """A run in a folder, new or to be gone on with. Raises ConfigError for other settings than it was begun with."""

    kind: ClassVar[type[Head]]
    method: ClassVar[str]

    def __init__(
        self,
        data: list[Path],
        output: Path,
        settings: HeadSettings,
        progress: Progress | None = None,
        llm: LLM | None = None,
    ) -> None:
        self.data, self.output, self.settings, s = data, output, settings, settings
        if missing := [path for path in data if not path.is_file()]:
            raise ConfigError(f"no file of conversations at {missing[0]}; `outrider train data` writes one")
        self.llm = llm or LLM(s.model, dtype=s.dtype, device=s.device, max_num_seqs=32, progress=progress)
        self.llm.runner.progress, self.llm.runner.prefixes = None, False
        self.device = self.llm.runner.model.device
        if self.device.type == "cuda":
            self.llm.runner.chunk = max(CHUNK, self.llm.runner.chunk)
        self.head = self.kind(self.llm, s).to(self.device)
        self.rows = self.llm.runner.tap((*self.head.taps, NORMED))
        self.states = output / "states"
        make_folder(self.states, "output")
        named = [(name, p) for name, p in self.head.named_parameters() if name != "lm_head.weight"]
        self.muon = torch.optim.Muon(
            [p for _, p in named if p.ndim == 2], lr=2 * s.lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
        )
        vectors = {"params": [p for _, p in named if p.ndim < 2], "lr": s.lr}
        self.adam = torch.optim.AdamW(
            [vectors, {"params": [self.head.lm_head.weight], "lr": s.lr / 10}], betas=(0.9, 0.95), weight_decay=0.0
        )
        self.highest = [group["lr"] for group in self._groups()]
        self.spells = speller(self.llm.tokenizer) if self.llm.tokenizer is not None else None
        self.by_turn = True  # what is held out; runs that were begun earlier go by the first 64 tokens
        self.lead, self.answer = list[int](), list[int]()  # tokens before a user's first words, and those behind them
        with suppress(ConfigError):  # there is no template, or none that can be taken apart
            template = Template(self.llm.tokenizer)
            self.lead, self.answer = template.ids(template.before), template.ids(template.answer)
        self.counts = {"steps": 0, "tokens": 0, "read": 0}  # tokens learnt from, and of these for the first time
        self.seconds = 0.0
        self.rate, self.best = 1.0, 0.0  # of the settings' learning rate; the most tokens a forward so far
        self.visits: dict[str, int] = {}  # of each batch
        self.taken: dict[str, Taken] = {}  # what was read of each file
        with locked(self.states, output):
            begun = (output / "state.pt").is_file()
            batches = self._resume() if begun else 0
            if (there := len(self._batches())) < batches:
                raise damaged(self.output, f"{there} of {batches} batches are there")
            # What was read since the state was kept: its lines come again. Before the first, it may be another model's.
            for path in [*self._batches()[batches:], *([] if begun else self.states.glob("held.safetensors"))]:
                path.unlink()
            self.held = self._hold_out()
            if not begun:
                self._begin()
        self.dtype = native.product_dtype(torch.bfloat16, self.device)
        self.own = own_head(self.llm)[self.head.tokens].to(self.dtype)

    def run(self, minutes: float, every: float = 3.0) -> Iterator[dict[str, Any]]:
        """Learn until it was so many minutes in all; yields, logs and keeps what was reached every so many minutes.

        Raises ConfigError if another run is at it.
        """
        with locked(self.states, self.output):
            yield from self._run(minutes, every)

    def _run(self, minutes: float, every: float) -> Iterator[dict[str, Any]]:
        if not self.counts["steps"]:  # something to go back to
            self.best = self.measure()[1]
            self._keep()
        began, last, losses = time.monotonic() - self.seconds, time.monotonic(), list[float]()
        dice = random.Random(f"{self.settings.seed}/{self.counts['steps']}")
        while (share := (time.monotonic() - began) / (60 * minutes)) < 1:
            batches = self._batches()
            due = [path for path in batches if self.visits.get(path.name, 0) < self.settings.replay]
            path = self.fresh() if len(due) < 3 else None
            batch = self._load(path := path or dice.choice(due or batches))
            rate = min(1.0, (1 + self.counts["steps"]) / WARM_UP, (1 - share) / COOL_DOWN)
            for group, highest in zip(self._groups(), self.highest, strict=True):
                group["lr"] = highest * rate * self.rate
            losses.append(self.learn(batch))
            self.counts["steps"] += 1
            self.counts["tokens"] += len(batch.ids)
            self.counts["read"] += 0 if path.name in self.visits else len(batch.ids)
            self.visits[path.name] = self.visits.get(path.name, 0) + 1
            if time.monotonic() - last > 60 * every:
                self.seconds, last = time.monotonic() - began, time.monotonic()
                yield self._report(losses)
                losses.clear()
        self.seconds = time.monotonic() - began
        if losses:
            yield self._report(losses)

    def _groups(self) -> list[dict[str, Any]]:
        """What has a learning rate; others, once a state was loaded."""
        return [*self.muon.param_groups, *self.adam.param_groups]

    def learn(self, batch: Batch) -> float:
        """One step; returns the mean loss of the first guess, in nats."""
        c, weight = self.head.config, self.head.lm_head.weight
        law = finished(F.linear(batch.last.to(self.dtype), self.own).float(), c).softmax(-1).to(self.dtype)
        total = first = torch.zeros((), device=self.device)
        with autocast(self.device):
            for s, (states, about) in enumerate(self.head.unroll(batch)):
                loss = CrossEntropy.apply(states, weight, law[about], c) / max(1, len(about))  # type: ignore[no-untyped-call]
                first = first if s else loss.detach()
                total = total + DECAY**s * loss
        total.backward()  # type: ignore[no-untyped-call]
        for optimizer in (self.muon, self.adam):
            optimizer.step()  # type: ignore[no-untyped-call]
            optimizer.zero_grad()
        return first.item()

    @torch.no_grad()
    def measure(self) -> tuple[list[float], float]:
        """On what is held out: how often the guess at each depth is the target's likeliest token.

        And the tokens a forward that chains as long as the training's depth would give, if the texts went on greedily.
        """
        batch, right, kept = self.held, list[float](), 0.0
        with untouched(self.device):
            logits = self.llm.runner.model.logits
            wanted = torch.cat([logits(rows).argmax(-1) for rows in torch.split(batch.last, ROWS)])
        alive = torch.ones(len(batch.ids), device=self.device)
        places = 0
        with autocast(self.device):
            for s, (states, about) in enumerate(self.head.unroll(batch)):
                guess = self.head.tokens[F.linear(states, self.head.lm_head.weight).argmax(-1)]
                hit = (guess == wanted[about]).float()
                right.append(float(hit.mean()))
                places = places or len(hit)
                still = torch.zeros_like(alive)
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
        path = self.states / f"batch-{len(self._batches()):05d}.safetensors"
        self._save(found, path)
        self.taken = taken
        return path

    def _batches(self) -> list[Path]:
        """What was read, in the order in which it was."""
        return sorted(self.states.glob("batch-*.safetensors"))

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
                long = f"with answers of more than {self.settings.depth + 1} tokens"
                raise ConfigError(f"too few conversations {long}: one in {HELD_OUT} is held out, and none was yet")
            self._save(found, path)
        return self._load(path)

    def _load(self, path: Path) -> Batch:
        batch, vocab, hidden = Batch.load(path, self.device), self.head.config.vocab_size, self.head.config.hidden_size
        if not bool(((batch.ids >= 0) & (batch.ids < vocab)).all()):
            raise damaged(path, f"some of its ids are not below {vocab}")
        found, wanted = (*batch.taps.shape[1:], *batch.last.shape[1:]), (len(self.head.taps) * hidden, hidden)
        if found != wanted:
            raise damaged(path, f"its rows are {found} wide, this target's {wanted}")
        return batch

    def _save(self, found: list[tuple[list[int], int, int]], path: Path) -> None:
        """Let the target read conversations, the shorter ones first: those of like lengths stand together."""
        self.read(sorted(found, key=lambda one: len(one[0]) - one[1])).save(path)

    def read(self, found: list[tuple[list[int], int, int]]) -> Batch:
        """What the target makes of conversations: their ids, the place to begin at, and the first row to learn from."""
        runner, parts, together = self.llm.runner, list[Tensor](), list[tuple[Sequence, int]]()
        for i, (ids, skip, _) in enumerate(found):
            together.append((Sequence(ids, SamplingParams(), 0), skip))
            size = sum(len(seq.tokens) for seq, _ in together)
            if i + 1 < len(found) and size + len(found[i + 1][0]) <= runner.chunk:
                continue
            runner.extend([seq for seq, _ in together])
            for seq, begin in together:
                rows = self.rows.read(seq.id, begin, len(seq.tokens))
                assert rows is not None, "the target has read all of it"
                parts.append(rows[1].cpu().clone())
                runner.free(seq)
            together.clear()
        states, hidden = torch.cat(parts), self.head.config.hidden_size
        taps, last = states[:, :-hidden].clone(), states[:, -hidden:].clone()
        tokens = torch.tensor([token for ids, skip, _ in found for token in ids[skip:]], dtype=torch.int32)
        return Batch(tokens, [len(ids) - skip for ids, skip, _ in found], [start for *_, start in found], taps, last)

    def _lines(self, taken: dict[str, Taken]) -> Iterator[tuple[bool, list[int], list[int]]]:
        """Conversations (held out, prompt, output) behind what is `taken` of each file, which hears of them."""
        vocab, own = self.head.config.vocab_size, self.spells
        for path in self.data:
            name = str(path.resolve())
            number, at, crc = taken.get(name, Taken())
            with open(path, "rb") as file:
                file.seek(max(0, at - 1))
                if at and file.read(1) != b"\n":
                    raise ConfigError(f"{path} was changed since its first {number} lines were read; give a new output")
                for line in file:
                    if not line.endswith(b"\n"):  # it may be written just now
                        break
                    number, at, crc = number + 1, at + len(line), zlib.crc32(line, crc)
                    try:
                        entry = json.loads(line)
                        p, o = entry["p"], entry["o"]
                        fits = p and all(type(token) is int and 0 <= token < vocab for token in p + o)
                        fits = fits and (own is None or entry.get("by", own) == own)
                    except (ValueError, TypeError, KeyError, RecursionError):
                        fits = False
                    if not fits:
                        raise ConfigError(f"{path}:{number} is no conversation in this model's tokens")
                    if (size := len(p) + len(o)) > self.head.config.context:
                        raise ConfigError(f"{path}:{number} has {size} tokens, more than this model reads")
                    taken[name] = Taken(number, at, crc)
                    if len(o) > self.settings.depth + 1:  # else no guess of so many in a row can be judged
                        key = self._first_turn(p) if self.by_turn else p[:64]
                        yield zlib.crc32(str(key).encode()) % HELD_OUT == 0, p, o

    def _first_turn(self, p: list[int]) -> list[int]:
        """A prompt up to the first answer, the same in all turns of a conversation; without a template, all of it."""
        begin = len(self.lead) if p[: len(self.lead)] == self.lead else 0  # some have a system text of their own
        starts = range(begin, len(p)) if self.answer else ()
        return next((p[:at] for at in starts if p[at : at + len(self.answer)] == self.answer), p)

    def _begin(self) -> None:
        if self.settings.start:
            path, drafter = find(self.settings.start), cast(Any, drafters.find(self.method))
            self.head.adopt(self.llm, path, *drafter.read(path))
        else:
            self.head.begin(self.llm, self._frequent())
        if not self.fresh():
            raise ConfigError(f"too few conversations for one batch of {self.settings.batch} tokens; write more")

    def _frequent(self) -> list[int]:
        counts: Counter[int] = Counter()
        for _, p, o in self._lines({}):
            counts.update(p)
            counts.update(o * 4)
        counts.update(range(self.head.config.vocab_size))  # merges stand in the order in which they were found useful
        likeliest = sorted(counts, key=lambda token: (-counts[token], token))
        return sorted(likeliest[: self.settings.vocab])

    def _report(self, losses: list[float]) -> dict[str, Any]:
        right, tokens = self.measure()
        line: dict[str, Any] = {
            **self.counts, "minutes": round(self.seconds / 60, 1), "loss": round(sum(losses) / len(losses), 4),
            "right": [round(r, 4) for r in right], "tokens_a_forward": round(tokens, 3),
        }  # fmt: skip
        if tokens < self.best - max(0.05, WORSE * (self.best - 1)) or not math.isfinite(line["loss"]):
            self._restore(self._state())
            self.rate /= 2
            line |= {"loss": None, "back_to_rate": self.settings.lr * self.rate}
        self.best = max(self.best, tokens)
        self._keep()
        append(self.output / "log.jsonl", json.dumps(line) + "\n")
        return line

    def _settings(self) -> dict[str, Any]:
        return {"method": self.method, **asdict(self.settings)}

    def _keep(self) -> None:
        state = {
            "settings": self._settings(), "head": self.head.state_dict(), "muon": self.muon.state_dict(),
            "adam": self.adam.state_dict(), "counts": self.counts, "seconds": self.seconds, "visits": self.visits,
            "taken": {path: tuple(own) for path, own in self.taken.items()}, "batches": len(self._batches()),
            "rate": self.rate, "best": self.best, "by_turn": self.by_turn,
        }  # fmt: skip
        with replacing(self.output / "state.pt") as partial:
            torch.save(state, partial)

    def _state(self) -> dict[str, Any]:
        path = self.output / "state.pt"
        try:
            check_zip(path)
            return dict(torch.load(path, self.device, weights_only=True))
        except Exception as error:  # a damaged file is unpacked and unpickled by others
            raise damaged(path, told(error)) from None

    def _resume(self) -> int:
        """Go on from the state; returns how many batches had been read when it was kept."""
        state, now = self._state(), self._settings()
        try:
            begun = dict(state["settings"])
            keys = [key for key in now if key != "device"]
            if not (differs := [key for key in keys if tuple_less(now[key]) != tuple_less(begun.get(key, now[key]))]):
                self._restore(state)
                self.counts = {name: int(state["counts"][name]) for name in self.counts}
                self.seconds = float(state["seconds"])
                self.rate, self.best = float(state["rate"]), float(state["best"])
                self.by_turn = bool(state.get("by_turn"))
                self.visits = {str(name): int(times) for name, times in state["visits"].items()}
                self.taken = {str(Path(path).resolve()): Taken(*map(int, own)) for path, own in state["taken"].items()}
                batches = int(state["batches"])
        except Exception as error:  # what is in it is applied by others
            raise damaged(self.output / "state.pt", told(error)) from None
        if differs:
            raise ConfigError(f"{self.output} was begun with {differs[0]} {begun.get(differs[0])}; go on with the same")
        for path in self.data:  # one that has moved goes on
            if (name := str(path.resolve())) not in self.taken:
                known = [own for own in self.taken.values() if own.begins(path)]
                self.taken |= {name: max(known)} if known else {}
        return batches

    def _restore(self, state: dict[str, Any]) -> None:
        """The weights, and what the optimisers know of them."""
        self.head.load_state_dict(state["head"])
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])

    @classmethod
    def check_export(cls, folder: Path) -> None:
        """Raise ConfigError if the folder holds something else than a head of this kind, which may be replaced."""
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"{folder} is a file; a head needs a folder")
        there = {path.name for path in folder.iterdir() if path.suffix != ".partial"} if folder.is_dir() else set()
        if there and not ("config.json" in there and kind_of(folder) == cls.method):
            raise ConfigError(f"{folder} holds something else than a head of {cls.method}: give a new or empty folder")

    def export(self, folder: Path) -> None:
        """Write the head in its method's layout, in bfloat16, with a card that has the curve.

        Raises ConfigError for a folder that holds something else than such a head.
        """
        s = self.settings
        self.check_export(folder)
        make_folder(folder, "the head's folder")
        kept = {name: t.bfloat16() if t.is_floating_point() else t for name, t in self.head.tensors().items()}
        config = {**self.head.described(), "base_model_name_or_path": s.model}
        write_text(folder / "config.json", json.dumps(config, indent=1) + "\n")  # first: it says what the folder is for
        with replacing(folder / "model.safetensors") as partial:
            save_file({name: t.cpu().contiguous() for name, t in kept.items()}, partial)
        log = self.output / "log.jsonl"
        rows = ""
        for text in log.read_text("utf-8", "replace").splitlines() if log.exists() else ():
            with suppress(ValueError, TypeError, KeyError):  # a full disk may have cut it short, or it was given up
                line = json.loads(text)
                rows += (
                    f"| {line['tokens']:,} | {line['read']:,} | {line['loss']:.2f} | "
                    f"{', '.join(f'{share:.1%}' for share in line['right'])} | {line['tokens_a_forward']:.2f} |\n"
                )
        card = CARD.format(method=self.method, model=s.model, settings=json.dumps(asdict(s)), rows=rows)
        write_text(folder / "README.md", card)


def damaged(path: Path, reason: str) -> CheckpointError:
    """The error that says it."""
    return CheckpointError(f"{path} is damaged ({reason}); remove it and train from the beginning")


def tuple_less(value: Any) -> Any:
    """A setting as it is after it was saved."""
    return list(value) if isinstance(value, tuple) else value


CARD = """# A head for {model}: {method}

Made by `outrider train {method}`, from conversations that the target wrote itself (`outrider train data`). Its loss,
and its guesses on conversations held out, by tokens learnt from (those read for the first time beside them): how often
the guess at each depth is the target's likeliest token, and the tokens a forward that chains of that depth would give.

| tokens | new | loss | right, by depth | tokens a forward |
|---|---|---|---|---|
{rows}
Settings: `{settings}`. Use it with `--speculate {method}:model=FOLDER`.
"""
