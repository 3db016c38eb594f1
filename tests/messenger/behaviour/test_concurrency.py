"""Many at once: threads, batches, peers, and one among them that is slow."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from messenger import TransferResult
from messenger.frames import Read

THREADS = 8


def test_a_thousand_batches_from_eight_threads_arrive_in_each_threads_order(make_node: Any) -> None:
    slot, batches, rows_of_one = 4000, 1000, 20
    a, b = make_node("a", slot * batches), make_node("b", slot * batches)
    a.fill(7)
    peer, key = a.messenger.connect(b.endpoint), b.grant()
    futures: list[Future[TransferResult]] = []

    def push(worker: int) -> None:
        for batch in range(worker, batches, THREADS):
            rows = [[batch * slot + i * 200, batch * slot + i * 200, 100 + i] for i in range(rows_of_one)]
            futures.append(peer.write_notify(key, a.region, rows, b"%d" % batch, b""))

    threads = [threading.Thread(target=push, args=(worker,)) for worker in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for future in futures:
        future.result()
    landed, sent = (array.reshape(batches, rows_of_one, 200) for array in (b.array, a.array))
    for i in range(rows_of_one):
        assert np.array_equal(landed[:, i, : 100 + i], sent[:, i, : 100 + i])
        assert not landed[:, i, 100 + i :].any()
    told = [int(tag) for _, tag, _ in b.notes]
    for worker in range(THREADS):
        assert [batch for batch in told if batch % THREADS == worker] == list(range(worker, batches, THREADS))


def test_a_thousand_reads_beside_a_thousand_writes_arrive(make_node: Any, fewer: Callable[[int], int]) -> None:
    size, count = 512, fewer(1000)
    a, b = make_node("a", 2 * size * count), make_node("b", 2 * size * count)
    a.fill(1)
    b.fill(2)
    wanted = np.concatenate([a.array[: size * count], b.array[: size * count]])
    peer, key = a.messenger.connect(b.endpoint), b.grant()
    # a's first half goes to b's second, and b's first half to a's second.
    futures = [
        transfer(key, a.region, [[local + n * size, remote + n * size, size]])
        for n in range(count)
        for transfer, local, remote in ((peer.write, 0, size * count), (peer.read, size * count, 0))
    ]
    assert sum(future.result().nbytes for future in futures) == 2 * size * count
    assert np.array_equal(b.array[size * count :], wanted[: size * count])
    assert np.array_equal(a.array[size * count :], wanted[size * count :])


def test_a_peer_that_stands_still_stalls_nobody_else(
    make_node: Any, make_child: Any, fewer: Callable[[int], int]
) -> None:
    a, still, lively = make_node("a"), make_child("still"), make_node("lively")
    a.fill(3)
    rows = [[0, 0, a.region.nbytes]]
    to_still, to_lively = a.messenger.connect(still.endpoint), a.messenger.connect(lively.endpoint)
    to_still.write(still.key, a.region, rows).result()
    still.stop()
    stuck = [to_still.write_notify(still.key, a.region, rows, b"%d" % n, b"", deadline_s=600) for n in range(8)]
    stuck_read = to_still.read(still.key, a.region, [[0, 0, 10]], deadline_s=600)
    key = lively.grant()
    for n in range(fewer(50)):
        to_lively.write_notify(key, a.region, rows, b"%d" % n, b"").result()
        to_lively.read(key, a.region, rows).result()
    assert not any(future.done() for future in (*stuck[1:], stuck_read))
    still.go_on()
    for future in stuck:
        assert future.result().nbytes == a.region.nbytes
    assert stuck_read.result().nbytes == 10
    assert still.ask("notes") == [str(n) for n in range(8)]


def test_a_handler_that_blocks_holds_up_only_the_peer_that_it_serves(make_node: Any) -> None:
    owner, slow, quick = make_node("owner"), make_node("slow"), make_node("quick")
    gate = threading.Event()
    owner.messenger.on_notify(lambda node, _tag, _payload: node == "slow" and gate.wait(60))
    held = slow.messenger.connect(owner.endpoint).notify(b"held", b"")
    peer, key = quick.messenger.connect(owner.endpoint), owner.grant()
    for n in range(20):
        peer.write_notify(key, quick.region, [[n, n, 100]], b"%d" % n, b"").result()
    assert not held.done()
    gate.set()
    held.result()


@pytest.mark.transports("tcp")
def test_a_caller_that_does_not_read_what_it_asked_for_holds_up_nobody_and_no_revoke(
    make_node: Any, greet: Any
) -> None:
    nbytes = 4 << 20
    owner, a = make_node("owner", nbytes, revoke_grace_s=0.05), make_node("a", nbytes)
    slow, key, other = greet(owner), owner.grant(), owner.grant()
    rows = np.array([[0, nbytes]], dtype=np.int64).tobytes()
    for seq in range(1, 9):
        slow.send(Read(seq, key.region_id, key.token, nbytes, rows))
    owner.fill(1)
    assert a.messenger.connect(owner.endpoint).read(other, a.region, [[0, 0, nbytes]]).result().nbytes == nbytes
    assert np.array_equal(a.array, owner.array)
    assert owner.messenger.validate()
    owner.messenger.revoke(key)
    assert owner.messenger.validate() == []


def test_callers_that_say_nothing_after_their_greeting_hinder_neither_traffic_nor_the_end(
    make_node: Any, greet: Any, wait_until: Any
) -> None:
    owner, a = make_node("owner", 4096), make_node("a", 4096)
    for _ in range(12):
        greet(owner)
    wait_until(lambda: owner.messenger.counters()["connections_in_open"] == 12, "all are greeted")
    assert a.messenger.connect(owner.endpoint).write(owner.grant(), a.region, [[0, 0, 4096]]).result().nbytes == 4096
    owner.messenger.close()
    assert owner.messenger.counters()["connections_in_open"] == 0
