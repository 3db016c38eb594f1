"""Threads that tenants share: who waits for whom, what is refused, and what is dropped."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from frontend.errors import Overloaded, ServiceUnavailable
from frontend.event_loop import WorkThreads

LONG = 1 << 20


class Gate:
    """Work that waits until it is let through; the order in which such works began."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self._open = threading.Semaphore(0)

    def work(self, name: str) -> Callable[[], str]:
        def run() -> str:
            self.began.append(name)
            assert self._open.acquire(timeout=10)
            return name

        return run

    def let(self, count: int) -> None:
        for _ in range(count):
            self._open.release()

    async def has_begun(self, count: int) -> None:
        async with asyncio.timeout(10):
            while len(self.began) < count:
                await asyncio.sleep(0.001)


@pytest.fixture
def gate() -> Gate:
    return Gate()


async def test_a_tenants_queue_delays_another_tenant_by_the_running_work_only(gate: Gate) -> None:
    threads = WorkThreads(1)
    mine = [asyncio.create_task(threads.run(gate.work(f"a{at}"), tenant="a")) for at in range(50)]
    await gate.has_begun(1)
    other = [asyncio.create_task(threads.run(gate.work(f"b{at}"), tenant="b")) for at in range(3)]
    await asyncio.sleep(0)
    gate.let(53)
    assert await asyncio.gather(*mine, *other) == [*(f"a{at}" for at in range(50)), "b0", "b1", "b2"]
    assert gate.began[:8] == ["a0", "a1", "b0", "a2", "b1", "a3", "b2", "a4"]
    assert threads.num_queued == 0
    threads.close()


async def test_tenants_take_turns_whoever_has_more(gate: Gate) -> None:
    threads = WorkThreads(1)
    first = asyncio.create_task(threads.run(gate.work("x"), tenant="x"))
    await gate.has_begun(1)
    tasks = [
        asyncio.create_task(threads.run(gate.work(f"{tenant}{at}"), tenant=tenant))
        for tenant, count in (("a", 9), ("b", 2), ("c", 1))
        for at in range(count)
    ]
    await asyncio.sleep(0)
    gate.let(13)
    await asyncio.gather(first, *tasks)
    assert gate.began == ["x", "a0", "b0", "c0", "a1", "b1", *(f"a{at}" for at in range(2, 9))]
    threads.close()


async def test_long_work_leaves_a_thread_to_short_work(gate: Gate) -> None:
    threads = WorkThreads(2)
    long = [asyncio.create_task(threads.run(gate.work(f"l{at}"), tenant=f"t{at}", nbytes=LONG)) for at in range(3)]
    await gate.has_begun(1)
    short = asyncio.create_task(threads.run(lambda: "short", tenant="t0"))
    assert await short == "short"
    assert gate.began == ["l0"]
    gate.let(3)
    assert await asyncio.gather(*long) == ["l0", "l1", "l2"]
    threads.close()


async def test_too_much_queued_data_of_one_tenant_is_refused_and_only_of_that_tenant(gate: Gate) -> None:
    threads = WorkThreads(1, max_queued_nbytes=100)
    running = asyncio.create_task(threads.run(gate.work("a"), tenant="a", nbytes=100))
    await gate.has_begun(1)
    queued = [asyncio.create_task(threads.run(gate.work("a"), tenant="a", nbytes=50)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded) as refused:
        await threads.run(lambda: "", tenant="a", nbytes=1)
    assert refused.value.code == "frontend_queue"
    assert "retry-after" in refused.value.headers()
    unmeasured = asyncio.create_task(threads.run(lambda: "answer", tenant="a"))  # such as an answer's encoding
    other = asyncio.create_task(threads.run(gate.work("b"), tenant="b", nbytes=100))
    gate.let(4)
    assert list(await asyncio.gather(running, *queued, unmeasured, other)) == ["a", "a", "a", "answer", "b"]
    assert await threads.run(lambda: "again", tenant="a", nbytes=100) == "again"
    threads.close()


async def test_queued_work_of_a_caller_that_left_is_never_done(gate: Gate) -> None:
    threads = WorkThreads(1, max_queued_nbytes=100)
    running = asyncio.create_task(threads.run(gate.work("a"), tenant="a"))
    await gate.has_begun(1)
    left = [asyncio.create_task(threads.run(gate.work(f"gone{at}"), tenant="a", nbytes=30)) for at in range(3)]
    await asyncio.sleep(0)
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    assert threads.num_queued == 0
    next_one = asyncio.create_task(threads.run(gate.work("next"), tenant="a", nbytes=100))
    await asyncio.sleep(0)
    gate.let(2)
    assert list(await asyncio.gather(running, next_one)) == ["a", "next"]
    assert gate.began == ["a", "next"]
    threads.close()


async def test_an_error_of_the_work_is_raised_and_the_thread_goes_on() -> None:
    threads = WorkThreads(1)

    def fail() -> Any:
        raise LookupError("broken")

    with pytest.raises(LookupError, match="broken"):
        await threads.run(fail, tenant="")
    assert await threads.run(lambda: 5, tenant="") == 5
    threads.close()


async def test_closing_drops_what_has_not_begun(gate: Gate) -> None:
    threads = WorkThreads(1)
    running = asyncio.create_task(threads.run(gate.work("a"), tenant="a"))
    await gate.has_begun(1)
    waiting = asyncio.create_task(threads.run(gate.work("b"), tenant="a"))
    await asyncio.sleep(0)
    gate.let(1)
    threads.close()
    await asyncio.wait((running, waiting))
    assert running.result() == "a"
    assert waiting.cancelled()
    assert gate.began == ["a"]
    with pytest.raises(ServiceUnavailable):
        await threads.run(lambda: "", tenant="a")
