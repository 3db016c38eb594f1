"""The benchmark of placements compares what it says: settings of each row, networks, and pairs of the same seeds."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from benchmarks import scheduling
from benchmarks.simulated import simulated_spec
from simulator.serving.runs import RunSpec, ServingRun, run_one
from worker.policy.cost_profile import load_profile


@pytest.fixture
def spec() -> RunSpec:
    given = argparse.Namespace(trace="conversation", prefill=2, decode=2, ttft=30.0, tbt=0.1, requests=30)
    return replace(simulated_spec(given, "none"), rate_per_s=2.0)


def test_every_placement_differs_from_moonpools_in_its_own_settings_only(spec: RunSpec) -> None:
    assert scheduling._placed(spec, "moonpool") == spec
    assert scheduling._placed(spec, "").policy == replace(spec.policy, max_copies=0)
    random = scheduling._placed(spec, "random")
    assert random == replace(spec, policy=replace(spec.policy, placement="random"))
    printed = scheduling._placed(spec, "algorithm1").policy
    assert (printed.placement, printed.balancing_threshold) == ("algorithm1", spec.policy.balancing_threshold)


def test_aggregated_workers_have_the_same_memory_in_all(spec: RunSpec) -> None:
    settings = scheduling._placed(spec, "aggregated, 2048").settings
    assert (settings.is_aggregated, settings.chunk_tokens) == (True, 2048)
    assert settings.pool_blocks * 4 == spec.settings.pool_blocks * 2


def test_a_network_changes_the_bandwidth_between_hosts_alone(spec: RunSpec) -> None:
    usual = load_profile(spec.profile)
    with scheduling._profile(3e9) as path:
        slow = load_profile(path)
    assert slow.transfers["fetch"].per_byte_s == slow.transfers["push"].per_byte_s == pytest.approx(1 / 3e9)
    assert {path: cost for path, cost in slow.transfers.items() if path not in ("fetch", "push")} == {
        path: cost for path, cost in usual.transfers.items() if path not in ("fetch", "push")
    }
    assert (slow.prefill, slow.decode) == (usual.prefill, usual.decode)


def test_ratios_pair_runs_of_the_same_seeds_and_the_result_is_json(
    spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_here(specs: Sequence[RunSpec], pool: Any) -> list[ServingRun]:
        return [run_one(spec) for spec in specs]

    monkeypatch.setattr(scheduling, "run_all", run_here)
    names = {name: name for name in ("cache-aware", "algorithm1", "moonpool")}
    runs = scheduling._by_name(spec, names, 2, None)  # type: ignore[arg-type]
    assert [run.seed for these in runs.values() for run in these] == [0, 1] * 3
    found = scheduling._placements(runs)
    assert found["vs_cache_aware"]["cache-aware"] == {"mean": 1.0, "low": 1.0, "high": 1.0}
    assert found["placements"]["cache-aware"]["fetched_gb"]["mean"] == 0.0
    assert json.loads(json.dumps(found)) == found
