"""Digests of units that peers wrote: those of the memory, or none."""

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvpool import KvGroup, KvSpec, layer_digests
from messenger import InvalidArgument, Messenger, Region, RemoteKey, UnitSection
from messenger.frames import Ack, Write, encode
from messenger.native.unit_digests import BATCH_NBYTES
from messenger.shm.transport import ShmResponder
from messenger.tcp.transport import TcpResponder
from tests.messenger.test_responder_loop import Caller, rows

pytestmark = pytest.mark.transports("tcp", "shm")

SECTIONS = (UnitSection(512, 1024, 8), UnitSection(8704, 64, 40), UnitSection(12288, 2048, 2))
STARTS = [start + i * nbytes for start, nbytes, count in SECTIONS for i in range(count)]
SIZES = [nbytes for _, nbytes, count in SECTIONS for _ in range(count)]
NBYTES = 20000


def digest_of(content: np.ndarray[Any, Any]) -> int:
    """The digest of a layer with these bytes, a multiple of 32."""
    spec = KvSpec((KvGroup("full", 0, (0,), kv_heads=1, head_dim=4, dtype="float32"),), len(content) // 32)
    return int(layer_digests(content[None], spec, 0, np.array([spec.block_tokens], np.int32))[0, 0])


class UnitOwner:
    """A node with a second region over its memory, which has units."""

    def __init__(self, node: Any, sections: Any = SECTIONS) -> None:
        self.node, self.messenger = node, node.messenger
        self.region: Region = self.messenger.register(node.region.memory, units=sections)
        self.starts = np.array([s + i * n for s, n, count in sections for i in range(count)], np.int64)
        self.sizes = [n for _, n, count in sections for _ in range(count)]

    def grant(self) -> RemoteKey:
        return self.messenger.grant(self.region, 0, self.region.nbytes, read=True, write=True)

    def valid(self, key: RemoteKey) -> list[bool]:
        """Which units have a valid digest under the key; every one must be that of the memory."""
        assert self.region.units is not None
        digests, are_valid = self.region.units.find(self.starts, key.token)
        for start, nbytes, digest, is_valid in zip(self.starts, self.sizes, digests, are_valid, strict=True):
            if is_valid:
                assert digest == digest_of(self.region.array[start : start + nbytes])
        found: list[bool] = are_valid.tolist()
        return found


@pytest.fixture
def pair_of_units(make_node: Any) -> Iterator[tuple[Any, UnitOwner]]:
    a = make_node("a", NBYTES)
    a.fill(1)
    owner = UnitOwner(make_node("b", NBYTES))
    yield a, owner
    owner.__dict__.clear()  # fixtures are kept longer than the mapping may be


def test_whole_units_that_a_peer_wrote_have_the_digests_of_the_memory(pair_of_units: Any) -> None:
    a, owner = pair_of_units
    key = owner.grant()
    assert not any(owner.valid(key))
    a.messenger.connect(owner.node.endpoint).write(key, a.region, [[0, 0, NBYTES]]).result()
    assert all(owner.valid(key))
    assert not any(owner.region.units.find(owner.starts + 4, key.token)[1]), "no unit begins there"


@pytest.mark.parametrize("unit_nbytes", [4096, BATCH_NBYTES, 3 * BATCH_NBYTES])
def test_units_smaller_and_larger_than_a_batch_are_digested(make_node: Any, unit_nbytes: int) -> None:
    count = 8 * BATCH_NBYTES // unit_nbytes
    a, b = make_node("a", count * unit_nbytes), make_node("b", count * unit_nbytes)
    a.fill(2)
    owner = UnitOwner(b, [UnitSection(0, unit_nbytes, count)])
    key = owner.grant()
    order = random.Random(1).sample(range(count), count)
    slices = [[n * unit_nbytes, n * unit_nbytes, unit_nbytes] for n in order]
    a.messenger.connect(b.endpoint).write_notify(key, a.region, slices, b"t", b"").result()
    assert all(owner.valid(key))
    assert (a.array == b.array).all()


places = st.one_of(
    st.sampled_from(list(zip(STARTS, SIZES, strict=True))),
    st.tuples(st.integers(0, NBYTES - 1), st.integers(0, 3000)),
    st.tuples(st.sampled_from(STARTS), st.integers(0, 5000)),
)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(writes=st.lists(st.tuples(st.lists(places, min_size=1, max_size=4), st.booleans()), min_size=1, max_size=8))
def test_a_unit_has_a_digest_if_its_last_write_was_of_the_whole_unit_and_under_the_key(
    pair_of_units: Any, writes: list[tuple[list[tuple[int, int]], bool]]
) -> None:
    a, owner = pair_of_units
    keys = owner.grant(), owner.grant()
    peer = a.messenger.connect(owner.node.endpoint)
    last: list[bool | None] = [None] * len(STARTS)  # the key of the last write if it was whole
    for slices, which in writes:
        a.fill(random.randrange(1 << 30))
        cut = [(at, min(nbytes, NBYTES - at)) for at, nbytes in slices]
        for at, nbytes in cut:  # one request each, so that no two slices are merged
            # Bytes of the same alignment: others are copied and not digested.
            peer.write(keys[which], a.region, [[at, at, nbytes]]).result()
            for unit, (start, size) in enumerate(zip(STARTS, SIZES, strict=True)):
                if nbytes and start < at + nbytes and at < start + size:
                    last[unit] = which if at <= start and start + size <= at + nbytes else None
        for which_key, key in enumerate(keys):
            assert owner.valid(key) == [one is not None and one == bool(which_key) for one in last]
    for key in keys:
        owner.messenger.revoke(key)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(slices=st.lists(st.tuples(places, st.integers(0, 3)), min_size=1, max_size=100))
def test_slices_of_one_write_that_overlap_or_are_not_aligned_leave_no_wrong_digest(
    pair_of_units: Any, slices: list[tuple[tuple[int, int], int]]
) -> None:
    a, owner = pair_of_units
    key = owner.grant()
    cut = [[min(at + skip, NBYTES - size), at, size] for (at, n), skip in slices if (size := min(n, NBYTES - at))]
    if cut:
        a.messenger.connect(owner.node.endpoint).write(key, a.region, cut).result()
    owner.valid(key)
    owner.messenger.revoke(key)


def test_digests_of_an_earlier_grant_are_never_valid_again(pair_of_units: Any) -> None:
    a, owner = pair_of_units
    peer, key = a.messenger.connect(owner.node.endpoint), owner.grant()
    peer.write(key, a.region, [[0, 0, NBYTES]]).result()
    assert all(owner.valid(key))
    owner.messenger.revoke(key)
    assert not any(owner.valid(owner.grant()))


def without_compiled_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (TcpResponder, ShmResponder):
        monkeypatch.setattr(kind, "compiled_loop", lambda *_: None)


def test_a_write_that_python_executes_voids_the_digests_of_its_units(
    pair_of_units: Any, make_node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, owner = pair_of_units
    key = owner.grant()
    a.messenger.connect(owner.node.endpoint).write(key, a.region, [[0, 0, NBYTES]]).result()
    without_compiled_loops(monkeypatch)
    by_python = make_node("c", NBYTES).messenger
    other = by_python.register(a.region.memory)
    by_python.connect(owner.node.endpoint).write(key, other, [[0, STARTS[3], 1024], [0, STARTS[1], 1]]).result()
    assert [n for n, is_valid in enumerate(owner.valid(key)) if not is_valid] == [1, 3]


def test_a_window_for_hardware_that_may_write_voids_all_digests_for_ever(pair_of_units: Any) -> None:
    a, owner = pair_of_units
    peer, key = a.messenger.connect(owner.node.endpoint), owner.grant()
    reads = owner.messenger.grant(owner.region, 0, NBYTES, read=True, write=False)
    peer.write(key, a.region, [[0, 0, NBYTES]]).result()
    grants = owner.messenger._grants
    for exposed, is_valid in ((reads, True), (key, False)):
        with grants.expose(owner.region.region_id, exposed.token, mover=Mover()):
            assert all(owner.valid(key)) is is_valid
    peer.write(key, a.region, [[0, 0, NBYTES]]).result()
    assert not any(owner.valid(key))


class Mover:
    def cut(self) -> None: ...


def test_writes_of_one_unit_that_overlap_in_time_leave_no_digest(pair_of_units: Any) -> None:
    a, owner = pair_of_units
    peer, key = a.messenger.connect(owner.node.endpoint), owner.grant()
    units = owner.region.units
    with units.spoiling(np.array([[STARTS[2], 1]])):
        peer.write(key, a.region, [[0, 0, NBYTES]]).result()
        assert [n for n, is_valid in enumerate(owner.valid(key)) if not is_valid] == [2]
    assert [n for n, is_valid in enumerate(owner.valid(key)) if not is_valid] == [2]
    peer.write(key, a.region, [[0, 0, NBYTES]]).result()
    assert all(owner.valid(key))


@pytest.mark.transports("tcp")
@pytest.mark.parametrize("completes", [True, False])
def test_a_write_that_stalls_in_the_middle_leaves_no_digest_beside_another_one(
    pair_of_units: Any, wait_until: Callable[..., None], completes: bool
) -> None:
    a, owner = pair_of_units
    peer, key = a.messenger.connect(owner.node.endpoint), owner.grant()
    start, nbytes = STARTS[0], SIZES[0]
    peer.write(key, a.region, [[0, 0, NBYTES]]).result()
    write = Write(1, 1, key.region_id, key.token, 0, nbytes, rows((start, nbytes)), False, b"", b"")
    with contextlib.closing(Caller(owner.node, "tcp", a.region.memory)) as caller:
        caller.sock.sendall(encode(write) + b"\xee" * (nbytes // 2))
        first = owner.starts[:1]
        wait_until(lambda: not owner.region.units.find(first, key.token)[1][0], "the write has begun")
        peer.write(key, a.region, [[start, start, nbytes]]).result()
        assert not owner.valid(key)[0]
        if completes:
            caller.sock.sendall(b"\xee" * (nbytes - nbytes // 2))
            assert caller.link.receive() == Ack(1, nbytes)
    wait_until(lambda: owner.messenger.counters()["connections_in_open"] == 1, "the caller's connection has ended")
    assert not owner.valid(key)[0]
    peer.write(key, a.region, [[start, start, nbytes]]).result()
    assert owner.valid(key)[0]


@pytest.mark.transports("tcp")
def test_a_write_that_ends_in_the_middle_leaves_no_digest(pair_of_units: Any, wait_until: Callable[..., None]) -> None:
    a, owner = pair_of_units
    key = owner.grant()
    write = Write(1, 1, key.region_id, key.token, 0, 2048, rows((STARTS[0], 2048)), False, b"", b"")
    with contextlib.closing(Caller(owner.node, "tcp", a.region.memory)) as caller:
        caller.sock.sendall(encode(write) + b"\xee" * 1500)
        wait_until(lambda: owner.region.array[STARTS[0] + 1499] == 0xEE, "some bytes have arrived")
    wait_until(lambda: owner.messenger.counters()["connections_in_open"] == 0, "the connection has ended")
    assert not any(owner.valid(key))


def test_concurrent_writers_of_the_same_units_leave_digests_of_the_memory_or_none(
    make_node: Any, pair_of_units: Any
) -> None:
    a, owner = pair_of_units
    others = [a, make_node("c", NBYTES), make_node("d", NBYTES)]
    for seed, node in enumerate(others):
        node.fill(seed)
    key = owner.grant()
    for _ in range(60):
        barrier = threading.Barrier(len(others))

        def write(node: Any, barrier: threading.Barrier = barrier) -> None:
            peer = node.messenger.connect(owner.node.endpoint)
            barrier.wait(60)
            futures = [peer.write(key, node.region, [[0, 0, NBYTES]]) for _ in range(3)]
            for future in futures:
                future.result()

        threads = [threading.Thread(target=write, args=(node,)) for node in others]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        owner.valid(key)
    a.messenger.connect(owner.node.endpoint).write(key, a.region, [[0, 0, NBYTES]]).result()
    assert all(owner.valid(key))


@pytest.mark.parametrize(
    "sections",
    [
        [UnitSection(0, 1024, 1), UnitSection(1000, 1024, 1)],
        [UnitSection(2, 1024, 1)],
        [UnitSection(0, 1022, 1)],
        [UnitSection(0, 1024, 20)],
        [UnitSection(0, 0, 1)],
        [UnitSection(-4, 1024, 1)],
    ],
)
def test_units_that_overlap_are_not_aligned_or_exceed_the_region_are_rejected(
    make_node: Any, sections: list[UnitSection]
) -> None:
    node = make_node("a", NBYTES)
    messenger: Messenger = node.messenger
    with pytest.raises(InvalidArgument):
        messenger.register(node.region.memory, units=sections)
