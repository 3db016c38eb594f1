"""Who waits for slots on a worker: the first in line gets them, all at once, and nobody goes past it.

Gives running answers more slots before they need them. Who gets none keeps its KV and waits: nothing is lost.

Lives on the event loop. What may be granted is `GrowthBook`'s to say: whoever runs can end, whatever it may need.

A worker's slots: who waits for them, who is given more while it runs, when they may be used again.

Lives on the event loop. A coroutine takes slots with `take`, gives them to a sequence for the time that it is in the
engine, and gives them back with `give`, or `fence` where a remote may still write them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from worker.config import WorkerConfig
from worker.errors import RequestRefused
from worker.policy import OutOfSlots, SlotPool
from worker.policy.growth import GrowthLedger
from worker.policy.scheduling_order import RequestKey, WaitQueue
from worker.request import EngineSequence
from worker.shielded_wait import shielded
from worker.slot_memory import SlotMemory

Taken = tuple[list[int], int]


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    key: RequestKey
    keys: Sequence[bytes]
    count: int
    wants: int
    taken: asyncio.Future[Taken]


class SlotQueue:
    """Lives on the event loop. `acquire(request, keys, count, wants)` takes slots or raises OutOfSlots;
    `release(request, slots)` undoes it."""

    def __init__(
        self,
        wait_queue: WaitQueue,
        acquire: Callable[[RequestKey, Sequence[bytes], int, int], Taken],
        release: Callable[[RequestKey, list[int]], None],
    ) -> None:
        self._wait_queue = wait_queue
        self._acquire = acquire
        self._release = release
        self._waiters: list[_Waiter] = []

    def __len__(self) -> int:
        return len(self._waiters)

    async def take(self, key: RequestKey, keys: Sequence[bytes], count: int, wants: int = 0) -> Taken:
        """As `acquire` for the request `key`, once it is its turn and the slots are there. Cancellable."""
        waiter = _Waiter(key, keys, count, wants, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        self.serve()
        try:
            return await waiter.taken
        except asyncio.CancelledError:
            if waiter.taken.done() and not waiter.taken.cancelled():
                self._release(key, waiter.taken.result()[0])
            raise
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            self.serve()

    def serve(self) -> None:
        """Slots may have come back: give them to those whose turn it is."""
        while self._waiters:
            now_s = time.monotonic()
            first = min(self._waiters, key=lambda waiter: self._wait_queue.rank(waiter.key, now_s))
            if not first.taken.done():
                try:
                    first.taken.set_result(self._acquire(first.key, first.keys, first.count, first.wants))
                except OutOfSlots:
                    return
            self._waiters.remove(first)


class GrowingAnswers:
    """The answers of one worker that were given fewer slots than they may need."""

    def __init__(
        self,
        num_slots: int,
        block_tokens: int,
        *,
        allocate: Callable[[int], list[int]],
        extend: Callable[[EngineSequence, list[int]], None],
        waits: Callable[[], None],
    ) -> None:
        """`allocate(count)` takes slots or raises OutOfSlots, `extend` hands them to the engine; `waits()` is called
        when one is not given what it asked for."""
        self._book = GrowthLedger(num_slots)
        self._block_tokens = block_tokens
        self._allocate = allocate
        self._extend = extend
        self._waits = waits
        self._running: dict[int, EngineSequence] = {}
        self._asking: dict[int, EngineSequence] = {}

    def __len__(self) -> int:
        """Requests that may still take more."""
        return len(self._book)

    @property
    def is_short(self) -> bool:
        """Somebody who runs waits for slots: nobody new should get any."""
        return bool(self._asking)

    def begin(self, key: RequestKey, slots: Sequence[int], wants: int) -> bool:
        """The request took `slots` and may need `wants` more. False where that could keep others from ending."""
        return self._book.begin(key, slots, wants)

    def end(self, key: RequestKey) -> None:
        """The request is about to give back its slots."""
        self._book.end(key)

    def run(self, sequence: EngineSequence) -> None:
        """It goes to the engine."""
        if self._book.wants(sequence.request.key):
            self._running[id(sequence)] = sequence
            self.stepped(sequence)

    def leave(self, sequence: EngineSequence) -> None:
        """It has left the engine."""
        self._running.pop(id(sequence), None)
        self._asking.pop(id(sequence), None)

    def stepped(self, sequence: EngineSequence) -> None:
        """It has one more token: the block after the next is asked for in time."""
        if id(sequence) not in self._running or id(sequence) in self._asking:
            return
        if sequence.num_tokens + self._block_tokens > len(sequence.slots) * self._block_tokens:
            self._asking[id(sequence)] = sequence
            self.serve()
            if id(sequence) in self._asking:
                self._waits()

    def serve(self) -> None:
        """Slots may have come back: give them to those who run, those who came first at their head."""
        now_s = time.monotonic()
        for sequence in sorted(self._asking.values(), key=lambda sequence: sequence.queue_entry.rank(now_s)):
            key = sequence.request.key
            if not self._book.may_extend(key, 1):
                continue
            try:
                slots = self._allocate(1)
            except OutOfSlots:
                return
            self._book.extend(key, slots)
            self._extend(sequence, slots)
            del self._asking[id(sequence)]
            if not self._book.wants(key):
                del self._running[id(sequence)]


class NodeSlots:
    """The slots of one worker. `pool` says whose each is, `growing` which running answers were given too few."""

    def __init__(
        self,
        config: WorkerConfig,
        memories: Iterable[SlotMemory],
        wait_queue: WaitQueue,
        *,
        extend: Callable[[EngineSequence, list[int]], None],
        waits: Callable[[], None],
    ) -> None:
        """`memories` hold the slots' bytes, each in its form. `extend` hands more slots to a running sequence;
        `waits()` is called when one is not given what it asked for."""
        self._config = config
        self._memories = tuple(dict.fromkeys(memories))
        self.pool = SlotPool(config.num_slots)
        self.growing = GrowingAnswers(
            config.num_slots, config.block_tokens, allocate=self._allocate, extend=extend, waits=waits
        )
        self._queue = SlotQueue(wait_queue, self._acquire, self._undo)
        self._loop = asyncio.get_running_loop()
        self._commits: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begin to commit what is used first."""
        self._commit_ahead_of(())

    @property
    def num_waiting(self) -> int:
        """Requests that wait for slots to begin with."""
        return len(self._queue)

    def must_wait(self, count: int) -> bool:
        """Whether `take` would have to wait for so many slots now, none of them shared."""
        return bool(self._queue) or count > self.pool.num_available

    async def take(
        self, request: RequestKey, keys: Sequence[bytes], count: int, wants: int = 0
    ) -> tuple[list[int], int]:
        """As SlotPool.acquire, for a request in line; waits for its turn and until the slots are there. Cancellable.

        `wants`: further slots that it may need while it runs; it is given them then. Raises RequestRefused for more
        than there are.
        """
        if count + wants > self._config.num_slots:
            raise RequestRefused(
                "too_long",
                f"the request needs {count + wants} blocks of KV; this node has {self._config.num_slots} "
                f"({self._config.engine.capacity_tokens} tokens, capacity_tokens)",
            )
        return await self._queue.take(request, keys, count, wants)

    def take_now(self, request: RequestKey, keys: Sequence[bytes], count: int) -> tuple[list[int], int] | None:
        """As `take`, for whoever does not stand in line: None where it would have to wait."""
        if self._queue:
            return None
        with contextlib.suppress(OutOfSlots):
            return self._acquire(request, keys, count, 0)
        return None

    def give(self, slots: Sequence[int]) -> None:
        """Give slots back."""
        self.pool.release(slots)
        self._serve_waiting()

    def left(self, sequence: EngineSequence) -> None:
        """A sequence has left the engine: nobody waits any longer because it wants more slots."""
        self.growing.leave(sequence)
        self._serve_waiting()

    async def fence(self, slots: Sequence[int], fence: Callable[[], None]) -> None:
        """Give back slots that a remote may still write: they are reused only after `fence()` (blocking) returned.

        Nobody else may hold them, which is so as long as they have not been indexed.
        """
        self.pool.quarantine(slots)
        await shielded(asyncio.ensure_future(self._readmit_after(fence, slots)))

    def index(self, slots: Sequence[int], keys: Sequence[bytes], *, anew_from: int | None = None) -> None:
        """Whole, verified blocks in held slots can be reused by later requests on this node.

        From block `anew_from` on they take the place of equal ones that were here: these were computed to check them.
        """
        for i, (slot, key) in enumerate(zip(slots, keys, strict=False)):
            if anew_from is not None and i >= anew_from:
                self.pool.forget(key)
            self.pool.index(slot, key)

    async def close(self) -> None:
        """Returns when nothing works on the memories any more."""
        await asyncio.gather(*self._commits)

    def _acquire(self, request: RequestKey, keys: Sequence[bytes], count: int, wants: int) -> tuple[list[int], int]:
        if self.growing.is_short:
            raise OutOfSlots("answers that run wait for slots")
        taken = self.pool.acquire(keys, count)
        if wants and not self.growing.begin(request, taken[0], wants):
            self.pool.release(taken[0])
            raise OutOfSlots("answers that run may need these slots to end")
        self._commit_ahead_of(taken[0])
        return taken

    def _undo(self, request: RequestKey, slots: list[int]) -> None:
        self.growing.end(request)
        self.pool.release(slots)
        self.growing.serve()

    def _allocate(self, count: int) -> list[int]:
        slots = self.pool.allocate(count)
        self._commit_ahead_of(slots)
        return slots

    def _commit_ahead_of(self, slots: Sequence[int]) -> None:
        for memory in self._memories:
            for work in memory.commits_due(slots):
                commit = self._loop.create_task(asyncio.to_thread(work))
                self._commits.add(commit)
                commit.add_done_callback(self._commits.discard)

    async def _readmit_after(self, fence: Callable[[], None], slots: Sequence[int]) -> None:
        await asyncio.to_thread(fence)
        self.pool.readmit(slots)
        self._serve_waiting()

    def _serve_waiting(self) -> None:
        self.growing.serve()
        self._queue.serve()
