"""Figures that follow from records and polled metrics: percentiles, objectives, the unloaded fit, counters."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from loadtest import figures
from loadtest.cluster_metrics import ClusterHistory, parse_metrics
from loadtest.objectives import ReplayObjectives, Unloaded, attainment, fit_ttft, typical_requests, unloaded_of
from loadtest.panels import in_flight
from loadtest.pictures import averaged
from loadtest.record import RequestRecord, SendOutcome, worst_tenth_mean
from loadtest.report import finite
from loadtest.summary import percentiles
from telemetry.nodes import NodeSample, NodesCollector


def record_of(index: int = 0, *, ttft: float = 0.1, gaps: tuple[float, ...] = (), **changes: Any) -> RequestRecord:
    values: dict[str, Any] = {"due_s": 0.0, "prompt_tokens": 100, "max_tokens": 1, "temperature": 0.0, "seed": 0}
    record = RequestRecord(index=index, **(values | {"outcome": SendOutcome.COMPLETED} | changes))
    record.sent_s, at = 10.0, 10.0 + ttft
    record.token_times = [at, *(at := at + gap for gap in gaps)]
    record.end_s = record.token_times[-1]
    return record


UNLOADED = Unloaded(0.05, 0.01, 0.02, (0.01, 0.001, 0.0), ((100, 0.11),))


def test_tbt_of_a_request_is_the_mean_of_its_longest_tenth() -> None:
    assert worst_tenth_mean([1.0] * 18 + [3.0, 5.0]) == 4.0
    assert worst_tenth_mean([2.0, 7.0]) == 7.0
    assert math.isnan(worst_tenth_mean([]))


def test_percentiles_of_nothing_are_null() -> None:
    assert percentiles([]) == {"p50": None, "p90": None, "p99": None}
    assert percentiles([1.0, math.nan, 3.0])["p50"] == 2.0


def test_the_default_objectives_are_relative_to_the_lone_request_of_that_length() -> None:
    objectives = ReplayObjectives(0.0, 0.0, UNLOADED)
    assert objectives.ttft_of(100) == pytest.approx(10 * 0.11)
    assert objectives.tbt_objective_s == pytest.approx(5 * 0.02)
    assert objectives.meets_ttft(record_of(ttft=1.09))
    assert not objectives.meets_ttft(record_of(ttft=1.11))
    assert objectives.meets_tbt(record_of(gaps=(0.01, 0.09)))
    assert not objectives.meets_tbt(record_of(gaps=(0.01, 0.11)))
    assert objectives.meets_tbt(record_of())


def test_fixed_objectives_take_their_place() -> None:
    objectives = ReplayObjectives(0.2, 0.05, None)
    assert objectives.known
    assert not objectives.meets_ttft(record_of(ttft=0.21))
    assert not objectives.meets_tbt(record_of(gaps=(0.06,)))


def test_rejected_and_failed_requests_miss_and_unfinished_ones_do_not_count() -> None:
    records = [
        *(record_of(i) for i in range(6)),
        record_of(6, outcome=SendOutcome.REJECTED),
        record_of(7, outcome=SendOutcome.FAILED),
        record_of(8, outcome=SendOutcome.UNFINISHED),
    ]
    found = attainment(ReplayObjectives(1.0, 1.0, None), records, 3.0)
    assert found["slo_attainment"] == 6 / 8
    assert found["goodput_rps"] == 2.0
    assert found["slo_rule_met"] is False
    assert attainment(ReplayObjectives(1.0, 1.0, None), records[:6], 3.0)["slo_rule_met"] is True


def test_without_objectives_attainment_is_null() -> None:
    found = attainment(ReplayObjectives(0.0, 0.0, None), [record_of()], 1.0)
    assert found["slo_attainment"] is None
    assert found["goodput_rps"] is None
    assert "not evaluated" in found["slo_rule"]
    assert "--ttft-slo" in found["slo_rule"]


@given(st.floats(0.001, 1), st.floats(0, 1e-3), st.floats(0, 1e-6))
def test_the_fit_recovers_a_plain_law(a: float, b: float, c: float) -> None:
    lengths = (16, 60, 120, 260, 700, 1900)
    found = fit_ttft([(n, a + b * n + c * n * n) for n in lengths])
    for n in lengths:
        assert found[0] + found[1] * n + found[2] * n * n == pytest.approx(a + b * n + c * n * n, rel=1e-3)
    assert min(found) >= 0


@given(st.lists(st.tuples(st.integers(1, 2000), st.floats(1e-4, 10)), min_size=1, max_size=12))
def test_the_fit_never_falls_with_length(samples: list[tuple[int, float]]) -> None:
    unloaded = Unloaded(0, 0, 0, fit_ttft(samples), tuple(samples))
    times = [unloaded.ttft_of(n) for n in range(1, 3000, 200)]
    assert times == sorted(times)
    assert times[0] >= 0


def test_lone_requests_are_of_the_replays_own_lengths(make_request) -> None:
    requests = [make_request(i, prompt=np.zeros(10 + i, np.int32), max_tokens=1) for i in range(100)]
    chosen = typical_requests(requests, 2048)
    assert [len(r.prompt) for r in chosen] == [15, 35, 60, 85, 100, 108]
    assert all(r.max_tokens == 8 for r in chosen)
    cut = typical_requests(requests, 110)
    assert [len(r.prompt) for r in cut] == [15, 35, 60, 85, 100, 102]


def test_unloaded_figures_are_medians() -> None:
    found = unloaded_of([record_of(ttft=t, gaps=(0.01, g)) for t, g in ((0.1, 0.02), (0.3, 0.03), (0.2, 0.09))])
    assert found.ttft_s == pytest.approx(0.2)
    assert found.tbt_s == pytest.approx(0.02)
    assert found.tbt_worst10_s == pytest.approx(0.03)


METRICS = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{node="p0",role="prefill"}} 2
vllm:num_requests_running{{node="p1",role="prefill"}} 1
vllm:num_requests_waiting{{node="d0",role="decode"}} 4
vllm:num_requests_running{{node="pool0",role="pool"}} 5
# TYPE moonpool:kv_bytes_moved_total counter
moonpool:kv_bytes_moved_total{{node="p0",role="prefill",path="push"}} {push}
moonpool:kv_load_bytes{{node="p0",role="prefill"}} {load}
moonpool:digest_mismatches_total{{node="d0",role="decode"}} {mismatches}
moonpool:other_total{{node="d0"}} 9
"""


def test_metrics_are_read_in_either_spelling_and_counted_from_the_first_sample() -> None:
    history = ClusterHistory()
    for at, push, load, mismatches in ((0.0, 100, 7, 1), (1.0, 150, 9, 1), (2.0, 30, 9, 3)):
        history.add(parse_metrics(METRICS.format(push=push, load=load, mismatches=mismatches), at))
    assert history.load_of("prefill", "running") == ([0.0, 1.0, 2.0], [3.0, 3.0, 3.0])
    assert history.load_of("decode", "waiting")[1] == [4.0, 4.0, 4.0]
    assert history.roles() == ["decode", "prefill"]
    # 50, then a restarted node's 30 from 0.
    assert history.kv_bytes_by_path == {"push": 80, "pull": 0, "load": 2, "fetch": 0, "store": 0}
    assert history.increase("digest_mismatches") == 2


def test_metrics_are_read_as_the_frontend_exports_them() -> None:
    registry = CollectorRegistry()
    counters = {"kv_push_bytes": 3e9, "kv_store_bytes": 7.0, "digest_mismatches": 2}
    samples = [NodeSample("p0", "prefill", num_running=2, num_waiting=1, counters={})]
    registry.register(NodesCollector(lambda: samples))
    history = ClusterHistory()
    history.add(parse_metrics(generate_latest(registry).decode(), 0.0))
    samples[0] = replace(samples[0], counters=counters)
    history.add(parse_metrics(generate_latest(registry).decode(), 1.0))
    assert history.kv_bytes_by_path == {"push": 3_000_000_000, "pull": 0, "load": 0, "fetch": 0, "store": 7}
    assert history.increase("digest_mismatches") == 2
    assert history.load_of("prefill", "running")[1] == [2.0, 2.0]


def test_damage_found_by_pools_counts_as_that_found_by_workers() -> None:
    registry = CollectorRegistry()
    found = {"worker": {"digest_mismatches": 1.0}, "pool": {"pool_digest_mismatches": 1.0}}
    samples = [NodeSample("d0", "decode", counters=found["worker"]), NodeSample("p", "pool", counters=found["pool"])]
    registry.register(NodesCollector(lambda: samples))
    history = ClusterHistory()
    history.add(parse_metrics(generate_latest(registry).decode(), 0.0))
    samples[1] = replace(samples[1], counters={"pool_digest_mismatches": 4.0})
    history.add(parse_metrics(generate_latest(registry).decode(), 1.0))
    assert history.increase("digest_mismatches") == 3
    samples[0] = replace(samples[0], counters={"digest_mismatches": 3.0})
    history.add(parse_metrics(generate_latest(registry).decode(), 2.0))
    assert history.increase("digest_mismatches") == 5
    assert set(history.kv_bytes_by_path) == {"push", "pull", "load", "fetch", "store"}


def test_a_node_that_joins_later_counts_from_zero() -> None:
    history = ClusterHistory()
    history.add(parse_metrics('moonpool:kv_push_bytes{node="a"} 100\n', 0.0))
    history.add(parse_metrics('moonpool:kv_push_bytes{node="a"} 100\nmoonpool:kv_push_bytes{node="b"} 5\n', 1.0))
    assert history.increase("push") == 5


def test_a_page_that_is_no_metrics_is_refused() -> None:
    with pytest.raises(ValueError):
        parse_metrics("<html>not metrics</html>", 0.0)


def test_numbers_that_json_cannot_hold_become_null() -> None:
    value = finite({"a": [math.nan, 1.0, (math.inf,)], "b": "x"})
    assert json.loads(json.dumps(value, allow_nan=False)) == {"a": [None, 1.0, [None]], "b": "x"}


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (3e-5, "30 µs"), (0.0123, "12.3 ms"), (0.25, "250 ms"), (2.5, "2.50 s"), (240.2, "240 s")],
)
def test_durations_are_written_with_a_fitting_unit(value: float | None, text: str) -> None:
    assert figures.seconds(value) == text


def test_bytes_are_written_with_a_fitting_unit() -> None:
    assert [figures.size(v) for v in (None, 12, 2_300, 4_560_000, 7.89e12)] == [
        "–",
        "12 B",
        "2.3 kB",
        "4.6 MB",
        "7.89 TB",
    ]


def test_requests_in_flight_are_those_sent_and_not_ended() -> None:
    records = [record_of(i) for i in range(3)]
    for record, (sent, end) in zip(records, ((0.0, 10.0), (2.0, 4.0), (3.0, math.nan)), strict=True):
        record.sent_s, record.end_s = sent, end
    times, values = in_flight(records, steps=11)
    assert times == pytest.approx(list(range(11)))
    assert values == [1, 1, 2, 3, 2, 2, 2, 2, 2, 2, 1]


def test_many_samples_are_drawn_as_means() -> None:
    x, y = averaged([float(i) for i in range(1000)], [1.0, 3.0] * 500, bins=10)
    assert len(x) == 10
    assert y == pytest.approx([2.0] * 10)
    assert averaged([0.0, 1.0], [5.0, 6.0], bins=10) == ([0.0, 1.0], [5.0, 6.0])
