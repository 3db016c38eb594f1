"""Keeps the SSD in step with what the policy core decides: extents given up are forgotten, blocks worth it written.

One small batch at a time, in a thread of low priority, and never while a block is being brought to DRAM, unless that
goes on for long: whoever is served does not notice. Trouble with the SSD pauses it; the node goes on without.
"""

import asyncio
import contextlib
import enum
import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvpool.errors import SsdClosed, SsdFull, SsdIoError
from kvpool.loading import Loader
from kvpool.policy import PoolCore, Write
from kvpool.ssd import SsdStore
from kvpool.ssd_health import SsdHealth
from kvpool.ssd_io import Written, write_blocks

__all__ = ["WriteBack"]

_WRITE_BATCH_NBYTES = 8 << 20
_BATCH_SHARE = 16  # a batch is at most this part of memory: what is being written cannot give way
_LOOK_S = 0.25  # longest time until it is seen that something is worth writing
_YIELD_S = 1.0  # longest wait of a batch for loads
_NICENESS = 10

T = TypeVar("T")

_log = logging.getLogger(__name__)


class _Fate(enum.Enum):
    """What became of one write."""

    DURABLE = enum.auto()
    SSD_FAILED = enum.auto()
    REFUSED = enum.auto()  # by the fault of the block itself


class WriteBack:
    """All methods belong to one event loop; `run` is its task."""

    def __init__(
        self,
        core: PoolCore,
        store: SsdStore,
        arena: NDArray[np.uint8],
        health: SsdHealth,
        loader: Loader,
        tell: Callable[[], None],
        counters: defaultdict[str, float],
    ) -> None:
        self._core, self._store, self._arena, self._health, self._tell = core, store, arena, health, tell
        self._loader = loader
        self._counters = counters
        self._thread = ThreadPoolExecutor(1, "moonpool-write", initializer=_be_nice)
        self._turn = asyncio.Lock()  # of batches: one at a time
        self._batch_nbytes = min(_WRITE_BATCH_NBYTES, len(arena) // _BATCH_SHARE)
        self._news = asyncio.Event()
        self.num_under_way = 0

    def wake(self) -> None:
        """Blocks have come or gone: something may be worth writing."""
        self._news.set()

    async def run(self) -> None:
        """Write what is worth it, until cancelled."""
        while True:
            self._news.clear()
            try:
                is_busy = await self._step(everything=False)
            except Exception as error:
                _log.exception("a batch could not be written to the SSD")
                self._health.write_failed(time.monotonic(), repr(error))
                is_busy = False
            if not is_busy:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_S):
                        await self._news.wait()

    async def write_everything(self) -> None:
        """Write all that is sealed and not on SSD, as far as the SSD takes it."""
        while await self._step(everything=True):
            pass

    async def close(self) -> None:
        """Wait for the batch that is being written, then tell the store what it must forget."""
        async with self._turn:
            await self._in_thread(self._store.free, self._core.take_ssd_freed())
        self._thread.shutdown(wait=False)

    async def _step(self, *, everything: bool) -> bool:
        """One batch, and what there is to forget. False: there was nothing to do, or it must wait."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_YIELD_S):
                await self._loader.idle()
        return await asyncio.shield(asyncio.ensure_future(self._batch(everything)))

    async def _batch(self, everything: bool) -> bool:
        async with self._turn:
            writes: list[Write] = []
            if self._health.may_write(time.monotonic()):
                writes = self._core.writes(time.monotonic_ns(), self._batch_nbytes, everything=everything)
            freed = self._core.take_ssd_freed()
            self._tell()
            await self._carry_out(freed, writes)
            return bool(writes or freed)

    async def _carry_out(self, freed: list[int], writes: Sequence[Write]) -> None:
        fates = [_Fate.SSD_FAILED] * len(writes)
        self.num_under_way = len(writes)
        try:
            if freed:
                await self._in_thread(self._store.free, freed)
            if writes:
                written = await self._in_thread(write_blocks, self._store, self._arena, writes)
                fates = self._judge(writes, written)
            if freed and _Fate.DURABLE not in fates:
                # A restart must not bring back what was found to be wrong.
                await self._in_thread(self._store.settle)
        finally:
            self.num_under_way = 0
            now_ns = time.monotonic_ns()
            for write, fate in zip(writes, fates, strict=True):
                self._core.written(now_ns, write, fate is _Fate.DURABLE, is_blocks_fault=fate is _Fate.REFUSED)
            self._tell()

    def _judge(self, writes: Sequence[Write], written: Written) -> list[_Fate]:
        """Count what became of the writes. Blocks that are wrong in DRAM are quarantined."""
        fates = []
        trouble = ""
        for write, error, right in zip(writes, written.errors, written.right, strict=True):
            key = write.block.chain_key.hex()
            if not right:
                fates.append(_Fate.REFUSED)
                self._counters["dram_corrupt_blocks"] += 1
                _log.error("block %s was corrupt in memory and is taken out", key)
                self._core.quarantine(write.block.kv_namespace, [write.block.chain_key])
            elif error is None:
                fates.append(_Fate.DURABLE)
                self._counters["written_blocks"] += 1
                self._counters["written_bytes"] += write.block.spec.block_nbytes
            elif isinstance(error, SsdIoError | SsdClosed):
                fates.append(_Fate.SSD_FAILED)
                self._counters["ssd_write_errors"] += 1
                self._counters["ssd_full_errors"] += isinstance(error, SsdFull)
                trouble = trouble or str(error)
            else:
                fates.append(_Fate.REFUSED)
                self._counters["ssd_write_errors"] += 1
                _log.error("block %s was not written to the SSD: %s", key, error)
        self._counters["write_seconds"] += written.seconds
        if trouble:
            self._health.write_failed(time.monotonic(), trouble)
        elif _Fate.DURABLE in fates:
            self._health.wrote()
        return fates

    async def _in_thread(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)


def _be_nice() -> None:
    """Whoever computes goes first. Linux has priorities per thread; elsewhere the thread stays as it is."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
