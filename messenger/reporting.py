"""What a messenger counts, as numbers under flat names: how nodes report theirs. Pure.

Bytes, slices, operations and their seconds are told per peer, of which there is a bounded number, and per rail; how
long operations took, as a histogram, per transport and direction, and per rail. `telemetry.series` takes the names
apart again.
"""

from collections.abc import Mapping, Sequence

from messenger.counters import LATENCY_EDGES_S, Counters, FlowTotals

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
