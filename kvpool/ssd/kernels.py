"""The compiled loops of the SSD store: cutting extents into I/Os, carrying them out, summing what they carry.

They run without the GIL and check nothing. Addresses are those of this process; the system's calls are bound by name,
so the loops can be cached on disk.

The checksum of an extent is XXH64 (xxhash.com, seed 0) over each of its pieces, zero padding included, and for an
extent of several pieces XXH64 over their sums, padded with zeros to a multiple of 32 bytes.
"""

import functools
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from jit.compiling import compiled

PIECE_NBYTES = 1 << 20
"""The longest I/O. Part of the format, since checksums are taken per piece."""
MAX_RUNS = 64
"""Runs of memory in one direct I/O at most; the system would take 1024."""
SHORT = -1
"""An I/O's status when the file ended before it did; otherwise 0 or an errno."""

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
    """`plan(offsets, first_run, runs, segment_nbytes, pieces, piece_runs, counts)`
    `transfer(pieces, piece_runs, fds, segment_nbytes, write, bounce, cursor, sums, status, nanos)`
    `fold(pieces, sums, status, extent_sums, extent_status)`

    offsets int64 [n]; first_run int64 [n + 1]; runs, piece_runs int64 [:, 2] (address, bytes); pieces int64 [:, 6]
    (extent, offset in the space, bytes, first run, runs, direct); counts int64 [2]: the pieces, and their runs; fds
    int32 [segments]; cursor int64 [1], from which every caller of `transfer` takes the next piece until none is left;
    sums uint64, status and nanos int64, per piece.
    """

    plan: Any
    transfer: Any
    fold: Any


@functools.cache
def kernels() -> SsdKernels:
    """Compiled, or loaded from the cache, at the first call: about two seconds when they were never compiled."""
    in1, in2 = types.Array(_i64, 1, "C"), types.Array(_i64, 2, "C")
    fds, u1 = types.Array(types.int32, 1, "C"), types.Array(types.uint64, 1, "C")
    return SsdKernels(
        compiled(_plan, types.void(in1, in1, in2, _i64, in2, in2, in1)),
        compiled(_transfer, types.void(in2, in2, fds, _i64, types.boolean, _i64, in1, u1, in1, in1)),
        compiled(_fold, types.void(in2, u1, in1, u1, in1)),
    )


def _load(of: Any, llvm_type: Any) -> Any:
    """`f(address)`: the number of this type that stands at an address."""

    def typed(_typing: Any, _address: Any) -> Any:
        def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            return builder.load(builder.inttoptr(args[0], llvm_type.as_pointer()), align=llvm_type.width // 8)

        return of(_i64), codegen

    return intrinsic(typed)


def _fetch_and_add(_typing: Any, _cursor: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        cursor = context.make_array(signature.args[0])(context, builder, args[0])
        return builder.atomic_rmw("add", cursor.data, cgutils.intp_t(1), "seq_cst")

    return _i64(_cursor), codegen


_load_u64 = _load(types.uint64, cgutils.intp_t)
_load_i32 = _load(types.int32, cgutils.int32_t)
_take_next: Any = intrinsic(_fetch_and_add)  # cursor[0]++, atomically


@numba.njit(inline="always")
def _rotate(x: Any, bits: Any) -> Any:
    return (x << np.uint64(bits)) | (x >> np.uint64(64 - bits))


@numba.njit(inline="always")
def _round(lane: Any, word: Any) -> Any:
    return _rotate(lane + word * _P2, 31) * _P1


@numba.njit
def _stripes(address: Any, nbytes: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """XXH64's four lanes after `nbytes` more, a multiple of 32."""
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
def _xxh64(runs: Any) -> Any:
    """Of several runs of memory one after the other, each a multiple of 32 bytes long."""
    a, b, c, d = _P1 + _P2, _P2, np.uint64(0), np.uint64(0) - _P1
    nbytes = np.int64(0)
    for r in range(len(runs)):
        a, b, c, d = _stripes(runs[r, 0], runs[r, 1], a, b, c, d)
        nbytes += runs[r, 1]
    return _finish(a, b, c, d, nbytes)


def _plan(
    offsets: Any, first_run: Any, runs: Any, segment_nbytes: Any, pieces: Any, piece_runs: Any, counts: Any
) -> None:
    p = 0
    k = 0
    for extent in range(len(offsets)):
        payload = 0
        for r in range(first_run[extent], first_run[extent + 1]):
            payload += runs[r, 1]
        whole = (payload + _PAGE - 1) // _PAGE * _PAGE
        r = first_run[extent]
        used = 0  # of run r
        for start in range(0, whole, PIECE_NBYTES):
            nbytes = min(PIECE_NBYTES, whole - start)
            left = min(nbytes, payload - start)
            at = offsets[extent] + start
            first = k
            direct = left == nbytes and at // segment_nbytes == (at + nbytes - 1) // segment_nbytes
            while left > 0:
                part = min(left, runs[r, 1] - used)
                piece_runs[k, 0] = runs[r, 0] + used
                piece_runs[k, 1] = part
                direct = direct and piece_runs[k, 0] % _PAGE == 0 and part % _PAGE == 0
                left -= part
                used += part
                k += 1
                if used == runs[r, 1]:
                    r += 1
                    used = 0
            pieces[p, 0] = extent
            pieces[p, 1] = at
            pieces[p, 2] = nbytes
            pieces[p, 3] = first
            pieces[p, 4] = k - first
            pieces[p, 5] = direct and k - first <= MAX_RUNS
            p += 1
    counts[0] = p
    counts[1] = k


@numba.njit
def _now_ns(clock: Any) -> Any:
    _clock_gettime(np.int32(_CLOCK_MONOTONIC), clock.ctypes.data)
    return clock[0] * 1_000_000_000 + clock[1]


@numba.njit
def _once(fds: Any, segment_nbytes: Any, at: Any, nbytes: Any, runs: Any, write: Any) -> Any:
    """One try of one I/O; an I/O that crosses segments has one run, and is done in parts."""
    done = np.int64(0)
    address = runs[0, 0]
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
def _perform(fds: Any, segment_nbytes: Any, at: Any, nbytes: Any, runs: Any, write: Any) -> Any:
    status = _once(fds, segment_nbytes, at, nbytes, runs, write)
    while status == _EINTR:
        status = _once(fds, segment_nbytes, at, nbytes, runs, write)
    # A full disk tells of itself only on the second try, a file's end is short again.
    if status == SHORT:
        status = _once(fds, segment_nbytes, at, nbytes, runs, write)
    return status


def _transfer(
    pieces: Any,
    piece_runs: Any,
    fds: Any,
    segment_nbytes: Any,
    write: Any,
    bounce: Any,
    cursor: Any,
    sums: Any,
    status: Any,
    latency_ns: Any,
) -> None:
    clock = np.zeros(2, np.int64)
    bounced = np.zeros((1, 2), np.int64)
    bounced[0, 0] = bounce
    while True:
        p = _take_next(cursor)
        if p >= len(pieces):
            return
        at = pieces[p, 1]
        nbytes = pieces[p, 2]
        given = piece_runs[pieces[p, 3] : pieces[p, 3] + pieces[p, 4]]
        bounced[0, 1] = nbytes
        runs = given if pieces[p, 5] else bounced
        if write:
            if not pieces[p, 5]:
                filled = np.int64(0)
                for r in range(len(given)):
                    _memcpy(bounce + filled, given[r, 0], given[r, 1])
                    filled += given[r, 1]
                _memset(bounce + filled, np.int32(0), nbytes - filled)
            sums[p] = _xxh64(runs)
        began = _now_ns(clock)
        status[p] = _perform(fds, segment_nbytes, at, nbytes, runs, write)
        latency_ns[p] = _now_ns(clock) - began
        if not write and status[p] == 0:
            sums[p] = _xxh64(runs)
            if not pieces[p, 5]:
                filled = np.int64(0)
                for r in range(len(given)):
                    _memcpy(given[r, 0], bounce + filled, given[r, 1])
                    filled += given[r, 1]


def _fold(pieces: Any, sums: Any, status: Any, extent_sums: Any, extent_status: Any) -> None:
    p = 0
    one = np.zeros((1, 2), np.int64)
    while p < len(pieces):
        extent = pieces[p, 0]
        first = p
        while p < len(pieces) and pieces[p, 0] == extent:
            if status[p] != 0 and extent_status[extent] == 0:
                extent_status[extent] = status[p]
            p += 1
        if p - first == 1:
            extent_sums[extent] = sums[first]
        else:
            padded = np.zeros((p - first + 3) // 4 * 4, np.uint64)
            padded[: p - first] = sums[first:p]
            one[0, 0] = padded.ctypes.data
            one[0, 1] = len(padded) * 8
            extent_sums[extent] = _xxh64(one)
