"""What a configuration key is: its type, default, range and one line of help. No key is declared here.

A *slice* is a frozen dataclass whose fields are annotated with a `Key`; a *composite* is a frozen dataclass whose
fields are slices. Keys are flat: the slices only group them, and every key is unique over all slices.
"""

import dataclasses
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Union

from moonpool.errors import ConfigError


class Item(Protocol):
    """What a list holds where that is more than text."""

    @classmethod
    def parse(cls, value: Any, source: str) -> "Item":
        """From text or YAML's type; raises ConfigError that names `source`."""

    def plain(self) -> Any:
        """As plain YAML can hold it; `parse` gives the item back."""


@dataclass(frozen=True)
class Key:
    """What a slice declares of a key beside its type and default: `port: Annotated[int, Key("...")] = 8000`."""

    help: str  # one line
    low: float | None = None  # inclusive, as is `high`
    high: float | None = None
    choices: tuple[str, ...] = ()
    parse: Callable[[str], Any] | None = None  # text to value, where the type alone does not say how
    default_text: str | None = None  # what --help shows for a default that is decided later
    aliases: tuple[str, ...] = ()  # further flags, e.g. "-v"
    flag: str = ""  # where it is not the key's name
    item: type[Item] | None = None  # of a list: what it holds, if not texts; several in one text part at ";", not ","


@dataclass(frozen=True)
class Setting:
    """One configuration key, complete."""

    name: str
    kind: type  # int, float, str, bool, Path; tuple for a list of strings
    optional: bool  # None is a value: "decided at start"
    default: Any
    panel: str  # heading under which --help shows it
    key: Key

    @property
    def flag(self) -> str:
        return self.key.flag or "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "MOONPOOL_" + self.name.upper()

    @property
    def default_text(self) -> str:
        if self.key.default_text is not None:
            return self.key.default_text
        if self.default in (None, "", ()):
            return "none"
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default).replace("False", "false")


class Slice:
    """Base of the slices: checks every value, wherever it came from. Subclasses set `panel`."""

    panel: typing.ClassVar[str] = "Options"

    def __post_init__(self) -> None:
        for key, declared in slice_settings(type(self)).items():
            check(declared, getattr(self, key), key)
        self.check()

    def check(self) -> None:
        """Rules over several keys of the slice; raises ConfigError."""


def slice_settings(cls: type[Slice]) -> dict[str, Setting]:
    """The keys of one slice, in order of declaration."""
    hints = typing.get_type_hints(cls, include_extras=True)
    settings = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        hint, key = typing.get_args(hints[field.name])
        kind, optional = _kind(hint)
        settings[field.name] = Setting(field.name, kind, optional, field.default, cls.panel, key)
    return settings


def composite_slices(cls: type) -> dict[str, type[Slice]]:
    """The slices of a composite, by field name."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def composite_settings(cls: type) -> dict[str, Setting]:
    """All keys of a composite, in order."""
    settings: dict[str, Setting] = {}
    for slice_class in composite_slices(cls).values():
        settings.update(slice_settings(slice_class))
    return settings


def flatten(composite: Any) -> dict[str, Any]:
    """A composite's values by key, as plain YAML can hold them."""
    values: dict[str, Any] = {}
    for name in composite_slices(type(composite)):
        part = getattr(composite, name)
        for key in slice_settings(type(part)):
            value = getattr(part, key)
            values[key] = _plain(value)
    return values


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [item if isinstance(item, str) else item.plain() for item in value]
    return str(value) if isinstance(value, Path) else value


def check(declared: Setting, value: Any, source: str) -> None:
    """Raise ConfigError, naming `source`, when `value` has a wrong type or lies outside the bounds or choices."""
    if value is None and declared.optional:
        return
    right_type = isinstance(value, declared.kind) and not (isinstance(value, bool) and declared.kind is not bool)
    if not right_type:
        raise ConfigError(f"{source} is {value!r}: expected {_kind_text(declared.kind)}")
    if declared.key.choices and value not in declared.key.choices:
        raise ConfigError(f"{source} is {value!r}: expected one of {', '.join(declared.key.choices)}")
    below = declared.key.low is not None and value < declared.key.low
    above = declared.key.high is not None and value > declared.key.high
    if below or above:
        raise ConfigError(f"{source} is {value!r}: expected {_bounds_text(declared)}")


def _kind(hint: Any) -> tuple[type, bool]:
    """(plain type, whether None is allowed) of a field's annotation."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is Union:
        inner = [argument for argument in typing.get_args(hint) if argument is not type(None)]
        if len(inner) != 1:
            raise TypeError(f"a setting is of one type or None, not {hint}")
        return _kind(inner[0])[0], True
    return typing.get_origin(hint) or hint, False


def _kind_text(kind: type) -> str:
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false", Path: "a path"}
    return names.get(kind, "a list of texts")


def _bounds_text(declared: Setting) -> str:
    if declared.key.high is None:
        return f"at least {declared.key.low}"
    if declared.key.low is None:
        return f"at most {declared.key.high}"
    return f"{declared.key.low} to {declared.key.high}"
