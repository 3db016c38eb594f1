"""Writing a batch of blocks: take their extents, carry their bytes, have them sealed by the journal."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvpool.errors import SsdError, SsdRefused
from kvpool.ssd.carrying import CHUNK_BLOCKS, Carrier
from kvpool.ssd.commits import Commits, io_error
from kvpool.ssd.extents import Extent, ExtentState
from kvpool.ssd.journal import pack_blocks
from kvpool.ssd.memory import BlockMemory, Run
from kvpool.ssd.records import PAGE_NBYTES, SsdWrite
from kvpool.ssd.transfer import Flight

__all__ = ["Writer"]

_Results = list[SsdError | None]


@dataclass
class _WriteChunk:
    """Blocks that go to the disk together: their places in the request, their extents, where their bytes are."""

    indices: list[int] = field(default_factory=list)
    extents: list[Extent] = field(default_factory=list)
    memory: list[list[Run]] = field(default_factory=list)

    def without(self, gone: set[Extent]) -> "_WriteChunk":
        kept = [k for k, extent in enumerate(self.extents) if extent not in gone]
        return _WriteChunk([self.indices[k] for k in kept], [self.extents[k] for k in kept], [self.memory[k] for k in kept])


class Writer:
    """Writes; from any number of threads."""

    def __init__(self, commits: Commits, carrier: Carrier) -> None:
        self._commits, self._carrier = commits, carrier
        self._memory = BlockMemory()

    def write(self, writes: Sequence[SsdWrite]) -> _Results:
        """As `SsdStore.write`."""
        results: _Results = [None] * len(writes)
        taken: list[Extent] = []
        flights: list[tuple[_WriteChunk, Flight]] = []
        written: dict[Extent, int] = {}
        groups: list[bytes] = []
        try:
            try:
                for first in range(0, len(writes), CHUNK_BLOCKS):
                    indices = range(first, min(first + CHUNK_BLOCKS, len(writes)))
                    chunk = self._clear_frees(self._reserve(writes, indices, results, taken), results)
                    if chunk.extents:
                        offsets = [extent.start for extent in chunk.extents]
                        flights.append((chunk, self._carrier.start(offsets, chunk.memory)))
            finally:
                # The sources are the caller's again when this returns, so every flight is waited for.
                for chunk, flight in flights:
                    good = self._finish(chunk, flight, results)
                    written.update(good)
                    groups.append(pack_blocks(good))
            if written:
                for extent, error in self._commits.commit(list(written), groups).failed.items():
                    results[written[extent]] = error
        finally:
            self._release(taken)
        return results

    def _reserve(self, writes: Sequence[SsdWrite], indices: range, results: _Results, taken: list[Extent]) -> _WriteChunk:
        """Put what may be written into the map."""
        chunk = _WriteChunk()
        space, extents = self._carrier.segments.nbytes, self._commits.extents
        with self._commits.lock:
            for i in indices:
                entry, sources = writes[i].entry, writes[i].sources
                start = entry.offset
                runs = self._memory.runs(sources, entry.spec, writable=False)
                if isinstance(runs, str):
                    results[i] = SsdRefused(f"sources of the block at {start}: {runs}")
                    continue
                payload = runs[0][1] if len(runs) == 1 else sum(run[1] for run in runs)
                end = start - (-payload // PAGE_NBYTES) * PAGE_NBYTES
                if start < 0 or start % PAGE_NBYTES or end > space:
                    results[i] = SsdRefused(
                        f"a block at {start}..{end}: expected a multiple of {PAGE_NBYTES} in a space of {space} bytes"
                    )
                elif not extents.is_clear(start, end):
                    results[i] = SsdRefused(f"a block at {start}..{end} lies over another: free that first")
                else:
                    extent = Extent(entry, start, end)
                    extents.add(extent)
                    taken.append(extent)
                    chunk.indices.append(i)
                    chunk.extents.append(extent)
                    chunk.memory.append(runs)
        return chunk

    def _clear_frees(self, chunk: _WriteChunk, results: _Results) -> _WriteChunk:
        """The journal forgets what lay where these blocks go, before a byte of them is written."""
        if not self._over_undurable(chunk):
            return chunk
        failure = self._commits.commit().failure
        if failure is None:
            return chunk
        over = self._over_undurable(chunk)
        for i, extent in zip(chunk.indices, chunk.extents, strict=True):
            if extent in over:
                results[i] = failure
        return chunk.without(over)

    def _over_undurable(self, chunk: _WriteChunk) -> set[Extent]:
        undurable = self._commits.undurable
        with self._commits.lock:
            if not len(undurable):
                return set()
            return {extent for extent in chunk.extents if not undurable.is_clear(extent.start, extent.end)}

    def _finish(self, chunk: _WriteChunk, flight: Flight, results: _Results) -> dict[Extent, int]:
        """The extents whose bytes are written, with their checksums; and their places in the request."""
        outcome = self._carrier.finish(flight)
        good = {}
        sums, status = outcome.sums.tolist(), outcome.status.tolist()
        for i, extent, checksum, number in zip(chunk.indices, chunk.extents, sums, status, strict=True):
            if number:
                results[i] = io_error(f"writing the block at {extent.start}", number)
            else:
                extent.checksum = checksum
                good[extent] = i
        return good

    def _release(self, taken: Sequence[Extent]) -> None:
        """Take blocks that did not come to be out of the map."""
        with self._commits.lock:
            for extent in taken:
                if extent.state is not ExtentState.SEALED and self._commits.extents.get(extent.start) is extent:
                    self._commits.extents.remove(extent)
