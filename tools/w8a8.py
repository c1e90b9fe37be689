"""A checkpoint in int8 as vLLM runs it fastest on a CPU: to be measured beside ours with `--activations int8`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from outrider import packed
from outrider.errors import ConfigError
from outrider.files import new_folder
from outrider.quantize import rounded
from tools.inflate import COPIED


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
            rows = rounded(weight, 8, weight.shape[1], True, weight.dtype)
            found[name], found[f"{name}_scale"] = rows.values, rows.scales
    about = packed.config(8, -1, True, ["lm_head"]) | {"format": "int-quantized"}
    by_token = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    about["config_groups"]["group_0"]["input_activations"] = by_token
    config = json.loads((source / "config.json").read_text("utf-8")) | {"quantization_config": about}
    with new_folder(target) as folder:
        save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
        for path in {path for pattern in COPIED for path in source.glob(pattern)}:
            shutil.copyfile(path, folder / path.name)
        (folder / "config.json").write_text(json.dumps(config, indent=2), "utf-8")
