"""The rdma transport between two machines: bytes over both rails, a host that dies, rails that fall silent."""

import hashlib
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from messenger import PeerUnreachable, TransferDeadlineExceeded

pytestmark = [pytest.mark.transports("rdma"), pytest.mark.usefixtures("transport")]

NBYTES = 8 << 20
SLICE = 64 << 10
SLICES = [[offset, offset, SLICE] for offset in range(0, NBYTES, SLICE)]


def _nbytes_by_rail(node: Any) -> Counter[str]:
    found: Counter[str] = Counter()
    for flow in node.messenger.flows():
        if flow.key.rail:
            found[flow.key.rail] += flow.nbytes
    return found


def _digest(node: Any) -> str:
    return hashlib.blake2b(node.array).hexdigest()


def test_every_byte_arrives_and_comes_back_over_both_rails(make_near_node: Any, make_far_child: Any) -> None:
    near, far = make_near_node("near", NBYTES), make_far_child("far", NBYTES)
    near.fill(1)
    digest = _digest(near)
    peer = near.messenger.connect(far.endpoint)
    peer.write(far.key, near.region, SLICES).result()
    assert peer.transport == "rdma"
    assert far.ask("digest") == digest
    near.array[:] = 0
    peer.read(far.key, near.region, SLICES).result()
    assert _digest(near) == digest
    by_rail = _nbytes_by_rail(near)
    assert len(by_rail) == 2
    assert min(by_rail.values()) >= SLICE
    assert sum(by_rail.values()) == 2 * NBYTES


def test_a_notify_is_delivered_when_its_data_is_there(make_near_node: Any, make_far_child: Any) -> None:
    near, far = make_near_node("near", NBYTES), make_far_child("far", NBYTES)
    near.fill(2)
    peer = near.messenger.connect(far.endpoint)
    done = [peer.write_notify(far.key, near.region, SLICES[n::8], b"%d" % n, b"") for n in range(8)]
    for future in done:
        future.result()
    assert far.ask("notes") == [str(n) for n in range(8)]
    assert far.ask("digest") == _digest(near)


def test_a_process_killed_on_the_other_host_is_lost_and_its_successor_is_served(
    make_near_node: Any, make_far_child: Any, wait_until: Callable[..., None]
) -> None:
    near, far = make_near_node("near", NBYTES), make_far_child("far", NBYTES, incarnation=7)
    peer = near.messenger.connect(far.endpoint)
    first, *others = [peer.write(far.key, near.region, SLICES) for _ in range(10)]
    first.result()
    far.kill()
    assert all(future.exception() is None or isinstance(future.exception(), PeerUnreachable) for future in others)
    assert isinstance(others[-1].exception(), PeerUnreachable)
    wait_until(lambda: near.lost == [("far", 7)], "the loss is reported")
    successor = make_far_child("far", NBYTES, incarnation=8)
    near.fill(3)
    near.messenger.connect(successor.endpoint).write(successor.key, near.region, SLICES).result()
    assert successor.ask("digest") == _digest(near)


def test_slices_of_a_rail_that_falls_silent_go_by_the_other_and_the_rail_returns(
    make_near_node: Any, make_far_child: Any, drop_rail: Any, wait_until: Callable[..., None]
) -> None:
    near, far = make_near_node("near", NBYTES), make_far_child("far", NBYTES)
    peer = near.messenger.connect(far.endpoint)
    peer.write(far.key, near.region, SLICES).result()
    heal = drop_rail(1)
    near.fill(4)
    peer.write(far.key, near.region, SLICES, deadline_s=120).result()
    assert far.ask("digest") == _digest(near)
    heal()
    silent = _nbytes_by_rail(near)

    def has_returned() -> bool:
        peer.write(far.key, near.region, SLICES).result()
        return all(nbytes > silent[rail] for rail, nbytes in _nbytes_by_rail(near).items())

    wait_until(has_returned, "both rails carry again", 30)
    assert far.ask("digest") == _digest(near)


def test_a_rail_that_slows_down_tenfold_is_left_in_mid_transfer_and_returns(
    make_near_node: Any, make_far_child: Any, slow_rail: Any, wait_until: Callable[..., None]
) -> None:
    near, far = make_near_node("near", NBYTES, rdma_silence_s=60.0), make_far_child("far", NBYTES)
    peer = near.messenger.connect(far.endpoint)
    for fill in (1, 2, 3):  # so that both speeds are known
        near.fill(fill)
        began_s = time.monotonic()
        peer.write(far.key, near.region, SLICES).result()
    usual_s = time.monotonic() - began_s
    writes = [peer.write(far.key, near.region, SLICES, deadline_s=250) for _ in range(4)]
    heal = slow_rail(1, NBYTES / 2 / usual_s / 10)
    for future in writes:
        future.result()
    assert far.ask("digest") == _digest(near)
    assert near.messenger.counters()["rdma_failovers"] == 1
    heal()
    near.fill(4)
    slow = _nbytes_by_rail(near)

    def has_returned() -> bool:
        peer.write(far.key, near.region, SLICES).result()
        return all(nbytes > slow[rail] for rail, nbytes in _nbytes_by_rail(near).items())

    wait_until(has_returned, "both rails carry again", 60)
    assert far.ask("digest") == _digest(near)


def test_a_partition_ends_in_the_deadline_and_heals(
    make_near_node: Any, make_far_child: Any, drop_rail: Any, wait_until: Callable[..., None]
) -> None:
    near, far = make_near_node("near", NBYTES), make_far_child("far", NBYTES)
    peer = near.messenger.connect(far.endpoint)
    peer.write(far.key, near.region, SLICES).result()
    heals = [drop_rail(number) for number in range(2)]
    near.array[:] = np.uint8(5)
    with pytest.raises((TransferDeadlineExceeded, PeerUnreachable)):
        peer.write(far.key, near.region, SLICES, deadline_s=2).result()
    for heal in heals:
        heal()
    near.fill(6)
    peer.write(far.key, near.region, SLICES, deadline_s=250).result()
    assert far.ask("digest") == _digest(near)
