"""The simulated `threading`: what the roles use of it, over greenlets. Every acquisition is a point of preemption."""

from __future__ import annotations

import itertools
import sys
import threading as real
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tools.prove.world import scheduler
from tools.prove.world.per_process import EachProcess
from tools.prove.world.scheduler import SimThread, world

__all__ = [
    "TIMEOUT_MAX",
    "BoundedSemaphore",
    "Condition",
    "Event",
    "Lock",
    "RLock",
    "Semaphore",
    "Thread",
    "current_thread",
    "get_ident",
    "get_native_id",
    "local",
    "main_thread",
    "stack_size",
]

TIMEOUT_MAX = real.TIMEOUT_MAX


def _me() -> SimThread:
    thread = world().current
    assert thread is not None, "the scheduler's callbacks must not block"
    return thread


def get_ident() -> int:
    """Return the number of the running thread; 0 in the scheduler and before the simulation."""
    thread = _current_or_none()
    return 0 if thread is None else thread.ident


get_native_id = get_ident


def _current_or_none() -> SimThread | None:
    return None if scheduler._current is None else scheduler._current.current


class Lock:
    """Mutual exclusion; whoever waits longest gets it. A lock that a module creates is one for each process."""

    def __new__(cls) -> Lock:
        of_module = cls is Lock and sys._getframe(1).f_code.co_name == "<module>"
        return object.__new__(_LockOfEachProcess if of_module else cls)

    def __init__(self) -> None:
        self._owner: int | None = None
        self._waiting: deque[SimThread] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As threading.Lock.acquire."""
        if _current_or_none() is not None:
            world().point()
        if self._owner is None:
            self._owner = get_ident()
            return True
        if not blocking:
            return False
        me, until_ns = _me(), None if timeout < 0 else world().now_ns + int(timeout * 1e9)
        while self.locked():
            left_s = None if until_ns is None else (until_ns - world().now_ns) / 1e9
            if left_s is not None and left_s <= 0:
                return False
            self._waiting.append(me)
            world().park(left_s)
            if me in self._waiting:
                self._waiting.remove(me)
        self._owner = me.ident
        return True

    def release(self) -> None:
        """As threading.Lock.release."""
        if self._owner is None:
            raise RuntimeError("release unlocked lock")
        self._owner = None
        if self._waiting:
            world().wake(self._waiting.popleft())
        if _current_or_none() is not None:
            world().point()

    def locked(self) -> bool:
        """Return True while a thread holds the lock."""
        return self._owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class _LockOfEachProcess(Lock):
    """Lock of a module: a lock for each process."""

    def __init__(self) -> None:
        super().__init__()
        self._each = EachProcess(lambda: Lock())

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        return self._each.own.acquire(blocking, timeout)

    def release(self) -> None:
        self._each.own.release()

    def locked(self) -> bool:
        return self._each.own.locked()


class RLock(Lock):
    """Lock that its owner can take again."""

    def __init__(self) -> None:
        super().__init__()
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._owner is not None and self._owner == get_ident():
            self._depth += 1
            return True
        if super().acquire(blocking, timeout):
            self._depth = 1
            return True
        return False

    def release(self) -> None:
        if self._owner != get_ident():
            raise RuntimeError("cannot release un-acquired lock")
        self._depth -= 1
        if not self._depth:
            super().release()

    def _is_owned(self) -> bool:
        return self._owner == get_ident()

    def _release_save(self) -> int:
        depth, self._depth = self._depth, 0
        Lock.release(self)
        return depth

    def _acquire_restore(self, depth: int) -> None:
        Lock.acquire(self)
        self._depth = depth


class Condition:
    """Condition variable; waiters are woken in the order in which they came."""

    def __init__(self, lock: Any = None) -> None:
        self._lock: Any = RLock() if lock is None else lock
        self._sleepers: deque[SimThread] = deque()
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return bool(self._lock.__enter__())

    def __exit__(self, *details: object) -> None:
        self._lock.__exit__(*details)

    def wait(self, timeout: float | None = None) -> bool:
        """As threading.Condition.wait."""
        me = _me()
        self._sleepers.append(me)
        saved: Any = self._lock._release_save() if hasattr(self._lock, "_release_save") else self._lock.release()
        until_ns = None if timeout is None else world().now_ns + int(timeout * 1e9)
        try:
            while me in self._sleepers:
                left_s = None if until_ns is None else (until_ns - world().now_ns) / 1e9
                if left_s is not None and left_s <= 0:
                    self._sleepers.remove(me)
                    return False
                world().park(left_s)
            return True
        finally:
            if hasattr(self._lock, "_acquire_restore"):
                self._lock._acquire_restore(saved)
            else:
                self._lock.acquire()

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        """As threading.Condition.wait_for."""
        until_ns = None if timeout is None else world().now_ns + int(timeout * 1e9)
        while not (result := predicate()):
            left_s = None if until_ns is None else (until_ns - world().now_ns) / 1e9
            if left_s is not None and left_s <= 0:
                break
            self.wait(left_s)
        return result

    def notify(self, n: int = 1) -> None:
        """As threading.Condition.notify."""
        for _ in range(min(n, len(self._sleepers))):
            world().wake(self._sleepers.popleft())

    def notify_all(self) -> None:
        """As threading.Condition.notify_all."""
        self.notify(len(self._sleepers))


class Event:
    """Flag that threads wait for."""

    def __init__(self) -> None:
        self._changed = Condition(Lock())
        self._is_set = False

    def is_set(self) -> bool:
        """Return the flag."""
        return self._is_set

    def set(self) -> None:
        """Set the flag, and wake all waiters."""
        with self._changed:
            self._is_set = True
            self._changed.notify_all()

    def clear(self) -> None:
        """Clear the flag."""
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        """As threading.Event.wait."""
        with self._changed:
            return bool(self._changed.wait_for(lambda: self._is_set, timeout))


class Semaphore:
    """Counter that threads wait for."""

    def __init__(self, value: int = 1) -> None:
        self._changed = Condition(Lock())
        self._value = value

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        """As threading.Semaphore.acquire."""
        with self._changed:
            if not self._value and not (blocking and self._changed.wait_for(lambda: self._value, timeout)):
                return False
            self._value -= 1
            return True

    def release(self, n: int = 1) -> None:
        """As threading.Semaphore.release."""
        with self._changed:
            self._value += n
            self._changed.notify(n)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


BoundedSemaphore = Semaphore


class Thread:
    """Simulated thread; an exception that ends it is told to the log."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., Any] | None = None,
        name: str | None = None,
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self._target, self._args, self._kwargs = target, tuple(args), dict(kwargs or {})
        self.name, self.daemon = name or "thread", bool(daemon)
        self._thread: SimThread | None = None
        self._ended = Event()

    def start(self) -> None:
        """Start the thread, in the process of the running one."""
        process = _me().process
        self._thread = world().spawn(process, self._main, self.name)
        self._thread.object = self

    def _main(self) -> None:
        try:
            self.run()
        except BaseException as error:
            world().tell(repr(self._thread), f"ends with {type(error).__name__}: {error}")
        finally:
            self._ended.set()

    def run(self) -> None:
        """Call the target."""
        if self._target is not None:
            self._target(*self._args, **self._kwargs)

    def join(self, timeout: float | None = None) -> None:
        """Wait for the thread's end."""
        self._ended.wait(timeout)

    def is_alive(self) -> bool:
        """Return True while the thread runs."""
        return self._thread is not None and not self._ended.is_set()

    @property
    def ident(self) -> int | None:
        """The thread's number; None before it was started."""
        return None if self._thread is None else self._thread.ident

    native_id = ident


def current_thread() -> Any:
    """Return the running thread's object."""
    thread = _current_or_none()
    if thread is None:
        return real.current_thread()
    if thread.object is None:
        thread.object = Thread(name=thread.name)
        thread.object._thread = thread
    return thread.object


def main_thread() -> Any:
    """Return the main thread's object of the running process."""
    thread = _me()
    return current_thread() if thread.name == "main" else None


def stack_size(size: int = 0) -> int:
    """Return 0: simulated threads have no stacks of their own."""
    return 0


class local:
    """Attributes of each thread's own."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        created = object.__new__(cls)
        object.__setattr__(created, "_sim_number", next(_local_numbers))
        object.__setattr__(created, "_sim_arguments", (args, kwargs))
        object.__setattr__(created, "_sim_outside", {})
        return created

    def __init__(self) -> None:
        """Called once per thread."""

    def __getattribute__(self, name: str) -> Any:
        _enter(self)
        return object.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        _enter(self)
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        _enter(self)
        object.__delattr__(self, name)


_SHARED = ("_sim_number", "_sim_arguments", "_sim_outside")
_local_numbers = itertools.count()  # unlike addresses, they are not used again


def _enter(of: local) -> None:
    """Make the running thread's attributes those of the object."""
    now = object.__getattribute__(of, "__dict__")
    thread = _current_or_none()
    owner = now["_sim_outside"] if thread is None else thread.locals
    number = now["_sim_number"]
    own = owner.get(number)
    if own is now:
        return
    is_new = own is None
    if own is None:
        own = owner[number] = {name: now[name] for name in _SHARED}
    object.__setattr__(of, "__dict__", own)
    if is_new:
        args, kwargs = own["_sim_arguments"]
        type(of).__init__(of, *args, **kwargs)
