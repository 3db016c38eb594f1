"""gRPC services of the endpoint picker: Envoy's external processing, and gRPC's health check."""

import asyncio
import contextlib
import logging
from collections.abc import Iterable
from time import monotonic
from typing import Any, Final

import grpc

from endpoint_picker.admission import AdmissionPreview
from endpoint_picker.choice import ranked
from endpoint_picker.endpoints import EndpointUse, EndpointWatch
from endpoint_picker.exchange import Exchange, refusal
from endpoint_picker.request import read_request
from frontend.api.body import BodyBudget
from frontend.errors import ApiError, BodyTimeout
from moonpool_proto.v1.ext_proc_pb2 import ProcessingResponse
from moonpool_proto.v1.ext_proc_pb2_grpc import ExternalProcessorServicer
from moonpool_proto.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from moonpool_proto.v1.health_pb2_grpc import HealthServicer
from settings.endpoint_picker import EndpointPickerSettings
from telemetry.endpoint_picker import EndpointPickerMetrics

__all__ = ["HealthService", "PickerService"]

log = logging.getLogger(__name__)
Context = grpc.aio.ServicerContext[Any, Any]

_LARGE_BODY_NBYTES: Final = 32 << 10  # is read in a thread
_EXT_PROC: Final = "envoy.service.ext_proc.v3.ExternalProcessor"


class PickerService(ExternalProcessorServicer):
    """Serves each HTTP exchange of the gateway in a stream of its own."""

    def __init__(
        self,
        settings: EndpointPickerSettings,
        endpoints: EndpointWatch,
        admission: AdmissionPreview | None,
        metrics: EndpointPickerMetrics,
    ) -> None:
        self._settings = settings
        self._endpoints = endpoints
        self._admission = admission
        self._metrics = metrics
        self._bodies = BodyBudget(settings.picker_max_bodies_bytes)
        self._num_picks = 0

    async def Process(  # type: ignore[override]  # writes instead of yielding, so that cancellation takes effect immediately
        self, _: object, context: Context
    ) -> None:
        exchange, use = Exchange(self._settings.picker_max_body_bytes), None
        limit_s = self._settings.picker_body_timeout_s
        with contextlib.ExitStack() as body_memory:
            body_place = body_memory.enter_context(self._bodies.place(""))
            try:
                async with asyncio.timeout(limit_s) as limit:
                    # Not by the iterator, which holds the last message, and so a whole body, until the next one comes
                    while (message := await context.read()) is not grpc.aio.EOF:
                        if message.observability_mode:  # the gateway waits for nothing
                            limit.reschedule(None)
                            continue
                        if use is None:  # later chunks only pass through
                            body_place.reserve(len(message.request_body.body))
                        responses = exchange.receive(message)
                        if exchange.awaits_pick:
                            limit.reschedule(None)
                            use = await self._pick(exchange)
                            responses += exchange.picked(use.addresses)
                            body_memory.close()
                        if use is not None and exchange.served_by:
                            use.served_by(exchange.served_by)
                        await _write_all(context, responses)
                        del message, responses  # may hold the body, which must not stay during the answer
            except ApiError as error:
                self._metrics.picks.labels(outcome=error.code or error.kind).inc()
                await context.write(refusal(error, exchange.path))
            except TimeoutError:
                late = BodyTimeout(f"the body did not arrive within {limit_s:g} s")
                self._metrics.picks.labels(outcome=late.code).inc()
                await context.write(refusal(late, exchange.path))
            finally:
                if use is not None:
                    use.end()

    async def _pick(self, exchange: Exchange) -> EndpointUse:
        """Choose the endpoint of a request. Raises ApiError."""
        started_s, body = monotonic(), exchange.body
        try:
            if body is not None and len(body) >= _LARGE_BODY_NBYTES:
                request = await asyncio.to_thread(read_request, exchange.path, exchange.headers, body)
            else:
                request = read_request(exchange.path, exchange.headers, body)
            self._endpoints.loads(request.model, exchange.subset)  # without one, the conductor need not judge
            if self._admission is not None and body is not None:
                is_judged = await self._admission.check(exchange.path, exchange.headers, body)
                if not is_judged:
                    self._metrics.unjudged.inc()
            self._num_picks += 1
            order = ranked(
                self._endpoints.loads(request.model, exchange.subset),
                request.affinity or self._num_picks.to_bytes(8, "little"),
                is_sticky=bool(request.affinity),
                slack=self._settings.picker_slack,
            )
        finally:
            self._metrics.seconds.observe(monotonic() - started_s)
        self._metrics.picks.labels(outcome="picked").inc()
        return self._endpoints.use(order[: 1 + self._settings.picker_fallbacks])


async def _write_all(context: Context, responses: Iterable[ProcessingResponse]) -> None:
    for response in responses:
        await context.write(response)


class HealthService(HealthServicer):
    """Answers for the services named in the endpoint picker protocol; all but "liveness" mean that it can pick."""

    def __init__(self, endpoints: EndpointWatch, stop: asyncio.Event) -> None:
        self._endpoints = endpoints
        self._stop = stop

    async def Check(self, request: HealthCheckRequest, context: Context) -> HealthCheckResponse:
        if request.service == "liveness":
            return HealthCheckResponse(status=HealthCheckResponse.SERVING)
        if request.service not in ("", "readiness", _EXT_PROC):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"unknown service {request.service!r}")
        is_ready = self._endpoints.is_ready and not self._stop.is_set()
        return HealthCheckResponse(status=HealthCheckResponse.SERVING if is_ready else HealthCheckResponse.NOT_SERVING)
