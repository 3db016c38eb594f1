"""Reading a batch of blocks: find, carry, and hold what came against the checksum in the journal."""

from collections.abc import Sequence

import numpy as np

from kvpool.errors import SsdCorrupt, SsdError, SsdNotStored, SsdRefused
from kvpool.ssd.carrying import CHUNK_BLOCKS, Carrier
from kvpool.ssd.commits import Commits, io_error
from kvpool.ssd.extents import Extent, ExtentState
from kvpool.ssd.memory import BlockMemory, Run
from kvpool.ssd.records import SsdRead
from kvpool.ssd.transfer import Flight

__all__ = ["Reader"]

_ReadChunk = tuple[list[int], list[Extent], Flight]


class Reader:
    """Reads; from any number of threads."""

    def __init__(self, commits: Commits, carrier: Carrier) -> None:
        self._commits, self._carrier = commits, carrier
        self._memory = BlockMemory()

    def read(self, reads: Sequence[SsdRead]) -> list[SsdError | None]:
        """As `SsdStore.read`."""
        results: list[SsdError | None] = [None] * len(reads)
        chunks: list[_ReadChunk] = []
        try:
            for first in range(0, len(reads), CHUNK_BLOCKS):
                self._start(reads, range(first, min(first + CHUNK_BLOCKS, len(reads))), results, chunks)
        finally:
            # The targets are the caller's again when this returns, so every flight is waited for.
            for chunk in chunks:
                self._finish(reads, chunk, results)
        return results

    def _start(
        self, reads: Sequence[SsdRead], indices: range, results: list[SsdError | None], chunks: list[_ReadChunk]
    ) -> None:
        good: list[int] = []
        extents: list[Extent] = []
        memory: list[list[Run]] = []
        for i in indices:
            read = reads[i]
            extent = self._find(read)
            if extent is None:
                results[i] = SsdNotStored(f"no block {read.chain_key.hex()} lies at {read.offset}")
                continue
            runs = self._memory.runs(read.targets, extent.entry.spec, writable=True)
            if isinstance(runs, str):
                results[i] = SsdRefused(f"targets for the block at {read.offset}: {runs}")
                continue
            good.append(i)
            extents.append(extent)
            memory.append(runs)
        if good:
            chunks.append((good, extents, self._carrier.start([extent.start for extent in extents], memory)))

    def _finish(self, reads: Sequence[SsdRead], chunk: _ReadChunk, results: list[SsdError | None]) -> None:
        indices, extents, flight = chunk
        outcome = self._carrier.finish(flight)
        expected = np.array([extent.checksum for extent in extents], np.uint64)
        for k in np.flatnonzero((outcome.status != 0) | (outcome.sums != expected)).tolist():
            i, extent, number = indices[k], extents[k], int(outcome.status[k])
            if self._find(reads[i]) is not extent:
                results[i] = SsdNotStored(f"the block at {extent.start} was freed while it was being read")
            elif number:
                results[i] = io_error(f"reading the block at {extent.start}", number)
            else:
                results[i] = SsdCorrupt(f"the block at {extent.start} is not what was written there")

    def _find(self, read: SsdRead) -> Extent | None:
        extent = self._commits.extents.get(read.offset)
        if extent is None or extent.state is not ExtentState.SEALED:
            return None
        entry = extent.entry
        return extent if entry.chain_key == read.chain_key and entry.kv_namespace == read.kv_namespace else None
