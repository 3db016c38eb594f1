"""Workers that start, leave and change their role under virtual time: no request is lost, and node time adds up."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from conductor.policy import PolicyConfig
from conductor.policy.decisions import SwitchRole
from simulator.errors import BadSetting
from simulator.serving.clock import NS
from simulator.serving.cluster import SimulatedCluster
from simulator.serving.elastic import ElasticWorkers, RoleCount, num_reversals
from simulator.serving.requests import RequestEnd, SimulatedWorkload, draw_workload
from simulator.serving.settings import ServingSettings
from traces import load_trace
from worker.policy.analytic_costs import MOONCAKE_SETTING, AnalyticSetting, analytic_profile
from worker.policy.cost_profile import MOONCAKE, load_profile

SETTINGS = ServingSettings(prefill_nodes=2, decode_nodes=2, hosts=6, max_new_tokens=2000, start_s=20.0)
Build = Callable[..., tuple[SimulatedCluster, ElasticWorkers]]


@pytest.fixture(scope="module")
def workload() -> SimulatedWorkload:
    return draw_workload(load_trace("conversation"), seed=3, rate_per_s=2.0, requests=250, longest_prompt=30_000)


@pytest.fixture
def build(workload: SimulatedWorkload) -> Build:
    def make(settings: ServingSettings = SETTINGS, **policy: object) -> tuple[SimulatedCluster, ElasticWorkers]:
        config = PolicyConfig(report_timeout_s=0.0, admission_mode="none", max_queue_s=1e6, **policy)  # type: ignore[arg-type]
        cluster = SimulatedCluster(settings, config, load_profile(MOONCAKE), workload, seed=3)
        return cluster, ElasticWorkers(cluster)

    return make


def run_to_rest(cluster: SimulatedCluster, workers: ElasticWorkers) -> None:
    cluster.run(lambda: cluster.is_busy() or not workers.is_at_rest())
    until_ns = cluster.clock.now_ns + 5 * NS
    cluster.clock.run(lambda: cluster.clock.now_ns < until_ns)


def all_served(cluster: SimulatedCluster) -> bool:
    return {work.end for work in cluster.works} == {RequestEnd.FINISHED} and cluster.num_open == 0


def test_workers_join_after_their_start_and_leave_when_idle_and_nothing_is_lost(build: Build) -> None:
    cluster, workers = build()
    cluster.clock.at(10 * NS, lambda: workers.resize({"prefill": 3, "decode": 3}))
    cluster.clock.at(60 * NS, lambda: workers.resize({"prefill": 1, "decode": 1}))
    run_to_rest(cluster, workers)
    assert all_served(cluster)
    assert cluster.conductor.validate() == ([], dict.fromkeys(cluster.conductor.validate()[1], 0))
    assert workers.counts() == {"prefill": 1, "decode": 1}
    first = {
        name: min(
            (work.job.arrival_ns for work in cluster.works if name in (work.prefill_node, work.decode_node)), default=0
        )
        for name in ("node-4", "node-5")
    }
    assert all(30 * NS <= at_ns < 60 * NS for at_ns in first.values())  # not before they have started
    # The newest leave first: what remains was there from the beginning.
    late = [work for work in cluster.works if work.job.arrival_ns > 61 * NS]
    assert late
    assert {work.prefill_node for work in late} == {"node-0"}
    assert {work.decode_node for work in late} == {"node-2"}


def test_node_time_lasts_from_the_start_until_the_node_has_left(build: Build) -> None:
    cluster, workers = build()
    cluster.run(lambda: cluster.clock.now_ns < 10 * NS)
    assert workers.node_s() == pytest.approx(40, abs=1)
    workers.resize({"prefill": 3})
    cluster.clock.run(lambda: cluster.clock.now_ns < 20 * NS)
    assert workers.node_s() == pytest.approx(90, abs=1)  # the new one loads its model
    assert workers.counts()["prefill"] == 3
    assert ("prefill", 3) not in [(change.role, change.nodes) for change in workers.changes]


def test_switched_workers_finish_what_they_have_and_serve_in_their_new_role(build: Build) -> None:
    cluster, workers = build()
    cluster.clock.at(15 * NS, lambda: workers.switch("node-3", "prefill"))
    cluster.clock.at(70 * NS, lambda: workers.switch("node-0", "decode"))
    run_to_rest(cluster, workers)
    assert all_served(cluster)
    assert workers.num_switches == 2
    assert workers.counts() == {"prefill": 2, "decode": 2}
    roles: dict[str, Counter[str]] = {"node-0": Counter(), "node-3": Counter()}
    for work in cluster.works:
        for node, role in ((work.prefill_node, "prefill"), (work.decode_node, "decode")):
            if node in roles:
                roles[node][role] += 1
    assert all(count["prefill"] and count["decode"] for count in roles.values())
    times = {change.time_s for change in workers.changes if change.role == "prefill"}
    assert max(times) > 15


def test_decided_switches_are_carried_out_and_advice_is_not(build: Build) -> None:
    for is_advice, prefill in ((False, 3), (True, 2)):
        cluster, workers = build()
        decision = SwitchRole("node-3", "prefill", "a test", is_advice)
        cluster.clock.at(15 * NS, lambda cluster=cluster, decision=decision: cluster.on_switch(decision))  # type: ignore[misc]
        run_to_rest(cluster, workers)
        assert all_served(cluster)
        assert workers.counts()["prefill"] == prefill


def test_kinds_compute_at_their_own_speed_within_their_own_memory(workload: SimulatedWorkload) -> None:
    half = analytic_profile(_half_of(4))
    policy = PolicyConfig(report_timeout_s=0.0, admission_mode="none", max_queue_s=1e6)
    cluster = SimulatedCluster(SETTINGS, policy, load_profile(MOONCAKE), workload, 3, {"node-1": half, "node-3": half})
    cluster.run()
    assert all_served(cluster)
    factors = {node.node_id: (prefill, decode) for node, prefill, decode in cluster.conductor.slowdowns()}
    assert factors["node-1"][0] / factors["node-0"][0] == pytest.approx(2, rel=0.15)
    assert factors["node-3"][1] / factors["node-2"][1] == pytest.approx(1.8, rel=0.2)
    assert cluster.decode["node-3"].free_tokens < cluster.decode["node-2"].free_tokens


def _half_of(gpus: int) -> AnalyticSetting:
    return replace(
        MOONCAKE_SETTING,
        hardware="half",
        flops_per_s=gpus * 312e12,
        memory_bytes_per_s=gpus * 2.039e12,
        memory_bytes=gpus * 80e9,
    )


def test_what_cannot_be_is_refused_by_name(build: Build) -> None:
    with pytest.raises(BadSetting, match="hosts must be 0, or at least"):
        ServingSettings(prefill_nodes=4, decode_nodes=4, hosts=7)
    with pytest.raises(BadSetting, match="start_s"):
        ServingSettings(start_s=-1.0)
    with pytest.raises(BadSetting, match="hosts must be set"):
        build(ServingSettings())
    _, workers = build()
    with pytest.raises(BadSetting, match="only 2 hosts are free"):
        workers.resize({"prefill": 5})
    with pytest.raises(BadSetting, match="only a serving worker of another role"):
        workers.switch("node-0", "prefill")


def test_reversals_are_changes_to_the_other_direction_within_the_window() -> None:
    def changes(*steps: tuple[float, int]) -> list[RoleCount]:
        return [RoleCount(time_s, "decode", nodes) for time_s, nodes in steps]

    assert num_reversals(changes((0, 1), (10, 2), (20, 3)), 100) == 0
    assert num_reversals(changes((0, 1), (10, 2), (20, 1), (30, 2)), 100) == 2
    assert num_reversals(changes((0, 1), (10, 2), (200, 1)), 100) == 0
    mixed = [RoleCount(0, "decode", 1), RoleCount(0, "prefill", 2), RoleCount(5, "decode", 2)]
    assert num_reversals([*mixed, RoleCount(6, "prefill", 1)], 100) == 0
