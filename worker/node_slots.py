"""Slots of a worker: admission in the order of the wait queue, growth of running answers, and fencing.

Lives on the event loop. A coroutine takes slots with `take`, lends them to a sequence while it is in the engine, and
returns them with `give`, or with `fence` if a remote node may still write them. Running answers get more slots before
they need them; an answer that has to wait keeps its KV. `GrowthLedger` decides which grants are safe: every running
sequence must be able to end. For requests of a more urgent class, running answers are preempted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass

from engine.rolling import RollingWindow
from messenger.staging import READY, StagingError, Ticket
from worker.config import WorkerConfig
from worker.errors import RequestRefused
from worker.own_blocks import OwnBlocks
from worker.policy import (
    OutOfSlots,
    RunningAnswer,
    SlotPool,
    TakenSlots,
    WindowHold,
    WindowSlots,
    answers_to_preempt,
    slots_of_answer,
    slots_of_prompt,
)
from worker.policy.growth import GrowthLedger
from worker.policy.scheduling_order import RequestKey, WaitQueue
from worker.request import EngineSequence
from worker.shielded_wait import shielded
from worker.slot_memory import SlotMemory

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _WindowNeed:
    """Need of a request in windowed groups; see `NodeSlots.take`. `kept`: slots, if it keeps all of them; else 0."""

    decodes_from: int | None = None
    kept: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    key: RequestKey
    keys: Sequence[bytes]
    count: int
    wants: int
    need: _WindowNeed
    taken: asyncio.Future[TakenSlots]


class SlotQueue:
    """Requests waiting for slots, served strictly in the order of the wait queue; each gets all of its slots at once.

    Lives on the event loop. `acquire(request, keys, count, wants, need)` takes slots or raises OutOfSlots;
    `release(request, taken)` undoes it. `make_room(waiter)` is called when the first one has to wait.
    """

    def __init__(
        self,
        wait_queue: WaitQueue,
        acquire: Callable[[RequestKey, Sequence[bytes], int, int, _WindowNeed], TakenSlots],
        release: Callable[[RequestKey, TakenSlots], None],
        make_room: Callable[[_Waiter], None],
    ) -> None:
        self._wait_queue = wait_queue
        self._acquire = acquire
        self._release = release
        self._make_room = make_room
        self._waiters: list[_Waiter] = []

    def __len__(self) -> int:
        return len(self._waiters)

    async def take(
        self, key: RequestKey, keys: Sequence[bytes], count: int, wants: int, need: _WindowNeed
    ) -> TakenSlots:
        """Acquire slots for the request `key` once it is first in the queue and they are available. Cancellable."""
        waiter = _Waiter(key, keys, count, wants, need, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        self.serve()
        try:
            return await waiter.taken
        except asyncio.CancelledError:
            if waiter.taken.done() and not waiter.taken.cancelled():
                self._release(key, waiter.taken.result())
            raise
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            self.serve()

    def serve(self) -> None:
        """Give returned slots to the first waiting requests."""
        while self._waiters:
            now_s = time.monotonic()
            first = min(self._waiters, key=lambda waiter: self._wait_queue.rank(waiter.key, now_s))
            if not first.taken.done():
                try:
                    taken = self._acquire(first.key, first.keys, first.count, first.wants, first.need)
                    first.taken.set_result(taken)
                except OutOfSlots:
                    self._make_room(first)
                    return
            self._waiters.remove(first)


class GrowingAnswers:
    """Answers of one worker that hold fewer slots than they may need."""

    def __init__(
        self,
        num_slots: int,
        block_tokens: int,
        *,
        allocate: Callable[[int], list[int]],
        extend: Callable[[EngineSequence, list[int]], None],
        waits: Callable[[], None],
    ) -> None:
        """`allocate(count)` takes slots or raises OutOfSlots; `extend` hands them to the engine; `waits()` is called
        when an answer has to wait for a slot."""
        self._book = GrowthLedger(num_slots)
        self._block_tokens = block_tokens
        self._allocate = allocate
        self._extend = extend
        self._waits = waits
        self._running: dict[int, EngineSequence] = {}
        self._asking: dict[int, EngineSequence] = {}

    def __len__(self) -> int:
        """Return the number of requests that may still need more slots."""
        return len(self._book)

    @property
    def is_short(self) -> bool:
        """True if a running answer waits for slots; new requests get none meanwhile."""
        return bool(self._asking)

    def begin(self, key: RequestKey, slots: Sequence[int], wants: int) -> bool:
        """Register a request that took `slots` and may need `wants` more.

        Returns False, without registering it, if it could then keep others from ending.
        """
        return self._book.begin(key, slots, wants)

    def end(self, key: RequestKey) -> None:
        """Unregister a request, before its slots are returned."""
        self._book.end(key)

    def run(self, sequence: EngineSequence) -> None:
        """Register that the sequence enters the engine."""
        if self._book.wants(sequence.request.key):
            self._running[id(sequence)] = sequence
            self.stepped(sequence)

    def leave(self, sequence: EngineSequence) -> None:
        """Register that the sequence has left the engine."""
        self._running.pop(id(sequence), None)
        self._asking.pop(id(sequence), None)

    def stepped(self, sequence: EngineSequence) -> None:
        """Register one more token; requests the next slot one block ahead of need."""
        if id(sequence) not in self._running or id(sequence) in self._asking:
            return
        if sequence.num_tokens + self._block_tokens > len(sequence.slots) * self._block_tokens:
            self._asking[id(sequence)] = sequence
            self.serve()
            if id(sequence) in self._asking:
                self._waits()

    def serve(self) -> None:
        """Give returned slots to running answers, in the order of the wait queue."""
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


@dataclass(frozen=True, slots=True)
class SlotCalls:
    """Functions that the slots of a worker call."""

    extend: Callable[[EngineSequence, list[int]], None]  # passes more slots to a running sequence
    waits: Callable[[], None]  # an answer has to wait for a slot
    preempt: Callable[[EngineSequence], None]  # a running answer is to give its slots up
    broken: Callable[[str], None]  # a device failed, for this reason: returned slots cannot be reused


class NodeSlots:
    """The slots of one worker. `pool` records their holders, `growing` the running answers that may need more."""

    def __init__(
        self,
        config: WorkerConfig,
        memories: Iterable[SlotMemory],
        wait_queue: WaitQueue,
        calls: SlotCalls,
        *,
        own_blocks: OwnBlocks,
        windows: WindowSlots | None = None,
    ) -> None:
        """`memories` hold the slots' bytes, one per form; `own_blocks` reports the indexed blocks. `windows`: the slots
        of windowed groups.
        """
        self._config = config
        self._memories = tuple(dict.fromkeys(memories))
        self.pool = SlotPool(
            config.num_slots,
            windows=windows,
            on_indexed=own_blocks.add,
            on_forgotten=own_blocks.discard,
            on_window_indexed=own_blocks.add_window,
            on_window_forgotten=own_blocks.discard_window,
        )
        self.growing = GrowingAnswers(
            config.num_slots, config.block_tokens, allocate=self._allocate, extend=calls.extend, waits=calls.waits
        )
        self._wait_queue = wait_queue
        self._queue = SlotQueue(wait_queue, self._acquire, self._undo, self._make_room)
        self._preempt = calls.preempt
        self._preemptible: dict[RequestKey, EngineSequence] = {}  # and those that were, until they return their slots
        self._fresh: set[RequestKey] = set()  # those that have generated nothing here yet
        self._loop = asyncio.get_running_loop()
        if windows is not None:
            windows.watch(lambda: self._loop.call_soon_threadsafe(self.pool.settle_windows))
        self._broken = calls.broken
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Start committing memory ahead of use."""
        self._lend(())

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for their first slots."""
        return len(self._queue)

    def first_seen(self, block: int) -> int:
        """Return the first block that the first token of `block` sees in windowed groups; 0 without any."""
        return 0 if self.pool.windows is None else self.pool.windows.first_seen(block)

    def must_wait(self, count: int) -> bool:
        """Return True if `take` would have to wait for `count` slots now, assuming that none is shared."""
        return bool(self._queue) or count > self.pool.num_available

    async def take(
        self,
        request: RequestKey,
        keys: Sequence[bytes],
        count: int,
        wants: int = 0,
        *,
        decodes_from: int | None = None,
        keeps_windows: bool = False,
        rolling: RollingWindow | None = None,
    ) -> TakenSlots:
        """Acquire slots as SlotPool.acquire does, after waiting for the request's turn and for free slots. Cancellable.

        `wants` is the number of further slots that it may need while it runs. `decodes_from`: the block in which the
        first token lies that is computed here; by default the prompt is computed here, from the shared blocks on, and
        with `keeps_windows` it keeps a window slot for every block, if the node has so many. With `rolling` the blocks
        use the slots in turn, except the last one, so nobody shares them. Raises RequestRefused if the node has too few
        slots.
        """
        if count + wants > self._config.num_slots:
            raise RequestRefused(
                "too_long",
                f"the request needs {count + wants} blocks of KV, but this node has {self._config.num_slots} "
                f"({self._config.capacity_tokens} tokens, capacity_tokens)",
            )
        windows = self.pool.windows
        kept = count if keeps_windows and windows is not None and count <= windows.num_slots else 0
        shareable = keys if rolling is None else ()
        taken = await self._queue.take(request, shareable, count, wants, _WindowNeed(decodes_from, kept))
        if rolling is not None and taken.window is not None:
            taken.window.roll(count - 1)
        return taken

    def take_now(self, request: RequestKey, keys: Sequence[bytes], count: int) -> TakenSlots | None:
        """Acquire slots, and as many window slots, for a request outside the wait queue; None if it had to wait."""
        if self._queue:
            return None
        with contextlib.suppress(OutOfSlots):
            return self._acquire(request, keys, count, 0, _WindowNeed(None, count))
        return None

    def take_more_now(self, count: int) -> list[int] | None:
        """Take further slots for a request that has some; None if it would have to wait."""
        if self._queue or self.growing.is_short:
            return None
        with contextlib.suppress(OutOfSlots):
            return self._allocate(count)
        return None

    def run(self, sequence: EngineSequence) -> None:
        """Register that a sequence enters the engine."""
        self.growing.run(sequence)
        if sequence.request.is_preemptible and not sequence.prefill_only:
            self._preemptible[sequence.request.key] = sequence
            self._fresh.add(sequence.request.key)

    def stepped(self, sequence: EngineSequence) -> None:
        """Register one more token of a sequence."""
        self.growing.stepped(sequence)
        if sequence.request.key in self._fresh and sequence.is_preemptible:
            self._fresh.remove(sequence.request.key)
            self._queue.serve()  # somebody may wait for this

    def end(self, request: RequestKey) -> None:
        """Register that a request needs no more slots, before they are returned."""
        self.growing.end(request)
        self._preemptible.pop(request, None)

    def give(self, slots: Sequence[int], window: WindowHold | None = None) -> None:
        """Return slots. They stay held until all copies and computation on the device that may use them have ended."""
        ended = self._all_ended()
        if ended:
            self._keep(self._release_after(ended, slots, window))
        else:
            self._release(slots, window)

    def left(self, sequence: EngineSequence) -> None:
        """Register that a sequence has left the engine, and serve those that waited for slots because of its growth."""
        self.growing.leave(sequence)
        self._fresh.discard(sequence.request.key)
        self._serve_waiting()

    async def fence(self, slots: Sequence[int], fence: Callable[[], None], window: WindowHold | None = None) -> None:
        """Return slots that a remote node may still write; they are reused only after `fence()` (blocking) has
        returned.

        They must have no other holder, which holds as long as they have not been indexed.
        """
        self.pool.quarantine(slots)
        await shielded(asyncio.ensure_future(self._readmit_after(fence, slots, window)))

    def index(self, slots: Sequence[int], keys: Sequence[bytes], *, anew_from: int | None = None) -> None:
        """Let later requests on this node reuse whole, verified blocks in held slots.

        From block `anew_from` on they replace equal indexed blocks: these were recomputed to check the old ones.
        """
        for i, (slot, key) in enumerate(zip(slots, keys, strict=False)):
            if anew_from is not None and i >= anew_from:
                self.pool.forget(key)
            self.pool.index(slot, key)

    async def close(self) -> None:
        """Return when no thread works on the memories any more."""
        await asyncio.gather(*self._tasks)

    def _acquire(
        self, request: RequestKey, keys: Sequence[bytes], count: int, wants: int, need: _WindowNeed
    ) -> TakenSlots:
        if self.growing.is_short:
            raise OutOfSlots("running answers wait for slots")
        taken = self._acquire_slots(keys, count, wants, need)
        if wants and not self.growing.begin(request, taken.slots, wants):
            self._give_back(taken.slots, taken.window)
            raise OutOfSlots("running answers may need these slots to end")
        self._lend(taken.slots[taken.num_shared :])
        return taken

    def _make_room(self, waiter: _Waiter) -> None:
        """Preempt running answers if these return enough slots for a more urgent request."""
        if self._config.engine.preemption == "off" or waiter.key not in self._wait_queue:
            return
        missing = waiter.count - len(self.pool.match(waiter.keys)) - self.pool.num_available
        yielding = [s for s in self._preemptible.values() if s.preempted]
        missing = max(1, missing) - sum(self.pool.num_sole(s.slots) for s in yielding)
        running = [s for s in self._preemptible.values() if s.is_preemptible]
        answers = [RunningAnswer(s.request.queue_entry, self.pool.num_sole(s.slots)) for s in running]
        entry = self._wait_queue.entry(waiter.key)
        for i in answers_to_preempt(entry, missing, answers, time.monotonic()):
            self._preempt(running[i])

    def _acquire_slots(self, keys: Sequence[bytes], count: int, wants: int, need: _WindowNeed) -> TakenSlots:
        windows = self.pool.windows
        if windows is None:
            return self.pool.acquire(keys, count)
        if need.kept:
            return self.pool.acquire(keys, count, window_slots=need.kept, keeps_windows=True)
        if need.decodes_from is not None:
            most = min(count + wants, slots_of_answer(windows.window_blocks))
            return self.pool.acquire(keys, count, window_slots=most, seen_from=windows.first_seen(need.decodes_from))
        chunk_blocks = -(-self._config.engine.prefill_chunk_tokens // self._config.block_tokens)
        most = min(count + wants, slots_of_prompt(windows.window_blocks, chunk_blocks))
        return self.pool.acquire(keys, count, window_slots=most)

    def _give_back(self, slots: Sequence[int], window: WindowHold | None) -> None:
        if window is not None:
            window.close()
        self.pool.release(slots)

    def _release(self, slots: Sequence[int], window: WindowHold | None) -> None:
        self._give_back(slots, window)
        self._serve_waiting()

    def _undo(self, request: RequestKey, taken: TakenSlots) -> None:
        self.growing.end(request)
        self._give_back(taken.slots, taken.window)
        self.growing.serve()

    def _allocate(self, count: int) -> list[int]:
        slots = self.pool.allocate(count)
        self._lend(slots)
        return slots

    def _lend(self, slots: Sequence[int]) -> None:
        """Prepare slots that hold nothing of their new blocks yet."""
        for memory in self._memories:
            for work in memory.lend(slots):
                self._keep(asyncio.to_thread(work))

    def _keep(self, work: Coroutine[None, None, None]) -> None:
        """Run work in the background; `close` waits for it."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _readmit_after(self, fence: Callable[[], None], slots: Sequence[int], window: WindowHold | None) -> None:
        await asyncio.to_thread(fence)
        if await self._have_ended(self._all_ended()):
            if window is not None:
                window.close()
            self.pool.readmit(slots)
            self._serve_waiting()

    async def _release_after(self, ended: Sequence[Ticket], slots: Sequence[int], window: WindowHold | None) -> None:
        if await self._have_ended(ended):
            self._release(slots, window)

    def _all_ended(self) -> list[Ticket]:
        """Return tickets of what devices do now; empty if the engine computes in host memory."""
        return [ticket for memory in self._memories if (ticket := memory.all_ended()) is not READY]

    async def _have_ended(self, tickets: Sequence[Ticket]) -> bool:
        """Wait for tickets. Returns False if the device failed: it may still use the slots, so nobody may get them."""
        try:
            for ticket in tickets:
                await asyncio.to_thread(ticket.wait)
        except StagingError as error:
            log.error("slots are not reused, since the device failed: %s", error)
            self._broken(str(error))
            return False
        return True

    def _serve_waiting(self) -> None:
        self.growing.serve()
        self._queue.serve()
