"""Measures how long bytes take between two processes of this host: by shared memory and by TCP, with the messenger."""

from __future__ import annotations

from rich.console import Console

from moonpool.profiling.fitting import fit, fit_error
from moonpool.transfer_bench.plan import Plan, Tls
from moonpool.transfer_bench.run import measure_here
from worker.policy.cost_profile import Range, TransferCost

__all__ = ["measure_transfers"]

_SIZES = tuple(1 << power for power in (14, 16, 18, 20, 22, 24))
# Within a host pools are read by shared memory; between hosts by TCP where there is no RDMA.
_PATHS = {("shm", "read"): "load", ("tcp", "read"): "fetch", ("tcp", "write"): "push"}


def measure_transfers(seconds: float, console: Console) -> dict[str, TransferCost]:
    """By path: "load", "fetch" and "push", of batches awaited one at a time. Raises TransferBenchFailed."""
    plan = Plan(
        sizes=_SIZES,
        slices=(1,),
        directions=("read", "write"),
        transports=("shm", "tcp"),
        window=1,
        seconds=seconds,
        digests=False,
        deadline_s=30.0,
    )
    outcome = measure_here(plan, Tls(tls_cert=None, tls_key=None, tls_ca=None, tls_name=""), console)
    found = {}
    for (transport, direction), path in _PATHS.items():
        cells = [r for r in outcome.results if (r.transport, r.direction) == (transport, direction)]
        if len(cells) < len(_SIZES):
            continue  # interrupted
        features = [(1.0, float(cell.batch_bytes)) for cell in cells]
        taken = [cell.p50_us / 1e6 for cell in cells]
        fixed, per_byte = coefficients = fit(features, taken)
        nbytes = Range(_SIZES[0], _SIZES[-1])
        found[path] = TransferCost(fixed, per_byte, nbytes, fit_error(features, taken, coefficients))
    return found
