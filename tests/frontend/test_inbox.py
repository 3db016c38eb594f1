"""The wait for an attempt's events: it ends with an event, at its time, or when it is interrupted."""

import asyncio
import math
import time

import pytest

from frontend.inbox import Inbox, TokenArrived, WorkerGone
from moonpool_proto.v1 import worker_pb2

SOON_S, LATER_S = 0.05, 20.0


def inbox() -> Inbox:
    return Inbox(16, lambda: None)


def token(index: int) -> TokenArrived:
    return TokenArrived("d", worker_pb2.Token(index=index), 0.0)


async def test_what_came_before_the_wait_is_taken_at_once_even_past_its_time() -> None:
    box = inbox()
    box.put(token(0))
    box.put(token(1))
    assert [event.token.index for event in await box.take(0.0) if isinstance(event, TokenArrived)] == [0, 1]


async def test_events_that_come_together_wake_the_reader_once() -> None:
    box = inbox()
    waiting = asyncio.create_task(box.take())
    await asyncio.sleep(0)
    for index in range(3):
        box.put(token(index))
    assert len(await waiting) == 3


async def test_a_wait_ends_at_its_time() -> None:
    began_s = time.monotonic()
    with pytest.raises(TimeoutError):
        await inbox().take(began_s + SOON_S)
    assert time.monotonic() >= began_s + SOON_S - 0.002


async def test_a_wait_with_an_earlier_end_than_the_one_before_it_ends_in_time() -> None:
    box = inbox()
    box.put(token(0))
    await box.take(time.monotonic() + LATER_S)
    waiting = asyncio.create_task(box.take(time.monotonic() + LATER_S))
    await asyncio.sleep(0)
    box.put(token(1))
    await waiting
    async with asyncio.timeout(LATER_S / 2):
        with pytest.raises(TimeoutError):
            await box.take(time.monotonic() + SOON_S)


async def test_a_wait_outlasts_the_end_of_the_one_before_it() -> None:
    box = inbox()
    waiting = asyncio.create_task(box.take(time.monotonic() + SOON_S))
    await asyncio.sleep(0)
    box.put(token(0))
    await waiting
    began_s = time.monotonic()
    with pytest.raises(TimeoutError):
        await box.take(began_s + 4 * SOON_S)
    assert time.monotonic() >= began_s + 4 * SOON_S - 0.002


async def test_an_interrupted_wait_loses_nothing() -> None:
    box = inbox()
    waiting = asyncio.create_task(box.take(math.inf))
    await asyncio.sleep(0)
    box.interrupt()
    with pytest.raises(TimeoutError):
        await waiting
    gone = WorkerGone("d", "died")
    box.put(gone)
    box.interrupt()  # nobody waits
    assert await box.take() == [gone]


async def test_a_closed_inbox_wakes_nobody_later() -> None:
    box = inbox()
    waiting = asyncio.create_task(box.take(time.monotonic() + SOON_S))
    await asyncio.sleep(0)
    box.close()
    await asyncio.sleep(2 * SOON_S)
    assert not waiting.done()
    box.put(token(0))
    assert len(await waiting) == 1
