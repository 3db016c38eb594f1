"""The page in which an owner shows its grants: what readers take for good was good all along."""

import contextlib
import dataclasses
import os
import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from messenger import ProtocolError, RemoteKey, SharedMemory
from messenger.memory import PeerMemory
from messenger.shm.grant_page import PAGE_NBYTES, GrantPage, GrantReader, key_fingerprint


def key(token: int, *, read: bool = True) -> RemoteKey:
    return RemoteKey(1, token, 0, 4096, read, write=True)


@pytest.fixture
def page() -> GrantPage:
    return GrantPage("b")


@pytest.fixture
def reader(page: GrantPage) -> GrantReader:
    return GrantReader(PeerMemory(os.dup(page.memory.fd), PAGE_NBYTES))


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A caller's end of a connection, and the owner's."""
    with contextlib.ExitStack() as stack:
        mine, theirs = (stack.enter_context(end) for end in socket.socketpair())
        yield mine, theirs


def test_a_key_is_good_from_show_to_withdraw(page: GrantPage, reader: GrantReader) -> None:
    fingerprint = key_fingerprint(key(7))
    assert not reader.holds(fingerprint)
    page.show(key(7))
    assert reader.holds(fingerprint)
    page.show(key(8))
    page.withdraw(key(7))
    assert not reader.holds(fingerprint)
    assert reader.holds(key_fingerprint(key(8)))


def test_a_key_that_was_widened_is_not_found(page: GrantPage, reader: GrantReader) -> None:
    page.show(key(7))
    for wrong in ({"nbytes": 8192}, {"offset": 1}, {"region_id": 2}, {"write": False}, {"token": 8}):
        assert not reader.holds(key_fingerprint(dataclasses.replace(key(7), **wrong)))


def test_a_key_without_the_right_to_read_is_not_shown(page: GrantPage, reader: GrantReader) -> None:
    page.show(key(7, read=False))
    assert not reader.holds(key_fingerprint(key(7, read=False)))


def test_where_there_is_no_room_keys_are_not_shown_and_those_shown_stay(page: GrantPage, reader: GrantReader) -> None:
    keys = [key(token) for token in range(1, 20_000)]
    for one in keys:
        page.show(one)
    shown = [one for one in keys if reader.holds(key_fingerprint(one))]
    assert len(keys) * 0.6 < len(shown) <= PAGE_NBYTES // 8
    page.withdraw(shown[0])
    assert [one for one in keys if reader.holds(key_fingerprint(one))] == shown[1:]


def test_a_closed_page_holds_nothing_for_those_who_mapped_it(page: GrantPage, reader: GrantReader) -> None:
    page.show(key(7))
    page.close()
    page.close()
    assert not reader.holds(key_fingerprint(key(7)))


def test_memory_of_another_size_is_no_page() -> None:
    memory = SharedMemory.create(4096, "x")
    with pytest.raises(ProtocolError, match="grant page"):
        GrantReader(PeerMemory(os.dup(memory.fd), 4096))
    memory.close()


def test_copies_that_are_taken_for_good_saw_nothing_of_what_came_after_the_withdrawal(
    page: GrantPage, reader: GrantReader, ends: tuple[socket.socket, socket.socket]
) -> None:
    """The owner fills its memory with the number of the key under which it may be read."""
    source, target = np.zeros(1 << 16, np.uint8), np.zeros(1 << 16, np.uint8)
    rows, fd = np.array([[0, 0, len(source)]], np.int64), ends[0].fileno()
    current, stop = [key(1)], threading.Event()
    page.show(current[0])
    source[:] = 1

    def churn() -> None:
        for token in range(2, 2000):
            page.withdraw(current[0])
            source[:] = token % 251
            current[0] = key(token)
            page.show(current[0])
        stop.set()

    def copied(under: RemoteKey, *, by_rows: bool) -> bool:
        to, at = target.ctypes.data, source.ctypes.data
        if by_rows:
            return reader.copy(key_fingerprint(under), fd, to, at, rows, 0, 1)
        return reader.copy_one(key_fingerprint(under), fd, to, at, len(source))

    churning = threading.Thread(target=churn)
    churning.start()
    good = tries = 0
    while not stop.is_set():
        under, tries = current[0], tries + 1
        if copied(under, by_rows=bool(tries % 2)):
            assert target[0] == under.token % 251
            assert (target == target[0]).all()
            good += 1
    churning.join()
    for by_rows in (True, False):
        assert copied(current[0], by_rows=by_rows)
    ends[1].close()
    for by_rows in (True, False):
        assert not copied(current[0], by_rows=by_rows), "the owner is gone, and its mapping is not"
    page.close()
