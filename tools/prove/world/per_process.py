"""State of a module that each simulated process has for itself, as if each had loaded the module.

Simulated processes share the modules of the roles. A module that keeps a dictionary or a lock of its own would connect
them: a process that dies, or is stopped, inside the lock would keep it from all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from tools.prove.world import scheduler

__all__ = ["EachProcess", "EachProcessDict"]

T = TypeVar("T")


class EachProcess(Generic[T]):
    """Value of each process, made by `make` when it is used for the first time."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._outside: T | None = None
        self._values: WeakKeyDictionary[Any, T] = WeakKeyDictionary()

    @property
    def own(self) -> T:
        """Value of the running thread's process; one more is for the scheduler, and for the time before it."""
        thread = None if scheduler._current is None else scheduler._current.current
        if thread is None:
            if self._outside is None:
                self._outside = self._make()
            return self._outside
        value = self._values.get(thread.process)
        if value is None:
            value = self._values[thread.process] = self._make()
        return value


class EachProcessDict(MutableMapping[Any, Any]):
    """Dictionary of each process."""

    def __init__(self) -> None:
        self._each: EachProcess[dict[Any, Any]] = EachProcess(dict)

    def __getitem__(self, key: Any) -> Any:
        return self._each.own[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._each.own[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._each.own[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._each.own)

    def __len__(self) -> int:
        return len(self._each.own)
