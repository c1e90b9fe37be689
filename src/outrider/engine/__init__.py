"""The engine: requests in, tokens out."""

from outrider.engine.engine import Engine, Request
from outrider.engine.text import TextStream

__all__ = ["Engine", "Request", "TextStream"]
