"""The training of a reference model: batches, one loop, checkpoints, export.

One loop trains both models. The draft model has a teacher, whose whole distribution it learns instead of the text's
next token. What decides the result stands in a recipe (tools/recipes/*.json); the device decides how long it takes. A
batch is a pure function of (seed, step), so a run that was interrupted goes on as if nothing had happened.
"""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from outrider.errors import CheckpointError, ConfigError
from outrider.files import check_zip, make_folder, replacing
from outrider.find import find
from outrider.load import Progress
from outrider.train.heads import autocast
from tools.data import END, Corpus, read_corpus
from tools.distill import write_samples
from tools.recall import SHARES, Recall

IGNORED = -100  # no loss for this label
LONG = 2048  # above, attention is torch's own, and keys have no weights
RECIPES = Path(__file__).parent / "recipes"
CHECKPOINT_EVERY = 300.0  # seconds
CROWD, MOST = 4, 256  # one key in so many stands for others, and for how many at most
CHECK_WINDOWS, CHECK_LENGTH = 8, 1024  # per domain: what is held out, looked at whenever a checkpoint is written


@dataclass(frozen=True)
class Recipe:
    """What decides the result of a training run. Shares need not add up to 1."""

    model: dict[str, Any]  # LlamaConfig's arguments, but for what the tokenizer says
    tokens: int  # to train on, when no time is given
    batch: int  # tokens of one step
    micro: int  # tokens of one forward on a CPU
    lengths: dict[str, float]  # of sequences, and the share of forwards that have them
    mixture: dict[str, float]  # domains, and the share of sequences that are of them; `recall` is made as it goes
    early: dict[str, Any] = field(
        default_factory=dict
    )  # `tokens`: for the first so many, other `lengths` and `mixture`
    samples: int = 0  # tokens to sample from the teacher, as the mixture's domain `samples`
    skips: float = 0.5  # share of sequences whose positions jump ahead somewhere, anywhere up to the model's context
    crowds: float = 0.0  # share of these in which keys before a jump weigh as much as the text that it leaves out
    matrix_lr: float = 2e-3  # Muon
    other_lr: float = 1e-3  # AdamW: embedding and norms
    weight_decay: float = 0.1
    warmup: int = 100  # steps
    decay: float = 0.25  # the last part of a run, in which the learning rates fall to zero
    compile: bool = True
    seed: int = 0

    @classmethod
    def read(cls, name: str | Path) -> Recipe:
        """A file, or one of the package's recipes by name. Raises ConfigError."""
        path = RECIPES / f"{name}.json"
        path = path if path.is_file() else Path(name)
        try:
            found = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            known = ", ".join(sorted(p.stem for p in RECIPES.glob("*.json")))
            raise ConfigError(f"{name} is no recipe ({error}); give a JSON file, or one of {known}") from None
        names = {f.name for f in fields(cls)}
        if unknown := set(found) - names:
            raise ConfigError(f"{path}: {', '.join(sorted(unknown))}: a recipe has only {', '.join(sorted(names))}")
        if (early := found.get("early")) and set(early) != {"tokens", "lengths", "mixture"}:
            raise ConfigError(f"{path}: `early` has tokens, lengths and mixture, not {', '.join(early)}")
        try:
            return cls(**found)
        except TypeError as error:
            raise ConfigError(f"{path}: {error}") from None


class Batch(NamedTuple):
    """One forward's rows; each (rows, length)."""

    ids: Tensor
    labels: Tensor
    positions: Tensor
    weights: Tensor  # of keys, as what is added to scores: log of how many keys each stands for ...
    since: Tensor  # ... for the queries from this index on


def plain_batch(ids: Tensor, labels: Tensor) -> Batch:
    """Rows as they are: positions 0, 1, 2 ..., and every key for itself."""
    positions = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
    return Batch(ids, labels, positions, torch.zeros(ids.shape, device=ids.device), torch.zeros_like(positions))


class Steps(Dataset[list[Batch]]):
    """Step i's forwards, a pure function of (recipe.seed, i)."""

    def __init__(self, recipe: Recipe, corpus: Corpus, tokenizer: Any, micro: int) -> None:
        missing = {*recipe.mixture, *recipe.early.get("mixture", ())} - set(corpus) - {"recall"}
        if missing:
            raise ConfigError(f"the mixture names {', '.join(sorted(missing))}; there are {', '.join(corpus)}, recall")
        self.recipe, self.corpus, self.micro = recipe, corpus, micro
        self.recall = Recall(corpus, tokenizer)
        self.context = int(recipe.model["max_position_embeddings"])

    def __getitem__(self, step: int) -> list[Batch]:
        recipe, rng = self.recipe, np.random.default_rng((self.recipe.seed, step))
        lengths, mixture = recipe.lengths, recipe.mixture
        if step * recipe.batch < recipe.early.get("tokens", 0):
            lengths, mixture = recipe.early["lengths"], recipe.early["mixture"]
        return [self._batch(rng, lengths, mixture) for _ in range(recipe.batch // self.micro)]

    def _batch(self, rng: np.random.Generator, lengths: dict[str, float], mixture: dict[str, float]) -> Batch:
        length = int(_draw(rng, lengths))
        rows = [self._row(rng, length, _draw(rng, mixture)) for _ in range(max(1, self.micro // length))]
        ids, labels = (torch.from_numpy(np.stack(part).astype(np.int64)) for part in zip(*rows, strict=True))
        placed = zip(*(self._places(rng, length) for _ in rows), strict=True)
        return Batch(ids[:, :-1], labels[:, 1:], *(torch.from_numpy(np.stack(part)) for part in placed))

    def _row(self, rng: np.random.Generator, length: int, domain: str) -> tuple[np.ndarray, np.ndarray]:
        """Ids and labels, each (length + 1,); labels are the ids or IGNORED."""
        if domain != "recall":
            ids = self.corpus[domain].window(rng, length + 1).astype(np.int64)
            return ids, ids
        made: list[int] = []
        labels: list[int] = []
        while (room := length + 1 - len(made)) > 48:
            task = _draw(rng, SHARES)
            distance = int(np.exp(rng.uniform(np.log(16), np.log(max(24, room * 0.9)))))
            found, answers = self.recall.example(rng, task, distance)
            if len(found) <= room:
                made += found
                labels += [token if answer else IGNORED for token, answer in zip(found, answers, strict=True)]
        rest = self.corpus[self.recall.domains[0]].window(rng, room).tolist()
        return np.array(made + rest), np.array(labels + rest)

    def _places(self, rng: np.random.Generator, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Positions, weights and `since`, each (length,).

        Positions are 0, 1, 2 ... with up to three jumps ahead: how far apart things stand is learnt without the text
        between. But that text would also crowd the attention. In its place one key in CROWD before the jump stands for
        many, to queries after it; which one is left to chance, for the key that is looked for stands for itself.
        """
        positions, weights, since = np.arange(length), np.zeros(length, np.float32), np.zeros(length, np.int64)
        if rng.random() < self.recipe.skips:
            free, start, crowd = int(np.exp(rng.uniform(0, np.log(self.context - length)))), 1, rng.random()
            for at in np.sort(rng.integers(0, length, int(rng.integers(1, 4)))):
                jump = int(rng.integers(free + 1))
                positions[at:] += jump
                free -= jump
                if crowd < self.recipe.crowds and at > start:
                    many = min(1 + CROWD * jump / (at - start), MOST)
                    weights[start:at] = np.where(rng.random(at - start) < 1 / CROWD, np.log(many), 0)
                    since[start:at] = at
                    start = at
        return positions, weights, since


def _draw(rng: np.random.Generator, shares: dict[str, float]) -> str:
    weights = np.array(list(shares.values()))
    return list(shares)[int(rng.choice(len(weights), p=weights / weights.sum()))]


def hidden(model: LlamaForCausalLM, batch: Batch) -> Tensor:
    """Final hidden states (rows, length, hidden). transformers' own forward would take a jump of positions for a new
    document and not look across it."""
    decoder = model.model
    x = decoder.embed_tokens(batch.ids)
    rotary = decoder.rotary_emb(x, batch.positions)
    mask = _mask(batch) if batch.ids.shape[1] <= LONG else None
    for layer in decoder.layers:
        x = layer(x, attention_mask=mask, position_embeddings=rotary)
    return decoder.norm(x)  # type: ignore[no-any-return]


def _mask(batch: Batch) -> Tensor:
    """What is added to scores, (rows, 1, length, length): the weights of keys, and -inf for keys ahead."""
    i = torch.arange(batch.ids.shape[1], device=batch.ids.device)[:, None]
    weights = torch.where(i >= batch.since[:, None], batch.weights[:, None], 0.0)
    return weights.masked_fill(i < i.T, -torch.inf)[:, None]


def causal_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Attention as transformers' models call it, for whole sequences. On a CPU, 128 queries at a time against the keys
    up to them: half the time of torch's own, as long as that is few blocks.

    Query (rows, heads, length, head_dim), key and value (rows, kv_heads, ...), mask (rows, 1, length, length), or None
    for a long sequence; returns (rows, length, heads, head_dim).
    """
    rows, heads, length, head_dim = query.shape
    if query.is_cuda or mask is None:
        mask = None if mask is None else mask.to(query.dtype)
        found = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
        )
        return found.transpose(1, 2), None
    groups, done = rows * key.shape[1], []
    for start in range(0, length, 128):
        q = query[:, :, start : start + 128]
        end = start + q.shape[2]
        k, v = (part[:, :, :end].reshape(groups, end, head_dim) for part in (key, value))
        scores = (q.reshape(groups, -1, head_dim) @ k.transpose(1, 2)).view(rows, heads, -1, end) * scaling
        shares = (scores + mask[:, :, start:end, :end]).softmax(-1).to(q.dtype)
        done.append((shares.view(groups, -1, end) @ v).view(q.shape))
    return torch.cat(done, 2).transpose(1, 2), None


AttentionInterface.register("outrider_causal", causal_attention)


def text_loss(model: LlamaForCausalLM, batch: Batch) -> Tensor:
    """Summed cross entropy of the labels, in nats."""
    logits = model.lm_head(hidden(model, batch)).float()
    return F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED, reduction="sum")


def teacher_loss(model: LlamaForCausalLM, teacher: LlamaForCausalLM, batch: Batch) -> Tensor:
    """Summed divergence KL(teacher || model) at temperature 1, in nats, over all rows of the batch."""
    with torch.no_grad():
        wanted = F.log_softmax(teacher.lm_head(hidden(teacher, batch)).float(), -1)
    found = F.log_softmax(model.lm_head(hidden(model, batch)).float(), -1)
    return F.kl_div(found, wanted, reduction="sum", log_target=True)


@dataclass
class Line:
    """One line of the log."""

    step: int
    tokens: int
    loss: float  # nats per token (with a teacher: of divergence), mean since the last line
    rate: float  # tokens per second since the last line
    lr: float  # share of the recipe's learning rates
    left: float  # seconds, as far as one can say
    held: dict[str, float] | None = None  # loss on held-out text, by domain, when a checkpoint is written


class Trainer:
    """A model, its optimizers, and how far they are.

    `folder` receives checkpoint.pt and log.jsonl and may hold domains beside the corpus'. What lies there goes on.
    """

    def __init__(
        self, recipe: Recipe, folder: Path, corpus_folder: Path, tokenizer: Any, *, init: str | Path | None = None,
        teacher: str | Path | None = None, device: str = "auto", progress: Progress | None = None,
    ) -> None:  # fmt: skip
        make_folder(folder, "output")
        self.recipe, self.folder, self.tokenizer = recipe, folder, tokenizer
        self.origin = {"init": str(init or ""), "teacher": str(teacher or "")}
        self.device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
        torch.manual_seed(recipe.seed)
        self.model = load_model(init) if init else LlamaForCausalLM(_config(recipe, tokenizer))
        nn.Module.to(self.model, self.device).train()
        self.teacher = load_model(teacher).requires_grad_(False) if teacher else None
        if self.teacher is not None:
            nn.Module.to(self.teacher, self.device)
        texts = read_corpus(corpus_folder, "train")
        if recipe.samples:
            if teacher is None:
                raise ConfigError("the recipe learns from a target's own text: name the target as --teacher")
            texts |= write_samples(teacher, texts, folder, recipe.samples, str(self.device), progress)
        for model in (self.model, self.teacher):
            if model is not None:
                model.set_attn_implementation("outrider_causal")
        matrices = [p for p in self.model.model.layers.parameters() if p.ndim == 2]
        others = [p for p in self.model.parameters() if not any(p is m for m in matrices)]
        decayed = [{"params": [p for p in others if p.ndim == 2], "weight_decay": recipe.weight_decay}]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                matrices, lr=recipe.matrix_lr, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(
                [*decayed, {"params": [p for p in others if p.ndim < 2], "weight_decay": 0.0}],
                lr=recipe.other_lr, betas=(0.9, 0.95), fused=True,
            ),
        ]  # fmt: skip
        self.step = self.tokens = 0
        self.stopped = False  # by a signal
        # A GPU takes the whole step in one forward; a CPU is as fast with parts that fit its caches.
        self.steps = Steps(
            recipe, texts, tokenizer, recipe.batch if self.device.type == "cuda" else recipe.micro,
        )  # fmt: skip
        self.held = read_corpus(corpus_folder, "held")
        self.loss = torch.compile(self._loss, dynamic=False) if recipe.compile else self._loss
        if (checkpoint := folder / "checkpoint.pt").is_file():
            self._restore(checkpoint)

    def run(self, minutes: float | None = None, every: float = 30.0) -> Iterator[Line]:
        """Train to the end of the recipe, or for so many minutes from now; either end comes with the learning rate's
        fall. Stops early, with a checkpoint, at SIGTERM or Ctrl-C. A line of the log `every` so many seconds."""
        self.stopped = False

        def stop(*_: Any) -> None:
            self.stopped = True

        handlers = {s: signal.signal(s, stop) for s in (signal.SIGTERM, signal.SIGINT)}
        began = last = saved = time.monotonic()
        total, seen, steps = 0.0, 0, 0
        try:
            for batches in self._batches():
                now = time.monotonic()
                done = (now - began) / 60 / minutes if minutes else self.tokens / self.recipe.tokens
                if done >= 1 or self.stopped:
                    break
                scale = min((self.step + 1) / self.recipe.warmup, (1 - done) / self.recipe.decay, 1.0)
                total += self._advance(batches, scale)
                seen += sum(b.ids.numel() for b in batches)
                steps += 1
                if (now := time.monotonic()) - last >= every:
                    rate = seen / (now - last)
                    left = minutes * 60 - (now - began) if minutes else (self.recipe.tokens - self.tokens) / rate
                    line = Line(self.step, self.tokens, total / steps, rate, scale, left)
                    if now - saved > CHECKPOINT_EVERY:
                        self.save()
                        line.held, saved = self.check(), time.monotonic()
                    with open(self.folder / "log.jsonl", "a") as log:
                        print(json.dumps(asdict(line)), file=log)
                    yield line
                    total, seen, steps, last = 0.0, 0, 0, time.monotonic()
        finally:
            for s, handler in handlers.items():
                signal.signal(s, handler)
        self.save()

    def _batches(self) -> Iterator[list[Batch]]:
        steps = range(self.step, 2**31)
        workers = (os.cpu_count() or 1) // 2 if self.device.type == "cuda" else 0
        return iter(
            DataLoader(
                self.steps, batch_size=None, sampler=steps, num_workers=workers, prefetch_factor=4 if workers else None
            )
        )

    def _advance(self, batches: list[Batch], scale: float) -> float:
        """One step; its loss per token."""
        count = sum(int(self._count(batch)) for batch in batches)
        total = 0.0
        for batch in batches:
            loss = self.loss(Batch(*(part.to(self.device, non_blocking=True) for part in batch))) / count
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        if not math.isfinite(total):
            raise CheckpointError(
                f"the loss is {total} at step {self.step}; go on from a sound checkpoint, or lower the rates"
            )
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, lr in zip(self.optimizers, (self.recipe.matrix_lr, self.recipe.other_lr), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = lr * scale
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        self.tokens += sum(batch.ids.numel() for batch in batches)
        return total

    def _count(self, batch: Batch) -> int:
        return int((batch.labels != IGNORED).sum()) if self.teacher is None else batch.labels.numel()

    def _loss(self, batch: Batch) -> Tensor:
        with autocast(self.device):
            if self.teacher is None:
                return text_loss(self.model, batch)
            return teacher_loss(self.model, self.teacher, batch)

    @torch.no_grad()
    def check(self) -> dict[str, float]:
        """Loss per token on held-out text, by domain: the same windows each time."""
        losses = {}
        for domain, tokens in self.held.items():
            rng = np.random.default_rng(0)
            length = min(CHECK_LENGTH + 1, len(tokens.ids))
            rows = np.stack([tokens.window(rng, length) for _ in range(CHECK_WINDOWS)]).astype(np.int64)
            ids = torch.from_numpy(rows).to(self.device)
            batch = plain_batch(ids[:, :-1], ids[:, 1:])
            losses[domain] = round(self._loss(batch).item() / batch.ids.numel(), 4)
        return losses

    def save(self) -> None:
        """Write checkpoint.pt. Raises ConfigError if it cannot be written; the one before stays."""
        state = {
            "step": self.step, "tokens": self.tokens, "origin": self.origin, "recipe": asdict(self.recipe),
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }  # fmt: skip
        with replacing(self.folder / "checkpoint.pt") as partial:
            torch.save(state, partial)

    def _restore(self, path: Path) -> None:
        """Raises ConfigError for another recipe, teacher or model to start from, CheckpointError for a damaged file."""
        own = {**self.origin, **asdict(self.recipe)}
        try:
            check_zip(path)
            state = torch.load(path, map_location=self.device, weights_only=True)
            was = {**state["origin"], **state.get("recipe", {})}  # which earlier checkpoints do not have
            differs = [name for name, value in own.items() if was.get(name, value) != value]
            if not differs:
                self.model.load_state_dict(state["model"])
                for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                    optimizer.load_state_dict(saved)
                self.step, self.tokens = state["step"], state["tokens"]
        except (
            Exception
        ) as error:  # a damaged file is unpacked, unpickled and applied by others, who raise what they like
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise CheckpointError(
                f"{path} is damaged, or of another model ({reason}); remove it to begin anew"
            ) from None
        if differs:
            begun, asked = (f"{differs[0]} {of[differs[0]]!r}" for of in (was, own))
            raise ConfigError(f"{path} was begun with {begun}, not {asked}; go on with the same, or in a new folder")

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder: bfloat16 weights, when to stop, tokenizer, card. The training ends with it."""
        make_folder(folder, "--export")
        (folder / "README.md").write_text(self._card(folder.name), "utf-8")
        nn.Module.to(self.model, torch.bfloat16)
        stops = [self.tokenizer.eos_token_id, self.tokenizer.convert_tokens_to_ids(END)]
        self.model.generation_config.eos_token_id = stops
        self.model.save_pretrained(folder)
        for path in folder.glob("*.safetensors"):  # which only their owner can read
            path.chmod((folder / "README.md").stat().st_mode)
        self.tokenizer.save_pretrained(folder)

    def _card(self, name: str) -> str:
        config, teacher, init = self.model.config, Path(self.origin["teacher"]).name, Path(self.origin["init"]).name
        return (Path(__file__).parent / "card.md").read_text("utf-8").format(
            name=name, role=f"A draft model for `{teacher}`." if teacher else "A small language model.",
            parameters=self.model.num_parameters() / 1e6, layers=config.num_hidden_layers, hidden=config.hidden_size,
            heads=config.num_attention_heads, kv_heads=config.num_key_value_heads, head_dim=config.head_dim,
            mlp=config.intermediate_size, vocab=config.vocab_size, context=config.max_position_embeddings,
            tokens=self.tokens / 1e6, steps=self.step, recipe=json.dumps(asdict(self.recipe), indent=1),
            history=(f", from the weights of `{init}`" if init else "")
            + (f", towards the whole distribution of `{teacher}`" if teacher else ""),
            measure=f"divergence from `{teacher}`" if teacher else "loss",
            figures=", ".join(f"{domain} {value:.3f}" for domain, value in self.check().items()),
        )  # fmt: skip


def load_model(name: str | Path) -> LlamaForCausalLM:
    """A Llama checkpoint in float32, as transformers holds it."""
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    return LlamaForCausalLM.from_pretrained(find(name), dtype=torch.float32)


def _config(recipe: Recipe, tokenizer: Any) -> LlamaConfig:
    return LlamaConfig(
        **recipe.model, vocab_size=len(tokenizer), bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, tie_word_embeddings=True,
    )  # fmt: skip
