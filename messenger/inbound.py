"""One accepted connection: greeting, then requests done one by one, in order, on a thread of its own.

Everything a peer sends is checked before it has an effect. Bytes that are no frame of this protocol end this
connection, with a logged reason, and touch nothing else.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from messenger.counters import NUM_SUMS, Counters, Direction, Flow
from messenger.errors import EncryptionRefused, ProtocolError
from messenger.frames import (
    MAX_SESSION_NBYTES,
    Ack,
    Ask,
    Goodbye,
    Hello,
    Message,
    Notify,
    Offer,
    Read,
    Refused,
    Reject,
    Welcome,
    Write,
    is_node_id,
)
from messenger.grants import Access, AccessDenied, GrantTable
from messenger.link import Link, LinkClosed
from messenger.sessions import Session, SessionTable
from messenger.slices import Rows
from messenger.transport import FloatSums, Responder, Transport

if TYPE_CHECKING:
    from messenger.native.fast_lane import FastLane

_log = logging.getLogger(__name__)


class Host(Protocol):
    """What a connection needs of the server that accepted it."""

    def admit(self, hello: Hello) -> bool: ...
    def greeted(self, hello: Hello) -> None: ...
    def ended(self, connection: "Inbound", hello: Hello | None, *, in_peace: bool) -> None: ...


@dataclass(frozen=True)
class Owner:
    """The messenger's side that all its inbound connections share."""

    node_id: str
    incarnation: int
    handshake_timeout_s: float
    grants: GrantTable
    sessions: SessionTable
    counters: Counters
    deliver: Callable[[str, bytes, bytes], None]


class Inbound:
    def __init__(self, owner: Owner, host: Host, transports: Mapping[str, Transport], link: Link) -> None:
        self._owner = owner
        self._host = host
        self._transports = transports
        self._link = link
        self._cutting = threading.Lock()
        self._was_cut = False
        self._transport: Transport
        self._responder: Responder
        self._landed: Flow
        self._served: Flow
        self._ended = threading.Event()
        self._hello: Hello | None = None

    @property
    def may_give_way(self) -> bool:
        """Whether the caller has not said who it is yet, and was not cut off for it."""
        return self._hello is None and not self._was_cut

    def cut(self) -> None:
        """End the connection; its thread stops touching memory and ends soon after."""
        with self._cutting:
            self._was_cut = True
            self._link.cut()

    def wait_ended(self, timeout_s: float) -> bool:
        """Whether the thread has let go of everything."""
        return self._ended.wait(timeout_s)

    def run(self) -> None:
        """The thread: until the peer leaves, breaks the protocol, or is cut."""
        in_peace = False
        try:
            session = self._greet()
            if session is not None:
                in_peace = self._serve(session)
        except EncryptionRefused as error:
            self._owner.counters.add("tls_refused")
            _log.warning("refused a connection: %s", str(error))
            self._reject("tls", str(error))
        except ProtocolError as error:
            self._owner.counters.add("malformed_frames")
            _log.warning("closed the connection from %s: %s", self._link.address, str(error))
            self._reject("malformed", str(error))
        except OSError as error:
            _log.debug("the connection from %s ended: %s", self._link.address, str(error))
        except Exception:
            _log.exception("closed the connection from %s", self._link.address)
        finally:
            self._link.cut()
            self._ended.set()
            if self._hello is not None:
                self._owner.sessions.detach(self._hello.session, self, forget=in_peace)
            self._link.close()
            self._host.ended(self, self._hello, in_peace=in_peace)

    def _greet(self) -> Session | None:
        owner = self._owner
        self._link.set_timeout(owner.handshake_timeout_s)
        self._link.open()
        hello = self._link.receive()
        if not isinstance(hello, Hello):
            raise ProtocolError(f"a connection begins with Hello, not {type(hello).__name__}")
        # Both are kept long after the connection.
        if not is_node_id(hello.node_id) or len(hello.session) > MAX_SESSION_NBYTES:
            raise ProtocolError("a greeting with a node id or a session that no messenger has")
        if (hello.peer_node_id, hello.peer_incarnation) != (owner.node_id, owner.incarnation):
            owner.counters.add("stale_greetings")
            reason = (
                f"node {owner.node_id!r} of incarnation {owner.incarnation:#x} listens here, not "
                f"{hello.peer_node_id!r} of {hello.peer_incarnation:#x}: ask for the new endpoint"
            )
            self._reject("restarted", reason)
            return None
        transport = self._transports.get(hello.transport)
        if transport is None:
            self._reject("transport", f"{hello.transport!r} is not spoken here, only {', '.join(self._transports)}")
            return None
        if not self._host.admit(hello):
            owner.counters.add("connections_turned_away")
            reason = f"{hello.node_id} has as many connections here as max_connections_per_peer allows"
            _log.warning("turned away a connection from %s: %s", self._link.address, reason)
            self._reject("full", reason)
            return None
        self._hello = hello
        session = owner.sessions.attach(hello.session, self, owner.handshake_timeout_s)
        if session is None:
            self._reject("busy", "the stream's earlier connection has not ended yet")
            return None
        self._link.address = f"{hello.node_id} at {self._link.address}"
        self._host.greeted(hello)
        self._link.send(Welcome(owner.node_id, owner.incarnation))
        self._adopt(transport)
        self._link.set_timeout(None)
        return session

    def _adopt(self, transport: Transport) -> None:
        link = transport.adopt(self._link, caller=False)
        with self._cutting:
            self._link = link
            if self._was_cut:
                link.cut()
        self._transport = transport
        self._responder = transport.responder(link)

    def _serve(self, session: Session) -> bool:
        """True when the peer said goodbye."""
        landed, served = np.zeros(NUM_SUMS), np.zeros(NUM_SUMS)
        lane = self._responder.fast_lane(self._owner.grants, self, landed, served)
        if lane is None:
            self._landed, self._served = self._flow("landed"), self._flow("served")
            return self._take_all(session)
        self._landed, self._served = self._flow("landed", landed), self._flow("served", served)
        try:
            return self._take_all(session, lane)
        finally:
            lane.close()

    def _take_all(self, session: Session, lane: "FastLane | None" = None) -> bool:
        while True:
            note = lane.run(session) if lane is not None else None
            if note is not None:
                self._still_wanted()
                session.last_seq = note.seq
                self._deliver(note.tag, note.payload)
                continue  # the lane answers
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
        elif isinstance(message, Ask):
            self._ask(session, message)
        else:
            raise ProtocolError(f"a caller does not send {type(message).__name__}")

    def _write(self, session: Session, message: Write) -> None:
        rows = self._responder.target_rows(message)
        if message.seq <= session.last_seq:
            self._responder.skip(message)
            self._answer_again(session, message.seq, message.nbytes)
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
            self._still_wanted()
            self._responder.land(message, rows, access.region)
        self._landed.add(message.nbytes, len(rows), time.monotonic() - begun_s)
        self._still_wanted()
        session.last_seq = message.seq
        if message.notify:
            self._deliver(message.tag, message.payload)
        self._link.send(Ack(message.seq, message.nbytes))

    def _notify(self, session: Session, message: Notify) -> None:
        if message.seq <= session.last_seq:
            self._answer_again(session, message.seq, 0)
            return
        self._still_wanted()
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
        return self._owner.counters.flow(
            peer=self._hello.node_id, transport=self._transport.name, direction=direction, sums=sums
        )

    def _ask(self, session: Session, ask: Ask) -> None:
        try:
            access = self._owner.grants.expose(ask.region_id, ask.token, mover=self)
        except AccessDenied:
            self._responder.denied(ask, session.last_seq)
            return
        with access:
            self._responder.asked(ask, access, session.last_seq)

    def _enter(self, region_id: int, token: int, rows: Rows, *, write: bool) -> Access:
        reaches_gpus = self._responder.reaches_gpus
        return self._owner.grants.enter(region_id, token, rows, write=write, mover=self, reaches_gpus=reaches_gpus)

    def _deliver(self, tag: bytes, payload: bytes) -> None:
        assert self._hello is not None
        self._owner.counters.add("notifies_delivered")
        self._owner.deliver(self._hello.node_id, tag, payload)

    def _still_wanted(self) -> None:
        """A caller whose deadline passed cuts the link: what it sent before must not take effect any more."""
        if self._link.peer_is_gone():
            raise LinkClosed("the caller cut the connection")

    def _answer_again(self, session: Session, seq: int, nbytes: int) -> None:
        refusal = session.refusal(seq)
        self._link.send(Ack(seq, nbytes) if refusal is None else Refused(seq, refusal))

    def _refuse(self, seq: int, reason: str) -> None:
        self._owner.counters.add("accesses_denied")
        self._link.send(Refused(seq, reason))

    def _reject(self, code: str, reason: str) -> None:
        try:
            self._link.set_timeout(1.0)
            self._link.send(Reject(code, reason))
        except OSError:
            pass
