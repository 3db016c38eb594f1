"""Digests of the units of a region (layers of slots), computed by the compiled loops in the pass that writes them.

A unit has an entry, with the digest (defined in `kvpool.digest`, all tokens valid) of what the last write of the whole
unit put there. Nobody takes a lock. Every write of any byte of a unit, whole or not, by a compiled loop or by Python,
goes through these steps; W is the number of the write, `begun` and `ended` count all of the unit:

    begin    W = begun += 1; the write is alone if ended is W - 1
    move the bytes
    finish   only a compiled loop that wrote the whole unit, and only if it was alone when it began:
                 digest, token = those of this write; then version = W
    end      ended += 1, also if the connection ended in the middle

An entry is valid under a token if version is begun and the token is that of the write. So an entry is void from before
a later write changes the first byte, and stays void if two writes overlapped, whatever the memory then contains. Two
writes never finish at a time: the later one is not alone. A new grant has a new token, which voids all earlier entries.
What this process itself writes into a region is not recorded: a digest tells nothing of units that this process writes
while a peer holds a key for them.

Writes through a window (`GrantTable.expose`) take no such steps: the first one that may write voids the whole table.
Lifetime: as long as the region's, which grants and accesses in progress keep alive.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt
from numba import types
from numba.np.numpy_support import carray

from jit.compiling import compiled
from jit.digest_mix import mix
from messenger.memory import UnitSection, WrittenUnits
from messenger.native.atomics import add_to_field, load_field_acquire, store_field_release
from messenger.native.libc import address_of, memmove, pointer_u32, record_at
from messenger.native.records import MAX_PIECES, ROW, UNIT_ENTRY, UNIT_SECTION, UNITS
from messenger.native.socket_io import receive, row_at
from messenger.slices import Rows
from rpc.errors import InvalidArgument

BATCH_NBYTES = 256 << 10
"""Bytes that are received before they are digested: a part of a core's cache."""
_SECTION_NBYTES, _ENTRY_NBYTES, _ROW_NBYTES = UNIT_SECTION.itemsize, UNIT_ENTRY.itemsize, ROW.itemsize

_units_at, _section_at, _entry_at = record_at(UNITS), record_at(UNIT_SECTION), record_at(UNIT_ENTRY)


class UnitDigests(WrittenUnits):
    """Digests of the units of one region."""

    def __init__(self, sections: Sequence[UnitSection], region_nbytes: int) -> None:
        """Raises InvalidArgument unless the sections lie in the region, ascend, and are aligned to 4 bytes."""
        rows: list[tuple[int, int, int, int]] = []
        count = end = 0
        for start, unit_nbytes, num_units in sections:
            if start < end or unit_nbytes <= 0 or num_units <= 0 or start % 4 or unit_nbytes % 4:
                raise InvalidArgument(f"units {sections} must be disjoint, ascending and aligned to 4 bytes")
            end = start + unit_nbytes * num_units
            rows.append((start, end, unit_nbytes, count))
            count += num_units
        if end > region_nbytes:
            raise InvalidArgument(f"units end at byte {end} of a region of {region_nbytes} bytes")
        self._sections = np.array(rows, UNIT_SECTION)
        self._entries = np.zeros(count, UNIT_ENTRY)
        addresses = self._sections.ctypes.data, len(rows), self._entries.ctypes.data
        self._units = np.array([(*addresses, 0)], UNITS)
        self._kernels = _kernels()
        self.address = int(self._units.ctypes.data)
        """Address of the UNITS record."""

    def find(self, offsets: npt.NDArray[np.int64], token: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.bool_]]:
        digests, are_valid = np.zeros(len(offsets), np.uint64), np.zeros(len(offsets), np.bool_)
        self._kernels.find(self.address, np.ascontiguousarray(offsets, np.int64), token, digests, are_valid)
        return digests, are_valid

    def distrust(self) -> None:
        self._units["distrusted"] = 1

    @contextmanager
    def spoiling(self, rows: Rows) -> Iterator[None]:
        rows = np.ascontiguousarray(rows)
        self._kernels.begin(self.address, rows)
        try:
            yield
        finally:
            self._kernels.end(self.address, rows)


class _UnitKernels(NamedTuple):
    find: Any
    begin: Any
    end: Any


@functools.cache
def _kernels() -> _UnitKernels:
    i64, u64 = types.int64, types.uint64
    offsets, rows = types.Array(i64, 1, "C", readonly=True), types.Array(i64, 2, "C", readonly=True)
    digests, are_valid = types.Array(u64, 1, "C"), types.Array(types.boolean, 1, "C")
    return _UnitKernels(
        compiled(_find, types.void(i64, offsets, u64, digests, are_valid)),
        compiled(_begin_rows, types.void(i64, rows)),
        compiled(_end_rows, types.void(i64, rows)),
    )


def _find(address, offsets, token, digests, are_valid):  # type: ignore[no-untyped-def]
    units = _units_at(address)
    for index in range(len(offsets)):
        unit, start, _ = _unit_of(units, offsets[index])
        if unit < 0 or start != offsets[index]:
            continue
        entry = _entry_at(units.entries + _ENTRY_NBYTES * unit)
        version = load_field_acquire(entry, "version")
        digests[index] = load_field_acquire(entry, "digest")
        is_own = load_field_acquire(entry, "token") == token
        # After the digest: a write that replaces it would have begun before.
        is_last = version != np.uint64(0) and load_field_acquire(entry, "begun") == version
        are_valid[index] = is_own and is_last and load_field_acquire(units, "distrusted") == np.uint64(0)


def _begin_rows(address, rows):  # type: ignore[no-untyped-def]
    _touch(_units_at(address), rows, True)


def _end_rows(address, rows):  # type: ignore[no-untyped-def]
    _touch(_units_at(address), rows, False)


@numba.njit
def _touch(units, rows, begins):  # type: ignore[no-untyped-def]
    for index in range(len(rows)):
        at, end = rows[index, 0], rows[index, 0] + rows[index, 1]
        while at < end:
            unit, start, nbytes = _unit_of(units, at)
            if unit >= 0 and begins:
                _begin(units, unit)
            elif unit >= 0:
                _end(units, unit)
            at = start + nbytes


@numba.njit
def _unit_of(units, offset):  # type: ignore[no-untyped-def]
    """Return (unit, start, nbytes) of the unit that contains a byte; (-1, start, nbytes) of a gap between units."""
    start = np.int64(0)
    for index in range(units.num_sections):
        section = _section_at(units.sections + _SECTION_NBYTES * index)
        if offset < section.start:
            return np.int64(-1), start, section.start - start
        if offset < section.end:
            number = (offset - section.start) // section.unit_nbytes
            first = section.start + number * section.unit_nbytes
            return section.first + number, first, section.unit_nbytes
        start = section.end
    return np.int64(-1), start, np.int64(1 << 62)


# The steps of a write.


@numba.njit
def _begin(units, unit):  # type: ignore[no-untyped-def]
    """Begin a write of a unit. Returns its number, or 0 if it is not alone."""
    entry = _entry_at(units.entries + _ENTRY_NBYTES * unit)
    before = add_to_field(entry, "begun")
    return before + np.uint64(1) if load_field_acquire(entry, "ended") == before else np.uint64(0)


@numba.njit
def _finish(units, unit, number, digest, token):  # type: ignore[no-untyped-def]
    """Record the digest of the whole unit, if the write was alone when it began."""
    entry = _entry_at(units.entries + _ENTRY_NBYTES * unit)
    if number != np.uint64(0):
        store_field_release(entry, "digest", digest)
        store_field_release(entry, "token", token)
        store_field_release(entry, "version", number)


@numba.njit
def _end(units, unit):  # type: ignore[no-untyped-def]
    add_to_field(_entry_at(units.entries + _ENTRY_NBYTES * unit), "ended")


@numba.njit
def copy_into_units(address, token, base, offset, source, nbytes):  # type: ignore[no-untyped-def]
    """Copy `nbytes` bytes at address `source` to `offset` of the region at `base`, whose UNITS are at `address`."""
    units = _units_at(address)
    end = offset + nbytes
    while offset < end:
        unit, start, unit_nbytes = _unit_of(units, offset)
        count = min(end, start + unit_nbytes) - offset
        if unit < 0:
            memmove(base + offset, source, count)
        else:
            number = _begin(units, unit)
            if count == unit_nbytes and source % 4 == 0:
                _finish(units, unit, number, _copied(base + offset, source, count), token)
            else:
                memmove(base + offset, source, count)
            _end(units, unit)
        offset += count
        source += count


@numba.njit
def receive_into_units(io, address, token, rows_at, num_rows, base):  # type: ignore[no-untyped-def]
    """Receive a payload into rows as `socket_io.receive`, of a region with UNITS at `address`, in batches of pieces.

    Each batch is digested while it is in the cache. A piece lies in one unit. Returns False if the connection ended.
    """
    units = _units_at(address)
    index, done = 0, np.int64(0)
    while index < num_rows:
        count, batch_nbytes = 0, np.int64(0)
        while index < num_rows and count < MAX_PIECES and batch_nbytes < BATCH_NBYTES:
            row = row_at(rows_at + _ROW_NBYTES * index)
            if done == row.nbytes:
                index, done = index + 1, np.int64(0)
                continue
            offset = row.offset + done
            unit, start, unit_nbytes = _unit_of(units, offset)
            piece = io.pieces[count]
            piece.offset, piece.nbytes = offset, min(row.nbytes - done, start + unit_nbytes - offset)
            io.piece_units[count] = unit
            io.piece_writes[count] = _begin(units, unit) if unit >= 0 else np.uint64(0)
            done += piece.nbytes
            batch_nbytes += piece.nbytes
            count += 1
        is_complete = receive(io, address_of(io.pieces[0]), count, base, batch_nbytes)
        for piece_index in range(count):
            unit, offset = io.piece_units[piece_index], io.pieces[piece_index].offset
            if unit < 0:
                continue
            nbytes = io.pieces[piece_index].nbytes
            if is_complete and _unit_of(units, offset)[2] == nbytes:
                _finish(units, unit, io.piece_writes[piece_index], _digest(base + offset, nbytes), token)
            _end(units, unit)
        if not is_complete:
            return False
    return True


@numba.njit
def _copied(to, source, nbytes):  # type: ignore[no-untyped-def]
    """Copy a unit. Returns the digest of the words that were stored."""
    words, out = carray(pointer_u32(source), nbytes // 4), carray(pointer_u32(to), nbytes // 4)
    total = np.uint64(0)
    for k in range(len(words)):
        word = words[k]
        out[k] = word
        total += mix(word, k)
    return total


@numba.njit
def _digest(at, nbytes):  # type: ignore[no-untyped-def]
    words = carray(pointer_u32(at), nbytes // 4)
    total = np.uint64(0)
    for k in range(len(words)):
        total += mix(words[k], k)
    return total
