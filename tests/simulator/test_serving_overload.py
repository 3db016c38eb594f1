"""Evaluation of runs: intervals, swing, confidence, capacity, false rejects, the command."""

import json
from dataclasses import replace
from math import pi
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from conductor.policy import PolicyConfig
from moonpool.cli import app
from simulator.errors import BadSetting
from simulator.serving.capacity import find_capacity
from simulator.serving.clock import NS
from simulator.serving.cluster import SimulatedCluster
from simulator.serving.confidence import mean_of, ratio_of, share_of
from simulator.serving.outcome import swing_of
from simulator.serving.overload_spec import OverloadScenario, overload_spec
from simulator.serving.requests import Arrival, RequestEnd, SimulatedWorkload, draw_workload, slowest_tenth_s
from simulator.serving.runs import FalseRejects, RunSpec, ServingRun, in_a_copy, run_one
from simulator.serving.settings import ServingSettings
from traces import load_trace
from worker.policy.cost_profile import MOONCAKE, load_profile, save_profile

STANDARD: dict[str, Any] = {
    "prefill_nodes": 2,
    "decode_nodes": 2,
    "ttft_s": 10.0,
    "tbt_s": 0.1,
    "requests": 150,
    "output_scale": 1.0,
    "longest_prompt": 40_000,
    "longest_answer": 0,
    "pool_blocks": 500,
    "ssd_blocks": 0,
    "look_into": 0.0,
    "attained_share": 0.95,
}


@pytest.fixture(scope="module")
def spec() -> RunSpec:
    return overload_spec(OverloadScenario("conversation", MOONCAKE, **STANDARD))


def test_tbt_is_the_mean_of_the_longest_tenth() -> None:
    assert slowest_tenth_s([(NS, 90), (3 * NS, 9), (5 * NS, 1)]) == pytest.approx((5 + 9 * 3) / 10)
    assert slowest_tenth_s([(2 * NS, 1), (NS, 3)]) == 2.0
    assert slowest_tenth_s([]) == 0.0


def test_loads_in_anti_phase_are_seen_with_their_lag() -> None:
    times = np.arange(1200.0)
    prefill = 1 + np.sin(2 * pi * times / 100)
    found = swing_of(prefill, 1 - 0.5 * np.sin(2 * pi * (times - 10) / 100), step_s=1.0)
    assert found.lag_correlation == pytest.approx(-1, abs=0.02)
    assert found.lag_s == pytest.approx(10, abs=1)
    assert found.prefill_std == pytest.approx(2 * found.decode_std, rel=0.02)
    assert swing_of(prefill, prefill * 0 + 3, step_s=1.0).lag_correlation == 0


def test_intervals_of_means_are_students() -> None:
    found = mean_of([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0])
    assert found.mean == 5.5
    assert found.high - 5.5 == pytest.approx(2.262157 * 3.027650 / 10**0.5, rel=1e-3)
    assert mean_of([3.0]).low == 3.0
    assert mean_of([1.0, 2.0]).high == pytest.approx(1.5 + 12.7062 * 0.5, rel=1e-3)


def test_ratios_of_pairs_do_not_depend_on_which_is_divided() -> None:
    over, under = [2.0, 8.0, 4.0], [1.0, 1.0, 1.0]
    found, inverse = ratio_of(over, under), ratio_of(under, over)
    assert found.mean == pytest.approx(4.0)
    assert 0 < inverse.low == pytest.approx(1 / found.high)


def test_intervals_of_shares_are_wilsons() -> None:
    found = share_of(1, 10)
    assert found is not None
    assert (found.low, found.high) == (pytest.approx(0.01788, rel=1e-3), pytest.approx(0.40415, rel=1e-3))
    assert share_of(0, 0) is None


def test_workloads_are_the_same_for_a_seed_and_others_for_others() -> None:
    trace = load_trace("conversation")
    one, again, other = (draw_workload(trace, seed=seed, rate_per_s=5.0, requests=300) for seed in (1, 1, 2))
    assert one == again
    assert one.jobs != other.jobs
    assert len(one.jobs) == pytest.approx(300, rel=0.3)
    assert [job.arrival_ns for job in one.jobs] == sorted(job.arrival_ns for job in one.jobs)
    assert one.before


def test_capacity_is_the_highest_rate_that_is_met(spec: RunSpec) -> None:
    real = run_one(replace(spec, requests=20, rate_per_s=1.0))

    def run(specs: list[RunSpec]) -> list[ServingRun]:
        assert {one.policy.admission_mode for one in specs} == {"none"}
        good = [1000 if one.rate_per_s <= 37 else 100 for one in specs]
        return [replace(real, outcome=replace(real.outcome, arrived=1000, good=count)) for count in good]

    found = find_capacity(spec, 2, run, lambda rate, attainment: None)
    assert 37 / 1.03 <= found.rate_per_s <= 37


def test_objectives_that_no_rate_meets_are_said_to_be_too_strict(spec: RunSpec) -> None:
    real = run_one(replace(spec, requests=20, rate_per_s=1.0))
    missed = replace(real, outcome=replace(real.outcome, arrived=1000, good=0))
    with pytest.raises(BadSetting, match="too strict"):
        find_capacity(spec, 1, lambda specs: [missed] * len(specs), lambda rate, attainment: None)


@pytest.mark.parametrize("longest_prompt", [1, -1])
def test_where_no_prompt_is_short_enough_that_is_said(longest_prompt: int) -> None:
    with pytest.raises(BadSetting, match="no prompt of conversation"):
        run_one(
            overload_spec(OverloadScenario("conversation", MOONCAKE, **{**STANDARD, "longest_prompt": longest_prompt}))
        )


def test_answers_that_no_decode_node_would_have_a_part_in_are_refused() -> None:
    with pytest.raises(BadSetting, match="max_new_tokens must be at least 2, got 1"):
        overload_spec(OverloadScenario("conversation", MOONCAKE, **{**STANDARD, "longest_answer": 1}))


@pytest.mark.parametrize("name", ["capacity_tokens", "max_batch"])
def test_a_profile_whose_machine_is_given_in_words_is_refused_by_the_field(tmp_path: Path, name: str) -> None:
    profile = load_profile(MOONCAKE)
    path = tmp_path / "profile.json"
    save_profile(replace(profile, engine={**profile.engine, name: "plenty"}), path)
    with pytest.raises(BadSetting, match=rf"engine.{name} of profile .* must be an integer, got 'plenty'"):
        overload_spec(OverloadScenario("conversation", path, **STANDARD))


@pytest.mark.parametrize(("gap_s", "would_be_good"), [(60.0, 1), (0.01, 0)])
def test_a_rejected_request_is_tried_out_in_a_copy(gap_s: float, would_be_good: int) -> None:
    """Held to a microsecond, everything is rejected; whether it would have met 5 s depends on who came before."""
    first = Arrival(0, 0, 0, 120_000, 1, (), 0.0, 0.0)
    second = Arrival(1, round(gap_s * NS), 1, 4000, 5, (), 0.0, 0.0)
    settings = ServingSettings(prefill_nodes=1, decode_nodes=1, ttft_objective_s=5.0, max_new_tokens=10)
    policy = PolicyConfig(
        attained_share=0.0, report_timeout_s=0.0, ttft_slo_s=1e-6, tbt_slo_s=1.0, admission_mode="predicted"
    )
    workload = SimulatedWorkload((first, second), (), 512, 1.0, gap_s)
    cluster = SimulatedCluster(settings, policy, load_profile(MOONCAKE), workload, seed=1)
    oracle = FalseRejects(cluster, share=1.0, from_ns=1)
    if not would_be_good:
        cluster.clock.at(0, lambda: _force(cluster, first))
    cluster.run()
    assert (oracle.num_tried, oracle.num_false) == (1, would_be_good)
    assert all(work.end is RequestEnd.REJECTED for work in cluster.works if work.job is second)


def _force(cluster: SimulatedCluster, job: Arrival) -> None:
    cluster.num_open += 1
    cluster.admit(replace(job, index=99))


def test_a_copy_changes_nothing_here_and_says_why_it_failed(capfd: pytest.CaptureFixture[str]) -> None:
    numbers = [1]

    def change() -> bool:
        numbers.append(2)
        return len(numbers) == 2

    assert in_a_copy(change)
    assert numbers == [1]
    with pytest.raises(ChildProcessError):
        in_a_copy(lambda: 1 // 0 == 0)
    assert "ZeroDivisionError" in capfd.readouterr().err


@pytest.fixture
def invoke() -> Any:
    return lambda *arguments: CliRunner().invoke(app, ["simulate", "overload", *map(str, arguments)])


def test_the_command_compares_modes_draws_and_writes_json(invoke: Any, tmp_path: Path) -> None:
    picture, full = tmp_path / "overload.svg", tmp_path / "overload.json"
    done = invoke(
        *("--seeds", 1, "--requests", 80, "--rate", 4, "--prefill", 1, "--decode", 1, "--processes", 1),
        *("--longest-prompt", 30_000, "--modes", "none,predicted", "--look-into", 0.5, "--ttft", 5),
        *("--plot", picture, "--json", full),
    )
    assert done.exit_code == 0, done.output
    summary = json.loads(done.stdout.splitlines()[-1])
    assert [row["mode"] for row in summary["summaries"]] == ["none", "predicted"]
    none, predicted = summary["summaries"]
    assert predicted["goodput"]["mean"] > none["goodput"]["mean"]
    assert predicted["rejects_tried"] > 0
    assert b"<svg" in picture.read_bytes()[:2000]
    runs = json.loads(full.read_text())["runs"]
    assert [run["mode"] for run in runs] == ["none", "predicted"]
    assert len(runs[0]["prefill_load"]) == len(runs[0]["decode_load"]) > 10


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--modes", "none,random"], "unknown admission mode 'random'; choose from none, load, early"),
        (["--profile", "nowhere.json"], "cost profile nowhere.json cannot be read"),
        (["--load", "-1"], "a load of -1.0"),
        (["--tbt", "0"], "tbt_objective_s must be finite and above 0, got 0.0"),
        (["--output-scale", "0"], "output_scale must be above 0 and below 1000, got 0.0"),
        (["--plot", "overload.gif"], "must end in one of .svg, .png"),
        (["--json", "nowhere/full.json"], "there is no folder nowhere"),
        (["nowhere.jsonl"], "cannot open the trace nowhere.jsonl"),
    ],
)
def test_bad_input_of_the_command_is_named(invoke: Any, arguments: list[str], complaint: str) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert complaint in done.stderr
