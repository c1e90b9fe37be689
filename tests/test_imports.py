"""Imports go leftwards only, also inside functions, and nothing hides behind TYPE_CHECKING (docs/architecture.md)."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

import outrider

ROOT = Path(outrider.__file__).parent
ORDER = (
    "errors, files, config, families, outputs -> draft, grammar -> constraint -> sequence -> ops, sampling, verify -> "
    "kv | model -> parallel -> quantize, gguf, packed -> find, heads, weights -> load -> corpus -> datastore -> "
    "runner -> speculate -> trees, costs, control -> drafters -> plan -> engine -> follow -> llm -> "
    "async_llm, hf, vllm -> serve, train -> compensate -> export -> bench -> ray -> cli"
)
TIERS = ORDER.replace(",", " -> ").replace("|", " -> ").replace(" ", "").split("->")
APART = {("kv", "model"), ("model", "kv")}
# Packages whose files are strangers to each other, and whom all of them may know.
SIBLINGS_APART = {"drafters": set(), "kv": {"base", "blocks", "dense", "paged"}}
FILES = sorted(ROOT.rglob("*.py"))


def imported(tree: ast.AST) -> set[str]:
    """Dotted names below `outrider` that a module imports, with the names taken from them."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    outside = {name for name in names if name.split(".")[0] in ("tools", "tests")}
    assert not outside, f"{', '.join(outside)}: not in the package"
    return {name.removeprefix("outrider.") for name in names if name.startswith("outrider.")} | (names & {"outrider"})


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_imports(file):
    own = file.relative_to(ROOT).with_suffix("").parts
    tree = ast.parse(file.read_text("utf-8"))
    assert not any("TYPE_CHECKING" in (getattr(n, "id", ""), getattr(n, "attr", "")) for n in ast.walk(tree))
    face = own in (("__init__",), ("__main__",))  # the public face sees all, and is seen by what comes after llm
    assert face or own[0] in TIERS, f"give {own[0]} its place in ORDER, and in docs/architecture.md"
    for name in imported(tree):
        home, *rest = name.split(".")
        where = home if home in TIERS else "llm"  # a name of the public face
        if home == "drafters" and rest:
            assert not (ROOT / "drafters" / f"{rest[0]}.py").exists(), f"{name} is a concrete drafter: find it by name"
        if face or (own[0] == home and home not in SIBLINGS_APART) or own == (home, "__init__"):
            continue
        if own[0] == home:
            sibling = rest and (ROOT / home / f"{rest[0]}.py").exists() and rest[0] not in SIBLINGS_APART[home]
            assert not sibling, f"{name}: files of {home} do not import their siblings"
        else:
            assert (own[0], home) not in APART, f"{own[0]} and {home} never import each other"
            assert TIERS.index(where) < TIERS.index(own[0]), f"{own[0]} may not import {name}: {ORDER}"


def test_the_rules_bite():
    """The reader of imports sees them in functions and under aliases."""
    code = "def f():\n    from outrider.llm import LLM\nimport outrider.kv.dense as d\nfrom outrider import LLM\n"
    assert imported(ast.parse(code)) == {"llm.LLM", "kv.dense", "LLM"}
    for outside in ("import tools.docs", "def f():\n    from tools import inflate"):
        with pytest.raises(AssertionError, match="not in the package"):
            imported(ast.parse(outside))
    assert {"sampling", "kv", "model", "cli"} <= {f.relative_to(ROOT).parts[0].removesuffix(".py") for f in FILES}


def test_what_is_imported_is_named():
    """Every package that is imported is a dependency, of ours or of an extra."""
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8")
    named = {name.replace("-", "_") for name in re.findall(r'"([\w-]+)[\w\[\]]*>=', project)}
    named |= {"starlette", "pydantic", "pydantic_core", "tokenizers"}  # FastAPI's, whose names it takes; transformers'
    lines = re.compile(r"^\s*(?:from (\w+)[\w.]* import|import (\w+))", re.M)
    found = {one or other for file in FILES for one, other in lines.findall(file.read_text("utf-8"))}
    assert {"torch", "h11"} <= found and not found - named - sys.stdlib_module_names - {"outrider"}
