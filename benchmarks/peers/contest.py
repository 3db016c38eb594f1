"""Common parts of the contenders of benchmarks/messenger.py: batches, turns, two kinds of timing, a check of bytes.

A contender is a process that moves batches between its own memory and that of an owner process. It reads a JSON object
per line, performs the turn, and replies with a line of JSON. This module needs only numpy, so that contenders can run
in any Python that has their package.
"""

import json
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

MIB = 1 << 20
REGION_NBYTES = 128 * MIB
READY = "READY "

Rows = list[tuple[int, int, int]]
"""(local offset, remote offset, bytes) of each slice of a batch."""
Wait = Callable[[], None]
"""Function that returns when the batch is complete: its bytes have arrived, and this side has been notified."""
Start = Callable[[], Wait]


@dataclass(frozen=True)
class Shape:
    """Shape of a batch. Several slices are not adjacent on either side, so that they cannot be merged."""

    slice_nbytes: int
    slices: int = 1

    @property
    def nbytes(self) -> int:
        return self.slice_nbytes * self.slices

    def places(self) -> list[Rows]:
        """Return all positions in the regions for such a batch; successive batches use successive positions."""
        stride = self.slice_nbytes * (2 if self.slices > 1 else 1)
        span = stride * self.slices
        return [
            [(base + i * stride, base + i * stride, self.slice_nbytes) for i in range(self.slices)]
            for base in range(0, REGION_NBYTES - span + 1, span)
        ]


class Contender(ABC):
    """Base class of contenders.

    `local`: this side's memory, uint8 [REGION_NBYTES]. `drain`: waits for outstanding work of a turn's batches.
    """

    local: NDArray[np.uint8]
    drain: Wait | None = None

    @abstractmethod
    def prepare(self, rows: Rows, *, write: bool) -> Start:
        """Prepare a batch that is moved many times; return a function that starts it."""

    def turn(self, window: int) -> AbstractContextManager[None]:
        """Return a context manager around a turn with `window` batches in flight; outside it, nothing may run."""
        return nullcontext()

    @abstractmethod
    def close(self) -> None:
        """Release all resources."""

    def check(self) -> None:
        """Check that bytes written and read back are equal, and restore both memories."""
        half = REGION_NBYTES // 2
        for shape in (Shape(64 << 10), Shape(16 << 10, 200)):
            there = shape.places()[1]
            back = [(local + half, remote, nbytes) for local, remote, nbytes in there]
            self._invert(there)
            self.prepare(there, write=True)()()
            self.prepare(back, write=False)()()
            for local, _, nbytes in there:
                if not np.array_equal(self.local[local : local + nbytes], self.local[half + local :][:nbytes]):
                    raise SystemExit("the bytes read differ from the bytes written")
            self._invert(there)
            self.prepare(there, write=True)()()
            self.prepare([(remote + half, remote + half, nbytes) for _, remote, nbytes in there], write=False)()()

    def _invert(self, rows: Rows) -> None:
        for local, _, nbytes in rows:
            self.local[local : local + nbytes] ^= 0xFF


def random_bytes(array: NDArray[np.uint8]) -> None:
    """Fill memory, so that all pages are allocated; both sides start with the same bytes."""
    array[:] = np.random.default_rng(7).integers(0, 256, len(array), dtype=np.uint8)


def serve(contender: Contender) -> None:
    """Perform turns until standard input ends."""
    with contender.turn(1):
        contender.check()
    walks: dict[tuple[Shape, bool], Iterator[Start]] = {}
    print(READY, flush=True)
    for line in sys.stdin:
        turn = json.loads(line)
        shape, write = Shape(*turn["shape"]), turn["write"]
        if (shape, write) not in walks:
            walks[shape, write] = _walk([contender.prepare(rows, write=write) for rows in shape.places()])
        starts = list(islice(walks[shape, write], turn["batches"]))
        with contender.turn(turn["window"]):
            if turn["window"] == 1:
                seconds = _one_by_one(starts)
            else:
                seconds = [_under_way(starts, turn["window"], contender.drain)]
        print(json.dumps(seconds), flush=True)
    contender.close()


def _walk(starts: list[Start]) -> Iterator[Start]:
    while True:
        yield from starts


def _one_by_one(starts: list[Start]) -> list[float]:
    """Run the batches sequentially; return the seconds of each."""
    result = []
    for start in starts:
        began = time.perf_counter()
        start()()
        result.append(time.perf_counter() - began)
    return result


def _under_way(starts: list[Start], window: int, drain: Wait | None) -> float:
    """Run the batches with up to `window` in flight; return the total seconds."""
    waits: deque[Wait] = deque()
    began = time.perf_counter()
    for start in starts:
        if len(waits) == window:
            waits.popleft()()
        waits.append(start())
    while waits:
        waits.popleft()()
    if drain is not None:
        drain()
    return time.perf_counter() - began


class Owner:
    """Owner process: the same script with the argument "owner"."""

    def __init__(self, script: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, script, "owner", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            # Some packages also log to standard output.
            if line.startswith(READY):
                self.told = json.loads(line.removeprefix(READY))
                return
        raise SystemExit(f"the owner of {script} ended before it was ready")

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(20)


def ready(told: object) -> None:
    """Report to the contender that the owner is ready, with its parameters."""
    print(READY + json.dumps(told), flush=True)
