"""Checks of other hosts: connecting to a port, the protocol spoken there, and the connection tracking table."""

import contextlib
import errno
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final

from moonpool.doctor.checks import ONE_AT_A_TIME, Check, Level, Needs, Purpose, Verdict
from moonpool.errors import ConfigError
from moonpool.transport_security import settings_of_environment

if TYPE_CHECKING:
    from rpc.tls import Material


_ANSWER_S: Final = 0.8
_LARGE: Final = 16 << 10  # larger than any packet
_IP_MTU: Final = 14  # ip(7)
_HTTP2_SETTINGS: Final = 4
_NOBODY: Final = "?"  # id of no node: every messenger rejects it
_MOST_SHOWN: Final = 300


class PeerProtocol(StrEnum):
    """Protocol that the other side speaks."""

    MESSENGER = "messenger"
    GRPC = "gRPC"
    CIPHER = "another encryption"
    OTHER = "something else"
    NOTHING = "nothing"


@dataclass(frozen=True)
class Greeting:
    """Result of a greeting. `detail` is the peer's own description, or an error; `seconds` is its response time."""

    spoken: PeerProtocol
    detail: str = ""
    encrypted: bool = False
    seconds: float = 0.0
    path_mtu: int = 0
    loses_large: bool = False


def greet(host: str, port: int, environ: Mapping[str, str] = os.environ, within_s: float = _ANSWER_S) -> Greeting:
    """Send a small greeting as a messenger does, and, if a messenger answers, a large one of several packets."""
    with ONE_AT_A_TIME:  # includes the imports of the functions called below
        import messenger.sockets
        import messenger.tcp.tls_link  # noqa: F401

    material = _material(environ)
    small = _greeted((host, port), _NOBODY, material, within_s)
    if small.spoken is not PeerProtocol.MESSENGER:
        return small
    large = _greeted((host, port), _NOBODY * _LARGE, material, within_s)
    return replace(small, loses_large=large.spoken is PeerProtocol.NOTHING)


def judge_greeting(address: str, seen: Greeting) -> Verdict:
    detail = _printable(seen.detail)
    if seen.spoken is PeerProtocol.MESSENGER and seen.loses_large:
        found = f"{address} answers a small greeting ({detail}), but not one of {_LARGE >> 10} KiB"
        return Level.FAIL, found, _LARGE_ADVICE
    if seen.spoken is PeerProtocol.MESSENGER:
        how = "encrypted" if seen.encrypted else "unencrypted"
        mtu = f", path MTU {seen.path_mtu}" if seen.path_mtu else ""
        return Level.OK, f"{address}: {detail}, {how}, answers after {1000 * seen.seconds:.3g} ms{mtu}", ""
    if seen.spoken is PeerProtocol.GRPC:
        return Level.OK, f"{address}: gRPC, as at a role's --listen; KV uses another port", ""
    return _LEVELS[seen.spoken], f"{address}: {detail}", _ADVICE[seen.spoken]


_LEVELS: Final = {PeerProtocol.CIPHER: Level.FAIL, PeerProtocol.OTHER: Level.WARN, PeerProtocol.NOTHING: Level.WARN}
_LARGE_ADVICE: Final = (
    "Full-sized packets are lost: the path's MTU is below this interface's, and the ICMP messages that would report it "
    "are filtered. Lower the interface's MTU, allow ICMP, or set net.ipv4.tcp_mtu_probing=1."
)
_ADVICE: Final = {
    PeerProtocol.CIPHER: "Set tls_cert, tls_key and tls_ca, with the same CA, on both sides or on neither.",
    PeerProtocol.OTHER: "Check that this is the port of a node with the same version of Moonpool.",
    PeerProtocol.NOTHING: "The port is open, but nothing answers: check the process that listens there.",
}


def _material(environ: Mapping[str, str]) -> "Material | None":
    """Return the environment's TLS files; None if there are none or they are unusable, which another check reports."""
    from rpc.errors import InvalidArgument
    from rpc.tls import TlsFiles, load

    with contextlib.suppress(ConfigError, InvalidArgument):
        files = TlsFiles.of(settings_of_environment(environ).tls)
        return None if files is None else load(files)
    return None


def _greeted(address: tuple[str, int], name: str, material: "Material | None", within_s: float) -> Greeting:
    from messenger.errors import EncryptionRefused, ProtocolError
    from messenger.frames import Hello
    from messenger.sockets import SocketLink
    from messenger.tcp.tls_link import TlsLink

    with socket.create_connection(address, within_s) as sock:
        peer = f"{address[0]}:{address[1]}"
        link = SocketLink(sock, peer) if material is None else TlsLink(sock, peer, material, caller=True)
        link.set_timeout(within_s)
        try:
            link.open()
            began_s = time.monotonic()
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                link.send(Hello("doctor", 1, name, 0, bytes(16), "tcp"))
            if material is None and _is_http2(sock.recv(9, socket.MSG_PEEK)):
                return Greeting(PeerProtocol.GRPC)
            greeting = _interpreted(link.receive())
            seconds = time.monotonic() - began_s
            return replace(greeting, seconds=seconds, encrypted=material is not None, path_mtu=_path_mtu(sock))
        except EncryptionRefused as error:
            return Greeting(PeerProtocol.CIPHER, str(error))
        except ProtocolError as error:
            return Greeting(PeerProtocol.OTHER, f"not a messenger of this version: {error}")
        except TimeoutError:
            return Greeting(PeerProtocol.NOTHING, f"accepts the connection, but sends no reply within {within_s:g} s")
        except OSError as error:
            # A gRPC server that has read the greeting before it sends its SETTINGS closes without sending them.
            if material is None and _begins_http2(address, within_s):
                return Greeting(PeerProtocol.GRPC)
            return Greeting(PeerProtocol.OTHER, f"closes the connection after a greeting: {error}")
        finally:
            link.close()


def _interpreted(answer: object) -> Greeting:
    """Interpret the reply to a greeting of `_NOBODY`, which a messenger rejects without naming itself."""
    from messenger.frames import VERSION, ConnectionReject

    if not isinstance(answer, ConnectionReject):
        return Greeting(PeerProtocol.OTHER, f"answers {answer!r}")
    if answer.code == "tls":
        return Greeting(PeerProtocol.CIPHER, answer.reason)
    reason = "" if answer.code == "restarted" else f", {answer.reason}"
    return Greeting(PeerProtocol.MESSENGER, f"messenger of protocol {VERSION}{reason}")


def _printable(text: str) -> str:
    """Make a received text safe for a terminal: bounded, and without control characters."""
    safe = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text[:_MOST_SHOWN])
    return safe if len(text) <= _MOST_SHOWN else f"{safe}…"


def _is_http2(beginning: bytes) -> bool:
    """Return True for the header of a SETTINGS frame, with which an HTTP/2 server begins (RFC 9113, section 3.4)."""
    return len(beginning) == 9 and beginning[3] == _HTTP2_SETTINGS and beginning[:2] == b"\0\0"


def _begins_http2(address: tuple[str, int], within_s: float) -> bool:
    """Return True if the server sends an HTTP/2 SETTINGS frame to a client that has sent nothing."""
    try:
        with socket.create_connection(address, within_s) as sock:
            return _is_http2(sock.recv(9, socket.MSG_WAITALL))
    except OSError:
        return False


def _path_mtu(sock: socket.socket) -> int:
    """Return the path MTU in bytes as the kernel knows it; 0 if unknown."""
    try:
        return sock.getsockopt(socket.IPPROTO_IP, _IP_MTU) if sock.family == socket.AF_INET else 0
    except OSError:
        return 0


_CONNECT_S: Final = 2.0
_ROCE_PORT: Final = 4791
_FULL_FRACTION: Final = 0.8
_UNREACHABLE: Final = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EACCES, errno.EPERM)


class ConnectResult(StrEnum):
    """Result of an attempt to connect."""

    OPEN = "answers"
    REFUSED = "refused"
    SILENT = "no answer"
    UNREACHABLE = "unreachable"
    UNKNOWN = "unknown name"
    OTHER = "failed"


@dataclass(frozen=True)
class PeerProbe:
    """Result of probing a peer. `detail` is the operating system's error; `greeting` is set if the port is open."""

    address: str
    answer: ConnectResult
    detail: str = ""
    greeting: Greeting | None = None


def split_address(text: str) -> tuple[str, int]:
    """Split "host:port" or "[v6]:port" into host and port. Raises ValueError."""
    host, colon, port = text.rpartition(":")
    if not colon or not host.strip("[]") or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ValueError(f"a peer must be HOST:PORT, got {text!r}")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ValueError(f"an IPv6 address must be in brackets, such as [{host}]:{port}, got {text!r}")
    return host.strip("[]"), int(port)


def observe_peer(address: str, within_s: float = _CONNECT_S) -> PeerProbe:
    """Connect to the address; if that succeeds, connect again and send a greeting."""
    host, port = split_address(address)
    try:
        with socket.create_connection((host, port), timeout=within_s):
            pass
        return PeerProbe(address, ConnectResult.OPEN, greeting=greet(host, port))
    except TimeoutError:
        answer, detail = ConnectResult.SILENT, f"no answer within {within_s:g} s"
    except ConnectionRefusedError as error:
        answer, detail = ConnectResult.REFUSED, str(error.strerror)
    except socket.gaierror as error:
        answer, detail = ConnectResult.UNKNOWN, str(error.strerror)
    except OSError as error:
        answer = ConnectResult.UNREACHABLE if error.errno in _UNREACHABLE else ConnectResult.OTHER
        detail = str(error.strerror or error)
    return PeerProbe(address, answer, detail)


def judge_peer(seen: PeerProbe, needs: Needs) -> Verdict:
    if seen.greeting is not None:
        level, found, advice = judge_greeting(seen.address, seen.greeting)
        if level is Level.OK and Purpose.RDMA in needs:
            advice = (
                f"RoCE v2 also needs UDP port {_ROCE_PORT} open in both directions in all firewalls; this check cannot "
                "test it."
            )
            return Level.NOTE, found, advice
        return level, found, advice
    return Level.FAIL, f"{seen.address}: {seen.detail}", _PEER_ADVICE[seen.answer]


_PEER_ADVICE: Final = {
    ConnectResult.REFUSED: (
        "The host is up, but nothing listens on the port, or a firewall rejects the connection: start the node, and "
        "check that it listens on an address that other hosts can reach (--host, --data-host)."
    ),
    ConnectResult.SILENT: (
        "Packets are lost: a firewall drops them (the host's, the cloud's security group, a network policy), or the "
        "host is down. Try to connect from the host itself to find out which."
    ),
    ConnectResult.UNREACHABLE: "No route to the host, or a firewall blocks it: check `ip route get` and the firewall.",
    ConnectResult.UNKNOWN: "Check the name, or use an IP address.",
    ConnectResult.OTHER: "Check the address, and the state of the interfaces.",
}


@dataclass(frozen=True)
class Tracking:
    """The kernel's connection tracking table; `most` is 0 if it tracks none."""

    count: int
    most: int


def observe_tracking(root: Path = Path("/")) -> Tracking:
    folder = root / "proc/sys/net/netfilter"
    return Tracking(_number(folder / "nf_conntrack_count"), _number(folder / "nf_conntrack_max"))


def judge_tracking(seen: Tracking, needs: Needs) -> Verdict:
    if not seen.most:
        return Level.OK, "the kernel tracks no connections", ""
    found = f"{seen.count} of {seen.most} connections"
    if seen.count >= _FULL_FRACTION * seen.most:
        advice = "Raise net.netfilter.nf_conntrack_max: when the table is full, new connections are dropped silently."
        return Level.WARN, found, advice
    return Level.OK, found, ""


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def _peer_check(address: str) -> Check:
    return Check(f"peer {address}", lambda: observe_peer(address), judge_peer)


def checks(addresses: Sequence[str]) -> tuple[Check, ...]:
    """Return the check of the tracking table, and one for each peer HOST:PORT."""
    return (Check("connection tracking", observe_tracking, judge_tracking), *map(_peer_check, addresses))
