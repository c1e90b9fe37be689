"""GB/s of the chosen experts' bytes by rows: layers of Qwen3-30B-A3B's shape with random weights, beside a streaming
read and transformers, all taking turns in one run. Rows are random: they choose experts independently, as no text's do.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from outrider.bench.report import markdown_table
from outrider.config import SCHEMES
from outrider.ops import MLP, Experts, Linear, Quantized, native
from outrider.quantize import quantize

HIDDEN, WIDE, COUNT, CHOSEN = 2048, 768, 128, 8
STREAM = 2**28  # bytes


def run(layers: int, rows: list[int], repeats: int, formats: list[str]) -> str:
    """The table. `formats`: bfloat16, int8, int4."""
    torch.manual_seed(0)
    weights = [_weights() for _ in range(layers)]
    x = torch.randn(max(rows), HIDDEN).bfloat16()
    block = native.memory(STREAM).zero_()
    threads = torch.get_num_threads()
    calls: dict[str, Callable[[Tensor], int]] = {}

    def stream(x: Tensor) -> int:
        native.kernels.stream(block.data_ptr(), STREAM, threads)
        return STREAM

    calls["stream"] = stream
    for name in formats:
        calls[name] = _ours([_experts(*own, name) for own in weights])
    calls["transformers"] = _theirs(weights)
    table = []
    with torch.inference_mode():
        for n in rows:
            rates: dict[str, list[float]] = {name: [] for name in calls}
            times: dict[str, list[float]] = {name: [] for name in calls}
            for repeat in range(repeats + 1):  # the first one warms up
                for name, call in calls.items():
                    began = time.perf_counter()
                    read = call(x[:n])
                    spent = time.perf_counter() - began
                    if repeat:
                        rates[name].append(read / spent / 1e9)
                        times[name].append(1e3 * spent / layers)
            shown = [
                f"{median(r):.1f}" + (f" ({median(times[m]):.2f} ms)" if m != "stream" else "")
                for m, r in rates.items()
            ]
            table.append([str(n), *shown])
    return markdown_table(["rows", *calls], table)


def _weights() -> tuple[Tensor, Tensor, Tensor]:
    """Router, gate and up, down of all experts."""
    sizes = (COUNT, HIDDEN), (COUNT, 2 * WIDE, HIDDEN), (COUNT, HIDDEN, WIDE)
    own = [torch.randn(size[-2:]).bfloat16() * size[-1] ** -0.5 for size in sizes]  # all experts alike: it is quick
    return own[0], own[1].repeat(COUNT, 1, 1), own[2].repeat(COUNT, 1, 1)


def _experts(router: Tensor, gate_up: Tensor, down: Tensor, name: str) -> Experts:
    def linear(weight: Tensor, gated: bool) -> Linear:
        if name not in SCHEMES:
            return Linear(weight, gated=gated)
        if weight.shape not in packed:
            packed[weight.shape] = quantize(weight, name)
        return Linear(packed[weight.shape], gated=gated)

    packed: dict[torch.Size, Quantized] = {}
    each = [MLP(linear(gate_up[e], True), linear(down[e], False)) for e in range(COUNT)]
    return Experts(Linear(router), each, CHOSEN, normalised=True)


def _ours(layers: list[Experts]) -> Callable[[Tensor], int]:
    def call(x: Tensor) -> int:
        before = sum(layer.read for layer in layers)
        for layer in layers:
            x = layer(x, None, 0.0)
        return sum(layer.read for layer in layers) - before

    return call


def _theirs(weights: list[tuple[Tensor, Tensor, Tensor]]) -> Callable[[Tensor], int]:
    """The block of transformers, of which the experts that it reads are counted."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=WIDE,
        num_experts=COUNT,
        num_experts_per_tok=CHOSEN,
        norm_topk_prob=True,
    )
    config._experts_implementation = "eager"
    blocks = []
    for router, gate_up, down in weights:
        with torch.device("meta"):
            block = Qwen3MoeSparseMoeBlock(config)
        block.gate.weight = torch.nn.Parameter(router)
        block.experts.gate_up_proj, block.experts.down_proj = torch.nn.Parameter(gate_up), torch.nn.Parameter(down)
        blocks.append(block)
    size = 3 * HIDDEN * WIDE * 2

    def call(x: Tensor) -> int:
        read = 0
        for block in blocks:
            read += size * len(block.gate(x)[2].unique())
            x = block(x[None])[0]
        return read

    return call
