"""Copying many slices between two mappings of this process in one call, outside the GIL."""

from functools import cache
from typing import Any, Protocol

import numba
import numpy as np
from numba import types

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
