"""Heads on the target's last hidden state guess the tokens after the next one, all at once (Medusa, 2401.10774).

A head is a few residual blocks x + silu(W x + b) and a projection to the vocabulary, its own or the target's. From the
hidden state that chose the sequence's last token, head i guesses the token i + 1 places behind that one, knowing none
between. Its first block may see the last token's embedding beside x (W is then twice as wide), which Medusa's own heads
do without, though the token is known by then; Hydra (2402.05109) goes further, at a product per depth. Candidates are
ranked by a head's logits as the request's parameters shape them, with the noise of their place if it samples. A node of
the tree is a path of ranks; the k likeliest are proposed, the likelihood of a path being the product of
`accuracies[head][rank]`, which `outrider train medusa` measures and stores with the heads. Or `choices`, a list of such
paths as Medusa writes them, of which the first k are taken. A guess costs a small product per head.

`model` is a folder, hub id or embedded name: a config.json beside model.safetensors or, as FasterDecoding's are,
medusa_lm_head.safetensors or .pt, with tensors `<head>.<block>.linear.weight` and `.bias` and, unless heads use the
target's projection, `<head>.<blocks>.weight`.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.config import MOST_NODES, option, real, whole
from outrider.draft import Draft
from outrider.errors import CheckpointError, ConfigError, VocabularyMismatch, brief, told
from outrider.find import find
from outrider.heads import read_head, take_out
from outrider.ops import Linear
from outrider.runner import Runner
from outrider.sampling import Row, few_threads, scores
from outrider.sequence import Sequence
from outrider.trees import LastState

NAME = re.compile(r"(?:medusa_head\.)?(\d+\.\d+\.(?:linear\.)?(?:weight|bias))")
TOKEN_NORM = 16.0  # of the last token's embedding, for heads whose config has no `token_norm`
UNMEASURED = tuple(tuple(0.6 * 0.75**head * 0.3**rank for rank in range(10)) for head in range(16))
Accuracies = tuple[tuple[float, ...], ...]
Ranks = tuple[int, ...]


@lru_cache(maxsize=256)
def grow(accuracies: Accuracies, k: int) -> list[Ranks]:
    """The k likeliest paths of ranks, parents first.

    A path is no likelier than its parent, so the likeliest on the border is the likeliest of all that are left.
    """
    paths: list[Ranks] = []
    border: list[tuple[float, Ranks]] = [(-1.0, ())]
    while border and len(paths) <= k:
        cost, path = heapq.heappop(border)
        paths.append(path)
        for rank, accuracy in enumerate(accuracies[len(path)] if len(path) < len(accuracies) else ()):
            heapq.heappush(border, (cost * accuracy, (*path, rank)))
    return paths[1:]


@dataclass
class Medusa(LastState):
    """Guesses with heads that were trained for the target."""

    num_speculative_tokens: int = option(5, "nodes of the tree")
    model: str = option("", "required: the heads; a folder, hub id or embedded name")
    choices: list[list[int]] | None = field(
        default=None, metadata={"help": "paths of ranks, in JSON; default: grown from the heads' accuracies"}
    )

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("method medusa needs a 'model', its heads, such as {..., 'model': 'tiny-medusa'}")
        self.given = None if self.choices is None else _paths(self.choices)

    def attach(self, target: Runner, load: Callable[[str], Runner]) -> None:
        """Load the heads. Raises VocabularyMismatch and CheckpointError for those of another kind of target."""
        self.target, path = target.model, find(self.model)
        config, tensors = _read(path)
        hidden, vocab = self.target.config.hidden_size, self.target.config.vocab_size
        self.token_norm = config["token_norm"]
        count = 1 + max(int(name.split(".")[0]) for name in tensors)
        blocks = sum(name.startswith("0.") and name.endswith("bias") for name in tensors)
        own = tensors.get(f"0.{blocks}.weight")  # a projection of their own
        if (words := config.get("vocab_size", vocab) if own is None else own.shape[:1].numel()) != vocab:
            raise VocabularyMismatch(f"{path}: heads for {words} tokens, the target has {vocab}; use heads made for it")

        def take(name: str, *shape: int) -> Tensor:
            return take_out(tensors, name, shape, path).to(self.target.device, self.target.dtype)

        def block(i: int, j: int) -> Linear:
            wide = hidden * (2 if j == 0 and self.sees_token else 1)
            return Linear(take(f"{i}.{j}.linear.weight", hidden, wide), take(f"{i}.{j}.linear.bias", hidden))

        first = tensors.get("0.0.linear.weight")
        self.sees_token = first is not None and first.shape == (hidden, 2 * hidden)
        self.heads = [[block(i, j) for j in range(blocks)] for i in range(count)]
        projections = range(0 if own is None else count)
        self.projections = [Linear(take(f"{i}.{blocks}.weight", vocab, hidden)) for i in projections]
        if tensors:
            raise CheckpointError(f"{path}: tensor {min(tensors)} has no place in {count} heads of {blocks} blocks")
        self.accuracies: Accuracies = config["accuracies"][:count]
        if len(self.accuracies) < count or not all(map(len, self.accuracies)):
            raise CheckpointError(f"{path}: config.json should have accuracies, per rank, for each of {count} heads")
        if self.given and (deepest := max(map(len, self.given))) > count:
            raise ConfigError(f"choices are up to {deepest} deep, but {path} has {count} heads")

    def propose(self, seqs: list[Sequence], k: int) -> list[Draft]:
        """A tree of at most k nodes per sequence; none if we have not seen what chose its last token."""
        if k < 1:
            return [Draft() for _ in seqs]
        lasts = [self.last(seq) for seq in seqs]
        trees = [self._tree(seq, k) if last else [] for seq, last in zip(seqs, lasts, strict=True)]
        guessed = [(seq, last) for seq, last, tree in zip(seqs, lasts, trees, strict=True) if last and tree]
        width = max((1 + max(path) for tree in trees for path in tree), default=0)
        candidates = iter(self._candidates(guessed, width) if guessed else [])
        return [self._draft(tree, next(candidates)) if tree else Draft() for tree in trees]

    def _draft(self, tree: list[Ranks], candidates: list[list[int]]) -> Draft:
        """Sorted, so that the path of first ranks comes first: tokens accepted there lie where plain decoding's do."""
        tree = [path for path in sorted(tree) if max(path) < len(candidates[0])]  # a vocabulary may be tiny
        draft = Draft.of_paths([[own[rank] for own, rank in zip(candidates, path, strict=False)] for path in tree])
        draft.trust = [self._accuracy(path) for path in tree]
        return draft

    def _accuracy(self, path: Ranks) -> float:
        """How often the last rank of a path was right where that was measured."""
        ranks = self.accuracies[len(path) - 1]
        return ranks[path[-1]] if path[-1] < len(ranks) else 0.0

    def _tree(self, seq: Sequence, k: int) -> list[Ranks]:
        if self.given is None:
            return grow(self.accuracies[: seq.room - 1], k)
        return [path for path in self.given if len(path) < seq.room][:k]

    def _candidates(self, guessed: list[tuple[Sequence, tuple[Tensor, int]]], width: int) -> list[list[list[int]]]:
        """Per sequence and head the `width` tokens that are most expected, from its last state and token."""
        seqs = [seq for seq, _ in guessed]
        x = torch.stack([state for _, (state, _) in guessed])
        last = torch.tensor([token for _, (_, token) in guessed], device=x.device)
        token = self.token_norm * F.normalize(self.target.embed(last))
        states = []
        for head in self.heads:
            state = x
            for j, block in enumerate(head):
                seen = torch.cat([state, token], -1) if j == 0 and self.sees_token else state
                state = state + F.silu(block(seen))
            states.append(state)
        if self.projections:
            logits = [project(state).float() for project, state in zip(self.projections, states, strict=True)]
        else:
            logits = list(torch.split(self.target.logits(torch.cat(states)), len(seqs)))
        found: list[list[list[int]]] = [[] for _ in seqs]
        for own in logits:
            if not seqs[0].rule.flips_coins:  # coins know nothing of Law 1's noise
                own = scores(own, [Row(seq, [tokens[0] for tokens in f]) for seq, f in zip(seqs, found, strict=True)])
            with few_threads(own):
                best = own.topk(min(width, own.shape[-1])).indices.tolist()
            for tokens, top in zip(found, best, strict=True):
                tokens.append(top)
        return found


def _paths(choices: list[list[int]]) -> list[Ranks]:
    """The choices, checked. Raises ConfigError."""
    lists = isinstance(choices, (list, tuple)) and all(isinstance(path, (list, tuple)) for path in choices)
    paths, known = list[Ranks](), {()}
    for path in choices if lists and len(choices) <= MOST_NODES else ():
        ranks = tuple(whole(rank, 0, MOST_NODES) for rank in path)
        if not ranks or None in ranks or ranks[:-1] not in known or ranks in known:
            break
        paths.append(ranks)  # type: ignore[arg-type]
        known.add(ranks)  # type: ignore[arg-type]
    if paths and len(paths) == len(choices):
        return paths
    what = f"at most {MOST_NODES} paths of ranks, each once and after its parent: [[0], [0, 0], [1]]"
    raise ConfigError(f"choices are {what}, not {brief(choices)}")


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json, and the heads' tensors by name."""
    config, loaded = read_head(path, "model.safetensors", "medusa_lm_head.safetensors", "medusa_lm_head.pt")
    found = {match[1]: tensor for name, tensor in loaded.items() if (match := NAME.fullmatch(name))}
    if not found:
        raise CheckpointError(f"{path} holds no heads: no tensor is named like 0.0.linear.weight")
    try:
        measured = config.get("accuracies", UNMEASURED)
        config["accuracies"] = tuple(
            tuple(min(1.0, max(0.0, float(share))) for share in ranks[:MOST_NODES]) for ranks in measured
        )
    except (TypeError, ValueError, LookupError, OverflowError) as error:
        raise CheckpointError(f"{path}: config.json's accuracies cannot be read: {told(error)}") from None
    config["token_norm"] = real(config.get("token_norm", TOKEN_NORM), 0, 1e6)
    if not config["token_norm"]:
        raise CheckpointError(f"{path}: config.json's token_norm must be a number above 0")
    return config, found
