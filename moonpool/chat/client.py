"""Client of the chat completions API: streams one answer, and measures its latency and cached tokens."""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import aiohttp

from loadtest.errors import MalformedStream
from loadtest.http import SseParser, without_surrogates
from loadtest.server import ServerInfo, error_message
from moonpool.chat.conversation import Message
from moonpool.errors import ChatFailed

_DONE = "[DONE]"
_SHOWN = 200
_ERROR_NBYTES = 64 << 10
_CONNECT_S = 10.0


@dataclass(frozen=True)
class AnswerOptions:
    """Sampling options of every request; None leaves the choice to the server."""

    temperature: float | None = None
    max_tokens: int | None = None
    seed: int | None = None

    def fields(self) -> dict[str, float | int]:
        """Return the fields for the request's body."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass
class ChatAnswer:
    """An answer, perhaps incomplete. Times are seconds since the request was sent, by this client's clock."""

    text: str = ""
    finish_reason: str = ""  # "" until it has ended
    ttft_s: float | None = None
    last_s: float = 0.0  # time of the last piece of text
    usage: dict[str, Any] | None = None
    extension: dict[str, Any] | None = None  # Moonpool's extension; None from other servers

    def figures(self) -> str:
        """Return one line of figures: TTFT, speed, cached tokens, nodes."""
        parts = [] if self.ttft_s is None else [f"TTFT {self.ttft_s:.2f} s"]
        usage = self.usage or {}
        tokens, prompt = _count(usage.get("completion_tokens")), _count(usage.get("prompt_tokens"))
        if tokens and self.ttft_s is not None and tokens > 1 and self.last_s > self.ttft_s:
            parts.append(f"{(tokens - 1) / (self.last_s - self.ttft_s):.1f} tokens/s")
        if prompt is not None:
            cached = _count(_object(usage.get("prompt_tokens_details")).get("cached_tokens")) or 0
            parts.append(f"{cached} of {prompt} prompt tokens cached")
        nodes = [(self.extension or {}).get(key) for key in ("prefill_node", "decode_node")]
        parts += [" → ".join(dict.fromkeys(str(node) for node in nodes if node))] if any(nodes) else []
        parts += [f"cut at {tokens} tokens"] if self.finish_reason == "length" else []
        return " · ".join(parts)


class ChatClient:
    """Client of one server. `timeout_s` bounds a whole answer. Cancelling a request makes the server stop too."""

    def __init__(
        self, session: aiohttp.ClientSession, server: ServerInfo, options: AnswerOptions, *, timeout_s: float
    ) -> None:
        self.server = server
        self._session = session
        self._options = options
        self._timeout_s = timeout_s

    async def ask(self, messages: Sequence[Message], answer: ChatAnswer, on_text: Callable[[str], None]) -> None:
        """Stream an answer into `answer`; `on_text` receives each piece. Raises ChatFailed."""
        url = f"{self.server.base_url}/v1/chat/completions"
        body = {
            "model": self.server.model,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._options.fields(),
        }
        began = time.monotonic()
        try:
            async with self._post(url, body) as response:
                if response.status != 200:
                    raise ChatFailed(await _refusal(response))
                try:
                    await _follow(response, began, answer, on_text)
                finally:
                    answer.text = without_surrogates(answer.text)
        except MalformedStream as error:
            raise ChatFailed(f"{url} does not stream as an OpenAI-compatible server: {error}") from error
        except TimeoutError as error:
            raise ChatFailed(f"the answer did not end within {self._timeout_s:g} s; --timeout allows more") from error
        except aiohttp.ClientConnectorError as error:
            raise ChatFailed(
                f"no server answers at {self.server.base_url} now ({error.strerror}); is the cluster still running?"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise ChatFailed(f"the connection was lost during the answer ({type(error).__name__})") from error

    def _post(self, url: str, body: dict[str, Any]) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        timeout = aiohttp.ClientTimeout(total=self._timeout_s, connect=_CONNECT_S)
        return self._session.post(url, json=body, timeout=timeout)


async def _follow(
    response: aiohttp.ClientResponse, began: float, answer: ChatAnswer, on_text: Callable[[str], None]
) -> None:
    stream = SseParser()
    async for chunk in response.content.iter_any():
        now_s = time.monotonic() - began
        for data in stream.feed(chunk):
            if data == _DONE:
                return
            _take(data, now_s, answer, on_text)
    raise ChatFailed("the answer is incomplete: its stream ended early")


def _take(data: str, now_s: float, answer: ChatAnswer, on_text: Callable[[str], None]) -> None:
    """Add one event to `answer`."""
    try:
        event = json.loads(data)
        if "error" in event:
            raise ChatFailed(f"the answer is incomplete: {error_message(data)}")
        for choice in event.get("choices", []):
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
            piece = choice["delta"].get("content") or ""
            if piece:
                answer.ttft_s = now_s if answer.ttft_s is None else answer.ttft_s
                answer.last_s = now_s
                answer.text += piece
                on_text(without_surrogates(piece))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ChatFailed(
            f"the server sent an event that is not part of a chat completion: {data[:_SHOWN]!r}"
        ) from error
    answer.usage = _object(event.get("usage")) or answer.usage
    answer.extension = _object(event.get("moonpool")) or answer.extension


async def _refusal(response: aiohttp.ClientResponse) -> str:
    text = (await response.content.read(_ERROR_NBYTES)).decode("utf-8", "replace")
    reason = f"HTTP {response.status}: {error_message(text)}"
    if response.status in (401, 403):
        return f"{reason}; give the key with --api-key"
    if "context_length_exceeded" in text:
        return f"{reason}; /undo or /reset makes the conversation shorter"
    again = response.headers.get("Retry-After")
    return f"{reason}; retry in {again} s" if again else reason


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) else None
