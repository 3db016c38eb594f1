"""The SSD tier of a pool node: its health, loads to DRAM, write-back, and their life cycle.

Threads:

    event loop          all state of core, Loader, WriteBack and SsdHealth. The only lock is WriteBack._batch_lock:
                        batches, and the last frees at close, run one at a time
    2 load threads      one reads a batch from the SSD while the other verifies its own
    1 write thread      low priority; a batch of writes first waits up to 1 s for loads to finish
    store's I/O threads separate ones for reads and writes, so that neither direction waits for the other

Lifetimes:

    slots of a load     PoolCore.load   ── read, verify   ── PoolCore.loaded    both slots are held in between, and
    slots of a write    PoolCore.writes ── verify, write  ── PoolCore.written   the second call always follows
    a freed extent      given up in the core ── freed in the store ── only then written again

Loads belong to the node: if the pin that started a load is cancelled or times out, later pins can use it.
"""

import asyncio
import contextlib
import enum
import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvpool import block_coding
from kvpool.address import KEY_NBYTES
from kvpool.background_threads import background_threads
from kvpool.config import PoolNodeConfig
from kvpool.errors import SsdClosed, SsdFolderError, SsdFull, SsdIoError
from kvpool.policy import LoadOutcome, PoolCore, SsdBlock, TierLoad, TierWrite
from kvpool.policy.records import block_key
from kvpool.ssd import SsdConfig, SsdEntry, SsdStore, extent_nbytes
from kvpool.ssd.disk import sync_folder
from kvpool.ssd.folder import check_folder
from kvpool.ssd_compression import SsdCompression
from kvpool.verified_io import LoadResults, WriteResults, measure_read, read_blocks, write_blocks
from rpc.private_folder import UnsafePath, check_private

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_FAILED_READS_LIMIT = 3  # in a row: single failures may be due to single bad extents

_log = logging.getLogger(__name__)


class SsdState(enum.StrEnum):
    OK = "ok"
    READ_ONLY = "read_only"  # full, or writes fail: existing blocks are still read
    FAILED = "failed"  # reads fail: the node uses DRAM only


class SsdHealth:
    """State of a node's SSD tier, derived from the results of its reads and writes. No I/O; `now_s` is an argument.

    A failed write makes the tier read-only; consecutive failed reads make it failed. It is retried after a pause, which
    doubles from 1 s up to a minute. A success restores it.
    """

    def __init__(self, what: str) -> None:
        self.state = SsdState.OK
        self._what = what  # named in the log
        self._pause_s = _FIRST_PAUSE_S
        self._retry_s = 0.0  # time of the next retry
        self._failed_reads = 0

    def may_read(self, now_s: float) -> bool:
        """Return True if the SSD may be read now. A failed SSD is retried after its pause."""
        return self.state is not SsdState.FAILED or now_s >= self._retry_s

    def may_write(self, now_s: float) -> bool:
        """Return True if the SSD may be written now. A read-only or failed SSD is retried after its pause."""
        return self.state is SsdState.OK or now_s >= self._retry_s

    def write_succeeded(self) -> None:
        """Record that a batch was written. After failed reads this does not reset the pause; only a read does."""
        if self.state is SsdState.READ_ONLY:
            self._pause_s = _FIRST_PAUSE_S
        self._become(SsdState.OK, "writes succeed again")

    def write_failed(self, now_s: float, reason: str) -> None:
        """Record that part of a batch could not be written."""
        self._pause(now_s)
        if self.state is not SsdState.FAILED:
            self._become(SsdState.READ_ONLY, reason)

    def read_succeeded(self) -> None:
        """Record that at least one block of a batch was read."""
        self._failed_reads = 0
        if self.state is SsdState.FAILED:
            self._pause_s = _FIRST_PAUSE_S
            self._become(SsdState.OK, "reads succeed again")

    def read_failed(self, now_s: float, reason: str) -> None:
        """Record that no block of a batch could be read."""
        self._failed_reads += 1
        if self._failed_reads >= _FAILED_READS_LIMIT:
            self._pause(now_s)
            self._become(SsdState.FAILED, reason)

    def _pause(self, now_s: float) -> None:
        self._retry_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def _become(self, state: SsdState, reason: str) -> None:
        if state is not self.state:
            level = logging.INFO if state is SsdState.OK else logging.ERROR
            _log.log(level, "the SSD tier in %s is now %s: %s", self._what, state.value, reason)
            self.state = state


# Two batches at a time: one is read while the other is verified. A batch is small enough to be visible soon, and large
# enough to keep the SSD's queue full.
_NUM_THREADS = 2
_LOAD_BATCH_NBYTES = 8 << 20
_MAX_MEASURED = 64


class Loader:
    """Loads of blocks from SSD to DRAM. All methods belong to one event loop."""

    def __init__(
        self,
        core: PoolCore,
        store: SsdStore,
        arena: NDArray[np.uint8],
        health: SsdHealth,
        compression: SsdCompression,
        publish: Callable[[], None],
        counters: defaultdict[str, float],
    ) -> None:
        self._core, self._store, self._arena, self._health, self._publish = (
            core,
            store,
            arena,
            health,
            publish,
        )
        self._compression = compression
        self._counters = counters
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "moonpool-load")
        self._urgent: deque[TierLoad] = deque()  # started by pins; run before prefetches
        self._prefetches: deque[TierLoad] = deque()
        self._in_flight: dict[TierLoad, None] = {}  # all loads that have not ended, queued ones included
        self._workers: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()  # replaced whenever a batch ends
        self.num_measured = 0  # batches so far; `measured` has the latest: bytes of blocks, seconds
        self.measured: deque[tuple[int, float]] = deque(maxlen=_MAX_MEASURED)
        self._busy_until_s = 0.0

    @property
    def num_in_flight(self) -> int:
        """Number of blocks being read or queued."""
        return len(self._in_flight)

    def begin(
        self, kv_namespace: bytes, chain: Sequence[bytes], *, tails: bool, tail_keys: Sequence[bytes] = ()
    ) -> int:
        """Start loads of those blocks of the leading run, and of tails after it, that are on SSD only.

        Returns the number of these blocks in flight.
        """
        self._begin(self._prefetches, kv_namespace, chain, tails, tail_keys)
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
        """Start loads as `begin`, ahead of prefetches, and wait until none is in flight, at most for `wait_s`."""
        try:
            async with asyncio.timeout(wait_s):
                while True:
                    # Repeated after each batch: blocks that did not fit or could not be read may succeed now.
                    self._begin(self._urgent, kv_namespace, chain, tails, tail_keys)
                    mine = self._of(kv_namespace, chain, tails)
                    if not mine:
                        return
                    self._promote(mine)
                    await self._ended.wait()
        except TimeoutError:
            self._counters["load_timeouts"] += 1

    async def idle(self) -> None:
        """Wait until no load is queued or in flight."""
        while self._in_flight:
            await self._ended.wait()

    async def close(self) -> None:
        """Drop queued loads and wait for running reads, which cannot be stopped."""
        given_up = [*self._urgent, *self._prefetches]
        self._urgent.clear()
        self._prefetches.clear()
        self._end(given_up, [LoadOutcome.IO_ERROR] * len(given_up))
        await asyncio.gather(*self._workers, return_exceptions=True)
        self._threads.shutdown(wait=False)

    def _begin(
        self,
        queue: deque[TierLoad],
        kv_namespace: bytes,
        chain: Sequence[bytes],
        tails: bool,
        tail_keys: Sequence[bytes],
    ) -> None:
        if not self._health.may_read(time.monotonic()):
            return
        loads = self._core.load(time.monotonic_ns(), kv_namespace, chain, tails=tails, tail_keys=tail_keys)
        self._publish()
        if loads:
            nbytes = sum(extent_nbytes(load.block.spec) for load in loads)
            self._compression.begun(nbytes / _LOAD_BATCH_NBYTES)
        self._in_flight |= dict.fromkeys(loads)
        queue.extend(loads)
        while (self._urgent or self._prefetches) and len(self._workers) < _NUM_THREADS:
            task = asyncio.get_running_loop().create_task(self._work())
            self._workers.add(task)
            task.add_done_callback(self._workers.discard)

    def _promote(self, loads: set[TierLoad]) -> None:
        """Move prefetches that a pin now waits for to the urgent queue."""
        if any(load in loads for load in self._prefetches):
            self._urgent += [load for load in self._prefetches if load in loads]
            self._prefetches = deque(load for load in self._prefetches if load not in loads)

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

    def _next_batch(self) -> list[TierLoad]:
        batch: list[TierLoad] = []
        nbytes = 0
        for queue in (self._urgent, self._prefetches):
            while queue:
                nbytes += extent_nbytes(queue[0].block.spec)
                if batch and nbytes > _LOAD_BATCH_NBYTES:
                    return batch
                batch.append(queue.popleft())
        return batch

    def _end(self, loads: Sequence[TierLoad], outcomes: Sequence[LoadOutcome]) -> None:
        now_ns = time.monotonic_ns()
        for load, outcome in zip(loads, outcomes, strict=True):
            del self._in_flight[load]
            self._core.loaded(now_ns, load, outcome)
        self._publish()
        ended, self._ended = self._ended, asyncio.Event()
        ended.set()

    def _count(self, batch: Sequence[TierLoad], read: LoadResults) -> None:
        trouble = ""
        for load, outcome, error in zip(batch, read.outcomes, read.errors, strict=True):
            if outcome is LoadOutcome.OK:
                self._counters["loaded_blocks"] += 1
                self._counters["loaded_bytes"] += load.block.spec.block_nbytes
            elif outcome is LoadOutcome.CORRUPT:
                self._counters["ssd_corrupt_blocks"] += 1
                _log.error("block %s was corrupt on the SSD and was removed", load.block.chain_key.hex())
            else:
                self._counters["ssd_read_errors"] += 1
                trouble = trouble or str(error)
        self._counters["load_seconds"] += read.seconds
        self._measure(batch, read)
        self._compression.loaded(sum(load.block.spec.block_nbytes for load in batch), read)
        if read.outcomes.count(LoadOutcome.IO_ERROR) == len(batch):
            self._health.read_failed(time.monotonic(), trouble)
        else:
            self._health.read_succeeded()

    def _measure(self, batch: Sequence[TierLoad], read: LoadResults) -> None:
        """Record the batch's duration for the conductor's predictions; time shared with another batch counts once."""
        now_s = time.perf_counter()
        seconds = now_s - max(now_s - read.seconds, self._busy_until_s)
        self._busy_until_s = now_s
        loaded = (load for load, outcome in zip(batch, read.outcomes, strict=True) if outcome is LoadOutcome.OK)
        nbytes = sum(load.block.spec.block_nbytes for load in loaded)
        if nbytes and seconds > 0:
            self.measured.append((nbytes, seconds))
            self.num_measured += 1

    def _of(self, kv_namespace: bytes, chain: Sequence[bytes], tails: bool) -> set[TierLoad]:
        """Return the loads in flight of these blocks and, with `tails`, of partial blocks after any of them."""
        if not self._in_flight:
            return set()
        keys = {block_key(kv_namespace, chain_key) for chain_key in chain}
        mine = {load for load in self._in_flight if load.block.key in keys}
        if tails:
            parents = keys | {block_key(kv_namespace, bytes(KEY_NBYTES))}
            mine |= {load for load in self._in_flight if load.block.num_tokens and load.block.parent in parents}
        return mine


_WRITE_BATCH_NBYTES = 8 << 20
_BATCH_SHARE = 16  # a batch is at most 1/16 of the arena, since blocks cannot be evicted while they are written
_POLL_S = 0.25  # longest time until blocks worth writing are noticed
_YIELD_S = 1.0  # longest wait of a batch for loads

T = TypeVar("T")


class _WriteOutcome(enum.Enum):
    """Result of one write."""

    DURABLE = enum.auto()
    SSD_FAILED = enum.auto()
    REFUSED = enum.auto()  # the block itself is invalid


class WriteBack:
    """Writes of blocks to SSD, as the core decides. All methods belong to one event loop, in which `run` is a task."""

    def __init__(
        self,
        core: PoolCore,
        store: SsdStore,
        arena: NDArray[np.uint8],
        health: SsdHealth,
        loader: Loader,
        compression: SsdCompression,
        publish: Callable[[], None],
        counters: defaultdict[str, float],
    ) -> None:
        self._core, self._store, self._arena, self._health, self._publish = (
            core,
            store,
            arena,
            health,
            publish,
        )
        self._loader = loader
        self._compression = compression
        self._counters = counters
        self._thread = background_threads(1, "moonpool-write")
        self._batch_lock = asyncio.Lock()  # of batches: one at a time
        self._batch_nbytes = min(_WRITE_BATCH_NBYTES, len(arena) // _BATCH_SHARE)
        self._changed = asyncio.Event()
        self.num_in_flight = 0

    def wake(self) -> None:
        """Signal that blocks were added or removed, and that some may have to be written."""
        self._changed.set()

    async def run(self) -> None:
        """Write the blocks that the core chooses, until cancelled."""
        while True:
            self._changed.clear()
            try:
                is_busy = await self._write_batch(everything=False)
            except Exception as error:
                _log.exception("a batch could not be written to the SSD")
                self._health.write_failed(time.monotonic(), repr(error))
                is_busy = False
            if not is_busy:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_POLL_S):
                        await self._changed.wait()

    async def write_everything(self) -> None:
        """Write all sealed blocks that are not on SSD, as far as they fit."""
        while await self._write_batch(everything=True):
            pass

    async def close(self) -> None:
        """Wait for the running batch, then free the remaining extents in the store."""
        async with self._batch_lock:
            await self._in_thread(self._store.free, self._core.take_ssd_freed())
        self._thread.shutdown(wait=False)

    async def _write_batch(self, *, everything: bool) -> bool:
        """Run one batch of writes and frees. Returns False if there was nothing to do, or it must wait."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_YIELD_S):
                await self._loader.idle()
        return await asyncio.shield(asyncio.ensure_future(self._batch(everything)))

    async def _batch(self, everything: bool) -> bool:
        async with self._batch_lock:
            writes: list[TierWrite] = []
            if self._health.may_write(time.monotonic()):
                writes = self._core.writes(time.monotonic_ns(), self._batch_nbytes, everything=everything)
            freed = self._core.take_ssd_freed()
            self._publish()
            await self._execute(freed, writes)
            return bool(writes or freed)

    async def _execute(self, freed: list[int], writes: Sequence[TierWrite]) -> None:
        outcomes = [_WriteOutcome.SSD_FAILED] * len(writes)
        self.num_in_flight = len(writes)
        try:
            if freed:
                await self._in_thread(self._store.free, freed)
            if writes:
                storage = self._compression.storage(writes)
                written = await self._in_thread(write_blocks, self._store, self._arena, writes, storage)
                outcomes = self._classify(writes, written)
                self._compression.written(writes, storage, written)
                if self._compression.should_measure(writes) and not self._loader.num_in_flight:
                    self._compression.was_read(await self._in_thread(measure_read, self._store, writes))
            if freed and _WriteOutcome.DURABLE not in outcomes:
                # A restart must not restore blocks that were found corrupt.
                await self._in_thread(self._store.sync_frees)
        finally:
            self.num_in_flight = 0
            now_ns = time.monotonic_ns()
            for write, outcome in zip(writes, outcomes, strict=True):
                is_refused = outcome is _WriteOutcome.REFUSED
                self._core.written(now_ns, write, outcome is _WriteOutcome.DURABLE, block_at_fault=is_refused)
            self._publish()

    def _classify(self, writes: Sequence[TierWrite], written: WriteResults) -> list[_WriteOutcome]:
        """Count and return the results of the writes. Quarantines blocks that are corrupt in DRAM."""
        outcomes = []
        trouble = ""
        for write, error, right in zip(writes, written.errors, written.right, strict=True):
            key = write.block.chain_key.hex()
            if not right:
                outcomes.append(_WriteOutcome.REFUSED)
                self._counters["dram_corrupt_blocks"] += 1
                _log.error("block %s was corrupt in memory and was removed", key)
                self._core.quarantine(write.block.kv_namespace, [write.block.chain_key])
            elif error is None:
                outcomes.append(_WriteOutcome.DURABLE)
                self._counters["written_blocks"] += 1
                self._counters["written_bytes"] += write.block.spec.block_nbytes
            elif isinstance(error, SsdIoError | SsdClosed):
                outcomes.append(_WriteOutcome.SSD_FAILED)
                self._counters["ssd_write_errors"] += 1
                self._counters["ssd_full_errors"] += isinstance(error, SsdFull)
                trouble = trouble or str(error)
            else:
                outcomes.append(_WriteOutcome.REFUSED)
                self._counters["ssd_write_errors"] += 1
                _log.error("block %s was not written to the SSD: %s", key, error)
        self._counters["write_seconds"] += written.seconds
        if trouble:
            self._health.write_failed(time.monotonic(), trouble)
        elif _WriteOutcome.DURABLE in outcomes:
            self._health.write_succeeded()
        return outcomes

    async def _in_thread(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)


_LAST_WRITES_S = 2.0
_CLOSE_S = 10.0


class SsdTier:
    """SSD tier of one pool node, from `open` to `close`; all methods belong to one event loop."""

    def __init__(
        self,
        store: SsdStore,
        folder: Path,
        core: PoolCore,
        arena: NDArray[np.uint8],
        compression: SsdCompression,
        publish: Callable[[], None],
        counters: defaultdict[str, float],
    ) -> None:
        self.store = store
        self._folder = folder
        self.health = SsdHealth(str(folder))
        self._compression = compression
        self.loader = Loader(core, store, arena, self.health, compression, publish, counters)
        self.write_back = WriteBack(core, store, arena, self.health, self.loader, compression, publish, counters)
        self._writing = asyncio.get_running_loop().create_task(self.write_back.run())

    @classmethod
    async def open(
        cls,
        config: PoolNodeConfig,
        core: PoolCore,
        arena: NDArray[np.uint8],
        publish: Callable[[], None],
        counters: defaultdict[str, float],
    ) -> "SsdTier":
        """Open the node's folder and restore its blocks into `core`.

        Raises SsdFolderError, with advice in its message.
        """
        folder = config.ssd_folder
        assert folder is not None
        store = await asyncio.to_thread(_open, folder, config)
        try:
            began = time.perf_counter()
            recovered = store.recovered
            taken = core.restore(time.monotonic_ns(), [_ssd_block(entry) for entry in recovered])
            await asyncio.to_thread(store.free, core.take_ssd_freed())
            found = store.stats().recovery
            _log.info(
                "the SSD tier in %s: restored %d blocks, dropped %d; %s; %.1f s",
                folder,
                taken,
                len(recovered) - taken,
                ", ".join(f"{name} {count}" for name, count in sorted(found.items())) or "a new journal",
                time.perf_counter() - began,
            )
            if found.get("lost_frames") or found.get("torn_end"):
                _log.warning("the journal in %s was damaged: its readable part was restored", folder)
        except BaseException:
            await asyncio.to_thread(store.close)
            raise
        if config.pool.pool_ssd_compression == "auto":
            await asyncio.to_thread(block_coding.warm_up)
        compression = SsdCompression(counters, auto=config.pool.pool_ssd_compression == "auto")
        return cls(store, folder, core, arena, compression, publish, counters)

    @property
    def state(self) -> SsdState:
        """Current state of the SSD tier."""
        return self.health.state

    def describe(self) -> dict[str, Any]:
        """Return state, recovery counts and latencies as JSON-compatible data, for the State call."""
        stats = self.store.stats()
        return {
            "folder": str(self._folder),
            "state": self.state.value,
            "direct": stats.direct,
            "recovery": stats.recovery,
            "journal_bytes": stats.journal_nbytes,
            "read_p50_s": stats.reads.p50_s,
            "read_p99_s": stats.reads.p99_s,
            "write_p50_s": stats.writes.p50_s,
            "write_p99_s": stats.writes.p99_s,
            "compression": self._compression.describe(),
        }

    async def close(self) -> None:
        """End loads, write unwritten blocks for up to 2 s, and close the store.

        All blocks that were written are restored at the next start.
        """
        self._writing.cancel()
        try:
            async with asyncio.timeout(_CLOSE_S):
                await asyncio.gather(self._writing, return_exceptions=True)
                await self.loader.close()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LAST_WRITES_S):
                        await self.write_back.write_everything()
                await self.write_back.close()
                closed = await asyncio.to_thread(self.store.close, _CLOSE_S)
        except TimeoutError:
            closed = False
        if not closed:
            _log.error("the SSD in %s did not respond within %g s; the store was not closed", self._folder, _CLOSE_S)


def _open(folder: Path, config: PoolNodeConfig) -> SsdStore:
    try:
        if not folder.exists():
            check_folder(folder.parent)  # first, so that no folder is left where it cannot be used
            folder.mkdir(exist_ok=True, mode=0o700)
            sync_folder(folder.parent)  # otherwise the whole tier could be gone after a loss of power
        check_private(folder.lstat(), folder)
    except UnsafePath as error:
        raise SsdFolderError(f"the node's folder for the SSD tier cannot be used: {error}") from error
    except OSError as error:
        raise SsdFolderError(
            f"cannot create the node's folder {folder}: {error.strerror}; give a folder that this user can write to"
        ) from error
    return SsdStore.open(
        SsdConfig(
            dir=folder,
            nbytes=config.limits.ssd_nbytes,
            owner_id=config.node_id,
            read_depth=config.pool.pool_ssd_depth,
            write_depth=config.pool.pool_ssd_depth,
            coded=config.pool.pool_ssd_compression == "auto",
        )
    )


def _ssd_block(entry: SsdEntry) -> SsdBlock:
    return SsdBlock(
        offset=entry.offset,
        kv_namespace=entry.kv_namespace,
        chain_key=entry.chain_key,
        parent=entry.parent,
        spec=entry.spec,
        digests=entry.digests,
        num_tokens=entry.num_tokens,
        compute_s=entry.compute_s,
    )
