"""All compiled loops of a directory's table, for the signatures they are called with."""

import functools
from typing import Any, NamedTuple

from numba import types

from kvpool import directory_changes, directory_reading
from kvpool.directory_layout import Table
from messenger.native.compiling import compiled

__all__ = ["Kernels", "directory_kernels"]


class Kernels(NamedTuple):
    """See the functions of the same names."""

    store: Any
    remove: Any
    match: Any
    split: Any
    purge: Any
    extract: Any


@functools.cache
def directory_kernels() -> Kernels:
    """All of them, compiled or loaded at the first call."""
    u32, u64, i32, i64 = (types.Array(kind, 1, "C") for kind in (types.uint32, types.uint64, types.int32, types.int64))
    wide, flags = types.Array(types.int64, 2, "C"), types.Array(types.uint8, 1, "C")
    keys = types.Array(types.uint64, 1, "C", readonly=True)
    table = types.NamedTuple((u32, i32, i32, i32, u32, i64, wide, u64), Table)  # type: ignore[no-untyped-call]
    n, fold, seed = types.int64, types.uint64, types.uint64
    return Kernels(
        compiled(directory_changes.store, n(table, keys, u32, fold, seed, n)),
        compiled(directory_changes.remove, n(table, keys, n, fold, seed, n)),
        compiled(directory_reading.match, n(table, keys, fold, seed, u32, wide, wide)),
        compiled(directory_changes.split, types.void(table, n, n, seed, u32)),
        compiled(directory_changes.purge, n(table, n, n, flags, seed)),
        compiled(directory_reading.extract, n(table, n, n, flags, u64, u32)),
    )
