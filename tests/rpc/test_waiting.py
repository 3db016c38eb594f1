"""Waits between tries: short at first, bounded, spread, and short again after a success. Writes to streams that end."""

import asyncio
import random

import pytest

from rpc.waiting import Backoff, whole_write


def test_waits_grow_from_the_first_to_the_bound() -> None:
    backoff = Backoff(0.2, 3.0, random.Random(1))
    waits = [backoff.failed() for _ in range(40)]
    assert 0.1 <= waits[0] <= 0.2
    assert all(1.5 <= wait <= 3.0 for wait in waits[8:])
    assert sum(waits[:5]) < 2.5  # what is back after two seconds is found within one more


def test_two_lines_of_tries_do_not_stay_in_step() -> None:
    one, other = Backoff(), Backoff()
    assert [one.failed() for _ in range(8)] != [other.failed() for _ in range(8)]


def test_after_a_success_the_waits_begin_anew() -> None:
    backoff = Backoff(0.2, 3.0, random.Random(2))
    for _ in range(10):
        backoff.failed()
    backoff.succeeded()
    assert backoff.failed() <= 0.2


async def test_a_pending_write_ends_before_the_cancellation_takes_effect() -> None:
    write: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    writing = asyncio.create_task(whole_write(write))
    await asyncio.sleep(0)
    writing.cancel()
    await asyncio.sleep(0)
    assert not writing.done()
    write.set_result(None)
    with pytest.raises(asyncio.CancelledError):
        await writing


async def test_a_write_that_nobody_reads_is_given_up_by_name() -> None:
    write: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    writing = asyncio.create_task(whole_write(write))
    await asyncio.sleep(0)
    writing.cancel()
    with pytest.raises(TimeoutError, match="does not read"):
        await writing
    assert write.cancelled()
