"""Every operation ends in time, whatever its peer does, and those behind it go on."""

import time
from typing import Any

import pytest

from messenger import (
    DeadlineExceeded,
    InvalidArgument,
    TransferDeadlineExceeded,
)

LARGE = 16 << 20


def test_a_stopped_peer_exceeds_the_deadline_and_is_used_again_once_it_goes_on(
    make_node: Any, make_child: Any, patience: float
) -> None:
    a, child = make_node("a", LARGE), make_child("b", LARGE)
    a.array[:] = 1
    peer = a.messenger.connect(child.endpoint)
    peer.write(child.key, a.region, [[0, 0, 10]]).result()
    child.stop()
    started_s = time.monotonic()
    operations = [
        peer.write_notify(child.key, a.region, [[0, 0, LARGE]], b"late", b"", deadline_s=0.3),
        peer.read(child.key, a.region, [[0, 0, LARGE]], deadline_s=0.3),
        peer.notify(b"late too", b"", deadline_s=0.4),
    ]
    for operation in operations:
        with pytest.raises(TransferDeadlineExceeded, match="peer 'b'") as caught:
            operation.result()
        assert isinstance(caught.value, DeadlineExceeded)
    assert 0.3 < time.monotonic() - started_s < 2.0 * patience
    assert a.messenger.validate() == []
    child.go_on()
    peer.write_notify(child.key, a.region, [[0, 0, 100]], b"in time", b"").result()
    assert child.ask("notes") == ["in time"]


def test_a_write_to_a_stopped_peer_is_given_up_long_before_its_deadline(make_node: Any, make_child: Any) -> None:
    a, child = make_node("a", LARGE), make_child("b", LARGE)
    peer = a.messenger.connect(child.endpoint)
    peer.write(child.key, a.region, [[0, 0, 10]]).result()
    child.stop()
    started_s = time.monotonic()
    operations = [
        peer.write_notify(child.key, a.region, [[0, 0, nbytes]], b"kv", b"", deadline_s=600, stall_s=0.3)
        for nbytes in (LARGE, 100)
    ]
    for operation in operations:
        with pytest.raises(TransferDeadlineExceeded, match=r"nothing was acknowledged for 0\.3 s"):
            operation.result(30)
    assert time.monotonic() - started_s > 0.3
    child.go_on()
    assert peer.write_notify(child.key, a.region, [[0, 0, 100]], b"again", b"").result().nbytes == 100


def test_a_queue_that_moves_is_not_given_up_however_long_it_takes(make_node: Any) -> None:
    a, b = make_node("a", 1000), make_node("b", 1000)
    b.messenger.on_notify(lambda *_: time.sleep(0.2))  # a slow peer
    peer, key = a.messenger.connect(b.endpoint), b.grant()
    peer.write(key, a.region, [[0, 0, 10]]).result()
    started_s = time.monotonic()
    operations = [
        peer.write_notify(key, a.region, [[0, 0, 10]], b"kv", b"", deadline_s=600, stall_s=2.0) for _ in range(14)
    ]
    assert [operation.result(60).nbytes for operation in operations] == [10] * 14
    assert time.monotonic() - started_s > 2.0
    with pytest.raises(InvalidArgument, match="positive number of seconds, got 0"):
        peer.write_notify(key, a.region, [[0, 0, 10]], b"kv", b"", stall_s=0)


def test_operations_behind_one_that_missed_its_deadline_are_still_done_in_order(
    make_node: Any, make_child: Any
) -> None:
    a, child = make_node("a", 1 << 20), make_child("b")
    a.array[:] = 1
    peer = a.messenger.connect(child.endpoint)
    peer.write_notify(child.key, a.region, [[0, 0, 1]], b"0", b"").result()
    child.stop()
    patient = [peer.notify(b"1", b"")]
    hasty = peer.write_notify(child.key, a.region, [[0, 0, 1000]], b"never", b"", deadline_s=0.2)
    patient += [peer.write_notify(child.key, a.region, [[0, i, 1]], b"%d" % i, b"") for i in range(2, 6)]
    with pytest.raises(TransferDeadlineExceeded):
        hasty.result()
    child.go_on()
    for future in patient:
        future.result()
    assert child.ask("notes") == ["0", "1", "2", "3", "4", "5"]
    assert a.messenger.counters()["retries"] >= 5
