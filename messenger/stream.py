"""One ordered stream of requests to a peer: its connection, made again when it breaks, and whoever sends on it.

Order: requests are sent, done and answered in the order in which they begin. A connection that breaks is made again and
what was not answered is repeated under the same numbers, which the owner recognises; a peer whose process is gone fails
everything at once.

One at a time sends. Where nobody does, a caller sends its request itself, as far as the link takes it without waiting;
the rest, and what was queued meanwhile, is the sending thread's, which also connects, and cleans up after a connection.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from messenger.backlog import Role
from messenger.counters import Counters, Flow
from messenger.dialing import Dialer, Restarted, Unreachable
from messenger.errors import PeerLost, PeerRestarted, PeerUnreachable
from messenger.flight import Flight
from messenger.frames import Goodbye
from messenger.keys import RemoteKey
from messenger.link import Link
from messenger.operation import Kind, Operation, Part
from messenger.priority import Priority
from messenger.receiving import Receiver
from messenger.traffic import Traffic
from messenger.transport import Requester, Sent, Transport

if TYPE_CHECKING:
    from messenger.shm.loan import Loan

__all__ = ["MAX_BARREN_LINKS", "Stream"]

MAX_BARREN_LINKS = 4
_BACKOFF_S = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_PROBES_WHEN_IDLE = 3
_FEW = 32

_log = logging.getLogger(__name__)


class Stream:
    """`on_lost(reason)` is called when the peer's process is found gone, `on_connected()` when it answers.

    `lock` is the traffic's; methods named `..._locked` are called with it.
    """

    def __init__(
        self,
        dialer: Dialer,
        traffic: Traffic,
        role: Role,
        counters: Counters,
        *,
        name: str,
        on_lost: Callable[[str], None],
        on_connected: Callable[[], None],
    ) -> None:
        self.role = role
        self.lock = traffic.lock
        self.flight = Flight()
        self.cause = "it has not been connected yet"
        """The connection's last trouble."""
        self._dialer = dialer
        self._transport = dialer.transports[0]
        self._traffic = traffic
        self._counters = counters
        self._name = name
        self._on_lost = on_lost
        self._on_connected = on_connected
        self._wakes = threading.Condition(self.lock)
        self._link: Link | None = None
        self._link_ended = False
        self._requester: Requester | None = None
        self._receiver: Receiver | None = None
        self._flows: dict[Kind, Flow] = {}
        self._sender: threading.Thread | None = None
        self._sending = False
        self._unfinished = False  # a caller began a part, whose rest the sending thread is to send
        self._closing = False
        self._answered = False
        self._barren_links = 0

    @property
    def transport(self) -> str:
        """Name of the transport last connected by; before that, of the first to be tried."""
        return self._transport.name

    @property
    def address(self) -> str:
        """Where the peer is sought."""
        return self._transport.address_of(self._dialer.endpoint)

    def connected(self) -> bool:
        with self.lock:
            return self._receiver is not None and not self._link_ended

    def has_thread(self) -> bool:
        with self.lock:
            return self._sender is not None

    def close(self) -> None:
        """Say goodbye and end the threads; the traffic has failed what was pending."""
        with self.lock:
            self._closing = True
            if self._link is not None and (self.flight.in_flight or self._receiver is None):
                self._link.cut()
            self._wakes.notify_all()
            sender, receiver = self._sender, self._receiver
        # A future's callback may close the messenger: it runs on a thread that sends or receives, and ends after it.
        is_used_here = threading.current_thread() is sender or (receiver is not None and receiver.is_held_here())
        if sender is not None and not is_used_here:
            sender.join()

    def count(self, name: str) -> None:
        """An event of this stream's."""
        self._counters.add(name)

    def lend(self, key: RemoteKey, offset: int, nbytes: int) -> "Loan | None":
        """As `Requester.lend`."""
        requester = self._requester
        return None if requester is None else requester.lend(key, offset, nbytes)

    # Observers of an operation in flight.

    def help(self, operation: Operation) -> None:
        """The calling thread waits for the operation: it receives the answer itself if it may."""
        receiver = self._receiver
        if receiver is None:
            operation.awaited = True
        else:
            receiver.help(operation)

    def is_observed(self) -> None:
        """Somebody waits for an operation who does not receive."""
        receiver = self._receiver
        if receiver is not None:
            with self.lock:
                receiver.call_thread()

    # Sending: whoever submitted, and the thread.

    def has_room_locked(self) -> bool:
        """Whether nobody sends on the connection, nor has anything to send before what is new."""
        return self._requester is not None and not (
            self._sending or self._link_ended or self._closing or self.flight.again
        )

    def begin_locked(self, part: Part) -> None:
        """Begin the part; the calling thread sends it, with `send_as_caller` or as the sending thread."""
        self._sending = True
        self.flight.begin(part)
        operation = part.operation
        operation.carrier = self
        if (operation.observed or operation.awaited) and self._receiver is not None:
            self._receiver.call_thread()

    def send_as_caller(self) -> None:
        """Send the part that was just begun as far as it goes without waiting; the thread does the rest."""
        requester, part = self._requester, self.flight.in_flight[-1]
        assert requester is not None
        sent = self._send(part, requester.begin)
        with self.lock:
            if sent is Sent.PARTLY:
                self._unfinished = True
                self.wake_locked()
                return
            self._sending = False
            ended = self._ended_unanswered_locked(part) if sent is Sent.DONE else []
            if self._link_ended or self._closing or self._traffic.waits_locked(self):
                self.wake_locked()
        self._traffic.settle(ended)

    def wake_locked(self) -> None:
        """There may be something to do for the sending thread."""
        if self._sender is None:
            if self._closing:
                return
            self._sender = threading.Thread(target=self._run, name=f"{self._name}-send", daemon=True)
            self._sender.start()
        self._wakes.notify_all()

    def num_background_locked(self) -> int:
        """Background parts in flight."""
        return sum(part.operation.priority is Priority.BACKGROUND for part in self.flight.in_flight)

    def cut_locked(self) -> None:
        """End the link: whoever uses it lets go of it soon."""
        if self._link is not None:
            self._link.cut()

    def _send(self, part: Part, send: Callable[[Part], Sent]) -> Sent:
        part.attempts += 1
        if part.attempts > 1:
            self._counters.add("retries")
        try:
            return send(part)
        except OSError as error:
            self.end_link(error)
        except Exception as error:
            _log.exception("sending to %s failed", self.address)
            self.end_link(error)
        return Sent.WHOLE

    def _run(self) -> None:
        requester: Requester | None = None
        while True:
            if requester is None:
                requester = self._connect()
                if requester is None:
                    with self.lock:
                        if self._closing or not self._has_work_locked():
                            self._sender = None
                            return
                    continue
            if self._send_next(requester):
                continue
            with self.lock:
                said_goodbye = self._closing and not self._link_ended
            if said_goodbye:
                self._say_goodbye()
            self._clean_up()
            requester = None

    def _has_work_locked(self) -> bool:
        return bool(self.flight.again) or self._traffic.backlog.has_for(self.role)

    def _send_next(self, requester: Requester) -> bool:
        """Send one part, or the rest of one; False when the link ended or the stream closes."""
        with self.lock:
            part = self._next_locked()
            while part is None and not self._unfinished and not self._over_locked():
                self._wakes.wait()
                part = self._next_locked()
            unfinished, self._unfinished = self._unfinished, False
        if part is not None:
            sent = self._send(part, requester.send)
        elif unfinished:
            part = self.flight.in_flight[-1]
            sent = self._finish(requester)
        else:
            return False
        with self.lock:
            self._sending = False
            ended = self._ended_unanswered_locked(part) if sent is Sent.DONE else []
        self._traffic.settle(ended)
        return True

    def _next_locked(self) -> Part | None:
        """The next part, begun, if there is one and nobody sends."""
        if self._sending or self._link_ended or self._closing:
            return None
        part = self.flight.again.popleft() if self.flight.again else self._traffic.take_locked(self)
        if part is not None:
            self.begin_locked(part)
        return part

    def _over_locked(self) -> bool:
        """Whether the link is to be cleaned up, and no caller uses it any more."""
        return (self._link_ended or self._closing) and not self._sending

    def _finish(self, requester: Requester) -> Sent:
        try:
            return requester.finish()
        except OSError as error:
            self.end_link(error)
        except Exception as error:
            _log.exception("sending to %s failed", self.address)
            self.end_link(error)
        return Sent.WHOLE

    # The connection: the sending thread alone makes it, and cleans up after it.

    def _connect(self) -> Requester | None:
        """A fresh connection; None when the stream closes, or the peer is lost and everything has failed."""
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
                with self.lock:
                    self._link = None
                    self.cause = f"cannot connect: {error}"
                    self._wakes.wait_for(lambda: self._closing, _BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)])
                failures += 1
                continue
            self._begin_receiving(transport, link, requester)
            return requester
        return None

    def _given_up(self, failures: int) -> bool:
        with self.lock:
            if self._closing:
                return True
            if self._has_work_locked() or failures < _PROBES_WHEN_IDLE:
                return False
        # Nobody waits for an answer, but whoever relies on this peer wants to know that it does not answer.
        self._lose(PeerUnreachable, self.cause)
        return True

    def _begin_receiving(self, transport: Transport, link: Link, requester: Requester) -> None:
        peer = self._dialer.endpoint.node_id
        flows = {
            Kind.WRITE: self._counters.flow(peer=peer, transport=transport.name, direction="written"),
            Kind.READ: self._counters.flow(peer=peer, transport=transport.name, direction="read"),
        }
        receiver = Receiver(self, link, requester, f"{self._name}-receive")
        with self.lock:
            self._transport = transport
            self._receiver = receiver
            self._requester = requester
            self._flows = flows
            self._link_ended = self._answered = False
        self._counters.add("connects")
        receiver.start()
        self._on_connected()

    def _opened(self, link: Link) -> None:
        with self.lock:
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
        """All threads have let go of the parts in flight after this: drop the doomed, send the others again."""
        link, receiver = self._link, self._receiver
        assert link is not None
        assert receiver is not None
        link.cut()
        with self.lock:
            receiver.end()
        receiver.join()
        with self.lock:
            reset = bool(self.flight.in_flight)
            self._link = self._requester = None
        # Without the lock, since a transport may take its time. Nothing new begins meanwhile: there is no requester.
        link.close(reset=reset)
        with self.lock:
            self._receiver = None
            self._link_ended = False
            self._blame_oldest()
            self.flight.connection_lost()
            ended = self._traffic.drop_doomed_locked()
        self._traffic.settle(ended)

    def _blame_oldest(self) -> None:
        """A request over which connection after connection breaks must not hold up the others for ever."""
        if self._answered or not self.flight.in_flight:
            self._barren_links = 0
            return
        self._barren_links += 1
        if self._barren_links >= MAX_BARREN_LINKS:
            self._barren_links = 0
            reason = f"{MAX_BARREN_LINKS} connections in a row broke over it, at last because {self.cause}"
            self._traffic.give_up_locked(self.flight.in_flight[0].operation, reason)

    def _lose(self, kind: type[PeerLost], reason: str) -> None:
        self._on_lost(reason)
        with self.lock:
            self._link = None
            self.cause = reason
        self._traffic.lose(kind, reason)

    def end_link(self, error: BaseException) -> None:
        """The connection is of no use any more."""
        with self.lock:
            self._link_ended = True
            self.cause = str(error)
            if self._link is not None:
                self._link.cut()
            if self._receiver is not None:
                self._receiver.end()
            self._wakes.notify_all()

    # Answers, from whoever receives.

    def acknowledged(self, part: Part) -> None:
        """The oldest part in flight is done."""
        flight, receiver, operation = self.flight, self._receiver, part.operation
        with self.lock:
            self._answered = True
            flight.answered()
            ended = self._landed_locked(part)
            if ended and operation.awaited and receiver is not None and self._nobody_else_waits_locked():
                receiver.may_stand_back()
            if operation.priority is Priority.BACKGROUND and self._traffic.waits_locked(self):
                self.wake_locked()
        self._traffic.settle(ended)

    def _nobody_else_waits_locked(self) -> bool:
        """Whether the answers to come are, so far, those of callers that would receive them themselves."""
        in_flight = self.flight.in_flight
        return (
            not self.flight.again
            and not self._traffic.backlog
            and len(in_flight) <= _FEW
            and not any(part.operation.observed or part.operation.awaited for part in in_flight)
        )

    def one_step_more(self) -> None:
        """The oldest part in flight was answered, and takes another request."""
        with self.lock:
            self._answered = True
            self.flight.one_step_more()
            ended = self._traffic.drop_doomed_locked()
            self.wake_locked()
        self._traffic.settle(ended)

    def refused(self, part: Part, reason: str) -> None:
        """The owner refused the oldest part in flight."""
        self._counters.add("refused")
        with self.lock:
            self._answered = True
            self.flight.answered()
            ended = self._traffic.refused_locked(part, reason)
        self._traffic.settle(ended)

    def _ended_unanswered_locked(self, part: Part) -> list[Operation]:
        self.flight.ended(part)
        return self._landed_locked(part)

    def _landed_locked(self, part: Part) -> list[Operation]:
        now_s = time.monotonic()
        operation = part.operation
        if part.transfer is not None:
            self._flows[operation.kind].add(part.nbytes, len(part.transfer.slices), now_s - operation.started_s)
        if part.notification is not None:
            self._counters.add("notifies_sent")
        return self._traffic.ended_locked(part, now_s)
