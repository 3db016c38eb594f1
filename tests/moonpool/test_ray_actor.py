"""A role's life within its actor, and the process that holds a Ray of our own: what they say arrives, and is let go."""

import sys
import threading

from moonpool.runtime.ray_actor import _Life
from moonpool.runtime.ray_head import _address, _begun


def test_what_a_role_said_is_told_again_until_it_was_heard_and_then_let_go() -> None:
    life = _Life()
    for number in range(3):
        life.tell("line", number)
    first = life.follow(0, 0.0)
    assert life.follow(0, 0.0) == first == [("line", 0), ("line", 1), ("line", 2)]  # the answer may have been lost
    life.tell("end", 0)
    assert life.follow(3, 0.0) == [("end", 0)]
    assert life._events == [("end", 0)]
    assert life.follow(4, 0.0) == []
    waiting = threading.Timer(0.01, life.tell, ("line", "late"))
    waiting.start()
    assert life.follow(4, 60.0) == [("line", "late")]
    waiting.join()


def test_the_address_of_a_ray_is_found_among_what_it_says_at_once() -> None:
    told = "a notice\nMOONPOOL_RAY 127.0.0.1:1\n"
    said = f"import sys; sys.stdout.write({told!r}); sys.stdout.flush(); "
    head = _begun([sys.executable, "-c", said + "sys.stdin.read()"])
    with head:
        assert _address(head) == "127.0.0.1:1"
