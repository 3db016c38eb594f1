"""Reuse statistics and sampling on made-up traces, against plain restatements."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traces import (
    EmptySelection,
    InfiniteCache,
    Trace,
    TraceError,
    TraceRow,
    family_keys,
    first_requests,
    first_seconds,
    reusable_tokens,
    reuse_statistics,
    sample_families,
    token_hit_rate,
)


@st.composite
def chained_prompts(draw: st.DrawFn) -> list[tuple[int, ...]]:
    """Paths from the root of a random tree: ids as of chained hashes."""
    children: dict[tuple[int, ...], list[int]] = {}
    names = iter(range(10_000))
    prompts = []
    for _ in range(draw(st.integers(1, 12))):
        path: tuple[int, ...] = ()
        for _ in range(draw(st.integers(1, 6))):
            known = children.setdefault(path, [])
            if known and draw(st.booleans()):
                step = draw(st.sampled_from(known))
            else:
                step = next(names)
                known.append(step)
            path = (*path, step)
        prompts.append(path)
    return prompts


def rows_of(prompts: list[tuple[int, ...]], tail: int = 512) -> Trace:
    rows = [TraceRow(i, 10 * i, 512 * (len(ids) - 1) + tail, 1, ids) for i, ids in enumerate(prompts)]
    return Trace("made up", tuple(rows))


@given(chained_prompts())
def test_an_infinite_cache_hits_the_longest_prefix_ever_seen(prompts: list[tuple[int, ...]]) -> None:
    cache, seen = InfiniteCache(), []
    for prompt in prompts:
        longest = max((_common(prompt, earlier) for earlier in seen), default=0)
        assert cache.match_and_insert(prompt) == longest
        seen.append(prompt)
    assert len(cache) == len({i for prompt in prompts for i in prompt})


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(chained_prompts(), st.integers(1, 512))
def test_rates_follow_from_the_prefixes(prompts: list[tuple[int, ...]], tail: int) -> None:
    found = reuse_statistics(rows_of(prompts, tail))
    hits = [max((_common(p, q) for q in prompts[:i]), default=0) for i, p in enumerate(prompts)]
    tokens = [512 * (len(p) - 1) + tail for p in prompts]
    assert found.block_hit_rate == pytest.approx(sum(hits) / sum(map(len, prompts)))
    full = [p[: n // 512] for p, n in zip(prompts, tokens, strict=True)]
    full_hits = [max((_common(p, q) for q in full[:i]), default=0) for i, p in enumerate(full)]
    reused = sum(512 * min(hit, (n - 1) // 512) for hit, n in zip(full_hits, tokens, strict=True))
    assert found.token_hit_rate == pytest.approx(reused / sum(tokens))
    assert token_hit_rate(zip(prompts, tokens, strict=True), 512) == found.token_hit_rate


def test_the_last_prompt_token_is_never_reusable() -> None:
    assert reusable_tokens(2, 16, 8) == 8
    assert reusable_tokens(2, 17, 8) == 16
    assert reusable_tokens(0, 100, 8) == 0


def test_an_equal_id_after_another_prefix_is_no_hit() -> None:
    cache = InfiniteCache()
    cache.match_and_insert((1, 2, 3))
    assert cache.match_and_insert((9, 2, 3)) == 0


def test_rows_of_one_id_are_families_by_id_or_by_row() -> None:
    trace = Trace(
        "t",
        (
            TraceRow(0, 0, 600, 1, (0, 5)),
            TraceRow(1, 1, 100, 1, (0,)),
            TraceRow(2, 2, 100, 1, (0,)),
            TraceRow(3, 3, 100, 1, (7,)),
            TraceRow(4, 4, 100, 1, (7,)),
            TraceRow(5, 5, 600, 1, (0, 5)),
        ),
    )
    assert family_keys(trace) == [
        ("second", 5),
        ("row", 1),
        ("row", 2),
        ("first", 7),
        ("first", 7),
        ("second", 5),
    ]


@given(chained_prompts(), st.floats(0.01, 1), st.integers(0, 5))
def test_a_sample_has_its_share_of_families_and_all_of_their_rows(
    prompts: list[tuple[int, ...]], fraction: float, seed: int
) -> None:
    trace = rows_of(prompts)
    keys = family_keys(trace)
    sample = sample_families(trace, fraction, seed=seed)
    kept = {keys[row.index] for row in sample}
    assert len(kept) == max(1, round(fraction * len(set(keys))))
    assert sample.rows == tuple(row for row in trace if keys[row.index] in kept)


@pytest.mark.parametrize("fraction", [0.0, -1.0, 1.01, float("nan")])
def test_a_fraction_outside_is_refused(fraction: float) -> None:
    with pytest.raises(TraceError, match="more than 0, at most 1"):
        sample_families(rows_of([(1,)]), fraction)


def test_limits_that_leave_nothing_are_refused() -> None:
    with pytest.raises(TraceError, match="at least 1"):
        first_requests(rows_of([(1,)]), 0)
    with pytest.raises(EmptySelection):
        first_seconds(rows_of([(1,)]), 0)
