"""All compiled loops of a directory's table, for the signatures they are called with."""

import functools
from typing import Any, NamedTuple

from numba import types

from conductor.directory import changes, reading
from jit.compiling import compiled

__all__ = ["Kernels", "directory_kernels"]


class Kernels(NamedTuple):
    """See the functions of the same names; each takes the addresses of a table's arrays first."""

    store: Any
    remove: Any
    match: Any
    split: Any
    purge: Any
    extract: Any


@functools.cache
def directory_kernels() -> Kernels:
    """All of them, compiled or loaded at the first call."""
    u32, u64, i64 = (types.Array(kind, 1, "C") for kind in (types.uint32, types.uint64, types.int64))
    wide, flags = types.Array(types.int64, 2, "C"), types.Array(types.uint8, 1, "C")
    keys = types.Array(types.uint64, 1, "C", readonly=True)
    n, fold, seed = types.int64, types.uint64, types.uint64
    return Kernels(
        compiled(changes.store, n(i64, keys, u32, fold, seed, n)),
        compiled(changes.remove, n(i64, keys, n, fold, seed, n)),
        # A decision waits for it.
        compiled(reading.match, n(i64, keys, fold, seed, i64, wide), nogil=False),
        compiled(changes.split, types.void(i64, n, n, u32)),
        compiled(changes.purge, n(i64, n, n, flags, seed)),
        compiled(reading.extract, n(i64, n, n, flags, u64, u32)),
    )
