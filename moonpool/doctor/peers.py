"""Whether another host's node can be reached, and if not, how one can tell why; and the firewall's own books."""

import errno
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from moonpool.doctor.finding import Check, Level, Needs, Purpose, Verdict
from moonpool.doctor.greeting import Greeting, greet, judge_greeting

_CONNECT_S: Final = 2.0
_ROCE_PORT: Final = 4791
_FULL_FRACTION: Final = 0.8
_UNREACHABLE: Final = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EACCES, errno.EPERM)


class Answer(StrEnum):
    """What came back to an attempt to connect."""

    OPEN = "answers"
    REFUSED = "refused"
    SILENT = "no answer"
    UNREACHABLE = "unreachable"
    UNKNOWN = "unknown name"
    OTHER = "failed"


@dataclass(frozen=True)
class Peer:
    """`address` as it was given; `detail` is the system's own word; `greeting`: what came of one, where it is open."""

    address: str
    answer: Answer
    detail: str = ""
    greeting: Greeting | None = None


def split_address(text: str) -> tuple[str, int]:
    """("host", port) of "host:port" or "[v6]:port". Raises ValueError."""
    host, colon, port = text.rpartition(":")
    if not colon or not host.strip("[]") or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ValueError(f"{text!r} is no HOST:PORT")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ValueError(f"{text!r}: write an IPv6 address in brackets, [{host}]:{port}")
    return host.strip("[]"), int(port)


def observe_peer(address: str, within_s: float = _CONNECT_S) -> Peer:
    """Connects, hangs up, and connects again to greet whoever is there."""
    host, port = split_address(address)
    try:
        with socket.create_connection((host, port), timeout=within_s):
            pass
        return Peer(address, Answer.OPEN, greeting=greet(host, port))
    except TimeoutError:
        answer, detail = Answer.SILENT, f"nothing within {within_s:g} s"
    except ConnectionRefusedError as error:
        answer, detail = Answer.REFUSED, str(error.strerror)
    except socket.gaierror as error:
        answer, detail = Answer.UNKNOWN, str(error.strerror)
    except OSError as error:
        answer = Answer.UNREACHABLE if error.errno in _UNREACHABLE else Answer.OTHER
        detail = str(error.strerror or error)
    return Peer(address, answer, detail)


def judge_peer(seen: Peer, needs: Needs) -> Verdict:
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
    Answer.REFUSED: (
        "The host is there and nothing listens at the port: start the node, check its port and that it listens at an "
        "address others reach (--host, --data-host); a firewall that rejects looks the same."
    ),
    Answer.SILENT: (
        "Packets vanish: a firewall drops them (the host's, the cloud's security group, a network policy), or the host "
        "is down; try from the host itself to tell which."
    ),
    Answer.UNREACHABLE: "There is no way to the host, or a firewall forbids it: check `ip route get` and its rules.",
    Answer.UNKNOWN: "Check the name, or give the address.",
    Answer.OTHER: "Look at the address and the interfaces' state by hand.",
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
