"""Client of one completion request: request bodies, parsing of stream events, and sending over HTTP.

A dialect defines the body and the parsing. It is picklable because it is passed to sender processes.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp

from loadtest.errors import StreamFailed
from loadtest.http import RetryPolicy, SseParser, without_surrogates
from loadtest.plan import PlannedRequest
from loadtest.record import RequestRecord, SendOutcome
from loadtest.server import ServerInfo, error_message

_SHOWN = 200


class Dialect(Protocol):
    """Protocol of one endpoint: request body, parsing of choices, and validation of the complete answer."""

    @property
    def path(self) -> str:
        """Endpoint path, such as /v1/completions."""

    def body(self, request: PlannedRequest, *, model: str, cache_salt: str) -> dict[str, Any]:
        """Return the request body."""

    def take_choice(self, choice: dict[str, Any], now: float, record: RequestRecord, request: PlannedRequest) -> None:
        """Add one choice of an event received at `now` to `record`. Raises StreamFailed."""

    def check(self, record: RequestRecord, usage: dict[str, Any] | None, request: PlannedRequest) -> None:
        """Check the complete answer against the request and the reported usage. Raises StreamFailed."""


@dataclass(frozen=True)
class TokenIdCompletions:
    """/v1/completions with token ids as prompt, for answers of exactly `max_tokens` tokens.

    Token ids keep block boundaries exact, which another tokenisation on the server might move.
    """

    path: str = "/v1/completions"

    def body(self, request: PlannedRequest, *, model: str, cache_salt: str) -> dict[str, Any]:
        """Return the body of a greedy or seeded request whose answer includes its token ids."""
        body: dict[str, Any] = {
            "model": model,
            "prompt": request.prompt.tolist(),
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        if cache_salt:
            body["cache_salt"] = cache_salt
        return body

    def take_choice(self, choice: dict[str, Any], now: float, record: RequestRecord, request: PlannedRequest) -> None:
        """Add the choice's tokens; without token ids, an event with text counts as one token."""
        echoed = choice.get("prompt_token_ids")
        if echoed is not None and echoed != request.prompt.tolist():
            raise StreamFailed("the server's prompt_token_ids are not the prompt that was sent")
        take_tokens(record, choice.get("token_ids"), now, has_text=bool(choice.get("text")))

    def check(self, record: RequestRecord, usage: dict[str, Any] | None, request: PlannedRequest) -> None:
        """Check that every token count matches the request. Raises StreamFailed."""
        if usage is None:
            raise StreamFailed("the answer has no usage")
        prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if prompt != len(request.prompt):
            raise StreamFailed(f"usage reports {prompt} prompt tokens; {len(request.prompt)} were sent")
        if completion != request.max_tokens:
            raise StreamFailed(f"usage reports {completion} completion tokens; {request.max_tokens} were requested")
        if record.token_ids and len(record.token_ids) != request.max_tokens:
            raise StreamFailed(f"received {len(record.token_ids)} token ids; {request.max_tokens} were requested")
        record.output_tokens = request.max_tokens
        record.cached_tokens = cached_tokens_of(usage, len(request.prompt))


def take_tokens(record: RequestRecord, ids: Any, now: float, *, has_text: bool) -> None:
    """Add the tokens of one choice to `record`; if `ids` is None, an event with text counts as one token.

    Raises StreamFailed if `ids` is not a list of integers.
    """
    if ids is None:
        record.token_times.extend([now] if has_text else [])
        return
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise StreamFailed(f"malformed event: found token_ids {str(ids)[:_SHOWN]}, expected a list of integers")
    record.token_ids.extend(ids)
    record.token_times.extend([now] * len(ids))


def delta_text(choice: dict[str, Any]) -> str:
    """Return the text of a chat event's delta. Raises StreamFailed."""
    delta = choice.get("delta") or {}
    text = (delta.get("content") or "") if isinstance(delta, dict) else delta
    if not isinstance(delta, dict) or not isinstance(text, str):
        raise StreamFailed(f"malformed event: found the delta {str(delta)[:_SHOWN]!r}, expected an object with content")
    return text


def cached_tokens_of(usage: dict[str, Any], prompt_tokens: int) -> int:
    """Return the reused prompt tokens in `usage`, 0 if not reported. Raises StreamFailed for an impossible count."""
    details = usage.get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens") or 0 if isinstance(details, dict) else details
    if type(cached) is not int or not 0 <= cached < max(prompt_tokens, 1):
        raise StreamFailed(f"usage reports {cached} cached tokens for a prompt of {prompt_tokens}")
    return cached


def session_id(name: str, cache_salt: str) -> str:
    """Return the id that requests of a trace's session carry: a hash, since a name may be no header's value."""
    return hashlib.blake2b(f"{cache_salt}\0{name}".encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


_DONE = "[DONE]"
_SHOWN_CHARS = 200


class CompletionClient:
    """Sender of planned requests to one server.

    `clock`: monotonic seconds, the time base of all records. `retry`: policy for rejections (HTTP 429); None: a
    rejection is the request's outcome. `headers`: sent with each request.
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
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._session = session
        self._server = server
        self._timeout_s = timeout_s
        self._clock = clock
        self._dialect = dialect or TokenIdCompletions()
        self._retry = retry
        self._headers = headers

    async def send(self, request: PlannedRequest, record: RequestRecord, *, cache_salt: str) -> None:
        """Send the request, retry it according to the policy, and fill in `record`.

        A failed request is an outcome, not an exception; cancellation leaves the record unfinished. The timeout covers
        all attempts together.
        """
        body = self.body(request, cache_salt=cache_salt)
        headers = self._headers
        if request.session:
            headers = {**(headers or {}), "x-session-id": session_id(request.session, cache_salt)}
        record.sent_s = self._clock()
        deadline_s = record.sent_s + self._timeout_s
        try:
            while True:
                # aiohttp interprets a timeout of 0 as no timeout.
                await self._send_once(request, record, body, headers, max(deadline_s - self._clock(), 1e-3))
                wait_s = self._wait_s(record)
                if wait_s is None or self._clock() + wait_s >= deadline_s:
                    return
                # If cancelled during the wait, the request counts as unfinished, not rejected.
                record.outcome = SendOutcome.UNFINISHED
                await asyncio.sleep(wait_s)
                record.reason = ""
        finally:
            record.end_s = self._clock()
            record.text, record.reason = without_surrogates(record.text), without_surrogates(record.reason)

    def body(self, request: PlannedRequest, *, cache_salt: str) -> bytes:
        """Return the request body as JSON."""
        body = self._dialect.body(request, model=self._server.model, cache_salt=cache_salt)
        return json.dumps(body, separators=(",", ":")).encode()

    async def _send_once(
        self,
        request: PlannedRequest,
        record: RequestRecord,
        body: bytes,
        headers: Mapping[str, str] | None,
        timeout_s: float,
    ) -> None:
        record.attempts += 1
        url = self._server.base_url + self._dialect.path
        try:
            timeout = aiohttp.ClientTimeout(total=timeout_s)
            async with self._session.post(url, data=body, headers=headers, timeout=timeout) as response:
                if response.status != 200:
                    await self._refused(response, record)
                else:
                    await self._follow(response, record, request)
                    record.outcome = SendOutcome.COMPLETED
        except StreamFailed as error:
            record.outcome, record.reason = SendOutcome.FAILED, str(error)
        except TimeoutError:
            record.outcome, record.reason = SendOutcome.FAILED, f"timed out after {self._timeout_s:g} s"
        except aiohttp.ClientConnectorError as error:
            record.outcome, record.reason = SendOutcome.FAILED, f"no connection ({error.strerror})"
        except (aiohttp.ClientError, ConnectionError) as error:
            record.outcome, record.reason = SendOutcome.FAILED, f"connection lost ({type(error).__name__})"
        except Exception as error:  # such as a lack of file descriptors: the other requests must still be reported
            record.outcome, record.reason = SendOutcome.FAILED, f"not sent or not read ({error!r})"

    def _wait_s(self, record: RequestRecord) -> float | None:
        if record.outcome is not SendOutcome.REJECTED or self._retry is None:
            return None
        return self._retry.wait_s(attempts=record.attempts, retry_after_s=record.retry_after_s, seed=record.seed)

    async def _follow(self, response: aiohttp.ClientResponse, record: RequestRecord, request: PlannedRequest) -> None:
        stream, usage = SseParser(), None
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
        record.outcome = SendOutcome.FAILED
        if response.status == 429:
            record.outcome = SendOutcome.REJECTED
            record.retry_after_s = _seconds(response.headers.get("Retry-After"))


def take_event(
    data: str, now: float, record: RequestRecord, request: PlannedRequest, dialect: Dialect
) -> dict[str, Any] | None:
    """Add one event of the stream to `record` and return its usage, if any. Raises StreamFailed."""
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
