"""Recurrent heads: what they guess is what their layer says, what learns computes what drafts; others are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from shutil import copytree

import pytest
import torch
import torch.nn.functional as F
from helpers import converse, count_forwards, random_recurrent, run, watched
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from outrider import LLM, SamplingParams
from outrider.cli import app
from outrider.drafters.recurrent import Recurrent
from outrider.errors import CheckpointError, ConfigError, ModelNotFound, OutriderError, VocabularyMismatch
from outrider.files import OURS
from outrider.find import companions, find, kind_of
from outrider.ops import native
from outrider.sequence import Sequence
from outrider.train.recurrent import Trainer
from outrider.train.settings import RecurrentSettings
from outrider.verify import COUPLED

TEXT = [5, 9, 3, 70, 2, 2, 8, 1, 33, 4, 6, 100, 17]
GREEDY = SamplingParams(temperature=0, max_tokens=40)


def reference(folder: Path, target: Path, tokens: list[int], drafted: list[int]) -> Tensor:
    """(1 + drafted, draft vocabulary) logits after a text and each drafted token: plain PyTorch, and transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    w = load_file(folder / "model.safetensors")
    words = torch.arange(len(w["d2t"])) + w["d2t"]
    with torch.no_grad():
        state = model.model(torch.tensor([tokens[:-1]])).last_hidden_state[0, -1]
        logits = []
        for token in [tokens[-1], *drafted]:
            e = model.model.embed_tokens.weight[token]
            e = e * torch.rsqrt(e.square().mean() + model.config.rms_norm_eps) * w["norm.weight"]
            x = torch.cat([e, state])
            gated = F.silu(w["mlp.gate_proj.weight"] @ x) * (w["mlp.up_proj.weight"] @ x)
            state = state + w["mlp.down_proj.weight"] @ gated
            logits.append(w.get("lm_head.weight", model.model.embed_tokens.weight[words]) @ state)
    return torch.stack(logits)


def step(llm: LLM, drafter: Recurrent, seq: Sequence, token: int) -> None:
    """One plain step that the drafter sees, whatever the target would have chosen."""
    from outrider.draft import Draft, Verdict

    output = llm.runner.extend([seq], [Draft()])
    seq.tokens.append(token)
    drafter.observe([seq.shown(COUPLED)], [Verdict([], [token])], output)


@pytest.mark.parametrize("own", [True, False], ids=["its projection", "the target's"])
def test_logits_are_the_reference_s(make_checkpoint, own):
    target = make_checkpoint(tie_word_embeddings=True)
    folder = random_recurrent(target, own=own, scale=0.1)
    llm = LLM(target, device="cpu", dtype="float32")
    drafter = Recurrent(model=str(folder), width=1, depth=4)
    drafter.attach(llm.runner, lambda name: llm.runner)
    drafter.head.recurrence = None  # level by level
    seen, seq = watched(drafter), Sequence(TEXT[:-1], GREEDY, 0)
    assert not drafter.propose([seq.shown(COUPLED)], 4)[0].tokens, "no state was seen"
    for token in (TEXT[-1], 44, 90):
        step(llm, drafter, seq, token)
        seen.clear()
        (draft,) = drafter.propose([seq.shown(COUPLED)], 4)
        wanted = reference(folder, target, seq.tokens, draft.tokens)[:4]
        assert len(draft) == 4 and draft.is_chain
        torch.testing.assert_close(torch.cat(seen), wanted, rtol=5e-3, atol=5e-3)
        assert draft.tokens == drafter.words[wanted.argmax(-1)].tolist()
    seq.tokens.append(3)
    assert not drafter.propose([seq.shown(COUPLED)], 4)[0].tokens, "this token's state was not seen"
    drafter.forget(seq)
    assert not drafter.seen
    llm.runner.free(seq)


def test_a_batch_drafts_as_each_alone(make_checkpoint):
    target = make_checkpoint()
    llm = LLM(target, device="cpu", dtype="float32")
    drafter = Recurrent(model=str(random_recurrent(target, scale=0.05)), width=3, depth=3)
    drafter.attach(llm.runner, lambda name: llm.runner)
    seqs = [Sequence(TEXT[:n], GREEDY, 0) for n in (3, 6, 9)]
    for seq in seqs:
        step(llm, drafter, seq, 7)
    shown = [seq.shown(COUPLED) for seq in seqs]
    together = drafter.propose(shown, 9)
    assert [len(draft) for draft in together] == [9] * 3 and not together[0].is_chain
    for one, draft in zip(shown, together, strict=True):
        (alone,) = drafter.propose([one], 9)
        assert (alone.tokens, alone.parents) == (draft.tokens, draft.parents)
    for seq in seqs:
        llm.runner.free(seq)


SAMPLED = SamplingParams(temperature=0.9, top_k=20, top_p=0.9, min_p=0.01, seed=3, max_tokens=40)
FEW = SamplingParams(temperature=0.7, seed=5, max_tokens=3)  # room for two levels and no more
EDITED = SamplingParams(temperature=0.7, seed=5, max_tokens=40, repetition_penalty=1.3)


@pytest.mark.skipif(native.kernels is None, reason="there are no kernels here")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_one_native_call_grows_the_same_trees(make_checkpoint, monkeypatch, tmp_path, dtype):
    """Node for node what trees.py grows: greedy, sampled, near an output's end; edited requests go that way."""
    target = find("tiny") if dtype == "bfloat16" else make_checkpoint(dtype=getattr(torch, dtype))
    llm, head = LLM(target, device="cpu", dtype=dtype), random_recurrent(target, tmp_path, scale=0.05)
    for p_min in (0.0, 0.02):
        drafter = Recurrent(model=str(head), width=3, depth=3, p_min=p_min)
        drafter.attach(llm.runner, lambda name: llm.runner)
        assert drafter.head.recurrence
        levels, seqs = watched(drafter), list[Sequence]()
        for n, params in enumerate((GREEDY, SAMPLED, FEW)):
            seqs.append(Sequence(TEXT[: 4 + 3 * n], params, n))
            step(llm, drafter, seqs[-1], 7)
        unseen = Sequence(TEXT, GREEDY, 0)
        shown = [own.shown(COUPLED) for own in (seqs[0], unseen, *seqs[1:])]
        ours = drafter.propose(shown, 9)
        assert not levels and not ours[1].tokens and (p_min or max(len(draft) for draft in ours) == 9)
        assert max(len(ours[3].path_to(node)) for node in range(len(ours[3]))) == 1
        with monkeypatch.context() as patch:
            patch.setattr(drafter.head, "recurrence", None)
            theirs = drafter.propose(shown, 9)
        for one, other in zip(ours, theirs, strict=True):
            assert (one.tokens, one.parents) == (other.tokens, other.parents)
            assert one.trust == pytest.approx(other.trust or [], rel=1e-5)
        edited = Sequence(TEXT, EDITED, 0)
        step(llm, drafter, edited, 7)
        levels.clear()
        assert drafter.propose([edited.shown(COUPLED)], 4)[0].tokens and levels
        for seq in (*seqs, edited):
            llm.runner.free(seq)


def spoiled(folder: Path, where: Path, tensors: dict[str, Tensor | None], about: dict) -> str:
    """A copy of a head with other tensors (None: without) and another config."""
    where.mkdir()
    named = {k: t for k, t in (load_file(folder / "model.safetensors") | tensors).items() if t is not None}
    save_file(named, where / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | about
    (where / "config.json").write_text(json.dumps(config))
    return str(where)


WRONG = [
    ({}, {"hidden_size": 32}, CheckpointError, "width 32"),
    ({}, {"vocab_size": 77}, VocabularyMismatch, "77 tokens"),
    ({}, {"draft_vocab_size": "many"}, CheckpointError, "draft_vocab_size"),
    ({}, {"draft_vocab_size": 10**9}, CheckpointError, "draft_vocab_size"),
    ({}, {"intermediate_size": 41}, CheckpointError, "gate_proj"),
    ({"norm.weight": None}, {}, CheckpointError, "norm.weight is missing"),
    ({"norm.weight": torch.full((64,), torch.nan)}, {}, CheckpointError, "finite"),
    ({"mlp.down_proj.weight": torch.zeros(64, 40, dtype=torch.int32)}, {}, CheckpointError, "finite floats"),
    ({"mlp.gate_proj.weight": None}, {}, CheckpointError, "no recurrent head"),
    ({"d2t": torch.full((48,), 1000)}, {}, VocabularyMismatch, "d2t"),
    ({"d2t": None}, {}, VocabularyMismatch, "d2t"),
    ({"d2t": torch.tensor(1)}, {}, VocabularyMismatch, "d2t"),
    ({"norm.weight": torch.zeros(64).to(torch.float8_e4m3fn)}, {}, CheckpointError, "floats of 16 bits"),
    ({"more": torch.zeros(3)}, {}, CheckpointError, "more has no place"),
    ({"lm_head.weight": None}, {}, CheckpointError, "no lm_head.weight"),
]


@pytest.mark.parametrize(("tensors", "about", "error", "said"), WRONG, ids=lambda x: x if isinstance(x, str) else "")
def test_what_does_not_fit_is_refused(make_checkpoint, tmp_path, tensors, about, error, said):
    target = make_checkpoint()
    llm = LLM(target, device="cpu", dtype="float32")
    assert llm.runner.model.config.hidden_size == 64 and not llm.runner.model.config.tied
    name = spoiled(random_recurrent(target), tmp_path / "head", tensors, about)
    with pytest.raises(error, match=said):
        llm.speculative_config = {"method": "recurrent", "model": name}


def test_options_are_checked(tmp_path):
    for options in ({}, {"model": "x", "width": 0}, {"model": "x", "depth": 0}, {"model": "x", "p_min": 1.0}):
        with pytest.raises(ConfigError, match="recurrent"):
            LLM("tiny", speculative_config={"method": "recurrent", **options})
    (tmp_path / "config.json").write_text('{"architectures": ["RecurrentHead"]}')
    for name, error in (("no/such", ModelNotFound), (str(tmp_path), CheckpointError)):
        with pytest.raises(error):
            LLM("tiny", speculative_config={"method": "recurrent", "model": name})


def test_auto_finds_the_head_of_a_model_s_folder(make_checkpoint, tmp_path):
    """And passes over neighbours that are damaged, half written, or lead nowhere."""
    target = copytree(make_checkpoint(seed=5), tmp_path / "model")
    head = random_recurrent(target, target)
    for name, text in (("cut", "{"), ("listed", "[]"), ("partial", "{}"), ("gone", '{"architectures": ["X"]}')):
        (target / name).mkdir()
        (target / name / "config.json").write_text(text)
    (target / "partial" / OURS).touch()
    (target / "gone" / "other.safetensors").symlink_to(tmp_path / "nowhere")
    (target / "consolidated.safetensors").symlink_to(tmp_path / "nowhere")
    assert kind_of(head) == "recurrent" and companions(target) == [str(head)]
    llm = LLM(target, device="cpu", dtype="float32", speculative_config="auto")
    assert "recurrent" in [source.name for source in llm.engine.drafter.sources]
    with pytest.raises(OutriderError, match=r"a head of width 64, .* use one made for it"):
        LLM("tiny", speculative_config={"method": "auto", "model": str(head)})


def test_auto_finds_an_embedded_head_that_fits(make_checkpoint, tmp_path, monkeypatch):
    """Of its width and vocabulary; the given one's name is not asked twice, and named drafters have the say."""
    target, other = make_checkpoint(seed=6), make_checkpoint(seed=6, hidden_size=48, vocab_size=160)
    embedded = random_recurrent(target, tmp_path)
    monkeypatch.setattr("outrider.find.ASSETS", tmp_path)

    def heads(target: Path, **options) -> list[str]:
        llm = LLM(target, device="cpu", dtype="float32", speculative_config={"method": "auto", **options})
        return [part.model for part in llm.engine.drafter.parts if part.name == "recurrent"]

    assert heads(target) == ([str(embedded)] if native.active != native.REFERENCE else [])
    assert heads(target, model=embedded.name) == [embedded.name]
    assert heads(target, model=f"{embedded}/") == [f"{embedded}/"]
    assert heads(target, drafters=[{"method": "ngram"}]) == heads(other) == []


def test_auto_asks_it(make_checkpoint, monkeypatch):
    target = make_checkpoint()
    llm, plain = (LLM(target, device="cpu", dtype="float32") for _ in range(2))
    llm.speculative_config = {"method": "auto", "model": str(random_recurrent(target))}
    count_forwards(llm, monkeypatch)
    (ours,), (theirs,) = (run(own, [(TEXT, replace(GREEDY, max_tokens=60))]) for own in (llm, plain))
    assert ours.token_ids == theirs.token_ids
    assert any(source.rounds for source in llm.engine.drafter.dear)


SMALL = RecurrentSettings(vocab=96, wide=24, depth=3, length=40, batch=200, replay=1, lr=5e-3)


@pytest.fixture(scope="module")
def llm(make_checkpoint) -> LLM:
    return LLM(make_checkpoint(seed=4, tie_word_embeddings=True), device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def said(llm, tmp_path_factory) -> Path:
    return converse(llm, tmp_path_factory.mktemp("said") / "said.jsonl")


@pytest.mark.parametrize("train_head", [False, True])
def test_what_is_exported_drafts_what_was_trained(llm, said, tmp_path, train_head):
    """It learns; the drafter's logits along a chain are those of the training-time test on the same tokens."""
    settings = RecurrentSettings(**{**vars(SMALL), "train_head": train_head})
    trainer = Trainer([said], tmp_path / "run", settings, llm=llm)
    lines, losses = list[dict](), list[float]()
    while trainer.counts["steps"] < 8 or len(losses) < 2:  # on a busy machine
        lines += trainer.run(trainer.seconds / 60 + 0.05, every=0.01)
        losses = [line["loss"] for line in lines if line["loss"] is not None]  # else it went back to the last state
    assert losses[-1] < losses[0] and len(lines[-1]["right"]) == 3
    trainer.export(tmp_path / "head")
    assert ("lm_head.weight" in load_file(tmp_path / "head" / "model.safetensors")) == train_head
    for weight in trainer.head.parameters():
        weight.data.copy_(weight.data.bfloat16() if weight is not trainer.head.lm_head.weight or train_head else weight)
    drafter = Recurrent(model=str(tmp_path / "head"), depth=3, width=1)
    drafter.attach(llm.runner, lambda name: llm.runner)
    drafter.head.recurrence = None  # level by level
    text = torch.randint(128, (12,), generator=torch.Generator().manual_seed(2)).tolist()
    seen, seq = watched(drafter), Sequence(text[:-1], GREEDY, 0)
    step(llm, drafter, seq, text[-1])
    (draft,) = drafter.propose([seq.shown(COUPLED)], 3)
    batch = trainer.read([(text + draft.tokens, 0, 3)])
    with torch.no_grad():
        for s, (states, about) in enumerate(trainer.head.unroll(batch)):
            ours = F.linear(states[about == 11 + s], trainer.head.lm_head.weight)
            torch.testing.assert_close(seen[s], ours, rtol=1e-3, atol=1e-3)
    llm.runner.free(seq)
    assert "| tokens |" in (tmp_path / "head" / "README.md").read_text()
    llm.speculative_config = {"method": "recurrent", "model": str(tmp_path / "head")}
    (output,) = run(llm, [(text, SamplingParams(temperature=0, max_tokens=9))])
    assert output.metrics["speculative_decoding"]["num_draft_tokens"]
    llm.speculative_config = None
    again = Trainer([said], tmp_path / "run", settings, llm=llm)
    assert again.counts == trainer.counts
    started = Trainer([said], tmp_path / "other", replace(settings, start=str(tmp_path / "head")), llm=llm)
    for a, b in zip(started.head.parameters(), trainer.head.parameters(), strict=True):  # rounded as exported
        assert torch.equal(a, b)
    with pytest.raises(ConfigError, match="begun with wide 24"):
        Trainer([said], tmp_path / "run", RecurrentSettings(**{**vars(settings), "wide": 25}), llm=llm)


def test_the_command(said, tmp_path, make_checkpoint):
    model = make_checkpoint(seed=4, tie_word_embeddings=True)
    arguments = ["train", "recurrent", str(tmp_path / "run"), str(said), "--minutes", "0.02", "--every", "0.01"]
    arguments += ["--model", str(model), "--vocab", "96", "--wide", "16", "--length", "40", "--batch", "200"]
    done = CliRunner().invoke(app, [*arguments, "--dtype", "float32"])
    assert done.exit_code == 0, done.output
    assert kind_of(tmp_path / "run" / "head") == "recurrent" and "--speculate recurrent:model=" in done.output
    for option, wrong in (("--wide", "0"), ("--vocab", "1000"), ("--batch", "0")):
        at = arguments.index(option) + 1
        done = CliRunner().invoke(
            app, [*arguments[:2], str(tmp_path / "other"), *arguments[3:at], wrong, *arguments[at + 1 :]]
        )
        assert done.exit_code == 1 and option[2:] in str(done.exception)
