"""Listening sockets, the bounded set of accepted connections, and word of peers whose connections all broke."""

import logging
import socket
import threading
from collections import Counter
from collections.abc import Callable, Mapping

from messenger.alarms import AlarmClock
from messenger.frames import Hello, Reject
from messenger.inbound import Inbound, Owner
from messenger.link import Link
from messenger.transport import Door, Transport

_BACKLOG = 128

_log = logging.getLogger(__name__)

Caller = tuple[str, int]


class Server:
    """`on_lost(node_id, incarnation)`: a caller's last connection broke, and none came back within the grace.

    `on_found` is called whenever one connects.
    """

    def __init__(
        self,
        owner: Owner,
        clock: AlarmClock,
        *,
        max_connections: int,
        max_connections_per_peer: int,
        loss_grace_s: float,
        on_lost: Callable[[str, int], None],
        on_found: Callable[[str, int], None],
    ) -> None:
        self._owner = owner
        self._clock = clock
        self._max_connections = max_connections
        self._max_of_peer = max_connections_per_peer
        self._loss_grace_s = loss_grace_s
        self._on_lost = on_lost
        self._on_found = on_found
        self._lock = threading.Lock()
        self._connections: dict[Inbound, threading.Thread] = {}
        self._callers: dict[Caller, Counter[bytes]] = {}  # connections by session
        self._gone: dict[Caller, object] = {}  # whose last connection broke, until it is back or reported
        self._listeners: list[tuple[Door, socket.socket, threading.Thread]] = []
        self._closing = False

    def listen(self, door: Door, transports: Mapping[str, Transport]) -> socket.socket:
        """Accept connections of the transports from now on; returns the listening socket, which stays the server's."""
        listener = door.listen(_BACKLOG)
        thread = threading.Thread(
            target=self._accept,
            args=(door, listener, transports),
            name=f"{self._owner.node_id}-{door.name}",
            daemon=True,
        )
        self._listeners.append((door, listener, thread))
        thread.start()
        return listener

    def connections(self) -> int:
        """Inbound connections open now."""
        with self._lock:
            return len(self._connections)

    def close(self) -> None:
        """Stop listening, cut every connection and wait for the threads."""
        with self._lock:
            self._closing = True
            connections = dict(self._connections)
        for door, listener, thread in self._listeners:
            # Closing alone would leave the thread in accept.
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            listener.close()
            door.unlisten()
        for connection in connections:
            connection.cut()
        for thread in connections.values():
            if thread is not threading.current_thread():
                thread.join()

    def admit(self, hello: Hello) -> bool:
        """Whether the caller may have this connection too; one that takes an earlier one's place always may."""
        caller = (hello.node_id, hello.incarnation)
        with self._lock:
            streams = self._callers.get(caller, Counter())
            if hello.session not in streams and len(streams) >= self._max_of_peer:
                return False
            streams[hello.session] += 1
            self._callers[caller] = streams
            self._gone.pop(caller, None)
        return True

    def greeted(self, hello: Hello) -> None:
        self._on_found(hello.node_id, hello.incarnation)

    def ended(self, connection: Inbound, hello: Hello | None, *, in_peace: bool) -> None:
        with self._lock:
            self._connections.pop(connection, None)
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
            if in_peace or self._closing:
                return
            absence = self._gone[caller] = object()
        self._clock.set(self._loss_grace_s, lambda: self._report_lost(caller, absence))

    def _report_lost(self, caller: Caller, absence: object) -> None:
        with self._lock:
            # It may be away again, and was there meanwhile: that is another absence.
            if self._gone.get(caller) is not absence or self._closing:
                return
            del self._gone[caller]
        self._on_lost(*caller)

    def _accept(self, door: Door, listener: socket.socket, transports: Mapping[str, Transport]) -> None:
        while True:
            try:
                sock, address = listener.accept()
            except OSError as error:
                with self._lock:
                    if self._closing:
                        return
                # Out of descriptors, or a caller that left at once: neither ends the service.
                _log.warning("accepting a %s connection failed: %s", door.name, str(error))
                threading.Event().wait(0.05)
                continue
            name = f"{address[0]}:{address[1]}" if isinstance(address, tuple) else "a process of this host"
            try:
                self._begin(transports, door.welcome(sock, name))
            except Exception:  # whatever it is about one connection, the next is accepted
                _log.exception("cannot serve a connection from %s", name)
                sock.close()

    def _begin(self, transports: Mapping[str, Transport], link: Link) -> None:
        connection = Inbound(self._owner, self, transports, link)
        thread = threading.Thread(target=connection.run, name=f"{self._owner.node_id}-inbound", daemon=True)
        with self._lock:
            gives_way = None
            if len(self._connections) >= self._max_connections:
                # Whoever knocks and says nothing must not keep out those who greet.
                gives_way = next((one for one in self._connections if one.may_give_way), None)
            has_room = len(self._connections) < self._max_connections or gives_way is not None
            refusal = f"{self._max_connections} connections are open, which is the limit of all peers"
            if has_room and not self._closing:
                refusal = self._start(connection, thread)
        if gives_way is not None:
            self._owner.counters.add("connections_turned_away")
            gives_way.cut()
        if refusal:
            self._turn_away(link, refusal)

    def _start(self, connection: Inbound, thread: threading.Thread) -> str:
        """Empty, or why not. With the lock held."""
        self._connections[connection] = thread
        try:
            thread.start()
        except RuntimeError as error:
            del self._connections[connection]
            return f"the system gives this process no thread for it: {error}"
        return ""

    def _turn_away(self, link: Link, reason: str) -> None:
        self._owner.counters.add("connections_turned_away")
        _log.warning("turned away a connection from %s: %s", link.address, reason)
        try:
            link.set_timeout(0.1)
            link.send(Reject("full", reason))
        except OSError:
            pass
        link.close()
