"""The kernel bench on small sizes: every candidate at every size, a table and a plot."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from outrider.errors import ConfigError
from tools import kernels
from tools.__main__ import app


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "SHAPES", ((64, 2048), (32, 5632)))
    monkeypatch.setattr(kernels, "STREAM", 2**20)
    args = ["kernels", "--rows", "3,2", "--keys", "100,600", "--repeats", "1", "--output", str(tmp_path)]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    names = {line["name"] for line in lines}
    assert {"stream", "F.linear", "attend", "SDPA"} <= names
    assert ("oneDNN packed" in names) == torch.ops.mkldnn._is_mkldnn_bf16_supported()
    for name in names - {"stream", "attend", "SDPA"}:
        assert [line["rows"] for line in lines if line["name"] == name] == [3, 2]
    assert [(x["keys"], x["rows"]) for x in lines if x["name"] == "attend"] == [
        (k, n) for k in (100, 600) for n in (1, 8, 16)
    ]
    assert all(line["nbytes"] > 0 and line["seconds"] > 0 for line in lines)
    table = (tmp_path / "table.md").read_text()
    assert "### linear" in table and "### attention" in table and "| 600 | 16 |" in table
    linear, attention = table.split("### attention")
    assert "against 2 rows of" in linear and "| 2 | " in linear and "against 1 row of" in attention
    assert next(row for row in linear.splitlines() if row.startswith("| 2 | ")).count("(1.00x)") == len(names) - 2
    assert (tmp_path / "kernels.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("option", "value"),
    [("--repeats", "0"), ("--keys", "-5"), ("--rows", "0"), ("--rows", "1,0"), ("--threads", str(2**40)),
     ("--threads", "0"), ("--keys", str(10**12)), ("--rows", str(10**9)), ("--keys", ""), ("--rows", "1,,2")],
)  # fmt: skip
def test_what_cannot_be_measured(option, value):
    error = CliRunner().invoke(app, ["kernels", option, value]).exception
    assert isinstance(error, ConfigError) and option.strip("-") in str(error)
