"""One node's place in a prefill group: the slots that others write into, and the ways to those that it writes to."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from messenger import Endpoint, RemoteKey
from moonpool_proto.v1.worker_pb2 import BlockSlots, Enlisted, Member
from moonpool_proto.v1.worker_pb2 import RemoteKey as KeyMessage
from prefill_node.chunk_assignment import TokenSpan
from prefill_node.push import Pusher
from worker.errors import GroupLost
from worker.node import WorkerNode
from worker.request import Request
from worker.shielded_wait import in_thread
from worker.slot_memory import EngineMemory


class MemberChunks:
    """A Receiver of what the others push."""

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
        """Blocks [0, num_blocks) of the prompt are needed here, blocks [0, held_blocks) are. `changed()`: the next
        chunk may be ready now. `forward(layer, blocks)` gets what came from others and is right. A step waits for a
        layer for `stall_s` after the last one came."""
        self.slots = list(slots)
        self.num_blocks = num_blocks
        self._memory = memory
        self._stall_s = stall_s
        self._changed = changed
        self._forward = forward
        self._num_layers = len(memory.place_of_layer)
        self._here = np.zeros((self._num_layers, num_blocks), dtype=bool)
        self._here[:, :held_blocks] = True
        self._leading = [held_blocks] * self._num_layers  # blocks that are here without a gap, by layer
        self._spans: list[TokenSpan] = []
        self._lost: GroupLost | None = None
        self._came = threading.Condition()
        self._last_s = time.monotonic()

    def valid_tokens(self, blocks: NDArray[np.int64]) -> NDArray[np.int32]:
        """Members push whole blocks only."""
        return np.full(len(blocks), self._memory.block_tokens, dtype=np.int32)

    def begin(self, spans: Sequence[TokenSpan]) -> None:
        """Compute these chunks, in order."""
        with self._came:
            self._spans = list(spans)
            self._last_s = time.monotonic()

    # The engine's thread.

    @property
    def next_span(self) -> TokenSpan | None:
        """The chunk to be computed next; None: this member is done."""
        return self._spans[0] if self._spans else None

    @property
    def is_ready(self) -> bool:
        """Whether the engine should take it up: the next chunk's first layer can be computed, or all is lost.

        A step that has begun so waits only for steps that began before it, so that no two members wait for each other.
        """
        return self._lost is not None or self._has(0)

    def layer_computed(self, layer: int) -> None:
        """A layer of the next chunk is written here: wait for what its next layer needs. Raises GroupLost."""
        start, end = self._spans[0]
        block_tokens = self._memory.block_tokens
        with self._came:
            self._mark(layer, np.arange(start // block_tokens, min(self.num_blocks, end // block_tokens)))
        if layer + 1 < self._num_layers:
            self.wait(layer + 1)

    def wait(self, layer: int) -> None:
        """Until this layer of all that comes before the next chunk is here. Raises GroupLost."""
        began_s = time.monotonic()
        with self._came:
            while self._lost is None and not self._has(layer):
                left_s = max(began_s, self._last_s) + self._stall_s - time.monotonic()
                if left_s <= 0:
                    self._lost = GroupLost(f"layer {layer} of an earlier chunk has not come for {self._stall_s:g} s")
                    break
                self._came.wait(left_s)
            if self._lost is not None:
                raise self._lost

    def chunk_computed(self) -> None:
        """The next chunk is computed."""
        del self._spans[0]

    # Other threads.

    def announce(self) -> None:
        """Nobody waits for verifications as such."""

    def verified(self, layer: int, blocks: NDArray[np.int64], right: NDArray[np.bool_]) -> None:
        if not right.all():
            self.lose(f"{int((~right).sum())} blocks of layer {layer} came damaged")
            return
        self._memory.to_device([self.slots[b] for b in blocks], layer)
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
        """The others' chunks do not come any more: whoever waits for them is told."""
        with self._came:
            if self._lost is None:
                self._lost = GroupLost(why)
            self._came.notify_all()
        self._changed()

    @property
    def idle_s(self) -> float:
        """For how long nothing has come, where the next chunk is not ready; else 0."""
        with self._came:
            waits = self._lost is None and bool(self._spans) and not self._has(0)
            return time.monotonic() - self._last_s if waits else 0.0

    @property
    def leading_tokens(self) -> int:
        """Tokens at the prompt's beginning all of whose layers are here."""
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
    """To another member, that needs all tokens before `until`."""

    pusher: Pusher
    until: int


class GroupMember:
    """Of slots that the caller holds until `close` has returned."""

    def __init__(
        self,
        node: WorkerNode,
        request: Request,
        executor: ThreadPoolExecutor,
        slots: Sequence[int],
        *,
        num_blocks: int,
        held_blocks: int,
        forward: Callable[[int, list[int]], None] | None = None,
    ) -> None:
        """Arguments as MemberChunks has them; pushes are made by the executor."""
        self._node = node
        self._request = request
        self._executor = executor
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
        self.epoch = node.kv_receiver.new_epoch()
        self.key: RemoteKey | None = node.memory.grant_write(slots[held_blocks:])
        node.kv_receiver.open_epoch(self.epoch, self.chunks)
        self._ways: list[_PeerPusher] = []

    def enlisted(self) -> Enlisted:
        """What the others are told. Not after `close`."""
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
        """Compute these chunks, and push them to whom they concern; the first `reused_blocks` blocks at once."""
        for other in others:
            pusher = self._pusher(other)
            self._ways.append(_PeerPusher(pusher, other.until))
            pusher.push_blocks(range(other.held_blocks, reused_blocks))
        self.chunks.begin(spans)

    def _pusher(self, other: Member) -> Pusher:
        node = self._node
        return Pusher(
            node.memory,
            node.messenger.connect(Endpoint.from_proto(other.endpoint)),
            self._executor,
            lambda nbytes, seconds: node.counters.add_transfer("group", nbytes, seconds),
            epoch=other.epoch,
            key=RemoteKey.unpack(other.key.packed),
            slots=self.chunks.slots,
            remote=[np.array(group.offsets, dtype=np.int64) for group in other.groups],
            prompt_len=len(self._request.prompt),
            push_from=other.held_blocks,
            deadline_s=lambda: self._request.time_left_s,
            stall_s=node.config.kv.push_timeout_s,
        )

    def layer_written(self, layer: int, start: int, end: int) -> None:
        """Tokens [start, end) of `layer`, computed here, are in the cache. Called on the engine's thread."""
        for way in self._ways:
            if start < way.until:
                way.pusher.layer_written(layer, start, end)

    async def flush(self) -> None:
        """Wait until everything pushed has landed. Raises RequestFailed."""
        for way in self._ways:
            await way.pusher.flush()

    async def close(self) -> None:
        """Push nothing more and take nothing more: when this returns, nobody can write into the slots. Idempotent."""
        await asyncio.gather(*(way.pusher.stop() for way in self._ways))
        self._node.kv_receiver.close_epoch(self.epoch)
        key, self.key = self.key, None
        if key is not None:
            await in_thread(self._node.messenger.revoke, key)
