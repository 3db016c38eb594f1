"""The event log's lines: a head, events with their decisions, gaps. Their form, not the files they stand in.

A file begins with `{"version", "life", "part", "config"}`: which conductor's life it is of, and the policy's
configuration. The lines after it are `{"now_ns", "event", "decisions"}`, or `{"dropped": events}` where the writer fell
behind or the disk was full, and what follows cannot be replayed to the same decisions.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from conductor.decision_log.lines import json_line
from conductor.errors import LogFormatError
from conductor.policy import PolicyConfig
from conductor.policy.codec import config_from_json, config_to_json, decision_from_json, event_from_json, to_json
from conductor.policy.decisions import Decision
from conductor.policy.events import Event

__all__ = ["EVENTS_VERSION", "Head", "Row", "dropped_line", "event_line", "head_line", "read_head", "read_row"]

EVENTS_VERSION = 2


class Head(NamedTuple):
    """A file's first line."""

    life: int
    part: int  # of this life's files, from 1
    config: PolicyConfig


class Row(NamedTuple):
    """An event and the decisions that were made on it; or, with no event, how many were not written down here."""

    now_ns: int
    event: Event | None
    decisions: list[Decision]
    num_dropped: int = 0


def head_line(head: Head) -> bytes:
    return json_line(
        {"version": EVENTS_VERSION, "life": head.life, "part": head.part, "config": config_to_json(head.config)}
    )


def event_line(now_ns: int, event: Event, decisions: Sequence[Decision]) -> bytes:
    return json_line({"now_ns": now_ns, "event": to_json(event), "decisions": [to_json(one) for one in decisions]})


def dropped_line(count: int) -> bytes:
    return json_line({"dropped": count})


def read_head(line: bytes) -> Head:
    """Raises LogFormatError."""
    row = _object(line)
    if "version" not in row:
        raise LogFormatError('this is no event log: its first line has no "version"')
    if row["version"] != EVENTS_VERSION:
        raise LogFormatError(f"version {row['version']!r}: this Moonpool reads version {EVENTS_VERSION}")
    return Head(_number(row, "life"), _number(row, "part"), config_from_json(_member(row, "config")))


def read_row(line: bytes) -> Row:
    """Raises LogFormatError."""
    row = _object(line)
    if "dropped" in row:
        return Row(0, None, [], _number(row, "dropped"))
    decisions = _member(row, "decisions")
    if not isinstance(decisions, list):
        raise LogFormatError(f"decisions: expected a list, got {str(decisions)[:80]}")
    return Row(
        _number(row, "now_ns"), event_from_json(_member(row, "event")), [decision_from_json(one) for one in decisions]
    )


def _object(line: bytes) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise LogFormatError(f"no JSON: {error}") from error
    if not isinstance(row, dict):
        raise LogFormatError(f"expected an object, got {str(row)[:80]}")
    return row


def _member(row: Mapping[str, Any], name: str) -> Any:
    if name not in row:
        raise LogFormatError(f'no "{name}" among {", ".join(sorted(row))}')
    return row[name]


def _number(row: Mapping[str, Any], name: str) -> int:
    value = _member(row, name)
    if type(value) is not int:
        raise LogFormatError(f"{name}: expected a whole number, got {str(value)[:80]}")
    return value
