"""The prefill node: loads reused KV, computes the rest, pushes it layer by layer and hands the request over."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator

import grpc

from messenger import RemoteKey
from moonpool_proto.v1.conductor_pb2 import PHASE_ENDED, PHASE_PREFILL_STARTED
from moonpool_proto.v1.worker_pb2_grpc import WorkerStub
from prefill_node.group_head import form_group
from prefill_node.group_helper import GroupHelper
from prefill_node.group_member import GroupMember
from prefill_node.handoff import PrefillHandoff
from prefill_node.lookahead import LookaheadLimiter, LookaheadPermit
from prefill_node.push import DuePush, PushDestination, PushedPrompt, Pusher, WrittenLayers
from prefill_node.senders import PushSenders
from rpc.control import open_channel
from telemetry import tracing
from telemetry.tracing import Span
from worker.grammar_matching import GrammarMatcher
from worker.node import WorkerNode
from worker.policy.kept_blocks import KeptBlocks
from worker.prepare import Prepared, compute, load, prepared, reusable_blocks, save_prefix, sequence_of, trace_prompt
from worker.request import EngineSequence, Request
from worker.shielded_wait import run_both, shielded

log = logging.getLogger(__name__)


class PrefillService:
    """Service that runs a request from its prompt to its first token, and moves its KV to the decode node."""

    def __init__(self, node: WorkerNode) -> None:
        self.node = node
        node.engine.on_layer(self._layer_written)
        self._taps: dict[int, tuple[Pusher | GroupMember, ...]] = {}
        self._senders = PushSenders()
        self._written = WrittenLayers(node.memory)
        self._places = LookaheadLimiter(node.config.engine.prefill_lookahead, node.wait_queue)
        self._channels: dict[str, grpc.aio.Channel] = {}
        self.helper = GroupHelper(node, self._senders, self._tapped)

    async def close(self) -> None:
        """Close the channels and the sender threads."""
        for channel in self._channels.values():
            await channel.close()
        self._senders.close()

    def _layer_written(self, layer: int, spans: list[tuple[EngineSequence, int, int]]) -> None:
        # Members of a group wait for each layer.
        at_once = any(sequence.group_chunks is not None for sequence, _, _ in spans)
        self._written.written(layer, lambda: self._due(spans), at_once=at_once)

    def _due(self, spans: list[tuple[EngineSequence, int, int]]) -> list[DuePush]:
        return [
            push
            for sequence, start, end in spans
            for tap in self._taps.get(id(sequence), ())
            for push in tap.due(start, end)
        ]

    @contextlib.contextmanager
    def _tapped(self, sequence: EngineSequence, *taps: Pusher | GroupMember) -> Iterator[None]:
        """Push every written layer of the sequence as the `taps` require while the context is open."""
        self._taps[id(sequence)] = taps
        try:
            yield
        finally:
            del self._taps[id(sequence)]

    async def serve(self, request: Request) -> None:
        """Serve one request. Raises RequestRefused and RequestFailed."""
        with tracing.begin("prefill", request.traceparent, **request.span_attributes) as span:
            await self._serve(request, span)

    async def _serve(self, request: Request, span: Span) -> None:
        node = self.node
        next_node = request.placement.decode.node_id
        new_tokens = request.expected_new_tokens(node.config.block_tokens)
        node.hold(request, remaining_prefill_tokens=new_tokens, decode_node=next_node)
        try:
            if self._places.must_wait:
                node.kv_connector.prefetch(request, reusable_blocks(request, node.config.block_tokens))
            matcher = await node.matcher(request)  # compiled before the request holds anything
            with node.queued(request):
                async with (
                    self._places.take(request.key) as permit,
                    prepared(node, request, peak_tokens=len(request.prompt)) as work,
                ):
                    await self._prefill_and_hand_off(work, permit, matcher, span)
        finally:
            node.reporter.progress(request.request_id, request.attempt, PHASE_ENDED)

    async def _prefill_and_hand_off(
        self, work: Prepared, permit: LookaheadPermit, matcher: GrammarMatcher | None, span: Span
    ) -> None:
        node, request = self.node, work.request
        handoff = PrefillHandoff(node, work, self._channel(request.placement.decode.target), span)
        pusher = self._pusher(work)
        loaded, reserved = asyncio.Event(), asyncio.Event()
        sequence: EngineSequence | None = None

        async def load_and_compute() -> None:
            nonlocal sequence
            # A group pushes the reused blocks to its members before anything is computed.
            await load(node, work, span, whole=bool(request.placement.helpers))
            loaded.set()
            if node.config.kv.kv_storage == "int8":  # the first token's timing counts what the decode node reuses
                await reserved.wait()
            sequence = await self._prefill(work, matcher, pusher)

        async def reserve_and_push() -> None:
            await handoff.reserve()
            work.elsewhere_tokens = handoff.push_from * node.config.block_tokens
            reserved.set()
            pusher.open(self._destination(handoff))
            await loaded.wait()
            if work.loading is not None:  # layers are still on their way, and whatever is pushed counts as right
                await asyncio.wait([work.loading])
            reused = range(max(pusher.first_block, pusher.window_from), work.reused_tokens // node.config.block_tokens)
            pusher.push_blocks(reused, on_request=False)

        try:
            # What is computed before the reservation is pushed after it.
            await run_both(load_and_compute(), reserve_and_push())
            permit.end()
            assert sequence is not None
            trace_prompt(span, sequence, work)
            if sequence.finish:
                await save_prefix(node, work, sequence)
                return
            # If the first token ends the answer, no decode node is needed, but the prompt's KV is saved for the next
            # turn.
            with node.jobs.ended_by(request, lambda _: handoff.call_off()):
                await run_both(handoff.commit(pusher, sequence), save_prefix(node, work, sequence, goes_on=True))
            if handoff.is_called_off or handoff.num_corrupt:
                await save_prefix(node, work, sequence, goes_on=not handoff.is_called_off)
        finally:
            await shielded(asyncio.ensure_future(self._leave(handoff, pusher)))

    async def _leave(self, handoff: PrefillHandoff, pusher: Pusher) -> None:
        """Abort the hand-off after the last write has ended, since the decode node may then reuse its slots."""
        await pusher.stop()
        await handoff.abort()

    def _pusher(self, work: Prepared) -> Pusher:
        request, node = work.request, self.node
        return Pusher(
            node.memory,
            self._senders,
            None,
            prompt=_pushed(work, node),
            deadline_s=lambda: request.time_left_s,
            stall_s=node.config.kv.push_timeout_s,
            on_moved=lambda nbytes, seconds: node.counters.add_transfer("push", nbytes, seconds),
        )

    def _destination(self, handoff: PrefillHandoff) -> PushDestination:
        reply = handoff.reservation
        assert reply is not None
        return PushDestination(
            peer=self.node.messenger.connect(handoff.endpoint),
            epoch=reply.epoch,
            key=RemoteKey.unpack(reply.key.packed),
            offsets=handoff.remote_offsets(),
            push_from=handoff.push_from,
            held_blocks=reply.held_blocks,
            takes_layer_ranges=reply.takes_layer_ranges,
        )

    async def _prefill(self, work: Prepared, matcher: GrammarMatcher | None, pusher: Pusher) -> EngineSequence:
        """Compute the rest of the prompt and the first token, which goes to the frontend at once."""
        node, request = self.node, work.request
        async with form_group(node, work, self._senders, self._stub, pusher.push_layer) as group:
            sequence = sequence_of(node, work, matcher, prefill_only=True)
            node.reporter.progress(request.request_id, request.attempt, PHASE_PREFILL_STARTED)
            is_through = False
            if group is not None:
                with self._tapped(sequence, pusher, group.member):
                    is_through = await group.run(sequence)
        if not is_through:
            if group is not None:
                await pusher.settle()  # blocks must not be recomputed while they are being pushed
            with self._tapped(sequence, pusher):
                await compute(node, work, sequence, pusher.settle)
        return sequence

    def _stub(self, target: str) -> WorkerStub:
        return WorkerStub(self._channel(target))

    def _channel(self, target: str) -> grpc.aio.Channel:
        if target not in self._channels:
            self._channels[target] = open_channel(target)
        return self._channels[target]


def _pushed(work: Prepared, node: WorkerNode) -> PushedPrompt:
    block_tokens, num_tokens = node.config.block_tokens, len(work.request.prompt)
    seen_from = node.slots.first_seen(num_tokens // block_tokens)
    if work.rolling is None:
        return PushedPrompt(work.slots, num_tokens, seen_from)
    kept = KeptBlocks.of(work.rolling, num_tokens)
    return PushedPrompt(kept.slots(work.slots), num_tokens, seen_from, kept)
