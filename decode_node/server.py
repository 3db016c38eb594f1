"""The decode node: reserves pages under an epoch, receives and verifies KV, and adds requests to the running batch."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from decode_node.pool_pulls import PoolPuller
from decode_node.reservation import ArrivingBlocks, Reservation
from messenger import Endpoint
from moonpool_proto.v1.conductor_pb2 import PHASE_DECODE_JOINED, PHASE_ENDED
from moonpool_proto.v1.worker_pb2 import (
    AbortRequest,
    CommitReply,
    CommitRequest,
    HandoffTiming,
    RemoteKey,
    ReserveReply,
    ReserveRequest,
    Timing,
)
from telemetry import tracing
from telemetry.tracing import Span
from worker.errors import Preempted, RequestFailed, RequestRefused
from worker.node import WorkerNode
from worker.policy import TakenSlots
from worker.policy.kept_blocks import KeptBlocks
from worker.prefix_blocks import PrefixSave
from worker.prepare import reusable_blocks, trace_answer
from worker.request import EngineSequence, Request
from worker.shielded_wait import in_thread, shielded

log = logging.getLogger(__name__)


class DecodeService:
    """Service that runs a request from its prefilled KV to its last token."""

    def __init__(self, node: WorkerNode) -> None:
        self.node = node
        self._pulls = PoolPuller(node)
        self._open: dict[int, Reservation] = {}
        self._loop = asyncio.get_running_loop()
        node.messenger.on_peer_lost(self._on_peer_lost)

    async def reserve(self, request: Request, asked: ReserveRequest) -> ReserveReply:
        """Reserve pages for the whole answer, or for the part of it named by the placement.

        Raises RequestRefused, or RequestFailed if the reservation could not be made.
        """
        node = self.node
        if request.generated + 1 == request.max_tokens < asked.request.sampling.max_tokens:
            raise RequestRefused(
                "too_long", f"the prompt of {len(request.prompt)} tokens leaves no room for an answer on this node"
            )
        if not node.streams.is_attached(request.frontend_id):
            raise RequestRefused("not_attached", f"frontend {request.frontend_id} has no token stream here")
        reserved: asyncio.Future[Reservation] = asyncio.get_running_loop().create_future()
        job = node.jobs.run(request, self._serve(request, asked, reserved))
        either: list[asyncio.Future[Any]] = [job, reserved]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:  # the prefill node has ended the call
            job.cancel()
            raise
        if not reserved.done():
            raise RequestFailed("reservation", "the reservation was cancelled or could not be made")
        reservation = reserved.result()
        blocks = reservation.slots[: reservation.num_blocks]
        return ReserveReply(
            epoch=reservation.epoch,
            key=RemoteKey(packed=reservation.key.pack()),
            held_blocks=reservation.held_blocks,
            groups=node.memory.block_slots(blocks, reservation.seen_from),
            endpoint=node.endpoint.to_proto(),
            takes_layer_ranges=True,
        )

    async def commit(self, asked: CommitRequest) -> CommitReply:
        """Handle the end of all pushes: add the request to the batch, or return the blocks that are missing."""
        reservation = self._open.get(asked.epoch)
        if reservation is None:
            return CommitReply(error=f"epoch {asked.epoch} is not open on {self.node.config.node_id}")
        came_at = time.monotonic()
        missing = await reservation.missing_blocks()
        if reservation.gone is not None:
            return CommitReply(error=reservation.gone)
        if missing:
            return CommitReply(
                missing_blocks=missing, corrupt_blocks=sorted(reservation.corrupt_blocks.intersection(missing))
            )
        if not reservation.first_token.done():
            reservation.token_s = asked.token_s
            reservation.tail_s, reservation.committed_at = asked.tail_s, came_at
            reservation.first_token.set_result((asked.first_index, asked.first_token))
        return CommitReply(joined=True)

    def abort(self, asked: AbortRequest) -> None:
        """Release the epoch's pages: the writer has stopped."""
        reservation = self._open.get(asked.epoch)
        if asked.epoch == 0:  # the prefill node does not know the epoch; its Reserve may not even have arrived yet
            self.node.jobs.cancel(asked.request_id, asked.attempt)
        elif reservation is not None and not reservation.first_token.done():
            reservation.gone = "aborted by the prefill node"
            reservation.first_token.cancel()

    def _on_peer_lost(self, node_id: str, incarnation: int) -> None:
        """Handle the loss of a peer. Runs on a messenger thread."""
        self._loop.call_soon_threadsafe(self._writer_lost, node_id, incarnation)

    def _writer_lost(self, node_id: str, incarnation: int) -> None:
        for reservation in list(self._open.values()):
            writer = reservation.writer
            if (writer.node_id, writer.incarnation) == (node_id, incarnation) and not reservation.first_token.done():
                reservation.gone = f"prefill node {node_id} is gone"
                reservation.first_token.cancel()

    async def _serve(self, request: Request, reserve: ReserveRequest, reserved: asyncio.Future[Reservation]) -> None:
        with tracing.begin("decode", request.traceparent, **request.span_attributes) as span:
            compiling = self.node.begin_grammar(request)
            try:
                await self._serve_traced(request, reserve, reserved, span)
            finally:
                compiling.cancel()

    async def _serve_traced(
        self, request: Request, reserve: ReserveRequest, reserved: asyncio.Future[Reservation], span: Span
    ) -> None:
        node = self.node
        block_tokens = node.config.block_tokens
        rolling = request.rolling_up_to(request.peak_tokens)
        is_exact = rolling is None and not request.reuses_sibling
        cut = node.parity.cut(request.request_id, reusable_blocks(request, block_tokens)) if is_exact else None
        with span.child("slots"), node.queued(request):
            most = request.num_slots(request.peak_tokens, block_tokens)
            grows = node.engine.computes_in_slots and rolling is None
            count = request.first_slots(most, block_tokens) if grows else most
            taken = await node.slots.take(
                request.key,
                request.keys[:cut],
                count,
                most - count,
                decodes_from=len(request.prompt) // block_tokens,
                rolling=rolling,
            )
        reservation: Reservation | None = None
        try:
            reservation = self._open_reservation(request, reserve, taken)
            reserved.set_result(reservation)
            with span.child("receive", held_blocks=reservation.held_blocks) as receiving:
                first = await self._receive(reservation, reserve, receiving)
            if first is not None:
                kept = await self._decode(reservation, *first, cut, span)
                # The partial block is current if nothing was computed after it.
                if kept is not None and kept.tail_key != reserve.superseded:
                    await node.kv_connector.drop(reserve.superseded, request.placement.pool)
                if reservation.is_preempted:
                    raise Preempted
        finally:
            node.slots.end(request.key)
            if reservation is None:
                node.slots.give(taken.slots, taken.window)
            else:
                await self._close_reservation(reservation)

    def _open_reservation(self, request: Request, reserve: ReserveRequest, taken: TakenSlots) -> Reservation:
        node, memory, block_tokens = self.node, self.node.memory, self.node.config.block_tokens
        writer, slid = Endpoint.from_proto(reserve.writer), request.rolling_up_to(len(request.prompt))
        seen_from = node.slots.first_seen(len(request.prompt) // block_tokens)
        if taken.window is not None:
            taken.window.reach(max(seen_from, taken.num_shared), -(-len(request.prompt) // block_tokens))
        reservation = Reservation(
            request,
            taken,
            num_layers=len(memory.place_of_layer),
            block_tokens=block_tokens,
            key=memory.grant_write(taken.slots),
            writer=writer,
            arriving=ArrivingBlocks(
                seen_from,
                memory.spec.layers_of(memory.spec.windowed),
                None if slid is None else KeptBlocks.of(slid, len(request.prompt)),
            ),
        )
        reservation.epoch = node.kv_receiver.open_epoch(reservation.key, reservation)
        self._open[reservation.epoch] = reservation
        node.hold(request, committed_tokens=len(taken.slots) * node.config.block_tokens)
        return reservation

    async def _receive(self, reservation: Reservation, reserve: ReserveRequest, span: Span) -> tuple[int, int] | None:
        """Pull blocks and wait for the commit.

        Returns (index, id) of the first token; None if the writer gave up or is gone.
        """
        pulling = asyncio.ensure_future(self._pulls.pull(reservation, list(reserve.pulls), span))
        try:
            return await asyncio.shield(reservation.first_token)
        except asyncio.CancelledError:
            if reservation.gone is None:
                raise
            return None
        finally:
            if not pulling.done():
                pulling.cancel()
                await shielded(asyncio.ensure_future(asyncio.wait([pulling])))
            if not pulling.cancelled():
                pulling.result()

    async def _decode(
        self, reservation: Reservation, first_index: int, first_token: int, cut: int | None, span: Span
    ) -> PrefixSave | None:
        """Generate the answer, and return what was stored of it; None after a rolling window has slid.

        From block `cut` on the prompt's KV was recomputed for parity and replaces the blocks held here.
        """
        node, request = self.node, reservation.request
        if first_index != request.generated:
            raise RequestFailed("handoff", f"the first token must have index {request.generated}, got {first_index}")
        node.jobs.renew(request)
        matcher = await node.matcher(request)
        # The writer has ended: its key is revoked now, so the slots need no quarantine later.
        await in_thread(node.messenger.revoke, reservation.key)
        reservation.fenced = True
        blocks = list(dict.fromkeys(reservation.slots[reservation.held_blocks : reservation.num_blocks]))
        if node.memory.staging.is_needed:
            await in_thread(node.memory.to_device_now, blocks, range(node.memory.num_groups))
        rolling = request.rolling_up_to(request.peak_tokens)
        if rolling is None and not request.reuses_sibling:
            node.slots.index(reservation.slots, request.keys, anew_from=cut)
        sequence = EngineSequence.of(
            request,
            reservation.held_slots,
            num_computed=len(request.prompt),
            prefill_only=False,
            matcher=matcher,
            window=reservation.window,
            rolling=rolling,
        )
        sequence.queue_entry = request.queue_entry
        if not sequence.try_append(first_token):
            assert sequence.error is not None
            raise sequence.error
        sequence.committed_at = reservation.committed_at
        node.timings[id(sequence)] = Timing(handoff=HandoffTiming(tail_s=reservation.tail_s))
        node.reporter.progress(request.request_id, request.attempt, PHASE_DECODE_JOINED)
        with node.jobs.ended_by(request, lambda kept: node.end_early(sequence, kept)):
            await node.run_in_engine(sequence)
            trace_answer(span, sequence)
            reservation.is_preempted = sequence.has_yielded
            if sequence.has_sinks or request.reuses_sibling:  # its KV is no prefix's, or follows from another model's
                return None
            kept = PrefixSave.of(sequence, node.config.block_tokens)
            if rolling is None:
                node.slots.index(reservation.slots, kept.keys)
            await node.kv_connector.retain(request, kept.keys)
            # Stored in the same pool as the prompt, so that the next turn finds all blocks in one place.
            await node.kv_connector.store(
                kept,
                reservation.slots,
                len(request.keys),
                pool=request.placement.pool,
                token_s=reservation.token_s,
                window=reservation.window,
            )
            await node.store_inputs(
                kept,
                reservation.slots,
                len(request.keys),
                pool=request.placement.pool,
                token_s=reservation.token_s,
            )
        return kept

    async def _close_reservation(self, reservation: Reservation) -> None:
        node = self.node
        if reservation.gone is None:
            reservation.gone = "the request has left this node"
        self._open.pop(reservation.epoch, None)
        node.kv_receiver.close_epoch(reservation.epoch)
        node.reporter.progress(reservation.request.request_id, reservation.request.attempt, PHASE_ENDED)
        slots, window = reservation.held_slots, reservation.window
        if reservation.fenced:
            node.slots.give(slots, window)
        else:
            held = reservation.held_blocks
            if window is not None:
                window.give_up(held)
            node.slots.give(slots[:held])
            await node.slots.fence(slots[held:], lambda: node.messenger.revoke(reservation.key), window)
