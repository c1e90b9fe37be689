"""Hidden rows for drafters are those of every token that was read, whatever happened to the sequence on the way."""

from __future__ import annotations

import pytest
import torch
from helpers import ScriptedDrafter, run, use

from outrider import LLM, Draft, SamplingParams
from outrider.errors import ConfigError
from outrider.kv.rows import NORMED, Rows
from outrider.runner import Runner
from outrider.sequence import Sequence
from outrider.speculate import step

POINTS = (0, 1, 2, NORMED)


@pytest.fixture(params=["dense", "offload", "chunks"])
def llm(request, make_checkpoint) -> LLM:
    options = {"offload": {"kv_offload": True}, "chunks": {"max_num_batched_tokens": 5}}.get(request.param, {})
    return LLM(make_checkpoint(), device="cpu", dtype="float32", **options)


def afresh(runner: Runner, tokens: list[int]) -> torch.Tensor:
    """The rows of all tokens, from one forward."""
    seq, rows = Sequence(tokens, SamplingParams(), 0), runner.tap(POINTS)
    runner.extend([seq])
    found = rows.read(seq.id, 0, len(tokens))
    runner.free(seq)
    assert found and found[0] == 0
    return found[1]


def bush(plain: list[int], seq: Sequence, right: int) -> Draft:
    """A tree of wrong nodes around `right` that are right, the right ones not first."""
    draft, last = Draft(), -1
    for token in plain[len(seq.output) :][:right]:
        draft.tokens += [(token + 1) % 128, token, (token + 2) % 128]
        draft.parents += [last, last, last]
        last = len(draft) - 2
    return draft


def test_rows_follow_the_sequence(llm):
    """Prompt, chunks, rejected and accepted branches, several sequences; dropped rows do not come back."""
    prompts = [[5, 9, 3, 70, 2, 2, 8, 1, 33, 4, 6], [7], [1, 2, 3]]
    params = SamplingParams(temperature=0, max_tokens=24)
    plain = [llm.generate(p, params)[0].token_ids for p in prompts]
    rows = llm.runner.tap(POINTS)
    seqs = [Sequence(p, params, 0) for p in prompts]
    texts = {seq.id: text for seq, text in zip(seqs, plain, strict=True)}
    rights = iter([2, 0, 3, 1] * 9)
    drafter = ScriptedDrafter(lambda seq, k: bush(texts[seq.id], seq, next(rights)))
    consumed: dict[int, list[torch.Tensor]] = {seq.id: [] for seq in seqs}
    for turn in range(6):
        step(llm.runner, drafter, seqs, 9)
        for i, seq in enumerate(seqs):
            if turn % 2 and i < 2:
                done = sum(map(len, consumed[seq.id]))
                first, new = rows.read(seq.id, done, len(seq.tokens) - 1)
                assert first == done
                consumed[seq.id].append(new)
                rows.drop(seq.id, done + len(new))
    assert rows.read(seqs[0].id, 0, 3) is None
    for seq, text in zip(seqs, plain, strict=True):
        assert seq.output == text[: len(seq.output)] and len(seq.output) > 8
        done = sum(map(len, consumed[seq.id]))
        left = rows.read(seq.id, done, len(seq.tokens) - 1)
        found = torch.cat(consumed[seq.id] + ([left[1]] if left else []))
        torch.testing.assert_close(found, afresh(llm.runner, seq.tokens)[: len(found)], rtol=1e-4, atol=1e-4)
        assert len(found) == len(seq.tokens) - 1
        llm.runner.free(seq)
    assert not rows.held


def test_only_what_is_there_is_read():
    """Neither what was dropped, nor rejected, nor what lay beyond a gap."""

    def add(rows: Rows, start: int, values: list[float]) -> None:
        rows.add(7, start, {1: torch.tensor(values)[:, None]}, slice(0, len(values)))

    def read(rows: Rows, start: int = 0, end: int = 99) -> tuple[int, list[float]] | None:
        return (found := rows.read(7, start, end)) and (found[0], found[1].flatten().tolist())

    base = Rows((1,), 1, 4)
    add(base, 0, [0, 1, 2, 3, 4, 5, 6, 7])
    base.drop(7, 2)
    assert read(base) == (2, [2, 3, 4, 5, 6, 7]) and read(base, 5) == (5, [5, 6, 7])
    assert read(base, 9) is None and read(base, 0, 1) is None
    base.keep(7, 4, [1, 3])
    assert read(base) == (2, [2, 3, 5, 7])
    base.drop(7, 9)
    assert read(base) is None
    add(base, 6, [6, 7])
    assert read(base) == (6, [6, 7])
    base.catch_up(7, 4, 4)
    add(base, 4, [4, 5])
    assert read(base) == (4, [4, 5])
    add(base, 20, [20])
    assert read(base) == (20, [20])
    base.free(7)
    add(base, 0, [0, 1, 2, 3])
    view = Rows((1,), 1, 4, base)
    for begin in (0, 2):
        add(view, begin, [50, 51, 52, 53, 54, 55][begin:])
        view.catch_up(7, 6, 4)
        assert read(view) == (0, [0, 1, 2, 3, 54, 55]), "drafted on behind what the base has"
        view.free(7)
    view.catch_up(7, 4, 4)
    view.drop(7, 3)
    assert read(view) == read(base) == (3, [3])


def test_preempted_sequences_are_read_again(llm):
    """After `free` the rows come anew, from the first."""
    seq, rows = Sequence([5, 9, 3, 70, 2, 2, 8], SamplingParams(), 0), llm.runner.tap((1, NORMED))
    first = (llm.runner.extend([seq]), rows.read(seq.id, 0, 6))[1]
    rows.drop(seq.id, 6)
    llm.runner.free(seq)
    assert rows.read(seq.id, 0, 9) is None
    llm.runner.extend([seq])
    again = rows.read(seq.id, 0, 6)
    assert first and again and first[0] == again[0] == 0 and torch.equal(first[1], again[1])
    assert torch.equal(again[1][:, 64:], afresh(llm.runner, seq.tokens)[:6, -64:]), "NORMED is the last"
    llm.runner.free(seq)


def test_nothing_is_kept_for_nobody(random_llm, monkeypatch):
    """Of a sequence that no drafter hears of, from its first token or since the drafter was switched off."""
    kept, told = list[int](), list[int]()

    def fail(seq: Sequence, k: int) -> Draft:
        told.append(len(kept))
        if len(told) == 3:
            raise RuntimeError("broken")
        return Draft()

    use(random_llm, ScriptedDrafter(fail))
    rows = random_llm.runner.tap((1,))
    monkeypatch.setattr(type(rows), "add", lambda self, *given: kept.append(len(told)))
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    random_llm.generate([1, 2, 3], params)
    assert kept == [1, 2, 3]
    use(random_llm, ScriptedDrafter(lambda seq, k: Draft()))
    kept.clear()
    engine = random_llm.engine
    requests = engine.add([1, 2, 3], params) + engine.add([4, 5], params, k=0)
    while not all(request.finished for request in requests):
        engine.step()
    assert len(kept) == 12


@pytest.mark.parametrize("spec", ["streaming:budget=16", "retrieval:budget=24,chunk=4,recent=4,rebuild=8"])
def test_views_take_over_their_base_s_rows(random_llm, spec):
    """What the base has verified is the base's; what is drafted through the view is the view's."""
    target = random_llm.runner
    view = target.view(spec)
    rows = view.tap(POINTS)
    seq = Sequence(torch.randint(128, (40,), generator=torch.Generator().manual_seed(1)).tolist(), SamplingParams(), 0)
    for _ in range(3):
        fork = seq.fork()
        for _ in range(3):
            view.extend([fork])
            fork.tokens.append(11)
        first, found = rows.read(seq.id, 0, len(fork.tokens) - 1)
        assert first == 0 and len(found) == len(fork.tokens) - 1
        whole = afresh(target, seq.tokens)
        torch.testing.assert_close(found[: len(seq.tokens) - 1], whole[:-1], rtol=1e-4, atol=1e-4)
        token = int(target.extend([seq]).logits[0][0].argmax())
        seq.tokens.append(token)
    view.free(seq)
    target.free(seq)


def test_points_that_are_not_there(random_llm):
    with pytest.raises(ConfigError, match=r"layer 3 .* 2 layers"):
        random_llm.runner.tap((1, 3))
    assert not random_llm.runner.taps


def test_plain_decoding_is_untouched(random_llm):
    """Watching changes no token."""
    params = SamplingParams(temperature=0, max_tokens=9)
    plain = random_llm.generate([1, 2, 3], params)[0].token_ids
    rows = random_llm.runner.tap((0, 1))
    use(random_llm, ScriptedDrafter(lambda seq, k: Draft.chain(plain[len(seq.output) :][:2])))
    assert run(random_llm, [([1, 2, 3], params)])[0].token_ids == plain
    assert not rows.held
    del rows
    assert not random_llm.runner.taps, "nobody holds them"
