"""One direction of the store's I/O: what its threads carry, and what is counted of it."""

from collections.abc import Sequence

from kvpool.ssd.disk import Disk
from kvpool.ssd.folder import Segments
from kvpool.ssd.memory import Run
from kvpool.ssd.stats import DirectionCounters
from kvpool.ssd.transfer import Batch, Flight, IoThreads, Outcome

__all__ = ["CHUNK_BLOCKS", "Carrier"]

CHUNK_BLOCKS = 256
"""A request is prepared in chunks of so many blocks, each while the disk is busy with those before it."""


class Carrier:
    """Starts flights and takes their outcomes in."""

    def __init__(
        self, disk: Disk, segments: Segments, threads: IoThreads, counters: DirectionCounters, *, write: bool
    ) -> None:
        self.segments = segments
        self._disk, self._threads, self._counters, self._write = disk, threads, counters, write

    def start(self, offsets: Sequence[int], memory: Sequence[Sequence[Run]]) -> Flight:
        """Begin with these extents; the flight must be finished by `finish`, whatever happens."""
        batch = Batch(offsets, memory, self.segments.segment_nbytes)
        return self._disk.start(self._threads, batch, self.segments.fds, write=self._write)

    def finish(self, flight: Flight) -> Outcome:
        """Returns when no I/O of the flight is under way any more."""
        outcome = flight.finish()
        self._counters.add_ios(flight.nbytes, outcome.nanos)
        return outcome
