"""Moments: what happens inside the roles is reported to the world, so that faults can begin exactly then.

A moment of a push, a put or a pull names the request or the node at the other end, as far as it is known there.
"""

from __future__ import annotations

from typing import Any

from conductor.scheduling import Scheduling
from decode_node.server import DecodeService
from kvpool.node import PoolNode
from kvpool.policy.core import PoolCore
from messenger import Endpoint
from messenger.peer import Peer
from messenger.tcp.transport import TcpResponder
from tools.prove.instances import running_process
from tools.prove.schedule import MOMENTS
from tools.prove.world.scheduler import Moment, world
from worker.node_slots import NodeSlots, SlotQueue


def report(name: str, there: str = "", request_id: str = "") -> None:
    """Report a moment of the running process."""
    assert name in MOMENTS
    if (on_moment := world().on_moment) is not None:
        on_moment(Moment(name, running_process(), there, request_id))


def watch() -> None:
    """Wrap the methods in which moments happen. Once per process."""
    _watch_workers()
    _watch_pools()
    schedule = Scheduling.schedule

    def watched_schedule(self: Scheduling, request: Any, reply: Any) -> None:
        schedule(self, request, reply)
        report("scheduled", request.frontend_id, request.request_id)
        for node in (reply.placement.prefill, reply.placement.decode):
            if node.node_id:
                report("placed", node.node_id, request.request_id)

    Scheduling.schedule = watched_schedule  # type: ignore[method-assign]


def _writers() -> dict[int, tuple[str, str]]:
    """Return who writes under which key of the running process: node and request, by token."""
    found: list[dict[int, tuple[str, str]]] = running_process().objects.setdefault("writers", [{}])
    return found[0]


def _watch_workers() -> None:
    open_reservation, close_reservation = DecodeService._open_reservation, DecodeService._close_reservation
    land, read, serve, left = TcpResponder.land, Peer.read, SlotQueue.serve, NodeSlots.left

    def watched_open(self: DecodeService, request: Any, reserve: Any, taken: Any) -> Any:
        reservation = open_reservation(self, request, reserve, taken)
        writer = Endpoint.from_proto(reserve.writer).node_id
        _writers()[reservation.key.token] = writer, request.request_id
        report("reserved", writer, request.request_id)
        return reservation

    async def watched_close(self: DecodeService, reservation: Any) -> None:
        report("given up", _writers().get(reservation.key.token, ("", ""))[0], reservation.request.request_id)
        await close_reservation(self, reservation)

    def watched_land(self: TcpResponder, message: Any, rows: Any, region: Any) -> None:
        report("lands", *_writers().get(message.token, ("", "")))
        land(self, message, rows, region)

    def watched_read(self: Peer, *arguments: Any, **options: Any) -> Any:
        is_pool = running_process().objects.get("arena")
        report("copies" if is_pool else "reads", self.endpoint.node_id)
        return read(self, *arguments, **options)

    def watched_serve(self: SlotQueue) -> None:
        waiting, known = list(self._waiters), running_process().objects.setdefault("waiters", [])
        serve(self)
        for waiter in waiting:
            if waiter not in self._waiters and waiter.taken.done() and not waiter.taken.cancelled():
                report("gets slots", "", waiter.key[0])
            elif waiter in self._waiters and waiter not in known:
                known.append(waiter)
                report("waits", "", waiter.key[0])

    def watched_left(self: NodeSlots, sequence: Any) -> None:
        left(self, sequence)
        report("answered", "", self._queue._waiters[0].key[0] if self._queue._waiters else "")

    NodeSlots.left = watched_left  # type: ignore[method-assign]
    DecodeService._open_reservation = watched_open  # type: ignore[method-assign]
    DecodeService._close_reservation = watched_close  # type: ignore[method-assign]
    TcpResponder.land, Peer.read = watched_land, watched_read  # type: ignore[method-assign]
    SlotQueue.serve = watched_serve  # type: ignore[method-assign]


def _watch_pools() -> None:
    track, write_key, pin = PoolCore.track, PoolNode.write_key, PoolCore.pin

    def watched_track(self: PoolCore, *arguments: Any, owner: str, **options: Any) -> str:
        put_id = track(self, *arguments, owner=owner, **options)
        report("put", owner)
        return put_id

    def watched_write_key(self: PoolNode, allocation: Any) -> Any:
        key = write_key(self, allocation)
        _writers()[key.token] = self.core.puts[allocation.put_id].owner, ""
        return key

    def watched_pin(self: PoolCore, *arguments: Any, owner: str, **options: Any) -> Any:
        grant = pin(self, *arguments, owner=owner, **options)
        if grant is not None:
            report("leased", owner)
        return grant

    PoolCore.track, PoolNode.write_key = watched_track, watched_write_key  # type: ignore[method-assign]
    PoolCore.pin = watched_pin  # type: ignore[method-assign]
