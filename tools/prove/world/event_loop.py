"""Event loop of a simulated process: asyncio's own, in virtual time, with a point of preemption after each handle."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Coroutine
from typing import Any

from tools.prove.world.futures import ThreadPoolExecutor
from tools.prove.world.scheduler import ProcessState

_SLOW = 0.1  # of the handles of loops that have slow ones


class SimFuture(asyncio.Future[Any]):
    """Future with a hash that is the same in every run, since sets of futures are iterated."""

    def __init__(self, *, loop: SimLoop) -> None:
        super().__init__(loop=loop)
        self._number = loop._world.next_number()

    def __hash__(self) -> int:
        return self._number


class SimTask(asyncio.Task[Any]):
    """Task with a hash that is the same in every run, since sets of tasks are iterated."""

    def __init__(self, coro: Coroutine[Any, Any, Any], *, loop: SimLoop, **options: Any) -> None:
        self._number = loop._world.next_number()
        super().__init__(coro, loop=loop, **options)

    def __hash__(self) -> int:
        return self._number


def _new_task(loop: Any, coro: Any, **options: Any) -> SimTask:
    return SimTask(coro, loop=loop, **options)


class SimLoop(asyncio.BaseEventLoop):
    """Loop of one process, in its main thread."""

    def __init__(self, process: ProcessState) -> None:
        self._process, self._world = process, process.world
        super().__init__()
        self._clock_resolution = 1e-9
        self._pool: ThreadPoolExecutor | None = None
        self._thread = self._world.current
        self._selects = False
        self._slow_s = self._world.handle_s
        self.set_task_factory(_new_task)
        self.set_exception_handler(self._unexpected)

    def _unexpected(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self._world.tell(self._process.name, f"{context['message']}: {error!r}")
        self.default_exception_handler(context)

    def time(self) -> float:
        return (self._world.read_clock() + self._process.monotonic_offset_ns) / 1e9

    def create_future(self) -> SimFuture:
        return SimFuture(loop=self)

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        self._check_closed()  # type: ignore[attr-defined]
        if executor is None:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(8, "asyncio")
            executor = self._pool
        return asyncio.wrap_future(executor.submit(func, *args), loop=self)

    def _write_to_self(self) -> None:
        if self._selects:  # otherwise the thread is parked for something else
            assert self._thread is not None
            self._world.wake(self._thread)

    def _process_events(self, event_list: Any) -> None:
        """Nothing comes from a selector."""

    def _run_once(self) -> None:
        scheduled, ready = self._scheduled, self._ready  # type: ignore[attr-defined]
        while scheduled and scheduled[0]._cancelled:
            handle = heapq.heappop(scheduled)
            handle._scheduled = False
        if not ready and not self._stopping:  # type: ignore[attr-defined]
            self._selects = True
            self._world.park(max(0.0, scheduled[0]._when - self.time()) if scheduled else None)
            self._selects = False
        now = self.time()
        while scheduled and scheduled[0]._when <= now:
            handle = heapq.heappop(scheduled)
            handle._scheduled = False
            ready.append(handle)
        chance = self._world.chance
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()
                self._world.step()
                if self._slow_s and chance.random() < _SLOW:
                    self._world.park(chance.uniform(0.0, self._slow_s))

    def close(self) -> None:
        """Simulated loops are left as they are when their process ends."""

    async def getaddrinfo(self, host: Any, port: Any, **options: Any) -> Any:
        raise NotImplementedError("simulated event loops have no sockets")
