"""Medusa heads for a frozen target: each learns the target's own law, i + 1 places beyond the next token.

The target reads windows of texts, and its own continuations of such; head i at place t is moved towards the law that
the target has at place t + 1 + i, by cross-entropy (Medusa-1 of 2401.10774, with laws in place of tokens). The residual
blocks start at zero, projections of their own at the target's. Windows held out say how often the candidate of each
rank is the target's likeliest token there, from which the tree is grown.

While it runs, `checkpoint/` in the output folder holds the windows and the last state, from step 0 on; a run resumed
from it ends as one that was never interrupted.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider import corpus
from outrider.config import SamplingParams
from outrider.draft import Draft
from outrider.errors import CheckpointError, ConfigError, message_of
from outrider.files import check_zip, locked, make_folder, replacing, write_text
from outrider.llm import LLM
from outrider.load import Progress
from outrider.ops import native, untouched
from outrider.sequence import Sequence
from outrider.train.heads import damaged, finished, own_head
from outrider.train.settings import Settings

RANKS = 10  # whose accuracy is measured
HELD_OUT = 20  # one window in so many
WARM_UP = 20  # steps
TOKEN_NORM = 16.0  # of the last token's embedding: about 1 per element where that is a few hundred; kept with the heads
SEPARATOR = "<|endoftext|>"  # between the documents of some files
Report = Callable[[int, float, list[float]], None]
"""`report(step, loss, accuracies)`: steps done, nats since the last report (mean of the heads), and the top-1 accuracy
of each head on windows held out."""
KEPT = {name + end for name in ("windows.safetensors", "state.pt") for end in ("", ".partial")}  # of a checkpoint


def train(
    data: list[Path],
    output: Path,
    settings: Settings,
    *,
    resume: bool = False,
    every: int = 100,
    report: Report | None = None,
    progress: Progress | None = None,
) -> list[list[float]]:
    """Train heads on texts or JSON lines, write them into folder `output`, and return accuracies[head][rank].

    Every so many steps the state is kept and `report` called. Raises ConfigError for an output folder that holds
    something, cannot be written or has nothing to resume, and for too little data; CheckpointError for a damaged
    checkpoint, and for a loss that is not finite.
    """
    s, keep = settings, output / "checkpoint"
    begun = (keep / "state.pt").is_file()
    corpus.files(data)  # what is missing is named, even where the checkpoint has what was read of it
    if resume and not begun:
        raise ConfigError(f"{output} holds no checkpoint to resume; leave --resume out")
    # A run that was killed before its first checkpoint has left a folder `checkpoint` without a state.
    strange = not output.is_dir() or {*output.iterdir()} - {keep} or _others(keep)
    if not resume and output.exists() and (begun or strange):
        raise ConfigError(f"{output} already holds something: give a new or empty folder, or --resume")
    make_folder(keep, "output")
    with locked(keep, output):
        return _train(data, output, s, resume, every, report, progress)


def _train(
    data: list[Path],
    output: Path,
    s: Settings,
    resume: bool,
    every: int,
    report: Report | None,
    progress: Progress | None,
) -> list[list[float]]:
    keep = output / "checkpoint"
    try:
        llm = LLM(s.model, dtype=s.dtype, device=s.device, max_num_seqs=32, progress=progress)
        llm.runner.progress, llm.runner.prefixes = None, False
        if s.length > llm.engine.max_len:
            raise ConfigError(f"length {s.length} is over the {llm.engine.max_len} tokens that {s.model} reads")
        heads = Heads(llm, s)
        optimizer = torch.optim.AdamW(heads.parameters(), lr=s.lr, weight_decay=0.01)
        if resume:
            done, windows = restore(keep, s, heads, optimizer)
        else:
            done, windows = 0, read_windows(llm, data, s, progress)
            named = {f"{i:06d}": torch.tensor(ids, dtype=torch.int32) for i, ids in enumerate(windows)}
            with replacing(keep / "windows.safetensors") as partial:
                save_file(named, partial)
            save(keep, s, heads, optimizer, 0)
    except BaseException:
        if not resume:
            _drop(keep)
        raise
    held, taught = windows[::HELD_OUT], [ids for i, ids in enumerate(windows) if i % HELD_OUT]
    losses: list[float] = []
    for step in range(done, s.steps):
        for group in optimizer.param_groups:  # up from nothing, and down again along a cosine
            group["lr"] = s.lr * min(1, (step + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * step / s.steps))
        dice = random.Random(f"{s.seed}/{step}")
        batch = [taught[dice.randrange(len(taught))] for _ in range(s.batch)]
        optimizer.zero_grad()
        losses.append(heads.learn(read(llm, batch)))
        if not math.isfinite(losses[-1]):
            raise CheckpointError(
                f"the loss is {losses[-1]} at step {step}: {s.model} is damaged, or --lr {s.lr} too high"
            )
        optimizer.step()
        if (step + 1) % every == 0 and step + 1 < s.steps:
            save(keep, s, heads, optimizer, step + 1)
            if report:
                report(step + 1, sum(losses) / len(losses), [ranks[0] for ranks in measure(llm, heads, held[:16])])
            losses.clear()
    accuracies = measure(llm, heads, held)
    if report:
        report(s.steps, sum(losses) / max(1, len(losses)), [ranks[0] for ranks in accuracies])
    export(llm, heads, s, accuracies, output)
    _drop(keep)
    return accuracies


def _others(keep: Path) -> set[str]:
    """What is in the folder of a checkpoint, and nothing of ours."""
    return {path.name for path in keep.iterdir()} - KEPT if keep.is_dir() else set()


def _drop(keep: Path) -> None:
    """Remove a checkpoint, and its folder unless somebody keeps other things there."""
    with suppress(OSError):  # it may be why this is called
        for name in KEPT:
            (keep / name).unlink(missing_ok=True)
        if not _others(keep):
            keep.rmdir()


def save(keep: Path, settings: Settings, heads: Heads, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write state.pt, beside the windows. Raises ConfigError if it cannot be written; the one before stays."""
    with replacing(keep / "state.pt") as partial:
        torch.save(
            {"settings": asdict(settings), "heads": heads.state_dict(), "optimizer": optimizer.state_dict(),
             "step": step, "windows": _digest(keep)},
            partial,
        )  # fmt: skip


def restore(
    keep: Path, settings: Settings, heads: Heads, optimizer: torch.optim.Optimizer
) -> tuple[int, list[list[int]]]:
    """Steps done, and the windows. Raises ConfigError for other settings, CheckpointError for damaged files."""
    try:
        check_zip(keep / "state.pt")
        state = torch.load(keep / "state.pt", heads.shared.device, weights_only=True)
        was, done = dict(state["settings"]), int(state["step"])
        if was == asdict(settings):
            heads.load_state_dict(state["heads"])
            optimizer.load_state_dict(state["optimizer"])
            if _digest(keep) != state["windows"]:
                raise ValueError("windows.safetensors is not the one that it was")
            return done, [ids.tolist() for ids in load_file(keep / "windows.safetensors").values()]
    except Exception as error:  # a damaged file is unpacked, unpickled and applied by others, who raise what they like
        raise damaged(keep, message_of(error)) from None
    differs = next(key for key, value in asdict(settings).items() if was.get(key) != value)
    raise ConfigError(f"{keep} was begun with {differs} {was.get(differs)}; resume with the same")


def _digest(keep: Path) -> str:
    return hashlib.sha256((keep / "windows.safetensors").read_bytes()).hexdigest()


def read_windows(llm: LLM, data: list[Path], settings: Settings, progress: Progress | None = None) -> list[list[int]]:
    """Token ids of `windows` texts; in the generated share all but the beginning is the target's, half of it greedy."""
    s, dice = settings, random.Random(settings.seed)
    if llm.tokenizer is None:
        raise ConfigError(f"{s.model} has no tokenizer, without which texts cannot be read")
    if not data:
        raise ConfigError("Medusa heads learn from texts, and none are given: name files or folders of them")
    pieces = []
    for text in corpus.texts(corpus.files(data), progress=progress):
        for document in filter(str.strip, text.split(SEPARATOR)):
            ids = llm.tokenizer(document.strip(), verbose=False)["input_ids"]
            pieces += [ids[at : at + s.length] for at in range(0, len(ids), s.length)]
    pieces = [ids for ids in pieces if len(ids) > max(s.heads + 1, s.length // 4)]
    if len(pieces) < 2:
        raise ConfigError(f"the texts make {len(pieces)} windows of {s.length} tokens; give more, or a lower --length")
    count = min(s.windows, len(pieces))
    windows = [pieces[i * len(pieces) // count] for i in range(count)]
    dice.shuffle(windows)
    continued = range(round(s.generated * count))
    requests = []
    for i in continued:
        prompt = windows[i][: dice.randint(1, max(1, s.length // 4))]
        asked = SamplingParams(temperature=i % 2, seed=s.seed + i, max_tokens=s.length - len(prompt), ignore_eos=True)
        requests += llm.engine.add(prompt, asked)
    for _ in llm.engine.run():
        if progress:
            progress("generating", sum(r.finished for r in requests), len(requests))
    if error := next((request.error for request in requests if request.error), None):
        raise error
    windows[: len(requests)] = [request.seq.tokens for request in requests]
    dice.shuffle(windows)
    return windows


class Window(NamedTuple):
    """A text read by the target: token ids (n,), hidden states (n, hidden) and logits (n, vocab)."""

    ids: Tensor
    hidden: Tensor
    logits: Tensor


class Block(torch.nn.Module):
    """x + silu(W x + b), the identity at first."""

    def __init__(self, size: int, wide: int = 1) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(wide * size, size)
        torch.nn.init.zeros_(self.linear.weight)
        torch.nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor, *beside: Tensor) -> Tensor:
        """(rows, size) to the same; `beside` are further inputs."""
        return x + F.silu(self.linear(torch.cat([x, *beside], -1)))


class Heads(torch.nn.ModuleList):
    """What is trained, in float32. Its state has the names that the drafter reads."""

    def __init__(self, llm: LLM, settings: Settings) -> None:
        s, model = settings, llm.runner.model
        c, size = model.config, model.config.hidden_size
        self.shared = own_head(llm).to(native.product_dtype(model.dtype, model.device))
        heads = []
        for _ in range(s.heads):
            own = [torch.nn.Linear(size, len(self.shared), bias=False)] if s.own_projection else []
            for linear in own:
                linear.weight.data.copy_(self.shared * c.logit_scale)
            blocks = [Block(size, 2 if j == 0 and s.sees_token else 1) for j in range(s.layers)]
            heads.append(torch.nn.ModuleList([*blocks, *own]))
        super().__init__(heads)
        self.to(model.device)
        self.embed, self.settings, self.config = untouched(model.device)(model.embed), s, c

    def logits(self, i: int, hidden: Tensor, last: Tensor) -> Tensor:
        """(rows, vocab) float32 of head i for hidden states (rows, hidden) and the tokens chosen from them (rows,)."""
        s, state = self.settings, hidden.float()
        head: Any = self[i]
        token = TOKEN_NORM * F.normalize(self.embed(last).float())
        for j in range(s.layers):
            state = head[j](state, *[token] * (j == 0 and s.sees_token))
        if s.own_projection:
            return cast(Tensor, head[-1](state))
        return finished(F.linear(state.to(self.shared.dtype), self.shared).float(), self.config)

    def ahead(self, i: int, seen: list[Window]) -> tuple[Tensor, Tensor]:
        """Head i's logits at each place of the windows, and what the target says of the token they are about."""
        n = 1 + i
        hidden, last = torch.cat([w.hidden[:-n] for w in seen]), torch.cat([w.ids[1 : len(w.ids) - i] for w in seen])
        return self.logits(i, hidden, last), torch.cat([w.logits[n:] for w in seen])

    def learn(self, seen: list[Window]) -> float:
        """Add the gradients of a batch; returns its loss, the mean over the heads."""
        total, laws = 0.0, [w._replace(logits=w.logits.softmax(-1)) for w in seen]
        for i in range(len(self)):
            loss = F.cross_entropy(*self.ahead(i, laws))
            loss.backward()  # type: ignore[no-untyped-call]  # head by head: (rows, vocab) is large
            total += loss.item()
        return total / len(self)


def read(llm: LLM, batch: list[list[int]]) -> list[Window]:
    """What the target makes of each window, as verification sees it."""
    seqs = [Sequence(ids[:1], SamplingParams(max_tokens=len(ids)), 0) for ids in batch]
    output = llm.runner.extend(seqs, [Draft.chain(ids[1:]) for ids in batch])
    for seq in seqs:
        llm.runner.free(seq)
    rows = zip(batch, output.hidden, output.logits, strict=True)  # cloned: autograd keeps no tensors of inference
    return [Window(torch.tensor(ids, device=h.device), h.clone(), logits.clone()) for ids, h, logits in rows]


def measure(llm: LLM, heads: Heads, windows: list[list[int]], batch: int = 8) -> list[list[float]]:
    """accuracies[head][rank]: how often the candidate of that rank is the target's likeliest token."""
    counts = torch.zeros(len(heads), RANKS + 1, dtype=torch.long)
    with torch.no_grad():
        for at in range(0, len(windows), batch):
            seen = read(llm, windows[at : at + batch])
            for i in range(len(heads)):
                logits, wanted = heads.ahead(i, seen)
                rank = (logits > logits.gather(-1, wanted.argmax(-1, keepdim=True))).sum(-1).clamp(max=RANKS)
                counts[i] += rank.bincount(minlength=RANKS + 1).cpu()
    shares: list[list[float]] = (counts[:, :RANKS] / counts.sum(-1, keepdim=True)).tolist()
    return shares


def export(llm: LLM, heads: Heads, settings: Settings, accuracies: list[list[float]], output: Path) -> None:
    """Write model.safetensors, in the target's dtype, and config.json. Raises ConfigError if they cannot be written."""
    model = llm.runner.model
    with replacing(output / "model.safetensors", beside=output / "checkpoint") as partial:
        save_file({name: t.to(model.dtype).contiguous() for name, t in heads.state_dict().items()}, partial)
    config: dict[str, Any] = {
        "architectures": ["MedusaHeads"],
        "base_model_name_or_path": settings.model,
        "hidden_size": model.config.hidden_size,
        "vocab_size": model.config.vocab_size,
        "medusa_num_heads": settings.heads,
        "medusa_num_layers": settings.layers,
        "token_norm": TOKEN_NORM,
        "accuracies": [[round(share, 4) for share in ranks] for ranks in accuracies],
    }
    write_text(output / "config.json", json.dumps(config, indent=1) + "\n")
