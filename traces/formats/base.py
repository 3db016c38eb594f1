"""Interface of a trace format: which records a file has, and which requests a record stands for."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import IO, Any, ClassVar

from traces.errors import BadSourceSettings
from traces.fields import RecordPlace
from traces.lines import numbered_lines
from traces.row import BLOCK_TOKENS, TraceRow

Encode = Callable[[list[str]], list[list[int]]]
"""Tokenizer: the token ids of each text."""


def encode_bytes(texts: list[str]) -> list[list[int]]:
    """Return the bytes of each text: a tokenizer for cases in which only the structure of a trace matters."""
    return [list(text.encode("utf-8", "surrogatepass")) for text in texts]


@dataclass(frozen=True)
class SourceSettings:
    """Block sizes, the tokenizer, and what is assumed where a source does not say. Raises BadSourceSettings.

    `block_tokens`: tokens per id of the rows returned; 0: the source's own. `source_block_tokens`: tokens per id of the
    source; 0: as usual for the format.
    """

    block_tokens: int = BLOCK_TOKENS
    source_block_tokens: int = 0
    encode: Encode = encode_bytes
    session_rate: float = 1.0
    """Sessions that begin per second, at random times, if the source has no times."""
    think_time_s: float = 10.0
    """Time between an answer and the next turn, if the source has none."""
    output_rate: float = 50.0
    """Tokens per second of an answer, after which the time until the next turn begins."""
    output_tokens: int = 256
    """Length of answers whose length the source does not state."""
    seed: int = 0

    def __post_init__(self) -> None:
        for flag, value, least in (
            ("--block-tokens", self.source_block_tokens, 0),
            ("--think-time", self.think_time_s, 0),
            ("--output-tokens", self.output_tokens, 0),
        ):
            if not least <= value < math.inf:
                raise BadSourceSettings(f"{flag} must be at least {least}, got {value}")
        for flag, rate in (("--session-rate", self.session_rate), ("--output-rate", self.output_rate)):
            if not 0 < rate < math.inf:
                raise BadSourceSettings(f"{flag} must be more than 0, got {rate}")


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """A record of a source: a line or an element, not parsed further."""

    place: RecordPlace
    value: Any


class TraceFormat(ABC):
    """Parser of one file. It keeps what later records refer to, so each file needs a new one."""

    name: ClassVar[str]
    usual_block_tokens: ClassVar[int] = BLOCK_TOKENS
    keeps_ids: ClassVar[bool] = False
    """Ids of the source are returned unchanged, and so may turn out not to be those of chained hashes."""
    knows_prompts: ClassVar[bool] = True
    """The source states the contents of prompts, at least of some, so that reuse can be counted."""
    has_own_times: ClassVar[bool] = True
    """Each record states its own arrival, so that records should be in order of time."""

    def __init__(self, settings: SourceSettings) -> None:
        self.settings = settings
        self.source_block_tokens = settings.source_block_tokens or self.usual_block_tokens
        self.block_tokens = settings.block_tokens or self.source_block_tokens
        self.unknown_prompts = 0
        """Requests returned so far of whose prompt the source does not tell the contents."""
        self._next_index = 0

    @abstractmethod
    def records(self, raw: IO[bytes], source: str) -> Iterator[TraceRecord]:
        """Yield the records of a file. Raises TraceFormatError where nothing that follows can be read."""

    @abstractmethod
    def rows(self, record: TraceRecord) -> list[TraceRow]:
        """Return the requests of a record, with times from any origin. Raises TraceFormatError and changes nothing."""

    def _row(
        self, timestamp_ms: int, input_length: int, output_length: int, ids: tuple[int, ...], session: str = ""
    ) -> TraceRow:
        row = TraceRow(self._next_index, timestamp_ms, input_length, output_length, ids, session)
        self._next_index += 1
        return row


class LineFormat(TraceFormat):
    """Format with one record per line; the values of records are the lines."""

    def records(self, raw: IO[bytes], source: str) -> Iterator[TraceRecord]:
        """Yield the non-blank lines."""
        for line, text in numbered_lines(raw, source):
            yield TraceRecord(RecordPlace(source, line), text)


class SessionStarts:
    """Random times at which sessions begin: a Poisson process that `settings` determine."""

    def __init__(self, settings: SourceSettings) -> None:
        self._rng = Random(f"sessions {settings.seed}")
        self._rate = settings.session_rate
        self._now_s = 0.0

    def next_ms(self) -> int:
        """Return the time of the next session's beginning; the first one begins at 0."""
        start_ms = round(self._now_s * 1000)
        self._now_s += self._rng.expovariate(self._rate)
        return start_ms
