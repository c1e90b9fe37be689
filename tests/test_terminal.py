"""What terminals, pipes and full devices get; what loads torch; the chat's line editor."""

from __future__ import annotations

import errno
import importlib
import io
import json
import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from rich.table import Table

import outrider
from outrider import drafters
from outrider.cli.output import as_line, new_console, put_json, tell, visible
from outrider.drafters import Option
from outrider.errors import ConfigError, OutOfMemory
from outrider.llm import LLM

PROMPT = "Once upon a time"
HOSTILE = "Once\x1b[31m\x9b5m\x07 upon\u202e a\u2067 time\x7f"


@pytest.fixture
def say(monkeypatch, run):
    """`say(*lines)`: a chat in which these are typed; its exit code, stdout and stderr."""

    def call(*lines: str, flags: tuple[str, ...] = ()) -> tuple[int, str, str]:
        feed = iter([*lines, "/quit"])
        monkeypatch.setattr("builtins.input", lambda prompt="": next(feed))
        return run("chat", "--max-tokens", "6", *flags)

    return call


def test_strings_are_no_markup():
    table = Table("[b]", title="[red]")
    table.add_row("runs/[test] [/INST] :smile:")
    console = new_console(file=io.StringIO())
    console.print(table)
    console.print("[/INST] runs/[test] :smile:")
    said = console.file.getvalue()
    assert all(
        text in said for text in ("[red]", " [b] ", " runs/[test] [/INST] :smile: ", "[/INST] runs/[test] :smile:\n")
    )


def python(code: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, timeout=120, **options)


def test_help_completion_and_mistakes_load_no_torch():
    """One process for all of them: a start costs seconds if they do."""
    code = """
import os, sys
import outrider
from outrider.cli import main

def run(*args):
    sys.argv = ["outrider", *args]
    try:
        main()
    except SystemExit:
        pass
    loaded = {"torch", "transformers", "matplotlib"} & set(sys.modules)
    assert not loaded, (args, loaded)

for command in "", "generate", "chat", "info", "bench", "bench long", "datastore build", "train medusa":
    run(*command.split(), "--help")
run("--version")
run("--show-completion", "bash")
run("generate", "hi", "--bogus")
run("generate", "hi", "--top-k", "many")
run("generate", "hi", "--top-p", "7")
run("generate", "hi", "--speculative-config", "{")
run("generate", "")
run("chat", "--temperature", "nan")
run("info", "--dtype", "float32")
os.environ.update(_OUTRIDER_COMPLETE="complete_bash", COMP_WORDS="outrider gen", COMP_CWORD="1")
run()
assert os.environ["GOMP_SPINCOUNT"] == "2000"
"""
    done = python(code, env={k: v for k, v in os.environ.items() if k != "GOMP_SPINCOUNT"})
    assert done.returncode == 0, done.stderr
    assert f"outrider {outrider.__version__}" in done.stdout and done.stdout.endswith("generate\n")


def test_the_public_face_hides_no_cause(monkeypatch):
    def broken(name):
        raise AttributeError("the kernels are old")

    monkeypatch.setattr(outrider, "import_module", broken)
    with pytest.raises(ImportError, match="the kernels are old"):
        outrider.__getattr__("LLM")


def test_the_public_face_is_lazy_and_whole():
    stub = (Path(outrider.__file__).with_name("__init__.pyi")).read_text()
    for name in outrider.__all__:
        assert getattr(outrider, name).__name__ == name and f"import {name} as {name}\n" in stub
    assert set(outrider.__all__) <= set(dir(outrider))
    with pytest.raises(AttributeError, match="nonsense"):
        outrider.nonsense  # noqa: B018
    done = python("import outrider; print(outrider.hf.accelerate, outrider.drafters.methods())")
    assert done.returncode == 0 and "accelerate" in done.stdout, done.stderr


@pytest.mark.parametrize("columns", ["60", "80", "200"])
@pytest.mark.parametrize("command", ["generate", "chat", "bench", "train medusa", "datastore build", "info"])
def test_help_is_never_cut(run, monkeypatch, command, columns):
    monkeypatch.setenv("COLUMNS", columns)
    code, out, _ = run(*command.split(), "--help")
    assert code == 0 and "…" not in out and max(map(len, out.splitlines())) <= min(int(columns), 120)
    if command == "generate":
        assert "--include-stop-str-in-output" in out and "--no-skip-special-tokens" in out and "--logprobs" in out
    if command == "chat":
        assert "--n " not in out and "--logprobs" not in out and "--max-tokens" in out


def test_what_steers_a_terminal_is_spelt_out_there_only(run, say, monkeypatch, tmp_path):
    flags = ["--max-tokens", "3", "--model", "tiny"]
    assert run("generate", HOSTILE, *flags)[1].startswith(HOSTILE)  # redirected, it is data
    code, out, err = run("generate", PROMPT, "--model", "/nope\x1b[31m\u202e")
    assert code == 2 and "\x1b" not in out + err and "\u202e" not in err
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal
    for shown in (
        run("generate", HOSTILE, *flags)[1],
        run("generate", HOSTILE, PROMPT, *flags)[1],
        run("generate", HOSTILE, "--chat", "--compare", "--speculate", "ngram", *flags)[1],
    ):
        assert r"Once\x1b[31m\x9b5m\x07 upon\u202e a\u2067 time\x7f" in shown
        assert not set("\x07\x9b\u202e\u2067\x7f") & set(shown)
    _, out, _ = say("/set stop \x1b]0;pwned\x07", "/set", "/nope\x9b", "/system \x1b[2J")
    assert not set("\x07\x9b") & set(out) and "\x1b]" not in out and "\x1b[2J" not in out
    assert r"\x1b]0;pwned\x07" in out


def test_a_hostile_model_writes_visible_text(run, say, monkeypatch):
    real = LLM.stream

    def hostile(self, *args, **kwargs):
        for event in real(self, *args, **kwargs):
            object.__setattr__(event, "text", "\x1b]0;x\x07\r\x9b")
            yield event

    monkeypatch.setattr(LLM, "stream", hostile)
    assert "\x1b]0;x\x07\r\x9b" in run("generate", PROMPT, "--max-tokens", "2")[1]
    monkeypatch.setenv("FORCE_COLOR", "1")
    for out in (run("generate", PROMPT, "--max-tokens", "2")[1], say("Hi")[1]):
        assert "\x1b]" not in out and "\x07" not in out and r"\x1b]0;x\x07\r\x9b" in out


def test_visible_keeps_what_is_harmless():
    text = "Zoë\t日本\nשלמ 👩‍👩‍👧"
    assert visible(text) == text
    assert visible("a\udcffb\x85") == r"a\udcffb\x85"
    assert as_line("a\n b\x1c c") == r"a b\x1c c" and len(as_line("x" * 5000)) < 1100


def test_json_is_itself_whatever_it_holds(capsys):
    data = {"text": HOSTILE + "\udc80 é"}
    put_json(data)
    out = capsys.readouterr().out
    assert json.loads(out) == data and not set("\x1b\x9b\u202e\x7f\udc80") & set(out) and "é" in out


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_json_is_json_in_every_encoding(monkeypatch, encoding):
    """With the errors that `main` sets."""
    out = io.TextIOWrapper(io.BytesIO(), encoding, errors="backslashreplace")
    monkeypatch.setattr(sys, "stdout", out)
    put_json({"text": "é 日 😀"})
    assert json.loads(out.buffer.getvalue()) == {"text": "é 日 😀"}


def test_text_on_stdout_all_else_on_stderr(run):
    """Several prompts print what each alone prints."""
    flags = ["--max-tokens", "5"]
    alone = [run("generate", prompt, *flags)[1] for prompt in (PROMPT, "The dog")]
    _, out, err = run("generate", PROMPT, "The dog", *flags)
    assert out == "".join(alone) and err.count("tokens/s") == 2
    sampled = ["--temperature", "1", "--seed", "3"]
    _, out, err = run("generate", PROMPT, "--n", "2", *sampled, *flags)
    assert out.count(PROMPT) == 2 and "tokens" not in out and "seed 3" in err and "seed 4" in err
    assert out.startswith(run("generate", PROMPT, *sampled, *flags)[1])


def test_a_chat_prompt_is_the_message_and_then_the_answer(run):
    flags = ["--chat", "--max-tokens", "5"]
    answer = run("generate", "Hello", *flags)[1]
    _, out, _ = run("generate", "Hello", "Who?", *flags)
    assert out.startswith(f"Hello\n{answer}Who?\n") and "user" not in out.lower()
    _, out, _ = run("generate", "Hello", *flags, "--compare", "--speculate", "ngram")
    assert out.startswith(f"Hello\n{answer}")


def test_a_full_device_is_one_line():
    for command in (["--help"], ["generate", PROMPT, "--max-tokens", "3"]):
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [sys.executable, "-m", "outrider", *command],
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                timeout=120,
            )
        assert done.returncode == 2 and "No space left" in done.stderr
        assert done.stderr.rstrip().rpartition("\n")[2].startswith("outrider: ") and "Traceback" not in done.stderr


def test_a_bug_shows_where_it_is(run, monkeypatch):
    def broken(*args, **kwargs):
        raise KeyError("a bug")

    monkeypatch.setattr("outrider.llm.load", broken)
    with pytest.raises(KeyError):
        run("generate", PROMPT)


BEFORE_LOADING = {
    "top_p": ["--top-p", "0"],
    "n": ["--n", "1000000000", "--temperature", "1"],
    "logprobs": ["--json", "--logprobs", "1000000000"],
    "logprobs nobody sees": ["--logprobs", "3"],
    "logprobs and compare": ["--logprobs", "3", "--compare", "--speculate", "ngram"],
    "bias": ["--logit-bias", "foo"],
    "stop": ["--stop", ""],
    "seed": ["--seed", str(2**64)],
    "no model": ["--model", ""],
    "blank model": ["--model", " "],
    "a name too long": ["--model", "x" * 5000],
    "twice": ["--temperature", "0.5", "--temperature", "0.9"],
    "yes and no": ["--skip-special-tokens", "--no-skip-special-tokens"],
    "nested": ["--speculative-config", '{"a":' * 100_000],
    "nested lists": ["--speculative-config", "[" * 100_000],
    "a key twice": ["--speculative-config", '{"method": "ngram", "method": "suffix"}'],
    "an inner key twice": ["--speculative-config", '{"method": "cascade", "drafter": {"method": "a", "method": "b"}}'],
    "NaN": ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": NaN}'],
    "bias of NaN": ["--logit-bias", '{"1": NaN}'],
    "bias of text": ["--logit-bias", '{"1": "2"}'],
    "file": ["--prompt-file", "/nope"],
}


@pytest.mark.parametrize("flags", BEFORE_LOADING.values(), ids=BEFORE_LOADING)
def test_what_cannot_be_is_refused_before_anything_loads(run, monkeypatch, flags):
    monkeypatch.setattr("outrider.load.read_config", lambda path: pytest.fail("loads"))
    code, out, err = run("generate", PROMPT, *flags)
    assert code == 2 and out == "" and err.count("\n") == 1 and 20 < len(err) < 2000 and err.startswith("outrider: ")


def test_messages_speak_of_what_was_given(run, say):
    assert "method" not in run("generate", PROMPT, "--logit-bias", "foo")[2]
    _, out, _ = say("/set temperature banana", "/set logit_bias foo", "/set n 3", "/set seed 1.5")
    assert "temperature must be" in out and "'banana'" in out and "/set logit_bias is not JSON" in out
    assert "'n'" in out and "seed must be" in out and '"method"' not in out


def test_info_says_what_runs_and_what_options_mean(run, monkeypatch):
    _, out, _ = run("info", "--json")
    facts = json.loads(out)
    (lookup,) = [o for o in facts["methods"]["ngram"]["options"] if o["name"] == "prompt_lookup_max"]
    assert lookup == {"name": "prompt_lookup_max", "type": "int", "default": 4, "help": lookup["help"]}
    for method in drafters.methods():
        assert all(option.help for option in drafters.describe(method)), method
    assert "prompt_lookup_max (int, default 4): longest" in " ".join(run("info")[1].split())
    facts = json.loads(run("info", "--model", "tiny", "--json")[1])
    assert facts["exactness"] in ("bitwise", "law")
    assert facts["family"].startswith("Llama") and "norm before attention" in facts["switches"]
    assert facts["format"] == "safetensors" and facts["context"] == 131072 and facts["bytes_per_forward"] > 2**20
    assert facts["drafters"]["draft_model"].startswith("tiny-draft or") and "tiny-medusa" in facts["drafters"]["medusa"]
    assert "ngram" in facts["drafters"]["without more"] and "rest" not in facts["drafters"]["without more"]
    from outrider.ops import native

    if native.active != "reference":
        assert native.active in facts["attention"]
        monkeypatch.setattr(native, "active", "reference")
        assert "scaled_dot_product_attention" in json.loads(run("info", "--model", "tiny", "--json")[1])["attention"]


@pytest.mark.parametrize("code", ["raise ImportError('gone\\x1b[31m')", "raise SystemExit(3)", "thing = int"])
def test_a_broken_drafter_of_others_is_listed_as_broken(run, monkeypatch, tmp_path, code):
    (tmp_path / "foreign.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    point = EntryPoint("mine", "foreign:thing", "outrider.drafters")
    monkeypatch.setattr(drafters, "entry_points", lambda group, **query: [point])
    code, out, _ = run("info")
    sys.modules.pop("foreign", None)
    assert code == 0 and "method mine" in out and "broken: " in out and "method ngram" in out and "\x1b" not in out


def test_options_of_others_need_no_help(monkeypatch):
    """The drafter of the README: fields are options, and only that."""
    from dataclasses import dataclass

    @dataclass
    class Repeat(outrider.Drafter):
        num_speculative_tokens: int = 2
        word: str = "x"

    monkeypatch.setattr(drafters, "find", lambda method: Repeat)
    assert drafters.describe("repeat")[1] == Option("word", "str", "x", "")


WITHOUT = """
import sys

sys.modules["outrider.ops._kernels"] = None
from outrider import LLM
from outrider.cli.info import kernels

for _ in range(2):
    LLM(sys.argv[1], device="cpu").generate([[1, 2]], max_tokens=2)
print(kernels())
"""


def test_without_kernels_it_says_so_once(make_checkpoint):
    """An installation without a compiler works, and says what it lacks: once, where a model is loaded."""
    command = [sys.executable, "-c", WITHOUT, str(make_checkpoint())]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr.count("kernels are missing; install a C++ compiler") == 1 == done.stderr.count("\n")
    assert "PyTorch: the compiled kernels are missing; install" in done.stdout


def test_why_there_are_no_kernels(monkeypatch):
    from outrider.ops import native

    assert native.kernels is None or not native.lacking()
    monkeypatch.setattr(native, "active", "reference")
    monkeypatch.setattr(native, "wrong", ["avx2", "portable"])
    monkeypatch.setattr(native, "kernels", object())
    assert "wrong here: avx2, portable" in native.lacking()
    monkeypatch.setattr(native, "kernels", None)
    monkeypatch.setattr(native, "unloaded", "do not load (no GLIBCXX)")
    assert "kernels do not load (no GLIBCXX); install" in native.lacking()


def test_chat_says_what_it_does(say):
    code, out, err = say(
        "  /help",
        "/set temperature 0",
        "/set speculate ngram:k=3",
        "/set",
        " /reset ",
        "Hello",
        "/set seed 5",
        "  ",
        "> hm",
    )
    assert code == 0 and err == ""
    assert "Ctrl-C stops" in out and "temperature = 0" in out and "speculate = ngram:k=3" in out and "forgotten" in out
    table = {line.split()[0]: line.split()[1] for line in out.splitlines() if len(line.split()) == 2}
    assert table["speculate"] == "ngram:k=3" and table["temperature"] == "0" and table["seed"] == "-"
    status = [line for line in out.splitlines() if "tokens/s" in line]
    assert len(status) == 2 and all("any seed" in line for line in status)
    assert not any(line.startswith("> /") for line in out.splitlines())  # nobody sees a mark that is piped


def test_chat_keeps_its_system_message(say, monkeypatch):
    """Until another is given, or none."""
    real, asked = LLM.stream, []

    def stream(self, messages, **kwargs):
        asked.append([message["content"] for message in messages])
        return real(self, messages, **kwargs)

    monkeypatch.setattr(LLM, "stream", stream)
    lines = ["One", "/reset", "Two", "/system Short.", "Three", "/reset", "Four", "/system", "/reset", "Five"]
    out = say(*lines, flags=("--system", "Rhyme."))[1]
    assert asked == [["Rhyme.", "One"], ["Rhyme.", "Two"], ["Short.", "Three"], ["Short.", "Four"], ["Five"]]
    assert out.count("forgotten, but for the system message") == 2 and out.count("forgotten\n") == 1


def test_chat_stops_at_several_strings(say):
    """A JSON list or string is one; everything else is the text itself."""
    lines = [r'/set stop ["\n", "b c"]', '/set stop "END."', "/set stop [END]", "/set stop 7", "/set stop [1]"]
    said = [line for line in say(*lines)[1].splitlines() if "stop" in line]
    assert said[:4] == [r"stop = ['\n', 'b c']", "stop = END.", "stop = [END]", "stop = 7"]
    assert "stop must be" in said[4], said


def test_chat_status_fits_a_terminal(say, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    seed = str(2**64 - 1)  # the longest there is
    out = say("Hello", flags=("--speculate", "ngram", "--seed", seed))[1]
    (status,) = [line for line in out.splitlines() if "tokens/s" in line]
    assert seed in status and len(visible(status).replace(r"\x1b[2m", "").replace(r"\x1b[0m", "")) <= 60
    assert "a draft guessed it" in out and "\x1b[4m" in out  # the legend, underlined without a colour


def test_chat_goes_on_behind_an_answer_that_failed(say, monkeypatch):
    """What was said stays, on a line of its own, so that question and answer go on taking turns."""
    real, asked = LLM.stream, []

    def failing(self, messages, **kwargs):
        asked.append([message["role"] for message in messages])
        events = real(self, messages, **kwargs)

        def some():
            yield next(events)
            raise OutOfMemory("no room is left")

        return some()

    monkeypatch.setattr(LLM, "stream", failing)
    out = say("Hello", "Again", "/retry")[1]
    assert asked == [["user"], *[["user", "assistant", "user"]] * 2] and out.count("\nno room is left\n") == 3


def test_chat_keeps_what_cannot_be_asked_again(say, monkeypatch):
    """A retry that is refused costs neither question nor answer."""
    real, asked = LLM.stream, []

    def stream(self, messages, **kwargs):
        asked.append([message["role"] for message in messages])
        if len(asked) == 2:
            raise ConfigError("not now")
        return real(self, messages, **kwargs)

    monkeypatch.setattr(LLM, "stream", stream)
    out = say("Hello", "/retry", "Again")[1]
    assert asked == [["user"], ["user"], ["user", "assistant", "user"]] and "not now" in out


def test_chat_remembers_lines_and_completes_commands(monkeypatch, tmp_path):
    from prompt_toolkit.application import create_app_session
    from prompt_toolkit.input import create_pipe_input
    from prompt_toolkit.output import DummyOutput

    chat = importlib.import_module("outrider.cli.chat")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    history = tmp_path / "state" / "outrider" / "history"

    def typed(keys: str) -> str:
        with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
            pipe.send_text(keys)
            return chat._reader(["/reset", "/help"])("> ")

    assert typed("Hello there\r") == "Hello there"
    assert history.stat().st_mode & 0o777 == 0o600 and "Hello there" in history.read_text()
    assert typed("\x1b[A\r") == "Hello there"  # the arrow that goes back, in another run
    assert typed("/he\t\r") == "/help"
    assert typed("a\x1b[31m red\r") == "a red"  # a colour that was pasted, and no mouse
    history.unlink()
    history.mkdir()
    assert typed("Still here\r") == "Still here"  # no file for it: no matter


def test_chat_of_what_is_no_text(run, monkeypatch):
    def undecodable(prompt=""):
        b"\xff".decode()

    monkeypatch.setattr("builtins.input", undecodable)
    code, _, err = run("chat")
    assert code == 2 and "not text" in err


@pytest.mark.parametrize(
    "raised",
    [
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: 19 TB"),
        RuntimeError("unable to mmap 25 bytes from file <model.safetensors>: Cannot allocate memory (12)"),
    ],
)
def test_memory_that_runs_out_is_one_line(run, monkeypatch, raised):
    def load(*_, **__):
        raise raised

    monkeypatch.setattr("outrider.LLM", load)
    code, out, err = run("generate", PROMPT)
    assert (code, out) == (2, "") and err == "outrider: memory ran out; try a smaller model, context or batch\n"


def test_errors_of_ours_are_no_lack_of_memory(run, monkeypatch):
    def load(*_, **__):
        raise RuntimeError("a bug")

    monkeypatch.setattr("outrider.LLM", load)
    with pytest.raises(RuntimeError, match="a bug"):
        run("generate", PROMPT)


def test_empty_input_is_refused_at_once(run, monkeypatch, tmp_path):
    monkeypatch.setattr("outrider.load.read_config", lambda path: pytest.fail("loads"))
    (tmp_path / "empty").write_text("")
    assert run("generate", "--prompt-file", str(tmp_path / "empty"))[0] == 2
    assert run("generate", PROMPT, "")[0] == 2
    with open(os.devnull) as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        assert run("generate")[0] == 2


def test_models_are_named(run):
    for command in (["chat"], ["info"], ["bench"], ["datastore", "build", "a", "b"]):
        code, _, err = run(*command, "--model", "")
        assert code == 2 and "--model is empty" in err
    with pytest.raises(ConfigError, match="empty"):
        importlib.import_module("outrider.cli.options").check_model("")


def test_what_is_told_is_lost_on_a_full_device(monkeypatch):
    """A service is not to end for a line that nobody can read."""

    class Full(io.StringIO):
        def write(self, text):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stderr", Full())
    tell("served at ...")
