"""The head of a prefill group: enlists helpers, assigns chunks, and continues alone if the group is lost.

The head is the node on which the request was placed. It holds its own slots before it enlists anyone, computes the last
chunk, ends with the whole prompt's KV, and is the only member that talks to the decode node, the pool and the frontend.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from moonpool_proto.v1.conductor_pb2 import NodeRef
from moonpool_proto.v1.worker_pb2 import (
    BeginShare,
    Enlist,
    Enlisted,
    HelpRequest,
    Member,
)
from moonpool_proto.v1.worker_pb2 import Span as SpanMessage
from moonpool_proto.v1.worker_pb2_grpc import WorkerStub
from prefill_node.chunk_assignment import MIN_CHUNKS, TokenSpan, assign_chunks
from prefill_node.group_member import GroupMember
from prefill_node.senders import PushSenders
from rpc.control import CallRefused, ControlError, call
from worker.errors import GroupLost
from worker.node import WorkerNode
from worker.prepare import Prepared
from worker.request import EngineSequence, queue_entry_to_proto
from worker.shielded_wait import shielded

log = logging.getLogger(__name__)

ENLIST_S = 2.0  # longest wait for a helper
_LOOK_S = 0.5  # interval of the check for helpers that have stopped sending


class _HelperCall:
    """The call to one helper, from `enlist` to its end."""

    def __init__(self, ref: NodeRef, stub: WorkerStub, timeout_s: float) -> None:
        self.node_id = ref.node_id
        self._target = ref.target
        self._call: Any = stub.Help(timeout=timeout_s)  # type: ignore[call-arg]  # no request iterator: messages are written one by one

    async def enlist(self, enlist: Enlist) -> Enlisted:
        """Request slots from the helper. Raises ControlError; the call has then ended."""
        await self._step(self._call.write, HelpRequest(enlist=enlist))
        reply = await self._step(self._call.read)
        if reply is grpc.aio.EOF:
            raise self._refusal("the helper ended the call")
        enlisted: Enlisted = reply.enlisted
        return enlisted

    async def begin(self, begin: BeginShare) -> None:
        """Send the assigned chunks. Raises ControlError; the call has then ended."""
        await self._step(self._call.write, HelpRequest(begin=begin))

    async def ended(self) -> str:
        """Wait until the helper ends the call. Returns the error, or an empty string if it has computed its chunks."""
        try:
            while await self._call.read() is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        return ""

    def leave(self) -> None:
        """Cancel the call; the helper releases its slots. Idempotent."""
        self._call.cancel()

    async def _step(self, step: Callable[..., Any], *message: HelpRequest) -> Any:
        try:
            return await call(step(*message), what="Worker.Help", target=self._target, deadline_s=ENLIST_S)
        except asyncio.InvalidStateError as error:  # the call has ended already
            raise self._refusal(str(error)) from error
        except BaseException:
            self.leave()
            raise

    def _refusal(self, why: str) -> CallRefused:
        self.leave()
        return CallRefused(why, what="Worker.Help", target=self._target, code="ABORTED")


class PrefillGroup:
    """The members of one prompt's prefill. `form_group` creates and closes it."""

    def __init__(
        self,
        node: WorkerNode,
        member: GroupMember,
        helpers: list[tuple[_HelperCall, Enlisted]],
        spans: list[list[TokenSpan]],
    ) -> None:
        """`spans`: the head's chunks, then each helper's."""
        self._node = node
        self._helpers = helpers
        self._spans = spans
        self.member = member
        self._watching: list[asyncio.Future[None]] = []

    async def run(self, sequence: EngineSequence) -> bool:
        """Compute the prompt with the group; return True if it succeeded.

        If the group is lost, returns False and leaves the sequence in a state from which the head can continue alone,
        once the group is closed.
        """
        node, chunks = self._node, self.member.chunks
        sequence.group_chunks = chunks
        timing = node.timings[id(sequence)]
        try:
            await self._begin()
            await node.run_in_engine(sequence)
            return True
        except GroupLost as lost:
            log.warning("the prefill group is lost, the request continues alone: %s", lost)
        node.counters.add("lost_groups", 1)
        node.timings[id(sequence)] = timing
        sequence.group_chunks = sequence.error = None
        sequence.num_computed = chunks.leading_tokens
        return False

    async def _begin(self) -> None:
        member, chunks = self.member, self.member.chunks
        answers = [member.enlisted(), *(enlisted for _, enlisted in self._helpers)]
        members = [_member_message(each, spans[-1][0]) for each, spans in zip(answers, self._spans, strict=True)]
        member.begin(self._spans[0], members[1:], reused_blocks=member.held_blocks)
        begins = [
            helper.begin(
                BeginShare(
                    spans=[SpanMessage(start=start, end=end) for start, end in self._spans[i]],
                    others=[other for k, other in enumerate(members) if k != i],
                )
            )
            for i, (helper, _) in enumerate(self._helpers, 1)
        ]
        for failed in await asyncio.gather(*begins, return_exceptions=True):
            if isinstance(failed, Exception):
                chunks.gate.lose(str(failed) or repr(failed))
        self._watching = [asyncio.ensure_future(self._watch(helper)) for helper, _ in self._helpers]
        self._watching.append(asyncio.ensure_future(self._notice_silence()))

    async def _watch(self, helper: _HelperCall) -> None:
        try:
            why = await helper.ended()
        except Exception as error:  # whatever it is, nobody may wait for this helper
            why = repr(error)
        if why:
            self.member.chunks.gate.lose(f"helper {helper.node_id}: {why}")

    async def _notice_silence(self) -> None:
        patience_s, chunks = self._node.config.kv.push_timeout_s, self.member.chunks
        while True:
            await asyncio.sleep(_LOOK_S)
            if chunks.gate.idle_s > patience_s:
                chunks.gate.lose(f"no helper has sent anything for {patience_s:g} s")

    async def close(self) -> None:
        """Release the helpers. On return no other node can write into the request's slots."""
        for helper, _ in self._helpers:
            helper.leave()
        for watch in self._watching:
            watch.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        await self.member.close()


@contextlib.asynccontextmanager
async def form_group(
    node: WorkerNode,
    work: Prepared,
    senders: PushSenders,
    stub: Callable[[str], WorkerStub],
    forward: Callable[[int, list[int]], None],
) -> AsyncIterator[PrefillGroup | None]:
    """Enlist the helpers that the placement names and assign the prompt's chunks to those that accept. Yields None if
    the node computes alone.

    `forward(layer, blocks)` is called for blocks that helpers computed, once they are here and verified. Reused tokens
    of a partial block are computed again as part of the first chunk.
    """
    config, prompt_len = node.config, len(work.request.prompt)
    start = work.reused_tokens // config.block_tokens * config.block_tokens

    def chunks(members: int) -> list[list[TokenSpan]]:
        return assign_chunks(
            start, prompt_len, chunk_tokens=config.engine.prefill_chunk_tokens, block_tokens=config.block_tokens,
            members=members,
        )  # fmt: skip

    # Computed on this node only: prompts that are compared or scored, too long for the window slots, or in which a
    # rolling window slides.
    drops = work.window is not None and not work.window.keeps_all
    is_whole = work.cut is not None or work.request.scores_prompt or drops or work.rolling is not None
    if not work.request.placement.helpers or is_whole or sum(map(len, chunks(1))) < MIN_CHUNKS:
        yield None
        return
    reused_blocks, num_blocks = start // config.block_tokens, (prompt_len - 1) // config.block_tokens
    helpers = await _enlisted(node, work, reused_blocks, num_blocks, stub)
    spans = chunks(1 + len(helpers))
    for helper, _ in helpers[sum(map(bool, spans)) - 1 :]:
        helper.leave()
    spans = [each for each in spans if each]
    if len(spans) == 1:
        yield None
        return
    work.reused_tokens = start
    slots = work.slots[:num_blocks]
    if work.window is not None:
        work.window.reach(reused_blocks, num_blocks)
    member = GroupMember(
        node,
        work.request,
        senders,
        slots,
        num_blocks=num_blocks,
        held_blocks=reused_blocks,
        reused_blocks=reused_blocks,
        forward=forward,
    )
    node.counters.add("prefill_groups", 1)
    group = PrefillGroup(node, member, helpers[: len(spans) - 1], spans)
    try:
        yield group
    finally:
        await shielded(asyncio.ensure_future(group.close()))


async def _enlisted(
    node: WorkerNode, work: Prepared, reused_blocks: int, num_blocks: int, stub: Callable[[str], WorkerStub]
) -> list[tuple[_HelperCall, Enlisted]]:
    """Enlist the helpers concurrently; return those that have taken slots."""
    request = work.request
    enlist = Enlist(
        request=request.proto, kv_namespace=node.namespace, reused_blocks=reused_blocks, num_blocks=num_blocks
    )
    enlist.request.timeout_s = request.time_left_s
    enlist.request.placement.turn.CopyFrom(queue_entry_to_proto(node.wait_queue.entry(request.key), time.monotonic()))
    helpers = [_HelperCall(ref, stub(ref.target), request.time_left_s) for ref in request.placement.helpers]
    try:
        answers = await asyncio.gather(*(helper.enlist(enlist) for helper in helpers), return_exceptions=True)
    except asyncio.CancelledError:
        for helper in helpers:
            helper.leave()
        raise
    found: list[tuple[_HelperCall, Enlisted]] = []
    for helper, answer in zip(helpers, answers, strict=True):
        if isinstance(answer, Enlisted):
            found.append((helper, answer))
        elif isinstance(answer, ControlError):
            log.info("prefill without helper %s: %s", helper.node_id, answer)
            node.counters.add("helpers_refused", 1)
        else:
            raise answer
    return found


def _member_message(enlisted: Enlisted, until: int) -> Member:
    return Member(
        endpoint=enlisted.endpoint,
        epoch=enlisted.epoch,
        key=enlisted.key,
        held_blocks=enlisted.held_blocks,
        until=until,
        groups=enlisted.groups,
    )
