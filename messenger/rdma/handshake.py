"""How two sides that have greeted each other agree on rails: what is said, in which order, over the socket.

caller: Opening, owner: Answer, caller: Confirm, owner: Ready; or Sorry with a reason instead of what is due. Each side
draws a nonce that the other must repeat, so that nothing said over another connection, or earlier, is taken for it. The
fingerprint is of all that both sides must do alike: another build of this package is found out before bytes move.
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
from messenger.rdma.verbs.queue_pair import Far
from messenger.transport import NoPath

_MAX_RAILS: Final = 64
_MAX_ADDRESS: Final = 1 << 63
_BOTH_SIDES: Final = ("courier.py", "handshake.py", "inbox.py", "memory.py", "requester.py", "responder.py")

End = tuple[int, int, int]
"""(number of a queue pair, its first packet, the key of the frames' memory there)"""


class Opening(NamedTuple):
    """The caller: what I am and which rails I have."""

    version: int
    fingerprint: bytes
    nonce: bytes
    rails: list[Any]


class Answer(NamedTuple):
    """The owner: which of your rails goes with which of mine, and my ends of these pairs."""

    your_nonce: bytes
    nonce: bytes
    rails: list[Any]
    pairs: list[Any]
    inbox_address: int
    ends: list[Any]


class Confirm(NamedTuple):
    """The caller: my ends of the pairs."""

    your_nonce: bytes
    inbox_address: int
    ends: list[Any]


class Ready(NamedTuple):
    """The owner: my ends are connected."""

    your_nonce: bytes


class Sorry(NamedTuple):
    """Either: it cannot be, and why."""

    reason: str


_KINDS: Final = (Opening, Answer, Confirm, Ready, Sorry)
Said = TypeVar("Said", Opening, Answer, Confirm, Ready)


def fingerprint() -> bytes:
    """Of this side's protocol and build."""
    digest = hashlib.blake2b(f"{VERSION}".encode(), digest_size=16)
    for name in _BOTH_SIDES:
        digest.update(Path(__file__).with_name(name).read_bytes())
    return digest.digest()


def new_nonce() -> bytes:
    return secrets.token_bytes(16)


def say(link: Link, said: Opening | Answer | Confirm | Ready | Sorry) -> None:
    link.send(Fabric(msgpack.packb((_KINDS.index(type(said)), *said))))


def hear(link: Link, kind: type[Said]) -> Said:
    """What is due. Raises NoPath where the other side is sorry, ProtocolError for anything else."""
    message = link.receive()
    if not isinstance(message, Fabric):
        raise ProtocolError(f"{link.address} sends {type(message).__name__} where rails are agreed on")
    try:
        fields = msgpack.unpackb(message.payload, use_list=True)
        number, *values = fields
        said = _KINDS[number]._make(values)
    except (ValueError, TypeError, IndexError, msgpack.UnpackException) as error:
        raise ProtocolError(f"{link.address} says something about rails that is nothing: {error}") from error
    if isinstance(said, Sorry):
        raise NoPath(f"{link.address}: {said.reason!s}")
    if not isinstance(said, kind):
        raise ProtocolError(f"{link.address} says {type(said).__name__} where {kind.__name__} was due")
    return said


def check_opening(opening: Opening) -> list[Rail]:
    """The caller's rails. Raises NoPath for another build, ProtocolError for nonsense."""
    if opening.version != VERSION or opening.fingerprint != fingerprint():
        raise NoPath("another version or build of the messenger calls: run the same on both sides")
    _require(_is_nonce(opening.nonce), "a nonce")
    return _rails(opening.rails)


def check_answer(answer: Answer, nonce: bytes, num_rails: int) -> tuple[list[Rail], list[tuple[int, int]]]:
    """The owner's rails, and the pairs (caller's, owner's). Raises ProtocolError."""
    check_nonce(answer.your_nonce, nonce)
    _require(_is_nonce(answer.nonce), "a nonce")
    rails, pairs = _rails(answer.rails), answer.pairs
    _require(isinstance(pairs, list) and 0 < len(pairs) <= _MAX_RAILS, "pairs")
    for both in pairs:
        _require(isinstance(both, list) and [type(place) for place in both] == [int, int], "a pair")
        _require(0 <= both[0] < num_rails and 0 <= both[1] < len(rails), "a pair of rails")
    return rails, [(mine, theirs) for mine, theirs in pairs]


def check_nonce(said: object, nonce: bytes) -> None:
    """Raises ProtocolError unless the other side repeats what it was told on this very connection."""
    if not isinstance(said, bytes) or not secrets.compare_digest(said, nonce):
        raise ProtocolError("an answer to another connection, or to none: its nonce is not the one that was sent")


def check_ends(said: Answer | Confirm, count: int) -> list[tuple[Far, int]]:
    """The far end and the key of the far inbox for each pair. Raises ProtocolError."""
    _require(type(said.inbox_address) is int and 0 < said.inbox_address < _MAX_ADDRESS, "an inbox")
    _require(isinstance(said.ends, list) and len(said.ends) == count, f"{count} ends")
    for end in said.ends:
        _require(isinstance(end, list) and len(end) == 3 and all(type(part) is int for part in end), "an end")
    return [(Far(qp_num, psn), rkey) for qp_num, psn, rkey in said.ends]


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
