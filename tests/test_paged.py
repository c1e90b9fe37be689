"""The pool of blocks: shared, copied before writing, preempted, cached; whole at the end, and no bit different."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import takewhile

import pytest
import torch
from helpers import ScriptedDrafter, assert_released, drive, oracle, rest, run, use
from test_exactness import config_of

from outrider import LLM, Draft, SamplingParams, drafters
from outrider.errors import OutOfMemory, PoolFull
from outrider.kv import Entry, Plan
from outrider.kv.blocks import BLOCK, WORTH, Pool
from outrider.kv.paged import SLAB, PagedKV
from outrider.runner import Runner, Slot
from outrider.sequence import Sequence

GREEDY = SamplingParams(max_tokens=12, temperature=0)
METHODS = [*drafters.methods(), "snapkv", "quantized"]


def text(n, seed=0):
    return random.Random(seed).choices(range(128), k=n)


def speculate(llm, method, make_checkpoint):
    """Let it draft by a method, or through a view of that name."""
    views = {"snapkv": "snapkv:budget=64,window=8,recent=8,rebuild=16", "quantized": "quantized:bits=8"}
    if method in views:
        llm.speculative_config = {"method": "self", "view": views[method]}
    else:
        llm.speculative_config = config_of(method, "random", make_checkpoint)


def shuffle(kv, seed=0):
    """Make the pool's free blocks come in any order."""
    free = kv.pool._free
    order = random.Random(seed)

    def take(again, take=kv.pool.take):
        if again:
            return take(again)
        block = free.pop(order.randrange(len(free)))
        kv.pool.holders[block] = 1
        free.sort()
        return block

    kv.pool.take = take


def blocks_of(llm, tokens):
    """kv_memory for so many blocks."""
    return tokens * llm.runner.kv.block_bytes


@pytest.fixture(scope="module")
def alone(make_llm):
    """The tokens of plain decoding, alone and on a cold cache: the same for every method, and computed once."""
    llm, known = make_llm(engine={"enable_prefix_caching": False}), {}

    def tokens(prompt, params):
        key = tuple(prompt), repr(params)
        if key not in known:
            known[key] = llm.generate(prompt, params)[0].token_ids
        return known[key]

    return tokens


# --- the books -------------------------------------------------------------------------------------------------------


def test_the_books_of_a_pool():
    pool, rng, held, tokens = Pool(), random.Random(0), [], {}
    pool.grow(40)
    for _ in range(3000):
        if held and rng.random() < 0.5:
            blocks = held.pop(rng.randrange(len(held)))
            pool.release(blocks)
        else:
            own = [rng.randrange(3) for _ in range(rng.randrange(6) * BLOCK)]
            own = [own[i // BLOCK * BLOCK] for i in range(len(own))]  # three kinds of blocks: prefixes meet
            found, n, before = pool.find("root", own, len(own))
            assert n == len(found) * BLOCK
            for block in found:
                assert tokens[block] == own[: (found.index(block) + 1) * BLOCK]
                pool.hold(block)
            blocks = list(found)
            for end in range((len(found) + 1) * BLOCK, len(own) + 1, BLOCK):
                if not pool.free and not pool.cached:
                    break
                blocks.append(pool.take(again=not pool.free))
                before = pool.publish(blocks[-1], before, own[end - BLOCK : end])
                tokens[blocks[-1]] = own[:end]
            held.append(blocks)
        counted = [sum(block in blocks for blocks in held) for block in range(40)]
        assert counted == pool.holders and pool.used + pool.free + len(pool.cached) == 40
        assert not set(pool.cached) & set(pool._free)
    for blocks in held:
        pool.release(blocks)
    assert not pool.used
    while pool.cached:
        pool.release([pool.take(again=True)])
    assert pool.free == 40 and not pool.behind


def test_a_block_that_comes_to_stand_behind_another_has_one_name():
    """It was read beside the first of its tokens, which have gone since."""
    pool = Pool()
    pool.grow(4)
    first, twin, last, _ = (pool.take(again=False) for _ in range(4))
    before = pool.publish(first, "root", [1] * BLOCK)
    assert pool.publish(twin, "root", [1] * BLOCK) == before
    pool.publish(last, before, [2] * BLOCK)
    pool.release([first])
    assert pool.take(again=True) == first
    pool.publish(last, pool.publish(twin, "root", [1] * BLOCK), [2] * BLOCK)
    assert sum(map(len, pool.behind.values())) == len(pool.names) == 2
    assert pool.find("root", [1] * BLOCK + [2] * BLOCK, 2 * BLOCK)[0] == [twin, last]


def test_whoever_shares_most_of_a_block_is_found():
    """Among all that stand behind the same, whole or the last of a sequence."""
    pool, rng, known = Pool(), random.Random(0), []
    pool.grow(300)
    for _ in range(300):
        before = rng.choice(["root", "other", *(number for _, tokens, number, _ in known if len(tokens) == BLOCK)])
        like = rng.choice([tokens for _, tokens, _, _ in known] or [()])
        tokens = (*like[: rng.randrange(BLOCK)], *(rng.randrange(3) for _ in range(BLOCK)))[
            : rng.choice([9, 20, BLOCK])
        ]
        block = pool.take(again=False)
        known.append((before, tokens, pool.publish(block, before, tokens), block))
    for _ in range(300):
        want, at = [], "root"
        while len(want) < 4 * BLOCK and rng.random() < 0.9:  # a way through them, that leaves some block in its midst
            ways = [(tokens, number) for before, tokens, number, _ in known if before == at]
            tokens, at = rng.choice(ways) if ways else ([0] * BLOCK, at)
            want += tokens[: BLOCK if rng.random() < 0.8 else rng.randrange(BLOCK)]
        blocks, n, root = pool.find("root", want, len(want))
        at, left = "root", want
        while True:
            there = {block: zip(tokens, left, strict=False) for before, tokens, _, block in known if before == at}
            shared = {
                block: sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], own)) for block, own in there.items()
            }
            most = max(shared.values(), default=0)
            if most < WORTH:
                assert not blocks and not n
                break
            n -= most
            assert shared[blocks.pop(0)] == most
            if most < BLOCK:
                assert not blocks and not n
                break
            at = next(number for before, tokens, number, _ in known if (before, tokens) == (at, tuple(left[:BLOCK])))
            left = left[BLOCK:]
        assert root == at


def test_the_oldest_go_first_and_the_last_blocks_before_the_first():
    pool = Pool()
    pool.grow(4)
    for name in ("a", "b"):
        blocks, before = [], name
        for i in range(2):
            blocks.append(pool.take(again=False))
            before = pool.publish(blocks[-1], before, [i] * BLOCK)
        pool.release(blocks)
    assert pool.find("a", [0] * BLOCK, BLOCK)[0] == [0]
    pool.hold(0)
    pool.release([0])  # used just now
    assert [pool.take(again=True) for _ in range(4)] == [1, 3, 2, 0]


# --- bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@torch.inference_mode()
def test_rows_do_not_know_their_blocks(make_checkpoint, dtype):
    """Prefill, decoding, trees and rejections, over slabs, with tables in order and shuffled."""
    results, params = [], SamplingParams(max_tokens=99)
    for seed in (None, 1, 2):
        llm = LLM(make_checkpoint(), device="cpu", dtype=dtype)
        if seed is not None:
            shuffle(llm.runner.kv, seed)
        llm.runner.chunk = 200
        long, short = Sequence(text(SLAB + 90), params, 0), Sequence(text(7), params, 0)
        results.append(drive(llm, long, short, rounds=12))
        ids = llm.runner.kv.tables[long.id].blocks
        assert (ids == sorted(ids)) is (seed is None)
        llm.runner.free(long)
        llm.runner.free(short)
        assert_released(llm)
    assert all(map(torch.equal, results[0], results[1])) and all(map(torch.equal, results[0], results[2]))


@pytest.mark.parametrize("method", METHODS)
def test_shuffled_blocks_give_the_same_tokens(make_llm, make_checkpoint, method):
    requests = [(text(n, n), SamplingParams(temperature=0.7, seed=n, max_tokens=24)) for n in (300, 20, 95, 64)]
    llm = make_llm(engine={"enable_prefix_caching": False})
    expected = [o.token_ids for o in run(llm, requests)]
    speculate(llm, method, make_checkpoint)
    shuffle(llm.runner.kv)
    assert [o.token_ids for o in run(llm, requests)] == expected


@torch.inference_mode()
def test_spans_and_choices(make_llm):
    kv: PagedKV = make_llm().runner.kv
    shuffle(kv)
    kv.most = None
    n = SLAB + 300
    k, v = torch.randn(2, n, 2, 16)
    kv.reserve(Plan([Entry(5, 0, n, 0)]))
    kv.write(5, 1, 0, k, v)
    whole = torch.stack([k, v]).transpose(1, 2)
    assert torch.equal(kv.span(5, 1, 0, n), whole)
    for begin, end in ((0, 0), (3, 4), (31, 33), (100, 1200), (n - 1, n)):
        assert torch.equal(kv.span(5, 1, begin, end), whole[:, :, begin:end])
    assert torch.equal(kv.span(5, 1, 9, 99, slice(1)), whole[:1, :, 9:99])
    index = torch.stack([torch.randperm(n)[:200], torch.randperm(n)[:200]])
    expected = torch.stack([whole[:, head, own] for head, own in enumerate(index)], 1)
    assert torch.equal(kv.chosen(5, 1, index), expected)
    kv.free(5)


# --- sharing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [5, 63, 64, 65, 100])
def test_outputs_of_one_prompt_share_its_blocks(make_llm, caching, length):
    params = SamplingParams(n=5, temperature=0.9, seed=3, max_tokens=40)
    llm, prompt = make_llm(engine={"enable_prefix_caching": caching}), text(length)
    expected = [llm.generate(prompt, replace(params, n=1, seed=3 + i))[0].token_ids for i in range(5)]
    llm = make_llm(engine={"enable_prefix_caching": caching})
    requests, most = llm.engine.add(prompt, params), 0
    rows, forward = [], llm.runner._forward
    llm.runner._forward = lambda seqs, tokens, *more: rows.append(len(tokens)) or forward(seqs, tokens, *more)
    while llm.engine.waiting or llm.engine.running:
        llm.engine.step()
        most = max(most, llm.runner.kv.pool.used)
    assert [r.seq.output for r in requests] == expected
    assert sum(rows) == length + 4 + 5 * 39  # the prompt once, its last token for each
    shared, own = (length - 1) // BLOCK, -(-(length + 39) // BLOCK) - (length - 1) // BLOCK
    assert most <= shared + 5 * own
    assert [r.cached for r in requests] == [0] + [length - 1] * 4
    assert_released(llm)


# --- preemption ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_a_small_pool_preempts_and_changes_no_bit(make_llm, make_checkpoint, alone, method, caching):
    """Random arrivals and aborts; each answer is what plain decoding alone gives."""
    rng = random.Random(7)
    shared = text(70, 9)
    wanted = [
        (shared[: rng.choice((0, 40, 70))] + text(rng.randrange(1, 30), i),
         SamplingParams(temperature=rng.choice((0, 0.8)), seed=i, max_tokens=rng.randrange(20, 100)), rng.randrange(3))
        for i in range(12)
    ]  # fmt: skip
    expected = [alone(prompt, params) for prompt, params, _ in wanted]
    large = make_llm()
    speculate(large, method, make_checkpoint)
    memory = blocks_of(large, 8) + 2 * large.engine.guard.kv_bytes(200)
    llm = make_llm(engine={"kv_memory": memory, "enable_prefix_caching": caching, "max_num_batched_tokens": 48})
    speculate(llm, method, make_checkpoint)
    engine, requests, doomed = llm.engine, [], {3, 8}
    steps = 0
    while len(requests) < len(wanted) or engine.waiting or engine.running:
        if len(requests) < len(wanted) and rng.random() < 0.4:
            prompt, params, priority = wanted[len(requests)]
            requests += engine.add(prompt, params, priority=priority)
        for i in doomed & set(range(len(requests))):
            if len(requests[i].seq.output) > 5 and rng.random() < 0.2:
                engine.abort(requests[i])
        engine.step()
        steps += 1
        assert llm.runner.kv.pool.used * llm.runner.kv.block_bytes <= memory and steps < 5000
    assert engine.preemptions > 0 or method not in ("none", "ngram")
    assert engine.leaked == 0
    for i, (request, tokens) in enumerate(zip(requests, expected, strict=True)):
        if request.seq.finish_reason == "abort" and i in doomed:
            tokens = tokens[: len(request.seq.output)]
        assert request.seq.output == tokens and request.error is None
    assert_released(llm)


def test_the_newest_of_the_lowest_priority_goes_first(make_llm):
    llm = make_llm()
    params = SamplingParams(temperature=0, max_tokens=100)
    expected = [llm.generate(text(20, i), params)[0].token_ids for i in range(3)]
    llm = make_llm(engine={"kv_memory": blocks_of(llm, 8), "enable_prefix_caching": False})
    gone, preempt = [], llm.engine._preempt
    llm.engine._preempt = lambda request: gone.append(request) or preempt(request)
    requests = [llm.engine.add(text(20, i), params, priority=p)[0] for i, p in enumerate((0, 1, 1))]
    llm.engine.finish(requests)
    assert [r.seq.output for r in requests] == expected
    assert gone[0] is requests[2] and requests[0] not in gone and llm.engine.preemptions == len(gone)
    assert_released(llm)


def test_a_pool_nearly_full_while_verifying(make_llm):
    """A draft that does not fit is not worth a preemption; alone, it goes without."""
    llm, params = make_llm(), SamplingParams(temperature=0, max_tokens=43)
    prompts = [text(20), text(21, 1)]
    expected = [llm.generate(p, params)[0].token_ids for p in prompts]
    llm = make_llm(engine={"kv_memory": blocks_of(llm, 4)})
    wrong = ScriptedDrafter(lambda seq, k: Draft([1] * 40, [-1] * 40))
    for drafter in (wrong, ScriptedDrafter(oracle(dict(zip(map(tuple, prompts), expected, strict=True))))):
        use(llm, drafter, 40)
        requests = [llm.engine.add(p, params)[0] for p in prompts]
        llm.engine.finish(requests)
        assert [r.seq.output for r in requests] == expected and not llm.engine.preemptions
        assert llm.runner.kv.most == 4
        assert_released(llm)


def test_a_full_pool_says_so(make_llm):
    runner = make_llm().runner
    runner.kv.most = 2
    seq = Sequence(text(100), GREEDY, 0)
    with pytest.raises(PoolFull, match="all 2 blocks"):
        runner.extend([seq])
    runner.free(seq)


def test_memory_that_gives_out_is_a_full_pool(make_llm, monkeypatch):
    """Requests that there is no memory for wait for others."""
    llm = make_llm(engine={"enable_prefix_caching": False})
    grow = PagedKV._grow
    prompts = [text(SLAB // 4 + i) for i in range(6)]
    expected = [llm.generate([prompt], GREEDY)[0].token_ids for prompt in prompts]

    def scarce(self):
        if self.slabs:
            raise OutOfMemory("no 1 MiB left")
        grow(self)

    monkeypatch.setattr(PagedKV, "_grow", scarce)
    assert [output.token_ids for output in llm.generate(prompts, GREEDY)] == expected and llm.engine.preemptions
    with pytest.raises(PoolFull, match="no 1 MiB left"):  # one that is alone
        llm.generate([text(SLAB + 9)], GREEDY)
    monkeypatch.undo()
    assert len(llm.generate([text(SLAB + 9)], GREEDY)[0].token_ids) == 12, "there is memory again"
    assert_released(llm)


def test_idle_memory_is_small(make_llm):
    """A long text's slabs go with it; the first stays."""
    llm = make_llm(engine={"enable_prefix_caching": False}, max_position_embeddings=8 * SLAB)
    llm.generate(text(5 * SLAB), max_tokens=1)
    assert len(llm.runner.kv.slabs) == 1 and llm.runner.kv.pool.free == SLAB // BLOCK


def test_a_slab_is_asked_once_where_it_lies(make_checkpoint):
    """A pool of a million tokens has a thousand slabs: each that comes or goes must cost nothing of the others."""
    model, asked = LLM(make_checkpoint(), device="cpu", dtype="bfloat16").runner.model, []

    class Layer:
        def __init__(self, at):
            self.at = at

        def data_ptr(self):
            asked.append(self.at)
            return self.at

    kv = PagedKV(model.config, model.dtype, model.device)
    layers = range(model.config.num_layers)
    kv._slab = lambda size: [Layer(100 * len(kv.slabs) + layer) for layer in layers]
    for seq in (1, 2):
        kv.reserve(Plan([Entry(seq, 0, 4 * SLAB, 0)]))
    assert kv._pointers.tolist() == [[100 * slab + layer for slab in range(8)] for layer in layers]
    assert asked == [100 * slab + layer for slab in range(8) for layer in layers]
    for seq, left in ((2, 4), (1, 1)):
        kv.free(seq)
        assert len(kv.slabs) == left and len(kv.pool.holders) == left * SLAB // BLOCK
        assert kv._pointers.tolist() == [[100 * slab + layer for slab in range(left)] for layer in layers]
        assert kv._pointers.is_contiguous() and kv._slabs_at == kv._pointers.data_ptr()
    assert len(asked) == 8 * len(layers)


# --- prefixes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_warm_is_cold(make_llm, make_checkpoint, alone, method):
    """Another's prefix, one's own answer, a hit up to the last token, a draft over a block's edge."""
    warm = make_llm()
    speculate(warm, method, make_checkpoint)
    base = text(130)
    params = [SamplingParams(temperature=t, seed=4, max_tokens=40) for t in (0, 0.9)]
    prompts = [base, base, base[:96], base[:97], base[:95], [*base, 5, 6], [*base[:64], *text(40, 2)], [9, *base[1:]]]
    log = warm.runner.kv.log  # a view chooses its keys by the queries of the last tokens

    def hit(prompt, common):
        over = (most := min(common, len(prompt) - 1 - log.size)) % BLOCK
        return most - (over if over < WORTH else 0)

    found = []
    for i, prompt in enumerate(prompts):
        for p in params:
            expected = alone(prompt, p)
            (request,) = warm.engine.add(prompt, p)
            warm.engine.finish([request])
            assert request.seq.output == expected, i
            found.append(request.cached)
            again = [*prompt, *expected]
            if len(expected) > 30 and i < 3:
                (request,) = warm.engine.add(again, p)
                warm.engine.finish([request])
                assert request.seq.output == alone(again, p)
                assert request.cached == hit(again, len(again))
    commons = [(0, 130), (130, 130), (96, 96), (97, 97), (95, 95), (130, 132), (64, 104), (0, 130)]
    assert found == [hit(prompt, n) for prompt, both in zip(prompts, commons, strict=True) for n in both]
    assert log.size or found == [0, 128, 128, 128, 95, 95, 96, 96, 94, 94, 128, 128, 64, 96, 0, 128]
    assert_released(warm)


def test_logits_are_the_same_bits_behind_a_cached_prefix(make_llm):
    llm = make_llm()
    assert llm.exactness in ("bitwise", "law")
    seqs = [Sequence(text(100), GREEDY, 0) for _ in range(2)]
    logits = []
    for seq in seqs:
        found = llm.runner.begin(seq)
        logits.append(llm.runner.extend([seq], [Draft.chain(text(40, 1))]).flat)
        llm.runner.free(seq)
    assert (torch.equal(*logits) or llm.exactness == "law") and found == 96


def test_a_sibling_of_who_has_nothing_yet_looks_among_prefixes(make_llm):
    """As outputs of one prompt do that begin again."""
    llm = make_llm()
    first, second, third = (Sequence(text(100), GREEDY, 0) for _ in range(3))
    llm.runner.extend([first])
    llm.runner.free(first)
    llm.runner.slots[second.id] = Slot()
    assert llm.runner.begin(third, second) == 96


def test_salts_keep_prefixes_apart(make_llm):
    llm, prompt = make_llm(), text(100)

    def cached(**options):
        (request,) = llm.engine.add(prompt, GREEDY, **options)
        llm.engine.finish([request])
        return request.cached

    assert [cached(), cached(), cached(cache_salt="a"), cached(cache_salt="a"), cached(cache_salt="b")] == [
        0, 96, 0, 96, 0
    ]  # fmt: skip
    assert cached() == cached(cache_salt="b") == 96
    assert (llm.engine.prefix_queries, llm.engine.prefix_hits) == (700, 4 * 96)


def test_only_verified_tokens_are_found(make_llm):
    """Rejected drafts, and what a fork supposed, are nobody's prefix."""
    llm = make_llm()
    prompt, params = text(60), SamplingParams(temperature=0, max_tokens=6)
    (expected,) = (o.token_ids for o in make_llm().generate(prompt, params))
    wrong = [(t + 1) % 128 for t in expected]
    use(llm, ScriptedDrafter(lambda seq, k: Draft.chain(wrong[:5])), 5)
    llm.engine.finish(llm.engine.add(prompt, params))
    for tail, hit in ((wrong, 60), (expected, 64)):
        (request,) = llm.engine.add([*prompt, *tail, 1], params)
        llm.engine.finish([request])
        assert request.cached == hit
    assert_released(llm)


def test_offloaded_keys_can_be_read_right_behind_a_forward(make_llm):
    """By a view, say, which is not told that they are yet to be written back."""
    plain, away = make_llm(), make_llm(engine={"kv_offload": True})
    seq, index = Sequence(text(70), SamplingParams(max_tokens=9), 0), torch.tensor([[0, 40, 70], [1, 2, 69]])
    reads = [lambda kv, layer: kv.span(seq.id, layer, 0, 70), lambda kv, layer: kv.chosen(seq.id, layer, index)]
    for token, read in zip([1, 2], reads, strict=True):
        for llm in (plain, away):
            llm.runner.extend([seq], [Draft.chain([token + 50])])  # not what comes there
        for layer in (0, 1):
            assert torch.equal(read(away.runner.kv, layer), read(plain.runner.kv, layer))
        seq.tokens.append(token)
    for llm in (plain, away):
        llm.runner.free(seq)
        assert_released(llm)


def test_what_an_aborted_request_has_read_is_written_back(make_llm):
    """From the device: the next one with its prompt finds it in host memory."""
    llm, prompt = make_llm(engine={"kv_offload": True, "max_num_batched_tokens": 40}), text(300)
    llm.engine.add([5], replace(GREEDY, max_tokens=30))
    llm.engine.step()
    (gone,) = llm.engine.add(prompt, GREEDY)
    for _ in range(3):
        llm.engine.step()
    llm.engine.abort(gone)
    (again,) = llm.engine.add(prompt, GREEDY)
    llm.engine.finish([again, *llm.engine.running])
    assert 0 < again.cached < 299 and again.seq.output == make_llm().generate(prompt, GREEDY)[0].token_ids
    assert_released(llm)


def test_the_last_tokens_are_read_where_views_look_at_queries(make_llm):
    llm = make_llm()
    for view, found in (("streaming:budget=64", 99), ("snapkv:budget=64,window=8,recent=8,rebuild=16", 92)):
        llm.speculative_config = {"method": "self", "view": view}
        for prompt in (text(100), text(100)):
            (request,) = llm.engine.add(prompt, GREEDY)
            llm.engine.finish([request])
        assert found - BLOCK < request.cached <= found
    assert_released(llm)


def test_behind_a_branch_that_was_summed_otherwise_nothing_is_found(make_llm, monkeypatch):
    """Without kernels its keys lay in other slots."""
    llm, params = make_llm(), SamplingParams(temperature=0, max_tokens=40)
    (expected,) = (o.token_ids for o in make_llm().generate(text(60), params))
    monkeypatch.setattr(Runner, "follows_paths", False)
    use(llm, ScriptedDrafter(lambda seq, k: Draft([0, rest({tuple(text(60)): expected}, seq)[0]], [-1, -1])), 2)
    llm.engine.finish(llm.engine.add(text(60), params))
    (request,) = llm.engine.add([*text(60), *expected, 1], GREEDY)
    llm.engine.finish([request])
    assert 60 <= request.cached < 64
    assert_released(llm)


def test_a_prompt_under_way_is_found_block_by_block(make_llm):
    llm = make_llm(engine={"max_num_batched_tokens": 40})
    (first,) = llm.engine.add(text(200), GREEDY)
    for _ in range(4):
        llm.engine.step()
    (second,) = llm.engine.add([*text(150), 3], GREEDY)
    llm.engine.finish([first, second])
    assert second.cached == 150
    plain = make_llm(engine={"enable_prefix_caching": False})
    assert second.seq.output == plain.generate([*text(150), 3], GREEDY)[0].token_ids
    assert_released(llm)


@pytest.mark.parametrize("reads", [40, 512])
def test_a_beginning_that_many_share_is_read_once(make_llm, reads):
    """They wait for who reads it; others do not, nor do they for one that comes after them."""
    llm = make_llm(engine={"max_num_batched_tokens": reads})
    base = text(100)
    prompts = [[*base, *text(20, i)] for i in range(1, 5)] + [text(90, 9), [*base[:70], 1, 2]]
    requests = [llm.engine.add(prompt, GREEDY)[0] for prompt in prompts]
    llm.engine.step()
    assert [r in llm.engine.running for r in requests] == [True, False, False, False, True, False]
    (urgent,) = llm.engine.add([*base, 7], GREEDY, priority=-1)
    (salted,) = llm.engine.add([*base, 8], GREEDY, cache_salt="own")
    llm.engine.step()
    assert {urgent, salted} <= {*llm.engine.running} and (reads > 40 or not urgent.cached)
    llm.engine.finish([*requests, urgent, salted])
    assert [r.cached for r in requests] == [0, 96, 96, 96, 0, 64] and not salted.cached
    plain = make_llm(engine={"enable_prefix_caching": False})
    for request in requests:
        assert request.seq.output == plain.generate(request.seq.tokens[: request.seq.prompt_len], GREEDY)[0].token_ids
    assert_released(llm)


def test_of_several_beginnings_each_is_read_once(make_llm):
    """Two questions on each of three documents, behind the same words."""
    llm = make_llm(engine={"max_num_batched_tokens": 64})
    prompts = [[*text(70), *text(200, document), question] for document in (1, 2, 3) for question in (1, 2)]
    requests = [llm.engine.add(prompt, GREEDY)[0] for prompt in prompts]
    llm.engine.finish(requests)
    assert [r.cached for r in requests] == [0, 256, 64, 256, 64, 256]
    assert_released(llm)


@pytest.mark.parametrize("limit", ["places", "room"])
def test_who_waits_for_another_loses_no_place(make_llm, limit):
    """What came later is not let in where that would keep it out."""
    llm = make_llm(engine={"max_num_batched_tokens": 40, **({"max_num_seqs": 2} if limit == "places" else {})})
    if limit == "room":
        llm.engine.kv_memory = blocks_of(llm, 7 + 7 + 2)
    first, second, later = (
        llm.engine.add(prompt, GREEDY)[0] for prompt in ([*text(200), 0], [*text(200), 1], text(90, 5))
    )
    for _ in range(5):  # steps in which only the first reads
        llm.engine.step()
        assert llm.engine.running == [first]
    llm.engine.step()
    assert second in llm.engine.running
    llm.engine.finish([first, second, later])
    assert_released(llm)


def test_who_has_nothing_to_find_waits_for_nobody(make_llm):
    """Whose first 64 tokens are others, or who measures its prompt, which it has to read all the same."""
    llm = make_llm(engine={"max_num_batched_tokens": 40})
    base, measured = text(200), replace(GREEDY, prompt_logprobs=0)
    llm.generate(text(200, 3), max_tokens=1)
    prompts = [base, [*base[:60], *text(90, 1)], [*text(32, 2), *base[32:]]]
    requests = [llm.engine.add(prompt, GREEDY)[0] for prompt in prompts]
    requests += [llm.engine.add(text(200, 3), measured)[0] for _ in range(2)]
    llm.engine.step()
    assert llm.engine.running == requests
    llm.engine.finish(requests)
    assert not any(request.cached for request in requests[3:])
    assert all(None not in request.prompt_logprobs[1:] for request in requests[3:])
    assert_released(llm)


def test_the_most_urgent_of_those_that_read_is_waited_for(make_llm):
    llm = make_llm(engine={"max_num_batched_tokens": 16})
    requests = []
    for priority in (2, 1, 1):
        requests += llm.engine.add([*text(200), len(requests)], GREEDY, priority=priority)
        llm.engine.step()
    assert llm.engine.running == [requests[1], requests[0]]
    llm.engine.finish(requests)
    assert_released(llm)


def test_who_does_not_fit_yet_holds_nothing(make_llm):
    llm = make_llm()
    llm = make_llm(engine={"kv_memory": blocks_of(llm, 8)})
    llm.generate(text(64), max_tokens=1)
    first, second = (llm.engine.add([*text(64), *text(80, i)], GREEDY)[0] for i in (1, 2))
    llm.engine.step()
    llm.engine.step()
    assert llm.engine.waiting == [second] and second.seq.id not in llm.runner.kv.tables
    llm.engine.finish([first, second])
    assert_released(llm)


def test_who_does_not_fit_yet_is_looked_for_when_there_is_more_room(make_llm, monkeypatch):
    """To find what is there of a long prompt, and to hold it, takes as long as a step: not again and again."""
    llm, sought, find = make_llm(), list[int](), Pool.find
    llm = make_llm(engine={"kv_memory": blocks_of(llm, 20)})
    llm.generate(text(256), max_tokens=1)
    monkeypatch.setattr(Pool, "find", lambda self, *of: sought.append(of[2]) or find(self, *of))
    first, second = (llm.engine.add(text(40, i), SamplingParams(max_tokens=100, temperature=0))[0] for i in (1, 2))
    llm.engine.step()
    last = llm.engine.add(text(256) + text(150, 3), GREEDY)[0]
    llm.engine.finish([first, second, last])
    assert last.cached == 256 and len(sought) < 10
    assert_released(llm)


def test_outputs_that_begin_otherwise_share_the_prompt_alone(make_llm, alone):
    """As they do that another engine has begun."""
    llm, params = make_llm(), SamplingParams(n=2, seed=1, max_tokens=50)
    expected = [alone(text(60), replace(params, n=1, seed=seed)) for seed in (1, 2)]
    for cached in ([0, 60], [60, 60]):  # of the prompt, whatever else is found
        requests = llm.engine.add(text(60), params, begun=[tokens[:40] for tokens in expected])
        llm.engine.finish(requests)
        assert [request.seq.output for request in requests] == expected
        assert [request.cached for request in requests] == cached and expected[0][:40] != expected[1][:40]
    assert_released(llm)


def test_outputs_of_a_prompt_go_on_without_the_first(make_llm, alone):
    """It was aborted before it had read the prompt, which the others waited for."""
    llm = make_llm(engine={"max_num_batched_tokens": 40})
    params = SamplingParams(n=3, seed=1, max_tokens=5)
    first, *others = llm.engine.add(text(100), params)
    llm.engine.step()
    llm.engine.abort(first)
    for _ in range(20):
        llm.engine.step()
    assert [r.seq.output for r in others] == [alone(text(100), replace(params, n=1, seed=seed)) for seed in (2, 3)]
    assert_released(llm)


@pytest.mark.parametrize("shared", [100, 0])
def test_a_long_queue_is_not_looked_through(make_llm, monkeypatch, shared):
    """No step looks at more that wait than there are places, nor more than once at each."""
    llm = make_llm(engine={"max_num_seqs": 8, "max_num_batched_tokens": 40})
    requests = [llm.engine.add([*text(shared), *text(70, i)], GREEDY)[0] for i in range(1, 40)]
    asked, may_find = [], llm.runner.may_find
    monkeypatch.setattr(llm.runner, "may_find", lambda seq: asked.append(seq) or may_find(seq))
    while not all(request.finished for request in requests):
        asked.clear()
        llm.engine.step()
        assert len(asked) <= 2 * 8
    assert_released(llm)


def test_nobody_waits_for_one_that_ends(make_llm):
    llm = make_llm(engine={"max_num_batched_tokens": 40})
    first, second = (llm.engine.add([*text(200), i], GREEDY)[0] for i in range(2))
    llm.engine.step()
    assert llm.engine.running == [first]
    llm.engine.abort(first)
    llm.engine.step()
    assert llm.engine.running == [second] and second.cached == 40 // BLOCK * BLOCK + 40 % BLOCK
    llm.engine.finish([second])
    assert_released(llm)


def test_who_leaves_before_it_has_read_changes_nothing(make_llm):
    """As one does that does not fit yet."""
    llm = make_llm()
    llm.generate(text(60), max_tokens=1)
    for prompt, found in (([*text(50), 1, 2], 50), ([*text(58), 1, 2], 58)):
        seq = Sequence(prompt, GREEDY, 0)
        assert llm.runner.begin(seq) == found
        llm.runner.free(seq)
    assert_released(llm)


def test_what_only_the_books_hold_is_written_to_where_there_is_no_other_room(make_llm):
    """A block's beginning is shared by copying it; the last request of a full pool takes it over instead."""
    llm = make_llm()
    prompt = text(80)
    expected = make_llm().generate([*prompt, 5], max_tokens=15, temperature=0)[0].token_ids
    llm = make_llm(engine={"kv_memory": blocks_of(llm, 3)})
    llm.generate(prompt, max_tokens=1)
    (request,) = llm.engine.add([*prompt, 5], SamplingParams(temperature=0, max_tokens=15))
    llm.engine.finish([request])
    assert request.seq.output == expected and request.cached == 80 and not request.error
    assert_released(llm)


def test_what_another_holds_is_never_written_to(make_llm):
    kv, tokens = make_llm().runner.kv, text(40)
    kv.reserve(Plan([Entry(1, 0, 40, 0)]))
    kv.publish(1, tokens, 40, "root", True)
    kv.free(1)
    assert [kv.adopt(seq, [*tokens, 1], "root") for seq in (2, 3)] == [40, 40]
    kv.most = 2
    with pytest.raises(PoolFull):
        kv.reserve(Plan([Entry(2, 0, 1, 40)]))
    kv.free(3)
    kv.reserve(Plan([Entry(2, 0, 1, 40)]))
    assert kv.adopt(4, [*tokens, 1], "root") == BLOCK
    kv.free(2)
    kv.free(4)
    assert not kv.pool.used


def test_dynamic_rope_shares_only_what_is_the_same(make_checkpoint):
    """There, a prompt's keys depend on its length."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    path = make_checkpoint(max_position_embeddings=48, rope_parameters=rope)
    warm = LLM(path, device="cpu", dtype="float32")
    for n in (100, 140, 100, 66):
        cold = LLM(path, device="cpu", dtype="float32", enable_prefix_caching=False)
        prompt = text(140)[:n]
        (request,) = warm.engine.add(prompt, GREEDY)
        warm.engine.finish([request])
        assert request.seq.output == cold.generate(prompt, GREEDY)[0].token_ids
    assert warm.engine.prefix_hits == 96


def test_across_a_border_nothing_is_shared(make_checkpoint):
    """LongRoPE turns all keys of a sequence otherwise from some length on."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8, "original_max_position_embeddings": 60}
    path = make_checkpoint(rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, **factors})
    warm = LLM(path, device="cpu", dtype="float32", max_num_seqs=2)
    cold = LLM(path, device="cpu", dtype="float32", enable_prefix_caching=False)
    params = SamplingParams(seed=1, max_tokens=40)
    (crosses,) = warm.engine.add(text(50), params)
    warm.engine.finish([crosses])
    for prompt in (crosses.seq.tokens[:58], crosses.seq.tokens[:80]):
        (request,) = warm.engine.add(prompt, GREEDY)
        warm.engine.finish([request])
        assert request.cached >= 32 and request.seq.output == cold.generate(prompt, GREEDY)[0].token_ids
    beside = warm.engine.add(text(20, 5), replace(params, max_tokens=10), priority=-1)
    outputs = warm.engine.add(text(58, 6), replace(params, n=2))  # the second begins when the first is across
    warm.engine.finish([*beside, *outputs])
    for request, seed in zip(outputs, (1, 2), strict=True):
        assert request.seq.output == cold.generate(text(58, 6), replace(params, seed=seed))[0].token_ids
    assert_released(warm)


def test_the_cache_gives_way(make_llm):
    """Cached blocks are taken when they are wanted, and count as free."""
    llm = make_llm()
    llm = make_llm(engine={"kv_memory": blocks_of(llm, 6)})
    for i in range(5):
        llm.generate(text(100, i), GREEDY)
        assert len(llm.runner.kv.pool.cached) <= 6 and llm.engine.kv_usage == 0
    (request,) = llm.engine.add(text(100, 4), GREEDY)
    llm.engine.finish([request])
    assert request.cached == 96 and not llm.engine.preemptions
    assert_released(llm)
