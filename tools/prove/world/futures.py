"""The simulated `concurrent.futures`: futures that simulated threads wait for, and pools of such threads."""

from __future__ import annotations

import concurrent.futures as real
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import (
    ALL_COMPLETED,
    FIRST_COMPLETED,
    FIRST_EXCEPTION,
    CancelledError,
    Executor,
    InvalidStateError,
    TimeoutError,
)
from concurrent.futures._base import CANCELLED, CANCELLED_AND_NOTIFIED, FINISHED, PENDING, RUNNING
from typing import Any, NamedTuple

from tools.prove.world.queues import SimpleQueue
from tools.prove.world.threads import Condition, Event, Lock, Thread

__all__ = [
    "ALL_COMPLETED",
    "CANCELLED",
    "CANCELLED_AND_NOTIFIED",
    "FINISHED",
    "FIRST_COMPLETED",
    "FIRST_EXCEPTION",
    "PENDING",
    "RUNNING",
    "CancelledError",
    "Executor",
    "Future",
    "InvalidStateError",
    "ThreadPoolExecutor",
    "TimeoutError",
    "as_completed",
    "wait",
]


class Future(real.Future):  # type: ignore[type-arg]
    """Future whose waiters are simulated threads."""

    def __init__(self) -> None:
        super().__init__()
        self._condition: Any = Condition()


class DoneAndNotDone(NamedTuple):
    """Result of `wait`: futures that have ended, and others, each in the order given."""

    done: dict[Any, None]
    not_done: dict[Any, None]


def wait(fs: Iterable[Any], timeout: float | None = None, return_when: str = ALL_COMPLETED) -> DoneAndNotDone:
    """As concurrent.futures.wait."""
    futures = list(dict.fromkeys(fs))
    changed = Event()

    def enough() -> bool:
        done = [f for f in futures if f.done()]
        if return_when == FIRST_COMPLETED and done:
            return True
        if return_when == FIRST_EXCEPTION and any(not f.cancelled() and f.exception() for f in done):
            return True
        return len(done) == len(futures)

    for future in futures:
        future.add_done_callback(lambda _: changed.set() if enough() else None)
    if not enough():
        changed.wait(timeout)
    done = dict.fromkeys(f for f in futures if f.done())
    return DoneAndNotDone(done, dict.fromkeys(f for f in futures if f not in done))


def as_completed(fs: Iterable[Any], timeout: float | None = None) -> Iterator[Any]:
    """As concurrent.futures.as_completed."""
    ended: SimpleQueue[Any] = SimpleQueue()
    futures = list(dict.fromkeys(fs))
    for future in futures:
        future.add_done_callback(ended.put)
    for _ in futures:
        yield ended.get(timeout=timeout)


class ThreadPoolExecutor(Executor):
    """Pool of simulated threads."""

    def __init__(
        self,
        max_workers: int | None = None,
        thread_name_prefix: str = "",
        initializer: Callable[..., Any] | None = None,
        initargs: tuple[Any, ...] = (),
    ) -> None:
        self._most, self._prefix = max_workers or 4, thread_name_prefix or "pool"
        self._initializer, self._initargs = initializer, initargs
        self._work: SimpleQueue[Any] = SimpleQueue()
        self._threads: list[Thread] = []
        self._num_idle = 0
        self._lock = Lock()
        self._is_shut_down = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """As ThreadPoolExecutor.submit."""
        with self._lock:
            if self._is_shut_down:
                raise RuntimeError("cannot schedule new futures after shutdown")
            future = Future()
            self._work.put((future, fn, args, kwargs))
            if self._work.qsize() > self._num_idle and len(self._threads) < self._most:
                name = f"{self._prefix}_{len(self._threads)}"
                thread = Thread(target=self._serve, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
        return future

    def _serve(self) -> None:
        if self._initializer is not None:
            self._initializer(*self._initargs)
        while True:
            self._num_idle += 1
            item = self._work.get()
            self._num_idle -= 1
            if item is None:
                self._work.put(None)
                return
            future, fn, args, kwargs = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """As ThreadPoolExecutor.shutdown."""
        with self._lock:
            self._is_shut_down = True
            while cancel_futures and not self._work.empty():
                item = self._work.get()
                if item is not None:
                    item[0].cancel()
            self._work.put(None)
        if wait:
            for thread in self._threads:
                thread.join()
