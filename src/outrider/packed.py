"""Quantised checkpoints in safetensors: GPTQ, AWQ, compressed-tensors, gpt-oss' MXFP4, and FP8 of several makers.

What `quantization_config` says and what lies in the files become `Quantized` weights, with the very groups, scales and
zeros that the checkpoint has. Layouts follow the readers of gptqmodel 7.7 and compressed-tensors 0.20. Tensors decide
which linears are quantised, the config how; what neither explains is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.config import whole
from outrider.errors import CheckpointError, UnsupportedArchitecture, brief
from outrider.ops import Quantized
from outrider.quantize import E2M1, Rounded, powers

GROUP = 128  # inputs that share a scale in our kernels, where the checkpoint has one for all inputs
NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)  # AWQ: where in a word the outputs lie
FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mxfp4-pack-quantized", "mxfp8-quantized",
    "mixed-precision",
)  # fmt: skip
EXTRA = ("input_scale", "input_zero_point", "activation_scale", "output_scale", "k_scale", "v_scale", "q_scale",
         "kv_scale", "k_zero_point", "v_zero_point")  # fmt: skip
"""Of activations and caches, which stay as they are here."""
OWN = ("qweight", "qzeros", "scales", "g_idx", "weight", "weight_packed", "weight_shape", "weight_scale",
       "weight_scale_inv", "weight_zero_point", "weight_g_idx", "blocks")  # fmt: skip
Read = Callable[[str], Tensor]


@dataclass(frozen=True)
class Packed:
    """The weights of one linear as the files hold them: `shape` is (out, in), `kind` what a message calls them."""

    kind: str
    shape: tuple[int, ...]
    read: Callable[[], Quantized]

    def quantized(self) -> Quantized | None:
        """For the kernels, nothing rounded; None if these have no such groups. Raises CheckpointError."""
        found = self.read()
        return found if found.fits else None

    def dense(self) -> Tensor:
        """The weights they stand for, (out, in) float32."""
        return self.read().dense()

    def rows(self, at: Tensor) -> Tensor:
        """Those of some outputs, by their indices (n,)."""
        return self.dense()[at]


class Reader:
    """The quantised linears of a checkpoint: `packed` by the name that the plain weight would have.

    `config` is its quantization_config, `tensors` says shape and safetensors' dtype of each, `where` is named in
    errors. Raises UnsupportedArchitecture for a method or an option of it that cannot be read, CheckpointError for a
    config or tensors that contradict themselves. `inside` says what the files call tensors that have another name.
    """

    def __init__(
        self, config: object, tensors: Mapping[str, tuple[tuple[int, ...], str]], read: Read, where: object,
        inside: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.where, self.read, self.inside = where, read, inside or {}
        if not isinstance(config, Mapping):
            raise CheckpointError(f"{where}: quantization_config should be an object, not {brief(config)}")
        self.config, self.tensors = config, tensors
        method = str(config.get("quant_method"))
        ways = {
            "gptq": (["qweight"], self._gptq), "awq": (["qweight"], self._awq),
            "compressed-tensors": (["weight_scale", "weight_packed"], self._compressed),
            "fp8": (["weight_scale", "weight_scale_inv"], self._fp8), "fbgemm_fp8": (["weight_scale"], self._fp8),
            "mxfp4": (["blocks"], self._blocks),
        }  # fmt: skip
        if method not in ways:
            what = brief(config.get("quant_method"))
            raise UnsupportedArchitecture(
                f"{where}: quantised by {what}, which is not supported; supported: {', '.join(ways)}, and GGUF"
            )
        self.method = method
        marks, read_one = ways[method]
        self._check_method()
        self.packed: dict[str, Packed] = {}
        self.parts: dict[str, list[str]] = {}  # the tensors that each of them is made of
        marked = {name.rpartition(".")[0]: name for name in tensors if name.rpartition(".")[2] in marks}
        for module, mark in sorted(marked.items()):
            if module.endswith("embed_tokens"):
                raise UnsupportedArchitecture(f"{where}: quantised embeddings are not supported ({module})")
            parts = self._looked_at = list[str]()
            self._called = {module, self.inside.get(mark, mark).rpartition(".")[0]}
            self.packed[f"{module}.weight"] = read_one(module)
            self.parts[f"{module}.weight"] = parts
            if left := [own for own in OWN if self._has(module, own) and f"{module}.{own}" not in parts]:
                raise CheckpointError(f"{where}: {method} has no place for {module}.{left[0]} beside {parts[0]}")
        self.rounded = self._rounded()
        known = {name.rpartition(".")[0] for name in tensors if name.rpartition(".")[2] not in EXTRA}
        known |= {module.rpartition(".")[0] for module in known}
        extra = ((name, name.rpartition(".")[0]) for name in tensors if name.rpartition(".")[2] in EXTRA)
        self.extra = [name for name, module in extra if known & {module, module.rpartition(".")[0]}]
        odd = (name for name, (_, kind) in tensors.items() if kind.startswith("F8_") and name not in self.packed)
        if (name := next(odd, None)) is not None:
            raise CheckpointError(f"{where}: {name} is of {kind_of(tensors[name][1])} and has no scale beside it")

    # What a config says.

    def _check_method(self) -> None:
        c, refused = self.config, self._refused
        match self.method:
            case "gptq":
                said = {str(c[key]).lower(): key for key in ("checkpoint_format", "format") if c.get(key)}
                if len(said) > 1:
                    raise self._wrong(f"checkpoint_format and format are {' and '.join(said)}: leave one")
                for name, key in said.items():
                    if name not in ("gptq", "gptq_v2"):
                        raise refused(key, c[key], "gptq, gptq_v2")
                self.zero = 0 if "gptq_v2" in said else 1
                if not isinstance(c.get("dynamic") or {}, Mapping):
                    raise self._wrong(f"dynamic should be an object, not {brief(c['dynamic'])}")
            case "awq":
                key = "version" if c.get("version") else "format"  # its new name
                if str(c.get(key) or "gemm").lower() != "gemm":
                    raise refused(key, c[key], "gemm")
                if c.get("zero_point", True) is not True:
                    raise refused("zero_point", c["zero_point"], "true")
            case "compressed-tensors":
                groups = c.get("config_groups")
                if not isinstance(groups, Mapping) or not all(isinstance(g, Mapping) for g in groups.values()):
                    raise self._wrong(f"config_groups should be an object of objects, not {brief(groups)}")
                for group in groups.values():
                    if not isinstance(group.get("targets"), list):
                        raise self._wrong(f"targets should be a list, not {brief(group.get('targets'))}")
                if not isinstance(c.get("ignore") or [], list):
                    raise self._wrong(f"ignore should be a list, not {brief(c['ignore'])}")
                for said in (c, *groups.values()):
                    if said.get("format") is not None and said["format"] not in FORMATS:
                        raise refused("format", said["format"], ", ".join(FORMATS))
                sparsity = c.get("sparsity_config") or {}
                if not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense":
                    raise refused("sparsity_config", sparsity, "none")
                transforms = c.get("transform_config") or {}
                if not isinstance(transforms, Mapping) or transforms.get("config_groups"):
                    raise refused("transform_config", "with groups", "none")
                # as in compressed-tensors: of several regexes the first in the alphabet, whichever group comes first
                named = {str(target): group for group in groups.values() for target in group["targets"]}
                self.groups = dict(sorted(named.items()))

    def _rounded(self) -> str:
        """To what the config would round activations, as a message says it; empty if it would not."""
        if self.method == "compressed-tensors":
            given = [group.get("input_activations") for group in self.config["config_groups"].values()]
            kinds = {f"{g.get('type', 'int')}{g.get('num_bits', 8)}" for g in given if isinstance(g, Mapping)}
            return " or ".join(sorted(kinds))
        return "float8" if "fp8" in self.method else ""

    def _refused(self, key: str, value: object, valid: str) -> UnsupportedArchitecture:
        return UnsupportedArchitecture(
            f"{self.where}: {self.method} with {key} {brief(value)} is not supported; supported: {valid}"
        )

    def _wrong(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: quantization_config: {message}")

    def _size(self, said: Mapping[str, Any], inputs: int, module: str, *keys: str) -> int:
        """Inputs of a group: -1 and none mean all of them."""
        value = next((said[key] for key in keys if said.get(key) is not None), -1)
        if value == -1 and not isinstance(value, bool):
            return inputs
        if (size := whole(value, 1)) is None:
            raise self._wrong(f"{keys[0]} must be a whole number above 0, or -1, not {brief(value)}")
        if inputs % size:
            raise CheckpointError(f"{self.where}: groups of {size} do not divide the {inputs} inputs of {module}")
        return size

    def _bits(self, value: object, *valid: int) -> int:
        if (bits := whole(value, 1)) in valid:
            return bits
        raise self._refused("bits", value, ", ".join(map(str, valid)))

    def _matches(self, pattern: str) -> int:
        """How closely a target of compressed-tensors, or an exception, means the linear that is being read: by its
        name (3), by a regex, as one of all linears, or not at all (0)."""
        if not pattern.startswith("re:"):
            return 3 if pattern in self._called else int(pattern == "Linear")
        return 2 * self._like(pattern[3:])

    def _like(self, regex: str) -> bool:
        """Whether one of the names that it has, with us and in the files, is like that."""
        try:
            return any(re.match(regex, name) for name in self._called)
        except re.error as error:
            raise self._wrong(f"{regex!r} is no regex: {error}") from None

    # What the files hold.

    def _has(self, module: str, name: str) -> bool:
        return f"{module}.{name}" in self.tensors

    def _shape(self, module: str, name: str, kinds: str, *shapes: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a tensor of one of these dtypes and, if any are given, shapes. It counts as looked at."""
        full = f"{module}.{name}"
        if full not in self.tensors:
            raise CheckpointError(f"{self.where}: tensor {full} is missing, which {self.method} needs")
        self._looked_at.append(full)
        shape, kind = self.tensors[full]
        if kind not in kinds.split():
            raise CheckpointError(f"{self.where}: {full} is {kind_of(kind)}, not {kind_of(kinds)}")
        if shapes and shape not in shapes:
            raise CheckpointError(f"{self.where}: {full} has shape {shape}, not {' or '.join(map(str, shapes))}")
        if not shapes and (len(shape) != 2 or 0 in shape):
            raise CheckpointError(f"{self.where}: {full} has shape {shape}, which is no matrix")
        return shape

    def _read(self, module: str, name: str) -> Tensor:
        return self.read(f"{module}.{name}")

    def _scales(self, module: str, name: str, transposed: bool = False) -> Tensor:
        """(out, groups), finite."""
        scales = self._read(module, name)
        if not scales.isfinite().all():
            raise CheckpointError(f"{self.where}: {module}.{name} is not finite")
        return scales.T.contiguous() if transposed else scales

    def _make(
        self, bits: int, size: int, values: Tensor, scales: Tensor, zeros: Tensor | None = None, **more: Any
    ) -> Quantized:
        """Weights of groups of `size` inputs, which are cut to what the kernels take: the same scale, several times."""
        inputs = values.shape[1]
        if size == inputs and size not in (32, 64, 128):
            own, times = GROUP, -(-inputs // GROUP)
        else:
            own = next((n for n in (128, 64, 32) if size % n == 0), size)
            times = size // own
        if zeros is not None and not zeros.any():
            zeros = None
        if times > 1:
            count = -(-inputs // own)
            scales = scales.repeat_interleave(times, 1)[:, :count].contiguous()
            zeros = None if zeros is None else zeros.repeat_interleave(times, 1)[:, :count].contiguous()
        return Quantized(bits, own, values, scales, zeros=zeros, **more)

    # GPTQ and AWQ.

    def _gptq(self, module: str) -> Packed:
        said = dict(self.config)
        for pattern, own in (self.config.get("dynamic") or {}).items():
            if self._like(str(pattern).removeprefix("+:").removeprefix("-:")):
                if str(pattern).startswith("-:"):
                    raise CheckpointError(f"{self.where}: {module} is packed, and the config's dynamic leaves it out")
                said |= own if isinstance(own, Mapping) else {}
                break
        bits = self._bits(said.get("bits"), 4, 8)
        each = 32 // bits
        words, outputs = self._shape(module, "qweight", "I32")
        inputs = words * each
        size = self._size(said, inputs, module, "group_size")
        groups = inputs // size
        self._shape(module, "scales", "F16 BF16 F32", (groups, outputs))
        self._shape(module, "qzeros", "I32", (groups, -(-outputs // each)))
        if said.get("desc_act") or self._has(module, "g_idx"):
            self._shape(module, "g_idx", "I32 I64", (inputs,))

        def read() -> Quantized:
            half = 2 ** (bits - 1)
            values = unpacked(self._read(module, "qweight").T, bits, inputs).char() - half
            stored = unpacked(self._read(module, "qzeros"), bits, outputs).short()
            if self.zero and (stored == 2 * half - 1).any():
                raise CheckpointError(
                    f"{self.where}: {module} has a zero stored as {2 * half - 1}, which in GPTQ's first format may "
                    f"mean 0 or {2 * half}: convert it to gptq_v2"
                )
            zeros = (stored + (self.zero - half)).char().T.contiguous()
            order = self._order(module, size, groups) if self._has(module, "g_idx") else None
            values = values if order is None else values[:, order.long()]
            return self._make(bits, size, values, self._scales(module, "scales", transposed=True), zeros, order=order)

        return Packed(f"GPTQ {bits}-bit", (outputs, inputs), read)

    def _order(self, module: str, size: int, groups: int, name: str = "g_idx") -> Tensor | None:
        """The inputs, sorted by their groups; None if they are."""
        of = self._read(module, name).long()
        if of.min() < 0 or of.max() >= groups:
            raise CheckpointError(f"{self.where}: {module}.{name} names a group that is none of the {groups}")
        if (of.bincount(minlength=groups) != size).any():
            raise CheckpointError(f"{self.where}: {module}.{name} has groups of another size than group_size {size}")
        order = of.argsort(stable=True)
        return None if torch.equal(order, torch.arange(len(of))) else order.int()

    def _awq(self, module: str) -> Packed:
        self._bits(self.config.get("bits", self.config.get("w_bit")), 4)
        inputs, words = self._shape(module, "qweight", "I32")
        outputs = words * 8
        size = self._size(self.config, inputs, module, "group_size", "q_group_size")
        groups = inputs // size
        self._shape(module, "scales", "F16 BF16 F32", (groups, outputs))
        self._shape(module, "qzeros", "I32", (groups, words))

        def read() -> Quantized:
            values, zeros = (
                (unpacked(self._read(module, name), 4).view(-1, words, 8)[..., NIBBLES].reshape(-1, outputs).char() - 8)
                for name in ("qweight", "qzeros")
            )
            scales = self._scales(module, "scales", transposed=True)
            return self._make(4, size, values.T.contiguous(), scales, zeros.T.contiguous())

        return Packed("AWQ 4-bit", (outputs, inputs), read)

    # Compressed-tensors and FP8.

    def _scheme(self, module: str) -> Mapping[str, Any]:
        """What the config says about a module's weights."""
        if any(self._matches(str(pattern)) for pattern in self.config.get("ignore") or ()):
            raise CheckpointError(f"{self.where}: {module} is quantised, and the config's ignore names it")
        best = max(self.groups, key=self._matches, default=None)
        if best is None or not self._matches(best):
            raise CheckpointError(f"{self.where}: {module} is quantised, and no group of the config has it as a target")
        weights = self.groups[best].get("weights")
        if not isinstance(weights, Mapping):
            raise self._wrong(f"weights should be an object, not {brief(weights)}")
        return weights

    def _compressed(self, module: str) -> Packed:
        said = self._scheme(module)
        bits, kind = whole(said.get("num_bits", 8), 1) or 0, str(said.get("type") or "int").lower()
        if self._has(module, "weight_global_scale"):
            raise self._refused("format", "nvfp4-pack-quantized", ", ".join(FORMATS))
        if kind == "float" and bits == 4:
            return self._mxfp4(module)
        if kind == "float" and bits == 8:
            return self._floats(module, "weight_scale", said)
        if kind != "int" or bits not in (4, 8):
            raise self._refused("weights of", f"{kind} {said.get('num_bits')}", "int 4, int 8, float 4, float 8")
        half, each = 2 ** (bits - 1), 32 // bits
        whole_bytes = self._has(module, "weight")
        if whole_bytes:
            outputs, inputs = self._shape(module, "weight", "I8")
        else:
            outputs, words = self._shape(module, "weight_packed", "I32")
            self._shape(module, "weight_shape", "I64 I32", (2,))
            shape = self._read(module, "weight_shape").tolist()
            if shape[0] != outputs or not 0 < shape[1] <= words * each or -(-shape[1] // each) != words:
                raise CheckpointError(
                    f"{self.where}: {module}.weight_shape says {shape}, weight_packed has {outputs} x {words} words"
                )
            inputs = shape[1]
        size, spread = self._strategy(module, "weight_scale", "F32 BF16 F16", said, outputs, inputs)
        groups, zero_name = spread.shape_of[1], "weight_zero_point"
        symmetric = said.get("symmetric", True) is not False
        packed_zeros = self._has(module, zero_name) and self.tensors[f"{module}.{zero_name}"][1] == "I32"
        if not symmetric or self._has(module, zero_name):
            packed_shape = (-(-outputs // each), groups)
            if packed_zeros:
                self._shape(module, zero_name, "I32", packed_shape)
            else:
                self._shape(module, zero_name, "I8", spread.shape, spread.shape_of, *spread.alone)
        ordered = self._has(module, "weight_g_idx")
        if ordered:
            self._shape(module, "weight_g_idx", "I32 I64", (inputs,))

        def read() -> Quantized:
            if whole_bytes:
                values = self._read(module, "weight")
                if bits == 4 and ((values < -8) | (values > 7)).any():
                    raise CheckpointError(f"{self.where}: {module}.weight holds numbers of more than 4 bits")
            else:
                values = unpacked(self._read(module, "weight_packed"), bits, inputs).char() - half
            zeros = None
            if self._has(module, zero_name):
                stored = self._read(module, zero_name)
                if packed_zeros:
                    zeros = (unpacked(stored.T, bits, outputs).char() - half).T.contiguous()
                else:
                    zeros = spread(stored)
            order = None
            if ordered and (self._read(module, "weight_g_idx") != -1).any():
                order = self._order(module, size, groups, "weight_g_idx")
                values = values if order is None else values[:, order.long()]
            scales = spread(self._scales(module, "weight_scale"))
            return self._make(bits, size, values, scales, zeros, order=order)

        return Packed(f"{'int8' if whole_bytes else f'packed {bits}-bit'}", (outputs, inputs), read)

    def _strategy(
        self, module: str, name: str, kinds: str, said: Mapping[str, Any], outputs: int, inputs: int
    ) -> tuple[int, _Spread]:
        """The inputs of a group, and how stored scales become (out, groups)."""
        strategy = said.get("strategy") or ("group" if said.get("group_size") not in (None, -1) else "channel")
        block = said.get("block_structure")
        rows, size = 1, inputs
        if strategy == "group":
            size = self._size(said, inputs, module, "group_size")
        elif strategy == "block":
            if isinstance(block, str) and re.fullmatch(r"\d{1,6}x\d{1,6}", block):
                block = [int(n) for n in block.split("x")]
            if not isinstance(block, list) or len(block) != 2 or not all(whole(n, 1) for n in block):
                raise self._wrong(f"a block should be two whole numbers above 0, not {brief(block)}")
            rows, size = min(block[0], outputs), min(block[1], inputs)
        elif strategy == "tensor":
            rows = outputs
        elif strategy != "channel":
            raise self._refused("strategy", strategy, "tensor, channel, group, block")
        shape = (-(-outputs // rows), -(-inputs // size))
        spread = _Spread(rows, (outputs, shape[1]), shape)
        self._shape(module, name, kinds, shape, *([shape[:1]] if shape[1] == 1 else []), *spread.alone)
        return size, spread

    def _fp8(self, module: str) -> Packed:
        name = "weight_scale_inv" if self._has(module, "weight_scale_inv") else "weight_scale"
        block, said = self.config.get("weight_block_size"), {}
        if block is not None:
            said = {"strategy": "block", "block_structure": block}
        elif self._has(module, name):
            shape = self.tensors[f"{module}.{name}"][0]
            said = {"strategy": "tensor" if shape in ((), (1,), (1, 1)) else "channel"}
        return self._floats(module, name, said)

    def _floats(self, module: str, name: str, said: Mapping[str, Any]) -> Packed:
        outputs, inputs = self._shape(module, "weight", "F8_E4M3")
        if said.get("symmetric", True) is False:
            raise self._refused("symmetric", False, "true for floats")
        size, spread = self._strategy(module, name, "F32 BF16 F16 U8", said, outputs, inputs)
        zeros = f"{module}.weight_zero_point"
        if zeros in self.tensors:
            self._shape(
                module, "weight_zero_point", self.tensors[zeros][1], spread.shape, self.tensors[f"{module}.{name}"][0]
            )

        def read() -> Quantized:
            if zeros in self.tensors and self.read(zeros).float().any():
                raise CheckpointError(f"{self.where}: {zeros} is not zero, and the weights are floats")
            values, scales = self._read(module, "weight"), self._read(module, name)
            if (values.view(torch.uint8) & 0x7F == 0x7F).any():
                raise CheckpointError(f"{self.where}: {module}.weight is not finite")
            scales = self._powers(module, name, scales) if scales.dtype == torch.uint8 else scales
            if not scales.isfinite().all():
                raise CheckpointError(f"{self.where}: {module}.{name} is not finite")
            return self._make(8, size, values, spread(scales), floats=True)

        return Packed("FP8", (outputs, inputs), read)

    def _powers(self, module: str, name: str, exponents: Tensor) -> Tensor:
        if (exponents == 255).any():
            raise CheckpointError(f"{self.where}: {module}.{name} is not finite")
        return powers(exponents, 127)

    def _mxfp4(self, module: str) -> Packed:
        outputs, half = self._shape(module, "weight_packed", "U8")
        inputs = 2 * half
        size = self._size({"group_size": 32}, inputs, module, "group_size")
        self._shape(module, "weight_scale", "U8", (outputs, inputs // size))

        def read() -> Quantized:
            scales = self._read(module, "weight_scale")
            self._powers(module, "weight_scale", scales)
            return from_mxfp4(self._read(module, "weight_packed"), scales)

        return Packed("MXFP4", (outputs, inputs), read)

    def _blocks(self, module: str) -> Packed:
        """MXFP4 as gpt-oss has it."""
        shape = self.tensors[f"{module}.blocks"][0]
        if len(shape) != 3 or shape[2] != 16 or 0 in shape:
            raise CheckpointError(f"{self.where}: {module}.blocks has shape {shape}, not (out, in / 32, 16)")
        self._shape(module, "blocks", "U8", shape)
        self._shape(module, "scales", "U8", shape[:2])

        def read() -> Quantized:
            scales = self._read(module, "scales")
            self._powers(module, "scales", scales)
            return from_mxfp4(self._read(module, "blocks").flatten(1), scales)

        return Packed("MXFP4", (shape[0], 32 * shape[1]), read)


@dataclass(frozen=True)
class _Spread:
    """Stored factors, of `shape`, one for so many rows each, as (out, groups) `shape_of`."""

    rows: int
    shape_of: tuple[int, int]
    shape: tuple[int, int]

    @property
    def alone(self) -> list[tuple[int, ...]]:
        """The shapes that a single factor may have, too."""
        return [(), (1,)] if self.shape == (1, 1) else []

    def __call__(self, stored: Tensor) -> Tensor:
        stored = stored.reshape(self.shape)
        return stored.repeat_interleave(self.rows, 0)[: self.shape_of[0]].contiguous()


def packed(codes: Tensor, bits: int) -> Tensor:
    """(rows, n) int32 from integers (rows, count) int8 with a sign, of 4 or 8 bits, as compressed-tensors packs."""
    each = 32 // bits
    whole = torch.nn.functional.pad(codes.int() + 2 ** (bits - 1), (0, -codes.shape[1] % each)).to(torch.uint8)
    if bits == 4:
        whole = whole[:, ::2] | whole[:, 1::2] << 4
    return whole.flatten().view(torch.int32).view(len(whole), -1)


def compress(name: str, rounded: Rounded, bits: int) -> dict[str, Tensor]:
    """The tensors of a weight (out, in) in compressed-tensors' pack-quantized format."""
    tensors = {
        f"{name}_packed": packed(rounded.values, bits),
        f"{name}_scale": rounded.scales,
        f"{name}_shape": torch.tensor(rounded.values.shape),
    }
    if rounded.zeros is not None:
        tensors[f"{name}_zero_point"] = packed(rounded.zeros.T, bits).T.contiguous()
    return tensors


def config(bits: int, group: int, symmetric: bool, ignore: list[str]) -> dict[str, Any]:
    """The quantization_config of what `compress` makes; group -1: a scale a row."""
    weights = {
        "num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "channel" if group == -1 else "group",
        "group_size": None if group == -1 else group, "dynamic": False,
    }  # fmt: skip
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": scheme}, "ignore": ignore, "kv_cache_scheme": None,
        **({} if symmetric else {"dequantize": True}),  # transformers 5.23 makes no room for packed zeros
    }  # fmt: skip


def stored_bits(config: Mapping[str, Any]) -> float | None:
    """Bits that a quantised weight takes by a quantization_config, scales and zeros included; None if it is unclear."""
    method, bits, group = (config.get(key) for key in ("quant_method", "bits", "group_size"))
    if method in ("fp8", "fbgemm_fp8", "mxfp4"):
        return 4.25 if method == "mxfp4" else 8.0
    if method == "compressed-tensors":
        groups = config.get("config_groups")
        first = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
        said = first.get("weights") if isinstance(first, Mapping) else None
        bits, group = (said.get("num_bits"), said.get("group_size")) if isinstance(said, Mapping) else (None, None)
    bits, group = whole(bits, 1, 16), whole(group, 1)
    return bits + (16 + bits) / group if bits and group else bits


def from_mxfp4(blocks: Tensor, exponents: Tensor) -> Quantized:
    """MXFP4 of the OCP's specification: blocks (out, in / 2) uint8, the lower nibble first; exponents (out, in / 32)
    uint8, of which none is 255: that is NaN."""
    codes = torch.stack([blocks & 15, blocks >> 4], -1).view(len(blocks), -1)
    values = torch.tensor(E2M1, dtype=torch.int8)[codes.int()]
    return Quantized(4, 32, values, powers(exponents, 128), floats=True)


def unpacked(words: Tensor, bits: int, count: int | None = None) -> Tensor:
    """(rows, count) uint8 of `bits`, 4 or 8, from (rows, n) int32 that hold them from the lowest bits on."""
    each = words.contiguous().view(torch.uint8)
    each = torch.stack([each & 15, each >> 4], -1).view(len(each), -1) if bits == 4 else each
    return each[:, :count]


def kind_of(names: str) -> str:
    """safetensors' names of dtypes, as a message says them."""
    return names.lower().replace(" ", " or ")
