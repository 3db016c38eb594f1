"""Requests before the measured ones: until the server answers, and then as many as asked for. None is counted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from loadtest.clocks import clock_from
from loadtest.errors import ServerUnusable
from loadtest.load import Load, send_share
from loadtest.record import Outcome, RequestRecord
from loadtest.sender import Tally

_AGAIN_S = 0.5


async def warm_up(load: Load, *, count: int, ready_s: float, stop: asyncio.Event) -> None:
    """Send the load's first request for `ready_s` seconds until it is answered, and then `count` times.

    `ready_s` 0: the server is taken to be ready. Returns early when `stop` is set. Raises ServerUnusable when it is not
    answered in time, or a later one is not.
    """
    deadline = time.monotonic() + ready_s
    while ready_s > 0 and not stop.is_set():
        trial = await _send(load, 1, stop)
        if _problem(trial) == "":
            break
        if time.monotonic() >= deadline:
            raise ServerUnusable(f"the server was not ready within {ready_s:g} s: a request {_problem(trial)}")
        await asyncio.sleep(_AGAIN_S)
    if count and not stop.is_set() and (problem := _problem(await _send(load, count, stop))):
        raise ServerUnusable(f"a warm-up request {problem}")


async def _send(load: Load, count: int, stop: asyncio.Event) -> list[RequestRecord]:
    copies = [replace(load.requests[0], index=index, arrival_s=0.0) for index in range(count)]
    clock = clock_from(time.monotonic())
    return await send_share(replace(load, requests=copies, retry=None), clock=clock, stop=stop, tally=Tally(count))


def _problem(records: Sequence[RequestRecord]) -> str:
    """How the first of them that was not answered ended; one that was given up is no problem of the server's."""
    ended = (r for r in records if r.outcome not in (Outcome.COMPLETED, Outcome.UNFINISHED))
    return next((f"was {record.outcome.value}: {record.reason}" for record in ended), "")
