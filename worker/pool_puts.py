"""Two-phase puts: take slots at a pool node, write blocks there from the engine's, seal them with their digests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvpool import KvPoolError, PoolClient, PutTicket
from messenger import Messenger, MessengerError, Priority
from rpc.control import ControlError
from worker.counters import Counters
from worker.keeping import Kept
from worker.settle import in_thread, settled
from worker.slot_memory import SlotMemory

log = logging.getLogger(__name__)

PoolErrors = (KvPoolError, ControlError, MessengerError)


class PoolPuts:
    """Moves blocks out of one worker's slots. Raises PoolErrors; a put that fails or is cancelled leaves nothing."""

    def __init__(
        self, memory: SlotMemory, messenger: Messenger, kv_namespace: bytes, *, ttl_s: float, counters: Counters
    ) -> None:
        self._memory = memory
        self._messenger = messenger
        self._namespace = kv_namespace
        self._ttl_s = ttl_s
        self._counters = counters

    async def put(
        self, client: PoolClient, kept: Kept, slots: Sequence[int], first: int, *, token_s: float = 0.0
    ) -> None:
        """Store blocks [first, kept.num_blocks) from their slots, as far as they are not there.

        `token_s`: what computing one token took, so that the pool knows what is lost with a block.
        """
        keys, parents, partial = kept.names(first)
        valid = np.array([tokens or self._memory.block_tokens for tokens in partial], np.int32)
        # A task of its own: a cancelled caller must still learn of the slots that it was given.
        allocating = asyncio.ensure_future(
            client.allocate(
                self._namespace,
                self._memory.spec,
                key_array(keys),
                key_array(parents),
                ttl_s=self._ttl_s,
                num_tokens=partial if any(partial) else (),
                compute_s=token_s * int(valid.sum()),
            )
        )
        try:
            ticket = await settled(allocating)
            if ticket.new_blocks:
                await self._fill(
                    client, ticket, [slots[first + i] for i in ticket.new_blocks], valid[ticket.new_blocks]
                )
        except BaseException:
            if not allocating.cancelled() and allocating.exception() is None:
                await settled(asyncio.ensure_future(self._abort(client, allocating.result())))
            raise

    async def _fill(
        self, client: PoolClient, ticket: PutTicket, slots: Sequence[int], valid: NDArray[np.int32]
    ) -> None:
        remote = [ticket.offsets[g] for g in range(self._memory.num_groups)]
        began = time.perf_counter()
        await in_thread(self._memory.to_host, slots)
        digests = await in_thread(self._digests, slots, valid)
        peer = self._messenger.connect(ticket.endpoint)
        assert ticket.key is not None
        slices = self._memory.slot_slices(slots, remote)
        writing = peer.write(
            ticket.key, self._memory.region, slices, deadline_s=self._ttl_s, priority=Priority.BACKGROUND
        )
        done = await settled(writing)
        await client.seal(ticket, digests)
        self._counters.add_transfer("store", done.nbytes, time.perf_counter() - began)

    async def _abort(self, client: PoolClient, ticket: PutTicket) -> None:
        try:
            await client.abort_put(ticket)
        except PoolErrors as error:
            log.warning("put %s was not aborted and will expire: %s", ticket.put_id, error)

    def _digests(self, slots: Sequence[int], valid: NDArray[np.int32]) -> list[NDArray[np.uint64]]:
        return [self._memory.slot_digests(g, slots, valid) for g in range(self._memory.num_groups)]


def key_array(keys: Sequence[bytes]) -> NDArray[np.uint8]:
    """Keys as the pool's client takes them: uint8 [n, 16]."""
    return np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(-1, 16)
