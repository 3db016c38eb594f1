"""A row of a trace, and an ordered collection of rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

BLOCK_TOKENS = 512
"""Tokens per hash id in Mooncake's traces."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace.

    `timestamp_ms`: milliseconds from the start of the trace. `input_length`, `output_length`: tokens.
    `hash_ids`: one id per block of the prompt, the last may be partial; ids identify chained hashes, so equal ids mean
    an equal prefix up to and including that block. `index`: position of the row in the trace file. `session`: name of
    the conversation whose turn it is; "" if the trace names none.
    """

    index: int
    timestamp_ms: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    session: str = ""

    def full_blocks(self, block_tokens: int = BLOCK_TOKENS) -> int:
        """Return the number of full blocks of the prompt."""
        return self.input_length // block_tokens


@dataclass(frozen=True, slots=True)
class Trace:
    """Rows in order of arrival. `notices`: how the rows were selected or corrected, for reports."""

    source: str
    rows: tuple[TraceRow, ...]
    block_tokens: int = BLOCK_TOKENS
    notices: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[TraceRow]:
        return iter(self.rows)

    @property
    def duration_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return (self.rows[-1].timestamp_ms - self.rows[0].timestamp_ms) / 1000 if self.rows else 0.0

    def with_rows(self, rows: tuple[TraceRow, ...], notice: str) -> Trace:
        """Return the trace reduced to `rows`, with `notice` added."""
        return replace(self, rows=rows, notices=(*self.notices, notice))
