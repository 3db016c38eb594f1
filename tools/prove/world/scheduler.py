"""Virtual time and the seeded order in which simulated threads run.

A simulated thread is a greenlet: it runs until it blocks in a simulated primitive (`SimThread` is parked), or yields at
a point of preemption. One of the threads that can run is chosen by the seed; if none can, time advances to the next
timer. Timers' callbacks run in the scheduler itself and must not block.
"""

from __future__ import annotations

import asyncio
import asyncio.events
import hashlib
import heapq
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from greenlet import GreenletExit, getcurrent, greenlet

SECOND_NS = 1_000_000_000
_READ_CLOCK_NS = 200  # a reading of the clock takes time, so that a loop that polls it ends
_STEP_NS = (1_000, 20_000)  # between two points of preemption
_PREEMPT = 0.1  # of the points of preemption


class Deadlock(Exception):
    """No thread can run and no timer is set."""


class TooLong(Exception):
    """The schedule used more steps than it may."""


class Timer:
    """Callback at an instant. `cancel` may be called at any time."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        """Do not call back."""
        self.callback = None


class ProcessState(Protocol):
    """The simulated process of threads (`process.Process`)."""

    name: str
    host: str
    world: World
    threads: dict[int, SimThread]
    waiting: list[SimThread]
    is_dead: bool
    is_paused: bool
    num_pauses: int
    random: random.Random
    monotonic_offset_ns: int
    wall_offset_ns: int
    at_death: list[Callable[[], None]]
    objects: dict[str, list[Any]]
    loop: Any

    def count_step(self) -> None:
        """Count a step of one of the threads, which begins."""

    def thread_ended(self, thread: SimThread) -> None:
        """Forget a thread that returned."""

    def end(self, how: str) -> None:
        """End the process at once."""

    def close_tasks(self) -> None:
        """Close the tasks of a process that is dead."""


@dataclass(frozen=True)
class Moment:
    """Something that happened in a role of process `here`, at which faults can begin.

    `there`: name of the node that takes part; `request_id`: the request that it belongs to. Both may be empty.
    """

    name: str
    here: ProcessState
    there: str = ""
    request_id: str = ""


class SimThread:
    """Thread of a simulated process. `ident` is unique in the world."""

    def __init__(self, world: World, process: ProcessState, run: Callable[[], Any], name: str) -> None:
        self.world, self.process, self.name = world, process, name
        self.ident = world.next_number()
        self.ended = False
        self.object: Any = None  # its threading.Thread
        self.locals: dict[int, dict[str, Any]] = {}
        self._greenlet = greenlet(self._main, world._hub)  # to which it returns at its end
        self._run = run
        self._is_queued = False
        self._is_parked = False
        self._timer: Timer | None = None
        self._timed_out = False
        self._running_loop: Any = None
        self._asyncgen_hooks = tuple(sys.get_asyncgen_hooks())  # the collector does not see into what it returns

    def __repr__(self) -> str:
        return f"<{self.process.name}/{self.name}>"

    def _main(self) -> None:
        try:
            self._run()
        finally:
            self.ended = True
            self.process.thread_ended(self)

    def resume(self) -> None:
        """Run the thread until it parks, yields or ends. Called by the scheduler."""
        before, hooks = asyncio.events._get_running_loop(), sys.get_asyncgen_hooks()
        asyncio.events._set_running_loop(self._running_loop)
        sys.set_asyncgen_hooks(*self._asyncgen_hooks)
        self._is_queued = False
        try:
            self._greenlet.switch()
        finally:
            self._running_loop = asyncio.events._get_running_loop()
            self._asyncgen_hooks = tuple(sys.get_asyncgen_hooks())
            asyncio.events._set_running_loop(before)
            sys.set_asyncgen_hooks(*hooks)


class World:
    """Clock, timers and threads of one schedule. `log` receives what happens, for the story and the digest."""

    def __init__(self, seed: int, *, most_steps: int = 20_000_000) -> None:
        self.seed = seed
        self.now_ns = 0
        self.order = random.Random(f"order {seed}")
        self.chance = random.Random(f"chance {seed}")
        self.pace: Any = None  # of the schedule
        self.num_steps = 0
        self.num_events = 0
        self.processes: list[ProcessState] = []
        self.disks: dict[str, Any] = {}  # by host
        self.network: Any = None  # set by SimNetwork
        self._most_steps = most_steps
        self._timers: list[tuple[int, int, Timer]] = []  # (when, number, callback), a heap
        self._runnable: list[SimThread] = []
        self._numbers = 0
        self._hub = getcurrent()
        self._digest = hashlib.blake2b(digest_size=16)
        self.story: list[tuple[int, str, str]] = []
        self.problems: list[str] = []
        self.on_moment: Callable[[Moment], None] | None = None
        self._threads: dict[greenlet, SimThread] = {}
        self._is_closed = False

    def next_number(self) -> int:
        """Return 1, 2, ...; numbers of threads, connections and the like."""
        self._numbers += 1
        return self._numbers

    @property
    def digest(self) -> str:
        """Digest of the event log so far, in hex."""
        return self._digest.hexdigest()

    def problem(self, text: str) -> None:
        """Record that an invariant is violated."""
        self.tell("invariant", text)
        self.problems.append(text)

    def tell(self, who: str, what: str) -> None:
        """Add an event to the log."""
        self.num_events += 1
        line = f"{self.now_ns} {who}: {what}"
        self._digest.update(line.encode() + b"\n")
        self.story.append((self.now_ns, who, what))

    @property
    def handle_s(self) -> float:
        """Most that a slow handle of an event loop takes; 0: none is slow."""
        return 0.0 if self.pace is None else float(self.pace.handle_s)

    # Threads

    def spawn(self, process: ProcessState, run: Callable[[], Any], name: str) -> SimThread:
        """Create a thread, which begins when the scheduler chooses it."""
        thread = SimThread(self, process, run, name)
        self._threads[thread._greenlet] = thread
        process.threads[thread.ident] = thread
        self._enqueue(thread)
        return thread

    @property
    def current(self) -> SimThread | None:
        """The running thread; None in the scheduler."""
        return self._threads.get(getcurrent())

    def read_clock(self) -> int:
        """Return the time in nanoseconds; reading it takes a moment."""
        self.now_ns += _READ_CLOCK_NS
        return self.now_ns

    def point(self) -> None:
        """Point of preemption: others may run now. Does nothing in the scheduler."""
        thread = self.current
        if thread is not None:
            self._leave_if_closed()
            if self.order.random() < _PREEMPT:
                self._enqueue(thread)
                self._hub.switch()

    def step(self) -> None:
        """Let others run now."""
        thread = self.current
        assert thread is not None
        self._leave_if_closed()
        self._enqueue(thread)
        self._hub.switch()

    def park(self, timeout_s: float | None = None) -> bool:
        """Block the running thread until `wake`; returns False if the time is over before."""
        thread = self.current
        if thread is None:
            raise RuntimeError("the scheduler's callbacks must not block")
        self._leave_if_closed()
        thread._is_parked, thread._timed_out = True, False
        if timeout_s is not None:
            thread._timer = self.at(max(0.0, timeout_s), lambda: self._time_is_over(thread))
        self._hub.switch()
        return not thread._timed_out

    def wake(self, thread: SimThread) -> None:
        """Let a parked thread continue; others are left alone."""
        if thread._is_parked:
            thread._is_parked = False
            if thread._timer is not None:
                thread._timer.cancel()
                thread._timer = None
            self._enqueue(thread)

    def _time_is_over(self, thread: SimThread) -> None:
        if thread._is_parked:
            thread._timed_out = True
            self.wake(thread)

    def _enqueue(self, thread: SimThread) -> None:
        if not thread._is_queued and not thread.process.is_dead:
            thread._is_queued = True
            if thread.process.is_paused:
                thread.process.waiting.append(thread)
            else:
                self._runnable.append(thread)

    def pause(self, process: ProcessState) -> None:
        """Stop a process, as SIGSTOP does."""
        process.is_paused = True
        process.num_pauses += 1
        process.waiting += [t for t in self._runnable if t.process is process]
        self._runnable = [t for t in self._runnable if t.process is not process]

    def go_on(self, process: ProcessState) -> None:
        """Continue a stopped process."""
        process.is_paused = False
        self._runnable += process.waiting
        process.waiting = []

    def close(self) -> None:
        """Unwind all threads that have not ended, so that the garbage collector does not do so in the next schedule.

        Each gets GreenletExit where it waits, and again at every point at which others could run.
        """
        self._is_closed = True
        hooks = sys.get_asyncgen_hooks()
        for one in self._threads:
            while one:
                one.throw()
        self._threads.clear()
        for process in self.processes:
            process.close_tasks()
        asyncio.events._set_running_loop(None)
        sys.set_asyncgen_hooks(*hooks)

    def _leave_if_closed(self) -> None:
        if self._is_closed:
            raise GreenletExit

    def forget(self, process: ProcessState) -> None:
        """Never run the threads of a process again."""
        self._runnable = [t for t in self._runnable if t.process is not process]
        process.waiting = []

    # Timers

    def at(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        """Call back in the scheduler after `delay_s` seconds."""
        timer = Timer(callback)
        heapq.heappush(self._timers, (self.now_ns + max(0, int(delay_s * SECOND_NS)), self.next_number(), timer))
        return timer

    # The scheduler

    def run(self, until: Callable[[], bool], limit_s: float) -> bool:
        """Run until the condition holds, or for `limit_s` of virtual time. Returns whether it held.

        Raises what a thread or a timer raised out of its main function, Deadlock and TooLong.
        """
        end_ns = self.now_ns + int(limit_s * SECOND_NS)
        while not until():
            while self._timers and self._timers[0][0] <= self.now_ns:
                _, _, timer = heapq.heappop(self._timers)
                if timer.callback is not None:
                    timer.callback()
            if self._runnable:
                index = self.order.randrange(len(self._runnable))
                thread = self._runnable[index]
                self._runnable[index] = self._runnable[-1]
                self._runnable.pop()
                self.now_ns += self.order.randrange(*_STEP_NS)
                thread.process.count_step()
                if thread.process.is_paused:
                    thread.process.waiting.append(thread)
                elif not thread.process.is_dead:
                    thread.resume()
            elif self._timers:
                due_ns, _, timer = self._timers[0]
                if timer.callback is None:
                    heapq.heappop(self._timers)
                    continue
                if due_ns > end_ns:
                    self.now_ns = end_ns
                    return until()
                self.now_ns = max(self.now_ns, due_ns)
            elif until():  # a timer made it so
                return True
            else:
                raise Deadlock("no thread can run, and no timer is set")
            self.num_steps += 1
            if self.num_steps > self._most_steps:
                raise TooLong(f"more than {self._most_steps} steps")
            if self.now_ns > end_ns:
                return until()
        return True


_current: World | None = None


def world() -> World:
    """Return the world of this schedule."""
    assert _current is not None
    return _current


def set_world(new: World | None) -> None:
    """Make a world the one that the simulated modules use, and close the one before."""
    global _current
    if _current is not None and _current is not new:
        _current.close()
    _current = new
