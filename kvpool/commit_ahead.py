"""Commitment of memory ahead of its use, so that its first users do not wait for the kernel to find and clear pages.

Slots are allocated from low addresses upwards, so the memory used next lies above the highest address used so far.
Memory that was used once stays committed, until the range is made shorter (`resize`). If configured, pages are also
merged into huge pages here, while they are empty.

Threads: `begins` is called in one thread (the owner's event loop) and starts at most one `run`, in another thread, at a
time. While `_running` is set, only `run` touches `_committed`; it clears `_running` last.
"""

from messenger import SharedMemory

_STEP_NBYTES = 32 << 20
_CALL_NBYTES = 4 << 20  # per system call: it holds the process's memory-map lock, on which others wait


class CommitAhead:
    """Committed part of the bytes `start`..`end` of a shared memory; `end` defaults to the memory's size."""

    def __init__(self, memory: SharedMemory, start: int = 0, end: int | None = None) -> None:
        self._memory = memory
        self._committed = start
        self._end = memory.nbytes if end is None else end
        self._running = False

    def resize(self, end: int) -> bool:
        """Set the end of the range. Returns False while `run` may still commit bytes beyond it: repeat the call later.

        Bytes beyond `end` count as uncommitted afterwards.
        """
        self._end = end
        if self._running:
            return False
        self._committed = min(self._committed, end)
        return True

    @property
    def is_complete(self) -> bool:
        """True if the whole range is committed."""
        return self._committed >= self._end

    def begins(self, end: int) -> bool:
        """Return True if the caller must call `run(end)` once, because bytes up to `end` are about to be used."""
        near = min(end + _STEP_NBYTES // 2, self._end)
        if self._running or near <= self._committed:
            return False
        self._running = True
        return True

    def run(self, end: int) -> None:
        """Commit up to 32 MiB beyond `end`. Blocks, so it must run in a thread.

        If the kernel does not support it, memory is committed on use.
        """
        try:
            # `resize` may set an earlier end meanwhile: then this ends soon.
            while self._committed < (until := min(end + _STEP_NBYTES, self._end)):
                nbytes = min(_CALL_NBYTES, until - self._committed)
                if not self._memory.try_commit(self._committed, nbytes):
                    self._committed = self._end
                    return
                self._committed += nbytes
        finally:
            self._running = False
