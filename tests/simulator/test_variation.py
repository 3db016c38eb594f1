"""Workloads that vary over time, and the bound of goodput for an admission that knows them in advance."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.errors import BadSetting
from simulator.serving.clock import NS
from simulator.serving.offline_bound import offline_bound
from simulator.serving.overload_spec import OverloadScenario, overload_spec
from simulator.serving.requests import draw_workload
from simulator.serving.runs import run_one, with_mode, workload_of
from simulator.serving.variation import Variation
from traces import load_trace
from worker.policy.cost_profile import MOONCAKE, load_profile


@pytest.fixture(scope="module")
def drawn():
    return draw_workload(load_trace("conversation"), seed=1, rate_per_s=20.0, requests=2400)


def test_bursts_bring_two_thirds_of_a_period_s_arrivals_in_its_first_third(drawn):
    varied = Variation(burst_period_s=30.0).of(drawn, 0)
    at_s = np.array([job.arrival_ns / NS for job in varied.jobs])
    assert (np.diff(at_s) >= 0).all()
    assert (at_s < varied.duration_s).all()
    assert np.mean(at_s % 30 < 10) == pytest.approx(2 / 3, abs=0.03)
    assert [replace(job, arrival_ns=0) for job in varied.jobs] == [replace(job, arrival_ns=0) for job in drawn.jobs]


@given(st.floats(1.0, 100.0))
def test_bursts_keep_the_order_and_the_period_of_arrivals(drawn, period_s):
    varied = Variation(burst_period_s=period_s).of(drawn, 0)
    period_ns = round(period_s * NS)
    for before, after in zip(drawn.jobs, varied.jobs, strict=True):
        assert (
            before.arrival_ns // period_ns * period_ns
            <= after.arrival_ns
            <= -(-before.arrival_ns // period_ns) * period_ns
        )
    assert all(a.arrival_ns <= b.arrival_ns for a, b in zip(varied.jobs, varied.jobs[1:], strict=False))


def test_answers_drift_from_the_first_factor_to_the_last_within_the_limit(drawn):
    varied = Variation(answers_from=0.5, answers_to=2.0).of(drawn, 1500)
    factors = np.array(
        [
            b.output_tokens / a.output_tokens
            for a, b in zip(drawn.jobs, varied.jobs, strict=True)
            if 100 < a.output_tokens < 700
        ]
    )
    assert factors[:20].mean() == pytest.approx(0.5, abs=0.02)
    assert factors[-20:].mean() == pytest.approx(2.0, abs=0.05)
    assert max(job.output_tokens for job in varied.jobs) == 1500
    assert [job.arrival_ns for job in varied.jobs] == [job.arrival_ns for job in drawn.jobs]


@pytest.mark.parametrize("fields", [{"burst_period_s": -1.0}, {"answers_from": 0.0}, {"answers_to": float("inf")}])
def test_a_variation_that_is_none_is_refused(fields):
    with pytest.raises(BadSetting, match=next(iter(fields))):
        Variation(**fields)


@pytest.fixture(scope="module")
def spec():
    scenario = OverloadScenario(
        "conversation",
        MOONCAKE,
        prefill_nodes=2,
        decode_nodes=2,
        ttft_s=10.0,
        tbt_s=0.05,
        requests=200,
        output_scale=2.0,
        longest_prompt=0,
        longest_answer=0,
        pool_blocks=500,
        ssd_blocks=0,
        look_into=0.0,
        attained_share=0.95,
    )
    return overload_spec(scenario)


def bound_of(spec, from_s=0.0, **settings):
    profile = load_profile(spec.profile)
    return offline_bound(workload_of(spec), replace(spec.settings, **settings), profile, from_s=from_s)


def test_without_overload_the_bound_is_the_number_of_arrivals(spec):
    quiet = replace(spec, rate_per_s=0.05)
    workload = workload_of(quiet)
    assert bound_of(quiet) == pytest.approx(len(workload.jobs) / workload.duration_s)


def test_under_overload_the_bound_is_below_the_arrivals_and_grows_with_the_nodes(spec):
    loaded = replace(spec, rate_per_s=30.0, requests=1000)
    workload = workload_of(loaded)
    found = [bound_of(loaded, prefill_nodes=count, decode_nodes=count) for count in (1, 2, 4)]
    assert 0 < found[0] < found[1] < found[2] < len(workload.jobs) / workload.duration_s
    assert found[2] < 4 * found[0] + 1e-9  # the cheapest are served first


def test_no_admission_serves_more_than_the_bound(spec):
    loaded = replace(spec, rate_per_s=6.0, requests=600)
    run = run_one(with_mode(loaded, "predicted"))
    assert 0 < run.outcome.goodput <= bound_of(loaded, from_s=0.15 * workload_of(loaded).duration_s)
