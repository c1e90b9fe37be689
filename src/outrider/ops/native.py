"""The compiled kernels (csrc/), if this installation has them: which instruction set runs, and that it computes right.

`OUTRIDER_ISA` in the environment forces one: amx, avx512bf16, avx512, avxvnni, avx2, portable; or reference, no
kernels at all.
"""

from __future__ import annotations

import importlib
import math
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.errors import ConfigError

REFERENCE = "reference"
# formats of weights, as csrc/linear.h has them
F32, BF16, INT8, INT4, UINT4, UINT5, INT6, FP4, FP8, F16 = ALL = range(10)
INTEGERS = (INT8, INT4, UINT4, UINT5, INT6)  # those that multiply with rounded rows
BFLOAT, HALF, COARSE, FLOAT, ZEROS = range(5)  # kinds of factors
SUPER = 256  # inputs that share a coarse factor
HUGE = 2**21  # bytes of a large page
SHELF = 16 * HUGE  # bytes of a shelf's block
FORMATS = {torch.float32: F32, torch.bfloat16: BF16, torch.float16: F16}
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as csrc/type.h has them
Draw = tuple[float, int, float, float, int]  # temperature (0: the argmax), top-k, top-p, floor, key of the noise
Wish = tuple[int, float, int, float, float, int]  # address of logits, and a Draw

kernels: Any = None
unloaded = "are missing"
try:
    kernels = importlib.import_module("outrider.ops._kernels")
except ModuleNotFoundError:  # installed without a compiler
    pass
except ImportError as error:  # built for another system
    unloaded = f"do not load ({error})"


PAGE: int = kernels.PAGE if kernels else 32  # slots of a cache that kernels read in one piece
OWN, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def control_groups(controller: str, own: Path = OWN, root: Path = GROUPS) -> Iterator[tuple[Path, bool]]:
    """The folders of this process's control groups, as of a container, outwards; and whether they are of version 1."""
    for line in own.read_text().splitlines() if own.exists() else []:
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            top = root / controller if controllers else root
            at = top / path.lstrip("/")  # in a container the path may be the host's, and only the root be there
            yield from ((group, bool(controllers)) for group in (at, *at.parents) if group.is_relative_to(top))


def share_of_cpus(own: Path = OWN, root: Path = GROUPS) -> float:
    """How many CPUs' time this process's control groups leave it; infinite without a limit."""
    least = math.inf
    for group, first in control_groups("cpu", own, root):
        try:
            if first:
                pair = [(group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")]
            else:
                pair = (group / "cpu.max").read_text().split()
            quota, period = map(int, pair)
        except (OSError, ValueError):  # ValueError: "max"
            continue
        least = min(least, quota / period if quota > 0 else math.inf)
    return least


def share_of_memory(own: Path = OWN, root: Path = GROUPS) -> float:
    """Bytes that this process's control groups leave it; infinite without a limit.

    The page cache that they count as used can be had.
    """
    least = math.inf
    for group, first in control_groups("memory", own, root):
        names = ("limit_in_bytes", "usage_in_bytes") if first else ("max", "current")
        try:
            most, used = [int((group / f"memory.{name}").read_text()) for name in names]
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # ValueError: "max"
            continue
        of_all = "total_" if first else ""  # version 1 counts the groups within a group apart
        cached = sum(int(stat.get(f"{of_all}{kind}_file", 0)) for kind in ("inactive", "active"))
        least = min(least, most - used + cached)
    return least


def available() -> list[str]:
    """What `use` takes here, the best first; `reference` is always the last."""
    return [*(kernels.isas() if kernels else []), REFERENCE]


def use(isa: str) -> None:
    """Run on this instruction set from now on. Linears that are packed already stay native. Raises ConfigError."""
    global active
    if isa not in available():
        raise ConfigError(f"instruction set {isa!r} does not run here; available: {', '.join(available())}")
    active = isa
    if isa != REFERENCE:
        kernels.use(isa)


def runs(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels take tensors of this kind."""
    return active != REFERENCE and device.type == "cpu" and dtype in FORMATS


def product_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype in which PyTorch's products are fast: the given one, or float32 on a CPU without instructions for it
    (or without our kernels, which know)."""
    able = device.type != "cpu" or (dtype == torch.bfloat16 and bool({"amx", "avx512bf16"} & {*available()}))
    return dtype if able else torch.float32


def fitting(what: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """x in one piece, for a kernel that gets its address: keep what this returns until the kernel has returned.

    Raises ValueError if x has another shape or dtype, or lies elsewhere.
    """
    if x.dtype != dtype or x.shape != shape or x.device != device:
        raise ValueError(f"{what} is {tuple(x.shape)} {x.dtype} on {x.device}, not {tuple(shape)} {dtype} on {device}")
    return x.contiguous()


def address(x: Tensor | None) -> int:
    """Where x lies; 0, which the kernels take for none, if there is none."""
    return 0 if x is None else x.data_ptr()


class Shelf:
    """Memory for many things that are each smaller than a large page, and live about as long: side by side in large
    pages. What is left of a block when the next thing does not fit is lost."""

    def __init__(self) -> None:
        self.block, self.lock = memory(0), threading.Lock()

    def take(self, size: int) -> Tensor:
        """Zeroed bytes, as `memory` gives them."""
        size = -(-size // 64) * 64
        if size >= HUGE:
            return memory(size)
        with self.lock:
            if size > len(self.block):
                self.block = memory(SHELF)
            taken, self.block = self.block[:size], self.block[size:]
        return taken


def memory(size: int) -> Tensor:
    """Zeroed bytes in pages of their own, large ones where the system gives them: weights leave no holes in the heap.

    Raises RuntimeError, as PyTorch does, if there are not so many.
    """
    try:
        block = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared pages are small ones
    except (OSError, OverflowError) as error:
        raise RuntimeError(f"cannot allocate {size} bytes: {error}") from None
    if size >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        block.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(block, dtype=torch.uint8, count=size) if size else torch.empty(0, dtype=torch.uint8)


def computes_right() -> bool:
    """Whether small products of all formats agree with float64 on the instruction set in use."""
    x, weight = torch.arange(17 * 72).view(17, 72) * 37 % 255 - 127, torch.arange(40 * 72).view(40, 72) % 15
    x[:, ::32] = 127  # in each group: rounded to 8 bits, the rows are what they were
    scales, coarse = torch.arange(1, 41).view(40, 1).repeat(1, 3) % 60, torch.full((40, 1), 1 / 64, dtype=torch.float16)
    floats = {code: dtype for dtype, code in FORMATS.items()}
    for code, rounded in [*((code, False) for code in ALL), *((code, True) for code in INTEGERS)]:
        plain = weight - (0 if code in (UINT4, UINT5) else 7)
        plain = torch.where(plain.abs() % 2 * plain.abs() > 4, plain.sign() * 6, plain) if code == FP4 else plain
        plain = plain.to(floats.get(code, torch.float8_e4m3fn if code == FP8 else torch.int8))
        a, y = x.to(floats.get(code, torch.bfloat16)), torch.empty(17, 40, dtype=torch.float32)
        w = kernels.Weights(code, 40, 72, 32, False, rounded)
        data, factors = torch.empty(w.nbytes, dtype=torch.uint8), torch.empty(w.room(3), dtype=torch.int16)
        kind, shared = code % 3, torch.empty(w.room(1), dtype=torch.float16)
        own = (scales / 64).bfloat16() if kind == BFLOAT else (scales / 64).half() if kind == HALF else scales.char()
        w.pack(plain.data_ptr(), data.data_ptr(), 1)
        w.pack_scales(False, kind, own.data_ptr(), 3, own.itemsize, factors.data_ptr(), 1)
        w.pack_coarse(False, coarse.data_ptr(), 1, shared.data_ptr(), 1)
        spread = (scales / 64).double().repeat_interleave(32, 1)[:, :72] if code not in floats else 1.0
        exact = a.double() @ (plain.double() * spread).T
        for rows in (3, 17):  # vectors and tiles may share the work by their number
            w.multiply(a.data_ptr(), rows, y.data_ptr(), 40, True, 0, 0, 0.0, 1)
            if not torch.allclose(y[:rows].double(), exact[:rows], rtol=1e-3, atol=1e-2):
                return False
        if code in floats:
            stored = torch.empty(17, 40, dtype=a.dtype)
            w.multiply(a.data_ptr(), 17, stored.data_ptr(), 40, False, 0, 0, 0.0, 1)
            if not torch.equal(stored, y.to(a.dtype)):
                return False
    return True


def _choose() -> list[str]:
    """Use the best instruction set that computes right, or the one that was asked for; returns those that do not."""
    wanted, wrong = os.environ.get("OUTRIDER_ISA"), []
    for isa in [wanted] if wanted else available():
        use(isa)
        if isa == REFERENCE or computes_right():
            break
        wrong.append(isa)
    else:
        use(REFERENCE)
    return wrong


# PyTorch takes a thread for each core that the process may run on. Where a container has a share of their time only,
# the system stops threads once that is used up, while others wait for them.
if not os.environ.get("OMP_NUM_THREADS") and (own_share := share_of_cpus()) < torch.get_num_threads():
    torch.set_num_threads(max(1, int(own_share)))

active: str = REFERENCE
wrong = _choose()
"""Instruction sets whose products disagreed with float64 when this was loaded: none, unless a kernel is broken."""


def lacking() -> str:
    """Why a CPU runs on the reference operations though nobody asked for that, and what helps; else empty."""
    if kernels is None:
        return f"the compiled kernels {unloaded}; install a C++ compiler (g++ or clang), then install outrider again"
    if active == REFERENCE and wrong:
        return (
            f"the compiled kernels are refused, as their products are wrong here: {', '.join(wrong)}; please report it"
        )
    return ""
