"""Several drafters in one tree: what is shared, what the budget buys, and what each drafter gets to see of it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from helpers import ScriptedDrafter, assert_released, logits_after, run, use
from hypothesis import given
from hypothesis import strategies as st

from outrider import Draft, SamplingParams, SpeculativeConfig, drafters
from outrider.drafters.merge import Merge
from outrider.errors import ConfigError
from outrider.sequence import Sequence

GREEDY = SamplingParams(temperature=0, max_tokens=24)


def some_draft(dice: random.Random, size: int, riders: int = 0) -> Draft:
    n = dice.randint(0, size)
    return Draft(dice.choices(range(3), k=n), [dice.randint(-1, i - 1) for i in range(n)], riders=min(n, riders))


def paths(draft: Draft, kept: list[int] | None = None) -> set[tuple[int, ...]]:
    """The token paths to nodes that may be accepted."""
    nodes = range(draft.verifiable) if kept is None else [n for n in range(draft.verifiable) if kept[n] >= 0]
    return {tuple(draft.tokens[i] for i in draft.path_to(n)) for n in nodes}


@given(seed=st.integers(0, 10**9), budget=st.integers(0, 12), riders=st.integers(0, 3))
def test_merge(seed, budget, riders):
    dice = random.Random(seed)
    drafts = [some_draft(dice, 7, riders * dice.randint(0, 1)) for _ in range(dice.randint(1, 3))]
    merged, where = Draft.merge(drafts, budget)
    merged = Draft(merged.tokens, merged.parents, riders=merged.riders)  # its rules hold
    everything = set().union(*(paths(draft) for draft in drafts))
    if sum(len(draft) > 0 for draft in drafts) > 1:
        assert len(paths(merged)) == merged.verifiable  # no two nodes are the same
    assert merged.verifiable <= budget and paths(merged) <= everything
    if len(everything) <= budget:
        assert paths(merged) == everything and merged.riders == sum(draft.riders for draft in drafts)
    else:
        assert len(paths(merged)) == budget  # spent, and on the shallowest
        assert max(map(len, paths(merged)), default=0) <= min(map(len, everything - paths(merged)))
    for draft, at in zip(drafts, where, strict=True):
        for node, place in enumerate(at):
            if place >= 0:
                assert merged.tokens[place] == draft.tokens[node]
                assert (place >= merged.verifiable) == (node >= draft.verifiable)
                above = draft.parents[node]
                assert merged.parents[place] == (at[above] if above >= 0 else -1)
    assert len({place for at in where for place in at if place >= 0}) == len(merged)


def test_merge_by_hand():
    def of(*drafts: Draft, budget: int = 9) -> tuple[list[int], list[int], int]:
        merged, _ = Draft.merge(list(drafts), budget)
        return merged.tokens, merged.parents, merged.riders

    chain, longer, other = Draft.chain([1, 2]), Draft.chain([1, 2, 3]), Draft.chain([1, 5, 6])
    assert of(chain, longer) == of(longer, chain) == of(longer) == ([1, 2, 3], [-1, 0, 1], 0)
    assert of(Draft(), longer, Draft(), budget=2) == ([1, 2], [-1, 0], 0)
    assert of(longer, other) == ([1, 2, 5, 3, 6], [-1, 0, 0, 1, 2], 0)
    assert of(longer, other, budget=3) == ([1, 2, 5], [-1, 0, 0], 0)
    assert of(longer, other, budget=2) == ([1, 2], [-1, 0], 0)  # a chain: the first drafter comes first
    riding = Draft([1, 8, 9], [-1, 0, -1], riders=2)
    assert of(riding, other) == ([1, 5, 6, 9, 8], [-1, 0, 1, -1, 0], 2)
    assert of(other, riding, budget=0) == ([9], [-1], 1)  # without its parent 8 cannot ride
    assert of() == of(Draft(), Draft()) == ([], [], 0)
    law = replace(chain, q=torch.ones(2, 3))
    assert Draft.merge([Draft(), law], 4)[0].q is law.q and Draft.merge([law, other], 4)[0].q is None


def merge_of(*parts: ScriptedDrafter, k: int = 8):
    """A merge of drafters that have no name."""
    merge = drafters.create(
        SpeculativeConfig("merge", num_speculative_tokens=k, options={"drafters": [{"method": "none"}]})
    )
    merge.parts = list(parts)
    for part in parts:
        part.num_speculative_tokens = k
    return merge


class Watching(ScriptedDrafter):
    """Checks that what it is shown is what it would be shown alone, whatever else is in the forward."""

    def forget(self, seq):
        super().forget(seq)
        self.sent.pop(seq.id, None)

    def observe(self, seqs, verdicts, output):
        super().observe(seqs, verdicts, output)
        for seq, verdict, draft, logits, hidden in zip(
            seqs, verdicts, output.drafts, output.logits, output.hidden, strict=True
        ):
            Draft(draft.tokens, draft.parents, riders=draft.riders)  # its rules hold
            own, before = self.sent[seq.id], seq.tokens[: len(seq.tokens) - len(verdict.tokens)]
            if self.k >= 16:  # else the budget may have cut some of them
                assert draft.tokens[: own.verifiable] == own.tokens[: own.verifiable]
                assert draft.parents[: own.verifiable] == own.parents[: own.verifiable]
                assert draft.riders == own.riders and draft.tokens[draft.verifiable :] == own.tokens[own.verifiable :]
                self.whole += 1
            assert [draft.tokens[n] for n in verdict.path] == verdict.tokens[: len(verdict.path)]
            assert verdict.path == (draft.path_to(verdict.path[-1]) if verdict.path else [])
            assert len(logits) == len(hidden) == 1 + len(draft)
            for node in range(-1, len(draft)):
                ends = [*before, *(draft.tokens[n] for n in draft.path_to(node))]
                torch.testing.assert_close(logits[node + 1], self.truth(ends), rtol=1e-3, atol=1e-3)
            self.met += any(n >= own.verifiable for n in verdict.path)

    def propose(self, seqs, k):
        self.k, drafts = k, super().propose(seqs, k)
        self.sent = {s.id: d.clip(s.room - 1) for s, d in zip(seqs, drafts, strict=True)}
        return drafts


def test_each_drafter_sees_its_own(random_llm):
    """Two drafters with branches and riders, right now and then, in a ragged batch."""
    llm, dice, cache = random_llm, random.Random(1), {}
    requests = [(prompt, replace(GREEDY, max_tokens=n)) for prompt, n in (([1, 2, 3], 40), ([5], 25), ([9] * 7, 9))]
    plain = {tuple(p): o.token_ids for (p, _), o in zip(requests, run(llm, requests), strict=True)}

    def truth(tokens: list[int]) -> torch.Tensor:
        if tuple(tokens) not in cache:
            cache[tuple(tokens)] = logits_after(llm, tokens)
        return cache[tuple(tokens)]

    def script(seq: Sequence, k: int) -> Draft:
        right = plain[tuple(seq.tokens[: seq.prompt_len])][len(seq.output) :][: dice.randint(0, 4)]
        wrong = [(right[0] + 1) % 128, 3] if right else [3]
        parents = [*range(-1, len(right) - 1), -1, *range(len(right), len(right) + len(wrong) - 1)]
        return Draft([*right, *wrong, 7, 8], [*parents, len(right) - 1, len(right) + len(wrong)], riders=2)

    parts = [Watching(script), Watching(script)]
    for part in parts:
        part.truth, part.met, part.whole = truth, 0, 0
    use(llm, merge_of(*parts, k=20), k=20)
    assert [o.token_ids for o in run(llm, requests)] == list(plain.values())
    assert all(part.met and part.whole > 9 for part in parts)  # an accepted path went on through the other's nodes
    assert all(len(part.forgotten) == 3 for part in parts) and not llm.engine.drafter.merged


def test_agreeing_drafters_stay_a_chain(tiny_llm):
    prompt = tiny_llm.encode("Tom had a red ball. Tom had a red ball. Tom had a red ball. Tom had")
    plain = run(tiny_llm, [(prompt, GREEDY)])[0]
    tiny_llm.speculative_config = {
        "method": "merge", "num_speculative_tokens": 6,
        "drafters": [{"method": "ngram"}, {"method": "ngram", "num_speculative_tokens": 3}],
    }  # fmt: skip
    output = run(tiny_llm, [(prompt, GREEDY)])[0]
    assert output.token_ids == plain.token_ids and output.metrics["exactness"] == plain.metrics["exactness"]
    spec = output.metrics["speculative_decoding"]
    assert spec["num_accepted_draft_tokens"] and max(spec["per_step_drafted"]) <= 6


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=0.8, seed=3, max_tokens=24)])
def test_all_kinds_together(tiny_llm, sampling):
    """Riders, memories and models side by side: the plain tokens, at least as many a forward as each alone."""
    config = [{"method": "suffix"}, {"method": "lookahead", "ngram_size": 3}, {"model": "tiny-draft"}]
    config = [c for c in config if c.get("method", "draft_model") in drafters.methods()]
    texts = ["Tom had a red ball. Tom had a red ball. Tom had", "One day,", "x"]
    requests = [(tiny_llm.encode(text), sampling) for text in texts]
    plain = [o.token_ids for o in run(tiny_llm, requests)]

    def steps() -> int:
        outputs = run(tiny_llm, requests)
        assert [o.token_ids for o in outputs] == plain
        return sum(o.metrics["speculative_decoding"]["num_spec_steps"] for o in outputs)

    alone = []
    for one in config:
        tiny_llm.speculative_config = one
        alone.append(steps())
    tiny_llm.speculative_config = {"method": "merge", "num_speculative_tokens": 32, "drafters": config}
    assert steps() <= min(alone) + len(requests)  # where a request's room ends, they share what is left of the budget
    merge = tiny_llm.engine.drafter
    assert merge.kv_bytes(100) == sum(part.kv_bytes(100) for part in merge.parts) > 0
    assert not merge.parts[-1].runner.slots and not merge.parts[-1].runner.kv.tables
    assert_released(tiny_llm)


@pytest.mark.parametrize(
    ("given_drafters", "why"),
    [
        (None, "needs 'drafters'"), ([], "needs 'drafters'"), ("ngram", "needs 'drafters'"),
        (["ngram"], "drafter of merge: .* must be a mapping"), ([{"k": 3}], "needs a 'method'"),
        ([{"method": "guess"}], "is unknown"),
        ([{"method": "ngram", "wing": 1}], "no option 'wing'"),
        ([{"method": "ngram", "acceptance_method": "coupled"}], "belongs to the merge"),
    ],
)  # fmt: skip
def test_impossible_options(given_drafters, why):
    options = {} if given_drafters is None else {"drafters": given_drafters}
    with pytest.raises(ConfigError, match=why):
        drafters.create(SpeculativeConfig("merge", options=options))
    nested = {"method": "merge", "drafters": [{"method": "merge", "drafters": [{"method": "ngram"}]}]}
    assert drafters.create(SpeculativeConfig.of(nested)).parts[0].parts[0].name == "ngram"


def test_parents_in_a_ring_switch_the_drafter_off(random_llm):
    """Nobody has checked what a part of a merge gives: a path through such a draft would have no end."""
    expected = random_llm.generate([1, 2, 3], GREEDY)[0].token_ids
    merge = drafters.create(SpeculativeConfig.of({"method": "merge", "drafters": [{"method": "ngram"}]}))

    def changed(seq, k):
        draft = Draft.chain([1, 2])
        draft.parents[:] = [1, 0]
        return draft

    merge.parts = [ScriptedDrafter(changed), ScriptedDrafter(lambda seq, k: Draft.chain([3]))]
    use(random_llm, merge)
    (output,) = random_llm.generate([1, 2, 3], GREEDY)
    assert output.token_ids == expected and "before their children" in output.metrics["drafter_error"]
    assert_released(random_llm)


def test_riders_that_are_too_many_together_stay_behind():
    """One draft's ride, whole; the other's would be more than a forward takes."""
    one, other = (Draft([n] * 200, [*range(-1, 199)], riders=200) for n in (1, 2))
    merged, where = Draft.merge([one, other], 8)
    assert merged.riders == 200 and set(merged.tokens) == {1} and where[1] == [-1] * 200


def test_each_drafter_guesses_its_own_number_and_is_named_and_counted():
    """The first of those that agree is named, all remember, and their memory is added up."""
    merge = Merge(drafters=[{"method": "ngram", "num_speculative_tokens": 2}, {"method": "suffix"}])
    (draft,) = merge.propose([Sequence([*range(9), *range(4)], SamplingParams(max_tokens=50), 0)], 8)
    assert draft.tokens == [4, 5, 6, 7] and draft.by == ["ngram", "ngram", "suffix", "suffix"]
    for i, part in enumerate(merge.parts, 1):
        part.remember, part.kv_bytes = list[list[int]]().append, lambda tokens, i=i: i * tokens
    merge.remember([1, 2])
    assert all(part.remember.__self__ == [[1, 2]] for part in merge.parts) and merge.kv_bytes(5) == 15
