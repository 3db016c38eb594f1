"""Export of the conductor's own numbers, as one Prometheus collector. What each means is said here, once."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

__all__ = ["CONDUCTOR_HISTOGRAMS", "CONDUCTOR_METRICS", "ConductorCollector", "ConductorSample"]

# Names without the prefix moonpool:, those of counters with _total; and the labels of each.
CONDUCTOR_METRICS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "directory_exact": ("1 while the directory knows exactly what the pool node holds.", ("node",)),
    "directory_blocks": ("Blocks the pool node is known to hold, by tier.", ("node", "tier")),
    "directory_mismatches_total": ("Messages whose sum of the node's contents was not the directory's.", ("node",)),
    "directory_snapshots_total": ("Snapshots of pool nodes taken in, by what they were for.", ("reason",)),
    "directory_resyncs_total": ("Events that could not be taken in, so that a snapshot was needed.", ("reason",)),
    "replicas": ("Prefixes copied to a second pool node and still in use there.", ()),
    "replication_saved_seconds_total": ("Predicted TTFT without copied prefixes less that with them, summed.", ()),
    "replication_spent_seconds_total": ("Seconds that copying prefixes between pool nodes took.", ()),
    "tenant_uncached_tokens_total": ("Prompt tokens computed for ended requests.", ("model_name", "tenant")),
    "tenant_generated_tokens_total": ("Tokens generated for ended requests.", ("model_name", "tenant")),
    "tenant_kv_block_seconds_total": (
        "Blocks of KV of ended requests, times the seconds that each was held where the request decoded.",
        ("model_name", "tenant"),
    ),
    "tenant_requests": ("Requests placed and not ended.", ("model_name", "tenant")),
    "admission_rejected_total": ("Requests rejected for load when they came, by reason.", ("model_name", "reason")),
    "admission_unwanted_total": (
        "Requests admitted in shadow that would have been rejected, by reason.",
        ("model_name", "reason"),
    ),
    "admission_hindsight_total": (
        "Rejections, enforced or in shadow, by what hindsight says of them.",
        ("model_name", "reason", "verdict"),
    ),
    "admission_admitted_total": (
        "Admitted requests that finished, by what became of their objectives.",
        ("model_name", "outcome"),
    ),
    "undivided_total": (
        "Placed requests of which was asked whether to prefill them where they decode, by what came of it.",
        ("model_name", "outcome"),
    ),
    "role_switches_total": (
        "Changes of nodes' roles, by whether they were only advised, asked for, or made.",
        ("model_name", "from_role", "to_role", "outcome"),
    ),
    "role_switches_refused_total": (
        "Changes of nodes' roles that cannot be, by why.",
        ("model_name", "from_role", "to_role", "reason"),
    ),
    "desired_nodes": ("Nodes of a role that a model's demand needs, with hysteresis.", ("model_name", "role")),
    "load": ("Predicted latency of a phase's nodes over its objective; above 1 is too much.", ("model_name", "phase")),
    "load_swing": ("Standard deviation of the same over about a minute.", ("model_name", "phase")),
    "decision_log_lines_total": ("Lines of the decision log written, by kind.", ("kind",)),
    "decision_log_lost_total": ("What the decision log left out, by why.", ("reason",)),
    "shared_store_up": ("1 while Redis can be written and read; 0: the conductor goes on without.", ()),
    "shared_store_errors_total": ("Tries to write or read Redis that failed.", ("reason",)),
    "slo_version": ("The version of the record of objectives that the conductor goes by; 0: not stored yet.", ()),
    "slo_unmeetable": ("Objectives that no node can meet, by what was measured.", ()),
    "slo_drift": ("Places in which the configured objectives differ from those in force.", ()),
    "slo_requests_total": (
        "Requests that had an objective, by what became of it; all: of both at once.",
        ("model_name", "slo_class", "objective", "result"),
    ),
    "slo_tenant_requests_total": (
        "The same by tenant; beyond the first few that the record does not name: other.",
        ("tenant", "objective", "result"),
    ),
    "trace_spans_total": ("Spans of traces that ended in a process, by what became of them.", ("process", "result")),
    "event_loop_lag_seconds": ("Longest time that an event loop did not come round of late.", ("process",)),
    "event_loop_held_seconds": ("Longest of such times that was the process's own work.", ("process",)),
    "event_loop_stalls_total": ("Times that a process's own work held its event loop for 50 ms or more.", ("process",)),
    "node_slowdown": (
        "How many times longer than a usual node of its model the node takes, for prefills and for decode steps.",
        ("node", "model_name", "what"),
    ),
    "cost_samples_refused_total": ("Measurements of nodes that cannot be true, by what is wrong.", ("node", "reason")),
    "predictions_extrapolated_total": (
        "Predictions for a request that lie beyond what was measured, by what was predicted.",
        ("model_name", "what"),
    ),
    "directory_breaks_total": ("Event streams of pool nodes that ended, by how.", ("reason",)),
}


# The same of histograms: samples are cumulative buckets, their bound in the label le.
CONDUCTOR_HISTOGRAMS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "prediction_relative_error": (
        "(predicted - measured) / measured of a prompt's prefill, a decode step, a request's TTFT and mean TBT.",
        ("what", "model_name", "node"),
    ),
}


@dataclass(frozen=True)
class ConductorSample:
    """One number of the conductor's, its name without prefix."""

    name: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


class ConductorCollector(Collector):
    """Turns `samples()`, called at each scrape, into metric families; names that are not known here are left out."""

    def __init__(self, samples: Callable[[], Sequence[ConductorSample]]) -> None:
        self._samples = samples

    def describe(self) -> Iterator[Metric]:
        """All families, empty."""
        return self._families(())

    def collect(self) -> Iterator[Metric]:
        """Families over the present samples."""
        return self._families(self._samples())

    def _families(self, samples: Sequence[ConductorSample]) -> Iterator[Metric]:
        for name, (text, labels) in CONDUCTOR_METRICS.items():
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = kind("moonpool:" + name.removesuffix("_total"), text, labels=labels)
            for sample in samples:
                if sample.name == name:
                    family.add_metric([sample.labels.get(label, "") for label in labels], sample.value)
            yield family
        for name, (text, labels) in CONDUCTOR_HISTOGRAMS.items():
            yield _histogram(name, text, labels, samples)


def _histogram(
    name: str, text: str, labels: tuple[str, ...], samples: Sequence[ConductorSample]
) -> HistogramMetricFamily:
    family = HistogramMetricFamily("moonpool:" + name, text, labels=labels)
    series: dict[tuple[str, ...], list[tuple[str, float]]] = {}
    for sample in samples:
        if sample.name == name and "le" in sample.labels:
            values = tuple(sample.labels.get(label, "") for label in labels)
            series.setdefault(values, []).append((sample.labels["le"], sample.value))
    for values, buckets in series.items():
        family.add_metric(values, sorted(buckets, key=lambda bucket: float(bucket[0])), None)
    return family
