"""One accepted connection: greeting, then requests executed one by one, in order, on a thread of its own.

Everything a peer sends is checked before it has an effect. A greeting must name this node and its incarnation, a random
number that peers get from the control plane; the answer to any other greeting describes nothing of this node
(`messenger.frames.REJECTIONS`). Bytes that are not a frame of this protocol end this connection, with a logged reason,
and touch nothing else. This module defines the behaviour; a transport's compiled loop
(`messenger.native.responder_loop`) executes well-formed requests in the same way, and leaves all others to it.

All state belongs to the connection's thread, except the link: `_cut_lock` guards its replacement in `_adopt` against
`cut`, which any thread may call. Memory is touched only inside an access of the grant table; the last access is left
before `_ended` is set, and then the session may be used by the next connection.
"""

import hmac
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from messenger.counters import NUM_SUMS, Counters, Direction, FloatSums, Flow
from messenger.errors import EncryptionRefused, ProtocolError
from messenger.frames import (
    MAX_SESSION_NBYTES,
    REJECTIONS,
    Ack,
    ConnectionReject,
    Goodbye,
    Hello,
    KeyQuery,
    Message,
    Notify,
    Offer,
    Read,
    Refused,
    Welcome,
    Write,
    is_node_id,
)
from messenger.grants import Access, AccessDenied, GrantTable
from messenger.link import Link, LinkClosed
from messenger.sessions import Session, SessionTable
from messenger.slices import Rows
from messenger.transport import Responder, Transport
from telemetry.limited_log import LimitedLog

if TYPE_CHECKING:
    from messenger.native.responder_loop import CompiledLoop

_log = logging.getLogger(__name__)


class AcceptingServer(Protocol):
    """The server that accepted a connection, as the connection sees it."""

    def admit(self, hello: Hello) -> bool: ...
    def greeted(self, connection: "InboundConnection", hello: Hello) -> None: ...
    def ended(self, connection: "InboundConnection", hello: Hello | None, *, said_goodbye: bool) -> None: ...


@dataclass(frozen=True)
class ServerContext:
    """Identity and tables of a messenger, shared by all its inbound connections.

    `deliver(node_id, tag, payload)` calls the notification handlers.
    """

    node_id: str
    incarnation: int
    handshake_timeout_s: float
    grants: GrantTable
    sessions: SessionTable
    counters: Counters
    deliver: Callable[[str, bytes, bytes], None]
    incidents: LimitedLog = field(default_factory=lambda: LimitedLog(_log))
    """Log of what callers do wrong."""


class InboundConnection:
    """A connection that a peer made to this messenger."""

    def __init__(
        self,
        context: ServerContext,
        server: AcceptingServer,
        transports: Mapping[str, Transport],
        link: Link,
        *,
        acceptor: str,
        origin: str,
    ) -> None:
        """`acceptor`: name of the listening socket's acceptor; `origin`: the caller's IP address, "" on this host."""
        self.acceptor = acceptor
        self.origin = origin
        self._context = context
        self._server = server
        self._transports = transports
        self._link = link
        self._cut_lock = threading.Lock()
        self._was_cut = False
        self._was_evicted = False
        self._has_entered = False
        self._loop: CompiledLoop | None = None
        self._transport: Transport
        self._responder: Responder
        self._landed: Flow
        self._served: Flow
        self._ended = threading.Event()
        self._hello: Hello | None = None

    @property
    def has_presented_key(self) -> bool:
        """True if the caller has used a valid key on this connection. Any thread."""
        return self._has_entered or (self._loop is not None and self._loop.has_entered)

    @property
    def was_cut(self) -> bool:
        """True if the connection has ended, or is about to."""
        return self._was_cut

    @property
    def was_evicted(self) -> bool:
        """True if this side ended the connection by `evict`: that does not mean that its caller is lost."""
        return self._was_evicted

    def evict(self) -> None:
        """Cut the link to make room for another caller, or because this one presents no key."""
        self._was_evicted = True
        self.cut()

    def cut(self) -> None:
        """Cut the link; the connection's thread stops touching memory and ends soon after."""
        with self._cut_lock:
            self._was_cut = True
            self._link.cut()

    def wait_ended(self, timeout_s: float) -> bool:
        """Wait until the thread has released everything. Returns False if that takes longer than `timeout_s`."""
        return self._ended.wait(timeout_s)

    def run(self) -> None:
        """Serve the connection until the peer leaves, violates the protocol, or is cut; the thread's main function."""
        said_goodbye = False
        try:
            session = self._greet()
            if session is not None:
                said_goodbye = self._serve(session)
        except EncryptionRefused as error:
            self._context.counters.add("tls_refused")
            self._context.incidents.warning(self.origin, "refused a connection: %s", str(error))
            self._reject("tls")
        except ProtocolError as error:
            self._context.counters.add("malformed_frames")
            self._context.incidents.warning(
                self._name, "closed the connection from %s: %s", self._link.address, str(error)
            )
            self._reject("malformed", "" if self._hello is None else str(error))
        except OSError as error:
            _log.debug("the connection from %s ended: %s", self._link.address, str(error))
        except Exception:
            _log.exception("closed the connection from %s", self._link.address)
        finally:
            self._link.cut()
            self._ended.set()
            if self._hello is not None:
                self._context.sessions.detach(self._hello.session, self, forget=said_goodbye)
            self._link.close()
            self._server.ended(self, self._hello, said_goodbye=said_goodbye)

    def _greet(self) -> Session | None:
        context = self._context
        self._link.set_timeout(context.handshake_timeout_s)
        self._link.open()
        hello = self._link.receive()
        if not isinstance(hello, Hello):
            raise ProtocolError(f"a connection must begin with Hello, got {type(hello).__name__}")
        # Both are kept long after the connection, so their size is bounded.
        if not is_node_id(hello.node_id) or len(hello.session) > MAX_SESSION_NBYTES:
            raise ProtocolError("the greeting has an invalid node id, or a session that is too long")
        if not self._is_addressed(hello):
            context.counters.add("stale_greetings")
            self._context.incidents.warning(
                self.origin,
                "rejected a connection from %s, which greets node %.64r of incarnation %#x",
                self._link.address,
                hello.peer_node_id,
                hello.peer_incarnation,
            )
            self._reject("restarted")
            return None
        transport = self._transports.get(hello.transport)
        if transport is None:
            self._reject(
                "transport", f"transport {hello.transport!r} is not accepted here, only {', '.join(self._transports)}"
            )
            return None
        if not self._server.admit(hello):
            context.counters.add("connections_turned_away")
            reason = f"{hello.node_id} has as many connections here as max_connections_per_peer allows"
            self._context.incidents.warning(
                hello.node_id, "rejected a connection from %s: %s", self._link.address, reason
            )
            self._reject("full", reason)
            return None
        self._hello = hello
        session = context.sessions.attach(hello.session, self, context.handshake_timeout_s)
        if session is None:
            self._reject("busy", "the stream's earlier connection has not ended yet")
            return None
        self._link.address = f"{hello.node_id} at {self._link.address}"
        self._server.greeted(self, hello)
        self._link.send(Welcome(context.node_id, context.incarnation))
        self._adopt(transport)
        self._link.set_timeout(None)
        return session

    def _is_addressed(self, hello: Hello) -> bool:
        """Return True if the greeting is for this process. Takes the same time for every wrong incarnation."""
        if not 0 <= hello.peer_incarnation < 1 << 64:
            raise ProtocolError("an incarnation must be an unsigned 64-bit number")
        given, own = (number.to_bytes(8, "big") for number in (hello.peer_incarnation, self._context.incarnation))
        return hmac.compare_digest(given, own) and hello.peer_node_id == self._context.node_id

    @property
    def _name(self) -> str:
        """Name of the caller in the limited log."""
        return self.origin if self._hello is None else self._hello.node_id

    def _adopt(self, transport: Transport) -> None:
        link = transport.adopt(self._link, caller=False)
        with self._cut_lock:
            self._link = link
            if self._was_cut:
                link.cut()
        self._transport = transport
        self._responder = transport.responder(link)

    def _serve(self, session: Session) -> bool:
        """Serve requests until the connection ends. Returns True if the peer sent Goodbye."""
        landed, served = np.zeros(NUM_SUMS), np.zeros(NUM_SUMS)
        loop = self._responder.compiled_loop(self._context.grants, self, landed, served)
        if loop is None:
            self._landed, self._served = self._flow("landed"), self._flow("served")
            return self._take_requests(session)
        self._loop = loop
        self._landed, self._served = self._flow("landed", landed), self._flow("served", served)
        try:
            return self._take_requests(session, loop)
        finally:
            loop.close()

    def _take_requests(self, session: Session, loop: "CompiledLoop | None" = None) -> bool:
        while True:
            note = loop.run(session) if loop is not None else None
            if note is not None:
                self._raise_if_caller_gone()
                session.last_seq = note.seq
                self._deliver(note.tag, note.payload)
                continue  # the loop sends the answer
            message = self._link.receive()
            if isinstance(message, Goodbye):
                return True
            self._handle(session, message)

    def _handle(self, session: Session, message: Message) -> None:
        if isinstance(message, Write):
            self._write(session, message)
        elif isinstance(message, Notify):
            self._notify(session, message)
        elif isinstance(message, Read):
            self._read(message)
        elif isinstance(message, Offer):
            self._responder.offered(message)
        elif isinstance(message, KeyQuery):
            self._query_key(session, message)
        else:
            raise ProtocolError(f"{type(message).__name__} is not a request")

    def _write(self, session: Session, message: Write) -> None:
        rows = self._responder.target_rows(message)
        if message.seq <= session.last_seq:
            self._responder.skip(message)
            self._repeat_answer(session, message.seq, message.nbytes)
            return
        try:
            if session.has_refused(message.operation):
                raise AccessDenied("an earlier part of the operation was refused")
            access = self._enter(message.region_id, message.token, rows, write=True)
        except AccessDenied as error:
            self._responder.skip(message)
            session.refuse_operation(message.operation)
            session.refuse(message.seq, str(error))
            session.last_seq = message.seq
            self._refuse(message.seq, str(error))
            return
        begun_s = time.monotonic()
        with access:
            self._raise_if_caller_gone()
            with access.writing(rows):
                self._responder.land(message, rows, access.region)
        self._landed.add(message.nbytes, len(rows), time.monotonic() - begun_s)
        self._raise_if_caller_gone()
        session.last_seq = message.seq
        if message.notify:
            self._deliver(message.tag, message.payload)
        self._link.send(Ack(message.seq, message.nbytes))

    def _notify(self, session: Session, message: Notify) -> None:
        if message.seq <= session.last_seq:
            self._repeat_answer(session, message.seq, 0)
            return
        self._raise_if_caller_gone()
        session.last_seq = message.seq
        self._deliver(message.tag, message.payload)
        self._link.send(Ack(message.seq, 0))

    def _read(self, message: Read) -> None:
        rows = self._responder.source_rows(message)
        try:
            access = self._enter(message.region_id, message.token, rows, write=False)
        except AccessDenied as error:
            self._refuse(message.seq, str(error))
            return
        begun_s = time.monotonic()
        with access:
            self._responder.serve(message, rows, access.region)
        self._served.add(message.nbytes, len(rows), time.monotonic() - begun_s)

    def _flow(self, direction: Direction, sums: FloatSums | None = None) -> Flow:
        assert self._hello is not None
        return self._context.counters.flow(
            peer=self._hello.node_id, transport=self._transport.name, direction=direction, sums=sums
        )

    def _query_key(self, session: Session, query: KeyQuery) -> None:
        try:
            access = self._context.grants.expose(query.region_id, query.token, mover=self)
        except AccessDenied:
            self._responder.key_void(query, session.last_seq)
            return
        self._has_entered = True
        with access:
            self._responder.key_queried(query, access, session.last_seq)

    def _enter(self, region_id: int, token: int, rows: Rows, *, write: bool) -> Access:
        reaches_gpus = self._responder.reaches_gpus
        access = self._context.grants.enter(region_id, token, rows, write=write, mover=self, reaches_gpus=reaches_gpus)
        self._has_entered = True
        return access

    def _deliver(self, tag: bytes, payload: bytes) -> None:
        assert self._hello is not None
        self._context.counters.add("notifies_delivered")
        self._context.deliver(self._hello.node_id, tag, payload)

    def _raise_if_caller_gone(self) -> None:
        """Raise LinkClosed if the caller has cut the link: after its deadline its requests must not take effect."""
        if self._link.peer_is_gone():
            raise LinkClosed("the caller cut the connection")

    def _repeat_answer(self, session: Session, seq: int, nbytes: int) -> None:
        refusal = session.refusal(seq)
        self._link.send(Ack(seq, nbytes) if refusal is None else Refused(seq, refusal))

    def _refuse(self, seq: int, reason: str) -> None:
        self._context.counters.add("accesses_denied")
        self._link.send(Refused(seq, reason))

    def _reject(self, code: str, reason: str = "") -> None:
        """Send the reason; details only to a caller that has named this process."""
        try:
            self._link.set_timeout(1.0)
            self._link.send(ConnectionReject(code, reason or REJECTIONS[code]))
        except OSError:
            pass
