"""Picture of the benchmark: throughput and latency by size, of transports between hosts and within a host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

ROWS = (
    ("tcp", ("tcp", "mooncake", "nixl_tcp", "plain_socket", "iperf3")),
    ("one host", ("shm", "nixl", "memcpy")),
)
COLUMNS = (("gbps", "GB/s, several batches under way"), ("p50_us", "µs for one batch, median (log scale)"))
SIZES = {"64KiB": "64 KiB", "1MiB": "1 MiB", "16MiB": "16 MiB", "2000x16KiB": "2,000 x 16 KiB"}
LABELS = {
    "tcp": "Moonpool",
    "shm": "Moonpool",
    "mooncake": "Mooncake Transfer Engine",
    "nixl": "NIXL",
    "nixl_tcp": "NIXL (UCX_TLS=tcp)",
    "plain_socket": "Python socket",
    "iperf3": "iperf3, not acknowledged",
    "memcpy": "memcpy",
}
COLOURS = {
    "tcp": "#2f6fb0",
    "shm": "#2f6fb0",
    "mooncake": "#d98032",
    "nixl": "#4f9d69",
    "nixl_tcp": "#4f9d69",
    "plain_socket": "#b8b8b8",
    "iperf3": "#7d7d7d",
    "memcpy": "#7d7d7d",
}
DIRECTION = "write"


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the figures of writes in the format of the file's suffix (SVG, PNG)."""
    figure, grid = plt.subplots(len(ROWS), len(COLUMNS), figsize=(11, 6.6))
    for axes_row, (where, names) in zip(grid, ROWS, strict=True):
        for axes, (metric, unit) in zip(axes_row, COLUMNS, strict=True):
            _panel(axes, result["by_size"], names, metric)
            axes.set_title(f"Writes, {where}: {unit}", fontsize=10)
        legend = axes_row[0].legend(
            fontsize=9, frameon=False, loc="upper left", bbox_to_anchor=(-0.02, -0.12), ncols=len(names)
        )
        legend.set_in_layout(False)  # because it extends below the next panel
    figure.tight_layout(h_pad=4.0, rect=(0, 0.05, 1, 1))
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def _panel(axes: Axes, by_size: dict[str, Any], names: tuple[str, ...], metric: str) -> None:
    sizes = [size for size in SIZES if size in by_size]
    present = [name for name in names if any(metric in by_size[s].get(DIRECTION, {}).get(name, {}) for s in sizes)]
    width = 0.8 / max(1, len(present))
    for index, name in enumerate(present):
        found = [(place, by_size[size][DIRECTION].get(name, {}).get(metric)) for place, size in enumerate(sizes)]
        bars = [
            (place + (index - (len(present) - 1) / 2) * width, value) for place, value in found if value is not None
        ]
        axes.bar(
            [place for place, _ in bars],
            [value for _, value in bars],
            width * 0.92,
            color=COLOURS[name],
            label=LABELS[name],
        )
    if metric == "p50_us":
        axes.set_yscale("log")
    axes.set_xticks(range(len(sizes)), [SIZES[size] for size in sizes], fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
