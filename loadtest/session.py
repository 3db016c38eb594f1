"""The HTTP session that requests are sent through."""

from __future__ import annotations

import resource
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress

import aiohttp

_KEPT_S = 2.0
"""Servers close an idle connection after 5 s or more; a request must not meet that moment."""


@asynccontextmanager
async def open_session(
    *, api_key: str, headers: Mapping[str, str] | None = None, keep_connections: bool = False
) -> AsyncIterator[aiohttp.ClientSession]:
    """A session without a limit of connections, which would close an open loop.

    `keep_connections` False: a connection per request, as from as many users.
    """
    sent = {"Content-Type": "application/json"}
    if api_key:
        sent["Authorization"] = f"Bearer {api_key}"
    connector = (
        aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEPT_S)
        if keep_connections
        else aiohttp.TCPConnector(limit=0, force_close=True)
    )
    async with aiohttp.ClientSession(connector=connector, headers={**sent, **(headers or {})}) as session:
        yield session


def allow_many_connections() -> None:
    """An overloaded server leaves many requests in flight, each with a connection: take all the files we may have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
