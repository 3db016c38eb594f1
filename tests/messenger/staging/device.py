"""A stand-in for a GPU's runtime: streams are queues whose work is executed late, and in any order that CUDA permits.

Nothing is executed until somebody waits for an event (or `poke` is called). Then work of all streams is executed in a
random order in which each stream keeps its own, until that event is reached. The rows of one call's copies are moved
one by one, in random order, between work of other streams. Bytes really move, so a missing wait shows as wrong bytes.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from messenger.staging import StagingError, StridedCopy

Work = Callable[[], bool]  # a piece of work; returns True when there is no further piece


class DeviceFailed(Exception):
    """An asynchronous error of the device, as CUDA reports it: by every later wait of the stream."""


@dataclass(eq=False)
class Event:
    device: Device
    is_reached: bool = False
    error: DeviceFailed | None = None

    def is_done(self) -> bool:
        self.device.calls.append("query")
        with self.device.lock:
            self._raise()
            return self.is_reached

    def synchronize(self) -> None:
        self.device.calls.append("synchronize")
        if threading.get_ident() == self.device.engine_thread:
            self.device.has_blocked_engine = True
            raise AssertionError("the engine's thread waits for the device")
        with self.device.lock:
            while not self.is_reached:
                assert self.device.step(), "the streams wait for each other in a circle"
            self._raise()

    def _raise(self) -> None:
        if self.is_reached and self.error is not None:
            raise self.error


@dataclass(eq=False)
class Stream:
    device: Device
    queue: deque[Work | Event | tuple[Event]] = field(default_factory=deque)  # a tuple: wait for the event
    error: DeviceFailed | None = None
    forgets_waits: bool = False  # a defect: this stream does not wait for events

    def record(self) -> Event:
        event = Event(self.device)
        with self.device.lock:
            self.queue.append(event)
        return event

    def wait(self, event: Event) -> None:
        if not (self.forgets_waits or self.device.forgets_waits):
            with self.device.lock:
                self.queue.append((event,))

    def launch(self, work: Callable[[], object]) -> None:
        """Queue one piece of work."""

        def once() -> bool:
            work()
            return True

        with self.device.lock:
            self.queue.append(once)

    def can_run(self) -> bool:
        head = self.queue[0] if self.queue else None
        return head is not None and not (isinstance(head, tuple) and not head[0].is_reached)

    def run(self) -> None:
        """Execute one piece of the first work."""
        head = self.queue[0]
        if isinstance(head, Event):
            head.is_reached, head.error = True, self.error
        elif isinstance(head, tuple):
            self.error = self.error or head[0].error
        else:
            try:
                if not head():
                    return
            except DeviceFailed as error:
                self.error = error
        self.queue.popleft()


class Device:
    """A device with `nbytes` bytes of memory. Implements DeviceRuntime."""

    max_pitch = 1 << 20

    def __init__(self, nbytes: int, seed: int = 0, *, forgets_waits: bool = False) -> None:
        self.memory = np.zeros(nbytes, np.uint8)
        self.lock = threading.RLock()
        self.streams: list[Stream] = []
        self.forgets_waits = forgets_waits  # a defect: streams do not wait for events
        self.engine_thread = 0
        self.has_blocked_engine = False
        self.calls: list[str] = []
        self.copied: list[Sequence[StridedCopy]] = []  # of each call
        self.pinned: list[NDArray[np.uint8]] = []
        self.can_pin = True
        self.refuses_copies = False  # an error of the call
        self.refuses_after: int | None = None  # an error of the call, after so many of its copies were queued
        self.loses_copies = False  # an error after the call
        self.hurried: Stream | None = None  # executes its work before all others whenever it can
        self._rng = random.Random(seed)
        self._mirror = np.zeros(0, np.uint8)
        self.compute = self.new_stream()

    def new_stream(self) -> Stream:
        self.streams.append(Stream(self))
        return self.streams[-1]

    def pin(self, mirror: NDArray[np.uint8]) -> None:
        self._mirror = mirror
        if not self.can_pin:
            raise StagingError("no memory may be locked")
        self.pinned.append(mirror)

    def unpin(self, mirror: NDArray[np.uint8]) -> None:
        assert not any(stream.queue for stream in self.streams), "copies are in progress"
        self.pinned.remove(mirror)

    def copy(self, stream: Stream, copies: Sequence[StridedCopy], *, to_host: bool) -> None:
        if self.refuses_copies:
            raise StagingError("the driver refused the copy")
        if self.refuses_after is not None:
            queued, self.refuses_after = copies[: self.refuses_after], None
            if queued:
                self.copy(stream, queued, to_host=to_host)
            raise StagingError("the driver refused the copy")
        self.copied.append(copies)
        rows = [(host, device, each.nbytes) for each in copies for host, device in each.each_row()]
        self._rng.shuffle(rows)

        def move() -> bool:
            if self.loses_copies:
                raise DeviceFailed("an illegal address was accessed")
            host, device, nbytes = rows.pop()
            mine, theirs = self._mirror[host : host + nbytes], self.memory[device : device + nbytes]
            assert len(mine) == len(theirs) == nbytes, "the copy reaches beyond the memory"
            if to_host:
                mine[:] = theirs
            else:
                theirs[:] = mine
            return not rows

        with self.lock:
            stream.queue.append(move)

    def step(self) -> bool:
        """Execute a piece of work of some stream; return False if there is none."""
        with self.lock:
            able = [stream for stream in self.streams if stream.can_run()]
            if able:
                (self.hurried if self.hurried in able else self._rng.choice(able)).run()
            return bool(able)

    def poke(self, pieces: int) -> None:
        """Execute some pieces of work."""
        for _ in range(pieces):
            self.step()

    def computed(self) -> None:
        """Execute all work of the compute stream, and of others what it waits for or what chance brings."""
        with self.lock:
            while self.compute.queue:
                assert self.step()

    def pending(self) -> Iterator[Stream]:
        return (stream for stream in self.streams if stream.queue)
