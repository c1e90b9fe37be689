"""Text as it streams is the text of all the tokens, whole characters only, cut at stop strings."""

from __future__ import annotations

import json
import random
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from outrider import SamplingParams
from outrider.engine import LONG, TextStream, engine
from outrider.engine.text import spelt, tokenizing
from outrider.find import embedded
from outrider.load import read_tokenizer

TEXT = "Once upon a time, naïve café: 🙂👩‍👩‍👧 日本語 — “quoted”.\n\n  indented\tand so on.\n"


@pytest.fixture(scope="module")
def tokenizer():
    return read_tokenizer(embedded()["tiny"])


def pieces(tokenizer, tokens, prompt=(), **params) -> tuple[list[str], TextStream]:
    stream = TextStream(tokenizer, SamplingParams(**params), prompt)
    taken = []
    for token in tokens:
        stopped = stream.feed([token])
        taken.append(stream.take())
        if stopped:
            break
    stream.feed([], final=True)
    return [*taken, stream.take(final=True)], stream


def test_pieces_are_the_whole(tokenizer):
    tokens = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    taken, stream = pieces(tokenizer, tokens)
    assert "".join(taken) == stream.text == TEXT and not any("\ufffd" in piece for piece in taken)
    assert taken[0] and sum(map(bool, taken)) > len(tokens) / 2  # it does not come all at the end


def test_any_tokens(tokenizer):
    """Random tokens make broken characters: fed singly or at once the text is the tokenizer's."""
    dice = random.Random(0)
    for _ in range(60):
        tokens = dice.choices(range(6, 400), k=dice.randint(1, 20))  # the lowest ids are single bytes
        taken, stream = pieces(tokenizer, tokens)
        whole = TextStream(tokenizer, SamplingParams())
        whole.feed(tokens, final=True)
        assert "".join(taken) == stream.text == whole.text == tokenizer.decode(tokens)


def test_stop_strings_across_tokens(tokenizer):
    tokens = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    dice = random.Random(1)
    for _ in range(40):
        at = dice.randrange(len(TEXT) - 8)
        stop = TEXT[at : at + dice.randint(1, 8)]
        for include in (False, True):
            taken, stream = pieces(tokenizer, tokens, stop=["@@", stop], include_stop_str_in_output=include)
            end = TEXT.find(stop) + include * len(stop)
            assert stream.stopped and "".join(taken) == stream.text == TEXT[:end]
            assert all(TEXT.startswith("".join(taken[:i])) for i in range(len(taken)))


def test_only_what_a_stop_string_may_begin_with_is_held(tokenizer):
    """Text that cannot become one is handed out with its token, however long the strings are."""
    tokens = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    plain, _ = pieces(tokenizer, tokens)
    assert pieces(tokenizer, tokens, stop=["@" * 99, "#"])[0] == plain
    begins = TEXT[9] + "@" * 9  # as one character of the text does, and all others like it
    for own, held in zip(plain, pieces(tokenizer, tokens, stop=begins)[0], strict=True):
        assert own == held or TEXT[9] in own + held


def test_the_first_of_several_stops_counts(tokenizer):
    taken, _ = pieces(tokenizer, tokenizer("One two three four")["input_ids"], stop=["four", "three", "wo th"])
    assert "".join(taken) == "One t"


@pytest.mark.parametrize("stops", [["abcd", "bc"], ["bc", "abc"]])
def test_the_stop_that_ends_first_counts(stops):
    """However the text is cut into tokens; of two that end together, the one that stands first in the list."""

    class Pieces:
        def decode(self, tokens, **_):
            return "".join(words[token] for token in tokens)

    for words in (["abcd"], ["abc", "d"], [*"abcd"]):
        taken, stream = pieces(Pieces(), range(len(words)), stop=stops)
        assert stream.stop_reason == "bc" and "".join(taken) == "a"


def test_half_a_character_behind_a_stop_string_is_no_text():
    """Of a token that ends the one and begins the other."""

    class Words:
        def decode(self, tokens, **options):
            return b"".join([b"so", b"!\xf0\x9f"][token] for token in tokens).decode("utf-8", "replace")

    taken, stream = pieces(Words(), [0, 1], stop="!")
    assert "".join(taken) == stream.text == "so" and stream.stop_reason == "!"


def test_special_tokens(tokenizer):
    tokens = [*tokenizer("Hi", add_special_tokens=False)["input_ids"], tokenizer.bos_token_id]
    assert "".join(pieces(tokenizer, tokens)[0]) == "Hi"
    assert "".join(pieces(tokenizer, tokens, skip_special_tokens=False)[0]) == "Hi<|bos|>"


@pytest.mark.parametrize("count", [10, 63, 64, 65, 200])
def test_a_character_behind_many_special_tokens_is_whole(tokenizer, count):
    """As a model writes the end of its text over and over that is not to end."""
    word, bird = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("Hi", "🙂"))
    assert len(bird) > 1
    taken, _ = pieces(tokenizer, [*word, *[tokenizer.bos_token_id] * count, *bird])
    assert "".join(taken) == "Hi🙂"
    taken, _ = pieces(tokenizer, bird, [*word, *[tokenizer.bos_token_id] * count])
    assert "".join(taken) == "🙂", "behind a prompt's"


def test_stop_strings_count_only_behind_min_tokens(tokenizer):
    tokens = tokenizer("One two, two three two", add_special_tokens=False)["input_ids"]
    first = next(i for i in range(len(tokens)) if "two" in tokenizer.decode(tokens[: i + 1])) + 1
    taken, stream = pieces(tokenizer, tokens, stop="two", min_tokens=first)
    assert stream.stopped and "".join(taken) == "One two, "
    for least in range(first):  # where it ends counts, not where it begins
        taken, stream = pieces(tokenizer, tokens, stop="One two", min_tokens=least)
        assert stream.stopped and "".join(taken) == ""


# --- tokenizers of other houses ---------------------------------------------------------------------------------------

STORY = "a little girl met a little bear. The end. Once upon a time, she said: “naïve café 🙂 日本語”! I don't know ."
SPECIAL = ["<unk>", "<s>", "</s>"]


@cache
def other(kind: str) -> PreTrainedTokenizerFast:
    """A small tokenizer of a kind: Llama 2's in its old and its new form, T5's, GPT-2's and BERT's."""
    metaspace = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>") if kind == "wordpiece" else models.BPE(unk_token="<unk>"))
    if kind == "wordpiece":
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece(cleanup=False)
        trainer = trainers.WordPieceTrainer(vocab_size=160, special_tokens=SPECIAL, show_progress=False)
    else:
        bytewise = kind == "bytes"
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False) if bytewise else metaspace
        tokenizer.decoder = decoders.ByteLevel() if bytewise else decoders.Metaspace(prepend_scheme="first")
        alphabet = pre_tokenizers.ByteLevel.alphabet() if bytewise else []
        trainer = trainers.BpeTrainer(
            vocab_size=300 if bytewise else 110, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        )
    tokenizer.train_from_iterator([STORY.replace("日", "").replace("🙂", "")] * 2, trainer)
    if kind.startswith("llama"):
        merges = [tuple(merge) for merge in json.loads(tokenizer.to_str())["model"]["merges"]]
        vocab = [*SPECIAL, *(f"<0x{i:02X}>" for i in range(256)), *sorted(tokenizer.get_vocab())]
        vocab = {token: i for i, token in enumerate(dict.fromkeys(vocab))}
        tokenizer.model = models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
        if kind == "llama legacy":
            tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
            tokenizer.pre_tokenizer = None
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


KINDS = ["llama legacy", "llama", "metaspace", "bytes", "wordpiece"]


def ids(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("named", ["LlamaTokenizer", "GPT2Tokenizer"])
@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_a_tokenizer_json_is_taken_as_it_is(tmp_path, model_type, named):
    """By class or kind of model transformers would build another of its vocabulary: of other rules, other tokens."""
    tokenizer = other("llama legacy")
    tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": named, "eos_token": "</s>"}))
    found = read_tokenizer(tmp_path)
    for text in (STORY, "  a girl", "▁a"):
        assert ids(found, text) == ids(tokenizer, text)
        assert found.decode(ids(found, text)) == tokenizer.decode(ids(tokenizer, text))
    assert found.eos_token_id == tokenizer.eos_token_id


@pytest.mark.parametrize("kind", ["llama legacy", "llama", "bytes"])
def test_a_long_prompt_that_ends_amid_a_character(kind):
    """No window of what is decoded may begin there: the rest of the character would be no character."""
    tokenizer = other(kind)
    bird = ids(tokenizer, "a🙂")[-4:]
    prompt = [*ids(tokenizer, "so"), *bird * 5, *bird[:2]]
    output = [*bird[2:], *bird * 2, *ids(tokenizer, "ab"), *bird * 2]
    taken, stream = pieces(tokenizer, output, prompt)
    assert "".join(taken) == stream.text and stream.text.count("\ufffd") == 0
    assert stream.text.replace(" ", "").endswith("🙂🙂🙂ab🙂🙂")
    assert pieces(tokenizer, output, prompt, stop="b🙂")[1].stopped


@st.composite
def cuts(draw, kind: str):
    """A prompt and an output: a text cut in two, or any tokens; special ones are in it, too."""
    tokenizer = other(kind)
    if draw(st.booleans()):
        tokens = [t for text in draw(st.lists(st.sampled_from([STORY, " girl", "é", "🙂", "a", "</s>", "\n"])))
                  for t in ids(tokenizer, text)]  # fmt: skip
    else:
        tokens = draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=60))
    at = draw(st.integers(0, len(tokens)))
    return tokens[:at], tokens[at:]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_text_is_what_the_output_adds_to_the_prompt(kind, skip):
    tokenizer = other(kind)

    @given(cuts(kind))
    def check(case):
        prompt, output = case
        taken, stream = pieces(tokenizer, output, prompt, skip_special_tokens=skip)
        at_once = TextStream(tokenizer, SamplingParams(skip_special_tokens=skip), prompt)
        at_once.feed(output, final=True)
        assert "".join(taken) == stream.text == at_once.text == at_once.take(final=True)
        before, whole = (tokenizer.decode(t, skip_special_tokens=skip) for t in (prompt, prompt + output))
        if "\ufffd" not in whole and whole.startswith(before):
            assert before + stream.text == whole
            assert not any("\ufffd" in piece for piece in taken)

    check()


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_stop_strings_are_found_as_soon_as_they_are_there(kind, include):
    tokenizer = other(kind)

    stop = st.sampled_from([" girl", ". Once", "irl m", "é", "🙂", "e", " a ", "\n", "!"])

    @given(cuts(kind), st.lists(stop, min_size=1), st.integers(0, 30), st.integers(1, 9))
    def check(case, stops, least, block):
        prompt, output = case
        plain, before = TextStream(tokenizer, SamplingParams(), prompt), ""
        for n, token in enumerate(output, start=1):
            plain.feed([token])
            if n <= least:
                before = plain.text
            elif found := [
                (at, stop) for stop in stops if (at := plain.text.find(stop, max(0, len(before) + 1 - len(stop)))) >= 0
            ]:
                at, first = min(found, key=lambda found: found[0] + len(found[1]))
                expected = plain.text[: at + len(first) * include]
                break
        else:
            plain.feed([], final=True)
            n, expected = len(output) + 1, plain.text
        options = {"stop": stops, "include_stop_str_in_output": include, "min_tokens": least}
        taken, stream = pieces(tokenizer, output, prompt, **options)
        assert "".join(taken) == stream.text == expected and stream.stopped == (n <= len(output))
        assert len(taken) == min(n, len(output)) + 1  # at the very token
        blocks = TextStream(tokenizer, SamplingParams(**options), prompt)
        for at in range(0, len(output), block):
            blocks.feed(output[at : at + block])
        blocks.feed([], final=True)
        assert blocks.text == expected

    check()


@pytest.mark.parametrize("include", [False, True])
def test_the_token_that_ends_a_text(tiny_llm, include):
    """Part of it only if that is asked for; an end of text, too, where special tokens show."""
    prompt = "Once upon a time"
    (full,) = tiny_llm.generate(prompt, temperature=0, max_tokens=12)
    *before, last = full.token_ids[: full.token_ids.index(full.token_ids[-1]) + 1]
    text = {n: tiny_llm.generate(prompt, temperature=0, max_tokens=n)[0].text for n in (len(before), len(before) + 1)}
    options = {"temperature": 0, "max_tokens": 12, "include_stop_str_in_output": include}
    (cut,) = tiny_llm.generate(prompt, **options, stop_token_ids=[last])
    assert cut.text == text[len(before) + include] and cut.token_ids == [*before, last] and cut.stop_reason == last
    (ended,) = tiny_llm.generate(prompt, **options, logit_bias={1: 100.0}, skip_special_tokens=False)
    assert ended.token_ids == [1] and ended.text == "<|eos|>" * include


def test_spaces_of_words_survive():
    """What the end of the prompt, and a special token, did to the first word behind them."""
    for kind in ("llama legacy", "llama", "metaspace"):
        tokenizer = other(kind)
        prompt, girl = [1, *ids(tokenizer, "a little")], ids(tokenizer, "girl met")
        assert "".join(pieces(tokenizer, girl, prompt)[0]) == " girl met"
        taken, stream = pieces(tokenizer, girl, prompt, stop=" girl")
        assert stream.stopped and "".join(taken) == ""
        ended = [*ids(tokenizer, "The end."), 2, *ids(tokenizer, "Once upon")]
        assert pieces(tokenizer, ended, prompt)[1].text == " The end. Once upon"
        assert pieces(tokenizer, ended, prompt, stop=". Once")[1].text == " The end"
        assert pieces(tokenizer, ended, [1])[1].text == "The end. Once upon"  # nothing before it: no space
        assert pieces(tokenizer, ended, [*ids(tokenizer, "a"), *[2] * 9])[1].text == " The end. Once upon"


@pytest.mark.parametrize("kind", ["llama legacy", "llama", "bytes"])
def test_a_character_that_the_prompt_begins(kind):
    tokenizer = other(kind)
    smile = ids(tokenizer, "a 🙂")
    for cut in range(1, 4):
        prompt, output = smile[:-cut], [*smile[-cut:], *ids(tokenizer, "e")]
        text = pieces(tokenizer, output, prompt)[1].text
        assert text.startswith("🙂") and "\ufffd" not in text
        taken, stream = pieces(tokenizer, smile[:-cut])
        assert "".join(taken[:-1]).strip() == "a" and stream.text.count("\ufffd") in (1, 4 - cut)  # never completed


def test_a_long_output_is_read_in_linear_time():
    """However little text comes of it: the tokens decoded per token stay few."""

    class Counted:
        seen = most = 0

        def decode(self, tokens, **options):
            self.seen, self.most = self.seen + len(tokens), max(self.most, len(tokens))
            return tokenizer.decode(tokens, **options)

    for kind in ("llama", "bytes"):
        tokenizer = other(kind)
        for token in (2, 3 + 0xE5 if kind == "llama" else ids(tokenizer, "🙂")[-1], ids(tokenizer, "a")[0]):
            counted = Counted()
            stream = TextStream(counted, SamplingParams(stop="never"), ids(tokenizer, STORY))
            for _ in range(1000):
                stream.feed([token])
            assert counted.most < 160 and counted.seen < 160 * 1000


def test_a_prompt_without_text_is_not_read_to_its_beginning(tokenizer):
    """Nor kept, to be decoded again with each token that has no text."""

    class Counted:
        most = 0

        def decode(self, tokens, **options):
            self.most = max(self.most, len(tokens))
            return tokenizer.decode(tokens, **options)

    counted, end = Counted(), tokenizer.eos_token_id
    stream = TextStream(counted, SamplingParams(), [*ids(tokenizer, "Hi"), *[end] * 5000])
    for _ in range(100):
        stream.feed([end])
    stream.feed(ids(tokenizer, "Hi"), final=True)
    assert stream.text == "Hi" and counted.most < 300


def test_a_tokenizer_in_python_is_asked_by_one_thread_at_a_time(tokenizer):
    """Those in Rust may read a long text beside: nobody waits for it but other long ones."""
    short, long = "a", "a" * (LONG + 1)
    assert tokenizing(short, tokenizer) is not tokenizing(long, tokenizer) is tokenizing(long, tokenizer)
    assert tokenizing(short, object()) is tokenizing(long, object()) is tokenizing(short, tokenizer)


def test_bad_words_of_many_requests_are_spelt_once(tiny_llm, monkeypatch):
    words, asked, prompt = ["the park", "park"], [], "Lily went to the park. " * 3 + "Lily went to"
    expected = [tiny_llm.generate(prompt, temperature=0, max_tokens=8, bad_words=own)[0].text for own in (words, [])]
    monkeypatch.setattr(engine, "spelt", lambda *of: asked.append(of[0]) or spelt(*of))
    mixed = [SamplingParams(temperature=0, max_tokens=8, bad_words=own) for own in (["the"], words, [], words, words)]
    outputs = tiny_llm.generate([prompt] * 5, mixed)
    assert [output.text for output in outputs[1:]] == [expected[own == []] for own in (words, [], words, words)]
    assert asked == [("the",), tuple(words)]


def test_bad_words_in_tokens(tiny_llm):
    """At the beginning of a text, and behind a space; a word of several tokens may begin, but not end."""
    space = tiny_llm.encode(" dog", add_special_tokens=False)
    bare = tiny_llm.encode("dog", add_special_tokens=False)
    found = spelt(["dog"], tiny_llm.tokenizer)
    assert bare in found and (space in found or len(space) != len(bare))
    assert spelt([" dog"], tiny_llm.tokenizer) == found and all(spelt([" "], tiny_llm.tokenizer))
    prompt = "Lily went to the park. " * 3 + "Lily went to"
    plain = tiny_llm.generate(prompt, temperature=0, max_tokens=8)[0]
    assert plain.text.startswith(" the park")
    for words in (["the park"], ["park"]):
        other = tiny_llm.generate(prompt, temperature=0, max_tokens=8, bad_words=words)[0]
        assert other.text.startswith(" the") and "the park" not in other.text
    assert "the" not in tiny_llm.generate(prompt, temperature=0, max_tokens=8, bad_words=["the"])[0].text.split()
    only = tiny_llm.generate(prompt, seed=1, max_tokens=8, allowed_token_ids=space, ignore_eos=True)[0]
    assert set(only.token_ids) <= set(space)
