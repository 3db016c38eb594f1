"""One ordered stream of requests to a peer: its connection, the sending of requests, and the receiving of answers.

Requests are sent, executed and answered in the order in which they begin. After a connection breaks, the stream
connects again and repeats unanswered requests under the same numbers, which the owner recognises. If the peer's process
is gone, everything fails at once.

Threads:

    caller            a thread that submits an operation. If nothing is being sent, it sends its request itself, as far
                      as the link accepts it without blocking. In `result` it may also receive the answer itself.
    "<name>-send"     one per stream, started on demand. Connects, sends queued requests, finishes requests that a
                      caller could not send whole, copies mapped reads, and cleans up after a connection. It ends when
                      the stream closes, or when it cannot connect and nothing is left to send.
    "<name>-receive"  one per connection, started with it. Receives answers, except while a caller does (see Receiver).

Lock: `Stream.lock` is `Traffic.lock`, one per peer. It guards all state of the stream except what two roles hold
exclusively, each one thread at a time and without the lock:

    sending role      `_sending` is the part being sent; its sender alone uses the link's sending side. Taken under the
                      lock by `begin_locked`, returned under the lock by `_sent_locked`.
    receiving role    `Receiver._held`; its holder alone uses the link's receiving side, including the memory into which
                      payloads are received.

`_changed` (a condition on the lock) is notified when the sending thread may have work, when a part that the receiver
waits for has been sent, and when the link ends or the stream closes.

Lifetimes of one connection (all transitions under the lock):

    _connect        _link        set before anything blocks, so that `cut` can end the dialing
                    _requester   set with _receiver when the receive thread runs; from then on parts may begin
    end_link        _link_ended  set by whichever thread finds the error; both sides of the link are cut
    _clean_up       runs on the sending thread once no thread sends: cut, join the receiver, clear _requester and
                    _link, close the link without the lock, then clear _receiver and _link_ended and move the parts in
                    flight to the repeat queue. Memory of a part is in use until then at the latest.

A part moves: Traffic.backlog -> in_flight.sent (begin_locked) -> landed | refused | in_flight.repeats (connection lost,
or another step is needed) -> in_flight.sent ... An answer may arrive before the sending call has returned: the part is
then `early_answered` and ends when it has.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from messenger.backlog import InFlight, StreamRole
from messenger.counters import Counters, Flow
from messenger.dialing import Dialed, Dialer, Restarted, Unreachable
from messenger.errors import MemoryOutOfReach, PeerLost, PeerRestarted, PeerUnreachable, ProtocolError
from messenger.frames import Ack, Goodbye, KeyInfo, Message, Offer, Refused
from messenger.link import Link, LinkClosed
from messenger.memory import Loan, NotInHostMemory, RemoteKey
from messenger.operation import READ, SELF_WAIT_ERROR, WRITE, Kind, Operation, Part, Transfer
from messenger.priority import BACKGROUND
from messenger.traffic import Traffic
from messenger.transport import DONE, PARTLY, UNABLE, WHOLE, Requester, SendStatus
from rpc.errors import InvalidArgument

PARK_S = 0.02
"""If no thread has received for this long, the receive thread takes the role."""
_MAX_FRUITLESS_LINKS = 4
_BACKOFF_S = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_IDLE_CONNECT_ATTEMPTS = 3
_MAX_PARTS_TO_SCAN = 32
_ANSWERS = Ack, Refused

_log = logging.getLogger(__name__)


class Stream:
    """One stream of a peer. Methods named `..._locked` require the lock; see the module's map of threads and locks.

    `on_lost(reason)` is called when the peer's process is found gone, `on_connected()` when it answers.
    """

    def __init__(
        self,
        dialer: Dialer,
        traffic: Traffic,
        role: StreamRole,
        counters: Counters,
        *,
        name: str,
        on_lost: Callable[[str], None],
        on_connected: Callable[[], None],
    ) -> None:
        self.role = role
        self.lock = traffic.lock
        self.in_flight = InFlight()
        self.cause = "it has not been connected yet"
        """Cause of the connection's last failure."""
        self._dialer = dialer
        self._transport = dialer.transports[0]
        self.transport = self._transport.name
        """Name of the transport of the last connection; before that, of the first to be tried."""
        self._traffic = traffic
        self._counters = counters
        self._name = name
        self._on_lost = on_lost
        self._on_connected = on_connected
        self._changed = threading.Condition(self.lock)
        self._closing = False
        # The connection.
        self._link: Link | None = None
        self._link_ended = False
        self._requester: Requester | None = None
        self._receiver: Receiver | None = None
        self._flows: dict[Kind, Flow] = {}
        self._answered = False  # the connection has brought at least one answer
        self._was_cut_here = False  # cut to end an operation early
        self._paths = dialer.paths
        self.path: int | None = None
        """Path of the connection, if the peer has several."""
        self.num_answers = 0
        """Answers since the paths' last sample."""
        self._path_flows: dict[Kind, Flow] = {}
        self._leaves_when_idle = False  # begins no part, and connects again by its home path when none is in flight
        self._fruitless_links = 0  # connections in a row that broke before any answer
        self._oldest_number = 0  # of the operation that was the oldest in flight on all of them
        # Sending.
        self._sender: threading.Thread | None = None
        self._sending: Part | None = None  # its sending call has not returned
        self._receiver_waits = False  # in `await_sent`
        self.early_answered: Part | None = None
        """Answered before its sending call has returned; in flight until then."""
        self._unsendable_reason = ""  # why the last part could not be sent
        self._has_unfinished_part = False  # a caller began `_sending`; the sending thread must finish it

    @property
    def address(self) -> str:
        """Address of the peer, for errors and logs."""
        return self._transport.address_of(self._dialer.endpoint)

    def connected(self) -> bool:
        """Return True if the stream has a connection now."""
        with self.lock:
            return self._receiver is not None and not self._link_ended

    def has_thread(self) -> bool:
        """Return True if the stream's sending thread is running."""
        with self.lock:
            return self._sender is not None

    def close(self) -> None:
        """Send Goodbye if nothing is in flight, and end the threads; the traffic has failed all pending operations."""
        with self.lock:
            self._closing = True
            if self._link is not None and (self.in_flight.sent or self._receiver is None):
                self._link.cut()
            self._changed.notify_all()
            sender, receiver = self._sender, self._receiver
        # A future's callback may close the messenger: it runs on a thread that sends or receives, which ends later.
        is_own_thread = threading.current_thread() is sender or (
            receiver is not None and receiver.is_receiver_or_helper_thread()
        )
        if sender is not None and not is_own_thread:
            sender.join()

    def count(self, name: str) -> None:
        """Count an event."""
        self._counters.add(name)

    # Access to the owner's memory without a request, on any thread.

    def lend(self, key: RemoteKey, offset: int, nbytes: int) -> Loan | None:
        """Return bytes of the owner's region in place; see `Requester.lend`."""
        requester = self._requester
        return None if requester is None else requester.lend(key, offset, nbytes)

    def may_copy(self, transfer: Transfer) -> bool:
        """Return True if `try_copy` would probably succeed; see `Requester.may_copy`."""
        requester = self._requester
        return requester is not None and requester.may_copy(transfer)

    def try_copy(self, transfer: Transfer) -> bool:
        """Do a read without a request; see `Requester.try_copy`."""
        requester = self._requester
        return requester is not None and requester.try_copy(transfer)

    def count_copied_locked(self, transfer: Transfer, seconds: float) -> None:
        """Count a read that `try_copy` has done."""
        flow = self._flows.get(READ)
        if flow is not None:
            flow.add(transfer.nbytes, len(transfer.slices), seconds)

    # Observers of an operation in flight.

    def receive_for(self, operation: Operation) -> None:
        """Let the calling thread, which waits for the operation, receive the answer itself if it may."""
        sender = self._sender
        if (sender is not None and sender.ident == threading.get_ident()) or self._traffic.is_alarm_thread():
            raise InvalidArgument(SELF_WAIT_ERROR)
        receiver = self._receiver
        if receiver is None:
            operation.awaited = True
        else:
            receiver.receive_for(operation)

    def on_observed(self) -> None:
        """Have the receive thread receive, because an operation has an observer that does not."""
        receiver = self._receiver
        if receiver is not None:
            with self.lock:
                receiver.request_thread_locked()

    def runs_on_current_thread(self) -> bool:
        """Return True if the calling thread is the sending thread, or holds the receiving role."""
        receiver = self._receiver
        return threading.current_thread() is self._sender or (
            receiver is not None and receiver.is_held_by_current_thread()
        )

    # Sending, by a caller or by the sending thread.

    def has_room_locked(self) -> bool:
        """Return True if nothing is being sent, and nothing must be sent before a new part."""
        return self._requester is not None and not (
            self._sending is not None
            or self._link_ended
            or self._closing
            or self.in_flight.repeats
            or (self.path is not None and self._is_full_locked(self.path))
        )

    def _is_full_locked(self, path: int) -> bool:
        """Return True if no part may begin before others are answered, so that little is lost if the path fails."""
        if self._leaves_when_idle:
            return True
        in_flight = self.in_flight
        assert self._paths is not None
        return bool(in_flight.sent) and in_flight.nbytes >= self._paths.window_nbytes_locked(path)

    def begin_locked(self, part: Part) -> None:
        """Begin the part; the calling thread must send it, by `send_as_caller` or as the sending thread."""
        self._sending = part
        if part.seq:
            self._counters.add("retries")
        self.in_flight.begin(part)
        if self._paths is not None:
            self._paths.began_locked()
        operation = part.operation
        operation.stream = self
        if (operation.observed or operation.awaited) and self._receiver is not None:
            self._receiver.request_thread_locked()

    def send_as_caller(self) -> None:
        """Send the part just begun as far as the link accepts it without blocking; the sending thread does the rest."""
        requester, part = self._requester, self._sending
        assert requester is not None
        assert part is not None
        try:
            status = self._send(requester.begin, part)
        except BaseException as error:
            # An interrupt, perhaps in the middle of a frame.
            self.end_link(error)
            with self.lock:
                self._sending = self.early_answered = None
                self.wake_locked()
            raise
        with self.lock:
            if status is PARTLY:
                self._has_unfinished_part = True
                self.wake_locked()
                return
            ended = self._sent_locked(part, status)
            if self._link_ended or self._closing or self.in_flight.repeats or self._traffic.has_part_locked(self):
                self.wake_locked()
            if self._leaves_when_idle:
                self._leave_if_idle_locked()
        if ended:
            self._traffic.settle(ended)

    def wake_locked(self) -> None:
        """Wake the sending thread, or start it, because it may have something to do."""
        if self._sender is None:
            if self._closing:
                return
            sender = threading.Thread(target=self._run, name=f"{self._name}-send", daemon=True)
            sender.start()
            self._sender = sender  # not before: starting may fail now and succeed later
        self._changed.notify_all()

    def num_background_locked(self) -> int:
        """Return the number of background parts in flight."""
        return sum(part.operation.priority is BACKGROUND for part in self.in_flight.sent)

    def _send(self, send: Callable[..., SendStatus], *part: Part) -> SendStatus:
        """Call `send`, which sends or finishes a part. An error ends the link, whose cleanup handles its parts."""
        try:
            return send(*part)
        except OSError as error:
            self.end_link(error)
        except NotInHostMemory as error:
            self._unsendable_reason = str(error)
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
                closes_in_order = self._closing and not self._link_ended
            if closes_in_order:
                self._send_goodbye()
            self._clean_up()
            requester = None

    def _has_work_locked(self) -> bool:
        """Return True if something waits for a connection."""
        traffic = self._traffic
        return (
            bool(self.in_flight.repeats)
            or traffic.backlog.has_any(self.role)
            or traffic.mapped_reads.has_part_locked(self)
        )

    def _send_next(self, requester: Requester) -> bool:
        """Wait for a part and send it, or finish one. Returns False when the link ended or the stream closes."""
        with self.lock:
            part = self._next_locked()
            copy: Part | None = None
            while part is None and not self._has_unfinished_part and not self._is_over_locked():
                copy = self._traffic.mapped_reads.claim_locked(self)
                if copy is not None:
                    break
                self._changed.wait()
                part = self._next_locked()
            unfinished, self._has_unfinished_part = self._has_unfinished_part, False
        if copy is not None:
            self._traffic.mapped_reads.copy(copy)
            return True
        if part is not None:
            status = self._send(requester.send, part)
        elif unfinished:
            part = self._sending
            assert part is not None
            status = self._send(requester.finish)
        else:
            return False
        with self.lock:
            ended = self._sent_locked(part, status)
            self._leave_if_idle_locked()
        self._traffic.settle(ended)
        return True

    def _next_locked(self) -> Part | None:
        """Begin and return the next part, if there is one and nothing is being sent."""
        if self._sending is not None or self._link_ended or self._closing:
            return None
        repeats = self.in_flight.repeats
        if not repeats and self.path is not None and self._is_full_locked(self.path):
            return None
        part = repeats.popleft() if repeats else self._traffic.take_locked(self)
        if part is not None:
            self.begin_locked(part)
        return part

    def _is_over_locked(self) -> bool:
        """Return True if the link must be cleaned up, and no caller is sending on it."""
        return (self._link_ended or self._closing) and self._sending is None

    def _send_goodbye(self) -> None:
        link = self._link
        if link is not None:
            with contextlib.suppress(OSError):
                link.send(Goodbye())

    def _sent_locked(self, part: Part, status: SendStatus) -> list[Operation]:
        """Record that the part's sending call has returned. Returns operations to settle."""
        self._sending = None
        if self._receiver_waits:
            self._receiver_waits = False
            self._changed.notify_all()
        if status is WHOLE and self.early_answered is None:
            return []
        is_answered, self.early_answered = self.early_answered is part, None
        if is_answered and status is WHOLE and not self._link_ended:
            self.in_flight.answered()
            return self._landed_locked(part, time.monotonic())
        if status is DONE:
            self.in_flight.ended(part)
            return self._landed_locked(part, time.monotonic())
        if status is UNABLE:
            self.in_flight.ended(part)
            return self._traffic.part_refused_locked(part, self._unsendable_reason, MemoryOutOfReach)
        return []

    def _landed_locked(self, part: Part, now_s: float) -> list[Operation]:
        operation = part.operation
        if part.transfer is not None:
            num_slices, seconds = len(part.transfer.slices), now_s - operation.started_s
            self._flows[operation.kind].add(part.nbytes, num_slices, seconds)
            if self.path is not None:
                self._path_flows[operation.kind].add(part.nbytes, num_slices, seconds)
        if part.notification is not None:
            self._counters.add("notifies_sent")
        return self._traffic.part_ended_locked(part, now_s)

    # Answers, on the thread that holds the receiving role.

    def is_sending(self, part: Part) -> bool:
        """Return True if the part's sending call has not returned. With or without the lock."""
        return self._sending is part

    def is_answered_early(self, operation: Operation) -> bool:
        """Return True if the operation's part was answered and its sender will settle it. With or without the lock."""
        early = self.early_answered
        return early is not None and early.operation is operation

    def await_sent(self, part: Part) -> None:
        """Wait until the oldest part in flight, which was answered, is not being sent any more.

        The call that sent the last byte may return after the answer arrived, and a faulty owner may answer a request
        that was not sent. Raises ProtocolError if no request was sent, LinkClosed if the link ends first.
        """
        with self.lock:
            self._receiver_waits = True
            self._changed.wait_for(lambda: self._sending is not part or self._link_ended)
            if self._link_ended:
                raise LinkClosed(f"the connection to {self.address} ended in the middle of a request")
            if part not in self.in_flight.sent:
                raise ProtocolError(f"{self.address} answered a request that was not sent")

    def acknowledged(self, parts: list[Part], *, more_at_hand: bool) -> None:
        """Record that the oldest parts in flight are done; empties the list.

        `more_at_hand`: the receiving thread has further messages to handle. If the last part's sending call has not
        returned, the part is kept as `early_answered`, since the call still uses its memory.
        """
        receiver = self._receiver
        with self.lock:
            self._answered = True
            if parts[-1] is self._sending:
                self.early_answered = parts.pop()
            ended = self._all_landed_locked(parts)
            if (
                receiver is not None
                and receiver.thread_holds
                and not more_at_hand
                and self._only_helpers_wait_locked(ended)
            ):
                receiver.stand_back_locked()
            self._wake_for_room_locked(parts)
            parts.clear()  # drop the references to memory before the futures report that it is free
        self._traffic.settle(ended)

    def _all_landed_locked(self, parts: Iterable[Part]) -> list[Operation]:
        now_s = time.monotonic()
        ended: list[Operation] = []
        sent = self.in_flight.sent
        for part in parts:
            if sent and sent[0] is part:  # a part that could not be sent has ended, whatever the owner answers
                self.in_flight.answered()
                ended += self._landed_locked(part, now_s)
        return ended

    def _wake_for_room_locked(self, answered: Iterable[Part]) -> None:
        """Wake the sending thread if an answer lets another part begin.

        The number of background parts in flight is bounded, and so are the bytes on one of several paths.
        """
        self.num_answers += 1
        if self._leaves_when_idle:
            self._leave_if_idle_locked()
        for part in answered:
            if part.operation.priority is BACKGROUND or self.path is not None:
                if self._traffic.has_part_locked(self):
                    self.wake_locked()
                return

    def _only_helpers_wait_locked(self, ended: Iterable[Operation]) -> bool:
        """Return True if a caller waited in `result` for one of these, and no pending answer needs the thread."""
        sent = self.in_flight.sent
        return (
            any(operation.awaited for operation in ended)
            and not self.in_flight.repeats
            and not self._traffic.backlog
            and len(sent) <= _MAX_PARTS_TO_SCAN
            and not any(part.operation.observed or part.operation.awaited for part in sent)
        )

    def next_step(self) -> None:
        """Record that the oldest part in flight was answered and takes another request."""
        with self.lock:
            self._answered = True
            self.in_flight.next_step()
            ended = self._traffic.drop_doomed_locked()
            self.wake_locked()
        self._traffic.settle(ended)

    def refused(self, part: Part, reason: str) -> None:
        """Record that the owner refused the oldest part in flight."""
        self._counters.add("refused")
        with self.lock:
            self._answered = True
            self.in_flight.answered()
            ended = self._traffic.part_refused_locked(part, reason)
            self._wake_for_room_locked([part])
        self._traffic.settle(ended)

    # The connection's end, on any thread.

    def cut_locked(self) -> None:
        """Cut the link to end an operation early: every thread that uses it returns soon."""
        if self._link is not None:
            self._was_cut_here = True
            self._link.cut()

    def cut_if_idle_locked(self) -> None:
        """Cut the link if it is connected and carries nothing: it is made again, and nothing is repeated."""
        if self._receiver is not None and not self.in_flight.sent:
            self.cut_locked()

    # Paths.

    def sampled_locked(self) -> tuple[Link | None, int]:
        """Return the connection's link and the bytes of its unanswered requests, at least 1 for each."""
        if self._receiver is None or self._link_ended:
            return None, 0
        return self._link, self.in_flight.nbytes + len(self.in_flight.sent)

    def leave_path_locked(self, reason: str) -> None:
        """Cut the connection, whose path is not used any more: the stream connects by another and repeats requests."""
        if self._link is not None and not self._link_ended:
            self.cause = f"its path was left: {reason}"
            self.cut_locked()

    def go_home_locked(self, home: int) -> None:
        """Connect again by the home path, which is in use again, once nothing is in flight; no new part begins."""
        if self._dialer.home == home and self.path not in (None, home):
            self._leaves_when_idle = True
            self._leave_if_idle_locked()

    def _leave_if_idle_locked(self) -> None:
        if self._leaves_when_idle and self._sending is None and not self.in_flight.sent:
            self.cut_locked()

    def end_link(self, error: BaseException) -> None:
        """Mark the connection as broken and cut it."""
        with self.lock:
            if not self._link_ended:  # later errors follow from the first and explain less
                self.cause = str(error) or type(error).__name__
            self._link_ended = True
            if self._link is not None:
                self._link.cut()
            if self._receiver is not None:
                self._receiver.end_locked()
            self._changed.notify_all()

    # The connection's beginning and cleanup, on the sending thread.

    def _connect(self) -> Requester | None:
        """Make a connection. Returns None if the stream closes, or if the peer is lost and everything has failed."""
        failures = 0
        while not self._gives_up(failures):
            try:
                dialed = self._dialer.dial(self._opened)
                self._begin_receiving(dialed)
                return dialed.requester
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
                    self._changed.wait_for(lambda: self._closing, _BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)])
                failures += 1
                continue
            except Exception as error:  # an invalid address, for example: the thread must survive it
                _log.warning("cannot connect to %s: %s", self.address, repr(error))
                self._lose(PeerUnreachable, f"cannot connect: {error}")
                return None
        return None

    def _gives_up(self, failures: int) -> bool:
        with self.lock:
            if self._closing:
                return True
            if self._has_work_locked() or failures < _IDLE_CONNECT_ATTEMPTS:
                return False
        # No operation waits, but users of this peer must learn that it does not answer. Other streams, and operations
        # submitted meanwhile, may still succeed.
        self._on_lost(self.cause)
        return True

    def _begin_receiving(self, dialed: Dialed) -> None:
        transport, link, requester, path = dialed
        peer = self._dialer.endpoint.node_id
        flows = {
            Kind.WRITE: self._counters.flow(peer=peer, transport=transport.name, direction="written"),
            Kind.READ: self._counters.flow(peer=peer, transport=transport.name, direction="read"),
        }
        path_flows = (
            {}
            if path is None
            else {
                Kind.WRITE: self._counters.flow(peer="", transport="tcp", direction="written", rail=f"path{path}"),
                Kind.READ: self._counters.flow(peer="", transport="tcp", direction="read", rail=f"path{path}"),
            }
        )
        receiver = Receiver(self, link, requester, f"{self._name}-receive")
        try:
            with self.lock:
                receiver.start()
                self._transport = transport
                self.transport = transport.name
                self._receiver = receiver
                self._requester = requester
                self._flows, self._path_flows = flows, path_flows
                self.path, self._leaves_when_idle = path, False
                self._link_ended = self._answered = self._was_cut_here = False
        except RuntimeError as error:
            link.close()
            raise OSError(f"cannot start a thread for the connection: {error}") from error
        self._counters.add("connects")
        self._on_connected()

    def _opened(self, link: Link) -> None:
        with self.lock:
            self._link = link
            if self._closing:
                link.cut()

    def _clean_up(self) -> None:
        """Take the connection down: drop the doomed parts and queue the others to be repeated.

        When this returns, no thread uses a part that was in flight.
        """
        link, receiver = self._link, self._receiver
        assert link is not None
        assert receiver is not None
        with self._log_errors("ending"):
            link.cut()
        with self.lock:
            receiver.end_locked()
        receiver.join()
        with self.lock:
            reset = bool(self.in_flight.sent)
            self._link = self._requester = None
        # Without the lock, since a transport may take its time. Nothing begins meanwhile: there is no requester.
        with self._log_errors("closing"):
            link.close(reset=reset)
        with self.lock:
            self._receiver = None
            self._link_ended = False
            self.path = None
            self._blame_oldest_locked()
            self.in_flight.connection_lost()
            ended = self._traffic.drop_doomed_locked()
        self._traffic.settle(ended)

    @contextlib.contextmanager
    def _log_errors(self, action: str) -> Iterator[None]:
        """Log errors of a connection's end, which must not prevent the cleanup or the next connection."""
        try:
            yield
        except Exception:
            _log.exception("%s the connection to %s failed", action, self.address)

    def _blame_oldest_locked(self) -> None:
        """Fail a request over which several connections in a row broke, so that it does not hold up the others."""
        if self._answered or not self.in_flight.sent:
            self._fruitless_links = 0
            return
        if self._was_cut_here:
            return
        oldest = self.in_flight.sent[0].operation
        if oldest.number != self._oldest_number:
            self._fruitless_links, self._oldest_number = 0, oldest.number
        self._fruitless_links += 1
        if self._fruitless_links >= _MAX_FRUITLESS_LINKS:
            self._fruitless_links = 0
            reason = f"{_MAX_FRUITLESS_LINKS} connections in a row broke over it, at last because {self.cause}"
            self._traffic.give_up_locked(oldest, reason)

    def _lose(self, kind: type[PeerLost], reason: str) -> None:
        self._on_lost(reason)
        with self.lock:
            self._link = None
            self.cause = reason
        self._traffic.lose(kind, reason)


class Receiver:
    """Receiver of the answers of one link, on a thread of its own or on a caller that waits for one of them.

    Only the holder of the receiving role uses the link's receiving side. The thread holds it at first. After an answer
    for which a caller waited in `result`, and if no observer waits for another one, the thread gives up the role: the
    next caller that waits in this way takes it and is woken by its own answer, which saves a change of threads. If an
    operation has another kind of observer (a callback, asyncio, a time limit, `result` on another thread), the thread
    is requested and keeps the role. In any case it takes the role when no thread has held it for `PARK_S`: this bounds
    the delay of an answer, and detects the connection's end without an observer. Messages that arrived together are
    handled together.

    States (guarded by the stream's lock):

        thread_holds, _held = True, True     the thread receives
        thread_holds, _held = False, True    the caller `_helper` receives
        thread_holds, _held = False, False   no thread does; the thread waits for `_requested` or for PARK_S
    """

    def __init__(self, stream: Stream, link: Link, requester: Requester, name: str) -> None:
        self._stream = stream
        self._link = link
        self._requester = requester
        self._changed = threading.Condition(stream.lock)
        self.thread_holds = False
        self._held = False
        self._helper = 0  # id of the calling thread that holds the role
        self._requested = False
        self._num_helped = 0
        self._num_helped_seen = 0
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread. Raises RuntimeError if the system cannot start one."""
        self._thread.start()

    def end_locked(self) -> None:
        """Make every holder leave, after the link was cut."""
        self._ended = True
        self._changed.notify_all()

    def join(self) -> None:
        """Wait until no thread receives. Must be called without the lock."""
        self._thread.join()
        with self._stream.lock:
            self._changed.wait_for(lambda: not self._held)

    def is_receiver_or_helper_thread(self) -> bool:
        """Return True on the receive thread, and on a caller that receives. With or without the lock."""
        own = threading.get_ident()
        return own in (self._helper, self._thread.ident)

    def is_held_by_current_thread(self) -> bool:
        """Return True if the calling thread holds the role, that is, inside a callback. With or without the lock."""
        own = threading.get_ident()
        return own == self._helper or (self.thread_holds and own == self._thread.ident)

    def request_thread_locked(self) -> None:
        """Have the thread receive, because an observer waits that does not receive."""
        if not self.thread_holds:
            self._requested = True
            if not self._held:
                self._changed.notify_all()

    def stand_back_locked(self) -> None:
        """Make the thread give up the role, for the next caller that waits in `result`."""
        if self.thread_holds:
            self.thread_holds = self._held = self._requested = False
            self._num_helped_seen = -1

    def receive_for(self, operation: Operation) -> None:
        """Receive on the calling thread until the operation is over, unless another thread receives. Without the lock.

        Raises InvalidArgument if the calling thread holds the role already (a callback waits for its own thread).
        """
        with self._stream.lock:
            # An operation that is wholly in flight here ends by an answer or by the link's end alone.
            may_help = operation.num_in_flight and operation.single and self._requester.always_answers(operation)
            if self.is_held_by_current_thread():
                raise InvalidArgument(SELF_WAIT_ERROR)
            if self._held or self._requested or self._ended or not may_help:
                operation.awaited = True
                self.request_thread_locked()
                return
            self._held = True
            self._helper = threading.get_ident()
        try:
            while operation.num_in_flight and not self._ended and not self._stream.is_answered_early(operation):
                self._receive()
        except BaseException as error:
            # An interrupt, perhaps in the middle of a frame.
            self._stream.end_link(error)
            raise
        finally:
            with self._stream.lock:
                self._held = False
                self._helper = 0
                self._num_helped += 1
                if not operation.settled:
                    operation.awaited = True
                    self._requested = True
                if self._requested or self._ended:
                    self._changed.notify_all()

    def _run(self) -> None:
        while self._take_role():
            while self.thread_holds and not self._ended:
                self._receive()
        with self._stream.lock:
            if self.thread_holds:
                self.thread_holds = self._held = False

    def _take_role(self) -> bool:
        """Wait until the thread is needed, and take the role. Returns False when the link has ended."""
        with self._stream.lock:
            while not self._ended:
                if not self._held and (self._requested or self._num_helped == self._num_helped_seen):
                    self._held = self.thread_holds = True
                    return True
                self._num_helped_seen = self._num_helped
                self._changed.wait(PARK_S)
            return False

    def _receive(self) -> None:
        """Receive and handle a message and those that arrived with it; with the role and without the lock."""
        stream, try_receive = self._stream, self._requester.try_receive
        landed: list[Part] = []
        more_at_hand = True
        try:
            try:
                message: Message | None = self._requester.receive(stream.in_flight.next_is_read())
                while message is not None:
                    self._handle(message, landed)
                    message = try_receive()
                more_at_hand = False
            finally:
                if landed:
                    stream.acknowledged(landed, more_at_hand=more_at_hand)
        except OSError as error:
            stream.end_link(error)
        except ProtocolError as error:
            _log.warning("closed the connection to %s: %s", self._link.address, str(error))
            stream.count("malformed_frames")
            stream.end_link(error)
        except Exception as error:
            _log.exception("receiving from %s failed", self._link.address)
            stream.end_link(error)

    def _handle(self, message: Message, landed: list[Part]) -> None:
        """Handle a message. A part that it completes is appended to `landed`, which is not reported yet."""
        requester, stream = self._requester, self._stream
        if type(message) is Ack and requester.takes_early_answers:
            # The most frequent case, without the checks that it does not need.
            part = stream.in_flight.waiting(len(landed))
            if (
                part is not None
                and part.seq == message.seq
                and part.operation.kind is WRITE
                and part is not stream.early_answered
            ):
                requester.accept(part, message)  # a write takes one step
                landed.append(part)
                return
        if isinstance(message, Offer):
            requester.offered(message)
            return
        if isinstance(message, KeyInfo):
            requester.key_info(message)
            return
        part = stream.in_flight.waiting(len(landed))
        if (
            part is None
            or not isinstance(message, _ANSWERS)
            or message.seq != part.seq
            or part is stream.early_answered
        ):
            raise ProtocolError(f"{self._link.address} sent {type(message).__name__}, which answers no pending request")
        takes_time = part.operation.kind is READ or isinstance(message, Refused)
        must_be_sent = stream.is_sending(part) and (takes_time or not requester.takes_early_answers)
        if landed and (takes_time or must_be_sent):
            # Report the parts before it first: they need not wait for its bytes.
            stream.acknowledged(landed, more_at_hand=True)
        if must_be_sent:
            stream.await_sent(part)
        if isinstance(message, Refused):
            requester.refused(part)
            stream.refused(part, message.reason)
        elif requester.accept(part, message):
            landed.append(part)
        else:
            stream.next_step()
