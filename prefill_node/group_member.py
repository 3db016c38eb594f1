"""A member of a prefill group: the chunks it computes, the slots others write into, and its pushes to other members.

A layer of a chunk may be computed once that layer of all preceding blocks is present and verified.

Threads of `MemberChunks`, which has no lock but its gate's:

  engine thread    next_span, layer_computed, chunk_computed
  verifier thread  verified: marks blocks as present and wakes the engine thread
  event loop       begin, leading_tokens

`_spans` changes on the event loop before the sequence is submitted and on the engine thread afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from messenger import Endpoint, RemoteKey
from moonpool_proto.v1.worker_pb2 import Enlisted, Member
from moonpool_proto.v1.worker_pb2 import RemoteKey as KeyMessage
from prefill_node.chunk_assignment import TokenSpan
from prefill_node.push import DuePush, PushDestination, PushedPrompt, Pusher, remote_offsets
from prefill_node.senders import PushSenders
from rpc.errors import InvalidArgument
from worker.errors import GroupLost
from worker.layer_gate import LayerGate
from worker.node import WorkerNode
from worker.request import Request
from worker.shielded_wait import in_thread
from worker.slot_memory import EngineMemory


class MemberChunks:
    """The chunks that one member computes, and which blocks of the other members are present. Implements PushTarget."""

    def __init__(
        self,
        memory: EngineMemory,
        slots: Sequence[int],
        *,
        num_blocks: int,
        held_blocks: int,
        seen_from: int,
        stall_s: float,
        changed: Callable[[], None],
        forward: Callable[[int, list[int]], None] | None = None,
    ) -> None:
        """Blocks [0, num_blocks) of the prompt are needed here; blocks [0, held_blocks) are present.

        In windowed groups, only blocks from `seen_from` on are needed.
        `changed()` is called when the next chunk may be ready. `forward(layer, blocks)` gets verified blocks of other
        members. A step waits for a layer until `stall_s` after the last arrival.
        """
        self.slots = list(slots)
        self.held_blocks = held_blocks
        self.num_blocks = num_blocks
        self.gate = LayerGate(
            len(memory.place_of_layer),
            num_blocks,
            held_blocks=held_blocks,
            stall_s=stall_s,
            lost=GroupLost,
            changed=changed,
        )
        self.gate.mark(memory.spec.layers_of(memory.spec.windowed), np.arange(seen_from))  # of these, nothing comes
        self.seen_from = seen_from
        self._memory = memory
        self._forward = forward
        self._spans: list[TokenSpan] = []

    def valid_tokens(self, blocks: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the valid tokens of each block: members push whole blocks only."""
        return np.full(len(blocks), self._memory.block_tokens, dtype=np.int32)

    def begin(self, spans: Sequence[TokenSpan]) -> None:
        """Set the chunks to compute, in order."""
        self._spans = list(spans)
        self._require_next()

    def _require_next(self) -> None:
        # A step begins once the first layer of all blocks before its chunk is here, and then waits only for steps that
        # began earlier, so members cannot wait for each other in a circle.
        if self._spans:
            self.gate.require(self._spans[0][0] // self._memory.block_tokens)

    # Engine thread.

    @property
    def next_span(self) -> TokenSpan | None:
        """Prompt tokens [start, end) of the next chunk; None when all chunks are computed."""
        return self._spans[0] if self._spans else None

    def layer_computed(self, layer: int) -> None:
        """Mark one layer of the next chunk as computed."""
        start, end = self._spans[0]
        block_tokens = self._memory.block_tokens
        self.gate.mark([layer], np.arange(start // block_tokens, min(self.num_blocks, end // block_tokens)))

    def chunk_computed(self) -> None:
        """Advance to the following chunk."""
        del self._spans[0]
        self._require_next()

    # Other threads.

    def announce(self) -> None:
        """Do nothing: no caller waits for pending verifications."""

    def verified(self, layer: int, blocks: NDArray[np.int64], right: NDArray[np.bool_]) -> None:
        """Mark verified blocks as present and pass them on. If that is not possible, the group is lost."""
        if not right.all():
            self.gate.lose(f"{int((~right).sum())} blocks of layer {layer} arrived damaged")
            return
        try:
            self._use(layer, blocks)
        except Exception as error:
            self.gate.lose(f"blocks of layer {layer} arrived and could not be used: {error!r}")
            raise

    def _use(self, layer: int, blocks: NDArray[np.int64]) -> None:
        self._memory.to_device([self.slots[b] for b in blocks], layer).wait()
        if self.gate.mark([layer], blocks) and self._forward is not None:
            self._forward(layer, blocks.tolist())

    @property
    def leading_tokens(self) -> int:
        """Number of tokens at the beginning of the prompt with all layers present."""
        return self.gate.complete * self._memory.block_tokens


@dataclass(frozen=True, slots=True)
class _PeerPusher:
    """Pusher to another member, which needs all tokens before `until`."""

    pusher: Pusher
    until: int


class GroupMember:
    """This node's part in a prefill group. The slots must be held until `close` has returned."""

    def __init__(
        self,
        node: WorkerNode,
        request: Request,
        senders: PushSenders,
        slots: Sequence[int],
        *,
        num_blocks: int,
        held_blocks: int,
        reused_blocks: int,
        forward: Callable[[int, list[int]], None] | None = None,
    ) -> None:
        """See MemberChunks for the arguments; pushes run on the senders.

        The group computes the blocks from `reused_blocks` on.
        """
        self._node = node
        self._request = request
        self._senders = senders
        self.held_blocks = held_blocks
        self.chunks = MemberChunks(
            node.memory,
            slots,
            num_blocks=num_blocks,
            held_blocks=held_blocks,
            seen_from=node.slots.first_seen(reused_blocks),
            stall_s=node.config.kv.push_timeout_s,
            changed=node.engine.wake,
            forward=forward,
        )
        key = node.memory.grant_write(slots[held_blocks:])
        self.key: RemoteKey | None = key
        self.epoch = node.kv_receiver.open_epoch(key, self.chunks)
        self._pushers: list[_PeerPusher] = []

    def enlisted(self) -> Enlisted:
        """Return the message that describes this member to the others. Not after `close`."""
        memory = self._node.memory
        assert self.key is not None
        return Enlisted(
            epoch=self.epoch,
            key=KeyMessage(packed=self.key.pack()),
            held_blocks=self.held_blocks,
            groups=memory.block_slots(self.chunks.slots, self.chunks.seen_from),
            endpoint=self._node.endpoint.to_proto(),
        )

    def begin(self, spans: Sequence[TokenSpan], others: Sequence[Member], reused_blocks: int = 0) -> None:
        """Compute these chunks and push them to the members that need them; push the first `reused_blocks` blocks at
        once. Raises GroupLost for a member that cannot be reached.
        """
        for other in others:
            pusher = self._pusher(other)
            self._pushers.append(_PeerPusher(pusher, other.until))
            pusher.push_blocks(range(other.held_blocks, reused_blocks))
        self.chunks.begin(spans)

    def _pusher(self, other: Member) -> Pusher:
        node = self._node
        try:
            peer, key = node.messenger.connect(Endpoint.from_proto(other.endpoint)), RemoteKey.unpack(other.key.packed)
        except InvalidArgument as error:
            raise GroupLost(f"member {other.endpoint.node_id!r} cannot be reached: {error}") from error
        destination = PushDestination(
            peer=peer,
            epoch=other.epoch,
            key=key,
            offsets=remote_offsets(other.groups),
            push_from=other.held_blocks,
            held_blocks=other.held_blocks,
        )
        return Pusher(
            node.memory,
            self._senders,
            destination,
            prompt=PushedPrompt(self.chunks.slots, len(self._request.prompt), self.chunks.seen_from),
            deadline_s=lambda: self._request.time_left_s,
            stall_s=node.config.kv.push_timeout_s,
            on_moved=lambda nbytes, seconds: node.counters.add_transfer("group", nbytes, seconds),
        )

    def due(self, start: int, end: int) -> list[DuePush]:
        """Return the pushes of the blocks that prompt tokens [start, end) complete."""
        return [push for each in self._pushers if start < each.until for push in each.pusher.due(start, end)]

    async def flush(self) -> None:
        """Wait until all pushes have arrived. Raises RequestFailed."""
        for each in self._pushers:
            await each.pusher.flush()

    async def close(self) -> None:
        """Stop pushing and receiving; on return no other node can write into the slots. Idempotent."""
        await asyncio.gather(*(each.pusher.stop() for each in self._pushers))
        self._node.kv_receiver.close_epoch(self.epoch)
        key, self.key = self.key, None
        if key is not None:
            await in_thread(self._node.messenger.revoke, key)
