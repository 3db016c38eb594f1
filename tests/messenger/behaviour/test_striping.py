"""Large writes and reads by several streams: every byte arrives, and notifications keep their place."""

import itertools
from typing import Any

import numpy as np
import pytest

from messenger import Priority, RemoteAccessError

LARGE = 16 << 20


def filled(nbytes: int, seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


@pytest.fixture(params=[1, 3, 4])
def pair(make_node: Any, request: pytest.FixtureRequest) -> Any:
    return make_node("a", LARGE, streams_per_peer=request.param), make_node("b", LARGE)


def test_large_transfers_arrive_whole_and_by_all_streams_for_them(pair: Any, wait_until: Any) -> None:
    a, b = pair
    a.array[:] = filled(LARGE, 1)
    peer, key = a.messenger.connect(b.endpoint), b.grant()
    seen: list[bool] = []
    b.messenger.on_notify(lambda *_: seen.append(bool((b.array == a.array).all())))
    assert peer.write_notify(key, a.region, [[0, 0, LARGE]], b"whole", b"").result().nbytes == LARGE
    assert seen == [True]
    b.array[:] = filled(LARGE, 2)
    assert peer.read(key, a.region, [[0, 0, LARGE]]).result().nbytes == LARGE
    assert (a.array == b.array).all()
    wait_until(lambda: a.messenger.counters()["connections_out_open"] == len(peer._streams), "every stream connected")


def test_a_notify_comes_after_every_large_write_before_it_although_these_go_by_other_streams(pair: Any) -> None:
    a, b = pair
    a.array[:] = 1
    peer, key = a.messenger.connect(b.endpoint), b.grant()
    seen: list[tuple[bytes, int]] = []
    b.messenger.on_notify(lambda _node, tag, _payload: seen.append((tag, int(b.array.sum()))))
    step = LARGE // 4
    futures: list[Any] = []
    for n in range(4):
        futures.append(peer.write(key, a.region, [[n * step, n * step, step]]))
        futures.append(peer.notify(b"%d" % n, b""))
    for future in futures:
        future.result()
    assert [tag for tag, _ in seen] == [b"0", b"1", b"2", b"3"]
    assert all(total >= (n + 1) * step for n, (_, total) in enumerate(seen))


def test_a_large_write_that_is_refused_delivers_no_notify_and_lets_the_next_one_go(pair: Any) -> None:
    a, b = pair
    peer = a.messenger.connect(b.endpoint)
    key = b.messenger.grant(b.region, 0, LARGE // 2, read=True, write=True)
    refused = peer.write_notify(key, a.region, [[0, 0, LARGE]], b"never", b"")
    after = peer.notify(b"after", b"")
    with pytest.raises(RemoteAccessError):
        refused.result()
    after.result()
    assert [tag for _, tag, _ in b.notes] == [b"after"]


def test_large_writes_survive_connections_that_break_and_each_notify_comes_once_in_order(pair: Any) -> None:
    a, b = pair
    a.array[:] = filled(LARGE, 3)
    peer, key = a.messenger.connect(b.endpoint), b.grant()
    step = LARGE // 4
    futures = [
        peer.write_notify(key, a.region, [[n % 4 * step, n % 4 * step, step]], b"%d" % n, b"", deadline_s=60)
        for n in range(12)
    ]
    for future in futures:
        future.result()
        b.cut_inbound()  # the next ones are on their way
    assert [int(tag) for _, tag, _ in b.notes] == list(range(12))
    assert (a.array == b.array).all()


def test_order_holds_within_each_priority(pair: Any) -> None:
    a, b = pair
    peer, key = a.messenger.connect(b.endpoint), b.grant()
    sizes = itertools.cycle([10, 5 << 20, 100_000])
    futures = [
        peer.write_notify(
            key, a.region, [[0, 0, next(sizes)]], b"%d" % n, priority.name.encode(), priority=priority, deadline_s=60
        )
        for n in range(18)
        for priority in Priority
    ]
    for future in futures:
        future.result()
    for priority in Priority:
        assert [int(tag) for _, tag, name in b.notes if name == priority.name.encode()] == list(range(18))
