"""One completion request over HTTP: sends it, follows its event stream, writes down what happened in its record."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import aiohttp

from replay.errors import StreamFailed
from replay.plan import PlannedRequest
from replay.record import Outcome, RequestRecord
from replay.server import ServerInfo, error_message
from replay.sse import EventStream

_DONE = "[DONE]"
_SHOWN = 200


class CompletionClient:
    """Sends planned requests to one server. `clock`: seconds, monotonic; all times in records are of it."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        server: ServerInfo,
        *,
        timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._session = session
        self._server = server
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._timeout_s = timeout_s
        self._clock = clock

    async def send(self, request: PlannedRequest, record: RequestRecord, *, cache_salt: str) -> None:
        """Send now and fill `record` in.

        A failure of the request is an outcome, never an exception; cancellation leaves the record unfinished.
        """
        body = self.body(request, cache_salt=cache_salt)
        record.sent_s = self._clock()
        try:
            async with self._session.post(
                f"{self._server.base_url}/v1/completions", data=body, timeout=self._timeout
            ) as response:
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
        finally:
            record.end_s = self._clock()

    def body(self, request: PlannedRequest, *, cache_salt: str) -> bytes:
        """The request's JSON. Token ids as prompt: no second tokenisation can move a block's border."""
        body: dict[str, Any] = {
            "model": self._server.model,
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
        return json.dumps(body, separators=(",", ":")).encode()

    async def _follow(self, response: aiohttp.ClientResponse, record: RequestRecord, request: PlannedRequest) -> None:
        stream, usage = EventStream(), None
        async for chunk in response.content.iter_any():
            now = self._clock()
            for data in stream.feed(chunk):
                if data == _DONE:
                    check_answer(record, usage, request)
                    return
                usage = take_event(data, now, record, request) or usage
        raise StreamFailed(f"the stream ended without {_DONE}")

    async def _refused(self, response: aiohttp.ClientResponse, record: RequestRecord) -> None:
        text = (await response.content.read(64 << 10)).decode("utf-8", "replace")
        record.reason = f"HTTP {response.status}: {error_message(text)}"
        record.outcome = Outcome.FAILED
        if response.status == 429:
            record.outcome = Outcome.REJECTED
            record.retry_after_s = _seconds(response.headers.get("Retry-After"))


def take_event(data: str, now: float, record: RequestRecord, request: PlannedRequest) -> dict[str, Any] | None:
    """Put one event of the stream into `record`; returns the event's usage, if it has one. Raises StreamFailed."""
    try:
        event = json.loads(data)
    except ValueError as error:
        raise StreamFailed(f"malformed event: {data[:_SHOWN]!r} is not JSON") from error
    if not isinstance(event, dict) or not isinstance(event.get("choices", []), list):
        raise StreamFailed(f"malformed event: found {data[:_SHOWN]!r}, expected an object with choices")
    if "error" in event:
        raise StreamFailed(f"error in the stream: {error_message(data)}")
    for choice in event.get("choices", []):
        take_choice(choice, now, record, request)
    if isinstance(event.get("moonpool"), dict):
        record.extension = event["moonpool"]
    usage = event.get("usage")
    return usage if isinstance(usage, dict) else None


def take_choice(choice: Any, now: float, record: RequestRecord, request: PlannedRequest) -> None:
    """Tokens of one choice: by their ids where the server gives them, else an event with text counts as one token."""
    if not isinstance(choice, dict):
        raise StreamFailed(f"malformed event: found a choice {str(choice)[:_SHOWN]!r}, expected an object")
    echoed = choice.get("prompt_token_ids")
    if echoed is not None and echoed != request.prompt.tolist():
        raise StreamFailed("the server's prompt_token_ids are not the prompt that was sent")
    ids = choice.get("token_ids")
    if ids is None:
        record.token_times.extend([now] if choice.get("text") else [])
        return
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
        raise StreamFailed(f"malformed event: found token_ids {str(ids)[:_SHOWN]}, expected a list of integers")
    record.token_ids.extend(ids)
    record.token_times.extend([now] * len(ids))


def check_answer(record: RequestRecord, usage: dict[str, Any] | None, request: PlannedRequest) -> None:
    """Hold the whole answer against what was asked and what the server says of it. Raises StreamFailed."""
    if usage is None:
        raise StreamFailed("the answer came without usage")
    prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
    if prompt != len(request.prompt):
        raise StreamFailed(f"usage says {prompt} prompt tokens; {len(request.prompt)} were sent")
    if completion != request.max_tokens:
        raise StreamFailed(f"usage says {completion} completion tokens; {request.max_tokens} were asked for")
    if record.token_ids and len(record.token_ids) != request.max_tokens:
        raise StreamFailed(f"{len(record.token_ids)} token ids came; {request.max_tokens} were asked for")
    details = usage.get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens") or 0
    if not isinstance(cached, int) or not 0 <= cached < len(request.prompt):
        raise StreamFailed(f"usage says {cached} cached tokens of a prompt of {len(request.prompt)}")
    record.cached_tokens = cached


def _seconds(header: str | None) -> float | None:
    try:
        return None if header is None else float(header)
    except ValueError:
        return None
