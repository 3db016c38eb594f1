"""How a directory's table lies in memory. Loops over it: `directory_reading`, `directory_changes`.

A *place* is three uint32: a key's low and high half and what it is mapped to. 0 there: the place is free. With bit 31
clear it is the key's one replica, a *code*: node number * 2, plus 1 where the block is on SSD only. With bit 31 set,
the rest is a row of `rows`, in units of four words, that lists several replicas.

A row of class c has 4 << c words. A list: word 0 is c << 24 | count, codes follow. A dense row, for what very many
nodes hold: bit 31 of word 0 is set too, and from word 2 on there are two bitmaps over node numbers: held, and of these
on SSD only.

A *segment* is 2,048 places with linear probing that wraps around in it. `top` maps the leading bits of a key's hash to
its segment (extendible hashing: Fagin et al., ACM TODS 4(3), 1979): growth splits one segment at a time. Deletion
shifts back what follows (Knuth, TAOCP 3, 6.4, algorithm R), so nothing of a removed key stays behind.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["DENSE", "FREE", "MAX_FILL", "NEED", "ROW_CLASSES", "SEGMENT", "SHIFT", "USED", "Table"]

SEGMENT = 2048
MAX_FILL = 1638  # keys in a segment: a load of 0.8
SHIFT, USED, DENSE, NEED, FREE = 0, 1, 2, 3, 4  # of `meta`; from FREE on, the first free row of each class
ROW_CLASSES = 28


class Table(NamedTuple):
    """All arrays of a table, as the kernels take them."""

    places: NDArray[np.uint32]  # [segments * SEGMENT * 3]
    fill: NDArray[np.int32]  # [segments] keys in each
    depth: NDArray[np.int32]  # [segments] leading bits of the hash that its keys have in common
    top: NDArray[np.int32]  # [2 ** depth of the table]
    rows: NDArray[np.uint32]
    meta: NDArray[np.int64]  # SHIFT: 64 - depth of the table; USED words of rows; DENSE: class; NEED; FREE...
    counts: NDArray[np.int64]  # [numbers, 2] blocks per node: in DRAM, on SSD only
    sums: NDArray[np.uint64]  # [numbers] of `kvpool.contents`
