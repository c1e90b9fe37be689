"""Any checkpoint that can be loaded, as a folder that others read: safetensors, config.json, tokenizer."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.config import DTYPES, ModelConfig
from outrider.errors import ConfigError, UnsupportedArchitecture
from outrider.families import FAMILIES
from outrider.files import expand, new_folder, replacing, write_text
from outrider.load import Progress, Source, open_source
from outrider.model import Rotary

SHARD = 2**31  # bytes of a file


def export(name: str | Path, target: str | Path, dtype: str = "auto", progress: Progress | None = None) -> Path:
    """Write a checkpoint (see `load.find`) to a new or empty folder; returns it. Quantised weights are written dense.

    `dtype`: auto (the checkpoint's, bfloat16 for a quantised file), float32, bfloat16, float16. The folder appears when
    it is complete. Raises what `load` raises, and ConfigError for a folder that cannot be written.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is unknown; valid: auto, {', '.join(DTYPES)}")
    target, source = expand(target), open_source(name)
    kind = source.config.dtype if dtype == "auto" else dtype
    config = json.dumps(_config(source) | {"dtype": kind}, indent=2)
    with new_folder(target) as folder:
        _describe(source, folder)
        write_text(folder / "config.json", config + "\n")
        _write(source, folder, getattr(torch, kind), progress)
    return target


def _config(source: Source) -> dict[str, Any]:
    """What config.json says."""
    config = {key: value for key, value in source.hf.items() if key != "torch_dtype" and value != []}
    if source.path.is_dir():
        return config
    rope = dict(config["rope_parameters"])
    if rope.pop("freq_factors", None) is not None:
        rope |= _llama3(source.config)
    return config | {"model_type": FAMILIES[source.config.architecture].model_type, "rope_parameters": rope}


def _llama3(config: ModelConfig) -> dict[str, Any]:
    """Llama 3's parameters, of which a GGUF holds only what they come to. Raises UnsupportedArchitecture."""
    factor = round(max(config.rope["freq_factors"]), 4)
    said = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    for original in (2**i for i in range(6, 20)):
        rope = {"rope_theta": config.rope["rope_theta"], **said, "original_max_position_embeddings": original}
        turned = Rotary(replace(config, rope=rope), torch.float32, torch.device("cpu")).inv
        ours = Rotary(config, torch.float32, torch.device("cpu")).inv
        if torch.allclose(turned, ours, rtol=1e-3):
            return rope
    raise UnsupportedArchitecture("this file's rope factors are none of Llama 3's: no config.json can say them")


def _describe(source: Source, folder: Path) -> None:
    """Tokenizer and generation config."""
    if source.path.is_dir():
        for pattern in ("*.json", "*.jinja", "*.model"):
            for file in source.path.glob(pattern):
                if not file.name.endswith(".index.json"):
                    shutil.copyfile(file, folder / file.name)
        return
    if (tokenizer := source.tokenizer()) is not None:
        tokenizer.save_pretrained(folder)
    if ends := list(source.config.eos):
        write_text(folder / "generation_config.json", json.dumps({"eos_token_id": ends}) + "\n")


def _write(source: Source, folder: Path, dtype: torch.dtype, progress: Progress | None) -> None:
    """All tensors, in files of bounded size."""
    names = sorted(source.weights.shapes)
    sizes = {name: dtype.itemsize * torch.Size(source.weights.shapes[name]).numel() for name in names}
    shards, room = [list[str]()], SHARD
    for name in names:
        if shards[-1] and sizes[name] > room:
            shards.append([])
            room = SHARD
        shards[-1].append(name)
        room -= sizes[name]
    where, done = dict[str, str](), 0
    for i, shard in enumerate(shards):
        file = "model.safetensors" if len(shards) == 1 else f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        tensors: dict[str, Tensor] = {}
        for name in shard:
            if progress:
                progress("writing weights", done, len(names))
            tensors[name] = source.weights.mapped(name, *source.weights.shapes[name]).to(dtype).contiguous()
            where[name], done = file, done + 1
        with replacing(folder / file) as partial:
            save_file(tensors, partial, metadata={"format": "pt"})
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
        write_text(folder / "model.safetensors.index.json", json.dumps(index, indent=2) + "\n")
    if progress:
        progress("writing weights", len(names), len(names))
