"""The native walk of a forward: bit for bit what the operations compute one by one, for all that it takes."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_native import FORMATS, ISAS, PLAIN, ROUNDED, isa, make_quantized, rand  # noqa: F401 - a fixture

from outrider import Draft, SamplingParams, families
from outrider.kv import OffloadKV, PagedKV
from outrider.model import Layer, Model
from outrider.ops import MLP, Block, Experts, Linear, Quantized, Stores, Walk
from outrider.runner import Runner
from outrider.sequence import Sequence

pytestmark = pytest.mark.skipif(not ISAS, reason="the kernels are not built: there was no compiler")
CPU, VOCAB, HIDDEN, WIDE, HEADS, KV_HEADS, DIM, LAYERS = torch.device("cpu"), 96, 64, 96, 4, 2, 16, 3
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": WIDE, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": DIM, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
FAMILIES = {
    "llama": {},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 9},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
    "experts": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": WIDE,
        "shared_expert_intermediate_size": 64,
    },
    "dynamic": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        "max_position_embeddings": 40,
    },
}


def make_model(kind="bfloat16", family="llama", embedding="table"):
    """A random model whose linears are of one kind, or whose queries, keys and values are of three ("mixed")."""
    c = families.read({"architectures": ["LlamaForCausalLM"], **SHAPE, **FAMILIES[family]})
    dtype = getattr(torch, kind) if kind in PLAIN else torch.bfloat16

    def linear(outputs, inputs, bias=False, gated=False, seed=0, parts=None):
        own = "Q4_1" if kind == "mixed" else kind
        if kind == "mixed" and parts:
            weight = [make_quantized(part, n, inputs) for part, n in zip(("Q4_K", "Q6_K", "Q8_0"), parts, strict=True)]
        elif own not in PLAIN:
            weight = make_quantized(own, outputs, inputs, gated)
        else:
            weight = rand(outputs, inputs, dtype=dtype, seed=seed)
        return Linear(
            weight,
            rand(outputs, dtype=dtype, seed=seed + 1) if bias else None,
            gated=gated,
            rounded=own.endswith(ROUNDED),
        )

    def norm(width, seed):
        return rand(width, dtype=dtype, seed=seed) / 4 + 1

    def mlp(i, wide=WIDE):
        up = linear(2 * wide, HIDDEN, c.mlp_bias, gated=True, seed=30 + i)
        return MLP(up, linear(HIDDEN, wide, c.mlp_bias, seed=40 + i))

    def experts(i):
        own, shared = [mlp(100 * e + i) for e in range(5)], [mlp(7 + i, 64)]
        router = Linear(rand(6, HIDDEN, dtype=dtype, seed=70 + i))
        return Experts(router, own + shared, 2, normalised=i % 2 == 0, shared=True)

    def layer(i):
        q, kv = HEADS * DIM, KV_HEADS * DIM
        return Layer(
            norm(HIDDEN, i), linear(q + 2 * kv, HIDDEN, c.qkv_bias, seed=i, parts=(q, kv, kv)),
            linear(HIDDEN, q, c.o_bias, seed=10 + i), norm(HIDDEN, 20 + i),
            mlp(i) if c.mixture is None else experts(i),
            *((norm(DIM, 50 + i), norm(DIM, 60 + i)) if c.qk_norm else ()),
        )  # fmt: skip

    head = linear(VOCAB, HIDDEN, seed=7)
    table = rand(VOCAB, HIDDEN, dtype=dtype, seed=8)
    given = {"table": table, "other dtype": table.half(), "function": lambda at: table[at].float(), "head": head.rows}
    return Model(c, given[embedding], [layer(i) for i in range(LAYERS)], norm(HIDDEN, 9), head, dtype, CPU)


@pytest.fixture
def walks(monkeypatch):
    """Counts walks; `walks.off()` switches them off."""

    class Walks(list[int]):
        def off(self):
            monkeypatch.setattr(Model, "_walks", lambda model: False)

    counted, walk = Walks(), Walk.__call__
    monkeypatch.setattr(Walk, "__call__", lambda *args, **named: counted.append(1) or walk(*args, **named))
    return counted


def text(n, seed=0):
    return torch.randint(VOCAB, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def life(runner, points=(), base=None):
    """All that forwards of many kinds give: a prompt in chunks, company, a chain, a tree, an accepted branch."""
    results, params = [], SamplingParams(max_tokens=500)
    rows = runner.tap(points) if points else None
    seq, other = Sequence(text(75), params, 0), Sequence(text(12, 1), params, 0)
    tree = Draft([3, 4, 5, 6, 7], [-1, -1, 1, 2, 1])
    for seqs, drafts in (
        ([seq], [Draft()]),
        ([other, seq], [Draft.chain([1, 2, 3]), Draft()]),
        ([seq, other], [tree, Draft.chain([5])]),
    ):
        if base:
            base.extend(seqs)
        output = runner.extend(seqs, drafts)
        assert output.best is None or output.best == output.flat.argmax(-1).tolist()
        results += [output.flat, *output.logits, *output.hidden]
    for seq_, path in ((seq, [1, 2]), (other, [])):
        runner.kv.keep(seq_.id, len(seq_.tokens), path)
        runner.slots[seq_.id].tokens[len(seq_.tokens) :] = [tree.tokens[i] for i in path]
        for held in runner.taps:
            held.keep(seq_.id, len(seq_.tokens), path)
    seq.tokens += [4, 5, 11]
    if base:
        base.extend([seq])
    results.append(runner.extend([seq]).flat)
    for s in (seq, other):
        layers = range(runner.model.config.num_layers if isinstance(runner.kv, PagedKV) else 0)
        results += [runner.kv.span(s.id, layer, 0, len(s.tokens)).clone() for layer in layers]
        results += [rows.read(s.id, 0, len(s.tokens))[1].clone()] if rows else []
        for each in (runner, base) if base else (runner,):
            each.free(s)
    assert all(x.isfinite().all() for x in results)
    return results


def compare(runner, walks, **how):
    walked = life(runner, **how)
    assert walks
    walks.off()
    walks.clear()
    plain = life(runner, **how)
    assert not walks and len(walked) == len(plain)
    assert all(map(torch.equal, walked, plain))


def make_runner(model, kind=PagedKV, **options):
    return Runner(model, kind(model.config, model.dtype, CPU, **options), chunk=32)


@pytest.mark.parametrize("kind", [*FORMATS, "mixed"])
def test_formats(isa, walks, kind):  # noqa: F811
    compare(make_runner(make_model(kind)), walks)


@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind not in PLAIN])
def test_experts_in_every_format(isa, walks, kind):  # noqa: F811
    compare(make_runner(make_model(kind, "experts")), walks)


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("family", FAMILIES)
def test_families(walks, family, kind):
    compare(make_runner(make_model(kind, family)), walks)


@pytest.mark.parametrize("points", [(0,), (1, 2), (LAYERS,), (-1,), (0, 1, 2, LAYERS, -1)])
@pytest.mark.parametrize("threads", [1, 3])
def test_threads_and_hidden_rows(walks, threads, points):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        compare(make_runner(make_model()), walks, points=points)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("embedding", ["other dtype", "function", "head"])
def test_embeddings(walks, embedding):
    model = make_model("Q4_K", embedding=embedding)
    compare(make_runner(model), walks)
    assert model._walk.embeds == (embedding == "head")


@pytest.mark.parametrize(
    "view",
    [
        "streaming:budget=40,sinks=3",
        "retrieval:budget=48,chunk=4,recent=8,rebuild=20",
        "snapkv:budget=48,window=6,recent=8,rebuild=20",
    ],
)
def test_views(walks, view):
    """Views and their bases: the queries by which keys are chosen are those of the walk."""
    base = make_runner(make_model())
    runner = base.view(view)
    compare(runner, walks, base=base)


def test_a_cache_of_its_own(walks):
    compare(make_runner(make_model()).view("streaming:budget=40,sinks=3", alone=True), walks, base=None)


def test_caches_that_attend_layer_by_layer(walks):
    """Those whose keys lie nowhere as a whole are asked, and the model goes on around them."""
    model = make_model()
    whole = life(make_runner(model))
    assert walks
    walks.clear()
    assert all(map(torch.equal, whole[:10], life(make_runner(model, OffloadKV))[:10])) and not walks
    base = make_runner(model)
    few = base.view("quantized:bits=8,recent=64")
    seq = Sequence(text(20), SamplingParams(max_tokens=9), 0)
    few.extend([seq])
    assert len(walks) == 1  # the base's


def test_rows_that_nobody_wants_leave_the_last_layer_early(walks, monkeypatch):
    """Also where layers are called one by one: their keys and values are all that is made of them."""
    walks.off()
    model, counted = make_model(), list[tuple[bool, int]]()
    last, product = model.layers[-1].o, Linear.__call__

    def count(own, x, *args, **named):
        counted.append((own is last, len(x)))
        return product(own, x, *args, **named)

    monkeypatch.setattr(Linear, "__call__", count)
    make_runner(model).extend([Sequence(text(75), SamplingParams(max_tokens=9), 0)])
    assert [n for own, n in counted if own] == [1]  # of 32, 32 and 11 rows
    assert counted.count((False, 32)) == 2 * (4 * LAYERS - 3)
    for points, rows in ((LAYERS - 1,), [1]), ((LAYERS,), [32, 32, 11]), ((-1,), [32, 32, 11]):
        counted.clear()
        runner = make_runner(model)
        kept = runner.tap(points)
        runner.extend([Sequence(text(75), SamplingParams(max_tokens=9), 0)])
        assert kept and [n for own, n in counted if own] == rows


@pytest.mark.parametrize("kind", FORMATS)
def test_rows_of_packed_weights(kind):
    """Each row, as the numbers that it stands for, rounded once."""
    outputs, inputs = 70, 288
    weight = (
        make_quantized(kind, outputs, inputs)
        if kind not in PLAIN
        else rand(outputs, inputs, dtype=getattr(torch, kind))
    )
    linear = Linear(weight, rounded=kind.endswith(ROUNDED))
    want = weight.dense().bfloat16() if isinstance(weight, Quantized) else weight
    at = [69, 0, 31, 32, 5, 5]
    assert torch.equal(linear.rows(torch.tensor(at)), want[at])
    for bad in (-1, outputs):
        with pytest.raises(IndexError, match="no such row"):
            linear.rows(torch.tensor([bad]))
    with pytest.raises(ValueError, match="one part"):
        Linear([make_quantized("Q8_0", 4, 32), make_quantized("Q4_1", 4, 32)]).rows(torch.tensor([0]))


def test_odd_models_are_not_walked(walks):
    """Heads that the attention's kernel does not take, and weights that are not packed."""
    model = make_model()
    model.head = Linear(rand(VOCAB, HIDDEN, dtype=torch.bfloat16), pack=False)
    life(make_runner(model))
    assert not walks
    model = make_model()
    model.config = replace(model.config, head_dim=12)
    assert not model._walks()


def test_what_does_not_fit():
    model = make_model()
    runner = make_runner(model)
    seq = Sequence([1, VOCAB], SamplingParams(), 0)
    with pytest.raises(IndexError, match="beyond the vocabulary"):
        runner.extend([seq])
    walk = model._walk
    stores = [0] * LAYERS
    turns, sines, kept = model.rotary.addresses([0, 1], [2, 2])
    for runs, tokens, wanted, what in (
        ([(0, 3, 0, 512, None, stores, 0, 0)], [1, 2], [], "does not fit"),
        ([(1, 2, 0, 512, None, stores, 0, 0)], [1, 2], [], "does not fit"),
        ([(0, 2, 511, 512, None, stores, 0, 0)], [1, 2], [], "does not fit"),
        ([(0, 2, -1, 512, None, stores, 0, 0)], [1, 2], [], "does not fit"),
        ([(0, 2, 0, 512, None, stores[1:], 0, 0)], [1, 2], [], "does not fit"),
        ([(0, 2, 0, 512, [-1], stores, 0, 0)], [1, 2], [], "one for each row"),
        ([(0, 2, 0, 512, [-1, 1], stores, 0, 0)], [1, 2], [], "before their rows"),
        ([], [1], [], "a token for each row"),
        ([], [1, 2], [2], "is not there"),
    ):
        with pytest.raises(ValueError, match=what):
            walk(tokens, turns, sines, Stores(runs, torch.bfloat16), wanted, {})
    with pytest.raises(ValueError, match="are stored in"):
        walk([1, 2], turns, sines, Stores([], torch.float32), [], {})
    narrow = Block(*vars(walk._kept[0][0]).values())
    narrow.o = Linear(rand(HIDDEN, 48, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="does not fit"):
        Walk(HEADS, KV_HEADS, DIM, 1e-5, [narrow], model.norm, model.head, None)
    with pytest.raises(ValueError, match="norm is"):
        Walk(HEADS, KV_HEADS, DIM, 1e-5, [], model.norm[1:], model.head, None)
    del kept


def test_many_threads_at_once():
    """Forwards of one model from several threads share its weights and nothing else."""
    model = make_model("Q4_1")
    plain = life(make_runner(model))
    with ThreadPoolExecutor(4) as threads:
        for results in threads.map(lambda _: life(make_runner(model)), range(12)):
            assert all(map(torch.equal, results, plain))


STARVED = """
import resource, sys
sys.path.insert(0, sys.argv[1])
import torch
from test_walk import Stores, make_model
model = make_model()
model._walks()
def go(rows):
    turns, sines, kept = model.rotary.addresses([0] * rows, [1] * rows)
    return model._walk([1] * rows, turns, sines, Stores([], torch.bfloat16), [], {})
turns, sines, kept = model.rotary.addresses([0] * 2**19, [1] * 2**19)
go(2)
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + 2**27, -1))
for _ in range(3):
    try:
        model._walk([1] * 2**19, turns, sines, Stores([], torch.bfloat16), [], {})
    except MemoryError:
        go(2)
    else:
        sys.exit("there was memory after all")
print("refused")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the address space is limited as Linux does it")
def test_memory_runs_out():
    """Scratch memory that cannot be had is a MemoryError, and the next walk works."""
    env = {**os.environ, "LD_PRELOAD": ""}  # a sanitizer's own allocator would end the process
    here = str(Path(__file__).parent)
    done = subprocess.run([sys.executable, "-c", STARVED, here], env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "refused", done.stderr


def test_experts_whose_parts_would_have_another_s_bias_are_refused():
    """The bias of a gated product lies in two halves, which a part of it does not find."""
    up, down = Linear(rand(2 * WIDE, HIDDEN), rand(2 * WIDE), gated=True), Linear(rand(HIDDEN, WIDE))
    with pytest.raises(ValueError, match="bias only where they are clamped"):
        Experts(Linear(rand(2, HIDDEN)), [MLP(up, down)] * 2, 1, normalised=True)


def test_a_score_that_is_no_number_is_not_passed_over():
    """It is the largest, the first of several, and nothing of what its row gives is a number."""
    linear = Linear(rand(4, HIDDEN))
    scores = torch.tensor([[1.0, 3.0, torch.nan, 2.0], [torch.nan, torch.inf, torch.nan, torch.nan]])
    for normalised in (True, False):
        experts = Experts(
            linear, [MLP(Linear(rand(2 * WIDE, HIDDEN), gated=True), Linear(rand(HIDDEN, WIDE)))] * 4, 2, normalised
        )
        at, weights = experts.route(scores)
        assert at.tolist() == [[1, 2], [0, 2]] and weights.isnan().all()
