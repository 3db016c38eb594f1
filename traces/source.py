"""A trace file in any format, read once, request by request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from traces.errors import FormatUnknown, TraceFormatError, TraceNotFound
from traces.fields import RecordPlace
from traces.formats import FORMATS, SourceSettings, detect_format
from traces.row import TraceRow

AUTO = "auto"

OnProblem = Callable[[TraceFormatError], None]


class TraceSource:
    """An open trace. `format`: its parser, with what is known of the requests returned so far."""

    def __init__(self, raw: IO[bytes], name: str, format_name: str, settings: SourceSettings) -> None:
        if format_name != AUTO and format_name not in FORMATS:
            raise FormatUnknown(f"unknown format {format_name!r}; expected {AUTO}, {', '.join(FORMATS)}")
        self.name = name
        self._raw = raw
        self.format = FORMATS[detect_format(raw, name) if format_name == AUTO else format_name](settings)
        self.num_bytes = raw.seek(0, 2)
        self.num_requests = 0
        """Requests returned so far."""

    @property
    def read_bytes(self) -> int:
        """Bytes of the file that have been read, compressed if the file is."""
        return self._raw.tell()

    def rows(self, on_problem: OnProblem | None = None) -> Iterator[TraceRow]:
        """Yield the requests in the file's order, with times from the file's own origin.

        Records with a problem are left out and reported to `on_problem`; without it, and if nothing that follows
        can be read, TraceFormatError is raised.
        """
        return (row for _, row in self.placed_rows(on_problem))

    def placed_rows(self, on_problem: OnProblem | None = None) -> Iterator[tuple[RecordPlace, TraceRow]]:
        """Yield what `rows` yields, with the place of each request's record."""
        is_empty = True
        for record in self.format.records(self._raw, self.name):
            is_empty = False
            try:
                rows = self.format.rows(record)
            except TraceFormatError as error:
                if on_problem is None:
                    raise
                on_problem(error)
                continue
            for row in rows:
                self.num_requests += 1
                yield record.place, row
        if is_empty:
            raise TraceFormatError(self.name, 1, found="no request", expected="at least one", kind="file")


@contextmanager
def open_source(path: Path, format_name: str, settings: SourceSettings) -> Iterator[TraceSource]:
    """Open a trace file. Raises TraceNotFound, FormatUnknown or TraceFormatError."""
    try:
        raw = path.open("rb")
    except OSError as error:
        raise TraceNotFound(f"cannot open the trace {path}: {error.strerror or error}") from error
    with raw:
        yield TraceSource(raw, str(path), format_name, settings)
