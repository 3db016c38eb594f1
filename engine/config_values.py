"""Typed access to config.json, whose errors name the file, the key and the value. Needs no torch."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from engine.errors import ConfigInvalid

T = TypeVar("T")
_KIND_NAMES: dict[type, str] = {bool: "true or false", dict: "an object", list: "a list", int: "an integer"}
MAX_COUNT = 2**31 - 1
"""Largest number of tokens, positions or dimensions."""


class ConfigReader:
    """One JSON object and the name of where it is."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where

    def typed(self, key: str, kind: type[T], default: T) -> T:
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ConfigInvalid(f"{self.where}: {key} must be {_KIND_NAMES[kind]}, got {value!r}")
        return value

    def count(self, key: str, default: int | None = None, *, most: int = MAX_COUNT) -> int:
        value = self.raw.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ConfigInvalid(f"{self.where}: {key} must be a positive integer, got {value!r}")
        if value > most:
            raise ConfigInvalid(f"{self.where}: {key} must be at most {most}, got {_rounded(value)}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.raw.get(key)
        value = default if value is None else value
        return positive(value, f"{self.where}: {key}")


def positive(value: Any, what: str) -> float:
    """Return `value` as a float. Raises `ConfigInvalid`, naming `what`, unless it is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise ConfigInvalid(f"{what} must be a positive number, got {shown(value)}")
    return float(value)


def _rounded(value: int) -> str:
    return f"{value:.3g}" if value <= sys.float_info.max else shown(value)


def shown(value: object) -> str:
    """Return a value for an error, shortened: a file may hold integers that Python does not convert to decimal."""
    return shortened(hex(value) if isinstance(value, int) and value.bit_length() > 64 else repr(value))


def shortened(text: str) -> str:
    """Return the beginning of a text for an error."""
    return text if len(text) <= 80 else f"{text[:80]}..."


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file. Raises `ConfigInvalid`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigInvalid(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigInvalid(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value
