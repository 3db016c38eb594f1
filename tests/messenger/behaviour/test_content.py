"""Contents after a transfer: every byte at its place, and no other byte touched."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from messenger.frames import MAX_PART_NBYTES

REGION = 1 << 16


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


def test_a_write_changes_exactly_its_slices(pair: Any, fewer: Callable[[int], int]) -> None:
    a, b = pair

    @settings(max_examples=fewer(60), deadline=None)
    @given(rows=slice_lists(), seed=st.integers(0, 1000))
    def check(rows: list[list[int]], seed: int) -> None:
        a.fill(seed)
        b.fill(seed + 1)
        before = a.array.copy()
        wanted = expected(a.array, b.array, rows)
        result = a.messenger.connect(b.endpoint).write(b.grant(), a.region, rows).result()
        assert result.nbytes == sum(row[2] for row in rows)
        assert np.array_equal(b.array, wanted)
        assert np.array_equal(a.array, before)

    check()


def test_a_read_changes_exactly_its_slices(pair: Any, fewer: Callable[[int], int]) -> None:
    a, b = pair

    @settings(max_examples=fewer(60), deadline=None)
    @given(rows=slice_lists(), seed=st.integers(0, 1000))
    def check(rows: list[list[int]], seed: int) -> None:
        a.fill(seed)
        b.fill(seed + 1)
        before = b.array.copy()
        wanted = expected(b.array, a.array, rows)
        # The strategy's destinations are apart, so for a read they are the local side.
        slices = [[remote, local, nbytes] for local, remote, nbytes in rows]
        result = a.messenger.connect(b.endpoint).read(b.grant(), a.region, slices).result()
        assert result.nbytes == sum(row[2] for row in rows)
        assert np.array_equal(a.array, wanted)
        assert np.array_equal(b.array, before)

    check()


SIZES = (1, 2, 7, 63, 64, 4095, 4096, 4097, 65_535, 65_536, 65_537, 1 << 20, MAX_PART_NBYTES, MAX_PART_NBYTES + 1)


def test_every_size_arrives_and_comes_back_and_its_neighbours_stay(make_node: Any) -> None:
    room = MAX_PART_NBYTES + 64
    a, b = make_node("a", room), make_node("b", room)
    a.fill(1)
    peer, key = a.messenger.connect(b.endpoint), b.grant()
    for nbytes in SIZES:
        b.array[: nbytes + 32] = 9
        kept = a.array.copy()
        assert peer.write(key, a.region, [[5, 16, nbytes]]).result().nbytes == nbytes
        assert np.array_equal(b.array[16 : 16 + nbytes], a.array[5 : 5 + nbytes])
        assert b.array[:16].tolist() == b.array[16 + nbytes : 32 + nbytes].tolist() == [9] * 16
        a.array[5 : 5 + nbytes] = 0
        assert peer.read(key, a.region, [[5, 16, nbytes]]).result().nbytes == nbytes
        assert np.array_equal(a.array, kept)


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
    # Over rdma adapters move the bytes, and the owner is told of those that come with a notification alone.
    assert b.messenger.counters().get(f"bytes_landed_{transport}", 0) == (0 if transport == "rdma" else 200)


def test_a_batch_larger_than_a_part_and_of_thousands_of_slices_arrives(
    make_node: Any, fewer: Callable[[int], int]
) -> None:
    nbytes, count = 24 << 20, fewer(70_000)
    a, b = make_node("a", nbytes), make_node("b", nbytes)
    a.fill(1)
    order = np.random.default_rng(2).permutation(count)
    small = np.stack([order * 64, np.roll(order, 1) * 64, np.full(len(order), 48)], axis=1)
    large = np.array([[5 << 20, 6 << 20, 17 << 20]])
    result = a.messenger.connect(b.endpoint).write(b.grant(), a.region, np.concatenate([small, large])).result()
    assert result.nbytes == count * 48 + (17 << 20)
    wanted = np.zeros(nbytes, np.uint8)
    for column in range(48):
        wanted[small[:, 1] + column] = a.array[small[:, 0] + column]
    wanted[6 << 20 : 23 << 20] = a.array[5 << 20 : 22 << 20]
    assert np.array_equal(b.array, wanted)
    back = a.messenger.connect(b.endpoint).read(b.grant(), a.region, [[0, 0, nbytes]]).result()
    assert back.nbytes == nbytes
    assert np.array_equal(a.array, wanted)


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
