"""Datastores and the drafter that copies from them."""

from __future__ import annotations

import gzip
import json
import lzma
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider import LLM, Draft, SamplingParams
from outrider.control import Beliefs
from outrider.corpus import fingerprint, speller
from outrider.datastore import HEADER, SEPARATOR, Store, build, suffix_array, write
from outrider.drafters.rest import Rest, follow, grow, guess
from outrider.errors import ConfigError
from outrider.find import find
from outrider.load import read_tokenizer
from outrider.ops import native
from outrider.sequence import Sequence

IDS = st.lists(st.integers(0, 3), max_size=12)
STORY = "Once upon a time, there was a little girl named Lily. She loved to play outside in the sunshine. "


@pytest.fixture(params=["library", "numpy"])
def sorter(request, monkeypatch):
    """Both ways to sort suffixes."""
    if request.param == "numpy":
        monkeypatch.setitem(sys.modules, "pydivsufsort", None)
    else:
        pytest.importorskip("pydivsufsort")


@pytest.fixture(scope="module")
def tokenizer():
    return read_tokenizer(find("tiny"))


@given(st.lists(st.sampled_from([0, 1, 2, 255, 256, 70_000, SEPARATOR]), min_size=1, max_size=40))
def test_suffix_array(sorter, ids):
    assert suffix_array(np.array(ids, np.uint32)).tolist() == sorted(range(len(ids)), key=lambda i: ids[i:])


@pytest.mark.parametrize("ids", [[7] * 300, [*range(300)] * 3, [*range(70_000)], [5]], ids=len)
def test_suffix_array_of_long_repeats(sorter, ids):
    assert suffix_array(np.array(ids, np.uint32)).tolist() == sorted(range(len(ids)), key=lambda i: ids[i : i + 901])


def brute(documents, context, longest, shortest, length):
    """What `find` shall return, by looking everywhere."""
    for n in range(min(longest, len(context)), shortest - 1, -1):
        ends = [(d, i + n) for d in documents for i in range(len(d) - n) if d[i : i + n] == context[-n:]]
        if ends:
            return Counter(tuple(d[end : end + length]) for d, end in ends)
    return Counter()


@given(
    st.lists(IDS, min_size=1, max_size=6).filter(any), IDS, st.integers(1, 3), st.integers(1, 5),
    st.sampled_from([1, 9, 2**26]),
)  # fmt: skip
def test_find(tmp_path_factory, documents, context, shortest, length, shard):
    """Longest suffix first, all occurrences in all shards, never across a document's border."""
    path = tmp_path_factory.getbasetemp() / "found.store"
    store = write(documents, path, vocab=4, shard_tokens=shard)
    rows = store.match(context, 5, shortest, length, 10**6)[1]
    assert Counter(map(tuple, rows)) == brute(documents, context, 5, shortest, length)
    few = store.match(context, 5, shortest, length, 2)[1]
    assert len(few) == min(2, len(rows)) and not Counter(map(tuple, few)) - Counter(map(tuple, rows))


@pytest.mark.skipif(native.kernels is None, reason="no compiled kernels")
@given(
    st.lists(st.lists(st.integers(0, 2), max_size=30), min_size=1, max_size=6).filter(any), IDS, st.integers(1, 12),
    st.integers(1, 5), st.integers(1, 9), st.sampled_from([1, 20, 2**26]), st.booleans(),
)  # fmt: skip
def test_compiled(tmp_path_factory, documents, context, k, length, hits, shard, tree):
    """The compiled look-up guesses what its reference does."""
    store = write(documents, tmp_path_factory.getbasetemp() / "compiled.store", vocab=4, shard_tokens=shard)
    tokens, parents, trust = store.compiled().guess(context[-6:], 2, length, hits, k, tree)
    assert Draft(tokens, parents, trust=trust) == guess(*store.match(context, 6, 2, length, hits), k, tree)


@pytest.mark.skipif(native.kernels is None, reason="no compiled kernels")
def test_compiled_reads_what_is_there(tmp_path):
    """A suffix array of wild places leads nowhere outside of the ids."""
    path = tmp_path / "wild.store"
    write([[1, 2, 3] * 50], path, vocab=4)
    raw = bytearray(path.read_bytes())
    raw[-4 * 151 :] = np.random.default_rng(0).integers(0, 2**32, 151, np.uint64).astype("<u4").tobytes()
    path.write_bytes(raw)
    store = Store(path)
    found = store.compiled()
    for context in ([1, 2], [3, 1, 2, 3, 1], [0, 0], [2**32 - 1, 5]):
        for tree in (False, True):
            tokens, parents, trust = found.guess(context, 1, 9, 99, 9, tree)
            assert len(tokens) == len(parents) == len(trust) <= 9


def test_find_by_hand(tmp_path):
    store = write([[1, 2, 3, 4], [9, 2, 3, 5, 6], [1, 2, 3]], tmp_path / "s", vocab=10)
    assert store.match([0, 1, 2, 3], 16, 2, 8, 99)[1] == [[4]]  # longest suffix first; the last document ends there
    assert sorted(store.match([8, 2, 3], 16, 2, 8, 99)[1]) == [[4], [5, 6]]
    assert store.match([9, 2, 3, 5, 6], 16, 2, 8, 99)[1] == []  # occurs only where a document ends
    assert not any(store.match(each, 16, 2, 8, 99)[1] for each in ([3, 4], [7, 3], [3]))
    assert store.match([], 16, 1, 8, 99)[1] == store.match([1, 2], 16, 2, 8, 0)[1] == []
    assert (store.header["documents"], store.header["tokens"]) == (3, 12)


def test_a_few_hits_are_a_fair_sample(tmp_path):
    documents = [[1, 2, 3]] * 900 + [[1, 2, 4]] * 100
    rows = write(documents, tmp_path / "s", vocab=10, shard_tokens=1000).match([1, 2], 16, 2, 8, 50)[1]
    assert Counter(map(tuple, rows)) == {(3,): 45, (4,): 5}


def test_a_store_larger_than_memory(tmp_path):
    """A file of 64 GiB, full of holes: opening and searching it touches a few pages."""
    path, n = tmp_path / "large.store", 2**33
    if not Path("/proc/self/statm").exists():
        pytest.skip("resident memory is read from /proc")
    header = {"outrider_datastore": 1, "shards": [n // 4] * 4, "vocab": 9, "documents": 1, "tokens": n}
    with open(path, "wb") as file:
        file.write(json.dumps(header | {"fingerprint": None, "model": ""}).encode().ljust(HEADER))
        try:
            file.truncate(HEADER + 8 * n)
        except OSError:
            pytest.skip("no sparse files here")

    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    before = resident()
    store = Store(path)
    assert store.match([3, 1, 2], 16, 2, 8, 99)[1] == []
    assert len(store.match([0] * 16, 16, 2, 8, 99)[1]) == 99
    assert resident() - before < 2**23


# --- building ---------------------------------------------------------------------------------------------------------


def texts_of(store: Store, tokenizer) -> list[str]:
    ids = np.concatenate([shard[1] for shard in store.shards])
    ends = np.flatnonzero(ids == SEPARATOR)
    return [tokenizer.decode(part[part != SEPARATOR].tolist()) for part in np.split(ids, ends)[:-1]]


def test_build_reads_what_there_is(tmp_path, tokenizer):
    code = tmp_path / "code"
    (code / "deep").mkdir(parents=True)
    (code / ".hidden").mkdir()
    for name in ("a.py", "deep/b.py", ".hidden/c.py", "d.weird"):
        (code / name).write_text(f"name = '{name}'\n")
    (tmp_path / "one.txt").write_text("A tale of ö.\n", "utf-8-sig")  # with a byte-order mark
    (tmp_path / "packed.txt.xz").write_bytes(lzma.compress(b"Packed."))
    entries = [{"text": "T."}, {"content": "C."}, {"prompt": "P", "completion": "Q"}, {"prompt": "R", "text": "U."}]
    entries.append({"prompt": "def f", "canonical_solution": "(): pass"})
    lines = "\n".join(map(json.dumps, entries)) + "\n\n"
    (tmp_path / "lines.jsonl").write_text(lines, "utf-8-sig")
    (tmp_path / "lines.jsonl.gz").write_bytes(gzip.compress(lines.encode()))

    def built(*paths, **options) -> list[str]:
        return texts_of(build([tmp_path / p for p in paths], tokenizer, tmp_path / "out", **options), tokenizer)

    assert built("one.txt", "packed.txt.xz") == ["A tale of ö.\n", "Packed."]
    assert built("code") == ["name = 'a.py'\n", "name = 'deep/b.py'\n"]
    assert built("code", suffixes=[".weird"]) == ["name = 'd.weird'\n"]
    assert built("lines.jsonl") == built("lines.jsonl.gz") == ["T.", "C.", "PQ", "U.", "def f(): pass"]
    (tmp_path / "lines.jsonl").write_text('{"body": "B.", "text": "T."}\n')
    heard: list[tuple[str, int, int]] = []
    assert built("lines.jsonl", field="body", progress=lambda *call: heard.append(call)) == ["B."]
    (tmp_path / "halves.jsonl").write_text('{"text": "a \\ud800 b \\ud83d\\ude00"}\n')
    assert built("halves.jsonl") == ["a \ufffd b \U0001f600"]
    assert heard and all(0 <= done <= total for _, done, total in heard)


def test_long_texts_and_shards(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("outrider.corpus.PIECE", 100)
    (tmp_path / "long.txt").write_text(STORY * 30)
    store = build([tmp_path / "long.txt"], tokenizer, tmp_path / "out", shard_tokens=200)
    assert len(store.shards) > 1 and "".join(texts_of(store, tokenizer)) == STORY * 30
    context = tokenizer(" loved to play")["input_ids"]
    rows = store.match(context, 16, 2, 3, 10**6)[1]
    assert len(rows) > 20 and tokenizer.decode(Counter(map(tuple, rows)).most_common(1)[0][0]).startswith(" outside")


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("x.jsonl", "{", "x.jsonl:1 is not JSON"),
        ("x.jsonl", '{"text": "a"}\n[1]', "x.jsonl:2 is no object"),
        ("x.jsonl", '{"body": "a"}', "has body, and no text.*--field"),
        ("x.jsonl", '{"text": 5}', "has text, and no text as a string 'text' or"),
        ("x.txt", "", "no text to put"),
        ("x.txt", "a\0b", "x.txt is no text"),
        ("x.jsonl", "[" * 100_000, "x.jsonl:1 is not JSON"),
        ("x.gz", "not packed", "x.gz cannot be read"),
        ("x.xz", "not packed", "x.xz cannot be read"),
    ],
)
def test_unreadable_input(tmp_path, tokenizer, name, content, why):
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=why):
        build([tmp_path / name], tokenizer, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == [name]  # nothing half-written stays


def test_no_other_file_is_replaced(tmp_path, tokenizer):
    """The output comes first: who forgets it would lose a text."""
    text, out = tmp_path / "a.txt", tmp_path / "out"
    text.write_text(STORY)
    for paths in ([text], [out]):
        out.write_text(STORY * 2)
        with pytest.raises(ConfigError, match="is no datastore: it would be lost"):
            build(paths, tokenizer, out)
        assert out.read_text() == STORY * 2
    out.write_text("")
    for _ in range(2):  # a store is replaced
        build([text], tokenizer, out)


def test_missing_input_and_output(tmp_path, tokenizer):
    with pytest.raises(ConfigError, match="no file or folder at"):
        build([tmp_path / "gone"], tokenizer, tmp_path / "out")
    with pytest.raises(ConfigError, match="/dev/null is neither a file nor a folder"):
        build([Path("/dev/null")], tokenizer, tmp_path / "out")
    (tmp_path / "a.txt").write_text(STORY)
    (tmp_path / "said.jsonl").write_text('{"p": [1], "o": [2]}\n')
    for names in (["a.txt"], ["said.jsonl"], ["said.jsonl", "a.txt"]):
        with pytest.raises(ConfigError, match="--field body is for JSON lines of texts"):
            build([tmp_path / name for name in names], tokenizer, tmp_path / "out", field="body")
    with pytest.raises(ConfigError, match=r"no file in .* ends with \.py;.*--suffix"):
        build([tmp_path], tokenizer, tmp_path / "out", suffixes=[".py"])
    with pytest.raises(ConfigError, match="cannot be written"):
        write([[1]], tmp_path, 9)
    (tmp_path / "no").touch()
    with pytest.raises(ConfigError, match="cannot be a folder"):
        write([[1]], tmp_path / "no" / "folder", 9)
    assert write([[1]], tmp_path / "new" / "store", 9).nbytes
    with pytest.raises(ConfigError, match="raise shard_tokens"):
        write([[1]] * 30_000, tmp_path / "out", 9, shard_tokens=1)


# --- stores that must not be used -------------------------------------------------------------------------------------


def test_damaged_stores(tmp_path):
    path = tmp_path / "s"
    good = write([[1, 2, 3]], path, vocab=9).path.read_bytes()
    cases = {
        "is no datastore, or its header is damaged": [
            b"",
            b"hello",
            good[:100],
            b"[1]".ljust(HEADER),
            good[1:],
            good.replace(b"vocab", b"vocal"),
        ],
        "has 65536 bytes, not 65568: damaged": [good[:HEADER]],
        "has 6556[79] bytes, not 65568: damaged": [good[:-1], good + b"x"],
        "is a datastore of version 2, not 1": [
            good.replace(b'datastore": 1', b'datastore": 2'),
            b'{"outrider_datastore": 2}',
        ],
    }
    for why, contents in cases.items():
        for content in contents:
            path.write_bytes(content)
            with pytest.raises(ConfigError, match=f"^{path} {why}.*datastore build`$"):
                Store(path)
    path.unlink()
    for bad in (path, tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            Store(bad)


@pytest.mark.parametrize(
    "change",
    [{key: wrong} for key in ("documents", "tokens", "vocab") for wrong in (-1, 0, 2.0, True, None, "3", [3], 10**30)]
    + [{"shards": wrong} for wrong in (4, [4.0], [-4, 8], [0, 4], [True] * 4, [None], ["4"], [[4]], [2**32])]
    + [{"shards": wrong} for wrong in ({"4": 4}, [], None)]
    + [{"fingerprint": wrong} for wrong in (5, 5.0, ["a"], {}, False)]
    + [{"model": wrong} for wrong in (5, None, ["tiny"])]
    + [{"outrider_datastore": wrong} for wrong in ("1", 1.0, True, None, [1], -1)],
    ids=str,
)  # fmt: skip
def test_headers_of_wrong_types(tmp_path, change):
    path = tmp_path / "s"
    good = write([[1, 2, 3]], path, vocab=9).path.read_bytes()
    header = json.loads(good[:HEADER]) | change
    path.write_bytes(json.dumps(header).encode().ljust(HEADER) + good[HEADER:])
    with pytest.raises(ConfigError, match=f"^{path} .*datastore build`$"):
        Store(path)


def test_headers_that_do_not_add_up(tmp_path):
    path = tmp_path / "s"
    good = write([[1, 2, 3], [4]], path, vocab=9).path.read_bytes()
    header = json.loads(good[:HEADER])
    for change in ({"tokens": 3}, {"tokens": 9}, {"documents": 1}, {"shards": [5]}, {"shards": [3]}, {"shards": [7]}):
        path.write_bytes(json.dumps(header | change).encode().ljust(HEADER) + good[HEADER:])
        with pytest.raises(ConfigError, match="damaged"):
            Store(path)


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), min_size=1, max_size=4), st.binary(max_size=200))
def test_no_header_makes_a_traceback(tmp_path_factory, flips, noise):
    path = tmp_path_factory.getbasetemp() / "fuzzed.store"
    good = bytearray(write([[1, 2, 3, 1, 2, 4]], path, vocab=9, model="tiny").path.read_bytes())
    deep = b"[" * HEADER
    for content in (bytes(good), noise.ljust(HEADER) + bytes(good[HEADER:]), deep + bytes(good[HEADER:])):
        raw = bytearray(content)
        for at, value in flips:
            raw[at] = value
        path.write_bytes(raw)
        try:
            assert len(Store(path).match([1, 2], 16, 2, 4, 9)[1]) <= 9
        except ConfigError as error:
            assert "\n" not in str(error)


def test_names_that_no_store_can_have(tmp_path):
    for name in ("a\0b", "x" * 5000, "~nobody-of-this-name/x", ""):
        with pytest.raises(ConfigError):
            Store(name)
        with pytest.raises(ConfigError):
            write([[1]], name, 9)
        with pytest.raises(ConfigError):
            build([name], read_tokenizer(find("tiny")), tmp_path / "out")
    for device in ("/dev/null", "/dev/full"):
        if Path(device).exists():
            with pytest.raises(ConfigError, match="is no file"):
                write([[1]], device, 9)
            assert Path(device).is_char_device()


def test_flipped_bits_are_harmless(tmp_path):
    """What cannot be noticed without reading all of it gives wrong guesses, not errors."""
    path = tmp_path / "s"
    good = bytearray(write([[1, 2, 3, 1, 2, 4]], path, vocab=9).path.read_bytes())
    rng = np.random.default_rng(0)
    for _ in range(50):
        good[HEADER:] = rng.integers(0, 256, len(good) - HEADER, np.uint8).tobytes()
        path.write_bytes(good)
        for context in ([1, 2], [3, 1, 2, 4]):
            assert len(Store(path).match(context, 16, 2, 4, 9)[1]) <= 9


def test_a_file_that_cannot_be_opened(tmp_path, tokenizer, monkeypatch):
    path = tmp_path / "closed.txt"
    path.write_text(STORY)

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("outrider.corpus.open", refuse, raising=False)
    with pytest.raises(ConfigError, match=r"closed\.txt cannot be read: Permission denied"):
        build([path], tokenizer, tmp_path / "s")


def test_what_a_model_said(tmp_path, tokenizer):
    """Ids as they are, behind the end of the prompt; a line under way is left, one of another model refused."""
    lines = [{"p": [9, 8, 7, 6, 5], "o": [1, 2], "t": 0.7}, {"p": [4], "o": [3], "t": 0.0}]
    path = tmp_path / "said.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"p": [1, 2')
    text = tmp_path / "text.txt"
    text.write_text(STORY)
    store = build([path, text], tokenizer, tmp_path / "s", model="tiny")
    assert store.header["documents"] == 3
    assert store.match([9, 8], 4, 2, 9, 9)[1] == [] and store.match([8, 7], 4, 1, 9, 9)[1] == [[6, 5, 1, 2]]
    assert store.match([4], 4, 1, 9, 9)[1] == [[3]]
    packed = tmp_path / "packed"
    packed.mkdir()
    (packed / "said.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    for where in (packed, packed / "said.jsonl.gz"):
        assert build([where, text], tokenizer, tmp_path / "p", model="tiny").match([4], 4, 1, 9, 9)[1] == [[3]]
    path.write_text(json.dumps({"p": [1], "o": [2], "by": speller(tokenizer)}) + "\n")
    assert build([path], tokenizer, tmp_path / "o").header["documents"] == 1
    for wrong in ({"p": [1], "o": [8192]}, {"p": [1], "o": ["a"]}, {"p": [1]}, {"o": [1], "by": "another"}):
        path.write_text(json.dumps({"p": [1], **wrong}) + "\n")
        with pytest.raises(ConfigError, match=r"said\.jsonl:1 is"):
            build([path], tokenizer, tmp_path / "s")


@pytest.mark.skipif(native.kernels is None, reason="no compiled kernels")
@pytest.mark.parametrize("kind", [Beliefs, *([native.kernels.Beliefs] if native.kernels else [])])
def test_auto_asks_a_store_as_others_do(tmp_path, kind):
    """The same guess, with a draft between or without; nothing beyond a token that the model has not."""
    store = write([[1, 2, 3, 4, 900, 5], [7, 1, 2, 3]], tmp_path / "s", 1000)
    rest = Rest(datastore=str(store.path), tree=True)
    rest.vocab = 500
    beliefs = kind(0)
    beliefs.price([1.0] * 20)
    text = [8, 1, 2]
    ((tokens, parents, *_),), *_ = beliefs.choose([(0, text, 3, 50)], [rest.look(1)], {}, 0.0, 8, False)
    own = rest._guess(text, 8)
    assert own.tokens == [3, 4, 900, 5] and (tokens, parents) == ([3, 4], [-1, 0])


def test_other_tokenizers_are_refused(tmp_path, tiny_llm, random_llm, tokenizer):
    class Other:
        def get_vocab(self):
            return tokenizer.get_vocab() | {"the": 0}

    right = str(write([[1]], tmp_path / "r", 8192, fingerprint(tokenizer), "tiny").path)
    other = str(write([[1]], tmp_path / "o", 8192, fingerprint(Other()), "other").path)
    small = str(write([[1]], tmp_path / "s", 128).path)
    for llm, fits, unfit, why in (
        (
            tiny_llm,
            right,
            other,
            r"was built for other with another tokenizer \(8192 tokens, \w{12}; this model's: 8192",
        ),
        (random_llm, small, right, "was built for tiny with 8192 token ids, and this model has 128"),
        (tiny_llm, right, small, "with 128 token ids, and this model has 8192"),
    ):
        for within in ({}, {"method": "cascade", "view": "streaming:budget=64"}):
            for store, outcome in ((fits, nullcontext()), (unfit, pytest.raises(ConfigError, match=why))):
                rest: dict = {"method": "rest", "datastore": store}
                with outcome:
                    llm.speculative_config = {**within, "drafter": rest} if within else rest


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "needs a 'datastore'"),
        ({"datastore": "gone"}, "gone cannot be read"),
        ({"datastore": "", "max_token_span": 1}, "needs a 'datastore'"),
        ({"datastore": "x", "max_token_span": 1}, "at least 2"),
        ({"datastore": "x", "max_continuation": 0}, "at least 1"),
        ({"datastore": 3}, "must be str"),
    ],
)
def test_wrong_options_are_known_before_anything_loads(options, why):
    with pytest.raises(ConfigError, match=why):
        LLM("no/model", speculative_config={"method": "rest", **options})


# --- drafting ---------------------------------------------------------------------------------------------------------

ROWS = [[1, 2, 3], [1, 2], [1, 4, 5], [6, 2, 3], [6]]


def test_chain_and_tree():
    assert follow(ROWS, 9).tokens == [1, 2, 3] and follow(ROWS, 2).tokens == [1, 2] and follow(ROWS, 9).is_chain
    assert len(follow([], 9)) == len(follow(ROWS, 0)) == len(grow([], 9)) == 0
    tree = grow(ROWS, 9)
    assert sorted(map(tuple, ([tree.tokens[i] for i in tree.path_to(n)] for n in range(len(tree))))) == sorted(
        {tuple(row[:n]) for row in ROWS for n in range(1, len(row) + 1)}
    )
    assert (grow(ROWS, 4).tokens, grow(ROWS, 4).parents) == ([1, 6, 2, 4], [-1, -1, 0, 0])


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), max_size=20), st.integers(0, 12))
def test_tree_is_the_most_frequent_beginnings(rows, k):
    tree = grow(rows, k)
    counts = Counter(tuple(row[:n]) for row in rows for n in range(1, len(row) + 1))
    nodes = [tuple(tree.tokens[i] for i in tree.path_to(n)) for n in range(len(tree))]
    assert len(nodes) == len(set(nodes)) == min(k, len(counts))
    assert sorted((counts[node] for node in nodes), reverse=True) == sorted(counts.values(), reverse=True)[:k]


def test_propose(tmp_path):
    path = write([[1, 2, 3, 4, 5], [1, 2, 3, 6]], tmp_path / "s", vocab=9).path
    seqs = [Sequence(tokens, SamplingParams(), 0) for tokens in ([1, 2, 3, 4], [0, 2], [2], [1, 2])]
    assert [d.tokens for d in Rest(datastore=str(path)).propose(seqs, 2)] == [[5], [], [], [3, 4]]
    assert [d.tokens for d in Rest(datastore=str(path), max_continuation=1).propose(seqs, 9)] == [[5], [], [], [3]]
    tree = Rest(datastore=str(path), tree=True).propose(seqs, 9)[3]
    assert (tree.tokens, tree.parents) == ([3, 4, 6, 5], [-1, 0, 0, 1])
    assert not any(map(len, Rest(datastore=str(path)).propose(seqs, 0)))


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_same_tokens_fewer_forwards(tmp_path, tiny_llm, tokenizer, tree, temperature):
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=60)
    prompts = [STORY, "Once upon a time", "She"]
    plain = tiny_llm.generate(prompts, params)
    (tmp_path / "t.txt").write_text("\n".join(o.prompt + o.text for o in plain))
    store = build([tmp_path / "t.txt"], tokenizer, tmp_path / "s")
    tiny_llm.speculative_config = {"method": "rest", "datastore": str(store.path), "tree": tree}
    for output, expected in zip(tiny_llm.generate(prompts, params), plain, strict=True):
        assert output.token_ids == expected.token_ids
        assert output.metrics["speculative_decoding"]["mean_acceptance_length"] > 1.5
        if not tree:
            assert output.metrics["exactness"] == expected.metrics["exactness"]


# --- the command line -------------------------------------------------------------------------------------------------


def test_cli(run, tmp_path):
    text, store = tmp_path / "t.txt", str(tmp_path / "[s]")
    text.write_text(STORY)
    code, out, _ = run("datastore", "build", store, str(text), "--model", "tiny")
    assert code == 0 and "1 documents" in out and f"rest:datastore={store}" in out
    code, out, _ = run("datastore", "info", store, "--model", "tiny")
    assert code == 0 and all(word in out for word in ("documents", "tokens", "bytes", "8192", "fits"))
    flags = ["generate", STORY[:40], "--max-tokens", "20", "--compare", "--speculate", f"rest:datastore={store}"]
    code, out, err = run(*flags)
    assert code == 0 and "identical" in out + err


def test_cli_errors(run, tmp_path, make_checkpoint, capsys):
    store = str(write([[1]], tmp_path / "s", 77).path)
    bare = str(make_checkpoint())
    capsys.readouterr()  # who makes it first is told how far it is
    for args, why in (
        (["info", str(tmp_path / "gone")], "cannot be read"),
        (["info", store, "--model", "tiny"], "77 token ids"),
        (["build", store, str(tmp_path / "gone")], "no file or folder"),
        (["build", store, store, "--model", bare], "no tokenizer"),
        (["build", store, store, "--model", "./gone"], "no model at"),
    ):
        code, out, err = run("datastore", *args)
        assert (code, out) == (2, "") and why in err and err.startswith("outrider: ") and err.count("\n") == 1
