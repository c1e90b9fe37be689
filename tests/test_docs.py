"""The documentation's own code runs."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

from outrider import LLM
from outrider.config import SpeculativeConfig
from outrider.drafters import create

ROOT = Path(__file__).parents[1]


def _blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)


def test_the_readers_own_drafter(monkeypatch):
    """docs/drafters.md ends with a complete drafter; it is found by entry point and changes no token."""
    code = next(block for block in _blocks("docs/drafters.md") if "class Bigram" in block)
    module = types.ModuleType("my_drafter")
    monkeypatch.setitem(sys.modules, "my_drafter", module)
    exec(code, module.__dict__)
    from importlib.metadata import EntryPoint

    point = EntryPoint("bigram", "my_drafter:Bigram", "outrider.drafters")
    monkeypatch.setattr(
        "outrider.drafters.entry_points", lambda **kw: [point] if kw.get("name", "bigram") == "bigram" else []
    )
    assert create(SpeculativeConfig.parse("bigram:k=2")).num_speculative_tokens == 2
    llm = LLM("tiny", dtype="float32")
    plain = llm.generate("the cat and the dog and the cat and the dog", max_tokens=60, temperature=0)[0]
    llm.speculative_config = {"method": "bigram", "max_entries": 5000}
    fast = llm.generate("the cat and the dog and the cat and the dog", max_tokens=60, temperature=0)[0]
    assert fast.token_ids == plain.token_ids
    assert fast.metrics["speculative_decoding"]["num_accepted_draft_tokens"] > 0


def test_readme_starts():
    """The README's Python start runs as printed."""
    for block in _blocks("README.md"):
        exec(block, {})
