"""Copying many slices between two mappings of this process in one call, outside the GIL.

The compiled side of the grant page: looking a fingerprint up, and copying while it is held; without the GIL.

Words are uint64 [n], in buckets of `WAYS`; a fingerprint stands in the bucket that its remainder names, or nowhere.
"""

import functools
from functools import cache
from typing import Any, NamedTuple, Protocol

import numba
import numpy as np
from numba import types

from jit.compiling import compiled
from messenger.native.atomics import fence_acquire, fence_all, load_acquire, store_release
from messenger.native.libc import POLLRDHUP, poll
from messenger.slices import Rows

_memcpy: Any = types.ExternalFunction("memcpy", types.uint64(types.uint64, types.uint64, types.uint64))
_SIGNATURE = types.void(
    types.uint64, types.uint64, types.Array(types.int64, 2, "C", readonly=True), types.int64, types.int64
)


class CopyRows(Protocol):
    """`(destination, source, rows, destination_column, source_column)`.

    Copies, row by row, rows[:, 2] bytes from source + rows[:, source_column] to destination + rows[:,
    destination_column]. The addresses are those of the mappings; nothing is checked here.
    """

    def __call__(
        self, destination: int, source: int, rows: Rows, destination_column: int, source_column: int
    ) -> None: ...


def _copy_rows(destination, source, rows, destination_column, source_column):  # type: ignore[no-untyped-def]
    for row in range(rows.shape[0]):
        _memcpy(
            np.uint64(destination + np.uint64(rows[row, destination_column])),
            np.uint64(source + np.uint64(rows[row, source_column])),
            np.uint64(rows[row, 2]),
        )


@cache
def copy_rows() -> CopyRows:
    """The compiled copy; compiling takes a moment once per installation, so call it before traffic comes."""
    compiled: CopyRows = numba.njit(_SIGNATURE, nogil=True, cache=True)(_copy_rows)
    return compiled


WAYS = 8


class PageKernels(NamedTuple):
    """`holds(words, fingerprint) -> bool`: what was read before is read before this, what comes after, after it.
    `replace(words, old, new) -> bool`: put `new` where `old` stands in the bucket of the one that is not 0, and let
    everybody see it before anything that is done later.
    `copy_held(words, fingerprint, fd, destination, source, rows, destination_column, source_column) -> bool`: as
    `CopyRows`; False when the fingerprint was not there before, or not after, the copy, or the other
    side of the socket `fd` is gone after it.
    `copy_one(words, fingerprint, fd, destination, source, nbytes) -> bool`: the same of one run, by its addresses.
    """

    holds: Any
    replace: Any
    copy_held: Any
    copy_one: Any


@functools.cache
def page_kernels() -> PageKernels:
    """Compiled, or loaded from the cache, at the first call."""
    words, own_words = types.Array(types.uint64, 1, "C", readonly=True), types.Array(types.uint64, 1, "C")
    rows = types.Array(types.int64, 2, "C", readonly=True)
    u64, i64 = types.uint64, types.int64
    return PageKernels(
        compiled(_holds, types.boolean(words, u64)),
        compiled(_replace, types.boolean(own_words, u64, u64)),
        compiled(_copy_held, types.boolean(words, u64, i64, u64, u64, rows, i64, i64)),
        compiled(_copy_one, types.boolean(words, u64, i64, u64, u64, u64)),
    )


@numba.njit(inline="always")
def _bucket(words: Any, fingerprint: Any) -> Any:
    return np.int64(fingerprint % np.uint64(len(words) // WAYS)) * WAYS


@numba.njit
def _is_held(words: Any, fingerprint: Any) -> Any:
    first = _bucket(words, fingerprint)
    fence_acquire()
    found = False
    for place in range(first, first + WAYS):
        found |= load_acquire(words, place) == fingerprint
    return found


def _holds(words, fingerprint):  # type: ignore[no-untyped-def]
    return _is_held(words, fingerprint)


def _replace(words, old, new):  # type: ignore[no-untyped-def]
    first = _bucket(words, max(old, new))
    for place in range(first, first + WAYS):
        if words[place] == old:
            store_release(words, place, new)
            fence_all()
            return True
    return False


@numba.njit
def _is_good(words, fingerprint, fd):  # type: ignore[no-untyped-def]
    """Whether the fingerprint is there, and then the other side too: its mapping outlives it."""
    look = np.empty(1, np.int64)
    look[0] = fd | (POLLRDHUP << 32)
    return _is_held(words, fingerprint) and poll(look.ctypes.data, np.int64(1), np.int32(0)) == 0


def _copy_one(words, fingerprint, fd, destination, source, nbytes):  # type: ignore[no-untyped-def]
    if not _is_held(words, fingerprint):
        return False
    _memcpy(destination, source, nbytes)
    return _is_good(words, fingerprint, fd)


def _copy_held(words, fingerprint, fd, destination, source, rows, destination_column, source_column):  # type: ignore[no-untyped-def]
    if not _is_held(words, fingerprint):
        return False
    for row in range(rows.shape[0]):
        _memcpy(
            np.uint64(destination + np.uint64(rows[row, destination_column])),
            np.uint64(source + np.uint64(rows[row, source_column])),
            np.uint64(rows[row, 2]),
        )
    return _is_good(words, fingerprint, fd)
