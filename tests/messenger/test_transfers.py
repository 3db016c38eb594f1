"""What arrives, and in which order: the same over every transport."""

import asyncio
import itertools
import threading
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from messenger import InvalidArgument, SharedMemory, TransferResult

REGION = 1 << 16


def filled(nbytes: int, seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


@st.composite
def slice_lists(draw: st.DrawFn) -> list[list[int]]:
    """Up to 40 rows; destinations do not overlap, and neighbours often touch."""
    cuts = sorted(draw(st.lists(st.integers(0, REGION), min_size=2, max_size=40, unique=True)))
    rows = []
    for start, end in itertools.pairwise(cuts):
        nbytes = draw(st.integers(0, end - start))
        source = draw(st.one_of(st.just(start), st.integers(0, REGION - nbytes)))
        rows.append([min(source, REGION - nbytes), start, nbytes])
    return draw(st.permutations(rows))


def expected(source: np.ndarray[Any, Any], target: np.ndarray[Any, Any], rows: list[list[int]]) -> np.ndarray[Any, Any]:
    result = target.copy()
    for local, remote, nbytes in rows:
        result[remote : remote + nbytes] = source[local : local + nbytes]
    return result


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=slice_lists(), seed=st.integers(0, 1000))
def test_a_write_changes_exactly_its_slices(pair: Any, rows: list[list[int]], seed: int) -> None:
    a, b = pair
    a.array[:], b.array[:] = filled(REGION, seed), filled(REGION, seed + 1)
    before = a.array.copy()
    wanted = expected(a.array, b.array, rows)
    result = a.messenger.connect(b.endpoint).write(b.grant(), a.region, rows).result()
    assert result.nbytes == sum(row[2] for row in rows)
    assert np.array_equal(b.array, wanted)
    assert np.array_equal(a.array, before)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=slice_lists(), seed=st.integers(0, 1000))
def test_a_read_changes_exactly_its_slices(pair: Any, rows: list[list[int]], seed: int) -> None:
    a, b = pair
    a.array[:], b.array[:] = filled(REGION, seed), filled(REGION, seed + 1)
    before = b.array.copy()
    wanted = expected(b.array, a.array, rows)
    # The strategy's destinations are apart, so for a read they are the local side.
    slices = [[remote, local, nbytes] for local, remote, nbytes in rows]
    result = a.messenger.connect(b.endpoint).read(b.grant(), a.region, slices).result()
    assert result.nbytes == sum(row[2] for row in rows)
    assert np.array_equal(a.array, wanted)
    assert np.array_equal(b.array, before)


@pytest.fixture
def pair(make_node: Any) -> Any:
    return make_node("a", REGION), make_node("b", REGION)


def test_the_transport_asked_for_is_used_and_counted(pair: Any, transport: str) -> None:
    a, b = pair
    peer = a.messenger.connect(b.endpoint)
    assert peer.transport == transport
    result = peer.write(b.grant(), a.region, [[0, 0, 100], [200, 200, 100]]).result()
    assert (result.nbytes, result.transport) == (200, transport)
    assert result.seconds > 0
    assert peer.read(b.grant(), a.region, [[0, 0, 50]]).result().nbytes == 50
    counters = a.messenger.counters()
    assert counters[f"bytes_written_{transport}"] == 200
    assert counters[f"slices_written_{transport}"] == 2
    assert counters[f"bytes_read_{transport}"] == 50
    assert b.messenger.counters()[f"bytes_landed_{transport}"] == 200


def test_a_batch_larger_than_a_part_and_of_thousands_of_slices_arrives(make_node: Any) -> None:
    nbytes = 24 << 20
    a, b = make_node("a", nbytes), make_node("b", nbytes)
    a.array[:] = filled(nbytes, 1)
    order = np.random.default_rng(2).permutation(70_000)
    small = np.stack([order * 64, np.roll(order, 1) * 64, np.full(len(order), 48)], axis=1)
    large = np.array([[5 << 20, 6 << 20, 17 << 20]])
    result = a.messenger.connect(b.endpoint).write(b.grant(), a.region, np.concatenate([small, large])).result()
    assert result.nbytes == 70_000 * 48 + (17 << 20)
    wanted = np.zeros(nbytes, np.uint8)
    for column in range(48):
        wanted[small[:, 1] + column] = a.array[small[:, 0] + column]
    wanted[6 << 20 : 23 << 20] = a.array[5 << 20 : 22 << 20]
    assert np.array_equal(b.array, wanted)
    back = a.messenger.connect(b.endpoint).read(b.grant(), a.region, [[0, 0, nbytes]]).result()
    assert back.nbytes == nbytes
    assert np.array_equal(a.array, wanted)


def test_a_notify_finds_all_writes_before_it_landed(make_node: Any) -> None:
    a, b = make_node("a", 1 << 20), make_node("b", 1 << 20)
    a.array[:] = 1
    seen: list[int] = []
    b.messenger.on_notify(lambda _node, _tag, payload: seen.append(int(b.array[: int(payload)].sum())))
    peer, key = a.messenger.connect(b.endpoint), b.grant()
    for first in range(0, 1 << 20, 1 << 16):
        peer.write(key, a.region, [[first, first, 1 << 16]])
        peer.notify(b"so far", b"%d" % (first + (1 << 16)))
    peer.notify(b"end", b"0").result()
    assert seen == [*range(1 << 16, (1 << 20) + 1, 1 << 16), 0]


def test_a_write_notify_is_delivered_once_its_whole_batch_landed(make_node: Any) -> None:
    nbytes = 20 << 20
    a, b = make_node("a", nbytes), make_node("b", nbytes)
    a.array[:] = 1
    seen: list[tuple[str, bytes, bytes, int]] = []
    b.messenger.on_notify(lambda node, tag, payload: seen.append((node, tag, payload, int(b.array.sum()))))
    peer = a.messenger.connect(b.endpoint)
    peer.write_notify(b.grant(), a.region, [[0, 0, nbytes]], b"layer 3", b"digests").result()
    assert seen == [("a", b"layer 3", b"digests", nbytes)]


def test_a_write_notify_of_nothing_is_a_notify(pair: Any) -> None:
    a, b = pair
    peer = a.messenger.connect(b.endpoint)
    assert peer.write_notify(b.grant(), a.region, np.empty((0, 3), np.int64), b"t", b"p").result().nbytes == 0
    assert b.notes == [("a", b"t", b"p")]
    assert peer.write(b.grant(), a.region, [[5, 5, 0]]).result().nbytes == 0


def test_two_hundred_batches_from_eight_threads_arrive(make_node: Any) -> None:
    slot, batches = 20_000, 200
    a, b = make_node("a", slot * batches), make_node("b", slot * batches)
    a.array[:] = filled(slot * batches, 7)
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


async def test_futures_work_from_asyncio(pair: Any) -> None:
    a, b = pair
    peer, key = a.messenger.connect(b.endpoint), b.grant()
    writes = [asyncio.wrap_future(peer.write(key, a.region, [[i, i, 1]])) for i in range(20)]
    assert sum(result.nbytes for result in await asyncio.gather(*writes)) == 20
    assert await asyncio.wrap_future(peer.notify(b"t", b"")) is None


def test_both_directions_at_once(make_node: Any) -> None:
    a, b = make_node("a", 8 << 20), make_node("b", 8 << 20)
    a.array[: 4 << 20], b.array[: 4 << 20] = 1, 2
    key_a, key_b = a.grant(), b.grant()
    to_b, to_a = a.messenger.connect(b.endpoint), b.messenger.connect(a.endpoint)
    pushes = [to_b.write(key_b, a.region, [[0, 4 << 20, 4 << 20]]) for _ in range(5)]
    pushes += [to_a.write(key_a, b.region, [[0, 4 << 20, 4 << 20]]) for _ in range(5)]
    for push in pushes:
        push.result()
    assert int(a.array[-1]) == 2
    assert int(b.array[-1]) == 1


def test_a_messenger_reaches_itself(make_node: Any) -> None:
    a = make_node("a")
    a.array[:100] = 9
    a.messenger.connect(a.endpoint).write(a.grant(), a.region, [[0, 500, 100]]).result()
    assert a.array[500:600].tolist() == [9] * 100


@pytest.mark.parametrize(
    "slices",
    [[[0, 0]], [0, 0, 1], [[0.5, 0, 1]], [[-1, 0, 1]], [[0, -1, 1]], [[0, 0, -1]], [[0, 0, REGION + 1]]],
    ids=["two columns", "flat", "floats", "negative local", "negative remote", "negative length", "beyond the region"],
)
def test_slices_that_cannot_be_right_are_refused_at_once(pair: Any, slices: Any) -> None:
    a, b = pair
    with pytest.raises(InvalidArgument, match="slices"):
        a.messenger.connect(b.endpoint).write(b.grant(), a.region, slices)


def test_a_region_of_another_messenger_is_refused_at_once(pair: Any) -> None:
    a, b = pair
    with pytest.raises(InvalidArgument, match="not registered"):
        a.messenger.connect(b.endpoint).write(b.grant(), b.region, [[0, 0, 1]])


@pytest.mark.parametrize("deadline_s", [0, -1.0, float("inf"), float("nan")])
def test_a_deadline_that_is_none_is_refused_at_once(pair: Any, deadline_s: float) -> None:
    a, b = pair
    with pytest.raises(InvalidArgument, match="deadline"):
        a.messenger.connect(b.endpoint).notify(b"t", b"", deadline_s=deadline_s)


def test_a_notify_over_the_limit_is_refused_at_once(pair: Any) -> None:
    a, b = pair
    with pytest.raises(InvalidArgument, match="notify"):
        a.messenger.connect(b.endpoint).notify(b"t", bytes(1 << 20))


def test_a_failing_handler_disturbs_neither_the_others_nor_the_caller(
    pair: Any, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = pair
    calls: list[bytes] = []

    def fail(_node: str, _tag: bytes, _payload: bytes) -> None:
        raise RuntimeError("broken handler")

    b.messenger.on_notify(fail)
    b.messenger.on_notify(lambda _node, tag, _payload: calls.append(tag))
    a.messenger.connect(b.endpoint).notify(b"t", b"").result()
    assert calls == [b"t"]
    assert "broken handler" in caplog.text
    # The record's traceback holds on to the node.
    caplog.clear()


def test_memory_closed_by_its_owner_stays_until_the_last_view_is_gone(make_node: Any) -> None:
    memory = SharedMemory.create(4096, "short")
    view = memory.array
    memory.close()
    memory.close()
    view[:] = 3
    assert int(view.sum()) == 3 * 4096
    with pytest.raises(InvalidArgument, match="closed"):
        _ = memory.array
