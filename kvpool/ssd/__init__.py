"""The pool node's SSD tier: preallocated files with direct I/O, and the journal that says what is in them.

No header is written with a block: all that is known of it, and a checksum of its bytes, stands in the journal. A header
page would cost a second page for the smallest blocks, and proves only itself: a block torn behind a good header would
pass. The checksum of the whole extent, taken on every read, also finds misdirected, lost and stale writes.
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
