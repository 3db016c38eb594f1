"""One ordered stream of requests to a peer: whoever sends on its connection, and what its answers mean.

Order: requests are sent, done and answered in the order in which they begin.

One at a time sends. Where nobody does, a caller sends its request itself, as far as the link takes it without waiting;
the rest, and what was queued meanwhile, is the sending thread's, which also connects, and cleans up after a connection.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from messenger.backlog import Role
from messenger.connecting import Connecting
from messenger.counters import Counters
from messenger.dialing import Dialer
from messenger.errors import MemoryOutOfReach, ProtocolError
from messenger.frames import Goodbye
from messenger.gpu import NotInHostMemory
from messenger.keys import RemoteKey
from messenger.link import Link, LinkClosed
from messenger.operation import READ, WAITS_FOR_ITSELF, Operation, Part, Transfer
from messenger.priority import BACKGROUND
from messenger.receiving import Receiver
from messenger.traffic import Traffic
from messenger.transport import DONE, PARTLY, UNABLE, WHOLE, Requester, Sent
from rpc.errors import InvalidArgument

if TYPE_CHECKING:
    from messenger.shm.loan import Loan

__all__ = ["Stream"]

_FEW = 32

_log = logging.getLogger(__name__)


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
