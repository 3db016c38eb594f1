"""Verified transfers of blocks between the arena and the SSD. The functions block and must run in threads.

Every block read from the SSD is verified against its digests before it becomes visible, and only verified blocks are
written. Coded blocks are decoded first. The policy core holds both slots of each transfer until it has ended, so
neither is reused meanwhile.
"""

import mmap
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvpool.block_coding import decode_block, encode_block
from kvpool.digest import layer_digests_at
from kvpool.errors import CodedBlockInvalid, SsdCorrupt, SsdError
from kvpool.policy import Block, LoadOutcome, TierLoad, TierWrite
from kvpool.policy.compression import Storage
from kvpool.spec import KvSpec
from kvpool.ssd import PAGE_NBYTES, SsdEntry, SsdRead, SsdStore, SsdWrite, extent_nbytes


def verify_digests(
    memory: NDArray[np.uint8], blocks: Sequence[Block], offsets: Sequence[tuple[int, ...]]
) -> list[bool]:
    """Return per block True if its bytes at `offsets` (one per group) of `memory` uint8 [nbytes] match its digests.

    Only the valid tokens of a partial block are compared.
    """
    right = [True] * len(blocks)
    members: dict[KvSpec, list[int]] = defaultdict(list)
    for i, block in enumerate(blocks):
        members[block.spec].append(i)
    for spec, mine in members.items():
        valid = np.array([blocks[i].num_tokens or spec.block_tokens for i in mine], np.int32)
        for g in range(spec.num_groups):
            at = np.array([offsets[i][g] for i in mine], np.int64)
            got = layer_digests_at(memory, at, spec, g, valid)
            want = np.frombuffer(b"".join(blocks[i].digests[g] for i in mine), "<u8").reshape(got.shape)
            for i, same in zip(mine, (got == want).all(axis=1).tolist(), strict=True):
                right[i] &= same
    return right


Bytes = NDArray[np.uint8]


@dataclass(slots=True)
class ReadTimes:
    """Duration of a read from the SSD, and of the decoding of coded blocks. Times are those of `time.perf_counter`."""

    nbytes: int = 0  # read from the SSD
    began_s: float = 0.0
    ended_s: float = 0.0
    decoded: dict[bytes, tuple[int, float]] = field(default_factory=dict)  # per namespace: bytes of blocks, seconds

    def add_decoded(self, kv_namespace: bytes, nbytes: int, seconds: float) -> None:
        before = self.decoded.get(kv_namespace, (0, 0.0))
        self.decoded[kv_namespace] = before[0] + nbytes, before[1] + seconds


@dataclass(frozen=True)
class LoadResults:
    """Results of a batch of loads, one per load, and its durations; `seconds` is that of all of it."""

    outcomes: list[LoadOutcome]
    errors: list[SsdError | None]
    seconds: float
    times: ReadTimes
    verify_s: float


@dataclass(frozen=True, slots=True)
class Coded:
    """Result of coding a block, in CPU time: this thread has a low priority, and loads have not.

    `decode_s` is measured for trials only.
    """

    nbytes: int  # length of the coded block; that of the block if coding does not shorten it
    encode_s: float
    decode_s: float = 0.0


@dataclass(frozen=True)
class WriteResults:
    """Results of a batch of writes, one per write, and the batch's duration.

    `right` is False for a block that did not match its digests and was not written. A block is durable if it is right
    and its error is None. `coded` has an entry for each block that was coded, for storage or on trial.
    """

    errors: list[SsdError | None]
    right: list[bool]
    seconds: float
    coded: list[Coded | None]


def read_blocks(store: SsdStore, arena: Bytes, loads: Sequence[TierLoad]) -> LoadResults:
    """Read blocks into their slots of `arena` uint8 [nbytes] and verify them. Errors are returned, not raised."""
    began = time.perf_counter()
    offsets = [load.offsets for load in loads]
    errors, times = _read(store, arena, [load.block for load in loads], [load.ssd_offset for load in loads], offsets)
    outcomes = [_outcome(error) for error in errors]
    arrived = [i for i, error in enumerate(errors) if error is None]
    verifying = time.perf_counter()
    right = verify_digests(arena, [loads[i].block for i in arrived], [offsets[i] for i in arrived])
    for i, fine in zip(arrived, right, strict=True):
        outcomes[i] = LoadOutcome.OK if fine else LoadOutcome.CORRUPT
    ended = time.perf_counter()
    return LoadResults(outcomes, errors, ended - began, times, ended - verifying)


def check_on_ssd(store: SsdStore, blocks: Sequence[Block], ssd_offsets: Sequence[int]) -> list[LoadOutcome]:
    """Read blocks into temporary memory and verify them. Errors are returned, not raised."""
    sizes = [[block.spec.slot_nbytes(g) for g in range(block.spec.num_groups)] for block in blocks]
    ends = np.cumsum([size for each in sizes for size in each])
    memory = np.empty(int(ends[-1]) if len(ends) else 0, np.uint8)
    starts = iter([0, *ends.tolist()])
    offsets = [tuple(next(starts) for _ in each) for each in sizes]
    errors, _ = _read(store, memory, blocks, ssd_offsets, offsets)
    right = verify_digests(memory, blocks, offsets)
    return [
        _outcome(error) if error is not None or fine else LoadOutcome.CORRUPT
        for error, fine in zip(errors, right, strict=True)
    ]


def write_blocks(
    store: SsdStore, arena: Bytes, writes: Sequence[TierWrite], storage: Sequence[Storage]
) -> WriteResults:
    """Write the blocks whose bytes in `arena` uint8 [nbytes] match their digests. Errors are returned, not raised.

    `storage` is given per write; a block that coding does not shorten is stored plain.
    """
    began = time.perf_counter()
    right = verify_digests(arena, [write.block for write in writes], [write.offsets for write in writes])
    requests: dict[int, SsdWrite] = {}
    coded: list[Coded | None] = [None] * len(writes)
    for i, write in enumerate(writes):
        if right[i]:
            requests[i], coded[i] = _request(arena, write, storage[i])
    errors: list[SsdError | None] = [None] * len(writes)
    for i, error in zip(requests, store.write(list(requests.values())), strict=True):
        errors[i] = error
    return WriteResults(errors, right, time.perf_counter() - began, coded)


def measure_read(store: SsdStore, writes: Sequence[TierWrite]) -> ReadTimes:
    """Read blocks that were just written, without decoding or verifying them, and return the duration."""
    sizes = [extent_nbytes(write.block.spec, store.coded_nbytes(write.ssd_offset)) for write in writes]
    memory = _scratch.of(sum(sizes))
    reads = []
    for write, size in zip(writes, sizes, strict=True):
        target, memory = memory[:size], memory[size:]
        groups = _slots(target, write.block, _following(write.block.spec))
        targets = [target] if store.coded_nbytes(write.ssd_offset) else groups
        reads.append(SsdRead(write.ssd_offset, write.block.kv_namespace, write.block.chain_key, targets))
    began = time.perf_counter()
    errors = store.read(reads)
    ended = time.perf_counter()
    return ReadTimes(sum(size for size, error in zip(sizes, errors, strict=True) if error is None), began, ended)


def _read(
    store: SsdStore,
    memory: Bytes,
    blocks: Sequence[Block],
    ssd_offsets: Sequence[int],
    offsets: Sequence[tuple[int, ...]],
) -> tuple[list[SsdError | None], ReadTimes]:
    """Read and decode blocks into their slots at `offsets` of `memory`."""
    lengths = [store.coded_nbytes(at) for at in ssd_offsets]
    sizes = [extent_nbytes(block.spec, length) for block, length in zip(blocks, lengths, strict=True)]
    room = _scratch.of(sum(size for size, length in zip(sizes, lengths, strict=True) if length))
    slots = [_slots(memory, block, into) for block, into in zip(blocks, offsets, strict=True)]
    reads: list[SsdRead] = []
    for block, at, size, length, own in zip(blocks, ssd_offsets, sizes, lengths, slots, strict=True):
        targets = own
        if length:
            targets, room = [room[:size]], room[size:]
        reads.append(SsdRead(at, block.kv_namespace, block.chain_key, targets))
    times = ReadTimes(sum(sizes), time.perf_counter())
    errors = store.read(reads)
    times.ended_s = time.perf_counter()
    for i, length in enumerate(lengths):
        if length and errors[i] is None:
            began = time.perf_counter()
            try:
                decode_block(reads[i].targets[0][:length], slots[i], blocks[i].spec)
            except CodedBlockInvalid as error:
                errors[i] = SsdCorrupt(f"the block at {ssd_offsets[i]}: {error}")
            times.add_decoded(blocks[i].kv_namespace, blocks[i].spec.block_nbytes, time.perf_counter() - began)
    return errors, times


def _request(arena: Bytes, write: TierWrite, storage: Storage) -> tuple[SsdWrite, Coded | None]:
    spec, slots = write.block.spec, _slots(arena, write.block, write.offsets)
    if storage is Storage.PLAIN:
        return SsdWrite(_entry(write), slots), None
    began = time.thread_time()
    data = encode_block(slots, spec)
    encoded = time.thread_time()
    if data is None:
        return SsdWrite(_entry(write), slots), Coded(spec.block_nbytes, encoded - began)
    if storage is Storage.TRIAL:
        return SsdWrite(_entry(write), slots), Coded(len(data), encoded - began, _decode_s(data, write.block))
    entry = _entry(write, len(data))
    padded = np.frombuffer(_aligned(entry.nbytes), np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    return SsdWrite(entry, [padded]), Coded(len(data), encoded - began)


def _decode_s(data: bytes, block: Block) -> float:
    """Return the CPU time of decoding a block, once the thread's contexts and memory are there."""
    slots = _slots(_scratch.of(block.spec.block_nbytes), block, _following(block.spec))
    for _ in range(2):
        began = time.thread_time()
        decode_block(np.frombuffer(data, np.uint8), slots, block.spec)
    return time.thread_time() - began


def _following(spec: KvSpec) -> tuple[int, ...]:
    """Return the offsets of a block's slots, one after the other."""
    ends = np.cumsum([spec.slot_nbytes(g) for g in range(spec.num_groups)])
    return (0, *ends.tolist()[:-1])


def _aligned(nbytes: int) -> mmap.mmap:
    """Return zeros that start at a page, so that the disk reads and writes them directly."""
    return mmap.mmap(-1, max(nbytes, PAGE_NBYTES))


class _Scratch(threading.local):
    """A thread's memory for coded blocks, kept because fresh memory costs more than reading into it."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def of(self, nbytes: int) -> Bytes:
        """Return memory that starts at a page. The thread's next call returns the same."""
        if len(self._memory) < nbytes:
            self._memory = np.frombuffer(_aligned(nbytes), np.uint8)
        return self._memory[:nbytes]


_scratch = _Scratch()


def _outcome(error: SsdError | None) -> LoadOutcome:
    if error is None:
        return LoadOutcome.OK
    return LoadOutcome.CORRUPT if isinstance(error, SsdCorrupt) else LoadOutcome.IO_ERROR


def _slots(memory: Bytes, block: Block, offsets: tuple[int, ...]) -> list[Bytes]:
    return [memory[at : at + block.spec.slot_nbytes(g)] for g, at in enumerate(offsets)]


def _entry(write: TierWrite, coded_nbytes: int = 0) -> SsdEntry:
    block = write.block
    return SsdEntry(
        offset=write.ssd_offset,
        kv_namespace=block.kv_namespace,
        chain_key=block.chain_key,
        parent=block.parent[16:],
        spec=block.spec,
        num_tokens=block.num_tokens,
        digests=block.digests,
        compute_s=block.cost_s,
        coded_nbytes=coded_nbytes,
    )
