"""Times settings of few-bit products on a GPU, and checks each: PYTHONPATH=src python explore_products.py [seconds].

Of every format, shape and number of rows: microseconds, GB/s, what is off (of the largest, against float64), and whether
rows alone have the bits of rows in company. Settings: outputs of a tile, stages, warps, inputs that lie together.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from functools import partial

import torch

from outrider.bench import gpu
from outrider.ops.triton import launch

LIMIT = float(sys.argv[1]) if len(sys.argv) == 2 else 48.0
SHAPES = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)]
MAIN, SMALL = (128256, 4096), (640, 4096)  # where settings are compared, and where they are checked
SETTINGS = {  # step, tile of up to 16 rows, tile of 64 rows
    "int4": [
        (256, launch.Tile(128, 4, 4), launch.Tile(64, 4, 4)),
        (256, launch.Tile(128, 3, 4), launch.Tile(64, 3, 4)),
        (256, launch.Tile(64, 4, 4), launch.Tile(128, 4, 4)),
        (256, launch.Tile(64, 3, 4), launch.Tile(128, 3, 8)),
        (256, launch.Tile(128, 4, 8), launch.Tile(128, 4, 8)),
        (256, launch.Tile(128, 3, 8), launch.Tile(64, 3, 8)),
        (256, launch.Tile(128, 5, 4), launch.Tile(64, 2, 4)),
        (64, launch.Tile(128, 5, 4), launch.Tile(64, 5, 4)),
    ],
    "int8": [
        (256, launch.Tile(64, 3, 4), launch.Tile(64, 3, 4)),
        (256, launch.Tile(64, 4, 4), launch.Tile(64, 4, 4)),
        (128, launch.Tile(64, 4, 4), launch.Tile(64, 4, 4)),
        (128, launch.Tile(64, 3, 4), launch.Tile(64, 3, 4)),
        (128, launch.Tile(64, 5, 4), launch.Tile(64, 5, 4)),
        (128, launch.Tile(128, 3, 8), launch.Tile(128, 3, 8)),
        (128, launch.Tile(128, 4, 8), launch.Tile(128, 4, 8)),
        (256, launch.Tile(128, 3, 8), launch.Tile(128, 3, 8)),
    ],
}  # fmt: skip
DEVICE, began = torch.device("cuda"), time.perf_counter()
ARCH = launch.architecture(DEVICE)
BEFORE = launch.TABLE[ARCH]


def use(step, few, many):
    """Set the table."""
    launch.STEP = step
    tiles = {16: few, 32: few, 64: many}
    launch.TABLE[ARCH] = replace(BEFORE, bytes=tiles, halves=tiles)
    launch.order.cache_clear()


def share(n, k, scheme, shares):
    """Fix the shares of a product's K; None: as they are."""
    key = ARCH, n, k, 32 if scheme == "int4" else 128
    launch.SHARES.pop(key, None)
    if shares:
        launch.SHARES[key] = shares
    launch.order.cache_clear()
    return launch.order(n, k, key[3], ARCH).shares


def left():
    return LIMIT - (time.perf_counter() - began)


def timed(n, k, scheme, count, all_rows):
    """Microseconds, and GB/s, of one product at each number of rows."""
    one = gpu._weights(n, k, scheme, DEVICE)
    held = [one, *(replace(one, data=one.data.clone()) for _ in range(count - 1))]
    found = []
    for rows in all_rows:
        x = torch.randn(rows, k, device=DEVICE).bfloat16()
        each = gpu.seconds(partial(gpu._each, gpu._product, x, held), DEVICE) / count
        found.append((1e6 * each, one.nbytes / each / 1e9))
    return found


def checked(scheme):
    """What is off, and whether company changes bits, where K is not cut, as in the head."""
    n, k = SMALL
    share(n, k, scheme, 1)
    weights = gpu._weights(n, k, scheme, DEVICE)
    x = torch.randn(69, k, device=DEVICE).bfloat16()
    whole = gpu._product(x[:64], weights)
    same = all(
        torch.equal(gpu._product(x[at : at + rows], weights), gpu._product(x[:64], weights)[at : at + rows])
        for rows in (1, 8, 16, 60) for at in (0, 3)
    )  # fmt: skip
    exact = x[:64].double() @ launch.rows(weights, torch.arange(n, device=DEVICE)).double().T
    return float((whole.double() - exact).abs().max() / exact.abs().max()), same


def name(setting):
    step, *tiles = setting
    return f"step {step:3} " + " | ".join(f"{t.outputs:3}x{t.stages}s{t.warps}w" for t in tiles)


def compiled(jobs):
    """Let processes of their own fill Triton's cache: (setting, n, k, scheme, shares) each."""
    running = [subprocess.Popen([sys.executable, __file__, "compile", repr(job)], stderr=subprocess.DEVNULL)
               for job in jobs]  # fmt: skip
    for process in running:
        try:
            process.wait(max(1, min(25, left())))
        except subprocess.TimeoutExpired:
            process.kill()


def compile_one(text):
    setting, n, k, scheme, shares = eval(text, {"Tile": launch.Tile})
    use(*setting)
    share(n, k, scheme, shares)
    weights = gpu._weights(n, k, scheme, DEVICE)
    for rows in (1, 64):
        gpu._product(torch.randn(rows, k, device=DEVICE).bfloat16(), weights)
    torch.cuda.synchronize()


def cells(found):
    return "  ".join(f"{us:7.1f} {rate:5.0f}" for us, rate in found)


def main():
    best = {}
    compiled([(setting, *SMALL, scheme, 1) for scheme in SETTINGS for setting in SETTINGS[scheme]])
    print(f"compiled after {time.perf_counter() - began:.0f} s", flush=True)
    for scheme, settings in SETTINGS.items():
        print(f"{scheme}, {MAIN}: us and GB/s at 1, 8, 64 rows; off; same bits", flush=True)
        for setting in settings:
            if left() < 16:
                print("  (no time left for the others)")
                break
            try:
                use(*setting)
                share(*MAIN, scheme, 1)
                found = timed(*MAIN, scheme, 1, (1, 8, 64))
                off, same = checked(scheme)
                print(f"  {name(setting)}: {cells(found)}  {off:.1e} {same}", flush=True)
                for rows, (us, _) in zip((1, 64), found[::2], strict=True):
                    if same and off < 0.01 and us < best.get((scheme, rows), (1e9,))[0]:
                        best[scheme, rows] = us, setting
            except Exception as error:  # a setting that does not fit
                print(f"  {name(setting)}: {type(error).__name__}: {str(error)[:100]}", flush=True)
    chosen = {}
    for scheme in SETTINGS:
        if (scheme, 1) in best:
            few, many = best[scheme, 1][1], best.get((scheme, 64), best[scheme, 1])[1]
            chosen[scheme] = few[0], few[1], many[2]
    jobs = []
    for scheme, setting in chosen.items():
        use(*setting)
        for n, k in SHAPES[:-1]:
            now = share(n, k, scheme, None)
            jobs += [(setting, n, k, scheme, s) for s in sorted({now, max(1, now // 2), min(8, 2 * now)})]
    if left() > 10:
        compiled(jobs)
    for setting, n, k, scheme, shares in jobs:
        if left() < 1:
            print("(no time left)")
            break
        try:
            use(*setting)
            now = share(n, k, scheme, None)
            share(n, k, scheme, shares)
            found = timed(n, k, scheme, max(2, min(16, 2**28 // (n * k))), (1, 8, 64))
            print(f"{scheme} {n:6} x {k:5} shares {shares}{' (now)' if shares == now else ''}: {cells(found)}", flush=True)
        except Exception as error:
            print(f"{scheme} {n} x {k} shares {shares}: {type(error).__name__}: {str(error)[:100]}", flush=True)
    print(f"chosen: {({scheme: name(setting) for scheme, setting in chosen.items()})}")
    print(f"{time.perf_counter() - began:.0f} s")


with torch.inference_mode():
    if sys.argv[1:2] == ["compile"]:
        compile_one(sys.argv[2])
    else:
        main()
