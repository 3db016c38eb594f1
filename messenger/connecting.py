"""The connection of one stream: made, made again when it breaks, and cleaned up after; one thread does all of that.

A connection that breaks is made again and what was not answered is repeated under the same numbers, which the owner
recognises; a peer whose process is gone fails everything at once.
"""

import contextlib
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

from messenger.counters import Counters, Flow
from messenger.dialing import Dialer, Restarted, Unreachable
from messenger.errors import PeerLost, PeerRestarted, PeerUnreachable
from messenger.flight import Flight
from messenger.link import Link
from messenger.operation import Kind
from messenger.receiving import Receiver
from messenger.traffic import Traffic
from messenger.transport import Requester, Transport

__all__ = ["Connecting"]

_MAX_BARREN_LINKS = 4
_BACKOFF_S = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_PROBES_WHEN_IDLE = 3

_log = logging.getLogger(__name__)


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
