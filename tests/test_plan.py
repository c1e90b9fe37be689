"""`outrider plan`: what its arithmetic says, and the command."""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import replace
from shutil import copyfile, copytree

import pytest
from test_gguf import write
from typer.testing import CliRunner

from outrider.bench.forwards import EACH, ROWS, measure
from outrider.cli import app, main
from outrider.cli.plan import _timed
from outrider.config import STORED
from outrider.costs import Curve
from outrider.errors import ConfigError
from outrider.export import quantize
from outrider.find import embedded
from outrider.llm import LLM
from outrider.load import open_source, read_config, sizes
from outrider.plan import (
    ACCEPTANCE,
    DEVICES,
    NEVER,
    SUITES,
    Device,
    Planner,
    Prediction,
    Rate,
    Shape,
    Timed,
    acceptance,
    against,
    expected,
    published,
    seen_in,
    share_within,
    traffic,
)

LLAMA_8B = Shape(7_504_924_672, 32, 32, 8, 128, 4096, 128256)  # Llama 3.1 8B, less the embedding


def test_a_shape_is_the_checkpoints():
    source = open_source("tiny")
    shape = Shape.of(source.config)
    total = sum(file.stat().st_size for file in embedded()["tiny"].glob("*.safetensors"))
    assert shape.weight_bytes == pytest.approx(total, rel=0.02), "tiny is bfloat16, and its head is its embedding"
    for scheme in STORED:
        held = LLM("tiny", quantization=scheme).runner.model.expected_bytes(1)
        assert shape.quantized(scheme).weight_bytes == pytest.approx(held, rel=1e-3), "the head keeps 8 bits"
    assert LLAMA_8B.kv_bytes(1) == 131072, "as is well known"


def test_float32_takes_twice_the_bytes(make_checkpoint, tmp_path):
    """A checkpoint's dtype is what it runs in: of weights and of keys, but for weights that are rounded."""
    path = make_checkpoint(seed=4)
    shape, model = Shape.of(sizes(path).config), LLM(path).runner
    half = Shape.of(replace(sizes(path).config, dtype="bfloat16"))
    assert shape.weight_bytes == 2 * half.weight_bytes == pytest.approx(model.model.expected_bytes(1), rel=0.01)
    assert shape.kv_bytes(64) == 2 * half.kv_bytes(64) == model.kv.nbytes(64)
    assert shape.quantized("int8") == half.quantized("int8") and shape.stored(4, False) == half.stored(4, False)
    copytree(path, tmp_path / "silent")
    about = json.loads((path / "config.json").read_text())
    (tmp_path / "silent" / "config.json").write_text(json.dumps({**about, "dtype": None}))
    assert Shape.of(sizes(tmp_path / "silent").config) == shape, "by its weights, as it is loaded"
    (tmp_path / "silent" / "model.safetensors").unlink()
    assert Shape.of(sizes(tmp_path / "silent").config) == half


def test_an_embedding_that_is_not_the_head_takes_memory_and_no_time(make_checkpoint):
    config = read_config(make_checkpoint(tie_word_embeddings=False))
    apart, shared = Shape.of(config), Shape.of(replace(config, tied=True))
    size = config.vocab_size * config.hidden_size * config.itemsize
    assert apart.nbytes == apart.weight_bytes + size and shared.nbytes == shared.weight_bytes == apart.weight_bytes
    assert apart.quantized("int4") == shared.quantized("int4"), "the rounded head is no embedding"
    planner = Planner(apart, DEVICES["h100"], draft=apart)
    (speed, memory), (same, less) = (Planner(s, DEVICES["h100"]).step("", 2, 9, NEVER, 0) for s in (apart, shared))
    assert speed == same and memory - less == size
    assert planner.drafting("draft_model", 1, 1, 9)[1] == apart.nbytes + apart.kv_bytes(9)


def test_windows_bound_what_is_read_and_not_what_is_held(make_checkpoint):
    config = read_config(make_checkpoint("gemma3_text", num_hidden_layers=6, sliding_window=8))
    shape, device = Shape.of(config), Device(1e9, 1e15, 1e12)
    full = replace(shape, windows=(None,))
    assert config.windows.count(None) == 1 and shape.seen(1000) == (5 * 8 + 1000) / 6 and shape.seen(6) == 6
    assert shape.kv_bytes(1000) == full.kv_bytes(1000)
    keys, all_keys = (own.forward(device, 1, 1, 1e6) - own.forward(device, 1, 1, 0) for own in (shape, full))
    assert all_keys / keys == pytest.approx(6, rel=0.01)


def test_quantised_weights_are_counted_as_they_lie(tmp_path):
    target = quantize("tiny", tmp_path / "q8", bits=8)
    config, held, *_ = sizes(target)
    (file,) = target.glob("*.safetensors")
    assert held == file.stat().st_size, "tiny's head is its embedding"
    assert Shape.of(config, held=held).weight_bytes == pytest.approx(held)
    assert sizes("tiny").held == 0, "in bfloat16, as is supposed"


@pytest.mark.parametrize(("said", "bits"), [
    ({"quant_method": "gptq", "bits": 4, "group_size": 32}, 4 + 20 / 32), ({"quant_method": "awq", "bits": 8}, 8),
    ({"quant_method": "gptq", "bits": 4, "group_size": -1}, 4), ({"quant_method": "fp8"}, 8),
    ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 8}}}}, 8),
    ({"quant_method": "compressed-tensors", "config_groups": {"a": 5}}, 16),
    ({"quant_method": "gptq", "bits": "x"}, 16), ({"quant_method": "gptq", "bits": 8, "group_size": 16}, 9.5),
])  # fmt: skip
def test_quantised_weights_that_are_not_here(make_checkpoint, tmp_path, said, bits):
    """By the config alone: all but the head."""
    about = json.loads((make_checkpoint() / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**about, "quantization_config": said}))
    own = sizes(tmp_path)
    dense = Shape.of(own.config)
    shape = dense.stored(own.bits, own.experts) if own.bits else dense
    head = own.config.hidden_size * own.config.vocab_size
    assert 8 * shape.weight_bytes == pytest.approx((dense.weights - head) * bits + head * 16)


def test_experts_that_are_not_here(make_checkpoint, tmp_path):
    """MXFP4: only theirs are of 4 bits; and the command says what does not fit."""
    about = json.loads((make_checkpoint("gpt_oss") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**about, "quantization_config": {"quant_method": "mxfp4"}}))
    own = sizes(tmp_path)
    dense = Shape.of(own.config)
    wanted = dense.weights * 16 + dense.experts * dense.expert * 4.25
    assert 8 * dense.stored(own.bits, own.experts).weight_bytes == pytest.approx(wanted)
    result = CliRunner().invoke(app, ["plan", "--model", str(tmp_path), "--device", "h100", "--batch", "99999999"])
    plain = next(line for line in result.output.splitlines() if " none " in line)
    assert plain.rstrip().endswith("GB!") and "!: more than the 80.0 GB there are" in result.output, result.output
    result = CliRunner().invoke(app, ["plan", "--device", "h100", "--context", "1024", "--model", "tiny"])
    assert result.exit_code == 0 and "!" not in result.output  # no mark, and nothing about it


def test_a_draft_model_is_timed_as_it_runs(capsys, monkeypatch):
    """Unrounded, whatever the target is rounded to."""
    asked, command = [], sys.modules[_timed.__module__]  # the package has a function of its name
    monkeypatch.setattr(command, "_measured", lambda: DEVICES["h100"])
    monkeypatch.setattr(command, "_timed", lambda name, how, machine: asked.append((name, how)))
    flags = ("--model", "tiny", "--draft", "tiny-draft", "--quantization", "int8")
    assert run(capsys, monkeypatch, *flags)[0] == 0
    assert asked == [("tiny", "int8"), ("tiny-draft", None)]


def test_only_the_config_is_fetched(capsys, monkeypatch, tmp_path):
    asked = []
    copyfile(embedded()["tiny"] / "config.json", tmp_path / "config.json")
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download",
        lambda repo, allow_patterns, **_: asked.append(allow_patterns) or str(tmp_path),
    )
    code, out, err = run(capsys, monkeypatch, "--model", "some/model", "--device", "h100")
    assert code == 0 and "0.03 GB of weights" in out, err
    assert asked == [["*.json"]]


def test_what_a_step_emits():
    assert expected(0.0, 5) == 1 and expected(1.0, 5) == 6 and expected(0.5, 2) == 1.75


def test_plain_decoding_waits_for_bytes():
    """One sequence: all weights once a token; a large batch: arithmetic."""
    device = Device(1e12, 1e14, 1e12)
    alone, many = (LLAMA_8B.forward(device, batch, 1, 1) for batch in (1, 1024))
    assert alone == pytest.approx(0.015, rel=0.01) and many == pytest.approx(1024 * 2 * 7.5e9 / 1e14, rel=0.01)


def test_magicdecs_rule():
    """Through few keys: hopeless on short texts in large batches, and at long ones better the larger the batch."""
    planner = Planner(LLAMA_8B, DEVICES["h100"])

    def speedup(context: int, batch: int) -> float:
        return planner.predict("self:view=streaming:budget=512", "chat", context, batch, Rate(0.8, "given")).speedup

    assert speedup(512, 64) == 1.0
    assert 1.0 <= speedup(32768, 1) < speedup(32768, 32) < speedup(32768, 256) < 3.5
    assert speedup(8192, 32) < speedup(32768, 32)


def test_large_batches_phase_drafting_out():
    planner = Planner(LLAMA_8B, DEVICES["h100"])
    few, many = (planner.predict("draft_model", "chat", 512, batch) for batch in (1, 512))
    assert few.k > many.k and few.speedup > 1.5 > many.speedup >= 1.0


def test_coarse_weights_pay_by_their_bytes():
    def of(device: Device) -> tuple[Prediction, Prediction]:
        planner, rate = Planner(LLAMA_8B, device), Rate(0.9, "given")
        eight, four = (planner.predict(f"self:weights={w}", "chat", 512, 1, rate) for w in ("int8", "int4"))
        return eight, four

    eight, four = of(replace(DEVICES["a100"], decoded=math.inf))
    assert 1.2 < eight.speedup < four.speedup < 1 / 0.28 and four.memory > LLAMA_8B.weight_bytes * 1.28
    slow_eight, slow_four = of(replace(DEVICES["a100"], decoded=1.4e12))  # where decoding them is what takes long
    assert 1.0 <= slow_eight.speedup == slow_four.speedup < eight.speedup
    small = Planner(LLAMA_8B, Device(1e12, 1e14, 20e9)).predict("self:weights=int8", "chat", 512, 1)
    assert not small.fits


@pytest.mark.parametrize("method", ACCEPTANCE)
@pytest.mark.parametrize("suite", SUITES)
def test_acceptance_says_where_it_is_from(method, suite):
    rate = acceptance(method, suite)
    assert 0 < rate.chance < 1 and rate.source
    assert (suite in ACCEPTANCE[method]) == (rate.source != "assumed")


def test_unknown_methods():
    with pytest.raises(ConfigError, match="'magic' has no plan; valid: ngram"):
        acceptance("magic", "chat")


def line(**own) -> str:
    config = {"method": "ngram", "num_speculative_tokens": 4}
    data = {"suite": "chat", "method": "ngram k=4", "speculative_config": config, "batch": 1, "speedup": 2.0}
    return json.dumps(data | {"acceptance_length": 2.2, "draft_acceptance_rate": 0.3} | own)


def test_against_what_was_measured(tmp_path):
    """Given how many tokens a forward emitted, the roofline says what that was worth."""
    planner = Planner(LLAMA_8B, Device(1e12, 1e15, 1e12))
    (file := tmp_path / "results.jsonl").write_text(
        "\n".join([line(), line(speculative_config={"method": "none"}), line(speedup=4.0)])
    )
    right, wrong = against(file, planner, 512)
    assert right.predicted == pytest.approx(2.2, rel=0.05) and abs(right.off) < 0.15 < abs(wrong.off)
    assert share_within([right, wrong]) == 0.5 and share_within([]) == 0.0


def test_acceptance_of_own_prompts(capsys, monkeypatch, tmp_path):
    """Of a benchmark's lines: the chance by which a chain of the draft's length gives the tokens a forward that it had.

    Of several lengths the one that gave most counts; methods without a plan, and those not run, are not promised.
    Steps that drafted nothing are counted apart, if the line tells of them.
    """
    half = {"draft_acceptance_rate": 0.9, "acceptance_length": expected(0.5, 4)}  # found in few steps, and then right
    long = {"method": "ngram k=8", "speculative_config": {"method": "ngram", "num_speculative_tokens": 8}}
    long |= {"acceptance_length": expected(0.6, 8)}
    auto = {"method": "auto k=8", "speculative_config": {"method": "auto", "num_speculative_tokens": 8}}
    rare = line(acceptance_length=1 + 0.25 * (expected(0.8, 4) - 1), draft_lengths=[75, 0, 0, 5, 20], suite="rare")
    lines = [line(**half), line(**long), line(**half, suite="letters"), line(**auto), rare]
    (file := tmp_path / "results.jsonl").write_text("\n".join(lines))
    rates = seen_in(file)
    assert {at: (round(rate.chance, 6), rate.found) for at, rate in rates.items()} == {
        ("ngram", "chat"): (0.6, 1.0),
        ("ngram", "letters"): (0.5, 1.0),
        ("ngram", "rare"): (0.8, 0.25),
    }
    code, out, err = run(
        capsys, monkeypatch, "--device", "h100", "--model", "tiny", "--acceptance", str(file), "--json"
    )
    found = [json.loads(text) for text in out.splitlines()]
    assert code == 0 and {(each["method"], each["suite"]) for each in found} == set(rates), err
    assert all(each["source"].endswith("results.jsonl") for each in found)
    (never := tmp_path / "plain.jsonl").write_text(line(acceptance_length=1.0, draft_acceptance_rate=0.0))
    assert seen_in(never)["ngram", "chat"].chance < 1e-6
    never.write_text(line(**auto))
    for flags, message in [(("--suite", "chat"), "leave --suite out"), ((), "no line has a method with a plan")]:
        where = file if flags else never
        code, _, err = run(capsys, monkeypatch, "--device", "h100", "--acceptance", str(where), *flags)
        assert code == 2 and message in err


TIMED = Timed(  # a row costs a tenth of a forward, a thousand keys as much, and half of that for each row more
    Curve({n: 0.9 + 0.1 * n for n in (1, 2, 64)}),
    {n: Curve({keys: 0.0001 * keys * (0.5 + 0.5 * n) for keys in (1, 10**6)}) for n in (1, 9)},
    outside=0.5,
    drafted=0.7,
    itself=0.25,
)


def test_forwards_as_measured():
    planner = Planner(LLAMA_8B, Device(1e12, 1e15, 1e12), timed=TIMED)
    assert planner.forward(1, 1, 1000) == pytest.approx(1.1) and planner.forward(4, 5, 1000) == pytest.approx(2.9 + 1.2)
    assert planner.step("none", 4, 1000, NEVER, 0)[0] == pytest.approx(4 / (1.3 + 0.4 + 0.5))
    speed, _ = planner.step("ngram", 4, 1000, Rate(0.5, "given", 0.25), 1)  # one step in four drafts, and all look
    assert speed == pytest.approx(4 * 1.125 / (4e-4 + 0.25 * (1.7 + 0.6 + 0.7) + 0.75 * (1.3 + 0.4 + 0.5)), rel=0.01)
    speed, _ = planner.step("self:view", 4, 1000, Rate(1.0, "given"), 4, seen=500)
    assert speed == pytest.approx(4 * 5 / (4 * (1.3 + 0.2 + 0.25) + 2.9 + 1.2 + 0.7))
    of_draft = Planner(LLAMA_8B, Device(1e12, 1e15, 1e12), LLAMA_8B, TIMED, TIMED)
    assert of_draft.drafting("draft_model", 4, 4, 1000, 500)[0] == pytest.approx(4 * (1.3 + 0.2 + 0.25))
    coarse, _ = planner.drafting("self:weights=int8", 1, 1, 1)
    assert coarse == pytest.approx(planner.forward(1, 1, 1) * 8.125 / 16 + 0.25, rel=0.01)


def test_lines_of_long_contexts(tmp_path):
    """They say the draft length in their name, and how many keys the draft sees."""
    view = {"method": "self", "view": "retrieval:budget=500"}
    long = {"context": 1000, "batch": 4, "method": "self view=retrieval:budget=500 k=4", "speculative_config": view}
    long |= {"acceptance_length": 5.0, "draft_acceptance_rate": 1.0}
    triforce = {"speculative_config": {"method": "triforce"}, "method": "triforce k=4"}
    (file := tmp_path / "results.jsonl").write_text("\n".join([line(**long), line(**triforce)]))
    (found,) = against(file, Planner(LLAMA_8B, Device(1e12, 1e15, 1e12), timed=TIMED), 512)
    assert found.predicted == pytest.approx(5 * (1.3 + 0.4 + 0.5) / (4 * (1.3 + 0.2 + 0.25) + 2.9 + 1.2 + 0.7))


def test_steps_that_draft_and_others(tmp_path):
    """Half of the steps drafting four nodes is not all of them drafting two."""
    (file := tmp_path / "results.jsonl").write_text(line(draft_lengths=[3, 0, 0, 0, 3]))
    (found,) = against(file, Planner(LLAMA_8B, Device(1e12, 1e15, 1e12), timed=TIMED), 1000)
    plain, drafted = 1.0 + 0.1 + 0.5, 1.4 + 0.3 + 0.7
    assert found.predicted == pytest.approx(2.2 * plain / ((plain + drafted) / 2), rel=0.001)


def test_forwards_are_measured(tiny_llm):
    timed = measure(tiny_llm)
    assert (
        {*timed.rows} == {*ROWS} and {*timed.keys} == {*EACH} and min(timed.outside, timed.drafted, timed.itself) >= 0
    )
    assert all(seconds > 0 for curve in (timed.rows, *timed.keys.values()) for seconds in curve.values())
    assert not tiny_llm.runner.slots


@pytest.mark.parametrize("context", [32, 64])
def test_forwards_of_few_positions_are_measured(make_llm, context):
    assert {*measure(make_llm(max_position_embeddings=context)).rows} == {*ROWS}


def test_what_does_not_fit_is_not_loaded(make_checkpoint, tmp_path):
    """All splits of a GGUF count."""
    assert _timed("tiny", None, Device(1e9, 1e9, memory=1e6)) is None
    write(make_checkpoint(), tmp_path / "model.gguf", splits=8)
    first, *others = sorted(tmp_path.glob("model-*.gguf"))
    assert (
        _timed(str(first), None, Device(1e9, 1e9, memory=2.0 * first.stat().st_size + others[0].stat().st_size)) is None
    )


@pytest.mark.parametrize("text", ["x", "[]", "{}", line(batch="a"), line(speedup=None), "[" * 9999])
def test_damaged_results(tmp_path, text):
    (file := tmp_path / "results.jsonl").write_text(f"{line()}\n{text}\n")
    with pytest.raises(ConfigError, match="line 2: no "):
        list(against(file, Planner(LLAMA_8B, DEVICES["h100"]), 512))


def run(capsys, monkeypatch, *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["outrider", "plan", *words])
    with pytest.raises(SystemExit) as ended:
        main(app)
    return (ended.value.code or 0, *capsys.readouterr())


def test_the_command(capsys, monkeypatch, tmp_path):
    flags = [
        "--model",
        "tiny",
        "--device",
        "h100",
        "--suite",
        "chat,stories",
        "--batch",
        "1,8",
        "--draft",
        "tiny-draft",
    ]
    code, out, err = run(capsys, monkeypatch, *flags, "--output", str(tmp_path / "plot.png"))
    assert code == 0, err
    assert "stories" in out and "assumed" in out and "self:weights=int8" in out and "none" in out
    assert (tmp_path / "plot.png").stat().st_size > 1000
    code, out, _ = run(capsys, monkeypatch, *flags, "--json")
    predictions = [json.loads(text) for text in out.splitlines()]
    assert len(predictions) == len(ACCEPTANCE) * 2 * 2 * 2 and {"k", "speedup", "memory", "source"} <= {*predictions[0]}


def test_contexts_beyond_the_models_own_are_told(capsys, monkeypatch):
    """The model's and the draft model's; in JSON on each line, and never on standard output beside it."""
    flags = ["--model", "tiny", "--draft", "tiny-draft", "--device", "h100"]
    own = {name: open_source(name).config.context for name in ("tiny", "tiny-draft")}
    code, out, err = run(capsys, monkeypatch, *flags, "--context", f"{own['tiny']},{own['tiny'] + 1}", "--json")
    assert code == 0 and f"tiny reads {own['tiny']} tokens" in err and f"tiny-draft reads {own['tiny-draft']}" in err
    lines = [json.loads(text) for text in out.splitlines()]
    assert {(p["context"] - own["tiny"], p["within_context"]) for p in lines} == {(0, True), (1, False)}
    code, _, err = run(capsys, monkeypatch, *flags, "--context", str(min(own.values())))
    assert code == 0 and "reads" not in err


def test_the_command_measures_here(capsys, monkeypatch, tmp_path):
    (file := tmp_path / "results.jsonl").write_text(line())
    code, out, _ = run(capsys, monkeypatch, "--model", "tiny", "--against", str(file))
    assert code == 0 and "ngram k=4" in out and "within 15 %" in out


def test_options_that_would_not_be_read_are_refused(capsys, monkeypatch, tmp_path):
    (file := tmp_path / "results.jsonl").write_text(line())
    for flags, message in [
        (["--published", "--device", "h100"], "--published stands alone: leave --device out"),
        (["--ranks", "2", "--output", "x.png"], "--ranks stands alone but for --model: leave --output out"),
        (["--against", str(file), "--device", "h100", "--batch", "8", "--suite", "code"], "leave --batch, --suite out"),
        (["--against", str(file), "--device", "h100", "--context", "512,1024"], "512,1024 are several"),
    ]:
        code, out, err = run(capsys, monkeypatch, *flags)
        assert code == 2 and message in err and not out
    code, out, _ = run(capsys, monkeypatch, "--model", "tiny", "--device", "h100", "--suite", "chat, code", "--json")
    assert code == 0 and {json.loads(text)["suite"] for text in out.splitlines()} == {"chat", "code"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--device", "abacus"], "'abacus' is unknown; valid: here, b200"),
        (["--suite", "poems"], "'poems' is unknown; valid: chat"), (["--batch", "0"], "at least 1"),
        (["--context", "9" * 400], "at most 1099511627776"), (["--output", "plan.xyz"], "pdf, pgf, png"),
        (["--quantization", "int3"], "valid: int8, int4"), (["--against", "nowhere"], "nowhere cannot be read"),
        (["--draft", ""], "--draft is empty"), (["--published", "--ranks", "2"], "--published stands alone"),
        (["--output", "/nowhere/x.png"], "/nowhere/x.png cannot be written"), (["--output", "/"], "cannot be written"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be(capsys, monkeypatch, flags, message):
    known = [] if "--device" in flags else ["--device", "h100"]
    code, _, err = run(capsys, monkeypatch, "--model", "tiny", *known, *flags)
    assert code == 2 and message in err and err.count("\n") == 1


def test_a_plot_that_cannot_be_written_is_told_first(capsys, monkeypatch, tmp_path):
    access = os.access
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path and access(path, mode))
    code, out, err = run(
        capsys, monkeypatch, "--model", "tiny", "--device", "h100", "--output", str(tmp_path / "plot.png")
    )
    assert code == 2 and "plot.png cannot be written" in err and not out


def test_the_seeds_figures_are_what_the_roofline_says(capsys, monkeypatch):
    """MagicDec's and TriForce's published speed-ups, from the hardware's figures, within a fifth."""
    found = published()
    assert len(found) == 22 and all(abs(p.predicted() / p.speedup - 1) < 0.2 for p in found)
    code, out, _ = run(capsys, monkeypatch, "--published")
    assert code == 0 and "within 20 %: 100%" in out


def test_what_goes_between_gpus(capsys, monkeypatch):
    code, out, _ = run(capsys, monkeypatch, "--model", "tiny", "--ranks", "2,4,2", "--json")
    lines = [json.loads(text) for text in out.splitlines()]
    assert code == 0 and [line["ranks"] for line in lines] == [2] * 4 + [4] * 4, "each once"
    for mode in ("gather", "ordered"):
        plain, draft = (line for line in lines if (line["ranks"], line["mode"]) == (2, mode))
        assert draft["bytes"] == 9 * plain["bytes"] and draft["collectives"] == plain["collectives"]
    code, out, _ = run(capsys, monkeypatch, "--model", "tiny", "--ranks", "2")
    assert code == 0 and "NVLink" in out


def test_what_goes_between_gpus_in_float32(capsys, monkeypatch, make_checkpoint):
    path = make_checkpoint(seed=4)
    _, out, _ = run(capsys, monkeypatch, "--model", str(path), "--ranks", "2", "--json")
    line = next(line for line in map(json.loads, out.splitlines()) if (line["mode"], line["rows"]) == ("gather", 9))
    assert line["bytes"] == traffic(read_config(path), 2, "gather", 9, 9, itemsize=4)[1]
