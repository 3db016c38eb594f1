"""Sessions: the owner's state of each caller's stream, which lets the stream continue after its connection broke.

A caller numbers its requests. After losing its connection it connects again under the same session and repeats the
requests that were not acknowledged; by their numbers the owner recognises those it has executed, and does not repeat
them.

A Session is used by one connection at a time, without a lock: `SessionTable.attach` hands it over once the thread of
the earlier connection has ended. The table's lock guards only the table and each session's list of connections.
"""

import threading
from collections import OrderedDict
from typing import Protocol

MAX_IDLE_SESSIONS = 1024
MAX_REFUSALS = 256


class Connection(Protocol):
    """Connection that serves a session."""

    def cut(self) -> None: ...
    def wait_ended(self, timeout_s: float) -> bool: ...


class Session:
    """State of one stream; used by one connection at a time."""

    def __init__(self) -> None:
        self.connections: list[Connection] = []
        """Connections that have not ended; all but the newest are cut."""
        self.last_seq = 0
        """Number of the last write or notify that is done; refused ones count as done."""
        self.highest_refused = 0
        """The highest number of an operation that was refused."""
        self._refused_operations: OrderedDict[int, None] = OrderedDict()
        self._refusals: OrderedDict[int, str] = OrderedDict()

    def refuse(self, seq: int, reason: str) -> None:
        """Keep the refusal, to repeat it if the answer is lost."""
        self._refusals[seq] = reason
        if len(self._refusals) > MAX_REFUSALS:
            self._refusals.popitem(last=False)

    def refuse_operation(self, operation: int) -> None:
        """Record that a part was refused: the operation's other parts and its notify must be refused as well."""
        # Parts of operations of other priorities may arrive in between, and may be refused too.
        self._refused_operations[operation] = None
        self._refused_operations.move_to_end(operation)
        self.highest_refused = max(self.highest_refused, operation)
        if len(self._refused_operations) > MAX_REFUSALS:
            self._refused_operations.popitem(last=False)

    def has_refused(self, operation: int) -> bool:
        """Return True if a part of the operation was refused."""
        return operation in self._refused_operations

    def refusal(self, seq: int) -> str | None:
        """Return the reason for which a request that is done was refused; None if it was not."""
        return self._refusals.get(seq)


class SessionTable:
    """Sessions by name, at most `MAX_IDLE_SESSIONS` without a connection."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: OrderedDict[bytes, Session] = OrderedDict()

    def attach(self, name: bytes, connection: Connection, timeout_s: float) -> Session | None:
        """Cut the session's earlier connections and return it once they have ended; None if that takes too long."""
        with self._lock:
            session = self._sessions.setdefault(name, Session())
            self._sessions.move_to_end(name)
            earlier = list(session.connections)
            session.connections.append(connection)
            self._evict_idle()
        for one in earlier:
            one.cut()
        if all(one.wait_ended(timeout_s) for one in earlier):
            return session
        return None

    def detach(self, name: bytes, connection: Connection, *, forget: bool) -> None:
        """Record that the connection ended; `forget` the session if the caller sent Goodbye."""
        with self._lock:
            session = self._sessions.get(name)
            if session is not None and connection in session.connections:
                session.connections.remove(connection)
                if forget and not session.connections:
                    del self._sessions[name]

    def _evict_idle(self) -> None:
        excess = len(self._sessions) - MAX_IDLE_SESSIONS
        if excess > 0:
            idle = [name for name, session in self._sessions.items() if not session.connections]
            for name in idle[:excess]:
                del self._sessions[name]
