"""Blocks on their way from SSD to DRAM: begun for whoever asks, shared by all who wait, ended whoever leaves.

Loads belong to the node: a pin that is cancelled, or whose time is over, leaves them to the next one.
"""

import asyncio
import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from kvpool.address import KEY_NBYTES
from kvpool.policy import Load, LoadOutcome, PoolCore
from kvpool.policy.records import block_key
from kvpool.ssd import SsdStore, extent_nbytes
from kvpool.ssd_health import SsdHealth
from kvpool.ssd_io import Read, read_blocks

__all__ = ["Loader"]

# Two batches at a time: one is read while the other is verified. A batch is small enough to show soon, and large enough
# to keep the SSD's queue full.
_NUM_THREADS = 2
_LOAD_BATCH_NBYTES = 8 << 20

_log = logging.getLogger(__name__)


class Loader:
    """All methods belong to one event loop."""

    def __init__(
        self,
        core: PoolCore,
        store: SsdStore,
        arena: NDArray[np.uint8],
        health: SsdHealth,
        tell: Callable[[], None],
        counters: defaultdict[str, float],
    ) -> None:
        self._core, self._store, self._arena, self._health, self._tell = core, store, arena, health, tell
        self._counters = counters
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "moonpool-load")
        self._waited_for: deque[Load] = deque()  # by pins: these go first
        self._ahead: deque[Load] = deque()  # by prefetches
        self._under_way: dict[Load, None] = {}  # all that have not ended
        self._workers: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()  # replaced whenever a batch ends

    @property
    def num_under_way(self) -> int:
        """Blocks that are being read or wait for it."""
        return len(self._under_way)

    def begin(
        self, kv_namespace: bytes, chain: Sequence[bytes], *, tails: bool, tail_keys: Sequence[bytes] = ()
    ) -> int:
        """Begin what is not under way of the leading run's blocks on SSD, and of tails after it.

        Returns how many of them are under way now.
        """
        self._begin(self._ahead, kv_namespace, chain, tails, tail_keys)
        return len(self._of(kv_namespace, chain, tails))

    async def bring(
        self,
        kv_namespace: bytes,
        chain: Sequence[bytes],
        *,
        tails: bool,
        wait_s: float,
        tail_keys: Sequence[bytes] = (),
    ) -> None:
        """As `begin`, before what nobody waits for; and wait until nothing of it is under way, or for `wait_s`."""
        try:
            async with asyncio.timeout(wait_s):
                while True:
                    # Again after each batch: what did not fit, or could not be read at the first go, may come now.
                    self._begin(self._waited_for, kv_namespace, chain, tails, tail_keys)
                    mine = self._of(kv_namespace, chain, tails)
                    if not mine:
                        return
                    self._put_first(mine)
                    await self._ended.wait()
        except TimeoutError:
            self._counters["load_timeouts"] += 1

    async def idle(self) -> None:
        """Until no load waits or is under way."""
        while self._under_way:
            await self._ended.wait()

    async def close(self) -> None:
        """Give up what waits; wait for what is being read, which cannot be stopped."""
        given_up = [*self._waited_for, *self._ahead]
        self._waited_for.clear()
        self._ahead.clear()
        self._end(given_up, [LoadOutcome.IO_ERROR] * len(given_up))
        await asyncio.gather(*self._workers, return_exceptions=True)
        self._threads.shutdown(wait=False)

    def _begin(
        self,
        queue: deque[Load],
        kv_namespace: bytes,
        chain: Sequence[bytes],
        tails: bool,
        tail_keys: Sequence[bytes],
    ) -> None:
        if not self._health.may_read(time.monotonic()):
            return
        loads = self._core.load(time.monotonic_ns(), kv_namespace, chain, tails=tails, tail_keys=tail_keys)
        self._tell()
        self._under_way |= dict.fromkeys(loads)
        queue.extend(loads)
        while (self._waited_for or self._ahead) and len(self._workers) < _NUM_THREADS:
            task = asyncio.get_running_loop().create_task(self._work())
            self._workers.add(task)
            task.add_done_callback(self._workers.discard)

    def _put_first(self, loads: set[Load]) -> None:
        """Somebody waits for these now, which a prefetch began."""
        if any(load in loads for load in self._ahead):
            self._waited_for += [load for load in self._ahead if load in loads]
            self._ahead = deque(load for load in self._ahead if load not in loads)

    async def _work(self) -> None:
        while batch := self._next_batch():
            outcomes = [LoadOutcome.IO_ERROR] * len(batch)
            try:
                loop = asyncio.get_running_loop()
                read = await loop.run_in_executor(self._threads, read_blocks, self._store, self._arena, batch)
                self._count(batch, read)
                outcomes = read.outcomes
            finally:
                self._end(batch, outcomes)

    def _next_batch(self) -> list[Load]:
        batch: list[Load] = []
        nbytes = 0
        for queue in (self._waited_for, self._ahead):
            while queue:
                nbytes += extent_nbytes(queue[0].block.spec)
                if batch and nbytes > _LOAD_BATCH_NBYTES:
                    return batch
                batch.append(queue.popleft())
        return batch

    def _end(self, loads: Sequence[Load], outcomes: Sequence[LoadOutcome]) -> None:
        now_ns = time.monotonic_ns()
        for load, outcome in zip(loads, outcomes, strict=True):
            del self._under_way[load]
            self._core.loaded(now_ns, load, outcome)
        self._tell()
        ended, self._ended = self._ended, asyncio.Event()
        ended.set()

    def _count(self, batch: Sequence[Load], read: Read) -> None:
        trouble = ""
        for load, outcome, error in zip(batch, read.outcomes, read.errors, strict=True):
            if outcome is LoadOutcome.OK:
                self._counters["loaded_blocks"] += 1
                self._counters["loaded_bytes"] += load.block.spec.block_nbytes
            elif outcome is LoadOutcome.CORRUPT:
                self._counters["ssd_corrupt_blocks"] += 1
                _log.error("block %s was corrupt on the SSD and is taken out", load.block.chain_key.hex())
            else:
                self._counters["ssd_read_errors"] += 1
                trouble = trouble or str(error)
        self._counters["load_seconds"] += read.seconds
        if read.outcomes.count(LoadOutcome.IO_ERROR) == len(batch):
            self._health.read_failed(time.monotonic(), trouble)
        else:
            self._health.was_read()

    def _of(self, kv_namespace: bytes, chain: Sequence[bytes], tails: bool) -> set[Load]:
        """Of these blocks under way; with `tails`, also of partial blocks after any of them."""
        if not self._under_way:
            return set()
        keys = {block_key(kv_namespace, chain_key) for chain_key in chain}
        mine = {load for load in self._under_way if load.block.key in keys}
        if tails:
            parents = keys | {block_key(kv_namespace, bytes(KEY_NBYTES))}
            mine |= {load for load in self._under_way if load.block.num_tokens and load.block.parent in parents}
        return mine
