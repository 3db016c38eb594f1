"""Long reads, by whoever waits for them and by whoever does not: each of its parts is copied once, or told to fail."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any

import numpy as np
import pytest

from messenger import InvalidArgument, MessengerClosed, Priority, RemoteAccessError, TransferCancelled

MIB = 1 << 20


@pytest.fixture
def pair(make_node: Any, fewer: Callable[[int], int]) -> Any:
    nbytes = fewer(8) * MIB + 4096
    a, b = make_node("a", nbytes), make_node("b", nbytes)
    b.fill(5)
    return a, b


def awake(a: Any, b: Any) -> tuple[Any, Any]:
    """A peer that has read under a key, and the key."""
    peer, key = a.messenger.connect(b.endpoint), b.grant()
    peer.read(key, a.region, [[0, 0, 10]]).result()
    return peer, key


def test_reads_that_are_awaited_in_any_way_bring_every_byte(pair: Any) -> None:
    a, b = pair
    peer, key = awake(a, b)
    nbytes = len(a.array)

    def called_back(read: Any) -> None:
        told = threading.Event()
        read.add_done_callback(lambda _: told.set())
        assert told.wait(60)

    for awaits in (
        lambda read: read.result(),
        lambda read: read.result(60),
        lambda read: wait([read]),
        called_back,
    ):
        a.array[:] = 0
        read = peer.read(key, a.region, [[0, 0, nbytes]])
        awaits(read)
        assert read.result().nbytes == nbytes
        assert np.array_equal(a.array, b.array)


def test_a_read_at_which_nobody_looks_ends_all_the_same(pair: Any) -> None:
    a, b = pair
    peer, key = awake(a, b)
    read = peer.read(key, a.region, [[0, 0, MIB]])
    pause = threading.Event()
    while read.running():
        pause.wait(0.001)
    assert np.array_equal(a.array[:MIB], b.array[:MIB])


def test_many_threads_read_at_once_each_its_own_bytes(pair: Any) -> None:
    a, b = pair
    peer, key = awake(a, b)
    nbytes = len(a.array) // 4
    failures: list[BaseException] = []

    def read(place: int) -> None:
        try:
            for step in range(6):
                size = nbytes - 1000 * step
                reads = [
                    peer.read(key, a.region, [[place + half * (size // 2), half * (size // 2) + 7, size // 2]])
                    for half in range(2)
                ]
                for one in reads:
                    one.result()
                even = size // 2 * 2
                assert np.array_equal(a.array[place : place + even], b.array[7 : 7 + even])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=read, args=(number * nbytes,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_reads_under_a_key_that_is_revoked_meanwhile_saw_nothing_of_what_came_after(pair: Any) -> None:
    a, b = pair
    nbytes = len(a.array)
    for number in range(6):
        peer, key = awake(a, b)
        b.array[:] = 1
        reads = [peer.read(key, a.region, [[0, 0, nbytes]]) for _ in range(3)]
        if number % 2:
            threading.Thread(target=reads[0].exception).start()
        b.messenger.revoke(key)
        b.array[:] = 2
        for read in reversed(reads):  # the last one that reads decides what is there
            assert read.exception() is None or isinstance(read.exception(), RemoteAccessError)
        if all(read.exception() is None for read in reads):
            assert (a.array == 1).all()
        assert not peer.problems()


def test_reads_may_be_cancelled_and_end_with_their_messenger(pair: Any) -> None:
    a, b = pair
    peer, key = awake(a, b)
    reads = [peer.read(key, a.region, [[0, 0, len(a.array)]]) for _ in range(6)]
    asked = [read.cancel() for read in reads]
    for read, will_end in zip(reads, asked, strict=True):
        assert isinstance(read.exception(), TransferCancelled) == will_end
    reads = [peer.read(key, a.region, [[0, 0, len(a.array)]]) for _ in range(6)]
    a.messenger.close()
    assert all(read.exception() is None or isinstance(read.exception(), MessengerClosed) for read in reads)
    for nbytes in (10, MIB):
        assert isinstance(peer.read(key, a.region, [[0, 0, nbytes]]).exception(), MessengerClosed)


def test_short_and_long_reads_are_held_to_the_keys_window_and_to_the_arguments_rules(make_node: Any) -> None:
    a, b = make_node("a", 3 * MIB + 4096), make_node("b", 3 * MIB + 4096)
    b.fill(5)
    peer, _ = awake(a, b)
    key = b.messenger.grant(b.region, MIB, 2 * MIB, read=True, write=False)
    peer.read(key, a.region, [[0, MIB, 10]]).result()
    for nbytes in (4096, MIB):
        for remote in (MIB - 1, 3 * MIB - nbytes + 1, 0, 1 << 62):
            for slices in ([[0, remote, nbytes]], [[0, MIB, 10], [20, remote, nbytes]]):
                assert isinstance(peer.read(key, a.region, slices).exception(), RemoteAccessError)
        for remote in (MIB, 3 * MIB - nbytes):
            peer.read(key, a.region, [[0, remote, nbytes]]).result()
            assert np.array_equal(a.array[:nbytes], b.array[remote : remote + nbytes])
        with pytest.raises(InvalidArgument, match="deadline"):
            peer.read(key, a.region, [[0, MIB, nbytes]], deadline_s=-1)


@pytest.mark.parametrize("priority", list(Priority))
def test_reads_of_every_priority_bring_their_bytes_and_are_counted_once(pair: Any, priority: Priority) -> None:
    a, b = pair
    peer, key = awake(a, b)

    def counted() -> int:
        return sum(count for name, count in a.messenger.counters().items() if name.startswith("bytes_read_"))

    before = counted()
    peer.read(key, a.region, [[0, 0, 100]], priority=priority).result()
    peer.read(key, a.region, [[100, 100, len(a.array) - 100]], priority=priority).result()
    assert np.array_equal(a.array, b.array)
    assert counted() - before == len(a.array)


@pytest.mark.transports("shm")
def test_an_interrupt_before_a_part_that_was_taken_is_copied_loses_nothing(
    make_node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = make_node("a", 4 * MIB), make_node("b", 4 * MIB)
    b.fill(5)
    peer, key = awake(a, b)
    copies, was_interrupted = peer._traffic.mapped_reads, threading.Event()
    copy = copies.copy

    def interrupted(part: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            was_interrupted.set()
            raise KeyboardInterrupt
        assert was_interrupted.wait(60)  # so that there is a part left for the main thread
        copy(part)

    monkeypatch.setattr(copies, "copy", interrupted)
    read = peer.read(key, a.region, [[0, 0, 4 * MIB]])
    with pytest.raises(KeyboardInterrupt):
        read.result()
    monkeypatch.undo()
    assert read.result().nbytes == 4 * MIB
    assert np.array_equal(a.array, b.array)


@pytest.mark.transports("shm")
def test_a_part_that_is_cancelled_while_who_took_it_is_interrupted_ends_once(
    make_node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = make_node("a", 4 * MIB), make_node("b", 4 * MIB)
    peer, key = awake(a, b)
    copies, ended = peer._traffic.mapped_reads, peer._traffic.part_ended_locked
    give_back, ends = copies._release_claims, []

    class Interrupting(deque[Any]):
        def remove(self, _part: Any) -> None:
            raise KeyboardInterrupt

    def cancelled_first() -> None:
        copies._queue = deque(copies._queue)
        assert read.cancel()
        give_back()

    def counted(part: Any, now_s: float | None) -> Any:
        ends.append(part)
        return ended(part, now_s)

    monkeypatch.setattr(copies, "claim_locked", lambda _stream: None)
    monkeypatch.setattr(copies, "_release_claims", cancelled_first)
    monkeypatch.setattr(peer._traffic, "part_ended_locked", counted)
    monkeypatch.setattr(copies, "_queue", Interrupting())
    read = peer.read(key, a.region, [[0, 0, 4 * MIB]])
    with pytest.raises(KeyboardInterrupt):
        read.result()
    assert len(ends) == len(set(ends)) == 2
    assert isinstance(read.exception(60), TransferCancelled)
    monkeypatch.undo()


@pytest.mark.transports("shm")
def test_reads_without_a_request_go_on_after_the_owner_was_replaced(make_node: Any) -> None:
    """Mapped memory outlives its owner: no read copied from a dead owner's memory counts as successful."""
    a, b = make_node("a", 2 * MIB), make_node("b", 2 * MIB)
    b.fill(5)
    peer, key = awake(a, b)
    b.messenger.close()
    b.array[:] = 0
    for nbytes in (100, 2 * MIB):
        assert peer.read(key, a.region, [[0, 0, nbytes]], deadline_s=1).exception() is not None
