"""Receiving the answers of one link: by a thread of its own, or by a caller that waits for one of them anyway.

Whoever receives holds the role; nobody else touches the link's receiving side meanwhile. At first the thread holds it.
After an answer for which a caller was waiting in `result`, and while nobody waits for another one, the thread stands
back for a moment: the next caller that waits so takes the role and wakes up by its own answer, which spares the change
of threads on the way back. As soon as somebody waits in another way (a callback, asyncio, a time limit, `result` on
another thread), the thread is called and keeps the role. In any case it takes it when nobody has had it for `PARK_S`:
so an answer is never left lying for longer, and a connection that ends is noticed although nobody waits for anything.
Answers that came together are taken together.

The connection of one stream: made, made again when it breaks, and cleaned up after; one thread does all of that.

A connection that breaks is made again and what was not answered is repeated under the same numbers, which the owner
recognises; a peer whose process is gone fails everything at once.

One ordered stream of requests to a peer: whoever sends on its connection, and what its answers mean.

Order: requests are sent, done and answered in the order in which they begin.

One at a time sends. Where nobody does, a caller sends its request itself, as far as the link takes it without waiting;
the rest, and what was queued meanwhile, is the sending thread's, which also connects, and cleans up after a connection.
"""

import contextlib
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from messenger.backlog import Flight, Role
from messenger.counters import Counters, Flow
from messenger.dialing import Dialer, Restarted, Unreachable
from messenger.errors import MemoryOutOfReach, PeerLost, PeerRestarted, PeerUnreachable, ProtocolError
from messenger.frames import Ack, Allow, Goodbye, Message, Offer, Refused
from messenger.link import Link, LinkClosed
from messenger.memory import NotInHostMemory, RemoteKey
from messenger.operation import READ, WAITS_FOR_ITSELF, Kind, Operation, Part, Transfer
from messenger.priority import BACKGROUND
from messenger.traffic import Traffic
from messenger.transport import DONE, PARTLY, UNABLE, WHOLE, Requester, Sent, Transport
from rpc.errors import InvalidArgument

if TYPE_CHECKING:
    from messenger.memory import Loan


PARK_S = 0.02
_ANSWERS = Ack, Refused

_log = logging.getLogger(__name__)


class Receiver:
    """Methods with the stream's lock held, unless they say otherwise."""

    def __init__(self, stream: "Stream", link: Link, requester: Requester, name: str) -> None:
        self._stream = stream
        self._link = link
        self._requester = requester
        self._wakes = threading.Condition(stream.lock)
        self.thread_holds = False
        self._held = False
        self._helper = 0
        self._called = False
        self._helps = 0
        self._seen_helps = 0
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Raises RuntimeError when the system has no thread left."""
        self._thread.start()

    def end(self) -> None:
        """The link was cut: whoever receives leaves."""
        self._ended = True
        self._wakes.notify_all()

    def join(self) -> None:
        """Wait until nobody receives. Without the lock."""
        self._thread.join()
        with self._stream.lock:
            self._wakes.wait_for(lambda: not self._held)

    def is_held_here(self) -> bool:
        """Whether the calling thread receives. With or without the lock."""
        own = threading.get_ident()
        return own in (self._helper, self._thread.ident)

    def is_receiving_here(self) -> bool:
        """Whether the calling thread holds the role: it is in a callback then. With or without the lock."""
        own = threading.get_ident()
        return own == self._helper or (self.thread_holds and own == self._thread.ident)

    def call_thread(self) -> None:
        """Have the thread receive, since somebody waits who does not."""
        if not self.thread_holds:
            self._called = True
            if not self._held:
                self._wakes.notify_all()

    def may_stand_back(self) -> None:
        """Whoever waited for the last answer would have received it himself, and nobody waits for another."""
        if self.thread_holds:
            self.thread_holds = self._held = self._called = False
            self._seen_helps = -1

    def help(self, operation: Operation) -> None:
        """Receive on the calling thread until the operation is over, if nobody else does. Without the lock."""
        with self._stream.lock:
            # What is in flight here, as a whole, ends by an answer or the link's end alone.
            may_help = operation.flying and operation.single and self._requester.always_answers(operation)
            if self.is_receiving_here():
                raise InvalidArgument(WAITS_FOR_ITSELF)
            if self._held or self._called or self._ended or not may_help:
                operation.awaited = True
                self.call_thread()
                return
            self._held = True
            self._helper = threading.get_ident()
        try:
            while operation.flying and not self._ended and not self._stream.is_early(operation):
                self._receive()
        except BaseException as error:
            # An interrupt, perhaps in the middle of a frame.
            self._stream.end_link(error)
            raise
        finally:
            with self._stream.lock:
                self._held = False
                self._helper = 0
                self._helps += 1
                if not operation.settled:
                    operation.awaited = True
                    self._called = True
                if self._called or self._ended:
                    self._wakes.notify_all()

    def _run(self) -> None:
        while self._take_over():
            while self.thread_holds and not self._ended:
                self._receive()
        with self._stream.lock:
            if self.thread_holds:
                self.thread_holds = self._held = False

    def _take_over(self) -> bool:
        """Wait until the thread is needed; False when the link has ended."""
        with self._stream.lock:
            while not self._ended:
                if not self._held and (self._called or self._helps == self._seen_helps):
                    self._held = self.thread_holds = True
                    return True
                self._seen_helps = self._helps
                self._wakes.wait(PARK_S)
            return False

    def _receive(self) -> None:
        """Receive and handle a message, and those that came with it; with the role and without the lock."""
        stream, receive_here = self._stream, self._requester.receive_here
        landed: list[Part] = []
        goes_on = True
        try:
            try:
                message: Message | None = self._requester.receive(stream.flight.reads_next())
                while message is not None:
                    self._take(message, landed)
                    message = receive_here()
                goes_on = False
            finally:
                if landed:
                    stream.acknowledged(landed, goes_on=goes_on)
        except OSError as error:
            stream.end_link(error)
        except ProtocolError as error:
            _log.warning("closed the connection to %s: %s", self._link.address, str(error))
            stream.count("malformed_frames")
            stream.end_link(error)
        except Exception as error:
            _log.exception("receiving from %s failed", self._link.address)
            stream.end_link(error)

    def _take(self, message: Message, landed: list[Part]) -> None:
        """Handle a message; a part that is done by it joins those that have `landed`, which nobody was told of yet."""
        requester, stream = self._requester, self._stream
        if isinstance(message, Offer):
            requester.offered(message)
            return
        if isinstance(message, Allow):
            requester.allowed(message)
            return
        part = stream.flight.waiting(len(landed))
        if part is None or not isinstance(message, _ANSWERS) or message.seq != part.seq or part is stream.early:
            raise ProtocolError(f"{self._link.address} answers {type(message).__name__} to what was not asked")
        takes_time = part.operation.kind is READ or isinstance(message, Refused)
        must_be_sent = stream.sends(part) and (takes_time or not requester.takes_early_answers)
        if landed and (takes_time or must_be_sent):
            # Those before it do not wait for its bytes.
            stream.acknowledged(landed, goes_on=True)
        if must_be_sent:
            stream.await_sent(part)
        if isinstance(message, Refused):
            requester.refused(part)
            stream.refused(part, message.reason)
        elif requester.accept(part, message):
            landed.append(part)
        else:
            stream.one_step_more()


_MAX_BARREN_LINKS = 4
_BACKOFF_S = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_PROBES_WHEN_IDLE = 3


class Connecting(ABC):
    """`on_lost(reason)` is called when the peer's process is found gone, `on_connected()` when it answers.

    `lock` is the traffic's; methods named `..._locked` are called with it.
    """

    def __init__(
        self,
        dialer: Dialer,
        traffic: Traffic,
        counters: Counters,
        *,
        name: str,
        on_lost: Callable[[str], None],
        on_connected: Callable[[], None],
    ) -> None:
        self.lock = traffic.lock
        self.flight = Flight()
        self.cause = "it has not been connected yet"
        """The connection's last trouble."""
        self._dialer = dialer
        self._transport = dialer.transports[0]
        self.transport = self._transport.name
        """Name of the transport last connected by; before that, of the first to be tried."""
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
        self._closing = False
        self._answered = False
        self._was_cut_here = False  # for the sake of an operation that was to end early
        self._barren_links = 0
        self._barren_number = 0  # of the operation that was the oldest over them

    @abstractmethod
    def _has_work_locked(self) -> bool:
        """Whether something waits for a connection."""

    @abstractmethod
    def _receiver_of(self, link: Link, requester: Requester) -> Receiver:
        """Who is to take the answers of a fresh link."""

    @property
    def address(self) -> str:
        """Where the peer is sought."""
        return self._transport.address_of(self._dialer.endpoint)

    def connected(self) -> bool:
        with self.lock:
            return self._receiver is not None and not self._link_ended

    def count(self, name: str) -> None:
        """An event of this stream's."""
        self._counters.add(name)

    def cut_locked(self) -> None:
        """End the link for the sake of what is to end early: whoever uses it lets go of it soon."""
        if self._link is not None:
            self._was_cut_here = True
            self._link.cut()

    def cut_if_idle_locked(self) -> None:
        """End the link if it was made and nothing is under way on it: it is made again, and nothing repeated."""
        if self._receiver is not None and not self.flight.in_flight:
            self.cut_locked()

    def end_link(self, error: BaseException) -> None:
        """The connection is of no use any more."""
        with self.lock:
            if not self._link_ended:  # what follows from it tells less
                self.cause = str(error) or type(error).__name__
            self._link_ended = True
            if self._link is not None:
                self._link.cut()
            if self._receiver is not None:
                self._receiver.end()
            self._wakes.notify_all()

    # The sending thread's.

    def _connect(self) -> Requester | None:
        """A fresh connection; None when the stream closes, or the peer is lost and everything has failed."""
        failures = 0
        while not self._given_up(failures):
            try:
                transport, link, requester = self._dialer.dial(self._opened)
                self._begin_receiving(transport, link, requester)
                return requester
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
            except Exception as error:  # an address that is none, say: the thread outlives it
                _log.warning("cannot connect to %s: %s", self.address, repr(error))
                self._lose(PeerUnreachable, f"cannot connect: {error}")
                return None
        return None

    def _given_up(self, failures: int) -> bool:
        with self.lock:
            if self._closing:
                return True
            if self._has_work_locked() or failures < _PROBES_WHEN_IDLE:
                return False
        # Nobody waits for an answer, but whoever relies on this peer wants to know that it does not answer. Other
        # streams may do better, and what is submitted meanwhile too.
        self._on_lost(self.cause)
        return True

    def _begin_receiving(self, transport: Transport, link: Link, requester: Requester) -> None:
        peer = self._dialer.endpoint.node_id
        flows = {
            Kind.WRITE: self._counters.flow(peer=peer, transport=transport.name, direction="written"),
            Kind.READ: self._counters.flow(peer=peer, transport=transport.name, direction="read"),
        }
        receiver = self._receiver_of(link, requester)
        try:
            with self.lock:
                receiver.start()
                self._transport = transport
                self.transport = transport.name
                self._receiver = receiver
                self._requester = requester
                self._flows = flows
                self._link_ended = self._answered = self._was_cut_here = False
        except RuntimeError as error:
            link.close()
            raise OSError(f"the system gives this process no thread: {error}") from error
        self._counters.add("connects")
        self._on_connected()

    def _opened(self, link: Link) -> None:
        with self.lock:
            self._link = link
            if self._closing:
                link.cut()

    def _clean_up(self) -> None:
        """All threads have let go of the parts in flight after this: drop the doomed, send the others again."""
        link, receiver = self._link, self._receiver
        assert link is not None
        assert receiver is not None
        with self._telling("ending"):
            link.cut()
        with self.lock:
            receiver.end()
        receiver.join()
        with self.lock:
            reset = bool(self.flight.in_flight)
            self._link = self._requester = None
        # Without the lock, since a transport may take its time. Nothing new begins meanwhile: there is no requester.
        with self._telling("closing"):
            link.close(reset=reset)
        with self.lock:
            self._receiver = None
            self._link_ended = False
            self._blame_oldest()
            self.flight.connection_lost()
            ended = self._traffic.drop_doomed_locked()
        self._traffic.settle(ended)

    @contextlib.contextmanager
    def _telling(self, doing: str) -> Iterator[None]:
        """What fails at the end of a connection is told, and stops neither the clearing up nor the next connection."""
        try:
            yield
        except Exception:
            _log.exception("%s the connection to %s failed", doing, self.address)

    def _blame_oldest(self) -> None:
        """A request over which connection after connection breaks must not hold up the others for ever."""
        if self._answered or not self.flight.in_flight:
            self._barren_links = 0
            return
        if self._was_cut_here:
            return
        oldest = self.flight.in_flight[0].operation
        if oldest.number != self._barren_number:
            self._barren_links, self._barren_number = 0, oldest.number
        self._barren_links += 1
        if self._barren_links >= _MAX_BARREN_LINKS:
            self._barren_links = 0
            reason = f"{_MAX_BARREN_LINKS} connections in a row broke over it, at last because {self.cause}"
            self._traffic.give_up_locked(oldest, reason)

    def _lose(self, kind: type[PeerLost], reason: str) -> None:
        self._on_lost(reason)
        with self.lock:
            self._link = None
            self.cause = reason
        self._traffic.lose(kind, reason)


_FEW = 32


class Stream(Connecting):
    """The lock is the traffic's; methods named `..._locked` are called with it."""

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
        super().__init__(dialer, traffic, counters, name=name, on_lost=on_lost, on_connected=on_connected)
        self.role = role
        self._sender: threading.Thread | None = None
        self._sending: Part | None = None  # whoever sends it has not come back
        self._is_awaited = False  # whoever receives waits until he has
        self.early: Part | None = None
        """Answered, and in flight until whoever sends it has come back."""
        self._unable = ""  # why the last part could not be sent
        self._unfinished = False  # a caller began a part, whose rest the sending thread is to send

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

    def lend(self, key: RemoteKey, offset: int, nbytes: int) -> "Loan | None":
        """As `Requester.lend`."""
        requester = self._requester
        return None if requester is None else requester.lend(key, offset, nbytes)

    # Reads that take no request, on any thread.

    def may_copy(self, transfer: Transfer) -> bool:
        """As `Requester.may_copy`."""
        requester = self._requester
        return requester is not None and requester.may_copy(transfer)

    def copied(self, transfer: Transfer) -> bool:
        """As `Requester.copied`."""
        requester = self._requester
        return requester is not None and requester.copied(transfer)

    def count_copied_locked(self, transfer: Transfer, seconds: float) -> None:
        """Such a read was done."""
        flow = self._flows.get(READ)
        if flow is not None:
            flow.add(transfer.nbytes, len(transfer.slices), seconds)

    # Observers of an operation in flight.

    def help(self, operation: Operation) -> None:
        """The calling thread waits for the operation: it receives the answer itself if it may."""
        if threading.current_thread() is self._sender or self._traffic.keeps_time_here():
            raise InvalidArgument(WAITS_FOR_ITSELF)
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

    def works_here(self) -> bool:
        """Whether the calling thread is the one that sends for this stream, or receives its answers now."""
        receiver = self._receiver
        return threading.current_thread() is self._sender or (receiver is not None and receiver.is_receiving_here())

    # Sending: whoever submitted, and the thread.

    def has_room_locked(self) -> bool:
        """Whether nobody sends on the connection, nor has anything to send before what is new."""
        return self._requester is not None and not (
            self._sending is not None or self._link_ended or self._closing or self.flight.again
        )

    def begin_locked(self, part: Part) -> None:
        """Begin the part; the calling thread sends it, with `send_as_caller` or as the sending thread."""
        self._sending = part
        if part.seq:
            self._counters.add("retries")
        self.flight.begin(part)
        operation = part.operation
        operation.carrier = self
        if (operation.observed or operation.awaited) and self._receiver is not None:
            self._receiver.call_thread()

    def send_as_caller(self) -> None:
        """Send the part that was just begun as far as it goes without waiting; the thread does the rest."""
        requester, part = self._requester, self._sending
        assert requester is not None
        assert part is not None
        try:
            sent = self._send(requester.begin, part)
        except BaseException as error:
            # An interrupt, perhaps in the middle of a frame.
            self.end_link(error)
            with self.lock:
                self._sending = self.early = None
                self.wake_locked()
            raise
        with self.lock:
            if sent is PARTLY:
                self._unfinished = True
                self.wake_locked()
                return
            ended = self._sent_locked(part, sent)
            if self._link_ended or self._closing or self.flight.again or self._traffic.waits_locked(self):
                self.wake_locked()
        self._traffic.settle(ended)

    def wake_locked(self) -> None:
        """There may be something to do for the sending thread."""
        if self._sender is None:
            if self._closing:
                return
            sender = threading.Thread(target=self._run, name=f"{self._name}-send", daemon=True)
            sender.start()
            self._sender = sender  # only now: the system may have no thread left, and some later
        self._wakes.notify_all()

    def num_background_locked(self) -> int:
        """Background parts in flight."""
        return sum(part.operation.priority is BACKGROUND for part in self.flight.in_flight)

    def _send(self, send: Callable[..., Sent], *part: Part) -> Sent:
        """Send, or finish sending; what fails in it ends the link, which is where its parts are told of."""
        try:
            return send(*part)
        except OSError as error:
            self.end_link(error)
        except NotInHostMemory as error:
            self._unable = str(error)
            return UNABLE
        except Exception as error:
            _log.exception("sending to %s failed", self.address)
            self.end_link(error)
        return WHOLE

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
        return bool(self.flight.again) or self._traffic.backlog.has_for(self.role) or self._traffic.copies.has_for(self)

    def _send_next(self, requester: Requester) -> bool:
        """Send one part, or the rest of one; False when the link ended or the stream closes."""
        with self.lock:
            part = self._next_locked()
            copy: Part | None = None
            while part is None and not self._unfinished and not self._over_locked():
                copy = self._traffic.copies.take_for(self)
                if copy is not None:
                    break
                self._wakes.wait()
                part = self._next_locked()
            unfinished, self._unfinished = self._unfinished, False
        if copy is not None:
            self._traffic.copies.copy(copy)
            return True
        if part is not None:
            sent = self._send(requester.send, part)
        elif unfinished:
            part = self._sending
            assert part is not None
            sent = self._send(requester.finish)
        else:
            return False
        with self.lock:
            ended = self._sent_locked(part, sent)
        self._traffic.settle(ended)
        return True

    def _next_locked(self) -> Part | None:
        """The next part, begun, if there is one and nobody sends."""
        if self._sending is not None or self._link_ended or self._closing:
            return None
        part = self.flight.again.popleft() if self.flight.again else self._traffic.take_locked(self)
        if part is not None:
            self.begin_locked(part)
        return part

    def _over_locked(self) -> bool:
        """Whether the link is to be cleaned up, and no caller uses it any more."""
        return (self._link_ended or self._closing) and self._sending is None

    def _say_goodbye(self) -> None:
        link = self._link
        if link is not None:
            try:
                link.send(Goodbye())
            except OSError:
                pass

    def _receiver_of(self, link: Link, requester: Requester) -> Receiver:
        return Receiver(self, link, requester, f"{self._name}-receive")

    # Answers, from whoever receives.

    def sends(self, part: Part) -> bool:
        """Whether whoever sends the part has not come back. With or without the lock."""
        return self._sending is part

    def is_early(self, operation: Operation) -> bool:
        """Whether the operation's part was answered, and whoever sends it will tell. With or without the lock."""
        early = self.early
        return early is not None and early.operation is operation

    def await_sent(self, part: Part) -> None:
        """The oldest part in flight is answered: return once nobody sends it any more.

        Who sent the last byte may come back after the answer to it, and an owner may answer what it has not been sent.
        Raises ProtocolError when no request was sent, LinkClosed when the link ends first.
        """
        with self.lock:
            self._is_awaited = True
            self._wakes.wait_for(lambda: self._sending is not part or self._link_ended)
            if self._link_ended:
                raise LinkClosed(f"the connection to {self.address} ended in the middle of a request")
            if part not in self.flight.in_flight:
                raise ProtocolError(f"{self.address} answers a request that was not sent")

    def acknowledged(self, parts: list[Part], *, goes_on: bool) -> None:
        """The oldest parts in flight are done, and whoever receives has more at hand, or not; the list is used up.

        One of which the sending has not returned is in use until it has: it is the last, and kept for then.
        """
        receiver = self._receiver
        with self.lock:
            self._answered = True
            if parts[-1] is self._sending:
                self.early = parts.pop()
            ended = self._all_landed_locked(parts)
            if receiver is not None and receiver.thread_holds and not goes_on and self._nobody_else_waits_locked(ended):
                receiver.may_stand_back()
            self._made_room_locked(parts)
            parts.clear()  # whoever receives has no hold on memory that callers are told is free
        self._traffic.settle(ended)

    def _all_landed_locked(self, parts: Iterable[Part]) -> list[Operation]:
        now_s = time.monotonic()
        ended: list[Operation] = []
        for part in parts:
            if self.flight.waiting() is part:  # what could not be sent has ended, whatever its owner answers
                self.flight.answered()
                ended += self._landed_locked(part, now_s)
        return ended

    def _made_room_locked(self, parts: Iterable[Part]) -> None:
        """The parts were answered: only so much background is under way at a time."""
        for part in parts:
            if part.operation.priority is BACKGROUND:
                if self._traffic.waits_locked(self):
                    self.wake_locked()
                return

    def _nobody_else_waits_locked(self, ended: Iterable[Operation]) -> bool:
        """Whether these, and the answers to come so far, are those of callers that would receive them themselves."""
        in_flight = self.flight.in_flight
        return (
            any(operation.awaited for operation in ended)
            and not self.flight.again
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
            self._made_room_locked([part])
        self._traffic.settle(ended)

    def _sent_locked(self, part: Part, sent: Sent) -> list[Operation]:
        """Nobody sends the part any more; returns what is to be settled."""
        self._sending = None
        if self._is_awaited:
            self._is_awaited = False
            self._wakes.notify_all()
        is_answered, self.early = self.early is part, None
        if is_answered and sent is WHOLE and not self._link_ended:
            self.flight.answered()
            return self._landed_locked(part, time.monotonic())
        if sent is DONE:
            self.flight.ended(part)
            return self._landed_locked(part, time.monotonic())
        if sent is UNABLE:
            self.flight.ended(part)
            return self._traffic.refused_locked(part, self._unable, MemoryOutOfReach)
        return []

    def _landed_locked(self, part: Part, now_s: float) -> list[Operation]:
        operation = part.operation
        if part.transfer is not None:
            self._flows[operation.kind].add(part.nbytes, len(part.transfer.slices), now_s - operation.started_s)
        if part.notification is not None:
            self._counters.add("notifies_sent")
        return self._traffic.ended_locked(part, now_s)
