"""Requests in order of time, however many: sorted in runs that are kept in temporary files."""

from __future__ import annotations

import heapq
import json
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import IO

from traces.errors import TraceUnwritable
from traces.row import TraceRow

_ROW_BYTES, _ID_BYTES = 300, 40  # in memory

_SortedRow = tuple[int, int, int, int, tuple[int, ...], str]


def in_time_order(rows: Iterable[TraceRow], *, memory_bytes: int = 64 << 20) -> Iterator[TraceRow]:
    """Yield the rows by time; rows of the same time keep their order. Keeps about `memory_bytes` in memory.

    Raises TraceUnwritable if a temporary file cannot be written.
    """
    with ExitStack() as files:
        runs: list[IO[bytes]] = []
        buffered: list[_SortedRow] = []
        room = memory_bytes
        for row in rows:
            buffered.append(
                (row.timestamp_ms, row.index, row.input_length, row.output_length, row.hash_ids, row.session)
            )
            room -= _ROW_BYTES + _ID_BYTES * len(row.hash_ids)
            if room <= 0:
                runs.append(files.enter_context(_written_run(buffered)))
                buffered, room = [], memory_bytes
        buffered.sort()
        for timestamp_ms, index, input_length, output_length, ids, session in heapq.merge(
            *map(_read_run, runs), buffered
        ):
            yield TraceRow(index, timestamp_ms, input_length, output_length, ids, session)


def _written_run(rows: list[_SortedRow]) -> IO[bytes]:
    rows.sort()
    try:
        file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
        for row in rows:
            file.write(json.dumps(row).encode() + b"\n")
        file.seek(0)
    except OSError as error:
        raise TraceUnwritable(
            f"cannot write a temporary file in {tempfile.gettempdir()}: {error.strerror or error}; set TMPDIR to a "
            "folder with as much space as the trace takes"
        ) from error
    return file


def _read_run(file: IO[bytes]) -> Iterator[_SortedRow]:
    for line in file:
        timestamp_ms, index, input_length, output_length, ids, session = json.loads(line)
        yield timestamp_ms, index, input_length, output_length, tuple(ids), session
