"""Any checkpoint that loads, as a folder that others read, dense or quantised: safetensors, config, tokenizer."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider import compensate, families, packed
from outrider.config import DTYPES, ModelConfig, Names
from outrider.errors import ConfigError, UnsupportedArchitecture, brief
from outrider.families import FAMILIES
from outrider.files import expand, new_folder, replacing, write_text
from outrider.load import Builder, Progress, Source, finite, open_source, read_config
from outrider.model import Rotary
from outrider.ops import untouched
from outrider.quantize import Rounded, rounded

SHARD = 2**31  # bytes of a file
CPU = torch.device("cpu")
# files that say that weights are not what is written; and texts that tell tokenizers apart
OTHERS = ("quantize_config.json", "quant_config.json", "adapter_config.json")
TELLING = ("Hello world 123456, don't!", "  two\n\n spaces\t 日本 e\u0301 ", "x=[1.5];\r\n\n  return HE'S")


@untouched()
def export(name: str | Path, target: str | Path, dtype: str = "auto", progress: Progress | None = None) -> Path:
    """Write a checkpoint (see `load.find`) to a new or empty folder; returns it. Quantised weights are written dense.

    `dtype`: auto (the checkpoint's, bfloat16 for a quantised file), float32, bfloat16, float16. The folder appears when
    it is complete. Raises what `load` raises, and ConfigError for a folder that cannot be written.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is unknown; valid: auto, {', '.join(DTYPES)}")
    target, source = expand(target), open_source(name)
    _same_tensors(source)
    kind = source.config.dtype if dtype == "auto" else dtype
    plain: torch.dtype = getattr(torch, kind)
    with new_folder(target) as folder:
        Builder(source.config, source.weights, plain, CPU).check(progress)
        _describe(source, folder, {"dtype": kind})
        _write(source, folder, lambda name, tensor: {name: tensor.to(plain).contiguous()}, plain, progress)
    return target


@untouched()
def quantize(
    name: str | Path,
    target: str | Path,
    bits: int = 4,
    progress: Progress | None = None,
    group: int | None = None,
    calibration: str | Path | list[str | Path] = "self",
) -> Path:
    """Write a checkpoint as compressed-tensors W4A16 or W8A16, which vLLM and transformers load; returns the folder.

    The linears of the layers get `bits`, 4 or 8: of 4 bits a scale and (but for mixtures) a zero for each group of
    inputs (32, 64 or 128: the smallest that divides them all, else all), of 8 a scale for each output; or for each
    `group` of inputs, of which -1 is all. The rest stays, in bfloat16, or float16 if it was that. Weights of 4 bits are
    compensated (compensate.py) by `calibration`: what the model writes itself ("self"), or texts, files or folders of
    them; with "none" they are rounded to nearest, as those of 8 bits are. Raises as `export`, and ConfigError for texts
    that cannot be read or are too few.
    """
    if bits not in (4, 8) or isinstance(bits, bool):
        raise ConfigError(f"bits must be 4 or 8, not {brief(bits)}")
    files = calibration if isinstance(calibration, list) else [calibration]
    if bits == 8 and not {*map(str, files)} <= {"self", "none"}:
        raise ConfigError("weights of 8 bits are rounded to nearest, which costs little; leave calibration out")
    target, source = expand(target), open_source(name)
    _same_tensors(source)
    kind = "float16" if source.config.dtype == "float16" else "bfloat16"
    plain: torch.dtype = getattr(torch, kind)
    shapes = {
        name: shape for name, shape in source.weights.shapes.items() if name.endswith(".weight") and len(shape) == 2
    }
    routers = (f".{source.config.names.router}.weight", f".{Names.router}.weight", ".shared_expert_gate.weight")
    linears = {name for name in shapes if name.startswith("model.layers.") and not name.endswith(routers)}
    if group not in (None, -1, 32, 64, 128):
        raise ConfigError(f"group must be 32, 64, 128 or -1, not {brief(group)}")
    sizes = (group,) if group else (32, 64, 128, -1) if bits == 4 else (-1,)
    fits = [n for n in sizes if n == -1 or all(shapes[name][1] % n == 0 for name in linears)]
    if not fits:
        raise ConfigError(f"groups of {group} inputs do not divide those of all linears; give another, or none")
    group = fits[0]
    symmetric = bits == 8 or source.config.mixture is not None  # transformers reads no zeros of experts
    outside = ("model.embed_tokens.weight",)
    ignore = sorted({"lm_head", *(name[: -len(".weight")] for name in shapes.keys() - linears - {*outside})})
    about = packed.config(bits, group, symmetric, ignore)
    ready: dict[str, Rounded] = {}

    with new_folder(target) as folder:
        Builder(source.config, source.weights, plain, CPU).check(progress)
        coming: Iterator[dict[str, Rounded]] | None = None
        if bits == 4 and calibration != "none":
            texts = compensate.said(name, progress) if calibration == "self" else compensate.read(files, source)
            coming = compensate.layers(source, texts, bits, group, symmetric, plain, progress)

        def convert(name: str, tensor: Tensor) -> dict[str, Tensor]:
            if name not in linears:
                return {name: tensor.to(plain).contiguous()}
            if coming is None:
                size = shapes[name][1] if group == -1 else group
                return packed.compress(name, rounded(tensor, bits, size, symmetric, plain), bits)
            while name not in ready:
                ready.update(next(coming))
            return packed.compress(name, ready.pop(name), bits)

        _describe(source, folder, {"dtype": kind, "quantization_config": about})
        _write(source, folder, convert, plain, None if coming else progress)
    return target


def _same_tensors(source: Source) -> None:
    """Raises UnsupportedArchitecture where tensors, as they are read, are not those that the config's family has."""
    changed = not source.path.is_dir() and source.config != families.read(source.hf, source.config.eos)
    if source.weights.parts or changed:
        raise UnsupportedArchitecture(
            f"{source.path}: {source.config.architecture} is read from here in other pieces than Hugging Face has, and "
            "is not written; use a checkpoint in safetensors whose experts have tensors of their own"
        )


def _config(source: Source) -> dict[str, Any]:
    """What config.json says."""
    left = ("torch_dtype", "quantization_config")
    config = {key: value for key, value in source.hf.items() if key not in left and value != []}
    config["tie_word_embeddings"] = source.config.tied  # as the files hold a head or none, whatever their config says
    if source.path.is_dir():
        return config
    rope = dict(config["rope_parameters"])
    if rope.pop("freq_factors", None) is not None:
        rope |= _llama3(source.config)
    for own in [rope[kind] for kind in (families.FULL, families.SLIDING) if kind in rope] or [rope]:
        own.setdefault("rope_theta", source.config.rope["rope_theta"])
    kinds = [families.SLIDING if window else families.FULL for window in source.config.windows]
    unsaid = {"sliding_window": None, "layer_types": kinds, "eos_token_id": None, "pad_token_id": None}
    kind = FAMILIES[source.config.architecture].model_type
    # classes have defaults of what is unsaid, and such a token for padding may be none of this vocabulary
    return unsaid | config | {"model_type": kind, "rope_parameters": rope}


def _same_config(source: Source, folder: Path) -> None:
    """Raises UnsupportedArchitecture where the config that was written is read as another model's."""
    ours, theirs = source.config, read_config(folder)
    rope = ours.rope if "freq_factors" in ours.rope else theirs.rope  # of these, `_llama3` has seen to it
    theirs = replace(theirs, dtype=ours.dtype, rope=rope)
    if odd := [field.name for field in fields(ours) if getattr(ours, field.name) != getattr(theirs, field.name)]:
        own, read = (brief(getattr(config, odd[0])) for config in (ours, theirs))
        raise UnsupportedArchitecture(
            f"{source.path}: as config.json, its {odd[0]} of {own} would be read as {read}, and is not written"
        )


def _same_tokenizer(tokenizer: Any, source: Source, folder: Path) -> None:
    """Raises UnsupportedArchitecture where transformers takes another tokenizer for such a model than was written."""
    from transformers import AutoTokenizer

    special = " a".join(tokenizer.get_added_vocab())
    found: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    for text in ("", *TELLING, special):
        ids = tokenizer(text)["input_ids"]
        if found(text)["input_ids"] != ids or found.decode(ids) != tokenizer.decode(ids):
            raise UnsupportedArchitecture(
                f"{source.path}: transformers would read its tokenizer from a folder as {type(found).__name__}, by "
                f"which {brief(text)} is other tokens, and it is not written; export the checkpoint it was made of"
            )


def _llama3(config: ModelConfig) -> dict[str, Any]:
    """Llama 3's parameters, of which a GGUF holds only what they come to. Raises UnsupportedArchitecture."""
    factor = round(max(config.rope["freq_factors"]), 4)
    said = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    ours = Rotary(config, torch.float32, CPU).inv
    for original in (2**i for i in range(6, 20)):
        rope = {"rope_theta": config.rope["rope_theta"], **said, "original_max_position_embeddings": original}
        if torch.allclose(Rotary(replace(config, rope=rope), torch.float32, CPU).inv, ours, rtol=1e-3):
            return rope
    raise UnsupportedArchitecture("this file's rope factors are none of Llama 3's: no config.json can say them")


def _describe(source: Source, folder: Path, says: dict[str, Any]) -> None:
    """Config, which also `says` this, tokenizer and generation config."""
    config = json.dumps(_config(source) | says, indent=2) + "\n"
    if source.path.is_dir():
        for pattern in ("*.json", "*.jinja", "*.model", "merges.txt", "additional_chat_templates/*.jinja"):
            for file in source.path.glob(pattern):
                if file.is_file() and not file.name.endswith(".index.json") and file.name not in OTHERS:
                    copy = folder / file.relative_to(source.path)
                    copy.parent.mkdir(exist_ok=True)
                    shutil.copyfile(file, copy)
    elif ends := list(source.config.eos):
        write_text(folder / "generation_config.json", json.dumps({"eos_token_id": ends}) + "\n")
    write_text(folder / "config.json", config)
    _same_config(source, folder)
    if not source.path.is_dir() and (tokenizer := source.tokenizer()) is not None:
        tokenizer.save_pretrained(folder)
        _same_tokenizer(tokenizer, source, folder)


def _place(name: str) -> tuple[int, str]:
    """By which tensors are sorted: those of a layer lie together."""
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return int(found[1]) if found else -1, name


Convert = Callable[[str, Tensor], dict[str, Tensor]]
"""`convert(name, tensor)`: what is written for a tensor, by its names; no larger than it is in the dtype."""


def _write(source: Source, folder: Path, convert: Convert, dtype: torch.dtype, progress: Progress | None) -> None:
    """All tensors, in files of bounded size."""
    names = sorted(source.weights.shapes, key=_place)
    sizes = {name: dtype.itemsize * torch.Size(source.weights.shapes[name]).numel() for name in names}
    shards, room = [list[str]()], SHARD
    for name in names:
        if shards[-1] and sizes[name] > room:
            shards.append([])
            room = SHARD
        shards[-1].append(name)
        room -= sizes[name]
    where, done, total = dict[str, str](), 0, 0
    for i, shard in enumerate(shards):
        file = "model.safetensors" if len(shards) == 1 else f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        tensors: dict[str, Tensor] = {}
        for name in shard:
            if progress:
                progress("writing weights", done, len(names))
            stored = finite(source.weights.mapped(name, *source.weights.shapes[name]), source.path, name)
            tensors |= {own: finite(tensor, source.path, own) for own, tensor in convert(name, stored).items()}
            done += 1
        where |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
        with replacing(folder / file) as partial:
            save_file(tensors, partial, metadata={"format": "pt"})
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": where}
        write_text(folder / "model.safetensors.index.json", json.dumps(index, indent=2) + "\n")
    if progress:
        progress("writing weights", len(names), len(names))
