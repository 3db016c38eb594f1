"""A simulated operating-system process: its threads, its clock's offsets, its event loop, its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Coroutine
from typing import Any

from tools.prove.world.event_loop import SimLoop
from tools.prove.world.scheduler import SimThread, World

log = logging.getLogger(__name__)


class Process:
    """Process `name` on `host`. Its monotonic clock begins anywhere, and its wall clock is a little wrong."""

    def __init__(self, world: World, name: str, host: str) -> None:
        self.world, self.name, self.host = world, name, host
        self.threads: dict[int, SimThread] = {}
        self.is_dead = self.is_paused = False
        self.num_pauses = 0
        self.waiting: list[SimThread] = []
        self.num_steps = 0
        self._due: list[tuple[int, Callable[[], None]]] = []
        self.random = random.Random(f"{world.seed} {name} {world.next_number()}")
        self.monotonic_offset_ns = self.random.randrange(10**12, 10**15)
        self.wall_offset_ns = 1_700_000_000 * 10**9 + self.random.randrange(-(10**9), 10**9)
        self.at_death: list[Callable[[], None]] = []
        self.exit: Any = None
        self.loop: Any = None
        self.remains: set[asyncio.Task[Any]] = set()
        self.objects: dict[str, list[Any]] = {}  # of its roles, for invariants and faults
        world.processes.append(self)

    def __repr__(self) -> str:
        return f"<process {self.name}>"

    def start(self, main: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        """Run a coroutine on the process's event loop, in its main thread; the process ends with it."""

        def run() -> None:
            self.loop = loop = SimLoop(self)
            try:
                self.exit = loop.run_until_complete(main())
            except Exception as error:
                self.exit = error
                self.world.tell(self.name, f"ends with {type(error).__name__}: {error}")
                log.exception("%s ends", self.name)
            self.end("ends")

        self.world.spawn(self, run, "main")

    def count_step(self) -> None:
        """Count a step that begins; faults that wait for it begin."""
        self.num_steps += 1
        while self._due and self._due[0][0] <= self.num_steps:
            self._due.pop(0)[1]()

    def call_after(self, steps: int, callback: Callable[[], None]) -> None:
        """Call back in the scheduler before the process's step after so many more, or when the process has ended."""
        if not self._due:
            self.at_death.append(self._call_all)
        self._due = sorted([*self._due, (self.num_steps + steps, callback)], key=lambda each: each[0])

    def _call_all(self) -> None:
        due, self._due = self._due, []
        for _, callback in due:
            callback()

    def end(self, how: str) -> None:
        """End the process at once: none of its code runs any more, not even `finally`."""
        if self.is_dead:
            return
        self.world.tell(self.name, how)
        self.is_dead = True
        if self.loop is not None:  # keep the tasks: the collector would run their `finally` when it frees them
            self.remains = asyncio.all_tasks(self.loop)
        self.world.forget(self)
        for callback in self.at_death:
            callback()
        current = self.world.current
        if current is not None and current.process is self:
            self.world._hub.switch()  # and never return

    def close_tasks(self) -> None:
        """Close the coroutines that have not ended, before the garbage collector does so."""
        for task in self.remains if self.is_dead or self.loop is None else asyncio.all_tasks(self.loop):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            with contextlib.suppress(BaseException):
                task.get_coro().close()

    def thread_ended(self, thread: SimThread) -> None:
        """Forget a thread that returned."""
        self.threads.pop(thread.ident, None)
