"""Handshake of rails, and what it refuses: other builds, mixed-up answers, invalid messages."""

from typing import Any

import msgpack
import pytest

from messenger.errors import ProtocolError
from messenger.frames import VERSION, Fabric, Notify
from messenger.rdma import handshake
from messenger.rdma.policy.facts import ETHERNET, Rail
from messenger.rdma.verbs.queue_pair import RemoteQueuePair
from messenger.transport import NoPath

RAIL = Rail("rxe0", 1, ETHERNET, 1, bytes(10) + b"\xff\xff\x0a\x4d\x00\x01", 120, 0, 4096, 2.5)
NONCE, OTHER = b"n" * 16, b"o" * 16


class Wire:
    """Hands over what is put into it."""

    address = "b at 10.0.0.2:1"

    def __init__(self, *messages: Any) -> None:
        self.messages = list(messages)

    def send(self, message: Any) -> None:
        self.messages.append(message)

    def receive(self) -> Any:
        return self.messages.pop(0)


def opening(**changes: Any) -> handshake.HandshakeOffer:
    fields = {"version": VERSION, "fingerprint": handshake.fingerprint(), "nonce": NONCE}
    return handshake.HandshakeOffer(**(fields | {"rails": handshake.packed_rails([RAIL])} | changes))


def answer(**changes: Any) -> handshake.HandshakeReply:
    fields = {"your_nonce": NONCE, "nonce": OTHER, "rails": handshake.packed_rails([RAIL]), "pairs": [[0, 0]]}
    return handshake.HandshakeReply(**(fields | {"inbox_address": 4096, "ends": [[17, 5, 9]]} | changes))


def test_what_is_said_is_heard() -> None:
    wire: Any = Wire()
    handshake.send(wire, opening())
    assert handshake.check_opening(handshake.receive(wire, handshake.HandshakeOffer)) == [RAIL]
    handshake.send(wire, answer())
    heard = handshake.receive(wire, handshake.HandshakeReply)
    assert handshake.check_answer(heard, NONCE, 1) == ([RAIL], [(0, 0)])
    assert handshake.check_ends(heard, 1) == [(RemoteQueuePair(17, 5), 9)]


@pytest.mark.parametrize("changes", [{"version": VERSION + 1}, {"fingerprint": b"another build..."}])
def test_another_version_or_build_is_no_path(changes: dict[str, Any]) -> None:
    with pytest.raises(NoPath, match="another version or build"):
        handshake.check_opening(opening(**changes))


@pytest.mark.parametrize("nonce", [OTHER, b"", b"n" * 15, "n" * 16, None])
def test_an_answer_to_another_connection_is_refused(nonce: Any) -> None:
    with pytest.raises(ProtocolError, match="another connection"):
        handshake.check_answer(answer(your_nonce=nonce), NONCE, 1)


def test_no_two_nonces_are_alike() -> None:
    assert len({handshake.new_nonce() for _ in range(100)}) == 100


def test_why_the_other_side_cannot_is_told() -> None:
    wire: Any = Wire()
    handshake.send(wire, handshake.HandshakeRefusal("no rail reaches you"))
    with pytest.raises(NoPath, match=r"b at 10.0.0.2:1: no rail reaches you"):
        handshake.receive(wire, handshake.HandshakeReply)


@pytest.mark.parametrize(
    "message",
    [
        Notify(1, b"t", b"p"),
        Fabric(b""),
        Fabric(b"\xc1"),
        Fabric(msgpack.packb([99, 1])),
        Fabric(msgpack.packb([3, NONCE, NONCE])),
        Fabric(msgpack.packb({"a": 1})),
        Fabric(msgpack.packb([3, NONCE])),
    ],
)
def test_anything_else_than_what_is_due_is_refused(message: Any) -> None:
    wire: Any = Wire(message)
    with pytest.raises(ProtocolError):
        handshake.receive(wire, handshake.HandshakeReply)


@pytest.mark.parametrize(
    "changes",
    [
        {"rails": []},
        {"rails": 7},
        {"rails": [["rxe0"]]},
        {"nonce": b"short"},
        {"pairs": []},
        {"pairs": [[0]]},
        {"pairs": [[0, 1]]},
        {"pairs": [[1, 0]]},
        {"pairs": [[-1, 0]]},
        {"pairs": [["0", 0]]},
    ],
)
def test_rails_and_pairs_that_cannot_be_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        handshake.check_answer(answer(**changes), NONCE, 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"ends": []},
        {"ends": [[17, 5]]},
        {"ends": [[0, 5, 9]]},
        {"ends": [[1 << 24, 5, 9]]},
        {"ends": [[17, 1 << 24, 9]]},
        {"ends": [["17", 5, 9]]},
        {"inbox_address": 0},
        {"inbox_address": 1 << 63},
        {"inbox_address": "here"},
    ],
)
def test_ends_that_cannot_be_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        handshake.check_ends(answer(**changes), 1)
