"""Access control: keys, rights and bounds; a refused operation touches nothing."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from messenger import (
    InvalidArgument,
    RemoteAccessError,
    RemoteKey,
)
from messenger.frames import Ack, Refused, Write

NBYTES = 1 << 16


@pytest.fixture
def pair(pair: Any) -> Any:
    a, b = pair
    a.array[:], b.array[:] = 1, 2
    return a, b


def test_a_key_survives_packing(pair: Any) -> None:
    key = pair[1].messenger.grant(pair[1].region, 5, 10, read=True, write=False)
    assert RemoteKey.unpack(key.pack()) == key
    with pytest.raises(InvalidArgument):
        RemoteKey.unpack(key.pack()[:-1])
    with pytest.raises(InvalidArgument, match="rights"):
        RemoteKey.unpack(key.pack()[:-1] + b"\x09")


@pytest.mark.parametrize("verb", ["write", "read"])
def test_a_key_that_was_never_granted_is_refused_and_touches_nothing(pair: Any, verb: str) -> None:
    a, b = pair
    forged = dataclasses.replace(b.grant(), token=12345)
    with pytest.raises(RemoteAccessError, match="unknown or revoked") as caught:
        getattr(a.messenger.connect(b.endpoint), verb)(forged, a.region, [[0, 0, NBYTES]]).result()
    assert caught.value.peer == "b"
    assert caught.value.acknowledged_nbytes == 0
    assert set(a.array.tolist()) == {1}
    assert set(b.array.tolist()) == {2}
    assert b.messenger.counters()["accesses_denied"] == 1


def test_refused_reads_displace_no_byte_of_the_reads_around_them(make_node: Any) -> None:
    sizes = [1, 11, 12, 13, 27, 28, 29, 100, 4096, 16 << 10, 70_001] * 6
    starts = np.cumsum([0, *sizes])[:-1].tolist()
    a, b = make_node("a", sum(sizes)), make_node("b", sum(sizes))
    b.fill(3)
    good, void = b.grant(), dataclasses.replace(b.grant(), token=12345)
    peer = a.messenger.connect(b.endpoint)
    futures = [
        peer.read(good if n % 3 else void, a.region, [[start, start, size]])
        for n, (start, size) in enumerate(zip(starts, sizes, strict=True))
    ]
    for n, (future, start, size) in enumerate(zip(futures, starts, sizes, strict=True)):
        there, here = b.array[start : start + size], a.array[start : start + size]
        if n % 3:
            assert future.result().nbytes == size
            assert np.array_equal(here, there)
        else:
            assert isinstance(future.exception(), RemoteAccessError)
            assert not here.any()


def test_a_key_without_the_right_is_refused(pair: Any) -> None:
    a, b = pair
    peer = a.messenger.connect(b.endpoint)
    with pytest.raises(RemoteAccessError, match="right to write"):
        peer.write(b.grant(write=False), a.region, [[0, 0, 10]]).result()
    with pytest.raises(RemoteAccessError, match="right to read"):
        peer.read(b.grant(read=False), a.region, [[0, 0, 10]]).result()
    assert set(b.array.tolist()) == {2}
    assert set(a.array.tolist()) == {1}


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 10), (95, 10), (199, 2), (NBYTES - 1, 1), (1 << 62, 1)])
@pytest.mark.parametrize("verb", ["write", "read"])
def test_slices_outside_the_window_are_refused_even_when_the_key_is_widened(
    pair: Any, verb: str, offset: int, nbytes: int
) -> None:
    a, b = pair
    key = b.messenger.grant(b.region, 100, 100, read=True, write=True)
    widened = dataclasses.replace(key, offset=0, nbytes=NBYTES)
    with pytest.raises(RemoteAccessError, match="out of bounds"):
        getattr(a.messenger.connect(b.endpoint), verb)(widened, a.region, [[0, offset, nbytes]]).result()
    assert set(b.array.tolist()) == {2}
    assert set(a.array.tolist()) == {1}


def test_a_refused_operation_does_not_notify_and_the_next_one_works(pair: Any) -> None:
    a, b = pair
    peer = a.messenger.connect(b.endpoint)
    key = b.messenger.grant(b.region, 0, 100, read=True, write=True)
    bad = peer.write_notify(key, a.region, [[0, 0, 100], [0, 100, 100]], b"bad", b"")
    good = peer.write_notify(key, a.region, [[0, 0, 100]], b"good", b"")
    with pytest.raises(RemoteAccessError):
        bad.result()
    assert good.result().nbytes == 100
    assert [tag for _, tag, _ in b.notes] == [b"good"]


def test_a_batch_with_one_refused_part_does_not_notify(make_node: Any) -> None:
    nbytes = 20 << 20
    a, b = make_node("a", nbytes), make_node("b", nbytes)
    key = b.messenger.grant(b.region, 10 << 20, 10 << 20, read=True, write=True)
    # Only the first of the parts is out of the window.
    rows = [[0, 0, 8 << 20], [10 << 20, 10 << 20, 10 << 20]]
    with pytest.raises(RemoteAccessError):
        a.messenger.connect(b.endpoint).write_notify(key, a.region, rows, b"t", b"").result()
    a.messenger.connect(b.endpoint).notify(b"end", b"").result()
    assert [tag for _, tag, _ in b.notes] == [b"end"]


@pytest.mark.parametrize("verb", ["write", "read"])
def test_a_revoked_key_is_refused(pair: Any, verb: str) -> None:
    a, b = pair
    key, other = b.grant(), b.grant()
    peer = a.messenger.connect(b.endpoint)
    transfer = getattr(peer, verb)
    assert transfer(key, a.region, [[0, 0, 10]]).result().nbytes == 10
    b.messenger.revoke(key)
    b.messenger.revoke(key)
    b.array[100:] = 7
    with pytest.raises(RemoteAccessError, match="revoked"):
        transfer(key, a.region, [[0, 100, 10]]).result()
    assert b.array[100:110].tolist() == [7] * 10
    assert transfer(other, a.region, [[0, 100, 10]]).result().nbytes == 10


def test_a_deregistered_region_takes_its_keys_with_it(pair: Any) -> None:
    a, b = pair
    key = b.grant()
    b.messenger.deregister(b.region)
    with pytest.raises(RemoteAccessError):
        a.messenger.connect(b.endpoint).write(key, a.region, [[0, 0, 10]]).result()
    with pytest.raises(InvalidArgument, match="not registered"):
        b.messenger.grant(b.region, 0, 10, read=True, write=False)
    assert b.messenger.counters()["regions_open"] == b.messenger.counters()["grants_open"] == 0


@pytest.mark.transports("tcp")
def test_a_refused_payload_is_passed_over(make_node: Any, greet: Any) -> None:
    owner = make_node("b", NBYTES)
    key = owner.messenger.grant(owner.region, 0, 100, read=False, write=True)
    link = greet(owner)
    payload = memoryview(b"\x05" * 200_000)
    for seq, (token, offset, nbytes) in enumerate([(1, 0, 200_000), (key.token, 50, 51), (key.token, 50, 50)], start=1):
        rows = np.array([[offset, nbytes]], dtype=np.int64).tobytes()
        link.send(Write(seq, seq, key.region_id, token, 0, nbytes, rows, False, b"", b""), [payload[:nbytes]])
    assert [type(link.receive()) for _ in range(3)] == [Refused, Refused, Ack]
    assert owner.array[:101].tolist() == [0] * 50 + [5] * 50 + [0]
