from outrider import hf as hf
from outrider.async_llm import AsyncLLM as AsyncLLM
from outrider.config import SamplingParams as SamplingParams
from outrider.config import SpeculativeConfig as SpeculativeConfig
from outrider.config import StructuredOutputsParams as StructuredOutputsParams
from outrider.draft import Draft as Draft
from outrider.llm import LLM as LLM
from outrider.outputs import GenerationOutput as GenerationOutput
from outrider.speculate import Drafter as Drafter

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
__version__: str
