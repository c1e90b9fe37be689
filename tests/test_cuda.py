"""A whole model on the GPU kernels, in Triton's interpreter: what it computes, Law 2, and speculation on and off."""

from __future__ import annotations

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.draft import Draft
from outrider.kv import OffloadKV, PagedKV
from outrider.load import load
from outrider.ops.triton import launch
from outrider.runner import Runner
from outrider.sequence import Sequence

PROMPT = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]


@pytest.fixture(autouse=True)
def emulated():
    with launch.emulated():
        yield


@pytest.fixture(scope="module")
def folder(make_checkpoint):
    """One layer of one head of each kind: the interpreter takes a while for every program."""
    return make_checkpoint(
        dtype=torch.bfloat16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=32
    )


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


@pytest.mark.parametrize("scheme", [None, "int8", "int4"])
@pytest.mark.parametrize("cache", [PagedKV, OffloadKV])
def test_model(folder, scheme, cache):
    """Every node of a tree has the bits of plain decoding, read at once or token by token, alone or beside others."""
    if scheme and cache is OffloadKV:
        pytest.skip("the cache knows no formats")
    checkpoint = load(str(folder), "bfloat16", "cpu", quantization=scheme)
    model = checkpoint.model
    assert model.head.kernel == "Triton"
    runner = Runner(model, cache(model.config, model.dtype, model.device))
    assert runner.follows_paths
    tree = Draft([9, 4, 3, 2], [-1, -1, 1, 0])
    whole = first(runner, PROMPT, tree, beside=[1, 2, 3])
    for node, path in [(0, []), (2, [4]), (3, [4, 3]), (4, [9, 2])]:
        assert torch.equal(first(runner, PROMPT + path)[0], whole[node]), path
    seq = Sequence(PROMPT[:1], SamplingParams(max_tokens=32), seed=0)
    with torch.inference_mode():
        for token in PROMPT[1:]:
            runner.extend([seq])
            seq.tokens.append(token)
        assert torch.equal(runner.extend([seq]).logits[0][0], whole[0])
    runner.free(seq)


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
    "params",
    [{"temperature": 0.0}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.8, "seed": 4, "top_p": 0.9}],
    ids=["greedy", "sampled", "filtered"],
)
def test_speculation_changes_no_token(folder, params, monkeypatch):
    monkeypatch.setattr("outrider.llm.check_exactness", lambda *_: "bitwise")  # takes minutes here
    llm, sampling = LLM(str(folder), device="cpu", dtype="bfloat16"), SamplingParams(max_tokens=5, **params)
    texts = []
    for method in (None, {"method": "lookahead", "num_speculative_tokens": 4}):
        llm.speculative_config = method
        texts.append(llm.generate({"prompt_token_ids": PROMPT}, sampling).outputs[0].token_ids)
    assert texts[0] == texts[1]
