"""Committing the arena's memory a little ahead of its use, so that no put waits for the kernel to find and clear pages.

Slots are given from low addresses on, so what comes next is what lies above the highest used so far. Memory that was
used once stays committed.
"""

from messenger import SharedMemory

__all__ = ["CommitAhead"]

_STEP_NBYTES = 32 << 20
_CALL_NBYTES = 1 << 20  # at a time, so that whoever else changes the process's memory waits for little


class CommitAhead:
    """How far a memory is committed, and how far it should be."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._committed_nbytes = 0
        self._running = False

    def begins(self, end: int) -> bool:
        """Whether, now that bytes up to `end` are about to be used, `run` must be called, once."""
        near = min(end + _STEP_NBYTES // 2, self._memory.nbytes)
        if self._running or near <= self._committed_nbytes:
            return False
        self._running = True
        return True

    def run(self, end: int) -> None:
        """Commit a step beyond `end`. Blocking: for a thread. Where the kernel cannot, use commits memory."""
        try:
            until = min(end + _STEP_NBYTES, self._memory.nbytes)
            while self._committed_nbytes < until:
                nbytes = min(_CALL_NBYTES, until - self._committed_nbytes)
                if not self._memory.try_commit(self._committed_nbytes, nbytes):
                    self._committed_nbytes = self._memory.nbytes
                    return
                self._committed_nbytes += nbytes
        finally:
            self._running = False
