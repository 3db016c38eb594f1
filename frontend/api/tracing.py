"""The span of a request from outside: from its arrival to the last byte of its answer, whatever becomes of it."""

from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from telemetry import tracing

__all__ = ["Traced", "span_of"]

_GENERATE: Final = frozenset({"/v1/completions", "/v1/chat/completions"})
_KEY: Final = "moonpool.span"


class Traced:
    """Around the application: traces what generates. The answer's `traceparent` names the request's span."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in _GENERATE:
            await self._app(scope, receive, send)
            return
        method, path = scope["method"], scope["path"]
        span = tracing.receive(
            f"{method} {path}", Headers(scope=scope), http__request__method=method, http__route=path, url__path=path
        )
        if not span.is_on:
            await self._app(scope, receive, send)
            return
        scope[_KEY] = span

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["traceparent"] = span.traceparent
                span.note(http__response__status_code=message["status"])
                if message["status"] >= 500:
                    span.fail(f"HTTP {message['status']}")
            await send(message)

        with span:
            await self._app(scope, receive, told)


def span_of(http: Request) -> tracing.Span:
    """The request's span; OFF where it is not traced."""
    span: tracing.Span = http.scope.get(_KEY, tracing.OFF)
    return span
