"""Compiled functions of shm, without the GIL: copies between mappings, and the look-ups in a grant page.

A grant page is uint64 [n] words in buckets of `WAYS`. A fingerprint is in its bucket (modulo the number of buckets) or
not in the page.
"""

import functools
from typing import Any, NamedTuple, Protocol

import numba
import numpy as np
from numba import types

from jit.compiling import compiled
from messenger.native.atomics import fence_acquire, fence_all, load_acquire, store_release
from messenger.native.libc import POLLRDHUP, poll
from messenger.native.records import POLLFD
from messenger.slices import Rows

WAYS = 8

_memcpy: Any = types.ExternalFunction("memcpy", types.uint64(types.uint64, types.uint64, types.uint64))
_ROWS = types.Array(types.int64, 2, "C", readonly=True)


class CopyRows(Protocol):
    """`copy(destination, source, rows, destination_column, source_column)`: copy many slices between two mappings.

    Copies, row by row, rows[:, 2] bytes from source + rows[:, source_column] to destination + rows[:,
    destination_column]. The addresses are those of the mappings; nothing is checked.
    """

    def __call__(
        self, destination: int, source: int, rows: Rows, destination_column: int, source_column: int
    ) -> None: ...


class PageKernels(NamedTuple):
    """Compiled functions over the words of a grant page.

    `holds(words, fingerprint) -> bool`: return True if the page holds the fingerprint. Earlier reads happen before it,
    later ones after it.
    `replace(words, old, new) -> bool`: replace `old` by `new`, in the bucket of the one that is not 0. The store is
    visible to all threads and processes before any later access. Returns False if `old` is not there.
    `copy_held(words, fingerprint, fd, destination, source, rows, destination_column, source_column) -> bool`: copy as
    CopyRows. Returns True if the page held the fingerprint before and after the copy, and the other side of the socket
    `fd` was alive after it.
    `copy_one(words, fingerprint, fd, destination, source, nbytes) -> bool`: the same for one run of bytes.
    """

    holds: Any
    replace: Any
    copy_held: Any
    copy_one: Any


@functools.cache
def copy_rows() -> CopyRows:
    """Return the compiled copy; compiling takes a moment once per installation, so call this before traffic starts."""
    u64, i64 = types.uint64, types.int64
    kernel: CopyRows = numba.njit(types.void(u64, u64, _ROWS, i64, i64), nogil=True, cache=True)(_copy_rows)
    return kernel


@functools.cache
def page_kernels() -> PageKernels:
    """Return the functions, compiled or loaded from the cache at the first call."""
    words, own_words = types.Array(types.uint64, 1, "C", readonly=True), types.Array(types.uint64, 1, "C")
    u64, i64 = types.uint64, types.int64
    return PageKernels(
        compiled(_holds, types.boolean(words, u64)),
        compiled(_replace, types.boolean(own_words, u64, u64)),
        compiled(_copy_held, types.boolean(words, u64, i64, u64, u64, _ROWS, i64, i64)),
        compiled(_copy_one, types.boolean(words, u64, i64, u64, u64, u64)),
    )


@numba.njit
def _copy(destination, source, rows, destination_column, source_column):  # type: ignore[no-untyped-def]
    for index in range(rows.shape[0]):
        _memcpy(
            np.uint64(destination + np.uint64(rows[index, destination_column])),
            np.uint64(source + np.uint64(rows[index, source_column])),
            np.uint64(rows[index, 2]),
        )


def _copy_rows(destination, source, rows, destination_column, source_column):  # type: ignore[no-untyped-def]
    _copy(destination, source, rows, destination_column, source_column)


@numba.njit(inline="always")
def _bucket(words: Any, fingerprint: Any) -> Any:
    return np.int64(fingerprint % np.uint64(len(words) // WAYS)) * WAYS


@numba.njit
def _is_held(words: Any, fingerprint: Any) -> Any:
    first = _bucket(words, fingerprint)
    fence_acquire()
    found = False
    for index in range(first, first + WAYS):
        found |= load_acquire(words, index) == fingerprint
    return found


def _holds(words, fingerprint):  # type: ignore[no-untyped-def]
    return _is_held(words, fingerprint)


def _replace(words, old, new):  # type: ignore[no-untyped-def]
    first = _bucket(words, max(old, new))
    for index in range(first, first + WAYS):
        if words[index] == old:
            store_release(words, index, new)
            fence_all()
            return True
    return False


@numba.njit
def _is_good(words, fingerprint, fd):  # type: ignore[no-untyped-def]
    """Return True if the fingerprint is there and the peer, checked afterwards, is alive: its mapping outlives it."""
    events = np.empty(1, POLLFD)
    events[0].fd, events[0].events, events[0].revents = np.int32(fd), np.int16(POLLRDHUP), np.int16(0)
    return _is_held(words, fingerprint) and poll(events.ctypes.data, np.int64(1), np.int32(0)) == 0


def _copy_one(words, fingerprint, fd, destination, source, nbytes):  # type: ignore[no-untyped-def]
    if not _is_held(words, fingerprint):
        return False
    _memcpy(destination, source, nbytes)
    return _is_good(words, fingerprint, fd)


def _copy_held(words, fingerprint, fd, destination, source, rows, destination_column, source_column):  # type: ignore[no-untyped-def]
    if not _is_held(words, fingerprint):
        return False
    _copy(destination, source, rows, destination_column, source_column)
    return _is_good(words, fingerprint, fd)
