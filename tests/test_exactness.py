"""The promise: the same request with the same seed gives the same tokens with speculation on or off.

Every method that `drafters.methods()` finds is put through all of it; nobody writes a test for a new one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from weakref import WeakKeyDictionary

import pytest
import torch
from helpers import (
    ScriptedDrafter,
    assert_released,
    logits_after,
    oracle,
    random_eagle3,
    random_heads,
    random_recurrent,
    repeating_eagle3,
    run,
    use,
)

from outrider import LLM, Draft, SamplingParams, drafters, runner
from outrider.config import SpeculativeConfig
from outrider.corpus import fingerprint
from outrider.datastore import write
from outrider.errors import OutriderError
from outrider.export import quantize
from outrider.find import find
from outrider.kv import PagedKV
from outrider.load import read_tokenizer
from outrider.model import Model
from outrider.ops import native
from outrider.quantize import ACTIVATIONS
from outrider.runner import SCORED
from outrider.sampling import Row, choose, gumbel
from outrider.sequence import Sequence


def make_datastore(universe: str, make) -> str:
    """A store of phrases for `rest`, made once."""
    path = make().parent / f"{universe}.store"
    if not path.exists():
        seeded = torch.Generator().manual_seed(4)
        tokenizer = read_tokenizer(find("tiny")) if universe == "tiny" else None
        texts = [*TEXTS, "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."]
        documents = (
            tokenizer(texts)["input_ids"] if tokenizer else torch.randint(128, (9, 5000), generator=seeded).tolist()
        )
        sizes = (1 + max(tokenizer.get_vocab().values()), fingerprint(tokenizer)) if tokenizer else (128,)
        write(documents, path, *sizes)
    return str(path)


def eagle3_head(universe: str, make) -> str:
    """A random head; of `tiny`, one that guesses the last token again."""
    if universe != "tiny":
        return str(random_eagle3(make(), eagle_aux_hidden_state_layer_ids=[0, 1, 2]))
    return str(repeating_eagle3("tiny", make().parent))


def recurrent_head(universe: str, make) -> str:
    """Likewise: of `tiny`, one that passes the state on."""
    if universe != "tiny":
        return str(random_recurrent(make()))
    return str(random_recurrent(find("tiny"), make().parent, draft_vocab=8192, scale=0.0, own=False))


# Options without which a method cannot be created: a function of (model universe, make_checkpoint).
OPTIONS = {
    "draft_model": lambda universe, make: {"model": "tiny-draft" if universe == "tiny" else str(make(noise=0.01))},
    "merge": lambda universe, make: {"drafters": [{"method": "ngram"}, OPTIONS["draft_model"](universe, make)]},
    "self": lambda *_: {"view": "streaming:budget=16"},
    "cascade": lambda *_: {"view": "retrieval:budget=24,chunk=4,recent=4,rebuild=8", "drafter": {"method": "ngram"}},
    "triforce": lambda universe, make: {
        **OPTIONS["draft_model"](universe, make),
        "retrieval_budget": 192,
        "draft_cache_budget": 16,
    },
    "medusa": lambda universe, make: {"model": "tiny-medusa" if universe == "tiny" else str(random_heads(make()))},
    "eagle3": lambda universe, make: {"model": eagle3_head(universe, make), "width": 2},
    "recurrent": lambda universe, make: {"model": recurrent_head(universe, make), "width": 2},
    "rest": lambda universe, make: {"datastore": make_datastore(universe, make)},
}
ACCEPTS_NOTHING = {"none"}  # methods that need not guess anything right, ever


def favour(prefix: list[int], logits: torch.Tensor) -> torch.Tensor:
    """A custom processor that depends on the whole prefix."""
    logits[(31 * prefix[-1] + sum(prefix)) % len(logits)] += 4
    logits[prefix[-1]] -= 3
    return logits


SAMPLINGS = {
    "greedy": SamplingParams(temperature=0),
    "sampled": SamplingParams(temperature=0.7, top_p=0.9, seed=11),
    "everything": SamplingParams(
        temperature=0.9, top_k=40, top_p=0.95, min_p=0.02, repetition_penalty=1.2, presence_penalty=0.3,
        frequency_penalty=0.2, logit_bias={5: 2.5, 7: -4.0, 11: 1.5}, seed=12, min_tokens=6,
        stop_token_ids=[5, 9], logits_processors=[favour], logprobs=1, prompt_logprobs=2,
        allowed_token_ids=[token for token in range(128) if token % 7],
    ),
}  # fmt: skip
TEXTS = [
    "Once upon a time there was a fox. Once upon a time there was a",
    "One day,",
    "The",
    "Tom had a red ball. Tom had a red ball. Tom had a red ball. Tom had",
    "She said: I do not know,",
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of",
    "x",
    "Lily and Ben like to play in the park. They see a big tree. Lily and Ben like",
]


def prompts(llm: LLM) -> list[list[int]]:
    """Eight prompts of different lengths: the first is repetitive, one is a single token, one the same token often."""
    if llm.tokenizer:
        return [llm.encode(text) for text in TEXTS]
    g = torch.Generator().manual_seed(3)
    words = [torch.randint(128, (n,), generator=g).tolist() for n in (6, 1, 9, 3, 33, 14, 2)]
    return [words[0] * 3, *words[1:], [7] * 12]


def batch_of(llm: LLM, sampling: str, size: int) -> list[tuple[list[int], SamplingParams]]:
    """Requests of different lengths, so that rows leave the batch one after the other."""
    params, some = SAMPLINGS[sampling], enumerate(prompts(llm)[:size])
    if llm.tokenizer and params.allowed_token_ids:
        ids = [token for token in range(llm.runner.model.config.vocab_size) if token % 7]
        params = replace(params, allowed_token_ids=ids, bad_words=["and", "the", "the park", "Lily"])
    return [(p, replace(params, max_tokens=26 - 2 * i)) for i, p in some]


def config_of(method: str, universe: str, make_checkpoint, k: int | None = None) -> SpeculativeConfig:
    options = OPTIONS.get(method, lambda *_: {})(universe, make_checkpoint)
    config = SpeculativeConfig(method, num_speculative_tokens=k, options=options)
    try:
        drafters.create(config)
    except OutriderError as error:
        pytest.fail(f"method {method!r} cannot be created: {error}. Give it its options in OPTIONS in {__file__}")
    return config


ALIKE = ("token_ids", "text", "finish_reason", "stop_reason", "logprobs", "prompt_logprobs")


def alike(a, b) -> bool:
    return all(getattr(a, name) == getattr(b, name) for name in ALIKE)


_plain: WeakKeyDictionary[LLM, dict[str, list]] = WeakKeyDictionary()


def plain_of(llm: LLM, sampling: str) -> list:
    """What plain decoding gives for each of the eight requests, each run alone."""
    return plainly(llm, sampling, lambda: batch_of(llm, sampling, 8))


def plainly(llm: LLM, name: str, batch: Callable[[], list[tuple[list[int], SamplingParams]]]) -> list:
    """The same for requests that go by a name."""
    known = _plain.setdefault(llm, {})
    if name not in known:
        llm.speculative_config = None
        known[name] = [run(llm, [request])[0] for request in batch()]
    return known[name]


@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize("k", [1, 4, 16])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("universe", ["random", "tiny"])
@pytest.mark.parametrize("method", drafters.methods())
def test_same_tokens(request, make_checkpoint, method, universe, sampling, k, size):
    llm = request.getfixturevalue(f"{universe}_llm")
    plain = plain_of(llm, sampling)
    llm.speculative_config = config_of(method, universe, make_checkpoint, k)
    outputs = run(llm, batch_of(llm, sampling, size))
    for i, (output, expected) in enumerate(zip(outputs, plain, strict=False)):
        assert alike(output, expected), f"request {i}: {output.token_ids} instead of {expected.token_ids}"
    if method not in ACCEPTS_NOTHING and universe == "tiny" and sampling == "greedy" and (k, size) == (4, 8):
        accepted = sum(o.metrics["speculative_decoding"]["num_accepted_draft_tokens"] for o in outputs)
        assert accepted, f"{method} guesses nothing right even in repetitive text; if it need not: ACCEPTS_NOTHING"


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("method", drafters.methods())
def test_the_default_dtype_is_the_callers(random_llm, make_checkpoint, method, default):
    """transformers changes it for all threads while it loads a model."""
    plain, config = plain_of(random_llm, "everything"), config_of(method, "random", make_checkpoint)
    torch.set_default_dtype(default)
    try:
        random_llm.speculative_config = config
        outputs = run(random_llm, batch_of(random_llm, "everything", 8))
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(alike(output, expected) for output, expected in zip(outputs, plain, strict=True))
    assert {output.metrics["drafter_error"] for output in outputs} == {None}


@pytest.mark.parametrize("method", drafters.methods())
def test_a_caller_s_device_and_autocast_are_his_own(random_llm, make_checkpoint, method):
    """They are his thread's, and hold for all that is called there."""
    plain, config = plain_of(random_llm, "everything"), config_of(method, "random", make_checkpoint)
    batch = batch_of(random_llm, "everything", 8)
    with torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16):
        random_llm.speculative_config = config
        outputs = run(random_llm, batch)
        assert torch.ones(1).is_meta and torch.is_autocast_enabled("cpu"), "as it was"
        with torch.inference_mode():
            requests = [random_llm.engine.add(*one)[0] for one in batch]
            list(random_llm.engine.run())
    outputs += [random_llm.engine.output(request) for request in requests]
    assert all(alike(output, expected) for output, expected in zip(outputs, [*plain, *plain], strict=True))
    assert {output.metrics["drafter_error"] for output in outputs} == {None}


def test_a_model_is_loaded_where_it_is_said(make_checkpoint):
    folder = make_checkpoint()
    llm = LLM(folder, device="cpu", dtype="bfloat16")
    with torch.device("meta"), torch.autocast("cpu", dtype=torch.float16):
        other = LLM(folder, device="cpu", dtype="bfloat16")
    assert other.exactness == llm.exactness
    assert torch.equal(logits_after(other, list(range(60))), logits_after(llm, list(range(60))))


ROPES = [{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0},
         {"rope_type": "longrope", "short_factor": [1.1] * 8, "long_factor": [1.3] * 8, "rope_theta": 10000.0,
          "original_max_position_embeddings": 32, "attention_factor": 1.2}]  # fmt: skip


@pytest.mark.parametrize(
    "rope", [{}, *[{"rope_parameters": rope} for rope in ROPES]], ids=["plain", "yarn", "longrope"]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_default_dtype_is_not_the_models(make_checkpoint, dtype, rope):
    folder = make_checkpoint(**rope)
    llm = LLM(folder, device="cpu", dtype=dtype)
    expected = logits_after(llm, list(range(60)))
    for default in (torch.float64, torch.bfloat16):
        torch.set_default_dtype(default)
        try:
            other = LLM(folder, device="cpu", dtype=dtype)
        finally:
            torch.set_default_dtype(torch.float32)
        assert other.exactness == llm.exactness and torch.equal(logits_after(other, list(range(60))), expected)


ON_GPU = torch.cuda.is_available() and os.environ["TRITON_INTERPRET"] == "0"
DEVICES = ["cpu", *(["cuda"] if ON_GPU else [])]


@pytest.fixture(scope="module", params=DEVICES)
def bf16_llm(request) -> LLM:
    return LLM("tiny", device=request.param, dtype="bfloat16")


@pytest.fixture(scope="module", params=[(device, x) for device in DEVICES for x in (None, *ACTIVATIONS)], ids=str)
def packed_llm(request, make_checkpoint, tmp_path_factory) -> LLM:
    """The random model with weights of 4 bits, from a quantised checkpoint, with activations of every kind."""
    folder = quantize(make_checkpoint(), tmp_path_factory.mktemp("w4a16") / "model", calibration="none")
    device, activations = request.param
    return LLM(folder, device=device, activations=activations)


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0), SamplingParams(temperature=0.8, seed=5)])
@pytest.mark.parametrize("method", drafters.methods())
def test_bfloat16(bf16_llm, make_checkpoint, method, sampling):
    """Bit for bit where the engine says so; else a sequence may leave plain decoding only at a near-tie."""
    llm, params = bf16_llm, replace(sampling, max_tokens=32)
    batch = [(prompt, params) for prompt in prompts(llm)]
    plain = plainly(llm, repr(params), lambda: batch)
    llm.speculative_config = config_of(method, "tiny", make_checkpoint)
    for (prompt, _), output, expected in zip(batch, run(llm, batch), plain, strict=True):
        if alike(output, expected):
            continue
        assert output.metrics["exactness"] == "law", "promised bitwise, and the tokens differ"
        pairs = enumerate(zip(output.token_ids, expected.token_ids, strict=False))
        at, (ours, theirs) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
        prefix = prompt + expected.token_ids[:at]
        scores = logits_after(llm, prefix) / (params.temperature or 1)
        if params.temperature:
            scores = scores + gumbel(expected.seed, len(prefix), len(scores))
        assert abs(scores[ours] - scores[theirs]) < 0.5, f"token {at} of {prompt}: no near-tie"


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("method", drafters.methods())
def test_quantised_checkpoint(packed_llm, make_checkpoint, method, sampling):
    llm = packed_llm
    promised(llm)
    plain = plain_of(llm, sampling)
    llm.speculative_config = config_of(method, "random", make_checkpoint)
    assert all(map(alike, run(llm, batch_of(llm, sampling, 8)), plain))


@pytest.mark.parametrize("device", DEVICES)
def test_biases(make_checkpoint, device):
    """By the name of a device without its number, too."""
    llm = LLM(make_checkpoint("qwen2"), device=device, dtype="bfloat16")
    plain = llm.generate(prompts(llm)[0], max_tokens=16, temperature=0)[0].token_ids
    llm.speculative_config = {"method": "lookahead"}
    assert llm.generate(prompts(llm)[0], max_tokens=16, temperature=0)[0].token_ids == plain


def promised(llm: LLM) -> None:
    """Where the kernels run, the promise must hold; without them it may not, and there is nothing to test."""
    if llm.exactness != "bitwise":
        assert not llm.runner.follows_paths, "the kernels run, and the self-check has found neighbours in a row"
        pytest.skip("not promised without the kernels")


SHAPES = [
    ("llama", {}), ("llama", {"num_key_value_heads": 1}), ("llama", {"num_key_value_heads": 4, "head_dim": 24}),
    ("mistral", {"sliding_window": 70}), ("qwen2", {"hidden_size": 56, "intermediate_size": 100}), ("qwen3", {}),
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [None, *SHAPES], ids=str)
def test_bitwise_is_bitwise(make_checkpoint, shape, dtype):
    """Where the engine promises it: logits are bit for bit the same in any chunking, company and draft length."""
    llm = LLM(make_checkpoint(shape[0], **shape[1]) if shape else "tiny", device="cpu", dtype=dtype)
    promised(llm)
    runner, params = llm.runner, SamplingParams()
    for length in (3, 100, 505, 700):
        text = torch.randint(128, (length + 12,), generator=torch.Generator().manual_seed(length)).tolist()
        seq = Sequence(text[:length], params, 0)
        plain = []
        for token in text[length:]:
            plain.append(runner.extend([seq]).logits[0][0])
            seq.tokens.append(token)
        for chunk, companions, k in [(16, 0, 1), (17, 3, 2), (512, 1, 5), (300, 0, 8), (2048, 2, 11)]:
            runner.chunk = chunk
            runner.free(seq)
            del seq.tokens[length:]
            group = [*(Sequence(text[: 9 + 40 * i], params, 0) for i in range(companions)), seq]
            drafts = [Draft.chain(text[:i]) for i in range(companions)] + [Draft.chain(text[length : length + k])]
            logits = runner.extend(group, drafts).logits[-1]
            differ = [i for i in range(k + 1) if not torch.equal(logits[i], plain[i])]
            assert not differ, f"after {length} tokens, chunk {chunk}, {companions} companions: rows {differ} of {k}"
            for other in group:
                runner.free(other)


class Crowded:
    """A product whose rows depend on how many there are."""

    native, nbytes = False, 0

    def __init__(self, own):
        self.own = own

    def __call__(self, x, **named):
        return self.own(x, **named) + 1e-3 * len(x)


def test_the_check_sees_every_kind_of_layer(make_checkpoint):
    """A large model's check runs few of its layers (on a CPU): none that differs from the others escapes it."""
    model = LLM(make_checkpoint(num_hidden_layers=5), device="cpu", dtype="float32").checkpoint.model
    checked = lambda model: runner.check_exactness(model, PagedKV(model.config, model.dtype, model.device))  # noqa: E731
    assert checked(model) == "bitwise" or not native.runs(model.dtype, model.device)
    for i, layer in enumerate(model.layers):
        layers = [*model.layers[:i], replace(layer, o=Crowded(layer.o)), *model.layers[i + 1 :]]
        assert checked(replace(model, layers=layers)) == "law", i


@pytest.mark.parametrize("fault", [
    lambda seqs, drafts: not drafts[-1].is_chain, lambda seqs, drafts: len(seqs) == 2,
    lambda seqs, drafts: len(drafts[-1]) == 31,
])  # fmt: skip
def test_the_check_sees_branches_and_company_and_lengths(random_llm, monkeypatch, fault):
    """Whichever of them it is that changes a token's logits."""
    model, real = random_llm.runner.model, runner.Runner.extend
    if not random_llm.runner.follows_paths:
        pytest.skip("branches are not promised")

    def extend(self, seqs, drafts=None, *more, **named):
        output = real(self, seqs, drafts, *more, **named)
        if drafts and fault(seqs, drafts):
            output.flat = output.flat + 1e-3
        return output

    monkeypatch.setattr(runner.Runner, "extend", extend)
    assert runner.check_exactness(model, PagedKV(model.config, model.dtype, model.device)) == "law"


def test_branches_promise_less(random_llm):
    """Any branch is plain decoding's where attention follows paths; else only the first: others are told `law`."""
    params = SamplingParams(max_tokens=5, temperature=0)
    plain = run(random_llm, [([3], params)])[0].token_ids

    def tree(seq, right_first):
        right = plain[len(seq.output)]
        return Draft([right, (right + 1) % 128] if right_first else [(right + 1) % 128, right], [-1, -1])

    other = random_llm.exactness if random_llm.runner.follows_paths else "law"
    for right_first, exactness in ((True, random_llm.exactness), (False, other)):
        use(random_llm, ScriptedDrafter(lambda seq, k, first=right_first: tree(seq, first)))
        output = run(random_llm, [([3], params)])[0]
        assert output.token_ids == plain and output.metrics["exactness"] == exactness
        assert output.metrics["speculative_decoding"]["num_accepted_draft_tokens"] >= 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_first_branch_is_bitwise(dtype):
    llm = LLM("tiny", device="cpu", dtype=dtype)
    promised(llm)
    text = torch.randint(8192, (530,), generator=torch.Generator().manual_seed(1)).tolist()
    seq = Sequence(text[:508], SamplingParams(), 0)
    chain = llm.runner.extend([seq], [Draft.chain(text[508:516])]).logits[0]
    branches = Draft([*text[508:516], 9, 8, 7, 6, 5], [*range(-1, 7), -1, 8, 0, 3, 11], riders=2)
    assert torch.equal(llm.runner.extend([seq], [branches]).logits[0][:9], chain)
    llm.runner.free(seq)


def test_n_outputs_are_n_seeds(random_llm, make_checkpoint):
    params = SamplingParams(max_tokens=12, seed=40)
    alone = [random_llm.generate([1, 2, 3], replace(params, seed=40 + i))[0].token_ids for i in range(3)]
    assert len({tuple(a) for a in alone}) == 3
    for method in drafters.methods():
        random_llm.speculative_config = config_of(method, "random", make_checkpoint)
        together = random_llm.generate([[1, 2, 3], [4]], replace(params, n=3))
        assert [o.token_ids for o in together[:3]] == alone
        assert [(o.index, o.seed) for o in together] == [(0, 40), (1, 41), (2, 42)] * 2
    one, same = random_llm.generate([1, 2, 3], max_tokens=12, temperature=0, n=2)
    assert one.token_ids == same.token_ids and same.index == 1


def test_reported_seed_repeats_the_output(random_llm):
    first, second = (random_llm.generate([1, 2, 3], max_tokens=12)[0] for _ in range(2))
    assert first.token_ids != second.token_ids  # no seed given: a new one each time
    assert random_llm.generate([1, 2, 3], max_tokens=12, seed=first.seed)[0].token_ids == first.token_ids


def test_mixed_parameters_share_a_batch(random_llm, make_checkpoint):
    """Greedy, sampled and everything else side by side, and again after other requests."""
    batch = [(p, replace(s, max_tokens=16)) for p in prompts(random_llm)[:4] for s in SAMPLINGS.values()]
    alone = [run(random_llm, [request])[0] for request in batch]
    for method in drafters.methods():
        random_llm.speculative_config = config_of(method, "random", make_checkpoint)
        assert all(map(alike, run(random_llm, batch), alone))
        assert all(map(alike, [run(random_llm, [request])[0] for request in batch[::3]], alone[::3]))


def test_admission_gives_the_same(make_llm, make_checkpoint, random_llm):
    """Requests wait where too many, or too little memory, would run at once."""
    batch = batch_of(random_llm, "sampled", 8)
    expected = plain_of(random_llm, "sampled")
    one = random_llm.runner.kv.nbytes(512)  # a view's buffer, at least
    for engine in ({"max_num_seqs": 3}, {"kv_memory": 5 * one}, {"max_num_batched_tokens": 4}):
        llm = make_llm(engine=engine)
        for method in drafters.methods():
            llm.speculative_config = config_of(method, "random", make_checkpoint)
            requests = [r for prompt, params in batch for r in llm.engine.add(prompt, params)]
            most = 0
            while llm.engine.waiting or llm.engine.running:
                llm.engine.step()
                most = max(most, len(llm.runner.slots))
            assert most <= 3 if "max_num_seqs" in engine else most <= 8 if "kv_memory" in engine else most == 8
            assert all(map(alike, map(llm.engine.output, requests), expected))
            assert_released(llm)


def test_switching_back_and_forth(random_llm, make_checkpoint):
    expected = plain_of(random_llm, "sampled")
    for method in [*drafters.methods(), *reversed(drafters.methods())]:
        random_llm.speculative_config = config_of(method, "random", make_checkpoint)
        assert alike(run(random_llm, batch_of(random_llm, "sampled", 1))[0], expected[0])


# --- endings: an accepted block is cut exactly where plain decoding would have stopped --------------------------------


def cut_inside_a_block(llm: LLM, prompt: list[int], full: list[int], **ending) -> list:
    """The same request plainly and under a drafter that guesses all of `full` right, 16 at a time."""
    params = SamplingParams(**({"temperature": 0, "max_tokens": 40} | ending))
    llm.speculative_config = None
    plain = run(llm, [(prompt, params)])[0]
    use(llm, ScriptedDrafter(oracle({tuple(prompt): full})), 16)
    fast = run(llm, [(prompt, params)])[0]
    assert alike(fast, plain)
    assert len(fast.drafted_by) == len(fast.token_ids)
    spec = fast.metrics["speculative_decoding"]
    assert fast.drafted_by.count("scripted") == spec["num_accepted_draft_tokens"] == sum(spec["per_step_accepted"])
    assert spec["num_spec_steps"] < len(fast.token_ids) or len(fast.token_ids) == 1
    return plain


@pytest.fixture
def story(tiny_llm) -> tuple[LLM, list[int], list[int], str]:
    prompt = tiny_llm.encode("Once upon a time")
    output = tiny_llm.generate(prompt, temperature=0, max_tokens=40, ignore_eos=True)[0]
    return tiny_llm, prompt, output.token_ids, output.text


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings(story, include):
    llm, prompt, full, text = story
    for at in (3, 20, 47):
        stop = text[at : at + 5]  # begins and ends inside tokens
        plain = cut_inside_a_block(llm, prompt, full, stop=["never there", stop], include_stop_str_in_output=include)
        end = text.find(stop) + (len(stop) if include else 0)
        assert (plain.text, plain.finish_reason) == (text[:end], "stop")


def test_stop_token_and_end_of_sequence(story, monkeypatch):
    llm, prompt, full, text = story
    last = full[19]
    stopped = cut_inside_a_block(llm, prompt, full, stop_token_ids=[last])
    assert stopped.token_ids == full[: full.index(last) + 1] and stopped.finish_reason == "stop"
    assert text.startswith(stopped.text) and llm.tokenizer.decode(stopped.token_ids[:-1]) == stopped.text
    monkeypatch.setattr(llm.runner.model, "config", replace(llm.runner.model.config, eos=(last,)))
    ended = cut_inside_a_block(llm, prompt, full)
    assert (ended.token_ids, ended.text, ended.finish_reason) == (stopped.token_ids, stopped.text, "stop")
    assert (ended.stop_reason, stopped.stop_reason) == (None, last)
    ignored = cut_inside_a_block(llm, prompt, full, ignore_eos=True)
    assert ignored.token_ids == full and ignored.finish_reason == "length"
    late = cut_inside_a_block(llm, prompt, full, min_tokens=len(stopped.token_ids))
    assert last not in late.token_ids[: len(stopped.token_ids)]
    later = cut_inside_a_block(llm, prompt, full, min_tokens=len(stopped.token_ids), ignore_eos=True)
    assert later.token_ids[: len(late.token_ids)] == late.token_ids and later.finish_reason == "length"


@pytest.mark.parametrize("n", [1, 2, 16, 17, 18])
def test_max_tokens(story, n):
    llm, prompt, full, _ = story
    plain = cut_inside_a_block(llm, prompt, full, max_tokens=n, ignore_eos=True)
    assert plain.token_ids == full[:n] and plain.finish_reason == "length"


def test_logprobs(random_llm):
    prompt, params = [3, 1, 4], SamplingParams(max_tokens=20, seed=9, logprobs=3)
    plain = run(random_llm, [(prompt, params)])[0]
    for i, entry in enumerate(plain.logprobs):
        logs = logits_after(random_llm, prompt + plain.token_ids[:i]).log_softmax(-1)
        assert entry.token_id == plain.token_ids[i]
        assert entry.logprob == pytest.approx(float(logs[entry.token_id]), abs=1e-4)
        assert list(entry.top) == logs.topk(3).indices.tolist()
        assert list(entry.top.values()) == pytest.approx(logs.topk(3).values.tolist(), abs=1e-4)
    use(random_llm, ScriptedDrafter(oracle({tuple(prompt): plain.token_ids})), 7)
    fast = run(random_llm, [(prompt, params)])[0]
    assert alike(fast, plain) and len(fast.logprobs) == 20
    for a, b in zip(fast.logprobs, plain.logprobs, strict=True):
        assert (a.token_id, list(a.top)) == (b.token_id, list(b.top))
        assert [a.logprob, *a.top.values()] == pytest.approx([b.logprob, *b.top.values()], abs=1e-4)
    assert run(random_llm, [(prompt, replace(params, logprobs=None))])[0].logprobs is None


@pytest.mark.parametrize("method", drafters.methods())
def test_logprobs_of_prompts(random_llm, make_llm, make_checkpoint, method):
    """Whatever is in the cache, however the prompt is cut, for all n outputs; and where it has to be read again."""
    prompt = prompts(random_llm)[4] * 3
    params = SamplingParams(max_tokens=9, seed=3, n=2, prompt_logprobs=2)
    random_llm.speculative_config = config_of(method, "random", make_checkpoint)
    random_llm.generate(prompt, max_tokens=1)
    outputs = run(random_llm, [(prompt, params)])
    first, *scores = outputs[0].prompt_logprobs
    assert first is None and len(scores) == len(prompt) - 1 and outputs[1].prompt_logprobs == [None, *scores]
    for at in (1, 2, 50, len(prompt) - 1):
        logs = logits_after(random_llm, prompt[:at]).log_softmax(-1)
        assert scores[at - 1].token_id == prompt[at] and list(scores[at - 1].top) == logs.topk(2).indices.tolist()
        assert scores[at - 1].logprob == pytest.approx(float(logs[prompt[at]]), abs=1e-4)
        assert scores[at - 1].rank == 1 + int((logs > logs[prompt[at]]).sum())
    plainly = random_llm.generate(prompt, replace(params, prompt_logprobs=None))
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plainly] and plainly[0].prompt_logprobs is None
    assert random_llm.generate([5], replace(params, n=1))[0].prompt_logprobs == [None]


def test_logprobs_of_prompts_that_are_read_twice(random_llm, make_llm):
    """In parts, beside others, and again behind a preemption."""
    prompt = prompts(random_llm)[4] * 3
    params = SamplingParams(max_tokens=64, seed=3, n=2, prompt_logprobs=2)
    expected = run(random_llm, [(prompt, params)])
    small = make_llm(engine={"max_num_batched_tokens": 20, "kv_memory": 8 * random_llm.runner.kv.nbytes(32)})
    small.speculative_config = {"method": "ngram", "num_speculative_tokens": 3}
    assert all(map(alike, run(small, [(prompt, params), ([7] * 40, params)])[:2], expected))
    assert small.engine.preemptions


def test_logits_of_many_tokens_come_in_pieces(make_checkpoint, monkeypatch):
    """Of a prompt only the rows that are asked for have logits, and few of these at a time, whoever is beside it."""
    path = make_checkpoint("qwen3", vocab_size=151936, num_hidden_layers=1, hidden_size=16, tie_word_embeddings=True)
    llm, rows = LLM(path, device="cpu"), []
    forward, logits = Model.forward, Model.logits

    def watched(self, tokens, positions, lengths, kv, plan, states=None, wanted=None):
        hidden = forward(self, tokens, positions, lengths, kv, plan, states, wanted)
        rows.append(len(wanted.logits))
        return hidden

    monkeypatch.setattr(Model, "forward", watched)
    monkeypatch.setattr(Model, "logits", lambda self, hidden: (rows.append(len(hidden)), logits(self, hidden))[1])
    text = torch.randint(151936, (1500,), generator=torch.Generator().manual_seed(0)).tolist()
    params = SamplingParams(max_tokens=3, seed=1, logprobs=2)
    requests = [(text, params), *((text[i : i + 90], replace(params, prompt_logprobs=1)) for i in range(3))]
    together = run(llm, requests)
    assert max(rows) <= SCORED // 151936 == 110 and sum(rows) < 3 * 90 + 40
    monkeypatch.setattr(runner, "SCORED", 2**40)
    assert all(map(alike, together, (run(llm, [request])[0] for request in requests)))


# --- streams ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", drafters.methods())
def test_stream_is_generate(tiny_llm, make_checkpoint, method):
    params = SamplingParams(temperature=0, max_tokens=30, stop=["never there"])
    expected = tiny_llm.generate(TEXTS[0], params)[0]
    tiny_llm.speculative_config = config_of(method, "tiny", make_checkpoint)
    events = list(tiny_llm.stream(TEXTS[0], params))
    assert [e.token_id for e in events] == expected.token_ids
    assert "".join(e.text for e in events) == expected.text
    assert [e.finish_reason for e in events[:-1]] == [None] * (len(events) - 1)
    assert alike(events[-1].output, expected) and events[-1].finish_reason == expected.finish_reason
    assert [e.drafted_by for e in events] == events[-1].output.drafted_by
    assert set(events[-1].output.drafted_by) - {None} <= {method} or method in ("auto", "merge"), "who asks others"


@pytest.mark.parametrize("method", drafters.methods())
def test_aborted_stream_frees_memory(tiny_llm, make_checkpoint, method):
    tiny_llm.speculative_config = config_of(method, "tiny", make_checkpoint)
    stream = tiny_llm.stream(TEXTS[0], max_tokens=200, temperature=0)
    for _ in range(3):
        next(stream)
    assert tiny_llm.runner.slots
    stream.close()
    assert_released(tiny_llm)
    tiny_llm.stream(TEXTS[0]).close()  # never read from
    assert_released(tiny_llm)


def test_interleaved_streams(random_llm):
    params = SamplingParams(temperature=0, max_tokens=12)
    expected = [random_llm.generate(p, params)[0].token_ids for p in ([1, 2], [3])]
    streams = [random_llm.stream(p, params) for p in ([1, 2], [3])]
    pairs = list(zip(*streams, strict=True))
    assert [[e.token_id for e in events] for events in zip(*pairs, strict=True)] == expected


def test_engine_abort(random_llm):
    engine, params = random_llm.engine, SamplingParams(temperature=0, max_tokens=20)
    expected = random_llm.generate([3], params)[0].token_ids
    (doomed,), (kept,) = engine.add([1, 2], params), engine.add([3], params)
    for _ in range(5):
        engine.step()
    engine.abort(doomed)
    assert len(random_llm.runner.slots) == 1
    for _ in engine.run():
        pass
    assert engine.output(doomed).finish_reason == "abort" and len(engine.output(doomed).token_ids) == 5
    assert engine.output(kept).token_ids == expected
    assert_released(random_llm)


def test_a_failing_drafter_leaves_nothing_behind(random_llm):
    def fail(seq, k):
        if len(seq.output) > 2:
            raise RuntimeError("out of ideas")
        return oracle({(1, 2): [0] * 9})(seq, k)

    expected = random_llm.generate([1, 2], max_tokens=9, seed=1)[0].token_ids
    use(random_llm, ScriptedDrafter(fail))
    (output,) = random_llm.generate([1, 2], max_tokens=9, seed=1)
    assert output.token_ids == expected and "out of ideas" in output.metrics["drafter_error"]
    assert_released(random_llm)


def test_choice_is_the_same_in_any_company(random_llm):
    """The last link of the chain: `choose` for one row and for many."""
    rows = [Row(Sequence(p, s, 3)) for p in prompts(random_llm) for s in SAMPLINGS.values()]
    logits = torch.randn(len(rows), 128, generator=torch.Generator().manual_seed(0)) * 3
    alone = [choose(logits[i : i + 1], [Row(Sequence(r.seq.tokens, r.seq.params, 3))])[0] for i, r in enumerate(rows)]
    assert choose(logits, rows) == alone
