"""CSV files with a header: the columns that a format requires, in any order, and rows as fields by column."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from typing import IO, ClassVar

from traces.fields import RecordFields, RecordPlace, shown
from traces.formats.base import SourceSettings, TraceFormat, TraceRecord
from traces.lines import numbered_lines
from traces.prompt_blocks import FreshIds


class CsvFormat(TraceFormat):
    """Format of CSV rows without prompt contents; each prompt gets ids of its own."""

    knows_prompts = False
    required_columns: ClassVar[tuple[str, ...]]

    def __init__(self, settings: SourceSettings) -> None:
        super().__init__(settings)
        self._columns: list[str] = []
        self._ids = FreshIds(self.block_tokens)

    def records(self, raw: IO[bytes], source: str) -> Iterator[TraceRecord]:
        """Yield the lines after the header. Raises TraceFormatError if the header lacks a column."""
        for line, text in numbered_lines(raw, source):
            place = RecordPlace(source, line)
            if self._columns:
                yield TraceRecord(place, text)
            else:
                self._columns = self._header(text, place)

    def _header(self, text: bytes, place: RecordPlace) -> list[str]:
        columns = [cell.strip() for cell in csv_cells(text, place)]
        for name in self.required_columns:
            if name not in columns:
                raise place.bad(
                    f"the header {shown(text)}", f"a header with the columns {', '.join(self.required_columns)}", "file"
                )
        return columns

    def _fields(self, record: TraceRecord) -> RecordFields:
        cells = csv_cells(record.value, record.place)
        if len(cells) != len(self._columns):
            raise record.place.bad(
                f"{len(cells)} columns: {shown(record.value)}", f"{len(self._columns)}, as in the header", "syntax"
            )
        return RecordFields(record.place, dict(zip(self._columns, map(str.strip, cells), strict=True)))


def csv_cells(text: bytes, place: RecordPlace) -> list[str]:
    """Return the cells of a line. Raises TraceFormatError."""
    try:
        return next(csv.reader([text.decode("utf-8-sig").strip("\r\n")], strict=True), [])
    except (csv.Error, UnicodeDecodeError) as error:
        raise place.bad(f"{shown(text)} ({error})", "comma-separated values in UTF-8", "syntax") from error
