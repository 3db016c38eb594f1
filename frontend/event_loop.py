"""Tools to keep the event loop responsive: worker threads, and a limit on the work of one iteration."""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

T = TypeVar("T")
_PER_ITERATION: Final = 8  # each takes some tenths of a millisecond


class WorkThreads:
    """Bounded thread pool for work that would block the event loop: large bodies, tokenising, templates."""

    def __init__(self, num_threads: int) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenize")

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread; return its result or raise its error."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def close(self) -> None:
        """Drop queued work and wait for running work."""
        self._executor.shutdown(wait=True, cancel_futures=True)


class LoopThrottle:
    """Limit on the callers that proceed per iteration of the event loop; the others wait in order."""

    def __init__(self, per_iteration: int = _PER_ITERATION) -> None:
        self._per_iteration = per_iteration
        self._left = per_iteration
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_scheduled = False  # `_on_iteration` runs in the loop's next iteration

    async def take(self) -> None:
        """Wait until the caller may proceed."""
        self._schedule()
        if self._left > 0 and not self._waiting:
            self._left -= 1
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        await waiter

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._on_iteration)

    def _on_iteration(self) -> None:
        self._is_scheduled, self._left = False, self._per_iteration
        while self._waiting and self._left > 0:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                self._left -= 1
        if self._left < self._per_iteration:
            self._schedule()
