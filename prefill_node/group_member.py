"""A member of a prefill group: the chunks it computes, the slots others write into, and its pushes to other members.

A layer of a chunk may be computed once that layer of all preceding blocks is present and verified.

Threads of `MemberChunks` (`_came` is its only lock):

  engine thread    is_ready, next_span, wait, layer_computed, chunk_computed
  verifier thread  verified: marks blocks as present and wakes the engine thread
  event loop       begin, lose, idle_s, leading_tokens

`_here`, `_leading`, `_last_s` and `_lost` change under `_came`. `is_ready` reads them without the lock: they only move
towards ready, so a stale value delays a step by one wake-up. `_spans` changes on the event loop before the sequence is
submitted and on the engine thread afterwards.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from messenger import Endpoint, RemoteKey
from moonpool_proto.v1.worker_pb2 import BlockSlots, Enlisted, Member
from moonpool_proto.v1.worker_pb2 import RemoteKey as KeyMessage
from prefill_node.chunk_assignment import TokenSpan
from prefill_node.push import DuePush, PushDestination, Pusher
from prefill_node.senders import PushSenders
from rpc.errors import InvalidArgument
from worker.errors import GroupLost
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
        stall_s: float,
        changed: Callable[[], None],
        forward: Callable[[int, list[int]], None] | None = None,
    ) -> None:
        """Blocks [0, num_blocks) of the prompt are needed here; blocks [0, held_blocks) are present.

        `changed()` is called when the next chunk may be ready. `forward(layer, blocks)` gets verified blocks of other
        members. A step waits for a layer until `stall_s` after the last arrival.
        """
        self.slots = list(slots)
        self.held_blocks = held_blocks
        self.num_blocks = num_blocks
        self._memory = memory
        self._stall_s = stall_s
        self._changed = changed
        self._forward = forward
        self._num_layers = len(memory.place_of_layer)
        self._here = np.zeros((self._num_layers, num_blocks), dtype=bool)
        self._here[:, :held_blocks] = True
        self._leading = [
            held_blocks
        ] * self._num_layers  # per layer, the number of leading blocks present without a gap
        self._spans: list[TokenSpan] = []
        self._lost: GroupLost | None = None
        self._came = threading.Condition()
        self._last_s = time.monotonic()

    def valid_tokens(self, blocks: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the valid tokens of each block: members push whole blocks only."""
        return np.full(len(blocks), self._memory.block_tokens, dtype=np.int32)

    def begin(self, spans: Sequence[TokenSpan]) -> None:
        """Set the chunks to compute, in order."""
        with self._came:
            self._spans = list(spans)
            self._last_s = time.monotonic()

    # Engine thread.

    @property
    def next_span(self) -> TokenSpan | None:
        """Prompt tokens [start, end) of the next chunk; None when all chunks are computed."""
        return self._spans[0] if self._spans else None

    @property
    def is_ready(self) -> bool:
        """True if the first layer of the next chunk can be computed, or if the group is lost.

        A step that has begun therefore waits only for steps that began earlier, so members cannot wait for each other
        in a circle.
        """
        return self._lost is not None or self._has(0)

    def layer_computed(self, layer: int) -> None:
        """Mark one layer of the next chunk as computed and wait for the input of the next layer. Raises GroupLost."""
        start, end = self._spans[0]
        block_tokens = self._memory.block_tokens
        with self._came:
            self._mark(layer, np.arange(start // block_tokens, min(self.num_blocks, end // block_tokens)))
        if layer + 1 < self._num_layers:
            self.wait(layer + 1)

    def wait(self, layer: int) -> None:
        """Block until this layer of all blocks before the next chunk is present. Raises GroupLost."""
        began_s = time.monotonic()
        with self._came:
            while self._lost is None and not self._has(layer):
                left_s = max(began_s, self._last_s) + self._stall_s - time.monotonic()
                if left_s <= 0:
                    self._lost = GroupLost(f"layer {layer} of an earlier chunk has not arrived for {self._stall_s:g} s")
                    break
                self._came.wait(left_s)
            if self._lost is not None:
                raise self._lost

    def chunk_computed(self) -> None:
        """Advance to the following chunk."""
        del self._spans[0]

    # Other threads.

    def announce(self) -> None:
        """Do nothing: no caller waits for pending verifications."""

    def verified(self, layer: int, blocks: NDArray[np.int64], right: NDArray[np.bool_]) -> None:
        """Mark verified blocks as present and pass them on. If that is not possible, the group is lost."""
        if not right.all():
            self.lose(f"{int((~right).sum())} blocks of layer {layer} arrived damaged")
            return
        try:
            self._use(layer, blocks)
        except Exception as error:
            self.lose(f"blocks of layer {layer} arrived and could not be used: {error!r}")
            raise

    def _use(self, layer: int, blocks: NDArray[np.int64]) -> None:
        self._memory.to_device([self.slots[b] for b in blocks], layer).wait()
        with self._came:
            if self._lost is not None:
                return
            self._mark(layer, blocks)
            self._last_s = time.monotonic()
            self._came.notify_all()
        if self._forward is not None:
            self._forward(layer, blocks.tolist())
        if layer == 0:
            self._changed()

    def lose(self, why: str) -> None:
        """Mark the group as lost and wake all waiting callers. Does nothing if it is lost already."""
        with self._came:
            if self._lost is None:
                self._lost = GroupLost(why)
            self._came.notify_all()
        self._changed()

    @property
    def idle_s(self) -> float:
        """Seconds since the last arrival while the next chunk is not ready; 0 if it is."""
        with self._came:
            waits = self._lost is None and bool(self._spans) and not self._has(0)
            return time.monotonic() - self._last_s if waits else 0.0

    @property
    def leading_tokens(self) -> int:
        """Number of tokens at the beginning of the prompt with all layers present."""
        with self._came:
            return min(self._leading) * self._memory.block_tokens

    def _has(self, layer: int) -> bool:
        return bool(self._spans) and self._leading[layer] * self._memory.block_tokens >= self._spans[0][0]

    def _mark(self, layer: int, blocks: NDArray[np.int64]) -> None:
        here = self._here[layer]
        here[blocks] = True
        rest = here[self._leading[layer] :]
        self._leading[layer] += len(rest) if rest.all() else int(rest.argmin())


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
        forward: Callable[[int, list[int]], None] | None = None,
    ) -> None:
        """See MemberChunks for the arguments; pushes run on the senders."""
        self._node = node
        self._request = request
        self._senders = senders
        self.held_blocks = held_blocks
        self.chunks = MemberChunks(
            node.memory,
            slots,
            num_blocks=num_blocks,
            held_blocks=held_blocks,
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
            groups=[BlockSlots(offsets=memory.offsets(g, self.chunks.slots)) for g in range(memory.num_groups)],
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
            offsets=[np.array(group.offsets, dtype=np.int64) for group in other.groups],
            push_from=other.held_blocks,
        )
        return Pusher(
            node.memory,
            self._senders,
            destination,
            slots=self.chunks.slots,
            prompt_len=len(self._request.prompt),
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
