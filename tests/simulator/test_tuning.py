"""Simulated results of other objectives and splits: points, the command, its picture."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from moonpool.cli import app
from simulator.errors import BadSetting
from simulator.serving.overload_spec import OverloadScenario, overload_spec
from simulator.serving.runs import RunSpec, run_one
from simulator.serving.tuning import Tuning, tune
from worker.policy.cost_profile import MOONCAKE

BASE = ["--rate", "3", "--prefill", "2", "--decode", "2", "--ttft", "10", "--requests", "60", "--seeds", "1"]


@pytest.fixture(scope="module")
def spec() -> RunSpec:
    """More arrives than two and two nodes can do."""
    made = overload_spec(
        OverloadScenario(
            "conversation",
            MOONCAKE,
            prefill_nodes=2,
            decode_nodes=2,
            ttft_s=10.0,
            tbt_s=0.1,
            requests=100,
            output_scale=1.0,
            longest_prompt=0,
            longest_answer=0,
            pool_blocks=500,
            ssd_blocks=0,
            look_into=0.0,
            attained_share=0.95,
        )
    )
    return replace(made, rate_per_s=3.0)


@pytest.fixture(scope="module")
def found(spec: RunSpec) -> Tuning:
    return tune(spec, ttft_s=(2.0, 60.0), tbt_s=(), prefill_nodes=(1, 3), seeds=2, processes=2)


def test_each_kind_has_its_values_and_the_base_in_their_order(found: Tuning) -> None:
    assert [(point.ttft_objective_s, point.is_base) for point in found.of("ttft")] == [
        (2.0, False),
        (10.0, True),
        (60.0, False),
    ]
    assert [(point.prefill_nodes, point.decode_nodes) for point in found.of("split")] == [(1, 3), (2, 2), (3, 1)]
    assert found.of("tbt") == []


def test_a_point_is_what_runs_of_its_own_setting_come_to(found: Tuning, spec: RunSpec) -> None:
    settings, policy = replace(spec.settings, ttft_objective_s=60.0), replace(spec.policy, ttft_slo_s=60.0)
    alone = replace(spec, settings=settings, policy=policy)
    outcomes = [run_one(replace(alone, seed=seed)).outcome for seed in range(2)]
    point = found.of("ttft")[-1]
    assert point.goodput.mean == pytest.approx(sum(each.goodput for each in outcomes) / 2)
    for point in found.points:
        assert point.good.mean + point.rejected.mean + point.missed.mean == pytest.approx(1.0)


def test_under_overload_a_stricter_objective_is_met_by_fewer(found: Tuning) -> None:
    strict, base, loose = found.of("ttft")
    assert strict.good.mean < base.good.mean <= loose.good.mean
    assert strict.rejected.mean > loose.rejected.mean
    assert strict.ttft_p90_s.mean < loose.ttft_p90_s.mean


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"prefill_nodes": (4,)}, "leaves 0 for decode"),
        ({"prefill_nodes": (0,)}, "both need at least one"),
        ({"ttft_s": (-1.0,)}, "an objective must be above 0 s and below a day, got -1 s"),
        ({"tbt_s": (float("nan"),)}, "an objective must be above 0 s and below a day, got nan s"),
        ({"seeds": 0}, "0 seeds"),
    ],
)
def test_what_cannot_be_tried_is_refused(spec: RunSpec, values: dict[str, Any], said: str) -> None:
    standard: dict[str, Any] = {"ttft_s": (), "tbt_s": (), "prefill_nodes": (), "seeds": 1, "processes": 1}
    with pytest.raises(BadSetting, match=said):
        tune(spec, **(standard | values))


def test_the_command_shows_draws_and_tells(tmp_path: Path) -> None:
    picture = tmp_path / "tune.svg"
    done = CliRunner().invoke(
        app, ["simulate", "tune", *BASE, "--try-ttft", "5", "--try-prefill", "1", "--plot", str(picture)]
    )
    assert done.exit_code == 0, done.output
    told = json.loads(done.output.splitlines()[-1])
    assert [(point["varied"], point["is_base"]) for point in told["points"]] == [
        ("ttft", False),
        ("ttft", True),
        ("split", False),
        ("split", True),
    ]
    assert "1+3" in done.output
    assert "<svg" in picture.read_text()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "nothing to try"),
        (["--try-ttft", "1,fast"], "--try-ttft"),
        (["--try-prefill", "1.5"], "--try-prefill"),
        (["--try-prefill", "16"], "both need at least one"),
        (["--rate", "0", "--try-ttft", "1"], "--rate must be positive, got 0"),
        (["--try-ttft", "1", "--plot", "tune.gif"], "tune.gif"),
    ],
)
def test_a_wrong_flag_is_answered_by_what_was_expected(flags: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["simulate", "tune", *flags])
    assert done.exit_code == 2
    assert said in done.output
