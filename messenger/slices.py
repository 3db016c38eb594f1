"""Pure arithmetic on slice lists: int64 [n, 3] rows of (local_offset, remote_offset, nbytes)."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from messenger.errors import InvalidArgument

Rows = npt.NDArray[np.int64]

LOCAL, REMOTE, NBYTES = 0, 1, 2

# Up to so many rows a loop is quicker than numpy's calls.
_FEW = 24


def checked(slices: npt.ArrayLike, region_nbytes: int) -> Rows:
    """The rows as int64 without the empty ones. Raises InvalidArgument unless all lie within the local region."""
    array = np.asarray(slices)
    if array.ndim != 2 or array.shape[1] != 3 or array.dtype.kind not in "iu":
        raise InvalidArgument(f"slices must be integers [n, 3], not {array.dtype} {list(array.shape)}")
    rows: Rows = np.ascontiguousarray(array, dtype=np.int64)
    if not len(rows):
        return rows
    if not within(rows[:, LOCAL], rows[:, NBYTES], 0, region_nbytes) or int(rows[:, REMOTE].min()) < 0:
        raise InvalidArgument(
            f"slices must not be negative, nor reach beyond the local region of {region_nbytes} bytes"
        )
    return rows if rows[:, NBYTES].all() else np.ascontiguousarray(rows[rows[:, NBYTES] > 0])


def within(offsets: Rows, nbytes: Rows, start: int, end: int) -> bool:
    """Whether every [offset, offset + nbytes) lies in [start, end); safe for any int64, hostile ones included."""
    if len(offsets) <= _FEW:
        return all(
            start <= offset and 0 <= length <= end - offset
            for offset, length in zip(offsets.tolist(), nbytes.tolist(), strict=True)
        )
    return bool(((offsets >= start) & (nbytes >= 0) & (nbytes <= end - start) & (offsets <= end - nbytes)).all())


def coalesced(rows: Rows) -> Rows:
    """Neighbours that touch on both sides become one row; the order stays."""
    if len(rows) < 2:
        return rows
    ends = rows[:-1, :NBYTES] + rows[:-1, NBYTES:]
    return _merged(rows, (rows[1:, :NBYTES] != ends).any(axis=1))


def runs(rows: Rows, side: int) -> Rows:
    """int64 [m, 2] (offset, nbytes) of one side alone: the same bytes in the same order, in as few runs as possible."""
    if len(rows) < 2:
        return np.ascontiguousarray(rows[:, [side, NBYTES]])
    breaks = rows[1:, side] != rows[:-1, side] + rows[:-1, NBYTES]
    return np.ascontiguousarray(_merged(rows, breaks)[:, [side, NBYTES]])


def split(rows: Rows, max_nbytes: int, max_rows: int) -> Iterator[tuple[Rows, int]]:
    """The rows in order, in pieces of at most so many bytes and rows, with their bytes; a too long row is cut."""
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
