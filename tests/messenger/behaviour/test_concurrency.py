"""Many at once: threads, batches, peers, and one among them that is slow."""

import threading
from concurrent.futures import Future
from typing import Any

import numpy as np

from messenger import (
    TransferResult,
)


def test_two_hundred_batches_from_eight_threads_arrive(make_node: Any) -> None:
    slot, batches = 20_000, 200
    a, b = make_node("a", slot * batches), make_node("b", slot * batches)
    a.fill(7)
    peer, key = a.messenger.connect(b.endpoint), b.grant()
    futures: list[Future[TransferResult]] = []

    def push(worker: int) -> None:
        for batch in range(worker, batches, 8):
            rows = [[batch * slot + i * 200, batch * slot + i * 200, 100 + i] for i in range(100)]
            futures.append(peer.write_notify(key, a.region, rows, b"%d" % batch, b""))

    threads = [threading.Thread(target=push, args=(worker,)) for worker in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for future in futures:
        future.result()
    landed = b.array.reshape(batches, 100, 200)
    for i in range(100):
        assert np.array_equal(landed[:, i, : 100 + i], a.array.reshape(batches, 100, 200)[:, i, : 100 + i])
        assert not landed[:, i, 100 + i :].any()
    by_worker = [[int(tag) for _, tag, _ in b.notes if int(tag) % 8 == worker] for worker in range(8)]
    assert by_worker == [list(range(worker, batches, 8)) for worker in range(8)]
