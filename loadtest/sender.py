"""Open-loop sender of one process: each request is sent at its due time, independently of earlier ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

from loadtest.client import CompletionClient, Dialect, TokenIdCompletions
from loadtest.http import RetryPolicy, open_session
from loadtest.plan import PlannedRequest
from loadtest.record import RequestRecord, SendOutcome
from loadtest.server import ServerInfo


@dataclass
class SendTally:
    """Running totals, for the progress display."""

    total: int
    sent: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ended: dict[SendOutcome, int] = field(default_factory=lambda: dict.fromkeys(SendOutcome, 0))

    @property
    def in_flight(self) -> int:
        """Number of requests in flight."""
        return self.sent - sum(self.ended.values())

    def add(self, record: RequestRecord) -> None:
        """Count an ended request."""
        self.ended[record.outcome] += 1
        if record.outcome is SendOutcome.COMPLETED:
            self.prompt_tokens += record.prompt_tokens
            self.cached_tokens += record.cached_tokens


def new_record(request: PlannedRequest, due_s: float) -> RequestRecord:
    """Return an empty record of a request that is due at `due_s` on the run's clock."""
    return RequestRecord(
        index=request.index,
        due_s=due_s,
        prompt_tokens=len(request.prompt),
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        seed=request.seed,
        overlong=request.overlong,
    )


async def send_open_loop(
    client: CompletionClient,
    requests: Sequence[PlannedRequest],
    *,
    speed: float,
    clock: Callable[[], float],
    cache_salt: str,
    stop: asyncio.Event,
    tally: SendTally,
    limit: int | None = None,
) -> list[RequestRecord]:
    """Send each request at arrival_s / speed on `clock` (0: the first due time) and wait until all have ended.

    `limit`: maximum number in flight; further requests wait in order. When `stop` is set, no more requests are sent and
    those in flight are cancelled, with outcome UNFINISHED. Returns the records of the requests sent, in order of
    sending.
    """
    records: list[RequestRecord] = []
    tasks: set[asyncio.Task[None]] = set()
    gate = asyncio.Semaphore(limit) if limit is not None else nullcontext()

    async def one(request: PlannedRequest, record: RequestRecord) -> None:
        came_s = clock()
        async with gate:
            record.held_s = clock() - came_s if limit is not None else 0.0
            records.append(record)
            tally.sent += 1
            await client.send(request, record, cache_salt=cache_salt)
        tally.add(record)

    stopped = asyncio.ensure_future(stop.wait())
    try:
        for request in requests:
            record = new_record(request, request.arrival_s / speed)
            if not await _reached(record.due_s, clock, stopped):
                break
            task = asyncio.create_task(one(request, record))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await _all_ended(tasks, stopped)
    finally:
        stopped.cancel()
        pending = list(tasks)
        for task in pending:
            task.cancel()
        results = await asyncio.gather(*pending, stopped, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return records


async def _reached(due_s: float, clock: Callable[[], float], stopped: asyncio.Task[Literal[True]]) -> bool:
    """Wait until the clock shows `due_s`; return False if stopped first."""
    # Yield to the event loop even when late, so that answers are read between two sends.
    await asyncio.sleep(0)
    # uvloop's timers have millisecond resolution and may fire early.
    while (delay := due_s - clock()) > 0 and not stopped.done():
        await asyncio.wait([stopped], timeout=delay)
    return not stopped.done()


async def _all_ended(tasks: set[asyncio.Task[None]], stopped: asyncio.Task[Literal[True]]) -> None:
    while tasks and not stopped.done():
        waited: list[asyncio.Task[Any]] = [*tasks, stopped]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)


@dataclass(frozen=True)
class LoadPlan:
    """Picklable description of a load.

    `requests`: in order of arrival; each is sent at arrival_s / speed. `limit`: maximum number in flight. `retry`:
    policy for rejections; None: they are final.
    """

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
    load: LoadPlan, *, clock: Callable[[], float], stop: asyncio.Event, tally: SendTally
) -> list[RequestRecord]:
    """Send the load from this process and return the records of the requests sent."""
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
