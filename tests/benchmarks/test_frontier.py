"""The frontier compares clusters of the same nodes and memory, and finds the rate at which objectives are missed."""

import argparse
import json
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from benchmarks import copies_live, frontier
from benchmarks.simulated import simulated_spec
from simulator.serving.hot_prefixes import HotPrefixes
from simulator.serving.runs import RunSpec

SMALL = frontier.FrontierWorkload(
    HotPrefixes(num_prefixes=4, prefix_tokens=1024, question_tokens=4096, answer_tokens=64),
    prefill_nodes=(1,),
    ttft_s=10.0,
    rates_per_s=(1.0, 20.0),
    duration_s=6.0,
)


class Here:
    """Executor that runs at once in this process."""

    def submit(self, function: Any, *arguments: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        future.set_result(function(*arguments))
        return future


@pytest.fixture
def spec() -> RunSpec:
    given = argparse.Namespace(trace="conversation", prefill=2, decode=2, ttft=30.0, tbt=0.1, requests=30)
    return simulated_spec(given, "none")


def test_all_shapes_of_a_workload_have_the_same_nodes_and_the_same_memory(spec: RunSpec) -> None:
    for workload in frontier.WORKLOADS.values():
        for shape in frontier.shapes(workload):
            settings = frontier._run(spec, workload, shape, 0, 1.0).settings
            assert settings.prefill_nodes + settings.decode_nodes == frontier.NODES
            hosts = frontier.NODES if settings.is_aggregated else settings.prefill_nodes
            assert hosts * settings.pool_blocks == pytest.approx(frontier.NODES * 3000, rel=0.001)


@pytest.mark.parametrize(
    ("shares", "capacity"), [((0.8, 0.9), 0.0), ((1.0, 0.8), 1.5), ((1.0, 0.9), 2.0), ((0.9, 0.0), 1.0)]
)
def test_the_capacity_is_the_rate_up_to_which_the_share_is_reached(shares: tuple[float, ...], capacity: float) -> None:
    assert frontier.capacity_per_s((1.0, 2.0), shares) == pytest.approx(capacity)


def test_more_load_misses_more_and_a_merged_step_is_no_shorter_as_a_sum(
    spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frontier, "CHUNK_TOKENS", (512,))
    monkeypatch.setattr(frontier, "NODES", 2)
    found = frontier._measured(spec, SMALL, 1, Here())  # type: ignore[arg-type]
    assert json.loads(json.dumps(found))["best"][0]["split"] == "1P+1D"
    for slow, fast in zip(found["shares"]["1P+1D"][1], found["shares"]["1P+1D"][0], strict=True):
        assert slow < fast
    sums, longest = (found["shares"][f"2 aggregated, 512, {merged}"][0] for merged in ("sum", "longest"))
    assert sum(sums) < sum(longest)


def test_live_requests_are_every_prefix_once_and_then_the_drawn_ones() -> None:
    popular = HotPrefixes(num_prefixes=3, prefix_tokens=2048, question_tokens=600, answer_tokens=16)
    rows, from_s = copies_live.hot_rows(popular, 0, 2.0, 10.0)
    assert len(rows) == 3 + 20
    assert all(row.timestamp_ms < 1e3 * from_s for row in rows[:3])
    assert all(row.timestamp_ms >= 1e3 * from_s for row in rows[3:])
    assert all(len(row.hash_ids) == -(-row.input_length // 512) for row in rows)
    firsts = {row.hash_ids[0] for row in rows[:3]}
    assert {row.hash_ids[0] for row in rows[3:]} <= firsts
    lasts = [row.hash_ids[-1] for row in rows]
    assert len(set(lasts)) == len(lasts)


def test_gains_pair_runs_of_the_same_requests() -> None:
    def run(ttft_s: float) -> dict[str, float]:
        return {"ttft_mean_s": ttft_s, "ttft_p90_s": 2 * ttft_s, "tbt_mean_s": 0.1}

    pairs = [{"seed": seed, "with": run(scale), "without": run(2 * scale)} for seed, scale in enumerate((0.1, 0.4))]
    found = copies_live.summary({"skewed": pairs})
    assert found["replication_gain_live"] == pytest.approx({"mean": 2.0, "low": 2.0, "high": 2.0})


def test_the_time_of_a_merged_step_is_one_of_two(spec: RunSpec) -> None:
    with pytest.raises(ValueError, match="merged_steps must be sum or longest, got 'both'"):
        replace(spec.settings, merged_steps="both")  # type: ignore[arg-type]
