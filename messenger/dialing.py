"""Setting up one connection to a peer: connect, greet, and check that the expected incarnation answers.

A peer may be reachable by several transports. They are tried in order at every connection; the next one is tried only
if no messenger answers by the one before. (A unix socket may be invisible although its owner lives.)
"""

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

from messenger.config import Endpoint
from messenger.errors import EncryptionRefused, ProtocolError
from messenger.frames import ConnectionReject, Hello, Welcome
from messenger.link import Link
from messenger.transport import NoPath, Requester, Transport

_log = logging.getLogger(__name__)


class Unreachable(Exception):
    """Nothing, or another node, listens at the address; this incarnation will not return."""


class Restarted(Exception):
    """Another incarnation of the node answers."""


class Busy(OSError):
    """The peer rejected the connection for now."""


@dataclass(frozen=True)
class Dialer:
    """Maker of the connections of one stream. `node_id` and `incarnation` are the caller's own."""

    transports: tuple[Transport, ...]
    """Transports to try, at least one, best first."""
    endpoint: Endpoint
    node_id: str
    incarnation: int
    session: bytes
    timeout_s: float

    def dial(self, opened: Callable[[Link], None]) -> tuple[Transport, Link, Requester]:
        """Connect and greet. Returns the transport, the link and its requester.

        `opened` is called with each link before anything blocks, so that it can be cut. Raises Unreachable or Restarted
        if a retry is useless, OSError if it may succeed.
        """
        *better, last = self.transports
        for transport in better:
            try:
                return self._dial(transport, opened)
            except (Unreachable, PermissionError, NoPath) as error:
                _log.info("%s cannot be reached by %s: %s", self.endpoint.node_id, transport.name, error)
        return self._dial(last, opened)

    def _dial(self, transport: Transport, opened: Callable[[Link], None]) -> tuple[Transport, Link, Requester]:
        address = transport.address_of(self.endpoint)
        link = transport.wrap(transport.new_socket(self.endpoint), f"{self.endpoint.node_id} at {address}")
        try:
            opened(link)
            link.set_timeout(self.timeout_s)
            try:
                link.connect(lambda sock: transport.connect(sock, self.endpoint))
            except (ConnectionRefusedError, FileNotFoundError) as error:
                raise Unreachable("nothing listens there: the process is gone; get the new endpoint") from error
            try:
                link.open()
            except EncryptionRefused as error:
                raise Unreachable(str(error)) from error
            # If the peer has rejected the connection already, its reason can still be received.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                link.send(self._hello(transport))
            self._check_answer(link)
            adopted = transport.adopt(link, caller=True)
            adopted.set_timeout(None)
            if adopted is not link:
                opened(adopted)
        except BaseException:
            link.close()
            raise
        return transport, adopted, transport.requester(adopted)

    def _hello(self, transport: Transport) -> Hello:
        endpoint = self.endpoint
        return Hello(
            self.node_id, self.incarnation, endpoint.node_id, endpoint.incarnation, self.session, transport.name
        )

    def _check_answer(self, link: Link) -> None:
        try:
            answer = link.receive()
        except EncryptionRefused as error:
            raise Unreachable(str(error)) from error
        except ProtocolError as error:
            raise Unreachable(f"no messenger of this protocol answers there: {error}") from error
        if isinstance(answer, ConnectionReject):
            if answer.code == "restarted":
                raise Restarted(answer.reason)
            if answer.code in ("full", "busy"):
                raise Busy(answer.reason)
            raise Unreachable(f"it rejects the greeting: {answer.reason}")
        expected = Welcome(self.endpoint.node_id, self.endpoint.incarnation)
        if answer != expected:
            raise Unreachable(f"expected {expected!r}, got {answer!r}")
