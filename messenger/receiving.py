"""Receiving the answers of one link: by a thread of its own, or by a caller that waits for one of them anyway.

Whoever receives holds the role; nobody else touches the link's receiving side meanwhile. At first the thread holds it.
After an answer for which a caller was waiting in `result`, and while nobody waits for another one, the thread stands
back for a moment: the next caller that waits so takes the role and wakes up by its own answer, which spares the change
of threads on the way back. As soon as somebody waits in another way (a callback, asyncio, a time limit, `result` on
another thread), the thread is called and keeps the role. In any case it takes it when nobody has had it for `PARK_S`:
so an answer is never left lying for longer, and a connection that ends is noticed although nobody waits for anything.
Answers that came together are taken together.
"""

import logging
import threading
from typing import TYPE_CHECKING

from messenger.errors import ProtocolError
from messenger.frames import Ack, Allow, Message, Offer, Refused
from messenger.link import Link
from messenger.operation import READ, WAITS_FOR_ITSELF, Operation, Part
from messenger.transport import Requester
from rpc.errors import InvalidArgument

if TYPE_CHECKING:
    from messenger.stream import Stream

__all__ = ["PARK_S", "Receiver"]

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
