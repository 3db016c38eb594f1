"""Loads of leased blocks into a worker's slots, layer by layer, verified as they arrive.

Layers are read in order, a few reads at a time, so that an engine can compute the first layers while the last ones are
still on their way. Blocks of this host's pool are copied from shared memory if possible, all others are read through
the messenger, from several pool nodes at once.

All methods run on the event loop; copies and digests run on its threads, a few at a time. A read that has begun ends
before `run` does, whatever happens, since the slots may be reused afterwards.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvpool import KvSpec
from messenger import Messenger
from rpc.errors import NetworkError
from worker.counters import WorkerCounters
from worker.layer_gate import LayerGate
from worker.local_pool import LocalPoolAccess
from worker.policy.layer_arrivals import LayerBatch, layer_batches
from worker.prefix_blocks import PinnedBlocks
from worker.shielded_wait import in_thread, shielded
from worker.slot_memory import EngineMemory, SlotMemory

log = logging.getLogger(__name__)

# A read costs about as much as moving 100 KiB, and a slice as moving a few KiB (benchmarks/messenger.py). Loads below
# two reads are finished sooner in one piece.
LEAST_READ_NBYTES: Final = 1 << 20
LEAST_SLICE_NBYTES: Final = 16 << 10
_READS_IN_FLIGHT: Final = 3  # hides the time between the end of a read and the beginning of the next


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """Where a load reads from and to, and what it reports."""

    memory: SlotMemory
    messenger: Messenger
    local_pool: LocalPoolAccess
    counters: WorkerCounters
    deadline_s: float  # of every read
    on_call: Callable[[str, Exception | None], None]  # (pool node's target, error)


@dataclass(slots=True, eq=False)
class _Range:
    """Blocks of one lease, in consecutive slots."""

    pin: PinnedBlocks
    groups: tuple[int, ...]  # of the memory
    skip: int  # rows of the lease before the first one
    at: int  # index of the first block within the load
    slots: list[int]
    began: float = 0.0  # instants of time.perf_counter()
    ended: float = 0.0
    nbytes: int = 0
    failed: bool = False


class PoolLoad:
    """One load of leased blocks into slots."""

    def __init__(
        self,
        settings: LoadSettings,
        pinned: Sequence[PinnedBlocks],
        slots: Sequence[int],
        first: int,
        windows: Sequence[PinnedBlocks] = (),
        *,
        groups: tuple[int, ...],
        without: range = range(0),
    ) -> None:
        """Prepare to load the prompt's blocks from `first` on, including the partial one, into `slots`.

        `groups` of the memory are those of `pinned`, except for the layers `without`. `windows` are the last blocks in
        windowed groups, one lease if these are all groups. Until `run` returns, each PinnedBlocks records the rows that
        it is to read as right.
        """
        self._settings = settings
        self._memory = settings.memory
        self._without = without
        self._ranges: list[_Range] = []
        self.num_blocks = 0  # that the leases cover without a gap
        for pin in pinned:
            skip = max(0, first + self.num_blocks - pin.first)
            count = min(pin.num_rows - skip, len(slots) - self.num_blocks)
            if count <= 0 or pin.first > first + self.num_blocks:
                continue
            part = list(slots[self.num_blocks : self.num_blocks + count])
            self._ranges.append(_Range(pin, groups, skip, self.num_blocks, part))
            pin.right = range(skip, skip + count)
            self.num_blocks += count
        if not groups and windows:  # of the blocks before a window, nothing is needed
            self.num_blocks = max(0, min(len(slots), windows[0].first + windows[0].num_rows - first))
        for pin in windows:
            skip = max(0, first - pin.first)
            at = max(0, pin.first - first)
            count = min(pin.num_rows - skip, self.num_blocks - at)
            if count > 0:
                windowed = self._memory.spec.windowed
                self._ranges.append(_Range(pin, windowed, skip, at, list(slots[at : at + count])))
                pin.right = range(skip, skip + count)
        self.num_right = self.num_blocks  # leading blocks of which no layer is known to be damaged or missing
        self.bad_blocks: list[int] = []  # blocks of the prompt that failed verification
        self._batches = self._cut() if self.num_blocks else ()
        self._gate: LayerGate | None = None
        self._first_block = first
        self.begun = asyncio.Event()  # set when the gate's first layer is there, or its KV is lost

    def _cut(self) -> tuple[LayerBatch, ...]:
        spec = self._memory.spec
        batches = layer_batches(
            [group.layers for group in spec.groups],
            [spec.layer_nbytes(g) for g in range(spec.num_groups)],
            self.num_blocks,
            least_read=LEAST_READ_NBYTES if isinstance(self._memory, EngineMemory) else 1 << 62,
            least_slice=LEAST_SLICE_NBYTES,
        )
        if not self._without:
            return batches
        return tuple(batch.without([group.layers for group in spec.groups], self._without) for batch in batches)

    @property
    def has_steps(self) -> bool:
        """True if the layers arrive in several steps, so that a computation can begin before the last one."""
        return len(self._batches) > 1

    async def run(self, gate: LayerGate | None = None) -> int:
        """Load and verify; return the number of leading blocks that are now in the slots with all of their layers.

        Marks verified layers at the gate, and loses it with the first block that cannot be used. Blocks that fail
        verification are counted and listed in `bad_blocks`.
        """
        self._gate = gate
        reading = asyncio.Semaphore(_READS_IN_FLIGHT)
        tasks: set[asyncio.Task[None]] = set()
        try:
            for batch in self._batches:
                for part in self._ranges:
                    await reading.acquire()
                    tasks.add(task := asyncio.ensure_future(self._load(batch, part, reading)))
                    for ended in [each for each in tasks if each.done() and each is not task]:
                        tasks.remove(ended)
                        ended.result()
            while tasks:
                ended_now, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
                for ended in ended_now:
                    ended.result()
        finally:
            for task in tasks:
                task.cancel()
            if tasks:
                await shielded(asyncio.ensure_future(asyncio.wait(tasks)))
                for task in tasks:
                    if not task.cancelled():
                        task.exception()  # retrieve it, so that asyncio does not log it as lost
        for part in self._ranges:
            right = min(max(0, self.num_right - part.at), len(part.slots))
            part.pin.right = range(part.skip, part.skip + right)
            if part.nbytes:
                path = "load" if part.pin.is_own else "fetch"
                self._settings.counters.add_transfer(path, part.nbytes, part.ended - part.began)
        return self.num_right

    async def _load(self, batch: LayerBatch, part: _Range, reading: asyncio.Semaphore) -> None:
        """Read one batch of layers of one range, except for blocks after a block that cannot be used."""
        try:
            count = min(len(part.slots), self.num_right - part.at)
            if count <= 0 or part.failed:
                return
            part.began = part.began or time.perf_counter()
            piece = _Piece.of(self._memory.spec, batch, part, count)
            if piece is None:
                return
            target = part.pin.client.target
            try:
                right = await self._read(piece, part.pin)
            except NetworkError as error:
                if not part.failed:
                    part.failed = True
                    self._settings.on_call(target, error)
                    log.warning("reused blocks could not be read and will be computed: %s", error)
                self._fail(part.at, f"layers {batch.first} to {batch.end - 1} could not be read: {error}")
                return
            part.ended = time.perf_counter()
            part.nbytes += piece.nbytes
            if self._gate is not None and right:
                self._gate.mark(piece.layers, np.arange(part.at, part.at + right))
                if self._gate.is_ready:
                    self.begun.set()
            if right < count:
                self._damaged(part, right)
        finally:
            reading.release()

    async def _read(self, piece: _Piece, pin: PinnedBlocks) -> int:
        """Read and verify; return the number of leading blocks that are right. Raises NetworkError."""
        settings, memory = self._settings, self._memory
        if pin.is_own:
            places = piece.starts, piece.targets(memory)
            copied = await settings.local_pool.load(pin, piece.spec, places, piece.digests, piece.valid)
            if copied is not None:
                return await in_thread(self._take, piece, copied)
        peer = settings.messenger.connect(pin.lease.endpoint)
        slices = piece.slices(memory)
        await shielded(peer.read(pin.lease.key, memory.region, slices, deadline_s=settings.deadline_s))
        return await in_thread(lambda: self._take(piece, piece.verify(memory)))

    def _take(self, piece: _Piece, right: NDArray[np.bool_]) -> int:
        """Make the leading right blocks readable by the engine and return their number. Raises StagingError."""
        count = len(right) if right.all() else int(right.argmin())
        memory, slots = self._memory, piece.slots[:count]
        if len(self._batches) == 1 and not self._without:
            memory.to_device_now(slots, piece.groups)
            return count
        assert isinstance(memory, EngineMemory)
        memory.to_device(slots, piece.layers).wait()
        return count

    def _damaged(self, part: _Range, right: int) -> None:
        bad = self._first_block + part.at + right
        if bad not in self.bad_blocks:
            self.bad_blocks.append(bad)
            self._settings.counters.add("digest_mismatches", 1)
            node_id = part.pin.lease.endpoint.node_id
            log.error("block %d of a reused prefix at %s failed verification", bad, node_id)
        self._fail(part.at + right, f"block {bad} failed verification")

    def _fail(self, right: int, why: str) -> None:
        self.num_right = min(self.num_right, right)
        if self._gate is not None:
            self._gate.lose(why)
            self.begun.set()


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """Some layers of some blocks: where they are, where they go, and their digests."""

    parts: tuple[tuple[int, slice], ...]  # (group of the memory, its layers)
    spec: KvSpec  # of these layers only
    slots: list[int]
    starts: NDArray[np.int64]  # [parts, n], in the pool's region
    shifts: NDArray[np.int64]  # [parts], of the layers within a slot
    digests: list[NDArray[np.uint64]]  # per part [n, layers]
    valid: NDArray[np.int32]  # [n] tokens

    @classmethod
    def of(cls, spec: KvSpec, batch: LayerBatch, part: _Range, count: int) -> _Piece | None:
        """Return the batch's layers of the range's groups; None if it has none."""
        rows = slice(part.skip, part.skip + count)
        parts = tuple((g, layers) for g, layers in batch.parts if g in part.groups)
        if not parts:
            return None
        groups = [replace(spec.groups[g], layers=spec.groups[g].layers[layers]) for g, layers in parts]
        is_whole = groups == list(spec.groups)
        shifts = np.array([layers.start * spec.layer_nbytes(g) for g, layers in parts], np.int64)
        own = [part.groups.index(g) for g, _ in parts]
        return cls(
            parts=parts,
            spec=spec if is_whole else KvSpec(tuple(groups), spec.block_tokens),
            slots=part.slots[:count],
            starts=part.pin.offsets[own, rows] + shifts[:, None],
            shifts=shifts,
            digests=[part.pin.digests[i][rows, layers] for i, (_, layers) in zip(own, parts, strict=True)],
            valid=part.pin.valid[rows],
        )

    @property
    def groups(self) -> list[int]:
        """Groups of the memory."""
        return [g for g, _ in self.parts]

    @property
    def layers(self) -> list[int]:
        """Model layers, in order."""
        return sorted(layer for group in self.spec.groups for layer in group.layers)

    @property
    def nbytes(self) -> int:
        return len(self.slots) * self.spec.block_nbytes

    def targets(self, memory: SlotMemory) -> NDArray[np.int64]:
        """Return the byte offsets [parts, n] in the region of `memory`."""
        places = [memory.offsets(g, self.slots) for g, _ in self.parts]
        return np.stack(places) + self.shifts[:, None]

    def slices(self, memory: SlotMemory) -> NDArray[np.int64]:
        """Return messenger slices [parts * n, 3]."""
        targets = self.targets(memory)
        sizes = np.array([self.spec.slot_nbytes(g) for g in range(self.spec.num_groups)], np.int64)
        return np.stack([targets, self.starts, np.broadcast_to(sizes[:, None], targets.shape)], axis=2).reshape(-1, 3)

    def verify(self, memory: SlotMemory) -> NDArray[np.bool_]:
        """Return bool [n], True for blocks whose bytes in `memory` match their digests."""
        right = np.ones(len(self.slots), dtype=bool)
        for (group, layers), spec, expected in zip(self.parts, self.spec.groups, self.digests, strict=True):
            if layers == slice(0, memory.spec.num_layers(group)):
                right &= (memory.slot_digests(group, self.slots, self.valid) == expected).all(axis=1)
                continue
            assert isinstance(memory, EngineMemory)
            for index, layer in enumerate(spec.layers):
                right &= memory.one_layer_digests(layer, self.slots, self.valid) == expected[:, index]
        return right
