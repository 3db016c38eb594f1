"""Writes whose notification's payload is computed while the bytes are on their way."""

from collections.abc import Callable
from typing import Any

import pytest

from messenger import InvalidArgument, MessengerClosed, RemoteAccessError, TransferCancelled
from messenger.frames import MAX_NOTIFY_NBYTES
from messenger.peer import SPREAD_NBYTES, WRITE_AHEAD_NBYTES

LARGE = 4 * WRITE_AHEAD_NBYTES
SPREAD = 2 * SPREAD_NBYTES


@pytest.mark.parametrize("nbytes", [LARGE, SPREAD])
def test_bytes_arrive_before_the_payload_is_computed_and_the_notification_after_both(
    make_node: Any, wait_until: Callable[..., None], nbytes: int
) -> None:
    a, b = make_node("a", nbytes), make_node("b", nbytes)
    a.array[:] = 1

    def payload() -> bytes:
        wait_until(lambda: bool(b.array.all()), "all bytes have arrived")
        assert b.notes == []
        return b"late"

    peer = a.messenger.connect(b.endpoint)
    assert peer.write_notify(b.grant(), a.region, [[0, 0, nbytes]], b"t", payload).result().nbytes == nbytes
    assert b.notes == [("a", b"t", b"late")]


@pytest.mark.parametrize("nbytes", [1, WRITE_AHEAD_NBYTES - 1, LARGE, SPREAD])
@pytest.mark.parametrize(
    ("payload", "error"),
    [(lambda: 1 // 0, ZeroDivisionError), (lambda: bytes(MAX_NOTIFY_NBYTES + 1), InvalidArgument)],
    ids=["raises", "too long"],
)
def test_a_payload_that_fails_fails_the_write_and_nothing_else(
    make_node: Any, nbytes: int, payload: Any, error: type[Exception]
) -> None:
    a, b = make_node("a", nbytes), make_node("b", nbytes)
    peer, key = a.messenger.connect(b.endpoint), b.grant()
    with pytest.raises(error):
        peer.write_notify(key, a.region, [[0, 0, nbytes]], b"never", payload).result()
    assert a.messenger.validate() == []
    peer.write_notify(key, a.region, [[0, 0, nbytes]], b"t", lambda: b"next").result()
    assert b.notes == [("a", b"t", b"next")]


def test_an_interrupt_in_the_payload_reaches_the_caller_and_ends_the_write(make_node: Any) -> None:
    a, b = make_node("a", LARGE), make_node("b", LARGE)
    peer = a.messenger.connect(b.endpoint)

    def interrupted() -> bytes:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        peer.write_notify(b.grant(), a.region, [[0, 0, LARGE]], b"never", interrupted)
    assert b.notes == []


@pytest.mark.parametrize("nbytes", [100, LARGE, SPREAD])
def test_a_refused_write_is_not_announced(make_node: Any, nbytes: int) -> None:
    a, b = make_node("a", nbytes), make_node("b", nbytes)
    peer, key = a.messenger.connect(b.endpoint), b.grant()
    b.messenger.revoke(key)
    with pytest.raises(RemoteAccessError):
        peer.write_notify(key, a.region, [[0, 0, nbytes]], b"never", lambda: b"").result()
    peer.notify(b"end", b"").result()
    assert [tag for _, tag, _ in b.notes] == [b"end"]


def test_a_key_that_is_revoked_before_the_payload_is_computed_announces_nothing(make_node: Any) -> None:
    a, b = make_node("a", LARGE), make_node("b", LARGE)
    peer, key = a.messenger.connect(b.endpoint), b.grant()

    def payload() -> bytes:
        b.messenger.revoke(key)
        return b""

    with pytest.raises(RemoteAccessError):
        peer.write_notify(key, a.region, [[0, 0, LARGE]], b"never", payload).result()
    assert b.notes == []


@pytest.mark.parametrize("nbytes", [LARGE, SPREAD])
def test_a_write_ends_early_while_its_payload_is_computed(make_node: Any, nbytes: int) -> None:
    a, b = make_node("a", nbytes), make_node("b", nbytes)
    peer = a.messenger.connect(b.endpoint)

    def payload() -> bytes:
        a.messenger.close()
        return b""

    with pytest.raises(MessengerClosed):
        peer.write_notify(b.grant(), a.region, [[0, 0, nbytes]], b"never", payload).result()
    assert b.notes == []
    with pytest.raises(MessengerClosed):
        peer.write_notify(b.grant(), a.region, [[0, 0, nbytes]], b"never", lambda: b"").result()


def test_a_deadline_that_passes_while_the_payload_is_computed_fails_the_write(
    make_node: Any, wait_until: Callable[..., None]
) -> None:
    a, b = make_node("a", LARGE), make_node("b", LARGE)
    peer = a.messenger.connect(b.endpoint)

    def payload() -> bytes:
        wait_until(lambda: a.messenger.counters().get("deadlines_exceeded", 0) == 1, "the deadline has passed")
        return b""

    future = peer.write_notify(b.grant(), a.region, [[0, 0, LARGE]], b"never", payload, deadline_s=0.3)
    assert not isinstance(future.exception(), TransferCancelled | None)
    assert b.notes == []
