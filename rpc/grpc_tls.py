"""Mutual TLS for gRPC: servers and channels with replaceable certificates, and calls restricted to cluster members."""

import asyncio
import contextlib
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from rpc.tls import Identity, Material, carries

__all__ = ["MembersOnly", "TlsChannel", "renewable_credentials", "server_credentials"]

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]  # generic in its stubs only

Context = grpc.aio.ServicerContext[Any, Any]

_log = logging.getLogger(__name__)


def server_credentials(identity: Identity) -> grpc.ServerCredentials:
    """Return credentials that read the files at each handshake and require a client certificate signed by the CA."""

    def read() -> tuple[bytes, bytes, bytes]:
        material = identity.material()
        return material.key_pem, material.cert_pem, material.ca_pem

    return renewable_credentials(read)


def renewable_credentials(read: Callable[[], tuple[bytes, bytes, bytes | None]]) -> grpc.ServerCredentials:
    """Return credentials that show at each handshake what `read` returns then, in any thread.

    That is (private key, certificate, CA), all in PEM. With a CA, clients must have a certificate signed by it.
    """
    shown = read()

    def current() -> grpc.ServerCertificateConfiguration | None:
        nonlocal shown
        found = read()
        if found == shown:
            return None
        shown = found
        return _configuration(*found)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(*shown),
        current,  # type: ignore[arg-type]  # None means no change; the stubs lack it
        require_client_authentication=shown[2] is not None,
    )


class MembersOnly(grpc.aio.ServerInterceptor):
    """Interceptor that rejects callers whose certificate is signed by the CA but lacks the cluster's name."""

    def __init__(self, name: str) -> None:
        self._name = name

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        handler = await continuation(handler_call_details)
        return None if handler is None else self._guarded(handler)

    def _guarded(self, handler: Any) -> "Handler":
        request_kind = "stream" if handler.request_streaming else "unary"
        answered = "stream" if handler.response_streaming else "unary"
        behaviour = getattr(handler, f"{request_kind}_{answered}")

        async def unary(request: Any, context: Context) -> Any:
            await self._check(context)
            return await behaviour(request, context)

        async def streaming(request: Any, context: Context) -> AsyncIterator[Any]:
            await self._check(context)
            async with contextlib.aclosing(behaviour(request, context)) as answers:
                async for answer in answers:
                    yield answer

        guarded = streaming if inspect.isasyncgenfunction(behaviour) else unary
        make: Callable[..., Handler] = getattr(grpc, f"{request_kind}_{answered}_rpc_method_handler")
        return make(guarded, handler.request_deserializer, handler.response_serializer)

    async def _check(self, context: Context) -> None:
        names = [name.decode() for name in context.auth_context().get("peer_dns", ())]
        if not carries(names, self._name):
            reason = f"the certificate is for {', '.join(names) or 'no DNS name'}, not for {self._name!r}"
            _log.warning("refused a call from %s: %s", context.peer(), reason)
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, reason)


class TlsChannel(grpc.aio.Channel):
    """Channel whose calls use a connection made with the certificate in force when the call begins."""

    def __init__(self, target: str, identity: Identity, options: Sequence[tuple[str, Any]]) -> None:
        self._target = target
        self._identity = identity
        self._options = options
        self._material: Material | None = None
        self._channel: grpc.aio.Channel
        self._former: grpc.aio.Channel | None = None
        self._closing: set[asyncio.Task[None]] = set()

    def current(self) -> grpc.aio.Channel:
        """Return the channel for a new call. Running calls keep theirs until the next certificate change."""
        material = self._identity.material()
        if material is not self._material:
            if self._former is not None:
                closing = asyncio.ensure_future(self._former.close())
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)
            self._former = None if self._material is None else self._channel
            name = ("grpc.ssl_target_name_override", material.name)
            self._channel = grpc.aio.secure_channel(self._target, _credentials(material), [*self._options, name])
            self._material = material
        return self._channel

    def unary_unary(self, *method: Any, **how: Any) -> Any:
        return _Late(self, "unary_unary", method, how)

    def unary_stream(self, *method: Any, **how: Any) -> Any:
        return _Late(self, "unary_stream", method, how)

    def stream_unary(self, *method: Any, **how: Any) -> Any:
        return _Late(self, "stream_unary", method, how)

    def stream_stream(self, *method: Any, **how: Any) -> Any:
        return _Late(self, "stream_stream", method, how)

    async def close(self, grace: float | None = None) -> None:
        if self._former is not None:
            await self._former.close(grace)
        if self._material is not None:
            await self._channel.close(grace)
        await asyncio.gather(*self._closing)

    async def __aenter__(self) -> "TlsChannel":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self.current().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self.current().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self.current().channel_ready()


class _Late:
    """Stub method that is bound to a channel only when it is called."""

    def __init__(self, channel: TlsChannel, kind: str, method: tuple[Any, ...], how: dict[str, Any]) -> None:
        self._channel, self._kind, self._method, self._how = channel, kind, method, how
        self._bound: tuple[grpc.aio.Channel | None, Any] = (None, None)

    def __call__(self, *request: Any, **how: Any) -> Any:
        channel = self._channel.current()
        if self._bound[0] is not channel:
            self._bound = channel, getattr(channel, self._kind)(*self._method, **self._how)
        return self._bound[1](*request, **how)


def _configuration(key_pem: bytes, cert_pem: bytes, ca_pem: bytes | None) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(key_pem, cert_pem)], ca_pem)


def _credentials(material: Material) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(material.ca_pem, material.key_pem, material.cert_pem)
