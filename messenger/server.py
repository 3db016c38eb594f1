"""Listening sockets, the bounded set of accepted connections, and the detection of lost callers.

One thread per listening socket accepts; each connection then has a thread of its own (`inbound.py`). `_lock` guards the
connections, their callers and the absences; connections are cut, and handlers called, without it.

Each listening socket has a budget of connections of its own, so that callers over tcp cannot keep out those of this
host. A connection keeps its place once its caller has presented a valid key for some memory. When the budget is used
up, one without a key gives way to a new one, and any without a key ends some time after its greeting.
"""

import logging
import socket
import threading
from collections import Counter
from collections.abc import Callable, Mapping

from messenger.alarms import Alarm, AlarmClock
from messenger.frames import REJECTIONS, ConnectionReject, Hello
from messenger.inbound import InboundConnection, ServerContext
from messenger.link import Link
from messenger.transport import Acceptor, Transport

_BACKLOG = 128

_log = logging.getLogger(__name__)

Caller = tuple[str, int]


class Server:
    """Listening sockets and accepted connections of one messenger.

    `max_connections` is the budget of each listening socket. `on_lost(node_id, incarnation)` is called when a caller's
    last connection broke and it has not connected again within the grace period; `on_found` whenever a caller connects.
    """

    def __init__(
        self,
        context: ServerContext,
        clock: AlarmClock,
        *,
        max_connections: int,
        max_connections_per_peer: int,
        unproven_s: float,
        loss_grace_s: float,
        on_lost: Callable[[str, int], None],
        on_found: Callable[[str, int], None],
    ) -> None:
        self._context = context
        self._clock = clock
        self._max_connections = max_connections
        self._max_of_peer = max_connections_per_peer
        self._unproven_s = unproven_s
        self._loss_grace_s = loss_grace_s
        self._on_lost = on_lost
        self._on_found = on_found
        self._lock = threading.Lock()
        self._connections: dict[InboundConnection, threading.Thread] = {}  # in the order in which they came
        self._unproven: dict[InboundConnection, Alarm] = {}
        self._callers: dict[Caller, Counter[bytes]] = {}  # connections by session
        self._gone: dict[Caller, object] = {}  # callers without a connection, until they are back or reported
        self._listeners: list[tuple[Acceptor, socket.socket, threading.Thread]] = []
        self._closing = False

    def listen(self, acceptor: Acceptor, transports: Mapping[str, Transport]) -> socket.socket:
        """Accept connections of the transports from now on. Returns the listening socket, which the server owns."""
        listener = acceptor.listen(_BACKLOG)
        thread = threading.Thread(
            target=self._accept,
            args=(acceptor, listener, transports),
            name=f"{self._context.node_id}-{acceptor.name}",
            daemon=True,
        )
        self._listeners.append((acceptor, listener, thread))
        thread.start()
        return listener

    def connections(self) -> int:
        """Return the number of inbound connections open now."""
        with self._lock:
            return len(self._connections)

    def close(self) -> None:
        """Stop listening, cut every connection and wait for the threads."""
        with self._lock:
            self._closing = True
            connections = dict(self._connections)
        for acceptor, listener, thread in self._listeners:
            # Closing alone would leave the thread in accept.
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            listener.close()
            acceptor.clean_up()
        for connection in connections:
            connection.cut()
        for thread in connections.values():
            if thread is not threading.current_thread():
                thread.join()

    def admit(self, hello: Hello) -> bool:
        """Count a connection of the caller; returns False if it has too many.

        A connection that replaces an earlier one of its session is always admitted.
        """
        caller = (hello.node_id, hello.incarnation)
        with self._lock:
            streams = self._callers.get(caller, Counter())
            if hello.session not in streams and len(streams) >= self._max_of_peer:
                return False
            streams[hello.session] += 1
            self._callers[caller] = streams
            self._gone.pop(caller, None)
        return True

    def greeted(self, connection: InboundConnection, hello: Hello) -> None:
        """Report that a caller has connected, and limit the time in which it must present a key."""
        alarm = self._clock.set(self._unproven_s, lambda: self._end_unproven(connection))
        with self._lock:
            self._unproven[connection] = alarm
        self._on_found(hello.node_id, hello.incarnation)

    def ended(self, connection: InboundConnection, hello: Hello | None, *, said_goodbye: bool) -> None:
        """Remove a connection whose thread ends; start the grace period if it was the caller's last."""
        with self._lock:
            self._connections.pop(connection, None)
            alarm = self._unproven.pop(connection, None)
            if alarm is not None:
                self._clock.clear(alarm)
            if hello is None:
                return
            caller = (hello.node_id, hello.incarnation)
            streams = self._callers[caller]
            streams[hello.session] -= 1
            if not streams[hello.session]:
                del streams[hello.session]
            if streams:
                return
            del self._callers[caller]
            if said_goodbye or self._closing or connection.was_evicted:
                return
            absence = self._gone[caller] = object()
        self._clock.set(self._loss_grace_s, lambda: self._report_lost(caller, absence))

    def _report_lost(self, caller: Caller, absence: object) -> None:
        with self._lock:
            # The caller may have returned and left again, which is another absence.
            if self._gone.get(caller) is not absence or self._closing:
                return
            del self._gone[caller]
        self._on_lost(*caller)

    def _accept(self, acceptor: Acceptor, listener: socket.socket, transports: Mapping[str, Transport]) -> None:
        while True:
            try:
                sock, address = listener.accept()
            except OSError as error:
                with self._lock:
                    if self._closing:
                        return
                # No descriptor is free, or the caller left at once: neither may end the service.
                self._context.incidents.warning(acceptor.name, "accepting by %s failed: %s", acceptor.name, str(error))
                threading.Event().wait(0.05)
                continue
            origin = address[0] if isinstance(address, tuple) else ""
            name = f"{origin}:{address[1]}" if origin else "a process of this host"
            try:
                acceptor.check(sock)
                self._begin(acceptor.name, transports, acceptor.wrap_accepted(sock, name), origin)
            except PermissionError as error:
                self._count_refusal(origin, name, str(error))
                sock.close()
            except Exception:  # an error of one connection must not prevent the next
                _log.exception("cannot serve a connection from %s", name)
                sock.close()

    def _begin(self, acceptor: str, transports: Mapping[str, Transport], link: Link, origin: str) -> None:
        connection = InboundConnection(self._context, self, transports, link, acceptor=acceptor, origin=origin)
        thread = threading.Thread(target=connection.run, name=f"{self._context.node_id}-inbound", daemon=True)
        with self._lock:
            has_room, evicted = self._room(acceptor)
            refusal = f"{self._max_connections} connections by {acceptor} are open, which is the limit"
            if has_room and not self._closing:
                refusal = self._start(connection, thread)
        if evicted is not None and has_room:
            self._context.counters.add("connections_evicted")
            evicted.evict()
        if refusal:
            self._turn_away(link, origin, refusal)

    def _room(self, acceptor: str) -> tuple[bool, InboundConnection | None]:
        """Return True if one more connection has room, and the connection that must give way for it, if any.

        That is the oldest one of the host with most connections without a key. With the lock held.
        """
        there = [one for one in self._connections if one.acceptor == acceptor]
        num_ending = sum(one.was_cut for one in there)
        if len(there) - num_ending < self._max_connections:
            return num_ending < self._max_connections, None
        unproven = [one for one in there if not one.was_cut and not one.has_presented_key]
        crowds = Counter(one.origin for one in unproven)
        evicted = max(unproven, key=lambda one: crowds[one.origin], default=None)  # the first of equal ones
        return evicted is not None and num_ending < self._max_connections, evicted

    def _end_unproven(self, connection: InboundConnection) -> None:
        """End a connection that has presented no key in time. The caller may connect again."""
        with self._lock:
            self._unproven.pop(connection, None)
        if not connection.has_presented_key:
            self._context.counters.add("connections_evicted")
            connection.evict()

    def _start(self, connection: InboundConnection, thread: threading.Thread) -> str:
        """Start the thread. Returns the reason if that fails, otherwise "". With the lock held."""
        self._connections[connection] = thread
        try:
            thread.start()
        except RuntimeError as error:
            del self._connections[connection]
            return f"cannot start a thread for the connection: {error}"
        return ""

    def _turn_away(self, link: Link, origin: str, reason: str) -> None:
        self._count_refusal(origin, link.address, reason)
        try:
            link.set_timeout(0.1)
            link.send(ConnectionReject("full", REJECTIONS["full"]))
        except OSError:
            pass
        link.close()

    def _count_refusal(self, origin: str, name: str, reason: str) -> None:
        self._context.counters.add("connections_turned_away")
        self._context.incidents.warning(origin, "rejected a connection from %s: %s", name, reason)
