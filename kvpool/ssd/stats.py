"""Counters of the SSD store per direction: I/Os, bytes, latencies in logarithmic buckets, errors by kind.

All may be updated from any thread, under the counters' own lock.
"""

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvpool.errors import SsdCorrupt, SsdError, SsdFull, SsdIoError, SsdNotStored, SsdRefused

_BUCKETS_PER_OCTAVE = 4
_NUM_BUCKETS = 64 * _BUCKETS_PER_OCTAVE
_KINDS: tuple[tuple[type[SsdError], str], ...] = (
    (SsdFull, "full"),
    (SsdIoError, "io"),
    (SsdCorrupt, "corrupt"),
    (SsdNotStored, "not_stored"),
    (SsdRefused, "refused"),
)


def kind_of(error: SsdError) -> str:
    """Return the name under which an error is counted."""
    return next(kind for error_type, kind in _KINDS if isinstance(error, error_type))


@dataclass(frozen=True)
class DirectionStats:
    """Statistics of reads or of writes. Latencies are those of I/Os; a block takes one I/O per MiB."""

    num_blocks: int
    num_ios: int
    nbytes: int  # transferred to or from the disk, in whole pages
    io_s: float  # sum of the I/Os' latencies
    p50_s: float
    p99_s: float
    num_in_flight: int  # blocks of calls in progress
    errors: dict[str, int]  # blocks, by kind: full, io, corrupt, not_stored, refused


@dataclass(frozen=True)
class SsdStats:
    """Snapshot of the store's contents, and of its counters since it was opened."""

    num_entries: int
    entries_nbytes: int
    capacity_nbytes: int
    direct: bool  # False: the file system has no direct I/O, so the page cache is used
    accepts_writes: bool  # False: the journal could not be written; each write tries to rewrite it
    num_recovered: int
    recovery: dict[str, int]  # counts of the recovery, see `kvpool.ssd.recovery`
    journal_nbytes: int
    num_compactions: int
    num_freed: int
    reads: DirectionStats
    writes: DirectionStats


@dataclass
class LatencyHistogram:
    """Latencies in buckets whose bounds grow by a quarter of an octave, so that quantiles are accurate to 19 %."""

    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(_NUM_BUCKETS, np.int64))
    total_ns: int = 0

    def add(self, latency_ns: NDArray[np.int64]) -> None:
        """Count I/Os with latencies `latency_ns` int64 [n]."""
        buckets = (np.log2(np.maximum(latency_ns, 1)) * _BUCKETS_PER_OCTAVE).astype(np.int64)
        np.add.at(self.counts, buckets, 1)
        self.total_ns += int(latency_ns.sum())

    def quantile_s(self, quantile: float) -> float:
        """Return the upper bound of the bucket that contains the quantile; 0 without I/Os."""
        total = int(self.counts.sum())
        if not total:
            return 0.0
        bucket = int(np.searchsorted(np.cumsum(self.counts), quantile * total))
        return float(2.0 ** ((bucket + 1) / _BUCKETS_PER_OCTAVE)) / 1e9


@dataclass
class DirectionCounters:
    """Counters of one direction, for any number of threads."""

    num_blocks: int = 0
    nbytes: int = 0
    num_in_flight: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    latencies: LatencyHistogram = field(default_factory=LatencyHistogram)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, num_blocks: int) -> None:
        """Count a request for these blocks."""
        with self.lock:
            self.num_in_flight += num_blocks

    def end(self, results: Sequence[SsdError | None]) -> None:
        """Count the request's results."""
        with self.lock:
            self.num_in_flight -= len(results)
            self.num_blocks += len(results)
            self.errors.update(kind_of(error) for error in results if error is not None)

    def add_ios(self, nbytes: int, latency_ns: NDArray[np.int64]) -> None:
        """Count I/Os of `nbytes` in total, with their latencies [n]."""
        with self.lock:
            self.nbytes += nbytes
            self.latencies.add(latency_ns)

    def snapshot(self) -> DirectionStats:
        with self.lock:
            return self._snapshot()

    def _snapshot(self) -> DirectionStats:
        return DirectionStats(
            num_blocks=self.num_blocks,
            num_ios=int(self.latencies.counts.sum()),
            nbytes=self.nbytes,
            io_s=self.latencies.total_ns / 1e9,
            p50_s=self.latencies.quantile_s(0.5),
            p99_s=self.latencies.quantile_s(0.99),
            num_in_flight=self.num_in_flight,
            errors=dict(self.errors),
        )
