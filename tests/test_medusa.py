"""Medusa: trees from accuracies, heads of every format, what is refused, and training."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import assert_released, random_heads, run
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from outrider import LLM, SamplingParams, SpeculativeConfig, drafters
from outrider.errors import CheckpointError, ConfigError, ModelNotFound, VocabularyMismatch
from outrider.train.medusa import Settings, train
from tools.inflate import inflate

GREEDY = SamplingParams(temperature=0, max_tokens=24)
Medusa = drafters.find("medusa")
grow = __import__(Medusa.__module__, fromlist=["grow"]).grow


def medusa(llm: LLM, heads: Path | str, **options) -> Medusa:
    llm.speculative_config = {"method": "medusa", "model": str(heads), **options}
    return llm.engine.drafter


# --- the tree --------------------------------------------------------------------------------------------------------


@given(
    accuracies=st.lists(st.lists(st.floats(0.01, 0.99), min_size=1, max_size=3), min_size=1, max_size=3),
    k=st.integers(0, 6),
)
def test_growth_is_the_best_tree(accuracies, k):
    """No other tree of k nodes has more expected tokens, by trying all of them."""

    def worth(path):
        product = 1.0
        for head, rank in enumerate(path):
            product *= accuracies[head][rank]
        return product

    every = [
        p for n in range(len(accuracies)) for p in itertools.product(*(range(len(a)) for a in accuracies[: n + 1]))
    ]
    grown = grow(tuple(map(tuple, accuracies)), k)
    known = {(), *grown}
    assert len(grown) == min(k, len(every)) == len(set(grown)) and all(path[:-1] in known for path in grown)
    closed = (c for c in itertools.combinations(every, len(grown)) if all(p[:-1] in {(), *c} for p in c))
    if len(every) <= 14:
        assert sum(map(worth, grown)) == pytest.approx(max(sum(map(worth, c)) for c in closed))


def test_the_first_branch_comes_first(random_llm, make_checkpoint):
    """Tokens accepted along the first ranks lie in the cache as plain decoding's: the promise stays bitwise."""
    drafter = medusa(random_llm, random_heads(make_checkpoint(), accuracies=[[0.5, 0.4], [0.5, 0.1], [0.9, 0.1]]))
    (request,) = random_llm.engine.add([1, 2, 3], GREEDY)
    assert drafter.propose([request.seq], 5)[0].tokens == []  # before the first forward nothing has been seen
    random_llm.engine.step()
    draft = drafter.propose([request.seq], 5)[0]
    assert draft.parents == [-1, 0, 1, -1, 3] and draft.tokens[1] == draft.tokens[4] != draft.tokens[0]
    random_llm.engine.abort(request)


def test_choices_and_room(random_llm, make_checkpoint):
    drafter = medusa(random_llm, random_heads(make_checkpoint()), choices=[[1], [0], [0, 2], [0, 2, 0]])
    (request,) = random_llm.engine.add([1, 2, 3], replace(GREEDY, max_tokens=4))
    random_llm.engine.step()
    seq = request.seq
    assert seq.room == 3
    assert [len(drafter.propose([seq], k)[0]) for k in range(6)] == [0, 1, 2, 3, 3, 3]  # three deep has no room
    assert drafter.propose([seq], 4)[0].parents == [-1, 0, -1]
    random_llm.engine.abort(request)
    assert_released(random_llm)


@pytest.mark.parametrize("choices", [[], [[]], [[0, 0]], [[0], [0]], [[-1]], [[0], [0, 0], [1, 1]], "x", [["x"]], 3])
def test_choices_that_cannot_be(choices):
    with pytest.raises(ConfigError, match="choices"):
        drafters.create(SpeculativeConfig.of({"method": "medusa", "model": "x", "choices": choices}))


def test_choices_deeper_than_the_heads(random_llm, make_checkpoint):
    with pytest.raises(ConfigError, match="4 deep"):
        medusa(random_llm, random_heads(make_checkpoint()), choices=[[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]])


# --- what the heads see ----------------------------------------------------------------------------------------------


def head_tokens(heads: Path, hidden: torch.Tensor, weight: torch.Tensor) -> list[list[int]]:
    """Per head its candidates, best first, from the formula."""
    tensors, found = load_file(heads / "model.safetensors"), []
    for i in range(3):
        x = hidden
        for j in range(2):
            x = x + torch.nn.functional.silu(x @ tensors[f"{i}.{j}.linear.weight"].T + tensors[f"{i}.{j}.linear.bias"])
        found.append((x @ tensors.get(f"{i}.2.weight", weight).T).argsort(descending=True).tolist())
    return found


@pytest.mark.parametrize("tied", [True, False])
def test_guesses_follow_the_formula(random_llm, make_checkpoint, tied):
    """From the state that chose the last token, in every sequence of a ragged batch, also after a second prompt."""
    llm, heads = random_llm, random_heads(make_checkpoint(), tied=tied)
    weight = load_file(make_checkpoint() / "model.safetensors")["lm_head.weight"]
    drafter = medusa(llm, heads, num_speculative_tokens=12)
    for prompts in ([[1, 2, 3], [4], [5, 6, 7, 8, 9]], [[9, 9]]):
        requests = [llm.engine.add(prompt, GREEDY)[0] for prompt in prompts]
        for _ in range(4):
            llm.engine.step()
            seqs = [r.seq for r in requests]
            for seq, draft in zip(seqs, drafter.propose(seqs, 12), strict=True):
                hidden = llm.runner.extend([type(seq)(seq.tokens[:-1], GREEDY, 0)]).hidden[0][0]
                expected = head_tokens(heads, hidden, weight)
                for node in range(len(draft)):
                    path = draft.path_to(node)
                    assert draft.tokens[node] in expected[len(path) - 1][:10]
                chain = [draft.tokens[i] for i in range(3)]
                assert draft.parents[:3] == [-1, 0, 1] and chain == [ranks[0] for ranks in expected]
        for request in requests:
            llm.engine.abort(request)
        llm.runner.slots.clear()
        for seq in list(llm.runner.kv.tables):
            llm.runner.kv.free(seq)
        assert not drafter.seen


def test_sampled_candidates_carry_the_noise_of_their_place(tiny_llm, monkeypatch):
    """Guesses ranked with the noise that the target will use are accepted more often than by bare logits."""
    drafter = medusa(tiny_llm, "tiny-medusa", num_speculative_tokens=6)
    texts = ["Rewrite this passage. The king said to the", "It was the best of times,", "He looked at the ship and"]
    params = [SamplingParams(temperature=1, seed=seed, max_tokens=60, ignore_eos=True) for seed in range(2)]
    kept = []
    for rank in (None, lambda logits, rows: logits):
        if rank:
            monkeypatch.setitem(type(drafter)._candidates.__globals__, "scores", rank)
        outputs = run(tiny_llm, [(tiny_llm.encode(text), p) for text in texts for p in params])
        kept.append(sum(o.metrics["speculative_decoding"]["num_accepted_draft_tokens"] for o in outputs))
    assert kept[0] > kept[1] > 0


def test_an_unseen_step_means_no_guess(random_llm, make_checkpoint):
    """A sequence that grew out of our sight (an interrupted step, a fork) is not guessed at from an old state."""
    drafter = medusa(random_llm, random_heads(make_checkpoint()))
    (request,) = random_llm.engine.add([1, 2, 3], GREEDY)
    random_llm.engine.step()
    fork = request.seq.fork()
    assert len(drafter.propose([fork], 4)[0]) == 4
    fork.tokens.append(5)
    assert drafter.propose([fork, request.seq], 4)[0].tokens == []
    fork.tokens[-2:] = [fork.tokens[-2] + 1]
    assert drafter.propose([fork], 4)[0].tokens == []
    random_llm.engine.abort(request)
    assert not drafter.seen


def test_two_turns(tiny_llm):
    """A conversation's second turn, which begins with the first, gets plain decoding's tokens and its own guesses."""
    first = tiny_llm.encode("Once upon a time there was a dog.")
    for method in (None, {"method": "medusa", "model": "tiny-medusa"}):
        tiny_llm.speculative_config = method
        answer = tiny_llm.generate(first, GREEDY)[0]
        second = first + answer.token_ids + tiny_llm.encode(" One day,")
        again = tiny_llm.generate(second, GREEDY)[0]
        if method is None:
            plain = answer.token_ids, again.token_ids
    assert (answer.token_ids, again.token_ids) == plain
    assert again.metrics["speculative_decoding"]["num_accepted_draft_tokens"] > 0


# --- formats and refusals --------------------------------------------------------------------------------------------


def test_formats_give_the_same_guesses(random_llm, make_checkpoint, tmp_path):
    ours = random_heads(make_checkpoint(), tied=False)
    tensors = load_file(ours / "model.safetensors")
    for name in ("pt", "safetensors", "prefixed"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 3, "medusa_num_layers": 2}))
    torch.save(tensors, tmp_path / "pt" / "medusa_lm_head.pt")
    save_file(tensors, tmp_path / "safetensors" / "medusa_lm_head.safetensors")
    whole = {f"medusa_head.{name}": tensor for name, tensor in tensors.items()} | {"model.norm.weight": torch.ones(64)}
    save_file(whole, tmp_path / "prefixed" / "model.safetensors")
    guesses = []
    for folder in (ours, *(tmp_path / name for name in ("pt", "safetensors", "prefixed"))):
        medusa(random_llm, folder, choices=[[0], [0, 0], [0, 0, 0], [1]])
        (output,) = run(random_llm, [([1, 2, 3], GREEDY)])
        guesses.append(output.metrics["speculative_decoding"])
    assert guesses[1:] == guesses[:1] * 3


class Evil:
    def __reduce__(self):
        return (print, ("run",))


def test_refusals(random_llm, make_checkpoint, tmp_path):
    heads = random_heads(make_checkpoint())
    tensors = load_file(heads / "model.safetensors")
    config = json.loads((heads / "config.json").read_text())

    def refused(kind, match, *, tensors=tensors, pickled=None, **changed):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config | changed))
        if pickled is not None:
            torch.save(pickled, folder / "medusa_lm_head.pt")
        elif tensors is not None:
            save_file(tensors, folder / "model.safetensors")
        with pytest.raises(kind, match=match):
            medusa(random_llm, folder)

    refused(VocabularyMismatch, "99 tokens, the target has 128", vocab_size=99)
    own = tensors | {f"{i}.2.weight": torch.zeros(100, 64) for i in range(3)}
    refused(VocabularyMismatch, "100 tokens", tensors=own)
    refused(CheckpointError, r"0\.0\.linear\.weight is of shape \(32, 64\)",
            tensors=tensors | {"0.0.linear.weight": torch.zeros(32, 64)})  # fmt: skip
    refused(CheckpointError, r"1\.1\.linear\.bias is missing",
            tensors={k: v for k, v in tensors.items() if k != "1.1.linear.bias"})  # fmt: skip
    refused(CheckpointError, "no place", tensors=tensors | {"1.2.weight": torch.zeros(128, 64)})
    refused(CheckpointError, "no tensor is named", tensors={"x": torch.zeros(1)})
    refused(CheckpointError, "none of model.safetensors", tensors=None)
    refused(CheckpointError, "cannot be read", accuracies=[["often"]])
    refused(CheckpointError, "accuracies", accuracies=[[0.5]])
    refused(CheckpointError, "cannot be read", pickled={"0.0.linear.weight": Evil()})
    refused(CheckpointError, "cannot be read", pickled=[1])
    first = "0.0.linear.weight"
    for value in ([[1.0]], 5, None, "x", {"a": 1}):
        refused(CheckpointError, rf"{first} should be a tensor", pickled=tensors | {first: value})
    for value in (torch.zeros(()), torch.zeros(64, 64, 1)):
        refused(CheckpointError, rf"{first} is of shape", tensors=tensors | {first: value})
    whole, eight = torch.zeros(64, 64, dtype=torch.int64), torch.zeros(64, 64).to(torch.float8_e4m3fn)
    for value in (whole, eight, torch.full((64, 64), math.nan), torch.full((64, 64), math.inf)):
        refused(CheckpointError, rf"{first} should hold finite floats", tensors=tensors | {first: value})
    for value in (math.nan, -1, 0, "x", None, [1]):
        refused(CheckpointError, "token_norm must be a number above 0", token_norm=value)
    for value in (5, [5], [[None]], [{}], {"a": 1}):
        refused(CheckpointError, "cannot be read", accuracies=value)
    with pytest.raises(ConfigError, match="needs a 'model'"):
        random_llm.speculative_config = {"method": "medusa"}
    with pytest.raises(ModelNotFound):
        medusa(random_llm, tmp_path / "nowhere")


def test_inflated_heads_guess_the_same(tmp_path, random_llm, make_checkpoint):
    """Heads enlarged beside their model: the same drafts, of the same tokens."""
    shape = {"rms_norm_eps": 1e-5, "num_key_value_heads": 4}
    small = make_checkpoint(**shape)
    for tied in (True, False):
        heads = random_heads(small, tied=tied)
        big = inflate(small, tmp_path / f"model{tied}", hidden_size=256, num_heads=16)
        wide = inflate(heads, tmp_path / f"heads{tied}", hidden_size=256)
        results = []
        for model, own in ((small, heads), (big, wide)):
            llm = LLM(model, device="cpu", dtype="float32")
            medusa(llm, own)
            (output,) = run(llm, [([1, 2, 3], GREEDY)])
            results.append((output.token_ids, output.metrics["speculative_decoding"]))
        assert results[0] == results[1]
    with pytest.raises(ConfigError, match="no other size"):
        inflate(heads, tmp_path / "none", num_layers=3)
    with pytest.raises(CheckpointError, match=r"\(256, 256\)"):
        medusa(llm, heads)


# --- training --------------------------------------------------------------------------------------------------------

SMALL = Settings(
    heads=2, windows=24, length=48, generated=0.25, steps=30, batch=4, lr=3e-3, dtype="float32", device="cpu"
)  # fmt: skip


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("texts")
    people = itertools.product(["Tom", "Lily", "Ben", "Mia"], ["dog", "cat", "ball", "car", "hat"])
    stories = [f"Once upon a time there was a child named {a}. {a} had a big red {b}. " * 4 for a, b in people]
    (folder / "stories.txt").write_text("<|endoftext|>".join(stories))
    (folder / "more.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in stories[:4]))
    return [folder]


def test_training(texts, tmp_path):
    """The loss falls; a run stopped half-way and resumed ends with the same weights; the heads guess."""
    seen = []
    accuracies = train(texts, tmp_path / "heads", SMALL, every=10, report=lambda *row: seen.append(row))
    assert [step for step, _, _ in seen] == [10, 20, 30] and seen[-1][1] < 0.8 * seen[0][1]
    assert seen[-1][2] == [ranks[0] for ranks in accuracies] and accuracies[0][0] > 0.3
    assert all(1 >= sum(ranks) > 0 for ranks in accuracies)
    assert {path.name for path in (tmp_path / "heads").iterdir()} == {"config.json", "model.safetensors"}

    class Stopped(Exception):
        pass

    def stop(step, *_):
        if step == 20:
            raise Stopped

    with pytest.raises(Stopped):
        train(texts, tmp_path / "again", SMALL, every=10, report=stop)
    with pytest.raises(ConfigError, match="already holds"):
        train(texts, tmp_path / "again", SMALL)
    with pytest.raises(ConfigError, match=r"begun with lr 0\.003"):
        train(texts, tmp_path / "again", replace(SMALL, lr=1e-4), resume=True)
    assert train([], tmp_path / "again", SMALL, resume=True) == accuracies
    whole, resumed = (load_file(tmp_path / name / "model.safetensors") for name in ("heads", "again"))
    assert whole.keys() == resumed.keys() and all(torch.equal(whole[key], resumed[key]) for key in whole)

    llm = LLM("tiny", device="cpu", dtype="float32")
    medusa(llm, tmp_path / "heads")
    output = llm.generate("Once upon a time there was a child", temperature=0, max_tokens=40)[0]
    assert output.metrics["speculative_decoding"]["num_accepted_draft_tokens"] > 0


def test_training_own_projections(texts, tmp_path, tiny_llm):
    settings = replace(SMALL, heads=1, own_projection=True, steps=2, generated=0.0)
    train(texts, tmp_path / "heads", settings)
    tensors = load_file(tmp_path / "heads" / "model.safetensors")
    assert tensors["0.1.weight"].shape == (8192, 384)
    embedding = load_file(tiny_llm.checkpoint.path / "model.safetensors")["model.embed_tokens.weight"].float()
    assert 0 < (tensors["0.1.weight"] - embedding).abs().max() < 0.1  # it began at the target's
    medusa(tiny_llm, tmp_path / "heads")


def test_training_on_the_shortest_windows(texts, tmp_path):
    assert train(texts, tmp_path / "heads", replace(SMALL, heads=1, length=3, steps=1))


def test_training_refusals(texts, tmp_path, make_checkpoint):
    with pytest.raises(ConfigError, match="no checkpoint"):
        train(texts, tmp_path / "new", SMALL, resume=True)
    with pytest.raises(ConfigError, match="windows of 4000 tokens"):
        train(texts, tmp_path / "new", replace(SMALL, length=4000))
    with pytest.raises(ConfigError, match="no tokenizer"):
        train(texts, tmp_path / "new", replace(SMALL, model=str(make_checkpoint())))
    for wrong in ({"heads": 0}, {"steps": 0}, {"length": 3}, {"generated": 1.5}, {"lr": 0.0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            replace(SMALL, **wrong)
