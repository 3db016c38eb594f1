"""Handshake over the socket by which two greeted peers agree on rails.

The caller sends HandshakeOffer, the owner HandshakeReply, the caller HandshakeConfirm, the owner HandshakeReady. Either
side may send HandshakeRefusal with a reason instead. Each side draws a nonce that the other must repeat, so that a
message of another connection is not accepted. The fingerprint covers everything that both sides must do alike, so that
another build of this package is detected before bytes move.
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
_BOTH_SIDES: Final = ("connection_io.py", "handshake.py", "inbox.py", "memory.py", "requester.py", "responder.py")

End = tuple[int, int, int]
"""(number of a queue pair, its first packet, the key of the frames' memory there)"""


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


def say(
    link: Link, said: HandshakeOffer | HandshakeReply | HandshakeConfirm | HandshakeReady | HandshakeRefusal
) -> None:
    link.send(Fabric(msgpack.packb((_KINDS.index(type(said)), *said))))


def hear(link: Link, kind: type[HandshakeMessage]) -> HandshakeMessage:
    """Receive the message that is due. Raises NoPath for a refusal, ProtocolError for anything else."""
    message = link.receive()
    if not isinstance(message, Fabric):
        raise ProtocolError(f"{link.address} sends {type(message).__name__} where rails are agreed on")
    try:
        fields = msgpack.unpackb(message.payload, use_list=True)
        number, *values = fields
        said = _KINDS[number]._make(values)
    except (ValueError, TypeError, IndexError, msgpack.UnpackException) as error:
        raise ProtocolError(f"{link.address} says something about rails that is nothing: {error}") from error
    if isinstance(said, HandshakeRefusal):
        raise NoPath(f"{link.address}: {said.reason!s}")
    if not isinstance(said, kind):
        raise ProtocolError(f"{link.address} says {type(said).__name__} where {kind.__name__} was due")
    return said


def check_opening(opening: HandshakeOffer) -> list[Rail]:
    """Return the caller's rails. Raises NoPath for another build, ProtocolError for an invalid message."""
    if opening.version != VERSION or opening.fingerprint != fingerprint():
        raise NoPath("another version or build of the messenger calls: run the same on both sides")
    _require(_is_nonce(opening.nonce), "a nonce")
    return _rails(opening.rails)


def check_answer(answer: HandshakeReply, nonce: bytes, num_rails: int) -> tuple[list[Rail], list[tuple[int, int]]]:
    """Return the owner's rails and the pairs (caller's rail, owner's rail). Raises ProtocolError."""
    check_nonce(answer.your_nonce, nonce)
    _require(_is_nonce(answer.nonce), "a nonce")
    rails, pairs = _rails(answer.rails), answer.pairs
    _require(isinstance(pairs, list) and 0 < len(pairs) <= _MAX_RAILS, "pairs")
    for both in pairs:
        _require(isinstance(both, list) and [type(place) for place in both] == [int, int], "a pair")
        _require(0 <= both[0] < num_rails and 0 <= both[1] < len(rails), "a pair of rails")
    return rails, [(mine, theirs) for mine, theirs in pairs]


def check_nonce(said: object, nonce: bytes) -> None:
    """Raise ProtocolError unless the other side repeats the nonce of this connection."""
    if not isinstance(said, bytes) or not secrets.compare_digest(said, nonce):
        raise ProtocolError("an answer to another connection, or to none: its nonce is not the one that was sent")


def check_ends(said: HandshakeReply | HandshakeConfirm, count: int) -> list[tuple[RemoteQueuePair, int]]:
    """Return the remote end and the key of the remote inbox for each pair. Raises ProtocolError."""
    _require(type(said.inbox_address) is int and 0 < said.inbox_address < _MAX_ADDRESS, "an inbox")
    _require(isinstance(said.ends, list) and len(said.ends) == count, f"{count} ends")
    for end in said.ends:
        _require(isinstance(end, list) and len(end) == 3 and all(type(part) is int for part in end), "an end")
    return [(RemoteQueuePair(qp_num, psn), rkey) for qp_num, psn, rkey in said.ends]


def packed_rails(rails: Sequence[Rail]) -> list[Any]:
    return [rail_to_wire(rail) for rail in rails]


def _rails(said: object) -> list[Rail]:
    _require(isinstance(said, list) and 0 < len(said) <= _MAX_RAILS, "rails")
    assert isinstance(said, list)
    return [rail_from_wire(one) for one in said]


def _is_nonce(said: object) -> bool:
    return isinstance(said, bytes) and len(said) == 16


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ProtocolError(f"what was said about rails lacks {what} that can be")
