"""`outrider.hf.accelerate`: a transformers model's own `generate`, through Outrider, with the same tokens."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    EosTokenCriteria,
    GenerationConfig,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    set_seed,
)

import outrider.hf
from outrider.errors import ConfigError, EmptyPrompt, RequestTooLong, UnsupportedArchitecture
from outrider.find import embedded
from outrider.load import read_tokenizer

ARCHS = {
    "llama": {},
    "llama-biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "mistral": {"sliding_window": 8},
    "qwen2": {},
    "qwen3": {"num_key_value_heads": 4},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
NGRAM = {"method": "ngram"}
IDS = torch.tensor([[9, 9, 9, 5, 6, 7, 5, 6], [3, 4, 3, 4, 3, 4, 3, 4], [9, 9, 80, 81, 82, 80, 81, 82]])
MASK = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8, [0, 0, 1, 1, 1, 1, 1, 1]])


@pytest.fixture
def make(make_checkpoint):
    """`make(arch)`: a fresh transformers model with random weights."""

    def make(arch: str = "llama", **config):
        path = make_checkpoint(arch.partition("-")[0], **(ARCHS[arch] | config))
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    return make


@pytest.fixture(scope="module")
def tiny():
    model = AutoModelForCausalLM.from_pretrained(embedded()["tiny"], dtype=torch.float32).eval()
    return model, read_tokenizer(embedded()["tiny"])


def both(model, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
    """What the model generates by itself, and accelerated."""
    plain = model.generate(*args, **kwargs)
    with outrider.hf.accelerate(model, None, NGRAM):
        return plain, model.generate(*args, **kwargs)


@pytest.mark.parametrize("arch", ARCHS)
def test_greedy(make, arch):
    model = make(arch)
    plain = model.generate(IDS, attention_mask=MASK, max_new_tokens=24, do_sample=False)
    names = {name: weight.clone() for name, weight in model.named_parameters()}
    with outrider.hf.accelerate(model, None, NGRAM) as handle:
        ours = model.generate(IDS, attention_mask=MASK, max_new_tokens=24, do_sample=False)
        assert torch.equal(ours, plain) and ours.dtype == torch.int64
        assert [m["method"] for m in handle.last_metrics] == ["ngram"] * 3
        alone = model.generate(input_ids=IDS[1:2], max_new_tokens=24)
        assert torch.equal(alone, plain[1:2])
    assert {n: w.shape for n, w in names.items()} == {n: w.shape for n, w in model.named_parameters()}
    assert all(torch.equal(weight, names[name]) for name, weight in model.named_parameters())
    assert torch.equal(model.generate(IDS, attention_mask=MASK, max_new_tokens=24, do_sample=False), plain)


def test_tiny(tiny):
    model, tokenizer = tiny
    tokenizer.padding_side = "left"
    texts = ["Once upon a time", "The cat sat on the mat. The cat", "def add(a, b):\n    return"]
    inputs = {k: v for k, v in tokenizer(texts, return_tensors="pt", padding=True).items() if k != "token_type_ids"}
    for options in ({}, {"repetition_penalty": 1.3}, {"min_new_tokens": 30}, {"stop_strings": [" the", "\n"]}):
        extra = {"tokenizer": tokenizer} if "stop_strings" in options else {}
        plain, ours = both(model, **inputs, max_new_tokens=40, do_sample=False, **options, **extra)
        assert torch.equal(ours, plain), options
    with outrider.hf.accelerate(model, tokenizer, NGRAM):  # the tokenizer is known already; no mask: it is inferred
        assert torch.equal(model.generate(inputs["input_ids"], max_new_tokens=40, stop_strings=[" the", "\n"]), plain)


def test_shares_weights(make):
    """Nothing is held twice, the parameters live in the fused tensors, and a second call copies nothing."""
    model = make("qwen2")
    handle = outrider.hf.accelerate(model)
    attn, layer = model.model.layers[0].self_attn, handle.llm.runner.model.layers[0]
    assert attn.q_proj.weight.data_ptr() == layer.qkv.weight.data_ptr()
    assert attn.v_proj.bias.untyped_storage().data_ptr() == layer.qkv.bias.untyped_storage().data_ptr()
    assert model.lm_head.weight.data_ptr() == handle.llm.runner.model.head.weight.data_ptr()
    ours = {t.untyped_storage().data_ptr() for t in (layer.qkv.weight, layer.mlp.gate_up.weight, layer.mlp.down.weight)}
    assert ours <= {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    assert sum(storages.values()) == sum(p.nbytes for p in model.parameters())
    again = outrider.hf.accelerate(model, None, NGRAM)
    assert again.llm.runner.model.layers[0].qkv.weight.data_ptr() == layer.qkv.weight.data_ptr()
    before = model.generate(IDS, max_new_tokens=12)
    with torch.no_grad():  # a change of the model's weights is a change of ours
        model.lm_head.weight.copy_(model.lm_head.weight.roll(1, 0))
    changed = model.generate(IDS, max_new_tokens=12)
    again.undo()
    assert not torch.equal(before, changed) and torch.equal(changed, model.generate(IDS, max_new_tokens=12))


def test_no_keys_of_old_weights(make):
    """The prompt is longer than a block of the cache, whose keys could be kept."""
    model, prompt = make("llama"), torch.arange(40)[None]
    with outrider.hf.accelerate(model):
        before = model.generate(prompt, max_new_tokens=12)
        model.model.layers[0].mlp.down_proj.weight.data.mul_(-4)
        after = model.generate(prompt, max_new_tokens=12)
    assert not torch.equal(before, after) and torch.equal(after, model.generate(prompt, max_new_tokens=12))


def test_stays_a_model(make, tmp_path):
    """It trains, saves and loads as before."""
    model = make("llama")
    plain = model.generate(IDS, max_new_tokens=12)
    outrider.hf.accelerate(model).undo()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(loaded.generate(IDS, max_new_tokens=12), plain)
    model(IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_undo_and_twice(make):
    model = make()
    first = outrider.hf.accelerate(model)
    second = outrider.hf.accelerate(model, speculative_config=NGRAM)
    first.undo()  # replaced: nothing to undo
    assert model.generate == second.generate
    with pytest.raises(ConfigError, match="undo"):
        deepcopy(model)
    second.undo()
    assert "generate" not in vars(deepcopy(model))
    model.generate = own = lambda *args, **kwargs: "own"
    with outrider.hf.accelerate(model), outrider.hf.accelerate(model):
        assert model.generate != own
    assert model.generate is own


def test_a_packed_copy(make):
    model = make()
    plain = model.generate(IDS, attention_mask=MASK, max_new_tokens=24)
    with outrider.hf.accelerate(model, None, NGRAM, share=False) as handle:
        assert handle.llm.exactness == outrider.hf.accelerate(make()).llm.exactness == "bitwise"
        assert torch.equal(model.generate(IDS, attention_mask=MASK, max_new_tokens=24), plain)


def test_ends(make):
    """End of sequence, lengths, padding on the right, defaults of the generation config."""
    model = make()
    plain = model.generate(IDS, attention_mask=MASK, max_new_tokens=16)
    eos = [int(plain[0, 10]), int(plain[1, 14])]
    for options in (
        {"eos_token_id": eos[0]}, {"eos_token_id": eos, "pad_token_id": 77},
        {"eos_token_id": eos, "min_new_tokens": 5}, {"eos_token_id": eos, "min_length": 12}, {"max_length": 15},
        {"eos_token_id": eos, "pad_token_id": 9, "attention_mask": None},
        {"eos_token_id": None, "max_new_tokens": None}, {"num_beams": 1, "use_cache": True, "typical_p": 1.0},
        {"max_new_tokens": np.int64(3)}, {"eos_token_id": torch.tensor(eos)},
    ):  # fmt: skip
        first, second = both(model, IDS, **({"attention_mask": MASK, "max_length": 20} | options))
        assert torch.equal(first, second), options
    expected = model.generate(IDS, attention_mask=MASK, max_length=20, eos_token_id=eos)
    for given in (np.array(eos), tuple(eos)):
        model.generation_config.eos_token_id = given
        with outrider.hf.accelerate(model):
            for own in ({}, {"eos_token_id": given}):
                assert torch.equal(model.generate(IDS, attention_mask=MASK, max_length=20, **own), expected)
    model.generation_config.eos_token_id = eos
    for end in (None, 17):  # these alone are barred among the first tokens, not the model's own
        first, second = both(model, IDS, attention_mask=MASK, max_new_tokens=12, min_new_tokens=9, eos_token_id=end)
        assert torch.equal(first, second) and eos[0] in first[0, 8:17]
    model.generation_config.update(eos_token_id=eos, pad_token_id=77, max_new_tokens=9, repetition_penalty=1.2)
    for args in ((IDS,), (IDS, GenerationConfig(repetition_penalty=1.5, max_new_tokens=11))):
        first, second = both(model, *args, attention_mask=MASK)
        assert torch.equal(first, second)


def test_processors_and_criteria(make):
    model = make()
    processors = [NoRepeatNGramLogitsProcessor(2), MinNewTokensLengthLogitsProcessor(8, 4, 17, device="cpu")]
    first, second = both(
        model, IDS, attention_mask=MASK, max_new_tokens=20, logits_processor=processors, eos_token_id=17, pad_token_id=1
    )
    assert torch.equal(first, second)
    stop = int(first[1, 12])
    criteria = StoppingCriteriaList([MaxLengthCriteria(15), lambda ids, scores, **_: ids[:, -1] == stop])
    first, second = both(model, IDS[1:2], max_new_tokens=20, stopping_criteria=criteria)
    assert torch.equal(first, second) and first.shape[1] < 15


class Recorder:
    def __init__(self) -> None:
        self.seen: list[list] = []

    def put(self, value) -> None:
        self.seen.append(value.tolist())

    def end(self) -> None:
        self.seen.append(["end"])


def test_what_stands_in_the_place_of_an_option(make):
    """Where generate would make a processor or criterion of the type that is given, the given one is taken."""
    model, limit = make(), {"max_new_tokens": 12, "do_sample": False, "attention_mask": MASK, "pad_token_id": 0}
    plain = model.generate(IDS, **limit)
    end = int(plain[1, 12])
    for options in (
        {"logits_processor": [RepetitionPenaltyLogitsProcessor(1.05)], "repetition_penalty": 5.0},
        {"logits_processor": [MinLengthLogitsProcessor(14, end)], "min_length": 10, "eos_token_id": end},
        {"stopping_criteria": [MaxLengthCriteria(12)]},
        {"stopping_criteria": [EosTokenCriteria(127)], "eos_token_id": end},
        {"stopping_criteria": [EosTokenCriteria(127)], "eos_token_id": end, "min_new_tokens": 9},
        {"stopping_criteria": [MaxLengthCriteria(3)]},
        {"cache_implementation": "static"},
    ):
        theirs, ours = both(model, IDS, **limit, **options)
        assert torch.equal(ours, theirs), options


def test_streamer(make):
    model, theirs, ours = make(), Recorder(), Recorder()
    model.generate(IDS[:1], max_new_tokens=9, streamer=theirs)
    with outrider.hf.accelerate(model, None, NGRAM):
        model.generate(IDS[:1], max_new_tokens=9, streamer=ours)
        assert ours.seen == theirs.seen and len(ours.seen) == 11
        with pytest.raises(ConfigError, match="one row at a time"):
            model.generate(IDS, max_new_tokens=9, streamer=ours)


def test_sampling(make):
    """Speculation changes nothing, seeds reproduce, rows differ, the kept tokens are transformers'."""
    model = make()
    options = {"max_new_tokens": 20, "do_sample": True, "temperature": 2.0, "num_return_sequences": 3}
    with outrider.hf.accelerate(model) as handle:
        plain = model.generate(IDS, attention_mask=MASK, seed=5, **options)
        handle.llm.speculative_config = NGRAM
        assert torch.equal(plain, model.generate(IDS, attention_mask=MASK, seed=5, **options))
        assert plain.shape == (9, 28) and len({tuple(row) for row in plain[:3].tolist()}) == 3
        set_seed(1)
        first = model.generate(IDS, **options)
        assert not torch.equal(first, model.generate(IDS, **options))
        set_seed(1)
        assert torch.equal(first, model.generate(IDS, **options))
        one = {"max_new_tokens": 1, "do_sample": True, "num_return_sequences": 400, "temperature": 30.0, "seed": 0}
        tokens = {n: set(model.generate(IDS[:1], **one, top_k=n)[:, -1].tolist()) for n in (3, 0)}
        default = set(model.generate(IDS[:1], **one)[:, -1].tolist())
        top = model(IDS[:1]).logits[0, -1].topk(50).indices.tolist()
        assert tokens[3] == set(top[:3]) and default <= set(top) and len(default) > 40 and len(tokens[0]) > 90


def test_two_threads(make):
    """Calls at once share the forwards; each has its rows, its streamer's tokens, or its own criterion's error."""
    model = make()
    expected = model.generate(IDS, attention_mask=MASK, max_new_tokens=24)

    def fail(ids, scores, **_):
        raise ValueError("no more")

    with outrider.hf.accelerate(model, None, NGRAM) as handle, ThreadPoolExecutor(4) as pool:
        streamers = [Recorder() for _ in range(4)]
        rows = [pool.submit(model.generate, IDS, attention_mask=MASK, max_new_tokens=24) for _ in range(6)]
        ones = [pool.submit(model.generate, IDS[1:2], max_new_tokens=24, streamer=streamer) for streamer in streamers]
        bad = pool.submit(model.generate, IDS[1:2], max_new_tokens=24, stopping_criteria=[fail], pad_token_id=1)
        assert all(torch.equal(call.result(300), expected) for call in rows)
        assert all(torch.equal(call.result(300), expected[1:2]) for call in ones)
        assert "no more" in str(bad.exception(300))
        assert not handle.llm.engine.running and not handle.llm.runner.slots
    for streamer in streamers:
        assert [t for (t,) in streamer.seen[1:-1]] == expected[1, 8:].tolist() and streamer.seen[-1] == ["end"]


REFUSED = {
    "num_beams": 2, "assistant_model": object(), "output_scores": True, "prompt_lookup_num_tokens": 3,
    "past_key_values": (), "constraints": [1], "inputs_embeds": torch.zeros(1), "return_dict_in_generate": True,
    "use_cache": False, "max_tokens": 5, "typical_p": 0.5, "no_repeat_ngram_size": 2, "penalty_alpha": 0.6,
    "bad_words_ids": [[1]], "max_time": 0, "forced_eos_token_id": 0, "prefix_allowed_tokens_fn": len,
    "cache_implementation": "quantized",
}  # fmt: skip


def test_refusals(make):
    model = make()
    with outrider.hf.accelerate(model):
        for name, value in REFUSED.items():
            with pytest.raises(ConfigError, match=rf"not support {name}.*supported: inputs.*max_new_tokens"):
                model.generate(IDS, **{name: value})
        for match, options in {
            "below|at least 1|no room": {"max_new_tokens": 0}, "no room": {"max_length": 8},
            "max_new_tokens must": {"max_new_tokens": 2.5}, "not True": {"max_new_tokens": True},
            "do_sample": {"num_return_sequences": 2},
            "do_sample=False": {"do_sample": True, "temperature": 0.0}, "top_p": {"do_sample": True, "top_p": 2.0},
            "need a tokenizer": {"stop_strings": "a"}, "padding on the left|left": {"attention_mask": MASK.flip(1)},
            "shape": {"attention_mask": MASK[:1]}, "pad_token_id": {"stopping_criteria": [lambda ids, scores: True]},
            "eos_token_id must be": {"eos_token_id": "a"}, "eos_token_id .*1.5": {"eos_token_id": [5, 1.5]},
            "give inputs or": {"input_ids": IDS}, "seed must": {"seed": "x"}, "a 64-bit": {"seed": 2**64},
            "must be a GenerationConfig": {"generation_config": {"max_new_tokens": 5}},
        }.items():  # fmt: skip
            with pytest.raises(ConfigError, match=match):
                model.generate(IDS, **options)
        with pytest.raises(EmptyPrompt):
            model.generate(IDS, attention_mask=MASK * 0)
        with pytest.raises(RequestTooLong):
            model.generate(IDS, max_new_tokens=5000)
        for bad in (IDS[0], [[1, 2]], IDS.float(), IDS > 0, None):
            with pytest.raises(ConfigError, match="give inputs or input_ids"):
                model.generate(bad)
        assert model.generate(IDS, max_new_tokens=1, do_sample=True, seed=2**64 - 1).shape == (3, 9)  # rows wrap around
        assert model.generate(IDS, max_new_tokens=1, num_return_sequences=None).shape == (3, 9)  # as if not given
        assert model.generate(IDS, max_new_tokens=1).shape == (3, 9)  # nothing is left behind


def parametrize(module):
    torch.nn.utils.parametrize.register_parametrization(module, "weight", torch.nn.Tanh())


CHANGES = {
    "hook": lambda module: module.register_forward_hook(lambda module, args, output: -output),
    "pre-hook": lambda module: module.register_forward_pre_hook(lambda module, args: (-args[0],)),
    "forward": lambda module: setattr(module, "forward", torch.tanh),
    "parametrization": parametrize,
}


@pytest.mark.parametrize("change", CHANGES)
def test_code_that_would_not_run_is_refused(make, change):
    """Behind `accelerate` and before it: with a copy of the weights nothing else would tell."""
    model = make()
    with outrider.hf.accelerate(model, share=False):
        CHANGES[change](model.model.layers[1].mlp.up_proj)
        with pytest.raises(ConfigError, match=r"^model\.layers\.1\.mlp\.up_proj has a forward hook"):
            model.generate(IDS)
    with pytest.raises(ConfigError, match="up_proj has a forward hook"):
        outrider.hf.accelerate(model)


def test_code_that_changes_nothing_is_not_refused(make):
    """That of transformers and accelerate themselves, and a compiled forward of the whole."""
    model = make()
    model(IDS, output_hidden_states=True)  # leaves hooks behind
    model.enable_input_require_grads()
    model.forward = model.forward
    module = model.model.layers[0].mlp
    module._hf_hook, module.forward = object(), module.forward
    plain, ours = both(model, IDS, max_new_tokens=12)
    assert torch.equal(plain, ours)
    model.register_forward_hook(print)
    with pytest.raises(ConfigError, match=r"^LlamaForCausalLM has a forward hook"):
        outrider.hf.accelerate(model)


def test_wrong_models(make):
    from transformers import GPT2Config, GPT2LMHeadModel

    with pytest.raises(UnsupportedArchitecture, match="GPT2LMHeadModel"):
        outrider.hf.accelerate(GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=8)))
    with pytest.raises(ConfigError, match="not str"):
        outrider.hf.accelerate("tiny")
    model = make()
    with pytest.raises(ConfigError, match="unknown"):
        outrider.hf.accelerate(model, None, {"method": "nonsense"})
    with pytest.raises(ConfigError, match="max_len"):
        outrider.hf.accelerate(model, max_len=3)
    with pytest.raises(ConfigError, match="one dtype"):
        model.lm_head.to(torch.bfloat16)
        outrider.hf.accelerate(model)
    model = make()
    outrider.hf.accelerate(model)
    model.to(torch.bfloat16)
    with pytest.raises(ConfigError, match="again"):
        model.generate(IDS)
    outrider.hf.accelerate(model)
    assert model.generate(IDS, max_new_tokens=2).shape == (3, 10)
