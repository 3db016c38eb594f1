"""Health endpoints of a role for orchestrators: /live answers while its event loop runs, /ready while it accepts calls;
and its metrics for Prometheus.

The HTTP server is imported only when an address is configured.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from moonpool.errors import ConfigError
from telemetry import RoleMetrics, exposition

if TYPE_CHECKING:
    from aiohttp import web

_STARTING, _READY, _DRAINING = "starting", "ready", "draining"


@asynccontextmanager
async def health_answers(
    address: tuple[str, int], node_id: str, stop: asyncio.Event, metrics: RoleMetrics | None = None
) -> AsyncIterator[tuple[int, Callable[[], None]]]:
    """Serve the endpoints at (host, port); yield the port, and the function to call once the role is ready.

    Once `stop` is set, /ready answers 503. Raises ConfigError if it cannot listen at the address.
    """
    from aiohttp import web

    state = _State(node_id, stop)
    app = web.Application()
    app.router.add_get("/live", state.live)
    app.router.add_get("/ready", state.ready)
    if metrics is not None:
        app.router.add_get("/metrics", partial(_metrics, metrics))
        app.router.add_get("/metrics/cluster", partial(_metrics, metrics))
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, *address)
        try:
            await site.start()
        except OSError as error:
            raise ConfigError(f"--health: cannot listen at {address[0]}:{address[1]}: {error}") from error
        yield int(runner.addresses[0][1]), state.became_ready
    finally:
        await runner.cleanup()


async def _metrics(metrics: RoleMetrics, request: "web.Request") -> "web.Response":
    from aiohttp import web

    registry = metrics.by_path.get(request.path)
    if registry is None:
        raise web.HTTPNotFound(text="only conductors have /metrics/cluster: this role exports its own /metrics\n")
    text, content_type = exposition(registry, request.headers.get("accept", ""))
    return web.Response(body=text, headers={"content-type": content_type})


class _State:
    """State of one role, and its two endpoints."""

    def __init__(self, node_id: str, stop: asyncio.Event) -> None:
        self._node_id = node_id
        self._stop = stop
        self._is_ready = False

    def became_ready(self) -> None:
        self._is_ready = True

    @property
    def _state(self) -> str:
        if self._stop.is_set():
            return _DRAINING
        return _READY if self._is_ready else _STARTING

    async def live(self, _: "web.Request") -> "web.Response":
        return self._answer(200)

    async def ready(self, _: "web.Request") -> "web.Response":
        return self._answer(200 if self._state == _READY else 503)

    def _answer(self, status: int) -> "web.Response":
        from aiohttp import web

        return web.json_response({"node": self._node_id, "state": self._state}, status=status)
