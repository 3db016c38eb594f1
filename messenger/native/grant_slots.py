"""The grants as compiled loops see them, and the fence between those loops and a revoke.

A grant stands in one of the 8 slots of the bucket that its token's remainder names, or, where there is no room,
nowhere: what the loops do not find, Python looks up in the table of all grants. One thread at a time writes.

Fence: a loop writes the grant's number into its lane's word `inside`, and only then looks whether the grant still
stands in its slot; a revoke empties the slot, and only then looks into the lanes' words. Both sides are sequentially
consistent, so at least one sees the other. A slot's `placement` is never the same twice: what was read between two
sights of the same placement belongs together.
"""

import functools
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt
from numba import types

from jit.compiling import compiled
from messenger.link import Cuttable
from messenger.memory import RemoteKey
from messenger.native.atomics import fence_acquire, fence_all, fence_release, load_acquire, store_release

Words = npt.NDArray[np.uint64]

BUCKETS, WAYS, WORDS = 1024, 8, 8
NUM_WORDS = BUCKETS * WAYS * WORDS
READ, WRITE = 1, 2
_PLACEMENT, _NUMBER, _TOKEN, _REGION, _START, _END, _RIGHTS, _ADDRESS = range(WORDS)


class _Lane(NamedTuple):
    """One connection's: `inside` uint64 [8], the first being the number of the grant it moves bytes under, or 0."""

    inside: Words
    mover: Cuttable


class GrantSlots:
    """Calls under the lock of the grant table, except for `words` and `waiting`, which loops read."""

    def __init__(self) -> None:
        self.words: Words = np.zeros(NUM_WORDS, np.uint64)
        self.waiting: Words = np.zeros(1, np.uint64)
        """How many revokes wait for a lane: one that leaves then tells Python."""
        self._kernels = _kernels()
        self._placements = 0
        self._lanes: dict[int, _Lane] = {}

    def open_loop(self, mover: Cuttable) -> Words:
        """A new lane's `inside`, watched until it is closed."""
        inside: Words = np.zeros(8, np.uint64)
        self._lanes[id(inside)] = _Lane(inside, mover)
        return inside

    def close_loop(self, inside: Words) -> None:
        """Its loop has ended."""
        del self._lanes[id(inside)]

    def place(self, number: int, key: RemoteKey, address: int) -> None:
        """Let lanes in under the key, if there is room. `number` > 0 is the grant's own, `address` the region's."""
        self._placements += 1
        rights = READ * key.read | WRITE * key.write
        fields = (number, key.token, key.region_id, key.offset, key.offset + key.nbytes, rights, address)
        self._kernels.place(self.words, self._placements, *fields)

    def remove(self, number: int, token: int) -> None:
        """No lane enters under the grant after this; `movers_inside` says which are still in."""
        self._kernels.remove(self.words, number, token)

    def wait(self, amount: int) -> None:
        """One revoke more (1), or less (-1), waits for lanes to leave."""
        self.waiting[0] = int(self.waiting[0]) + amount
        self._kernels.fence()

    def movers_inside(self, number: int) -> list[Cuttable]:
        """Those that move bytes under the grant now."""
        return [lane.mover for lane in list(self._lanes.values()) if lane.inside[0] == number]


class _Kernels(NamedTuple):
    place: Any
    remove: Any
    fence: Any


@functools.cache
def _kernels() -> _Kernels:
    u64, words = types.uint64, types.Array(types.uint64, 1, "C")
    return _Kernels(
        compiled(_place, types.boolean(words, *[u64] * 8)),
        compiled(_remove, types.void(words, u64, u64)),
        compiled(_fence, types.void()),
    )


def _place(words, placement, number, token, region, start, end, rights, address):  # type: ignore[no-untyped-def]
    first = first_slot(token)
    for slot in range(first, first + WAYS * WORDS, WORDS):
        if words[slot] == np.uint64(0):
            fence_release()  # whoever sees one of the new fields sees that the slot had been emptied
            store_release(words, slot + _NUMBER, number)
            store_release(words, slot + _TOKEN, token)
            store_release(words, slot + _REGION, region)
            store_release(words, slot + _START, start)
            store_release(words, slot + _END, end)
            store_release(words, slot + _RIGHTS, rights)
            store_release(words, slot + _ADDRESS, address)
            store_release(words, slot + _PLACEMENT, placement)
            return True
    return False


def _remove(words, number, token):  # type: ignore[no-untyped-def]
    first = first_slot(token)
    for slot in range(first, first + WAYS * WORDS, WORDS):
        if words[slot] != np.uint64(0) and words[slot + _NUMBER] == number:
            store_release(words, slot + _PLACEMENT, np.uint64(0))
    fence_all()


def _fence():  # type: ignore[no-untyped-def]
    fence_all()


@numba.njit
def first_slot(token: Any) -> Any:
    """Where the token's bucket begins."""
    return np.int64(token % np.uint64(BUCKETS)) * (WAYS * WORDS)


@numba.njit
def enter(words: Any, inside: Any, token: Any, region: Any, right: Any) -> Any:
    """(address, start, end) of the grant's window, the lane being inside its fence; address 0: it is not let in."""
    first = first_slot(token)
    for slot in range(first, first + WAYS * WORDS, WORDS):
        placement = load_acquire(words, slot + _PLACEMENT)
        if placement == np.uint64(0) or load_acquire(words, slot + _TOKEN) != token:
            continue
        store_release(inside, 0, load_acquire(words, slot + _NUMBER))
        fence_all()
        allowed = load_acquire(words, slot + _TOKEN) == token and load_acquire(words, slot + _REGION) == region
        allowed = allowed and (load_acquire(words, slot + _RIGHTS) & right) != np.uint64(0)
        start, end = load_acquire(words, slot + _START), load_acquire(words, slot + _END)
        address = load_acquire(words, slot + _ADDRESS)
        fence_acquire()
        if allowed and load_acquire(words, slot + _PLACEMENT) == placement:
            return np.int64(address), np.int64(start), np.int64(end)
        store_release(inside, 0, np.uint64(0))
    return np.int64(0), np.int64(0), np.int64(0)


@numba.njit
def leave(inside: Any, waiting: Any) -> Any:
    """Leave the fence; True when a revoke waits."""
    store_release(inside, 0, np.uint64(0))
    fence_all()
    return load_acquire(waiting, 0) != np.uint64(0)
