"""The endpoint picker as a process: its parts, its gRPC server, startup and shutdown."""

import asyncio
import contextlib
import logging
from collections.abc import Callable

import grpc
import grpc.aio

from endpoint_picker.admission import AdmissionPreview
from endpoint_picker.config import EndpointPickerConfig
from endpoint_picker.endpoints import EndpointWatch
from endpoint_picker.service import HealthService, PickerService
from frontend.errors import FrontendConfigError
from frontend.service import load_tokenizers
from moonpool_proto.v1.ext_proc_pb2_grpc import add_ExternalProcessorServicer_to_server
from moonpool_proto.v1.health_pb2_grpc import add_HealthServicer_to_server
from rpc.control import start_public_server
from settings.endpoint_picker import EndpointPickerSettings
from telemetry import RoleMetrics
from telemetry.endpoint_picker import EndpointPickerMetrics

log = logging.getLogger(__name__)


async def serve_endpoint_picker(
    config: EndpointPickerConfig,
    stop: asyncio.Event,
    on_ready: Callable[[str], None],
    metrics: RoleMetrics | None = None,
) -> None:
    """Serve until `stop` is set, then wait for exchanges under way up to the grace period.

    `on_ready(target)` is called once a gateway can connect. Endpoints and conductors may come later. Raises
    AddressInUse, BindFailed, FrontendConfigError or ModelFilesError.
    """
    async with contextlib.AsyncExitStack() as stack:
        credentials = _credentials(config.picker)
        endpoints = EndpointWatch(config.picker)
        stack.push_async_callback(endpoints.close)
        await endpoints.start()
        admission = None
        if config.admission is not None:
            tokenizers = await load_tokenizers(config.admission.models)
            admission = AdmissionPreview(config.admission, tokenizers, config.picker.picker_judgement_s)
            stack.push_async_callback(admission.close)
            await admission.start()
        registry = (metrics or RoleMetrics()).by_path["/metrics"]
        counters = EndpointPickerMetrics(registry, endpoints.counts)
        picker = PickerService(config.picker, endpoints, admission, counters)

        def add_services(server: grpc.aio.Server) -> None:
            add_ExternalProcessorServicer_to_server(picker, server)
            add_HealthServicer_to_server(HealthService(endpoints, stop), server)

        server = await start_public_server(config.listen.listen, add_services, credentials)
        try:
            log.info("endpoint picker listens at %s", server.target)
            on_ready(server.target)
            await stop.wait()
        finally:
            await server.stop(config.http.drain_grace_s)


def _credentials(settings: EndpointPickerSettings) -> grpc.ServerCredentials | None:
    """Return the certificate to show; None for none. Raises FrontendConfigError."""
    if settings.picker_tls_cert is None or settings.picker_tls_key is None:
        return None
    try:
        key, certificate = settings.picker_tls_key.read_bytes(), settings.picker_tls_cert.read_bytes()
    except OSError as error:
        raise FrontendConfigError(f"the picker's certificate cannot be read: {error}") from error
    return grpc.ssl_server_credentials([(key, certificate)])
