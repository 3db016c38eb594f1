"""What was measured: one result per cell, as a table for people and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.table import Table

from moonpool.transfer_bench.plan import Cell, size_text

GIB = 1 << 30


@dataclass(frozen=True)
class Settled:
    """What the owner tells of the batches since it was last asked: compared, of these wrong; its CPU seconds so far."""

    verified: int
    wrong: int
    cpu_s: float


@dataclass(frozen=True)
class Timed:
    """Seconds of batches awaited one at a time; batches and seconds of those with a window; CPU seconds of all."""

    latencies_s: Sequence[float]
    batches: int
    seconds: float
    cpu_s: float
    wrong: int = 0


@dataclass(frozen=True)
class CellResult:
    """A line of the result. `gbps`: 1e9 bytes per second; CPU is per GiB moved, on either side, both ways of timing."""

    transport: str
    direction: str
    slice_bytes: int
    slices: int
    batch_bytes: int
    batches: int
    gbps: float
    p50_us: float
    p90_us: float
    p99_us: float
    max_us: float
    cpu_s_per_gib_here: float
    cpu_s_per_gib_there: float
    checked_bytes: int
    digests_compared: int

    @classmethod
    def of(cls, transport: str, cell: Cell, timed: Timed, owner_cpu_s: float, compared: int) -> CellResult:
        nbytes = cell.shape.nbytes
        moved_gib = nbytes * (timed.batches + len(timed.latencies_s)) / GIB
        p50, p90, p99, longest = (np.quantile(timed.latencies_s, (0.5, 0.9, 0.99, 1.0)) * 1e6).round(1).tolist()
        return cls(
            transport=transport,
            direction=cell.direction,
            slice_bytes=cell.shape.slice_nbytes,
            slices=cell.shape.slices,
            batch_bytes=nbytes,
            batches=timed.batches,
            gbps=round(nbytes * timed.batches / timed.seconds / 1e9, 4),
            p50_us=p50,
            p90_us=p90,
            p99_us=p99,
            max_us=longest,
            cpu_s_per_gib_here=round(timed.cpu_s / moved_gib, 4),
            cpu_s_per_gib_there=round(owner_cpu_s / moved_gib, 4),
            checked_bytes=nbytes,
            digests_compared=compared,
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def table(results: Sequence[CellResult]) -> Table:
    """One line per cell."""
    picture = Table(header_style="bold", box=None, pad_edge=False)
    for name in ("transport", "way", "batch"):
        picture.add_column(name)
    for name in ("GB/s", "p50 µs", "p90 µs", "p99 µs", "CPU s/GiB here", "there"):
        picture.add_column(name, justify="right")
    for result in results:
        size = size_text(result.slice_bytes)
        picture.add_row(
            result.transport,
            result.direction,
            size if result.slices == 1 else f"{result.slices} x {size}",
            f"{result.gbps:.3f}",
            *(f"{value:,.0f}" for value in (result.p50_us, result.p90_us, result.p99_us)),
            f"{result.cpu_s_per_gib_here:.2f}",
            f"{result.cpu_s_per_gib_there:.2f}",
        )
    return picture
