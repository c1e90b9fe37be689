"""`outrider bench long`: every method continues the same prompts, and what it says about them follows from counts."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from outrider import LLM
from outrider.bench import long, report
from outrider.config import SpeculativeConfig
from outrider.errors import ConfigError, OutOfMemory

WORDS = "The lighthouse keeper climbed the stairs and counted {} ships upon the grey water before the rain came in. "


@pytest.fixture
def settings(tmp_path: Path) -> long.Settings:
    file = tmp_path / "book.txt"
    file.write_text("".join(WORDS.format(n) for n in range(200)))
    methods = [SpeculativeConfig("ngram", 3), SpeculativeConfig.parse("draft_model:model=tiny-draft,k=2")]
    return long.Settings(
        contexts=[300], batches=[1, 2], methods=methods, max_tokens=24, repeats=2, file=file, temperature=0.8
    )


def test_rows(settings: long.Settings, tmp_path: Path) -> None:
    rows = list(long.run(settings))
    assert [(r.batch, r.method.split()[0]) for r in rows] == [
        (n, m) for n in (1, 2) for m in ("plain", "ngram", "draft_model")
    ]
    for r in rows:
        assert r.identical
        assert r.speedup == pytest.approx(r.tokens_per_second / rows[3 * (r.batch - 1)].tokens_per_second)
        assert (r.predicted is None) == (r.draft_acceptance_rate is None) and set(r.curve) == set(long.CURVE)
        assert r.kv_bytes_context == r.batch * rows[0].kv_bytes_context
    assert rows[0].acceptance_length == 1 and rows[0].kv_bytes_drafter == 0
    assert rows[2].acceptance_length > 1 and rows[2].kv_bytes_drafter > 0
    said = {"method": "ngram", "acceptance_method": "coupled", "num_speculative_tokens": 3}
    assert rows[1].speculative_config == said, "what `plan --against` reads"
    report.save(rows, tmp_path, long)
    long.plot(rows, tmp_path / "long.png")
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    assert [json.loads(line)["method"] for line in lines] == [r.method for r in rows]
    assert (tmp_path / "table.md").read_text().count("| 300 |") == 6
    assert (tmp_path / "long.png").stat().st_size > 10_000


def test_differences_are_told(settings: long.Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = long._decode

    def wrong(llm, prompts):  # type: ignore[no-untyped-def]
        done = decode(llm, prompts)
        if llm.speculative_config.method == "ngram":
            done.tokens[0][-1] ^= 1
        return done

    monkeypatch.setattr(long, "_decode", wrong)
    rows = list(long.run(replace(settings, batches=[1], repeats=1)))
    assert [r.identical for r in rows] == [True, False, True]


def test_prediction() -> None:
    # drafting 3 tokens costs 0.3 of a plain step, verifying 1.2; half of the guesses hold: 1 + 1/2 + 1/4 + 1/8 tokens
    assert long.predict(1.0, 10, 3.0, 12.0, k=3, alpha=0.5) == pytest.approx(1.875 / 1.5)
    assert long.predict(1.0, 1, 0.0, 1.0, k=4, alpha=1.0) == pytest.approx(5.0)


def test_refusals(settings: long.Settings, tmp_path: Path) -> None:
    for wrong in ({"contexts": [1]}, {"max_tokens": 2}, {"methods": [SpeculativeConfig("ngram", "auto")]}):
        with pytest.raises(ConfigError):
            replace(settings, **wrong)
    with pytest.raises(ConfigError, match="tokens, fewer than"):
        next(long.run(replace(settings, contexts=[20_000])))
    with pytest.raises(ConfigError, match="exceed the context"):
        next(long.run(replace(settings, contexts=[131072], file=_lengthened(settings.file, tmp_path))))
    with pytest.raises(OutOfMemory, match="MiB"):
        next(long.run(replace(settings, engine={"kv_memory": 1 << 20})))
    with pytest.raises(ConfigError, match="not there"):
        next(long.run(replace(settings, file=tmp_path / "none.txt")))


def _lengthened(file: Path | None, folder: Path) -> Path:
    assert file is not None
    longer = folder / "longer.txt"
    longer.write_text(file.read_text() * 40)
    return longer


def test_levels_of_a_hierarchy(settings: long.Settings) -> None:
    method = SpeculativeConfig.parse("triforce:model=tiny,k=3,retrieval_budget=256,draft_cache_budget=128")
    _, row = long.run(replace(settings, methods=[method], batches=[1], repeats=1, temperature=0.0))
    assert row.identical and row.budget == 256
    assert row.draft_acceptance_rate is not None and 0 < row.draft_acceptance_rate <= 1
    assert len(row.inner_rates) == 1 and 0 < row.inner_rates[0] <= 1
    assert "inner" in long.cells(row)[7]


def test_only_full_batches_are_timed(settings: long.Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    decode, passes, alive = long._decode, [], []

    def watched(*args):  # type: ignore[no-untyped-def]
        alive.append(len(args[2]))
        return step(*args)

    step = long.step
    monkeypatch.setattr(long, "step", watched)
    monkeypatch.setattr(long, "_decode", lambda *args: passes.append(decode(*args)) or passes[-1])
    list(long.run(replace(settings, batches=[2], repeats=1)))
    assert 1 in alive, "no sequence ended before the other: this shows nothing"
    assert all(done.forwards == 2 * done.steps > 0 for done in passes)


def test_a_prompt_that_is_read_again_whole(settings: long.Settings) -> None:
    (row,) = long.run(replace(settings, contexts=[20], batches=[1], methods=[], repeats=1))
    assert row.identical and row.context < long.REREAD


def test_a_sequence_that_ends_in_the_first_step(settings: long.Settings) -> None:
    """Its method has no steps to be timed by, and costs the others nothing."""
    assert settings.file
    (tiresome := settings.file.with_name("la.txt")).write_text("la " * 3000)
    methods = [SpeculativeConfig("suffix", 40)]
    rows = list(long.run(replace(settings, file=tiresome, methods=methods, batches=[1], max_tokens=16, temperature=0)))
    assert rows[0].tokens_per_second > 0 == rows[1].tokens_per_second and rows[1].identical
    assert long.cells(rows[1])[3:5] == ["-", "-"] and long.remarks(rows)[-1].endswith("give more --max-tokens.")
    assert "-" not in long.cells(rows[0]) and "more --max-tokens" not in long.remarks(rows[:1])[-1]
    (ended, timed), (once, *_) = (
        [long.Pass([], 0.1, seconds, emitted=3) for seconds in own] for own in ((0, 1.5), (1,))
    )
    row = long._row(
        replace(settings, methods=[]),
        LLM("tiny"),
        "plain",
        SpeculativeConfig(),
        [ended, timed],
        [once],
        300,
        1,
        1.0,
        {},
        "",
    )
    assert row.tokens_per_second == 2.0 and row.repeats == [0.0, 2.0], (
        "one that is not known says nothing of the others"
    )
