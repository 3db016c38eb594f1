"""The SSD store: blocks in extents of preallocated files, journalled, read and written in batches outside the GIL."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np

from kvpool.errors import SsdClosed, SsdCorrupt, SsdError, SsdFolderError, SsdIoError, SsdNotStored, SsdRefused
from kvpool.ssd.calls import OpenCalls
from kvpool.ssd.commits import Commits, io_error
from kvpool.ssd.disk import Disk
from kvpool.ssd.extents import Extent, ExtentState
from kvpool.ssd.folder import Segments, check_folder, lock_folder
from kvpool.ssd.journal import Header
from kvpool.ssd.kernels import kernels
from kvpool.ssd.memory import SlotSizes
from kvpool.ssd.opening import lying_within, recover
from kvpool.ssd.records import PAGE_NBYTES, Bytes, SsdConfig, SsdEntry, SsdRead, SsdWrite
from kvpool.ssd.stats import DirectionCounters, SsdStats, kind_of
from kvpool.ssd.transfer import Batch, IoThreads, Outcome

__all__ = ["SsdStore"]

Results = list[SsdError | None]
Request = TypeVar("Request")


class SsdStore:
    """Keeps blocks on an SSD. All calls block, and may come from any thread at the same time; no call needs a loop.

    The caller says where blocks lie (extents must not overlap) and what they are worth; the store knows whether they
    are whole. What is wrong with one block never fails the others of a batch: it is that block's result.
    """

    recovered: list[SsdEntry]
    """The blocks that were found when the store was opened, in the order in which they were written: disjoint, each
    address once, none beyond the space's end. Their bytes are checked when they are read."""

    def __init__(self, config: SsdConfig, disk: Disk, lock_fd: int) -> None:
        """As `open`, in a folder that is checked and locked."""
        kernels()
        self.config = config
        self._disk, self._lock_fd = disk, lock_fd
        found = recover(config, disk)
        header = found.header or Header(config.node_id, config.cluster, config.segment_nbytes)
        self._segments = Segments(disk, config.dir, header.segment_nbytes, config.nbytes)
        try:
            extents = lying_within(found, self._segments)
            self._commits = Commits(disk, config, header, self._segments, extents)
            self._segments.trim()
        except OSError as error:
            self._segments.close()
            raise SsdFolderError(f"the SSD folder {config.dir} cannot be written: {error}") from error
        self.recovered = [extent.entry for extent in extents]
        self._recovery = found.counts
        self._num_freed = 0
        self._slots = SlotSizes()
        self._reads, self._writes = DirectionCounters(), DirectionCounters()
        self._reading = IoThreads(config.read_depth, "ssd-read")
        self._writing = IoThreads(config.write_depth, "ssd-write")
        self._calls = OpenCalls()
        self._released = threading.Event()

    @classmethod
    def open(cls, config: SsdConfig, disk: Disk | None = None) -> "SsdStore":
        """Lock the folder, preallocate its files, recover what is in it.

        Raises SsdFolderError, whose text says what to do.
        """
        disk = disk or Disk()
        check_folder(config.dir)
        lock_fd = lock_folder(disk, config.dir)
        try:
            return cls(config, disk, lock_fd)
        except BaseException:
            disk.close(lock_fd)
            raise

    def write(self, writes: Sequence[SsdWrite]) -> Results:
        """Write blocks; None for each that is durable and in the journal when this returns.

        Errors per block: SsdRefused (overlap with a block that is stored or being written, outside of the space,
        sources of the wrong form), SsdFull, SsdIoError, SsdClosed. Nothing of a block with an error can be read, now
        or after a restart.
        """
        return self._counted(self._writes, writes, self._write)

    def read(self, reads: Sequence[SsdRead]) -> Results:
        """Read blocks into the caller's arrays; None for each whose bytes are those that were written.

        Errors per block: SsdNotStored, SsdRefused, SsdIoError, SsdCorrupt (what is on the disk is not what was
        written: the extent should be freed), SsdClosed. The targets of a block with an error hold anything. Returns
        only when no I/O touches the targets any more.
        """
        return self._counted(self._reads, reads, self._read)

    def free(self, offsets: Iterable[int]) -> None:
        """Forget the blocks at these offsets; offsets without a block are passed over.

        At once for readers; durable before any of the space is written again, at the latest when the store is closed.
        A block freed while it is being written is forgotten as soon as that write returns.
        """
        commits = self._commits
        with commits.lock:
            for offset in offsets:
                extent = commits.extents.get(offset)
                if extent is None:
                    continue
                self._num_freed += extent.state is not ExtentState.DOOMED
                if extent.state is ExtentState.SEALED:
                    commits.extents.remove(extent)
                    commits.undurable.add(extent)
                else:
                    extent.state = ExtentState.DOOMED

    def stats(self) -> SsdStats:
        """Counters since the store was opened."""
        commits = self._commits
        with commits.lock:
            return SsdStats(
                num_entries=len(commits.extents),
                entries_nbytes=commits.extents.nbytes,
                capacity_nbytes=self.config.nbytes,
                direct=self._segments.direct,
                accepts_writes=commits.accepts_writes,
                num_recovered=len(self.recovered),
                recovery=dict(self._recovery),
                journal_nbytes=commits.journal_nbytes,
                num_compactions=commits.num_compactions,
                num_freed=self._num_freed,
                reads=self._reads.snapshot(),
                writes=self._writes.snapshot(),
            )

    def close(self, timeout_s: float = 30.0) -> bool:
        """Refuse new calls, wait for those under way, make frees durable, unlock the folder. Closing twice is allowed.

        False when this was not over after `timeout_s` (a disk that does not answer): it is then done as soon as the
        disk answers.
        """
        deadline = time.monotonic() + timeout_s
        if self._calls.end():
            threading.Thread(target=self._finish, name="ssd-close", daemon=True).start()
        return self._released.wait(max(0.0, deadline - time.monotonic()))

    def _write(self, writes: Sequence[SsdWrite]) -> Results:
        results: Results = [None] * len(writes)
        reserved: dict[int, Extent] = {}
        try:
            for i, write in enumerate(writes):
                got = self._reserve(write)
                if isinstance(got, Extent):
                    reserved[i] = got
                else:
                    results[i] = got
            if reserved:
                self._clear_frees(reserved, results)
            if reserved:
                self._write_bytes(writes, reserved, results)
            failed = self._commits.commit(list(reserved.values())) if reserved else {}
            for i, extent in reserved.items():
                results[i] = failed.get(extent)
        finally:
            self._release([extent for extent in reserved.values() if extent.state is not ExtentState.SEALED])
        return results

    def _reserve(self, write: SsdWrite) -> Extent | SsdRefused:
        """The extent, in the map from now on."""
        entry, commits = write.entry, self._commits
        if problem := self._slots.unfit(write.sources, entry.spec, writable=False):
            return SsdRefused(f"sources of the block at {entry.offset}: {problem}")
        extent = Extent.of(entry)
        if entry.offset < 0 or entry.offset % PAGE_NBYTES or extent.end > self.config.nbytes:
            return SsdRefused(
                f"a block at {entry.offset}..{extent.end}: expected a multiple of {PAGE_NBYTES} in a space of "
                f"{self.config.nbytes} bytes"
            )
        with commits.lock:
            if (other := commits.extents.overlaps(extent.start, extent.end)) is not None:
                return SsdRefused(
                    f"a block at {extent.start}..{extent.end} lies over {other.start}..{other.end}: free that first"
                )
            commits.extents.add(extent)
        return extent

    def _clear_frees(self, reserved: dict[int, Extent], results: Results) -> None:
        """The journal forgets what lay where these blocks go, before a byte of them is written."""
        if not any(self._has_undurable(extent) for extent in reserved.values()):
            return
        self._commits.commit([])
        for i, extent in list(reserved.items()):
            if self._has_undurable(extent):
                results[i] = SsdIoError("what lay there before could not be freed in the SSD journal")
                self._release([reserved.pop(i)])

    def _has_undurable(self, extent: Extent) -> bool:
        with self._commits.lock:
            return self._commits.undurable.overlaps(extent.start, extent.end) is not None

    def _write_bytes(self, writes: Sequence[SsdWrite], reserved: dict[int, Extent], results: Results) -> None:
        sources = [writes[i].sources for i in reserved]
        outcome = self._transfer([extent.start for extent in reserved.values()], sources, write=True)
        sums, status = outcome.sums.tolist(), outcome.status.tolist()
        for (i, extent), checksum, number in zip(list(reserved.items()), sums, status, strict=True):
            extent.checksum = checksum
            if number:
                results[i] = io_error(f"writing the block at {extent.start}", number)
                self._release([reserved.pop(i)])

    def _release(self, extents: Sequence[Extent]) -> None:
        """Take blocks that did not come to be out of the map."""
        with self._commits.lock:
            for extent in extents:
                if self._commits.extents.get(extent.start) is extent:
                    self._commits.extents.remove(extent)

    def _read(self, reads: Sequence[SsdRead]) -> Results:
        results: Results = [None] * len(reads)
        found: list[tuple[int, Extent]] = []
        for i, read in enumerate(reads):
            extent = self._find(read)
            if extent is None:
                results[i] = SsdNotStored(f"no block {read.chain_key.hex()} lies at {read.offset}")
            elif problem := self._slots.unfit(read.targets, extent.entry.spec, writable=True):
                results[i] = SsdRefused(f"targets for the block at {read.offset}: {problem}")
            else:
                found.append((i, extent))
        if not found:
            return results
        targets = [reads[i].targets for i, _ in found]
        outcome = self._transfer([extent.start for _, extent in found], targets, write=False)
        expected = np.array([extent.checksum for _, extent in found], np.uint64)
        for k in np.flatnonzero((outcome.status != 0) | (outcome.sums != expected)).tolist():
            i, extent = found[k]
            number = int(outcome.status[k])
            if self._find(reads[i]) is not extent:
                results[i] = SsdNotStored(f"the block at {extent.start} was freed while it was being read")
            elif number:
                results[i] = io_error(f"reading the block at {extent.start}", number)
            else:
                results[i] = SsdCorrupt(f"the block at {extent.start} is not what was written there")
        return results

    def _find(self, read: SsdRead) -> Extent | None:
        extent = self._commits.extents.get(read.offset)
        if extent is None or extent.state is not ExtentState.SEALED:
            return None
        entry = extent.entry
        return extent if (entry.kv_namespace, entry.chain_key) == (read.kv_namespace, read.chain_key) else None

    def _transfer(self, offsets: Sequence[int], arrays: Sequence[Sequence[Bytes]], *, write: bool) -> Outcome:
        threads, counters = (self._writing, self._writes) if write else (self._reading, self._reads)
        batch = Batch(offsets, arrays, self._segments.segment_nbytes)
        outcome = self._disk.transfer(threads, batch, self._segments.fds, write=write)
        with self._commits.lock:
            counters.nbytes += batch.nbytes
            counters.latencies.add(outcome.nanos)
        return outcome

    def _finish(self) -> None:
        self._calls.wait()
        try:
            self._commits.commit([])
        finally:
            self._reading.stop()
            self._writing.stop()
            self._commits.close()
            self._segments.close()
            self._disk.close(self._lock_fd)
            self._released.set()

    def _counted(
        self, counters: DirectionCounters, requests: Sequence[Request], perform: Callable[[Sequence[Request]], Results]
    ) -> Results:
        if not self._calls.enter():
            return [SsdClosed("the SSD store is closed") for _ in requests]
        lock = self._commits.lock
        try:
            with lock:
                counters.num_in_flight += len(requests)
            try:
                results = perform(requests)
            finally:
                with lock:
                    counters.num_in_flight -= len(requests)
            with lock:
                counters.num_blocks += len(requests)
                counters.errors.update(kind_of(error) for error in results if error is not None)
            return results
        finally:
            self._calls.leave()
