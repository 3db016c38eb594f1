"""Bits of KV that flip on the wire unnoticed by TCP: while a link garbles, half of all payloads have one wrong bit.

Frames and gRPC messages stay whole: guarantees.md names TCP's checksum, or TLS, as an assumption for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from messenger.sockets import SocketLink
from tools.prove.instances import running_process
from tools.prove.world.addresses import host_at
from tools.prove.world.scheduler import world


def watch() -> None:
    """Wrap what sends payloads. Once per process."""
    send, begin = SocketLink.send, SocketLink.begin

    def watched_send(self: SocketLink, message: Any, views: Sequence[memoryview] = (), fd: int | None = None) -> None:
        send(self, message, _sent(self, views), fd)

    def watched_begin(self: SocketLink, frame: Any, views: Sequence[memoryview] = ()) -> bool:
        return begin(self, frame, _sent(self, views))

    SocketLink.send, SocketLink.begin = watched_send, watched_begin  # type: ignore[method-assign]


def _sent(link: SocketLink, views: Sequence[memoryview]) -> Sequence[memoryview]:
    """Return the payload as it arrives."""
    here, chance = running_process(), world().chance
    if not views or not any(faults.garbles for faults in world().network.links.values()):
        return views
    try:
        to = host_at(link._sock.getpeername()[0], here.host)
    except OSError:  # cut
        return views
    if not world().network.link(here.host, to).garbles or chance.random() < 0.5:
        return views
    index = chance.randrange(len(views))
    copy = bytearray(views[index])
    copy[chance.randrange(len(copy))] ^= 1 << chance.randrange(8)
    world().tell(here.name, f"a bit on the way to {to} flips")
    return [*views[:index], memoryview(copy), *views[index + 1 :]]
