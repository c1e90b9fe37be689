"""Outrider: exact speculative decoding. Same request, same seed, same tokens, with speculation on or off."""

from outrider.config import SamplingParams, SpeculativeConfig
from outrider.llm import LLM
from outrider.speculate import Drafter
from outrider.types import Draft, GenerationOutput

__all__ = ["LLM", "Draft", "Drafter", "GenerationOutput", "SamplingParams", "SpeculativeConfig"]
__version__ = "0.1.0"
