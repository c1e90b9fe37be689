"""The documentation's own code runs."""

from __future__ import annotations

import json
import re
import shlex
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import typer
from helpers import assert_released

from outrider import LLM, Drafter
from outrider.cli import app
from outrider.config import SpeculativeConfig
from outrider.drafters import create, describe, methods
from outrider.errors import ConfigError
from tools import docs
from tools.__main__ import app as tools_app

ROOT = Path(__file__).parents[1]


def _blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)


def test_the_readers_own_drafter(monkeypatch):
    """docs/drafters.md ends with a complete drafter; it is found by entry point and changes no token."""
    code = next(block for block in _blocks("docs/drafters.md") if "class Bigram" in block)
    module = types.ModuleType("my_drafter")
    monkeypatch.setitem(sys.modules, "my_drafter", module)
    exec(code, module.__dict__)
    from importlib.metadata import EntryPoint

    point = EntryPoint("bigram", "my_drafter:Bigram", "outrider.drafters")
    monkeypatch.setattr(
        "outrider.drafters.entry_points", lambda **kw: [point] if kw.get("name", "bigram") == "bigram" else []
    )
    assert create(SpeculativeConfig.parse("bigram:k=2")).num_speculative_tokens == 2
    llm = LLM("tiny", dtype="float32")
    plain = llm.generate("the cat and the dog and the cat and the dog", max_tokens=60, temperature=0)[0]
    llm.speculative_config = {"method": "bigram", "max_entries": 5000}
    fast = llm.generate("the cat and the dog and the cat and the dog", max_tokens=60, temperature=0)[0]
    assert fast.token_ids == plain.token_ids
    assert fast.metrics["speculative_decoding"]["num_accepted_draft_tokens"] > 0
    assert_released(llm)  # which the matrix asks of it, too


RUNNING = [
    pytest.param(page, code, shown, id=f"{page.stem}-{i}")
    for page in docs.PAGES
    for i, (code, shown) in enumerate(
        re.findall(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", page.read_text(), re.S)
    )
    if "def propose" not in code and "def attach" not in code and "..." not in code and page.stem != "architecture"
]


@pytest.mark.parametrize(("page", "code", "shown"), RUNNING)
def test_examples_run_and_print_what_is_shown(page, code, shown, capsys):
    """Python in the docs runs as printed; where a block of text follows it, that is what it prints."""
    exec(code, {"LLM": LLM})
    printed = capsys.readouterr().out
    assert not shown or printed.strip() == shown.strip()


def test_drafters_in_the_docs_are_drafters():
    for code in _blocks("README.md"):
        if "def propose" in code:
            exec(code, found := {})
            assert any(
                isinstance(item, type) and item is not Drafter and issubclass(item, Drafter) for item in found.values()
            )


# --- tables ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", docs.PAGES, ids=lambda page: page.stem)
def test_tables_are_current(page):
    """`make docs` would change nothing."""
    assert docs.render(page) == page.read_text("utf-8"), "run `make docs`"


def test_which_pages_have_tables():
    assert {p.stem for p in docs.PAGES if "<!-- table: " in p.read_text()} >= {
        "README", "methods", "long-context", "benchmarks", "drafters"
    }  # fmt: skip


def test_a_curve_is_the_run_s(tmp_path, monkeypatch):
    """Reports of a tenth more tokens, and the last one."""
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    (tmp_path / "run").mkdir()
    own = [{"tokens": n, "read": n // 2, "loss": 4.0, "right": [0.25, 0.2], "tokens_a_forward": 1.3}
           for n in (1000, 1050, 2000, 2001)]  # fmt: skip
    (tmp_path / "run" / "log.jsonl").write_text("\n".join(map(json.dumps, own)) + "\n")
    rows = docs.table("curve run").splitlines()
    assert rows[2:5] == [f"| {n:,} | {n // 2:,} | 4.00 | 25%, 20% | 1.30 |" for n in (1000, 2000, 2001)]
    with pytest.raises(ConfigError, match="is not there"):
        docs.table("curve elsewhere")


def test_servers_are_told_by_streams():
    """A ratio for each other server, and none where it was not asked."""
    folders = ["bench/results/server", "bench/results/server-amx"]
    table = docs.table(f"servers {' '.join(folders)}", "../")
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")
    ]
    found = {(run.strip("`"), streams): rest for run, streams, *rest in cells[2:]}
    for folder in folders:
        for line in (docs.ROOT / folder / "results.jsonl").read_text().splitlines():
            row = json.loads(line)
            if row["what"].endswith(" streams"):
                own = found[Path(folder).name, row["what"].removesuffix(" streams")]
                column = cells[0].index(f"times {row['against']}") - 2
                assert own[0] == f"{row['server']:,.0f}" and own[column] == f"{row['ratio']:.2f}"
            else:
                assert f"{row['ratio']:.2f} times as long" in table or f"not {row['other']:,.0f}." in table
    assert found["server-amx", "1"][cells[0].index("times llama-server") - 2] == ""
    with pytest.raises(ConfigError, match="is not there"):
        docs.table("servers elsewhere")


def test_prompts_are_spread_as_below_a_runs_own_table():
    folder = "bench/results/sweep-t0-b1"
    row = docs.table(f"prompts {folder} method='auto*'", "../").splitlines()[2]
    told = r"auto k=32, by prompt: (.*) at least, quartiles (.*), (.*), (.*), (.*) at most"
    spreads = re.findall(told, (docs.ROOT / folder / "table.md").read_text())
    assert row.startswith(f"| [sweep-t0-b1](../{folder}/results.jsonl) | ") and len(spreads) == 5
    assert [cell.strip(" |") for cell in row.split(" | ")[1:]] == ["{}; {}, {}, {}; {}".format(*s) for s in spreads]


def test_a_table_says_what_the_lines_say():
    folder = "bench/results/cpu-1.5b-auto"
    table = docs.table(f"speedups {folder} only='plain|suffix*' suites='edit|code'", "../")
    rows = {(r.suite, r.method): r for r in docs.read(docs.ROOT / folder)}
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")
    ]
    assert lines[0] == ["method", "edit", "code", "identical"] and [line[0] for line in lines[2:]] == [
        "`plain`",
        "`suffix k=auto`",
    ]
    for cell, suite in zip(lines[3][1:3], ("edit", "code"), strict=True):
        r = rows[suite, "suffix k=auto"]
        assert cell == f"**{r.speedup:.2f}** ({r.acceptance_length:.2f})"
    assert f"(../{folder}/results.jsonl)" in table and rows["edit", "plain"].commit in table


def test_rounded_activations_are_told():
    assert "smollm2, bfloat16, int8 activations, greedy" in docs.table(
        "speedups bench/results/cpu-smollm2-int8-activations"
    )
    assert "smollm2, activations int8, spec-bench" in docs.table("servers bench/results/server-int8")


def test_options_are_the_dataclasses():
    table = docs.table("options ngram snapkv")
    assert "| `ngram` | `num_speculative_tokens` | `8` |" in table and "longest n-gram to match" in table
    assert re.search(r"\| `snapkv` \| `budget` \| `4096` \| .*\w.* \|", table)
    everything = docs.table("options")
    for method in methods():
        assert all(f"`{option.name}`" in everything for option in describe(method)), method


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- table: poems -->\n<!-- end of table -->", "'poems' is unknown; valid: speedups"),
        ("<!-- table: speedups bench/results/gone -->\n<!-- end of table -->", "gone/results.jsonl is not there"),
        ("<!-- table: speedups bench/results/cpu-tiny only=x -->\n<!-- end of table -->", "leaves no row"),
        (
            "<!-- table: lines bench/results/cpu-tiny columns=x -->\n<!-- end of table -->",
            "'x' is unknown; valid: method",
        ),
        (
            "<!-- table: gpu bench/results/gpu-h200-late speed columns=x -->\n<!-- end of table -->",
            "'speed' is not there; there are: bits",
        ),
        (
            "<!-- table: gpu bench/results/gpu-h200-late linear columns=rows rows=3 -->\n<!-- end of table -->",
            "'linear' has no line of {'rows': '3'}",
        ),
        ("<!-- table: options -->\n", "needs its `<!-- end of table -->`"),
    ],
)
def test_marks_that_ask_for_what_is_not_there(tmp_path, text, message):
    (page := tmp_path / "page.md").write_text(f"before\n{text}\nafter\n")
    with pytest.raises(ConfigError, match=f"page.md: .*{re.escape(message)}"):
        docs.render(page)


def test_the_text_around_stays(tmp_path):
    (page := tmp_path / "page.md").write_text("a\n<!-- table: options ngram -->\nold\n<!-- end of table -->\nb\n")
    docs.write(page)
    made = page.read_text()
    assert made.startswith("a\n<!-- table: options ngram -->\n\n|") and made.endswith("\n<!-- end of table -->\nb\n")
    assert "old" not in made and docs.render(page) == made


# --- commands -------------------------------------------------------------------------------------------------------


def _commands(page):
    """Each `outrider ...` and `python -m tools ...` in a page's blocks, as words; shell variables are dropped."""
    text = page.read_text().replace("\\\n", " ")
    blocks = re.findall(r"```sh\n(.*?)```", text, re.S) if page.suffix == ".md" else [text]
    blocks += re.findall(r"^(?: {4}|\t).*$", text, re.M)
    for line in "\n".join(blocks).splitlines():
        for found in re.finditer(r"(?:^|[\s/;|(])(?:(outrider)|python -m (tools)) (?=[a-z])(.*)", line):
            rest = re.sub(r"\$\$?\(.*?\)(?=\s|\"|$)", "x", found[3].split("; ")[0].split("  #")[0].split(" |")[0])
            words = [word for word in shlex.split(rest.replace("`", ""), comments=True) if not word.startswith("$")]
            yield (found[1] or found[2]), words


COMMANDS = [
    pytest.param(program, words, id=f"{page.name}: {program} {' '.join(words)[:60]}")
    for page in [*docs.PAGES, docs.ROOT / "Makefile", *(docs.ROOT / "src/outrider/assets").glob("*/README.md")]
    if page.stem not in ("LOG", "CHANGELOG")
    for program, words in _commands(page)
]


def test_the_commands_are_found():
    assert len(COMMANDS) > 40


@pytest.mark.parametrize(("program", "words"), COMMANDS)
def test_commands_in_the_docs_have_these_options(program, words):
    command: Any = typer.main.get_command({"outrider": app, "tools": tools_app}[program])
    while hasattr(command, "commands"):
        name = next((word for word in words if word in command.commands), None)
        if name is None:
            break
        words, command = words[words.index(name) + 1 :], command.commands[name]
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}
    assert not {word.split("=")[0] for word in words if word.startswith("--")} - known
