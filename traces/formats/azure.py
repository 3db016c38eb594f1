"""Azure LLM inference traces of 2023 and 2024: CSV with TIMESTAMP, ContextTokens and GeneratedTokens.

They contain neither prompt contents nor sessions.
"""

from __future__ import annotations

import re
from datetime import datetime

from traces.fields import RecordFields, shown
from traces.formats.base import TraceRecord
from traces.formats.csv_rows import CsvFormat
from traces.row import TraceRow

_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?")


class AzureFormat(CsvFormat):
    """Azure's traces; all prompts are unknown, so nothing is reused."""

    name = "azure"
    required_columns = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")

    def rows(self, record: TraceRecord) -> list[TraceRow]:
        """Return the row's request."""
        fields = self._fields(record)
        timestamp_ms = _milliseconds(fields)
        input_length = fields.tokens("ContextTokens", least=1)
        output_length = fields.tokens("GeneratedTokens", least=0)
        self.unknown_prompts += 1
        return [self._row(timestamp_ms, input_length, output_length, self._ids.take(input_length))]


def _milliseconds(fields: RecordFields) -> int:
    """Return the time since 1970; times without a zone are UTC."""
    text = fields.text("TIMESTAMP")
    found = _TIME.fullmatch(text)
    try:
        if found is None:
            raise ValueError("another form")
        date, clock, fraction, zone = found.groups()
        seconds = datetime.fromisoformat(f"{date}T{clock}{zone or '+00:00'}").timestamp()
    except ValueError as error:
        raise fields.place.bad(
            f"TIMESTAMP {shown(text)}", "a date and time such as 2023-11-16 18:17:03.9799600"
        ) from error
    return int(seconds) * 1000 + int(f"{fraction or '':0<3}"[:3])
