"""Compiled loops of the SSD store: split extents into I/Os, run the I/Os, compute checksums of the transferred bytes.

All kernels release the GIL and check no arguments. Addresses are addresses of this process. System calls are bound by
symbol name, so that the compiled code can be cached on disk.

The checksum of an extent is XXH64 (xxhash.com, seed 0) of its only piece, zero padding included. The checksum of an
extent of several pieces is XXH64 of the pieces' checksums (8 bytes each), zero-padded to a multiple of 32 bytes.
"""

import functools
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from jit.atomic_counter import take_next
from jit.compiling import compiled

PIECE_NBYTES = 1 << 20
"""Largest I/O. Part of the on-disk format, because checksums are computed per piece."""
MAX_RUNS = 64
"""Largest number of memory runs in one direct I/O; the kernel's limit is 1024 (IOV_MAX)."""
SHORT = -1
"""Status of an I/O that reached the end of the file; other statuses are 0 or an errno."""

IOVEC = np.dtype([("address", "<i8"), ("nbytes", "<i8")])
"""A run of memory with the layout of `struct iovec` (readv(2)): arrays of it are passed to preadv and pwritev."""
TIMESPEC = np.dtype([("seconds", "<i8"), ("nanoseconds", "<i8")])
"""The system's `struct timespec` (clock_gettime(2))."""
PIECE = np.dtype(
    [
        ("extent", "<i8"),  # index of the extent in its batch
        ("offset", "<i8"),  # in the SSD space
        ("nbytes", "<i8"),  # whole pages
        ("first_run", "<i8"),  # index of its first run among the pieces' runs
        ("num_runs", "<i8"),
        ("is_direct", "<i8"),  # 1: the disk reads or writes its runs; 0: through a bounce buffer
        ("checksum", "<u8"),  # set by `transfer`, like the fields below
        ("status", "<i8"),  # 0, SHORT or an errno
        ("latency_ns", "<i8"),
    ]
)
"""One I/O: a part of an extent, at most PIECE_NBYTES long."""
EXTENT_RESULT = np.dtype([("checksum", "<u8"), ("status", "<i8")])
"""Result of one extent: its checksum, and the first status of its pieces that is not 0."""

_PAGE = 4096
_EINTR = 4
_CLOCK_MONOTONIC = 1
_P1, _P2, _P3, _P4 = (
    np.uint64(prime) for prime in (11400714785074694791, 14029467366897019727, 1609587929392839161, 9650029242287828579)
)

_i64 = types.int64
_pread: Any = types.ExternalFunction("pread64", _i64(types.int32, _i64, _i64, _i64))
_pwrite: Any = types.ExternalFunction("pwrite64", _i64(types.int32, _i64, _i64, _i64))
_preadv: Any = types.ExternalFunction("preadv64", _i64(types.int32, _i64, types.int32, _i64))
_pwritev: Any = types.ExternalFunction("pwritev64", _i64(types.int32, _i64, types.int32, _i64))
_errno_location: Any = types.ExternalFunction("__errno_location", _i64())
_clock_gettime: Any = types.ExternalFunction("clock_gettime", types.int32(types.int32, _i64))
_memcpy: Any = types.ExternalFunction("memcpy", _i64(_i64, _i64, _i64))
_memset: Any = types.ExternalFunction("memset", _i64(_i64, types.int32, _i64))


class SsdKernels(NamedTuple):
    """`plan(offsets, first_run, runs, segment_nbytes, pieces, piece_runs) -> (num_pieces, num_piece_runs)`
    `transfer(pieces, piece_runs, fds, segment_nbytes, write, bounce, cursor)`
    `fold(pieces, results)`

    offsets int64 [n]: where the extents start in the SSD space. first_run int64 [n + 1]: extent i's memory is
    runs[first_run[i] : first_run[i + 1]]. runs, piece_runs: IOVEC [:]. pieces: PIECE [:]. fds int32 [segments].
    bounce: address of PIECE_NBYTES bytes for I/Os that are not direct. cursor int64 [1]: index of the next piece;
    concurrent callers of `transfer` share it, and each takes pieces until none is left. results: EXTENT_RESULT [n].
    """

    plan: Any
    transfer: Any
    fold: Any


@functools.cache
def kernels() -> SsdKernels:
    """Return the kernels. The first call compiles them (about two seconds) or loads them from the cache."""
    int64s, fds = types.Array(_i64, 1, "C"), types.Array(types.int32, 1, "C")
    runs, pieces, results = (types.Array(numba.from_dtype(dtype), 1, "C") for dtype in (IOVEC, PIECE, EXTENT_RESULT))
    counts = types.UniTuple(_i64, 2)  # type: ignore[no-untyped-call]
    return SsdKernels(
        compiled(_plan, counts(int64s, int64s, runs, _i64, pieces, runs)),
        compiled(_transfer, types.void(pieces, runs, fds, _i64, types.boolean, _i64, int64s)),
        compiled(_fold, types.void(pieces, results)),
    )


def _load(of: Any, llvm_type: Any) -> Any:
    """Return an intrinsic `load(address)` that reads a number of this type from memory."""

    def typed(_typing: Any, _address: Any) -> Any:
        def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            return builder.load(builder.inttoptr(args[0], llvm_type.as_pointer()), align=llvm_type.width // 8)

        return of(_i64), codegen

    return intrinsic(typed)


_load_u64 = _load(types.uint64, cgutils.intp_t)
_load_i32 = _load(types.int32, cgutils.int32_t)


@numba.njit(inline="always")
def _rotate(x: Any, bits: Any) -> Any:
    return (x << np.uint64(bits)) | (x >> np.uint64(64 - bits))


@numba.njit(inline="always")
def _round(lane: Any, word: Any) -> Any:
    return _rotate(lane + word * _P2, 31) * _P1


@numba.njit
def _stripes(address: Any, nbytes: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Return XXH64's four lanes after consuming `nbytes` bytes at `address`; `nbytes` is a multiple of 32."""
    for at in range(address, address + nbytes, 32):
        a = _round(a, _load_u64(at))
        b = _round(b, _load_u64(at + 8))
        c = _round(c, _load_u64(at + 16))
        d = _round(d, _load_u64(at + 24))
    return a, b, c, d


@numba.njit
def _finish(a: Any, b: Any, c: Any, d: Any, nbytes: Any) -> Any:
    total = _rotate(a, 1) + _rotate(b, 7) + _rotate(c, 12) + _rotate(d, 18)
    for lane in (a, b, c, d):
        total = (total ^ _round(np.uint64(0), lane)) * _P1 + _P4
    total += np.uint64(nbytes)
    total = (total ^ (total >> np.uint64(33))) * _P2
    total = (total ^ (total >> np.uint64(29))) * _P3
    return total ^ (total >> np.uint64(32))


@numba.njit
def xxh64(runs: Any) -> Any:
    """Return XXH64 of the concatenated runs (IOVEC [:]); each run's length is a multiple of 32 bytes."""
    a, b, c, d = _P1 + _P2, _P2, np.uint64(0), np.uint64(0) - _P1
    nbytes = np.int64(0)
    for r in range(len(runs)):
        a, b, c, d = _stripes(runs[r].address, runs[r].nbytes, a, b, c, d)
        nbytes += runs[r].nbytes
    return _finish(a, b, c, d, nbytes)


def _plan(offsets: Any, first_run: Any, runs: Any, segment_nbytes: Any, pieces: Any, piece_runs: Any) -> Any:
    p = 0
    k = 0
    for extent in range(len(offsets)):
        payload = 0
        for r in range(first_run[extent], first_run[extent + 1]):
            payload += runs[r].nbytes
        whole = (payload + _PAGE - 1) // _PAGE * _PAGE
        r = first_run[extent]
        used = 0  # bytes of run r in earlier pieces
        for start in range(0, whole, PIECE_NBYTES):
            nbytes = min(PIECE_NBYTES, whole - start)
            left = min(nbytes, payload - start)
            at = offsets[extent] + start
            first = k
            direct = left == nbytes and at // segment_nbytes == (at + nbytes - 1) // segment_nbytes
            while left > 0:
                part = min(left, runs[r].nbytes - used)
                piece_run = piece_runs[k]
                piece_run.address = runs[r].address + used
                piece_run.nbytes = part
                direct = direct and piece_run.address % _PAGE == 0 and part % _PAGE == 0
                left -= part
                used += part
                k += 1
                if used == runs[r].nbytes:
                    r += 1
                    used = 0
            piece = pieces[p]
            piece.extent = extent
            piece.offset = at
            piece.nbytes = nbytes
            piece.first_run = first
            piece.num_runs = k - first
            piece.is_direct = direct and k - first <= MAX_RUNS
            piece.checksum = 0
            piece.status = 0
            piece.latency_ns = 0
            p += 1
    return p, k


@numba.njit
def now_ns(clock: Any) -> Any:
    _clock_gettime(np.int32(_CLOCK_MONOTONIC), clock.ctypes.data)
    return clock[0].seconds * 1_000_000_000 + clock[0].nanoseconds


@numba.njit
def _once(fds: Any, segment_nbytes: Any, at: Any, nbytes: Any, runs: Any, write: Any) -> Any:
    """Try one I/O once; return its status. An I/O that crosses segments has one run and takes several system calls."""
    done = np.int64(0)
    address = runs[0].address
    while done < nbytes:
        fd = fds[(at + done) // segment_nbytes]
        offset = (at + done) % segment_nbytes
        part = min(nbytes - done, segment_nbytes - offset)
        count = np.int32(len(runs))
        if count > 1:
            table = runs.ctypes.data
            got = _pwritev(fd, table, count, offset) if write else _preadv(fd, table, count, offset)
        elif write:
            got = _pwrite(fd, address + done, part, offset)
        else:
            got = _pread(fd, address + done, part, offset)
        if got < 0:
            return np.int64(_load_i32(_errno_location()))
        if got < part:
            return np.int64(SHORT)
        done += part
    return np.int64(0)


@numba.njit
def perform(fds: Any, segment_nbytes: Any, at: Any, nbytes: Any, runs: Any, write: Any) -> Any:
    """Run one I/O, with retries; return its status."""
    status = _once(fds, segment_nbytes, at, nbytes, runs, write)
    while status == _EINTR:
        status = _once(fds, segment_nbytes, at, nbytes, runs, write)
    # A full disk first writes less than requested, and only the retry returns ENOSPC. It is short again at a file end.
    if status == SHORT:
        status = _once(fds, segment_nbytes, at, nbytes, runs, write)
    return status


def _transfer(
    pieces: Any, piece_runs: Any, fds: Any, segment_nbytes: Any, write: Any, bounce: Any, cursor: Any
) -> None:
    clock = np.zeros(1, TIMESPEC)
    bounced = np.zeros(1, IOVEC)
    bounced[0].address = bounce
    while True:
        p = take_next(cursor)
        if p >= len(pieces):
            return
        piece = pieces[p]
        given = piece_runs[piece.first_run : piece.first_run + piece.num_runs]
        bounced[0].nbytes = piece.nbytes
        runs = given if piece.is_direct else bounced
        if write:
            if not piece.is_direct:
                filled = np.int64(0)
                for r in range(len(given)):
                    _memcpy(bounce + filled, given[r].address, given[r].nbytes)
                    filled += given[r].nbytes
                _memset(bounce + filled, np.int32(0), piece.nbytes - filled)
            piece.checksum = xxh64(runs)
        began = now_ns(clock)
        status = perform(fds, segment_nbytes, piece.offset, piece.nbytes, runs, write)
        piece.status = status
        piece.latency_ns = now_ns(clock) - began
        if not write and status == 0:
            piece.checksum = xxh64(runs)
            if not piece.is_direct:
                filled = np.int64(0)
                for r in range(len(given)):
                    _memcpy(given[r].address, bounce + filled, given[r].nbytes)
                    filled += given[r].nbytes


def _fold(pieces: Any, results: Any) -> None:
    p = 0
    whole = np.zeros(1, IOVEC)
    while p < len(pieces):
        first = p
        result = results[pieces[first].extent]
        while p < len(pieces) and pieces[p].extent == pieces[first].extent:
            if pieces[p].status != 0 and result.status == 0:
                result.status = pieces[p].status
            p += 1
        if p - first == 1:
            result.checksum = pieces[first].checksum
        else:
            padded = np.zeros((p - first + 3) // 4 * 4, np.uint64)
            for i in range(p - first):
                padded[i] = pieces[first + i].checksum
            whole[0].address = padded.ctypes.data
            whole[0].nbytes = len(padded) * 8
            result.checksum = xxh64(whole)
