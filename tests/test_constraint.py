"""structured_outputs: what comes out is what was asked for, and the same with speculation on or off."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace

import jsonschema
import pytest
import torch
from helpers import ScriptedDrafter, run, use
from hypothesis import given, settings
from hypothesis import strategies as st
from test_exactness import ACCEPTS_NOTHING, config_of, favour
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from outrider import LLM, Draft, SamplingParams, StructuredOutputsParams, drafters
from outrider.config import Rule
from outrider.constraint import END, Constraint, read, unpacked
from outrider.errors import ConfigError, ConstraintError
from outrider.find import find
from outrider.grammar import understood
from outrider.load import read_tokenizer
from outrider.sampling import Row, choose, distribution
from outrider.sequence import Sequence
from outrider.verify import rejection

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"enum": ["Paris", "Berlin"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 2},
    },
    "required": ["name", "age", "city", "tags"],
    "additionalProperties": False,
}  # fmt: skip
ASKED = {
    "json": {"json": PERSON, "whitespace_pattern": " ?"},
    "compact": {"json": json.dumps(PERSON), "disable_any_whitespace": True},
    "regex": {"regex": r"(ab|abc)*d[0-9]{2,5}(\.[0-9]+)?"},
    "choice": {"choice": ["Paris", "Berlin (Germany)", "a+b"]},
    "lark": {"grammar": 'start: "hello " /[a-z]{2,9}/ ("!" | "?")'},
    "lark, first rule inlined": {"grammar": '?start: sum\nsum: N ("+" N)*\nN: /[0-9]{1,2}/'},
    "gbnf": {"grammar": 'root ::= "yes" | "no" [0-9]+ " times"'},
    "tag": {"structural_tag": {"format": {"type": "sequence", "elements": [
        {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "e"},
        {"type": "repeat", "min": 2, "max": 2, "content": {"type": "regex", "pattern": "[xyz]{2}"}}]}}},
}  # fmt: skip
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0, max_tokens=48),
    "sampled": SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=48),
    "everything": SamplingParams(
        temperature=0.9, top_k=60, min_p=0.01, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2,
        logit_bias={5: 2.5, 300: 3.0}, seed=12, min_tokens=2, stop=["z"], ignore_eos=True, max_tokens=48,
        logits_processors=[favour],
    ),
}  # fmt: skip
PROMPTS = ["Once upon a time", "Tom had a red ball. Tom had a red", "The answer is"]


def asked(**given) -> SamplingParams:
    more = {"temperature": 0, "max_tokens": 64} | {
        k: given.pop(k) for k in list(given) if k in SamplingParams.__match_args__
    }
    return SamplingParams(structured_outputs=StructuredOutputsParams(**given), **more)


def valid(text: str, given: dict) -> bool:
    """Whether a finished text is what was asked for."""
    if "json" in given:
        jsonschema.validate(json.loads(text), PERSON)
        return "\n" not in text and (" " not in text.split('"')[0::2] or "whitespace_pattern" in given)
    if "regex" in given:
        return re.fullmatch(given["regex"], text) is not None
    if "choice" in given:
        return text in given["choice"]
    if "structural_tag" in given:
        return re.fullmatch(r"(?s)<a>[^e]*e[xyz]{4}", text) is not None
    return re.fullmatch(r"hello [a-z]{2,9}[!?]|yes|no[0-9]+ times|[0-9]{1,2}(\+[0-9]{1,2})*", text) is not None


def batch(sampling: str) -> list[tuple[str, SamplingParams]]:
    """Every kind of constraint beside requests without one."""
    own = [(p, replace(SAMPLINGS[sampling], structured_outputs=s)) for s in ASKED.values() for p in PROMPTS[:2]]
    return [*own, (PROMPTS[0], SAMPLINGS[sampling])]


_plain: dict[str, list] = {}


def plain_of(llm: LLM, sampling: str) -> list:
    if sampling not in _plain:
        llm.speculative_config = None
        _plain[sampling] = [run(llm, [(llm.encode(p), params)])[0] for p, params in batch(sampling)]
    return _plain[sampling]


def alike(a, b) -> bool:
    return (a.token_ids, a.text, a.finish_reason) == (b.token_ids, b.text, b.finish_reason)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("method", drafters.methods())
def test_same_tokens(tiny_llm, make_checkpoint, method, sampling):
    plain = plain_of(tiny_llm, sampling)
    tiny_llm.speculative_config = config_of(method, "tiny", make_checkpoint, 5 if method != "none" else None)
    outputs = run(tiny_llm, [(tiny_llm.encode(p), params) for p, params in batch(sampling)])
    for (_, params), output, expected in zip(batch(sampling), outputs, plain, strict=True):
        assert alike(output, expected), f"{params.structured_outputs}: {output.text!r}, not {expected.text!r}"
        assert output.metrics["drafter_error"] is None
        if params.structured_outputs and output.finish_reason == "stop" and "z" not in output.text:
            given = next(g for g in ASKED.values() if StructuredOutputsParams(**g) == params.structured_outputs)
            assert valid(output.text, given), output.text
    forced = [by for output in outputs[:-1] for by in output.drafted_by].count("grammar")
    assert (forced > 0) == (method != "none")
    if method not in ACCEPTS_NOTHING:
        fewer = sum(o.metrics["speculative_decoding"]["num_spec_steps"] for o in outputs[2:4])
        assert fewer < 0.8 * sum(len(o.token_ids) for o in outputs[2:4])


@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
@pytest.mark.parametrize("rule", ["rejection", "block", "typical"])
def test_other_rules_keep_to_the_grammar(tiny_llm, rule, sampling):
    for config in ({"method": "ngram"}, {"method": "draft_model", "model": "tiny-draft"}):
        tiny_llm.speculative_config = config | {"acceptance_method": rule}
        for own in (ASKED["compact"], ASKED["regex"]):
            params = replace(SAMPLINGS[sampling], structured_outputs=own)
            (output,) = run(tiny_llm, [(tiny_llm.encode(PROMPTS[0]), params)])
            assert output.finish_reason == "length" or valid(output.text, own)
            if sampling == "greedy":
                tiny_llm.speculative_config = None
                assert alike(run(tiny_llm, [(tiny_llm.encode(PROMPTS[0]), params)])[0], output)
                tiny_llm.speculative_config = config | {"acceptance_method": rule}


def test_outputs_and_streams(tiny_llm):
    """n outputs are n seeds; the forced tokens say who drafted them; the end is a token unless it is ignored."""
    params = asked(**ASKED["compact"], temperature=1.0, seed=40, n=3)
    plain = tiny_llm.generate(PROMPTS[0], params)
    tiny_llm.speculative_config = {"method": "ngram"}
    outputs = tiny_llm.generate(PROMPTS[0], params)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain] and len({o.text for o in outputs}) == 3
    eos = tiny_llm.runner.model.config.eos
    for output in outputs:
        assert output.finish_reason == "length" or (
            output.token_ids[-1] in eos and valid(output.text, ASKED["compact"])
        )
    events = list(tiny_llm.stream(PROMPTS[0], replace(params, n=1)))
    assert "".join(e.text for e in events) == outputs[0].text and "grammar" in {e.drafted_by for e in events}
    (silent,) = tiny_llm.generate(PROMPTS[0], replace(params, n=1, ignore_eos=True))
    assert silent.text == outputs[0].text and silent.token_ids == outputs[0].token_ids[:-1]
    assert silent.finish_reason == "stop"


def test_method_none_drafts_nothing(tiny_llm):
    (output,) = tiny_llm.generate(PROMPTS[0], asked(**ASKED["compact"]))
    assert set(output.drafted_by) == {None}
    assert output.metrics["speculative_decoding"]["num_draft_tokens"] == 0


def test_ends(tiny_llm):
    """Stop tokens are legal wherever the grammar accepts; eos is not before; min_tokens hold as long as they can."""
    (newline,) = tiny_llm.encode("\n")[-1:]
    (output,) = tiny_llm.generate("1 2 3", asked(regex="[0-9]+", stop_token_ids=[newline], logit_bias={newline: 100}))
    assert output.finish_reason == "stop" and output.token_ids[-1] == newline and output.text.isdigit()
    (longer,) = tiny_llm.generate("1 2 3", asked(regex="[0-9]+", min_tokens=5, max_tokens=9))
    assert len(longer.token_ids) >= 5 and longer.text.isdigit()
    with pytest.raises(ConstraintError, match="min_tokens"):
        tiny_llm.generate("1 2 3", asked(choice=["a", "b"], min_tokens=20))
    (free,) = tiny_llm.generate("1 2 3", asked(regex="(?s:.*)", max_tokens=5))
    assert free.finish_reason == "length"


def test_an_end_of_text_that_the_grammar_names(tiny_llm):
    """It ends the output there, whatever would have to follow."""
    end = tiny_llm.tokenizer.convert_tokens_to_ids("<|end|>")
    assert end in tiny_llm.runner.model.config.eos
    letters = {"type": "regex", "pattern": "[a-z]{3}"}
    tag = {"type": "tag", "begin": "<a>", "content": letters, "end": "<|end|>"}
    for asks, text in (
        ({"structural_tag": {"format": tag}}, r"<a>[a-z]{3}"),
        ({"structural_tag": {"format": {"type": "sequence", "elements": [tag, tag]}}}, r"<a>[a-z]{3}"),
        ({"grammar": 'start: "x" <|end|> "y"'}, "x"),
    ):
        found = []
        for config in (None, {"method": "suffix"}, {"method": "ngram", "acceptance_method": "rejection"}):
            tiny_llm.speculative_config = config
            found += tiny_llm.generate("The", asked(**asks))
            assert re.fullmatch(text, found[-1].text) and found[-1].finish_reason == "stop"
            assert found[-1].token_ids[-1] == end
        assert found[0].token_ids == found[1].token_ids


def test_a_dead_end_is_one_requests_error(tiny_llm):
    """Left recursion without an end: nothing may follow sooner or later, and only its own request hears of it."""
    dead = asked(grammar='start: /[ab]/ tail\ntail: "a" tail')
    other = tiny_llm.generate("The", max_tokens=8, temperature=0)[0].token_ids
    for config in (None, {"method": "ngram"}):
        tiny_llm.speculative_config = config
        requests = [r for p in (dead, SamplingParams(max_tokens=8, temperature=0))
                    for r in tiny_llm.engine.add(tiny_llm.encode("The"), p)]  # fmt: skip
        for _ in tiny_llm.engine.run():
            pass
        assert isinstance(requests[0].error, ConstraintError) and requests[1].seq.output == other
    assert "\n" not in str(requests[0].error)


# --- masks ------------------------------------------------------------------------------------------------------------


def followed(llm: LLM, given: dict, prompt: int = 3) -> tuple[Sequence, Constraint]:
    params = asked(**given)
    vocab, eos = llm.runner.model.config.vocab_size, llm.runner.model.config.eos
    seq = Sequence([5] * prompt, params, 0, eos=eos)
    assert params.structured_outputs is not None
    seq.constraint = Constraint(read(params.structured_outputs, llm.tokenizer, vocab), seq.eos, False)
    return seq, seq.constraint


@given(data=st.data())
@settings(max_examples=15)
def test_masks_depend_on_the_tokens_alone(tiny_llm, data):
    """Asked about places in any order, with illegal drafts between them, masks are those of a fresh matcher."""
    given_ = data.draw(st.sampled_from(list(ASKED.values())))
    seq, constraint = followed(tiny_llm, given_)
    vocab = tiny_llm.runner.model.config.vocab_size
    text: list[int] = []
    for _ in range(data.draw(st.integers(1, 12))):
        mask = constraint.mask(seq, text)
        assert mask is not None
        legal = unpacked(mask, vocab).nonzero()[:, 0].tolist()
        text.append(legal[data.draw(st.integers(0, len(legal) - 1))])
        if text[-1] in seq.eos:
            assert constraint.mask(seq, text) is None
            text.pop()
            break
    for _ in range(12):
        grown = data.draw(st.integers(0, len(text)))
        seq.tokens[seq.prompt_len :] = text[:grown]
        path = data.draw(st.sampled_from([text[grown : grown + 3], text[grown : grown + 1], [7, 9], []]))
        if data.draw(st.booleans()):
            constraint.fit(seq, Draft.chain([*path, 700, 3]), 9, coins=False)
        constraint.settled = [-1]  # as if it had grown meanwhile: nothing is remembered
        fresh = followed(tiny_llm, given_)
        fresh[0].tokens[:] = seq.tokens
        got, expected = constraint.mask(seq, path), fresh[1].mask(fresh[0], path)
        assert (got is None) == (expected is None) and (got is None or bool((got == expected).all()))


def test_fit(tiny_llm):
    """Illegal nodes go, with all that hangs on them; what is forced comes behind the leaves; riders stay last."""
    seq, constraint = followed(tiny_llm, ASKED["choice"])
    tok = tiny_llm.tokenizer
    p, berlin = tok("Paris", add_special_tokens=False)["input_ids"], tok("Berlin (Germany)")["input_ids"]
    draft = Draft([berlin[-1], p[0], 700, 701, 40, 41], [-1, -1, -1, 2, -1, 4], riders=2)
    fitted = constraint.fit(seq, draft, 20, coins=False)
    words = [fitted.words(i) for i in range(fitted.verifiable)]
    assert fitted.tokens[0] == p[0] and fitted.riders == 2 and fitted.tokens[-2:] == [40, 41]
    assert fitted.parents[-2:] == [-1, len(fitted) - 2]
    assert words[-1] == (*p, next(iter(seq.eos))) and fitted.forced == frozenset(range(1, len(words)))
    assert len(constraint.fit(seq, draft, 1, coins=False)) == 3  # no deeper than there is room
    lost = constraint.fit(seq, Draft([berlin[-1], p[0], 40, 41], [-1, -1, 0, -1], riders=2), 20, coins=False)
    assert lost.riders == 0 and lost.tokens[0] == p[0]  # one hung on what is gone: none of them stays
    nothing = constraint.fit(seq, Draft(), 9, coins=False)
    assert nothing.tokens == []  # P or B: nothing is forced


def test_what_a_draft_model_need_not_guess_does_not_count(tiny_llm):
    """Nor cuts off what it guesses behind that. Only the grammar says what is forced, and `most` bounds all of it."""
    answers = {f"first_property_{c}": {"type": "boolean"} for c in "abcd"}
    schema = {"type": "object", "properties": answers, "required": [*answers], "additionalProperties": False}
    params = asked(json=schema, disable_any_whitespace=True)
    (expected,) = tiny_llm.generate(PROMPTS[0], params)
    tiny_llm.speculative_config = {"method": "draft_model", "model": "tiny-draft", "num_speculative_tokens": 2}
    (output,) = tiny_llm.generate(PROMPTS[0], params)
    assert alike(output, expected) and output.drafted_by.count("draft_model") > 1
    seq, constraint = followed(tiny_llm, {"grammar": 'start: /[ab]/ " and so on:" /[cd]{9}/'})
    first, last = tiny_llm.tokenizer(["a", "c"], add_special_tokens=False)["input_ids"]
    chain = Draft.chain([*first, *(must := constraint.forced(seq, first)), *3 * last])
    chain.forced = frozenset(range(len(chain)))
    fitted = constraint.fit(seq, chain, 99, False, k=2)
    assert fitted.tokens == chain.tokens[:-2] and fitted.forced == set(range(1, 1 + len(must)))
    assert constraint.fit(seq, chain, 99, False, k=1).tokens == [*first, *must]
    assert constraint.fit(seq, chain, 99, False, most=3).tokens == chain.tokens[:3]


def test_padding_and_foreign_tokens(tmp_path):
    """A model with more logits than tokens, ids that no text has, and one whose tokenizer knows more than it."""
    tok = read_tokenizer(find("tiny"))
    for vocab in (len(tok) - 100, len(tok), len(tok) + 77):
        grammar = read(StructuredOutputsParams(regex="[a-z ]+"), tok, vocab)
        seq = Sequence([1], asked(regex="[a-z ]+"), 0, eos=[1])
        mask = Constraint(grammar, seq.eos, False).mask(seq, [])
        assert mask is not None
        allowed = unpacked(mask, vocab)
        assert len(allowed) == vocab and 0 < int(allowed.sum()) < vocab and not allowed[len(tok) :].any()
        assert not allowed[list(seq.eos)].any()
    assert END not in tok.get_vocab()


def letters(size: int = 128) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of single characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda c: (c not in "ĠĊ", c))[:size]
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def sentencepiece() -> PreTrainedTokenizerFast:
    """One as Llama 2 and Mistral have: pieces with a visible space, and bytes for what has none."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", *"abcdefgh0123456789", "▁a", "ab"]
    backend = Tokenizer(models.BPE(
        vocab={p: i for i, p in enumerate(pieces)}, merges=[("▁", "a"), ("a", "b")], byte_fallback=True,
        unk_token="<unk>", fuse_unk=True,
    ))  # fmt: skip
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")


def merged() -> PreTrainedTokenizerFast:
    """One whose merges make a token that is also one of its own."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: i for i, piece in enumerate([*alphabet, "<i", "<i>", "ab"])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("<", "i"), ("<i", ">"), ("a", "b")]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_tokens([AddedToken("<i>", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def unigram() -> PreTrainedTokenizerFast:
    """One as T5 and some Gemmas have, with likelihoods, and bytes for what has no piece."""
    pieces = ["<unk>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", *"abcdef0123456789", "ab"]
    backend = Tokenizer(models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], 0, byte_fallback=True))
    backend.pre_tokenizer, backend.decoder = (
        sentencepiece().backend_tokenizer.pre_tokenizer,
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize("make", [letters, sentencepiece, unigram, merged])
def test_tokenizers(make_llm, make, make_checkpoint):
    """Of other kinds, on a random model without an end of text: every output is what was asked for."""
    tok = make()
    llm = make_llm(vocab_size=len(tok) + 9)
    llm.tokenizer = llm.engine.tokenizer = tok
    pattern = "[ab]{3}(c d|7)+e"
    for given_ in ({"regex": pattern}, {"choice": ["abc a", "bad\ncafe"]}, {"choice": ["a</s>b <unk>", "</s>a"]}):
        params = asked(**given_, temperature=1.0, seed=2, max_tokens=200)
        llm.speculative_config = None
        plain = run(llm, [([3, 4], replace(params, seed=i)) for i in range(6)])
        llm.speculative_config = {"method": "ngram"}
        fast = run(llm, [([3, 4], replace(params, seed=i)) for i in range(6)])
        for a, b in zip(plain, fast, strict=True):
            assert alike(a, b) and a.finish_reason == "stop" and len(b.token_ids) == len(a.token_ids)
            assert re.fullmatch(pattern, a.text) if "regex" in given_ else a.text in given_["choice"]


@given(
    st.recursive(
        st.one_of(
            st.just({"type": "boolean"}), st.just({"type": "null"}),
            st.integers(-50, 50).map(lambda n: {"type": "integer", "minimum": n, "maximum": n + 30}),
            st.lists(st.text("abc é\"\\", max_size=5), min_size=1, max_size=3, unique=True).map(lambda e: {"enum": e}),
            st.integers(0, 4).map(lambda n: {"type": "string", "maxLength": n}),
        ),
        lambda inner: st.one_of(
            st.dictionaries(st.text("xyz", min_size=1, max_size=3), inner, max_size=3).map(
                lambda p: {"type": "object", "properties": p, "required": list(p)[:2], "additionalProperties": False}
            ),
            inner.map(lambda i: {"type": "array", "items": i, "maxItems": 2}),
        ),
        max_leaves=5,
    ),
    st.sampled_from([m for m in drafters.methods() if m in ("ngram", "suffix", "draft_model", "medusa", "lookahead")]),
    st.integers(0, 99),
    st.booleans(),
)  # fmt: skip
@settings(max_examples=12)
def test_any_schema(tiny_llm, make_checkpoint, schema, method, seed, compact):
    params = asked(json=schema, disable_any_whitespace=compact, temperature=1.0, seed=seed, max_tokens=80)
    tiny_llm.speculative_config = None
    (plain,) = tiny_llm.generate(PROMPTS[0], params)
    tiny_llm.speculative_config = config_of(method, "tiny", make_checkpoint)
    (fast,) = tiny_llm.generate(PROMPTS[0], params)
    assert alike(plain, fast)
    if plain.finish_reason == "stop":
        jsonschema.validate(json.loads(plain.text), schema)


@given(
    st.lists(
        st.tuples(st.sampled_from(["[a-f]", "(xy|z)", r"\d", "é", " ", "(?:[A-C]|qu)"]),
                  st.sampled_from(["", "?", "+", "{2}", "{1,3}"])),
        min_size=1, max_size=5,
    ).map(lambda parts: "".join(a + b for a, b in parts)),
    st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=12)
def test_any_regex(tiny_llm, pattern, seed):
    params = asked(regex=pattern, temperature=1.0, seed=seed, max_tokens=40)
    tiny_llm.speculative_config = None
    (plain,) = tiny_llm.generate(PROMPTS[0], params)
    tiny_llm.speculative_config = {"method": "draft_model", "model": "tiny-draft"}
    assert alike(tiny_llm.generate(PROMPTS[0], params)[0], plain)
    assert plain.finish_reason == "length" or re.fullmatch(pattern, plain.text)


SPECIAL = "<|user|>"  # a token of its own in the vocabulary


@pytest.mark.parametrize("given_", [
    {"choice": [f"cp {SPECIAL} x", "rm <|end|>"]}, {"choice": [SPECIAL]}, {"regex": r"(ls|cat) <\|user\|>( -l)?"},
    {"json": {"enum": [f"{SPECIAL}"]}}, {"json": {"type": "string", "pattern": r"^<\|user\|>[a-c]$"}},
    {"json": {"type": "object", "properties": {SPECIAL: {"const": f"a {SPECIAL} b"}}, "required": [SPECIAL],
              "additionalProperties": False}, "disable_any_whitespace": True},
    {"grammar": f'start: "{SPECIAL}" /<\\|user\\|>/ # {SPECIAL}'},
])  # fmt: skip
def test_text_that_looks_like_a_special_token_is_text(tiny_llm, given_):
    """It is written by other tokens; nothing is free behind it."""
    special = tiny_llm.tokenizer.convert_tokens_to_ids(SPECIAL)
    for method in (None, {"method": "ngram"}):
        tiny_llm.speculative_config = method
        for seed in range(4):
            (output,) = tiny_llm.generate(PROMPTS[0], asked(**given_, temperature=1.0, seed=seed, max_tokens=80))
            assert output.finish_reason == "stop" and special not in output.token_ids
            assert SPECIAL in output.text or "choice" in given_
            if "json" in given_:
                jsonschema.validate(json.loads(output.text), given_["json"])
            elif "grammar" in given_:
                assert output.text == 2 * SPECIAL
            else:
                assert valid(output.text, given_)


def test_tokens_of_their_own_in_lark(tiny_llm):
    """By their names, where these are neither text nor regex nor comment."""
    tok = tiny_llm.tokenizer
    grammar = f'start: "{SPECIAL}\\"" {SPECIAL} /<x/ // {SPECIAL}\n'
    (output,) = tiny_llm.generate(PROMPTS[0], asked(grammar=grammar, max_tokens=40))
    first, second = tok.decode(output.token_ids[:-1]).split(SPECIAL)[1:]
    assert (first, second) == ('"', "<x") and output.token_ids.count(tok.convert_tokens_to_ids(SPECIAL)) == 1
    with pytest.raises(ConfigError, match=r"'<\|nobody\|>' is no token of its own"):
        tiny_llm.generate(PROMPTS[0], asked(grammar="start: <|nobody|>"))


def test_what_was_chosen_and_does_not_fit_is_an_error(tiny_llm):
    """Behind a draft that cannot be nothing is asked; an output that cannot be ends."""
    seq, constraint = followed(tiny_llm, ASKED["choice"])
    (token,) = tiny_llm.tokenizer("x", add_special_tokens=False)["input_ids"][:1]
    assert constraint.mask(seq, [token]) is None
    seq.tokens.append(token)
    with pytest.raises(ConstraintError, match="not what it must be"):
        constraint.mask(seq, [])


@pytest.mark.parametrize("given_", [
    {"grammar": 'start: /a*/ "ab"'}, {"grammar": 'start: A "ab"\nA: "a"*'},
    {"grammar": 'root ::= ws " x"\nws ::= [ ]*'},
    {"grammar": '%llguidance {"no_forcing": false}\nstart: /a*/ "ab"'}, {"grammar": 'start: A "ab"\nA: "a"{0,}'},
    {"grammar": 'start: a "ab"\na[temperature=0.5]: "a"{0,}'}, {"grammar": 'start: /a{0 ,}/ "ab"'},
    {"grammar": 'start: /(?x)#[\na*#]\n/ "ab"'}, {"grammar": 'start: /#[\na*#]\n/x "ab"'},
    {"grammar": 'start: %json {"type":"array","items":{"const":11},"minItems":2,'
                '"x-gu\\u0069dance":{"whitespace_pattern":"1*"}}'},
    {"structural_tag": {"format": {"type": "tag", "begin": "[", "end": "ab", "content": {
        "type": "grammar", "grammar": '%llguidance {"no_forcing": false}\nstart: /a*/'}}}},
    {"json": {"type": "array", "items": {"const": 11}, "minItems": 2}, "whitespace_pattern": "1*"},
    {"structural_tag": {"format": {
        "type": "tag", "begin": "[", "content": {"type": "regex", "pattern": " *"}, "end": " ]"}}},
])  # fmt: skip
def test_a_word_that_never_ends_holds_nobody_up(tiny_llm, given_):
    """llguidance reads the longest word: what begins as it goes on is more of it, for ever."""
    (output,) = tiny_llm.generate("Hi", asked(**given_, temperature=0, max_tokens=30))
    assert len(output.token_ids) == 30 or output.finish_reason == "stop"


MANY = {"allOf": [{"pattern": f"a.{{{i}}}b"} for i in range(30)]}


def nested(n: int) -> dict:
    return {"pattern": f"a.{{{n}}}b"} | ({"anyOf": [nested(n - 1)]} if n else {})


def test_many_patterns_that_never_meet_are_fine(tiny_llm):
    part = {"type": "string", "pattern": "^[ab]{1,3}$"}
    names = {f"p{i}": {"allOf": [part, {"maxLength": 3}]} for i in range(15)}
    followed(tiny_llm, {"json": {"type": "object", "properties": names, "required": [*names]}})


@pytest.mark.parametrize("given_, told", [
    ({"json": {"type": "integer", "multipleOf": 999983}}, "multipleOf is at most 20000"),
    ({"json": {"allOf": [{"type": "integer", "multipleOf": 1009}, {"multipleOf": 1013}]}}, "multipleOf is at most"),
    ({"json": {"$ref": "#/examples/0", "examples": [{"type": "integer", "multipleOf": 999983}]}}, "multipleOf is at"),
    ({"grammar": 'start: %json {"type": "integer", "multipleOf": 999983}'}, "multipleOf is at most"),
    ({"grammar": ' {"grammars": [{"json_schema": {"type": "integer", "multipleOf": 20011}}]}'}, "not JSON"),
    ({"structural_tag": {"format": {"type": "grammar", "grammar": '{"grammars": [{"lark_grammar": "start: /a*/"}]}'}}},
     "a grammar is Lark or GBNF, not JSON"),
    ({"grammar": "start: %json " + json.dumps(MANY).replace('"pa', '"p\\u0061')}, "at most 12 regexes at once"),
    ({"json": MANY}, "at most 12 regexes at once"),
    ({"json": {"$ref": "#/$defs/0", "$defs": {
        str(i): {"pattern": f"a.{{{i}}}b", "$ref": f"#/$defs/{i + 1}"} for i in range(30)}}}, "at most 12 regexes"),
    ({"json": nested(30)}, "at most 12 regexes at once"),
    ({"json": {"$ref": "#/%24defs/all", "$defs": {"all": MANY}}}, "at most 12 regexes at once"),
    ({"json": {"$ref": "#all", "$defs": {"all": {"$anchor": "all", **MANY}}}}, "at most 12 regexes at once"),
    ({"grammar": "start: X\nX: " + " & ".join(f"/(.|\\n)*a.{{{i}}}b(.|\\n)*/" for i in range(30))}, "at most 12"),
    ({"grammar": "start: a b\na[max_tokens=3]: /[a-z ]*/\nb: /[0-9]{3}/"}, "rollback"),
    ({"json": {"type": "array", "x-guidance": {"whitespace_pattern": "1*"}}}, "x-guidance is not taken"),
    ({"json": {"enum": [1, -(2**63)]}}, "at least -\\(2\\^63 - 1024\\), not -9223372036854775808"),  # the process died
    ({"json": {"type": "integer", "anyOf": [{"const": [{"a": -1e19}]}]}}, "at least -"),
    ({"grammar": 'start: %json {"const": -9223372036854775808}'}, "at least -"),
    ({"grammar": 'start: %json {"type": "integer", "minimum": -1e19, "maximum": -1e19}'}, "at least -"),
    ({"json": {"enum": [7, 1234567890123456789]}}, "not 1234567890123456789; a text can be any"),  # ...768 was written
    ({"json": {"const": {"id": 2**64}}}, "that doubles can hold"),
    ({"json": {"const": 10**400}}, "that doubles can hold"),
])  # fmt: skip
def test_what_would_take_too_long_or_cannot_be_drafted_for(tiny_llm, given_, told):
    with pytest.raises(ConfigError, match=told):
        tiny_llm.generate("Hi", asked(**given_))


def test_what_stands_twice_is_written_once(tiny_llm):
    """Formats in formats, and patterns of named properties in patterns: copies of copies would double with each."""
    schema: dict = {}
    for _ in range(40):
        schema = {"properties": {"a": {}, "b": {}}, "patternProperties": {"^(a|b)$": schema}}
    assert len(json.dumps(understood(schema))) < 4 * len(json.dumps(schema))
    followed(tiny_llm, {"structural_tag": {"format": tags(40)}})


def test_no_request_has_what_another_left(tiny_llm):
    """Those of one grammar share a lexer, which ends when it has grown too far: it is made anew then."""
    words = "|".join(f".*{chr(97 + i)}.{{{i + 3}}}x" for i in range(14))
    params = asked(regex=f"({words})", temperature=1.2, ignore_eos=True, max_tokens=40)
    seeds = [*range(20), 0, 1]
    outputs = [tiny_llm.generate("Once upon a time", replace(params, seed=seed))[0].token_ids for seed in seeds]
    assert outputs[-2:] == outputs[:2] and all(len(output) == 40 for output in outputs)


@pytest.mark.parametrize("number", [-(2**53), 2**53, 2**60, 2**63 - 1, -(2**63) + 1024, 1e25])
def test_large_numbers_that_are_taken_are_written(tiny_llm, number):
    (output,) = tiny_llm.generate("Hi", asked(json={"enum": [number]}, max_tokens=40))
    assert json.loads(output.text, parse_int=type(number)) == number


def test_round_multiples_are_taken(tiny_llm):
    followed(tiny_llm, {"json": {"type": "integer", "multipleOf": 1_000_000}})
    schema = {"type": "number", "multipleOf": 0.05, "maximum": 9, "minimum": 1}
    (output,) = tiny_llm.generate("Hi", asked(json=schema, max_tokens=40))
    assert abs(float(output.text) * 20 % 1) < 1e-6


def test_text_that_ends_texts_ends_none_where_more_must_come(tiny_llm):
    (quote,) = tiny_llm.tokenizer('"', add_special_tokens=False)["input_ids"]
    params = asked(json={"enum": ["ab", "cd"]}, max_tokens=20, stop_token_ids=[quote])
    request = next(iter(tiny_llm.engine.add(tiny_llm.encode("Hi"), params)))
    for _ in tiny_llm.engine.run():
        pass
    assert isinstance(request.error, ConstraintError)  # it is the only token that could begin it
    (output,) = tiny_llm.generate("Hi", replace(params, structured_outputs=StructuredOutputsParams(regex="[a-f]{9}")))
    assert re.fullmatch("[a-f]{9}", output.text)


def test_names_without_properties_are_closed_where_they_are_schemas(tiny_llm):
    data = {"properties": {"a": 1}}
    given_ = {"json": {"enum": [data]}, "disable_additional_properties": True, "disable_any_whitespace": True}
    (output,) = tiny_llm.generate("Hi", asked(**given_, max_tokens=60))
    assert json.loads(output.text) == data


@pytest.mark.parametrize(
    "text, inside, outside",
    [("[^a&&b]", "c", "a&"), ("[%--]", "%-", "."), ("[--/]", "-/", "0"), ("[a~~z]", "az~", "b")],
)
def test_classes_of_gbnf_are_characters(tiny_llm, text, inside, outside):
    seq, constraint = followed(tiny_llm, {"grammar": f'root ::= {text} "!"'})
    mask = constraint.mask(seq, [])
    assert mask is not None
    legal = unpacked(mask, tiny_llm.runner.model.config.vocab_size)
    for letters, there in ((inside, True), (outside, False)):
        for letter in letters:
            (token,) = tiny_llm.tokenizer(letter, add_special_tokens=False)["input_ids"][-1:]
            assert bool(legal[token]) is there, letter


@pytest.mark.parametrize(
    "dots, text", [(".*", "<p>a\nb.\0é中😀\r\u2028"), (".{2} [.]", "\n\n."), ("any+\nany ::= .", "a\n")]
)
def test_the_dot_of_gbnf_is_any_character(tiny_llm, dots, text):
    seq, constraint = followed(tiny_llm, {"grammar": f"root ::= {dots}"})
    seq.tokens += tiny_llm.tokenizer(text, add_special_tokens=False)["input_ids"]
    mask = constraint.mask(seq, [])
    assert mask is not None and unpacked(mask, tiny_llm.runner.model.config.vocab_size)[min(seq.eos)]


@pytest.mark.parametrize("text, inside, outside", [
    (r"[^[\]]", "ab", "[]"), ("[a&&b]", "a&b", "c"), (r"[\]a\&[]", "]a&[", "b"), (r"\[?[[b]", "[b", "a"),
    ("[]a[]", "]a[", "b"), ("[%--]", "%-", "."), ("[a~~z]", "az~", "b"), ("[[:digit:]a]", "1a", "d:["),
    (r"[^\d[]", "a]", "1["), ("[--/%]", "-.%", "0"), ("[%--&-(]", "%-'", ".~"), ("[]-a]", "]^a", "-["),
])  # fmt: skip
def test_classes_of_regexes_are_pythons(tiny_llm, text, inside, outside):
    """And ECMAScript's, as JSON Schema has them; classes by name are Rust's alone."""
    string = {"type": "string", "pattern": f"^{text}$"}
    names = {"type": "object", "patternProperties": {f"^{text}$": {"const": 1}}, "additionalProperties": False}
    for given_, around in (({"regex": text}, "{}"), ({"json": string}, '"{}"'), ({"json": names}, '{{"{}": 1}}')):
        matcher = followed(tiny_llm, given_)[1].matcher
        for letter in inside + outside:
            tokens = tiny_llm.tokenizer(around.format(letter), add_special_tokens=False)["input_ids"]
            assert (matcher.validate_tokens(tokens) == len(tokens)) is (letter in inside), (letter, given_)


def test_tokens_of_their_own_that_are_not_special(make_llm):
    """Text that reads like one is text; one that the model has no logits for is no draft."""
    tok = letters(256)
    tok.add_tokens([AddedToken("<tool>", special=False), AddedToken("foo", special=False)])
    llm = make_llm(vocab_size=len(tok) - 1)
    llm.tokenizer = llm.engine.tokenizer = tok
    for given_ in ({"choice": ["<tool>abc"]}, {"regex": "(a|b)<tool>[ab]{3}"}, {"grammar": "start: /a\n<tool>b/"}):
        for method in (None, {"method": "ngram"}):
            llm.speculative_config = method
            (output,) = llm.generate([[3, 4]], asked(**given_, max_tokens=40, seed=1))
            assert "<tool>" in output.text and len(output.token_ids) > 7 and output.finish_reason == "stop"
    told = list[tuple]()
    for method in (None, {"method": "ngram"}):
        llm.speculative_config = method
        (request,) = llm.engine.add([3, 4], asked(choice=["foo"], max_tokens=40))
        for _ in llm.engine.run():
            pass
        told.append((type(request.error), str(request.error)))
    assert told[0] == told[1] and told[0][0] is ConstraintError


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), min_size=1, max_size=5), st.integers(0, 9)
)
@settings(max_examples=12)
def test_any_choice(tiny_llm, words, seed):
    tiny_llm.speculative_config = {"method": "ngram"}
    params = asked(choice=words, temperature=1.0, seed=seed, max_tokens=120)
    (output,) = tiny_llm.generate(PROMPTS[0], params)
    decoded = tiny_llm.tokenizer.decode(output.token_ids[:-1])
    assert decoded in words and output.finish_reason == "stop"


# --- the law ----------------------------------------------------------------------------------------------------------


def test_rejection_is_exact_where_drafts_are_pruned():
    """Over all that a drafter may draw, illegal tokens among them: emitted is what the target says under the mask."""
    tok = letters(8)
    alphabet = "".join(tok.decode([i]) for i in range(8))
    grammar = read(StructuredOutputsParams(regex=f"[{re.escape(alphabet[1:6])}]{{3}}"), tok, 8)
    seq = Sequence([0], asked(regex="x", temperature=1.0), 0)
    seq.constraint = Constraint(grammar, seq.eos, True)
    noise = torch.Generator().manual_seed(0)
    logits, law = torch.randn(2, 8, generator=noise), torch.randn(8, generator=noise).softmax(-1).double()
    target = distribution(logits[:1], [Row(seq)])[0]
    assert target[0] == target[6] == target[7] == 0
    emitted = torch.zeros(8, dtype=torch.double)
    for token in range(8):
        fitted = seq.constraint.fit(seq, Draft([token], [-1], law[None].clone()), 1, coins=True)
        assert len(fitted) == (0 < token < 6)
        p = torch.stack([target, target])[: 1 + len(fitted)]
        if not len(fitted):
            emitted += law[token] * target
            continue
        accepted = torch.zeros(2, dtype=torch.double)
        for lands in (True, False):
            chance: list[float] = []
            path, left = rejection(fitted, p, lambda _, c, lands=lands, chance=chance: chance.append(c) or lands)
            weight = chance[0] if lands else 1 - chance[0]
            emitted += law[token] * weight * (torch.eye(8, dtype=torch.double)[token] if path else left)
            accepted[int(lands)] = weight
    assert float((emitted - target).abs().sum()) < 1e-6


@pytest.mark.parametrize("kind", ["compact", "regex", "choice", "lark", "gbnf"])
def test_behind_a_text(tiny_llm, kind):
    """Free up to it, bound from there on; the same tokens however they are drafted."""
    given = {**ASKED[kind], "after": "."}
    params = [
        replace(SAMPLINGS[sampling], structured_outputs=given, max_tokens=120) for sampling in ("greedy", "sampled")
    ]
    prompts = [(tiny_llm.encode(PROMPTS[0]), each) for each in params]
    tiny_llm.speculative_config = None
    plain = [run(tiny_llm, [each])[0] for each in prompts]
    tiny_llm.speculative_config = {"method": "ngram", "num_speculative_tokens": 5}
    for output, expected in zip(run(tiny_llm, prompts), plain, strict=True):
        assert alike(output, expected)
        before, _, behind = output.text.partition(".")
        assert len(before) > 5 and (output.finish_reason == "length" or valid(behind.lstrip(), ASKED[kind]))
    assert any("grammar" in output.drafted_by for output in run(tiny_llm, prompts))


@pytest.mark.parametrize(
    ("grammar", "expected"),
    [
        (r'root ::= "\u00e9" "x"', "éx"), (r'root ::= "\U0001F600"', "😀"), (r'root ::= "\\u0041"', r"\u0041"),
        (r'root ::= "\u005d\u0022" [\u005d]', ']"]'), (r'root ::= "a\nb\u00e9\""', 'a\nbé"'),
    ],
)  # fmt: skip
def test_escapes_of_gbnf(tiny_llm, grammar, expected):
    (output,) = tiny_llm.generate("Hi", max_tokens=30, seed=1, structured_outputs={"grammar": grammar})
    assert output.text == expected


@pytest.mark.parametrize("grammar, text", [
    ('root ::= all "!"\nall ::= | [^!~] all | "~" [a-z] all', "ab~c" * 200),
    ('root ::= "a" all "."\nall ::= [^.~] all | "~"? | "~" [a-z] all', "ab~c" * 200),
])  # fmt: skip
def test_lists_of_gbnf_may_be_long(tiny_llm, grammar, text):
    """As others write them: a rule that ends with itself."""
    seq, constraint = followed(tiny_llm, {"grammar": grammar})
    for token in tiny_llm.tokenizer(text, add_special_tokens=False)["input_ids"]:
        mask = constraint.mask(seq, [])
        assert mask is not None and unpacked(mask, tiny_llm.runner.model.config.vocab_size)[token]
        seq.tokens.append(token)


def test_lists_of_lark_that_are_too_long(tiny_llm):
    seq, constraint = followed(tiny_llm, {"grammar": 'start: all "!"\nall: | /[^!]/ all'})
    seq.tokens += tiny_llm.tokenizer("ab " * 200, add_special_tokens=False)["input_ids"]
    with pytest.raises(ConstraintError, match=r"lists belong in `\*`"):
        constraint.mask(seq, [])


@pytest.mark.parametrize("schema, told", [
    (True, ""), ({"maxLength": 2.0, "minItems": 0.0, "maxProperties": 1e3, "unevaluatedProperties": True}, ""),
    ({"unevaluatedItems": True, "then": {"const": 1}, "else": False, "minContains": 2, "maxContains": 0}, ""),
    ({"properties": {"then": {"const": 1}, "minLength": {"const": 2.0}}}, ""), (False, "a schema is an object"),
    (5, "a schema is an object, not 5"), ([], "a schema is an object"), (None, "a schema is an object"),
    ({"maxLength": 2.5}, "got 2.5"), ({"unevaluatedItems": False}, "unevaluatedItems"),
    ({"if": {"const": 1}, "then": {"const": 1}}, "then"), ({"contains": {}, "minContains": 2}, "minContains"),
    ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, "no value fits two of its schemas"),
], ids=str)  # fmt: skip
def test_what_schemas_say(tiny_llm, schema, told):
    """Some of it nothing; of the rest what it is that cannot be read."""
    if not told:
        followed(tiny_llm, {"json": json.dumps(schema)})
    else:
        with pytest.raises(ConfigError, match=told):
            followed(tiny_llm, {"json": json.dumps(schema)})


def test_counts_may_be_whole_floats(tiny_llm):
    schema = {"type": "array", "items": {"type": "string", "maxLength": 1.0}, "minItems": 2.0, "maxItems": 2.0}
    (output,) = tiny_llm.generate("Hi", asked(json=schema, disable_any_whitespace=True))
    jsonschema.validate(json.loads(output.text), schema)


def test_annotations_demand_nothing(tiny_llm):
    """Of a schema's `format` those that are known; what looks like one and is a name or a value stays."""
    names = {"format": {"const": "zip"}, "uniqueItems": {"const": 1}}
    schema = {
        "type": "object", "properties": {**names, "of": {"const": {"format": "zip", "uniqueItems": False}}, "path": {
            "type": "string", "format": "path", "maxLength": 3}, "day": {"type": "string", "format": "date"}, "list": {
            "type": "array", "items": {"type": "integer", "maximum": 9, "minimum": 0, "format": "int32"}, "maxItems": 2,
            "uniqueItems": False}, "record": {"type": "object", "propertyNames": {"type": "string"},
            "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}},
        "additionalProperties": False}  # fmt: skip
    schema["required"] = [*schema["properties"]]
    given = {"json": schema, "disable_any_whitespace": True}
    (output,) = tiny_llm.generate("Hi", max_tokens=200, seed=1, structured_outputs=given)
    found = json.loads(output.text)
    jsonschema.validate(found, schema, format_checker=jsonschema.FormatChecker())
    with pytest.raises(ConfigError, match="uniqueItems"):
        tiny_llm.generate("Hi", structured_outputs={"json": {"type": "array", "uniqueItems": True}})


@pytest.mark.parametrize("kind", ["integer", ["integer", "null"]], ids=str)
def test_the_largest_of_64_bits(tiny_llm, kind):
    """Is taken where integers are, among other things too."""
    schema = {"type": kind, "maximum": 2**63 - 1}
    matcher = read(StructuredOutputsParams(json=schema), tiny_llm.tokenizer, 8192).matcher
    tokens = tiny_llm.tokenizer(str(2**63 - 1), add_special_tokens=False)["input_ids"]
    assert matcher.validate_tokens(tokens) == len(tokens)


def test_keywords_that_are_null_say_nothing(tiny_llm):
    """Go's clients write those that were not set; values may be null all the same."""
    unset = dict.fromkeys(("properties", "required", "enum", "minLength", "pattern", "description", "$ref", "items"))
    own = {"a": {**unset, "const": None}, "enum": {"enum": [None], "examples": None}}
    schema = {"type": "object", "properties": own}
    schema |= {"required": ["a", "enum"], "additionalProperties": False, "$defs": None}
    given = {"json": schema, "disable_any_whitespace": True}
    (output,) = tiny_llm.generate("Hi", max_tokens=200, seed=1, structured_outputs=given)
    assert json.loads(output.text) == {"a": None, "enum": None}


@pytest.mark.parametrize("kind", ["integer", "number"])
@pytest.mark.parametrize("most", [2**63 - 1, 2**63, 1e21, sys.float_info.max])
def test_bounds_that_are_farther_than_any(tiny_llm, kind, most):
    """They were refused with llguidance's words; what is written lies between them."""
    for least, ends in (("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")):
        schema = {"type": kind, least: -most, ends: most}
        matcher = read(StructuredOutputsParams(json=schema), tiny_llm.tokenizer, 8192).matcher
        for number, right in ((5, True), (-(2**62), True), (2**63 - 2048, True), (-(2**63), False), (2**64, False)):
            tokens = tiny_llm.tokenizer(str(number), add_special_tokens=False)["input_ids"]
            assert (matcher.validate_tokens(tokens) == len(tokens)) == right, number


def test_what_no_text_satisfies_is_told_in_words(tiny_llm):
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "required": ["a"]}
    with pytest.raises(ConstraintError, match="the output cannot go on: no text can satisfy it"):
        tiny_llm.generate("Hi", asked(json={**schema, "$defs": {"x": {"$ref": "#/$defs/x"}}}))


@pytest.mark.parametrize("pattern", ["^a$", "^(a|b)$", "^(?:b|a)$"])
def test_patterns_of_named_properties_alone(tiny_llm, pattern):
    """They ask something more of these, and no other property is waited for."""
    named = {"a": {"type": "integer", "maximum": 999}, "b": {"const": 7}}
    schema = {"type": "object", "properties": named, "required": ["a"], "additionalProperties": False}
    schema["patternProperties"] = {pattern: {"minimum": 5}}
    given = {"json": schema, "disable_any_whitespace": True}
    for output in tiny_llm.generate("Hi", max_tokens=60, n=8, seed=1, structured_outputs=given):
        jsonschema.validate(json.loads(output.text), schema)


def test_behind_a_token(monkeypatch):
    """One of its own in the vocabulary: nothing that is spelt like it, no other special one, and no end before it."""
    tokenizer = read_tokenizer(find("tiny"))
    tokenizer.add_tokens([AddedToken("</think>", normalized=False), AddedToken("<tool>", normalized=False)])
    mark, other = (tokenizer.convert_tokens_to_ids(name) for name in ("</think>", "<tool>"))
    grammar = read(StructuredOutputsParams(regex="[0-9]{3}", after="</think>"), tokenizer, len(tokenizer))

    def allowed(*tokens: int) -> set[int]:
        seq = Sequence([1], SamplingParams(), 0, eos=(5,), max_len=999)
        mask = Constraint(grammar, frozenset([5]), False).mask(seq, list(tokens))
        return set(unpacked(mask, len(tokenizer)).nonzero().flatten().tolist())

    ((one,), (a,), parts, (close,)) = tokenizer(["1", "a", "</think", ">"], add_special_tokens=False)["input_ids"]
    assert {one, a, mark} <= allowed() and not {5, other} & allowed() and mark in allowed(one, a)
    assert close in allowed(*parts[:-1]) and close not in allowed(*parts)
    assert one in allowed(mark) and not {a, mark, 5} & allowed(mark)
    assert allowed(one, mark, one, one, one) == {5}
    both = StructuredOutputsParams(regex="[0-9]{3}", after=["<tool>", "</think>"])  # if it comes
    grammar = read(both, tokenizer, len(tokenizer))
    assert {other, one} <= allowed() and not {5, a, mark} & allowed()
    assert {one, a, mark} <= allowed(other) and not {5, other} & allowed(other)
    assert one in allowed(other, a, mark) and not {a, mark, 5} & allowed(other, a, mark)
    assert allowed(one, one, one) == {5} == allowed(other, mark, one, one, one)
    grammar = read(replace(both, after=[*both.marks[:2], "<tool>a"]), tokenizer, len(tokenizer))
    assert allowed() == {other} and {one, a, mark} <= allowed(other) and allowed(other, one, mark) == {other}
    assert (
        one in allowed(other, a) and {a} <= allowed(other, one, mark, other) and one not in allowed(other, mark, other)
    )
    grammar = read(replace(both, after="1<tool>"), tokenizer, len(tokenizer))
    assert {one, a} <= allowed() and not {5, mark, other} & allowed() and {one, a, other} <= allowed(a, one)
    assert other not in allowed(one, a) and one in allowed(one, a, one, other) and a not in allowed(one, other)
    grammar = read(replace(both, after=[]), tokenizer, len(tokenizer))
    assert one in allowed() and not {5, a, mark, other} & allowed()
    grammar = read(replace(both, after="a</think>"), tokenizer, len(tokenizer))
    (space,) = tokenizer("\n", add_special_tokens=False)["input_ids"]
    assert {one, space} <= allowed(a, mark) and allowed(a, mark, space, one, one, one) == {5}
    monkeypatch.setattr(tokenizer, "_eos_token", None, raising=False)
    monkeypatch.setitem(tokenizer._special_tokens_map, "eos_token", None)
    assert tokenizer.eos_token_id is None
    read(StructuredOutputsParams(regex="[1-9]", after=["so:", "</think>"]), tokenizer, len(tokenizer))
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="no text"):
        read(StructuredOutputsParams(regex=r"[^\s\S]", after="</think>"), tokenizer, len(tokenizer))
    with pytest.raises(ConfigError, match="nothing comes: it ends a text"):
        read(StructuredOutputsParams(regex="[0-9]", after=tokenizer.eos_token), tokenizer, len(tokenizer))
    with pytest.raises(ConfigError, match="nothing comes: it ends a text"):
        read(StructuredOutputsParams(regex="[0-9]", after=["a", f"b{tokenizer.eos_token}"]), tokenizer, len(tokenizer))


# --- what cannot be ---------------------------------------------------------------------------------------------------

BAD = {
    "two": ({"regex": "a", "choice": ["b"]}, "exactly one"), "none": ({}, "exactly one"),
    "no choice": ({"choice": []}, "at least one"), "numbers": ({"choice": [1]}, "texts"),
    "a word": ({"choice": "ab"}, "texts"), "empty": ({"regex": ""}, "empty"),
    "empty grammar": ({"grammar": ""}, "empty"),
    "not text": ({"regex": 5}, "text"), "list": ({"json": [1]}, "object"), "false": ({"json_object": False}, "True"),
    "yes": ({"json": {}, "disable_any_whitespace": 1}, "True or False"),
    "both": ({"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "}, "not both"),
    "behind nothing": ({"json": {}, "after": ""}, "after"), "behind a number": ({"json": {}, "after": 5}, "after"),
    "behind four": ({"json": {}, "after": [*"abcd"]}, "up to three"),
    "behind numbers": ({"json": {}, "after": [1]}, "after"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_values_that_cannot_be(name):
    given_, word = BAD[name]
    with pytest.raises(ConfigError, match=word) as caught:
        StructuredOutputsParams(**given_)
    assert "\n" not in str(caught.value)


def test_mappings_are_taken_and_their_keys_checked():
    assert asked(regex="a") == SamplingParams(structured_outputs={"regex": "a"}, temperature=0, max_tokens=64)
    with pytest.raises(ConfigError, match="guided_regex"):
        SamplingParams(structured_outputs={"guided_regex": "a"})
    with pytest.raises(ConfigError, match="structured_outputs"):
        SamplingParams(structured_outputs="json")


def deep(n: int) -> dict:
    return {"$ref": "#/$defs/d0", "$defs": {f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}}
                                            for i in range(n)} | {f"d{n}": {"type": "string"}}}  # fmt: skip


def tags(n: int) -> dict:
    content = tags(n - 1) if n else {"type": "const_string", "value": "a" * 4000}
    return {"type": "tags_with_separator", "separator": ",", "tags": [
        {"type": "tag", "begin": f"{n}", "content": content, "end": ">"}]}  # fmt: skip


HOSTILE = {
    "look-around": {"regex": "(?=a)ab"}, "reference": {"regex": r"(a)\1"}, "unclosed": {"regex": "(a"},
    "never": {"regex": r"[^\s\S]"}, "repeats": {"regex": "(a{1000}){1000}"},
    "nested": {"regex": "(" * 9999 + ")" * 9999},
    "long": {"regex": "a" * 2**17}, "million": {"choice": ["word"] * 10**5}, "lark": {"grammar": "start: b"},
    "gbnf": {"grammar": "root ::= (" * 3000}, "deep lark": {"grammar": "start: " + "(" * 20000},
    "endless": {"grammar": "start: start"}, "token": {"grammar": "start: A\nA: A"}, "surrogate": {"regex": "\ud800"},
    "no json": {"json": "{"}, "no schema": {"json": "[1]"}, "false": {"json": "false"}, "type": {"json": {"type": "x"}},
    "bounds": {"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "not": {"json": {"not": {"type": "null"}}},
    "unique": {"json": {"type": "array", "uniqueItems": True}}, "away": {"json": {"$ref": "http://localhost/x"}},
    "cycle": {"json": {"$ref": "#"}}, "object": {"json": {"type": object}}, "deep json": {"json": '{"items":' * 9999},
    "product": {"json": {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {"type": "null"}}} for j in range(6)]}
                                   for i in range(8)]}},
    "stars": {"regex": "a*" * 5000}, "stars in json": {"json": {"type": "string", "pattern": "a*" * 5000}},
    "names in json": {"json": {"type": "object", "patternProperties": {"a*" * 5000: {}}}},
    "stars in lark": {"grammar": "start: /" + "a*" * 5000 + "/"}, "lines": {"grammar": "\n" * 60000},
    "open text": {"grammar": '"' + '\\"' * 30000}, "open regex": {"grammar": "/" + "\\/" * 30000},
    "open classes": {"grammar": "root ::= " + "[" * 60000}, "open texts": {"grammar": 'root ::= "' + '\\"' * 30000},
    "references": {"json": {"properties": {f"p{i}": {"$ref": f"#/$defs/{i}"} for i in range(2000)}}},
    "tag": {"structural_tag": {"structures": []}}, "tags": {"structural_tag": {"structures": [{"begin": "<a>"}],
                                                                             "triggers": ["<b"]}},
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_constraints_are_refused_at_once(tiny_llm, name):
    with pytest.raises(ConfigError, match="structured_outputs") as caught:
        tiny_llm.generate("The", asked(**HOSTILE[name]))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_deep_rules_do_not_overflow_the_stack(tiny_llm):
    """As many as the limit of characters lets through: read, and followed, or refused."""
    rules = "\n".join(f'r{i}: r{i + 1} "a" | "b"' for i in range(2200))
    for given_ in ({"grammar": f'start: r0\n{rules}\nr2200: "b"'}, {"json": deep(1200)}):
        tiny_llm.speculative_config = {"method": "ngram"}
        with suppress(ConfigError, ConstraintError):
            tiny_llm.generate("The", asked(**given_, max_tokens=4))


def test_without_llguidance_or_tokenizer(tiny_llm, random_llm, monkeypatch):
    with pytest.raises(ConfigError, match="tokenizer"):
        random_llm.generate([1, 2], asked(regex="a"))
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match=r"pip install 'outrider\[grammar\]'"):
        tiny_llm.generate("The", asked(regex="a"))


def test_imported_only_when_asked_for():
    code = "import sys, outrider.llm, outrider.engine, outrider.constraint; print('llguidance' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
CALL = {"type": "tag", "begin": "<call>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</call>"}


@pytest.mark.parametrize("tag", [
    {"structures": [{"begin": "<call>", "schema": SCHEMA, "end": "</call>"}], "triggers": ["<call"]},
    {"format": {"type": "triggered_tags", "triggers": ["<call"], "tags": [CALL]}},
])  # fmt: skip
def test_structural_tags(tiny_llm, tag):
    """Free text until a tag begins; then JSON of its schema."""
    asks = {"structural_tag": tag}
    seq, constraint = followed(tiny_llm, asks)
    opening = tiny_llm.tokenizer("Well. <call>", add_special_tokens=False)["input_ids"]
    assert not constraint.forced(seq, opening[:3])
    assert tiny_llm.tokenizer.decode(constraint.forced(seq, opening)) == "{"
    (output,) = tiny_llm.generate(PROMPTS[0], asked(**asks, max_tokens=8))
    assert output.text == tiny_llm.generate(PROMPTS[0], temperature=0, max_tokens=8)[0].text


def test_what_is_forced_comes_where_a_forward_has_room(tiny_llm):
    params = asked(choice=["Once upon a time there was a little girl who lived in a house", "Onc"])
    (expected,), rows = tiny_llm.generate(PROMPTS[0], params), []
    llm = LLM(tiny_llm.checkpoint, speculative_config={"method": "ngram"}, max_num_batched_tokens=32)
    forward = llm.runner._forward
    llm.runner._forward = lambda seqs, tokens, *more: rows.append(len(tokens)) or forward(seqs, tokens, *more)
    outputs = llm.generate([PROMPTS[0]] * 16, params)
    assert [o.token_ids for o in outputs] == [expected.token_ids] * 16 and max(rows) <= 32
    assert any(by == "grammar" for o in outputs for by in o.drafted_by)


def test_a_scripted_drafter_cannot_break_out(tiny_llm):
    """Nonsense, ends of text, duplicates, and all of that as trees: the tokens stay the same."""
    expected = tiny_llm.generate(PROMPTS[0], asked(**ASKED["compact"]))[0]
    eos = next(iter(tiny_llm.runner.model.config.eos))
    right = expected.token_ids
    scripts = [
        lambda seq, k: Draft.chain([eos, eos, 5]),
        lambda seq, k: Draft([*right[len(seq.output) : len(seq.output) + 2], 9, eos, 9], [-1, 0, 0, -1, -1][: 5])
        if len(right) - len(seq.output) > 2 else Draft(),
        lambda seq, k: Draft.chain(right[len(seq.output) :]),
        lambda seq, k: Draft([7, 7, 7], [-1, -1, 1], riders=1),
    ]  # fmt: skip
    prompt = tiny_llm.encode(PROMPTS[0])
    for script in scripts:
        for rule in (Rule(), Rule("rejection"), Rule("block")):
            use(tiny_llm, ScriptedDrafter(script), 8, rule)
            (output,) = run(tiny_llm, [(prompt, asked(**ASKED["compact"]))])
            assert alike(output, expected)
    tiny_llm.speculative_config = None


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_an_empty_draft_may_have_a_law(tiny_llm, rule):
    """Of no rows; what the grammar forces has none either."""
    vocab = tiny_llm.runner.model.config.vocab_size
    use(tiny_llm, ScriptedDrafter(lambda seq, k: Draft(q=torch.empty(0, vocab))), 4, Rule(rule))
    (output,) = run(tiny_llm, [(tiny_llm.encode(PROMPTS[0]), asked(**ASKED["choice"]))])
    assert output.text in ASKED["choice"]["choice"] and "grammar" in output.drafted_by
    tiny_llm.speculative_config = None


def narrow(seq: Sequence) -> None:
    with suppress(ValueError):  # it is read-only
        seq.constraint.mask(seq, [])[:] &= 0x0F


MEDDLING = {  # with what is shown
    "mask": narrow,
    "cut": lambda fork: fork.tokens.__delitem__(slice(-2, None)),
    "only the end": lambda fork: fork.tokens.__delitem__(slice(-8)),
    "rewritten": lambda fork: fork.tokens.__setitem__(-1, fork.tokens[-2]),
    "another prompt": lambda fork: setattr(fork, "prompt_len", len(fork.tokens) - 2),
}


@pytest.mark.parametrize("how", MEDDLING)
def test_whatever_a_drafter_does_to_a_fork_the_sequence_stays(tiny_llm, how):
    """Nor what it writes on its answers. All are asked about like the request's own."""
    vocab = tiny_llm.runner.model.config.vocab_size

    def meddle(seq: Sequence, k: int) -> Draft:
        fork = seq.fork()
        if len(seq.output) > 2:
            MEDDLING[how](fork)
        for _ in range(2):
            choose(torch.zeros(1, vocab), [Row(fork)])
            fork.constraint.forced(fork, []).insert(0, 9)
        return Draft()

    for given_ in ({"regex": "[a-z]{3}[0-9]{3}[a-z]{3}[0-9]{3} the end"}, ASKED["json"]):
        request = tiny_llm.encode(PROMPTS[0]), asked(**given_, temperature=1.0, seed=3)
        tiny_llm.speculative_config = None
        (expected,) = run(tiny_llm, [request])
        use(tiny_llm, ScriptedDrafter(meddle), 4)
        (output,) = run(tiny_llm, [request])
        assert alike(output, expected) and output.metrics["drafter_error"] is None
    tiny_llm.speculative_config = None
