"""Span recording with OpenTelemetry's SDK: an exporter thread with a bounded queue."""

import asyncio
import os
import threading
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from types import TracebackType
from typing import Any, Final, Self

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import (
    INVALID_SPAN_CONTEXT,
    NonRecordingSpan,
    SpanKind,
    Status,
    StatusCode,
    set_span_in_context,
)
from opentelemetry.trace import Span as SdkSpan
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from telemetry.errors import BadTracing
from telemetry.tracing.span import OFF, Kind, Span

__all__ = ["Recorder"]

_KINDS: Final = {"internal": SpanKind.INTERNAL, "server": SpanKind.SERVER, "client": SpanKind.CLIENT}
_LAST_SPANS_S: Final = 2.0
_QUEUE: Final = 2048
_PROPAGATOR: Final = TraceContextTextMapPropagator()
# An empty context: a span's parent is always passed explicitly.
_NO_CONTEXT: Final = set_span_in_context(NonRecordingSpan(INVALID_SPAN_CONTEXT))
_PREFIXED: Final = ("http.", "url.", "gen_ai.", "server.", "client.", "network.", "error.")


class Recorder:
    """Spans of one process. OpenTelemetry's variables set endpoint, headers, timeout, sampler and queue size."""

    def __init__(self, role: str, node_id: str) -> None:
        """Raises BadTracing."""
        protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
        if protocol not in (None, "", "http/protobuf"):
            raise BadTracing(
                f"OTEL_EXPORTER_OTLP_PROTOCOL must be http/protobuf, got {protocol!r}: unset it, and set "
                "OTEL_EXPORTER_OTLP_ENDPOINT to the collector's HTTP port, usually 4318"
            )
        about = {"service.instance.id": node_id, "service.namespace": "moonpool", "service.version": _version()}
        if not os.environ.get("OTEL_SERVICE_NAME"):
            about["service.name"] = f"moonpool-{role}"
        try:
            self._exporter = _Counting(OTLPSpanExporter())
            size = int(os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE", _QUEUE))
            self._queue = _Bounded(self._exporter, size)
            self._provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
        except ValueError as error:
            raise BadTracing(f"invalid OpenTelemetry variables (OTEL_…): {error}") from error
        self._provider.add_span_processor(self._queue)
        self._tracer = self._provider.get_tracer("moonpool")

    def begin(self, name: str, headers: Mapping[str, str], about: Mapping[str, Any]) -> Span:
        """Begin a server span, with the parent named in the headers, if any; OFF if it is not sampled."""
        context = _PROPAGATOR.extract(headers, _NO_CONTEXT)
        span = self._tracer.start_span(name, context, SpanKind.SERVER, _named(about))
        if not span.is_recording():
            return OFF
        return _Recorded(self._tracer, span)

    def counts(self) -> dict[str, int]:
        return {
            "exported": self._exporter.num_exported,
            "failed": self._exporter.num_failed,
            "dropped": self._queue.num_dropped,
        }

    def close(self) -> None:
        """Flush queued spans, for a moment at most."""
        # The SDK would wait half a minute for a collector that does not answer, and delay the end of the role.
        ending = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        ending.start()
        ending.join(_LAST_SPANS_S)
        if ending.is_alive():
            self._exporter.shutdown()


class _Recorded(Span):
    __slots__ = ("_is_over", "_span", "_tracer")

    def __init__(self, tracer: Any, span: SdkSpan) -> None:
        self._tracer = tracer
        self._span = span
        self._is_over = False

    @property
    def traceparent(self) -> str:
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, set_span_in_context(self._span, _NO_CONTEXT))
        return carrier["traceparent"]

    @property
    def is_on(self) -> bool:
        return True

    def child(self, name: str, kind: Kind = "internal", **about: str | int | float | bool) -> Span:
        context = set_span_in_context(self._span, _NO_CONTEXT)
        return _Recorded(self._tracer, self._tracer.start_span(name, context, _KINDS[kind], _named(about)))

    def past(self, name: str, start_s: float, end_s: float, **about: str | int | float | bool) -> None:
        context = set_span_in_context(self._span, _NO_CONTEXT)
        wall_ns, now_s = time.time_ns(), time.monotonic()
        start_ns, end_ns = (wall_ns - int((now_s - at_s) * 1e9) for at_s in (start_s, max(start_s, end_s)))
        self._tracer.start_span(name, context, attributes=_named(about), start_time=start_ns).end(end_ns)

    def note(self, **about: str | int | float | bool) -> None:
        self._span.set_attributes(_named(about))

    def event(self, name: str) -> None:
        self._span.add_event(name)

    def fail(self, why: str) -> None:
        self._span.set_status(Status(StatusCode.ERROR, why))

    def end(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._span.end()

    def end_by(self, error: BaseException) -> None:
        if isinstance(error, asyncio.CancelledError):
            self.note(cancelled=True)
        else:
            self.fail(f"{type(error).__name__}: {error}")
        self.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.end_by(error)
        self.end()


class _Counting(SpanExporter):
    """Exporter wrapper that counts exported and failed spans."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self.num_exported = self.num_failed = 0

    @property
    def num_done(self) -> int:
        """Number of spans that have left the queue."""
        return self.num_exported + self.num_failed

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        is_right = False
        try:
            result = self._exporter.export(spans)
            is_right = result is SpanExportResult.SUCCESS
        finally:
            if is_right:
                self.num_exported += len(spans)
            else:
                self.num_failed += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


class _Bounded(SpanProcessor):
    """Batch processor that drops and counts new spans when the queue is full, instead of replacing queued ones."""

    def __init__(self, exporter: _Counting, size: int) -> None:
        self._exporter = exporter
        self._size = size
        self._batches = BatchSpanProcessor(exporter, max_queue_size=size, max_export_batch_size=min(512, size))
        self._num_taken = 0
        self._lock = threading.Lock()
        self.num_dropped = 0

    def on_end(self, span: ReadableSpan) -> None:
        with self._lock:
            if self._num_taken - self._exporter.num_done >= self._size:
                self.num_dropped += 1
                return
            self._num_taken += 1
        self._batches.on_end(span)

    def shutdown(self) -> None:
        self._batches.shutdown()  # type: ignore[no-untyped-call]

    def force_flush(self, timeout_millis: int | None = None) -> bool:
        return self._batches.force_flush(timeout_millis)


def _named(about: Mapping[str, Any]) -> dict[str, Any]:
    named = ((name.replace("__", "."), value) for name, value in about.items())
    return {name if name.startswith(_PREFIXED) else f"moonpool.{name}": value for name, value in named}


def _version() -> str:
    try:
        return version("moonpool")
    except PackageNotFoundError:
        return "unknown"
