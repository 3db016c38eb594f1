"""Accesses that the hardware refuses, whatever a peer's software does: revoked keys, and bytes beyond a window."""

import time
from typing import Any

import numpy as np
import pytest

from messenger import RemoteAccessError
from messenger.frames import KeyQuery
from messenger.link import LinkClosed
from messenger.rdma.connection_io import Movement
from messenger.rdma.verbs.abi import WR_RDMA_READ, WR_RDMA_WRITE

LARGE = (1 << 20) - 5

pytestmark = pytest.mark.transports("rdma")


def make_rogue(make_node: Any, *, read: bool = True, write: bool = True) -> Any:
    """(owner, caller, its key, its link, its access): a caller that has access to the owner's middle thousand bytes."""
    owner, caller = make_node("b", 4096), make_node("a", 8192)
    owner.fill(1)
    caller.fill(2)
    key = owner.messenger.grant(owner.region, 1000, 1000, read=read, write=write)
    peer = caller.messenger.connect(owner.endpoint)
    move_some = peer.write if write else peer.read
    move_some(key, caller.region, [[1000, 1000, 1000]]).result()
    stream = next(stream for stream in peer._streams if stream._link is not None)
    link = stream._link
    return owner, caller, key, link, stream._requester._accesses[key.region_id, key.token]


def move(caller: Any, link: Any, access: Any, opcode: int, start: int, nbytes: int) -> None:
    """As a requester that checks nothing; returns when the hardware is done, raises LinkClosed when it is refused.

    Soft-RoCE holds a window's key to the bounds of the region, adapters to those of the window.
    """
    registrations = [lane.device.register(caller.region) for lane in link.lanes]
    rkeys = np.frombuffer(access.rkeys, dtype="<u4").tolist()
    movement = Movement(
        rows=np.array([[start, start, nbytes]], dtype=np.int64),
        nbytes=nbytes,
        opcode=opcode,
        local_address=caller.region.address,
        remote_address=access.address,
        keys=[(int(one.lkey), rkey) for one, rkey in zip(registrations, rkeys, strict=True)],
        generation=link.generation,
        held=registrations,
    )
    link.move(movement, KeyQuery(access.region_id, access.token))
    link.finish(movement)


@pytest.mark.parametrize("opcode", [WR_RDMA_WRITE, WR_RDMA_READ], ids=["write", "read"])
@pytest.mark.parametrize(("start", "nbytes"), [(4095, 2), (4096, 1), (0, 8192)])
def test_bytes_beyond_the_region_are_refused(make_node: Any, opcode: int, start: int, nbytes: int) -> None:
    owner, caller, _, link, access = make_rogue(make_node)
    before = owner.array.copy(), caller.array.copy()
    with pytest.raises(LinkClosed, match="access denied by the peer's hardware"):
        move(caller, link, access, opcode, start, nbytes)
    assert np.array_equal(owner.array, before[0])
    assert np.array_equal(caller.array, before[1])


@pytest.mark.parametrize("opcode", [WR_RDMA_WRITE, WR_RDMA_READ], ids=["write", "read"])
def test_a_revoked_key_is_refused_from_the_moment_the_revoke_returns(make_node: Any, opcode: int) -> None:
    owner, caller, key, link, access = make_rogue(make_node)
    move(caller, link, access, opcode, 1000, 1000)
    owner.messenger.revoke(key)
    owner.array[:] = 7
    with pytest.raises(LinkClosed, match="access denied by the peer's hardware"):
        move(caller, link, access, opcode, 1000, 1000)
    assert (owner.array == 7).all()


def test_a_wrong_key_is_refused(make_node: Any) -> None:
    owner, caller, _, link, access = make_rogue(make_node)
    wrong = np.frombuffer(access.rkeys, dtype="<u4") ^ 0x1
    before = owner.array.copy()
    with pytest.raises(LinkClosed, match="access denied by the peer's hardware"):
        move(caller, link, access._replace(rkeys=wrong.astype("<u4").tobytes()), WR_RDMA_WRITE, 1000, 10)
    assert np.array_equal(owner.array, before)


@pytest.mark.parametrize("opcode", [WR_RDMA_WRITE, WR_RDMA_READ], ids=["write", "read"])
def test_a_key_is_held_to_its_rights(make_node: Any, opcode: int) -> None:
    may_read = opcode == WR_RDMA_WRITE
    owner, caller, _, link, access = make_rogue(make_node, read=may_read, write=not may_read)
    before = owner.array.copy(), caller.array.copy()
    with pytest.raises(LinkClosed, match="access denied by the peer's hardware"):
        move(caller, link, access, opcode, 1000, 10)
    assert np.array_equal(owner.array, before[0])
    assert np.array_equal(caller.array, before[1])


def test_a_window_of_one_connection_is_none_of_anothers(make_node: Any) -> None:
    owner, _, key, _, access = make_rogue(make_node)
    other = make_node("c", 4096)
    peer = other.messenger.connect(owner.endpoint)
    peer.write(key, other.region, [[1000, 1000, 1]]).result()
    link = next(stream._link for stream in peer._streams if stream._link is not None)
    before = owner.array.copy()
    with pytest.raises(LinkClosed, match="access denied by the peer's hardware"):
        move(other, link, access, WR_RDMA_WRITE, 1000, 10)
    assert np.array_equal(owner.array, before)


def test_after_a_refusal_by_the_hardware_the_stream_goes_on(make_node: Any) -> None:
    owner, caller, key, _, _ = make_rogue(make_node)
    peer = caller.messenger.connect(owner.endpoint)
    owner.messenger.revoke(key)
    with pytest.raises(RemoteAccessError, match="revoked"):
        peer.write_notify(key, caller.region, [[1000, 1000, 10]], b"never", b"").result()
    peer.notify(b"on", b"").result()
    assert [tag for _, tag, _ in owner.notes] == [b"on"]


def test_a_thousand_notifies_and_large_ones_pass_through_an_inbox_of_sixteen_places(make_node: Any) -> None:
    a, b = make_node("a"), make_node("b")
    peer = a.messenger.connect(b.endpoint)
    futures = [peer.notify(b"%d" % i, bytes([i % 251]) * (i * 61 % 9000)) for i in range(1000)]
    futures.append(peer.notify(b"large", b"x" * LARGE))
    for future in futures:
        future.result()
    assert [tag for _, tag, _ in b.notes] == [b"%d" % i for i in range(1000)] + [b"large"]
    assert all(payload == bytes([i % 251]) * (i * 61 % 9000) for i, (_, _, payload) in enumerate(b.notes[:-1]))
    assert len(b.notes[-1][2]) == LARGE


def test_a_full_inbox_stops_its_sender_and_nobody_else(make_node: Any) -> None:
    owner = make_node("b")
    slow, quick = make_node("s"), make_node("q")
    owner.messenger.on_notify(lambda node_id, *_: time.sleep(0.02) if node_id == "s" else None)
    behind = slow.messenger.connect(owner.endpoint)
    waiting = [behind.notify(b"s", b"x" * 3000) for _ in range(100)]
    peer = quick.messenger.connect(owner.endpoint)
    for _ in range(10):
        peer.notify(b"q", b"").result()
    assert not waiting[-1].done()
    for future in waiting:
        future.result()
