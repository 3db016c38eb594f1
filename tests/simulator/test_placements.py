"""Baseline placements and popular prefixes on simulated clusters, and what pool nodes hold after a fetch or a copy."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from statistics import fmean
from typing import get_args

import pytest

from conductor.policy import PolicyConfig
from settings.conductor import Placement
from simulator.errors import BadSetting
from simulator.serving.clock import NS
from simulator.serving.cluster import SimulatedCluster
from simulator.serving.hot_prefixes import HotPrefixes, draw_hot_workload
from simulator.serving.pools import SimulatedPools
from simulator.serving.requests import RequestEnd, SimulatedWorkload
from simulator.serving.settings import ServingSettings
from worker.policy.cost_profile import MOONCAKE, load_profile

SETTINGS = ServingSettings(prefill_nodes=4, decode_nodes=2, max_new_tokens=64)
HOT = HotPrefixes(num_prefixes=12, prefix_tokens=16384, answer_tokens=8, skew=1.5)


def drawn(hot: HotPrefixes = HOT, *, seed: int = 1, rate: float = 10.0, requests: int = 150) -> SimulatedWorkload:
    return draw_hot_workload(hot, seed=seed, rate_per_s=rate, requests=requests, block_tokens=512)


def run(placement: Placement, workload: SimulatedWorkload, **policy: object) -> SimulatedCluster:
    config = PolicyConfig(
        attained_share=0.0, report_timeout_s=0.0, max_queue_s=1e6, admission_mode="none", placement=placement
    )
    cluster = SimulatedCluster(SETTINGS, replace(config, **policy), load_profile(MOONCAKE), workload, seed=1)  # type: ignore[arg-type]
    cluster.run()
    return cluster


def fetched_bytes(cluster: SimulatedCluster) -> int:
    return sum(node.fetched_bytes for node in cluster.prefill.values())


def mean_ttft_s(cluster: SimulatedCluster) -> float:
    return fmean(work.ttft_s for work in cluster.works if work.job.arrival_ns > 3 * NS)


@pytest.fixture(scope="module")
def clusters() -> dict[Placement, SimulatedCluster]:
    workload = drawn()
    return {placement: run(placement, workload) for placement in get_args(Placement)}


def test_every_placement_serves_every_request_with_the_same_arrivals(
    clusters: dict[Placement, SimulatedCluster],
) -> None:
    for cluster in clusters.values():
        assert len(cluster.works) == 150
        assert all(work.end is RequestEnd.FINISHED for work in cluster.works)
        assert cluster.pools.validate(SETTINGS) == []


def test_only_algorithm_1_and_moonpool_move_kv_between_pool_nodes(clusters: dict[Placement, SimulatedCluster]) -> None:
    for placement in ("random", "load-balance", "cache-aware"):
        assert (fetched_bytes(clusters[placement]), clusters[placement].copied_bytes) == (0, 0)
    for placement in ("algorithm1", "moonpool"):
        assert fetched_bytes(clusters[placement]) > 0
    copied = {placement: clusters[placement].copied_bytes for placement in ("algorithm1", "moonpool")}
    assert copied["algorithm1"] > 0
    assert copied["moonpool"] < copied["algorithm1"]  # fetched prefixes are kept, not sent twice


def test_placement_by_prefix_and_queue_is_faster_than_by_queue_and_that_faster_than_none(
    clusters: dict[Placement, SimulatedCluster],
) -> None:
    ttft_s = {placement: mean_ttft_s(cluster) for placement, cluster in clusters.items()}
    order = ("algorithm1", "cache-aware", "load-balance", "random")
    assert all(ttft_s[better] < ttft_s[worse] for better, worse in pairwise(order))


def test_copies_of_hot_prefixes_shorten_the_time_to_the_first_token(
    clusters: dict[Placement, SimulatedCluster],
) -> None:
    without = run("moonpool", drawn(), max_copies=0)
    assert without.copied_bytes == 0
    assert mean_ttft_s(clusters["moonpool"]) < mean_ttft_s(without)


def test_a_prefix_that_was_fetched_is_not_stored_and_what_follows_it_only_behind_a_copy() -> None:
    pools = SimulatedPools(SETTINGS, ["a", "b"])
    pools.store("a", 0, (1, 2, 3))
    pools.store("b", 1, (1, 2, 3, 4), first=3)
    assert [pools.held(name, (1, 2, 3, 4))[0] for name in ("a", "b")] == [3, 0]
    pools.store("b", 2, (1, 2, 3))
    pools.store("b", 3, (1, 2, 3, 4), first=3)
    assert pools.held("b", (1, 2, 3, 4))[0] == 4


def test_blocks_that_another_host_reads_are_not_the_next_to_be_evicted() -> None:
    pools = SimulatedPools(replace(SETTINGS, pool_blocks=4), ["a"])
    pools.store("a", 0, (1, 2))
    pools.store("a", 1, (5, 6))
    pools.use("a", 2, (1, 2))
    pools.store("a", 3, (8, 9))
    assert [pools.held("a", blocks)[0] for blocks in ((1, 2), (5, 6))] == [2, 0]


def test_popularity_follows_zipfs_law_and_each_prefix_is_in_one_pool_at_the_start() -> None:
    workload = drawn(replace(HOT, skew=1.0), requests=4000)
    asked = Counter(job.conversation for job in workload.jobs).most_common()
    weights = [1 / rank for rank in range(1, 13)]
    for (_, count), weight in zip(asked[:4], weights, strict=False):
        assert count == pytest.approx(4000 * weight / sum(weights), rel=0.15)
    assert [conversation for conversation, _ in workload.before] == list(range(12))
    stored = dict(workload.before)
    for job in workload.jobs:
        shared = stored[job.conversation]
        assert job.blocks[: len(shared)] == shared
        assert len(job.blocks) == job.prompt_tokens // 512
    own = [block for job in workload.jobs for block in job.blocks[len(stored[job.conversation]) :]]
    assert len(own) == len(set(own))


def test_ranks_are_drawn_anew_at_every_shift_and_only_then() -> None:
    def hottest(workload: SimulatedWorkload, from_s: float, until_s: float) -> int:
        jobs = [job for job in workload.jobs if from_s * NS <= job.arrival_ns < until_s * NS]
        return Counter(job.conversation for job in jobs).most_common(1)[0][0]

    periods = [(start, start + 10.0) for start in (0.0, 10.0, 20.0, 30.0, 40.0)]
    shifting = drawn(replace(HOT, skew=2.0, shift_s=10.0), requests=500)
    assert len({hottest(shifting, *period) for period in periods}) > 2
    assert len({hottest(drawn(replace(HOT, skew=2.0), requests=500), *period) for period in periods}) == 1


def test_the_same_seed_draws_the_same_requests() -> None:
    assert drawn() == drawn()
    assert drawn() != drawn(seed=2)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_prefixes": 0}, "num_prefixes must be at least 1, got 0"),
        ({"skew": -1.0}, "skew must be at least 0 and below 1e6, got -1"),
        ({"shift_s": float("nan")}, "shift_s must be at least 0 and below 1e6, got nan"),
    ],
)
def test_impossible_prefixes_are_rejected(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(BadSetting, match=message):
        HotPrefixes(**wrong)  # type: ignore[arg-type]
