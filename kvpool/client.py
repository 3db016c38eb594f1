"""Client of one pool node: control calls over gRPC. KV bytes are moved by the messenger, with the keys that these calls
return.

Every call raises ControlError of the messenger (Unavailable, DeadlineExceeded) if the node cannot be reached, and an
error of `kvpool.errors` if the node rejects the request.
"""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from typing import Any, TypeVar

import grpc.aio
import numpy as np
from numpy.typing import NDArray

from kvpool.address import check_chain
from kvpool.errors import CopyFailed, PoolRefused, PutLost, SpecMismatch
from kvpool.handles import Flushed, Lease, PoolDescription, PutTicket, Verified, pull_blocks
from kvpool.policy.records import SlotStatus
from kvpool.spec import KvSpec
from messenger import Endpoint, RemoteKey
from moonpool_proto.v1 import common_pb2, pool_pb2, pool_pb2_grpc
from rpc.control import CallRefused, call, open_channel

T = TypeVar("T")

# A pool node answers these calls in milliseconds. If it takes longer, it hangs or is overloaded, and recomputing is
# cheaper than waiting. Shorter than the 5 s after which the conductor suspects a node that stopped reporting.
_ANSWER_S = 3.0

_REFUSALS: dict[str, type[Exception]] = {
    "NOT_FOUND": PutLost,
    "FAILED_PRECONDITION": SpecMismatch,
    "INVALID_ARGUMENT": PoolRefused,
    "ABORTED": CopyFailed,
}


class PoolClient:
    """Client of one pool node for one owner and one event loop. Connects at the first call and reconnects by itself."""

    def __init__(self, target: str, *, owner: str, owner_incarnation: int) -> None:
        self.target = target
        self._owner, self._owner_incarnation = owner, owner_incarnation
        self._channel: grpc.aio.Channel | None = None
        self._description: PoolDescription | None = None

    async def describe(self, *, deadline_s: float = 10) -> PoolDescription:
        """Return the node's current description. It is not cached: a node that restarted has another incarnation."""
        reply = await self._call("Describe", self._stub().Describe(pool_pb2.DescribeRequest()), deadline_s)
        endpoint = Endpoint.from_proto(reply.endpoint)
        self._description = PoolDescription(
            reply.node_id, reply.incarnation, endpoint, reply.arena_bytes, reply.ssd_bytes, reply.door
        )
        return self._description

    async def allocate(
        self,
        kv_namespace: bytes,
        spec: KvSpec,
        chain: NDArray[np.uint8],
        parents: NDArray[np.uint8],
        *,
        ttl_s: float,
        num_tokens: Sequence[int] = (),
        compute_s: float = 0.0,
        deadline_s: float = _ANSWER_S,
    ) -> PutTicket:
        """Allocate slots for those of the blocks `chain` [n, 16] that the node lacks; they must be sealed in `ttl_s`.

        `parents` [n, 16] are the chain keys of the blocks before, zeros for the first block of a prompt. `num_tokens`
        is given per block if any is partial (0 = full; the key of a partial block is its tail key). `compute_s` is the
        time that computing all the blocks took, 0 if unknown. Raises SpecMismatch if the node stores the namespace
        under another spec, and PoolRefused if a block can never fit or the chain is malformed.
        """
        if self._description is None:
            await self.describe(deadline_s=deadline_s)
        request = pool_pb2.AllocateRequest(
            kv_namespace=kv_namespace,
            spec=spec.to_proto(),
            owner=self._owner,
            owner_incarnation=self._owner_incarnation,
            chain=check_chain(chain).tobytes(),
            parents=check_chain(parents).tobytes(),
            ttl_s=ttl_s,
            num_tokens=num_tokens,
            compute_s=compute_s,
        )
        reply = await self._call("Allocate", self._stub().Allocate(request), deadline_s)
        status = [_status(value) for value in reply.status]
        new_blocks = [i for i, each in enumerate(status) if each is SlotStatus.NEW]
        offsets = np.array([group.offsets for group in reply.groups], np.int64)
        offsets = offsets.reshape(spec.num_groups, len(new_blocks))
        key = RemoteKey.unpack(reply.key.packed) if new_blocks else None
        return PutTicket(reply.put_id, key, await self._endpoint_of(reply.put_id), status, new_blocks, offsets)

    async def seal(self, ticket: PutTicket, digests: list[NDArray[np.uint64]], *, deadline_s: float = 10) -> int:
        """Make the ticket's NEW blocks visible, after all writes succeeded; `digests` per group are [n_new, layers].

        Returns the number of blocks that became visible. Raises PutLost if the put has ended; then none became visible.
        """
        if not ticket.new_blocks:
            return 0
        no_offsets = np.empty((0, len(ticket.new_blocks)), np.int64)
        request = pool_pb2.SealRequest(put_id=ticket.put_id, blocks=pull_blocks(no_offsets, digests))
        reply = await self._call("Seal", self._stub().Seal(request), deadline_s)
        return reply.sealed

    async def abort_put(self, ticket: PutTicket, *, deadline_s: float = 10) -> None:
        """Give the ticket's slots back. The node cuts off writes in flight. Does nothing if the put has ended."""
        if ticket.new_blocks:
            request = pool_pb2.AbortPutRequest(put_id=ticket.put_id)
            await self._call("AbortPut", self._stub().AbortPut(request), deadline_s)

    async def pin(
        self,
        kv_namespace: bytes,
        chain: NDArray[np.uint8],
        *,
        lease_s: float,
        wait_s: float = 0.0,
        tails: bool = False,
        tail_keys: bytes = b"",
        window_blocks: int = 0,
        deadline_s: float | None = None,
    ) -> Lease | None:
        """Lease the longest leading run of sealed blocks of `chain` [n, 16]; return None if the first block is missing.

        With `window_blocks`, lease in its place the last so many blocks that follow each other, or the leading run if
        it has no more. Some may be missing at its end if they have just left the node; nodes of earlier versions lease
        the leading run.

        Blocks on SSD count if they can be loaded to DRAM within `wait_s`; if there are none, the call does not wait.
        With `tails`, partial blocks that follow the last block of the run are leased too; after an empty run, those
        that begin a prompt. The node leases the first of `tail_keys` (16 bytes each) that it has, otherwise the few
        most recently used. `deadline_s` defaults to `wait_s` plus 3 s.
        """
        request = pool_pb2.PinRequest(
            kv_namespace=kv_namespace,
            chain=check_chain(chain).tobytes(),
            owner=self._owner,
            owner_incarnation=self._owner_incarnation,
            lease_s=lease_s,
            wait_s=wait_s,
            tails=tails,
            tail_keys=tail_keys,
            window_blocks=window_blocks,
        )
        deadline_s = wait_s + _ANSWER_S if deadline_s is None else deadline_s
        reply = await self._call("Pin", self._stub().Pin(request), deadline_s)
        return Lease.from_pin_reply(reply, chain) if reply.lease_id else None

    async def prefetch(
        self,
        kv_namespace: bytes,
        chain: NDArray[np.uint8],
        *,
        tail_keys: bytes = b"",
        deadline_s: float = _ANSWER_S,
    ) -> int:
        """Start to load a queued request's blocks, and tails as in `pin`, from SSD to DRAM, without a lease.

        Returns the number of blocks in flight.
        """
        request = pool_pb2.PrefetchRequest(
            kv_namespace=kv_namespace, chain=check_chain(chain).tobytes(), tail_keys=tail_keys
        )
        reply = await self._call("Prefetch", self._stub().Prefetch(request), deadline_s)
        return reply.loading

    async def hint(
        self,
        kv_namespace: bytes,
        chain: NDArray[np.uint8],
        other_replicas: Sequence[int],
        *,
        deadline_s: float = _ANSWER_S,
    ) -> None:
        """Report how many other pool nodes hold each block; blocks with replicas elsewhere are evicted sooner."""
        request = pool_pb2.HintRequest(
            kv_namespace=kv_namespace, chain=check_chain(chain).tobytes(), other_replicas=other_replicas
        )
        await self._call("Hint", self._stub().Hint(request), deadline_s)

    async def retain(
        self,
        kv_namespace: bytes,
        chain: NDArray[np.uint8],
        *,
        tenant: str,
        lifetime_s: float,
        pause_s: float = 0.0,
        priority: int = 0,
        deadline_s: float = _ANSWER_S,
    ) -> bool:
        """Let the node keep a prefix for `lifetime_s`, in preference over other blocks.

        `pause_s`: expected time until its next use, 0 = unknown. Returns False if the node has no room for it beside
        the other prefixes that the tenant announced.
        """
        request = pool_pb2.RetainRequest(
            kv_namespace=kv_namespace,
            chain=check_chain(chain).tobytes(),
            tenant=tenant,
            lifetime_s=lifetime_s,
            pause_s=pause_s,
            priority=priority,
        )
        reply = await self._call("Retain", self._stub().Retain(request), deadline_s)
        return reply.retained

    async def renew(self, lease: Lease, lease_s: float, *, deadline_s: float = 10) -> bool:
        """Extend the lease to `lease_s` from now. Returns False if it has ended; the caller must then pin again."""
        request = pool_pb2.RenewRequest(lease_id=lease.lease_id, lease_s=lease_s)
        reply = await self._call("Renew", self._stub().Renew(request), deadline_s)
        return reply.alive

    async def unpin(
        self, lease: Lease, *, kv_namespace: bytes = b"", superseded: bytes = b"", deadline_s: float = _ANSWER_S
    ) -> None:
        """Release the lease. No read under it may be in flight. Does nothing if the lease has ended.

        `superseded` are keys (16 bytes each) of leased partial blocks that longer ones have replaced. The node removes
        them unless another lease holds them.
        """
        request = pool_pb2.UnpinRequest(lease_id=lease.lease_id, kv_namespace=kv_namespace, superseded=superseded)
        await self._call("Unpin", self._stub().Unpin(request), deadline_s)

    async def evict(self, kv_namespace: bytes, chain: NDArray[np.uint8], *, deadline_s: float = 10) -> int:
        """Remove the blocks that are not leased and have no followers at this node. Returns the number removed."""
        reply = await self._call("Evict", self._stub().Evict(_evict_request(kv_namespace, chain)), deadline_s)
        return reply.removed

    async def quarantine(self, kv_namespace: bytes, chain: NDArray[np.uint8], *, deadline_s: float = _ANSWER_S) -> int:
        """Remove corrupt blocks, leased or not. Returns the number removed."""
        reply = await self._call("Quarantine", self._stub().Quarantine(_evict_request(kv_namespace, chain)), deadline_s)
        return reply.removed

    async def copy(
        self,
        kv_namespace: bytes,
        chain: NDArray[np.uint8],
        source_target: str,
        timeout_s: float,
        *,
        alone: bool = False,
    ) -> tuple[int, int]:
        """Make this node read blocks from another pool node. Returns (blocks copied and verified, their bytes).

        `alone`: each of them is kept or evicted without regard to the others.

        The node skips blocks that it has, that the source lacks or that do not fit, and reports corrupt ones to the
        source. Raises CopyFailed if the source cannot be reached or read in time.
        """
        request = pool_pb2.CopyRequest(
            kv_namespace=kv_namespace,
            chain=check_chain(chain).tobytes(),
            source_target=source_target,
            timeout_s=timeout_s,
            alone=alone,
        )
        reply = await self._call("Copy", self._stub().Copy(request), timeout_s + 5)
        return reply.copied, reply.bytes

    async def read_coded(
        self, lease: Lease, blocks: Sequence[int], *, silence_s: float
    ) -> AsyncGenerator[pool_pb2.CodedBlock, None]:
        """Yield the lease's blocks with these indices, compressed by the node. `silence_s` is the deadline of each.

        Raises PoolRefused if the lease has ended, CallRefused with code UNIMPLEMENTED if the node cannot compress.
        """
        stream = self._stub().ReadCoded(pool_pb2.ReadCodedRequest(lease_id=lease.lease_id, blocks=blocks))
        try:
            for _ in blocks:
                message = await self._call("ReadCoded", stream.read(), silence_s)
                if not isinstance(message, pool_pb2.CodedBlock):
                    raise PoolRefused(f"{self.target} sent fewer than {len(blocks)} blocks")
                yield message
        finally:
            stream.cancel()

    async def inspect(
        self, key_prefix: bytes, kv_namespace: bytes = b"", *, deadline_s: float = 10
    ) -> list[dict[str, Any]]:
        """Describe the blocks whose chain key starts with `key_prefix`; an empty `kv_namespace` means all namespaces.

        The node reads and verifies their bytes. Raises PoolRefused if the prefix matches more than 64 blocks.
        """
        request = pool_pb2.InspectRequest(kv_namespace=kv_namespace, key_prefix=key_prefix)
        reply = await self._call("Inspect", self._stub().Inspect(request), deadline_s)
        return list(json.loads(reply.json))

    async def flush(self, kv_namespace: bytes = b"", *, dram_only: bool = False, deadline_s: float = 600) -> Flushed:
        """Remove all unused blocks from both tiers; with `dram_only`, write them to SSD and drop them from DRAM."""
        request = pool_pb2.FlushRequest(kv_namespace=kv_namespace, dram_only=dram_only)
        reply = await self._call("Flush", self._stub().Flush(request), deadline_s)
        return Flushed(reply.removed, reply.kept)

    async def verify(self, kv_namespace: bytes = b"", *, silence_s: float = 60) -> AsyncIterator[Verified]:
        """Make the node read back and verify every sealed block of both tiers; it removes corrupt ones.

        Yields progress; the last item has `checked` equal to `total`. `silence_s` is the deadline of each step.
        """
        stream = self._stub().Verify(pool_pb2.VerifyRequest(kv_namespace=kv_namespace))
        try:
            while True:
                progress = await self._call("Verify", stream.read(), silence_s)
                if not isinstance(progress, pool_pb2.VerifyProgress):
                    return
                yield Verified(progress.checked, progress.total, progress.corrupt)
        finally:
            stream.cancel()

    async def state(self, *, deadline_s: float = 10) -> dict[str, Any]:
        """Return the node's state and counters, as shown to operators."""
        reply = await self._call("State", self._stub().State(common_pb2.JsonRequest()), deadline_s)
        return dict(json.loads(reply.json))

    async def validate(self, *, deadline_s: float = 10) -> dict[str, Any]:
        """Return the node's self-check: {"ok", "problems", "counts"}; ok means consistent and nothing held."""
        reply = await self._call("Validate", self._stub().Validate(common_pb2.JsonRequest()), deadline_s)
        return dict(json.loads(reply.json))

    async def close(self) -> None:
        """Disconnect. Leases and puts that were not released expire."""
        if self._channel is not None:
            channel, self._channel = self._channel, None
            await channel.close()

    async def _endpoint_of(self, put_id: str) -> Endpoint:
        """Return the endpoint to write a put to; describe the node again only if it has restarted."""
        known = self._description
        if known is None or (put_id and not put_id.startswith(f"put-{known.incarnation:x}-")):
            known = await self.describe()
        return known.endpoint

    def _stub(self) -> "pool_pb2_grpc.PoolAsyncStub":
        if self._channel is None:
            self._channel = open_channel(self.target)
        return pool_pb2_grpc.PoolStub(self._channel)

    async def _call(self, name: str, rpc: Awaitable[T], deadline_s: float) -> T:
        try:
            return await call(rpc, what=f"Pool.{name}", target=self.target, deadline_s=deadline_s)
        except CallRefused as error:
            if error.code in _REFUSALS:
                raise _REFUSALS[error.code](str(error)) from error
            raise


def _status(value: int) -> SlotStatus:
    """Decode a slot status; unknown statuses, from newer nodes, count as NO_SPACE."""
    return SlotStatus(value) if value in list(SlotStatus) else SlotStatus.NO_SPACE


def _evict_request(kv_namespace: bytes, chain: NDArray[np.uint8]) -> pool_pb2.EvictRequest:
    return pool_pb2.EvictRequest(kv_namespace=kv_namespace, chain=check_chain(chain).tobytes())
