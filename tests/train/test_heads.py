"""`outrider train medusa` where something goes wrong: what is left can be resumed, or begun anew, and says so."""

from __future__ import annotations

import itertools
import math
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from outrider.errors import CheckpointError, ConfigError
from outrider.train import medusa
from outrider.train.medusa import Settings, train

SMALL = Settings(
    model="tiny-draft", heads=2, windows=12, length=24, generated=0.0, steps=4, batch=2, dtype="float32", device="cpu"
)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "stories.txt"
    people = itertools.product(["Tom", "Lily", "Ben", "Mia"], ["dog", "cat", "ball", "car", "hat"])
    path.write_text("<|endoftext|>".join(f"Once upon a time {a} had a big red {b}. " * 4 for a, b in people))
    return [path]


@pytest.fixture
def begun(texts, tmp_path):
    """The folder of a run that was stopped behind step 2."""

    def stop(step, *_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(texts, tmp_path / "heads", SMALL, every=2, report=stop)
    return tmp_path / "heads"


def test_a_full_disk_at_any_write(texts, tmp_path, monkeypatch):
    """Windows, first state, later state, weights, config: after each, one of the two commands goes on to the end."""
    train(texts, tmp_path / "whole", SMALL, every=2)
    expected = load_file(tmp_path / "whole" / "model.safetensors")
    true, writes = medusa.replacing, itertools.count()
    for broken in range(4):
        folder, count = tmp_path / str(broken), itertools.count()

        def full(path, broken=broken, count=count, **beside):
            next(writes)
            if next(count) == broken:
                raise ConfigError(f"{path} cannot be written: No space left on device")
            return true(path, **beside)

        monkeypatch.setattr(medusa, "replacing", full)
        with pytest.raises(ConfigError, match="cannot be written"):
            train(texts, folder, SMALL, every=2)
        monkeypatch.setattr(medusa, "replacing", true)
        resumable = (folder / "checkpoint" / "state.pt").is_file()
        assert resumable == (broken >= 2) and (resumable or not any(folder.iterdir()))
        train(texts, folder, SMALL, every=2, resume=resumable)
        made = load_file(folder / "model.safetensors")
        assert all(torch.equal(made[name], tensor) for name, tensor in expected.items())
        assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert next(writes) > 8


def test_really_no_room(texts, tmp_path):
    """In a process whose files may have 200 kB: one line, exit code 2, and a folder that can be used again."""
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (200_000,) * 2)\n"
        "from outrider.cli import main; main()"
    )
    args = ["train", "medusa", str(tmp_path / "heads"), *map(str, texts), "--model", "tiny-draft", "--windows", "12",
            "--length", "24", "--generated", "0", "--steps", "2", "--batch", "2", "--own-projection"]  # fmt: skip
    ended = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True)
    assert ended.returncode == 2 and "cannot be written" in ended.stderr and ended.stderr.count("\n") == 1, ended.stderr
    assert not any((tmp_path / "heads").iterdir())


def test_modes(texts, tmp_path):
    train(texts, tmp_path / "heads", replace(SMALL, steps=1))
    assert len({path.stat().st_mode for path in (tmp_path / "heads").iterdir()}) == 1


def test_a_run_that_was_killed_before_its_first_checkpoint(texts, tmp_path):
    (tmp_path / "heads" / "checkpoint").mkdir(parents=True)
    (tmp_path / "heads" / "checkpoint" / "windows.safetensors").write_bytes(b"half")
    with pytest.raises(ConfigError, match="no checkpoint to resume"):
        train(texts, tmp_path / "heads", SMALL, resume=True)
    assert train(texts, tmp_path / "heads", replace(SMALL, steps=1))
    (tmp_path / "mine" / "checkpoint").mkdir(parents=True)
    (tmp_path / "mine" / "note").touch()
    with pytest.raises(ConfigError, match="already holds something"):
        train(texts, tmp_path / "mine", SMALL)
    note = tmp_path / "other" / "checkpoint" / "note"
    note.parent.mkdir(parents=True)
    note.touch()
    with pytest.raises(ConfigError, match="already holds something"):  # it is no checkpoint of ours
        train(texts, tmp_path / "other", SMALL)
    assert note.exists()


@pytest.mark.parametrize("name", ["state.pt", "windows.safetensors"])
def test_damaged_checkpoints(begun, name):
    """Empty, cut, of something else, missing: a typed error, and nothing is thrown away. Flipped: no other error."""
    path = begun / "checkpoint" / name
    good = path.read_bytes()
    places = [0, 1, 8, 100, len(good) // 3, len(good) // 2, len(good) - 30, len(good) - 1]
    flipped = [good[:at] + bytes([good[at] ^ 0xFF]) + good[at + 1 :] for at in places]
    for bad in (b"", b"hello", good[:10], good[: len(good) // 2], good[:-1], *flipped):
        path.write_bytes(bad)
        copy = shutil.copytree(begun, begun.with_name("copy"), dirs_exist_ok=True)
        try:
            train([], copy, SMALL, resume=True)
            assert name == "state.pt" and bad in flipped, "damaged files were believed"
        except CheckpointError as error:
            assert "is damaged" in str(error) and "\n" not in str(error)
            assert (copy / "checkpoint" / name).read_bytes() == bad
    path.unlink()
    with pytest.raises((CheckpointError, ConfigError)):
        train([], begun, SMALL, resume=True)


@pytest.mark.parametrize("state", [[], {}, {"settings": 5}, {"settings": {}, "step": "x"}, "text"])
def test_states_of_something_else(begun, state):
    torch.save(state, begun / "checkpoint" / "state.pt")
    with pytest.raises(CheckpointError, match="is damaged"):
        train([], begun, SMALL, resume=True)


def test_heads_that_are_no_numbers(begun):
    """A state with NaN in it: the first loss says so."""
    path = begun / "checkpoint" / "state.pt"
    state = torch.load(path, weights_only=True)
    state["heads"]["0.0.linear.bias"][0] = math.nan
    torch.save(state, path)
    with pytest.raises(CheckpointError, match="loss is nan at step 2"):
        train([], begun, SMALL, resume=True)
    assert not (begun / "model.safetensors").exists() and path.is_file()


@pytest.mark.parametrize(
    "wrong", [{"layers": 10**9}, {"batch": 10**12}, {"seed": 2**64}, {"seed": -1}, {"heads": 10**9}, {"lr": math.nan}]
)
def test_settings_out_of_bounds(wrong):
    with pytest.raises(ConfigError):
        replace(SMALL, **wrong)


def test_an_output_that_cannot_be_written(texts, tmp_path):
    (tmp_path / "file").touch()
    for output in (tmp_path / "file", tmp_path / "file" / "x"):
        with pytest.raises(ConfigError):
            train(texts, output, SMALL)
