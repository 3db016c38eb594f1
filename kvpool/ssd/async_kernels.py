"""Compiled loop that keeps several small reads of a batch in flight from one thread, by Linux's asynchronous I/O.

A thread that waits for each of its reads is woken for each of them; for 4 KiB that takes more CPU time than the read.
Here, one system call (io_submit(2)) starts several, and another (io_getevents(2)) waits for any of them. The system
calls have no wrappers in the C library, so they are made by number. Checks no arguments; releases the GIL.
"""

import functools
import platform
from typing import Any, Final, NamedTuple

import numba
import numpy as np
from numba import types

from jit.atomic_counter import take_next
from jit.compiling import compiled
from kvpool.ssd.kernels import IOVEC, PIECE, TIMESPEC, now_ns, perform, xxh64

CONTROL_BLOCK = np.dtype(
    [
        ("data", "<u8"),  # returned with the completion: the index of the block
        ("key", "<u4"),
        ("rw_flags", "<u4"),
        ("operation", "<u2"),
        ("priority", "<i2"),
        ("fd", "<u4"),
        ("address", "<i8"),  # of the memory, or of IOVEC [nbytes] for the vectored operations
        ("nbytes", "<u8"),
        ("offset", "<i8"),
        ("reserved", "<u8"),
        ("flags", "<u4"),
        ("event_fd", "<u4"),
    ]
)
"""The system's `struct iocb` (io_submit(2)), little-endian."""
EVENT = np.dtype([("data", "<u8"), ("block", "<u8"), ("result", "<i8"), ("result2", "<i8")])
"""The system's `struct io_event` (io_getevents(2))."""


class SystemCalls(NamedTuple):
    """Numbers of the system calls on this kind of machine."""

    setup: int
    destroy: int
    getevents: int
    submit: int


SYSTEM_CALLS: Final = {"x86_64": SystemCalls(206, 207, 208, 209), "aarch64": SystemCalls(0, 1, 4, 2)}.get(
    platform.machine()
)
_SUBMIT, _GETEVENTS = (SYSTEM_CALLS.submit, SYSTEM_CALLS.getevents) if SYSTEM_CALLS is not None else (-1, -1)
_PREAD, _PREADV = 0, 7
_EAGAIN, _EINTR = 11, 4

_i64 = types.int64
_submit: Any = types.ExternalFunction("syscall", _i64(_i64, _i64, _i64, _i64))
_getevents: Any = types.ExternalFunction("syscall", _i64(_i64, _i64, _i64, _i64, _i64, _i64))


@functools.cache
def async_kernel() -> Any:
    """Return `read(pieces, piece_runs, fds, segment_nbytes, context, queue, cursor)`, compiled.

    Reads pieces as `SsdKernels.transfer`; all must be direct, and lie in one segment each. `context` is an I/O context
    (io_setup(2)) used by nobody else, and `queue` its memory, of the length that it was set up for: CONTROL_BLOCK [n],
    EVENT [n], and int64 [2, n].
    """
    pieces, runs, blocks, events = (
        types.Array(numba.from_dtype(dtype), 1, "C") for dtype in (PIECE, IOVEC, CONTROL_BLOCK, EVENT)
    )
    fds, cursor = types.Array(types.int32, 1, "C"), types.Array(_i64, 1, "C")
    queue = types.Tuple((blocks, events, types.Array(_i64, 2, "C")))  # type: ignore[no-untyped-call]
    return compiled(_read_async, types.void(pieces, runs, fds, _i64, _i64, queue, cursor))


@numba.njit
def _prepare(block: Any, piece: Any, runs: Any, fds: Any, segment_nbytes: Any) -> None:
    block.fd = np.uint32(fds[piece.offset // segment_nbytes])
    block.offset = piece.offset % segment_nbytes
    if len(runs) == 1:
        block.operation = _PREAD
        block.address, block.nbytes = runs[0].address, np.uint64(piece.nbytes)
    else:
        block.operation = _PREADV
        block.address, block.nbytes = runs.ctypes.data, np.uint64(len(runs))


@numba.njit
def _complete(piece: Any, runs: Any, fds: Any, segment_nbytes: Any, result: Any) -> None:
    """Record the result of a read; one that was interrupted or incomplete is repeated as `transfer` repeats it."""
    if result == piece.nbytes:
        piece.status = 0
    elif result >= 0 or result == -_EINTR or result == -_EAGAIN:
        piece.status = perform(fds, segment_nbytes, piece.offset, piece.nbytes, runs, False)
    else:
        piece.status = -result
    if piece.status == 0:
        piece.checksum = xxh64(runs)


def _read_async(
    pieces: Any, piece_runs: Any, fds: Any, segment_nbytes: Any, context: Any, queue: Any, cursor: Any
) -> None:
    blocks, events, numbers = queue
    free, waiting = numbers[0], numbers[1]  # indices of blocks that are not in use; addresses of those to submit
    clock = np.zeros(1, TIMESPEC)
    piece_of = np.zeros(len(blocks), np.int64)
    num_free, in_flight, is_more = len(blocks), 0, True
    for i in range(len(blocks)):
        free[i] = i
        blocks[i].data = np.uint64(i)
    while is_more or in_flight:
        count = 0
        now = now_ns(clock)
        while is_more and num_free:
            p = take_next(cursor)
            if p >= len(pieces):
                is_more = False
                break
            num_free -= 1
            slot = free[num_free]
            piece = pieces[p]
            runs = piece_runs[piece.first_run : piece.first_run + piece.num_runs]
            piece.latency_ns = now
            piece_of[slot] = p
            _prepare(blocks[slot], piece, runs, fds, segment_nbytes)
            waiting[count] = np.int64(blocks.ctypes.data) + slot * blocks.itemsize
            count += 1
        at = 0
        while at < count:
            started = _submit(_SUBMIT, context, count - at, np.int64(waiting.ctypes.data) + 8 * at)
            if started > 0:
                in_flight += started
                at += started
                continue
            # The system takes no more at the moment, or not this one: run it here.
            slot = (waiting[at] - np.int64(blocks.ctypes.data)) // blocks.itemsize
            piece = pieces[piece_of[slot]]
            runs = piece_runs[piece.first_run : piece.first_run + piece.num_runs]
            _complete(piece, runs, fds, segment_nbytes, np.int64(-_EAGAIN))
            piece.latency_ns = now_ns(clock) - piece.latency_ns
            free[num_free] = slot
            num_free += 1
            at += 1
        if not in_flight:
            continue
        got = _getevents(_GETEVENTS, context, 1, len(events), np.int64(events.ctypes.data), 0)
        now = now_ns(clock)
        for i in range(got):
            slot = np.int64(events[i].data)
            piece = pieces[piece_of[slot]]
            runs = piece_runs[piece.first_run : piece.first_run + piece.num_runs]
            piece.latency_ns = now - piece.latency_ns
            _complete(piece, runs, fds, segment_nbytes, events[i].result)
            free[num_free] = slot
            num_free += 1
            in_flight -= 1
