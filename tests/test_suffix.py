"""Suffix decoding: its guesses against plain search, its memory of earlier outputs, its limits."""

from __future__ import annotations

import random
import tracemalloc
from dataclasses import replace

import pytest
from helpers import assert_released, count_forwards, run
from hypothesis import given
from hypothesis import strategies as st

from outrider import LLM, SamplingParams, SpeculativeConfig, drafters
from outrider.drafters.suffix import END, FOLLOWED, SIZES, Index
from outrider.errors import ConfigError
from outrider.ops import native
from outrider.sequence import Sequence

PREFIX = "suffix_decoding_"
KINDS = [Index, *([native.kernels.SuffixIndex] if native.kernels else [])]  # the reference, and the compiled one


def make(index=None, **options):
    long = ("max_tree_depth", "max_cached_requests", "max_spec_factor", "min_token_prob")
    drafter = drafters.create(
        SpeculativeConfig("suffix", options={(PREFIX if key in long else "") + key: v for key, v in options.items()})
    )
    if index:
        drafter.index, drafter.past = index, index()
    return drafter


def sequence(tokens: list[int], prompt_len: int | None = None) -> Sequence:
    seq = Sequence(tokens, SamplingParams(), 0)
    seq.prompt_len = len(tokens) if prompt_len is None else prompt_len
    return seq


def guess(drafter, tokens: list[int], k: int = 8) -> list[int]:
    """What it proposes for a new sequence, which it then forgets without having seen output."""
    seq = sequence(tokens)
    (draft,) = drafter.propose([seq], k)
    drafter.forget(seq)
    assert draft.is_chain
    return draft.tokens


def expected(tokens: list[int], settled: int, past: list[list[int]], k: int, depth: int, factor: float, least: float):
    """The rule by plain search, in the sequence itself, whose copies run into themselves, and in all of the past."""
    best, chosen = 0.0, []
    for texts, ends in (([tokens], [settled]), (past, [len(text) + 1 for text in past])):
        for n in range(min(depth, len(tokens)), 0, -1):
            tail, path, worth, p = tokens[-n:], [], 0.0, 1.0
            places = [
                (text, at)
                for text, end in zip(texts[::-1], ends[::-1], strict=True)  # the most recent first
                for at in range(end - 1, n - 1, -1)
                if text[at - n : at] == tail
            ]
            if not places:
                continue
            while len(path) < min(k, int(factor * n + 1e-6)):
                after: dict[int, list] = {}
                for text, at in places:
                    whole = text + path if text is tokens else text
                    if at < len(whole):
                        after.setdefault(whole[at], []).append((text, at + 1))
                total = sum(map(len, after.values()))
                token = max(after, key=lambda t: len(after[t]), default=None)
                if token is None or (p := p * len(after[token]) / total) < least:
                    break
                path, worth, places = [*path, token], worth + p, after[token]
            if worth > best:
                best, chosen = worth, path
    return chosen


@pytest.mark.parametrize("index", KINDS)
@given(
    seed=st.integers(0, 10**9), k=st.integers(1, 9), depth=st.sampled_from([1, 2, 5, 24]), words=st.integers(1, 4),
    factor=st.sampled_from([0.5, 1.0, 2.5]), least=st.sampled_from([0.0, 0.1, 0.4, 1.0]), kept=st.integers(0, 3),
)  # fmt: skip
def test_guesses(index, seed, k, depth, words, factor, least, kept):
    """Sequences grow by blocks, forks come and go, and outputs of three generations are remembered or not."""
    dice, past = random.Random(seed), []
    drafter = make(index, max_tree_depth=depth, max_spec_factor=factor, min_token_prob=least, max_cached_requests=kept)

    def some(most: int) -> list[int]:
        return dice.choices(range(words), k=dice.randint(1, most))

    for _ in range(3):
        seqs = [sequence(some(9)) for _ in range(2)]
        for _ in range(5):
            fork = seqs[0].fork()
            fork.tokens += some(4)
            for group in (seqs, [fork]):
                for seq, draft in zip(group, drafter.propose(group, k), strict=True):
                    assert draft.is_chain
                    assert draft.tokens == expected(seq.tokens, seq.settled, past, k, depth, factor, least)
            for seq in seqs:
                seq.tokens += some(3)
        for seq in seqs:
            drafter.forget(seq)
            past = [*past, seq.tokens[max(0, seq.prompt_len - depth) :]][-kept:] if kept else []
    assert not drafter.indexes and len(drafter.lengths) == min(kept, 6)


@pytest.mark.parametrize("index", KINDS)
@given(seed=st.integers(0, 10**9), k=st.integers(0, 9), words=st.integers(1, 6), kept=st.sampled_from([0, 100]))
def test_full_chains(index, seed, k, words, kept):
    """Each token anew by the longest n-gram that stood before: the sequence's own last one, else the past's."""
    dice, past = random.Random(seed), []
    drafter = make(index, max_tree_depth=9, max_cached_requests=kept)
    drafter.full = True

    def next_(tail: list[int], text: list[int], end: int) -> int | None:
        for n in SIZES:
            for own, last in ((text, end), (past, len(past))):
                at = next((at for at in range(last - 1, n - 1, -1) if own[at - n : at] == tail[-n:]), None)
                if at is not None and own[at] != END:
                    return own[at]
        return None

    for _ in range(3):
        seqs = [sequence(dice.choices(range(words), k=dice.randint(1, 20))) for _ in range(2)]
        for _ in range(4):
            fork = seqs[0].fork()
            fork.tokens += dice.choices(range(words), k=2)
            for seq in (*seqs, fork):
                (draft,) = drafter.propose([seq], k)
                chain = list[int]()
                while len(chain) < k and (token := next_(seq.tokens + chain, seq.tokens, seq.settled)) is not None:
                    chain.append(token)
                assert draft.is_chain and draft.tokens == chain
            for seq in seqs:
                seq.tokens += dice.choices(range(words), k=dice.randint(1, 3))
        for seq in seqs:
            drafter.forget(seq)
            past += [*seq.tokens[max(0, seq.prompt_len - 9) :], END] if kept else []


@given(
    seed=st.integers(0, 10**9), k=st.integers(0, 12), words=st.integers(2, 60), factor=st.sampled_from([0.5, 2.0, 1e9]),
    least=st.sampled_from([0.0, 0.1]), kept=st.integers(1, 3),
)  # fmt: skip
@pytest.mark.skipif(len(KINDS) < 2, reason="there are no kernels here")
def test_both_guess_the_same(seed, k, words, factor, least, kept):
    """Trees, node for node and with the same trust, of long texts that are dropped now and then."""
    dice = random.Random(seed)
    both = [make(i, tree=True, max_spec_factor=factor, min_token_prob=least, max_cached_requests=kept) for i in KINDS]
    for _ in range(5):
        seq = sequence([int(dice.random() ** 2 * words) for _ in range(dice.randint(1, 300))])
        for _ in range(4):
            fork = seq.fork()
            fork.tokens.append(dice.randrange(words))
            for one in (seq, fork):
                drafts = [drafter.propose([one], k)[0] for drafter in both]
                assert drafts[0] == drafts[1] and len(drafts[0]) <= k
            seq.tokens += dice.choices(range(words), k=dice.randint(0, 5))
        for drafter in both:
            drafter.forget(seq)


@pytest.mark.parametrize("index", KINDS)
def test_by_hand(index):
    drafter = make(index)
    assert guess(drafter, [1, 2, 3, 4, 9, 1, 2, 3]) == [4, 9, 1]  # as many as match
    assert guess(drafter, [1, 2, 3, 1, 2, 3]) == [1, 2, 3]  # on into itself
    assert guess(drafter, [1, 5, 9, 1, 6, 8, 1, 6, 1]) == [6]  # two of three
    assert guess(drafter, [4, 1, 5, 1]) == [5]  # one is enough
    assert guess(drafter, [1, 2, 3]) == guess(drafter, [1]) == []
    assert guess(drafter, [7] * 5000, k=16) == [7] * 16
    assert guess(drafter, [1, 2, 3, 1, 2, 3], k=0) == []


def test_factor_and_probability():
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]
    assert guess(make(max_spec_factor=3.0), text) == [3, 4, 5, 6, 7, 8]
    assert guess(make(max_spec_factor=0.5), text) == [3]
    assert guess(make(max_spec_factor=0.0), text) == []
    split = [n for token in (3, 3, 4, 5) for n in (1, 2, token)] + [9, 1, 2]  # 3 follows half of the time
    assert guess(make(min_token_prob=0.5), split)[0] == 3
    assert guess(make(min_token_prob=0.51), split) == []
    drifting = [n for token in (5, 6, 7, 8) for n in (1, 2, 3, token)] + [9, 1, 2]  # 3 is sure, what follows is not
    assert guess(make(min_token_prob=0.3), drifting) == [3]
    assert guess(make(min_token_prob=0.2), drifting) == [3, 8]  # the most recent of equals


@pytest.mark.parametrize(
    "options",
    [{"max_tree_depth": 0}, {"max_cached_requests": -1}, {"max_spec_factor": -0.1}, {"max_spec_factor": float("nan")},
     {"min_token_prob": 1.1}, {"min_token_prob": -0.1}],
)  # fmt: skip
def test_impossible_options(options):
    with pytest.raises(ConfigError, match=PREFIX + next(iter(options))):
        make(**options)


def test_tree():
    """Branches where several ways on are likely, at no more nodes than the chain may have."""
    text = [n for i, token in enumerate((5, 6, 7, 5, 6, 7)) for n in (1, 2, 3, 4, token, 50 + i)] + [1, 2, 3, 4]
    (chain,), (tree,) = (make(tree=tree).propose([sequence(text)], 4) for tree in (False, True))
    assert chain.is_chain and chain.tokens[0] == 7 and not tree.is_chain
    assert {tree.tokens[i] for i, parent in enumerate(tree.parents) if parent == -1} == {5, 6, 7}
    assert len(tree) == 4 == len({(p, t) for p, t in zip(tree.parents, tree.tokens, strict=True)})
    sure = make(tree=True).propose([sequence([1, 2, 3, 1, 2, 3])], 4)[0]
    assert sure.is_chain and sure.tokens == [1, 2, 3]


@pytest.mark.parametrize("index", KINDS)
def test_earlier_outputs(index):
    drafter, text = make(index), list(range(20))
    seq = sequence(text, prompt_len=5)
    drafter.propose([seq], 8)
    assert guess(drafter, [50, 6, 7, 8]) == []  # not while it runs
    drafter.forget(seq)
    assert guess(drafter, [50, 6, 7, 8]) == [9, 10, 11]
    assert guess(drafter, text[:5]) == text[5:10]  # the same question again
    assert guess(drafter, [8, 30, 31, 32, 7, 8]) == [9, 10]  # two tokens match there, one here
    assert guess(drafter, [6, 7, 8, 30, 6, 7, 8]) == [30, 6, 7]  # equally good: its own text first
    assert guess(drafter, [18, 19]) == []  # nothing goes on behind the end
    drafter.forget(sequence([40, 41, 42, 40]))  # nothing was generated: nothing to remember
    assert len(drafter.lengths) == 1
    none = make(max_cached_requests=0)
    none.forget(sequence(text, prompt_len=5))
    assert guess(none, [6, 7, 8]) == [] and not len(none.past)


@pytest.mark.parametrize("index", KINDS)
def test_eviction(monkeypatch, index):
    drafter = make(index, max_cached_requests=2)
    for first in (100, 200, 300):
        drafter.forget(sequence(list(range(first, first + 30)), prompt_len=1))
    assert guess(drafter, [110, 111]) == []
    assert guess(drafter, [210, 211]) == [212, 213] and guess(drafter, [310, 311]) == [312, 313]
    assert len(drafter.past) == 62
    if index is Index:
        assert len(drafter.past.back[0]) == 62
        assert all(place >= drafter.past.base for last in drafter.past.last for place in last.values())
    monkeypatch.setattr("outrider.drafters.suffix.CACHED_TOKENS", 50)
    drafter.forget(sequence(list(range(400, 480)), prompt_len=1))  # over the bound alone: its end is kept
    assert guess(drafter, [310, 311]) == [] and len(drafter.past) == 50
    assert guess(drafter, [410, 411]) == [] and guess(drafter, [470, 471]) == [472, 473]


@pytest.mark.parametrize("index", KINDS)
def test_memory_is_bounded(index):
    dice, drafter = random.Random(0), make(index, max_cached_requests=5)

    def requests(n: int) -> int:
        for _ in range(n):
            seq = sequence(dice.choices(range(8000), k=400), prompt_len=100)
            drafter.propose([seq], 8)
            drafter.forget(seq)
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        assert requests(10) * 2 > requests(60) or index is not Index  # what is compiled is not traced
        assert len(drafter.past) <= 5 * (300 + 24 + 1) and len(drafter.lengths) == 5
    finally:
        tracemalloc.stop()


def test_no_text_makes_a_guess_follow_more_than_so_many_places():
    """However often the text repeats itself: FOLLOWED places of each size of n-gram, and no match above the depth."""
    dice = random.Random(0)
    for text in ([7] * 2000, dice.choices(range(2), k=2000), [1, 2, 3, 4] * 500):
        index = Index()
        index.enter(text, False)
        found = index._search(text[-24:])
        assert 0 < len(found) <= FOLLOWED * len(SIZES) and max(found.values()) <= 24
        assert [len(back) for back in index.back] == [2000] * len(SIZES)
        assert all(len(last) <= 2000 for last in index.last), "one entry for each n-gram, wherever it ended last"


def acceptance(llm: LLM, prompts: list[str]) -> tuple[float, list[list[int]], set[str]]:
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    outputs = run(llm, [(llm.encode(prompt), params) for prompt in prompts])
    metrics = [o.metrics["speculative_decoding"] for o in outputs]
    emitted = sum(len(o.token_ids) for o in outputs) / sum(m["num_spec_steps"] for m in metrics)
    return emitted, [o.token_ids for o in outputs], {o.metrics["exactness"] for o in outputs}


def test_it_pays(tiny_llm):
    """More tokens a forward than prompt lookup of the same length; far more when asked again; a tree, too."""
    prompts = [
        "Lily had a red ball. She liked to play with the red ball in the park. Lily had a blue ball. She liked to",
        "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n",
    ]
    plain = acceptance(tiny_llm, prompts)
    lengths = {}
    for method in ("ngram", "suffix"):
        tiny_llm.speculative_config = {"method": method, "num_speculative_tokens": 8}
        lengths[method], tokens, exactness = acceptance(tiny_llm, prompts)
        assert tokens == plain[1] and exactness == plain[2]
    assert lengths["suffix"] >= lengths["ngram"] > 1
    again, tokens, _ = acceptance(tiny_llm, prompts)
    assert tokens == plain[1] and again > lengths["suffix"]
    tiny_llm.speculative_config = {"method": "suffix", "tree": True}
    for _ in range(2):
        branching, tokens, exactness = acceptance(tiny_llm, prompts)
        assert tokens == plain[1]
    assert branching > lengths["suffix"]


@pytest.mark.parametrize(
    "method",
    [
        {"method": "suffix"},
        {"method": "auto", "drafters": [{"method": "suffix"}]},
        {"method": "merge", "drafters": [{"method": "ngram"}, {"method": "suffix"}]},
        {"method": "cascade", "view": "streaming:budget=64", "drafter": {"method": "suffix"}},
    ],
    ids=lambda given: given["method"],
)
def test_what_a_caller_expects_is_drafted_from(tiny_llm, method, monkeypatch):
    """From the first token on, and to the same tokens whether it is right, half right or wrong."""
    prompt, params = "Once upon a time there was a little", SamplingParams(max_tokens=60, temperature=0.8, seed=7)
    plain = tiny_llm.generate(prompt, params)[0]
    half = len(plain.text) // 2
    steps = []
    for text in ("", "Nothing of the kind. " * 9, plain.text[:half] + " or rather" + plain.text[half:], plain.text):
        tiny_llm.speculative_config = method  # a new one, which remembers nothing
        with monkeypatch.context() as patch:
            count_forwards(tiny_llm, patch)
            output = tiny_llm.generate(prompt, replace(params, prediction=text))[0]
        assert output.token_ids == plain.token_ids
        spec = output.metrics["speculative_decoding"]
        steps.append(spec.get("inner", spec)["num_spec_steps"])
        assert_released(tiny_llm)
    assert steps[3] <= steps[2] < 0.6 * min(steps[:2]), steps


def test_a_prediction_that_breaks_the_drafter_costs_its_guesses(tiny_llm, monkeypatch):
    asked = SamplingParams(max_tokens=5, seed=1, prediction="there was")
    expected = tiny_llm.generate("Once upon a time", asked)[0]
    tiny_llm.speculative_config = {"method": "suffix"}
    monkeypatch.setattr(tiny_llm.engine.drafter, "remember", lambda text: 1 / 0)
    output = tiny_llm.generate("Once upon a time", asked)[0]
    assert output.token_ids == expected.token_ids and "ZeroDivisionError" in output.metrics["drafter_error"]
