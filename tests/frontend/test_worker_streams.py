"""The wait for an attempt's events: it ends with an event, at its time, or when it is interrupted.

A step of many sequences comes in one message; the event loop goes round while its tokens are handed on.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from frontend.worker_streams import Inbox, TokenReceived, WorkerDisconnected, WorkerStreams
from moonpool_proto.v1 import worker_pb2
from moonpool_proto.v1.conductor_pb2 import NodeRef
from moonpool_proto.v1.worker_pb2 import FrontendMessage, Token, WorkerMessage
from moonpool_proto.v1.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server
from rpc.control import start_server

SOON_S, LATER_S = 0.05, 20.0


def inbox() -> Inbox:
    return Inbox(16, lambda: None)


def token(index: int) -> TokenReceived:
    return TokenReceived("d", worker_pb2.Token(index=index), 0.0)


async def test_what_came_before_the_wait_is_taken_at_once_even_past_its_time() -> None:
    box = inbox()
    box.put(token(0))
    box.put(token(1))
    assert [event.token.index for event in await box.take(0.0) if isinstance(event, TokenReceived)] == [0, 1]


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
    gone = WorkerDisconnected("d", "died")
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


MANY = 1000


class OneStep(WorkerServicer):
    """Tells one token of each of many requests at once."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def Attach(self, messages: AsyncIterator[FrontendMessage], context: object) -> AsyncIterator[WorkerMessage]:
        yield WorkerMessage()
        await self.go.wait()
        yield WorkerMessage(tokens=[Token(request_id=str(i), token_id=i) for i in range(MANY)])
        await asyncio.Event().wait()


async def test_the_loop_goes_round_within_a_step_of_a_thousand_streams(tmp_path: Path) -> None:
    worker = OneStep()
    server = await start_server(f"unix:{tmp_path}/w.sock", lambda s: add_WorkerServicer_to_server(worker, s))
    streams = WorkerStreams("f", 1, 20.0)
    try:
        stream = await streams.attach(NodeRef(node_id="d", incarnation=1, target=server.target))
        inboxes = [Inbox(16, lambda: None) for _ in range(MANY)]
        for i, inbox in enumerate(inboxes):
            stream.subscribe(str(i), 0, inbox)
        rounds: list[int] = []  # the loop's round in which each request was woken

        async def woken(inbox: Inbox) -> int:
            (event,) = await inbox.take()
            assert isinstance(event, TokenReceived)
            rounds.append(turn)
            return event.token.token_id

        waiting = asyncio.gather(*map(woken, inboxes))
        turn = 0
        worker.go.set()
        while not waiting.done():
            turn += 1
            await asyncio.sleep(0)
        assert await waiting == list(range(MANY))  # each request its own token
        assert rounds == sorted(rounds)
        assert max(rounds.count(each) for each in set(rounds)) <= 128
    finally:
        await streams.close()
        await server.stop(0.1)
