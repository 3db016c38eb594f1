"""Finds the objects of the roles: those that a simulated process creates are remembered in its `objects`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tools.prove.world.scheduler import ProcessState, world


def running_process() -> ProcessState:
    """Return the process of the running thread."""
    thread = world().current
    assert thread is not None
    return thread.process


def remember(name: str, value: Any) -> None:
    """Add a value to the running process's `objects` of that name."""
    running_process().objects.setdefault(name, []).append(value)


def on_creation(kind: type[Any], look: Callable[[Any], None]) -> None:
    """Call `look` with each object of a class when it has been created."""
    create = kind.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        create(self, *args, **options)
        look(self)

    kind.__init__ = init
