"""Checked fields of one record of a trace, from JSON or CSV; what is wrong is reported with its place."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from traces.errors import ProblemKind, TraceFormatError

MAX_TOKENS = 1 << 24
"""Longest prompt or answer that is accepted; a larger number is a damaged field."""

_MAX_TIME = 1e12
_DIGITS = re.compile(r"\d{1,18}")
_SHOWN = 80


@dataclass(frozen=True, slots=True)
class RecordPlace:
    """Place of a record: file, line from 1, and `detail` within the line."""

    source: str
    line: int
    detail: str = ""

    def within(self, detail: str) -> RecordPlace:
        """Return a place within this one."""
        return replace(self, detail=f"{self.detail}, {detail}" if self.detail else detail)

    def bad(self, found: str, expected: str, kind: ProblemKind = "value") -> TraceFormatError:
        """Return the error for this place."""
        return TraceFormatError(self.source, self.line, found=found, expected=expected, kind=kind, detail=self.detail)


@dataclass(frozen=True, slots=True)
class RecordFields:
    """Fields of a record. Every method raises TraceFormatError for a missing or unsuitable field."""

    place: RecordPlace
    values: Mapping[str, Any]

    def has(self, name: str) -> bool:
        """Return True if the field is present and not null."""
        return self.values.get(name) is not None

    def get(self, name: str) -> Any:
        """Return the value of a field that must be present."""
        if name not in self.values:
            raise self.place.bad(f"no {name!r} among {shown(sorted(self.values))}", f"the field {name}", "missing")
        return self.values[name]

    def integer(self, name: str, *, least: int, most: int) -> int:
        """Return an integer in this range; texts (of a CSV file) must consist of digits."""
        value = self.get(name)
        number = int(value) if isinstance(value, str) and _DIGITS.fullmatch(value) else value
        if not is_integer(number) or not least <= number <= most:
            raise self.place.bad(f"{name} {shown(value)}", f"an integer from {least} to {most}")
        return int(number)

    def tokens(self, name: str, *, least: int) -> int:
        """Return a number of tokens."""
        return self.integer(name, least=least, most=MAX_TOKENS)

    def time(self, name: str, *, unit: str) -> float:
        """Return a time or duration, at least 0, in `unit`, which only the message names."""
        value = self.get(name)
        try:
            number = float(value) if isinstance(value, str) or is_number(value) else math.nan
        except (ValueError, OverflowError):
            number = math.nan
        if not 0 <= number <= _MAX_TIME:
            raise self.place.bad(f"{name} {shown(value)}", f"a number of {unit}, at least 0")
        return number

    def text(self, name: str) -> str:
        """Return a text."""
        value = self.get(name)
        if not isinstance(value, str):
            raise self.place.bad(f"{name} {shown(value)}", "a string")
        return value

    def integers(self, name: str) -> list[int]:
        """Return a list of non-negative integers."""
        value = self.get(name)
        if not isinstance(value, list) or not all(is_integer(each) and each >= 0 for each in value):
            raise self.place.bad(f"{name} {shown(value)}", "a list of non-negative integers")
        return value

    def ids(self, name: str, *, input_length: int, block_tokens: int) -> list[int]:
        """Return the ids of a prompt's blocks, as many as the length requires."""
        value = self.integers(name)
        blocks = -(-input_length // block_tokens)
        if len(value) != blocks:
            raise self.place.bad(
                f"{len(value)} {name} for an input_length of {input_length}",
                f"{blocks}: one id per {block_tokens} tokens, the last may be partial",
                "ids",
            )
        return value


def json_fields(text: bytes, place: RecordPlace) -> RecordFields:
    """Parse a line that must be a JSON object. Raises TraceFormatError."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise place.bad(f"{shown(text)} ({error})", "one JSON object per line", "syntax") from error
    return object_fields(value, place)


def object_fields(value: Any, place: RecordPlace) -> RecordFields:
    """Return the fields of a JSON value that must be an object. Raises TraceFormatError."""
    if not isinstance(value, dict):
        raise place.bad(shown(value), "a JSON object", "syntax")
    return RecordFields(place, value)


def is_integer(value: object) -> bool:
    """Return True for integers, which exclude booleans."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Return True for integers and floats, which exclude booleans."""
    return is_integer(value) or isinstance(value, float)


def shown(value: object) -> str:
    """Return a value for a message, shortened."""
    text = value.decode("utf-8", "replace").strip() if isinstance(value, bytes) else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
