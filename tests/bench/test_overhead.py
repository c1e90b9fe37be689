"""What drafting costs beside the forwards: one figure per method and length, from any text."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.bench import overhead
from outrider.cli import app
from outrider.config import SpeculativeConfig
from outrider.errors import ConfigError
from outrider.llm import LLM

METHODS = ["ngram:k=4", "suffix", "lookahead", "medusa:model=tiny-medusa", "draft_model:model=tiny-draft,k=2"]


def test_every_kind_of_drafter(tmp_path, monkeypatch):
    monkeypatch.setattr(overhead, "STEPS", 5)
    (tmp_path / "text.txt").write_text("The cat sat on the mat, and the dog sat on the cat. " * 20)
    llm = LLM("tiny", device="cpu")
    costs = list(overhead.run(llm, [SpeculativeConfig.parse(m) for m in METHODS], tmp_path, [20, 100]))
    assert [c.history for c in costs] == [20] * 5 + [100] * 5
    assert [c.method.split()[0] for c in costs[:5]] == [m.split(":")[0] for m in METHODS]
    assert all(c.first > 0 and c.step > 0 and c.forward > 0 and c.share == c.step / c.forward for c in costs)
    assert not llm.runner.slots and not llm.engine.drafter.runner.slots
    with pytest.raises(ConfigError, match="9006 are needed"):
        next(overhead.run(llm, [SpeculativeConfig.parse("ngram")], tmp_path, [9000]))


def test_a_model_without_a_tokenizer(make_llm):
    with pytest.raises(ConfigError, match="has no tokenizer"):
        next(overhead.run(make_llm(), [], Path("nowhere"), [9]))


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(overhead, "STEPS", 3)
    (tmp_path / "text.txt").write_text("One two three four. " * 40)
    asked = ["bench", "overhead", str(tmp_path), "--history", "10,50", "--speculate", "suffix", "--device", "cpu"]
    shown = CliRunner().invoke(app, asked)
    assert shown.exit_code == 0 and shown.stdout.count("| suffix k=16 | ") == 2 and "A forward of tiny" in shown.stdout
    assert shown.stdout.count("A plain step of ") == 4
    assert all(f"Drafting between forwards, {name}: " in shown.stdout for name in ("plain", "suffix k=16"))


def test_plain_steps(monkeypatch):
    """What is outside the kernels is part of a step, and nothing is claimed where they are called one by one."""
    monkeypatch.setattr(overhead, "STEPS", 5)
    llm = LLM("tiny", device="cpu")
    for plain in overhead.plain(llm, [1, 2, 3], [1, 3]):
        assert plain.batch in (1, 3)
        assert (plain.outside is None) != (llm.runner.model.native_seconds is not None)
        assert plain.outside is None or 0 < plain.outside < plain.step
        assert 0 < plain.drafting < plain.step
    monkeypatch.setattr(type(llm.runner.model), "_walks", lambda model: False)
    assert next(overhead.plain(llm, [1, 2, 3], [2])).outside is None
