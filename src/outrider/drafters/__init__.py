"""Drafters, found by name: every module here, and every entry point of the group `outrider.drafters`.

A module's name is its method's name, the one Drafter it defines is the method, and that dataclass's fields are the
options.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import MISSING, fields
from importlib.metadata import entry_points
from typing import Any, NamedTuple

from outrider.config import SpeculativeConfig
from outrider.errors import ConfigError
from outrider.speculate import Drafter


def methods() -> list[str]:
    """All method names, built-in ones first."""
    own = [module.name for module in pkgutil.iter_modules(__path__)]
    return own + sorted({point.name for point in entry_points(group="outrider.drafters")} - set(own))


def find(method: str) -> type[Drafter]:
    """The Drafter class of a method. Raises ConfigError, naming the valid ones."""
    if method not in methods():
        raise ConfigError(f"method {method!r} is unknown; valid: {', '.join(methods())}")
    if method in {module.name for module in pkgutil.iter_modules(__path__)}:
        module = importlib.import_module(f"{__name__}.{method}")
        (found,) = [
            item
            for item in vars(module).values()
            if isinstance(item, type) and issubclass(item, Drafter) and item.__module__ == module.__name__
        ]
    else:
        point, *_ = entry_points(group="outrider.drafters", name=method)
        try:
            found = point.load()
        except (Exception, SystemExit) as error:  # another package's code: it raises what it likes
            raise ConfigError(f"method {method!r}: entry point {point.value} cannot be loaded: {error}") from error
        if not (isinstance(found, type) and issubclass(found, Drafter)):
            raise ConfigError(f"entry point {point.value} of method {method!r} is not a Drafter class")
    found.name = method
    return found


class Option(NamedTuple):
    """One option of a method. `help` is empty if its author says nothing (config.option)."""

    name: str
    type: str
    default: Any
    help: str


def describe(method: str) -> list[Option]:
    """The options of a method. Raises ConfigError as `find` does."""
    found = []
    for item in fields(find(method)):
        if item.init:
            meant = "draft length, in tokens" if item.name == "num_speculative_tokens" else ""
            default = item.default if item.default_factory is MISSING else item.default_factory()
            kind = getattr(item.type, "__name__", str(item.type))
            found.append(Option(item.name, kind, default, item.metadata.get("help", meant)))
    return found


def options(method: str) -> list[str]:
    """The option names of a method."""
    return [option.name for option in describe(method)]


def create(config: SpeculativeConfig) -> Drafter:
    """A drafter with its options set. Raises ConfigError for an unknown method, key or value type."""
    kind = find(config.method)
    types = {f.name: getattr(f.type, "__name__", str(f.type)) for f in fields(kind) if f.init}  # a type or its name
    given = dict(config.options)
    if config.num_speculative_tokens not in (None, "auto"):
        given["num_speculative_tokens"] = config.num_speculative_tokens
    for key, value in given.items():
        if key not in types:
            raise ConfigError(f"method {config.method!r} has no option {key!r}; valid: method, {', '.join(types)}")
        if types[key] in ("int", "float", "str", "bool") and not _fits(value, types[key]):
            raise ConfigError(f"option {key!r} of method {config.method!r} must be {types[key]}, not {value!r}")
    return kind(**given)


def _fits(value: object, kind: str) -> bool:
    if isinstance(value, bool) or kind == "bool":
        return isinstance(value, bool) and kind == "bool"
    return isinstance(value, {"int": (int,), "float": (int, float), "str": (str,)}[kind])
