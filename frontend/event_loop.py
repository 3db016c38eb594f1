"""Tools to keep the event loop responsive: worker threads, and a limit on the work of one iteration."""

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from frontend.errors import Overloaded, ServiceUnavailable

T = TypeVar("T")
_PER_ITERATION: Final = 8  # each takes some tenths of a millisecond
_MAX_QUEUED_NBYTES: Final = 128 << 20
_LONG_NBYTES: Final = 256 << 10  # tokenising this takes about a tenth of a second
_QUEUE_RETRY_S: Final = 1.0


class WorkThreads:
    """Thread pool that tenants share fairly, for work that would block the event loop: bodies, tokenising, templates.

    Each tenant has a queue, and a free thread takes the oldest work of the next tenant in turn, so that one tenant's
    queue delays another's work by at most the work that is running. Long work never occupies all threads of several.
    """

    def __init__(self, num_threads: int, max_queued_nbytes: int = _MAX_QUEUED_NBYTES) -> None:
        """`max_queued_nbytes` limits the data of each tenant's queued work."""
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenize")
        self._num_threads = num_threads
        self._max_queued_nbytes = max_queued_nbytes
        self._queues: dict[str, deque[_QueuedWork]] = {}  # by tenant, the next tenant first; none is empty
        self._queued_nbytes: Counter[str] = Counter()
        self._num_running = self._num_long = 0

    @property
    def num_queued(self) -> int:
        """Number of calls of `run` whose work has not begun."""
        return sum(map(len, self._queues.values()))

    async def run(self, work: Callable[[], T], *, tenant: str, nbytes: int = 0) -> T:
        """Run `work` in a thread; return its result or raise its error.

        `nbytes` is the size of the data that it processes. If the caller is cancelled, work that has not begun is
        dropped. Raises Overloaded if the tenant has too much queued data, and ServiceUnavailable after `close`.
        """
        if not self._num_threads:
            raise ServiceUnavailable("this frontend is shutting down", code="draining", retry_after_s=_QUEUE_RETRY_S)
        if nbytes and self._queued_nbytes[tenant] + nbytes > self._max_queued_nbytes:
            raise Overloaded(
                f"requests of this tenant that wait for tokenising at this frontend hold {self._max_queued_nbytes} "
                "bytes already; retry later",
                code="frontend_queue",
                retry_after_s=_QUEUE_RETRY_S,
            )
        loop = asyncio.get_running_loop()
        mine = _QueuedWork(work, tenant, nbytes, loop, loop.create_future())
        self._queues.setdefault(tenant, deque()).append(mine)
        self._queued_nbytes[tenant] += nbytes
        self._start()
        try:
            result: T = await mine.result
        finally:
            if not mine.has_begun:
                queue = self._queues[tenant]
                queue.remove(mine)
                self._left(mine, queue)
        return result

    def close(self) -> None:
        """Drop queued work, wait for running work and accept no more."""
        self._num_threads = 0
        for each in [work for queue in self._queues.values() for work in queue]:
            each.result.cancel()
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _start(self) -> None:
        while self._num_running < self._num_threads and (work := self._next()) is not None:
            self._num_running += 1
            self._num_long += work.is_long
            running = self._executor.submit(work.work)
            running.add_done_callback(partial(self._ended_in_thread, work))

    def _next(self) -> "_QueuedWork | None":
        """Remove and return the work to start now; None if there is none."""
        may_be_long = self._num_long < max(1, self._num_threads - 1)
        queue = next((each for each in self._queues.values() if may_be_long or not each[0].is_long), None)
        if queue is None:
            return None
        work = queue.popleft()
        work.has_begun = True
        self._left(work, queue)
        return work

    def _ended_in_thread(self, work: "_QueuedWork", running: "Future[Any]") -> None:
        work.loop.call_soon_threadsafe(self._ended, work, running)

    def _ended(self, work: "_QueuedWork", running: "Future[Any]") -> None:
        self._num_running -= 1
        self._num_long -= work.is_long
        self._start()
        if work.result.done():  # its caller was cancelled
            return
        if running.cancelled():
            work.result.cancel()
        elif (error := running.exception()) is not None:
            work.result.set_exception(error)
        else:
            work.result.set_result(running.result())

    def _left(self, work: "_QueuedWork", queue: "deque[_QueuedWork]") -> None:
        """Account for work that left its tenant's queue; a tenant whose work began is behind all others."""
        self._queued_nbytes[work.tenant] -= work.nbytes
        if work.has_begun or not queue:
            del self._queues[work.tenant]
        if not queue:
            del self._queued_nbytes[work.tenant]
        elif work.has_begun:
            self._queues[work.tenant] = queue


@dataclass(eq=False)
class _QueuedWork:
    """One call of `run`."""

    work: Callable[[], Any]
    tenant: str
    nbytes: int
    loop: asyncio.AbstractEventLoop
    result: "asyncio.Future[Any]"
    has_begun: bool = False

    @property
    def is_long(self) -> bool:
        return self.nbytes > _LONG_NBYTES


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
