"""The table of grants for compiled loops, and the fence between those loops and a revoke.

A grant has one of the 8 slots of its bucket (token modulo the number of buckets) or, if the bucket is full, none: then
the loops do not find it, and Python looks it up in the table of all grants. One thread at a time writes.

The fence, for a loop that moves bytes under grant number N and a thread that revokes it (S: slot, I: the loop's word
`inside`, W: `waiting`; every store is followed by a sequentially consistent fence):

    loop (enter)                        revoke (GrantTable._changed held)
      I = N                               S.placement = 0
      S.placement still the same?         I == N?
        yes: inside, moves bytes            yes: W += 1, sleep until notified, W -= 1
        no:  I = 0, not admitted            no:  no byte can move under N
    loop (leave)
      I = 0
      W > 0?  yes: return to Python, which notifies the revoke

Since both sides store before they load, at least one of them sees the other's store. A slot's `placement` is never
reused: fields that were read between two loads of the same placement belong to one grant.

Lifetimes: the table of slots lives as long as its GrantTable; a loop's `inside` from `open_loop` to `close_loop`, both
called by the connection's thread.
"""

import functools
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt
from numba import types
from numba.np.numpy_support import carray

from jit.compiling import compiled
from messenger.link import Cuttable
from messenger.memory import Region, RemoteKey
from messenger.native.atomics import (
    fence_acquire,
    fence_all,
    fence_release,
    load_acquire,
    load_field_acquire,
    store_field_release,
    store_release,
)
from messenger.native.libc import pointer_u64, record_at
from messenger.native.records import GRANT_SLOT

Words = npt.NDArray[np.uint64]

BUCKETS, WAYS = 1024, 8
READ, WRITE = 1, 2
_SLOT_NBYTES = GRANT_SLOT.itemsize

_slot_at = record_at(GRANT_SLOT)


class _Loop(NamedTuple):
    """A connection's loop. The first word of `inside` uint64 [8] is the number of the grant in use, or 0."""

    inside: Words
    mover: Cuttable


class GrantSlots:
    """Table of the grants' slots. Calls require the grant table's lock; loops read the table and `waiting` without."""

    def __init__(self) -> None:
        self._slots = np.zeros(BUCKETS * WAYS, GRANT_SLOT)
        self.address = int(self._slots.ctypes.data)
        """Address of the table, GRANT_SLOT records [BUCKETS * WAYS]."""
        self.waiting: Words = np.zeros(1, np.uint64)
        """Number of revokes that wait for a loop to leave its access; the loop then returns to Python."""
        self._kernels = _kernels()
        self._placements = 0
        self._entry = np.zeros(1, GRANT_SLOT)
        self._loops: dict[int, _Loop] = {}

    def open_loop(self, mover: Cuttable) -> Words:
        """Register a loop and return its `inside`, which is watched until `close_loop`."""
        inside: Words = np.zeros(8, np.uint64)  # a cache line
        self._loops[id(inside)] = _Loop(inside, mover)
        return inside

    def close_loop(self, inside: Words) -> None:
        """Remove a loop that has ended."""
        del self._loops[id(inside)]

    def place(self, number: int, key: RemoteKey, region: Region) -> None:
        """Make the grant of the region visible to loops, if its bucket has room; `number` > 0 is the grant's number."""
        self._placements += 1
        rights = READ * key.read | WRITE * key.write
        entry = (self._placements, number, key.token, key.region_id, key.offset, key.offset + key.nbytes, rights)
        units = 0 if region.units is None else region.units.address
        self._entry[0] = (*entry, region.address, units, (0,) * 7)
        self._kernels.place(self.address, int(self._entry.ctypes.data))

    def remove(self, number: int, token: int) -> None:
        """Hide the grant: no loop enters it any more. `movers_inside` returns the loops that are still inside."""
        self._kernels.remove(self.address, number, token)

    def wait(self, amount: int) -> None:
        """Add `amount` (1 or -1) to the number of revokes that wait for loops to leave."""
        self.waiting[0] = int(self.waiting[0]) + amount
        self._kernels.fence()

    def movers_inside(self, number: int) -> list[Cuttable]:
        """Return the movers of the loops that move bytes under the grant now."""
        return [loop.mover for loop in list(self._loops.values()) if loop.inside[0] == number]


class _Kernels(NamedTuple):
    place: Any
    remove: Any
    fence: Any


@functools.cache
def _kernels() -> _Kernels:
    i64, u64 = types.int64, types.uint64
    return _Kernels(
        compiled(_place, types.boolean(i64, i64)),
        compiled(_remove, types.void(i64, u64, u64)),
        compiled(_fence, types.void()),
    )


def _place(slots, entry):  # type: ignore[no-untyped-def]
    new = _slot_at(entry)
    first = _first_slot(slots, new.token)
    for way in range(WAYS):
        slot = _slot_at(first + way * _SLOT_NBYTES)
        if slot.placement == np.uint64(0):
            fence_release()  # a thread that sees one of the new fields also sees that the slot had been emptied
            store_field_release(slot, "number", new.number)
            store_field_release(slot, "token", new.token)
            store_field_release(slot, "region_id", new.region_id)
            store_field_release(slot, "start", new.start)
            store_field_release(slot, "end", new.end)
            store_field_release(slot, "rights", new.rights)
            store_field_release(slot, "address", new.address)
            store_field_release(slot, "units", new.units)
            store_field_release(slot, "placement", new.placement)
            return True
    return False


def _remove(slots, number, token):  # type: ignore[no-untyped-def]
    first = _first_slot(slots, token)
    for way in range(WAYS):
        slot = _slot_at(first + way * _SLOT_NBYTES)
        if slot.placement != np.uint64(0) and slot.number == number:
            store_field_release(slot, "placement", np.uint64(0))
    fence_all()


def _fence():  # type: ignore[no-untyped-def]
    fence_all()


@numba.njit
def _first_slot(slots: Any, token: Any) -> Any:
    """Return the address of the first slot of the token's bucket."""
    return slots + np.int64(token % np.uint64(BUCKETS)) * (WAYS * _SLOT_NBYTES)


@numba.njit
def enter(io: Any, token: Any, region_id: Any, right: Any) -> Any:
    """Enter an access under the token. `io` is the connection's SOCKET record.

    Returns (address of the region, address of its UNITS or 0, start, end) of the grant's window; the first is 0 if
    there is no such grant, or if it does not include the right.
    """
    inside = carray(pointer_u64(io.inside), 1)
    first = _first_slot(io.slots, token)
    for way in range(WAYS):
        slot = _slot_at(first + way * _SLOT_NBYTES)
        placement = load_field_acquire(slot, "placement")
        if placement == np.uint64(0) or load_field_acquire(slot, "token") != token:
            continue
        store_release(inside, 0, load_field_acquire(slot, "number"))
        fence_all()
        allowed = load_field_acquire(slot, "token") == token and load_field_acquire(slot, "region_id") == region_id
        allowed = allowed and (load_field_acquire(slot, "rights") & right) != np.uint64(0)
        start, end = load_field_acquire(slot, "start"), load_field_acquire(slot, "end")
        address, units = load_field_acquire(slot, "address"), load_field_acquire(slot, "units")
        fence_acquire()
        if allowed and load_field_acquire(slot, "placement") == placement:
            return np.int64(address), np.int64(units), np.int64(start), np.int64(end)
        store_release(inside, 0, np.uint64(0))
    return np.int64(0), np.int64(0), np.int64(0), np.int64(0)


@numba.njit
def leave(io: Any) -> Any:
    """Leave the access. Returns True if a revoke waits."""
    store_release(carray(pointer_u64(io.inside), 1), 0, np.uint64(0))
    fence_all()
    return load_acquire(carray(pointer_u64(io.waiting), 1), 0) != np.uint64(0)
