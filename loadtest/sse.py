"""Server-sent events from a byte stream: a sans-I/O parser."""

from __future__ import annotations

from loadtest.errors import MalformedStream


class EventStream:
    """Feed bytes, get the data of each event that is complete. Comments and other fields than `data` are skipped."""

    MAX_EVENT_BYTES = 8 << 20

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> list[str]:
        """The data of the events that `chunk` completes. Raises MalformedStream."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > self.MAX_EVENT_BYTES:
            raise MalformedStream(f"an event of more than {self.MAX_EVENT_BYTES} bytes")
        events = []
        for raw in lines:
            line = raw.rstrip(b"\r")
            if not line:
                if self._data:
                    events.append("\n".join(self._data))
                    self._data = []
            elif line.startswith(b"data:"):
                self._data.append(self._text(line[5:].removeprefix(b" ")))
            elif not line.startswith((b":", b"event:", b"id:", b"retry:")):
                raise MalformedStream(f"found {line[:80]!r} in the stream; expected a server-sent event")
        return events

    @staticmethod
    def _text(data: bytes) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise MalformedStream(f"an event is not UTF-8: {error}") from error
