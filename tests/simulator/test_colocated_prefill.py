"""Simulated decode nodes compute prompts themselves where the policy says so, and everything still ends once."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest

from conductor.policy import PolicyConfig
from simulator.serving.cluster import SimulatedCluster
from simulator.serving.requests import RequestEnd, SimulatedRequest, draw_workload
from simulator.serving.settings import ServingSettings
from traces import load_trace
from worker.policy.cost_profile import MOONCAKE, load_profile

SETTINGS = ServingSettings(prefill_nodes=1, decode_nodes=3, capacity_tokens=200_192, max_batch=16, max_new_tokens=2000)


def run(mode: str) -> SimulatedCluster:
    workload = draw_workload(
        load_trace("conversation"), seed=5, rate_per_s=0.6, requests=120, longest_prompt=30_000, longest_answer=2000
    )
    policy = PolicyConfig(
        attained_share=0.0, report_timeout_s=0.0, ttft_slo_s=30.0, tbt_slo_s=0.1, colocated_prefill=mode
    )  # type: ignore[arg-type]
    cluster = SimulatedCluster(replace(SETTINGS, chunk_tokens=2048), policy, load_profile(MOONCAKE), workload, seed=5)
    cluster.run()
    cluster.clock.run(lambda: cluster.conductor.validate()[1]["requests"] > 0)
    return cluster


@pytest.fixture(scope="module")
def clusters() -> dict[str, SimulatedCluster]:
    return {mode: run(mode) for mode in ("off", "act")}


def served(cluster: SimulatedCluster) -> dict[str, SimulatedRequest]:
    return {work.job.name: work for work in cluster.works if work.end is RequestEnd.FINISHED}


def test_every_request_ends_and_nothing_is_held(clusters: dict[str, SimulatedCluster]) -> None:
    for cluster in clusters.values():
        assert all(work.end is not None for work in cluster.works)
        assert all(work.generated == work.job.output_tokens for work in served(cluster).values())
        assert all(node.free_tokens == SETTINGS.capacity_tokens for node in cluster.decode.values())


def test_decode_nodes_compute_prompts_only_where_the_policy_may_say_so(clusters: dict[str, SimulatedCluster]) -> None:
    colocated = {mode: [w for w in served(c).values() if not w.decode_node] for mode, c in clusters.items()}
    assert colocated["off"] == []
    assert len(colocated["act"]) > 5
    assert all(work.prefill_node.startswith("decode-") for work in colocated["act"])
    assert all(work.computed == work.job.prompt_tokens and work.first_token_ns for work in colocated["act"])


def test_it_shortens_the_time_to_the_first_token_and_makes_nobody_miss_the_other_objective(
    clusters: dict[str, SimulatedCluster],
) -> None:
    off, act = served(clusters["off"]), served(clusters["act"])
    both = off.keys() & act.keys()
    assert fmean(act[name].ttft_s for name in both) < fmean(off[name].ttft_s for name in both)
    slow = {
        mode: sum(w.tbt_s > SETTINGS.tbt_objective_s for w in w_.values()) for mode, w_ in (("off", off), ("act", act))
    }
    assert slow["act"] <= slow["off"] + len(act) // 50
