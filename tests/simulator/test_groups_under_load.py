"""Simulated prefill nodes compute long prompts together where the policy says so, and everything still ends once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from conductor.policy import PolicyConfig
from simulator.serving.cluster import SimulatedCluster
from simulator.serving.requests import Arrival, RequestEnd, SimulatedWorkload, draw_workload
from simulator.serving.settings import ServingSettings
from traces import load_trace
from worker.policy.cost_profile import MOONCAKE, load_profile

SETTINGS = ServingSettings(prefill_nodes=4, decode_nodes=2, capacity_tokens=200_192, max_batch=16, max_new_tokens=2000)
EXACT = replace(SETTINGS, chunk_tokens=4096, request_noise=0.0, step_noise=0.0, node_noise=0.0)
BLOCK = 512


def run(settings: ServingSettings, workload: SimulatedWorkload, size: int) -> SimulatedCluster:
    policy = PolicyConfig(
        attained_share=0.0, report_timeout_s=0.0, ttft_slo_s=30.0, tbt_slo_s=0.1, prefill_group_size=size
    )
    cluster = SimulatedCluster(settings, policy, load_profile(MOONCAKE), workload, seed=5)
    cluster.run()
    cluster.clock.run(lambda: cluster.conductor.validate()[1]["requests"] > 0)
    return cluster


def prompts(*tokens: int, apart_s: float) -> SimulatedWorkload:
    jobs = tuple(
        Arrival(
            i, round(i * apart_s * 1e9), i, prompt, 20, tuple(range(1000 * i, 1000 * i + prompt // BLOCK)), 0.0, 0.0
        )
        for i, prompt in enumerate(tokens)
    )
    return SimulatedWorkload(jobs, (), BLOCK, 1 / apart_s, len(tokens) * apart_s)


def last_ttft_s(size: int, prompt: int) -> float:
    """Return the TTFT of a long prompt on an idle cluster that has learned its costs from others."""
    learned = [1000 + 3000 * (i % 12) for i in range(60)]
    cluster = run(EXACT, prompts(*learned, prompt, apart_s=60.0), size)
    work = cluster.works[-1]
    assert len(work.helpers) == size - 1
    assert work.computed == prompt
    return work.ttft_s


@pytest.mark.nightly
def test_a_long_prompt_takes_little_more_than_its_share_of_the_time_on_an_idle_cluster() -> None:
    alone_s = last_ttft_s(1, 65_536)
    for size in (2, 4):
        assert alone_s / size < last_ttft_s(size, 65_536) < 1.2 * alone_s / size


def test_a_prompt_that_is_one_chunk_is_computed_by_its_own_node_alone() -> None:
    small = replace(EXACT, chunk_tokens=BLOCK)
    policy = PolicyConfig(attained_share=0.0, report_timeout_s=0.0, prefill_group_size=4, prefill_group_min_tokens=1)
    cluster = SimulatedCluster(small, policy, load_profile(MOONCAKE), prompts(BLOCK, apart_s=1.0), seed=5)
    cluster.run()
    assert cluster.works[0].helpers == ()
    assert cluster.works[0].computed == BLOCK


@pytest.mark.parametrize("size", [2, 4])
def test_under_load_every_request_ends_whole_and_nothing_is_held(size: int) -> None:
    workload = draw_workload(load_trace("conversation"), seed=5, rate_per_s=1.5, requests=150, longest_answer=2000)
    cluster = run(replace(SETTINGS, chunk_tokens=2048), workload, size)
    served = [work for work in cluster.works if work.end is RequestEnd.FINISHED]
    assert all(work.end is not None for work in cluster.works)
    assert all(work.computed == work.job.prompt_tokens for work in served)
    assert sum(bool(work.helpers) for work in served) > 5
    assert all(node.free_tokens == SETTINGS.capacity_tokens for node in cluster.decode.values())
    assert cluster.conductor.validate() == ([], dict.fromkeys(cluster.conductor.validate()[1], 0))
