"""An event log through the policy again: the same events, and the decisions that are made now beside those of then.

A *life* is one conductor's time: it begins with an empty policy, so only a log that has its beginning replays.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from conductor.decision_log.event_lines import Head, read_head, read_row
from conductor.decision_log.files import numbered, read_lines
from conductor.errors import LogFormatError, ObjectivesError
from conductor.policy import Conductor, PolicyConfig
from conductor.policy.decisions import Decision
from conductor.policy.events import Event, ObjectivesChanged

__all__ = ["EVENTS_STEM", "Life", "Step", "lives", "replay"]

EVENTS_STEM = "events"


@dataclass(frozen=True, slots=True)
class Life:
    """One conductor's files, in order."""

    number: int
    config: PolicyConfig
    paths: tuple[Path, ...]
    first_part: int  # 1, unless the files before it were rotated away


class Step(NamedTuple):
    """One event of a log: its decisions of then, and those made now."""

    path: Path
    line: int
    now_ns: int
    event: Event
    logged: list[Decision]
    made: list[Decision]


def lives(log: Path) -> list[Life]:
    """The lives that a log folder holds (or one of its files), the oldest first. Raises LogFormatError, OSError."""
    paths = list(numbered(log, EVENTS_STEM).values()) if log.is_dir() else [log]
    found: list[Life] = []
    for path in paths:
        head = _head(path)
        if head is None:
            continue
        last = found[-1] if found else None
        if last is not None and last.number == head.life and head.part == last.first_part + len(last.paths):
            found[-1] = Life(last.number, last.config, (*last.paths, path), last.first_part)
        else:
            found.append(Life(head.life, head.config, (path,), head.part))
    return found


def replay(life: Life, config: PolicyConfig | None = None, *, own_objectives: bool = False) -> Iterator[Step]:
    """Feed a life's events to a fresh policy, under its own configuration or another one. `own_objectives`: those of
    `config` hold throughout, whatever the log says of changes.

    Raises LogFormatError that names file and line: where a line cannot be read, where events were not written down
    (what follows would not be decided as it was), and at once for a life whose beginning is gone.
    """
    if life.first_part != 1:
        raise LogFormatError(
            f"{life.paths[0]}: this is part {life.first_part} of its conductor's life; those before it were rotated "
            "away, and without what they held nothing can be decided as it was"
        )
    conductor = Conductor(config if config is not None else life.config)
    for path in life.paths:
        for number, line in read_lines(path):
            if number == 1:
                continue
            try:
                row = read_row(line)
            except LogFormatError as error:
                raise LogFormatError(f"{path}, line {number}: {error}") from error
            if row.event is None:
                raise LogFormatError(
                    f"{path}, line {number}: {row.num_dropped} events were not written down here, because the writer "
                    "was behind or the disk was full; what follows cannot be decided as it was"
                )
            if own_objectives and isinstance(row.event, ObjectivesChanged):
                continue
            try:
                made = conductor.on_event(row.now_ns, row.event)
            except ObjectivesError as error:
                raise LogFormatError(f"{path}, line {number}: {error}") from error
            yield Step(path, number, row.now_ns, row.event, row.decisions, made)


def _head(path: Path) -> Head | None:
    """None for a file whose writer ended before its first line was whole."""
    for _, line in read_lines(path):
        try:
            return read_head(line)
        except LogFormatError as error:
            raise LogFormatError(f"{path}, line 1: {error}") from error
    return None
