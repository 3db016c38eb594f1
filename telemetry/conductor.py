"""Prometheus collector of the conductor's metrics, with the help text of each."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

__all__ = ["CONDUCTOR_HISTOGRAMS", "CONDUCTOR_METRICS", "ConductorCollector", "ConductorSample"]

# Names without the prefix moonpool:, those of counters with _total; and the labels of each.
CONDUCTOR_METRICS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "directory_exact": ("1 if the directory matches the pool node's contents exactly, else 0.", ("node",)),
    "directory_blocks": ("Blocks of the pool node in the directory, by tier.", ("node", "tier")),
    "worker_directory_exact": (
        "1 if the directory matches the blocks in the worker's own memory exactly, else 0.",
        ("node",),
    ),
    "worker_directory_blocks": ("Blocks in the worker's own memory, as known to the directory.", ("node",)),
    "directory_mismatches_total": ("Events whose contents checksum differed from the directory's.", ("node",)),
    "directory_snapshots_total": ("Snapshots of pool nodes and workers received, by reason.", ("reason",)),
    "directory_resyncs_total": ("Snapshots requested because events could not be applied, by reason.", ("reason",)),
    "replicas": ("Replicas of hot prefixes in use.", ()),
    "replication_saved_seconds_total": ("Predicted TTFT saved by replicas of hot prefixes, in seconds.", ()),
    "replication_spent_seconds_total": ("Seconds spent copying prefixes between pool nodes.", ()),
    "tenant_uncached_tokens_total": ("Prompt tokens computed for completed requests.", ("model_name", "tenant")),
    "tenant_cached_tokens_total": ("Prompt tokens reused for completed requests.", ("model_name", "tenant")),
    "tenant_generated_tokens_total": ("Tokens generated for completed requests.", ("model_name", "tenant")),
    "tenant_kv_block_seconds_total": (
        "KV block-seconds held on decode nodes by completed requests.",
        ("model_name", "tenant"),
    ),
    "tenant_requests": ("Requests placed and not completed yet.", ("model_name", "tenant")),
    "admission_rejected_total": ("Requests rejected at arrival because of load, by reason.", ("model_name", "reason")),
    "admission_unwanted_total": (
        "Requests admitted in shadow mode that would have been rejected, by reason.",
        ("model_name", "reason"),
    ),
    "admission_hindsight_total": (
        "Rejections, enforced or in shadow mode, by the verdict of the later evaluation.",
        ("model_name", "reason", "verdict"),
    ),
    "admission_admitted_total": (
        "Admitted requests that finished, by whether they met their objectives.",
        ("model_name", "outcome"),
    ),
    "undivided_total": (
        "Placed requests considered for colocated prefill, by outcome.",
        ("model_name", "outcome"),
    ),
    "role_switches_total": (
        "Role changes of nodes, by outcome: advised, asked, done, kept or left.",
        ("model_name", "from_role", "to_role", "outcome"),
    ),
    "role_switches_refused_total": (
        "Rejected role changes of nodes, by reason.",
        ("model_name", "from_role", "to_role", "reason"),
    ),
    "desired_nodes": ("Nodes of a role that a model's demand requires, with hysteresis.", ("model_name", "role")),
    "load": ("Predicted latency of a phase divided by its objective; above 1 is overload.", ("model_name", "phase")),
    "load_swing": ("Standard deviation of the load over about a minute.", ("model_name", "phase")),
    "decision_log_lines_total": ("Lines of the decision log written, by kind.", ("kind",)),
    "decision_log_lost_total": ("Entries dropped from the decision log, by reason.", ("reason",)),
    "shared_store_up": ("1 if Redis can be read and written; 0: the conductor works without it.", ()),
    "shared_store_errors_total": ("Failed reads and writes of Redis, by reason.", ("reason",)),
    "slo_version": ("Version of the objectives in force; 0: not stored yet.", ()),
    "slo_unmeetable": ("Objectives that no node can meet, according to measured costs.", ()),
    "slo_drift": ("Fields in which the configured objectives differ from those in force.", ()),
    "slo_requests_total": (
        "Requests with an objective, by result; objective=all: both objectives together.",
        ("model_name", "slo_class", "objective", "result"),
    ),
    "slo_tenant_requests_total": (
        "Requests with an objective, by tenant; tenants beyond the bound are counted as other.",
        ("tenant", "objective", "result"),
    ),
    "trace_spans_total": ("Ended trace spans of a process, by result.", ("process", "result")),
    "event_loop_lag_seconds": ("Longest recent delay of an event loop.", ("process",)),
    "event_loop_held_seconds": (
        "Longest recent delay of an event loop caused by the process's own work.",
        ("process",),
    ),
    "event_loop_stalls_total": ("Event loop delays of 50 ms or more caused by the process's own work.", ("process",)),
    "node_slowdown": (
        "Slowdown of a node relative to the typical node of its model, for prefills and decode steps.",
        ("node", "model_name", "what"),
    ),
    "cost_samples_refused_total": ("Implausible cost measurements of nodes, by reason.", ("node", "reason")),
    "predictions_extrapolated_total": (
        "Predictions outside the measured range, by predicted quantity.",
        ("model_name", "what"),
    ),
    "directory_breaks_total": ("Interrupted event streams of pool nodes and workers, by cause.", ("reason",)),
}


# The same of histograms: samples are cumulative buckets, their bound in the label le.
CONDUCTOR_HISTOGRAMS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "prediction_relative_error": (
        "(predicted - measured) / measured for prefill, decode step, TTFT and mean TBT.",
        ("what", "model_name", "node"),
    ),
}


@dataclass(frozen=True)
class ConductorSample:
    """One sample of the conductor; `name` has no prefix."""

    name: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


class ConductorCollector(Collector):
    """Converts `samples()`, called at each scrape, to metric families; unknown names are left out."""

    def __init__(self, samples: Callable[[], Sequence[ConductorSample]]) -> None:
        self._samples = samples

    def describe(self) -> Iterator[Metric]:
        """Return all families, empty."""
        return self._families(())

    def collect(self) -> Iterator[Metric]:
        """Return the families with the current samples."""
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
