"""Counters of a messenger: flows (bytes by peer, transport, rail and direction) and events by name.

No lock is taken on the path of a transfer. Each thread adds to its own sums, and a reader adds them up: a reading may
miss concurrent additions, but none is ever lost. `Counters._lock` guards the totals and the list of open sums; when the
user of sums is gone (a connection or a thread ended), the next reader folds them into the totals.

Nodes report the counts under flat names (`reported`): bytes, slices, operations and their seconds per peer (of which
the number is bounded) and per rail; latencies as histograms per transport and direction, and per rail.
`telemetry.nodes` parses the names.
"""

import math
import threading
import weakref
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Direction = Literal["written", "read", "landed", "served"]
"""written, read: by this messenger, in a peer's memory; landed, served: by a peer, in this messenger's memory."""

MAX_PEERS = 32
"""Maximum number of peers counted separately; beyond it, those without an open flow are summed as OTHER_PEERS."""
OTHER_PEERS = "other"

FIRST_EDGE_S = 8e-6
LATENCY_EDGES_S = tuple(FIRST_EDGE_S * (1 << power) for power in range(22))
"""Upper bounds of the latency buckets, 8 us to 16.8 s; longer operations are in one more bucket."""

_PER_FIRST_EDGE = 1 / FIRST_EDGE_S
_NBYTES, _SLICES, OPERATIONS, _SECONDS, _BUCKETS = range(5)
_LAST = _BUCKETS + len(LATENCY_EDGES_S)

NUM_SUMS = _LAST + 1
FloatSums = npt.NDArray[np.float64]
Sums = list[float] | FloatSums
"""[NUM_SUMS]: [bytes, slices, operations, seconds, one count per latency bucket ...]"""


@dataclass(frozen=True, order=True)
class FlowKey:
    """Labels of a flow, per peer (`rail` is "") or per rail (`peer` is "").

    The flows per rail count the same bytes again, by the devices that carried them.
    """

    peer: str
    transport: str
    rail: str
    direction: Direction


@dataclass(frozen=True)
class FlowTotals:
    """Totals of a flow; `latencies` counts operations per bucket of LATENCY_EDGES_S, and those beyond the last."""

    key: FlowKey
    nbytes: int
    slices: int
    operations: int
    seconds: float
    latencies: tuple[int, ...]

    @classmethod
    def of(cls, key: FlowKey, sums: Sums) -> "FlowTotals":
        """Return the totals of these sums."""
        nbytes, slices, operations = (int(total) for total in sums[:_SECONDS])
        return cls(key, nbytes, slices, operations, sums[_SECONDS], tuple(int(count) for count in sums[_BUCKETS:]))

    def quantile_s(self, share: float) -> float:
        """Return the upper bound of the latency bucket that holds the quantile `share`; 0.0 without operations."""
        left = share * self.operations
        for edge_s, count in zip(LATENCY_EDGES_S, self.latencies, strict=False):
            left -= count
            if count and left <= 0:
                return edge_s
        return math.inf if self.operations else 0.0


class Flow:
    """Sums of one connection and direction. Used by one thread at a time; ends with its last reference."""

    __slots__ = ("__weakref__", "_sums")

    def __init__(self, sums: Sums) -> None:
        self._sums = sums

    def add(self, nbytes: int, slices: int, seconds: float) -> None:
        """Add one operation, or one part: its bytes, its number of slices and its duration."""
        sums = self._sums
        sums[0] += nbytes
        sums[1] += slices
        sums[2] += 1
        sums[3] += seconds
        # The edges double, so the bucket is the number of bits.
        bucket = 4 + int(seconds * _PER_FIRST_EDGE).bit_length()
        sums[bucket if bucket < _LAST else _LAST] += 1


class _Events:
    """Event counts of one thread."""

    def __init__(self, counts: dict[str, int]) -> None:
        self.counts = counts


class Counters:
    """Counts of one messenger. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._flow_totals: dict[FlowKey, Sums] = {}
        self._event_totals: Counter[str] = Counter()
        # By the identity of the weak reference to their user. Its callback may run at any point of any thread, where no
        # lock may be taken, so it only appends to `_ended`.
        self._open_flows: dict[int, tuple[weakref.ref[Flow], FlowKey, Sums]] = {}
        self._open_events: dict[int, tuple[weakref.ref[_Events], dict[str, int]]] = {}
        self._ended: deque[weakref.ref[Flow] | weakref.ref[_Events]] = deque()
        self._own = threading.local()

    def flow(
        self, *, peer: str, transport: str, direction: Direction, rail: str = "", sums: Sums | None = None
    ) -> Flow:
        """Return a new Flow, one for each connection and direction.

        `sums` [NUM_SUMS], if given, are zeros to which the Flow and, on the same thread, a compiled loop add.
        """
        sums = [0] * NUM_SUMS if sums is None else sums
        flow = Flow(sums)
        reference = weakref.ref(flow, self._ended.append)
        with self._lock:
            self._fold_ended()
            key = FlowKey(self._label(peer), transport, rail, direction)
            self._open_flows[id(reference)] = reference, key, sums
            self._flow_totals.setdefault(key, [0] * len(sums))
        return flow

    def add(self, name: str, amount: int = 1) -> None:
        """Count an event."""
        try:
            counts = self._own.events.counts
        except AttributeError:
            counts = self._begin_thread()
        counts[name] = counts.get(name, 0) + amount

    def flows(self) -> list[FlowTotals]:
        """Return the totals by peer, transport, rail and direction, sorted."""
        with self._lock:
            self._fold_ended()
            totals = {key: list(sums) for key, sums in self._flow_totals.items()}
            for _, key, sums in self._open_flows.values():
                _add(totals[key], sums)
        return [FlowTotals.of(key, totals[key]) for key in sorted(totals)]

    def events(self) -> dict[str, int]:
        """Return the events' counts by name."""
        with self._lock:
            self._fold_ended()
            counts = Counter(self._event_totals)
            for _, own in self._open_events.values():
                counts.update(dict(own))
        return dict(counts)

    def snapshot(self) -> dict[str, int]:
        """Return all counts by name: events, and `bytes_`, `slices_` and `operations_<direction>_<transport>`."""
        counts = Counter(self.events())
        for flow in self.flows():
            if flow.key.rail:
                continue  # the same bytes, counted by rail
            suffix = f"{flow.key.direction}_{flow.key.transport}"
            counts[f"bytes_{suffix}"] += flow.nbytes
            counts[f"slices_{suffix}"] += flow.slices
            counts[f"operations_{suffix}"] += flow.operations
        return dict(counts)

    def _begin_thread(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        events = self._own.events = _Events(counts)
        reference = weakref.ref(events, self._ended.append)
        with self._lock:
            self._fold_ended()
            self._open_events[id(reference)] = reference, counts
        return counts

    def _fold_ended(self) -> None:
        while self._ended:
            ended = id(self._ended.popleft())
            if ended in self._open_flows:
                _, key, sums = self._open_flows.pop(ended)
                _add(self._flow_totals[key], sums)
            else:
                self._event_totals.update(self._open_events.pop(ended)[1])

    def _label(self, peer: str) -> str:
        """Return the peer's label: its name, or OTHER_PEERS if MAX_PEERS others have open flows."""
        known = {key.peer for key in self._flow_totals} - {OTHER_PEERS}
        if peer in known or len(known) < MAX_PEERS:
            return peer
        spent = known - {key.peer for _, key, _ in self._open_flows.values()}
        for key in [key for key in self._flow_totals if key.peer in spent]:
            other = FlowKey(OTHER_PEERS, key.transport, key.rail, key.direction)
            _add(self._flow_totals.setdefault(other, [0] * (_LAST + 1)), self._flow_totals.pop(key))
        return peer if spent else OTHER_PEERS


def _add(totals: Sums, sums: Sums) -> None:
    for index, amount in enumerate(list(sums)):
        totals[index] += amount


CERTIFICATE_LEFT = "tls_certificate_left_seconds"

_REPORTED_EDGES = range(1, len(LATENCY_EDGES_S), 2)


def reported(counters: Counters, open_counts: Mapping[str, int]) -> dict[str, float]:
    """Return the totals of events, flows and latencies, and `open_counts`, which are added as they are."""
    flows = counters.flows()
    return {**counters.events(), **open_counts, **_sums(flows), **_latencies(flows)}


def _sums(flows: Sequence[FlowTotals]) -> dict[str, float]:
    """Return sums named flow/PEER/TRANSPORT/DIRECTION_UNIT and rail/RAIL/TRANSPORT/DIRECTION_UNIT."""
    numbers: dict[str, float] = {}
    for flow in flows:
        key = flow.key
        labels = f"rail/{key.rail}" if key.rail else f"flow/{key.peer}"
        name = f"{labels}/{key.transport}/{key.direction}"
        numbers[f"{name}_bytes"] = flow.nbytes
        numbers[f"{name}_slices"] = flow.slices
        numbers[f"{name}_operations"] = flow.operations
        numbers[f"{name}_seconds"] = flow.seconds
    return numbers


def _latencies(flows: Sequence[FlowTotals]) -> dict[str, float]:
    """Return cumulative histograms named latency/TRANSPORT/DIRECTION_le_64us, ..., _count and _sum_ms; also by rail."""
    numbers: dict[str, float] = {}
    for flow in flows:
        key = flow.key
        labels = f"rail_latency/{key.rail}" if key.rail else "latency"
        name = f"{labels}/{key.transport}/{key.direction}"
        buckets = {
            f"le_{round(LATENCY_EDGES_S[edge] * 1e6)}us": sum(flow.latencies[: edge + 1]) for edge in _REPORTED_EDGES
        }
        for part, number in (buckets | {"count": flow.operations, "sum_ms": flow.seconds * 1e3}).items():
            numbers[f"{name}_{part}"] = numbers.get(f"{name}_{part}", 0) + number
    return numbers
