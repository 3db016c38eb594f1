"""Events of the blocks in a worker's own memory, for the conductors' directories; as a pool node's (`kvpool.events`).

Changes are collected for a moment, so that a request causes one or two events however many blocks it moves. Lives on
the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc

from kvpool.event_streams import EventStreams
from kvpool.events import PoolEvents, Tier
from kvpool.policy.event_log import EventLog
from moonpool_proto.v1 import pool_pb2
from moonpool_proto.v1.pool_pb2_grpc import OwnBlocksServicer
from worker.policy.held_blocks import HeldBlocks

COLLECT_S: Final = 0.02
HEARTBEAT_S: Final = 1.0
_LOG_NBYTES: Final = 4 << 20  # events kept for conductors that connect again
_MAX_EVENT_BLOCKS: Final = 4096


class OwnBlocks(OwnBlocksServicer):
    """The blocks of one worker's own memory, and the service that reports them."""

    def __init__(
        self,
        kv_namespace: bytes,
        incarnation: int,
        *,
        window_namespace: bytes = b"",
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        """`kv_namespace` is that of the lasting KV groups, `window_namespace` of the windowed ones; empty: none."""
        self._held = {namespace: HeldBlocks() for namespace in (kv_namespace, window_namespace) if namespace}
        self._lasting, self._windowed = self._held.get(kv_namespace), self._held.get(window_namespace)
        self._log = EventLog(incarnation, _LOG_NBYTES)
        self._streams = EventStreams(self._log, self._snapshot, heartbeat_s)
        self._loop = asyncio.get_running_loop()
        self._collecting: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """Return the number of blocks held; those of both kinds of groups count twice."""
        return sum(map(len, self._held.values()))

    def add(self, key: bytes) -> None:
        """Record that one more place in memory holds the block `key` (16 bytes), whole and verified."""
        if self._lasting is not None:
            self._lasting.add(key)
            self._collect()

    def discard(self, key: bytes) -> None:
        """Record that one place no longer holds the block."""
        if self._lasting is not None:
            self._lasting.discard(key)
            self._collect()

    def add_window(self, key: bytes) -> None:
        """As `add`, in windowed groups."""
        if self._windowed is not None:
            self._windowed.add(key)
            self._collect()

    def discard_window(self, key: bytes) -> None:
        """As `discard`, in windowed groups."""
        if self._windowed is not None:
            self._windowed.discard(key)
            self._collect()

    def close(self) -> None:
        """End all event streams."""
        self._streams.close()
        if self._collecting is not None:
            self._collecting.cancel()

    async def Events(
        self, request: pool_pb2.EventsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pool_pb2.PoolEvents]:
        async for events in self._streams.read(request.incarnation, request.after_seq):
            yield events.to_proto()

    def _collect(self) -> None:
        if self._collecting is None:
            self._collecting = self._loop.call_later(COLLECT_S, self._publish)

    def _publish(self) -> None:
        self._collecting = None
        self._append_changes()  # nothing, if a snapshot has appended them
        self._streams.wake()

    def _append_changes(self) -> None:
        for namespace, held in self._held.items():
            changes = held.take_changes()
            for keys, before, now in ((changes.removed, Tier.DRAM, None), (changes.stored, None, Tier.DRAM)):
                for start in range(0, len(keys), _MAX_EVENT_BLOCKS):
                    self._log.append(namespace, b"".join(keys[start : start + _MAX_EVENT_BLOCKS]), before, now)

    def _snapshot(self) -> list[PoolEvents]:
        self._append_changes()  # a snapshot has the number of the last event
        contents = {(namespace, Tier.DRAM): bytearray(b"".join(held.keys())) for namespace, held in self._held.items()}
        return self._log.snapshot(contents)
