"""What speaks at another host's port: greets it as a messenger does, for nobody's node, and reads what comes back."""

import contextlib
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from moonpool.doctor.finding import Level, Verdict
from moonpool.doctor.importing import ONE_AT_A_TIME
from moonpool.encryption import settings_of_environment
from moonpool.errors import ConfigError

if TYPE_CHECKING:
    from rpc.tls import Material

_ANSWER_S: Final = 0.8
_LARGE: Final = 16 << 10  # more than a packet of any size; the answer repeats it, so it tells of both ways
_IP_MTU: Final = 14  # ip(7)
_HTTP2_SETTINGS: Final = 4
_NOBODY: Final = "?"
_MOST_SHOWN: Final = 300


class Spoken(StrEnum):
    """What the other side turned out to speak."""

    MESSENGER = "messenger"
    GRPC = "gRPC"
    CIPHER = "another encryption"
    OTHER = "something else"
    NOTHING = "nothing"


@dataclass(frozen=True)
class Greeting:
    """`detail`: who it says it is, or what is wrong in its or our words; `seconds` until it answered."""

    spoken: Spoken
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
    if small.spoken is not Spoken.MESSENGER:
        return small
    large = _said((host, port), _NOBODY * _LARGE, material, within_s)
    return replace(small, loses_large=large.spoken is Spoken.NOTHING)


def judge_greeting(address: str, seen: Greeting) -> Verdict:
    detail = _shown(seen.detail)
    if seen.spoken is Spoken.MESSENGER and seen.loses_large:
        found = f"{address} answers a small greeting ({detail}), and not one of {_LARGE >> 10} KiB"
        return Level.FAIL, found, _LARGE_ADVICE
    if seen.spoken is Spoken.MESSENGER:
        how = "encrypted" if seen.encrypted else "in the clear"
        mtu = f", path MTU {seen.path_mtu}" if seen.path_mtu else ""
        return Level.OK, f"{address}: {detail}, {how}, answers after {1000 * seen.seconds:.3g} ms{mtu}", ""
    if seen.spoken is Spoken.GRPC:
        return Level.OK, f"{address}: gRPC, as at a role's --listen; the port of its KV is another", ""
    return _LEVELS[seen.spoken], f"{address}: {detail}", _ADVICE[seen.spoken]


_LEVELS: Final = {Spoken.CIPHER: Level.FAIL, Spoken.OTHER: Level.WARN, Spoken.NOTHING: Level.WARN}
_LARGE_ADVICE: Final = (
    "Full packets vanish on the way: its MTU is below this interface's, and the ICMP messages that would tell are "
    "filtered. Lower the interface's MTU, let ICMP pass, or set net.ipv4.tcp_mtu_probing=1."
)
_ADVICE: Final = {
    Spoken.CIPHER: "Set tls_cert, tls_key and tls_ca, of one CA, on both sides, or on none.",
    Spoken.OTHER: "Check that this is the port of a node of the same Moonpool.",
    Spoken.NOTHING: "The port is open and nobody greets back: is its process stopped, or is it another program's?",
}


def _material(environ: Mapping[str, str]) -> "Material | None":
    """None, too, for what cannot be used, which another check tells."""
    from rpc.errors import InvalidArgument
    from rpc.tls import load

    with contextlib.suppress(ConfigError, InvalidArgument):
        files = settings_of_environment(environ).tls.files
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
                return Greeting(Spoken.GRPC)
            heard = _understood(link.receive())
            seconds = time.monotonic() - began_s
            return replace(heard, seconds=seconds, encrypted=material is not None, path_mtu=_path_mtu(sock))
        except EncryptionRefused as error:
            return Greeting(Spoken.CIPHER, str(error))
        except ProtocolError as error:
            return Greeting(Spoken.OTHER, f"no messenger of this version: {error}")
        except TimeoutError:
            return Greeting(Spoken.NOTHING, f"takes the connection, and says nothing within {within_s:g} s")
        except OSError as error:
            return Greeting(Spoken.OTHER, f"hangs up when it is greeted: {error}")
        finally:
            link.close()


def _understood(answer: object) -> Greeting:
    """Nobody's node is asked for, so that each messenger turns the greeting down, and says who it is."""
    from messenger.frames import VERSION, Reject

    if not isinstance(answer, Reject):
        return Greeting(Spoken.OTHER, f"answers {answer!r}")
    if answer.code == "tls":
        return Greeting(Spoken.CIPHER, answer.reason)
    who = answer.reason.partition(" listens here")[0] if answer.code == "restarted" else answer.reason
    return Greeting(Spoken.MESSENGER, f"messenger of protocol {VERSION}, {who}")


def _shown(words: str) -> str:
    """What anybody may have said, for a terminal: no more than is read, and nothing that moves its cursor."""
    shown = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in words[:_MOST_SHOWN])
    return shown if len(words) <= _MOST_SHOWN else f"{shown}…"


def _is_http2(beginning: bytes) -> bool:
    """A server's connection preface is a SETTINGS frame (RFC 9113, 3.4)."""
    return len(beginning) == 9 and beginning[3] == _HTTP2_SETTINGS and beginning[:2] == b"\0\0"


def _path_mtu(sock: socket.socket) -> int:
    """What the kernel takes it for; 0 where it does not tell."""
    try:
        return sock.getsockopt(socket.IPPROTO_IP, _IP_MTU) if sock.family == socket.AF_INET else 0
    except OSError:
        return 0
