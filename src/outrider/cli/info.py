"""`outrider info`: what this installation and a model are, and which guarantee holds."""

from __future__ import annotations

import json
import os
import platform
from collections import Counter
from contextlib import suppress
from dataclasses import MISSING as MISSING_FIELD
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

import outrider
from outrider.cli.options import Activations, Device, Dtype, Quantization, Reporter, check_model
from outrider.cli.output import new_console, put_json, visible
from outrider.config import ModelConfig
from outrider.errors import ConfigError, OutriderError
from outrider.families import FAMILIES

EXACTNESS = {
    "bitwise": "the self-check found no bit that depends on what shares a forward",
    "law": "logits depend in their last bits on what shares a forward; near-ties may fall either way",
}


def kernels() -> str:
    """What the compiled kernels run on."""
    from outrider.ops import native

    if reason := native.lacking():
        return f"reference operations in PyTorch: {reason}"
    wrong = f"; refused, as their products are wrong: {', '.join(native.wrong)}" if native.wrong else ""
    return f"{native.active}, self-check passed; available: {', '.join(native.available())}{wrong}"


def info(
    model: Annotated[
        str | None, typer.Option(callback=check_model, help="Load this model and describe it, with its self-check.")
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    quantization: Quantization = None,
    activations: Activations = None,
    as_json: Annotated[bool, typer.Option("--json", help="The same as one JSON object.")] = False,
) -> None:
    """Versions, devices, methods with their options; with --model, the model's shape and exactness."""
    chosen = {
        "dtype": dtype != "auto",
        "device": device != "auto",
        "quantization": quantization,
        "activations": activations,
    }
    for name, given in chosen.items():
        if given and model is None:
            raise ConfigError(f"--{name} says how a model is loaded; give one with --model")
    if model is None:
        facts = _installation()
    else:
        with Reporter() as reporter:
            llm = outrider.LLM(
                model, dtype=dtype, device=device, progress=reporter, quantization=quantization, activations=activations
            )
            facts = _model(llm)
    if as_json:
        put_json(facts)
        return
    table = Table(show_header=False, box=None)
    for _ in range(2):
        table.add_column(overflow="fold")  # the default cuts what a narrow terminal has no room for
    for name, value in facts.items():
        if name == "methods":
            for method, about in value.items():
                lines = [f"broken: {about['broken']}"] if "broken" in about else map(_spoken, about["options"])
                _row(table, f"method {method}", "\n".join(lines))
        elif name == "drafters":
            for method, what in value.items():
                _row(table, f"drafts {method}" if method == "without more" else f"drafts by {method}", what)
        elif name == "exactness":
            _row(table, name, f"{value}: {EXACTNESS[value]}")
        else:
            _row(table, name.replace("_", " "), ", ".join(value) if isinstance(value, list) else value)
    console = new_console()
    console.width = max(20, console.width)  # in less the columns vanish
    console.print(table)


def _row(table: Table, name: str, value: object) -> None:
    table.add_row(Text(visible(name)), Text(visible(value)))


def _spoken(option: dict[str, Any]) -> str:
    meaning = f": {option['help']}" if option["help"] else ""
    return f"{option['name']} ({option['type']}, default {option['default']!r}){meaning}"


def _installation() -> dict[str, Any]:
    import torch

    from outrider import drafters
    from outrider.find import embedded

    methods: dict[str, Any] = {}
    for method in drafters.methods():
        try:
            methods[method] = {"options": [option._asdict() for option in drafters.describe(method)]}
        except ConfigError as error:  # another package's, which must not hide the others
            methods[method] = {"broken": str(error)}
    devices = {f"cuda:{i}": torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
    instructions = torch.backends.cpu.get_cpu_capability()
    return {
        "outrider": outrider.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, {instructions}",
        "kernels": kernels(),
        **devices,
        "embedded_models": list(embedded()),
        "architectures": list(FAMILIES),
        "methods": methods,
    }


def _format(path: Path) -> str:
    """What a checkpoint's weights are stored as."""
    if path.is_dir():
        from outrider.load import open_source

        packed = getattr(open_source(path).weights, "reader", None)
        kinds = Counter(linear.kind for linear in packed.packed.values()) if packed else Counter[str]()
        return "safetensors" + ": " * bool(kinds) + ", ".join(f"{n} linears {kind}" for kind, n in kinds.most_common())
    from outrider import gguf

    kinds = Counter(tensor.kind for tensor in gguf.File(path).tensors.values())
    return f"GGUF: {', '.join(f'{count} tensors {kind}' for kind, count in kinds.most_common())}"


def _drafters(llm: outrider.LLM) -> dict[str, str]:
    """Which methods would fit a model, and with what."""
    from outrider import drafters
    from outrider.datastore import Store
    from outrider.find import embedded, kind_of, stores
    from outrider.load import read_tokenizer

    config, path, mine = llm.runner.model.config, llm.checkpoint.path, llm.tokenizer
    words, models = mine.get_vocab() if mine else None, list[str]()
    heads: dict[str, list[str]] = {"medusa": [], "recurrent": [], "eagle3": []}
    for name, folder in embedded().items():
        about = json.loads((folder / "config.json").read_text("utf-8"))
        if (kind := kind_of(folder)) in heads:
            fits = (about["hidden_size"], about["vocab_size"]) == (config.hidden_size, config.vocab_size)
            heads[kind] += [name] * fits
        elif folder != path and words is not None and about["hidden_size"] < config.hidden_size:
            models += [name] * (read_tokenizer(folder).get_vocab() == words)
    stored = list[str]()
    for file in stores(path) if path else ():
        with suppress(OutriderError):
            Store(file).check(mine, config.vocab_size)
            stored.append(f"{Path(file).name}, which `auto` asks,")
    vocabulary = f"a smaller model of these {config.vocab_size} tokens"
    trained = f"that were trained for it: hidden {config.hidden_size}, {config.vocab_size} tokens"
    found = {
        "draft_model": " or ".join([*models, vocabulary]),
        "triforce": " or ".join([*models, vocabulary]),
        "medusa": " or ".join([*heads["medusa"], f"heads {trained}"]),
        "recurrent": " or ".join([*heads["recurrent"], f"a head {trained.replace('were', 'was')}"]),
        "eagle3": " or ".join([*heads["eagle3"], f"a head {trained.replace('were', 'was')}"]),
        "rest": " or ".join([*stored, "a datastore of this tokenizer's tokens: outrider datastore build"]),
    }
    needs = {method: [o for o in drafters.describe(method) if o.help.startswith("required")] for method in found}
    free = [m for m in drafters.methods() if m not in found and m not in ("none", "merge")]
    return {"without more": ", ".join(free)} | {method: what for method, what in found.items() if needs[method]}


def _switches(config: ModelConfig) -> list[str]:
    """In what a model differs from a plain Llama."""
    names, said = config.names, list[str]()
    for what, before, after in (
        ("attention", names.before_attention, names.after_attention),
        ("MLP", names.before_mlp, names.after_mlp),
    ):
        places = [place for place, name in (("before", before), ("after", after)) if name]
        said.append(f"norm {' and '.join(places)} {what}")
    apart = ("names", "local_rope", "mixture")
    shown = [f for f in fields(config) if f.default is not MISSING_FIELD and f.name not in apart]
    for item in shown:
        if (value := getattr(config, item.name)) != item.default:
            name = item.name.replace("_", " ")
            said.append(
                name if value is True else f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
            )
    if m := config.mixture:
        said.append(f"{m.chosen} of {m.count} experts of {m.width} in {len(m.layers)} of {config.num_layers} layers")
        said += [f"beside them one of {m.shared} that all tokens take"] * bool(m.shared)
    if config.local_rope:
        said.append(f"rope of layers with windows {config.local_rope['rope_type']}")
    return said


def _model(llm: outrider.LLM) -> dict[str, Any]:
    from outrider.engine import free_memory
    from outrider.ops import KEY_BLOCK, follows_paths, native
    from outrider.ops.elementwise import GATES
    from outrider.ops.triton.graph import ROWS

    m, c, dtype = llm.runner.model, llm.runner.model.config, str(llm.runner.model.dtype).removeprefix("torch.")
    windows = sorted({w for w in c.windows if w})
    heads = f"{c.num_heads} query and {c.num_kv_heads} key-value heads of {c.head_dim}"
    per_token = 2 * c.num_layers * c.num_kv_heads * c.head_dim * m.dtype.itemsize
    attention = f"PyTorch's scaled_dot_product_attention, keys in whole blocks of {KEY_BLOCK}"
    if follows_paths(m.dtype, m.device, c.head_dim):
        kernels = "Triton" if m.head.kernel == "Triton" else native.active
        attention = f"{kernels}, each row's keys in the order of their positions"
    more = ""
    if c.mixture:
        more = f" of one row, about {m.expected_bytes(8) / 2**20:.1f} MiB of eight"
    walk = "one call of the kernels for all layers" if m.native_seconds is not None else "layer by layer"
    walk = walk if m.graphs is None else f"a CUDA graph for up to {ROWS[-1]} rows, else layer by layer"
    gate = "PyTorch, row by row"
    if m.head.kernel == "Triton":
        gate = "in the gate-up product" if c.activation == "silu" else gate
    elif m.head.native:
        gate = "in the gate-up product" if c.activation == "silu" else native.active if c.activation in GATES else gate
    return {
        "model": f"{c.architecture} at {llm.checkpoint.path}",
        "family": FAMILIES[c.architecture].title,
        "switches": _switches(c),
        "format": _format(llm.checkpoint.path),
        "context": c.context,
        "shape": f"hidden {c.hidden_size}, {c.num_layers} layers, {heads}, MLP {c.intermediate_size}",
        "vocabulary": c.vocab_size,
        "positions": f"{c.context}, rope {c.rope['rope_type']}" + (f", windows {windows}" if windows else ""),
        "weights": f"{m.nbytes / 2**20:.1f} MiB read per forward{more}, {dtype}, {m.device}",
        "keys_and_values": f"{per_token} bytes per token; {free_memory(m.device) / 2**30:.1f} GiB free",
        "bytes_per_forward": m.nbytes,
        "forward": walk,
        "linear": m.head.kernel + (", activations of quantised weights rounded to int8" if m.rounded else ""),
        "activation": f"{c.activation}, {gate}",
        "attention": attention,
        "drafters": _drafters(llm),
        "exactness": llm.exactness,
    }
