"""`outrider info`: what this installation and a model are, and which guarantee holds."""

from __future__ import annotations

import os
import platform
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

import outrider
from outrider.cli.options import Device, Dtype, Quantization, Reporter, load_llm
from outrider.config import ARCHITECTURES


def kernels() -> str:
    """What the compiled kernels run on."""
    from outrider.ops import native

    if native.kernels is None:
        return "not built (no compiler when this was installed): reference operations in PyTorch"
    wrong = f"; refused, as their products are wrong: {', '.join(native.wrong)}" if native.wrong else ""
    return f"{native.active}, self-check passed; available: {', '.join(native.available())}{wrong}"


def info(
    model: Annotated[str | None, typer.Option(help="Load this model and describe it, with its self-check.")] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    quantization: Quantization = None,
) -> None:
    """Versions, devices, methods with their options; with --model, the model's shape and exactness."""
    import torch

    from outrider import drafters
    from outrider.engine import free_memory
    from outrider.load import embedded

    table = Table(show_header=False, box=None)
    if model is None:
        versions = f"{outrider.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
        instructions = torch.backends.cpu.get_cpu_capability()
        table.add_row("outrider", versions)
        table.add_row("cpu", f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, {instructions}")
        table.add_row("kernels", kernels())
        for i in range(torch.cuda.device_count()):
            table.add_row(f"cuda:{i}", torch.cuda.get_device_name(i))
        table.add_row("embedded models", ", ".join(embedded()))
        table.add_row("architectures", ", ".join(ARCHITECTURES))
        for method in drafters.methods():
            table.add_row(f"method {method}", ", ".join(drafters.options(method)))
    else:
        with Reporter() as reporter:
            llm = load_llm(model, None, dtype, device, reporter, quantization=quantization)
        m, c = llm.runner.model, llm.runner.model.config
        windows = sorted({w for w in c.windows if w})
        table.add_row("model", f"{c.architecture} at {llm.checkpoint.path}")
        heads = f"{c.num_heads} query and {c.num_kv_heads} key-value heads of {c.head_dim}"
        rope = f"{c.context}, rope {c.rope['rope_type']}" + (f", windows {windows}" if windows else "")
        dtype = str(m.dtype).removeprefix("torch.")
        per_token = 2 * c.num_layers * c.num_kv_heads * c.head_dim * m.dtype.itemsize
        table.add_row("shape", f"hidden {c.hidden_size}, {c.num_layers} layers, {heads}, MLP {c.intermediate_size}")
        table.add_row("vocabulary", str(c.vocab_size))
        table.add_row("positions", rope)
        table.add_row("weights", f"{m.nbytes / 2**20:.1f} MiB read per forward, {dtype}, {m.device}")
        table.add_row("keys and values", f"{per_token} bytes per token; {free_memory(m.device) / 2**30:.1f} GiB free")
        table.add_row("linear", m.head.kernel)
        table.add_row("attention", "scaled_dot_product_attention, whole key blocks")
        table.add_row(
            "exactness",
            {
                "bitwise": "bitwise: the self-check found no bit that depends on what shares a forward",
                "law": "law: logits depend in their last bits on what shares a forward; near-ties may fall either way",
            }[llm.exactness],
        )
    Console(highlight=False, soft_wrap=True).print(table)
