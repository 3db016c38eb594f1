"""Simulated aggregated workers: the baseline that computes prompts and answers in merged steps on the same hardware."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest

from conductor.policy import PolicyConfig
from simulator.serving.clock import NS
from simulator.serving.cluster import SimulatedCluster
from simulator.serving.requests import Arrival, RequestEnd, SimulatedWorkload, draw_workload
from simulator.serving.settings import ServingSettings
from traces import load_trace
from worker.policy.cost_profile import MOONCAKE, CostProfile, load_profile

SETTINGS = ServingSettings(prefill_nodes=2, decode_nodes=2, is_aggregated=True, max_new_tokens=2000)
EXACT = {"request_noise": 0.0, "step_noise": 0.0, "node_noise": 0.0}


@pytest.fixture(scope="module")
def profile() -> CostProfile:
    return load_profile(MOONCAKE)


def run(workload: SimulatedWorkload, profile: CostProfile, settings: ServingSettings = SETTINGS) -> SimulatedCluster:
    policy = PolicyConfig(attained_share=0.0, report_timeout_s=0.0, max_queue_s=1e6, admission_mode="none")
    cluster = SimulatedCluster(settings, policy, profile, workload, seed=4)
    cluster.run()
    return cluster


def jobs(*found: Arrival) -> SimulatedWorkload:
    return SimulatedWorkload(found, (), 512, 1.0, found[-1].arrival_ns / NS)


def job(index: int, arrival_s: float, blocks: tuple[int, ...], output_tokens: int) -> Arrival:
    return Arrival(index, round(arrival_s * NS), index, 512 * len(blocks) + 9, output_tokens, blocks, 0.0, 0.0)


def test_every_node_computes_prompts_and_answers_and_nothing_is_left(profile: CostProfile) -> None:
    trace = load_trace("conversation")
    workload = draw_workload(trace, seed=2, rate_per_s=1.5, requests=100, longest_prompt=30_000, longest_answer=2000)
    cluster = run(workload, profile)
    assert {work.prefill_node for work in cluster.works} == {f"aggregated-{i}" for i in range(4)}
    for work in cluster.works:
        assert (work.end, work.decode_node, work.generated) == (RequestEnd.FINISHED, "", work.job.output_tokens)
    cluster.clock.run(lambda: cluster.conductor.validate()[1]["requests"] > 0)
    assert {node.free_tokens for node in cluster.decode.values()} == {SETTINGS.capacity_tokens}
    assert cluster.backlogs_s() == [0.0] * 4
    errors = [abs(work.predicted_ttft_s - work.ttft_s) for work in cluster.works[50:]]
    assert fmean(errors) < fmean(work.ttft_s for work in cluster.works[50:])


def test_a_lone_request_takes_what_the_profile_says(profile: CostProfile) -> None:
    cluster = run(jobs(job(0, 1.0, tuple(range(8)), 11)), profile, replace(SETTINGS, **EXACT))
    (work,) = cluster.works
    prompt = work.job.prompt_tokens
    assert work.ttft_s == pytest.approx(profile.prefill_s(prompt), abs=0.01)
    steps_s = sum(profile.decode_s(1, prompt + done) for done in range(1, 11))
    assert (work.end_ns - work.first_token_ns) / NS == pytest.approx(steps_s, rel=0.01)


def test_the_next_turn_reuses_the_prefix_where_it_is(profile: CostProfile) -> None:
    blocks = tuple(range(100, 116))
    cluster = run(jobs(job(0, 0.0, blocks, 2), job(1, 20.0, (*blocks, 500), 2)), profile)
    assert [work.reused_tokens for work in cluster.works] == [0, 16 * 512]
    assert cluster.works[0].prefill_node == cluster.works[1].prefill_node


@pytest.mark.parametrize(("chunk_tokens", "slowest_s"), [(8192, 0.9), (512, 0.09)])
def test_a_prompt_that_arrives_beside_an_answer_delays_its_tokens_by_a_chunk(
    profile: CostProfile, chunk_tokens: int, slowest_s: float
) -> None:
    settings = replace(SETTINGS, prefill_nodes=1, decode_nodes=1, chunk_tokens=chunk_tokens, **EXACT)
    answers = [job(index, 0.01 * index, (index,), 400) for index in (0, 1)]
    cluster = run(jobs(*answers, job(2, 3.0, tuple(range(100, 140)), 2)), profile, settings)
    assert {work.prefill_node for work in cluster.works[:2]} == {"aggregated-0", "aggregated-1"}
    intervals_s = [ns / NS for work in cluster.works[:2] for ns, _ in work.intervals]
    assert max(intervals_s) == pytest.approx(slowest_s, rel=0.5)
