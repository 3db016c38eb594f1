"""Following one pool node's events: reconnects for ever, checks their numbering, asks for a snapshot after a gap."""

import asyncio
import logging
from collections.abc import Callable

import grpc.aio

from kvpool.errors import AddressError
from kvpool.events import PoolEvents
from messenger.control import Unavailable, call, open_channel
from messenger.errors import ControlError
from moonpool_proto.v1 import pool_pb2, pool_pb2_grpc

__all__ = ["follow_pool_events"]

_RECONNECT_S = 0.2

_log = logging.getLogger(__name__)


async def follow_pool_events(
    target: str,
    on_events: Callable[[PoolEvents], bool | None],
    *,
    on_lost: Callable[[str], None] | None = None,
    silence_s: float = 5.0,
) -> None:
    """Call `on_events` with every message of the pool node at `target`, until cancelled.

    The messages form one sequence without a gap: a snapshot, what follows it, and after a loss either what follows or
    another snapshot. `on_events` may return False (or raise AddressError) to ask for a snapshot. `on_lost(reason)` is
    called when the stream breaks, has a gap, or is silent for `silence_s` (heartbeats included): until the next message
    what is known of the node may be stale.
    """
    position = _Position()
    last_reason = ""
    while True:
        channel = open_channel(target)
        try:
            reason = await _follow(channel, target, position, on_events, silence_s)
        except ControlError as error:
            reason = str(error)
        finally:
            await channel.close()
        if on_lost is not None:
            on_lost(reason)
        if reason != last_reason:
            _log.warning("events of the pool node at %s are interrupted: %s", target, reason)
            last_reason = reason
        await asyncio.sleep(_RECONNECT_S)


class _Position:
    """Up to where a node's events have been taken in."""

    def __init__(self) -> None:
        self.incarnation = 0
        self.seq = 0
        self._in_snapshot = False

    def request(self) -> pool_pb2.EventsRequest:
        """Asks for what follows; for a snapshot when nothing, or only part of one, was taken in."""
        if self._in_snapshot:
            self.reset()
        return pool_pb2.EventsRequest(incarnation=self.incarnation, after_seq=self.seq)

    def reset(self) -> None:
        self.incarnation, self.seq, self._in_snapshot = 0, 0, False

    def accepts(self, events: PoolEvents) -> bool:
        """Whether this message follows; if so, it is taken in."""
        if events.snapshot_begin:
            self._in_snapshot = True
        elif events.incarnation != self.incarnation or not (self._in_snapshot or events.first_seq == self.seq + 1):
            return False
        self.incarnation, self.seq = events.incarnation, events.seq
        if events.snapshot_end:
            self._in_snapshot = False
        return True


async def _follow(
    channel: grpc.aio.Channel,
    target: str,
    position: _Position,
    on_events: Callable[[PoolEvents], bool | None],
    silence_s: float,
) -> str:
    """Follow one stream until it ends; returns why."""
    stub: pool_pb2_grpc.PoolAsyncStub = pool_pb2_grpc.PoolStub(channel)
    stream = stub.Events(position.request())
    try:
        while True:
            message = await call(stream.read(), what="Pool.Events", target=target, deadline_s=silence_s)
            if not isinstance(message, pool_pb2.PoolEvents):
                raise Unavailable("the stream ended", what="Pool.Events", target=target, code="UNAVAILABLE")
            events = PoolEvents.from_proto(message)
            if not position.accepts(events):
                known = f"{position.incarnation:x}/{position.seq}"
                position.reset()
                return f"event {events.incarnation:x}/{events.first_seq} does not follow {known}"
            try:
                taken = on_events(events)
            except AddressError as error:
                position.reset()
                return f"a malformed event: {error}"
            if taken is False:
                position.reset()
                return "a snapshot was asked for"
    finally:
        stream.cancel()
