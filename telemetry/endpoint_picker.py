"""Metrics of the endpoint picker."""

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

__all__ = ["EndpointPickerMetrics"]

_PICK_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class EndpointPickerMetrics:
    """Counters of one endpoint picker, in `registry`."""

    def __init__(self, registry: CollectorRegistry, endpoints: Callable[[], Iterable[tuple[str, int]]]) -> None:
        """`endpoints` returns (state, number of endpoints in it) at each scrape."""
        self.picks = Counter(
            "moonpool:endpoint_picks",
            "HTTP exchanges of a gateway, by outcome: picked, or the code of the error that was returned.",
            ("outcome",),
            registry=registry,
        )
        self.unjudged = Counter(
            "moonpool:endpoint_picks_unjudged",
            "Requests sent to an endpoint without the conductor's judgement, which did not come in time.",
            registry=registry,
        )
        self.seconds = Histogram(
            "moonpool:endpoint_pick_seconds",
            "Seconds from the end of a request's body to its endpoint or its error.",
            buckets=_PICK_S,
            registry=registry,
        )
        registry.register(_EndpointStates(endpoints))


class _EndpointStates(Collector):
    def __init__(self, endpoints: Callable[[], Iterable[tuple[str, int]]]) -> None:
        self._endpoints = endpoints

    def collect(self) -> Iterator[Metric]:
        """Yield the number of endpoints by state."""
        family = GaugeMetricFamily("moonpool:picker_endpoints", "Endpoints to pick from, by state.", labels=("state",))
        for state, count in self._endpoints():
            family.add_metric((state,), count)
        yield family
