"""Long contexts: offloaded storage, drafts beyond their own context, and views of texts far over their budget."""

from __future__ import annotations

import pytest
import torch
from helpers import drive, logits_after, run

from outrider import LLM, SamplingParams
from outrider.errors import ConfigError
from outrider.sequence import Sequence


def text(n: int, seed: int = 0, vocab: int = 128) -> list[int]:
    return torch.randint(vocab, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


# --- offloading -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_chip", [0, 1, 3])
@torch.inference_mode()
def test_offloaded_is_dense_bit_for_bit(make_llm, on_chip):
    """Prefill in chunks, growth, decoding, chains, trees, rejections and two sequences that come and go."""
    layers = {"num_hidden_layers": 4}
    dense = make_llm(**layers)
    offloaded = make_llm(**layers, engine={"kv_offload": True, "on_chip_layers": on_chip})
    params, results = SamplingParams(max_tokens=99), []
    for llm in (dense, offloaded):
        llm.runner.chunk, llm.runner.kv.log.size = 200, 8
        long, short = Sequence(text(900), params, 0), Sequence(text(7), params, 0)
        seen = drive(llm, long, short)
        llm.runner.free(short)
        results.append(seen + llm.runner.extend([long]).logits)
        results[-1] += [llm.runner.kv.log.last(long.id, layer) for layer in range(4)]  # by which views choose
        llm.runner.free(long)
        assert not llm.runner.kv.tables
    assert not any(offloaded.runner.kv.stages)
    assert len(results[0]) == len(results[1]) and all(map(torch.equal, *results))
    assert 4 * offloaded.runner.kv.nbytes(999) == 6 * dense.runner.kv.nbytes(999), "two layers are on their way"


@pytest.mark.parametrize("method", ["none", "ngram", "self", "triforce"])
def test_offloaded_generates_the_same(make_llm, make_checkpoint, random_llm, method):
    """Plainly, with a look-up, and with views of what lies in host memory."""
    config = {
        "self": {"view": "snapkv:budget=192"},
        "triforce": {"model": str(make_checkpoint(noise=0.02)), "retrieval_budget": 192},
    }
    requests = [(text(n, n), SamplingParams(temperature=0.7, seed=n, max_tokens=24)) for n in (300, 20, 700)]
    expected = [o.token_ids for o in run(random_llm, requests)]
    llm = make_llm(engine={"kv_offload": True, "on_chip_layers": 1})
    llm.speculative_config = {"method": method, **config.get(method, {})}
    assert llm.exactness == random_llm.exactness
    assert [o.token_ids for o in run(llm, requests)] == expected


def test_offload_options(make_checkpoint):
    for options, message in [
        ({"on_chip_layers": 1}, "needs kv_offload"),
        ({"kv_offload": True, "on_chip_layers": 2}, "below the model's 2, not 2"),
        ({"kv_offload": True, "on_chip_layers": -1}, "at least 0, not -1"),
        ({"kv_offload": 1}, "must be True or False, not 1"),
    ]:
        with pytest.raises(ConfigError, match=message):
            LLM(make_checkpoint(), device="cpu", dtype="float32", **options)


# --- drafts and views far from home -----------------------------------------------------------------------------------


def test_a_draft_beyond_its_own_context(make_llm, make_checkpoint):
    """A draft model of 64 positions guesses after 1,500 tokens, in a batch; without a short cache it could not."""
    llm, params = make_llm(), SamplingParams(temperature=0, max_tokens=40)
    requests = [(text(n, n), params) for n in (1500, 30, 200)]
    expected = [o.token_ids for o in run(llm, requests)]
    small = str(make_checkpoint(max_position_embeddings=64, noise=0.005))
    drafted = []
    for kv in ("", "streaming:budget=48"):
        llm.speculative_config = {"method": "draft_model", "model": small, "kv": kv}
        outputs = run(llm, requests)
        assert [o.token_ids for o in outputs] == expected
        drafted.append([o.metrics["speculative_decoding"]["num_draft_tokens"] for o in outputs])
    assert drafted[0][0] == drafted[0][2] == 0 < min(drafted[1])


def test_rows_end_by_themselves(random_llm, make_checkpoint):
    """A row that meets its stop token leaves; the others write on, past every budget."""
    long = [(text(40, i), SamplingParams(temperature=0, max_tokens=160)) for i in range(3)]
    plain = run(random_llm, long)
    stop = plain[1].token_ids[60]
    requests = [long[0], (long[1][0], SamplingParams(temperature=0, max_tokens=160, stop_token_ids=[stop])), long[2]]
    expected = [o.token_ids for o in run(random_llm, requests)]
    assert len(expected[1]) <= 61 and len(expected[0]) == len(expected[2]) == 160
    random_llm.speculative_config = {
        "method": "triforce", "model": str(make_checkpoint(noise=0.02)), "retrieval_budget": 192,
        "draft_cache_budget": 32,
    }  # fmt: skip
    outputs = run(random_llm, requests)
    assert [o.token_ids for o in outputs] == expected
    assert sum(o.metrics["speculative_decoding"]["num_accepted_draft_tokens"] for o in outputs) > 50


@pytest.mark.parametrize("view", ["streaming:budget=256", "snapkv:budget=256", "retrieval:budget=256"])
def test_real_text_through_a_view(tiny_llm, view):
    """The embedded model on a story of 2,500 tokens: an eighth of the keys guesses most tokens right."""
    story = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park with Ben. "
    prompt = tiny_llm.encode(story * 100)[:2500]
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    expected = run(tiny_llm, [(prompt, params)])[0].token_ids
    tiny_llm.speculative_config = {"method": "self", "view": view}
    output = run(tiny_llm, [(prompt, params)])[0]
    assert output.token_ids == expected
    assert output.metrics["speculative_decoding"]["draft_acceptance_rate"] > 0.6


def test_a_view_of_long_text_is_near(tiny_llm):
    """Through a fourth of the keys the logits are close to the exact ones; the wider, the closer."""
    tokens = tiny_llm.encode("The cat sat on the mat. Then a dog came by and asked it for the way to the river. " * 100)
    seq = Sequence(tokens[:2000], SamplingParams(max_tokens=9), 0)
    exact = logits_after(tiny_llm, seq.tokens)
    for policy in ("snapkv:window=8,recent=8,rebuild=8", "retrieval:recent=8,rebuild=8"):
        errors = []
        for budget in (128, 512, 2048):
            runner = tiny_llm.runner.view(f"{policy},budget={budget}")
            errors.append(float((runner.extend([seq]).logits[0][0] - exact).norm() / exact.norm()))
            runner.free(seq)
        tiny_llm.runner.free(seq)
        assert errors[2] < 1e-5 < errors[1] < 0.2
