"""Workloads and summary of the eviction benchmark."""

import pytest

from benchmarks import eviction
from benchmarks.evicting.drawing import build
from benchmarks.evicting.held_out import HELD_OUT
from benchmarks.evicting.tuning import TUNING


@pytest.mark.parametrize("name", ["recent", "agents"])
def test_a_workload_is_determined_by_its_seed(name: str) -> None:
    assert build(name, TUNING[name], 5).chains == build(name, TUNING[name], 5).chains
    assert build(name, TUNING[name], 5).chains != build(name, TUNING[name], 6).chains


def test_no_workload_is_both_for_tuning_and_held_out() -> None:
    assert not set(TUNING) & set(HELD_OUT)


def cell(lru: float, arc: float, moonpool: float, belady: float) -> eviction.Cell:
    rates = {"lru": lru, "arc": arc, "moonpool": moonpool, "belady": belady}
    best = max(lru, arc)
    closed = (moonpool - best) / (belady - best) if belady - best >= 0.01 else None
    costs = {"references": 100, "moonpool_us": 4.0, "lru_us": 2.0}
    return {"capacity": 10_000, "minus_best_classic": moonpool - best, "gap_closed": closed} | rates | costs


def test_the_summary_has_the_worst_margin_and_the_mean_of_the_gaps_that_matter() -> None:
    cells = [cell(0.5, 0.6, 0.65, 0.7), cell(0.3, 0.2, 0.29, 0.301), cell(0.1, 0.1, 0.1, 0.2)]
    result = eviction.result_of({"held-out": cells, "trace": [cell(0.2, 0.2, 0.25, 0.3)]}, 1)
    assert result["worst_minus_best_classic"] == pytest.approx(-0.01)
    assert result["mean_gap_closed"] == pytest.approx(0.25)
    assert result["bundled_trace_10000"] == 0.25
    assert result["us_per_reference"] == 4.0
