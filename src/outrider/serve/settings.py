"""What one server is told at its start, beside the model: names, keys, limits, defaults of sampling."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from outrider.config import SamplingParams, real, whole
from outrider.errors import CheckpointError, ConfigError, brief
from outrider.files import expand

SAMPLED_BY = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
# all, or as browsers send them, since they are compared as texts
ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#*\sA-Z]+")
# below 0.1, streams would be full of comments
SECONDS = {"keep_alive": (0.1, 86400), "event_interval": (0, 3600), "drain": (0, 86400)}


@dataclass(frozen=True)
class Settings:
    """Limits are refused with 400, a body over `max_body` with 413, what does not fit the queue with 503."""

    names: tuple[str, ...]  # that requests may call the model by; answers use the first
    api_keys: tuple[str, ...] = ()  # none: everybody may
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of sampling, where a request says nothing
    max_body: int = 16 * 2**20  # bytes
    max_prompts: int = 1024  # of one request
    max_prompt_tokens: int = 2**24  # ... as often as each prompt has outputs, which keep it: 128 of 131,072
    max_n: int = 128
    max_stop_strings: int = 16
    max_logprobs: int = 20
    keep_alive: float = 15.0  # seconds of silence in a stream, until a comment says that we are there
    event_interval: float = 0.05  # seconds between two frames of a stream (AsyncLLM): still flows for an eye
    stall: float = 60.0  # seconds without a turn of the engine's loop, until /health says so
    drain: float = 30.0  # seconds that requests may go on after SIGTERM
    cors_origins: tuple[str, ...] = ()
    chat_template: str = ""  # in place of the model's
    reasoning: bool = True  # whether it is told apart from the answer
    trust_chat_template: bool = False  # whether a request may bring its own

    def __post_init__(self) -> None:
        """Raises ConfigError for what a YAML file, say, has otherwise: each character of a text would be a key."""
        for name in ("names", "api_keys", "cors_origins"):
            given, end = getattr(self, name), "/" if name == "cors_origins" else ""  # which browsers do not send
            listed = isinstance(given, (list, tuple)) and all(isinstance(own, str) for own in given)
            found = tuple([own.strip().rstrip(end) for own in given]) if listed else ("",)
            if not all(found) or not (found or name != "names"):
                raise ConfigError(f"{name} must be a list of texts, none of them empty")
            object.__setattr__(self, name, found)
        if wrong := [own for own in self.cors_origins if not ORIGIN.fullmatch(own)]:
            raise ConfigError(
                f"cors_origins are * or what browsers send, such as https://a.example or http://localhost:3000 (in "
                f"small letters, without a path), not {brief(wrong[0])}"
            )
        check_numbers(self)
        for name, (low, high) in SECONDS.items():
            if real(value := getattr(self, name), low, high) is None:
                raise ConfigError(f"{name} must be seconds from {low} to {high}, not {brief(value)}")
        for item in fields(self):
            value, kind = getattr(self, item.name), item.type
            if (kind == "bool" and not isinstance(value, bool)) or (kind == "str" and not isinstance(value, str)):
                raise ConfigError(
                    f"{item.name} must be {'true or false' if kind == 'bool' else 'a text'}, not {brief(value)}"
                )
        if not isinstance(self.defaults, Mapping):
            raise ConfigError(f"defaults must be an object, not {brief(self.defaults)}")
        checked(self.defaults, "defaults")


def check_numbers(given: Any) -> None:
    """Raise ConfigError for a field of a dataclass that is no finite number of at least 0 where it should be one."""
    for item in fields(given):
        value, kind = getattr(given, item.name), item.type
        if (kind == "int" and whole(value, 0) is None) or (
            kind == "float" and real(value, 0, sys.float_info.max) is None
        ):
            raise ConfigError(f"{item.name} must be a finite number of at least 0, not {brief(value)}")


def generation_defaults(source: str, model: Path) -> dict[str, Any]:
    """Defaults of sampling as vLLM's --generation-config finds them.

    source: `auto` for the model's generation_config.json, if it has one; `vllm` for none; or the folder of another.
    """
    if source == "vllm":
        return {}
    path = (model if source == "auto" else expand(source)) / "generation_config.json"
    if not path.is_file():
        if source != "auto":
            raise ConfigError(
                f"--generation-config is auto, vllm or a folder with a generation_config.json, not {source}"
            )
        return {}
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} should hold an object")
    return checked({"max_tokens" if k == "max_new_tokens" else k: v for k, v in found.items()}, str(path), strict=False)


def checked(given: Mapping[str, Any], where: str, strict: bool = True) -> dict[str, Any]:
    """Those of them that sampling has, once it has taken them. Raises ConfigError, if strict for others as well."""
    known = (*SAMPLED_BY, "max_tokens")
    if strict and (unknown := [key for key in given if key not in known]):
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}; valid: {', '.join(known)}")
    found = {key: given[key] for key in known if given.get(key) is not None}
    try:
        SamplingParams(**found)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return found
