"""Text as it streams is the text of all the tokens, whole characters only, cut at stop strings."""

from __future__ import annotations

import random

import pytest

from outrider import SamplingParams
from outrider.engine import TextStream
from outrider.load import embedded, read_tokenizer

TEXT = "Once upon a time, naïve café: 🙂👩‍👩‍👧 日本語 — “quoted”.\n\n  indented\tand so on.\n"


@pytest.fixture(scope="module")
def tokenizer():
    return read_tokenizer(embedded()["tiny"])


def pieces(tokenizer, tokens, **params) -> tuple[list[str], TextStream]:
    stream = TextStream(tokenizer, SamplingParams(**params))
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


def test_the_first_of_several_stops_counts(tokenizer):
    taken, _ = pieces(tokenizer, tokenizer("One two three four")["input_ids"], stop=["four", "three", "wo th"])
    assert "".join(taken) == "One t"


def test_special_tokens(tokenizer):
    tokens = [*tokenizer("Hi", add_special_tokens=False)["input_ids"], tokenizer.bos_token_id]
    assert "".join(pieces(tokenizer, tokens)[0]) == "Hi"
    assert "".join(pieces(tokenizer, tokens, skip_special_tokens=False)[0]) == "Hi<|bos|>"


def test_stop_strings_count_only_behind_min_tokens(tokenizer):
    tokens = tokenizer("One two, two three two", add_special_tokens=False)["input_ids"]
    first = next(i for i in range(len(tokens)) if "two" in tokenizer.decode(tokens[: i + 1])) + 1
    taken, stream = pieces(tokenizer, tokens, stop="two", min_tokens=first)
    assert stream.stopped and "".join(taken) == "One two, "
