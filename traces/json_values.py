"""Values of a JSON list, or of a file of JSON values, that is too large to be read at once."""

from __future__ import annotations

import codecs
import io
import json
from collections.abc import Iterator
from typing import IO, Any

from traces.errors import TraceFormatError
from traces.fields import RecordPlace, shown
from traces.lines import damage_at, decompressed

_CHUNK_BYTES = 1 << 16
_MAX_VALUE_BYTES = 64 << 20
_SPACE = " \t\n\r"


def array_elements(raw: IO[bytes], source: str, what: str) -> Iterator[tuple[RecordPlace, Any]]:
    """Yield the elements with their places: the line of their beginning, and `what` with their index from 0.

    Raises TraceFormatError: after a syntax error, nothing that follows can be read.
    """
    text = _Text(raw, source)
    if text.peek() != "[":
        raise text.bad("a JSON list")
    text.advance(1)
    if text.peek() == "]":
        return
    index = 0
    while True:
        text.peek()
        place = RecordPlace(source, text.line, f"{what} {index}")
        yield place, text.value()
        index += 1
        end = text.peek()
        if end not in (",", "]"):
            raise text.bad(f"',' or ']' after {what} {index - 1}")
        text.advance(1)
        if end == "]":
            break
    if text.peek():
        raise text.bad("the end of the file after the list")


def json_values(raw: IO[bytes], source: str, what: str) -> Iterator[tuple[RecordPlace, Any]]:
    """Yield the values of a file, which white space may separate, with their places as `array_elements` does.

    Raises TraceFormatError.
    """
    text = _Text(raw, source)
    index = 0
    while text.peek():
        place = RecordPlace(source, text.line, f"{what} {index}")
        yield place, text.value()
        index += 1


class _Text:
    """Decoded text of a file, of which only what is not read yet is kept."""

    def __init__(self, raw: IO[bytes], source: str) -> None:
        self._stream: IO[bytes] | io.BufferedIOBase = decompressed(raw)
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._json = json.JSONDecoder()
        self._source = source
        self._buffer = ""
        self._at = 0
        self._ended = False
        self.line = 1

    def peek(self) -> str:
        """Skip white space and return the next character; "" at the end."""
        while True:
            start = self._at
            while self._at < len(self._buffer) and self._buffer[self._at] in _SPACE:
                self._at += 1
            self.line += self._buffer.count("\n", start, self._at)
            if self._at < len(self._buffer):
                return self._buffer[self._at]
            if not self._read(_CHUNK_BYTES):
                return ""

    def advance(self, count: int) -> None:
        """Skip characters."""
        self.line += self._buffer.count("\n", self._at, self._at + count)
        self._at += count

    def value(self) -> Any:
        """Return the JSON value that begins here, and skip it. Raises TraceFormatError."""
        while True:
            try:
                value, end = self._json.raw_decode(self._buffer, self._at)
            except (ValueError, RecursionError) as error:
                rest = len(self._buffer) - self._at
                # The value may be incomplete. Reading as much again each time keeps the work linear.
                if rest < _MAX_VALUE_BYTES and self._read(max(_CHUNK_BYTES, rest)):
                    continue
                raise self._damaged(error) from error
            if end < len(self._buffer) or not self._read(_CHUNK_BYTES):
                self.advance(end - self._at)
                return value

    def bad(self, expected: str) -> TraceFormatError:
        """Return the error for the current position."""
        found = shown(self._buffer[self._at : self._at + 40]) if self.peek() else "the end of the file"
        return TraceFormatError(self._source, self.line, found=found, expected=expected, kind="file")

    def _damaged(self, error: Exception) -> TraceFormatError:
        if isinstance(error, json.JSONDecodeError):
            line = self.line + self._buffer.count("\n", self._at, error.pos)
            found = f"{shown(self._buffer[error.pos : error.pos + 40])} ({error.msg})"
        else:
            line, found = self.line, f"{shown(self._buffer[self._at : self._at + 40])} ({error})"
        return TraceFormatError(self._source, line, found=found, expected="a complete JSON value", kind="file")

    def _read(self, num_bytes: int) -> bool:
        """Read on; return False at the end of the file."""
        if self._ended:
            return False
        with damage_at(self._source, self.line):
            data = self._stream.read(num_bytes)
        self._ended = not data
        try:
            more = self._decoder.decode(data, final=self._ended)
        except UnicodeDecodeError as error:
            raise TraceFormatError(
                self._source,
                self.line,
                found=f"bytes that are not UTF-8 ({error.reason})",
                expected="UTF-8",
                kind="file",
            ) from error
        self._buffer = self._buffer[self._at :] + more
        self._at = 0
        return True
