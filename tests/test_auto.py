"""`auto` on recorded texts and made-up machines, and end to end."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from helpers import ScriptedDrafter, assert_released, count_forwards, oracle
from replay import TRACES, Machine, Recorded, Trace, auto, fixed, replay
from safetensors.torch import load_file, save_file

from outrider import LLM, Draft, SamplingParams, ops
from outrider.config import SpeculativeConfig
from outrider.control import Beliefs
from outrider.corpus import fingerprint
from outrider.datastore import write
from outrider.drafters import create
from outrider.drafters.auto import EVERY, ROWS, Auto, _machine
from outrider.errors import ConfigError, OutriderError
from outrider.find import find
from outrider.sequence import Sequence

MACHINES = {
    "cheap rows": Machine(0.02, 8), "dear rows": Machine(0.15), "very dear rows": Machine(0.4),
    "cheap model": Machine(0.03, 8, draft=0.08, more=0.01),
}  # fmt: skip
CHOICES = (
    "none",
    "ngram:k=4",
    "ngram:k=8",
    "suffix:k=8",
    "suffix:k=16",
    "recorded:k=1",
    "recorded:k=3",
    "recorded:k=5",
)
CELLS = [(name, batch) for name in MACHINES for batch in (1, 4)]


@cache
def rate(choice: str, machine: str, batch: int) -> float:
    make = auto if choice == "auto" else fixed(choice)
    return replay(make, [*TRACES, *TRACES[::-1]], MACHINES[machine], batch).rate


def ratios(choice: str) -> list[float]:
    """Per machine and batch, its tokens a second over those of the best fixed choice in hindsight."""
    return [rate(choice, *cell) / max(rate(other, *cell) for other in CHOICES) for cell in CELLS]


def good(choice: str) -> bool:
    """Never far behind the best fixed choice, and on the whole ahead of it."""
    return min(ratios(choice)) > 0.85 and sum(ratios(choice)) / len(CELLS) > 1.0


def test_little_is_regretted():
    """Texts of every kind in a row, on four machines, alone and four at a time."""
    assert good("auto"), dict(zip(CELLS, ratios("auto"), strict=True))


def test_a_machine_that_others_use():
    """One forward in twenty seems to take up to ten times as long: no such measurement may spoil those that follow."""
    machine, ratios = MACHINES["dear rows"], list[float]()
    for suite in ("edit", "chat", "code"):
        traces = [trace for trace in TRACES if trace.suite == suite] * 2
        best = max(replay(fixed(choice), traces, machine).rate for choice in ("suffix:k=8", "suffix:k=16"))
        for seed in range(6):
            dice = random.Random(seed)

            def hiccup(dice: random.Random = dice) -> float:
                return dice.uniform(2, 10) if dice.random() < 0.05 else dice.lognormvariate(0, 0.1)

            ratios.append(replay(auto, traces, machine, hiccup=hiccup).rate / best)
    assert min(ratios) > 0.8 and sum(ratios) / len(ratios) > 0.95, ratios


@pytest.mark.parametrize("choice", CHOICES)
def test_no_fixed_choice_will_do(choice):
    assert not good(choice), "the test above could not tell a controller from this"


@pytest.mark.parametrize("trace", TRACES, ids=lambda t: f"{t.suite}-{len(t.prompt)}")
@pytest.mark.parametrize("machine", MACHINES)
def test_never_far_below_plain(machine, trace):
    """Of each single request, cold: nothing is known of the machine, the sources or the text; some have 55 tokens."""
    own, plain = (replay(make, [trace], MACHINES[machine]).rate for make in (auto, fixed("none")))
    assert own > (0.97 - 3 / len(trace.output)) * plain


@pytest.mark.parametrize("draft", [0.2, 0.9, 2.0])
def test_a_model_that_is_never_right_costs_little(draft):
    """It is tried again now and then, and each try is paid for, however seldom they are."""
    trace = Trace("chat", 0, TRACES[0].prompt, random.Random(0).choices(range(1000, 40000), k=2000), "0" * 2000)
    own, plain = (replay(make, [trace], Machine(0.02, draft=draft)).rate for make in (auto, fixed("none")))
    assert own > 0.98 * plain


def window(make, trace: Trace, machine: Machine, start: int) -> float:
    """Tokens a second behind the output's first `start` tokens."""
    tokens, began = 0, 0.0
    for now, n in replay(make, [trace], machine).steps:
        tokens += n
        began = began or (now if tokens >= start else 0.0)
        last = now
    return (len(trace.output) - start) / (last - began)


@pytest.mark.parametrize("machine", ["cheap rows", "cheap model"])
@pytest.mark.parametrize("order", [1, -1])
def test_a_request_changes_its_kind(machine, order):
    """Prose that nothing foretells, then a copy of the prompt, or the other way round: 64 tokens later it is known."""
    talk = next(t for t in TRACES if t.suite == "chat")
    copy = max((t for t in TRACES if t.suite == "edit"), key=lambda t: len(t.output))
    parts = [(talk.output[:110], "0" * 110), (copy.output, "0" * len(copy.output))][::order]
    trace = Trace("both", 0, copy.prompt, parts[0][0] + parts[1][0], parts[0][1] + parts[1][1])
    start = len(parts[0][0]) + 64 * (order < 0)  # a copy is seen at once
    own = window(auto, trace, MACHINES[machine], start)
    assert own > 0.85 * max(window(fixed(choice), trace, MACHINES[machine], start) for choice in CHOICES)


@pytest.mark.parametrize("batch", [8, 16])
@pytest.mark.parametrize("machine", MACHINES)
def test_costs_that_were_measured_before_the_first_step(machine, batch):
    """Twenty requests are soon over: to learn what the rows of many cost by trying is too slow."""
    kind, traces = MACHINES[machine], [*TRACES, *TRACES[::-1]] * 2

    def begun(*args) -> Auto:
        drafter = auto(*args)
        drafter.costs.begin({n: kind.forward(n) for n in ROWS})
        return drafter

    best = max(replay(fixed(choice), traces, kind, batch).rate for choice in ("none", "suffix:k=4", "suffix:k=16"))
    assert replay(begun, traces, kind, batch).rate > 0.95 * best


def test_arrivals_do_not_stop_the_learning():
    """Requests that come and go at every few steps: costs and beliefs are learnt all the same."""
    short = [Trace(t.suite, t.temperature, t.prompt, t.output[:12], t.draft[:12]) for t in TRACES] * 4
    played = replay(auto, short, Machine(0.05), batch=6)
    assert played.drafter.costs and played.drafter.beliefs.hopes(-1, 0b10, 2, 0.65) != [0.65] * 2
    assert any(n > 6 for _, n in played.steps), "something was accepted"


def test_a_large_batch_is_left_alone():
    """Where a row costs as much as a sequence's share of a forward, nothing is drafted, nor looked up."""
    machine, traces = Machine(1.0), TRACES * 2
    own, plain = (replay(make, traces, machine, 16).rate for make in (auto, fixed("none")))
    assert own > 0.97 * plain


def test_it_rests_where_no_look_pays():
    """Then most steps are plain ones, until the company changes or a text is met that tells what follows."""
    calls = list[int]()

    def counted(*args) -> Auto:
        drafter = create(SpeculativeConfig("auto"))

        def slow() -> float:
            args[2].now += 0.02  # what looking takes
            return args[2].now

        drafter.clock = slow
        drafter.costs.begin({n: 1 + 0.02 * n for n in ROWS})
        ask = drafter.propose

        def propose(seqs, k):
            calls.append(len(seqs))
            return ask(seqs, k)

        drafter.propose = propose
        return drafter

    dice = random.Random(0)
    new = Trace("new", 0, dice.choices(range(9000), k=50), dice.choices(range(9000), k=400), "0" * 400)
    assert replay(counted, [new], Machine(0.02)).tokens == 400 and len(calls) < 80
    calls.clear()
    known = Trace("known", 0, new.output, new.output, "0" * 400)
    begun = Trace("both", 0, new.output, dice.choices(range(9000), k=200) + new.output[:200], "0" * 400)
    assert replay(counted, [known], Machine(0.02)).tokens == 400 and len(calls) < 60
    played = replay(counted, [begun], Machine(0.02))
    assert len(played.steps) < 200 + EVERY + 60, "what is known is found again"
    calls.clear()
    drafter = replay(counted, [new, new, new], Machine(0.02), 2).drafter
    assert calls.count(2) > 20, "another beside it"
    for others in ([1], [1, 2, 3]):
        drafter.left, drafter.resting = 2, [1, 2]
        assert drafter.rests([1, 2]) and not drafter.rests(others) and not drafter.rests([1, 2])


def test_behind_a_rest_no_head_is_asked_before_it_has_looked():
    """It goes on from a state that it was shown; without one it guesses nothing, at once: wrong times were learnt."""
    asked, looked, lengths = list[bool](), set[int](), list[int]()

    class Head(Recorded):
        def propose(self, seqs, k):
            asked.append(len(seqs[0].tokens) in looked)
            return super().propose(seqs, k)

        def observe(self, seqs, verdicts, output):
            looked.add(len(seqs[0].tokens))

    def rested(traces, machine, clock) -> Auto:
        drafter = auto(traces, machine, clock)
        drafter.parts[1] = Head(traces, machine, clock)
        drafter._start()
        ask = drafter.propose

        def tick() -> float:
            clock.now += 0.02
            return clock.now

        def propose(seqs, k):
            lengths.append(len(seqs[0].tokens))
            return ask(seqs, k)

        drafter.clock, drafter.propose = tick, propose
        drafter.costs.begin({n: 1 + 0.02 * n for n in ROWS})
        return drafter

    dice = random.Random(0)
    new = Trace("new", 0, dice.choices(range(9000), k=50), dice.choices(range(9000), k=2000), "0" * 2000)
    replay(rested, [new], Machine(0.02))
    assert len(lengths) < 1000 and len(asked) > 5 and all(asked)


def test_it_rests_less_where_a_find_saves_more():
    """Now and then a passage comes again: to find it some steps later costs more than a few looks in vain do."""
    looks = 0

    def watched(*args) -> Auto:
        drafter, clock = auto(*args), args[2]
        ask = drafter.propose

        def tick() -> float:
            clock.now += 0.005  # a look takes a fiftieth of a step
            return clock.now

        def propose(seqs, k):
            nonlocal looks
            looks += 1
            return ask(seqs, k)

        drafter.propose, drafter.clock = propose, tick
        drafter.costs.begin({n: 1 + 0.02 * (n - 1) for n in ROWS})
        return drafter

    dice = random.Random(0)
    fresh = [dice.choices(range(9000), k=40) for _ in range(10)]
    text = [token for i, own in enumerate(fresh) for token in own + fresh[max(0, i - 1)][:25]]
    steps = len(replay(watched, [Trace("again", 0, fresh[0], text, "0" * len(text))], Machine(0.02)).steps)
    assert looks > 0.9 * steps


@pytest.mark.parametrize("batch", [1, 8])
def test_looks_in_vain_cost_little(batch):
    """Each step that is looked at takes a twelfth longer; a model that might be asked keeps nobody awake."""

    def slow(*args) -> Auto:
        drafter, clock = auto(*args), args[2]
        drafter.costs.begin({n: 1 + 0.05 * (n - 1) for n in ROWS})
        choose = drafter.beliefs.choose

        class Slow:
            def choose(self, *given):
                clock.now += 0.08
                return choose(*given)

            def __getattr__(self, name):
                return getattr(beliefs, name)

        beliefs, drafter.beliefs = drafter.beliefs, Slow()
        return drafter

    dice = random.Random(0)
    traces = [Trace("new", 0, dice.choices(range(9000), k=50), dice.choices(range(9000), k=250), "0" * 250)]
    traces += [replace(traces[0], output=dice.choices(range(9000), k=250)) for _ in range(2 * batch)]
    own, plain = (replay(make, traces, Machine(0.05), batch).rate for make in (slow, fixed("none")))
    assert own > 0.97 * plain


def test_what_a_grammar_forces_is_drafted_though_the_drafter_rests(tiny_llm, monkeypatch):
    seconds = [1 + i / 1000 for i in range(33)]  # a busy machine's own may leave no draft worth its row
    monkeypatch.setattr("outrider.costs.Costs.ladder", lambda *_: seconds)
    tiny_llm.speculative_config = "auto"
    choice = {"structured_outputs": {"choice": ["a very long answer that is the only one"]}}

    def drafted(**constraint) -> int:
        output = tiny_llm.generate("a b a b a b a b", max_tokens=40, temperature=0, **constraint)[0]
        return output.metrics["speculative_decoding"]["num_draft_tokens"]

    with monkeypatch.context() as resting:
        resting.setattr(Auto, "rests", lambda *_: True)
        assert drafted(**choice) > 0 and drafted() == 0
    assert drafted() > 0


def test_steps_end_where_requests_end():
    played = replay(auto, TRACES, Machine(0.02, 8), 4)
    assert played.tokens == sum(len(t.output) for t in TRACES)
    assert all(a[0] < b[0] for a, b in pairwise(played.steps))
    assert not len(played.drafter.beliefs)


@pytest.mark.skipif(ops.native.kernels is None, reason="there are no kernels here")
def test_the_reference_chooses_the_same():
    """Step by step what the compiled beliefs do, with look-ups and a model to ask."""

    def reference(*args) -> Auto:
        drafter = auto(*args)
        drafter.beliefs = Beliefs(sum(source.bit for source in drafter.dear))
        return drafter

    one, other = (replay(make, TRACES[:6], MACHINES["cheap model"], 3) for make in (auto, reference))
    assert one.steps == other.steps and type(one.drafter.beliefs) is not type(other.drafter.beliefs)
    assert any(n > 6 for _, n in one.steps), "something was accepted"


def test_a_model_s_promises_count_for_what_came_of_promises(monkeypatch):
    """It is asked while that pays; not where a quarter of what drafts promise does not come."""
    beliefs, texts = Beliefs(0b10), [(1, [1, 2, 3], 3, 99)]
    beliefs.price([1 + 0.02 * n for n in range(9)])
    for _ in range(2):
        beliefs.choose(texts, [], {}, 0.0, 8, False, False, True)
    model = 0b10, 3, 0, True, 0.0, 0.0, False, [0.45]
    assert beliefs.worth(texts, 8, [model]) == (0, [0], 1)
    monkeypatch.setattr(beliefs, "faith", lambda: 0.75)
    assert beliefs.worth(texts, 8, [model]) is None


# --- the drafter itself ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["ngram", "draft_model", "suffix", "lookahead", "medusa"])
def test_a_method_with_k_auto(tiny_llm, method):
    """It is the only one to choose from, under its own name."""
    models = {"draft_model": "tiny-draft", "medusa": "tiny-medusa"}
    config = {"method": method, "num_speculative_tokens": "auto"}
    config |= {"model": models[method]} if method in models else {}
    prompts = ["Once upon a time", "a b a b a b", "The dog"]
    for sampling in ({"temperature": 0}, {"temperature": 0.8, "seed": 2}):
        tiny_llm.speculative_config = None
        plain = [o.token_ids for o in tiny_llm.generate(prompts, max_tokens=40, **sampling)]
        tiny_llm.speculative_config = config
        outputs = tiny_llm.generate(prompts, max_tokens=40, **sampling)
        assert [o.token_ids for o in outputs] == plain and {o.metrics["method"] for o in outputs} == {method}
        drafted = [n for o in outputs for n in o.metrics["speculative_decoding"]["per_step_drafted"]]
        assert 0 in drafted
        assert_released(tiny_llm)


def names(llm: LLM) -> list[str]:
    return [source.name for source in llm.engine.drafter.sources]


def test_what_comes_with_the_target_is_a_candidate(tiny_llm, make_checkpoint, random_llm, monkeypatch):
    tiny_llm.speculative_config = {"method": "auto"}
    assert {"suffix", "draft_model", "medusa"} <= {*names(tiny_llm)}
    alone = sorted(names(tiny_llm))
    for given in ("tiny-draft", str(find("tiny-medusa")), str(find("tiny") / ".." / "tiny-draft")):
        tiny_llm.speculative_config = {"method": "auto", "model": given}
        assert sorted(names(tiny_llm)) == alone, f"{given} comes with the target, and was taken twice"
    random_llm.speculative_config = {"method": "auto"}
    assert names(random_llm) == ["suffix"]
    monkeypatch.setattr("outrider.drafters.auto.HEAVY", 0)
    random_llm.speculative_config = {"method": "auto"}
    assert names(random_llm) == ["suffix", "recycle"], "on a large model its time is nothing"
    random_llm.speculative_config = {"method": "auto", "model": str(make_checkpoint(noise=0.01))}
    assert names(random_llm)[-1] == "draft_model"


def test_stores_that_fit_are_found(tiny_llm, make_checkpoint, tmp_path, monkeypatch):
    """In the model's folder, or embedded; one of another tokenizer is left out, one that is given is the only one."""
    assets, text = tmp_path / "assets", tiny_llm.encode("Once upon a time there was a red ball. " * 9)
    tokenizer, vocab = tiny_llm.tokenizer, tiny_llm.runner.model.config.vocab_size
    (assets / "some").mkdir(parents=True)
    embedded = str(write([text], assets / "some" / "said.store", vocab, fingerprint(tokenizer), "tiny").path)
    other = str(write([text], assets / "some" / "other.store", vocab, "0" * 64, "other").path)
    with_store = shutil.copytree(find("tiny"), tmp_path / "model")
    monkeypatch.setattr("outrider.find.ASSETS", assets)
    monkeypatch.setattr("outrider.drafters.auto.companions", lambda path: [])
    beside = str(write([text], with_store / "mine.store", vocab, fingerprint(tokenizer), "tiny").path)

    def found(llm: LLM) -> list[str]:
        return [part.datastore for part in llm.engine.drafter.parts if part.name == "rest"]

    tiny_llm.speculative_config = "auto"
    assert found(tiny_llm) == [embedded]
    llm = LLM(str(with_store), speculative_config="auto")
    assert found(llm) == [beside, embedded]
    output = llm.generate("Once upon a time there", max_tokens=24, temperature=0)[0]
    llm.speculative_config = {"method": "auto", "datastore": embedded}
    assert found(llm) == [embedded]
    llm.speculative_config = {"method": "auto", "drafters": [{"method": "ngram"}]}
    assert found(llm) == []
    llm.speculative_config = {"method": "auto", "model": beside}
    assert found(llm)[0] == beside
    with pytest.raises(ConfigError, match="another tokenizer"):
        llm.speculative_config = {"method": "auto", "model": other}
    llm.speculative_config = None
    assert output.token_ids == llm.generate("Once upon a time there", max_tokens=24, temperature=0)[0].token_ids


def test_what_is_given_must_fit(random_llm):
    with pytest.raises(OutriderError):
        random_llm.speculative_config = {"method": "auto", "model": "tiny-draft"}
    for wrong in ({"drafters": 3}, {"drafters": [{"method": "nonsense"}]}, {"datastore": "nowhere.store"}, {"x": 1}):
        with pytest.raises(OutriderError):
            create(SpeculativeConfig.of({"method": "auto", **wrong}))
    with pytest.raises(ConfigError, match="belongs to the auto"):
        create(
            SpeculativeConfig.of({"method": "auto", "drafters": [{"method": "ngram", "acceptance_method": "typical"}]})
        )
    for within in ("auto", {"method": "merge", "drafters": [{"method": "ngram"}, "auto"]}):
        with pytest.raises(ConfigError, match="none of its drafters can be auto"):
            create(SpeculativeConfig.of({"method": "auto", "drafters": [{"method": "ngram"}, within]}))


def test_only_what_is_named(tiny_llm):
    tiny_llm.speculative_config = {"method": "auto", "drafters": [{"method": "ngram"}, {"model": "tiny-draft"}]}
    assert names(tiny_llm) == ["ngram", "draft_model"]


@pytest.mark.parametrize("method", ["auto", "merge"])
def test_who_guessed_is_told(tiny_llm, method, monkeypatch):
    """Each token names the drafter that guessed it, not the one that asked it."""
    tiny_llm.speculative_config = {"method": method, "drafters": [{"method": "ngram"}, {"model": "tiny-draft"}]}
    count_forwards(tiny_llm, monkeypatch)
    output = tiny_llm.generate("Tom had a red ball. Tom had a red", max_tokens=64, temperature=0)[0]
    assert {"draft_model"} <= {*output.drafted_by} <= {None, "ngram", "draft_model"}


def test_two_of_a_kind_are_told_apart(tiny_llm):
    parts = [{"method": "ngram", "prompt_lookup_max": n} for n in (2, 4)]
    tiny_llm.speculative_config = {"method": "auto", "drafters": parts}
    assert len({*names(tiny_llm)}) == 2


def test_costs_outlive_the_process(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    measured = []
    monkeypatch.setattr("outrider.drafters.auto._forwards", lambda target: measured.append(target) or {})
    for known in (False, True):
        llm = LLM("tiny", dtype="float32", speculative_config={"method": "auto"})
        assert bool(llm.engine.drafter.costs.curves) == known
        llm.generate("Once upon a time", max_tokens=8, temperature=0)
    assert len(measured) == 2, "each process looks how fast the machine is today"
    llm = LLM("tiny", dtype="bfloat16", speculative_config={"method": "auto"})
    assert not llm.engine.drafter.costs.curves, "another dtype has other costs"


def test_forwards_are_measured_once_and_leave_nothing():
    """What rows cost is known before the first request; no block stays taken, and none is found by others."""
    llm = LLM("tiny", dtype="float32", speculative_config="auto")
    costs = llm.engine.drafter.costs
    assert set(costs.curves[0]) == {*ROWS} and costs
    assert_released(llm)
    assert not llm.runner.kv.pool.cached


def test_a_pool_too_small_to_measure_in():
    llm = LLM("tiny", dtype="float32", speculative_config=None)
    llm.runner.kv.most = 0
    llm.speculative_config = "auto"
    assert not llm.engine.drafter.costs.curves


def test_trust_is_checked(tiny_llm):
    """What a drafter says of its guesses is a number of 0 to 1 for each."""
    from helpers import ScriptedDrafter, use

    for trust in ([2.0], [0.5, 0.5], ["x"], 0.5):
        use(tiny_llm, ScriptedDrafter(lambda seq, k, trust=trust: Draft([1], [-1], trust=trust)))
        (output,) = tiny_llm.generate([1, 2], max_tokens=3, temperature=0)
        assert "trust is a list of 1 numbers" in output.metrics["drafter_error"]


def test_recycled_tokens_come_back():
    """What the target expected behind a token is guessed there again, likeliest first."""
    import torch

    from outrider.draft import Verdict
    from outrider.runner import Output

    drafter = create(SpeculativeConfig.parse("recycle:recycled=2"))
    seq = Sequence([5, 7], SamplingParams(max_tokens=9), 0)
    assert not drafter.propose([seq], 4)[0].tokens
    logits = torch.full((2, 10), -9.0)
    logits[0, 3], logits[0, 4], logits[1, 7] = 2.0, 1.0, 3.0  # behind 7: 3 or 4; behind 3: 7
    drafter.observe([seq_of(seq, 3, 7)], [Verdict([0], [3, 7], 1)], Output([Draft.chain([3])], logits, logits))
    draft = drafter.propose([seq], 3)[0]
    assert [draft.words(i) for i in range(3)] == [(3,), (3, 7), (3, 7, 3)] and draft.trust[0] > 0.7


def seq_of(seq: Sequence, *more: int) -> Sequence:
    fork = seq.fork()
    fork.tokens += more
    return fork


# --- the target's own weights, rounded ------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("options", ["weights=int8", "weights=int4", "weights=int8,view=streaming:budget=32"])
def test_rounded_weights_guess_well(bfloat_llm, options, temperature):
    """Over the verified keys: nearly what the target says, and not a token of it changed."""
    prompts, sampling = ["Once upon a time there was a", "Tom had"], {"temperature": temperature, "seed": 1}
    bfloat_llm.speculative_config = None
    plain = bfloat_llm.generate(prompts, max_tokens=40, **sampling)
    bfloat_llm.speculative_config = SpeculativeConfig.parse(f"self:{options},k=4")
    outputs = bfloat_llm.generate(prompts, max_tokens=40, **sampling)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    assert all(o.metrics["speculative_decoding"]["mean_acceptance_length"] > 2 for o in outputs)
    assert_released(bfloat_llm)


@pytest.fixture(scope="module")
def bfloat_llm() -> LLM:
    llm = LLM("tiny", device="cpu", dtype="bfloat16")
    if not llm.runner.follows_paths:
        pytest.skip("rounded weights need the kernels")
    return llm


def test_weights_that_cannot_be(tiny_llm):
    with pytest.raises(ConfigError, match="rounded to int8 or int4, not 'int3'"):
        create(SpeculativeConfig.parse("self:weights=int3"))
    with pytest.raises(ConfigError, match="bfloat16"):
        tiny_llm.speculative_config = {"method": "self", "weights": "int8"}


def test_auto_is_a_config(tiny_llm):
    tiny_llm.speculative_config = "auto"
    assert tiny_llm.speculative_config.method == "auto"
    with pytest.raises(ConfigError, match="or 'auto', not 'fast'"):
        tiny_llm.speculative_config = "fast"


def test_costs_are_kept_apart_by_weights() -> None:
    """Rows cost otherwise where the same model's weights are stored otherwise."""
    if ops.native.kernels is None:
        pytest.skip("int8 weights need the kernels")
    dense, rounded = (LLM("tiny", dtype="bfloat16", quantization=scheme).runner for scheme in (None, "int8"))
    assert _machine(dense) == _machine(dense) != _machine(rounded)


# --- the target's own layers, fewer of them ---------------------------------------------------------------------------


def test_layers_that_do_nothing_are_found(make_checkpoint, tmp_path):
    """Of eight layers four do nothing: they are the ones left out in the end, and guesses are right then."""
    folder, busy = tmp_path / "model", [0, 2, 3, 7]
    shutil.copytree(make_checkpoint(num_hidden_layers=8), folder)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if ("o_proj" in name or "down_proj" in name) and int(name.split(".")[2]) not in busy:
            weight.zero_()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    llm = LLM(folder, device="cpu", dtype="float32")
    prompts, sampling = [[5, 9, 2], [7, 7, 1, 3], [8]], {"temperature": 0.8, "seed": 1}
    plain = [o.token_ids for o in llm.generate(prompts, max_tokens=400, **sampling)]
    llm.speculative_config = {"method": "self", "layers": 4, "num_speculative_tokens": 3}
    outputs = llm.generate(prompts, max_tokens=400, **sampling)
    assert [o.token_ids for o in outputs] == plain
    assert llm.engine.drafter.kept == busy
    steps = [o.metrics["speculative_decoding"]["per_step_accepted"] for o in outputs]
    assert all(sum(own[-20:]) > sum(own[:20]) for own in steps)
    assert_released(llm)


def test_layers_are_judged_by_their_own_guesses(make_llm, monkeypatch):
    """Beside somebody who is always right, too."""
    prompt, params = [5, 9, 2], SamplingParams(max_tokens=60, seed=1)
    llm = make_llm(num_hidden_layers=6)
    plain = llm.generate(prompt, params)[0].token_ids
    monkeypatch.setattr("outrider.drafters.self.JUDGED", 2**62)
    layered = {"method": "self", "layers": 3, "num_speculative_tokens": 3}
    llm.speculative_config = {"method": "merge", "drafters": [{"method": "ngram"}, layered]}
    parts, right, made = llm.engine.drafter.parts, 0, 0
    own, parts[0] = parts[1], ScriptedDrafter(oracle({tuple(prompt): plain}))
    propose = own.propose

    def counted(seqs, k):
        nonlocal right, made
        drafts, truth = propose(seqs, k), plain[len(seqs[0].output) :]
        wrong = [a != b for a, b in zip(drafts[0].tokens, truth, strict=False)]
        first = [*wrong, True].index(True)
        right, made = right + first, made + min(first + 1, len(wrong))
        return drafts

    own.propose = counted
    assert llm.generate(prompt, params)[0].token_ids == plain
    assert (own.right, own.made) == (right, made) and made > right
    assert_released(llm)


def test_the_last_exchange_of_layers_is_judged_too(make_llm, monkeypatch):
    """Else what nobody has tried would draft from then on."""
    monkeypatch.setattr("outrider.drafters.self.JUDGED", 4)
    monkeypatch.setattr("outrider.drafters.self.TRIES", 5)
    llm = make_llm(num_hidden_layers=6)
    llm.speculative_config = {"method": "self", "layers": 3, "num_speculative_tokens": 3}
    llm.generate([5, 9, 2], max_tokens=200, temperature=0.9, seed=1)
    own = llm.engine.drafter
    assert own.tries == 5 and own.trial is None
    assert own.runner.kv.layers == own.kept


def test_layers_that_cannot_be(random_llm):
    for layers in (1, 99, -2):
        with pytest.raises(ConfigError, match="layers of method self must be at least 2 and fewer"):
            random_llm.speculative_config = {"method": "self", "layers": layers}


# --- when a draft model stops ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.9, "seed": 3, "top_p": 0.95}])
def test_a_draft_model_stops_where_it_is_unsure(tiny_llm, sampling):
    """Fewer guesses, a larger share of them right, and not a token changed."""
    prompts, kept = ["Once upon a time", "The dog and the cat"], []
    plain = [o.token_ids for o in tiny_llm.generate(prompts, max_tokens=60, **sampling)]
    for least in (0.0, 0.5):
        tiny_llm.speculative_config = {
            "model": "tiny-draft", "num_speculative_tokens": 6, "min_token_prob": least,
        }  # fmt: skip
        outputs = tiny_llm.generate(prompts, max_tokens=60, **sampling)
        assert [o.token_ids for o in outputs] == plain
        spec = [o.metrics["speculative_decoding"] for o in outputs]
        drafted, accepted = (sum(s[f"num_{what}_tokens"] for s in spec) for what in ("draft", "accepted_draft"))
        kept.append((drafted, accepted / drafted))
    assert kept[1][0] < 0.8 * kept[0][0] and kept[1][1] > 1.2 * kept[0][1]


def test_coins_are_asked_before_the_token_is_known(tiny_llm):
    """Whether a node is there must not depend on which token was drawn: the draft ends behind the unsure one."""
    tiny_llm.speculative_config = {
        "model": "tiny-draft", "num_speculative_tokens": 6, "min_token_prob": 0.999, "acceptance_method": "rejection",
    }  # fmt: skip
    output = tiny_llm.generate("Once upon a time", max_tokens=40, temperature=1.0, seed=1)[0]
    assert min(output.metrics["speculative_decoding"]["per_step_drafted"][1:-1]) >= 1


def test_within_a_view_only_what_is_cheap_is_asked(tiny_llm):
    """Heads and draft models that lie with the target are for the target."""
    tiny_llm.speculative_config = {"method": "cascade", "view": "streaming:budget=64", "drafter": "auto"}
    inner = tiny_llm.engine.drafter.inner
    assert inner.sources and all(source.drafter.cheap for source in inner.sources)


def test_riders_of_a_source_ride_behind_what_was_picked(tiny_llm, monkeypatch):
    """Lookahead's, whose windows hang on each other: they switch nothing off, and learn for later guesses."""
    seconds = [1 + i / 1000 for i in range(33)]  # a busy machine's own may leave no draft worth its row
    monkeypatch.setattr("outrider.costs.Costs.ladder", lambda *_: seconds)
    prompt, options = "Once upon a time there was a dog. Once upon a time", {"max_tokens": 48, "temperature": 0}
    (plain,) = tiny_llm.generate(prompt, **options)
    lookahead = {"method": "lookahead", "window_size": 3, "ngram_size": 3}
    tiny_llm.speculative_config = {"method": "auto", "drafters": [lookahead, {"method": "ngram"}]}
    (output,) = tiny_llm.generate(prompt, **options)
    assert output.token_ids == plain.token_ids and output.metrics["drafter_error"] is None
    assert "lookahead" in output.drafted_by
