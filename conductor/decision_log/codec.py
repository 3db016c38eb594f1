"""Conversion of events, decisions and configurations to JSON objects and back; the round trip is exact."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from conductor.errors import LogFormatError
from conductor.policy.decisions import Considered, Decision
from conductor.policy.events import Event, PoolMatch, PoolMatches
from settings.conductor import PolicyConfig

__all__ = ["config_from_json", "config_to_json", "decision_from_json", "event_from_json", "leaves", "to_json"]


_PLAIN: Final = frozenset({str, int, float, bool, NoneType})  # types that JSON has as well
# Fields of PolicyConfig whose name in logs differs.
LOGGED_NAMES: Final = {
    "ttft_slo_s": "ttft_objective_s",
    "tbt_slo_s": "tbt_objective_s",
    "colocated_prefill": "undivided",
}
# Fields of other classes whose name in logs differs.
_LOGGED_NAMES_OF: Final[Mapping[type, Mapping[str, str]]] = {Considered: {"colocated": "undivided"}}
# Values to assume for settings that logs of older versions lack.
_OLD_VALUES: Final = {
    "attained_share": 0.0,
    "report_timeout_s": 0.0,
    "ttft_reserve": 0.0,
    "tbt_reserve": 0.0,
}
# Setting that came with the present rule for role switches; without them, no decision depends on it.
_ROLE_RULE: Final = "role_share"
_FIELD_NAMES: Final = {logged: name for name, logged in LOGGED_NAMES.items()}
# Settings of a former rule for the mode `predicted`; decisions in other modes do not depend on them.
_FORMER_RESERVE: Final = ("prefill_reserve", "decode_reserve")


def to_json(value: Event | Decision) -> dict[str, Any]:
    """Return a JSON object with the class's name under "type"; fields with their default value are omitted."""
    return {"type": type(value).__name__, **_fields_to_json(value)}


def event_from_json(row: Mapping[str, Any]) -> Event:
    """Return the event that `to_json` wrote. Raises LogFormatError if `row` is not one."""
    return _tagged(row, Event)  # type: ignore[no-any-return]


def decision_from_json(row: Mapping[str, Any]) -> Decision:
    """Return the decision that `to_json` wrote. Raises LogFormatError if `row` is not one."""
    return _tagged(row, Decision)  # type: ignore[no-any-return]


def config_to_json(config: PolicyConfig) -> dict[str, Any]:
    """Return a JSON object with all fields, default values included, so that later defaults do not change a replay."""
    values = {each.name: _value_to_json(getattr(config, each.name)) for each in fields(config)}
    return {LOGGED_NAMES.get(name, name): value for name, value in values.items()}


def config_from_json(row: Any) -> PolicyConfig:
    """Return the configuration that `config_to_json` wrote. Raises LogFormatError if `row` is not one."""
    if isinstance(row, Mapping):
        if row.get("admission_mode") == "predicted" and any(row.get(name) for name in _FORMER_RESERVE):
            raise LogFormatError(
                "written by a version whose mode `predicted` had another rule for expensive requests "
                f"({', '.join(_FORMER_RESERVE)}): replay it with that version"
            )
        if row.get("role_switching", "off") != "off" and _ROLE_RULE not in row:
            raise LogFormatError(
                f"written by a version that switched the role of one node at a time, and without {_ROLE_RULE}: "
                "replay it with that version"
            )
        row = {name: value for name, value in row.items() if name not in _FORMER_RESERVE}
        row = _OLD_VALUES | {_FIELD_NAMES.get(name, name): value for name, value in row.items()}
    return _object(PolicyConfig, row)  # type: ignore[no-any-return]


def _fields_to_json(value: Any) -> dict[str, Any]:
    kind: type = type(value)
    found = {}
    for name, logged, default in _defaults(kind):
        item = getattr(value, name)
        if item is not default and item != default:
            found[logged] = item if type(item) in _PLAIN else _value_to_json(item)
    return found


def _value_to_json(value: Any) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, tuple | PoolMatches):
        return [_value_to_json(item) for item in value]
    if isinstance(value, Mapping):
        return {name: _value_to_json(item) for name, item in value.items()}
    return _fields_to_json(value) if is_dataclass(value) else value


@cache
def _defaults(kind: type) -> tuple[tuple[str, str, Any], ...]:
    """(Name, name in logs, default) of each field."""
    logged = _LOGGED_NAMES_OF.get(kind, {})
    return tuple((field.name, logged.get(field.name, field.name), field.default) for field in fields(kind))


@cache
def _kinds(union: UnionType) -> dict[str, type]:
    return {kind.__name__: kind for kind in get_args(union)}


@cache
def _hints(kind: type) -> dict[str, Any]:
    """Types of the fields by their names in logs."""
    logged = _LOGGED_NAMES_OF.get(kind, {})
    return {logged.get(name, name): hint for name, hint in get_type_hints(kind).items()}


@cache
def _fields_by_logged_name(kind: type) -> dict[str, str]:
    return {logged: name for name, logged in _LOGGED_NAMES_OF.get(kind, {}).items()}


def _tagged(row: Mapping[str, Any], union: UnionType) -> Any:
    kinds = _kinds(union)
    if not isinstance(row, Mapping) or not isinstance(row.get("type"), str) or row["type"] not in kinds:
        raise LogFormatError(f"no known type in {str(row)[:120]}: expected one of {', '.join(kinds)}")
    kind = kinds[row["type"]]
    return _object(kind, {name: value for name, value in row.items() if name != "type"})


def _object(kind: Any, row: Any) -> Any:
    if not isinstance(row, Mapping):
        raise LogFormatError(f"{kind.__name__} must be a JSON object, got {str(row)[:80]}")
    hints = _hints(kind)
    unknown = sorted(set(row) - set(hints))
    if unknown:
        raise LogFormatError(f"{kind.__name__}: unknown fields {', '.join(unknown)}")
    try:
        values = {name: _value(hints[name], value, f"{kind.__name__}.{name}") for name, value in row.items()}
        renamed = _fields_by_logged_name(kind)
        return kind(**{renamed.get(name, name): value for name, value in values.items()})
    except (TypeError, ValueError) as error:
        raise error if isinstance(error, LogFormatError) else LogFormatError(f"{kind.__name__}: {error}") from error


def _value(hint: Any, value: Any, where: str) -> Any:
    origin = get_origin(hint)
    if is_dataclass(hint):
        return _object(hint, value)
    if hint is PoolMatches:
        try:
            return PoolMatches.of(*_tuple((PoolMatch, ...), value, where))
        except OverflowError as error:
            raise LogFormatError(f"{where}: {error}") from error
    if origin is Mapping:
        if not isinstance(value, Mapping):
            raise LogFormatError(f"{where} must be a JSON object, got {str(value)[:80]}")
        return {name: _value(get_args(hint)[1], item, f"{where}.{name}") for name, item in value.items()}
    if origin is tuple:
        return _tuple(get_args(hint), value, where)
    if origin is Literal:
        ok = any(type(value) is type(one) and value == one for one in get_args(hint))
    elif origin in (Union, UnionType):
        (other,) = (one for one in get_args(hint) if one is not NoneType)
        return None if value is None else _value(other, value, where)
    else:
        # JSON has one number type: whole seconds are read back as int.
        ok = type(value) is hint or (hint is float and type(value) is int)
    if not ok:
        raise LogFormatError(f"{where}: expected {getattr(hint, '__name__', hint)}, got {str(value)[:80]!r}")
    try:
        return float(value) if hint is float else value
    except OverflowError as error:
        raise LogFormatError(f"{where}: {error}") from error


def _tuple(items: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise LogFormatError(f"{where} must be a list, got {value!r}")
    hints = [items[0]] * len(value) if items[-1] is Ellipsis else list(items)
    if len(hints) != len(value):
        raise LogFormatError(f"{where}: expected {len(hints)} items, got {len(value)}")
    return tuple(_value(hint, item, where) for hint, item in zip(hints, value, strict=True))


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested objects and lists with their paths."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{name}.{key}" if name else key)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from leaves(item, f"{name}[{number}]")
    else:
        yield name, value
