"""The HTTP port: found free before anything starts, and asked whether the cluster is ready. No server lives here."""

import asyncio
import errno
import http.client
import socket
import ssl
import urllib.error
import urllib.request

from moonpool.errors import ConfigError, PortInUse

_POLL_INTERVAL_S = 0.05
_ANSWER_TIMEOUT_S = 5.0


def claim_port(host: str, port: int) -> int:
    """The port to serve on: `port` itself, or a free one for 0. Raises PortInUse, or ConfigError for a bad host."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
            return int(probe.getsockname()[1])
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(
                f"port {port} on {host} is in use by another program; stop it, or choose another with --port "
                "(--port 0 takes a free one)"
            ) from error
        raise ConfigError(f"cannot listen at {host}:{port}: {error}") from error


def local_url(host: str, port: int, scheme: str = "http") -> str:
    """The URL under which this machine reaches a server that listens at `host`."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(host, host)
    bracketed = f"[{reachable}]" if ":" in reachable and "[" not in reachable else reachable
    return f"{scheme}://{bracketed}:{port}"


async def wait_http_ready(url: str) -> None:
    """Until `url`/ready answers 200; the caller sets the deadline."""
    while True:
        if await asyncio.to_thread(_answers_ok, f"{url}/ready"):
            return
        await asyncio.sleep(_POLL_INTERVAL_S)


async def is_alive(url: str, timeout_s: float) -> bool:
    """Whether `url`/live answers 200 within `timeout_s`."""
    return await asyncio.to_thread(_answers_ok, f"{url}/live", timeout_s)


def _answers_ok(url: str, timeout_s: float = _ANSWER_TIMEOUT_S) -> bool:
    https = urllib.request.HTTPSHandler(context=_any_certificate())
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), https)
    try:
        with opener.open(url, timeout=timeout_s) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError):
        return False


def _any_certificate() -> ssl.SSLContext:
    """For a sign of life of a process of our own, to which nothing is told: its certificate is for clients to check."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
