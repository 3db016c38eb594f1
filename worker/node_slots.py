"""A worker's slots: who waits for them, who is given more while it runs, when they may be used again.

Lives on the event loop. A coroutine takes slots with `take`, gives them to a sequence for the time that it is in the
engine, and gives them back with `give`, or `fence` where a remote may still write them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence

from worker.config import WorkerConfig
from worker.errors import RequestRefused
from worker.growing import Growing
from worker.policy import OutOfSlots, SlotPool
from worker.policy.turns import Key, Line
from worker.request import Sequence as EngineSequence
from worker.settle import settled
from worker.slot_memory import SlotMemory
from worker.slot_queue import SlotQueue

__all__ = ["NodeSlots"]


class NodeSlots:
    """The slots of one worker. `pool` says whose each is, `growing` which running answers were given too few."""

    def __init__(
        self,
        config: WorkerConfig,
        memories: Iterable[SlotMemory],
        line: Line,
        *,
        extend: Callable[[EngineSequence, list[int]], None],
        waits: Callable[[], None],
    ) -> None:
        """`memories` hold the slots' bytes, each in its form. `extend` hands more slots to a running sequence;
        `waits()` is called when one is not given what it asked for."""
        self._config = config
        self._memories = tuple(dict.fromkeys(memories))
        self.pool = SlotPool(config.num_slots)
        self.growing = Growing(
            config.num_slots, config.block_tokens, allocate=self._allocate, extend=extend, waits=waits
        )
        self._queue = SlotQueue(line, self._acquire, self._undo)
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

    async def take(self, request: Key, keys: Sequence[bytes], count: int, wants: int = 0) -> tuple[list[int], int]:
        """As SlotPool.acquire, for a request in line; waits for its turn and until the slots are there. Cancellable.

        `wants`: further slots that it may need while it runs; it is given them then. Raises RequestRefused for more
        than there are.
        """
        if count + wants > self._config.num_slots:
            raise RequestRefused(
                "too_long",
                f"the request needs {count + wants} blocks of KV; this node has {self._config.num_slots} "
                f"({self._config.capacity_tokens} tokens, capacity_tokens)",
            )
        return await self._queue.take(request, keys, count, wants)

    def take_now(self, request: Key, keys: Sequence[bytes], count: int) -> tuple[list[int], int] | None:
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
        await settled(asyncio.ensure_future(self._readmit_after(fence, slots)))

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

    def _acquire(self, request: Key, keys: Sequence[bytes], count: int, wants: int) -> tuple[list[int], int]:
        if self.growing.is_short:
            raise OutOfSlots("answers that run wait for slots")
        taken = self.pool.acquire(keys, count)
        if wants and not self.growing.begin(request, taken[0], wants):
            self.pool.release(taken[0])
            raise OutOfSlots("answers that run may need these slots to end")
        self._commit_ahead_of(taken[0])
        return taken

    def _undo(self, request: Key, slots: list[int]) -> None:
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
