"""SSD store of a pool node: preallocated files with direct I/O, and a journal of their contents.

Blocks have no header. The journal records all facts of a block and a checksum of its bytes. A header page would double
the size of the smallest blocks and verify only itself: a torn block after an intact header would pass. The checksum of
the whole extent, verified on every read, also detects misdirected, lost and stale writes.

Threads and locks:

    callers                  any threads; they also run I/Os of their own batches (`InFlightBatch.finish`)
    IoThreads                depth - 1 helpers per direction; all take pieces of a batch through its atomic cursor
    GroupCommit.lock         guards the extent maps and the commit queue; never held during I/O
    GroupCommit._committing  one thread at a time syncs and appends to the journal, for all queued commits; taken
                             before `lock`
    CallGate                 counts calls; once `close` has begun it admits none, and the closing thread waits for the
                             last one
    DirectionCounters.lock   guards the counters of one direction; no other lock is taken under it

Lifetimes:

    memory of a batch   in use from `IoThreads.start` until `InFlightBatch.finish` returns
    an extent           WRITING ── bytes written, synced, in the journal ── SEALED ── freed ── removed from the map
                           └ freed meanwhile: DOOMED ── removed when its write returns
    freed space         in `pending_frees` until the free is in the journal; not written before
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
