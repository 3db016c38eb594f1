"""The prefill node's side of a hand-off: reserve on the decode node, commit with the first token, abort."""

from __future__ import annotations

import asyncio
import logging
import time

import grpc
import numpy as np
from numpy.typing import NDArray

from messenger import Endpoint
from moonpool_proto.v1.worker_pb2 import AbortRequest, CommitRequest, ReserveReply, ReserveRequest
from moonpool_proto.v1.worker_pb2_grpc import WorkerStub
from prefill_node.push import Pusher, remote_offsets
from rpc.control import CallRefused, ControlError, call
from telemetry.tracing import Span
from worker.errors import RequestFailed
from worker.node import WorkerNode
from worker.prepare import Prepared
from worker.request import EngineSequence, queue_entry_to_proto
from worker.shielded_wait import wait_unless_cancelled

log = logging.getLogger(__name__)

COMMIT_ROUNDS = 3
_UNREADY = ("starting", "draining")  # refusals of a decode node that serves no request now


class PrefillHandoff:
    """One attempt's reservation on one decode node."""

    def __init__(self, node: WorkerNode, work: Prepared, channel: grpc.aio.Channel, span: Span) -> None:
        """`span`: the parent span of the hand-off."""
        self._node = node
        self._work = work
        self._request = work.request
        self._decode = work.request.placement.decode
        self._stub = WorkerStub(channel)
        self._span = span
        self.reservation: ReserveReply | None = None
        self._may_hold = False  # the decode node may hold an uncommitted reservation
        self.is_called_off = False
        self.num_corrupt = 0  # blocks that the decode node pulled damaged from pools
        self._committing: asyncio.Task[None] | None = None

    async def reserve(self) -> None:
        """Reserve pages on the decode node. Raises RequestFailed with the decode node as the suspect."""
        request, shared = self._request, self._work.shared_blocks
        reserve = ReserveRequest(request=request.proto, writer=self._node.endpoint.to_proto())
        reserve.request.timeout_s = request.time_left_s
        entry = queue_entry_to_proto(self._node.wait_queue.entry(request.key), time.monotonic())
        reserve.request.placement.turn.CopyFrom(entry)
        reserve.superseded = self._work.grown_tail
        for pin in self._work.prefix.blocks:
            if pin.first < min(pin.end, shared):
                reserve.pulls.append(pin.lease.head(shared - pin.first).to_pull_range(pin.first))
        self._may_hold = True
        with self._span.child("reserve", "client", decode_node=self._decode.node_id) as span:
            # If this node does not trace, the decode node's parent is the frontend's span.
            reserve.request.traceparent = span.traceparent or request.traceparent
            await self._reserve(reserve)

    async def _reserve(self, reserve: ReserveRequest) -> None:
        request = self._request
        try:
            self.reservation = await call(
                self._stub.Reserve(reserve, timeout=request.time_left_s),
                what="Reserve",
                target=self._decode.target,
                deadline_s=request.time_left_s,
            )
        except ControlError as error:
            self._may_hold = not isinstance(error, CallRefused)
            refusal = error.reason.partition(":")[0]
            code = refusal if refusal in _UNREADY else "reserve"
            raise self._failed("decode_unreachable" if self._may_hold else code, str(error)) from error

    @property
    def push_from(self) -> int:
        """Index of the first block to push; the decode node has, or pulls, those before it."""
        assert self.reservation is not None
        return max(self._work.shared_blocks, self.reservation.held_blocks)

    @property
    def endpoint(self) -> Endpoint:
        """The decode node's messenger."""
        assert self.reservation is not None
        return Endpoint.from_proto(self.reservation.endpoint)

    def remote_offsets(self) -> list[NDArray[np.int64]]:
        """Return per group the byte offsets of the prompt's blocks on the decode node; -1 for those it does not
        need."""
        assert self.reservation is not None
        return remote_offsets(self.reservation.groups)

    def call_off(self) -> None:
        """End the hand-off because the request has ended; a running or later `commit` returns at once."""
        self.is_called_off = True
        if self._committing is not None:
            self._committing.cancel()

    async def commit(self, pusher: Pusher, sequence: EngineSequence) -> None:
        """Hand over the request once every block has arrived and was verified; push missing blocks again.

        Raises RequestFailed.
        """
        if not self.is_called_off:
            self._committing = asyncio.ensure_future(self._commit(pusher, sequence))
            with self._span.child("commit", "client", decode_node=self._decode.node_id):
                await wait_unless_cancelled(self._committing)
            pusher.trace(self._span, peer=self._decode.node_id)

    async def _commit(self, pusher: Pusher, sequence: EngineSequence) -> None:
        assert self.reservation is not None
        request = self._request
        for _ in range(COMMIT_ROUNDS):
            try:
                await pusher.flush()
            except RequestFailed as error:
                raise self._failed(error.code, str(error)) from error
            commit = CommitRequest(
                request_id=request.request_id,
                attempt=request.attempt,
                epoch=self.reservation.epoch,
                first_token=int(sequence.tokens[sequence.prompt_len]),
                first_index=request.generated,
                timeout_s=request.time_left_s,
                token_s=sequence.token_s,
                tail_s=time.monotonic() - sequence.first_token_at,
            )
            try:
                reply = await call(
                    self._stub.Commit(commit, timeout=request.time_left_s),
                    what="Commit",
                    target=self._decode.target,
                    deadline_s=request.time_left_s,
                )
            except ControlError as error:
                raise self._failed("commit", str(error)) from error
            if reply.joined:
                self._may_hold = False
                return
            if reply.error:
                raise self._failed("commit", reply.error)
            self._node.counters.add("repushed_blocks", len(reply.missing_blocks))
            pusher.push_blocks(list(reply.missing_blocks))
            if reply.corrupt_blocks:
                self.num_corrupt += len(reply.corrupt_blocks)
                self._work.store_from = min(self._work.store_from, *reply.corrupt_blocks)
                await self._node.kv_connector.quarantine(self._work.prefix, reply.corrupt_blocks)
        raise self._failed("unverified", f"blocks still fail verification after {COMMIT_ROUNDS} rounds")

    async def abort(self) -> None:
        """Release the reservation because pushing has stopped. Best effort: the decode node also notices if this node
        is gone.

        If the reply to Reserve was lost, the epoch is unknown here and the reservation is aborted by its attempt.
        """
        if not self._may_hold:
            return
        epoch = self.reservation.epoch if self.reservation is not None else 0
        abort = AbortRequest(request_id=self._request.request_id, attempt=self._request.attempt, epoch=epoch)
        try:
            await call(self._stub.Abort(abort, timeout=5.0), what="Abort", target=self._decode.target, deadline_s=5.0)
        except ControlError as error:
            log.warning("the decode node was not notified of the abort: %s", error)

    def _failed(self, code: str, message: str) -> RequestFailed:
        return RequestFailed(
            code, f"decode node {self._decode.node_id}: {message}", suspect_node_id=self._decode.node_id
        )
