"""The simulated network between hosts: ordered connections, as TCP's, with delays and faults.

Bytes are neither lost nor reordered within a connection, but late: while a link is cut, everything waits (TCP sends it
again) until the link is whole, or until the sender gives up (`GIVE_UP_S`) and the connection ends with an error. After
the death of a process its host's kernel resets its connections; after the death of a host nothing answers until it is
back (half-open connections), and then its kernel answers with a reset.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tools.prove.world.scheduler import ProcessState, World

GIVE_UP_S = 30.0  # TCP_USER_TIMEOUT of the roles' sockets; gRPC's keepalive notices it sooner
_AGAIN_S = 0.2  # TCP sends again after this time when a link is whole again


@dataclass
class LinkFaults:
    """Faults of the way from one host to another. `garbles`: bits of KV flip, and TCP's checksum does not show it."""

    is_cut: bool = False
    slower: float = 1.0
    garbles: bool = False


class End:
    """One side of a connection. Callbacks run in the scheduler; they must not block.

    `on_item(item)`: the next item that the other side sent. `on_end(error)`: nothing more will come; None after an
    orderly close, otherwise the OSError.
    """

    def __init__(self, network: SimNetwork, process: ProcessState, address: Any) -> None:
        self.process, self.address = process, address
        self.peer: End
        self.on_item: Callable[[Any], None] | None = None
        self.on_end: Callable[[OSError | None], None] | None = None
        self.on_room: Callable[[], None] | None = None
        self.is_closed = False  # by this side
        self.ended = False  # nothing more comes from the other side
        self._network = network
        self._sent: deque[tuple[Any, int]] = deque()  # on the way
        self.nbytes_on_way = 0
        self._last_arrival_ns = 0
        self._num_sent = self._num_arrived = 0  # packets, which arrive in order
        self._ahead: dict[int, _Packet] = {}  # arrived before others that were sent earlier
        self._early: list[Any] = []

    @property
    def is_own(self) -> bool:
        """True for a connection of a process with itself, such as a socket pair: faults of the network spare it."""
        return self.process is self.peer.process

    def send(self, item: Any, nbytes: int) -> None:
        """Send an item; it is dropped silently if the connection is over."""
        if not self.is_closed and not self.ended:
            self._network.carry(self, ("item", item, nbytes), nbytes)
            self.nbytes_on_way += nbytes

    def close(self) -> None:
        """Send everything, and then the end."""
        if not self.is_closed:
            self.is_closed = True
            self._network.carry(self, ("end", None, 0), 0)
            self._network.connections.pop(self, None)

    def reset(self) -> None:
        """Discard the connection; the other side gets an error."""
        if not self.is_closed:
            self.is_closed = True
            self._network.carry(self, ("end", ConnectionResetError(104, "Connection reset by peer"), 0), 0)
            self._network.connections.pop(self, None)

    def listen(
        self,
        on_item: Callable[[Any], None],
        on_end: Callable[[OSError | None], None],
        on_room: Callable[[], None] | None = None,
    ) -> None:
        """Set the callbacks; what came before is delivered at once."""
        self.on_item, self.on_end, self.on_room = on_item, on_end, on_room
        early, self._early = self._early, []
        for kind, value in early:
            self._deliver(kind, value)

    def _deliver(self, kind: str, value: Any) -> None:
        if self.is_closed or self.process.is_dead or (self.ended and kind == "end"):
            return
        if self.on_item is None or self.on_end is None:
            self._early.append((kind, value))
        elif kind == "item":
            self.on_item(value)
        else:
            self.ended = True
            self._network.connections.pop(self, None)
            self.on_end(value)

    def fail(self, error: OSError) -> None:
        """End this side with an error of its own kernel."""
        self._deliver("end", error)


@dataclass(eq=False)
class _Packet:
    end: End
    number: int
    kind: str
    value: Any
    nbytes: int


class SimNetwork:
    """All hosts' network. `latency_s` and `bytes_per_s` are of an undisturbed link."""

    def __init__(self, world: World, *, latency_s: float = 50e-6, bytes_per_s: float = 5e9) -> None:
        self.world = world
        world.network = self
        self.latency_s, self.bytes_per_s = latency_s, bytes_per_s
        self.links: dict[tuple[str, str], LinkFaults] = {}
        self.dead_hosts: dict[str, None] = {}
        self.connections: dict[End, None] = {}
        self._listeners: dict[Any, tuple[ProcessState, Callable[[End], None]]] = {}
        self._held: dict[tuple[str, str], deque[_Packet]] = {}

    # Faults

    def link(self, source: str, target: str) -> LinkFaults:
        """Return the faults of the way from host `source` to `target`; they can be changed, but see `cut`, `heal`."""
        return self.links.setdefault((source, target), LinkFaults())

    def cut(self, source: str, target: str) -> None:
        """Let nothing through from one host to another."""
        self.link(source, target).is_cut = True

    def heal(self, source: str, target: str) -> None:
        """Let everything through again, first what waits."""
        self.link(source, target).is_cut = False
        self._release(source, target)

    def reset(self, host: str, other: str) -> None:
        """Break all connections between two hosts, as a firewall does that has lost its state."""
        for end in list(self.connections):
            if not end.is_own and (end.process.host, end.peer.process.host) in ((host, other), (other, host)):
                end.fail(ConnectionResetError(104, "Connection reset by peer"))

    def kill_host(self, host: str) -> None:
        """The host is gone with its processes: nothing answers."""
        self.dead_hosts[host] = None

    def revive_host(self, host: str) -> None:
        """The host is back, without its processes and connections."""
        self.dead_hosts.pop(host, None)
        for source, target in list(self._held):
            if host in (source, target):
                self._release(source, target)

    # Connections

    def listen(self, process: ProcessState, address: Any, on_connect: Callable[[End], None]) -> None:
        """Accept connections at `address`. Raises OSError (EADDRINUSE) if a live process listens there."""
        known = self._listeners.get(address)
        if known is not None and not known[0].is_dead:
            raise OSError(98, "Address already in use")
        self._listeners[address] = process, on_connect
        process.at_death.append(lambda: self.stop_listening(process, address))

    def ports(self) -> list[int]:
        """Return the ports of all addresses at which connections are accepted; an address ends with its port."""
        return [int(str(address[-1]).rpartition(":")[2]) for address in self._listeners]

    def stop_listening(self, process: ProcessState, address: Any) -> None:
        """Accept no more connections at `address`."""
        if address in self._listeners and self._listeners[address][0] is process:
            del self._listeners[address]

    def dial(
        self,
        process: ProcessState,
        host: str,
        address: Any,
        done: Callable[[End | OSError], None],
        timeout_s: float = 20.0,
    ) -> None:
        """Connect to `address`, which is on `host`; `done` gets this side's End, or the error."""
        asked = _Dial(self, process, host, address, done)
        asked.timer = self.world.at(timeout_s, asked.time_is_over)
        known = self._listeners.get(address)
        is_own = known is not None and known[0] is process
        self._send(process.host, host, asked.arrive, is_own=is_own)

    def close_all(self, process: ProcessState) -> None:
        """End the connections of a process that has died: its kernel resets them, unless the host is gone, too."""
        for end in [end for end in self.connections if end.process is process]:
            if process.host not in self.dead_hosts:
                end.reset()
            else:
                end.is_closed = True
                self.connections.pop(end, None)

    def carry(self, end: End, what: tuple[str, Any, int], nbytes: int) -> None:
        """Bring an item or the end to the other side, behind all that was sent before."""
        kind, value, size = what
        packet = _Packet(end, end._num_sent, kind, value, size)
        end._num_sent += 1
        self._route(packet)

    def _route(self, packet: _Packet) -> None:
        end = packet.end
        source, target = end.process.host, end.peer.process.host
        way = source, target
        if not end.is_own and (self._is_blocked(source, target) or self._held.get(way)):
            self._hold(way, packet)
            return
        delay_ns = self._delay_ns(source, target, packet.nbytes)
        due_ns = max(self.world.now_ns + delay_ns, end._last_arrival_ns + 1)
        end._last_arrival_ns = due_ns
        self.world.at((due_ns - self.world.now_ns) / 1e9, lambda: self._arrive(packet))

    def _arrive(self, packet: _Packet) -> None:
        end, peer = packet.end, packet.end.peer
        if not end.is_own and self._is_blocked(end.process.host, peer.process.host):
            self._hold((end.process.host, peer.process.host), packet)
            return
        end._ahead[packet.number] = packet
        while (following := end._ahead.pop(end._num_arrived, None)) is not None:
            end._num_arrived += 1
            self._take(following)

    def _take(self, packet: _Packet) -> None:
        """Hand a packet to the other side; all that were sent before it have been handed over."""
        end, peer = packet.end, packet.end.peer
        end.nbytes_on_way -= packet.nbytes
        if peer.process.is_dead and packet.kind == "item":
            if peer.process.host not in self.dead_hosts:  # nobody has the connection any more: a reset comes back
                self._send(
                    peer.process.host,
                    end.process.host,
                    lambda: end.fail(ConnectionResetError(104, "Connection reset by peer")),
                )
            return
        peer._deliver(packet.kind, packet.value)
        if packet.kind == "item" and end.on_room is not None and not end.is_closed:
            end.on_room()

    def _hold(self, way: tuple[str, str], packet: _Packet) -> None:
        held = self._held.setdefault(way, deque())
        held.append(packet)

        def give_up() -> None:
            if packet in held and not packet.end.ended:
                packet.end.fail(TimeoutError(110, "Connection timed out"))

        self.world.at(GIVE_UP_S, give_up)

    def _release(self, source: str, target: str) -> None:
        def again() -> None:
            if not self._is_blocked(source, target):
                held = self._held.pop((source, target), deque())
                while held:
                    self._route(held.popleft())

        self.world.at(self.world.chance.uniform(0.0, _AGAIN_S), again)

    def _is_blocked(self, source: str, target: str) -> bool:
        if source in self.dead_hosts or target in self.dead_hosts:
            return True
        faults = self.links.get((source, target))
        return faults is not None and faults.is_cut

    def _delay_ns(self, source: str, target: str, nbytes: int) -> int:
        faults = self.links.get((source, target))
        slower = 1.0 if faults is None else faults.slower
        seconds = self.latency_s * self.world.chance.expovariate(1.0) + 5e-6 + nbytes / self.bytes_per_s
        if self.world.chance.random() < 0.01:  # a congested moment
            seconds += self.world.chance.uniform(0.0, 0.01)
        return int(seconds * slower * 1e9)

    def _send(self, source: str, target: str, arrive: Callable[[], None], *, is_own: bool = False) -> None:
        """Bring something that belongs to no connection; it is lost if the link is cut, but within a process."""

        def arrived() -> None:
            if is_own or not self._is_blocked(source, target):
                arrive()

        if is_own or not self._is_blocked(source, target):
            self.world.at(self._delay_ns(source, target, 64) / 1e9, arrived)


class _Dial:
    """A connection that is being made."""

    timer: Any

    def __init__(
        self, network: SimNetwork, process: ProcessState, host: str, address: Any, done: Callable[[End | OSError], None]
    ) -> None:
        self._network, self._process, self._host, self._address = network, process, host, address
        self._done: Callable[[End | OSError], None] | None = done

    def _end(self, result: End | OSError) -> None:
        if self._done is not None and not self._process.is_dead:
            done, self._done = self._done, None
            self.timer.cancel()
            done(result)

    def time_is_over(self) -> None:
        self._end(TimeoutError(110, "Connection timed out"))

    def arrive(self) -> None:
        """The request has come to the other host."""
        network, known = self._network, self._network._listeners.get(self._address)
        back = self._host, self._process.host
        if known is None or known[0].is_dead:
            network._send(*back, lambda: self._end(ConnectionRefusedError(111, "Connection refused")))
            return
        owner, on_connect = known
        own, theirs = End(network, self._process, self._address), End(network, owner, self._process.name)
        own.peer, theirs.peer = theirs, own

        def connected() -> None:
            if self._done is None or self._process.is_dead:
                own.is_closed = True
                theirs.fail(ConnectionResetError(104, "Connection reset by peer"))
                return
            network.connections[own] = None
            self._end(own)

        network.connections[theirs] = None
        on_connect(theirs)
        network._send(*back, connected, is_own=own.is_own)
