"""A `concurrent.futures.Future` that is cheap to create, to settle and to wait for.

The standard future always creates a condition variable. This one creates the objects that its observers need on
demand; `asyncio.wrap_future`, `concurrent.futures.wait` and `as_completed` work with it.

Locks: `_LOCK`, one for all completions and a leaf, guards outcome, gates and callbacks. A future observed by
`concurrent.futures.wait` also has `_foreign`, a condition that these functions hold; it is taken before `_LOCK`.
Callbacks run without either, on the thread that settles the future, or on the one that adds the callback afterwards.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures._base import FINISHED, RUNNING
from typing import Any, TypeVar

T = TypeVar("T")

_log = logging.getLogger(__name__)

# Held for a few instructions when a completion is settled or gets an observer.
_LOCK = threading.Lock()


class Completion(Future[T]):
    """Future that is settled once, by `settle`, with a result or an exception. It is never in the cancelled state."""

    # Class attributes hold the defaults, so that creating a completion does not set them.
    _state = RUNNING
    _result: T | None = None
    _exception: BaseException | None = None
    _gates: Sequence[threading.Lock] = ()
    _callbacks: Sequence[Callable[[Future[T]], object]] = ()
    _foreign: threading.Condition | None = None

    def __init__(self) -> None:
        """Skip the standard initialiser, which would create a condition variable."""

    @classmethod
    def of(cls, result: T) -> "Completion[T]":
        """Return a completion that is settled already."""
        completion = cls()
        completion._result, completion._state = result, FINISHED
        return completion

    # Hooks of subclasses, called while the completion is not settled.

    def _on_observed(self) -> None:
        """React to an observer other than a thread that waits in `result` or `exception` without a time limit."""

    def _before_wait(self) -> None:
        """Contribute to the outcome on the calling thread, which is about to wait without a time limit."""

    def settle(self, result: T | None, failure: BaseException | None) -> None:
        """Set the outcome and run the callbacks on the calling thread."""
        with _LOCK:
            foreign = self._foreign
            if foreign is None:
                self._result, self._exception, self._state = result, failure, FINISHED
        if foreign is not None:
            with foreign:
                with _LOCK:
                    self._result, self._exception, self._state = result, failure, FINISHED
                for waiter in self._waiters:
                    if failure is None:
                        waiter.add_result(self)
                    else:
                        waiter.add_exception(self)
                foreign.notify_all()
        for gate in self._gates:
            gate.release()
        for callback in self._callbacks:
            self._call(callback)

    def _call(self, callback: Callable[[Future[T]], object]) -> None:
        try:
            callback(self)
        except Exception:
            _log.exception("a callback of a completion failed")

    @property
    def settled(self) -> bool:
        """True once the outcome is set. Unlike `done`, reading it does not count as observing."""
        return self._state == FINISHED

    def done(self) -> bool:
        if self._state != FINISHED:
            self._on_observed()
        return self._state == FINISHED

    def running(self) -> bool:
        return self._state != FINISHED

    def cancelled(self) -> bool:
        """Return False: a cancelled operation ends with an error, which reports its progress."""
        return False

    def result(self, timeout: float | None = None) -> T:
        if self._state != FINISHED:
            self._wait(timeout)
        if self._exception is not None:
            try:
                raise self._exception
            finally:
                self = None  # type: ignore[assignment]  # the traceback must not keep it
        return self._result  # type: ignore[return-value]

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if self._state != FINISHED:
            self._wait(timeout)
        return self._exception

    def _wait(self, timeout: float | None) -> None:
        if timeout is None:
            self._before_wait()
            if self._state == FINISHED:
                return
        else:
            self._on_observed()
        gate = threading.Lock()
        gate.acquire()
        with _LOCK:
            if self._state == FINISHED:
                return
            self._gates = [*self._gates, gate]
        if not gate.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
            with _LOCK:
                if self._state != FINISHED:
                    self._gates = [other for other in self._gates if other is not gate]
                    raise TimeoutError

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        with _LOCK:
            open_yet = self._state != FINISHED
            if open_yet:
                self._callbacks = [*self._callbacks, fn]
        if open_yet:
            self._on_observed()
        else:
            self._call(fn)

    @property
    def _condition(self) -> threading.Condition:  # type: ignore[override]
        """Lock that `concurrent.futures.wait` and `as_completed` hold while they use the state and `_waiters`."""
        with _LOCK:
            if self._foreign is None:
                self._foreign = threading.Condition()
                self._waiters: list[Any] = []
            condition = self._foreign
        if self._state != FINISHED:
            self._on_observed()
        return condition
