"""Whatever is drafted, what comes out is plain decoding; and the bookkeeping around it is right."""

from __future__ import annotations

from dataclasses import replace
from weakref import WeakKeyDictionary

import pytest
import torch
from helpers import ScriptedDrafter, assert_released, logits_after, rest, run, use
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from outrider import LLM, Draft, SamplingParams, sampling
from outrider import verify as rules
from outrider.config import Rule
from outrider.errors import ConfigError
from outrider.ops import native
from outrider.outputs import SpecMetrics
from outrider.sequence import Sequence
from outrider.speculate import StepTimes, step

KINDS = ("right", "right", "wrong", "any")
BACK = (0, 0, 1, 2, 12)  # a node hangs on the one before it, or on one so far back: deep trees with short branches
NODE = st.tuples(st.sampled_from(BACK), st.sampled_from(KINDS), st.integers(1, 127))
trees = st.tuples(st.lists(NODE, max_size=12), st.integers(0, 3), st.booleans())


def grow(recipe, right: list[int], vocab: int = 128) -> Draft:
    """A draft from a recipe: per node how far back it hangs, whether it carries the plain token of its depth, and the
    token it may carry instead; the number of riders; and whether it is a chain."""
    recipe, riders, chain = recipe
    tokens: list[int] = []
    parents: list[int] = []
    depths: list[int] = []
    for i, (back, kind, other) in enumerate(recipe):
        parents.append(i - 1 if chain else max(-1, i - 1 - back))
        depths.append(depths[parents[-1]] + 1 if parents[-1] >= 0 else 0)
        truth = right[depths[-1]] if depths[-1] < len(right) else 0
        tokens.append({"right": truth, "wrong": (truth + other) % vocab, "any": other % vocab}[kind])
    return Draft(tokens, parents, riders=min(riders, len(tokens)))


@pytest.fixture(scope="module")
def windowed_llm(make_llm) -> LLM:
    return make_llm("mistral", sliding_window=3)


PROMPTS = [[5, 9, 2, 7, 7, 1, 88], [3], list(range(40, 60))]
SAMPLINGS = [SamplingParams(temperature=0, max_tokens=14), SamplingParams(temperature=0.8, seed=2, max_tokens=14)]
_plain: WeakKeyDictionary[LLM, dict] = WeakKeyDictionary()


def plain_of(llm: LLM, params: SamplingParams) -> dict[tuple[int, ...], list[int]]:
    known, place = _plain.setdefault(llm, {}), SAMPLINGS.index(params)
    if place not in known:
        llm.speculative_config = None
        known[place] = {tuple(p): run(llm, [(p, params)])[0].token_ids for p in PROMPTS}
    return known[place]


@pytest.mark.parametrize("name", ["random_llm", "windowed_llm"])
@given(recipes=st.lists(trees, min_size=1, max_size=5), params=st.sampled_from(SAMPLINGS), size=st.integers(1, 3))
def test_any_draft_gives_plain_tokens(request, name, recipes, params, size):
    llm = request.getfixturevalue(name)
    plain = plain_of(llm, params)

    def script(seq: Sequence, k: int) -> Draft:  # each sequence and each step meets another recipe
        return grow(recipes[(len(seq.tokens) + seq.prompt_len) % len(recipes)], rest(plain, seq))

    use(llm, ScriptedDrafter(script))
    for prompt, output in zip(PROMPTS, run(llm, [(p, params) for p in PROMPTS[:size]]), strict=False):
        assert output.token_ids == plain[tuple(prompt)]


@pytest.mark.parametrize("window", [None, 5, 600])
def test_across_a_key_block(make_llm, window):
    """Trees and chains whose nodes lie on both sides of the cache's block border, near and far."""
    llm = make_llm("mistral", sliding_window=window)
    for length in (506, 1020, 1112):
        prompt = torch.randint(128, (length,), generator=torch.Generator().manual_seed(length)).tolist()
        params = SamplingParams(temperature=0, max_tokens=12)
        llm.speculative_config = None
        right = run(llm, [(prompt, params)])[0].token_ids
        use(llm, ScriptedDrafter(lambda seq, k, right=right: Draft.chain(right[len(seq.output) :][:5])))
        assert run(llm, [(prompt, params)])[0].token_ids == right

        def late(seq: Sequence, k: int, right=right) -> Draft:  # the right branch is the last
            a, b, c = [*right[len(seq.output) :], 0, 0, 0][:3]
            return Draft([1, 2, 3, a, 4, b, c], [-1, 0, 0, -1, 3, 3, 5])

        use(llm, ScriptedDrafter(late), 7)
        output = run(llm, [(prompt, params)])[0]
        assert output.token_ids == right and output.metrics["speculative_decoding"]["per_step_accepted"] == [3, 3, 3]


# --- walk ------------------------------------------------------------------------------------------------------------


def matching(draft: Draft, chosen: list[int]) -> list[list[int]]:
    """All paths, by brute force, along which every node carries the token chosen after the node before it."""
    paths: list[list[int]] = [[]]
    for node in range(draft.verifiable):
        path = draft.path_to(node)
        if all(draft.tokens[n] == chosen[before + 1] for before, n in zip([-1, *path], path, strict=False)):
            paths.append(path)
    return paths


def walk(draft, chosen):
    return rules.walk(draft, chosen.__getitem__)


@given(recipe=trees, data=st.data())
def test_walk(recipe, data):
    draft = grow(recipe, [1] * 20, vocab=3)  # three tokens: matches and duplicate siblings abound
    chosen = data.draw(st.lists(st.integers(0, 2), min_size=len(draft) + 1, max_size=len(draft) + 1))
    verdict, paths = walk(draft, chosen), matching(draft, chosen)
    assert verdict.path in paths and verdict.drafted == draft.verifiable
    assert not any(p[:-1] == verdict.path for p in paths if p)  # it ends only where no child matches
    ends = [-1, *verdict.path]
    assert verdict.tokens == [chosen[n + 1] for n in ends]
    siblings = list(zip(draft.parents, draft.tokens, strict=True))
    if len(set(siblings)) == len(siblings):
        assert verdict.path == max(paths, key=len)


def test_walk_by_hand():
    draft = Draft([4, 5, 6, 6, 7], [-1, -1, 1, 0, 2], riders=1)
    assert (walk(draft, [9, 0, 0, 0, 0]).path, walk(draft, [9, 0, 0, 0, 0]).tokens) == ([], [9])
    assert (walk(draft, [4, 6, 0, 0, 8]).path, walk(draft, [4, 6, 0, 0, 8]).tokens) == ([0, 3], [4, 6, 8])
    assert (walk(draft, [5, 0, 6, 7, 0]).path, walk(draft, [5, 0, 6, 7, 0]).tokens) == ([1, 2], [5, 6, 7])  # no rider
    asked = []
    verdict = rules.walk(draft, lambda at: asked.append(at) or [5, 0, 6, 7, 0][at], {5})  # nobody asks behind an end
    assert (verdict.path, verdict.tokens, asked) == ([], [5], [0])


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block", "typical"])
def test_riders_and_company_change_no_verdict(rule):
    """Who has riders is judged as alone, and so are the others, log-probabilities included."""
    generator = torch.Generator().manual_seed(0)
    drafts = [Draft([1, 2, 0, 2], [-1, -1, 1, 0], riders=1), Draft([2, 1, 1, 0, 2], [-1, 0, -1, 0, 1], riders=2)]
    for seed in range(20):
        temperature, edits = [0.0, 1.0][seed % 2], {"repetition_penalty": 1.1} if seed % 4 > 1 else {}
        params = SamplingParams(temperature=temperature, logprobs=1, **edits)
        seqs = [Sequence([0, i], params, seed) for i in range(3)]
        logits = [torch.randn(1 + len(draft), 3, generator=generator) for draft in (*drafts, drafts[0])]
        together = rules.verify(seqs, [*drafts, drafts[0]], torch.cat(logits), Rule(rule))
        for seq, draft, own, verdict in zip(seqs, [*drafts, drafts[0]], logits, together, strict=True):
            assert rules.verify([seq], [draft], own, Rule(rule)) == [verdict] and verdict.drafted == draft.verifiable


@pytest.mark.parametrize("rule", ["rejection", "block", "typical"])
def test_what_follows_a_branch_is_chosen_behind_its_last_node(rule):
    logits = torch.full((4, 4), -9.0)
    logits[0, 2] = logits[1, 3] = logits[2, 1] = logits[3, 0] = 9
    params = SamplingParams(temperature=0)
    (verdict,) = rules.verify([Sequence([0], params, 0)], [Draft([1, 2, 1], [-1, -1, 1])], logits, Rule(rule))
    assert (verdict.path, verdict.tokens) == ([1, 2], [2, 1, 0])
    logits[2] = torch.nan  # what nothing can be chosen behind is left to the next step, as in plain decoding
    (verdict,) = rules.verify([Sequence([0], params, 0)], [Draft([1, 2, 1], [-1, -1, 1])], logits, Rule(rule))
    assert (verdict.path, verdict.tokens, verdict.error) == ([], [2], None)


# --- Draft -----------------------------------------------------------------------------------------------------------


@given(recipe=trees, depth=st.integers(0, 6))
def test_draft_geometry(recipe, depth):
    draft = grow(recipe, [1] * 20)
    for node in range(len(draft)):
        path = draft.path_to(node)
        assert path[-1] == node and [draft.parents[n] for n in path] == [-1, *path[:-1]]
        assert draft.depths()[node] == len(path)
    words = [[draft.tokens[n] for n in draft.path_to(i)] for i in range(len(draft))]
    clipped, together = draft.clip(depth), all(len(word) <= depth for word in words[draft.verifiable :])  # its riders
    assert [[clipped.tokens[n] for n in clipped.path_to(i)] for i in range(len(clipped))] == [
        word for word in words[: len(words) if together else draft.verifiable] if len(word) <= depth
    ]
    assert clipped.verifiable == sum(len(word) <= depth for word in words[: draft.verifiable])
    assert draft.is_chain == (draft.depths() == list(range(1, len(draft) + 1)))


def test_clip_keeps_the_laws_of_the_nodes_kept():
    draft = Draft([1, 2, 3], [-1, 0, -1], q=torch.arange(6.0).view(3, 2))
    assert_close(draft.clip(1).q, torch.tensor([[0.0, 1], [4, 5]]))


@pytest.mark.parametrize("tokens, parents, riders", [
    ([1], [], 0), ([1], [0], 0), ([1], [-2], 0), ([1, 2], [1, -1], 0), ([1], [-1], 2), ([1], [-1], -1),
])  # fmt: skip
def test_impossible_drafts(tokens, parents, riders):
    with pytest.raises(ValueError, match="draft"):
        Draft(tokens, parents, riders=riders)


# --- the cache after a verdict ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["random_llm", "windowed_llm"])
@given(recipe=st.lists(NODE, min_size=6, max_size=14), riders=st.integers(0, 2), pick=st.integers(0, 10**6))
def test_keeping_a_branch(request, name, recipe, riders, pick):
    """After any branch was kept, what follows is what a fresh cache computes."""
    runner = request.getfixturevalue(name).runner
    seq, other = (Sequence([5, 9, 2, n], SamplingParams(), 0) for n in (8, 9))
    draft = grow((recipe, riders, False), [1] * 20)
    drafts = [Draft.chain([1, 2]), draft]  # not alone, nor first, in the forward
    try:
        output = runner.extend([other, seq], drafts)
        path = draft.path_to(pick % (draft.verifiable + 1) - 1)
        words = [draft.tokens[n] for n in path]
        for node in range(len(draft)):  # every node, riders included, sees its own ancestors alone
            alone = logits_after(
                request.getfixturevalue(name), seq.tokens + [draft.tokens[n] for n in draft.path_to(node)]
            )
            assert_close(output.logits[1][node + 1], alone, rtol=1e-4, atol=1e-4)
        verdicts = [walk(Draft(), [0]), walk(draft, [0] * (len(draft) + 1))]
        verdicts[1].path, verdicts[1].tokens = path, [*words, 77]
        runner.commit([other, seq], output, verdicts)
        assert runner.slots[seq.id].tokens == seq.tokens + words
        assert runner.slots[other.id].tokens == other.tokens
        seq.tokens += [*words, 77]
        after = runner.extend([seq]).logits[0][0]
        assert_close(after, logits_after(request.getfixturevalue(name), seq.tokens), rtol=1e-4, atol=1e-4)
    finally:
        runner.free(seq)
        runner.free(other)


def test_cache_catches_up_with_rewritten_forks(random_llm):
    """A fork that went astray is resynchronised by the common prefix (Law 3)."""
    runner, seq = random_llm.runner, Sequence([5, 9, 2], SamplingParams(), 0)
    runner.extend([seq])
    for own in ([4, 4, 4], [4, 6], [], [4, 6, 1, 1]):
        fork = seq.fork()
        fork.tokens += own
        expected = logits_after(random_llm, fork.tokens, prompt_len=3)
        assert_close(runner.extend([fork]).logits[0][0], expected, rtol=1e-4, atol=1e-4)
        assert seq.tokens == [5, 9, 2]
    seq.tokens += [4, 6, 2]
    assert_close(runner.extend([seq]).logits[0][0], logits_after(random_llm, seq.tokens), rtol=1e-4, atol=1e-4)
    runner.free(seq)
    assert_released(random_llm)


# --- metrics ---------------------------------------------------------------------------------------------------------


def test_tokens_that_do_not_exist(random_llm):
    """A drafter may say anything: what is no token goes, with all that hangs on it."""
    draft = Draft([128, 5, 6, -1, 7], [-1, 0, -1, 2, 2], riders=1)
    clipped = draft.clip(9, 128)
    assert (clipped.tokens, clipped.parents, clipped.riders) == ([6, 7], [-1, 0], 1)
    params = SamplingParams(max_tokens=9, seed=1, presence_penalty=0.5)
    plain = run(random_llm, [([3], params)])[0]
    use(random_llm, ScriptedDrafter(lambda seq, k: Draft([2**40, 1, *plain.token_ids[len(seq.output) :]][:3],
                                                         [-1, 0, -1][: 2 + (len(seq.output) < 9)])))  # fmt: skip
    output = run(random_llm, [([3], params)])[0]
    assert output.token_ids == plain.token_ids
    assert output.metrics["speculative_decoding"]["per_step_accepted"] == [1, 1, 1, 1, 0]


def test_metrics_by_hand(random_llm):
    prompt, params = [5, 9, 2], SamplingParams(temperature=0, max_tokens=12)
    right = run(random_llm, [(prompt, params)])[0].token_ids

    def script(seq: Sequence, k: int) -> Draft:
        at = len(seq.output)
        a, b, c, d = [*right, 0, 0, 0, 0][at : at + 4]
        wrong = (b + 1) % 128
        return {
            0: Draft.chain([a, b, wrong, wrong]),  # 2 of 4, 3 tokens; the wrong ones are not the plain third
            3: Draft(),  # a step without a draft counts: 1 token
            4: Draft([wrong, a, b, 3, 3], [-1, -1, 1, 0, 2], riders=2),  # 2 of 3: riders are not drafted; 3 tokens
            7: Draft.chain([(a + 1) % 128, b]),  # 0 of 2, 1 token
            8: Draft.chain([a, b, c, d, 1, 1]),  # room for 4, so cut to 3 nodes: 3 of 3, 4 tokens
        }[at]

    if right[2] == (right[1] + 1) % 128 or right[4] == (right[5] + 1) % 128:
        pytest.fail("the script's wrong tokens happen to be right; choose another prompt")
    drafter = ScriptedDrafter(script)
    use(random_llm, drafter, 6)
    output = run(random_llm, [(prompt, params)])[0]
    assert output.token_ids == right
    assert output.metrics["method"] == "scripted"
    assert output.metrics["speculative_decoding"] == {
        "mean_acceptance_length": 12 / 5,
        "draft_acceptance_rate": 7 / 12,
        "acceptance_histogram": [2, 0, 2, 1],
        "acceptance_histogram_by_draft_length": {0: [1], 2: [1], 3: [0, 0, 1, 1], 4: [0, 0, 1]},
        "num_spec_steps": 5,
        "num_accepted_draft_tokens": 7,
        "num_draft_tokens": 12,
        "num_spec_tokens": 6,
        "per_step_accepted": [2, 0, 2, 0, 3],
        "per_step_drafted": [4, 0, 3, 2, 3],
    }
    s = "scripted"
    assert output.drafted_by == [s, s, None, None, s, s, None, None, s, s, s, None]
    assert [v.tokens for (v,) in drafter.verdicts] == [right[:3], right[3:4], right[4:7], right[7:8], right[8:]]
    assert len(drafter.forgotten) == 1
    timing = output.metrics["timing"]
    assert timing["total_seconds"] >= timing["decode_seconds"] + timing["time_to_first_token"] - 1e-6
    assert timing["decode_seconds"] >= timing["draft_seconds"] + timing["target_seconds"] > 0
    assert timing["tokens_per_second"] == pytest.approx(11 / timing["decode_seconds"], rel=0.3)


def test_metrics_of_plain_decoding(random_llm):
    spec = random_llm.generate([5], max_tokens=7)[0].metrics["speculative_decoding"]
    assert (spec["mean_acceptance_length"], spec["draft_acceptance_rate"], spec["num_draft_tokens"]) == (1, 0, 0)
    assert spec["acceptance_histogram"] == [7] and spec["num_spec_steps"] == 7
    empty = SpecMetrics().as_dict()
    assert empty["mean_acceptance_length"] == 0 and empty["acceptance_histogram"] == []


def test_step_reports_its_time(random_llm):
    seq, times = Sequence([5], SamplingParams(max_tokens=3), 0), StepTimes()
    step(random_llm.runner, ScriptedDrafter(lambda seq, k: Draft()), [seq], 0, times)
    random_llm.runner.free(seq)
    assert times.total >= times.draft + times.target > 0 and len(seq.output) == 1


def test_processors_are_asked_along_the_walk_only():
    """A grammar that refuses what it forbids works under any draft: it meets no prefix the target would not write."""
    asked = []

    def even(tokens, logits):
        assert all(t % 2 == 0 for t in tokens), "asked about a prefix that it forbids"
        asked.append(len(tokens))
        masked = logits.clone()
        masked[1::2] = float("-inf")
        return masked

    llm = LLM("tiny", dtype="float32")
    options = dict(max_tokens=24, temperature=0.8, seed=3, logits_processors=[even])
    plain = llm.generate([10, 20, 30], **options)[0].token_ids
    for config in ({"method": "ngram", "prompt_lookup_min": 1}, {"method": "draft_model", "model": "tiny-draft"}):
        llm.speculative_config = config
        asked.clear()
        assert llm.generate([10, 20, 30], **options)[0].token_ids == plain
        if config["method"] == "ngram":
            assert len(asked) == 24  # once for each token, though drafts were longer


@pytest.mark.skipif(native.active == native.REFERENCE, reason="no kernels")
@pytest.mark.parametrize("kept", [{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.05}])
def test_a_forward_draws_what_choose_does(tiny_llm, monkeypatch, kept):
    """Behind sequences and nodes of trees, riders beside them; of requests that edit logits it draws nothing."""
    prompts = [[10, 20, 30], [5], [7, 8]]
    params = [SamplingParams(temperature=t, seed=4, max_tokens=24, **kept) for t in (0.8, 1.3)]
    params += [replace(params[0], repetition_penalty=1.2)]
    asked, known, forward = [], [True], type(tiny_llm.runner).extend

    def choose(some, rows, stream="", at=None):
        asked.extend(row.seq for row in rows)
        return sampling.choose(some, rows, stream, at)

    def extend(*given, **named):
        output = forward(*given, **named)
        return output if known[-1] else replace(output, best=None)

    monkeypatch.setattr(rules, "choose", choose)
    monkeypatch.setattr(type(tiny_llm.runner), "extend", extend)
    plain = run(tiny_llm, list(zip(prompts, params, strict=True)))
    assert {tuple(seq.tokens[: seq.prompt_len]) for seq in asked} == {(7, 8)}
    right = {tuple(p): output.token_ids for p, output in zip(prompts, plain, strict=True)}
    tree = [(0, "right", 1), (1, "wrong", 3), (1, "right", 1), (0, "right", 1), (12, "any", 9)], 1, False
    use(tiny_llm, ScriptedDrafter(lambda seq, k: grow(tree, rest(right, seq), 2048)), k=5)
    for own in (True, False):
        known.append(own)
        asked.clear()
        again = run(tiny_llm, list(zip(prompts, params, strict=True)))
        assert [output.token_ids for output in again] == list(right.values())
    assert len({tuple(seq.tokens[: seq.prompt_len]) for seq in asked}) == 3


@given(recipes=st.lists(trees, min_size=1, max_size=3), temperature=st.sampled_from([0.0, 0.5, 1.0]))
def test_a_large_vocabulary_is_asked_along_the_walk(recipes, temperature):
    """With a large vocabulary only rows along the walk are drawn, the first ones together; verdicts are the same."""
    params = SamplingParams(temperature=temperature, top_p=0.9, repetition_penalty=1.1)
    seqs = [Sequence([1, 2, i], params, seed=i) for i in range(len(recipes))]
    drafts = [grow(recipe, [1] * 20, vocab=3) for recipe in recipes]
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(sum(1 + len(draft) for draft in drafts), 3, generator=generator)
    asked = []

    def choose(some, rows, stream="", at=None):
        asked.append(len(rows))
        return sampling.choose(some, rows, stream, at)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "choose", choose)
        together = rules.verify(seqs, drafts, logits)
        asked.clear()
        patch.setattr(rules, "LARGE", 3)
        alone = rules.verify(seqs, drafts, logits)
    assert [(v.path, v.tokens, v.drafted) for v in alone] == [(v.path, v.tokens, v.drafted) for v in together]
    if temperature:
        assert sum(asked) == sum(len(v.tokens) for v in alone)
        assert asked[0] == len(seqs)  # all that are sure to be asked, at once


@pytest.mark.parametrize("result", [None, torch.zeros(3), [1.0], torch.nested.nested_tensor([torch.zeros(3)])])
def test_a_processor_must_return_logits(result):
    llm = LLM("tiny", dtype="float32")
    with pytest.raises(ConfigError, match="must return logits of shape"):
        llm.generate([10], max_tokens=2, logits_processors=[lambda tokens, logits: result])
    nothing = torch.zeros(llm.runner.model.config.vocab_size, device="meta")
    with pytest.raises(ConfigError, match="a tensor like the logits it is given"):
        llm.generate([10], max_tokens=2, logits_processors=[lambda tokens, logits: nothing])
    assert llm.generate([10], max_tokens=2)[0].token_ids


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_processor_may_not_resize_what_it_is_given(size, temperature):
    """The kernels would read behind its end."""
    llm = LLM("tiny", dtype="float32")
    with pytest.raises(ConfigError, match=rf"must return logits of shape \(8192,\), not \({size},\)"):
        llm.generate([10], temperature=temperature, logits_processors=[lambda tokens, logits: logits.resize_(size)])


def test_tokens_are_the_targets_own():
    """A drafter's numpy integers do not leak into the output."""
    import numpy

    verdict = walk(Draft.chain(numpy.array([4, 5])), [4, 5, 6])
    assert verdict.tokens == [4, 5, 6] and all(type(t) is int for t in verdict.tokens)
