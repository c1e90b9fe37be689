"""The compiled kernels on every instruction set that runs here: float64 references, and Law 2 at every row count."""

from __future__ import annotations

import ctypes
import math
import os
import platform
import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from outrider.errors import ConfigError
from outrider.model import Model
from outrider.ops import Linear, Quantized, native, rms_norm, rope
from outrider.quantize import GGUF, from_gguf

ISAS = [isa for isa in native.available() if isa != native.REFERENCE]
QUANTIZED = {  # bits, sign, group (None: 32 or 64), what a scale is, whether there are offsets
    "int8": (8, True, None, "bfloat16", False),
    "int8 offsets": (8, True, None, "bfloat16", True),
    "int4": (4, True, None, "bfloat16", False),
    "int4 offsets": (4, True, None, "bfloat16", True),
    "Q8_0": (8, True, 32, "float16", False),
    "Q4_0": (4, True, 32, "float16", False),
    "Q4_1": (4, False, 32, "float16", True),
    "Q4_K": (4, False, 32, "coarse", True),
    "Q5_K": (5, False, 32, "coarse", True),
    "Q6_K": (6, True, 16, "coarse", False),
}
ROUNDED = ", rounded rows"
PLAIN = ["float32", "bfloat16", "float16"]
FORMATS = [*PLAIN, *QUANTIZED, *(kind + ROUNDED for kind in QUANTIZED)]
SHAPES = [(1, 1), (2, 7), (31, 33), (48, 64), (100, 96), (66, 1000), (34, 2050)]  # (outputs, inputs)

pytestmark = pytest.mark.skipif(not ISAS, reason="the kernels are not built: there was no compiler")


def test_nothing_is_skipped_for_a_fault():
    """Tests of bits skip where no kernels run: that must be because nobody could build them, or by wish."""
    assert not native.wrong
    assert native.active == os.environ.get("OUTRIDER_ISA", native.available()[0])


@pytest.mark.skipif(platform.machine() != "x86_64", reason="elsewhere one instruction set is compiled")
def test_loading_runs_on_every_processor():
    """What runs while the module is loaded has no instruction that some processor lacks: none of wide registers.

    Of each function in the module's list of initialisers, up to where it first leaves.
    """

    def tell(*command: str) -> str:
        return subprocess.run([*command, native.kernels.__file__], check=True, capture_output=True, text=True).stdout

    section = re.search(r"\.init_array\s+INIT_ARRAY\s+(\w+)\s+\w+\s+(\w+)", tell("readelf", "-SW"))
    assert section
    first, size = int(section[1], 16), int(section[2], 16)
    pointers = re.findall(r"^(\w+)\s+\w+\s+R_X86_64_RELATIVE\s+(\w+)", tell("readelf", "-rW"), re.MULTILINE)
    begun = [int(to, 16) for at, to in pointers if first <= int(at, 16) < first + size]
    assert begun
    for start in begun:
        code = tell("objdump", "-d", "--no-show-raw-insn", f"--start-address={start}", f"--stop-address={start + 4096}")
        assert not re.search(r"%[yz]mm", re.split(r"\t(?:ret|jmp)\b", code)[0])


def test_share_of_cpus(tmp_path):
    """The narrowest control group around the process counts; of a host's path a container has the root alone."""
    own, root = tmp_path / "own", tmp_path / "root"
    assert native.share_of_cpus(own, root) == math.inf
    for folder in ("pod/one", "cpu/pod"):
        (root / folder).mkdir(parents=True)
    own.write_text("0::/pod/one\n")
    (root / "pod/one/cpu.max").write_text("max 100000\n")
    assert native.share_of_cpus(own, root) == math.inf
    (root / "pod/cpu.max").write_text("350000 100000\n")
    assert native.share_of_cpus(own, root) == 3.5
    own.write_text("9:name=systemd:/pod\n3:cpuset:/pod\n1:cpu,cpuacct:/pod/gone\n")
    for name, number in (("quota", -1), ("period", 100000)):
        (root / f"cpu/pod/cpu.cfs_{name}_us").write_text(f"{number}\n")
    assert native.share_of_cpus(own, root) == math.inf
    for name, number in (("quota", 50000), ("period", 100000)):
        (root / f"cpu/cpu.cfs_{name}_us").write_text(f"{number}\n")
    assert native.share_of_cpus(own, root) == 0.5


@pytest.mark.parametrize(("given", "threads"), [("", 1), ("4", 4)])
def test_threads_of_a_share(given, threads):
    """Empty, as a file of Compose's may leave it, OMP_NUM_THREADS says nothing."""
    code = """
import pathlib, torch
torch.set_num_threads(4)
files = {"cgroup": "0::/\\n", "cpu.max": "150000 100000\\n"}
pathlib.Path.read_text = lambda path, *_: files.get(path.name, "")
import outrider.ops.native
print(torch.get_num_threads())
"""
    env = {**os.environ, "OMP_NUM_THREADS": given}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert int(done.stdout) == threads


def test_share_of_memory(tmp_path):
    """Likewise, what the group uses taken away, but for files that are only kept because there is room."""
    own, root = tmp_path / "own", tmp_path / "root"
    assert native.share_of_memory(own, root) == math.inf
    for folder, said in (("pod/one", ("max", 10)), ("pod", (1000, 300)), ("memory/pod", (500, 450))):
        (root / folder).mkdir(parents=True, exist_ok=True)
        names = ("limit_in_bytes", "usage_in_bytes") if "memory" in folder else ("max", "current")
        for name, number in zip(names, said, strict=True):
            (root / folder / f"memory.{name}").write_text(f"{number}\n")
        (root / folder / "memory.stat").write_text("inactive_file 20\nactive_file 5\ntotal_inactive_file 40\n")
    own.write_text("0::/pod/one\n")
    assert native.share_of_memory(own, root) == 725
    own.write_text("4:memory:/pod\n0::/pod/one\n")
    assert native.share_of_memory(own, root) == 90


@pytest.fixture(params=ISAS or [native.REFERENCE])
def isa(request):
    before = native.active
    native.use(request.param)
    yield request.param
    native.use(before)


@pytest.fixture(params=[1, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def rand(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def make_quantized(kind, outputs, inputs, gated=False):
    bits, signed, group, scale, shifted = QUANTIZED[kind.removesuffix(ROUNDED)]
    group = group or (32 if gated else 64)
    generator = torch.Generator().manual_seed(inputs)
    low = -(2 ** (bits - 1)) if signed else 0
    values = torch.randint(low, low + 2**bits, (outputs, inputs), generator=generator).to(torch.int8)

    def factors(seed):
        numbers = rand(outputs, -(-inputs // group), seed=seed) / (1 if seed else 8)
        if scale != "coarse":
            return numbers.to(getattr(torch, scale))
        return (numbers * 64).clamp(-128, 127).to(torch.int8), rand(outputs, -(-inputs // 256), seed=2).half() / 64

    return Quantized(bits, group, values, factors(0), factors(1) if shifted else None, signed)


def make(kind, outputs, inputs, bias=False, gated=False):
    """A Linear of this kind, the float64 weights that it stands for, its bias, and its activations' dtype."""
    if kind not in PLAIN:
        weight, dtype = make_quantized(kind, outputs, inputs, gated), torch.bfloat16
        dense = weight.dense().double()
    else:
        dtype = getattr(torch, kind)
        weight = rand(outputs, inputs, dtype=dtype)
        dense = weight.double()
    added = rand(outputs, dtype=dtype) if bias else None
    return Linear(weight, added, gated=gated, rounded=kind.endswith(ROUNDED)), dense, added, dtype


def entered(kind, x, gated=False):
    """Rows (n, inputs) as a Linear of this kind takes them: float64, rounded to 8 bits group by group if it does so."""
    if not kind.endswith(ROUNDED):
        return x.double()
    group, (n, inputs) = QUANTIZED[kind.removesuffix(ROUNDED)][2] or (32 if gated else 64), x.shape
    x = F.pad(x.float(), (0, -inputs % group)).view(n, -1, group)
    most = x.abs().amax(-1, keepdim=True)
    by = torch.where(most > 0, torch.full_like(most, 127) / most, 0.0)
    return ((x * by).round().double() * (most / 127)).view(n, -1)[:, :inputs]


def close(got, exact):
    """Within float32 summation of the exact value; both arguments are of the order of sqrt(inputs)."""
    return torch.allclose(got.double(), exact, rtol=1e-4, atol=1e-3 * max(1.0, float(exact.abs().max()) / 10))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", FORMATS)
def test_linear_is_right(isa, kind, shape, bias):
    if kind.startswith("Q6_K"):
        shape = (shape[0], -(-shape[1] // 32) * 32)  # groups of 16 come in pairs
    linear, dense, added, dtype = make(kind, *shape, bias)
    assert linear.native and linear.kernel == isa
    for rows in (1, 3, 19):
        x = rand(rows, shape[1], dtype=dtype)
        exact = entered(kind, x) @ dense.T + (added.double() if bias else 0)
        y = linear(x, dtype=torch.float32)
        assert close(y, exact)
        assert torch.equal(linear(x), y.to(dtype))  # one rounding, at the end
        residual = rand(rows, shape[0], dtype=dtype)
        assert close(linear(x, residual=residual, dtype=torch.float32), exact + residual.double())
    assert linear(x[:0]).shape == (0, shape[0])


@pytest.mark.parametrize("kind", FORMATS)
def test_gated_and_normed(isa, kind):
    linear, dense, added, dtype = make(kind, 2 * 37, 96, bias=True, gated=True)
    x, norm = rand(9, 96, dtype=dtype), rand(96, dtype=dtype) / 4
    normed = (
        (x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.double()).to(dtype).double()
    )
    gate, up = (entered(kind, normed, True) @ dense.T + added.double()).chunk(2, -1)
    y = linear(x, norm, 1e-5, dtype=torch.float32)
    tolerance = {torch.float32: 1e-4, torch.float16: 4e-3}.get(
        dtype, 3e-2
    )  # a normed value may round to its other neighbour
    assert torch.allclose(y.double(), F.silu(gate) * up, rtol=tolerance, atol=tolerance * float(y.abs().max()))


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("outputs", "inputs", "gated"), [(70, 224, False), (96, 1120, False), (72, 96, True)])
def test_linear_rows_are_strangers(isa, threads, kind, outputs, inputs, gated):
    """Law 2: each row's bits are the same at every row count from 1 to 64 and at every place in it."""
    linear, _, _, dtype = make(kind, outputs, inputs, bias=True, gated=gated)
    x, norm = rand(64, inputs, dtype=dtype), rand(inputs, dtype=dtype)
    full = linear(x, norm, 1e-6, dtype=torch.float32)
    for rows in range(1, 65):
        for start in {0, 64 - rows, (64 - rows) // 3}:
            assert torch.equal(
                linear(x[start : start + rows], norm, 1e-6, dtype=torch.float32), full[start : start + rows]
            )
    again = linear(x[5].expand(64, -1), norm, 1e-6, dtype=torch.float32)
    assert (again == full[5]).all()


@pytest.mark.parametrize("kind", FORMATS)
def test_rows_of_all_sizes_are_strangers(isa, kind):
    """Law 2 also where numbers differ in size by all that their type holds, subnormal ones among them."""
    linear, _, _, dtype = make(kind, 70, 1120)
    most = 10 if kind == "float16" else 60
    x = rand(40, 1120) * 2.0 ** torch.randint(-most, most, (40, 1120), generator=torch.Generator().manual_seed(0))
    x[::3] *= 2.0 ** -(most + 10)
    x = x.to(dtype)
    full = linear(x, dtype=torch.float32)
    for rows in (1, 2, 3, 4, 16, 17, 33):
        assert torch.equal(linear(x[-rows:], dtype=torch.float32), full[-rows:])


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize(("outputs", "inputs"), [(33, 32), (70, 224), (96, 2080)])
def test_integers_have_no_order(kind, outputs, inputs):
    """Products with rounded rows have the same bits on every instruction set, also where all numbers are largest."""
    weight, x = make_quantized(kind, outputs, inputs), rand(49, inputs, dtype=torch.bfloat16)
    low, high = int(weight.values.min()), int(weight.values.max())
    weight.values[:5], weight.values[5:9], weight.values[9:12, ::2], weight.values[9:12, 1::2] = low, high, low, high
    x[0], x[1], x[2, ::2], x[2, 1::2], x[3], x[4, 1:] = 3, -3, 3, -3, 0, 0
    before, results = native.active, []
    for own in ISAS:
        native.use(own)
        results.append(Linear(weight, rounded=True)(x, dtype=torch.float32))
    native.use(before)
    assert results[0][3].eq(0).all()
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_rounded_rows_of_odd_numbers(isa):
    """What is not finite stays in its row and spoils it whole; tiny numbers count as nothing."""
    weight, x = make_quantized("Q4_1", 40, 96), rand(6, 96, dtype=torch.bfloat16)
    linear = Linear(weight, rounded=True)
    clean = linear(x)
    x[1, 5], x[3, 95], x[4] = torch.inf, torch.nan, 1e-38
    y = linear(x)
    assert torch.equal(y[[0, 2, 5]], clean[[0, 2, 5]])
    assert not y[[1, 3]].isfinite().any() and y[4].abs().max() < 1e-30


def test_what_is_rounded():
    """Integers are multiplied with rounded rows; floats of a checkpoint, and plain weights beside them, are not."""
    x, plain, whole = (
        rand(3, 64, dtype=torch.bfloat16),
        rand(32, 64, dtype=torch.bfloat16),
        make_quantized("Q4_0", 32, 64),
    )
    floats = Quantized(4, 32, torch.full((32, 64), 3, dtype=torch.int8), rand(32, 2).bfloat16(), floats=True)
    for weight in (plain, floats):
        assert not Linear(weight, rounded=True).rounded
        assert torch.equal(Linear(weight, rounded=True)(x), Linear(weight)(x))
    both = Linear([plain, whole], rounded=True)
    assert both.rounded and [w.rounded for w in both.packed] == [False, True]
    with pytest.raises(ValueError, match="no integers"):
        native.kernels.Weights(native.FP8, 32, 64, 32, False, True)


def test_parts(isa, threads):
    """Parts of several formats give the columns that each gives alone, bit for bit, bias and residual included."""
    sizes = {"Q4_K": 96, "Q6_K": 33, "Q8_0": 70}
    parts, bias = [make_quantized(kind, n, 256) for kind, n in sizes.items()], rand(199, dtype=torch.bfloat16)
    x, residual, norm = (rand(*shape, dtype=torch.bfloat16) for shape in ((40, 256), (40, 199), (256,)))
    linear = Linear(parts, bias)
    assert linear.out_features == 199
    alone = [Linear(part, part_bias) for part, part_bias in zip(parts, bias.split([*sizes.values()]), strict=True)]
    assert linear.nbytes == sum(one.nbytes for one in alone)
    for dtype in (torch.bfloat16, torch.float32):
        whole, first = [linear(x[:rows], norm, 1e-5, residual[:rows], dtype) for rows in (40, 1)], 0
        for one in alone:
            own = slice(first, first + one.out_features)
            assert torch.equal(whole[0][:, own], one(x, norm, 1e-5, residual[:, own], dtype))
            assert torch.equal(whole[1], whole[0][:1])
            first = own.stop


def test_half_precision_scales(isa):
    """All 65,536 float16 numbers as scales: exact, subnormal ones too; infinities and NaN stay what they are."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    values = torch.ones(2048, 1024, dtype=torch.int8)
    x = torch.zeros(32, 1024, dtype=torch.bfloat16)
    x[torch.arange(32), torch.arange(0, 1024, 32)] = 1  # row i reads the first weight of group i
    clean = numbers.nan_to_num(1, 1, 1).view(2048, 32)  # 0 * inf in one group would be NaN in every sum of its output
    assert torch.equal(Linear(Quantized(8, 32, values, clean))(x, dtype=torch.float32), clean.float().T)
    odd = torch.tensor([[torch.inf], [-torch.inf], [torch.nan]]).half()
    y = Linear(Quantized(8, 32, values[:3, :32], odd))(x[:1, :32], dtype=torch.float32)
    assert y[0, 0] == torch.inf and y[0, 1] == -torch.inf and y[0, 2].isnan()


@pytest.mark.parametrize("by", [1.0, 2.0**-9, 1.37 * 2.0**-13, 3.3, -1023.5])
def test_half_precision_weights(isa, by):
    """All 65,536 float16 numbers as weights: products are exact, and rounded to nearest even, subnormal ones too."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    linear, x = Linear(numbers.view(-1, 1)), torch.tensor([[by]]).half()
    exact = numbers.float() * x.float()[0]
    for dtype in (torch.float32, torch.float16):
        assert torch.equal(linear(x, dtype=dtype)[0].nan_to_num(7), exact.to(dtype).nan_to_num(7))
    assert torch.equal(linear(x)[0].isinf(), exact.half().isinf()) and torch.equal(linear(x)[0].isnan(), exact.isnan())


@pytest.mark.parametrize("kind", GGUF)
def test_blocks_are_taken_apart_as_by_pytorch(kind, monkeypatch):
    size, width = GGUF[kind]
    for rows, count in ((1, 1), (3, 5), (2, 2 * 4096 + 1)):  # one task of the pool's, and several
        blocks = torch.randint(
            0, 256, (rows, count * size), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
        )
        compiled = from_gguf(blocks, kind)
        with monkeypatch.context() as without:
            without.setattr(native, "kernels", None)
            plain = from_gguf(blocks, kind)
        assert compiled.values.shape == (rows, count * width) and torch.equal(compiled.values, plain.values)
        for own, other in ((compiled.scales, plain.scales), (compiled.offsets, plain.offsets)):
            for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (own, other)), strict=True):
                assert a is b is None or torch.equal(a.nan_to_num(0.5), b.nan_to_num(0.5))
    with pytest.raises(ValueError, match="unknown kind"):
        native.kernels.take_apart(21, blocks.data_ptr(), 1, blocks.data_ptr(), 0, 0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_is_not_finite_is_seen(dtype):
    most = torch.finfo(dtype).max
    for count in (0, 1, 7, 2**20, 2**20 + 33):
        x = rand(count).mul(0.1 * most).to(dtype)
        for value in (None, most, -most, 0.0, math.nan, math.inf, -math.inf):
            for place in {0, count // 2, count - 1} if count else ():
                y = x.clone()
                y[place] = y[place] if value is None else value
                expected = value is None or math.isfinite(value)
                assert native.kernels.all_finite(y.data_ptr(), count, native.TYPES[dtype], 2) == expected
        assert native.kernels.all_finite(x.data_ptr(), count, native.TYPES[dtype], 1)


def test_hostile_numbers(isa):
    """Infinities and NaN stay in their row; padding adds nothing to them; silu has limits."""
    linear, dense, _, dtype = make("bfloat16", 40, 33)
    x = rand(5, 33, dtype=dtype)
    clean = linear(x)
    x[1, 32], x[3, 0] = float("inf"), float("nan")
    y = linear(x)
    assert torch.equal(y[[0, 2, 4]], clean[[0, 2, 4]])
    assert torch.equal(y[1].isinf(), dense[:, 32] != 0) and y[3].isnan().all()
    gated = Linear(torch.eye(2).repeat(1, 1), gated=True)  # gate = x[0], up = x[1]
    x = torch.tensor([[-1e30, 1.0], [-100.0, 1.0], [88.0, 1.0], [1e30, 1.0], [0.0, 3.0]])
    assert torch.allclose(gated(x)[:, 0], F.silu(x[:, 0]) * x[:, 1])


def test_linear_refuses(isa):
    linear, *_ = make("bfloat16", 8, 16)
    for x in (rand(2, 16), rand(2, 15, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="weights take"):
            linear(x)
    x = rand(2, 16, dtype=torch.bfloat16)
    for bad in (rand(2, 9, dtype=torch.bfloat16), rand(1, 8, dtype=torch.bfloat16), rand(2, 8), x[0, :8]):
        with pytest.raises(ValueError, match="residual is"):
            linear(x, residual=bad)
    for bad in (rand(15, dtype=torch.bfloat16), rand(16), x, x[0].to("meta")):
        with pytest.raises(ValueError, match="norm is"):
            linear(x, norm=bad)
    with pytest.raises(ValueError, match=r"not torch\.float16"):
        linear(x, dtype=torch.float16)
    for bad in (rand(7, dtype=torch.bfloat16), rand(8), rand(8, 1, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="bias is"):
            Linear(rand(8, 16, dtype=torch.bfloat16), bad)
    values, good = torch.zeros(4, 64, dtype=torch.int8), rand(4, 2, dtype=torch.bfloat16)
    for bad in (good[:, :1], good[:3], good.double(), good.char(), (good.char(), good), (good, good[:, :1].half())):
        with pytest.raises(ValueError, match="scales "):
            Linear(Quantized(8, 32, values, bad))
    for group in (16, 48, 0, 256):
        with pytest.raises(ValueError, match="a group is"):
            Linear(Quantized(8, group, values[:, :48], good))
    one = Quantized(8, 32, values, good)
    for parts, gated in (([one, Quantized(8, 32, values[:, :32], good[:, :1])], False), ([one, one], True)):
        with pytest.raises(ValueError, match="parts of a weight"):
            Linear(parts, gated=gated)
    with pytest.raises(ConfigError, match=r"available: .*reference"):
        native.use("avx1024")


def test_rope_and_norm_refuse(isa):
    qkv, cos = rand(3, 4 * 16), rand(3, 1, 16)
    for bad in (rand(2, 1, 16), rand(3, 1, 8), rand(3, 16)):
        with pytest.raises(ValueError, match="cos is"):
            rope(qkv, 2, 1, bad, cos, None, 1e-5)
    for bad in (rand(3, 1, 16, dtype=torch.bfloat16), rand(3, 1, 15)):
        with pytest.raises(ValueError, match="sin is"):
            rope(qkv, 2, 1, cos, bad, None, 1e-5)
    for bad in (rand(8), rand(16, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="norm is"):
            rope(qkv, 2, 1, cos, cos, (rand(16), bad), 1e-5)
    with pytest.raises(ValueError, match="no 2 "):
        rope(qkv[:, :63], 2, 1, cos, cos, None, 1e-5)
    for bad in (rand(63), rand(1, 64)):
        with pytest.raises(ValueError, match="norm is"):
            rms_norm(qkv, bad, 1e-5)


def test_scattered_tensors(isa):
    """Kernels are given addresses of copies in one piece, which must live as long as the call. These are so large that
    the system takes their memory back at once."""
    rows, outputs = 4200, 2100
    weight, x, residual = rand(3, outputs).T, rand(3, rows).T, rand(outputs, rows).T
    norm = rand(6)[::2]
    linear = Linear(weight)
    expected = F.rms_norm(x, (3,), norm, 1e-5) @ weight.T + residual
    assert torch.allclose(linear(x, norm, 1e-5, residual), expected, rtol=1e-4, atol=1e-4)
    wide = rand(rows, outputs)
    linear, x = Linear(wide.T), rand(2, rows)
    assert torch.allclose(linear(x), x @ wide, rtol=1e-3, atol=1e-2)
    qkv, cos, sin = rand(2 * 64, 5).T, rand(2 * 16, 5).T[:, None, ::2], rand(2 * 16, 5).T[:, None, 1::2]
    norms = rand(32)[::2], rand(32)[1::2]
    for given in (qkv[:, ::2], qkv[:, 3:67]):
        whole = rope(given.contiguous(), 2, 1, cos.contiguous(), sin.contiguous(), norms, 1e-5)
        got = rope(given.clone() if given.stride(1) == 1 else given, 2, 1, cos, sin, norms, 1e-5)
        assert all(torch.equal(a, b) for a, b in zip(got, whole, strict=True))
    apart = torch.cat([rand(5, 64), rand(5, 7)], 1)[:, :64]  # rows with something between them
    whole = rope(apart.contiguous(), 2, 1, cos, sin, None, 1e-5)
    assert all(torch.equal(a, b) for a, b in zip(rope(apart, 2, 1, cos, sin, None, 1e-5), whole, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 64), (1, 1, 80), (3, 1, 20), (2, 2, 256)])
@pytest.mark.parametrize("normed", [False, True])
def test_rope(isa, dtype, heads, kv_heads, dim, normed):
    n = 64
    qkv, cos, sin = rand(n, (heads + 2 * kv_heads) * dim, dtype=dtype), *rand(2, n, 1, dim, dtype=dtype)
    norms = (rand(dim, dtype=dtype), rand(dim, dtype=dtype, seed=1)) if normed else None
    split = qkv.double().view(n, -1, dim)
    q, k, v = split.split([heads, kv_heads, kv_heads], 1)
    if norms:
        q, k = (
            x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w.double()
            for x, w in zip((q, k), norms, strict=True)
        )
    exact = [x * cos.double() + x.roll(dim // 2, -1) * sin.double() for x in (q, k)] + [v]
    full = rope(qkv.clone(), heads, kv_heads, cos, sin, norms, 1e-5)
    tolerance = {torch.float32: 1e-5, torch.float16: 1.5e-3}.get(dtype, 1e-2)
    assert all(torch.allclose(a.double(), b, rtol=tolerance, atol=tolerance) for a, b in zip(full, exact, strict=True))
    for rows in (1, 2, 17, 33):
        part = slice(7, 7 + rows)
        for a, b in zip(rope(qkv[part].clone(), heads, kv_heads, cos[part], sin[part], norms, 1e-5), full, strict=True):
            assert torch.equal(a, b[part])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [1, 33, 384, 2048])
def test_rms_norm(isa, threads, dtype, width):
    x, weight = rand(64, width, dtype=dtype), rand(width, dtype=dtype)
    full = rms_norm(x, weight, 1e-6)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    tolerance = {torch.float32: 1e-5, torch.float16: 1.5e-3}.get(dtype, 1e-2)
    assert torch.allclose(full.double(), exact, rtol=tolerance, atol=1e-6)
    assert all(torch.equal(rms_norm(x[i : i + 3], weight, 1e-6), full[i : i + 3]) for i in range(61))


def test_whole_model(isa, make_llm):
    """Instruction sets agree with the reference operations on a model's logits, and each is bitwise for itself."""
    forced = make_llm("qwen3", vocab_size=100, hidden_size=48, intermediate_size=80)
    assert forced.exactness == "bitwise" and forced.runner.model.head.kernel == isa
    tokens = list(range(1, 40))
    got = logits(forced.runner.model, forced, tokens)
    native.use(native.REFERENCE)
    plain = make_llm("qwen3", vocab_size=100, hidden_size=48, intermediate_size=80)
    assert plain.runner.model.head.kernel != isa
    assert torch.allclose(got, logits(plain.runner.model, plain, tokens), rtol=1e-3, atol=1e-3)


def logits(model: Model, llm, tokens):
    from outrider.config import SamplingParams
    from outrider.draft import Draft
    from outrider.sequence import Sequence

    seq = Sequence(tokens[:1], SamplingParams(max_tokens=64), seed=0)
    out = llm.runner.extend([seq], [Draft.chain(tokens[1:])]).logits[0]
    llm.runner.free(seq)
    return out


def test_self_check_refuses_what_is_wrong(monkeypatch):
    """An instruction set whose products are wrong is not used; the next one is."""
    before, tried = native.active, []
    monkeypatch.setattr(native, "computes_right", lambda: tried.append(native.active) or len(tried) > 1)
    monkeypatch.delenv("OUTRIDER_ISA", raising=False)
    assert native._choose() == ISAS[:1] and native.active == native.available()[1]
    native.use(before)


def test_the_self_check_sees(isa, monkeypatch):
    assert native.computes_right()
    true = native.kernels

    class Skewed(true.Weights):
        def multiply(self, x, rows, y, *rest):
            super().multiply(x, rows, y, *rest)
            ctypes.c_float.from_address(y).value += 1

    monkeypatch.setattr(native, "kernels", type("module", (), {"Weights": Skewed}))
    assert not native.computes_right()


@pytest.mark.parametrize("isa", [native.REFERENCE, "portable", "nonsense"])
def test_environment(isa):
    code = "from outrider.ops import native; print(native.active)"
    env = {**os.environ, "OUTRIDER_ISA": isa}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    if isa == "nonsense":
        assert done.returncode and "does not run here; available:" in done.stderr
    else:
        assert done.stdout.strip() == isa


def test_what_outlives_python_is_no_news():
    """A daemon's frames keep a model: nobody wants to read a page about that."""
    code = (
        "import ctypes; from outrider.ops.native import kernels as k; ctypes.pythonapi.Py_IncRef(ctypes.py_object({}))"
    )
    weights = "k.Weights(0, 40, 72, 32, False, False)"
    done = subprocess.run([sys.executable, "-c", code.format(weights)], capture_output=True, text=True, check=True)
    assert not done.stderr


def test_fork_and_threads():
    """Products from many threads at once, and in a forked child, which has none of the pool's threads."""
    from concurrent.futures import ThreadPoolExecutor

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    linear, x = Linear(rand(640, 96)), rand(16, 96)
    full = linear(x)
    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(lambda _: torch.equal(linear(x), full), range(200)))
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
    else:
        os._exit(0 if torch.equal(linear(x), full) else 1)
    torch.set_num_threads(before)


STARVED = """
import resource, sys, torch
from outrider.ops import Linear, native
torch.set_num_threads(int(sys.argv[1]))
linear, x = Linear(torch.randn(40, 32).bfloat16()), torch.randn(2**20, 32).bfloat16()
few = linear(x[:9])
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + 2**27, -1))  # room for the result, not for the sums of all rows
for _ in range(3):
    try:
        linear(x)
    except MemoryError:
        assert torch.equal(linear(x[:9]), few)
    else:
        sys.exit("there was memory after all")
print("refused")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the address space is limited as Linux does it")
@pytest.mark.parametrize("threads", [1, 3])
def test_memory_runs_out(threads):
    """An allocation that fails in a kernel, on whichever thread, is a MemoryError, and the kernels go on working."""
    env = {**os.environ, "LD_PRELOAD": ""}  # a sanitizer's own allocator would end the process
    done = subprocess.run([sys.executable, "-c", STARVED, str(threads)], env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "refused", done.stderr


def test_what_pytorch_multiplies_in(monkeypatch):
    """bfloat16 where something has instructions for it."""
    cpu, half = torch.device("cpu"), torch.bfloat16
    for isas, fast in ((["avx2", "portable"], False), (["amx", "avx512bf16", "avx2"], True), (["reference"], False)):
        monkeypatch.setattr(native, "available", lambda isas=isas: isas)
        assert native.product_dtype(half, cpu) == (half if fast else torch.float32)
        assert native.product_dtype(torch.float16, cpu) == native.product_dtype(torch.float32, cpu) == torch.float32
        assert native.product_dtype(half, torch.device("cuda")) == half


def test_small_numbers_are_what_they_are_on_every_thread(isa):
    """Whether a thread flushes them to zero is its own affair, and who takes a part of a product is chance."""
    linear, x = Linear(rand(4096, 64, seed=1)), rand(3, 64, seed=2) * 1e-39
    torch.set_num_threads(4)
    try:
        expected = linear(x)
        torch.set_flush_denormal(True)
        assert all(torch.equal(linear(x).view(torch.int32), expected.view(torch.int32)) for _ in range(20))
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(1)
    assert (expected != 0).any()
