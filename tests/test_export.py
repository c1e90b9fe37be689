"""An exported checkpoint is the same model, here and in transformers; and a failed export leaves nothing."""

from __future__ import annotations

import json
import math
import os
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from shutil import copytree

import pytest
import torch
from helpers import logits_after
from safetensors.torch import load_file, save_file
from test_families import FULL, GROWING
from test_gguf import OLMO3, PHI4, Kind, write
from test_truth import LLAMA3, check, prompt_of, reference, rope

from outrider import LLM, export
from outrider.cli import main
from outrider.errors import CheckpointError, ConfigError, ModelNotFound, UnsupportedArchitecture
from outrider.find import embedded
from outrider.load import open_source, read_config, read_tokenizer

EIGHT, FOUR = partial(export.quantize, bits=8), partial(export.quantize, calibration="none")


@pytest.mark.parametrize(
    "arch, config",
    [
        ("llama", {}),
        ("llama", rope("llama3", **LLAMA3)),
        ("qwen3", {}),
        ("qwen2", {}),
        ("ministral3", {"rope_parameters": GROWING}),
        ("olmo3", OLMO3),
    ],
)
def test_gguf_to_a_folder(make_checkpoint, tmp_path, arch, config):
    folder = make_checkpoint(arch, **config)
    path = write(folder, tmp_path / "model.gguf")
    target = export.export(path, tmp_path / "out")
    check(LLM(target, device="cpu"), reference(folder), [prompt_of(30)], 16, rtol=1e-4, atol=1e-4)
    check(LLM(path, device="cpu"), reference(target), [prompt_of(30)], 16, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "arch, config, unsaid",
    [
        ("exaone4", {"sliding_window": None, "layer_types": [FULL, FULL]}, ()),
        ("smollm3", {"num_hidden_layers": 5, **rope("default")}, ["smollm3.rope.freq_base"]),
        ("ernie4_5", rope("default"), ["ernie4_5.rope.freq_base"]),
        ("phi3", {}, ()),
    ],
)
def test_what_a_file_does_not_say_is_no_default(make_checkpoint, tmp_path, arch, config, unsaid):
    """Transformers' classes have another window, another base and tokens that end texts and pad them."""
    path = write(make_checkpoint(arch, **config), tmp_path / "model.gguf", **dict.fromkeys(unsaid))
    target = export.export(path, tmp_path / "out")
    assert read_config(target) == open_source(path).config and not read_config(target).eos
    ours, theirs = LLM(path, device="cpu"), LLM(target, device="cpu")
    assert torch.equal(logits_after(ours, prompt_of(30)), logits_after(theirs, prompt_of(30)))
    assert reference(target).config.pad_token_id is None


def test_a_config_that_would_be_read_as_another_is_not_written(make_checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "read_config", lambda folder: replace(read_config(folder), rms_norm_eps=0.5))
    with pytest.raises(UnsupportedArchitecture, match=r"its rms_norm_eps of 1e-06 would be read as 0.5"):
        export.export(make_checkpoint(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_rope_that_changes_behind_the_original_context(make_checkpoint, tmp_path):
    """Transformers refuses this one: its default `pad_token_id` is beyond so small a vocabulary."""
    path = write(make_checkpoint("phi3", **PHI4), tmp_path / "model.gguf")
    target = export.export(path, tmp_path / "out", "float32")
    ours, theirs = LLM(path, device="cpu", dtype="float32"), LLM(target, device="cpu")
    for n in (20, 40):  # before and behind it
        assert torch.equal(logits_after(ours, prompt_of(n)), logits_after(theirs, prompt_of(n)))


def test_quantised_weights_become_dense(make_checkpoint, tmp_path):
    path = write(make_checkpoint(tie_word_embeddings=True), tmp_path / "model.gguf", Kind.Q4_1)
    target = export.export(path, tmp_path / "out", "float32")
    ours, theirs = LLM(path, device="cpu", dtype="float32"), LLM(target, device="cpu")
    assert torch.equal(logits_after(ours, [1, 2, 3]), logits_after(theirs, [1, 2, 3]))
    half = export.export(path, tmp_path / "half")
    assert LLM(half, device="cpu").runner.model.dtype == torch.bfloat16


def test_a_head_that_is_there_is_written_as_one(make_checkpoint, tmp_path):
    """Others would tie it to the embedding, as the config it came with says."""
    folder = copytree(make_checkpoint(), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    written = export.export(folder, tmp_path / "out")
    assert json.loads((written / "config.json").read_text())["tie_word_embeddings"] is False
    assert "lm_head.weight" in load_file(written / "model.safetensors")


def test_a_head_that_is_the_embedding_is_said_to_be(make_checkpoint, tmp_path):
    """Around a text part, saying nothing may mean that it is; of the part alone, it does not."""
    folder = copytree(make_checkpoint("mistral", tie_word_embeddings=True), tmp_path / "model")
    inner = json.loads((folder / "config.json").read_text())
    del inner["tie_word_embeddings"]
    outer = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "text_config": inner}
    (folder / "config.json").write_text(json.dumps(outer))
    written = export.export(folder, tmp_path / "out")
    assert json.loads((written / "config.json").read_text())["tie_word_embeddings"] is True
    ours, theirs = LLM(folder, device="cpu"), LLM(written, device="cpu")
    assert torch.equal(logits_after(ours, prompt_of(30)), logits_after(theirs, prompt_of(30)))


def test_tokenizer_and_shards(tmp_path, monkeypatch):
    own = read_tokenizer(embedded()["tiny"])
    path = write(embedded()["tiny"], tmp_path / "tiny.gguf", Kind.BF16, tokenizer=own)
    monkeypatch.setattr(export, "SHARD", 2**22)
    for source in (path, "tiny"):
        target = export.export(source, tmp_path / f"out-{len(str(source))}", "bfloat16")
        assert len(list(target.glob("model-*.safetensors"))) > 3
        ours, theirs = LLM(target, device="cpu"), LLM("tiny", device="cpu")
        assert ours.runner.model.config.eos == theirs.runner.model.config.eos
        options = {"temperature": 0, "max_tokens": 24}
        assert ours.generate("The dog", **options)[0].text == theirs.generate("The dog", **options)[0].text
        assert json.loads((target / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_tokenizer_that_would_be_read_as_another_is_not_written(make_checkpoint, tmp_path):
    """Transformers has its own for Qwen2, whatever is in the folder."""
    tokenizer = read_tokenizer(embedded()["tiny"])
    folder = make_checkpoint("qwen2", vocab_size=len(tokenizer))
    for pre, fits in (("qwen2", True), ("gpt-2", False)):
        path = write(folder, tmp_path / f"{pre}.gguf", tokenizer=tokenizer, pre=pre)
        with nullcontext() if fits else pytest.raises(UnsupportedArchitecture, match="from a folder as Qwen2Tokenizer"):
            export.export(path, tmp_path / pre)
        assert (tmp_path / pre).exists() == fits


def test_a_tokenizer_of_vocabulary_and_merges(make_checkpoint, tmp_path):
    """The layout of before tokenizer.json is copied whole, too."""
    source, tiny = tmp_path / "source", embedded()["tiny"]
    copytree(make_checkpoint(), source)
    model = json.loads((tiny / "tokenizer.json").read_text())["model"]
    (source / "vocab.json").write_text(json.dumps(model["vocab"]))
    (source / "merges.txt").write_text("\n".join(["#version: 0.2", *(" ".join(merge) for merge in model["merges"])]))
    (source / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    (source / "quantize_config.json").write_text('{"bits": 4}')  # of weights that are no more
    ids = read_tokenizer(source)("The dog")["input_ids"]
    assert len(ids) < 4
    for folder in (export.export(source, tmp_path / "dense"), export.quantize(source, tmp_path / "int8", 8)):
        assert read_tokenizer(folder)("The dog")["input_ids"] == ids
        assert not (folder / "quantize_config.json").exists()


def test_all_chat_templates_are_copied(tmp_path):
    """transformers writes those beside the default, such as one for tools, into a folder."""
    source, templates = copytree(embedded()["tiny"], tmp_path / "source"), {"default": "a", "tool_use": "b"}
    tokenizer = read_tokenizer(source)
    tokenizer.chat_template = templates
    tokenizer.save_pretrained(source)
    for folder in (export.export(source, tmp_path / "dense"), export.quantize(source, tmp_path / "int8", 8)):
        assert read_tokenizer(folder).chat_template == templates


def test_what_cannot_be(make_checkpoint, tmp_path, monkeypatch):
    folder, target = make_checkpoint(), tmp_path / "out"
    with pytest.raises(ConfigError, match="new or empty folder"):
        export.export(folder, folder)
    with pytest.raises(ConfigError, match="dtype"):
        export.export(folder, target, "int8")
    with pytest.raises(ModelNotFound):
        export.export(tmp_path / "nothing", target)
    with pytest.raises(UnsupportedArchitecture, match="in other pieces than Hugging Face has"):
        export.export(make_checkpoint("granitemoe", num_local_experts=4, num_experts_per_tok=2), target)
    for name in ("x" * 300, "nul\0"):
        with pytest.raises(ConfigError, match=r"cannot be written|no file can have this name"):
            export.export(folder, tmp_path / name)
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        export.export(folder, blocked / "out")

    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(ConfigError, match="cannot be written"):
        export.export(folder, tmp_path / "a")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "save_file", full)
    with pytest.raises(ConfigError, match="No space left"):
        export.export(folder, target)
    assert not target.exists() and not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("write", [export.export, EIGHT, FOUR])
@pytest.mark.parametrize("what", ["shape", "extra", "missing", "nan", "config"])
def test_what_does_not_load_is_not_written(make_checkpoint, tmp_path, write, what):
    """And a folder's pipes, dangling links and folders, whatever they are called, are let be."""
    folder, name = tmp_path / "in", "model.layers.1.mlp.up_proj.weight"
    copytree(make_checkpoint(), folder)
    os.mkfifo(folder / "pipe.json")
    (folder / "link.json").symlink_to("nowhere")
    (folder / "folder.json").mkdir()
    tensors = load_file(folder / "model.safetensors")
    if what == "config":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    elif what == "missing":
        del tensors["model.norm.weight"]
    else:
        norm = tensors["model.norm.weight"].clone()
        norm[0] = math.nan
        odd = {
            "shape": {name: tensors[name].T.contiguous()},
            "extra": {"odd": norm},
            "nan": {"model.norm.weight": norm},
        }
        tensors |= odd[what]
    save_file(tensors, folder / "model.safetensors")
    said = {
        "shape": "has shape",
        "extra": "no place for",
        "missing": "is missing",
        "nan": "not finite",
        "config": "no place",
    }
    with pytest.raises(CheckpointError, match=said.get(what, "no place for")):
        write(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()
    if what == "extra":
        del tensors["odd"]
        save_file(tensors, folder / "model.safetensors")
        write(folder, tmp_path / "out")
        assert not {"pipe.json", "link.json", "folder.json"} & {file.name for file in (tmp_path / "out").iterdir()}


def test_numbers_that_the_dtype_does_not_hold(make_checkpoint, tmp_path):
    copytree(make_checkpoint(), tmp_path / "in")
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = 1e5
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    with pytest.raises(CheckpointError, match="is not finite"):
        export.export(tmp_path / "in", tmp_path / "out", "float16")


def test_scales_whose_weights_are_infinite(make_checkpoint, tmp_path):
    export.quantize(make_checkpoint(), tmp_path / "in", 8)
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight_scale"][0] = 3e38
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    with pytest.raises(CheckpointError, match="not finite"):
        export.export(tmp_path / "in", tmp_path / "out")


def test_the_command(make_checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["outrider", "export", str(make_checkpoint()), str(tmp_path / "out")])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr()
    assert ended.value.code in (0, None) and told.out == "" and "MB of weights" in told.err
    assert LLM(tmp_path / "out", device="cpu").generate([[1, 2]], max_tokens=2)


def test_a_caller_s_device_and_autocast_are_his_own(make_checkpoint, tmp_path):
    """What is written does not depend on them."""
    source = make_checkpoint(hidden_size=128)
    for i, make in enumerate(
        (export.export, partial(export.quantize, calibration="none"), partial(export.quantize, bits=8))
    ):
        make(source, tmp_path / f"{i}")
        with torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16):
            make(source, tmp_path / f"{i} again")
        first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in (f"{i}", f"{i} again"))
        assert first == second


def test_int8_for_a_peer(make_checkpoint, tmp_path):
    """Rows and their scales give the weights back, and what is not a matrix inside the model stays as it is."""
    from tools.w8a8 import w8a8

    source = make_checkpoint("llama")
    w8a8(source, tmp_path / "int8")
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "int8"))
    for name, weight in before.items():
        if (scale := after.get(f"{name}_scale")) is None:
            assert torch.equal(weight, after[name]) and (weight.ndim == 1 or "embed" in name or "lm_head" in name)
        else:
            assert after[name].dtype == torch.int8
            assert bool(((after[name] * scale.float() - weight.float()).abs() <= 0.51 * scale.float()).all())
    assert json.loads((tmp_path / "int8" / "config.json").read_text())["quantization_config"]["config_groups"]
    with pytest.raises(ConfigError, match="`outrider export`"):
        w8a8(tmp_path, tmp_path / "none")
