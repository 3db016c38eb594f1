"""Counters of a messenger as a scraper reads them: by peer, transport, rail and direction, with few series."""

import math

import pytest
from prometheus_client.parser import text_string_to_metric_families

from messenger.counters import LATENCY_EDGES_S, MAX_PEERS, Counters, reported
from telemetry import NodeSample, NodesCollector, exposition, new_registry

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scraped(counters: Counters, **held: int) -> Samples:
    registry = new_registry()
    numbers = {f"messenger_{name}": number for name, number in reported(counters, held).items()}
    registry.register(NodesCollector(lambda: [NodeSample("d0", "decode", "tiny", counters=numbers)]))
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(exposition(registry, "text/plain")[0].decode())
        for sample in family.samples
    }


def key(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return f"moonpool:messenger_{name}", frozenset(
        {"node": "d0", "role": "decode", "model_name": "tiny", **labels}.items()
    )


def test_flows_are_told_by_peer_transport_and_direction() -> None:
    counters = Counters()
    flow = counters.flow(peer="pool/0_bytes", transport="rdma", direction="written")
    flow.add(1000, 8, 0.5)
    flow.add(24, 1, 0.25)
    samples = scraped(counters)
    labels = {"peer": "pool/0_bytes", "transport": "rdma", "direction": "written"}
    assert samples[key("bytes_total", **labels)] == 1024
    assert samples[key("slices_total", **labels)] == 9
    assert samples[key("operations_total", **labels)] == 2
    assert samples[key("seconds_total", **labels)] == pytest.approx(0.75)


def test_latencies_are_one_histogram_for_all_peers_of_a_way() -> None:
    counters = Counters()
    flows = [counters.flow(peer=peer, transport="tcp", direction="read") for peer in ("a", "b")]
    flows[0].add(1, 1, 50e-6)
    flows[1].add(1, 1, 0.003)
    flows[1].add(1, 1, 100.0)
    samples = scraped(counters)
    way = {"transport": "tcp", "direction": "read"}
    counts = {
        dict(labels)["le"]: value
        for (name, labels), value in samples.items()
        if name == "moonpool:messenger_latency_seconds_bucket"
    }
    assert len(counts) == len(LATENCY_EDGES_S) // 2 + 1
    assert (counts["1.6e-05"], counts["6.4e-05"], counts["0.004096"], counts["+Inf"]) == (0, 1, 2, 3)
    assert samples[key("latency_seconds_count", **way)] == 3
    assert math.isclose(samples[key("latency_seconds_sum", **way)], 100.00305)


def test_what_a_rail_carried_is_told_apart_from_what_went_to_peers() -> None:
    counters = Counters()
    flow = counters.flow(peer="", transport="rdma", rail="mlx5_0/1", direction="read")
    flow.add(70, 3, 0.001)
    samples = scraped(counters)
    labels = {"rail": "mlx5_0/1", "transport": "rdma", "direction": "read"}
    assert samples[key("rail_bytes_total", **labels)] == 70
    assert samples[key("rail_latency_seconds_count", **labels)] == 1
    assert not [name for name, _ in samples if name == "moonpool:messenger_bytes_total"]


def test_what_waits_is_told_by_priority() -> None:
    samples = scraped(Counters(), queued_urgent_open=3, queued_background_open=40, grants_open=2)
    assert samples[key("queued_open", priority="urgent")] == 3
    assert samples[key("queued_open", priority="background")] == 40
    assert samples[key("grants_open")] == 2


def test_many_peers_make_few_series() -> None:
    counters = Counters()
    for number in range(40 * MAX_PEERS):
        for direction in ("written", "read"):
            counters.flow(peer=f"p{number}", transport="tcp", direction=direction).add(1, 1, 0.001)  # type: ignore[arg-type]
    per_peer = [labels for name, labels in scraped(counters) if name == "moonpool:messenger_bytes_total"]
    assert len(per_peer) <= 2 * (MAX_PEERS + 1)
    assert len(reported(counters, {})) < 400
