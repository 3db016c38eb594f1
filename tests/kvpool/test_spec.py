"""KvSpec: sizes, wire and JSON round trips, and what is refused."""

import dataclasses

import pytest

from kvpool import KvGroup, KvSpec
from kvpool.errors import SpecError

FULL = KvGroup("full", 0, (0, 1), kv_heads=2, head_dim=8, dtype="bfloat16")


def test_sizes_follow_the_canonical_layout(spec: KvSpec) -> None:
    assert spec.token_row_nbytes(0) == 4 * 4
    assert spec.layer_nbytes(0) == 2 * 2 * 4 * 16
    assert spec.slot_nbytes(0) == 2 * spec.layer_nbytes(0)
    assert spec.token_row_nbytes(1) == 6 * 2
    assert spec.slot_nbytes(1) == 3 * (1 * 2 * 4 * 12)
    assert spec.block_nbytes == spec.slot_nbytes(0) + spec.slot_nbytes(1)
    assert spec.bytes_per_token * spec.block_tokens == spec.block_nbytes


def test_wire_and_json_round_trips_are_equal(spec: KvSpec) -> None:
    assert KvSpec.from_proto(spec.to_proto()) == spec
    assert KvSpec.from_json(spec.to_json()) == spec


def test_lists_are_accepted_and_stay_hashable() -> None:
    group = KvGroup("full", 0, [3, 4], 1, 1, "int8")  # type: ignore[arg-type]
    assert hash(KvSpec([group], 1)) == hash(KvSpec((group,), 1))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "cross"},
        {"kind": "window"},
        {"window": 4},
        {"layers": ()},
        {"layers": (1, 1)},
        {"layers": (-1,)},
        {"kv_heads": 0},
        {"head_dim": 0},
        {"dtype": "float31"},
    ],
)
def test_impossible_groups_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(SpecError):
        dataclasses.replace(FULL, **change)  # type: ignore[arg-type]


def test_impossible_specs_are_refused() -> None:
    with pytest.raises(SpecError, match="no groups"):
        KvSpec((), 16)
    with pytest.raises(SpecError, match="two groups"):
        KvSpec((FULL, dataclasses.replace(FULL, layers=(1,))), 16)
    with pytest.raises(SpecError, match="block_tokens"):
        KvSpec((FULL,), 0)
    with pytest.raises(SpecError, match="4 GiB"):
        KvSpec((dataclasses.replace(FULL, head_dim=1 << 16, kv_heads=1 << 10),), 16)
    with pytest.raises(SpecError, match="not a KvSpec"):
        KvSpec.from_json({"groups": [{"kind": "full"}], "block_tokens": 4})
