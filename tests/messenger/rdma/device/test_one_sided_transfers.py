"""Transfers by the adapters alone, once the owner has sent the key."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.transports("rdma")

NBYTES = 1 << 20


def test_writes_and_reads_end_while_the_owners_process_stands_still(make_node: Any, make_child: Any) -> None:
    a, child = make_node("a", NBYTES), make_child("b", NBYTES)
    peer, rows = a.messenger.connect(child.endpoint), [[0, 0, NBYTES]]
    peer.write(child.key, a.region, rows).result()
    peer.read(child.key, a.region, rows).result()
    child.stop()
    try:
        a.fill(1)
        wanted = a.array.copy()
        for future in [peer.write(child.key, a.region, [[n, n, 1000]]) for n in range(0, NBYTES - 1000, 1000)]:
            future.result()
        a.array[:] = 0
        peer.read(child.key, a.region, rows).result()
    finally:
        child.go_on()
    whole = NBYTES // 1000 * 1000
    assert np.array_equal(a.array[:whole], wanted[:whole])
    peer.notify(b"on", b"").result()
    assert child.ask("notes") == ["on"]


def test_a_write_behind_one_that_is_told_lands_before_the_answer_to_it_and_ends_after(
    make_node: Any, wait_until: Callable[..., None]
) -> None:
    a, b = make_node("a"), make_node("b")
    peer, key = a.messenger.connect(b.endpoint), b.grant()
    peer.write(key, a.region, [[0, 0, 10]]).result()
    a.fill(1)
    ended: list[str] = []
    seen: list[bool] = []

    def look(*_: object) -> None:
        wait_until(lambda: bool((b.array[2000:3000] == a.array[2000:3000]).all()), "the write behind it lands")
        seen.append(not ended)

    b.messenger.on_notify(look)
    told = peer.write_notify(key, a.region, [[0, 0, 1000]], b"t", b"")
    told.add_done_callback(lambda _: ended.append("told"))
    alone = peer.write(key, a.region, [[2000, 2000, 1000]])
    alone.add_done_callback(lambda _: ended.append("alone"))
    alone.result()
    told.result()
    assert seen == [True]
    assert ended == ["told", "alone"]
