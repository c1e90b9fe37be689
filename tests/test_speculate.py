"""A drafter can harm nothing but its own guesses: what it is shown may only be read, and what it gives is checked."""

from __future__ import annotations

from dataclasses import replace

import numpy
import pytest
import torch
from helpers import ScriptedDrafter, assert_released, oracle, run, use

from outrider import Draft, SamplingParams
from outrider.config import MOST_NODES, Rule
from outrider.errors import DrafterError
from outrider.kv import PagedKV
from outrider.runner import Runner
from outrider.sampling import Row, scores, surely
from outrider.sequence import Sequence
from outrider.speculate import Autoregressive, Drafter, Nested, step

REQUESTS = [
    ([5, 9, 2, 7], SamplingParams(temperature=0, max_tokens=16, presence_penalty=0.5, stop_token_ids=[127])),
    ([3], SamplingParams(temperature=0.9, seed=4, max_tokens=12, logit_bias={4: 0.5, 6: 1.0})),
]


def break_params(seq: Sequence) -> None:
    seq.params.stop_token_ids and seq.params.stop_token_ids.extend(range(128))
    seq.params.logit_bias and seq.params.logit_bias.update({5: 100.0})


HARMS = {  # what a drafter might do to a sequence it is shown
    "append": lambda seq: seq.tokens.append(1), "extend": lambda seq: seq.tokens.extend([1, 2]),
    "insert": lambda seq: seq.tokens.insert(0, 1), "pop": lambda seq: seq.tokens.pop(),
    "set": lambda seq: seq.tokens.__setitem__(0, 1), "delete": lambda seq: seq.tokens.__delitem__(slice(1)),
    "clear": lambda seq: seq.tokens.clear(), "reverse": lambda seq: seq.tokens.reverse(),
    "add": lambda seq: seq.tokens.__iadd__([3]), "rebind": lambda seq: setattr(seq, "tokens", [1]),
    "finish": lambda seq: setattr(seq, "finish_reason", "stop"), "seed": lambda seq: setattr(seq, "seed", 1),
    "length": lambda seq: setattr(seq, "max_len", 1), "id": lambda seq: setattr(seq, "id", 0),
    "accept": lambda seq: seq.accept([1]), "memory": lambda seq: seq.memory.update(counts=None, noise={}),
    "eos": lambda seq: setattr(seq, "eos", frozenset(range(128))), "params": break_params,
    "fork": lambda seq: seq.fork().accept([1, 2, 3]), "metrics": lambda seq: seq.metrics.add(9, 9, 9),
}  # fmt: skip


@pytest.mark.parametrize("harm", HARMS)
def test_a_drafter_cannot_change_a_sequence(random_llm, harm):
    plain = [o.token_ids for o in run(random_llm, REQUESTS)]
    refused = []

    def script(seq: Sequence, k: int) -> Draft:
        try:
            HARMS[harm](seq)
        except (TypeError, AttributeError):
            refused.append(harm)
        return Draft.chain([1, 2])

    use(random_llm, ScriptedDrafter(script))
    outputs = run(random_llm, REQUESTS)
    assert [o.token_ids for o in outputs] == plain
    assert all(o.metrics["speculative_decoding"]["num_spec_steps"] <= 16 for o in outputs)
    assert bool(refused) == (harm not in ("memory", "params", "fork", "metrics"))


def test_a_drafter_cannot_lift_a_ban(tiny_llm):
    """It is shown the very words, which nobody can change, and which cost no copies."""
    (request,) = tiny_llm.engine.add([1], SamplingParams(bad_words=["girl", "a little dog"], max_tokens=2))
    shown = request.seq.shown(Rule())
    assert shown.banned is request.seq.banned and len({*shown.banned}) > 1  # hashable: tuples of tuples
    tiny_llm.engine.abort(request)
    assert_released(tiny_llm)


def test_an_idle_drafter_is_not_asked(random_llm):
    """Nor shown anything, so that forwards may write over what the last one gave."""
    plain = run(random_llm, REQUESTS)
    drafter = ScriptedDrafter(lambda seq, k: pytest.fail("asked"))
    drafter.idle = True
    use(random_llm, drafter, 0)
    assert [o.token_ids for o in run(random_llm, REQUESTS)] == [o.token_ids for o in plain] and not drafter.verdicts
    use(random_llm, drafter)
    drafter.script = lambda seq, k: Draft.chain([1, 2])
    assert [o.token_ids for o in run(random_llm, REQUESTS)] == [o.token_ids for o in plain] and drafter.verdicts


def test_what_it_keeps_of_an_output_stays(random_llm):
    kept = []
    drafter = ScriptedDrafter(lambda seq, k: Draft())
    drafter.observe = lambda seqs, verdicts, output: kept.append(
        [(x, x.clone()) for x in (output.flat, output.states, *output.logits, *output.hidden)]
    )
    use(random_llm, drafter)
    run(random_llm, REQUESTS)
    assert len(kept) >= 12 and all(torch.equal(x, before) for own in kept for x, before in own)


def test_nor_what_it_observes(random_llm):
    """Verdicts, tensors and drafts are its own to spoil."""
    plain = run(random_llm, REQUESTS)
    drafter = ScriptedDrafter(oracle({tuple(o.prompt_token_ids): o.token_ids for o in plain}))

    def observe(seqs, verdicts, output):
        for verdict, logits, hidden, draft in zip(verdicts, output.logits, output.hidden, output.drafts, strict=True):
            verdict.tokens.append(1)
            verdict.path.clear()
            verdict.logprobs.clear()
            draft.tokens.clear()
            with torch.inference_mode():
                logits.fill_(torch.nan)
                hidden.fill_(torch.nan)

    drafter.observe = observe
    use(random_llm, drafter)
    outputs = run(random_llm, REQUESTS)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    assert [len(o.drafted_by) for o in outputs] == [len(o.token_ids) for o in outputs]


def test_what_is_shown_is_the_sequence():
    seq = Sequence([1, 2, 3], SamplingParams(stop_token_ids=[9]), 5, eos=[8])
    shown = seq.shown(Rule("rejection"))
    assert shown.rule.flips_coins and (shown.id, shown.seed, shown.eos) == (seq.id, 5, {8, 9})
    seq.accept([4, 8])
    assert seq.shown(Rule()) is shown and not shown.rule.flips_coins
    assert shown.tokens == seq.tokens and (shown.finish_reason, shown.room, shown.output) == ("stop", 254, [4, 8])
    fork = shown.fork()
    fork.tokens.append(7)
    assert shown.tokens == [1, 2, 3, 4, 8] and fork.parent is shown and (fork.settled, len(fork.tokens)) == (5, 6)
    del seq.tokens[2:]  # as if it were another text
    assert seq.shown(Rule()).tokens == [1, 2]


def changed(**fields) -> Draft:
    draft = Draft.chain([1, 2])
    for name, value in fields.items():
        setattr(draft, name, value)
    return draft


UNIFORM = torch.full((2, 128), 1 / 128)
WRONG = {  # what `propose` might return in place of one Draft per sequence, for two sequences
    "none": None, "too few": [Draft()], "too many": [Draft()] * 3, "no list": Draft(), "iterator": iter([Draft()] * 2),
    "no drafts": [[1], [2]], "one none": [Draft(), None], "floats": [Draft([1.0], [-1]), Draft()],
    "bools": [Draft([True], [-1]), Draft()], "numpy": [Draft.chain(numpy.array([3])), Draft()],
    "strings": [Draft(["a"], [-1]), Draft()], "tokens": [changed(tokens=(1, 2)), Draft()],
    "tensor": [changed(tokens=torch.tensor([1, 2])), Draft()], "parents": [changed(parents=[1, -1]), Draft()],
    "own parent": [changed(parents=[-1, 1]), Draft()], "few parents": [changed(parents=[-1]), Draft()],
    "riders": [changed(riders=3), Draft()], "half a rider": [changed(riders=0.5), Draft()],
    "q too small": [changed(q=UNIFORM[:1]), Draft()], "q of other tokens": [changed(q=UNIFORM[:, 1:]), Draft()],
    "q of ints": [changed(q=UNIFORM.long()), Draft()], "q is a list": [changed(q=[[1.0]]), Draft()],
    "too long": [Draft.chain([1] * (MOST_NODES + 1)), Draft()],
}  # fmt: skip


@pytest.fixture
def take(random_llm):
    """One step of two sequences, without an engine: what it raises is the drafter's. They are whole afterwards."""
    seqs: list[Sequence] = []

    def take(drafter: ScriptedDrafter, rule: str = "coupled") -> list[Sequence]:
        own = [Sequence(prompt, params, 3) for prompt, params in REQUESTS]
        seqs.extend(own)
        step(random_llm.runner, drafter, own, 4, rule=Rule(rule))
        return own

    yield take
    for i, seq in enumerate(seqs):
        assert seq.tokens[: seq.prompt_len] == REQUESTS[i % len(REQUESTS)][0]
        random_llm.runner.free(seq)
    assert_released(random_llm)


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_proposals_name_the_drafter(take, wrong):
    drafter = ScriptedDrafter(lambda seq, k: Draft())
    drafter.propose = lambda seqs, k: WRONG[wrong]
    with pytest.raises(DrafterError, match="drafter scripted: propose must return"):
        take(drafter)
    assert all(seq.output for seq in take(ScriptedDrafter(lambda seq, k: Draft())))


@pytest.mark.parametrize("q", [UNIFORM * 2, UNIFORM / 2, -UNIFORM, UNIFORM * torch.nan])
def test_q_must_be_a_distribution_where_coins_are_flipped(take, q):
    for rule in ("coupled", "typical"):  # which do not look at it
        assert all(seq.output for seq in take(ScriptedDrafter(lambda seq, k: changed(q=q)), rule))
    for rule in ("rejection", "block"):
        with pytest.raises(DrafterError, match="row of q"):
            take(ScriptedDrafter(lambda seq, k: changed(q=q)), rule)


@pytest.mark.parametrize("method", ["propose", "observe"])
def test_what_a_drafter_raises_is_told_with_its_name(random_llm, method):
    def fail(*args):
        raise KeyError("lost")

    drafter, seq = ScriptedDrafter(lambda seq, k: Draft()), Sequence([5, 9], SamplingParams(max_tokens=5), 0)
    setattr(drafter, method, fail)
    with pytest.raises(DrafterError, match=f"scripted: {method} raised KeyError: 'lost'") as caught:
        step(random_llm.runner, drafter, [seq], 3)
    random_llm.runner.free(seq)
    assert isinstance(caught.value.__cause__, KeyError)
    if method == "propose":
        assert seq.output == [] and caught.value.verdicts is None
    else:  # the sequences have grown
        assert [verdict.tokens for verdict in caught.value.verdicts] == [seq.output] != [[]]


def test_more_nodes_than_are_of_use_are_not_asked_for(random_llm):
    asked = []
    use(random_llm, ScriptedDrafter(lambda seq, k: asked.append(k) or Draft()), k=10**9)
    random_llm.generate([5], replace(REQUESTS[0][1], max_tokens=3))
    assert set(asked) == {MOST_NODES, 0}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_how_sure_a_draft_is(temperature):
    """The share of what was chosen among all that it was chosen from; -1 where there is nothing to choose."""
    params = SamplingParams(temperature=temperature, max_tokens=9)
    rows = [Row(Sequence([1, 2, 3], params, seed=seed)) for seed in range(5)]
    logits = 4 * torch.randn(5, 300, generator=torch.Generator().manual_seed(0))
    logits[3, 17:] = -torch.inf
    logits[4, 8] = torch.nan
    shares = scores(logits, rows).softmax(-1)
    chosen, sure = surely(logits, rows)
    assert chosen == [*shares[:4].argmax(-1).tolist(), -1]
    assert sure[:4] == pytest.approx(shares[:4].amax(-1).tolist(), rel=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("tail", [[7], [7, 3, 4], [3, 7]])
def test_a_drafted_token_whose_states_are_nan_changes_nothing(make_llm, temperature, tail):
    """Neither the answer it was drafted for, nor the next one, which finds a prefix there."""
    llm = make_llm()
    with torch.inference_mode():
        llm.runner.model.embedding[7] = torch.nan
    params = SamplingParams(temperature=temperature, seed=4, max_tokens=40, logit_bias={7: -100.0})
    prompt = list(range(20, 60))
    plain = llm.generate([prompt], params)[0].token_ids
    drafter = ScriptedDrafter(lambda seq, k: Draft.chain([*plain[len(seq.output) :][:2], *tail]))
    for _ in range(2):
        use(llm, drafter, 8)
        assert llm.generate([prompt], params)[0].token_ids == plain
    assert any(verdict.path for verdicts in drafter.verdicts for verdict in verdicts)
    llm.speculative_config = None
    assert llm.generate([prompt], params)[0].token_ids == plain


def test_a_draft_follows_the_text_and_no_earlier_guess(tiny_llm):
    """Its last guess was wrong, and the text is as long now as the text and the guesses were."""

    def guesser() -> Autoregressive:
        model, drafter = tiny_llm.runner.model, Autoregressive()
        drafter.runner, drafter.vocab = Runner(model, PagedKV(model.config, model.dtype, model.device)), 8192
        return drafter

    drafter, seq = guesser(), Sequence([5, 6, 7], SamplingParams(temperature=0, max_tokens=30), seed=0)
    for _ in range(3):
        (draft,) = drafter.propose([seq.shown(Rule())], 2)
        assert draft.tokens == guesser().propose([seq.shown(Rule())], 2)[0].tokens
        seq.tokens += [draft.tokens[0], (draft.tokens[1] + 1) % 8192]


def test_what_a_nested_drafter_is_shown_is_the_text(tiny_llm):
    """Its guesses go on from what was accepted, whatever it guessed before; lists are used again."""
    seen, drafter = list[list[int]](), Nested()

    class Inner(Drafter):
        def propose(self, seqs, k):
            seen.extend(list(seq.tokens) for seq in seqs)
            return [Draft() for _ in seqs]

    drafter.inner, drafter.view = Inner(), "streaming:budget=64"
    model = tiny_llm.runner.model
    runner = Runner(model, PagedKV(model.config, model.dtype, model.device))
    drafter.attach(runner, lambda name: runner)
    seq = Sequence([5, 6, 7], SamplingParams(temperature=0, max_tokens=30), seed=0)
    runner.extend([seq])
    for _ in range(3):
        seen.clear()
        (draft,) = drafter.propose([seq.shown(Rule())], 3)
        assert [text[: len(seq.tokens)] for text in seen] == [seq.tokens] * 3
        assert [text[len(seq.tokens) :] for text in seen] == [draft.tokens[:i] for i in range(3)]
        seq.tokens += [draft.tokens[0], (draft.tokens[1] + 1) % 8192, 9]
        runner.extend([seq])
    assert list(drafter._forks) == [seq.id]
    drafter.forget(seq)
    assert not drafter._forks
