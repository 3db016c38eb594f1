"""HTTP client session, retry policy for HTTP 429, server-sent events parser, and repair of lone surrogates.

JSON escapes are UTF-16. A server that splits text between UTF-16 code units may cut an emoji between two events; the
halves are lone surrogates, which cannot be encoded as UTF-8.
"""

from __future__ import annotations

import resource
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b

import aiohttp

from loadtest.errors import MalformedStream

_KEPT_S = 2.0
"""Servers close idle connections after 5 s or more; closing them earlier avoids sending into a closing connection."""


@asynccontextmanager
async def open_session(
    *, api_key: str, headers: Mapping[str, str] | None = None, keep_connections: bool = False
) -> AsyncIterator[aiohttp.ClientSession]:
    """Open a session without a connection limit, which would delay an open loop's requests.

    `keep_connections` False: use a new connection per request, like independent users.
    """
    sent = {"Content-Type": "application/json"}
    if api_key:
        sent["Authorization"] = f"Bearer {api_key}"
    connector = (
        aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEPT_S)
        if keep_connections
        else aiohttp.TCPConnector(limit=0, force_close=True)
    )
    async with aiohttp.ClientSession(connector=connector, headers={**sent, **(headers or {})}) as session:
        yield session


def allow_many_connections() -> None:
    """Raise the limit of open files to its maximum: an overloaded server leaves many connections open."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


_FIRST_WAIT_S = 0.5


@dataclass(frozen=True)
class RetryPolicy:
    """Retry policy for rejections. `max_attempts`: total attempts. `max_wait_s`: limit of one wait before jitter."""

    max_attempts: int = 8
    max_wait_s: float = 30.0

    def wait_s(self, *, attempts: int, retry_after_s: float | None, seed: int) -> float | None:
        """Return the seconds to wait after `attempts` attempts, or None to give up.

        The wait is Retry-After, else 0.5 s doubled with each attempt, limited to `max_wait_s`. Up to 25 % jitter,
        determined by the request's seed, is added to spread the retries of requests rejected at the same time.
        """
        if attempts >= self.max_attempts:
            return None
        asked = _FIRST_WAIT_S * 2.0 ** (attempts - 1) if retry_after_s is None else max(retry_after_s, 0.0)
        digest = blake2b(f"{seed}:retry:{attempts}".encode(), digest_size=8).digest()
        return min(asked, self.max_wait_s) * (1 + 0.25 * int.from_bytes(digest, "little") / 2**64)


def without_surrogates(text: str) -> str:
    """Return the text with surrogate pairs joined and lone surrogates replaced by U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


class SseParser:
    """Incremental parser of server-sent events. Comments and fields other than `data` are skipped."""

    MAX_EVENT_BYTES = 8 << 20

    def __init__(self) -> None:
        self._rest = bytearray()
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> list[str]:
        """Return the data of the events completed by `chunk`. Raises MalformedStream."""
        self._rest += chunk  # in place: a long line may come in many small chunks
        lines: list[bytes] = []
        if b"\n" in chunk:
            *lines, rest = bytes(self._rest).split(b"\n")
            self._rest = bytearray(rest)
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
