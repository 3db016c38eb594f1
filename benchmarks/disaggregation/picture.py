"""Bar charts of the comparison: medians over the repeats, with whiskers from minimum to maximum."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from benchmarks.disaggregation.measure import SHAPES, Run
from benchmarks.disaggregation.tables import FIGURES, values

COLOURS = ("#2f6fb0", "#d98032")
PANELS = (
    ("Time to first token", ("ttft_p50_s", "ttft_p90_s", "ttft_p99_s")),
    ("Time between tokens", ("tpot_p50_s", "tpot_p99_s", "tbt_p99_s")),
    ("Requests per second", ("request_rps", "goodput_rps")),
)
LABELS = {"request_rps": "completed", "goodput_rps": "within objectives"}


def draw(runs: Sequence[Run], path: Path) -> None:
    """Draw a row of panels per speed, in the format of the file's suffix (SVG, PNG)."""
    speeds = sorted({run.speed for run in runs})
    figure, grid = plt.subplots(len(speeds), len(PANELS), figsize=(11, 3.2 * len(speeds)), squeeze=False)
    for axes_row, speed in zip(grid, speeds, strict=True):
        for axes, (title, names) in zip(axes_row, PANELS, strict=True):
            _panel(axes, runs, speed, names)
            axes.set_title(f"{title}, trace at {speed:g}x", fontsize=10)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(SHAPES), frameon=False)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def _panel(axes: Axes, runs: Sequence[Run], speed: float, names: Sequence[str]) -> None:
    for index, (shape, colour) in enumerate(zip(SHAPES, COLOURS, strict=True)):
        for place, name in enumerate(names):
            _, factor, unit, _ = FIGURES[name]
            found = [value * factor for value in values(runs, shape, speed, name)]
            if not found:
                continue
            middle = statistics.median(found)
            whiskers = [[middle - min(found)], [max(found) - middle]]
            label = shape if place == 0 else None
            axes.bar(place + (index - 0.5) * 0.38, middle, 0.36, color=colour, yerr=whiskers, capsize=3, label=label)
            axes.set_ylabel(unit)
    axes.set_xticks(range(len(names)), [LABELS.get(name, FIGURES[name][0]) for name in names], fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
