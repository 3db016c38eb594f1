"""What the owner remembers of each caller's stream, so that a stream whose connection broke goes on where it was.

A caller numbers its requests. After a loss it connects again under the same session and repeats what was not
acknowledged; the owner tells from the number what it has done already, and does it once.
"""

import threading
from collections import OrderedDict
from typing import Protocol

MAX_IDLE_SESSIONS = 1024
MAX_REFUSALS = 256


class Connection(Protocol):
    """A connection that serves a session."""

    def cut(self) -> None: ...
    def wait_ended(self, timeout_s: float) -> bool: ...


class Session:
    """Used by one connection at a time."""

    def __init__(self) -> None:
        self.connections: list[Connection] = []
        """Not ended yet; all but the newest are cut."""
        self.last_seq = 0
        """The highest write or notify that is done; refused ones count as done."""
        self.highest_refused = 0
        """No operation of a higher number has been refused."""
        self._refused_operations: OrderedDict[int, None] = OrderedDict()
        self._refusals: OrderedDict[int, str] = OrderedDict()

    def refuse(self, seq: int, reason: str) -> None:
        """Remember the refusal, in case its answer is lost."""
        self._refusals[seq] = reason
        if len(self._refusals) > MAX_REFUSALS:
            self._refusals.popitem(last=False)

    def refuse_operation(self, operation: int) -> None:
        """A part was refused: the operation's other parts, and its notify, are to be refused as well."""
        # Parts of operations of other priorities come in between, and may be refused, too.
        self._refused_operations[operation] = None
        self._refused_operations.move_to_end(operation)
        self.highest_refused = max(self.highest_refused, operation)
        if len(self._refused_operations) > MAX_REFUSALS:
            self._refused_operations.popitem(last=False)

    def has_refused(self, operation: int) -> bool:
        """Whether a part of the operation was refused."""
        return operation in self._refused_operations

    def refusal(self, seq: int) -> str | None:
        """Why a request that is done was refused; None when it was not."""
        return self._refusals.get(seq)


class SessionTable:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: OrderedDict[bytes, Session] = OrderedDict()

    def attach(self, name: bytes, connection: Connection, timeout_s: float) -> Session | None:
        """The session, once its earlier connections have ended (they are cut); None when that takes too long."""
        with self._lock:
            session = self._sessions.setdefault(name, Session())
            self._sessions.move_to_end(name)
            earlier = list(session.connections)
            session.connections.append(connection)
            self._forget_idle()
        for one in earlier:
            one.cut()
        if all(one.wait_ended(timeout_s) for one in earlier):
            return session
        return None

    def detach(self, name: bytes, connection: Connection, *, forget: bool) -> None:
        """The connection ended; `forget` when the caller said goodbye."""
        with self._lock:
            session = self._sessions.get(name)
            if session is not None and connection in session.connections:
                session.connections.remove(connection)
                if forget and not session.connections:
                    del self._sessions[name]

    def _forget_idle(self) -> None:
        excess = len(self._sessions) - MAX_IDLE_SESSIONS
        if excess > 0:
            idle = [name for name, session in self._sessions.items() if not session.connections]
            for name in idle[:excess]:
                del self._sessions[name]
