"""Outrider: exact speculative decoding. Same request, same seed, same tokens, with speculation on or off."""

import os
from importlib import import_module
from importlib.util import find_spec

# Threads that wait should soon sleep. By default they spin for milliseconds and, on a machine that others use, burn
# the time slice of the very thread they wait for: 50-100x slower (docs/LOG.md). Read when torch is first imported.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

__all__ = [
    "LLM",
    "AsyncLLM",
    "Draft",
    "Drafter",
    "GenerationOutput",
    "SamplingParams",
    "SpeculativeConfig",
    "StructuredOutputsParams",
]
__version__ = "0.1.0"

_HOMES = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "Draft": "draft",
    "Drafter": "speculate",
    "GenerationOutput": "outputs",
    "SamplingParams": "config",
    "SpeculativeConfig": "config",
    "StructuredOutputsParams": "config",
}


def __getattr__(name: str) -> object:
    """The public names and the submodules (`outrider.hf`), imported at first use: `outrider --help` needs no torch.

    Type checkers read __init__.pyi, which says the same.
    """
    home = f"{__name__}.{_HOMES.get(name, name)}"
    if name.startswith("_") or not find_spec(home):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(home)
    except AttributeError as error:  # which would be taken for ours
        raise ImportError(f"{home} cannot be imported: {error}") from error
    return getattr(module, name) if name in _HOMES else module


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
