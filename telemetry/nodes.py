"""Export of what the cluster's nodes report, with labels node, role and model_name, as one Prometheus collector.

The numbers are the nodes' own; nothing is accumulated here, so a node that restarts shows as a counter reset.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

_LABELS: Final = ("node", "role", "model_name")
_MOVED_BYTES: Final = re.compile(r"kv_([a-z]+)_bytes")
GAUGE_SUFFIXES: Final = ("_open", "_held_blocks", "_used_bytes", "_capacity_bytes", "_readable", "_writable")
_NOT_IN_NAMES: Final = re.compile(r"[^a-zA-Z0-9_]")


@dataclass(frozen=True)
class NodeSample:
    """One node's last report. `capacity_tokens` 0: no KV pages of its own; `model` "": it serves none."""

    node_id: str
    role: str
    model: str = ""
    num_running: int = 0
    num_waiting: int = 0
    capacity_tokens: int = 0
    free_tokens: int = 0
    draining: bool = False
    suspect: bool = False
    counters: Mapping[str, float] = field(default_factory=dict)

    @property
    def labels(self) -> tuple[str, str, str]:
        """Values of the labels node, role and model_name."""
        return self.node_id, self.role, self.model


class NodesCollector(Collector):
    """Turns `samples()`, called at each scrape, into metric families.

    Counters named kv_PATH_bytes become moonpool:kv_bytes_moved_total{path=PATH}. A NAME that ends in one of
    GAUGE_SUFFIXES, which tells what there is now, becomes the gauge moonpool:NAME; any other, moonpool:NAME_total.
    """

    def __init__(self, samples: Callable[[], Sequence[NodeSample]]) -> None:
        self._samples = samples

    def describe(self) -> Iterable[Metric]:
        """The gauges' names; the counters' are known only once nodes report."""
        return self._gauges(())

    def collect(self) -> Iterator[Metric]:
        """Families over the present samples."""
        samples = self._samples()
        yield from self._gauges(samples)
        yield from self._counters(samples)

    def _gauges(self, samples: Sequence[NodeSample]) -> Iterator[Metric]:
        running = GaugeMetricFamily("vllm:num_requests_running", "Requests in a running batch.", labels=_LABELS)
        waiting = GaugeMetricFamily("vllm:num_requests_waiting", "Requests waiting on a node.", labels=_LABELS)
        usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", "Share of KV pages in use, 0 to 1.", labels=_LABELS)
        draining = GaugeMetricFamily("moonpool:node_draining", "1 while a node takes no new work.", labels=_LABELS)
        up = GaugeMetricFamily(
            "moonpool:node_up", "1 for each joined node, 0 while it does not report.", labels=_LABELS
        )
        for sample in samples:
            running.add_metric(sample.labels, sample.num_running)
            waiting.add_metric(sample.labels, sample.num_waiting)
            draining.add_metric(sample.labels, float(sample.draining))
            up.add_metric(sample.labels, float(not sample.suspect))
            if sample.capacity_tokens > 0:
                usage.add_metric(sample.labels, 1.0 - sample.free_tokens / sample.capacity_tokens)
        yield from (running, waiting, usage, draining, up)

    def _counters(self, samples: Sequence[NodeSample]) -> Iterator[Metric]:
        moved = CounterMetricFamily("moonpool:kv_bytes_moved", "Bytes of KV moved, by path.", labels=(*_LABELS, "path"))
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for sample in samples:
            for name, value in sorted(sample.counters.items()):
                if path := _MOVED_BYTES.fullmatch(name):
                    moved.add_metric((*sample.labels, path[1]), value)
                    continue
                clean = "moonpool:" + _NOT_IN_NAMES.sub("_", name).removesuffix("_total")
                family = families.get(clean)
                if family is None:
                    kind = GaugeMetricFamily if name.endswith(GAUGE_SUFFIXES) else CounterMetricFamily
                    family = families[clean] = kind(clean, f"Reported by nodes as {name}.", labels=_LABELS)
                family.add_metric(sample.labels, value)
        yield moved
        yield from families.values()
