"""Where values come from: a YAML file, MOONPOOL_* variables over it, flags over both. Knows no key by name."""

import difflib
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from moonpool.config.fields import Setting, check, composite_settings, composite_slices, slice_settings
from moonpool.errors import ConfigError, UnknownKey

PREFIX = "MOONPOOL_"
CONFIG_VARIABLE = "MOONPOOL_CONFIG"

C = TypeVar("C")


def load(
    composite: type[C],
    *,
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    config_file: Path | None,
    known: Mapping[str, Setting],
    reserved_variables: Iterable[str] = (),
) -> C:
    """Build `composite` from its sources; a later source wins: file, environment, flags.

    `known` holds every key of every role: one file serves a whole cluster, so a role passes over the keys of others,
    but a key that nobody reads is refused. `flags` maps keys to text or values; None = not given.
    Raises UnknownKey, or ConfigError that names the source of the wrong value.
    """
    if config_file is None and environ.get(CONFIG_VARIABLE):
        config_file = Path(environ[CONFIG_VARIABLE])
    wanted = composite_settings(composite)
    values: dict[str, Any] = {}
    for key, (value, source) in _file_values(config_file, known).items():
        if key in wanted:
            values[key] = convert(wanted[key], value, source)
    for key, (text, source) in _environment_values(environ, known, {CONFIG_VARIABLE, *reserved_variables}).items():
        if key in wanted:
            values[key] = convert(wanted[key], text, source)
    for key, value in flags.items():
        if value is not None:
            values[key] = convert(wanted[key], value, wanted[key].flag)
    parts = {
        name: slice_class(**{key: values[key] for key in slice_settings(slice_class) if key in values})
        for name, slice_class in composite_slices(composite).items()
    }
    return composite(**parts)


def convert(declared: Setting, value: Any, source: str) -> Any:
    """`value`, text or YAML's type, as the key's type, checked; ConfigError names `source`."""
    try:
        converted = _converted(declared, value, source)
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from error
    check(declared, converted, source)
    return converted


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate that `name` most likely meant."""
    matches = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.5)
    return matches[0] if matches else None


def read_yaml(path: Path, what: str) -> Any:
    """What a YAML file holds, None where it is empty. Raises ConfigError, for a key given twice, too."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the {what} {path}: {error}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error


def parse_size(text: str) -> int:
    """Bytes from "1073741824", "512MiB", "1.5 GiB" or "2GB"; ValueError otherwise."""
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
        raise ValueError(f"{text!r} is no size: expected e.g. 512MiB or 2GiB") from None
    if not math.isfinite(nbytes):
        raise ValueError(f"{text!r} is no size: expected e.g. 512MiB or 2GiB")
    return int(nbytes)


def _converted(declared: Setting, value: Any, source: str) -> Any:
    if value is None or (declared.kind is not str and value == ""):
        return None if declared.optional else value
    if declared.key.item is not None:
        items = [part for part in value.split(";") if part.strip()] if isinstance(value, str) else value
        if not isinstance(items, list):
            raise ValueError(f"expected a list, not {type(value).__name__}")
        return tuple(declared.key.item.parse(item, source) for item in items)
    if isinstance(value, str):
        return _from_text(declared, value)
    if declared.kind is str and value is False and "off" in declared.key.choices:
        return "off"  # which YAML takes for a false
    if declared.kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ValueError("it is too large") from None
    if declared.kind is tuple and isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    return value


def _from_text(declared: Setting, text: str) -> Any:
    if declared.key.parse is not None:
        return declared.key.parse(text)
    if declared.kind is bool:
        words = {
            "1": True,
            "true": True,
            "yes": True,
            "on": True,
            "0": False,
            "false": False,
            "no": False,
            "off": False,
        }
        if text.lower() not in words:
            raise ValueError(f"{text!r} is neither true nor false")
        return words[text.lower()]
    if declared.kind is int:
        try:
            return int(text)
        except ValueError:
            raise ValueError(f"{text!r} is no whole number") from None
    if declared.kind is float:
        try:
            number = float(text)
        except ValueError:
            raise ValueError(f"{text!r} is no number") from None
        if not math.isfinite(number):
            raise ValueError(f"{text!r} is no finite number")
        return number
    if declared.kind is Path:
        try:
            return Path(text).expanduser()
        except RuntimeError:  # pathlib's, for ~NAME
            raise ValueError(f"{text!r} begins with the home of a user who has none here") from None
    if declared.kind is tuple:
        return tuple(item.strip() for item in text.split(",") if item.strip())
    return text


def _file_values(path: Path | None, known: Mapping[str, Setting]) -> dict[str, tuple[Any, str]]:
    """Key -> (value, "FILE: key")."""
    if path is None:
        return {}
    document = read_yaml(path, "configuration file")
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"{path} must hold `key: value` lines, not {type(document).__name__}")
    for key in document:
        if key not in known:
            raise UnknownKey(_unknown(f"{path}: unknown key {key!r}", nearest(str(key).replace("-", "_"), known)))
    return {key: (value, f"{path}: {key}") for key, value in document.items()}


def _environment_values(
    environ: Mapping[str, str], known: Mapping[str, Setting], reserved: set[str]
) -> dict[str, tuple[str, str]]:
    """Key -> (text, variable)."""
    variables = {declared.variable: key for key, declared in known.items()}
    values = {}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or variable in reserved:
            continue
        if variable not in variables:
            raise UnknownKey(_unknown(f"unknown environment variable {variable}", nearest(variable, variables)))
        values[variables[variable]] = (text, variable)
    return values


def _unknown(problem: str, suggestion: str | None) -> str:
    return f"{problem}; did you mean {suggestion}?" if suggestion else f"{problem}; see `moonpool config` for all keys"


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice, of which plain YAML silently keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen:
                raise yaml.constructor.ConstructorError(
                    "while reading a mapping", node.start_mark, f"the key {key!r} is given twice", key_node.start_mark
                )
            if isinstance(key, str):
                seen.add(key)
        return super().construct_mapping(node, deep)
