"""Declaration of settings: `Key`, `Setting` and the base class of settings groups. No setting is declared here.

A *settings group* is a frozen dataclass derived from `SettingsGroup`. Users can set its fields that are annotated with
a `Key`: in the YAML file, by a MOONPOOL_* variable or by a flag. The YAML key is the field's name without its unit
(`drain_grace_s` is `drain_grace`). Fields without a `Key` are internal. A *composite* is a frozen dataclass whose
fields are settings groups: the configuration that one command reads. Keys are flat, and unique over all groups.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeVar, Union, get_args, get_origin

__all__ = [
    "InvalidSetting",
    "Item",
    "Key",
    "Setting",
    "SettingsGroup",
    "assemble",
    "check",
    "composite_groups",
    "composite_settings",
    "flag_of",
    "flatten",
    "group_settings",
    "kind_text",
    "parse_size",
    "plain",
    "replaced",
    "variable_of",
]

C = TypeVar("C")


class InvalidSetting(ValueError):
    """A setting has a wrong type or value, or contradicts another; the message names it and what is expected."""


class Item(Protocol):
    """Element of a list setting whose elements are not strings."""

    @classmethod
    def parse(cls, value: Any, source: str) -> "Item":
        """Return the item that `value`, a text or a YAML value, describes; errors name `source`."""

    def plain(self) -> Any:
        """Return the item as plain YAML; `parse` restores it."""


@dataclass(frozen=True)
class Key:
    """Declaration of a user's setting beside its type and default: `port: Annotated[int, Key("...")] = 8000`."""

    help: str  # one line
    low: float | None = None  # inclusive, as is `high`
    high: float | None = None
    choices: tuple[str, ...] = ()  # allowed values, if the type is not a Literal
    unit: Literal["", "s", "bytes"] = ""  # suffix of the field's name that the YAML key lacks
    parse: Callable[[str], Any] | None = None  # converts text to a value, if the type is not enough
    default_text: str | None = None  # shown by --help in place of the default, e.g. when it is decided at start
    aliases: tuple[str, ...] = ()  # further flags, e.g. "-v", or the name that the flag has in vLLM
    flag: str = ""  # if it differs from the key's name
    former_names: tuple[str, ...] = ()  # earlier YAML keys; they, their variables and flags are still accepted
    panel: str = ""  # heading in --help, if it differs from the group's
    none_word: str = ""  # what users write for None, if that is a choice and not the absence of one, e.g. "auto"
    item: type[Item] | None = None  # element type of a list of other than strings; in a text they are separated by ";"


@dataclass(frozen=True)
class Setting:
    """A declared setting with all its properties."""

    name: str  # YAML key
    field: str  # attribute of the settings group: the key's name and its unit
    kind: type  # int, float, str, bool, Path; tuple for a list
    optional: bool  # None is a valid value: decided at start
    default: Any
    choices: tuple[str, ...]
    panel: str  # heading under which --help shows it
    key: Key

    @property
    def flag(self) -> str:
        """The command-line flag."""
        return self.key.flag or flag_of(self.name)

    @property
    def variable(self) -> str:
        """The environment variable."""
        return variable_of(self.name)

    @property
    def default_text(self) -> str:
        """The default as --help shows it."""
        if self.key.default_text is not None:
            return self.key.default_text
        if self.default in (None, "", ()):
            return "none"
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default).replace("False", "false")


def flag_of(key: str) -> str:
    """The command-line flag of a YAML key."""
    return "--" + key.replace("_", "-")


def variable_of(key: str) -> str:
    """The environment variable of a YAML key."""
    return "MOONPOOL_" + key.upper()


class SettingsGroup:
    """Base of the settings groups: checks the type and range of every setting. Subclasses set `panel`."""

    __slots__ = ()
    panel: ClassVar[str] = "Options"

    def __post_init__(self) -> None:
        for declared in group_settings(type(self)).values():
            check(declared, getattr(self, declared.field), declared.name)
        self.check()

    def check(self) -> None:
        """Raise InvalidSetting if settings of the group contradict each other."""


def group_settings(cls: type[SettingsGroup]) -> dict[str, Setting]:
    """Return the user's settings of one group by YAML key, in order of declaration."""
    hints = typing.get_type_hints(cls, include_extras=True)
    settings = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        key = next((extra for extra in get_args(hints[field.name])[1:] if isinstance(extra, Key)), None)
        if key is None:
            continue
        kind, optional, choices = _kind(get_args(hints[field.name])[0])
        name = field.name.removesuffix(f"_{key.unit}") if key.unit else field.name
        settings[name] = Setting(
            name, field.name, kind, optional, field.default, key.choices or choices, key.panel or cls.panel, key
        )
    return settings


def composite_groups(cls: type) -> dict[str, type[SettingsGroup]]:
    """Return the settings groups of a composite by field name."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def composite_settings(cls: type) -> dict[str, Setting]:
    """Return all settings of a composite by YAML key, in order."""
    settings: dict[str, Setting] = {}
    for group in composite_groups(cls).values():
        settings.update(group_settings(group))
    return settings


def assemble(cls: type[C], /, **values: Any) -> C:
    """Build a configuration from values by field name; each goes to the settings group that declares the field.

    `cls` is a dataclass with settings groups, or further such classes, among its fields. A group may also be given
    whole, under its own field's name. Raises TypeError for a name that no class has.
    """
    hints = typing.get_type_hints(cls)
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        kind = hints[field.name]
        if not _is_nested(kind):
            if field.name in values:
                arguments[field.name] = values.pop(field.name)
        elif isinstance(values.get(field.name), kind):
            arguments[field.name] = values.pop(field.name)
        else:
            own = {name: values.pop(name) for name in _field_names(kind) if name in values}
            has_default = not (field.default is field.default_factory is dataclasses.MISSING)
            if own or not has_default:
                arguments[field.name] = assemble(kind, **own)
    if values:
        raise TypeError(f"{cls.__name__} has no field {', '.join(values)}")
    return cls(**arguments)


def replaced(config: C, /, **values: Any) -> C:
    """Copy a configuration with other values by field name, which are distributed as by `assemble`."""
    hints = typing.get_type_hints(type(config))
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        kind = hints[field.name]
        if not _is_nested(kind) or isinstance(values.get(field.name), kind):
            if field.name in values:
                changes[field.name] = values.pop(field.name)
        elif own := {name: values.pop(name) for name in _field_names(kind) if name in values}:
            changes[field.name] = replaced(getattr(config, field.name), **own)
    if values:
        raise TypeError(f"{type(config).__name__} has no field {', '.join(values)}")
    return dataclasses.replace(config, **changes)  # type: ignore[type-var]


def _is_nested(kind: Any) -> bool:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def _field_names(cls: type) -> list[str]:
    """Return the field names of a nested configuration, those of its groups first."""
    hints = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]
    return [*(inner for name in names if _is_nested(hints[name]) for inner in _field_names(hints[name])), *names]


def flatten(composite: Any) -> dict[str, Any]:
    """Return the values of a composite by YAML key, as plain YAML."""
    values: dict[str, Any] = {}
    for name, group in composite_groups(type(composite)).items():
        for key, declared in group_settings(group).items():
            values[key] = plain(declared, getattr(getattr(composite, name), declared.field))
    return values


def plain(declared: Setting, value: Any) -> Any:
    """Return a setting's value as plain YAML."""
    if value is None and declared.key.none_word:
        return declared.key.none_word
    if isinstance(value, tuple):
        return [item if isinstance(item, str) else item.plain() for item in value]
    return str(value) if isinstance(value, Path) else value


def check(declared: Setting, value: Any, source: str) -> None:
    """Raise InvalidSetting, naming `source`, if `value` has a wrong type or is not among the allowed values."""
    if value is None and declared.optional:
        return
    right_type = isinstance(value, declared.kind) and not (isinstance(value, bool) and declared.kind is not bool)
    if not right_type:
        raise InvalidSetting(f"{source} must be {kind_text(declared)}, got {value!r}")
    if declared.choices and value not in declared.choices:
        raise InvalidSetting(f"{source} must be one of {', '.join(declared.choices)}, got {value!r}")
    low, high = declared.key.low, declared.key.high
    if not ((low is None or value >= low) and (high is None or value <= high)):  # so that NaN is rejected
        word = f", or {declared.key.none_word}" if declared.key.none_word else ""
        raise InvalidSetting(f"{source} must be {_range_text(declared.key)}{word}, got {value!r}")


def kind_text(declared: Setting) -> str:
    """Return what a value of the setting must be, for errors."""
    word = f" or {declared.key.none_word}" if declared.key.none_word else ""
    return _KIND_TEXTS.get(declared.kind, "a list of strings") + word


def parse_path(text: str) -> Path:
    """Return a path, with ~ replaced by a home directory. Raises ValueError."""
    if "\0" in text:
        raise ValueError(f"must not contain a NUL character, got {text!r}")
    try:
        return Path(text).expanduser()
    except RuntimeError:  # raised by pathlib for ~NAME
        raise ValueError(f"must not name the home directory of an unknown user, got {text!r}") from None


def parse_size(text: str) -> int:
    """Return the bytes of a size such as "1073741824", "512MiB", "1.5 GiB" or "2GB". Raises ValueError."""
    units = {"": 1, "B": 1}
    for power, letter in enumerate("KMGT", start=1):
        units[letter + "IB"] = units[letter] = 1024**power
        units[letter + "B"] = 1000**power
    compact = text.strip().replace(" ", "")
    number = compact.rstrip("BKMGTIbkmgti")
    unit = compact[len(number) :].upper()
    try:
        nbytes = float(number) * units[unit]
    except (KeyError, ValueError):
        nbytes = math.nan
    if not math.isfinite(nbytes):
        raise ValueError(f"must be a number of bytes, or one with a unit such as 512MiB, got {text!r}")
    return int(nbytes)


_KIND_TEXTS = {int: "an integer", float: "a number", str: "a string", bool: "true or false", Path: "a path"}


def _kind(hint: Any) -> tuple[type, bool, tuple[str, ...]]:
    """Return a field's plain type, True if None is allowed, and the allowed texts, from its annotation."""
    if isinstance(hint, types.UnionType) or get_origin(hint) is Union:
        inner = [argument for argument in get_args(hint) if argument is not type(None)]
        if len(inner) != 1:
            raise TypeError(f"a setting must have one type, or that type and None, got {hint}")
        kind, _, choices = _kind(inner[0])
        return kind, True, choices
    if get_origin(hint) is Literal:
        return str, False, get_args(hint)
    return get_origin(hint) or hint, False, ()


def _range_text(key: Key) -> str:
    if key.high is None:
        return f"at least {key.low}"
    if key.low is None:
        return f"at most {key.high}"
    return f"from {key.low} to {key.high}"
