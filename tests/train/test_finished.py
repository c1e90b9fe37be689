"""Targets that scale or cap their logits: heads learn their law, not that of the bare products, and draft by it."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from helpers import random_eagle3, random_recurrent

from outrider import LLM
from outrider.drafters.eagle3 import Head as Eagle3Head
from outrider.drafters.recurrent import Head as RecurrentHead
from outrider.kv import Entry, Plan
from outrider.ops import Linear
from outrider.train import eagle3, medusa, recurrent
from outrider.train.heads import CrossEntropy, finished, own_head
from outrider.train.settings import Eagle3Settings, RecurrentSettings, Settings

TARGETS = {
    "granite": {"logits_scaling": 4.0, "attention_multiplier": 0.1},
    "gemma2": {"final_logit_softcapping": 3.0, "query_pre_attn_scalar": 16},
}


@pytest.fixture(params=TARGETS)
def llm(request, make_checkpoint) -> LLM:
    return LLM(make_checkpoint(request.param, **TARGETS[request.param]), device="cpu", dtype="float32")


def test_gradients(llm):
    """Those of PyTorch, and logits are the model's."""
    model, noise = llm.runner.model, torch.Generator().manual_seed(0)
    x, law = torch.randn(5, 64, generator=noise), torch.randn(5, 128, generator=noise).softmax(-1)
    weight, found = own_head(llm), list[list[torch.Tensor]]()
    torch.testing.assert_close(finished(x @ weight.T, model.config), model.logits(x))
    for loss in (
        lambda x, w: CrossEntropy.apply(x, w, law, model.config),
        lambda x, w: F.cross_entropy(finished(x @ w.T, model.config), law, reduction="sum"),
    ):
        given = x.clone().requires_grad_(), weight.clone().requires_grad_()
        value = loss(*given)
        value.backward()
        found.append([value.detach(), *(each.grad for each in given)])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(
    "trainer, settings", [(eagle3.Trainer, Eagle3Settings), (recurrent.Trainer, RecurrentSettings)]
)
def test_what_is_learnt_is_the_target_s_law(llm, tmp_path, monkeypatch, trainer, settings):
    """A guess from the very state costs no more than the law's own entropy."""
    noise, lines = torch.Generator().manual_seed(1), list[str]()
    for _ in range(60):
        p, o = torch.randint(128, (2, 20), generator=noise).tolist()
        lines.append(json.dumps({"p": p, "o": o}))
    (said := tmp_path / "said.jsonl").write_text("\n".join(lines) + "\n")
    small = settings(vocab=128, depth=2, length=40, batch=200, replay=1)
    made = trainer([said], tmp_path / "run", small, llm=llm)
    batch = made._load(made._batches()[0])
    law = llm.runner.model.logits(batch.last).softmax(-1)
    own = batch.last.clone().requires_grad_()
    monkeypatch.setattr(made.head, "unroll", lambda batch: [(own, torch.arange(len(batch.ids)))])
    assert made.learn(batch) == pytest.approx(float(torch.special.entr(law).sum(-1).mean()), rel=1e-4)


@pytest.mark.parametrize("walks", [True, False])
def test_an_eagle3_head_s_guesses_are_finished(llm, tmp_path, walks):
    head = Eagle3Head(random_eagle3(llm.checkpoint.path, where=tmp_path), llm.runner)
    head.walk = head.walk if walks else None
    given = [5], torch.randn(1, 64, generator=torch.Generator().manual_seed(0)), [0], Plan([Entry(0, 0, 1, 0)]), [0]
    _, ours = head.read(*given)
    head.finish = lambda products: products
    _, bare = head.read(*given)
    torch.testing.assert_close(ours, llm.runner.model.finish(bare))
    assert not torch.allclose(ours, bare)


def test_a_recurrent_head_s_guesses_are_finished(llm, tmp_path):
    """A head that passes the state on says of it what the target does; the native call for all levels would not."""
    path = random_recurrent(llm.checkpoint.path, tmp_path, scale=0.0, own=not llm.runner.model.config.tied)
    head, state = RecurrentHead(path, llm.runner), torch.randn(1, 64, generator=torch.Generator().manual_seed(0))
    head.projection = Linear(own_head(llm)[head.words])
    torch.testing.assert_close(head.read([5], state)[1], llm.runner.model.logits(state)[:, head.words])
    assert head.recurrence is None


def test_medusa_learns_by_the_logits_that_it_drafts_by(llm):
    """At first, what the target says from the same state."""
    model, states = llm.runner.model, torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    heads = medusa.Heads(llm, Settings(heads=1, sees_token=False))
    torch.testing.assert_close(heads.logits(0, states, torch.tensor([1, 2, 3])), model.logits(states))
