"""What Triton makes of the GPU kernels, for three architectures and without a GPU: the other half of test_triton.py."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from outrider.ops.triton import launch

SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # bytes that a program can have
SMALL = 99 * 1024  # of the GPUs that share sm_80's column
SPILLED = {80: 0, 90: 0, 100: 128}  # bytes of stack; there some addresses lie on it, with registers to spare
WIDE = 24  # ... and where a head of 256 takes all registers
OLD = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)
FAMILY = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}


@pytest.fixture(scope="module", params=[80, 90, 100])
def compiled(request, tmp_path_factory):
    """The architecture, and what each kernel has become there."""
    script = Path(__file__).parent / "compile_kernels.py"
    done = subprocess.run([sys.executable, script, str(request.param)], capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return request.param, [json.loads(line) for line in done.stdout.splitlines()]


def asked(made):
    """How many contracted products a kernel asks for: one or two of each group for each of a thread's numbers."""
    c = made["constants"]
    if not c.get("FORMAT"):
        return 0
    two = made["types"].get("x") == "*i8" and (c["OFFSETS"] or c["ZEROS"])
    return c["BN"] * c["BR"] // (32 * made["warps"]) * c["TOGETHER"] * (1 + c.get("GATED", False)) * (1 + two)


def copies(arch, made):
    """2 if the last round of a loop stands by itself, as on sm_100."""
    return 2 if arch == 100 and asked(made) and made["fused"] == 2 * asked(made) else 1


@pytest.mark.skipif(OLD, reason="needs Triton 3.9: before it a few registers more are spilled")
def test_compiled(compiled):
    """Within the machine: memory, registers without spills; no atomic sums; nothing contracted behind our back.

    Of the shapes compiled: where K is no multiple of a step, a few kernels spill (docs/gpu.md).
    """
    arch, kernels = compiled
    for made in kernels:
        assert made["shared"] <= (SMALL if arch == 80 else SHARED[arch]), made
        assert made["stack"] <= max(SPILLED[arch], WIDE if made["constants"].get("D") == 256 else 0), made
        assert not made["atomics"], made
        wanted = asked(made) * copies(arch, made)
        assert made["fused"] in (wanted, wanted // 2), made  # sm_100 does two at once
    assert {made["kernel"] for made in kernels} >= {
        "product",
        "products",
        "route",
        "mix",
        "round_rows",
        "gather",
        "attend",
        "combine",
        "draw",
        "rms_norm",
        "rope",
        "take",
    }


def test_kernels_await_their_turn(compiled):
    """Those that begin early wait before they touch what others have written, once, having let the next one begin."""
    arch, kernels = compiled
    for made in kernels:
        early = made["constants"]["EARLY"]
        assert early == (arch > 80 and made.get("format", "plain").split(",")[0] not in ("int4", "gptq", "fp4")), made
        assert made["waits"][:2] == (["griddepcontrol.launch_dependents", "griddepcontrol.wait"] if early else []), made
        assert set(made["waits"][2:]) <= {"griddepcontrol.wait"}, made
        of_the_host = made["kernel"] in ("attend", "combine", "write")  # its tables are read sooner
        touched = early and made["kernel"] == "product"  # nobody writes weights
        assert not early or all("ld.global" in x for x in made["before"]), made
        assert bool(made["before"]) == touched or not early or of_the_host, made
        assert not touched or set(made["before"]) <= {"ld.global.L2::256B.b32"}, made


def test_one_order_for_all_rows(compiled):
    """Products run one instruction, as deep for 16 rows as for 128, as often for each block of K."""
    arch, kernels = compiled
    seen: dict[str, set] = {}
    for made in kernels:
        if made["kernel"] == "attend":
            assert set(made["matrix"]) == {"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"}
        if made["kernel"] not in ("product", "products"):  # one alone, or of experts: the same order
            continue
        c, kinds = made["constants"], {re.sub(r"(?<=m64)n\d+", "", name) for name in made["matrix"]}
        if made["format"].endswith("rounded"):  # integers have no order
            assert all("s8.s8" in name or "kind::i8" in name for name in kinds), made
            continue
        assert all(name.startswith(FAMILY[arch]) for name in kinds), made
        assert arch == 100 or all("k16" in name for name in kinds)
        tiles = (c["BR"] // 8 if arch == 80 else 1) * max(
            1, c["BN"] // 16 // made["warps"]
        )  # instructions side by side
        steps, left = divmod(len(made["matrix"]), tiles * (1 + c.get("GATED", False)) * copies(arch, made))
        assert not left, made
        seen.setdefault(made["format"], set()).add((c["BK"], steps, *kinds))
    assert len(seen["plain"]) == len(seen["int8"]) == len(seen["int4"]) == 1, seen
    most = {label: max(m["constants"]["BR"] for m in kernels if m.get("format") == label) for label in seen}
    assert most["plain"] == 128
    assert most["int4"] == 64
    assert launch.TABLE.keys() == FAMILY.keys()
