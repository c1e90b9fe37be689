"""From a local folder, an embedded model's name or a Hugging Face id to a model in memory.

Weights come from safetensors only, are fused as they are read (one qkv and one gate-up product per layer) and are held
once: on a CPU the linears keep only their packed form and the embedding stays a mapping of the file, of which a token
touches one row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider import quantize
from outrider.config import DTYPES, ModelConfig
from outrider.errors import CheckpointError, ConfigError, ModelNotFound, VocabularyMismatch
from outrider.model import Layer, Model
from outrider.ops import Linear, packs

PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "medusa_lm_head.pt"]
Progress = Callable[[str, int, int], None]
"""`progress(what, done, total)`, called as long work advances."""


@dataclass
class Checkpoint:
    """A loaded model, its tokenizer (None if the folder has none) and the folder it came from."""

    model: Model
    tokenizer: Any
    path: Path


def load(
    name: str | Path,
    dtype: str = "auto",
    device: str = "auto",
    progress: Progress | None = None,
    quantization: str | None = None,
) -> Checkpoint:
    """Load a model and its tokenizer.

    `name`: a folder, `tiny` or `tiny-draft`, or a hub id. `dtype`: auto (the checkpoint's), float32, bfloat16, float16.
    `device`: auto (CUDA if there is one), cpu, cuda, cuda:N. `quantization`: None, int8 or int4 (see quantize.py).
    Raises ModelNotFound, UnsupportedArchitecture, CheckpointError, ConfigError.
    """
    where = _device(device)
    if dtype != "auto" and dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is unknown; valid: auto, {', '.join(DTYPES)}")
    path = find(name)
    config = read_config(path)
    kind: torch.dtype = getattr(torch, config.dtype if dtype == "auto" else dtype)
    if quantization is not None:
        quantize.check(quantization, kind, where)
    model = _build(config, _Weights(path), kind, where, progress, quantization=quantization)
    return Checkpoint(model, read_tokenizer(path), path)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device {name!r} is unknown; valid: auto, cpu, cuda, cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not supported; valid: auto, cpu, cuda, cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {name!r}: this machine has {torch.cuda.device_count()} CUDA devices; use cpu")
    return device


def embedded() -> dict[str, Path]:
    """The models that come with the package, by name."""
    assets = Path(__file__).with_name("assets")
    return {path.name: path for path in sorted(assets.iterdir()) if (path / "config.json").exists()}


def find(name: str | Path) -> Path:
    """The folder of a model; a hub id is downloaded (or found in the hub's cache). Raises ModelNotFound."""
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFound(f"{path} has no config.json; give the folder of a Hugging Face checkpoint")
        return path
    if (asset := embedded().get(str(name))) is not None:
        return asset
    hint = f"give a folder, a hub id, or an embedded model ({', '.join(embedded())})"
    if path.is_absolute() or str(name).startswith((".", "~")) or str(name).count("/") != 1 or path.exists():
        raise ModelNotFound(f"no model at {str(name)!r}; {hint}")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(name), allow_patterns=PATTERNS, ignore_patterns="consolidated*"))
    except Exception as error:  # the hub raises many kinds: not found, gated, offline, no space
        reason = " ".join(str(error).split())[:160]
        raise ModelNotFound(f"cannot get {str(name)!r} from the hub ({reason}); {hint}") from None


def read_config(path: Path) -> ModelConfig:
    """Read config.json and generation_config.json. Raises UnsupportedArchitecture or CheckpointError."""
    raw = _json(path / "config.json")
    if "model_type" not in raw and "architectures" not in raw:
        raise CheckpointError(f"{path / 'config.json'} names neither model_type nor architectures")
    ModelConfig.from_hf(raw)  # our own words for an unknown architecture, before transformers tries
    from transformers import AutoConfig

    try:
        hf = AutoConfig.from_pretrained(path).to_dict()
    except Exception as error:
        raise CheckpointError(f"{path / 'config.json'}: {' '.join(str(error).split())[:200]}") from None
    generation = _json(path / "generation_config.json") if (path / "generation_config.json").exists() else {}
    eos = generation.get("eos_token_id", hf.get("eos_token_id"))
    eos = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if any(not isinstance(token, int) for token in eos):
        raise CheckpointError(f"{path}: eos_token_id must be a token id or a list of them, not {eos!r}")
    return ModelConfig.from_hf(hf, tuple(eos))


def _json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} should hold a JSON object")
    return data


def read_tokenizer(path: Path) -> Any:
    """The folder's tokenizer, or None if it has none."""
    if not any((path / name).exists() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as error:
        raise CheckpointError(f"{path}: the tokenizer cannot be read: {' '.join(str(error).split())[:200]}") from None


class _Weights:
    """The tensors of a checkpoint. Every file's header is checked before anything is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        index = path / "model.safetensors.index.json"
        if index.exists():
            if not isinstance(weight_map := _json(index).get("weight_map"), dict):
                raise CheckpointError(f"{index} has no weight_map")
            names = sorted({str(name) for name in weight_map.values()})
        else:
            whole = path / "model.safetensors"  # beside it may lie what is not the model: adapters, other layouts
            names = [whole.name] if whole.exists() else [p.name for p in sorted(path.glob("*.safetensors"))]
        if not names:
            pickled = any(path.glob("*.bin")) or any(path.glob("*.pt"))
            hint = "; pickled weights are not read: convert them to safetensors" if pickled else ""
            raise CheckpointError(f"{path} has no safetensors weights{hint}")
        self.files: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for name in names:
            try:
                with safe_open(path / name, "pt") as file:
                    for key in file.keys():  # noqa: SIM118 - not a dict
                        self.files[key] = path / name
                        self.shapes[key] = tuple(file.get_slice(key).get_shape())
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path / name} is missing, truncated or damaged: {error}") from None
        self.unused = set(self.files)

    def mapped(self, name: str, *shape: int) -> Tensor:
        """A tensor that still lies in the file. Raises CheckpointError if it is absent or shaped otherwise."""
        if name not in self.files:
            raise CheckpointError(f"{self.path}: tensor {name} is missing")
        if self.shapes[name] != shape:
            raise CheckpointError(f"{self.path}: {name} has shape {self.shapes[name]}, config.json asks for {shape}")
        self.unused.discard(name)
        tensor = self._read(name)
        if str(tensor.dtype).removeprefix("torch.") not in DTYPES:
            raise CheckpointError(f"{self.path}: {name} is {tensor.dtype}; supported: {', '.join(DTYPES)}")
        return tensor

    def _read(self, name: str) -> Tensor:
        with safe_open(self.files[name], "pt") as file:  # opened anew: the pages read go when the tensor goes
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def check_unused(self) -> None:
        """Weights that nothing reads mean that the config describes another model."""
        ignored = ("rotary_emb.inv_freq", "lm_head.weight")
        if left := sorted(name for name in self.unused if not name.endswith(ignored)):
            raise CheckpointError(f"{self.path}: config.json has no place for {len(left)} tensors, such as {left[0]}")


class _Held(_Weights):
    """Tensors that another model of this process holds, by their names in a checkpoint."""

    def __init__(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        self.path, self.tensors = path, tensors
        self.files = dict.fromkeys(tensors, path)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.unused = set(tensors)

    def _read(self, name: str) -> Tensor:
        return self.tensors[name]


def adopt(config: ModelConfig, tensors: Mapping[str, Tensor], path: Path, share: bool = True) -> Model:
    """A model from parameters that another one holds, by their names in a checkpoint: all of one dtype and device.

    With `share` there is no second copy: what is fused here is fused once and the parameters are made views of it
    (`parameter.data = fused[a:b]`), so the other model goes on working; linears then are not packed. Without it, they
    are copied and packed as those of a file. `path` is named in errors. Raises CheckpointError.
    """
    some = next(iter(tensors.values()))
    return _build(config, _Held(path, tensors), some.dtype, some.device, None, share)


def _fuse(parts: list[Tensor]) -> Tensor:
    """The parts (rows, ...) in one tensor, of which each becomes a view; as it is if they already are."""
    first, at = parts[0], parts[0].data_ptr()
    for part in parts:
        if not part.is_contiguous() or part.data_ptr() != at:
            break
        at += part.nbytes
    else:
        if at <= first.untyped_storage().data_ptr() + first.untyped_storage().nbytes():
            shape = (sum(len(part) for part in parts), *first.shape[1:])
            return first.detach().as_strided(shape, first.stride())
    fused, at = torch.cat([part.detach() for part in parts]), 0
    for part in parts:
        part.data = fused[at : at + len(part)]
        at += len(part)
    return fused


def _build(
    config: ModelConfig,
    weights: _Weights,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None,
    share: bool = False,
    quantization: str | None = None,
) -> Model:
    c = config
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim

    def tensor(name: str, *shape: int) -> Tensor:
        found = weights.mapped(name, *shape).detach()
        return found if share else found.to(device=device, dtype=dtype, copy=True)

    staging = torch.empty(0, dtype=dtype)  # packed weights are fused in one reused buffer: no holes in the heap

    def linear(
        prefix: str,
        parts: dict[str, int],
        inputs: int,
        bias: bool,
        gated: bool = False,
        scheme: str | None = quantization,
    ) -> Linear:
        nonlocal staging
        if share:
            held = [weights.mapped(f"{prefix}{name}.weight", rows, inputs) for name, rows in parts.items()]
            added = [weights.mapped(f"{prefix}{name}.bias", rows) for name, rows in parts.items()] if bias else []
            return Linear(_fuse(held), _fuse(added) if bias else None, pack=False, gated=gated)
        size = sum(parts.values()) * inputs
        if not packs(dtype, device):
            out = torch.empty(size, dtype=dtype, device=device).view(-1, inputs)
        else:
            staging = staging if len(staging) >= size else torch.empty(size, dtype=dtype)
            out = staging[:size].view(-1, inputs)
        at = 0
        for name, rows in parts.items():
            out[at : at + rows] = weights.mapped(f"{prefix}{name}.weight", rows, inputs)
            at += rows
        biases = [tensor(f"{prefix}{name}.bias", rows) for name, rows in parts.items()] if bias else []
        weight = quantize.quantize(out, scheme) if scheme else out
        return Linear(weight, torch.cat(biases) if bias else None, gated=gated)

    def layer(i: int) -> Layer:
        at = f"model.layers.{i}"
        attn, mlp = f"{at}.self_attn.", f"{at}.mlp."
        if progress:
            progress("loading weights", i, c.num_layers)
        return Layer(
            input_norm=tensor(f"{at}.input_layernorm.weight", c.hidden_size),
            qkv=linear(attn, {"q_proj": q, "k_proj": kv, "v_proj": kv}, c.hidden_size, c.qkv_bias),
            o=linear(attn, {"o_proj": c.hidden_size}, q, c.o_bias),
            post_norm=tensor(f"{at}.post_attention_layernorm.weight", c.hidden_size),
            gate_up=linear(
                mlp,
                {"gate_proj": c.intermediate_size, "up_proj": c.intermediate_size},
                c.hidden_size,
                c.mlp_bias,
                gated=True,
            ),
            down=linear(mlp, {"down_proj": c.hidden_size}, c.intermediate_size, c.mlp_bias),
            q_norm=tensor(f"{attn}q_norm.weight", c.head_dim) if c.qk_norm else None,
            k_norm=tensor(f"{attn}k_norm.weight", c.head_dim) if c.qk_norm else None,
        )

    with torch.no_grad():  # not inference mode: shared parameters must stay trainable
        layers = [layer(i) for i in range(c.num_layers)]
        embedding = weights.mapped("model.embed_tokens.weight", c.vocab_size, c.hidden_size).detach()
        if device.type != "cpu":
            embedding = embedding.to(device=device, dtype=dtype)
        scheme = quantize.HEAD if quantization else None
        if not c.tied:
            head = linear("", {"lm_head": c.vocab_size}, c.hidden_size, False, scheme=scheme)
        else:
            weight = embedding.to(dtype)
            head = Linear(quantize.quantize(weight, scheme) if scheme else weight, pack=not share)
        staging = torch.empty(0)
        if device.type == "cpu":  # mapped anew: the pages that packing the head has read need not stay
            embedding = weights.mapped("model.embed_tokens.weight", c.vocab_size, c.hidden_size).detach()
        model = Model(c, embedding, layers, tensor("model.norm.weight", c.hidden_size), head, dtype, device)
    weights.check_unused()
    if progress:
        progress("loading weights", c.num_layers, c.num_layers)
    return model


def check_vocabulary(target: Checkpoint, draft: Checkpoint) -> None:
    """Draft and target must mean the same text by the same ids. Raises VocabularyMismatch saying what differs.

    Equal up to padding rows: the embeddings may have more rows than the tokenizer has tokens.
    """
    if target.tokenizer is None or draft.tokenizer is None:
        sizes = [c.model.config.vocab_size for c in (draft, target)]
        if sizes[0] != sizes[1]:
            raise VocabularyMismatch(
                f"the draft model has {sizes[0]} tokens, the target {sizes[1]}; use a fitting pair"
            )
        return
    ours, theirs = ({i: t for t, i in c.tokenizer.get_vocab().items()} for c in (target, draft))
    if ours == theirs:
        return
    first = min(i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i))
    raise VocabularyMismatch(
        f"the draft model's vocabulary ({len(theirs)} tokens) is not the target's ({len(ours)}): id {first} is "
        f"{theirs.get(first)!r} there and {ours.get(first)!r} here; use a draft that shares the target's tokenizer"
    )
