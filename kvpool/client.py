"""Calls to one pool node. Bytes of KV never pass here: move them through the messenger, with what the calls return.

Every call raises messenger's ControlError (Unavailable, DeadlineExceeded) when the node cannot be asked, and an error
of `kvpool.errors` when it refuses.
"""

import json
from collections.abc import AsyncIterator, Awaitable, Sequence
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

# A pool node decides on these calls in milliseconds, so one that needs longer hangs or is overloaded, and what it could
# give costs less to compute. Below the 5 s after which the conductor suspects a silent node.
_ANSWER_S = 3.0

_REFUSALS: dict[str, type[Exception]] = {
    "NOT_FOUND": PutLost,
    "FAILED_PRECONDITION": SpecMismatch,
    "INVALID_ARGUMENT": PoolRefused,
    "ABORTED": CopyFailed,
}


class PoolClient:
    """One owner's way to one pool node, for one event loop. Connects at the first call and reconnects by itself."""

    def __init__(self, target: str, *, owner: str, owner_incarnation: int) -> None:
        self.target = target
        self._owner, self._owner_incarnation = owner, owner_incarnation
        self._channel: grpc.aio.Channel | None = None
        self._description: PoolDescription | None = None

    async def describe(self, *, deadline_s: float = 10) -> PoolDescription:
        """Asks afresh: a node that restarted has another incarnation."""
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
        """Slots for those of the blocks [n, 16] that are not there yet; seal within `ttl_s`.

        `parents` [n, 16] are the keys of the blocks before, zeros for a prompt's first. `num_tokens` per block where
        some are partial (0 = full; the key is then a tail key); `compute_s`: what computing all of them took, as far as
        known. Raises SpecMismatch when the namespace is stored there under another spec, PoolRefused when a block
        cannot fit or the chain is malformed.
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
        """Make the ticket's NEW blocks visible once all writes have succeeded; `digests` per group [n_new, layers].

        Returns how many are visible now. Raises PutLost when the put has ended: nothing became visible.
        """
        if not ticket.new_blocks:
            return 0
        untold = np.empty((0, len(ticket.new_blocks)), np.int64)
        request = pool_pb2.SealRequest(put_id=ticket.put_id, blocks=pull_blocks(untold, digests))
        reply = await self._call("Seal", self._stub().Seal(request), deadline_s)
        return reply.sealed

    async def abort_put(self, ticket: PutTicket, *, deadline_s: float = 10) -> None:
        """Give the ticket's slots back. Writes still under way under its key are cut off. No error if it has ended."""
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
        deadline_s: float | None = None,
    ) -> Lease | None:
        """Lease the longest run of sealed blocks at the start of `chain` [n, 16]; None when its first is not there.

        Blocks on SSD belong to the run as far as they can be brought to DRAM within `wait_s`; nothing is waited for
        where there are none. With `tails`, partial blocks that follow the run's last block are leased too (if the run
        is empty, those that begin a prompt): the first of `tail_keys` (16 bytes each) that is there, or else a few.
        `deadline_s`: 3 s above `wait_s` where not given.
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
        """Begin to bring a waiting request's blocks, and tails as in `pin`, from SSD to DRAM, holding nothing.

        How many are on their way.
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
        """Tell how many other pool nodes hold each of the blocks: what is elsewhere too is evicted sooner."""
        request = pool_pb2.HintRequest(
            kv_namespace=kv_namespace, chain=check_chain(chain).tobytes(), other_replicas=other_replicas
        )
        await self._call("Hint", self._stub().Hint(request), deadline_s)

    async def renew(self, lease: Lease, lease_s: float, *, deadline_s: float = 10) -> bool:
        """Let the lease last `lease_s` from now. False when it is gone: pin again."""
        request = pool_pb2.RenewRequest(lease_id=lease.lease_id, lease_s=lease_s)
        reply = await self._call("Renew", self._stub().Renew(request), deadline_s)
        return reply.alive

    async def unpin(
        self, lease: Lease, *, kv_namespace: bytes = b"", superseded: bytes = b"", deadline_s: float = _ANSWER_S
    ) -> None:
        """Give the lease back once no read under it is under way. No error if it is gone.

        `superseded`: keys (16 bytes each) of its partial blocks that longer ones have taken the place of. They are
        removed, unless somebody else has leased them.
        """
        request = pool_pb2.UnpinRequest(lease_id=lease.lease_id, kv_namespace=kv_namespace, superseded=superseded)
        await self._call("Unpin", self._stub().Unpin(request), deadline_s)

    async def evict(self, kv_namespace: bytes, chain: NDArray[np.uint8], *, deadline_s: float = 10) -> int:
        """Remove those of the blocks that nobody has leased and no other block here follows. Returns how many."""
        reply = await self._call("Evict", self._stub().Evict(_evict_request(kv_namespace, chain)), deadline_s)
        return reply.removed

    async def quarantine(self, kv_namespace: bytes, chain: NDArray[np.uint8], *, deadline_s: float = _ANSWER_S) -> int:
        """Remove blocks found corrupt, leased or not. Returns how many were there."""
        reply = await self._call("Quarantine", self._stub().Quarantine(_evict_request(kv_namespace, chain)), deadline_s)
        return reply.removed

    async def copy(
        self, kv_namespace: bytes, chain: NDArray[np.uint8], source_target: str, timeout_s: float
    ) -> tuple[int, int]:
        """Let this node read blocks from another one. Returns (blocks that arrived and are right, bytes of them).

        Blocks that it has, that the source lacks or that there is no space for are left out; corrupt ones are reported
        to the source. Raises CopyFailed when the source cannot be reached or read in time.
        """
        request = pool_pb2.CopyRequest(
            kv_namespace=kv_namespace,
            chain=check_chain(chain).tobytes(),
            source_target=source_target,
            timeout_s=timeout_s,
        )
        reply = await self._call("Copy", self._stub().Copy(request), timeout_s + 5)
        return reply.copied, reply.bytes

    async def inspect(
        self, key_prefix: bytes, kv_namespace: bytes = b"", *, deadline_s: float = 10
    ) -> list[dict[str, Any]]:
        """All about the blocks whose chain key begins with these bytes, in any namespace where none is given.

        Their bytes are read and checked for it. Raises PoolRefused for too short a prefix of too many blocks.
        """
        request = pool_pb2.InspectRequest(kv_namespace=kv_namespace, key_prefix=key_prefix)
        reply = await self._call("Inspect", self._stub().Inspect(request), deadline_s)
        return list(json.loads(reply.json))

    async def flush(self, kv_namespace: bytes = b"", *, dram_only: bool = False, deadline_s: float = 600) -> Flushed:
        """Take out what nobody uses, everywhere; or, `dram_only`, write it to SSD and empty DRAM of it."""
        request = pool_pb2.FlushRequest(kv_namespace=kv_namespace, dram_only=dram_only)
        reply = await self._call("Flush", self._stub().Flush(request), deadline_s)
        return Flushed(reply.removed, reply.kept)

    async def verify(self, kv_namespace: bytes = b"", *, silence_s: float = 60) -> AsyncIterator[Verified]:
        """Let the node read back and check every sealed block of both tiers; corrupt ones are taken out.

        Tells its progress, the last time with `checked` equal to `total`. `silence_s` is the deadline of each step.
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
        """What the node holds and has counted, for people and tools."""
        reply = await self._call("State", self._stub().State(common_pb2.JsonRequest()), deadline_s)
        return dict(json.loads(reply.json))

    async def validate(self, *, deadline_s: float = 10) -> dict[str, Any]:
        """The node's self-check: {"ok", "problems", "counts"}; ok means all is consistent and nothing is held."""
        reply = await self._call("Validate", self._stub().Validate(common_pb2.JsonRequest()), deadline_s)
        return dict(json.loads(reply.json))

    async def close(self) -> None:
        """Disconnect. Leases and puts not given back end by themselves."""
        if self._channel is not None:
            channel, self._channel = self._channel, None
            await channel.close()

    async def _endpoint_of(self, put_id: str) -> Endpoint:
        """Where to write a put: known, unless the node has restarted since it was last described."""
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
    """What a newer node says that is not known here is no slot to write to."""
    return SlotStatus(value) if value in list(SlotStatus) else SlotStatus.NO_SPACE


def _evict_request(kv_namespace: bytes, chain: NDArray[np.uint8]) -> pool_pb2.EvictRequest:
    return pool_pb2.EvictRequest(kv_namespace=kv_namespace, chain=check_chain(chain).tobytes())
