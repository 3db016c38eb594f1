"""vLLM's own publisher of KV events, and the subscriber to it: late, interrupted, and behind what is still kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, KVEventBatch, ZmqEventPublisher

from vllm_worker.event_subscriber import EventSockets, EventSubscriber


@pytest.fixture
def sockets(tmp_path: Path) -> EventSockets:
    return EventSockets.beside(tmp_path / "vllm.sock")


@pytest.fixture
def publishers(sockets: EventSockets) -> Iterator[Any]:
    made: list[ZmqEventPublisher] = []

    def publish_from(buffer_steps: int) -> ZmqEventPublisher:
        endpoint, replay = f"ipc://{sockets.events}", f"ipc://{sockets.replay}"
        made.append(ZmqEventPublisher(0, endpoint, replay_endpoint=replay, buffer_steps=buffer_steps))
        return made[-1]

    yield publish_from
    for publisher in made:
        publisher.shutdown()


def publish(publisher: Any, *numbers: int) -> None:
    for number in numbers:
        publisher.publish(KVEventBatch(ts=0.0, events=[BlockRemoved(block_hashes=[bytes([number])], medium="GPU")]))


class Seen:
    """Numbers of the applied events; -1 where some were lost."""

    def __init__(self, sockets: EventSockets) -> None:
        self.numbers: list[int] = []
        self.changed = asyncio.Event()
        self.subscriber = EventSubscriber(sockets, self.apply, lambda: self.note(-1))

    def apply(self, event: Any) -> None:
        self.note(-2 if isinstance(event, AllBlocksCleared) else event.block_hashes[0][0])

    def note(self, number: int) -> None:
        self.numbers.append(number)
        self.changed.set()

    async def until(self, numbers: list[int]) -> None:
        async with asyncio.timeout(20):
            while self.numbers != numbers:
                self.changed.clear()
                await self.changed.wait()


@asynccontextmanager
async def following(seen: Seen) -> AsyncIterator[None]:
    task = asyncio.create_task(seen.subscriber.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def first_heard(publisher: Any, seen: Seen, numbers: list[int]) -> None:
    """Publish numbers until one is heard: what ZeroMQ sent before the subscriber was connected is lost on the way."""
    async with asyncio.timeout(20):
        while not seen.numbers:
            numbers.append(len(numbers))
            publish(publisher, numbers[-1])
            await asyncio.sleep(0.05)


async def test_batches_that_were_sent_before_the_connection_are_replayed(
    publishers: Any, sockets: EventSockets
) -> None:
    publisher, seen, sent = publishers(1000), Seen(sockets), [0, 1, 2]
    publish(publisher, *sent)
    async with following(seen):
        await first_heard(publisher, seen, sent)
        await seen.until(sent)
        publisher.publish(KVEventBatch(ts=0.0, events=[AllBlocksCleared()]))
        await seen.until([*sent, -2])
    assert seen.subscriber.num_lost == 0


async def test_batches_that_are_no_longer_kept_are_reported_as_lost(publishers: Any, sockets: EventSockets) -> None:
    publisher, seen, sent = publishers(2), Seen(sockets), list(range(10))
    publish(publisher, *sent)
    async with following(seen):
        await first_heard(publisher, seen, sent)
        heard = sent[-1]
        publish(publisher, heard + 1)
        async with asyncio.timeout(20):
            while seen.numbers[-1] != heard + 1:
                await asyncio.sleep(0.01)
    # Nothing from before the loss, then all without a gap.
    assert seen.numbers[0] == -1
    assert seen.numbers[1:] == list(range(seen.numbers[1], heard + 2))
    assert seen.subscriber.num_lost == 1


async def test_an_unreadable_batch_counts_as_lost(publishers: Any, sockets: EventSockets) -> None:
    publisher, seen, sent = publishers(1000), Seen(sockets), list[int]()
    async with following(seen):
        await first_heard(publisher, seen, sent)
        publisher.publish(KVEventBatch(ts=0.0, events=["unreadable"]))
        await seen.until([*sent, -1])
        publish(publisher, 77)
        await seen.until([*sent, -1, 77])
