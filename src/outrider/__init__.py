"""Outrider: exact speculative decoding. Same request, same seed, same tokens, with speculation on or off."""

import os

# Threads that wait should soon sleep. By default they spin for milliseconds and, on a machine that others use, burn
# the time slice of the very thread they wait for: 50-100x slower (docs/LOG.md). Read when torch is first imported.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

from outrider.config import SamplingParams, SpeculativeConfig
from outrider.draft import Draft
from outrider.llm import LLM
from outrider.outputs import GenerationOutput
from outrider.speculate import Drafter

__all__ = ["LLM", "Draft", "Drafter", "GenerationOutput", "SamplingParams", "SpeculativeConfig"]
__version__ = "0.1.0"
