"""Where reused tokens came from, and what each place is estimated to have saved."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from loadtest.cluster_metrics import ClusterHistory
from loadtest.objectives import ReplayObjectives, fit_durations
from loadtest.panels import ReportData, reuse_panels
from loadtest.record import RequestRecord, SendOutcome
from loadtest.summary import PrefillFit, fit_prefill, reuse_by_tier, tokens_by_place

FIT = PrefillFit(0.01, 1e-4, 1e-7, 50)


def record_of(index: int, n: int, p: int = 0, **extension: Any) -> RequestRecord:
    record = RequestRecord(index, float(index), n, 1, 0.0, 0, outcome=SendOutcome.COMPLETED, cached_tokens=p)
    record.extension = extension
    return record


def reused(index: int, pages: int, dram: int, ssd: int, remote: int, load_s: float = 0.0) -> RequestRecord:
    cached = {"cached_dram_tokens": dram, "cached_ssd_tokens": ssd, "cached_remote_tokens": remote}
    return record_of(index, 1000, pages + dram + ssd + remote, load_s=load_s, **cached)


def test_what_is_from_no_pool_was_in_the_workers_pages() -> None:
    assert tokens_by_place(reused(0, 5, 10, 20, 40)) == {"pages": 5, "dram": 10, "ssd": 20, "remote": 40}
    assert tokens_by_place(record_of(0, 10, 4)) is None


def test_prefill_seconds_are_fitted_over_computed_tokens_and_attended_pairs() -> None:
    def seconds(n: int, p: int) -> float:
        return 0.02 + 3e-4 * (n - p) + 2e-7 * (n * n - p * p)

    pairs = [(100 * i, 10 * i * (i % 4)) for i in range(1, 30)]
    records = [record_of(i, n, p, prefill_s=seconds(n, p)) for i, (n, p) in enumerate(pairs)]
    found = fit_prefill(records)
    assert found is not None
    assert found.requests == 29
    assert (found.constant, found.per_token, found.per_token_squared) == pytest.approx((0.02, 3e-4, 2e-7))
    assert found.of_prefix(1000) == pytest.approx(seconds(1000, 0) - 0.02)
    assert fit_prefill(records[:9]) is None


def test_no_coefficient_is_negative_and_no_duration_is_needed_twice() -> None:
    n = np.array([1.0, 2.0, 3.0])
    falling = fit_durations(np.stack([np.ones(3), n], axis=1), np.array([3.0, 2.0, 1.0]))
    assert (falling >= 0).all()
    assert fit_durations(np.ones((1, 2)), np.array([4.0])) == pytest.approx([4.0, 0.0])


def test_a_prefix_is_shared_out_by_tokens_and_loading_to_the_pool_alone() -> None:
    found = reuse_by_tier([reused(0, 100, 200, 100, 0, load_s=0.03), reused(1, 0, 0, 0, 50, load_s=1.0)], FIT)
    assert found is not None
    prefix_s = 1e-4 * 400 + 1e-7 * 400**2
    assert found["pages"] == pytest.approx(
        {"tokens": 100, "requests": 1, "compute_s": prefix_s / 4, "load_s": 0.0, "saved_s": prefix_s / 4}
    )
    assert found["dram"]["saved_s"] == pytest.approx(prefix_s / 2 - 0.02)
    assert (found["ssd"]["tokens"], found["ssd"]["load_s"]) == (100, pytest.approx(0.01))
    assert found["remote"]["saved_s"] < 0  # loading took longer than computing would have
    assert sum(place["compute_s"] for place in found.values()) == pytest.approx(prefix_s + FIT.of_prefix(50))


def test_without_a_fit_tokens_are_told_and_no_savings() -> None:
    found = reuse_by_tier([reused(0, 1, 2, 3, 4)], None)
    assert found is not None
    assert (found["ssd"]["tokens"], found["ssd"]["compute_s"], found["ssd"]["saved_s"]) == (3, None, None)


def test_a_server_that_does_not_tell_gets_no_figures_and_no_pictures() -> None:
    assert reuse_by_tier([record_of(0, 10, 4)], FIT) is None
    assert reuse_panels(evidence([record_of(0, 10, 4)])) == []


def test_each_place_that_was_used_is_drawn() -> None:
    over_time, saved = reuse_panels(evidence([reused(i, 10, 20, 30 * (i > 3), 0, load_s=0.1) for i in range(6)]))
    for picture in (over_time.svg, saved.svg):
        assert "the pool&#39;s SSD" in picture or "the pool's SSD" in picture
        assert "another host" not in picture


def evidence(records: list[RequestRecord]) -> ReportData:
    return ReportData(records, {}, ClusterHistory(), ReplayObjectives(0.0, 0.0, None), 8, reuse_by_tier(records, FIT))
