"""Calls that an API server forwards into its cluster, as JSON over HTTP: how commands reach a cluster from elsewhere.

A forwarded target is a URL below `/admin` of an API server, and a call is `POST TARGET/METHOD` with the request message
in protobuf's JSON. The answer is the reply message, or for a stream one line per message. Errors have OpenAI's form;
the `code` of one that a process of the cluster returned is gRPC's status name.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import grpc
import grpc.aio
from google.protobuf import json_format
from google.protobuf.descriptor_pool import Default as descriptors
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

if TYPE_CHECKING:
    import aiohttp

ADMIN: Final = "/admin/"
PACKAGE: Final = "moonpool.v1"
LINES: Final = "application/x-ndjson"  # type of an answer with several messages
_CONNECT_S: Final = 10.0
_STATUS_CODES: Final[Mapping[int, grpc.StatusCode]] = {
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.UNIMPLEMENTED,
    405: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}

_api_key = ""


def authorize(api_key: str) -> None:
    """Send this API key with the forwarded calls of channels that are opened later; "" sends none."""
    global _api_key
    _api_key = api_key


def is_forwarded(target: str) -> bool:
    """Return True if calls of the target are forwarded by an API server."""
    return target.startswith(("http://", "https://"))


def conductor_url(url: str, target: str = "") -> str:
    """Return the target at which the API server at `url` forwards calls to a conductor, by default to its preferred."""
    return f"{url}{ADMIN}conductors/{quote(target)}" if target else f"{url}{ADMIN}conductor"


def node_url(url: str, node_id: str) -> str:
    """Return the target at which the API server at `url` forwards calls to a node."""
    return f"{url}{ADMIN}nodes/{quote(node_id)}"


def supervisor_url(url: str) -> str:
    """Return the target at which the API server at `url` forwards calls to the `serve` that started it."""
    return f"{url}{ADMIN}supervisor"


def request_type(service: str, method: str) -> type[Message]:
    """Return the class of a method's request. Raises KeyError for an unknown method."""
    return GetMessageClass(descriptors().FindMethodByName(f"{PACKAGE}.{service}.{method}").input_type)


def to_json(message: Message) -> bytes:
    """Encode a message as one line of JSON."""
    fields = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return json.dumps(fields, separators=(",", ":")).encode()


def open_gateway(target: str) -> "GatewayChannel":
    """Open a channel to a forwarded target. The caller must close it."""
    return GatewayChannel(target, _api_key)


async def conductors_behind(url: str) -> list[str]:
    """Return the conductors' targets, as the API server at `url` knows them. Raises grpc.aio.AioRpcError."""
    channel = open_gateway(url)
    try:
        found = await channel.fetch("GET", f"{ADMIN}conductors", b"")
        return [str(target) for target in json.loads(found)["conductors"]]
    except (ValueError, KeyError, TypeError) as error:
        raise failure(grpc.StatusCode.UNIMPLEMENTED, f"{url} is not an API server of Moonpool") from error
    finally:
        await channel.close()


def failure(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    """Return the error of a call, as gRPC raises it."""
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)


class GatewayChannel(grpc.aio.Channel):
    """Channel to one forwarded target. Streams of requests are not forwarded."""

    def __init__(self, target: str, api_key: str) -> None:
        self._target = target
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._session: aiohttp.ClientSession | None = None

    def unary_unary(self, method: str, *_: Any, **__: Any) -> Any:
        async def call(request: Message) -> Message:
            name, reply = _method(method)
            return _parsed(reply, await self.fetch("POST", f"/{name}", to_json(request)))

        return call

    def unary_stream(self, method: str, *_: Any, **__: Any) -> Any:
        def call(request: Message) -> _ForwardedStream:
            name, reply = _method(method)
            return _ForwardedStream(self._lines(f"/{name}", to_json(request)), reply)

        return call

    def stream_unary(self, *_: Any, **__: Any) -> Any:
        return _not_forwarded

    def stream_stream(self, *_: Any, **__: Any) -> Any:
        return _not_forwarded

    async def fetch(self, verb: str, path: str, body: bytes) -> bytes:
        """Return the body of the answer. Raises grpc.aio.AioRpcError."""
        async with self._asking(verb, path, body) as answer:
            return await answer.read()

    async def _lines(self, path: str, body: bytes) -> AsyncGenerator[bytes]:
        async with self._asking("POST", path, body) as answer:
            async for line in answer.content:
                yield line

    def _asking(self, verb: str, path: str, body: bytes) -> "_Asking":
        import aiohttp

        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, connect=_CONNECT_S)  # the callers have deadlines
            self._session = aiohttp.ClientSession(headers=self._headers, timeout=timeout)
        return _Asking(self._session, verb, self._target + path, body)

    async def close(self, grace: float | None = None) -> None:
        if self._session is not None:
            await self._session.close()

    async def __aenter__(self) -> "GatewayChannel":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return grpc.ChannelConnectivity.READY  # each call connects anew

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        if last_observed_state is grpc.ChannelConnectivity.READY:
            await asyncio.Future()

    async def channel_ready(self) -> None:
        return


class _Asking:
    """Context of one HTTP request. Errors inside and at the start are raised as gRPC's."""

    def __init__(self, session: "aiohttp.ClientSession", verb: str, url: str, body: bytes) -> None:
        self._url = url
        self._request = session.request(verb, url, data=body or None, allow_redirects=False)

    async def __aenter__(self) -> "aiohttp.ClientResponse":
        import aiohttp

        try:
            answer = await self._request.__aenter__()
            if answer.status != 200:
                async with answer:
                    raise _refusal(answer.status, await answer.content.read(1 << 16), self._url)
            return answer
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise _unreachable(self._url, error) from error

    async def __aexit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        import aiohttp

        await self._request.__aexit__(kind, error, traceback)
        if isinstance(error, aiohttp.ClientError | OSError):
            raise _unreachable(self._url, error) from error


class _ForwardedStream:
    """Replies of one streaming call, as gRPC's call objects give them."""

    def __init__(self, lines: AsyncGenerator[bytes], reply: type[Message]) -> None:
        self._lines = lines
        self._reply = reply

    async def read(self) -> Any:
        """Return the next message, or gRPC's EOF. Raises grpc.aio.AioRpcError."""
        async for line in self._lines:
            content = _object(line)
            if "error" in content:
                raise _error_of(content["error"], 500)
            return _parsed(self._reply, line)
        return grpc.aio.EOF

    async def __aiter__(self) -> AsyncGenerator[Message]:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message

    def cancel(self) -> None:
        """Do nothing: the connection is closed with the channel."""


def _method(path: str) -> tuple[str, type[Message]]:
    """Return the name and reply of gRPC's path of a method, such as /moonpool.v1.Conductor/Cluster."""
    service, _, name = path.removeprefix("/").partition("/")
    return name, GetMessageClass(descriptors().FindMethodByName(f"{service}.{name}").output_type)


def _parsed(kind: type[Message], text: bytes) -> Message:
    try:
        return json_format.Parse(text, kind(), ignore_unknown_fields=True)  # fields of a later version
    except (json_format.ParseError, UnicodeDecodeError) as error:
        raise failure(grpc.StatusCode.INTERNAL, f"the answer is not a {kind.__name__}: {error}") from error


def _refusal(status: int, body: bytes, url: str) -> grpc.aio.AioRpcError:
    content = _object(body)
    if "error" not in content:
        return failure(
            _STATUS_CODES.get(status, grpc.StatusCode.UNKNOWN),
            f"{_server(url)} answers with HTTP {status}: is it an API server of Moonpool?",
        )
    return _error_of(content["error"], status)


def _error_of(error: Any, status: int) -> grpc.aio.AioRpcError:
    fields = error if isinstance(error, dict) else {"message": error}
    code = grpc.StatusCode.__members__.get(str(fields.get("code")), _STATUS_CODES.get(status, grpc.StatusCode.UNKNOWN))
    details = str(fields.get("message"))
    if status in (401, 403):
        details += "; give an admin's key with --api-key-file or MOONPOOL_API_KEY"
    elif code is grpc.StatusCode.UNIMPLEMENTED:
        details += "; the API server may be of an earlier version, which does not forward this call"
    return failure(code, details)


def _unreachable(url: str, error: Exception) -> grpc.aio.AioRpcError:
    import aiohttp

    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        why = f"its certificate is not trusted ({error.certificate_error}); set SSL_CERT_FILE to the CA that signed it"
    elif isinstance(error, aiohttp.ClientConnectorError):
        why = error.strerror or str(error.os_error)
    else:
        why = str(error) or type(error).__name__
    return failure(grpc.StatusCode.UNAVAILABLE, f"no API server answers at {_server(url)}: {why}")


def _server(url: str) -> str:
    """Return the URL of the API server that forwards calls to `url`."""
    return url.partition(ADMIN)[0]


def _object(text: bytes) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _not_forwarded(*_: Any, **__: Any) -> Any:
    raise failure(grpc.StatusCode.UNIMPLEMENTED, "API servers forward no streams of requests")
