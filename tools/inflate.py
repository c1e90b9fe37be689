"""Enlarge a Llama checkpoint without changing what it computes: a small model's tokens at a large model's cost.

Every axis of the large model is the source's axis (live entries, in the source's order) plus extra entries that are
either *quiet* (their activation is exactly zero, like the extra residual columns) or *noisy* (their activation can be
anything, but nothing live reads it, like the extra query heads of a live key/value group). With W of shape (out, in):

    W[live out, live in] = source            the function itself
    W[noisy out, any in] = random            nobody listens
    W[any out, quiet in] = random            multiplied by exact zeros
    W[otherwise]         = 0                 leaves live outputs unchanged and quiet outputs at zero

Only RMSNorm sees how long an axis is. With f = hidden / source hidden, mean(x^2) is f times smaller, so eps / f gives
    x / sqrt(mean(x^2) / f + eps / f) = sqrt(f) * x / sqrt(mean(x^2) + eps),
and the norm weights are divided by sqrt(f): a power of two, hence exact in any float type, when f is a power of four.
"""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from outrider.errors import ConfigError
from outrider.files import new_folder, replacing

LLAMA, HEADS = ["LlamaForCausalLM"], ["MedusaHeads"]
LIVE, QUIET, NOISY = 0, 1, 2
MOST = {"hidden_size": 2**16, "num_layers": 2**10, "intermediate_size": 2**20, "num_kv_heads": 2**10}
SHARD_PARAMETERS = 2**29  # 1 GiB of bfloat16
COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "LICENSE*")  # tokenizer, chat template, generation defaults


Sizes = tuple[int | None, ...]
"""Asked for, in the order of _Shape; None = left out."""


class _Shape(NamedTuple):
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int


class _Piece(NamedTuple):
    """A tensor to write. The source tensor `like` gives its dtype and, unless it is `added`, its live values."""

    name: str
    like: str
    added: bool
    rows: torch.Tensor  # LIVE, QUIET or NOISY for each entry; a vector has one live column
    cols: torch.Tensor
    scale: float = 1.0


def inflate(
    source: Path,
    target: Path,
    *,
    hidden_size: int | None = None,
    num_layers: int | None = None,
    intermediate_size: int | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write to folder `target` a larger Llama with the logits of the one in folder `source`, and return `target`.

    Medusa heads (as `outrider train medusa` writes them) grow likewise, by their hidden_size alone.

    dtype, head_dim, vocabulary and tied embeddings stay; logits are equal up to the order of sums, which a kernel may
    choose by size. Sizes left out become: `hidden_size` 4 times the source's, `num_layers` the same,
    `intermediate_size` grown like hidden_size, `num_kv_heads` the same, and `num_heads` hidden_size // head_dim
    rounded down to a multiple of num_kv_heads. Extra layers come after the source's. `progress(done, total)` counts
    parameters. Memory is that of one shard, about 2**29 parameters.

    Raises ConfigError if `source` is no LlamaForCausalLM, nor heads, in safetensors; if `target` is `source` or holds
    anything; or if a size does not fit: hidden_size is the source's times a power of 4 and a multiple of num_heads;
    num_layers, intermediate_size and num_kv_heads are at least the source's, and so is num_heads / num_kv_heads, a
    whole number.
    """
    source, target = Path(source), Path(target)
    config = _read_config(source)
    _require(target.resolve() != source.resolve(), f"target is the source folder {source}: give another folder")
    _require(-(2**63) <= seed < 2**64, f"seed must be a whole number of 64 bits, not {seed}")
    weights = _open(source)
    asked = hidden_size, num_layers, intermediate_size, num_heads, num_kv_heads
    plan, sizes = _heads(config, weights, asked) if config["architectures"] == HEADS else _llama(config, weights, asked)
    odd = {piece.like for piece in plan} ^ set(weights)
    _require(
        not odd, f"{source} must hold just its architecture's tensors: {min(odd, default='')} is missing or unknown"
    )

    with new_folder(target) as folder:
        _write(plan, weights, folder, seed, progress)
        for path in {path for pattern in COPIED for path in source.glob(pattern)}:
            if path.name != "config.json" and not path.name.endswith(".index.json"):
                shutil.copyfile(path, folder / path.name)
        (folder / "config.json").write_text(json.dumps(config | sizes, indent=2) + "\n")
    return target


def _heads(config: dict[str, Any], weights: dict[str, Any], asked: Sizes) -> tuple[list[_Piece], dict[str, Any]]:
    """The plan for Medusa heads, whose states are a residual stream too, and what changes in config.json."""
    small, big = config["hidden_size"], _grow_hidden(config["hidden_size"], asked[0])
    _require(asked[1:] == (None,) * 4, "Medusa heads have no other size than hidden_size; leave the others out")
    one, residual = _axis(1, 1, LIVE), _axis(small, big, QUIET)
    plan = []
    for name, handle in weights.items():
        rows = residual if ".linear." in name else _axis(config["vocab_size"], config["vocab_size"], LIVE)
        sees_token = handle.get_slice(name).get_shape()[1:] == [2 * small]
        cols = one if name.endswith("bias") else torch.cat([residual] * (2 if sees_token else 1))
        plan.append(_Piece(name, name, False, rows, cols))
    return plan, {"hidden_size": big, "outrider_inflated_from": {"hidden_size": small}}


def _llama(config: dict[str, Any], weights: dict[str, Any], asked: Sizes) -> tuple[list[_Piece], dict[str, Any]]:
    """The plan for a Llama, and what changes in config.json."""
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    small = _Shape(config["hidden_size"], config["num_hidden_layers"], config["intermediate_size"], heads, kv_heads)
    big = _grow(small, head_dim, asked)
    if config.get("tie_word_embeddings"):
        weights.pop("lm_head.weight", None)  # a needless copy of the embedding, in some checkpoints
    eps = config.get("rms_norm_eps", 1e-6) * small.hidden_size / big.hidden_size
    sizes = {**big._asdict(), "head_dim": head_dim, "rms_norm_eps": eps, "outrider_inflated_from": small._asdict()}
    return list(_plan(config, small, big, head_dim)), sizes


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    return data


def _read_config(source: Path) -> dict[str, Any]:
    path = source / "config.json"
    _require(path.is_file(), f"{source} has no config.json: give the folder of a Hugging Face Llama checkpoint")
    config = _read_json(path)
    kind = config.get("architectures")
    _require(kind in (LLAMA, HEADS), f"{source} has architectures {kind}: they must be {LLAMA} or {HEADS}")
    return config


def _grow_hidden(small: int, asked: int | None) -> int:
    sizes = [small * 4**power for power in range(8) if small * 4**power <= MOST["hidden_size"] or power < 2]
    hidden = sizes[1] if asked is None else asked
    _require(hidden in sizes, f"hidden_size {hidden} must be the source's times a power of 4, such as {sizes[:3]}")
    return hidden


def _grow(small: _Shape, head_dim: int, asked: Sizes) -> _Shape:
    """Fill in the sizes left out of `asked`, in the order of _Shape, and check them all."""
    hidden, layers, intermediate, heads, kv_heads = asked
    hidden = _grow_hidden(small.hidden_size, hidden)
    layers = small.num_hidden_layers if layers is None else layers
    intermediate = small.intermediate_size * hidden // small.hidden_size if intermediate is None else intermediate
    kv_heads = small.num_key_value_heads if kv_heads is None else kv_heads
    for name, size, least in (
        ("num_layers", layers, small.num_hidden_layers),
        ("intermediate_size", intermediate, small.intermediate_size),
        ("num_kv_heads", kv_heads, small.num_key_value_heads),
    ):
        _require(size >= least, f"{name} {size} must be at least the source's {least}")
        _require(size <= MOST[name], f"{name} {size} must be at most {MOST[name]}")
    least = kv_heads * (small.num_attention_heads // small.num_key_value_heads)  # no group may lose query heads
    heads = max(least, hidden // head_dim // kv_heads * kv_heads) if heads is None else heads
    fits = heads % kv_heads == 0 and heads >= least
    _require(fits, f"num_heads {heads} must be a multiple of num_kv_heads {kv_heads} and at least {least}")
    _require(hidden % heads == 0, f"num_heads {heads} must divide hidden_size {hidden}: transformers requires it")
    return _Shape(hidden, layers, intermediate, heads, kv_heads)


def _open(source: Path) -> dict[str, Any]:
    """Open the source's files; map each tensor's name to the handle to read it from."""
    index = source / "model.safetensors.index.json"
    files = set(_read_json(index)["weight_map"].values()) if index.is_file() else {"model.safetensors"}
    for file in files:
        _require((source / file).is_file(), f"{source} has no {file}: the weights must be there, in safetensors")
    try:
        handles: list[Any] = [safe_open(source / file, framework="pt") for file in sorted(files)]
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{source}: the weights are truncated or damaged: {error}") from None
    names = ((name, handle) for handle in handles for name in list(handle.keys()))
    found = {name: handle for name, handle in names if not name.endswith("rotary_emb.inv_freq")}  # once saved, unused
    for name, handle in found.items():
        kind = handle.get_slice(name).get_dtype()
        _require(kind in ("F32", "BF16", "F16", "F64"), f"{source}: {name} is {kind}, and weights must be real numbers")
    return found


def _axis(live: int, size: int, rest: int) -> torch.Tensor:
    return torch.where(torch.arange(size) < live, LIVE, rest)


def _plan(config: dict[str, Any], small: _Shape, big: _Shape, head_dim: int) -> Iterator[_Piece]:
    """Name every tensor of the large model, with the codes of its rows and columns."""
    one, words = _axis(1, 1, LIVE), _axis(config["vocab_size"], config["vocab_size"], LIVE)
    residual = _axis(small.hidden_size, big.hidden_size, QUIET)
    # As rows (norms) random beyond the source; as columns zero beyond it, which the embedding needs: it writes them.
    loose = _axis(small.hidden_size, big.hidden_size, NOISY)

    # Source query head i of group j stays head i of group j. An extra group has zero values, so its heads are quiet
    # after attention; an extra head of a live group mixes live values. Before attention all extra queries are noisy.
    heads = torch.full((big.num_key_value_heads, big.num_attention_heads // big.num_key_value_heads), QUIET)
    heads[: small.num_key_value_heads] = NOISY
    heads[: small.num_key_value_heads, : small.num_attention_heads // small.num_key_value_heads] = LIVE
    mixed = heads.flatten().repeat_interleave(head_dim)
    keys = small.num_key_value_heads * head_dim, big.num_key_value_heads * head_dim
    mlp = small.intermediate_size, big.intermediate_size
    modules = {
        "input_layernorm": (loose, one),
        "self_attn.q_proj": (torch.where(mixed == LIVE, LIVE, NOISY), residual),
        "self_attn.k_proj": (_axis(*keys, NOISY), residual),
        "self_attn.v_proj": (_axis(*keys, QUIET), residual),
        "self_attn.o_proj": (residual, mixed),
        "post_attention_layernorm": (loose, one),
        "mlp.gate_proj": (_axis(*mlp, NOISY), residual),
        "mlp.up_proj": (_axis(*mlp, QUIET), residual),  # act(gate) * 0 is 0 whatever the activation
        "mlp.down_proj": (residual, _axis(*mlp, QUIET)),
    }
    shrink = 1 / math.isqrt(big.hidden_size // small.hidden_size)
    biased = {"self_attn": config.get("attention_bias"), "mlp": config.get("mlp_bias")}

    yield _Piece("model.embed_tokens.weight", "model.embed_tokens.weight", False, words, loose)
    for layer in range(big.num_hidden_layers):
        added = layer >= small.num_hidden_layers
        for module, (rows, cols) in modules.items():
            if added:  # all noise, so the rule makes zero of all that would be added to the residual
                rows, cols = (x if x is residual or x is one else torch.full_like(x, NOISY) for x in (rows, cols))
            name, like = f"model.layers.{layer}.{module}", f"model.layers.{0 if added else layer}.{module}"
            yield _Piece(f"{name}.weight", f"{like}.weight", added, rows, cols, shrink if "norm" in module else 1.0)
            if biased.get(module.split(".")[0]):
                yield _Piece(f"{name}.bias", f"{like}.bias", added, rows, one)
    yield _Piece("model.norm.weight", "model.norm.weight", False, loose, one, shrink)
    if not config.get("tie_word_embeddings"):
        yield _Piece("lm_head.weight", "lm_head.weight", False, words, residual)


class _Noise:
    """Normal values, std 0.02: slices of one block at random places, as billions of real draws take minutes."""

    def __init__(self, seed: int, size: int = 2**21) -> None:
        self.size, self.generator = size, torch.Generator().manual_seed(seed)
        self.block = torch.randn(2 * size, generator=self.generator) * 0.02

    def draw(self, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        out = torch.empty(shape, dtype=dtype)
        for part in torch.split(out.view(-1), self.size):
            start = int(torch.randint(self.size, (), generator=self.generator))
            part.copy_(self.block[start : start + len(part)])
        return out


def _build(piece: _Piece, weights: dict[str, Any], noise: _Noise) -> torch.Tensor:
    like: torch.Tensor = weights[piece.like].get_tensor(piece.like)
    out = noise.draw((len(piece.rows), len(piece.cols)), like.dtype)
    out.masked_fill_((piece.rows != NOISY)[:, None] & (piece.cols != QUIET), 0)
    if not piece.added:
        rows, cols = (torch.nonzero(axis == LIVE).flatten() for axis in (piece.rows, piece.cols))
        out[rows[:, None], cols] = like.view(len(rows), len(cols)) * piece.scale
    return out if like.dim() == 2 else out.flatten()


def _write(
    plan: list[_Piece], weights: dict[str, Any], target: Path, seed: int, progress: Callable[[int, int], None] | None
) -> None:
    shards: dict[int, list[_Piece]] = {}
    total = 0
    for piece in plan:
        shards.setdefault(total // SHARD_PARAMETERS, []).append(piece)
        total += len(piece.rows) * len(piece.cols)

    noise, done, size = _Noise(seed), 0, 0
    files = {}
    for number, shard in enumerate(shards.values(), 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        tensors = {}
        for piece in shard:
            tensor = tensors[piece.name] = _build(piece, weights, noise)
            files[piece.name] = file
            done, size = done + tensor.numel(), size + tensor.nbytes
            if progress is not None:
                progress(done, total)
        with replacing(target / file) as partial:
            save_file(tensors, partial, metadata={"format": "pt"})
    if len(shards) > 1:
        index = {"metadata": {"total_size": size}, "weight_map": files}
        (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
