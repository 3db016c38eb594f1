"""Coded blocks: lossless, shorter where KV has structure, and rejected by name if they are not genuine."""

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from kvpool import KvGroup, KvSpec, block_coding
from kvpool.block_coding import decode_block, encode_block
from kvpool.errors import CodedBlockInvalid

_ITEM = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16, "int8": np.int8, "float8_e5m2": np.uint8}


def spec_of(dtype: str, *, head_dim: int = 32, scale_group: int = 0, layers: int = 2) -> KvSpec:
    return KvSpec((KvGroup("full", 0, tuple(range(layers)), 2, head_dim, dtype, scale_group),), 16)


def kv_like(spec: KvSpec, seed: int = 0) -> list[Any]:
    """Values of a normal distribution in each group's dtype, as KV has them."""
    rng = np.random.default_rng(seed)
    slots = []
    for g, group in enumerate(spec.groups):
        rows = spec.slot_nbytes(g) // group.token_row_nbytes
        values = rng.normal(0, 2, (rows, group.head_dim)).astype(np.float32)
        if group.dtype == "bfloat16":
            row: Any = (values.view(np.uint32) >> 16).astype(np.uint16)
        elif group.dtype == "int8":
            row = np.clip(values * 20, -127, 127).astype(np.int8)
        else:
            row = values.astype(_ITEM[group.dtype])
        parts = [row.view(np.uint8).reshape(rows, -1)]
        if group.scale_group:
            scales = rng.uniform(0.01, 0.02, (rows, group.head_dim // group.scale_group)).astype(np.float16)
            parts.append(scales.view(np.uint8).reshape(rows, -1))
        slots.append(np.concatenate(parts, axis=1).reshape(-1))
    return slots


def decoded(coded: bytes, spec: KvSpec) -> list[Any]:
    slots = [np.zeros(spec.slot_nbytes(g), np.uint8) for g in range(spec.num_groups)]
    decode_block(np.frombuffer(coded, np.uint8), slots, spec)
    return slots


def equal(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    ("spec", "most"),
    [
        (spec_of("float32"), 0.87),
        (spec_of("float16"), 0.90),
        (spec_of("bfloat16"), 0.75),
        (spec_of("int8", scale_group=16), 0.97),
    ],
    ids=["float32", "float16", "bfloat16", "int8"],
)
def test_kv_of_any_layout_becomes_shorter_and_is_decoded_unchanged(spec: KvSpec, most: float) -> None:
    slots = kv_like(spec)
    coded = encode_block(slots, spec)
    assert coded is not None
    assert len(coded) <= most * spec.block_nbytes
    assert equal(decoded(coded, spec), slots)


def test_bytes_without_structure_are_not_coded() -> None:
    spec = spec_of("float32")
    noise = np.random.default_rng(0).integers(0, 256, spec.block_nbytes, dtype=np.uint8)
    assert encode_block([noise], spec) is None


groups = st.builds(
    lambda dtype, head_dim, layers, scales: KvGroup(
        "full", 0, layers, 1, head_dim, dtype, head_dim // 2 if scales and head_dim % 2 == 0 else 0
    ),
    st.sampled_from(sorted(_ITEM)),
    st.integers(1, 33),
    st.sampled_from([(0,), (0, 1, 2)]),
    st.booleans(),
)


@given(groups, groups, st.integers(1, 5), st.integers(0, 255), st.integers(0, 1 << 32))
def test_every_block_survives_coding(first: KvGroup, second: KvGroup, tokens: int, spread: int, seed: int) -> None:
    moved = KvGroup("window", 4, tuple(layer + 8 for layer in second.layers), 1, second.head_dim, second.dtype)
    spec = KvSpec((first, moved), tokens)
    rng = np.random.default_rng(seed)
    slots = [rng.integers(0, spread + 1, spec.slot_nbytes(g), dtype=np.uint8) for g in range(2)]
    coded = encode_block(slots, spec)
    if coded is not None:
        assert len(coded) < spec.block_nbytes
        assert equal(decoded(coded, spec), slots)


@given(st.data())
def test_a_damaged_coded_block_is_rejected_or_decoded_within_its_slots(data: st.DataObject) -> None:
    spec = spec_of("bfloat16", layers=1)
    coded = bytearray(encode_block(kv_like(spec), spec) or b"")
    for _ in range(data.draw(st.integers(1, 4))):
        coded[data.draw(st.integers(0, len(coded) - 1))] ^= data.draw(st.integers(1, 255))
    cut = bytes(coded[: data.draw(st.integers(0, len(coded)))]) if data.draw(st.booleans()) else bytes(coded)
    memory = np.full(spec.block_nbytes + 128, 7, np.uint8)
    try:
        decode_block(np.frombuffer(cut, np.uint8), [memory[64:-64]], spec)
    except CodedBlockInvalid:
        pass
    assert (memory[:64] == 7).all()
    assert (memory[-64:] == 7).all()


def with_plane(spec: KvSpec, plane: bytes) -> bytes:
    """The coded form of a block of one plane."""
    assert spec.groups[0].dtype == "float8_e5m2"
    return struct.pack("<I", len(plane)) + plane


def test_a_frame_that_declares_another_length_is_rejected_before_anything_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = spec_of("float8_e5m2")
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 28))
    assert len(bomb) < spec.block_nbytes * 16
    monkeypatch.setattr(block_coding._coders, "decompress", None)  # a call would fail with another error
    with pytest.raises(
        CodedBlockInvalid, match=f"must have {spec.block_nbytes} bytes, but its frame declares {1 << 28}"
    ):
        decoded(with_plane(spec, bomb), spec)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda coded: coded[:2], "must have at least 4 bytes, got 2"),
        (lambda coded: coded + b"\0", "must end with its last plane"),
        (lambda coded: coded[:-1], "must end within the coded block's"),
        (lambda coded: coded[:4] + b"\0" + coded[5:], "must be a valid zstd frame"),
        (lambda coded: struct.pack("<I", len(coded)) + coded[4:] + bytes(4), "must be a valid zstd frame"),
    ],
    ids=["short", "longer", "truncated", "no frame", "data after the frame"],
)
def test_what_is_no_coded_block_is_rejected_by_name(change: Any, message: str) -> None:
    spec = spec_of("float8_e5m2")
    coded = with_plane(spec, zstandard.ZstdCompressor().compress(bytes(spec.block_nbytes)))
    assert equal(decoded(coded, spec), [np.zeros(spec.block_nbytes, np.uint8)])
    with pytest.raises(CodedBlockInvalid, match=message):
        decoded(change(coded), spec)
