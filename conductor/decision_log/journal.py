"""Journal of open records in a small file, from which the next conductor completes the records of a killed one.

Lines are `{"open": record}`, with the latest state of that request, and `{"over": request_id}`.
"""

import contextlib
import json
import os
from pathlib import Path

from conductor.decision_log.files import json_line, read_lines
from conductor.decision_log.records import Record, RecordChange

__all__ = ["Journal", "read_journal"]

_NAME = "open.jsonl"
_LEAST_BYTES = 1 << 20  # smaller files are not rewritten, even if most lines are obsolete


class Journal:
    """Append-only file with a single writer; `read_journal` reads it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / _NAME
        self._known: dict[str, int] = {}  # size of each open record's last line
        self._known_nbytes = 0  # sum of `_known`
        self._fd = -1
        self._nbytes = 0

    def rewrite(self, records: list[Record]) -> None:
        """Replace the contents atomically by these open records. Raises OSError."""
        lines = [(record["request_id"], _line("open", record)) for record in records]
        fresh = self._path.with_suffix(".part")
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            _write(fd, b"".join(line for _, line in lines))
            fresh.replace(self._path)
        except OSError:
            os.close(fd)
            fresh.unlink(missing_ok=True)
            raise
        self.close()
        self._fd = fd
        self._known = {request_id: len(line) for request_id, line in lines}
        self._nbytes = self._known_nbytes = sum(self._known.values())

    def note(self, changes: list[RecordChange]) -> None:
        """Append changes; requests that arrived and ended since the last call are skipped. Raises OSError."""
        last = {change.record["request_id"]: change for change in changes}
        parts = []
        for request_id, change in last.items():
            if not change.is_over:
                line = _line("open", change.record)
                parts.append(line)
                self._known_nbytes += len(line) - self._known.get(request_id, 0)
                self._known[request_id] = len(line)
            elif (nbytes := self._known.pop(request_id, None)) is not None:
                parts.append(_line("over", request_id))
                self._known_nbytes -= nbytes
        data = b"".join(parts)
        try:
            _write(self._fd, data)
        except OSError:
            self.close()  # a line may be incomplete, so the file must be rewritten
            raise
        self._nbytes += len(data)

    @property
    def is_stale(self) -> bool:
        """True if most lines are obsolete or a write failed: `rewrite` is due."""
        if self._fd < 0:
            return True
        return self._nbytes > _LEAST_BYTES and self._nbytes > 4 * self._known_nbytes

    def close(self) -> None:
        """Close the file without removing it."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def read_journal(folder: Path) -> dict[str, Record]:
    """Return the open records by request. The journal may be in use, or end with an incomplete line."""
    found: dict[str, Record] = {}
    with contextlib.suppress(FileNotFoundError):
        for _, line in read_lines(folder / _NAME):
            try:
                row = json.loads(line)
                if "open" in row:
                    record = row["open"]
                    request_id = record["request_id"]
                    if isinstance(request_id, str) and isinstance(record["attempts"], list):
                        found[request_id] = record
                else:
                    found.pop(row["over"], None)
            except (ValueError, KeyError, TypeError, RecursionError):
                continue  # a line truncated by a full disk
    return found


def _line(kind: str, value: Record | str) -> bytes:
    return json_line({kind: value})


def _write(fd: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]
