"""Files and folders that appear whole or not at all: they are written beside their place, and then take it.

So a full disk or a kill in the middle leaves what was there before, and a `.partial` that the next write replaces; a
folder of that name that is not ours is let be. Who writes holds a lock, which the system takes back from the dead.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from outrider.errors import CheckpointError, ConfigError, reason_of, told

OURS = ".outrider-partial"  # an empty file in a folder that is not whole


@contextmanager
def locked(path: Path, what: str | Path | None = None) -> Iterator[None]:
    """Lock a file or folder that is there against other runs. Raises ConfigError, naming `what`, if one has it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{what or path} is being written by another run; wait for it, or give another") from None
        except OSError:  # a file system without locks, or, as NFS, with none of what is open for reading
            pass
        yield
    finally:
        os.close(descriptor)


@contextmanager
def replacing(path: Path, beside: Path | None = None) -> Iterator[Path]:
    """The name to write a file to; when the block ends well, that file becomes `path`, with the mode the umask gives.

    `beside`: the folder to write in, of the same file system; default: the file's own. Raises ConfigError if it cannot
    be written.
    """
    partial = (beside or path.parent) / f"{path.name}.partial"
    if os.path.isdir(partial):  # unlike Path's, not startled by names that are too long
        raise ConfigError(f"{path} cannot be written: {partial} is in the way; move it, or give another name")
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path} cannot be written: it is there and is no file; give another name")
        partial.touch()
        with locked(partial, path):
            try:
                mode = partial.stat().st_mode  # safetensors makes files that only their owner can read
                yield partial
                partial.chmod(mode)
                partial.replace(path)
            finally:
                _forget(partial)
    except (OSError, SafetensorError) as error:
        raise _unwritten(path, error) from None
    except RuntimeError as error:
        if "inline_container" in str(error):  # torch.save says so that its writes fail
            raise _unwritten(path, error) from None
        raise


def append(path: Path, text: str) -> None:
    """Add to a file of UTF-8. Raises ConfigError if it cannot be written."""
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise _unwritten(path, error) from None


def write_text(path: Path, text: str) -> None:
    """Write a file of UTF-8, whole or not at all. Raises ConfigError if it cannot be written."""
    with replacing(path) as partial:
        partial.write_text(text, "utf-8")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """The folder to write into; when the block ends well, it becomes `path`, which must be new or empty.

    Raises ConfigError if it is neither, or cannot be written.
    """
    try:
        path = path.resolve()
    except (OSError, RuntimeError) as error:  # links that lead to each other
        raise ConfigError(f"{path} cannot be written: {told(error)}") from None
    try:
        _check_vacant(path)
        partial = path.with_name(f"{path.name}.partial")
        if partial.is_dir() and any(partial.iterdir()) and not (partial / OURS).exists():
            raise ConfigError(f"{path} cannot be written: {partial} is in the way; move it, or give another name")
        if partial.exists():  # a kill has left it
            with locked(partial, path):
                _forget(partial)
        partial.mkdir(parents=True)
        with locked(partial, path):
            try:
                (partial / OURS).touch()
                yield partial
                if path.exists():  # somebody may stand in it, or a disk be mounted there
                    _check_vacant(path)  # still
                    _fill(path, partial)
                else:
                    partial.replace(path)
                (path / OURS).unlink()
            finally:
                _forget(partial)
    except (OSError, SafetensorError) as error:
        raise _unwritten(path, error) from None


def _check_vacant(path: Path) -> None:
    if path.exists() and (not path.is_dir() or (any(path.iterdir()) and not (path / OURS).exists())):
        raise ConfigError(f"{path} already holds something: give a new or empty folder")


def _fill(path: Path, partial: Path) -> None:
    """Move a finished folder's content into one that is empty, or has what a kill in the middle of this left."""
    for item in path.iterdir():
        _forget(item)
    try:
        shutil.copy(partial / OURS, path)
        for item in partial.iterdir():
            if item.name != OURS:
                shutil.move(item, path)
    except OSError:
        for item in path.iterdir():
            _forget(item)
        raise


def make_folder(path: Path, what: str) -> None:
    """Make a folder to write to, unless it is there; `what` names it. Raises ConfigError if it cannot be one."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{what} {path} cannot be a folder: {reason_of(error)}; give one that can be written"
        ) from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"{what} {path} is a folder that cannot be written; give another one")


def check_regular(path: Path) -> None:
    """Raise CheckpointError for what is there and no file, as opening a pipe would wait for whoever writes to it; and
    for a file that cannot be opened, of which libraries say that it is missing, or damaged.
    """
    try:
        there = path.exists()
        if path.is_file():
            open(path, "rb").close()
    except OSError as error:
        shown = str(path) if len(str(path)) <= 200 else f"{str(path)[:200]}..."
        raise CheckpointError(f"{shown} cannot be read: {error.strerror}") from None
    if there and not path.is_file():
        kind = "a folder" if path.is_dir() else "a pipe, socket or device"
        raise CheckpointError(f"{path} is {kind}; it should be a file of the checkpoint")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object that a file holds. Raises CheckpointError."""
    check_regular(path)
    try:
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} should hold a JSON object")
    return data


def check_zip(path: Path) -> None:
    """Raise ValueError, or what zipfile raises, unless all in an archive have their checksums: torch.load asks not."""
    with zipfile.ZipFile(path) as archive:
        if bad := archive.testzip():
            raise ValueError(f"{bad} in it has another checksum")


def processor() -> str:
    """The name of this machine's CPU."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return platform.processor() or platform.machine()


def expand(path: str | Path) -> Path:
    """The path with `~` replaced. Raises ConfigError for the home of nobody, and a name that no file can have."""
    if "\0" in str(path):
        raise ConfigError(f"{str(path)!r}: no file can have this name")
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(f"{str(path)!r}: there is no such user; write the folder out") from None


def _unwritten(path: Path, error: Exception) -> ConfigError:
    reason = "the disk may be full" if isinstance(error, RuntimeError) else reason_of(error)
    return ConfigError(f"{path} cannot be written: {reason}")


def _forget(path: Path) -> None:
    with suppress(OSError):  # where nothing can be written, it is not there
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
