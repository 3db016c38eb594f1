"""Mooncake's traces, the replayer's own format: one id per 512 tokens of the prompt."""

from __future__ import annotations

from traces.formats.base import LineFormat, TraceRecord
from traces.prompt_blocks import PromptBlocks
from traces.reader import parse_row
from traces.row import TraceRow


class MooncakeFormat(LineFormat):
    """Mooncake's traces, with or without sessions. Ids are kept unless blocks of another size are requested."""

    name = "mooncake"
    keeps_ids = True

    def rows(self, record: TraceRecord) -> list[TraceRow]:
        """Return the line's request."""
        place, size = record.place, self.source_block_tokens
        row = parse_row(record.value, index=0, source=place.source, line=place.line, block_tokens=size)
        ids = row.hash_ids
        if size != self.block_tokens:
            blocks = PromptBlocks(self.block_tokens)
            blocks.append_ids(ids, row.input_length, size)
            ids = blocks.ids()
        return [self._row(row.timestamp_ms, row.input_length, row.output_length, ids, row.session)]
