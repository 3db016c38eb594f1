"""The gate before each layer: what has arrived, who waits for it, and what ends the wait."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.errors import LoadLost
from worker.layer_gate import LayerGate
from worker.policy.layer_arrivals import LayerArrivals, layer_batches


def gate(
    num_layers: int, num_blocks: int, *, stall_s: float = 60.0, changed: Callable[[], None] = lambda: None
) -> LayerGate:
    return LayerGate(num_layers, num_blocks, held_blocks=0, stall_s=stall_s, lost=LoadLost, changed=changed)


@given(
    st.integers(1, 5),
    st.integers(1, 8),
    st.integers(0, 8),
    st.lists(st.tuples(st.integers(0, 4), st.sets(st.integers(0, 7))), max_size=40),
)
def test_leading_blocks_are_those_before_the_first_gap(
    num_layers: int, num_blocks: int, held: int, arrivals: list[tuple[int, set[int]]]
) -> None:
    held = min(held, num_blocks)
    tracked = LayerArrivals(num_layers, num_blocks, held_blocks=held)
    here = [set(range(held)) for _ in range(num_layers)]
    for layer, blocks in arrivals:
        layer, blocks = layer % num_layers, {b for b in blocks if b < num_blocks}
        tracked.mark(layer, np.array(sorted(blocks), np.int64))
        here[layer] |= blocks
        expected = [next((b for b in range(num_blocks) if b not in own), num_blocks) for own in here]
        assert [tracked.leading(each) for each in range(num_layers)] == expected
        assert tracked.complete == min(expected)


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=24),
    st.tuples(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 5000)),
    st.integers(1, 50),
    st.integers(1, 200_000),
    st.integers(1, 20_000),
)
def test_batches_cover_every_layer_once_in_order_and_are_large_enough(
    kinds: list[int], sizes: tuple[int, int, int], num_blocks: int, least_read: int, least_slice: int
) -> None:
    used = sorted(set(kinds))
    groups = [[layer for layer, kind in enumerate(kinds) if kind == own] for own in used]
    layer_nbytes = [sizes[own] for own in used]
    batches = layer_batches(groups, layer_nbytes, num_blocks, least_read=least_read, least_slice=least_slice)
    assert [layer for batch in batches for layer in range(batch.first, batch.end)] == list(range(len(kinds)))
    for batch in batches:
        layers = sorted(layer for group, part in batch.parts for layer in groups[group][part])
        assert layers == list(range(batch.first, batch.end))
        if batch is not batches[-1]:  # which takes the rest
            slices = [len(groups[group][part]) * layer_nbytes[group] for group, part in batch.parts]
            assert min(slices) >= least_slice
            assert sum(slices) * num_blocks >= least_read


def test_layers_that_are_not_in_order_are_read_at_once() -> None:
    (batch,) = layer_batches([[2, 0, 1]], [1 << 20], 100, least_read=1, least_slice=1)
    assert (batch.first, batch.end, batch.parts) == (0, 3, ((0, slice(0, 3)),))


def test_nothing_is_ready_before_blocks_are_required() -> None:
    one = gate(2, 3)
    one.mark([0, 1], np.arange(3))
    assert (one.is_ready, one.is_open) == (False, False)
    one.require(3)
    assert (one.is_ready, one.is_open) == (True, True)


def test_it_is_ready_with_the_first_layer_and_open_with_the_last_one() -> None:
    news: list[str] = []
    one = gate(3, 4, changed=lambda: news.append("ready"))
    one.require(4)
    one.mark([0], np.arange(1, 4))
    assert (one.is_ready, one.is_open, news) == (False, False, [])
    one.mark([0], np.arange(1))
    assert (one.is_ready, one.is_open, news) == (True, False, ["ready"])
    one.mark([2], np.arange(4))
    assert (one.is_open, one.complete) == (False, 0)
    one.mark([1], np.arange(4))
    assert (one.is_open, one.complete) == (True, 4)


def test_a_wait_ends_when_the_layer_arrives() -> None:
    one = gate(2, 2)
    one.require(2)
    waiting, passed = threading.Event(), threading.Event()

    def engine() -> None:
        waiting.set()
        one.wait(1)
        passed.set()

    thread = threading.Thread(target=engine)
    thread.start()
    assert waiting.wait(60)
    one.mark([1], np.arange(1))
    one.mark([0], np.arange(2))
    assert not passed.is_set()
    one.mark([1], np.arange(1, 2))
    assert passed.wait(60)
    thread.join()


@pytest.mark.parametrize("how", ["lost", "stalled", "given up"])
def test_a_wait_ends_with_an_error_and_nothing_is_taken_afterwards(how: str) -> None:
    one = gate(2, 2, stall_s=0.05 if how == "stalled" else 60.0)
    one.require(2)
    if how == "lost":
        threading.Timer(0.05, one.lose, ("block 1 failed verification",)).start()
    looks = iter([False, True])
    why = {"lost": "block 1", "stalled": "has not arrived for 0.05 s", "given up": "other sequences wait"}[how]
    with pytest.raises(LoadLost, match=why):
        one.wait(0, (lambda: next(looks)) if how == "given up" else None)
    assert not one.mark([0, 1], np.arange(2))
    assert not one.is_open
    assert one.is_ready  # the engine loop removes the sequence
    with pytest.raises(LoadLost, match=why):
        one.wait(1)
