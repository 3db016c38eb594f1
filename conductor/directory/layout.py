"""Memory layout of a directory's table. The loops over it are in `kernels.py`.

A block has a *slot*: its key in `keys` and its holders in `held`, which is 0 if the slot is free. A block keeps its
slot as long as it has a holder. Slots are allocated next-fit, so that blocks stored together are adjacent and a chain's
next block is usually in the next slot: a chain is read sequentially, and keys are looked up only where it is
interrupted. The key of the next slot is always checked; there are no links to maintain.

If bit 31 of `held` is clear, it is the block's single replica as a *code*: node number * 2, plus 1 if the block is on
SSD only. If it is set, the other bits are the index of a row of `rows`, in units of four words, with several replicas.

A row of class c has 4 << c words. In a list, word 0 is c << 24 | count, followed by codes. In a dense row, for blocks
with many holders, bit 31 of word 0 is also set, and from word 2 on there are two bitmaps over node numbers: held, and
of these on SSD only.

A *place* is two uint32: the upper half of a key's hash, and its slot + 1, or 0 if the place is free. A *segment* has
2,048 places with linear probing that wraps around within it. `top` maps the leading bits of a key's hash to its segment
(extendible hashing: Fagin et al., ACM TODS 4(3), 1979), so the table grows by splitting one segment at a time. Deletion
shifts back the following entries (Knuth, TAOCP 3, 6.4, algorithm R), so there are no tombstones.
"""

import contextlib
import mmap
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

SEGMENT = 2048
MAX_FILL = 1792  # maximum keys per segment, a load factor of 7/8
SHIFT, USED, DENSE, NEED, END, CURSOR, LIVE, FREE = range(8)  # in `meta`; from FREE on, the first free row per class
ROW_CLASSES = 28
NEED_ROWS, NEED_SLOTS = -1, -2  # values of meta[NEED]; otherwise the number of a full segment


class Table(NamedTuple):
    """Arrays of a table. Kernels get their addresses (`addresses_of`), since passing many arrays takes microseconds."""

    places: NDArray[np.uint32]  # [segments * SEGMENT * 2]
    fill: NDArray[np.int32]  # [segments] number of keys
    depth: NDArray[np.int32]  # [segments] number of leading hash bits that its keys have in common
    top: NDArray[np.int32]  # [2 ** depth of the table]
    keys: NDArray[np.uint64]  # [slots]
    held: NDArray[np.uint32]  # [slots]
    rows: NDArray[np.uint32]
    meta: NDArray[
        np.int64
    ]  # SHIFT: 64 - depth of the table; USED words of rows; DENSE: class; slots: END, CURSOR, LIVE
    counts: NDArray[np.int64]  # [numbers, 2] blocks per node: in DRAM, on SSD only
    sums: NDArray[np.uint64]  # [numbers] contents checksums (`kvpool.events`)
    alive: NDArray[np.uint32]  # scratch: a bitmap over numbers
    state: NDArray[np.int64]  # [numbers, 2] scratch, zeros between calls: depth and blocks on SSD
    found: NDArray[np.int64]  # [numbers] scratch: node numbers


def addresses_of(table: Table) -> NDArray[np.int64]:
    """Return address and length (in words of eight bytes) of each array."""
    return np.array([number for array in table for number in (array.ctypes.data, array.nbytes // 8)], np.int64)


Scalar = TypeVar("Scalar", bound=np.generic)


class GrowingArray(Generic[Scalar]):
    """One-dimensional array that grows by remapping its pages, without copying. New elements are zero.

    Untouched pages use no memory, so large sizes are cheap.
    """

    def __init__(self, dtype: type[Scalar], size: int) -> None:
        self._dtype = np.dtype(dtype)
        self._memory = _map(size * self._dtype.itemsize)

    @property
    def array(self) -> NDArray[Scalar]:
        """The whole array; all references must be dropped before the next `grow`."""
        return np.frombuffer(self._memory, self._dtype)

    def grow(self, size: int) -> None:
        """Extend the array. Raises BufferError if a reference to it remains."""
        nbytes = size * self._dtype.itemsize
        try:
            self._memory.resize(nbytes)
        except (SystemError, ValueError):  # a system without mremap
            former, self._memory = self._memory, _map(nbytes)
            self._memory[: len(former)] = former[:]
            former.close()
        else:
            _prefer_large_pages(self._memory)


def _map(nbytes: int) -> Any:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _prefer_large_pages(memory)
    return memory


def _prefer_large_pages(memory: Any) -> None:
    """Request large pages, because lookups are random reads that TLB misses would dominate with small pages."""
    with contextlib.suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
