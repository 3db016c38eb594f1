"""The layer digest against its definition, its algebra, and what it must notice."""

from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jit.compiling import compiled
from kvpool import KvGroup, KvSpec, layer_digests, layer_digests_at, seal_digest
from kvpool.errors import SpecError

DTYPES = ["float32", "bfloat16", "int8"]


@st.composite
def cases(draw: st.DrawFn) -> tuple[KvSpec, np.ndarray, np.ndarray, np.ndarray]:
    group = KvGroup(
        "full",
        0,
        tuple(range(draw(st.integers(1, 3)))),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 9)),
        draw(st.sampled_from(DTYPES)),
    )
    spec = KvSpec((group,), draw(st.integers(1, 5)))
    num_blocks = draw(st.integers(0, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    slots = rng.integers(0, 256, (num_blocks, spec.slot_nbytes(0)), dtype=np.uint8)
    stop = rng.integers(0, spec.block_tokens + 1, num_blocks, dtype=np.int32)
    start = (rng.random(num_blocks) * (stop + 1)).astype(np.int32)
    return spec, slots, start, stop


@settings(deadline=None)
@given(cases())
def test_kernels_agree_with_the_definition(digest_reference, case) -> None:
    spec, slots, start, stop = case
    got = layer_digests(slots, spec, 0, stop, first_tokens=start)
    assert got.dtype == np.uint64
    assert got.shape == (len(slots), spec.num_layers(0))
    for i, slot in enumerate(slots):
        assert got[i].tolist() == digest_reference(slot.tobytes(), spec, 0, int(start[i]), int(stop[i]))


@settings(deadline=None)
@given(cases())
def test_digests_add_up_over_tokens(case) -> None:
    spec, slots, start, stop = case
    head = layer_digests(slots, spec, 0, start)
    rest = layer_digests(slots, spec, 0, stop, first_tokens=start)
    assert np.array_equal(head + rest, layer_digests(slots, spec, 0, stop))


@settings(deadline=None)
@given(cases(), st.randoms(use_true_random=False))
def test_any_flipped_bit_of_a_valid_token_changes_exactly_its_layer(case, random) -> None:
    spec, slots, _, stop = case
    if not len(slots) or stop[0] == 0:
        return
    layer, row = random.randrange(spec.num_layers(0)), random.randrange(spec.groups[0].kv_heads * 2)
    token, byte = random.randrange(int(stop[0])), random.randrange(spec.token_row_nbytes(0))
    before = layer_digests(slots, spec, 0, stop)
    at = layer * spec.layer_nbytes(0) + (row * spec.block_tokens + token) * spec.token_row_nbytes(0) + byte
    slots[0, at] ^= 1 << random.randrange(8)
    changed = layer_digests(slots, spec, 0, stop) != before
    assert np.argwhere(changed).tolist() == [[0, layer]]


def test_bytes_of_tokens_that_do_not_count_are_ignored(spec: KvSpec) -> None:
    for g in range(spec.num_groups):
        slot = np.zeros((1, spec.layer_nbytes(g)), np.uint8)
        one_layer = KvSpec((KvGroup("full", 0, (0,), *_shape(spec, g)),), spec.block_tokens)
        rows = slot.reshape(-1, spec.block_tokens, spec.token_row_nbytes(g))
        before = layer_digests(slot, one_layer, 0, np.array([3], np.int32))
        rows[:, 3:] = 255
        assert layer_digests(slot, one_layer, 0, np.array([3], np.int32)) == before


def test_zeros_count(spec: KvSpec) -> None:
    slots = np.zeros((spec.block_tokens + 1, spec.slot_nbytes(0)), np.uint8)
    digests = layer_digests(slots, spec, 0, np.arange(spec.block_tokens + 1, dtype=np.int32))
    assert len({int(d) for d in digests[:, 0]}) == spec.block_tokens + 1
    assert digests[0].tolist() == [0, 0]


def test_a_range_of_layers_strided_rows_and_offsets_give_the_same(spec: KvSpec) -> None:
    rng = np.random.default_rng(1)
    for g in range(spec.num_groups):
        nbytes = spec.slot_nbytes(g)
        wide = rng.integers(0, 256, (5, nbytes + 12), dtype=np.uint8)
        valid = np.array([4, 3, 4, 0, 1], np.int32)
        whole = layer_digests(wide[:, :nbytes].copy(), spec, g, valid)
        assert np.array_equal(layer_digests(wide[:, :nbytes], spec, g, valid), whole)
        assert np.array_equal(layer_digests(wide[::-1, :nbytes], spec, g, valid[::-1]), whole[::-1])
        assert np.array_equal(layer_digests(wide[:, :nbytes], spec, g, valid, slice(1, None)), whole[:, 1:])
        odd = np.zeros(wide.size + 1, np.uint8)
        odd[1:] = wide.reshape(-1)
        offsets = np.arange(5) * (nbytes + 12) + 1
        assert np.array_equal(layer_digests_at(odd, offsets, spec, g, valid), whole)


def test_read_only_memory_is_enough(spec: KvSpec) -> None:
    slots = np.frombuffer(bytes(spec.slot_nbytes(0)), np.uint8).reshape(1, -1)
    assert layer_digests(slots, spec, 0, np.array([4], np.int32)).shape == (1, 2)


def test_digests_are_final() -> None:
    """Producers and readers of different releases must agree: these numbers may never change."""
    spec = KvSpec((KvGroup("full", 0, (0,), 1, 3, "int8"),), 2)
    slot = np.arange(1, 13, dtype=np.uint8).reshape(1, -1)
    digests = layer_digests(slot, spec, 0, np.array([2], np.int32))
    assert digests.tolist() == [[15540354891821349267]]
    assert seal_digest(digests) == 5149607048695765036


def test_kernels_compile_where_no_cache_can_be_written() -> None:
    scope: dict[str, Any] = {}
    exec("def add_one(x):\n    return x + 1", scope)  # a function without a file has no place for a cache
    assert compiled(scope["add_one"], numba.int64(numba.int64))(1) == 2


def test_seal_depends_on_every_digest_and_their_order() -> None:
    a, b = np.array([1, 2], np.uint64), np.array([3], np.uint64)
    assert len({seal_digest([a, b]), seal_digest([b, a]), seal_digest(a), seal_digest(a[::-1].copy())}) == 4


@pytest.mark.parametrize(
    ("offsets", "valid"), [([-4], [1]), ([8], [1]), ([0], [5]), ([0], [-1]), ([0, 0], [1]), ([1 << 60], [1])]
)
def test_slots_outside_of_memory_and_impossible_token_counts_are_refused(offsets, valid, spec: KvSpec) -> None:
    memory = np.zeros(spec.slot_nbytes(0), np.uint8)
    with pytest.raises(SpecError):
        layer_digests_at(memory, np.array(offsets), spec, 0, np.array(valid, np.int32))


def test_slots_of_another_size_are_refused(spec: KvSpec) -> None:
    with pytest.raises(SpecError, match="expected uint8"):
        layer_digests(np.zeros((1, 8), np.uint8), spec, 0, np.array([1], np.int32))


def _shape(spec: KvSpec, g: int) -> tuple[int, int, str]:
    group = spec.groups[g]
    return group.kv_heads, group.head_dim, group.dtype
