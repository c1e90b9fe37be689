"""Compensated rounding against its definition, and what calibrates it."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from helpers import logits_after

from outrider import LLM, compensate
from outrider.compensate import FEW, compensated, layers, read, said
from outrider.errors import CheckpointError, ConfigError
from outrider.export import quantize
from outrider.find import embedded
from outrider.kv import DenseKV, Entry, Plan
from outrider.load import open_source, read_tokenizer
from outrider.quantize import ranges, rounded
from outrider.train.conversations import Template

SIZES = {"hidden_size": 128, "intermediate_size": 192}
BF16 = torch.bfloat16


def correlated(rows: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs (rows, inputs) that say much about each other, and weights (24, inputs)."""
    noise = torch.Generator().manual_seed(inputs)
    few = torch.randn(rows, inputs // 4, generator=noise) @ torch.randn(inputs // 4, inputs, generator=noise)
    x = few + torch.randn(rows, inputs, generator=noise)
    return x, torch.randn(24, inputs, generator=noise)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("inputs", "group"), [(160, 32), (192, 64), (256, 128), (160, 160)])
def test_as_defined(inputs, group, symmetric):
    """Column by column, the largest inputs first, with the inverse of what is left of H: the same integers, scales and
    zeros."""
    x, weight = correlated(400, inputs)
    x[:, 5] = 0  # an input that is never there
    x[:, 40] *= 3  # has the first turn
    h = x.T @ x
    full = h.double().clone()
    full[5, 5] = 1
    full += torch.eye(inputs) * compensate.DAMPING * full.diagonal().mean()
    turns = sorted(range(inputs), key=lambda j: -float(h[j, j]))
    assert turns[0] == 40 and turns[-1] == 5
    inverses = [torch.linalg.inv(full[turns[i:]][:, turns[i:]]) for i in range(inputs)]
    importance = torch.empty(inputs)
    importance[turns] = torch.tensor([1 / float(inverse[0, 0]) for inverse in inverses])
    w, found = weight.double(), compensated(weight, h, 4, group, symmetric, BF16)
    factors = []
    for g in range(inputs // group):
        own = slice(g * group, (g + 1) * group)
        factors.append(ranges(weight[:, own], 4, symmetric, BF16, importance[own]))
        assert torch.equal(found.scales[:, g].float(), factors[g][0])
        assert symmetric or torch.equal(found.zeros[:, g].float(), factors[g][1])
    for i, j in enumerate(turns):
        scale, zero = factors[j // group]
        q = (w[:, j] / scale + zero).round().clamp(-8, 7)
        assert torch.equal(found.values[:, j].double(), q), j
        error = (w[:, j] - (q - zero) * scale) / inverses[i][0, 0]
        w[:, turns[i:]] -= error[:, None] * inverses[i][0]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, 64, 128, 256])
def test_outputs_are_nearer(group, symmetric):
    """The outputs of correlated inputs are off by less than half of what rounding to nearest gives."""
    x, weight = correlated(1000, 256)
    ways = compensated(weight, x.T @ x, 4, group, symmetric, BF16), rounded(weight, 4, group, symmetric, BF16)
    ours, nearest = (((way.dense() - weight) @ x.T).square().sum() for way in ways)
    assert ours < 0.5 * nearest


def texts_of(count: int, length: int) -> list[list[int]]:
    return torch.randint(128, (count, length), generator=torch.Generator().manual_seed(count)).tolist()


def test_layers_see_what_those_before_them_make(make_checkpoint, tmp_path, monkeypatch):
    """A second layer is compensated for what the first one, as it was written, gives; and outputs come nearer."""
    folder, texts = make_checkpoint("qwen3", **SIZES, dtype=BF16), texts_of(12, 40)
    monkeypatch.setattr(compensate, "said", lambda name, progress: texts)
    ours, nearest = quantize(folder, tmp_path / "q"), quantize(folder, tmp_path / "n", calibration="none")
    source, name = open_source(folder), "model.layers.1.self_attn.q_proj.weight"
    model = LLM(ours, device="cpu", dtype="float32").runner.model
    kv, h = DenseKV(model.config, torch.float32, torch.device("cpu")), torch.zeros(128, 128)
    for i, text in enumerate(texts):
        plan, states = Plan([Entry(i, 0, len(text), 0)]), {1: torch.empty(0)}
        kv.reserve(plan)
        model.forward(text, list(range(len(text))), [len(text)] * len(text), kv, plan, states)
        x = torch.nn.functional.rms_norm(states[1], (128,), model.layers[1].input_norm, model.config.rms_norm_eps)
        h += x.T @ x
    expected = compensated(source.weights.mapped(name, 64, 128), h, 4, 32, False, BF16)
    written = open_source(ours).weights.mapped(name, 64, 128)
    assert (written == expected.dense()).float().mean() > 0.99  # up to ties: sums have another order there
    plain = rounded(source.weights.mapped(name, 64, 128), 4, 32, False, BF16)
    assert (written == plain.dense()).float().mean() < 0.8
    exact, *others = (LLM(way, device="cpu", dtype="float32") for way in (folder, ours, nearest))
    off = [sum((logits_after(o, t) - logits_after(exact, t)).square().sum() for t in texts_of(5, 40)) for o in others]
    assert off[0] < off[1]


def test_experts_that_see_too_little(make_checkpoint, caplog):
    """Each expert is compensated by its own rows; those hardly chosen are rounded to nearest, which one line says."""
    sizes = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    source = open_source(make_checkpoint("qwen3_moe", **SIZES, **sizes, dtype=BF16))
    with caplog.at_level(logging.WARNING):
        found = [name for layer in layers(source, texts_of(1, 60), 4, 32, False, BF16) for name in layer.items()]
    nearest = 0
    for name, own in found:
        plain = rounded(source.weights.mapped(name, *own.values.shape), 4, 32, False, BF16)
        same = torch.equal(plain.values, own.values)
        assert not same or ".experts." in name
        nearest += same
    assert 0 < nearest < sum(".experts." in name for name, _ in found)
    (line,) = caplog.messages
    assert f"saw {FEW} rows or fewer" in line and "rounded to nearest" in line


@pytest.mark.parametrize("arch", ["olmo2", "phi3", "glm4", "gemma3_text", "qwen2_moe", "mixtral"])
def test_every_linear_of_a_family(make_checkpoint, tmp_path, monkeypatch, arch):
    """Fused, turned and expert weights come back under their names in the checkpoint's order of rows."""
    more = {
        "num_experts": 4,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    }
    more = {"num_local_experts": 4, "num_experts_per_tok": 4} if arch == "mixtral" else more if "moe" in arch else {}
    folder = make_checkpoint(arch, **SIZES, **more, dtype=BF16)
    monkeypatch.setattr(compensate, "said", lambda name, progress: texts_of(4, 40))
    old, new = open_source(folder), open_source(quantize(folder, tmp_path / "q"))
    count = 0
    for name, shape in old.weights.shapes.items():
        before, after = (source.weights.mapped(name, *shape).float() for source in (old, new))
        if (stored := new.weights.stored(name, *shape)) is None:
            assert torch.equal(before, after)
            continue
        count += 1
        assert stored.kind == "packed 4-bit"
        assert torch.corrcoef(torch.stack([before.flatten(), after.flatten()]))[0, 1] > 0.97, name
    assert count >= 2 * 4


def test_what_a_model_says(make_checkpoint, monkeypatch, tmp_path):
    """The same each time; conversations in its template, else texts from the token that begins one."""
    monkeypatch.setattr(compensate, "TOKENS", 600)
    monkeypatch.setattr(compensate, "LENGTH", 24)
    monkeypatch.setattr(compensate, "BATCH", 16)
    folder = make_checkpoint()
    texts = said(folder)
    assert texts == said(folder) and 600 <= sum(map(len, texts)) <= 700
    assert len({tuple(text) for text in texts}) == len(texts) and all(text[0] == 0 for text in texts)
    talks = said("tiny")
    assert 500 < sum(map(len, talks)) <= 700 and max(map(len, talks)) <= 24
    header = Template(read_tokenizer(embedded()["tiny"]))
    assert all(text[:1] == header.ids(header.before)[:1] for text in talks)
    monkeypatch.setattr(compensate, "TOKENS", 10**9)
    monkeypatch.setattr(compensate, "ROUNDS", 1)
    with pytest.raises(ConfigError, match="give texts to calibrate it by"):
        said(folder)


def test_texts_of_the_user(tmp_path):
    source, path = open_source("tiny"), tmp_path / "texts.jsonl"
    lines = [json.dumps({"text": f"Story {i}. " + "Once upon a time there was a dog. " * (i % 60)}) for i in range(900)]
    path.write_text("\n".join(lines))
    texts = read([path], source)
    assert compensate.TOKENS * 0.9 < sum(map(len, texts)) < compensate.TOKENS * 1.1
    assert max(map(len, texts)) <= compensate.LENGTH and {text[0] for text in texts} == {0}
    seen = source.tokenizer().decode(texts[-1])
    assert int(seen.split("Story ")[1].split(".")[0]) > 850  # from all of the file
    for given, says in (("few words", "have 3 tokens; give at least 1024"), ("", "have 0 tokens")):
        (tmp_path / "few.txt").write_text(given)
        with pytest.raises(ConfigError, match=says):
            read([tmp_path / "few.txt"], source)
    with pytest.raises(ConfigError, match="no file or folder"):
        read([tmp_path / "nothing"], source)


def test_a_model_that_computes_nan(make_checkpoint):
    """It is an error, not a folder of nonsense."""
    source = open_source(make_checkpoint(**SIZES, dtype=BF16))
    read_as_stored = source.weights.mapped
    source.weights.mapped = lambda name, *shape: read_as_stored(name, *shape) * (float("nan") if "embed" in name else 1)
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        list(layers(source, texts_of(2, 40), 4, 32, False, BF16))
