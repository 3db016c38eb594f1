"""One completion request over HTTP: sends it, follows its event stream, writes down what happened in its record."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from typing import Any

import aiohttp

from loadtest.dialect import Dialect, TokenIdCompletions
from loadtest.errors import StreamFailed
from loadtest.plan import PlannedRequest
from loadtest.record import Outcome, RequestRecord
from loadtest.retry import RetryPolicy
from loadtest.server import ServerInfo, error_message
from loadtest.sse import EventStream
from loadtest.surrogates import mended

_DONE = "[DONE]"
_SHOWN_CHARS = 200


class CompletionClient:
    """Sends planned requests to one server. `clock`: seconds, monotonic; all times in records are of it.

    `retry`: what is done about a rejection (429); None: it is the request's outcome.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        server: ServerInfo,
        *,
        timeout_s: float,
        clock: Callable[[], float],
        dialect: Dialect | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        self._session = session
        self._server = server
        self._timeout_s = timeout_s
        self._clock = clock
        self._dialect = dialect or TokenIdCompletions()
        self._retry = retry

    async def send(self, request: PlannedRequest, record: RequestRecord, *, cache_salt: str) -> None:
        """Send now, and again after rejections if the policy says so, and fill `record` in.

        A failure of the request is an outcome, never an exception; cancellation leaves the record unfinished. The
        time-out holds for all sendings together.
        """
        body = self.body(request, cache_salt=cache_salt)
        record.sent_s = self._clock()
        deadline_s = record.sent_s + self._timeout_s
        try:
            while True:
                # aiohttp takes a time-out of 0 for none at all.
                await self._send_once(request, record, body, max(deadline_s - self._clock(), 1e-3))
                wait_s = self._wait_s(record)
                if wait_s is None or self._clock() + wait_s >= deadline_s:
                    return
                # The wait is part of a request that may yet be answered.
                record.outcome = Outcome.UNFINISHED
                await asyncio.sleep(wait_s)
                record.reason = ""
        finally:
            record.end_s = self._clock()
            record.text, record.reason = mended(record.text), mended(record.reason)

    def body(self, request: PlannedRequest, *, cache_salt: str) -> bytes:
        """The request's JSON."""
        body = self._dialect.body(request, model=self._server.model, cache_salt=cache_salt)
        return json.dumps(body, separators=(",", ":")).encode()

    async def _send_once(self, request: PlannedRequest, record: RequestRecord, body: bytes, timeout_s: float) -> None:
        record.attempts += 1
        url = self._server.base_url + self._dialect.path
        try:
            async with self._session.post(url, data=body, timeout=aiohttp.ClientTimeout(total=timeout_s)) as response:
                if response.status != 200:
                    await self._refused(response, record)
                else:
                    await self._follow(response, record, request)
                    record.outcome = Outcome.COMPLETED
        except StreamFailed as error:
            record.outcome, record.reason = Outcome.FAILED, str(error)
        except TimeoutError:
            record.outcome, record.reason = Outcome.FAILED, f"no end of the answer within {self._timeout_s:g} s"
        except aiohttp.ClientConnectorError as error:
            record.outcome, record.reason = Outcome.FAILED, f"no connection ({error.strerror})"
        except (aiohttp.ClientError, ConnectionError) as error:
            record.outcome, record.reason = Outcome.FAILED, f"connection lost ({type(error).__name__})"

    def _wait_s(self, record: RequestRecord) -> float | None:
        if record.outcome is not Outcome.REJECTED or self._retry is None:
            return None
        return self._retry.wait_s(attempts=record.attempts, retry_after_s=record.retry_after_s, seed=record.seed)

    async def _follow(self, response: aiohttp.ClientResponse, record: RequestRecord, request: PlannedRequest) -> None:
        stream, usage = EventStream(), None
        async for chunk in response.content.iter_any():
            now = self._clock()
            for data in stream.feed(chunk):
                if data == _DONE:
                    self._dialect.check(record, usage, request)
                    return
                usage = take_event(data, now, record, request, self._dialect) or usage
        raise StreamFailed(f"the stream ended without {_DONE}")

    async def _refused(self, response: aiohttp.ClientResponse, record: RequestRecord) -> None:
        text = (await response.content.read(64 << 10)).decode("utf-8", "replace")
        record.reason = f"HTTP {response.status}: {error_message(text)}"
        record.outcome = Outcome.FAILED
        if response.status == 429:
            record.outcome = Outcome.REJECTED
            record.retry_after_s = _seconds(response.headers.get("Retry-After"))


def take_event(
    data: str, now: float, record: RequestRecord, request: PlannedRequest, dialect: Dialect
) -> dict[str, Any] | None:
    """Put one event of the stream into `record`; returns the event's usage, if it has one. Raises StreamFailed."""
    try:
        event = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise StreamFailed(f"malformed event: {data[:_SHOWN_CHARS]!r} is not JSON") from error
    if not isinstance(event, dict) or not isinstance(event.get("choices", []), list):
        raise StreamFailed(f"malformed event: found {data[:_SHOWN_CHARS]!r}, expected an object with choices")
    if "error" in event:
        raise StreamFailed(f"error in the stream: {error_message(data)}")
    choices = event.get("choices", [])
    if choices:
        record.event_times.append(now)
    for choice in choices:
        if not isinstance(choice, dict):
            raise StreamFailed(f"malformed event: found a choice {str(choice)[:_SHOWN_CHARS]!r}, expected an object")
        dialect.take_choice(choice, now, record, request)
    if isinstance(event.get("prompt_token_ids"), list):
        record.prompt_ids = event["prompt_token_ids"]
    if isinstance(event.get("moonpool"), dict):
        record.extension = event["moonpool"]
    usage = event.get("usage")
    return usage if isinstance(usage, dict) else None


def _seconds(header: str | None) -> float | None:
    try:
        value = math.nan if header is None else float(header)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
