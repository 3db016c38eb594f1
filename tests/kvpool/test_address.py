"""Chains and namespaces: what is equal, what must differ, and that a chain can be continued."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool import (
    KvSpec,
    Provenance,
    chain_keys,
    chain_seed,
    keys_from_bytes,
    keys_u64,
    kv_namespace,
    parent_keys,
    tail_key,
    tail_keys,
)
from kvpool.errors import AddressError

SEED = chain_seed("salt", "tok", 4)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40), st.integers(0, 10))
def test_a_chain_continued_from_a_parent_equals_the_whole(ids: list[int], head_blocks: int) -> None:
    tokens = np.array(ids, np.int32)
    whole = chain_keys(SEED, tokens, 4)
    assert whole.shape == (len(ids) // 4, 16)
    head_blocks = min(head_blocks, len(whole))
    head, tail = tokens[: head_blocks * 4], tokens[head_blocks * 4 :]
    parent = bytes(whole[head_blocks - 1]) if head_blocks else None
    parts = [chain_keys(SEED, head, 4), chain_keys(SEED, tail, 4, parent=parent)]
    assert np.array_equal(np.concatenate(parts), whole)


def test_every_key_depends_on_all_tokens_before_it() -> None:
    tokens = np.arange(40, dtype=np.int32)
    changed = tokens.copy()
    changed[5] += 1
    same = (chain_keys(SEED, tokens, 4) == chain_keys(SEED, changed, 4)).all(axis=1)
    assert same.tolist() == [True] + [False] * 9


def test_tenants_tokenizers_and_block_sizes_never_share_a_block() -> None:
    tokens = np.arange(8, dtype=np.int32)
    seeds = [
        chain_seed(*fields) for fields in (("a", "t", 4), ("b", "t", 4), ("a", "u", 4), ("at", "", 4), ("a", "t", 8))
    ]
    keys = {bytes(key) for seed in seeds for key in chain_keys(seed, tokens, 4)}
    assert len(keys) == 10


def test_chain_keys_are_final() -> None:
    """Stored KV outlives releases: these bytes may never change."""
    keys = chain_keys(chain_seed("", "bundled", 2), np.array([1, 2, 3, 4, 5], np.int32), 2)
    assert chain_seed("", "bundled", 2).hex() == "da83cb044641222841ae9db229d2361c"
    assert keys.tobytes().hex() == "9212b22f9f4e821822754ae0e2807f22cf7747600544957d7489ca5b263f8358"


def test_a_tails_key_depends_on_each_of_its_tokens_what_came_before_and_the_salt() -> None:
    tokens = np.array([1, 2, 3], np.int32)
    parent = bytes(range(16))
    keys = [tail_key(SEED, parent, tokens[:n]) for n in (1, 2, 3)]
    keys += [tail_key(SEED, parent, tokens[::-1]), tail_key(SEED, bytes(16), tokens), tail_key(SEED, None, tokens)]
    keys.append(tail_key(chain_seed("other", "tok", 4), parent, tokens))
    assert len(set(keys)) == 7
    assert tail_key(SEED, parent, tokens.copy()) == keys[2]


@pytest.mark.parametrize("parent", [None, bytes(range(16))])
def test_the_keys_of_all_tails_are_those_of_each(parent: bytes | None) -> None:
    tokens = np.arange(40, dtype=np.int32)
    keys = [tail_key(SEED, parent, tokens[:n]) for n in range(1, 41)]
    assert [bytes(key) for key in tail_keys(SEED, parent, tokens)] == keys
    assert tail_keys(SEED, parent, tokens[:0]).shape == (0, 16)


def test_a_tail_never_has_the_key_of_a_full_block_of_the_same_tokens() -> None:
    tokens = np.arange(8, dtype=np.int32)
    chain = [bytes(key) for key in chain_keys(SEED, tokens, 4)]
    assert tail_key(SEED, None, tokens[:4]) != chain[0]
    assert tail_key(SEED, chain[0], tokens[4:]) != chain[1]


def test_tail_keys_are_final() -> None:
    """Stored KV outlives releases: these bytes may never change."""
    seed = chain_seed("", "bundled", 2)
    assert tail_key(seed, None, np.array([5], np.int32)).hex() == "7e8cff23a98002842fb184ea5420446a"
    parent = bytes(chain_keys(seed, np.array([1, 2], np.int32), 2)[0])
    assert tail_key(seed, parent, np.array([3], np.int32)).hex() == "76306fed5d02497c24728662f5058a5e"


def test_short_keys_are_the_first_eight_bytes_little_endian() -> None:
    keys = keys_from_bytes(bytes(range(32)))
    assert keys_u64(keys).tolist() == [int.from_bytes(bytes(key[:8]), "little") for key in keys]
    assert keys_u64(keys_from_bytes(b"")).shape == (0,)


def test_parents_are_the_chain_shifted_by_one() -> None:
    chain = keys_from_bytes(bytes(range(48)))
    assert np.array_equal(parent_keys(chain), np.concatenate([np.zeros((1, 16), np.uint8), chain[:-1]]))
    assert bytes(parent_keys(chain, b"p" * 16)[0]) == b"p" * 16


@pytest.mark.parametrize("ids", [np.zeros((2, 2), np.int32), np.zeros(4, np.int64), np.zeros(4, np.float32)])
def test_token_arrays_of_another_form_are_refused(ids: np.ndarray) -> None:
    with pytest.raises(AddressError, match="token_ids"):
        chain_keys(SEED, ids, 4)


def test_malformed_keys_are_refused() -> None:
    with pytest.raises(AddressError, match="multiple"):
        keys_from_bytes(b"x" * 17)
    with pytest.raises(AddressError, match="expected uint8"):
        keys_u64(np.zeros((2, 8), np.uint8))
    with pytest.raises(AddressError, match="16 bytes"):
        chain_keys(b"short", np.zeros(4, np.int32), 4)
    with pytest.raises(AddressError, match="16 bytes"):
        tail_key(SEED, b"short", np.zeros(1, np.int32))
    with pytest.raises(AddressError, match="at least one token"):
        tail_key(SEED, None, np.zeros(0, np.int32))


def test_no_approximation_shares_the_exact_namespace(spec: KvSpec) -> None:
    flags = [Provenance.QUANTISED, Provenance.SIBLING, Provenance.SLID]
    unions = [a | b for a, b in itertools.combinations(flags, 2)]
    names = {kv_namespace("w", spec, p) for p in (Provenance.EXACT, *flags, *unions, flags[0] | flags[1] | flags[2])}
    assert len(names) == 8
    assert all(Provenance.EXACT | flag == flag for flag in flags)


def test_namespace_depends_on_weights_and_on_every_field_of_the_spec(spec: KvSpec) -> None:
    full, window = spec.groups
    specs = [
        spec,
        KvSpec((window, full), spec.block_tokens),
        KvSpec((full,), spec.block_tokens),
        KvSpec(spec.groups, 8),
        KvSpec((full, dataclasses.replace(window, window=7)), 4),
        KvSpec((full, dataclasses.replace(window, dtype="bfloat16")), 4),
        KvSpec((full, dataclasses.replace(window, layers=(1, 4, 3))), 4),
        KvSpec((full, dataclasses.replace(window, head_dim=3, kv_heads=2)), 4),
    ]
    names = {kv_namespace("w", each) for each in specs} | {kv_namespace("v", spec)}
    assert len(names) == 9
    assert kv_namespace("w", spec) == kv_namespace("w", spec, Provenance.EXACT)
