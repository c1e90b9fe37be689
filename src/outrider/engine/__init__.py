"""The engine: requests in, tokens out."""

from outrider.engine.engine import Engine, Request, free_memory
from outrider.engine.text import LONG, TextStream

__all__ = ["LONG", "Engine", "Request", "TextStream", "free_memory"]
