"""A cancelled operation ends soon, touches nothing afterwards, and those around it are none the worse."""

from collections.abc import Callable
from typing import Any

import numpy as np

from messenger import RemoteAccessError, TransferCancelled

LARGE = 4 << 20


def is_cancelled(future: Any) -> bool:
    return isinstance(future.exception(), TransferCancelled)


def test_what_is_queued_is_dropped_and_the_others_are_done_in_order(make_node: Any, make_child: Any) -> None:
    a, child = make_node("a", LARGE), make_child("b", LARGE)
    a.array[:] = 1
    peer = a.messenger.connect(child.endpoint)
    peer.notify(b"0", b"").result()
    child.stop()
    ahead = [peer.write_notify(child.key, a.region, [[0, 0, LARGE]], b"%d" % n, b"") for n in (1, 2)]
    dropped = [peer.write_notify(child.key, a.region, [[0, 0, 10]], b"never", b"") for _ in range(5)]
    behind = [peer.notify(b"%d" % n, b"") for n in (3, 4)]
    assert all(future.cancel() for future in dropped)
    for future in dropped:
        assert is_cancelled(future)
        assert future.exception().peer == "b"
    assert not any(future.done() for future in (*ahead, *behind))
    child.go_on()
    for future in (*ahead, *behind):
        future.result()
    assert child.ask("notes") == ["0", "1", "2", "3", "4"]


def test_what_is_under_way_ends_at_once_and_changes_nothing_after_a_revoke(make_node: Any, make_child: Any) -> None:
    a, child = make_node("a", LARGE), make_child("b", LARGE)
    a.array[:] = 1
    peer = a.messenger.connect(child.endpoint)
    peer.write(child.key, a.region, [[0, 0, LARGE]]).result()
    child.stop()
    write = peer.write_notify(child.key, a.region, [[0, 0, LARGE]], b"never", b"", deadline_s=600)
    read = peer.read(child.key, a.region, [[0, 0, LARGE]], deadline_s=600)
    assert write.cancel()
    assert read.cancel()
    assert is_cancelled(write)
    assert is_cancelled(read)
    # Its local memory is free.
    a.array[:] = 7
    child.go_on()
    child.ask("revoke")
    child.ask("fill 9")
    assert isinstance(peer.write(child.key, a.region, [[0, 0, 10]]).exception(), RemoteAccessError)
    peer.notify(b"after", b"").result()
    assert child.ask("sum") == 9 * LARGE
    assert child.ask("notes") == ["after"]
    assert set(np.unique(a.array).tolist()) == {7}
    assert a.messenger.validate() == []


def test_what_is_done_or_failed_cannot_be_cancelled(make_node: Any) -> None:
    a, b = make_node("a"), make_node("b")
    peer, key = a.messenger.connect(b.endpoint), b.grant()
    done = peer.write(key, a.region, [[0, 0, 10]])
    done.result()
    assert not done.cancel()
    assert done.result().nbytes == 10
    b.messenger.revoke(key)
    refused = peer.write(key, a.region, [[0, 0, 10]])
    assert isinstance(refused.exception(), RemoteAccessError)
    assert not refused.cancel()


def test_cancelling_at_random_leaves_each_done_or_cancelled_and_every_byte_where_it_belongs(
    make_node: Any, fewer: Callable[[int], int]
) -> None:
    size, count = 20_000, max(60, fewer(200))
    a, b = make_node("a", size * count), make_node("b", size * count)
    a.fill(1)
    peer, key = a.messenger.connect(b.endpoint), b.grant()
    rng = np.random.default_rng(5)
    futures = []
    for n in range(count):
        futures.append(peer.write_notify(key, a.region, [[n * size, n * size, size]], b"%d" % n, b""))
        if rng.random() < 0.3:
            futures[int(rng.integers(len(futures)))].cancel()
    done = [n for n, future in enumerate(futures) if not is_cancelled(future)]
    assert len(done) >= count // 2
    told = [int(tag) for _, tag, _ in b.notes]
    assert told == sorted(set(told))
    assert set(done) <= set(told)
    b.messenger.revoke(key)
    for n in range(count):
        landed, sent = (array[n * size : (n + 1) * size] for array in (b.array, a.array))
        if n in told:
            assert np.array_equal(landed, sent)
        else:
            assert ((landed == sent) | (landed == 0)).all()
