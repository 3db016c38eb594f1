"""The compiled writing of rows of the table of requests, all columns at once. Nothing here checks its arguments."""

import functools
from typing import Any, NamedTuple

from numba import types

from conductor.policy.compiling import decision_kernel
from conductor.policy.turn_columns import NUM_COLUMNS

__all__ = ["TABLE_COLUMNS", "RowKernels", "row_kernels"]

TABLE_COLUMNS = 14


def write(table: Any, turns: Any, row: Any, values: Any, turn: Any) -> None:
    """Into one row: a value for each column of both."""
    for column, value in enumerate(values):
        table[column, row] = value
    for column, value in enumerate(turn):
        turns[column, row] = value


def move(table: Any, turns: Any, source: Any, target: Any) -> None:
    """A row takes another number."""
    for column in range(table.shape[0]):
        table[column, target] = table[column, source]
    for column in range(turns.shape[0]):
        turns[column, target] = turns[column, source]


class RowKernels(NamedTuple):
    """See the functions of the same names."""

    write: Any
    move: Any


@functools.cache
def row_kernels() -> RowKernels:
    """Both, compiled or loaded at the first call."""
    signatures: Any = types
    n = types.int64
    wide, row = types.Array(n, 2, "C"), signatures.UniTuple(n, TABLE_COLUMNS)
    return RowKernels(
        decision_kernel(write, types.void(wide, wide, n, row, signatures.UniTuple(n, NUM_COLUMNS))),
        decision_kernel(move, types.void(wide, wide, n, n)),
    )
