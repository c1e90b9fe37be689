"""Views: what they hold, what they choose, what they cost, and that no token depends on them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from helpers import logits_after, run

from outrider import LLM, Draft, SamplingParams
from outrider.draft import Verdict
from outrider.errors import ConfigError, RequestTooLong
from outrider.kv import PagedKV, parse
from outrider.kv.base import QueryLog
from outrider.kv.views import Codes
from outrider.sequence import Sequence

VIEWS = [
    "streaming:budget=24,sinks=4,rebuild=6",
    "snapkv:budget=24,window=4,recent=4,kernel=3,rebuild=8",
    "retrieval:budget=24,chunk=4,recent=2,rebuild=8",
    "quantized:bits=8,recent=4,rebuild=8",
    "quantized:bits=4,recent=4,rebuild=8",
]
WIDE = ["streaming:budget=512", "snapkv:budget=512", "retrieval:budget=512", "quantized:recent=512"]
LENGTHS = (1, 5, 23, 24, 25, 26, 70, 200)  # shorter than the sinks; the budget and its neighbours; far beyond it
GREEDY, SAMPLED = SamplingParams(temperature=0), SamplingParams(temperature=0.8, top_p=0.95, seed=5)


def text(n: int, seed: int = 0) -> list[int]:
    return torch.randint(128, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def batch() -> list[tuple[list[int], SamplingParams]]:
    """Every boundary, greedy and sampled side by side, and rows that end at different times."""
    params = [replace(GREEDY if i % 2 else SAMPLED, max_tokens=40 - 3 * i) for i in range(len(LENGTHS))]
    return [(text(n, n), p) for n, p in zip(LENGTHS, params, strict=True)]


@pytest.fixture(scope="module")
def plain(make_llm) -> list[list[int]]:
    """What plain decoding gives, once."""
    return [o.token_ids for o in run(make_llm(), batch())]


def drafters_of(view: str, draft: str) -> dict[str, dict]:
    streaming = {"method": "draft_model", "model": draft, "kv": "streaming:budget=20,rebuild=5"}
    return {
        "self": {"method": "self", "view": view, "num_speculative_tokens": 5},
        "ngram inside": {"method": "cascade", "view": view, "drafter": {"method": "ngram"}},
        "draft inside": {"method": "cascade", "view": view, "num_speculative_tokens": 7, "drafter": streaming},
        "self inside": {"method": "cascade", "view": view, "drafter": {"method": "self", "view": VIEWS[0]}},
        "tree inside": {
            "method": "cascade", "view": view,
            "drafter": {"method": "merge", "drafters": [{"method": "suffix"}, {**streaming, "kv": ""}]},
        },
    }  # fmt: skip


@pytest.mark.parametrize("how", ["self", "ngram inside", "draft inside", "self inside", "tree inside"])
@pytest.mark.parametrize("view", VIEWS)
def test_same_tokens(random_llm, make_checkpoint, plain, view, how):
    random_llm.speculative_config = drafters_of(view, str(make_checkpoint(noise=0.02)))[how]
    outputs = run(random_llm, batch())
    assert [o.token_ids for o in outputs] == plain
    if how != "ngram inside":  # random text repeats nothing
        # few, for none are made while another prompt is read
        assert any(o.metrics["speculative_decoding"]["num_accepted_draft_tokens"] for o in outputs)


@pytest.mark.parametrize("arch,config", [("mistral", {"sliding_window": 20}), ("qwen3", {}), ("llama", {
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
})])  # fmt: skip
@pytest.mark.parametrize("view", VIEWS)
def test_architectures(make_llm, arch, config, view):
    llm, params = make_llm(arch, **config), SamplingParams(temperature=0, max_tokens=30)
    expected = run(llm, [(text(60), params), (text(7), params)])
    llm.speculative_config = {"method": "self", "view": view}
    assert [o.token_ids for o in run(llm, [(text(60), params), (text(7), params)])] == [o.token_ids for o in expected]


@pytest.mark.parametrize("view", WIDE)
def test_a_view_of_everything_guesses_everything_right(random_llm, plain, view):
    for config in ({"method": "self", "view": view}, {"method": "cascade", "view": view}):
        random_llm.speculative_config = config
        outputs = run(random_llm, batch())
        assert [o.token_ids for o in outputs] == plain
        for output in outputs:
            spec = output.metrics["speculative_decoding"]
            assert spec["num_accepted_draft_tokens"] == spec["num_draft_tokens"] > 0


# --- what a view sees -------------------------------------------------------------------------------------------------


class Brute:
    """Attention over the positions `visible(length)`: of another cache before `first`, from there its own."""

    def __init__(self, base: PagedKV, seq: int, first: int, visible) -> None:
        self.base, self.seq, self.first, self.visible, self.tail = base, seq, first, visible, {}

    def attend(self, layer, q, k, v, plan):
        (start,) = plan
        positions = [p for p in self.visible(start) if p < self.first]
        stored = self.base.span(self.seq, layer, 0, self.first)[:, :, positions]
        self.tail.setdefault(start, {})[layer] = torch.stack([k[0], v[0]])[:, :, None]
        drafted = [self.tail[p][layer] for p in sorted(self.tail) if p in self.visible(start)]
        keys, values = torch.cat([stored, *drafted], 2).double()
        group = q.shape[1] // keys.shape[0]
        weights = torch.softmax(q[0].double().view(-1, group, q.shape[2]) @ keys.mT * self.base.scale, -1)
        return (weights @ values).flatten()[None].float()


def test_streaming_is_masked_attention(random_llm):
    """Sinks and recent keys of the base, the tail's own: 23 tokens after 99, so that it is rebuilt under way."""
    base, tokens = random_llm.runner, text(123)
    seq = Sequence(tokens[:100], SamplingParams(max_tokens=50), 0)
    view = base.view("streaming:budget=32,sinks=3,rebuild=5")
    first = 99 - (32 - 5 - 3)  # what the first build leaves

    def visible(length):  # a rebuild keeps the tail, the sinks and as many recent keys as leave room for 5
        start = first
        for n in range(99, length + 1):
            if 3 + n + 1 - start > 32:
                start = n - (32 - 5 - 3)
        return [0, 1, 2, *range(start, length + 1)]

    brute = Brute(base.kv, seq.id, 99, visible)
    fork = seq.fork()
    for length in range(99, 122):
        logits = view.extend([fork]).logits[0][0]
        hidden = base.model.forward([tokens[length]], [length], [length + 1], brute, [length])
        torch.testing.assert_close(logits, base.model.logits(hidden)[0], rtol=1e-4, atol=1e-4)
        assert view.kv.held[seq.id].slot(length + 1) <= 32 and len(visible(length)) <= 32
        fork.tokens.append(tokens[length + 1])
    view.free(seq)
    base.free(seq)


def test_what_asks_no_query_reads_no_more_of_a_text_than_it_keeps(random_llm, monkeypatch):
    base, read = random_llm.runner, []
    span = base.kv.span
    monkeypatch.setattr(base.kv, "span", lambda *at: read.append(at[3] - at[2]) or span(*at))
    view, seq = base.view("streaming:budget=32,rebuild=5"), Sequence(text(200), SamplingParams(max_tokens=9), 0)
    view.extend([seq])
    assert read and max(read) <= 32
    view.free(seq)
    base.free(seq)


def test_a_cache_of_its_own_is_streaming_llm(random_llm):
    """Against the definition: keys un-rotated, rotated by their place in the cache at every step."""
    model, tokens = random_llm.runner.model, text(70)
    runner = random_llm.runner.view("streaming:budget=20,sinks=3,rebuild=4", alone=True)
    held: list[list[tuple[int, torch.Tensor, torch.Tensor]]] = [[], []]

    def turned(x, by):  # (heads, dim), position by position
        cos, sin = model.rotary([abs(by)], [1])
        return x * cos[0] + x.roll(8, -1) * sin[0] * (1 if by >= 0 else -1)

    class Places:
        def attend(self, layer, q, k, v, plan):
            held[layer].append((plan, turned(k[0], -plan), v[0]))
            if len(held[layer]) > 20:
                held[layer][3:] = held[layer][-(20 - 3 - 4) - 1 :]
            query = turned(turned(q[0], -plan), len(held[layer]) - 1)
            keys = torch.stack([turned(key, place) for place, (_, key, _) in enumerate(held[layer])], 1)
            values = torch.stack([value for *_, value in held[layer]], 1)
            weights = torch.softmax(query.view(2, -1, 16) @ keys.mT * 16**-0.5, -1)
            return (weights @ values).flatten()[None]

    seq = Sequence(tokens[:1], SamplingParams(max_tokens=100), 0)
    for at, token in enumerate(tokens):
        if at:
            seq.tokens.append(token)
        logits = runner.extend([seq]).logits[0][0]
        hidden = model.forward([token], [at], [at + 1], Places(), at)
        torch.testing.assert_close(logits, model.logits(hidden)[0], rtol=1e-3, atol=1e-3)
    assert runner.kv.held[seq.id].first > 40 and len(held[0]) <= 20


def test_the_tail_never_reaches_the_base(random_llm):
    """Drafting leaves the base's keys alone; verified keys replace the view's own, bit for bit."""
    base, tokens = random_llm.runner, text(90)
    view = base.view("retrieval:budget=40,chunk=4,recent=4,rebuild=12")
    seq = Sequence(tokens[:60], SamplingParams(max_tokens=50), 0)
    fork = seq.fork()

    def stored(runner, n):
        return [runner.kv.span(seq.id, layer, 0, n).clone() for layer in range(2)]

    view.extend([fork], [Draft.chain(text(5, 1))])
    before = stored(base, 59)
    fork.tokens += text(3, 2)
    view.extend([fork], [Draft([1, 2, 3, 4], [-1, -1, 0, 1])])
    assert all(map(torch.equal, before, stored(base, 59))) and len(base.slots[seq.id].tokens) == 59
    base.extend([seq])
    seq.tokens += tokens[60:64]
    view.extend([seq])
    h = view.kv.held[seq.id]
    assert h.synced == 63 and h.kept
    for own, exact in zip(view.kv.slab.store[seq.id], stored(base, 63), strict=True):
        assert torch.equal(own[:, :, h.slot(h.first) : h.slot(63)], exact[:, :, h.first : 63])
    base.free(seq)
    view.free(seq)


@pytest.mark.parametrize("arch, view", [
    ("llama", "streaming:budget=24,sinks=4,rebuild=2"), ("llama", "quantized:recent=0,rebuild=4"),
    ("llama", "snapkv:budget=24,sinks=3,window=4,recent=2,kernel=3,rebuild=4"),
    ("llama", "retrieval:budget=28,chunk=3,recent=0,rebuild=4"),
    ("gemma2", "snapkv:budget=26,recent=0,window=4,rebuild=6"),
    ("gemma2", "retrieval:budget=40,chunk=8,recent=4,rebuild=6"),
])  # fmt: skip
def test_a_view_holds_what_it_says(make_llm, arch, view):
    """However drafts fare: what is verified is the base's, what is kept stands in order, and the tail is its own."""
    llm = make_llm(arch, **({"sliding_window": 20} if arch == "gemma2" else {}))
    base, rng, tokens = llm.runner, random.Random(1), text(300)
    runner = base.view(view)
    kv, p = runner.kv, runner.kv.policy
    seq = Sequence(tokens[:50], SamplingParams(max_tokens=300), 0)

    def tail(n=None):
        h = kv.held[seq.id]
        end = h.slot(h.length) if n is None else h.slot(h.synced) + n
        return [own[:, :, h.slot(h.synced) : end].clone() for own in kv.slab.store[seq.id]]

    runner.extend([seq])
    while len(seq.tokens) < 260:
        fork = seq.fork()
        for _ in range(rng.randrange(3)):
            output = runner.extend([fork], [Draft([1, 2, 3, 4], [-1, -1, 0, 1])])
            h = kv.held[seq.id]
            start, stored = h.slot(h.length) - 4, kv.slab.store[seq.id]
            nodes = [own[:, :, [start + 1, start + 3]].clone() for own in stored]
            runner.commit([fork], output, [Verdict([1, 3], [])])
            assert all(torch.equal(own[:, :, start : start + 2], its) for own, its in zip(stored, nodes, strict=True))
            assert start + 4 <= p.budget
            fork.tokens += [2, 4, 5]
            before = tail()
            runner.extend([fork])
            assert all(map(torch.equal, before, tail(before[0].shape[2])))
        if rng.randrange(6) == 0:
            del seq.tokens[-rng.randrange(1, 9) :]
            tokens[len(seq.tokens) :] = text(300 - len(seq.tokens), len(seq.tokens))
        seq.tokens += tokens[len(seq.tokens) :][: rng.choice([1, 2, 3, 5, 11, 50])]
        runner.extend([seq])
        h, known = kv.held[seq.id], len(seq.tokens) - 1
        assert (h.synced, h.length) == (known, known + 1) and h.slot(h.length) <= p.budget
        for layer, own in enumerate(kv.slab.store[seq.id]):
            exact = base.kv.span(seq.id, layer, 0, known)
            assert torch.equal(own[:, :, h.kept : h.slot(known)], exact[:, :, h.first :])
            for keys, values, all_keys, all_values in zip(*own[:, :, : h.kept], *exact, strict=True):
                kept = (keys[:, None] == all_keys).all(-1).nonzero()[:, 1].tolist()
                assert len(kept) == h.kept and kept == sorted({*kept}) and torch.equal(values, all_values[kept])
                if kv.config.windows[layer] is not None:
                    assert kept == list(range(h.first - h.kept, h.first)), "slots tell distances"
                else:
                    assert kept[: p.sinks] == list(range(min(p.sinks, h.kept)))
    base.free(seq)
    runner.free(seq)


def test_history_that_is_lost_is_taken_again(random_llm):
    """A view, and a cache of its own, whose sequence is cut below what they still hold."""
    base, params = random_llm.runner, SamplingParams(max_tokens=50)
    for view in (base.view("streaming:budget=16,rebuild=4"), base.view("streaming:budget=16,rebuild=4", alone=True)):
        seq = Sequence(text(60), params, 0)
        view.extend([seq])
        del seq.tokens[12:]
        torch.testing.assert_close(view.extend([seq]).logits[0][0], logits_after(random_llm, seq.tokens))
        for runner in (base, view):
            runner.free(seq)


def test_only_the_end_of_a_long_prompt_is_read(random_llm):
    """A token feels what lies up to layers x budget before it; the draft's own context is no limit."""
    runner = random_llm.runner.view("streaming:budget=32", alone=True)
    rows, forward = 0, runner.model.forward
    tokens = text(5000)  # the model's context is 2048

    def counting(given, *rest):
        nonlocal rows
        rows += len(given)
        return forward(given, *rest)

    runner.model.forward = counting
    try:
        seq = Sequence(tokens, SamplingParams(max_tokens=9), 0)
        runner.extend([seq])
        assert 2 * 32 <= rows <= 2 * 32 + 1
        seq.tokens.append(3)
        runner.extend([seq])
        assert rows <= 2 * 32 + 2
    finally:
        del runner.model.forward


@pytest.mark.parametrize("right", [True, False])
def test_keys_are_chosen_anew_when_acceptance_falls(random_llm, right):
    base, tokens = random_llm.runner, text(220)
    view = base.view("retrieval:budget=128,chunk=4,recent=4,rebuild=40")
    seq = Sequence(tokens[:200], SamplingParams(max_tokens=50), 0)
    view.extend([seq])
    assert view.kv.held[seq.id].built == 199
    seq.tokens += tokens[200:212]  # a quarter of 40 has passed, there is room for the rest
    fork = seq.fork()
    fork.tokens += tokens[212:215] if right else [(t + 1) % 128 for t in tokens[212:215]]
    view.extend([fork])
    seq.tokens += tokens[212:216]
    view.extend([seq])
    assert view.kv.held[seq.id].built == (199 if right else 215)
    base.free(seq)
    view.free(seq)


# --- what is chosen ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 9, 37, 95])
def test_retrieval_finds_the_needle(at):
    """One key among 96 that the last query looks for, in the head that looks for it."""
    g = torch.Generator().manual_seed(at)
    keys, queries = torch.randn(2, 96, 16, generator=g), torch.randn(3, 4, 16, generator=g)
    keys[1, at] = 6 * queries[-1, 3]
    keys[0, at] = -6 * queries[-1, 0] - 6 * queries[-1, 1]
    index = parse("retrieval:budget=96,chunk=4,sinks=4,recent=0,rebuild=8").choose(queries, keys, 24, 0.25)
    assert index.shape == (2, 24) and bool((index.diff(dim=1) > 0).all())
    assert at in index[1].tolist() and set(range(4)) <= set(index[0].tolist())
    assert at < 4 or at not in index[0].tolist()
    chunks = index.view(2, 6, 4)
    assert bool((chunks % 4 == torch.arange(4)).all())  # whole chunks


def test_snapkv_keeps_what_the_window_attends_to():
    g = torch.Generator().manual_seed(0)
    keys, queries = torch.randn(2, 50, 16, generator=g), torch.randn(6, 6, 16, generator=g)
    policy = parse("snapkv:budget=50,window=6,recent=6,kernel=3,rebuild=8")
    index = policy.choose(queries, keys, 12, 0.25)
    for head in range(2):
        weights = torch.zeros(50)
        for row in range(6):
            for query in queries[row, 3 * head : 3 * head + 3]:
                weights += torch.softmax(keys[head] @ query * 0.25, 0) / 3
        pooled = torch.tensor([float(weights[max(0, i - 1) : i + 2].sum() / 3) for i in range(50)])
        assert sorted(pooled.topk(12).indices.tolist()) == index[head].tolist()


@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_error(bits):
    """Half a step: per channel and 64 tokens for keys, per token for values."""
    x = torch.randn(2, 3, 128, 16, generator=torch.Generator().manual_seed(0)) * 4 + 1
    out = torch.empty_like(x)
    codes = Codes.of(x, bits, 64)
    codes.exact(out)
    assert codes.code.numel() == x.numel() * bits // 8
    error = (out - x).abs()
    keys, values = x[0].view(3, 2, 64, 16), x[1]
    steps = (keys.amax(2) - keys.amin(2)) / (2**bits - 1), (values.amax(2) - values.amin(2)) / (2**bits - 1)
    assert bool((error[0].view(3, 2, 64, 16) <= steps[0][:, :, None] * 0.501).all())
    assert bool((error[1] <= steps[1][:, :, None] * 0.501).all())


def test_quantised_logits(random_llm):
    seq = Sequence(text(400), SamplingParams(max_tokens=9), 0)
    exact = logits_after(random_llm, seq.tokens)
    errors = []
    for bits in (8, 4):
        view = random_llm.runner.view(f"quantized:bits={bits},recent=8")
        errors.append(float((view.extend([seq]).logits[0][0] - exact).norm() / exact.norm()))
        random_llm.runner.free(seq)
    assert 0 < errors[0] < 0.05 < errors[1] < 0.5


def test_the_log_holds_the_last_queries():
    log, q = QueryLog(1), torch.arange(40.0).view(40, 1, 1)
    log.size = 3
    log.add(0, 0, 0, q[:10])
    log.truncate(0, 10)
    assert log.last(0, 0).flatten().tolist() == [7, 8, 9]
    log.add(0, 0, 10, q[10:15])  # a tree of five behind ten tokens
    log.keep(0, 10, [0, 2, 3])
    log.truncate(0, 13)
    assert log.last(0, 0).flatten().tolist() == [10, 12, 13]
    log.add(0, 0, 12, q[20:21])  # one back: what was there is replaced
    log.truncate(0, 13)
    assert log.last(0, 0).flatten().tolist() == [10, 12, 20]
    assert log.last(7, 0).numel() == 0
    log.add(0, 0, 13, q[21:23])  # past its room
    log.add(0, slice(None), 15, q[None, 23:40])
    assert log.last(0, 0).flatten().tolist() == [37, 38, 39]
    log.truncate(0, 16)
    assert log.last(0, 0).flatten().tolist() == [21, 22, 23]
    log.add(0, 0, 20, q[:1])  # tokens between were never seen
    assert log.last(0, 0).flatten().tolist() == [0]
    log.truncate(0, 5)
    assert log.last(0, 0).numel() == 0
    log.add(0, 0, 5, torch.arange(1000.0).view(-1, 1, 1))  # a prompt: only its end is kept
    assert log.last(0, 0).flatten().tolist() == [997, 998, 999] and log.held[0].rows.numel() < 600
    log.add(0, 0, 1005, torch.arange(1 + 2 * 256.0).view(-1, 1, 1))  # the largest draft, riders and all
    log.keep(0, 1006, [3, 5, 200])
    assert log.last(0, 0).flatten().tolist() == [4, 6, 201]


def test_nothing_is_kept_for_a_drafter_that_is_gone(random_llm):
    kv, prompt = random_llm.runner.kv, text(100)
    try:
        random_llm.speculative_config = {"method": "self", "view": "snapkv:budget=192"}
        assert kv.log.size > 0
        drafting = random_llm.drafting
        with pytest.raises(ConfigError):
            random_llm.speculative_config = {"method": "self", "view": "nonsense"}
        assert kv.log.size > 0, "the drafter that stays has lost its queries"
        random_llm.speculative_config = None
        plain = random_llm.generate(prompt, max_tokens=20, temperature=0)[0]
        assert kv.log.size == 0 and not random_llm.runner.taps
        random_llm.drafting = drafting
        again = random_llm.generate(prompt, max_tokens=20, temperature=0)[0]
        assert kv.log.size > 0 and again.token_ids == plain.token_ids
        assert random_llm.speculative_config.method == "self" and again.metrics["method"] == "self"
    finally:
        random_llm.speculative_config = None


# --- what it costs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("view", ["streaming:budget=512", "snapkv:budget=512", "retrieval:budget=512"])
def test_memory_is_the_budget(random_llm, view):
    runner = random_llm.runner.view(view)
    seq = Sequence(text(1900), SamplingParams(max_tokens=60), 0)
    for _ in range(50):
        runner.extend([seq])
        seq.tokens += text(3)
        random_llm.runner.extend([seq])
    held = sum(store.numel() * store.element_size() for store in runner.kv.slab.store[seq.id])
    assert held == runner.kv.nbytes(2000) == random_llm.runner.kv.nbytes(512) < random_llm.runner.kv.nbytes(2000) / 3
    runner.free(seq)
    random_llm.runner.free(seq)
    assert not runner.kv.slab.store and not runner.kv.held and not random_llm.runner.kv.log.held


def test_what_cannot_fit_is_refused_with_the_numbers(make_llm, make_checkpoint):
    """The target's cache, the view's and the draft's are counted before anything runs."""
    llm = make_llm()
    one = llm.runner.kv.nbytes(1024)
    llm = make_llm(engine={"kv_memory": int(1.6 * one)})
    draft = str(make_checkpoint(noise=0.02))
    assert len(llm.generate(text(1000), max_tokens=24, temperature=0)[0].token_ids) == 24
    for config in (
        {"method": "self", "view": "retrieval:budget=1024"},
        {"method": "cascade", "view": "retrieval:budget=256", "drafter": {"method": "draft_model", "model": draft}},
    ):
        llm.speculative_config = config
        with pytest.raises(
            RequestTooLong, match=r"1024 tokens .* need [\d,]+ KiB for keys and values, .* over the \d+"
        ):
            llm.generate(text(1000), max_tokens=24)
    llm.speculative_config = {"method": "triforce", "model": draft, "retrieval_budget": 256}
    assert llm.engine.drafter.kv_bytes(10**6) == llm.engine.drafter.kv_bytes(1000) == 2 * llm.runner.kv.nbytes(512)
    llm.speculative_config = {"method": "self", "view": "retrieval:budget=256"}
    assert len(llm.generate(text(1000), max_tokens=24, temperature=0)[0].token_ids) == 24


def test_acceptance_is_visible_at_each_level(random_llm, make_checkpoint):
    inner = {"method": "draft_model", "model": str(make_checkpoint(noise=0.02))}
    random_llm.speculative_config = {
        "method": "cascade", "num_speculative_tokens": 6, "view": "streaming:budget=64",
        "drafter": {"method": "cascade", "num_speculative_tokens": 4, "view": "streaming:budget=32", "drafter": inner},
    }  # fmt: skip
    output = random_llm.generate(text(80), max_tokens=40, temperature=0)[0]
    spec, levels = output.metrics["speculative_decoding"], []
    while spec:
        levels.append(spec)
        spec = spec.get("inner")
    assert len(levels) == 3 and all(0 < level["draft_acceptance_rate"] <= 1 for level in levels)
    steps = [level["num_spec_steps"] for level in levels]
    assert steps[0] < steps[1] < steps[2] and steps[1] < levels[0]["num_draft_tokens"]
    assert sum(levels[1]["per_step_accepted"]) + steps[1] >= levels[0]["num_draft_tokens"]


@pytest.mark.parametrize(
    "spec, message",
    [
        ("nonsense:budget=4", "view 'nonsense' is unknown; valid: streaming, snapkv, retrieval, quantized"),
        ("streaming:size=4", "'size=4' should be option=number; valid options: budget, sinks, rebuild"),
        ("retrieval:budget=-4", "budget must be a whole number of at least 1 and at most .*, not -4"),
        ("retrieval:budget", "'budget' should be option=number"),
        ("retrieval:budget=64", r"budget must be at least 172 \(4 sinks, 32 recent, 128 until .*\), not 64"),
        ("retrieval:chunk=0", "chunk must be a whole number of at least 1 and .*, not 0"),
        ("snapkv:kernel=4", "kernel must be odd, not 4"),
        ("quantized:bits=5", "bits must be 8 or 4, not 5"),
        ("quantized:budget=5", "valid options: recent, rebuild, bits"),
    ],
)
def test_impossible_views(random_llm, spec, message):
    for config in (
        {"method": "self", "view": spec},
        {"method": "cascade", "view": spec},
        {"method": "draft_model", "model": "tiny-draft", "kv": spec},
    ):
        with pytest.raises(ConfigError, match=message):
            random_llm.speculative_config = config
    with pytest.raises(ConfigError, match="can only be streaming, not retrieval"):
        random_llm.runner.view("retrieval", alone=True)


def test_colons_separate_too():
    assert parse("retrieval:budget=512:chunk=4") == parse("retrieval:chunk=4,budget=512")


@pytest.mark.parametrize("family, view", [
    ("llama", "streaming:budget=16"), ("llama", "quantized:recent=0,rebuild=1"),
    ("llama", "quantized:recent=0,rebuild=1,bits=4"),
    ("llama", "retrieval:budget=10,sinks=0,chunk=8,rebuild=1,recent=0"),
    ("llama", "snapkv:budget=8,window=1,recent=0,rebuild=1,kernel=1"),
    ("mistral", "retrieval:budget=9,recent=0,rebuild=1,chunk=4"),
])  # fmt: skip
def test_views_of_what_the_base_has_not_read(make_llm, make_checkpoint, family, view):
    """Prompts so short that the base holds no key when the view, at each level, has to choose some."""
    llm = make_llm(family, **({"sliding_window": 20} if family == "mistral" else {}))
    requests = [(text(n, n), replace(SAMPLED if n % 2 else GREEDY, max_tokens=30)) for n in (1, 2)]
    expected = [o.token_ids for o in run(llm, requests)]
    own = {"method": "self", "view": view, "num_speculative_tokens": 24}
    inside = {"method": "cascade", "view": view, "drafter": own, "num_speculative_tokens": 28}
    triforce = {"retrieval_budget": 180, "draft_cache_budget": 16, "inner_speculative_tokens": 20}
    for config in (
        own,
        {"method": "cascade", "view": "streaming:budget=16", "drafter": inside, "num_speculative_tokens": 26},
        {"method": "merge", "drafters": [own, {"method": "ngram"}], "num_speculative_tokens": 40},
        {"method": "triforce", "model": str(make_checkpoint(noise=0.01)), **triforce, "num_speculative_tokens": 26},
    ):
        llm.speculative_config = config
        assert [o.token_ids for o in run(llm, requests)] == expected, config


def test_a_drafter_in_a_view_finds_the_targets_folder():
    """Weights that are rounded anew are read from there."""
    llm = LLM("tiny", device="cpu", dtype="bfloat16")
    plain = llm.generate("Once upon a time", max_tokens=24, seed=1)[0]
    llm.speculative_config = {
        "method": "cascade", "view": "streaming:budget=64", "drafter": {"method": "self", "weights": "int4"},
    }  # fmt: skip
    output = llm.generate("Once upon a time", max_tokens=24, seed=1)[0]
    assert output.token_ids == plain.token_ids
    assert output.metrics["speculative_decoding"]["mean_acceptance_length"] > 2


def test_a_draft_longer_than_every_rebuild(random_llm):
    params = replace(SAMPLED, max_tokens=150)
    expected = random_llm.generate([7], params)[0].token_ids
    random_llm.speculative_config = {"method": "self", "view": "quantized:recent=0", "num_speculative_tokens": 140}
    assert random_llm.generate([7], params)[0].token_ids == expected
