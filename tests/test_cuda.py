"""A whole model on the GPU kernels, in Triton's interpreter: what it computes, Law 2, and speculation on and off."""

from __future__ import annotations

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.draft import Draft, Verdict
from outrider.kv import OffloadKV, PagedKV
from outrider.kv.rows import NORMED
from outrider.load import load
from outrider.ops import Graphs
from outrider.ops.triton import launch
from outrider.runner import Runner
from outrider.sequence import Sequence

PROMPT = [5, 6, 7, 5, 6]


@pytest.fixture(autouse=True)
def emulated():
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
    rows = [tap.read(seq.id, 0, 99) for tap, seq in zip(taps, seqs, strict=True)]
    assert len(rows[0][1]) > 30
    assert torch.equal(rows[0][1], rows[1][1])
    sizes = sorted(key[0][0][1] for key in graphs.held)
    assert sizes[0] == 2
    assert set(sizes) <= {2, 4, 8, 32}
    assert len(graphs.held) < 6, "every step has got a graph of its own"


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
