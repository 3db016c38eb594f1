"""SSD store: blocks in extents of preallocated files with a journal, read and written in batches without the GIL.

Threads and locks are described in `kvpool.ssd`.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from kvpool.errors import SsdClosed, SsdError, SsdFolderError, SsdIoError
from kvpool.ssd.disk import Disk, IoThreads
from kvpool.ssd.folder import Segments, check_folder, lock_folder
from kvpool.ssd.group_commit import GroupCommit
from kvpool.ssd.journal import JournalHeader
from kvpool.ssd.kernels import kernels
from kvpool.ssd.read_write import IoDirection, SsdReader, SsdWriter
from kvpool.ssd.records import ExtentState, SsdConfig, SsdEntry, SsdRead, SsdWrite
from kvpool.ssd.recovery import extents_within, recover
from kvpool.ssd.stats import DirectionCounters, SsdStats


class CallGate:
    """Counter of the calls in progress, from any thread; after `end` it admits no more."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_inside = 0
        self._ended = False

    def enter(self) -> bool:
        """Return True if a call may begin; `leave` must follow it."""
        with self._changed:
            self._num_inside += not self._ended
            return not self._ended

    def leave(self) -> None:
        with self._changed:
            self._num_inside -= 1
            self._changed.notify_all()

    def end(self) -> bool:
        """Admit no more calls. Returns True the first time."""
        with self._changed:
            first, self._ended = not self._ended, True
            return first

    def wait(self) -> None:
        """Wait until no call is in progress."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_inside)


Results = list[SsdError | None]
Request = TypeVar("Request")


class SsdStore:
    """Store of blocks on an SSD. All methods block, and any number of threads may call them.

    The caller chooses the extents, which must not overlap, and evicts; the store guarantees integrity. An error of one
    block is returned as that block's result and does not affect the others of its batch.
    """

    recovered: list[SsdEntry]
    """Blocks recovered when the store was opened, in the order in which they were written.

    They are disjoint and within the space, and each address occurs once. Their bytes are verified when they are read.
    """

    def __init__(self, config: SsdConfig, disk: Disk, lock_fd: int) -> None:
        """Open the store as `open` does, in a folder that is checked and locked."""
        kernels()
        self.config = config
        self._disk, self._lock_fd = disk, lock_fd
        found = recover(config, disk)
        header = found.header or JournalHeader(config.owner_id, config.cluster, config.segment_nbytes)
        self._segments = Segments(disk, config.dir, header.segment_nbytes, config.nbytes)
        try:
            extents = extents_within(found, self._segments)
            self._commits = GroupCommit(disk, config, header, self._segments, extents)
            self._segments.trim()
        except OSError as error:
            self._segments.close()
            raise SsdFolderError(f"the SSD folder {config.dir} cannot be written: {error}") from error
        self.recovered = [extent.entry for extent in extents]
        self._recovery = found.counts
        self._num_freed = 0
        self._reads, self._writes = DirectionCounters(), DirectionCounters()
        self._reading = IoThreads(config.read_depth, "ssd-read")
        self._writing = IoThreads(config.write_depth, "ssd-write")
        self._reader = SsdReader(
            self._commits, IoDirection(disk, self._segments, self._reading, self._reads, write=False)
        )
        self._writer = SsdWriter(
            self._commits,
            IoDirection(disk, self._segments, self._writing, self._writes, write=True),
            accepts_coded=config.coded,
        )
        self._calls = CallGate()
        self._released = threading.Event()

    @classmethod
    def open(cls, config: SsdConfig, disk: Disk | None = None) -> "SsdStore":
        """Lock the folder, preallocate its files, and recover its blocks.

        Raises SsdFolderError, with advice in its message.
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
        """Write blocks. Returns None for each that is durable and in the journal, otherwise its error.

        Errors: SsdRefused (overlap with a block that is stored or being written, outside of the space, invalid
        sources), SsdFull, SsdIoError, SsdClosed. A block with an error cannot be read; after a restart
        only if the journal could neither be appended to nor be written anew, and then only with the right bytes.
        """
        return self._counted(self._writes, writes, self._writer.write)

    def read(self, reads: Sequence[SsdRead]) -> Results:
        """Read blocks into the caller's arrays. Returns None for each whose checksum is right, otherwise its error.

        Errors: SsdNotStored, SsdRefused, SsdIoError, SsdCorrupt (the bytes on the disk are not those that were
        written; the caller should free the extent), SsdClosed. The targets of a block with an error are undefined. No
        I/O touches the targets after the call has returned.
        """
        return self._counted(self._reads, reads, self._reader.read)

    def coded_nbytes(self, offset: int) -> int:
        """Return the length of the coded block that is stored at `offset`; 0 if it is plain or there is none."""
        return self._reader.coded_nbytes(offset)

    def free(self, offsets: Iterable[int]) -> None:
        """Free the blocks at these offsets; offsets without a block are ignored.

        Takes effect for readers at once. Becomes durable with the next write, `sync_frees` or `close`, in any case
        before the space is written again. A block freed while it is being written is removed when that write returns.
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
                    commits.pending_frees.add(extent)
                else:
                    extent.state = ExtentState.DOOMED

    def sync_frees(self) -> None:
        """Make frees durable. If the journal cannot be written, the next write or `close` retries."""
        if self._calls.enter():
            try:
                self._commits.commit()
            finally:
                self._calls.leave()

    def stats(self) -> SsdStats:
        """Return a snapshot of contents and counters."""
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
        """Reject new calls, wait for those in progress, make frees durable, unlock the folder. May be called twice.

        Returns False if this takes longer than `timeout_s`, because the disk does not answer; closing then completes
        in the background.
        """
        deadline = time.monotonic() + timeout_s
        if self._calls.end():
            threading.Thread(target=self._finish, name="ssd-close", daemon=True).start()
        return self._released.wait(max(0.0, deadline - time.monotonic()))

    def _finish(self) -> None:
        self._calls.wait()
        try:
            self._commits.commit()
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
        counters.begin(len(requests))
        results: Results = [SsdIoError("the call was aborted")] * len(requests)
        try:
            results = perform(requests)
            return results
        finally:
            counters.end(results)
            self._calls.leave()
