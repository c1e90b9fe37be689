"""Whatever a user does wrong gives one line, of the right kind, that says what would be right; and nothing breaks."""

from __future__ import annotations

import json
import math
import os
import shutil
import threading
from array import array
from collections import UserList, deque
from contextlib import contextmanager
from fractions import Fraction
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import assert_released
from safetensors.torch import load_file, save_file

import outrider.llm
from outrider import LLM, SamplingParams, SpeculativeConfig, drafters
from outrider.errors import (
    CheckpointError,
    ConfigError,
    EmptyPrompt,
    ModelNotFound,
    OutriderError,
    RequestError,
    RequestTooLong,
    UnsupportedArchitecture,
    VocabularyMismatch,
)
from outrider.files import OURS
from outrider.find import embedded


@contextmanager
def refused(kind: type[OutriderError], *words: str):
    """The block raises exactly `kind`, in one readable line that holds these words."""
    with pytest.raises(OutriderError) as caught:
        yield
    message = str(caught.value)
    assert type(caught.value) is kind, message
    assert message and "\n" not in message and len(message) < 400, message
    for word in words:
        assert word in message, f"{word!r} is not in {message!r}"


# --- checkpoints -----------------------------------------------------------------------------------------------------


def edit(folder, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in (config | changes).items() if v != "delete"}))


def reweigh(folder, change) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def truncate(folder, name: str) -> None:
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: len(data) // 2])


def pickled(folder) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def replaced(folder, name: str, make) -> None:
    """Something else of that name, which is no file."""
    (folder / name).unlink(missing_ok=True)
    make(folder / name)


def shard(folder, weight_map) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def tokenizer(folder, config=None, **changes) -> None:
    """The embedded models' tokenizer, changed."""
    own = json.loads((embedded()["tiny"] / "tokenizer.json").read_text("utf-8"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast"} | (config or {})
    (folder / "tokenizer.json").write_text(json.dumps(own | changes))
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


DOWN = "model.layers.1.mlp.down_proj.weight"
DAMAGE = {
    "no config": (lambda f: (f / "config.json").unlink(), ModelNotFound, "config.json"),
    "broken json": (lambda f: truncate(f, "config.json"), CheckpointError, "config.json"),
    "json list": (lambda f: (f / "config.json").write_text("[]"), CheckpointError, "JSON object"),
    "binary config": (lambda f: (f / "config.json").write_bytes(b"\xff\xfe\x00"), CheckpointError, "config.json"),
    "empty config": (lambda f: (f / "config.json").write_text("{}"), CheckpointError, "model_type"),
    "other architecture": (lambda f: edit(f, architectures=["MambaForCausalLM"], model_type="mamba"),
                           UnsupportedArchitecture, "MambaForCausalLM", "supported: Llama, "),
    "contradictory family": (lambda f: edit(f, model_type="gpt2"), CheckpointError, "config.json"),
    "quantised": (lambda f: edit(f, quantization_config={"bits": 4}), UnsupportedArchitecture, "quantised"),
    "activation": (lambda f: edit(f, hidden_act="relu2"), UnsupportedArchitecture, "relu2", "silu"),
    "rope type": (lambda f: edit(f, rope_parameters={"rope_type": "ntk"}), UnsupportedArchitecture, "ntk",
                  "yarn"),
    "rope parameters": (lambda f: edit(f, rope_parameters={"rope_type": "llama3", "factor": 8.0}), CheckpointError,
                        "low_freq_factor"),
    "dtype": (lambda f: edit(f, dtype="int8"), CheckpointError, "int8", "bfloat16"),
    "uneven heads": (lambda f: edit(f, num_key_value_heads=3), CheckpointError, "4", "3"),
    "no heads": (lambda f: edit(f, num_attention_heads="delete"), CheckpointError, "config.json asks for"),
    "only pickled": (pickled, CheckpointError, "safetensors", "convert"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), CheckpointError, "no safetensors"),
    "truncated": (lambda f: truncate(f, "model.safetensors"), CheckpointError, "truncated", "model.safetensors"),
    "empty weights": (lambda f: (f / "model.safetensors").write_bytes(b""), CheckpointError, "model.safetensors"),
    "missing shard": (lambda f: shard(f, {DOWN: "model-7.safetensors"}), CheckpointError, "model-7.safetensors"),
    "shard outside": (lambda f: shard(f, {DOWN: "../outside.safetensors"}), CheckpointError, "../outside", "leaves"),
    "shard elsewhere": (lambda f: shard(f, {DOWN: "/etc/outside.safetensors"}), CheckpointError, "/etc/", "leaves"),
    "nan in a linear": (lambda f: reweigh(f, lambda w: w[DOWN][3].fill_(math.nan)), CheckpointError, DOWN, "NaN"),
    "infinity in a norm": (lambda f: reweigh(f, lambda w: w["model.norm.weight"][:1].fill_(math.inf)), CheckpointError,
                           "model.norm.weight", "infinite"),
    "nan in the head": (lambda f: reweigh(f, lambda w: w["lm_head.weight"][9, 2:3].fill_(math.nan)), CheckpointError,
                        "lm_head.weight", "NaN"),
    "nan in the embedding": (lambda f: reweigh(f, lambda w: w["model.embed_tokens.weight"][99, 2:3].fill_(math.nan)),
                             CheckpointError, "model.embed_tokens.weight", "NaN"),
    "no text part": (lambda f: edit(f, architectures=["Gemma3ForConditionalGeneration"], model_type="gemma3"),
                     CheckpointError, "text_config"),
    "empty index": (lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {}}'), CheckpointError,
                    "model.safetensors.index.json", "empty"),
    "quantised in a word": (lambda f: edit(f, quantization_config="gptq"), CheckpointError, "quantization_config must"),
    "deep json": (lambda f: (f / "config.json").write_text('{"a": ' * 100_000 + "1" + "}" * 100_000), CheckpointError,
                  "config.json"),
    "index of long names": (lambda f: shard(f, {DOWN: "x" * 5000}), CheckpointError, "xxx... cannot be read"),
    "two models": (lambda f: shutil.move(shutil.copy(f / "model.safetensors", f / "a.safetensors").with_name(
        "model.safetensors"), f / "b.safetensors"), CheckpointError, "in a.safetensors and in b.safetensors"),
    "two models, one by an index": (lambda f: (shutil.copy(f / "model.safetensors", f / "a.safetensors"), shard(f, {
        DOWN: "a.safetensors"})), CheckpointError, "model.safetensors.index.json names a.safetensors"),
    "not whole": (lambda f: (f / OURS).touch(), CheckpointError, "is not whole"),
    "not causal": (lambda f: edit(f, is_causal=False), UnsupportedArchitecture, "is_causal"),
    "no architectures": (lambda f: edit(f, architectures=None), CheckpointError, "list such as", "None"),
    "a head of another vocabulary": (lambda f: (edit(f, tie_word_embeddings=True), reweigh(f, lambda w: w.update({
        "lm_head.weight": torch.ones(7, 64)}))), CheckpointError, "lm_head.weight", "(7, 64)"),
    "strange index": (lambda f: shard(f, ["a"]), CheckpointError, "model.safetensors.index.json"),
    "missing tensor": (lambda f: reweigh(f, lambda w: w.pop(DOWN)), CheckpointError, DOWN, "missing"),
    "wrong shape": (lambda f: reweigh(f, lambda w: w.update({DOWN: w[DOWN][:, :50].clone()})), CheckpointError, DOWN,
                    "(64, 50)", "(64, 96)"),
    "wrong type": (lambda f: reweigh(f, lambda w: w.update({DOWN: w[DOWN].to(torch.int8)})), CheckpointError, DOWN,
                   "int8"),
    "too few layers": (lambda f: edit(f, num_hidden_layers=1), CheckpointError, "no place", "model.layers.1"),
    "unexpected tensor": (lambda f: reweigh(f, lambda w: w.update(adapter=torch.ones(2))), CheckpointError, "adapter"),
    "other vocabulary": (lambda f: edit(f, vocab_size=130), CheckpointError, "embed_tokens", "130"),
    "missing head": (lambda f: reweigh(f, lambda w: w.pop("lm_head.weight")), CheckpointError, "lm_head.weight"),
    "end of sequence": (lambda f: (f / "generation_config.json").write_text('{"eos_token_id": ["x"]}'), CheckpointError,
                        "eos_token_id"),
    "tokenizer that breaks as it reads": (
        lambda f: tokenizer(f, post_processor={
            "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<none>", "type_id": 0}}], "pair": [],
            "special_tokens": {},
        }), CheckpointError, "tokenizer cannot be read", "no entry"),
    "tokenizer.model alone": (
        lambda f: (f / "tokenizer.model").write_bytes(b"\x0a"), CheckpointError, "tokenizer cannot be read",
        "pip install sentencepiece protobuf"),
    "tokenizer without bounds": (
        lambda f: tokenizer(f, config={"model_max_length": "many"}), CheckpointError, "tokenizer cannot be read"),
    "weights that are a pipe": (lambda f: replaced(f, "model.safetensors", os.mkfifo), CheckpointError,
                                "model.safetensors is a pipe", "should be a file"),
    "weights that are a folder": (lambda f: replaced(f, "model.safetensors", os.mkdir), CheckpointError,
                                  "model.safetensors is a folder"),
    "an index that is a pipe": (lambda f: replaced(f, "model.safetensors.index.json", os.mkfifo), CheckpointError,
                                "index.json is a pipe"),
    "a shard that is a folder": (lambda f: (shard(f, {DOWN: "x.safetensors"}), os.mkdir(f / "x.safetensors")),
                                 CheckpointError, "x.safetensors is a folder"),
    "generation config that is a pipe": (lambda f: replaced(f, "generation_config.json", os.mkfifo), CheckpointError,
                                         "generation_config.json is a pipe"),
    "tokenizer that is a pipe": (lambda f: replaced(f, "tokenizer.json", os.mkfifo), CheckpointError,
                                 "tokenizer.json is a pipe"),
    "tokenizer that is a folder": (lambda f: replaced(f, "tokenizer_config.json", os.mkdir), CheckpointError,
                                   "tokenizer_config.json is a folder"),
    "broken tokenizer": (lambda f: (f / "tokenizer.json").write_text("{"), CheckpointError, "tokenizer"),
}  # fmt: skip


@pytest.fixture
def folder(make_checkpoint, tmp_path):
    return shutil.copytree(make_checkpoint(), tmp_path / "model")


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_checkpoint(folder, name):
    damage, kind, *words = DAMAGE[name]
    damage(folder)
    with refused(kind, *words):
        LLM(folder, device="cpu")


@pytest.mark.parametrize("key", [
    "architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "rope_theta",
    "rope_scaling", "layer_types", "sliding_window", "eos_token_id", "tie_word_embeddings", "dtype", "hidden_act",
])  # fmt: skip
def test_impossible_config_values(make_checkpoint, tmp_path, key):
    """Each either raises one of ours or, where the value means something, gives a model."""
    folder = shutil.copytree(make_checkpoint("mistral"), tmp_path / "model")
    for value in ("x", [], ["x"], {}, {"rope_type": "yarn", "factor": "x"}, -1, 0, 1.5, True, None):
        edit(folder, **{key: value})
        try:
            assert LLM(folder, device="cpu").generate([1], max_tokens=1)
        except OutriderError as error:
            assert "\n" not in str(error) and len(str(error)) < 500


def test_a_file_that_cannot_be_opened(make_checkpoint, monkeypatch):
    """As of another user: safetensors takes it for one that is not there."""
    opened = open

    def refuse(path, *args, **kwargs):
        if str(path).endswith(".safetensors"):
            raise PermissionError(13, "Permission denied")
        return opened(path, *args, **kwargs)

    monkeypatch.setattr("outrider.files.open", refuse, raising=False)
    with refused(CheckpointError, "model.safetensors cannot be read: Permission denied"):
        LLM(make_checkpoint(), device="cpu")


@pytest.mark.parametrize("reader", ["AutoConfig", "PreTrainedTokenizerFast"])
def test_memory_that_runs_out_is_no_damage(monkeypatch, reader):
    def fail(*args, **kwargs):
        raise MemoryError

    monkeypatch.setattr(f"transformers.{reader}.from_pretrained", fail)
    with pytest.raises(MemoryError):
        LLM("tiny", device="cpu")


@pytest.mark.parametrize("other", [None, b"\xff" * 100], ids=["none", "another"])
def test_a_folder_that_changes_while_it_is_loaded(folder, other):
    def progress(what: str, done: int, total: int) -> None:
        if (what, done) == ("loading weights", 1):
            (folder / "model.safetensors").unlink()
            if other is not None:
                (folder / "model.safetensors").write_bytes(other)

    with refused(CheckpointError, "model.safetensors is missing, truncated or damaged"):
        LLM(folder, device="cpu", progress=progress)


OWN_CODE = """
from array import array
from collections import UserList, deque
from functools import partial
from pathlib import Path
Path(__file__).with_name("ran").touch()
from transformers import LlamaConfig as C, PreTrainedTokenizerFast as T
Path(r"{marker}").touch()
"""


@pytest.mark.parametrize(
    "file, says",
    [
        ("config.json", {"model_type": "novel", "auto_map": {"AutoConfig": "evil.C"}}),
        ("config.json", {"auto_map": {"AutoConfig": "evil.C"}}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["evil.T", "evil.T"]}, "tokenizer_class": "Novel"}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["evil.T", None]}}),
    ],
)
def test_a_checkpoints_own_code_never_runs(folder, tmp_path, monkeypatch, capsys, file, says):
    """Not even if somebody sits there and says yes: transformers would ask."""
    marker = tmp_path / "marker"
    (folder / "evil.py").write_text(OWN_CODE.format(marker=marker))
    own = folder / file
    own.write_text(json.dumps((json.loads(own.read_text()) if own.exists() else {}) | says))
    answers = [*"yyyy"]
    monkeypatch.setattr("builtins.input", lambda *_: answers.pop())
    try:
        LLM(folder, device="cpu")
    except CheckpointError as error:
        assert "trust_remote_code" not in str(error)
    assert not marker.exists() and len(answers) == 4
    assert capsys.readouterr().out == ""


def test_what_is_no_name_of_a_model(tmp_path):
    for name in (
        None,
        5,
        2.5,
        "",
        "  ",
        [],
        "a" * 5000,
        "a/" * 2500,
        "~nouser/x",
        "x\0y",
        "org/repo/file.bin",
        "a/b:c/d",
    ):
        with refused(ModelNotFound):
            LLM(name, device="cpu")


def test_wrong_places(tmp_path, make_checkpoint):
    file = make_checkpoint() / "config.json"
    for name in ("/nowhere/at/all", "no-such-model", "./here", "~/there", file, str(file), tmp_path, "a/b/c"):
        with refused(ModelNotFound, str(name).replace("~", "")):
            LLM(name, device="cpu")
    with refused(ModelNotFound, "'no-such-model'", "tiny", "hub id"):
        LLM("no-such-model")
    with refused(ModelNotFound, "nobody/nothing", "tiny"):  # offline: the hub cannot be asked
        LLM("nobody/nothing")


def test_text_for_a_model_without_a_tokenizer(make_checkpoint):
    with refused(ConfigError, "tokenizer.json", "token ids"):
        LLM(make_checkpoint(), device="cpu").generate("Once")


@pytest.mark.parametrize("keywords, words", [
    ({"dtype": "int4"}, ("int4", "bfloat16")), ({"dtype": torch.float32}, ("dtype", "float32")),
    ({"device": "abacus"}, ("abacus", "cpu")), ({"device": "meta"}, ("meta", "cpu")),
    ({"device": "cuda:99"}, ("cuda:99", "cpu")), ({"device": 5}, ("5", "cpu")), ({"device": None}, ("None", "cpu")),
    ({"quantization": ["int4"]}, ("quantization", "int8, int4")), ({"progress": 3}, ("progress", "3")),
    ({"max_num_sequences": 3}, ("'max_num_sequences'", "max_num_seqs")),
    ({"quantisation": "int8"}, ("'quantisation'", "quantization", "max_num_seqs")),
    ({"tensor_parallel_mode": "sideways"}, ("tensor_parallel_mode", "'sideways'", "gather", "auto")),
    *[({key: value}, (key, "at least 1", repr(value)))
      for key in ("max_num_seqs", "max_model_len", "max_num_batched_tokens", "kv_memory")
      for value in (0, -1, 1.5, "8", True)],
    ({"max_num_seqs": None}, ("max_num_seqs", "at least 1")),
])  # fmt: skip
def test_engine_options(keywords, words):
    with refused(ConfigError, *words):
        LLM("tiny-draft", **({"device": "cpu"} | keywords))


# --- sampling --------------------------------------------------------------------------------------------------------

NAN, INF = math.nan, math.inf
BAD_SAMPLING = {
    "n": (0, -1, 1.5, "2", None, True), "temperature": (-0.1, NAN, INF, "hot", None, True, Fraction(10**400)),
    "top_k": (-2, 1.5, "5", None), "top_p": (0, -0.1, 1.1, NAN, "x", None), "min_p": (-0.1, 1.1, NAN, "x", None),
    "repetition_penalty": (0, -1, NAN, INF, "x", None), "presence_penalty": (-2.1, 2.1, NAN, "x", None),
    "frequency_penalty": (-2.1, 2.1, NAN, "x", None), "seed": (1.5, "x", 2**64, -(2**63) - 1, True),
    "max_tokens": (0, -1, 1.5, "9", None, True), "min_tokens": (-1, 257, 1.5, "9", None, True),
    "stop": (5, "", [""], ["a", 5], b"x", {"a"}, "\ud800"), "stop_token_ids": (5, [-1], ["a"], [1.5], [True], "12"),
    "logit_bias": (5, [1], {"a": 1}, {-1: 1}, {1: NAN}, {1: "x"}, {1: None}, {True: 1}, {1.5: 1}, {1: 10**400}),
    "logprobs": (-1, 1.5, "x", True), "prompt_logprobs": (-1, 1.5, "x", True, 10**9),
    "bad_words": ("x", [""], [" "], [5], 5, ["\ud800"], ["a"] * 1025),
    "allowed_token_ids": (5, [], [-1], ["a"], [True]),
    "logits_processors": (5, [5], ["x"], print),
    "ignore_eos": ("yes", None, 1), "include_stop_str_in_output": ("yes", None, 1),
    "skip_special_tokens": ("yes", None, 1), "structured_outputs": (5, "x", [], {"jsn": {}}, {}),
    "prediction": (5, ["a"], b"x", "\ud800", "x" * (2**20 + 1)),
}  # fmt: skip


@pytest.mark.parametrize("name, value", [(n, v) for n, values in BAD_SAMPLING.items() for v in values])
def test_sampling_params(name, value):
    with refused(ConfigError, name):
        SamplingParams(**{name: value})


def test_every_sampling_parameter_is_tried():
    assert BAD_SAMPLING.keys() == SamplingParams.__dataclass_fields__.keys()


def test_contradictory_sampling(random_llm):
    with refused(ConfigError, "min_tokens (9)", "max_tokens (8)"):
        SamplingParams(min_tokens=9, max_tokens=8)
    with refused(ConfigError, "'top_q'", "top_p", "temperature"):
        random_llm.generate([1], top_q=1)
    with refused(ConfigError, "sampling_params", "not both"):
        random_llm.generate([1], SamplingParams(), top_p=0.5)
    with refused(ConfigError, "sampling_params"):
        random_llm.generate([1], {"temperature": 0})
    for token in ({"logit_bias": {128: 1.0}}, {"stop_token_ids": [128]}, {"allowed_token_ids": [1, 128]}):
        with refused(ConfigError, "128"):
            random_llm.generate([1], **token)
    with refused(ConfigError, "stop_token_ids", "tokenizer"):
        random_llm.generate([1], stop="x")
    with refused(ConfigError, "bad_words", "tokenizer"):
        random_llm.generate([1], bad_words=["x"])
    with refused(RequestError, "allowed_token_ids", "every token"):
        random_llm.generate([1], allowed_token_ids=[5], logit_bias={5: -math.inf})


def test_biases_are_numbers_of_any_size(random_llm):
    """Whole numbers, too: no tensor takes one of more than 64 bits."""
    best, second = random_llm.generate([1], max_tokens=1, temperature=0, logprobs=2)[0].logprobs[0].top
    for banned in (-(10**30), -(10**300), -1e300):
        (output,) = random_llm.generate([1], max_tokens=1, temperature=0, logit_bias={best: banned})
        assert output.token_ids == [second]
    (output,) = random_llm.generate([1], max_tokens=1, logit_bias={7: 10**30})
    assert output.token_ids == [7]


# --- requests --------------------------------------------------------------------------------------------------------


@pytest.fixture
def still_works(random_llm):
    """After the refusals of a test nothing is left, and a good request gives what it gave before."""
    before = random_llm.generate([1, 2, 3], temperature=0, max_tokens=8)[0].token_ids
    yield
    assert_released(random_llm)
    assert random_llm.generate([1, 2, 3], temperature=0, max_tokens=8)[0].token_ids == before


@pytest.mark.parametrize("prompt, kind, words", [
    ([], EmptyPrompt, ("empty", "one token")), ([[]], EmptyPrompt, ("empty",)),
    ([[1, 2], []], EmptyPrompt, ("empty",)), ([128], RequestError, ("128",)), ([1, -1], RequestError, ("-1",)),
    ([[1], [2**70]], RequestError, ("token id",)), ([True], RequestError, ("True",)),
    ([1, "a"], ConfigError, ("token ids",)), ([1.5], ConfigError, ("float",)), ([None], ConfigError, ("token ids",)),
    (None, ConfigError, ("text", "token ids")), (5, ConfigError, ("text", "token ids")),
    ({"prompt": [1]}, ConfigError, ("text", "token ids")), (torch.tensor([1.0, 2.0]), ConfigError, ("token ids",)),
    ("text", ConfigError, ("tokenizer", "token ids")), (["a", "b"], ConfigError, ("tokenizer",)),
    (b"text", ConfigError, ("text", "token ids")),
])  # fmt: skip
def test_prompts(random_llm, still_works, prompt, kind, words):
    for _ in range(2):
        with refused(kind, *words):
            random_llm.generate(prompt)
    with pytest.raises(OutriderError):
        random_llm.stream(prompt[-1] if isinstance(prompt, list) and prompt and isinstance(prompt[0], list) else prompt)


def test_too_long(random_llm, still_works):
    context = random_llm.runner.max_len
    with refused(RequestTooLong, str(context), "shorten the prompt"):
        random_llm.generate([1] * (context + 1))
    with refused(RequestTooLong, str(context + 1), "max_tokens to 8"):
        random_llm.generate([[1], [1] * (context - 8)], max_tokens=9)  # one bad prompt: none is left running


def test_limits_of_the_engine(make_llm):
    llm = make_llm(engine={"max_model_len": 20})
    assert len(llm.generate([1] * 12, max_tokens=8, ignore_eos=True)[0].token_ids) == 8
    with refused(RequestTooLong, "21", "20", "max_tokens to 8"):
        llm.generate([1] * 12, max_tokens=9)
    with refused(ConfigError, "max_model_len", "2048"):
        make_llm(engine={"max_model_len": 5000})
    block = llm.runner.kv.nbytes(1)
    for memory in (1, block - 1):
        with refused(ConfigError, f"kv_memory is {memory} bytes", str(block)):
            make_llm(engine={"kv_memory": memory})
    llm = make_llm(engine={"kv_memory": block})
    assert len(llm.generate([1], max_tokens=31, ignore_eos=True)[0].token_ids) == 31
    with refused(RequestTooLong, "kv_memory", f"over the {block / 2**10:,.0f} KiB"):
        llm.generate([1], max_tokens=32)
    assert_released(llm)


def test_draft_models_count_for_memory(make_llm, make_checkpoint):
    own = make_llm().runner.kv.nbytes(20)
    draft = {"model": str(make_checkpoint(noise=0.01))}
    llm = make_llm(engine={"kv_memory": 3 * own})
    assert llm.generate([1], max_tokens=40)
    llm.speculative_config = draft
    assert llm.generate([1], max_tokens=10)
    with refused(RequestTooLong, "kv_memory"):
        llm.generate([1], max_tokens=40)
    llm = make_llm(engine={"kv_memory": 2 * own - 1})
    with refused(ConfigError, f"kv_memory is {2 * own - 1} bytes", str(2 * own)):
        llm.speculative_config = draft
    assert llm.generate([1], max_tokens=10)[0].metrics["method"] == "none"


def test_what_is_queued_while_a_draft_model_loads_must_fit_beside_it(make_llm, make_checkpoint, monkeypatch):
    llm = make_llm(engine={"kv_memory": 4 * make_llm().runner.kv.nbytes(20)})
    load, requests = llm._load_draft, []

    def meanwhile(*given):
        for most in (70, 10):
            requests.extend(llm.engine.add([1], SamplingParams(n=2, max_tokens=most, ignore_eos=True)))
        return load(*given)

    monkeypatch.setattr(llm, "_load_draft", meanwhile)
    llm.speculative_config = {"model": str(make_checkpoint(noise=0.01))}
    for _ in llm.engine.run():
        pass
    assert [len(request.seq.output) for request in requests] == [0, 0, 10, 10]  # they fail before they begin
    with refused(RequestTooLong, "kv_memory"):
        llm.engine.finish(requests[:1])
    assert_released(llm)


def test_text_and_chat(tiny_llm, random_llm):
    for prompt in ("", ["Hello", ""]):
        with refused(EmptyPrompt, "empty"):
            tiny_llm.generate(prompt)
    with refused(ConfigError, "chat template", "generate"):
        random_llm.chat([{"role": "user", "content": "Hello"}])
    with refused(EmptyPrompt, "give at least one"):
        tiny_llm.chat([])
    good = {"role": "user", "content": "Hello"}
    for bad in (
        "Hello",
        5,
        None,
        good,
        [good, "Hello"],
        [{"role": "user"}],
        [{"content": "Hello"}],
        [5],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": None}],
        [{"role": 5, "content": "x"}],
    ):
        with refused(ConfigError, "message"):
            tiny_llm.chat(bad, max_tokens=1)
    for call in (tiny_llm.chat, tiny_llm.stream):
        with refused(ConfigError, "n must be 1"):
            call([good], n=2, max_tokens=1)
    with refused(ConfigError, "message"):
        tiny_llm.stream([good, "Hello"])
    assert_released(tiny_llm)
    assert tiny_llm.chat([good], max_tokens=1).token_ids


# --- speculation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config, words", [
    ({"method": "magic"}, ("'magic'", "ngram", "draft_model")), ({"method": 5}, ("5", "ngram")),
    ({"method": ["ngram"]}, ("ngram",)), ({}, ("method", "ngram")), ({"num_speculative_tokens": 4}, ("method",)),
    ("ngram", ("mapping", "ngram")), (5, ("mapping",)),
    ({"method": "ngram", "prompt_lookup_mx": 3}, ("'prompt_lookup_mx'", "prompt_lookup_max")),
    ({"method": "ngram", "model": "tiny-draft"}, ("'model'", "prompt_lookup_max")),
    ({"method": "ngram", "prompt_lookup_max": "3"}, ("prompt_lookup_max", "int")),
    ({"method": "ngram", "prompt_lookup_max": 2.5}, ("prompt_lookup_max", "int")),
    ({"method": "ngram", "prompt_lookup_max": True}, ("prompt_lookup_max", "int")),
    ({"method": "ngram", "prompt_lookup_max": None}, ("prompt_lookup_max", "int")),
    ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 3}, ("prompt_lookup_min", "5 and 3")),
    ({"method": "ngram", "prompt_lookup_min": 0}, ("prompt_lookup_min", "at least 1")),
    ({"method": "ngram", "num_speculative_tokens": -1}, ("num_speculative_tokens", "-1")),
    ({"method": "ngram", "num_speculative_tokens": 1.5}, ("num_speculative_tokens", "1.5")),
    ({"method": "ngram", "num_speculative_tokens": "4"}, ("num_speculative_tokens", "'4'")),
    ({"method": "ngram", "acceptance_method": "wishful"}, ("wishful", "coupled")),
    ({"method": "draft_model"}, ("model", "tiny-draft")), ({"method": "draft_model", "model": 5}, ("model", "str")),
])  # fmt: skip
def test_speculative_config(random_llm, still_works, config, words):
    before = random_llm.speculative_config
    with refused(ConfigError, *words):
        random_llm.speculative_config = config
    assert random_llm.speculative_config is before
    with refused(ConfigError, *words):  # known before anything is loaded, even a model that is not there
        LLM("no-such-model", speculative_config=config)


@pytest.mark.parametrize("text, words", [
    ("ngram:8", ("'8'", "key=value")), ("ngram:k=many", ("num_speculative_tokens", "many")), ("", ("method", "ngram")),
    (":k=4", ("method", "ngram")), ("ngram:=4", ("option", "prompt_lookup_max")),
])  # fmt: skip
def test_short_form(text, words):
    with refused(ConfigError, *words):
        drafters.create(SpeculativeConfig.parse(text))


def test_short_form_reads_values():
    config = SpeculativeConfig.parse("draft_model:model=a/b,k=3,x=1.5,y=true,z=none")
    assert (config.method, config.num_speculative_tokens) == ("draft_model", 3)
    assert config.options == {"model": "a/b", "x": 1.5, "y": True, "z": None}


@pytest.mark.parametrize("method", ["ngram", "suffix", "lookahead", "self", "cascade", "merge"])
def test_a_huge_draft_length_is_harmless(random_llm, method):
    """What goes beyond the room that a request has left is not even drafted, or cut away."""
    options = {"drafters": [{"method": "self"}, {"method": "ngram"}]} if method == "merge" else {}
    prompts = [[1, 2, 1, 2, 1], [3]]
    random_llm.speculative_config = None
    expected = [o.token_ids for o in random_llm.generate(prompts, max_tokens=8, temperature=0)]
    random_llm.speculative_config = {"method": method, "num_speculative_tokens": 10**9, **options}
    outputs = random_llm.generate(prompts, max_tokens=8, temperature=0)
    assert [o.token_ids for o in outputs] == expected
    for output in outputs:
        assert sum(output.metrics["speculative_decoding"]["per_step_accepted"]) < 8


def test_draft_models(tiny_llm, random_llm, make_checkpoint, tmp_path, still_works):
    before = tiny_llm.generate("Once", temperature=0, max_tokens=4)[0].token_ids
    swapped = shutil.copytree(embedded()["tiny-draft"], tmp_path / "swapped")
    tokenizer = json.loads((swapped / "tokenizer.json").read_text("utf-8"))
    vocab = tokenizer["model"]["vocab"]
    one, two = (token for token, i in vocab.items() if i in (700, 701))
    vocab[one], vocab[two] = vocab[two], vocab[one]
    (swapped / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    broken = shutil.copytree(embedded()["tiny-draft"], tmp_path / "broken")
    truncate(broken, "model.safetensors")
    for llm, draft, kind, words in [
        (tiny_llm, swapped, VocabularyMismatch, ("id 700", repr(one), repr(two), "tokenizer")),
        (tiny_llm, make_checkpoint(), VocabularyMismatch, ("128", "8192")),
        (random_llm, "tiny-draft", VocabularyMismatch, ("128", "8192")),
        (random_llm, make_checkpoint(vocab_size=64), VocabularyMismatch, ("64", "128")),
        (tiny_llm, tmp_path / "nowhere", ModelNotFound, ("nowhere",)),
        (tiny_llm, "tiny-daft", ModelNotFound, ("tiny-daft", "tiny-draft")),
        (tiny_llm, broken, CheckpointError, ("truncated",)),
    ]:
        with refused(kind, *words):
            llm.speculative_config = {"method": "draft_model", "model": str(draft)}
        assert llm.speculative_config.method == "none"
    assert tiny_llm.generate("Once", temperature=0, max_tokens=4)[0].token_ids == before


# --- what else is taken, and what is not ------------------------------------------------------------------------------


def test_prompts_of_other_types(random_llm, tiny_llm):
    """Arrays and tensors of token ids are prompts; lists of them are several."""
    params = {"temperature": 0, "max_tokens": 4}
    expected = [o.token_ids for o in random_llm.generate([[1, 2, 3], [4, 5]], **params)]
    short = partial(torch.tensor, dtype=torch.int16)
    for kind in (torch.tensor, short, np.array, tuple, list, deque, partial(array, "i")):
        first, second = kind([1, 2, 3]), kind([4, 5])
        assert random_llm.generate(first, **params)[0].token_ids == expected[0]
        assert [o.token_ids for o in random_llm.generate([first, second], **params)] == expected
        assert [e.token_id for e in random_llm.stream(second, **params)] == expected[1]
    mixed = [np.int64(1), torch.tensor(2), 3]
    (output,) = random_llm.generate(mixed, **params)
    assert output.token_ids == expected[0] and list(map(type, output.prompt_token_ids)) == [int] * 3
    assert tiny_llm.generate(["One", tiny_llm.encode("One")], **params)[0].prompt == "One"
    column = UserList(["One", "Two"])  # as those of datasets are sequences, and no lists
    assert [o.prompt for o in tiny_llm.generate(column, UserList([SamplingParams(**params)] * 2))] == column
    turns = [[{"role": "user", "content": text}] for text in column]
    assert tiny_llm.chat(deque(map(deque, turns)), **params)[1].token_ids == tiny_llm.chat(turns[1], **params).token_ids
    for bad in (torch.tensor([[1, 2]]), torch.tensor([1.0]), torch.tensor([True]), np.array([1.5]), np.array("x"),
                torch.tensor(1), [np.float32(1)], [torch.tensor([1.0])], {1, 2}, range, b"x",
                [[[1], [2, 3]]], [[1, [2]]], torch.tensor([1]).to("meta"), torch.tensor([1]).to_sparse()):  # fmt: skip
        with refused(ConfigError, "token ids"):
            random_llm.generate(bad, **params)
    with refused(RequestError, "128"):
        random_llm.generate(np.array([128]))
    with refused(EmptyPrompt, "empty"):
        random_llm.generate(torch.tensor([], dtype=torch.long))


def test_draft_models_by_path(random_llm, make_checkpoint):
    path = make_checkpoint(noise=0.01)
    for config in ({"model": path}, {"method": "merge", "drafters": [{"method": "draft_model", "model": path}]}):
        random_llm.speculative_config = config
        assert random_llm.generate([1, 2], max_tokens=3)


def test_a_refused_prompt_among_good_ones_leaves_nothing(random_llm, still_works):
    with refused(RequestTooLong, "shorten"):
        random_llm.generate([[1], [2], [1] * 5000], max_tokens=4, n=3)
    with refused(ConfigError, "token ids"):
        random_llm.generate([[1], "text", [2.5]] if random_llm.tokenizer else [[1], [2.5]], max_tokens=4)


# --- chat ------------------------------------------------------------------------------------------------------------

TALK = [{"role": "user", "content": "Hello there"}]
SHORT = {"temperature": 0, "max_tokens": 4}


def test_several_conversations(tiny_llm):
    others = [{"role": "user", "content": "What is a fox?"}]
    one, two = tiny_llm.chat(TALK, **SHORT), tiny_llm.chat(others, **SHORT)
    both = tiny_llm.chat([TALK, others], **SHORT)
    assert [o.token_ids for o in both] == [one.token_ids, two.token_ids]
    assert [o.token_ids for o in tiny_llm.chat((tuple(TALK),), **SHORT)] == [one.token_ids]
    with refused(EmptyPrompt, "conversation"):
        tiny_llm.chat([TALK, []], **SHORT)
    with refused(ConfigError, "message"):
        tiny_llm.chat([TALK, TALK[0]], **SHORT)
    assert_released(tiny_llm)


def test_parameters_for_each_prompt(tiny_llm):
    given = [SamplingParams(max_tokens=4, n=2, seed=1), SamplingParams(max_tokens=7, temperature=0)]
    outputs = tiny_llm.generate(["Once", "Two"], given)
    alone = tiny_llm.generate("Once", given[0]) + tiny_llm.generate("Two", given[1])
    assert [o.token_ids for o in outputs] == [o.token_ids for o in alone] and len(outputs) == 3
    assert [o.prompt for o in outputs] == ["Once", "Once", "Two"]
    chats = tiny_llm.chat([TALK, TALK], [given[1], given[1]])
    assert [o.token_ids for o in chats] == 2 * [tiny_llm.chat(TALK, given[1]).token_ids]
    with refused(ConfigError, "2 sampling_params for 1 prompts"):
        tiny_llm.generate("Once", given)
    with refused(ConfigError, "not both"):
        tiny_llm.generate(["Once", "Two"], given, max_tokens=3)
    with refused(ConfigError, "n must be 1, not 2"):
        tiny_llm.chat([TALK, TALK], given)
    with refused(ConfigError, "SamplingParams"):
        tiny_llm.generate(["Once"], [{"max_tokens": 3}])


def test_a_head_is_no_model(folder):
    with refused(UnsupportedArchitecture, "no model but a head for one: give it to method medusa"):
        LLM("tiny-medusa")
    with refused(ModelNotFound, "tiny, tiny-draft)", "smollm2"):
        LLM("nothere")
    edit(folder, medusa_num_heads=3)  # a model that has heads beside its own weights is one
    LLM(folder, dtype="float32", device="cpu")


def test_content_as_parts(tiny_llm):
    def talk(*parts):
        return [{"role": "user", "content": list(parts)}]

    text = {"type": "text", "text": "Hello there"}
    assert tiny_llm.render(talk(text)) == tiny_llm.render(TALK)
    assert tiny_llm.render(talk(text, {"type": "text", "text": "you"})) == tiny_llm.render(
        [{"role": "user", "content": "Hello there\nyou"}]
    )
    for part in (
        "Hello there",
        {"type": "input_text", "text": "Hello there"},
        {"type": "output_text", "text": "Hello there"},
    ):
        assert tiny_llm.render(talk(part)) == tiny_llm.render(TALK)
    assert "".join(e.text for e in tiny_llm.stream(talk(text), **SHORT)) == tiny_llm.chat(TALK, **SHORT).text
    for part in ({"type": "image_url", "image_url": {"url": "data:" + "x" * 10**5}}, {"type": "text"}, 5,
                 {"type": "text", "text": 5}, {"text": "Hello"}, {}):  # fmt: skip
        with refused(ConfigError, "'type': 'text'"):
            tiny_llm.chat(talk(text, part), **SHORT)
    with refused(ConfigError, "message"):
        tiny_llm.chat([{"role": "user", "content": []}], **SHORT)


def test_chat_templates(tiny_llm):
    template = "{{ messages[0].content }}{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"
    template += "{% if add_generation_prompt %}!{% endif %}"

    def shown(*args, **kwargs):
        return tiny_llm.tokenizer.decode(tiny_llm.render(TALK, *args, **kwargs))

    assert shown(chat_template=template) == "Hello there!"
    assert shown(chat_template=template, chat_template_kwargs={"enable_thinking": False}) == "Hello thereFalse!"
    assert shown(chat_template=template, add_generation_prompt=False) == "Hello there"
    ended = {"chat_template": template, "chat_template_kwargs": {"enable_thinking": True}}
    assert tiny_llm.chat(TALK, **ended, **SHORT).prompt_token_ids == tiny_llm.encode("Hello thereTrue!")[1:]  # no bos
    assert (
        list(tiny_llm.stream(TALK, **ended, **SHORT))[-1].output.token_ids
        == tiny_llm.chat(TALK, **ended, **SHORT).token_ids
    )
    begun = [*TALK, {"role": "assistant", "content": "Once upon"}]
    goes_on = tiny_llm.render(begun, continue_final_message=True, add_generation_prompt=False)
    assert tiny_llm.tokenizer.decode(goes_on).endswith("Once upon")
    for bad in ({"chat_template": 5}, {"chat_template_kwargs": 5}, {"chat_template_kwargs": {5: 6}},
                {"chat_template": "{{ x.y.z }}"}, {"chat_template": "{% for"}, {"continue_final_message": True},
                {"chat_template": "{{ raise_exception('no\nno') }}"},
                {"chat_template_kwargs": {"tokenize": True}}, {"chat_template_kwargs": {"chat_template": "x"}},
                ):  # fmt: skip
        with refused(ConfigError, "template"):
            tiny_llm.chat(TALK, **bad, **SHORT)
    with refused(ConfigError, "conversation"):
        tiny_llm.stream("Hello", chat_template_kwargs={}, **SHORT)


@pytest.mark.parametrize("template", [
    "{% for i in range(10**12) %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
])  # fmt: skip
def test_a_looping_template_comes_to_an_end(tiny_llm, monkeypatch, template):
    monkeypatch.setattr(outrider.llm, "RENDERING", 0.5)
    threads = set(threading.enumerate())
    with refused(ConfigError, "template"):
        tiny_llm.render(TALK, chat_template=template)
    for thread in set(threading.enumerate()) - threads:  # what rendered it is stopped, too
        thread.join(30)
        assert not thread.is_alive()


def test_nobody_else_is_stopped_for_a_late_template(monkeypatch):
    """A thread that has just come to its end is still there when it is stopped: nobody else has its number."""
    late, rendering = threading.Event(), list[threading.Thread]()

    def work():
        rendering.append(threading.current_thread())
        late.wait(60)

    def stop(*_):
        late.set()
        rendering[0].join(0.5)
        assert rendering[0].is_alive()

    monkeypatch.setattr(outrider.llm.ctypes, "pythonapi", SimpleNamespace(PyThreadState_SetAsyncExc=stop))
    with pytest.raises(outrider.llm.Late):
        outrider.llm._within(0.1, work)
    rendering[0].join(30)
    assert not rendering[0].is_alive()


def test_a_huge_prompt_is_refused_without_reading_it(tiny_llm, monkeypatch):
    """Nothing like all of it is tokenized; what nearly fits is counted exactly."""
    real, read = type(tiny_llm.tokenizer).__call__, []

    def count(self, text, **options):
        read.append(len(text))
        return real(self, text, **options)

    monkeypatch.setattr(type(tiny_llm.tokenizer), "__call__", count)
    context = tiny_llm.engine.max_len
    for text in ("Once upon a time. " * 600_000, "x" * 10**7, "日本語" * 10**6):
        read.clear()
        with refused(RequestTooLong, str(len(text)), str(context), "shorten the prompt"):
            tiny_llm.generate(text)
        assert sum(read) < 64 * context
    with refused(RequestTooLong, "shorten the prompt"):
        tiny_llm.chat([{"role": "user", "content": "Once upon a time. " * 600_000}])
    word = "Once upon a time, there was. "
    text = word * (context // len(tiny_llm.encode(word)) - 2)
    assert len(tiny_llm.encode(text)) < context and tiny_llm.encode(text) == tiny_llm.tokenizer(text)["input_ids"]


@pytest.mark.parametrize("tensor", ["model.norm.weight", "model.layers.0.mlp.down_proj.weight", "lm_head.weight"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite(make_checkpoint, tmp_path, tensor, value):
    folder = shutil.copytree(make_checkpoint(), tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights[tensor].view(-1)[7] = value
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with refused(CheckpointError, "NaN or infinite"):
        LLM(folder, dtype="float32")
