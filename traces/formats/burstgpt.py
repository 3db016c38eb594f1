"""BurstGPT traces: CSV with times in seconds, token counts and, in conversations, a session id.

The source states which requests belong to a conversation, but neither the prompts nor which part of them repeats
earlier turns. Prompts therefore share nothing.
"""

from __future__ import annotations

from traces.formats.base import TraceRecord
from traces.formats.csv_rows import CsvFormat
from traces.row import TraceRow


class BurstGptFormat(CsvFormat):
    """BurstGPT's traces, with or without the columns `Session ID` and `Elapsed time`; failed requests have length 0."""

    name = "burstgpt"
    required_columns = ("Timestamp", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type")

    def rows(self, record: TraceRecord) -> list[TraceRow]:
        """Return the row's request."""
        fields = self._fields(record)
        timestamp_s = fields.time("Timestamp", unit="seconds")
        input_length = fields.tokens("Request tokens", least=1)
        output_length = fields.tokens("Response tokens", least=0)
        total = fields.integer("Total tokens", least=0, most=1 << 60)
        if total != input_length + output_length:
            raise record.place.bad(
                f"Total tokens {total}", f"{input_length + output_length}, the sum of request and response tokens"
            )
        session = fields.text("Session ID") if fields.has("Session ID") else ""
        self.unknown_prompts += 1
        ids = self._ids.take(input_length)
        return [self._row(round(timestamp_s * 1000), input_length, output_length, ids, session)]
