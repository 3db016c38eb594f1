"""What a messenger counts, as numbers under flat names: how nodes report theirs. Pure.

Bytes, slices, operations and their seconds are told per peer, of which there is a bounded number; how long operations
took, as a histogram, per transport, rail and direction. `telemetry.series` takes the names apart again.
"""

from collections.abc import Mapping, Sequence

from messenger.counters import LATENCY_EDGES_S, Counters, FlowTotals

_TOLD_EDGES = range(1, len(LATENCY_EDGES_S), 2)


def reported(counters: Counters, held: Mapping[str, int]) -> dict[str, float]:
    """Totals of events, flows and latencies, and what is `held` now."""
    flows = counters.flows()
    return {**counters.events(), **held, **_by_peer(flows), **_latencies(flows)}


def _by_peer(flows: Sequence[FlowTotals]) -> dict[str, float]:
    """flow/PEER/TRANSPORT/RAIL/DIRECTION_UNIT"""
    told: dict[str, float] = {}
    for flow in flows:
        key = flow.key
        name = f"flow/{key.peer}/{key.transport}/{key.rail}/{key.direction}"
        told[f"{name}_bytes"] = flow.nbytes
        told[f"{name}_slices"] = flow.slices
        told[f"{name}_operations"] = flow.operations
        told[f"{name}_seconds"] = flow.seconds
    return told


def _latencies(flows: Sequence[FlowTotals]) -> dict[str, float]:
    """latency/TRANSPORT/RAIL/DIRECTION_le_64us and so on, each with what is below it, _count and _sum_ms."""
    told: dict[str, float] = {}
    for flow in flows:
        key = flow.key
        name = f"latency/{key.transport}/{key.rail}/{key.direction}"
        numbers = {
            f"le_{round(LATENCY_EDGES_S[edge] * 1e6)}us": sum(flow.latencies[: edge + 1]) for edge in _TOLD_EDGES
        }
        for part, number in (numbers | {"count": flow.operations, "sum_ms": flow.seconds * 1e3}).items():
            told[f"{name}_{part}"] = told.get(f"{name}_{part}", 0) + number
    return told
