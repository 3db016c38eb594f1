"""Plot of a profile: measured and fitted times of prefills and decode steps."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from moonpool.errors import ConfigError
from moonpool.profiling.fitting import MeasuredPoint
from worker.policy.cost_profile import CostProfile

__all__ = ["GRID", "MUTED", "STYLE", "check_picture_path", "draw", "save_picture"]

_INK, MUTED, GRID = "#1f2328", "#59636e", "#d8dee4"
_COLOURS: Final = ("#0969da", "#bc4c00", "#1a7f37", "#8250df", "#cf222e", "#9a6700")
STYLE: Final[dict[Any, Any]] = {
    "svg.hashsalt": "profile",
    "font.size": 10.0,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "text.color": _INK,
    "lines.linewidth": 1.6,
    "lines.markersize": 5.0,
}


def check_picture_path(path: Path) -> None:
    """Raise ConfigError before measuring if the plot cannot be written."""
    if path.suffix not in (".svg", ".png"):
        raise ConfigError(f"cannot draw {path}: the name must end in .svg or .png")
    if not path.parent.is_dir():
        raise ConfigError(f"cannot draw {path}: there is no folder {path.parent}")


def save_picture(figure: Figure, path: Path) -> None:
    """Write the file, the same bytes for the same figure. Raises ConfigError if it cannot be written."""
    try:
        figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)
    except OSError as error:
        raise ConfigError(f"cannot draw {path}: {error}") from error


def draw(profile: CostProfile, prefills: Sequence[MeasuredPoint], steps: Sequence[MeasuredPoint], path: Path) -> None:
    """Plot medians as dots and the fit as lines. Raises ConfigError if the file cannot be written."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 4.4), layout="constrained")
        left, right = figure.subplots(1, 2)
        for colour, reused in zip(_COLOURS, sorted({p.x[1] for p in prefills}), strict=False):
            mine = sorted((p.x[0], p.median_s) for p in prefills if p.x[1] == reused)
            _line(
                left,
                mine,
                [profile.prefill_s(new, reused) for new, _ in mine],
                colour,
                f"after {reused:,} reused tokens",
            )
        each = sorted({p.x[1] // p.x[0] for p in steps})
        for colour, context in zip(_COLOURS, each, strict=False):
            mine = sorted((p.x[0], p.median_s) for p in steps if p.x[1] == p.x[0] * context)
            _line(
                right,
                mine,
                [profile.decode_s(n, n * context) for n, _ in mine],
                colour,
                f"{context:,} tokens of context each",
            )
        _finish(left, "Prefill", "new tokens", "ms")
        _finish(right, "Decode step", "sequences in the batch", "")
        figure.suptitle(f"{profile.name}: dots measured, lines fitted", fontsize=10, color=MUTED)
        save_picture(figure, path)


def _line(axes: Axes, measured: Sequence[tuple[int, float]], fitted: Sequence[float], colour: str, label: str) -> None:
    sizes = [size for size, _ in measured]
    axes.plot(sizes, [1e3 * seconds for _, seconds in measured], "o", color=colour)
    axes.plot(sizes, [1e3 * seconds for seconds in fitted], "-", color=colour, label=label)


def _finish(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.grid(True, color=GRID, linewidth=0.6)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.legend(frameon=False, fontsize=9)
