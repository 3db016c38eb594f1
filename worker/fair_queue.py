"""Queue of work on grammars, fair among tenants, with threads of its own.

A task may wait for a process for seconds; no other work of the role shares its thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, Generic, TypeVar

from worker.errors import GrammarBusy

T = TypeVar("T")

MAX_RUNNING: Final = 4
MAX_RUNNING_PER_TENANT: Final = 2
MAX_WAITING_PER_TENANT: Final = 64


class Task(Generic[T]):
    """Piece of work in the queue: waits, runs once, and can be cancelled at any time."""

    def __init__(self, tenant: str, work: Callable[[Task[T]], T]) -> None:
        self.tenant = tenant
        self.future: Future[T] = Future()
        self._work = work
        self._lock = threading.Lock()
        self.is_cancelled = False
        self._on_cancel: Callable[[], None] | None = None

    async def result(self) -> T:
        """Wait for the result. Cancelling the wait cancels the work."""
        try:
            return await asyncio.wrap_future(self.future)
        except asyncio.CancelledError:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Withdraw the work, or end what it does."""
        with self._lock:
            self.is_cancelled = True
            hook = self._on_cancel
        if not self.future.cancel() and not self.future.done() and hook is not None:
            hook()

    def on_cancel(self, hook: Callable[[], None]) -> None:
        """Set what ends the work that is running; it is called at once if the work has been cancelled before."""
        with self._lock:
            self._on_cancel = hook
            is_late = self.is_cancelled
        if is_late:
            hook()

    def run(self) -> None:
        """Do the work, on a thread of the queue."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self._work(self)
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class FairQueue:
    """Threads that run tasks, tenants in turn, at most MAX_RUNNING at once and MAX_RUNNING_PER_TENANT of a tenant."""

    def __init__(self) -> None:
        self.is_closed = False
        self.num_running = 0
        self._changed = threading.Condition()
        self._waiting: OrderedDict[str, deque[Task[Any]]] = OrderedDict()  # the tenant whose turn is next comes first
        self._running: dict[str, int] = {}
        self._threads: list[threading.Thread] = []

    def submit(self, tenant: str, work: Callable[[Task[T]], T]) -> Task[T]:
        """Add a task. Raises GrammarBusy if too many of the tenant wait, and after `close`."""
        task = Task(tenant, work)
        with self._changed:
            if self.is_closed:
                raise GrammarBusy("the process is shutting down")
            tasks = self._waiting.setdefault(tenant, deque())
            while tasks and tasks[0].future.cancelled():
                tasks.popleft()
            if len(tasks) >= MAX_WAITING_PER_TENANT:
                raise GrammarBusy(f"{len(tasks)} grammars of this tenant wait to be checked, which is the limit")
            tasks.append(task)
            num_tasks = self.num_running + sum(map(len, self._waiting.values()))
            if len(self._threads) < min(MAX_RUNNING, num_tasks):
                thread = threading.Thread(target=self._serve, name=f"grammars-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._changed.notify()
        return task

    def close(self) -> None:
        """Refuse what waits and what comes. Running tasks end on their own, once their processes have been killed."""
        with self._changed:
            self.is_closed = True
            waiting = [task for tasks in self._waiting.values() for task in tasks]
            self._waiting.clear()
            self._changed.notify_all()
        for task in waiting:
            if task.future.set_running_or_notify_cancel():
                task.future.set_exception(GrammarBusy("the process is shutting down"))

    def join(self) -> None:
        """Wait for the threads after `close`."""
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        while (task := self._next()) is not None:
            task.run()
            with self._changed:
                self.num_running -= 1
                self._running[task.tenant] -= 1
                if not self._running[task.tenant]:
                    del self._running[task.tenant]
                self._changed.notify()
            del task  # its result may hold a process

    def _next(self) -> Task[Any] | None:
        with self._changed:
            while not self.is_closed:
                for tenant, tasks in list(self._waiting.items()):
                    if self._running.get(tenant, 0) >= MAX_RUNNING_PER_TENANT:
                        continue
                    task = tasks.popleft()
                    del self._waiting[tenant]
                    if tasks:
                        self._waiting[tenant] = tasks  # its next turn comes after the others'
                    self.num_running += 1
                    self._running[tenant] = self._running.get(tenant, 0) + 1
                    return task
                self._changed.wait()
            return None
