"""Drafters, found by name: every module here, and every entry point of the group `outrider.drafters`.

A module's name is its method's name, the one Drafter it defines is the method, and that dataclass's fields are the
options.
"""

from __future__ import annotations

import importlib
import math
import os
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple

from outrider.config import DEEPEST, MOST_DRAFTERS, Rule, SpeculativeConfig, instead, real, whole
from outrider.errors import ConfigError, OutriderError, brief, told
from outrider.speculate import Drafter


def methods() -> list[str]:
    """All method names, built-in ones first."""
    own = _own()
    return own + sorted({point.name for point in entry_points(group="outrider.drafters")} - set(own))


def _own() -> list[str]:
    return [module.name for module in pkgutil.iter_modules(__path__)]


def find(method: str) -> type[Drafter]:
    """The Drafter class of a method. Raises ConfigError for an unknown one, naming the valid ones, and a broken one."""
    own = method in _own()  # first: entry points are read from the files of all packages
    if not own and method not in methods():
        raise ConfigError(f"method {brief(method)} is unknown; valid: {', '.join(methods())}{instead(method)}")
    if own:
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
            raise ConfigError(
                f"method {method!r}: entry point {point.value} cannot be loaded: {told(error)}"
            ) from error
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
            meant = "k: most tokens of a draft, over all its branches" if item.name == "num_speculative_tokens" else ""
            default = item.default if item.default_factory is MISSING else item.default_factory()
            kind = getattr(item.type, "__name__", str(item.type))
            found.append(Option(item.name, kind, default, item.metadata.get("help", meant)))
    return found


def create(config: SpeculativeConfig) -> Drafter:
    """A drafter with its options set. Raises ConfigError for an unknown method, key or value type."""
    _bound(config)
    if config.num_speculative_tokens == "auto" and config.method != "auto":
        only = find("auto")(drafters=[{"method": config.method, **config.options}])  # type: ignore[call-arg]
        only.name = config.method  # type: ignore[misc]
        return only
    kind = find(config.method)
    types = {f.name: getattr(f.type, "__name__", str(f.type)) for f in fields(kind) if f.init}  # a type or its name
    given: dict[str, Any] = {k: str(v) if isinstance(v, Path) else v for k, v in config.options.items()}
    if config.num_speculative_tokens not in (None, "auto"):
        given["num_speculative_tokens"] = config.num_speculative_tokens
    for key, value in given.items():
        if key not in types:
            every = (f.name for f in fields(config) if f.name != "options")
            valid = ", ".join(dict.fromkeys(("method", "num_speculative_tokens", *types, *every)))
            raise ConfigError(f"method {config.method!r} has no option {brief(key)}; valid: {valid}{instead(key)}")
        if types[key] in READERS:
            given[key] = READERS[types[key]](value)
            if given[key] is None:
                raise ConfigError(
                    f"option {key!r} of method {config.method!r} must be {types[key]}, not {brief(value)}"
                )
    try:
        made = kind(**given)
    except OutriderError:
        raise
    except Exception as error:  # another package's code
        raise ConfigError(f"method {config.method!r} does not accept these options: {told(error)}") from error
    if READERS["int"](k := made.num_speculative_tokens) is None:
        raise ConfigError(f"method {config.method!r}: num_speculative_tokens must be a whole number, not {brief(k)}")
    return made


def inner(owner: str, config: Any) -> Drafter:
    """A drafter inside another one's, which decides about acceptance and draft length. Raises ConfigError."""
    named = isinstance(config, Mapping) and "acceptance_method" in config
    try:
        config = SpeculativeConfig.of(config)
    except ConfigError as error:  # which speaks of the speculative_config: there is one around it
        raise ConfigError(f"a drafter of {owner}: {error}") from None
    if named or config.rule != Rule():
        raise ConfigError(f"acceptance_method belongs to the {owner}, not to one of its drafters")
    if config.num_speculative_tokens == "auto":
        raise ConfigError(f"num_speculative_tokens 'auto' belongs to the {owner}; give its drafters a number")
    return create(config)


def _bound(config: SpeculativeConfig) -> None:
    """Raise ConfigError for drafters in drafters without end."""
    nested, left = list[tuple[int, Any]]([(1, config)]), MOST_DRAFTERS
    while nested:
        depth, item = nested.pop()
        options = item.options if isinstance(item, SpeculativeConfig) else item
        if not isinstance(options, Mapping):
            continue
        left -= 1
        if depth > DEEPEST or left < 0:
            raise ConfigError(f"drafters in drafters: at most {MOST_DRAFTERS} in all, and {DEEPEST} one within another")
        several = options.get("drafters")
        nested += [(depth + 1, own) for own in (several[: left + 1] if isinstance(several, (list, tuple)) else ())]
        nested += [(depth + 1, options.get("drafter"))]


def _text(value: object) -> str | None:
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    return value if isinstance(value, str) else None


READERS: dict[str, Callable[[object], object]] = {  # by the type of an option: its value, or None if it is no such
    "int": lambda value: whole(value, -(2**62)),
    "float": lambda value: real(value, -math.inf, math.inf),
    "str": _text,
    "bool": lambda value: value if isinstance(value, bool) else None,
}


def check(drafter: Drafter, **bounds: tuple[float, float]) -> None:
    """Raise ConfigError for an option that lies outside its bounds (NaN does)."""
    for name, (low, high) in bounds.items():
        if not low <= (value := getattr(drafter, name)) <= high:
            raise ConfigError(f"{name} must be at least {low} and at most {high}, not {value}")
