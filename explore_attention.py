"""Settings of the attention kernels, timed and checked on this machine's GPU: `PYTHONPATH=src python explore_attention.py`.

`--only "a;b"` takes some of them; `--warm NAME` only compiles one (the script starts these itself, all at once).
Microseconds of write + attend + combine, in a graph of many calls: c1, c8, t8 are 1 row, a chain and a tree of 8.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

SMOKE = "--smoke" in sys.argv  # on a CPU, in the interpreter: whether this script runs
if SMOKE:
    os.environ["TRITON_INTERPRET"] = "1"

import torch

from outrider.bench import gpu
from outrider.kv import Entry
from outrider.ops.triton import launch, plan

BEGAN, LIMIT = time.perf_counter(), 38.0
DEVICE = torch.device("cpu" if SMOKE else "cuda")
DIM, TREE = 16 if SMOKE else 128, [-1, 0, 0, 1, 1, 2, 2, 3]
CONTEXTS = (24, 64) if SMOKE else (1024, 8192, 32768, 131072)
KV = (8, 32)
# name: (near, few, far), (warps, stages, keys), rows of the matrix instruction by group (None: as it is), (together, part)
SETTINGS = {
    "base": ((128, 32, 512), (4, 3, 64), None, (64, 32)),
    "stages 4": ((128, 32, 512), (4, 4, 64), None, (64, 32)),
    "stages 2": ((128, 32, 512), (4, 2, 64), None, (64, 32)),
    "keys 32, stages 4": ((128, 32, 512), (4, 4, 32), None, (64, 32)),
    "keys 32, stages 6": ((128, 32, 512), (4, 6, 32), None, (64, 32)),
    "keys 64, warps 8": ((128, 32, 512), (8, 3, 64), None, (64, 32)),
    "keys 128, warps 8": ((128, 32, 512), (8, 2, 128), None, (64, 32)),
    "keys 128, warps 8, stages 3": ((128, 32, 512), (8, 3, 128), None, (64, 32)),
    "keys 64, warps 2": ((128, 32, 512), (2, 3, 64), None, (64, 32)),
    "far 256": ((128, 32, 256), (4, 3, 64), None, (64, 32)),
    "far 1024": ((128, 32, 1024), (4, 3, 64), None, (64, 32)),
    "few 16": ((128, 16, 512), (4, 3, 64), None, (64, 32)),
    "few 8": ((128, 8, 512), (4, 3, 64), None, (64, 32)),
    "near 64": ((64, 32, 512), (4, 3, 64), None, (64, 32)),
    "near 256": ((256, 32, 512), (4, 3, 64), None, (64, 32)),
    "bm 16": ((128, 32, 512), (4, 3, 64), 16, (64, 32)),
    "bm 32": ((128, 32, 512), (4, 3, 64), 32, (64, 32)),
    "together 32": ((128, 32, 512), (4, 3, 64), None, (32, 32)),
    "together 128": ((128, 32, 512), (4, 3, 64), None, (128, 32)),
    "part 64": ((128, 32, 512), (4, 3, 64), None, (64, 64)),
    "part 128": ((128, 32, 512), (4, 3, 64), None, (64, 128)),
}
TILE = plan.queries_tile


def use(name: str) -> None:
    spans, shape, bm, combined = SETTINGS[name]
    plan.SPANS, (launch.TOGETHER, launch.PART) = plan.Spans(*spans), combined
    launch.queries_shape = lambda wide: shape
    tile = TILE if bm is None else lambda group, dim: max(bm, group)
    launch.queries_tile = plan.queries_tile = gpu.queries_tile = tile


def made(kv_heads: int, capacity: int, start: int, rows: int, parents=None, count: int = 1, apart: int = 0):
    """A plan of `count` sequences of so many rows each, whose pages lie in order in one slab, `apart` slots apart."""
    group = 32 // kv_heads
    step = launch.queries_tile(group, DIM) // group
    pages = torch.arange(-(-(start + rows) // plan.PAGE), dtype=torch.int32)
    entries = [Entry(i, i * rows, rows, start, parents) for i in range(count)]
    tables = [pages + i * apart // plan.PAGE for i in range(count)]
    return plan.make(entries, tables, [(0, capacity)] * count, step, DEVICE)


class Cache:
    """A slab of random keys and values, and random rows."""

    def __init__(self, kv_heads: int, capacity: int, rows: int = 8, store=None):
        self.kv_heads, self.capacity = kv_heads, capacity
        size = 2, kv_heads, capacity, DIM
        self.store = torch.empty(size, dtype=torch.bfloat16, device=DEVICE).normal_() if store is None else store
        self.slabs = torch.tensor([self.store.data_ptr()], device=DEVICE)
        some = [(rows, heads, DIM) for heads in (32, kv_heads, kv_heads)]
        self.new = [torch.randn(s, device=DEVICE).bfloat16() for s in some]

    def attend(self, given, which=None):
        q, k, v = (x if which is None else x[which] for x in self.new)
        return launch.attend(q, k, v, self.slabs, given, None, DIM**-0.5)

    def plan(self, start: int, rows: int, parents=None):
        return made(self.kv_heads, self.capacity, start, rows, parents)

    def exact(self, row: int, slots: int):
        q = self.new[0][row].double()
        keys, values = self.store[:, :, :slots].double().repeat_interleave(32 // self.kv_heads, 1)
        weights = (torch.einsum("hd,hsd->hs", q, keys) * DIM**-0.5).softmax(-1)
        return torch.einsum("hs,hsd->hd", weights, values).flatten()


def micros(call) -> float:
    if SMOKE:
        call()
        return 0.0
    call()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    calls = max(2, min(20, int(2e3 / (1e3 * begin.elapsed_time(end)))))
    replay, _ = gpu.cuda_capture(lambda: [call() for _ in range(calls)])
    took = []
    for _ in range(4):
        begin.record()
        replay()
        end.record()
        torch.cuda.synchronize()
        took.append(1e3 * begin.elapsed_time(end) / calls)
    return sorted(took[1:])[1]


def checks(cache: Cache, start: int) -> str:
    """Error against float64, rows alone as in company, a tree's branch as its chain; what is wrong is said."""
    wrong = []
    whole = cache.attend(cache.plan(start, 8))
    off = 0.0
    if start <= 1024:
        off = max(float((whole[i].double() - cache.exact(i, start + i + 1)).abs().max()) for i in (0, 7))
    for i in range(8):
        if not torch.equal(cache.attend(cache.plan(start + i, 1), slice(i, i + 1))[0], whole[i]):
            wrong.append(f"row {i} alone")
    if not torch.equal(cache.attend(cache.plan(start, 3), slice(0, 3)), whole[:3]):
        wrong.append("3 rows of 8")
    tree = cache.attend(cache.plan(start, 8, TREE))
    for path in ([0, 1, 3, 7], [0, 2, 6]):
        if not torch.equal(cache.attend(cache.plan(start, len(path)), path), tree[path]):
            wrong.append(f"branch {path}")
    said = f"off {off:.1e} " if off else ""
    return said + ("bits ok" if not wrong else "BITS DIFFER: " + ", ".join(wrong))


def warm(name: str) -> None:
    use(name)
    for kv_heads in KV:
        cache = Cache(kv_heads, 512)
        cache.attend(cache.plan(100, 8, TREE))
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    if "--warm" in sys.argv:
        return warm(sys.argv[sys.argv.index("--warm") + 1])
    only = sys.argv[sys.argv.index("--only") + 1].split(";") if "--only" in sys.argv else list(SETTINGS)
    if not SMOKE:
        jobs = [subprocess.Popen([sys.executable, __file__, "--warm", name], stderr=subprocess.DEVNULL) for name in only]
    top = max(CONTEXTS) + 64
    caches = {kv_heads: Cache(kv_heads, top) for kv_heads in KV}
    batch = Cache(8, 4 * top, 256, caches[32].store.view(2, 8, 4 * top, DIM))
    if not SMOKE:
        bad = [name for name, job in zip(only, jobs, strict=True) if job.wait()]
        print(f"{torch.cuda.get_device_name()}; compiled in {time.perf_counter() - BEGAN:.0f} s", *bad and ("without", bad))
    titles = [f"{where}{n if n < 1024 else f'{n // 1024}k'}" for n in CONTEXTS for where in ("c1@", "c8@", "t8@")]
    print(f"{'setting':>28} kv " + " ".join(f"{title:>8}" for title in titles), "   32x16k: 1 row, 8 rows (kv 8)", flush=True)
    for name in only:
        if time.perf_counter() - BEGAN > LIMIT:
            print("no time left")
            break
        for kv_heads, cache in caches.items():
            try:
                use(name)
                said, line = [], []
                for start in (CONTEXTS[0] - 20, CONTEXTS[0] - 3, 40 if SMOKE else CONTEXTS[-2] - 1000):
                    said.append(checks(cache, start))
                for start in CONTEXTS:
                    for rows, parents in ((1, None), (8, None), (8, TREE)):
                        given = cache.plan(start, rows, parents)
                        line.append(micros(lambda g=given, n=rows: cache.attend(g, slice(0, n))))
                for rows in (1, 8) if kv_heads == 8 else ():
                    start = CONTEXTS[-1] // 8 - 8
                    given = made(8, 4 * top, start, rows, None, 2 if SMOKE else 32, start + 8)
                    line.append(micros(lambda g=given, n=rows: batch.attend(g, slice(0, (2 if SMOKE else 32) * n))))
                print(f"{name:>28} {kv_heads:2} " + " ".join(f"{us:8.1f}" for us in line), "|", "; ".join(dict.fromkeys(said)))
            except Exception as error:
                print(f"{name:>28} {kv_heads:2} failed: {type(error).__name__}: {str(error)[:160]}")
            sys.stdout.flush()
    for kv_heads in KV:  # what the memory gives, for comparison
        size = [4.0 * context * kv_heads * DIM for context in CONTEXTS]
        print(f"{'80 % of 4500 GB/s':>28} {kv_heads:2} " + " ".join(f"{x / 3600e3:26.1f}" for x in size))
    print(f"{time.perf_counter() - BEGAN:.0f} s")


if __name__ == "__main__":
    with torch.inference_mode():
        if SMOKE:
            with launch.emulated():
                main()
        else:
            main()
