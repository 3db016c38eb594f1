"""Counts of what a messenger did: flows (bytes by peer, transport, rail and direction) and events by name.

Nothing here takes a lock on the way of a transfer. Each thread adds to sums of its own, which a reader adds up: what it
sees may lack the additions of this very moment, and never loses any. When their owner is gone (a connection ended, a
thread is over) its sums are folded into the totals.

What a messenger counts, as numbers under flat names: how nodes report theirs. Pure.

Bytes, slices, operations and their seconds are told per peer, of which there is a bounded number, and per rail; how
long operations took, as a histogram, per transport and direction, and per rail. `telemetry.nodes` takes the names
apart again.
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
"""written, read: done here in a peer's memory; landed, served: done by a peer in memory of this messenger's."""

MAX_PEERS = 32
"""Peers told apart; when there are more, those without an open flow are added up as OTHER_PEERS."""
OTHER_PEERS = "other"

FIRST_EDGE_S = 8e-6
LATENCY_EDGES_S = tuple(FIRST_EDGE_S * (1 << power) for power in range(22))
"""Upper bounds of the latency buckets, 8 us to 16.8 s; what took longer is in one more bucket."""

_PER_FIRST_EDGE = 1 / FIRST_EDGE_S
_NBYTES, _SLICES, _OPERATIONS, _SECONDS, _BUCKETS = range(5)
_LAST = _BUCKETS + len(LATENCY_EDGES_S)

NUM_SUMS = _LAST + 1
FloatSums = npt.NDArray[np.float64]
Sums = list[float] | FloatSums
"""[NUM_SUMS]: [bytes, slices, operations, seconds, one count per latency bucket ...]"""


@dataclass(frozen=True, order=True)
class FlowKey:
    """By peer, with `rail` "": all that went this way. By rail, with `peer` "": how a transport spread the same bytes
    over its devices.
    """

    peer: str
    transport: str
    rail: str
    direction: Direction


@dataclass(frozen=True)
class FlowTotals:
    """What went one way; `latencies` counts operations per bucket of LATENCY_EDGES_S, and of those beyond the last."""

    key: FlowKey
    nbytes: int
    slices: int
    operations: int
    seconds: float
    latencies: tuple[int, ...]

    @classmethod
    def of(cls, key: FlowKey, sums: Sums) -> "FlowTotals":
        nbytes, slices, operations = (int(total) for total in sums[:_SECONDS])
        return cls(key, nbytes, slices, operations, sums[_SECONDS], tuple(int(count) for count in sums[_BUCKETS:]))

    def quantile_s(self, share: float) -> float:
        """The upper bound of the bucket that holds the operation at `share` of all; 0.0 when there was none."""
        left = share * self.operations
        for edge_s, count in zip(LATENCY_EDGES_S, self.latencies, strict=False):
            left -= count
            if count and left <= 0:
                return edge_s
        return math.inf if self.operations else 0.0


class Flow:
    """Adds for one thread at a time; ends with its last reference."""

    __slots__ = ("__weakref__", "_sums")

    def __init__(self, sums: Sums) -> None:
        self._sums = sums

    def add(self, nbytes: int, slices: int, seconds: float) -> None:
        """One operation, or part of one that travelled alone: its bytes, its slices, and how long it took."""
        sums = self._sums
        sums[0] += nbytes
        sums[1] += slices
        sums[2] += 1
        sums[3] += seconds
        # Doubling edges: the bucket is the number of bits.
        bucket = 4 + int(seconds * _PER_FIRST_EDGE).bit_length()
        sums[bucket if bucket < _LAST else _LAST] += 1


class _Events:
    """One thread's counts of events."""

    def __init__(self, counts: dict[str, int]) -> None:
        self.counts = counts


class Counters:
    """`flow` and `add` from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._flow_totals: dict[FlowKey, Sums] = {}
        self._event_totals: Counter[str] = Counter()
        # By the identity of the reference to their owner, which tells of its end in the middle of anything, where no
        # lock may be taken.
        self._open_flows: dict[int, tuple[weakref.ref[Flow], FlowKey, Sums]] = {}
        self._open_events: dict[int, tuple[weakref.ref[_Events], dict[str, int]]] = {}
        self._ended: deque[weakref.ref[Flow] | weakref.ref[_Events]] = deque()
        self._own = threading.local()

    def flow(
        self, *, peer: str, transport: str, direction: Direction, rail: str = "", sums: Sums | None = None
    ) -> Flow:
        """Sums for whoever moves bytes this way; a new Flow for each connection and direction.

        `sums`: zeros that the Flow is to add to, for a compiled loop that adds to them as well, in the same thread.
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
        """Totals by peer, transport, rail and direction, in order."""
        with self._lock:
            self._fold_ended()
            totals = {key: list(sums) for key, sums in self._flow_totals.items()}
            for _, key, sums in self._open_flows.values():
                _add(totals[key], sums)
        return [FlowTotals.of(key, totals[key]) for key in sorted(totals)]

    def events(self) -> dict[str, int]:
        """Events by name."""
        with self._lock:
            self._fold_ended()
            counts = Counter(self._event_totals)
            for _, own in self._open_events.values():
                counts.update(dict(own))
        return dict(counts)

    def snapshot(self) -> dict[str, int]:
        """Every count so far by name: events, and `bytes_`, `slices_` and `operations_<direction>_<transport>`."""
        counts = Counter(self.events())
        for flow in self.flows():
            if flow.key.rail:
                continue  # the same bytes once more, by the rails that carried them
            way = f"{flow.key.direction}_{flow.key.transport}"
            counts[f"bytes_{way}"] += flow.nbytes
            counts[f"slices_{way}"] += flow.slices
            counts[f"operations_{way}"] += flow.operations
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
        """The peer's own name while there is room for it."""
        known = {key.peer for key in self._flow_totals} - {OTHER_PEERS}
        if peer in known or len(known) < MAX_PEERS:
            return peer
        spent = known - {key.peer for _, key, _ in self._open_flows.values()}
        for key in [key for key in self._flow_totals if key.peer in spent]:
            other = FlowKey(OTHER_PEERS, key.transport, key.rail, key.direction)
            _add(self._flow_totals.setdefault(other, [0] * (_LAST + 1)), self._flow_totals.pop(key))
        return peer if spent else OTHER_PEERS


def _add(totals: Sums, sums: Sums) -> None:
    for place, amount in enumerate(list(sums)):
        totals[place] += amount


CERTIFICATE_LEFT = "tls_certificate_left_seconds"

_TOLD_EDGES = range(1, len(LATENCY_EDGES_S), 2)


def reported(counters: Counters, held: Mapping[str, int]) -> dict[str, float]:
    """Totals of events, flows and latencies, and what is `held` now."""
    flows = counters.flows()
    return {**counters.events(), **held, **_sums(flows), **_latencies(flows)}


def _sums(flows: Sequence[FlowTotals]) -> dict[str, float]:
    """flow/PEER/TRANSPORT/DIRECTION_UNIT, rail/RAIL/TRANSPORT/DIRECTION_UNIT"""
    told: dict[str, float] = {}
    for flow in flows:
        key = flow.key
        whose = f"rail/{key.rail}" if key.rail else f"flow/{key.peer}"
        name = f"{whose}/{key.transport}/{key.direction}"
        told[f"{name}_bytes"] = flow.nbytes
        told[f"{name}_slices"] = flow.slices
        told[f"{name}_operations"] = flow.operations
        told[f"{name}_seconds"] = flow.seconds
    return told


def _latencies(flows: Sequence[FlowTotals]) -> dict[str, float]:
    """latency/TRANSPORT/DIRECTION_le_64us and so on, each with what is below it, _count and _sum_ms; by rail, too."""
    told: dict[str, float] = {}
    for flow in flows:
        key = flow.key
        whose = f"rail_latency/{key.rail}" if key.rail else "latency"
        name = f"{whose}/{key.transport}/{key.direction}"
        numbers = {
            f"le_{round(LATENCY_EDGES_S[edge] * 1e6)}us": sum(flow.latencies[: edge + 1]) for edge in _TOLD_EDGES
        }
        for part, number in (numbers | {"count": flow.operations, "sum_ms": flow.seconds * 1e3}).items():
            told[f"{name}_{part}"] = told.get(f"{name}_{part}", 0) + number
    return told
