"""Prometheus collector of the numbers that nodes report, with labels node, role and model_name.

`series_of` maps a reported name to metric family, kind and labels. Values are the nodes' own: nothing is accumulated
here, so a restarted node shows as a counter reset.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from telemetry.histograms import DurationHistogram, histogram_names, histogram_of, is_part

GAUGE_SUFFIXES: Final = (
    *("_open", "_held_blocks", "_used_bytes", "_capacity_bytes", "_readable", "_writable", "_left_seconds"),
    *("_bound_bytes", "_resident_bytes", "_pressure"),
)
# Traffic of the messenger, by path and unit.
_WAY: Final = r"(?P<transport>[a-z]+)/(?P<direction>[a-z]+)"
_UNITS: Final = "bytes|slices|operations|seconds"
# Names that hold a label: the pattern's named groups are labels, but for `unit`, which goes into the family's name.
_LABELLED: Final = tuple(
    (re.compile(pattern), family, scale)
    for pattern, family, scale in (
        (r"kv_(?P<path>[a-z]+)_bytes", "kv_bytes_moved", 1.0),
        (r"pool_hit_(?P<tier>dram|ssd)_(?P<unit>blocks|tokens)", "pool_hit_{unit}", 1.0),
        (r"pool_evicted_(?P<tier>dram|ssd)_(?P<unit>bytes)", "pool_evicted_{unit}", 1.0),
        (r"pool_evicted_(?P<tier>dram|ssd)_(?P<reason>[a-z]+)_blocks", "pool_evicted_blocks", 1.0),
        (r"pool_evicted_(?P<tier>dram|ssd)_(?P<unit>age|idle)", "pool_evicted_{unit}", 1.0),
        (r"pool_lost_(?P<reason>[a-z_]+)_blocks", "pool_lost_blocks", 1.0),
        (r"pool_saved_(?P<tier>dram|ssd)_compute_us", "pool_saved_seconds", 1e-6),
        (rf"messenger_flow/(?P<peer>.*)/{_WAY}_(?P<unit>{_UNITS})", "messenger_{unit}", 1.0),
        (rf"messenger_rail/(?P<rail>.*)/{_WAY}_(?P<unit>{_UNITS})", "messenger_rail_{unit}", 1.0),
        (rf"messenger_latency/{_WAY}", "messenger_latency", 1.0),
        (rf"messenger_rail_latency/(?P<rail>.*)/{_WAY}", "messenger_rail_latency", 1.0),
        (r"trace_spans_(?P<result>[a-z]+)", "node_trace_spans", 1.0),
        (r"messenger_queued_(?P<priority>[a-z]+)_open", "messenger_queued_open", 1.0),
    )
)
# Not exported: sums of labelled series, and numbers that the pool's policy and its shell both count.
_NOT_EXPORTED: Final = {
    *("pool_evicted_blocks", "pool_lost_blocks"),
    *("pool_promoted_blocks", "pool_load_failed_blocks", "pool_ssd_stored_blocks", "pool_ssd_failed_blocks"),
}
_NOT_IN_NAMES: Final = re.compile(r"[^a-zA-Z0-9_]")


@dataclass(frozen=True)
class Series:
    """Metric series of a reported number, whose value is `scale` times the number.

    `family` has no prefix moonpool: and no _total.
    """

    family: str
    labels: tuple[tuple[str, str], ...] = ()
    is_gauge: bool = False
    scale: float = 1.0

    @property
    def label_names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.labels)

    @property
    def label_values(self) -> tuple[str, ...]:
        return tuple(value for _, value in self.labels)


@lru_cache(maxsize=4096)
def series_of(name: str) -> Series | None:
    """Return the series of a reported name; None if another series covers it."""
    if name in _NOT_EXPORTED:
        return None
    for pattern, family, scale in _LABELLED:
        if found := pattern.fullmatch(name):
            groups = found.groupdict()
            unit = groups.pop("unit", "")
            return Series(family.format(unit=unit), tuple(groups.items()), name.endswith(GAUGE_SUFFIXES), scale)
    family = _NOT_IN_NAMES.sub("_", name).removesuffix("_total")
    return Series(family, is_gauge=name.endswith(GAUGE_SUFFIXES))


_LABELS: Final = ("node", "role", "model_name")
_PREFIX: Final = "moonpool:"


@dataclass(frozen=True)
class NodeSample:
    """A node's last report. `capacity_tokens` 0: it has no KV pages; `model` "": it serves none."""

    node_id: str
    role: str
    model: str = ""
    num_running: int = 0
    num_waiting: int = 0
    capacity_tokens: int = 0
    free_tokens: int = 0
    draining: bool = False
    suspect: bool = False
    engine: str = ""  # engine that simulates the model
    counters: Mapping[str, float] = field(default_factory=dict)

    @property
    def labels(self) -> tuple[str, str, str]:
        """Return the values of the labels node, role and model_name."""
        return self.node_id, self.role, self.model


class NodesCollector(Collector):
    """Converts `samples()`, called at each scrape, to metric families.

    A NAME that ends in one of GAUGE_SUFFIXES becomes the gauge moonpool:NAME; durations counted as NAME_le_10ms and so
    on become the histogram moonpool:NAME_seconds; any other becomes moonpool:NAME_total. Labels embedded in a name are
    extracted: kv_PATH_bytes is moonpool:kv_bytes_moved_total{path=PATH} (see `series_of`).

    `own`: the samples are of the exporting process, which cannot judge whether it reports: no moonpool:node_up.
    """

    def __init__(self, samples: Callable[[], Sequence[NodeSample]], *, own: bool = False) -> None:
        self._samples = samples
        self._own = own

    def describe(self) -> Iterable[Metric]:
        """Return the gauges; the counters are known only once nodes report."""
        return self._gauges(())

    def collect(self) -> Iterator[Metric]:
        """Return the families with the current samples."""
        samples = self._samples()
        yield from self._gauges(samples)
        yield from self._counters(samples)

    def _gauges(self, samples: Sequence[NodeSample]) -> Iterator[Metric]:
        running = GaugeMetricFamily("vllm:num_requests_running", "Requests in the running batch.", labels=_LABELS)
        waiting = GaugeMetricFamily("vllm:num_requests_waiting", "Requests waiting at a node.", labels=_LABELS)
        usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", "Share of KV pages in use, 0 to 1.", labels=_LABELS)
        draining = GaugeMetricFamily(
            "moonpool:node_draining", "1 if the node is draining and accepts no new work.", labels=_LABELS
        )
        stand_in = GaugeMetricFamily(
            "moonpool:stand_in_engine",
            "1 for each node that simulates computation by waiting as long as a cost profile predicts.",
            labels=(*_LABELS, "engine"),
        )
        for sample in samples:
            if sample.engine:
                stand_in.add_metric((*sample.labels, sample.engine), 1.0)
            running.add_metric(sample.labels, sample.num_running)
            waiting.add_metric(sample.labels, sample.num_waiting)
            draining.add_metric(sample.labels, float(sample.draining))
            if sample.capacity_tokens > 0:
                usage.add_metric(sample.labels, 1.0 - sample.free_tokens / sample.capacity_tokens)
        yield from (running, waiting, usage, draining, stand_in)
        if not self._own:
            yield _node_up(samples)

    def _counters(self, samples: Sequence[NodeSample]) -> Iterator[Metric]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        histograms: dict[str, HistogramMetricFamily] = {}
        for sample in samples:
            names = histogram_names(sample.counters)
            for name, value in sorted(sample.counters.items()):
                series = None if is_part(name, names) else series_of(name)
                if series is not None:
                    family = families.get(series.family) or families.setdefault(series.family, _family(series, name))
                    family.add_metric((*sample.labels, *series.label_values), value * series.scale)
            for name in names:
                series = series_of(name)
                assert series is not None  # every histogram has a series
                found = histograms.get(series.family) or histograms.setdefault(series.family, _histogram(series, name))
                _add(found, (*sample.labels, *series.label_values), histogram_of(sample.counters, name))
        yield from families.values()
        yield from histograms.values()


class NodesUpCollector(Collector):
    """Exports only moonpool:node_up of `samples()`: the conductor's judgement, which outlives a node's process."""

    def __init__(self, samples: Callable[[], Sequence[NodeSample]]) -> None:
        self._samples = samples

    def describe(self) -> Iterable[Metric]:
        """Return the family, empty."""
        return [_node_up(())]

    def collect(self) -> Iterable[Metric]:
        """Return the family with the current samples."""
        return [_node_up(self._samples())]


def _node_up(samples: Sequence[NodeSample]) -> Metric:
    up = GaugeMetricFamily("moonpool:node_up", "1 if the joined node reports, 0 if it does not.", labels=_LABELS)
    for sample in samples:
        up.add_metric(sample.labels, float(not sample.suspect))
    return up


def _family(series: Series, name: str) -> CounterMetricFamily | GaugeMetricFamily:
    text = f"Reported by nodes as {name}." if not series.labels else "Reported by nodes, by label."
    kind = GaugeMetricFamily if series.is_gauge else CounterMetricFamily
    return kind(_PREFIX + series.family, text, labels=(*_LABELS, *series.label_names))


def _histogram(series: Series, name: str) -> HistogramMetricFamily:
    return HistogramMetricFamily(
        f"{_PREFIX}{series.family}_seconds",
        f"Reported by nodes as {name}.",
        labels=(*_LABELS, *series.label_names),
    )


def _add(family: HistogramMetricFamily, labels: tuple[str, ...], found: DurationHistogram) -> None:
    buckets = [(str(bound), count) for bound, count in zip(found.bounds_s, found.at_most, strict=True)]
    family.add_metric(labels, [*buckets, ("+Inf", found.count)], found.sum_s)
