"""Structured logging: one line per event, as JSON or text, with role, node and the request being served.

Lines contain ids, counts and reasons, but never text from a client.
"""

import json as json_format
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Final, TextIO

from telemetry.errors import UnknownLogLevel

_REQUEST: ContextVar[tuple[str, int | None]] = ContextVar("moonpool_request", default=("", None))
_LEVELS: Final = ("debug", "info", "warning", "error", "critical")
_GRPC: Final = "grpc._cython.cygrpc"
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


class _Handler(logging.StreamHandler[TextIO]):
    """Handler that `configure` replaces at the next call; other handlers are left alone."""


def configure(
    role: str, node_id: str, level: str = "info", *, json: bool = False, stream: TextIO | None = None
) -> None:
    """Send the root logger's records to `stream` (standard error by default), as JSON lines if `json` is set.

    Called once per process; a second call replaces the first. Fields given through `extra={...}` are kept. Raises
    UnknownLogLevel.
    """
    if level.lower() not in _LEVELS:
        raise UnknownLogLevel(f"log level must be one of {', '.join(_LEVELS)}, got {level!r}")
    handler = _Handler(stream if stream is not None else sys.stderr)
    handler.setFormatter(_JsonFormatter(role, node_id) if json else _TextFormatter(role, node_id))
    root = logging.getLogger()
    for old in [old for old in root.handlers if isinstance(old, _Handler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    logging.getLogger(_GRPC).addFilter(_malformed_call)
    root.setLevel(level.upper())


@contextmanager
def request(request_id: str, attempt: int | None = None) -> Iterator[None]:
    """Add this request id, and the attempt's number if given, to records made inside, and in tasks started inside."""
    token = _REQUEST.set((request_id, attempt))
    try:
        yield
    finally:
        _REQUEST.reset(token)


def attempt(request_id: str, number: int) -> None:
    """Set the request and attempt that the current task works on."""
    _REQUEST.set((request_id, number))


def current_request_id() -> str:
    """Return the id of the request being served; empty outside of `request`."""
    return _REQUEST.get()[0]


def _served() -> dict[str, Any]:
    """Return the record's fields of the request being served; empty outside of `request`."""
    request_id, number = _REQUEST.get()
    if not request_id:
        return {}
    return {"request_id": request_id} if number is None else {"request_id": request_id, "attempt": number}


def _malformed_call(record: logging.LogRecord) -> bool:
    """Shorten grpc's traceback about a message that is not a valid protobuf to one warning."""
    error = record.exc_info[1] if record.exc_info else None
    if type(error).__name__ == "DecodeError":  # protobuf's; not every process that logs has it
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        method = record.getMessage().rpartition("servicer method ")[2].strip("[]")
        record.msg, record.args = "malformed call of %s rejected: %s", (method, error)
        record.exc_info = record.exc_text = None
    return True


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


class _JsonFormatter(logging.Formatter):
    def __init__(self, role: str, node_id: str) -> None:
        super().__init__()
        self._role, self._node_id = role, node_id

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "role": self._role,
            "node": self._node_id,
        }
        line |= _served()
        line |= {key: value for key, value in _extra(record).items() if key not in line}
        line["message"] = record.getMessage()
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json_format.dumps(line, ensure_ascii=False, default=str)


class _TextFormatter(logging.Formatter):
    def __init__(self, role: str, node_id: str) -> None:
        super().__init__()
        # The node id usually begins with the role, which is then left out.
        self._who = node_id if node_id.startswith(role) else f"{role} {node_id}"

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        fields = {**_served(), **_extra(record)}
        shown = "".join(f" {key}={value}" for key, value in fields.items() if value != "")
        # A line break in the text must not start a line that looks like a record.
        message = record.getMessage().replace("\r", "\\r").replace("\n", "\\n")
        text = f"{when} {record.levelname:<7} {self._who} {record.name}: {message}{shown}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text
