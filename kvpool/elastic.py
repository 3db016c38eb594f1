"""Size of a pool node's arena between its minimum and its bound: reads the machine's memory, yields and grows.

All state belongs to the node's event loop. Files are read and pages returned in one thread of its own; only this task
changes the arena's usable part, so no page is returned that may be used again meanwhile.

One yield:

    resize ── write what the SSD could keep ── evict, move ── return pages ── repeat until nothing is high
              at most 1 s, not if critical                    in steps of 32 MiB

Slots that are leased, read or written stay; the yield continues with the next readings.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from kvpool.commit_ahead import CommitAhead
from kvpool.memory_readings import MemoryReader
from kvpool.policy import PoolCore
from kvpool.policy.elastic import ElasticDecision, ElasticSizing, PressureLevel
from messenger import SharedMemory

_PERIOD_S = 0.25
_WRITE_S = 1.0  # longest wait of a yield for writes to SSD
_LONGEST_S = 1.5  # of one yield; the rest follows after the next readings
_PAUSE_S = 0.01  # between attempts while blocks are being written
_MOST_PAUSES = 50
_STEP_NBYTES = 4 << 20  # moved per step of the event loop, about 1 ms
_RETURN_NBYTES = 32 << 20  # pages are returned in steps of at least this, and at the end
_GRANULE_NBYTES = 2 << 20  # of sizes: the usable part ends at a transparent huge page's boundary

T = TypeVar("T")

_log = logging.getLogger(__name__)


class ElasticArena:
    """Control of one node's usable memory; `run` is a task of the node.

    `publish` is `PoolNode.publish_changes`. `wake_writes` starts writes to SSD and returns True if there can be any.
    """

    def __init__(
        self,
        core: PoolCore,
        memory: SharedMemory,
        commit: CommitAhead,
        reader: MemoryReader,
        publish: Callable[[], None],
        wake_writes: Callable[[], bool],
        counters: defaultdict[str, float],
    ) -> None:
        self._core, self._memory, self._commit, self._reader = core, memory, commit, reader
        self._publish, self._wake_writes, self._counters = publish, wake_writes, counters
        limits = core.limits
        assert limits.least_nbytes is not None
        step = max(limits.slab_nbytes, _GRANULE_NBYTES if limits.arena_nbytes >= 32 * _GRANULE_NBYTES else 0)
        self._sizing = ElasticSizing(limits.least_nbytes, limits.arena_nbytes, step)
        self._thread = ThreadPoolExecutor(1, "moonpool-elastic")
        self._unreturned: list[range] = []
        self._write_until_s: float | None = None  # end of the running yield's wait for writes to SSD
        core.resizing.resize(self._sizing.target_nbytes)
        core.resizing.take_vacated()  # nothing there is in use yet
        commit.resize(core.resizing.usable_nbytes)
        for name in ("yields", "yielded_bytes", "moved_blocks"):
            counters[name] += 0

    @property
    def target_nbytes(self) -> int:
        """Size that the arena should have; more may be in use while slots are held."""
        return self._sizing.target_nbytes

    @property
    def pressure(self) -> PressureLevel:
        """Pressure at the last readings."""
        return self._sizing.pressure

    async def run(self) -> None:
        """Adapt the arena to the readings, until cancelled."""
        while True:
            try:
                scopes = await self._in_thread(self._reader.read)
                resident_nbytes = self._memory.resident_nbytes
                await self._follow(self._sizing.decide(time.monotonic_ns(), scopes, resident_nbytes))
            except Exception:
                _log.exception("the pool's memory could not be adapted")
            await asyncio.sleep(_PERIOD_S)

    def close(self) -> None:
        """Wait until no page is being returned, for some milliseconds. Must follow the end of `run`."""
        self._thread.shutdown(wait=True)

    async def _follow(self, decision: ElasticDecision) -> None:
        resizing = self._core.resizing
        before = resizing.usable_nbytes
        resizing.resize(decision.target_nbytes)
        if resizing.usable_nbytes > before:
            self._commit.resize(resizing.usable_nbytes)
            spans = [range(max(span.start, resizing.usable_nbytes), span.stop) for span in self._unreturned]
            self._unreturned = [span for span in spans if span]
            _log.info(
                "the pool grows from %d to %d MiB: %s", before >> 20, resizing.usable_nbytes >> 20, decision.reason
            )
        elif resizing.usable_nbytes < before:
            resident = self._memory.resident_nbytes
            began = time.monotonic()
            self._counters["yields"] += 1
            self._commit.resize(resizing.usable_nbytes)
            await self._yield(decision.pressure)
            freed = max(0, resident - self._memory.resident_nbytes)
            _log.warning(
                "the pool yields from %d to %d MiB: %s; returned %d MiB in %.2f s",
                *(before >> 20, resizing.usable_nbytes >> 20, decision.reason, freed >> 20, time.monotonic() - began),
            )
        elif resizing.has_high_slots or self._unreturned:
            await self._yield(decision.pressure)

    async def _yield(self, pressure: PressureLevel) -> None:
        """Vacate the arena above its usable part as far as possible now, and return its pages."""
        core = self._core
        now = time.monotonic()
        until = now + _LONGEST_S
        if self._write_until_s is None:
            self._write_until_s = now + _WRITE_S
        while (now := time.monotonic()) < until:
            can_wait = pressure is not PressureLevel.CRITICAL and now < self._write_until_s and self._wake_writes()
            step = core.resizing.vacate(time.monotonic_ns(), _STEP_NBYTES, may_lose=not can_wait)
            self._publish()  # evicted blocks leave the shared index before their slots are written
            for move in step.moves:
                spec = move.copy.block.spec
                for g, (source, target) in enumerate(zip(move.before, move.after, strict=True)):
                    if source != target:
                        nbytes = spec.slot_nbytes(g)
                        self._memory.array[target : target + nbytes] = self._memory.array[source : source + nbytes]
            core.resizing.moved(step.moves)
            self._publish()
            self._counters["moved_blocks"] += len(step.moves)
            await self._return_pages(_RETURN_NBYTES)
            if step.is_progress:
                await asyncio.sleep(0)
            elif can_wait and step.num_unwritten:
                await asyncio.sleep(_PAUSE_S)
            else:
                self._write_until_s = None  # the rest is in use
                break
        await self._return_pages(1)

    async def _return_pages(self, least_nbytes: int) -> None:
        resizing = self._core.resizing
        self._unreturned += resizing.take_vacated()
        if sum(map(len, self._unreturned)) < least_nbytes:
            return
        for _ in range(_MOST_PAUSES):  # while memory is being committed, these pages may be; that ends soon
            if self._commit.resize(resizing.usable_nbytes):
                break
            await asyncio.sleep(_PAUSE_S)
        else:
            return
        before = self._memory.resident_nbytes
        while self._unreturned:
            span = self._unreturned[-1]
            await self._in_thread(self._memory.release, span.start, len(span))
            self._unreturned.pop()
        self._counters["yielded_bytes"] += max(0, before - self._memory.resident_nbytes)

    async def _in_thread(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)
