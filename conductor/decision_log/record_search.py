"""Search for a request's records in a log folder, which may be in use by a writer."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conductor.decision_log.files import numbered, open_file
from conductor.decision_log.journal import read_journal
from conductor.decision_log.records import Record

__all__ = ["DECISIONS_STEM", "FoundRecords", "find_records"]

DECISIONS_STEM = "decisions"


@dataclass(frozen=True, slots=True)
class FoundRecords:
    """Result of a search: records of one request id, oldest first (clients may reuse ids), and the extent of the log.

    `oldest_at`: time of the log's oldest request; `num_removed_files`: number of older files removed; `damaged`: files
    that could not be read, with the reason.
    """

    records: list[Record]
    oldest_at: float | None
    num_removed_files: int
    damaged: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the JSON of the conductor's reply to Explain."""
        return {
            "records": self.records,
            "oldest_at": self.oldest_at,
            "removed_files": self.num_removed_files,
            "damaged": list(self.damaged),
        }


def find_records(folder: Path, request_id: str) -> FoundRecords:
    """Return all records of a request in the folder. Raises OSError if the folder cannot be read."""
    needle = b'"request_id":' + json.dumps(request_id).encode("ascii") + b","
    under_way = read_journal(folder).get(request_id)  # read first: a record that ends meanwhile is in the files
    files = numbered(folder, DECISIONS_STEM)
    records: list[Record] = []
    damaged: list[str] = []
    oldest_at: float | None = None
    for path in files.values():
        try:
            for line in _lines_with(path, needle, first=oldest_at is None):
                record = _record(line)
                if record is None:
                    continue
                oldest_at = record["at"] if oldest_at is None else oldest_at
                if record["request_id"] == request_id:
                    records.append(record)
        except FileNotFoundError:  # removed by rotation since the folder was listed
            continue
        except OSError as error:
            damaged.append(f"{path.name}: {error.strerror or error}")
    if under_way is not None and not any(_same(record, under_way) for record in records):
        records.append(under_way)
    return FoundRecords(records, oldest_at, min(files, default=1) - 1, tuple(damaged))


def _lines_with(path: Path, needle: bytes, *, first: bool) -> list[bytes]:
    """Return the complete lines that contain `needle` and, if `first`, the first line of the file.

    Searches large chunks instead of lines, since most lines do not match.
    """
    found: list[bytes] = []
    with open_file(path) as pieces:
        rest = b""
        for piece in pieces:
            data = rest + piece
            end = data.rfind(b"\n") + 1
            whole, rest = data[:end], data[end:]
            if first and whole:
                found.append(whole[: whole.index(b"\n")])
                first = False
            at = whole.find(needle)
            while at >= 0:
                begin, stop = whole.rfind(b"\n", 0, at) + 1, whole.index(b"\n", at)
                line = whole[begin:stop]
                if line not in found:
                    found.append(line)
                at = whole.find(needle, stop)
    return found


def _record(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
        is_one = isinstance(record["request_id"], str) and isinstance(record["attempts"], list)
        return record if is_one and isinstance(record["at"], int | float) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _same(one: Record, other: Record) -> bool:
    return bool(one.get("at") == other.get("at"))
