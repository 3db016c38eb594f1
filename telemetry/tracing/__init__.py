"""One trace for a request through every process that serves it: OpenTelemetry spans, sent by OTLP. Off by default.

Switched on by OpenTelemetry's own variables, OTEL_EXPORTER_OTLP_ENDPOINT first of all. Whoever passes a request on
sends its span's `traceparent` along, in a field of the message; whoever gets one goes on from it with `begin`. A
request that is not sampled has no traceparent, and costs nothing anywhere. Nothing of OpenTelemetry is imported while
it is off.
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
    """From now on this process's spans are sent, if its variables say so. A second call replaces the first.

    Raises BadTracing for variables that cannot be followed.
    """
    close()
    if not _is_wanted(environment):
        return
    from telemetry.tracing.recording import Recorder

    global _recorder
    _recorder = Recorder(role, node_id)


def close() -> None:
    """Send what is there, for a moment at most, and send nothing more."""
    global _recorder
    ended, _recorder = _recorder, None
    if ended is not None:
        ended.close()


def is_on() -> bool:
    """Whether spans are sent."""
    return _recorder is not None


def begin(name: str, traceparent: str, **about: str | int | float | bool) -> Span:
    """The span of what this process does for another one's span; OFF where that has none, or spans are not sent."""
    if _recorder is None or not traceparent:
        return OFF
    return _recorder.begin(name, {"traceparent": traceparent}, about)


def receive(name: str, headers: Mapping[str, str], **about: str | int | float | bool) -> Span:
    """The span of a request from outside: it goes on with the trace that the headers name, or begins one. OFF where the
    sampler, or the trace's beginner, leaves it out."""
    if _recorder is None:
        return OFF
    return _recorder.begin(name, headers, about)


def counts() -> dict[str, int]:
    """Spans that ended here, by what became of them: exported, dropped (the queue was full), failed (to be sent)."""
    return {} if _recorder is None else _recorder.counts()


def _is_wanted(environment: Mapping[str, str]) -> bool:
    names = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    exporter = environment.get("OTEL_TRACES_EXPORTER", "").strip()
    is_disabled = environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    return any(environment.get(name, "").strip() for name in names) and exporter != "none" and not is_disabled
