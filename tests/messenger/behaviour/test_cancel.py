"""A cancelled operation ends soon, with an error that says so, and touches no local memory afterwards."""

import asyncio
import concurrent.futures
from typing import Any

import pytest

from messenger import Priority, TransferCancelled, TransferError

LARGE = 16 << 20


def test_a_queued_operation_is_dropped_and_the_others_are_done(make_node: Any, make_child: Any) -> None:
    a, child = make_node("a", LARGE), make_child("b", LARGE)
    a.array[:] = 1
    peer = a.messenger.connect(child.endpoint)
    peer.notify(b"0", b"").result()
    child.stop()
    first = peer.write_notify(child.key, a.region, [[0, 0, LARGE]], b"1", b"")
    queued = [peer.write_notify(child.key, a.region, [[0, 0, LARGE]], b"%d" % n, b"") for n in range(2, 8)]
    for future in queued[:-1]:
        assert future.cancel()
    child.go_on()
    for future in queued[:-1]:
        with pytest.raises(TransferCancelled, match=r"cancelled.*peer 'b'"):
            future.result()
    assert first.result().nbytes == queued[-1].result().nbytes == LARGE
    assert child.ask("notes") == ["0", "1", "7"]


def test_an_operation_on_the_wire_is_cut_off_and_reads_and_writes_no_local_memory_afterwards(
    make_node: Any, make_child: Any
) -> None:
    a, child = make_node("a", LARGE), make_child("b", LARGE)
    a.array[:] = 7
    peer = a.messenger.connect(child.endpoint)
    peer.write(child.key, a.region, [[0, 0, 10]]).result()
    peer.read(child.key, a.region, [[0, 0, 10]]).result()
    child.stop()
    futures = [
        peer.write_notify(child.key, a.region, [[0, 0, 1000]], b"never", b""),
        peer.write_notify(child.key, a.region, [[0, 0, LARGE]], b"never", b""),
    ]
    for future in futures:
        assert future.cancel()
        assert isinstance(future.exception(), TransferCancelled)
        assert not future.cancelled()
        assert not future.cancel(), "it is over"
    a.array[:] = 9
    child.go_on()
    peer.notify(b"after", b"").result()
    assert child.ask("notes") == ["after"]
    assert child.ask("sum") == 70, "nothing of what was cancelled has taken effect"
    assert (a.array == 9).all()
    assert a.messenger.counters()["cancelled"] == 2


def test_a_read_on_the_wire_is_cut_off_and_its_memory_is_free(make_node: Any, make_child: Any, transport: str) -> None:
    a, child = make_node("a", LARGE), make_child("b", LARGE)
    peer = a.messenger.connect(child.endpoint)
    peer.notify(b"t", b"").result()
    child.stop()
    future = peer.read(child.key, a.region, [[0, 0, LARGE]])
    assert future.cancel()
    with pytest.raises(TransferCancelled):
        future.result()
    a.array[:] = 9
    child.go_on()
    assert peer.read(child.key, a.region, [[0, 0, 10]]).result().nbytes == 10
    assert (a.array[10:] == 9).all()


def test_what_is_over_cannot_be_cancelled(make_node: Any) -> None:
    a, b = make_node("a"), make_node("b")
    future = a.messenger.connect(b.endpoint).notify(b"t", b"")
    future.result()
    assert not future.cancel()
    assert future.exception() is None


def test_an_asyncio_future_made_of_one_gets_the_error_and_passes_its_own_cancel_on(
    make_node: Any, make_child: Any
) -> None:
    a, child = make_node("a"), make_child("b")
    peer = a.messenger.connect(child.endpoint)
    peer.notify(b"t", b"").result()
    child.stop()

    async def run() -> None:
        future = peer.notify(b"never", b"")
        wrapped = asyncio.wrap_future(future)
        future.cancel()
        with pytest.raises(TransferCancelled):
            await wrapped
        future = peer.notify(b"never", b"")
        wrapped = asyncio.wrap_future(future)
        wrapped.cancel()
        with pytest.raises(asyncio.CancelledError):
            await wrapped
        while not future.done():
            await asyncio.sleep(0.001)
        assert isinstance(future.exception(), TransferCancelled)

    asyncio.run(run())
    child.go_on()
    peer.notify(b"after", b"").result()
    assert child.ask("notes") == ["t", "after"]


def test_many_are_cancelled_while_others_go_on_at_every_priority(make_node: Any) -> None:
    a, b = make_node("a", 1 << 20), make_node("b", 1 << 20)
    a.array[:] = 1
    peer, key = a.messenger.connect(b.endpoint), b.grant()
    priorities = list(Priority)
    futures = [
        peer.write_notify(key, a.region, [[n * 1000, n * 1000, 1000]], b"%d" % n, b"", priority=priorities[n % 3])
        for n in range(300)
    ]
    cancelled = [future for future in futures[::5] if future.cancel()]
    done, pending = concurrent.futures.wait(futures, 60)
    assert not pending
    assert len(done) == 300
    for future in cancelled:
        assert isinstance(future.exception(), TransferError)
    tags = {int(tag) for _, tag, _ in b.notes}
    for n, future in enumerate(futures):
        if future.exception() is None:
            assert n in tags
            assert b.array[n * 1000 : (n + 1) * 1000].all()
