"""`outrider export` and `outrider quantize`: a checkpoint as a folder that other engines read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.options import Dtype, Reporter, check_model
from outrider.cli.output import tell
from outrider.errors import ConfigError

Source = Annotated[str, typer.Argument(callback=check_model, help="Folder, GGUF file, hub id or embedded model.")]
Target = Annotated[Path, typer.Argument(help="New or empty folder.")]


def export(model: Source, folder: Target, dtype: Dtype = "auto") -> None:
    """Write a checkpoint as safetensors with config and tokenizer; quantised weights become dense."""
    from outrider.export import export as write

    with Reporter() as reporter:
        write(model, folder, dtype, reporter)
    _tell_size(folder)


def quantize(
    model: Source,
    folder: Target,
    bits: Annotated[int, typer.Option(help="Bits of a weight: 4 or 8.")] = 4,
    group: Annotated[
        int | None, typer.Option(help="Inputs that share a scale: 32, 64, 128, or -1 for all; default: what fits.")
    ] = None,
    calibration: Annotated[
        list[str] | None,
        typer.Option(
            help="With 4 bits: text by which errors offset each other, a file (.txt, .jsonl) or folder; repeatable; "
            "none: round to nearest. Default: what the model writes itself."
        ),
    ] = None,
) -> None:
    """Write a checkpoint with weights of 4 or 8 bits, as compressed-tensors W4A16 or W8A16, which others load, too."""
    from outrider.export import quantize as write

    words = [each for each in calibration or () if each in ("self", "none")]
    if words and calibration != words[:1]:
        raise ConfigError(f"--calibration {words[0]} stands alone; give it, or files and folders")
    with Reporter() as reporter:
        alone = words[0] if words else None
        write(model, folder, bits, reporter, group, alone or [*(calibration or [])] or "self")
    _tell_size(folder)


def _tell_size(folder: Path) -> None:
    size = sum(path.stat().st_size for path in folder.expanduser().glob("*.safetensors"))
    tell(f"{folder}: {size / 1e6:,.0f} MB of weights")
