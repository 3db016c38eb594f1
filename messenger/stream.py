"""One ordered stream of requests to a peer: queue, sending thread, receiving thread, retries and deadlines.

Order: requests are sent, done and acknowledged in the order of submission. A connection that breaks is made again and
what was not acknowledged is repeated under the same numbers, which the owner recognises; a peer whose process is gone
fails everything at once.

Deadlines: an operation that is still queued simply leaves the queue. One that is on the wire has its connection cut
first, and its future fails only when both threads have let go of it: from then on no byte of its local memory is read
or written. In the owner's memory, bytes that were under way may still land until it revokes the key (its own fence)
or notices the cut, which it does before it delivers a notify. Other requests of the stream are repeated.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable

from messenger.alarms import AlarmClock
from messenger.counters import Counters
from messenger.dialing import Dialer, Restarted, Unreachable
from messenger.errors import (
    MessengerClosed,
    PeerLost,
    PeerRestarted,
    PeerUnreachable,
    ProtocolError,
    RemoteAccessError,
    TransferDeadlineExceeded,
    TransferError,
)
from messenger.frames import Ack, Allow, Goodbye, Offer, Refused
from messenger.link import Link
from messenger.operation import Kind, Operation, Part, TransferResult
from messenger.outbox import Outbox
from messenger.transport import Requester, Transport

MAX_BARREN_LINKS = 4
_BACKOFF_S = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_PROBES_WHEN_IDLE = 3

_log = logging.getLogger(__name__)


class Stream:
    """`on_lost(reason)` is called when the peer's process is found gone, `on_connected()` when it answers."""

    def __init__(
        self,
        dialer: Dialer,
        clock: AlarmClock,
        counters: Counters,
        *,
        name: str,
        on_lost: Callable[[str], None],
        on_connected: Callable[[], None],
    ) -> None:
        self._dialer = dialer
        self._transport = dialer.transports[0]
        self._clock = clock
        self._counters = counters
        self._name = name
        self._on_lost = on_lost
        self._on_connected = on_connected
        self._changed = threading.Condition()
        self._outbox = Outbox()
        self._link: Link | None = None
        self._link_ended = False
        self._sender: threading.Thread | None = None
        self._receiver: threading.Thread | None = None
        self._closing = False
        self._requester: Requester | None = None
        self._caller_sends = False
        self._answered = False
        self._barren_links = 0
        self._progressed_s = 0.0  # when the peer last acknowledged something, or there was first something to do
        self._cause = "it has not been connected yet"

    def submit(self, operation: Operation, parts: Iterable[Part]) -> None:
        """Queue the operation's parts; its future is settled on a messenger thread.

        On an idle stream the caller sends a single quick part itself, which saves waking the sending thread. Nothing
        is under way then, so the socket has room, and the call does not block.
        """
        operation.future.set_running_or_notify_cancel()
        with self._changed:
            requester = None if self._closing else self._requester
            if self._closing:
                operation.failure = MessengerClosed(f"the messenger was closed before its {operation.kind.value} began")
            else:
                if not self._outbox:
                    self._progressed_s = operation.started_s  # idleness before it is no stall
                self._set_alarm(operation)
                self._outbox.push(parts)
                only = self._outbox.only_queued()
                idle = only is not None and not self._caller_sends and not self._link_ended
                if idle and only is not None and requester is not None and requester.is_quick(only):
                    self._caller_sends = True
                    part = self._outbox.begin()
                else:
                    self._wake_sender()
                    return
        if requester is None:
            self._settle([operation])
            return
        self._send(requester, part)
        with self._changed:
            self._caller_sends = False
            if self._outbox.has_queued or self._link_ended or self._closing:
                self._wake_sender()

    @property
    def transport(self) -> str:
        """Name of the transport last connected by; before that, of the first to be tried."""
        return self._transport.name

    @property
    def _address(self) -> str:
        return self._transport.address_of(self._dialer.endpoint)

    def pending(self) -> int:
        """Requests queued or in flight."""
        with self._changed:
            return len(self._outbox)

    def connected(self) -> bool:
        with self._changed:
            return self._receiver is not None and not self._link_ended

    def idle_and_lost(self) -> bool:
        """Nothing to do and no thread: the stream can be forgotten."""
        with self._changed:
            return self._sender is None and not self._outbox

    def close(self) -> None:
        """Fail what is pending with MessengerClosed, say goodbye, end the threads."""
        with self._changed:
            self._closing = True
            failure = MessengerClosed(f"the messenger was closed during an operation towards {self._address}")
            settled = self._outbox.doom_all(lambda _: failure)
            if self._link is not None and (self._outbox.has_in_flight or self._receiver is None):
                self._link.cut()
            self._changed.notify_all()
            sender, receiver = self._sender, self._receiver
        self._settle(settled)
        # A future's callback may close the messenger: it runs on one of these threads, which ends after it.
        if sender is not None and threading.current_thread() not in (sender, receiver):
            sender.join()

    def _wake_sender(self) -> None:
        if self._sender is None:
            self._sender = threading.Thread(target=self._run, name=f"{self._name}-send", daemon=True)
            self._sender.start()
        self._changed.notify_all()

    # The sending thread: it alone connects, sends, and cleans up after a lost connection.

    def _run(self) -> None:
        requester: Requester | None = None
        while True:
            if requester is None:
                requester = self._connect()
                if requester is None:
                    with self._changed:
                        if self._closing or not self._outbox.has_queued:
                            self._sender = None
                            return
                    continue
            part = self._take()
            if part is not None:
                self._send(requester, part)
                continue
            with self._changed:
                said_goodbye = self._closing and not self._link_ended
            if said_goodbye:
                self._say_goodbye()
            self._clean_up()
            requester = None

    def _take(self) -> Part | None:
        """The next part, in flight from now on; None when the link ended or the stream closes."""
        with self._changed:
            while not self._link_ended and not self._closing and (self._caller_sends or not self._outbox.has_queued):
                self._changed.wait()
            if not self._link_ended and not self._closing:
                return self._outbox.begin()
            # The link is cut in either case if the caller's part is under way.
            self._changed.wait_for(lambda: not self._caller_sends)
        return None

    def _send(self, requester: Requester, part: Part) -> None:
        part.attempts += 1
        if part.attempts > 1:
            self._counters.add("retries")
        try:
            requester.send(part)
        except OSError as error:
            self._end_link(error)
        except Exception as error:
            _log.exception("sending to %s failed", self._address)
            self._end_link(error)

    def _connect(self) -> Requester | None:
        """A fresh connection; None when the stream closes, or the peer is lost and everything queued has failed."""
        failures = 0
        while not self._given_up(failures):
            try:
                transport, link, requester = self._dialer.dial(self._opened)
            except Unreachable as error:
                self._lose(PeerUnreachable, str(error))
                return None
            except Restarted as error:
                self._lose(PeerRestarted, str(error))
                return None
            except OSError as error:
                self._counters.add("failed_connects")
                with self._changed:
                    self._link = None
                    self._cause = f"cannot connect: {error}"
                    self._changed.wait_for(lambda: self._closing, _BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)])
                failures += 1
                continue
            self._begin_receiving(transport, link, requester)
            return requester
        return None

    def _given_up(self, failures: int) -> bool:
        with self._changed:
            if self._closing:
                return True
            if self._outbox.has_queued or failures < _PROBES_WHEN_IDLE:
                return False
        # Nobody waits for an answer, but whoever relies on this peer wants to know that it does not answer.
        self._lose(PeerUnreachable, self._cause)
        return True

    def _begin_receiving(self, transport: Transport, link: Link, requester: Requester) -> None:
        receiver = threading.Thread(
            target=self._receive, args=(link, requester), name=f"{self._name}-receive", daemon=True
        )
        with self._changed:
            self._transport = transport
            self._receiver = receiver
            self._requester = requester
            self._link_ended = self._answered = False
        self._counters.add("connects")
        receiver.start()
        self._on_connected()

    def _opened(self, link: Link) -> None:
        with self._changed:
            self._link = link
            if self._closing:
                link.cut()

    def _say_goodbye(self) -> None:
        link = self._link
        if link is not None:
            try:
                link.send(Goodbye())
            except OSError:
                pass

    def _clean_up(self) -> None:
        """Both threads have let go of the parts in flight after this: settle the doomed, queue the others again."""
        link, receiver = self._link, self._receiver
        assert link is not None
        assert receiver is not None
        link.cut()
        receiver.join()
        with self._changed:
            link.close(reset=self._outbox.has_in_flight)
            self._link = self._receiver = self._requester = None
            self._link_ended = False
            self._blame_oldest()
            settled = self._outbox.connection_lost()
        self._settle(settled)

    def _blame_oldest(self) -> None:
        """A request over which connection after connection breaks must not hold up the others for ever."""
        oldest = self._outbox.oldest_in_flight()
        if oldest is None or self._answered:
            self._barren_links = 0
            return
        self._barren_links += 1
        if self._barren_links >= MAX_BARREN_LINKS:
            self._barren_links = 0
            operation = oldest.operation
            reason = f"{MAX_BARREN_LINKS} connections in a row broke over it, at last because {self._cause}"
            operation.failure = operation.failure or self._error(PeerLost, reason, operation)

    def _lose(self, kind: type[PeerLost], reason: str) -> None:
        self._on_lost(reason)
        with self._changed:
            self._link = None
            self._cause = reason
            settled = self._outbox.doom_all(lambda operation: self._error(kind, reason, operation))
        self._settle(settled)

    # The receiving thread of one link.

    def _receive(self, link: Link, requester: Requester) -> None:
        try:
            while True:
                message = link.receive()
                if isinstance(message, Allow):
                    requester.allowed(message)
                    continue
                if isinstance(message, Offer):
                    requester.offered(message)
                    continue
                part = self._oldest_in_flight()
                if part is None or not isinstance(message, Ack | Refused) or message.seq != part.seq:
                    raise ProtocolError(f"{link.address} answers {type(message).__name__} to what was not asked")
                self._answered = True
                if isinstance(message, Refused):
                    requester.refused(part)
                    self._refused(part, message.reason)
                elif requester.accept(part, message):
                    self._done(part)
                else:
                    self._next_step()
        except OSError as error:
            self._end_link(error)
        except ProtocolError as error:
            _log.warning("closed the connection to %s: %s", link.address, str(error))
            self._counters.add("malformed_frames")
            self._end_link(error)
        except Exception as error:
            _log.exception("receiving from %s failed", link.address)
            self._end_link(error)

    def _oldest_in_flight(self) -> Part | None:
        with self._changed:
            return self._outbox.oldest_in_flight()

    def _done(self, part: Part) -> None:
        with self._changed:
            self._progressed_s = time.monotonic()
            settled = self._outbox.done()
        self._count(part)
        self._settle(settled)

    def _next_step(self) -> None:
        with self._changed:
            self._progressed_s = time.monotonic()
            settled = self._outbox.next_step()
            self._changed.notify_all()
        self._settle(settled)

    def _refused(self, part: Part, reason: str) -> None:
        operation = part.operation
        self._counters.add("refused")
        with self._changed:
            settled = self._outbox.refused(self._error(RemoteAccessError, reason, operation))
        self._settle(settled)

    def _end_link(self, error: Exception) -> None:
        with self._changed:
            self._link_ended = True
            self._cause = str(error)
            if self._link is not None:
                self._link.cut()
            self._changed.notify_all()

    # Any thread.

    def _set_alarm(self, operation: Operation) -> None:
        """Ring when the operation is, or may be, too late. With the lock held."""
        left_s = operation.started_s + operation.deadline_s - time.monotonic()
        if operation.stall_s is not None:
            left_s = min(left_s, self._stalls_at_s(operation) - time.monotonic())
        operation.alarm = self._clock.set(max(0.0, left_s), lambda: self._expire(operation))

    def _stalls_at_s(self, operation: Operation) -> float:
        assert operation.stall_s is not None
        return max(self._progressed_s, operation.started_s) + operation.stall_s

    def _expire(self, operation: Operation) -> None:
        with self._changed:
            if not operation.outstanding or operation.failure is not None:
                return
            now_s = time.monotonic()
            if now_s >= operation.started_s + operation.deadline_s:
                reason = f"not done within {operation.deadline_s:.3g} s"
            elif operation.stall_s is not None and now_s >= self._stalls_at_s(operation):
                reason = f"nothing was acknowledged for {operation.stall_s:.3g} s"
            else:
                self._set_alarm(operation)  # there was progress
                return
            reason += f"; the connection's last trouble: {self._cause}"
            operation.failure = self._error(TransferDeadlineExceeded, reason, operation)
            self._counters.add("deadlines_exceeded")
            settled = self._outbox.drop_doomed()
            if self._outbox.carries(operation) and self._link is not None:
                self._link.cut()
        self._settle(settled)

    def _settle(self, operations: list[Operation]) -> None:
        """Give the futures their outcome; never with the lock held, since callbacks run here."""
        for operation in operations:
            if operation.alarm is not None:
                self._clock.clear(operation.alarm)
            if operation.failure is not None:
                operation.future.set_exception(operation.failure)
                continue
            if operation.kind is Kind.NOTIFY:
                operation.future.set_result(None)
                continue
            seconds = time.monotonic() - operation.started_s
            operation.future.set_result(TransferResult(operation.nbytes, seconds, self._transport.name))

    def _count(self, part: Part) -> None:
        transport = self._transport.name
        if part.transfer is not None:
            verb = "read" if part.operation.kind is Kind.READ else "written"
            self._counters.add(f"bytes_{verb}_{transport}", part.nbytes)
            self._counters.add(f"slices_{verb}_{transport}", len(part.transfer.rows))
        if part.notification is not None:
            self._counters.add("notifies_sent")

    def _error(self, kind: type[TransferError], reason: str, operation: Operation) -> TransferError:
        return kind(
            f"{operation.kind.value} of {operation.nbytes} bytes failed: {reason}",
            peer=self._dialer.endpoint.node_id,
            transport=self._transport.name,
            address=self._address,
            acknowledged_nbytes=operation.acknowledged_nbytes,
        )
