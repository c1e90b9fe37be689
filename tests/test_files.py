"""What is written appears whole or not at all, readable as the umask says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from outrider.errors import ConfigError
from outrider.files import expand, make_folder, new_folder, replacing, write_text


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_modes_are_the_umasks(tmp_path, umask):
    before = os.umask(umask)
    try:
        with replacing(tmp_path / "weights") as partial:
            save_file({"a": torch.zeros(3)}, partial)
        write_text(tmp_path / "text", "ö")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o666 & ~umask}


def test_what_was_there_stays_until_the_new_one_is_whole(tmp_path):
    path = tmp_path / "file"
    write_text(path, "old")
    for error in (OSError(28, "No space left on device"), KeyboardInterrupt()):
        with pytest.raises((ConfigError, KeyboardInterrupt)), replacing(path) as partial:
            partial.write_text("ne")
            raise error
        assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["file"]
    with pytest.raises(ValueError, match="a bug"), replacing(path):
        raise ValueError("a bug")  # is nobody's disk
    (tmp_path / "file.partial").write_text("of a run that was killed")
    write_text(path, "new")
    assert path.read_text() == "new" and [p.name for p in tmp_path.iterdir()] == ["file"]


WRITES = (
    "torch.save({'a': torch.zeros(99999)}, p)",
    "save_file({'a': torch.zeros(99999)}, p)",
    "p.write_bytes(b'x' * 9999)",
)


@pytest.mark.parametrize("write", WRITES)
def test_no_room(tmp_path, write):
    """Whatever writes, running out of room is a typed error and leaves nothing."""
    code = (
        "import resource, sys, torch; from pathlib import Path; from safetensors.torch import save_file\n"
        "from outrider.files import replacing; from outrider.errors import ConfigError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        f"try:\n    with replacing(Path(sys.argv[1])) as p: {write}\nexcept ConfigError as error: print(error)"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path / "x")], capture_output=True, text=True)
    assert ended.stdout.startswith(f"{tmp_path / 'x'} cannot be written: "), ended.stderr
    assert not any(tmp_path.iterdir())


def test_a_kill_in_the_middle(tmp_path):
    code = (
        "import os, signal, sys; from pathlib import Path; from outrider.files import new_folder, replacing\n"
        "with new_folder(Path(sys.argv[1], 'folder')) as folder, replacing(folder / 'file') as partial:\n"
        "    partial.write_text('half')\n    os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)])
    assert ended.returncode == -signal.SIGKILL and not (tmp_path / "folder").exists()
    with new_folder(tmp_path / "folder") as folder:
        (folder / "file").write_text("whole")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"] and os.listdir(tmp_path / "folder") == ["file"]


def test_what_is_not_ours_is_let_be(tmp_path):
    """A folder of the name that is written to meanwhile; an empty one that somebody stands in."""
    (tmp_path / "x.partial").mkdir()
    (tmp_path / "x.partial" / "note").touch()
    with pytest.raises(ConfigError, match="is in the way"), new_folder(tmp_path / "x"):
        pass
    with pytest.raises(ConfigError, match="is in the way"):
        write_text(tmp_path / "x", "text")
    assert [path.name for path in tmp_path.rglob("*")] == ["x.partial", "note"]
    (tmp_path / "here").mkdir()
    number = (tmp_path / "here").stat().st_ino
    with new_folder(tmp_path / "here") as folder:
        (folder / "inside").mkdir()
        (folder / "inside" / "file").write_text("whole")
    assert (tmp_path / "here").stat().st_ino == number and not (tmp_path / "here.partial").exists()
    assert [path.name for path in (tmp_path / "here").rglob("*")] == ["inside", "file"]
    (tmp_path / "late").mkdir()
    with pytest.raises(ConfigError, match="already holds something"), new_folder(tmp_path / "late"):
        (tmp_path / "late" / "note").touch()
    assert os.listdir(tmp_path / "late") == ["note"], "it came meanwhile"


@pytest.mark.parametrize("write", [replacing, new_folder])
def test_who_comes_second_is_refused(tmp_path, write):
    """The first one's half is not touched, and what it makes is whole; the dead refuse nobody."""
    with write(tmp_path / "x") as partial:
        file = partial / "file" if write is new_folder else partial
        file.write_text("first")
        with pytest.raises(ConfigError, match="x is being written by another run"), write(tmp_path / "x"):
            pass
        assert file.read_text() == "first"
    assert os.listdir(tmp_path) == ["x"]
    assert (tmp_path / "x" / "file" if write is new_folder else tmp_path / "x").read_text() == "first"


@pytest.mark.parametrize("after", [0, 1, 2, 3])
@pytest.mark.parametrize("ends", [os._exit, OSError])
def test_an_empty_folder_is_filled_or_not(tmp_path, after, ends):
    """An end while what is whole moves into it: the next write starts anew, and an error leaves it empty."""
    code = (
        "import os, shutil, sys; from pathlib import Path; from outrider.files import new_folder\n"
        "from outrider.errors import ConfigError\n"
        "true, count = shutil.move, iter(range(9))\n"
        "def move(*given):\n"
        f"    if next(count) == {after}:\n"
        f"        {'os._exit(7)' if ends is os._exit else 'raise OSError(28, chr(120))'}\n"
        "    return true(*given)\n"
        "shutil.move = move\n"
        "try:\n    with new_folder(Path(sys.argv[1])) as folder:\n"
        "        for name in 'abc':\n            (folder / name).write_text(name)\nexcept ConfigError: sys.exit(8)"
    )
    (tmp_path / "here").mkdir()
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path / "here")])
    assert ended.returncode == (0 if after == 3 else 7 if ends is os._exit else 8)
    if after < 3 and ends is not os._exit:
        assert not any((tmp_path / "here").iterdir())
    if after < 3:
        with new_folder(tmp_path / "here") as folder:
            (folder / "d").touch()
        assert os.listdir(tmp_path / "here") == ["d"] and os.listdir(tmp_path) == ["here"]


def test_places_that_cannot_be_written(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note").touch()
    with pytest.raises(ConfigError, match="already holds something"), new_folder(tmp_path / "full"):
        pass
    for place in (tmp_path, tmp_path / "gone" / "x", tmp_path / ("x" * 300), Path("/dev/null"), Path("/proc/x/y")):
        with pytest.raises(ConfigError, match="cannot be written"):
            write_text(place, "x")
    for place in (tmp_path / "full" / "note", tmp_path / "full" / "note" / "x", Path("/proc/x"), Path("a\0b")):
        with pytest.raises(ConfigError, match=r"--output .* cannot be a folder"):
            make_folder(place, "--output")
    with pytest.raises(ConfigError, match="no such user"):
        expand("~nobody-of-this-name/x")
    assert expand("~") == Path.home()
