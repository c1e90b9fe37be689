"""Training an EAGLE-3 head: what learns computes what drafts, runs go on where they were, and the curve is told."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import converse, run, watched
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from outrider import LLM, SamplingParams
from outrider.cli import app
from outrider.drafters.eagle3 import Eagle3
from outrider.engine import engine
from outrider.errors import CheckpointError, ConfigError, OutOfMemory
from outrider.files import locked
from outrider.find import find
from outrider.sequence import Sequence
from outrider.train import heads
from outrider.train.conversations import Template, read_prompts, write
from outrider.train.eagle3 import Batch, Trainer
from outrider.train.heads import HELD_OUT
from outrider.train.recurrent import Trainer as Other
from outrider.train.settings import ConversationSettings, Eagle3Settings, RecurrentSettings
from outrider.verify import COUPLED

SMALL = Eagle3Settings(vocab=96, depth=3, length=40, prompt=8, batch=200, first=400, replay=1)


@pytest.fixture(scope="module")
def llm(make_checkpoint) -> LLM:
    return LLM(make_checkpoint(seed=4), device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def said(llm, tmp_path_factory) -> Path:
    return converse(llm, tmp_path_factory.mktemp("said") / "said.jsonl")


@pytest.fixture(scope="module")
def trained(llm, said, tmp_path_factory) -> tuple[Trainer, list[dict]]:
    trainer = Trainer([said], tmp_path_factory.mktemp("run") / "run", SMALL, llm=llm)
    lines = list[dict]()
    while trainer.counts["steps"] < 8 or len(losses(lines)) < 2:  # on a busy machine
        lines += trainer.run(trainer.seconds / 60 + 0.05, every=0.01)
    return trainer, lines


def losses(lines: list[dict]) -> list[float]:
    """But for where it went back to the last state."""
    return [line["loss"] for line in lines if line["loss"] is not None]


def test_a_run_learns_and_tells_its_curve(trained):
    trainer, lines = trained
    assert lines[-1]["steps"] > 3 and lines[-1]["tokens"] >= lines[-1]["read"] > 400
    assert losses(lines)[-1] < losses(lines)[0] and len(lines[-1]["right"]) == 3
    log = (trainer.output / "log.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in log] == lines
    assert int(trainer.head.t2d.sum()) == 96 and len(set(trainer.head.tokens.tolist())) == 96


def test_what_is_exported_drafts_what_was_trained(trained, llm, tmp_path):
    """The drafter's logits along a chain are those of the training-time test on the same tokens."""
    trainer, _ = trained
    trainer.export(tmp_path / "head")
    for weight in trainer.head.parameters():
        weight.data.copy_(weight.data.bfloat16())
    drafter = Eagle3(model=str(tmp_path / "head"), depth=3, width=1)
    drafter.attach(llm.runner, lambda name: llm.runner)
    seen = watched(drafter)
    text = torch.randint(128, (12,), generator=torch.Generator().manual_seed(2)).tolist()
    seq = Sequence(text[:-1], SamplingParams(temperature=0), 0)
    llm.runner.extend([seq])
    seq.tokens.append(text[-1])
    (draft,) = drafter.propose([seq.shown(COUPLED)], 3)
    batch = trainer.read([(text + draft.tokens, 0, 3)])
    with torch.no_grad():
        for s, (states, about) in enumerate(trainer.head.unroll(batch)):
            ours = torch.nn.functional.linear(states[about == 11 + s], trainer.head.lm_head.weight)
            torch.testing.assert_close(seen[s], ours, rtol=1e-3, atol=1e-3)
    llm.runner.free(seq)
    card = (tmp_path / "head" / "README.md").read_text()
    assert "| tokens |" in card and card.count("\n| ") > 2
    llm.speculative_config = {"method": "eagle3", "model": str(tmp_path / "head")}
    plain = run(llm, [(text, SamplingParams(temperature=0, max_tokens=9))])
    assert plain[0].metrics["speculative_decoding"]["num_draft_tokens"]
    llm.speculative_config = None


def test_the_first_weights_know_something(tmp_path):
    """Before any step the least squares guess far better than chance, and the engine accepts some of it."""
    llm, said = LLM("tiny", device="cpu", dtype="float32"), tmp_path / "said.jsonl"
    params = SamplingParams(temperature=0, max_tokens=90)
    prompts = [llm.encode(text) for text in ("Once upon a time", "One day, Tom", "Lily had a cat", "The big dog")]
    answers = llm.generate(prompts, params)
    lines = [
        json.dumps({"p": prompt + answer.token_ids[:at], "o": answer.token_ids[at:], "t": 0})
        for prompt, answer in zip(prompts, answers, strict=True)
        for at in range(12)
    ]
    said.write_text("\n".join(lines) + "\n")
    settings = Eagle3Settings(model="tiny", vocab=2048, depth=2, length=100, batch=700, first=1400)
    trainer = Trainer([said], tmp_path / "run", settings, llm=llm)
    trainer.export(tmp_path / "head")
    llm.speculative_config = {"method": "eagle3", "model": str(tmp_path / "head")}
    outputs = run(llm, [(prompt, params) for prompt in prompts])
    assert [out.token_ids for out in outputs] == [answer.token_ids for answer in answers]
    assert sum(out.metrics["speculative_decoding"]["num_accepted_draft_tokens"] for out in outputs) > 9


def test_a_run_that_learns_too_fast_goes_back(llm, said, tmp_path, monkeypatch):
    """To the weights of the last state, and at half the rate; a run that is resumed knows of it."""
    trainer = Trainer([said], tmp_path / "run", SMALL, llm=llm)
    measured = iter([1.5, 1.44, 1.6, 1.5, 1.4, 1.59, 1.58, 1.58, 1.58])
    monkeypatch.setattr(trainer, "measure", lambda: ([0.4], next(measured)))
    for _ in range(3):
        trainer.learn(Batch.load(trainer._batches()[0]))
        good = trainer._report([1.0])
    before = {name: t.clone() for name, t in trainer.head.state_dict().items()}
    for _ in range(2):
        for weight in trainer.head.midlayer.parameters():
            weight.data.normal_().mul_(9)
        bad = trainer._report([1.0])
    assert good["loss"] == 1.0 and bad["loss"] is None and bad["back_to_rate"] == SMALL.lr / 4
    assert all(torch.equal(before[name], t) for name, t in trainer.head.state_dict().items())
    again = Trainer([said], trainer.output, SMALL, llm=llm)
    assert (again.rate, again.best) == (0.25, trainer.best) and torch.equal(again.head.fc.weight, before["fc.weight"])
    assert trainer._report([math.nan])["back_to_rate"] == SMALL.lr / 8, "it guesses well, but has learnt nothing"
    assert trainer._report([1.0]).keys() == good.keys()
    for own in (trainer, again):  # a state that was loaded has groups of its own
        for group in own._groups():
            group["lr"] = 7.0
        monkeypatch.setattr(own, "measure", lambda: ([0.4], 1.7))
        own.seconds = 0.0
        assert list(own.run(0.02)) and all(group["lr"] <= SMALL.lr / 2 for group in own._groups())
    trainer.export(tmp_path / "head")
    rows = (tmp_path / "head" / "README.md").read_text()
    assert rows.count("| 1.00 |") == 4 and "None" not in rows and "nan" not in rows.lower()


def test_the_first_state_is_before_the_first_step(llm, said, tmp_path, monkeypatch):
    """So that there is something to go back to."""
    trainer = Trainer([said], tmp_path / "run", SMALL, llm=llm)
    first = {name: t.clone() for name, t in trainer.head.state_dict().items()}
    monkeypatch.setattr(trainer, "learn", lambda _: trainer.head.fc.weight.data.fill_(math.nan).max().item())
    assert all(line["loss"] is None for line in trainer.run(0.02))
    assert all(torch.equal(first[name], t) for name, t in trainer.head.state_dict().items())
    json.loads((trainer.output / "log.jsonl").read_text(), parse_constant=pytest.fail)


def test_a_run_starts_from_a_head(trained, llm, said, tmp_path):
    """From what was exported, also without a projection; not from one that these settings would not make."""
    trainer, _ = trained
    trainer.export(tmp_path / "head")
    start = replace(SMALL, start=str(tmp_path / "head"))
    again = Trainer([said], tmp_path / "run", start, llm=llm)
    for (name, a), b in zip(again.head.state_dict().items(), trainer.head.state_dict().values(), strict=True):
        assert torch.equal(a, b.bfloat16().to(b.dtype) if b.is_floating_point() else b), name
    assert again.measure()[0] == pytest.approx(trainer.measure()[0], abs=0.03)
    about = json.loads((tmp_path / "head" / "config.json").read_text())
    for changed, what in (
        ({"vocab": 95}, "d2t is 96, .* 95"),
        ({"taps": (0, 1, 2)}, "sees layers"),
        ({"heads": 2}, "num_heads 4, .* 2"),
    ):
        with pytest.raises(ConfigError, match=what):
            Trainer([said], tmp_path / "other", replace(start, **changed), llm=llm)
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    for name, shift in (("d2t", -50), ("more", 0)):
        save_file({**tensors, name: tensors["d2t"] + shift}, tmp_path / "head" / "model.safetensors")
        with pytest.raises(ConfigError, match="another vocabulary" if shift else "has a more; no head"):
            Trainer([said], tmp_path / "other", start, llm=llm)
    (tmp_path / "head" / "config.json").write_text(json.dumps({**about, "vocab_size": 256}))
    save_file(tensors, tmp_path / "head" / "model.safetensors")
    with pytest.raises(ConfigError, match="another vocabulary"):
        Trainer([said], tmp_path / "other", start, llm=llm)
    (tmp_path / "head" / "config.json").write_text(json.dumps(about))
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "head" / "model.safetensors")
    assert Trainer([said], tmp_path / "third", start, llm=llm).measure()[0] == pytest.approx(
        again.measure()[0], abs=0.03
    )
    fc = tensors.pop("fc.weight")
    for wrong in ({}, {"fc.weight": fc * math.nan}, {"fc.weight": fc.to(torch.int8)}):
        save_file({**tensors, **wrong}, tmp_path / "head" / "model.safetensors")
        with pytest.raises(CheckpointError, match=r"fc\.weight"):
            Trainer([said], tmp_path / "fourth", start, llm=llm)
    for changed, what in (
        ({"vocab_size": "128"}, "vocab_size"), ({"rms_norm_eps": 0.5}, "eps 0.5"), ({"head_dim": 8}, "head_dim"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, "rope .*7.0"),
    ):  # fmt: skip
        (tmp_path / "head" / "config.json").write_text(json.dumps({**about, **changed}))
        with pytest.raises((ConfigError, CheckpointError), match=what):
            Trainer([said], tmp_path / "fifth", start, llm=llm)


@pytest.mark.parametrize("method", [Trainer, Other])
def test_a_target_that_turns_part_of_its_heads(make_checkpoint, said, tmp_path, method):
    """The head turns all of its own, as published ones do: what was trained is what loads."""
    rope = {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    glm = LLM(make_checkpoint("glm4", seed=4, pad_token_id=0, rope_parameters=rope), device="cpu", dtype="float32")
    settings = SMALL if method is Trainer else RecurrentSettings(vocab=96, depth=3, length=40, batch=200, replay=1)
    trainer = method([said], tmp_path / "run", settings, llm=glm)
    assert list(trainer.run(0.02, every=0.001))
    trainer.export(tmp_path / "head")
    ids = [1, 5, 9, 30]
    plain = glm.generate([ids], max_tokens=12, temperature=0)[0].token_ids
    glm.speculative_config = {"method": trainer.method, "model": str(tmp_path / "head")}
    assert glm.generate([ids], max_tokens=12, temperature=0)[0].token_ids == plain
    if method is Trainer:
        drafter = glm.engine.drafter
        theirs, own = (head.rotary([0, 3, 7], [1] * 3) for head in (drafter.head, trainer.head))
        assert all(torch.equal(a, b) for a, b in zip(theirs, own, strict=True))


def test_a_clock_that_is_set_is_no_training(llm, said, tmp_path, monkeypatch):
    hours = itertools.count(step=3600.0)
    monkeypatch.setattr("time.time", lambda: next(hours))
    trainer = Trainer([said], tmp_path / "run", SMALL, llm=llm)
    list(trainer.run(0.0001))
    assert trainer.seconds < 3600


def test_a_file_by_another_name_is_not_read_again(llm, said, tmp_path, monkeypatch):
    trainer = Trainer([said], tmp_path / "run", SMALL, llm=llm)
    while trainer.fresh():
        pass
    list(trainer.run(0.0001))
    monkeypatch.chdir(said.parent)
    assert Trainer([Path(said.name)], tmp_path / "run", SMALL, llm=llm).fresh() is None


def test_a_file_that_has_moved_is_not_read_again(llm, said, tmp_path):
    """It goes on where it was, and another one is read from its first line."""
    lines = said.read_text().splitlines(keepends=True)
    (file := tmp_path / "said.jsonl").write_text("".join(lines[:20]))
    trainer = Trainer([file], tmp_path / "run", SMALL, llm=llm)
    while trainer.fresh():
        pass
    list(trainer.run(0.0001))
    taken = trainer.taken[str(file)]
    moved = file.rename(tmp_path / "moved.jsonl")
    again = Trainer([moved], tmp_path / "run", SMALL, llm=llm)
    assert again.taken[str(moved)] == taken and 10 < taken.lines <= 20 and again.fresh() is None
    moved.write_text("".join(lines))
    assert again.fresh() and again.taken[str(moved)].lines > 20
    moved.write_text("".join(reversed(lines)))
    assert str(moved) not in Trainer([moved], tmp_path / "run", SMALL, llm=llm).taken


def test_a_run_goes_on(trained, llm, said):
    before, _ = trained
    again = Trainer([said], before.output, SMALL, llm=llm)
    assert again.counts == before.counts and again.taken == before.taken
    for a, b in zip(again.head.state_dict().values(), before.head.state_dict().values(), strict=True):
        assert torch.equal(a.bfloat16(), b.bfloat16())
    log = (before.output / "log.jsonl").read_text()
    assert not list(again.run(0.0001)) and (before.output / "log.jsonl").read_text() == log, "nothing was learnt"
    assert list(again.run(before.seconds / 60 + 0.01)) and again.seconds > before.seconds
    with pytest.raises(ConfigError, match="begun with depth 3"):
        Trainer([said], before.output, Eagle3Settings(**{**vars(SMALL), "depth": 2}), llm=llm)
    with pytest.raises(ConfigError, match="begun with method eagle3"):
        Other([said], before.output, RecurrentSettings(vocab=96), llm=llm)


def test_a_damaged_state_is_seen(trained, llm, said):
    path = trained[0].output / "state.pt"
    good = path.read_bytes()
    half = len(good) // 2
    try:
        for bad in (b"", good[:1000], good[:half] + bytes(255 - b for b in good[half : half + 9]) + good[half + 9 :]):
            path.write_bytes(bad)
            with pytest.raises(CheckpointError, match="is damaged"):
                Trainer([said], path.parent, SMALL, llm=llm)
        path.write_bytes(good)
        state = torch.load(path, weights_only=True)
        counts = {"steps": "many", "tokens": 0, "read": 0}
        for wrong in ({"counts": {}}, {"visits": "x"}, {"counts": counts}, {"taken": {"a": (1, None)}}):
            torch.save({**state, **wrong}, path)
            with pytest.raises(CheckpointError, match=r"state\.pt is damaged"):
                Trainer([said], path.parent, SMALL, llm=llm)
    finally:
        path.write_bytes(good)


@pytest.mark.parametrize("name", ["held", "batch-00000"])
def test_what_was_read_may_be_damaged_or_missing(trained, llm, said, tmp_path, name):
    folder = tmp_path / "run"
    shutil.copytree(trained[0].output, folder)
    path = folder / "states" / f"{name}.safetensors"
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(CheckpointError, match=f"{name}.safetensors is damaged"):
        Batch.load(path)
    path.unlink()
    if name == "held":
        assert Trainer([said], folder, SMALL, llm=llm).held.lengths == trained[0].held.lengths
    else:
        with pytest.raises(CheckpointError, match="batches are there"):
            Trainer([said], folder, SMALL, llm=llm)


def test_numbers_that_do_not_fit_are_damage(trained, llm, said, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(trained[0].output, folder)
    path = folder / "states" / "batch-00000.safetensors"
    good = load_file(path)
    for name, wrong, says in [("ids", good["ids"] + 999, "not below 128"), ("lengths", good["lengths"] + 1, "rows")]:
        save_file({**good, name: wrong}, path)
        with pytest.raises(CheckpointError, match=f"batch-00000.safetensors is damaged .*{says}"):
            Trainer([said], folder, SMALL, llm=llm)._load(path)
    for name in ("taps", "last"):
        save_file({**good, name: good[name][:, :-8].contiguous()}, path)
        with pytest.raises(CheckpointError, match=r"is damaged .*wide"):
            Trainer([said], folder, SMALL, llm=llm)._load(path)
    save_file({**good, "starts": good["lengths"].clone()}, path)
    with pytest.raises(CheckpointError, match="is damaged"):
        Batch.load(path)


def test_one_run_at_a_time(trained, llm, said, chatty, tmp_path):
    """Two that write into one folder or file would mix what they make."""
    trainer, _ = trained
    with locked(trainer.states):
        with pytest.raises(ConfigError, match="is being written by another run"):
            Trainer([said], trainer.output, SMALL, llm=llm)
        with pytest.raises(ConfigError, match="is being written by another run"):
            next(trainer.run(1.0))
    said = tmp_path / "said.jsonl"
    said.touch()
    with locked(said), pytest.raises(ConfigError, match="is being written by another run"):
        write(said, 60, ConversationSettings(model="tiny"), llm=chatty)
    assert not said.read_bytes()


def test_a_line_of_the_log_that_was_cut_short_is_left_out(trained, tmp_path):
    trainer, lines = trained
    log = trainer.output / "log.jsonl"
    good = log.read_text()
    try:
        log.write_bytes(b'{"steps": 8, "tok' + good.encode() + b'\xff\xfe\n{"steps": 3}\n7\n')
        trainer.export(tmp_path / "head")
    finally:
        log.write_text(good)
    assert f"| {lines[-1]['tokens']:,} |" in (tmp_path / "head" / "README.md").read_text()


def test_lines_that_come_later_are_read(llm, said, tmp_path):
    lines = said.read_text().splitlines(keepends=True)
    growing = tmp_path / "said.jsonl"
    growing.write_text("".join(lines[:20]) + lines[20][:15])  # the last one is being written
    trainer = Trainer([growing], tmp_path / "run", SMALL, llm=llm)
    while trainer.fresh():
        pass
    assert trainer.taken[str(growing)].lines <= 20
    growing.write_text("".join(lines))
    path = trainer.fresh()
    growing.write_text("x" + "".join(lines))
    with pytest.raises(ConfigError, match="was changed since"):
        trainer.fresh()
    assert path and sum(Batch.load(path).lengths) == len(Batch.load(path).ids) > 100


def test_what_a_killed_run_has_read_since_its_state_is_read_again(llm, said, tmp_path):
    """Not twice; and not by a run of other settings."""
    trainer = Trainer([said], tmp_path / "run", SMALL, llm=llm)  # killed before its first state
    begun = len(list(trainer.states.glob("batch-*")))
    again = Trainer([said], tmp_path / "run", Eagle3Settings(**{**vars(SMALL), "taps": (1,)}), llm=llm)
    assert len(list(again.states.glob("batch-*"))) == begun and list(again.run(0.0001))
    kept = sorted(again.states.glob("batch-*"))
    path = again.fresh()
    assert path
    ids = Batch.load(path).ids
    again = Trainer([said], tmp_path / "run", again.settings, llm=llm)
    assert sorted(again.states.glob("batch-*")) == kept
    path = again.fresh()
    assert path and torch.equal(Batch.load(path).ids, ids)


def test_what_cannot_be_is_said(llm, said, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"p": [1], "o": [999, 1, 1, 1, 1]}\n')
    (tmp_path / "parts.jsonl").write_text('{"p": [1], "o": [1.5, 1, 1, 1, 1]}\n')
    (tmp_path / "empty.jsonl").write_text("")
    (long := tmp_path / "long.jsonl").write_text(json.dumps({"p": [1], "o": [2] * 5000}) + "\n")
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\n")
    (tmp_path / "deep.jsonl").write_text("[" * 10**5 + "\n")
    for data, settings, says in [
        (tmp_path / "nowhere", SMALL, "no file"),
        (tmp_path / "bad.jsonl", SMALL, "bad.jsonl:1 is no conversation"),
        (tmp_path / "parts.jsonl", SMALL, "parts.jsonl:1 is no conversation"),
        (tmp_path / "empty.jsonl", SMALL, "too few"),
        (tmp_path / "bytes.jsonl", SMALL, "bytes.jsonl:1 is no conversation"),
        (tmp_path / "deep.jsonl", SMALL, "deep.jsonl:1 is no conversation"),
        (said, Eagle3Settings(**{**vars(SMALL), "batch": 10**6}), "too few"),
        (said, Eagle3Settings(**{**vars(SMALL), "depth": 60, "length": 63}), "answers of more than 61 tokens"),
        (long, SMALL, "long.jsonl:1 has 5001 tokens"),
        (said, Eagle3Settings(**{**vars(SMALL), "vocab": 999}), "over the target's 128"),
        (said, Eagle3Settings(**{**vars(SMALL), "taps": (9,)}), "layer 9"),
    ]:
        with pytest.raises(ConfigError, match=says):
            Trainer([data], tmp_path / "run", settings, llm=llm)
    with pytest.raises(ConfigError, match="cannot be a folder"):
        Trainer([said], said, SMALL, llm=llm)
    for options in ({"depth": 0}, {"lr": 2.0}, {"length": 3}, {"vocab": 0}, {"heads": -1}, {"taps": (-1,)}):
        with pytest.raises(ConfigError):
            Eagle3Settings(**options)


TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def chatty() -> LLM:
    llm = LLM("tiny", device="cpu", dtype="float32", max_num_seqs=4)
    llm.tokenizer.chat_template = TEMPLATE
    return llm


def test_conversations_are_the_target_s(chatty, tmp_path):
    """Greedy answers are what the engine gives; a file goes on, its cut last line is written anew."""
    settings = ConversationSettings(model="tiny", max_tokens=12, batch=4, temperatures=(0.0, 0.9), own=0.5)
    output = tmp_path / "said.jsonl"
    prompts = ["Tell me about foxes.", "Who is Tom?"]
    count = write(output, 60, settings, prompts, llm=chatty)
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert count == len(lines) and sum(len(line["o"]) for line in lines) >= 60
    assert not chatty.engine.running and not chatty.engine.waiting
    for line in lines:
        text = chatty.tokenizer.decode(line["p"])
        assert text.startswith("<user>") and text.endswith("<assistant>") and line["t"] in (0.0, 0.9)
        if line["t"] == 0:
            again = chatty.generate([line["p"]], SamplingParams(temperature=0, max_tokens=len(line["o"])))
            assert again[0].token_ids == line["o"]
    with open(output, "a") as file:
        file.write('{"p": [1')
    assert write(output, 100, settings, prompts, llm=chatty) > count
    output.write_text(before := output.read_text().replace(lines[0]["by"], "another"))
    with pytest.raises(ConfigError, match="another tokenizer"):
        write(output, 200, settings, prompts, llm=chatty)
    settings = replace(SMALL, model="tiny")
    with pytest.raises(ConfigError, match=r"said\.jsonl:1 is no conversation"):
        Trainer([output], tmp_path / "run", settings, llm=chatty)
    assert output.read_text() == before
    assert all(json.loads(line)["o"] for line in output.read_text().splitlines())


@pytest.mark.parametrize("said_before", ["", "<system>You are a fox that answers in rhymes. " * 20])
def test_what_is_held_out_is_told_by_the_first_words_of_a_user(chatty, tmp_path, said_before):
    """Not by what a template gives all; turns of a conversation are held out together. Older runs keep their rule."""
    chatty.tokenizer.chat_template = said_before + TEMPLATE
    template, lines = Template(chatty.tokenizer), list[str]()
    for name in range(60):
        before = template.before if name % 2 else "<user>"  # which some files have without what the template says
        first = template.ids(f"{before}Who is {name}?{template.answer}")
        answer, *more = (template.ids(text) for text in ("A big fox. " * 3, template.next, "Why?", template.answer))
        lines += [json.dumps({"p": p, "o": answer}) for p in (first, sum(more, first + answer))]
    (file := tmp_path / "said.jsonl").write_text("\n".join(lines) + "\n")
    settings = Eagle3Settings(model="tiny", vocab=96, depth=2, length=40, batch=100, first=200)
    trainer = Trainer([file], tmp_path / "run", settings, llm=chatty)
    held = [held for held, *_ in trainer._lines({})]
    assert held[::2] == held[1::2] and 0 < sum(held) < 20
    assert not list(trainer.run(1e-9))
    again = Trainer([file], tmp_path / "run", settings, llm=chatty)
    assert [held for held, *_ in again._lines({})] == held
    state = torch.load(tmp_path / "run" / "state.pt", weights_only=True)
    del state["by_turn"]
    torch.save(state, tmp_path / "run" / "state.pt")
    older = Trainer([file], tmp_path / "run", settings, llm=chatty)
    assert [held for held, *_ in older._lines({})] == [
        zlib.crc32(str(json.loads(line)["p"][:64]).encode()) % HELD_OUT == 0 for line in lines
    ]


def test_templates_are_taken_apart(chatty):
    template = Template(chatty.tokenizer)
    assert (template.before, template.answer) == ("<user>", "<|endoftext|><assistant>")
    assert template.next == "<|endoftext|><user>"
    chatty.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}"
    with pytest.raises(ConfigError, match="changes what is said"):
        Template(chatty.tokenizer)
    for refusing in ("{{ raise_exception('no language given') }}", "{% for m in %}"):
        chatty.tokenizer.chat_template = refusing
        with pytest.raises(ConfigError, match="refuses users' texts and answers"):
            Template(chatty.tokenizer)
    with pytest.raises(ConfigError, match="no chat template"):
        Template(None)


def test_prompts_of_many_files(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"question": "Why?"}\n{"turns": ["One", "Two"]}\n{"prompt": "P", "text": "T"}\n')
    assert read_prompts([tmp_path / "a.jsonl"]) == ["Why?", "One", "P"]
    (tmp_path / "a.jsonl").write_text('{"prompt": "one\u2028two"}\n\n{"prompt": "\\ud800"}\n', "utf-8-sig")
    assert read_prompts([tmp_path / "a.jsonl"]) == ["one\u2028two", "\ufffd"]
    (tmp_path / "b.jsonl").write_text('{"other": 1}\n')
    (tmp_path / "c.jsonl").write_text("")
    (tmp_path / "d.jsonl").write_text('{"prompt": {"role": "user"}}\n')
    (tmp_path / "e.jsonl").write_text('{"turns": [{"role": "user"}]}\n')
    for name, told in (("b", r"b\.jsonl:1"), ("c", r"no prompt in .*c\.jsonl"), ("d", "with text"), ("e", "with text")):
        with pytest.raises(ConfigError, match=told):
            read_prompts([tmp_path / f"{name}.jsonl"])


def test_prompts_that_are_all_too_long_are_told(chatty, tmp_path):
    short = LLM("tiny", device="cpu", dtype="float32", max_num_seqs=4, max_model_len=256)
    short.tokenizer.chat_template = TEMPLATE
    for llm, prompt, settings in [
        (chatty, "long " * 3000, ConversationSettings(model="tiny", own=0, max_tokens=8)),
        (short, "Why?", ConversationSettings(model="tiny", own=0, max_tokens=999)),
    ]:
        with pytest.raises(ConfigError, match="200 prompts in a row are too long"):
            write(tmp_path / "said.jsonl", 10, settings, [prompt], llm=llm)


def test_what_is_no_conversation_is_not_cut_short(chatty, tmp_path):
    for text in ("a line without an end", "one\ntwo", '{"other": 1', '{"p": [1], "o": [2]}\n{"q"', "[" * 10**5 + "\n"):
        (tmp_path / "mine").write_text(text)
        with pytest.raises(ConfigError, match="something else than conversations"):
            write(tmp_path / "mine", 10, ConversationSettings(model="tiny"), llm=chatty)
        assert (tmp_path / "mine").read_text() == text
    with pytest.raises(ConfigError, match="is no file"):
        write(tmp_path, 10, ConversationSettings(model="tiny"), llm=chatty)


def test_command(said, make_checkpoint, tmp_path):
    """The whole way on the command line."""
    arguments = ["train", "eagle3", str(tmp_path / "run"), str(said), "--minutes", "0.02", "--every", "0.01"]
    options = ["--vocab", "96", "--depth", "2", "--length", "40", "--batch", "200", "--dtype", "float32"]
    result = CliRunner().invoke(app, [*arguments, "--model", str(make_checkpoint(seed=4)), *options])
    assert result.exit_code == 0, result.output
    assert "tokens a forward" in result.output and (tmp_path / "run" / "head" / "model.safetensors").is_file()
    assert find(tmp_path / "run" / "head")
    result = CliRunner().invoke(
        app, [*arguments, "--model", str(make_checkpoint(seed=4)), *options, "--export", str(tmp_path / "other")]
    )
    assert result.exit_code == 0 and find(tmp_path / "other"), "no time was left, and it was said to be written"
    model = Path(shutil.copytree(make_checkpoint(seed=4), tmp_path / "model"))
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    result = CliRunner().invoke(app, [*arguments, "--model", str(model), *options, "--export", str(model)])
    assert isinstance(result.exception, ConfigError) and "something else than a head" in str(result.exception)
    arguments[2] = str(new := tmp_path / "new")
    for there, what in ((new, "keeps what it needs"), (new / "states", "keeps what it needs"), (said, "is a file")):
        result = CliRunner().invoke(app, [*arguments, "--model", str(model), *options, "--export", str(there)])
        assert isinstance(result.exception, ConfigError) and what in str(result.exception) and not new.exists()
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before, "it is no head, and is let be"
    result = CliRunner().invoke(app, [*arguments, "--model", str(model), *options, "--export", "/proc/head"])
    assert isinstance(result.exception, ConfigError) and "/proc/head cannot be a folder" in str(result.exception)
    assert not (new / "state.pt").exists(), "it is told before anything is learnt"


def test_requests_that_fail_end_no_conversations(chatty, tmp_path, monkeypatch):
    """They are left out; if all fail, that is told."""
    step, failing = engine.step, itertools.count()

    def failing_at_times(runner, drafter, seqs, *more):
        verdicts = step(runner, drafter, seqs, *more)
        for verdict in verdicts if next(failing) % often == 0 else ():
            verdict.error = OutOfMemory("no room")
        return verdicts

    monkeypatch.setattr(engine, "step", failing_at_times)
    settings, often = ConversationSettings(model="tiny", max_tokens=6, batch=2, own=0.0), 20
    assert write(tmp_path / "said.jsonl", 200, settings, ["Who is Tom?"], llm=chatty) > 9
    assert next(failing) > often
    often = 1
    with pytest.raises(OutOfMemory, match="no room"):
        write(tmp_path / "none.jsonl", 100, settings, ["Who is Tom?"], llm=chatty)
    assert not chatty.engine.running and not chatty.engine.waiting


def test_conversations_are_read_together(llm, said, tmp_path, monkeypatch):
    """As many as fit a chunk; states are what they are alone."""
    trainer = Trainer([said], tmp_path / "run", SMALL, llm=llm)
    noise = torch.Generator().manual_seed(7)
    found = [(torch.randint(128, (n,), generator=noise).tolist(), skip, 3) for n, skip in ((30, 0), (9, 2), (20, 5))]
    alone = [trainer.read([one]) for one in found]
    for chunk in (4096, 40, 1):
        monkeypatch.setattr(trainer.llm.runner, "chunk", chunk)
        whole = trainer.read(found)
        assert whole.lengths == [30, 7, 15]
        for name in ("ids", "taps", "last"):
            assert torch.equal(getattr(whole, name), torch.cat([getattr(one, name) for one in alone]))


def test_what_is_held_out_is_judged_in_pieces(trained, monkeypatch):
    """Logits take the memory of so many rows, and come from where the target lies (see test_cuda.py)."""
    trainer, asked = trained[0], list[tuple[int, bool]]()
    model, whole = trainer.llm.runner.model, trainer.measure()

    def logits(rows, own=model.logits):
        asked.append((len(rows), torch.is_autocast_enabled("cpu")))
        return own(rows)

    monkeypatch.setattr(model, "logits", logits)
    monkeypatch.setattr(heads, "ROWS", 7)
    with torch.autocast("cpu", torch.bfloat16):
        assert trainer.measure() == whole
    assert {*asked[:-1]} == {(7, False)} and sum(n for n, _ in asked) == len(trainer.held.ids)


def test_a_run_goes_on_on_another_device(trained, llm, said):
    """Its settings are others then, and nothing else is."""
    trainer, _ = trained
    again = Trainer([said], trainer.output, replace(SMALL, device="cpu"), llm=llm)
    assert again.counts["steps"]
    with pytest.raises(ConfigError, match="was begun with depth 3"):
        Trainer([said], trainer.output, replace(SMALL, depth=2), llm=llm)
