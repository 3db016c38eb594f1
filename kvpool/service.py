"""gRPC service of a pool node: decodes requests, calls the node, encodes replies."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import grpc

from kvpool import node_metrics
from kvpool.address import KEY_NBYTES
from kvpool.coded_copies import encoded_blocks
from kvpool.errors import (
    AddressError,
    CopyFailed,
    KvPoolError,
    PoolRefused,
    PutLost,
    SpecError,
    SpecMismatch,
)
from kvpool.inspection import inspect, verify
from kvpool.node import PoolNode
from kvpool.policy import Block, PutRequest
from kvpool.policy.eviction import RetainRequest
from kvpool.remote_copy import copy_blocks
from kvpool.spec import KvSpec
from moonpool_proto.v1 import common_pb2, pool_pb2, pool_pb2_grpc, worker_pb2

Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Any]])
Context = grpc.aio.ServicerContext

_CODES: dict[type[KvPoolError], grpc.StatusCode] = {
    PutLost: grpc.StatusCode.NOT_FOUND,
    SpecMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    CopyFailed: grpc.StatusCode.ABORTED,
    SpecError: grpc.StatusCode.INVALID_ARGUMENT,
    AddressError: grpc.StatusCode.INVALID_ARGUMENT,
    PoolRefused: grpc.StatusCode.INVALID_ARGUMENT,
}


def _code_of(error: KvPoolError) -> grpc.StatusCode:
    return next((code for kind, code in _CODES.items() if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


def _refusing(handler: Handler) -> Handler:
    """Convert the package's errors to status codes, which `kvpool.client` converts back."""

    @functools.wraps(handler)
    async def answer(self: PoolService, request: Any, context: Context[Any, Any]) -> Any:
        try:
            return await handler(self, request, context)
        except KvPoolError as error:
            await context.abort(_code_of(error), str(error))

    return answer  # type: ignore[return-value]


class PoolService(pool_pb2_grpc.PoolServicer):
    """gRPC service of one PoolNode."""

    def __init__(self, node: PoolNode) -> None:
        self._node = node

    @_refusing
    async def Describe(self, request: pool_pb2.DescribeRequest, context: Context[Any, Any]) -> pool_pb2.DescribeReply:
        return pool_pb2.DescribeReply(
            node_id=self._node.config.node_id,
            incarnation=self._node.incarnation,
            endpoint=self._node.messenger.endpoint.to_proto(),
            arena_bytes=self._node.config.pool.pool_bytes,
            ssd_bytes=self._node.config.limits.ssd_nbytes,
            door=self._node.local_socket,
        )

    @_refusing
    async def Allocate(self, request: pool_pb2.AllocateRequest, context: Context[Any, Any]) -> pool_pb2.AllocateReply:
        spec = KvSpec.from_proto(request.spec)
        put = PutRequest(
            _namespace(request.kv_namespace),
            spec,
            _keys(request.chain),
            _keys(request.parents),
            request.num_tokens,
            request.compute_s,
        )
        allocation = self._node.allocate(
            put,
            owner=request.owner,
            owner_incarnation=request.owner_incarnation,
            ttl_ns=_nanoseconds("ttl_s", request.ttl_s),
        )
        key = None
        if allocation.new_blocks:
            key = worker_pb2.RemoteKey(packed=self._node.write_key(allocation).pack())
        groups = [
            worker_pb2.BlockSlots(offsets=[block.offsets[g] for block in allocation.new_blocks])
            for g in range(spec.num_groups)
        ]
        return pool_pb2.AllocateReply(
            put_id=allocation.put_id,
            key=key,
            status=[pool_pb2.SlotStatus.ValueType(status) for status in allocation.status],
            groups=groups,
        )

    @_refusing
    async def Seal(self, request: pool_pb2.SealRequest, context: Context[Any, Any]) -> pool_pb2.SealReply:
        sealed = await self._node.seal(request.put_id, [tuple(block.digests) for block in request.blocks])
        return pool_pb2.SealReply(sealed=sealed)

    @_refusing
    async def AbortPut(self, request: pool_pb2.AbortPutRequest, context: Context[Any, Any]) -> pool_pb2.AbortPutReply:
        await self._node.abort(request.put_id)
        return pool_pb2.AbortPutReply()

    @_refusing
    async def Pin(self, request: pool_pb2.PinRequest, context: Context[Any, Any]) -> pool_pb2.PinReply:
        kv_namespace, chain = _namespace(request.kv_namespace), _keys(request.chain)
        seen = range(len(chain))
        if request.window_blocks:
            seen = self._node.core.last_window(time.monotonic_ns(), kv_namespace, chain, request.window_blocks)
        grant = await self._node.pin(
            kv_namespace,
            chain[seen.start : seen.stop],
            owner=request.owner,
            owner_incarnation=request.owner_incarnation,
            lease_ns=_nanoseconds("lease_s", request.lease_s),
            wait_s=_wait_s(request.wait_s),
            tails=request.tails,
            tail_keys=_keys(request.tail_keys),
        )
        if grant is None:
            return pool_pb2.PinReply()
        return pool_pb2.PinReply(
            lease_id=grant.lease_id,
            key=worker_pb2.RemoteKey(packed=self._node.read_key.pack()),
            blocks=[_pull_block(block) for block in grant.blocks],
            endpoint=self._node.messenger.endpoint.to_proto(),
            ssd_blocks=grant.num_from_ssd,
            spec=(grant.blocks or grant.tails)[0].spec.to_proto(),
            tails=[
                pool_pb2.Tail(key=tail.chain_key, num_tokens=tail.num_tokens, block=_pull_block(tail))
                for tail in grant.tails
            ],
            first_block=seen.start,
        )

    @_refusing
    async def Prefetch(self, request: pool_pb2.PrefetchRequest, context: Context[Any, Any]) -> pool_pb2.PrefetchReply:
        namespace = _namespace(request.kv_namespace)
        loading = self._node.prefetch(namespace, _keys(request.chain), _keys(request.tail_keys))
        return pool_pb2.PrefetchReply(loading=loading)

    @_refusing
    async def Hint(self, request: pool_pb2.HintRequest, context: Context[Any, Any]) -> pool_pb2.HintReply:
        self._node.core.hint(
            time.monotonic_ns(), _namespace(request.kv_namespace), _keys(request.chain), request.other_replicas
        )
        return pool_pb2.HintReply()

    @_refusing
    async def Retain(self, request: pool_pb2.RetainRequest, context: Context[Any, Any]) -> pool_pb2.RetainReply:
        announced = RetainRequest(
            request.tenant,
            lifetime_ns=_nanoseconds("lifetime_s", request.lifetime_s),
            pause_ns=_nanoseconds("pause_s", request.pause_s) if request.pause_s else 0,
            priority=request.priority,
        )
        chain = _keys(request.chain)
        retained = self._node.core.retain(time.monotonic_ns(), _namespace(request.kv_namespace), chain, announced)
        return pool_pb2.RetainReply(retained=retained)

    @_refusing
    async def Renew(self, request: pool_pb2.RenewRequest, context: Context[Any, Any]) -> pool_pb2.RenewReply:
        return pool_pb2.RenewReply(alive=self._node.renew(request.lease_id, _nanoseconds("lease_s", request.lease_s)))

    @_refusing
    async def Unpin(self, request: pool_pb2.UnpinRequest, context: Context[Any, Any]) -> pool_pb2.UnpinReply:
        superseded = _keys(request.superseded)
        self._node.core.unpin(request.lease_id)
        if superseded:
            self._node.core.evict(_namespace(request.kv_namespace), superseded)
            self._node.publish_changes()
        return pool_pb2.UnpinReply()

    @_refusing
    async def Evict(self, request: pool_pb2.EvictRequest, context: Context[Any, Any]) -> pool_pb2.EvictReply:
        removed = self._node.core.evict(_namespace(request.kv_namespace), _keys(request.chain))
        self._node.publish_changes()
        return pool_pb2.EvictReply(removed=removed)

    @_refusing
    async def Quarantine(self, request: pool_pb2.EvictRequest, context: Context[Any, Any]) -> pool_pb2.EvictReply:
        removed = self._node.core.quarantine(_namespace(request.kv_namespace), _keys(request.chain))
        self._node.publish_changes()
        return pool_pb2.EvictReply(removed=removed)

    @_refusing
    async def Copy(self, request: pool_pb2.CopyRequest, context: Context[Any, Any]) -> pool_pb2.CopyReply:
        _nanoseconds("timeout_s", request.timeout_s)
        chain = _keys(request.chain)
        namespace = _namespace(request.kv_namespace)
        copied = await copy_blocks(
            self._node, namespace, chain, request.source_target, request.timeout_s, alone=request.alone
        )
        return pool_pb2.CopyReply(copied=copied.num_blocks, bytes=copied.nbytes)

    async def ReadCoded(
        self, request: pool_pb2.ReadCodedRequest, context: Context[Any, Any]
    ) -> AsyncIterator[pool_pb2.CodedBlock]:
        try:
            async for block in encoded_blocks(self._node, request.lease_id, request.blocks):
                yield block
        except KvPoolError as error:
            await context.abort(_code_of(error), str(error))

    @_refusing
    async def Inspect(self, request: pool_pb2.InspectRequest, context: Context[Any, Any]) -> common_pb2.JsonReply:
        found = await inspect(self._node, _any_namespace(request.kv_namespace), request.key_prefix)
        return common_pb2.JsonReply(json=json.dumps(found))

    @_refusing
    async def Flush(self, request: pool_pb2.FlushRequest, context: Context[Any, Any]) -> pool_pb2.FlushReply:
        namespace = _any_namespace(request.kv_namespace) or None
        removed, kept = await self._node.flush(namespace, dram_only=request.dram_only)
        return pool_pb2.FlushReply(removed=removed, kept=kept)

    async def Verify(
        self, request: pool_pb2.VerifyRequest, context: Context[Any, Any]
    ) -> AsyncIterator[pool_pb2.VerifyProgress]:
        try:
            async for done in verify(self._node, _any_namespace(request.kv_namespace)):
                yield pool_pb2.VerifyProgress(checked=done.checked, total=done.total, corrupt=done.corrupt)
        except KvPoolError as error:
            await context.abort(_code_of(error), str(error))

    async def Events(
        self, request: pool_pb2.EventsRequest, context: Context[Any, Any]
    ) -> AsyncIterator[pool_pb2.PoolEvents]:
        async for events in self._node.event_streams.read(request.incarnation, request.after_seq):
            yield events.to_proto()

    @_refusing
    async def State(self, request: common_pb2.JsonRequest, context: Context[Any, Any]) -> common_pb2.JsonReply:
        return common_pb2.JsonReply(json=json.dumps(node_metrics.state(self._node)))

    @_refusing
    async def Validate(self, request: common_pb2.JsonRequest, context: Context[Any, Any]) -> common_pb2.JsonReply:
        return common_pb2.JsonReply(json=json.dumps(node_metrics.validate(self._node)))


def _pull_block(block: Block) -> worker_pb2.PullBlock:
    return worker_pb2.PullBlock(offsets=block.offsets, digests=block.digests)


def _namespace(data: bytes) -> bytes:
    if len(data) != KEY_NBYTES:
        raise AddressError(f"a namespace of {len(data)} bytes: expected {KEY_NBYTES}")
    return data


def _any_namespace(data: bytes) -> bytes:
    """Return the namespace, or empty bytes, which mean all namespaces."""
    return _namespace(data) if data else data


def _keys(data: bytes) -> list[bytes]:
    if len(data) % KEY_NBYTES:
        raise AddressError(f"a chain of {len(data)} bytes: expected a multiple of {KEY_NBYTES}")
    return [data[i : i + KEY_NBYTES] for i in range(0, len(data), KEY_NBYTES)]


_LONGEST_S = 1e9  # in nanoseconds, and added to any time of a monotonic clock, it fits into an int64


def _wait_s(seconds: float) -> float:
    if not 0 <= seconds <= _LONGEST_S:
        raise PoolRefused(f"wait_s must be a number of seconds from 0 to {_LONGEST_S:g}, got {seconds!r}")
    return seconds


def _nanoseconds(name: str, seconds: float) -> int:
    if not 0 < seconds <= _LONGEST_S:
        raise PoolRefused(f"{name} must be a positive number of seconds, at most {_LONGEST_S:g}, got {seconds!r}")
    return int(seconds * 1e9)
