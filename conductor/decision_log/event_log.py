"""Event log: its lines (header, events with their decisions, gaps), and replay through the policy.

A file starts with `{"version", "life", "part", "config"}`: the conductor's run, the file's number in it, and the
policy's configuration. Further lines are `{"now_ns", "event", "decisions"}`, or `{"dropped": events}` if the writer
fell behind or the disk was full; replay cannot reproduce the decisions after such a gap.

A recorded run starts with an empty policy, so a log can be replayed only from the beginning of a run.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from conductor.decision_log.codec import (
    config_from_json,
    config_to_json,
    decision_from_json,
    event_from_json,
    leaves,
    to_json,
)
from conductor.decision_log.files import json_line, numbered, read_lines
from conductor.errors import LogFormatError, ObjectivesError
from conductor.policy import Conductor, PolicyConfig
from conductor.policy.decisions import Decision
from conductor.policy.events import Event, ObjectivesChanged, RequestCompleted
from conductor.policy.objectives import HeaderRule

EVENTS_VERSION = 3
_DEFAULT_HEADERS: Mapping[int, HeaderRule] = {2: "any", 3: "tighten"}  # by version: of records that name no rule
_END_NS = 1 << 62  # of a monotonic clock


class EventLogHeader(NamedTuple):
    """First line of a file. `life`: identifies the conductor's run; `part`: number of the file in the run, from 1."""

    life: int
    part: int
    config: PolicyConfig
    version: int = EVENTS_VERSION


class EventRow(NamedTuple):
    """Event with its decisions, or, without an event, the number of events dropped at this point."""

    now_ns: int
    event: Event | None
    decisions: list[Decision]
    num_dropped: int = 0


def head_line(head: EventLogHeader) -> bytes:
    return json_line(
        {"version": EVENTS_VERSION, "life": head.life, "part": head.part, "config": config_to_json(head.config)}
    )


def event_line(now_ns: int, event: Event, decisions: Sequence[Decision]) -> bytes:
    return json_line({"now_ns": now_ns, "event": to_json(event), "decisions": [to_json(one) for one in decisions]})


def dropped_line(count: int) -> bytes:
    return json_line({"dropped": count})


def read_head(line: bytes) -> EventLogHeader:
    """Parse a header line. Raises LogFormatError."""
    row = _object(line)
    if "version" not in row:
        raise LogFormatError('not an event log: its first line has no "version"')
    version = row["version"]
    if type(version) is not int or version not in _DEFAULT_HEADERS:
        raise LogFormatError(f"version must be {' or '.join(map(str, _DEFAULT_HEADERS))}, got {str(version)[:80]}")
    return EventLogHeader(_number(row, "life"), _number(row, "part"), config_from_json(_member(row, "config")), version)


def read_row(line: bytes) -> EventRow:
    """Parse a line after the header. Raises LogFormatError."""
    row = _object(line)
    if "dropped" in row:
        return EventRow(0, None, [], _number(row, "dropped"))
    decisions = _member(row, "decisions")
    if not isinstance(decisions, list):
        raise LogFormatError(f"decisions must be a list, got {str(decisions)[:80]}")
    now_ns = _number(row, "now_ns")
    if not 0 <= now_ns < _END_NS:
        raise LogFormatError(f"now_ns must be from 0 to {_END_NS - 1}, got {now_ns:#x}")
    return EventRow(now_ns, event_from_json(_member(row, "event")), [decision_from_json(one) for one in decisions])


def _object(line: bytes) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise LogFormatError(f"not JSON: {error}") from error
    if not isinstance(row, dict):
        raise LogFormatError(f"the line must be a JSON object, got {str(row)[:80]}")
    return row


def _member(row: Mapping[str, Any], name: str) -> Any:
    if name not in row:
        raise LogFormatError(f'field "{name}" is missing; found {", ".join(sorted(row))}')
    return row[name]


def _number(row: Mapping[str, Any], name: str) -> int:
    value = _member(row, name)
    if type(value) is not int:
        raise LogFormatError(f"{name} must be an integer, got {str(value)[:80]}")
    return value


EVENTS_STEM = "events"


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """Files of one conductor run, in order."""

    number: int
    config: PolicyConfig
    paths: tuple[Path, ...]
    version: int  # of the log's format
    first_part: int  # number of the first file; above 1 if earlier files were removed by rotation


class ReplayStep(NamedTuple):
    """Event of a log with the recorded decisions (`logged`) and those made in the replay (`made`)."""

    path: Path
    line: int
    now_ns: int
    event: Event
    logged: list[Decision]
    made: list[Decision]

    def differences(self, absent: str) -> list[tuple[str, Any, Any]]:
        """Return (path, logged value, made value) of the fields that differ; `absent` stands for a missing value."""
        logged, made = (dict(leaves([to_json(one) for one in decisions])) for decisions in (self.logged, self.made))
        pairs = [(path, logged.get(path, absent), made.get(path, absent)) for path in {**logged, **made}]
        return [(path, then, now) for path, then, now in pairs if then != now]


def recorded_runs(log: Path) -> list[RecordedRun]:
    """Return the runs in a log folder (or one of its files), oldest first. Raises LogFormatError, OSError."""
    paths = list(numbered(log, EVENTS_STEM).values()) if log.is_dir() else [log]
    found: list[RecordedRun] = []
    for path in paths:
        head = _head(path)
        if head is None:
            continue
        last = found[-1] if found else None
        if last is not None and last.number == head.life and head.part == last.first_part + len(last.paths):
            found[-1] = replace(last, paths=(*last.paths, path))
        else:
            found.append(RecordedRun(head.life, head.config, (path,), head.version, head.part))
    return found


def replay(
    life: RecordedRun, config: PolicyConfig | None = None, *, own_objectives: bool = False
) -> Iterator[ReplayStep]:
    """Replay a run's events through a new policy, with the recorded or another configuration.

    `own_objectives`: keep the objectives of `config` and ignore recorded changes of objectives. Raises LogFormatError
    with file and line for an unreadable line and for dropped events (later decisions would differ), and immediately for
    a run whose beginning is missing.
    """
    if life.first_part != 1:
        raise LogFormatError(
            f"{life.paths[0]}: this is part {life.first_part} of its conductor's run; the earlier parts were removed "
            "by rotation, and decisions cannot be reproduced without them"
        )
    conductor = Conductor(config if config is not None else life.config, _DEFAULT_HEADERS[life.version])
    for path in life.paths:
        for number, line in read_lines(path):
            if number == 1:
                continue
            row = _row_at(path, number, line)
            if row.event is None:
                raise LogFormatError(
                    f"{path}, line {number}: {row.num_dropped} events are missing here, because the writer fell behind "
                    "or the disk was full; later decisions cannot be reproduced"
                )
            if own_objectives and isinstance(row.event, ObjectivesChanged):
                continue
            try:
                made = conductor.on_event(row.now_ns, row.event)
            except (ObjectivesError, OverflowError) as error:
                raise LogFormatError(f"{path}, line {number}: {error}") from error
            yield ReplayStep(path, number, row.now_ns, row.event, row.decisions, made)


@dataclass(frozen=True, slots=True)
class FoundDecision:
    """Event of a log with its decisions, and the circumstances of its replay.

    `slo_version`: version of the objectives in force; `num_different`: number of earlier events of the run whose logged
    decisions differ from the replayed ones.
    """

    step: ReplayStep
    slo_version: int
    num_different: int


def find_decisions(run: RecordedRun, numbers: Collection[int]) -> dict[int, FoundDecision]:
    """Replay a run up to the last of the events with these numbers (from 1) and return them, as far as it has them.

    Raises as `replay`.
    """
    found: dict[int, FoundDecision] = {}
    slo_version = num_different = 0
    for number, step in enumerate(replay(run), 1):
        if isinstance(step.event, ObjectivesChanged):
            slo_version = step.event.version
        if number in numbers:
            found[number] = FoundDecision(step, slo_version, num_different)
            if len(found) == len(numbers):
                break
        num_different += step.logged != step.made
    return found


def find_ends(run: RecordedRun, request_ids: Collection[str]) -> Iterator[RequestCompleted]:
    """Yield the ends of these requests' attempts in the order of the log, without a replay. Raises LogFormatError."""
    needles = [b'"request_id":' + json.dumps(request_id).encode("ascii") for request_id in request_ids]
    for path in run.paths:
        for number, line in read_lines(path):
            if number > 1 and b'"RequestCompleted"' in line and any(needle in line for needle in needles):
                event = _row_at(path, number, line).event
                if isinstance(event, RequestCompleted) and event.request_id in request_ids:
                    yield event


def _row_at(path: Path, number: int, line: bytes) -> EventRow:
    try:
        return read_row(line)
    except LogFormatError as error:
        raise LogFormatError(f"{path}, line {number}: {error}") from error


def _head(path: Path) -> EventLogHeader | None:
    """Return the file's header; None if the writer ended before writing it."""
    for _, line in read_lines(path):
        try:
            return read_head(line)
        except LogFormatError as error:
            raise LogFormatError(f"{path}, line 1: {error}") from error
    return None
