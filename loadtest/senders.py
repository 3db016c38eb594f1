"""Sender processes: their number, their shares, the messages to and from them, and the collection of their records.

The rate at which one event loop can send requests and read events is limited by one core. Beyond that rate, requests
are sent late and tokens are read late, which would be attributed to the server. Messages are length-prefixed pickles
over pipes that only these processes hold. If a sender dies or stops responding, the report names it and counts its
missing records; the other senders' records are kept.
"""

from __future__ import annotations

import asyncio
import pickle
import signal
import struct
import sys
import tempfile
import time
from asyncio import IncompleteReadError, StreamReader
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import IO, Any, Protocol

import numpy as np

from loadtest.errors import SenderUnusable
from loadtest.plan import PlannedRequest
from loadtest.record import RequestRecord
from loadtest.sender import LoadPlan, SendTally, send_share
from loadtest.validity import ClockWatch, ValidityEvidence, clock_from

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class SenderJob:
    """First message to a sender: its share."""

    load: LoadPlan


@dataclass(frozen=True)
class SenderReady:
    """Message from a sender: it has received its share and waits for the start."""


@dataclass(frozen=True)
class Start:
    """Message to a sender: `at` is the run's time 0 on time.monotonic()."""

    at: float


@dataclass(frozen=True)
class Stop:
    """Message to a sender: send no more requests and cancel those in flight."""


@dataclass(frozen=True)
class SenderProgress:
    """Periodic message from a sender: number of requests sent so far, and records of those ended since the last one."""

    sent: int
    ended: tuple[RequestRecord, ...]


@dataclass(frozen=True)
class Done:
    """Last message from a sender: the number of its records."""

    records: int


def frame(message: object) -> bytes:
    """Encode a message."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


async def read_frame(reader: StreamReader) -> Any | None:
    """Read the next message; None at the end of the stream, even within a message."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return pickle.loads(await reader.readexactly(length))
    except (IncompleteReadError, ConnectionError):
        return None


REQUEST_COST_S = 0.8e-3
"""CPU time of a sender per request: body, connection, headers (measured by benchmarks/load_senders.py)."""
EVENT_COST_S = 3e-5
"""CPU time of a sender per event of an answer."""
BUSY_SHARE = 0.5
"""Planned utilisation of a sender; at higher utilisation its own queueing would be measured as the server's."""
_PEAK_WINDOW_S = 5.0


def choose_senders(requests: Sequence[PlannedRequest], *, speed: float, cores: int) -> int:
    """Return the number of sender processes for this load.

    Each is at most half busy in the busiest five seconds. At most one process per two cores is used, to leave CPU time
    for a server on the same machine.
    """
    if not requests:
        return 1
    due = np.array([r.arrival_s for r in requests]) / speed
    costs = np.array([REQUEST_COST_S + EVENT_COST_S * r.max_tokens for r in requests])
    total = np.concatenate([[0.0], np.cumsum(costs)])
    ends = np.searchsorted(due, due + _PEAK_WINDOW_S, side="right")
    busiest = float((total[ends] - total[: len(costs)]).max()) / _PEAK_WINDOW_S
    return int(min(max(np.ceil(busiest / BUSY_SHARE), 1), max(cores // 2, 1), len(requests)))


def split(requests: Sequence[PlannedRequest], senders: int) -> list[list[PlannedRequest]]:
    """Split the requests round-robin, so that the senders' loads are equal at any time. Empty shares are dropped."""
    shares = [list(requests[number::senders]) for number in range(senders)]
    return [share for share in shares if share] or [[]]


def split_limit(limit: int | None, senders: int) -> list[int | None]:
    """Split a concurrency limit into parts that add up to it. `senders` must not exceed `limit`."""
    if limit is None:
        return [None] * senders
    return [limit // senders + (number < limit % senders) for number in range(senders)]


_READY_S = 120.0
_SILENT_S = 60.0
_END_S = 10.0
_SHOWN = 400
HEAD_START_S = 0.2


class Senders(Protocol):
    """Sender processes that have their share of a load and wait for the start."""

    async def send(self, start: float, stop: asyncio.Event, tally: SendTally) -> tuple[list[RequestRecord], list[str]]:
        """Send the load, with `start` on time.monotonic() as time 0; return (records, how each lost sender ended)."""


@asynccontextmanager
async def open_senders(load: LoadPlan, senders: int) -> AsyncIterator[Senders]:
    """Start the sender processes; one sender runs in this process. Raises SenderUnusable if one does not start."""
    if senders == 1:
        yield _Here(load)
        return
    shares = split(load.requests, senders)
    limits = split_limit(load.limit, len(shares))
    with tempfile.TemporaryFile() as errors:
        children: list[_Child] = []
        try:
            for number, (share, limit) in enumerate(zip(shares, limits, strict=True)):
                share_load = replace(load, requests=share, limit=limit)
                name = f"sender {number + 1} of {len(shares)}"
                children.append(await _Child.start(name, share_load, errors))
            await asyncio.gather(*(child.ready() for child in children))
            yield _There(children)
        finally:
            await asyncio.gather(*(child.close() for child in children))


async def send_watched(
    senders: Senders, load: LoadPlan, *, start: float, stop: asyncio.Event, tally: SendTally
) -> ValidityEvidence:
    """Send the load while watching this machine's clocks; the returned records are in order of sending."""
    watch = ClockWatch()
    watching = asyncio.create_task(watch.run())
    try:
        records, lost = await senders.send(start, stop, tally)
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
    records.sort(key=lambda r: (r.sent_s, r.index))
    return ValidityEvidence(len(load.requests), records, lost, watch.readings, stop.is_set())


@dataclass(frozen=True)
class _Here:
    load: LoadPlan

    async def send(self, start: float, stop: asyncio.Event, tally: SendTally) -> tuple[list[RequestRecord], list[str]]:
        return await send_share(self.load, clock=clock_from(start), stop=stop, tally=tally), []


@dataclass
class _Child:
    """Sender process. `planned`: requests of its share; `sent`, `records`: as reported so far."""

    name: str
    process: Process
    planned: int
    errors: IO[bytes]
    sent: int = 0
    records: list[RequestRecord] = field(default_factory=list)

    @classmethod
    async def start(cls, name: str, load: LoadPlan, errors: IO[bytes]) -> _Child:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "loadtest.sender_process"),
            stdin=PIPE,
            stdout=PIPE,
            stderr=errors,
            start_new_session=True,  # so that Ctrl-C in the terminal reaches only the parent
        )
        child = cls(name, process, len(load.requests), errors)
        child.tell(SenderJob(load))
        return child

    def tell(self, message: object) -> None:
        """Send a message; errors are ignored, because a dead sender is detected when reading."""
        assert self.process.stdin is not None
        with suppress(ConnectionError, RuntimeError):
            self.process.stdin.write(frame(message))

    async def hear(self, within_s: float) -> object | None:
        """Return the sender's next message; None if it has ended. Raises TimeoutError."""
        assert self.process.stdout is not None
        return await asyncio.wait_for(read_frame(self.process.stdout), within_s)

    async def ready(self) -> None:
        """Wait until the sender has received its share. Raises SenderUnusable."""
        try:
            message = await self.hear(_READY_S)
        except TimeoutError:
            raise SenderUnusable(f"{self.name} was not ready within {_READY_S:g} s; try --senders 1") from None
        if not isinstance(message, SenderReady):
            raise SenderUnusable(f"{self.name} did not start: {await self.fate()}; try --senders 1")

    async def collect(self, tally: SendTally) -> str:
        """Receive records until the sender is done; return "" on success, else how it ended."""
        while True:
            try:
                message = await self.hear(_SILENT_S)
            except TimeoutError:
                self.process.kill()
                fate = f"sent no message for {_SILENT_S:g} s and was killed"
                break
            if isinstance(message, SenderProgress):
                self._take(message, tally)
            elif isinstance(message, Done) and message.records == len(self.records):
                return ""
            else:
                fate = await self.fate()
                break
        return f"{self.name} {fate}, with {len(self.records):,} of its {self.planned:,} records received"

    def _take(self, progress: SenderProgress, tally: SendTally) -> None:
        tally.sent += progress.sent - self.sent
        self.sent = progress.sent
        self.records += progress.ended
        for record in progress.ended:
            tally.add(record)

    async def fate(self) -> str:
        """Describe how the process ended."""
        try:
            code = await asyncio.wait_for(self.process.wait(), _END_S)
        except TimeoutError:
            return f"(process {self.process.pid}) closed its output before the end"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        self.errors.seek(0)
        said = " ".join(self.errors.read().decode("utf-8", "replace").split())[-_SHOWN:]
        return f"(process {self.process.pid}) {how}{f' ({said})' if said else ''}"

    async def close(self) -> None:
        """Stop the process if it has not ended."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            await asyncio.wait_for(self.process.wait(), _END_S)
        except TimeoutError:
            self.process.kill()
            await self.process.wait()


@dataclass(frozen=True)
class _There:
    children: Sequence[_Child]

    async def send(self, start: float, stop: asyncio.Event, tally: SendTally) -> tuple[list[RequestRecord], list[str]]:
        for child in self.children:
            child.tell(Start(start))
        stopping = asyncio.create_task(self._pass_on(stop))
        try:
            fates = await asyncio.gather(*(child.collect(tally) for child in self.children))
        finally:
            stopping.cancel()
        return [r for child in self.children for r in child.records], [fate for fate in fates if fate]

    async def _pass_on(self, stop: asyncio.Event) -> None:
        await stop.wait()
        for child in self.children:
            child.tell(Stop())


def start_soon() -> float:
    """Return a start time on time.monotonic(), far enough ahead to reach every sender before it passes."""
    return time.monotonic() + HEAD_START_S
