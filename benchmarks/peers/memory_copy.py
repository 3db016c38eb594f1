"""Contender of benchmarks/messenger.py: memcpy between two shared memories of the messenger's kind in one process.

The copy is numpy's, which is libc's memcpy without the GIL; slices are copied by one call, in a compiled loop over
memcpy. There are no notifications. Usage: memory_copy.py [arrays]; with `arrays`, between two plain numpy arrays.
"""

import sys

import numpy as np
from contest import REGION_NBYTES, Contender, Rows, Start, Wait, random_bytes, serve

from messenger import SharedMemory


class MemoryCopy(Contender):
    def __init__(self, *, arrays: bool) -> None:
        if arrays:
            self.local, self._remote = (np.empty(REGION_NBYTES, np.uint8) for _ in range(2))
        else:
            self._memories = [SharedMemory.create(REGION_NBYTES, name, "auto") for name in ("source", "target")]
            for memory in self._memories:
                memory.try_commit(0, REGION_NBYTES)
            self.local, self._remote = (memory.array for memory in self._memories)
        random_bytes(self.local)
        random_bytes(self._remote)

    def prepare(self, rows: Rows, *, write: bool) -> Start:
        local, remote, nbytes = rows[0]
        stride = rows[1][0] - local if len(rows) > 1 else nbytes
        mine, theirs = (
            np.lib.stride_tricks.as_strided(array[offset:], (len(rows), nbytes), (stride, 1))
            for array, offset in ((self.local, local), (self._remote, remote))
        )
        target, source = (theirs, mine) if write else (mine, theirs)

        def start() -> Wait:
            np.copyto(target, source)
            return over

        def over() -> None: ...

        return start

    def close(self) -> None:
        """Do nothing, since there is no owner process."""


if __name__ == "__main__":
    serve(MemoryCopy(arrays=sys.argv[1:] == ["arrays"]))
