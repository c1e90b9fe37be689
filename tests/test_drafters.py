"""What the drafters guess, how they are found, and what they do at their limits."""

from __future__ import annotations

import json
import random
import shutil
import sys
from dataclasses import dataclass, replace

import pytest
import torch
from helpers import run
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from outrider import LLM, Drafter, SamplingParams, SpeculativeConfig, drafters
from outrider.drafters.ngram import Index
from outrider.errors import ConfigError
from outrider.find import embedded
from outrider.ops import native
from outrider.sequence import Sequence

# --- ngram -----------------------------------------------------------------------------------------------------------


def lookup(tokens: list[int], settled: int, k: int, low: int, high: int) -> list[int]:
    """Prompt lookup by plain search: the longest suffix, its most recent occurrence in the settled text that something
    follows, and a copy that may run into itself."""
    for n in range(high, low - 1, -1):
        for end in range(settled - 1, n - 1, -1):
            if n < len(tokens) and tokens[end - n : end] == tokens[-n:]:
                text = list(tokens)
                for i in range(k):
                    text.append(text[end + i])
                return text[len(tokens) :]
    return []


@pytest.mark.parametrize("index", [Index, *([native.kernels.NgramIndex] if native.kernels else [])])
@given(seed=st.integers(0, 10**9), low=st.integers(1, 3), more=st.integers(0, 3), k=st.integers(1, 9))
def test_ngram(index, seed, low, more, k):
    dice, high = random.Random(seed), low + more
    options = {"prompt_lookup_min": low, "prompt_lookup_max": high}
    drafter = drafters.create(SpeculativeConfig("ngram", options=options))
    drafter.index = index
    seqs = [Sequence(dice.choices(range(3), k=dice.randint(1, 12)), SamplingParams(), 0) for _ in range(2)]
    for _ in range(8):  # sequences grow by blocks; forks come and go between
        fork = seqs[0].fork()
        fork.tokens += dice.choices(range(3), k=dice.randint(0, 4))
        for group in (seqs, [fork]):
            for seq, draft in zip(group, drafter.propose(group, k), strict=True):
                assert draft.is_chain
                assert draft.tokens == lookup(seq.tokens, seq.settled, k, low, high)
                assert draft.trust == Index(low, high).guess(seq.tokens, seq.settled, min(k, seq.room - 1))[1]
        for seq in seqs:
            seq.tokens += dice.choices(range(3), k=dice.randint(1, 3))
    for seq in seqs:
        drafter.forget(seq)
    assert not drafter.indexes


def test_ngram_by_hand():
    def guess(tokens: list[int], k: int = 4) -> list[int]:
        drafter = drafters.create(SpeculativeConfig("ngram"))
        return drafter.propose([Sequence(tokens, SamplingParams(), 0)], k)[0].tokens

    assert guess([1, 2, 3, 4, 9, 1, 2]) == [3, 4, 9, 1]
    assert guess([1, 2, 3, 1, 2, 4, 1, 2]) == [4, 1, 2, 4]  # the most recent, and on into itself
    assert guess([9, 1, 2, 3, 8, 1, 2, 4, 9, 1, 2]) == [3, 8, 1, 2]  # the longest match before the most recent
    assert guess([5, 6, 5, 6]) == [5, 6, 5, 6]
    assert guess([1, 2, 3, 4]) == [] and guess([1]) == []


# --- draft_model -----------------------------------------------------------------------------------------------------


def test_draft_model_stops_at_its_context(make_llm, make_checkpoint):
    """The target reads on where the draft's positions end, plainly, with the same tokens."""
    llm, draft = make_llm(), str(make_checkpoint(noise=0.01, max_position_embeddings=32))
    requests = [(list(range(n)), SamplingParams(temperature=0, max_tokens=30)) for n in (8, 20, 31, 40)]
    plain = [o.token_ids for o in run(llm, requests)]
    llm.speculative_config = {"model": draft, "num_speculative_tokens": 4}
    outputs = run(llm, requests)
    assert [o.token_ids for o in outputs] == plain
    for (prompt, _), output in zip(requests, outputs, strict=True):
        spec, length = output.metrics["speculative_decoding"], len(prompt)
        for drafted, accepted in zip(spec["per_step_drafted"], spec["per_step_accepted"], strict=True):
            assert drafted == min(4, max(0, 32 - length), len(prompt) + 30 - length - 1)
            length += accepted + 1


def padded(folder, rows: int):
    """A copy of tiny-draft with so many more rows in its embedding than its tokenizer has tokens."""
    shutil.copytree(embedded()["tiny-draft"], folder)
    weights = load_file(folder / "model.safetensors")
    old = weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = torch.cat([old, old[:rows] * 5])
    save_file(weights, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": len(old) + rows}))
    return folder


def test_padding_rows(tiny_llm, tmp_path):
    """Draft and target share a tokenizer and differ in rows that mean nothing; either may have more."""
    prompt, samplings = tiny_llm.encode("Once upon a time"), [SamplingParams(temperature=t, seed=1) for t in (0, 1)]
    requests = [(prompt, replace(params, max_tokens=24)) for params in samplings]
    plain = [o.token_ids for o in run(tiny_llm, requests)]
    wide = padded(tmp_path / "wide", 64)
    tiny_llm.speculative_config = {"model": str(wide)}
    outputs = run(tiny_llm, requests)
    assert [o.token_ids for o in outputs] == plain
    assert outputs[0].metrics["speculative_decoding"]["num_accepted_draft_tokens"]  # it still guesses well
    llm = LLM(wide, device="cpu", dtype="float32")  # now the target has tokens that the draft cannot read
    odd = SamplingParams(temperature=0, max_tokens=8, logit_bias={8200: 500.0, 8193: 400.0}, presence_penalty=1.0)
    requests = [([8199, 5, 7], odd), (prompt, SamplingParams(temperature=0, max_tokens=8))]
    plain = [o.token_ids for o in run(llm, requests)]
    assert 8200 in plain[0]
    llm.speculative_config = {"model": "tiny-draft"}
    assert [o.token_ids for o in run(llm, requests)] == plain


def test_one_draft_model_is_held_at_a_time(make_llm, make_checkpoint):
    llm, names = make_llm(), [str(make_checkpoint(noise=noise)) for noise in (0.01, 0.02)]
    llm.speculative_config = {"model": names[0]}
    runner = llm.engine.drafter.runner
    llm.speculative_config = None
    llm.speculative_config = {"model": names[0], "num_speculative_tokens": 2}
    assert llm.engine.drafter.runner is runner  # kept while nothing else is asked for
    llm.speculative_config = {"model": names[1]}
    assert list(llm._drafts) == [names[1]]


# --- found by name ---------------------------------------------------------------------------------------------------

THIRD_PARTY = """
from dataclasses import dataclass
from outrider import Draft, Drafter

@dataclass
class Parrot(Drafter):
    num_speculative_tokens: int = 3
    word: int = 7
    forgotten = 0

    def __post_init__(self):
        if self.word < 0:
            raise ValueError("too loud")

    def propose(self, seqs, k):
        return [Draft.chain([self.word] * k) for _ in seqs]

    def forget(self, seq):
        Parrot.forgotten += 1

NotADrafter = dict
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A distribution that registers drafters: a real one, as pip would lay it out."""
    (tmp_path / "parrot_drafter.py").write_text(THIRD_PARTY)
    (tmp_path / "quitting_drafter.py").write_text("import sys\nsys.exit('no licence')\n")
    info = tmp_path / "parrot-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: parrot\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[outrider.drafters]\nparrot = parrot_drafter:Parrot\nwrong = parrot_drafter:NotADrafter\n"
        "gone = parrot_drafter:Nothing\nngram = parrot_drafter:Parrot\nquits = quitting_drafter:Any\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("parrot_drafter", None)


def test_third_party_drafter(installed, random_llm):
    assert drafters.methods()[-4:] == ["gone", "parrot", "quits", "wrong"]
    assert [option.name for option in drafters.describe("parrot")] == ["num_speculative_tokens", "word"]
    params = SamplingParams(temperature=0, max_tokens=9)
    plain = random_llm.generate([7], params)[0]
    guess = max(set(plain.token_ids), key=plain.token_ids.count)
    random_llm.speculative_config = {"method": "parrot", "word": guess, "num_speculative_tokens": 2}
    output = random_llm.generate([7], params)[0]
    assert output.token_ids == plain.token_ids and output.metrics["method"] == "parrot"
    assert set(output.drafted_by) == {None, "parrot"} and random_llm.engine.drafter.forgotten == 1
    assert drafters.find("ngram").__module__ == "outrider.drafters.ngram"  # a built-in name cannot be taken over
    with pytest.raises(ConfigError, match=r"'wing'.*valid: method, num_speculative_tokens, word"):
        random_llm.speculative_config = {"method": "parrot", "wing": 1}
    with pytest.raises(ConfigError, match=r"'word'.*must be int, not 'x'"):
        random_llm.speculative_config = {"method": "parrot", "word": "x"}
    broken = {
        "wrong": "is not a Drafter",
        "gone": "cannot be loaded",
        "quits": "cannot be loaded: SystemExit: no licence",
    }
    for method, why in broken.items():
        with pytest.raises(ConfigError, match=rf"(parrot|quitting)_drafter.*{why}"):
            random_llm.speculative_config = {"method": method}
        with pytest.raises(ConfigError, match=why):  # who lists the methods can say so, and go on with the others
            drafters.describe(method)
    with pytest.raises(ConfigError, match="'parrot' does not accept these options: ValueError: too loud"):
        random_llm.speculative_config = {"method": "parrot", "word": -1}


def test_a_drafter_of_others_that_is_wrong_says_so_in_one_line(monkeypatch, random_llm, caplog):
    @dataclass
    class Loud(Drafter):
        num_speculative_tokens: int = 2

        def attach(self, target, load):
            target.tap("x")

    @dataclass
    class Vague(Drafter):
        num_speculative_tokens: str = "a few"

    @dataclass
    class Idle(Drafter):
        num_speculative_tokens: int = 2

    monkeypatch.setattr(drafters, "find", {"loud": Loud, "vague": Vague, "idle": Idle}.__getitem__)
    with pytest.raises(ConfigError, match="method 'loud' cannot be attached: TypeError: "):
        random_llm.speculative_config = {"method": "loud"}
    with pytest.raises(ConfigError, match="'vague': num_speculative_tokens must be a whole number, not 'a few'"):
        random_llm.speculative_config = {"method": "vague"}
    random_llm.speculative_config = {"method": "idle"}
    random_llm.generate([7], max_tokens=4)
    assert "NotImplementedError: Idle does not define propose" in caplog.text


@pytest.mark.parametrize("method", drafters.methods())
def test_every_drafter_is_small_and_says_what_it_is(method):
    kind = drafters.find(method)
    assert kind.name == method and kind.__doc__ and sys.modules[kind.__module__].__doc__
    assert "num_speculative_tokens" in [option.name for option in drafters.describe(method)]
