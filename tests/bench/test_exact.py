"""`outrider bench exact` counts the answers that change, of ours and of other engines."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider import LLM, SpeculativeConfig
from outrider.bench import exact, peers, report
from outrider.bench.exact import Settings, differs, run
from outrider.cli.bench import bench_app
from outrider.errors import ConfigError

METHODS = [SpeculativeConfig.parse("ngram:k=4")]


def settings(**own: Any) -> Settings:
    return Settings(**({"model": "tiny", "methods": METHODS, "suite": "stories", "prompts": 3, "max_tokens": 12,
                        "together": 2} | own))  # fmt: skip


class Fickle(peers.Peer):
    """Plain answers are 1001, 1002 ...; with drafts the second prompt's fourth token is another; T > 0 is refused."""

    name, note, weight_bytes, batches = "fickle", "fickle 1.0", 1, True
    end: int | None = None  # the third token, if it is given

    def __init__(self, *_: Any) -> None:
        self.methods: dict[str, dict[str, Any]] = {"fickle plain": {}, "fickle prompt lookup k=4": {}}
        self.closed, self.asked = False, list[list[int]]()

    def generate(
        self, method: str, ids: list[int], max_tokens: int, temperature: float = 0.0, seed: int = 0
    ) -> tuple[list[int], list[float], list[int]]:
        if temperature > 0:
            raise ValueError("no\nsampling here")
        if ids not in self.asked:
            self.asked.append(ids)
        tokens = self.written(max_tokens)
        if "lookup" in method and self.asked.index(ids) == 1:
            tokens[3] = 99
        return tokens, [0.0] * (max_tokens // 2 + 1), [2] * (max_tokens // 2)

    def together(
        self, method: str, prompts: list[list[int]], max_tokens: int, temperature: float, seed: int
    ) -> list[list[int]]:
        return [[*self.written(max_tokens)[:-1], 99] for _ in prompts]

    def written(self, count: int) -> list[int]:
        tokens = list(range(1001, 1001 + count))
        return tokens if self.end is None else [*tokens[:2], self.end, *tokens[3:]]

    def close(self) -> None:
        self.closed = True


def test_the_first_difference() -> None:
    assert differs([1, 2], [1, 2]) is None and differs([], []) is None
    assert differs([1, 2], [1, 3]) == 1 and differs([1, 2, 3], [1, 2]) == 2 and differs([], [1]) == 0


def test_ours_never_change() -> None:
    rows = list(run(settings()))
    ways = [("ngram k=4", 1), ("none", 2), ("ngram k=4", 2)]
    assert [(r.drafts, r.together, r.temperature) for r in rows] == [(*way, t) for t in (0.0, 0.8) for way in ways]
    assert all(r.changed == [] and r.prompts == 3 and r.failed is None for r in rows)
    assert all(r.tokens <= 36 for r in rows)
    fewer = run(settings(together=16, temperatures=[0.0]))  # than were to be together
    assert [(r.drafts, r.together) for r in fewer] == [("ngram k=4", 1), ("none", 3), ("ngram k=4", 3)]
    assert [r.together for r in run(settings(together=16, prompts=1, temperatures=[0.0]))] == [1]


def test_what_another_engine_changes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[Fickle] = []
    monkeypatch.setitem(peers.PEERS, "fickle", peers.Kind(lambda *_: made.append(Fickle()) or made[-1], files=True))
    warned: list[str] = []
    rows = [r for r in run(settings(peers=["fickle"]), warn=warned.append) if r.engine == "fickle"]
    alone, company, sampled = rows
    assert alone.changed == [3] and alone.accepted == 3 * 6 and alone.prompts == 3
    assert company.changed == [11] * 3 and company.together == 2 and company.accepted is None
    assert sampled.changed is None and sampled.failed == "no sampling here" and "no sampling here" in warned[0]
    assert made[0].closed
    assert exact.cells(alone) == ["fickle", "prompt lookup k=4", "1", "0", "1 of 3", "3, median 3", "18 of 36"]
    assert exact.cells(sampled)[4] == "failed"
    rows[0] = replace(alone, source="a file\u2028with\x85breaks")  # which are no ends of lines
    report.save(rows, tmp_path, exact)
    assert exact.read(tmp_path / "results.jsonl") == rows
    assert "| fickle | prompt lookup k=4 | 1 | 0 | 1 of 3 |" in (tmp_path / "table.md").read_text()
    pytest.importorskip("matplotlib")
    exact.plot(rows, tmp_path / "exact.png")
    assert (tmp_path / "exact.png").stat().st_size > 1000


def test_each_row_states_its_own_exactness() -> None:
    """Whatever came before or after."""
    lossy = SpeculativeConfig.parse("draft_model:model=tiny-draft,acceptance_method=typical")
    rows = list(run(settings(methods=[lossy, *METHODS], temperatures=[0.8], prompts=2)))
    stated = {r.drafts.split()[0]: r.exactness for r in rows}
    assert stated == {"draft_model": "lossy", "ngram": "bitwise", "none": "bitwise"}
    assert any("exactness lossy, bitwise," in line for line in exact.remarks(rows))


def test_answers_that_are_constrained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Suite json asks for JSON of a schema, which is compared then."""
    asked, true = list[Any](), LLM.generate

    def generate(llm: LLM, prompts: Any, params: Any) -> Any:
        asked.append(params.structured_outputs)
        return true(llm, prompts, params)

    monkeypatch.setattr(LLM, "generate", generate)
    rows = list(run(settings(suite="json", prompts=1, temperatures=[0.0], max_tokens=8)))
    assert [r.changed for r in rows] == [[]] and asked and all(asked)


def test_answers_are_compared_up_to_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an engine writes behind the end of an answer is no part of it."""
    monkeypatch.setattr(Fickle, "end", LLM("tiny").runner.model.config.eos[0])
    monkeypatch.setitem(peers.PEERS, "fickle", peers.Kind(Fickle, files=True))
    rows = [r for r in run(settings(peers=["fickle"], temperatures=[0.0])) if r.engine == "fickle"]
    assert [r.changed for r in rows] == [[], []] and rows[0].tokens == 9


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"together": 1}, "together must be at least 2"),
        ({"temperatures": []}, "give at least one"),
        ({"temperatures": [-1.0]}, "temperature"),
        ({"peers": ["nobody"]}, "peer 'nobody' is unknown"),
        ({"methods": METHODS * 2}, "given twice"),
        ({"file": Path("x.jsonl")}, "--file is for --suite spec-bench"),
        ({"suite": "json", "peers": ["transformers"]}, "json is constrained"),
    ],
)
def test_what_cannot_be_counted(own: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(**own)


@pytest.mark.parametrize(
    ("own", "engine"),
    [
        ({"peers": ["outrider:int8"]}, "outrider:int8"),
        ({"peers": ["transformers"], "methods": [SpeculativeConfig("suffix")], "prompts": 1}, "transformers"),
        ({"methods": [], "prompts": 1}, "outrider"),
    ],
)
def test_what_would_be_compared_with_nothing_is_told_before_all(
    monkeypatch: pytest.MonkeyPatch, own: dict[str, Any], engine: str
) -> None:
    monkeypatch.setattr(LLM, "generate", lambda *_: pytest.fail("measured"))
    with pytest.raises(ConfigError, match=f"compared with the plain answers of {engine}: give a method"):
        next(run(settings(**own)))


def test_the_command(tmp_path: Path) -> None:
    args = ["exact", "--model", "tiny", "--suite", "stories", "--prompts", "2", "--max-tokens", "6", "--together", "2"]
    result = CliRunner().invoke(bench_app, [*args, "--temperature", "0", "--output", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "0 of 2" in result.output and (tmp_path / "table.md").exists()
    assert isinstance(CliRunner().invoke(bench_app, [*args, "--temperature", "warm"]).exception, ConfigError)
    result = CliRunner().invoke(bench_app, [*args, "--temperature", "0", "--speculate", "none"])
    assert result.exit_code == 0 and result.output.count("0 of 2") == 1, "plain decoding in company, and nothing else"
