"""A permuted Llama computes the same; its weights lie in another order."""

import pytest
import torch
from test_inflate import BIASED, UNTIED, save_llama
from transformers import AutoModelForCausalLM

from outrider.errors import ConfigError
from tools.permute import permute


@pytest.mark.parametrize("changes", [{}, UNTIED | BIASED])
def test_the_same_logits(tmp_path, changes):
    source, target = save_llama(tmp_path / "source", torch.float32, **changes), tmp_path / "target"
    permute(source, target)
    old, new = (AutoModelForCausalLM.from_pretrained(folder) for folder in (source, target))
    ids = torch.arange(40)[None]
    with torch.inference_mode():
        assert torch.allclose(old(ids).logits, new(ids).logits, rtol=1e-4, atol=1e-4)
    others = [name for name, weight in old.named_parameters() if not torch.equal(weight, new.get_parameter(name))]
    attention_biases = 3 * 2 * bool(changes)
    assert len(others) == len([*old.named_parameters()]) - attention_biases, "queries, keys and values have theirs"


def test_only_llamas(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=9)).save_pretrained(tmp_path / "source")
    with pytest.raises(ConfigError, match="GPT2LMHeadModel"):
        permute(tmp_path / "source", tmp_path / "target")
    assert not (tmp_path / "target").exists()
