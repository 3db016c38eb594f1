"""Identification of the server at another host's port: greets it like a messenger and reads the reply."""

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
_LARGE: Final = 16 << 10  # more than a packet of any size; the answer repeats it, so it tells of both ways
_IP_MTU: Final = 14  # ip(7)
_HTTP2_SETTINGS: Final = 4
_NOBODY: Final = "?"
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
    """`detail`: who it says it is, or what is wrong in its or our words; `seconds` until it answered."""

    spoken: PeerProtocol
    detail: str = ""
    encrypted: bool = False
    seconds: float = 0.0
    path_mtu: int = 0
    loses_large: bool = False


def greet(host: str, port: int, environ: Mapping[str, str] = os.environ, within_s: float = _ANSWER_S) -> Greeting:
    """Says hello in a small packet, and again in large ones where that was answered."""
    with ONE_AT_A_TIME:  # all that is imported below, too
        import messenger.sockets
        import messenger.tcp.tls_link  # noqa: F401

    material = _material(environ)
    small = _said((host, port), _NOBODY, material, within_s)
    if small.spoken is not PeerProtocol.MESSENGER:
        return small
    large = _said((host, port), _NOBODY * _LARGE, material, within_s)
    return replace(small, loses_large=large.spoken is PeerProtocol.NOTHING)


def judge_greeting(address: str, seen: Greeting) -> Verdict:
    detail = _shown(seen.detail)
    if seen.spoken is PeerProtocol.MESSENGER and seen.loses_large:
        found = f"{address} answers a small greeting ({detail}), and not one of {_LARGE >> 10} KiB"
        return Level.FAIL, found, _LARGE_ADVICE
    if seen.spoken is PeerProtocol.MESSENGER:
        how = "encrypted" if seen.encrypted else "in the clear"
        mtu = f", path MTU {seen.path_mtu}" if seen.path_mtu else ""
        return Level.OK, f"{address}: {detail}, {how}, answers after {1000 * seen.seconds:.3g} ms{mtu}", ""
    if seen.spoken is PeerProtocol.GRPC:
        return Level.OK, f"{address}: gRPC, as at a role's --listen; the port of its KV is another", ""
    return _LEVELS[seen.spoken], f"{address}: {detail}", _ADVICE[seen.spoken]


_LEVELS: Final = {PeerProtocol.CIPHER: Level.FAIL, PeerProtocol.OTHER: Level.WARN, PeerProtocol.NOTHING: Level.WARN}
_LARGE_ADVICE: Final = (
    "Full packets vanish on the way: its MTU is below this interface's, and the ICMP messages that would tell are "
    "filtered. Lower the interface's MTU, let ICMP pass, or set net.ipv4.tcp_mtu_probing=1."
)
_ADVICE: Final = {
    PeerProtocol.CIPHER: "Set tls_cert, tls_key and tls_ca, of one CA, on both sides, or on none.",
    PeerProtocol.OTHER: "Check that this is the port of a node of the same Moonpool.",
    PeerProtocol.NOTHING: "The port is open and nothing answers: is its process stopped, or is it another program's?",
}


def _material(environ: Mapping[str, str]) -> "Material | None":
    """None, too, for what cannot be used, which another check tells."""
    from rpc.errors import InvalidArgument
    from rpc.tls import TlsFiles, load

    with contextlib.suppress(ConfigError, InvalidArgument):
        files = TlsFiles.of(settings_of_environment(environ).tls)
        return None if files is None else load(files)
    return None


def _said(address: tuple[str, int], whom: str, material: "Material | None", within_s: float) -> Greeting:
    from messenger.errors import EncryptionRefused, ProtocolError
    from messenger.frames import Hello
    from messenger.sockets import SocketLink
    from messenger.tcp.tls_link import TlsLink

    with socket.create_connection(address, within_s) as sock:
        name = f"{address[0]}:{address[1]}"
        link = SocketLink(sock, name) if material is None else TlsLink(sock, name, material, caller=True)
        link.set_timeout(within_s)
        try:
            link.open()
            began_s = time.monotonic()
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                link.send(Hello("doctor", 1, whom, 0, bytes(16), "tcp"))
            if material is None and _is_http2(sock.recv(9, socket.MSG_PEEK)):
                return Greeting(PeerProtocol.GRPC)
            heard = _understood(link.receive())
            seconds = time.monotonic() - began_s
            return replace(heard, seconds=seconds, encrypted=material is not None, path_mtu=_path_mtu(sock))
        except EncryptionRefused as error:
            return Greeting(PeerProtocol.CIPHER, str(error))
        except ProtocolError as error:
            return Greeting(PeerProtocol.OTHER, f"no messenger of this version: {error}")
        except TimeoutError:
            return Greeting(PeerProtocol.NOTHING, f"takes the connection, and says nothing within {within_s:g} s")
        except OSError as error:
            return Greeting(PeerProtocol.OTHER, f"hangs up when it is greeted: {error}")
        finally:
            link.close()


def _understood(answer: object) -> Greeting:
    """Nobody's node is asked for, so that each messenger turns the greeting down, and says who it is."""
    from messenger.frames import VERSION, Reject

    if not isinstance(answer, Reject):
        return Greeting(PeerProtocol.OTHER, f"answers {answer!r}")
    if answer.code == "tls":
        return Greeting(PeerProtocol.CIPHER, answer.reason)
    who = answer.reason.partition(" listens here")[0] if answer.code == "restarted" else answer.reason
    return Greeting(PeerProtocol.MESSENGER, f"messenger of protocol {VERSION}, {who}")


def _shown(words: str) -> str:
    """Make a received text safe for a terminal: bounded, and without control characters."""
    shown = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in words[:_MOST_SHOWN])
    return shown if len(words) <= _MOST_SHOWN else f"{shown}…"


def _is_http2(beginning: bytes) -> bool:
    """A server's connection preface is a SETTINGS frame (RFC 9113, 3.4)."""
    return len(beginning) == 9 and beginning[3] == _HTTP2_SETTINGS and beginning[:2] == b"\0\0"


def _path_mtu(sock: socket.socket) -> int:
    """Return the kernel's value; 0 if it reports none."""
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
    """`address` as it was given; `detail` is the system's own word; `greeting`: what came of one, where it is open."""

    address: str
    answer: ConnectResult
    detail: str = ""
    greeting: Greeting | None = None


def split_address(text: str) -> tuple[str, int]:
    """("host", port) of "host:port" or "[v6]:port". Raises ValueError."""
    host, colon, port = text.rpartition(":")
    if not colon or not host.strip("[]") or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ValueError(f"{text!r} is not HOST:PORT")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ValueError(f"{text!r}: write an IPv6 address in brackets, [{host}]:{port}")
    return host.strip("[]"), int(port)


def observe_peer(address: str, within_s: float = _CONNECT_S) -> PeerProbe:
    """Connects, hangs up, and connects again to greet whoever is there."""
    host, port = split_address(address)
    try:
        with socket.create_connection((host, port), timeout=within_s):
            pass
        return PeerProbe(address, ConnectResult.OPEN, greeting=greet(host, port))
    except TimeoutError:
        answer, detail = ConnectResult.SILENT, f"nothing within {within_s:g} s"
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
                f"For RoCE v2 the firewalls between must also let UDP port {_ROCE_PORT} pass both ways, which shows "
                "only when a connection is made."
            )
            return Level.NOTE, found, advice
        return level, found, advice
    return Level.FAIL, f"{seen.address}: {seen.detail}", _PEER_ADVICE[seen.answer]


_PEER_ADVICE: Final = {
    ConnectResult.REFUSED: (
        "The host is there and nothing listens at the port: start the node, check its port and that it listens at an "
        "address others reach (--host, --data-host); a firewall that rejects looks the same."
    ),
    ConnectResult.SILENT: (
        "Packets vanish: a firewall drops them (the host's, the cloud's security group, a network policy), or the host "
        "is down; try from the host itself to tell which."
    ),
    ConnectResult.UNREACHABLE: "No route to the host, or a firewall blocks it: see `ip route get` and its rules.",
    ConnectResult.UNKNOWN: "Check the name, or give the address.",
    ConnectResult.OTHER: "Look at the address and the interfaces' state by hand.",
}


@dataclass(frozen=True)
class Tracking:
    """The kernel's table of connections; `most` 0 where nothing is tracked."""

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
    """With the peers to be tried."""
    return (Check("connection tracking", observe_tracking, judge_tracking), *map(_peer_check, addresses))
