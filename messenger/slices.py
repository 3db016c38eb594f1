"""Arithmetic on lists of slices, int64 [n, 3] rows of (local_offset, remote_offset, nbytes). Pure."""

import struct
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from rpc.errors import InvalidArgument

Rows = npt.NDArray[np.int64]

LOCAL, REMOTE, NBYTES = 0, 1, 2

# Up to this number of rows, a loop is faster than numpy.
FEW = 24
_MAX_OFFSET = (1 << 63) - 1
_INT64 = np.dtype(np.int64)
_ONE_ROW, _ONE_RUN = struct.Struct("<3q"), struct.Struct("<2q")


class Slices:
    """Slices of one request: checked, without empty ones, and with adjacent ones merged.

    Up to FEW slices are kept as tuples, because most requests have one or two, for which numpy would take longer than
    sending them; more are kept as an array.
    """

    __slots__ = ("_few", "_rows", "nbytes")

    def __init__(self, nbytes: int, few: list[tuple[int, int, int]] | None, rows: Rows | None) -> None:
        self.nbytes = nbytes
        self._few = few
        self._rows = rows

    @classmethod
    def of(cls, slices: npt.ArrayLike, region_nbytes: int) -> "Slices":
        """Check and merge slices. Raises InvalidArgument unless they are integers [n, 3] within the local region."""
        few = _few(slices, region_nbytes)
        if few is not None:
            return few
        rows = coalesced(checked(slices, region_nbytes))
        return cls(int(rows[:, NBYTES].sum()), None, rows)

    def __len__(self) -> int:
        return len(self._rows) if self._few is None else len(self._few)  # type: ignore[arg-type]

    @property
    def only(self) -> tuple[int, int, int] | None:
        """(local_offset, remote_offset, nbytes) if there is exactly one slice, kept as a tuple; else None."""
        few = self._few
        return few[0] if few is not None and len(few) == 1 else None

    @property
    def rows(self) -> Rows:
        """Slices as int64 [n, 3]."""
        if self._rows is None:
            self._rows = np.array(self._few, dtype=np.int64).reshape(-1, 3)
        return self._rows

    def split(self, max_nbytes: int, max_rows: int) -> "list[Slices]":
        """Return the slices in order, in pieces of at most `max_nbytes` and `max_rows`; long slices are cut."""
        if self.nbytes <= max_nbytes and len(self) <= max_rows:
            return [self] if self.nbytes else []
        return [Slices(nbytes, None, rows) for rows, nbytes in split(self.rows, max_nbytes, max_rows)]

    def extent(self, side: int) -> tuple[int, int]:
        """Return (start, end) of one side, which contains all slices; there must be at least one."""
        few = self._few
        if few is None:
            rows = self.rows
            return int(rows[:, side].min()), int((rows[:, side] + rows[:, NBYTES]).max())
        if len(few) == 1:
            return few[0][side], few[0][side] + few[0][NBYTES]
        return min(row[side] for row in few), max(row[side] + row[NBYTES] for row in few)

    def packed(self) -> bytes:
        """Return the rows as bytes, int64 [n, 3]."""
        few = self._few
        if few is None:
            return self.rows.tobytes()
        if len(few) == 1:
            return _ONE_ROW.pack(*few[0])
        return _packing(3 * len(few)).pack(*(number for row in few for number in row))

    def packed_runs(self, side: int) -> bytes:
        """Return `runs` as bytes, int64 [m, 2]."""
        few = self._few
        if few is None:
            return runs(self.rows, side).tobytes()
        if len(few) == 1:
            return _ONE_RUN.pack(few[0][side], few[0][NBYTES])
        merged = self.runs(side)
        return _packing(2 * len(merged)).pack(*(number for run in merged for number in run))

    def runs(self, side: int) -> Sequence[Sequence[int]]:
        """Return (offset, nbytes) of one side: the same bytes in the same order, in as few runs as possible."""
        few = self._few
        if few is None:
            listed: list[list[int]] = runs(self.rows, side).tolist()
            return listed
        if len(few) == 1:
            return ((few[0][side], few[0][NBYTES]),)
        merged: list[tuple[int, int]] = []
        for row in few:
            offset, nbytes = row[side], row[NBYTES]
            if merged and sum(merged[-1]) == offset:
                merged[-1] = merged[-1][0], merged[-1][1] + nbytes
            else:
                merged.append((offset, nbytes))
        return merged


def _few(slices: Any, region_nbytes: int) -> Slices | None:
    """Return a few valid slices; None if there are many, or if they need the full check."""
    if isinstance(slices, np.ndarray):
        slices = slices.tolist() if slices.dtype is _INT64 and slices.size <= 3 * FEW else None
    if type(slices) not in (list, tuple) or not 0 < len(slices) <= FEW:
        return None
    few: list[tuple[int, int, int]] = []
    total = 0
    try:
        for local, remote, nbytes in slices:
            if not (type(local) is type(remote) is type(nbytes) is int):
                return None
            if local < 0 or remote < 0 or nbytes < 0 or nbytes > region_nbytes - local or remote > _MAX_OFFSET - nbytes:
                return None
            if not nbytes:
                continue
            total += nbytes
            if few:
                last = few[-1]
                if last[0] + last[2] == local and last[1] + last[2] == remote:
                    few[-1] = last[0], last[1], last[2] + nbytes
                    continue
            few.append((local, remote, nbytes))
    except (TypeError, ValueError):
        return None
    return Slices(total, few, None)


@cache
def _packing(numbers: int) -> struct.Struct:
    return struct.Struct(f"<{numbers}q")


def checked(slices: npt.ArrayLike, region_nbytes: int) -> Rows:
    """Return the rows as int64 without empty ones. Raises InvalidArgument unless all lie within the local region."""
    array = np.asarray(slices)
    if array.ndim != 2 or array.shape[1] != 3 or array.dtype.kind not in "iu":
        raise InvalidArgument(f"slices must be integers [n, 3], got {array.dtype} {list(array.shape)}")
    rows: Rows = np.ascontiguousarray(array, dtype=np.int64)
    if not len(rows):
        return rows
    if not within(rows[:, LOCAL], rows[:, NBYTES], 0, region_nbytes) or int(rows[:, REMOTE].min()) < 0:
        raise InvalidArgument(f"slices must not be negative, nor exceed the local region of {region_nbytes} bytes")
    return rows if rows[:, NBYTES].all() else np.ascontiguousarray(rows[rows[:, NBYTES] > 0])


def within(offsets: Rows, nbytes: Rows, start: int, end: int) -> bool:
    """Return True if every [offset, offset + nbytes) lies in [start, end); correct for any int64, without overflow."""
    if len(offsets) == 1:
        offset, length = int(offsets[0]), int(nbytes[0])
        return start <= offset and 0 <= length <= end - offset
    if len(offsets) <= FEW:
        return all(
            start <= offset and 0 <= length <= end - offset
            for offset, length in zip(offsets.tolist(), nbytes.tolist(), strict=True)
        )
    return bool(((offsets >= start) & (nbytes >= 0) & (nbytes <= end - start) & (offsets <= end - nbytes)).all())


def coalesced(rows: Rows) -> Rows:
    """Merge consecutive rows that are adjacent on both sides; keeps the order."""
    if len(rows) < 2:
        return rows
    ends = rows[:-1, :NBYTES] + rows[:-1, NBYTES:]
    return _merged(rows, (rows[1:, :NBYTES] != ends).any(axis=1))


def runs(rows: Rows, side: int) -> Rows:
    """Return int64 [m, 2] (offset, nbytes) of one side: the same bytes and order, in as few runs as possible."""
    if len(rows) < 2:
        return np.ascontiguousarray(rows[:, [side, NBYTES]])
    breaks = rows[1:, side] != rows[:-1, side] + rows[:-1, NBYTES]
    return np.ascontiguousarray(_merged(rows, breaks)[:, [side, NBYTES]])


def split(rows: Rows, max_nbytes: int, max_rows: int) -> Iterator[tuple[Rows, int]]:
    """Yield (rows, their bytes) in order, in pieces of at most `max_nbytes` and `max_rows`; long rows are cut."""
    total = int(rows[:, NBYTES].sum())
    if len(rows) <= max_rows and total <= max_nbytes:
        yield rows, total
        return
    rows = _cut(rows, max_nbytes)
    ends = np.cumsum(rows[:, NBYTES])
    first = 0
    while first < len(rows):
        sent = int(ends[first - 1]) if first else 0
        last = min(int(np.searchsorted(ends, sent + max_nbytes, side="right")), first + max_rows)
        yield rows[first:last], int(ends[last - 1]) - sent
        first = last


def _merged(rows: Rows, breaks: npt.NDArray[np.bool_]) -> Rows:
    if breaks.all():
        return rows
    firsts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    merged = rows[firsts].copy()
    merged[:, NBYTES] = np.add.reduceat(rows[:, NBYTES], firsts)
    return merged


def _cut(rows: Rows, max_nbytes: int) -> Rows:
    pieces = -(-rows[:, NBYTES] // max_nbytes)
    cut = np.repeat(rows, pieces, axis=0)
    skipped = (np.arange(len(cut)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * max_nbytes
    cut[:, LOCAL] += skipped
    cut[:, REMOTE] += skipped
    cut[:, NBYTES] = np.minimum(cut[:, NBYTES] - skipped, max_nbytes)
    return cut
