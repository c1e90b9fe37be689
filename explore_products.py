"""Times settings of few-bit products on a GPU, and checks each: PYTHONPATH=src python explore_products.py [seconds].

Of every format, shape and number of rows: microseconds, GB/s, what is off (of the largest, against float64), and
whether rows alone have the bits of rows in company. Settings: outputs of a tile, stages, warps, inputs that lie
together.
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
MAIN, SMALL = (128256, 4096), (640, 4096)  # where tiles are compared, and where they are checked
LAYER = {(28672, 4096): (1, 2, 4), (6144, 4096): (3, 4, 8), (4096, 14336): (4, 8), (4096, 4096): (4, 8)}  # with shares
T = launch.Tile
SETTINGS = {  # step, tile of up to 16 rows, tile of 64 rows; the first three are tried with all shapes
    "int4": [
        (256, T(128, 4, 4), T(64, 3, 4)),
        (256, T(64, 4, 4), T(64, 4, 4)),
        (256, T(128, 4, 8), T(128, 3, 8)),
        (256, T(128, 3, 4), T(64, 2, 4)),
        (256, T(64, 3, 4), T(128, 3, 4)),
        (256, T(128, 3, 8), T(64, 3, 8)),
    ],
    "int8": [
        (256, T(64, 3, 4), T(64, 3, 4)),
        (128, T(64, 4, 4), T(64, 4, 4)),
        (128, T(128, 3, 8), T(128, 3, 8)),
        (128, T(64, 3, 4), T(64, 3, 4)),
        (256, T(64, 4, 4), T(64, 2, 4)),
        (128, T(128, 4, 8), T(128, 4, 8)),
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
    """Let processes of their own fill Triton's cache: (setting, scheme, rows, [(n, k, shares)]) each."""
    running = [
        subprocess.Popen([sys.executable, __file__, "compile", repr(job)], stderr=subprocess.DEVNULL) for job in jobs
    ]
    for process in running:
        try:
            process.wait(max(0.1, left() - LIMIT / 2))
        except subprocess.TimeoutExpired:
            process.kill()


def compile_all(text):
    setting, scheme, rows, products = eval(text, {"Tile": launch.Tile})
    use(*setting)
    for n, k, shares in products:
        share(n, k, scheme, shares)
        gpu._product(torch.randn(rows, k, device=DEVICE).bfloat16(), gpu._weights(n, k, scheme, DEVICE))
    torch.cuda.synchronize()


def cells(found):
    return "  ".join(f"{us:7.1f} {rate:5.0f}" for us, rate in found)


def main():
    layer = [(n, k, shares) for (n, k), all_shares in LAYER.items() for shares in all_shares]
    unique = list({(k, shares): (640, k, shares) for _, k, shares in layer}.values())  # outputs make no other kernel
    jobs = [
        (setting, scheme, rows, [(*SMALL, 1), *(unique if i < 1 or (i < 3 and rows == 1) else [])])
        for scheme in SETTINGS for i, setting in enumerate(SETTINGS[scheme]) for rows in (1, 64)
    ]  # fmt: skip
    compiled(sorted(jobs, key=lambda job: -len(job[3])))
    print(f"compiled after {time.perf_counter() - began:.0f} s", flush=True)
    for scheme, settings in SETTINGS.items():
        print(f"{scheme}, {MAIN}: us and GB/s at 1, 8, 64 rows; off; same bits", flush=True)
        for setting in settings:
            if left() < 12:
                print("  (no time left for the others)")
                break
            try:
                use(*setting)
                share(*MAIN, scheme, 1)
                found = timed(*MAIN, scheme, 1, (1, 8, 64))
                off, same = checked(scheme)
                print(f"  {name(setting)}: {cells(found)}  {off:.1e} {same}", flush=True)
            except Exception as error:  # a setting that does not fit
                print(f"  {name(setting)}: {type(error).__name__}: {str(error)[:100]}", flush=True)
    for i in range(3):
        for scheme in SETTINGS:
            setting = SETTINGS[scheme][i]
            for n, k, shares in layer:
                if left() < 0.5:
                    print("(no time left)")
                    return
                try:
                    use(*setting)
                    now = share(n, k, scheme, None)
                    share(n, k, scheme, shares)
                    rows = (1, 64) if i == 0 else (1,)
                    found = timed(n, k, scheme, max(2, min(12, 2**27 // (n * k) * 2)), rows)
                    mark = " (now)" if shares == now else ""
                    print(f"{scheme} {name(setting)} {n:6} x {k:5} shares {shares}{mark}: {cells(found)}", flush=True)
                except Exception as error:
                    print(f"{scheme} {n} x {k} shares {shares}: {type(error).__name__}: {str(error)[:100]}", flush=True)
    print(f"{time.perf_counter() - began:.0f} s")


with torch.inference_mode():
    if sys.argv[1:2] == ["compile"]:
        compile_all(sys.argv[2])
    else:
        main()
