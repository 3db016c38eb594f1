"""Events and decisions as JSON objects and back, exactly: what is read back compares equal. Nothing else lives here."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from conductor.errors import LogFormatError
from conductor.policy.decisions import Decision
from conductor.policy.events import Event
from conductor.policy.matches import PoolMatch, PoolMatches

__all__ = ["decision_from_json", "event_from_json", "to_json"]


def to_json(value: Event | Decision) -> dict[str, Any]:
    """A JSON object with the class's name under "type"; fields that have their default value are left out."""
    return {"type": type(value).__name__, **_fields_to_json(value)}


def event_from_json(row: Mapping[str, Any]) -> Event:
    """The event that `to_json` wrote. Raises LogFormatError."""
    return _tagged(row, Event)  # type: ignore[no-any-return]


def decision_from_json(row: Mapping[str, Any]) -> Decision:
    """The decision that `to_json` wrote. Raises LogFormatError."""
    return _tagged(row, Decision)  # type: ignore[no-any-return]


def _fields_to_json(value: Any) -> dict[str, Any]:
    kind: type = type(value)
    pairs = ((name, default, getattr(value, name)) for name, default in _defaults(kind))
    return {name: _value_to_json(item) for name, default, item in pairs if item != default}


def _value_to_json(value: Any) -> Any:
    if isinstance(value, tuple | PoolMatches):
        return [_value_to_json(item) for item in value]
    return _fields_to_json(value) if is_dataclass(value) else value


@cache
def _defaults(kind: type) -> tuple[tuple[str, Any], ...]:
    return tuple((field.name, field.default) for field in fields(kind))


@cache
def _kinds(union: UnionType) -> dict[str, type]:
    return {kind.__name__: kind for kind in get_args(union)}


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _tagged(row: Mapping[str, Any], union: UnionType) -> Any:
    if not isinstance(row, Mapping) or row.get("type") not in _kinds(union):
        raise LogFormatError(f"no known type in {str(row)[:120]}: expected one of {', '.join(_kinds(union))}")
    kind = _kinds(union)[row["type"]]
    return _object(kind, {name: value for name, value in row.items() if name != "type"})


def _object(kind: Any, row: Any) -> Any:
    if not isinstance(row, Mapping):
        raise LogFormatError(f"{kind.__name__}: expected an object, got {str(row)[:80]}")
    hints = _hints(kind)
    unknown = sorted(set(row) - set(hints))
    if unknown:
        raise LogFormatError(f"{kind.__name__}: unknown fields {', '.join(unknown)}")
    try:
        return kind(**{name: _value(hints[name], value, f"{kind.__name__}.{name}") for name, value in row.items()})
    except TypeError as error:
        raise LogFormatError(f"{kind.__name__}: {error}") from error


def _value(hint: Any, value: Any, where: str) -> Any:
    origin = get_origin(hint)
    if is_dataclass(hint):
        return _object(hint, value)
    if hint is PoolMatches:
        return PoolMatches.of(*_tuple((PoolMatch, ...), value, where))
    if origin is tuple:
        return _tuple(get_args(hint), value, where)
    if origin is Literal:
        ok = value in get_args(hint)
    elif origin in (Union, UnionType):
        raise LogFormatError(f"{where}: union fields have no JSON form")
    else:
        # JSON has one kind of number: whole seconds come back as int.
        ok = isinstance(value, hint) or (hint is float and type(value) is int)
    if not ok:
        raise LogFormatError(f"{where}: {value!r} is no {hint}")
    return float(value) if hint is float else value


def _tuple(items: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise LogFormatError(f"{where}: expected a list, got {value!r}")
    hints = [items[0]] * len(value) if items[-1] is Ellipsis else list(items)
    if len(hints) != len(value):
        raise LogFormatError(f"{where}: expected {len(hints)} items, got {len(value)}")
    return tuple(_value(hint, item, where) for hint, item in zip(hints, value, strict=True))
