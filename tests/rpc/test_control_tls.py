"""gRPC by mutual TLS: every kind of call, who is let in, certificates that change, and unix sockets in the clear."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from rpc import control
from rpc.errors import CallRefused, InvalidArgument, Unavailable
from rpc.tls import TlsFiles

TlsSettings = Callable[..., dict[str, Path]]


class Service(grpc.GenericRpcHandler):
    """/t/unary echoes; /t/yields and /t/writes answer twice, each in its style; /t/both echoes a stream."""

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        async def unary(request: bytes, context: Any) -> bytes:
            return request

        async def yields(request: bytes, context: Any) -> AsyncIterator[bytes]:
            yield request
            yield request

        async def writes(request: bytes, context: Any) -> None:
            await context.write(request)
            await context.write(request)

        async def both(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            async for request in requests:
                yield request

        return {
            "/t/unary": grpc.unary_unary_rpc_method_handler(unary),
            "/t/yields": grpc.unary_stream_rpc_method_handler(yields),
            "/t/writes": grpc.unary_stream_rpc_method_handler(writes),  # type: ignore[arg-type]
            "/t/both": grpc.stream_stream_rpc_method_handler(both),  # type: ignore[arg-type]
        }.get(details.method)  # type: ignore[attr-defined]


def files_of(settings: dict[str, Path]) -> TlsFiles:
    return TlsFiles(settings["tls_cert"], settings["tls_key"], settings["tls_ca"])


@pytest.fixture(autouse=True)
def in_the_clear_afterwards() -> Iterator[None]:
    yield
    control.secure(None)


@pytest.fixture
async def target() -> AsyncIterator[Callable[..., Any]]:
    """`await target(listen)`: a server with what `control.secure` was told last; gives its address."""
    servers = []

    async def start(listen: str = "127.0.0.1:0") -> str:
        server = await control.start_server(listen, lambda one: one.add_generic_rpc_handlers((Service(),)))
        servers.append(server)
        return server.target

    yield start
    for server in servers:
        await server.stop()


async def echo(channel: grpc.aio.Channel, target: str, deadline_s: float = 20.0) -> bytes:
    rpc = channel.unary_unary("/t/unary")(b"hello")
    return await control.call(rpc, what="echo", target=target, deadline_s=deadline_s)


async def test_every_kind_of_call_goes_encrypted(target: Any, tls_settings: TlsSettings) -> None:
    control.secure(files_of(tls_settings()))
    address = await target()
    async with control.open_channel(address) as channel:
        assert await echo(channel, address) == b"hello"
        assert [answer async for answer in channel.unary_stream("/t/yields")(b"y")] == [b"y"] * 2
        assert [answer async for answer in channel.unary_stream("/t/writes")(b"w")] == [b"w"] * 2
        assert [answer async for answer in channel.stream_stream("/t/both")(iter([b"1", b"2"]))] == [b"1", b"2"]
        with pytest.raises(CallRefused, match="UNIMPLEMENTED"):
            await control.call(channel.unary_unary("/t/none")(b""), what="none", target=address, deadline_s=20)


async def test_a_caller_in_the_clear_gets_nowhere(target: Any, tls_settings: TlsSettings) -> None:
    control.secure(files_of(tls_settings()))
    address = await target()
    control.secure(None)
    async with control.open_channel(address) as channel:
        with pytest.raises(Unavailable, match="if it uses TLS, set tls_cert, tls_key and tls_ca here"):
            await echo(channel, address)


async def test_a_caller_that_encrypts_is_told_of_a_server_in_the_clear(target: Any, tls_settings: TlsSettings) -> None:
    address = await target()
    control.secure(files_of(tls_settings()))
    async with control.open_channel(address) as channel:
        with pytest.raises(Unavailable, match=r"(?i)handshake|ssl|tls"):
            await echo(channel, address)


@pytest.mark.parametrize("shown", [{"name": "stranger", "ca": "ca"}, {"name": "expired"}, {}])
async def test_an_outsider_is_not_let_in(target: Any, tls_settings: TlsSettings, shown: dict[str, str]) -> None:
    control.secure(files_of(tls_settings()))
    address = await target()
    files = tls_settings(**shown, of="outsider")
    pair = (files["tls_key"].read_bytes(), files["tls_cert"].read_bytes()) if shown else (None, None)
    credentials = grpc.ssl_channel_credentials(files["tls_ca"].read_bytes(), *pair)
    options = [("grpc.ssl_target_name_override", "moonpool")]
    async with grpc.aio.secure_channel(address, credentials, options=options) as channel:
        with pytest.raises(Unavailable):
            await echo(channel, address)


@pytest.mark.parametrize("name", ["misnamed", "of_mail"])
async def test_a_certificate_of_the_ca_for_another_name_makes_no_calls(
    target: Any, tls_settings: TlsSettings, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    control.secure(files_of(tls_settings()))
    address = await target()
    files = tls_settings(name, of="outsider")
    credentials = grpc.ssl_channel_credentials(*(files[key].read_bytes() for key in ("tls_ca", "tls_key", "tls_cert")))
    options = [("grpc.ssl_target_name_override", "moonpool")]
    async with grpc.aio.secure_channel(address, credentials, options=options) as channel:
        with pytest.raises(CallRefused, match="is for elsewhere, not for 'moonpool'"):
            await echo(channel, address)
        with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
            async for _ in channel.unary_stream("/t/yields")(b""):
                pass
    assert "refused a call from" in caplog.text


async def test_a_server_of_another_ca_is_not_believed(target: Any, tls_settings: TlsSettings) -> None:
    control.secure(files_of(tls_settings("stranger", ca="other_ca", of="server")))
    address = await target()
    control.secure(files_of(tls_settings()))
    async with control.open_channel(address) as channel:
        with pytest.raises(Unavailable, match=r"(?i)certificate"):
            await echo(channel, address)


async def test_both_sides_show_new_certificates_without_a_restart(target: Any, tls_settings: TlsSettings) -> None:
    settings = tls_settings()
    control.secure(files_of(settings))
    address = await target()
    host, port = address.split(":")

    def shown() -> bytes:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        with context.wrap_socket(socket.create_connection((host, int(port)), 20)) as caller:
            return caller.getpeercert(binary_form=True) or b""

    async with control.open_channel(address) as channel:
        going_on = channel.stream_stream("/t/both")()
        await going_on.write(b"before")
        assert await going_on.read() == b"before"
        before = await asyncio.to_thread(shown)
        tls_settings("stranger", ca="other_ca")  # from now on nobody of the old CA is believed
        assert await echo(channel, address) == b"hello"
        assert await asyncio.to_thread(shown) != before
        await going_on.write(b"after")
        assert await going_on.read() == b"after"
        going_on.cancel()


async def test_unix_sockets_stay_in_the_clear(target: Any, tls_settings: TlsSettings, short_path: Path) -> None:
    control.secure(files_of(tls_settings()))
    address = await target(f"unix:{short_path}/c.sock")
    control.secure(None)
    async with control.open_channel(address) as channel:
        assert await echo(channel, address) == b"hello"


def test_key_material_that_cannot_be_used_is_refused(tls_settings: TlsSettings) -> None:
    with pytest.raises(InvalidArgument, match="tls_key"):
        control.secure(files_of(tls_settings(key="successor")))
