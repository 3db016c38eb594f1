"""Between the engine's slots and the pool: pin and load reused blocks, verify them, store new ones."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvpool import KvPoolError, Lease, PoolClient, PutTicket
from messenger import DeadlineExceeded, Messenger, MessengerError
from messenger.control import ControlError
from moonpool_proto.v1.conductor_pb2 import Placement
from worker.counters import Counters
from worker.kv_memory import KvMemory
from worker.policy import Breaker
from worker.settle import in_thread, settled

log = logging.getLogger(__name__)

PoolErrors = (KvPoolError, ControlError, MessengerError)
# A pool node that hangs costs each call its deadline. The first pause is as long as the conductor takes to suspect a
# node; the longest keeps what a node that came back can give from being missed for long.
_HOLD_OFF_S, _LONGEST_HOLD_OFF_S = 5.0, 30.0


@dataclass(slots=True)
class Pinned:
    """Leased blocks [first, first + lease.num_blocks) of a prompt at one pool node."""

    first: int
    lease: Lease
    client: PoolClient


class PoolGlue:
    """One worker's way to its own pool node and, when told where, to others."""

    def __init__(
        self,
        memory: KvMemory,
        messenger: Messenger,
        kv_namespace: bytes,
        *,
        own_target: str,
        owner: str,
        incarnation: int,
        lease_s: float,
        put_ttl_s: float,
        counters: Counters,
    ) -> None:
        self._memory = memory
        self._messenger = messenger
        self._namespace = kv_namespace
        self._owner, self._incarnation = owner, incarnation
        self._lease_s, self._put_ttl_s = lease_s, put_ttl_s
        self._counters = counters
        self._own_target = own_target
        self._clients: dict[str, PoolClient] = {}
        self._breaker = Breaker(_HOLD_OFF_S, _LONGEST_HOLD_OFF_S)
        self._now_s = time.monotonic
        self.num_pinned = 0

    def client(self, target: str) -> PoolClient:
        if target not in self._clients:
            self._clients[target] = PoolClient(target, owner=self._owner, owner_incarnation=self._incarnation)
        return self._clients[target]

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()

    async def pin(self, keys: Sequence[bytes], placement: Placement) -> list[Pinned]:
        """Lease the longest leading run of `keys` that this host's pool and the placement's holders have.

        A pool that cannot be reached only shortens the run: what is missing is computed.
        """
        chain = _key_array(keys)
        targets = [(self._own_target, 0, len(keys))]
        targets += [(h.pool.target, h.first_block, h.first_block + h.num_blocks) for h in placement.holders]
        pinned: list[Pinned] = []
        have = 0
        for target, first, end in targets:
            if not target or first > have or min(end, len(keys)) <= have or not self._may_ask(target):
                continue
            try:
                lease = await self.client(target).pin(
                    self._namespace, chain[have : min(end, len(keys))], lease_s=self._lease_s
                )
            except PoolErrors as error:
                self._note(target, error)
                log.warning("pool at %s cannot be used for reuse: %s", target, error)
                continue
            self._note(target)
            if lease is not None:
                pinned.append(Pinned(have, lease, self.client(target)))
                have += lease.num_blocks
                self.num_pinned += 1
        return pinned

    async def unpin(self, pinned: Sequence[Pinned]) -> None:
        """Give leases back; one that cannot be given back expires."""
        for pin in pinned:
            self.num_pinned -= 1
            if not self._may_ask(pin.client.target):
                continue
            try:
                await pin.client.unpin(pin.lease)
                self._note(pin.client.target)
            except PoolErrors as error:
                self._note(pin.client.target, error)
                log.warning("lease %s was not given back and will expire: %s", pin.lease.lease_id, error)

    async def load(self, pinned: Sequence[Pinned], slots: Sequence[int], first: int) -> int:
        """Read leased blocks [first, first + len(slots)) into slots and verify every layer of them.

        Returns how many leading blocks are now in the slots and right. A block that fails verification ends the run, is
        taken out of the pool and counted.
        """
        good = 0
        for pin in pinned:
            skip = max(0, first + good - pin.first)
            count = min(pin.lease.num_blocks - skip, len(slots) - good)
            if count <= 0 or pin.first > first + good:
                continue
            part = slots[good : good + count]
            remote = [pin.lease.offsets[g, skip : skip + count] for g in range(self._memory.num_groups)]
            expected = [d[skip : skip + count] for d in pin.lease.digests]
            began = time.perf_counter()
            peer = self._messenger.connect(pin.lease.endpoint)
            try:
                done = await settled(
                    peer.read(
                        pin.lease.key,
                        self._memory.region,
                        self._memory.slot_slices(part, remote),
                        deadline_s=self._lease_s,
                    )
                )
            except MessengerError as error:
                self._note(pin.client.target, error)
                log.warning("reused blocks could not be read and will be computed: %s", error)
                break
            self._counters.add_transfer("load", done.nbytes, time.perf_counter() - began)
            right = await in_thread(self.count_right, part, expected)
            good += right
            if right < count:
                bad = pin.first + skip + right
                self._counters.add("digest_mismatches", 1)
                log.error("block %d of a reused prefix at %s failed verification", bad, pin.lease.endpoint.node_id)
                await self._quarantine(pin, skip + right)
                break
        if good:
            await in_thread(self._memory.to_device, slots[:good])
        return good

    def _may_ask(self, target: str) -> bool:
        """Whether to call the pool node now; what is not asked of it is computed, not stored, or left to expire."""
        return self._breaker.try_pass(target, self._now_s())

    def _note(self, target: str, error: Exception | None = None) -> None:
        """A call has ended; only a deadline that passed tells that the node hangs."""
        if isinstance(error, DeadlineExceeded):
            self._breaker.failed(target, self._now_s())
        else:
            self._breaker.succeeded(target)

    async def _quarantine(self, pin: Pinned, index: int) -> None:
        key = pin.lease.chain[index : index + 1]
        try:
            await pin.client.quarantine(self._namespace, key)
        except PoolErrors as error:
            log.warning("a corrupt block could not be reported to its pool: %s", error)

    def count_right(self, slots: Sequence[int], expected: Sequence[NDArray[np.uint64]]) -> int:
        """Leading slots whose bytes match the expected layer digests (one array [n, layers] per group)."""
        valid = np.full(len(slots), self._memory.block_tokens, dtype=np.int32)
        right = len(slots)
        for group, want in enumerate(expected):
            wrong = (self._memory.slot_digests(group, slots, valid) != want).any(axis=1).nonzero()[0]
            if len(wrong):
                right = min(right, int(wrong[0]))
        return right

    async def store(self, keys: Sequence[bytes], slots: Sequence[int], first: int) -> None:
        """Put blocks [first, len(keys)) from their slots into this host's pool. A failure is logged and counted: the
        pool only loses a chance of reuse."""
        if first >= len(keys) or not self._own_target or not self._may_ask(self._own_target):
            return
        client = self.client(self._own_target)
        try:
            await self._store(client, keys, slots, first)
            self._note(self._own_target)
        except PoolErrors as error:
            self._note(self._own_target, error)
            self._counters.add("store_failures", 1)
            log.warning("blocks were not stored in the pool: %s", error)
        except Exception:
            self._counters.add("store_failures", 1)
            log.exception("blocks were not stored in the pool")

    async def _store(self, client: PoolClient, keys: Sequence[bytes], slots: Sequence[int], first: int) -> None:
        parents = [keys[i - 1] if i else bytes(16) for i in range(first, len(keys))]
        # A task of its own: a cancelled caller must still learn of the slots that it was given.
        allocating = asyncio.ensure_future(
            client.allocate(
                self._namespace, self._memory.spec, _key_array(keys[first:]), _key_array(parents), ttl_s=self._put_ttl_s
            )
        )
        try:
            ticket = await settled(allocating)
            if ticket.new_blocks:
                await self._fill(client, ticket, [slots[first + i] for i in ticket.new_blocks])
        except BaseException:
            if not allocating.cancelled() and allocating.exception() is None:
                await settled(asyncio.ensure_future(self._abort_put(client, allocating.result())))
            raise

    async def _fill(self, client: PoolClient, ticket: PutTicket, slots: Sequence[int]) -> None:
        remote = [ticket.offsets[g] for g in range(self._memory.num_groups)]
        began = time.perf_counter()
        await in_thread(self._memory.to_host, slots)
        digests = await in_thread(self._digests, slots)
        peer = self._messenger.connect(ticket.endpoint)
        assert ticket.key is not None
        slices = self._memory.slot_slices(slots, remote)
        done = await settled(peer.write(ticket.key, self._memory.region, slices, deadline_s=self._put_ttl_s))
        await client.seal(ticket, digests)
        self._counters.add_transfer("store", done.nbytes, time.perf_counter() - began)

    async def _abort_put(self, client: PoolClient, ticket: PutTicket) -> None:
        try:
            await client.abort_put(ticket)
        except PoolErrors as error:
            log.warning("put %s was not aborted and will expire: %s", ticket.put_id, error)

    def _digests(self, slots: Sequence[int]) -> list[NDArray[np.uint64]]:
        valid = np.full(len(slots), self._memory.block_tokens, dtype=np.int32)
        return [self._memory.slot_digests(g, slots, valid) for g in range(self._memory.num_groups)]


def _key_array(keys: Sequence[bytes]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(-1, 16)
