"""Verified transfers of blocks between the arena and the SSD. The functions block and must run in threads.

Every block read from the SSD is verified against its digests before it becomes visible, and only verified blocks are
written. The policy core holds both slots of each transfer until it has ended, so neither is reused meanwhile.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvpool.digest import layer_digests_at
from kvpool.errors import SsdCorrupt, SsdError
from kvpool.policy import Block, LoadOutcome, TierLoad, TierWrite
from kvpool.spec import KvSpec
from kvpool.ssd import SsdEntry, SsdRead, SsdStore, SsdWrite


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


@dataclass(frozen=True)
class LoadResults:
    """Results of a batch of loads, one per load, and the batch's duration."""

    outcomes: list[LoadOutcome]
    errors: list[SsdError | None]
    seconds: float


@dataclass(frozen=True)
class WriteResults:
    """Results of a batch of writes, one per write, and the batch's duration.

    `right` is False for a block that did not match its digests and was not written. A block is durable if it is right
    and its error is None.
    """

    errors: list[SsdError | None]
    right: list[bool]
    seconds: float


def read_blocks(store: SsdStore, arena: Bytes, loads: Sequence[TierLoad]) -> LoadResults:
    """Read blocks into their slots of `arena` uint8 [nbytes] and verify them. Errors are returned, not raised."""
    began = time.perf_counter()
    offsets = [load.offsets for load in loads]
    errors = _read(store, arena, [load.block for load in loads], [load.ssd_offset for load in loads], offsets)
    outcomes = [_outcome(error) for error in errors]
    arrived = [i for i, error in enumerate(errors) if error is None]
    right = verify_digests(arena, [loads[i].block for i in arrived], [offsets[i] for i in arrived])
    for i, fine in zip(arrived, right, strict=True):
        outcomes[i] = LoadOutcome.OK if fine else LoadOutcome.CORRUPT
    return LoadResults(outcomes, errors, time.perf_counter() - began)


def check_on_ssd(store: SsdStore, blocks: Sequence[Block], ssd_offsets: Sequence[int]) -> list[LoadOutcome]:
    """Read blocks into temporary memory and verify them. Errors are returned, not raised."""
    sizes = [[block.spec.slot_nbytes(g) for g in range(block.spec.num_groups)] for block in blocks]
    ends = np.cumsum([size for each in sizes for size in each])
    memory = np.empty(int(ends[-1]) if len(ends) else 0, np.uint8)
    starts = iter([0, *ends.tolist()])
    offsets = [tuple(next(starts) for _ in each) for each in sizes]
    errors = _read(store, memory, blocks, ssd_offsets, offsets)
    right = verify_digests(memory, blocks, offsets)
    return [
        _outcome(error) if error is not None or fine else LoadOutcome.CORRUPT
        for error, fine in zip(errors, right, strict=True)
    ]


def write_blocks(store: SsdStore, arena: Bytes, writes: Sequence[TierWrite]) -> WriteResults:
    """Write the blocks whose bytes in `arena` uint8 [nbytes] match their digests. Errors are returned, not raised."""
    began = time.perf_counter()
    right = verify_digests(arena, [write.block for write in writes], [write.offsets for write in writes])
    fine = [i for i, each in enumerate(right) if each]
    errors: list[SsdError | None] = [None] * len(writes)
    done = store.write([SsdWrite(_entry(writes[i]), _slots(arena, writes[i].block, writes[i].offsets)) for i in fine])
    for i, error in zip(fine, done, strict=True):
        errors[i] = error
    return WriteResults(errors, right, time.perf_counter() - began)


def _read(
    store: SsdStore,
    memory: Bytes,
    blocks: Sequence[Block],
    ssd_offsets: Sequence[int],
    offsets: Sequence[tuple[int, ...]],
) -> list[SsdError | None]:
    return store.read(
        [
            SsdRead(at, block.kv_namespace, block.chain_key, _slots(memory, block, into))
            for block, at, into in zip(blocks, ssd_offsets, offsets, strict=True)
        ]
    )


def _outcome(error: SsdError | None) -> LoadOutcome:
    if error is None:
        return LoadOutcome.OK
    return LoadOutcome.CORRUPT if isinstance(error, SsdCorrupt) else LoadOutcome.IO_ERROR


def _slots(memory: Bytes, block: Block, offsets: tuple[int, ...]) -> list[Bytes]:
    return [memory[at : at + block.spec.slot_nbytes(g)] for g, at in enumerate(offsets)]


def _entry(write: TierWrite) -> SsdEntry:
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
    )
