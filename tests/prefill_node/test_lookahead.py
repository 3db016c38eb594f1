"""Places to work ahead on: given in the order of the line, and no less urgent request keeps an urgent one waiting."""

import asyncio
import contextlib
import time

from prefill_node.lookahead import LookaheadLimiter
from worker.policy.scheduling_order import QueueEntry, WaitQueue


class Node:
    """Two places; requests come and go by their names."""

    def __init__(self) -> None:
        self.wait_queue = WaitQueue()
        self.places = LookaheadLimiter(2, self.wait_queue)
        self.has: list[str] = []
        self._requests: dict[str, asyncio.Task[None]] = {}

    async def come(self, name: str, level: int = 0) -> None:
        now_s = time.monotonic()
        self.wait_queue.add((name, 0), QueueEntry(now_s, now_s + 60, now_s + 60, level))
        self._requests[name] = asyncio.create_task(self._work(name))
        await asyncio.sleep(0)

    async def go(self, *names: str) -> None:
        for name in names or list(self._requests):
            self._requests[name].cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._requests.pop(name)
            self.wait_queue.remove((name, 0))
        await asyncio.sleep(0)

    async def _work(self, name: str) -> None:
        async with self.places.take((name, 0)):
            self.has.append(name)
            await asyncio.Event().wait()


async def test_places_are_given_in_the_order_of_the_line() -> None:
    node = Node()
    for name, level in (("a", 0), ("b", 0), ("late", 2), ("soon", 1), ("gives up", 1)):
        await node.come(name, level)
    assert node.has == ["a", "b"]
    assert node.places.must_wait
    await node.go("gives up", "a")
    assert node.has == ["a", "b", "soon"]
    await node.go("b")
    assert node.has == ["a", "b", "soon", "late"]
    await node.go()
    assert not node.places.must_wait


async def test_an_urgent_request_needs_no_place_of_those_behind_it_up_to_twice_as_many() -> None:
    node = Node()
    for number in range(3):
        await node.come(f"batch-{number}", level=5)
    for number in range(3):
        await node.come(f"urgent-{number}")
    assert node.has == ["batch-0", "batch-1", "urgent-0", "urgent-1"]
    await node.go("batch-0")
    assert node.has[4:] == []  # two go before the third already
    await node.go("urgent-0")
    assert node.has[4:] == ["urgent-2"]
    await node.go()
