"""The bundled trace, by the figures that were measured on it, and samples of it."""

from __future__ import annotations

import lzma
from importlib import resources

import numpy as np
import pytest

from traces import (
    BundledTraceDamaged,
    Trace,
    family_keys,
    first_requests,
    first_seconds,
    load_conversation,
    load_trace,
    reuse_statistics,
    sample_families,
)
from traces.reader import conversation_from


@pytest.fixture(scope="module")
def conversation() -> Trace:
    return load_conversation()


def test_the_measured_figures_hold(conversation: Trace) -> None:
    found = reuse_statistics(conversation)
    assert found.requests == 12_031
    assert conversation.duration_s == pytest.approx(3_537, abs=0.5)
    assert found.block_references == 288_500
    assert found.unique_blocks == 182_790
    assert found.block_hit_rate == pytest.approx(0.3664, abs=5e-5)
    assert found.full_block_hit_rate == pytest.approx(0.3819, abs=5e-5)
    assert found.token_hit_rate == pytest.approx(0.37338, abs=5e-6)
    inputs = np.array([row.input_length for row in conversation])
    assert np.mean(inputs) == pytest.approx(12_035, abs=1)
    assert np.percentile(inputs, [50, 90, 99]) == pytest.approx([6_909, 27_367, 85_400], rel=1e-3)
    assert inputs.max() == 126_195
    assert np.mean([row.output_length for row in conversation]) == pytest.approx(343, abs=1)
    assert all(row.hash_ids[0] == 0 for row in conversation)
    assert conversation.notices == ()


def test_the_licence_comes_with_the_trace() -> None:
    data = resources.files("traces").joinpath("data")
    notice = data.joinpath("NOTICE").read_text()
    assert "Apache License, Version 2.0" in notice
    assert "github.com/kvcache-ai/Mooncake" in notice
    assert "TERMS AND CONDITIONS FOR USE, REPRODUCTION, AND DISTRIBUTION" in data.joinpath("LICENSE").read_text()


def test_damaged_bytes_are_refused() -> None:
    packed = resources.files("traces").joinpath("data", "conversation_trace.jsonl.xz").read_bytes()
    plain = lzma.decompress(packed)
    altered = plain.replace(b'"output_length": 500', b'"output_length": 501', 1)
    with pytest.raises(BundledTraceDamaged, match="sha256"):
        conversation_from(lzma.compress(altered, preset=0))
    with pytest.raises(BundledTraceDamaged, match="unpacked"):
        conversation_from(packed[: len(packed) // 2])


def test_a_tenth_of_the_families_is_like_the_whole(conversation: Trace) -> None:
    sample = sample_families(load_trace("conversation"), 0.1)
    found, whole = reuse_statistics(sample), reuse_statistics(conversation)
    assert found.requests == pytest.approx(1_200, abs=30)
    assert found.block_hit_rate == pytest.approx(0.367, abs=0.005)
    assert found.token_hit_rate == pytest.approx(whole.token_hit_rate, abs=0.005)
    computed = found.prompt_tokens * (1 - found.token_hit_rate) * 8 / 512
    assert computed == pytest.approx(140_000, rel=0.03)
    assert "737 of 7373 prefix families" in sample.notices[-1]


def test_families_are_kept_or_dropped_whole(conversation: Trace) -> None:
    kept = {row.hash_ids[1] for row in sample_families(conversation, 0.05, seed=3)}
    expected = [row for row in conversation if row.hash_ids[1] in kept]
    assert sample_families(conversation, 0.05, seed=3).rows == tuple(expected)


def test_a_smaller_sample_is_within_a_larger_one(conversation: Trace) -> None:
    small, large = (sample_families(conversation, f, seed=1) for f in (0.02, 0.2))
    assert set(small.rows) < set(large.rows)
    assert sample_families(conversation, 1.0).rows == conversation.rows


def test_another_seed_is_another_sample(conversation: Trace) -> None:
    assert sample_families(conversation, 0.1, seed=1).rows != sample_families(conversation, 0.1, seed=2).rows


def test_limit_and_duration_take_the_beginning(conversation: Trace) -> None:
    assert first_requests(conversation, 5).rows == conversation.rows[:5]
    start = first_seconds(conversation, 60)
    assert start.rows == tuple(r for r in conversation if r.timestamp_ms < 60_000)
    assert len(set(family_keys(start))) <= len(start)
