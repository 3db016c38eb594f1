"""Requests are handed over in order and in chains, by one thread at a time, and none is left lying."""

import ctypes
import threading
from collections.abc import Callable

import pytest

from messenger.rdma.verbs import abi
from messenger.rdma.verbs.doorbell import Doorbell
from messenger.rdma.work import Singles

WORD = ctypes.c_uint64


def chain(address: int) -> list[int]:
    """The numbers of the requests from this one on."""
    found = []
    while address:
        found.append(WORD.from_address(address).value)
        address = WORD.from_address(address + 8).value
    return found


class Device:
    """Takes chains as a verbs provider does, each as slowly as `work` wishes."""

    def __init__(self, work: Callable[[], object] = lambda: None, code: int = 0) -> None:
        self.chains: list[list[int]] = []
        self._work, self._code = work, code
        self._singles = Singles(64)

    def post(self, first: int) -> int:
        self.chains.append(chain(first))
        self._work()
        return self._code

    def add(self, doorbell: Doorbell, *numbers: int) -> None:
        for number in numbers:
            address = self._singles.fill(number, None, opcode=abi.WR_RDMA_WRITE, flags=0)
            doorbell.add(address, address, None)


def test_all_that_was_added_goes_as_one_chain_in_order() -> None:
    device = Device()
    doorbell = Doorbell(device.post, "rxe0")
    device.add(doorbell, 1, 2, 3)
    doorbell.ring()
    device.add(doorbell, 4)
    doorbell.ring()
    doorbell.ring()
    assert device.chains == [[1, 2, 3], [4]]


def test_who_rings_meanwhile_leaves_it_to_the_one_who_does() -> None:
    inside, go_on = threading.Event(), threading.Event()

    def work() -> None:
        inside.set()
        assert go_on.wait(30)

    device = Device(work)
    doorbell = Doorbell(device.post, "rxe0")
    device.add(doorbell, 1)
    ringer = threading.Thread(target=doorbell.ring)
    ringer.start()
    assert inside.wait(30)
    device.add(doorbell, 2, 3)
    doorbell.ring()  # returns at once
    assert device.chains == [[1]]
    go_on.set()
    ringer.join(30)
    assert device.chains == [[1], [2, 3]]


def test_who_posts_what_others_add_meanwhile_leaves_the_rest_after_a_while() -> None:
    device = Device(lambda: device.add(doorbell, len(device.chains)))  # as fast as it posts
    doorbell = Doorbell(device.post, "rxe0")
    device.add(doorbell, 0)
    assert doorbell.ring(), "nobody is told that something is left"
    posted = [number for one in device.chains for number in one]
    assert posted == list(range(len(posted)))
    assert len(doorbell.made) == 1


def test_something_else_is_posted_behind_what_was_added() -> None:
    device = Device()
    doorbell = Doorbell(device.post, "rxe0")
    device.add(doorbell, 1, 2)
    doorbell.alone(lambda: device.chains.append([3]))
    assert device.chains == [[1, 2], [3]]


def test_what_was_cleared_or_comes_after_the_end_is_not_posted() -> None:
    device = Device()
    doorbell = Doorbell(device.post, "rxe0")
    device.add(doorbell, 1)
    doorbell.clear()
    doorbell.ring()
    device.add(doorbell, 2)
    doorbell.close()
    device.add(doorbell, 3)
    doorbell.ring()
    assert device.chains == []


def test_a_queue_pair_that_takes_nothing_is_named() -> None:
    device = Device(code=12)
    doorbell = Doorbell(device.post, "rxe0")
    device.add(doorbell, 1)
    with pytest.raises(OSError, match="rxe0 takes no more work: Cannot allocate memory"):
        doorbell.ring()
