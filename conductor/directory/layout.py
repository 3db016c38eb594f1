"""How a directory's table lies in memory. Loops over it: `directory_reading`, `directory_changes`.

A block has a *slot*: its key in `keys` and who holds it in `held`, 0 where the slot is free. A block keeps its slot as
long as anybody holds it. Slots are given out next-fit, so that blocks which came one after another lie one after
another, and the place of a chain's next block is as a rule the next slot: a chain is read as one run, at the speed of
memory, and only where it is broken is a key looked up. That is a guess that is checked, never a link to be kept up.

`held` with bit 31 clear is the block's one replica, a *code*: node number * 2, plus 1 where the block is on SSD only.
With bit 31 set, the rest is a row of `rows`, in units of four words, that lists several replicas.

A row of class c has 4 << c words. A list: word 0 is c << 24 | count, codes follow. A dense row, for what very many
nodes hold: bit 31 of word 0 is set too, and from word 2 on there are two bitmaps over node numbers: held, and of these
on SSD only.

A *place* is two uint32: the upper half of a key's hash, and its slot + 1; 0 there: the place is free. A *segment* is
2,048 places with linear probing that wraps around in it. `top` maps the leading bits of a key's hash to its segment
(extendible hashing: Fagin et al., ACM TODS 4(3), 1979): growth splits one segment at a time. Deletion shifts back what
follows (Knuth, TAOCP 3, 6.4, algorithm R), so nothing of a removed key stays behind.

Arrays that grow without being copied: their pages are mapped elsewhere. What lies beyond the end is zeros.
"""

import contextlib
import mmap
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

SEGMENT = 2048
MAX_FILL = 1792  # keys in a segment: a load of 7/8
SHIFT, USED, DENSE, NEED, END, CURSOR, LIVE, FREE = range(8)  # of `meta`; from FREE on, each class's first free row
ROW_CLASSES = 28
NEED_ROWS, NEED_SLOTS = -1, -2  # in NEED; otherwise the number of a full segment


class Table(NamedTuple):
    """All arrays of a table. Kernels are told where they lie (`addresses_of`): to hand over many takes microseconds."""

    places: NDArray[np.uint32]  # [segments * SEGMENT * 2]
    fill: NDArray[np.int32]  # [segments] keys in each
    depth: NDArray[np.int32]  # [segments] leading bits of the hash that its keys have in common
    top: NDArray[np.int32]  # [2 ** depth of the table]
    keys: NDArray[np.uint64]  # [slots]
    held: NDArray[np.uint32]  # [slots]
    rows: NDArray[np.uint32]
    meta: NDArray[
        np.int64
    ]  # SHIFT: 64 - depth of the table; USED words of rows; DENSE: class; slots: END, CURSOR, LIVE
    counts: NDArray[np.int64]  # [numbers, 2] blocks per node: in DRAM, on SSD only
    sums: NDArray[np.uint64]  # [numbers] of `kvpool.events`
    alive: NDArray[np.uint32]  # room for a bitmap over numbers
    state: NDArray[np.int64]  # [numbers, 2] zeros: room for depth and blocks on SSD
    found: NDArray[np.int64]  # [numbers] room for numbers


def addresses_of(table: Table) -> NDArray[np.int64]:
    """For each array: its address, and its length in words of eight bytes."""
    return np.array([number for array in table for number in (array.ctypes.data, array.nbytes // 8)], np.int64)


Scalar = TypeVar("Scalar", bound=np.generic)


class GrowingArray(Generic[Scalar]):
    """One-dimensional. Memory that was never written takes no room, so it may be asked for generously."""

    def __init__(self, dtype: type[Scalar], size: int) -> None:
        self._dtype = np.dtype(dtype)
        self._memory = _map(size * self._dtype.itemsize)

    @property
    def array(self) -> NDArray[Scalar]:
        """All of it, for use until the next `grow`: then nobody may still have it."""
        return np.frombuffer(self._memory, self._dtype)

    def grow(self, size: int) -> None:
        """Make it longer. Raises BufferError when somebody still has the array."""
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
    """A lookup is one read at a random address: with small pages, most of its time goes into finding the page."""
    with contextlib.suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
