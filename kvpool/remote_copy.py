"""Copies of blocks from another pool node into this one: pin there, read through the messenger, verify, seal here."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvpool.address import KEY_NBYTES, keys_from_bytes
from kvpool.client import PoolClient
from kvpool.coded_copies import decode_message
from kvpool.copy_compression import try_codec
from kvpool.digest import layer_digests_at
from kvpool.errors import CodedBlockInvalid, CopyFailed, KvPoolError, PutLost
from kvpool.handles import Lease
from kvpool.node import PoolNode
from kvpool.policy import PutRequest, SlotStatus
from kvpool.policy.compression import Storage
from kvpool.spec import KvSpec
from messenger import Priority
from rpc.errors import CallRefused, NetworkError

_LOADING_SHARE = 0.5  # of a copy's time: longest wait for the source to load blocks from its SSD to its DRAM

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Copied:
    """Result of a copy: number of blocks, all groups included, and their bytes."""

    num_blocks: int
    nbytes: int


async def copy_blocks(
    node: PoolNode,
    kv_namespace: bytes,
    chain: Sequence[bytes],
    source_target: str,
    timeout_s: float,
    *,
    alone: bool = False,
) -> Copied:
    """Copy the leading run of `chain` that the source has into `node`.

    The chain begins at a prompt's first block, unless the blocks are kept `alone`, without those before them.

    Blocks that `node` has already are skipped; those on the source's SSD are loaded to its DRAM first. A block whose
    bytes do not match the source's digests is discarded, counted, and reported to the source, which removes it; the
    others are sealed. Raises CopyFailed if the source cannot be reached or read within `timeout_s`.
    """
    deadline = asyncio.get_running_loop().time() + timeout_s
    source = PoolClient(source_target, owner=node.config.node_id, owner_incarnation=node.incarnation)
    node.num_copies += 1
    began = time.monotonic()
    try:
        async with asyncio.timeout_at(deadline), node.copying:
            copied = await _copy(node, kv_namespace, chain, source, deadline, alone)
        node.counters["copied_blocks"] += copied.num_blocks
        node.counters["copied_bytes"] += copied.nbytes
        node.counters["copy_seconds"] += time.monotonic() - began
        return copied
    except (NetworkError, TimeoutError, KvPoolError) as error:
        node.counters["failed_copies"] += 1
        reason = f"not done within {timeout_s:.3g} s" if isinstance(error, TimeoutError) else str(error)
        raise CopyFailed(f"blocks of {source_target} could not be copied to {node.config.node_id}: {reason}") from error
    finally:
        node.num_copies -= 1
        await source.close()


async def _copy(
    node: PoolNode, kv_namespace: bytes, chain: Sequence[bytes], source: PoolClient, deadline: float, alone: bool
) -> Copied:
    if len(node.core.store.leading_run(kv_namespace, chain)) == len(chain):
        return Copied(0, 0)
    left_s = _left_s(deadline)
    wait_s = left_s * _LOADING_SHARE
    keys = keys_from_bytes(b"".join(chain))
    lease = await source.pin(kv_namespace, keys, lease_s=left_s, wait_s=wait_s, deadline_s=left_s)
    if lease is None:
        return Copied(0, 0)
    try:
        assert lease.spec is not None
        leased = [bytes(key) for key in lease.chain]
        parents = [bytes(KEY_NBYTES)] * len(leased) if alone else [bytes(KEY_NBYTES), *leased[:-1]]
        return await _copy_leased(node, PutRequest(kv_namespace, lease.spec, leased, parents), source, lease, deadline)
    finally:
        # If the source cannot be reached, the lease expires.
        with contextlib.suppress(NetworkError):
            await source.unpin(lease, deadline_s=2)


async def _copy_leased(node: PoolNode, put: PutRequest, source: PoolClient, lease: Lease, deadline: float) -> Copied:
    kv_namespace, spec = put.kv_namespace, put.spec
    allocation = node.allocate(
        put,
        owner=node.config.node_id,
        owner_incarnation=node.incarnation,
        ttl_ns=int(_left_s(deadline) * 1e9),
    )
    if not allocation.new_blocks:
        return Copied(0, 0)
    new = [i for i, status in enumerate(allocation.status) if status is SlotStatus.NEW]
    expected = [each[new] for each in lease.digests]
    try:
        offsets = np.array([block.offsets for block in allocation.new_blocks], np.int64).T
        await _fill(node, source, _Missing(kv_namespace, spec, allocation.put_id, lease, new, offsets), deadline)
        right = await asyncio.to_thread(_verify, node, spec, offsets, expected)
        digests = [tuple(each[i].astype("<u8").tobytes() for each in expected) for i in range(len(new))]
        sealed = await node.seal(allocation.put_id, digests, keep=right.tolist())
    except BaseException:
        await node.abort(allocation.put_id)
        raise
    if not right.all():
        await _report(node, kv_namespace, source, lease.chain[new][~right])
    return Copied(sealed, sealed * spec.block_nbytes)


@dataclass(frozen=True)
class _Missing:
    """Blocks to copy: indices in the source's lease, and slots of a put at offsets int64 [groups, n]."""

    kv_namespace: bytes
    spec: KvSpec
    put_id: str
    lease: Lease
    indices: list[int]
    offsets: NDArray[np.int64]

    @property
    def nbytes(self) -> int:
        return len(self.indices) * self.spec.block_nbytes

    def slots(self, memory: NDArray[np.uint8], i: int) -> list[NDArray[np.uint8]]:
        """Return the slots of the i-th block in the arena."""
        spec = self.spec
        return [memory[at : at + spec.slot_nbytes(g)] for g, at in enumerate(self.offsets[:, i].tolist())]


async def _fill(node: PoolNode, source: PoolClient, missing: _Missing, deadline: float) -> None:
    """Copy the blocks' bytes, compressed if that is predicted to be faster; they are not verified yet."""
    compression, key = node.copy_compression, (source.target, missing.kv_namespace)
    storage = Storage.PLAIN
    if compression is not None:
        storage = compression.choose(*key, missing.nbytes, len(missing.indices))
    began = time.monotonic()
    if compression is not None and storage is Storage.CODED:
        try:
            await _read_coded(node, source, missing, deadline)
            compression.copied_coded(*key, missing.nbytes, time.monotonic() - began)
            return
        except CallRefused as error:
            if error.code != "UNIMPLEMENTED":
                raise
            compression.refuses(source.target)
    remote = missing.lease.offsets[:, missing.indices]
    await _read(node, missing.spec, missing.put_id, missing.lease, missing.offsets, remote, deadline)
    if compression is None:
        return
    compression.copied_plain(source.target, missing.nbytes, time.monotonic() - began)
    if storage is Storage.TRIAL:
        slots = [slot.copy() for slot in missing.slots(node.memory.array, 0)]
        coded_nbytes, codec_s = await asyncio.to_thread(try_codec, slots, missing.spec)
        compression.tried(*key, missing.spec.block_nbytes, coded_nbytes, codec_s)


async def _read_coded(node: PoolNode, source: PoolClient, missing: _Missing, deadline: float) -> None:
    blocks = source.read_coded(missing.lease, missing.indices, silence_s=_left_s(deadline))
    async with contextlib.aclosing(blocks):
        i = 0
        async for message in blocks:
            node.counters["copy_coded_blocks"] += 1
            node.counters["copy_coded_bytes"] += len(message.coded or message.plain)
            node.counters["copy_coded_plain_bytes"] += missing.spec.block_nbytes
            try:
                decoded = await asyncio.to_thread(decode_message, message, missing.spec)
            except CodedBlockInvalid as error:
                _log.error("a block from %s could not be decoded: %s", source.target, error)
                decoded = []  # what is in the slots does not match the digests
            if missing.put_id not in node.core.puts:
                raise PutLost(f"put {missing.put_id!r} ended before its blocks were read")
            # On the event loop, so that the put cannot end meanwhile.
            for slot, data in zip(missing.slots(node.memory.array, i), decoded, strict=False):
                slot[:] = data
            i += 1


async def _read(
    node: PoolNode,
    spec: KvSpec,
    put_id: str,
    lease: Lease,
    local: NDArray[np.int64],
    remote: NDArray[np.int64],
    deadline: float,
) -> None:
    """Read whole slots into a put of this node; `local` and `remote` are offsets int64 [groups, n]."""
    sizes = [np.full(local.shape[1], spec.slot_nbytes(g), np.int64) for g in range(spec.num_groups)]
    slices = np.concatenate([np.stack([local[g], remote[g], sizes[g]], axis=1) for g in range(spec.num_groups)])
    peer = node.messenger.connect(lease.endpoint)
    left_s = _left_s(deadline)
    future = node.own_read(
        put_id,
        lambda: peer.read(lease.key, node.region, slices, deadline_s=left_s, priority=Priority.BACKGROUND),
    )
    # The read may fail after this coroutine was cancelled: retrieve the exception, or asyncio logs it.
    reading = asyncio.wrap_future(future)
    reading.add_done_callback(lambda done: done.cancelled() or done.exception())
    try:
        await asyncio.wait([reading])
    except asyncio.CancelledError:
        future.cancel()  # the slots stay fenced until it has ended
        raise
    reading.result()


def _verify(
    node: PoolNode, spec: KvSpec, offsets: NDArray[np.int64], expected: list[NDArray[np.uint64]]
) -> NDArray[np.bool_]:
    valid = np.full(offsets.shape[1], spec.block_tokens, np.int32)
    right = np.ones(offsets.shape[1], bool)
    for g in range(spec.num_groups):
        got = layer_digests_at(node.memory.array, np.ascontiguousarray(offsets[g]), spec, g, valid)
        right &= (got == expected[g]).all(axis=1)
    return right


async def _report(node: PoolNode, kv_namespace: bytes, source: PoolClient, corrupt: NDArray[np.uint8]) -> None:
    node.counters["digest_mismatches"] += len(corrupt)
    _log.error("%d blocks copied from %s failed verification and were discarded", len(corrupt), source.target)
    try:
        await source.quarantine(kv_namespace, corrupt)
    except (NetworkError, KvPoolError) as error:
        _log.warning("corrupt blocks could not be reported to %s: %s", source.target, error)


def _left_s(deadline: float) -> float:
    left_s = deadline - asyncio.get_running_loop().time()
    if left_s <= 0:
        raise TimeoutError
    return left_s
