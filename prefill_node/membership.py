"""One node's place in a prefill group: the slots that others write into, and the ways to those that it writes to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from messenger import Endpoint, RemoteKey
from moonpool_proto.v1.worker_pb2 import BlockSlots, Enlisted, Member
from moonpool_proto.v1.worker_pb2 import RemoteKey as KeyMessage
from prefill_node.push import Pusher
from worker.node import WorkerNode
from worker.policy.shares import Span
from worker.request import Request
from worker.settle import in_thread
from worker.share import Share

__all__ = ["Membership"]


@dataclass(frozen=True, slots=True)
class _Way:
    """To another member, that needs all tokens before `until`."""

    pusher: Pusher
    until: int


class Membership:
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
        """Arguments as Share has them; pushes are made by the executor."""
        self._node = node
        self._request = request
        self._executor = executor
        self.held_blocks = held_blocks
        self.share = Share(
            node.memory,
            slots,
            num_blocks=num_blocks,
            held_blocks=held_blocks,
            stall_s=node.config.push_timeout_s,
            changed=node.engine.wake,
            forward=forward,
        )
        self.epoch = node.arrivals.new_epoch()
        self.key: RemoteKey | None = node.memory.grant_write(slots[held_blocks:])
        node.arrivals.open(self.epoch, self.share)
        self._ways: list[_Way] = []

    def enlisted(self) -> Enlisted:
        """What the others are told. Not after `close`."""
        memory = self._node.memory
        assert self.key is not None
        return Enlisted(
            epoch=self.epoch,
            key=KeyMessage(packed=self.key.pack()),
            held_blocks=self.held_blocks,
            groups=[BlockSlots(offsets=memory.offsets(g, self.share.slots)) for g in range(memory.num_groups)],
            endpoint=self._node.endpoint.to_proto(),
        )

    def begin(self, spans: Sequence[Span], others: Sequence[Member], reused_blocks: int = 0) -> None:
        """Compute these chunks, and push them to whom they concern; the first `reused_blocks` blocks at once."""
        for other in others:
            pusher = self._pusher(other)
            self._ways.append(_Way(pusher, other.until))
            pusher.push_blocks(range(other.held_blocks, reused_blocks))
        self.share.begin(spans)

    def _pusher(self, other: Member) -> Pusher:
        node = self._node
        return Pusher(
            node.memory,
            node.messenger.connect(Endpoint.from_proto(other.endpoint)),
            self._executor,
            lambda nbytes, seconds: node.counters.add_transfer("group", nbytes, seconds),
            epoch=other.epoch,
            key=RemoteKey.unpack(other.key.packed),
            slots=self.share.slots,
            remote=[np.array(group.offsets, dtype=np.int64) for group in other.groups],
            prompt_len=len(self._request.prompt),
            push_from=other.held_blocks,
            deadline_s=lambda: self._request.time_left_s,
            stall_s=node.config.push_timeout_s,
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
        self._node.arrivals.shut(self.epoch)
        key, self.key = self.key, None
        if key is not None:
            await in_thread(self._node.messenger.revoke, key)
