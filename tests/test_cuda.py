"""A whole model on the GPU kernels, in Triton's interpreter: what it computes, Law 2, and speculation on and off."""

from __future__ import annotations

from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode

from outrider import LLM, SamplingParams
from outrider.bench import long, overhead
from outrider.config import Rule, SpeculativeConfig
from outrider.control import Beliefs
from outrider.draft import Draft, Verdict
from outrider.drafters import create
from outrider.drafters.ngram import Ngram
from outrider.kv import Entry, OffloadKV, PagedKV, Plan, views
from outrider.kv.base import allocate
from outrider.kv.dense import DenseKV
from outrider.kv.rows import NORMED
from outrider.load import device_named, load
from outrider.model import Model
from outrider.ops import Graphs, Linear, native
from outrider.ops.triton import launch
from outrider.runner import Runner
from outrider.sequence import Sequence
from outrider.speculate import Autoregressive, step
from outrider.train import medusa, recurrent
from outrider.train.settings import RecurrentSettings, Settings

PROMPT = [5, 6, 7, 5, 6]


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    """Texts lie in one span here; as many as are folded take the interpreter as long as if they were there."""
    monkeypatch.setattr(launch, "FOLDED", 2)
    monkeypatch.setattr(launch, "MERGED", 2)
    with launch.emulated():
        yield


@pytest.fixture(scope="module")
def folder(make_checkpoint):
    """One layer of one head of each kind: the interpreter takes a while for every program."""
    return make_checkpoint(
        dtype=torch.bfloat16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        hidden_size=32, intermediate_size=32, vocab_size=64,
    )  # fmt: skip


@pytest.fixture(scope="module")
def mixture(make_checkpoint):
    """The same with experts, of which each token takes two."""
    return make_checkpoint(
        "qwen3_moe", dtype=torch.bfloat16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, hidden_size=32, intermediate_size=32, vocab_size=64, num_experts=8, num_experts_per_tok=2,
        moe_intermediate_size=32, decoder_sparse_step=1, mlp_only_layers=[],
    )  # fmt: skip


def first(runner, tokens, draft=None, beside=None):
    """Logits (1 + nodes, vocab) behind a text, which is read anew."""
    seq = Sequence(tokens, SamplingParams(max_tokens=32), seed=0)
    other = Sequence(beside, SamplingParams(max_tokens=32), seed=0) if beside else None
    try:
        with torch.inference_mode():
            seqs, drafts = ([other, seq], [Draft(), draft or Draft()]) if other else ([seq], [draft or Draft()])
            return runner.extend(seqs, drafts).logits[-1].clone()
    finally:
        runner.free(seq)
        if other:
            runner.free(other)


@pytest.mark.parametrize(
    "text", ["streaming:budget=24,sinks=4,rebuild=6", "retrieval:budget=24,chunk=4,recent=2,rebuild=6"]
)
@pytest.mark.parametrize("arch", [("llama", {}), ("mistral", {"sliding_window": 40})], ids=["full", "window"])
def test_views_take_over(make_checkpoint, arch, text, monkeypatch):
    """What a kernel copies of several sequences' verified keys is what would be copied layer by layer."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "hidden_size": 32}
    where = make_checkpoint(arch[0], dtype=torch.bfloat16, num_hidden_layers=3, vocab_size=64, **heads, **arch[1])
    config = load(str(where), "bfloat16", "cpu").model.config
    base, calls = PagedKV(config, torch.bfloat16, torch.device("cpu")), []
    monkeypatch.setattr(views, "take", lambda *args: calls.append(len(args[2])) or launch.take(*args))
    slow = copy(base)
    slow.lies = lambda layers: None
    fast, slow = (views.View(DenseKV(config, base.dtype, base.device), views.parse(text), own) for own in (base, slow))
    noise = torch.Generator().manual_seed(0)
    for length in (9, 12, 13, 30, 31, 37, 60):
        plan = Plan([Entry(seq, 0, length + seq, 0) for seq in (0, 1)])
        base.reserve(plan)
        for e in plan.entries:
            for layer in range(3):
                base.write(e.seq, layer, 0, *torch.randn(2, e.n, 2, 16, generator=noise).bfloat16())
            for view in (fast, slow):
                known = view.held[e.seq].length if e.seq in view.held else 0
                assert view.catch_up(e.seq, known, e.n) == e.n
        for view in (fast, slow):
            view.reserve(Plan([Entry(e.seq, e.seq, 1, e.n) for e in plan.entries]))
        for e in plan.entries:
            n = fast.held[e.seq].slot(e.n)
            pairs = zip(fast.slab.store[e.seq], slow.slab.store[e.seq], strict=True)
            assert all(torch.equal(own[:, :, :n], other[:, :, :n]) for own, other in pairs)
    assert calls and not any(h.due for view in (slow, fast) for h in view.held.values())
    assert fast.catch_up(7, 0, 0) == 0  # of whom the base has nothing yet
    fast.reserve(Plan([Entry(7, 0, 60, 0)]))
    assert fast.held[7].length == 60 and not fast.held[7].due
    fast.catch_up(0, fast.held[0].length, fast.held[0].length)
    fast.held[0].due = [(0, 4, 0)]
    fast.reserve(Plan([Entry(1, 0, 1, 61)]))
    assert fast.held[0].due == [(0, 4, 0)], "what is due of others waits for them"


@pytest.mark.parametrize(
    ("scheme", "cache"), [(None, PagedKV), ("int8", PagedKV), ("int4", PagedKV), (None, OffloadKV)]
)
def test_model(folder, scheme, cache):
    """Every node of a tree has the bits of plain decoding, read at once or token by token, alone or beside others."""
    checkpoint = load(str(folder), "bfloat16", "cpu", quantization=scheme)
    model = checkpoint.model
    assert model.head.kernel == "Triton"
    runner = Runner(model, cache(model.config, model.dtype, model.device))
    assert runner.follows_paths
    tree = Draft([9, 4, 3, 2], [-1, -1, 1, 0])
    whole = first(runner, PROMPT, tree, beside=[1, 2, 3])
    for node, path in [(0, []), (3, [4, 3]), (4, [9, 2])]:
        assert torch.equal(first(runner, PROMPT + path)[0], whole[node]), path
    if scheme:
        return
    seq = Sequence(PROMPT[:1], SamplingParams(max_tokens=32), seed=0)
    with torch.inference_mode():
        for token in PROMPT[1:]:
            runner.extend([seq])
            seq.tokens.append(token)
        assert torch.equal(runner.extend([seq]).logits[0][0], whole[0])
    runner.free(seq)


def repeated(compute):
    """What stands in for a CUDA graph: it computes again, from the same tensors into the same tensors."""
    results = compute()

    def replay():
        for to, x in zip(results, compute(), strict=True):
            to.copy_(x)

    return replay, results


def test_graphs_change_no_bit(folder):
    """Rows, pages and spans rounded up; slots of the text and blocks move, and one graph serves steps of one size."""
    model = load(str(folder), "bfloat16", "cpu").model
    runners = [Runner(model, PagedKV(model.config, model.dtype, model.device)) for _ in range(2)]
    seqs = [Sequence(PROMPT + [7] * 22, SamplingParams(max_tokens=32), seed=0) for _ in range(2)]
    others = [Sequence([3, 4], SamplingParams(max_tokens=32), seed=0) for _ in range(2)]
    graphs, points = Graphs(repeated), (0, 1, NORMED)
    taps = [runner.tap(points) for runner in runners]
    for runner in runners:
        runner.kv.log.size = 5  # a view asks for the last queries
    tree, steps = Draft([9, 4, 3], [-1, -1, 1]), []
    for draft in (Draft(), Draft.chain([1, 2]), tree, Draft.chain([5, 6]), Draft(), tree):
        for runner, seq, other, model.graphs in zip(runners, seqs, others, [None, graphs], strict=True):
            output = runner.extend([other, seq], [Draft(), draft])
            steps.append([output.flat.clone(), *(x.clone() for x in output.hidden)])
            path = [1, 2] if draft is tree else list(range(len(draft)))
            verdicts = [Verdict([], [8]), Verdict(path, [*(draft.tokens[i] for i in path), 8])]
            runner.commit([other, seq], output, verdicts)
            for own, verdict in zip((other, seq), verdicts, strict=True):
                own.accept(verdict.tokens)
        plain, replayed = steps[-2:]
        assert all(torch.equal(a, b) for a, b in zip(plain, replayed, strict=True)), draft
    queries = [runner.kv.log.last(seq.id, 0) for runner, seq in zip(runners, seqs, strict=True)]
    assert len(queries[0]) == 5
    assert torch.equal(*queries)
    rows = [tap.read(seq.id, 0, 99) for tap, seq in zip(taps, seqs, strict=True)]
    assert len(rows[0][1]) > 30
    assert torch.equal(rows[0][1], rows[1][1])
    sizes = sorted(key[0][0][1] for key in graphs.held)
    assert sizes[0] == 2
    assert set(sizes) <= {2, 4, 8, 32}
    assert len(graphs.held) < 6, "every step has got a graph of its own"


def test_graphs_keep_no_more_than_a_piece(folder, monkeypatch):
    """Where what spans put aside is too much for one piece, kernels are called one by one."""
    model = load(str(folder), "bfloat16", "cpu").model
    runner = Runner(model, PagedKV(model.config, model.dtype, model.device))
    model.graphs = Graphs(repeated)
    kept = first(runner, PROMPT, Draft.chain([1, 2, 3]))
    assert len(model.graphs.held) == 1
    monkeypatch.setattr(launch, "PARTS", 1)
    assert torch.equal(first(runner, PROMPT, Draft.chain([1, 2, 3])), kept)
    assert len(model.graphs.held) == 1
    model.graphs = Graphs(repeated)
    first(runner, PROMPT)
    assert not model.graphs.held


def test_auto_learns_nothing_from_what_captured(folder, as_on_cuda, monkeypatch):
    """Most of the time went into a graph, be it the target's or its draft model's."""
    model, own = (load(str(folder), "bfloat16", "cpu").model for _ in range(2))
    model.graphs, own.graphs = Graphs(repeated), Graphs(repeated)
    runner, other = (Runner(each, PagedKV(each.config, each.dtype, each.device)) for each in (model, own))
    monkeypatch.setattr("outrider.drafters.auto._forwards", lambda target: {1: 1.0, 16: 1.1})
    drafter = create(SpeculativeConfig("auto", options={"drafters": [{"method": "draft_model", "model": "own"}]}))
    drafter.attach(runner, lambda name: other)
    (source,) = drafter.dear
    told, asked = [], []
    monkeypatch.setattr(drafter, "rests", lambda seqs: False)
    monkeypatch.setattr(drafter.costs, "add", lambda *measured: told.append("target"))
    monkeypatch.setattr(source.rounds, "add", lambda *measured: told.append("draft"))
    drafter.beliefs = Beliefs(source.bit)
    monkeypatch.setattr(drafter.beliefs, "worth", lambda texts, *_: (0, [*range(len(texts))], 2))
    seq = Sequence(PROMPT, SamplingParams(max_tokens=60, temperature=0), seed=0)
    for _ in range(6):
        held = len(model.graphs.held), len(own.graphs.held)
        told.clear()
        step(runner, drafter, [seq], 2)
        new = len(model.graphs.held) > held[0], len(own.graphs.held) > held[1]
        asked.append(new)
        assert told == ["draft"] * (not new[1]) + ["target"] * (not new[0])
    assert asked[0] == (True, True) and asked[-1] == (False, False)


def test_a_gpu_is_named_by_its_number(monkeypatch):
    """As its tensors name it: a bias on cuda:1 is not on cuda."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert [str(device_named(name)) for name in ("cuda", "auto", "cuda:0", "cpu")] == [
        "cuda:1",
        "cuda:1",
        "cuda:0",
        "cpu",
    ]


def test_kernels_are_launched_where_the_model_lies(monkeypatch):
    """The current GPU is a thread's own, and another may be the caller's."""
    llm, entered = LLM("tiny", device="cpu", dtype="float32"), []
    monkeypatch.setattr(torch.cuda, "device", lambda device: entered.append(device) or nullcontext())
    monkeypatch.setattr(llm.engine, "_device", torch.device("cuda:1"))
    llm.generate(PROMPT, max_tokens=2)
    list(llm.stream(PROMPT, max_tokens=2))
    assert {*entered} == {torch.device("cuda:1")}


def test_training_and_benches_launch_there_too(tmp_path, monkeypatch):
    """Whatever they call outside the engine. Seen by the caller's autocast, which ends where that GPU is entered."""
    seen = []

    def watch(kind, name):
        own = getattr(kind, name)

        def watched(*args, **kw):
            seen.append((name, torch.is_autocast_enabled("cpu")))
            return own(*args, **kw)

        monkeypatch.setattr(kind, name, watched)

    for kind, name in ((Model, "forward"), (Model, "embed"), (Linear, "__call__"), (Ngram, "propose")):
        watch(kind, name)
    monkeypatch.setattr(overhead, "STEPS", 3)
    (text := tmp_path / "text.txt").write_text("The cat sat on the mat, and the dog sat on the cat. " * 20)
    llm, ngram = LLM("tiny", device="cpu", dtype="float32"), SpeculativeConfig("ngram", 2)
    settings = long.Settings(
        contexts=[20], methods=[ngram], max_tokens=16, repeats=1, file=text, dtype="float32", device="cpu"
    )
    with torch.autocast("cpu", torch.bfloat16):
        for part in (
            lambda: medusa.own_head(llm),
            lambda: medusa.read(llm, [PROMPT]),
            lambda: medusa.Heads(llm, Settings()).embed(torch.tensor(PROMPT)),
            lambda: recurrent.Head(llm, RecurrentSettings()).embed(torch.tensor(PROMPT)),
            lambda: [*overhead.run(llm, [ngram], text, [9])],
            lambda: [*long.run(settings)],
        ):
            seen.clear()
            part()
            assert seen and not [name for name, reached in seen if reached]


def test_two_models_graphs_share_no_memory():
    """Two engines' threads may replay them at once."""
    assert Graphs().capture is not Graphs().capture


def test_graphs_are_captured_on_a_stream_of_their_own(monkeypatch):
    """PyTorch's lies on the GPU that captured first, and no two threads can capture on one."""
    used, on = [], [0]

    class Stream:
        def __init__(self, device):
            self.device = device

        def wait_stream(self, other): ...

    zeros = torch.zeros
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch, "zeros", lambda *size, device: zeros(*size))
    for name, value in {
        "current_device": lambda: on[0], "current_stream": lambda: Stream(None), "stream": lambda _: nullcontext(),
        "graph": lambda *_, stream=None, **__: used.append(stream) or nullcontext(),
        "graph_pool_handle": lambda: None, "CUDAGraph": lambda: SimpleNamespace(replay=None),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    for on[0] in (0, 1):
        capture = Graphs().capture
        for _ in range(2):
            capture(list)
    assert [stream.device.index for stream in used] == [0, 0, 0, 1, 1, 1] and len({*map(id, used)}) == 2


def test_what_graphs_keep(folder):
    """One place for logits, whatever their number, and none for those of a prompt, of which nobody asks for each."""
    model = load(str(folder), "bfloat16", "cpu").model
    plainly = [first(Runner(model, PagedKV(model.config, model.dtype, model.device)), text) for text in (PROMPT, [9])]
    model.graphs = Graphs(repeated)
    runner, vocab = Runner(model, PagedKV(model.config, model.dtype, model.device)), model.config.vocab_size
    assert all(torch.equal(first(runner, text), own) for text, own in zip((PROMPT, [9]), plainly, strict=True))
    first(runner, [9], Draft.chain([1, 2]))  # of three rows: a larger place
    assert torch.equal(first(runner, [9]), plainly[1])  # by a graph that has the small one
    kept = {
        x.untyped_storage().data_ptr(): len(x)
        for *_, own in model.graphs.held.values()
        for x in own
        if x.shape[1:] == (vocab,)
    }
    assert len(model.graphs.held) > len(kept) and sorted(kept.values()) == [1, 4]
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert first(runner, [9], Draft.chain([1] * 4)).dtype == torch.float32, "whatever the caller's default is"
    finally:
        torch.set_default_dtype(torch.float32)


def test_graphs_go_where_memory_ends(folder):
    """A forward that finds none for its graph runs without one; the others' come anew."""
    model, full = load(str(folder), "bfloat16", "cpu").model, False

    def capture(compute):
        if full:
            raise torch.OutOfMemoryError("no memory")
        return repeated(compute)

    model.graphs = Graphs(capture)
    runner = Runner(model, PagedKV(model.config, model.dtype, model.device))
    expected = first(runner, [9], Draft.chain([1]))
    assert model.graphs.held
    full = True
    assert torch.equal(first(runner, [9], Draft.chain([1, 2]))[:2], expected) and not model.graphs.held


def test_a_copy_that_failed():
    """What a graph reads is what it was given last, also behind a call that broke off."""
    graphs, device = Graphs(repeated), torch.device("cpu")
    one, other = torch.ones(2), torch.full((2,), 5.0)

    def call(slabs, x):
        return graphs("key", {"slabs": slabs, "x": x}, lambda held: [held["slabs"] * held["x"]], device)[0].tolist()

    assert call(one, torch.tensor([2.0, 3.0])) == [2, 3]
    assert call(one, torch.tensor([4.0, 3.0])) == [4, 3]
    with pytest.raises(RuntimeError):
        call(other, torch.ones(3))
    assert call(one, torch.tensor([2.0, 3.0])) == [2, 3]


def test_growth_that_failed(folder, monkeypatch):
    """Where memory gives out between two layers, what is stored stays, and is read as it lies."""
    model = load(str(folder), "bfloat16", "cpu").model
    config = replace(model.config, num_layers=3, windows=model.config.windows * 3)
    kv = DenseKV(config, torch.bfloat16, torch.device("cpu"))
    plan = Plan([Entry(0, 0, 4, 0)])
    kv.reserve(plan)
    assert kv.fixed(plan, 4) is not None
    assert kv.stores(plan) is not None
    made = iter([True])

    def scarce(*size) -> torch.Tensor:
        if next(made, False):
            return allocate(*size)
        raise MemoryError

    monkeypatch.setattr("outrider.kv.dense.allocate", scarce)
    with pytest.raises(MemoryError):
        kv.reserve(Plan([Entry(0, 0, 900, 4)]))
    assert len({own.shape for own in kv.store[0]}) == 2
    assert kv.fixed(plan, 4) is None
    assert kv.stores(plan) is None


def test_experts_in_graphs(mixture):
    """What a graph has captured takes other experts for other rows, and none for padding; branches stay exact."""
    model = load(str(mixture), "bfloat16", "cpu").model
    runner = Runner(model, PagedKV(model.config, model.dtype, model.device))
    tree, seen = Draft([9, 4], [-1, -1]), []
    for graphs in (None, Graphs(repeated)):  # of 4 rows, for 3
        model.graphs, texts = graphs, ([5], [41])
        first(runner, [3], tree)  # is captured
        before = model.expert_bytes
        seen.append([*(first(runner, text, tree) for text in texts), torch.tensor(model.expert_bytes - before)])
    plain, replayed = seen
    assert len(model.graphs.held) == 1
    assert all(torch.equal(a, b) for a, b in zip(plain, replayed, strict=True))
    model.graphs = None
    assert torch.equal(first(runner, [5, 4])[0], plain[0][2])


def guesser(model, context=64, least=0.0, **view):
    """A drafter that lets a model of the same vocabulary guess."""
    drafter, runner = Autoregressive(), Runner(model, PagedKV(model.config, model.dtype, model.device), context)
    drafter.runner, drafter.vocab, drafter.min_token_prob = runner.view(**view) if view else runner, 64, least
    return drafter


@pytest.fixture
def as_on_cuda(monkeypatch):
    """What no Triton kernel computes is PyTorch's."""
    monkeypatch.setattr(native, "active", native.REFERENCE)


GUESSED = {
    "greedy": {}, "filtered": {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "sure": {"temperature": 0.3, "least": 0.3}, "coins": {"temperature": 0.3, "least": 0.3, "rule": "rejection"},
    "short cache": {"view": {"text": "streaming:budget=12", "alone": True}},
    "view": {"temperature": 1.0, "view": {"text": "streaming:budget=24"}}, "edited": {"repetition_penalty": 1.3},
    "chosen keys": {"view": {"text": "retrieval:budget=24,chunk=4,recent=4,rebuild=8"}},
}  # fmt: skip


@pytest.mark.parametrize("params", GUESSED.values(), ids=GUESSED)
def test_a_draft_fed_on_the_device(folder, as_on_cuda, params):
    """It is that of a forward for each token: over a page's end, up to the last of room and context, where it ends
    early, and whatever was accepted of the one before."""
    params = dict(params)
    least, rule, view = params.pop("least", 0.0), Rule(params.pop("rule", "coupled")), params.pop("view", {})
    models, seqs, context, k = [load(str(folder), "bfloat16", "cpu").model for _ in range(2)], [], 44, 4
    models[1].graphs = Graphs(repeated)
    drafters = [guesser(model, context, least, **view) for model in models]
    assert [drafter.runner.chains for drafter in drafters] == [False, True]
    for i, (n, room) in enumerate([(5, 9), (30, 16), (41, 16)]):
        tokens = [(7 * i + j * j) % 64 for j in range(n)]
        own = SamplingParams(max_tokens=room, **params)
        seqs.append(Sequence(tokens, own, seed=i, eos=range(0, 64, 9), max_len=context))
    lengths = []
    for right in (2, k, 0):
        one, other = (drafter.propose([seq.shown(rule) for seq in seqs], k) for drafter in drafters)
        for seq, a, b in zip(seqs, one, other, strict=True):
            assert (a.tokens, a.trust) == (b.tokens, b.trust)
            assert (a.q is None) == (b.q is None) and (a.q is None or torch.equal(a.q, b.q))
            assert len(a) <= min(k, seq.room)
            held = [*seq.tokens, *a.tokens[:-1]]
            assert not a.tokens or drafters[1].runner.slots[seq.id].tokens[: len(held)] == held, "is read again"
            lengths.append(len(a))
            seq.tokens += [*a.tokens[:right], 1][: seq.room]
    assert len({*lengths}) > 2


def test_a_draft_that_is_nothing(folder, as_on_cuda):
    """Where no token can be chosen, none is fed either."""
    model = load(str(folder), "bfloat16", "cpu").model
    model.graphs, model.norm = Graphs(repeated), torch.full_like(model.norm, torch.nan)
    (draft,) = guesser(model).propose([Sequence(PROMPT, SamplingParams(max_tokens=9), seed=0).shown(Rule())], 3)
    assert draft.tokens == []


class Waits(TorchFunctionMode):
    """Counts what makes the host wait for a GPU: reading a tensor, and sending it numbers but by `upload`.

    Tables of the cache lie on the host, on a GPU too.
    """

    READS = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")

    def __init__(self, kv):
        super().__init__()
        self.kv, self.seen = kv, []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name, kwargs = func.__name__, kwargs or {}
        chooses = name in ("__getitem__", "__setitem__") and isinstance(args[1], list)
        if name in self.READS or chooses or (name == "tensor" and "device" in kwargs):
            own = {table.ids.untyped_storage().data_ptr() for table in self.kv.tables.values()}
            if chooses or name == "tensor" or args[0].untyped_storage().data_ptr() not in own:
                self.seen.append(name)
        return func(*args, **kwargs)


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 0.8, "top_k": 9, "min_p": 0.01}])
def test_a_draft_waits_once(folder, as_on_cuda, params):
    """For all of its tokens, and how sure each is; greedy requests and others in one batch."""
    model = load(str(folder), "bfloat16", "cpu").model
    for graphs, reads in ((None, 2 * 3), (Graphs(repeated), 2)):
        model.graphs, drafter = graphs, guesser(model)
        drafter.runner.kv._grow()  # the first slab
        seqs = [Sequence(PROMPT, SamplingParams(max_tokens=32, **own), seed=0) for own in (params, {})]
        with Waits(drafter.runner.kv) as waits:
            drafts = drafter.propose([seq.shown(Rule()) for seq in seqs], 3)
        assert [len(draft) for draft in drafts] == [3, 3]
        assert waits.seen == ["tolist"] * reads


def test_model_is_the_references(folder):
    """Close to what PyTorch computes of the same weights in float32."""
    model = load(str(folder), "bfloat16", "cpu").model
    ours = first(Runner(model, PagedKV(model.config, model.dtype, model.device)), PROMPT)
    plain = load(str(folder), "float32", "cpu").model
    theirs = first(Runner(plain, PagedKV(plain.config, plain.dtype, plain.device)), PROMPT)
    assert plain.head.kernel != "Triton"
    assert (ours - theirs).abs().max() < 0.05 * theirs.abs().max()


def test_tied_heads_give_embeddings():
    """Rows of packed weights, of every kind of packing, are those of the product."""
    from tests.test_triton import KINDS, quantised

    at = torch.tensor([3, 0, 32])
    for kind in KINDS:
        q = quantised(kind, 33, 64 if kind == "q6_k" else 96)
        assert torch.allclose(launch.rows(launch.pack(q, torch.device("cpu")), at), q.dense()[at], rtol=1e-6), kind


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("folder", {"temperature": 0.0}), ("folder", {"temperature": 1.0, "seed": 3}),
        ("folder", {"temperature": 0.8, "seed": 4, "top_p": 0.9}), ("mixture", {"temperature": 1.0, "seed": 3}),
    ],
    ids=["greedy", "sampled", "filtered", "mixture"],
)  # fmt: skip
def test_speculation_changes_no_token(kind, params, monkeypatch, request):
    monkeypatch.setattr("outrider.llm.check_exactness", lambda *_: "bitwise")  # takes minutes here
    folder = request.getfixturevalue(kind)
    llm, sampling = LLM(str(folder), device="cpu", dtype="bfloat16"), SamplingParams(max_tokens=5, **params)
    texts = []
    for method in (None, {"method": "lookahead", "num_speculative_tokens": 4}):
        llm.speculative_config = method
        texts.append(llm.generate(PROMPT, sampling)[0].token_ids)
    assert texts[0] == texts[1]
