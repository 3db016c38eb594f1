"""File-system operations of the SSD store, and batches of I/Os shared among the caller and helper threads.

A helper thread is woken once per batch, not per I/O: it takes piece after piece in a compiled loop, by an atomic
increment of the batch's cursor (`kvpool.helper_threads`). `Disk` has one method per effect, so that tests can record or
fail each of them.
"""

import functools
import mmap
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvpool.helper_threads import HelperThreads, SharedWork
from kvpool.ssd.kernels import EXTENT_RESULT, IOVEC, PIECE, PIECE_NBYTES, kernels
from kvpool.ssd.records import PAGE_NBYTES, Run


@dataclass(frozen=True)
class BatchResult:
    """Results of a batch.

    Per extent, in the batch's order, `sums` are the checksums and `status` is 0, SHORT or an errno. `latency_ns` has
    one entry per I/O.
    """

    sums: NDArray[np.uint64]
    status: NDArray[np.int64]
    latency_ns: NDArray[np.int64]


class IoBatch:
    """Extents split into pieces, and the progress of their I/O."""

    def __init__(self, offsets: Sequence[int], memory: Sequence[Sequence[Run]], segment_nbytes: int) -> None:
        """Split the extents at `offsets` of the SSD space into pieces.

        `memory` lists the runs of memory per extent; they must stay valid until the batch is finished.
        """
        runs = np.array([run for each in memory for run in each], np.int64).reshape(-1).view(IOVEC)
        first_run = np.zeros(len(memory) + 1, np.int64)
        np.cumsum([len(each) for each in memory], out=first_run[1:])
        most = len(memory) + int(runs["nbytes"].sum()) // PIECE_NBYTES + 1
        pieces, piece_runs = np.empty(most, PIECE), np.empty(most + len(runs), IOVEC)
        starts = np.array(offsets, np.int64)
        num_pieces, num_runs = kernels().plan(starts, first_run, runs, segment_nbytes, pieces, piece_runs)
        self.num_extents = len(memory)
        self.segment_nbytes = segment_nbytes
        self.pieces, self.piece_runs = pieces[:num_pieces], piece_runs[:num_runs]
        self._cursor = np.zeros(1, np.int64)

    @property
    def nbytes(self) -> int:
        return int(self.pieces["nbytes"].sum())

    def run(self, fds: NDArray[np.int32], *, write: bool, bounce: int) -> None:
        """Take and run pieces until none is left. Any number of threads may call it, each with its own bounce buffer.

        `bounce` is the buffer's address; it is not used if all pieces are direct.
        """
        kernels().transfer(self.pieces, self.piece_runs, fds, self.segment_nbytes, write, bounce, self._cursor)

    def outcome(self) -> BatchResult:
        """Return the results. No thread may be running the batch any more."""
        results = np.zeros(self.num_extents, EXTENT_RESULT)
        kernels().fold(self.pieces, results)
        return BatchResult(results["checksum"], results["status"], self.pieces["latency_ns"])


class InFlightBatch:
    """Batch in progress."""

    def __init__(self, batch: IoBatch, work: SharedWork) -> None:
        self._batch, self._work = batch, work

    @property
    def nbytes(self) -> int:
        """Bytes transferred to or from the disk."""
        return self._batch.nbytes

    def finish(self) -> BatchResult:
        """Run the remaining pieces and return the results. No I/O of the batch is in flight afterwards."""
        self._work.finish()
        return self._batch.outcome()


class IoThreads:
    """Helper threads, shared by all callers, that keep up to `depth` I/Os of a batch in flight with the caller's."""

    def __init__(self, depth: int, name: str) -> None:
        self._helpers = HelperThreads(depth - 1, name)
        self._bounce_buffers: deque[mmap.mmap] = deque()

    def start(self, batch: IoBatch, fds: NDArray[np.int32], *, write: bool) -> InFlightBatch:
        """Start the batch in the helpers. The caller must always call `finish` before it releases the memory."""
        run = functools.partial(self._run, batch, fds, write)
        return InFlightBatch(batch, self._helpers.share(run, len(batch.pieces)))

    def stop(self) -> None:
        """Stop the helpers; no batch may be in progress."""
        self._helpers.stop()

    def _run(self, batch: IoBatch, fds: NDArray[np.int32], write: bool) -> None:
        """Run pieces of this batch until none is left."""
        if batch.pieces["is_direct"].all():
            batch.run(fds, write=write, bounce=0)
            return
        bounce = self._bounce_buffers.pop() if self._bounce_buffers else mmap.mmap(-1, PIECE_NBYTES)
        try:
            address = np.frombuffer(bounce, np.uint8).__array_interface__["data"][0]
            assert address % PAGE_NBYTES == 0
            batch.run(fds, write=write, bounce=address)
        finally:
            self._bounce_buffers.append(bounce)


class Disk:
    """The real file system. Methods raise OSError; a batch reports errors per extent instead."""

    def open(self, path: Path, *, create: bool = False, direct: bool = False) -> int:
        """Return a descriptor for reading and writing."""
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        flags |= (os.O_CREAT if create else 0) | (os.O_DIRECT if direct else 0)
        return os.open(path, flags, 0o600)  # private: prompts can be derived from KV

    def close(self, fd: int) -> None:
        os.close(fd)

    def allocate(self, fd: int, nbytes: int) -> None:
        """Extend the file to at least `nbytes` and allocate disk space for all of it. Keeps its contents."""
        os.posix_fallocate(fd, 0, nbytes)

    def truncate(self, fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)

    def write(self, fd: int, data: bytes, offset: int) -> None:
        """Write all of `data` through the page cache."""
        view = memoryview(data)
        while view:
            written = os.pwrite(fd, view, offset)
            view, offset = view[written:], offset + written

    def sync(self, fd: int) -> None:
        """Make all writes to the file durable, including those through other descriptors."""
        os.fdatasync(fd)

    def rename(self, source: Path, target: Path) -> None:
        source.rename(target)

    def remove(self, path: Path) -> None:
        path.unlink()

    def sync_dir(self, path: Path) -> None:
        """Make the folder's entries durable, after files were created, renamed or removed."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def start(self, threads: IoThreads, batch: IoBatch, fds: NDArray[np.int32], *, write: bool) -> InFlightBatch:
        """Start the transfer of extents between memory and the files `fds`, which together form the space."""
        return threads.start(batch, fds, write=write)
