"""Plan of a measurement (sizes, directions, transports, durations), and its results as a table and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from messenger.priority import Priority
from moonpool.errors import ConfigError

DIRECTIONS = ("write", "read")
TRANSPORTS = ("auto", "rdma", "tcp", "shm")
PRIORITIES = tuple(priority.name.lower() for priority in Priority)
MAX_REGION_NBYTES = 4 << 30
LEAST_REGION_NBYTES = 64 << 20
MAX_SLICES = 1 << 16
DIGEST_UNIT = 256  # bytes; digests need multiples of it


@dataclass(frozen=True)
class BatchShape:
    """A batch of slices; several slices are not contiguous in memory, like the layers of scattered blocks."""

    slice_nbytes: int
    slices: int = 1

    @property
    def nbytes(self) -> int:
        return self.slice_nbytes * self.slices

    @property
    def stride(self) -> int:
        return self.slice_nbytes * (2 if self.slices > 1 else 1)

    @property
    def span(self) -> int:
        return self.stride * self.slices

    def offsets(self, base: int) -> NDArray[np.int64]:
        """Return the offsets of the slices of the batch at `base`, int64 [slices]."""
        return base + self.stride * np.arange(self.slices, dtype=np.int64)

    def rows(self, base: int) -> NDArray[np.int64]:
        """Return local offset, remote offset and bytes of each slice, int64 [slices, 3]."""
        offsets = self.offsets(base)
        return np.stack([offsets, offsets, np.full_like(offsets, self.slice_nbytes)], axis=1)


@dataclass(frozen=True)
class Cell:
    """One line of the result: a batch shape and a direction."""

    shape: BatchShape
    direction: str


@dataclass(frozen=True)
class BenchPlan:
    """Parameters of a measurement: `seconds` for each cell, a third of it for latency; `deadline_s` for each batch."""

    sizes: tuple[int, ...]
    slices: tuple[int, ...]
    directions: tuple[str, ...]
    transports: tuple[str, ...]
    window: int
    seconds: float
    digests: bool
    deadline_s: float
    priority: str = "normal"

    def __post_init__(self) -> None:
        for flag, values, allowed in (
            ("--direction", self.directions, DIRECTIONS),
            ("--transport", self.transports, TRANSPORTS),
            ("--priority", (self.priority,), PRIORITIES),
        ):
            for value in values:
                if value not in allowed:
                    raise ConfigError(f"{flag} must be one of {', '.join(allowed)}, got {value!r}")
        for size in self.sizes:
            if size < 1 or (self.digests and size % DIGEST_UNIT):
                least = f"a multiple of {DIGEST_UNIT} bytes with --digests" if self.digests else "at least 1 byte"
                raise ConfigError(f"--size must be {least}, got {size}")
        for slices in self.slices:
            if not 1 <= slices <= MAX_SLICES:
                raise ConfigError(f"--slices must be from 1 to {MAX_SLICES}, got {slices}")
        if self.largest_span > MAX_REGION_NBYTES:
            raise ConfigError(
                f"a batch must span at most {MAX_REGION_NBYTES} bytes of memory, got {self.largest_span} (slices are "
                "separated by gaps of their own size): reduce --size or --slices"
            )

    @property
    def largest_span(self) -> int:
        return max(cell.shape.span for cell in self.cells())

    @property
    def region_nbytes(self) -> int:
        """Bytes of memory on each side: room for two of the largest batches, and larger than CPU caches."""
        return min(max(2 * self.largest_span, LEAST_REGION_NBYTES), MAX_REGION_NBYTES)

    def cells(self) -> Iterator[Cell]:
        for slices in self.slices:
            for size in self.sizes:
                for direction in self.directions:
                    yield Cell(BatchShape(size, slices), direction)


def size_text(nbytes: int) -> str:
    """Return an exact size with its largest whole unit: 64 KiB, 1 MiB, 1000 B."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


GIB = 1 << 30


@dataclass(frozen=True)
class VerifiedBatches:
    """The server's report on batches since the last one: compared, wrong, and its CPU seconds in total."""

    verified: int
    wrong: int
    cpu_s: float


@dataclass(frozen=True)
class Timed:
    """Latencies of single batches; number and seconds of windowed batches; CPU seconds of all."""

    latencies_s: Sequence[float]
    batches: int
    seconds: float
    cpu_s: float
    wrong: int = 0


@dataclass(frozen=True)
class CellResult:
    """Result of one cell. `gbps` is in 1e9 bytes per second; CPU is per GiB moved, on either side."""

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
    """Return a table with one row per cell."""
    picture = Table(header_style="bold", box=None, pad_edge=False)
    for name in ("transport", "direction", "batch"):
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
