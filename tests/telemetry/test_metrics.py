"""Metrics: names, labels and values as a scraper reads them."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from telemetry import NodeSample, NodesCollector, RequestFamilies, RequestMetrics, exposition, new_registry
from telemetry.histograms import histogram_of

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(registry: object) -> Samples:
    text, content_type = exposition(registry, "text/plain")  # type: ignore[arg-type]
    assert content_type.startswith("text/plain")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def key(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset(labels.items())


def test_request_metrics_have_vllms_names() -> None:
    registry = new_registry()
    metrics = RequestMetrics(RequestFamilies(registry), "tiny")
    metrics.ttft.observe(0.03)
    metrics.itl.observe(0.02)
    metrics.prompt_tokens.inc(7)
    metrics.prefix_cache_queries.inc(7)
    metrics.prefix_cache_hits.inc(4)
    metrics.finished("stop")
    metrics.rejected("ttft")
    samples = scrape(registry)
    assert samples[key("vllm:time_to_first_token_seconds_count", model_name="tiny")] == 1
    assert samples[key("vllm:time_to_first_token_seconds_bucket", model_name="tiny", le="0.04")] == 1
    assert samples[key("vllm:time_to_first_token_seconds_bucket", model_name="tiny", le="0.02")] == 0
    assert samples[key("vllm:inter_token_latency_seconds_sum", model_name="tiny")] == 0.02
    assert samples[key("vllm:prompt_tokens_total", model_name="tiny")] == 7
    assert samples[key("vllm:prefix_cache_queries_total", model_name="tiny")] == 7
    assert samples[key("vllm:prefix_cache_hits_total", model_name="tiny")] == 4
    assert samples[key("vllm:request_success_total", model_name="tiny", finished_reason="stop")] == 1
    assert samples[key("vllm:request_success_total", model_name="tiny", finished_reason="length")] == 0
    assert samples[key("moonpool:requests_rejected_total", model_name="tiny", reason="ttft")] == 1


def test_two_applications_in_one_process_do_not_share_numbers() -> None:
    first, second = new_registry(), new_registry()
    RequestMetrics(RequestFamilies(first), "tiny").generation_tokens.inc(5)
    RequestMetrics(RequestFamilies(second), "tiny")
    name = key("vllm:generation_tokens_total", model_name="tiny")
    assert (scrape(first)[name], scrape(second)[name]) == (5, 0)


def test_finish_reason_outside_the_set_is_refused() -> None:
    with pytest.raises(ValueError, match="'vanished'"):
        RequestMetrics(RequestFamilies(new_registry()), "tiny").finished("vanished")


def test_openmetrics_is_served_when_asked_for() -> None:
    text, content_type = exposition(new_registry(), "application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert text.endswith(b"# EOF\n")


def test_nodes_are_exported_with_node_role_and_model() -> None:
    samples = [
        NodeSample("p0", "prefill", "tiny", num_running=1, num_waiting=3, capacity_tokens=100, free_tokens=25),
        NodeSample(
            "d0",
            "decode",
            "tiny",
            suspect=True,
            counters={"kv_pull_bytes": 10.0, "digest_mismatches": 2.0, "regions_open": 3.0},
        ),
        NodeSample("pool0", "pool", draining=True, counters={"kv_pull_bytes": 5.0, "blocks evicted": 1.0}),
    ]
    registry = new_registry()
    registry.register(NodesCollector(lambda: samples))
    seen = scrape(registry)
    assert seen[key("vllm:num_requests_waiting", node="p0", role="prefill", model_name="tiny")] == 3
    assert seen[key("vllm:kv_cache_usage_perc", node="p0", role="prefill", model_name="tiny")] == 0.75
    assert key("vllm:kv_cache_usage_perc", node="d0", role="decode", model_name="tiny") not in seen
    assert seen[key("moonpool:kv_bytes_moved_total", node="d0", role="decode", model_name="tiny", path="pull")] == 10
    assert seen[key("moonpool:kv_bytes_moved_total", node="pool0", role="pool", model_name="", path="pull")] == 5
    assert seen[key("moonpool:digest_mismatches_total", node="d0", role="decode", model_name="tiny")] == 2
    assert seen[key("moonpool:regions_open", node="d0", role="decode", model_name="tiny")] == 3
    assert seen[key("moonpool:blocks_evicted_total", node="pool0", role="pool", model_name="")] == 1
    assert seen[key("moonpool:node_draining", node="pool0", role="pool", model_name="")] == 1
    assert [seen[key("moonpool:node_up", node=s.node_id, role=s.role, model_name=s.model)] for s in samples] == [
        1,
        0,
        1,
    ]
    own = new_registry()
    own.register(NodesCollector(lambda: samples, own=True))
    assert scrape(own).keys() == {each for each in seen if not each[0].startswith("moonpool:node_up")}
    samples.clear()
    assert key("moonpool:node_up", node="p0", role="prefill", model_name="tiny") not in scrape(registry)


def test_what_there_is_now_is_a_gauge() -> None:
    values = {"pool_leases_open": 2.0, "pool_held_blocks": 7.0, "pool_used_bytes": 64.0, "pool_capacity_bytes": 256.0}
    registry = new_registry()
    registry.register(NodesCollector(lambda: [NodeSample("pool0", "pool", counters=values)]))
    text = exposition(registry, "text/plain")[0].decode()
    for name, value in values.items():
        assert f"# TYPE moonpool:{name} gauge" in text
        assert scrape(registry)[key(f"moonpool:{name}", node="pool0", role="pool", model_name="")] == value
    assert key("moonpool:kv_bytes_moved_total", node="pool0", role="pool", model_name="", path="used") not in scrape(
        registry
    )


def test_counters_of_one_name_from_several_nodes_form_one_family() -> None:
    samples = [NodeSample(f"d{i}", "decode", "tiny", counters={"generation_tokens": float(i)}) for i in range(3)]
    registry = new_registry()
    registry.register(NodesCollector(lambda: samples))
    text, _ = exposition(registry, "text/plain")
    assert text.count(b"# TYPE moonpool:generation_tokens_total counter") == 1
    assert scrape(registry)[key("moonpool:generation_tokens_total", node="d2", role="decode", model_name="tiny")] == 2


def test_a_tier_and_a_reason_are_labels() -> None:
    registry = new_registry()
    values = {
        "pool_evicted_blocks": 7.0,  # the sum of those below
        "pool_evicted_dram_room_blocks": 4.0,
        "pool_evicted_ssd_room_blocks": 3.0,
        "pool_hit_ssd_tokens": 5.0,
        "pool_lost_no_ssd_blocks": 1.0,
        "pool_saved_dram_compute_us": 2_500_000.0,
    }
    registry.register(NodesCollector(lambda: [NodeSample("pool0", "pool", counters=values)]))
    node = {"node": "pool0", "role": "pool", "model_name": ""}
    assert {key: value for key, value in scrape(registry).items() if "pool_" in key[0]} == {
        key("moonpool:pool_evicted_blocks_total", **node, tier="dram", reason="room"): 4,
        key("moonpool:pool_evicted_blocks_total", **node, tier="ssd", reason="room"): 3,
        key("moonpool:pool_hit_tokens_total", **node, tier="ssd"): 5,
        key("moonpool:pool_lost_blocks_total", **node, reason="no_ssd"): 1,
        key("moonpool:pool_saved_seconds_total", **node, tier="dram"): 2.5,
    }


def test_durations_that_nodes_count_in_buckets_are_a_histogram() -> None:
    def counted(name: str, *, up_to_a_second: float, all: float) -> dict[str, float]:
        buckets = {f"{name}_le_10ms": 0.0, f"{name}_le_1s": up_to_a_second, f"{name}_le_5m": all - 1}
        return buckets | {f"{name}_count": all, f"{name}_sum_ms": 12_500.0}

    values = counted("pool_evicted_dram_age", up_to_a_second=2.0, all=4.0) | counted(
        "pool_evicted_ssd_age", up_to_a_second=0.0, all=3.0
    )
    registry = new_registry()
    registry.register(NodesCollector(lambda: [NodeSample("pool0", "pool", counters=values)]))
    text, _ = exposition(registry, "text/plain")
    families = {family.name: family for family in text_string_to_metric_families(text.decode())}
    family = families["moonpool:pool_evicted_age_seconds"]
    assert family.type == "histogram"
    dram = {(s.name.rpartition("_")[2], s.labels.get("le")): s.value for s in family.samples if "dram" in str(s.labels)}
    assert dram == {
        ("bucket", "0.01"): 0,
        ("bucket", "1.0"): 2,
        ("bucket", "300.0"): 3,
        ("bucket", "+Inf"): 4,
        ("count", None): 4,
        ("sum", None): 12.5,
    }
    assert [name for name in families if ":pool_" in name] == ["moonpool:pool_evicted_age_seconds"]


@pytest.mark.parametrize(("quantile", "expected"), [(0.25, 0.505), (0.5, 1.0), (0.625, 150.5), (1.0, 300.0)])
def test_a_quantile_of_counted_durations_is_interpolated(quantile: float, expected: float) -> None:
    counters = {"x_le_10ms": 0.0, "x_le_1s": 4.0, "x_le_5m": 6.0, "x_count": 8.0, "x_sum_ms": 1.0}
    found = histogram_of(counters, "x")
    assert found.quantile_s(quantile) == pytest.approx(expected)
    assert histogram_of({}, "x").quantile_s(0.5) is None


def test_two_models_of_one_frontend_have_series_of_their_own() -> None:
    registry = new_registry()
    families = RequestFamilies(registry)
    RequestMetrics(families, "large").finished("stop")
    RequestMetrics(families, "small").rejected("ttft")
    samples = scrape(registry)
    assert samples[key("vllm:request_success_total", model_name="large", finished_reason="stop")] == 1
    assert samples[key("vllm:request_success_total", model_name="small", finished_reason="stop")] == 0
    assert samples[key("moonpool:requests_rejected_total", model_name="small", reason="ttft")] == 1
