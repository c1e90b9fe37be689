"""Outrider: exact speculative decoding. Same request, same seed, same tokens, with speculation on or off."""

import os
from importlib import import_module
from importlib.util import find_spec

# Threads that wait should soon sleep. By default they spin for milliseconds and, on a machine that others use, burn
# the time slice of the very thread they wait for: 50-100x slower (docs/LOG.md). Read when torch is first imported.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

__all__ = ["LLM", "Draft", "Drafter", "GenerationOutput", "SamplingParams", "SpeculativeConfig"]
__version__ = "0.1.0"

_HOMES = {
    "LLM": "llm",
    "Draft": "draft",
    "Drafter": "speculate",
    "GenerationOutput": "outputs",
    "SamplingParams": "config",
    "SpeculativeConfig": "config",
}


def __getattr__(name: str) -> object:
    """The public names and the submodules (`outrider.hf`), imported at first use: `outrider --help` needs no torch.

    Type checkers read __init__.pyi, which says the same.
    """
    if name in _HOMES:
        found = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        return found
    if not name.startswith("_") and find_spec(f"{__name__}.{name}"):
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
