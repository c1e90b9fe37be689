"""Compile the GPU kernels for an architecture, without a GPU, and print what came out, one JSON object a line.

    python tests/compile_kernels.py 90

A process of its own: where TRITON_INTERPRET is set, Triton does not compile.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"
os.environ["TRITON_CACHE_DIR"] = os.environ.get("TRITON_CACHE_DIR") or tempfile.mkdtemp()

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from outrider.ops.triton import kernels, launch, plan

MATRIX = r"(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)[\w.:]*"
HALVES = (launch.SIGNED, launch.UNSIGNED, launch.FLOAT4)  # are launched late
READS = r"\b(?:ld\.global|st\.global|cp\.async\.c[ag])[\w.:]*"
ALIGNED = {"K", "outs", "width", "stride", "k_stride", "v_stride"}  # numbers that shapes of models make multiples of 16
TYPES = {
    "eps": "fp32", "scale": "fp32", "slabs": "*i64", "keys": "*i64", "zeros": "*i8", "tables": "*i32", "tiles": "*i32",
    "positions": "*i32", "tails": "*i32", "indices": "*i32", "chosen": "*i32", "parts": "*fp32", "sizes": "*fp32",
    "sums": "*fp32", "logits": "*fp32", "most": "*fp32",
    "values": "*fp32", "temperatures": "*fp32", "sinks": "*fp32", "scores": "*fp32", "weights": "*fp32",
    "shared": "*fp32", "experts": "*i32", "line": "*i32", "ends": "*i32", "real": "*i32", "read": "*i64",
    "places": "*i64", "source": "*i64", "target": "*i64",
}  # fmt: skip
NUMBERS = {
    "rows", "outs", "stride", "K", "GROUPS", "k_stride", "v_stride", "tail_width", "base_row", "spans", "reach", "lone",
    "vocab", "count", "width", "per", "source_stride", "target_stride",
}  # fmt: skip


def build(name: str, arch: int, constants: dict, warps: int = 4, **types: str) -> dict:
    """Compile one kernel as launch.py would, and say what it has become."""
    fn = getattr(kernels, name)
    early = arch > launch.OLDEST and constants.get("FORMAT") not in HALVES
    constants = {**constants, "EARLY": early}
    signature, attrs = {}, {}
    for i, p in enumerate(fn.params):
        kind = "i32" if p.name in NUMBERS else types.get(p.name, TYPES.get(p.name, "*bf16"))
        signature[p.name] = "constexpr" if p.name in constants else kind
        whole = kind[0] == "*" and not p.do_not_specialize_on_alignment
        if p.name not in constants and (whole or (p.name in ALIGNED and not p.do_not_specialize)):
            attrs[(i,)] = [["tt.divisibility", 16]]
    values = {(fn.arg_names.index(key),): value for key, value in constants.items()}
    source = ASTSource(fn=fn, signature=signature, constexprs=values, attrs=attrs)
    options = {"num_warps": warps, "launch_pdl": early, **launch.NO_FUSION}
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    ptx = made.asm["ptx"]
    fused, atomics = re.findall(r"\bfma\.rn\.f32", ptx), re.findall(r"\b(?:atom|red)\.(?!async)[\w.]*", ptx)
    return {
        "kernel": name, "constants": constants, "types": types, "warps": warps, "shared": made.metadata.shared,
        "waits": re.findall(r"griddepcontrol\.\w+", ptx),
        "before": re.findall(READS, ptx.split("griddepcontrol.wait")[0]),
        "matrix": re.findall(MATRIX, ptx), "atomics": atomics, "fused": len(fused),
        **resources(made.asm["cubin"]),
    }  # fmt: skip


def resources(cubin: bytes) -> dict:
    """Registers and bytes of stack of a kernel, from its machine code."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    return {"registers": int(found[1]), "stack": int(found[2])}


def everything(arch: int):
    """Each kernel as models use it: tiles of rows, formats, head sizes, windows."""
    machine, common = launch.TABLE[arch], {"EMULATE": False}
    formats = [("plain", 0, None, 0, 0, "*bf16"), ("half", 0, None, 0, 0, "*fp16"), ("int8", 1, 128, 0, 0, "*i8")]
    formats += [("int4", 2, 32, 1, 0, "*u8"), ("gptq", 3, 128, 0, 1, "*u8"), ("fp8", 4, 128, 0, 0, "*u8")]
    formats += [("fp4", 5, 32, 0, 0, "*u8"), ("int8, rounded", 1, 32, 0, 0, "*i8")]
    formats += [
        ("int4, rounded", 2, 32, 1, 0, "*u8"),
        ("gptq, rounded", 3, 128, 0, 1, "*u8"),
        ("q6_k, rounded", 1, 16, 0, 0, "*i8"),
    ]
    for label, code, group, offsets, zeros, kind in formats:
        tiles = sorted({launch.rows_tile(rows, machine, code) for rows in (1, 17, 33, 65)})
        for tile in tiles if label in ("plain", "int8", "int4", "int8, rounded") else tiles[:1]:
            o = launch.order(4096, 4096, group, arch, code in HALVES)
            own = machine.tiles(code)[tile]
            together = launch.groups_together(group) if group and "rounded" not in label else 1
            sizes = {"BN": own.outputs, "BR": tile, "BK": o.depth, "TOGETHER": together, "STAGES": own.stages}
            flags = {"FORMAT": code, "OFFSETS": bool(offsets), "ZEROS": bool(zeros), "EVEN": True}
            half = dict.fromkeys(("x", "bias", "residual", "y"), "*fp16") if label == "half" else {}
            half = {"x": "*i8"} if label.endswith("rounded") else half
            half = {"sums": "*bf16"} if label == "int4" else half
            gated = tile == tiles[-1] and label != "int8"
            behind = {"GATED": gated, "BIAS": gated, "ADD": not gated, "APART": False, "SHARES": 1}
            yield {
                "format": label,
                **build("product", arch, {**flags, **behind, **sizes, **common}, own.warps, w=kind, **half),
            }
            if label in ("plain", "int4", "fp4"):
                one = {"EACH": 8, **flags, **sizes, **common}
                yield {"format": label, **build("products", arch, one, own.warps, w=kind, **half)}
    mixture = {"BLOCK": 128, "COUNT": 128}
    own = {**mixture, "SCORES": 129, "CHOSEN": 8, "NORMALISED": True, "PADDED": True}
    yield build("route", arch, own, 1)
    yield build("line_up", arch, {"BLOCK": 512}, 1)
    yield build("deal", arch, {**mixture, "BR": 16}, 1)
    behind = {"SHARES": 2, "BIAS": True, "BN": 1024, **common}
    yield build("activate", arch, {**behind, "KIND": 2, "ALPHA": 1.702, "LIMIT": 7.0})
    yield build("mix", arch, {**behind, "CHOSEN": 8, "SHARED": True, "ADD": True})
    behind = {"GATED": True, "BIAS": True, "ADD": True, "SHARES": 4, "BN": 1024}
    own = {"COUNT": 128, "BLOCK": 32, "GROUP": 32, "ROOM": 32, "PAIRS": True}
    yield build("round_rows", arch, own, y="*i8")
    yield build("gather", arch, {**behind, **common})
    own = {"COUNT": 64, "BLOCK": 16, "GROUP": 64, "TOGETHER": 4, **common}
    yield build("group_sums", arch, {**own, "PARTS": False}, y="*fp32")
    yield build("group_sums", arch, {**own, "PARTS": True}, y="*bf16")
    yield build("rms_norm", arch, {"WIDTH": 4096, "BLOCK": 4096, **common}, launch._warps(4096))
    yield build("rope", arch, {"HEADS": 32, "DIM": 128, "HALF": 64, "NORMS": True, **common}, 1)
    page, cut, together = (
        {"PAGE": launch.PAGE},
        plan.SPANS,
        {"FOLDED": launch.FOLDED, "MERGED": launch.MERGED, "BD": launch.PART},
    )
    spans = {"NEAR": cut.near, "FEW": cut.few, "FAR": cut.far}
    yield build("write", arch, {"KV_HEADS": 8, "DIM": 128, "BLOCK": 128}, 1, places="*i32")
    yield build("take", arch, {"KV_HEADS": 8, "DIM": 128, "BLOCK": 128}, 1, places="*i32")
    for heads, kv_heads, dim, window in [(32, 8, 128, 0), (32, 32, 64, 0), (8, 4, 256, 1024)]:
        wide = launch.power(dim)
        shape = {
            "HEADS": heads,
            "KV_HEADS": kv_heads,
            "DIM": dim,
            "D": wide,
            "BM": launch.queries_tile(heads // kv_heads, dim),
        }
        warps, stages, keys = launch.queries_shape(wide)
        own = {"WINDOW": window, "SOFTCAP": 30.0 if window else 0.0, **spans, "KEYS": keys, **page, "STAGES": stages}
        for fold in (1, launch.FOLDED) if dim <= 128 else (1,):
            yield build("attend", arch, {**shape, **own, **common, "FOLD": fold}, warps)
    own = {"HEADS": 32, "DIM": 128, "D": 128, "WINDOW": 0, "SINKS": True, **spans, **together, **common}
    yield build("combine", arch, {**own, "FOLD": 1}, 1)
    yield build("combine", arch, {**own, "FOLD": launch.FOLDED, "BD": 128}, 1)
    tiles = {"TILES": 32, "BLOCK": launch.VOCABULARY}
    yield build("largest", arch, tiles)
    yield build("draw", arch, {**tiles, "WIDE": 32})
    yield build("choose", arch, {"TILES": 32, "WIDE": 32}, 1)


if __name__ == "__main__":
    for made in everything(int(sys.argv[1])):
        print(json.dumps(made), flush=True)
