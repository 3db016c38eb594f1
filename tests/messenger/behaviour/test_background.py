"""Urgent operations to one peer hold back background to others, and never for ever."""

import threading
from typing import Any

from messenger import Priority

LARGE = 12 << 20


def test_an_urgent_operation_to_a_peer_that_stands_still_keeps_no_background_from_its_end(
    make_node: Any, make_child: Any
) -> None:
    a, still, lively = make_node("a", LARGE), make_child("still"), make_node("lively", LARGE)
    to_still, to_lively = a.messenger.connect(still.endpoint), a.messenger.connect(lively.endpoint)
    to_still.notify(b"0", b"").result()
    still.stop()
    stuck = to_still.notify(b"1", b"", priority=Priority.URGENT, deadline_s=600)
    key = lively.grant()
    for _ in range(3):
        done = to_lively.write(key, a.region, [[0, 0, LARGE]], priority=Priority.BACKGROUND)
        assert done.result(60).nbytes == LARGE
    assert not stuck.done()
    still.go_on()
    stuck.result()


def test_background_goes_on_while_urgent_operations_follow_each_other_without_end(make_node: Any) -> None:
    a, b, c = make_node("a", LARGE), make_node("b", LARGE), make_node("c")
    to_b, to_c = a.messenger.connect(b.endpoint), a.messenger.connect(c.endpoint)
    key_b, key_c = b.grant(), c.grant()
    over = threading.Event()
    rounds = 0

    def hurry() -> None:
        nonlocal rounds
        while not over.is_set():
            to_c.write(key_c, a.region, [[0, 0, 1000]], priority=Priority.URGENT).result()
            rounds += 1

    thread = threading.Thread(target=hurry)
    thread.start()
    try:
        done = to_b.write(key_b, a.region, [[0, 0, 8 << 20]], priority=Priority.BACKGROUND, deadline_s=60)
        assert done.result(60).nbytes == 8 << 20
    finally:
        over.set()
        thread.join()
    assert rounds
