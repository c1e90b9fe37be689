"""The command line: what it prints, and that every mistake is one line and exit code 2."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter

import pytest

from outrider.llm import LLM

PROMPT = "Once upon a time"


def test_generate_streams_the_text_of_generate(run):
    code, out, err = run("generate", PROMPT, "--max-tokens", "20", "--speculate", "ngram:k=4")
    text = LLM("tiny").generate(PROMPT, max_tokens=20, temperature=0)[0].text
    assert code == 0 and out == PROMPT + text + "\n"
    assert "20 tokens" in err and "seed" in err


def test_json_is_one_replayable_object(run):
    flags = ["generate", PROMPT, "--json", "--max-tokens", "12", "--ignore-eos", "--temperature", "0.9"]
    flags += ["--logprobs", "2"]
    _, out, _ = run(*flags, "--speculate", "none")
    first = json.loads(out)
    assert {"text", "token_ids", "finish_reason", "seed", "metrics", "logprobs"} == set(first)
    assert first["metrics"]["speculative_decoding"]["num_spec_steps"] == 12
    draft = ["--speculative-config", '{"model": "tiny-draft", "num_speculative_tokens": 3}']
    second = json.loads(run(*flags, "--seed", str(first["seed"]), *draft)[1])
    assert second["token_ids"] == first["token_ids"]


def test_several_prompts_and_outputs(run):
    _, out, _ = run(
        "generate", PROMPT, "The dog", "--json", "--max-tokens", "3", "--n", "2", "--temperature", "1", "--seed", "5"
    )
    assert [json.loads(line)["seed"] for line in out.splitlines()] == [5, 6, 5, 6]


def test_compare_says_identical(run):
    flags = ["generate", PROMPT, "--compare", "--max-tokens", "24", "--temperature", "0.8"]
    _, out, _ = run(*flags, "--speculate", "draft_model:model=tiny-draft,k=3")
    assert "identical: yes" in out and "ratio:" in out
    result = json.loads(run(*flags, "--speculate", "ngram", "--json")[1])
    assert result["identical"] is True and result["ratio"] > 0
    assert result["plain"][0]["token_ids"] == result["speculative"][0]["token_ids"]
    short = ["generate", PROMPT, "--compare", "--max-tokens", "1"]  # all comes with the first forward: no rate
    assert json.loads(run(*short, "--json")[1])["ratio"] is None and "ratio: -" in run(*short)[1]


def test_what_came_with_one_forward_has_no_rate(run):
    out, err = run("generate", PROMPT, "--max-tokens", "1")[1:]
    assert "1 token · any seed" in out + err or "1 token · seed" in out + err
    assert "0 tokens/s" not in out + err and "2 tokens · " in "".join(run("generate", PROMPT, "--max-tokens", "2")[1:])


def test_info_knows_what_may_draft(run):
    out = run("info", "--model", "tiny", "--json")[1]
    for what in ("tiny-draft or a smaller model", "tiny-medusa or heads", "outrider datastore build"):
        assert what in out


def test_prompt_from_file_and_stdin(run, tmp_path, monkeypatch):
    path, prompt = tmp_path / "prompt.txt", PROMPT + "\r\nOnce more\r"
    expected = run("generate", prompt, "--json", "--max-tokens", "5")[1]
    for mark in "", "\ufeff":  # of the byte order
        path.write_bytes((mark + prompt).encode())
        from_file = run("generate", "--prompt-file", str(path), "--json", "--max-tokens", "5")[1]
        assert json.loads(from_file)["token_ids"] == json.loads(expected)["token_ids"]


def test_standard_input_is_utf8_wherever_one_is(run, monkeypatch):
    asked = ["generate", "--json", "--max-tokens", "5", "--seed", "1"]
    expected = json.loads(run(*asked, "h\xe9")[1])["token_ids"]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("\ufeffh\xe9".encode()), "ascii"))
    assert json.loads(run(*asked)[1])["token_ids"] == expected


def test_standard_input_that_was_read_is_let_be(run, monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(b"one\ntwo"), "ascii")
    stream.readline()
    monkeypatch.setattr("sys.stdin", stream)
    assert run("generate", "--max-tokens", "1")[0] == 0


def test_structured_outputs(run, tmp_path):
    schema = '{"type": "object", "properties": {"a": {"enum": [17]}}, "required": ["a"]}'
    (tmp_path / "schema.json").write_text(schema, "utf-8-sig")
    flags = ["generate", PROMPT, "--json", "--max-tokens", "20", "--speculate", "ngram"]
    for asked, text in (
        (["--choice", "Paris", "--choice", "Parma"], r"Par(is|ma)"),
        (["--regex", "[0-9]{3}x"], r"[0-9]{3}x"),
        (["--grammar", 'start: "a" "b"'], "ab"),
        (["--json-schema", str(tmp_path / "schema.json"), "--compact", "--no-additional-properties"], r'\{"a":17\}'),
        (["--json-schema", '{"const": 5}'], "5"),
    ):
        code, out, _ = run(*flags, *asked)
        assert code == 0 and re.fullmatch(text, json.loads(out)["text"]), asked
    for wrong in (["--regex", "(a"], ["--json-schema", "{"], ["--choice", "a", "--regex", "b"], ["--compact"]):
        assert run(*flags, *wrong)[0] != 0, wrong


def test_info(run):
    _, out, _ = run("info")
    assert "method ngram" in out and "LlamaForCausalLM" in out
    _, out, _ = run("info", "--model", "tiny")
    assert "6 layers" in out and "exactness" in out


@pytest.mark.parametrize("columns", ["20", "1"])
def test_info_is_whole_in_narrow_terminals(run, monkeypatch, columns):
    whole = run("info")[1]
    monkeypatch.setenv("COLUMNS", columns)
    assert Counter("".join(run("info")[1].split())) == Counter("".join(whole.split()))


def test_chat_conversation(run, monkeypatch):
    lines = [
        "Tell me a story.",
        "/set temperature 0",
        "/set stop END",
        "/set",
        "/retry",
        "/set speculate ngram:k=2",
        "Go on.",
        "/nonsense",
        "/set foo 1",
        "/set top_p 7",
        "/set speculate nope",
        "/system Be brief.",
        "/retry",
        "/help",
        "/quit",
    ]
    feed = iter(lines)
    monkeypatch.setattr("builtins.input", lambda prompt="": next(feed))
    code, out, _ = run("chat", "--model", "tiny", "--max-tokens", "8", "--seed", "1")
    assert code == 0
    for said in (
        "unknown command /nonsense",
        "not 'foo'",
        "top_p must be",
        "'nope' is unknown",
        "nothing to ask again",
        "/reset",
    ):
        assert said in out
    assert out.count("tokens/s") == 3  # three answers


def test_ctrl_c_stops_the_answer_not_the_chat(run, monkeypatch):
    feed = iter(["Tell me a story.", "/quit"])
    monkeypatch.setattr("builtins.input", lambda prompt="": next(feed))
    real, seen = LLM.stream, []

    def interrupted(self, *args, **kwargs):
        events = real(self, *args, **kwargs)

        def some():
            try:
                yield next(events)
                raise KeyboardInterrupt
            finally:
                events.close()
                seen.append((self.runner.slots, self.runner.kv.tables))

        return some()

    monkeypatch.setattr(LLM, "stream", interrupted)
    code, out, _ = run("chat", "--model", "tiny", "--max-tokens", "50", "--seed", "1")
    assert code == 0 and "(stopped)" in out and "1 token " in out and "tokens/s" in out
    assert seen == [({}, {})]  # the stopped request gave its memory back


BAD = {
    "missing folder": ["--model", "/nope"],
    "unknown method": ["--speculate", "foo"],
    "unknown key": ["--speculate", "ngram:kk=3"],
    "wrong type": ["--speculate", "ngram:k=x"],
    "no equals sign": ["--speculate", "ngram:5"],
    "draft without model": ["--speculate", "draft_model"],
    "broken JSON": ["--speculative-config", "{x"],
    "JSON but no object": ["--speculative-config", "[1]"],
    "unknown JSON key": ["--speculative-config", '{"method": "ngram", "gamma": 3}'],
    "both forms": ["--speculate", "ngram", "--speculative-config", "{}"],
    "acceptance method": ["--speculative-config", '{"method": "ngram", "acceptance_method": "hope"}'],
    "negative temperature": ["--temperature", "-1"],
    "temperature that is none": ["--temperature", "nan"],
    "top_p of zero": ["--top-p", "0"],
    "no tokens": ["--max-tokens", "0"],
    "contradiction": ["--min-tokens", "9", "--max-tokens", "3"],
    "bias that is none": ["--logit-bias", '{"a": 1}'],
    "bias given twice": ["--logit-bias", '{"1": 1, "01": 2}'],
    "bias beyond the vocabulary": ["--logit-bias", '{"999999": 1}'],
    "empty stop": ["--stop", ""],
    "wrong dtype": ["--dtype", "int3"],
    "wrong device": ["--device", "tpu"],
    "over the context": ["--max-tokens", "200000"],
    "context of zero": ["--max-model-len", "0"],
    "compare without a method": ["--compare", "--speculate", "none"],
    "unknown flag": ["--bogus"],
    "not a number": ["--top-k", "many"],
}


@pytest.mark.parametrize("flags", BAD.values(), ids=BAD)
def test_mistakes_are_one_line_and_exit_code_2(run, flags):
    code, out, err = run("generate", "hi", *flags)
    assert code == 2 and out == "" and "Traceback" not in err
    if err.startswith("outrider: "):  # the rest are typer's own usage messages
        assert err.count("\n") == 1 and len(err) > 20


def test_what_lies_at_a_path_is_told(run, tmp_path):
    """A folder, a pipe, broken JSON where a file belongs: what it is, and nothing waits for who writes to a pipe."""
    folder, pipe, broken = tmp_path / "x.gguf", tmp_path / "pipe", tmp_path / "broken.json"
    folder.mkdir()
    os.mkfifo(pipe)
    broken.write_text('{"a":')
    for flags, told in (
        (["--model", str(folder)], "x.gguf is a folder with no config.json"),
        (["--model", str(pipe)], "is a pipe, socket or device"),
        (["--speculate", f"rest:datastore={pipe}"], "cannot be read: it is no file"),
        (["--json-schema", str(broken)], "broken.json' is not JSON"),
        (["--json-schema", "nowhere.json"], "'nowhere.json' is neither a file nor a JSON object"),
        (["--structural-tag", "{}"], "structural_tag lacks format"),
    ):
        code, out, err = run("generate", "hi", *flags)
        assert code == 2 and out == "" and told in err and err.count("\n") == 1, err


def test_empty_prompt(run):
    assert run("generate", "")[0] == 2


def test_closed_streams():
    """As under a shell's `<&- >&-`: what is said goes nowhere, and nothing else goes wrong."""
    for closed, code in (("<&- >&-", 0), (">&- 2>&-", 0), ("<&- 2>&-", 0)):
        command = f'exec "$0" -m outrider generate hi --max-tokens 2 {closed}'
        done = subprocess.run(["sh", "-c", command, sys.executable], capture_output=True, text=True)
        assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr


def test_a_world_that_is_none():
    environment = {**os.environ, "WORLD_SIZE": "x"}
    command = [sys.executable, "-m", "outrider", "generate", "hi", "--max-tokens", "1"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 2 and "WORLD_SIZE" in done.stderr and done.stderr.count("\n") == 1


def test_interrupt_while_it_is_imported():
    script = """
import sys
class Press:
    def find_spec(self, name, *_):
        if name == "outrider.cli":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Press())
from outrider.__main__ import run
run()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 130 and done.stderr == ""


def test_interrupt_leaves_quietly():
    """Ctrl-C while generating ends the command without a traceback."""
    command = [sys.executable, "-m", "outrider", "generate", PROMPT, "--max-tokens", "100000", "--ignore-eos"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests in a shell's background ignore it
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(len(PROMPT) + 20)  # text is coming
    for _ in range(20):  # the interpreter drops an interrupt that falls into a destructor: press again, as one would
        process.send_signal(signal.SIGINT)
        try:
            _, err = process.communicate(timeout=10)
            break
        except subprocess.TimeoutExpired:
            continue
    assert process.returncode == 130 and "Traceback" not in err
