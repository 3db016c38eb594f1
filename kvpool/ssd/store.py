"""The SSD store: blocks in extents of preallocated files, journalled, read and written in batches outside the GIL."""

from collections.abc import Iterable, Sequence

from kvpool.errors import SsdError
from kvpool.ssd.records import SsdConfig, SsdEntry, SsdRead, SsdWrite
from kvpool.ssd.stats import SsdStats

__all__ = ["SsdStore"]


class SsdStore:
    """Keeps blocks on an SSD. All calls block, and may come from any thread at the same time; no call needs a loop.

    The caller says where blocks lie (extents must not overlap) and what they are worth; the store knows whether they
    are whole. What is wrong with one block never fails the others of a batch: it is that block's result.
    """

    recovered: list[SsdEntry]
    """The blocks that were found when the store was opened, in the order in which they were written: disjoint, each
    address once, each at or below the space's end. Their bytes are checked when they are read."""

    @classmethod
    def open(cls, config: SsdConfig) -> "SsdStore":
        """Lock the folder, preallocate its files, recover what is in it. Raises SsdFolderError, which says what to do."""
        raise NotImplementedError

    def write(self, writes: Sequence[SsdWrite]) -> list[SsdError | None]:
        """Write blocks; None for each that is durable and in the journal when this returns.

        Errors per block: SsdRefused (overlap with a block that is stored or being written, outside of the space,
        sources of the wrong form), SsdFull, SsdIoError, SsdClosed. Nothing of a block with an error can be read, now
        or after a restart.
        """
        raise NotImplementedError

    def read(self, reads: Sequence[SsdRead]) -> list[SsdError | None]:
        """Read blocks into the caller's arrays; None for each whose bytes are those that were written.

        Errors per block: SsdNotStored, SsdRefused, SsdIoError, SsdCorrupt (what is on the disk is not what was
        written: the extent should be freed), SsdClosed. The targets of a block with an error hold anything. Returns
        only when no I/O touches the targets any more.
        """
        raise NotImplementedError

    def free(self, offsets: Iterable[int]) -> None:
        """Forget the blocks at these offsets; offsets without a block are passed over.

        At once for readers; durable before any of the space is written again, at the latest when the store is closed.
        A block freed while it is being written is forgotten as soon as that write returns.
        """
        raise NotImplementedError

    def stats(self) -> SsdStats:
        """Counters since the store was opened."""
        raise NotImplementedError

    def close(self, timeout_s: float = 30.0) -> bool:
        """Refuse new calls, wait for those under way, make frees durable, unlock the folder. Closing twice is allowed.

        False when calls were still under way after `timeout_s` (a disk that does not answer): the files then stay open
        until these calls end.
        """
        raise NotImplementedError
