"""The one law of sampling: what is chosen follows the filtered softmax, and depends on nothing else."""

from __future__ import annotations

import hashlib
import math
import random
from dataclasses import replace
from typing import ClassVar

import numpy
import pytest
import torch
from helpers import ScriptedDrafter, logits_after, use
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2, kstest
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from outrider import Draft, SamplingParams, sampling
from outrider.config import Rule
from outrider.errors import ConfigError, RequestError
from outrider.sampling import Row, choose, gumbel, process
from outrider.sequence import Sequence
from outrider.speculate import step
from outrider.verify import verify

VOCAB = 8
LOGITS = torch.tensor([1.2, -0.4, 0.3, 2.1, -1.5, 0.3, 0.9, -3.0])


def law(logits: list[float], p: SamplingParams) -> list[float]:
    """Probability of each token, straight from the definitions, one token at a time in float64."""
    if p.temperature == 0:
        return [float(i == logits.index(max(logits))) for i in range(len(logits))]

    def normal(weights: dict[int, float]) -> dict[int, float]:
        return {i: w / sum(weights.values()) for i, w in weights.items()}

    kept = normal({i: math.exp(x / p.temperature) for i, x in enumerate(logits)})
    ranked = sorted(kept, key=lambda i: -kept[i])
    if p.top_k > 0:
        kept = normal({i: w for i, w in kept.items() if w >= kept[ranked[min(p.top_k, len(ranked)) - 1]]})
    if p.top_p < 1:
        mass, least = 0.0, 0.0
        for i in ranked:
            if i in kept and mass < p.top_p:
                mass, least = mass + kept[i], kept[i]
        kept = normal({i: w for i, w in kept.items() if w >= least})
    kept = normal({i: w for i, w in kept.items() if w >= p.min_p * max(kept.values())})
    return [kept.get(i, 0.0) for i in range(len(logits))]


def fits(counts: list[int], probs: list[float]) -> bool:
    """Whether counts are a plausible (p > 0.1 %) draw from a law: chi-square, cells expecting few merged."""
    n = sum(counts)
    if any(c and not p for c, p in zip(counts, probs, strict=True)):
        return False
    cells = [(c, n * p) for c, p in zip(counts, probs, strict=True) if p]
    rare = [cell for cell in cells if cell[1] < 5]
    cells = [cell for cell in cells if cell[1] >= 5] + ([tuple(map(sum, zip(*rare, strict=True)))] if rare else [])
    statistic = sum((c - e) ** 2 / e for c, e in cells)
    return len(cells) == 1 or chi2.sf(statistic, len(cells) - 1) > 1e-3


@pytest.fixture(scope="module")
def places() -> list[Row]:
    """24,000 different (seed, position) pairs; each remembers its noise, so laws may be tested on the same ones."""
    seqs = [Sequence([0], SamplingParams(), seed) for seed in range(240)]
    return [Row(seq, [0] * n) for seq in seqs for n in range(100)]


SETTINGS = {
    "plain": {},
    "cold": {"temperature": 0.4},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 3},
    "top_k ties": {"top_k": 4},  # the fourth and fifth are as likely: both stay
    "top_k all": {"top_k": 50},
    "top_p": {"top_p": 0.8},
    "top_p small": {"top_p": 1e-6},
    "min_p": {"min_p": 0.25},
    "min_p all": {"min_p": 1.0},
    "together": {"temperature": 1.7, "top_k": 6, "top_p": 0.9, "min_p": 0.1},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_choose_follows_the_softmax(places, name):
    params = SamplingParams(**SETTINGS[name])
    for row in places:
        row.seq.params = params
    drawn = choose(LOGITS.expand(len(places), -1).clone(), places)
    counts = [drawn.count(i) for i in range(VOCAB)]
    expected = law(LOGITS.tolist(), params)
    assert fits(counts, expected), f"{counts} instead of {[round(len(places) * p) for p in expected]}"


@given(seed=st.integers(0, 10**9))
def test_what_is_kept(seed):
    """top-k, top-p and min-p over random laws and mixed rows keep what the definitions keep."""
    dice = random.Random(seed)
    params = [
        SamplingParams(
            temperature=dice.choice([0.3, 1.0, 2.5]), top_k=dice.choice([0, -1, 1, 3, 20, 99]),
            top_p=dice.choice([1.0, 0.99, 0.7, 0.05, 1e-46]), min_p=dice.choice([0.0, 0.01, 0.3, 1.0]),
        )
        for _ in range(6)
    ]  # fmt: skip
    logits = torch.randn(6, 100, generator=torch.Generator().manual_seed(seed)) * dice.choice([0.01, 1, 5])
    scaled = logits / torch.tensor([[p.temperature] for p in params])
    kept = sampling.keep_likely(scaled, params)
    for row, own, p in zip(logits, kept, params, strict=True):
        expected = torch.tensor(law(row.tolist(), p))
        assert_close(own.softmax(-1), expected, rtol=1e-4, atol=1e-6)


class OnCuda(torch.Tensor):
    """Says that it lies there, and what softmaxes it was given to."""

    is_cuda = True
    widths: ClassVar[list[int]] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if "softmax" in func.__name__:
            cls.widths.append(args[0].shape[-1])
        return super().__torch_function__(func, types, args, kwargs)


@pytest.mark.parametrize("vocab", [8, 9, 10, 11])
def test_a_softmax_knows_no_place_in_a_batch(vocab):
    """CUDA's sums by a row's address modulo 16 bytes: each begins at a multiple. The results are as they were."""
    logits, params = torch.randn(3, vocab, generator=torch.Generator().manual_seed(1)), SamplingParams(top_p=0.7)
    rows = [Row(Sequence([0], own, 0)) for own in (params, params, SamplingParams(temperature=0))]
    found = []
    OnCuda.widths.clear()
    for own in (logits, logits.as_subclass(OnCuda)):
        entry = sampling.logprob(own[1], 2, vocab)
        laws = sampling.distribution(own, rows), sampling.keep_likely(own, [params] * 3)
        found.append([*(law.as_subclass(torch.Tensor) for law in laws), entry.logprob, entry.top])
    assert_close(*found)
    assert len(OnCuda.widths) == 4 and not any(width % 4 for width in OnCuda.widths)


def test_greedy_is_the_argmax():
    row = Row(Sequence([0], SamplingParams(temperature=0), 0))
    assert choose(LOGITS[None], [row]) == [3]


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-45, 1e-300])
def test_a_tiny_temperature_is_greedy(temperature):
    logits = torch.tensor([[90.0, 99.0, 100.0, 98.0, 1.0, 0.0, -5.0, 0.0]])
    for top_p in (1.0, 0.9):
        row = Row(Sequence([0], SamplingParams(temperature=temperature, top_p=top_p), 1))
        assert choose(logits, [row]) == [2] == [int(sampling.scores(logits, [row]).argmax())]  # without kernels, too


@given(seed=st.integers(0, 10**9))
def test_a_choice_depends_on_its_row_alone(seed):
    dice = random.Random(seed)
    kinds = [
        SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_k=2), SamplingParams(top_p=0.6),
        SamplingParams(temperature=0.5, min_p=0.3, presence_penalty=1.0, logit_bias={1: 3.0}),
    ]  # fmt: skip
    logits = torch.randn(9, 100, generator=torch.Generator().manual_seed(seed)) * 4
    made = [(dice.choices(range(100), k=dice.randint(1, 5)), dice.choice(kinds), dice.randrange(99)) for _ in logits]

    def rows() -> list[Row]:
        return [Row(Sequence(tokens, params, seed), tokens[:1]) for tokens, params, seed in made]

    together = choose(logits, rows())
    order = dice.sample(range(9), 5)
    assert [choose(logits[i : i + 1], [row])[0] for i, row in enumerate(rows())] == together
    assert choose(logits[order], [rows()[i] for i in order]) == [together[i] for i in order]


# --- the noise -------------------------------------------------------------------------------------------------------


def reference_gumbel(seed: int, position: int, token: int) -> float:
    """SplitMix64 in plain integers."""
    text = f"{seed % 2**64}/{position}".encode()
    z = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") + (token + 1) * 0x9E3779B97F4A7C15
    z %= 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    z ^= z >> 31
    return -math.log(-math.log(((z >> 12) + 0.5) / 2**52))


def test_noise_never_changes():
    """These very numbers, on every device and in every version: who changes them changes every seeded output."""
    pinned = {
        (0, 0): [-0.57126188, -0.47840983, 0.02068386, 1.10014975, -0.26727709],
        (1234567890123456789, 131071): [-0.91962385, 0.88113296, 2.81725001, 0.77585828, 6.24817896],
    }
    for (seed, position), values in pinned.items():
        assert_close(gumbel(seed, position, 5), torch.tensor(values), rtol=1e-6, atol=1e-6)
    for seed, position in [(0, 0), (1, 0), (0, 1), (-1, 7), (2**64 - 1, 7), (2**63, 10**6)]:
        expected = torch.tensor([reference_gumbel(seed, position, token) for token in range(300)])
        assert_close(gumbel(seed, position, 300), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(gumbel(-1, 7, 9), gumbel(2**64 - 1, 7, 9))  # seeds are 64-bit words
    assert torch.equal(gumbel(3, 5, 9), gumbel(3, 5, 90)[:9])  # a larger vocabulary changes nothing


def test_noise_is_uniform_and_independent():
    noise = torch.stack([gumbel(seed, position, 16) for seed in range(40) for position in range(40)])
    uniform = (-(-noise.double()).exp()).exp().view(40, 40, 16)  # seed, position, token
    assert kstest(uniform.flatten().numpy(), "uniform").pvalue > 1e-3
    for at in range(0, 40, 13):
        assert kstest(uniform[at].flatten().numpy(), "uniform").pvalue > 1e-3
        assert kstest(uniform[:, at].flatten().numpy(), "uniform").pvalue > 1e-3
    for token in (0, 7, 15):
        assert kstest(uniform[..., token].flatten().numpy(), "uniform").pvalue > 1e-3
    assert noise.unique().numel() > 0.99 * noise.numel()
    for a, b in [
        (uniform[1:], uniform[:-1]), (uniform[:, 1:], uniform[:, :-1]), (uniform[..., 1:], uniform[..., :-1]),
        (uniform[1:, :-1], uniform[:-1, 1:]), (uniform[:, 1:, :-1], uniform[:, :-1, 1:]),
    ]:  # fmt: skip
        r = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]
        assert abs(r) < 4 / math.sqrt(a.numel())


@pytest.mark.parametrize("word", [0, 2**64 - 1])
def test_noise_is_finite_at_both_ends(monkeypatch, word):
    """The two counters whose mixed words are all zeros and all ones, found by running SplitMix64 backwards."""

    def unshift(z: int, bits: int) -> int:
        x = z
        for _ in range(64 // bits + 1):
            x = z ^ x >> bits
        return x

    z = unshift(word, 31) * pow(0x94D049BB133111EB, -1, 2**64) % 2**64
    z = unshift(z, 27) * pow(0xBF58476D1CE4E5B9, -1, 2**64) % 2**64
    z = unshift(z, 30)
    key = int.from_bytes(hashlib.blake2b(b"5/6", digest_size=8).digest(), "big")
    counter = (z - key) % 2**64
    signed = counter - 2**64 if counter >= 2**63 else counter
    monkeypatch.setattr(sampling, "_golden", lambda *_: torch.tensor([signed]))
    noise = float(gumbel(5, 6, 1))
    assert noise == pytest.approx(53 * math.log(2) if word else -math.log(53 * math.log(2)), rel=1e-3)


@pytest.mark.parametrize("distance", [0.0, 0.3, 1.0, 4.0])
def test_coupling(places, distance):
    """Two laws that share the noise agree with probability >= (1 - TV) / (1 + TV) (arXiv 2408.07978)."""
    for row in places:
        row.seq.params = SamplingParams()
    other = LOGITS + distance * torch.tensor([-1.0, 1, 0, -1, 1, 0, 1, 0])
    drawn = [choose(x.expand(len(places), -1).clone(), places) for x in (LOGITS, other)]
    agree = sum(a == b for a, b in zip(*drawn, strict=True)) / len(places)
    tv = float((LOGITS.softmax(-1) - other.softmax(-1)).abs().sum() / 2)
    assert (1 - tv) / (1 + tv) - 0.01 <= agree <= 1 - tv + 0.01


# --- what a request's parameters do -----------------------------------------------------------------------------------


def reference_process(
    logits: list[float], prompt: list[int], output: list[int], p: SamplingParams, eos: set[int]
) -> list[float]:
    """One token at a time, from the definitions (CTRL; OpenAI's penalties as in vLLM)."""
    result = []
    for token, x in enumerate(logits):
        if token in prompt + output:
            x = x / p.repetition_penalty if x > 0 else x * p.repetition_penalty
        x -= p.frequency_penalty * output.count(token)
        x -= p.presence_penalty if token in output else 0.0
        x += (p.logit_bias or {}).get(token, 0.0)
        if token in eos and len(output) < p.min_tokens:
            x = -math.inf
        result.append(x)
    return result


@given(seed=st.integers(0, 10**9))
def test_penalties(seed):
    """Over a growing sequence, with forks that come and go: the counts kept between calls stay right."""
    dice = random.Random(seed)
    params = SamplingParams(
        repetition_penalty=dice.choice([1.0, 1.3, 0.8]), presence_penalty=dice.choice([0, 0.7, -0.5]),
        frequency_penalty=dice.choice([0, 0.4, -1.0]), logit_bias=dice.choice([None, {2: 1.5, 5: -math.inf}]),
        min_tokens=dice.choice([0, 4]), stop_token_ids=[3], ignore_eos=dice.choice([False, True]),
    )  # fmt: skip
    prompt = dice.choices(range(VOCAB), k=dice.randint(1, 4))
    seq = Sequence(prompt, params, 0, eos=[6])

    def check(owner: Sequence, path: list[int]) -> None:
        logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(dice.randrange(10**6))) * 3
        before = logits.clone()
        expected = reference_process(logits.tolist(), prompt, owner.output + path, params, {3, 6})
        assert_close(process(logits, Row(owner, path)), torch.tensor(expected), rtol=1e-5, atol=1e-5)
        assert torch.equal(logits, before)

    for _ in range(6):
        check(seq, dice.choices(range(VOCAB), k=dice.randint(0, 3)))
        fork = seq.fork()
        fork.tokens += dice.choices(range(VOCAB), k=dice.randint(0, 3))
        check(fork, dice.choices(range(VOCAB), k=dice.randint(0, 2)))
        check(fork.fork(), [1])
        seq.tokens += dice.choices(range(VOCAB), k=dice.randint(0, 3))


def test_biases_of_a_whole_vocabulary_are_added_at_once():
    """Each alone would hold up whatever else is in the step; to the bit what each alone would be."""
    dice, count = random.Random(3), 0
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(3)) * 9
    bias = {i: dice.choice([dice.uniform(-100, 100), -math.inf, math.inf, 1e300, -1e300, 1e-46]) for i in range(1000)}
    expected = logits.clone()
    for token, by in bias.items():
        expected[token] = (expected[token] + min(by, sampling.LARGEST)).clamp(max=sampling.LARGEST)

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal count
            count += 1
            return func(*args, **(kwargs or {}))

    seq = Sequence([1], SamplingParams(logit_bias=bias), 0)
    with Counted():
        found = [process(logits, Row(seq, path)) for path in ([], [2])]
    assert all(torch.equal(each, expected) for each in found) and count < 30


def test_banned_words_are_found_among_many():
    """Of those whose last but one token was not written none is looked at, in any row."""
    looked = []

    class Noted(tuple):
        __hash__ = tuple.__hash__

        def __eq__(self, other):
            looked.append(self)
            return tuple.__eq__(self, other)

    dice = random.Random(0)
    words = {tuple(dice.choices(range(4), k=dice.randint(0, 3))): tuple(dice.choices(range(9), k=2)) for _ in range(60)}
    many = tuple((Noted([*range(300), i]), (3,)) for i in range(10, 2000))
    for _ in range(100):
        tokens = dice.choices(range(4), k=dice.randint(1, 6))
        seq = Sequence(tokens[:1], SamplingParams(max_tokens=9), 0)
        seq.banned = (*words.items(), *many)
        seq.tokens += tokens[1:3]
        row = Row(seq, tokens[3:])
        found = {i for i, x in enumerate(process(torch.zeros(12), row).tolist()) if x < 0}
        output = tuple(tokens[1:])
        spelt = [(before, t) for before, ends in words.items() for t in ends]
        assert found == {t for before, t in spelt if output[max(0, len(output) - len(before)) :] == before}
    assert not looked


def test_processors_see_the_supposed_prefix_and_run_last():
    calls = []

    def first(prefix, logits):
        calls.append(list(prefix))
        return logits * 0 + 1

    params = SamplingParams(temperature=0, logits_processors=[first, lambda prefix, logits: logits + prefix[-1]],
                            logit_bias={2: 100.0})  # fmt: skip
    seq = Sequence([4, 5], params, 0)
    assert torch.equal(process(LOGITS, Row(seq, [6, 7])), torch.full((VOCAB,), 8.0))
    assert calls == [[4, 5, 6, 7]] and seq.tokens == [4, 5]


# --- end to end ------------------------------------------------------------------------------------------------------


def test_speculated_text_follows_the_model(make_llm):
    """Pairs of tokens sampled under a draft that is often right have the model's joint law."""
    llm = make_llm(vocab_size=VOCAB, engine={"max_num_seqs": 512, "max_num_batched_tokens": 4096})
    prompt, n, params = [1, 2, 3], 3000, SamplingParams(temperature=1.5, top_k=7, max_tokens=3)
    first = torch.tensor(law(logits_after(llm, prompt).tolist(), params))
    second = torch.stack([torch.tensor(law(logits_after(llm, [*prompt, a]).tolist(), params)) for a in range(VOCAB)])
    a, b = int(first.argmax()), int(second[int(first.argmax())].argmax())
    use(llm, ScriptedDrafter(lambda seq, k: Draft([(a + 1) % 8, a, b, (b + 1) % 8], [-1, -1, 1, 1])))
    outputs = llm.generate(prompt, replace(params, n=n, seed=0))
    pairs = [o.token_ids[0] * VOCAB + o.token_ids[1] for o in outputs]
    accepted = sum(o.metrics["speculative_decoding"]["num_accepted_draft_tokens"] for o in outputs)
    assert accepted > n / 10
    assert fits([pairs.count(i) for i in range(VOCAB**2)], (first[:, None] * second).flatten().tolist())


def test_small_work_leaves_the_number_of_threads_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[int] = []

    def shaped(logits, rows):
        inside.append(torch.get_num_threads())
        return logits, []

    monkeypatch.setattr(sampling, "_shaped", shaped)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        sampling.scores(torch.zeros(2, 8), [])
        sampling.scores(torch.zeros(1, sampling.SMALL), [])
        assert inside == [1, 3] and torch.get_num_threads() == 3
        with pytest.raises(ZeroDivisionError), sampling.few_threads(torch.zeros(1)):
            raise ZeroDivisionError
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_the_first_of_equally_likely_tokens_is_the_likeliest() -> None:
    assert sampling.argmax(torch.tensor([[0.0, 2.0, 2.0], [1.0, 0.0, 1.0]])) == [1, 0]


@pytest.mark.parametrize("filters", [{"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.2}, {"top_k": 900}, {}])
def test_noise_for_few_tokens_is_the_noise_for_all(filters: dict[str, float]) -> None:
    """Where filters leave few tokens, noise is made for those alone."""
    vocab, generator = 1000, torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(2, vocab, generator=generator)
    for seed in range(20):
        seq = Sequence([1, 2, 3], SamplingParams(temperature=0.9, **filters), seed=seed)
        rows = [Row(seq), Row(seq, [7])]
        shaped, _ = sampling._shaped(logits, rows)
        for stream in ("", "draft"):
            name = f"draft/{seq.settled}" if stream else ""
            whole = torch.stack(
                [shaped[i] + gumbel(seed, row.position, vocab, stream=name) for i, row in enumerate(rows)]
            )
            assert torch.equal(sampling.scores(logits.clone(), rows, stream), whole)


# --- where there is nothing to choose, or nearly ----------------------------------------------------------------------


def ban_all(tokens, logits):
    return logits - torch.inf


def to_nan(tokens, logits):
    return logits * torch.nan


def fail(tokens, logits):
    raise KeyError("grammar")


class Refuser:
    def __call__(self, tokens, logits):
        return logits - torch.inf


BANS = {i: -math.inf for i in range(128)}
HOPELESS = [
    (dict(logit_bias=BANS), "every token is banned"),
    (dict(logit_bias={i: -math.inf for i in range(127)}, stop_token_ids=[127], min_tokens=2), "every token is banned"),
    (dict(stop_token_ids=list(range(128)), min_tokens=1), "every token is banned"),
    (dict(logits_processors=[ban_all]), "ban_all leaves no token"),
    (dict(logits_processors=[to_nan]), "to_nan returned NaN"),
    (dict(logits_processors=[fail]), "fail raised KeyError: 'grammar'"),
    (dict(logits_processors=[lambda tokens, logits: logits, Refuser()]), "Refuser leaves no token"),
]


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("rule", ["coupled", "rejection", "block", "typical"])
@pytest.mark.parametrize("case", range(len(HOPELESS)))
def test_nothing_to_choose_is_an_error_of_that_sequence(random_llm, temperature, rule, case):
    """Beside one that goes on, drafted and not, in the step in which it happens."""
    options, why = HOPELESS[case]
    for draft in (Draft(), Draft.chain([3, 4]), Draft([3, 4, 5], [-1, -1, 0])):
        seqs = [Sequence([1, 2], SamplingParams(temperature=temperature, max_tokens=9, **o), 0) for o in (options, {})]
        bad, good = step(random_llm.runner, ScriptedDrafter(lambda s, k, d=draft: d), seqs, 3, rule=Rule(rule))
        assert isinstance(bad.error, RequestError) and why in str(bad.error) and "\n" not in str(bad.error)
        assert not bad.tokens and not bad.path and len(seqs[0].tokens) == 2
        assert good.error is None and seqs[1].output == good.tokens != []
        for seq in seqs:
            random_llm.runner.free(seq)


@pytest.mark.parametrize("value, why", [(math.nan, "NaN"), (-math.inf, "all -inf"), (math.inf, "infinite")])
@pytest.mark.parametrize("rule", ["coupled", "rejection", "block", "typical"])
@pytest.mark.parametrize("vocab", [8, 2**15])
def test_logits_that_are_not_finite(value, why, rule, vocab):
    """One row of a draft, or all; the others are as they were."""
    for temperature, filters in ((0, {}), (1, {}), (1, {"top_k": 3}), (0.5, {"top_p": 0.5, "min_p": 0.1})):
        params = SamplingParams(temperature=temperature, seed=1, **filters)
        seqs, draft = [Sequence([1], params, 1) for _ in range(2)], Draft.chain([2, 3])
        logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(0))
        before = verify(seqs, [draft, draft], logits, Rule(rule))
        logits[0, : vocab if value < 0 else 2] = value
        bad, good = verify(seqs, [draft, draft], logits, Rule(rule))
        assert isinstance(bad.error, RequestError) and f"logits after 1 tokens are {why}" in str(bad.error)
        assert good == before[1]


def test_what_stands_before_the_error_is_emitted():
    """A right draft does not take from the text what plain decoding would have given."""
    logits = torch.zeros(3, 8)
    logits[0, 2] = logits[1, 3] = 5
    logits[2] = torch.nan
    for params in (SamplingParams(temperature=0), SamplingParams(temperature=0, logits_processors=[lambda t, x: x])):
        seq = Sequence([1], params, 0)
        (verdict,) = verify([seq], [Draft.chain([2, 3])], logits)
        assert (verdict.tokens, verdict.path, verdict.error) == ([2, 3], [0], None)
        logits_now = logits[2:]
        seq.accept([2, 3])
        (verdict,) = verify([seq], [Draft()], logits_now)
        assert verdict.tokens == [] and "logits after 3 tokens are NaN" in str(verdict.error)


@pytest.mark.parametrize("extreme", [
    dict(top_p=1e-46), dict(top_p=5e-324), dict(min_p=1.0), dict(top_k=1), dict(temperature=5e-324),
    dict(temperature=1e-46), dict(top_p=1e-46, min_p=1.0, top_k=1, temperature=1e-40), dict(top_p=1e-300, min_p=1e-46),
])  # fmt: skip
def test_the_likeliest_token_always_stays(random_llm, extreme):
    greedy = random_llm.generate([5, 9, 2], temperature=0, max_tokens=12)[0].token_ids
    options = {"temperature": 0.9, "seed": 3, "max_tokens": 12, **extreme}
    assert random_llm.generate([5, 9, 2], **options)[0].token_ids == greedy


FILTERS = [{}, {"top_k": 1}, {"top_k": 40}, {"top_p": 0.9}, {"top_p": 1e-9}, {"top_p": 0.999}, {"min_p": 0.05},
           {"min_p": 1}, {"top_k": 30, "top_p": 0.95, "min_p": 0.01}]  # fmt: skip
PENALTIES = {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": -0.2, "logit_bias": {3: 2.0}}


@pytest.mark.skipif(sampling.native.active == "reference", reason="the kernels are not built")
@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("vocab", [6, 257, 5003])
def test_the_kernels_draw_what_the_reference_chooses(vocab: int, filters: dict[str, float]) -> None:
    """Nearly always by themselves, on every instruction set; where last bits decide they leave it to the reference."""
    generator, left, count = torch.Generator().manual_seed(vocab), 0, 0
    before = sampling.native.active
    for seed in range(24):
        logits = torch.randn(3, vocab, generator=generator) * (0.5, 2, 6)[seed % 3]
        logits[:, : seed % 7] += 5
        logits[1, 1 :: 2 + seed] = -torch.inf
        logits = logits.bfloat16().float() if seed % 5 == 0 else logits  # with ties
        params = SamplingParams(
            temperature=(0.3, 1.0, 1.7)[seed // 3 % 3], **filters, **(PENALTIES if seed % 4 == 0 else {})
        )
        rows = [Row(Sequence([1, 2, 3, 2, i], params, seed), [5, 5][:i]) for i in range(3)]
        for stream in ("", "draft"):
            for own in sampling.native.available()[:-1]:
                sampling.native.use(own)
                expected = sampling.argmax(sampling.scores(logits, rows, stream))
                found = sampling._settled(logits, rows, stream, range(len(rows)))
                assert all(expected[i] == token for i, token in found.items())
                assert choose(logits, rows, stream) == expected
                left, count = left + 3 - len(found), count + 3
    sampling.native.use(before)
    assert left < count * 0.1


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_left_to_the_reference(odd: float) -> None:
    logits = torch.zeros(2, 300)
    logits[0, 7] = odd
    logits[1] = odd
    rows = [Row(Sequence([1], SamplingParams(), seed)) for seed in (0, 1)]
    assert choose(logits, rows) == sampling.argmax(sampling.scores(logits, rows))


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_extreme_biases_and_penalties(random_llm, temperature):
    def tokens(**options) -> list[int]:
        return random_llm.generate([5, 9, 2], temperature=temperature, seed=1, max_tokens=6, **options)[0].token_ids

    def force(prefix, logits):
        logits[:] = -torch.inf
        logits[33] = torch.inf
        return logits

    for bias in (math.inf, 1e308, 3e38, 1e9, numpy.float32(1e9)):
        assert tokens(logit_bias={numpy.int64(7): bias}) == [7] * 6
        assert tokens(logit_bias={7: bias, 8: -math.inf, 9: -bias}) == [7] * 6
    assert tokens(logit_bias={**BANS, 9: 0}) == [9] * 6
    assert tokens(logits_processors=[force]) == [33] * 6
    for penalty in (1e-300, 1e-46, 1e-30, 1e6):
        assert len(tokens(repetition_penalty=penalty)) == 6
        assert len(tokens(repetition_penalty=penalty, logit_bias={5: -math.inf, 9: math.inf})) == 6
    for wrong in (10**400, -(10**400), math.nan):
        with pytest.raises(ConfigError, match="logit_bias"):
            tokens(logit_bias={7: wrong})


def test_noise_is_kept_within_bounds(monkeypatch):
    """However many sequences and places, and what was dropped comes back the same."""
    monkeypatch.setattr(sampling, "_kept", {})
    monkeypatch.setattr(sampling, "NOISE_KEPT", 4 * 1000 * 10)
    rows = [Row(Sequence([1] * (1 + i), SamplingParams(), s)) for s in range(5) for i in range(8)]
    flat = torch.zeros(len(rows), 1000)
    first = sampling.argmax(sampling.scores(flat, rows))
    assert len(sampling._kept) == 10 and sampling.argmax(sampling.scores(flat, rows)) == first
    assert first == [int(gumbel(row.seq.seed, row.position, 1000).argmax()) for row in rows]


def test_a_drafter_whose_processor_refuses_stops_there(random_llm, make_checkpoint):
    """A custom processor may raise for what only a draft supposes; the request does not hear of it."""
    plain = random_llm.generate([5, 9], temperature=0, max_tokens=12)[0].token_ids

    def strict(tokens, logits):
        if tokens[2:] != plain[: len(tokens) - 2]:
            raise ValueError("not the text")
        return logits

    for config in ({"method": "draft_model", "model": str(make_checkpoint(noise=0.02))}, {"method": "self"}):
        random_llm.speculative_config = {**config, "num_speculative_tokens": 4}
        output = random_llm.generate([5, 9], temperature=0, max_tokens=12, logits_processors=[strict])[0]
        assert output.token_ids == plain and output.metrics["speculative_decoding"]["num_accepted_draft_tokens"]
