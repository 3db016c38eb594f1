"""Table and plot of tuning results."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from simulator.errors import BadSetting
from simulator.serving.tuning import Tuning, TuningPoint, Varied

_INK, _MUTED, _GRID = "#1f2328", "#59636e", "#d8dee4"
_ENDS: Final = (("good", "#1a7f37"), ("rejected", "#8c959f"), ("missed", "#cf222e"))
_NAMES: Final[dict[Varied, str]] = {
    "ttft": "TTFT objective, s",
    "tbt": "TBT objective, s",
    "split": "prefill + decode nodes",
}
_STYLE: Final[dict[Any, Any]] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _MUTED,
    "text.color": _INK,
    "svg.hashsalt": "moonpool",
}


def tuning_tables(found: Tuning) -> list[Table]:
    """Return one table per varied quantity."""
    tables = []
    for varied, name in _NAMES.items():
        points = found.of(varied)
        if not points:
            continue
        table = Table(name, "goodput, req/s", "good", "rejected", "missed", "TTFT P90, s", "TBT P90, ms", box=None)
        for point in points:
            table.add_row(*_row(point), style="bold" if point.is_base else "")
        tables.append(table)
    return tables


def _row(point: TuningPoint) -> list[str]:
    mean, half = point.goodput.mean, (point.goodput.high - point.goodput.low) / 2
    shares = [f"{share.mean:.1%}" for share in (point.good, point.rejected, point.missed)]
    times = [f"{point.ttft_p90_s.mean:.1f}", f"{1000 * point.tbt_p90_s.mean:.1f}"]
    return [_value(point), f"{mean:.2f} ± {half:.2f}", *shares, *times]


def _value(point: TuningPoint) -> str:
    if point.varied == "split":
        return f"{point.prefill_nodes}+{point.decode_nodes}"
    return f"{point.ttft_objective_s if point.varied == 'ttft' else point.tbt_objective_s:g}"


def plot_tuning(found: Tuning, path: Path) -> None:
    """Plot a column per varied quantity: goodput above, request outcomes below. Raises BadSetting."""
    columns = [(name, points) for varied, name in _NAMES.items() if (points := found.of(varied))]
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(3.6 * len(columns) + 0.6, 5.2), layout="constrained")
        grid = figure.subplots(2, len(columns), squeeze=False, sharey="row", height_ratios=(1.25, 1))
        for column, (name, points) in enumerate(columns):
            _goodput(grid[0][column], points)
            _ends(grid[1][column], points)
            grid[1][column].set_xlabel(name)
        grid[0][0].set_ylim(0, 1.05 * max(point.goodput.high for point in found.points))
        grid[0][0].set_ylabel("goodput, requests/s")
        grid[1][0].set_ylabel("of the requests, %")
        settings = found.spec.settings
        figure.suptitle(
            f"{found.spec.rate_per_s:g} requests/s on {settings.prefill_nodes}+{settings.decode_nodes} nodes, TTFT "
            f"{settings.ttft_objective_s:g} s, TBT {settings.tbt_objective_s:g} s (dark), and alternatives",
            fontsize=10,
        )
        handles, labels = grid[1][0].get_legend_handles_labels()
        figure.legend(handles, labels, frameon=False, fontsize=8, ncols=3, loc="outside lower center")
        try:
            figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
        except OSError as error:
            raise BadSetting(f"cannot write the plot {path}: {error.strerror or error}") from error


def _goodput(axes: Axes, points: Sequence[TuningPoint]) -> None:
    means = [point.goodput.mean for point in points]
    errors = [[p.goodput.mean - p.goodput.low for p in points], [p.goodput.high - p.goodput.mean for p in points]]
    colours = ["#0550ae" if point.is_base else "#80b3f0" for point in points]
    axes.bar(range(len(points)), means, color=colours, width=0.66, yerr=errors, error_kw={"ecolor": _INK, "capsize": 3})
    axes.set_xticks(range(len(points)), ["" for _ in points])
    axes.grid(axis="y", color=_GRID, linewidth=0.7)
    axes.set_axisbelow(True)


def _ends(axes: Axes, points: Sequence[TuningPoint]) -> None:
    begins = [0.0] * len(points)
    for name, colour in _ENDS:
        heights = [100 * getattr(point, name).mean for point in points]
        axes.bar(range(len(points)), heights, bottom=begins, color=colour, width=0.66, label=name)
        begins = [begin + height for begin, height in zip(begins, heights, strict=True)]
    axes.set_xticks(range(len(points)), [_value(point) for point in points])
    axes.set_ylim(0, 100)
