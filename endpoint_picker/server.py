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
from frontend.http.tls import certificate_of
from frontend.service import load_tokenizers
from moonpool_proto.v1.ext_proc_pb2_grpc import add_ExternalProcessorServicer_to_server
from moonpool_proto.v1.health_pb2_grpc import add_HealthServicer_to_server
from rpc.control import start_public_server
from rpc.grpc_tls import renewable_credentials
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
    """Return the certificate to show, renewed when its files change; None for none. Raises FrontendConfigError."""
    certificate = certificate_of(settings.picker_tls_cert, settings.picker_tls_key, "--picker-tls")
    return None if certificate is None else renewable_credentials(lambda: (*certificate.pem(), None))
