"""Committing memory a little ahead of its use, so that nobody who uses it waits for the kernel to find and clear pages.

Slots are given from low addresses on, so what comes next is what lies above the highest used so far. Memory that was
used once stays committed. Pages are also joined to huge ones here, where that is wanted and before anything is in them.
"""

from messenger import SharedMemory

_STEP_NBYTES = 32 << 20
_CALL_NBYTES = 4 << 20  # at a time, so that whoever else changes the process's memory waits for little


class CommitAhead:
    """How far a range of memory is committed, and how far it should be; without `end`, all from `start` on."""

    def __init__(self, memory: SharedMemory, start: int = 0, end: int | None = None) -> None:
        self._memory = memory
        self._committed = start
        self._end = memory.nbytes if end is None else end
        self._running = False

    def begins(self, end: int) -> bool:
        """Whether, now that bytes up to `end` are about to be used, `run` must be called, once."""
        near = min(end + _STEP_NBYTES // 2, self._end)
        if self._running or near <= self._committed:
            return False
        self._running = True
        return True

    def run(self, end: int) -> None:
        """Commit a step beyond `end`. Blocking: for a thread. Where the kernel cannot, use commits memory."""
        try:
            until = min(end + _STEP_NBYTES, self._end)
            while self._committed < until:
                nbytes = min(_CALL_NBYTES, until - self._committed)
                if not self._memory.try_commit(self._committed, nbytes):
                    self._committed = self._end
                    return
                self._committed += nbytes
        finally:
            self._running = False
