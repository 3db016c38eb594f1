"""Reads and writes of batches of blocks: validate, transfer, verify checksums, and commit to the journal.

Both run in any number of threads. A write holds its extents in the map, in state WRITING, from `_reserve` to
`_release`, so that concurrent writes cannot overlap. The caller's arrays are in use until the call returns: every
transfer that was started is waited for, even after an error.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvpool.errors import SsdCorrupt, SsdError, SsdNotStored, SsdRefused
from kvpool.spec import KvSpec
from kvpool.ssd.disk import BatchResult, Disk, InFlightBatch, IoBatch, IoThreads
from kvpool.ssd.folder import Segments
from kvpool.ssd.group_commit import GroupCommit, io_error
from kvpool.ssd.journal import pack_blocks
from kvpool.ssd.records import PAGE_NBYTES, Bytes, ExtentState, Run, SsdEntry, SsdExtent, SsdRead, SsdWrite
from kvpool.ssd.stats import DirectionCounters

_UINT8 = np.dtype(np.uint8)


class BlockMemory:
    """Validator of arrays as the memory of a block or coded block, with a cache of the slot sizes of specs."""

    def __init__(self) -> None:
        self._slots: dict[KvSpec, tuple[int, ...]] = {}
        self._last: tuple[KvSpec | None, tuple[int, ...]] = (None, ())

    def runs(self, arrays: Sequence[Bytes], entry: SsdEntry, *, writable: bool) -> list[Run] | str:
        """Return the arrays' runs of memory, or the reason why they cannot be the memory of this block."""
        last, slots = self._last
        if entry.coded_nbytes:
            slots = (entry.nbytes,)
        elif entry.spec is not last:
            slots = self._sizes(entry.spec)
        if len(arrays) != len(slots):
            whole = (
                "an array for the coded block" if entry.coded_nbytes else f"one array for each of {len(slots)} groups"
            )
            return f"expected {whole}, got {len(arrays)}"
        runs = []
        for array, nbytes in zip(arrays, slots, strict=True):
            if array.nbytes != nbytes or array.dtype != _UINT8:
                return f"expected contiguous uint8 [{nbytes}], got {array.dtype} of shape {array.shape}"
            try:
                # Twice as fast as the array interface; raises TypeError if not contiguous or not writable.
                runs.append((ctypes.addressof(ctypes.c_char.from_buffer(array)), nbytes))  # type: ignore[arg-type]
            except TypeError:
                if writable or not array.flags.c_contiguous:
                    return "the array is not contiguous or not writable"
                runs.append((array.__array_interface__["data"][0], nbytes))
        return runs

    def _sizes(self, spec: KvSpec) -> tuple[int, ...]:
        # Hashing a spec takes longer than the rest of the check, and the blocks of a request nearly always share one.
        slots = self._slots.get(spec)
        if slots is None:
            slots = self._slots[spec] = tuple(spec.slot_nbytes(g) for g in range(spec.num_groups))
        self._last = (spec, slots)
        return slots


CHUNK_BLOCKS = 256
"""Number of blocks per chunk of a request; a chunk is prepared while the disk transfers those before it."""


class IoDirection:
    """One direction of the store's I/O: its threads, files and counters."""

    def __init__(
        self, disk: Disk, segments: Segments, threads: IoThreads, counters: DirectionCounters, *, write: bool
    ) -> None:
        self.segments = segments
        self._disk, self._threads, self._counters, self._write = disk, threads, counters, write

    def start(self, offsets: Sequence[int], memory: Sequence[Sequence[Run]]) -> InFlightBatch:
        """Start the transfer of these extents. The caller must always call `finish` with the result."""
        batch = IoBatch(offsets, memory, self.segments.segment_nbytes)
        return self._disk.start(self._threads, batch, self.segments.fds, write=self._write)

    def finish(self, in_flight: InFlightBatch) -> BatchResult:
        """Finish a batch and return its results. None of its I/Os is in flight afterwards."""
        outcome = in_flight.finish()
        self._counters.add_ios(in_flight.nbytes, outcome.latency_ns)
        return outcome


_ReadChunk = tuple[list[int], list[SsdExtent], InFlightBatch]


class SsdReader:
    """Reader of blocks, for any number of threads."""

    def __init__(self, commits: GroupCommit, io: IoDirection) -> None:
        self._commits, self._io = commits, io
        self._memory = BlockMemory()

    def read(self, reads: Sequence[SsdRead]) -> list[SsdError | None]:
        """Read blocks as `SsdStore.read`."""
        results: list[SsdError | None] = [None] * len(reads)
        chunks: list[_ReadChunk] = []
        try:
            for first in range(0, len(reads), CHUNK_BLOCKS):
                self._start(reads, range(first, min(first + CHUNK_BLOCKS, len(reads))), results, chunks)
        finally:
            # The caller may reuse the targets when this returns, so every started transfer is waited for.
            for chunk in chunks:
                self._finish(reads, chunk, results)
        return results

    def coded_nbytes(self, offset: int) -> int:
        """Return the length of the coded block at `offset`; 0 if there is none."""
        extent = self._commits.extents.get(offset)
        return 0 if extent is None else extent.entry.coded_nbytes

    def _start(
        self, reads: Sequence[SsdRead], indices: range, results: list[SsdError | None], chunks: list[_ReadChunk]
    ) -> None:
        good: list[int] = []
        extents: list[SsdExtent] = []
        memory: list[list[Run]] = []
        for i in indices:
            read = reads[i]
            extent = self._find(read)
            if extent is None:
                results[i] = SsdNotStored(f"block {read.chain_key.hex()} is not stored at offset {read.offset}")
                continue
            runs = self._memory.runs(read.targets, extent.entry, writable=True)
            if isinstance(runs, str):
                results[i] = SsdRefused(f"targets of the block at {read.offset}: {runs}")
                continue
            good.append(i)
            extents.append(extent)
            memory.append(runs)
        if good:
            chunks.append((good, extents, self._io.start([extent.start for extent in extents], memory)))

    def _finish(self, reads: Sequence[SsdRead], chunk: _ReadChunk, results: list[SsdError | None]) -> None:
        indices, extents, in_flight = chunk
        outcome = self._io.finish(in_flight)
        expected = np.array([extent.checksum for extent in extents], np.uint64)
        for k in np.flatnonzero((outcome.status != 0) | (outcome.sums != expected)).tolist():
            i, extent, number = indices[k], extents[k], int(outcome.status[k])
            if self._find(reads[i]) is not extent:
                results[i] = SsdNotStored(f"the block at {extent.start} was freed while it was being read")
            elif number:
                results[i] = io_error(f"reading the block at {extent.start}", number)
            else:
                results[i] = SsdCorrupt(f"the block at {extent.start} does not match its checksum")

    def _find(self, read: SsdRead) -> SsdExtent | None:
        extent = self._commits.extents.get(read.offset)
        if extent is None or extent.state is not ExtentState.SEALED:
            return None
        entry = extent.entry
        return extent if entry.chain_key == read.chain_key and entry.kv_namespace == read.kv_namespace else None


_Results = list[SsdError | None]


@dataclass
class _WriteChunk:
    """Blocks transferred together: their indices in the request, their extents and their memory."""

    indices: list[int] = field(default_factory=list)
    extents: list[SsdExtent] = field(default_factory=list)
    memory: list[list[Run]] = field(default_factory=list)

    def without(self, gone: set[SsdExtent]) -> "_WriteChunk":
        kept = [k for k, extent in enumerate(self.extents) if extent not in gone]
        return _WriteChunk(
            [self.indices[k] for k in kept], [self.extents[k] for k in kept], [self.memory[k] for k in kept]
        )


class SsdWriter:
    """Writer of blocks, for any number of threads."""

    def __init__(self, commits: GroupCommit, io: IoDirection, *, accepts_coded: bool) -> None:
        self._commits, self._io, self._accepts_coded = commits, io, accepts_coded
        self._memory = BlockMemory()

    def write(self, writes: Sequence[SsdWrite]) -> _Results:
        """Write blocks as `SsdStore.write`."""
        results: _Results = [None] * len(writes)
        taken: list[SsdExtent] = []
        in_flight_batches: list[tuple[_WriteChunk, InFlightBatch]] = []
        written: dict[SsdExtent, int] = {}
        groups: list[bytes] = []
        try:
            try:
                for first in range(0, len(writes), CHUNK_BLOCKS):
                    indices = range(first, min(first + CHUNK_BLOCKS, len(writes)))
                    chunk = self._clear_frees(self._reserve(writes, indices, results, taken), results)
                    if chunk.extents:
                        offsets = [extent.start for extent in chunk.extents]
                        in_flight_batches.append((chunk, self._io.start(offsets, chunk.memory)))
            finally:
                # The caller may reuse the sources when this returns, so every started transfer is waited for.
                for chunk, in_flight in in_flight_batches:
                    good = self._finish(chunk, in_flight, results)
                    written.update(good)
                    groups.append(pack_blocks(good))
            if written:
                for extent, error in self._commits.commit(list(written), groups).failed.items():
                    results[written[extent]] = error
        finally:
            self._release(taken)
        return results

    def _reserve(
        self, writes: Sequence[SsdWrite], indices: range, results: _Results, taken: list[SsdExtent]
    ) -> _WriteChunk:
        """Add the valid blocks' extents to the map."""
        chunk = _WriteChunk()
        space, extents = self._io.segments.nbytes, self._commits.extents
        with self._commits.lock:
            for i in indices:
                entry, sources = writes[i].entry, writes[i].sources
                start = entry.offset
                if entry.coded_nbytes and not self._accepts_coded:
                    results[i] = SsdRefused(f"the block at {start} is coded, but the store was opened for plain ones")
                    continue
                runs = self._memory.runs(sources, entry, writable=False)
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
                    results[i] = SsdRefused(f"a block at {start}..{end} overlaps another one: free that first")
                else:
                    extent = SsdExtent(entry, start, end, began_after=self._commits.num_failed_syncs)
                    extents.add(extent)
                    taken.append(extent)
                    chunk.indices.append(i)
                    chunk.extents.append(extent)
                    chunk.memory.append(runs)
        return chunk

    def _clear_frees(self, chunk: _WriteChunk, results: _Results) -> _WriteChunk:
        """Commit pending frees of the space of these blocks, before any byte is written.

        Returns the blocks that may be written.
        """
        if not self._over_pending_frees(chunk):
            return chunk
        failure = self._commits.commit().failure
        if failure is None:
            return chunk
        over = self._over_pending_frees(chunk)
        for i, extent in zip(chunk.indices, chunk.extents, strict=True):
            if extent in over:
                results[i] = failure
        return chunk.without(over)

    def _over_pending_frees(self, chunk: _WriteChunk) -> set[SsdExtent]:
        pending_frees = self._commits.pending_frees
        with self._commits.lock:
            if not len(pending_frees):
                return set()
            return {extent for extent in chunk.extents if not pending_frees.is_clear(extent.start, extent.end)}

    def _finish(self, chunk: _WriteChunk, in_flight: InFlightBatch, results: _Results) -> dict[SsdExtent, int]:
        """Finish a chunk and set checksums. Returns the written extents, with their indices in the request."""
        outcome = self._io.finish(in_flight)
        good = {}
        sums, status = outcome.sums.tolist(), outcome.status.tolist()
        for i, extent, checksum, number in zip(chunk.indices, chunk.extents, sums, status, strict=True):
            if number:
                results[i] = io_error(f"writing the block at {extent.start}", number)
            else:
                extent.checksum = checksum
                good[extent] = i
        return good

    def _release(self, taken: Sequence[SsdExtent]) -> None:
        """Remove blocks that were not sealed from the map."""
        with self._commits.lock:
            for extent in taken:
                if extent.state is not ExtentState.SEALED and self._commits.extents.get(extent.start) is extent:
                    self._commits.extents.remove(extent)
