"""Benchmarks choose their prompts deterministically, measure what they say, and tell when tokens differ."""

import errno
import gzip
import io
import json
import lzma
import subprocess
import sys
import tarfile
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider import LLM, SamplingParams, SpeculativeConfig
from outrider.bench import exact, long, report
from outrider.bench import run as module
from outrider.bench.peers import Transformers
from outrider.bench.report import Difference, Result, Sample
from outrider.bench.run import Settings, label, run, sample
from outrider.bench.suites import OPENINGS, SUITES, load_suite
from outrider.cli import main
from outrider.cli.bench import bench_app
from outrider.cli.options import read_floats, read_ints
from outrider.engine import Engine
from outrider.errors import ConfigError, OutriderError, RequestTooLong, VocabularyMismatch

METHODS = [SpeculativeConfig.parse(text) for text in ("ngram:k=4", "draft_model:model=tiny-draft,k=3")]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small files of the shapes that the suites read; every text says where it is from."""
    folder = tmp_path_factory.mktemp("data")
    problems = "\n".join(json.dumps({"prompt": f"def f{i}():\n"}) for i in range(10))
    (folder / "HumanEval.jsonl.gz").write_bytes(gzip.compress(problems.encode()))
    stories = "\n<|endoftext|>\n".join(f"Story {i} " + "and then " * 30 for i in range(40))
    (folder / "tinystories.txt.xz").write_bytes(lzma.compress(stories.encode()))
    kinds = ["writing", "summarization", "humanities", "math_reasoning", "qa", "rag"]
    questions = [json.dumps({"category": c, "turns": [f"Question {i}?", "And then?"]}) for i, c in enumerate(kinds)]
    sums = [json.dumps({"question": f"{i} + {i}?", "answer": f"{2 * i}"}) for i in range(2)]
    (folder / "gsm8k_test200.jsonl").write_text("\n".join(sums) + "\n")
    (folder / "spec_bench_half.jsonl").write_text("\n".join(questions) + "\n", "utf-8-sig")
    with tarfile.open(folder / "books_eval.tar.xz", "w:xz") as archive:
        for name in ("b", "a"):
            text = " ".join(f"{name}{i}" for i in range(41 * 50)).encode()
            member = tarfile.TarInfo(f"books/{name}.txt")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text))
    return folder


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny")


# --- suites --------------------------------------------------------------------------------------------------------


def test_prompts_are_spread_over_the_file(data: Path) -> None:
    assert load_suite("functions", 4, data).prompts == [f"def f{i}():\n" for i in (0, 2, 5, 7)]
    assert load_suite("code", 1, data).prompts[0].endswith("```python\ndef f0():\n```")
    assert load_suite("chat", 2, data).prompts == ["Question 0?", "Question 2?"]
    assert load_suite("summarise", 1, data).prompts == ["Question 1?"]
    assert load_suite("maths", 2, data).prompts == ["0 + 0?", "1 + 1?"]
    assert load_suite("spec-bench", 2, data).prompts == ["Question 0?", "Question 3?"]
    assert load_suite("spec-bench", 2, file=data / "spec_bench_half.jsonl").prompts == ["Question 0?", "Question 3?"]
    stories = load_suite("stories", 2, data)  # from the last tenth, 40 words each
    assert [p.split()[:2] for p in stories.prompts] == [["Story", "36"], ["Story", "38"]]
    assert {len(p.split()) for p in stories.prompts} == {40} and stories.source == "tinystories.txt.xz"
    assert load_suite("stories", 16).prompts == OPENINGS and load_suite("stories", 1).source == "built-in"
    first, second, _ = load_suite("edit", 3, data).prompts
    assert first.startswith("Rewrite") and [w for w in first.split() if w[1:].isdigit()][0::299] == ["a50", "a349"]
    assert second.startswith("Summarise") and second.endswith(" a1649")


def test_prompts_without_a_data_folder() -> None:
    for name, kind in SUITES.items():
        for i in range(len(kind.own or ())):
            assert load_suite(name, len(kind.own or ())).prompts[i].strip()
    assert load_suite("edit", 3).prompts[2].startswith("Quote") and load_suite("edit", 1).source == "built-in"


def test_messages_use_the_chat_template_if_there_is_one(data: Path, llm: LLM) -> None:
    suite = load_suite("spec-bench", 1, data)
    assert suite.encode(llm) == [llm.render([{"role": "user", "content": "Question 0?"}])]
    bare = SimpleNamespace(tokenizer=SimpleNamespace(chat_template=None), encode=lambda text: text)
    assert suite.encode(bare) == ["Question 0?\n\nAnswer:\n"]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "count", "message"),
    [
        ("poems", 1, "suite 'poems' is unknown; valid: chat, code, maths"),
        ("code", 11, r"suite code has 10 prompts \(HumanEval.jsonl.gz\); prompts must be 1 to that, not 11"),
        ("code", 0, "prompts must be 1"),
    ],
)
def test_what_no_suite_can_give(data: Path, name: str, count: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_suite(name, count, data)


def test_missing_and_damaged_data(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs spec_bench_half\.jsonl, but no data folder is given; .* --data"):
        load_suite("spec-bench", 1)
    with pytest.raises(ConfigError, match=r"tinystories\.txt\.xz is not there; pass its folder"):
        load_suite("stories", 1, tmp_path)
    with pytest.raises(ConfigError, match=r"books_eval\.tar\.xz is not there; pass its folder"):
        load_suite("edit", 1, tmp_path)
    with pytest.raises(ConfigError, match="or the file itself with --file"):
        load_suite("spec-bench", 1, file=tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="is no file"):
        load_suite("spec-bench", 1, file=tmp_path)
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ConfigError, match=r"empty\.jsonl has no prompts"):
        load_suite("spec-bench", 1, file=tmp_path / "empty.jsonl")
    with pytest.raises(ConfigError, match="is not a folder"):
        load_suite("stories", 1, tmp_path / "nowhere")
    files = {"code": "HumanEval.jsonl.gz", "edit": "books_eval.tar.xz", "stories": "tinystories.txt.xz"}
    for name, file in files.items():
        for content in (b"nonsense", (data / file).read_bytes()[:60]):
            (tmp_path / file).write_bytes(content)
            with pytest.raises(ConfigError, match=f"{file} is damaged"):
                load_suite(name, 1, tmp_path)
    (tmp_path / "questions.jsonl").write_text('{"turns": ["one\u2028two"]}\n\n', "utf-8")
    assert load_suite("spec-bench", 1, file=tmp_path / "questions.jsonl").prompts == ["one\u2028two"]
    for line in ('{"turns": []}', '{"turns": "What?"}', '{"turns": [null]}', '{"turn": ["?"]}', "[]", "{", "[" * 10**5):
        (tmp_path / "questions.jsonl").write_text(line)
        with pytest.raises(ConfigError, match=r"questions\.jsonl is damaged or not what"):
            load_suite("spec-bench", 1, file=tmp_path / "questions.jsonl")


# --- settings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"repeats": 0}, "repeats must be at least 1, not 0"),
        ({"max_tokens": 1}, "max_tokens must be at least 2"),
        ({"suites": ["edit", "edit"]}, "suite edit is given twice"),
        ({"methods": [SpeculativeConfig()]}, "method plain is given twice"),
        ({"methods": [SpeculativeConfig("magic")]}, "method 'magic' is unknown; valid"),
        ({"peer": "vllm"}, "peer 'vllm' is unknown; valid: transformers, outrider"),
        ({"suites": []}, "a suite without a name"),
        ({"peer": "transformers", "batch": 2}, "--temperature 0 and --batch 1"),
        ({"peer": "outrider", "suites": ["edit", "mixed"]}, "mixed is a stream"),
        ({"file": Path("x")}, "--file is for --suite spec-bench"),
    ],
)
def test_settings_that_cannot_be(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Settings(**given)


def test_nothing_is_measured_if_something_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "sample", lambda *_: pytest.fail("measured"))
    with pytest.raises(RequestTooLong):
        next(run(Settings(max_tokens=200_000)))
    monkeypatch.setattr("outrider.llm.check_vocabulary", _refuse)
    with pytest.raises(VocabularyMismatch):
        next(run(Settings(methods=METHODS)))


def _refuse(*_: Any) -> None:
    raise VocabularyMismatch("another vocabulary")


def test_labels() -> None:
    configs = [None, {"method": "ngram"}, {"model": "/models/tiny-draft", "num_speculative_tokens": 3}]
    names = [label(SpeculativeConfig.of(c)) for c in configs]
    assert names == ["plain", "ngram k=8", "draft_model model=tiny-draft k=3"]


def test_methods_are_told_apart_by_their_paths() -> None:
    """By as much of these as it takes; the same path twice is the same method."""
    paths = ["/a/run1/head", "/a/run2/head", "/b/run2/head", "/b/other"]
    configs = [SpeculativeConfig.parse(f"draft_model:model={path},k=3") for path in paths]
    merged = [[{"method": "ngram", "num_speculative_tokens": k}, {"method": "suffix"}] for k in (2, 3)]
    configs += [SpeculativeConfig.of({"method": "merge", "drafters": drafters}) for drafters in merged]
    short = ["run1/head", "a/run2/head", "b/run2/head", "other"]
    assert [*module.named(configs)][:4] == [f"draft_model model={path} k=3" for path in short]
    assert [*module.named(configs).values()] == configs
    for settings in (Settings, long.Settings, exact.Settings):
        assert settings(methods=configs).methods == configs
        with pytest.raises(ConfigError, match="method draft_model model=/a/run1/head k=3 is given twice"):
            settings(methods=[*configs, replace(configs[0])])
    assert [*Transformers(Path(), "", LLM("tiny"), configs[1:3], 99).methods][1:] == [
        "transformers assisted by head k=3", "transformers assisted by /b/run2/head k=3",
    ]  # fmt: skip


@pytest.mark.parametrize("command", ["exact", "long", "overhead", "gpu", "serve", "server"])
def test_options_before_a_subcommand_are_not_lost(command: str) -> None:
    behind = {"overhead": ["text"], "gpu": ["--output", "x"]}.get(command, [])
    outcome = CliRunner().invoke(bench_app, ["--max-tokens", "7", "--suite", "chat", command, *behind])
    assert isinstance(outcome.exception, ConfigError)
    assert f"--max-tokens, --suite before {command} would not be read" in str(outcome.exception)


# --- measuring -----------------------------------------------------------------------------------------------------


def test_a_sample_counts_what_comes_in_the_time_it_takes() -> None:
    def output(total: float, accepted: list[int]) -> SimpleNamespace:
        tokens = len(accepted) + sum(accepted)
        return SimpleNamespace(
            token_ids=list(range(tokens)),
            metrics={
                "exactness": "bitwise",
                "timing": {"time_to_first_token": 0.5, "first_tokens": 1 + accepted[0],
                           "total_seconds": total, "decode_seconds": total - 0.5, "draft_seconds": total / 10,
                           "target_seconds": total / 4},
                "speculative_decoding": {"per_step_accepted": accepted, "num_spec_steps": len(accepted),
                                         "num_draft_tokens": 4 * len(accepted),
                                         "per_step_drafted": [4] * len(accepted),
                                         "num_accepted_draft_tokens": sum(accepted)},
            },
        )  # fmt: skip

    batches = {2: [output(2.5, [3, 0, 1]), output(4.5, [0, 0, 0, 2])], 1: [output(1.5, [1, 1])]}
    model = SimpleNamespace(forwards=7, expert_bytes=0)
    fake: Any = SimpleNamespace(
        generate=lambda prompts, params: batches[len(prompts)], runner=SimpleNamespace(model=model)
    )
    s = Sample()
    for part in ([[1], [2]], [[3]]):
        s += sample(fake, part, SamplingParams())
    # The first forward of each sequence gives 4, 1 and 2 tokens, before the clock starts.
    assert (s.timed, s.seconds, s.rate) == (3 + 5 + 2, 4.0 + 1.0, 2.0)
    assert (s.emitted, s.steps, s.drafted, s.accepted) == (17, 9, 36, 8) and s.lengths == {4: 9}
    # Of 4 seconds, the share that 0.7 of all 6 were; and of one, what it says.
    assert (s.draft, s.target) == pytest.approx((4 * 0.7 / 6 + 0.15, 4 * 1.75 / 6 + 0.375)) and s.first == [0.5] * 3
    assert s.rates == [(3 + 5) / 4, 2 / 1]
    assert Sample().rate == 0


def test_what_takes_no_time_has_no_ratio() -> None:
    none: Any = None
    llm: Any = SimpleNamespace(runner=SimpleNamespace(model=None))
    suite: Any = SimpleNamespace(name="short")
    timed, at_once = Sample(timed=3, seconds=1.0), Sample(emitted=2)
    for samples, plain in (([at_once], [at_once]), ([at_once], [timed]), ([timed], [at_once])):
        with pytest.raises(ConfigError, match="suite short: every answer ended in its first forward"):
            module.result(none, llm, suite, [], samples, plain)


def test_a_batch_that_took_no_time_in_one_round_has_the_ratios_of_others(llm: LLM) -> None:
    """And one of no round has none."""
    suite, settings = load_suite("chat", 3), Settings(model="tiny", suites=["chat"], prompts=3)

    def passed(*rates: float) -> Sample:
        one = [[5], [6], [7]]
        return Sample(tokens=one, first=[0.1], seconds=1.0, timed=3, emitted=4, steps=3, rates=list(rates))

    plain, ours = [passed(2.0, 2.0, 1.0), passed(2.0, 2.0, 1.0)], [passed(0.0, 5.0, 0.0), passed(4.0, 3.0, 0.0)]
    about = {"method": "a", "engine": "b", "speculative_config": {}, "exactness": None, "kv_bytes": None, "notes": []}
    found = module.result(settings, llm, suite, [[1]] * 3, ours, plain, weight_bytes=1, new_tokens=None, **about)
    assert found.by_batch == [2.0, 2.0]


def test_an_answer_that_ends_within_another_differs_there(llm: LLM) -> None:
    for ours, theirs in (([5, 6, 7], [5, 6]), ([5, 6], [5, 6, 7])):
        (found,) = module.compare(llm, [[1]], [ours], [Sample(tokens=[theirs])])
        assert (found.position, {found.plain_token, found.token}, found.gap) == (2, {7, None}, None)


def test_the_spread_over_prompts_is_told(done: Path) -> None:
    plain, ngram, _ = report.read(done / "results.jsonl")[:3]
    assert plain.by_batch == [1, 1] and ngram.by_batch is not None and len(ngram.by_batch) == 2
    assert "quartiles" not in report.markdown([plain, ngram]), "two prompts have no spread"
    many = replace(ngram, by_batch=[1.0, 0.9, 3.0, 2.0, 1.5, 1.2, 1.1, 2.5])
    said = "ngram k=4, by prompt: 0.90 at least, quartiles 1.02, 1.35, 2.38, 3.00 at most."
    assert said in report.markdown([plain, many])
    assert "by batch: 0.90 at least" in report.markdown([replace(many, batch=2)])


@pytest.fixture(scope="module")
def done(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run through the command line; returns its output folder."""
    folder = tmp_path_factory.mktemp("out") / "[new]"
    args = ["--suite", "stories,edit", "--speculate", "ngram:k=4", "--speculative-config"]
    args += [json.dumps({"method": "draft_model", "model": "tiny-draft", "num_speculative_tokens": 3})]
    args += ["--prompts", "2", "--max-tokens", "24", "--repeats", "2", "--output", str(folder)]
    outcome = CliRunner(env={"OUTRIDER_DATA": str(data)}).invoke(bench_app, args, catch_exceptions=False)
    assert outcome.exit_code == 0 and "draft_model" in outcome.output and "speedup" in outcome.output
    assert f"written to {folder}: " in outcome.output
    return folder


def test_a_run_writes_lines_table_and_plot(done: Path) -> None:
    results = report.read(done / "results.jsonl")
    assert [(r.suite, r.method) for r in results] == [
        (suite, method) for suite in ("stories", "edit")
        for method in ("plain", "ngram k=4", "draft_model model=tiny-draft k=3")
    ]  # fmt: skip
    for r in results:
        assert r.identical and r.differences == [] and r.near_ties == 0
        assert (r.prompts, r.max_tokens, r.batch, len(r.repeats)) == (2, 24, 1, 2)
        assert r.tokens_per_second > 0 and r.time_to_first_token > 0
        assert r.speedup_min <= r.speedup_max and r.speedup > 0
        shares = [r.draft_share, r.target_share, r.rest_share]
        assert sum(s for s in shares if s is not None) == pytest.approx(1) and all(s is not None for s in shares)
        assert r.exactness in ("bitwise", "law") and r.dtype == "bfloat16" and r.inflated_from is None
        assert r.weight_bytes > 1e6 and r.kv_bytes and r.peak_rss_bytes > r.weight_bytes
        assert {"cpu", "cores", "threads", "load", "gpu"} == r.hardware.keys() and r.commit and r.command and r.date
        assert {"outrider", "torch", "transformers", "python"} == r.versions.keys()
    plain, _, draft = results[:3]
    assert plain.speedup == plain.speedup_min == plain.speedup_max == plain.acceptance_length == 1
    assert plain.draft_acceptance_rate is None and draft.draft_acceptance_rate and draft.acceptance_length > 1
    assert [r.new_tokens is None for r in results] == [True] * 3 + [False] * 3  # `edit` are messages: answers may end
    assert all(r.new_tokens is None or 2 <= r.new_tokens <= 48 for r in results)
    assert draft.speculative_config == {"method": "draft_model", "acceptance_method": "coupled",
                                        "model": "tiny-draft", "num_speculative_tokens": 3}  # fmt: skip
    assert (done / "speedup.png").read_bytes()[:4] == b"\x89PNG"


def test_a_plot_says_if_answers_may_end(done: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    titles: list[str] = []
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda self, *_, **__: titles.append(self.axes[0].get_title())
    )
    results = report.read(done / "results.jsonl")
    for some in (results, results[:3]):
        report.plot(some, done / "none.png")
    assert titles == [f"tiny, bfloat16, batch 1, {most}24 new tokens" for most in ("at most ", "")]


def test_the_table_can_be_made_again_from_the_lines(done: Path, tmp_path: Path) -> None:
    results = report.read(done / "results.jsonl")
    report.write(odd := [replace(results[0], source="a file\u2028with\x85breaks")], tmp_path)
    assert report.read(tmp_path / "results.jsonl") == odd
    table = (done / "table.md").read_text()
    assert report.markdown(results) == table
    assert table.count("\n| plain | ") == 2 and table.count("| yes | ") == 6 and "## edit" in table
    assert f"`{results[0].command}`" in table and "enlargement" not in table
    assert set(json.loads(results[0].line())) == {f.name for f in fields(Result)}
    inflated = report.markdown([replace(r, inflated_from={"hidden_size": 384}) for r in results])
    assert "function-preserving enlargement; its source, with the same tokens: hidden_size 384" in inflated


def test_repeats_that_contradict_each_other_are_not_passed_off_as_a_result(done: Path) -> None:
    r = report.read(done / "results.jsonl")[0]
    said = "Not to be trusted: plain runs at 10.0 to 16.0 tokens/s, 1.00 to 1.00 times plain."
    assert said in report.markdown([replace(r, repeats=[12.0, 16.0, 10.0])])
    steady = replace(r, repeats=[12.0, 14.9, 10.0])
    assert "trusted" not in report.markdown([steady]) and "trusted" in report.markdown([replace(steady, speedup_max=2)])


def test_sampled_in_a_batch() -> None:
    settings = Settings(methods=METHODS[1:], prompts=3, batch=2, max_tokens=12, repeats=1, temperature=0.8, top_p=0.9)
    for r in run(settings):
        assert r.identical and r.near_ties is None and r.batch == 2


def test_the_commit_is_the_one_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not one that was made since."""
    now = module.commit()
    monkeypatch.setattr(module.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout="another\n"))
    assert module.commit() == now == module.provenance(module.torch.device("cpu"))["commit"] != "another"


def test_what_warmed_up_is_forgotten() -> None:
    """A drafter that remembers answers has not seen the beginning of the one that it is timed on."""
    settings = Settings(methods=[SpeculativeConfig("suffix")], prompts=1, max_tokens=8, repeats=1)
    _, found = run(settings)
    fresh = LLM("tiny", speculative_config={"method": "suffix"})
    (answer,) = fresh.generate(load_suite("stories", 1).encode(fresh), settings.params)
    assert found.acceptance_length == 8 / answer.metrics["speculative_decoding"]["num_spec_steps"]


def test_acceptance_rules_side_by_side() -> None:
    """One method under each rule: told apart by name, and judged by what the rule promises."""
    rules = ["coupled", "rejection", "typical", "typical,posterior_threshold=0.5"]
    methods = [SpeculativeConfig.parse(f"draft_model:model=tiny-draft,acceptance_method={rule}") for rule in rules]
    settings = Settings(methods=methods, prompts=2, max_tokens=16, repeats=1, temperature=1.0)
    plain, coupled, *others = results = list(run(settings))
    assert coupled.identical and coupled.method == "draft_model model=tiny-draft k=4"
    assert [r.method.split(" ", 3)[3] for r in others] == [
        "acceptance_method=rejection", "acceptance_method=typical",
        "acceptance_method=typical posterior_threshold=0.5",
    ]  # fmt: skip
    assert [r.exactness for r in others] == ["law", "lossy", "lossy"]
    assert ["no: the same law" in report.cells(others[0]), "no: LOSSY" in report.cells(others[1])] == [True, True]
    assert others[2].speculative_config["posterior_threshold"] == 0.5 and "differs" not in report.markdown(results)
    assert plain.acceptance_length == 1 and all(r.acceptance_length > 1 for r in results[1:])


def test_differences_are_found_and_explained(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    true = module.sample

    def wrong(llm: LLM, prompts: list[list[int]], *rest: Any) -> Sample:
        s = true(llm, prompts, *rest)
        calls.append(llm.speculative_config.method)
        if calls[-1] == "ngram" and calls.count("ngram") % 2 == 0:  # the second of two prompts, in each round
            (tokens,) = s.tokens
            given = llm.generate(prompts[0] + tokens[:5], max_tokens=1, temperature=0, logprobs=2)[0].logprobs
            assert given is not None
            (_, high), (second, low) = given[0].top.items()
            tokens[5], expected["gap"] = second, high - low
        return s

    calls: list[str] = []
    expected: dict[str, float] = {}
    monkeypatch.setattr(module, "sample", wrong)
    plain, r = run(Settings(methods=METHODS[:1], prompts=2, max_tokens=10, repeats=2))
    assert plain.identical and not r.identical
    assert calls == ["none", "ngram"] * 4, "the methods do not take turns at each prompt"
    (d,) = r.differences
    assert (d.prompt, d.position) == (1, 5) and d.plain_token != d.token
    assert d.gap == pytest.approx(expected["gap"], abs=1e-6) and r.near_ties == (d.gap <= 0.25)
    assert "no: 1 of 2 prompts, first at token 5" in report.cells(r)
    said = f"ngram k=4 differs from plain: prompt 1 at token 5, gap {d.gap:.2g}; near-ties: "
    assert said in report.markdown([plain, r])
    ended = replace(r, differences=[replace(d, token=None, gap=None)], near_ties=0)
    assert "differs from plain: prompt 1 at token 5; near-ties: 0 of 1." in report.markdown([plain, ended])
    assert '"gap": null' in ended.line()

    monkeypatch.setattr(module, "compare", lambda *_: [Difference(0, 1, 2, 3, gap) for gap in (0.2, 0.3, None)])
    assert [r.near_ties for r in run(Settings(max_tokens=2, repeats=1))] == [1]  # bfloat16: 0.25


def test_transformers_as_a_peer() -> None:
    methods = [METHODS[0], SpeculativeConfig.parse("draft_model:model=tiny-draft,k=1")]
    settings = Settings(methods=methods, dtype="float32", prompts=1, max_tokens=16, repeats=1, peer="transformers")
    results = [r for r in run(settings) if r.engine == "transformers"]
    assert [(r.method, r.speculative_config) for r in results] == [
        ("transformers plain", {}),
        ("transformers prompt lookup k=4", {"prompt_lookup_num_tokens": 4}),
        ("transformers assisted by tiny-draft k=1", {"assistant_model": "tiny-draft", "num_assistant_tokens": 1,
                                                     "num_assistant_tokens_schedule": "constant"}),
    ]  # fmt: skip
    for r in results:
        assert r.identical and r.exactness is None and r.draft_share is None and "twice" in r.notes[0]
        assert r.tokens_per_second > 0 and r.time_to_first_token > 0
    assert results[0].acceptance_length == 1 < results[2].acceptance_length <= 2


def test_ourselves_as_a_peer() -> None:
    """Whose samples do not say where the time went."""
    *_, other = run(Settings(prompts=2, max_tokens=8, repeats=1, peer="outrider"))
    assert other.by_batch is not None and len(other.by_batch) == 2 and min(other.by_batch) > 0
    assert other.identical and other.draft_share is other.target_share is other.rest_share is None


# --- the command line ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--suite", "poems"], "suite 'poems' is unknown"),
        (["--suite", "spec-bench"], "pass its folder with --data or OUTRIDER_DATA"),
        (["--speculative-config", "{"], "--speculative-config is not JSON"),
        (["--speculate", "ngram:k=x"], "num_speculative_tokens must be"),
        (["--temperature", "-1"], "temperature must be between 0"),
        (["--output", __file__], "cannot be a folder"),
        (["--suite", "stories,,"], "a comma too many; valid: chat, code"),
        (["--threads", str(2**40)], "threads must be at least 1 and at most 1024"),
        (["--threads", "-1"], "threads must be at least 1"),
        (["--seed", str(2**64)], "seed must be a 64-bit"),
        (["overhead", __file__, "--history", "0"], "--history must be whole numbers of at least 1"),
        (["overhead", __file__, "--history", "9,-9"], "--history must be whole numbers of at least 1"),
        (["long", "--threads", str(2**40)], "threads must be at least 1 and at most 1024"),
    ],
)
def test_mistakes_are_typed_errors(args: list[str], message: str) -> None:
    outcome = CliRunner(env={"OUTRIDER_DATA": None}).invoke(bench_app, args)
    assert isinstance(outcome.exception, OutriderError) and message in str(outcome.exception)


def test_numbers_are_read_once() -> None:
    assert read_ints("4,1_0,4", "--batch") == [4, 10] and read_floats("0,0.8,0.0", "--temperature") == [0.0, 0.8]


def test_no_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(report, "find_spec", lambda _: None)
    outcome = CliRunner().invoke(bench_app, ["--output", str(tmp_path / "new")])
    assert isinstance(outcome.exception, ConfigError) and "outrider[bench]" in str(outcome.exception)
    assert not (tmp_path / "new").exists()


def test_a_run_that_is_stopped_leaves_no_plot_of_another(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (written := ["results.jsonl", "table.md", "exact.png"]):
        (tmp_path / name).write_text("an earlier run's")
    real = exact.run

    def stopped(settings: Any, show: Any) -> Any:
        yield from real(settings, show)
        raise KeyboardInterrupt

    monkeypatch.setattr(exact, "run", stopped)
    small = ["--model", "tiny", "--suite", "stories", "--prompts", "2", "--max-tokens", "4", "--temperature", "0"]
    CliRunner().invoke(bench_app, ["exact", *small, "--output", str(tmp_path)])
    assert sorted(path.name for path in tmp_path.iterdir()) == written[:2]
    assert not any("earlier" in path.read_text() for path in tmp_path.iterdir())


def test_without_the_extra_for_serving(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delitem(sys.modules, "outrider.bench.server", raising=False)
    monkeypatch.delattr("outrider.bench.server", raising=False)
    monkeypatch.setitem(sys.modules, "h11", None)
    outcome = CliRunner().invoke(bench_app, ["server", "--output", str(tmp_path / "new")])
    assert isinstance(outcome.exception, ConfigError)
    assert str(outcome.exception) == "`bench server` needs h11; pip install 'outrider[serve]'"


def _bench(*args: str, expect: int = 0) -> Any:
    small = ["--prompts", "1", "--max-tokens", "4", "--repeats", "1", "--suite", "stories"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["outrider", "bench", *small, *args])
        with pytest.raises(SystemExit) as end:
            main()
    assert int(end.value.code or 0) == expect


def test_a_full_disk_costs_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table is shown, a line says what could not be written, the exit code too; what was written stays whole."""
    (tmp_path / "results.jsonl").write_text("of an earlier run\n")

    def full(self: Path, *_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    _bench("--output", str(tmp_path), expect=2)
    out, err = capsys.readouterr()
    assert "plain" in out and "ngram k=8" in out
    assert err.splitlines() == [
        f"outrider: {tmp_path / 'results.jsonl'} cannot be written: No space left on device; measuring goes on",
        f"outrider: {tmp_path / 'results.jsonl'} cannot be written: No space left on device",
    ]
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("results.jsonl", "of an earlier run\n")]


def test_a_plot_that_fails_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("no canvas")

    monkeypatch.setattr(report, "plot", fail)
    _bench("--output", str(tmp_path))
    out, err = capsys.readouterr()
    assert err == "outrider: speedup.png is not drawn: no canvas\n" and "table.md\n" in out and "ngram k=8" in out
    assert {p.name for p in tmp_path.iterdir()} == {"results.jsonl", "table.md"}


def test_what_was_measured_is_shown_whatever_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def some(*_: Any) -> Any:
        yield next(run(Settings(prompts=1, max_tokens=4, repeats=1)))
        raise RequestTooLong("too long")

    monkeypatch.setattr(module, "run", some)
    _bench("--output", str(tmp_path), expect=2)
    out, err = capsys.readouterr()
    assert "plain" in out and "too long" in err and len(report.read(tmp_path / "results.jsonl")) == 1


def test_output_to_a_full_device() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    args = ["bench", "--speculate", "none", "--prompts", "1", "--max-tokens", "4", "--repeats", "1"]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "outrider", *args], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert ended.returncode == 2 and "No space left on device" in ended.stderr
    assert ended.stderr.count("\n") == 1, ended.stderr


def test_what_goes_in_circles_is_said() -> None:
    fresh, circle = list(range(40)), list(range(4)) * 10  # of 33 runs, 4 are new
    assert report.repeated([fresh]) == 0
    assert report.repeated([circle]) == 29 / 33
    assert report.repeated([fresh, circle]) == 29 / 66, "an output is not a repetition of another one"
    assert report.repeated([[1, 2, 3]]) == 0
    plain = next(run(Settings(max_tokens=24, repeats=1, prompts=1)))
    assert plain.repeated is not None and report.circles(plain.repeated) in report.remarks([plain])


def test_mixed_changes_its_kind_with_each_request():
    suite = load_suite("mixed", 7)
    parts = [load_suite(name, 2).prompts for name in ("chat", "code", "edit", "summarise")]
    assert suite.prompts == [*(part[0] for part in parts), parts[0][0], parts[0][1], parts[1][1]]
    assert suite.stream and suite.chat and suite.source == "built-in" and not load_suite("chat", 1).stream
    for wrong in (0, 21):
        with pytest.raises(ConfigError, match="suite mixed has 20 prompts; prompts must be 1 to that"):
            load_suite("mixed", wrong)


def test_a_stream_is_not_run_in_waves(tiny_llm, monkeypatch):
    """Each request begins as another ends: one call with all prompts, and no more at a time than the batch."""
    one = {"repeats": 1, "methods": [SpeculativeConfig("ngram")]}
    settings = Settings(suites=["mixed"], prompts=6, batch=2, max_tokens=4, **one)
    most, step = [0], Engine.step_within

    def watched(self, *args, **kwargs):
        most[0] = max(most[0], len(self.running))
        return step(self, *args, **kwargs)

    monkeypatch.setattr(Engine, "step_within", watched)
    plain, drafted = run(settings)
    assert plain.identical and drafted.identical and plain.suite == "mixed" and plain.prompts == 6 and most[0] == 2
    assert plain.batch == 2 and [r.batch for r in run(replace(settings, batch=99))] == [6, 6]
    assert 0 <= drafted.draft_share <= 1 and drafted.batch == 2
