"""SSD store of a pool node: preallocated files with direct I/O, and a journal of their contents.

Blocks have no header. The journal records all facts of a block and a checksum of its bytes. A header page would cost a
second page for the smallest blocks and prove only itself: a torn block behind a good header would pass. The checksum of
the whole extent, verified on every read, also detects misdirected, lost and stale writes.

Threads and locks:

    callers              any threads; they also run I/Os of their own batches (`InFlightBatch.finish`)
    IoThreads            depth - 1 helpers per direction; all take pieces of a batch through its atomic cursor
    GroupCommit.lock     guards the extent maps and the commit queue; never held during I/O
    GroupCommit._committing  one thread at a time syncs and appends to the journal, for all queued commits
    CallGate             counts calls; after `close` begins, it admits none, and one thread waits for the last
    memory of a batch    belongs to the batch from `IoThreads.start` until `InFlightBatch.finish` returns
"""

from kvpool.ssd.records import PAGE_NBYTES, SsdConfig, SsdEntry, SsdRead, SsdWrite, extent_nbytes
from kvpool.ssd.stats import DirectionStats, SsdStats
from kvpool.ssd.store import SsdStore

__all__ = [
    "PAGE_NBYTES",
    "DirectionStats",
    "SsdConfig",
    "SsdEntry",
    "SsdRead",
    "SsdStats",
    "SsdStore",
    "SsdWrite",
    "extent_nbytes",
]
