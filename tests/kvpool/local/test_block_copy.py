"""Copies of blocks: the same bytes and digests whether helpers take part or not."""

import numpy as np
import pytest

from kvpool import KvGroup, KvSpec, layer_digests
from kvpool.errors import SpecError
from kvpool.helper_threads import HelperThreads
from kvpool.local import block_copy
from kvpool.local.block_copy import MappedBytes, SpecLayout, copy_blocks

SPEC = KvSpec(
    (
        KvGroup("full", 0, tuple(range(7)), kv_heads=2, head_dim=64, dtype="float32"),
        KvGroup("window", 32, (7, 8), kv_heads=1, head_dim=6, dtype="float16"),
    ),
    64,
)
LAYOUT = SpecLayout(SPEC)
NUM_BLOCKS = 6


@pytest.mark.parametrize("num_helpers", [0, 3])
def test_helpers_change_neither_bytes_nor_digests(num_helpers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_copy, "SHARED_NBYTES", 0)
    rng = np.random.default_rng(0)
    nbytes = SPEC.block_nbytes * NUM_BLOCKS
    source, target = rng.integers(0, 256, nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    first = np.arange(NUM_BLOCKS) * SPEC.block_nbytes
    starts = np.array([first, first + SPEC.slot_nbytes(0)])
    num_tokens = np.array([0, 5, 0, 63, 0, 1], np.uint32)
    helpers = HelperThreads(num_helpers, "test-copy")
    digests = copy_blocks(
        MappedBytes.of(source), starts, MappedBytes.of(target), starts[:, ::-1].copy(), LAYOUT, num_tokens, helpers
    )
    helpers.stop()
    valid = np.where(num_tokens, num_tokens, SPEC.block_tokens).astype(np.int32)
    expected = []
    for g in range(2):
        slots = np.array([source[at : at + SPEC.slot_nbytes(g)] for at in starts[g]])
        expected.append(layer_digests(slots, SPEC, g, valid))
    assert np.array_equal(digests, np.concatenate(expected, axis=1))
    for i in range(0, NUM_BLOCKS, 2):
        there = first[NUM_BLOCKS - 1 - i]
        assert np.array_equal(
            source[first[i] : first[i] + SPEC.block_nbytes], target[there : there + SPEC.block_nbytes]
        )


def test_nothing_is_copied_if_a_slot_is_out_of_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_copy, "SHARED_NBYTES", 0)
    source, target = np.ones(2 * SPEC.block_nbytes, np.uint8), np.zeros(2 * SPEC.block_nbytes, np.uint8)
    starts = np.array([[0, SPEC.block_nbytes], [SPEC.slot_nbytes(0), SPEC.block_nbytes + SPEC.slot_nbytes(0)]])
    helpers = HelperThreads(1, "test-copy")
    with pytest.raises(SpecError, match="a slot lies beyond memory"):
        copy_blocks(
            MappedBytes.of(source), starts, MappedBytes.of(target), starts + 4, LAYOUT, np.zeros(2, np.uint32), helpers
        )
    helpers.stop()
    assert not target.any()
