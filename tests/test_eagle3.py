"""EAGLE-3 heads: what they guess is what the papers' layer says, from any published layout; others are refused."""

from __future__ import annotations

import json
import math
from fnmatch import fnmatch
from pathlib import Path
from shutil import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import random_eagle3, run, watched
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider import LLM, SamplingParams
from outrider.drafters.eagle3 import Eagle3, Head
from outrider.errors import CheckpointError, ConfigError, ModelNotFound, VocabularyMismatch
from outrider.find import find, kind_of
from outrider.ops import native
from outrider.sampling import Row, guess
from outrider.sequence import Sequence
from outrider.trees import Tree
from outrider.verify import COUPLED

TAPS = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
TEXT = [5, 9, 3, 70, 2, 2, 8, 1, 33, 4, 6, 100, 17]


def reference(folder: Path, target: Path, taps: list[int], tokens: list[int], drafted: list[int]) -> Tensor:
    """(1 + drafted, draft vocabulary) logits after a text and each drafted token: plain PyTorch, all at once."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    about = json.loads((folder / "config.json").read_text())
    c, said = about.get("transformer_layer_config", about), about | about.get("eagle_config", {})
    window = c["sliding_window"] if c.get("layer_types") == ["sliding_attention"] else 10**6
    file = folder / "pytorch_model.bin"
    w = torch.load(file) if file.exists() else load_file(folder / "model.safetensors")
    w = {name.removeprefix("model.").replace("layers.0.", "midlayer."): tensor for name, tensor in w.items()}
    eps, dim, base = c["rms_norm_eps"], c["head_dim"], c.get("rope_theta", 10000.0)

    def norm(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w[name + ".weight"]

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, w[name + ".weight"], w.get(name + ".bias"))

    with torch.no_grad():
        raw: list[Tensor] = []  # what enters each layer, and what enters the final norm
        for module in (*model.model.layers, model.model.norm):
            module.register_forward_pre_hook(lambda _, given: raw.append(given[0][0]))
        model(torch.tensor([tokens]))
        parts = [norm(raw[t], f"fc_norm.{i}") if said.get("fc_norm") else raw[t] for i, t in enumerate(taps)]
        seen = torch.cat(parts, -1)[:-1]
        states = linear(norm(seen, "input_norm") if said.get("norm_before_fc") else seen, "fc")
        ids = tokens[1:]
        logits = []
        for token in [*drafted, None]:
            n = len(ids)
            embedded = norm(model.model.embed_tokens(torch.tensor(ids)), "midlayer.input_layernorm")
            normed = norm(states, "midlayer.hidden_norm")
            x = torch.cat([embedded, normed], -1)
            q, k, v = (linear(x, f"midlayer.self_attn.{name}_proj").view(n, -1, dim) for name in "qkv")
            if "midlayer.self_attn.q_norm.weight" in w:
                q, k = norm(q, "midlayer.self_attn.q_norm"), norm(k, "midlayer.self_attn.k_norm")
            angles = torch.arange(n)[:, None] * base ** (-torch.arange(0, dim, 2) / dim)
            cos, sin = angles.cos().repeat(1, 2)[:, None], angles.sin().repeat(1, 2)[:, None]
            q, k = (y * cos + torch.cat([-y[..., dim // 2 :], y[..., : dim // 2]], -1) * sin for y in (q, k))
            k, v = (y.repeat_interleave(q.shape[1] // y.shape[1], 1) for y in (k, v))
            scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(dim)
            unseen = torch.ones(n, n).triu(1) + torch.ones(n, n).tril(-window)
            weights = scores.masked_fill(unseen.bool(), -torch.inf).softmax(-1)
            y = torch.einsum("hij,jhd->ihd", weights, v).reshape(n, -1)
            y = (normed if said.get("norm_before_residual") else states) + linear(y, "midlayer.self_attn.o_proj")
            z = norm(y, "midlayer.post_attention_layernorm")
            gated = F.silu(linear(z, "midlayer.mlp.gate_proj")) * linear(z, "midlayer.mlp.up_proj")
            out = y + linear(gated, "midlayer.mlp.down_proj")
            logits.append(linear(norm(out[-1:], "norm"), "lm_head"))
            if token is not None:
                ids = [*ids, token]
                own = norm(out[-1:], "norm") if said.get("norm_output") else out[-1:]
                states = torch.cat([states, own])  # its own output instead of the target's states
    return torch.cat(logits)


def guesses(llm: LLM, folder: Path, text: list[int], **options) -> tuple[Eagle3, Sequence, list[Tensor]]:
    """A drafter that has drafted after a text, with all logits that its head gave."""
    drafter = Eagle3(model=str(folder), **options)
    drafter.attach(llm.runner, lambda name: llm.runner)
    seen = watched(drafter)
    seq = Sequence(text, SamplingParams(temperature=0, max_tokens=40), 0)
    llm.runner.extend([seq])
    return drafter, seq, seen


LAYOUTS = [
    ("original", {}),
    ("original", {"rope_theta": 500000.0, "num_key_value_heads": 4}),
    ("original", {"attention_bias": True}),
    ("speculators", {}),
    ("speculators", {"norm_before_residual": True}),
    ("speculators", {"norm_before_fc": True, "norm_before_residual": True}),
    ("speculators", {"model_type": "qwen3", "norm_before_residual": True}),
    ("speculators", {"eagle_aux_hidden_state_layer_ids": [2, 1]}),
    ("speculators", {"norm_before_fc": True, "norm_before_residual": True, "norm_output": True, "fc_norm": False}),
    ("original", {"fc_norm": True, "norm_output": True}),
    ("original", {"eagle_config": {"norm_before_fc": True, "eagle_aux_hidden_state_layer_ids": []}}),
    ("automodel", {"model_type": "qwen3"}),
    ("speculators", {"sliding_window": 3, "layer_types": ["sliding_attention"]}),
    ("original", {"sliding_window": 3, "use_sliding_window": False}),
]


@pytest.mark.parametrize("walks", [True, False])
@pytest.mark.parametrize(("layout", "config"), LAYOUTS, ids=str)
def test_logits_are_the_reference_s(make_checkpoint, layout, config, walks):
    """A chain from a prompt, and after more text was accepted; in one native call, and operation by operation."""
    target = make_checkpoint()
    folder = random_eagle3(target, layout, **{**TAPS, **config})
    taps = config.get("eagle_aux_hidden_state_layer_ids", [0, 1, 2])
    llm = LLM(target, device="cpu", dtype="float32", max_num_batched_tokens=4)
    drafter, seq, seen = guesses(llm, folder, TEXT[:-1], depth=4, width=1)
    assert drafter.head.walk or native.active == native.REFERENCE
    drafter.head.walk = drafter.head.walk if walks else None
    seq.tokens.append(TEXT[-1])  # rows are there for all tokens but the last
    for more in ([], [44], [90, 3, 3]):
        seq.tokens += more
        if more:
            llm.runner.extend([seq])
        seen.clear()
        (draft,) = drafter.propose([seq.shown(COUPLED)], 4)
        wanted = reference(folder, target, taps, seq.tokens, draft.tokens)
        assert len(draft) == 4 and draft.is_chain
        torch.testing.assert_close(torch.cat(seen), wanted[:4], rtol=5e-3, atol=5e-3)
        best = drafter.head.tokens[wanted[:4].argmax(-1)]
        assert draft.tokens == best.tolist()
    drafter.forget(seq)
    assert not drafter.head.kv.store and not drafter.seen


def test_a_projection_may_be_the_target_s(make_checkpoint):
    """Left out it is the target's embedding; a target whose head is another is told."""
    target = make_checkpoint(tie_word_embeddings=True)
    folder = random_eagle3(target, **TAPS)
    (file,) = (path for path in folder.iterdir() if path.suffix != ".json")
    tensors = load_file(file) if file.suffix == ".safetensors" else torch.load(file)
    file.unlink()
    words = torch.arange(len(tensors["d2t"])) + tensors["d2t"]
    llm = LLM(target, device="cpu", dtype="float32")
    tensors["lm_head.weight"] = llm.runner.model.embed(words).clone()
    found = []
    for _ in range(2):
        save_file(tensors, folder / "model.safetensors")
        drafter, seq, seen = guesses(llm, folder, TEXT[:-1], depth=3, width=1)
        seq.tokens.append(TEXT[-1])
        drafter.propose([seq.shown(COUPLED)], 3)
        found.append(torch.cat(seen))
        tensors.pop("lm_head.weight", None)
    assert torch.equal(*found) and len(found[0]) == 3
    with pytest.raises(CheckpointError, match=r"no lm_head\.weight"):
        Eagle3(model=str(folder)).attach(LLM(make_checkpoint(seed=2), device="cpu", dtype="float32").runner, None)


def test_trees_hold_the_likeliest_paths(make_checkpoint):
    """Every node's likelihood is the reference's along its path; no path outside is likelier; parents come first."""
    target = make_checkpoint()
    folder = random_eagle3(target, **TAPS, scale=0.2)
    llm = LLM(target, device="cpu", dtype="float32")
    drafter, seq, _ = guesses(llm, folder, TEXT[:-1], width=3, depth=4)
    seq.tokens.append(TEXT[-1])
    (draft,) = drafter.propose([seq.shown(COUPLED)], 9)
    assert len(draft) == 9 and not draft.is_chain
    paths = [draft.path_to(node) for node in range(9)]
    chances, ids = {(): 0.0}, drafter.head.tokens
    found = {}
    for path in [[], *paths]:
        tokens = [draft.tokens[node] for node in path]
        logs = reference(folder, target, [0, 1, 2], seq.tokens, tokens)[-1].log_softmax(-1)
        for value, at in zip(*logs.topk(3), strict=True):
            found[(*tokens, int(ids[at]))] = float(value)
    for path in sorted(found, key=len):
        if path[:-1] in chances:
            chances[path] = chances[path[:-1]] + found[path]
    del chances[()]
    mine = {tuple(draft.tokens[node] for node in path) for path in paths}
    shallow = {path: chance for path, chance in chances.items() if len(path) <= 4}
    assert mine == set(sorted(shallow, key=lambda path: -shallow[path])[:9])
    assert paths[0] == [0] and (draft.tokens[0],) == max(shallow, key=lambda path: shallow[path])
    drafter.forget(seq)


def test_batches_guess_as_alone(make_checkpoint):
    """Sequences of different length, one of which has not been read yet."""
    target = make_checkpoint()
    llm = LLM(target, device="cpu", dtype="float32")
    folder = random_eagle3(target, **TAPS)
    drafter, seq, _ = guesses(llm, folder, TEXT[:-1], width=2)
    other, late = Sequence(TEXT[3:7], seq.params, 0), Sequence([3, 4], seq.params, 0)
    llm.runner.extend([other])
    for one in (seq, other):
        one.tokens.append(7)
    alone = [drafter.propose([one.shown(COUPLED)], 6)[0] for one in (seq, other)]
    together = drafter.propose([one.shown(COUPLED) for one in (seq, late, other)], 6)
    assert [together[0], together[2]] == alone and not together[1].tokens


def test_sampling_ranks_by_the_request(make_checkpoint):
    """Banned tokens are not proposed; the noise is the target's own: another seed, another draft."""
    target = make_checkpoint()
    llm = LLM(target, device="cpu", dtype="float32")
    folder = random_eagle3(target, **TAPS, scale=0.05)
    drafter, seq, _ = guesses(llm, folder, TEXT[:-1])
    seq.tokens.append(7)
    plain = drafter.propose([seq.shown(COUPLED)], 3)[0].tokens
    found = set()
    for seed in range(4):
        params = SamplingParams(temperature=1.0, max_tokens=40, logit_bias={plain[0]: -1e9})
        drawn = Sequence(seq.tokens[:-1], params, seed)
        llm.runner.extend([drawn])
        drawn.tokens.append(7)
        found.add(tuple(drafter.propose([drawn.shown(COUPLED)], 3)[0].tokens))
    assert len(found) > 2 and plain[0] not in {tokens[0] for tokens in found}


SHAPES = [
    {"temperature": 0.0}, {"temperature": 0.7}, {"temperature": 1.0, "top_k": 7}, {"temperature": 1.5, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1}, {"temperature": 0.5, "logit_bias": {9: 50.0}},
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_native_guesses_are_the_reference_s(shape, monkeypatch):
    """The likeliest tokens of a draft vocabulary and their chances, with the noise of each place."""
    noise = torch.Generator().manual_seed(3)
    logits, known = torch.randn(3, 40, generator=noise), torch.randperm(128, generator=noise)[:40].sort().values
    seq = Sequence(TEXT, SamplingParams(**shape), 5)
    rows = [Row(seq, [1, 2, 3][:n]) for n in range(3)]
    found = guess(logits, rows, known, 128, 4)
    monkeypatch.setattr(native, "active", native.REFERENCE)
    for (ids, chances), (wanted, exact) in zip(found, guess(logits, rows, known, 128, 4), strict=True):
        left = sum(map(math.isfinite, exact))  # filters may keep fewer than were asked for
        assert ids[:left] == wanted[:left] and chances[:left] == pytest.approx(exact[:left], abs=1e-3)
    assert guess(torch.full((1, 40), torch.nan), rows[:1], known, 128, 4)


def test_unlikely_nodes_are_left_out(make_checkpoint):
    target = make_checkpoint()
    llm = LLM(target, device="cpu", dtype="float32")
    folder = random_eagle3(target, **TAPS)
    drafter, seq, _ = guesses(llm, folder, TEXT[:-1], width=4, p_min=0.3)
    seq.tokens.append(7)
    (draft,) = drafter.propose([seq.shown(COUPLED)], 30)
    whole, seq2, _ = guesses(llm, folder, TEXT[:-1], width=4)
    seq2.tokens.append(7)
    assert len(draft) < len(whole.propose([seq2.shown(COUPLED)], 30)[0])


def change(folder: Path, where: Path, about: dict | None = None, **tensors: Tensor | None) -> Path:
    """A copy of a head in safetensors with other config keys and tensors; None takes a tensor away."""
    named = torch.load(folder / "pytorch_model.bin")
    for name, tensor in tensors.items():
        named.pop(name.replace("__", "."), None)
        named |= {} if tensor is None else {name.replace("__", "."): tensor}
    where.mkdir()
    save_file(named, where / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | (about or {})
    (where / "config.json").write_text(json.dumps(config))
    return where


WRONG = [
    ({}, {"fc__weight": None}, CheckpointError, "fc.weight"),
    ({}, {"norm__weight": None}, CheckpointError, "norm.weight is missing"),
    ({}, {"fc__weight": torch.zeros(64, 64)}, CheckpointError, r"\(64, 64\)"),
    ({}, {"norm__weight": torch.full((64,), torch.nan)}, CheckpointError, "norm.weight should hold finite"),
    ({}, {"midlayer__extra": torch.zeros(2)}, CheckpointError, "midlayer.extra has no place"),
    ({"num_hidden_layers": 2}, {}, CheckpointError, "one layer"),
    ({"hidden_size": 32}, {}, CheckpointError, "width 32"),
    ({"vocab_size": 99}, {}, VocabularyMismatch, "99 tokens"),
    ({}, {"d2t": torch.full((48,), 120)}, VocabularyMismatch, "below 128"),
    ({}, {"d2t": torch.zeros(3, dtype=torch.long)}, VocabularyMismatch, "48 draft tokens"),
    ({}, {"d2t": None}, VocabularyMismatch, "d2t should lead 48 draft"),
    ({}, {"d2t": torch.tensor(1)}, VocabularyMismatch, "48 draft tokens to"),
    ({"draft_vocab_size": "48"}, {}, CheckpointError, "draft_vocab_size should be a number of 1 to 128, not '48'"),
    ({}, {"norm__weight": torch.zeros(64).to(torch.float8_e4m3fn)}, CheckpointError, "floats of 16 bits"),
    ({"fc_norm": True}, {"input_norm__weight": torch.ones(192)}, CheckpointError, "fc_norm.0.weight is missing"),
    ({"hidden_act": "gelu"}, {}, CheckpointError, "has silu, config.json says hidden_act gelu"),
    ({}, {"midlayer__hidden_norm__weight": None}, CheckpointError, "holds no EAGLE-3 head: no tensor midlayer.hidden"),
    ({"eagle_aux_hidden_state_layer_ids": [0, 1, 7]}, {}, ConfigError, "layer 7"),
    ({"eagle_aux_hidden_state_layer_ids": "all"}, {}, CheckpointError, "layer_ids"),
    ({}, {"embed_tokens__weight": torch.zeros(5, 64)}, CheckpointError, "embed_tokens"),
]


@pytest.mark.parametrize(("about", "tensors", "error", "says"), WRONG, ids=[w[3] for w in WRONG])
def test_heads_that_do_not_fit_are_refused(random_llm, make_checkpoint, tmp_path, about, tensors, error, says):
    folder = change(random_eagle3(make_checkpoint(), **TAPS), tmp_path / "head", about, **tensors)
    with pytest.raises(error, match=says):
        random_llm.speculative_config = {"method": "eagle3", "model": str(folder)}
    assert not random_llm.runner.taps


def test_what_is_no_head_is_refused(random_llm, tmp_path):
    for model, error, says in [
        ("", ConfigError, "needs a 'model'"),
        (str(tmp_path / "nowhere"), ModelNotFound, "nowhere"),
        ("tiny-medusa", CheckpointError, "no EAGLE-3 head"),
    ]:
        with pytest.raises(error, match=says):
            random_llm.speculative_config = {"method": "eagle3", "model": model}
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02cos\nsystem\n")
    with pytest.raises(CheckpointError, match="cannot be read"):
        random_llm.speculative_config = {"method": "eagle3", "model": str(tmp_path)}
    torch.save({"fc.weight": torch.zeros(64, 192), "norm.weight": [1.0]}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"should be a tensor, not \[1\.0\]"):
        random_llm.speculative_config = {"method": "eagle3", "model": str(tmp_path)}
    for options in ({"width": 0}, {"depth": 0}, {"p_min": 1.0}, {"p_min": "x"}, {"heads": 3}):
        with pytest.raises(ConfigError):
            random_llm.speculative_config = {"method": "eagle3", "model": "x", **options}


def test_pickled_heads_on_the_hub(make_checkpoint, monkeypatch, tmp_path):
    """The original's repositories hold no safetensors: pytorch_model.bin is asked for, once it is known for a head."""
    head, asked = random_eagle3(make_checkpoint(), **TAPS), list[list[str]]()

    def download(repo: str, allow_patterns: list[str], **_: object) -> str:
        asked.append(allow_patterns)
        for file in head.iterdir():
            if any(fnmatch(file.name, pattern) for pattern in allow_patterns):
                copy(file, tmp_path)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert kind_of(find("owner/head")) == "eagle3" and (tmp_path / "pytorch_model.bin").is_file()
    assert ["pytorch_model.bin" in patterns for patterns in asked[:2]] == [False, True]


def test_a_head_in_shards(random_llm, make_checkpoint, tmp_path):
    """It has all of them, and lacks what is in one that is missing."""
    folder = random_eagle3(make_checkpoint(), **TAPS)
    tensors = [*torch.load(folder / "pytorch_model.bin").items()]
    copy(folder / "config.json", tmp_path)
    for i, some in enumerate((tensors[::2], tensors[1::2]), 1):
        save_file(dict(some), tmp_path / f"model-0000{i}-of-00002.safetensors")
    whole, parts = (Head(where, random_llm.runner) for where in (folder, tmp_path))
    assert torch.equal(whole.fuse(torch.ones(1, 192)), parts.fuse(torch.ones(1, 192)))
    assert torch.equal(whole.tokens, parts.tokens)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"is missing|no tensor"):
        Head(tmp_path, random_llm.runner)


def test_the_layers_read(make_checkpoint):
    """The published defaults, SGLang's nested key that counts outputs, and vLLM's."""
    at = Path("head")
    assert Eagle3.points(at, {}, 32) == (2, 16, 29) and Eagle3.points(at, {}, 36) == (2, 18, 33)
    assert Eagle3.points(at, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}}, 32) == (2, 16, 29)
    assert Eagle3.points(at, {"eagle_aux_hidden_state_layer_ids": [2, 18, 33]}, 36) == (2, 18, 33)


def test_memory_is_accounted(random_llm, make_checkpoint):
    random_llm.speculative_config = {"method": "eagle3", "model": str(random_eagle3(make_checkpoint(), **TAPS))}
    drafter = random_llm.engine.drafter
    assert drafter.kv_bytes(600) >= 600 * 4 * (2 * 2 * 16 + 3 * 64)


@pytest.mark.parametrize("method", ["merge", "cascade"])
def test_beside_and_below_others(random_llm, make_checkpoint, method):
    """Merged with look-up, whose branches are accepted, and drafting for a view: plain tokens, some of them drafted."""
    head = {"method": "eagle3", "model": str(random_eagle3(make_checkpoint(), **TAPS)), "width": 2}
    config = {
        "merge": {"method": "merge", "drafters": [head, {"method": "ngram"}]},
        "cascade": {"method": "cascade", "view": "retrieval:budget=24,chunk=4,recent=4,rebuild=8", "drafter": head},
    }[method]
    params = SamplingParams(temperature=0, max_tokens=40)
    prompts = [([3, 4, 5] * 9, params), ([7], params)]
    plain = [out.token_ids for out in run(random_llm, prompts)]
    random_llm.speculative_config = config
    assert [out.token_ids for out in run(random_llm, prompts)] == plain
    rows = [*random_llm.runner.taps]
    assert rows and not any(r.held for r in rows)


def test_the_likeliest_child_follows_its_parent():
    """So what is accepted lies as in plain decoding; of equals the one above comes first."""
    scores, paths = [math.log(p) for p in (0.35, 0.6, 0.07, 0.3)], [[0], [1], [0, 2], [1, 3]]
    tree = Tree(None, None, [5, 6, 7, 8], [-1, -1, 0, 1], scores, paths)
    draft = tree.draft(4)
    assert (draft.tokens, draft.parents) == ([6, 8, 5, 7], [-1, 0, -1, 2]) and tree.draft(2).tokens == [6, 5]
    assert draft.trust == pytest.approx([0.6, 0.5, 0.35, 0.2])
    assert Tree(None, None, [5, 6], [-1, 0], [0.0, 0.0], [[0], [0, 1]]).draft(1).tokens == [5]
