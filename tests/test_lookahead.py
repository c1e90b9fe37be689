"""Lookahead: the window's tree against the paper's definition, the pool, and the n-grams against a plain iteration."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from helpers import assert_released, logits_after, run, use

from outrider import LLM, Draft, SamplingParams
from outrider.drafters.lookahead import Lookahead, Memory, Pool
from outrider.errors import ConfigError
from outrider.kv.base import Entry
from outrider.ops.attention import visible
from outrider.sampling import choose
from outrider.sequence import Sequence
from outrider.verify import verify

GREEDY = SamplingParams(temperature=0, max_tokens=40)
SAMPLED = SamplingParams(temperature=0.8, seed=4, max_tokens=40)
PENALISED = replace(SAMPLED, repetition_penalty=1.3, presence_penalty=0.2, top_p=0.95)


def sequence(tokens: list[int], params: SamplingParams = GREEDY) -> Sequence:
    return Sequence(tokens, params, params.seed or 0)


def drafted(drafter: Lookahead, seq: Sequence, k: int = 99) -> Draft:
    return drafter.propose([seq], k)[0]


def filled(drafter: Lookahead, seq: Sequence, levels: list[list[int]], pool: Pool | None = None) -> Draft:
    """What is drafted once the window holds `levels`."""
    drafter.memories[seq.id] = Memory(pool or Pool(9), [level.copy() for level in levels], 99)
    return drafted(drafter, seq)


# --- the window as a tree --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guesses", [0, 3])
@pytest.mark.parametrize(("width", "depth"), [(1, 1), (1, 3), (4, 1), (2, 2), (5, 3), (3, 4)])
def test_window_is_the_papers(width, depth, guesses):
    """Parents give, by brute force, the paper's positions and its mask; guesses and window never see each other."""
    levels = [[100 * level + i for i in range(width)] for level in range(depth)]
    pool = Pool(9)
    for i in range(guesses):
        pool.add((1, 50 + i, 60, 70))
    seq = sequence([8, 9, 1])
    draft = filled(Lookahead(ngram_size=depth + 1, window_size=width), seq, levels, pool)
    g = draft.verifiable
    cells = [(level, i) for level in range(depth) for i in range(width)][1:]  # (0, 0) is the sequence's last token
    assert g == 3 * guesses and draft.riders == width * depth - 1
    assert draft.tokens[g:] == [levels[level][i] for level, i in cells]
    last = len(seq.tokens) - 1
    entry = Entry(0, 0, 1 + len(draft), last, [-1, *(p + 1 for p in draft.parents)])
    positions = entry.positions()
    seen = visible(entry.n, last, entry.parents, None, 0, last + 1 + len(draft), torch.device("cpu"))
    assert [positions[1 + g + j] for j in range(len(cells))] == [last + level + i for level, i in cells]
    for j, (level, i) in enumerate(cells):
        row = seen[1 + g + j]
        assert bool(row[: last + 1].all()) and not bool(row[last + 1 : last + 1 + g].any())
        for other, (above, column) in enumerate(cells):
            wanted = (above == 0 and column <= i) or (column == i and 0 < above <= level)
            assert bool(row[last + 1 + g + other]) == wanted, ((level, i), (above, column))
    assert not bool(seen[: 1 + g, last + 1 + g :].any())


def test_window_shifts_and_gives_ngrams(random_llm):
    """Four columns, trigrams: filled in one step, from then on four n-grams a step and the levels move down."""
    drafter, seen = Lookahead(window_size=4, ngram_size=3), []

    def spy(seqs, verdicts, output, observe=drafter.observe):
        before = drafter.memories[seqs[0].id]
        old, known = [level.copy() for level in before.levels], set(all_ngrams(before.pool))
        observe(seqs, verdicts, output)
        seen.append((old, [level.copy() for level in before.levels], set(all_ngrams(before.pool)) - known))

    drafter.observe = spy
    use(random_llm, drafter, 6)
    run(random_llm, [([5, 6, 7, 8], GREEDY)])
    (old, new, found), *rest = seen
    assert [len(level) for level in old] == [5] and [len(level) for level in new] == [4, 4] and not found
    assert new[0] == old[0][1:]
    full = [one for one in rest if one[1] != one[0]]  # the others: no room for a window at the end
    assert len(full) > 15
    for old, new, found in full:
        assert [len(level) for level in new] == [4, 4] and new[0][1:] == old[1][1:]
        assert found <= set(zip(*old, new[-1], strict=True))


# --- the pool --------------------------------------------------------------------------------------------------------


def all_ngrams(pool: Pool) -> list[tuple[int, ...]]:
    return [(first, *tail) for first, tails in pool.tails.items() for tail in tails]


def test_pool_forgets_the_least_recently_seen():
    pool = Pool(2)
    for ngram in ((1, 2, 3), (1, 4, 5), (9, 9, 9), (1, 2, 3), (1, 6, 7)):
        pool.add(ngram)
    assert all_ngrams(pool) == [(1, 2, 3), (1, 6, 7), (9, 9, 9)]


def test_guesses_share_prefixes():
    pool = Pool(9)
    for ngram in ((1, 5, 6), (1, 2, 4), (1, 2, 3), (1, 2, 3)):
        pool.add(ngram)
    assert pool.tree(1, 99) == Draft([2, 3, 4, 5, 6], [-1, 0, 0, -1, 3])
    assert pool.tree(1, 3) == Draft([2, 3, 4], [-1, 0, 0])
    assert pool.tree(7, 99) == pool.tree(1, 0) == Draft()
    rng = random.Random(1)
    for _ in range(200):
        pool.add(tuple(rng.choices(range(3), k=5)))
    for first in range(3):
        tree = pool.tree(first, 99)
        assert len(set(zip(tree.parents, tree.tokens, strict=True))) == len(tree)  # siblings never repeat
        paths = {tuple(tree.tokens[n] for n in tree.path_to(i)) for i in range(len(tree))}
        assert {p for p in paths if len(p) == 4} == set(pool.tails[first])


def test_prompt_and_output_feed_the_pool():
    prompt = [1, 2, 3, 4, 1, 2]
    for from_prompt, expected in ((True, {(1, 2, 3), (2, 3, 4), (3, 4, 1), (4, 1, 2)}), (False, set())):
        drafter, seq = Lookahead(ngram_size=3, pool_from_prompt=from_prompt), sequence(prompt)
        drafted(drafter, seq)
        pool = drafter.memories[seq.id].pool
        assert set(all_ngrams(pool)) == expected
        seq.tokens += [7, 8]
        drafted(drafter, seq)
        assert set(all_ngrams(pool)) == expected | {(1, 2, 7), (2, 7, 8)}
        fork = seq.fork()
        fork.tokens += [60, 61]  # not settled
        drafted(drafter, fork)
        assert set(all_ngrams(pool)) == expected | {(1, 2, 7), (2, 7, 8)}


def test_pools_are_shared_only_if_asked():
    for shared in (False, True):
        drafter = Lookahead(ngram_size=3, shared_pool=shared)
        first, second = sequence([1, 2, 3, 4]), sequence([6, 6, 6, 2])
        drafted(drafter, first)
        drafter.forget(first)
        assert not drafter.memories and drafted(drafter, second).verifiable == (2 if shared else 0)


# --- against a reference ---------------------------------------------------------------------------------------------


def reference(llm: LLM, prompt: list[int], text: list[int], width: int, n: int) -> list[list[tuple[int, ...]]]:
    """Per step the n-grams of a Jacobi iteration in the paper's words, one plain forward for every single token."""
    start = random.Random(0).choices(prompt, k=width + n - 2)
    window, found = [start[1:]], []  # level 0 without the last token, the others whole
    for t in range(len(text)):
        tokens = prompt + text[:t]
        row = [tokens[-1], *window[0]]
        new = []
        for i in range(len(row)):
            column = [level[i] for level in window[1:]]
            logits = logits_after(llm, tokens + row[1 : i + 1] + column)
            new.append(int(logits.argmax()))
        if len(window) < n - 1:
            window = [level[1:] for level in [*window, new]]
            continue
        found.append([(row[i], *(level[i] for level in window[1:]), new[i]) for i in range(width)])
        window = [*window[1:], new]
        window[0] = window[0][1:]
    return found


@pytest.mark.parametrize(("width", "n"), [(4, 4), (3, 2), (1, 3)])
def test_ngrams_are_those_of_a_jacobi_iteration(random_llm, width, n):
    """Guesses that are always wrong: every step emits one token, as in the reference."""
    prompt, steps = [3, 1, 4, 1, 5], 14
    text = random_llm.generate(prompt, temperature=0, max_tokens=40)[0].token_ids
    drafter, found = Lookahead(window_size=width, ngram_size=n, pool_from_prompt=False), []
    drafter.propose = lambda seqs, k: [drop_guesses(drafter._draft(s, k)) for s in seqs]

    def record(seqs, verdicts, output, observe=drafter.observe):
        pool = drafter.memories[seqs[0].id].pool
        pool.size = 999
        pool.tails.clear()
        observe(seqs, verdicts, output)
        found.append(sorted(all_ngrams(pool)))

    drafter.observe = record
    use(random_llm, drafter, 8)
    assert run(random_llm, [(prompt, GREEDY)])[0].token_ids == text
    expected = [sorted(set(step)) for step in reference(random_llm, prompt, text[:steps], width, n)]
    assert found[n - 2 : steps] == expected


def drop_guesses(draft: Draft) -> Draft:
    g = draft.verifiable
    return Draft(draft.tokens[g:], [p - g if p >= 0 else -1 for p in draft.parents[g:]], riders=draft.riders)


@pytest.mark.parametrize("params", [SAMPLED, PENALISED])
def test_sampled_window_meets_the_noise_of_its_places(random_llm, monkeypatch, params):
    """Each token of the window is chosen as if the sequence stood there, and the sampler's own counts stay right."""
    seen, offered = [], []

    class Noting(Lookahead):
        def propose(self, seqs, k):
            offered.append(len(seqs[0].tokens))
            return super().propose(seqs, k)

    def spy(logits, rows):
        (memory,) = drafter.memories.values()
        first = offered[-1] + len(memory.levels) - 1  # whatever was accepted since
        assert [row.position for row in rows] == [*range(first, first + len(rows))]
        seen.extend((row.position, row.seq.tokens + row.path, row.seq.tokens) for row in rows)
        return choose(logits, rows)

    monkeypatch.setattr("outrider.drafters.lookahead.choose", spy)
    plain = run(random_llm, [([1, 2], params)])[0].token_ids
    use(random_llm, drafter := Noting(window_size=3, ngram_size=3), 6)
    assert run(random_llm, [([1, 2], params)])[0].token_ids == plain
    truth = [1, 2, *plain]
    assert random_llm.engine.guard.failure is None
    assert seen and all(at == len(prefix) and own == truth[: len(own)] for at, prefix, own in seen)


@pytest.mark.parametrize("own", [{"logits_processors": [lambda ids, logits: logits]}, {"allowed_token_ids": [5, 6]}, {
    "structured_outputs": {"regex": "[ab]+"}}], ids=lambda own: next(iter(own)))  # fmt: skip
def test_processors_and_grammars_are_not_asked_for_the_window(tiny_llm, monkeypatch, own):
    """They may refuse what it supposes."""
    asked = []
    monkeypatch.setattr("outrider.drafters.lookahead.choose", lambda *given: asked.append(1) or choose(*given))
    tiny_llm.speculative_config = {"method": "lookahead", "window_size": 3, "ngram_size": 3}
    tiny_llm.generate("Once", SamplingParams(temperature=0.8, seed=1, max_tokens=9, **own))
    assert bool(asked) == ("allowed_token_ids" in own)


# --- edges -----------------------------------------------------------------------------------------------------------


def test_window_stays_at_home_without_room():
    params = SamplingParams(temperature=0, max_tokens=7)
    drafter = Lookahead(window_size=3, ngram_size=4)  # while filling 5 columns: 4 deep; full: 3 levels, 4 deep
    for room, riders in ((7, 4), (5, 4), (4, 0), (1, 0)):
        seq = sequence([1, 2, 3, 1, 2, 3, 1], replace(params, max_tokens=room))
        draft = drafted(drafter, seq)
        assert draft.riders == riders and draft.verifiable == 3
        assert draft.clip(room - 1).riders == riders
        assert len(drafted(drafter, seq, 0)) == 0  # no guesses allowed: no window either
        assert drafted(drafter, seq, 2).verifiable == 2


def test_clipped_window_is_offered_again(random_llm):
    drafter, seq = Lookahead(window_size=3, ngram_size=3), sequence([1, 2, 3])
    draft = drafted(drafter, seq)
    for other in (draft.clip(2), Draft(), Draft.chain([5])):
        output = random_llm.runner.extend([seq], [other])
        before = [level.copy() for level in drafter.memories[seq.id].levels]
        verdicts = verify([seq], [other], output.flat)
        drafter.observe([seq], verdicts, output)
        assert drafter.memories[seq.id].levels == before and drafted(drafter, seq) == draft
    random_llm.runner.free(seq)


@pytest.mark.parametrize("shape", [(1, 2, 1), (3, 5, 3), (6, 3, 6), (2, 7, 2)])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED, PENALISED])
def test_prompts_of_all_kinds(random_llm, params, shape):
    """One token, one token repeated, a second prompt after the first; short outputs; own and shared pools."""
    window, n, guesses = shape
    batch = [([7], params), ([7] * 30, params), ([1, 2, 3], replace(params, max_tokens=1)), ([9, 8] * 4, params)]
    batch += [([7], replace(params, max_tokens=m)) for m in (2, 3, 5, 8)]
    random_llm.speculative_config = None
    plain = [run(random_llm, [request])[0].token_ids for request in batch]
    options = {"window_size": window, "ngram_size": n, "guess_set_size": guesses}
    for shared in (False, True):
        random_llm.speculative_config = {"method": "lookahead", **options, "shared_pool": shared}
        for _ in range(2):
            assert [o.token_ids for o in run(random_llm, batch)] == plain
            assert_released(random_llm)
        assert not random_llm.engine.drafter.memories


def test_full_match_gives_one_more(tiny_llm):
    """N - 1 accepted tokens and the target's own behind them: lade loses the last one."""
    tiny_llm.speculative_config = {"method": "lookahead", "window_size": 3, "ngram_size": 4}
    output = tiny_llm.generate("The cat sat on the mat. " * 12, temperature=0, max_tokens=60, ignore_eos=True)[0]
    spec = output.metrics["speculative_decoding"]
    assert max(spec["per_step_accepted"]) == 3 and spec["mean_acceptance_length"] > 1.5


def test_options():
    assert Lookahead(guess_set_size=4, ngram_size=6).num_speculative_tokens == 20
    assert Lookahead(num_speculative_tokens=0).num_speculative_tokens == 0
    for wrong in ({"window_size": 0}, {"ngram_size": 1}, {"guess_set_size": 0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Lookahead(**wrong)
