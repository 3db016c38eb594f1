"""Setting up one connection to a peer: connect, greet, and check that the expected incarnation answers.

A peer may be reachable by several transports. They are tried in order at every connection; the next one is tried only
if no messenger answers by the one before. (A unix socket may be invisible although its owner lives.) If the peer has
several addresses (`messenger.paths`), every transport over tcp is tried by each of them, the stream's home path first.
"""

import contextlib
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from messenger.config import Endpoint
from messenger.errors import EncryptionRefused, ProtocolError
from messenger.frames import ConnectionReject, Goodbye, Hello, Welcome
from messenger.link import BufferedLink, Link
from messenger.paths import PeerPaths, ProbeLinks
from messenger.transport import NoPath, Requester, Transport

ALTERNATIVE_S = 0.5
"""Time limit for connecting by a path while there is another one to try."""
PROBE_S = 1.0

_log = logging.getLogger(__name__)


class Unreachable(Exception):
    """Nothing, or another node, listens at the address; this incarnation will not return."""


class Restarted(Exception):
    """Another incarnation of the node answers."""


class Busy(OSError):
    """The peer rejected the connection for now."""


class Dialed(NamedTuple):
    """A connection. `path` is the index of the path that it uses; None if the peer has one address only."""

    transport: Transport
    link: Link
    requester: Requester
    path: int | None


class _Route(NamedTuple):
    """A transport and the address by which it is tried."""

    transport: Transport
    endpoint: Endpoint
    path: int | None


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
    paths: PeerPaths | None = None
    """Set if the peer has several addresses and tcp may be used."""
    home: int = 0
    """Path to prefer."""

    def dial(self, opened: Callable[[Link], None]) -> Dialed:
        """Connect and greet.

        `opened` is called with each link before anything blocks, so that it can be cut. Raises Unreachable or Restarted
        if a retry is useless, OSError if it may succeed.
        """
        gone: Unreachable | None = None
        failed: dict[int, str] = {}
        routes = self._routes()
        for number, route in enumerate(routes, start=1):
            has_other_path = number < len(routes) and routes[number].transport is route.transport
            try:
                dialed = self._dial(route, opened, ALTERNATIVE_S if has_other_path else self.timeout_s)
            except (Unreachable, PermissionError, NoPath) as error:
                _log.info("%s cannot be reached by %s: %s", self.endpoint.node_id, route.transport.name, error)
                if number == len(routes):
                    raise
                reason = str(error)
                gone = error if isinstance(error, Unreachable) and route.path is not None else gone
            except Busy:
                raise
            except OSError as error:
                if not has_other_path:
                    raise gone or error from None
                reason = str(error)
            else:
                for path, reason in failed.items():
                    self._report_failed(path, reason)
                return dialed
            if route.path is not None:
                failed[route.path] = f"cannot connect: {reason}"
        raise AssertionError("the last route raises or returns")

    def probe(self, path: int, probes: ProbeLinks) -> bool:
        """Return True if the peer answers a greeting by the path, on a connection that ends at once. Blocks."""
        transport, link = self.transports[-1], None
        route = _Route(transport, self.endpoint.by_path()[path], path)
        try:
            link = self._open(route)
            probes.opened(link)
            self._greet(route, link, PROBE_S, secrets.token_bytes(16))
            link.send(Goodbye())
        except Busy:
            return True
        except (OSError, Unreachable, Restarted):
            return False
        finally:
            if link is not None:
                probes.ended(link)
                link.close()
        return True

    def _routes(self) -> list[_Route]:
        if self.paths is None:
            return [_Route(transport, self.endpoint, None) for transport in self.transports]
        endpoints, order = self.endpoint.by_path(), self.paths.order(self.home)
        routes: list[_Route] = []
        for transport in self.transports:
            if transport.name == "shm":
                routes.append(_Route(transport, self.endpoint, None))
            else:
                routes += [_Route(transport, endpoints[path], path) for path in order]
        return routes

    def _report_failed(self, path: int, reason: str) -> None:
        if self.paths is not None:
            self.paths.dial_failed(path, reason)

    def _open(self, route: _Route) -> BufferedLink:
        transport, endpoint, _ = route
        return transport.wrap(transport.new_socket(endpoint), f"{endpoint.node_id} at {transport.address_of(endpoint)}")

    def _greet(self, route: _Route, link: BufferedLink, timeout_s: float, session: bytes) -> None:
        """Connect and greet on an open link. Raises Unreachable, Restarted or OSError."""
        link.set_timeout(timeout_s)
        try:
            link.connect(lambda sock: route.transport.connect(sock, route.endpoint))
        except (ConnectionRefusedError, FileNotFoundError) as error:
            raise Unreachable("nothing listens there: the process is gone; get the new endpoint") from error
        try:
            link.open()
        except EncryptionRefused as error:
            raise Unreachable(str(error)) from error
        # If the peer has rejected the connection already, its reason can still be received.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            link.send(self._hello(route.transport, session))
        self._check_answer(link)

    def _dial(self, route: _Route, opened: Callable[[Link], None], timeout_s: float) -> Dialed:
        transport = route.transport
        link = self._open(route)
        try:
            opened(link)
            self._greet(route, link, timeout_s, self.session)
            adopted = transport.adopt(link, caller=True)
            adopted.set_timeout(None)
            if adopted is not link:
                opened(adopted)
        except BaseException:
            link.close()
            raise
        path = route.path if transport.name == "tcp" else None
        return Dialed(transport, adopted, transport.requester(adopted), path)

    def _hello(self, transport: Transport, session: bytes) -> Hello:
        endpoint = self.endpoint
        return Hello(self.node_id, self.incarnation, endpoint.node_id, endpoint.incarnation, session, transport.name)

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
