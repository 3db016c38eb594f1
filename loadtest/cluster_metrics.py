"""Metrics of the cluster during a replay: polling of /metrics and their history."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

KV_PATHS: Final = ("push", "pull", "load", "fetch", "store")
INTEGRITY_EVENTS: Final = ("digest_mismatches", "recomputed_blocks")
_EVENTS: Final = {event: event for event in INTEGRITY_EVENTS} | {"pool_digest_mismatches": "digest_mismatches"}
_NOT_WORKERS: Final = ("pool",)
_GAUGES: Final = {"vllm:num_requests_running": "running", "vllm:num_requests_waiting": "waiting"}
_BYTES_OF_PATH: Final = re.compile(r"moonpool:kv_([a-z]+)_bytes")
_BYTES: Final = "moonpool:kv_bytes_moved"

CounterKey = tuple[str, str]
"""(counter, node): the counter is a KV path or an integrity event; the node consists of all other labels."""


@dataclass(frozen=True)
class MetricsSample:
    """One sample of /metrics, at a time of the replay. `load`: workers' requests by (role, "running" | "waiting")."""

    at_s: float
    load: Mapping[tuple[str, str], float]
    counters: Mapping[CounterKey, float]


def parse_metrics(text: str, at_s: float) -> MetricsSample:
    """Parse a sample from Prometheus' text format. Raises ValueError.

    KV bytes are read from `moonpool:kv_bytes_moved{path=}` or from `moonpool:kv_PATH_bytes`; the suffix `_total` is
    optional. Digest mismatches found by workers and by pool nodes are counted together.
    """
    load: dict[tuple[str, str], float] = {}
    counters: dict[CounterKey, float] = {}
    for family in text_string_to_metric_families(text):
        for metric in family.samples:
            name = metric.name.removesuffix("_total")
            if name in _GAUGES:
                key = metric.labels.get("role", ""), _GAUGES[name]
                if key[0] not in _NOT_WORKERS:
                    load[key] = load.get(key, 0.0) + metric.value
                continue
            counter = _counter_of(name, metric.labels)
            if counter:
                node = ",".join(f"{k}={v}" for k, v in sorted(metric.labels.items()) if k != "path")
                counters[counter, node] = counters.get((counter, node), 0.0) + metric.value
    return MetricsSample(at_s, load, counters)


def _counter_of(name: str, labels: Mapping[str, str]) -> str:
    if name == _BYTES:
        return labels.get("path", "")
    by_path = _BYTES_OF_PATH.fullmatch(name)
    if by_path:
        return by_path[1]
    return _EVENTS.get(name.removeprefix("moonpool:"), "") if name.startswith("moonpool:") else ""


@dataclass
class ClusterHistory:
    """History of the polled metrics; counters are summed over nodes as increases since the first sample.

    A counter that decreased belongs to a node that restarted and counts from 0 again.
    """

    samples: list[MetricsSample] = field(default_factory=list)
    increases: list[dict[str, float]] = field(default_factory=list)
    failed_polls: int = 0
    _latest: dict[CounterKey, float] = field(default_factory=dict, repr=False)

    def add(self, sample: MetricsSample) -> None:
        """Append a sample."""
        totals = dict(self.increases[-1]) if self.increases else {}
        for key, value in sample.counters.items():
            before = self._latest.get(key, 0.0) if self.samples else value
            totals[key[0]] = totals.get(key[0], 0.0) + (value - before if value >= before else value)
            self._latest[key] = value
        self.samples.append(sample)
        self.increases.append(totals)

    def increase(self, counter: str) -> int:
        """Return the increase of the counter since the first sample."""
        return int(self.increases[-1].get(counter, 0)) if self.increases else 0

    @property
    def kv_bytes_by_path(self) -> dict[str, int]:
        """KV bytes moved since the first sample, by path: KV_PATHS and every other path that the cluster reports."""
        reported = self.increases[-1] if self.increases else {}
        paths = dict.fromkeys((*KV_PATHS, *sorted(set(reported) - set(INTEGRITY_EVENTS))))
        return {path: self.increase(path) for path in paths}

    def increases_of(self, counter: str) -> tuple[list[float], list[float]]:
        """Return (times, increases since the first sample) of one counter."""
        return [s.at_s for s in self.samples], [totals.get(counter, 0.0) for totals in self.increases]

    def load_of(self, role: str, what: str) -> tuple[list[float], list[float]]:
        """Return (times, requests running or waiting) of one role."""
        return [s.at_s for s in self.samples], [s.load.get((role, what), 0.0) for s in self.samples]

    def roles(self) -> list[str]:
        """Return the roles that reported load at any time, sorted."""
        return sorted({role for sample in self.samples for role, _ in sample.load})


_TIMEOUT_S = 5.0
_STILL_POLLS = 2


class MetricsPoller:
    """Poller of one server's metrics. A failed poll is counted and does not end the replay.

    /metrics/cluster has the series of all nodes whatever the frontend exports at /metrics, which other servers have.
    """

    def __init__(
        self, session: aiohttp.ClientSession, base_url: str, *, clock: Callable[[], float], every_s: float
    ) -> None:
        self._session = session
        self._url = f"{base_url}/metrics/cluster"
        self._fallback_url = f"{base_url}/metrics"
        self._clock = clock
        self._every_s = every_s
        self.history = ClusterHistory()

    async def poll(self) -> bool:
        """Take one sample; return False if the poll failed."""
        try:
            text = await self._get(self._url)
            if text is None:
                self._url = self._fallback_url
                text = await self._get(self._url) or ""
            sample = parse_metrics(text, self._clock())
        except Exception:  # whatever a server answers: the replay goes on, and its report counts the polls
            self.history.failed_polls += 1
            return False
        self.history.add(sample)
        return True

    async def _get(self, url: str) -> str | None:
        """Return the text at `url`; None if there is nothing at /metrics/cluster. Raises aiohttp.ClientError."""
        async with self._session.get(url, timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S)) as response:
            if response.status == 404 and url != self._fallback_url:
                return None
            response.raise_for_status()
            return await response.text()

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            await self.poll()
            await asyncio.sleep(self._every_s)

    async def settle(self, *, at_most_s: float) -> None:
        """Poll until the counters stop increasing, at most for `at_most_s` seconds.

        Called after the last answer: nodes report once a second, and background stores end after the answers.
        """
        deadline = self._clock() + at_most_s
        still = 0
        while still < _STILL_POLLS and self._clock() < deadline and await self.poll():
            increases = self.history.increases
            still = still + 1 if len(increases) > 1 and increases[-1] == increases[-2] else 0
            await asyncio.sleep(self._every_s)
