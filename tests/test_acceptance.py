"""`rejection` and `block` emit the target's law exactly, by enumeration; `typical` says that it is lossy.

The rules' cores ask a coin at every random branch, so a test can walk all branches and add up their probabilities. With
all drafts that the drafter may draw, and what is emitted completed from the target to a fixed length, the law of the
tokens must be the target's to the last digits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
from helpers import ScriptedDrafter, oracle, rest, run, use
from test_law import fits
from test_law import law as by_definition

from outrider import LLM, Draft, SamplingParams
from outrider.cli.options import summary
from outrider.config import ACCEPTANCE_METHODS, Rule, SpeculativeConfig, promised
from outrider.errors import ConfigError
from outrider.sampling import Row, choose, coins, distribution, draw, gumbel, uniform
from outrider.sequence import Sequence
from outrider.verify import block, rejection, typical, verify

EXACT = ["coupled", "rejection", "block"]
Words = tuple[int, ...]
Model = Callable[[Words], torch.Tensor]


def model(vocab: int, seed: int, sharp: float = 2.0, zeros: bool = False) -> Model:
    """Random laws (vocab,) float64, another one after every prefix; with `zeros`, some tokens are impossible."""

    @cache
    def after(prefix: Words) -> torch.Tensor:
        number = sum((t + 1) * (vocab + 1) ** i for i, t in enumerate(prefix))
        dice = torch.Generator().manual_seed(1000003 * seed + number)
        logits = sharp * torch.randn(vocab, generator=dice, dtype=torch.float64)
        if zeros:
            logits[torch.rand(vocab, generator=dice) < 0.3] = -torch.inf
            logits[number % vocab] = 0.5
        return logits.softmax(-1)

    return after


@cache
def joint(target: Model, length: int, prefix: Words = ()) -> torch.Tensor:
    """Probability of every continuation of a prefix, (vocab,) * length."""
    here = target(prefix)
    if length == 0:
        return torch.ones((), dtype=torch.float64)
    return torch.stack([p * joint(target, length - 1, (*prefix, t)) for t, p in enumerate(here)])


def branches(rule, draft: Draft, p: torch.Tensor) -> Iterator[tuple[float, list[int], torch.Tensor]]:
    """Every way the coins may fall: its probability, the accepted path, the law of the next token."""
    todo: list[list[bool]] = [[]]
    while todo:
        script, fallen, weight = todo.pop(), [], 1.0

        def coin(node: int, chance: float, script=script, fallen=fallen) -> bool:
            nonlocal weight
            assert 0 <= chance <= 1
            if len(fallen) >= len(script) and chance < 1:
                todo.append([*fallen, False])
            answer = script[len(fallen)] if len(fallen) < len(script) else True
            fallen.append(answer)
            weight *= chance if answer else 1 - chance
            return answer

        path, left = rule(draft, p, coin)
        yield weight, path, left


def words(draft: Draft, node: int) -> Words:
    return tuple(draft.tokens[n] for n in draft.path_to(node))


def emitted(rule, target: Model, drafts: list[tuple[float, Draft]], length: int) -> tuple[torch.Tensor, float]:
    """The law of the first `length` tokens when a rule has made the first step, and how many it accepts on average."""
    vocab = len(target(()))
    result, accepted = torch.zeros((vocab,) * length, dtype=torch.float64), 0.0
    for chance, draft in drafts:
        p = torch.stack([target(words(draft, n)) for n in range(-1, draft.verifiable)])
        for weight, path, left in branches(rule, draft, p):
            assert abs(float(left.sum()) - 1) < 1e-12 and bool((left >= 0).all())
            accepted += chance * weight * len(path)
            prefix = tuple(draft.tokens[n] for n in path)
            for token in range(vocab):
                some = joint(target, length - len(prefix) - 1, (*prefix, token))
                result[(*prefix, token)] += chance * weight * left[token] * some
    return result, accepted


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Total variation."""
    return float((a - b).abs().sum() / 2)


def drawn(shape: list[int], drafter: Model, how: str) -> list[tuple[float, Draft]]:
    """All drafts of a tree shape (its parents) that a drafter may draw, each with its probability.

    how: `iid` siblings, `without` replacement, `hidden` (drawn, but q not told), `zeros` (every other row of q zeroed
    and that node guessed, not drawn), `guess` (one fixed draft, no q).
    """
    vocab, done = len(drafter(())), []
    todo: list[tuple[float, list[int], list[torch.Tensor]]] = [(1.0, [], [])]
    while todo:
        chance, tokens, laws = todo.pop()
        i = len(tokens)
        if i == len(shape):
            q = torch.stack(laws) if laws and how in ("iid", "without", "zeros") else None
            done.append((chance, Draft(tokens, shape, q=q)))
            continue
        so_far = Draft([*tokens, 0], shape[: i + 1])
        q = drafter(words(so_far, shape[i]))
        if how == "guess" or (how == "zeros" and i % 2):
            todo.append((chance, [*tokens, (sum(tokens) + i) % vocab], [*laws, torch.zeros_like(q)]))
            continue
        if how == "without":
            q = q.clone()
            q[[tokens[j] for j in range(i) if shape[j] == shape[i]]] = 0
            q = q / q.sum()
        todo += [(chance * float(q[t]), [*tokens, t], [*laws, q]) for t in range(vocab) if q[t] > 0]
    assert sum(chance for chance, _ in done) == pytest.approx(1, abs=1e-12)
    return done


CHAINS = [[], [-1], [-1, 0], [-1, 0, 1]]
TREES = [
    [-1, -1], [-1, -1, -1], [-1, 0, 0], [-1, -1, 0, 0], [-1, 0, -1, 2], [-1, -1, 0, 1], [-1, 0, 0, 1],
    [-1, 0, -1, 1, 2], [-1, -1, -1, 0, 0],
]  # fmt: skip
HOW = ["iid", "without", "hidden", "zeros", "guess"]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("shape", CHAINS + TREES, ids=str)
def test_rejection_emits_the_targets_law(shape, how):
    length = max(Draft([0] * len(shape), shape).depths(), default=0) + 1
    for seed in range(3):
        target, drafter = model(3, seed, zeros=seed == 2), model(3, seed + 10, sharp=1.0)
        law, _ = emitted(rejection, target, drawn(shape, drafter, how), length)
        assert distance(law, joint(target, length)) < 1e-12


@pytest.mark.parametrize("how", ["iid", "hidden", "zeros", "guess"])
@pytest.mark.parametrize("vocab", [2, 3, 4])
@pytest.mark.parametrize("shape", CHAINS, ids=len)
def test_block_emits_the_targets_law(shape, vocab, how):
    for seed in range(3):
        target, drafter = model(vocab, seed, zeros=seed == 2), model(vocab, seed + 10, sharp=1.0)
        law, _ = emitted(block, target, drawn(shape, drafter, how), len(shape) + 1)
        assert distance(law, joint(target, len(shape) + 1)) < 1e-12


@pytest.mark.parametrize("rule", [rejection, block])
def test_rounded_laws_of_drafters(rule):
    """What is drawn from rows that do not quite sum to 1, as softmax gives in half precision, has the same law."""
    target, drafter = model(4, 0), model(4, 10, sharp=1.0)
    drafts = drawn([-1, 0], drafter, "iid")
    for (_, draft), off in zip(drafts, itertools.cycle((0.992, 1.007))):
        draft.q *= off
    assert distance(emitted(rule, target, drafts, 3)[0], joint(target, 3)) < 1e-12


@pytest.mark.parametrize("rule", [rejection, block])
def test_duplicates_and_impossible_tokens(rule):
    """A guess that the target rules out, repeated siblings, and a drafter that equals the target or shares nothing."""
    target, zeros = model(4, 0), model(4, 1, zeros=True)
    cases = [
        (target, [(1.0, Draft([1, 1, 1, 1], [-1, -1, -1, 1] if rule is rejection else [-1, 0, 1, 2]))]),
        (zeros, [(1.0, Draft([0, 1, 2, 3], [-1, 0, 1, 2]))]),
        (target, drawn([-1, 0, 1], target, "iid")),  # the same law: everything is accepted
        (zeros, drawn([-1, 0], zeros, "iid")),
    ]
    for own, drafts in cases:
        law, accepted = emitted(rule, own, drafts, 5)
        assert distance(law, joint(own, 5)) < 1e-12
        if len(drafts) > 1:
            assert accepted == pytest.approx(len(drafts[0][1]), abs=1e-12)
    a, b = (lambda prefix, t=t: torch.eye(2, dtype=torch.float64)[t] for t in (0, 1))
    law, accepted = emitted(rule, a, drawn([-1, 0], b, "iid"), 3)
    assert distance(law, joint(a, 3)) == 0 and accepted == 0


@pytest.mark.parametrize("inner", [rejection, block])
@pytest.mark.parametrize("outer", [rejection, block])
def test_nested(inner, outer):
    """A chain that an inner speculative step made (TriForce): by its exactness the q of the chain is its target's."""
    target, middle, small = model(3, 5), model(3, 6, sharp=1.0), model(3, 7, sharp=1.0)
    made, _ = emitted(inner, middle, drawn([-1, 0], small, "iid"), 3)
    drafts = [
        (float(made[tokens]), Draft(list(tokens), [-1, 0, 1], q=torch.stack([middle(tokens[:i]) for i in range(3)])))
        for tokens in itertools.product(range(3), repeat=3)
    ]
    law, _ = emitted(outer, target, drafts, 4)
    assert distance(law, joint(target, 4)) < 1e-12


def test_the_enumeration_sees_a_wrong_law():
    """Laws that are not those drawn from, and the classic mistakes, are far outside the tolerance."""
    target, drafter = model(3, 0), model(3, 10, sharp=1.0)
    for rule in (rejection, block):
        lying = [(w, replace(d, q=d.q.roll(1, -1))) for w, d in drawn([-1, 0], drafter, "iid")]
        assert distance(emitted(rule, target, lying, 3)[0], joint(target, 3)) > 1e-3

    def no_residual(draft, p, coin):
        path, _ = rejection(draft, p, coin)
        return path, p[path[-1] + 1 if path else 0]

    law, _ = emitted(no_residual, target, drawn([-1, 0], drafter, "iid"), 3)
    assert distance(law, joint(target, 3)) > 1e-3
    once = [(w, d) for w, d in drawn([-1, -1], drafter, "iid") if len(set(d.tokens)) == 2]  # a tree without duplicates
    total = sum(w for w, _ in once)
    law, _ = emitted(rejection, target, [(w / total, d) for w, d in once], 2)
    assert distance(law, joint(target, 2)) > 1e-3


def test_acceptance_by_the_papers():
    """Leviathan: 1 - total variation. Sun et al., section 2: 10/9 and 11/9 tokens for their two-letter example."""
    target, drafter = model(4, 3), model(4, 13)
    for rule in (rejection, block):
        _, accepted = emitted(rule, target, drawn([-1], drafter, "iid"), 2)
        assert accepted == pytest.approx(1 - distance(target(()), drafter(())), abs=1e-12)
    big, small = (lambda prefix, p=p: torch.tensor(p, dtype=torch.float64) / 3 for p in ([1, 2], [2, 1]))
    drafts = drawn([-1, 0], small, "iid")
    assert emitted(rejection, big, drafts, 3)[1] == pytest.approx(10 / 9, abs=1e-12)
    assert emitted(block, big, drafts, 3)[1] == pytest.approx(11 / 9, abs=1e-12)


def test_block_never_accepts_less():
    gains = []
    for seed in range(30):
        target, drafter = model(3, seed, zeros=seed % 3 == 0), model(3, seed + 100, sharp=seed % 4)
        drafts = drawn([-1, 0, 1], drafter, "iid")
        gains.append(emitted(block, target, drafts, 4)[1] - emitted(rejection, target, drafts, 4)[1])
    assert min(gains) > -1e-12 and sum(gains) / len(gains) > 0.02


# --- what a rule is given ------------------------------------------------------------------------------------------


def test_the_distribution_is_what_choose_draws():
    """Greedy and sampled rows together; penalties on the prefix that a row supposes."""
    params = [
        SamplingParams(temperature=0), SamplingParams(temperature=0.7, top_k=4), SamplingParams(top_p=0.7),
        SamplingParams(temperature=1.5, min_p=0.2), SamplingParams(logit_bias={2: 1.5}, presence_penalty=1.0),
    ]  # fmt: skip
    logits = torch.randn(5, 8, generator=torch.Generator().manual_seed(1)) * 2
    before = logits.clone()
    rows = [Row(Sequence([0], p, 0), [3]) for p in params]
    probs = distribution(logits, rows)
    assert torch.equal(logits, before) and probs.dtype == torch.float64
    changed = logits[4].clone()
    changed[2] += 1.5
    changed[3] -= 1.0
    for own, raw, p in zip(probs, [*logits[:4], changed], params, strict=True):
        torch.testing.assert_close(own, torch.tensor(by_definition(raw.tolist(), p)).double(), rtol=1e-5, atol=1e-7)
    assert torch.equal(distribution(logits[1:2], rows[1:2])[0], probs[1])
    n = 4000
    for row in range(5):
        picked = choose(logits[row].expand(n, -1), [Row(Sequence([0], params[row], s), [3]) for s in range(n)], "draft")
        assert fits([picked.count(t) for t in range(8)], probs[row].tolist())


def test_streams():
    """Named streams are independent of Law 1's noise and of each other, and are fresh at every step."""
    names = ["", "accept/3", "accept/4", "emit/3", "draft/3"]
    noise = torch.stack([torch.cat([uniform(s, p, 50, stream=n) for s in range(20) for p in range(5)]) for n in names])
    assert float((noise.corrcoef() - torch.eye(5)).abs().max()) < 4 / noise.shape[1] ** 0.5
    assert torch.equal(gumbel(1, 2, 9), gumbel(1, 2, 9, stream=""))
    seq = Sequence([1, 2, 3], SamplingParams(), 0)
    assert coins(seq, 3, "accept") == coins(seq, 5, "accept")[:3] != coins(seq, 3, "other")
    flat = torch.zeros(1, 10**6)
    fork, later = seq.fork(), Sequence([1, 2, 3, 4], SamplingParams(), 0)
    fork.accept([4])  # the same position, guessed at one step earlier
    assert choose(flat, [Row(fork)]) == choose(flat, [Row(later)])
    assert choose(flat, [Row(fork)], "draft") != choose(flat, [Row(later)], "draft")
    probs = torch.tensor([0.1, 0.2, 0.0, 0.7], dtype=torch.float64)
    picked = [draw(probs, Sequence([0], SamplingParams(), s), "emit") for s in range(3000)]
    assert fits([picked.count(t) for t in range(4)], probs.tolist())


# --- typical ---------------------------------------------------------------------------------------------------------


def test_typical_by_hand():
    flat, sure, rule = [0.25] * 4, [0.9, 0.08, 0.02, 0.0], Rule("typical")
    p = torch.tensor([sure, flat, flat, flat, flat, sure], dtype=torch.float64)
    # exp(-H): 1/4 of the flat law, so 0.075 suffices; 0.67 of the sure one, so 0.09 is needed
    assert typical(Draft([1, 2], [-1, -1]), p, rule) == []
    assert typical(Draft([0, 3, 1, 2], [-1, 0, 1, 2], riders=1), p, rule) == [0, 1, 2]
    assert typical(Draft([1, 3, 0], [-1, 0, -1]), p, rule) == [2]
    nearly = torch.tensor([[0.85, 0.12, 0.03, 0.0], flat], dtype=torch.float64)  # 0.3 exp(-H) is 0.18: epsilon decides
    assert typical(Draft([1], [-1]), nearly, rule) == [0] and typical(Draft([2], [-1]), nearly, rule) == []
    two = torch.tensor([[0.3, 0.5, 0.2, 0.0], flat, flat, flat, flat], dtype=torch.float64)
    assert typical(Draft([0, 1], [-1, -1]), two, rule) == [1]  # as long: the likelier
    assert typical(Draft([0, 1, 2], [-1, -1, 0]), two, rule) == [0, 2]  # longer


DRAFTED = {"method": "draft_model", "model": "tiny-draft", "num_speculative_tokens": 4}


def test_the_posterior_keys_are_epsilon_and_alpha(tiny_llm):
    """Under Medusa's and vLLM's names, of `typical` alone, and they move what is accepted."""
    accepted = []
    for keys in ({"posterior_threshold": 0.9, "posterior_alpha": 1.0}, {}, {"posterior_threshold": 1e-30}):
        tiny_llm.speculative_config = {**DRAFTED, "acceptance_method": "typical", **keys}
        output = tiny_llm.generate("Once upon a time", max_tokens=100, temperature=1, seed=3, ignore_eos=True)[0]
        accepted.append(output.metrics["speculative_decoding"]["draft_acceptance_rate"])
    assert accepted[0] < accepted[1] < accepted[2] == 1
    for wrong in ({"posterior_alpha": 0}, {"posterior_threshold": "a"}, {"posterior_threshold": 1.5}):
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))} must be above 0"):
            SpeculativeConfig.of({**DRAFTED, "acceptance_method": "typical", **wrong})
    with pytest.raises(ConfigError, match="posterior_alpha belongs to acceptance_method 'typical', not to 'rejection'"):
        SpeculativeConfig.of({**DRAFTED, "acceptance_method": "rejection", "posterior_alpha": 0.2})


def test_typical_is_labelled_lossy_and_accepts_more(tiny_llm):
    accepted, measured = {}, tiny_llm.exactness
    assert [promised(m, "bitwise") for m in ACCEPTANCE_METHODS] == ["bitwise", "law", "law", "lossy"]
    for method in ACCEPTANCE_METHODS:
        tiny_llm.speculative_config = {**DRAFTED, "acceptance_method": method}
        outputs = tiny_llm.generate("Once upon a time", n=3, temperature=0.7, seed=1, max_tokens=100)
        spec = [o.metrics["speculative_decoding"] for o in outputs]
        accepted[method] = sum(s["num_accepted_draft_tokens"] for s in spec) / sum(s["num_draft_tokens"] for s in spec)
        for metrics in (o.metrics for o in outputs):
            assert metrics["acceptance_method"] == method and metrics["lossless"] == (method != "typical")
            assert metrics["exactness"] == tiny_llm.exactness == promised(method, measured)
            assert ("lossy" in summary(metrics, 100)) == (method == "typical")
    assert accepted["typical"] > accepted["coupled"]
    assert "LOSSY" in ACCEPTANCE_METHODS["typical"]


# --- end to end ------------------------------------------------------------------------------------------------------


def trees(plain: dict) -> ScriptedDrafter:
    """Right and wrong guesses on a tree, with duplicates and a rider, and no q."""

    def script(seq: Sequence, k: int) -> Draft:
        a, b, c = [*rest(plain, seq), 1, 2, 3][:3]
        wrong = (a + 1) % 128
        return Draft([wrong, a, wrong, b, c, 5], [-1, -1, -1, 1, 3, 1], riders=1)

    return ScriptedDrafter(script)


@pytest.mark.parametrize("method", ACCEPTANCE_METHODS)
def test_greedy_is_plain(random_llm, make_checkpoint, method):
    params = SamplingParams(temperature=0, max_tokens=24, presence_penalty=0.4)
    prompts = [[5, 9, 2, 7, 5, 9], [3], list(range(40, 60))]
    plain = {tuple(p): run(random_llm, [(p, params)])[0].token_ids for p in prompts}
    drafted = {"method": "draft_model", "model": str(make_checkpoint(noise=0.01)), "acceptance_method": method}
    for config in (drafted, {"method": "ngram", "acceptance_method": method}, trees, oracle):
        if isinstance(config, dict):
            random_llm.speculative_config = config
        else:
            drafter = trees(plain) if config is trees else ScriptedDrafter(oracle(plain))
            use(random_llm, drafter, rule=Rule(method))
        outputs = run(random_llm, [(p, params) for p in prompts])
        assert [o.token_ids for o in outputs] == [plain[tuple(p)] for p in prompts]
        if config is not drafted and not isinstance(config, dict):
            assert all(o.metrics["speculative_decoding"]["num_accepted_draft_tokens"] > 10 for o in outputs)


@pytest.mark.parametrize("method", ["rejection", "block", "typical"])
@pytest.mark.parametrize("drafter", ["draft_model", "ngram"])
def test_a_seed_repeats_in_any_batch(random_llm, make_checkpoint, method, drafter):
    random_llm.speculative_config = {
        "method": drafter, "acceptance_method": method,
        **({"model": str(make_checkpoint(noise=0.02))} if drafter == "draft_model" else {}),
    }  # fmt: skip
    requests = [
        ([5, 9, 2], SamplingParams(temperature=0.8, seed=3, max_tokens=20)),
        ([7], SamplingParams(temperature=0, max_tokens=9)),
        ([5, 9, 2, 5, 9], SamplingParams(temperature=1.3, top_k=20, frequency_penalty=0.2, seed=4, max_tokens=31)),
        ([1] * 9, SamplingParams(temperature=0.6, top_p=0.8, seed=5, max_tokens=26, logprobs=2)),
    ]
    alone = [run(random_llm, [r])[0] for r in requests]
    for order in ([0, 1, 2, 3], [3, 2, 0], [1, 0]):
        together = run(random_llm, [requests[i] for i in order])
        assert [o.token_ids for o in together] == [alone[i].token_ids for i in order]
    assert [entry.token_id for entry in alone[3].logprobs] == alone[3].token_ids
    other = run(random_llm, [(requests[0][0], replace(requests[0][1], seed=77))])[0]
    assert other.token_ids != alone[0].token_ids


def law_of(llm: LLM, prompt: list[int], params: SamplingParams, length: int) -> torch.Tensor:
    """Probability of every text of that length under plain decoding, flat."""
    llm.speculative_config = None
    seqs, vocab = [], llm.runner.model.config.vocab_size
    result = torch.ones(1, dtype=torch.float64)
    for n in range(length):
        seqs = [Sequence([*prompt, *text], params, 0) for text in itertools.product(range(vocab), repeat=n)]
        for seq in seqs:
            seq.prompt_len = len(prompt)  # the rest is output, which penalties count
        logits = torch.stack([own[0] for own in llm.runner.extend(seqs).logits])
        result = (result[:, None] * distribution(logits, [Row(seq) for seq in seqs])).flatten()
        for seq in seqs:
            llm.runner.free(seq)
    return result


@pytest.fixture(scope="module")
def small(make_llm, make_checkpoint):
    """A model of five tokens with a draft model that is often right, and the law of its four-token texts."""
    roomy = {"max_num_seqs": 512, "max_num_batched_tokens": 4096, "max_prefill_delay": 60.0}  # for drafts
    llm = make_llm(vocab_size=5, engine=roomy)
    params = SamplingParams(temperature=2.5, top_k=4, presence_penalty=0.5, max_tokens=4)
    return llm, str(make_checkpoint(vocab_size=5, noise=0.06)), params, law_of(llm, [1, 2, 3], params, 4)


@pytest.mark.parametrize("method", ["rejection", "block"])
@pytest.mark.parametrize("drafter", ["chain", "tree"])
def test_sampled_text_follows_the_model(small, method, drafter):
    """Four tokens, so most texts take several steps, which meet the same positions again."""
    llm, draft, params, expected = small
    n = 3000
    if drafter == "chain":
        llm.speculative_config = {
            "method": "draft_model", "model": draft, "num_speculative_tokens": 3, "acceptance_method": method,
        }  # fmt: skip
    else:
        scripted = ScriptedDrafter(lambda seq, k: Draft([0, 3, 1, 3, 0], [-1, -1, 0, 1, 1]))
        use(llm, scripted, rule=Rule(method))
    outputs = llm.generate([1, 2, 3], replace(params, n=n, seed=0))
    assert {o.metrics["exactness"] for o in outputs} == {"law"}
    texts = [sum(t * 5 ** (3 - i) for i, t in enumerate(o.token_ids)) for o in outputs]
    spec = [o.metrics["speculative_decoding"] for o in outputs]
    assert (
        sum(s["num_accepted_draft_tokens"] for s in spec) > n / 4 and sum(s["num_spec_steps"] for s in spec) > 1.5 * n
    )
    assert fits([texts.count(i) for i in range(5**4)], expected.tolist())


def test_a_draft_model_reports_its_law(random_llm, make_checkpoint):
    """q is the draft model's own processed law, and only where the rule asks for it; a chain that ends is shorter."""
    config = {"method": "draft_model", "model": str(make_checkpoint(noise=0.02))}
    seqs = [Sequence([5, 9, 2], SamplingParams(temperature=0.7, top_k=5, max_tokens=n), 1) for n in (20, 2)]
    for method in ACCEPTANCE_METHODS:
        random_llm.speculative_config = {**config, "acceptance_method": method}
        drafter = random_llm.engine.drafter
        long, short = drafter.propose([seq.shown(Rule(method)) for seq in seqs], 3)
        assert (len(long), len(short)) == (3, 1)
        for seq in seqs:
            drafter.forget(seq)
        if method in ("coupled", "typical"):
            assert long.q is None and short.q is None
            continue
        assert long.q.shape == (3, 128) and short.q.shape == (1, 128)
        assert bool((long.q > 0).sum(-1).eq(5).all()) and all(long.q[i, t] > 0 for i, t in enumerate(long.tokens))
        torch.testing.assert_close(long.q.sum(-1), torch.ones(3).double())
        for i, (q, token) in enumerate(zip(long.q, long.tokens, strict=True)):  # noise that only this step has
            assert int((q.log() + gumbel(1, 3 + i, 128, stream="draft/3")).argmax()) == token
    random_llm.speculative_config = None


def test_a_branching_draft_under_block_is_verified_by_rejection():
    seq = Sequence([1], SamplingParams(), 0)
    draft = Draft([0, 1, 2], [-1, -1, 0])
    logits = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    for seed in range(30):
        seq.seed = seed
        assert verify([seq], [draft], logits, Rule("block")) == verify([seq], [draft], logits, Rule("rejection"))
    rider = Draft([0, 1, 2], [-1, 0, 0], riders=1)  # a chain but for what is never verified
    different = 0
    for seed in range(60):
        seq.seed = seed
        different += verify([seq], [rider], logits, Rule("block")) != verify([seq], [rider], logits, Rule("rejection"))
    assert different
