"""A load: requests with all that a process needs to send them, and the sending of one process's share of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from loadtest.client import CompletionClient
from loadtest.dialect import Dialect, TokenIdCompletions
from loadtest.plan import PlannedRequest
from loadtest.record import RequestRecord
from loadtest.retry import RetryPolicy
from loadtest.sender import Tally, send_open_loop
from loadtest.server import ServerInfo
from loadtest.session import open_session


@dataclass(frozen=True)
class Load:
    """`requests` in order of arrival; each leaves at arrival_s / speed. `limit`: at most so many in flight. `retry`:
    what is done about rejections. It can be pickled."""

    server: ServerInfo
    requests: Sequence[PlannedRequest] = field(repr=False)
    timeout_s: float
    dialect: Dialect = field(default_factory=TokenIdCompletions)
    speed: float = 1.0
    limit: int | None = None
    retry: RetryPolicy | None = None
    cache_salt: str = ""
    api_key: str = field(default="", repr=False)
    headers: tuple[tuple[str, str], ...] = ()
    keep_connections: bool = False


async def send_share(
    load: Load, *, clock: Callable[[], float], stop: asyncio.Event, tally: Tally
) -> list[RequestRecord]:
    """Send the load from this process; returns the records of what was sent."""
    async with open_session(
        api_key=load.api_key, headers=dict(load.headers), keep_connections=load.keep_connections
    ) as session:
        client = CompletionClient(
            session, load.server, timeout_s=load.timeout_s, clock=clock, dialect=load.dialect, retry=load.retry
        )
        return await send_open_loop(
            client,
            load.requests,
            speed=load.speed,
            clock=clock,
            cache_salt=load.cache_salt,
            stop=stop,
            tally=tally,
            limit=load.limit,
        )
