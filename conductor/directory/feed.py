"""Following one pool node's events: reconnects for ever, and goes on where the directory stands."""

import asyncio
import logging
from collections.abc import Callable

import grpc.aio

from conductor.directory.nodes import Position
from kvpool.errors import AddressError
from kvpool.events import PoolEvents
from moonpool_proto.v1 import pool_pb2, pool_pb2_grpc
from rpc.backoff import Backoff
from rpc.control import Unavailable, call, open_channel
from rpc.errors import ControlError

__all__ = ["follow_pool_events"]

_MAX_WAIT_S = 1.0

_log = logging.getLogger(__name__)


async def follow_pool_events(
    target: str,
    on_events: Callable[[PoolEvents], bool],
    position: Callable[[], Position],
    *,
    on_lost: Callable[[str, str], None] | None = None,
    silence_s: float = 5.0,
) -> None:
    """Call `on_events` with every message of the pool node at `target`, until cancelled.

    Each stream begins after `position()`, and with a snapshot where that is (0, 0) or the node cannot go on from there.
    `on_events` returns False (or raises AddressError) for a message that does not follow what is known: then another
    stream begins. `on_lost(reason, kind)` is called when a stream is "broken" (or silent for `silence_s`, heartbeats
    included), "refused" or "malformed": until the next message what is known of the node may be stale.
    """
    last_reason = ""
    backoff = Backoff(most_s=_MAX_WAIT_S)

    def taken(events: PoolEvents) -> bool:
        fits = on_events(events)
        if fits:
            backoff.succeeded()
        return fits

    while True:
        channel = open_channel(target)
        try:
            reason, kind = await _follow(channel, target, taken, position, silence_s)
        except ControlError as error:
            reason, kind = str(error), "broken"
        finally:
            await channel.close()
        if on_lost is not None:
            on_lost(reason, kind)
        if reason != last_reason:
            _log.warning("events of the pool node at %s are interrupted: %s", target, reason)
            last_reason = reason
        await asyncio.sleep(backoff.failed())


async def _follow(
    channel: grpc.aio.Channel,
    target: str,
    on_events: Callable[[PoolEvents], bool],
    position: Callable[[], Position],
    silence_s: float,
) -> tuple[str, str]:
    """Follow one stream until it ends; returns why, in words and in one."""
    stub: pool_pb2_grpc.PoolAsyncStub = pool_pb2_grpc.PoolStub(channel)
    begin = position()
    stream = stub.Events(pool_pb2.EventsRequest(incarnation=begin.incarnation, after_seq=begin.seq))
    try:
        while True:
            message = await call(stream.read(), what="Pool.Events", target=target, deadline_s=silence_s)
            if not isinstance(message, pool_pb2.PoolEvents):
                raise Unavailable("the stream ended", what="Pool.Events", target=target, code="UNAVAILABLE")
            known = position()
            try:
                events = PoolEvents.from_proto(message)
                if not on_events(events):
                    came = f"event {events.incarnation:x}/{events.first_seq}"
                    return f"{came} does not follow {known.incarnation:x}/{known.seq}, or leads elsewhere", "refused"
            except AddressError as error:
                return f"a malformed event: {error}", "malformed"
    finally:
        stream.cancel()
