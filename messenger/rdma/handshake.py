"""Handshake over the socket in which two greeted peers agree on rails.

    caller    HandshakeOffer                    HandshakeConfirm
    owner                     HandshakeReply                      HandshakeReady

Either side may send HandshakeRefusal with a reason instead. Each side draws a nonce that the other must repeat, so that
a message of another connection is not accepted. The fingerprint covers the source of everything that must be the same
on both sides, so that another build of this package is detected before bytes move.
"""

import hashlib
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import msgpack

from messenger.errors import ProtocolError
from messenger.frames import VERSION, Fabric
from messenger.link import Link
from messenger.rdma.policy.facts import Rail, rail_from_wire, rail_to_wire
from messenger.rdma.verbs.queue_pair import RemoteQueuePair
from messenger.transport import NoPath

_MAX_RAILS: Final = 64
_MAX_ADDRESS: Final = 1 << 63
_END_LIMITS: Final = (1 << 24, 1 << 24, 1 << 32)  # of the hardware's numbers, in the order of `End`
_BOTH_SIDES: Final = ("connection_io.py", "handshake.py", "inbox.py", "memory.py", "requester.py", "responder.py")

End = tuple[int, int, int]
"""(number of a queue pair, its first packet sequence number, remote key of its frame memory)"""


class HandshakeOffer(NamedTuple):
    """Caller's first message: its protocol version, build and rails."""

    version: int
    fingerprint: bytes
    nonce: bytes
    rails: list[Any]


class HandshakeReply(NamedTuple):
    """Owner's reply: its rails, the pairs of rails, and its ends of these pairs."""

    your_nonce: bytes
    nonce: bytes
    rails: list[Any]
    pairs: list[Any]
    inbox_address: int
    ends: list[Any]


class HandshakeConfirm(NamedTuple):
    """Caller's ends of the pairs."""

    your_nonce: bytes
    inbox_address: int
    ends: list[Any]


class HandshakeReady(NamedTuple):
    """Owner's confirmation that its ends are connected."""

    your_nonce: bytes


class HandshakeRefusal(NamedTuple):
    """Refusal by either side, with the reason."""

    reason: str


_KINDS: Final = (HandshakeOffer, HandshakeReply, HandshakeConfirm, HandshakeReady, HandshakeRefusal)
HandshakeMessage = TypeVar("HandshakeMessage", HandshakeOffer, HandshakeReply, HandshakeConfirm, HandshakeReady)


def fingerprint() -> bytes:
    """Return the hash of this side's protocol and build."""
    digest = hashlib.blake2b(f"{VERSION}".encode(), digest_size=16)
    for name in _BOTH_SIDES:
        digest.update(Path(__file__).with_name(name).read_bytes())
    return digest.digest()


def new_nonce() -> bytes:
    return secrets.token_bytes(16)


def send(
    link: Link, message: HandshakeOffer | HandshakeReply | HandshakeConfirm | HandshakeReady | HandshakeRefusal
) -> None:
    """Send a message of the handshake."""
    link.send(Fabric(msgpack.packb((_KINDS.index(type(message)), *message))))


def receive(link: Link, kind: type[HandshakeMessage]) -> HandshakeMessage:
    """Receive a message of this kind. Raises NoPath for a refusal, ProtocolError for anything else."""
    frame = link.receive()
    if not isinstance(frame, Fabric):
        raise ProtocolError(f"{link.address} sent {type(frame).__name__} during the handshake of rails")
    try:
        fields = msgpack.unpackb(frame.payload, use_list=True)
        number, *values = fields
        message = _KINDS[number]._make(values)
    except (ValueError, TypeError, IndexError, msgpack.UnpackException) as error:
        raise ProtocolError(f"{link.address} sent an invalid message in the handshake of rails: {error}") from error
    if isinstance(message, HandshakeRefusal):
        raise NoPath(f"{link.address}: {message.reason!s}")
    if not isinstance(message, kind):
        raise ProtocolError(f"{link.address} sent {type(message).__name__}, expected {kind.__name__}")
    return message


def check_opening(opening: HandshakeOffer) -> list[Rail]:
    """Return the caller's rails. Raises NoPath for another build, ProtocolError for an invalid message."""
    if opening.version != VERSION or opening.fingerprint != fingerprint():
        raise NoPath("the caller has another version or build of the messenger: run the same on both sides")
    _require(_is_nonce(opening.nonce), "nonce")
    return _rails(opening.rails)


def check_answer(answer: HandshakeReply, nonce: bytes, num_rails: int) -> tuple[list[Rail], list[tuple[int, int]]]:
    """Return the owner's rails and the pairs (caller's rail, owner's rail). Raises ProtocolError."""
    check_nonce(answer.your_nonce, nonce)
    _require(_is_nonce(answer.nonce), "nonce")
    rails, pairs = _rails(answer.rails), answer.pairs
    _require(isinstance(pairs, list) and 0 < len(pairs) <= _MAX_RAILS, "list of pairs")
    for both in pairs:
        _require(isinstance(both, list) and [type(place) for place in both] == [int, int], "pair of rails")
        _require(0 <= both[0] < num_rails and 0 <= both[1] < len(rails), "pair of rails")
    return rails, [(mine, theirs) for mine, theirs in pairs]


def check_nonce(message: object, nonce: bytes) -> None:
    """Raise ProtocolError unless the other side repeats the nonce of this connection."""
    if not isinstance(message, bytes) or not secrets.compare_digest(message, nonce):
        raise ProtocolError("a message of another connection: its nonce is not the one that was sent")


def check_ends(message: HandshakeReply | HandshakeConfirm, count: int) -> list[tuple[RemoteQueuePair, int]]:
    """Return the remote end and the key of the remote inbox for each pair. Raises ProtocolError."""
    _require(type(message.inbox_address) is int and 0 < message.inbox_address < _MAX_ADDRESS, "inbox address")
    _require(isinstance(message.ends, list) and len(message.ends) == count, f"list of {count} ends")
    for end in message.ends:
        _require(isinstance(end, list) and len(end) == 3 and all(type(part) is int for part in end), "end")
        _require(all(0 <= part < most for part, most in zip(end, _END_LIMITS, strict=True)), "end")
    return [(RemoteQueuePair(qp_num, psn), rkey) for qp_num, psn, rkey in message.ends]


def packed_rails(rails: Sequence[Rail]) -> list[Any]:
    return [rail_to_wire(rail) for rail in rails]


def _rails(message: object) -> list[Rail]:
    _require(isinstance(message, list) and 0 < len(message) <= _MAX_RAILS, "list of rails")
    assert isinstance(message, list)
    return [rail_from_wire(one) for one in message]


def _is_nonce(message: object) -> bool:
    return isinstance(message, bytes) and len(message) == 16


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ProtocolError(f"a message in the handshake of rails has no valid {what}")
