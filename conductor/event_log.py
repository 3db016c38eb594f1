"""The decision log: every event with its decisions as JSONL, and its replay. Hashes and counts only, never text.

The first row of each file holds the policy's configuration; every further row is
`{"now_ns": int, "event": {...}, "decisions": [...], "keys": [uint64, ...]}`, `keys` (of the prompt's full blocks) only
where a request arrived. A log that was never cut short replays to the same decisions.
"""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from conductor.errors import LogFormatError
from conductor.policy import Conductor, Objectives, PolicyConfig
from conductor.policy.codec import decision_from_json, event_from_json, to_json
from conductor.policy.decisions import Decision
from conductor.policy.events import Event

__all__ = ["LOG_VERSION", "EventLog", "replay"]

LOG_VERSION = 1


class EventLog:
    """Writes one conductor's log. A new conductor starts a new file; former ones are kept as `.1`, `.2`, ... ."""

    def __init__(self, path: Path, config: PolicyConfig, *, max_bytes: int, max_files: int) -> None:
        self._path = path
        self._header = json.dumps({"version": LOG_VERSION, "config": dataclasses.asdict(config)})
        self._max_bytes = max_bytes
        self._max_files = max_files
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO | None = None
        self._nbytes = 0

    def write(self, now_ns: int, event: Event, decisions: Sequence[Decision], keys: Sequence[int]) -> None:
        """Add one row; it is on disk after the next `flush`."""
        row: dict[str, Any] = {"now_ns": now_ns, "event": to_json(event), "decisions": [to_json(d) for d in decisions]}
        if keys:
            row["keys"] = list(keys)
        line = json.dumps(row, separators=(",", ":"))
        if self._file is None or self._nbytes + len(line) + 1 > self._max_bytes:
            self._rotate()
        self._put(line)

    def flush(self) -> None:
        """Hand what was written to the operating system."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Flush and close."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _rotate(self) -> None:
        self.close()
        for number in range(self._max_files - 1, -1, -1):
            old = _numbered(self._path, number)
            if old.is_file():
                old.replace(_numbered(self._path, number + 1))
        self._file = self._path.open("w", encoding="ascii")
        self._nbytes = 0
        self._put(self._header)

    def _put(self, line: str) -> None:
        assert self._file is not None
        self._file.write(line + "\n")
        self._nbytes += len(line) + 1


def replay(*paths: Path) -> Iterator[tuple[int, Event, list[Decision], list[Decision]]]:
    """Feed a log (its files oldest first) to a fresh policy: (now_ns, event, logged decisions, decisions made now).

    Raises LogFormatError naming file and line.
    """
    conductor: Conductor | None = None
    for path in paths:
        with path.open(encoding="ascii") as file:
            for number, line in enumerate(file, 1):
                try:
                    row = json.loads(line)
                    if number == 1:
                        conductor = conductor or Conductor(_config(row))
                        continue
                    event = event_from_json(row["event"])
                    logged = [decision_from_json(decision) for decision in row["decisions"]]
                    now_ns = int(row["now_ns"])
                except (ValueError, KeyError, TypeError) as error:
                    raise LogFormatError(f"{path}, line {number}: {error}") from error
                assert conductor is not None
                yield now_ns, event, logged, conductor.on_event(now_ns, event)


def _config(row: dict[str, Any]) -> PolicyConfig:
    if row.get("version") != LOG_VERSION:
        raise LogFormatError(f"version {row.get('version')!r}: expected {LOG_VERSION}")
    config = dict(row["config"])
    objectives = {model: Objectives(**own) for model, own in config.pop("model_objectives", {}).items()}
    return PolicyConfig(**config, model_objectives=objectives)


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}") if number else path
