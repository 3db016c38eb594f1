"""Distributed tracing: one trace per request through all processes that serve it, as OpenTelemetry spans sent by OTLP.

Off by default; enabled by OpenTelemetry's variables, first of all OTEL_EXPORTER_OTLP_ENDPOINT. A process that passes a
request on sends its span's `traceparent` in a field of the message; the receiver continues the trace with `begin`. A
request that is not sampled has no traceparent and costs nothing. OpenTelemetry is imported only when enabled.
"""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from telemetry.tracing.span import OFF, Kind, Span

if TYPE_CHECKING:
    from telemetry.tracing.recording import Recorder

__all__ = ["OFF", "Kind", "Span", "begin", "close", "configure", "counts", "is_on", "receive"]

_recorder: "Recorder | None" = None


def configure(role: str, node_id: str, environment: Mapping[str, str] = os.environ) -> None:
    """Send this process's spans if its environment variables enable it. A second call replaces the first.

    Raises BadTracing for invalid variables.
    """
    close()
    if not _is_wanted(environment):
        return
    from telemetry.tracing.recording import Recorder

    global _recorder
    _recorder = Recorder(role, node_id)


def close() -> None:
    """Flush queued spans, for a moment at most, and stop sending."""
    global _recorder
    ended, _recorder = _recorder, None
    if ended is not None:
        ended.close()


def is_on() -> bool:
    """Return True if spans are sent."""
    return _recorder is not None


def begin(name: str, traceparent: str, **about: str | int | float | bool) -> Span:
    """Begin a span of this process as a child of `traceparent`; OFF if that is empty or spans are not sent."""
    if _recorder is None or not traceparent:
        return OFF
    return _recorder.begin(name, {"traceparent": traceparent}, about)


def receive(name: str, headers: Mapping[str, str], **about: str | int | float | bool) -> Span:
    """Begin the span of a client's request, in the trace named in the headers or in a new one.

    OFF if the sampler, or the originator of the trace, does not sample it.
    """
    if _recorder is None:
        return OFF
    return _recorder.begin(name, headers, about)


def counts() -> dict[str, int]:
    """Return the number of ended spans by result: exported, dropped (the queue was full), failed (to be sent)."""
    return {} if _recorder is None else _recorder.counts()


def _is_wanted(environment: Mapping[str, str]) -> bool:
    names = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    exporter = environment.get("OTEL_TRACES_EXPORTER", "").strip()
    is_disabled = environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    return any(environment.get(name, "").strip() for name in names) and exporter != "none" and not is_disabled
