"""A future that is cheap to make, to settle and to wait for, and is a `concurrent.futures.Future` to its callers.

The standard one makes a condition variable each time. This one makes what its observers need, when they need it:
`asyncio.wrap_future`, `concurrent.futures.wait` and `as_completed` find all that they use.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures._base import FINISHED, RUNNING
from typing import Any, TypeVar

T = TypeVar("T")

_log = logging.getLogger(__name__)

# Held for a few instructions, whenever a completion is settled or gets an observer.
_LOCK = threading.Lock()


class Completion(Future[T]):
    """Settled once, by `settle`, with a result or a failure. It is never in the future's own cancelled state."""

    # What most completions never change is kept once, for all of them.
    _state = RUNNING
    _result: T | None = None
    _exception: BaseException | None = None
    _gates: Sequence[threading.Lock] = ()
    _callbacks: Sequence[Callable[[Future[T]], object]] = ()
    _foreign: threading.Condition | None = None

    def __init__(self) -> None:
        """Not the standard one's, which would make what this class does without."""

    @classmethod
    def of(cls, result: T) -> "Completion[T]":
        """One that is settled from the beginning."""
        completion = cls()
        completion._result, completion._state = result, FINISHED
        return completion

    # What the owner of an unsettled completion may do when somebody begins to look at it.

    def _is_observed(self) -> None:
        """Somebody wants to hear of the end without waiting in `result` or `exception` for as long as it takes."""

    def _help(self) -> None:
        """The calling thread is about to wait as long as it takes, and may do something for the end meanwhile."""

    def settle(self, result: T | None, failure: BaseException | None) -> None:
        """Give the outcome; callbacks run on this thread."""
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
        """As `done`, without the effects of being observed."""
        return self._state == FINISHED

    def done(self) -> bool:
        if self._state != FINISHED:
            self._is_observed()
        return self._state == FINISHED

    def running(self) -> bool:
        return self._state != FINISHED

    def cancelled(self) -> bool:
        """Never: a cancelled operation ends with an error, which says how far it came."""
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
            self._help()
            if self._state == FINISHED:
                return
        else:
            self._is_observed()
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
            self._is_observed()
        else:
            self._call(fn)

    @property
    def _condition(self) -> threading.Condition:  # type: ignore[override]
        """What `concurrent.futures.wait` and its kin lock while they look at the state and add to `_waiters`."""
        with _LOCK:
            if self._foreign is None:
                self._foreign = threading.Condition()
                self._waiters: list[Any] = []
            condition = self._foreign
        if self._state != FINISHED:
            self._is_observed()
        return condition
