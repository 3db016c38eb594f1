"""The simulated cluster: the live policy object, every request with one end, no node over its memory, right waits."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

import conductor.core
from conductor.policy import PolicyConfig
from simulator.serving.clock import NS
from simulator.serving.cluster import SimulatedCluster
from simulator.serving.requests import Arrival, RequestEnd, SimulatedWorkload, draw_workload
from simulator.serving.settings import KnownLengths, ServingSettings
from traces import load_trace
from worker.policy.cost_profile import MOONCAKE, CostProfile, load_profile

SETTINGS = ServingSettings(
    prefill_nodes=3, decode_nodes=3, capacity_tokens=200_192, max_batch=16, tbt_objective_s=0.03, max_new_tokens=2000
)
Build = Callable[..., SimulatedCluster]


@pytest.fixture(scope="module")
def profile() -> CostProfile:
    return load_profile(MOONCAKE)


@pytest.fixture(scope="module")
def workload() -> SimulatedWorkload:
    return draw_workload(load_trace("conversation"), seed=3, rate_per_s=8.0, requests=400, longest_prompt=60_000)


@pytest.fixture
def build(profile: CostProfile, workload: SimulatedWorkload) -> Build:
    def make(
        jobs: SimulatedWorkload = workload, settings: ServingSettings = SETTINGS, mode: str = "predicted"
    ) -> SimulatedCluster:
        policy = PolicyConfig(
            attained_share=0.0,
            report_timeout_s=0.0,
            ttft_slo_s=settings.ttft_objective_s,
            tbt_slo_s=settings.tbt_objective_s,
            admission_mode=mode,  # type: ignore[arg-type]
        )
        return SimulatedCluster(settings, policy, profile, jobs, seed=3)

    return make


def job(index: int, arrival_s: float, prompt_tokens: int, output_tokens: int = 1) -> Arrival:
    return Arrival(index, round(arrival_s * NS), index, prompt_tokens, output_tokens, (), 0.0, 0.0)


def jobs(*found: Arrival) -> SimulatedWorkload:
    return SimulatedWorkload(found, (), 512, 1.0, found[-1].arrival_ns / NS)


def test_it_drives_the_class_that_a_live_conductor_drives(build: Build) -> None:
    assert type(build().conductor) is conductor.core.Conductor


@pytest.mark.parametrize("mode", ["none", "load", "early", "predicted-uniform", "predicted"])
def test_every_request_ends_once_and_nothing_is_left(build: Build, workload: SimulatedWorkload, mode: str) -> None:
    cluster = build(mode=mode)
    cluster.run()
    ended = Counter(work.job.index for work in cluster.works if work.end is not None)
    assert ended == Counter(job.index for job in workload.jobs)
    drained_ns = cluster.clock.now_ns + 5 * NS
    cluster.clock.run(lambda: cluster.clock.now_ns < drained_ns)
    assert cluster.conductor.validate() == ([], dict.fromkeys(cluster.conductor.validate()[1], 0))
    assert {node.free_tokens for node in cluster.decode.values()} == {SETTINGS.capacity_tokens}
    assert len({work.end for work in cluster.works}) > 1 or mode == "none"


def test_no_node_holds_more_than_it_can(build: Build) -> None:
    cluster = build()
    least = []

    def watch() -> bool:
        least.append(min(node.free_tokens for node in cluster.decode.values()))
        return cluster.is_busy()

    cluster.run(watch)
    assert 0 <= min(least) < SETTINGS.capacity_tokens / 2
    assert cluster.pools.validate(SETTINGS) == []


def test_tokens_come_after_their_prefill_and_one_after_the_other(build: Build) -> None:
    cluster = build()
    cluster.run()
    served = [work for work in cluster.works if work.end is RequestEnd.FINISHED]
    assert len(served) > 50
    for work in served:
        assert work.computed == work.job.prompt_tokens
        assert work.job.arrival_ns < work.first_token_ns <= work.end_ns
        assert work.ttft_s >= work.prefill_s > 0
        assert sum(times for _, times in work.intervals) == work.job.output_tokens - 1
        assert (
            work.first_token_ns + sum(ns * times for ns, times in work.intervals) == work.end_ns or not work.intervals
        )
        if work.intervals:
            assert work.first_token_ns + work.intervals[0][0] > work.sent_ns


def test_the_same_seed_gives_the_same_run(build: Build) -> None:
    one, two = build(), build()
    for cluster in (one, two):
        cluster.run()
    ends = [[(work.job.index, work.end, work.first_token_ns, work.end_ns) for work in c.works] for c in (one, two)]
    assert ends[0] == ends[1]
    assert one.clock.now_ns == two.clock.now_ns


def test_modes_get_the_same_arrivals_but_decide_for_themselves(build: Build) -> None:
    ends = {}
    for mode in ("none", "predicted"):
        cluster = build(mode=mode)
        cluster.run()
        ends[mode] = [(work.job.arrival_ns, work.end) for work in cluster.works]
    assert [at for at, _ in ends["none"]] == [at for at, _ in ends["predicted"]]
    assert ends["none"] != ends["predicted"]


def test_one_prefill_node_waits_like_a_queue_with_even_service_times(build: Build, profile: CostProfile) -> None:
    settings = replace(
        SETTINGS, prefill_nodes=1, request_noise=0.0, node_noise=0.0, chunk_tokens=8192, ttft_objective_s=1e6
    )
    service_s = profile.prefill_s(4096)
    busy = 0.7
    rng = np.random.default_rng(5)
    arrivals = np.cumsum(rng.exponential(service_s / busy, 3000))
    cluster = build(jobs(*(job(i, float(at), 4096) for i, at in enumerate(arrivals))), settings, "none")
    cluster.run()
    wait_s = float(np.mean([work.ttft_s - service_s for work in cluster.works]))
    assert wait_s == pytest.approx(busy * service_s / (2 * (1 - busy)), rel=0.15)  # Pollaczek and Khinchine


def test_a_lone_request_takes_what_the_profile_says(build: Build, profile: CostProfile) -> None:
    settings = replace(SETTINGS, request_noise=0.0, node_noise=0.0, step_noise=0.0)
    cluster = build(jobs(job(0, 1.0, 4096, output_tokens=11)), settings)
    cluster.run()
    (work,) = cluster.works
    assert work.ttft_s == pytest.approx(profile.prefill_s(4096), abs=0.01)
    steps_s = sum(profile.decode_s(1, 4096 + done) for done in range(1, 11))
    handed_over_s = (work.sent_ns - work.first_token_ns) / NS + settings.handoff_s
    assert (work.end_ns - work.first_token_ns) / NS == pytest.approx(steps_s + handed_over_s, rel=0.01)


def test_a_conversations_next_turn_reuses_what_the_last_one_left(build: Build) -> None:
    blocks = tuple(range(100, 116))
    first = replace(job(0, 0.0, 16 * 512 + 5, 2), blocks=blocks)
    second = replace(job(1, 20.0, 17 * 512 + 5, 2), blocks=(*blocks, 500))
    cluster = build(jobs(first, second))
    cluster.run()
    assert [work.reused_tokens for work in cluster.works] == [0, 16 * 512]
    assert cluster.works[1].prefill_node == cluster.works[0].prefill_node


def test_blocks_on_ssd_are_found_and_take_longer(build: Build) -> None:
    blocks = tuple(range(100, 160))
    others = tuple(range(1000, 1060))
    settings = replace(SETTINGS, prefill_nodes=1, pool_blocks=60, ssd_blocks=500, request_noise=0.0)
    found = []
    for filler in ((), others):
        first = replace(job(0, 0.0, 60 * 512 + 5), blocks=blocks)
        between = replace(job(1, 20.0, 60 * 512 + 5), blocks=filler)
        last = replace(job(2, 40.0, 60 * 512 + 5), blocks=blocks)
        cluster = build(jobs(first, between, last), settings)
        cluster.run()
        found.append(cluster.works[2])
    assert found[0].reused_tokens == found[1].reused_tokens == 60 * 512
    assert found[1].ttft_s > found[0].ttft_s + 0.5


@pytest.mark.parametrize("lengths", ["prompt", "dialogue", "oracle"])
def test_the_policy_learns_of_lengths_what_the_settings_allow(
    build: Build, workload: SimulatedWorkload, lengths: KnownLengths
) -> None:
    cluster = build(settings=replace(SETTINGS, lengths=lengths))
    events = [cluster._arrived(job) for job in workload.jobs]
    assert any(job.previous_tokens for job in workload.jobs)
    assert [event.previous_tokens for event in events] == [
        0 if lengths == "prompt" else job.previous_tokens for job in workload.jobs
    ]
    assert [event.max_new_tokens for event in events] == [
        max(2, job.output_tokens) if lengths == "oracle" else SETTINGS.max_new_tokens for job in workload.jobs
    ]


def test_with_known_lengths_no_node_takes_pages_for_more_than_the_answer(build: Build) -> None:
    cluster = build(settings=replace(SETTINGS, lengths="oracle"))
    cluster.run()
    served = [work for work in cluster.works if work.end is RequestEnd.FINISHED]
    assert len(served) > 50
    for work in served:
        needed = work.job.prompt_tokens + max(2, work.job.output_tokens)
        assert needed <= work.committed_tokens < needed + 512


def test_windows_reduce_what_pools_send(profile: CostProfile, workload: SimulatedWorkload) -> None:
    def run(costs: CostProfile) -> SimulatedCluster:
        cluster = SimulatedCluster(SETTINGS, PolicyConfig(), costs, workload, seed=3)
        cluster.run()
        return cluster

    per_token, window = profile.kv_bytes_per_token, 1024
    whole = run(profile)
    small = run(
        replace(
            profile,
            kv_bytes_per_token=per_token // 6,
            window_tokens=window,
            window_bytes_per_token=per_token - per_token // 6,
        )
    )
    moved = [sum(host.fetched_bytes for host in cluster.prefill.values()) for cluster in (whole, small)]
    assert 0 < moved[1] < moved[0] / 2
