"""The tensors of a checkpoint by the names that a model has for them, read when they are asked for.

They lie in safetensors, plain or quantised, in a GGUF file, or in another model of this process.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider import gguf, packed
from outrider.config import DTYPES, ModelConfig, Names
from outrider.errors import CheckpointError
from outrider.files import check_regular, read_json

logger = logging.getLogger(__name__)
SINGLE = "model.safetensors"
MOST_EXPERTS = 2**14
QUANTISED = ".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".absmax"  # names of what packs weights
IN_MEMORY = ((Names.router, Names.experts), ("block_sparse_moe.router", "block_sparse_moe.experts"))
"""What transformers calls routers and experts once it has loaded them."""


class Weights:
    """The tensors of a checkpoint. Every file's header is checked before anything is read."""

    quantised = False  # whether some may be
    said = "config.json"  # what describes them
    rounds: str | None = None  # to what the activations of its linears are rounded
    parts: Mapping[str, tuple[str, int]] = {}  # tensors that lie in another one: its name, and where in it
    transposed = False  # whether these are matrices (in, out)

    def __init__(self, path: Path, rename: Callable[[str], str | None] | None = None) -> None:
        """`rename`: what the model calls a tensor of the files; None if it has no use for it."""
        self.path = path
        index = path / "model.safetensors.index.json"
        if index.exists():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise CheckpointError(f"{index} has no weight_map, which says where each tensor is, or an empty one")
            names = sorted({str(name) for name in weight_map.values()})
            if outside := [name for name in names if Path(name).is_absolute() or ".." in Path(name).parts]:
                raise CheckpointError(f"{index} names {outside[0]!r}, which leaves the folder; such a file is not read")
        else:
            whole = path / SINGLE  # beside it may lie what is not the model: adapters, other layouts
            names = [whole.name] if whole.exists() else [p.name for p in sorted(path.glob("*.safetensors"))]
        if not names:
            pickled = any(path.glob("*.bin")) or any(path.glob("*.pt"))
            hint = "; pickled weights are not read: convert them to safetensors" if pickled else ""
            raise CheckpointError(f"{path} has no safetensors weights{hint}")
        self.files: dict[str, Path] = {}
        self.inside: dict[str, str] = {}  # what the files call them
        self.where: dict[str, Path] = {}  # in which of them they lie
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.kinds: dict[str, str] = {}  # dtypes, as safetensors names them
        for name in names:
            check_regular(path / name)
            with _opened(path / name) as file:
                for inside in file.keys():  # noqa: SIM118 - not a dict
                    if (key := rename(inside) if rename else inside) is not None:
                        if key in self.files and not index.exists():
                            raise CheckpointError(
                                f"{path}: {inside} is in {self.files[key].name} and in {name}: which is the model "
                                "is not said; leave one, or name it model.safetensors"
                            )
                        self.files[key], self.inside[key] = path / name, inside
                        self.where[key] = path / name
                        self.shapes[key] = tuple(file.get_slice(inside).get_shape())
                        self.kinds[key] = file.get_slice(inside).get_dtype()
        if index.exists() and SINGLE not in names and (path / SINGLE).exists():
            others = f"{index.name} names {names[0]}"
            raise CheckpointError(f"{path} has {SINGLE}, and {others}: which is the model is not said; leave one")
        self.unused = set(self.files)

    def split(self, config: ModelConfig) -> None:
        """Give each expert its part of the tensors of all experts."""
        names, parts = config.names, dict[str, tuple[str, int]]()
        if config.mixture is None:
            return
        inside = "|".join(re.escape(name) for name in {names.experts, *(experts for _, experts in IN_MEMORY)})
        for name in list(self.files):
            match = re.fullmatch(rf"(model\.layers\.\d+\.(?:{inside}))\.(\w+?)(\.weight|_bias|_blocks|_scales|)", name)
            shape = self.shapes[name]
            if match is None or len(shape) < 2 or not 0 < shape[0] <= MOST_EXPERTS or 0 in shape:
                continue
            if match[2] == "router":  # which GraniteMoE has among its experts
                continue
            what = match[3].lstrip("._") or "weight"
            turned = names.transposed and what == "weight"
            for e in range(shape[0]):
                own = f"{match[1]}.{e}.{match[2]}.{what}"
                parts[own] = name, e
                self.files[own], self.shapes[own] = self.files[name], shape[:0:-1] if turned else shape[1:]
                if self.kinds:
                    self.kinds[own] = self.kinds[name]
            del self.files[name], self.shapes[name]
        self.parts, self.transposed, self.unused = parts, names.transposed, set(self.files)

    def tensor(self, name: str) -> Tensor:
        """A tensor as it is stored, or its part of one."""
        if name not in self.parts:
            return self._read(name)
        whole, at = self.parts[name]
        part = self._read(whole)[at]
        return part.T if self.transposed and name.endswith(".weight") else part

    def stored(self, name: str, *shape: int) -> gguf.Stored | packed.Packed | None:
        """A quantised matrix, or None if it is of floats. Raises as `mapped`."""
        self._claim(name, shape)
        return None

    def mapped(self, name: str, *shape: int) -> Tensor:
        """A tensor that still lies in the file. Raises CheckpointError if it is absent or shaped otherwise."""
        self._claim(name, shape)
        tensor = self.tensor(name)
        if str(tensor.dtype).removeprefix("torch.") not in DTYPES:
            raise CheckpointError(f"{self.path}: {name} is {tensor.dtype}; supported: {', '.join(DTYPES)}{self._hint}")
        return tensor

    @property
    def _hint(self) -> str:
        """Of quantised weights that nothing tells how to read."""
        of = next((name for name in self.files if not self.quantised and name.endswith(QUANTISED)), None)
        return f"; {of} is of quantised weights, and config.json has no quantization_config" if of else ""

    def _claim(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self.files:
            raise CheckpointError(f"{self.path}: tensor {name} is missing{self._hint}")
        if self.shapes[name] != shape:
            known = self.shapes[name]
            raise CheckpointError(f"{self.path}: {name} has shape {known}, {self.said} asks for {shape}{self._hint}")
        self.unused.discard(name)

    def _read(self, name: str) -> Tensor:
        inside, path = self.inside[name], self.where[name]
        with _opened(path) as file:  # anew: the pages read go when the tensor goes
            tensor: Tensor = file.get_tensor(inside)
        return tensor

    def check_unused(self) -> None:
        """Weights that nothing reads mean that the config describes another model."""
        ignored = ("rotary_emb.inv_freq", "lm_head.weight")
        if left := sorted(name for name in self.unused if not name.endswith(ignored)):
            raise CheckpointError(f"{self.path}: {self.said} has no place for {len(left)} tensors, such as {left[0]}")


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A file of safetensors, to be read in the block. Raises CheckpointError, also for one that changes meanwhile."""
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is missing, truncated or damaged: {error}") from None


class HeldWeights(Weights):
    """Tensors that another model of this process holds, by their names in a checkpoint."""

    def __init__(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        self.path, self.tensors = path, tensors
        self.files = dict.fromkeys(tensors, path)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.kinds, self.unused = {}, set(tensors)

    def _read(self, name: str) -> Tensor:
        return self.tensors[name]


class PackedWeights(Weights):
    """The tensors of a folder whose config.json has a quantization_config: a quantised weight under its plain name."""

    quantised = True

    def __init__(self, plain: Weights, hf: Mapping[str, Any]) -> None:
        self.path, self.plain, self.files = plain.path, plain, dict(plain.files)
        about = {name: (shape, plain.kinds[name]) for name, shape in plain.shapes.items()}
        self.reader = packed.Reader(hf["quantization_config"], about, plain.tensor, plain.path, plain.inside)
        replaced = {part for parts in self.reader.parts.values() for part in parts}
        self.shapes = {name: s for name, s in plain.shapes.items() if name not in {*replaced, *self.reader.extra}}
        for name, linear in self.reader.packed.items():
            self.shapes[name], self.files[name] = linear.shape, plain.files[self.reader.parts[name][0]]
        self.unused = set(self.shapes)

    def stored(self, name: str, *shape: int) -> packed.Packed | None:
        super().stored(name, *shape)
        return self.reader.packed.get(name)

    def _read(self, name: str) -> Tensor:
        linear = self.reader.packed.get(name)
        return self.plain.tensor(name) if linear is None else linear.dense()

    def check_unused(self) -> None:
        for name in [name for name in self.unused if name.endswith(".bias")]:
            if f"{name[:-5]}.weight" in self.reader.packed and not self._read(name).any():
                self.unused.discard(name)  # GPTQ's tools have written biases of zeros where there are none
                del self.shapes[name]  # nor does an export write them
        super().check_unused()
        if (rounded := self.reader.rounded) and rounded != self.rounds:
            logger.warning(
                "%s: activations stay %s, where the config would round them to %s",
                self.path.name,
                self.rounds or "bfloat16",
                rounded,
            )


class GGUFWeights(Weights):
    """The tensors of a GGUF file."""

    quantised = True
    said = "its metadata"

    def __init__(self, file: gguf.File) -> None:
        self.path, self.file = file.path, file
        self.files = dict.fromkeys(file.names, file.path)
        self.shapes = {hf: file.tensors[name].shape for hf, name in file.names.items()}
        self.kinds, self.unused = {}, set(self.files)

    def stored(self, name: str, *shape: int) -> gguf.Stored | None:
        super().stored(name, *shape)
        found = self._found(name)
        return None if found.kind in gguf.PLAIN else found

    def tensor(self, name: str) -> Tensor:
        """As it is stored, or what that stands for."""
        return self._found(name).dense()

    def _found(self, name: str) -> gguf.Stored:
        whole, at = self.parts.get(name, (name, None))
        found = self.file.stored(whole)
        return found if at is None else found.part(at)
