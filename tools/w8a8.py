"""A checkpoint in int8 as vLLM runs it fastest on a CPU: to be measured beside ours with `--activations int8`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from outrider.errors import ConfigError
from outrider.files import new_folder
from tools.inflate import COPIED

EIGHT = {"num_bits": 8, "type": "int", "symmetric": True}


def w8a8(source: Path, target: Path) -> None:
    """Write to the new folder `target` the model of folder `source` in the format of compressed-tensors.

    Of each matrix but embedding and head, rows in int8 with a scale each; activations are rounded by token, as they
    come. `source` is what `outrider export` writes. Raises ConfigError if it has not one file of weights.
    """
    if not (weights := source / "model.safetensors").is_file():
        raise ConfigError(f"{weights} is not there; give a folder that `outrider export` has written")
    found: dict[str, torch.Tensor] = {}
    for name, weight in load_file(weights).items():
        found[name] = weight
        if weight.ndim == 2 and not name.endswith(("embed_tokens.weight", "lm_head.weight")):
            scale = (weight.float().abs().amax(1, keepdim=True) / 127).clamp(min=1e-12).to(weight.dtype)
            found[name] = (weight.float() / scale.float()).round().clamp(-127, 127).to(torch.int8)
            found[f"{name}_scale"] = scale
    group = {
        "targets": ["Linear"],
        "weights": {**EIGHT, "strategy": "channel", "dynamic": False},
        "input_activations": {**EIGHT, "strategy": "token", "dynamic": True},
    }
    config = json.loads((source / "config.json").read_text("utf-8"))
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"],
    }  # fmt: skip
    with new_folder(target) as folder:
        save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
        for path in {path for pattern in COPIED for path in source.glob(pattern)}:
            shutil.copy(path, folder)
        (folder / "config.json").write_text(json.dumps(config, indent=2), "utf-8")
