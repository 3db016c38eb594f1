"""The benchmarks of elastic and heterogeneous clusters: loads known ahead, predictors that see no future, kinds."""

import argparse
import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import elastic, heterogeneous
from benchmarks.latency_predictors import BoostedTrees, LinearModel, Observation, predict_online
from benchmarks.simulated import simulated_spec
from simulator.serving.requests import Arrival, SimulatedRequest
from simulator.serving.runs import RunSpec


@pytest.fixture
def spec() -> RunSpec:
    given = argparse.Namespace(trace="conversation", prefill=8, decode=8, ttft=30.0, tbt=0.1, requests=40)
    return replace(simulated_spec(given, "predicted-uniform"), rate_per_s=2.0)


@pytest.mark.parametrize("regression", [LinearModel, BoostedTrees])
def test_regressions_learn_what_depends_on_their_features(regression: type[LinearModel] | type[BoostedTrees]) -> None:
    rng = np.random.default_rng(1)
    features = rng.uniform(1, 10, (800, 3))
    values = 0.1 + 0.5 * features[:, 0] + 0.2 * features[:, 2]
    errors = np.abs(regression(features[:600], values[:600]).predict(features[600:]) / values[600:] - 1)
    assert np.median(errors) < 0.06


def test_predictions_use_only_what_was_known_at_the_placement() -> None:
    def observed(value_after: float) -> list[Observation]:
        return [
            Observation(i * 10, i * 10 + 5, (float(i % 7),), value_after if i >= 250 else 1.0 + i % 7)
            for i in range(400)
        ]

    calm, changed = (predict_online(observed(value), LinearModel) for value in (3.0, 50.0))
    assert calm[:100] == [0.0] * 100
    assert calm[:300] == changed[:300]
    assert calm[399] != changed[399]


def test_every_kind_prefills_and_decodes_and_a_run_reports_errors_of_each(spec: RunSpec) -> None:
    assert set(heterogeneous.HOSTS[:8]) == set(heterogeneous.HOSTS[8:]) == set(heterogeneous.KINDS)
    fast, slow = (heterogeneous.kind_profile(kind) for kind in (("A800", 8), ("H20", 4)))
    assert slow.prefill_s(8192) > 3 * fast.prefill_s(8192)
    assert slow.decode_s(8, 8192) == pytest.approx(fast.decode_s(8, 8192), rel=0.2)
    found = heterogeneous.run(spec, 0, per_node=True)
    predictions = heterogeneous._policy_predictions(found.placed)
    errors = heterogeneous._errors(found.placed, predictions)
    assert errors["ttft"]["all"]["num"] > 20
    assert errors["ttft"]["all"]["p50"] <= errors["ttft"]["all"]["p90"]
    assert json.loads(json.dumps(errors)) == errors


def test_loads_are_computation_at_arrival_and_pages_while_decoding() -> None:
    work = SimulatedRequest(Arrival(0, 20_000_000_000, 0, 1000, 10, (), 0.0, 0.0))
    work.prefill_s, work.committed_tokens = 5.0, 500
    work.first_token_ns, work.end_ns = 25_000_000_000, 45_000_000_000
    loads = elastic.loads_of([work], 1000, 60.0, 10.0, 10.0)
    assert loads["prefill"].tolist() == [0, 0, 0.5, 0, 0, 0]
    assert loads["decode"].tolist() == [0, 0, 0.5, 0.5, 0.5, 0]


def test_autoscaling_grows_with_the_demand_and_foresight_by_what_is_known(spec: RunSpec) -> None:
    args = argparse.Namespace(trace="conversation")
    workload = elastic._drawn(args, 0, 3.0, 180.0, scale=1.0, prompt=16384, answer=2000)
    spec = replace(spec, settings=replace(spec.settings, max_new_tokens=2000))
    scaled = elastic.run(spec, workload, (1, 1), 0, elastic.autoscaling)
    assert max(nodes for _, role, nodes in scaled.changes if role == "prefill") > 1
    loads = {"prefill": np.full(10, 2.5), "decode": np.full(10, 1.5)}
    ahead = elastic.run(spec, workload, (1, 1), 0, elastic.foresight(loads, 30.0))  # type: ignore[arg-type]
    assert [nodes for _, role, nodes in ahead.changes if role == "prefill"] == [1, 2, 3]
    assert ahead.changes[-1][0] == pytest.approx(60.0, abs=0.1)
    assert ahead.node_hours > 0
