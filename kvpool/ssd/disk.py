"""File-system operations of the SSD store, and batches of I/Os shared among the caller and helper threads.

A helper thread is woken once per batch, not per I/O: it takes piece after piece in a compiled loop, by an atomic
increment of the batch's cursor (`kvpool.helper_threads`). `Disk` has one method per effect, so that tests can record or
fail each of them.
"""

import contextlib
import ctypes
import errno
import functools
import mmap
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvpool.helper_threads import HelperThreads
from kvpool.ssd.async_kernels import CONTROL_BLOCK, EVENT, SYSTEM_CALLS, async_kernel
from kvpool.ssd.kernels import EXTENT_RESULT, IOVEC, PIECE, PIECE_NBYTES, kernels
from kvpool.ssd.records import PAGE_NBYTES, Run


def sync_folder(path: Path) -> None:
    """Make a folder's entries durable (fsync(2)). Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


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
        self.is_direct = bool(self.pieces["is_direct"].all())
        self.largest_nbytes = int(self.pieces["nbytes"].max(initial=0))

    @property
    def nbytes(self) -> int:
        return int(self.pieces["nbytes"].sum())

    def run(self, fds: NDArray[np.int32], *, write: bool, bounce: int) -> None:
        """Take and run pieces until none is left. Any number of threads may call it, each with its own bounce buffer.

        `bounce` is the buffer's address; it is not used if all pieces are direct.
        """
        kernels().transfer(self.pieces, self.piece_runs, fds, self.segment_nbytes, write, bounce, self._cursor)

    def read_async(self, fds: NDArray[np.int32], queue: "AsyncQueue") -> None:
        """Take and read pieces as `run`, several at a time. All must be direct."""
        async_kernel()(
            self.pieces, self.piece_runs, fds, self.segment_nbytes, queue.context, queue.memory, self._cursor
        )

    def outcome(self) -> BatchResult:
        """Return the results. No thread may be running the batch any more."""
        results = np.zeros(self.num_extents, EXTENT_RESULT)
        kernels().fold(self.pieces, results)
        return BatchResult(results["checksum"], results["status"], self.pieces["latency_ns"])


class InFlightBatch:
    """Batch in progress."""

    def __init__(self, batch: IoBatch, finish: Callable[[], None]) -> None:
        self._batch, self._finish = batch, finish

    @property
    def nbytes(self) -> int:
        """Bytes transferred to or from the disk."""
        return self._batch.nbytes

    def finish(self) -> BatchResult:
        """Run the remaining pieces and return the results. No I/O of the batch is in flight afterwards."""
        self._finish()
        return self._batch.outcome()


_ASYNC_NBYTES = 16 << 10  # largest I/O that is cheaper to start than to wait for; a checksum of more takes a thread


class AsyncQueue:
    """I/O context of the system for `depth` I/Os at a time, and its memory. Used by one thread at a time."""

    def __init__(self, depth: int) -> None:
        """Set up the context. Raises OSError if the system has none, or no more of them."""
        if SYSTEM_CALLS is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        async_kernel()  # compiled or loaded now, not during the first read
        self._libc = ctypes.CDLL(None, use_errno=True)
        context = ctypes.c_long(0)
        if self._libc.syscall(SYSTEM_CALLS.setup, ctypes.c_long(depth), ctypes.byref(context)):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self.context = context.value
        self.memory = np.zeros(depth, CONTROL_BLOCK), np.zeros(depth, EVENT), np.zeros((2, depth), np.int64)

    def close(self) -> None:
        """Destroy the context; no I/O may be in flight."""
        assert SYSTEM_CALLS is not None
        self._libc.syscall(SYSTEM_CALLS.destroy, ctypes.c_long(self.context))


class IoThreads:
    """Helper threads, shared by all callers, that keep up to `depth` I/Os of a batch in flight with the caller's.

    Each runs one I/O at a time. If a batch consists of small reads, one other thread runs `depth` of them at a time
    (`kvpool.ssd.async_kernels`), and batch after batch, if the system supports it. Writes gain nothing by that.
    """

    def __init__(self, depth: int, name: str) -> None:
        self._helpers = HelperThreads(depth - 1, name)
        self._bounce_buffers: deque[mmap.mmap] = deque()
        self._for_small = ThreadPoolExecutor(1, f"{name}-small")  # starts its thread when it is needed
        self._queue: AsyncQueue | None = None
        if depth > 1:
            with contextlib.suppress(OSError):
                self._queue = AsyncQueue(depth)

    @property
    def reads_async(self) -> bool:
        """True if one thread keeps several small reads in flight."""
        return self._queue is not None

    def start(self, batch: IoBatch, fds: NDArray[np.int32], *, write: bool) -> InFlightBatch:
        """Start the batch in the helpers. The caller must always call `finish` before it releases the memory."""
        if self._queue is not None and not write and batch.is_direct and batch.largest_nbytes <= _ASYNC_NBYTES:
            done = self._for_small.submit(batch.read_async, fds, self._queue)
            return InFlightBatch(batch, done.result)
        run = functools.partial(self._run, batch, fds, write)
        return InFlightBatch(batch, self._helpers.share(run, len(batch.pieces)).finish)

    def stop(self) -> None:
        """Stop the helpers; no batch may be in progress."""
        self._helpers.stop()
        if self._queue is not None:
            self._for_small.shutdown()
            self._queue.close()

    def _run(self, batch: IoBatch, fds: NDArray[np.int32], write: bool) -> None:
        """Run pieces of this batch until none is left."""
        if batch.is_direct:
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
        sync_folder(path)

    def start(self, threads: IoThreads, batch: IoBatch, fds: NDArray[np.int32], *, write: bool) -> InFlightBatch:
        """Start the transfer of extents between memory and the files `fds`, which together form the space."""
        return threads.start(batch, fds, write=write)
