"""Texts and tasks: what is held out stays out, and every answer can be found."""

from __future__ import annotations

import json
import lzma
import sysconfig

import numpy as np
import pytest

from outrider.bench.suites import load_suite
from outrider.errors import ConfigError
from tools import data
from tools.recall import Recall


@pytest.fixture(scope="module")
def texts(folder, library):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sysconfig, "get_path", lambda name: str(library))
        return list(data.texts(folder))


def test_held_out(texts, folder):
    """Both splits have all domains and no text in common; what benchmarks ask is in neither training text."""
    split = {held: {t.text for t in texts if t.held is held} for held in (True, False)}
    assert not split[True] & split[False]
    for held in split:
        assert {t.domain for t in texts if t.held is held} == {"stories", "books", "code", "pairs", "maths"}
    prompts = load_suite("stories", 5, folder).prompts
    assert not any(prompt in text for prompt in prompts for text in split[False])
    assert all(any(prompt in text for text in split[True]) for prompt in prompts)
    (asked,) = json.loads((folder / "spec_bench_half.jsonl").read_text())["turns"]
    assert not any(asked in t.text for t in texts)


def test_chats_follow_the_template(texts, tokenizer):
    """Pairs are what the chat template writes, without the calculator's notes."""
    question, answer = "Sum 3: 3 + 1?", "It is 4."
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    assert tokenizer.apply_chat_template(turns, tokenize=False) == data.BOS + data.chat(question, answer)
    assert data.chat(question, answer) in {t.text for t in texts}
    assert tokenizer.chat_template == data.CHAT_TEMPLATE


def test_no_data(tmp_path):
    (tmp_path / "tinystories.txt.xz").write_bytes(lzma.compress(b"a story"))
    with pytest.raises(ConfigError, match="books_train"):
        list(data.texts(tmp_path))


def test_documents_survive(corpus, texts, tokenizer):
    """Tokens decode to the very documents, each between its marks; a window begins where one does, if it can."""
    stories = data.read_corpus(corpus, "train")["stories"]
    found = {tokenizer.decode(stories.document(i).tolist()) for i in range(len(stories.starts))}
    assert found == {f"{data.BOS}{t.text}{data.EOS}" for t in texts if t.domain == "stories" and not t.held}
    window = stories.window(np.random.default_rng(0), 1000)
    assert len(window) == 1000 and window[0] == tokenizer.bos_token_id
    with pytest.raises(ConfigError, match="no window"):
        stories.window(np.random.default_rng(0), len(stories.ids) + 1)


def test_a_corpus_that_is_half_another_tokenizers(tokenizer, tmp_path, monkeypatch):
    """Where the second `prepare` was interrupted, the first one's does not take the folder for its own."""
    other = data.train_tokenizer(["other words"], 300)
    found = [data.Text(domain, "once upon a time", held=False) for domain in ("stories", "books")]
    monkeypatch.setattr(data, "texts", lambda _: found)
    data.prepare(tmp_path, tmp_path, tokenizer)
    write, first = data.write_tokens, data.read_corpus(tmp_path, "train")["stories"].ids.tolist()
    with monkeypatch.context() as patch, pytest.raises(KeyError, match="books"):
        patch.setattr(
            data, "write_tokens", lambda folder, domain, *own: {"stories": write}[domain](folder, domain, *own)
        )
        data.prepare(tmp_path, tmp_path, other)
    data.prepare(tmp_path, tmp_path, tokenizer)
    assert data.read_corpus(tmp_path, "train")["stories"].ids.tolist() == first


def test_tokenizer_from_scratch(texts):
    tokenizer = data.train_tokenizer((t.text for t in texts), 400)
    ids = tokenizer.encode("Anna saw — 数 — a key.\n\tEnd")
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Anna saw — 数 — a key.\n\tEnd"
    assert tokenizer.convert_tokens_to_ids(list(data.SPECIAL)) == list(range(6))


@pytest.fixture(scope="module")
def recall(corpus, tokenizer):
    return Recall(data.read_corpus(corpus, "train"), tokenizer)


def parts(tokenizer, ids, answers):
    """The text before the first answer, and the answers."""
    first, runs = answers.index(True), []
    for token, answer, before in zip(ids, answers, [False, *answers[:-1]], strict=True):
        if answer:
            runs += [[token]] if not before else []
            runs[-1] += [token] if before else []
    return tokenizer.decode(ids[:first]), [tokenizer.decode(run).replace(data.END, "").strip() for run in runs]


@pytest.mark.parametrize("task", ["quote", "summarise", "sentence", "lookup", "repeat", "noise"])
def test_answers_stand_above(recall, tokenizer, task):
    """What is asked for is in the context, piece by piece, word for word."""
    for seed in range(8):
        ids, answers = recall.example(np.random.default_rng(seed), task, 200)
        question, found = parts(tokenizer, ids, answers)
        assert found and all(found)
        for answer in found:
            for piece in answer.split(". ") if task == "summarise" else [answer]:
                assert piece.strip(".") in question, (task, piece)


def test_edits(recall, tokenizer):
    """A corrected text is not the damaged one, but close; a renamed variable is gone."""
    changed = 0
    for seed in range(8):
        question, (answer,) = parts(tokenizer, *recall.example(np.random.default_rng(seed), "correct", 150))
        words = set(answer.split())
        assert len(words & set(question.split())) > len(words) / 2
        changed += answer not in question
        question, (answer,) = parts(tokenizer, *recall.example(np.random.default_rng(seed), "rename", 150))
        old, new = question.split("`")[1::2]
        assert old not in answer.replace("_", " ").split() and new in answer
    assert changed >= 3


def test_distance(recall):
    """The nearest evidence is about so many tokens above."""
    for task in ("lookup", "repeat", "sentence", "quote"):
        for distance in (200, 900):
            lengths = [len(recall.example(np.random.default_rng(s), task, distance)[0]) for s in range(5)]
            assert 0.6 * distance < np.mean(lengths) < 2.5 * distance + 150, (task, distance, lengths)
