"""What a change of the record of objectives changes, line by line, for people. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

from conductor.policy.objectives import SloRecord, tell_record

__all__ = ["differences"]


def differences(before: SloRecord, after: SloRecord) -> list[str]:
    """Such as "classes.chat.ttft: 5x -> 3x", by place; [] where the two say the same."""
    old, new = dict(_lines(tell_record(before), "")), dict(_lines(tell_record(after), ""))
    return [
        f"{place}: {old.get(place, 'not there')} -> {new.get(place, 'not there')}"
        for place in sorted(old.keys() | new.keys())
        if old.get(place) != new.get(place)
    ]


def _lines(value: Any, place: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and (value or not place):
        for key, item in value.items():
            yield from _lines(item, f"{place}.{key}" if place else str(key))
    else:
        yield place, "(empty)" if isinstance(value, Mapping) else str(value)
