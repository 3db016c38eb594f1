"""The HTTP port: opened before anything starts, and polled until the cluster is ready. Contains no server."""

import asyncio
import errno
import http.client
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from moonpool.errors import ConfigError, PortInUse

LISTENER_VARIABLE = "MOONPOOL_LISTENER"  # descriptor of the socket that a frontend inherits
_BACKLOG = 2048
_POLL_INTERVAL_S = 0.05
_ANSWER_TIMEOUT_S = 5.0


def claim_port(host: str, port: int) -> int:
    """Return a port that can be listened at: `port`, or a free one for 0. Raises as `open_listener`."""
    with open_listener(host, port) as listener:
        return int(listener.getsockname()[1])


def open_listener(host: str, port: int) -> socket.socket:
    """Return a socket that listens at `port`, or a free one for 0. Raises PortInUse, or ConfigError for a bad host.

    Frontends inherit it. Connections wait in its backlog while none of them accepts.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
        return listener
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(
                f"port {port} on {host} is in use by another program; stop it, or choose another with --port "
                "(--port 0 takes a free one)"
            ) from error
        raise ConfigError(f"cannot listen at {host}:{port}: {error}") from error


def local_url(host: str, port: int, scheme: str = "http") -> str:
    """Return the URL by which this machine reaches a server that listens at `host`."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(host, host)
    bracketed = f"[{reachable}]" if ":" in reachable and "[" not in reachable else reachable
    return f"{scheme}://{bracketed}:{port}"


async def wait_http_ready(url: str) -> None:
    """Wait until `url`/ready answers 200; the caller sets the deadline."""
    while True:
        if await asyncio.to_thread(_answers_ok, f"{url}/ready"):
            return
        await asyncio.sleep(_POLL_INTERVAL_S)


async def is_alive(url: str, timeout_s: float) -> bool:
    """Return True if `url`/live answers 200 within `timeout_s`."""
    return await asyncio.to_thread(_answers_ok, f"{url}/live", timeout_s)


def _answers_ok(url: str, timeout_s: float = _ANSWER_TIMEOUT_S) -> bool:
    try:
        with open_url(url, timeout_s, any_certificate=True) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError):
        return False


def open_url(
    url: str, timeout_s: float, *, headers: Mapping[str, str] | None = None, any_certificate: bool = False
) -> Any:
    """Open a URL without the environment's proxies. Raises urllib's HTTPError for an error status, and OSError.

    `any_certificate` is for liveness checks of our own processes, which send nothing secret.
    """
    https = [urllib.request.HTTPSHandler(context=_unverified())] if any_certificate else []
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), *https)
    return opener.open(urllib.request.Request(url, headers=dict(headers or {})), timeout=timeout_s)


def _unverified() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
