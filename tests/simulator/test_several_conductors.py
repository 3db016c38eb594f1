"""Several conductors in one simulated cluster: shared nodes, own requests, and what they learn of each other's."""

from collections import Counter
from dataclasses import replace

import pytest

from conductor.policy import PolicyConfig
from simulator.errors import BadSetting
from simulator.serving.clock import NS
from simulator.serving.cluster import SimulatedCluster
from simulator.serving.requests import Arrival, SimulatedWorkload, draw_workload
from simulator.serving.settings import ServingSettings
from traces import load_trace
from worker.policy.cost_profile import MOONCAKE, load_profile

SETTINGS = ServingSettings(
    conductors=3, prefill_nodes=3, decode_nodes=3, capacity_tokens=200_192, max_batch=16, max_new_tokens=2000
)
POLICY = PolicyConfig(attained_share=0.0, report_timeout_s=0.0, admission_mode="none", max_queue_s=1e6)


def cluster_of(jobs: SimulatedWorkload, settings: ServingSettings = SETTINGS) -> SimulatedCluster:
    return SimulatedCluster(settings, POLICY, load_profile(MOONCAKE), jobs, seed=3)


def counters(cluster: SimulatedCluster) -> list[Counter[str]]:
    return [Counter(each.snapshot(cluster.clock.now_ns)["counters"]) for each in cluster.conductors]


@pytest.mark.parametrize("is_aggregated", [False, True])
def test_every_request_ends_once_and_no_conductor_keeps_any(is_aggregated: bool) -> None:
    workload = draw_workload(load_trace("conversation"), seed=3, rate_per_s=6.0, requests=150, longest_prompt=60_000)
    cluster = cluster_of(workload, replace(SETTINGS, is_aggregated=is_aggregated))
    cluster.run()
    drained_ns = cluster.clock.now_ns + 5 * NS
    cluster.clock.run(lambda: cluster.clock.now_ns < drained_ns)
    assert Counter(work.job.index for work in cluster.works) == Counter(job.index for job in workload.jobs)
    for each in cluster.conductors:
        problems, left = each.validate()
        assert (problems, set(left.values())) == ([], {0})
    placed = [each["placed"] for each in counters(cluster)]
    assert sum(placed) == len(workload.jobs)
    assert max(placed) - min(placed) <= 1
    assert all(
        len(workload.jobs) - own - 5 <= each["revived"] for own, each in zip(placed, counters(cluster), strict=True)
    )


def later(seconds: float) -> list[str]:
    """Return the prefill nodes of two long prompts, `seconds` apart, for different conductors."""
    jobs = [Arrival(i, round((2.5 + i * seconds) * NS), i, 30_000, 2, (), 0.0, 0.0) for i in range(2)]
    settings = replace(SETTINGS, conductors=2, prefill_nodes=2, node_noise=0.0)
    cluster = cluster_of(SimulatedWorkload(tuple(jobs), (), 512, 1.0, 4.0), settings)
    cluster.run()
    return [work.prefill_node for work in cluster.works]


def test_a_conductor_avoids_the_queue_of_a_request_that_another_one_has_placed() -> None:
    first, second = later(0.5)
    assert first != second


def test_a_conductor_learns_of_a_request_as_soon_as_its_node_can_report_it() -> None:
    first, second = later(0.008)  # two messages to the node and one to the other conductor take 3 ms
    assert first != second


def test_a_conductor_does_not_see_what_another_one_has_just_placed() -> None:
    first, second = later(0.0005)
    assert first == second


def test_there_must_be_a_conductor() -> None:
    with pytest.raises(BadSetting, match="conductors must be at least 1, got 0"):
        replace(SETTINGS, conductors=0)
