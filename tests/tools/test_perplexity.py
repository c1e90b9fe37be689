"""Perplexity by kind of weights and activations: the same windows for all, and ratios to the first."""

from __future__ import annotations

import sysconfig

import pytest
import torch
from typer.testing import CliRunner

from outrider.errors import ConfigError
from outrider.ops import native
from tools import perplexity
from tools.__main__ import app


@pytest.mark.skipif(native.active == native.REFERENCE, reason="the kernels are not built")
def test_the_command(folder, library, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(library))
    args = ["perplexity", "tiny", "--data", str(folder), "--windows", "2", "--length", "12"]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    rows = [line.split("|")[1].strip() for line in result.output.splitlines() if line.startswith("| ")]
    kinds = [f"{scheme}, {activations}" for scheme in ("int8", "int4") for activations in ("bfloat16", "int8")]
    assert rows == ["weights, activations", "---", "as stored, bfloat16", *kinds]  # plain weights take no integers


def test_windows(folder, library, tokenizer, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(library))
    found = perplexity.windows(tokenizer, folder, 2, 12)
    assert list(found) == ["encyclopedia", "books", "code", "chat"]
    assert all(len(some) == 2 and all(len(ids) == 12 for ids in some) for some in found.values())
    assert found["books"][0][0] == tokenizer.bos_token_id
    with pytest.raises(ConfigError, match="ask for fewer or shorter"):
        perplexity.windows(tokenizer, folder, 9000, 12)
    with pytest.raises(ConfigError, match="is not the folder"):
        perplexity.windows(tokenizer, folder / "nowhere", 3, 12)
    monkeypatch.setattr(perplexity, "_documents", lambda *_: {"encyclopedia": ["The dog saw a key. " * 400]})
    assert len(perplexity.windows(tokenizer, folder, 60, 12)["encyclopedia"]) == 60, "of one document"


def test_the_ratio():
    """Twice the perplexity in every window is +100 % without an error."""
    one, two = (
        perplexity.Line(name, {"books": torch.tensor([1.0, 2.0]) + more}) for name, more in (("a", 0), ("b", 0.6931472))
    )
    assert list(perplexity.markdown([one, two]))[-1] == "| b | 8.963 | +100.00 ± 0.00 % |"
