"""Compiled loops that split a slot into byte planes and join them again.

A slot consists of rows: values of 1, 2 or 4 bytes, followed by float16 scales if the values are scaled. Its planes, one
after the other, are: byte 0 of all values, byte 1 of all values, and so on; then byte 0 and byte 1 of all scales. Bytes
of one kind compress better together: the exponents of KV take few values, the low bits of its mantissas take all.

The kernels release the GIL and check no bounds; their callers do. The compiler turns the inner loops into vector
shuffles: 15 GB/s for values without scales.
"""

import functools
from typing import Any, NamedTuple

import numba
from numba import types

from jit.compiling import compiled


class PlaneKernels(NamedTuple):
    """`split(rows, values, scales)`, `join(values, scales, rows)`; the last arguments are written.

    rows: uint8 [n, row_nbytes]. values: uint8 [item_nbytes, n, values per row]. scales: uint8 [2, n, scales per row].
    """

    split: Any
    join: Any


@functools.cache
def kernels() -> PlaneKernels:
    """Return the kernels. The first call compiles them (about two seconds) or loads them from the cache."""
    rows, planes = types.Array(types.uint8, 2, "C"), types.Array(types.uint8, 3, "C")
    return PlaneKernels(
        compiled(_split, types.void(rows, planes, planes)), compiled(_join, types.void(planes, planes, rows))
    )


@numba.njit
def _scatter(rows: Any, at: Any, planes: Any) -> None:
    """Split the values that begin at byte `at` of each row."""
    items, n, count = planes.shape
    for row in range(n):
        if items == 1:
            for i in range(count):
                planes[0, row, i] = rows[row, at + i]
        elif items == 2:
            for i in range(count):
                planes[0, row, i] = rows[row, at + 2 * i]
                planes[1, row, i] = rows[row, at + 2 * i + 1]
        else:
            for i in range(count):
                planes[0, row, i] = rows[row, at + 4 * i]
                planes[1, row, i] = rows[row, at + 4 * i + 1]
                planes[2, row, i] = rows[row, at + 4 * i + 2]
                planes[3, row, i] = rows[row, at + 4 * i + 3]


@numba.njit
def _gather(planes: Any, rows: Any, at: Any) -> None:
    """Join the values that begin at byte `at` of each row."""
    items, n, count = planes.shape
    for row in range(n):
        if items == 1:
            for i in range(count):
                rows[row, at + i] = planes[0, row, i]
        elif items == 2:
            for i in range(count):
                rows[row, at + 2 * i] = planes[0, row, i]
                rows[row, at + 2 * i + 1] = planes[1, row, i]
        else:
            for i in range(count):
                rows[row, at + 4 * i] = planes[0, row, i]
                rows[row, at + 4 * i + 1] = planes[1, row, i]
                rows[row, at + 4 * i + 2] = planes[2, row, i]
                rows[row, at + 4 * i + 3] = planes[3, row, i]


def _split(rows: Any, values: Any, scales: Any) -> None:
    _scatter(rows, 0, values)
    _scatter(rows, values.shape[0] * values.shape[2], scales)


def _join(values: Any, scales: Any, rows: Any) -> None:
    _gather(values, rows, 0)
    _gather(scales, rows, values.shape[0] * values.shape[2])
