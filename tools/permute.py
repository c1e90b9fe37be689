"""The same Llama with its channels in another order: weights that were rounded in groups lose what they had in common.

A file that was rounded before flatters whoever rounds in the same groups again; permuted, it tells what rounding costs.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from outrider.errors import ConfigError
from outrider.files import new_folder
from tools.inflate import COPIED

ROWS = ("o_proj", "down_proj", "input_layernorm", "post_attention_layernorm", "norm")  # that are hidden channels
COLUMNS = ("embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


def permute(source: Path, target: Path, seed: int = 0) -> None:
    """Write to the new folder `target` the model of folder `source`, its hidden and inner channels permuted.

    Logits are equal up to the order of sums. Raises ConfigError if it is no Llama.
    """
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    if not isinstance(model, LlamaForCausalLM):
        raise ConfigError(f"{source} is a {type(model).__name__}: channels are permuted of a Llama")
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randperm(model.config.hidden_size, generator=generator)
    inner = [torch.randperm(layer.mlp.gate_proj.out_features, generator=generator) for layer in model.model.layers]
    with torch.no_grad():
        for name, weight in model.named_parameters():
            module = name.split(".")[-2]
            if module in ROWS:
                weight.copy_(weight[hidden])
            if module in COLUMNS and name.endswith("weight"):
                weight.copy_(weight[:, hidden])
        for layer, order in zip(model.model.layers, inner, strict=True):
            for linear in (layer.mlp.gate_proj, layer.mlp.up_proj):
                for parameter in linear.parameters():  # with its bias, if it has one
                    parameter.copy_(parameter[order])
            layer.mlp.down_proj.weight.copy_(layer.mlp.down_proj.weight[:, order])
    with new_folder(target) as folder:
        model.save_pretrained(folder)
        for path in {path for pattern in COPIED for path in source.glob(pattern) if not (folder / path.name).exists()}:
            shutil.copyfile(path, folder / path.name)
