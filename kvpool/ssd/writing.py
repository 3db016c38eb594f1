"""Writing a batch of blocks: take their extents, carry their bytes, have them sealed by the journal."""

from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(eq=False, slots=True)
class _Reserved:
    """A block that has its place in the map, and where its bytes are."""

    index: int
    extent: Extent
    memory: list[Run]


class Writer:
    """Writes; from any number of threads."""

    def __init__(self, commits: Commits, carrier: Carrier) -> None:
        self._commits, self._carrier = commits, carrier
        self._memory = BlockMemory()

    def write(self, writes: Sequence[SsdWrite]) -> _Results:
        """As `SsdStore.write`."""
        results: _Results = [None] * len(writes)
        taken: list[Extent] = []
        flights: list[tuple[list[_Reserved], Flight]] = []
        written: dict[Extent, int] = {}
        groups: list[bytes] = []
        try:
            try:
                for first in range(0, len(writes), CHUNK_BLOCKS):
                    indices = range(first, min(first + CHUNK_BLOCKS, len(writes)))
                    chunk = self._reserve(writes, indices, results, taken)
                    if chunk := self._clear_frees(chunk, results):
                        flights.append((chunk, self._start(chunk)))
            finally:
                # The sources are the caller's again when this returns, so every flight is waited for.
                for chunk, flight in flights:
                    good = self._finish(chunk, flight, results)
                    written.update((block.extent, block.index) for block in good)
                    groups.append(pack_blocks(block.extent for block in good))
            if written:
                for extent, error in self._commits.commit(list(written), groups).failed.items():
                    results[written[extent]] = error
        finally:
            self._release(taken)
        return results

    def _reserve(
        self, writes: Sequence[SsdWrite], indices: range, results: _Results, taken: list[Extent]
    ) -> list[_Reserved]:
        """Put what may be written into the map."""
        chunk = []
        for i in indices:
            entry = writes[i].entry
            runs = self._memory.runs(writes[i].sources, entry.spec, writable=False)
            if isinstance(runs, str):
                results[i] = SsdRefused(f"sources of the block at {entry.offset}: {runs}")
                continue
            nbytes = -(-sum(run[1] for run in runs) // PAGE_NBYTES) * PAGE_NBYTES
            chunk.append(_Reserved(i, Extent(entry, entry.offset, entry.offset + nbytes), runs))
        with self._commits.lock:
            kept = []
            for block in chunk:
                problem = self._problem(block.extent)
                if problem is not None:
                    results[block.index] = problem
                    continue
                self._commits.extents.add(block.extent)
                taken.append(block.extent)
                kept.append(block)
        return kept

    def _problem(self, extent: Extent) -> SsdRefused | None:
        """Why nothing may be written there; the lock is held."""
        start, end, space = extent.start, extent.end, self._carrier.segments.nbytes
        if start < 0 or start % PAGE_NBYTES or end > space:
            return SsdRefused(
                f"a block at {start}..{end}: expected a multiple of {PAGE_NBYTES} in a space of {space} bytes"
            )
        if (other := self._commits.extents.overlaps(start, end)) is not None:
            return SsdRefused(f"a block at {start}..{end} lies over {other.start}..{other.end}: free that first")
        return None

    def _clear_frees(self, chunk: list[_Reserved], results: _Results) -> list[_Reserved]:
        """The journal forgets what lay where these blocks go, before a byte of them is written."""
        if not self._over_undurable(chunk):
            return chunk
        failure = self._commits.commit().failure
        if failure is None:
            return chunk
        over = self._over_undurable(chunk)
        for block in over:
            results[block.index] = failure
        return [block for block in chunk if block not in over]

    def _over_undurable(self, chunk: list[_Reserved]) -> list[_Reserved]:
        undurable = self._commits.undurable
        with self._commits.lock:
            if not len(undurable):
                return []
            return [block for block in chunk if undurable.overlaps(block.extent.start, block.extent.end) is not None]

    def _start(self, chunk: list[_Reserved]) -> Flight:
        return self._carrier.start([block.extent.start for block in chunk], [block.memory for block in chunk])

    def _finish(self, chunk: list[_Reserved], flight: Flight, results: _Results) -> list[_Reserved]:
        """The blocks whose bytes are written, with their checksums."""
        outcome = self._carrier.finish(flight)
        good = []
        for block, checksum, number in zip(chunk, outcome.sums.tolist(), outcome.status.tolist(), strict=True):
            block.extent.checksum = checksum
            if number:
                results[block.index] = io_error(f"writing the block at {block.extent.start}", number)
            else:
                good.append(block)
        return good

    def _release(self, taken: Sequence[Extent]) -> None:
        """Take blocks that did not come to be out of the map."""
        with self._commits.lock:
            for extent in taken:
                if extent.state is not ExtentState.SEALED and self._commits.extents.get(extent.start) is extent:
                    self._commits.extents.remove(extent)
