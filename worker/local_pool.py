"""Access to this host's pool through shared memory.

Leased blocks are copied from the pool's mapped arena; puts take one round trip. If there is no such access (another
host or container, tcp only) or it has closed, callers use the messenger; access is retried periodically.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvpool import KvSpec, PoolClient
from kvpool.errors import KvPoolError, LocalPoolUnavailable
from kvpool.local import LocalPoolClient, PutStatus, RegisteredBlocks
from messenger import Messenger
from rpc.control import ControlError
from worker.prefix_blocks import PinnedBlocks, PrefixSave, StoredPart, StoredParts, key_array
from worker.shielded_wait import in_thread
from worker.slot_memory import SlotMemory

log = logging.getLogger(__name__)

_AGAIN_S = 5.0  # seconds between attempts to connect
_ANSWER_S = 5.0  # deadline of each request


class LocalPoolAccess:
    """One worker's client of its host's pool node in shared memory."""

    def __init__(
        self, memory: SlotMemory, messenger: Messenger, parts: StoredParts, *, owner: str, incarnation: int
    ) -> None:
        self._memory = memory
        self._messenger = messenger
        self._parts = parts
        self._owner, self._incarnation = owner, incarnation
        self._pool: LocalPoolClient | None = None
        self._region_id = 0
        self._next_try_s = 0.0
        self._entering = asyncio.Lock()  # concurrent reads wait for one attempt to connect

    async def close(self) -> None:
        """Disconnect. Idempotent."""
        pool, self._pool = self._pool, None
        if pool is not None:
            await in_thread(pool.close)

    def lacks(self, chain: NDArray[np.uint8], tail_keys: NDArray[np.uint8]) -> bool:
        """Return True if the pool's memory certainly holds neither the first block of `chain` [n, 16] nor any block of
        `tail_keys` [m, 16]: the shared index says so, without a call. False if it cannot be read.
        """
        pool = self._pool
        if pool is None:
            return False
        try:
            namespace = self._parts[False].kv_namespace
            if any(pool.contains(namespace, key) for key in (*chain[:1], *tail_keys)):
                return False
            # Counted now: later, the look-up would find the blocks that this request is about to store.
            pool.touch(namespace, chain)
            pool.send_touches()
        except LocalPoolUnavailable:
            return False
        return True

    async def load(
        self,
        pin: PinnedBlocks,
        spec: KvSpec,
        places: tuple[NDArray[np.int64], NDArray[np.int64]],
        digests: Sequence[NDArray[np.uint64]],
        valid: NDArray[np.int32],
    ) -> NDArray[np.bool_] | None:
        """Copy leased blocks, or those layers of them that `spec` describes, into slots and verify them.

        `places` are byte offsets in the pool's arena and in this worker's region, both int64 [groups, n]; `digests` has
        per group the expected ones [n, layers], `valid` [n] the tokens that are copied. Returns bool [n], True for
        verified blocks; None if the pool is not reachable this way.
        """
        pool = await self._entered(pin.client)
        if pool is None or pool.incarnation != pin.lease.endpoint.incarnation:
            return None
        expected = np.ascontiguousarray(np.concatenate(digests, axis=1))
        region = self._memory.host_region
        assert region is not None  # `_entered` connects for host memory only
        memory, lengths = region.array, valid.astype(np.uint32)
        try:
            return await in_thread(pool.read_leased, spec, places[0], expected, memory, places[1], lengths)
        except LocalPoolUnavailable as error:
            log.info("leased blocks are read through the messenger: %s", error)
            return None

    async def put(
        self, client: PoolClient, part: StoredPart, kept: PrefixSave, slots: Sequence[int], first: int, token_s: float
    ) -> int | None:
        """Store blocks as `PoolWriter.put` does. Returns the number stored; None if the pool is not reachable."""
        pool = await self._entered(client)
        if pool is None:
            return None
        try:
            return await in_thread(self._put, pool, part, kept, slots, first, token_s)
        except LocalPoolUnavailable as error:
            log.info("blocks are stored through the messenger: %s", error)
            return None

    def _put(
        self,
        pool: LocalPoolClient,
        part: StoredPart,
        kept: PrefixSave,
        slots: Sequence[int],
        first: int,
        token_s: float,
    ) -> int:
        keys, parents, partial = kept.names(first, alone=not part.is_chained)
        chain = key_array(keys)
        known = pool.match(part.kv_namespace, chain)
        pool.touch(part.kv_namespace, chain[:known])
        if known == len(keys):
            return 0
        lengths = np.array(partial[known:], np.uint32)
        tokens = int(np.where(lengths, lengths, self._memory.block_tokens).sum())
        new = slots[first + known : first + len(keys)]
        self._memory.to_host_now(new, part.groups)
        offsets = self._memory.all_offsets(new, part.groups)
        digests = pool.digests(part.spec, self._region_id, offsets, lengths)
        status = pool.put(
            part.kv_namespace,
            part.spec,
            chain[known:],
            key_array(parents[known:]),
            RegisteredBlocks(self._region_id, offsets, digests),
            num_tokens=lengths,
            compute_s=token_s * tokens,
        )
        if (status == PutStatus.WRONG).any():
            raise KvPoolError("the bytes copied by the pool node do not match their digests; none were stored")
        return int(np.count_nonzero(status == PutStatus.STORED))

    async def _entered(self, client: PoolClient) -> LocalPoolClient | None:
        """Return the open connection, or connect if it is time to; None if there is none."""
        async with self._entering:
            return await self._enter_again(client)

    async def _enter_again(self, client: PoolClient) -> LocalPoolClient | None:
        if self._pool is not None and self._pool.alive:
            return self._pool
        if self._memory.host_region is None or time.monotonic() < self._next_try_s:
            return None
        self._next_try_s = time.monotonic() + _AGAIN_S
        await self.close()
        try:
            told = await client.describe(deadline_s=_ANSWER_S)
            if told.local_socket and told.endpoint.host_id == self._messenger.endpoint.host_id:
                pool = await in_thread(self._enter, told.local_socket)
                if (pool.node_id, pool.incarnation) == (told.node_id, told.incarnation):
                    self._pool = pool
                else:
                    pool.close()
        except (KvPoolError, ControlError) as error:
            log.info("this host's pool is reached through the messenger: %s", error)
        return self._pool

    def _enter(self, door: str) -> LocalPoolClient:
        pool = LocalPoolClient(door, owner=self._owner, owner_incarnation=self._incarnation, deadline_s=_ANSWER_S)
        try:
            region = self._memory.host_region
            assert region is not None
            self._region_id = pool.register_memory(region.memory)
        except BaseException:
            pool.close()
            raise
        return pool
