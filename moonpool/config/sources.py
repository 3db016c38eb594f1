"""Loading of a configuration: a YAML file, MOONPOOL_* variables over it, flags over both."""

import difflib
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from moonpool.errors import ConfigError, UnknownKey
from settings.keys import (
    InvalidSetting,
    Setting,
    assemble,
    check,
    composite_settings,
    flag_of,
    kind_text,
    parse_path,
    variable_of,
)
from settings.yaml_nesting import NestedTooDeeply, events_of

PREFIX = "MOONPOOL_"
CONFIG_VARIABLE = "MOONPOOL_CONFIG"
URL_VARIABLE = "MOONPOOL_URL"  # of the API server that commands call; no setting

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
    """Build `composite` from its sources: flags override the environment, which overrides the file.

    `known` holds the settings of all roles: one file configures a whole cluster, so a role ignores the keys of others,
    but rejects a key that no role has. `flags` maps YAML keys to texts or values; None = not given.
    Every source may use an earlier name of a setting, but not two names of one.
    Raises UnknownKey, or ConfigError that names the source of the wrong value.
    """
    if config_file is None and environ.get(CONFIG_VARIABLE):
        config_file = Path(environ[CONFIG_VARIABLE])
    read = composite_settings(composite)
    file_values = _file_values(config_file, known)
    environment_values = _environment_values(environ, known, {CONFIG_VARIABLE, URL_VARIABLE, *reserved_variables})
    given = {
        key: (value, read[key].flag if key in read else flag_of(key))
        for key, value in flags.items()
        if value is not None
    }
    try:
        values: dict[str, Any] = {}
        for source_values in (file_values, environment_values, given):
            for key, (value, source) in _under_current_names(source_values, known).items():
                if key in read:
                    values[read[key].field] = convert(read[key], value, source)
        return assemble(composite, **values)
    except InvalidSetting as error:
        raise ConfigError(str(error)) from error


def convert(declared: Setting, value: Any, source: str) -> Any:
    """Return `value`, a text or a YAML value, as the setting's type. Raises InvalidSetting that names `source`."""
    try:
        converted = _converted(declared, value, source)
    except InvalidSetting:
        raise
    except ValueError as error:
        raise InvalidSetting(f"{source} {error}") from error
    check(declared, converted, source)
    return converted


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate most similar to `name`; None if none is similar."""
    matches = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.5)
    return matches[0] if matches else None


def read_yaml(path: Path, what: str) -> Any:
    """Return the content of a YAML file; None if it is empty. Raises ConfigError, also for a duplicate key."""
    try:
        text = path.read_text(encoding="utf-8")
        for _ in events_of(text):
            pass
        return yaml.load(text, Loader=_StrictLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the {what} {path}: {error}") from error
    except NestedTooDeeply as error:
        raise ConfigError(f"{path}: {error}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error


def _converted(declared: Setting, value: Any, source: str) -> Any:
    if declared.key.none_word:
        if value == declared.key.none_word:
            return None
        if value is None:
            raise ValueError(f"must be {kind_text(declared)}, got null")
    elif value is None or (declared.kind is not str and value == ""):
        return None if declared.optional else value
    if declared.key.item is not None:
        items = [part for part in value.split(";") if part.strip()] if isinstance(value, str) else value
        if not isinstance(items, list):
            raise ValueError(f"must be a list, got {type(value).__name__}")
        return tuple(declared.key.item.parse(item, source) for item in items)
    if isinstance(value, str):
        return _from_text(declared, value)
    if declared.kind is str and value is False and "off" in declared.choices:
        return "off"  # YAML reads a bare off as false
    if declared.kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ValueError("must be a smaller number") from None
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
            raise ValueError(f"must be true or false, got {text!r}")
        return words[text.lower()]
    if declared.kind is int:
        try:
            return int(text)
        except ValueError:
            raise ValueError(f"must be {kind_text(declared)}, got {text!r}") from None
    if declared.kind is float:
        try:
            number = float(text)
        except ValueError:
            raise ValueError(f"must be a number, got {text!r}") from None
        if not math.isfinite(number):
            raise ValueError(f"must be a finite number, got {text!r}")
        return number
    if declared.kind is Path:
        return parse_path(text)
    if declared.kind is tuple:
        return tuple(item.strip() for item in text.split(",") if item.strip())
    return text


def _file_values(path: Path | None, known: Mapping[str, Setting]) -> dict[str, tuple[Any, str]]:
    """Return (value, "FILE: key") by key."""
    if path is None:
        return {}
    document = read_yaml(path, "configuration file")
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"{path} must contain `key: value` lines, got {type(document).__name__}")
    for key in document:
        if key not in known and key not in _current_names(known):
            raise UnknownKey(_unknown(f"{path}: unknown key {key!r}", nearest(str(key).replace("-", "_"), known)))
    return {key: (value, f"{path}: {key}") for key, value in document.items()}


def _environment_values(
    environ: Mapping[str, str], known: Mapping[str, Setting], reserved: set[str]
) -> dict[str, tuple[str, str]]:
    """Return (text, variable) by key."""
    variables = {declared.variable: key for key, declared in known.items()}
    former_variables = {variable_of(former): former for former in _current_names(known)}
    values = {}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or variable in reserved:
            continue
        key = variables.get(variable) or former_variables.get(variable)
        if key is None:
            raise UnknownKey(_unknown(f"unknown environment variable {variable}", nearest(variable, variables)))
        values[key] = (text, variable)
    return values


def _current_names(known: Mapping[str, Setting]) -> dict[str, str]:
    """Return the current YAML key by each earlier one."""
    return {former: key for key, declared in known.items() for former in declared.key.former_names}


def _under_current_names(
    values: Mapping[str, tuple[Any, str]], known: Mapping[str, Setting]
) -> dict[str, tuple[Any, str]]:
    """Return the values of one source by current key. Raises InvalidSetting if a setting is given by two names."""
    current = _current_names(known)
    found: dict[str, tuple[Any, str]] = {}
    for key in sorted(values, key=current.__contains__):
        name = current.get(key, key)
        if name in found:
            raise InvalidSetting(
                f"{values[key][1]} and {found[name][1]} are two names of one setting: omit {values[key][1]}"
            )
        found[name] = values[key]
    return found


def _unknown(problem: str, suggestion: str | None) -> str:
    return f"{problem}; did you mean {suggestion}?" if suggestion else f"{problem}; see `moonpool config` for all keys"


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML that rejects a key given twice; plain YAML silently keeps the last."""

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
