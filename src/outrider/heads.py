"""The files of a draft head: its config.json, and tensors that fit the target it was made for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from outrider.config import ModelConfig
from outrider.errors import CheckpointError, VocabularyMismatch, brief, told
from outrider.files import read_json
from outrider.ops import Linear, native
from outrider.quantize import quantize


def read_head(path: Path, *files: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A draft head's config.json, and the tensors of the first of the files that is there, or of its shards.

    Raises CheckpointError.
    """
    shards = sorted(path.glob("model-*-of-*.safetensors"))
    found = next(([path / name] for name in files if (path / name).is_file()), shards)
    if not found:
        raise CheckpointError(f"{path} holds no head: none of {', '.join(files)}")
    about = read_json(path / "config.json")
    tensors = dict[str, Tensor]()
    for file in found:
        try:
            loaded = load_file(file) if file.suffix == ".safetensors" else torch.load(file, "cpu", weights_only=True)
            named = {str(name): tensor for name, tensor in loaded.items()}
        except Exception as error:  # unpickling raises what it likes
            raise CheckpointError(f"{path}: the head cannot be read: {told(error)}") from None
        for name, tensor in named.items():
            if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.is_meta:
                raise CheckpointError(f"{file}: {name} should be a tensor, not {brief(tensor)}")
        tensors |= named
    return about, tensors


def take_out(tensors: dict[str, Tensor], name: str, shape: tuple[int, ...], path: Path) -> Tensor:
    """A tensor of a head, of those that its checkpoint holds. Raises CheckpointError if it is not what a head needs."""
    found = tensors.pop(name, None)
    if found is None or tuple(found.shape) != shape:
        what = "missing" if found is None else f"of shape {tuple(found.shape)}"
        raise CheckpointError(f"{path}: tensor {name} is {what}; a head for this target has {shape}")
    if not found.is_floating_point() or found.itemsize < 2 or not found.isfinite().all():
        raise CheckpointError(f"{path}: tensor {name} should hold finite floats of 16 bits or more")
    return found


def guessing(weight: Tensor, bias: Tensor | None = None, gated: bool = False) -> Linear:
    """A head's linear: a guess need not be as exact as the target, so a quarter of the bytes do, where kernels can."""
    rounds = weight.dtype == torch.bfloat16 and native.runs(weight.dtype, weight.device)
    return Linear(quantize(weight, "int4", rounds) if rounds else weight, bias, gated=gated, rounded=rounds)


def check_head(path: Path, width: Any, vocab: Any, target: ModelConfig) -> None:
    """Raise CheckpointError for a head of another width than the target, VocabularyMismatch for other tokens."""
    wide, words = target.hidden_size, target.vocab_size
    if width != wide:
        raise CheckpointError(f"{path}: a head of width {width}, the target's is {wide}; use one made for it")
    if vocab != words:
        raise VocabularyMismatch(f"{path}: a head for {vocab} tokens, the target has {words}; use one made for it")


def draft_tokens(tensors: dict[str, Tensor], count: int, vocab: int, path: Path) -> Tensor:
    """The target's ids (count,) of a head's tokens: `d2t` says how far each is off. Raises VocabularyMismatch."""
    offsets = tensors.pop("d2t", torch.zeros(0))
    tokens = torch.arange(count) + offsets.long() if offsets.shape == (count,) else torch.empty(0)
    if len(tokens) != count or int(tokens.min()) < 0 or int(tokens.max()) >= vocab:
        raise VocabularyMismatch(f"{path}: d2t should lead {count} draft tokens to ids below {vocab}")
    return tokens
