"""The helper's side of a prefill group: takes slots at once or refuses, computes its chunks, releases everything.

A helper has no duties towards the request: it talks to the head only, and if it cannot help, the head computes alone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager

import grpc
import numpy as np

from moonpool_proto.v1.worker_pb2 import (
    BeginShare,
    Enlist,
    Failure,
    HelpReply,
    HelpRequest,
)
from prefill_node.group_member import GroupMember
from prefill_node.senders import PushSenders
from rpc.waiting import first_of
from telemetry import tracing
from worker.errors import RequestFailed, RequestRefused
from worker.node import WorkerNode
from worker.policy import WindowHold
from worker.request import EngineSequence, Request
from worker.shielded_wait import shielded

Further = AsyncIterator[HelpRequest]
Reply = Callable[[HelpReply], Awaitable[None]]
Tap = Callable[[EngineSequence, GroupMember], AbstractContextManager[None]]


class GroupHelper:
    """Helper that computes chunks for the heads of prefill groups."""

    def __init__(self, node: WorkerNode, senders: PushSenders, tap: Tap) -> None:
        """While inside `tap(sequence, member)`, computed layers of the sequence are pushed as the member requires."""
        self._node = node
        self._senders = senders
        self._tap = tap

    async def serve(self, request: Request, enlist: Enlist, further: Further, reply: Reply) -> None:
        """Serve one call of a head from its first message to its end.

        Raises RequestRefused if nothing was taken, RequestFailed if the help failed later.
        """
        node = self._node
        self._check(request, enlist)
        loop = asyncio.get_running_loop()
        joined: asyncio.Future[GroupMember] = loop.create_future()
        begun: asyncio.Future[BeginShare] = loop.create_future()
        failures: list[Failure] = []
        job = node.jobs.run(
            request, self._work(request, enlist, joined, begun), on_failure=lambda _, failure: failures.append(failure)
        )
        listening: asyncio.Task[None] | None = None
        try:
            await first_of(job, joined)
            if joined.done():
                await reply(HelpReply(enlisted=joined.result().enlisted()))
                listening = asyncio.ensure_future(_listen(further, begun))
                await first_of(job, listening)
        finally:
            is_through = job.done() and not job.cancelled()
            tasks = [job] if listening is None else [job, listening]
            for task in tasks:
                task.cancel()
            await shielded(asyncio.ensure_future(asyncio.gather(*tasks, return_exceptions=True)))
        if failures and joined.done():
            raise RequestFailed(failures[0].code, failures[0].message)
        if failures:
            raise RequestRefused(failures[0].code, failures[0].message)
        if not is_through:
            raise RequestFailed("cancelled", f"{node.config.node_id} gave up the request")

    def _check(self, request: Request, enlist: Enlist) -> None:
        node = self._node
        if not node.engine.computes_in_slots:
            raise RequestRefused(
                "unsupported", f"the engine of {node.config.node_id} cannot compute a part of a prompt"
            )
        if enlist.kv_namespace != node.namespace:
            raise RequestRefused(
                "other_kv", f"{node.config.node_id} computes KV of a different namespace than the head"
            )
        most = (len(request.prompt) - 1) // node.config.block_tokens
        if not 0 < enlist.num_blocks <= most or enlist.reused_blocks >= enlist.num_blocks:
            raise RequestRefused(
                "bad_share",
                f"{enlist.reused_blocks} reused of {enlist.num_blocks} blocks are invalid: {most} whole blocks precede "
                "the prompt's last token, and at least one of them must be left to compute",
            )
        if node.role.is_switching:
            raise RequestRefused("draining", f"{node.config.node_id} is switching its role")

    async def _work(
        self,
        request: Request,
        enlist: Enlist,
        joined: asyncio.Future[GroupMember],
        begun: asyncio.Future[BeginShare],
    ) -> None:
        with tracing.begin("help", request.traceparent, **request.span_attributes):
            await self._work_traced(request, enlist, joined, begun)

    async def _work_traced(
        self,
        request: Request,
        enlist: Enlist,
        joined: asyncio.Future[GroupMember],
        begun: asyncio.Future[BeginShare],
    ) -> None:
        node = self._node
        taken = node.slots.take_now(request.key, request.keys[: enlist.reused_blocks], enlist.num_blocks)
        if taken is None:
            raise RequestRefused("no_slots", f"{node.config.node_id} has no {enlist.num_blocks} slots free now")
        slots, held_blocks = taken.slots, taken.num_shared
        member: GroupMember | None = None
        try:
            reused_blocks = enlist.reused_blocks
            if taken.window is not None:
                taken.window.reach(max(held_blocks, node.slots.first_seen(reused_blocks)), len(slots))
            member = GroupMember(
                node,
                request,
                self._senders,
                slots,
                num_blocks=len(slots),
                held_blocks=held_blocks,
                reused_blocks=reused_blocks,
            )
            joined.set_result(member)
            await self._compute(request, member, await begun, taken.window)
        finally:
            try:
                if member is not None:
                    await shielded(asyncio.ensure_future(member.close()))
            finally:  # runs even if this task is cancelled meanwhile
                node.slots.give(slots, taken.window)

    async def _compute(
        self, request: Request, member: GroupMember, begin: BeginShare, window: WindowHold | None
    ) -> None:
        spans = [(span.start, span.end) for span in begin.spans]
        borders = [border for span in spans for border in span]
        block_tokens, end = (
            self._node.config.block_tokens,
            member.chunks.num_blocks * self._node.config.block_tokens,
        )
        if not spans or borders != sorted(set(borders)) or borders[-1] > end or any(b % block_tokens for b in borders):
            raise RequestRefused("bad_share", f"chunks {spans} are not in order, within {end} tokens, of whole blocks")
        member.begin(spans, begin.others)
        sequence = EngineSequence(
            request,
            member.chunks.slots,
            request.prompt.astype(np.int32),
            len(request.prompt),
            0,
            prefill_only=True,
            window=window,
        )
        sequence.queue_entry, sequence.group_chunks = request.queue_entry, member.chunks
        try:
            with self._tap(sequence, member):
                await self._node.run_in_engine(sequence)
        finally:
            self._node.counters.add("helped_tokens", sequence.computed_tokens)
        await member.flush()


async def _listen(further: Further, begun: asyncio.Future[BeginShare]) -> None:
    """Read messages of the head until it ends the call or is gone."""
    with contextlib.suppress(grpc.aio.AioRpcError, grpc.aio.UsageError):
        async for message in further:
            if message.HasField("begin") and not begun.done():
                begun.set_result(message.begin)
