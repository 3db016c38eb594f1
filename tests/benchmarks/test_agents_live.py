"""The live benchmark of agents: times of its profile, and the figures of its pairs."""

import argparse
from typing import Any

import pytest

from benchmarks.agents_live import SCALE, result_of, settings_of
from benchmarks.frontend.overload_load import scaled_profile
from traces.agents import AgentSettings
from worker.policy.cost_profile import MOONCAKE, load_profile


def run(job_s: float) -> dict[str, Any]:
    return {"mean_job_s": job_s, "share_cached": 0.5, "ttft_p50_s": 1.0, "ttft_p90_s": 2.0}


def test_a_prompt_with_a_part_of_the_tokens_takes_the_time_of_the_full_one() -> None:
    full, live = load_profile(MOONCAKE), scaled_profile(SCALE, max_len=8192, max_batch=32)
    assert live.prefill_s(64_000 // SCALE, 32_000 // SCALE) == pytest.approx(full.prefill_s(64_000, 32_000), rel=0.01)
    assert settings_of(4, 8.0, 0).system_tokens * SCALE == AgentSettings().system_tokens


def test_the_ratio_is_the_geometric_mean_of_the_pairs_and_each_pair_is_listed() -> None:
    pairs = [
        {"seed": 0, "with": run(50.0), "without": run(100.0)},
        {"seed": 1, "with": run(80.0), "without": run(40.0)},
    ]
    result = result_of(pairs, argparse.Namespace(memory=0.2))
    assert result["ratios"] == [0.5, 2.0]
    assert result["agent_completion_ratio_live"]["mean"] == pytest.approx(1.0)
