"""Pictures of a report as inline SVG, coloured by the page's CSS variables to support light and dark mode.

matplotlib draws with placeholder colours, which are then replaced by `var(--…)`.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator

from loadtest import figures

INK, MUTED, GRID, SURFACE = "#010101", "#020202", "#030303", "#040404"
BLUE, ORANGE, GREEN, RED, PURPLE = "#050505", "#060606", "#070707", "#080808", "#090909"
_VARIABLES: Final = {
    INK: "ink",
    MUTED: "muted",
    GRID: "grid",
    SURFACE: "surface",
    BLUE: "blue",
    ORANGE: "orange",
    GREEN: "green",
    RED: "red",
    PURPLE: "purple",
}
SERIES: Final = (BLUE, ORANGE, GREEN, PURPLE, RED)
MAX_POINTS: Final = 3000
LEAST_S: Final = 1e-6
"""Smallest duration drawn on logarithmic axes; intervals between tokens of the same event are 0."""
_STYLE: Final[dict[Any, Any]] = {
    "svg.fonttype": "none",
    "font.size": 10.0,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.xmargin": 0.01,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "text.color": INK,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "legend.fontsize": 9.5,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
}


class Picture:
    """One set of axes; `svg` is set by `finish`."""

    def __init__(self, name: str, figure: Figure, axes: Axes) -> None:
        self.axes = axes
        self.svg = ""
        self._name = name
        self._figure = figure

    def finish(self) -> None:
        """Render the figure as inline SVG."""
        raw = io.StringIO()
        self._figure.savefig(raw, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        self.svg = inline_svg(raw.getvalue(), self._name)


@contextmanager
def picture(name: str, *, x: str, y: str) -> Iterator[Picture]:
    """Open a picture to draw on; it is rendered at the end of the block. `name`: id prefix, unique on the page."""
    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(6.4, 2.9), layout="constrained")
        drawn = Picture(name, figure, figure.add_subplot())
        drawn.axes.set_xlabel(x)
        drawn.axes.set_ylabel(y)
        yield drawn
        drawn.finish()


def inline_svg(svg: str, name: str) -> str:
    """Convert an SVG document to an element of an HTML page: no prologue, prefixed ids, colours by CSS variable."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg)
    svg = svg.replace("xlink:href=", "href=")
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = svg.replace('href="#', f'href="#{name}-').replace("url(#", f"url(#{name}-")
    svg = re.sub(r'(<svg)\s+height="[^"]*"', r"\1", svg)
    svg = re.sub(r'(<svg[^>]*?)\swidth="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r"font: [^;\"]*?([\d.]+px)[^;\"]*", r"font-size: \1", svg)
    for placeholder, variable in _VARIABLES.items():
        svg = svg.replace(placeholder, f"var(--{variable})")
    return svg.replace("<svg", f'<svg role="img" aria-label="{name}"', 1)


def seconds_axis(axes: Axes, which: str = "y") -> None:
    """Label ticks as durations; a short logarithmic axis gets 1, 2 and 5 of each decade. Call after drawing."""
    axis = axes.yaxis if which == "y" else axes.xaxis
    if axis.get_scale() == "log":
        low, high = axes.get_ylim() if which == "y" else axes.get_xlim()
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 300 else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: figures.round_seconds(value)))
    axis.set_minor_formatter(FuncFormatter(lambda value, _: ""))


def share_axis(axes: Axes) -> None:
    """Label the y axis as percentages."""
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))


def size_axis(axes: Axes) -> None:
    """Label the y axis as bytes."""
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: figures.size(value).replace(".0 ", " ")))


def distribution(axes: Axes, values: Sequence[float], *, color: str, label: str) -> None:
    """Draw the CDF of the finite values, with marks at p50, p90 and p99; nothing if there are none."""
    ordered = np.sort(np.maximum([v for v in values if np.isfinite(v)], LEAST_S))
    if not len(ordered):
        return
    shares = np.arange(1, len(ordered) + 1) / len(ordered)
    kept = np.unique(np.linspace(0, len(ordered) - 1, min(len(ordered), 400)).astype(int))
    axes.plot(ordered[kept], shares[kept], color=color, label=label)
    marks = ordered[[int(np.ceil(q * len(ordered))) - 1 for q in (0.5, 0.9, 0.99)]]
    axes.plot(marks, (0.5, 0.9, 0.99), "o", color=color, markersize=4.5, markeredgecolor=SURFACE)


def points(axes: Axes, x: Sequence[float], y: Sequence[float], *, color: str, label: str) -> None:
    """Draw a scatter plot of durations; of more than MAX_POINTS points, only every k-th."""
    step = -(-len(x) // MAX_POINTS) or 1
    shown = np.maximum(y[::step], LEAST_S)
    axes.plot(x[::step], shown, "o", color=color, label=label, markersize=3, alpha=0.55, markeredgewidth=0)


def running(x: Sequence[float], y: Sequence[float], *, share: float, bins: int = 40) -> tuple[list[float], list[float]]:
    """Return a quantile of y over equal bins of x as (bin centres, values); empty bins are left out."""
    if not len(x):
        return [], []
    edges = np.linspace(min(x), max(x) + 1e-9, bins + 1)
    place = np.clip(np.searchsorted(edges, x, side="right") - 1, 0, bins - 1)
    values = np.maximum(y, LEAST_S)
    filled = [b for b in range(bins) if (place == b).any()]
    centres = [float((edges[b] + edges[b + 1]) / 2) for b in filled]
    return centres, [float(np.quantile(values[place == b], share)) for b in filled]


def averaged(x: Sequence[float], y: Sequence[float], *, bins: int = 240) -> tuple[list[float], list[float]]:
    """Return means of y over equal bins of x as (bin centres, means), or the samples if there are at most `bins`."""
    if len(x) <= bins:
        return list(x), list(y)
    edges = np.linspace(min(x), max(x), bins + 1)
    counts, sums = np.histogram(x, edges)[0], np.histogram(x, edges, weights=y)[0]
    filled = counts > 0
    centres = (edges[:-1] + edges[1:]) / 2
    return list(centres[filled]), list(sums[filled] / counts[filled])


def legend(axes: Axes, **where: object) -> None:
    """Add a one-line legend above the axes if anything is labelled."""
    handles, _ = axes.get_legend_handles_labels()
    if handles:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=4, borderaxespad=0.1, handlelength=1.4, **where)
