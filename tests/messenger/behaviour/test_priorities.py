"""Priorities: urgent operations overtake, background ones still move, and order holds within a priority."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from messenger import Priority

PIECE = 1 << 20
QUEUED = 16


def test_what_is_urgent_overtakes_a_queue_of_background(make_node: Any, make_child: Any) -> None:
    a, child = make_node("a", PIECE), make_child("b", PIECE)
    peer, rows = a.messenger.connect(child.endpoint), [[0, 0, PIECE]]
    peer.notify(b"first", b"").result()
    child.stop()
    futures: list[Any] = [
        peer.write_notify(child.key, a.region, rows, b"background", b"", priority=Priority.BACKGROUND)
        for _ in range(QUEUED)
    ]
    futures.append(peer.write_notify(child.key, a.region, [[0, 0, 100]], b"urgent", b"", priority=Priority.URGENT))
    child.go_on()
    for future in futures:
        future.result()
    told = child.ask("notes")
    assert told[0] == "first"
    assert sorted(told[1:]) == ["background"] * QUEUED + ["urgent"]
    assert told.index("urgent") <= QUEUED // 2


def test_background_arrives_while_urgent_traffic_never_pauses(make_node: Any) -> None:
    a, b = make_node("a", PIECE), make_node("b", PIECE)
    a.fill(1)
    peer, key, over = a.messenger.connect(b.endpoint), b.grant(), threading.Event()

    def keep_busy() -> None:
        while not over.is_set():
            peer.write(key, a.region, [[0, 0, 1000]], priority=Priority.URGENT).result()

    threads = [threading.Thread(target=keep_busy) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        futures = [
            peer.write(key, a.region, [[at, at, PIECE // 4]], priority=Priority.BACKGROUND)
            for at in range(0, PIECE, PIECE // 4)
        ]
        for future in futures:
            assert future.result().nbytes == PIECE // 4
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert (b.array == a.array).all()


@pytest.mark.parametrize("priority", list(Priority), ids=[priority.name.lower() for priority in Priority])
def test_order_holds_within_a_priority(make_node: Any, priority: Priority, fewer: Callable[[int], int]) -> None:
    count = fewer(100)
    a, b = make_node("a", 1000), make_node("b", 1000)
    a.array[:] = 1
    seen: list[tuple[bytes, int]] = []
    b.messenger.on_notify(lambda _node, tag, payload: seen.append((tag, int(b.array[: int(payload)].sum()))))
    peer, key = a.messenger.connect(b.endpoint), b.grant()
    others = [one for one in Priority if one is not priority]
    futures: list[Any] = []
    for n in range(1, count + 1):
        peer.write(key, a.region, [[10 * n - 10, 10 * n - 10, 10]], priority=priority)
        futures.append(peer.notify(b"mine", b"%d" % (10 * n), priority=priority))
        futures.append(peer.notify(b"other", b"0", priority=others[n % 2]))
    for future in futures:
        future.result()
    assert [total for tag, total in seen if tag == b"mine"] == [10 * n for n in range(1, count + 1)]
